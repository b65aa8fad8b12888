"""Block diffusion's own decoding: bidirectional inside the block, in the order of confidence.

It decodes what the training preset `block-diffusion` trains (SPEC 1 and 2, layout `paper`): blocks of B
positions aligned to position 0, a masked position predicts its own token, the tokens of a finished block are
seen as clean, causal context. A block that starts in the prompt has the prompt's last tokens open in it.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mars_lm.baselines.forward import Request, RowsDecoder, RowsForward, Run
from mars_lm.checkpoint import Checkpoint
from mars_lm.decoding.acceptance import MEASURES
from mars_lm.errors import MarsError
from mars_lm.settings import check_block_size


@dataclasses.dataclass
class _Block:
    """The block that a request fills.

    Attributes:
        start: its first position; clean tokens up to it are in the cache up to `cached`.
        tokens: its B tokens, None where still masked.
        given: how many of the first are the prompt's (or were committed before).
        cached: clean positions that the cache holds.
        clean: the clean tokens, the prompt's and the finished blocks'.
    """

    start: int
    tokens: list[int | None]
    given: int
    cached: int
    clean: list[int]


class BlockDiffusionDecoder(RowsDecoder):
    """Fill block after block: each forward opens every mask whose candidate passes the rule, at least one.

    The first forward of a block also feeds the tokens of the one before as clean tokens, so a block takes as
    many forwards as it takes steps. tau 1 (probability) opens one mask a forward. Tokens are committed once
    all to their left are open. The block size is the request's, else the trained one.

    Args:
        checkpoint: trained with the preset `block-diffusion`; it names the mask token and B.
        max_rows: prompts decoded together.
    """

    def __init__(self, checkpoint: Checkpoint, *, max_rows: int = 16) -> None:
        if checkpoint.mars is None:
            raise MarsError(
                "Block diffusion needs a mask token: train the checkpoint with preset block-diffusion first."
            )
        super().__init__(checkpoint, max_rows=max_rows)
        self.trained = checkpoint.mars.block_size
        self.spare_slots = self.trained

    def begin(self, request: Request) -> None:
        size = self._size(request)
        start = len(request.prompt) - len(request.prompt) % size
        head: list[int | None] = list(request.prompt[start:])
        request.state = _Block(
            start=start,
            tokens=head + [None] * (size - len(head)),
            given=len(head),
            cached=0,
            clean=request.prompt[:start],
        )

    def feed(self, request: Request) -> Run:
        block: _Block = request.state
        pending = block.clean[block.cached : block.start]
        mask = self.mask_token_id
        assert mask is not None
        size, end = len(block.tokens), block.start + len(block.tokens)
        return Run(
            row=request.row,
            ids=pending + [mask if token is None else token for token in block.tokens],
            start=block.cached,
            sees=[*range(block.cached + 1, block.start + 1), *([end] * size)],
        )

    def take(self, request: Request, hidden: Tensor, forward: RowsForward) -> list[int]:
        block: _Block = request.state
        size = len(block.tokens)
        block.cached = block.start
        open_at = [i for i, token in enumerate(block.tokens) if token is None]
        states = hidden[-size:][torch.tensor(open_at, device=hidden.device)]
        logits = forward.logits(states, self.mask_token_id)
        candidates = logits.argmax(dim=-1)
        settings = request.settings
        measure = MEASURES[settings.rule](logits, candidates)
        entropy = settings.rule == "entropy"
        confident = measure <= settings.tau if entropy else measure >= settings.tau
        if settings.rule == "probability" and settings.tau >= 1:
            confident = torch.zeros_like(confident)
        confident[measure.argmin() if entropy else measure.argmax()] = True
        for i, passed, candidate in zip(open_at, confident.tolist(), candidates.tolist(), strict=True):
            if passed:
                block.tokens[i] = candidate
        # All open from the left on is text; what lies behind a gap waits.
        filled = next((i for i, token in enumerate(block.tokens) if token is None), size)
        new = [token for token in block.tokens[block.given : filled] if token is not None]
        block.given = filled
        if filled == size:
            block.clean += [token for token in block.tokens if token is not None]
            block.start += size
            block.tokens, block.given = [None] * size, 0
        return new

    def _size(self, request: Request) -> int:
        size = request.settings.block_size or self.trained
        check_block_size(size, self.trained)
        return size
