"""`mars eval` against the engine: how much of the engine's own rate the harness model class keeps.

    python benchmarks/evaluation.py --data ../shared/data --output docs/results/evaluation

Both decode the same prompts at the same batch, in turn: the engine as benchmarks/decode.py drives it, and the
class that lm-evaluation-harness calls, which also tokenizes, cuts at stop strings and keeps a journal. Prints
a table and writes OUTPUT.json and OUTPUT.png.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import transformers

from common import in_turn, load_prompts, ratio, write
from mars_lm import checkpoint as checkpoints
from mars_lm.decoding import Engine
from mars_lm.errors import MarsError
from mars_lm.evaluation.tables import markdown
from mars_lm.settings import DecodingSettings


def compare(loaded: checkpoints.Checkpoint, questions: list[str], batch: int, args: Any) -> dict[str, Any]:
    """Seconds of both on the same prompts, turn by turn."""
    from lm_eval.api.instance import Instance

    from mars_lm.evaluation.harness_model import MarsLM

    kwargs = {"until": ["Q:"], "max_gen_toks": args.max_new_tokens, "do_sample": False}
    model = MarsLM(loaded=loaded, batch_size=batch, tau=args.tau, exact=True)
    asked = [model.apply_chat_template([{"role": "user", "content": text}]) for text in questions]
    requests = [
        Instance("generate_until", {}, (text, kwargs), 0, metadata=("gsm8k", i, 1))
        for i, text in enumerate(asked)
    ]
    ids = sorted((model.tok_encode(text) for text in asked), key=len, reverse=True)
    settings = DecodingSettings(tau=args.tau, max_new_tokens=args.max_new_tokens, stop=("Q:",))
    tokens: dict[str, int] = {}

    def engine() -> None:
        running = Engine(loaded, max_rows=batch, max_length=len(ids[0]) + args.max_new_tokens)
        numbers = [running.add(prompt, settings) for prompt in ids]
        for _ in running.stream():
            pass
        tokens["engine"] = sum(len(running.result(number).token_ids) for number in numbers)

    def harness() -> None:
        with tempfile.TemporaryDirectory() as folder:
            model._journal = Path(folder) / "answers.jsonl"
            before = model.speed.tokens.total()
            model.generate_until(requests)
            tokens["harness"] = model.speed.tokens.total() - before

    seconds = in_turn({"engine": engine, "harness": harness}, args.repeats)
    if tokens["engine"] != tokens["harness"]:
        raise MarsError(f"The two wrote different texts: {tokens}.")
    rates = {name: [tokens[name] / s for s in values] for name, values in seconds.items()}
    return {
        "batch": batch,
        "prompts": len(ids),
        "tokens": tokens["engine"],
        "engine": max(rates["engine"]),
        "harness": max(rates["harness"]),
        "share": ratio(rates["harness"], rates["engine"]),
    }


def picture(path: Path, rows: list[dict[str, Any]]) -> None:
    """The share of the engine's rate by batch, and the bar of 0.9."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5, 3.5))
    axis.plot([str(row["batch"]) for row in rows], [row["share"] for row in rows], "o-")
    axis.axhline(0.9, color="grey", linewidth=0.8)
    axis.set_ylim(0, 1.1)
    axis.set_xlabel("batch")
    axis.set_ylabel("mars eval / engine, tokens per second")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", help="default: the packaged model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", type=Path, required=True, help="path without its ending")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tau", type=float, default=0.0, help="of exact mode; 1 is one-token mode")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    try:
        loaded = (
            checkpoints.load(args.model, dtype=args.dtype, device="cpu")
            if args.model
            else checkpoints.load_default(dtype=args.dtype, device="cpu")
        )
        if loaded.mars is None:
            args.tau = 1.0
        questions = load_prompts(args.data, "gsm8k", args.prompts)
        rows = [compare(loaded, questions, batch, args) for batch in args.batches]
    except MarsError as error:
        sys.exit(str(error))
    header = ["batch", "prompts", "tokens", "engine, tokens/s", "mars eval, tokens/s", "share"]
    lines = [
        [str(row["batch"]), str(row["prompts"]), str(row["tokens"])]
        + [f"{row[name]:.2f}" for name in ("engine", "harness", "share")]
        for row in rows
    ]
    print(markdown(header, lines))
    write(args.output.with_suffix(".json"), {"rows": rows, "dtype": loaded.dtype, "tau": args.tau})
    picture(args.output.with_suffix(".png"), rows)


if __name__ == "__main__":
    main()
