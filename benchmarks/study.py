"""The study: every row of the paper's tables 2 to 4, on what two cores can train.

    python benchmarks/study.py scratch --output runs/study-scratch
    python benchmarks/study.py real --output runs/study-real --data ../shared/data
    python benchmarks/study.py scratch --smoke --output runs/smoke     # a few steps of everything

scratch: a model of 5 million parameters on sums with written-out steps, three seeds; at most 3 hours on two
cores. real: SmolLM2-135M-Instruct on sft/math.jsonl, one seed, as many steps as --steps says, asked as many
problems as --test says. Where so small a model solves next to nothing, the loss on held-out answers tells
what accuracy can't.

Prints the tables and what they say about each of the paper's claims; writes RESULTS.json, .md and .png. Every
training and every evaluation is a job that leaves a mark when it is done: the same command goes on where it
was stopped. --plan times a few steps of each kind of training and prints how long the whole would take.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).parents[1] / "recipes" / "study"
CELLS = ("one-token", "lossy", "exact")
TAU = 0.95
HELD_OUT = 64  # GSM8K's test answers that the real part's losses are taken on
PROMPTS = 16  # of its agreement with AR


@dataclasses.dataclass(frozen=True)
class Size:
    """How large the study is.

    Args:
        seeds: each row is trained once with each.
        hidden, layers: of the model from scratch.
        base_steps, base_chunks: the base trains up to this many chunks of steps, each on rows of its own,
            until `enough` is right.
        enough: share of held-out problems that the base must solve.
        steps: of AR SFT and of every row after it.
        train, test: rows.
        block_sizes: B of the MARS rows.
        budget: new tokens of an answer.
        decode_rows: prompts decoded together.
    """

    seeds: tuple[int, ...] = (0, 1, 2)
    hidden: int = 256
    layers: int = 7
    base_steps: int = 600
    base_chunks: int = 2
    enough: float = 0.96
    steps: int = 150
    train: int = 48_000
    test: int = 400
    block_sizes: tuple[int, ...] = (4, 8, 16)
    budget: int = 96
    decode_rows: int = 16


SIZES = {
    "scratch": Size(),
    "real": Size(
        seeds=(0,),
        base_chunks=0,
        steps=200,
        train=7473,
        test=200,
        block_sizes=(4, 8),
        budget=256,
        decode_rows=8,
    ),
}
SMOKE = {
    "seeds": (0,),
    "base_steps": 3,
    "base_chunks": 1,
    "steps": 2,
    "train": 64,
    "test": 6,
    "block_sizes": (4,),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One model of the study.

    Args:
        name: its folder's; title: as the tables call it.
        recipe: recipes/study/PART-RECIPE.yaml.
        start: the model it starts from.
        block_size: B, where the recipe has masks.
        times: its steps, as a multiple of the size's.
    """

    name: str
    title: str
    recipe: str
    start: str
    block_size: int | None = None
    times: float = 1.0

    @property
    def modes(self) -> tuple[str, ...]:
        """How it is decoded."""
        if self.recipe == "block-diffusion":
            return ("block-diffusion-1", "block-diffusion-0.95")
        if self.block_size is None:
            return ("one-token", "jacobi", "prompt-lookup", "medusa") if self.name == "ar" else ("one-token",)
        return CELLS


def rows_of(size: Size) -> list[Row]:
    """All rows, each after the one that it starts from."""
    first = size.block_sizes[0]
    rows = [
        Row("ar", "AR SFT", "ar", "base"),
        Row("ar-twice", "AR SFT, twice as long", "ar", "ar"),
        # The paper's layout feeds every token twice, so MARS's steps cost what twice as many AR steps do.
        Row("ar-matched", "AR SFT, MARS's compute", "ar", "ar", times=2.0),
        Row(f"block-diffusion-{first}", f"block diffusion, B={first}", "block-diffusion", "ar", first),
    ]
    for b in size.block_sizes:
        rows.append(Row(f"mars-no-sft-{b}", f"MARS without SFT loss, B={b}", "mars-no-sft-loss", "ar", b))
    for b in size.block_sizes:
        rows.append(Row(f"mars-{b}", f"MARS, B={b}", "mars", "ar", b))
    rows.append(Row(f"mars-window-{first}", f"MARS, window layout, B={first}", "mars-window", "ar", first))
    return rows


@dataclasses.dataclass
class Job:
    """A piece of work in a process of its own: done when its mark is there."""

    name: str
    needs: tuple[str, ...]
    run: Callable[[], dict[str, Any]]


class Study:
    """The jobs of one part, in one folder.

    Args:
        part: scratch or real; size: how large.
        output: the folder; data: rows for `real`.
    """

    def __init__(self, part: str, size: Size, output: Path, data: Path | None) -> None:
        self.part, self.size, self.output, self.data = part, size, output, data
        self.rows = rows_of(size)
        self.task = "mars_arithmetic" if part == "scratch" else "gsm8k_cot_zeroshot"

    def jobs(self) -> list[Job]:
        """All of them, each behind those that it needs."""
        jobs = [Job("data", (), self.make_data)]
        for seed in self.size.seeds:
            if self.part == "scratch":
                jobs.append(Job(f"{seed}/base", ("data",), lambda s=seed: self.train_base(s)))  # type: ignore[misc]
            for row in self.rows:
                needs = f"{seed}/{row.start}" if self.part == "scratch" or row.start != "base" else "data"
                name = f"{seed}/{row.name}"
                jobs.append(Job(name, (needs,), lambda s=seed, r=row: self.train(s, r)))  # type: ignore[misc]
                if row.name == "ar":
                    jobs.append(Job(f"{seed}/heads", (name,), lambda s=seed: self.train_heads(s)))  # type: ignore[misc]
                if self.part == "real":
                    jobs.append(Job(f"{name}/loss", (name,), lambda s=seed, r=row: self.held_out(s, r)))  # type: ignore[misc]
                wait = (name, f"{seed}/heads") if "medusa" in row.modes else (name,)
                jobs.append(Job(f"{name}/scores", wait, lambda s=seed, r=row: self.score(s, r)))  # type: ignore[misc]
        return jobs

    # -- places

    def mark(self, name: str) -> Path:
        return self.output / "done" / f"{name.replace('/', '-')}.json"

    def folder(self, seed: int, row: str) -> Path:
        return self.output / str(seed) / row

    def model(self, seed: int, row: str) -> str:
        """Where a trained model lies, as `checkpoint.load` takes it."""
        if self.part == "real":
            return "default" if row == "base" else str(self.folder(seed, row) / "merged")
        return str(self.folder(seed, row) / "final")

    @property
    def rows_folder(self) -> Path:
        return self.output / "data" if self.part == "scratch" else (self.data or Path())

    # -- jobs

    def make_data(self) -> dict[str, Any]:
        """Training rows, and the held-out problems."""
        if self.part == "scratch":
            from mars_lm.evaluation.arithmetic import write_rows

            write_rows(self.output / "data", train=self.size.train, test=self.size.test)
            source = self.output / "data" / "arithmetic" / "train.jsonl"
        else:
            source = self.rows_folder / "sft" / "math.jsonl"
        lines = source.read_bytes().splitlines()  # bytes: a text's lines would also end at U+2028 in a string
        random.Random(0).shuffle(lines)
        # A training of few steps need not tokenize all rows.
        few = lines[: max(40 * self.size.steps, 64)] if self.part == "scratch" else lines[: self.size.train]
        target = self.output / "data" / "few.jsonl"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"\n".join(few) + b"\n")
        return {"rows": len(lines), "few": len(few)}

    def train_base(self, seed: int) -> dict[str, Any]:
        """The model from scratch, trained in chunks until it solves enough, or no chunk is left."""
        from mars_lm import checkpoint as checkpoints
        from mars_lm.evaluation.arithmetic import make_model, make_tokenizer

        tokenizer = make_tokenizer()
        model = make_model(tokenizer, hidden=self.size.hidden, layers=self.size.layers, seed=seed)
        start = self.folder(seed, "untrained")
        checkpoints.save(model, tokenizer, start)
        parameters, solved = sum(p.numel() for p in model.parameters()), []
        lines = (self.output / "data" / "arithmetic" / "train.jsonl").read_text().splitlines(keepends=True)
        many = -(-len(lines) // self.size.base_chunks)
        for chunk in range(self.size.base_chunks):
            name = f"base-{chunk}"
            rows = self.folder(seed, name) / "rows.jsonl"  # a chunk tokenizes its own rows alone
            rows.parent.mkdir(parents=True, exist_ok=True)
            rows.write_text("".join(lines[chunk * many : (chunk + 1) * many]))
            self._train(
                seed, name, "base", model=str(start), train_data=[str(rows)], max_steps=self.size.base_steps
            )
            start = self.folder(seed, name) / "final"
            solved.append(self._score(seed, name, "one-token")["score"]["value"])
            if solved[-1] >= self.size.enough:
                break
        shutil.copytree(start, self.folder(seed, "base") / "final", dirs_exist_ok=True)
        return {"solved": solved, "steps": len(solved) * self.size.base_steps, "parameters": parameters}

    def train(self, seed: int, row: Row) -> dict[str, Any]:
        """One row of the tables."""
        changes: dict[str, Any] = {"model": self.model(seed, row.start)}
        if row.block_size is not None:
            changes["block_size"] = row.block_size
        self._train(seed, row.name, row.recipe, max_steps=round(self.size.steps * row.times), **changes)
        if self.part == "real":
            from mars_lm import checkpoint as checkpoints

            base = self.model(seed, row.start)
            adapter = self.folder(seed, row.name) / "final"
            loaded = checkpoints.load(
                checkpoints.base_weights.find_or_fetch() if base == "default" else base,
                adapter=adapter,
                dtype="float32",
            )
            checkpoints.save(loaded.model, loaded.tokenizer, self.folder(seed, row.name) / "merged")
        return {"trained": _last_log(self.folder(seed, row.name))}

    def _train(self, seed: int, row: str, recipe: str, **changes: Any) -> None:
        from mars_lm.training.run import train

        train(
            RECIPES / f"{self.part}-{recipe}.yaml",
            {
                "train_data": [str(self.output / "data" / "few.jsonl")],
                "seed": seed,
                "data_seed": 1000 * seed + len(row),  # another order of the rows than the start's training
                "output_dir": str(self.folder(seed, row)),
                **changes,
            },
        )

    def train_heads(self, seed: int) -> dict[str, Any]:
        """Medusa heads on the frozen AR SFT model, for as many steps."""
        from mars_lm import checkpoint as checkpoints
        from mars_lm.baselines.medusa import save_heads, train_heads
        from mars_lm.evaluation.results import fingerprint
        from mars_lm.evaluation.text_rows import read_examples

        checkpoint = checkpoints.load(self.model(seed, "ar"), dtype="float32")
        examples = read_examples(checkpoint, self.output / "data" / "few.jsonl", length=512)
        heads = train_heads(
            checkpoint,
            examples,
            heads=self.size.block_sizes[0] - 1,
            steps=self.size.steps,
            batch_size=16,
            seed=seed,
        )
        save_heads(heads, self.folder(seed, "ar") / "heads", fingerprint=fingerprint(checkpoint))
        return {"heads": len(heads.layers), "steps": self.size.steps}

    def score(self, seed: int, row: Row) -> dict[str, Any]:
        """A row's accuracy and speed in every mode."""
        return {mode: self._score(seed, row.name, mode) for mode in row.modes}

    def held_out(self, seed: int, row: Row) -> dict[str, Any]:
        """A row's loss as AR on held-out answers, and how much of its lossy text is what its AR would say.

        Returns:
            rows: [nats, tokens] of each answer; agreement: a share with its interval, of rows with masks.
        """
        import torch

        from mars_lm import checkpoint as checkpoints
        from mars_lm.evaluation.calibration import calibrate_lossy
        from mars_lm.evaluation.text_rows import read_examples, read_prompts

        texts = self.folder(seed, row.name) / "held-out.jsonl"
        write_held_out(self.rows_folder / "gsm8k" / "test.jsonl", texts)
        checkpoint = checkpoints.load(self.model(seed, row.name), dtype="float32")
        rows = []
        with torch.inference_mode():
            for ids, start in read_examples(checkpoint, texts, length=512):
                tokens = torch.tensor([ids])
                labels = tokens.masked_fill(torch.arange(len(ids)) < start, -100)
                rows.append(
                    [
                        float(checkpoint.model(tokens, labels=labels).loss) * (len(ids) - start),
                        len(ids) - start,
                    ]
                )
        if checkpoint.mars is None or row.recipe == "block-diffusion":
            return {"rows": rows, "agreement": None}
        asked = read_prompts(checkpoint, texts, limit=PROMPTS)
        [measured] = calibrate_lossy(
            checkpoint, asked, agreement=0.5, taus=[TAU], max_new_tokens=128, max_rows=self.size.decode_rows
        ).rows
        return {"rows": rows, "agreement": measured["agreement"]}

    def _score(self, seed: int, row: str, mode: str) -> dict[str, Any]:
        from mars_lm import checkpoint as checkpoints
        from mars_lm.evaluation.decoders import make_decoder, settings_for
        from mars_lm.evaluation.run import EvaluationOptions, evaluate

        checkpoint = checkpoints.load(self.model(seed, row), dtype="float32")
        decoder, named = (
            "mars",
            {
                "one-token": {"tau": 1.0},
                "lossy": {"tau": TAU, "exact": False},
                # All masks: how many tokens a forward can give, not how many pay on this machine.
                "exact": {"exact": True, "adaptive": False},
            }.get(mode, {}),
        )
        if mode.startswith("block-diffusion-"):
            decoder, named = "block-diffusion", {"tau": float(mode.rsplit("-", 1)[1])}
        elif not named:
            decoder, named = mode, {"block_size": self.size.block_sizes[0]}
        parts = evaluate(
            checkpoint,
            [self.task],
            settings_for(checkpoint, named, decoder=decoder),
            EvaluationOptions(
                data=self.rows_folder,
                limit=self.size.test,
                batch_size=self.size.decode_rows,
                max_new_tokens=self.size.budget,
            ),
            model=f"{row}, seed {seed}",
            output=self.folder(seed, row) / "scores" / mode,
            decoder=decoder,
            decode=make_decoder(
                decoder,
                checkpoint,
                max_rows=self.size.decode_rows,
                heads=str(self.folder(seed, row) / "heads"),
            ),
        )
        part = parts[self.task]
        return {"score": part["score"], "speed": {k: v for k, v in part["speed"].items() if k != "tasks"}}

    # -- running them

    def run(self, job: Job) -> None:
        """Do a job and leave its mark."""
        from mars_lm.evaluation.results import write_json
        from mars_lm.provenance import provenance

        start = time.perf_counter()
        result = job.run()
        write_json(
            self.mark(job.name),
            {**result, "seconds": time.perf_counter() - start, "provenance": provenance()},
        )

    def results(self) -> dict[str, Any]:
        """By row and mode: the scores of the seeds that are finished."""
        from mars_lm.evaluation.results import read_json

        found: dict[str, Any] = {}
        for row in self.rows:
            for seed in self.size.seeds:
                mark = self.mark(f"{seed}/{row.name}/scores")
                if mark.is_file():
                    kept = read_json(mark)
                    for mode in row.modes:
                        found.setdefault(row.name, {}).setdefault(mode, {})[seed] = kept[mode]
        return found

    def losses(self) -> dict[str, dict[str, Any]]:
        """By row: what `held_out` measured, of the first seed; of the rows that are finished."""
        from mars_lm.evaluation.results import read_json

        marks = {row.name: self.mark(f"{self.size.seeds[0]}/{row.name}/loss") for row in self.rows}
        return {name: read_json(mark) for name, mark in marks.items() if mark.is_file()}


def write_held_out(source: Path, target: Path) -> None:
    """The last of GSM8K's test answers as conversations, without its calculator's notes (<<2*3=6>>), as
    sft/math.jsonl has them."""
    lines = source.read_bytes().splitlines()[-HELD_OUT:]
    texts = []
    for row in map(json.loads, lines):
        answer = re.sub(r"<<[^>]*>>", "", row["answer"])
        turns = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": answer}]
        texts.append(json.dumps({"messages": turns}) + "\n")
    target.write_text("".join(texts), encoding="utf-8")


def _last_log(folder: Path) -> dict[str, Any]:
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return dict(json.loads(lines[-2] if len(lines) > 1 else lines[-1]))


# -- the scheduler


def run_all(study: Study, arguments: list[str], workers: int, threads: int, *, in_process: bool) -> None:
    """Run what is not done yet, `workers` jobs at a time, each in a process of its own."""
    jobs = study.jobs()
    todo = [job for job in jobs if not study.mark(job.name).is_file()]
    print(f"{len(jobs) - len(todo)} of {len(jobs)} jobs are done.", flush=True)
    if in_process:
        for job in todo:
            print(job.name, flush=True)
            study.run(job)
        return
    (study.output / "logs").mkdir(parents=True, exist_ok=True)
    running: dict[str, subprocess.Popen[bytes]] = {}
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    try:
        while todo or running:
            done = {job.name for job in jobs if study.mark(job.name).is_file()}
            for job in [job for job in todo if set(job.needs) <= done][: workers - len(running)]:
                with (study.output / "logs" / f"{job.name.replace('/', '-')}.log").open("ab") as log:
                    running[job.name] = subprocess.Popen(
                        [sys.executable, __file__, *arguments, "--job", job.name],
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                todo.remove(job)
            time.sleep(0.5)
            for name, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[name]
                if process.returncode != 0 or not study.mark(name).is_file():
                    log_file = study.output / "logs" / f"{name.replace('/', '-')}.log"
                    tail = log_file.read_text(errors="replace").splitlines()[-5:]
                    sys.exit("\n".join([f"{name} failed; the end of {log_file}:", *tail]))
                seconds = json.loads(study.mark(name).read_text())["seconds"]
                print(f"{name}: {seconds:.0f} s; {len(todo) + len(running)} jobs left", flush=True)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def plan(study: Study, workers: int) -> None:
    """Time a few steps of each kind of training in this process, and say how long all of them would take.

    It counts processor time, which other processes on the machine do not change, of one thread.
    """
    import torch

    from mars_lm.evaluation.tables import markdown

    torch.set_num_threads(1)
    few, more = 2, 8
    kinds: dict[str, tuple[float, float]] = {}  # recipe -> seconds a step, seconds around the steps
    with tempfile.TemporaryDirectory() as scratch:
        trial = Study(
            study.part,
            dataclasses.replace(study.size, seeds=(0,), base_steps=few, base_chunks=1, train=640, test=8),
            Path(scratch),
            study.data,
        )
        trial.make_data()
        if study.part == "scratch":
            trial.train_base(0)
        trial.train(0, dataclasses.replace(trial.rows[0], times=few / study.size.steps))
        for row in trial.rows:
            if row.recipe in kinds:
                continue
            seconds = []
            for steps in (few, more):
                shutil.rmtree(trial.folder(0, "trial"), ignore_errors=True)
                start = time.process_time()
                trial.train(0, dataclasses.replace(row, name="trial", times=steps / study.size.steps))
                seconds.append(time.process_time() - start)
            a_step = (seconds[1] - seconds[0]) / (more - few)
            kinds[row.recipe] = a_step, max(seconds[0] - few * a_step, 0.0)
    lines, total = [], 0.0
    if study.part == "scratch":
        expected = kinds["ar"][0] * study.size.base_steps * study.size.base_chunks
        lines.append(["base, at most", f"{kinds['ar'][0]:.2f}", f"{expected:.0f}"])
        total += expected
    for row in study.rows:
        a_step, around = kinds[row.recipe]
        expected = a_step * study.size.steps * row.times + around
        lines.append([row.title, f"{a_step:.2f}", f"{expected:.0f}"])
        total += expected
    total *= len(study.size.seeds)
    print(markdown(["training", "seconds a step", "seconds a seed"], lines))
    print(f"All trainings: {total / workers / 3600:.1f} hours with {workers} processes, evaluations apart.")


def report(study: Study, results: Path) -> None:
    """Print the tables and claims, and write them."""
    from mars_lm.evaluation.results import write_json
    from mars_lm.evaluation.tables import markdown
    from mars_lm.provenance import provenance
    from study_report import claims, picture, tables

    found, losses = study.results(), study.losses()
    verdicts = claims(study, found, TAU, losses)
    text = (
        tables(study, found, TAU, losses)
        + "\n\n"
        + markdown(
            ["claim", "these runs", "figures"], [[v["claim"], v["verdict"], v["figures"]] for v in verdicts]
        )
    )
    print(text)
    if study.size.train <= SMOKE["train"]:  # type: ignore[operator]
        print("\nA smoke run: no figure above means anything.")
    done = [job.name for job in study.jobs() if study.mark(job.name).is_file()]
    marks = {name: json.loads(study.mark(name).read_text()) for name in done}
    seconds = sum(mark["seconds"] for mark in marks.values())
    print(f"\n{len(marks)} jobs, {seconds / 3600:.2f} hours of one process each.")
    results.parent.mkdir(parents=True, exist_ok=True)
    write_json(
        results.with_suffix(".json"),
        {
            "size": dataclasses.asdict(study.size),
            "rows": found,
            "losses": {
                name: {"rows": kept["rows"], "agreement": kept["agreement"]} for name, kept in losses.items()
            },
            "claims": verdicts,
            "jobs": {
                name: {k: v for k, v in mark.items() if k != "provenance"} for name, mark in marks.items()
            },
            "seconds": seconds,
            "provenance": provenance(),
        },
    )
    results.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    if found:
        picture(study, found, results.with_suffix(".png"))


def check_settings(study: Study) -> None:
    """One folder holds one study: its size must not change under it."""
    from mars_lm.evaluation.results import read_json, write_json

    file = study.output / "study.json"
    asked = json.loads(json.dumps({"part": study.part, **dataclasses.asdict(study.size)}))
    if file.is_file() and (kept := read_json(file)) != asked:
        changed = sorted(name for name in asked if kept.get(name) != asked[name])
        sys.exit(f"{study.output} holds a study with other {', '.join(changed)}: name another --output.")
    write_json(file, asked)


@contextlib.contextmanager
def told_in_one_sentence() -> Iterator[None]:
    """A user's mistake is a sentence, not a stack trace."""
    from mars_lm.errors import MarsError

    try:
        yield
    except MarsError as error:
        sys.exit(str(error))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=list(SIZES))
    parser.add_argument("--output", type=Path, required=True, help="models, scores and marks of what is done")
    parser.add_argument("--results", type=Path, help="path without its ending; default: OUTPUT/study")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="rows of the real part")
    parser.add_argument("--steps", type=int, help="of AR SFT and of each row after it")
    parser.add_argument("--test", type=int, help="problems that each row is asked")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="jobs at a time, a thread each"
    )
    parser.add_argument("--smoke", action="store_true", help="a few steps of everything, in one process")
    parser.add_argument("--plan", action="store_true", help="time a few steps of each training, and stop")
    parser.add_argument("--report", action="store_true", help="only print what is there")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    size = SIZES[args.part]
    if args.smoke:
        small = (
            {**SMOKE, "hidden": 32, "layers": 1} if args.part == "scratch" else {**SMOKE, "base_chunks": 0}
        )
        size = dataclasses.replace(size, **small)  # type: ignore[arg-type]
    named = {"steps": args.steps, "test": args.test}
    size = dataclasses.replace(size, **{name: value for name, value in named.items() if value})
    study = Study(args.part, size, args.output, args.data)
    if args.part == "real" and not (args.data / "sft" / "math.jsonl").is_file():
        sys.exit(f"{args.data}/sft/math.jsonl is not there: give --data a folder that has it.")
    with told_in_one_sentence():
        if args.plan:
            plan(study, args.workers)
            return
        check_settings(study)
        if args.job:
            [job] = [job for job in study.jobs() if job.name == args.job]
            study.run(job)
            return
        if not args.report:
            arguments = [a for a in sys.argv[1:] if a != "--report"]
            run_all(study, arguments, args.workers, 1, in_process=args.smoke)
        report(study, args.results or args.output / "study")


if __name__ == "__main__":
    main()
