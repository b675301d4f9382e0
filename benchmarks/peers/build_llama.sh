#!/usr/bin/env bash
# Builds llama.cpp for this machine from the sdist of llama-cpp-python, and llama_worker against it.
# usage: build_llama.sh FOLDER [JOBS]   (20 minutes of two cores; needs cmake, ninja and a C++ compiler)
# Afterwards: compare.py --llama FOLDER
set -euo pipefail
version=0.3.36
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
cd "$1"
source=$PWD/llama_cpp_python-$version/vendor/llama.cpp
if [ ! -d "$source" ]; then
  python3 -m pip download -q --no-deps --no-binary llama-cpp-python "llama-cpp-python==$version"
  tar xzf "llama_cpp_python-$version.tar.gz"
fi
off=(-DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF)
for part in TESTS EXAMPLES TOOLS SERVER; do off+=("-DLLAMA_BUILD_$part=OFF"); done
cmake -G Ninja -S "$source" -B llama_build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=ON "${off[@]}"
ninja -C llama_build -j"${2:-2}" llama
"${CXX:-c++}" -std=c++17 -O2 -I"$source/include" -I"$source/ggml/include" "$here/llama_worker.cpp" -o llama_worker \
  -Lllama_build/bin -lllama -lggml -lggml-base -Wl,-rpath,"$PWD/llama_build/bin" -Wl,--allow-shlib-undefined
ln -sfn "$source" source
