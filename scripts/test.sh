#!/usr/bin/env bash
# Installs what the tests need and runs them all; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/install.sh dev
PATH="$PWD/.venv/bin:$PATH"
export PATH

ruff check .
ruff format --check .
mypy
# The tests of a real server measure times and take all cores: they run by themselves, after the rest in parallel.
pytest -n "${TEST_WORKERS:-2}" -m "not server and not gpu" "$@"
pytest -m "server and not gpu" "$@"
