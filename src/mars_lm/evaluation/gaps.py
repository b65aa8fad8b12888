"""What each of the four gaps between AR and block diffusion costs a checkpoint (SPEC 1).

Two ways of reading a block of B tokens behind clean context are measured on given text:

- *in one forward*: all its tokens are masks, and each is predicted at once. Masking is the gap that this
  opens; attention and alignment are opened on top of it.
- *one token a forward*: a token is predicted, then the true one is put in its place, and so on until the
  block is full. With causal attention, AR's alignment and left-to-right order this is AR itself; each of
  attention, alignment and order is opened alone, and all together, which is block diffusion.

The measure is the cross entropy of the text's own token in nats, and how often the best word is the best word
of AR at the same place. Distance d is the d-th token of the block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mars_lm.evaluation.text_rows import Example
from mars_lm.training.objective import Objective
from mars_lm.training.streams import IGNORE, Gaps, Streams, build

Order = Literal["left to right", "by confidence"]

_CHUNK = 1024  # predictions whose logits exist at a time


@dataclasses.dataclass(frozen=True)
class View:
    """One line of the table: which gaps are open, and how the block is read."""

    name: str
    reading: Literal["one forward", "one by one"]
    attention: Literal["causal", "bidirectional"] = "causal"
    alignment: Literal["next", "same"] = "next"
    order: Order = "left to right"


VIEWS = (
    View("masking", "one forward"),
    View("masking + attention", "one forward", attention="bidirectional"),
    View("masking + alignment", "one forward", alignment="same"),
    View("masking + attention + alignment", "one forward", attention="bidirectional", alignment="same"),
    View("none, one by one", "one by one"),
    View("attention", "one by one", attention="bidirectional"),
    View("alignment", "one by one", alignment="same"),
    View("order", "one by one", order="by confidence"),
    View("all, one by one", "one by one", "bidirectional", "same", "by confidence"),
)


@dataclasses.dataclass
class Measure:
    """Sums over predictions, by distance 1 … B (index 0 is distance 1).

    Attributes:
        nats, agreeing, count: [B] float64; nats are cross entropies.
    """

    nats: Tensor
    agreeing: Tensor
    count: Tensor

    @classmethod
    def empty(cls, block_size: int) -> Measure:
        return cls(*(torch.zeros(block_size, dtype=torch.float64) for _ in range(3)))

    def add(self, distance: Tensor, nats: Tensor, agreeing: Tensor) -> None:
        """Add predictions: distance int64 [N] from 1, nats float [N], agreeing bool [N]."""
        at = distance.cpu() - 1
        self.nats.index_add_(0, at, nats.double().cpu())
        self.agreeing.index_add_(0, at, agreeing.double().cpu())
        self.count.index_add_(0, at, torch.ones(len(at), dtype=torch.float64))

    def summary(self) -> dict[str, Any]:
        """Nats per token and top-1 agreement, over all distances and by distance (None where nothing was)."""
        seen = self.count > 0
        # Each distance weighs the same: a block has one token of each, and only its cut ends have fewer.
        per = torch.where(seen, self.nats / self.count.clamp(min=1), torch.nan)
        same = torch.where(seen, self.agreeing / self.count.clamp(min=1), torch.nan)
        return {
            "nats": float(per[seen].mean()),
            "agreement": float(same[seen].mean()),
            "nats_by_distance": [None if v != v else v for v in per.tolist()],
            "agreement_by_distance": [None if v != v else v for v in same.tolist()],
            "predictions": int(self.count.sum()),
        }


def measure_gaps(
    model: Any,
    examples: Sequence[Example],
    *,
    block_size: int,
    mask_token_id: int,
    batch_rows: int = 8,
    seed: int = 0,
    views: Sequence[View] = VIEWS,
) -> dict[str, Any]:
    """Every view of the table, for one model and one text.

    Args:
        model: a causal LM with `base_model` and `get_output_embeddings()`.
        examples: token ids, and where their predicted part starts.
        block_size: B.
        mask_token_id: stands at masked places; it is never a prediction.
        batch_rows: rows of one forward.
        seed: of the blocks' phases.
        views: which lines.
    Returns:
        `ar`: AR's own nats per token; `views`: by name a `Measure.summary()` with `cost`, the nats above AR's
        on the same tokens.
    """
    measures = {view.name: Measure.empty(block_size) for view in views}
    reference = {view.name: Measure.empty(block_size) for view in views}
    clean = Measure.empty(1)
    rows = sorted(examples, key=lambda example: len(example[0]))
    with torch.inference_mode(), _Attention(model):
        for begin in range(0, len(rows), batch_rows):
            batch = _tensors(rows[begin : begin + batch_rows], mask_token_id, _device(model))
            known: tuple[Tensor, Tensor] | None = None
            for view in views:
                gaps = Gaps(masking="all", attention=view.attention, alignment=view.alignment)
                streams = build(
                    *batch,
                    mask_token_id=mask_token_id,
                    block_size=block_size,
                    layout="window",
                    gaps=gaps,
                    seed=seed,
                )
                targets = _Targets.of(streams)
                if known is None:
                    ar = _read(model, streams, streams.input_ids, targets.clean, mask_token_id)
                    known = (ar.nats(streams.clean_target), ar.best)
                    clean.add(
                        torch.ones_like(streams.clean_target), known[0], torch.ones_like(ar.best).bool()
                    )
                for at, nats, best in _predictions(model, streams, targets, view, mask_token_id):
                    distance = targets.offset[at] + 1
                    measures[view.name].add(distance, nats, best == known[1][at])
                    reference[view.name].add(distance, known[0][at], best == best)
    results = {}
    for view in views:
        summary, ar_there = measures[view.name].summary(), reference[view.name].summary()
        results[view.name] = {
            **dataclasses.asdict(view),
            **summary,
            "cost": summary["nats"] - ar_there["nats"],
        }
    return {
        "ar": {"nats": clean.summary()["nats"], "predictions": int(clean.count.sum())},
        "block_size": block_size,
        "rows": len(rows),
        "views": results,
    }


@dataclasses.dataclass
class _Targets:
    """The predicted tokens of a batch, C of them in the order of `streams.clean_target`.

    Attributes:
        token: [C] the text's own token; offset: [C] its place in its block, from 0.
        source: [C] flat index of the state that predicts it when its block is read.
        clean: [C] flat index of the state by which AR predicts it.
        slot: [C] flat index of the noisy token that stands for it, -1 where there is none.
        block: [C] a number that the tokens of one block share.
    """

    token: Tensor
    offset: Tensor
    source: Tensor
    clean: Tensor
    slot: Tensor
    block: Tensor

    @classmethod
    def of(cls, streams: Streams) -> _Targets:
        width = streams.input_ids.shape[1]
        positions, blocks = streams.position_ids.flatten(), streams.block.flatten()
        clean = streams.clean_index
        source, offset = clean.clone(), torch.zeros_like(clean)
        source[streams.pair] = streams.noisy_index
        offset[streams.pair] = streams.distance - 1
        row, position = clean // width, positions[clean] + 1
        place = torch.full((streams.input_ids.shape[0], int(positions.max()) + 2), -1, device=clean.device)
        noisy = (blocks > 0).nonzero()[:, 0]
        place[noisy // width, positions[noisy]] = noisy
        return cls(
            token=streams.clean_target,
            offset=offset,
            source=source,
            clean=clean,
            slot=place[row, position],
            block=row * place.shape[1] + position - offset,
        )


@dataclasses.dataclass
class _Logits:
    """What is kept of [N, V] logits: enough for any token's nats, the best word, and its probability."""

    picked: Tensor
    best: Tensor
    confidence: Tensor

    def nats(self, target: Tensor) -> Tensor:
        """Cross entropies of the targets that the logits were read for."""
        assert target.shape == self.picked.shape
        return -self.picked


def _read(
    model: Any, streams: Streams, ids: Tensor, index: Tensor, mask_token_id: int, target: Tensor | None = None
) -> _Logits:
    """One forward; the log-probability of each target, the best word and its probability, at flat `index`."""
    hidden = model.base_model(
        input_ids=ids,
        position_ids=streams.position_ids,
        attention_mask=streams.dense_mask(),
        use_cache=False,
    ).last_hidden_state
    hidden = hidden.reshape(-1, hidden.shape[-1])
    target = streams.clean_target if target is None else target
    head, parts = model.get_output_embeddings(), []
    for begin in range(0, len(index), _CHUNK):
        at = slice(begin, begin + _CHUNK)
        logits = head(hidden[index[at]]).float()
        logits[:, mask_token_id] = -torch.inf
        log_p = logits.log_softmax(dim=-1)
        best = log_p.max(dim=-1)
        parts.append((log_p.gather(1, target[at][:, None])[:, 0], best.indices, best.values.exp()))
    picked, words, confidence = (torch.cat(values) for values in zip(*parts, strict=True))
    return _Logits(picked, words, confidence)


def _predictions(model: Any, streams: Streams, targets: _Targets, view: View, mask_token_id: int) -> Any:
    """Yield (which targets [N], their nats [N], the best words [N]) until every target was predicted once."""
    everything = torch.arange(len(targets.token), device=targets.token.device)
    ids = streams.input_ids.clone()
    if view.reading == "one forward":
        read = _read(model, streams, ids, targets.source, mask_token_id)
        yield everything, read.nats(targets.token), read.best
        return
    hidden_yet = torch.ones(len(targets.token), dtype=torch.bool, device=ids.device)
    while hidden_yet.any():
        left = everything[hidden_yet]
        read = _read(model, streams, ids, targets.source[left], mask_token_id, targets.token[left])
        rank = read.confidence if view.order == "by confidence" else -targets.offset[left].float()
        chosen = _first_of_each(targets.block[left], rank)
        at = left[chosen]
        yield at, -read.picked[chosen], read.best[chosen]
        hidden_yet[at] = False
        opened = at[targets.slot[at] >= 0]
        ids.view(-1)[targets.slot[opened]] = targets.token[opened]


def _first_of_each(block: Tensor, rank: Tensor) -> Tensor:
    """The index of the highest rank in each block (the first of equals)."""
    order = rank.argsort(descending=True, stable=True)
    order = order[block[order].argsort(stable=True)]
    sorted_block = block[order]
    first = torch.ones_like(sorted_block, dtype=torch.bool)
    first[1:] = sorted_block[1:] != sorted_block[:-1]
    return order[first]


def _tensors(rows: Sequence[Example], fill: int, device: torch.device) -> tuple[Tensor, ...]:
    """input_ids, labels, example, position_ids [R, L] as `streams.build` takes them."""
    length = max(len(ids) for ids, _ in rows)
    shape = (len(rows), length)
    input_ids, labels = torch.full(shape, fill), torch.full(shape, IGNORE)
    example, positions = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    for row, (ids, start) in enumerate(rows):
        count = len(ids)
        input_ids[row, :count] = torch.tensor(ids)
        labels[row, start:count] = input_ids[row, start:count]
        example[row, :count] = 1
        positions[row, :count] = torch.arange(count)
    labels[labels == fill] = IGNORE  # the mask token has no probability
    return tuple(tensor.to(device) for tensor in (input_ids, labels, example, positions))


def _device(model: Any) -> torch.device:
    parameter = next(iter(model.parameters()), None)
    return parameter.device if parameter is not None else torch.device("cpu")


class _Attention:
    """Scaled-dot-product attention for a while: it takes the streams' mask as it is."""

    def __init__(self, model: Any) -> None:
        self.config = getattr(model, "config", None)

    def __enter__(self) -> None:
        if self.config is not None:
            self.before = self.config._attn_implementation
            self.config._attn_implementation = "sdpa"

    def __exit__(self, *_: Any) -> None:
        if self.config is not None:
            self.config._attn_implementation = self.before


def ar_shares(
    examples: Sequence[Example], block_sizes: Sequence[int], *, seed: int = 0
) -> list[dict[str, Any]]:
    """The AR share against B, from the weights that the loss gives its predictions on these rows (SPEC 2).

    Returns:
        For each B: `with_sft` and `without_sft` in both layouts, and the closed forms B/(2B-1), 1/B. The
        share without the SFT loss is the paper's counting (layout `paper`, whose block starts count as AR);
        in the `window` layout it is 0, since the masks begin at distance 2.
    """
    batch = _tensors(list(examples), -1, torch.device("cpu"))
    lines = []
    for block_size in block_sizes:
        line: dict[str, Any] = {"block_size": block_size}
        for layout in ("window", "paper"):
            streams = build(
                *batch,
                mask_token_id=-1,
                block_size=block_size,
                layout=layout,
                seed=seed,
            )
            for name, weight in (("with_sft", 1.0), ("without_sft", 0.0)):
                objective = Objective(block_size=block_size, layout=layout, ar_weight=weight)
                line[f"{name}_{layout}"] = objective.ar_share(
                    len(streams.clean_target),
                    len(streams.noisy_target),
                    int((streams.distance == 2).sum()),
                )
        line["closed_form_with"] = block_size / (2 * block_size - 1)
        line["closed_form_without"] = 1 / block_size
        lines.append(line)
    return lines
