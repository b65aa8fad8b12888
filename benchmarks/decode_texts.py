"""Is exact mode's text AR's? Against transformers' greedy search, and against one-token mode."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from common import decode, gap, parting
from decode_part import Bench, Panel, Part, Row
from mars_lm import checkpoint as checkpoints
from mars_lm.decoding import generate
from mars_lm.decoding.engine import GenerationResult


def reference(loaded: checkpoints.Checkpoint, ids: list[list[int]], budget: int) -> list[list[int]]:
    """transformers' greedy tokens, left-padded batches as its users write them."""
    width = max(map(len, ids))
    pad = loaded.tokenizer.pad_token_id or 0
    batch = torch.tensor([[pad] * (width - len(row)) + list(row) for row in ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    ends = sorted(checkpoints.end_token_ids(loaded))
    with torch.inference_mode():
        out = loaded.model.generate(
            batch,
            attention_mask=mask,
            max_new_tokens=budget,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=pad,
        )
    texts = []
    for row in out[:, width:].tolist():
        cut = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        texts.append(row[:cut])
    return texts


class Equal(Part):
    """How many of exact mode's texts are transformers' greedy ones, token for token."""

    name = "equal"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--equal-prompts",
            type=int,
            default=100,
            help="equal and divergence: prompts (default: %(default)s)",
        )

    def measure(self, bench: Bench) -> Row:
        ids = bench.prompts(bench.args.equal_prompts)
        ours = generate(bench.loaded, ids, bench.exact, max_rows=bench.args.rows)
        parted = [
            number
            for number, (prompt, result) in enumerate(zip(ids, ours, strict=True))
            if reference(bench.loaded, [prompt], bench.exact.max_new_tokens)[0] != result.token_ids
        ]
        return {"prompts": len(ids), "equal": len(ids) - len(parted), "parted": parted}

    def tables(self, result: Any) -> list[tuple[str, list[Row]]]:
        return [("exact mode: texts equal to transformers' greedy ones", [result])]


class Divergence(Part):
    """Exact mode's texts that part from one-token mode's, and AR's two best logits where they do (SPEC 4).

    All masks are placed: the more tokens a forward holds, the more may a library round differently.
    """

    name = "divergence"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--kernels",
            nargs="+",
            choices=["native", "torch"],
            default=["native", "torch"],
            help="divergence: what runs the model (default: both)",
        )

    def measure(self, bench: Bench) -> list[Row]:
        ids = bench.prompts(bench.args.equal_prompts)
        longest = max(map(len, ids)) + bench.exact.max_new_tokens
        rows = []
        for kernels in bench.args.kernels:
            engine = bench.engine(bench.args.rows, max_length=longest, kernels=kernels)
            # The two best are read off AR's own run: another forward might round differently.
            one = decode(engine, ids, dataclasses.replace(bench.one, logprobs=2))
            exact = decode(engine, ids, dataclasses.replace(bench.exact, adaptive=False))
            rows.append({"kernels": kernels, **compare(one, exact)})
        return rows

    def tables(self, result: Any) -> list[tuple[str, list[Row]]]:
        flat = [{key: value for key, value in row.items() if key != "places"} for row in result]
        places = [{"kernels": row["kernels"], **place} for row in result for place in row["places"]]
        shown = [("exact mode's texts against one-token mode's; gaps are of AR's two best logits", flat)]
        return shown + ([("where they part", places)] if places else [])

    def panels(self, result: Any) -> list[Panel]:
        def draw(axis: Any) -> None:
            for row in result:
                gaps = [place["gap"] for place in row["places"] if place["gap"] is not None]
                name = f"{row['kernels']}: {row['parted']} of {row['texts']} part"
                axis.plot(sorted(gaps), "o", label=name)
            axis.axhline(
                statistics.median(row["median_gap"] for row in result),
                color="grey",
                linewidth=0.8,
                label="median gap of all places",
            )
            axis.set_xlabel("texts that part, by gap")
            axis.set_ylabel("gap of AR's two best logits")
            axis.set_ylim(bottom=0)
            axis.legend()

        return [draw]


def compare(one: Sequence[GenerationResult], exact: Sequence[GenerationResult]) -> Row:
    """Count the texts that part.

    Args:
        one: one-token mode's answers, with the two best log-probabilities of each place; exact: exact mode's.
    Returns:
        Counts; the largest gap among the places where texts part (None: no text does, or AR's ended where the
        other went on, which is no tie) and the median gap of all places; and each place: the exact mode's
        token has what `rank` among AR's two best (None: it is neither).
    """
    places = []
    for number, (ours, theirs) in enumerate(zip(one, exact, strict=True)):
        place = parting(ours.token_ids, theirs.token_ids)
        if place is not None:
            places.append({"text": number, "place": place, **_at(place, ours, theirs)})
    gaps = [place["gap"] for place in places]
    return {
        "texts": len(one),
        "tokens": sum(len(result.token_ids) for result in one),
        "parted": len(places),
        "largest_gap": max(gaps) if gaps and None not in gaps else None,
        "median_gap": statistics.median(gap_of(said.top) for result in one for said in result.logprobs or ()),
        "places": places,
    }


def _at(place: int, one: GenerationResult, exact: GenerationResult) -> Row:
    said = one.logprobs or []
    if place >= len(said) or place >= len(exact.token_ids):
        return {"gap": None, "rank": None}
    best = [token for token, _ in said[place].top]
    token = exact.token_ids[place]
    return {"gap": gap_of(said[place].top), "rank": best.index(token) + 1 if token in best else None}


def gap_of(top: list[tuple[int, float]]) -> float:
    """Between the two best of the tokens with their log-probabilities."""
    return gap(logprob for _, logprob in top)
