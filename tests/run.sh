#!/usr/bin/env bash
# Install what the tests need and run them all, two files at a time. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash recipes/install.sh test
export HF_HUB_OFFLINE=1
exec .venv/bin/python -m pytest -n 2 --dist loadfile "$@"
