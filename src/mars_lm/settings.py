"""What a checkpoint was trained for, and what a request asks of it (SPEC 3, 6, 7)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from mars_lm.errors import MarsError

FORMAT_VERSION = 1
LAYOUTS = ("window", "paper")
MASK_LOSSES = ("ce", "kd")
RULES = ("probability", "margin", "entropy")

Layout = Literal["window", "paper"]
MaskLoss = Literal["ce", "kd"]
Rule = Literal["probability", "margin", "entropy"]


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise MarsError(sentence)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclasses.dataclass(frozen=True)
class MarsSettings:
    """The `mars` key of a checkpoint's `config.json` (SPEC 7): what the weights were trained for.

    Raises:
        MarsError: a field is outside its range.
    """

    mask_token_id: int
    block_size: int = 4
    layout: Layout = "window"
    mask_loss: MaskLoss = "ce"
    ar_weight: float = 1.0
    base_model: str | None = None
    # Defaults for decoding that `mars calibrate` may write; empty means the library's own.
    decoding: dict[str, Any] = dataclasses.field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        _require(
            self.format_version == FORMAT_VERSION,
            f"This checkpoint has MARS format version {self.format_version!r}, and this mars-lm reads "
            f"version {FORMAT_VERSION}: install the mars-lm that wrote it, or export it again.",
        )
        _require(
            _is_int(self.mask_token_id) and self.mask_token_id >= 0,
            f"mask_token_id is {self.mask_token_id!r}, expected a token id of 0 or more.",
        )
        _require(
            _is_int(self.block_size) and self.block_size >= 1,
            f"block_size is {self.block_size!r}, expected a whole number of 1 or more.",
        )
        _require(self.layout in LAYOUTS, f"layout is {self.layout!r}, expected one of {', '.join(LAYOUTS)}.")
        _require(
            self.mask_loss in MASK_LOSSES,
            f"mask_loss is {self.mask_loss!r}, expected one of {', '.join(MASK_LOSSES)}.",
        )
        _require(
            _is_finite(self.ar_weight) and self.ar_weight >= 0,
            f"ar_weight is {self.ar_weight!r}, expected a number of 0 or more.",
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON object that `config.json` holds under `mars`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: Any) -> MarsSettings | None:
        """Read the settings from a Hugging Face config.

        Args:
            config: a `PretrainedConfig` (or anything with a `mars` attribute).
        Returns:
            The settings, or None if the checkpoint has none (an ordinary AR model).
        Raises:
            MarsError: the `mars` key is there but is not an object of known fields and right types.
        """
        raw = getattr(config, "mars", None)
        if raw is None:
            return None
        _require(
            isinstance(raw, Mapping),
            f"config.json has a 'mars' key that is {type(raw).__name__}, expected an object: "
            "export it again.",
        )
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(raw) - known)
        _require(
            not unknown,
            f"config.json's 'mars' object has unknown fields ({', '.join(unknown)}): a newer "
            "mars-lm wrote it; upgrade mars-lm, or remove them.",
        )
        _require(
            "mask_token_id" in raw,
            "config.json's 'mars' object has no mask_token_id: convert the base again with `mars convert`.",
        )
        return cls(**raw)


@dataclasses.dataclass(frozen=True)
class DecodingSettings:
    """What one request asks of the decoder (SPEC 3, 4, 6).

    `tau` at 1 with the probability rule is one-token mode in lossy and exact decoding alike: no mask is
    appended, and the forward is exactly AR's.

    Raises:
        MarsError: a value is outside its range.
    """

    tau: float = 0.0
    rule: Rule = "probability"
    block_size: int | None = None  # None: the B that the checkpoint was trained with
    exact: bool = True
    max_new_tokens: int = 256
    # Exact mode only: also place masks behind every shorter prefix of the draft, so that a rejected draft
    # still leaves a next one (docs/decoding.md, "recovery masks").
    recovery: bool = True
    # Place no more masks than pay in tokens per second, on this machine and at this load; False: always all.
    # In exact mode it moves speed, never the text, and None is True. A lossy text depends on its masks, and
    # so on the load; there None is False.
    adaptive: bool | None = None
    # Sampling; temperature 0 is greedy. A filter at its neutral value (top_k 0, top_p 1, min_p 0) is off.
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    # Where a text ends, besides the checkpoint's own end tokens.
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    # What depends on earlier tokens, applied along the accepted run, token by token.
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    # None: no log-probabilities; k: those of the chosen token and of the k best, at temperature 1.
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _require(self.rule in RULES, f"rule is {self.rule!r}, expected one of {', '.join(RULES)}.")
        if self.rule == "entropy":
            _require(
                _is_finite(self.tau) and self.tau >= 0,
                f"tau is {self.tau!r}; with rule 'entropy' it is a limit in nats, expected a number of 0 "
                "or more.",
            )
        else:
            _require(
                _is_finite(self.tau) and 0 <= self.tau <= 1,
                f"tau is {self.tau!r}; with rule '{self.rule}' it is a probability, expected a number from "
                "0 to 1.",
            )
        _require(
            self.block_size is None or (_is_int(self.block_size) and self.block_size >= 1),
            f"block_size is {self.block_size!r}, expected a whole number of 1 or more.",
        )
        _require(
            _is_int(self.max_new_tokens) and self.max_new_tokens >= 1,
            f"max_new_tokens is {self.max_new_tokens!r}, expected a whole number of 1 or more.",
        )
        for name in ("exact", "recovery", "adaptive", "ignore_eos"):
            value = getattr(self, name)
            if value is None and name == "adaptive":
                continue
            _require(isinstance(value, bool), f"{name} is {value!r}, expected true or false.")
        self._check_sampling()
        self._check_ends_and_penalties()

    def _check_sampling(self) -> None:
        _require(
            _is_finite(self.temperature) and 0 <= self.temperature <= 100,
            f"temperature is {self.temperature!r}, expected a number from 0 (greedy) to 100.",
        )
        _require(
            _is_int(self.top_k) and self.top_k >= 0,
            f"top_k is {self.top_k!r}, expected a whole number of 1 or more, or 0 for no limit.",
        )
        _require(
            _is_finite(self.top_p) and 0 < self.top_p <= 1,
            f"top_p is {self.top_p!r}, expected a number above 0, up to 1.",
        )
        _require(
            _is_finite(self.min_p) and 0 <= self.min_p <= 1,
            f"min_p is {self.min_p!r}, expected a number from 0 to 1.",
        )
        _require(
            self.seed is None or (_is_int(self.seed) and 0 <= self.seed < 2**63),
            f"seed is {self.seed!r}, expected a whole number from 0 to 2**63 - 1.",
        )
        _require(
            self.logprobs is None or (_is_int(self.logprobs) and 0 <= self.logprobs <= 20),
            f"logprobs is {self.logprobs!r}, expected a whole number from 0 to 20.",
        )

    def _check_ends_and_penalties(self) -> None:
        _require(
            _is_int(self.min_new_tokens) and 0 <= self.min_new_tokens <= self.max_new_tokens,
            f"min_new_tokens is {self.min_new_tokens!r}, expected a whole number from 0 to max_new_tokens "
            f"({self.max_new_tokens}).",
        )
        _require(
            isinstance(self.stop, tuple) and all(isinstance(text, str) and text for text in self.stop),
            f"stop is {self.stop!r}, expected a tuple of texts, none of them empty.",
        )
        _require(
            isinstance(self.stop_token_ids, tuple)
            and all(_is_int(t) and t >= 0 for t in self.stop_token_ids),
            f"stop_token_ids is {self.stop_token_ids!r}, expected a tuple of token ids.",
        )
        _require(
            _is_finite(self.repetition_penalty) and 1e-3 <= self.repetition_penalty <= 1e3,
            f"repetition_penalty is {self.repetition_penalty!r}, expected a number from 0.001 to 1000.",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(
                _is_finite(value) and -2 <= value <= 2,
                f"{name} is {value!r}, expected a number from -2 to 2.",
            )
        _require(
            isinstance(self.bad_words_ids, tuple)
            and all(
                isinstance(word, tuple) and word and all(_is_int(t) and t >= 0 for t in word)
                for word in self.bad_words_ids
            ),
            f"bad_words_ids is {self.bad_words_ids!r}, expected a tuple of tuples of token ids.",
        )

    @property
    def adapts(self) -> bool:
        """Whether its width is adaptive."""
        return self.exact if self.adaptive is None else self.adaptive

    @property
    def one_token(self) -> bool:
        """True if no mask would ever be appended."""
        return (self.rule == "probability" and self.tau >= 1) or self.block_size == 1


def check_block_size(block_size: int | None, trained: int) -> None:
    """A request's B against the one that the checkpoint was trained with; None stands for that one.

    Raises:
        MarsError: it is more.
    """
    _require(
        block_size is None or block_size <= trained,
        f"block_size is {block_size} and the checkpoint was trained with {trained}: use {trained} or less.",
    )


def default_tau(rule: Rule, *, exact: bool) -> float:
    """A tau where none is named.

    Exact mode verifies every draft, so drafting as far as possible costs no quality: its tau lets all pass
    (no vocabulary's entropy reaches 100 nats). Lossy mode takes the paper's 0.95, and for the other rules
    what they give for a word at 0.95 with all else on one rival.
    """
    if exact:
        return {"probability": 0.0, "margin": 0.0, "entropy": 100.0}[rule]
    return {"probability": 0.95, "margin": 0.9, "entropy": 0.2}[rule]


# What a tau belongs to, and what holds where nothing is said.
_MEANING_OF_TAU = {"exact": True, "rule": "probability"}


def decoding_settings(mars: MarsSettings | None, named: Mapping[str, Any]) -> DecodingSettings:
    """What a request names, over the checkpoint's own defaults, over the library's.

    An ordinary model, which knows no masks, decodes in one-token mode whatever is named.

    Args:
        mars: the checkpoint's settings; None for an ordinary model.
        named: fields of `DecodingSettings` that the request names.
    Raises:
        MarsError: a value is outside its range, or the checkpoint's defaults name what there is not.
    """
    if mars is None:
        return DecodingSettings(**{**named, "rule": "probability", "tau": 1.0, "block_size": None})
    own = dict(mars.decoding)
    unknown = sorted(set(own) - {field.name for field in dataclasses.fields(DecodingSettings)})
    _require(
        not unknown,
        f"The checkpoint's decoding defaults name {', '.join(unknown)}, which this mars-lm does not know: "
        "upgrade it, or remove them from 'mars' in config.json.",
    )
    if any(
        name in named and named[name] != own.get(name, default) for name, default in _MEANING_OF_TAU.items()
    ):
        own.pop("tau", None)  # a tau that was calibrated for another mode or rule means nothing here
    values = {**own, **named}
    rule = values.get("rule", "probability")
    if "tau" not in values and rule in RULES:
        values["tau"] = default_tau(rule, exact=values.get("exact", True))
    return DecodingSettings(**values)
