"""Exact and lossy decoding inside the real vLLM."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from conftest import agreeable, metrics, prompts, tokens  # type: ignore[import-not-found]
from mars_lm.vllm.versions import installed

# This folder's own name would be found as `vllm` where there is none.
if installed() is None:
    pytest.skip("vLLM is not installed: tests/vllm/run.sh makes an environment", allow_module_level=True)

import vllm
from mars_lm.checkpoint import load, save
from mars_lm.decoding import Engine
from mars_lm.settings import DecodingSettings

Start = Callable[..., Any]


def sampling(budget: int = 60, **changes: Any) -> Any:
    values = {"temperature": 0.0, "max_tokens": budget, "ignore_eos": True, **changes}
    return vllm.SamplingParams(**values)


def run(llm: Any, asked: list[Any], params: Any) -> list[list[int]]:
    return tokens(llm.generate(asked, params, use_tqdm=False))


def engines(folder: Path, asked: list[Any], settings: DecodingSettings) -> tuple[list[list[int]], float]:
    """Our own engine's tokens for the same prompts, and its tokens per forward."""
    engine = Engine(load(str(folder), dtype="float32", device="cpu"), max_rows=8)
    numbers = [engine.add(prompt["prompt_token_ids"], settings) for prompt in asked]
    for _ in engine.stream():
        pass
    results = [engine.result(number) for number in numbers]
    return [r.token_ids for r in results], sum(len(r.token_ids) for r in results) / sum(
        r.forwards for r in results
    )


def lossy(folder: Path, asked: list[Any], said: list[list[int]], settings: DecodingSettings) -> float:
    """Check lossy answers of vLLM against our own engine's; its tokens per forward.

    vLLM's prefill gives one token and no masks, so that the first window stands behind that token: our engine
    is asked for what follows it.
    """
    behind = [
        {"prompt_token_ids": [*prompt["prompt_token_ids"], answer[0]]}
        for prompt, answer in zip(asked, said, strict=True)
    ]
    rest = dataclasses.replace(settings, max_new_tokens=settings.max_new_tokens - 1)
    theirs, per_forward = engines(folder, behind, rest)
    assert [answer[1:] for answer in said] == theirs
    return per_forward


class TestExact:
    def test_greedy_tokens_are_plain_vllms_and_drafts_were_accepted(self, plain: Any, mars: Any) -> None:
        asked = prompts(8)
        before = metrics(mars)
        assert run(mars, asked, sampling()) == run(plain, asked, sampling())
        after = metrics(mars)
        assert after["accepted_tokens"] > before["accepted_tokens"]
        assert after["draft_tokens"] - before["draft_tokens"] < 3 * (after["drafts"] - before["drafts"])

    def test_tokens_and_steps_are_those_of_our_own_engine(self, mars: Any, folder: Path) -> None:
        asked = prompts(6, seed=3)
        before = metrics(mars)
        ours = run(mars, asked, sampling())
        after = metrics(mars)
        settings = DecodingSettings(max_new_tokens=60, ignore_eos=True, recovery=False, adaptive=False)
        theirs, per_forward = engines(folder, asked, settings)
        assert ours == theirs
        # vLLM's count leaves out the prefill's step, and the last ones, which have nothing left to guess.
        accepted = after["accepted_tokens"] - before["accepted_tokens"]
        steps = 6 * 60 - accepted
        assert 6 * 60 / steps == pytest.approx(per_forward, rel=0.03)
        assert per_forward > 1.05, "nothing was accepted: the test would prove nothing"

    def test_a_sampled_answer_is_one_that_ar_could_give(self, plain: Any, mars: Any) -> None:
        """Each token is among AR's two best where top_k is 2, whatever was drafted."""
        asked = prompts(3, seed=5)
        params = sampling(30, temperature=1.0, top_k=2, seed=7)
        for prompt, said in zip(asked, run(mars, asked, params), strict=True):
            whole = [*prompt["prompt_token_ids"], *said]
            checked = plain.generate(
                [{"prompt_token_ids": whole}], sampling(1, prompt_logprobs=2), use_tqdm=False
            )
            ranks = [
                entry[token].rank for entry, token in zip(checked[0].prompt_logprobs[12:], said, strict=True)
            ]
            assert max(ranks) <= 2

    def test_sampling_follows_ars_distribution(self, plain: Any, mars: Any) -> None:
        """Second tokens of many draws, the first being drafted against: total variation within its noise."""
        [asked] = prompts(1, seed=6)
        counts = []
        for llm in (plain, mars):
            params = sampling(4, temperature=1.0, top_k=3, n=400)
            [output] = llm.generate([asked], params, use_tqdm=False)
            seen: dict[tuple[int, ...], int] = {}
            for answer in output.outputs:
                key = tuple(answer.token_ids[1:3])
                seen[key] = seen.get(key, 0) + 1
            counts.append(seen)
        keys = counts[0].keys() | counts[1].keys()
        distance = sum(abs(counts[0].get(k, 0) - counts[1].get(k, 0)) for k in keys) / 800
        assert distance < 0.16  # two samples of 400 over nine pairs differ by about 0.05

    def test_penalties_stop_strings_and_logprobs_are_plain_vllms(self, plain: Any, mars: Any) -> None:
        asked = prompts(5, seed=1)
        words = plain.get_tokenizer()
        stop = words.decode(run(plain, asked, sampling(20))[0][10:12])
        wishes = [
            sampling(repetition_penalty=1.3),
            sampling(frequency_penalty=0.5, presence_penalty=0.5),
            sampling(stop=[stop]),
            sampling(logprobs=3),
            sampling(min_tokens=20, ignore_eos=False, bad_words=["the"]),
        ]
        one = plain.generate(asked, wishes, use_tqdm=False)
        two = mars.generate(asked, wishes, use_tqdm=False)
        assert tokens(one) == tokens(two)
        assert [o.outputs[0].text for o in one] == [o.outputs[0].text for o in two]
        for a, b in zip(one[3].outputs[0].logprobs, two[3].outputs[0].logprobs, strict=True):
            assert a.keys() == b.keys()
            for token, entry in a.items():
                assert entry.logprob == pytest.approx(b[token].logprob, abs=1e-4)

    def test_a_grammar_is_kept_and_drafts_go_on_under_it(self, plain: Any, mars: Any) -> None:
        from vllm.sampling_params import StructuredOutputsParams

        asked = prompts(3, seed=2)
        params = sampling(40, structured_outputs=StructuredOutputsParams(regex="(ab|cd|0)*"))
        assert run(mars, asked, params) == run(plain, asked, params)

    def test_several_answers_to_one_prompt(self, mars: Any) -> None:
        [output] = mars.generate(prompts(1), sampling(20, temperature=1.0, n=3, seed=1), use_tqdm=False)
        assert len({tuple(answer.token_ids) for answer in output.outputs}) > 1
        assert all(len(answer.token_ids) == 20 for answer in output.outputs)

    def test_up_to_the_models_length(self, plain: Any, mars: Any) -> None:
        asked = prompts(2, length=230)
        assert run(mars, asked, sampling(1000)) == run(plain, asked, sampling(1000))


LOOSE = {"exact": 0, "tau": 0.02}


class TestLossy:
    def test_tokens_are_our_own_engines(self, mars: Any, folder: Path) -> None:
        asked = prompts(8, seed=4)
        said = run(mars, asked, sampling(extra_args=LOOSE))
        settings = DecodingSettings(exact=False, tau=0.02, max_new_tokens=60, ignore_eos=True)
        assert lossy(folder, asked, said, settings) > 1.1

    @pytest.mark.parametrize(("rule", "tau"), [("margin", 0.01), ("entropy", 5.0)])
    def test_the_other_rules(self, mars: Any, folder: Path, rule: Any, tau: float) -> None:
        asked = prompts(3, seed=8)
        said = run(mars, asked, sampling(extra_args={"exact": 0, "tau": tau, "rule": rule}))
        settings = DecodingSettings(exact=False, tau=tau, rule=rule, max_new_tokens=60, ignore_eos=True)
        assert lossy(folder, asked, said, settings) > 1

    def test_every_request_has_its_own_settings_in_one_batch(self, mars: Any, folder: Path) -> None:
        """Lossy at two thresholds, a smaller B, exact, and plain AR beside each other."""
        named: list[dict[str, Any]] = [
            {"exact": False, "tau": 0.02},
            {"exact": False, "tau": 0.3},
            {"exact": False, "tau": 0.02, "block_size": 2},
            {"exact": True},
            {"tau": 1.0},
        ]
        asked = prompts(1, seed=9) * len(named)
        said = run(mars, asked, [sampling(extra_args=wish) for wish in named])
        for wish, answer in zip(named, said, strict=True):
            settings = DecodingSettings(**{"max_new_tokens": 60, "ignore_eos": True, "tau": 0.0, **wish})
            if settings.exact or settings.one_token:
                assert [answer] == engines(folder, asked[:1], settings)[0]
            else:
                lossy(folder, asked[:1], [answer], settings)
        assert said[0] != said[4]
        assert said[3] == said[4]

    def test_logprobs_of_tokens_from_masks_and_from_ar(self, mars: Any) -> None:
        asked = prompts(2, seed=4)
        outputs = mars.generate(asked, sampling(extra_args=LOOSE, logprobs=2), use_tqdm=False)
        assert tokens(outputs) == run(mars, asked, sampling(extra_args=LOOSE))
        for output in outputs:
            answer = output.outputs[0]
            for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
                assert entry[token].rank == 1
                assert -20 < entry[token].logprob < 0

    def test_a_penalty_makes_it_exact(self, plain: Any, mars: Any) -> None:
        asked = prompts(2, seed=4)
        params = sampling(repetition_penalty=1.2)
        loose = sampling(repetition_penalty=1.2, extra_args=LOOSE)
        assert run(mars, asked, loose) == run(plain, asked, params)

    def test_sampled(self, mars: Any) -> None:
        params = sampling(30, temperature=0.8, top_k=5, seed=3, extra_args=LOOSE)
        said = run(mars, prompts(2), params)
        assert all(len(answer) == 30 for answer in said)
        assert said == run(mars, prompts(2), params)


class TestMemory:
    """What vLLM does with its cache must not change a token."""

    @pytest.mark.parametrize("extra", [None, LOOSE], ids=["exact", "lossy"])
    def test_preemption_prefix_caching_and_chunked_prefill(self, start: Start, mars: Any, extra: Any) -> None:
        asked = prompts(8, length=40, seed=11)
        asked += [{"prompt_token_ids": [*asked[0]["prompt_token_ids"][:36], 50, 51]}]  # shares a prefix
        params = sampling(100, extra_args=extra)
        alone = [run(mars, [prompt], params)[0] for prompt in asked]
        small = start(
            {"adaptive": False},
            block_size=32,
            num_gpu_blocks_override=24,  # eight answers of 140 tokens need 40
            enable_prefix_caching=True,
            max_num_batched_tokens=48,
        )
        said = run(small, asked, params)
        counted = {m.name: m.value for m in small.get_metrics() if hasattr(m, "value")}
        preempted = counted["vllm:num_preemptions"]
        assert preempted > 0
        # A lossy text depends on where its windows begin, and one begins anew where a request is resumed.
        changed = sum(a != b for a, b in zip(said, alone, strict=True))
        assert changed <= (0 if extra is None else preempted)
        assert all(len(answer) == 100 for answer in said)
        assert run(small, asked[:2], params) == alone[:2]  # now from cached prefixes
        without = start({"adaptive": False}, enable_prefix_caching=False)
        assert run(without, asked, params) == alone


class TestLifecycle:
    def test_cancelled_requests_leave_the_others_alone(self, mars: Any) -> None:
        asked = prompts(3, seed=12)
        whole = run(mars, asked, sampling())
        engine = mars.llm_engine
        names = [engine.add_request(f"request-{i}", prompt, sampling()) for i, prompt in enumerate(asked)]
        finished = {}
        for step in range(200):
            if step == 5:
                engine.abort_request([names[1]], internal=True)
            for output in engine.step():
                if output.finished and output.outputs[0].finish_reason != "abort":
                    finished[output.request_id] = list(output.outputs[0].token_ids)
            if not engine.has_unfinished_requests():
                break
        assert sorted(finished.values()) == sorted([whole[0], whole[2]])
        scheduler = engine.engine_core.engine_core.scheduler
        assert not scheduler._drafted
        assert not scheduler._groups

    def test_the_knobs_file_turns_requests_that_run(self, start: Start, tmp_path: Path, folder: Path) -> None:
        file = tmp_path / "knob.json"
        llm = start({"adaptive": False, "exact": True, "knob_file": str(file)})
        asked = prompts(2, seed=4)
        exact, _ = engines(folder, asked, DecodingSettings(max_new_tokens=60, ignore_eos=True))
        assert run(llm, asked, sampling()) == exact
        file.write_text(json.dumps({"exact": False, "tau": 0.02}))
        settings = DecodingSettings(exact=False, tau=0.02, max_new_tokens=60, ignore_eos=True)
        llm.llm_engine.engine_core.engine_core.scheduler._defaults._next_look = 0
        lossy(folder, asked, run(llm, asked, sampling()), settings)
        file.write_text("no JSON")  # is told in the log, and changes nothing
        llm.llm_engine.engine_core.engine_core.scheduler._defaults._next_look = 0
        lossy(folder, asked, run(llm, asked, sampling()), settings)

    def test_an_adaptive_width_changes_no_token(self, start: Start, plain: Any) -> None:
        asked = prompts(8, seed=13)
        assert run(start({}), asked, sampling(100)) == run(plain, asked, sampling(100))

    def test_guesses_below_tau_were_masks_for_nothing(self, start: Start) -> None:
        llm = start({"exact": True, "tau": 1 - 1e-9, "adaptive": False})
        run(llm, prompts(2, seed=5), sampling(60))
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        assert scheduler._widths._worth[True][0] < 0.3  # it began at 0.8
        assert not scheduler._offered

    def test_an_ordinary_model_runs_as_in_plain_vllm(self, start: Start, plain: Any, tmp_path: Path) -> None:
        made = agreeable()
        made.model.config.mars = None
        save(made.model, made.tokenizer, tmp_path / "ordinary")
        with mock.patch("mars_lm.vllm.scheduler.logger.warning") as warning:
            llm = start({}, model=tmp_path / "ordinary")
        assert "has no MARS settings" in warning.call_args.args[0]
        assert run(llm, prompts(2), sampling()) == run(plain, prompts(2), sampling())
