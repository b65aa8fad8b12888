"""`mars eval`: tasks -> prompts -> texts -> scores, with tokens per forward and per second beside each."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

from lm_eval.evaluator import evaluate as harness_evaluate

from mars_lm.checkpoint import Checkpoint
from mars_lm.errors import MarsError
from mars_lm.evaluation import tasks as task_loading
from mars_lm.evaluation.decoders import Decode, EngineDecoder
from mars_lm.evaluation.harness_model import MarsLM
from mars_lm.evaluation.local_rows import no_bars
from mars_lm.evaluation.results import ResultsFolder, fingerprint, fingerprint_of
from mars_lm.evaluation.statistics import of_mean
from mars_lm.evaluation.tasks import Benchmark, LoadedBenchmark
from mars_lm.settings import DecodingSettings

Say = Callable[[str], None]


@dataclasses.dataclass
class EvaluationOptions:
    """What of an evaluation is not the model: rows, format, and how many at a time.

    Args:
        data: a local folder of rows; None is the Hub.
        limit: rows a task, from its first on; None is all.
        batch_size: requests decoded together.
        chat_template: None: where the tokenizer has one.
        fewshot, max_new_tokens: in place of the benchmark's own.
        run_code: run generated code, confined.
        keep_samples: write every prompt, text and score beside the results.
    """

    data: Path | None = None
    limit: int | None = None
    batch_size: int = 16
    chat_template: bool | None = None
    fewshot: int | None = None
    max_new_tokens: int | None = None
    run_code: bool = False
    keep_samples: bool = True


def evaluate(
    checkpoint: Checkpoint,
    names: Sequence[str],
    settings: DecodingSettings,
    options: EvaluationOptions,
    *,
    model: str,
    output: Path | None = None,
    decoder: str = "mars",
    decode: Decode | None = None,
    say: Say = lambda sentence: None,
) -> dict[str, Any]:
    """Evaluate one checkpoint, decoded one way, on some tasks.

    Args:
        checkpoint: the model.
        names: tasks or groups of the harness, or `paper`.
        settings: how texts are decoded.
        options: rows, format, batch.
        model: what the checkpoint is called in tables.
        output: keep results there after each task, and go on from what is there.
        decoder, decode: another decoder's name and call; default: the engine.
        say: takes remarks and progress, a sentence each.
    Returns:
        By task: score (value, low, high, rows, metric), all metrics, speed.
    Raises:
        MarsError: an unknown task, rows that are not to be had, or a folder of other results.
    """
    chosen, remarks = task_loading.choose(
        names,
        data=options.data,
        run_code=options.run_code,
        fewshot=options.fewshot,
        max_new_tokens=options.max_new_tokens,
    )
    for remark in remarks:
        say(remark)
    if checkpoint.mars is None and decoder == "mars":
        say(f"{model} has no MARS settings: evaluated as plain AR, one token per forward.")
    chat = options.chat_template
    if chat is None:
        chat = bool(checkpoint.tokenizer.chat_template)
        if not chat:
            say("The tokenizer has no chat template: prompts are given as they stand.")
    folder = None
    if output is not None:
        folder = ResultsFolder(output, identity(checkpoint, settings, options, chat, model, decoder, decode))
    parts: dict[str, Any] = {}
    for benchmark in chosen:
        if folder is not None and benchmark.name in folder.parts:
            parts[benchmark.name] = folder.parts[benchmark.name]
            if options.data is not None:
                rows = _local_rows_mark(benchmark, options.data.resolve(), options.run_code)
                if parts[benchmark.name].get("rows_mark", rows) != rows:
                    raise MarsError(
                        f"{output} has results on other rows of {benchmark.title} than those in "
                        f"{options.data}: name another --output."
                    )
            say(f"{benchmark.title}: finished before.")
            continue
        loaded = task_loading.load(benchmark, data=options.data, run_code=options.run_code)
        say(f"{benchmark.title}: {_rows(loaded, options.limit)} rows.")
        lm = MarsLM(
            loaded=checkpoint,
            batch_size=options.batch_size,
            decode=decode or EngineDecoder(checkpoint, max_rows=options.batch_size),
            settings=settings,
            journal=output / "answers" / f"{benchmark.name}.jsonl" if output else None,
        )
        part, samples = _run(lm, loaded, options, chat)
        part["rows_mark"] = _rows_mark(loaded)
        parts[benchmark.name] = part
        if folder is not None:
            if options.keep_samples:
                _write_samples(folder.folder / "samples" / f"{benchmark.name}.jsonl", samples)
            folder.add(benchmark.name, part)
            parts[benchmark.name] = folder.parts[benchmark.name]
    return parts


def identity(
    checkpoint: Checkpoint,
    settings: DecodingSettings,
    options: EvaluationOptions,
    chat: bool,
    model: str,
    decoder: str,
    decode: Decode | None = None,
) -> dict[str, Any]:
    """What two runs must share to stand in one folder (and the rows of each task, which stand with it)."""
    draft, heads = getattr(decode, "draft", None), getattr(decode, "heads", None)
    return {
        "checkpoint": fingerprint(checkpoint),
        "model": model,
        "decoder": decoder,
        "draft": None if draft is None else fingerprint(draft),
        "heads": None if heads is None else fingerprint_of(heads),
        "tau": settings.tau,
        "rule": settings.rule,
        "block_size": settings.block_size,
        "exact": settings.exact,
        "recovery": settings.recovery,
        "adaptive": settings.adapts,
        "dtype": checkpoint.dtype,
        "chat_template": chat,
        "batch_size": options.batch_size,
        "limit": options.limit,
        "num_fewshot": options.fewshot,
        "max_new_tokens": options.max_new_tokens,
        "rows": "local" if options.data else "hub",
    }


def _rows_mark(loaded: LoadedBenchmark) -> str:
    """A hash of the rows that are asked."""
    digest = hashlib.sha256()
    for name, task in sorted(loaded.tasks.items()):
        digest.update(name.encode())
        for row in task.eval_docs:
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]


@lru_cache(maxsize=64)
def _local_rows_mark(benchmark: Benchmark, data: Path, run_code: bool) -> str:
    """Of a benchmark that is finished; a sweep asks for the same one in every cell."""
    return _rows_mark(task_loading.load(benchmark, data=data, run_code=run_code))


def _rows(loaded: LoadedBenchmark, limit: int | None) -> int:
    sizes = [len(task.eval_docs) for task in loaded.tasks.values()]
    return sum(size if limit is None else min(size, limit) for size in sizes)


def _run(
    lm: MarsLM, loaded: LoadedBenchmark, options: EvaluationOptions, chat: bool
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    with _quiet_harness():
        results: Any = harness_evaluate(
            lm=lm,
            task_dict=loaded.task_dict,
            limit=options.limit,
            bootstrap_iters=0,  # intervals are ours, below
            log_samples=True,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            confirm_run_unsafe_code=options.run_code,
        )
    samples = [{"task": name, **row} for name in loaded.tasks for row in results["samples"].get(name, [])]
    part = {
        "title": loaded.benchmark.title,
        "score": score(loaded.benchmark, results, samples),
        "metrics": results["results"],
        "num_fewshot": results["n-shot"],
        "speed": lm.speed.summary(),
    }
    return part, samples


def score(benchmark: Benchmark, results: Any, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """The benchmark's one number with its 95% interval (Wilson's, where rows are right or wrong).

    Over a group of tasks it is the mean over all rows, as the harness's BBH and MMLU-Pro weigh theirs.
    """
    metric, kind = benchmark.score or _first_metric(benchmark, results)
    values = [row[metric] for row in samples if row["filter"] == kind and metric in row]
    name = f"{metric},{kind}"
    if values and all(isinstance(value, (bool, int, float)) for value in values):
        interval = of_mean([float(value) for value in values])
        return {
            "metric": name,
            "value": interval.value,
            "low": interval.low,
            "high": interval.high,
            "rows": len(values),
        }
    # A metric of the whole, such as perplexity: the harness's number, without an interval.
    value = results["results"].get(benchmark.name, {}).get(name)
    return {"metric": name, "value": value, "low": None, "high": None, "rows": len(values)}


def _first_metric(benchmark: Benchmark, results: Any) -> tuple[str, str]:
    order = ("acc_norm", "acc", "exact_match")
    found = [
        tuple(key.split(",", 1))
        for metrics in results["results"].values()
        for key in metrics
        if "," in key and "_stderr" not in key
    ]
    for wanted in order:
        for metric, kind in found:
            if metric == wanted:
                return metric, kind
    if not found:
        raise MarsError(f"{benchmark.name} gave no score.")
    return found[0][0], found[0][1]


def _write_samples(path: Path, samples: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in samples:
            file.write(json.dumps(row, default=str, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def _quiet_harness() -> Iterator[None]:
    """The harness's bars and remarks stay out of what a command prints; ours are enough."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with (
            no_bars(),
            mock.patch("lm_eval.api.task.tqdm", lambda rows, **_: rows),
            mock.patch("lm_eval.api.model.tqdm", lambda rows, **_: rows),
        ):
            yield
    finally:
        logger.setLevel(level)


def mean_score(parts: dict[str, Any]) -> float | None:
    """The mean of the benchmarks' scores, each counting once; None if one has no number."""
    values = [part["score"]["value"] for part in parts.values()]
    if not values or any(value is None for value in values):
        return None
    return float(sum(values) / len(values))
