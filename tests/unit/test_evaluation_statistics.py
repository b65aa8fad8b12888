"""Confidence intervals, and the tables and pictures that show them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

from mars_lm.evaluation.plots import plot_frontier, plot_gaps, plot_rules
from mars_lm.evaluation.statistics import bootstrap, mean_and_spread, of_mean, wilson
from mars_lm.evaluation.tables import evaluation_table, markdown, share, sweep_table


def test_wilson_against_published_values() -> None:
    # Newcombe 1998, table I: 81 of 263 and 0 of 20, 95%.
    assert (wilson(81, 263).low, wilson(81, 263).high) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert (wilson(0, 20).low, wilson(0, 20).high) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(20, 20).high == 1.0
    assert math.isnan(wilson(0, 0).value)


def test_a_mean_of_shares_is_not_binomial() -> None:
    assert of_mean([1, 0, 1, 1]) == wilson(3, 4)
    interval = of_mean([0.5, 0.25, 0.75, 0.5])
    assert interval.value == 0.5
    assert interval.high - interval.value == pytest.approx(1.959964 * math.sqrt(0.125 / 3 / 4), rel=1e-6)


def test_bootstrap_covers_the_mean_and_is_repeatable() -> None:
    rows = [float(i % 7) for i in range(200)]
    first = bootstrap(rows, lambda drawn: sum(drawn) / len(drawn))
    assert first == bootstrap(rows, lambda drawn: sum(drawn) / len(drawn))
    assert first.low < first.value < first.high
    assert first.high - first.low == pytest.approx(2 * 1.96 * 2.0 / math.sqrt(200), rel=0.15)


def test_spread_over_seeds() -> None:
    assert mean_and_spread([1.0, 2.0, 3.0]) == (2.0, 1.0)
    assert mean_and_spread([1.0]) == (1.0, 0.0)


def cell(mode: str, tau: float | None, mean: float, speed: float, rule: str | None = "probability") -> dict:
    score = {"metric": "acc,none", "value": mean, "low": mean - 0.02, "high": mean + 0.02, "rows": 100}
    return {
        "label": "a|b",
        "mode": mode,
        "rule": rule,
        "tau": tau,
        "block_size": None,
        "masks": None,
        "scores": {"toy": score},
        "titles": {"toy": "Toy"},
        "mean": mean,
        "tokens_per_forward": speed,
        "tokens_per_second": 10 * speed,
        "speed_up": speed,
    }


def test_tables_and_pictures_of_a_sweep(tmp_path: Path) -> None:
    rows = [
        cell("one-token", None, 0.5, 1.0, None),
        cell("lossy", 0.9, 0.48, 1.5),
        cell("lossy", 0.5, 0.4, 2.0),
        cell("lossy", 0.2, 0.47, 1.6, "entropy"),
    ]
    table = sweep_table(rows)
    assert len(table.splitlines()) == 2 + len(rows)
    assert len({line.replace("\\|", "__").count("|") for line in table.splitlines()}) == 1
    assert "48.0 [46.0, 50.0]" in table
    assert all(path.stat().st_size > 1000 for path in plot_frontier(rows, tmp_path))
    assert [path.name for path in plot_rules(rows, tmp_path)] == ["rules.png"]
    assert plot_rules(rows[:3], tmp_path) == []


def test_a_score_without_an_interval_is_shown_as_it_is() -> None:
    part = {
        "title": "Toy",
        "score": {"metric": "word_perplexity,none", "value": 12.345, "low": None, "high": None, "rows": 3},
        "speed": {},
    }
    assert share(part["score"]) == "12.35"
    assert "–" in evaluation_table({"toy": part})
    assert markdown(["a", "b"], [["x", "1"]]).splitlines()[1] == "| -- | -: |"


def test_the_picture_of_the_gaps(tmp_path: Path) -> None:
    view = {"cost": 0.5, "nats_by_distance": [1.0, 2.0, None]}
    result = {"ar": {"nats": 1.0}, "views": {"masking": view, "all, one by one": view}}
    shares = [{"block_size": 2, "with_sft_window": 0.7, "with_sft_paper": 0.75, "without_sft_paper": 0.5}]
    assert plot_gaps({"before": result, "after": result}, shares, tmp_path / "gaps.png").stat().st_size > 1000
