"""The application: routes, and how a request goes from HTTP to the engine and back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

import mars_lm
from mars_lm.errors import MarsError
from mars_lm.serving import schemas
from mars_lm.serving.answers import Answer, ChatAnswer, CompletionAnswer
from mars_lm.serving.errors import ApiError, ClientLeftError
from mars_lm.serving.guard import Guard, Record, logger
from mars_lm.serving.keys import Keys, bearer
from mars_lm.serving.knob import FIELDS, Knob
from mars_lm.serving.metrics import CONTENT_TYPE, Metrics
from mars_lm.serving.requests import Preparation, ServerOptions
from mars_lm.serving.runner import Generation, Job, Runner
from mars_lm.settings import DecodingSettings

if TYPE_CHECKING:
    from mars_lm.checkpoint import Checkpoint
    from mars_lm.decoding import Engine

CONTROLLER_SECONDS = 0.25
# A proxy between must not take a stream that waits for a row as dead.
SILENCE_SECONDS = 15.0
# Beyond a request's own time: a client that does not read what it asked for is let go.
UNREAD_SECONDS = 15.0

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.ErrorAnswer, "description": text}
    for status, text in (
        (400, "The request is wrong; the message says how."),
        (401, "The API key is missing or wrong."),
        (404, "There is no such model."),
        (408, "The answer was not finished in time."),
        (413, "The body is too large."),
        (429, "Too many requests wait; `Retry-After` says when to come again."),
        (500, "The server failed."),
        (503, "The server is shutting down."),
    )
}


class Server:
    """What the routes share.

    Args:
        checkpoint: the model with its tokenizer.
        engine: an engine for it.
        knob: the live defaults.
        options: how the server was started.
    """

    def __init__(self, checkpoint: Checkpoint, engine: Engine, knob: Knob, options: ServerOptions) -> None:
        self.checkpoint, self.engine, self.knob, self.options = checkpoint, engine, knob, options
        self.metrics = Metrics()
        knob.on_change = lambda by: self.metrics.changes.labels(by).inc()
        limits = options.limits
        self.runner = Runner(engine, knob, self.metrics, max_queue=limits.queue, seconds=limits.seconds)
        self.preparation = Preparation(checkpoint, options, engine.max_length)
        self.keys = None if options.api_keys is None else Keys.read(options.api_keys)
        admin = options.admin_key
        self.admin = Keys([admin]) if isinstance(admin, str) else None if admin is None else Keys.read(admin)
        self.created = int(time.time())
        # One thread: a tokenizer is not made for several, and long prompts shall not take every core.
        self._tokenizing = ThreadPoolExecutor(1, "mars-tokenizer")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the engine and the controller for as long as the application lives."""
        self.runner.start()
        watch = asyncio.create_task(self._watch_load())
        try:
            yield
        finally:
            watch.cancel()
            await self.runner.stop()
            self._tokenizing.shutdown(wait=False, cancel_futures=True)

    async def prepare(self, make: Callable[[Any], list[Job]], request: Any) -> list[Job]:
        """Tokenize and check a request, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, make, request)

    async def _watch_load(self) -> None:
        while True:
            self.knob.tick(time.monotonic(), self.runner.running / self.runner.rows, self.runner.waiting)
            await asyncio.sleep(CONTROLLER_SECONDS)


def create_app(server: Server) -> FastAPI:
    """The ASGI application. Its lifespan runs the engine's thread."""
    options = server.options

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with server.running():
            yield

    app = FastAPI(
        title="mars serve",
        version=mars_lm.__version__,
        description="OpenAI's API in front of a model that yields several tokens per forward.",
        lifespan=lifespan,
        docs_url=None,  # they load their scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_middleware(Guard, limits=options.limits, metrics=server.metrics, keys=server.keys)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    _add_error_handlers(app)
    _add_openai_routes(app, server)
    _add_knob_routes(app, server)
    _add_state_routes(app, server)
    if options.page:
        from mars_lm.serving.page import add_page

        add_page(app, server)
    return app


def _add_openai_routes(app: FastAPI, server: Server) -> None:
    prepare = server.preparation

    @app.post(
        "/v1/chat/completions",
        responses={200: _answer_or_stream(schemas.ChatCompletion), **_ERRORS},
        tags=["openai"],
    )
    async def chat_completions(body: schemas.ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await _answer(server, request, body, prepare.chat, ChatAnswer, bool(body.logprobs))

    @app.post(
        "/v1/completions",
        responses={200: _answer_or_stream(schemas.Completion), **_ERRORS},
        tags=["openai"],
    )
    async def completions(body: schemas.CompletionRequest, request: Request) -> Response:
        """Continue a text."""
        return await _answer(
            server, request, body, prepare.completion, CompletionAnswer, body.logprobs is not None
        )

    @app.get("/v1/models", responses={200: {"model": schemas.ModelList}, 401: _ERRORS[401]}, tags=["openai"])
    async def models() -> Response:
        """The one model that is served."""
        return _json({"object": "list", "data": [_model(server)]})

    @app.get(
        "/v1/models/{model:path}",
        responses={200: {"model": schemas.Model}, 401: _ERRORS[401], 404: _ERRORS[404]},
        tags=["openai"],
    )
    async def model(model: str) -> Response:
        """A model by its name."""
        _check_model(server, model)
        return _json(_model(server))


def _add_knob_routes(app: FastAPI, server: Server) -> None:
    knob = server.knob

    def check_admin(request: Request) -> None:
        if server.admin is None:
            raise ApiError(
                403,
                "This server was started without an admin key, so its settings can't be seen or changed.",
                code="no_admin_key",
            )
        if not server.admin.accept(bearer(request.scope["headers"])):
            raise ApiError(
                401,
                "The admin key is missing or wrong: send it as 'Authorization: Bearer KEY'.",
                code="invalid_admin_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    refusals: dict[int | str, dict[str, Any]] = {
        401: {"model": schemas.ErrorAnswer, "description": "The admin key is missing or wrong."},
        403: {"model": schemas.ErrorAnswer, "description": "The server has no admin key."},
    }
    guarded = [Depends(check_admin)]

    @app.get(
        "/mars/settings",
        responses={200: {"model": schemas.Settings}, **refusals},
        dependencies=guarded,
        tags=["mars"],
    )
    async def settings() -> Response:
        """The live defaults: what a request that names nothing of its own decodes with."""
        return _json(_settings(knob))

    @app.patch(
        "/mars/settings",
        responses={200: {"model": schemas.Settings}, 400: _ERRORS[400], 413: _ERRORS[413], **refusals},
        dependencies=guarded,
        tags=["mars"],
    )
    async def change_settings(body: schemas.SettingsChange) -> Response:
        """Change live defaults; in force at the next forward of requests that did not choose their own."""
        changes = {name: value for name in FIELDS if (value := getattr(body, name)) is not None}
        if body.controller and knob.controller is None:
            raise ApiError(
                400,
                "This server was started without --tau-range, so it has no load controller.",
                param="controller",
            )
        knob.change("admin", changes)
        if knob.controller is not None:
            # A hand on the knob and a controller would pull it to and fro.
            on = (
                body.controller
                if body.controller is not None
                else knob.controller_on and "tau" not in changes
            )
            if on != knob.controller_on:
                knob.controller_on = on
                logger.info("settings by admin: load controller %s", "on" if on else "off")
        return _json(_settings(knob))


def _add_state_routes(app: FastAPI, server: Server) -> None:
    runner = server.runner
    unwell: dict[int | str, dict[str, Any]] = {503: {"model": schemas.Health, "description": "No."}}

    if not server.options.page:

        @app.get(
            "/", responses={404: {"model": schemas.ErrorAnswer, "description": "No page."}}, tags=["state"]
        )
        async def no_page() -> Response:
            """Somebody opened the server in a browser: say what is here."""
            raise ApiError(
                404,
                "There is no page here (--ui gives one): OpenAI's API is under /v1, what is counted under "
                "/metrics.",
                code="no_page",
            )

    @app.get("/health", responses={200: {"model": schemas.Health}, **unwell}, tags=["state"])
    async def health() -> Response:
        """Whether the process works; if not, it should be restarted."""
        return _json({"status": "failed" if runner.broken else "ok"}, 503 if runner.broken else 200)

    @app.get("/ready", responses={200: {"model": schemas.Health}, **unwell}, tags=["state"])
    async def ready() -> Response:
        """Whether new requests are taken."""
        if runner.broken or runner.draining:
            return _json({"status": "failed" if runner.broken else "draining"}, 503)
        return _json({"status": "ok"})

    @app.get("/metrics", response_class=Response, tags=["state"])
    async def metrics() -> Response:
        """Prometheus's text format."""
        return Response(server.metrics.scrape(runner, server.knob), headers={"content-type": CONTENT_TYPE})


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return _json(error.body(), error.status, error.headers)

    @app.exception_handler(MarsError)
    async def mars_error(request: Request, error: MarsError) -> Response:
        return await api_error(request, ApiError(400, str(error)))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return await api_error(request, _told(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        said = {404: "There is no such path here.", 405: "This path does not take this method."}
        told = ApiError(
            error.status_code,
            said.get(error.status_code, "The request's body can't be read as JSON."),
            headers=dict(error.headers or {}),
        )
        return await api_error(request, told)


def _told(error: RequestValidationError) -> ApiError:
    """A validation error in one sentence: which field, what is wrong."""
    first = error.errors()[0]
    place = [part for part in first["loc"][1:] if part not in schemas.UNION_TAGS]
    if first["type"] == "json_invalid":
        return ApiError(400, "The body is not valid JSON.", code="invalid_json")
    if first["type"] == "model_attributes_type" and not place:
        return ApiError(
            400,
            "The body is no JSON object sent as 'Content-Type: application/json'.",
            code="invalid_json",
        )
    if (field := first.get("ctx", {}).get("field")) is not None:
        place.append(field)
    param = ".".join(str(part) for part in place) or None
    if first["type"] == "unsupported":
        return ApiError(400, f"{first['msg']}.", param=param, code="unsupported")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"There is no field '{param}' in this API.", param=param, code="unknown_field")
    if first["type"] == "missing":
        return ApiError(400, f"The field '{param}' is missing.", param=param, code="missing_field")
    message = first["msg"] if param is None else f"'{param}': {first['msg'][0].lower()}{first['msg'][1:]}"
    return ApiError(400, f"{message}.", param=param, code="invalid_value")


async def _answer(
    server: Server,
    request: Request,
    body: schemas.ChatRequest | schemas.CompletionRequest,
    make: Callable[[Any], list[Job]],
    kind: type[Answer],
    logprobs: bool,
) -> Response:
    """From a validated request to its answer: prepare, submit, and send what comes."""
    _check_model(server, body.model)
    record: Record = request.scope["state"]["record"]
    jobs = await server.prepare(make, body)
    prompts = jobs[:: body.n or 1]
    record.prompt_tokens = sum(len(job.prompt_ids) for job in prompts)
    generation = await server.runner.submit(jobs)
    server.metrics.prompt_tokens.inc(record.prompt_tokens)
    answer = kind(body.model, server.checkpoint.tokenizer, record.prompt_tokens, len(jobs))
    if server.options.log_prompts:
        logger.info("%s prompt: %s", record.id, body.model_dump_json(include={"messages", "prompt"}))
    if body.stream:
        usage = bool(body.stream_options and body.stream_options.include_usage)
        events = _events(generation, answer, record, logprobs=logprobs, usage=usage)
        return EventStream(generation, events, server.options.limits.seconds + UNREAD_SECONDS)
    async with _leaving(request.receive, generation):
        async for piece in generation.pieces():
            assert piece is not None
            _count(record, piece)
            answer.take(piece)
    whole = answer.whole(logprobs=logprobs)
    if server.options.log_prompts:
        logger.info("%s answer: %s", record.id, json.dumps(whole["choices"], ensure_ascii=False))
    return _json(whole)


async def _events(
    generation: Generation, answer: Answer, record: Record, *, logprobs: bool, usage: bool
) -> AsyncIterator[bytes]:
    """Server-sent events: one for each forward, then the usage if asked for, then the end."""
    extra = {"usage": None} if usage else {}
    if opening := answer.opening():
        yield _event({**answer.frame(opening), **extra})
    try:
        async for piece in generation.pieces(silence=SILENCE_SECONDS):
            if piece is None:
                yield b": waiting\n\n"
                continue
            _count(record, piece)
            yield _event({**answer.chunk(piece, logprobs=logprobs), **extra})
        if usage:
            yield _event({**answer.frame([]), "usage": answer.usage(), "mars": answer.numbers()})
    except ApiError as error:  # the headers are out: the error is an event, which clients raise
        record.outcome = {408: "timeout", 503: "unavailable"}.get(error.status, "error")
        yield _event(error.body())
    yield b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends events while they come, and ends the generation when its client leaves or stops reading."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, events: AsyncIterator[bytes], seconds: float) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.generation, self.events, self.seconds = generation, events, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self.seconds), _leaving(receive, self.generation):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for event in self.events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            if connection := scope.get("extensions", {}).get("mars.abort"):
                connection["abort"]()
                await asyncio.sleep(0)  # the connection learns of it
            raise ClientLeftError from None


@contextlib.asynccontextmanager
async def _leaving(receive: Receive, generation: Generation) -> AsyncIterator[None]:
    """While inside, a client that closes its connection ends the generation; so does an exception."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.leave()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        generation.leave()  # nothing, if it has ended


def _count(record: Record, piece: Any) -> None:
    record.tokens += len(piece.output.new_token_ids)
    record.forwards += 1


def _check_model(server: Server, name: str) -> None:
    if name != server.options.model_name:
        raise ApiError(
            404,
            f"There is no model of that name here: this server has '{server.options.model_name}'.",
            param="model",
            code="model_not_found",
        )


def _model(server: Server) -> dict[str, Any]:
    mars = server.checkpoint.mars
    return {
        "id": server.options.model_name,
        "object": "model",
        "created": server.created,
        "owned_by": "mars-lm",
        "max_model_len": server.engine.max_length,
        "mars": None if mars is None else {"block_size": mars.block_size, "base_model": mars.base_model},
    }


def _settings(knob: Knob) -> dict[str, Any]:
    controller, defaults = knob.controller, dataclasses.asdict(knob.defaults)
    return {
        **defaults,
        "adaptive": DecodingSettings(**defaults).adapts,
        "trained_block_size": knob.trained_block_size,
        "controller": None if controller is None else knob.controller_on,
        "tau_range": None if controller is None else [controller.low, controller.high],
        "target_queue": None if controller is None else controller.target_queue,
    }


def _answer_or_stream(model: Any) -> dict[str, Any]:
    return {
        "model": model,
        "description": "The answer; with `stream`, events that each hold the tokens of one forward.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + _dumps(data) + b"\n\n"


def _json(data: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_dumps(data), status, headers, media_type="application/json")


_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _dumps(data: Mapping[str, Any]) -> bytes:
    return _encoder.encode(data).encode()
