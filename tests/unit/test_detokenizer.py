"""Text from tokens as they come: never half a character, and in the end the whole text."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest

from mars_lm.detokenizer import REPLACEMENT, Detokenizer, decode
from tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def chunks(ids: list[int], sizes: list[int]) -> list[list[int]]:
    parts, at = [], 0
    for size in sizes:
        parts.append(ids[at : at + size])
        at += size
    return [*parts, ids[at:]]


@hypothesis.given(text=st.text(max_size=40), sizes=st.lists(st.integers(0, 5), max_size=20))
@hypothesis.settings(max_examples=200, deadline=None)
def test_pieces_join_to_the_text_and_show_no_half_character(text, sizes):
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push(part) for part in chunks(ids, sizes)]
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)
        assert "".join(pieces) == text
    assert "".join(pieces) + detokenizer.finish() == decode(TOKENIZER, ids) == text


@hypothesis.given(ids=st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30), size=st.integers(1, 4))
@hypothesis.settings(max_examples=200, deadline=None)
def test_any_ids_even_broken_characters_give_what_decoding_them_at_once_gives(ids, size):
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert "".join(pieces) + detokenizer.finish() == decode(TOKENIZER, ids)


def test_a_character_waits_for_its_last_byte_and_the_text_before_it_does_not():
    ids = TOKENIZER("ok 🙂", add_special_tokens=False).input_ids
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.push(ids[:-2]).strip() == "ok"
    assert detokenizer.push(ids[-2:-1]) == ""
    assert detokenizer.push(ids[-1:]) == "🙂"
    assert detokenizer.finish() == ""


def test_an_answer_cut_inside_a_character_shows_that_something_was_there():
    ids = TOKENIZER("🙂", add_special_tokens=False).input_ids
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.push(ids[:2]) == ""
    assert set(detokenizer.finish()) == {REPLACEMENT}


def test_special_tokens_are_not_text():
    detokenizer = Detokenizer(TOKENIZER)
    ids = TOKENIZER("hello", add_special_tokens=False).input_ids
    assert detokenizer.push([*ids, TOKENIZER.eos_token_id]) == "hello"


@pytest.mark.parametrize("text", ["one two  three", " leading", "a\n\n  b"])
def test_a_tokenizer_that_sets_spaces_by_what_stands_before(text):
    """SentencePiece drops the space at a text's beginning, so tokens decoded alone would lose theirs."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        ["one two three leading a b\n"], trainers.BpeTrainer(vocab_size=60, show_progress=False)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    ids = tokenizer(text).input_ids
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.finish() == decode(
        tokenizer, ids
    )
