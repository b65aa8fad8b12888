"""What every request passes: keys, the body's size and pace, one line in the log, and errors in one shape."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
import uuid
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mars_lm.serving.errors import ApiError, ClientLeftError
from mars_lm.serving.keys import Keys, bearer
from mars_lm.serving.metrics import Metrics
from mars_lm.serving.requests import Limits
from mars_lm.serving.runner import where

logger = logging.getLogger("mars_lm.serving")
access = logging.getLogger("mars_lm.serving.access")

# Requests whose path starts so need a key, where the server has keys.
GUARDED = ("/v1/",)
# Endpoints that are counted under their own name; a name that a client makes up must not become a label.
COUNTED = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/mars/settings")


@dataclasses.dataclass
class Record:
    """What is known of a request at its end; handlers fill it in. In `scope["state"]["record"]`."""

    id: str
    started: float
    outcome: str | None = None
    status: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    forwards: int = 0


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, *, limits: Limits, metrics: Metrics, keys: Keys | None) -> None:
        self.app, self.limits, self.metrics, self.keys = app, limits, metrics, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        record = Record(id=f"req-{uuid.uuid4().hex}", started=time.perf_counter())
        scope.setdefault("state", {})["record"] = record
        started = False

        async def numbered_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                record.status = message["status"]
                message = {
                    **message,
                    "headers": [*message.get("headers", ()), (b"x-request-id", record.id.encode())],
                }
            await send(message)

        try:
            self._check_key(scope)
            await self.app(scope, replayed(await self._body(scope, receive), receive), numbered_send)
        except ClientLeftError:
            record.outcome = "left"
        except ApiError as error:
            if not started:
                await answer_error(error, numbered_send)
        except Exception as error:
            logger.error("%s %s failed:\n%s", scope["method"], record.id, where(error))
            record.outcome = "error"
            if started:  # half an answer: the connection is closed, so that it can't be taken for a whole one
                raise ConnectionAbortedError from None
            await answer_error(
                ApiError(500, "The server failed at this request.", code="internal_error"), numbered_send
            )
        finally:
            self._close(scope, record)

    def _check_key(self, scope: Scope) -> None:
        if self.keys is None or not scope["path"].startswith(GUARDED):
            return
        if not self.keys.accept(bearer(scope["headers"])):
            raise ApiError(
                401,
                "The API key is missing or wrong: send it as 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body, of limited size, within limited time."""
        limit = self.limits.body_bytes
        too_large = ApiError(
            413,
            f"The request's body is larger than this server's limit of {limit} bytes.",
            code="request_too_large",
            headers={"Connection": "close"},
        )
        for name, value in scope["headers"]:
            if name == b"content-length" and (not value.isdigit() or len(value) > 19 or int(value) > limit):
                raise too_large
        parts, size, more = [], 0, True
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeftError
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    more = message.get("more_body", False)
                    if size > limit:
                        raise too_large
        except TimeoutError:
            raise ApiError(
                408,
                f"The request's body was not there after {self.limits.body_seconds:g} seconds.",
                code="body_timeout",
                headers={"Connection": "close", "x-should-retry": "false"},
            ) from None
        return b"".join(parts)

    def _close(self, scope: Scope, record: Record) -> None:
        path = scope["path"]
        if not path.startswith(("/v1/", "/mars/")):
            return
        outcome = record.outcome or _outcome(record.status)
        endpoint = path if path in COUNTED else "other"
        seconds = time.perf_counter() - record.started
        self.metrics.requests.labels(endpoint, outcome).inc()
        if record.tokens:
            self.metrics.request_seconds.observe(seconds)
        access.info(
            "%s %s %s %s %d prompt_tokens=%d tokens=%d forwards=%d seconds=%.3f",
            record.id,
            scope["method"],
            endpoint,
            outcome,
            record.status,
            record.prompt_tokens,
            record.tokens,
            record.forwards,
            seconds,
        )


def replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives a body that was read already, and then goes on."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _outcome(status: int) -> str:
    if status < 400:
        return "ok"
    named = {408: "timeout", 429: "busy", 503: "unavailable"}
    return named.get(status, "refused" if status < 500 else "error")


async def answer_error(error: ApiError, send: Send) -> None:
    """Send an error in OpenAI's shape."""
    body = json.dumps(error.body(), ensure_ascii=False).encode()
    headers: list[Any] = [(b"content-type", b"application/json")]
    headers.append((b"content-length", str(len(body)).encode()))
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
