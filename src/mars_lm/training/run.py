"""`mars train`: a recipe -> model, data, trainer -> a checkpoint with its provenance."""

from __future__ import annotations

import dataclasses
import json
import logging
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
import yaml

from mars_lm import checkpoint as checkpoints
from mars_lm.errors import MarsError
from mars_lm.provenance import provenance
from mars_lm.settings import MarsSettings
from mars_lm.training.examples import load_examples
from mars_lm.training.trainer import MarsConfig, MarsTrainer

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Recipe:
    """A training run as its YAML file describes it; every other key is a field of `MarsConfig`."""

    model: str = "default"  # a Hub id, a folder or a GGUF file; "default" is the package's own base weights
    adapter: str | None = None  # start from this adapter: merged into the base (full), or trained on (LoRA)
    train_data: list[str] = dataclasses.field(default_factory=list)
    eval_data: list[str] = dataclasses.field(default_factory=list)
    eval_rows: int = 0  # rows held out of train_data, where eval_data is empty
    lora_rank: int = 0  # 0: full fine-tuning
    lora_alpha: float | None = None  # default: twice the rank
    lora_dropout: float = 0.0
    attention: str | None = None
    precision: str = "auto"  # auto, float32, bfloat16; what the matrix products run in
    training: dict[str, Any] = dataclasses.field(default_factory=dict)


def read_recipe(path: Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Read a recipe, its `extends` chain first, then the overrides.

    Raises:
        MarsError: the file is missing or no YAML mapping, or a key is unknown (the nearest names are given).
    """

    def load(file: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
        if file in seen:
            raise MarsError(f"{file}: the recipe extends itself.")
        try:
            values = yaml.safe_load(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise MarsError(f"{file}: the recipe can't be read ({error.strerror}).") from None
        except yaml.YAMLError as error:
            raise MarsError(f"{file}: not valid YAML ({str(error).splitlines()[0]}).") from None
        if not isinstance(values, dict):
            raise MarsError(f"{file}: expected a mapping of keys to values.")
        parent = values.pop("extends", None)
        return {**(load(file.parent / parent, (*seen, file)) if parent else {}), **values}

    values = {**load(Path(path), ()), **(overrides or {})}
    own = {field.name for field in dataclasses.fields(Recipe)} - {"training"}
    trainer_fields = {field.name for field in dataclasses.fields(MarsConfig)}
    unknown = sorted(set(values) - own - trainer_fields)
    if unknown:
        import difflib

        near = difflib.get_close_matches(unknown[0], own | trainer_fields, n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else "."
        raise MarsError(f"{path}: unknown key {unknown[0]!r}{hint}")
    for name, value in values.items():
        if name.endswith("_strategy") and value is False:  # what YAML makes of a bare `no`
            values[name] = "no"
    for name in ("train_data", "eval_data"):
        if isinstance(values.get(name), str):
            values[name] = [values[name]]
    recipe = Recipe(**{name: value for name, value in values.items() if name in own})
    recipe.training = {name: value for name, value in values.items() if name in trainer_fields}
    if not recipe.train_data:
        raise MarsError(
            f"{path}: no train_data; name JSONL files or Hub ids, for example "
            "--set 'train_data=[rows.jsonl]'."
        )
    return recipe


def _uses_bfloat16(precision: str) -> bool:
    if precision not in ("auto", "float32", "bfloat16"):
        raise MarsError(f"precision is {precision!r}, expected auto, float32 or bfloat16.")
    if precision == "auto":
        return (
            (torch.cuda.is_available()
            and torch.cuda.is_bf16_supported())
            or checkpoints.cpu_computes_bfloat16()
        )
    return precision == "bfloat16"


def _keep_freed_memory() -> None:
    """Have glibc keep the memory that a step frees, for the next one, instead of returning it page by page.

    Activations of tens of megabytes would otherwise be mapped, zeroed by the kernel and unmapped at each
    operation: a fifth of a CPU step. Where there is no glibc, nothing happens.
    """
    import ctypes

    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD (glibc caps it; the two below carry the rest)
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD
        libc.mallopt(-2, 256 << 20)  # M_TOP_PAD
    except (OSError, AttributeError):
        return


class Keeper(transformers.TrainerCallback):
    """Writes settings and provenance beside every checkpoint, and turns Ctrl-C into a saved stop."""

    def __init__(self, mars: MarsSettings, facts: dict[str, Any]) -> None:
        self.mars, self.facts = mars, facts
        self.interrupted = False

    def _interrupt(self, number: int, frame: Any) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        print("\nStopping after this step, with a checkpoint; once more to stop at once.", flush=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                signal.signal(number, self._interrupt)
            except ValueError:  # not in the main thread: whoever runs us owns the signals
                return

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self.interrupted:
            control.should_save = control.should_training_stop = True
        return control

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            (folder / "mars.json").write_text(json.dumps(self.mars.to_dict(), indent=2) + "\n")
            facts = {**self.facts, "step": state.global_step, "epoch": state.epoch}
            (folder / "provenance.json").write_text(json.dumps(facts, indent=2) + "\n")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            with (Path(args.output_dir) / "log.jsonl").open("a") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


def last_complete_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of a run that was written to its end, or None.

    The trainer's state is the last file of a checkpoint, so one that lacks it, or half of it, was cut short.
    """
    found = []
    for candidate in folder.glob("checkpoint-*"):
        try:
            found.append(
                (json.loads((candidate / "trainer_state.json").read_text())["global_step"], candidate)
            )
        except (OSError, ValueError, KeyError):
            continue
    return max(found)[1] if found else None


def train(recipe_path: str | Path, overrides: Mapping[str, Any] | None = None) -> Path:
    """Train as a recipe says; a run that was stopped goes on from its last complete checkpoint.

    Args:
        recipe_path: a YAML file of `Recipe` and `MarsConfig` fields.
        overrides: keys that replace the recipe's.
    Returns:
        The folder of the result: an adapter (LoRA) or a full checkpoint.
    Raises:
        MarsError: recipe, model or data are not as expected.
    """
    recipe = read_recipe(Path(recipe_path), overrides)
    _keep_freed_memory()
    bfloat16 = _uses_bfloat16(recipe.precision)
    values = {
        "output_dir": f"runs/{Path(recipe_path).stem}",
        "report_to": "none",
        "bf16": bfloat16,
        "gradient_checkpointing": False,
        "optim": "adamw_torch_fused",
        "dataloader_num_workers": 0,
        **recipe.training,
    }
    try:
        config = MarsConfig(**values)
    except (TypeError, ValueError) as error:
        raise MarsError(f"{recipe_path}: {error}") from None
    objective = config.objective()
    transformers.set_seed(config.seed)

    lora = recipe.lora_rank > 0
    if recipe.model == "default":
        loaded = checkpoints.load_base(dtype="float32", device="cpu")
    else:
        loaded = checkpoints.load(
            recipe.model, adapter=None if lora else recipe.adapter, dtype="float32", device="cpu"
        )
    model, tokenizer = loaded.model, loaded.tokenizer
    mars = checkpoints.make_mars_ready(
        model,
        tokenizer,
        block_size=objective.block_size,
        base_model="HuggingFaceTB/SmolLM2-135M-Instruct" if recipe.model == "default" else recipe.model,
        layout=objective.layout,
        mask_loss=objective.mask_loss,
        ar_weight=objective.ar_weight,
    )

    rows = load_examples(recipe.train_data)
    evaluation = load_examples(recipe.eval_data) if recipe.eval_data else None
    if evaluation is None and recipe.eval_rows:
        parts = rows.train_test_split(test_size=recipe.eval_rows, seed=config.seed)
        rows, evaluation = parts["train"], parts["test"]

    if lora and recipe.adapter:
        model = peft.PeftModel.from_pretrained(model, recipe.adapter, is_trainable=True)
    peft_config = None
    if lora and not recipe.adapter:
        peft_config = peft.LoraConfig(
            r=recipe.lora_rank,
            lora_alpha=recipe.lora_alpha or 2 * recipe.lora_rank,
            lora_dropout=recipe.lora_dropout,
            target_modules="all-linear",
            trainable_token_indices=[mars.mask_token_id] if objective.noisy else None,
            task_type="CAUSAL_LM",
        )
    facts = {**provenance(seed=config.seed), "recipe": dataclasses.asdict(recipe)}
    keeper = Keeper(mars, facts)
    given = len(rows)
    trainer = MarsTrainer(
        model=model,
        args=config,
        mars=mars,
        attention=recipe.attention,
        train_dataset=rows,
        eval_dataset=evaluation,
        processing_class=tokenizer,
        peft_config=peft_config,
        callbacks=[keeper],
    )
    if not config.packing and len(trainer.train_dataset) < given:
        logger.warning(
            "%d of %d rows dropped: no response was left of them within max_length.",
            given - len(trainer.train_dataset),
            given,
        )
    folder = Path(config.output_dir)
    resume = last_complete_checkpoint(folder)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    if keeper.interrupted:
        raise KeyboardInterrupt
    result = folder / "final"
    if trainer.accelerator.is_main_process:
        trained = trainer.accelerator.unwrap_model(trainer.model)
        facts["steps"], facts["epochs"] = trainer.state.global_step, trainer.state.epoch
        if lora:
            checkpoints.save_adapter(trained, mars, facts, result)
        else:
            checkpoints.save(trained, tokenizer, result)
            (result / "provenance.json").write_text(json.dumps(facts, indent=2) + "\n")
    trainer.accelerator.wait_for_everyone()
    return result
