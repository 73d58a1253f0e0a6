#!/usr/bin/env bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=16
#SBATCH --time=8:00:00
#SBATCH --partition=gpu
export SINGULARITYENV_NCCL_DEBUG=INFO
SIF=/images/torch.sif
srun apptainer exec --nv -B /data:/data $SIF torchrun --nnodes=$SLURM_NNODES --nproc-per-node=2 \
  --rdzv-id=$SLURM_JOB_ID --rdzv-backend=c10d --rdzv-endpoint=$(hostname):29400 -m mypkg.train --lr 0.1
