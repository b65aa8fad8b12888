"""`mars calibrate`: the tau that keeps a wanted agreement with AR, and the fastest exact one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mars_lm.checkpoint import Checkpoint
from mars_lm.errors import MarsError
from mars_lm.evaluation.decoders import EngineDecoder
from mars_lm.evaluation.results import read_json, write_json
from mars_lm.evaluation.statistics import bootstrap
from mars_lm.settings import DecodingSettings, MarsSettings

LOSSY_TAUS: dict[str, tuple[float, ...]] = {
    "probability": (0.99, 0.97, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5),
    "margin": (0.98, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4),
    "entropy": (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.2),
}
EXACT_TAUS: dict[str, tuple[float, ...]] = {
    "probability": (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9),
    "margin": (0.0, 0.05, 0.1, 0.2, 0.4, 0.6),
    "entropy": (100.0, 3.0, 2.0, 1.5, 1.0, 0.5),
}


@dataclasses.dataclass
class Calibration:
    """What was measured, and what is chosen.

    Attributes:
        mode: lossy or exact.
        rows: one a tau: agreement or speed (an interval), tokens per forward and per second.
        decoding: for the checkpoint's settings.
        remark: a sentence on how sure the choice is.
    """

    mode: str
    rows: list[dict[str, Any]]
    decoding: dict[str, Any]
    remark: str


def calibrate_lossy(
    checkpoint: Checkpoint,
    prompts: Sequence[Sequence[int]],
    *,
    agreement: float,
    rule: str = "probability",
    taus: Sequence[float] | None = None,
    max_new_tokens: int = 256,
    max_rows: int = 16,
) -> Calibration:
    """The tau that drafts furthest while at least `agreement` of the tokens are AR's own.

    A token agrees if it is the one that AR would have written behind the same text. Tau is chosen by
    the lower end of its 95% interval (a bootstrap over prompts); a stricter tau that fails rules out
    laxer ones.

    Raises:
        MarsError: a model without MARS settings, or values out of range.
    """
    _require_mars(checkpoint)
    if not 0 < agreement <= 1:
        raise MarsError(f"agreement is {agreement!r}, expected a share above 0, up to 1.")
    rows: list[dict[str, Any]] = []
    # From strict to lax: for entropy a small tau is the strict one.
    order = sorted(taus or LOSSY_TAUS[rule], reverse=rule != "entropy")
    decode = EngineDecoder(checkpoint, max_rows=max_rows)
    for tau in order:
        settings = DecodingSettings(tau=tau, rule=rule, exact=False, max_new_tokens=max_new_tokens)  # type: ignore[arg-type]
        start = time.perf_counter()
        results = decode(prompts, [settings] * len(prompts))
        seconds = time.perf_counter() - start
        counts = [
            (_agreeing(checkpoint, prompt, result.token_ids), len(result.token_ids))
            for prompt, result in zip(prompts, results, strict=True)
        ]
        rows.append(
            {
                "tau": tau,
                "agreement": dataclasses.asdict(bootstrap(counts, _pooled)),
                **_speed(results, seconds),
            }
        )
    chosen = None
    for row in rows:
        if row["agreement"]["low"] < agreement:
            break
        chosen = row
    if chosen is None:
        return Calibration(
            "lossy",
            rows,
            {"exact": False, "rule": "probability", "tau": 1.0},
            f"No tau keeps {agreement:.1%} of AR's tokens for certain on these {len(prompts)} prompts: "
            "one-token mode is chosen.",
        )
    chosen["chosen"] = True
    return Calibration(
        "lossy",
        rows,
        {"exact": False, "rule": rule, "tau": chosen["tau"]},
        f"tau {chosen['tau']:g} keeps at least {chosen['agreement']['low']:.2%} of AR's tokens (95%), at "
        f"{chosen['tokens_per_forward']:.2f} tokens per forward.",
    )


def calibrate_exact(
    checkpoint: Checkpoint,
    prompts: Sequence[Sequence[int]],
    *,
    rule: str = "probability",
    taus: Sequence[float] | None = None,
    max_new_tokens: int = 256,
    max_rows: int = 16,
    turns: int = 3,
) -> Calibration:
    """The tau that is fastest on this machine, in exact mode, where the text does not depend on it.

    The prompts are cut into batches; every turn runs every tau on every batch, one after the other, so that
    the machine's drift meets all alike. Speed is tokens per second against the laxest tau; its interval is a
    bootstrap over batches and turns.

    Raises:
        MarsError: a model without MARS settings, or values out of range.
    """
    _require_mars(checkpoint)
    order = sorted(taus or EXACT_TAUS[rule], reverse=rule == "entropy")
    batches = [prompts[i : i + max_rows] for i in range(0, len(prompts), max_rows)]
    decode = EngineDecoder(checkpoint, max_rows=max_rows)
    every = {
        tau: DecodingSettings(tau=tau, rule=rule, max_new_tokens=max_new_tokens)  # type: ignore[arg-type]
        for tau in order
    }
    decode(batches[0][:1], [every[order[0]]])  # the first forwards of a process are slow
    seconds: dict[float, list[float]] = {tau: [] for tau in order}
    results: dict[float, list[Any]] = {tau: [] for tau in order}
    for _ in range(turns):
        for batch in batches:
            for tau in order:
                start = time.perf_counter()
                results[tau] += decode(batch, [every[tau]] * len(batch))
                seconds[tau].append(time.perf_counter() - start)
    rows: list[dict[str, Any]] = []
    for tau in order:
        # The same tokens in all: the ratio of speeds is the ratio of seconds.
        pairs = list(zip(seconds[order[0]], seconds[tau], strict=True))
        speed = bootstrap(pairs, lambda drawn: sum(a for a, _ in drawn) / sum(b for _, b in drawn))
        rows.append(
            {"tau": tau, "speed": dataclasses.asdict(speed), **_speed(results[tau], sum(seconds[tau]))}
        )
    chosen = max(rows, key=lambda row: row["speed"]["value"])
    # Where drafting all is as fast as makes no difference, it is the one that needs no explaining.
    sure = chosen["speed"]["low"] > 1
    if not sure:
        chosen = rows[0]
    chosen["chosen"] = True
    remark = (
        f"tau {chosen['tau']:g} is {chosen['speed']['value']:.3f} times as fast as tau {order[0]:g} "
        f"[{chosen['speed']['low']:.3f}, {chosen['speed']['high']:.3f}]."
        if sure
        else f"No tau is faster than {order[0]:g} beyond the measurement's error: all drafts pass."
    )
    return Calibration("exact", rows, {"exact": True, "rule": rule, "tau": chosen["tau"]}, remark)


def write_decoding(folder: Path, decoding: dict[str, Any]) -> Path:
    """Put decoding defaults into a checkpoint's (or an adapter's) settings, in place.

    Args:
        folder: with a `config.json` that has `mars`, or an adapter with `mars.json`.
    Returns:
        The file that was changed.
    Raises:
        MarsError: there is no such folder, or it has no MARS settings.
    """
    for name, nested in (("config.json", True), ("mars.json", False)):
        file = folder / name
        if not file.is_file():
            continue
        whole = read_json(file)
        settings = whole.get("mars") if nested else whole
        if not isinstance(settings, dict):
            continue
        settings["decoding"] = decoding
        MarsSettings(**settings)
        write_json(file, whole)
        return file
    raise MarsError(
        f"{folder} is no local checkpoint with MARS settings, so the result cannot be written there: `mars "
        "convert` makes one."
    )


def _pooled(counts: Sequence[tuple[int, int]]) -> float:
    return sum(right for right, _ in counts) / max(sum(total for _, total in counts), 1)


@torch.inference_mode()
def _agreeing(checkpoint: Checkpoint, prompt: Sequence[int], tokens: Sequence[int]) -> int:
    """How many of the tokens are AR's own behind what stands before them."""
    if not tokens:
        return 0
    device = next(checkpoint.model.parameters()).device
    ids = torch.tensor([[*prompt, *tokens]], device=device)
    logits = checkpoint.model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=len(tokens)).logits[0]
    if checkpoint.mars is not None:
        logits[:, checkpoint.mars.mask_token_id] = -torch.inf
    return int((logits.argmax(dim=-1) == ids[0, len(prompt) :]).sum())


def _speed(results: Sequence[Any], seconds: float) -> dict[str, float]:
    tokens = sum(len(result.token_ids) for result in results)
    return {
        "tokens_per_forward": tokens / max(sum(result.forwards for result in results), 1),
        "tokens_per_second": tokens / seconds,
    }


def _require_mars(checkpoint: Checkpoint) -> None:
    if checkpoint.mars is None:
        raise MarsError("The model has no MARS settings: it decodes one token per forward, whatever tau is.")
