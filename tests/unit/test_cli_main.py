"""The `mars` command as a whole: it starts at once, and a mistake is one sentence."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

import mars_lm
from run_mars import run_mars


def test_version():
    done = run_mars("--version")
    assert (done.code, done.out.strip()) == (0, f"mars-lm {mars_lm.__version__}")


def test_help_lists_the_commands():
    done = run_mars("--help")
    assert done.code == 0
    for command in ("generate", "chat", "demo", "convert", "train"):
        assert command in done.out


def test_help_loads_neither_torch_nor_transformers():
    script = (
        "import sys; from mars_lm.cli import main; "
        "print([name for name in ('torch', 'transformers', 'trl', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_comes_at_once():
    """Half a second of processor time; the wall's clock would also measure what else the machine does."""
    command = [sys.executable, "-m", "mars_lm.cli.main", "--help"]
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.5


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["generate", "hi", "--tau", "1.5"], "tau is 1.5"),
        (["generate", "hi", "--tau", "-0.1", "--rule", "margin"], "tau is -0.1"),
        (["generate", "hi", "--tau", "-1", "--rule", "entropy"], "number of 0 or more"),
        (["generate", "hi", "--tau", "nan"], "tau is nan"),
        (["generate", "hi", "--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["generate", "hi", "--block-size", "0"], "block_size is 0"),
        (["chat", "--tau", "2"], "tau is 2.0"),
        (["demo", "--max-new-tokens", "-3"], "max_new_tokens is -3"),
        (["generate", "hi", "--output", "x.jsonl"], "give that too"),
        (["generate", "hi", "--raw", "--system", "x"], "give one of the two"),
        (["generate", "hi", "--input", "x.jsonl"], "give one of the two"),
        (["generate", "--input", "no/such.jsonl"], "can't be read"),
        (["generate", ""], "empty"),
        (["generate", "hi\udc80"], "not UTF-8"),
        (["train", "no.yaml", "--set", "learning_rate"], "expected KEY=VALUE"),
        (["train", "no.yaml", "--set", "a=[1"], "not valid YAML"),
        (["train", "no.yaml"], "no.yaml"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_2(arguments, told):
    done = run_mars(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("mars: ")
    assert told in done.err
    assert done.err.count("\n") == 1
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    "arguments", [["generate", "--no-such"], ["nothing"], ["generate", "--rule", "luck", "x"]]
)
def test_a_slip_of_the_command_line_is_status_2(arguments):
    done = run_mars(*arguments)
    assert done.code == 2
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("model", "told"),
    [("no/such/folder/here", "no/such/folder/here"), (__file__, "is a file, expected a checkpoint's folder")],
)
def test_a_model_that_is_none(model, told):
    done = run_mars("generate", "hi", "--model", model)
    assert done.code == 2
    assert told in done.err
    assert "Traceback" not in done.err


def test_a_train_extra_that_is_not_installed_is_named(monkeypatch, tmp_path):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "trl" else found(name)
    )
    done = run_mars("train", tmp_path / "recipe.yaml")
    assert done.code == 2
    assert "pip install 'mars-lm[train]'" in done.err
