"""The MARS loss, its parts and the AR share (SPEC 2), computed in chunks of the vocabulary projection."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch

from mars_lm.errors import MarsError
from mars_lm.settings import Layout, MaskLoss
from mars_lm.training.streams import Gaps, Streams

Preset = Literal["mars", "mars-no-sft-loss", "block-diffusion", "ar-sft"]

# A chunk's logits in float32 take CHUNK_TOKENS x vocabulary x 4 bytes, twice with a noisy half: 100 MB at
# 49k words, which a server's last-level cache still holds in part. Larger chunks gain nothing on a CPU.
CHUNK_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class Objective:
    """What a training run optimises (SPEC 1 and 2).

    Args:
        block_size: B.
        layout: how the noisy stream is laid out.
        mask_loss: `ce` (the data's token) or `kd` (the clean stream's own distribution, detached).
        ar_weight: α, the weight of the clean loss; 0 leaves it out.
        mask_weight: w, the weight of the noisy loss; 0 leaves the noisy stream out.
        gaps: the gaps to AR that stay open.
    """

    block_size: int = 4
    layout: Layout = "window"
    mask_loss: MaskLoss = "ce"
    ar_weight: float = 1.0
    mask_weight: float = 1.0
    gaps: Gaps = Gaps()

    def __post_init__(self) -> None:
        if self.ar_weight < 0 or self.mask_weight < 0 or self.ar_weight + self.mask_weight == 0:
            raise MarsError(
                f"ar_weight is {self.ar_weight} and mask_weight {self.mask_weight}: expected numbers of 0 or more, "
                "one of them above 0, or there is nothing to train on."
            )
        if (
            self.mask_loss == "kd"
            and self.layout == "window"
            and self.block_size < 2
            and self.mask_weight > 0
        ):
            raise MarsError("block_size is 1, which has no masks: expected 2 or more, or preset ar-sft.")

    @property
    def noisy(self) -> bool:
        """Whether there is a noisy stream at all."""
        return self.mask_weight > 0

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
            ar += self.mask_weight * block_starts
        total = self.ar_weight * clean_targets + self.mask_weight * noisy_targets
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
    """The objective that a preset's name stands for, with some of its fields changed.

    Raises:
        MarsError: no preset has this name.
    """
    if name not in PRESETS:
        raise MarsError(f"preset is {name!r}, expected one of {', '.join(PRESETS)}.")
    return Objective(**{**changes, **PRESETS[name]})


class _ChunkedLoss(torch.autograd.Function):
    """Both losses and their gradients, chunk by chunk, in the forward pass.

    The gradient of a cross entropy with respect to its logits is (softmax - target), known as soon as the
    logits are; so each chunk's logits are turned into its gradients at once and dropped. No more than a chunk
    of [tokens x vocabulary] ever exists, and the projection runs once forward and once back.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        streams: Streams,
        objective: Objective,
        count: float | torch.Tensor,
        mask_token_id: int,
    ) -> tuple[torch.Tensor, ...]:
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = (
            torch.zeros_like(weight, dtype=torch.float32)
            if ctx.needs_input_grad[1] and hidden.numel()
            else None
        )
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        compute = (
            torch.get_autocast_dtype(hidden.device.type)
            if torch.is_autocast_enabled(hidden.device.type)
            else None
        )
        compute = compute or weight.dtype
        projection = weight.to(compute)
        distances = max(objective.block_size + 1, 2) + 1
        zero = hidden.new_zeros((), dtype=torch.float32)
        clean_sum, noisy_sum = zero.clone(), zero.clone()
        seen, right, agreeing = (hidden.new_zeros(distances, dtype=torch.float32) for _ in range(3))

        def logits_of(index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            chunk = hidden[index].to(compute)
            logits = (chunk @ projection.t()).float()
            if bias is not None:
                logits += bias
            logits[:, mask_token_id] = -torch.inf  # never a candidate, in training as in decoding
            return chunk, logits

        def give_back(
            index: torch.Tensor, chunk: torch.Tensor, grad_logits: torch.Tensor, scale: Any
        ) -> None:
            grad_logits = grad_logits.mul_(scale)
            if grad_bias is not None:
                grad_bias.add_(grad_logits.sum(dim=0))
            grad_logits = grad_logits.to(compute)
            if grad_weight is not None:
                grad_weight.add_(grad_logits.t() @ chunk)
            if grad_hidden is not None:
                # Two predictions never share a hidden state within a stream, so a plain write would do;
                # index_add keeps that from being a condition.
                grad_hidden.index_add_(0, index, (grad_logits @ projection).to(grad_hidden.dtype))

        need_clean = objective.ar_weight > 0
        teacher = objective.mask_loss == "kd" and objective.noisy
        order = streams.pair.argsort(stable=True)  # noisy predictions in the order of their targets
        sorted_pair = streams.pair[order].contiguous()
        with_grad = grad_hidden is not None or grad_weight is not None
        total = streams.clean_target.numel()
        for begin in range(0, total, CHUNK_TOKENS):
            end = min(begin + CHUNK_TOKENS, total)
            low, high = torch.searchsorted(
                sorted_pair, torch.tensor([begin, end], device=hidden.device)
            ).tolist()
            picks = order[low:high]
            clean_probabilities = clean_best = None
            if need_clean or (teacher and len(picks)):
                index, target = streams.clean_index[begin:end], streams.clean_target[begin:end]
                chunk, logits = logits_of(index)
                clean_best = logits.argmax(dim=-1)
                log_z = logits.logsumexp(dim=-1)
                picked = logits.gather(1, target[:, None])[:, 0]
                clean_probabilities = logits.sub_(log_z[:, None]).exp_()
                if need_clean:
                    clean_sum += (log_z - picked).sum()
            if len(picks):
                noisy_index, noisy_target = streams.noisy_index[picks], streams.noisy_target[picks]
                mate = streams.pair[picks] - begin
                noisy_chunk, noisy_logits = logits_of(noisy_index)
                best = noisy_logits.argmax(dim=-1)
                noisy_log_z = noisy_logits.logsumexp(dim=-1)
                at = streams.distance[picks].clamp(max=distances - 1)
                seen.index_add_(0, at, torch.ones_like(noisy_log_z))
                right.index_add_(0, at, (best == noisy_target).float())
                if clean_best is not None:
                    agreeing.index_add_(0, at, (best == clean_best[mate]).float())
                if teacher:
                    assert clean_probabilities is not None
                    wanted = clean_probabilities[mate]
                    # 0 x -inf at the mask token's word is no number, and stands for 0.
                    noisy_logits[:, mask_token_id] = 0.0
                    expected = torch.linalg.vecdot(wanted, noisy_logits)
                    noisy_logits[:, mask_token_id] = -torch.inf
                    noisy_sum += (noisy_log_z - expected).sum()
                    if with_grad:
                        grad = noisy_logits.sub_(noisy_log_z[:, None]).exp_().sub_(wanted)
                        give_back(noisy_index, noisy_chunk, grad, objective.mask_weight / count)
                    del wanted
                else:
                    noisy_sum += (noisy_log_z - noisy_logits.gather(1, noisy_target[:, None])[:, 0]).sum()
                    if with_grad:
                        grad = noisy_logits.sub_(noisy_log_z[:, None]).exp_()
                        grad.scatter_add_(1, noisy_target[:, None], -torch.ones_like(noisy_log_z)[:, None])
                        give_back(noisy_index, noisy_chunk, grad, objective.mask_weight / count)
                del noisy_logits
            if need_clean and with_grad:
                assert clean_probabilities is not None
                clean_probabilities.scatter_add_(1, target[:, None], -torch.ones_like(log_z)[:, None])
                give_back(index, chunk, clean_probabilities, objective.ar_weight / count)

        loss = (objective.ar_weight * clean_sum + objective.mask_weight * noisy_sum) / count
        ctx.grads = (grad_hidden, grad_weight, grad_bias)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(clean_sum, noisy_sum, seen, right, agreeing)
        return loss, clean_sum, noisy_sum, seen, right, agreeing

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, *_: Any) -> tuple[Any, ...]:  # type: ignore[override]
        grad_hidden, grad_weight, grad_bias = ctx.grads
        scaled = [None if g is None else g.mul_(grad_loss) for g in (grad_hidden, grad_weight, grad_bias)]
        if scaled[1] is not None:
            scaled[1] = scaled[1].to(ctx.weight_dtype)
        return (*scaled, None, None, None, None)


@dataclasses.dataclass
class LossParts:
    """A micro-batch's loss and what it is made of.

    Args:
        loss: scalar, `(Σ w·CE over noisy targets + α·Σ CE over clean targets) / N`, with gradient.
        clean_sum, noisy_sum: scalars, the two sums of cross entropies in nats, unweighted, without gradient.
        clean_count, noisy_count: how many predictions each sum has.
        block_starts: how many noisy predictions stand at a block's first position.
        seen, right, agreeing: [distances] noisy predictions per distance, those whose best word is the data's,
            and those whose best word is the clean stream's best (what exact mode accepts).
    """

    loss: torch.Tensor
    clean_sum: torch.Tensor
    noisy_sum: torch.Tensor
    clean_count: int
    noisy_count: int
    block_starts: int
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
) -> LossParts:
    """The loss of one micro-batch (SPEC 2).

    Args:
        hidden: [R, T, H] the decoder's last hidden states of `streams`.
        output_embeddings: the model's vocabulary projection, a linear layer with `weight` [V, H].
        streams: what the hidden states belong to.
        objective: the loss's weights and kind.
        count: N, the supervised clean tokens of the whole optimizer step.
        mask_token_id: the word that gets no probability.
    """
    weight, bias = output_embeddings.weight, getattr(output_embeddings, "bias", None)
    loss, clean_sum, noisy_sum, seen, right, agreeing = _ChunkedLoss.apply(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, streams, objective, count, mask_token_id
    )
    return LossParts(
        loss=loss,
        clean_sum=clean_sum,
        noisy_sum=noisy_sum,
        clean_count=streams.clean_target.numel() if objective.ar_weight > 0 else 0,
        noisy_count=streams.noisy_target.numel(),
        block_starts=int((streams.distance == 2).sum()),
        seen=seen,
        right=right,
        agreeing=agreeing,
    )
