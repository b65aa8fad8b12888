"""`mars knob`: see and turn a running server's settings."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer

from mars_lm.cli import options
from mars_lm.cli.serve import ADMIN_KEY_VARIABLE
from mars_lm.errors import MarsError


def knob(
    url: Annotated[str, typer.Option(help="The server's address.")] = "http://127.0.0.1:8000",
    tau: options.Tau = None,
    rule: options.DraftRule = None,
    block_size: options.BlockSize = None,
    exact: options.Exact = None,
    adaptive: options.Adaptive = None,
    controller: Annotated[
        bool | None,
        typer.Option(
            "--controller/--no-controller",
            help="Let the load turn tau, or hold it; a --tau holds it too.",
            show_default=False,
            rich_help_panel="Decoding",
        ),
    ] = None,
    admin_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"The server's admin key; or the variable {ADMIN_KEY_VARIABLE}."),
    ] = None,
) -> None:
    """Show a running server's settings, or change them.

    In force at the next forward of requests that did not choose their own; nothing is dropped or restarted.
    """
    named = {
        "tau": tau,
        "rule": rule,
        "block_size": block_size,
        "exact": exact,
        "adaptive": adaptive,
        "controller": controller,
    }
    changes = {name: value for name, value in named.items() if value is not None}
    settings = _ask(url, _key(admin_key_file), changes)
    for name, value in settings.items():
        if value is not None:
            print(f"{name}: {json.dumps(value)}")


def _key(file: Path | None) -> str:
    if file is None:
        key = os.environ.get(ADMIN_KEY_VARIABLE, "")
        if not key:
            raise MarsError(
                f"The server's admin key is needed: name its file with --admin-key-file, or set "
                f"{ADMIN_KEY_VARIABLE}."
            )
        return key
    try:
        lines = file.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise MarsError(f"The key file {file} can't be read ({reason}).") from None
    if not lines:
        raise MarsError(f"The key file {file} is empty.")
    return lines[0]


def _ask(url: str, key: str, changes: dict[str, Any]) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise MarsError(f"--url is {url!r}, expected such as http://127.0.0.1:8000.")
    request = urllib.request.Request(
        url.rstrip("/") + "/mars/settings",
        method="PATCH" if changes else "GET",
        data=json.dumps(changes).encode() if changes else None,
        headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            settings = json.load(answer)
        if not isinstance(settings, dict):
            raise ValueError
    except urllib.error.HTTPError as error:
        raise MarsError(_told(error)) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise MarsError(f"{url} does not answer as a mars server does ({reason or 'no JSON'}).") from None
    return settings


def _told(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"The server answers {error.code} {error.reason}."
