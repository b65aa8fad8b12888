"""What the server counts, for Prometheus. Nothing here holds a word of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from mars_lm.settings import RULES

if TYPE_CHECKING:
    from mars_lm.serving.knob import Knob
    from mars_lm.serving.runner import Runner

disable_created_metrics()  # when a counter was made is a line for each that nobody draws

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_REQUEST = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)


class Metrics:
    """The server's counters; one registry a server, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"mars_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"mars_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"mars_{name}", text, buckets=buckets, registry=registry)

        self.requests = counter("requests", "Requests by endpoint and outcome.", "endpoint", "outcome")
        self.request_seconds = histogram("request_seconds", "Time of a request, waiting included.", _REQUEST)
        self.running = gauge("rows_running", "Occupied rows.")
        self.rows = gauge("rows", "Rows that the engine has.")
        self.waiting = gauge("queue_waiting", "Answers that wait for a row.")
        self.queue_limit = gauge("queue_limit", "Answers that may wait before requests are refused.")
        self.first_token = histogram("time_to_first_token_seconds", "Until the first token.", _FIRST_TOKEN)
        self.between_tokens = histogram(
            "time_between_tokens_seconds",
            "Between a request's tokens: a forward's time over its tokens.",
            _BETWEEN_TOKENS,
        )
        self.prompt_tokens = counter("prompt_tokens", "Tokens of accepted prompts.")
        self.tokens = counter("tokens", "Generated tokens.")
        self.forwards = counter("forwards", "Forwards, counted for each request that they served.")
        self.steps = counter("engine_steps", "Forwards of the whole batch.")
        self.accepted = histogram(
            "accepted_length", "Tokens that one forward gave one request.", tuple(range(1, 17))
        )
        self.rejected_drafts = counter("rejected_drafts", "Draft tokens that were not confirmed.")
        self.cache_use = gauge("cache_use_ratio", "Share of the key-value cache in use.")
        self.tau = gauge("tau", "The default tau in force.")
        self.block_size = gauge("block_size", "The default block size in force.")
        self.exact = gauge("exact", "1 if the default is exact mode.")
        self.rule = gauge("rule", "1 for the default rule in force.", "rule")
        self.changes = counter("settings_changes", "Changes of the live defaults.", "by")
        self.controller_on = gauge("controller_on", "1 while the load controller turns tau.")
        self.controller_load = gauge("controller_load", "The smoothed load that the controller sees.")
        self.controller_position = gauge("controller_position", "0: tau at its careful bound, 1: fast.")

    def forward(self, given: Sequence[tuple[int, float, bool]]) -> None:
        """Count one forward of the whole batch.

        Args:
            given: for each request its tokens, the seconds since its tokens before (or its arrival), and
                whether these are its first.
        """
        self.steps.inc()
        self.forwards.inc(len(given))
        self.tokens.inc(sum(tokens for tokens, _, _ in given))
        for tokens, seconds, first in given:
            if tokens:
                self.accepted.observe(tokens)
            if tokens and first:
                self.first_token.observe(seconds)
            else:
                for _ in range(tokens):
                    self.between_tokens.observe(seconds / tokens)

    def scrape(self, runner: Runner, knob: Knob) -> bytes:
        """All of them, in Prometheus's text format."""
        self.rows.set(runner.rows)
        self.running.set(runner.running)
        self.waiting.set(runner.waiting)
        self.queue_limit.set(runner.max_queue)
        self.cache_use.set(runner.engine.cache_use)
        defaults = knob.defaults
        self.tau.set(defaults.tau)
        self.block_size.set(defaults.block_size or knob.trained_block_size or 1)
        self.exact.set(defaults.exact)
        for rule in RULES:
            self.rule.labels(rule).set(rule == defaults.rule)
        self.controller_on.set(knob.controller_on)
        if knob.controller is not None:
            self.controller_load.set(knob.controller.load)
            self.controller_position.set(knob.controller.position)
        return generate_latest(self.registry)
