"""The proposer that vLLM loads (`method: custom_class`): it hands on what the sampler has just read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mars_lm.errors import MarsError
from mars_lm.vllm.versions import require_tested

if TYPE_CHECKING:
    from mars_lm.vllm.sampler import MarsSampler


class MarsProposer:
    """Drafts from the target's own forward: no model, no extra pass.

    Raises:
        MarsError: an untested vLLM, or one started without our worker and scheduler.
    """

    def __init__(self, vllm_config: Any) -> None:
        require_tested()
        worker = vllm_config.parallel_config.worker_cls
        scheduler = vllm_config.scheduler_config.scheduler_cls
        for flag, name in (("--worker-cls", worker), ("--scheduler-cls", scheduler)):
            if "mars_lm.vllm." not in str(name):
                raise MarsError(
                    f"The MARS proposer needs our worker and scheduler, and {flag} is {name}: start it with "
                    "`mars serve --engine vllm`, or with all flags of docs/vllm.md."
                )
        self.sampler: MarsSampler | None = None  # set by our worker

    def load_model(self, target: Any) -> None:
        """Nothing to load."""

    def propose(self, sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        """The next drafts, one list for each request of the batch; the scheduler puts masks behind them."""
        if self.sampler is None:  # an ordinary model
            return [[] for _ in sampled_token_ids]
        return self.sampler.drafts
