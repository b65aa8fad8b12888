"""The Hugging Face trainer that joins examples, streams and loss: TRL's SFTTrainer with another forward.

Data preparation, chat templates, packing, checkpoints, resume, mixed precision, DDP, FSDP and DeepSpeed are
the library's. What differs: a step's rows are cut into micro-batches by tokens, and each micro-batch goes
through the model as two streams.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import trl

from mars_lm.errors import MarsError
from mars_lm.settings import MarsSettings
from mars_lm.training.objective import LossParts, Objective, compute_loss, preset
from mars_lm.training.streams import IGNORE, Gaps, Streams, build


@dataclasses.dataclass
class MarsConfig(trl.SFTConfig):
    """TRL's `SFTConfig` and what MARS adds to it."""

    preset: str = dataclasses.field(
        default="mars", metadata={"help": "mars, mars-no-sft-loss, ar-sft or block-diffusion."}
    )
    block_size: int = dataclasses.field(
        default=4, metadata={"help": "B: the most tokens that one forward may yield."}
    )
    layout: str = dataclasses.field(default="window", metadata={"help": "Noisy stream: window or paper."})
    mask_loss: str = dataclasses.field(
        default="ce", metadata={"help": "ce: the data's token. kd: the clean stream's own distribution."}
    )
    ar_weight: float = dataclasses.field(default=1.0, metadata={"help": "α, the weight of the clean loss."})
    mask_weight: float = dataclasses.field(default=1.0, metadata={"help": "w, the weight of the noisy loss."})
    gap_masking: str = dataclasses.field(default="all", metadata={"help": "all or random (SPEC 1)."})
    gap_attention: str = dataclasses.field(default="causal", metadata={"help": "causal or bidirectional."})
    gap_alignment: str = dataclasses.field(default="next", metadata={"help": "next or same."})
    max_tokens_per_micro_batch: int = dataclasses.field(
        default=2048,
        metadata={
            "help": "A device's rows of a step are cut into micro-batches of at most this many tokens, both "
            "streams and padding counted: it bounds memory, and changes no loss."
        },
    )

    def objective(self) -> Objective:
        """The objective that these fields name."""
        return preset(
            self.preset,
            block_size=self.block_size,
            layout=self.layout,
            mask_loss=self.mask_loss,
            ar_weight=self.ar_weight,
            mask_weight=self.mask_weight,
            gaps=Gaps(self.gap_masking, self.gap_attention, self.gap_alignment),  # type: ignore[arg-type]
        )


@dataclasses.dataclass
class StreamCollator:
    """Rows of token ids and labels -> padded tensors, with packed examples told apart.

    Returns `input_ids`, `labels`, `example` and `position_ids`, each [R, L] int64 as `streams.build` takes
    them. The first label of an example is dropped: nothing stands before it to predict it.
    """

    pad_token_id: int

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        length = max(len(row["input_ids"]) for row in rows)
        batch = {
            "input_ids": torch.full((len(rows), length), self.pad_token_id, dtype=torch.int64),
            "labels": torch.full((len(rows), length), IGNORE, dtype=torch.int64),
            "example": torch.zeros((len(rows), length), dtype=torch.int64),
            "position_ids": torch.zeros((len(rows), length), dtype=torch.int64),
        }
        for number, row in enumerate(rows):
            count = len(row["input_ids"])
            lengths = torch.tensor(row.get("seq_lengths") or [count])
            batch["input_ids"][number, :count] = torch.tensor(row["input_ids"])
            batch["labels"][number, :count] = torch.tensor(row["labels"])
            batch["example"][number, :count] = torch.repeat_interleave(
                torch.arange(1, len(lengths) + 1), lengths
            )
            starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
            batch["position_ids"][number, :count] = torch.arange(count) - starts
        batch["labels"][batch["position_ids"] == 0] = IGNORE
        return batch


def micro_batches(
    batch: dict[str, torch.Tensor], cost: torch.Tensor, max_tokens: int, at_least: int = 1
) -> Iterator[dict[str, torch.Tensor]]:
    """Cut a batch into micro-batches by tokens, rows of like length together.

    Args:
        batch: [R, L] tensors as the collator makes them.
        cost: [R] the tokens of each row, both streams counted.
        max_tokens: rows x longest row of a micro-batch stays at or below this; a longer row goes alone.
        at_least: how many micro-batches to make in any case (other ranks may need more of them); those that
            rows are lacking for repeat one without its labels, and weigh nothing.
    """
    parts = partition(cost, max_tokens)
    for rows in parts:
        length = int((batch["example"][rows] > 0).any(dim=0).nonzero().max()) + 1
        yield {name: value[rows, :length] for name, value in batch.items()}
    for _ in range(at_least - len(parts)):
        short = cost.argmin()[None]
        empty = {name: value[short] for name, value in batch.items()}
        yield {**empty, "labels": torch.full_like(empty["labels"], IGNORE)}


def partition(cost: torch.Tensor, max_tokens: int) -> list[list[int]]:
    """Row numbers, longest first, in groups whose rows x longest row stay within `max_tokens`."""
    order = cost.argsort(descending=True, stable=True).tolist()
    parts: list[list[int]] = []
    for row in order:
        if parts and int(cost[parts[-1][0]]) * (len(parts[-1]) + 1) <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


class MarsTrainer(trl.SFTTrainer):
    """`SFTTrainer` for MARS: same arguments, with a `MarsConfig` and a model made MARS-ready.

    Args:
        mars: the checkpoint's settings; `mask_token_id` is the noisy stream's token.
        attention: `sdpa` (a dense mask) or `flex_attention`; default: flex on a GPU, else sdpa.
    Raises:
        MarsError: the rows hold no response at all.
    """

    args: MarsConfig

    def __init__(
        self,
        model: Any,
        args: MarsConfig,
        *,
        mars: MarsSettings,
        attention: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.mars = mars
        self.objective = args.objective()
        # Set before SFTTrainer prepares the data; its padding-free collator is replaced below.
        super().__init__(model=model, args=args, **kwargs)
        if not len(self.train_dataset):  # type: ignore[arg-type]
            raise MarsError(
                "No row of the training data has a response left to train on: check the rows, and max_length."
            )
        self.data_collator = StreamCollator(pad_token_id=self._tokenizer.pad_token_id)
        self._signature_columns = ["input_ids", "labels", "seq_lengths"]
        self._loss_shifts_labels = False  # the collator's labels are exactly the supervised tokens
        self.model_accepts_loss_kwargs = True
        self.attention = attention or ("flex_attention" if self.args.device.type == "cuda" else "sdpa")
        base = self._base_model()
        base.config._attn_implementation = self.attention
        self._add_mars_forward(base)
        self._totals: dict[str, dict[str, torch.Tensor | float]] = {
            "train": defaultdict(float),
            "eval": defaultdict(float),
        }
        self._since = time.perf_counter()

    def _base_model(self) -> Any:
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    def _add_mars_forward(self, base: Any) -> None:
        """Let `model(streams=…, count=…)` run decoder and loss: inside `forward`, where DDP and FSDP hook in."""
        plain_forward = base.forward
        objective, mask_token_id = self.objective, self.mars.mask_token_id

        # The original signature stays visible: `generate` validates its arguments against it.
        @functools.wraps(plain_forward)
        def forward(*args: Any, streams: Streams | None = None, count: Any = None, **kwargs: Any) -> Any:
            if streams is None:
                return plain_forward(*args, **kwargs)
            mask = streams.block_mask() if self.attention == "flex_attention" else streams.dense_mask()
            hidden = base.base_model(
                input_ids=streams.input_ids,
                position_ids=streams.position_ids,
                attention_mask=mask,
                use_cache=False,
            ).last_hidden_state
            head = base.get_output_embeddings()
            # PEFT wraps a tied head together with the embedding whose mask row it trains; the projection
            # itself is the frozen one inside.
            head = getattr(head, "original_module", head)
            return compute_loss(hidden, head, streams, objective, count, mask_token_id=mask_token_id)

        base.forward = forward

    def streams(self, batch: dict[str, torch.Tensor]) -> Streams:
        """A collated batch as two streams, with the phases of the present visit."""
        training = self.model.training
        return build(
            batch["input_ids"],
            batch["labels"],
            batch["example"],
            batch["position_ids"],
            mask_token_id=self.mars.mask_token_id,
            block_size=self.objective.block_size,
            layout=self.objective.layout,
            gaps=self.objective.gaps,
            noisy=self.objective.noisy,
            seed=self.args.seed,
            # The epoch that a step belongs to; rounding must not push its last step into the next.
            visit=int((self.state.epoch or 0.0) + 1e-6) if training else 0,
        )

    def training_step(  # type: ignore[override]
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Forward and backward of one device's rows, micro-batch by micro-batch; gradients meet other ranks once."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        inputs = self._prepare_inputs(inputs)
        cost = (inputs["example"] > 0).sum(dim=1)
        if self.objective.noisy:
            cost = cost + (inputs["labels"] != IGNORE).sum(dim=1)
        cost = cost.cpu()
        parts = len(partition(cost, self.args.max_tokens_per_micro_batch))
        if self.accelerator.num_processes > 1:
            parts = int(self.accelerator.gather(torch.tensor([parts], device=self.args.device)).max())
        total = torch.zeros((), device=self.args.device)
        remaining = parts
        outer_sync = self.accelerator.gradient_state.sync_gradients
        for micro in micro_batches(inputs, cost, self.args.max_tokens_per_micro_batch, parts):
            remaining -= 1
            last = remaining == 0
            context = contextlib.nullcontext() if last else self.accelerator.no_sync(model)
            # DeepSpeed asks this flag, DDP and FSDP the context above.
            self.accelerator.gradient_state._set_sync_gradients(outer_sync and last)
            with context, self.maybe_activation_offload_context:
                with self.compute_loss_context_manager():
                    loss = self.compute_loss(model, micro, num_items_in_batch=num_items_in_batch)
                self.accelerator.backward(loss)
            total += loss.detach()
        self.accelerator.gradient_state._set_sync_gradients(outer_sync)
        return total

    def compute_loss(  # type: ignore[override]
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """SPEC 2's loss of one micro-batch, divided by the step's N."""
        streams = self.streams(inputs)
        count = num_items_in_batch
        if count is None:
            count = (inputs["labels"] != IGNORE).sum()
        count = torch.as_tensor(count, device=inputs["labels"].device).clamp(min=1)
        parts: LossParts = model(streams=streams, count=count)
        self._note(parts, tokens=int((inputs["example"] > 0).sum()))
        loss = parts.loss
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            # N counts every rank's tokens, and the ranks' gradients are averaged, not summed.
            loss = loss * self.accelerator.num_processes
        return (loss, {"logits": None}) if return_outputs else loss

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        return loss, None, None

    def _note(self, parts: LossParts, *, tokens: int) -> None:
        totals = self._totals["train" if self.model.training else "eval"]
        for name, value in (
            ("clean_sum", parts.clean_sum),
            ("noisy_sum", parts.noisy_sum),
            ("clean_count", parts.clean_count),
            ("noisy_count", parts.noisy_count),
            ("block_starts", parts.block_starts),
            ("tokens", tokens),
            ("seen", parts.seen),
            ("right", parts.right),
            ("agreeing", parts.agreeing),
        ):
            totals[name] = totals[name] + value

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the loss's parts, the AR share, mask accuracy by distance and tokens per second to what is logged."""
        mode = "train" if self.model.training else "eval"
        totals = self._totals[mode]
        prefix = "" if mode == "train" else "eval_"
        if totals:
            gathered = {
                name: self.accelerator.reduce(
                    torch.as_tensor(value, dtype=torch.float32, device=self.args.device)
                )
                for name, value in totals.items()
            }
            clean, noisy = float(gathered["clean_count"]), float(gathered["noisy_count"])
            if clean:
                logs[f"{prefix}loss/ar"] = float(gathered["clean_sum"]) / clean
            if noisy:
                logs[f"{prefix}loss/mask"] = float(gathered["noisy_sum"]) / noisy
                seen = gathered["seen"]
                for distance in seen.nonzero()[:, 0].tolist():
                    count = float(seen[distance])
                    logs[f"{prefix}accuracy/distance_{distance}"] = float(gathered["right"][distance]) / count
                    if clean or self.objective.mask_loss == "kd":
                        agreeing = float(gathered["agreeing"][distance])
                        logs[f"{prefix}agreement/distance_{distance}"] = agreeing / count
            logs[f"{prefix}ar_share"] = self.objective.ar_share(
                int(clean), int(noisy), int(gathered["block_starts"])
            )
            now = time.perf_counter()
            if mode == "train":
                logs["tokens_per_second"] = float(gathered["tokens"]) / (now - self._since)
                self._since = now
        self._totals[mode] = defaultdict(float)
        super().log(logs, start_time)
