"""Draft, then verify: what Jacobi decoding and Medusa heads have in common (SPEC 4, without masks)."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from mars_lm.baselines.forward import Request, RowsDecoder, RowsForward, Run


@dataclasses.dataclass
class _Draft:
    """The committed tokens, how many of them the cache holds, and the guess at what follows."""

    tokens: list[int]
    cached: int
    draft: list[int]


class DraftingDecoder(RowsDecoder):
    """Feed the draft as clean tokens, keep what the model itself would have said, and draft again.

    The text is AR's own. A subclass only says what the next draft is.
    """

    def propose(
        self, request: Request, hidden: Tensor, candidates: list[int], agreed: int, forward: RowsForward
    ) -> list[int]:
        """The next draft, which follows `candidates[agreed]`.

        Args:
            hidden: [J+1, hidden], the states behind each prefix of the old draft.
            candidates: AR's tokens there, c₀ … c_J.
            agreed: how many tokens of the old draft were right.
        """
        raise NotImplementedError

    def begin(self, request: Request) -> None:
        request.state = _Draft(tokens=list(request.prompt), cached=0, draft=[])

    def feed(self, request: Request) -> Run:
        state: _Draft = request.state
        return Run(row=request.row, ids=state.tokens[state.cached :] + state.draft, start=state.cached)

    def take(self, request: Request, hidden: Tensor, forward: RowsForward) -> list[int]:
        state: _Draft = request.state
        behind = hidden[-len(state.draft) - 1 :]
        candidates = forward.logits(behind, self.mask_token_id).argmax(dim=-1).tolist()
        agreed = 0
        while agreed < len(state.draft) and state.draft[agreed] == candidates[agreed]:
            agreed += 1
        request.result.rejected_drafts += len(state.draft) - agreed
        new = candidates[: agreed + 1]
        draft = self.propose(request, behind, candidates, agreed, forward)
        state.cached = len(state.tokens) + agreed
        state.tokens += new
        # The last token of the budget is AR's own, never a draft.
        room = request.budget - len(request.result.token_ids) - len(new) - 1
        state.draft = draft[: max(room, 0)]
        return [int(token) for token in new]

    def length(self, request: Request, most: int) -> int:
        """How many tokens to draft: one less than the block size that the request names, or `most`."""
        size = request.settings.block_size
        return most if size is None else max(size - 1, 0)
