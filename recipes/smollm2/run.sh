#!/usr/bin/env bash
# Install the project, fine-tune SmolLM2-135M over two processes on this machine's CPU, and compare the first step with
# one process. Arguments go to train.py: bash recipes/smollm2/run.sh --help
set -euo pipefail
recipe="$(cd "$(dirname "$0")" && pwd)"
bash "$recipe/../install.sh" demo
bin="$recipe/../../.venv/bin"
case " $* " in *" --help "* | *" -h "*) exec "$bin/python" "$recipe/train.py" --help ;; esac
export TOKENIZERS_PARALLELISM=false
case " $* " in *" --model"*) ;; *) export HF_HUB_OFFLINE=1 ;; esac # the packaged model needs no hub
figures="$(mktemp -d)"
trap 'rm -rf "$figures"' EXIT
echo "The first step in one process ..."
"$bin/python" "$recipe/train.py" "$@" --alone --figures "$figures/alone.json"
echo "Training over two ranks ..."
"$bin/accelerate" launch --config_file "$recipe/cpu.yaml" --main_process_port 0 \
    "$recipe/train.py" "$@" --figures "$figures/ranks.json"
"$bin/python" "$recipe/compare.py" "$figures/alone.json" "$figures/ranks.json"
