"""JSON Lines in: a bad row is named by file and line."""

from __future__ import annotations

import pytest

from mars_lm.errors import MarsError
from mars_lm.rows import check_messages, read_objects


def test_objects_with_their_places_and_empty_lines_skipped(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": "one\u2028line"}\n\n  \n{"b": 2}', encoding="utf-8")
    assert list(read_objects(path)) == [
        (f"{path}, line 1", {"a": "one\u2028line"}),
        (f"{path}, line 4", {"b": 2}),
    ]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "found list"),
        (b"\xff", "not valid UTF-8"),
        (b'{"a": "\\ud800"}', "not valid UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, told):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b"\n")
    with pytest.raises(MarsError, match=f"rows.jsonl, line 2: .*{told}"):
        list(read_objects(path))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(MarsError, match=r"none\.jsonl can't be read"):
        list(read_objects(tmp_path / "none.jsonl"))


@pytest.mark.parametrize(
    "messages",
    [
        "text",
        [],
        ["text"],
        [{"role": "user"}],
        [{"role": "nobody", "content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": ["user"], "content": "x"}],
    ],
)
def test_messages_of_another_shape(messages):
    with pytest.raises(MarsError, match=r"^here: "):
        check_messages(messages, "here")
