#!/usr/bin/env bash
# Makes .venv where there is none and installs hybridtrt into it: scripts/install.sh [EXTRA ...]
# PYTHON names the interpreter (3.11 or 3.12); by default the first that is found.
set -euo pipefail
cd "$(dirname "$0")/.."

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
    if "$candidate" -c 'import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "error: no Python 3.11 or 3.12 with venv found (looked for ${PYTHON:-python3.11 python3.12 python3}); set PYTHON" >&2
  return 1
}

if ! .venv/bin/python -c 'import sys, pip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
  python=$(find_python)
  echo "making .venv with $($python --version)"
  "$python" -m venv --clear .venv
fi

extras=$(IFS=,; echo "$*")
wanted="$extras $(sha256sum pyproject.toml setup.cfg setup.py)"
stamp=.venv/.installed-${extras:-base}
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  echo "installing hybridtrt${extras:+[$extras]} and what it needs (a few minutes the first time)"
  # torch first and by name: where pip offers a CPU build of this release it is taken, and nothing replaces it later.
  .venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 "numpy<2"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".${extras:+[$extras]}"
  echo "$wanted" >"$stamp"
fi

# Sources may be newer than the installation. Without a compiler everything runs on torch, which is slower.
.venv/bin/python plugins/native/compile.py >/dev/null ||
  echo "warning: the C++ kernels were not compiled; models will run on torch" >&2
