#!/usr/bin/env bash
# Train over many GPUs: one node, or this script on each of several. What follows goes to train.py:
#
#     bash stages/cluster.sh --stage 2 --data mix.json --out runs/stage2                            # one node, all its GPUs
#     NODES=16 HEAD=node0:29400 bash stages/cluster.sh --stage 3 --cp 8 --shard 8 --out runs/stage3   # on every one of 16 nodes
#     sbatch --nodes 16 stages/slurm.sh --stage 3 --cp 8 --shard 8 --out runs/stage3                  # Slurm runs it on every node
#
# --out must be on a disk that all nodes see. INIT=DIR names weights to start from: --init, but only until there is a checkpoint.
# A run that fails is started again from its newest checkpoint, up to RESTARTS times; SIGTERM saves and ends it for good.
set -uo pipefail
cd "$(dirname "$0")/.."

NODES=${NODES:-1} HEAD=${HEAD:-} RUN=${RUN:-molmo2} RESTARTS=${RESTARTS:-3} INIT=${INIT:-}
GPUS=${GPUS:-$(nvidia-smi --list-gpus 2> /dev/null | wc -l)}
[ "$GPUS" -gt 0 ] || { echo "cluster.sh: no GPU found; GPUS=2 starts two processes all the same" >&2; exit 2; }
[ "$NODES" = 1 ] || [ -n "$HEAD" ] || { echo "cluster.sh: NODES=$NODES: HEAD=host:port of one of them is needed" >&2; exit 2; }

out=""
for ((i = 1; i < $#; i++)); do [ "${!i}" = --out ] && j=$((i + 1)) && out=${!j}; done
[ -n "$out" ] || { echo "cluster.sh: --out DIR is needed: a restart goes on there" >&2; exit 2; }

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

# What torchrun gives the ranks to save their last step when it is told to end; 30 s are short for a large model.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}

told_to_end="" child=""
trap 'told_to_end=yes; kill -TERM "$child" 2> /dev/null' TERM INT
for ((attempt = 0; attempt <= RESTARTS; attempt++)); do
  # a name of its own for each attempt, so that nobody meets those of the last one
  meet=(--nnodes "$NODES" --rdzv-backend c10d --rdzv-endpoint "$HEAD" --rdzv-id "$RUN-$attempt")
  [ "$NODES" -gt 1 ] || meet=(--standalone)
  start=(--resume)
  if ! compgen -G "$out/step-*/complete" > /dev/null; then
    [ "$attempt" = 0 ] || { echo "cluster.sh: no checkpoint yet to go on from" >&2; break; }
    if [ -n "$INIT" ]; then start=(--init "$INIT"); fi
  fi
  torchrun "${meet[@]}" --nproc-per-node "$GPUS" train.py "$@" "${start[@]}" &
  child=$!
  wait "$child"; status=$?
  [ -z "$told_to_end" ] || { wait "$child"; status=143; break; }  # the trap ended the first wait, not the run
  [ "$status" != 0 ] || break
  echo "cluster.sh: attempt $attempt ended with status $status" >&2
done
exit "$status"
