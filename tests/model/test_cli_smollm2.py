"""The command line on the real SmolLM2-135M-Instruct."""

from __future__ import annotations

import json
import re

import pytest
import torch

from mars_lm.checkpoint import DEFAULT_ADAPTER, encode_chat
from run_mars import run_mars

pytestmark = pytest.mark.model

PROMPT = "What is 12 times 8? Answer with an emoji at the end."

needs_packaged_model = pytest.mark.skipif(
    not (DEFAULT_ADAPTER / "adapter_config.json").is_file(), reason="this tree has no packaged adapter"
)


def test_a_gguf_file_answers_what_transformers_answers(smollm2, smollm2_gguf):
    ids = torch.tensor([encode_chat(smollm2, [{"role": "user", "content": PROMPT}])])
    output = smollm2.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
    )
    text = smollm2.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    done = run_mars("generate", PROMPT, "--model", smollm2_gguf, "--dtype", "float32", "--max-new-tokens", 24)
    assert done.code == 0
    assert done.out.rstrip("\n") == text.rstrip("\n")
    assert "no MARS settings" in done.err


@needs_packaged_model
def test_the_packaged_model_gives_the_same_words_in_fewer_forwards(smollm2_gguf):
    common = ["generate", PROMPT, "--dtype", "float32", "--max-new-tokens", 48]
    one_token, exact = run_mars(*common, "--tau", 1), run_mars(*common)
    assert (one_token.code, exact.code) == (0, 0)
    assert one_token.out == exact.out
    forwards = [int(re.search(r"(\d+) forwards?", done.err).group(1)) for done in (one_token, exact)]
    assert forwards[1] < forwards[0]


@needs_packaged_model
def test_a_file_of_prompts(smollm2_gguf, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        "".join(json.dumps({"prompt": p}) + "\n" for p in ("Say hi.", PROMPT, "Count to five."))
    )
    done = run_mars(
        "generate", "--input", source, "--output", target, "--dtype", "float32", "--max-new-tokens", 16
    )
    assert done.code == 0
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    alone = run_mars("generate", PROMPT, "--dtype", "float32", "--max-new-tokens", 16)
    assert answers[1]["text"].rstrip("\n") == alone.out.rstrip("\n")


@needs_packaged_model
def test_the_demo_tells_that_the_texts_are_the_same(smollm2_gguf):
    done = run_mars("demo", "--dtype", "float32", "--max-new-tokens", 24)
    assert done.code == 0
    assert "4 of 4" in done.out
