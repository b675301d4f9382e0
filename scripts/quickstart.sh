#!/usr/bin/env bash
# From nothing to text: installs, converts a small hybrid model that writes English, builds, serves and asks it.
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/install.sh
exec .venv/bin/python scripts/quickstart.py "$@"
