#!/usr/bin/env bash
# stages/cluster.sh on every node of a Slurm job: sbatch --nodes 16 stages/slurm.sh --stage 3 --cp 8 --shard 8 --data .. --out ..
#
#SBATCH --job-name=molmo2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# five minutes before its time is over, and when it is preempted, the run is told to save and end; in the queue again, it goes on
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"                       # Slurm runs a copy of this file from elsewhere

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export NODES=$SLURM_JOB_NUM_NODES RUN=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
export HEAD=$head:$((20000 + SLURM_JOB_ID % 20000)) GPUS=${GPUS:-${SLURM_GPUS_ON_NODE:-8}}
# --kill-on-bad-exit: a node that gives up takes the others with it, instead of leaving them to wait
exec srun --kill-on-bad-exit=1 bash stages/cluster.sh "$@"
