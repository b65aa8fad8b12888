"""The two streams: who sees whom, what is predicted from where; that it is AR, and what decoding computes."""

from __future__ import annotations

import collections
import itertools

import pytest
import torch

from mars_lm.errors import MarsError
from mars_lm.training.streams import IGNORE, Gaps, Streams, build
from tiny import FAMILIES, tiny_model
from training_tools import BLOCK_DIFFUSION, MASK, collate, example, row

# Packed rows, padded rows, several responses in a row, a response shorter than a block, one token of it, one
# with no prompt at all, and a prompt without a response.
ROWS = [
    row(example(1, 5, 11)),
    row(example(2, 3, 4), example(3, 6, 1), example(4, 2, 9)),
    row(example(5, 4, 6, 3, 7, 2, 1)),
    row(example(6, 1, 2), example(7, 0, 5)),
    row(example(8, 7)),
]


def streams_of(rows, *, mask_token_id=MASK, **options) -> Streams:
    batch = collate(rows)
    return build(
        batch["input_ids"],
        batch["labels"],
        batch["example"],
        batch["position_ids"],
        mask_token_id=mask_token_id,
        **options,
    )


def by_the_sentences(streams: Streams, block_size: int, layout: str) -> list[list[list[bool]]]:
    """SPEC 2's sentences on attention, one pair of tokens after the other."""

    examples, positions, blocks = (
        getattr(streams, name).tolist() for name in ("example", "position_ids", "block")
    )
    starts: dict[tuple[int, int, int], int] = {}
    for at in itertools.product(*map(range, streams.input_ids.shape)):
        block = (at[0], examples[at[0]][at[1]], blocks[at[0]][at[1]])
        position = positions[at[0]][at[1]]
        # window: a block holds B-1 masks at positions s … s+B-2, so its first mask stands at s.
        # paper: blocks are aligned to position 0.
        start = position if layout == "window" else position - position % block_size
        starts[block] = min(start, starts.get(block, start))

    def start_of(row: int, token: int) -> int:
        return starts[row, examples[row][token], blocks[row][token]]

    def sees(row: int, query: int, key: int) -> bool:
        if examples[row][query] != examples[row][key]:
            return False  # examples packed into one row never see each other
        if examples[row][key] == 0:
            return False  # padding is seen by nobody
        query_position, key_position = positions[row][query], positions[row][key]
        query_noisy, key_noisy = blocks[row][query] > 0, blocks[row][key] > 0
        if not query_noisy and not key_noisy:
            return key_position <= query_position  # clean -> clean: causal
        if not query_noisy and key_noisy:
            return False  # clean never sees noisy
        if query_noisy and not key_noisy:
            return key_position < start_of(row, query)  # only clean positions before the block's start
        own = start_of(row, query) == start_of(row, key)  # own block only, causal or bidirectional
        return own and (streams.bidirectional or key_position <= query_position)

    rows, length = streams.input_ids.shape
    return [
        [[sees(row, query, key) for key in range(length)] for query in range(length)] for row in range(rows)
    ]


@pytest.mark.parametrize("layout", ["window", "paper"])
@pytest.mark.parametrize("block_size", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "gaps", [Gaps(), Gaps(attention="bidirectional"), BLOCK_DIFFUSION], ids=["mars", "both-ways", "diffusion"]
)
def test_attention_is_what_the_specs_sentences_say(layout, block_size, gaps):
    for visit in range(3):
        streams = streams_of(ROWS, block_size=block_size, layout=layout, gaps=gaps, visit=visit)
        expected = torch.tensor(by_the_sentences(streams, block_size, layout))
        mask = streams.dense_mask()[:, 0]
        real = streams.example > 0
        assert torch.equal(mask & real[:, :, None], expected)
        # Padding sees something, so that no softmax runs over nothing, and none of it is an example's.
        assert mask.any(dim=-1).all()
        assert not (mask & ~real[:, :, None] & real[:, None, :]).any()


@pytest.mark.parametrize("layout", ["window", "paper"])
def test_flex_attentions_block_mask_is_the_same_relation(layout):
    from torch.nn.attention.flex_attention import flex_attention

    streams = streams_of(ROWS, block_size=4, layout=layout)
    rows, length = streams.input_ids.shape
    query, key, value = torch.randn(3, rows, 2, length, 16, generator=torch.Generator().manual_seed(0))
    block_mask = streams.block_mask()
    at = torch.arange(length)
    relation = torch.stack(
        [block_mask.mask_mod(torch.tensor(r), None, at[:, None], at[None, :]) for r in range(rows)]
    )
    assert torch.equal(relation, streams.dense_mask()[:, 0])
    flex = flex_attention(query, key, value, block_mask=block_mask)
    dense = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=streams.dense_mask()
    )
    torch.testing.assert_close(flex, dense, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_size", [2, 3, 4, 8])
def test_window_blocks_tile_each_response_from_a_phase(block_size):
    for visit, single in itertools.product(range(8), [example(1, 5, 11), example(5, 4, 6, 3, 7, 2, 1)]):
        streams = streams_of([row(single)], block_size=block_size, visit=visit)
        noisy = streams.block[0] > 0
        assert (streams.input_ids[0][noisy] == MASK).all()  # all of a block is masked
        blocks = collections.defaultdict(list)
        for block, position in zip(
            streams.block[0][noisy].tolist(), streams.position_ids[0][noisy].tolist(), strict=True
        ):
            blocks[block].append(position)
        first = {at for at in single.targets if at - 1 not in single.targets}
        last = {at for at in single.targets if at + 1 not in single.targets}
        for positions in blocks.values():
            assert positions == list(range(positions[0], positions[0] + len(positions)))
            whole = len(positions) == block_size - 1
            at_an_end = positions[0] in first or positions[-1] + 1 in last
            assert whole or (len(positions) < block_size - 1 and at_an_end)
        # Each response token is a block's first, which AR predicts, or predicted by the mask before it.
        predicted = (streams.position_ids[0][streams.noisy_index] + 1).tolist()
        starts = set(single.targets) - set(predicted)
        assert len(predicted) == len(set(predicted))
        for at, following in itertools.pairwise(sorted(starts)):
            if {*range(at, following)} <= set(single.targets):
                assert following - at <= block_size
        assert first <= starts


@pytest.mark.parametrize(
    ("layout", "gaps"),
    [
        ("window", Gaps()),
        ("paper", Gaps()),
        ("window", Gaps(alignment="same")),
        ("paper", BLOCK_DIFFUSION),
        ("window", Gaps(masking="random", attention="bidirectional")),
    ],
)
def test_predictions_are_of_the_responses_own_tokens(layout, gaps):
    streams = streams_of(ROWS, block_size=4, layout=layout, gaps=gaps)
    batch = collate(ROWS)
    flat = {
        name: getattr(streams, name).flatten() for name in ("input_ids", "position_ids", "example", "block")
    }
    row_of = torch.arange(len(ROWS)).repeat_interleave(streams.input_ids.shape[1])

    def target_positions(index, shift):
        return [
            (int(row_of[i]), int(flat["example"][i]), int(flat["position_ids"][i]) + shift) for i in index
        ]

    labelled = {
        (r, int(batch["example"][r, c]), int(batch["position_ids"][r, c])): int(batch["labels"][r, c])
        for r, c in (batch["labels"] != IGNORE).nonzero().tolist()
    }
    # The clean loss is AR's: every supervised token once, from the clean token before it.
    clean = target_positions(streams.clean_index, 1)
    assert sorted(clean) == sorted(labelled)
    assert [labelled[at] for at in clean] == streams.clean_target.tolist()
    assert (flat["block"][streams.clean_index] == 0).all()

    noisy = target_positions(streams.noisy_index, 1 if gaps.alignment == "next" else 0)
    assert set(noisy) <= set(labelled)
    assert len(set(noisy)) == len(noisy)
    assert [labelled[at] for at in noisy] == streams.noisy_target.tolist()
    assert (flat["block"][streams.noisy_index] > 0).all()
    if layout == "paper" and gaps == Gaps():
        assert sorted(noisy) == sorted(labelled)  # logits shifted right by one over the whole noisy stream
    # The teacher of a noisy prediction is the clean one of the same target.
    assert [clean[p] for p in streams.pair] == noisy
    assert (streams.pair.diff() > 0).all()
    if gaps.alignment == "same":
        assert (flat["input_ids"][streams.noisy_index] == MASK).all()


def test_the_papers_noisy_stream_keeps_prompts_and_masks_responses():
    single = example(1, 5, 11)
    streams = streams_of([row(single)], block_size=4, layout="paper")
    assert streams.input_ids.tolist() == [single.ids + single.ids[:5] + [MASK] * 11]
    assert streams.position_ids.tolist() == [[*range(16), *range(16)]]
    # A block's first token is predicted by the last mask of the block before it, at distance B+1.
    targets = dict(
        zip((streams.position_ids[0][streams.noisy_index] + 1).tolist(), streams.distance, strict=True)
    )
    assert {at: int(distance) for at, distance in targets.items()} == {
        at: 2 + (at - 1) % 4 for at in range(5, 16)
    }


def test_the_window_layout_is_as_long_as_the_spec_says():
    prompt, response, block_size = 8, 24, 4
    lengths = []
    for visit in range(40):
        streams = streams_of([row(example(3, prompt, response))], block_size=block_size, visit=visit)
        lengths.append(streams.input_ids.shape[1])
    # P + R + R(B-1)/B from phase 0; another phase cuts one block in two.
    whole = prompt + response + response * (block_size - 1) // block_size
    assert set(lengths) == {whole, whole - 1}


@pytest.mark.parametrize("block_size", [2, 4, 5])
def test_phases_cover_every_position_at_every_distance_evenly(block_size):
    seen = collections.Counter()
    visits, prompt, response = 400, 3, 12
    single = row(example(9, prompt, response))
    for visit in range(visits):
        streams = streams_of([single], block_size=block_size, visit=visit)
        targets = (streams.position_ids[0][streams.noisy_index] + 1 - prompt).tolist()
        seen.update(zip(targets, streams.distance.tolist(), strict=True))
    reachable = {
        (offset, distance)
        for offset in range(response)
        for distance in range(2, min(block_size, offset + 1) + 1)
    }
    assert set(seen) == reachable
    for offset, distance in reachable:
        if offset >= block_size:
            share = seen[offset, distance] / visits
            assert abs(share - 1 / block_size) < 5 * (0.25 / visits) ** 0.5, (offset, distance, share)


def test_seeds_visits_and_responses_draw_their_own_phases():
    def starts(**options):
        streams = streams_of([row(example(9, 3, 20, 3, 20))], block_size=8, **options)
        return tuple(streams.block[0].tolist())

    assert len({starts(seed=seed) for seed in range(12)}) > 4
    assert len({starts(visit=visit) for visit in range(12)}) > 4
    assert starts(seed=1, visit=2) == starts(seed=1, visit=2)

    def first_blocks(visit):
        """How many masks the first block of each response has; a block of one token has none."""
        streams = streams_of([row(example(9, 3, 20, 3, 20))], block_size=8, visit=visit)
        noisy = streams.block[0] > 0
        for first in (3, 26):
            at = (noisy & (streams.position_ids[0] == first)).nonzero()
            yield int((streams.block[0] == streams.block[0][at[0, 0]]).sum()) if len(at) else 0

    assert sum(len(set(first_blocks(visit))) > 1 for visit in range(20)) > 5


@pytest.mark.parametrize(
    ("layout", "gaps"),
    [("window", Gaps()), ("paper", Gaps()), ("paper", BLOCK_DIFFUSION)],
    ids=["window", "paper", "diffusion"],
)
def test_an_example_trains_the_same_predictions_wherever_it_stands(layout, gaps):
    """Alone, padded, packed, in another row or batch: the phase and the masks are its own."""
    singles = [example(seed, 3 + seed, 5 + 2 * seed) for seed in range(1, 5)]

    def predictions(rows):
        streams = streams_of(rows, block_size=4, layout=layout, gaps=gaps, seed=7, visit=3)
        flat = [getattr(streams, name).flatten() for name in ("input_ids", "position_ids", "limit")]
        return sorted(
            (*(int(part[index]) for part in flat), int(target), int(distance))
            for index, target, distance in zip(
                streams.noisy_index, streams.noisy_target, streams.distance, strict=True
            )
        )

    alone = sorted(itertools.chain.from_iterable(predictions([row(single)]) for single in singles))
    assert alone == predictions([row(single) for single in singles])
    assert alone == predictions([row(single) for single in reversed(singles)])
    assert alone == predictions([row(*singles)])
    assert alone == predictions([row(singles[2], singles[0]), row(singles[3], singles[1])])


def test_random_masking_masks_at_least_one_token_of_each_block_and_not_always_all():
    shares = []
    for visit in range(50):
        streams = streams_of(
            [row(example(1, 8, 16))], block_size=4, layout="paper", gaps=BLOCK_DIFFUSION, visit=visit
        )
        noisy = streams.block[0] > 0
        masked = streams.input_ids[0][noisy] == MASK
        assert not masked[:8].any()
        assert (masked[8:].reshape(4, 4).sum(dim=1) >= 1).all()
        shares.append(masked[8:].float().mean().item())
    assert min(shares) < 0.5 < max(shares)
    assert 0.4 < sum(shares) / len(shares) < 0.8


def test_without_a_noisy_stream_there_is_ar_alone():
    streams = streams_of(ROWS, block_size=4, phases=0)
    assert streams.noisy_index.numel() == 0
    assert (streams.block == 0).all()
    assert streams.input_ids.shape[1] == max(len(r["input_ids"]) for r in ROWS)


@pytest.mark.parametrize("gaps", [Gaps(), BLOCK_DIFFUSION], ids=["mars", "diffusion"])
@pytest.mark.parametrize("phases", [2, 4])
def test_several_phases_are_so_many_noisy_streams_that_do_not_see_each_other(phases, gaps):
    model = tiny_model("llama", rows=64)
    one = streams_of(ROWS, block_size=4, gaps=gaps)
    many = streams_of(ROWS, block_size=4, gaps=gaps, phases=phases)
    assert (many.pair.diff() >= 0).all()
    block = many.block.flatten()[many.noisy_index]
    first = (block - 1) // collate(ROWS)["input_ids"].shape[1] == 0  # those of the first laying
    for name in ("noisy_target", "pair", "distance"):
        assert torch.equal(getattr(many, name)[first], getattr(one, name))
    logits, alone = (logits_of(model, streams).flatten(0, 1) for streams in (many, one))
    torch.testing.assert_close(logits[many.clean_index], alone[one.clean_index])
    torch.testing.assert_close(logits[many.noisy_index[first]], alone[one.noisy_index])
    if gaps == Gaps() and phases == 4:  # B phases train every position at every distance in one visit
        seen = collections.defaultdict(set)
        for target, distance in zip(many.pair.tolist(), many.distance.tolist(), strict=True):
            seen[target].add(distance)
        reach = [max(seen[target], default=1) for target in range(many.clean_target.numel())]
        assert [seen[target] for target in range(len(reach))] == [set(range(2, far + 1)) for far in reach]
        assert reach.count(4) > reach.count(3) > 0  # a response's first tokens have no far distances


def test_a_gap_that_is_no_gap_is_refused():
    with pytest.raises(
        MarsError, match=r"gap_attention is 'sideways', expected one of causal, bidirectional"
    ):
        Gaps(attention="sideways")  # type: ignore[arg-type]


def logits_of(model, streams: Streams) -> torch.Tensor:
    with torch.no_grad():
        return model(
            input_ids=streams.input_ids,
            position_ids=streams.position_ids,
            attention_mask=streams.dense_mask(),
            use_cache=False,
        ).logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["window", "paper"])
@pytest.mark.parametrize("gaps", [Gaps(), BLOCK_DIFFUSION], ids=["mars", "diffusion"])
def test_clean_logits_are_plain_ars(family, layout, gaps):
    model = tiny_model(family, rows=64)
    singles = [example(1, 5, 11), example(2, 3, 4), example(3, 6, 1), example(4, 2, 9, 3, 4)]
    rows = [row(singles[0]), row(singles[1], singles[2]), row(singles[3])]
    streams = streams_of(rows, block_size=4, layout=layout, gaps=gaps)
    logits = logits_of(model, streams)
    for row_number, number, single in (
        (0, 1, singles[0]),
        (1, 1, singles[1]),
        (1, 2, singles[2]),
        (2, 1, singles[3]),
    ):
        with torch.no_grad():
            plain = model(input_ids=torch.tensor([single.ids])).logits[0]
        mine = (streams.example[row_number] == number) & (streams.block[row_number] == 0)
        torch.testing.assert_close(logits[row_number][mine], plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block_size", [2, 4, 5])
def test_window_noisy_logits_are_what_decoding_computes_at_the_same_state(block_size):
    """SPEC 3's forward at n = s: the clean tokens before s, then B-1 masks at positions s … s+B-2."""
    model = tiny_model("llama", rows=64)
    singles = [example(1, 5, 11), example(2, 3, 4), example(4, 2, 9, 3, 4)]
    packed = [row(singles[0]), row(singles[1], singles[2])]
    places = [(0, 1, singles[0]), (1, 1, singles[1]), (1, 2, singles[2])]
    compared = collections.Counter()
    for visit in range(6 * block_size):
        streams = streams_of(packed, block_size=block_size, visit=visit)
        logits = logits_of(model, streams)
        for row_number, number, single in places:
            mine = (streams.example[row_number] == number) & (streams.block[row_number] > 0)
            for block in streams.block[row_number][mine].unique().tolist():
                at = ((streams.block[row_number] == block) & mine).nonzero()[:, 0]
                start = int(streams.position_ids[row_number][at[0]])
                with torch.no_grad():
                    state = single.ids[:start] + [MASK] * (block_size - 1)
                    decoded = model(input_ids=torch.tensor([state])).logits[0]
                torch.testing.assert_close(
                    logits[row_number][at], decoded[start : start + len(at)], rtol=1e-4, atol=1e-4
                )
                compared.update((id(single), start + j + 1, j + 2) for j in range(len(at)))
    # Every position of the longest response at every distance that it can have.
    assert {(offset, distance) for key, offset, distance in compared if key == id(singles[0])} == {
        (5 + offset, distance)
        for offset in range(11)
        for distance in range(2, min(block_size, offset + 1) + 1)
    }
