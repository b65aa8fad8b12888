"""`mars chat`: turns, commands, a context that fills up, and the keys that stop and leave."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time

import pytest

from mars_lm import checkpoint as checkpoints
from mars_lm.decoding import Engine, generate
from mars_lm.detokenizer import decode
from mars_lm.settings import DecodingSettings
from run_mars import mars_command, mars_environment, run_mars
from tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tiny_checkpoint()  # a context of 256
    path = tmp_path_factory.mktemp("checkpoint")
    checkpoints.save(made.model, made.tokenizer, path)
    return path


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory):
    made = tiny_checkpoint(max_position_embeddings=40_000)
    path = tmp_path_factory.mktemp("long")
    checkpoints.save(made.model, made.tokenizer, path)
    return path


@pytest.fixture
def prompts(monkeypatch):
    """The prompts that the engine was given, as text, special tokens shown."""
    seen = []
    add = Engine.add

    def noted(self, prompt_ids, settings):
        seen.append((list(prompt_ids), settings))
        return add(self, prompt_ids, settings)

    monkeypatch.setattr(Engine, "add", noted)
    return seen


def chat(folder, *lines, more=()):
    typed = "".join(line + "\n" for line in lines)
    return run_mars(
        "chat", "--model", folder, "--dtype", "float32", "--max-new-tokens", 8, *more, stdin=typed
    )


def test_each_line_is_a_turn_and_the_conversation_is_kept(folder, prompts):
    done = chat(folder, "hello", "", "and you?")
    assert done.code == 0
    loaded = checkpoints.load(folder, dtype="float32")
    turns, texts = [], []
    for (prompt_ids, _), message in zip(list(prompts), ("hello", "and you?"), strict=True):
        turns.append({"role": "user", "content": message})
        assert prompt_ids == checkpoints.encode_chat(loaded, turns)
        [result] = generate(loaded, [prompt_ids], DecodingSettings(max_new_tokens=8))
        texts.append(decode(loaded.tokenizer, result.token_ids))
        turns.append({"role": "assistant", "content": texts[-1]})
    assert done.out == "".join(text.removesuffix("\n") + "\n" for text in texts)
    assert done.err.count("tokens per second") == 2


def test_commands_change_the_next_answer(folder, prompts):
    done = chat(
        folder, "/tau 0.5", "a", "/lossy", "b", "/tau 1", "/exact", "c", "/reset", "/system be brief", "d"
    )
    assert done.code == 0
    settings = [settings for _, settings in prompts]
    assert [(s.tau, s.exact) for s in settings] == [(0.5, True), (0.5, False), (1.0, True), (1.0, True)]
    loaded = checkpoints.load(folder, dtype="float32")
    assert prompts[-1][0] == checkpoints.encode_chat(
        loaded, [{"role": "system", "content": "be brief"}, {"role": "user", "content": "d"}]
    )
    assert "exact, tau 0.5, rule probability" in done.err


def test_lossy_without_a_tau_takes_the_papers(folder, prompts):
    chat(folder, "/lossy", "a", "/exact", "b")
    assert [(s.tau, s.exact) for _, s in prompts] == [(0.95, False), (0.0, True)]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/nothing", "no command /nothing"),
        ("/tau", "followed by a number"),
        ("/tau much", "followed by a number"),
        ("/tau 7", "tau is 7.0"),
        ("0 " * 400, "shorten the prompt"),
    ],
)
def test_a_slip_ends_neither_program_nor_conversation(folder, prompts, line, told):
    done = chat(folder, "first", line, "second")
    assert done.code == 0
    assert told in done.err
    text = checkpoints.load(folder, dtype="float32").tokenizer.decode(prompts[-1][0])
    assert "first" in text
    assert "second" in text


def test_a_path_is_a_message_and_exit_leaves(folder, prompts):
    done = chat(folder, "/etc/passwd has what?", "/exit", "never")
    assert done.code == 0
    assert len(prompts) == 1


def test_help_names_every_command(folder):
    done = chat(folder, "/help")
    for command in ("/tau", "/exact", "/lossy", "/system", "/reset", "/exit"):
        assert command in done.err


def test_a_full_context_drops_the_oldest_turns_keeps_the_system_message_and_says_so(folder, prompts):
    messages = [f"message {number} " + "hello " * 20 for number in range(6)]
    done = chat(folder, *messages, more=["--system", "be brief"])
    assert done.code == 0
    assert "left out" in done.err
    tokenizer = checkpoints.load(folder, dtype="float32").tokenizer
    for (prompt_ids, _), message in zip(prompts, messages, strict=True):
        text = tokenizer.decode(prompt_ids)
        assert len(prompt_ids) + 8 <= 256
        assert "be brief" in text
        assert message.strip() in text
    assert "message 0" not in text
    assert "message 4" in text


def test_ctrl_c_stops_the_answer_alone_and_what_was_said_stays(folder, prompts, monkeypatch):
    stream = Engine.stream
    pressed = []

    def interrupted(self):
        for number, output in enumerate(stream(self)):
            if number == 3 and not pressed:
                pressed.append(True)
                signal.raise_signal(signal.SIGINT)
            yield output

    monkeypatch.setattr(Engine, "stream", interrupted)
    done = chat(folder, "first", "second", more=["--tau", 1, "--max-new-tokens", 30])
    assert done.code == 0
    assert pressed
    assert re.search(r"^4 tokens · 4 forwards", done.err, re.MULTILINE)
    assert len(prompts) == 2
    assert "first" in checkpoints.load(folder, dtype="float32").tokenizer.decode(prompts[1][0])


def test_a_second_ctrl_c_leaves_the_answer_unfinished_and_the_chat_goes_on(folder, prompts, monkeypatch):
    stream = Engine.stream
    pressed = []

    def interrupted(self):
        for number, output in enumerate(stream(self)):
            if number == 3 and not pressed:
                pressed.append(True)
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            yield output

    monkeypatch.setattr(Engine, "stream", interrupted)
    done = chat(folder, "first", "second", more=["--tau", 1])
    assert done.code == 0
    assert done.err.count("tokens per second") == 1
    assert "second" in checkpoints.load(folder, dtype="float32").tokenizer.decode(prompts[1][0])


class Keyboard:
    """A program on a terminal of its own."""

    def __init__(self, command):
        self.leader, follower = pty.openpty()
        self.output = ""
        self.process = subprocess.Popen(
            command,
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env=mars_environment(),
            start_new_session=True,
            # Makes it the terminal that Ctrl-C comes from.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(follower)

    def wait_for(self, pattern, seconds=240.0):
        limit = time.monotonic() + seconds
        while not re.search(pattern, self.output):
            ready, _, _ = select.select([self.leader], [], [], max(0, limit - time.monotonic()))
            if not ready:
                return False
            try:
                self.output += os.read(self.leader, 65536).decode("utf-8", "replace")
            except OSError:  # it ended
                return False
        return True

    def press(self, keys, until):
        """As a person does, again where nothing happens: readline misses a Ctrl-C right behind its prompt."""
        os.write(self.leader, keys)
        if not self.wait_for(until, seconds=20):
            os.write(self.leader, keys)
            assert self.wait_for(until), f"no {until!r} in {self.output!r}"


def test_at_a_terminal_ctrl_c_stops_an_answer_and_ctrl_d_leaves(long_folder):
    keyboard = Keyboard(
        mars_command(
            "chat", "--model", long_folder, "--dtype", "float32", "--tau", 1, "--max-new-tokens", 30_000
        )
    )
    assert keyboard.wait_for(r"/help lists the commands[^>]*> "), keyboard.output
    keyboard.press(
        b"\x03", until=r"/help lists the commands[^>]*> [^>]*> "
    )  # at an empty prompt: another one
    os.write(keyboard.leader, b"hello\n")
    assert keyboard.wait_for(r"\x1b\[38;5;\d+m"), keyboard.output
    keyboard.press(b"\x03", until=r"tokens per second[^>]*> ")
    os.write(keyboard.leader, b"\x04")
    assert keyboard.process.wait(timeout=120) == 0
    os.close(keyboard.leader)
    assert "Traceback" not in keyboard.output
