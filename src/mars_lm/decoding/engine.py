"""add · step · stream: requests decoded together, each row at its own pace (SPEC 3 to 5)."""

from __future__ import annotations

import dataclasses
import itertools
import os
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from mars_lm.decoding.acceptance import RULE_CODE
from mars_lm.decoding.candidates import Processor
from mars_lm.decoding.executors import make_forward
from mars_lm.decoding.text import TextStream
from mars_lm.decoding.width import AdaptiveWidth, draft_kind, forward_cost
from mars_lm.decoding.window import Commit, Decoder, Rows, TokenLogprob, lay_out
from mars_lm.errors import MarsError
from mars_lm.prompts import end_token_ids
from mars_lm.settings import DecodingSettings, check_block_size

if TYPE_CHECKING:
    from mars_lm.checkpoint import Checkpoint

FinishReason = Literal["stop", "length", "cancelled", "error"]

_NOT_NUMBERS = "The model's logits were not numbers (NaN), so no token could be chosen."
_NONE_LEFT = (
    "No token was left to choose: the request's bad words, minimum length and logits processors rule out "
    "every token of the vocabulary (or a processor gave no numbers); loosen one of them."
)

# A shared beginning of fewer tokens is not worth copying, or a step's waiting.
WORTH_COPYING, WORTH_WAITING = 16, 64

NEVER = 2**40  # tokens

# What `Engine.update` changes of a request.
LIVE = ("tau", "rule", "block_size", "exact", "recovery", "adaptive")


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What one forward gave one request: its new tokens, and why it ended if it did.

    `text` is what is safe to show of the answer: no half of a character, no part of a stop string. It may lag
    behind the tokens; the last output brings the rest. `logprobs` has an entry for each new token, if asked.
    """

    request_id: int
    new_token_ids: list[int]
    finish_reason: FinishReason | None
    text: str = ""
    logprobs: list[TokenLogprob] | None = None


@dataclasses.dataclass
class GenerationResult:
    """A request's tokens and how they came about.

    Attributes:
        token_ids: the response, an end token or the tokens of a stop string included.
        text: the outputs' texts joined: without stop string, stop token and special tokens.
        logprobs: an entry for each token, if asked.
        finish_reason: "stop" (an end token or a stop string), "length" (the budget or the context's end),
            "cancelled", "error" (the model's logits were no numbers, or the request's own bans and processors
            left no token; `error` says which), or None while it runs.
        forwards: forwards that yielded tokens, the prefill among them (a prompt prefilled in chunks counts
            once): `len(token_ids) / forwards` is the SPEC's tokens per forward.
        accepted_lengths: tokens that each forward committed.
        rejected_drafts: draft tokens that AR did not confirm (exact mode).
        masks: mask tokens that its forwards held, of all groups together.
        shared_prompt_tokens: tokens of the prompt that another request had prefilled.
        queued_seconds, prefill_seconds, decode_seconds: until it got a row, from there to the first token,
            and from there to the end.
    """

    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    forwards: int = 0
    accepted_lengths: list[int] = dataclasses.field(default_factory=list)
    rejected_drafts: int = 0
    masks: int = 0
    shared_prompt_tokens: int = 0
    queued_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    error: str | None = None


@dataclasses.dataclass
class _Request:
    id: int
    prompt_ids: np.ndarray
    settings: DecodingSettings
    result: GenerationResult
    text: TextStream
    seed: int
    processors: tuple[Processor, ...]
    added: float
    started: float = 0.0
    first_token: float = 0.0


class Engine:
    """Decodes requests in up to `max_rows` rows at once; a row that ends is taken by the next request.

    Args:
        checkpoint: the model; one without MARS settings decodes in one-token mode only.
        max_rows: requests decoded together.
        max_length: longest prompt and response together; None: the model's context, or as much of it as half
            of the free memory holds.
        prefill_chunk: most prompt tokens in one forward, so that a long prompt does not stall other rows.
        kernels: what runs the model: "auto", "native", "torch" or "compile" (`mars_lm.decoding.executors`).
        invariant: a token's logits have the same bits whatever else a forward holds, so exact mode says what
            one-token mode says in bfloat16 too. The C kernels' always have; elsewhere it costs padding.
        share_prefixes: take the beginning of a prompt from a row that has prefilled the same one.
        commit_block: for comparison (SPEC 5). None: an entry stays in the cache as soon as it is right.
            k: the paper's block-level commit, in which rows fill blocks of k tokens together against a
            frozen cache, feed a block's tokens again in every forward, and wait for each other at its end.
            0: no cache, every forward feeds the whole text.
    Attributes:
        max_length: as it turned out.
    Raises:
        MarsError: a size is out of range, or no such kernels.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        max_rows: int = 16,
        max_length: int | None = None,
        prefill_chunk: int = 512,
        kernels: str = "auto",
        invariant: bool = False,
        share_prefixes: bool = True,
        commit_block: int | None = None,
    ) -> None:
        _check_sizes(max_rows, max_length, prefill_chunk, commit_block)
        model, mars = checkpoint.model, checkpoint.mars
        self.block_size = mars.block_size if mars else 1
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        context = int(getattr(model.config, "max_position_embeddings", None) or 2**20)
        # Room for the masks behind a row's last tokens: a group behind every prefix of the longest draft.
        self._scratch = scratch = self.block_size * (self.block_size - 1)
        if max_length is None:
            max_length = min(context, max(_affordable_slots(model) // max_rows - scratch, 2))
        self.max_length = min(max_length, context)
        self.max_rows = max_rows
        self._commit_block = commit_block
        self._prefill_chunk = NEVER if commit_block == 0 else prefill_chunk
        self._share_prefixes = share_prefixes and commit_block != 0
        self._mask_token_id = mars.mask_token_id if mars else None
        ends = np.array(sorted(end_token_ids(checkpoint)), dtype=np.int64)
        self._ends = ends[ends < self.vocabulary]
        self._tokenizer = checkpoint.tokenizer
        self._model = make_forward(
            model, max_rows, self.max_length + scratch, kernels, invariant=invariant, int8=checkpoint.int8
        )
        self._width: AdaptiveWidth | None = None
        if self._mask_token_id is not None and self.block_size > 1:
            cost = forward_cost(model, self._model, self.max_length)
            self._width = AdaptiveWidth(self.block_size, cost)
        self._decoder = Decoder(self._model, self._mask_token_id)
        self._state = Rows(max_rows, self.max_length, self.vocabulary, self.block_size - 1)
        self._row_of: list[_Request | None] = [None] * max_rows
        self._waiting: deque[_Request] = deque()
        self._requests: dict[int, _Request] = {}
        self._next_id = 0

    def add(
        self,
        prompt_ids: Sequence[int],
        settings: DecodingSettings,
        *,
        logits_processors: Sequence[Processor] = (),
    ) -> int:
        """Queue a request.

        Args:
            prompt_ids: the prompt's token ids.
            logits_processors: transformers' `LogitsProcessor`s, or any (ids int64 [1, n], scores float32
                [1, V]) -> scores [1, V], applied in order behind penalties and bans and before the
                temperature. They are called for guesses too, so they must depend on their arguments alone;
                what one raises comes out of `step`.
        Returns:
            The request's id.
        Raises:
            MarsError: it could never run: an empty or too long prompt, ids outside the vocabulary, or
                settings that the checkpoint was not trained for.
        """
        ids = np.asarray(prompt_ids, dtype=np.int64).reshape(-1)
        self._check(ids, settings)
        request = _Request(
            self._next_id,
            ids,
            settings,
            GenerationResult(logprobs=None if settings.logprobs is None else []),
            text=TextStream(self._tokenizer, settings.stop),
            seed=secrets.randbits(63) if settings.seed is None else settings.seed,
            processors=tuple(logits_processors),
            added=time.perf_counter(),
        )
        self._next_id += 1
        self._requests[request.id] = request
        self._waiting.append(request)
        return request.id

    @property
    def has_work(self) -> bool:
        """Whether any request runs or waits."""
        return bool(self._waiting) or bool(self._state.active.any())

    @property
    def running(self) -> int:
        """Rows at work."""
        return int(self._state.active.sum())

    @property
    def waiting(self) -> int:
        """Requests that wait for a row."""
        return len(self._waiting)

    @property
    def cache_use(self) -> float:
        """Share of the cache's slots in use, 0 to 1."""
        return float(self._state.cached[self._state.active].sum()) / (self.max_rows * self.max_length)

    def update(self, request_id: int, **changes: Any) -> None:
        """Change how a request is decoded from its next forward on; one that has ended stays as it is.

        Args:
            changes: any of tau, rule, block_size, exact, recovery, adaptive.
        Raises:
            MarsError: no such request, another setting, or a value that `add` would refuse.
        """
        request = self._find(request_id)
        fixed = sorted(set(changes) - set(LIVE))
        if fixed:
            raise MarsError(
                f"A request's {', '.join(fixed)} can't change while it runs; {', '.join(LIVE)} can."
            )
        settings = dataclasses.replace(request.settings, **changes)
        self._check_mode(settings)
        request.settings = settings
        if request in self._row_of:
            row = self._row_of.index(request)
            self._set_mode(row, settings)
            if not settings.exact:
                self._state.drafted[row] = self._state.offered[row] = 0  # nobody would verify it
                self._state.sure[row] = np.nan

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """One forward for all rows; what it gave, for each request that got tokens or ended."""
        self._admit()
        window = lay_out(self._state, self._mask_token_id or 0, self._prefill_chunk, self._width)
        if not len(window.rows):
            return []
        begun = time.perf_counter()
        commit = self._decoder.step(self._state, window)
        if self._width is not None:
            self._width.cost.learn(len(window.input_ids), time.perf_counter() - begun)
            self._width.learn(self._state.kind[commit.rows], commit.offered, commit.held, commit.sure)
        outputs = self._hand_out(commit)
        if self._commit_block is not None:
            self._hold_back()
        return outputs

    def _hold_back(self) -> None:
        """Let the cache grow by whole blocks of all rows together, or not at all."""
        state, rows = self._state, np.flatnonzero(self._state.active)
        block = self._commit_block
        if not block:
            state.cached[rows] = 0
            return
        state.cached[rows] = np.minimum(state.cached[rows], state.fence[rows] - block)
        if (state.length[rows] >= state.fence[rows]).all():
            state.fence[rows] += block

    def stream(self) -> Iterator[StepOutput]:
        """Step until nothing is left, and give each output as it comes."""
        while self.has_work:
            yield from self.step()

    @torch.inference_mode()
    def cancel(self, request_id: int) -> None:
        """End a request now; its result keeps the tokens so far. One that has ended stays as it is."""
        request = self._find(request_id)
        if request.result.finish_reason is not None:
            return
        if request in self._row_of:
            self._leave(self._row_of.index(request), "cancelled")
            if self._commit_block is not None:
                self._hold_back()  # it may have been the last row that the others waited for
        else:
            self._waiting.remove(request)
            request.result.queued_seconds = time.perf_counter() - request.added
            request.result.finish_reason = "cancelled"

    def result(self, request_id: int) -> GenerationResult:
        """A request's tokens and numbers (so far, if it still runs). Once it has ended, it is forgotten.

        Raises:
            MarsError: no such request, or its result was taken before.
        """
        request = self._find(request_id)
        if request.result.finish_reason is not None:
            del self._requests[request_id]
        return request.result

    def _find(self, request_id: int) -> _Request:
        request = self._requests.get(request_id)
        if request is None:
            raise MarsError(
                f"There is no request {request_id!r}: it was never added, or its result was taken."
            )
        return request

    def _check(self, ids: np.ndarray, settings: DecodingSettings) -> None:
        if not ids.size:
            raise MarsError("The prompt is empty: give at least one token.")
        if ids.min() < 0 or ids.max() >= self.vocabulary:
            wrong = int(ids.min() if ids.min() < 0 else ids.max())
            raise MarsError(
                f"The prompt holds token id {wrong}, and the model's ids go from 0 to {self.vocabulary - 1}: "
                "encode it with the model's own tokenizer."
            )
        if ids.size >= self.max_length:
            raise MarsError(
                f"The prompt has {ids.size} tokens and the context holds {self.max_length}, the response "
                "included: shorten the prompt."
            )
        named = (*settings.stop_token_ids, *itertools.chain(*settings.bad_words_ids))
        if named and max(named) >= self.vocabulary:
            raise MarsError(
                f"stop_token_ids or bad_words_ids hold token id {max(named)}, and the model's ids go from "
                f"0 to {self.vocabulary - 1}."
            )
        self._check_mode(settings)

    def _check_mode(self, settings: DecodingSettings) -> None:
        if settings.one_token:
            return
        if self._mask_token_id is None:
            raise MarsError(
                "This model was not trained for MARS decoding (its config.json has no 'mars' key): decode it "
                "with tau 1, or use a MARS checkpoint."
            )
        check_block_size(settings.block_size, self.block_size)

    def _admit(self) -> None:
        """Give free rows to the requests that have waited longest."""
        state = self._state
        while self._waiting and not state.active.all():
            request = self._waiting[0]
            source, shared = self._shared_prefix(request.prompt_ids)
            if source is None:
                return  # its prefix is being prefilled in another row
            self._waiting.popleft()
            row = source if shared and not state.active[source] else int(state.active.argmin())
            if shared and row != source:
                self._model.cache.copy_prefix(source, row, shared)
            request.result.shared_prompt_tokens = shared
            settings, length = request.settings, request.prompt_ids.size
            self._row_of[row] = request
            state.active[row] = True
            state.tokens[row, :length] = request.prompt_ids
            state.prompt[row] = state.length[row] = length
            state.cached[row], state.drafted[row], state.offered[row] = shared, 0, 0
            state.sure[row] = np.nan
            state.limit[row] = min(length + settings.max_new_tokens, self.max_length)
            state.fence[row] = length + (self._commit_block or NEVER)
            self._set_mode(row, settings)
            state.wishes.set(
                row,
                settings,
                prompt=length,
                seed=request.seed,
                end_ids=self._ends,
                processors=request.processors,
            )
            request.started = time.perf_counter()
            request.result.queued_seconds = request.started - request.added

    def _shared_prefix(self, ids: np.ndarray) -> tuple[int | None, int]:
        """The row whose cache holds the longest beginning of a prompt, and how many tokens of it.

        Rows that have ended keep their entries until another request takes them. (None, 0): a row is just
        prefilling a much longer beginning, which is worth waiting for.
        """
        state = self._state
        if not self._share_prefixes:
            return 0, 0
        head = ids[:-1]  # the last token is fed in any case: its logits are needed
        same = state.tokens[:, : head.size] == head
        common = np.logical_and.accumulate(same, axis=1).sum(axis=1)
        there = np.minimum(common, state.cached)
        coming = np.where(state.active, np.minimum(common, state.prompt), 0)
        best = int(there.argmax())
        shared = int(there[best])
        if coming.max() - shared >= WORTH_WAITING:
            return None, 0
        return best, shared if shared >= WORTH_COPYING else 0

    def _set_mode(self, row: int, settings: DecodingSettings) -> None:
        state = self._state
        state.masks[row] = 0 if settings.one_token else (settings.block_size or self.block_size) - 1
        state.exact[row], state.recovery[row] = settings.exact, settings.exact and settings.recovery
        state.adaptive[row] = settings.adapts and not settings.one_token
        state.kind[row] = draft_kind(settings)
        state.rule[row], state.tau[row] = RULE_CODE[settings.rule], settings.tau

    def _hand_out(self, commit: Commit) -> list[StepOutput]:
        """Pass new tokens on to their requests, and let go of the rows that ended."""
        outputs = []
        counts, ids = commit.count.tolist(), commit.tokens.tolist()
        failed = commit.broken | commit.stuck
        reasons = np.where(failed, "error", np.where(commit.stopped, "stop", "length")).tolist()
        over = (failed | commit.stopped | commit.full).tolist()
        rejected, masks = commit.rejected.tolist(), commit.masks.tolist()
        for i, row in enumerate(commit.rows.tolist()):
            request = self._row_of[row]
            assert request is not None
            result, new = request.result, ids[i][: counts[i]]
            reason = reasons[i] if over[i] else None
            # The text of an end token is no part of the answer.
            plain = new[:-1] if reason == "stop" else new
            early = request.settings.min_new_tokens - len(result.token_ids) - 1
            text, stop = request.text.push(plain, can_stop_from=early)
            if stop is not None:
                new, reason = new[:stop], "stop"
            elif reason is not None:
                text += request.text.finish()
            said = commit.logprobs.get(i)
            if said is not None and result.logprobs is not None:
                said = said[: len(new)]
                result.logprobs += said
            if not result.forwards:
                request.first_token = time.perf_counter()
            result.forwards += 1
            result.token_ids += new
            result.text += text
            result.accepted_lengths.append(len(new))
            result.rejected_drafts += rejected[i]
            result.masks += masks[i]
            outputs.append(StepOutput(request.id, new, reason, text, said))
            if reason == "error":
                result.error = _NONE_LEFT if commit.stuck[i] else _NOT_NUMBERS
            if reason is not None:
                self._leave(row, reason)
        return outputs

    def _leave(self, row: int, reason: FinishReason) -> None:
        request = self._row_of[row]
        assert request is not None
        now = time.perf_counter()
        first_token = request.first_token or now
        request.result.prefill_seconds = first_token - request.started
        request.result.decode_seconds = now - first_token
        request.result.finish_reason = reason
        self._row_of[row] = None
        self._state.active[row] = False
        if reason == "error" or not request.result.forwards:  # its entries may be no numbers, or nobody knows
            self._model.cache.wipe(row, int(self._state.length[row]) + self._scratch)
            self._state.cached[row] = 0


def generate(
    checkpoint: Checkpoint,
    prompts: Sequence[Sequence[int]],
    settings: DecodingSettings | Sequence[DecodingSettings],
    *,
    max_rows: int = 16,
) -> list[GenerationResult]:
    """Decode prompts of any lengths together.

    Args:
        prompts: token ids of each.
        settings: for all, or one for each.
        max_rows: prompts decoded at once.
    Returns:
        A result for each prompt, in order.
    Raises:
        MarsError: as `Engine.add`.
    """
    every = [settings] * len(prompts) if isinstance(settings, DecodingSettings) else list(settings)
    if len(every) != len(prompts):
        raise MarsError(
            f"There are {len(prompts)} prompts and {len(every)} settings: give one for all, or one each."
        )
    if not prompts:
        return []
    engine = Engine(checkpoint, max_rows=min(max_rows, len(prompts)))
    requests = [engine.add(prompt, own) for prompt, own in zip(prompts, every, strict=True)]
    for _ in engine.stream():
        pass
    return [engine.result(request) for request in requests]


def _check_sizes(max_rows: int, max_length: int | None, prefill_chunk: int, commit_block: int | None) -> None:
    """An engine's sizes; what is too small would leave requests waiting for ever.

    Raises:
        MarsError: one is out of range.
    """
    for name, value, least, expected in (
        ("max_rows", max_rows, 1, "a whole number of 1 or more"),
        ("max_length", max_length, 2, "2 tokens or more (a prompt's and its answer's), or None"),
        ("prefill_chunk", prefill_chunk, 1, "a whole number of 1 or more"),
        ("commit_block", commit_block, 0, "0 (no cache), a block's tokens, or None"),
    ):
        may_be_none = name in ("max_length", "commit_block")
        if (value is None and may_be_none) or (isinstance(value, int) and value >= least):
            continue
        raise MarsError(f"{name} is {value!r}, expected {expected}.")


def _affordable_slots(model: Any) -> int:
    """Cache slots that half of the device's free memory holds."""
    config, device = model.config, next(model.parameters()).device
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # The CPU kernels keep float32 entries, whatever the weights are (with tiles half as much).
    entry = 4 if device.type == "cpu" else model.dtype.itemsize
    slot = 2 * config.num_hidden_layers * heads * head_dim * entry
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    elif hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        free = 4 * 2**30
    return int(free // 2 // slot)
