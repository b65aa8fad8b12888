"""From one forward's logits to committed tokens and the next drafts, inside vLLM (SPEC 3 and 4).

AR's part is vLLM's own: its rejection sampler judges greedy drafts, its sampler draws every token, and
neither ever sees a mask. Only then are the masks' logits read, where all drafts before them held.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from mars_lm.decoding.acceptance import accepted_run, passes
from mars_lm.decoding.verification import agreeing_prefix
from mars_lm.decoding.window import spans
from mars_lm.vllm.plan import Ints, Layout, MaskGroup, StepPlan


class MarsSampler(RejectionSampler):
    """Stands in the model runner where vLLM's rejection sampler stood.

    Args:
        runner: vLLM's model runner; its sampler, device and batch are used.
        mask_token_id: never a candidate of a mask.
    """

    def __init__(self, runner: Any, mask_token_id: int) -> None:
        super().__init__(runner.sampler, runner.speculative_config, runner.device)
        self._batch = runner.input_batch
        self._mask_token_id = mask_token_id
        self.plan: StepPlan | None = None  # of the step at hand; None in vLLM's own warm-up
        self.drafts: list[list[int]] = []  # of the requests in the batch's order, for the next step

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: Tensor | None,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Commit tokens, and keep the next drafts in `drafts`.

        Args:
            metadata: vLLM's, over drafts and masks alike.
            draft_probs: None (our drafts are single tokens).
            logits: [sum of 1 + j + w, V], see `Layout`.
        """
        if self.plan is None:
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        groups = [self.plan.get(request) for request in self._batch.req_ids]
        layout = Layout.of(
            metadata.num_draft_tokens, [0 if group is None else group.masks for group in groups]
        )
        output = self._autoregressive(layout, metadata, logits, sampling_metadata)
        self.drafts = [[] for _ in groups]
        if layout.masks.any():
            return self._read_masks(layout, groups, output, logits, sampling_metadata)
        return output

    def _autoregressive(
        self,
        layout: Layout,
        metadata: SpecDecodeMetadata,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """What vLLM itself would commit, had it been given the drafts alone."""
        if not layout.drafts.any():
            if layout.masks.any():
                logits = logits[self._index(layout.at_next())]
            return self.sampler(logits=logits, sampling_metadata=sampling_metadata)
        drafts = layout.drafts
        if layout.masks.any():
            metadata = dataclasses.replace(
                metadata,
                draft_token_ids=metadata.draft_token_ids[self._index(layout.draft_ids())],
                num_draft_tokens=drafts.tolist(),
                cu_num_draft_tokens=self._index(np.cumsum(drafts)).to(metadata.cu_num_draft_tokens.dtype),
                target_logits_indices=self._index(layout.at_drafts()),
                bonus_logits_indices=self._index(layout.at_next()),
            )
        fed = sampling_metadata.spec_token_ids
        if fed is not None:  # what penalties look back on
            fed = [tokens[:j] for tokens, j in zip(fed, metadata.num_draft_tokens, strict=False)]
            sampling_metadata = dataclasses.replace(sampling_metadata, spec_token_ids=fed)
        if sampling_metadata.all_greedy:
            return super().forward(metadata, None, logits, sampling_metadata)
        return self._drawn(layout, metadata, logits, sampling_metadata)

    def _drawn(
        self,
        layout: Layout,
        metadata: SpecDecodeMetadata,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """AR's own draw at every draft's place; a draft stands while it is what AR drew.

        With drafts that are single tokens this is rejection sampling: p(draft) is the chance that it stands,
        and a draw that differs has AR's distribution without the draft. vLLM's own kernels are not used here:
        on CPUs, 0.32.0 hands them temperatures and filters that were never written (its `expand_kernel`
        fills a copy).
        """
        mode: Any = "processed_logits" if self.is_processed_logprobs_mode else "raw_logits"
        bonus = self.sampler(
            logits=logits[metadata.bonus_logits_indices],
            sampling_metadata=dataclasses.replace(sampling_metadata, max_num_logprobs=-1),
            predict_bonus_token=True,
            logprobs_mode_override=mode,
        )
        raw = logits[metadata.target_logits_indices].float()
        adjusted = self.apply_logits_processors(raw.clone(), sampling_metadata, metadata)
        row = np.repeat(np.arange(len(layout.drafts)), layout.drafts)
        draws = self._candidates(adjusted, row, np.ones(len(row), dtype=bool), sampling_metadata)

        real = np.arange(int(layout.drafts.max())) < layout.drafts[:, None]
        said, drafted = np.zeros(real.shape, dtype=np.int64), np.zeros(real.shape, dtype=np.int64)
        said[real] = draws.cpu().numpy()
        drafted[real] = metadata.draft_token_ids.cpu().numpy()
        agreed = agreeing_prefix(said, drafted, layout.drafts)
        tokens = np.concatenate([said, np.zeros((len(said), 1), dtype=np.int64)], axis=1)
        rows = np.arange(len(tokens))
        whole = agreed == layout.drafts
        tokens[rows[whole], agreed[whole]] = bonus.sampled_token_ids[:, 0].cpu().numpy()[whole]
        tokens[np.arange(tokens.shape[1]) > agreed[:, None]] = PLACEHOLDER_TOKEN_ID
        sampled = self._index(tokens.astype(np.int32))
        logprobs = None
        if sampling_metadata.max_num_logprobs is not None:
            assert bonus.logprobs_tensors is not None
            logprobs = self._get_logprobs_tensors(
                sampling_metadata.max_num_logprobs,
                metadata,
                logits,
                adjusted if self.is_processed_logprobs_mode else raw,
                bonus.logprobs_tensors.logprobs,
                sampled,
            )
        return SamplerOutput(sampled_token_ids=sampled, logprobs_tensors=logprobs)

    def _read_masks(
        self,
        layout: Layout,
        groups: list[MaskGroup | None],
        output: SamplerOutput,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        tokens = output.sampled_token_ids.cpu().numpy()
        count = (tokens != PLACEHOLDER_TOKEN_ID).sum(axis=1)
        # Masks behind a draft that was rejected saw a wrong prefix.
        rows = np.flatnonzero((layout.masks > 0) & (count == layout.drafts + 1))
        if not rows.size:
            return output
        chosen = [group for group in (groups[row] for row in rows) if group is not None]
        size = layout.masks[rows]
        where = self._index(layout.at_masks(rows))
        said = logits[where].float()  # [sum of w, V]
        said[:, self._mask_token_id] = -torch.inf
        exact = np.array([group.exact for group in chosen])
        candidates = self._candidates(said, np.repeat(rows, size), np.repeat(~exact, size), sampling_metadata)

        real = np.arange(int(size.max())) < size[:, None]
        accepted = np.zeros(real.shape, dtype=bool)
        accepted[real] = passes(
            said,
            candidates,
            np.repeat([group.rule for group in chosen], size),
            np.repeat([group.tau for group in chosen], size),
        )
        run = accepted_run(accepted)
        guesses = np.zeros(real.shape, dtype=np.int64)
        guesses[real] = candidates.cpu().numpy()
        for i in np.flatnonzero(exact).tolist():
            self.drafts[rows[i]] = guesses[i, : run[i]].tolist()
        trusted = np.where(exact, 0, run)
        if not trusted.any():
            return output
        return self._extended(output, tokens, count, rows, trusted, guesses, said, size)

    def _candidates(
        self, said: Tensor, row: Ints, drawn: np.ndarray, sampling_metadata: SamplingMetadata
    ) -> Tensor:
        """One token for each mask: the best, or a draw where the request samples and keeps what it draws.

        A draft of exact mode is the best token even for a request that samples: it stands with AR's
        probability of it, which is then as high as it gets.

        Args:
            said: float32 [M, V]; row: [M], the mask's request in the batch; drawn: bool [M].
        """
        best = said.argmax(dim=-1)
        temperature = sampling_metadata.temperature
        if sampling_metadata.all_greedy or temperature is None or not drawn.any():
            return best
        index = self._index(row)
        temperature = temperature[index]
        draws = self._index(drawn) & (temperature > 0)
        if not draws.any():
            return best
        scaled = said / torch.where(draws, temperature, 1.0)[:, None]
        top_k, top_p = sampling_metadata.top_k, sampling_metadata.top_p
        seeded = sampling_metadata.generators
        sampled, _ = self.sampler.topk_topp_sampler(
            scaled,
            {i: seeded[r] for i, r in enumerate(row.tolist()) if r in seeded and drawn[i]},
            None if top_k is None else top_k[index],
            None if top_p is None else top_p[index],
        )
        return torch.where(draws, sampled.long().reshape(-1), best)

    def _extended(
        self,
        output: SamplerOutput,
        tokens: Ints,
        count: Ints,
        rows: Ints,
        trusted: Ints,
        guesses: Ints,
        said: Tensor,
        size: Ints,
    ) -> SamplerOutput:
        """The output with the masks' tokens behind AR's, and their log-probabilities where asked for."""
        width = int(max(tokens.shape[1], (count[rows] + trusted).max()))
        longer = np.full((len(tokens), width), PLACEHOLDER_TOKEN_ID, dtype=tokens.dtype)
        longer[:, : tokens.shape[1]] = tokens
        new = np.arange(guesses.shape[1]) < trusted[:, None]
        place = (np.repeat(rows, trusted), spans(count[rows], trusted))
        longer[place] = guesses[new]
        logprobs = output.logprobs_tensors
        if logprobs is not None:
            from_said = self._index(spans(np.cumsum(size) - size, trusted))
            values = said[from_said]
            if not self.is_logits_logprobs_mode:
                values = self.sampler.compute_logprobs(values)
            k = logprobs.logprobs.shape[1] - 1
            behind = self.sampler.gather_logprobs(values, k, torch.from_numpy(guesses[new]).to(values.device))
            logprobs = _placed(logprobs, behind, tokens.shape, width, place)
        return dataclasses.replace(
            output,
            sampled_token_ids=torch.from_numpy(longer).to(output.sampled_token_ids.device),
            logprobs_tensors=logprobs,
        )

    def _index(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._batch.device)


def _placed(
    first: LogprobsTensors,
    behind: LogprobsTensors,
    shape: tuple[int, ...],
    width: int,
    place: tuple[Ints, Ints],
) -> LogprobsTensors:
    """Log-probabilities [R * W, …] laid out for more columns, [R * width, …], with others put at `place`."""

    def each(old: Tensor, new: Tensor) -> Tensor:
        wider = old.new_zeros((shape[0], width, *old.shape[1:]))
        wider[:, : shape[1]] = old.view(*shape, *old.shape[1:])
        wider[place] = new.to(old.dtype)
        return wider.flatten(0, 1)

    return LogprobsTensors(
        each(first.logprob_token_ids, behind.logprob_token_ids),
        each(first.logprobs, behind.logprobs),
        each(first.selected_token_ranks, behind.selected_token_ranks),
    )
