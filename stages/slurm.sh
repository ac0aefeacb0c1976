#!/usr/bin/env bash
# Runs stages/cluster.sh on every node of a Slurm job:
#
#     sbatch --nodes 16 stages/slurm.sh --stage 3 --cp 8 --data .. --out ..
#
#SBATCH --job-name=molmo2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# Request all memory of the node. On some sites a job gets only a part of it by default.
#SBATCH --mem=0
# Ten minutes before its time limit, the job gets SIGTERM. Then the run saves a checkpoint, and the
# job is queued again. One step and the save must fit into these ten minutes.
#SBATCH --signal=B:TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"             # Slurm runs a copy of this file

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 20000))
export NODES=$SLURM_JOB_NUM_NODES
export RUN=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
export HEAD=${hosts%%$'\n'*}:$port
export GPUS=${GPUS:-${SLURM_GPUS_ON_NODE:-8}}

# --kill-on-bad-exit: if one node fails after all restarts, the others must not wait for it
# --cpu-bind=none: if a site binds tasks to a core, eight ranks and their decoders would share one
srun --kill-on-bad-exit=1 --cpu-bind=none bash stages/cluster.sh "$@" &
child=$!
stop_requested=""
trap 'stop_requested=yes; kill -TERM "$child"' TERM      # srun passes the signal on to every node
status=0
wait "$child" || status=$?
# the trap interrupts `wait`, but the run continues until it has saved
while kill -0 "$child" 2> /dev/null; do
  wait "$child" || status=$?
done
[ -z "$stop_requested" ] || scontrol requeue "$SLURM_JOB_ID"
exit "$status"
