#!/bin/bash
#SBATCH --job-name=megatron
#SBATCH --time=12:00:00
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --mem=460000
#SBATCH --environment=/iopsstor/me/env.toml
#SBATCH --no-requeue
#SBATCH --exclusive

export MASTER_PORT=25678
export MASTER_ADDR=$(hostname)
export NCCL_NET="AWS Libfabric"
export TRITON_CACHE_DIR=/dev/shm/triton

srun -ul bash -c 'export LOCAL_RANK=$SLURM_LOCALID
  export RANK=$SLURM_PROCID
  numactl --membind=$SLURM_LOCALID python -u pretrain_gpt.py --seq-length 4096 --save $SCRATCH/ckpt'
