"""What all tests share. Tiny models and tokenizers: `from tiny import tiny_checkpoint` (tests/tiny.py)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

# A shell that starts a command in the background has it ignore Ctrl-C, and so would every program that the
# tests start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The tests never need the Hub; a wrong name must fail at once, not after retries.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True)
def masks_cost_nothing(monkeypatch):
    """Every mask pays, whatever the machine is doing: tests count forwards. A test may set its own cost."""
    import mars_lm.decoding.engine as engine
    from decoding_reference import FixedCost

    monkeypatch.setattr(engine, "forward_cost", lambda *_: FixedCost({1: 1.0, 8: 1.0, 32: 1.0}))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real SmolLM2-135M-Instruct weights, fetched once; where they cannot be had, tests skip."""
    from mars_lm import base_weights
    from mars_lm.errors import MarsError

    try:
        return base_weights.find_or_fetch()
    except MarsError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path):
    """SmolLM2-135M-Instruct in float32 on the CPU, without an adapter; not to be changed by a test."""
    from mars_lm.checkpoint import load

    return load(smollm2_gguf, dtype="float32", device="cpu")
