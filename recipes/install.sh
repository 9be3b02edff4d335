#!/usr/bin/env bash
# Make .venv at the top of the repository and install the project into it with the extras named:
#   bash recipes/install.sh demo
set -euo pipefail
cd "$(dirname "$0")/.."
extras="${1:?name the extras to install, for example: demo}"
[ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
if ! command -v nvidia-smi >/dev/null 2>&1; then
    .venv/bin/pip install -q "torch==2.13.0" # no GPU: the release the suite is tested with
fi
.venv/bin/pip install -q -e ".[$extras]"
