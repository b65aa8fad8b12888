"""Training: a MARS step against an AR SFT step, the trainer against a naive loop, and the quality kept.

    python benchmarks/train.py --data ../shared/data --parts step --output docs/results/train-step
    python benchmarks/train.py --data ../shared/data --parts naive --output docs/results/train-naive
    (--naive-precisions float32 alone, where the processor imitates bfloat16 and a step takes minutes)
    python benchmarks/train.py --data ../shared/data --parts quality --output docs/results/train-quality

Prints tables and writes OUTPUT.json and OUTPUT.png. Everything trains SmolLM2-135M-Instruct by
recipes/smollm2-135m.yaml, changed only where a part says so.

step: `mars train` with preset mars (ce, kd, and the recipe's kd with two noisy streams) against preset
ar-sft, on the same rows. naive: `mars train` against the loop in `NaiveLoop`, written as one writes it first:
transformers' model, a dense mask, all rows in one batch, the logits of all tokens, plain AdamW. Each
contestant is a process of its own, so that its peak memory is its own; they step in turn, so that a machine's
drift meets all alike. quality: the loss of the clean stream on held-out rows, after MARS training and after
ar-sft on the same rows, steps and settings.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from rich.console import Console
from rich.table import Table

from common import in_turn, ratio, write
from mars_lm import base_weights
from mars_lm import checkpoint as checkpoints
from mars_lm.errors import MarsError
from mars_lm.rows import read_objects
from mars_lm.training.run import train
from mars_lm.training.streams import IGNORE, build
from mars_lm.training.trainer import StreamCollator

RECIPES = Path(__file__).parents[1] / "recipes"
RECIPE = RECIPES / "smollm2-135m.yaml"
AR_RECIPE = RECIPES / "ablations" / "smollm2-135m-ar-sft.yaml"
BARS = {"time": 1.5, "memory": 1.6, "rate": 1.5, "loss": 1.02}
BLOCK_SIZE = 4
MAX_LENGTH = 512
GIB = 1 << 30


# --- Contestants: processes that take one step when told to ---


def resident(what: str = "VmRSS") -> int:
    """Bytes of memory that this process holds; with VmHWM, the most it ever held."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what + ":"):
            return int(line.split()[1]) << 10
    raise MarsError("This system's /proc does not tell a process's memory: run the benchmark on Linux.")


class Turns:
    """A contestant's end of the line: wait for the word, take a step, say so.

    Made before the model is loaded: what the process holds by then is libraries, and no contestant's merit.
    """

    def __init__(self, line: Any) -> None:
        self.line = line
        self.libraries = resident()
        self.facts: dict[str, Any] = {}

    def begin(self) -> None:
        self.line.recv()

    def end(self) -> None:
        self.line.send("done")

    def close(self) -> None:
        """Tell the peak memory, and what else was found out."""
        self.line.recv()
        self.line.send({**self.facts, "libraries": self.libraries, "peak": resident("VmHWM")})


class TurnsOfTheTrainer(transformers.TrainerCallback):
    """Has a trainer take its steps when told to."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.turns.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.turns.end()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.turns.facts.setdefault("first_loss", float((logs or {}).get("loss", "nan")))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.turns.close()


def run_trainer(turns: Turns, rows: Path, steps: int, changes: dict[str, Any]) -> None:
    """`mars train` with all rows in each step."""
    count = sum(1 for _ in read_objects(rows))
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "train_data": [str(rows)],
            "output_dir": folder,
            "per_device_train_batch_size": count,
            "max_length": MAX_LENGTH,
            "block_size": BLOCK_SIZE,
            "max_steps": steps,
            "eval_rows": 0,
            "eval_strategy": "no",
            "save_strategy": "no",
            "logging_steps": 1,
            "disable_tqdm": True,
            **changes,
        }
        train(RECIPE, settings, callbacks=[TurnsOfTheTrainer(turns)])


class NaiveLoop:
    """The loop that one writes first: whole batch, dense mask, logits of every token, plain AdamW."""

    def __init__(
        self, rows: Path, *, autocast: bool, mask_loss: str, phases: int, lora_rank: int = 0
    ) -> None:
        loaded = checkpoints.load(base_weights.find_or_fetch(), dtype="float32", device="cpu")
        self.mars = checkpoints.make_mars_ready(
            loaded.model, loaded.tokenizer, block_size=BLOCK_SIZE, base_model=None
        )
        self.batch = tokenized(loaded.tokenizer, rows, self.mars.mask_token_id)
        self.autocast, self.mask_loss, self.phases = autocast, mask_loss, phases
        model: Any = loaded.model
        if lora_rank:
            config = peft.LoraConfig(
                r=lora_rank,
                lora_alpha=2 * lora_rank,
                target_modules="all-linear",
                trainable_token_indices=[self.mars.mask_token_id],
                task_type="CAUSAL_LM",
            )
            model = peft.get_peft_model(model, config)
        self.model = model.train()
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-5)
        self.visit = 0

    def step(self) -> float:
        """One optimizer step; returns the loss."""
        streams = build(
            **self.batch,
            mask_token_id=self.mars.mask_token_id,
            block_size=BLOCK_SIZE,
            phases=self.phases,
            visit=self.visit,
        )
        self.visit += 1
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            logits = self.model(
                input_ids=streams.input_ids,
                position_ids=streams.position_ids,
                attention_mask=streams.dense_mask(),
                use_cache=False,
            ).logits
        logits = logits.float().flatten(0, 1)
        logits[:, self.mars.mask_token_id] = -1e30
        clean, noisy = logits[streams.clean_index], logits[streams.noisy_index]
        targets: torch.Tensor = streams.noisy_target
        if self.mask_loss == "kd":
            targets = clean.detach().softmax(dim=-1)[streams.pair]
        cross_entropy = torch.nn.functional.cross_entropy
        loss = cross_entropy(clean, streams.clean_target, reduction="sum")
        loss = (loss + cross_entropy(noisy, targets, reduction="sum") / self.phases) / len(clean)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def tokenized(tokenizer: Any, rows: Path, mask_token_id: int) -> dict[str, torch.Tensor]:
    """The rows as a padded batch, only the response labelled: what `mars train` makes of them too."""
    examples = []
    for _, row in read_objects(rows):
        prompt = tokenizer.apply_chat_template(
            row["messages"][:-1], add_generation_prompt=True, return_dict=False
        )
        whole = tokenizer.apply_chat_template(row["messages"], return_dict=False)[:MAX_LENGTH]
        labels = [IGNORE] * len(prompt) + whole[len(prompt) :]
        examples.append({"input_ids": whole, "labels": labels[: len(whole)]})
    return StreamCollator(pad_token_id=tokenizer.eos_token_id, mask_token_id=mask_token_id)(examples)


def run_naive(turns: Turns, rows: Path, steps: int, changes: dict[str, Any]) -> None:
    loop = NaiveLoop(rows, **changes)
    for _ in range(steps):
        turns.begin()
        loss = loop.step()
        turns.end()
        turns.facts.setdefault("first_loss", loss)
    turns.close()


def play(line: Any, run: Callable[..., None], rows: Path, steps: int, changes: dict[str, Any]) -> None:
    """A contestant's process."""
    transformers.logging.set_verbosity_error()
    with contextlib.redirect_stdout(sys.stderr):
        run(Turns(line), rows, steps, changes)


class Contestant:
    """A process that trains, seen from outside."""

    def __init__(
        self, name: str, run: Callable[..., None], rows: Path, steps: int, changes: dict[str, Any]
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.line, theirs = context.Pipe()
        self.process = context.Process(target=play, args=(theirs, run, rows, steps, changes), daemon=True)
        self.process.start()
        theirs.close()

    def take_turn(self) -> Any:
        """Let it take a step (after the last: let it tell its facts), and wait for it.

        Raises:
            MarsError: it died.
        """
        try:
            self.line.send("go")
            return self.line.recv()
        except (EOFError, OSError):
            self.process.join()
            raise MarsError(
                f"{self.name} ended early (exit code {self.process.exitcode}; -9 is mostly a lack of memory)."
            ) from None


def compete(
    contestants: dict[str, tuple[Callable[..., None], dict[str, Any]]], rows: Path, repeats: int, warm_up: int
) -> Any:
    """Seconds of each contestant's steps, taken in turn, and its facts."""
    steps = repeats + warm_up
    peers = {
        name: Contestant(name, run, rows, steps, changes) for name, (run, changes) in contestants.items()
    }
    try:
        seconds = in_turn({name: peer.take_turn for name, peer in peers.items()}, repeats, warm_up)
        facts = {name: peer.take_turn() for name, peer in peers.items()}
        for peer in peers.values():
            peer.process.join()
    finally:
        for peer in peers.values():
            peer.process.kill()
    return seconds, facts


@contextlib.contextmanager
def rows_of(args: Any, count: int) -> Iterator[Path]:
    """A file of the training file's rows number `--first-row` and after."""
    objects = [row for _, row in read_objects(args.data / "sft" / args.file)]
    if args.first_row + count > len(objects):
        raise MarsError(f"{args.file} has only {len(objects)} rows.")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        picked = objects[args.first_row : args.first_row + count]
        path.write_text("".join(json.dumps(row) + "\n" for row in picked))
        yield path


def measured(
    name: str, seconds: dict[str, list[float]], facts: dict[str, dict[str, Any]], tokens: int
) -> dict[str, Any]:
    """One contestant's figures."""
    own = facts[name]["peak"] - facts[name]["libraries"]
    return {
        "contestant": name,
        "seconds": statistics.median(seconds[name]),
        "tokens_per_second": tokens / statistics.median(seconds[name]),
        "memory_gib": own / GIB,
        "process_gib": facts[name]["peak"] / GIB,
        "first_loss": facts[name]["first_loss"],
        "all_seconds": [round(second, 3) for second in seconds[name]],
    }


def count_tokens(rows: Path) -> int:
    """How many tokens the rows hold, prompts too."""
    loaded = checkpoints.load(base_weights.find_or_fetch(), dtype="float32", device="cpu")
    return int((tokenized(loaded.tokenizer, rows, -1)["example"] > 0).sum())


# --- The parts ---


def step_part(args: Any) -> list[dict[str, Any]]:
    """Time and memory of a MARS step over those of an AR SFT step, pair by pair."""
    base = {"lora_rank": args.lora_rank}
    kinds = {
        "mars, ce": {"preset": "mars", "mask_loss": "ce", "phases": 1},
        "mars, kd": {"preset": "mars", "mask_loss": "kd", "phases": 1},
        "mars, kd, 2 phases": {"preset": "mars", "mask_loss": "kd", "phases": 2},
    }
    result = []
    with rows_of(args, args.rows) as rows:
        tokens = count_tokens(rows)
        for name, changes in kinds.items():
            pair = {
                "ar-sft": (run_trainer, {**base, "preset": "ar-sft", "mask_loss": "ce", "phases": 1}),
                name: (run_trainer, {**base, **changes}),
            }
            seconds, facts = compete(pair, rows, args.repeats, args.warm_up)
            mars, ar = (measured(each, seconds, facts, tokens) for each in (name, "ar-sft"))
            result.append(
                {
                    **mars,
                    "ar_seconds": ar["seconds"],
                    "ar_memory_gib": ar["memory_gib"],
                    "time_ratio": ratio(seconds[name], seconds["ar-sft"]),
                    "memory_ratio": mars["memory_gib"] / ar["memory_gib"],
                    "process_ratio": mars["process_gib"] / ar["process_gib"],
                    "ar_all_seconds": ar["all_seconds"],
                }
            )
    return result


def naive_part(args: Any) -> list[dict[str, Any]]:
    """The trainer's rate over the naive loop's: full fine-tuning with ce, and LoRA as the recipe has it."""
    kinds = {
        "full, ce": ({"lora_rank": 0}, {"mask_loss": "ce", "phases": 1}),
        "lora, kd, 2 phases": ({"lora_rank": 32}, {"mask_loss": "kd", "phases": 2}),
    }
    result = []
    with rows_of(args, args.naive_rows) as rows:
        tokens = count_tokens(rows)
        for kind, (lora, objective) in kinds.items():
            for precision in args.naive_precisions:
                trainer, loop = f"mars train: {kind}", f"naive {precision}: {kind}"
                pair = {
                    trainer: (run_trainer, {**lora, **objective}),
                    loop: (run_naive, {**lora, **objective, "autocast": precision == "bfloat16"}),
                }
                seconds, facts = compete(pair, rows, args.repeats, args.warm_up)
                ours, theirs = (measured(each, seconds, facts, tokens) for each in pair)
                result.append(
                    {
                        **theirs,
                        "our_seconds": ours["seconds"],
                        "our_tokens_per_second": ours["tokens_per_second"],
                        "our_memory_gib": ours["memory_gib"],
                        "our_first_loss": ours["first_loss"],
                        "rate_ratio": ratio(seconds[loop], seconds[trainer]),
                        "memory_ratio": ours["memory_gib"] / theirs["memory_gib"],
                        "our_all_seconds": ours["all_seconds"],
                    }
                )
    return result


def quality_part(args: Any) -> dict[str, Any]:
    """Held-out loss of the clean stream before training, after ar-sft, and after MARS training."""
    settings = {
        "train_data": [str(args.data / "sft" / args.file)],
        "max_steps": args.steps,
        "per_device_train_batch_size": args.step_rows,
        "eval_rows": args.eval_rows,
        "eval_strategy": "steps",
        "eval_steps": args.steps,
        "eval_on_start": True,
        "logging_steps": 5,
        "save_steps": 5,
        "save_total_limit": 1,
        "warmup_steps": min(20, args.steps // 8),
        "lr_scheduler_kwargs": {"num_decay_steps": args.steps // 4, "min_lr_ratio": 0.0},
        "disable_tqdm": True,
    }
    result: dict[str, Any] = {
        "steps": args.steps,
        "step_rows": args.step_rows,
        "held_out_rows": args.eval_rows,
        "file": args.file,
    }
    for name, recipe in (("ar-sft", AR_RECIPE), ("mars", RECIPE)):
        folder = args.runs / name
        train(recipe, {**settings, "output_dir": str(folder)})
        logs = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        losses = {log["step"]: log["eval_loss/ar"] for log in logs if "eval_loss/ar" in log}
        result["before"] = losses[0]
        result[name] = {"loss": losses[args.steps], "log": logs}
    result["loss_ratio"] = result["mars"]["loss"] / result["ar-sft"]["loss"]
    return result


# --- What is shown ---

COLUMNS = {
    "step": (
        "contestant",
        "seconds",
        "ar_seconds",
        "time_ratio",
        "memory_gib",
        "ar_memory_gib",
        "memory_ratio",
        "process_ratio",
    ),
    "naive": (
        "contestant",
        "tokens_per_second",
        "our_tokens_per_second",
        "rate_ratio",
        "memory_gib",
        "our_memory_gib",
        "first_loss",
        "our_first_loss",
    ),
}
RATIOS = {
    "step": {"time_ratio": BARS["time"], "memory_ratio": BARS["memory"]},
    "naive": {"rate_ratio": BARS["rate"]},
}


def table(title: str, columns: tuple[str, ...], rows: list[dict[str, Any]]) -> Table:
    out = Table(title=title, title_justify="left")
    for name in columns:
        out.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        out.add_row(*(f"{row[c]:.3g}" if isinstance(row[c], float) else str(row[c]) for c in columns))
    return out


def quality_table(result: dict[str, Any]) -> Table:
    rows = [
        {"after": "nothing", "loss": result["before"], "ratio": result["before"] / result["ar-sft"]["loss"]},
        {"after": "ar-sft", "loss": result["ar-sft"]["loss"], "ratio": 1.0},
        {"after": "mars", "loss": result["mars"]["loss"], "ratio": result["loss_ratio"]},
    ]
    out = Table(title=f"held-out loss of the clean stream, {result['steps']} steps (bar: {BARS['loss']})")
    for name in rows[0]:
        out.add_column(name, justify="right")
    for row in rows:
        out.add_row(row["after"], f"{row['loss']:.4f}", f"{row['ratio']:.4f}")
    return out


def picture(path: Path, result: dict[str, Any]) -> None:
    """The ratios beside their bars, a panel for each part that was run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [name for name in ("step", "naive", "quality") if name in result]
    figure, axes = plt.subplots(1, len(panels), figsize=(6.5 * len(panels), 4), squeeze=False)
    for panel, axis in zip(panels, axes[0], strict=True):
        if panel == "quality":
            quality = result["quality"]
            names = ["before", "ar-sft", "mars"]
            axis.bar(names, [quality["before"], quality["ar-sft"]["loss"], quality["mars"]["loss"]])
            axis.axhline(BARS["loss"] * quality["ar-sft"]["loss"], color="k", label="bar for mars")
            axis.set_ylabel("clean-stream loss on held-out rows, nats")
        else:
            rows, ratios = result[panel], RATIOS[panel]
            width = 0.8 / len(ratios)
            for number, (name, bar) in enumerate(ratios.items()):
                at = [i + (number - (len(ratios) - 1) / 2) * width for i in range(len(rows))]
                drawn = axis.bar(at, [row[name] for row in rows], width, label=name.replace("_", " "))
                axis.axhline(bar, color=drawn.patches[0].get_facecolor(), linestyle="--", label=f"bar {bar}")
            axis.set_xticks(
                range(len(rows)), [row["contestant"].replace(": ", "\n") for row in rows], fontsize=8
            )
            title = {"step": "MARS over AR SFT, a step", "naive": "rate: mars train over the naive loop"}
            axis.set_ylabel(title[panel])
        axis.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="a folder that holds sft/FILE")
    parser.add_argument("--output", type=Path, required=True, help="path without its ending")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--file", default="math.jsonl", help="of the folder sft")
    parser.add_argument("--first-row", type=int, default=0)
    parser.add_argument("--rows", type=int, default=8, help="in a step, for the part step")
    parser.add_argument("--lora-rank", type=int, default=0, help="of the part step; 0 is full fine-tuning")
    parser.add_argument("--naive-rows", type=int, default=4, help="in a step, for the part naive")
    parser.add_argument("--repeats", type=int, default=5, help="steps measured, after those that warm up")
    parser.add_argument(
        "--warm-up", type=int, default=2, help="the first steps meet memory that no step has used before"
    )
    parser.add_argument(
        "--naive-precisions", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"]
    )
    parser.add_argument("--steps", type=int, default=40, help="of the part quality")
    parser.add_argument("--step-rows", type=int, default=6, help="in a step, for the part quality")
    parser.add_argument("--eval-rows", type=int, default=32)
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/train-quality"), help="where the part quality trains; resumes"
    )
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    console = Console(width=170)
    result: dict[str, Any] = {
        "precision": "bfloat16" if checkpoints.cpu_computes_bfloat16() else "float32",
        "load": os.getloadavg(),
    }
    try:
        for name in args.parts:
            result[name] = PARTS[name](args)
            if name == "quality":
                console.print(quality_table(result[name]))
            else:
                bars = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in RATIOS[name].items())
                console.print(table(f"{name} (bars: {bars})", COLUMNS[name], result[name]))
    except MarsError as error:
        sys.exit(str(error))
    write(args.output.with_suffix(".json"), result)
    picture(args.output.with_suffix(".png"), result)


PARTS: dict[str, Callable[[Any], Any]] = {"step": step_part, "naive": naive_part, "quality": quality_part}

if __name__ == "__main__":
    main()
