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
from mars_lm.decoding.forward import Feed, Forward, without
from mars_lm.decoding.sampling import NOT_NUMBERS, best_tokens
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
    length: Ints  # [R] n
    drafted: Ints  # [R] j
    exact: np.ndarray  # bool [R]
    end: Ints  # [R] the n that the row may not pass for now


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
    prefix = np.arange(int(j.max(initial=0)) + 1)
    exact, masks = state.exact[rows], state.masks[rows]
    end = np.minimum(state.limit[rows], state.fence[rows])
    groups = np.zeros((len(rows), len(prefix)), dtype=np.int64)
    if masks.any():
        room = end[:, None] - n[:, None] - prefix - 1 - exact[:, None]
        behind = (prefix == j[:, None]) | (state.recovery[rows, None] & (prefix < j[:, None]))
        groups = np.where(behind & ends[:, None], np.minimum(masks[:, None], np.maximum(room, 0)), 0)

    if width is not None and groups.any():
        # There once, that is, until the row's first token; without a cache, later forwards feed it all again.
        prompt = np.where(n == state.prompt[rows], pending - ends, 0)
        # In lossy mode what the last masks gave is committed, and fed by this forward, as a draft would be.
        trusted = np.where(exact | (n == state.prompt[rows]), 0, np.minimum(pending - 1, masks))
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

    clean = pending + j
    known = {
        "ends": ends,
        "clean": clean,
        "groups": groups,
        "length": n,
        "drafted": j,
        "exact": exact,
        "end": end,
    }
    if not groups.any():
        row = np.repeat(np.arange(len(rows)), clean)
        position = (m - np.cumsum(clean) + clean)[row] + np.arange(len(row))
        ids = state.tokens[rows[row], position]
        return Window(rows, clean, ids, position, position, position + 1, position, **known)

    # A part is a row's clean tokens or one of its groups; offsets within the part give all the rest.
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
    return Window(
        rows=rows,
        width=per_row,
        input_ids=np.where(is_mask, mask_token_id, state.tokens[rows[row], np.where(is_mask, 0, position)]),
        position_ids=position,
        slots=slot,
        sees_before=np.where(is_mask, start, slot + 1),
        sees_from=np.where(is_mask, slot - offset, slot),
        **known,
    )


class Decoder:
    """From a window to committed tokens and the next draft.

    Args:
        model: runs it; mask_token_id: never a candidate (None for a model without one).
    """

    def __init__(self, model: Forward, mask_token_id: int | None) -> None:
        self.model, self.mask_token_id = model, mask_token_id

    def step(self, state: Rows, window: Window) -> Commit:
        """One forward; verify, accept and commit; leaves `state` ready for the next one."""
        # The forward drives all else out of the processor's caches, so what can be known is computed before.
        whole = bool(window.ends.all())
        pick = slice(None) if whole else np.flatnonzero(window.ends)
        rows, n, j, exact, limit, groups, first, clean = (
            values[pick]
            for values in (
                window.rows,
                window.length,
                window.drafted,
                window.exact,
                window.end,
                window.groups,
                window.first,
                window.clean,
            )
        )
        drafting, guessing = bool(j.any()), bool(groups.any())
        last = first + clean - 1  # flat index of the last clean token
        behind = j + 1
        runs = behind + groups.sum(axis=1)
        # A row's logits are behind each other: one product, of which both stages take theirs, if it is small.
        together = guessing and runs.sum() <= self.model.one_product
        wanted = spans(last - j, runs if together else behind)
        # A row of logits is a whole vocabulary: not copied for who wants no more than its best token.
        plain = not state.wishes.read_logits(rows, n)
        prefixes = np.arange(int(j.max(initial=0)) + 1) < behind[:, None]
        which, first_guess = np.arange(len(rows)), last[:, None] + 1
        if together:
            shift = np.cumsum(runs) - runs - (last - j)
            of_draft = spans(last - j + shift, behind)
            first_guess = first_guess + shift[:, None]
        if guessing:
            first_guess = (
                first_guess + np.cumsum(groups, axis=1) - groups
            )  # [R, K] flat index, by draft prefix
        draft = _ragged(state.tokens, rows, n, int(j.max())) if drafting else None

        hidden, every, best = self.model.decode(window, wanted, self.mask_token_id)
        if not whole:  # chunks of prompts
            state.cached[window.rows] += np.where(window.ends, 0, window.clean)

        # AR candidates behind every prefix of the draft, c_0 .. c_j.
        head, own = every, best
        if together:
            own = best[of_draft]
            head = every[:0] if plain else _runs(every, last - j + shift, behind)
        candidates, finite = (
            _placed(prefixes, own) if plain else self._behind_draft(state, rows, n, prefixes, head, own)
        )
        broken = ~np.logical_and.reduce(finite, axis=1)
        said, agreed = candidates[:, 0], j
        if draft is not None:
            agreed = agreeing_prefix(candidates, draft, j)
            said = candidates[which, agreed]
        none_left = said == NONE_LEFT  # AR's token behind the draft that held

        # The masks behind the prefix that held: the only ones that saw the right tokens.
        tokens, held, run, size = candidates, agreed, np.zeros_like(j), np.zeros_like(j)
        guesses, sure, p = np.zeros((len(rows), 0), dtype=np.int64), state.sure[rows], None
        if guessing:
            size = groups[which, agreed]
        if guessing and size.any():
            begin = first_guess[which, agreed]
            if together:
                logits, own = _runs(every, begin, size), best[spans(begin, size)]
            else:
                logits = without(self.model.logits(_runs(hidden, begin, size)), self.mask_token_id)
                own = best_tokens(logits)
            real = np.arange(int(size.max())) < size[:, None]
            guesses, finite = (
                _placed(real, own)
                if plain
                else self._guesses(state, rows, n + agreed, said, real, logits, own)
            )
            broken |= ~np.logical_and.reduce(finite, axis=1)
            accepted = np.zeros(guesses.shape, dtype=bool)
            guessed, of_row = np.maximum(guesses[real], 0), np.repeat(rows, size)
            accepted[real] = passes(logits, guessed, state.rule[of_row], state.tau[of_row])
            run = accepted_run(accepted & (guesses != NONE_LEFT))
            if (state.adaptive[rows] & exact).any():
                p = np.full(sure.shape, np.nan)
                p[:, : guesses.shape[1]][real] = self.model.probability(logits, guessed)
            # Exact: the agreeing draft and AR's next token, together c_0 .. c_k; the run is the next draft.
            # Lossy: AR's next token and the run itself.
            held = np.where(exact, agreed, run)
            tokens = np.zeros((len(rows), max(candidates.shape[1], 1 + guesses.shape[1])), dtype=np.int64)
            tokens[:, : candidates.shape[1]] = candidates
            trusting = ~exact
            tokens[trusting, 1 : 1 + guesses.shape[1]] = guesses[trusting]
        count = np.where(none_left & ~exact, 0, held + ~none_left)
        count = np.minimum(count, limit - n)
        column = np.arange(tokens.shape[1])
        is_end = state.wishes.ends[rows[:, None], tokens] & (column < count[:, None])
        stopped = is_end.any(axis=1) & ~broken
        if stopped.any():
            count = np.where(stopped, is_end.argmax(axis=1) + 1, count)
        count[broken] = 0
        stuck = none_left
        if none_left.any():
            stuck = none_left & ~stopped & ~broken & (n + count < limit)

        chosen = column < count[:, None]
        state.tokens[np.repeat(rows, count), (n[:, None] + column)[chosen]] = tokens[chosen]
        state.cached[rows] = n + agreed
        state.length[rows] = length = n + count
        drafted = offering = np.zeros_like(rows)
        if guesses.shape[1]:
            room = np.where(exact, np.maximum(limit - length - 1, 0), 0)  # a budget's last token is no draft
            drafted, offering = np.minimum(run, room), np.minimum(size, room)
            column = np.arange(guesses.shape[1])
            chosen = column < drafted[:, None]
            state.tokens[np.repeat(rows, drafted), (length[:, None] + column)[chosen]] = guesses[chosen]
        state.drafted[rows] = drafted
        if drafting or p is not None:
            known = np.arange(sure.shape[1]) < drafted[:, None]
            state.sure[rows] = np.nan if p is None else np.where(known, p, np.nan)
        full = (length >= state.limit[rows]) & ~stopped
        logprobs = {}
        for i in np.flatnonzero(state.wishes.logprobs[rows] >= 0).tolist():
            own = np.arange(count[i])
            from_first = (own < 1) | exact[i]
            where = np.where(from_first, (np.cumsum(j + 1) - (j + 1))[i] + own, 0)
            read = head[torch.from_numpy(where).to(head.device)]
            if not from_first.all():
                place = torch.from_numpy((np.cumsum(size) - size)[i] + own[1:] - 1).to(head.device)
                read = torch.cat([read[:1], logits[place]])
            logprobs[i] = _logprobs(read, tokens[i, : count[i]], int(state.wishes.logprobs[rows[i]]))
        # A guess that the rule kept out of the draft was a mask for nothing, as one that AR rejects is.
        offered = np.where(exact, state.offered[rows], size)
        state.offered[rows] = offering
        return Commit(
            rows,
            tokens,
            count,
            stopped,
            full,
            broken,
            stuck,
            masks=runs - behind,
            rejected=j - agreed,
            offered=offered,
            held=held,
            sure=sure,
            logprobs=logprobs,
        )

    def _behind_draft(
        self, state: Rows, rows: Ints, n: Ints, real: np.ndarray, logits: Tensor, best: Ints
    ) -> tuple[Ints, np.ndarray]:
        """AR's candidates behind every prefix of each row's draft, given that the prefix is right.

        Args:
            real: bool [R, J+1], the prefixes that are there.
        Returns:
            candidates int64 [R, J+1], padded with 0; finite bool [R, J+1], True where padded.
        """
        row, column = np.nonzero(real)
        return self._choose(state, rows[row], n[row] + column, state.tokens, real, logits, best)

    def _guesses(
        self, state: Rows, rows: Ints, at: Ints, said: Ints, real: np.ndarray, logits: Tensor, best: Ints
    ) -> tuple[Ints, np.ndarray]:
        """The masks' candidates behind AR's next token `said`, which stands at `at`; shapes as above."""
        row, column = np.nonzero(real)
        position = (at + 1)[row] + column
        if not state.wishes.looks_back[rows].any():
            return self._choose(state, rows[row], position, state.tokens, real, logits, best)
        # Each guess is a word of the next one's past: along the run, one column after the other.
        guesses, finite = np.zeros(real.shape, dtype=np.int64), np.ones(real.shape, dtype=bool)
        past = state.tokens.copy()  # the draft stands in it already
        inside = at < past.shape[1]
        # A row without a next token guesses in vain, but over real ids.
        past[rows[inside], at[inside]] = np.maximum(said, 0)[inside]
        for k in range(real.shape[1]):
            now = column == k
            place = np.flatnonzero(now)
            chosen, ok = self._choose(
                state,
                rows[row[now]],
                position[now],
                past,
                real[:, k : k + 1],
                logits[torch.from_numpy(place).to(logits.device)],
                best[place],
            )
            guesses[:, k : k + 1], finite[:, k : k + 1] = chosen, ok
            past[rows[row[now]], position[now]] = np.maximum(chosen[real[:, k], 0], 0)
        return guesses, finite

    def _choose(
        self,
        state: Rows,
        row: Ints,
        position: Ints,
        past: Ints,
        real: np.ndarray,
        logits: Tensor,
        best: Ints,
    ) -> tuple[Ints, np.ndarray]:
        """Candidates of the places that `real` marks; `row` .. `best` [M] are theirs, in its order."""
        candidates, finite = np.zeros(real.shape, dtype=np.int64), np.ones(real.shape, dtype=bool)
        if len(row):
            candidates[real], finite[real] = state.wishes.choose(
                logits, row, position, past, state.prompt[row], best
            )
        return candidates, finite


def _placed(real: np.ndarray, best: Ints) -> tuple[Ints, np.ndarray]:
    """Candidates of the places that `real` marks, for rows that want no more than their `best` tokens [M]."""
    candidates = np.zeros(real.shape, dtype=np.int64)
    candidates[real] = best
    finite = candidates != NOT_NUMBERS
    return np.maximum(candidates, 0), finite


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
