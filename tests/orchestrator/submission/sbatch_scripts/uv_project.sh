#!/bin/bash
#SBATCH --job-name="my run #1"
#SBATCH -N2 --ntasks-per-node=2
#SBATCH -pgpu --gpus-per-task=1
#SBATCH --cpus-per-task=6 --time=90
cd /home/me/project || exit 1
export UV_CACHE_DIR=/tmp/uv
uv sync --frozen
for d in out logs; do
  mkdir -p $d
done
srun --export=ALL,HYDRA_FULL_ERROR=1 uv run python src/train.py experiment=base 'trainer.tags=[a, b]'
