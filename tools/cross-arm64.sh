#!/bin/sh
# Builds and tests for 64-bit Arm on an x86-64 Debian: the tests of ls-cpu, kernels for NEON among them, of ls-hash and of
# ls-bundle, run under qemu, which shows that they are right, not how fast they are.
#
#   tools/cross-arm64.sh                   cargo test -p ls-cpu -p ls-hash -p ls-bundle
#   tools/cross-arm64.sh build -p ls-run   any other cargo command
#
# Uses the installed Rust where it has the target's standard library (`rustup target add aarch64-unknown-linux-gnu`);
# otherwise Debian's `rustc-web` and its library for both machines, from the security archive. Those packages are
# unpacked into a cache folder, not installed, and apt's lists of arm64 packages are kept there too: nothing of this
# reaches the system. What apt installs for everyone: a linker and C library for the target, and qemu.
set -eu
target=aarch64-unknown-linux-gnu
cache="${XDG_CACHE_HOME:-$HOME/.cache}/leanstream/arm64"
cd "$(dirname "$0")/.."

install_missing() {
    missing=""
    command -v aarch64-linux-gnu-gcc >/dev/null 2>&1 || missing="$missing gcc-aarch64-linux-gnu"
    [ -e /usr/aarch64-linux-gnu/lib/crt1.o ] || missing="$missing libc6-dev-arm64-cross"
    command -v qemu-aarch64-static >/dev/null 2>&1 || missing="$missing qemu-user-static"
    [ -n "$missing" ] || return 0
    command -v apt-get >/dev/null 2>&1 || { echo "please install:$missing" >&2; exit 1; }
    sudo=""
    [ "$(id -u)" = 0 ] || sudo="sudo"
    $sudo apt-get update -qq
    # shellcheck disable=SC2086 # a list of words is meant
    DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends $missing
}

# apt for both machines, with lists and files of its own.
private_apt() {
    tool=$1
    shift
    "$tool" -qq -o Dir::State::lists="$cache/apt/lists" -o Dir::Cache="$cache/apt/cache" \
        -o APT::Architectures::=amd64 -o APT::Architectures::=arm64 -o APT::Sandbox::User= \
        -o Debug::NoLocking=1 "$@"
}

# The package that `package` ($1) depends on and whose name begins with $2.
dependency() {
    private_apt apt-cache depends "$1" | sed -n "s/^ *Depends: \($2[0-9.]*\)$/\1/p" | sort -u | tail -n 1
}

# Unpacks Debian's compiler and both standard libraries into $cache/root; takes effect when it is whole.
unpack_rust() {
    rm -rf "$cache/apt" "$cache/debs" "$cache/root" "$cache/rustc"
    mkdir -p "$cache/apt/lists/partial" "$cache/apt/cache/archives/partial" "$cache/debs"
    private_apt apt-get update
    driver=$(dependency libstd-rust-web-dev libstd-rust-web-)
    llvm=$(dependency "$driver" libllvm)
    (
        cd "$cache/debs"
        private_apt apt-get download rustc-web "$driver" "$llvm" \
            libstd-rust-web-dev:amd64 libstd-rust-web-dev:arm64
    )
    for package in "$cache"/debs/*.deb; do
        dpkg -x "$package" "$cache/root"
    done
    rm -rf "$cache/debs" "$cache/apt"
    cat >"$cache/rustc.new" <<'END'
#!/bin/sh
root="$(dirname "$0")/root/usr"
LD_LIBRARY_PATH="$root/lib/x86_64-linux-gnu" exec "$root/bin/rustc" --sysroot "$root" "$@"
END
    chmod +x "$cache/rustc.new"
    "$cache/rustc.new" --version >/dev/null
    mv "$cache/rustc.new" "$cache/rustc"
}

install_missing
if ! ls "$(rustc --print sysroot)/lib/rustlib/$target/lib/"libstd-*.rlib >/dev/null 2>&1; then
    [ -x "$cache/rustc" ] || unpack_rust
    export RUSTC="$cache/rustc"
fi
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64-static -L /usr/aarch64-linux-gnu"
# Emulation is slow enough.
export CARGO_PROFILE_DEV_OPT_LEVEL=3
# One test starts its own program anew, which this machine's kernel cannot run; it runs on x86-64.
[ $# -gt 0 ] || set -- test --no-fail-fast -p ls-cpu -p ls-hash -p ls-bundle -- \
    --skip a_full_disk_leaves_the_old_bundle_and_nothing_else
command=$1
shift
exec cargo "$command" --target "$target" --locked "$@"
