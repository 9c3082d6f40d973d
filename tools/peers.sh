#!/bin/sh
# Programs of others, to be measured beside LeanStream (`ls-prep paper --peers FOLDER`), and a model for them.
#
#   tools/peers.sh FOLDER MODEL.gguf     leaves in FOLDER, and keeps what is there:
#     llama-bench        llama.cpp's benchmark, built from the source package that Python's package index has
#     airllm, mistralrs  drivers (tools/peers.py), where the packages install and work; AirLLM's take 6 GB with what they want
#     NAME.missing       what was tried, where that failed
#     model.f16.gguf     the model in half precision, as all rows shall have the same weights; model.f16.hf for AirLLM
set -eu
folder=$1
model=$2
version=0.3.36
tools=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
log=$folder/peers.log
: >"$log"

if [ ! -x "$folder/llama-bench" ] || [ ! -x "$folder/llama-quantize" ]; then
    scratch=$(mktemp -d "$folder/build.XXXXXX")
    trap 'rm -rf "$scratch"' EXIT
    trap 'exit 130' INT TERM
    # Into a folder: needs no virtual environment, and leaves the system's packages alone.
    python3 -m pip install --quiet --target "$scratch/python" cmake ninja
    python3 -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest "$scratch" "llama-cpp-python==$version"
    tar -xzf "$scratch"/llama_cpp_python-*.tar.gz -C "$scratch"
    export PYTHONPATH="$scratch/python"
    cmake=$scratch/python/bin/cmake
    # Nothing but the two programs and what they link; a server and its page are not wanted, nor downloads by them.
    "$cmake" -S "$scratch"/llama_cpp_python-*/vendor/llama.cpp -B "$scratch/out" -G Ninja \
        -DCMAKE_MAKE_PROGRAM="$scratch/python/bin/ninja" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
        -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
        -DLLAMA_BUILD_SERVER=OFF >>"$log"
    "$cmake" --build "$scratch/out" --target llama-bench llama-quantize -j "$(nproc)" >>"$log"
    cp "$scratch/out/bin/llama-bench" "$scratch/out/bin/llama-quantize" "$folder/"
    unset PYTHONPATH
fi
if [ ! -e "$folder/model.f16.gguf" ]; then
    "$folder/llama-quantize" --allow-requantize "$model" "$folder/model.part" F16 >>"$log" 2>&1
    mv "$folder/model.part" "$folder/model.f16.gguf"
fi

# Runs a step of a peer's; says in NAME.missing that it failed, and how.
tried() {
    name=$1
    shift
    "$@" >"$folder/$name.log" 2>&1 && return
    last=$(tr '\r' '\n' <"$folder/$name.log" | grep -v '^[[:space:]]*$' | tail -n 1 | cut -c 1-300)
    echo "\`$(echo "$*" | sed "s|$folder/||g; s|$tools/|tools/|g")\` failed ($(date -u +%F)): $last" >"$folder/$name.missing"
    return 1
}

# Installs packages into a folder of their own, and leaves a driver that has them.
driver() {
    name=$1
    packages=$2
    [ -x "$folder/$name" ] && return
    rm -rf "$folder/$name.missing" "$folder/$name.packages"
    # shellcheck disable=SC2086 # a list of words is meant
    tried "$name" timeout 1200 python3 -m pip install --quiet --target "$folder/$name.packages" $packages || return
    tried "$name" env PYTHONPATH="$folder/$name.packages" python3 -c "import $name" || return
    if [ "$name" = airllm ] && [ ! -d "$folder/model.f16.hf" ]; then
        rm -rf "$folder/model.f16.part"
        tried "$name" env PYTHONPATH="$folder/$name.packages" python3 "$tools/peers.py" unpack "$folder/model.f16.gguf" || return
    fi
    # Shows that it works; AirLLM cuts the model into layers on the way.
    tried "$name" env PYTHONPATH="$folder/$name.packages" python3 "$tools/peers.py" "$name" "$folder/model.f16.gguf" \
        --text "$tools/peers.py" --prompt-tokens 8 -n 3 || return
    # Versions and the driver's checksum: other ones are another program, which has to be measured anew.
    {
        echo "#!/bin/sh"
        echo "# $(ls "$folder/$name.packages" | grep -i "^$name-.*info$") $(cksum <"$tools/peers.py")"
        echo "PYTHONPATH='$folder/$name.packages' exec python3 '$tools/peers.py' $name \"\$@\""
    } >"$folder/$name.part"
    chmod +x "$folder/$name.part"
    mv "$folder/$name.part" "$folder/$name"
}

driver mistralrs mistralrs || true
driver airllm "airllm gguf" || true
for peer in llama-bench airllm mistralrs; do
    if [ -x "$folder/$peer" ]; then echo "$peer: $folder/$peer"; else echo "$peer: missing: $(cat "$folder/$peer.missing")"; fi
done
