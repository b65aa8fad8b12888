"""Who makes the texts: the engine, or one of the baselines, behind one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mars_lm.checkpoint import Checkpoint
from mars_lm.decoding import Engine, GenerationResult
from mars_lm.errors import MarsError
from mars_lm.settings import DecodingSettings, default_tau

OnResult = Callable[[int, GenerationResult], None]

DECODERS = ("mars", "block-diffusion", "jacobi", "medusa", "prompt-lookup", "assisted")


class Decode(Protocol):
    """Prompts' token ids and a `DecodingSettings` each -> a result each, in order.

    `on_result` is called with a prompt's number and its result as soon as it is there.
    """

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        settings: Sequence[DecodingSettings],
        on_result: OnResult | None = None,
    ) -> list[GenerationResult]: ...


class EngineDecoder:
    """The project's own engine: one-token, exact and lossy mode.

    Args:
        checkpoint: the model.
        max_rows: prompts decoded together.
    """

    def __init__(self, checkpoint: Checkpoint, *, max_rows: int = 16) -> None:
        self.checkpoint, self.max_rows = checkpoint, max_rows

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        settings: Sequence[DecodingSettings],
        on_result: OnResult | None = None,
    ) -> list[GenerationResult]:
        if not prompts:
            return []
        longest = max(len(p) + s.max_new_tokens for p, s in zip(prompts, settings, strict=True))
        engine = Engine(
            self.checkpoint, max_rows=min(self.max_rows, len(prompts)), max_length=max(longest, 2)
        )
        number = {engine.add(p, s): i for i, (p, s) in enumerate(zip(prompts, settings, strict=True))}
        results: dict[int, GenerationResult] = {}
        for output in engine.stream():
            if output.finish_reason is not None:
                at = number[output.request_id]
                results[at] = engine.result(output.request_id)
                if on_result is not None:
                    on_result(at, results[at])
        return [results[i] for i in range(len(prompts))]


def check_decoder(name: str, *, draft: bool, heads: bool) -> None:
    """See that a decoder is known and has what it needs; said before a model is loaded.

    Args:
        draft, heads: whether a draft model, and Medusa's heads, are named.
    Raises:
        MarsError: it isn't, or lacks it.
    """
    if name not in DECODERS:
        raise MarsError(f"decoder is {name!r}, expected one of {', '.join(DECODERS)}.")
    if name == "medusa" and not heads:
        raise MarsError(
            "Decoder medusa needs its heads: --heads FOLDER, as `benchmarks/study.py` trains them."
        )
    if name == "assisted" and not draft:
        raise MarsError("Decoder assisted needs a draft model: --draft MODEL, with the same tokenizer.")


def make_decoder(
    name: str,
    checkpoint: Checkpoint,
    *,
    max_rows: int = 16,
    draft: Checkpoint | None = None,
    heads: str | None = None,
) -> Decode:
    """The decoder that a name stands for.

    Args:
        name: one of `DECODERS`.
        checkpoint: the model.
        max_rows: prompts decoded together; transformers' own assisted generation takes one at a time.
        draft: the draft model of `assisted`.
        heads: the folder of `medusa`'s heads.
    Raises:
        MarsError: no such decoder, or one that lacks what it needs.
    """
    check_decoder(name, draft=draft is not None, heads=heads is not None)
    if name == "mars":
        return EngineDecoder(checkpoint, max_rows=max_rows)
    if name == "block-diffusion":
        from mars_lm.baselines.block_diffusion import BlockDiffusionDecoder

        return BlockDiffusionDecoder(checkpoint, max_rows=max_rows)
    if name == "jacobi":
        from mars_lm.baselines.jacobi import JacobiDecoder

        return JacobiDecoder(checkpoint, max_rows=max_rows)
    if name == "medusa":
        from mars_lm.baselines.medusa import MedusaDecoder, load_heads

        return MedusaDecoder(checkpoint, load_heads(str(heads), checkpoint), max_rows=max_rows)
    from mars_lm.baselines.assisted import AssistedDecoder

    return AssistedDecoder(checkpoint, draft=draft if name == "assisted" else None)


def settings_for(
    checkpoint: Checkpoint, named: Mapping[str, Any], *, decoder: str = "mars"
) -> DecodingSettings:
    """What is named, over the checkpoint's own defaults, over the library's.

    An ordinary model, which knows no masks, decodes in one-token mode whatever is named. Decoders other than
    the engine take tau and rule (block diffusion) or the block size alone (the others).

    Args:
        checkpoint: the model.
        named: fields of `DecodingSettings`; None stands for "not named".
        decoder: one of `DECODERS`.
    Raises:
        MarsError: a value is out of range.
    """
    given = {name: value for name, value in named.items() if value is not None}
    unknown = sorted(set(given) - set(DecodingSettings.__dataclass_fields__))
    if unknown:
        raise MarsError(f"There is no decoding setting {unknown[0]!r}.")
    DecodingSettings(**given)
    if decoder == "block-diffusion":
        rule = given.get("rule", "probability")
        return DecodingSettings(**{"tau": default_tau(rule, exact=False), **given, "exact": False})
    if decoder != "mars":
        return DecodingSettings(**{**given, "rule": "probability", "tau": 1.0})
    if checkpoint.mars is None:
        return DecodingSettings(**{**given, "rule": "probability", "tau": 1.0, "block_size": None})
    kept = dict(checkpoint.mars.decoding)
    if any(name in given and given[name] != kept.get(name) for name in ("exact", "rule")):
        kept.pop("tau", None)  # a tau that was calibrated for another mode or rule means nothing here
    values = {**kept, **given}
    if "tau" not in values:
        values["tau"] = default_tau(values.get("rule", "probability"), exact=values.get("exact", True))
    return DecodingSettings(**values)
