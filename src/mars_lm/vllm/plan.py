"""What the scheduler tells the workers about one step: which requests carry masks, and how far to trust them.

The scheduler decides, and every worker obeys: with several workers (tensor parallel) a setting that changes
while requests run reaches all of them in the same step.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from mars_lm.decoding.window import spans

Ints = np.ndarray


class MaskGroup(NamedTuple):
    """The masks behind one request's drafts."""

    masks: int
    exact: bool  # True: what the masks say is the next draft. False: what passes the rule stands at once.
    rule: int  # a code of decoding.acceptance.RULE_CODE
    tau: float


StepPlan = dict[str, MaskGroup]  # by request id; requests that feed no masks are not in it

_ATTRIBUTE = "mars_plan"


def attach(scheduler_output: Any, plan: StepPlan) -> None:
    """Send the plan along with vLLM's `SchedulerOutput`, which is pickled to workers in other processes."""
    setattr(scheduler_output, _ATTRIBUTE, plan)


def attached(scheduler_output: Any) -> StepPlan:
    """The plan that came with a `SchedulerOutput`; empty where none did (vLLM's warm-up steps)."""
    return getattr(scheduler_output, _ATTRIBUTE, {})


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the logits of R requests lie in vLLM's flat list of them.

    A request that feeds j drafts and w masks behind its last committed token has 1 + j + w logits in a row:
    those of the committed token, of the drafts, of the masks.
    """

    start: Ints  # [R] of the committed token
    drafts: Ints  # [R] j
    masks: Ints  # [R] w

    @classmethod
    def of(cls, fed: list[int], masks: list[int]) -> Layout:
        """From the number of tokens that vLLM verifies for each request, and how many of these are masks."""
        behind, w = np.asarray(fed, dtype=np.int64), np.asarray(masks, dtype=np.int64)
        start = np.cumsum(behind + 1) - (behind + 1)
        return cls(start=start, drafts=behind - w, masks=w)

    def at_drafts(self) -> Ints:
        """Flat indices of the logits that judge the drafts: those of the token before each draft."""
        return spans(self.start, self.drafts)

    def at_next(self) -> Ints:
        """Flat index of the logits behind each request's whole draft: AR's next token. [R]"""
        return self.start + self.drafts

    def at_masks(self, rows: Ints) -> Ints:
        """Flat indices of the masks' logits of some requests, request by request."""
        return spans((self.start + self.drafts + 1)[rows], self.masks[rows])

    def draft_ids(self) -> Ints:
        """Indices of the drafts in vLLM's flat list of all tokens that it verifies."""
        fed = self.drafts + self.masks
        return spans(np.cumsum(fed) - fed, self.drafts)
