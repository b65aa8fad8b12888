"""The clean and the noisy stream of a batch: ids, positions, targets and who sees whom (SPEC 2).

The only module that knows the layouts. Everything is tensors over the batch; nothing here is random: a phase
is derived from the example's own tokens and the visit, so that a batch cut into other micro-batches, padded,
packed or spread over other ranks trains the same predictions.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args, get_type_hints

import torch

from mars_lm.errors import MarsError
from mars_lm.settings import Layout

IGNORE = -100  # the label of a token that nothing is trained to predict, as in Hugging Face's losses


@dataclasses.dataclass(frozen=True)
class Gaps:
    """The switches of SPEC 1: which of the four gaps to AR the noisy stream leaves open.

    Args:
        masking: `all` tokens of a block are masks, or a `random` share of them (drawn anew each visit).
        attention: inside a noisy block, `causal` or `bidirectional`.
        alignment: the noisy position i predicts token i+1 (`next`) or token i (`same`).

    The fourth gap, generation order, is a matter of decoding.

    Raises:
        MarsError: a switch has no such position.
    """

    masking: Literal["all", "random"] = "all"
    attention: Literal["causal", "bidirectional"] = "causal"
    alignment: Literal["next", "same"] = "next"

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            choices, value = get_args(hint), getattr(self, name)
            if value not in choices:
                raise MarsError(f"gap_{name} is {value!r}, expected one of {', '.join(choices)}.")


@dataclasses.dataclass
class Streams:
    """One forward's input and the predictions it is scored on.

    R rows hold T tokens each: the row's clean tokens, then its noisy ones, then padding.

    Args:
        input_ids: [R, T] int64.
        position_ids: [R, T] int64, counted from 0 in each example; a noisy token carries the position of the
            token it stands for.
        example: [R, T] int64; 0 is padding, else the number (from 1) of the example packed into the row.
        limit: [R, T] int64; clean keys of the same example at positions below it are seen.
        block: [R, T] int64; 0 for clean tokens, else a number that the noisy tokens of one block share.
        bidirectional: whether noisy tokens see later ones of their block.
        clean_index: [C] int64, places in the flattened [R·T] whose logits predict `clean_target` [C].
        noisy_index: [N] int64, likewise for the noisy predictions of `noisy_target` [N].
        pair: [N] int64, for each noisy prediction the clean one of the same target (an index into [C]): its
            teacher under `mask_loss = kd`. Rising: the noisy predictions stand in the
            order of their targets.
        distance: [N] int64, how far the target lies behind the last clean token that the prediction sees;
            2 … B in the `window` layout. Distance 1 is AR.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    example: torch.Tensor
    limit: torch.Tensor
    block: torch.Tensor
    bidirectional: bool
    clean_index: torch.Tensor
    clean_target: torch.Tensor
    noisy_index: torch.Tensor
    noisy_target: torch.Tensor
    pair: torch.Tensor
    distance: torch.Tensor

    def visible(self, row: Any, query: Any, key: Any) -> torch.Tensor:
        """Who sees whom: True where the token at `query` may attend to the one at `key`, both in `row`.

        The one definition behind the dense mask and flex_attention's block mask. Index tensors of any shapes
        that broadcast together; the result is bool of the broadcast shape. Padding sees padding, so that no
        softmax runs over nothing, and is seen by nothing else.
        """
        key_block = self.block[row, key]
        key_position = self.position_ids[row, key]
        clean = (key_block == 0) & (key_position < self.limit[row, query])
        own = (key_block > 0) & (key_block == self.block[row, query])
        if not self.bidirectional:
            own = own & (key_position <= self.position_ids[row, query])
        return (self.example[row, query] == self.example[row, key]) & (clean | own)

    def dense_mask(self) -> torch.Tensor:
        """[R, 1, T, T] bool for scaled-dot-product attention; True is attended."""
        rows, length = self.input_ids.shape
        at = torch.arange(length, device=self.input_ids.device)
        row = torch.arange(rows, device=self.input_ids.device)
        return self.visible(row[:, None, None], at[None, :, None], at[None, None, :])[:, None]

    def block_mask(self) -> Any:
        """flex_attention's `BlockMask` of the same relation."""
        from torch.nn.attention.flex_attention import create_block_mask

        rows, length = self.input_ids.shape
        return create_block_mask(
            lambda b, h, q, kv: self.visible(b, q, kv),
            B=rows,
            H=None,
            Q_LEN=length,
            KV_LEN=length,
            device=str(self.input_ids.device),
        )


def _mix(value: torch.Tensor) -> torch.Tensor:
    """A 31-bit integer hash (two rounds of multiply and xor-shift) of int64 values, element by element."""
    value = value & 0x7FFFFFFF
    value = ((value >> 16) ^ value) * 0x45D9F3B & 0x7FFFFFFF
    value = ((value >> 16) ^ value) * 0x45D9F3B & 0x7FFFFFFF
    return (value >> 16) ^ value


def example_keys(
    input_ids: torch.Tensor, example: torch.Tensor, position_ids: torch.Tensor, *, seed: int, visit: int
) -> torch.Tensor:
    """A hash of each token's own example, of the seed and of the visit: the source of every random choice.

    Args:
        input_ids, example, position_ids: [R, L] int64 as in `Streams`, clean tokens only.
        seed: the run's seed.
        visit: how often the example has been seen before.
    Returns:
        [R, L] int64 below 2³¹, equal for all tokens of an example, whatever row or batch it stands in.
    """
    rows, length = input_ids.shape
    tokens = _mix(input_ids * 2654435761 + _mix(position_ids + 1))
    # Examples are numbered from 1 within the row, and 0 is padding, so L + 1 sums hold a row's hashes.
    sums = torch.zeros(rows, length + 1, dtype=torch.int64, device=input_ids.device)
    sums.scatter_add_(1, example, tokens)
    return _mix(sums.gather(1, example) + _mix(torch.tensor(seed * 1000003 + visit, device=input_ids.device)))


@dataclasses.dataclass
class _Blocks:
    """One laying out of the noisy stream, over the clean tokens' places: [R, L] each.

    Args:
        covered: where a noisy token stands.
        predicts: where it is scored.
        masked: where it is a mask, and not the token itself.
        start: column of its block's first token; start_position: the position of that token.
    """

    covered: torch.Tensor
    predicts: torch.Tensor
    masked: torch.Tensor
    start: torch.Tensor
    start_position: torch.Tensor


def _following(x: torch.Tensor, fill: int) -> torch.Tensor:
    """What stands one column further right."""
    return torch.nn.functional.pad(x[:, 1:], (0, 1), value=fill)


def _lay_blocks(
    response: torch.Tensor,
    example: torch.Tensor,
    position_ids: torch.Tensor,
    key: torch.Tensor,
    *,
    block_size: int,
    layout: Layout,
    gaps: Gaps,
    turn: int,
) -> _Blocks:
    """Tile the responses with blocks; `turn` moves the `window` layout's phase on by so many tokens."""
    device = response.device
    rows, length = response.shape
    real = example > 0
    at = torch.arange(length, device=device).expand(rows, length)
    if layout == "window":
        before = torch.nn.functional.pad(response[:, :-1], (1, 0))
        same_example = torch.nn.functional.pad(example[:, :-1], (1, 0)) == example
        starts_run = response & ~(before & same_example)
        run_start = torch.where(starts_run, at, 0).cummax(dim=1).values  # where this response began
        offset = at - run_start
        # The key of the run's first token would do for one response; with several, each draws its own phase.
        phase = (_mix(key + position_ids.gather(1, run_start)) + turn) % block_size
        in_first = offset < phase  # the shorter block that the phase leaves at the head of the response
        start = run_start + torch.where(in_first, 0, phase + (offset - phase) // block_size * block_size)
        covered = predicts = response
        # A block's last token needs no mask of its own: nothing in the block comes behind it.
        if gaps.alignment == "next":
            covered = predicts = (
                response & _following(response.long(), 0).bool() & (_following(start, -1) == start)
            )
    else:
        start = at - position_ids % block_size
        covered = real
        if gaps.alignment == "next":
            predicts = _following(response.long(), 0).bool() & (_following(example, 0) == example) & real
        else:
            predicts = response
    start_position = position_ids - (at - start)

    masked = response
    if gaps.masking == "random":
        # Each block draws the share of its masks, and each of its tokens whether it is one. The block's
        # "luckiest" token is masked in any case, so that no block goes without.
        key = key + 104729 * turn
        share = (_mix(key + 7 * start_position + 1) % 65536).float() / 65536
        draw = (_mix(key * 31 + 13 * position_ids + 5) % 65536).float() / 65536
        slot = start + torch.arange(rows, device=device)[:, None] * length
        lowest = torch.full((rows * length,), 2.0, device=device)
        lowest.scatter_reduce_(0, slot[response], draw[response], "amin")
        masked = response & ((draw < share) | (draw == lowest[slot]))
    if gaps.alignment == "same" or (gaps.masking == "random" and gaps.attention == "bidirectional"):
        # A target whose own token lies open before the prediction's eyes teaches nothing.
        open_target = masked if gaps.alignment == "same" else _following(masked.long(), 0).bool()
        predicts = predicts & open_target
    return _Blocks(covered, predicts, masked, start, start_position)


def build(
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    example: torch.Tensor,
    position_ids: torch.Tensor,
    *,
    mask_token_id: int,
    block_size: int,
    layout: Layout = "window",
    gaps: Gaps = Gaps(),
    phases: int = 1,
    seed: int = 0,
    visit: int = 0,
) -> Streams:
    """Lay a batch of examples out as a clean and a noisy stream (SPEC 2).

    Args:
        input_ids: [R, L] int64, rows of one example or of several packed ones, padded anywhere.
        labels: [R, L] int64; the token itself where it is to be predicted (the response), else -100. The mask
            token, which has no probability, is never to be predicted.
        example: [R, L] int64; 0 is padding, else the example's number in its row, from 1.
        position_ids: [R, L] int64, from 0 in each example.
        mask_token_id: the id that noisy tokens carry.
        block_size: B.
        layout: `window` or `paper`.
        gaps: which gaps to leave open; the default closes all that MARS closes.
        phases: how many layings out of the noisy stream share the clean one, at phases that lie B/phases
            apart; 1 is the SPEC's, 0 leaves the noisy stream out (AR SFT).
        seed, visit: with the example's tokens they set the phase, and under random masking the masks.
    """
    device = input_ids.device
    rows, length = input_ids.shape
    real = example > 0
    # A token with nothing before it has no prediction.
    response = (labels != IGNORE) & real & (position_ids > 0)
    key = example_keys(input_ids, example, position_ids, seed=seed, visit=visit)
    layings = [
        _lay_blocks(
            response,
            example,
            position_ids,
            key,
            block_size=block_size,
            layout=layout,
            gaps=gaps,
            turn=number * block_size // phases,
        )
        for number in range(phases)
    ]
    shift = 1 if gaps.alignment == "next" else 0

    # Clean | noisy | noisy ..., then every row's real tokens are moved to its front.
    present = torch.cat([real, *(blocks.covered for blocks in layings)], dim=1)
    width = int(present.sum(dim=1).max()) if present.numel() else 0
    order = torch.argsort(~present, dim=1, stable=True)
    new_place = torch.empty_like(order)
    new_place.scatter_(1, order, torch.arange(present.shape[1], device=device).expand(rows, -1))
    flat = new_place + torch.arange(rows, device=device)[:, None] * width
    clean_place, *noisy_places = flat.split(length, dim=1)

    def merged(clean_part: torch.Tensor, noisy_parts: list[torch.Tensor], fill: int) -> torch.Tensor:
        both = torch.where(present, torch.cat([clean_part, *noisy_parts], dim=1), fill)
        return both.gather(1, order[:, :width])

    target_row, target_column = response.nonzero(as_tuple=True)
    clean_number = torch.full((rows, length), -1, dtype=torch.int64, device=device)
    clean_number[response] = torch.arange(target_row.numel(), device=device)
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    noisy: dict[str, list[torch.Tensor]] = {
        "index": [nothing],
        "target": [nothing],
        "pair": [nothing],
        "distance": [nothing],
    }
    for blocks, place in zip(layings, noisy_places, strict=True):
        row, column = blocks.predicts.nonzero(as_tuple=True)
        noisy["index"].append(place[row, column])
        noisy["target"].append(input_ids[row, column + shift])
        noisy["pair"].append(clean_number[row, column + shift])
        noisy["distance"].append(position_ids[row, column] + shift - blocks.start_position[row, column] + 1)
    by_target = torch.cat(noisy["pair"]).argsort(stable=True)
    return Streams(
        input_ids=merged(
            torch.where(real, input_ids, mask_token_id),
            [torch.where(blocks.masked, mask_token_id, input_ids) for blocks in layings],
            mask_token_id,
        ),
        position_ids=merged(position_ids, [position_ids] * phases, 0),
        example=merged(example, [example] * phases, 0),
        # Padding carries limit 1: it sees the padding at position 0, hence something.
        limit=merged(position_ids + 1, [blocks.start_position for blocks in layings], 1),
        # Blocks of different layings never share a number.
        block=merged(
            torch.zeros_like(example),
            [blocks.start + 1 + number * length for number, blocks in enumerate(layings)],
            0,
        ),
        bidirectional=gaps.attention == "bidirectional",
        clean_index=clean_place[target_row, target_column - 1],
        clean_target=input_ids[target_row, target_column],
        noisy_index=torch.cat(noisy["index"])[by_target],
        noisy_target=torch.cat(noisy["target"])[by_target],
        pair=torch.cat(noisy["pair"])[by_target],
        distance=torch.cat(noisy["distance"])[by_target],
    )
