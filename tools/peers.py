#!/usr/bin/env python3
"""Decodes with a program that is measured beside LeanStream, and prints `{"decode_tok_s": …}`.

    tools/peers.py airllm MODEL.gguf --text FILE --prompt-tokens 64 -n 16 --threads 2
    tools/peers.py mistralrs MODEL.gguf --text FILE --prompt-tokens 64 -n 16 --threads 2
    tools/peers.py unpack MODEL.gguf        makes MODEL.hf, a folder of Hugging Face's form, for AirLLM

The prompt is the text's first tokens, the answer greedy; the rate is of the tokens behind the answer's first. What these
programs say goes to standard error. Run by `ls-prep paper`, in the cgroup of the other rows.
"""

import argparse
import contextlib
import json
import os
import pathlib
import sys
import time

# Bytes of text that surely have as many tokens as are asked for.
BYTES_PER_TOKEN = 16


def start_cold(*paths):
    """Asks the system to forget the files: pages that are there already count against no cgroup."""
    for path in paths:
        for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def text_of(args):
    with open(args.text, encoding="utf-8") as file:
        return file.read(args.prompt_tokens * BYTES_PER_TOKEN)


class Clock:
    """What transformers takes for a streamer: it is called with the prompt and then with each token."""

    def __init__(self):
        self.times = []

    def put(self, _tokens):
        self.times.append(time.perf_counter())

    def end(self):
        pass


def airllm(args):
    import torch
    from airllm import AutoModel

    torch.set_num_threads(args.threads)
    folder = args.model.with_suffix(".hf")
    start_cold(folder)
    model = AutoModel.from_pretrained(str(folder), device="cpu")
    tokens = model.tokenizer(text_of(args), return_tensors="pt")["input_ids"][:, : args.prompt_tokens]
    clock = Clock()
    model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=args.n,
        min_new_tokens=args.n,
        do_sample=False,
        use_cache=True,
        streamer=clock,
    )
    # The first is the prompt, the second the token that came of it.
    times = clock.times[1:]
    return (len(times) - 1) / (times[-1] - times[0])


def mistralrs(args):
    from mistralrs import CompletionRequest, Runner, Which

    start_cold(args.model)
    which = Which.GGUF(quantized_model_id=str(args.model.parent), quantized_filename=args.model.name)
    runner = Runner(which=which, max_seqs=1, prefix_cache_n=0, token_source="none")
    tokens = runner.tokenize_text(text_of(args), False, enable_thinking=None)[: args.prompt_tokens]
    request = CompletionRequest(
        prompt=runner.detokenize_text(tokens, False), model="default", max_tokens=args.n, temperature=0.0
    )
    return runner.send_completion_request(request).usage.avg_compl_tok_per_sec


def unpack(args):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(args.model.parent), "gguf_file": args.model.name}
    part = args.model.with_suffix(".part")
    AutoTokenizer.from_pretrained(**source).save_pretrained(part)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float16)
    # The weights are numbers by now; where they came from is no reason not to write them.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(part)
    part.rename(args.model.with_suffix(".hf"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program", choices=["airllm", "mistralrs", "unpack"])
    parser.add_argument("model", type=lambda path: pathlib.Path(path).resolve())
    parser.add_argument("--text")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("-n", type=int, default=16)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    # Both ask only the environment; nothing is to be looked for on a network.
    os.environ.update(
        OMP_NUM_THREADS=str(args.threads), RAYON_NUM_THREADS=str(args.threads), HF_HUB_OFFLINE="1"
    )
    with contextlib.redirect_stdout(sys.stderr):
        rate = {"airllm": airllm, "mistralrs": mistralrs, "unpack": unpack}[args.program](args)
    if rate is not None:
        print(json.dumps({"decode_tok_s": rate}))


if __name__ == "__main__":
    main()
