"""What a forward costs by its number of tokens: transformers' modules against the CPU kernels.

    python benchmarks/forward.py --output docs/results/forward
    python benchmarks/forward.py --forwards torch invariant --dtypes bfloat16 --batches 1 4 --output OUTPUT
    python benchmarks/forward.py --forwards native --dtypes float32 int8 --text FILE.jsonl --output OUTPUT

One row with 300 tokens behind it; the layers alone, without the output matrix. Prints a table and writes
OUTPUT.json and OUTPUT.png. Contestants run in turn; a figure is the median over turns. Further contestants:
transformers' modules compiled by torch.compile, those whose logits have the same bits in any company, and
those whose weights torchao (if installed) has made int8, with or without what they are multiplied with.
--batches adds tokens a second of whole answers, in one-token and in exact mode; --text how they all judge the
responses of a JSON Lines file, against the first one.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console

from common import in_turn, table, write
from mars_lm import checkpoint as checkpoints
from mars_lm.decoding import Engine
from mars_lm.decoding.compiled import CompiledForward
from mars_lm.decoding.executors import make_forward
from mars_lm.decoding.forward import Feed, Forward
from mars_lm.errors import MarsError
from mars_lm.evaluation.text_rows import read_examples
from mars_lm.settings import DecodingSettings

# What `Engine` is told for each contestant.
FORWARDS: dict[str, dict[str, Any]] = {
    "torch": {"kernels": "torch"},
    "native": {"kernels": "native"},
    "compile": {"kernels": "compile"},
    "invariant": {"kernels": "torch", "invariant": True},
    "compile, invariant": {"kernels": "compile", "invariant": True},
    "torchao": {"kernels": "torch"},
    "torchao, dynamic": {"kernels": "torch"},
}
TORCHAO = {"torchao": "Int8WeightOnlyConfig", "torchao, dynamic": "Int8DynamicActivationInt8WeightConfig"}
QUESTION = (
    "Natalia sold {} clips in April and half as many in May. How many did she sell? Think step by step."
)


def feed(behind: int, tokens: int) -> Feed:
    """`tokens` tokens of one row behind `behind` others."""
    place = np.arange(behind, behind + tokens)
    return Feed(np.zeros(1, np.int64), np.array([tokens]), place * 7 % 4096, place, place, place + 1, place)


def by_torchao(model: Any, kind: str) -> Any:
    """A copy of the model with torchao's int8 weights."""
    try:
        quantization = importlib.import_module("torchao.quantization")
    except ImportError:
        raise MarsError("torchao is not installed: pip install torchao.") from None
    copied = copy.deepcopy(model)
    quantization.quantize_(copied, getattr(quantization, TORCHAO[kind])())
    return copied


@torch.inference_mode()
def measure(
    forwards: dict[str, Forward], behind: int, sizes: list[int], repeats: int
) -> list[dict[str, Any]]:
    """Milliseconds of each forward at each size."""
    for forward in forwards.values():
        forward.hidden(Feed.of_one_row(np.arange(behind)))
    rows = []
    for size in sizes:
        now = feed(behind, size)
        seconds = in_turn({n: (lambda f=f: f.hidden(now)) for n, f in forwards.items()}, repeats, warm_up=2)  # noqa: B023
        rows.append({"tokens": size, **{n: 1e3 * statistics.median(s) for n, s in seconds.items()}})
    return rows


def rates(
    loaded: dict[str, checkpoints.Checkpoint], names: list[str], batch: int, tokens: int, repeats: int
) -> dict[str, Any]:
    """Tokens a second of `batch` answers of `tokens` tokens each, prompts included in the time."""
    plain: dict[str, Any] = {"max_new_tokens": tokens, "ignore_eos": True}
    modes = {"one-token": DecodingSettings(tau=1.0, **plain), "exact": DecodingSettings(**plain)}
    runs = {}
    for dtype, checkpoint in loaded.items():
        questions = [[{"role": "user", "content": QUESTION.format(10 + 7 * i)}] for i in range(batch)]
        ids = [checkpoints.encode_chat(checkpoint, question) for question in questions]
        for name in names:
            engine = Engine(
                checkpoint, max_rows=batch, max_length=256, share_prefixes=False, **FORWARDS[name]
            )
            for mode, settings in modes.items():
                runs[f"{name}, {dtype}, {mode}"] = functools.partial(answers, engine, ids, settings)
    seconds = in_turn(runs, repeats)
    return {"batch": batch, **{n: batch * tokens / statistics.median(s) for n, s in seconds.items()}}


@torch.inference_mode()
def judgements(
    forwards: dict[str, Forward], checkpoint: checkpoints.Checkpoint, text: Path, rows: int
) -> list[dict[str, Any]]:
    """What each forward says to the same responses: nats a token, and how far from the first forward."""
    examples = read_examples(checkpoint, text, limit=rows)
    first: list[torch.Tensor] = []
    out = []
    for name, forward in forwards.items():
        loss = divergence = agree = count = 0.0
        for number, (ids, start) in enumerate(examples):
            said = forward.logits(forward.hidden(Feed.of_one_row(np.array(ids)))[start - 1 : -1]).log_softmax(
                -1
            )
            if len(first) <= number:
                first.append(said)
            truth = torch.tensor(ids[start:])
            loss -= float(said.gather(1, truth[:, None]).sum())
            divergence += float((first[number].exp() * (first[number] - said)).sum())
            agree += float((first[number].argmax(1) == said.argmax(1)).sum())
            count += len(truth)
        out.append(
            {
                "forward": name,
                "nats a token": loss / count,
                "divergence from the first": divergence / count,
                "same best token": agree / count,
            }
        )
    return out


def answers(engine: Engine, prompts: list[list[int]], settings: DecodingSettings) -> None:
    """Decode the prompts together."""
    requests = [engine.add(prompt, settings) for prompt in prompts]
    for _ in engine.stream():
        pass
    for request in requests:
        engine.result(request)


def picture(path: Path, rows: list[dict[str, Any]]) -> None:
    """Milliseconds against tokens, a line for each contestant."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4))
    for name in list(rows[0])[1:]:
        axis.plot([row["tokens"] for row in rows], [row[name] for row in rows], "o-", label=name)
    axis.set_xlabel("tokens a forward")
    axis.set_ylabel("milliseconds")
    axis.set_ylim(bottom=0)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def show(title: str, rows: list[dict[str, Any]], digits: int = 1) -> None:
    """Print rows as a table."""
    Console(width=120).print(table(rows, title, digits=digits))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="path without its ending")
    parser.add_argument("--behind", type=int, default=300)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--forwards", nargs="+", choices=FORWARDS, default=["torch", "native"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batches", type=int, nargs="*", default=[], help="tokens a second of whole answers")
    parser.add_argument("--new-tokens", type=int, default=40)
    parser.add_argument("--text", type=Path, help="JSON Lines whose responses are judged")
    parser.add_argument("--rows", type=int, default=64, help="of the text")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    loaded, forwards, warm_up = {}, {}, {}
    slots = max(args.behind + max(args.sizes), 256 if args.text else 0)
    try:
        for dtype in args.dtypes:
            loaded[dtype] = checkpoints.load_default(dtype=dtype, device="cpu")
            for kind in args.forwards:
                name = f"{kind}, {dtype}"
                model = loaded[dtype].model
                if kind in TORCHAO:
                    model = by_torchao(model, kind)
                forwards[name] = made = make_forward(
                    model, 1, slots, int8=loaded[dtype].int8, **FORWARDS[kind]
                )
                if isinstance(made, CompiledForward):
                    warm_up[name] = made.warm_up_seconds
    except MarsError as error:
        sys.exit(str(error))
    rows = measure(forwards, args.behind, args.sizes, args.repeats)
    show("milliseconds of a forward", rows)
    result: dict[str, Any] = {"behind": args.behind, "milliseconds": rows}
    if warm_up:
        result["warm_up_seconds"] = warm_up
        show("seconds to compile", [warm_up])
    if args.batches:
        repeats = max(1, args.repeats // 5)
        result["tokens_per_second"] = [
            rates(loaded, args.forwards, batch, args.new_tokens, repeats) for batch in args.batches
        ]
        show("tokens a second", result["tokens_per_second"])
    if args.text:
        result["judgements"] = judgements(forwards, next(iter(loaded.values())), args.text, args.rows)
        show(f"{args.rows} responses", result["judgements"], digits=4)
    write(args.output.with_suffix(".json"), result)
    picture(args.output.with_suffix(".png"), rows)


if __name__ == "__main__":
    main()
