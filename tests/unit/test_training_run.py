"""`mars train` from end to end: its result, a run killed at any moment, Ctrl-C, two processes, bad input."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
import yaml

from mars_lm import checkpoint as checkpoints
from mars_lm.errors import MarsError
from mars_lm.training import run
from mars_lm.training.run import last_complete_checkpoint, train
from mars_lm.training.trainer import MarsTrainer
from run_mars import mars_command, mars_environment
from tiny import tiny_checkpoint, tiny_model, tiny_tokenizer
from training_tools import exit_code, start_child

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "user", "asks", "it"]
STEPS = 7


def chat(number: int) -> dict:
    words = [WORDS[(number * 7 + at * (number % 5 + 1)) % len(WORDS)] for at in range(6 + number % 9)]
    return {
        "messages": [
            {"role": "user", "content": " ".join(words[:3])},
            {"role": "assistant", "content": " ".join(words[3:])},
        ]
    }


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A base model, rows and a recipe; the rows make an epoch of five steps."""
    home = tmp_path_factory.mktemp("training")
    base = tiny_checkpoint(mars=False)
    checkpoints.save(base.model, base.tokenizer, home / "base")
    (home / "rows.jsonl").write_text("".join(json.dumps(chat(number)) + "\n" for number in range(22)))
    (home / "recipe.yaml").write_text(
        yaml.safe_dump(
            {
                "model": str(home / "base"),
                "train_data": str(home / "rows.jsonl"),
                "mask_loss": "kd",
                "learning_rate": 1e-2,
                "lr_scheduler_type": "linear",
                "max_steps": STEPS,
                "per_device_train_batch_size": 4,
                "max_tokens_per_micro_batch": 200,
                "max_length": 64,
                "eval_rows": 2,
                "logging_steps": 1,
                "save_steps": 2,
                "save_total_limit": 2,
                "precision": "float32",
                "use_cpu": True,
                "disable_tqdm": True,
            }
        )
    )
    return home


LORA = {"lora_rank": 4, "lora_dropout": 0.1}  # dropout needs the random numbers' state as well


def run_in(home: Path, folder: Path, **overrides) -> Path:
    return train(home / "recipe.yaml", {"output_dir": str(folder), **overrides})


def losses(folder: Path) -> list[tuple]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [
        tuple(line[name] for name in ("step", "loss", "loss/ar", "loss/mask", "grad_norm", "learning_rate"))
        for line in lines
        if "loss" in line
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    (path,) = folder.glob("*.safetensors")
    return load_file(path)


def assert_same_run(folder: Path, expected: Path) -> None:
    assert losses(folder) == losses(expected)
    mine, theirs = weights(folder / "final"), weights(expected / "final")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture(scope="module")
def never_killed(home) -> Path:
    run_in(home, home / "whole", **LORA)
    return home / "whole"


def test_full_fine_tuning_makes_a_checkpoint_that_plain_transformers_loads(home, tmp_path):
    final = run_in(home, tmp_path / "full", max_steps=2)
    model = transformers.AutoModelForCausalLM.from_pretrained(final)
    assert model.config.mars["mask_loss"] == "kd"
    assert model.config.use_cache
    assert model.config.pad_token_id is None
    assert checkpoints.load(final).mars.mask_token_id == model.config.mars["mask_token_id"]
    facts = json.loads((final / "provenance.json").read_text())
    assert facts["steps"] == 2
    assert facts["seed"] == 42
    assert facts["recipe"]["learning_rate"] == 1e-2
    assert {"command", "versions", "commit", "machine", "time"} <= facts.keys()
    base = checkpoints.load(home / "base").model
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, base.model.layers[0].mlp.up_proj.weight)


def test_a_run_writes_no_model_card_of_blanks(never_killed):
    assert not (never_killed / "README.md").exists()


def test_nothing_warns_of_memory_for_a_gpu_that_is_not_there(home, tmp_path, recwarn):
    run_in(home, tmp_path / "run", max_steps=1)
    assert not [warning for warning in recwarn if "pin_memory" in str(warning.message)]


def test_lora_makes_an_adapter_that_merges_into_its_base(home, never_killed):
    final = never_killed / "final"
    merged = checkpoints.load(home / "base", adapter=final)
    assert merged.mars.block_size == 4
    assert json.loads((final / "provenance.json").read_text())["steps"] == STEPS
    base = checkpoints.load(home / "base").model
    mask = merged.mars.mask_token_id
    moved = (merged.model.model.embed_tokens.weight - base.model.embed_tokens.weight).abs().sum(dim=1)
    assert moved[mask] > 0
    assert moved.sum() == moved[mask]


def test_an_adapter_is_trained_on_or_merged_into_the_base_first(home, never_killed, tmp_path):
    adapter = str(never_killed / "final")
    before = weights(Path(adapter))
    on = weights(run_in(home, tmp_path / "on", adapter=adapter, lora_rank=4, max_steps=1))
    assert before.keys() == on.keys()
    moved = max((on[name] - before[name]).abs().max().item() for name in on)
    assert 0 < moved < 0.05  # one step from where the adapter stood
    full = run_in(home, tmp_path / "full", adapter=adapter, max_steps=1, learning_rate=0.0)
    merged = checkpoints.load(home / "base", adapter=adapter).model
    loaded = checkpoints.load(full).model
    for name, parameter in loaded.named_parameters():
        torch.testing.assert_close(parameter, merged.get_parameter(name), msg=name)


def test_ar_sft_leaves_an_ordinary_model(home, tmp_path):
    for extra in ({}, {"lora_rank": 4}):
        final = run_in(home, tmp_path / str(len(extra)), preset="ar-sft", max_steps=1, **extra)
        loaded = checkpoints.load(home / "base", adapter=final) if extra else checkpoints.load(final)
        assert loaded.mars is None


def test_a_result_can_be_stored_in_half_the_bytes(home, tmp_path):
    for extra in ({}, {"lora_rank": 4}):
        final = run_in(home, tmp_path / str(len(extra)), save_dtype="bfloat16", max_steps=1, **extra)
        assert {tensor.dtype for tensor in weights(final).values()} == {torch.bfloat16}


def dies(home: Path, folder: Path, moment: str, at: int) -> None:
    """Train, and be killed at a moment: no handler runs, nothing is flushed."""

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def then_kill(holder, name, when=lambda *arguments: True, before=None):
        plain = getattr(holder, name)
        calls = []

        def wrapped(*arguments, **options):
            if when(*arguments):
                calls.append(name)
                if len(calls) == at:
                    if before is not None:
                        before(*arguments)
                    kill()
            return plain(*arguments, **options)

        setattr(holder, name, wrapped)

    def half_a_file(*arguments):
        path = next(Path(a) for a in arguments if isinstance(a, (str, Path)))
        path.write_text('{"global_step": 6, "log_hist')

    if moment == "step":
        then_kill(MarsTrainer, "training_step")
    elif moment == "weights":
        then_kill(MarsTrainer, "save_model")
    elif moment == "optimizer":
        then_kill(torch, "save", before=half_a_file)
    elif moment == "state":
        then_kill(transformers.TrainerState, "save_to_json", before=half_a_file)
    elif moment == "old checkpoints":

        def half_gone(path, *arguments):
            (Path(path) / "optimizer.pt").unlink()

        then_kill(shutil, "rmtree", lambda path, *_: "checkpoint-" in str(path), before=half_gone)
    elif moment == "result":
        then_kill(checkpoints, "save_adapter")
    run_in(home, folder, **LORA)


@pytest.mark.parametrize(
    ("moment", "at", "goes_on_from"),
    [
        ("step", 1, None),
        ("step", 4, 2),  # between two checkpoints
        ("step", 6, 4),  # the second epoch's first
        ("weights", 3, 4),
        ("optimizer", 6, 2),  # each checkpoint saves arguments, optimizer, schedule, random numbers' state
        ("state", 3, 4),
        ("old checkpoints", 1, 6),
        ("result", 1, STEPS),
    ],
)
def test_a_run_killed_at_any_moment_resumes_to_the_same_losses(
    home, never_killed, tmp_path, moment, at, goes_on_from
):
    folder = tmp_path / "run"
    assert exit_code(start_child(dies, home, folder, moment, at)) == -signal.SIGKILL
    assert not (folder / "final").exists()
    complete = last_complete_checkpoint(folder)
    assert (complete and int(complete.name.split("-")[1])) == goes_on_from
    run_in(home, folder, **LORA)
    assert_same_run(folder, never_killed)


def test_a_finished_run_is_left_as_it_is(home, never_killed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(never_killed, folder)
    shutil.rmtree(folder / "final")
    run_in(home, folder, **LORA)
    assert_same_run(folder, never_killed)
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-6", "checkpoint-7"]


def test_more_steps_go_on_from_the_last(home, tmp_path):
    run_in(home, tmp_path / "run", max_steps=2, lr_scheduler_type="constant")
    run_in(home, tmp_path / "run", max_steps=4, lr_scheduler_type="constant")
    run_in(home, tmp_path / "whole", max_steps=4, lr_scheduler_type="constant")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_another_runs_checkpoints_are_not_gone_on_from(home, never_killed, tmp_path, caplog):
    folder = tmp_path / "run"
    shutil.copytree(never_killed, folder)
    with pytest.raises(
        MarsError, match=r"another run \(block_size, lora_rank differ\): choose another output_dir"
    ):
        run_in(home, folder, lora_rank=8, lora_dropout=0.1, block_size=8)
    run_in(home, folder, **{**LORA, "learning_rate": 1e-3, "max_steps": STEPS + 1})
    assert [r.getMessage() for r in caplog.records if "Going on" in r.getMessage()] == [
        f"Going on from {folder / f'checkpoint-{STEPS}'} with another learning_rate, max_steps."
    ]


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "trainer_state.json").unlink(),
        lambda folder: (folder / "trainer_state.json").write_text("[]"),
        lambda folder: os.truncate(folder / "optimizer.pt", 100),
        lambda folder: os.truncate(folder / "adapter_model.safetensors", 100),
    ],
    ids=["no state", "odd state", "half an optimizer", "half the weights"],
)
def test_a_damaged_checkpoint_is_passed_over(never_killed, tmp_path, damage):
    folder = tmp_path / "run"
    shutil.copytree(never_killed, folder)
    damage(folder / f"checkpoint-{STEPS}")
    assert last_complete_checkpoint(folder) == folder / "checkpoint-6"
    assert last_complete_checkpoint(tmp_path / "nothing") is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_a_checkpoint_and_a_sentence(home, never_killed, tmp_path, number):
    folder = tmp_path / "run"
    changes = {"output_dir": folder, "logging_steps": 1, "save_steps": 100, **LORA}
    sets = [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
    process = subprocess.Popen(
        mars_command("train", home / "recipe.yaml", *sets),
        env=mars_environment(HF_HUB_OFFLINE="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not (folder / "log.jsonl").exists():
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 128 + number, err
    assert "Stopping after this step, with a checkpoint" in out
    assert err.rstrip().splitlines()[-1].startswith("mars: Stopped at step ")
    assert f"of {STEPS}, with a checkpoint in {folder}; give the same command again to go on" in err
    assert "Traceback" not in err
    stopped = last_complete_checkpoint(folder)
    assert stopped is not None
    assert 1 <= int(stopped.name.split("-")[1]) < STEPS
    run_in(home, folder, save_steps=100, **LORA)
    assert_same_run(folder, never_killed)


def test_a_second_ctrl_c_stops_at_once():
    keeper = run.Keeper()
    with keeper.watching():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)  # a launcher may pass the same stop on as another signal
        assert keeper.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_torchrun_with_two_processes_trains_what_one_does(home, tmp_path):
    one = tmp_path / "one"
    run_in(home, one, max_steps=3, per_device_train_batch_size=4)
    two = tmp_path / "two"
    changes = {"output_dir": two, "max_steps": 3, "per_device_train_batch_size": 2, "ddp_backend": "gloo"}
    sets = [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launcher, "-m", "mars_lm.cli.main", "train", str(home / "recipe.yaml"), *map(str, sets)],
        env=mars_environment(HF_HUB_OFFLINE="1"),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    for mine, theirs in zip(losses(two), losses(one), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)
    trained, expected = weights(two / "final"), weights(one / "final")
    for name, tensor in expected.items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_a_full_disk_at_the_end_is_a_sentence(home, tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run.Keeper, "on_log", full)
    with pytest.raises(
        MarsError, match=r"No space is left on the disk of .*: free some space and give the same"
    ):
        run_in(home, tmp_path / "run", max_steps=1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "nowhere/at/all"}, "There is no folder nowhere/at/all"),
        ({"train_data": ["none.jsonl"]}, r"none\.jsonl can't be read"),
        ({"eval_rows": 22}, "eval_rows is 22, but the training data has only 22 rows"),
        (
            {"eval_rows": 0, "eval_strategy": "steps"},
            "eval_strategy is 'steps', but there is nothing to evaluate",
        ),
        ({"adapter": "no-adapter", "lora_rank": 4}, "There is no folder no-adapter, and it cannot be had"),
        ({"attention": "flex_attention"}, "trains on a CUDA GPU only"),
        ({"packing": True, "max_length": None}, "max_length"),
        ({"eos_token": "<|nothing|>"}, "eos_token"),
        ({"chat_template_path": "no/such/model"}, "no/such/model"),
    ],
)
def test_bad_input_is_a_sentence(home, tmp_path, changes, sentence):
    with pytest.raises(MarsError, match=sentence) as told:
        run_in(home, tmp_path / "run", **changes)
    assert "\n" not in str(told.value)


def test_an_adapter_of_another_rank_is_refused(home, never_killed, tmp_path):
    with pytest.raises(MarsError, match=r"lora_rank is 8, but the adapter .* has rank 4"):
        run_in(home, tmp_path / "run", adapter=str(never_killed / "final"), lora_rank=8)


@pytest.mark.parametrize(
    ("tokenizer", "sentence"),
    [
        ({"chat_template": None}, "has no chat template, which rows of messages need"),
        ({"eos_token": None}, "has no end-of-sequence token"),
        ({"pad_token": None}, None),  # the end token pads: nothing sees padding
    ],
)
def test_a_tokenizer_that_lacks_something(home, tmp_path, tokenizer, sentence):
    checkpoints.save(tiny_model(), tiny_tokenizer(**tokenizer), tmp_path / "base")
    if sentence is None:
        assert (
            run_in(home, tmp_path / "run", model=str(tmp_path / "base"), max_steps=1) / "config.json"
        ).exists()
        return
    with pytest.raises(MarsError, match=sentence):
        run_in(home, tmp_path / "run", model=str(tmp_path / "base"))


def test_text_needs_no_chat_template(home, tmp_path):
    rows = tmp_path / "text.jsonl"
    rows.write_text('{"prompt": "hello ", "completion": "world"}\n' * 4)
    checkpoints.save(tiny_model(), tiny_tokenizer(chat_template=None), tmp_path / "base")
    final = run_in(
        home, tmp_path / "run", model=str(tmp_path / "base"), train_data=[str(rows)], max_steps=1, eval_rows=0
    )
    assert (final / "config.json").exists()


def test_settings_are_read_before_the_model_is(home, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "load", lambda *a, **k: pytest.fail("loaded"))
    for changes in ({"preset": "none"}, {"train_data": ["none.jsonl"]}, {"precision": "int8"}):
        with pytest.raises(MarsError):
            run_in(home, tmp_path / "run", **changes)


def test_progress_shows_the_time_left(home, tmp_path, capsys):
    run_in(home, tmp_path / "run", max_steps=2, disable_tqdm=False)
    assert "2/2 [" in capsys.readouterr().err


def test_zero_three_is_hidden_while_the_model_loads():
    from transformers.integrations import deepspeed

    marker = object()
    deepspeed._hf_deepspeed_config_weak_ref = marker
    try:
        with run._whole_weights():
            assert deepspeed._hf_deepspeed_config_weak_ref is None
        assert deepspeed._hf_deepspeed_config_weak_ref is marker
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = None
