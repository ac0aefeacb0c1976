#!/usr/bin/env bash
# Trains on many GPUs: one node, or this script on each of several. All arguments go to train.py:
#
#     INIT=runs/stage1 bash stages/cluster.sh --stage 2 --data mix.json --out runs/stage2  # one node
#     NODES=16 HEAD=node0:29400 INIT=runs/stage2 \
#       bash stages/cluster.sh --stage 3 --data mix.json --cp 8 --out runs/stage3  # on each of 16
#     sbatch --nodes 16 stages/slurm.sh --stage 3 --data mix.json --cp 8 --out runs/stage3  # Slurm
#
# --out must be on a disk that all nodes share. INIT=DIR names the weights to start from while there
# is no checkpoint yet. If a process or a node fails, torchrun restarts all of them, up to RESTARTS
# times, and --resume continues from the newest checkpoint; after SIGTERM the run saves and exits.
set -euo pipefail
cd "$(dirname "$0")/.."

NODES=${NODES:-1}
HEAD=${HEAD:-}
RUN=${RUN:-molmo2}
RESTARTS=${RESTARTS:-3}
INIT=${INIT:-}
GPUS=${GPUS:-$(nvidia-smi --list-gpus 2> /dev/null | wc -l)}

fail() { echo "cluster.sh: $1" >&2; exit 2; }
[ "$GPUS" -gt 0 ] || fail "no GPU found; set GPUS=2 to start two processes without one"
[ "$NODES" = 1 ] || [ -n "$HEAD" ] || fail "NODES=$NODES needs HEAD=host:port of one of the nodes"
case " $*" in
  *" --out"[\ =]*) ;;
  *) fail "--out DIR is needed, because a restart continues there" ;;
esac

# A replaced node can join only where each attempt has a store of its own: by default torchrun
# shares one over all attempts, and with it the communicators' ids of the attempt before.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# gloo connects two ranks when they first talk: from the beginning, each of n ranks would need
# about 4 n file descriptors, more than the usual limit of 1024 from 240 ranks on.
export TORCH_GLOO_LAZY_INIT=${TORCH_GLOO_LAZY_INIT:-1}
ulimit -n "$(ulimit -Hn)"
# NCCL prints why it cannot reach a peer (often the wrong network card: set NCCL_SOCKET_IFNAME).
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# Flight recorder: when a collective hangs, each rank writes a file of its last collectives, which
# shows the rank that is missing.
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000}
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}
# Collectives of heads and weights should not wait behind the kernels of the step.
export TORCH_NCCL_HIGH_PRIORITY=${TORCH_NCCL_HIGH_PRIORITY:-1}
# The ranks of a node share its cores with their decoding processes.
threads=$(($(nproc) / GPUS))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
# Seconds that torchrun gives the ranks after SIGTERM to finish their step and save it. Its default
# of 30 is too short for a large model.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

rendezvous=(--standalone)
[ "$NODES" = 1 ] ||
  rendezvous=(--nnodes "$NODES" --rdzv-backend c10d --rdzv-endpoint "$HEAD" --rdzv-id "$RUN")
start=(--resume)
[ -z "$INIT" ] || start+=(--else-init "$INIT")
exec torchrun "${rendezvous[@]}" --max-restarts "$RESTARTS" --nproc-per-node "$GPUS" \
  train.py "$@" "${start[@]}"
