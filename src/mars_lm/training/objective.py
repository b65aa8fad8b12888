"""The MARS loss, its parts and the AR share (SPEC 2), computed in chunks of the vocabulary projection."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch

from mars_lm.errors import MarsError
from mars_lm.settings import LAYOUTS, MASK_LOSSES, Layout, MaskLoss
from mars_lm.training.streams import Gaps, Streams

Preset = Literal["mars", "mars-no-sft-loss", "block-diffusion", "ar-sft"]

# A chunk keeps CHUNK_TOKENS x vocabulary float32 numbers, twice with a noisy half: 100 MB at 49k words.
CHUNK_TOKENS = 256
# A chunk's logits are made and used by so many words at a time, which stay in a core's cache meanwhile: on a
# CPU the passes of a softmax over memory take longer than the matrix products. A GPU takes all words at once.
TILE_WORDS = 4096
# The mask token's logit: never a candidate, in training as in decoding. Finite, as 0 x -inf is no number.
NEVER = -1e30


@dataclasses.dataclass(frozen=True)
class Objective:
    """What a training run optimises (SPEC 1 and 2).

    Args:
        block_size: B.
        layout: how the noisy stream is laid out.
        mask_loss: `ce` (the data's token) or `kd` (the clean stream's own distribution, detached).
        ar_weight: α, the weight of the clean loss; 0 leaves it out.
        mask_weight: w, the weight of each noisy prediction; 0 leaves the noisy stream out.
        phases: how many noisy streams share one clean one (`streams.build`); the loss is their mean, so that
            more of them make it steadier and leave its balance, and the AR share, as they are.
        gaps: the gaps to AR that stay open.
    Raises:
        MarsError: a value is outside its range, or nothing is left to train on.
    """

    block_size: int = 4
    layout: Layout = "window"
    mask_loss: MaskLoss = "ce"
    ar_weight: float = 1.0
    mask_weight: float = 1.0
    phases: int = 1
    gaps: Gaps = dataclasses.field(default_factory=Gaps)

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise MarsError(f"layout is {self.layout!r}, expected one of {', '.join(LAYOUTS)}.")
        if self.mask_loss not in MASK_LOSSES:
            raise MarsError(f"mask_loss is {self.mask_loss!r}, expected one of {', '.join(MASK_LOSSES)}.")
        if not isinstance(self.block_size, int) or self.block_size < 1:
            raise MarsError(f"block_size is {self.block_size!r}, expected a whole number of 1 or more.")
        if not isinstance(self.phases, int) or not 1 <= self.phases <= max(self.block_size, 1):
            raise MarsError(
                f"phases is {self.phases!r}, expected a whole number from 1 to block_size "
                f"({self.block_size})."
            )
        if self.ar_weight < 0 or self.mask_weight < 0 or self.ar_weight + self.mask_weight == 0:
            raise MarsError(
                f"ar_weight is {self.ar_weight} and mask_weight {self.mask_weight}: expected numbers of 0 or "
                "more, one of them above 0, or there is nothing to train on."
            )
        if self.noisy and self.block_size < 2 and self.layout == "window" and self.gaps.alignment == "next":
            raise MarsError("block_size is 1, which has no masks: expected 2 or more, or preset ar-sft.")

    @property
    def noisy(self) -> bool:
        """Whether there is a noisy stream at all."""
        return self.mask_weight > 0

    @property
    def noisy_weight(self) -> float:
        """The weight of a prediction in one of the noisy streams: w, shared among them."""
        return self.mask_weight / self.phases

    def ar_share(self, clean_targets: int, noisy_targets: int, block_starts: int = 0) -> float:
        """Weight of the predictions that see only clean tokens, over the weight of all (SPEC 2).

        Args:
            clean_targets, noisy_targets: how many predictions the two streams were scored on.
            block_starts: how many of the noisy predictions are at a block's first position. Only the paper's
                counting, hence only its layout, takes these for AR: in the `window` layout they lie at
                distance 2 and are none.
        """
        ar = self.ar_weight * clean_targets
        if self.layout == "paper":
            ar += self.noisy_weight * block_starts
        total = self.ar_weight * clean_targets + self.noisy_weight * noisy_targets
        return ar / total if total else 1.0


PRESETS: dict[str, dict[str, Any]] = {
    "mars": {},
    "mars-no-sft-loss": {"ar_weight": 0.0},
    "ar-sft": {"mask_weight": 0.0},
    # A random share of a block, seen from both sides, each position predicting itself; no AR loss.
    "block-diffusion": {
        "layout": "paper",
        "ar_weight": 0.0,
        "gaps": Gaps(masking="random", attention="bidirectional", alignment="same"),
    },
}


def preset(name: str, **changes: Any) -> Objective:
    """The objective that a preset's name stands for; `changes` are the fields that the preset leaves open.

    Raises:
        MarsError: no preset has this name, or a field is outside its range.
    """
    if name not in PRESETS:
        raise MarsError(f"preset is {name!r}, expected one of {', '.join(PRESETS)}.")
    return Objective(**{**changes, **PRESETS[name]})


class _Words:
    """The distributions over the vocabulary of a chunk of hidden states, made and read tile by tile.

    Each tile keeps exp(logit - the tile's own maximum); what makes probabilities of these is one number a row
    and tile, known when all tiles are: no pass over the whole chunk is needed.

    Attributes:
        log_z: [n] log of the sum of exponentials of all logits.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.exponentials: list[torch.Tensor] = []  # [n, width] each
        self.tops: list[torch.Tensor] = []  # [n] each: the tile's largest logit
        self.sums: list[torch.Tensor] = []  # [n] each
        self.log_z = torch.empty(0)

    def add(self, logits: torch.Tensor) -> torch.Tensor:
        """Take the next tile's logits [n, width]; return them less their row's maximum, in place."""
        top = logits.amax(dim=-1)
        self.tops.append(top)
        return logits.sub_(top[:, None])

    def exponentiate(self, shifted: torch.Tensor) -> torch.Tensor:
        """Turn what `add` returned into exponentials, in place, and keep them."""
        exponentials = shifted.exp_()
        self.exponentials.append(exponentials)
        self.sums.append(exponentials.sum(dim=-1))
        return exponentials

    def finish(self) -> None:
        """All tiles are there: normalise."""
        self.top = torch.stack(self.tops)  # [tiles, n]
        self.log_z = (self.top + torch.stack(self.sums).log()).logsumexp(dim=0)
        self.scales = (self.top - self.log_z).exp()  # exponentials x scales = probabilities

    def probabilities(self, tile: int) -> torch.Tensor:
        """[n, width] a tile's probabilities, a new tensor."""
        return self.exponentials[tile] * self.scales[tile][:, None]

    def best(self) -> torch.Tensor:
        """[n] the most likely word of each row."""
        if len(self.exponentials) == 1:
            return self.exponentials[0].argmax(dim=-1)
        tile_of_best = self.top.argmax(dim=0)
        best = torch.empty(self.rows, dtype=torch.int64, device=tile_of_best.device)
        begin = 0
        for tile, exponentials in enumerate(self.exponentials):
            at = (tile_of_best == tile).nonzero()[:, 0]
            best[at] = exponentials[at].argmax(dim=-1) + begin
            begin += exponentials.shape[1]
        return best


def _subtract_one(tile: torch.Tensor, words: torch.Tensor, begin: int) -> None:
    """Subtract 1 from the entry of each row's word, where it lies in the tile whose first word is `begin`."""
    inside = (words >= begin) & (words < begin + tile.shape[1])
    at = (words - begin).clamp(0, tile.shape[1] - 1)
    tile.scatter_add_(1, at[:, None], -inside.to(tile.dtype)[:, None])


class _ChunkedLoss(torch.autograd.Function):
    """Both losses and their gradients, chunk by chunk, in the forward pass.

    The gradient of a cross entropy with respect to its logits is (softmax - target), known as soon as the
    logits are; so each chunk's logits are turned into its gradients at once and dropped. No more than a chunk
    of [tokens x vocabulary] ever exists, and the projection runs once forward and once back.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        streams: Streams,
        objective: Objective,
        count: float | torch.Tensor,
        mask_token_id: int,
        logit_scale: float,
    ) -> tuple[torch.Tensor, ...]:
        device = hidden.device
        compute = weight.dtype
        if torch.is_autocast_enabled(device.type):
            compute = torch.get_autocast_dtype(device.type)
        projection = weight.to(compute)
        words = weight.shape[0]
        tile_words = TILE_WORDS if device.type == "cpu" else words
        tiles = [(begin, min(begin + tile_words, words)) for begin in range(0, words, tile_words)]

        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = None
        if bias is not None and ctx.needs_input_grad[2]:
            grad_bias = torch.zeros_like(bias, dtype=torch.float32)
        with_grad = grad_hidden is not None or grad_weight is not None or grad_bias is not None

        distances = max(objective.block_size + 1, 2) + 1
        clean_sum, noisy_sum = (hidden.new_zeros((), dtype=torch.float32) for _ in range(2))
        seen, right, agreeing = (hidden.new_zeros(distances, dtype=torch.float32) for _ in range(3))

        def logits_of(chunk: torch.Tensor, begin: int, end: int) -> torch.Tensor:
            logits = (chunk @ projection[begin:end].t()).float()
            if bias is not None:
                logits.add_(bias[begin:end], alpha=logit_scale)
            if begin <= mask_token_id < end:
                logits[:, mask_token_id - begin] = NEVER
            return logits

        def give_back(
            grad: torch.Tensor, index: torch.Tensor, chunk: torch.Tensor, begin: int, end: int, factor: float
        ) -> None:
            """Carry the gradient of a tile's logits, times `factor`, over to what they were made from."""
            if grad_bias is not None:
                grad_bias[begin:end].add_(grad.sum(dim=0), alpha=factor * logit_scale)
            grad = grad.to(compute)
            if grad_weight is not None:
                grad_weight[begin:end].add_(grad.t() @ chunk, alpha=factor)
            if grad_hidden is not None:
                part = (grad @ projection[begin:end]).to(grad_hidden.dtype)
                grad_hidden.index_add_(0, index, part, alpha=factor * logit_scale)

        need_clean = objective.ar_weight > 0
        teacher = objective.mask_loss == "kd" and objective.noisy
        total = streams.clean_target.numel()
        for begin, end, low, high in _chunks(streams.pair, total):
            index, target = streams.clean_index[begin:end], streams.clean_target[begin:end]
            noisy_index, noisy_target = streams.noisy_index[low:high], streams.noisy_target[low:high]
            mate = streams.pair[low:high] - begin  # the clean prediction of the same target
            clean = _Words(end - begin) if need_clean or (teacher and high > low) else None
            noisy = _Words(high - low) if high > low else None
            # The scale is put on the hidden states, which are smaller than the logits.
            chunk = hidden[index].to(compute) * logit_scale if clean else hidden[:0]
            noisy_chunk = hidden[noisy_index].to(compute) * logit_scale if noisy else hidden[:0]
            wanted_logit = hidden.new_zeros((high - low, len(tiles)), dtype=torch.float32)
            picked = hidden.new_zeros(end - begin, dtype=torch.float32)

            for number, (first, last) in enumerate(tiles):
                exponentials = None
                if clean:
                    shifted = clean.add(logits_of(chunk, first, last))
                    picked += _picked(shifted, target, first, clean.tops[-1])
                    exponentials = clean.exponentiate(shifted)
                if noisy:
                    shifted = noisy.add(logits_of(noisy_chunk, first, last))
                    if teacher:
                        assert exponentials is not None
                        # Σ over the tile's words of the teacher's exponential x the student's shifted logit.
                        wanted_logit[:, number] = torch.linalg.vecdot(exponentials[mate], shifted)
                    else:
                        wanted_logit[:, number] = _picked(shifted, noisy_target, first, noisy.tops[-1])
                    noisy.exponentiate(shifted)

            if clean:
                clean.finish()
                if need_clean:
                    clean_sum += (clean.log_z - picked).sum()
            if noisy:
                noisy.finish()
                expected = wanted_logit.sum(dim=1)
                if teacher:
                    assert clean is not None
                    # With the shift undone and the exponentials made probabilities: Σ p(word) x logit(word).
                    shares = clean.scales * torch.stack(clean.sums)  # [tiles, n] a tile's total probability
                    expected = (wanted_logit * clean.scales.t()[mate]).sum(dim=1)
                    expected += (shares.t()[mate] * noisy.top.t()).sum(dim=1)
                noisy_sum += (noisy.log_z - expected).sum()
                at = streams.distance[low:high].clamp(max=distances - 1)
                best = noisy.best()
                seen.index_add_(0, at, torch.ones_like(noisy.log_z))
                right.index_add_(0, at, (best == noisy_target).float())
                if clean:
                    agreeing.index_add_(0, at, (best == clean.best()[mate]).float())

            for number, (first, last) in enumerate(tiles) if with_grad else ():
                clean_grad = clean.probabilities(number) if clean else None
                if noisy:
                    noisy_grad = noisy.probabilities(number)
                    if teacher:
                        assert clean_grad is not None
                        noisy_grad -= clean_grad[mate]
                    else:
                        _subtract_one(noisy_grad, noisy_target, first)
                    give_back(noisy_grad, noisy_index, noisy_chunk, first, last, objective.noisy_weight)
                if need_clean:
                    assert clean_grad is not None
                    _subtract_one(clean_grad, target, first)
                    give_back(clean_grad, index, chunk, first, last, objective.ar_weight)

        ctx.grads = (grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.count = count
        ctx.mark_non_differentiable(clean_sum, noisy_sum, seen, right, agreeing)
        loss = (objective.ar_weight * clean_sum + objective.noisy_weight * noisy_sum) / count
        return loss, clean_sum, noisy_sum, seen, right, agreeing

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        factor = grad_loss / ctx.count
        scaled = [
            None if grad is None else grad.mul_(factor).to(dtype)
            for grad, dtype in zip(ctx.grads, ctx.dtypes, strict=True)
        ]
        return (*scaled, *[None] * 5)


def _chunks(pair: torch.Tensor, total: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut the clean predictions into chunks: their range, and that of the noisy ones of the same targets.

    Args:
        pair: [N] int64, rising: the clean prediction that each noisy one shares its target with.
        total: how many clean predictions there are.
    """
    bounds = [*range(0, total, CHUNK_TOKENS), total]
    places = torch.searchsorted(pair, torch.tensor(bounds, device=pair.device)).tolist()
    for number in range(len(bounds) - 1):
        yield bounds[number], bounds[number + 1], places[number], places[number + 1]


def _picked(shifted: torch.Tensor, words: torch.Tensor, begin: int, top: torch.Tensor) -> torch.Tensor:
    """[n] the logit of each row's word where it lies in this tile, else 0."""
    inside = (words >= begin) & (words < begin + shifted.shape[1])
    at = (words - begin).clamp(0, shifted.shape[1] - 1)
    return torch.where(inside, shifted.gather(1, at[:, None])[:, 0] + top, 0.0)


class LossParts(NamedTuple):
    """A micro-batch's loss and what it is made of.

    A tuple, so that DDP, FSDP and autocast find the tensors in it.

    Args:
        loss: scalar, `(Σ w·CE over noisy targets + α·Σ CE over clean targets) / N`, with gradient.
        clean_sum, noisy_sum: scalars, the two sums of cross entropies in nats, unweighted, without gradient.
        clean_count, noisy_count: how many predictions each sum has.
        block_starts: scalar, how many noisy predictions stand at a block's first position.
        seen, right, agreeing: [distances] noisy predictions per distance, those whose best word is the
            data's, and those whose best word is the clean stream's best (what exact mode accepts).
    """

    loss: torch.Tensor
    clean_sum: torch.Tensor
    noisy_sum: torch.Tensor
    clean_count: int
    noisy_count: int
    block_starts: torch.Tensor
    seen: torch.Tensor
    right: torch.Tensor
    agreeing: torch.Tensor


def compute_loss(
    hidden: torch.Tensor,
    output_embeddings: torch.nn.Module,
    streams: Streams,
    objective: Objective,
    count: float | torch.Tensor,
    *,
    mask_token_id: int,
    logit_scale: float = 1.0,
) -> LossParts:
    """The loss of one micro-batch (SPEC 2).

    Args:
        hidden: [R, T, H] the decoder's last hidden states of `streams`.
        output_embeddings: the model's vocabulary projection, a linear layer with `weight` [V, H].
        streams: what the hidden states belong to.
        objective: the loss's weights and kind.
        count: N, the supervised clean tokens of the whole optimizer step.
        mask_token_id: the word that gets no probability.
        logit_scale: what the model multiplies its logits with.
    """
    loss, clean_sum, noisy_sum, seen, right, agreeing = _ChunkedLoss.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        output_embeddings.weight,
        getattr(output_embeddings, "bias", None),
        streams,
        objective,
        count,
        mask_token_id,
        logit_scale,
    )
    return LossParts(
        loss=loss,
        clean_sum=clean_sum,
        noisy_sum=noisy_sum,
        clean_count=streams.clean_target.numel() if objective.ar_weight > 0 else 0,
        noisy_count=streams.noisy_target.numel(),
        block_starts=(streams.distance == 2).sum(),
        seen=seen,
        right=right,
        agreeing=agreeing,
    )
