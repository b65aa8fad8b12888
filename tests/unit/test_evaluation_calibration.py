"""Calibration: agreement with AR, the choice of tau, and where it is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from run_mars import run_mars
from tiny import tiny_checkpoint

pytest.importorskip("lm_eval")

from mars_lm import checkpoint as checkpoints
from mars_lm.decoding import generate
from mars_lm.errors import MarsError
from mars_lm.evaluation import calibration
from mars_lm.evaluation.text_rows import read_examples, read_prompts
from mars_lm.settings import DecodingSettings

PROMPTS = [[10 + i, 20, 30 + i, 40] for i in range(6)]


@pytest.fixture(scope="module")
def checkpoint():
    return tiny_checkpoint()


def test_agreement_is_ars_own_choice_behind_the_same_text(checkpoint) -> None:
    exact = generate(checkpoint, PROMPTS, DecodingSettings(max_new_tokens=12))
    lossy = generate(checkpoint, PROMPTS, DecodingSettings(tau=0.0, exact=False, max_new_tokens=12))
    for prompt, result in zip(PROMPTS, exact, strict=True):
        assert calibration._agreeing(checkpoint, prompt, result.token_ids) == len(result.token_ids)
    for prompt, result in zip(PROMPTS, lossy, strict=True):
        expected = 0
        for i, token in enumerate(result.token_ids):
            with torch.no_grad():
                logits = checkpoint.model(torch.tensor([prompt + result.token_ids[:i]])).logits[0, -1]
            logits[checkpoint.mars.mask_token_id] = -torch.inf
            expected += int(logits.argmax()) == token
        assert calibration._agreeing(checkpoint, prompt, result.token_ids) == expected


def test_lossy_takes_the_laxest_tau_that_holds(checkpoint, monkeypatch) -> None:
    shares = {0.9: 0.999, 0.8: 0.995, 0.6: 0.95, 0.5: 0.999}
    current: list[float] = []

    class Decoder:
        def __init__(self, *_, **__) -> None:
            pass

        def __call__(self, prompts, settings, on_result=None):
            current[:] = [settings[0].tau]
            return [type("R", (), {"token_ids": [0] * 1000, "forwards": 500})() for _ in prompts]

    monkeypatch.setattr(calibration, "EngineDecoder", Decoder)
    monkeypatch.setattr(calibration, "_agreeing", lambda *_: round(1000 * shares[current[0]]))
    result = calibration.calibrate_lossy(checkpoint, PROMPTS, agreement=0.99, taus=list(shares))
    assert result.decoding == {
        "exact": False,
        "rule": "probability",
        "tau": 0.8,
    }  # 0.5 is behind one that fails
    assert [row["tau"] for row in result.rows] == [0.9, 0.8, 0.6, 0.5]
    assert all(row["agreement"]["low"] <= row["agreement"]["value"] for row in result.rows)
    none = calibration.calibrate_lossy(checkpoint, PROMPTS, agreement=1.0, taus=list(shares))
    assert none.decoding["tau"] == 1.0
    assert "one-token" in none.remark


def test_exact_names_a_tau_only_if_it_is_faster_for_sure(checkpoint) -> None:
    result = calibration.calibrate_exact(
        checkpoint, PROMPTS, taus=[0.0, 0.5], max_new_tokens=8, max_rows=3, turns=2
    )
    assert [row["tau"] for row in result.rows] == [0.0, 0.5]
    assert result.rows[0]["speed"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert [row.get("chosen") for row in result.rows].count(True) == 1
    assert result.decoding["exact"] is True
    assert result.decoding["tau"] in (0.0, 0.5)


def test_what_cannot_be_calibrated_is_told(checkpoint) -> None:
    with pytest.raises(MarsError, match="no MARS settings"):
        calibration.calibrate_exact(tiny_checkpoint(mars=False), PROMPTS)
    with pytest.raises(MarsError, match="agreement is 0"):
        calibration.calibrate_lossy(checkpoint, PROMPTS, agreement=0)


def test_the_result_is_written_into_the_checkpoint(checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    checkpoints.save(checkpoint.model, checkpoint.tokenizer, folder)
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"hello {i}"}) + "\n" for i in range(4)))
    common = ["calibrate", rows, "--model", folder, "--dtype", "float32", "--max-new-tokens", 6]
    done = run_mars(*common, "--lossy", "--agreement", 0.5, "--tau", 0.9, "--write")
    assert done.code == 0, done.err
    assert "agreement with AR" in done.out
    written = checkpoints.load(folder, dtype="float32").mars
    assert written.decoding["exact"] is False
    assert written.decoding["tau"] in (0.9, 1.0)
    assert written.block_size == checkpoint.mars.block_size
    refused = run_mars("calibrate", rows, "--write")
    assert refused.code == 2
    assert "local checkpoint" in refused.err


def test_an_adapters_settings_are_written_too(tmp_path: Path) -> None:
    (tmp_path / "mars.json").write_text(json.dumps({"mask_token_id": 3, "block_size": 4}))
    calibration.write_decoding(tmp_path, {"tau": 0.5})
    assert json.loads((tmp_path / "mars.json").read_text())["decoding"] == {"tau": 0.5}
    with pytest.raises(MarsError, match="no local checkpoint"):
        calibration.write_decoding(tmp_path / "none", {"tau": 0.5})


def test_rows_of_text(checkpoint, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
    rows.write_text(
        "\n".join(
            map(
                json.dumps,
                [{"messages": talk}, {"prompt": "hello", "completion": " world"}, {"text": "one two"}],
            )
        )
    )
    chat, plain, text = read_examples(checkpoint, rows)
    decode = checkpoint.tokenizer.decode
    assert decode(chat[0][chat[1] :]).startswith("world<|im_end|>")
    assert decode(plain[0][plain[1] :]) == " world"
    assert text[1] == 1
    document = tmp_path / "document.txt"
    document.write_text("hello world " * 50)
    pieces = read_examples(checkpoint, document, length=32, limit=3)
    assert [len(ids) for ids, _ in pieces] == [32, 32, 32]
    rows.write_text(json.dumps({"messages": talk}))
    [prompt] = read_prompts(checkpoint, rows)
    assert decode(prompt).endswith("<|im_start|>assistant\n")
    for content, message in (("", "no prompts"), ('{"x": 1}', "line 1: expected 'prompt'")):
        rows.write_text(content)
        with pytest.raises(MarsError, match=message):
            read_prompts(checkpoint, rows)


def test_gaps_from_the_command_line(checkpoint, tmp_path: Path) -> None:
    for name, seed in (("before", 0), ("after", 1)):
        made = tiny_checkpoint(seed=seed, mars=name == "after")
        checkpoints.save(made.model, made.tokenizer, tmp_path / name)
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    done = run_mars(
        *("gaps", text, "--model", tmp_path / "after", "--before", tmp_path / "before"),
        *("--rows", 3, "--length", 40, "--output", tmp_path / "out"),
    )
    assert done.code == 0, done.err
    assert "before: nats" in done.out
    assert "after: nats" in done.out
    assert "B/(2B-1)" in done.out
    report = json.loads((tmp_path / "out" / "gaps.json").read_text())
    assert set(report["models"]) == {"before", "after"}
    assert (tmp_path / "out" / "gaps.png").stat().st_size > 1000
    assert run_mars("gaps", text, "--model", tmp_path / "after", "--block-size", 1).code == 2
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    assert "is empty" in run_mars("gaps", empty, "--model", tmp_path / "after").err
