#!/bin/bash
#SBATCH --constraint=gpu
#SBATCH --account=m1234
#SBATCH --qos=debug
#SBATCH --nodes=1
#SBATCH --gpus-per-node=4
#SBATCH --ntasks-per-node=1
#SBATCH --time=30
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --mail-type=END,FAIL
#SBATCH --mail-user=me@example.org

module load pytorch/2.6.0
export OMP_NUM_THREADS=8
srun -l torchrun --standalone --nproc_per_node=4 train.py --batch-size 64 --name "run a"
