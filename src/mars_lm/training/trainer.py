"""The Hugging Face trainer that joins examples, streams and loss: TRL's SFTTrainer with another forward.

Data preparation, chat templates, packing, checkpoints, resume, mixed precision, DDP, FSDP and DeepSpeed are
the library's. What differs: a step's rows are cut into micro-batches by tokens, and each micro-batch goes
through the model as two streams.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import logging
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import datasets
import torch
import trl
from accelerate import DistributedType

from mars_lm.errors import MarsError
from mars_lm.folders import is_no_space
from mars_lm.settings import MarsSettings
from mars_lm.training.examples import has_response
from mars_lm.training.lora_linear import fuse_lora
from mars_lm.training.objective import LossParts, Objective, compute_loss, preset
from mars_lm.training.streams import IGNORE, Gaps, Streams, build

logger = logging.getLogger(__name__)

ATTENTIONS = ("sdpa", "flex_attention")


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
    mask_weight: float = dataclasses.field(
        default=1.0, metadata={"help": "w, the weight of each noisy prediction."}
    )
    phases: int = dataclasses.field(
        default=1,
        metadata={
            "help": "How many noisy streams share one clean one, at phases that lie block_size/phases apart: "
            "more masks learn from each pass over a text. The loss is their mean."
        },
    )
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.max_tokens_per_micro_batch, int) or self.max_tokens_per_micro_batch < 1:
            raise MarsError(
                f"max_tokens_per_micro_batch is {self.max_tokens_per_micro_batch!r}, expected a whole number "
                "of 1 or more."
            )
        if self.packing and self.packing_strategy == "wrapped":
            raise MarsError(
                "packing_strategy is 'wrapped', which cuts examples apart and lets them see each other: "
                "expected 'bfd' or 'bfd_split'."
            )

    def objective(self) -> Objective:
        """The objective that these fields name.

        Raises:
            MarsError: a field is outside its range.
        """
        return preset(
            self.preset,
            block_size=self.block_size,
            layout=cast(Any, self.layout),
            mask_loss=cast(Any, self.mask_loss),
            ar_weight=self.ar_weight,
            mask_weight=self.mask_weight,
            phases=self.phases,
            gaps=Gaps(
                cast(Any, self.gap_masking), cast(Any, self.gap_attention), cast(Any, self.gap_alignment)
            ),
        )


@dataclasses.dataclass
class StreamCollator:
    """Rows of token ids and labels -> padded tensors, with packed examples told apart.

    Returns `input_ids`, `labels`, `example` and `position_ids`, each [R, L] int64 as `streams.build` takes
    them. Two kinds of label are dropped: an example's first, as nothing stands before it to predict it, and
    the mask token, which has no probability.
    """

    pad_token_id: int
    mask_token_id: int

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
        batch["labels"][(batch["position_ids"] == 0) | (batch["labels"] == self.mask_token_id)] = IGNORE
        return batch


def row_costs(batch: dict[str, torch.Tensor], objective: Objective) -> torch.Tensor:
    """[R] at most how many tokens each row of a collated batch has in both streams."""
    real = batch["example"] > 0
    costs = real.sum(dim=1)
    if objective.noisy:
        # The paper's noisy stream covers the whole row, the window's the response.
        noisy = real if objective.layout == "paper" else batch["labels"] != IGNORE
        costs = costs + noisy.sum(dim=1) * objective.phases
    return costs.cpu()


def partition(costs: torch.Tensor, max_tokens: int) -> list[list[int]]:
    """Row numbers, longest first, in groups whose rows x longest row stay within `max_tokens`.

    A row that is longer alone makes a group of its own.
    """
    parts: list[list[int]] = []
    for row in costs.argsort(descending=True, stable=True).tolist():
        if parts and int(costs[parts[-1][0]]) * (len(parts[-1]) + 1) <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def micro_batches(
    batch: dict[str, torch.Tensor], parts: list[list[int]], at_least: int = 1
) -> Iterator[dict[str, torch.Tensor]]:
    """Cut a batch into micro-batches.

    Args:
        batch: [R, L] tensors as the collator makes them.
        parts: the row numbers of each micro-batch.
        at_least: how many micro-batches to make in any case (other ranks may need more of them); those that
            rows are lacking for repeat a short one without its labels, and weigh nothing.
    """
    for rows in parts:
        length = int((batch["example"][rows] > 0).any(dim=0).nonzero().max()) + 1
        yield {name: value[rows, :length] for name, value in batch.items()}
    for _ in range(at_least - len(parts)):
        rows = parts[-1][-1:]
        length = int((batch["example"][rows] > 0).sum())
        empty = {name: value[rows, :length] for name, value in batch.items()}
        yield {**empty, "labels": torch.full_like(empty["labels"], IGNORE)}


def _logit_scale(base: Any) -> float:
    """What a causal LM multiplies its projected hidden states with to make its logits.

    Raises:
        MarsError: its logits are another function of the projection than a multiple.
    """
    head, device = base.get_output_embeddings(), base.get_input_embeddings().weight.device
    words = base.get_input_embeddings().weight.shape[0]
    ids = torch.arange(min(4, words), device=device)[None]
    training = base.training
    base.eval()
    with torch.no_grad():
        projected = head(base.base_model(input_ids=ids, use_cache=False).last_hidden_state).float()
        logits = base(input_ids=ids, use_cache=False).logits.float()
    base.train(training)
    if not projected.any():
        return 1.0
    scale = float((logits * projected).sum() / projected.square().sum())
    if abs(scale - 1) < 1e-3:
        scale = 1.0
    off = (logits - scale * projected).abs().max() / logits.abs().max()
    if getattr(base.config, "final_logit_softcapping", None) or off > 0.02:
        raise MarsError(
            f"This model ({base.config.model_type}) does more to its logits than scale them, and cannot be "
            "trained here: the loss would not be its own."
        )
    return scale


class MarsTrainer(trl.SFTTrainer):
    """`SFTTrainer` for MARS: same arguments, with a `MarsConfig` and a model made MARS-ready.

    Args:
        mars: the checkpoint's settings; `mask_token_id` is the noisy stream's token.
        attention: `sdpa` (a dense mask) or `flex_attention`; default: flex on a GPU, else sdpa.
        provenance: written beside every checkpoint, with its step and epoch.
    Attributes:
        dropped_rows: how many rows of each dataset (`train`, `eval`, …) had no response, or none left within
            `max_length`.
    Raises:
        MarsError: the rows hold no response at all, or the model or its attention cannot be trained here.
    """

    args: MarsConfig
    model: Any
    objective: Objective
    attention: str

    def __init__(
        self,
        model: Any,
        args: MarsConfig,
        *,
        mars: MarsSettings,
        attention: str | None = None,
        provenance: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.mars = mars
        self.objective = args.objective()
        self.provenance = provenance or {}
        self.dropped_rows: dict[str, int] = {}
        self.attention = _choose_attention(attention, args.device.type)
        # The libraries below set these for themselves, and a checkpoint would carry them on: without a cache
        # it generates slowly, and an end token that also pads gets no gradient in the next training.
        self._own_config = {name: getattr(model.config, name, None) for name in ("use_cache", "pad_token_id")}
        super().__init__(model=model, args=args, **kwargs)
        # SFTTrainer's own collator, which it set up the data with, is replaced.
        self.data_collator = StreamCollator(
            pad_token_id=self._tokenizer.pad_token_id, mask_token_id=mars.mask_token_id
        )
        self._signature_columns = cast(Any, ["input_ids", "labels", "seq_lengths"])
        self._loss_shifts_labels = False  # the collator's labels are exactly the supervised tokens
        self.model_accepts_loss_kwargs = True
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        self._add_mars_forward(base, _logit_scale(base))
        if args.device.type == "cpu" and not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            fuse_lora(self.model)
        base.config._attn_implementation = self.attention
        self._totals: dict[str, dict[str, torch.Tensor | float]] = {
            "train": defaultdict(float),
            "eval": defaultdict(float),
        }
        self._since: float | None = None

    def _prepare_dataset(
        self,
        dataset: Any,
        processing_class: Any,
        args: Any,
        packing: bool,
        formatting_func: Any,
        dataset_name: str,
    ) -> Any:
        """SFTTrainer's preparation; rows without a response are dropped and counted, packed rows included."""
        if not isinstance(dataset, datasets.Dataset):
            return super()._prepare_dataset(
                dataset, processing_class, args, packing, formatting_func, dataset_name
            )
        given = len(dataset)
        names = set(dataset.column_names)
        if not names & {"input_ids", "text"}:
            dataset = dataset.filter(has_response)
        if len(dataset):
            # Packing comes last, when the rows that it would hide are gone. Only `bfd_split` can use what
            # lies behind max_length.
            unpacked = copy.copy(args)
            if packing and args.packing_strategy == "bfd_split":
                unpacked.max_length = None
            dataset = super()._prepare_dataset(
                dataset, processing_class, unpacked, False, formatting_func, dataset_name
            )
            # An example's first token has nothing before it to be predicted from.
            dataset = dataset.filter(lambda row: any(label != IGNORE for label in row["labels"][1:]))
        self.dropped_rows[dataset_name] = dropped = given - len(dataset)
        if not len(dataset):
            raise MarsError(
                f"No row of the {dataset_name} data has a response left to train on: check the rows, and "
                f"max_length ({args.max_length})."
            )
        if dropped:
            logger.warning(
                "%d of %d rows of the %s data dropped: no response, or none left within max_length (%s).",
                dropped,
                given,
                dataset_name,
                args.max_length,
            )
        if packing:
            dataset = super()._prepare_dataset(dataset, processing_class, args, True, None, dataset_name)
        return dataset

    def _add_mars_forward(self, base: Any, logit_scale: float) -> None:
        """Let `model(streams=…, count=…)` run decoder and loss: in `forward`, where DDP and FSDP hook in."""
        plain_forward = base.forward
        objective, mask_token_id, flex = self.objective, self.mars.mask_token_id, self.attention != "sdpa"

        # The original signature stays visible: `generate` validates its arguments against it.
        @functools.wraps(plain_forward)
        def forward(*args: Any, streams: Streams | None = None, count: Any = None, **kwargs: Any) -> Any:
            if streams is None:
                return plain_forward(*args, **kwargs)
            hidden = base.base_model(
                input_ids=streams.input_ids,
                position_ids=streams.position_ids,
                attention_mask=streams.block_mask() if flex else streams.dense_mask(),
                use_cache=False,
            ).last_hidden_state
            head = base.get_output_embeddings()
            # PEFT wraps a tied head together with the embedding whose mask row it trains; the projection
            # itself is the frozen one inside.
            head = getattr(head, "original_module", head)
            return compute_loss(
                hidden, head, streams, objective, count, mask_token_id=mask_token_id, logit_scale=logit_scale
            )

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
            phases=self.objective.phases if self.objective.noisy else 0,
            seed=self.args.seed,
            # The epoch that a step belongs to; rounding must not push its last step into the next.
            visit=int((self.state.epoch or 0.0) + 1e-6) if training else 0,
        )

    def _micro_batches(self, inputs: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
        """A device's rows, cut by tokens; as many parts on each rank, as every forward is all ranks' work."""
        parts = partition(row_costs(inputs, self.objective), self.args.max_tokens_per_micro_batch)
        number = len(parts)
        if self.accelerator.num_processes > 1:
            number = int(self.accelerator.gather(torch.tensor([number], device=self.args.device)).max())
        return list(micro_batches(inputs, parts, number))

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Forward and backward of a device's rows, part by part; gradients meet other ranks' in the last."""
        if self._since is None:
            self._since = time.perf_counter()
        model.train()
        if callable(prepare := getattr(self.optimizer, "train", None)):
            prepare()
        deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        # DeepSpeed would divide by the accumulated steps, which N counts already.
        options = {"scale_wrt_gas": False} if deepspeed else {}
        gradient_state = self.accelerator.gradient_state
        each = deepspeed or gradient_state.plugin_kwargs.get("sync_each_batch", False)
        outer_sync = gradient_state.sync_gradients
        micros = self._micro_batches(self._prepare_inputs(inputs))
        total = torch.zeros((), device=self.args.device)
        for number, micro in enumerate(micros):
            last = number == len(micros) - 1
            # DDP and FSDP ask the context, DeepSpeed the flag.
            context = contextlib.nullcontext() if last or each else self.accelerator.no_sync(model)
            gradient_state._set_sync_gradients(outer_sync and last)
            with context, self.maybe_activation_offload_context:
                with self.compute_loss_context_manager():
                    loss = self.compute_loss(model, micro, num_items_in_batch=num_items_in_batch)
                self.accelerator.backward(loss, **options)
            total += loss.detach()
        gradient_state._set_sync_gradients(outer_sync)
        return total

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """SPEC 2's loss of one micro-batch, divided by the step's N."""
        streams = self.streams(inputs)
        supervised = (inputs["labels"] != IGNORE).sum()
        count = supervised if num_items_in_batch is None else num_items_in_batch
        count = torch.as_tensor(count, device=inputs["labels"].device).clamp(min=1)
        parts: LossParts = model(streams=streams, count=count)
        self._note(parts, supervised=supervised, inputs=inputs, streams=streams)
        loss = parts.loss
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            # N counts every rank's tokens, and the ranks' gradients are averaged, not summed.
            loss = loss * self.accelerator.num_processes
        return (loss, {"logits": None}) if return_outputs else loss

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        """The loss of one batch of held-out rows; `log` puts the exact mean over all of them in its place."""
        inputs = self._prepare_inputs(inputs)
        micros = self._micro_batches(inputs)
        counts = [(micro["labels"] != IGNORE).sum() for micro in micros]
        with torch.no_grad(), self.compute_loss_context_manager():
            losses = [
                self.compute_loss(model, micro) * count for micro, count in zip(micros, counts, strict=True)
            ]
        return sum(losses) / sum(counts).clamp(min=1), None, None  # type: ignore[union-attr]

    def _note(
        self, parts: LossParts, *, supervised: torch.Tensor, inputs: dict[str, Any], streams: Streams
    ) -> None:
        totals = self._totals["train" if self.model.training else "eval"]
        for name, value in (
            ("clean_sum", parts.clean_sum),
            ("noisy_sum", parts.noisy_sum),
            ("clean_count", parts.clean_count),
            ("noisy_count", parts.noisy_count),
            ("block_starts", parts.block_starts),
            ("supervised", supervised),
            ("tokens", (inputs["example"] > 0).sum()),
            ("stream_tokens", (streams.example > 0).sum()),
            ("seen", parts.seen),
            ("right", parts.right),
            ("agreeing", parts.agreeing),
        ):
            totals[name] = totals[name] + value

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the loss's parts, AR share, mask accuracy by distance and tokens per second besides."""
        mode = "train" if self.model.training else "eval"
        # Several evaluation sets have prefixes such as eval_math_.
        named = next((name for name in logs if name.startswith("eval_") and name.endswith("_loss")), "")
        if self._totals[mode] and (mode == "train" or named):
            totals = {
                name: self.accelerator.reduce(
                    torch.as_tensor(value, dtype=torch.float32, device=self.args.device)
                )
                for name, value in self._totals[mode].items()
            }
            self._totals[mode] = defaultdict(float)
            logs.update(self._measures(totals, prefix=named.removesuffix("loss")))
            if mode == "train":
                now = time.perf_counter()
                seconds = now - (self._since or now)
                if seconds > 0:
                    logs["tokens_per_second"] = float(totals["tokens"]) / seconds
                    logs["stream_tokens_per_second"] = float(totals["stream_tokens"]) / seconds
                self._since = now
            else:
                weighted = (
                    self.objective.ar_weight * totals["clean_sum"]
                    + self.objective.noisy_weight * totals["noisy_sum"]
                )
                logs[named] = float(weighted / totals["supervised"].clamp(min=1))
        super().log(logs, start_time)

    def _measures(self, totals: dict[str, torch.Tensor], prefix: str) -> dict[str, float]:
        clean, noisy = float(totals["clean_count"]), float(totals["noisy_count"])
        measures = {}
        if clean:
            measures["loss/ar"] = float(totals["clean_sum"]) / clean
        if noisy:
            measures["loss/mask"] = float(totals["noisy_sum"]) / noisy
            seen = totals["seen"].tolist()
            for distance in [distance for distance, count in enumerate(seen) if count]:
                right, agreeing = float(totals["right"][distance]), float(totals["agreeing"][distance])
                measures[f"accuracy/distance_{distance}"] = right / seen[distance]
                if clean or self.objective.mask_loss == "kd":
                    measures[f"agreement/distance_{distance}"] = agreeing / seen[distance]
        measures["ar_share"] = self.objective.ar_share(int(clean), int(noisy), int(totals["block_starts"]))
        return {prefix + name: value for name, value in measures.items()}

    @contextlib.contextmanager
    def _off_the_clock(self) -> Iterator[None]:
        """Time spent in here is not training, and does not lower the logged rate."""
        begin = time.perf_counter()
        yield
        if self._since is not None:
            self._since += time.perf_counter() - begin

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """`SFTTrainer`'s evaluation."""
        with self._off_the_clock():
            return super().evaluate(*args, **kwargs)

    def restore_config(self) -> None:
        """Undo what the trainer set in the model's configuration for itself."""
        for name, value in self._own_config.items():
            setattr(self.accelerator.unwrap_model(self.model).config, name, value)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """No card: TRL's says "fine-tuned version of None" of a local model; provenance.json says more."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """`SFTTrainer`'s saving, with the settings and the provenance beside the weights."""
        self.restore_config()
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            folder = Path(output_dir or cast(str, self.args.output_dir))
            facts = {**self.provenance, "step": self.state.global_step, "epoch": self.state.epoch}
            for name, value in (("mars", self.mars.to_dict()), ("provenance", facts)):
                (folder / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run = Path(cast(str, self.args.output_dir))
        folder = run / f"checkpoint-{self.state.global_step}"
        try:
            with self._off_the_clock():
                super()._save_checkpoint(model, trial)
        except Exception as error:
            # torch's own writer does not say why it failed.
            if not (is_no_space(error) or (run.exists() and shutil.disk_usage(run).free < 1 << 20)):
                raise
            shutil.rmtree(folder, ignore_errors=True)
            raise MarsError(
                f"No space is left on the disk of {run}: {folder.name} was not saved, and the checkpoint "
                "before it, if any, is unchanged; free some space and give the same command again to go on."
            ) from error


def _choose_attention(wanted: str | None, device: str) -> str:
    if wanted is None:
        return "flex_attention" if device == "cuda" else "sdpa"
    if wanted not in ATTENTIONS:
        raise MarsError(f"attention is {wanted!r}, expected one of {', '.join(ATTENTIONS)}.")
    if wanted == "flex_attention" and device != "cuda":
        raise MarsError(
            f"attention is 'flex_attention', which trains on a CUDA GPU only, and this run is on {device}: "
            "expected sdpa."
        )
    return wanted
