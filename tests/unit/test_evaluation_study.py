"""The study: its sums, its jobs, and what its tables say about the paper's claims."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

from mars_lm import checkpoint as checkpoints
from mars_lm.evaluation.arithmetic import make_model, make_tokenizer, problem, problems, write_rows

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import study as studies
import study_report


def test_every_line_of_a_solution_goes_on_from_the_one_above() -> None:
    draw = random.Random(0)
    for _ in range(300):
        question, solution = problem(draw)
        total, rest = re.match(r"(\d+)(.*)", question).groups()
        lines = solution.split("\n")
        assert 3 <= len(lines) <= 5
        for line in lines:
            step, result = line.split("=")
            number = re.match(r"[+-]\d", rest)[0]
            assert step == total + number
            assert eval(step) == int(result)  # digits, + and - alone
            assert 0 <= int(result) <= 20
            total, rest = result, rest[2:]
        assert not rest
        assert eval(question) == int(total)


def test_no_sum_is_trained_on_and_asked(tmp_path: Path) -> None:
    write_rows(tmp_path, train=200, test=50)
    test = [json.loads(line) for line in (tmp_path / "arithmetic" / "test.jsonl").open()]
    train = [json.loads(line)["messages"] for line in (tmp_path / "arithmetic" / "train.jsonl").open()]
    asked = {row["question"] for row in test}
    trained = {turns[0]["content"] for turns in train}
    assert (len(asked), len(trained)) == (50, 200)
    assert not asked & trained
    assert all(eval(row["question"]) == int(row["answer"]) for row in test)
    assert [q for q, _ in itertools.islice(problems(0), 3)] == [row["question"] for row in test[:3]]


def test_the_tokenizer_has_a_token_a_character_and_a_mask(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, hidden=32, layers=1, seed=0)
    checkpoints.save(model, tokenizer, tmp_path)
    loaded = checkpoints.load(tmp_path, dtype="float32")
    assert loaded.mars is None
    turns = [{"role": "user", "content": "12+3"}, {"role": "assistant", "content": "12+3=15\n15"}]
    prompt = checkpoints.encode_chat(loaded, turns[:1])
    whole = checkpoints.encode_chat(loaded, turns, add_generation_prompt=False)
    assert whole[: len(prompt)] == prompt
    assert loaded.tokenizer.decode(whole[len(prompt) :], skip_special_tokens=True) == "12+3=15\n15"
    assert checkpoints.end_token_ids(loaded) == {whole[-1]}
    mars = checkpoints.make_mars_ready(loaded.model, loaded.tokenizer, block_size=4, base_model=None)
    assert mars.mask_token_id == tokenizer.mask_token_id
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer)  # no row was added


def test_the_study_has_every_row_of_the_papers_tables() -> None:
    size = studies.SIZES["scratch"]
    assert len(size.seeds) == 3
    assert size.block_sizes == (4, 8, 16)
    names = [row.name for row in studies.rows_of(size)]
    for wanted in ("ar", "ar-twice", "block-diffusion-4", *(f"mars-{b}" for b in (4, 8, 16))):
        assert wanted in names
    assert {f"mars-no-sft-{b}" for b in (4, 8, 16)} <= set(names)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, hidden=size.hidden, layers=size.layers, seed=0)
    assert 5e6 <= sum(p.numel() for p in model.parameters()) <= 20e6
    for part in studies.SIZES:
        for row in studies.rows_of(studies.SIZES[part]):
            assert (studies.RECIPES / f"{part}-{row.recipe}.yaml").is_file()


def test_every_job_stands_behind_what_it_needs(tmp_path: Path) -> None:
    for part, size in studies.SIZES.items():
        known: set[str] = set()
        for job in studies.Study(part, size, tmp_path, tmp_path).jobs():
            assert set(job.needs) <= known, job.name
            known.add(job.name)


def test_finished_jobs_are_not_run_again(tmp_path: Path, monkeypatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(studies.Study, "train_base", lambda self, seed: ran.append("base") or {})
    monkeypatch.setattr(studies.Study, "train", lambda self, seed, row: ran.append(row.name) or {})
    monkeypatch.setattr(studies.Study, "train_heads", lambda self, seed: ran.append("heads") or {})
    monkeypatch.setattr(studies.Study, "score", lambda self, seed, row: ran.append(f"{row.name}/s") or {})
    size = studies.dataclasses.replace(studies.SIZES["scratch"], **studies.SMOKE)
    study = studies.Study("scratch", size, tmp_path, None)
    studies.run_all(study, [], 1, 1, in_process=True)
    assert ran.count("base") == 1
    assert set(ran) >= {"ar", "ar/s", "mars-4", "mars-4/s", "heads"}
    study.mark("0/mars-4").unlink()
    ran.clear()
    studies.run_all(study, [], 1, 1, in_process=True)
    assert ran == ["mars-4"]


def test_the_real_part_keeps_every_row_whole(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1\u20282\u0085", "response": str(i)} for i in range(5)
    ]  # JSON may hold line separators
    source = tmp_path / "rows" / "sft" / "math.jsonl"
    source.parent.mkdir(parents=True)
    source.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    study = studies.Study("real", studies.SIZES["real"], tmp_path / "out", tmp_path / "rows")
    assert study.make_data() == {"rows": 5, "few": 5}
    written = (tmp_path / "out" / "data" / "few.jsonl").read_bytes().splitlines()
    assert sorted(map(json.loads, written), key=lambda row: row["response"]) == rows


def test_a_folder_holds_one_study(tmp_path: Path) -> None:
    size = studies.SIZES["scratch"]
    studies.check_settings(studies.Study("scratch", size, tmp_path, None))
    studies.check_settings(studies.Study("scratch", size, tmp_path, None))
    other = studies.dataclasses.replace(size, steps=7)
    with pytest.raises(SystemExit, match="other steps"):
        studies.check_settings(studies.Study("scratch", other, tmp_path, None))


def kept(value: float, rate: float = 1.0) -> dict:
    return {"score": {"value": value}, "speed": {"tokens": 1000 * rate, "forwards": 1000}}


def test_what_the_tables_say_about_the_claims() -> None:
    study = studies.Study("scratch", studies.SIZES["scratch"], Path(), None)
    assert {v["verdict"] for v in study_report.claims(study, {}, 0.95, {})} == {"not run"}
    assert "not run" in study_report.tables(study, {}, 0.95, {})

    def seeds(*values: float, rate: float = 1.0) -> dict:
        return {seed: kept(value, rate) for seed, value in enumerate(values)}

    found = {
        "ar": {"one-token": seeds(0.96, 0.97, 0.965)},
        "ar-twice": {"one-token": seeds(0.80, 0.81, 0.805)},
        "block-diffusion-4": {"block-diffusion-1": seeds(0.5, 0.55, 0.6)},
        "mars-4": {
            "one-token": seeds(0.965, 0.97, 0.96),
            "lossy": seeds(0.95, 0.955, 0.96, rate=1.8),
            "exact": seeds(0.965, 0.97, 0.96, rate=2.4),
        },
        "mars-16": {
            "one-token": seeds(0.96, 0.96, 0.96),
            "lossy": seeds(0.7, 0.7, 0.7, rate=3.0),
            "exact": seeds(0.96, 0.96, 0.95, rate=2.4),
        },
        "mars-no-sft-4": {"one-token": seeds(0.95, 0.95, 0.95)},
        "mars-no-sft-16": {"one-token": seeds(0.6, 0.7, 0.65)},
    }
    verdicts = {v["claim"]: v["verdict"] for v in study_report.claims(study, found, 0.95, {})}
    assert verdicts["MARS at tau 1 is at least as good as AR SFT (B=4)"] == "supported (within the spread)"
    assert verdicts["MARS beats AR SFT trained twice as long"] == "supported"
    assert verdicts["MARS beats AR SFT with the same compute"] == "not run"
    assert verdicts["Block diffusion costs accuracy"] == "supported"
    assert verdicts["Without the SFT loss accuracy falls from B=4 to B=16"] == "supported"
    assert verdicts["With the SFT loss it does not (B=16 with against without)"] == "supported"
    lossy = [v for claim, v in verdicts.items() if claim.startswith("tau 0.95")]
    assert lossy == ["supported", "contradicted"]
    exact = {claim: v for claim, v in verdicts.items() if claim.startswith("Exact mode")}
    assert exact["Exact mode: AR's accuracy, digit for digit, at more than 2 (MARS, B=4)"] == "supported"
    assert exact["Exact mode: AR's accuracy, digit for digit, at more than 2 (MARS, B=16)"] == "contradicted"
    table = study_report.tables(study, found, 0.95, {})
    assert "96.5 ± 0.5" in table
    assert "1.80" in table


def test_rows_that_solve_nothing_are_told_apart_by_their_losses() -> None:
    study = studies.Study("real", studies.SIZES["real"], Path(), None)
    draw = random.Random(0)
    base = [[draw.uniform(80, 120), 100] for _ in range(64)]

    def loss(shift: float, agreement: float | None = None) -> dict:
        rows = [[row[0] + 100 * shift + draw.uniform(-1, 1), row[1]] for row in base]
        interval = None
        if agreement is not None:
            interval = {"value": agreement, "low": agreement - 0.01, "high": agreement + 0.01}
        return {"rows": rows, "agreement": interval}

    one = {0: kept(0.0)}
    found = {name: {"one-token": one} for name in ("ar", "ar-twice", "ar-matched", "mars-no-sft-8")}
    found["mars-4"] = {"one-token": one, "lossy": {0: kept(0.0, 1.5)}, "exact": {0: kept(0.0, 1.4)}}
    found["mars-8"] = {"one-token": one}
    found["block-diffusion-4"] = {"block-diffusion-1": one}
    losses = {
        "ar": loss(0.0),
        "ar-twice": loss(0.03),
        "ar-matched": loss(-0.03),
        "mars-4": loss(0.0, 0.97),
        "mars-8": loss(0.0, 0.9),
        "mars-no-sft-8": loss(1.0, 0.5),
    }
    verdicts = {v["claim"]: v for v in study_report.claims(study, found, 0.95, losses)}
    assert verdicts["MARS beats AR SFT trained twice as long"]["verdict"] == "supported, by the loss"
    assert verdicts["MARS beats AR SFT with the same compute"]["verdict"] == "contradicted, by the loss"
    keeps = verdicts["MARS at tau 1 is at least as good as AR SFT (B=4)"]["verdict"]
    assert keeps == "supported (within the spread)"
    with_loss = verdicts["With the SFT loss it does not (B=8 with against without)"]
    assert with_loss["verdict"] == "supported, by the loss"
    assert verdicts["Block diffusion costs accuracy"]["verdict"] == "can't tell"
    lossy = verdicts["tau 0.95 gives more tokens per forward for one or two points (MARS, B=4)"]
    assert lossy["verdict"] == "can't tell"
    assert "97.0 [96.0, 98.0]% of its tokens" in lossy["figures"]
    exact = verdicts[
        "Exact mode: AR's accuracy, digit for digit (MARS, B=4)"
    ]  # of so little training, no rate
    assert (exact["verdict"], exact["figures"]) == ("supported", "accuracy equal, 1.40 a forward")
    table = study_report.tables(study, found, 0.95, losses)
    assert "| MARS without SFT loss, B=8" in table.split("held-out answers")[1]


def test_held_out_answers_are_written_as_the_training_rows_are(tmp_path: Path) -> None:
    rows = [
        {"question": f"q{i}", "answer": f"2*{i} = <<2*{i}={2 * i}>>{2 * i}\n#### {2 * i}"} for i in range(70)
    ]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    studies.write_held_out(tmp_path / "test.jsonl", tmp_path / "out.jsonl")
    written = [json.loads(line)["messages"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(written) == studies.HELD_OUT == 64
    assert written[0][0] == {"role": "user", "content": "q6"}
    assert written[-1][1] == {"role": "assistant", "content": "2*69 = 138\n#### 138"}


def test_texts_of_exact_and_one_token_mode_are_compared(tmp_path: Path) -> None:
    study = studies.Study("real", studies.SIZES["real"], tmp_path, None)
    assert study_report.same_texts(study, "mars-4") is None
    for mode, texts in (("one-token", ["a", "b", "c"]), ("exact", ["a", "x", "c"])):
        file = study.folder(0, "mars-4") / "scores" / mode / "samples" / "gsm8k.jsonl"
        file.parent.mkdir(parents=True)
        rows = [{"task": "gsm8k", "doc_id": i, "resps": [[text]]} for i, text in enumerate(texts)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows for _ in ("strict", "flexible")))
    assert study_report.same_texts(study, "mars-4") == (2, 3)
