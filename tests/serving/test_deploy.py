"""The dashboard and the alerts speak of metrics that there are; the unit and the image pass their linters."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:mars|process)_\w+", expression))


def test_dashboard_and_alerts_name_metrics_that_exist(server):
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    known = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
    known |= {name + end for name in known for end in ("_bucket", "_sum", "_count")}
    dashboard = json.loads((ROOT / "deploy/grafana.json").read_text())
    used = {m for p in dashboard["panels"] for t in p["targets"] for m in metrics_in(t["expr"])}
    rules = yaml.safe_load((ROOT / "deploy/alerts.yml").read_text())
    used |= {m for group in rules["groups"] for rule in group["rules"] for m in metrics_in(rule["expr"])}
    assert len(used) > 15
    assert used <= known
    # And the documentation names none that is not there.
    documented = set(re.findall(r"`(mars_\w+)[`{]", (ROOT / "docs/serving.md").read_text()))
    assert documented - {"mars_controller_"} <= known


def test_options_in_the_documentation_exist():
    from run_mars import run_mars

    text = (ROOT / "docs/serving.md").read_text() + (ROOT / "deploy/mars.service").read_text()
    options = {"serve": run_mars("serve", "--help").out, "knob": run_mars("knob", "--help").out}
    lines = [re.split(r"mars (serve|knob)", line)[1:3] for line in text.splitlines() if "mars " in line]
    for command, rest in (pair for pair in lines if len(pair) == 2):
        for option in re.findall(r"(?<!\S)--[a-z][a-z-]+", rest.split("#")[0].split("`")[0]):
            assert option[:16] in options[command], option


def test_the_unit_passes_systemds_check(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = (ROOT / "deploy/mars.service").read_text()
    assert "/opt/mars/bin/mars serve" in unit
    copy = tmp_path / "mars.service"
    copy.write_text(unit.replace("/opt/mars/bin/mars", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_alerts_pass_prometheus_check():
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    subprocess.run(["promtool", "check", "rules", ROOT / "deploy/alerts.yml"], check=True, timeout=60)


def test_the_image_copies_what_is_there_and_runs_as_a_user():
    text = (ROOT / "Dockerfile").read_text()
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists()
    last_stage = text[text.rindex("\nFROM ") :]
    assert re.search(r"^USER (?!root)", last_stage, re.MULTILINE)
    assert "ENTRYPOINT [" in last_stage
