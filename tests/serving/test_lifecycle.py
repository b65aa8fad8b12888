"""`mars serve` as a process: it starts, ends in order under load, and comes back after a kill."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mars_lm.checkpoint import save
from run_mars import mars_command, mars_environment, run_mars
from tiny import tiny_checkpoint

START_SECONDS = 120  # a busy machine imports torch slowly


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    checkpoint = tiny_checkpoint(max_position_embeddings=8192)
    save(checkpoint.model, checkpoint.tokenizer, folder)
    return folder


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(
    folder: Path, *arguments: object, port: int | None = None
) -> Iterator[tuple[Any, int, list[str]]]:
    """A `mars serve` process, its port, and what it prints."""
    port = port or free_port()
    process = subprocess.Popen(
        mars_command("serve", "--model", folder, "--port", port, *arguments),
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=mars_environment(HF_HUB_OFFLINE="1", MARS_ADMIN_KEY="turn-it"),
    )
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True)
    reader.start()
    try:
        until = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5).close()
                break
            assert process.poll() is None, "".join(lines)
            assert time.monotonic() < until, "the server did not start"
            time.sleep(0.05)
        yield process, port, lines
    finally:
        process.kill()
        process.wait()
        reader.join(5)


def ask(port: int, outcomes: list[str], *, stream: bool, tokens: int) -> None:
    """One request; what became of it: whole, error, refused, closed, or broken (which must never be)."""
    body = {"model": "tiny", "prompt": "hello", "max_tokens": tokens, "stream": stream, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
    except (ConnectionError, http.client.RemoteDisconnected):
        return outcomes.append("closed")  # before it was accepted
    try:
        text = answer.read().decode()
        if answer.status != 200:
            return outcomes.append("refused" if json.loads(text)["error"]["code"] else "broken")
        if not stream:
            return outcomes.append(
                "whole" if json.loads(text)["usage"]["completion_tokens"] == tokens else "broken"
            )
        events = [event.removeprefix("data: ") for event in text.split("\n\n") if event.startswith("data: ")]
        last = json.loads(events[-2])
        if events[-1] != "[DONE]":
            return outcomes.append("broken")
        outcomes.append(
            "error" if "error" in last else "whole" if last["choices"][0]["finish_reason"] else "broken"
        )
    except Exception as error:
        outcomes.append(f"broken: {error!r}")
    finally:
        connection.close()


def load(port: int, count: int, tokens: int) -> tuple[list[threading.Thread], list[str]]:
    outcomes: list[str] = []
    askers = [
        threading.Thread(target=ask, args=(port, outcomes), kwargs={"stream": n % 2 == 0, "tokens": tokens})
        for n in range(count)
    ]
    for asker in askers:
        asker.start()
    return askers, outcomes


def wait_for_tokens(port: int) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
        if float(re.search(r"^mars_tokens_total (\S+)$", text, re.MULTILINE)[1]) > 20:  # type: ignore[index]
            return
        time.sleep(0.02)
    raise AssertionError("no token came")


def test_sigterm_lets_accepted_requests_finish(model_folder):
    with serving(model_folder, "--rows", 4, "--drain-seconds", 60) as (process, port, lines):
        askers, outcomes = load(port, 12, tokens=100)
        wait_for_tokens(port)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        for asker in askers:
            asker.join(60)
        assert len(outcomes) == 12
        assert set(outcomes) <= {"whole", "refused", "closed"}
        assert outcomes.count("whole") >= 4
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5)
    assert any("shutting down" in line for line in lines)
    assert not any("Traceback" in line for line in lines)


def test_sigterm_ends_what_takes_too_long_with_an_error_that_parses(model_folder):
    with serving(model_folder, "--rows", 4, "--drain-seconds", 0.2, "--max-new-tokens", 8000) as (
        process,
        port,
        _,
    ):
        askers, outcomes = load(port, 8, tokens=8000)
        wait_for_tokens(port)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        for asker in askers:
            asker.join(60)
        assert len(outcomes) == 8
        assert set(outcomes) <= {"error", "refused", "closed"}
        assert {"error", "refused"} & set(outcomes)


def test_after_a_kill_the_next_start_serves(model_folder):
    with serving(model_folder) as (process, port, _):
        askers, outcomes = load(port, 4, tokens=2000)
        wait_for_tokens(port)
        process.kill()
        process.wait()
        for asker in askers:
            asker.join(60)
        assert len(outcomes) == 4
        with serving(model_folder, port=port):
            after: list[str] = []
            ask(port, after, stream=False, tokens=5)
            assert after == ["whole"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tau-range", "0.6"], "LOW:HIGH"),
        (["--tau-range", "1.0:0.6"], "LOW:HIGH"),
        (["--api-keys", "nowhere"], "can't be read"),
        (["--admin-key-file", "nowhere"], "can't be read"),
        (["--tau", "2"], "tau is 2"),
    ],
)
def test_a_wrong_option_is_one_sentence(model_folder, arguments, told):
    done = run_mars("serve", "--model", model_folder, *arguments)
    assert done.code == 2
    assert told in done.err
    assert done.err.count("\n") == 1


def test_an_address_in_use_is_one_sentence(model_folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run_mars("serve", "--model", model_folder, "--port", taken.getsockname()[1])
    assert done.code == 2
    assert "can't be used" in done.err
    assert "Traceback" not in done.err
