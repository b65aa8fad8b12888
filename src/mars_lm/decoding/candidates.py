"""A request's own wishes -> the candidate at each position: penalties, bans, processors, then the choice.

What depends on earlier tokens sees the committed tokens and the run so far, so that a step of several tokens
chooses what one-token steps would.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mars_lm.decoding.sampling import NOT_NUMBERS, Sampling, best_tokens, sample
from mars_lm.errors import MarsError
from mars_lm.settings import DecodingSettings

Ints = np.ndarray
Words = tuple[tuple[int, ...], ...]
# As transformers has them: (token ids int64 [1, n], scores float32 [1, V]) -> scores [1, V].
Processor = Callable[[Tensor, Tensor], Tensor]

# The candidate where the wishes rule out every token.
NONE_LEFT = -1


class Wishes:
    """What each row asks of its candidates, one array entry a row."""

    def __init__(self, rows: int, vocabulary: int) -> None:
        self.ends = np.zeros((rows, vocabulary), dtype=bool)  # tokens that end the row
        self.first_end = np.zeros(rows, dtype=np.int64)  # the first position where one may stand; 0: any
        self.temperature = np.zeros(rows)
        self.top_k = np.zeros(rows, dtype=np.int64)
        self.top_p = np.ones(rows)
        self.min_p = np.zeros(rows)
        self.seed = np.zeros(rows, dtype=np.uint64)
        self.logprobs = np.full(rows, -1)  # -1: none
        self.repetition = np.ones(rows)
        self.presence = np.zeros(rows)
        self.frequency = np.zeros(rows)
        self.penalised = np.zeros(rows, dtype=bool)
        self.bad_words: list[Words] = [()] * rows
        self.processors: list[tuple[Processor, ...]] = [()] * rows
        self.looks_back = np.zeros(rows, dtype=bool)  # penalised, or with bad words or processors

    def set(
        self,
        row: int,
        settings: DecodingSettings,
        *,
        prompt: int,
        seed: int,
        end_ids: Ints,
        processors: tuple[Processor, ...] = (),
    ) -> None:
        """A request takes the row."""
        self.ends[row] = False
        if not settings.ignore_eos:
            self.ends[row, end_ids] = True
        self.ends[row, list(settings.stop_token_ids)] = True
        self.first_end[row] = prompt + settings.min_new_tokens if self.ends[row].any() else 0
        self.temperature[row], self.seed[row] = settings.temperature, seed
        self.top_k[row], self.top_p[row], self.min_p[row] = settings.top_k, settings.top_p, settings.min_p
        self.logprobs[row] = -1 if settings.logprobs is None else settings.logprobs
        self.repetition[row] = settings.repetition_penalty
        self.presence[row], self.frequency[row] = settings.presence_penalty, settings.frequency_penalty
        self.penalised[row] = (
            settings.repetition_penalty != 1
            or settings.presence_penalty != 0
            or settings.frequency_penalty != 0
        )
        self.bad_words[row] = settings.bad_words_ids
        self.processors[row] = processors
        self.looks_back[row] = self.penalised[row] or bool(settings.bad_words_ids) or bool(processors)

    def read_logits(self, rows: Ints, n: Ints) -> bool:
        """Whether any of the rows asks for more than the best token of its logits from position n [R] on."""
        more = (self.temperature[rows] > 0) | self.looks_back[rows] | (self.logprobs[rows] >= 0)
        return bool((more | (n < self.first_end[rows])).any())

    def choose(
        self, logits: Tensor, rows: Ints, position: Ints, tokens: Ints, prompt: Ints, best: Ints
    ) -> tuple[Ints, np.ndarray]:
        """The candidate of M positions.

        Args:
            logits: float32 [M, V] at temperature 1; unchanged.
            rows: int64 [M]; position: int64 [M], where the candidate would stand.
            tokens: int64 [all rows, length]: what stands before it, read for rows that look back only.
            prompt: int64 [M], length of the row's prompt.
            best: int64 [M], the `best_tokens` of the logits.
        Returns:
            candidates int64 [M], `NONE_LEFT` where the wishes left no token to choose; finite bool [M], False
            where the model's own logits were no numbers.
        """
        raw, finite = logits, best != NOT_NUMBERS
        logits = self._adjusted(raw, rows, position, tokens, prompt)
        candidates = best
        if logits is not raw:  # what was said of the model's own logits stays: a ban is no fault of theirs
            candidates = np.where(finite, best_tokens(logits), NOT_NUMBERS)
            candidates[finite & (candidates == NOT_NUMBERS)] = NONE_LEFT
        candidates = np.where(finite, candidates, 0)
        drawn = np.flatnonzero((self.temperature[rows] > 0) & finite & (candidates != NONE_LEFT))
        if drawn.size:
            r = rows[drawn]
            how = Sampling(
                self.temperature[r],
                self.top_k[r],
                self.top_p[r],
                self.min_p[r],
                self.seed[r],
                position[drawn],
            )
            if drawn.size < len(rows):
                logits = logits[torch.from_numpy(drawn).to(logits.device)]
            candidates = candidates.copy()
            candidates[drawn] = sample(logits, how).cpu().numpy()
        return candidates, finite

    def _adjusted(self, logits: Tensor, rows: Ints, position: Ints, tokens: Ints, prompt: Ints) -> Tensor:
        early, looks_back = position < self.first_end[rows], self.looks_back[rows]
        if not (early.any() or looks_back.any()):
            return logits
        too_early = np.flatnonzero(early)
        penalised = np.flatnonzero(self.penalised[rows])
        looking = np.flatnonzero(looks_back).tolist()
        barred = [i for i in looking if self.bad_words[rows[i]]]
        processed = [i for i in looking if self.processors[rows[i]]]
        if not (too_early.size or penalised.size or barred or processed):
            return logits
        logits = logits.clone()
        if penalised.size:
            place = torch.from_numpy(penalised).to(logits.device)
            logits[place] = self._penalise(
                logits[place],
                rows[penalised],
                position[penalised],
                tokens[rows[penalised]],
                prompt[penalised],
            )
        if too_early.size:
            place = torch.from_numpy(too_early).to(logits.device)
            ends = torch.from_numpy(self.ends[rows[too_early]]).to(logits.device)
            logits[place] = logits[place].masked_fill(ends, -torch.inf)
        for i in barred:
            banned = _completing(self.bad_words[rows[i]], tokens[rows[i], : position[i]])
            logits[i, banned] = -torch.inf
        for i in processed:
            before = torch.from_numpy(tokens[rows[i], : position[i]].copy()).to(logits.device)
            logits[i] = _processed(self.processors[rows[i]], before[None], logits[i : i + 1])[0]
        return logits

    def _penalise(self, logits: Tensor, rows: Ints, position: Ints, tokens: Ints, prompt: Ints) -> Tensor:
        """Repetition as transformers has it (prompt and response), presence and frequency as OpenAI's API
        has them (response alone)."""
        column = np.arange(tokens.shape[1])
        known = column < position[:, None]
        place = np.nonzero(known)[0]
        counts = np.zeros(logits.shape, dtype=np.float32)
        seen = np.zeros(logits.shape, dtype=bool)
        seen[place, tokens[known]] = True
        said = known & (column >= prompt[:, None])
        np.add.at(counts, (np.nonzero(said)[0], tokens[said]), 1)

        def each(values: Ints) -> Tensor:
            return torch.from_numpy(values[rows].astype(np.float32)).to(logits.device)[:, None]

        repetition = each(self.repetition)
        again = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(torch.from_numpy(seen).to(logits.device), again, logits)
        times = torch.from_numpy(counts).to(logits.device)
        return logits - each(self.frequency) * times - each(self.presence) * (times > 0)


def _processed(processors: tuple[Processor, ...], input_ids: Tensor, scores: Tensor) -> Tensor:
    """float32 [1, V]: the scores behind int64 [1, n] ids, passed through one processor after the other."""
    shape = scores.shape
    for processor in processors:
        scores = processor(input_ids, scores)
        if not isinstance(scores, Tensor) or scores.shape != shape:
            raise MarsError(
                f"The logits processor {type(processor).__name__} gave "
                f"{list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__}, expected "
                f"scores of shape {list(shape)}."
            )
    return scores


def _completing(words: Words, tokens: Ints) -> list[int]:
    """The last tokens of the words whose beginning stands at the end of `tokens`."""
    size = len(tokens)
    return [
        word[-1]
        for word in words
        if len(word) - 1 <= size and tokens[size - len(word) + 1 :].tolist() == list(word[:-1])
    ]
