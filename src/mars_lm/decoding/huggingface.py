"""`model.generate(..., custom_generate=mars_lm.generate)`: transformers prepares, the engine decodes.

transformers turns the arguments of `generate` into a batch, logits processors and stopping criteria, and
hands them over. Rows go to the engine without their padding. Processors run inside it, along each row's
accepted run. Rows advance each at its own pace; stopping criteria and streamers expect a batch that grows by
one column a step. So they get its columns one by one, as soon as every row has reached them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode

from mars_lm.architectures import check_supported
from mars_lm.decoding.engine import Engine, GenerationResult
from mars_lm.errors import MarsError
from mars_lm.settings import DecodingSettings, MarsSettings, Rule, decoding_settings

# Arguments of a model's forward that generate prepares: the engine makes its own of them.
_PREPARED = {"attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep"}
_CACHES = {"cache", "past_key_values"}
# Of transformers' own processors, those that read a batch by the number of its rows; all others treat each
# row alike. (A user's own processor may do either.)
_BY_ROW_NUMBER = (
    "RepetitionPenaltyLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
)
_REFUSED_PROCESSORS = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale, which runs the model a second time",
    "SynthIDTextWatermarkLogitsProcessor": "SynthID watermarks, which count the calls they get",
}


@dataclasses.dataclass
class MarsGenerateOutput(GenerateDecoderOnlyOutput):
    """transformers' output, and how it came about.

    Attributes:
        mars: the engine's result of each row: forwards, accepted lengths, rejected drafts, times. A row that
            a stopping criterion ended may have run ahead of it.
    """

    mars: list[GenerationResult] | None = None


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    *,
    tau: float | None = None,
    rule: Rule | None = None,
    block_size: int | None = None,
    exact: bool | None = None,
    recovery: bool | None = None,
    adaptive: bool | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    seed: int | None = None,
    max_rows: int | None = None,
    kernels: str = "auto",
    invariant: bool = False,
    tokenizer: Any = None,
    assistant_model: Any = None,
    assistant_tokenizer: Any = None,
    **model_kwargs: Any,
) -> MarsGenerateOutput | Tensor:
    """Decode a batch by MARS; for `model.generate(input_ids, ..., custom_generate=mars_lm.generate)`.

    The named arguments are given to `model.generate` like its own. What is left out is as the checkpoint's
    `config.json` says, and exact mode where it says nothing. A model without MARS settings decodes in
    one-token mode.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer,
            tokenizer, assistant_model, assistant_tokenizer, **model_kwargs: from transformers.
        tau, rule, block_size, exact, recovery, adaptive, presence_penalty, frequency_penalty: fields of
            `DecodingSettings`.
        seed: of the first row; row r draws with seed + r. None: from torch's generator.
        max_rows: rows decoded at once; None: all.
        kernels, invariant: what runs the model, and whether to the last bit, as in `Engine`.
    Returns:
        int64 [rows, length], padded on the right; with `return_dict_in_generate` a `MarsGenerateOutput`.
    Raises:
        MarsError (a ValueError): an option that MARS decoding does not know, a batch that is not padded on
            the left, or a row that failed.
    """
    _refuse_what_is_not_supported(
        model, generation_config, model_kwargs, synced_gpus=synced_gpus, assistant_model=assistant_model
    )
    rows, width = input_ids.shape
    padding = _padding(input_ids, model_kwargs)
    named = {
        "tau": tau,
        "rule": rule,
        "block_size": block_size,
        "exact": exact,
        "recovery": recovery,
        "adaptive": adaptive,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
    }
    keep = bool(generation_config.return_dict_in_generate)
    recording = _Recording(
        scores=keep and bool(generation_config.output_scores),
        logits=keep and bool(generation_config.output_logits),
    )
    records = recording.scores or recording.logits
    sampled = bool(generation_config.do_sample)
    translated = _translate(logits_processor, padding, width, sampled=sampled, native=not records)
    budget, end_ids, criteria = _split_criteria(stopping_criteria, width)
    values = {
        "temperature": 1.0 if sampled else 0.0,
        **{name: value for name, value in named.items() if value is not None},
        **translated.settings,
        "max_new_tokens": budget,
        "ignore_eos": True,  # the ids that end a text are those of the generation config
    }
    values["min_new_tokens"] = min(translated.settings.get("min_new_tokens", 0), budget)
    mars = MarsSettings.from_config(model.config)
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    values["stop_token_ids"] = tuple(sorted(i for i in end_ids or () if 0 <= i < vocabulary))
    settings = decoding_settings(mars, values)

    longest = width - int(padding.min())
    engine = Engine(
        cast(Any, _Loaded(model, mars)),
        max_rows=min(max_rows or rows, rows),
        max_length=longest + budget,
        prefill_chunk=generation_config.prefill_chunk_size or 512,
        kernels=kernels,
        invariant=invariant,
    )
    seeds = _seeds(rows, seed) if sampled else [0] * rows
    running = []
    for row in range(rows):
        ids = input_ids[row : row + 1]
        processors = []
        if translated.processors or records:
            processors = [_RowProcessors(translated.processors, row, rows, ids[:, : padding[row]], recording)]
        request = engine.add(
            ids[0, padding[row] :].tolist(),
            dataclasses.replace(settings, seed=seeds[row]),
            logits_processors=processors,
        )
        running.append(_Row(request, processors[0] if processors else None))

    columns = _Columns(engine, running, input_ids, criteria, streamer, generation_config, budget)
    columns.run(pads_finished=end_ids is not None)
    if not keep:
        return columns.ids
    return MarsGenerateOutput(
        sequences=cast(torch.LongTensor, columns.ids),
        scores=cast(Any, tuple(columns.scores)) if recording.scores else None,
        logits=cast(Any, tuple(columns.logits)) if recording.logits else None,
        mars=columns.results,
    )


@dataclasses.dataclass
class _Loaded:
    """What the engine asks of a checkpoint; texts are the caller's business, so its tokenizer is a blank."""

    model: Any
    mars: MarsSettings | None
    tokenizer: Any = dataclasses.field(default_factory=lambda: _NoText())
    int8: bool = False


class _NoText:
    def decode(self, *_: Any, **__: Any) -> str:
        return ""


def _refuse_what_is_not_supported(
    model: Any,
    generation_config: Any,
    model_kwargs: Mapping[str, Any],
    *,
    synced_gpus: bool,
    assistant_model: Any,
) -> None:
    mode = generation_config.get_generation_mode(assistant_model)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise MarsError(
            f"MARS decoding is greedy or samples, and the arguments ask for {mode.value.replace('_', ' ')}: "
            "leave them out, or let transformers decode."
        )
    if model.config.is_encoder_decoder:
        raise MarsError("MARS decoding is for decoder-only models, and this one has an encoder.")
    check_supported(model.config)
    if synced_gpus:
        raise MarsError("MARS decoding does not run over several synchronised GPUs: set synced_gpus=False.")
    if generation_config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(generation_config, name):
                raise MarsError(f"MARS decoding keeps no attentions and no hidden states: leave {name} out.")
    if generation_config.cache_implementation is not None:
        raise MarsError("MARS decoding has a cache of its own: leave cache_implementation out.")
    for name, value in model_kwargs.items():
        if name in _PREPARED or value is None:
            continue
        if name not in _CACHES:
            raise MarsError(f"MARS decoding reads token ids alone: leave {name} out.")
        if value.get_seq_length():
            raise MarsError(f"MARS decoding can't go on from a filled cache: leave {name} out.")


def _padding(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> np.ndarray:
    """int64 [rows]: how many pad tokens stand before each prompt."""
    rows, width = input_ids.shape
    mask = model_kwargs.get("attention_mask")
    real = np.ones((rows, width), dtype=bool) if mask is None else mask.bool().cpu().numpy()
    if not real.any(axis=1).all():
        raise MarsError("A prompt of the batch is empty: its attention_mask is 0 everywhere.")
    padding = real.argmax(axis=1)
    place = np.arange(width) - padding[:, None]
    if (real != (place >= 0)).any():
        raise MarsError(
            "attention_mask is 0 behind or inside a prompt: pad on the left (padding_side='left'), and "
            "nowhere else."
        )
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        given = positions.cpu().numpy()
        if given.shape[-2:] != real.shape or (given != place)[..., real].any():
            raise MarsError(
                "MARS decoding counts positions from each prompt's start: leave position_ids out."
            )
    return padding


@dataclasses.dataclass
class _Translated:
    settings: dict[str, Any]  # of `DecodingSettings`: what the engine does itself, for all rows at once
    processors: list[Any]  # all else, called row by row


def _translate(
    processors: Sequence[Any], padding: np.ndarray, width: int, *, sampled: bool, native: bool
) -> _Translated:
    """Split transformers' list: its beginning and its end may be the engine's own.

    The engine penalises and bans before it calls processors, and warps behind them, if it samples. So what it
    can take over is a beginning of the list, and an end of it in the engine's order.

    Args:
        native: False leaves all to the processors.
    """
    for processor in processors:
        why = _REFUSED_PROCESSORS.get(type(processor).__name__)
        if why:
            raise MarsError(f"MARS decoding can't apply {why}: leave it out.")
    rest = list(processors)
    settings: dict[str, Any] = {}
    while native and rest and (known := _known_first(rest[0], padding, width)):
        if known.keys() & settings.keys():  # two of a kind: the engine has one
            break
        settings |= known
        del rest[0]
    behind: list[str] = []
    while native and sampled and rest and (known := _known_last(rest[-1])):
        (name,) = known
        if behind and _WARPERS.index(name) >= _WARPERS.index(behind[-1]):
            break
        behind.append(name)
        settings |= known
        del rest[-1]
    return _Translated(settings, rest)


def _known_first(processor: Any, padding: np.ndarray, width: int) -> dict[str, Any]:
    """The setting that does what a processor does at the beginning of the list; empty if none does."""
    if type(processor) is RepetitionPenaltyLogitsProcessor:
        skipped = processor.prompt_ignore_length
        if skipped is None:
            fits = not padding.any()
        else:
            fits = isinstance(skipped, Tensor) and skipped.tolist() == padding.tolist()
        return {"repetition_penalty": processor.penalty} if fits else {}
    if type(processor) is NoBadWordsLogitsProcessor:
        words = tuple(tuple(word) for word in processor.sequence_bias)
        # transformers overlooks a word that is longer than all the text so far.
        shortest = width - int(padding.max())
        return {"bad_words_ids": words} if all(len(word) <= shortest for word in words) else {}
    if type(processor) is MinNewTokensLengthLogitsProcessor and processor.prompt_length_to_skip == width:
        return {"min_new_tokens": processor.min_new_tokens}
    return {}


_WARPERS = ("temperature", "top_k", "top_p", "min_p")  # in the order in which the engine applies them


def _known_last(processor: Any) -> dict[str, Any]:
    """The setting that does what a warper does; empty if none does."""
    if type(processor) is TemperatureLogitsWarper:
        return {"temperature": float(processor.temperature)}
    if getattr(processor, "filter_value", None) != -float("inf"):
        return {}
    if type(processor) is TopKLogitsWarper:  # it has taken min_tokens_to_keep into top_k already
        return {"top_k": int(processor.top_k)}
    if getattr(processor, "min_tokens_to_keep", None) != 1:
        return {}
    if type(processor) is TopPLogitsWarper and processor.top_p > 0:
        return {"top_p": float(processor.top_p)}
    if type(processor) is MinPLogitsWarper:
        return {"min_p": float(processor.min_p)}
    return {}


def _split_criteria(criteria: Sequence[Any], width: int) -> tuple[int, set[int] | None, StoppingCriteriaList]:
    """The budget of new tokens, the ids that end a text (None: no such criterion), and the other criteria."""
    budgets, end_ids, rest = [], None, StoppingCriteriaList()
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            budgets.append(criterion.max_length - width)
        elif type(criterion) is EosTokenCriteria:
            end_ids = (end_ids or set()) | {int(i) for i in criterion.eos_token_id.reshape(-1).tolist()}
        else:
            rest.append(criterion)
    if not budgets:
        raise MarsError("The answer has no longest length: give max_new_tokens.")
    return max(1, min(budgets)), end_ids, rest


def _seeds(rows: int, seed: int | None) -> list[int]:
    if seed is None:
        return torch.randint(2**62, (rows,)).tolist()
    DecodingSettings(seed=seed)  # refused there if it is none
    return [(seed + row) % 2**63 for row in range(rows)]


@dataclasses.dataclass
class _Recording:
    """What the caller wants kept of every token: processed scores, raw logits."""

    scores: bool
    logits: bool


class _RowProcessors:
    """A batch's processors for one of its rows.

    They get what they would get from transformers: the row with its padding. Those that may read a batch by
    row number get as many copies of the row as the batch has rows, and the answer for the row's own is taken.
    """

    def __init__(
        self, processors: Sequence[Any], row: int, rows: int, padding: Tensor, recording: _Recording
    ) -> None:
        self._processors = [
            (processor, rows > 1 and _may_read_row_numbers(processor)) for processor in processors
        ]
        self._row, self._rows, self._padding, self._recording = row, rows, padding, recording
        # By the length of the ids before the token. A position may be tried several times before its token
        # is settled; the last time counts.
        self.scores: dict[int, Tensor] = {}
        self.logits: dict[int, Tensor] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        home, device = scores.device, self._padding.device
        ids = torch.cat([self._padding, input_ids.to(device)], dim=1)
        scores = scores.to(device)
        if self._recording.logits:
            self.logits[ids.shape[1]] = scores[0].clone()
        for processor, by_row_number in self._processors:
            if by_row_number:
                every = processor(ids.repeat(self._rows, 1), scores.repeat(self._rows, 1))
                scores = every[self._row : self._row + 1]
            else:
                scores = processor(ids, scores)
        if self._recording.scores:
            self.scores[ids.shape[1]] = scores[0].clone()
        return scores.to(home)


def _may_read_row_numbers(processor: Any) -> bool:
    kind = type(processor)
    return kind.__module__ != TemperatureLogitsWarper.__module__ or kind.__name__ in _BY_ROW_NUMBER


@dataclasses.dataclass
class _Row:
    request: int
    processors: _RowProcessors | None
    tokens: list[int] = dataclasses.field(default_factory=list)
    ended: bool = False


class _Columns:
    """The batch as transformers grows it, column by column, from rows that advance each at its own pace.

    Attributes:
        ids: int64 [rows, prompt + columns so far].
        scores, logits: what was kept of each column: float32 [rows, V], zeros in rows that had ended.
        results: the engine's, once all is over.
    """

    def __init__(
        self,
        engine: Engine,
        rows: list[_Row],
        input_ids: Tensor,
        criteria: StoppingCriteriaList,
        streamer: Any,
        generation_config: Any,
        budget: int,
    ) -> None:
        self._engine, self._rows, self._criteria, self._streamer = engine, rows, criteria, streamer
        self._by_request = {row.request: row for row in rows}
        self._prompt, self._budget = input_ids.shape[1], budget
        pad = generation_config._pad_token_tensor
        self._pad = 0 if pad is None else int(pad)
        self._all = torch.cat([input_ids, input_ids.new_full((len(rows), budget), self._pad)], dim=1)
        self._count = 0
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []
        self.results: list[GenerationResult] = []

    @property
    def ids(self) -> Tensor:
        return self._all[:, : self._prompt + self._count]

    def run(self, *, pads_finished: bool) -> None:
        """Decode until every row is finished.

        Args:
            pads_finished: a row that a criterion has ended is padded from there on. (transformers does so
                where there are end tokens; elsewhere the row goes on until all have ended.)
        """
        finished = np.zeros(len(self._rows), dtype=bool)
        while self._count < self._budget and not finished.all():
            column = self._count
            while any(not row.ended and len(row.tokens) <= column for row in self._rows):
                self._step()
            tokens = [row.tokens[column] if column < len(row.tokens) else self._pad for row in self._rows]
            self._all[:, self._prompt + column] = torch.tensor(tokens, device=self._all.device)
            self._keep(column)
            self._count += 1
            if self._streamer is not None:
                self._streamer.put(torch.tensor(tokens))
            finished |= [row.ended and column >= len(row.tokens) - 1 for row in self._rows]
            if self._criteria:
                over = self._criteria(self.ids, tuple(self.scores) or None)
                for number in np.flatnonzero(over.cpu().numpy() & ~finished).tolist():
                    finished[number] = True
                    if pads_finished:
                        self._end(self._rows[number])
        for row in self._rows:
            self._end(row)
        self.results = [self._engine.result(row.request) for row in self._rows]
        if self._streamer is not None:
            self._streamer.end()

    def _keep(self, column: int) -> None:
        """Collect what the rows' processors have recorded of a column."""
        for what in ("scores", "logits"):
            kept = [getattr(row.processors, what, None) or {} for row in self._rows]
            values = [values.pop(self._prompt + column, None) for values in kept]
            some = next((value for value in values if value is not None), None)
            if some is not None:
                nothing = torch.zeros_like(some)
                column_of = [
                    value if value is not None and column < len(row.tokens) else nothing
                    for row, value in zip(self._rows, values, strict=True)
                ]
                getattr(self, what).append(torch.stack(column_of))

    def _step(self) -> None:
        for output in self._engine.step():
            row = self._by_request[output.request_id]
            row.tokens += output.new_token_ids
            row.ended = output.finish_reason is not None
            if output.finish_reason == "error":
                raise MarsError(str(self._engine.result(row.request).error))

    def _end(self, row: _Row) -> None:
        self._engine.cancel(row.request)
        del row.tokens[self._count :]
        row.ended = True


def _hand_over_what_transformers_drops() -> None:
    """Let a callable `custom_generate` of ours have the streamer and the tokenizer.

    `GenerationMixin.generate` collects them, and then forgets them for any callable (seen in 5.24), so that
    nothing streams and stop strings are refused for want of a tokenizer that was given. For other callables
    all stays as it is.
    """
    original = getattr(GenerationMixin, "_extract_generation_mode_kwargs", None)
    if original is None:
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def extract(*args: Any, **kwargs: Any) -> dict[str, Any]:
        given = signature.bind(*args, **kwargs).arguments
        chosen = given.get("custom_generate")
        if getattr(chosen, "func", chosen) is not generate:  # a functools.partial of it is ours too
            return original(*args, **kwargs)
        named = given["kwargs"]
        dropped = {name: named.get(name) for name in ("tokenizer", "assistant_tokenizer")}
        dropped |= {name: given.get(name) for name in ("assistant_model", "streamer", "synced_gpus")}
        kept = original(*args, **kwargs)
        return {name: value for name, value in dropped.items() if value is not None} | kept

    cast(Any, GenerationMixin)._extract_generation_mode_kwargs = extract


_hand_over_what_transformers_drops()
