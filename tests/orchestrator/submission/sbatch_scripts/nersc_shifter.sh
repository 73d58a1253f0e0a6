#!/bin/bash
#SBATCH -C gpu
#SBATCH -A m1234_g
#SBATCH -q regular
#SBATCH -N 2
#SBATCH --ntasks-per-node 4
#SBATCH --cpus-per-task 32
#SBATCH --gpus-per-node 4
#SBATCH --time 02:00:00
#SBATCH --image=nersc/pytorch:24.08.01
#SBATCH --module=gpu,nccl-plugin
#SBATCH -J vit-era5

DATADIR=/pscratch/sd/s/sample/data
LOGDIR=${SCRATCH}/ai-for-science/logs
mkdir -p ${LOGDIR}
args="${@}"

export FI_MR_CACHE_MONITOR=userfaultfd
export HDF5_USE_FILE_LOCKING=FALSE
export MASTER_ADDR=$(hostname)

set -x
srun -u shifter --volume="${DATADIR}:/data;${LOGDIR}:/logs" \
    bash -c "
    source export_DDP_vars.sh
    python train.py --config=mp --amp_mode bf16
    "
