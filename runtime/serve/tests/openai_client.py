#!/usr/bin/env python3
"""Talks to a running ls-serve with OpenAI's own client: chat, streaming, cancellation, concurrent and wrong requests.

Run by hand: `pip install openai`, then `ls-serve model.lsb --port 8080 --queue 2` and
`openai_client.py http://127.0.0.1:8080 [KEY]` (last: openai 3.57.0).
"""
import sys
import threading
import time
import urllib.request

import openai
from openai import OpenAI

BASE = sys.argv[1].rstrip("/")
KEY = sys.argv[2] if len(sys.argv) > 2 else "none"
client = OpenAI(base_url=BASE + "/v1", api_key=KEY, max_retries=0)
MODEL = client.models.list().data[0].id
HELLO = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


def ask(**more):
    given = {"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 24, **more}
    return client.chat.completions.create(**given)


def metric(name):
    request = urllib.request.Request(BASE + "/metrics", headers={"Authorization": "Bearer " + KEY})
    lines = urllib.request.urlopen(request).read().decode().splitlines()
    return float(next(line for line in lines if line.startswith("leanstream_" + name + " ")).split()[-1])


def wait_for(name, wanted):
    for _ in range(600):
        if wanted(metric(name)):
            return
        time.sleep(0.05)
    raise AssertionError(f"{name} stays {metric(name)}")


def refused(kind, **more):
    try:
        ask(**more)
    except kind as error:
        return error
    raise AssertionError(f"{more} was not refused")


def main():
    assert client.models.retrieve(MODEL).id == MODEL
    whole = ask()
    said = whole.choices[0].message.content
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    print("chat:", said)

    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == said
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    print("streamed in", len(chunks), "chunks, the same text")

    text = client.completions.create(model=MODEL, prompt="Once upon a time", temperature=0, max_tokens=8)
    print("completion:", text.choices[0].text)

    word = said.split()[2]
    stopped = ask(stop=word)
    assert word not in stopped.choices[0].message.content and stopped.choices[0].finish_reason == "stop"
    drawn = [ask(temperature=1.2, seed=seed).choices[0].message.content for seed in (1, 1)]
    assert drawn[0] == drawn[1]
    print("stop and seed hold")

    before = metric('requests_total{outcome="cancelled"}')
    story = [{"role": "user", "content": "Write a very long story."}]
    with ask(messages=story, max_tokens=None, stream=True) as stream:
        next(iter(stream))
        next(iter(stream))
    wait_for('requests_total{outcome="cancelled"}', lambda count: count > before)
    print("cancelled by leaving")

    outcomes = []

    def one(index):
        while True:
            try:
                answer = ask(max_tokens=4, messages=[{"role": "user", "content": f"Count from {index}."}])
                outcomes.append(answer.usage.completion_tokens)
                return
            except openai.RateLimitError as error:
                assert int(error.response.headers["retry-after"]) >= 1
                outcomes.append("again")
                time.sleep(0.2)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answered = [outcome for outcome in outcomes if outcome != "again"]
    assert len(answered) == 8
    print("8 at once: all answered,", outcomes.count("again"), "times told to come again")

    assert refused(openai.NotFoundError, model="gpt-4").code == "model_not_found"
    assert refused(openai.BadRequestError, temperature=5).param == "temperature"
    assert refused(openai.BadRequestError, n=2).param == "n"
    assert refused(openai.BadRequestError, messages=[]).param == "messages"
    too_long = [{"role": "user", "content": "word " * 9000}]
    assert refused(openai.BadRequestError, messages=too_long).code == "context_length_exceeded"
    assert refused(openai.APIStatusError, messages=[{"role": "user", "content": "x" * 10**6}]).status_code == 413
    if KEY != "none":
        other = OpenAI(base_url=BASE + "/v1", api_key="wrong-key", max_retries=0)
        try:
            other.models.list()
            raise AssertionError("a wrong key was taken")
        except openai.AuthenticationError:
            pass
    print("wrong requests are refused as they should be")


if __name__ == "__main__":
    main()
