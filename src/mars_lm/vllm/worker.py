"""vLLM's workers with our sampler in the model runner."""

from __future__ import annotations

from typing import Any

from mars_lm.vllm.versions import require_tested

require_tested()

from vllm.platforms import current_platform  # noqa: E402

from mars_lm.settings import MarsSettings  # noqa: E402
from mars_lm.vllm import plan  # noqa: E402

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker
else:
    from vllm.v1.worker.gpu_worker import Worker as _Worker


class MarsWorker(_Worker):
    """The platform's worker; what differs is who turns logits into tokens, by the step's plan."""

    def init_device(self) -> None:
        super().init_device()
        mars = MarsSettings.from_config(self.model_config.hf_config)
        runner = self.model_runner
        if mars is None or not hasattr(runner, "drafter"):
            return  # an ordinary model, or a pipeline stage that does not sample
        from mars_lm.vllm.sampler import MarsSampler

        self._mars_sampler = MarsSampler(runner, mars.mask_token_id)
        runner.rejection_sampler = self._mars_sampler
        runner.drafter.sampler = self._mars_sampler
        # vLLM stops proposing near a draft model's length limit; our drafts come from the target itself, and
        # the scheduler cuts what would pass its limit.
        runner.effective_drafter_max_model_len = runner.max_model_len + runner.num_spec_tokens

    def execute_model(self, scheduler_output: Any) -> Any:
        sampler = getattr(self, "_mars_sampler", None)
        if sampler is not None:
            sampler.plan = plan.attached(scheduler_output)
        return super().execute_model(scheduler_output)
