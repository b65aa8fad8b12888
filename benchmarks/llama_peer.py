"""llama.cpp's side of `decode.py --parts llamacpp`, for an interpreter with llama-cpp-python, not mars-lm.

Reads a line of JSON at a time and answers with one: first which model to load, then prompts.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import sys
from typing import Any

from llama_cpp import Llama


def answer(text: Any) -> None:
    print(json.dumps(text), flush=True)


def main() -> None:
    job = json.loads(sys.stdin.readline())
    model = Llama(
        job["model"],
        n_ctx=job["context"],
        n_threads=job["threads"],
        n_threads_batch=job["threads"],
        verbose=False,
    )
    answer(importlib.metadata.version("llama-cpp-python"))
    for line in sys.stdin:
        job = json.loads(line)
        model.reset()  # else it would find the beginning of a repeated prompt in its cache
        tokens = model.generate(job["prompt"], temp=0.0)  # it goes on behind end tokens
        answer(list(itertools.islice(tokens, job["new_tokens"])))


if __name__ == "__main__":
    main()
