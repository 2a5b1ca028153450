#!/bin/bash
# A run on 8 nodes of 8 GPUs: sbatch examples/slurm.sh. Written after the documentation of Slurm and Ray, and not run.
# Once before: ray get-auth-token --generate, in a home directory that all nodes share. To go on with a run, put
#     bapo resume "$SCRATCH/runs/ID"
# in the place of bapo train.
#SBATCH --nodes=8 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --time=24:00:00
export RAY_AUTH_MODE=token
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 ray symmetric-run --address "$head:6379" --min-nodes "$SLURM_NNODES" --num-gpus 8 -- \
    bapo train cluster_32b --out "$SCRATCH/runs/$SLURM_JOB_ID"
