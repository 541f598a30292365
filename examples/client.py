#!/usr/bin/env python3
"""Chat over several turns, and see how much of each prompt is found cached.

client.py [URL | --url-file FILE]
"""

import argparse
import json
import random
from pathlib import Path

from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("url", nargs="?", default="http://127.0.0.1:5000", help="default: %(default)s")
parser.add_argument("--url-file", type=Path, help="what the server wrote; each turn takes any URL")
args = parser.parse_args()
urls = json.loads(args.url_file.read_text())["urls"] if args.url_file else [args.url]
clients = [OpenAI(base_url=url.removesuffix("/v1") + "/v1", api_key="none") for url in urls]
model = clients[0].models.list().data[0].id

messages = [{"role": "system", "content": "You are terse, and know all of geography. " * 8}]
for question in ("What is the capital of France?", "And of Italy?", "Which is larger?", "By far?"):
    messages.append({"role": "user", "content": question})
    answer = random.choice(clients).chat.completions.create(
        model=model, messages=messages, max_tokens=32, temperature=0
    )
    reply, usage = answer.choices[0].message.content, answer.usage
    messages.append({"role": "assistant", "content": reply})
    cached = usage.prompt_tokens_details.cached_tokens
    print(f"{cached} of {usage.prompt_tokens} prompt tokens were cached: {question} {reply!r}")
