#!/usr/bin/env python3
"""Writes templates/golden.json: what Hugging Face's apply_chat_template makes of the templates beside it.

Run by hand, with `pip install transformers jinja2` (last: transformers 5.24.0, jinja2 3.1.6).
"""
import datetime
import json
import pathlib

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

HERE = pathlib.Path(__file__).parent / "templates"
NOW = datetime.datetime(2024, 7, 26, 12, 34, 56, tzinfo=datetime.timezone.utc)
MARKS = {
    "smollm2": ("<|im_start|>", "<|im_end|>"),
    "qwen2.5": ("", "<|im_end|>"),
    "mistral": ("<s>", "</s>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "lines": ("", "<|end|>"),
}
SYSTEM = ("system", " Answer in one word.\n")
FIRST = ("user", "What is the capital of France?")
ANSWER = ("assistant", "Paris.")
CONVERSATIONS = [
    [FIRST],
    [SYSTEM, FIRST],
    [FIRST, ANSWER, ("user", "And of Italy?")],
    [SYSTEM, FIRST, ANSWER, ("user", "  two  spaces\n\nand a blank line \n"), ("assistant", "")],
    [("user", "naïve 東京 🗼 'quoted' \"twice\" <b>&amp;</b> {{ not_code }} {% raw %} \\n")],
    [FIRST, ("user", "twice in a row")],
    [SYSTEM],
]


class Fixed(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


def main():
    chat_template_utils.datetime = Fixed
    golden = []
    for name, (bos, eos) in MARKS.items():
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.BPE()), bos_token=bos, eos_token=eos
        )
        tokenizer.chat_template = (HERE / f"{name}.jinja").read_text()
        for turns in CONVERSATIONS:
            messages = [{"role": role, "content": text} for role, text in turns]
            for answer in (True, False):
                case = {"template": name, "bos": bos, "eos": eos, "messages": turns, "answer": answer}
                try:
                    case["text"] = tokenizer.apply_chat_template(
                        messages, tokenize=False, add_generation_prompt=answer
                    )
                except Exception as refused:
                    case["refused"] = str(refused)
                golden.append(case)
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in golden)
    (HERE / "golden.json").write_text(f"[\n{lines}\n]\n")
    print(len(golden), "cases")


if __name__ == "__main__":
    main()
