#!/usr/bin/env bash
# stages/cluster.sh on every node of a Slurm job: sbatch --nodes 16 stages/slurm.sh --stage 3 --cp 8 --shard 8 --data .. --out ..
#
#SBATCH --job-name=molmo2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# ten minutes before its time is over the run is told to save and end (a step and a save must fit in), and goes back into the queue
#SBATCH --signal=B:TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"                       # Slurm runs a copy of this file from elsewhere

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export NODES=$SLURM_JOB_NUM_NODES RUN=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
export HEAD=${hosts%%$'\n'*}:$((20000 + SLURM_JOB_ID % 20000)) GPUS=${GPUS:-${SLURM_GPUS_ON_NODE:-8}}
# --kill-on-bad-exit: a node that gives up takes the others with it, instead of leaving them to wait
told_to_end=""
srun --kill-on-bad-exit=1 bash stages/cluster.sh "$@" &
child=$!
trap 'told_to_end=yes; kill -TERM "$child"' TERM                  # srun passes it on to every node
status=0
wait "$child" || status=$?
while kill -0 "$child" 2> /dev/null; do wait "$child" || status=$?; done        # the trap ended the first wait, not the run
[ -z "$told_to_end" ] || scontrol requeue "$SLURM_JOB_ID"
exit "$status"
