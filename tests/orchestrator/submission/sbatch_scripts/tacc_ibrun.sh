#!/bin/bash
#SBATCH -J resnet
#SBATCH -o resnet.o%j
#SBATCH -e resnet.e%j
#SBATCH -p gpu-a100
#SBATCH -N 2
#SBATCH -n 6
#SBATCH -t 04:00:00
#SBATCH -A ABC123

module load python3/3.9 cuda/12.2
cd $WORK/resnet
source $WORK/venv/bin/activate
ibrun python train.py --arch resnet50 --data $SCRATCH/imagenet > train.log 2>&1
