"""Tasks by name, rows from a folder, and what each benchmark takes for an answer, on cases made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from tiny import tiny_checkpoint

pytest.importorskip("lm_eval")

from mars_lm.decoding import GenerationResult
from mars_lm.errors import MarsError
from mars_lm.evaluation import tasks
from mars_lm.evaluation.decoders import settings_for
from mars_lm.evaluation.local_rows import rows_from
from mars_lm.evaluation.run import EvaluationOptions, evaluate
from mars_lm.settings import DecodingSettings

SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(scope="module")
def checkpoint():
    return tiny_checkpoint(max_position_embeddings=8192)


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Canned:
    """Answers each prompt with the text whose key stands in it."""

    def __init__(self, checkpoint, answers: dict[str, str]) -> None:
        self.tokenizer, self.answers = checkpoint.tokenizer, answers

    def __call__(self, prompts, settings, on_result=None):
        results = []
        for number, prompt in enumerate(prompts):
            text = self.tokenizer.decode(prompt)
            [answer] = [answer for key, answer in self.answers.items() if key in text]
            ids = self.tokenizer(answer, add_special_tokens=False).input_ids
            results.append(GenerationResult(token_ids=ids, forwards=1, finish_reason="stop"))
            on_result(number, results[-1])
        return results


def scored(checkpoint, tmp_path: Path, task: str, answers: dict[str, str], **options) -> list[float]:
    """The benchmark's score of each answer, in the rows' order."""
    output = tmp_path / "out"
    [part] = evaluate(
        checkpoint,
        [task],
        DecodingSettings(tau=1.0),
        EvaluationOptions(data=tmp_path, **options),
        model="tiny",
        output=output,
        decode=Canned(checkpoint, answers),
    ).values()
    metric, kind = part["score"]["metric"].split(",")
    samples = [json.loads(line) for line in (output / "samples" / f"{task}.jsonl").open()]
    values = [float(row[metric]) for row in samples if row["filter"] == kind]
    assert part["score"]["value"] == pytest.approx(sum(values) / len(values))
    return values


def test_gsm8k_takes_the_last_number(checkpoint, tmp_path: Path) -> None:
    cases = [
        ("Case-a", "She sells 16 - 3 - 4 = 9 eggs, and makes 9 * 2 = $18.", 1),
        ("Case-b", "The answer is 18.", 1),
        ("Case-c", "#### 18", 1),
        ("Case-d", "It is 18, not 20", 0),
        ("Case-e", "I do not know.", 0),
        ("Case-f", "It is $1,8", 1),  # a comma between digits counts for nothing
        ("Case-g", "It is 18\nQ: And 30?", 1),  # cut where the task says
    ]
    write_rows(
        tmp_path / "gsm8k" / "test.jsonl",
        [{"question": f"{key} how much?", "answer": "16-3-4=9, 9*2=18\n#### 18"} for key, _, _ in cases],
    )
    answers = {key: text for key, text, _ in cases}
    assert scored(checkpoint, tmp_path, "gsm8k_cot_zeroshot", answers) == [right for *_, right in cases]


def test_bbh_takes_what_follows_the_answer_is(checkpoint, tmp_path: Path) -> None:
    cases = [
        ("Case-a", "We simplify. So the answer is True.", 1),
        ("Case-b", "So the answer is False.", 0),
        ("Case-c", "True", 0),
        ("Case-d", "the answer is True.\n\nthe answer is False.", 1),
    ]
    write_rows(
        tmp_path / "bbh" / "boolean_expressions.jsonl",
        [{"input": f"{key} not False is", "target": "True"} for key, _, _ in cases],
    )
    answers = {key: text for key, text, _ in cases}
    # One of the 27 by its own name: the harness's definition, its three worked examples, our row.
    assert scored(checkpoint, tmp_path, "bbh_cot_fewshot_boolean_expressions", answers) == [
        right for *_, right in cases
    ]


def test_mmlu_pro_takes_the_letter_after_answer_is(checkpoint, tmp_path: Path) -> None:
    cases = [
        ("Case-a", "Let us see. The answer is (B).", 1),
        ("Case-b", "so the answer is B", 1),
        ("Case-c", "B", 0),
        ("Case-d", "The answer is (C).", 0),
    ]
    categories = [
        "biology", "business", "chemistry", "computer science", "economics", "engineering", "health",
        "history", "law", "math", "other", "philosophy", "physics", "psychology",
    ]  # fmt: skip
    rows = [
        {
            "question": f"{key} {category}?",
            "options": ["one", "two", "three"],
            "answer": "B",
            "category": category,
        }
        for category in categories
        for key, _, _ in (cases if category == "biology" else [("Case-c", "B", 0)])
    ]
    write_rows(tmp_path / "mmlu_pro" / "test.jsonl", rows)
    answers = {key: text for key, text, _ in cases}
    values = scored(checkpoint, tmp_path, "mmlu_pro", answers)
    assert values == [right for *_, right in cases] + [0] * 13


def test_gpqa_takes_the_last_letter_in_brackets(checkpoint, tmp_path: Path) -> None:
    rows = [
        {
            "Question": f"Case-{i} what?",
            "Correct Answer": "right",
            **{f"Incorrect Answer {n}": f"wrong {n}" for n in (1, 2, 3)},
        }
        for i in range(4)
    ]
    write_rows(tmp_path / "gpqa" / "gpqa_main.jsonl", rows)
    [loaded] = [tasks.load(b, data=tmp_path) for b in tasks.PAPER if b.title == "GPQA"]
    letters = [doc["answer"] for doc in loaded.tasks["gpqa_main_cot_zeroshot"].eval_docs]
    others = ["(A)" if letter != "(A)" else "(B)" for letter in letters]
    answers = {
        "Case-0": f"First {others[0]}, no: the answer is {letters[0]}.",
        "Case-1": f"The answer is {letters[1]}",
        "Case-2": f"It may be {letters[2]}, but it is {others[2]}.",
        "Case-3": "Nobody knows.",
    }
    assert scored(checkpoint, tmp_path, "gpqa_main_cot_zeroshot", answers) == [1, 1, 0, 0]


def test_ifeval_follows_instructions_strictly(checkpoint, tmp_path: Path) -> None:
    comma = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    sentences = {
        "instruction_id_list": ["length_constraints:number_sentences"],
        "kwargs": [{"relation": "at least", "num_sentences": 3}],
    }
    cases = [
        ("Case-a", comma, "No comma here.", 1),
        ("Case-b", comma, "A comma, there.", 0),
        ("Case-c", sentences, "Mr. Fox jumps. The dog sleeps. Why not?", 1),
        ("Case-d", sentences, "Mr. Fox jumps. The dog sleeps.", 0),
        ("Case-e", comma, "", 0),
    ]
    write_rows(
        tmp_path / "ifeval" / "test.jsonl",
        [{"key": i, "prompt": f"{key} write.", **rule} for i, (key, rule, _, _) in enumerate(cases)],
    )
    answers = {key: text for key, _, text, _ in cases}
    assert scored(checkpoint, tmp_path, "ifeval", answers) == [right for *_, right in cases]


def test_humaneval_runs_what_stands_before_the_fence(checkpoint, tmp_path: Path) -> None:
    cases = [
        ("case_a", "    return a + b\n```\nDone.", 1),
        ("case_b", "    return a - b\n```", 0),
        ("case_c", "    return a +", 0),
        ("case_d", "    import socket\n    socket.socket()\n    return a + b", 0),
        ("case_e", "    raise SystemExit(0)", 0),
    ]
    write_rows(
        tmp_path / "humaneval" / "test.jsonl",
        [
            {
                "task_id": f"HumanEval/{i}",
                "prompt": f"def {key}(a, b):\n",
                "entry_point": key,
                "canonical_solution": "    return a + b\n",
                "test": "def check(f):\n    assert f(2, 3) == 5\n",
            }
            for i, (key, _, _) in enumerate(cases)
        ],
    )
    answers = {key: text for key, text, _ in cases}
    values = scored(checkpoint, tmp_path, "humaneval_instruct", answers, run_code=True)
    assert values == [right for *_, right in cases]
    with pytest.raises(MarsError, match="--run-generated-code"):
        scored(checkpoint, tmp_path, "humaneval_instruct", answers)


def test_arithmetic_takes_the_number_at_the_end(checkpoint, tmp_path: Path) -> None:
    right, wrong = "12+3=15\n15-4=11", "12+3=15\n15-5=11"
    cases = [("12+3-4", right, 1), ("12+3-5", wrong, 0), ("12+3-6", "-9", 0), ("12-30", "-18 ", 1)]
    target = {"12+3-4": "11", "12+3-5": "10", "12+3-6": "9", "12-30": "-18"}
    write_rows(
        tmp_path / "arithmetic" / "test.jsonl",
        [{"question": question, "answer": target[question]} for question, _, _ in cases],
    )
    answers = {question: text for question, text, _ in cases}
    assert scored(checkpoint, tmp_path, "mars_arithmetic", answers) == [right for *_, right in cases]


def test_the_papers_settings() -> None:
    chosen, remarks = tasks.choose(["paper"], run_code=True)
    assert [benchmark.title for benchmark in chosen] == [
        "IFEval", "BBH", "MMLU-Pro", "GPQA", "GSM8K", "HumanEval",
    ]  # fmt: skip
    assert remarks == []
    assert {benchmark.max_new_tokens for benchmark in chosen} == {256}
    assert [benchmark.fewshot for benchmark in chosen] == [0, 3, 0, 0, 0, 0]


def test_what_the_group_leaves_out_is_said(tmp_path: Path) -> None:
    write_rows(tmp_path / "gsm8k" / "test.jsonl", [{"question": "1?", "answer": "#### 1"}])
    chosen, remarks = tasks.choose(["paper"], data=tmp_path)
    assert [benchmark.title for benchmark in chosen] == ["GSM8K"]
    assert any("HumanEval" in remark and "--run-generated-code" in remark for remark in remarks)
    assert any("GPQA" in remark and str(tmp_path) in remark for remark in remarks)


def test_the_shared_rows_have_all_but_gpqa() -> None:
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is not here")
    chosen, remarks = tasks.choose(["paper"], data=SHARED, run_code=True)
    assert [benchmark.title for benchmark in chosen] == ["IFEval", "BBH", "MMLU-Pro", "GSM8K", "HumanEval"]
    assert len(remarks) == 1
    sizes = {}
    for benchmark in chosen:
        loaded = tasks.load(benchmark, data=SHARED, run_code=True)
        sizes[benchmark.title] = sum(len(task.eval_docs) for task in loaded.tasks.values())
    assert sizes == {"IFEval": 400, "BBH": 1080, "MMLU-Pro": 560, "GSM8K": 660, "HumanEval": 100}


def test_an_unknown_task_is_told_with_the_nearest_names(monkeypatch) -> None:
    monkeypatch.setattr(tasks, "_everything", tasks._familiar)  # all 14,000 take several seconds to list
    with pytest.raises(
        MarsError, match=r"no task 'gsm8k_cot_zeroshoot': the nearest names are gsm8k_cot_zeros"
    ):
        tasks.choose(["gsm8k_cot_zeroshoot"])


def test_rows_that_are_nowhere_are_told_by_name(tmp_path: Path) -> None:
    [gsm8k] = [benchmark for benchmark in tasks.PAPER if benchmark.title == "GSM8K"]
    # The tests are offline (conftest.py): the sentence names the dataset and the file that would do.
    with pytest.raises(MarsError, match=r"openai/gsm8k.*--data FOLDER with gsm8k/test\.jsonl"):
        tasks.load(gsm8k)
    with pytest.raises(MarsError, match=r"openai/gsm8k.*gsm8k/test\.jsonl"):
        tasks.load(gsm8k, data=tmp_path)
    with pytest.raises(MarsError, match="no folder"):
        tasks.load(gsm8k, data=tmp_path / "nothing")


def test_worked_examples_that_are_not_there_are_told(tmp_path: Path) -> None:
    write_rows(tmp_path / "gsm8k" / "test.jsonl", [{"question": "1?", "answer": "#### 1"}])
    [gsm8k], _ = tasks.choose(["gsm8k_cot_zeroshot"], data=tmp_path, fewshot=2)
    with pytest.raises(MarsError, match="2 worked examples"):
        tasks.load(gsm8k, data=tmp_path)


def test_any_other_dataset_is_read_by_its_name(tmp_path: Path) -> None:
    write_rows(tmp_path / "toy" / "one" / "test.jsonl", [{"q": 1}])
    write_rows(tmp_path / "toy" / "one" / "train.jsonl", [{"q": 2}, {"q": 3}])
    with rows_from(tmp_path):
        rows = datasets.load_dataset("owner/Toy", "one")
        assert rows["test"]["q"][0] == 1
        assert len(rows["train"]) == 2
        with pytest.raises(MarsError, match="validation rows of owner/Toy"):
            rows["validation"]


def test_settings_over_the_checkpoints_over_the_librarys() -> None:
    calibrated = tiny_checkpoint()
    object.__setattr__(calibrated.mars, "decoding", {"exact": True, "tau": 0.3})
    assert settings_for(calibrated, {}).tau == 0.3
    assert settings_for(calibrated, {"tau": 0.5}).tau == 0.5
    # A tau for exact mode says nothing about lossy mode.
    lossy = settings_for(calibrated, {"exact": False})
    assert (lossy.exact, lossy.tau) == (False, 0.95)
    assert settings_for(tiny_checkpoint(mars=False), {"tau": 0.5, "exact": False}).one_token
    with pytest.raises(MarsError, match="no decoding setting 'tua'"):
        settings_for(calibrated, {"tua": 0.5})
