"""Names -> the harness's tasks, with the paper's settings, and rows from the Hub or a local folder."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import lm_eval.tasks
from lm_eval.tasks import TaskManager

from mars_lm.errors import MarsError
from mars_lm.evaluation.code_execution import CodeEval
from mars_lm.evaluation.local_rows import LAYOUT, rows_from
from mars_lm.evaluation.sentences import ensure_sentence_splitter

PAPER_GROUP = "paper"
LOCAL_TASKS = Path(__file__).parent / "tasks"


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One line of a results table: a task or a group of the harness, and what is taken from it.

    Args:
        name: as the harness knows it.
        title: as the table calls it.
        score: the metric and the filter of the number that counts; None: the harness's first.
        fewshot: how many worked examples; None: as the task says.
        max_new_tokens: None: as the task says.
        dataset: its rows' name on the Hub, where `LAYOUT` has a place for them.
        runs_code: scoring runs what the model wrote.
    """

    name: str
    title: str
    score: tuple[str, str] | None = None
    fewshot: int | None = None
    max_new_tokens: int | None = None
    dataset: str | None = None
    runs_code: bool = False


# The six of the paper with its settings: 256 new tokens, no worked examples but for BBH's three.
PAPER = (
    Benchmark("ifeval", "IFEval", ("prompt_level_strict_acc", "none"), 0, 256, "google/IFEval"),
    Benchmark("bbh_cot_fewshot", "BBH", ("exact_match", "get-answer"), 3, 256, "SaylorTwift/bbh"),
    Benchmark("mmlu_pro", "MMLU-Pro", ("exact_match", "custom-extract"), 0, 256, "TIGER-Lab/MMLU-Pro"),
    Benchmark(
        "gpqa_main_cot_zeroshot", "GPQA", ("exact_match", "flexible-extract"), 0, 256, "Idavidrein/gpqa"
    ),
    Benchmark("gsm8k_cot_zeroshot", "GSM8K", ("exact_match", "flexible-extract"), 0, 256, "openai/gsm8k"),
    Benchmark(
        "humaneval_instruct", "HumanEval", ("pass@1", "create_test"), 0, 256, "openai/openai_humaneval", True
    ),
)
# This project's own, for its study from scratch.
ARITHMETIC = Benchmark(
    "mars_arithmetic", "arithmetic", ("exact_match", "final-number"), 0, 96, "mars/arithmetic"
)
_KNOWN = {benchmark.name: benchmark for benchmark in (*PAPER, ARITHMETIC)}
_FOLDERS = ("ifeval", "bbh", "mmlu_pro", "gpqa", "gsm8k", "humaneval")  # of the harness's tasks


@dataclasses.dataclass
class LoadedBenchmark:
    """A benchmark with its tasks built.

    Attributes:
        benchmark: what it is.
        task_dict: as `lm_eval.evaluate` takes it.
    """

    benchmark: Benchmark
    task_dict: Any

    @property
    def tasks(self) -> dict[str, Any]:
        """The leaf tasks by name."""
        return dict(self.task_dict["tasks"])


def choose(
    names: Sequence[str],
    *,
    data: Path | None = None,
    run_code: bool = False,
    fewshot: int | None = None,
    max_new_tokens: int | None = None,
) -> tuple[list[Benchmark], list[str]]:
    """The benchmarks that names stand for, and remarks on those that a group leaves out.

    Args:
        names: tasks or groups of the harness, or `paper`, the paper's six.
        data: the local folder of rows, if any.
        run_code: whether generated code may be run.
        fewshot, max_new_tokens: in place of the benchmark's own.
    Raises:
        MarsError: no task has this name (the nearest are named), or it runs code and may not.
    """
    wanted: list[Benchmark] = []
    remarks = []
    check_known([name for name in names if name != PAPER_GROUP])
    for name in names:
        members = PAPER if name == PAPER_GROUP else (_KNOWN.get(name) or Benchmark(name, name),)
        for benchmark in members:
            if benchmark in wanted:
                continue
            if benchmark.runs_code and not run_code:
                sentence = (
                    f"{benchmark.title} runs code that the model wrote; --run-generated-code allows it (in a "
                    "confined process)."
                )
                if name != PAPER_GROUP:
                    raise MarsError(sentence)
                remarks.append(f"{sentence} It is left out.")
            elif name == PAPER_GROUP and not _has_rows(benchmark, data):
                remarks.append(f"{benchmark.title} is left out: its rows are not in {data}.")
            else:
                wanted.append(benchmark)
    changes: dict[str, Any] = {
        name: value
        for name, value in (("fewshot", fewshot), ("max_new_tokens", max_new_tokens))
        if value is not None
    }
    if not wanted:
        raise MarsError(f"Nothing is left to evaluate. {' '.join(remarks)}".strip())
    return [dataclasses.replace(benchmark, **changes) for benchmark in wanted], remarks


def check_known(names: Sequence[str]) -> None:
    """See that the harness has tasks, groups or tags of these names.

    Raises:
        MarsError: it has not; the nearest names are given.
    """
    for name in names:
        if name not in _manager(name).all_tasks:
            known = [PAPER_GROUP, *_everything().all_tasks]
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            hint = f"the nearest names are {', '.join(near)}" if near else "`lm_eval ls tasks` lists all"
            raise MarsError(f"lm-evaluation-harness has no task {name!r}: {hint}.")


def load(benchmark: Benchmark, *, data: Path | None = None, run_code: bool = False) -> LoadedBenchmark:
    """Build a benchmark's tasks: definitions from the harness, rows from the Hub or from `data`.

    Raises:
        MarsError: rows that are not to be had, or code that may not be run.
    """
    if "ifeval" in benchmark.name:
        ensure_sentence_splitter()
    with rows_from(data), _code_metric():
        try:
            task_dict = _manager(benchmark.name).load([benchmark.name])
        except (ImportError, ModuleNotFoundError) as error:
            raise MarsError(f"Task {benchmark.name} needs a package that is not here: {error}.") from None
    loaded = LoadedBenchmark(benchmark, task_dict)
    for name, task in loaded.tasks.items():
        if getattr(task, "UNSAFE_CODE", False) and not run_code:
            raise MarsError(f"{name} runs code that the model wrote; --run-generated-code allows it.")
        _set_up(task, name, benchmark, data)
    return loaded


def _set_up(task: Any, name: str, benchmark: Benchmark, data: Path | None) -> None:
    if callable(process := task.get_config("process_docs")):
        task.set_config(key="process_docs", value=_once(process))
    own = task.get_config("num_fewshot")
    shots = benchmark.fewshot if benchmark.fewshot is not None else (own or 0)
    task.set_config(key="num_fewshot", value=shots)
    task.set_fewshot_seed(seed=1234)  # the harness's own
    sampler = getattr(task, "sampler", None)
    if shots and sampler is not None and len(sampler.df) < shots:
        where = data if data is not None else "the Hub"
        raise MarsError(
            f"{name} wants {shots} worked examples, and {where} has no rows for them: --num-fewshot 0."
        )
    if benchmark.max_new_tokens is not None and task.get_config("output_type") == "generate_until":
        kept = dict(task.get_config("generation_kwargs") or {})
        for alias in ("max_new_tokens", "max_tokens", "max_completion_tokens"):
            kept.pop(alias, None)
        task.set_config(key="generation_kwargs", value={**kept, "max_gen_toks": benchmark.max_new_tokens})


def _once(process: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The harness asks for a task's rows several times; those that are shuffled must come out the same."""
    kept: dict[str, Any] = {}

    def processed(rows: Any) -> Any:
        key = str(getattr(rows, "_fingerprint", id(rows)))
        if key not in kept:
            random.seed(0)
            kept[key] = process(rows)
        return kept[key]

    return processed


def _has_rows(benchmark: Benchmark, data: Path | None) -> bool:
    if data is None or benchmark.dataset is None:
        return True
    return any(
        file for pattern in LAYOUT[benchmark.dataset].values() for file in data.glob(pattern.format(name="*"))
    )


@functools.lru_cache(maxsize=1)
def _familiar() -> TaskManager:
    """An index of the paper's benchmarks and our own, which is there at once."""
    folders = [Path(lm_eval.tasks.__file__).parent / name for name in _FOLDERS]
    return TaskManager(include_path=[*folders, LOCAL_TASKS], include_defaults=False)


@functools.lru_cache(maxsize=1)
def _everything() -> TaskManager:
    """An index of all 14,000 tasks of the harness, which takes several seconds."""
    return TaskManager(include_path=[LOCAL_TASKS])


def _manager(name: str) -> TaskManager:
    return _familiar() if name in _familiar().all_tasks else _everything()


@contextlib.contextmanager
def _code_metric() -> Iterator[None]:
    """Code tasks ask the `evaluate` library for `code_eval`, which would run code here: they get ours."""
    import evaluate

    ask = evaluate.load

    def load_metric(path: str, *args: Any, **kwargs: Any) -> Any:
        return CodeEval() if path == "code_eval" else ask(path, *args, **kwargs)

    with mock.patch.object(evaluate, "load", load_metric):
        yield
