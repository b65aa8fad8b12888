"""One forward for many requests, each with a run of tokens: what the baselines' own decoders share.

The cache is the engine's (slot = position). What a token may see is one number: all slots below it. A causal
token sees the slots up to its own; a token of a bidirectional block sees the slots up to the block's end.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mars_lm.checkpoint import Checkpoint, end_token_ids
from mars_lm.decoding import GenerationResult
from mars_lm.decoding.executors import make_forward
from mars_lm.decoding.forward import Feed
from mars_lm.detokenizer import decode
from mars_lm.errors import MarsError
from mars_lm.settings import DecodingSettings

OnResult = Callable[[int, GenerationResult], None]


@dataclasses.dataclass
class Run:
    """The tokens that one row feeds, at consecutive positions.

    Args:
        row: the row of the cache.
        ids: their ids, T of them.
        start: the position of the first.
        sees: for each the slot before which it sees everything; None: causal, its own position + 1.
    """

    row: int
    ids: list[int]
    start: int
    sees: list[int] | None = None

    def limits(self) -> list[int]:
        """The slots that each token sees, as a count from slot 0."""
        return self.sees or list(range(self.start + 1, self.start + len(self.ids) + 1))


class RowsForward:
    """A model with a cache of `rows` rows and `slots` slots.

    Args:
        checkpoint: the model; rows, slots: the cache's size.
    """

    def __init__(self, checkpoint: Checkpoint, rows: int, slots: int) -> None:
        self.model = make_forward(checkpoint.model, rows, slots, int8=checkpoint.int8)

    def __call__(self, runs: Sequence[Run]) -> list[Tensor]:
        """The last hidden states [T, hidden] of each run; keys and values go to its positions."""
        runs = sorted(runs, key=lambda run: run.row)
        positions = np.array([run.start + i for run in runs for i in range(len(run.ids))])
        hidden = self.model.hidden(
            Feed(
                rows=np.array([run.row for run in runs]),
                width=np.array([len(run.ids) for run in runs]),
                input_ids=np.array([token for run in runs for token in run.ids]),
                position_ids=positions,
                slots=positions,
                sees_before=np.array([limit for run in runs for limit in run.limits()]),
                sees_from=positions,
            )
        )
        return list(hidden.split([len(run.ids) for run in runs]))

    def logits(self, hidden: Tensor, mask_token_id: int | None) -> Tensor:
        """float32 [M, V]; the mask token is never a candidate."""
        logits = self.model.logits(hidden)
        if mask_token_id is not None:
            logits[:, mask_token_id] = -torch.inf
        return logits


@dataclasses.dataclass
class Request:
    """One prompt under way.

    Attributes:
        number: which of the prompts it is; prompt, settings: as given.
        row: its row of the cache.
        budget: the most tokens that it may yield.
        state: what its decoder keeps.
    """

    number: int
    prompt: list[int]
    settings: DecodingSettings
    row: int
    budget: int
    result: GenerationResult
    started: float
    state: Any = None


class RowsDecoder:
    """Prompts in a fixed number of rows; a subclass says what a row feeds and what comes of it.

    Args:
        checkpoint: the model.
        max_rows: prompts decoded together.
    """

    spare_slots = 0  # slots behind a request's last token that its forwards may write

    def __init__(self, checkpoint: Checkpoint, *, max_rows: int = 16) -> None:
        self.checkpoint, self.max_rows = checkpoint, max_rows
        self.mask_token_id = checkpoint.mars.mask_token_id if checkpoint.mars else None
        self.ends = end_token_ids(checkpoint)
        self.context = int(getattr(checkpoint.model.config, "max_position_embeddings", None) or 2**20)

    def begin(self, request: Request) -> None:
        """Set up `request.state`."""
        raise NotImplementedError

    def feed(self, request: Request) -> Run:
        """What its row feeds into the next forward."""
        raise NotImplementedError

    def take(self, request: Request, hidden: Tensor, forward: RowsForward) -> list[int]:
        """The tokens that the forward committed, in order (maybe none); hidden is [T, hidden]."""
        raise NotImplementedError

    @torch.inference_mode()
    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        settings: Sequence[DecodingSettings],
        on_result: OnResult | None = None,
    ) -> list[GenerationResult]:
        """Decode prompts of any lengths together; a result each, in order.

        Raises:
            MarsError: a prompt that is empty or too long, or sampling, which baselines do not do.
        """
        if not prompts:
            return []
        for prompt, own in zip(prompts, settings, strict=True):
            self._check(prompt, own)
        longest = max(len(p) + s.max_new_tokens for p, s in zip(prompts, settings, strict=True))
        rows = min(self.max_rows, len(prompts))
        forward = RowsForward(self.checkpoint, rows, min(longest, self.context) + self.spare_slots)
        waiting = deque(enumerate(zip(prompts, settings, strict=True)))
        active: list[Request] = []
        results: dict[int, GenerationResult] = {}
        while waiting or active:
            free = sorted(set(range(rows)) - {request.row for request in active})
            while waiting and free:
                number, (prompt, own) = waiting.popleft()
                request = Request(
                    number=number,
                    prompt=list(prompt),
                    settings=own,
                    row=free.pop(0),
                    budget=min(own.max_new_tokens, self.context - len(prompt)),
                    result=GenerationResult(),
                    started=time.perf_counter(),
                )
                self.begin(request)
                active.append(request)
            active.sort(key=lambda request: request.row)
            hidden = forward([self.feed(request) for request in active])
            for request, states in zip(list(active), hidden, strict=True):
                request.result.forwards += 1
                self._commit(request, self.take(request, states, forward))
                if request.result.finish_reason is not None:
                    active.remove(request)
                    results[request.number] = request.result
                    if on_result is not None:
                        on_result(request.number, request.result)
        return [results[i] for i in range(len(prompts))]

    def _check(self, prompt: Sequence[int], settings: DecodingSettings) -> None:
        if not prompt:
            raise MarsError("The prompt is empty: give at least one token.")
        if len(prompt) >= self.context:
            raise MarsError(
                f"The prompt has {len(prompt)} tokens and the context holds {self.context}, the response "
                "included: shorten the prompt."
            )
        if settings.temperature > 0:
            raise MarsError("This baseline decodes greedily: temperature 0.")

    def _commit(self, request: Request, tokens: list[int]) -> None:
        """Add tokens up to the first end: an end token, a stop string, the budget, the context."""
        result, settings = request.result, request.settings
        if not result.token_ids:
            result.prefill_seconds = time.perf_counter() - request.started
        kept = 0
        for token in tokens:
            result.token_ids.append(token)
            kept += 1
            ended = token in settings.stop_token_ids or (token in self.ends and not settings.ignore_eos)
            ended = ended and len(result.token_ids) >= settings.min_new_tokens
            if ended or (settings.stop and self._stops(result.token_ids, settings.stop)):
                result.finish_reason = "stop"
            elif len(result.token_ids) >= request.budget:
                result.finish_reason = "length"
            if result.finish_reason is not None:
                break
        result.accepted_lengths.append(kept)
        if result.finish_reason is not None:
            result.decode_seconds = time.perf_counter() - request.started - result.prefill_seconds

    def _stops(self, token_ids: list[int], stops: Sequence[str]) -> bool:
        # A character has at most 4 bytes, and a token at least one of them, special tokens left aside.
        tail = token_ids[-4 * max(map(len, stops)) - 8 :]
        text = decode(self.checkpoint.tokenizer, tail)
        return any(stop in text for stop in stops)
