#!/usr/bin/env bash
# Runs the tests of the C++ kernels with address and undefined-behaviour sanitizers, on every instruction set that this
# machine has; arguments go to pytest. PYTHON names the interpreter (.venv/bin/python).
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
COMPILER=${CXX:-g++}
LIBRARY=.cache/sanitized.so

echo "== compiling $LIBRARY with sanitizers"
"$PYTHON" plugins/native/compile.py --sanitize --output "$LIBRARY"

export HYBRIDTRT_LIBRARY=$PWD/$LIBRARY
export PYTHONPATH=$PWD/src OMP_NUM_THREADS=1
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
PRELOAD=$(for name in libasan.so libubsan.so libstdc++.so; do
  # shellcheck disable=SC2086 # the compiler may come with options
  realpath "$($COMPILER -print-file-name=$name)"
done | paste -sd:)
ISAS=$(LD_PRELOAD=$PRELOAD "$PYTHON" -c \
  "from hybridtrt.plugins.native.library import supported_isas; print(*supported_isas())")

echo "== tests/test_native_*.py, which run every instruction set: $ISAS"
LD_PRELOAD=$PRELOAD "$PYTHON" -m pytest --timeout 1800 tests/test_native_*.py "$@"

OPERATORS=(tests/test_ops.py tests/test_definitions.py tests/test_linear_attention.py tests/test_experts.py tests/test_capacity.py tests/test_zaya.py tests/test_token_states.py)
for isa in $ISAS; do
  echo "== C++ operators on $isa: ${OPERATORS[*]}"
  HYBRIDTRT_ISA=$isa LD_PRELOAD=$PRELOAD "$PYTHON" -m pytest --timeout 1800 -k "cpu or experts_and_router" "${OPERATORS[@]}" "$@"
done
echo "== no sanitizer had a complaint on: $ISAS"
