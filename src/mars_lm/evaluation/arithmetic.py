"""Sums with written-out steps, and a small model and tokenizer for them: the study from scratch.

    14+4-9+6   ->   14+4=18
                    18-9=9
                    9+6=15

Each line takes the result of the one above and the sum's next number, so an answer has tokens that must be
computed and tokens that only have to be copied, as texts do.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = "0123456789+-=\n"
MOST = 20  # no result is larger, and none below 0
_SPECIAL = ("<pad>", "<user>", "<assistant>", "<end>", "<mask>")
_TEMPLATE = (
    "{% for message in messages %}{{ '<user>' if message['role'] == 'user' else '<assistant>' }}"
    "{{ message['content'] }}{{ '<end>' if message['role'] == 'assistant' else '' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def problem(draw: random.Random, terms: tuple[int, int] = (4, 6)) -> tuple[str, str]:
    """A sum, and its solution line by line, the result last.

    Args:
        draw: where chance comes from.
        terms: the least and the most numbers in it: one up to `MOST`, then single digits.
    """
    total = draw.randint(1, MOST)
    question, lines = str(total), []
    for _ in range(draw.randint(*terms) - 1):
        number = draw.choice([n for n in range(-9, 10) if n and 0 <= total + n <= MOST])
        question += f"{number:+d}"
        lines.append(f"{total}{number:+d}={total + number}")
        total += number
    return question, "\n".join(lines)


def problems(seed: int, terms: tuple[int, int] = (4, 6)) -> Iterator[tuple[str, str]]:
    """Different problems, without end."""
    draw, seen = random.Random(seed), set()
    while True:
        question, solution = problem(draw, terms)
        if question not in seen:
            seen.add(question)
            yield question, solution


def write_rows(folder: Path, *, train: int, test: int, seed: int = 0) -> None:
    """`arithmetic/train.jsonl` (messages) and `test.jsonl` (question, answer); no sum is in both."""
    source = problems(seed)
    held_out = [next(source) for _ in range(test)]
    target = folder / "arithmetic"
    target.mkdir(parents=True, exist_ok=True)
    with (target / "test.jsonl").open("w") as file:
        for question, solution in held_out:
            row = {"question": question, "answer": solution.rsplit("=", 1)[-1]}
            file.write(json.dumps(row) + "\n")
    with (target / "train.jsonl").open("w") as file:
        for _ in range(train):
            question, solution = next(source)
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": solution}]
            file.write(json.dumps({"messages": turns}) + "\n")


def make_tokenizer() -> Any:
    """One token a character, a chat template, and a mask token."""
    words = {token: number for number, token in enumerate((*_SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", mask_token="<mask>"
    )
    fast.chat_template = _TEMPLATE
    return fast


def make_model(tokenizer: Any, *, hidden: int, layers: int, seed: int) -> Any:
    """An untrained Llama: heads of 32 dimensions, embeddings tied.

    Args:
        tokenizer: it gives the vocabulary.
        hidden: the width, a multiple of 32; the feed-forward layers are 8/3 as wide.
        layers: how many.
        seed: of the weights.
    """
    import torch

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=(8 * hidden // 3 + 31) // 32 * 32,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model.eval()
