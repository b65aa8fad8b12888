"""Where a task's rows come from: the Hub, or a local folder; the task itself stays the harness's own.

A local folder is laid out as FOLDER/gsm8k/test.jsonl, FOLDER/bbh/word_sorting.jsonl, ... (`LAYOUT`); any
other dataset OWNER/NAME is looked for as FOLDER/name/SPLIT.jsonl, or FOLDER/name/CONFIGURATION/SPLIT.jsonl.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import huggingface_hub

from mars_lm.errors import MarsError
from mars_lm.rows import read_objects
from mars_lm.sources import _hub_answers

# Dataset on the Hub -> the split's name there -> the file; {name} is the dataset's configuration.
LAYOUT = {
    "openai/gsm8k": {"test": "gsm8k/test.jsonl", "train": "gsm8k/train.jsonl"},
    "openai/openai_humaneval": {"test": "humaneval/test.jsonl"},
    "google/IFEval": {"train": "ifeval/test.jsonl"},  # the Hub calls its one split train
    "SaylorTwift/bbh": {"test": "bbh/{name}.jsonl"},
    "TIGER-Lab/MMLU-Pro": {"test": "mmlu_pro/test.jsonl", "validation": "mmlu_pro/validation.jsonl"},
    "Idavidrein/gpqa": {"train": "gpqa/{name}.jsonl"},
    "mars/arithmetic": {"test": "arithmetic/test.jsonl"},  # not on the Hub: benchmarks/study.py makes it
}
# Splits that only few-shot examples come from: a folder without them is complete for 0-shot runs.
_FEWSHOT_SPLITS = ("train", "validation", "dev")


class LocalDataset(dict[str, Any]):
    """Splits of one dataset, read from JSON Lines; a split that is not there is said by its file's name."""

    def __init__(self, path: str, files: dict[str, Path]) -> None:
        self._path, self._files = path, files
        super().__init__()
        for split, file in files.items():
            if file.is_file():
                self[split] = datasets.Dataset.from_list([row for _, row in read_objects(file)])
        if not self:
            wanted = " or ".join(str(file) for file in files.values())
            raise MarsError(f"The rows of {path} are wanted, and there is no {wanted or 'file for them'}.")
        for split in files:
            if split not in self and split in _FEWSHOT_SPLITS:
                self[split] = next(iter(self.values())).select([])

    def __missing__(self, split: str) -> Any:
        file = self._files.get(split)
        raise MarsError(
            f"The {split} rows of {self._path} are wanted, and "
            + (f"{file} is not there." if file else "the local folder has no place for them.")
        )


def local_dataset(folder: Path, path: str, name: str | None) -> LocalDataset:
    """A dataset of the Hub as it lies in a local folder.

    Args:
        folder: the folder of `--data`.
        path: the dataset's name on the Hub.
        name: its configuration.
    Raises:
        MarsError: it is not there.
    """
    if path in LAYOUT:
        files = {split: folder / file.format(name=name) for split, file in LAYOUT[path].items()}
        return LocalDataset(path, files)
    inner = folder / path.rsplit("/", 1)[-1].lower()
    if name and (inner / name).is_dir():
        inner = inner / name
    files = {file.stem: file for file in sorted(inner.glob("*.jsonl"))}
    return LocalDataset(path, files or {"test": inner / "test.jsonl"})


@contextlib.contextmanager
def rows_from(folder: Path | None) -> Iterator[None]:
    """Within it, tasks that are loaded take their rows from a local folder, or from the Hub (None).

    Raises:
        MarsError: rows that are not to be had; the sentence says which, and how to give them.
    """
    if folder is not None and not folder.is_dir():
        raise MarsError(f"--data {folder} is no folder: give one laid out as FOLDER/gsm8k/test.jsonl.")
    from_hub = datasets.load_dataset

    def load(path: str, name: str | None = None, **kwargs: Any) -> Any:
        if folder is not None:
            return local_dataset(folder, path, name)
        offline = contextlib.nullcontext() if _hub_answers() else _offline()
        try:
            with offline:
                return from_hub(path, name, **kwargs)
        except Exception as error:  # the Hub's client, its cache and the builders raise kinds of their own
            files = LAYOUT.get(path, {"": f"{path.rsplit('/', 1)[-1].lower()}/test.jsonl"})
            wanted = " and ".join(file.format(name=name) for file in files.values())
            raise MarsError(
                f"The rows of {path}{f' ({name})' if name else ''} cannot be had from the Hugging Face Hub "
                f"({type(error).__name__}): go online, or give --data FOLDER with {wanted} in it."
            ) from None

    # Local rows take a moment; a download keeps its bar.
    with (
        no_bars() if folder is not None else contextlib.nullcontext(),
        mock.patch.object(datasets, "load_dataset", load),
    ):
        yield


@contextlib.contextmanager
def no_bars() -> Iterator[None]:
    """Within it, the datasets library shows no progress."""
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """What is in the cache is used, and nothing is waited for."""
    with (
        mock.patch.object(datasets.config, "HF_HUB_OFFLINE", True),
        mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True),
    ):
        yield
