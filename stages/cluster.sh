#!/usr/bin/env bash
# Train over many GPUs: one node, or this script on each of several. What follows goes to train.py:
#
#     bash stages/cluster.sh --stage 2 --data mix.json --out runs/stage2                            # one node, all its GPUs
#     NODES=16 HEAD=node0:29400 bash stages/cluster.sh --stage 3 --cp 8 --shard 8 --out runs/stage3   # on every one of 16 nodes
#     sbatch --nodes 16 stages/slurm.sh --stage 3 --cp 8 --shard 8 --out runs/stage3                  # Slurm runs it on every node
#
# --out must be on a disk that all nodes see. INIT=DIR names weights to start from, as long as there is no checkpoint. Where a process
# or a node fails, torchrun starts all of them again, up to RESTARTS times, and --resume goes on; SIGTERM saves and ends.
set -euo pipefail
cd "$(dirname "$0")/.."

NODES=${NODES:-1} HEAD=${HEAD:-} RUN=${RUN:-molmo2} RESTARTS=${RESTARTS:-3} INIT=${INIT:-}
GPUS=${GPUS:-$(nvidia-smi --list-gpus 2> /dev/null | wc -l)}
[ "$GPUS" -gt 0 ] || { echo "cluster.sh: no GPU found; GPUS=2 starts two processes all the same" >&2; exit 2; }
[ "$NODES" = 1 ] || [ -n "$HEAD" ] || { echo "cluster.sh: NODES=$NODES: HEAD=host:port of one of them is needed" >&2; exit 2; }

case " $*" in *" --out"[\ =]*) ;; *) echo "cluster.sh: --out DIR is needed: a restart goes on there" >&2; exit 2 ;; esac

# Rows differ in documents and crops, so blocks of ever other sizes are asked for: let segments grow instead of being cut to pieces.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# NCCL says why it cannot reach a peer (the wrong network card, usually: then set NCCL_SOCKET_IFNAME), and nothing else.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# When an exchange hangs, each rank leaves a file of its last exchanges: which of them is missing which (torch's flight recorder).
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000} TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}
# Exchanges of heads and of weights should not wait behind the kernels of the step.
export TORCH_NCCL_HIGH_PRIORITY=${TORCH_NCCL_HIGH_PRIORITY:-1}
# A rank's own threads and its decoding processes share the cores of the node.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) / GPUS > 0 ? $(nproc) / GPUS : 1))}

# What torchrun gives the ranks to finish their step and save it when it is told to end; its 30 s are short for a large model.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

meet=(--standalone)
[ "$NODES" = 1 ] || meet=(--nnodes "$NODES" --rdzv-backend c10d --rdzv-endpoint "$HEAD" --rdzv-id "$RUN")
start=(--resume)
[ -z "$INIT" ] || start+=(--else-init "$INIT")
exec torchrun "${meet[@]}" --max-restarts "$RESTARTS" --nproc-per-node "$GPUS" train.py "$@" "${start[@]}"
