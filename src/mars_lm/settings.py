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
            f"This checkpoint has MARS format version {self.format_version!r}, and this mars-lm reads version "
            f"{FORMAT_VERSION}: install the mars-lm that wrote it, or export it again.",
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
            f"config.json has a 'mars' key that is {type(raw).__name__}, expected an object: export it again.",
        )
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(raw) - known)
        _require(
            not unknown,
            f"config.json's 'mars' object has unknown fields ({', '.join(unknown)}): a newer mars-lm wrote it; "
            "upgrade mars-lm, or remove them.",
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

    def __post_init__(self) -> None:
        _require(self.rule in RULES, f"rule is {self.rule!r}, expected one of {', '.join(RULES)}.")
        if self.rule == "entropy":
            _require(
                _is_finite(self.tau) and self.tau >= 0,
                f"tau is {self.tau!r}; with rule 'entropy' it is a limit in nats, expected a number of 0 or more.",
            )
        else:
            _require(
                _is_finite(self.tau) and 0 <= self.tau <= 1,
                f"tau is {self.tau!r}; with rule '{self.rule}' it is a probability, expected a number from 0 to 1.",
            )
        _require(
            self.block_size is None or (_is_int(self.block_size) and self.block_size >= 1),
            f"block_size is {self.block_size!r}, expected a whole number of 1 or more.",
        )
        _require(
            _is_int(self.max_new_tokens) and self.max_new_tokens >= 1,
            f"max_new_tokens is {self.max_new_tokens!r}, expected a whole number of 1 or more.",
        )

    @property
    def one_token(self) -> bool:
        """True if no mask would ever be appended."""
        return (self.rule == "probability" and self.tau >= 1) or self.block_size == 1
