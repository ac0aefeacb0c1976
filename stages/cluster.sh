#!/usr/bin/env bash
# Trains on many GPUs. With several nodes, start this script on each of them. All arguments are
# passed to train.py:
#
#     INIT=runs/stage1 bash stages/cluster.sh --stage 2 --data mix.json --out runs/stage2  # one node
#     NODES=16 HEAD=node0:29400 INIT=runs/stage2 \
#       bash stages/cluster.sh --stage 3 --data mix.json --cp 8 --out runs/stage3  # on each of 16
#     sbatch --nodes 16 stages/slurm.sh --stage 3 --data mix.json --cp 8 --out runs/stage3  # Slurm
#
# --out must be on a disk that all nodes share. INIT=DIR gives the initial weights, which are used
# if there is no checkpoint yet. If a process or a node fails, torchrun restarts all processes up to
# RESTARTS times, and --resume continues from the newest checkpoint. After SIGTERM, the run saves a
# checkpoint and exits.
set -euo pipefail
cd "$(dirname "$0")/.."

NODES=${NODES:-1}
HEAD=${HEAD:-}
RUN=${RUN:-molmo2}
RESTARTS=${RESTARTS:-3}
INIT=${INIT:-}
GPUS=${GPUS:-$(nvidia-smi --list-gpus 2> /dev/null | wc -l)}

fail() { echo "cluster.sh: $1" >&2; exit 2; }
[ "$GPUS" -gt 0 ] || fail "no GPU found; set GPUS=2 to start two processes without a GPU"
[ "$NODES" = 1 ] || [ -n "$HEAD" ] || fail "NODES=$NODES needs HEAD=host:port of one of the nodes"
case " $*" in
  *" --out"[\ =]*) ;;
  *) fail "--out DIR is needed, because a restart continues from the checkpoint there" ;;
esac

# With a separate store for each attempt, a new node can replace a failed one. By default torchrun
# uses one store for all attempts, which still contains the communicator ids of the last attempt.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# gloo connects two ranks when they first communicate. If all n ranks connect at the start, each one
# needs about 4 n file descriptors. From 240 ranks on, the usual limit of 1024 is too low.
export TORCH_GLOO_LAZY_INIT=${TORCH_GLOO_LAZY_INIT:-1}
ulimit -n "$(ulimit -Hn)"
# NCCL prints why it cannot reach another process. If it uses the wrong network card, set
# NCCL_SOCKET_IFNAME.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# Flight recorder of PyTorch: if a collective hangs, each rank writes a file with its last
# collectives. These files show which rank is missing.
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000}
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}
# Collectives of attention heads and weights must not wait for the other kernels of the step.
export TORCH_NCCL_HIGH_PRIORITY=${TORCH_NCCL_HIGH_PRIORITY:-1}
# The ranks of a node and their decoding processes share its CPU cores.
threads=$(($(nproc) / GPUS))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
# After SIGTERM, torchrun waits this number of seconds for the ranks to finish their step and to
# save. The default of 30 is too short for a large model.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

rendezvous=(--standalone)
[ "$NODES" = 1 ] ||
  rendezvous=(--nnodes "$NODES" --rdzv-backend c10d --rdzv-endpoint "$HEAD" --rdzv-id "$RUN")
start=(--resume)
[ -z "$INIT" ] || start+=(--else-init "$INIT")
exec torchrun "${rendezvous[@]}" --max-restarts "$RESTARTS" --nproc-per-node "$GPUS" \
  train.py "$@" "${start[@]}"
