"""The chunked loss against the naive one, its parts, the AR share, and that it never makes a whole matrix."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mars_lm.errors import MarsError
from mars_lm.training import objective as module
from mars_lm.training.objective import PRESETS, LossParts, Objective, compute_loss, preset
from mars_lm.training.streams import Gaps, Streams, build
from training_tools import BLOCK_DIFFUSION, MASK, collate, example, row

WORDS, WIDTH, COUNT = 64, 24, 37.0
ROWS = [row(example(1, 5, 11)), row(example(2, 3, 4), example(4, 2, 9)), row(example(5, 4, 6, 3, 7))]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks and tiles for a few dozen predictions; the last tile holds the mask token alone."""
    monkeypatch.setattr(module, "CHUNK_TOKENS", 7)
    monkeypatch.setattr(module, "TILE_WORDS", 21)


def streams_for(objective: Objective) -> Streams:
    batch = collate(ROWS)
    return build(
        batch["input_ids"],
        batch["labels"],
        batch["example"],
        batch["position_ids"],
        mask_token_id=MASK,
        block_size=objective.block_size,
        layout=objective.layout,
        gaps=objective.gaps,
        phases=objective.phases if objective.noisy else 0,
    )


def naive(hidden, head, streams, objective, scale=1.0):
    """SPEC 2's formula over one whole matrix of logits, with autograd's own gradients."""
    logits = scale * head(hidden.flatten(0, 1))
    logits = logits.float().masked_fill(torch.arange(WORDS) == MASK, -1e30)
    log_p = logits.log_softmax(dim=-1)
    clean, noisy = log_p[streams.clean_index], log_p[streams.noisy_index]
    clean_loss = -clean.gather(1, streams.clean_target[:, None]).sum()
    if objective.mask_loss == "ce":
        noisy_loss = -noisy.gather(1, streams.noisy_target[:, None]).sum()
    else:
        teacher = clean.detach().exp()[streams.pair]
        noisy_loss = -(teacher * noisy).sum()
    parts = objective.ar_weight * clean_loss + objective.mask_weight * noisy_loss / objective.phases
    return parts / COUNT, clean, noisy


def setting(bias: bool, seed: int = 0, dtype=torch.float64):
    torch.manual_seed(seed)
    head = torch.nn.Linear(WIDTH, WORDS, bias=bias, dtype=dtype)
    hidden = torch.randn(3, 200, WIDTH, dtype=dtype)
    return hidden, head


def gradients(loss, hidden, head):
    wanted = [hidden, *head.parameters()]
    return torch.autograd.grad(loss, [tensor for tensor in wanted if tensor.requires_grad])


OBJECTIVES = [
    Objective(mask_loss=mask_loss, layout=layout, ar_weight=ar, mask_weight=w)
    for mask_loss, layout, (ar, w) in itertools.product(
        ("ce", "kd"), ("window", "paper"), ((1.0, 1.0), (0.7, 1.3), (0.0, 1.0), (1.0, 0.0))
    )
] + [
    Objective(block_size=7),
    Objective(mask_loss="kd", phases=2, mask_weight=0.5),
    Objective(phases=4),
    Objective(layout="paper", ar_weight=0.0, gaps=BLOCK_DIFFUSION),
    Objective(layout="paper", mask_loss="kd", gaps=BLOCK_DIFFUSION),
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_loss_and_gradients_are_the_naive_ones(objective, bias):
    hidden, head = setting(bias)
    streams = streams_for(objective)
    hidden = hidden[:, : streams.input_ids.shape[1]].clone().requires_grad_()
    scale = 0.25 if bias else 1.0
    expected, clean, noisy = naive(hidden, head, streams, objective, scale)
    parts: LossParts = compute_loss(
        hidden, head, streams, objective, COUNT, mask_token_id=MASK, logit_scale=scale
    )
    torch.testing.assert_close(parts.loss.double(), expected.double(), rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(
        gradients(parts.loss * 3, hidden, head), gradients(expected * 3, hidden, head), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)

    assert parts.noisy_count == len(streams.noisy_target)
    if objective.ar_weight:
        assert parts.clean_count == len(streams.clean_target)
        ce = -clean.gather(1, streams.clean_target[:, None]).sum().item()
        assert parts.clean_sum.item() == pytest.approx(ce, rel=1e-5)
    best, distance = noisy.argmax(dim=-1), streams.distance
    for at in distance.unique().tolist():
        mine = distance == at
        assert parts.seen[at] == mine.sum()
        assert parts.right[at] == (best == streams.noisy_target)[mine].sum()
        if objective.ar_weight or objective.mask_loss == "kd":
            assert parts.agreeing[at] == (best == clean.argmax(dim=-1)[streams.pair])[mine].sum()
    assert parts.seen.sum() == parts.noisy_count


def test_a_frozen_head_and_no_gradients_at_all():
    objective = Objective(mask_loss="kd")
    streams = streams_for(objective)
    hidden, head = setting(bias=True)
    hidden = hidden[:, : streams.input_ids.shape[1]]
    losses = []
    for trained in (True, False):
        head.requires_grad_(trained)
        for part in (hidden.clone().requires_grad_(), hidden):
            parts = compute_loss(part, head, streams, objective, COUNT, mask_token_id=MASK)
            losses.append(parts.loss.item())
            assert parts.loss.requires_grad == (trained or part.requires_grad)
            if part.requires_grad:
                (grad,) = torch.autograd.grad(parts.loss, [part])
                assert grad.abs().sum() > 0
    assert len(set(losses)) == 1


def test_the_kd_teacher_gets_no_gradient():
    """Without the clean loss, the hidden states that only the teacher reads have none."""
    objective = Objective(mask_loss="kd", ar_weight=0.0)
    streams = streams_for(objective)
    hidden, head = setting(bias=False)
    hidden = hidden[:, : streams.input_ids.shape[1]].clone().requires_grad_()
    parts = compute_loss(hidden, head.requires_grad_(False), streams, objective, COUNT, mask_token_id=MASK)
    (grad,) = torch.autograd.grad(parts.loss, [hidden])
    grad = grad.flatten(0, 1).abs().sum(dim=-1)
    assert (grad[streams.noisy_index] > 0).all()
    assert grad[streams.clean_index].sum() == 0


@pytest.mark.parametrize("mask_loss", ["ce", "kd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_products_are_narrow_and_the_sums_are_not(mask_loss, dtype):
    objective = Objective(mask_loss=mask_loss)
    streams = streams_for(objective)
    hidden, head = setting(bias=True, dtype=torch.float32)
    hidden = hidden[:, : streams.input_ids.shape[1]].clone().requires_grad_()
    wide = compute_loss(hidden, head, streams, objective, COUNT, mask_token_id=MASK)
    with torch.autocast("cpu", dtype):
        narrow = compute_loss(hidden, head, streams, objective, COUNT, mask_token_id=MASK)
    assert narrow.loss.dtype == torch.float32
    torch.testing.assert_close(narrow.loss, wide.loss, rtol=0.01, atol=0)
    for mine, theirs in zip(
        gradients(narrow.loss, hidden, head), gradients(wide.loss, hidden, head), strict=True
    ):
        assert mine.dtype == torch.float32
        assert (mine - theirs).norm() < 0.02 * theirs.norm()


class LargestMatrix(TorchDispatchMode):
    """Records how large the largest tensor is, but for hidden states and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.dim() and WIDTH not in tensor.shape:
                self.numbers = max(self.numbers, tensor.numel())
        return result


@pytest.mark.parametrize("mask_loss", ["ce", "kd"])
def test_a_whole_matrix_of_tokens_by_words_never_exists(mask_loss, monkeypatch):
    words, tile = 640, 128
    monkeypatch.setattr(module, "TILE_WORDS", tile)
    objective = Objective(mask_loss=mask_loss)
    streams = streams_for(objective)
    torch.manual_seed(0)
    head = torch.nn.Linear(WIDTH, words, bias=False).requires_grad_(False)
    hidden = torch.randn(3, streams.input_ids.shape[1], WIDTH).requires_grad_()
    with LargestMatrix() as largest:
        compute_loss(hidden, head, streams, objective, COUNT, mask_token_id=MASK).loss.backward()
    predictions = len(streams.clean_index) + len(streams.noisy_index)
    assert predictions > 8 * module.CHUNK_TOKENS
    assert (
        largest.numbers <= module.CHUNK_TOKENS * tile
    )  # and a chunk keeps no more than words / tile of them


def test_nothing_to_predict_is_a_loss_of_zero_and_not_nan():
    objective = Objective(mask_loss="kd")
    batch = collate([row(example(8, 7))])
    streams = build(
        batch["input_ids"],
        batch["labels"],
        batch["example"],
        batch["position_ids"],
        mask_token_id=MASK,
        block_size=4,
    )
    hidden, head = setting(bias=False)
    hidden = hidden[:1, : streams.input_ids.shape[1]].clone().requires_grad_()
    parts = compute_loss(hidden, head, streams, objective, 1.0, mask_token_id=MASK)
    assert parts.loss == 0
    for grad in gradients(parts.loss, hidden, head):
        assert (grad == 0).all()


def test_huge_logits_give_numbers():
    objective = Objective(mask_loss="kd")
    streams = streams_for(objective)
    hidden, head = setting(bias=False, dtype=torch.float32)
    hidden = (1e4 * hidden[:, : streams.input_ids.shape[1]]).clone().requires_grad_()
    parts = compute_loss(hidden, head, streams, objective, COUNT, mask_token_id=MASK)
    for tensor in (parts.loss, *gradients(parts.loss, hidden, head)):
        assert tensor.isfinite().all()


@pytest.mark.parametrize("block_size", [2, 4, 8, 16])
def test_ar_share_against_the_specs_closed_forms(block_size):
    responses = 3 * block_size
    counts: dict[str, list[float]] = {"window": [], "paper": []}
    for layout in ("window", "paper"):
        for visit in range(4 * block_size):
            # From a block's boundary, over whole blocks.
            batch = collate([row(example(visit, block_size + 1, responses))])
            streams = build(
                batch["input_ids"],
                batch["labels"],
                batch["example"],
                batch["position_ids"],
                mask_token_id=MASK,
                block_size=block_size,
                layout=layout,
                visit=visit,
            )
            clean, noisy = len(streams.clean_target), len(streams.noisy_target)
            starts = int((streams.distance == 2).sum())
            share = Objective(block_size=block_size, layout=layout).ar_share(clean, noisy, starts)
            counts[layout].append(share)
            assert share > 0.5
            if layout == "paper":
                alone = Objective(block_size=block_size, layout=layout, ar_weight=0.0)
                assert alone.ar_share(0, noisy, starts) == pytest.approx(1 / block_size)
                # One of B masks counts as AR, besides the clean prediction of each token.
                assert share == pytest.approx((block_size + 1) / (2 * block_size))
    # From phase 0, R(B-1)/B noisy predictions for R clean ones; another phase cuts one block in two.
    whole = block_size / (2 * block_size - 1)
    assert min(counts["window"]) == pytest.approx(whole)
    noisy = responses - responses // block_size - 1
    assert max(counts["window"]) == pytest.approx(responses / (responses + noisy))


def test_ar_share_of_the_other_presets():
    assert preset("ar-sft").ar_share(10, 0) == 1
    assert (
        preset("mars-no-sft-loss").ar_share(0, 10, 4) == 0
    )  # window: no noisy prediction sees clean tokens only
    assert Objective(ar_weight=0.5, mask_weight=2.0).ar_share(4, 3) == pytest.approx(2 / 8)
    assert Objective(phases=2).ar_share(4, 6) == pytest.approx(4 / 7)
    assert preset("mars").ar_share(0, 0) == 1


def test_presets_are_the_specs():
    assert preset("mars", block_size=8) == Objective(block_size=8)
    assert preset("mars-no-sft-loss").ar_weight == 0
    assert not preset("ar-sft").noisy
    assert preset("block-diffusion", layout="window").gaps == BLOCK_DIFFUSION
    assert set(PRESETS) == {"mars", "mars-no-sft-loss", "ar-sft", "block-diffusion"}


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: preset("mras"), r"preset is 'mras', expected one of mars, "),
        (lambda: Objective(layout="windows"), r"layout is 'windows', expected one of window, paper"),
        (lambda: Objective(mask_loss="kl"), r"mask_loss is 'kl', expected one of ce, kd"),
        (lambda: Objective(block_size=0), r"block_size is 0, expected a whole number of 1 or more"),
        (lambda: Objective(block_size=1), r"block_size is 1, which has no masks"),
        (lambda: Objective(ar_weight=-1.0), r"ar_weight is -1.0 and mask_weight 1.0: expected numbers of 0"),
        (lambda: Objective(ar_weight=0.0, mask_weight=0.0), r"or there is nothing to train on"),
    ],
)
def test_what_is_out_of_range_is_refused(make, sentence):
    with pytest.raises(MarsError, match=sentence):
        make()


def test_a_block_of_one_is_ar_or_an_aligned_gap():
    assert not Objective(block_size=1, mask_weight=0.0).noisy
    assert Objective(block_size=1, gaps=Gaps(alignment="same")).noisy
