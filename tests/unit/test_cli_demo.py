"""`mars demo`: two modes side by side, and a table that says what it measured."""

from __future__ import annotations

import dataclasses
import re

import pytest

from mars_lm import checkpoint as checkpoints
from mars_lm.cli.demo import PROMPTS
from mars_lm.decoding import Engine
from run_mars import run_mars
from tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tiny_checkpoint(max_position_embeddings=1024)
    path = tmp_path_factory.mktemp("checkpoint")
    checkpoints.save(made.model, made.tokenizer, path)
    return path


def demo(folder, *more, **how):
    return run_mars("demo", "--model", folder, "--dtype", "float32", "--max-new-tokens", 24, *more, **how)


def test_every_prompt_in_both_modes_and_a_table(folder):
    done = demo(folder)
    assert done.code == 0
    for name, prompt in PROMPTS.items():
        assert f"{name}: {prompt}" in done.out
    assert done.out.count("one token per forward") == len(PROMPTS)
    rows = re.findall(
        r"│ (\S.*?) +│ +(\d+) │ +(\d\.\d\d) → (\d\.\d\d) │ +(\d+\.\d) → (\d+\.\d) │ +(\d+\.\d\d)x │ +(.+?) │",
        done.out,
    )
    assert [row[0] for row in rows] == [*PROMPTS, "all"]
    for _, _, one, exact, *_, same in rows:
        assert one == "1.00"
        assert float(exact) >= 1
        assert same in ("yes", f"{len(PROMPTS)} of {len(PROMPTS)}")
    assert int(rows[-1][1]) == sum(int(row[1]) for row in rows[:-1])
    assert float(rows[-1][6]) == pytest.approx(float(rows[-1][5]) / float(rows[-1][4]), rel=0.05)
    assert "\x1b" not in done.out


def test_runs_take_turns_and_none_is_the_first_of_its_kind(folder, monkeypatch):
    modes = []
    add = Engine.add

    def noted(self, prompt_ids, settings):
        modes.append((settings.one_token, settings.max_new_tokens))
        return add(self, prompt_ids, settings)

    monkeypatch.setattr(Engine, "add", noted)
    demo(folder)
    assert [one_token for one_token, _ in modes] == [True, False] * (1 + len(PROMPTS))
    assert all(budget < 24 for _, budget in modes[:2])


def test_colours_on_a_terminal(folder, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[38;5;" in demo(folder, terminal=True).out
    assert "\x1b" not in demo(folder, "--no-color", terminal=True).out


def test_texts_that_differ_are_said_to(folder, monkeypatch):
    stream = Engine.stream

    def wrong(self):
        for output in stream(self):
            request = self._requests[output.request_id]
            if not request.settings.one_token:
                output = dataclasses.replace(output, new_token_ids=[5])
            yield output

    monkeypatch.setattr(Engine, "stream", wrong)
    done = demo(folder)
    assert f"0 of {len(PROMPTS)}" in done.out
