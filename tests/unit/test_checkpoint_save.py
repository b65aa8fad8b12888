"""What is saved loads anywhere, bit for bit, and is never half there."""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mars_lm import folders
from mars_lm.checkpoint import Checkpoint, encode_chat, load, save
from mars_lm.errors import MarsError
from tiny import FAMILIES, tiny_checkpoint, tiny_model, tiny_tokenizer


def generate(model: Any, checkpoint: Checkpoint, new: int = 12) -> list[int]:
    ids = encode_chat(checkpoint, [{"role": "user", "content": "hello <|mask|> world"}])
    with torch.no_grad():
        out = model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, pad_token_id=0)
    return out[0, len(ids) :].tolist()


def digest(folder: Path) -> str:
    """A hash over names and contents."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            total.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return total.hexdigest()


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.parent.iterdir() if path.name.startswith(f".{folder.name}")]


class TestRoundTrip:
    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_bit_for_bit_through_plain_transformers(self, family: str, tied: bool, tmp_path: Path) -> None:
        made = tiny_checkpoint(family, tied=tied)
        save(made.model, made.tokenizer, tmp_path / "one")
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "one", dtype="auto")
        wanted = made.model.state_dict()
        got = plain.state_dict()
        assert wanted.keys() == got.keys()
        assert all(
            torch.equal(wanted[name], got[name]) and got[name].dtype == torch.float32 for name in wanted
        )
        assert plain.config.mars == made.mars.to_dict()
        assert generate(plain, made) == generate(made.model, made)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one")
        assert tokenizer.get_vocab() == made.tokenizer.get_vocab()
        assert tokenizer.mask_token_id == made.mars.mask_token_id
        for source, target in (("one", "two"), ("two", "three")):
            again = load(tmp_path / source, dtype="float32", device="cpu")
            save(again.model, again.tokenizer, tmp_path / target)
        # Between the first and the second the tokenizer may get the class of its family in transformers.
        assert digest(tmp_path / "two") == digest(tmp_path / "three")
        first, second = (tmp_path / name / "model.safetensors" for name in ("one", "two"))
        assert first.read_bytes() == second.read_bytes()

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_in_every_type(self, dtype: str, tmp_path: Path) -> None:
        made = tiny_checkpoint()
        made.model.to(getattr(torch, dtype))
        save(made.model, made.tokenizer, tmp_path / "saved")
        again = load(tmp_path / "saved", dtype=dtype, device="cpu")
        wanted, got = made.model.state_dict(), again.model.state_dict()
        assert all(torch.equal(wanted[name], got[name]) for name in wanted)
        assert again.model.dtype == getattr(torch, dtype)
        assert again.mars == made.mars
        assert not again.model.training

    def test_provenance_lies_beside_it_and_does_not_outlive_it(self, tmp_path: Path) -> None:
        made = tiny_checkpoint()
        save(made.model, made.tokenizer, tmp_path / "saved", provenance={"seed": 7})
        assert '"seed": 7' in (tmp_path / "saved" / "provenance.json").read_text()
        save(made.model, made.tokenizer, tmp_path / "saved")
        assert not (tmp_path / "saved" / "provenance.json").exists()

    def test_generation_config_that_transformers_would_refuse(self, tmp_path: Path) -> None:
        made = tiny_checkpoint()
        made.model.generation_config.temperature = 0.7
        made.model.generation_config.top_p = 0.9
        save(made.model, made.tokenizer, tmp_path / "saved")
        sampling = tiny_checkpoint()
        sampling.model.generation_config.do_sample = True
        sampling.model.generation_config.temperature = 0.7
        save(sampling.model, sampling.tokenizer, tmp_path / "sampling")
        assert load(tmp_path / "sampling").model.generation_config.temperature == 0.7

    def test_a_model_with_an_adapter_is_merged_first(self, tmp_path: Path) -> None:
        from peft import LoraConfig, get_peft_model

        made = tiny_checkpoint()
        with pytest.raises(MarsError, match="merge it before saving"):
            save(get_peft_model(made.model, LoraConfig(r=2)), made.tokenizer, tmp_path / "saved")


class TestFolder:
    def test_what_is_no_part_of_a_checkpoint_stays(self, tmp_path: Path) -> None:
        made, target = tiny_checkpoint(), tmp_path / "run"
        (target / "checkpoint-10").mkdir(parents=True)
        (target / "checkpoint-10" / "optimizer.pt").write_text("state")
        (target / "notes.txt").write_text("mine")
        (target / "README.md").write_text("mine too")
        (target / "link").symlink_to("notes.txt")
        (target / "model-00001-of-00002.safetensors").write_text("a shard of what was here before")
        save(made.model, made.tokenizer, target)
        save(made.model, made.tokenizer, target)
        assert (target / "checkpoint-10" / "optimizer.pt").read_text() == "state"
        assert (target / "notes.txt").read_text() == "mine"
        assert (target / "README.md").read_text() == "mine too"
        assert (target / "link").is_symlink()
        assert not (target / "model-00001-of-00002.safetensors").exists()
        assert load(target).mars == made.mars
        assert leftovers(target) == []

    @pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
    def test_others_may_read_it_as_the_umask_says(self, umask: int, mode: int, tmp_path: Path) -> None:
        made = tiny_checkpoint()
        before = os.umask(umask)
        try:
            save(made.model, made.tokenizer, tmp_path / "model")
        finally:
            os.umask(before)
        modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "model").rglob("*") if path.is_file()}
        assert modes == {mode}

    def test_parents_are_made_and_a_link_is_followed(self, tmp_path: Path) -> None:
        made = tiny_checkpoint()
        save(made.model, made.tokenizer, tmp_path / "a" / "b" / "c")
        (tmp_path / "link").symlink_to(tmp_path / "a" / "b" / "c")
        save(made.model, made.tokenizer, tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert load(tmp_path / "link").mars == made.mars

    def test_a_file_in_the_way(self, tmp_path: Path) -> None:
        made = tiny_checkpoint()
        (tmp_path / "file").write_text("x")
        with pytest.raises(MarsError, match="is a file, expected a folder"):
            save(made.model, made.tokenizer, tmp_path / "file")
        with pytest.raises(MarsError, match="cannot be written"):
            save(made.model, made.tokenizer, tmp_path / "file" / "below")
        assert (tmp_path / "file").read_text() == "x"


def write(value: str) -> Callable[[Path], None]:
    """A stand-in for a save: two files that must agree."""

    def fill(folder: Path) -> None:
        (folder / "config.json").write_text(value)
        (folder / "model.safetensors").write_text(value)

    return fill


def replace(target: Path, fill: Callable[[Path], None]) -> None:
    with folders.replaced_folder(target, replaces=lambda name: name != "kept") as temporary:
        fill(temporary)


def contents(target: Path) -> set[str]:
    return {(target / name).read_text() for name in ("config.json", "model.safetensors")}


CALLS = ("rename", "fsync", "mkdir", "link", "open")


class TestAtomic:
    @pytest.mark.parametrize("exchange", [True, False])
    @pytest.mark.parametrize("call", CALLS)
    def test_failure_at_any_system_call_leaves_the_old_or_the_new(
        self, call: str, exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Fails the first, the second, ... use of a call until a save gets through."""
        target = tmp_path / "saved"
        replace(target, write("old"))
        (target / "kept").write_text("mine")
        if not exchange:
            monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
        real = getattr(os, call)
        for at in range(100):
            used = [0]

            def failing(*args: Any, at: int = at, used: list[int] = used, **kwargs: Any) -> Any:
                used[0] += 1
                if used[0] == at + 1:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return real(*args, **kwargs)

            with monkeypatch.context() as patch:
                patch.setattr(os, call, failing)
                try:
                    replace(target, write(f"new {at}"))
                    done = True
                except MarsError:
                    done = False
            now = contents(target)
            assert now in ({"old"}, *({f"new {i}"} for i in range(at + 1)))
            assert (target / "kept").read_text() == "mine"
            if done:
                assert now == {f"new {at}"}
            if used[0] <= at:
                break
        else:
            pytest.fail("never got through")
        replace(target, write("last"))
        assert contents(target) == {"last"}
        assert leftovers(target) == []

    def test_exception_of_the_caller_goes_through_and_leaves_the_old(self, tmp_path: Path) -> None:
        target = tmp_path / "saved"
        replace(target, write("old"))

        def interrupted(folder: Path) -> None:
            write("new")(folder)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            replace(target, interrupted)
        assert contents(target) == {"old"}
        assert leftovers(target) == []

    @pytest.mark.parametrize("exchange", [True, False])
    def test_kill_between_any_two_system_calls(
        self, exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A forked child kills itself before its n-th call that changes a folder, for every n."""
        if not exchange:
            monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
        target = tmp_path / "saved"
        replace(target, write("old"))
        kills = 0
        for at in range(200):
            child = os.fork()
            if child == 0:
                try:
                    die_before_call(at)
                    replace(target, write(f"new {at}"))
                finally:
                    os._exit(0)
            _, status = os.waitpid(child, 0)
            if target.exists():
                assert contents(target) in ({"old"}, *({f"new {i}"} for i in range(at + 1)))
            else:
                # Only where two folders cannot be exchanged, and the next save brings the old one back.
                assert not exchange
            if not os.WIFSIGNALED(status):
                break
            kills += 1
        assert kills > 10
        assert contents(target) == {f"new {at}"}
        assert leftovers(target) == []

    def test_the_old_one_comes_back_after_a_kill_between_two_renames(self, tmp_path: Path) -> None:
        target = tmp_path / "saved"
        replace(target, write("old"))
        target.rename(tmp_path / f".saved{folders._MARK}old-0000")

        def failing(folder: Path) -> None:
            raise OSError(errno.EIO, "Input/output error")

        with pytest.raises(MarsError, match=r"cannot be written \(Input/output error\)"):
            replace(target, failing)
        assert contents(target) == {"old"}

    def test_leftovers_of_a_save_that_is_still_running_are_left_alone(self, tmp_path: Path) -> None:
        target = tmp_path / "saved"

        def other(folder: Path) -> None:
            replace(target, write("other"))
            assert folder.is_dir()
            write("this")(folder)

        replace(target, other)
        assert contents(target) == {"this"}
        assert leftovers(target) == []

    def test_real_checkpoint_killed_at_random_moments(self, tmp_path: Path) -> None:
        """Two checkpoints take turns in a folder until the process is killed: one of them is there, whole."""
        target, made = tmp_path / "saved", [tiny_checkpoint(seed=seed) for seed in (1, 2)]
        allowed = set()
        for checkpoint in made:
            save(checkpoint.model, checkpoint.tokenizer, target)
            allowed.add(digest(target))
        assert len(allowed) == 2
        rng = random.Random(0)
        for _ in range(12):
            child = os.fork()
            if child == 0:
                try:
                    while True:
                        for checkpoint in made:
                            save(checkpoint.model, checkpoint.tokenizer, target)
                finally:
                    os._exit(1)
            time.sleep(rng.uniform(0.02, 0.25))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            assert digest(target) in allowed
        save(made[0].model, made[0].tokenizer, target)
        assert leftovers(target) == []

    def test_disk_full_while_tensors_are_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """safetensors tells of a full disk with an exception of its own."""
        made, target = tiny_checkpoint(), tmp_path / "saved"
        save(made.model, made.tokenizer, target)
        before = digest(target)

        def full(*args: Any, **kwargs: Any) -> None:
            raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

        monkeypatch.setattr(type(made.model), "save_pretrained", full)
        with pytest.raises(MarsError, match=r"No space is left on the disk of .*saved: nothing was saved"):
            save(made.model, made.tokenizer, target)
        assert digest(target) == before
        assert leftovers(target) == []

    @pytest.mark.skipif(not shutil.which("mount") or os.geteuid() != 0, reason="mounts a tiny file system")
    def test_a_disk_that_is_really_full(self, tmp_path: Path) -> None:
        disk = tmp_path / "disk"
        disk.mkdir()
        if os.system(f"mount -t tmpfs -o size=400k tmpfs {disk} 2>/dev/null") != 0:
            pytest.skip("no right to mount a file system here")
        try:
            small = tiny_checkpoint()
            save(small.model, small.tokenizer, disk / "saved")
            before = digest(disk / "saved")
            large = tiny_model(hidden_size=64, intermediate_size=256)
            with pytest.raises(MarsError, match="No space is left"):
                save(large, tiny_tokenizer(), disk / "saved")
            assert digest(disk / "saved") == before
            assert leftovers(disk / "saved") == []
        finally:
            os.system(f"umount {disk}")


def die_before_call(at: int) -> None:
    """Kill this process before its `at`-th call that changes a folder or a file."""
    count = [0]
    for name in ("rename", "fsync", "mkdir", "link", "open", "close", "unlink", "rmdir"):

        def counting(*args: Any, real: Any, **kwargs: Any) -> Any:
            if count[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)
            count[0] += 1
            return real(*args, **kwargs)

        setattr(os, name, functools.partial(counting, real=getattr(os, name)))
