"""Engines of the real vLLM on tiny random models; all tests here are skipped where vLLM is not installed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: tests/vllm/run.sh makes an environment")

from mars_lm.checkpoint import Checkpoint, save  # noqa: E402
from mars_lm.vllm.launch import engine_arguments  # noqa: E402
from tiny import tiny_checkpoint  # noqa: E402

# The engine lives in the tests' own process, so that they can look at its scheduler.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

VOCABULARY = 320


def agreeable(seed: int = 0) -> Checkpoint:
    """A tiny random model that says a few words mostly, so that its masks often guess what AR says next.

    Its mask token is never AR's choice.
    """
    made = tiny_checkpoint(seed=seed, tied=False, head_dim=32)  # the CPU kernels know 32 and more
    assert made.mars is not None
    with torch.no_grad():
        made.model.lm_head.weight[60:64] *= 5
        made.model.lm_head.weight[made.mars.mask_token_id] = 0
    return made


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny MARS checkpoint, B = 4, float32."""
    path = tmp_path_factory.mktemp("vllm") / "tiny"
    made = agreeable()
    save(made.model, made.tokenizer, path)
    return path


Start = Callable[..., Any]


@pytest.fixture(scope="session")
def start(folder: Path) -> Start:
    """Start an engine: `start(None)` is plain vLLM, `start({…})` has the plugin with these defaults."""

    def begin(mars: dict[str, Any] | None, model: Path = folder, **changes: Any) -> Any:
        arguments: dict[str, Any] = {
            "model": str(model),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 256,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 256,
            "disable_log_stats": False,
            "seed": 0,
        }
        if mars is not None:
            arguments |= engine_arguments(4, mars)
        import vllm

        engines.append(vllm.LLM(**{**arguments, **changes}))
        return engines[-1]

    # An engine that is collected takes the process's distributed groups with it, and those are all engines'.
    engines: list[Any] = []
    return begin


@pytest.fixture(scope="session")
def plain(start: Start) -> Any:
    return start(None)


@pytest.fixture(scope="session")
def mars(start: Start) -> Iterator[Any]:
    """The plugin, exact by default, always B - 1 masks."""
    return start({"adaptive": False})


def prompts(count: int, length: int = 12, seed: int = 0) -> list[dict[str, Any]]:
    """Random prompts of ids that are no special tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(20, 300, (count, length), generator=generator)
    return [{"prompt_token_ids": row} for row in ids.tolist()]


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def metrics(llm: Any) -> dict[str, float]:
    """Drafts, drafted and accepted tokens of vLLM's own metrics, so far."""
    prefix = "vllm:spec_decode_num_"
    names = ("drafts", "draft_tokens", "accepted_tokens")
    found = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    return {name: found.get(prefix + name, 0) for name in names}
