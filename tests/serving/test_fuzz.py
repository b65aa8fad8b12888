"""The server against its own description, and against clients that come and go."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import RunningServer, running_server

from mars_lm.serving.requests import Limits


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    # Few tokens an answer: what is fuzzed is the server, not the model.
    with running_server(limits=Limits(new_tokens=8, queue=512)) as running:
        yield running


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/mars/settings", "others"])
def test_the_own_description_holds(server, path):
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    from hypothesis import HealthCheck, Phase, given
    from hypothesis import settings as hypothesis_settings
    from schemathesis import GenerationMode
    from schemathesis.checks import load_all_checks, not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        negative_data_rejection,
        response_schema_conformance,
        status_code_conformance,
    )

    load_all_checks()
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    named = ("/v1/chat/completions", "/v1/completions", "/mars/settings")
    schema = schema.exclude(path=list(named)) if path == "others" else schema.include(path=path)
    checks = (
        not_a_server_error,
        content_type_conformance,
        negative_data_rejection,
        response_schema_conformance,
        status_code_conformance,
    )
    for result in schema.get_all_operations():
        operation = result.ok()
        strategy = operation.as_strategy(GenerationMode.POSITIVE) | operation.as_strategy(
            GenerationMode.NEGATIVE
        )

        @given(case=strategy)
        @hypothesis_settings(
            max_examples=60,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def check(case: Any) -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                case.body["model"] = (
                    "tiny"  # a random name would be refused before anything else is looked at
                )
            case.call_and_validate(
                base_url=server.url, checks=checks, headers={"Authorization": "Bearer turn-it"}, timeout=60
            )

        check()
    server.wait_until_idle()


def test_clients_that_leave_at_any_moment_leak_nothing(server):
    """Streams cut at random places: no 5xx, every row free, and those who stay get their whole answer."""
    draw = random.Random(0)
    whole, wrong = [], []

    def visit(seed: int) -> None:
        own = random.Random(seed)
        chat = own.random() < 0.5
        body: dict[str, Any] = {
            "model": "tiny",
            "max_tokens": own.randint(1, 8),
            "stream": own.random() < 0.8,
            "n": own.choice([1, 1, 3]),
            "temperature": own.choice([0, 1]),
            "mars": {"tau": own.choice([0, 0.5, 1]), "exact": own.random() < 0.5},
        }
        body |= (
            {"messages": [{"role": "user", "content": "hello " * own.randint(1, 20)}]}
            if chat
            else {"prompt": "x"}
        )
        data = json.dumps(body).encode()
        path = b"/v1/chat/completions" if chat else b"/v1/completions"
        head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        request = head % (path, len(data)) + data
        leaves_at = own.choice([None, None, *range(0, 2000, 100)])
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as bare:
            if own.random() < 0.2:
                return bare.sendall(request[: own.randrange(len(request))])
            bare.sendall(request)
            got = b""
            while leaves_at is None or len(got) < leaves_at:
                part = bare.recv(256)
                got += part
                if not part or got.endswith((b"0\r\n\r\n", b"]}}")):
                    break
                if not body["stream"] and got.count(b"\r\n\r\n") and got.endswith(b"}"):
                    break
            if got and not got.startswith((b"HTTP/1.1 2", b"H")):
                wrong.append(got[:200])
            if got.startswith(b"HTTP/1.1") and not got.startswith((b"HTTP/1.1 200", b"HTTP/1.1 429")):
                wrong.append(got[:200])
            if leaves_at is None and body["stream"]:
                whole.append(b"data: [DONE]" in got and b'"error"' not in got)

    for _ in range(12):
        visitors = [threading.Thread(target=visit, args=(draw.randrange(10**9),)) for _ in range(16)]
        for visitor in visitors:
            visitor.start()
        for visitor in visitors:
            visitor.join(60)
    assert not wrong
    assert whole
    assert all(whole)
    server.wait_until_idle()
