"""vLLM's scheduler with masks behind the drafts."""

from __future__ import annotations

import time
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
from mars_lm.vllm.width import WidthController  # noqa: E402

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
        self._offered: dict[str, int] = {}  # masks that a request's drafts came from, or would have
        self._running_plan: plan.StepPlan = {}
        self._started = 0.0  # when the workers got the step at hand; 0 if it does more than decode
        self._widths: WidthController | None = None
        self._probed: str | None = None
        scheduled: list[int] | None = getattr(
            self, "dynamic_sd_lookup", None
        )  # --speculative-config may name vLLM's own
        if self._mars is not None and scheduled is None:
            self._widths = WidthController(self._mars.block_size - 1)
        self._allowed = scheduled or [self.num_spec_tokens] * (self.max_num_running_reqs + 1)
        # vLLM pads the first decode step to its widest, unless the width is dynamic. Ours is.
        self.dynamic_sd_lookup = self._allowed

    # ---- before a step -------------------------------------------------------------------------------

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take the workers' drafts, cut by grammar and budget, and put masks behind them."""
        super().update_draft_token_ids(draft_token_ids)
        if self._mars is None:
            return
        if self._widths is not None:
            self._probed = self.running[-1].request_id if self.running and self._widths.probe() else None
        for name in draft_token_ids.req_ids:
            request = self.requests.get(name)
            if request is None or request.is_finished() or request.is_prefill_chunk:
                continue
            drafts, group = self._behind(request, request.spec_token_ids)
            request.spec_token_ids = drafts + [self._mars.mask_token_id] * group.masks
            self._drafted[name], self._groups[name] = len(drafts), group

    def _behind(self, request: Request, drafts: list[int]) -> tuple[list[int], plan.MaskGroup]:
        """The drafts to verify and the masks to put behind them: no more than can still be committed."""
        settings = self._defaults.settings(request.request_id, request.sampling_params)
        exact = settings.exact or not _trusts_masks(request)
        left = request.max_tokens - request.num_output_tokens
        drafts = drafts[: max(left - 1, 0)]
        width = 0 if settings.one_token else self._width(settings, exact, request.request_id)
        width = min(width, self.num_spec_tokens - len(drafts), max(left - len(drafts) - 1 - exact, 0))
        return drafts, plan.MaskGroup(max(width, 0), exact, RULE_CODE[settings.rule], settings.tau)

    def _width(self, settings: DecodingSettings, exact: bool, name: str) -> int:
        """B - 1, or less where less is faster."""
        assert self._mars is not None
        widest = (settings.block_size or self._mars.block_size) - 1
        requests = min(max(len(self.running), 1), len(self._allowed) - 1)
        allowed = self._allowed[requests]  # vLLM's own schedule counts drafts and masks alike
        widest = min(widest, allowed // 2 if exact else allowed)
        if self._widths is None or not settings.adaptive or name == self._probed:
            return widest
        return min(widest, self._widths.width(exact, requests))

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._defaults.refresh()
        output = super().schedule(throttle_prefills)
        step: plan.StepPlan = {}
        for name, fed in output.scheduled_spec_decode_tokens.items():
            masks = len(fed) - self._drafted.get(name, len(fed))  # vLLM may have cut some off
            if masks > 0:
                step[name] = self._groups[name]._replace(masks=masks)
        plan.attach(output, step)
        decodes = all(
            count <= 2 * (1 + self.num_spec_tokens) for count in output.num_scheduled_tokens.values()
        )
        self._started = time.perf_counter() if decodes else 0.0
        return output

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """A grammar advances over drafts; to it, a mask is no token."""
        fed = scheduler_output.scheduled_spec_decode_tokens
        step = plan.attached(scheduler_output)
        try:
            scheduler_output.scheduled_spec_decode_tokens = {
                name: tokens if name not in step else _without_masks(tokens, step[name].masks)
                for name, tokens in fed.items()
            }
            return super().get_grammar_bitmask(scheduler_output)
        finally:
            scheduler_output.scheduled_spec_decode_tokens = fed

    # ---- after a step --------------------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """Commit; what was accepted from masks is fed again, as tokens: the cache entries are the masks'."""
        self._running_plan = plan.attached(scheduler_output)
        if self._widths is not None and self._started and scheduler_output.total_num_scheduled_tokens:
            seconds = time.perf_counter() - self._started
            self._widths.cost.observe(scheduler_output.total_num_scheduled_tokens, seconds)
        from_masks = self._accepted_from_masks(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for name, count in from_masks.items():
            request = self.requests.get(name)
            if count and request is not None and request.status == RequestStatus.RUNNING:
                request.num_computed_tokens -= count
        return outputs

    def _accepted_from_masks(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[str, int]:
        """How many tokens stand on a mask's word, by request; the width controller learns on the way."""
        sampled = model_runner_output.sampled_token_ids
        from_masks = {}
        for name, fed in scheduler_output.scheduled_spec_decode_tokens.items():
            accepted = len(sampled[model_runner_output.req_id_to_index[name]]) - 1 if sampled else -1
            if accepted < 0:
                continue
            group = self._running_plan.get(name)
            drafts = len(fed) - (group.masks if group else 0)
            if group is not None and not group.exact:
                from_masks[name] = max(accepted - drafts, 0)
                if self._widths is not None:
                    self._widths.observe_accepted(False, group.masks, from_masks[name])
            elif self._widths is not None:
                # A guess that the rule kept out of the draft was a mask for nothing, as a rejected one is.
                if offered := self._offered.pop(name, 0):
                    self._widths.observe_accepted(True, offered, min(accepted, drafts))
                if group is not None and accepted >= drafts:
                    self._offered[name] = group.masks
        return from_masks

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> SpecDecodingStats | None:
        """Count as drafted what this step could have accepted: in exact mode the drafts, not the masks."""
        if not self.log_stats:
            return None
        stats = spec_decoding_stats or SpecDecodingStats.new(self.num_spec_tokens)
        group = self._running_plan.get(request_id)
        if group is not None and group.exact:
            num_draft_tokens -= group.masks
        stats.observe_draft(num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted_tokens)
        return stats

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._drafted.pop(request.request_id, None)
        self._groups.pop(request.request_id, None)
        self._offered.pop(request.request_id, None)
        self._defaults.forget(request.request_id)
        return super()._free_request(request, *args, **kwargs)


def _without_masks(tokens: list[int], masks: int) -> list[int]:
    return tokens[: len(tokens) - masks] + [_PADDING] * masks


def _trusts_masks(request: Request) -> bool:
    """False for a request whose guesses need more than a temperature and a filter: it is decoded exactly.

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
