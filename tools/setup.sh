#!/bin/sh
# Installs what a fresh Debian or Ubuntu machine lacks to build and test LeanStream: a C linker, pip to fetch the demo's
# model, git for the repository's own checks, OpenBLAS for ls-prep's projections, PoCL to test the OpenCL backend on the
# processor. Does nothing where everything is there.
set -eu
missing=""
command -v cc >/dev/null 2>&1 || missing="$missing gcc libc6-dev"
command -v git >/dev/null 2>&1 || missing="$missing git"
python3 -m pip --version >/dev/null 2>&1 || missing="$missing python3-pip"
pkg-config --exists openblas 2>/dev/null || missing="$missing libopenblas-dev pkg-config"
PATH="$PATH:/usr/sbin:/sbin" ldconfig -p 2>/dev/null | grep -q 'libOpenCL\.so\.1' || missing="$missing ocl-icd-libopencl1"
ls /etc/OpenCL/vendors/*.icd >/dev/null 2>&1 || missing="$missing pocl-opencl-icd"
if [ -n "$missing" ]; then
    command -v apt-get >/dev/null 2>&1 || { echo "please install:$missing" >&2; exit 1; }
    sudo=""
    [ "$(id -u)" = 0 ] || sudo="sudo"
    $sudo apt-get update -qq
    # shellcheck disable=SC2086 # a list of words is meant
    DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends $missing
fi
command -v cargo >/dev/null 2>&1 || { echo "cargo is missing: install Rust with rustup" >&2; exit 1; }
