#!/bin/sh
#SBATCH -n 1
#SBATCH -G 4
#SBATCH -c 20
#SBATCH -t 600
#SBATCH --comment=test
. ~/venvs/torch/bin/activate
export DATA=/data/imagenet EPOCHS=90
python -m torch.distributed.launch --nproc_per_node=4 main.py --data $DATA --epochs "$EPOCHS"
