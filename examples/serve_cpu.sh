#!/usr/bin/env bash
# Serve the small built-in GPT on the CPU, 2 replicas: as `make serve`, but under torchrun.
#
#   examples/serve_cpu.sh [flags of the tool, which win over those below]
#
# Run `make setup` first. Ctrl-C ends it; torchrun then prints a traceback of its own. Its processes
# meet at a TCP port that listens on every interface and asks for no password; those of `make serve`
# meet at a file (tools/launch.py).
set -euo pipefail
repo=$(cd "$(dirname "$0")/.." && pwd)
PATH="$repo/.venv/bin:$PATH"

export OMP_NUM_THREADS=1  # each replica is one thread; more would fight over the cores

torchrun=(
    --standalone        # all on this machine: needs no address or port to meet at
    --nproc-per-node 2  # one process a replica
)

server=(
    # No --load and no --num-layers: this is what selects the built-in model.
    --device cpu
    --port 5000
    --inference-dynamic-batching-prefix-caching
    --inference-dynamic-batching-prefix-caching-eviction-policy lru
    --inference-dynamic-batching-prefix-caching-coordinator-policy longest_prefix
    # Only whole blocks are cached. GPU kernels want blocks of 256 tokens; on the CPU shorter ones
    # let a short chat hit as well.
    --inference-dynamic-batching-block-size 64
)

exec "${TORCHRUN:-torchrun}" "${torchrun[@]}" \
    "$repo/tools/run_dynamic_text_generation_server.py" "${server[@]}" "$@"
