#!/usr/bin/env bash
# From nothing to tokens: installs, makes a small random hybrid checkpoint, converts, builds, serves and asks it.
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/install.sh
exec .venv/bin/python scripts/quickstart.py "$@"
