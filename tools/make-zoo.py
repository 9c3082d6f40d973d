#!/usr/bin/env python3
"""Makes the model zoo: a tiny random model of every architecture and of every option that changes the arithmetic, each
as a folder of Hugging Face transformers, with the logits that transformers computes from that very folder.
`tools/prep/tests/zoo.rs` imports the folders and must get the same logits.

Usage: make-zoo.py FOLDER          writes FOLDER/NAME/...; committed as tools/prep/tests/zoo

    python3 -m venv v && v/bin/pip install numpy==2.4.6 safetensors==0.8.0 tokenizers==0.23.3 torch==2.15.0 \
        transformers==5.24.0
    v/bin/python tools/make-zoo.py tools/prep/tests/zoo

Those versions made the committed files (on x86-64, where running it twice gives the same bytes; other versions may
draw other numbers, so that all folders change together).

Matrices are exact in half precision whatever their type in the file, so an f16 bundle loses nothing; gains and biases
are random and far from 1 and 0, so that a dropped or swapped one shows. `expected.safetensors` holds `tokens` (u32),
`logits` (f32, a row a position, computed in float32), and as metadata the `text` that transformers' own tokenizer
turned into the tokens. `half_cache` (f32) has the last rows again, computed with keys and values rounded to half
precision, as a cache in half precision keeps them: what is left of an error then is arithmetic alone. The computation is
repeated in float64, and the distance printed: the reference's own error.
"""
import json
import os
import shutil
import sys

import numpy
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Regex
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

CORPUS = """\
The river bends twice before the mill, and the old road follows it down to the sea. In the winter of the long rain the
water rose over the stones of the bridge, and there was no way over for three days. The miller's daughter counted the
barrels, wrote the number on the door, and waited. When the water fell, the fishermen came back with their nets and
there were 14 of them, then 25, then 36. They said that the sea had taken the lower road and given back the sand.
"""
# Words, numbers, a name, a character outside the corpus, and repetitions for attention to find.
TEXT = "The river, the sea, then the river: 36 Zoë"

WORDS = {
    "llama": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
BYTES = 256
MERGES = 30
SPECIAL = {"llama": ("<s>", "</s>"), "smollm": ("<|im_start|>", "<|im_end|>"), "qwen": ("<|endoftext|>", "<|im_end|>")}
VOCAB = BYTES + MERGES + 2
HALF_CACHE_ROWS = 4


def tokenizer(family):
    """A byte-level BPE tokenizer that cuts words as the family does; only Llama's puts BOS first."""
    made = Tokenizer(models.BPE(ignore_merges=family == "llama"))
    if family == "smollm":
        cut = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        split = pre_tokenizers.Split(Regex(WORDS[family]), "isolated")
        cut = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    made.pre_tokenizer = pre_tokenizers.Sequence(cut)
    made.decoder = decoders.ByteLevel()
    if family == "qwen":
        made.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL[family]),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([CORPUS], trainer)
    assert made.get_vocab_size() == VOCAB
    if family == "llama":
        first = SPECIAL[family][0]
        made.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, made.token_to_id(first))]
        )
    return made


def shape(**changes):
    """The sizes that all have in common: small, with grouped queries, and no two of them equal."""
    common = dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=72, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=1,
    )
    return {**common, **changes}


def rope(theta, **scaling):
    return {"rope_theta": theta, **(scaling or {"rope_type": "default"})}


# Scaled from a context so short that the 24 tokens reach every part of the rule.
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)

# Name: configuration, tokenizer, type of matrices in the file, type of vectors, whether config.json is spelled as
# before transformers 5, as most published files are.
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
ZOO = {
    "llama2": (LlamaConfig(**shape(rope_parameters=rope(1e4))), "llama", F16, F16, True),
    "llama3.1": (
        LlamaConfig(**shape(num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
                            rope_parameters=rope(100.0, **LLAMA3))),
        "llama", F16, F32, True,
    ),
    "linear-rope": (
        LlamaConfig(**shape(tie_word_embeddings=True, rope_parameters=rope(1e4, rope_type="linear", factor=4.0))),
        "llama", F16, F16, False,
    ),
    "head-dim": (
        LlamaConfig(**shape(head_dim=24, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
                            rope_parameters=rope(1e4))),
        "llama", F16, F32, False,
    ),
    "mistral": (
        MistralConfig(**shape(sliding_window=7, tie_word_embeddings=True, rope_parameters=rope(1e4))),
        "llama", BF16, BF16, True,
    ),
    "smollm2-sharded": (
        LlamaConfig(**shape(num_key_value_heads=4, tie_word_embeddings=True, rope_parameters=rope(1e5))),
        "smollm", F16, F16, False,
    ),
    "qwen2": (
        Qwen2Config(**shape(tie_word_embeddings=True, rms_norm_eps=1e-6, rope_parameters=rope(1e6))),
        "qwen", BF16, BF16, True,
    ),
    "qwen2-window": (
        Qwen2Config(**shape(use_sliding_window=True, sliding_window=5, max_window_layers=0, tie_word_embeddings=True,
                            rope_parameters=rope(1e4))),
        "qwen", F16, F32, False,
    ),
    "qwen3": (
        Qwen3Config(**shape(head_dim=16, tie_word_embeddings=True, rms_norm_eps=1e-6, rope_parameters=rope(1e6))),
        "qwen", BF16, F32, False,
    ),
}


def randomise(model, seed, matrix_type, vector_type):
    """Sets every parameter: matrices to what half precision holds exactly, whatever type they are stored in."""
    random = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=random)
        if parameter.dim() == 2:
            values = (0.2 * values).to(F16).to(matrix_type)
            values = torch.where(values.abs() < 2.0**-14, torch.zeros_like(values), values)
            assert torch.equal(values.to(F16).to(F32), values.to(F32)), name
        else:
            values = (0.5 * values if name.endswith("bias") else 1 + 0.3 * values).to(vector_type)
        parameter.data = values


def spell_as_before(folder):
    """Turns `rope_parameters` of config.json into `rope_theta` and `rope_scaling`; leaves out what is the default."""
    path = os.path.join(folder, "config.json")
    with open(path) as file:
        config = json.load(file)
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = parameters if parameters["rope_type"] != "default" else None
    config["torch_dtype"] = config.pop("dtype")
    if config.get("head_dim") == config["hidden_size"] // config["num_attention_heads"]:
        del config["head_dim"]
    del config["transformers_version"]
    with open(path, "w") as file:
        json.dump(config, file, indent=2)
        file.write("\n")


def write_tokenizer(folder, family):
    with open(os.path.join(folder, "tokenizer.json"), "w", encoding="utf-8") as file:
        file.write(tokenizer(family).to_str(pretty=False))
    first, end = SPECIAL[family]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "model_max_length": 64}
    if family == "llama":
        settings["bos_token"] = first
    with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as file:
        json.dump(settings, file, indent=2)
        file.write("\n")


def half_cache_attention(module, query, key, value, *rest, **options):
    """The plain attention of transformers after what a cache in half precision does. All families have the same."""
    key, value = (kept.to(F16).to(kept.dtype) for kept in (key, value))
    return eager_attention_forward(module, query, key, value, *rest, **options)


AttentionInterface.register("half_cache", half_cache_attention)
AttentionMaskInterface.register("half_cache", eager_mask)


def logits(folder, tokens, dtype, attention="eager"):
    """What transformers computes from the files alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].double().numpy()


def distance(found, expected):
    """The largest of a position: squared distance over squared length."""
    return (((found - expected) ** 2).sum(1) / (expected**2).sum(1)).max()


def make(folder, name, seed):
    config, family, matrix_type, vector_type, old_spelling = ZOO[name]
    shutil.rmtree(folder, ignore_errors=True)
    model = AutoModelForCausalLM.from_config(config)
    randomise(model, seed, matrix_type, vector_type)
    model.config.dtype = matrix_type
    model.save_pretrained(folder, max_shard_size="60KB" if name.endswith("sharded") else "1GB")
    write_tokenizer(folder, family)
    if old_spelling:
        spell_as_before(folder)
    tokens = AutoTokenizer.from_pretrained(folder)(TEXT).input_ids
    single, double = (logits(folder, tokens, dtype) for dtype in (F32, torch.float64))
    half_cache = logits(folder, tokens, F32, "half_cache")
    expected = {
        "tokens": numpy.array(tokens, numpy.uint32),
        "logits": single.astype(numpy.float32),
        "half_cache": half_cache[-HALF_CACHE_ROWS:].astype(numpy.float32),
    }
    save_file(expected, os.path.join(folder, "expected.safetensors"), metadata={"text": TEXT})
    size = sum(entry.stat().st_size for entry in os.scandir(folder))
    print(
        f"{name}: {size} bytes, {len(tokens)} tokens, logits of {double.std():.2f}, error of float32"
        f" {distance(single, double):.1e}, of a half-precision cache {distance(half_cache, single):.1e}"
    )


def main():
    for seed, name in enumerate(ZOO):
        make(os.path.join(sys.argv[1], name), name, seed)


main()
