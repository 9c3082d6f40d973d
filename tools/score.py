#!/usr/bin/env python3
"""Scores the answers that `ls-run eval … --resume FILE` has written, apart from ls-run: a second opinion.

    ls-run eval truthfulqa model.lsb --data TruthfulQA.csv --resume run.jsonl --json > run.json
    tools/score.py run.jsonl --against run.json

Takes texts, references and likelihoods of the lines, no scores; prints means, and with --against exits with 1 if one differs
from ls-run's by more than 1e-6. Written from the definitions with Python's standard library only:

- token F1 and exact match after SQuAD's normalisation; CoQA's leave-one-out; Qasper's rule that nothing in common is 0;
- BLEU of a sentence as sacrebleu computes it for a corpus of one: mteval's international tokens, exponential smoothing,
  brevity penalty, orders 1 to 4 without effective order;
- MC1 (the best correct answer is likelier than every incorrect one), MC2 (share of the correct ones in the probability
  of all), and the choice between the best correct and the best incorrect answer.
"""

import argparse
import collections
import json
import math
import string
import sys
import unicodedata

ARTICLES = {"a", "an", "the"}
TOLERANCE = 1e-6


def squad_tokens(text):
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    # Articles are words between characters that belong to no word, not only between spaces.
    out, word = [], ""
    for c in bare + " ":
        if c.isalnum():
            word += c
            continue
        out.append(" " if word in ARTICLES else word)
        out.append(c)
        word = ""
    return "".join(out).split()


def f1(answer, reference, empty_agrees):
    a, r = squad_tokens(answer), squad_tokens(reference)
    if not a or not r:
        return float(empty_agrees and a == r)
    common = sum((collections.Counter(a) & collections.Counter(r)).values())
    # 2PR / (P + R) with P = common / |a| and R = common / |r|.
    return 2 * common / (len(a) + len(r))


def exact(answer, reference):
    return float(squad_tokens(answer) == squad_tokens(reference))


def against(references, rule, score):
    scores = [score(reference) for reference in references]
    if rule == "LeaveOneOut" and len(scores) > 1:
        others = [max(scores[:i] + scores[i + 1 :]) for i in range(len(scores))]
        return sum(others) / len(others)
    return max(scores)


def kind(c):
    return unicodedata.category(c)[0]


def bleu_tokens(text):
    """Marks stand alone unless digits are around them; symbols always do. Each rule is a pass from left to right."""
    text = text.rstrip()
    for fits, form in (
        (lambda a, b: kind(a) != "N" and kind(b) == "P", "{} {} "),
        (lambda a, b: kind(a) == "P" and kind(b) != "N", " {} {}"),
    ):
        out, i = [], 0
        while i < len(text):
            if i + 1 < len(text) and fits(text[i], text[i + 1]):
                out.append(form.format(text[i], text[i + 1]))
                i += 2
            else:
                out.append(text[i])
                i += 1
        text = "".join(out)
    return "".join(f" {c} " if kind(c) == "S" else c for c in text).split()


def bleu(answer, reference):
    a, r = bleu_tokens(answer), bleu_tokens(reference)
    product, smooth, found = 1.0, 1.0, False
    for order in range(1, 5):
        grams = lambda tokens: collections.Counter(zip(*(tokens[i:] for i in range(order))))
        total = len(a) - order + 1
        if total < 1:
            return 0.0
        correct = sum((grams(a) & grams(r)).values())
        found = found or correct > 0
        if correct == 0:
            smooth *= 2
        product *= correct / total if correct else 1 / (smooth * total)
    brevity = 1.0 if len(a) >= len(r) else math.exp(1 - len(r) / len(a))
    return brevity * product**0.25 if found else 0.0


def choices(logs):
    correct, incorrect = logs["correct"], logs["incorrect"]
    best, best_incorrect = logs["best"], logs.get("best_incorrect")
    largest = max(correct + incorrect)
    mass = lambda values: math.fsum(math.exp(value - largest) for value in values)
    scores = {
        "mc1": float(best > max(incorrect)),
        "mc2": mass(correct) / (mass(correct) + mass(incorrect)),
    }
    if best_incorrect is not None:
        scores["mc_binary"] = float(best > best_incorrect)
    return scores


def texts(item):
    answer, rule = item["prediction"], item["rule"]
    correct = item.get("correct_generation", item["correct"])
    incorrect = item["incorrect"]
    token_f1 = lambda reference: f1(answer, reference, rule != "Qasper")
    scores = {"f1": against(correct, rule, token_f1)}
    if not incorrect:
        scores["exact_match"] = against(correct, rule, lambda reference: exact(answer, reference))
        return scores
    scores["bleu"] = max(bleu(answer, reference) for reference in correct)
    scores["f1_incorrect"] = against(incorrect, rule, token_f1)
    scores["bleu_incorrect"] = max(bleu(answer, reference) for reference in incorrect)
    for name in ("f1", "bleu"):
        scores[f"{name}_difference"] = scores[name] - scores[f"{name}_incorrect"]
        scores[f"{name}_accuracy"] = float(scores[name] > scores[f"{name}_incorrect"])
    return scores


def score(path):
    lists = collections.defaultdict(list)
    items = 0
    with open(path, encoding="utf-8") as lines:
        head = json.loads(next(lines))
        if head.get("leanstream_eval") != 1:
            sys.exit(f"{path}: holds no results of `ls-run eval`")
        for line in lines:
            if not line.endswith("\n"):
                break  # a killed run's last
            item = json.loads(line)
            items += 1
            scores = {}
            if "prediction" in item:
                scores.update(texts(item))
            if "log_likelihoods" in item:
                scores.update(choices(item["log_likelihoods"]))
            for name, value in scores.items():
                lists[name].append(value)
    means = {name: math.fsum(values) / len(values) for name, values in lists.items()}
    return {"task": head["run"]["task"], "items": items, **means}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", help="what --resume has written")
    parser.add_argument("--against", metavar="JSON", help="what --json has printed")
    args = parser.parse_args()
    found = score(args.results)
    print(json.dumps(found, indent=1))
    if not args.against:
        return
    with open(args.against, encoding="utf-8") as file:
        theirs = json.load(file)
    worst, name = max(
        (abs(value - theirs.get(name, math.inf)), name)
        for name, value in found.items()
        if name != "task"
    )
    print(f"largest difference {worst:.3g} ({name})", file=sys.stderr)
    if worst > TOLERANCE or found["task"] != theirs["task"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
