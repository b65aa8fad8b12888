"""The process: uvicorn with limits on connections, and an end that loses nothing that was accepted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mars_lm.errors import MarsError
from mars_lm.serving.app import UNREAD_SECONDS, Server, create_app
from mars_lm.serving.errors import ApiError
from mars_lm.serving.requests import Limits

logger = logging.getLogger("mars_lm.serving")

HEADER_BYTES = 32 * 1024
KEEP_ALIVE_SECONDS = 60
# After the requests have ended: what is still on its way to a client that reads slowly.
FLUSH_SECONDS = 3


def serve(server: Server, host: str, port: int) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish what was accepted; returns when all is over.

    Raises:
        MarsError: the address can't be bound.
    """
    _log_to_stderr()
    process, bound = build(server, host, port)
    process.run(sockets=[bound])


def build(server: Server, host: str, port: int) -> tuple[uvicorn.Server, socket.socket]:
    """The uvicorn server and the bound socket (port 0: any free one) that `serve` runs.

    Raises:
        MarsError: the address can't be bound.
    """
    config = uvicorn.Config(
        create_app(server),
        host=host,
        port=port,
        http=_protocol(server.options.limits),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=FLUSH_SECONDS,
        h11_max_incomplete_event_size=HEADER_BYTES,
    )
    return _Uvicorn(config, server), _bound(host, port)


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise MarsError(
            f"The address {host}:{port} can't be used ({error.strerror}): choose another --host or --port."
        ) from None
    return bound


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, server: Server) -> None:
        super().__init__(config)
        self._mars = server

    async def shutdown(self, sockets: Any = None) -> None:
        """Stop accepting, let requests finish or their time end, then close."""
        logger.info("shutting down: %d answers are to be finished", self._mars.runner.in_flight)
        for listener in self.servers:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        drained = asyncio.create_task(self._mars.runner.drain(self._mars.options.drain_seconds))
        while not drained.done() and not self.force_exit:
            await asyncio.wait([drained], timeout=0.1)
        drained.cancel()
        # Nothing is generated any more: connections that are still open (an idle page's, a client's that does
        # not read) get a moment.
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn does, but without raising the signal again at the end: an orderly end has status 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
        # At once, not at the next look of the main loop: a request that comes now is told that we end.
        self._mars.runner.draining = True


def _protocol(limits: Limits) -> type[H11Protocol]:
    """uvicorn's HTTP protocol, but for connections that take too long, or are too many."""

    class GuardedProtocol(H11Protocol):
        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            if len(self.connections) >= limits.connections:
                self.transport = transport
                transport.abort()
                return
            super().connection_made(transport)
            self._expect_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unexpect_headers()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._unexpect_headers()
            elif self._late is None:
                self._expect_headers()

        def handle_events(self) -> None:
            before = self.cycle
            super().handle_events()
            if self.cycle is not before and self.scope is not None:
                self.scope["extensions"] = {"mars.abort": {"abort": self.transport.abort}}

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self.loop.call_later(UNREAD_SECONDS, self._abort_if_unread, self.cycle)

        def _abort_if_unread(self, cycle: Any) -> None:
            if self.cycle is cycle and self.transport.get_write_buffer_size():
                self.transport.abort()

        def _expect_headers(self) -> None:
            self._late = self.loop.call_later(limits.header_seconds, self.transport.abort)

        def _unexpect_headers(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

        def send_400_response(self, msg: str) -> None:
            body = ApiError(400, "This is no valid HTTP request.", code="invalid_http").body()
            data = json.dumps(body).encode()
            with contextlib.suppress(Exception):  # in the midst of an answer there is nothing to say any more
                head = (
                    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
                    b"content-length: %d\r\n\r\n" % len(data)
                )
                if self.cycle is None or self.cycle.response_complete:
                    self.transport.write(head + data)
            self.transport.close()

    return GuardedProtocol


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    ours = logging.getLogger("mars_lm.serving")
    ours.handlers, ours.propagate = [handler], False
    ours.setLevel(logging.INFO)
    # uvicorn's own errors only, and those without a request's text.
    uvicorn_log = logging.getLogger("uvicorn")
    uvicorn_log.handlers, uvicorn_log.propagate = [handler], False
    uvicorn_log.setLevel(logging.ERROR)
