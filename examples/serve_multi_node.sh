#!/usr/bin/env bash
# Serve a Megatron checkpoint on several nodes of 8 GPUs: replicas of 2 GPUs each (TP 2), all of
# them behind one coordinator. Run it on every node, with that node's NODE_RANK and SERVE_HOST,
# all else equal; on the first of two:
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 SERVE_HOST=10.0.0.1 \
#       CHECKPOINT=DIR TOKENIZER=NAME_OR_DIR examples/serve_multi_node.sh \
#       [flags of the tool or of Megatron, which win over those below]
#
# serve_one_node_8gpu.sh explains the flags that are not explained here.
set -euo pipefail
repo=$(cd "$(dirname "$0")/.." && pwd)

: "${NNODES:?set it to the number of nodes}"
: "${NODE_RANK:?set it to the number of this node, from 0}"
: "${MASTER_ADDR:?set it to the address of node 0}"
: "${SERVE_HOST:?set it to the address of this node that clients shall use}"
: "${CHECKPOINT:?set it to what Megatron was given as --save (with --ckpt-format torch_dist)}"
: "${TOKENIZER:?set it to the name or directory of a Hugging Face tokenizer}"

export CUDA_DEVICE_MAX_CONNECTIONS=1
export OMP_NUM_THREADS=1

torchrun=(
    --nnodes "$NNODES"
    --node-rank "$NODE_RANK"  # so that rank 0, which starts the coordinator, is on node 0
    --nproc-per-node "${GPUS_PER_NODE:-8}"
    --master-addr "$MASTER_ADDR"
    --master-port "${MASTER_PORT:-29500}"
)

server=(
    --load "$CHECKPOINT"  # every node reads it: a shared file system, or a copy on each
    --use-checkpoint-args
    --bf16
    --no-use-tokenizer-model-from-checkpoint-args
    --tokenizer-type "${TOKENIZER_TYPE:-HuggingFaceTokenizer}"
    --tokenizer-model "$TOKENIZER"
    --tensor-model-parallel-size 2  # no more than a node has: its links are the fast ones

    --inference-max-seq-length 32768
    --inference-dynamic-batching-buffer-size-gb 40
    --inference-dynamic-batching-block-size 256
    --inference-dynamic-batching-prefix-caching
    --inference-dynamic-batching-prefix-caching-eviction-policy lru
    --inference-dynamic-batching-prefix-caching-coordinator-policy longest_prefix

    # All front ends ask the one coordinator: a chat may use any of them, and a new one each turn.
    # On every rank, they spread the work of HTTP and tokenizing over the nodes' CPUs.
    --frontend-on-all-ranks
    # There is no authentication, and by default each node serves only itself. This asks for more:
    # whoever reaches that address. The URLs name it, so it must be one address, not 0.0.0.0.
    --host "$SERVE_HOST"
    # Rank 0, on node 0, writes the URLs of all ranks here once all of them accept connections.
    --url-file urls.json
)

exec "${TORCHRUN:-torchrun}" "${torchrun[@]}" \
    "$repo/tools/run_dynamic_text_generation_server.py" "${server[@]}" "$@"
