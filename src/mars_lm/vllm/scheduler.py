"""vLLM's scheduler with masks behind the drafts."""

from __future__ import annotations

from typing import Any

from mars_lm.vllm.versions import require_tested

require_tested()

from vllm.logger import init_logger  # noqa: E402
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from vllm.v1.spec_decode.metrics import SpecDecodingStats  # noqa: E402

from mars_lm.decoding.acceptance import RULE_CODE  # noqa: E402
from mars_lm.settings import DecodingSettings, MarsSettings  # noqa: E402
from mars_lm.vllm import plan  # noqa: E402
from mars_lm.vllm.defaults import LiveDefaults  # noqa: E402

logger = init_logger("vllm.mars_lm")

_PADDING = -1  # what vLLM's grammar code takes for "no token"


class MarsScheduler(Scheduler):
    """Puts masks behind each request's drafts, and takes back cache entries that masks left.

    vLLM sees ordinary speculative decoding: the drafts and the masks are its speculative tokens. What it
    can't know is told to the workers as a `StepPlan`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.vllm_config
        self._mars = MarsSettings.from_config(config.model_config.hf_config)
        if self._mars is None:
            logger.warning("%s has no MARS settings: one token per step.", config.model_config.model)
        self._defaults = LiveDefaults.of(config, self._mars)
        self._drafted: dict[str, int] = {}  # drafts among a request's speculative tokens
        self._groups: dict[str, plan.MaskGroup] = {}  # the masks behind them
        self._running_plan: plan.StepPlan = {}
        if self.dynamic_sd_lookup is None:
            # vLLM pads the first decode step to its widest, unless the width is dynamic. Ours is.
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)

    # ---- before a step -------------------------------------------------------------------------------

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take the workers' drafts, cut by grammar and budget, and put masks behind them."""
        super().update_draft_token_ids(draft_token_ids)
        if self._mars is None:
            return
        for name in draft_token_ids.req_ids:
            request = self.requests.get(name)
            if request is None or request.is_finished() or request.is_prefill_chunk:
                continue
            drafts, group = self._behind(request, request.spec_token_ids)
            request.spec_token_ids = drafts + [self._mars.mask_token_id] * group.count
            self._drafted[name], self._groups[name] = len(drafts), group

    def _behind(self, request: Request, drafts: list[int]) -> tuple[list[int], plan.MaskGroup]:
        """The drafts to verify and the masks to put behind them: no more than can still be committed."""
        settings = self._defaults.settings(request.request_id, request.sampling_params)
        exact = settings.exact or not _trusts_masks(request)
        left = request.max_tokens - request.num_output_tokens
        drafts = drafts[: max(left - 1, 0)]
        width = 0 if settings.one_token else self._width(settings)
        width = min(width, self.num_spec_tokens - len(drafts), max(left - len(drafts) - 1 - exact, 0))
        return drafts, plan.MaskGroup(max(width, 0), exact, RULE_CODE[settings.rule], settings.tau)

    def _width(self, settings: DecodingSettings) -> int:
        assert self._mars is not None
        return (settings.block_size or self._mars.block_size) - 1

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._defaults.refresh()
        output = super().schedule(throttle_prefills)
        step: plan.StepPlan = {}
        for name, fed in output.scheduled_spec_decode_tokens.items():
            masks = len(fed) - self._drafted[name]  # vLLM may have cut some off
            if masks > 0:
                step[name] = self._groups[name]._replace(count=masks)
        plan.attach(output, step)
        return output

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """A grammar advances over drafts; to it, a mask is no token."""
        fed = scheduler_output.scheduled_spec_decode_tokens
        step = plan.attached(scheduler_output)
        try:
            scheduler_output.scheduled_spec_decode_tokens = {
                name: tokens if name not in step else _without_masks(tokens, step[name].count)
                for name, tokens in fed.items()
            }
            return super().get_grammar_bitmask(scheduler_output)
        finally:
            scheduler_output.scheduled_spec_decode_tokens = fed

    # ---- after a step --------------------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """Commit; then feed again, as tokens, what was accepted from masks: their cache entries are masks'."""
        self._running_plan = plan.attached(scheduler_output)
        sampled = model_runner_output.sampled_token_ids
        from_masks = {}
        for name, group in self._running_plan.items():
            if not group.exact and sampled:
                count = len(sampled[model_runner_output.req_id_to_index[name]])
                drafts = len(scheduler_output.scheduled_spec_decode_tokens[name]) - group.count
                from_masks[name] = max(count - 1 - drafts, 0)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for name, count in from_masks.items():
            request = self.requests.get(name)
            if count and request is not None and request.status == RequestStatus.RUNNING:
                request.num_computed_tokens -= count
        return outputs

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> SpecDecodingStats | None:
        """Count as drafted what could have been accepted in this step: in exact mode the drafts, not the masks."""
        if not self.log_stats:
            return None
        stats = spec_decoding_stats or SpecDecodingStats.new(self.num_spec_tokens)
        group = self._running_plan.get(request_id)
        if group is not None and group.exact:
            num_draft_tokens -= group.count
        stats.observe_draft(num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted_tokens)
        return stats

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._drafted.pop(request.request_id, None)
        self._groups.pop(request.request_id, None)
        self._defaults.forget(request.request_id)
        return super()._free_request(request, *args, **kwargs)


def _without_masks(tokens: list[int], masks: int) -> list[int]:
    return tokens[: len(tokens) - masks] + [_PADDING] * masks


def _trusts_masks(request: Request) -> bool:
    """False for a request whose guesses would need more than a temperature and a filter: it is decoded exactly.

    Penalties, bad words and grammars look back on the tokens before each guess; vLLM applies them to what it
    verifies, and so exact mode has them for nothing.
    """
    params = request.sampling_params
    return not (
        request.use_structured_output
        or params is None
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.bad_words
        or params.allowed_token_ids
        or params.min_tokens
    )
