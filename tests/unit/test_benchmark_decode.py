"""The decoding benchmark: contestants get the same work, and what is planted is found."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from mars_lm import checkpoint as checkpoints
from mars_lm.decoding import Engine
from mars_lm.decoding.engine import GenerationResult
from mars_lm.decoding.forward import ModelForward
from mars_lm.decoding.native import build
from mars_lm.decoding.window import TokenLogprob
from mars_lm.errors import MarsError
from tiny import tiny_checkpoint

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import decode as benchmark
import decode_caches
from common import parting
from decode_caches import ADAPTIVE, BASELINE, NONE, WINDOW, Caches, Cell, window_over_best
from decode_part import Bench
from decode_peers import LlamaCpp
from decode_steps import Bandwidth, StepClock, StepShare, share
from decode_texts import Divergence, compare
from mars_lm.settings import DecodingSettings

QUESTIONS = ["how much is two and two", "a lazy dog", "the quick brown fox jumps over it", "hello world"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "gsm8k"
    folder.mkdir()
    rows = [json.dumps({"question": question}) for question in QUESTIONS]
    (folder / "test.jsonl").write_text("\n".join(rows) + "\n")
    return folder.parent


def bench(data: Path, *options: str, budget: int = 12, **model) -> Bench:
    args = benchmark.options().parse_args(["--data", str(data), "--output", "unused", *options])
    return Bench(args, tiny_checkpoint("llama", seed=5, **model), DecodingSettings(max_new_tokens=budget))


def native_or_skip() -> None:
    try:
        build.library()
    except MarsError as error:
        pytest.skip(str(error))


@pytest.fixture
def added(monkeypatch) -> dict[int, list]:
    """What each engine was asked, by engine: (prompt, settings)."""
    asked: dict[int, list] = {}
    add = Engine.add

    def recording(self, prompt, settings, **rest):
        asked.setdefault(id(self), []).append((tuple(prompt), settings))
        return add(self, prompt, settings, **rest)

    monkeypatch.setattr(Engine, "add", recording)
    return asked


def engines_of(made) -> list[str]:
    return list(decode_caches.caches(made.args, made.args.batches[0]))


def test_every_cache_decodes_the_same_prompts_at_every_tau(data, added):
    made = bench(data, "--batches", "3", "--repeats", "2", "--taus", "1", "0.5", "--commit-blocks", "4", "64")
    result = Caches().measure(made)
    trained = made.block_size
    narrow = [(WINDOW, 2), ("block 4", 2)]  # where the number of masks is the cache's own choice
    both = [(1.0, trained), (0.5, trained)]
    asked_of = {cache: both + [(0.5, 2)] * ((cache, 2) in narrow) for cache in engines_of(made)}
    asked_of[ADAPTIVE] = [(0.5, trained)]  # at tau 1 there are no masks to choose
    assert [(row["cache"], row["tau"], row["block_size"]) for row in result["speeds"]] == [
        (cache, *cell) for cache, every in asked_of.items() for cell in every
    ]
    assert len(added) == len(asked_of)
    for asked, every in zip(added.values(), asked_of.values(), strict=True):
        work = [(prompt, s.tau, s.block_size or trained) for prompt, s in asked if s.max_new_tokens == 12]
        expected = [tuple(prompt) for prompt in made.prompts(3)]
        assert work == [(prompt, *cell) for _ in range(2) for cell in every for prompt in expected]
        assert not any(s.exact for _, s in asked if s.tau < 1)
        assert {s.adapts for _, s in asked if s.tau < 1} == {every is asked_of[ADAPTIVE]}
    # At τ = 1 every cache is AR: a token a forward; and one-token mode is the measure of all.
    assert all(row["tokens_per_forward"] == 1 for row in result["speeds"] if row["tau"] == 1)
    assert all(row["tokens_per_forward"] >= 1 for row in result["speeds"])
    assert result["speeds"][0]["speed_up"] == 1


def test_no_cache_stops_at_its_largest_batch_and_one_token_mode_is_always_there(data):
    result = Caches().measure(
        bench(
            data,
            *("--batches", "1", "2", "--repeats", "1", "--taus", "0.5"),
            *("--commit-blocks", "--no-cache-up-to", "1", "--narrower"),
        )
    )
    assert [(row["batch"], row["cache"], row["tau"]) for row in result["speeds"]] == [
        (1, WINDOW, 1.0),
        (1, WINDOW, 0.5),
        (1, ADAPTIVE, 0.5),
        (1, NONE, 0.5),
        (2, WINDOW, 1.0),
        (2, WINDOW, 0.5),
        (2, ADAPTIVE, 0.5),
    ]
    assert result["best"] == []  # there is no block to compare with


def test_the_best_block_is_the_fastest_at_that_tau():
    rates = {
        BASELINE: [10.0, 20.0],
        Cell(WINDOW, 0.8): [29.0, 59.0],
        Cell(ADAPTIVE, 0.8): [98.0, 98.0],
        Cell(WINDOW, 0.8, 2): [30.0, 60.0],
        Cell("block 4", 0.8): [20.0, 40.0],
        Cell("block 4", 0.8, 2): [21.0, 41.0],
        Cell("block 16", 0.8): [24.0, 50.0],
        Cell(NONE, 0.8): [99.0, 99.0],
    }
    [row] = window_over_best(rates, 4)
    assert row["tau"] == 0.8
    assert (row["best_block"], row["best_block_size"], row["window_block_size"]) == ("block 16", 4, 2)
    assert row["window_over_best"] == pytest.approx((30 / 24 + 60 / 50) / 2)
    assert row["window_speed_up"] == pytest.approx(3)


@pytest.mark.parametrize(("head_dim", "kernels"), [(16, "native"), (8, "torch")])
def test_what_ran_the_model_is_told(data, head_dim, kernels):
    native_or_skip()
    assert bench(data, head_dim=head_dim).kernels == kernels


def test_a_planted_divergence_is_found_with_ars_own_gap(data, monkeypatch):
    """Where a forward asks several logits, those of the first swap their two best at a planted place."""
    made = bench(data, "--kernels", "torch", "--equal-prompts", "4", "--rows", "1")
    [clean] = Divergence().measure(made)
    assert (clean["texts"], clean["parted"], clean["places"], clean["largest_gap"]) == (4, 0, [], None)

    logits, calls = ModelForward.logits, []

    def swapping(self, hidden):
        found = logits(self, hidden)
        calls.append(len(hidden))
        # The first forward of several logits is exact mode's first: its AR candidate is the answer's first.
        if len(hidden) > 1 and not any(size > 1 for size in calls[:-1]):
            found[0, made.loaded.mars.mask_token_id] = -torch.inf
            first, second = found[0].topk(2).indices.tolist()
            found[0, [first, second]] = found[0, [second, first]]
        return found

    monkeypatch.setattr(ModelForward, "logits", swapping)
    [row] = Divergence().measure(made)
    [place] = row["places"]
    prompt = made.prompts(4)[0]
    with torch.inference_mode():
        expected = made.loaded.model(torch.tensor([prompt])).logits[0, -1]
        expected[made.loaded.mars.mask_token_id] = -torch.inf
    best = expected.topk(2).values
    assert (row["parted"], place["text"], place["place"], place["rank"]) == (1, 0, 0, 2)
    assert place["gap"] == pytest.approx(float(best[0] - best[1]), rel=1e-3)
    assert row["largest_gap"] == place["gap"] > 0


def answer(ids: list[int]) -> GenerationResult:
    said = [TokenLogprob(i, -1.0, [(i, -1.0), (i + 1, -1.25)]) for i in ids]
    return GenerationResult(token_ids=ids, logprobs=said)


def test_texts_part_where_they_first_differ_or_one_ends():
    assert parting([1, 2, 3], [1, 2, 3]) is None
    assert parting([1, 2, 3, 4], [1, 5, 3, 6]) == 1
    assert parting([1, 2], [1, 2, 3]) == parting([1, 2, 3], [1, 2]) == 2
    found = compare(
        [answer([1, 2, 3]), answer([4, 5]), answer([7])], [answer([1, 9, 3]), answer([4]), answer([7])]
    )
    assert found["places"] == [
        {"text": 0, "place": 1, "gap": 0.25, "rank": None},
        {"text": 1, "place": 1, "gap": None, "rank": None},
    ]
    # A text that just ended is no near tie: the largest gap must not hide it.
    assert (found["parted"], found["largest_gap"], found["median_gap"]) == (2, None, 0.25)


def test_bandwidth_counts_the_weights_once(data):
    native_or_skip()
    made = bench(data, "--repeats", "1", "--reads", "2", head_dim=16, hidden_size=64, intermediate_size=96)
    result = Bandwidth().measure(made)
    # Sizes that fill whole panels: what is read is every parameter (the tied embedding as the output matrix).
    assert result["weight_bytes"] == sum(p.numel() * 4 for p in made.loaded.model.parameters())
    assert result["ratio"] == pytest.approx(result["step_gb_per_second"] / result["read_gb_per_second"])
    assert result["step_gb_per_second"] == pytest.approx(result["weight_bytes"] / result["step_ms"] / 1e6)


@pytest.mark.parametrize("where", ["layers", "logits", "outside"])
def test_a_planted_delay_is_counted_where_it_is(data, where):
    made, delay = bench(data, budget=6), 0.05
    engine = made.engine(2, kernels="torch")
    owner, name = {
        "layers": (engine._model, "hidden"),
        "logits": (engine._model, "logits"),
        "outside": (engine, "_hand_out"),
    }[where]
    method = getattr(owner, name)

    def late(*arguments):
        time.sleep(delay)
        return method(*arguments)

    setattr(owner, name, late)
    steps = StepClock(engine).decode(made.prompts(2), made.one)
    assert len(steps) == 5  # the prefill's is left out
    row = share(steps, 1)
    assert row["step_ms"] >= 1e3 * delay
    for part in ("layers", "logits", "outside"):
        assert (row[f"{part}_ms"] >= 1e3 * delay) == (where == part)
    assert row["bar_percent"] == 5


def test_only_steps_of_all_rows_count(data):
    """Prompts that share small chunks begin one after the other, and end so."""
    made = bench(data, budget=6)
    engine = made.engine(2, prefill_chunk=20)
    prompts = [list(range(20, 45)), list(range(30, 60))]
    steps = StepClock(engine).decode(prompts, made.one)
    assert 0 < len(steps) < 5
    with pytest.raises(MarsError, match="--max-new-tokens"):
        StepClock(made.engine(2)).decode(prompts, DecodingSettings(tau=1.0, max_new_tokens=1))


def test_the_share_of_a_step_is_by_batch_and_mode(data):
    rows = StepShare().measure(bench(data, "--batches", "1", "2", "--repeats", "1"))
    assert [(row["batch"], row["mode"]) for row in rows] == [
        (batch, mode) for batch in (1, 2) for mode in ("one-token", "exact")
    ]
    assert all(0 < row["outside_percent"] < 100 and row["outside_ms"] < row["step_ms"] for row in rows)
    assert [row["bar_percent"] for row in rows] == [5, 5, None, None]


STUB = '''
import json, os

class Llama:
    """Says each prompt's last token again and again, and writes down what it was asked."""

    def __init__(self, path, **options):
        self.fresh = False
        self.note({"path": path, **options})

    def note(self, what):
        with open(os.environ["NOTES"], "a") as file:
            file.write(json.dumps(what) + "\\n")

    def reset(self):
        self.fresh = True

    def generate(self, prompt, temp):
        assert self.fresh and temp == 0.0
        self.fresh = False
        self.note(prompt)
        while True:
            yield prompt[-1]
'''


@pytest.fixture
def llama_python(tmp_path, monkeypatch) -> Path:
    """An interpreter whose llama-cpp-python is a stub; its notes go to tmp_path/notes."""
    (tmp_path / "llama_cpp.py").write_text(STUB)
    folder = tmp_path / "llama_cpp_python-9.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: 9.9\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    return Path(sys.executable)


def test_llama_cpp_gets_the_same_prompts_and_budget(data, tmp_path, llama_python, added):
    made = bench(
        data,
        *("--repeats", "2", "--llama-prompts", "3", "--llama-gguf", "some.gguf"),
        *("--llama-python", str(llama_python)),
    )
    result = LlamaCpp().measure(made)
    assert result["peer"] == "llama-cpp-python 9.9, some.gguf"
    job, *asked = map(json.loads, (tmp_path / "notes").read_text().splitlines())
    assert (job["path"], job["n_threads"]) == ("some.gguf", torch.get_num_threads())
    turns = 3  # one of them to warm up
    assert asked == made.prompts(3) * turns
    [ours] = added.values()
    assert [list(prompt) for prompt, _ in ours] == made.prompts(3) * turns * 2
    assert all(settings.max_new_tokens == 12 and settings.ignore_eos for _, settings in ours)
    speeds = result["tokens_per_second"]
    assert list(speeds) == ["exact", "one-token", "llama.cpp"]
    assert all(speed > 0 for speed in speeds.values())


def test_llama_cpp_missing_or_dying_is_a_sentence(data, tmp_path, monkeypatch, llama_python):
    with pytest.raises(MarsError, match="--llama-python"):
        LlamaCpp().measure(bench(data))
    named = ("--llama-prompts", "1", "--llama-gguf", "some.gguf", "--llama-python")
    with pytest.raises(MarsError, match="does not run"):
        LlamaCpp().measure(bench(data, *named, str(tmp_path / "none")))
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('no llama here')")
    with pytest.raises(MarsError, match="ended early: ImportError: no llama here"):
        LlamaCpp().measure(bench(data, *named, str(llama_python)))


def test_the_command_prints_writes_and_draws_every_part(data, tmp_path, monkeypatch, capsys, llama_python):
    native_or_skip()
    made = tiny_checkpoint("llama", seed=5, head_dim=16)
    monkeypatch.setattr(checkpoints, "load_default", lambda **_: made)
    for task in ("humaneval", "ifeval"):
        (tmp_path / task).mkdir()
        (tmp_path / task / "test.jsonl").write_text('{"prompt": "def add(a, b):"}\n')
    os.symlink(data / "gsm8k", tmp_path / "gsm8k")
    benchmark.main(
        [
            *("--data", str(tmp_path), "--output", str(tmp_path / "out"), "--parts", *benchmark.PARTS),
            *("--prompts", "1", "--equal-prompts", "2", "--batches", "1", "2", "--repeats", "1"),
            *("--max-new-tokens", "12", "--llama-gguf", "some.gguf", "--llama-python", str(llama_python)),
            *("--llama-prompts", "1", "--commit-blocks", "4", "--reads", "1", "--taus", "1", "0.5"),
        ]
    )
    written = json.loads((tmp_path / "out.json").read_text())
    assert set(benchmark.PARTS) < set(written)
    assert (written["dtype"], written["kernels"]) == ("float32", "native")
    # A float32 model on one machine: exact mode is one-token mode, whatever runs it.
    assert written["equal"]["equal"] == 2
    assert [row["parted"] for row in written["divergence"]] == [0, 0]
    assert (tmp_path / "out.png").stat().st_size > 10_000
    shown = capsys.readouterr().out
    for part in benchmark.PARTS.values():
        for title, _ in part.tables(written[part.name]):
            assert title in shown
