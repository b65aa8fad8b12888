"""`mars train`: a recipe -> model, data, trainer -> a checkpoint with its provenance."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import signal
import threading
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import datasets
import peft
import torch
import transformers
from transformers.integrations import deepspeed

from mars_lm import base_weights
from mars_lm import checkpoint as checkpoints
from mars_lm.adapters import SETTINGS_FILE, read_adapter
from mars_lm.errors import MarsError
from mars_lm.folders import is_no_space
from mars_lm.mask_token import adopt_mask_token
from mars_lm.provenance import provenance
from mars_lm.settings import MarsSettings
from mars_lm.sources import check_weights, told_in_one_sentence
from mars_lm.training.examples import load_examples
from mars_lm.training.recipe import Recipe, read_recipe
from mars_lm.training.trainer import MarsConfig, MarsTrainer

logger = logging.getLogger(__name__)

# Keys that say what is being trained: with another value, a checkpoint is another run's.
_IDENTITY = (
    "model",
    "adapter",
    "lora_rank",
    "lora_alpha",
    "preset",
    "layout",
    "block_size",
    "gap_masking",
    "gap_attention",
    "gap_alignment",
)


class Interrupted(MarsError):  # noqa: N818 (nothing went wrong)
    """Training was stopped by a signal, and can go on."""

    def __init__(self, sentence: str, number: int) -> None:
        super().__init__(sentence)
        self.exit_code = 128 + number


def _uses_bfloat16(precision: str) -> bool:
    if precision not in ("auto", "float32", "bfloat16"):
        raise MarsError(f"precision is {precision!r}, expected auto, float32 or bfloat16.")
    if precision == "auto":
        if torch.cuda.is_available():
            return torch.cuda.is_bf16_supported()
        return checkpoints.cpu_computes_bfloat16()
    return precision == "bfloat16"


def _keep_freed_memory() -> None:
    """Have glibc keep the memory that a step frees, for the next one, instead of returning it page by page.

    Activations of tens of megabytes would otherwise be mapped, zeroed by the kernel and unmapped at each
    operation: a fifth of a CPU step. Where there is no glibc, nothing happens.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD (glibc caps it; the two below carry the rest)
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD
        libc.mallopt(-2, 256 << 20)  # M_TOP_PAD
    except (OSError, AttributeError):
        return


class Keeper(transformers.TrainerCallback):
    """Turns Ctrl-C into a saved stop, and keeps `log.jsonl`, one line a log.

    Attributes:
        signal: the number of the signal that stopped the run, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._main = True
        self._handlers: dict[int, Any] = {}

    def _stop(self, number: int, frame: Any) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal is None and self._main:
            print("\nStopping after this step, with a checkpoint; Ctrl-C again stops at once.", flush=True)
        self.signal = self.signal or number

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM in here, in a main thread; elsewhere whoever runs us owns the signals."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[int(number)] = signal.signal(number, self._stop)
        try:
            yield
        finally:
            for watched, handler in self._handlers.items():
                signal.signal(watched, handler)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._main = state.is_world_process_zero
        log = Path(args.output_dir) / "log.jsonl"
        if self._main and log.exists():
            # What a killed run logged after its last checkpoint is about to be logged again.
            kept = [line for line in log.read_text().splitlines() if _step(line) <= state.global_step]
            log.write_text("".join(line + "\n" for line in kept))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        stop = self.signal is not None
        if args.world_size > 1:
            # A signal reaches the ranks at different moments; they must stop at the same step.
            flag = torch.tensor([float(stop)], device=args.device)
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
            stop = bool(flag.item())
        if stop:
            self.signal = self.signal or signal.SIGINT
            control.should_save = control.should_training_stop = True
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            with (Path(args.output_dir) / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


def _step(line: str) -> float:
    """The step of a line of `log.jsonl`; a line cut short counts as later than all."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def last_complete_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of a run that was written to its end, or None.

    The trainer's state is the last file of a checkpoint, so one that lacks it, or half of it, was cut short.
    Files that end too early (the machine lost its power, or another rank was killed) tell it as well.
    """
    found = []
    for candidate in folder.glob("checkpoint-*"):
        try:
            state = json.loads((candidate / "trainer_state.json").read_text(encoding="utf-8"))
            step = int(state["global_step"])
            check_weights(candidate)
        except (OSError, ValueError, KeyError, TypeError):
            continue
        # torch.save writes zip files, whose directory comes last.
        saved = [*candidate.glob("*.pt"), *candidate.glob("*.pth")]
        if all(zipfile.is_zipfile(path) for path in saved):
            found.append((step, candidate))
    return max(found)[1] if found else None


def train(
    recipe_path: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    callbacks: Sequence[transformers.TrainerCallback] = (),
) -> Path:
    """Train as a recipe says; a run that was stopped goes on from its last complete checkpoint.

    Args:
        recipe_path: a YAML file of `Recipe` and `MarsConfig` fields.
        overrides: keys that replace the recipe's.
        callbacks: further onlookers, called after the run's own.
    Returns:
        The folder of the result: an adapter (LoRA) or a full checkpoint.
    Raises:
        MarsError: recipe, model or data are not as expected, the disk is full, or the run was interrupted.
    """
    recipe = read_recipe(Path(recipe_path), overrides)
    config = _config(recipe, Path(recipe_path))
    folder = Path(cast(str, config.output_dir))
    resume = last_complete_checkpoint(folder)
    if resume:
        _check_same_run(resume, recipe)
    keeper = Keeper()
    try:
        trainer = _trainer(recipe, config, keeper)
        for callback in callbacks:
            trainer.add_callback(callback)
        with keeper.watching():
            _go_on(trainer, resume)
        step, last_step = trainer.state.global_step, trainer.state.max_steps
        if keeper.signal is not None and step < last_step:
            raise Interrupted(
                f"Stopped at step {step} of {last_step}, with a checkpoint in {folder}; give the same "
                "command again to go on from there.",
                keeper.signal,
            )
        return _export(trainer, folder / "final", recipe.save_dtype)
    except OSError as error:
        if is_no_space(error):
            raise MarsError(
                f"No space is left on the disk of {folder}: free some space and give the same command again "
                "to go on from the last checkpoint, if there is one."
            ) from error
        raise


def _config(recipe: Recipe, path: Path) -> MarsConfig:
    values = {
        "output_dir": f"runs/{path.stem}",
        "report_to": "none",
        "bf16": _uses_bfloat16(recipe.precision),
        "optim": "adamw_torch_fused",
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": torch.cuda.is_available(),  # else torch warns
        **recipe.training,
    }
    checkpointing = ("activation_checkpointing", "gradient_checkpointing")  # the new and the old name
    if not any(name in values for name in checkpointing):  # SFTConfig's default is on
        names = MarsConfig.__dataclass_fields__
        values[checkpointing[0] if checkpointing[0] in names else checkpointing[1]] = False
    try:
        config = MarsConfig(**values)
    except MarsError:
        raise
    except (TypeError, ValueError) as error:
        raise MarsError(f"{path}: {' '.join(str(error).split())}") from None
    config.objective()
    return config


def _check_same_run(resume: Path, recipe: Recipe) -> None:
    """See that the checkpoint is of this recipe's run.

    Raises:
        MarsError: it trains something else. (Where only the way differs, a warning tells it.)
    """
    try:
        before = dict(json.loads((resume / "provenance.json").read_text(encoding="utf-8"))["recipe"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    now = recipe.flat()
    names = {*before, *now} - {"output_dir"}
    changed = sorted(name for name in names if before.get(name) != now.get(name))
    other = [name for name in changed if name in _IDENTITY]
    if other:
        raise MarsError(
            f"{resume.parent} holds the checkpoints of another run ({', '.join(other)} differ): choose "
            "another output_dir, or remove them."
        )
    if changed:
        logger.warning("Going on from %s with another %s.", resume, ", ".join(changed))


def _trainer(recipe: Recipe, config: MarsConfig, keeper: Keeper) -> MarsTrainer:
    rows, held_out = _data(recipe, config)
    transformers.set_seed(config.seed)
    _keep_freed_memory()
    model, tokenizer, mars = _model(recipe, config)
    _check_tokenizer(tokenizer, rows, recipe.model)
    adapter = None
    if recipe.lora_rank and not recipe.adapter:
        adapter = peft.LoraConfig(
            r=recipe.lora_rank,
            lora_alpha=cast(int, recipe.lora_alpha or 2 * recipe.lora_rank),
            lora_dropout=recipe.lora_dropout,
            target_modules="all-linear",
            trainable_token_indices=[mars.mask_token_id] if config.objective().noisy else None,
            task_type="CAUSAL_LM",
        )
    facts = {**provenance(seed=config.seed), "recipe": recipe.flat()}
    with warnings.catch_warnings():
        # What TRL still calls by its former name in transformers is none of the user's business.
        warnings.simplefilter("ignore", FutureWarning)
        try:
            return MarsTrainer(
                model=model,
                args=config,
                mars=mars,
                attention=recipe.attention,
                provenance=facts,
                train_dataset=rows,
                eval_dataset=held_out,
                processing_class=tokenizer,
                peft_config=adapter,
                callbacks=[keeper],
            )
        except MarsError:
            raise
        except (ValueError, OSError) as error:
            if isinstance(error, OSError) and is_no_space(error):
                raise
            # Settings that do not go together, or name what is not there: the libraries tell it in sentences.
            raise MarsError(" ".join(str(error).split())) from error


def _data(recipe: Recipe, config: MarsConfig) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    def load(sources: list[str]) -> datasets.Dataset:
        every_turn = bool(config.assistant_only_loss)
        return load_examples(sources, every_turn=every_turn, skip_bad_rows=recipe.skip_bad_rows)

    rows = load(recipe.train_data)
    if recipe.eval_data:
        return rows, load(recipe.eval_data)
    if not recipe.eval_rows:
        if (strategy := transformers.trainer_utils.IntervalStrategy(config.eval_strategy)) != "no":
            raise MarsError(
                f"eval_strategy is '{strategy.value}', but there is nothing to evaluate on: expected "
                "eval_data or eval_rows, or eval_strategy no."
            )
        return rows, None
    if recipe.eval_rows >= len(rows):
        raise MarsError(f"eval_rows is {recipe.eval_rows}, but the training data has only {len(rows)} rows.")
    parts = rows.train_test_split(test_size=recipe.eval_rows, seed=config.seed)
    return parts["train"], parts["test"]


def _model(recipe: Recipe, config: MarsConfig) -> tuple[Any, Any, MarsSettings]:
    """The model made MARS-ready, with the adapter merged into it or, for LoRA, on it."""
    packaged = recipe.model == "default"
    source = base_weights.find_or_fetch() if packaged else recipe.model
    lora = recipe.lora_rank > 0
    with _whole_weights():
        loaded = checkpoints.load(
            source, adapter=None if lora else recipe.adapter, dtype="float32", device="cpu"
        )
    model, tokenizer = loaded.model, loaded.tokenizer
    model.requires_grad_(True)  # what was merged is frozen
    adapter = read_adapter(recipe.adapter) if lora and recipe.adapter else None
    if adapter and adapter.mars:
        adopt_mask_token(model, tokenizer, adapter.mars.mask_token_id, initialise=loaded.mars is None)
        model.config.mars = {**adapter.mars.to_dict(), "decoding": {}}
    objective = config.objective()
    mars = checkpoints.make_mars_ready(
        model,
        tokenizer,
        block_size=objective.block_size,
        base_model=base_weights.HUB_ID if packaged else recipe.model,
        layout=objective.layout,
        mask_loss=objective.mask_loss,
        ar_weight=objective.ar_weight,
    )
    if adapter:
        what = f"The adapter {recipe.adapter} does not fit the base {recipe.model}"
        with told_in_one_sentence(what):
            model = peft.PeftModel.from_pretrained(model, str(adapter.folder), is_trainable=True)
        rank = getattr(model.peft_config["default"], "r", None)
        if rank != recipe.lora_rank:
            raise MarsError(
                f"lora_rank is {recipe.lora_rank}, but the adapter {recipe.adapter} has rank {rank}."
            )
    return model, tokenizer, mars


@contextlib.contextmanager
def _whole_weights() -> Iterator[None]:
    """Load whole weights though DeepSpeed's ZeRO-3 is on: the mask's row is made from all of them.

    DeepSpeed splits them up later, when the trainer hands it the model.
    """
    held = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed._hf_deepspeed_config_weak_ref = None
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = held


def _check_tokenizer(tokenizer: Any, rows: datasets.Dataset, name: str) -> None:
    """See that the tokenizer has what the rows need.

    Raises:
        MarsError: it has no end token, or no chat template for rows of messages.
    """
    if tokenizer.eos_token_id is None:
        raise MarsError(
            f"The tokenizer of {name} has no end-of-sequence token, so the model could not learn to stop: "
            "set eos_token in its tokenizer_config.json."
        )
    conversational = not isinstance(rows[0].get("completion"), str)
    if conversational and tokenizer.chat_template is None:
        raise MarsError(
            f"The tokenizer of {name} has no chat template, which rows of messages need: set "
            "chat_template_path, or train on rows whose prompt and completion are text."
        )


def _go_on(trainer: MarsTrainer, resume: Path | None) -> None:
    """Train from the start or from a checkpoint; a checkpoint of the last step is only loaded."""
    if resume is None:
        trainer.train()
        return
    state = transformers.TrainerState.load_from_json(str(resume / "trainer_state.json"))
    args = trainer.args
    last_step = args.max_steps
    if last_step <= 0 and state.num_train_epochs == args.num_train_epochs:
        last_step = state.max_steps
    if 0 < last_step <= state.global_step and not _is_sharded(trainer):
        # The library would take one more step before it looked.
        trainer._load_from_checkpoint(str(resume))
        trainer.state = state
        return
    trainer.train(resume_from_checkpoint=str(resume))


def _is_sharded(trainer: MarsTrainer) -> bool:
    return bool(trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled)


def _export(trainer: MarsTrainer, folder: Path, dtype: str) -> Path:
    """Save what was trained, on the main process."""
    trainer.restore_config()
    trained = trainer.accelerator.unwrap_model(trainer.model)
    lora = isinstance(trained, peft.PeftModel)
    ordinary = not trainer.objective.noisy  # without a noisy stream, the result is an AR model like any other
    if ordinary and not lora:
        del trained.config.mars
    if _is_sharded(trainer):
        trainer.save_model(str(folder))  # all ranks gather the weights
    elif trainer.accelerator.is_main_process:
        facts = {**trainer.provenance, "steps": trainer.state.global_step, "epochs": trainer.state.epoch}
        if lora:
            checkpoints.save_adapter(trained, trainer.mars, facts, folder, dtype=dtype)
        else:
            trained = trained.to(getattr(torch, dtype))
            checkpoints.save(trained, trainer._tokenizer, folder, provenance=facts)
    if ordinary and trainer.accelerator.is_main_process:
        (folder / SETTINGS_FILE).unlink(missing_ok=True)
    trainer.accelerator.wait_for_everyone()
    return folder
