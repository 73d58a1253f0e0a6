#!/bin/bash
#SBATCH --job-name=tr11-176B
#SBATCH --nodes=24
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --hint=nomultithread
#SBATCH --gres=gpu:8
#SBATCH --time 100:00:00
#SBATCH --output=logs/%x-%j.out
#SBATCH --account=six@a100
#SBATCH --reservation=hug
set -x -e
source $HOME/start-env
echo "START TIME: $(date)"
GPUS_PER_NODE=8
NNODES=$SLURM_NNODES
LR=6e-5
DATA_OUTPUT_PATH=/shared/checkpoints/tr11
MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
MASTER_PORT=6000
OPTIMIZER_ARGS=" \
    --optimizer adam \
    --lr $LR \
    "
export LAUNCHER="python -u -m torch.distributed.run \
    --nproc_per_node $GPUS_PER_NODE \
    --nnodes $NNODES \
    --rdzv_endpoint $MASTER_ADDR:$MASTER_PORT \
    --rdzv_backend c10d \
    --max_restarts 0 \
    --tee 3 \
    "
export CMD=" \
    pretrain_gpt.py \
    $OPTIMIZER_ARGS \
    --save $DATA_OUTPUT_PATH \
    "
export NCCL_ASYNC_ERROR_HANDLING=1
clear; srun --jobid $SLURM_JOBID bash -c "$LAUNCHER --node_rank \$SLURM_PROCID $CMD" 2>&1 | tee -a $DATA_OUTPUT_PATH/main_log.txt
echo "END TIME: $(date)"
