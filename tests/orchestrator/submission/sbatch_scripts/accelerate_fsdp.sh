#!/bin/bash -l
#SBATCH -J llama-sft
#SBATCH -N 2
#SBATCH -n 2
#SBATCH --gpus-per-node=8
#SBATCH -c 64
#SBATCH -t 1-00:00:00
#SBATCH -p gpu
module purge
module load cuda/12.4
conda activate llm
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
export HF_HOME=/scratch/hf
srun accelerate launch --config_file fsdp.yaml --num_processes 16 --num_machines 2 --machine_rank $SLURM_PROCID \
    --main_process_ip $MASTER_ADDR --use_fsdp --fsdp_sharding_strategy FULL_SHARD sft.py --model meta-llama/Llama-3-8B
