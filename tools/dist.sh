#!/bin/sh
# Release archives of ls-run for x86-64 and 64-bit Arm, and their checksums, into artifacts/dist. The Arm one is cross-built
# (tools/cross-arm64.sh). An archive has the program, the README, our licences and the list of what others wrote and under
# which licences. The same sources and tools give the same bytes.
#
#   tools/dist.sh                   both
#   tools/dist.sh x86_64            one of x86_64, aarch64
set -eu
cd "$(dirname "$0")/.."
[ "$(uname -m)" = x86_64 ] || { echo "archives are made on x86-64" >&2; exit 1; }
[ $# -gt 0 ] || set -- x86_64 aarch64
out=artifacts/dist
target="${CARGO_TARGET_DIR:-target}"
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)
when=$(git log -1 --format=%ct 2>/dev/null || echo 0)
mkdir -p "$out"

for machine in "$@"; do
    triple="$machine-unknown-linux-gnu"
    case $machine in
    x86_64)
        cargo build --release --locked -p ls-run
        built="$target/release" strip=strip
        ;;
    aarch64)
        tools/cross-arm64.sh build --release -p ls-run
        built="$target/$triple/release" strip=aarch64-linux-gnu-strip
        ;;
    *)
        echo "no archive for $machine" >&2
        exit 2
        ;;
    esac
    name="leanstream-$version-$machine-linux"
    rm -rf "${out:?}/$name"
    mkdir -p "$out/$name"
    "$strip" -o "$out/$name/ls-run" "$built/ls-run"
    cp README.md CHANGELOG.md LICENSE-MIT LICENSE-APACHE "$out/$name"
    {
        echo "ls-run contains these packages of others, under the licences named:"
        echo
        cargo tree --locked -p ls-run -e normal --target "$triple" --prefix none --format '{p}  {l}' |
            grep -v "($PWD" | sed 's/ (\*)$//' | sort -u
    } >"$out/$name/THIRD-PARTY.txt"
    tar -C "$out" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$when" -cf - "$name" |
        gzip -9n >"$out/$name.tar.gz"
    rm -rf "${out:?}/$name"
done
cd "$out"
sha256sum leanstream-*.tar.gz >SHA256SUMS
cat SHA256SUMS
