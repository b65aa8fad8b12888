"""A client's request -> jobs for the engine, within the server's limits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mars_lm.errors import MarsError
from mars_lm.prompts import encode_chat, encode_prompt
from mars_lm.serving.errors import ApiError
from mars_lm.serving.runner import Job
from mars_lm.serving.schemas import ChatRequest, CompletionRequest, Sampling
from mars_lm.settings import DecodingSettings

if TYPE_CHECKING:
    from mars_lm.checkpoint import Checkpoint


# What an answer on the page may have: a hand that tries things out wants to see its end.
MAX_PAGE_TOKENS = 512


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the server takes from one client, and in all.

    Attributes:
        body_bytes: of a request's body.
        body_seconds: until the body is there; `header_seconds` until the headers are.
        prompt_tokens: of one prompt; None: what the context leaves.
        new_tokens: of one answer: what a request may ask for, and what it gets where it asks for nothing.
        queue: answers that wait for a row.
        seconds: time per request, waiting included.
        connections: open at a time.
    """

    body_bytes: int = 1 << 20
    body_seconds: float = 30.0
    header_seconds: float = 15.0
    prompt_tokens: int | None = None
    new_tokens: int = 2048
    queue: int = 64
    seconds: float = 300.0
    connections: int = 512

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and value < (0 if field.name == "queue" else 1):
                raise MarsError(f"The limit {field.name} is {value}, expected a number of 1 or more.")


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """How `mars serve` was started, but for the model and its default settings.

    Attributes:
        model_name: what clients call the model.
        temperature: of requests that name none.
        cors_origins: web pages of these origins may use the server; none: no page but its own.
        log_prompts: write prompts and answers to the log.
        drain_seconds: how long running requests may go on once the server is told to end.
        page: serve the page at `/`.
    """

    model_name: str
    limits: Limits = Limits()
    temperature: float = 0.0
    api_keys: Path | None = None
    admin_key: Path | str | None = None
    cors_origins: tuple[str, ...] = ()
    log_prompts: bool = False
    drain_seconds: float = 30.0
    page: bool = False


class Preparation:
    """Turns validated requests into jobs.

    Args:
        checkpoint: for its tokenizer.
        max_length: the engine's longest prompt and answer together.
    """

    def __init__(self, checkpoint: Checkpoint, options: ServerOptions, max_length: int) -> None:
        self.checkpoint, self.options = checkpoint, options
        room = max_length - 1  # the engine needs room for one token of an answer
        self.prompt_limit = min(options.limits.prompt_tokens or room, room)
        self._longest_token = max(map(len, checkpoint.tokenizer.get_vocab()))

    def chat(self, request: ChatRequest) -> list[Job]:
        """The jobs of a chat request. Slow for long prompts: not for the event loop.

        Raises:
            ApiError: the prompt is over a limit. MarsError: a value that the engine does not take.
        """
        settings = self._settings(request, request.max_completion_tokens or request.max_tokens)
        if request.logprobs:
            settings = dataclasses.replace(settings, logprobs=request.top_logprobs or 0)
        self._check_characters(sum(len(message.text()) for message in request.messages), "messages")
        messages = [
            {
                "role": "system" if message.role == "developer" else message.role,
                "content": message.text(),
            }
            for message in request.messages
        ]
        ids = encode_chat(self.checkpoint, messages)
        return self._jobs(request, [ids], settings, "messages")

    def completion(self, request: CompletionRequest) -> list[Job]:
        """The jobs of a plain completion request, prompt by prompt; raises as `chat`."""
        settings = self._settings(request, request.max_tokens)
        if request.logprobs is not None:
            settings = dataclasses.replace(settings, logprobs=request.logprobs)
        every = []
        for prompt in request.prompts():
            if isinstance(prompt, str):
                self._check_characters(len(prompt), "prompt")
                every.append(encode_prompt(self.checkpoint, prompt))
            else:
                every.append(prompt)
        return self._jobs(request, every, settings, "prompt")

    def _settings(self, request: Sampling, new_tokens: int | None) -> DecodingSettings:
        limit = self.options.limits.new_tokens
        if new_tokens is not None and new_tokens > limit:
            raise ApiError(
                400,
                f"The request asks for {new_tokens} new tokens, and this server gives {limit} at most.",
                param="max_tokens",
                code="too_many_tokens",
            )
        temperature = self.options.temperature if request.temperature is None else request.temperature
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
        return DecodingSettings(
            max_new_tokens=new_tokens or limit,
            min_new_tokens=request.min_tokens or 0,
            temperature=temperature,
            top_k=max(request.top_k or 0, 0),
            # OpenAI takes a top_p of 0 for "the best token only".
            top_p=max(1.0 if request.top_p is None else request.top_p, 1e-6),
            min_p=request.min_p or 0.0,
            stop=tuple(stop),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            ignore_eos=bool(request.ignore_eos),
            repetition_penalty=request.repetition_penalty or 1.0,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
        )

    def _check_characters(self, characters: int, param: str) -> None:
        """Refuse before tokenizing what must be too long whatever its tokens are."""
        if characters > (self.prompt_limit + 1) * self._longest_token:
            self._refuse(f"more than {self.prompt_limit}", param)

    def _refuse(self, tokens: str, param: str) -> None:
        raise ApiError(
            400,
            f"The prompt has {tokens} tokens, and this server takes {self.prompt_limit} at most: shorten it.",
            param=param,
            code="context_length_exceeded",
        )

    def _jobs(
        self, request: Sampling, prompts: list[list[int]], settings: DecodingSettings, param: str
    ) -> list[Job]:
        chosen: dict[str, Any] = request.mars.chosen() if request.mars else {}
        jobs: list[Job] = []
        for ids in prompts:
            if len(ids) > self.prompt_limit:
                self._refuse(str(len(ids)), param)
            for _ in range(request.n or 1):
                # Samples of one request differ, and the same seed gives the same samples again.
                seed = None if request.seed is None else (request.seed + len(jobs)) % 2**63
                jobs.append(Job(ids, dataclasses.replace(settings, seed=seed), chosen))
        return jobs
