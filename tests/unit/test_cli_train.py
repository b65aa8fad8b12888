"""`mars train`: what --set makes of its values."""

from __future__ import annotations

import pytest

from mars_lm.cli.train import parse_overrides
from run_mars import run_mars


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("a=3", 3),
        ("a=5e-6", 5e-6),
        ("a=5.0e-6", 5e-6),
        ("a=true", True),
        ("a=text", "text"),
        ("a='5'", "5"),
        ("a=", None),
        ("a=x=y", "x=y"),
        ("a=[one.jsonl, two.jsonl]", ["one.jsonl", "two.jsonl"]),
        ("a={b: 1}", {"b": 1}),
    ],
)
def test_values_are_yaml(assignment, value):
    parsed = parse_overrides([assignment])["a"]
    assert (parsed, type(parsed)) == (value, type(value))


def test_the_last_of_a_key_holds():
    assert parse_overrides(["a=1", "b=2", "a=3"]) == {"a": 3, "b": 2}


def test_recipe_and_overrides_reach_the_run_and_its_folder_is_printed(monkeypatch, tmp_path):
    import mars_lm.training.run as run

    seen = []
    monkeypatch.setattr(
        run, "train", lambda recipe, overrides: seen.append((recipe, overrides)) or "runs/x/final"
    )
    done = run_mars("train", tmp_path / "r.yaml", "--set", "max_steps=2", "--set", "learning_rate=1e-3")
    assert (done.code, done.out) == (0, "runs/x/final\n")
    assert seen == [(tmp_path / "r.yaml", {"max_steps": 2, "learning_rate": 1e-3})]


def test_an_unknown_key_is_told_with_the_nearest(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("train_data: [x.jsonl]\n")
    done = run_mars("train", recipe, "--set", "learning_rat=1")
    assert done.code == 2
    assert "did you mean learning_rate" in done.err
