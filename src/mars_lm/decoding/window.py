"""A batch of requests -> one forward's ids, positions, masks; its logits -> committed tokens (SPEC 3 to 5).

All bookkeeping is integer arrays over the rows, on the CPU. Letters as in the SPEC: n committed tokens, m of
them in the cache, j draft tokens behind them. In a row's run of tokens, position and slot agree for committed
and draft tokens; masks take the slots behind (void after the forward) and keep their true positions.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from mars_lm.decoding.acceptance import accepted_run, passes
from mars_lm.decoding.candidates import NONE_LEFT, Wishes
from mars_lm.decoding.forward import Feed, Forward
from mars_lm.decoding.verification import agreeing_prefix
from mars_lm.decoding.width import AdaptiveWidth

Ints = np.ndarray


class Rows:
    """The state of every row, one array entry each; an entry means something while its row is active."""

    def __init__(self, rows: int, length: int, vocabulary: int, masks: int) -> None:
        self.active = np.zeros(rows, dtype=bool)
        self.tokens = np.zeros(
            (rows, length), dtype=np.int64
        )  # slot = position; the draft behind the committed
        self.prompt = np.zeros(rows, dtype=np.int64)  # length of the prompt
        self.length = np.zeros(rows, dtype=np.int64)  # n
        self.cached = np.zeros(rows, dtype=np.int64)  # m; of a row that has ended: entries still there
        self.drafted = np.zeros(rows, dtype=np.int64)  # j
        self.limit = np.zeros(rows, dtype=np.int64)  # the n that ends the row
        self.fence = np.zeros(rows, dtype=np.int64)  # the n that the row may not pass for now
        self.masks = np.zeros(rows, dtype=np.int64)  # masks a group, B - 1; 0 in one-token mode
        self.exact = np.zeros(rows, dtype=bool)
        self.recovery = np.zeros(rows, dtype=bool)
        self.adaptive = np.zeros(rows, dtype=bool)
        self.offered = np.zeros(rows, dtype=np.int64)  # masks that the draft came from, those that failed too
        self.sure = np.full((rows, masks), np.nan)  # the model's own probability of each draft token
        self.kind = np.zeros(rows, dtype=np.int64)  # which drafts the row's are like: `width.draft_kind`
        self.rule = np.zeros(rows, dtype=np.int8)
        self.tau = np.zeros(rows, dtype=np.float64)
        self.wishes = Wishes(rows, vocabulary)


@dataclasses.dataclass
class Window(Feed):
    """What one forward feeds of R rows, and where in the flat list of N tokens it lies.

    A row's run: its clean tokens (committed ones that the cache lacks, then the draft), then its mask groups.
    Group k sits behind the first k draft tokens and sees them, the committed tokens and itself: whichever
    prefix turns out right, its group has seen nothing wrong. Without recovery there is only the group behind
    the whole draft, which is SPEC 4.
    """

    ends: np.ndarray  # bool [R]: the run reaches the committed tokens' end, so the forward yields tokens
    clean: Ints  # [R] clean tokens among them
    groups: Ints  # [R, K] masks of the group behind each draft prefix


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a token and those of the best ones, at temperature 1 and without penalties."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclasses.dataclass
class Commit:
    """What one forward committed, over the R' rows of the window that reached their end."""

    rows: Ints  # [R']
    tokens: Ints  # [R', W], of which
    count: Ints  # [R'] are committed
    stopped: np.ndarray  # bool [R']: the last one is an end token
    full: np.ndarray  # bool [R']: the budget is used up
    broken: np.ndarray  # bool [R']: the logits were no numbers; nothing is committed
    stuck: np.ndarray  # bool [R']: behind what was committed, the row's wishes leave no token to choose
    masks: Ints  # [R'] that the forward held of the row
    rejected: Ints  # [R'] draft tokens that AR did not confirm
    offered: Ints  # [R'] masks whose guesses could have held: in exact mode those before the draft
    held: Ints  # [R'] of these, from the left: AR confirmed them, or in lossy mode they passed the rule
    sure: np.ndarray  # [R', B-1] the model's probability of each token of the draft that was verified, or NaN
    logprobs: dict[int, list[TokenLogprob]]  # of the committed tokens, by index in `rows`; for who asked


def lay_out(
    state: Rows, mask_token_id: int, prefill_chunk: int, width: AdaptiveWidth | None = None
) -> Window:
    """Choose what each row feeds into the next forward.

    Args:
        state: the rows; mask_token_id: the token that stands at unknown positions.
        prefill_chunk: the most prompt tokens of all rows together; rows that get none wait.
        width: says how many of the masks that could be placed are; None: all.
    """
    rows = np.flatnonzero(state.active & (state.length < state.fence))
    pending = state.length[rows] - state.cached[rows]
    if pending.sum() > prefill_chunk:  # rows that decode are always served; prompts share the chunk in order
        prefill = np.where(state.cached[rows] < state.prompt[rows], pending, 0)
        room = np.maximum(prefill_chunk - (np.cumsum(prefill) - prefill), 0)
        pending = np.where(prefill > 0, np.minimum(pending, room), pending)
        rows, pending = rows[pending > 0], pending[pending > 0]
    n, m, j = state.length[rows], state.cached[rows], state.drafted[rows]
    ends = m + pending == n

    # How many masks behind each draft prefix: no more than could still be committed. A group behind k tokens
    # drafts what follows n+k, and in exact mode the last token of the budget is AR's, never a draft.
    prefix = np.arange(j.max(initial=0) + 1)
    exact = state.exact[rows]
    end = np.minimum(state.limit, state.fence)[rows]
    room = end[:, None] - n[:, None] - prefix - 1 - exact[:, None]
    behind = (prefix == j[:, None]) | (state.recovery[rows, None] & (prefix < j[:, None]))
    groups = np.where(behind & ends[:, None], np.minimum(state.masks[rows, None], np.maximum(room, 0)), 0)

    if width is not None:
        # There once, that is, until the row's first token; without a cache, later forwards feed it all again.
        prompt = np.where(n == state.prompt[rows], pending - ends, 0)
        # In lossy mode what the last masks gave is committed, and fed by this forward, as a draft would be.
        trusted = np.where(exact | (n == state.prompt[rows]), 0, np.minimum(pending - 1, state.masks[rows]))
        groups = width.choose(
            groups,
            j,
            state.adaptive[rows],
            int((pending + j).sum()),
            kinds=state.kind[rows],
            trusted=trusted,
            prompt=int(prompt.sum()),
            rows=int(ends.sum()),
            sure=state.sure[rows],
        )

    # A part is a row's clean tokens or one of its groups; offsets within the part give all the rest.
    clean = pending + j
    sizes = np.concatenate([clean[:, None], groups], axis=1)
    starts = np.concatenate([m[:, None], n[:, None] + prefix], axis=1)  # a part's first position
    flat_sizes = sizes.ravel()
    total = int(flat_sizes.sum())
    part = np.repeat(np.arange(flat_sizes.size), flat_sizes)
    index = np.arange(total)
    offset = index - (np.cumsum(flat_sizes) - flat_sizes)[part]
    row, is_mask = part // sizes.shape[1], part % sizes.shape[1] > 0
    start = starts.ravel()[part]
    position = start + offset
    per_row = sizes.sum(axis=1)
    first = np.cumsum(per_row) - per_row
    slot = (m - first)[row] + index
    ids = np.where(is_mask, mask_token_id, state.tokens[rows[row], np.where(is_mask, 0, position)])
    return Window(
        rows=rows,
        ends=ends,
        width=per_row,
        clean=clean,
        groups=groups,
        input_ids=ids,
        position_ids=position,
        slots=slot,
        sees_before=np.where(is_mask, start, slot + 1),
        sees_from=np.where(is_mask, slot - offset, slot),
    )


class Decoder:
    """From a window's hidden states to committed tokens and the next draft.

    Args:
        model: gives the logits; mask_token_id: never a candidate (None for a model without one).
    """

    def __init__(self, model: Forward, mask_token_id: int | None) -> None:
        self.model, self.mask_token_id = model, mask_token_id

    def commit(self, state: Rows, window: Window, hidden: Tensor) -> Commit:
        """Verify, accept and commit; leaves `state` ready for the next forward.

        Args:
            hidden: [N, hidden] of the window's tokens.
        """
        state.cached[window.rows] += np.where(window.ends, 0, window.clean)  # chunks of prompts: no logits
        pick = np.flatnonzero(window.ends)
        rows = window.rows[pick]
        n, j = state.length[rows], state.drafted[rows]
        exact, limit = state.exact[rows], np.minimum(state.limit, state.fence)[rows]
        groups = window.groups[pick]

        # AR candidates behind every prefix of the draft, c_0 .. c_j.
        last = window.first[pick] + window.clean[pick] - 1  # flat index of the last clean token
        runs = j + 1 + groups.sum(axis=1)
        together = bool(groups.any()) and runs.sum() <= self.model.one_product
        if together:  # a row's logits are behind each other: one product, of which both stages take theirs
            every = self._logits(hidden, last - j, runs)
            shift = np.cumsum(runs) - runs - (last - j)
            first = _runs(every, last - j + shift, j + 1)
        else:
            first = self._logits(hidden, last - j, j + 1)
        candidates, finite = self._behind_draft(state, rows, j, first)
        broken = ~np.logical_and.reduce(finite, axis=1)
        drafts = _ragged(state.tokens, rows, n, int(j.max(initial=0)))
        agreed = agreeing_prefix(candidates, drafts, j)

        # The masks behind the prefix that held: the only ones that saw the right tokens.
        which = np.arange(len(rows))
        size = groups[which, agreed]
        logits, guesses, run = first[:0], np.zeros((len(rows), 0), dtype=np.int64), np.zeros_like(rows)
        sure, p = state.sure[rows], np.full((len(rows), state.sure.shape[1]), np.nan)
        if size.any():
            begin = last + 1 + (np.cumsum(groups, axis=1) - groups)[which, agreed]
            logits = _runs(every, begin + shift, size) if together else self._logits(hidden, begin, size)
            guesses, finite = self._guesses(state, rows, agreed, candidates, size, logits)
            broken |= ~np.logical_and.reduce(finite, axis=1)
            real = np.arange(guesses.shape[1]) < size[:, None]
            accepted = np.zeros(guesses.shape, dtype=bool)
            guessed, of_row = np.maximum(guesses[real], 0), np.repeat(rows, size)
            accepted[real] = passes(logits, guessed, state.rule[of_row], state.tau[of_row])
            run = accepted_run(accepted & (guesses != NONE_LEFT))
            if (state.adaptive[rows] & exact).any():
                p[:, : guesses.shape[1]][real] = self.model.probability(logits, guessed)

        # Exact: the agreeing draft and AR's next token, together c_0 .. c_k; the run is the next draft.
        # Lossy: AR's next token and the run itself.
        tokens = np.zeros((len(rows), max(candidates.shape[1], 1 + guesses.shape[1])), dtype=np.int64)
        tokens[:, : candidates.shape[1]] = candidates
        if guesses.shape[1]:
            trusting = ~exact
            tokens[trusting, 1 : 1 + guesses.shape[1]] = guesses[trusting]
        none_left = candidates[which, agreed] == NONE_LEFT  # AR's token behind the draft that held
        count = np.where(exact, agreed + ~none_left, np.where(none_left, 0, run + 1))
        count = np.minimum(count, limit - n)
        column = np.arange(tokens.shape[1])
        is_end = state.wishes.ends[rows[:, None], tokens] & (column < count[:, None])
        stopped = is_end.any(axis=1) & ~broken
        count = np.where(stopped, is_end.argmax(axis=1) + 1, count)
        count[broken] = 0
        stuck = none_left & ~stopped & ~broken & (n + count < limit)

        chosen = column < count[:, None]
        state.tokens[np.repeat(rows, count), (n[:, None] + column)[chosen]] = tokens[chosen]
        state.cached[rows] = np.where(exact, n + agreed, n)
        state.length[rows] = length = n + count
        room = np.where(exact, np.maximum(limit - length - 1, 0), 0)  # a budget's last token is never a draft
        drafted = np.minimum(run, room)
        state.drafted[rows] = drafted
        state.sure[rows] = np.where(np.arange(p.shape[1]) < drafted[:, None], p, np.nan)
        if guesses.shape[1]:
            column = np.arange(guesses.shape[1])
            chosen = column < drafted[:, None]
            state.tokens[np.repeat(rows, drafted), (length[:, None] + column)[chosen]] = guesses[chosen]
        full = (length >= state.limit[rows]) & ~stopped
        logprobs = {}
        for i in np.flatnonzero(state.wishes.logprobs[rows] >= 0).tolist():
            own = np.arange(count[i])
            from_first = (own < 1) | exact[i]
            where = np.where(from_first, (np.cumsum(j + 1) - (j + 1))[i] + own, 0)
            said = first[torch.from_numpy(where).to(first.device)]
            if not from_first.all():
                behind = torch.from_numpy((np.cumsum(size) - size)[i] + own[1:] - 1).to(first.device)
                said = torch.cat([said[:1], logits[behind]])
            logprobs[i] = _logprobs(said, tokens[i, : count[i]], int(state.wishes.logprobs[rows[i]]))
        # A guess that the rule kept out of the draft was a mask for nothing, as one that AR rejects is.
        offered, held = np.where(exact, state.offered[rows], size), np.where(exact, agreed, run)
        state.offered[rows] = np.minimum(size, room)
        return Commit(
            rows,
            tokens,
            count,
            stopped,
            full,
            broken,
            stuck,
            masks=groups.sum(axis=1),
            rejected=j - agreed,
            offered=offered,
            held=held,
            sure=sure,
            logprobs=logprobs,
        )

    def _logits(self, hidden: Tensor, begin: Ints, size: Ints) -> Tensor:
        """float32 logits [M, V] of `size` tokens of each row from flat index `begin`, row by row."""
        if not size.any():
            return hidden.new_zeros(0, 1)
        logits = self.model.logits(_runs(hidden, begin, size))
        if self.mask_token_id is not None:
            logits[:, self.mask_token_id] = -torch.inf
        return logits

    def _behind_draft(
        self, state: Rows, rows: Ints, drafted: Ints, logits: Tensor
    ) -> tuple[Ints, np.ndarray]:
        """AR's candidates behind every prefix of each row's draft, given that the prefix is right.

        Returns:
            candidates int64 [R, J+1], padded with 0; finite bool [R, J+1], True where padded.
        """
        real = np.arange(int(drafted.max(initial=0)) + 1) < drafted[:, None] + 1
        row, column = np.nonzero(real)
        n = state.length[rows][row]
        return self._choose(state, rows[row], n + column, state.tokens, real, logits)

    def _guesses(
        self, state: Rows, rows: Ints, agreed: Ints, candidates: Ints, size: Ints, logits: Tensor
    ) -> tuple[Ints, np.ndarray]:
        """The masks' candidates behind the agreeing draft and AR's next token; shapes as above, [R, W]."""
        width = int(size.max(initial=0))
        real = np.arange(width) < size[:, None]
        row, column = np.nonzero(real)
        position = (state.length[rows] + agreed + 1)[row] + column
        if not state.wishes.looks_back[rows].any():
            return self._choose(state, rows[row], position, state.tokens, real, logits)
        # Each guess is a word of the next one's past: along the run, one column after the other.
        guesses, finite = np.zeros(real.shape, dtype=np.int64), np.ones(real.shape, dtype=bool)
        past = state.tokens.copy()  # the draft stands in it already
        ar = state.length[rows] + agreed
        inside = ar < past.shape[1]
        # A row without a next token guesses in vain, but over real ids.
        next_token = np.maximum(candidates[np.arange(len(rows)), agreed], 0)
        past[rows[inside], ar[inside]] = next_token[inside]
        for k in range(width):
            now = column == k
            place = torch.from_numpy(np.flatnonzero(now)).to(logits.device)
            chosen, ok = self._choose(
                state, rows[row[now]], position[now], past, real[:, k : k + 1], logits[place]
            )
            guesses[:, k : k + 1], finite[:, k : k + 1] = chosen, ok
            past[rows[row[now]], position[now]] = np.maximum(chosen[real[:, k], 0], 0)
        return guesses, finite

    def _choose(
        self, state: Rows, row: Ints, position: Ints, past: Ints, real: np.ndarray, logits: Tensor
    ) -> tuple[Ints, np.ndarray]:
        """Candidates of the places that `real` marks; `row`, `position` [M] are theirs, in its order."""
        candidates, finite = np.zeros(real.shape, dtype=np.int64), np.ones(real.shape, dtype=bool)
        if len(row):
            candidates[real], finite[real] = state.wishes.choose(
                logits, row, position, past, state.prompt[row]
            )
        return candidates, finite


def _logprobs(logits: Tensor, tokens: Ints, k: int) -> list[TokenLogprob]:
    """Of each token [M] under its logits [M, V], with the k best."""
    said = torch.log_softmax(logits, dim=-1)
    own = said.gather(-1, torch.from_numpy(tokens).to(logits.device)[:, None])[:, 0].tolist()
    values, best = said.topk(k, dim=-1)
    top = [list(zip(*pair, strict=True)) for pair in zip(best.tolist(), values.tolist(), strict=True)]
    return [TokenLogprob(*entry) for entry in zip(tokens.tolist(), own, top, strict=True)]


def spans(begin: Ints, size: Ints) -> Ints:
    """int64 [sum of size]: begin_r, begin_r + 1, … of each row, one row behind the other."""
    column = np.arange(int(size.max(initial=0)))
    return (begin[:, None] + column)[column < size[:, None]]


def _runs(states: Tensor, begin: Ints, size: Ints) -> Tensor:
    """Rows begin_r .. begin_r + size_r of [N, …], one run behind the other; a lone run is not copied."""
    if len(begin) == 1:
        return states[int(begin[0]) : int(begin[0] + size[0])]
    return states.index_select(0, torch.from_numpy(spans(begin, size)).to(states.device))


def _ragged(tokens: Ints, rows: Ints, begin: Ints, width: int) -> Ints:
    """tokens[r, begin_r : begin_r + width] of each row; columns past the end repeat the last one."""
    column = np.minimum(begin[:, None] + np.arange(width), tokens.shape[1] - 1)
    return tokens[rows[:, None], column]
