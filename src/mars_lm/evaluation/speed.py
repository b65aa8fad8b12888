"""Tokens per forward and tokens per second of a run (SPEC 3), in all and by task."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from mars_lm.decoding import GenerationResult


@dataclasses.dataclass
class Speed:
    """What was decoded, and in how long.

    Attributes:
        tokens, forwards: by task; a request's forwards count its prefill.
        seconds: wall clock of decoding alone, prefill included; prompts, scoring and loading are not in it.
    """

    tokens: Counter[str] = dataclasses.field(default_factory=Counter)
    forwards: Counter[str] = dataclasses.field(default_factory=Counter)
    seconds: float = 0.0

    def count(self, task: str, result: GenerationResult) -> None:
        """Add one request's numbers."""
        self.tokens[task] += len(result.token_ids)
        self.forwards[task] += result.forwards

    def summary(self) -> dict[str, Any]:
        """The totals; empty if nothing was generated (a task that only scores log-likelihoods)."""
        tokens, forwards = self.tokens.total(), self.forwards.total()
        if not forwards:
            return {}
        return {
            "tokens": tokens,
            "forwards": forwards,
            "seconds": self.seconds,
            "tokens_per_forward": tokens / forwards,
            "tokens_per_second": tokens / self.seconds if self.seconds else None,
            "tasks": {
                name: {
                    "tokens": self.tokens[name],
                    "forwards": self.forwards[name],
                    "tokens_per_forward": self.tokens[name] / self.forwards[name],
                }
                for name in self.forwards
                if self.forwards[name]
            },
        }
