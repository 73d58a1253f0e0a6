#!/bin/bash
#SBATCH -A coreai
#SBATCH -p batch
#SBATCH -N 8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH -t 04:00:00
#SBATCH --dependency=singleton

IMAGE="nvcr.io#nvidia/pytorch:25.01-py3"
MOUNTS="/lustre/data:/data,/home/me/code:/code"
srun --container-image="$IMAGE" --container-mounts="$MOUNTS" --container-workdir=/code --mpi=pmix \
  python /code/train.py --data /data --fp8
