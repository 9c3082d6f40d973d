#!/bin/sh
# The 64-bit Arm program under qemu beside the x86-64 one, on a bundle that was made on x86-64: it verifies the bundle, plans
# with it and generates, and must say the same tokens. Right or wrong is what this shows, not speed.
#
#   tools/test-arm64.sh BUNDLE
set -eu
cd "$(dirname "$0")/.."
bundle=$1
target="${CARGO_TARGET_DIR:-target}"
here="$target/release/ls-run"
there="$target/aarch64-unknown-linux-gnu/release/ls-run"

arm() {
    qemu-aarch64-static -L /usr/aarch64-linux-gnu "$there" "$@"
}

# A field of a JSON object on standard input.
field() {
    python3 -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1"
}

same() {
    [ "$2" = "$3" ] || { echo "$1: $2 on x86-64, $3 on arm64" >&2; exit 1; }
    echo "$1: $2"
}

same "verified" True "$(arm verify "$bundle" --json | field ok)"
for what in weight_bytes kv_cache_bytes context; do
    plan="plan $bundle --memory 1GiB --context 256 --threads 1 --json"
    # shellcheck disable=SC2086 # words are meant
    same "planned $what" "$("$here" $plan | field $what)" "$(arm $plan | field $what)"
done
# All in memory, and most of it streamed.
for memory in "--memory 1GiB" "--weight-cache 20%"; do
    run="--context 256 --threads 2 --temp 0 --ignore-eos --json $memory"
    prompt="The capital of France is"
    # shellcheck disable=SC2086 # words are meant
    same "tokens, $memory" "$("$here" generate "$bundle" -p "$prompt" -n 6 $run | field tokens)" \
        "$(arm generate "$bundle" -p "$prompt" -n 6 $run | field tokens)"
done
