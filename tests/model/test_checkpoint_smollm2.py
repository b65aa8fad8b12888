"""The real SmolLM2-135M-Instruct, from its GGUF file to a plain checkpoint and back."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mars_lm.checkpoint import (
    DEFAULT_ADAPTER,
    Checkpoint,
    encode_chat,
    encode_prompt,
    end_token_ids,
    load,
    load_default,
    make_mars_ready,
    save,
)

pytestmark = pytest.mark.model

TEXTS = [
    "What is the capital of France?",
    "\nA line first,\n\nthen   spaces  ",
    "   indented",
    "def f(x):\n\treturn x  # naïve — 数学 🙂",
    "",
    "<|im_star",
    "12345 + 67890 = ?",
]


@pytest.fixture(scope="module")
def converted(smollm2: Checkpoint) -> Checkpoint:
    """A MARS-ready copy; the fixture that all tests share stays as it is."""
    made = Checkpoint(copy.deepcopy(smollm2.model), copy.deepcopy(smollm2.tokenizer), None)
    made.mars = make_mars_ready(made.model, made.tokenizer, block_size=4, base_model="SmolLM2")
    return made


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_the_chat_templates(smollm2: Checkpoint, text: str) -> None:
    for messages in (
        [{"role": "user", "content": text}],
        [{"role": "system", "content": text}, {"role": "user", "content": text}],
        [
            {"role": "user", "content": text},
            {"role": "assistant", "content": text},
            {"role": "user", "content": "and?"},
        ],
    ):
        wanted = smollm2.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert encode_chat(smollm2, messages) == wanted


def test_mask_token_and_end_token(converted: Checkpoint) -> None:
    assert converted.mars.mask_token_id == 16
    assert converted.tokenizer.mask_token == "<empty_output>"
    assert len(converted.tokenizer) == converted.model.config.vocab_size == 49152
    assert end_token_ids(converted) == {converted.tokenizer.convert_tokens_to_ids("<|im_end|>")}


def test_text_that_names_special_tokens_is_text(converted: Checkpoint) -> None:
    text = "What do <empty_output> and <|im_end|> and <|endoftext|> mean?"
    ids = encode_chat(converted, [{"role": "user", "content": text}])
    assert 16 not in ids
    assert ids.count(2) == 2  # the default system message's end, and the user's
    assert text in converted.tokenizer.decode(ids)
    assert not {0, 2, 16} & set(encode_prompt(converted, text))


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("a\n\n1. First", ["a", "ĊĊ", "1", ".", "ĠFirst"]),
        ("x =  5", ["x", "Ġ=", "ĠĠ", "5"]),
        ("costs $12", ["cost", "s", "Ġ$", "1", "2"]),
    ],
)
def test_text_before_digits_is_split_as_in_the_models_own_tokenizer(
    smollm2: Checkpoint, text: str, tokens: list[str]
) -> None:
    assert smollm2.tokenizer.convert_ids_to_tokens(smollm2.tokenizer(text).input_ids) == tokens


def test_it_answers(smollm2: Checkpoint) -> None:
    ids = encode_chat(smollm2, [{"role": "user", "content": "What is the capital of France?"}])
    with torch.no_grad():
        out = smollm2.model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    assert "Paris" in smollm2.tokenizer.decode(out[0, len(ids) :])


def test_saved_it_is_a_plain_checkpoint(converted: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    save(converted.model, converted.tokenizer, folder)
    try:
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        wanted, got = converted.model.state_dict(), plain.state_dict()
        assert wanted.keys() == got.keys()
        assert all(torch.equal(wanted[name], got[name]) for name in wanted)
        assert plain.config.mars == converted.mars.to_dict()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        for text in TEXTS:
            assert tokenizer(text).input_ids == converted.tokenizer(text).input_ids
        again = load(folder, dtype="bfloat16", device="cpu")
        assert again.model.dtype == torch.bfloat16
        assert again.mars == converted.mars
    finally:
        shutil.rmtree(folder)


@pytest.mark.skipif(not (DEFAULT_ADAPTER / "adapter_config.json").is_file(), reason="no packaged adapter yet")
def test_packaged_model_starts_from_its_cache(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mars_lm import base_weights

    monkeypatch.setattr(base_weights, "find_or_fetch", lambda: smollm2_gguf)
    monkeypatch.setenv("MARS_CACHE", str(tmp_path / "cache"))
    first = load_default(dtype="bfloat16", device="cpu")
    second = load_default(dtype="bfloat16", device="cpu")
    assert first.mars == second.mars
    assert first.mars is not None
    wanted, got = first.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)
    size = sum(path.stat().st_size for path in DEFAULT_ADAPTER.iterdir())
    assert size <= 25_000_000
