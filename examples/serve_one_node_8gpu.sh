#!/usr/bin/env bash
# Serve a Megatron checkpoint on one node of 8 GPUs: 4 replicas of 2 GPUs each (TP 2 x DP 4).
#
#   CHECKPOINT=DIR TOKENIZER=NAME_OR_DIR examples/serve_one_node_8gpu.sh \
#       [flags of the tool or of Megatron, which win over those below]
#
# Run it in an environment that has this plugin and what the checkpoint's model needs:
# Transformer Engine, flash-attn, and transformers for the tokenizer.
set -euo pipefail
repo=$(cd "$(dirname "$0")/.." && pwd)

: "${CHECKPOINT:?set it to what Megatron was given as --save (with --ckpt-format torch_dist)}"
: "${TOKENIZER:?set it to the name or directory of a Hugging Face tokenizer}"

# Megatron insists on it for tensor parallelism on GPUs older than Blackwell.
export CUDA_DEVICE_MAX_CONNECTIONS=1
export OMP_NUM_THREADS=1  # the work is on the GPUs

torchrun=(
    --standalone        # all on this machine: needs no address or port to meet at
    --nproc-per-node 8  # one process a GPU
)

server=(
    --load "$CHECKPOINT"
    --use-checkpoint-args  # number of layers, sizes, …: as they were saved, not from flags
    --bf16                 # not among what is taken from there; nor is, say, --qk-layernorm
    # The tokenizer would be, at its path on the machine that trained.
    --no-use-tokenizer-model-from-checkpoint-args
    --tokenizer-type "${TOKENIZER_TYPE:-HuggingFaceTokenizer}"
    --tokenizer-model "$TOKENIZER"

    # 8 GPUs / 2 = 4 replicas. The fewer GPUs a replica takes, the more replicas there are to
    # spread load over; it must take enough for the weights and a KV cache that holds many chats.
    --tensor-model-parallel-size 2

    # Prompt and answer together. Megatron's 2560 is too short for chats of many turns.
    --inference-max-seq-length 32768
    # KV cache on each GPU: what the weights leave free. Histories that do not fit are recomputed.
    --inference-dynamic-batching-buffer-size-gb 40
    --inference-dynamic-batching-block-size 256  # flash-attn's paged cache wants multiples of 256

    --inference-dynamic-batching-prefix-caching
    # lru keeps a history until its space is needed; ref_zero, Megatron's default, drops it as soon
    # as its answer is sent, so that no turn would ever find the one before.
    --inference-dynamic-batching-prefix-caching-eviction-policy lru
    --inference-dynamic-batching-prefix-caching-coordinator-policy longest_prefix

    # There is no authentication, so only this machine is served. To serve others, ask for it:
    # the address of one interface, or 0.0.0.0 for all of them.
    --host 127.0.0.1
    --port 5000

    # Rank 0's front ends suffice for most traffic. If they are the bottleneck (long prompts are
    # tokenized there), every rank can host some, on a port of its own; clients read the
    # addresses from the file.
    # --frontend-on-all-ranks
    # --url-file urls.json

    # Replays decoding steps as CUDA graphs: faster, at the price of a longer start.
    # --cuda-graph-impl local
)

exec "${TORCHRUN:-torchrun}" "${torchrun[@]}" \
    "$repo/tools/run_dynamic_text_generation_server.py" "${server[@]}" "$@"
