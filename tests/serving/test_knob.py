"""The live knob: what follows it, who may turn it, and a controller that does not hunt."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest
from live_server import ADMIN_KEY, running_server

from mars_lm.errors import MarsError
from mars_lm.serving.knob import Defaults, Knob, LoadController
from run_mars import run_mars
from tiny import tiny_checkpoint

EXACT = Defaults(tau=0.0, rule="probability", block_size=None, exact=True)


def settings(server: Any, changes: dict[str, Any] | None = None, key: str | None = ADMIN_KEY) -> Any:
    """GET or PATCH /mars/settings: status and body."""
    request = urllib.request.Request(
        f"{server.url}/mars/settings",
        None if changes is None else json.dumps(changes).encode(),
        {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {}),
        method="GET" if changes is None else "PATCH",
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_request_follows_the_defaults_but_for_what_it_chose():
    knob = Knob(EXACT, 4)
    assert knob.resolve({}) == dataclasses.asdict(EXACT)
    assert not knob.resolve({"adaptive": False})["adaptive"]
    knob.change("admin", {"exact": False})
    # A tau that lets every draft be verified would accept every draft unverified.
    assert knob.defaults.tau == 0.95
    assert knob.resolve({"tau": 0.5})["tau"] == 0.5
    assert knob.resolve({"exact": True})["tau"] == 0.0
    knob.change("admin", {"rule": "entropy"})
    assert knob.defaults.tau == 0.2
    assert knob.resolve({"rule": "margin", "tau": 0.1, "exact": False})["tau"] == 0.1


def test_the_knob_refuses_what_the_checkpoint_was_not_trained_for():
    knob = Knob(EXACT, 4)
    for wrong in ({"tau": 1.5}, {"block_size": 5}, {"tau": float("nan")}):
        with pytest.raises(MarsError):
            knob.change("admin", wrong)
    assert knob.defaults == EXACT
    ordinary = Knob(Defaults(1.0, "probability", None, True), None)
    with pytest.raises(MarsError, match="not trained for MARS"):
        ordinary.change("admin", {"tau": 0.9})
    assert ordinary.resolve({"exact": False})["tau"] == 1.0


def test_the_controller_goes_from_bound_to_bound_and_back():
    controller = LoadController(0.6, 1.0, target_queue=8)
    assert controller.tau(0.0, 0.0, 0, "probability") == 1.0
    taus = [controller.tau(0.25 * step, 1.0, 20, "probability") for step in range(1, 80)]
    assert taus == sorted(taus, reverse=True)
    assert taus[-1] == pytest.approx(0.6)
    assert max(a - b for a, b in itertools.pairwise(taus)) < 0.2  # no jump
    back = [controller.tau(20 + 0.25 * step, 0.0, 0, "probability") for step in range(1, 240)]
    assert back == sorted(back)
    assert back[-1] == 1.0


def test_for_entropy_the_bounds_change_places():
    controller = LoadController(0.1, 0.5, target_queue=8)
    assert controller.tau(0.0, 0.0, 0, "entropy") == 0.1
    for step in range(1, 200):
        tau = controller.tau(float(step), 1.0, 20, "entropy")
    assert tau == 0.5


def taus_of_a_queue(arrivals: float, seed: int | None) -> list[float]:
    """A queue that is served the faster the lower tau is: 4 answers a second at tau 1, 6.4 at 0.6."""
    controller, draw = LoadController(0.6, 1.0, target_queue=8), random.Random(seed)
    waiting, taus = 0.0, []
    for step in range(4000):
        tau = controller.tau(step * 0.25, min(1.0, 0.2 + waiting), waiting, "probability")
        came = arrivals if seed is None else sum(draw.random() < arrivals / 4 for _ in range(4))
        waiting = max(0.0, waiting + came - (1.0 + 0.6 * (1.0 - tau) / 0.4))
        taus.append(tau)
    return taus[400:]


@pytest.mark.parametrize("arrivals", [0.8, 1.1, 1.4])
def test_the_controller_settles_under_steady_load(arrivals):
    settled = taus_of_a_queue(arrivals, None)[-2000:]
    assert max(settled) - min(settled) < 0.01  # of a range of 0.4: no swing of its own


@pytest.mark.parametrize("arrivals", [0.8, 1.1, 1.4])
def test_the_controller_moves_smoothly_under_random_load(arrivals):
    taus = taus_of_a_queue(arrivals, 0)
    assert all(0.6 <= tau <= 1.0 for tau in taus)
    assert max(abs(b - a) for a, b in itertools.pairwise(taus)) < 0.05


def test_a_change_takes_effect_at_the_next_forward_and_drops_nothing():
    with running_server(pause=0.02, defaults={"tau": 1.0, "exact": False}) as server:
        client = server.client()
        stream = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=120, stream=True
        )
        own = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=60,
            stream=True,
            extra_body={"mars": {"tau": 1.0}},
        )
        lengths = []
        for number, chunk in enumerate(stream):
            if number == 5:
                assert settings(server, {"tau": 0.0})[0] == 200
                forwards_at_change = server.server.metrics.steps._value.get()
            if chunk.choices[0].delta.role is None:
                lengths.append(chunk.mars["tokens"])
        assert sum(lengths) == 120
        changed = next(number for number, length in enumerate(lengths) if length > 1)
        assert set(lengths[:changed]) == {1}
        assert set(lengths[changed:-1]) == {4}
        assert changed <= forwards_at_change + 2
        own_lengths = [chunk.mars["tokens"] for chunk in own if chunk.choices[0].delta.role is None]
        assert own_lengths == [1] * 60
        assert 'mars_settings_changes_total{by="admin"} 1.0' in metrics(server)
        assert "mars_tau 0.0" in metrics(server)


def metrics(server: Any) -> str:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        return answer.read().decode()


def test_only_the_admin_key_turns_it(server):
    assert settings(server, key=None)[0] == 401
    status, body = settings(server, {"tau": 0.5}, key="guess")
    assert (status, body["error"]["code"]) == (401, "invalid_admin_key")
    assert server.server.knob.defaults.tau == 0.0
    status, body = settings(server)
    assert status == 200
    assert (body["tau"], body["trained_block_size"], body["controller"]) == (0.0, 4, None)


@pytest.mark.parametrize(
    "wrong",
    [{"tau": 2}, {"tau": "0.5"}, {"rule": "guess"}, {"block_size": 9}, {"speed": 1}, {"controller": True}],
)
def test_a_wrong_change_is_told_and_changes_nothing(server, wrong):
    before = server.server.knob.defaults
    status, body = settings(server, wrong)
    assert status == 400
    assert body["error"]["message"].endswith(".")
    assert server.server.knob.defaults == before


def test_without_an_admin_key_there_is_no_knob():
    with running_server(admin_key=None) as server:
        status, body = settings(server, {"tau": 0.5})
        assert (status, body["error"]["code"]) == (403, "no_admin_key")


def test_an_ordinary_model_is_served_one_token_at_a_time():
    checkpoint = tiny_checkpoint(mars=False)
    with running_server(checkpoint=checkpoint, defaults={"tau": 1.0}) as server:
        client = server.client()
        answer = client.completions.create(model="tiny", prompt="hello", max_tokens=8)
        assert answer.mars["accepted_lengths"] == [1] * 8
        assert settings(server, {"tau": 0.5})[0] == 400
        answer = client.completions.create(
            model="tiny", prompt="hello", max_tokens=8, extra_body={"mars": {"exact": False}}
        )
        assert answer.mars["forwards"] == 8
        openai = pytest.importorskip("openai")
        with pytest.raises(openai.BadRequestError, match="not trained for MARS"):
            client.completions.create(
                model="tiny", prompt="hello", max_tokens=8, extra_body={"mars": {"tau": 0.5}}
            )


def test_a_burst_turns_tau_down_and_quiet_turns_it_up(monkeypatch):
    monkeypatch.setattr(LoadController, "RISE_SECONDS", 0.2)
    monkeypatch.setattr(LoadController, "FALL_SECONDS", 0.3)
    monkeypatch.setattr("mars_lm.serving.app.CONTROLLER_SECONDS", 0.05)
    with running_server(
        rows=2, pause=0.02, tau_range=(0.6, 1.0), target_queue=4, defaults={"tau": 1.0}
    ) as server:
        knob, client = server.server.knob, server.client()

        def ask() -> None:
            client.completions.create(model="tiny", prompt="hello", max_tokens=30)

        askers = [threading.Thread(target=ask) for _ in range(12)]
        for asker in askers:
            asker.start()
        lowest = 1.0
        while any(asker.is_alive() for asker in askers):
            lowest = min(lowest, knob.defaults.tau)
            askers[0].join(0.02)
            for asker in askers:
                asker.join(0.001)
        assert lowest == pytest.approx(0.6)
        assert knob.controller is not None
        waits = 0
        while knob.defaults.tau < 1.0 and waits < 200:
            threading.Event().wait(0.05)
            waits += 1
        assert knob.defaults.tau == 1.0
        # A hand on the knob stops the controller; it is told when to go on.
        assert settings(server, {"tau": 0.7})[1]["controller"] is False
        threading.Event().wait(0.2)
        assert settings(server)[1]["tau"] == 0.7
        assert settings(server, {"controller": True})[1]["controller"] is True
        assert "mars_controller_on 1.0" in metrics(server)


def test_mars_knob(server, monkeypatch, tmp_path):
    monkeypatch.setenv("MARS_ADMIN_KEY", ADMIN_KEY)
    done = run_mars("knob", "--url", server.url)
    assert (done.code, "tau: 0.0" in done.out) == (0, True)
    done = run_mars("knob", "--url", server.url, "--tau", "0.8")
    assert (done.code, "tau: 0.8" in done.out) == (0, True)
    assert server.server.knob.defaults.tau == 0.8
    done = run_mars("knob", "--url", server.url, "--tau", "0")
    assert server.server.knob.defaults.tau == 0.0
    done = run_mars("knob", "--url", server.url, "--tau", "3")
    assert (done.code, done.err.count("\n")) == (2, 1)
    key = tmp_path / "key"
    key.write_text("wrong\n")
    done = run_mars("knob", "--url", server.url, "--admin-key-file", key)
    assert (done.code, "admin key is missing or wrong" in done.err) == (2, True)
    done = run_mars("knob", "--url", "http://127.0.0.1:1", "--tau", "1")
    assert (done.code, "does not answer" in done.err) == (2, True)
    monkeypatch.delenv("MARS_ADMIN_KEY")
    assert run_mars("knob", "--url", server.url).code == 2
