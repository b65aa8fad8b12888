"""Rows in: their shapes, and what a bad one is told."""

from __future__ import annotations

import json

import datasets
import pytest

from mars_lm.errors import MarsError
from mars_lm.training import examples
from mars_lm.training.examples import has_response, load_examples

USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "the answer"}
SYSTEM = {"role": "system", "content": "be kind"}


def written(tmp_path, *rows, name="rows.jsonl"):
    path = tmp_path / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_messages_are_prompt_and_last_answer(tmp_path):
    turns = [SYSTEM, USER, ANSWER, USER, {**ANSWER, "name": "ignored"}]
    rows = load_examples(written(tmp_path, {"messages": turns, "id": 3}))
    assert rows.to_list() == [{"prompt": [SYSTEM, USER, ANSWER, USER], "completion": [ANSWER]}]


def test_messages_are_whole_where_every_turn_is_trained_on(tmp_path):
    path = written(tmp_path, {"messages": [USER, ANSWER, USER]})
    assert load_examples(path, every_turn=True).to_list() == [{"messages": [USER, ANSWER, USER]}]
    with pytest.raises(MarsError, match=r"line 1: no message is the assistant's"):
        load_examples(written(tmp_path, {"messages": [USER]}), every_turn=True)


def test_prompt_and_completion_are_text_or_messages(tmp_path):
    text = {"prompt": "2+2=", "completion": "4"}
    assert load_examples(written(tmp_path, {**text, "id": 1})).to_list() == [text]
    turns = {"prompt": [USER], "completion": [ANSWER]}
    assert load_examples(written(tmp_path, turns)).to_list() == [turns]


def test_datasets_are_joined_in_order(tmp_path):
    one = written(tmp_path, {"prompt": "a", "completion": "b"}, name="one.jsonl")
    two = written(tmp_path, {"prompt": "c", "completion": "d"}, name="two.jsonl")
    assert load_examples([one, two])["prompt"] == ["a", "c"]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("{", "not valid JSON"),
        ("[1]", "expected a JSON object, found list"),
        ({"text": "x", "id": 1}, r"expected 'messages' \(role and content each\), or .*; found id, text\."),
        ({}, "found nothing"),
        ({"messages": []}, "a list of at least one message"),
        ({"messages": [USER, {"role": "robot", "content": "x"}]}, "message 2 is expected to be an object"),
        ({"messages": [{"role": "user", "content": None}]}, "message 1 is expected to be an object"),
        ({"messages": [USER]}, "the last message is expected to be the assistant's"),
        ({"prompt": "x", "completion": [ANSWER]}, "both text, or both lists of messages"),
        ({"prompt": 3, "completion": 4}, "both text, or both lists of messages"),
        ({"prompt": ["x"], "completion": [ANSWER]}, "prompt: message 1 is expected"),
        ({"prompt": [USER], "completion": [ANSWER]}, "this row is of another kind"),
    ],
)
def test_a_row_of_another_shape_is_named_by_file_and_line(tmp_path, row, sentence):
    path = written(tmp_path, {"prompt": "good", "completion": "row"}, "", row)
    with pytest.raises(MarsError, match=rf"rows\.jsonl, line 3: .*{sentence}"):
        load_examples(path)


def test_bad_rows_are_left_out_and_counted_where_asked(tmp_path, caplog):
    good = {"messages": [USER, ANSWER]}
    rows = load_examples(written(tmp_path, good, {"messages": [USER]}, {"x": 1}, good), skip_bad_rows=True)
    assert len(rows) == 2
    assert "2 rows of another shape were left out" in caplog.text


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda folder: str(folder / "none.jsonl"), r"none\.jsonl can't be read"),
        (lambda folder: written(folder, ""), r"rows\.jsonl: the dataset has no rows"),
        (lambda folder: "nobody/no-such-dataset", "neither a local JSONL file nor to be had from the Hub"),
        (lambda folder: "nobody-at-all", "neither a local JSONL file nor to be had from the Hub"),
    ],
)
def test_a_dataset_that_is_not_there(tmp_path, make, sentence):
    with pytest.raises(MarsError, match=sentence):
        load_examples(make(tmp_path))


def test_kinds_do_not_mix(tmp_path):
    text = written(tmp_path, {"prompt": "a", "completion": "b"}, name="text.jsonl")
    turns = written(tmp_path, {"messages": [USER, ANSWER]}, name="turns.jsonl")
    with pytest.raises(MarsError, match="mix rows of text with rows of messages"):
        load_examples([text, turns])


def test_rows_of_the_hub_are_checked_too(monkeypatch, caplog):
    # As the Hub has them: other columns, and messages with fields that are mostly empty.
    good = [{**USER, "functions": None}, {**ANSWER, "functions": None}]
    bad = [{**USER, "functions": "[]"}, {"role": "environment", "content": "", "functions": None}]
    rows = [{"id": str(number), "messages": turns} for number, turns in enumerate((good, bad, good))]
    monkeypatch.setattr(
        examples.datasets, "load_dataset", lambda name, split: datasets.Dataset.from_list(rows)
    )
    with pytest.raises(MarsError, match=r"some/dataset, row 1: message 2 is expected"):
        load_examples("some/dataset")
    loaded = load_examples("some/dataset", skip_bad_rows=True)
    assert loaded.to_list() == [{"prompt": [USER], "completion": [ANSWER]}] * 2
    assert "some/dataset: 1 rows of another shape were left out" in caplog.text


def test_whether_there_is_a_response():
    assert has_response({"prompt": "x", "completion": " y "})
    assert not has_response({"prompt": "x", "completion": " \n"})
    assert has_response({"completion": [ANSWER]})
    assert not has_response({"completion": [{**ANSWER, "content": "\n"}]})
    assert not has_response({"messages": [USER, {**ANSWER, "content": ""}]})
    assert has_response({"input_ids": [1]})
