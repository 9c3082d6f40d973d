#!/bin/sh
# Builds llama.cpp's benchmark from the source package that Python's package index has, to be measured beside LeanStream
# (`ls-prep paper --llama-bench`), and turns a model into half precision for it, as all rows shall have the same weights.
#
#   tools/peers.sh FOLDER MODEL.gguf     leaves FOLDER/llama-bench and FOLDER/model.f16.gguf; keeps what is there
#
# AirLLM and mistral.rs are only looked for: no driver for them is here.
set -eu
folder=$1
model=$2
version=0.3.36
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

if [ ! -x "$folder/llama-bench" ] || [ ! -x "$folder/llama-quantize" ]; then
    scratch=$(mktemp -d "$folder/build.XXXXXX")
    trap 'rm -rf "$scratch"' EXIT INT TERM
    python3 -m venv "$scratch/venv"
    "$scratch/venv/bin/pip" install --quiet cmake ninja
    python3 -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest "$scratch" "llama-cpp-python==$version"
    tar -xzf "$scratch"/llama_cpp_python-*.tar.gz -C "$scratch"
    cmake="$scratch/venv/bin/cmake"
    "$cmake" -S "$scratch"/llama_cpp_python-*/vendor/llama.cpp -B "$scratch/out" -G Ninja \
        -DCMAKE_MAKE_PROGRAM="$scratch/venv/bin/ninja" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
        -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF \
        >"$folder/peers.log"
    "$cmake" --build "$scratch/out" --target llama-bench llama-quantize -j "$(nproc)" >>"$folder/peers.log"
    cp "$scratch/out/bin/llama-bench" "$scratch/out/bin/llama-quantize" "$folder/"
fi
if [ ! -e "$folder/model.f16.gguf" ]; then
    "$folder/llama-quantize" --allow-requantize "$model" "$folder/model.part" F16 >>"$folder/peers.log" 2>&1
    mv "$folder/model.part" "$folder/model.f16.gguf"
fi
for peer in airllm mistralrs; do
    python3 -c "import $peer" 2>/dev/null && echo "$peer is installed, but is not measured" || echo "$peer: missing"
done
echo "llama.cpp: $folder/llama-bench"
