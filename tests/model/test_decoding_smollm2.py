"""Exact decoding of the real model gives the tokens of transformers' greedy search."""

from __future__ import annotations

import copy

import pytest

from decoding_reference import hf_greedy
from mars_lm.checkpoint import Checkpoint, encode_chat, make_mars_ready
from mars_lm.decoding import generate
from mars_lm.settings import DecodingSettings

pytestmark = pytest.mark.model

QUESTIONS = (
    "What is 12 times 7?",
    "Write a Python function that reverses a list.",
    "Name three rivers of Europe, and say in one sentence what each of them is known for.",
    "A farmer has 17 sheep. All but 9 run away, then he buys 4 more. How many has he now?",
)


@pytest.fixture(scope="module")
def checkpoint(smollm2) -> Checkpoint:
    model = copy.deepcopy(smollm2.model)  # the shared one is not to be changed
    mars = make_mars_ready(model, smollm2.tokenizer, block_size=4, base_model=None)
    return Checkpoint(model, smollm2.tokenizer, mars)


def test_exact_and_one_token_mode_say_what_transformers_says(checkpoint):
    prompts = [
        encode_chat(checkpoint.tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS
    ]
    wanted = [hf_greedy(checkpoint, prompt, 40) for prompt in prompts]
    for settings in (
        DecodingSettings(max_new_tokens=40, tau=1.0),
        DecodingSettings(max_new_tokens=40),
        DecodingSettings(max_new_tokens=40, recovery=False, tau=0.1),
    ):
        results = generate(checkpoint, prompts, settings)
        assert [result.token_ids for result in results] == wanted
        if not settings.one_token:  # even masks that were never trained guess some tokens
            assert sum(len(result.token_ids) for result in results) > sum(r.forwards for r in results)
            assert sum(result.rejected_drafts for result in results) > 0
