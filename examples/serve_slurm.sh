#!/usr/bin/env bash
#SBATCH --job-name=megatron-serve
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# serve_multi_node.sh under Slurm, one task a node. Submit it from the repository's root:
#
#   CHECKPOINT=DIR TOKENIZER=NAME_OR_DIR sbatch --time 8:00:00 examples/serve_slurm.sh \
#       [flags of the tool or of Megatron]
#
# The first node writes urls.json to the folder that it was submitted from.
set -euo pipefail

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
export NNODES="$SLURM_NNODES"

# Slurm runs a copy of this file, so the other one is looked for from where it was submitted. What
# stands in single quotes differs from node to node.
# shellcheck disable=SC2016
exec srun --kill-on-bad-exit=1 bash -c \
    'NODE_RANK=$SLURM_NODEID SERVE_HOST=$SLURMD_NODENAME exec "$0" "$@"' \
    "$SLURM_SUBMIT_DIR/examples/serve_multi_node.sh" \
    --inference-coordinator-host "$MASTER_ADDR" "$@"
