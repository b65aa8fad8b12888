"""Decoding as the SPEC's sentences say it, one prompt at a time, without a cache: slow, and plain to read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mars_lm.checkpoint import Checkpoint, end_token_ids
from mars_lm.decoding.forward import Feed
from mars_lm.decoding.width import ForwardCost
from mars_lm.settings import DecodingSettings


class FixedCost(ForwardCost):
    """Seconds of a forward by its number of tokens, whatever steps really take."""

    def learn(self, tokens: int, seconds: float) -> None:
        pass


@dataclasses.dataclass
class Reference:
    token_ids: list[int]
    accepted_lengths: list[int]
    finish_reason: str
    rejected_drafts: int = 0


def biased(checkpoint: Checkpoint, tokens: Sequence[int] = (7, 8, 9, 11), gain: float = 4.0) -> Checkpoint:
    """The same model, torn between a few tokens, so that its masks often guess right and often wrong."""
    with torch.no_grad():
        checkpoint.model.get_output_embeddings().weight[list(tokens)] *= gain
    return checkpoint


def feed(*runs: tuple[int, list[int], int], sees: dict[int, tuple[int, int]] | None = None) -> Feed:
    """Runs of (row, tokens, first position); `sees` replaces (before, from) of a flat index."""
    position = np.concatenate([np.arange(start, start + len(ids)) for _, ids, start in runs])
    before, begin = position + 1, position.copy()
    for index, (to, since) in (sees or {}).items():
        before[index], begin[index] = to, since
    return Feed(
        rows=np.array([row for row, _, _ in runs]),
        width=np.array([len(ids) for _, ids, _ in runs]),
        input_ids=np.concatenate([np.array(ids) for _, ids, _ in runs]),
        position_ids=position,
        slots=position,
        sees_before=before,
        sees_from=begin,
    )


def hf_greedy(checkpoint: Checkpoint, prompt: list[int], max_new_tokens: int, **arguments: Any) -> list[int]:
    """What transformers' greedy search answers, the mask token suppressed; `arguments` are for `generate`."""
    assert checkpoint.mars is not None
    output = checkpoint.model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=sorted(end_token_ids(checkpoint)),
        suppress_tokens=[checkpoint.mars.mask_token_id],
        **arguments,
    )
    return output[0, len(prompt) :].tolist()


@torch.inference_mode()
def logits_of(checkpoint: Checkpoint, ids: list[int]) -> torch.Tensor:
    """float32 [len(ids), V] of a plain causal forward, the mask token ruled out."""
    assert checkpoint.mars is not None
    logits = checkpoint.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    logits[:, checkpoint.mars.mask_token_id] = -torch.inf
    return logits


def accepts(logits: torch.Tensor, candidate: int, settings: DecodingSettings) -> bool:
    """SPEC 3's three rules, p the distribution at temperature 1."""
    p = torch.softmax(logits, dim=-1)
    if settings.rule == "probability":
        return p[candidate].item() >= settings.tau
    if settings.rule == "margin":
        best, second = sorted(p.tolist(), reverse=True)[:2]
        return best - second >= settings.tau
    return -sum(value * torch.tensor(value).log().item() for value in p.tolist() if value > 0) <= settings.tau


def masked_run(
    checkpoint: Checkpoint, clean: list[int], masks: int, settings: DecodingSettings
) -> list[tuple[int, bool]]:
    """The candidates of `masks` masks behind `clean` tokens (the first stands for the token after the next),
    and whether each is accepted with all before it. Masks come last, so causal attention is the SPEC's."""
    assert checkpoint.mars is not None
    logits = logits_of(checkpoint, clean + [checkpoint.mars.mask_token_id] * masks)[len(clean) :]
    run, good = [], True
    for row in logits:
        candidate = int(row.argmax())
        good = good and accepts(row, candidate, settings)
        run.append((candidate, good))
    return run


def reference(
    checkpoint: Checkpoint, prompt: list[int], settings: DecodingSettings, context: int
) -> Reference:
    """Lossy mode (SPEC 3) or exact mode (SPEC 4, with recovery masks if asked), greedy."""
    assert checkpoint.mars is not None
    ends = end_token_ids(checkpoint)
    masks = 0 if settings.one_token else (settings.block_size or checkpoint.mars.block_size) - 1
    limit = min(len(prompt) + settings.max_new_tokens, context)
    committed, draft = list(prompt), list[int]()
    lengths, rejected = [], 0
    while True:
        # AR's token behind each prefix of the draft; the draft holds up to the first that AR says otherwise.
        clean = logits_of(checkpoint, committed + draft)
        said = [int(clean[len(committed) - 1 + k].argmax()) for k in range(len(draft) + 1)]
        held = 0
        while held < len(draft) and said[held] == draft[held]:
            held += 1
        rejected += len(draft) - held
        whole = held == len(draft)
        run = masked_run(checkpoint, committed + draft[:held], masks, settings)
        trusted = [candidate for candidate, good in run if good]
        if settings.exact:
            new = said[: held + 1]
            draft = trusted if whole or settings.recovery else []
        else:
            new, draft = said[:1] + trusted, []
        new = new[: limit - len(committed)]
        stop = next((i for i, token in enumerate(new) if token in ends), None)
        if stop is not None:
            new = new[: stop + 1]
        committed += new
        lengths.append(len(new))
        if stop is not None or len(committed) >= limit:
            reason = "stop" if stop is not None else "length"
            return Reference(committed[len(prompt) :], lengths, reason, rejected)
        draft = draft[: limit - len(committed) - 1]
