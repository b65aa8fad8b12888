"""Our model class inside lm-evaluation-harness: transformers' texts and log-likelihoods."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tiny import tiny_checkpoint

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from mars_lm import checkpoint as checkpoints
from mars_lm.errors import MarsError
from mars_lm.evaluation.harness_model import MarsLM, request_settings
from mars_lm.settings import DecodingSettings

TEXTS = ["hello world", "The quick brown", "A user asks a question:\n", "0 1 2 3 4", "def add(a, b):"]


def request(kind: str, *arguments) -> Instance:
    return Instance(kind, {}, arguments, 0, metadata=("toy", 0, 1))


@pytest.fixture(scope="module")
def checkpoint():
    return tiny_checkpoint()


@pytest.fixture(scope="module")
def theirs(checkpoint):
    return HFLM(pretrained=checkpoint.model, tokenizer=checkpoint.tokenizer, batch_size=1)


@pytest.mark.parametrize("decoding", [{"tau": 1.0}, {}, {"rule": "entropy", "tau": 2.0}], ids=str)
def test_generates_transformers_greedy_text(checkpoint, theirs, decoding) -> None:
    asked = [
        request("generate_until", text, {"until": until, "max_gen_toks": 24, "do_sample": False})
        for text in TEXTS
        for until in ([], ["e", " the"])
    ]
    ours = MarsLM(loaded=checkpoint, batch_size=3, **decoding)
    assert ours.generate_until(asked) == theirs.generate_until(asked, disable_tqdm=True)
    speed = ours.speed.summary()
    assert speed["tokens_per_forward"] >= 1.0
    assert speed["tokens_per_second"] > 0
    assert speed["tasks"]["toy"]["tokens"] == speed["tokens"]
    if decoding == {"tau": 1.0}:
        assert speed["tokens_per_forward"] == 1.0


def test_scores_transformers_log_likelihoods(checkpoint, theirs) -> None:
    pairs = [(text, " and the assistant answers") for text in TEXTS]
    pairs += [("", "hello"), ("hello ", "world"), ("x" * 400, " cut at the front")]
    asked = [request("loglikelihood", *pair) for pair in pairs]
    ours = MarsLM(loaded=checkpoint).loglikelihood(asked)
    for (value, greedy), (expected, expected_greedy) in zip(
        ours, theirs.loglikelihood(asked, disable_tqdm=True), strict=True
    ):
        assert value == pytest.approx(expected, rel=1e-4)
        assert greedy == expected_greedy


def test_scores_transformers_rolling_log_likelihoods(checkpoint, theirs) -> None:
    asked = [request("loglikelihood_rolling", text) for text in ("hello", "The quick brown fox. " * 40)]
    ours = MarsLM(loaded=checkpoint).loglikelihood_rolling(asked)
    assert ours == pytest.approx(theirs.loglikelihood_rolling(asked, disable_tqdm=True), rel=1e-4)


def test_the_chat_template_and_the_answer_that_a_task_begins(checkpoint, theirs) -> None:
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Here is"},
    ]
    ours = MarsLM(loaded=checkpoint)
    for history, open_answer in ((talk[:2], True), (talk, False)):
        assert ours.apply_chat_template(history, open_answer) == theirs.apply_chat_template(
            history, open_answer
        )


def test_an_ordinary_checkpoint_decodes_one_token_per_forward() -> None:
    plain = tiny_checkpoint(mars=False)
    model = MarsLM(loaded=plain, tau=0.3, exact=False)
    model.generate_until([request("generate_until", "hello", {"until": [], "max_gen_toks": 9})])
    assert model.speed.summary()["tokens_per_forward"] == 1.0


def test_a_tasks_keywords_become_decoding_settings() -> None:
    base = DecodingSettings(tau=0.9, exact=False)
    settings, until = request_settings(
        base, {"until": "\n", "max_new_tokens": 5, "do_sample": True, "temperature": 0.7, "top_p": 0.9}, 256
    )
    assert until == ["\n"]
    assert (settings.tau, settings.exact, settings.max_new_tokens) == (0.9, False, 5)
    assert (settings.temperature, settings.top_p, settings.stop) == (0.7, 0.9, ("\n",))
    greedy, until = request_settings(base, {"until": ["", "Q"], "do_sample": False, "temperature": 1.0}, 77)
    assert (greedy.temperature, greedy.max_new_tokens, until) == (0.0, 77, ["Q"])


def test_a_budget_that_leaves_no_room_is_told(checkpoint) -> None:
    with pytest.raises(MarsError, match="leaves no room"):
        MarsLM(loaded=checkpoint).generate_until([request("generate_until", "a", {"max_gen_toks": 500})])


def test_answers_that_a_killed_run_kept_are_not_generated_again(checkpoint, tmp_path: Path) -> None:
    asked = [
        request("generate_until", text, {"until": [], "max_gen_toks": 8, "do_sample": False})
        for text in TEXTS
    ]
    journal = tmp_path / "answers.jsonl"
    whole = MarsLM(loaded=checkpoint, journal=journal)
    texts = whole.generate_until(asked)
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join(lines[:4]) + "\n" + lines[4][: len(lines[4]) // 2])
    decoded = []

    def decode(prompts, settings, on_result=None):
        decoded.extend(prompts)
        return whole._decode(prompts, settings, on_result)

    again = MarsLM(loaded=checkpoint, journal=journal, decode=decode)
    assert again.generate_until(asked) == texts
    assert 0 < len(decoded) < len(TEXTS)
    assert again.speed.tokens == whole.speed.tokens
    other = MarsLM(loaded=checkpoint, journal=journal, decode=decode, tau=0.5)
    other.generate_until(asked[:1])
    assert other.speed.tokens["toy"] > 0
    assert len(decoded) > 1  # with other settings nothing is taken over


def test_the_harnesss_own_command_knows_the_model(tmp_path: Path) -> None:
    """`lm_eval --model mars` on a task of our own, without a network."""
    command = Path(sys.executable).with_name("lm_eval")
    plugin = Path(sysconfig.get_paths()["purelib"]) / "mars_lm_eval_plugin.pth"
    if not command.exists() or not plugin.exists():
        pytest.skip("mars-lm or lm-eval is not installed with its commands: pip install -e '.[eval]'")
    tiny = tiny_checkpoint()
    checkpoints.save(tiny.model, tiny.tokenizer, tmp_path / "model")
    rows = [{"q": text, "a": "x"} for text in TEXTS]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "toy.yaml").write_text(
        f"task: toy\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\n"
        "test_split: test\noutput_type: generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\n"
        "generation_kwargs: {until: [], max_gen_toks: 8}\n"
    )
    done = subprocess.run(
        [
            *(command, "--model", "mars", "--tasks", "toy.yaml", "--output_path", "out"),
            *("--model_args", "pretrained=model,tau=1.0,dtype=float32"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    [results] = (tmp_path / "out").rglob("results*.json")
    speed = json.loads(results.read_text())["config"]["speed"]
    assert speed["tokens_per_forward"] == 1.0
    assert speed["tokens"] <= 8 * len(TEXTS)
