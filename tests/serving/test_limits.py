"""What bad input gets: a 4xx in OpenAI's shape or a closed connection, while the others go on."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import RunningServer, running_server

from mars_lm.serving import app
from mars_lm.serving.keys import Keys
from mars_lm.serving.requests import Limits

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def post(
    server: RunningServer,
    body: Any,
    path: str = "/v1/chat/completions",
    headers: dict[str, str] | None = None,
    method: str = "POST",
) -> tuple[int, Any, dict[str, str]]:
    """Status, JSON body and headers; `body` is sent as it is if it is bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json"} | (headers or {}))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null"), dict(answer.getheaders())


@contextlib.contextmanager
def connected(server: RunningServer) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as bare:
        yield bare


def read_all(bare: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := bare.recv(65536):
            parts.append(part)
    return b"".join(parts)


def check_refused(status: int, body: Any) -> None:
    assert 400 <= status < 500
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"].endswith(".")
    assert "\n" not in body["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model": "tiny", "messages": [',
        b"[]",
        b'"text"',
        b"null",
        b"NaN",
        b"\xff\xfe{}",
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff"}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 100_000,
        b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1'
        + b"0" * 10_000
        + b"}",
        b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "top_p": 1e999}',
    ],
    ids=lambda body: repr(body[:24]),
)
def test_a_body_that_cannot_be_read(server, body):
    check_refused(*post(server, body)[:2])


@pytest.mark.parametrize(
    "changes",
    [
        {"model": None},
        {"model": "gpt-4"},
        {"model": 5},
        {"messages": []},
        {"messages": "hello"},
        {"messages": [5]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "king", "content": "x"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": []}]},
        {"messages": [{"role": "user", "content": {"text": "x"}}]},
        {"messages": [{"role": "user", "content": "hello " * 1000}]},
        {"messages": [{"role": "user", "content": "x"}] * 5000},
        {"max_tokens": 0},
        {"max_tokens": -5},
        {"max_tokens": 10**30},
        {"max_tokens": 1.5},
        {"max_tokens": "4"},
        {"max_tokens": True},
        {"max_tokens": 4, "max_completion_tokens": 5},
        {"min_tokens": 5},
        {"n": 0},
        {"n": 1000},
        {"temperature": -1},
        {"temperature": 1e300},
        {"temperature": "hot"},
        {"top_p": 1.1},
        {"top_k": 10**40},
        {"seed": 10**40},
        {"presence_penalty": 3},
        {"frequency_penalty": float("nan")},
        {"repetition_penalty": 0},
        {"repetition_penalty": -1},
        {"repetition_penalty": 5e-324},  # 0 in float32: every logit would be infinite
        {"repetition_penalty": 1e308},
        {"stop": ["x"] * 1000},
        {"stop": [""]},
        {"stop": ["x" * 100_000]},
        {"stop": [5]},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": list(range(1000))},
        {"logprobs": 5},
        {"logprobs": True, "top_logprobs": 21},
        {"top_logprobs": 2},
        {"stream": "yes"},
        {"stream_options": {"include_usage": True}},
        {"mars": {"tau": -0.1}},
        {"mars": {"tau": 1.1}},
        {"mars": {"rule": "luck"}},
        {"mars": {"block_size": 0}},
        {"mars": {"block_size": 5}},
        {"mars": {"block_size": 10**30}},
        {"mars": {"exact": "yes"}},
        {"mars": []},
    ],
    ids=lambda changes: json.dumps(changes)[:40],
)
def test_a_value_that_is_wrong(server, changes):
    check_refused(*post(server, {**CHAT, **changes})[:2])


@pytest.mark.parametrize(
    "prompt",
    ["", [], [[]], [[], [1]], [1, "a"], [10**9], [-1], [319_000], ["x"] * 100, [[1]] * 100, 5, {"a": 1}],
)
def test_a_prompt_that_is_wrong(server, prompt):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4}
    check_refused(*post(server, body, "/v1/completions")[:2])


def test_a_stream_that_waits_says_so_and_a_lively_one_does_not(monkeypatch) -> None:
    """A proxy between must not take it as dead; a comment is no event to a client."""
    monkeypatch.setattr(app, "SILENCE_SECONDS", 0.1)
    for pause, waits in ((0.5, True), (0.0, False)):
        with running_server(pause=pause) as server, connected(server) as bare:
            body = json.dumps({**CHAT, "stream": True, "max_tokens": 3, "ignore_eos": True}).encode()
            bare.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            text = read_all(bare)
            assert b"data: [DONE]" in text
            comments, events = text.count(b": waiting\n\n"), text.count(b"data: {")
            assert events >= 2
            assert (2 <= comments <= 5 * events) if waits else not comments


def test_a_browser_at_the_root_is_told_how_to_get_a_page(server: RunningServer) -> None:
    status, body, _ = post(server, b"", "/", method="GET")
    check_refused(status, body)
    assert status == 404
    assert "--ui" in body["error"]["message"]
    assert "/v1" in body["error"]["message"]


def test_paths_and_methods(server):
    status, body, _ = post(server, CHAT, "/v1/embeddings")
    assert status == 404
    check_refused(status, body)
    status, body, headers = post(server, CHAT, method="DELETE")
    assert status == 405
    assert "POST" in headers["allow"]
    check_refused(status, body)


def test_a_body_of_another_type_is_refused(server):
    status, body, _ = post(server, CHAT, headers={"Content-Type": "text/plain"})
    check_refused(status, body)  # a web page may send text/plain anywhere without asking


def test_a_gigabyte_is_refused_unread(server):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with connected(server) as bare:
        bare.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 1073741824\r\n\r\n"
        )
        assert bare.recv(12) == b"HTTP/1.1 413"
    with connected(server) as bare:  # without saying how much comes
        bare.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 1 << 30:
                bare.sendall(chunk)
                sent += len(chunk)
        assert sent < 1 << 25
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
    assert post(server, CHAT)[0] == 200


def test_a_flood_of_headers(server):
    with connected(server) as bare:
        with contextlib.suppress(ConnectionError):
            bare.sendall(b"GET /health HTTP/1.1\r\n")
            for number in range(100_000):
                bare.sendall(b"X-%d: y\r\n" % number)
        answer = read_all(bare)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
    assert post(server, CHAT)[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        b"GET\r\n\r\n",
        b"\0" * 1000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_http(server, data):
    with connected(server) as bare:
        bare.sendall(data)
        answer = read_all(bare)
    assert answer.startswith(b"HTTP/1.1 400")
    check_refused(400, json.loads(answer.partition(b"\r\n\r\n")[2]))


def test_clients_that_send_slowly_are_let_go():
    limits = Limits(header_seconds=1, body_seconds=1)
    with running_server(limits=limits) as server, connected(server) as silent, connected(server) as slow:
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 500\r\n\r\n{"
        )
        silent.sendall(b"POST /v1/comp")
        assert post(server, CHAT)[0] == 200
        assert read_all(slow).startswith(b"HTTP/1.1 408")
        assert read_all(silent) == b""


def test_a_client_that_reads_slowly_holds_no_row_and_little_memory(monkeypatch):
    monkeypatch.setattr("mars_lm.serving.app.UNREAD_SECONDS", 0.5)
    with running_server(rows=20, limits=Limits(seconds=3)) as server, socket.socket() as slow:
        # Small buffers on both sides, so that the kernel does not take the whole answer for the client.
        server.process.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.connect(("127.0.0.1", server.port))
        body = json.dumps(
            {**CHAT, "max_tokens": 200, "n": 16, "stream": True, "logprobs": True, "top_logprobs": 20}
        )
        slow.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body.encode())
        )
        slow.recv(1)
        assert post(server, CHAT)[0] == 200
        until = time.monotonic() + 30
        while server.process.server_state.connections and time.monotonic() < until:
            time.sleep(0.1)
        assert not server.process.server_state.connections
        server.wait_until_idle()


def test_connections_are_limited():
    with running_server(limits=Limits(connections=3)) as server, contextlib.ExitStack() as stack:
        bare = [stack.enter_context(connected(server)) for _ in range(6)]
        time.sleep(0.3)
        for connection in bare:
            connection.settimeout(0.3)
        closed = 0
        for connection in bare:
            try:
                closed += connection.recv(1) == b""
            except ConnectionError:
                closed += 1
            except TimeoutError:
                pass
        assert closed == 3


def test_a_full_queue_answers_429_and_says_when():
    with running_server(rows=1, pause=0.05, limits=Limits(queue=2)) as server:
        statuses: list[int] = []
        retry: list[str] = []

        def ask() -> None:
            status, _, headers = post(server, {**CHAT, "max_tokens": 20})
            statuses.append(status)
            if status == 429:
                retry.append(headers["retry-after"])

        askers = [threading.Thread(target=ask) for _ in range(8)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
        assert statuses.count(200) == 3
        assert statuses.count(429) == 5
        assert all(1 <= int(seconds) <= 60 for seconds in retry)
        status, body, _ = post(server, {**CHAT, "n": 4})
        assert (status, body["error"]["code"]) == (400, "too_many_answers")


def test_time_per_request():
    with running_server(pause=0.05, limits=Limits(seconds=1)) as server:
        status, body, headers = post(server, {**CHAT, "max_tokens": 200})
        assert (status, body["error"]["code"]) == (408, "request_timeout")
        assert headers["x-should-retry"] == "false"
        openai = pytest.importorskip("openai")
        stream = server.client().chat.completions.create(**{**CHAT, "max_tokens": 200}, stream=True)
        with pytest.raises(openai.APIError, match="not finished within"):
            list(stream)
        server.wait_until_idle()


def test_a_client_that_leaves_frees_its_row():
    with running_server(rows=2, pause=0.02) as server:
        for stream in (True, False):
            with connected(server) as bare:
                body = json.dumps({**CHAT, "max_tokens": 240, "stream": stream, "n": 2}).encode()
                bare.sendall(
                    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
                )
                tokens = server.server.metrics.tokens._value
                until, enough = time.monotonic() + 20, tokens.get() + 4
                while tokens.get() < enough and time.monotonic() < until:
                    time.sleep(0.01)
                assert server.runner.in_flight == 2
            server.wait_until_idle(seconds=2)
        assert server.server.metrics.tokens._value.get() < 400


def test_api_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# for tests\nfirst-key\n\n second-key \n")
    with running_server(api_keys=file) as server:
        assert post(server, CHAT)[0] == 401
        for key, status in (
            ("first-key", 200),
            ("second-key", 200),
            ("third", 401),
            ("first-key2", 401),
            ("", 401),
        ):
            assert post(server, CHAT, headers={"Authorization": f"Bearer {key}"})[0] == status
        assert post(server, CHAT, headers={"Authorization": "Basic first-key"})[0] == 401
        assert post(server, b"", "/health", method="GET")[0] == 200
    keys = Keys(["a" * 40])
    assert keys.accept("a" * 40)
    assert not keys.accept("a" * 39)
    assert not keys.accept(None)


def test_cors_is_off_unless_told():
    asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    with running_server() as server:
        _, _, headers = post(server, CHAT, headers={"Origin": "https://page.example"})
        assert not any(name.lower().startswith("access-control") for name in headers)
        assert post(server, b"", headers=asked, method="OPTIONS")[0] == 405
    with running_server(cors_origins=("https://page.example",)) as server:
        _, _, headers = post(server, CHAT, headers={"Origin": "https://page.example"})
        assert headers["access-control-allow-origin"] == "https://page.example"
        _, _, headers = post(server, CHAT, headers={"Origin": "https://other.example"})
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("told", [False, True])
def test_prompts_stay_out_of_the_log_unless_told(told, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("mars_lm.serving"), "propagate", True)
    with caplog.at_level(logging.DEBUG), running_server(log_prompts=told) as server:
        word = "quicksilver"
        answer = post(server, {**CHAT, "messages": [{"role": "user", "content": word}]})[1]
        post(server, {**CHAT, "stop": [word] * 500})
        post(server, {**CHAT, "model": word})
        post(server, {**CHAT, word: 5})
        with monkeypatch.context() as broken:  # a bug's message may hold what it stumbled over
            broken.setattr(
                server.server.preparation, "_settings", lambda *_: (_ for _ in ()).throw(TypeError(word))
            )
            assert post(server, CHAT)[0] == 500
    text = caplog.text
    assert "req-" in text
    assert "TypeError" in text
    assert (word in text) == told
    assert (json.dumps(answer["choices"][0]["message"]["content"], ensure_ascii=False) in text) == told


def test_a_forward_that_fails_ends_its_requests_and_no_others():
    with running_server(rows=2) as server:
        engine = server.server.engine
        step = type(engine).step
        failures = [True]

        def fail(self: Any) -> Any:
            if failures:
                failures.pop()
                raise RuntimeError("no memory")
            return step(self)

        engine.step = fail.__get__(engine)
        status, body, _ = post(server, CHAT)
        assert (status, body["error"]["code"]) == (500, "internal_error")
        assert "memory" not in body["error"]["message"]
        assert post(server, CHAT)[0] == 200
        server.wait_until_idle()
        failures += [True] * 3
        for _ in range(3):
            post(server, CHAT)
        assert post(server, CHAT)[0] == 503
        assert post(server, b"", "/health", method="GET")[0] == 503
        assert post(server, b"", "/ready", method="GET")[0] == 503
