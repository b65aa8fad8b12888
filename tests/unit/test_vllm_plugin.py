"""The plugin's parts that need no vLLM."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mars_lm.checkpoint import save
from mars_lm.errors import MarsError
from mars_lm.settings import MarsSettings
from mars_lm.vllm import launch, versions
from mars_lm.vllm.defaults import LiveDefaults, chosen, configured, make_knob, resolve
from mars_lm.vllm.http import MarsMiddleware
from mars_lm.vllm.plan import Layout
from mars_lm.vllm.width import WidthController
from run_mars import run_mars
from tiny import tiny_checkpoint

MARS = MarsSettings(mask_token_id=16, block_size=4)


class TestVersions:
    @pytest.mark.parametrize(("version", "sentence"), [(None, "not installed"), ("9.9.0", "was tested with")])
    def test_another_vllm_is_one_sentence(
        self, monkeypatch: pytest.MonkeyPatch, version: str | None, sentence: str
    ) -> None:
        monkeypatch.setattr(versions, "installed", lambda: version)
        with pytest.raises(MarsError, match=sentence) as caught:
            versions.require_tested()
        assert "\n" not in str(caught.value)

    def test_who_insists_may_try(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(versions, "installed", lambda: "9.9.0")
        monkeypatch.setenv(versions.ANY_VERSION_VARIABLE, "1")
        versions.require_tested()

    def test_importing_the_package_needs_no_vllm(self) -> None:
        code = "import sys, mars_lm.vllm.plugin as p; p.register(); assert 'vllm' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class TestSettings:
    def test_a_requests_own_go_before_the_servers(self) -> None:
        knob = make_knob(MARS, {"exact": False})
        assert resolve(knob, None).tau == 0.95
        mine = resolve(knob, {"tau": 0.5, "block_size": 2.0, "exact": "false", "other": 1})
        assert (mine.tau, mine.block_size, mine.exact) == (0.5, 2, False)
        assert resolve(knob, {"exact": 1}).tau == 0  # exact mode's own default
        assert mine.adaptive
        assert not resolve(knob, {"adaptive": 0}).adaptive
        fixed = MarsSettings(mask_token_id=16, block_size=4, decoding={"adaptive": False})
        assert not resolve(make_knob(fixed, {}), None).adaptive  # the checkpoint's own default
        assert resolve(make_knob(fixed, {"adaptive": True}), None).adaptive

    @pytest.mark.parametrize(
        "extra", [{"tau": 3}, {"exact": "maybe"}, {"adaptive": 2}, {"block_size": 9}, {"rule": "best"}]
    )
    def test_what_makes_no_sense_is_refused(self, extra: dict[str, Any]) -> None:
        with pytest.raises(MarsError):
            resolve(make_knob(MARS, {}), extra)

    def test_only_known_names_are_ours(self) -> None:
        assert chosen({"kv_transfer_params": {}}) == {}
        with pytest.raises(MarsError, match="taux"):
            configured({"mars": {"taux": 1}})

    def test_the_environment_and_the_configuration(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MARS_VLLM", '{"tau": 0.4, "exact": false}')
        assert configured({"mars": {"tau": 0.6}}) == {"tau": 0.6, "exact": False}

    def test_the_file_changes_requests_that_did_not_choose(self, tmp_path: Path) -> None:
        file = tmp_path / "knob.json"
        live = LiveDefaults(MARS, {"knob_file": str(file)})
        own = SimpleNamespace(extra_args={"tau": 0.2})
        assert live.settings("a", None).exact
        file.write_text('{"exact": false, "tau": 0.7}')
        live.refresh()
        assert (live.settings("a", None).tau, live.settings("b", own).tau) == (0.7, 0.2)
        assert not live.settings("b", own).exact


def test_logits_of_drafts_masks_and_the_token_between() -> None:
    """Request 0: two drafts and three masks; request 1: nothing; request 2: one mask."""
    layout = Layout.of([5, 0, 1], [3, 0, 1])
    assert layout.at_drafts().tolist() == [0, 1]
    assert layout.at_next().tolist() == [2, 6, 7]
    assert layout.at_masks(np.array([0, 2])).tolist() == [3, 4, 5, 8]
    assert layout.draft_ids().tolist() == [0, 1]


class TestWidth:
    """A machine whose step costs 10 ms and so much more for each token."""

    def settled(self, per_token: float, requests: int, accepted: float, steps: int = 400) -> int:
        controller = WidthController(3)
        draws = np.random.default_rng(0)
        width = 3
        for _ in range(steps):
            width = controller.width(True, requests)
            fed = requests * (1 + 2 * width)
            controller.cost.observe(fed, 0.01 + per_token * fed)
            for _ in range(requests if width else 0):
                run = int(np.argmin([*(draws.random(width) < accepted), False]))
                controller.observe_accepted(True, width, run)
        return width

    def test_masks_that_cost_nothing_are_all_used(self) -> None:
        assert self.settled(per_token=0.0, requests=4, accepted=0.8) == 3

    def test_none_where_each_costs_a_whole_step(self) -> None:
        assert self.settled(per_token=0.01, requests=16, accepted=0.6) == 0

    def test_fewer_with_more_requests(self) -> None:
        widths = [self.settled(per_token=0.0006, requests=r, accepted=0.65) for r in (1, 4, 16)]
        assert widths == sorted(widths, reverse=True)
        assert widths[0] > widths[-1]

    def test_where_none_are_used_they_are_tried_again(self) -> None:
        controller = WidthController(3)
        for _ in range(20):
            controller.cost.observe(16, 0.016)
            controller.cost.observe(112, 0.112)
            controller.width(True, 16)
            controller.width(False, 16)
        assert controller.width(True, 16) == 0
        probes = [controller.probe() for _ in range(1024)]
        assert sum(probes) == 16


class TestHttp:
    """The middleware in front of an application that says what it got."""

    def ask(
        self, method: str, path: str, body: Any, named: dict[str, Any], key: str = "k"
    ) -> tuple[int, Any]:
        async def application(scope: Any, receive: Any, send: Any) -> None:
            message = await receive()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": message["body"]})

        config = SimpleNamespace(
            model_config=SimpleNamespace(hf_config=SimpleNamespace(mars=MARS.to_dict())),
            additional_config={"mars": named},
        )
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [(b"authorization", f"Bearer {key}".encode())],
            "app": SimpleNamespace(state=SimpleNamespace(vllm_config=config)),
        }
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        asyncio.run(MarsMiddleware(application)(scope, receive, send))
        return sent[0]["status"], json.loads(sent[1]["body"])

    def test_the_knob_writes_the_file_that_the_scheduler_reads(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("MARS_ADMIN_KEY", "k")
        named = {"knob_file": str(tmp_path / "knob.json")}
        status, said = self.ask("PATCH", "/mars/settings", {"exact": False}, named)
        assert (status, said["tau"]) == (200, 0.95)
        assert self.ask("GET", "/mars/settings", None, named)[1] == said
        live = LiveDefaults(MARS, named)
        live.refresh()
        assert not live.settings("a", None).exact
        assert self.ask("PATCH", "/mars/settings", {"tau": 7}, named)[0] == 400
        assert self.ask("PATCH", "/mars/settings", {"tua": 1}, named)[0] == 400
        assert self.ask("GET", "/mars/settings", None, named, key="wrong")[0] == 401

    def test_without_an_admin_key_there_is_no_knob(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("MARS_ADMIN_KEY", raising=False)
        assert self.ask("GET", "/mars/settings", None, {})[0] == 403

    def test_senseless_settings_are_a_400_and_good_ones_pass_unchanged(self) -> None:
        body = {"prompt": "x", "vllm_xargs": {"tau": 0.5}}
        assert self.ask("POST", "/v1/completions", body, {}) == (200, body)
        status, said = self.ask("POST", "/v1/completions", {**body, "vllm_xargs": {"tau": 5}}, {})
        assert status == 400
        assert "tau is 5" in said["error"]["message"]


class TestLaunch:
    def test_ours_go_first_and_vllms_flags_are_passed_on(self) -> None:
        line = launch.command("folder", 4, {"tau": 0.5}, ["--max-num-seqs", "8"])
        assert line[line.index("--model") + 1] == "folder"
        assert line[-2:] == ["--max-num-seqs", "8"]
        speculative = json.loads(line[line.index("--speculative-config") + 1])
        assert speculative["num_speculative_tokens"] == 6
        assert json.loads(line[line.index("--additional-config") + 1]) == {"mars": {"tau": 0.5}}

    def test_a_flag_that_is_set_twice_is_refused(self) -> None:
        with pytest.raises(MarsError, match="--worker-cls"):
            launch.command("folder", 4, {}, ["--worker-cls=x"])

    def test_an_ordinary_model_gets_vllm_as_it_is(self) -> None:
        assert "--worker-cls" not in launch.command("folder", None, {}, [])

    def test_merged_weights_are_replaced_at_the_next_start(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "a").mkdir()
        monkeypatch.chdir(tmp_path)
        name = launch.merged_name(None, "a")
        assert name == launch.merged_name(None, str(tmp_path / "a"))
        assert len({name, launch.merged_name("a", None), launch.merged_name("hub/base", "a")}) == 3

    def test_plain_weights_are_served_from_where_they_are(self, tmp_path: Path) -> None:
        made = tiny_checkpoint(block_size=3)
        save(made.model, made.tokenizer, tmp_path / "m")
        assert launch.plain_weights(str(tmp_path / "m"), None) == (str(tmp_path / "m"), 3)

    def test_the_command_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        got: list[Any] = []
        monkeypatch.setattr(launch, "run", lambda *arguments: got.append(arguments))
        done = run_mars(
            "serve", "--engine", "vllm", "--model", "m", "--lossy", "--rows", 4, "--enforce-eager"
        )
        assert done.code == 0
        model, adapter, named, flags = got[0]
        assert (model, adapter, named) == ("m", None, {"exact": False})
        assert flags[-1] == "--enforce-eager"
        assert sorted(flags[:-1]) == sorted(["--host", "127.0.0.1", "--max-num-seqs", "4"])
        assert "--ui belongs" in run_mars("serve", "--engine", "vllm", "--ui").err
        assert "No such option" in run_mars("serve", "--enforce-eager").err
