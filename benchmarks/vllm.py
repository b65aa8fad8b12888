"""MARS inside vLLM, and our own engine in one-token, exact and lossy mode, against plain vLLM.

    python benchmarks/vllm.py --data ../shared/data --output docs/results/vllm

Needs an environment with vLLM and mars-lm (docs/vllm.md). Every contestant runs in a process of its own, one
after the other, on the same prompts: GSM8K questions in the chat template, greedy, the same number of new
tokens (`ignore_eos`), by the number of requests at once. Texts are compared with plain vLLM's; where one
parts from it in bfloat16, the gap of plain vLLM's two best logits there is shown (from a run without clock).

Tokens per step are tokens of the answers over steps of the requests, the prefill's step counted, as in our
own engine: every token that was not accepted from a draft or a mask is one step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import decode, gap, load_prompts, parting, totals, write
from mars_lm.settings import decoding_settings

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
# What each contestant is: the plugin's defaults, vLLM's own arguments, or our engine's settings.
CONTESTANTS: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm n-gram": {"arguments": {"speculative_config": NGRAM}},
    "mars exact": {"mars": {"exact": True}},
    "mars lossy 0.95": {"mars": {"exact": False, "tau": 0.95}},
    "mars exact, fixed width": {"mars": {"exact": True, "adaptive": False}},
    "mars lossy 0.95, fixed width": {"mars": {"exact": False, "tau": 0.95, "adaptive": False}},
    "own engine one-token": {"engine": {"exact": True, "tau": 1.0}},
    "own engine exact": {"engine": {"exact": True}},
    "own engine exact, fixed width": {"engine": {"exact": True, "recovery": False, "adaptive": False}},
    "own engine lossy 0.95": {"engine": {"exact": False, "tau": 0.95}},
}
FIRST = "vllm"


def vllm_contestant(job: dict[str, Any]) -> dict[str, Any]:
    """Rounds of the job in a vLLM engine of this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    sys.path.remove(str(Path(__file__).resolve().parent))  # this file is no vllm
    from mars_lm.vllm.launch import engine_arguments
    from vllm import LLM, SamplingParams

    arguments = {
        "model": job["model"],
        "dtype": job["dtype"],
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": max(job["requests"]),
        "enable_prefix_caching": False,  # rounds repeat prompts
        "disable_log_stats": False,
        **job.get("arguments", {}),
    }
    if "mars" in job:
        arguments |= engine_arguments(job["block_size"], job["mars"])
    llm = LLM(**arguments)

    def accepted() -> float:
        counts = [m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens"]
        return sum(counts)

    params = SamplingParams(temperature=0.0, max_tokens=job["new_tokens"], ignore_eos=True)

    def run(prompts: list[list[int]]) -> dict[str, Any]:
        before, start = accepted(), time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        tokens = sum(map(len, answers))
        return {
            "answers": answers,
            "seconds": seconds,
            "tokens": tokens,
            "steps": tokens - (accepted() - before),
        }

    result = rounds(job, run)
    if job.get("gaps"):
        params.logprobs = 2
        for requests in job["requests"]:
            outputs = [
                output.outputs[0]
                for group in groups_of(job, requests)
                for output in llm.generate([{"prompt_token_ids": p} for p in group], params, use_tqdm=False)
            ]
            result["rows"][str(requests)]["gaps"] = [
                {
                    "answer": list(output.token_ids),
                    "gaps": [gap(said.logprob for said in place.values()) for place in output.logprobs],
                }
                for output in outputs
            ]
    return result


def groups_of(job: dict[str, Any], requests: int) -> list[list[list[int]]]:
    """The prompts that run at once: at one request, one after the other."""
    count = max(requests, job["at_one"])
    return [job["prompts"][i : i + requests] for i in range(0, count, requests)]


def own_contestant(job: dict[str, Any]) -> dict[str, Any]:
    """Rounds of the job in our own engine."""
    from mars_lm import checkpoint
    from mars_lm.decoding import Engine

    loaded = checkpoint.load(job["model"], dtype=job["dtype"], device="cpu")
    settings = decoding_settings(
        loaded.mars, {**job["engine"], "max_new_tokens": job["new_tokens"], "ignore_eos": True}
    )
    # Rounds repeat prompts, and nobody keeps them.
    engine = Engine(loaded, max_rows=max(job["requests"]), max_length=2048, share_prefixes=False)

    def run(prompts: list[list[int]]) -> dict[str, Any]:
        start = time.perf_counter()
        results = decode(engine, prompts, settings)
        seconds = time.perf_counter() - start
        tokens, steps = totals(results)
        return {
            "answers": [result.token_ids for result in results],
            "seconds": seconds,
            "tokens": tokens,
            "steps": steps,
        }

    return rounds(job, run)


def rounds(job: dict[str, Any], run: Any) -> dict[str, Any]:
    """A warm-up, then for each number of requests its prompts."""
    run(job["prompts"][:1])
    result: dict[str, Any] = {"rows": {}}
    for requests in job["requests"]:
        done = [run(group) for group in groups_of(job, requests)]
        seconds, tokens, steps = (sum(d[key] for d in done) for key in ("seconds", "tokens", "steps"))
        result["rows"][str(requests)] = {
            "tokens_per_second": tokens / seconds,
            "tokens_per_step": tokens / steps,
            "answers": [answer for d in done for answer in d["answers"]],
        }
    return result


def in_own_process(name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run a contestant in a process of its own; its log goes to stderr."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.json"
        file.write_text(json.dumps(job))
        print(f"{name} …", file=sys.stderr, flush=True)
        environment = dict(os.environ)
        # vLLM's own advice for CPUs; without it a step waits for threads.
        library = Path(sys.prefix) / "lib" / "libiomp5.so"
        if "engine" not in job and library.is_file() and "LD_PRELOAD" not in environment:
            environment["LD_PRELOAD"] = str(library)
        environment.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        subprocess.run([sys.executable, __file__, "--job", str(file)], env=environment, check=True)
        return json.loads(file.with_suffix(".result").read_text())


def table(result: dict[str, Any], requests: list[int]) -> None:
    """Tokens per step, tokens per second, and the ratio to plain vLLM, by requests at once."""
    from rich.console import Console
    from rich.table import Table

    out = Table(title="tokens per step · tokens per second · over plain vLLM", title_justify="left")
    out.add_column("")
    for count in requests:
        out.add_column(f"{count} at once", justify="right")
    for name, rows in result.items():
        cells = []
        for count in requests:
            row = rows[str(count)]
            ratio = f" · {row['ratio']:.2f}" if "ratio" in row else ""
            cells.append(f"{row['tokens_per_step']:.2f} · {row['tokens_per_second']:.1f}{ratio}")
        out.add_row(name, *cells)
    Console(width=130).print(out)


def picture(path: Path, result: dict[str, Any], requests: list[int]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    for name, rows in result.items():
        axes[0].plot(range(len(requests)), [rows[str(r)]["ratio"] for r in requests], "o-", label=name)
        axes[1].plot(
            range(len(requests)), [rows[str(r)]["tokens_per_step"] for r in requests], "o-", label=name
        )
    axes[0].axhline(1.0, color="grey", linewidth=0.8)
    axes[0].set_ylabel("tokens per second over plain vLLM")
    axes[1].set_ylabel("tokens per step")
    for axis in axes:
        axis.set_xticks(range(len(requests)), [str(r) for r in requests])
        axis.set_xlabel("requests at once")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def equality(
    first: list[list[int]], other: list[list[int]], gaps: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """How many answers are the same; where the others part, and the gap of plain vLLM's two best logits.

    A gap is None where plain vLLM itself said something else before in the run that looked at its logits.
    """
    parted = []
    for number, (a, b) in enumerate(zip(first, other, strict=True)):
        place = parting(a, b)
        if place is None:
            continue
        known = gaps is not None and gaps[number]["answer"][:place] == a[:place]
        tie = gaps[number]["gaps"][place] if gaps is not None and known else None
        parted.append({"answer": number, "place": place, "gap": tie})
    return {"answers": len(first), "equal": len(first) - len(parted), "parted": parted}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--output", type=Path, help="path without its ending")
    parser.add_argument("--model", help="a folder with plain weights; default: the packaged model, merged")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--at-one", type=int, default=4, help="prompts where fewer requests run at once")
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS), choices=list(CONTESTANTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        job = json.loads(args.job.read_text())
        result = own_contestant(job) if "engine" in job else vllm_contestant(job)
        args.job.with_suffix(".result").write_text(json.dumps(result))
        return
    if args.data is None or args.output is None:
        parser.error("--data and --output are needed")

    from transformers import AutoConfig, AutoTokenizer

    from mars_lm.settings import MarsSettings
    from mars_lm.vllm.launch import plain_weights

    model = args.model or plain_weights(None, None)[0]
    mars = MarsSettings.from_config(AutoConfig.from_pretrained(model))
    if mars is None:
        sys.exit(f"{model} has no MARS settings: there is nothing to compare.")
    tokenizer = AutoTokenizer.from_pretrained(model)
    questions = load_prompts(args.data, "gsm8k", max(*args.requests, args.at_one), args.seed)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in questions
    ]
    job = {
        "model": model,
        "block_size": mars.block_size,
        "dtype": args.dtype,
        "prompts": prompts,
        "requests": args.requests,
        "at_one": args.at_one,
        "new_tokens": args.new_tokens,
    }
    # The first again at the end: a machine's drift shows between the two.
    names = [name for name in args.contestants if name != FIRST]
    first = in_own_process(FIRST, job)["rows"]
    rows = {name: in_own_process(name, {**job, **CONTESTANTS[name]})["rows"] for name in names}
    again = in_own_process(FIRST, {**job, "gaps": args.dtype != "float32"})["rows"] if names else first
    for count in map(str, args.requests):
        speeds = [run[count]["tokens_per_second"] for run in (first, again)]
        first[count]["tokens_per_second"] = sum(speeds) / 2
        first[count]["drift"] = speeds[1] / speeds[0]
    rows = {FIRST: first, **rows}
    equal = {}
    for name, row in rows.items():
        for count in map(str, args.requests):
            row[count]["ratio"] = row[count]["tokens_per_second"] / first[count]["tokens_per_second"]
            if name != FIRST and "lossy" not in name:
                key = f"{name}, {count} at once"
                equal[key] = equality(
                    first[count]["answers"], row[count]["answers"], again[count].get("gaps")
                )
    for row in rows.values():
        for count in map(str, args.requests):
            del row[count]["answers"]
    table(rows, args.requests)
    for key, found in equal.items():
        print(f"{key}: {found['equal']} of {found['answers']} answers equal to plain vLLM's")
        for place in found["parted"]:
            print(f"  answer {place['answer']} parts at token {place['place']}; gap {place['gap']}")
    settings = {key: value for key, value in job.items() if key not in ("prompts", "model")}
    write(
        args.output.with_suffix(".json"), {"settings": settings, "rows": rows, "equal": equal}, seed=args.seed
    )
    picture(args.output.with_suffix(".png"), rows, args.requests)


if __name__ == "__main__":
    main()
