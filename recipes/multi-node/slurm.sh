#!/usr/bin/env bash
#SBATCH --job-name=striped
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --requeue
# sbatch recipes/multi-node/slurm.sh --data '/data/*.jsonl' --output /shared/run
set -euo pipefail
export MAIN_IP="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
srun bash -c 'exec accelerate launch --config_file recipes/multi-node/gpu.yaml \
    --num_machines "$SLURM_NNODES" --num_processes "$((SLURM_NNODES * 8))" \
    --machine_rank "$SLURM_NODEID" --main_process_ip "$MAIN_IP" \
    recipes/multi-node/train.py "$@"' _ "$@"
