"""A real server on a loopback port, with a tiny random model, in a thread of the test's process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mars_lm.decoding import Engine
from mars_lm.serving.app import Server
from mars_lm.serving.knob import FIELDS, Defaults, Knob, LoadController
from mars_lm.serving.requests import Limits, ServerOptions
from mars_lm.serving.server import build
from mars_lm.settings import DecodingSettings
from tiny import tiny_checkpoint

MODEL = "tiny"
ADMIN_KEY = "turn-it"


class RunningServer:
    """A server that accepts requests, and its insides."""

    def __init__(self, server: Server, process: Any, port: int) -> None:
        self.server, self.process, self.port = server, process, port
        self.url = f"http://127.0.0.1:{port}"

    @property
    def runner(self) -> Any:
        return self.server.runner

    def client(self, **options: Any) -> Any:
        """The official client."""
        openai = pytest.importorskip("openai", reason="the official client is not installed")
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=60, **options)

    def wait_until_idle(self, seconds: float = 10.0) -> None:
        """Wait until no answer runs or waits; fails if one never ends."""
        until = time.monotonic() + seconds
        while self.runner.in_flight:
            assert time.monotonic() < until, f"{self.runner.in_flight} answers still hold rows"
            time.sleep(0.01)
        assert not self.server.engine.has_work
        assert not self.runner._answers


class SlowEngine(Engine):
    """An engine whose forwards take at least so many seconds, so that a test can act while they run."""

    pause = 0.0

    def step(self) -> Any:
        time.sleep(self.pause)
        return super().step()


@contextlib.contextmanager
def running_server(
    *,
    checkpoint: Any = None,
    limits: Limits | None = None,
    rows: int = 4,
    pause: float = 0.0,
    tau_range: tuple[float, float] | None = None,
    target_queue: int = 8,
    defaults: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[RunningServer]:
    checkpoint = checkpoint or tiny_checkpoint()
    engine = SlowEngine(checkpoint, max_rows=rows)
    engine.pause = pause
    settings = DecodingSettings(**(defaults or {}))
    trained = None if checkpoint.mars is None else checkpoint.mars.block_size
    controller = None if tau_range is None else LoadController(*tau_range, target_queue)
    knob = Knob(Defaults(**{f: getattr(settings, f) for f in FIELDS}), trained, controller=controller)
    options.setdefault("admin_key", ADMIN_KEY)
    server = Server(
        checkpoint, engine, knob, ServerOptions(model_name=MODEL, limits=limits or Limits(), **options)
    )
    process, bound = build(server, "127.0.0.1", 0)
    thread = threading.Thread(target=process.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    until = time.monotonic() + 30
    while not process.started:
        assert thread.is_alive(), "the server did not start"
        assert time.monotonic() < until, "the server did not start in time"
        time.sleep(0.01)
    try:
        yield RunningServer(server, process, bound.getsockname()[1])
    finally:
        process.handle_exit(15, None)
        thread.join(30)
        assert not thread.is_alive(), "the server did not end"
