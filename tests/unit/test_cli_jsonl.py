"""Files of prompts and answers: shapes, order, and what a killed run left."""

from __future__ import annotations

import json

import hypothesis
import hypothesis.strategies as st
import pytest

from mars_lm.cli.jsonl import AnswerFile, read_rows
from mars_lm.errors import MarsError

ANSWER = {
    "text": "hé\n",
    "token_ids": [1, 2],
    "finish_reason": "stop",
    "forwards": 1,
    "accepted_lengths": [2],
}


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows_of(tmp_path, *fields):
    return read_rows(write_rows(tmp_path / "in.jsonl", fields))


def test_rows_keep_all_they_hold(tmp_path):
    messages = [{"role": "user", "content": "b"}]
    rows = rows_of(tmp_path, {"prompt": "a", "id": 7}, {"messages": messages})
    assert [row.prompt for row in rows] == ["a", messages]
    assert rows[0].fields == {"prompt": "a", "id": 7}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({}, "found an empty object"),
        ({"question": "a"}, "expected either 'prompt' or 'messages', found question"),
        ({"prompt": "a", "messages": []}, "found prompt and messages"),
        ({"prompt": 3}, "'prompt' is expected to be a text"),
        ({"prompt": " "}, "not empty"),
        ({"messages": []}, "at least one message"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "assistant's already",
        ),
        ({"prompt": "a", "text": "mine"}, "'text', which the answer would overwrite"),
    ],
)
def test_a_row_of_another_shape_is_named(tmp_path, row, told):
    path = write_rows(tmp_path / "in.jsonl", [{"prompt": "fine"}, row])
    with pytest.raises(MarsError) as caught:
        read_rows(path)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert told in str(caught.value)


def test_a_file_without_rows(tmp_path):
    with pytest.raises(MarsError, match="has no rows"):
        rows_of(tmp_path)


@hypothesis.given(
    data=st.data(), fields=st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=4)
)
@hypothesis.settings(max_examples=60, deadline=None)
def test_a_file_cut_at_any_byte_is_continued_to_the_same_file(tmp_path_factory, data, fields):
    folder = tmp_path_factory.mktemp("cut")
    rows = rows_of(folder, *({"prompt": text, "n": number} for number, text in enumerate(fields)))
    path = folder / "out.jsonl"

    def write_all():
        answers = AnswerFile(path, rows)
        for row in rows[answers.done :]:
            answers.write(row, ANSWER)
        return answers

    write_all()
    whole = path.read_bytes()
    assert [json.loads(line) for line in whole.splitlines()] == [{**row.fields, **ANSWER} for row in rows]
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    assert write_all().done == len(rows)
    assert path.read_bytes() == whole
    assert AnswerFile(path, rows).done == len(rows)


@pytest.mark.parametrize(
    "content", ["notes of mine", "notes of mine\n", '{"prompt": "b", "text": ""}\n', "\n"]
)
def test_another_file_is_refused_and_left_as_it_is(tmp_path, content):
    rows = rows_of(tmp_path, {"prompt": "a"})
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    with pytest.raises(MarsError, match="line 1: not an answer to row 1"):
        AnswerFile(path, rows)
    assert path.read_text() == content


def test_answers_to_more_rows_than_there_are(tmp_path):
    rows = rows_of(tmp_path, {"prompt": "a"})
    path = tmp_path / "out.jsonl"
    AnswerFile(path, rows).write(rows[0], ANSWER)
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(MarsError, match="line 2: not an answer"):
        AnswerFile(path, rows)


def test_no_space_on_the_disk_is_a_sentence(tmp_path):
    rows = rows_of(tmp_path, {"prompt": "a"})
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    answers = AnswerFile(full, rows)
    with pytest.raises(MarsError, match="No space left on device"):
        answers.write(rows[0], ANSWER)


def test_a_folder_that_is_not_there(tmp_path):
    rows = rows_of(tmp_path, {"prompt": "a"})
    with pytest.raises(MarsError, match="can't be written"):
        AnswerFile(tmp_path / "none" / "out.jsonl", rows)
