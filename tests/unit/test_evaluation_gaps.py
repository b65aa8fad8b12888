"""The gap table on models whose answers are known by construction, and the AR share in closed form."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from mars_lm.evaluation.gaps import VIEWS, ar_shares, measure_gaps
from tiny import tiny_checkpoint

VOCABULARY, MASK = 64, 63
SURE = 4.0  # the logit of the word that a made-up model bets on; all others have 0


class MadeUp:
    """A model whose hidden states are its logits, as a rule says them.

    The rule gets ids [R, T], positions [R, T] and who sees whom [R, T, T], and gives the word that is bet on
    and the logit of the bet, [R, T] each.
    """

    config = None

    def __init__(self, rule):
        self.rule = rule

    def parameters(self):
        return iter(())

    def get_output_embeddings(self):
        return lambda hidden: hidden

    def base_model(self, input_ids, position_ids, attention_mask, use_cache):
        word, bet = self.rule(input_ids, position_ids, attention_mask[:, 0])
        logits = torch.zeros(*input_ids.shape, VOCABULARY)
        logits.scatter_(2, word[..., None] % MASK, bet.float()[..., None].expand(*word.shape, 1))
        return SimpleNamespace(last_hidden_state=logits)


def nats(bet: float, right: bool) -> float:
    """Cross entropy of a bet among all words but the mask."""
    log_z = math.log(math.exp(bet) + MASK - 1)
    return log_z - (bet if right else 0.0)


def counting_text(rows: int = 3, length: int = 33):
    """Token i of a row is i: whoever knows the position knows the text."""
    return [(list(range(length)), 1) for _ in range(rows)]


def measure(rule, block_size=4, text=None):
    return measure_gaps(
        MadeUp(rule), text or counting_text(), block_size=block_size, mask_token_id=MASK, batch_rows=2
    )


def test_a_model_that_only_reads_positions_loses_by_alignment_alone() -> None:
    def rule(ids, positions, seen):
        return positions + 1, torch.full(ids.shape, SURE)

    table = measure(rule)
    assert table["ar"]["nats"] == pytest.approx(nats(SURE, True), rel=1e-5)
    for name, view in table["views"].items():
        if view["alignment"] == "next":
            assert view["cost"] == pytest.approx(0.0, abs=1e-6), name
            assert view["agreement"] == 1.0, name
        else:  # it says the word after the one that is asked for
            assert view["cost"] == pytest.approx(SURE, rel=1e-5), name
            assert view["agreement"] == 0.0, name


def test_a_model_that_reads_the_token_before_loses_by_masking_alone_and_by_distance() -> None:
    def rule(ids, positions, seen):
        masked = ids == MASK
        return torch.where(masked, 0, ids + 1), torch.where(masked, 0.0, SURE)

    views = measure(rule)["views"]
    blind = math.log(MASK)  # a mask tells it nothing
    assert views["masking"]["nats_by_distance"][0] == pytest.approx(nats(SURE, True), rel=1e-5)
    assert views["masking"]["nats_by_distance"][1:] == pytest.approx([blind] * 3, rel=1e-5)
    assert views["masking"]["agreement_by_distance"][0] == 1.0
    assert views["masking"]["cost"] == pytest.approx(0.75 * (blind - nats(SURE, True)), rel=1e-5)
    assert views["none, one by one"]["cost"] == pytest.approx(0.0, abs=1e-6)
    assert views["attention"]["cost"] == pytest.approx(0.0, abs=1e-6)
    # In the order of confidence the token behind an open one is always the surest: left to right again.
    assert views["order"]["cost"] == pytest.approx(0.0, abs=1e-6)


def test_a_model_that_counts_what_it_sees_loses_by_attention_alone() -> None:
    def rule(ids, positions, seen):
        return seen.sum(dim=-1), torch.full(ids.shape, SURE)

    views = measure(rule)["views"]
    assert views["masking"]["cost"] == pytest.approx(0.0, abs=1e-6)
    assert views["order"]["cost"] == pytest.approx(0.0, abs=1e-6)
    # Both ways, each of a block's masks counts all of them, and only the last counts right.
    by_distance = views["masking + attention"]["nats_by_distance"]
    whole_blocks = measure(rule, block_size=2)["views"]["masking + attention"]
    assert by_distance[0] == pytest.approx(nats(SURE, True), rel=1e-5)
    assert by_distance[1] > nats(SURE, True) + 0.5 * SURE
    assert whole_blocks["cost"] == pytest.approx(0.0, abs=1e-6)  # one mask: itself the last
    assert views["attention"]["agreement"] < 0.8


def test_order_costs_what_is_said_before_its_time() -> None:
    """Surer of far tokens than of near ones, and wrong unless the token before is open."""

    def rule(ids, positions, seen):
        masked = ids == MASK
        return torch.where(masked, 0, ids + 1), torch.where(masked, 2 * SURE, SURE)

    views = measure(rule)["views"]
    assert views["none, one by one"]["cost"] == pytest.approx(0.0, abs=1e-6)
    # Behind masks the bets are higher, and wrong. The second token is opened first (the leftmost of equals),
    # so the third is asked behind an open one; the fourth, still behind a mask, is opened before it.
    wrong, right = nats(2 * SURE, False), nats(SURE, True)
    assert views["order"]["nats_by_distance"] == pytest.approx([right, wrong, right, wrong], rel=1e-5)
    assert views["order"]["agreement_by_distance"] == [1.0, 0.0, 1.0, 0.0]


def test_one_by_one_left_to_right_is_ar_itself_on_a_transformer() -> None:
    checkpoint = tiny_checkpoint()
    generator = torch.Generator().manual_seed(0)
    text = [
        (torch.randint(5, 300, (length,), generator=generator).tolist(), start)
        for length, start in ((30, 1), (17, 5), (24, 12))
    ]
    table = measure_gaps(
        checkpoint.model, text, block_size=4, mask_token_id=checkpoint.mars.mask_token_id, batch_rows=2
    )
    assert table["ar"]["predictions"] == sum(len(ids) - start for ids, start in text)
    none = table["views"]["none, one by one"]
    assert none["cost"] == pytest.approx(0.0, abs=1e-4)
    assert none["agreement"] == 1.0
    for view in VIEWS:
        kept = table["views"][view.name]
        assert kept["predictions"] == table["ar"]["predictions"]
        assert (kept["cost"] == pytest.approx(0.0, abs=1e-4)) == (view.name == "none, one by one")


@pytest.mark.parametrize("block_size", [2, 4, 8, 16])
def test_ar_share_is_the_closed_form(block_size: int) -> None:
    # Long rows: the blocks cut at a row's ends weigh little.
    [line] = ar_shares([(list(range(4001)), 1)] * 2, [block_size])
    assert line["with_sft_window"] == pytest.approx(line["closed_form_with"], abs=2e-3)
    assert line["closed_form_with"] == pytest.approx(block_size / (2 * block_size - 1))
    assert line["without_sft_window"] == 0.0
    assert line["without_sft_paper"] == pytest.approx(1 / block_size, abs=2e-3)
    assert line["with_sft_paper"] == pytest.approx((1 + 1 / block_size) / 2, abs=2e-3)
    assert line["with_sft_window"] > 0.5
