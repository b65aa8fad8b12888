"""Evaluations and sweeps that are killed, repeated, or pointed at another checkpoint's folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from run_mars import mars_command, mars_environment, run_mars
from tiny import tiny_checkpoint

pytest.importorskip("lm_eval")

from mars_lm import checkpoint as checkpoints
from mars_lm.baselines.medusa import MedusaHeads
from mars_lm.errors import MarsError
from mars_lm.evaluation import sweep as sweeps
from mars_lm.evaluation import tasks
from mars_lm.evaluation.decoders import settings_for
from mars_lm.evaluation.journal import Journal
from mars_lm.evaluation.results import fingerprint
from mars_lm.evaluation.run import EvaluationOptions, evaluate, identity
from mars_lm.settings import DecodingSettings

TASK = "mars_arithmetic"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint, another one, an ordinary one, and six rows."""
    base = tmp_path_factory.mktemp("sweep")
    for name, options in (("one", {}), ("two", {"seed": 1}), ("plain", {"mars": False})):
        made = tiny_checkpoint(**options)
        checkpoints.save(made.model, made.tokenizer, base / name)
    (base / "arithmetic").mkdir()
    rows = [{"question": f"{i}+1", "answer": str(i + 1)} for i in range(6)]
    (base / "arithmetic" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return base


def evaluated(folder: Path, output: Path, name: str = "one", **named):
    checkpoint = checkpoints.load(folder / name, dtype="float32")
    said: list[str] = []
    parts = evaluate(
        checkpoint,
        [TASK],
        settings_for(checkpoint, named),
        EvaluationOptions(data=folder, max_new_tokens=8),
        model=name,
        output=output,
        say=said.append,
    )
    return parts, said


def test_a_finished_task_is_not_run_again(folder: Path, tmp_path: Path, monkeypatch) -> None:
    parts, _ = evaluated(folder, tmp_path)
    assert parts[TASK]["score"]["rows"] == 6
    assert parts[TASK]["speed"]["tokens_per_forward"] >= 1
    assert "commit" in parts[TASK]["provenance"]
    monkeypatch.setattr("mars_lm.evaluation.run.MarsLM", None)  # would fail if anything ran
    again, said = evaluated(folder, tmp_path)
    assert again[TASK]["score"] == parts[TASK]["score"]
    assert any("finished before" in sentence for sentence in said)


def test_a_folder_of_another_checkpoint_or_setting_is_refused(folder: Path, tmp_path: Path) -> None:
    evaluated(folder, tmp_path)
    with pytest.raises(MarsError, match="results of another checkpoint"):
        evaluated(folder, tmp_path, "two")
    with pytest.raises(MarsError, match=r"results with tau 0\.0, and this run has 0\.5"):
        evaluated(folder, tmp_path, tau=0.5)


def test_a_run_that_was_killed_in_its_first_task_tells_whose_its_answers_are(
    folder: Path, tmp_path: Path, monkeypatch
) -> None:
    write = Journal.write
    kept = []

    def killed_at_the_third(self, *arguments) -> None:
        if len(kept) == 2:
            raise KeyboardInterrupt
        kept.append(arguments)
        write(self, *arguments)

    monkeypatch.setattr(Journal, "write", killed_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        evaluated(folder, tmp_path / "out")
    monkeypatch.setattr(Journal, "write", write)
    with pytest.raises(MarsError, match="results of another checkpoint"):
        evaluated(folder, tmp_path / "out", "two")
    parts, _ = evaluated(folder, tmp_path / "out")
    assert parts[TASK]["speed"]["tokens"] == evaluated(folder, tmp_path / "new")[0][TASK]["speed"]["tokens"]
    (tmp_path / "out" / "results.json").unlink()  # as versions before this one left it
    with pytest.raises(MarsError, match="nothing says whose"):
        evaluated(folder, tmp_path / "out")


def test_a_run_that_was_refused_leaves_its_folder_free(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("mars_lm.evaluation.run.EngineDecoder", None)
    with pytest.raises(TypeError):
        evaluated(folder, tmp_path / "out")
    monkeypatch.undo()
    parts, _ = evaluated(folder, tmp_path / "out", "two")
    assert parts[TASK]["score"]["rows"] == 6


def test_other_rows_of_a_finished_task_are_refused(folder: Path, tmp_path: Path) -> None:
    evaluated(folder, tmp_path / "out")
    other = tmp_path / "rows"
    (other / "arithmetic").mkdir(parents=True)
    same = (folder / "arithmetic" / "test.jsonl").read_text()
    (other / "arithmetic" / "test.jsonl").write_text(same.replace("5+1", "6+0"))
    for name in ("one", "two", "plain"):
        (other / name).symlink_to(folder / name)
    with pytest.raises(MarsError, match="results on other rows of"):
        evaluated(other, tmp_path / "out")
    copy = tmp_path / "copy"
    (copy / "arithmetic").mkdir(parents=True)
    (copy / "arithmetic" / "test.jsonl").write_text(same)
    (copy / "one").symlink_to(folder / "one")
    _, said = evaluated(copy, tmp_path / "out")  # the same rows elsewhere are the same rows
    assert any("finished before" in sentence for sentence in said)


def test_a_draft_and_heads_are_part_of_what_a_folder_holds(folder: Path) -> None:
    one, two = (checkpoints.load(folder / name, dtype="float32") for name in ("one", "two"))

    def of(**beside) -> dict:
        decode = SimpleNamespace(**beside)
        return identity(one, DecodingSettings(), EvaluationOptions(), True, "one", "assisted", decode)

    heads = [MedusaHeads(2, 32) for _ in range(2)]
    torch.nn.init.ones_(next(heads[1].parameters()))
    found = [of(draft=one), of(draft=two), of(draft=None), of(heads=heads[0]), of(heads=heads[1])]
    assert len({json.dumps(one) for one in found}) == len(found)
    assert of(draft=two) == found[1]


def test_an_ordinary_model_is_evaluated_as_plain_ar_and_said_so(folder: Path, tmp_path: Path) -> None:
    parts, said = evaluated(folder, tmp_path, "plain")
    assert parts[TASK]["speed"]["tokens_per_forward"] == 1.0
    assert any("plain AR" in sentence for sentence in said)


def test_fingerprints_tell_checkpoints_apart(folder: Path) -> None:
    marks = [fingerprint(checkpoints.load(folder / name, dtype="float32")) for name in ("one", "one", "two")]
    assert marks[0] == marks[1] != marks[2]


def test_the_grid() -> None:
    checkpoint = tiny_checkpoint()
    cells = sweeps.grid(checkpoint, taus=[1.0, 0.9], block_sizes=[2, 4], rules=["probability", "margin"])
    names = [cell.name for cell in cells]
    assert names[0] == "one-token"
    assert len(names) == len(set(names)) == 1 + 2 * 2 * 3  # modes x B x (0.9, margin 1, margin 0.9)
    assert "lossy-probability-0.9-B2" in names
    assert sweeps.grid(tiny_checkpoint(mars=False)) == [sweeps.Cell("one-token")]
    assert [c.name for c in sweeps.grid(checkpoint, modes=["jacobi"], block_sizes=[4])][1:] == ["jacobi-B4"]
    wide = sweeps.grid(checkpoint, taus=[0.9], adaptive=False)
    assert [c.name for c in wide] == ["one-token", "exact-probability-0.9-all-masks", "lossy-probability-0.9"]
    assert [c.settings(checkpoint).adapts for c in wide] == [True, False, False]
    paying = sweeps.grid(checkpoint, taus=[0.9], adaptive=True)
    assert [c.name for c in paying][1:] == ["exact-probability-0.9", "lossy-probability-0.9-adaptive"]
    assert [c.settings(checkpoint).adapts for c in paying] == [True, True, True]
    with pytest.raises(MarsError, match="above the 4"):
        sweeps.grid(checkpoint, block_sizes=[8])
    with pytest.raises(MarsError, match="tau is"):
        sweeps.grid(checkpoint, taus=[1.5])


def test_modes_are_checked_before_a_model_is_loaded(folder: Path, tmp_path: Path) -> None:
    for modes, sentence in (
        ("exact,lossi", "--modes has 'lossi', expected some of exact, lossy, block-diffusion, jacobi"),
        ("exact,medusa", "--heads"),
        ("assisted", "--draft"),
    ):
        arguments = sweep_arguments(folder, tmp_path / "out", "--model", tmp_path / "none", "--modes", modes)
        refused = run_mars(*arguments)
        assert refused.code == 2
        assert sentence in refused.err
    with pytest.raises(MarsError, match="--rules has 'magic'"):
        sweeps.check_modes(["exact"], ["probability", "magic"], draft=False, heads=False)
    assert not (tmp_path / "out").exists()


def test_a_sweep_that_was_refused_leaves_its_folder_free(folder: Path, tmp_path: Path) -> None:
    refused = run_mars(*sweep_arguments(folder, tmp_path, "--model", folder / "one", "--block-size", 9))
    assert refused.code == 2
    other = sweep_arguments(
        folder, tmp_path, "--model", folder / "two", "--label", "one", "--modes", "jacobi"
    )
    assert run_mars(*other).code == 0


def test_all_masks_and_those_that_pay_are_told_apart(folder: Path, tmp_path: Path) -> None:
    arguments = sweep_arguments(folder, tmp_path, "--model", folder / "one", "--tau", 0.2)
    assert run_mars(*arguments, "--all-masks").code == 0
    done = run_mars(*arguments, "--adaptive")
    assert done.code == 0, done.err
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert sorted((row["mode"], row["masks"]) for row in rows if row["masks"]) == [
        ("exact", "adaptive"),
        ("exact", "all"),
        ("lossy", "adaptive"),
        ("lossy", "all"),
    ]
    assert {line.split("|")[6].strip() for line in done.out.splitlines()[2:]} == {"adaptive", "all", "–"}


def sweep_arguments(folder: Path, output: Path, *more: object) -> list[object]:
    return [
        *("sweep", "--output", output, "--tasks", TASK, "--data", folder, "--dtype", "float32"),
        *("--max-new-tokens", 8, *more),
    ]


def test_a_sweep_of_baselines_writes_table_json_and_plots(folder: Path, tmp_path: Path) -> None:
    arguments = sweep_arguments(folder, tmp_path / "out", "--model", folder / "one", "--tau", 0.2)
    arguments += ["--modes", "exact,lossy,block-diffusion,jacobi,prompt-lookup", "--batch-size", 3]
    done = run_mars(*arguments)
    assert done.code == 0, done.err
    result = json.loads((tmp_path / "out" / "sweep.json").read_text())
    rows = {row["mode"]: row for row in result["rows"]}
    assert set(rows) == {"one-token", "exact", "lossy", "block-diffusion", "jacobi", "prompt-lookup"}
    assert rows["one-token"]["speed_up"] == 1.0
    for mode in ("exact", "jacobi", "prompt-lookup"):  # AR's own text, so AR's own score
        assert rows[mode]["scores"][TASK]["value"] == rows["one-token"]["scores"][TASK]["value"]
    assert (tmp_path / "out" / "table.md").read_text().strip() == done.out.strip()
    for name in ("accuracy-tokens-per-forward.png", "accuracy-speed-up.png"):
        assert (tmp_path / "out" / name).stat().st_size > 1000


def test_another_checkpoint_joins_a_sweep_only_when_asked(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    plain = sweep_arguments(folder, output, "--model", folder / "plain")
    assert run_mars(*plain).code == 0
    two = sweep_arguments(folder, output, "--model", folder / "two", "--modes", "jacobi")
    refused = run_mars(*two)
    assert refused.code == 2
    assert "another checkpoint (plain)" in refused.err
    renamed = run_mars(*sweep_arguments(folder, output, "--model", folder / "two", "--label", "plain"))
    assert renamed.code == 2
    assert "another checkpoint called plain" in renamed.err
    joined = run_mars(*two, "--add")
    assert joined.code == 0, joined.err
    labels = {row["label"] for row in json.loads((output / "sweep.json").read_text())["rows"]}
    assert labels == {"plain", "two"}


def test_a_killed_sweep_goes_on(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    arguments = sweep_arguments(folder, output, "--model", folder / "one", "--tau", 0.2, "--tau", 0.6)
    process = subprocess.Popen(
        mars_command(*arguments),
        env=mars_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    first = output / "one" / "one-token" / "cell.json"
    until = time.monotonic() + 120
    while not first.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert first.exists()
    before = first.stat().st_mtime_ns, (first.parent / "results.json").read_bytes()
    done = run_mars(*arguments)
    assert done.code == 0, done.err
    assert (first.parent / "results.json").read_bytes() == before[1]
    rows = json.loads((output / "sweep.json").read_text())["rows"]
    assert len(rows) == 5
    assert all(row["scores"][TASK]["rows"] == 6 for row in rows)
    assert not list(output.rglob("*.tmp"))


def test_eval_from_the_command_line(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tasks, "_everything", tasks._familiar)  # all 14,000 take several seconds to list
    arguments = ["eval", "--model", folder / "plain", "--tasks", TASK, "--data", folder, "--limit", 2]
    done = run_mars(*arguments, "--max-new-tokens", 4, "--output", tmp_path, "--dtype", "float32")
    assert done.code == 0, done.err
    assert "plain AR" in done.err
    assert "tokens/forward" in done.out
    assert "arithmetic" in done.out
    assert (tmp_path / "table.md").read_text() == done.out
    unknown = run_mars("eval", "--tasks", "mars_arithmetik", "--data", folder)
    assert unknown.code == 2
    assert "the nearest names are mars_arithmetic" in unknown.err
    nothing = run_mars("eval", "--tasks", TASK, "--data", tmp_path / "none", "--model", folder / "plain")
    assert nothing.code == 2
    assert "no folder" in nothing.err
    decoder = run_mars(*arguments, "--decoder", "medusa", "--output", tmp_path / "m")
    assert decoder.code == 2
    assert "--heads" in decoder.err


def test_python_starts_without_the_harness() -> None:
    """`import mars_lm` and the command line need none of the evaluation's libraries."""
    code = (
        "import sys, mars_lm, mars_lm.cli.main; sys.exit(any(n in sys.modules for n in ('lm_eval', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
