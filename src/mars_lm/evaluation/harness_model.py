"""lm-evaluation-harness model class `mars`: texts through the engine, log-likelihoods through plain AR."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from mars_lm import checkpoint as checkpoints
from mars_lm.checkpoint import Checkpoint
from mars_lm.decoding import GenerationResult
from mars_lm.detokenizer import decode as text_of
from mars_lm.errors import MarsError
from mars_lm.evaluation.decoders import Decode, EngineDecoder, settings_for
from mars_lm.evaluation.journal import Journal
from mars_lm.evaluation.speed import Speed
from mars_lm.settings import DecodingSettings

# The most tokens of logits in one forward when scoring: 2048 rows of a vocabulary of 150,000 are 1.2 GB.
_SCORED_TOKENS = 2048


@register_model("mars")
class MarsLM(TemplateLM):
    """A checkpoint as the harness sees it.

    From the harness's command: `lm_eval --model mars --model_args pretrained=FOLDER,tau=0.95,exact=False`.

    Args:
        pretrained: a Hub id, a folder or a GGUF file; None is the packaged model.
        adapter, dtype, device: as `checkpoint.load` takes them.
        batch_size: requests decoded together.
        max_length: longest prompt and response together; None: the model's context.
        max_gen_toks: the token budget of tasks that name none.
        loaded: a checkpoint that is loaded already, in place of `pretrained`.
        decode: how texts are made; None is the engine.
        settings: how they are decoded, in place of the fields below.
        journal: a file that keeps every finished answer, so that a run that was killed goes on.
        **decoding: fields of `DecodingSettings`: tau, rule, block_size, exact, recovery, adaptive.
    Attributes:
        checkpoint: the checkpoint.
        settings: what every request is decoded with; the task adds its budget and its stop strings.
        speed: tokens, forwards and seconds, by task.
    Raises:
        MarsError: no such model, or settings that it was not trained for.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        adapter: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        batch_size: int | str | None = 16,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        loaded: Checkpoint | None = None,
        decode: Decode | None = None,
        settings: DecodingSettings | None = None,
        journal: Path | None = None,
        **decoding: Any,
    ) -> None:
        super().__init__()
        if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
            device = None  # the harness's own default, which it expects nobody to take at its word
        if loaded is None:
            loaded = (
                checkpoints.load_default(dtype=dtype, device=device)
                if pretrained is None and adapter is None
                else checkpoints.load(
                    pretrained if pretrained is not None else str(adapter),
                    adapter=adapter if pretrained is not None else None,
                    dtype=dtype,
                    device=device,
                )
            )
        self.checkpoint = loaded
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.settings = settings if settings is not None else settings_for(loaded, decoding)
        self.batch_size = _batch_size(batch_size)
        context = int(getattr(loaded.model.config, "max_position_embeddings", None) or 2**20)
        self.max_length = min(max_length or context, context)
        self.max_gen_toks = max_gen_toks
        self.speed = Speed()
        self._decode = decode or EngineDecoder(loaded, max_rows=self.batch_size)
        self._journal = journal
        self._device = next(loaded.model.parameters()).device

    # -- what the harness asks of the tokenizer

    @property
    def eot_token_id(self) -> int:
        """The token that the harness conditions on where a text has no context."""
        ends = checkpoints.end_token_ids(self.checkpoint)
        eos = self.tokenizer.eos_token_id
        return int(eos if eos is not None else min(ends, default=0))

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return int(bos) if bos is not None else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text; a beginning-of-text token that the text has already is not added again."""
        options: dict[str, Any] = {}
        if add_special_tokens is not None:
            options["add_special_tokens"] = add_special_tokens
        elif self.tokenizer.bos_token and string.startswith(self.tokenizer.bos_token):
            options["add_special_tokens"] = False
        return list(self.tokenizer(string, **options).input_ids)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation as the checkpoint's template writes it.

        Raises:
            MarsError: no template, or a conversation that it does not take.
        """
        if not self.tokenizer.chat_template:
            raise MarsError(
                "The tokenizer has no chat template: evaluate it without one (--no-chat-template)."
            )
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    chat_history,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            )
        except Exception as error:  # templates raise what they like
            if any(message["role"] == "system" for message in chat_history):
                rest = [message for message in chat_history if message["role"] != "system"]
                return self.apply_chat_template(rest, add_generation_prompt)
            raise MarsError(f"The chat template does not take these messages: {error}.") from error

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside its results: decoding settings, and the speed."""
        return {"decoding": dataclasses.asdict(self.settings), "speed": self.speed.summary()}

    # -- texts

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each request's text up to its first stop string, its budget, or an end token."""
        prompts, settings, stops = [], [], []
        for request in requests:
            context, kwargs = request.args[:2]
            own, until = request_settings(self.settings, kwargs, self.max_gen_toks)
            room = self.max_length - own.max_new_tokens
            if room < 1:
                raise MarsError(
                    f"The budget of {own.max_new_tokens} new tokens leaves no room for a prompt in a context "
                    f"of {self.max_length}: lower it with --max-new-tokens."
                )
            # As the harness does: of a prompt that is too long, the end stays.
            prompts.append(self.tok_encode(context)[-room:])
            settings.append(own)
            stops.append(until)
        tasks = [str(request.task_name) for request in requests]
        results = self._answers(tasks, prompts, settings)
        texts = []
        for request, until, result in zip(requests, stops, results, strict=True):
            text = text_of(self.tokenizer, result.token_ids)
            for stop in until:
                text = text.split(stop)[0]
            texts.append(text)
            self.cache_hook.add_partial("generate_until", request.args[:2], text)
        return texts

    def _answers(
        self, tasks: list[str], prompts: list[list[int]], settings: list[DecodingSettings]
    ) -> list[GenerationResult]:
        journal = Journal(self._journal) if self._journal else None
        answers: dict[int, GenerationResult] = {}
        if journal is not None:
            self.speed.seconds += journal.earlier_seconds()
            for i, (task, prompt, own) in enumerate(zip(tasks, prompts, settings, strict=True)):
                if (kept := journal.find(task, prompt, own)) is not None:
                    answers[i] = kept
        # Long ones first, so that the last rows to run are short and none runs alone for long.
        todo = sorted(set(range(len(prompts))) - set(answers), key=lambda i: (-len(prompts[i]), i))
        bar = tqdm(total=len(prompts), initial=len(answers), desc="answers", disable=None, leave=False)

        def note(at: int, result: GenerationResult) -> None:
            i = todo[at]
            answers[i] = result
            bar.update()
            if journal is not None:
                journal.write(tasks[i], prompts[i], settings[i], result)

        start = time.perf_counter()
        self._decode([prompts[i] for i in todo], [settings[i] for i in todo], note)
        self.speed.seconds += time.perf_counter() - start
        bar.close()
        if journal is not None:
            journal.close()
        for i, task in enumerate(tasks):
            self.speed.count(task, answers[i])
        return [answers[i] for i in range(len(prompts))]

    # -- log-likelihoods: one-token mode is plain AR, so these are the model's own

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        for batch in _by_tokens(order, [len(c) + len(t) for _, c, t in requests], _SCORED_TOKENS):
            rows = [self._cut(*requests[i][1:]) for i in batch]
            width = max(len(ids) for ids, _ in rows)
            ids = torch.zeros(len(rows), width, dtype=torch.long)
            seen = torch.zeros(len(rows), width, dtype=torch.long)
            for row, (fed, _count) in enumerate(rows):
                ids[row, : len(fed)] = torch.tensor(fed)
                seen[row, : len(fed)] = 1
            first = min(len(fed) - count for fed, count in rows)
            # Right padding: causal attention keeps real tokens from seeing it.
            logits = self.model(
                input_ids=ids.to(self._device),
                attention_mask=seen.to(self._device),
                use_cache=False,
                logits_to_keep=torch.arange(first, width, device=self._device),
            ).logits
            for row, i in enumerate(batch):
                fed, count = rows[row]
                target = torch.tensor(requests[i][2][-count:], device=self._device)
                end = len(fed) - first
                own = logits[row, end - count : end].float().log_softmax(dim=-1)  # [count, V]
                picked = own.gather(1, target[:, None]).sum()
                answers[i] = (float(picked), bool((own.argmax(dim=-1) == target).all()))
        for request, answer in zip(requests, answers, strict=True):
            if request[0] is not None:
                self.cache_hook.add_partial("loglikelihood", request[0], answer)
        return answers

    def _cut(self, context: list[int], continuation: list[int]) -> tuple[list[int], int]:
        """What is fed (all but the last token, cut at the front), and how many tokens it predicts."""
        fed = (context + continuation)[-(self.max_length + 1) :][:-1]
        return fed, min(len(continuation), len(fed))

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text, in disjoint windows of the model's context."""
        windows: list[tuple[Any, list[int], list[int]]] = []
        owner = []
        for number, request in enumerate(requests):
            for window in utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                context, continuation = utils.make_disjoint_window(window)
                windows.append((None, list(context), list(continuation)))
                owner.append(number)
        totals = [0.0] * len(requests)
        for number, (value, _) in zip(owner, self._loglikelihood_tokens(windows), strict=True):
            totals[number] += value
        return totals


def request_settings(
    base: DecodingSettings, kwargs: dict[str, Any], budget: int
) -> tuple[DecodingSettings, list[str]]:
    """A task's generation keywords as decoding settings, and its stop strings.

    Args:
        base: rule, tau, B and mode.
        kwargs: the harness's `generation_kwargs`: until, max_gen_toks (or an alias), do_sample, temperature,
            top_p, top_k, min_p, repetition_penalty.
        budget: max_gen_toks where the task names none.
    Raises:
        MarsError: a value is out of range.
    """
    until = kwargs.get("until") or []
    until = [until] if isinstance(until, str) else [stop for stop in until if stop]
    named = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    tokens = next((int(kwargs[name]) for name in named if kwargs.get(name) is not None), budget)
    changes: dict[str, Any] = {"max_new_tokens": tokens, "stop": tuple(until)}
    temperature = float(kwargs.get("temperature") or 0.0)
    if kwargs.get("do_sample", temperature > 0):
        changes["temperature"] = temperature or 1.0
        for name in ("top_p", "min_p"):
            if kwargs.get(name) is not None:
                changes[name] = float(kwargs[name])
        if kwargs.get("top_k"):
            changes["top_k"] = int(kwargs["top_k"])
    if kwargs.get("repetition_penalty"):
        changes["repetition_penalty"] = float(kwargs["repetition_penalty"])
    return dataclasses.replace(base, **changes), until


def _batch_size(value: int | str | None) -> int:
    """The harness may say "auto", or nothing: the engine's own default stands for both."""
    if value is None or (isinstance(value, str) and value.startswith("auto")):
        return 16
    size = int(value)
    if size < 1:
        raise MarsError(f"batch_size is {value}, expected a whole number of 1 or more.")
    return size


def _by_tokens(order: list[int], lengths: list[int], most: int) -> list[list[int]]:
    """Cut rows, longest first, into batches of at most `most` tokens, padding counted."""
    batches: list[list[int]] = []
    for i in order:
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= most:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches
