#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1
#SBATCH --time=1:00:00
cat > hostfile <<EOF
node1 slots=8
node2 slots=8
EOF
trap 'kill -USR1 $PID' USR1
srun --ntasks-per-node=1 tar xf /shared/data.tar -C /tmp
srun --mem=10G torchrun --nproc_per_node=$(nvidia-smi -L | wc -l) train.py &
PID=$!
wait $PID
#SBATCH --partition=late
