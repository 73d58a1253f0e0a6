#!/bin/bash
#SBATCH --job-name=ds
#SBATCH --partition=a100,h100
#SBATCH --nodes=1
#SBATCH --gres=gpu:a100:8
#SBATCH --cpus-per-gpu=12
#SBATCH --mem-per-cpu=4G
#SBATCH --time=48:00:00
#SBATCH --exclude=gpu[003,017]
set -euo pipefail
source /opt/conda/etc/profile.d/conda.sh
conda activate /envs/ds
export WANDB_MODE=offline
export WANDB_API_KEY=0123456789abcdef
deepspeed --num_gpus=8 --master_port 29501 train.py --deepspeed ds_config.json --lr 1e-4
