#!/bin/bash
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --time=1-0
#SBATCH --array=1-3
cd "$SLURM_SUBMIT_DIR"
source .venv/bin/activate
nvidia-smi
python -u train.py --seed $SLURM_ARRAY_TASK_ID | tee log.txt
echo done
