"""In front of vLLM's OpenAI server: the live knob's address, and a 400 for settings that make no sense.

vLLM takes it as `--middleware mars_lm.vllm.http.MarsMiddleware`. The knob is the one of `mars serve`, so
that `mars knob` turns both. It writes a file, which the scheduler watches: any of several API servers may
be asked.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from mars_lm.errors import MarsError
from mars_lm.serving.keys import Keys
from mars_lm.settings import MarsSettings
from mars_lm.vllm.defaults import KNOB_FILE, configured, make_knob, read_knob_file, resolve

logger = logging.getLogger("vllm.mars_lm")

ADMIN_KEY_VARIABLE = "MARS_ADMIN_KEY"
KNOB_PATH = "/mars/settings"
_MAX_KNOB_BODY = 1 << 16

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class MarsMiddleware:
    """An ASGI middleware: answers `KNOB_PATH`, checks `vllm_xargs`, and passes on everything else."""

    def __init__(self, app: Any) -> None:
        self._app = app
        key = os.environ.get(ADMIN_KEY_VARIABLE)
        self._admin = Keys([key]) if key else None

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] == KNOB_PATH:
            await _answer(send, *self._knob(scope, await _body(receive)))
        elif scope["method"] == "POST" and scope["path"].startswith("/v1/"):
            await self._checked(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _checked(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        messages: list[dict[str, Any]] = []
        while not messages or messages[-1].get("more_body"):
            messages.append(await receive())
            if messages[-1]["type"] != "http.request":
                break
        try:
            self._check_xargs(scope, b"".join(message.get("body", b"") for message in messages))
        except MarsError as error:
            await _answer(send, 400, _error(str(error)))
            return

        async def again() -> dict[str, Any]:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, again, send)

    def _check_xargs(self, scope: dict[str, Any], body: bytes) -> None:
        if b"vllm_xargs" not in body:
            return
        try:
            xargs = json.loads(body).get("vllm_xargs")
        except (ValueError, AttributeError):
            return  # vLLM says what is wrong with it
        if isinstance(xargs, dict):
            mars, named = _of_server(scope)
            resolve(make_knob(mars, named), xargs)

    def _knob(self, scope: dict[str, Any], body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and JSON of a request to the knob."""
        if self._admin is None:
            return 403, _error(f"This server has no knob: start it with {ADMIN_KEY_VARIABLE} set.")
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
        }
        if not self._admin.accept(headers.get("authorization", "").removeprefix("Bearer ")):
            return 401, _error("The admin key is wrong or missing.")
        if scope["method"] not in ("GET", "PATCH"):
            return 405, _error("The knob knows GET and PATCH.")
        try:
            mars, named = _of_server(scope)
            file = named.get(KNOB_FILE)
            knob = make_knob(mars, named)
            before = read_knob_file(Path(file)) if file else {}
            knob.change("admin", before)
            if scope["method"] == "PATCH":
                if not file:
                    raise MarsError(f"This server has no {KNOB_FILE}, so nothing can be changed.")
                changes = json.loads(body)
                if not isinstance(changes, dict) or not changes.keys() <= vars(knob.defaults).keys():
                    raise MarsError(f"expected a JSON object of {', '.join(vars(knob.defaults))}.")
                knob.change("admin", changes)
                _write(Path(file), vars(knob.defaults))
        except ValueError as error:  # a MarsError is one
            return 400, _error(str(error))
        return 200, dict(vars(knob.defaults))


def _of_server(scope: dict[str, Any]) -> tuple[MarsSettings | None, dict[str, Any]]:
    """The checkpoint's settings and the configured ones, from vLLM's configuration."""
    config = scope["app"].state.vllm_config
    return MarsSettings.from_config(config.model_config.hf_config), configured(config.additional_config)


def _write(file: Path, values: dict[str, Any]) -> None:
    """In one step, so that nobody reads half a file."""
    new = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        new.write_text(json.dumps(values) + "\n", encoding="utf-8")
        os.replace(new, file)
    except OSError as error:
        raise MarsError(f"The knob's file {file} can't be written ({error.strerror}).") from None


async def _body(receive: Receive) -> bytes:
    body, more = b"", True
    while more and len(body) <= _MAX_KNOB_BODY:
        message = await receive()
        body += message.get("body", b"")
        more = bool(message.get("more_body"))
    return body


def _error(sentence: str) -> dict[str, Any]:
    return {"error": {"message": sentence, "type": "invalid_request_error", "param": None, "code": None}}


async def _answer(send: Send, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
