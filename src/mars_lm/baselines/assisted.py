"""transformers' own assisted generation: with a draft model, or with look-up in the prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from mars_lm.baselines.forward import OnResult
from mars_lm.checkpoint import Checkpoint, end_token_ids
from mars_lm.decoding import GenerationResult
from mars_lm.errors import MarsError
from mars_lm.settings import DecodingSettings

LOOKUP_TOKENS = 10  # transformers' documentation's own value


class AssistedDecoder:
    """`model.generate(assistant_model=…)`, or `(prompt_lookup_num_tokens=…)`: AR's text, a prompt at a time.

    Forwards are those of the model itself; a draft model's are not counted (its seconds are in the clock).

    Args:
        checkpoint: the model.
        draft: a smaller one with the same tokenizer; None: look-up in the prompt.
    Raises:
        MarsError: the two have different vocabularies.
    """

    def __init__(self, checkpoint: Checkpoint, *, draft: Checkpoint | None = None) -> None:
        if draft is not None and draft.tokenizer.get_vocab() != checkpoint.tokenizer.get_vocab():
            raise MarsError(
                "The draft model has another tokenizer than the model: it drafts in other tokens."
            )
        self.checkpoint, self.draft = checkpoint, draft
        self.ends = sorted(end_token_ids(checkpoint))

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        settings: Sequence[DecodingSettings],
        on_result: OnResult | None = None,
    ) -> list[GenerationResult]:
        """Decode one prompt after another."""
        results = []
        for number, (prompt, own) in enumerate(zip(prompts, settings, strict=True)):
            if own.temperature > 0:
                raise MarsError("This baseline decodes greedily: temperature 0.")
            results.append(self._one(list(prompt), own))
            if on_result is not None:
                on_result(number, results[-1])
        return results

    def _one(self, prompt: list[int], settings: DecodingSettings) -> GenerationResult:
        model, tokenizer = self.checkpoint.model, self.checkpoint.tokenizer
        ids = torch.tensor([prompt], device=next(model.parameters()).device)
        options: dict[str, Any] = {}
        length = settings.block_size - 1 if settings.block_size else None
        if self.draft is None:
            options["prompt_lookup_num_tokens"] = length or LOOKUP_TOKENS
        else:
            options["assistant_model"] = self.draft.model
            if length:
                self.draft.model.generation_config.num_assistant_tokens = length
                self.draft.model.generation_config.num_assistant_tokens_schedule = "constant"
        if settings.stop:
            options.update(stop_strings=list(settings.stop), tokenizer=tokenizer)
        forwards = 0

        def count(*_: Any) -> None:
            nonlocal forwards
            forwards += 1

        hook = model.register_forward_pre_hook(count)
        start = time.perf_counter()
        try:
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=settings.max_new_tokens,
                do_sample=False,
                eos_token_id=None if settings.ignore_eos else (self.ends or None),
                pad_token_id=tokenizer.pad_token_id or (self.ends[0] if self.ends else 0),
                **options,
            )
        finally:
            hook.remove()
        seconds = time.perf_counter() - start
        tokens = [int(token) for token in out[0, len(prompt) :].tolist()]
        full = len(tokens) >= settings.max_new_tokens and tokens[-1] not in self.ends
        return GenerationResult(
            token_ids=tokens,
            finish_reason="length" if full else "stop",
            forwards=forwards,
            decode_seconds=seconds,
        )
