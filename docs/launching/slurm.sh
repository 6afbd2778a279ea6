#!/bin/bash
# sbatch docs/launching/slurm.sh: one `etude` on each node, which starts a process for each GPU.
#SBATCH --job-name=lenet5
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@180
#SBATCH --open-mode=append

# A job that ran out of time saves when it gets the signal, is queued again and continues.
set -euo pipefail

run=runs/lenet5/slurm-$SLURM_JOB_ID
endpoint=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):29400
processes="--nnodes $SLURM_NNODES --nproc auto --rdzv-endpoint $endpoint --max-restarts 3"

code=0
if [ -e "$run/config.yaml" ]; then
    # shellcheck disable=SC2086
    srun --kill-on-bad-exit=0 etude resume "$run" $processes || code=$?
else
    # shellcheck disable=SC2086
    srun --kill-on-bad-exit=0 etude train lenet5/baseline --run-dir "$run" $processes || code=$?
fi
if [ "$code" -eq 130 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
