#!/usr/bin/env bash
# Install the project and fine-tune SmolLM2-135M over two processes on this machine's CPU.
# Arguments go to train.py: bash recipes/smollm2/run.sh --help
set -euo pipefail
cd "$(dirname "$0")/../.."
bash recipes/install.sh demo
export TOKENIZERS_PARALLELISM=false
# --multi_gpu is how accelerate starts several processes, on CPUs too
exec .venv/bin/accelerate launch --multi_gpu --num_processes "${NUM_PROCESSES:-2}" --num_machines 1 \
    --mixed_precision no --dynamo_backend no recipes/smollm2/train.py "$@"
