#!/bin/bash
#SBATCH --ntasks=8
#SBATCH --mem-per-gpu=40G
#SBATCH --weird-plugin-option=7
LR=0.1
if [ -n "$DEBUG" ]; then LR=0.01; fi
mpirun -np 8 -x PATH python train.py --lr $LR
