"""How many masks to place: as many as pay in tokens per second, on this machine, at this load.

A mask is worth the probability that its guess will be committed (in exact mode by the next forward, in
lossy mode by this one), and costs what a forward costs with one token more. While a machine waits for memory
a token costs next to nothing, and every mask pays; when it computes, few pay, or none. In exact mode the text
is the same whatever is chosen (SPEC 4).
"""

from __future__ import annotations

import time
import weakref
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from mars_lm.decoding.forward import Feed, Forward
from mars_lm.settings import RULES, DecodingSettings

Ints = np.ndarray

# A mask is placed if its worth reaches a threshold: the one that promises most tokens a second.
THRESHOLDS = np.array([2.0, 0.8, 0.65, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.0])
# Where no mask pays nothing is learnt about drafts: so often one row drafts all the same.
PROBE_EVERY = 32
# Where none pays, the next so many steps of the same rows place none either, without choosing anew.
REST = 3
# What a width costs is learnt by using it. So the next narrower or wider one is used now and then, the more
# rarely the more it seems to lose (a share of the step's tokens), and never beyond `DEAR`: else a size that
# once seemed slow would not be seen again. `REGRET` of all tokens is what this may lose.
REGRET, DEAR = 0.005, 0.4
# Kinds of drafts, whose fates are counted apart: of exact and of lossy mode, by rule, and by τ in steps.
TAU_STEP, TAU_STEPS = 0.05, 32
LOSSY = TAU_STEPS * len(RULES)  # the first of lossy mode
KINDS = 2 * LOSSY
# What is believed of a draft before any was seen, and how many seen ones weigh as much as this belief.
PRIOR, PRIOR_WEIGHT = 0.65, 8.0
# Tokens of the forwards that are timed at the start; their costs need not lie on a line.
MEASURED_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 64)
ROUNDS, ROUND_SECONDS = 4, 0.25  # so often each, but a slow machine's start shall not wait: then twice
MEMORY = 400.0  # drafts after which older ones count half
SURE = 10  # parts of the probabilities that are told apart
FAR = 0.1  # so much of what a step's time was off by counts for the sizes far from its own
PASS_APART = 0.5  # what a pass more adds to the distance of two sizes, which is their ratio's logarithm


# 1, 2, 3, 4, 6, 8, 12, … 24576 tokens: beside a long prompt, too, a mask has its price.
CURVE = np.array([1.0, *(2.0**i * k for i in range(1, 15) for k in (1, 1.5))])


@lru_cache(maxsize=64)
def _sizes(tokens_a_pass: int) -> np.ndarray:
    """The numbers of tokens whose costs are kept: `CURVE`, and both sides of what another pass costs."""
    edges = [float(tokens_a_pass * i + side) for i in range(1, 5) for side in (0, 1)] if tokens_a_pass else []
    return np.unique(np.concatenate([CURVE, edges]))


@lru_cache(maxsize=256)
def _nearness(tokens: int, tokens_a_pass: int) -> tuple[np.ndarray, np.ndarray]:
    """How much a step of so many tokens tells about each of the `_sizes`, and how far it counts as one seen.

    The sizes beside it drift along, less so beyond a pass's end, and far ones a little: more rows, a longer
    context or a busy machine slow all, and what a mask costs is the difference of two sizes, of which one may
    not have been seen since.
    """
    sizes = _sizes(tokens_a_pass)
    distance = np.abs(np.log(sizes / tokens))
    if tokens_a_pass:
        distance += PASS_APART * (np.ceil(sizes / tokens_a_pass) != np.ceil(tokens / tokens_a_pass))
    near = np.exp(-2 * distance)
    return np.maximum(near, FAR), near**2


class ForwardCost:
    """Seconds of a forward by its number of tokens: measured at a few sizes, refined by every step.

    Args:
        seconds: by number of tokens.
        tokens_a_pass: the `Forward`'s.
    """

    def __init__(self, seconds: dict[int, float], tokens_a_pass: int = 0) -> None:
        sizes = sorted(seconds)
        self._tokens_a_pass = tokens_a_pass
        self.tokens = _sizes(tokens_a_pass)
        known = np.array([seconds[size] for size in sizes])
        # Past the largest measured size the last slope goes on.
        slope = (known[-1] - known[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else 0.0
        beyond = np.maximum(self.tokens - sizes[-1], 0) * max(slope, 0.0)
        self.seconds = np.interp(self.tokens, sizes, known) + beyond
        self._seen = np.full(len(self.tokens), 2.0)  # steps of about this size; the start counts as two

    def __call__(self, tokens: Any) -> Any:
        """Seconds of forwards with so many tokens: a number or an array, whole or not."""
        return np.interp(tokens, self.tokens, self.seconds)

    def learn(self, tokens: int, seconds: float) -> None:
        """One step took so long. A step that was held up by something else counts as a slow one, not more."""
        expected = float(self(tokens))
        drift = min(seconds / expected, 2.0)
        near, as_seen = _nearness(max(tokens, 1), self._tokens_a_pass)
        # An average of the first ten, then of the latest.
        self.seconds *= 1 + (drift - 1) * near / np.minimum(self._seen + 1, 10.0)
        self._seen += as_seen


class AdaptiveWidth:
    """Chooses the mask groups of each step.

    Args:
        block_size: the trained B.
        cost: of the model's forward.
    Attributes:
        hits, tries: float [KINDS, B-1]: of the draft tokens at each distance whose predecessors held, how
            many held too (older ones count less).
        sure_hits, sure_tries: float [KINDS, SURE]: the same in exact mode, by the probability that the model
            gave the token when it guessed it.
    """

    def __init__(self, block_size: int, cost: ForwardCost) -> None:
        self.cost = cost
        self.hits = np.full((KINDS, block_size - 1), PRIOR * PRIOR_WEIGHT)
        self.tries = np.full((KINDS, block_size - 1), PRIOR_WEIGHT)
        centres = (np.arange(SURE) + 0.5) / SURE
        self.sure_hits = np.tile(centres * PRIOR_WEIGHT, (KINDS, 1))
        self.sure_tries = np.full((KINDS, SURE), PRIOR_WEIGHT)
        self._idle, self._allowance, self._wider = 0, 0.0, True
        self._rest, self._rested = 0, 0  # steps without a new choice, of so many rows

    def choose(
        self,
        groups: Ints,
        drafted: Ints,
        adapts: np.ndarray,
        clean: int,
        *,
        kinds: Ints | None = None,
        trusted: Ints | None = None,
        prompt: int = 0,
        rows: int | None = None,
        sure: np.ndarray | None = None,
    ) -> Ints:
        """The masks to place behind each draft prefix.

        Args:
            groups: int64 [R, K], the most that may be placed.
            drafted: int64 [R], the draft's length now.
            adapts: bool [R], the rows whose groups may be smaller.
            clean: tokens of the forward without masks.
            kinds: int64 [R], each row's `draft_kind`; None: all are of exact mode that drafts every guess.
            trusted: int64 [R], how many of its clean tokens came from masks (lossy rows); None: none.
            prompt: so many of these are there once, to prefill; the others are what a decoding step feeds.
            rows: rows that get a token from the forward; None: all R.
            sure: [R, B-1], the model's probability of each draft token; NaN or None: not known.
        Returns:
            int64 [R, K], between 0 and `groups`.
        """
        adapts = adapts & (groups.sum(axis=1) > 0)
        if not adapts.any():
            return groups
        own, j = groups[adapts], drafted[adapts]
        if self._rest and self._rested == len(own) and not j.any() and self._idle < PROBE_EVERY - 1:
            self._rest, self._idle = self._rest - 1, self._idle + 1
            self._allowance = min(self._allowance + REGRET, DEAR)
            return np.where(adapts[:, None], 0, groups)
        kind = np.zeros_like(j) if kinds is None else kinds[adapts]
        single = (self.hits / self.tries)[kind]  # [R, B-1] each holding if those before it do
        likely = _prefixes(single)  # of a draft that is still to be guessed
        if sure is not None:
            place = _bucket(sure[adapts])
            known = (self.sure_hits / self.sure_tries)[kind[:, None], place]
            single = np.where(place >= 0, known, single)
        now = _prefixes(single)  # of today's
        prefix = np.arange(own.shape[1])
        outcome = np.where(  # [R, K] that exactly k of the draft will hold
            prefix < j[:, None],
            now[:, prefix] - now[:, np.minimum(prefix + 1, now.shape[1] - 1)],
            np.where(prefix == j[:, None], now[:, prefix], 0.0),
        )
        depth = np.arange(1, int(own.max()) + 1)
        worth = outcome[:, :, None] * likely[:, None, depth]  # [R, K, D]
        worth = np.where(depth <= own[:, :, None], worth, -1.0)
        # The next forward feeds the drafts that these masks will leave, in the place of today's: in exact
        # mode all guesses, in lossy mode those that held.
        left = np.where((kind < LOSSY)[:, None, None], outcome[:, :, None], worth)
        each = np.array([np.ones(worth.size), worth.ravel(), left.ravel()])
        masks, gain, drafts = each @ (worth.reshape(-1, 1) >= THRESHOLDS)  # [T] all
        clean -= int(j.sum()) + (0 if trusted is None else int(trusted[adapts].sum()))
        tokens = clean + groups[~adapts].sum() + masks + drafts
        committed = (len(groups) if rows is None else rows) + gain
        # What a second is worth: the tokens that the rows commit in it while they only decode. A forward that
        # carries prompts too is long in any case: measured by its own rate, every mask would pay in it.
        seconds = self.cost(tokens)
        rate = (committed / (self.cost(tokens - prompt) if prompt else seconds)).max()
        promise = committed - rate * seconds
        best = self._nearby(int(np.argmax(promise)), promise / committed, masks)
        chosen = groups.copy()
        chosen[adapts] = (worth >= THRESHOLDS[best]).sum(axis=2)
        self._idle = 0 if masks[best] else self._idle + 1
        self._rest, self._rested = 0 if masks[best] else REST, len(own)
        if self._idle >= PROBE_EVERY:
            self._idle = 0
            row = int(np.flatnonzero(adapts)[np.random.default_rng(clean).integers(len(own))])
            chosen[row, drafted[row]] = groups[row, drafted[row]]
        return chosen

    def _nearby(self, best: int, promise: np.ndarray, masks: Ints) -> int:
        """The best threshold, or now and then, in turn, the next one with fewer or with more masks."""
        self._allowance = min(self._allowance + REGRET, DEAR)
        others = np.flatnonzero(masks > masks[best] if self._wider else masks < masks[best])
        other = int(others[0 if self._wider else -1]) if len(others) else best
        price = max(float(promise[best] - promise[other]), 16 * REGRET)
        worth_seeing = other != best and price <= DEAR
        if worth_seeing and self._allowance < price:
            return best  # not yet
        self._wider = not self._wider
        if not worth_seeing:
            return best
        self._allowance -= price
        return other

    def learn(self, kinds: Ints, offered: Ints, held: Ints, sure: np.ndarray | None = None) -> None:
        """So many of each row's offered tokens held, from the left: int64 [R] all.

        `sure`, as `choose` has it, is of the draft that was verified.
        """
        some = offered > 0
        if not some.any():
            return
        kinds, offered, held = kinds[some], offered[some], held[some]
        distance = np.arange(self.hits.shape[1])
        held_too = distance < held[:, None]
        tried = distance < np.minimum(held + 1, offered)[:, None]
        _count(self.hits, self.tries, kinds[:, None], distance, held_too, tried)
        if sure is None:
            return
        place = _bucket(sure[some])
        _count(self.sure_hits, self.sure_tries, kinds[:, None], place, held_too, tried & (place >= 0))


def _count(
    hits: np.ndarray, tries: np.ndarray, row: Ints, column: Ints, hit: np.ndarray, tried: np.ndarray
) -> None:
    """Add what was tried, and of it what hit, at [row, column] of both; older tries count less."""
    where = (row * hits.shape[1] + column)[tried]
    tries += np.bincount(where, minlength=tries.size).reshape(tries.shape)
    hits += np.bincount(where, hit[tried], minlength=hits.size).reshape(hits.shape)
    old = tries > MEMORY
    if old.any():
        hits[old] /= 2
        tries[old] /= 2


def _prefixes(single: np.ndarray) -> np.ndarray:
    """[R, B]: the probability that the first 0, 1, … B-1 all hold, from [R, B-1] of each."""
    likely = np.ones((single.shape[0], single.shape[1] + 1))
    np.cumprod(single, axis=1, out=likely[:, 1:])
    return likely


def _bucket(sure: np.ndarray) -> Ints:
    """Where tokens of such probabilities are counted: below SURE, and -1 for NaN."""
    known = ~np.isnan(sure)
    return np.where(known, np.minimum(np.where(known, sure, 0) * SURE, SURE - 1).astype(np.int64), -1)


def draft_kind(settings: DecodingSettings) -> int:
    """With which others' drafts a request's are counted, of `KINDS`: by mode, rule and rounded τ."""
    step = min(round(settings.tau / TAU_STEP), TAU_STEPS - 1)
    return (0 if settings.exact else LOSSY) + RULES.index(settings.rule) * TAU_STEPS + step


_costs: weakref.WeakKeyDictionary[Any, dict[Any, ForwardCost]] = weakref.WeakKeyDictionary()


@torch.inference_mode()
def forward_cost(model: Any, forward: Forward, slots: int) -> ForwardCost:
    """Measure a fresh forward's cost by size; one that was measured in this process is taken as it was left.

    Args:
        model: the Hugging Face model behind the forward.
        slots: how many tokens a row may hold.
    """
    known = _costs.setdefault(model, {})
    kind = (type(forward), forward.weights, torch.get_num_threads())
    if kind not in known:
        seconds: dict[int, float] = {}
        edge = forward.tokens_a_pass
        measured = sorted({*MEASURED_SIZES, edge, edge + 1} - {0})
        for done in range(ROUNDS):
            # The best of several rounds: the first touches its memory, and any may be held up; one after the
            # other, so that what holds up a size for a while does not spoil its every turn.
            if done >= 2 and sum(seconds.values()) > ROUND_SECONDS:
                break
            for size in sorted({min(size, slots) for size in measured}):
                feed = Feed.of_one_row(np.zeros(size, dtype=np.int64))
                begun = time.perf_counter()
                logits = forward.logits(forward.hidden(feed))
                float(logits[0, 0])  # a device may answer late
                seconds[size] = min(time.perf_counter() - begun, seconds.get(size, np.inf))
        known[kind] = ForwardCost(seconds, edge)
    return known[kind]
