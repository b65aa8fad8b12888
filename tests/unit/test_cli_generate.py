"""`mars generate`: text to a terminal, text to a pipe, files of prompts, and Ctrl-C."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import time

import pytest

from decoding_reference import FixedCost
from mars_lm import checkpoint as checkpoints
from mars_lm.decoding import Engine, generate
from mars_lm.detokenizer import decode
from mars_lm.settings import DecodingSettings
from run_mars import mars_command, mars_environment, run_mars, run_on_pty
from tiny import tiny_checkpoint

CLOSING = re.compile(
    r"^(\d+) tokens? · (\d+) forwards? · (\d+\.\d\d) tokens per forward · \d+\.\d tokens per second",
    re.MULTILINE,
)
ANSI = re.compile(r"\x1b\[([0-9;]*)m")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny MARS checkpoint on disk, with a context long enough to press Ctrl-C in."""
    made = tiny_checkpoint(max_position_embeddings=40_000)
    path = tmp_path_factory.mktemp("checkpoint")
    checkpoints.save(made.model, made.tokenizer, path)
    return path


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory):
    """The same model without MARS settings."""
    made = tiny_checkpoint(mars=False)
    path = tmp_path_factory.mktemp("plain")
    checkpoints.save(made.model, made.tokenizer, path)
    return path


@pytest.fixture(scope="module")
def expected(folder):
    """What the library answers: (messages or raw text, settings) -> text and result."""
    loaded = checkpoints.load(folder, dtype="float32")

    def answer(messages, raw=False, **settings):
        encode = checkpoints.encode_prompt if raw else checkpoints.encode_chat
        [result] = generate(loaded, [encode(loaded, messages)], DecodingSettings(**settings))
        return decode(loaded.tokenizer, result.token_ids), result

    return answer


def user(text):
    return [{"role": "user", "content": text}]


def arguments(folder, *more):
    return ["generate", "--model", folder, "--dtype", "float32", "--max-new-tokens", 24, *more]


def test_a_pipe_gets_the_text_alone_and_stderr_the_closing_line(folder, expected):
    text, result = expected(user("hello"), max_new_tokens=24)
    done = run_mars(*arguments(folder, "hello"))
    assert done.code == 0
    assert done.out == text.removesuffix("\n") + "\n"
    tokens, forwards, per_forward = CLOSING.match(done.err).groups()
    assert (int(tokens), int(forwards)) == (len(result.token_ids), result.forwards)
    assert per_forward == f"{len(result.token_ids) / result.forwards:.2f}"


@pytest.mark.parametrize(
    "more", [["--tau", "1"], ["--rule", "margin"], ["--rule", "entropy"], ["--block-size", "2"]]
)
def test_exact_mode_gives_the_text_of_one_token_mode(folder, expected, more):
    text, _ = expected(user("hello"), tau=1.0, max_new_tokens=24)
    assert run_mars(*arguments(folder, "hello", *more)).out.rstrip("\n") == text.rstrip("\n")


def test_tau_1_is_one_token_mode(folder):
    tokens, forwards, _ = CLOSING.match(run_mars(*arguments(folder, "hello", "--tau", 1)).err).groups()
    assert tokens == forwards


def test_lossy_mode_takes_what_it_drafts(folder, expected):
    text, result = expected(user("hello"), exact=False, tau=0.0, max_new_tokens=24)
    done = run_mars(*arguments(folder, "hello", "--lossy", "--tau", 0))
    assert done.out.rstrip("\n") == text.rstrip("\n")
    assert CLOSING.match(done.err).group(2) == str(result.forwards)


def test_sampling_draws_by_its_seed_and_stays_within_its_filters(folder, expected):
    def drawn(*more):
        return run_mars(*arguments(folder, "hello", *more)).out.rstrip("\n")

    text, _ = expected(user("hello"), temperature=0.9, top_p=0.95, seed=5, max_new_tokens=24)
    greedy, _ = expected(user("hello"), max_new_tokens=24)
    assert text != greedy
    assert drawn("--temperature", 0.9, "--top-p", 0.95, "--seed", 5) == text.rstrip("\n")
    assert drawn("--temperature", 0.9, "--top-p", 0.95, "--seed", 6) != text.rstrip("\n")
    assert drawn("--temperature", 3, "--top-k", 1, "--seed", 5) == greedy.rstrip("\n")
    assert drawn("--temperature", 3, "--min-p", 1, "--seed", 5) == greedy.rstrip("\n")


def test_all_masks_or_those_that_pay(folder, monkeypatch):
    from mars_lm.decoding import engine

    steep = {1: 1.0, 8: 80.0, 32: 999.0}  # a mask costs more than a token of its own, and never pays
    monkeypatch.setattr(engine, "forward_cost", lambda *_: FixedCost(steep))
    narrow, wide = (
        CLOSING.match(run_mars(*arguments(folder, "hello", flag)).err).groups()
        for flag in ("--adaptive", "--all-masks")
    )
    assert narrow[0] == wide[0]
    assert int(narrow[1]) > int(wide[1])


@pytest.mark.parametrize("piped", ["hello", "hello\n", "hello\r\n"])
def test_the_prompt_from_stdin(folder, piped):
    assert run_mars(*arguments(folder), stdin=piped).out == run_mars(*arguments(folder, "hello")).out
    assert run_mars(*arguments(folder, "-"), stdin=piped).out == run_mars(*arguments(folder, "hello")).out


def test_system_and_raw(folder, expected):
    with_system, _ = expected([{"role": "system", "content": "be brief"}, *user("hello")], max_new_tokens=24)
    assert run_mars(*arguments(folder, "hello", "--system", "be brief")).out.rstrip(
        "\n"
    ) == with_system.rstrip("\n")
    raw, _ = expected("hello", raw=True, max_new_tokens=24)
    assert run_mars(*arguments(folder, "hello", "--raw")).out.rstrip("\n") == raw.rstrip("\n")


def test_a_prompt_with_the_mask_tokens_name_is_text(folder):
    done = run_mars(*arguments(folder, "what does <|mask|> do?"))
    assert done.code == 0
    assert CLOSING.match(done.err)


def test_no_prompt_at_a_terminal(folder):
    done = run_mars(*arguments(folder), stdin_terminal=True)
    assert done.code == 2
    assert "No prompt" in done.err


@pytest.mark.parametrize(("piped", "told"), [(b"", "empty"), (b" \n", "empty"), (b"\xff", "not UTF-8")])
def test_a_prompt_on_stdin_that_is_none(folder, piped, told):
    done = run_mars(*arguments(folder), stdin=piped)
    assert (done.code, done.out) == (2, "")
    assert told in done.err


def test_a_prompt_longer_than_the_context(plain_folder):
    done = run_mars(*arguments(plain_folder, "0 " * 400))
    assert done.code == 2
    assert "shorten the prompt" in done.err
    assert done.err.count("\n") == 2  # the note that the model has no MARS settings, and the sentence


def test_a_block_size_above_the_trained_one(folder):
    done = run_mars(*arguments(folder, "hello", "--block-size", 9))
    assert done.code == 2
    assert "trained with 4" in done.err


def test_an_ordinary_model_runs_one_token_at_a_time_and_says_so(plain_folder):
    done = run_mars(*arguments(plain_folder, "hello", "--tau", "0.3", "--block-size", 4))
    assert done.code == 0
    assert "no MARS settings" in done.err
    assert CLOSING.search(done.err).group(3) == "1.00"


# --- colours ---


def coloured(output):
    """The text that a terminal shows, and the colour of each of its characters."""
    text, colours, colour, at = "", [], "", 0
    for escape in ANSI.finditer(output):
        piece = output[at : escape.start()]
        text, colours = text + piece, colours + [colour] * len(piece)
        colour, at = escape.group(1), escape.end()
    return text + output[at:], colours + [""] * len(output[at:])


def test_tokens_of_one_forward_share_a_colour_and_the_next_has_another(folder, expected):
    _, result = expected(user("hello"), exact=False, tau=0.0, max_new_tokens=24)
    done = run_mars(*arguments(folder, "hello", "--lossy", "--tau", 0), terminal=True)
    runs = []
    for match in re.finditer(r"\x1b\[38;5;(\d+)m(.*?)\x1b\[0m", done.out, re.DOTALL):
        runs.append(match.group(1))
    assert 2 <= len(runs) <= result.forwards + 1
    assert all(one != other for one, other in itertools.pairwise(runs))
    text, _ = coloured(done.out)
    assert CLOSING.search(text)


def test_on_a_real_terminal_colour_and_closing_line_and_without_colour_neither(folder):
    command = mars_command(*arguments(folder, "hello"))
    bright = run_on_pty(command, mars_environment())
    assert bright.code == 0
    assert "\x1b[38;5;" in bright.out
    assert CLOSING.search(ANSI.sub("", bright.out))
    plain = run_on_pty(command, mars_environment(NO_COLOR="1"))
    assert plain.code == 0
    assert "\x1b" not in plain.out
    assert CLOSING.search(plain.out)


@pytest.mark.parametrize("setting", [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_an_environment_that_asks_for_no_colour(folder, monkeypatch, setting):
    monkeypatch.setenv(*setting)
    done = run_mars(*arguments(folder, "hello"), terminal=True)
    assert "\x1b" not in done.out + done.err


def test_no_color_gives_what_a_pipe_gets(folder, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    shown = run_mars(*arguments(folder, "hello", "--no-color"), terminal=True)
    assert "\x1b" not in shown.out + shown.err
    assert CLOSING.match(shown.err)
    assert not CLOSING.search(shown.out)
    assert CLOSING.search(ANSI.sub("", run_mars(*arguments(folder, "hello"), terminal=True).out))


def test_a_models_escape_sequence_does_not_reach_the_terminal(folder, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(
        "mars_lm.detokenizer.decode", lambda tokenizer, ids: "\x1b[2J\x9bred\r\n\ttext" if ids else ""
    )
    monkeypatch.setattr("mars_lm.cli.terminal._FORWARD_COLOURS", (1,))
    shown = run_mars(*arguments(folder, "hello"), terminal=True)
    assert "\x1b[2J" not in shown.out
    assert "\x9b" not in shown.out
    assert "�[2J�red\n\ttext" in shown.out
    assert "\x1b[2J" in run_mars(*arguments(folder, "hello")).out


# --- Ctrl-C ---


def interrupt_after(monkeypatch, count):
    """Ctrl-C in the midst of a generation, after so many forwards."""
    stream = Engine.stream

    def interrupted(self):
        for number, output in enumerate(stream(self)):
            if number == count:
                signal.raise_signal(signal.SIGINT)
            yield output

    monkeypatch.setattr(Engine, "stream", interrupted)


def test_ctrl_c_prints_the_text_so_far_and_the_closing_line(folder, monkeypatch, expected):
    text, _ = expected(user("hello"), tau=1.0, max_new_tokens=6)
    interrupt_after(monkeypatch, 5)
    done = run_mars(*arguments(folder, "hello", "--tau", 1, "--max-new-tokens", 10_000))
    assert done.code == 130
    assert done.out.rstrip("\n") == text.rstrip("\n")
    assert CLOSING.match(done.err).group(1) == "6"
    assert "Traceback" not in done.err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_a_process_of_its_own(folder):
    command = mars_command(*arguments(folder, "hello", "--tau", 1, "--max-new-tokens", 39_000))
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env=mars_environment(),
        # Whoever started pytest may have had Ctrl-C ignored, which a child inherits.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - started < 10
    assert CLOSING.match(err.decode())
    assert b"Traceback" not in err


def test_a_pipe_that_closes_early_is_no_stack_trace(folder):
    command = mars_command(*arguments(folder, "hello", "--tau", 1, "--max-new-tokens", 39_000))
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env=mars_environment(),
    )
    assert process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) != 0
    assert err == b""


# --- many prompts ---

ROWS = [
    {"prompt": "hello", "id": 1},
    {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "add 1 and 2"}]},
    {"prompt": "The quick brown fox jumps over the lazy dog. " * 3},
    {"prompt": "ünï\u2028code 🙂", "nested": {"a": [None, 1.5]}},
    {"messages": [{"role": "user", "content": "hello"}]},
]


@pytest.fixture
def many(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n", encoding="utf-8")
    return path, tmp_path / "out.jsonl"


def read(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def check_answers(answers, expected):
    assert len(answers) == len(ROWS)
    for row, answer in zip(ROWS, answers, strict=True):
        text, result = expected(row.get("messages") or user(row["prompt"]), max_new_tokens=24)
        numbers = {
            "text": text,
            "token_ids": result.token_ids,
            "finish_reason": result.finish_reason,
            "forwards": result.forwards,
            "accepted_lengths": result.accepted_lengths,
        }
        assert answer == {**row, **numbers}
        assert sum(answer["accepted_lengths"]) == len(answer["token_ids"])
        assert len(answer["accepted_lengths"]) == answer["forwards"]


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_a_file_of_prompts_to_a_file_of_answers(folder, many, expected, batch_size):
    source, target = many
    done = run_mars(*arguments(folder, "--input", source, "--output", target, "--batch-size", batch_size))
    assert (done.code, done.out) == (0, "")
    check_answers(read(target), expected)
    assert CLOSING.match(done.err)


def test_rows_from_stdin_to_stdout(folder, many, expected):
    source, _ = many
    done = run_mars(*arguments(folder, "--input", "-"), stdin=source.read_bytes())
    assert done.code == 0
    check_answers([json.loads(line) for line in done.out.removesuffix("\n").split("\n")], expected)


def test_system_does_not_replace_a_rows_own(folder, many, expected):
    source, target = many
    run_mars(*arguments(folder, "--input", source, "--output", target, "--system", "be kind"))
    answers = read(target)
    assert (
        answers[0]["text"]
        == expected([{"role": "system", "content": "be kind"}, *user("hello")], max_new_tokens=24)[0]
    )
    assert answers[1]["text"] == expected(ROWS[1]["messages"], max_new_tokens=24)[0]


def test_a_stopped_run_is_continued_and_a_finished_one_loads_no_model(folder, many, expected, monkeypatch):
    source, target = many
    with monkeypatch.context() as patch:
        interrupt_after(patch, 40)
        done = run_mars(
            *arguments(folder, "--input", source, "--output", target, "--batch-size", 1, "--tau", 1)
        )
    assert done.code == 130
    assert "Traceback" not in done.err
    already = read(target)
    assert 1 <= len(already) < len(ROWS)
    assert f"{target} has {len(already)} of {len(ROWS)} rows" in done.err

    with target.open("ab") as file:
        file.write(b'{"messages": [{"role": "sys')  # what a kill in the midst of a write leaves
    done = run_mars(*arguments(folder, "--input", source, "--output", target))
    assert done.code == 0
    texts = [answer["text"] for answer in read(target)]
    assert texts == [expected(r.get("messages") or user(r["prompt"]), max_new_tokens=24)[0] for r in ROWS]
    assert read(target)[: len(already)] == already

    before = target.read_bytes()
    done = run_mars("generate", "--model", "no/such/folder/here", "--input", source, "--output", target)
    assert done.code == 0
    assert f"answers to all {len(ROWS)} rows already" in done.err
    assert target.read_bytes() == before


def test_a_bad_row_is_named_and_no_row_is_lost(folder, many):
    source, target = many
    with source.open("a", encoding="utf-8") as file:
        file.write('{"prompt": 3}\n')
    target.write_bytes(json.dumps(ROWS[0]).encode()[:-1] + b', "text": "x"}\n')
    before = target.read_bytes()
    done = run_mars(*arguments(folder, "--input", source, "--output", target))
    assert done.code == 2
    assert f"{source}, line 6: " in done.err
    assert target.read_bytes() == before


def test_a_row_longer_than_the_context_is_named_before_any_is_answered(plain_folder, many):
    source, target = many
    with source.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"prompt": "0 " * 400}) + "\n")
    done = run_mars(*arguments(plain_folder, "--input", source, "--output", target))
    assert done.code == 2
    assert f"{source}, line 6: The prompt has" in done.err
    assert read(target) == []


def test_input_and_output_must_differ(folder, many):
    source, _ = many
    before = source.read_bytes()
    done = run_mars(*arguments(folder, "--input", source, "--output", source))
    assert done.code == 2
    assert "a file of their own" in done.err
    assert source.read_bytes() == before


def test_raw_rows_are_prompts(folder, many):
    source, target = many
    done = run_mars(*arguments(folder, "--input", source, "--output", target, "--raw"))
    assert done.code == 2
    assert f"{source}, line 2: 'messages' need the chat template" in done.err


def test_progress_is_on_stderr_and_only_on_a_terminal(folder, many):
    source, target = many
    shown = run_mars(*arguments(folder, "--input", source, "--output", target), terminal=True)
    assert "5/5" in shown.err
    assert shown.out == ""
    target.unlink()
    assert "5/5" not in run_mars(*arguments(folder, "--input", source, "--output", target)).err
