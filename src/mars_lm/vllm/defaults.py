"""The server's defaults inside vLLM: from its configuration, from the environment, and live from a file."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mars_lm.errors import MarsError
from mars_lm.serving.knob import FIELDS, Defaults, Knob
from mars_lm.settings import RULES, DecodingSettings, MarsSettings, check_block_size, decoding_settings

logger = logging.getLogger("vllm.mars_lm")

VARIABLE = (
    "MARS_VLLM"  # a JSON object of the fields below; vLLM's --additional-config '{"mars": …}' goes first
)
KNOB_FILE = "knob_file"
_LOOK_EVERY = 0.1  # seconds between looks at the knob's file


def configured(additional_config: Any) -> dict[str, Any]:
    """What vLLM's additional configuration and the environment name: the knob's fields, and knob_file.

    Raises:
        MarsError: the environment's value is no JSON object, or a name is unknown.
    """
    text = os.environ.get(VARIABLE, "{}")
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise MarsError(f'{VARIABLE} is {text!r}, expected a JSON object such as {{"tau": 0.9}}.')
    if isinstance(additional_config, Mapping):
        values.update(additional_config.get("mars") or {})
    known = (*FIELDS, KNOB_FILE)
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise MarsError(f"The MARS settings name {', '.join(unknown)}; known are {', '.join(known)}.")
    return values


def make_knob(mars: MarsSettings | None, named: Mapping[str, Any]) -> Knob:
    """The knob at its start.

    Raises:
        MarsError: a value is out of range.
    """
    chosen = {key: value for key, value in named.items() if key in FIELDS}
    settings = decoding_settings(mars, chosen)
    if settings.adaptive is None:
        settings = dataclasses.replace(settings, adaptive=True)  # in lossy mode as well
    defaults = Defaults(**{field: getattr(settings, field) for field in FIELDS})
    return Knob(defaults, None if mars is None else mars.block_size)


def read_knob_file(file: Path) -> dict[str, Any]:
    """The settings that a knob's file names; none where there is no file.

    Raises:
        MarsError: it holds no JSON object of known fields.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        values = None
    if not isinstance(values, dict) or not set(values) <= set(FIELDS):
        raise MarsError(f"{file} is not a JSON object of {', '.join(FIELDS)}.")
    return values


def chosen(extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a request names in vLLM's `vllm_xargs` (`SamplingParams.extra_args`); other names are not ours.

    JSON's true arrives as 1 in vLLM's typed field, so numbers and words may say yes and no.

    Raises:
        MarsError: exact or adaptive is neither, or there is no such rule.
    """
    values = {name: extra_args[name] for name in FIELDS if name in extra_args} if extra_args else {}
    for name in ("exact", "adaptive"):
        if name not in values:
            continue
        said = str(values[name]).lower()
        if said not in ("true", "false", "1", "0", "1.0", "0.0"):
            raise MarsError(f"{name} is {values[name]!r}, expected true or false.")
        values[name] = said in ("true", "1", "1.0")
    if values.get("rule", RULES[0]) not in RULES:
        raise MarsError(f"rule is {values['rule']!r}, expected one of {', '.join(RULES)}.")
    size = values.get("block_size")
    if isinstance(size, float) and size.is_integer():
        values["block_size"] = int(size)
    return values


def resolve(knob: Knob, extra_args: Mapping[str, Any] | None) -> DecodingSettings:
    """A request's settings at this moment.

    Raises:
        MarsError: a value is out of range, or more than the checkpoint was trained for.
    """
    settings = DecodingSettings(**knob.resolve(chosen(extra_args)))
    if knob.trained_block_size is not None:
        check_block_size(settings.block_size, knob.trained_block_size)
    return settings


class LiveDefaults:
    """The defaults of this moment, and each request's settings under them.

    The file is read by the scheduler alone, which tells the workers what holds in each step.
    """

    def __init__(self, mars: MarsSettings | None, named: Mapping[str, Any]) -> None:
        self._mars, self._named = mars, dict(named)
        self._file = Path(named[KNOB_FILE]) if named.get(KNOB_FILE) else None
        self._stamp: tuple[int, int] | None = None
        self._next_look = 0.0
        self._of: dict[str, DecodingSettings] = {}
        self.knob = make_knob(mars, named)

    @classmethod
    def of(cls, vllm_config: Any, mars: MarsSettings | None) -> LiveDefaults:
        """Those that vLLM's configuration and the environment name."""
        return cls(mars, configured(vllm_config.additional_config))

    def refresh(self) -> None:
        """Look at the file, if there is one and it is time. A file that can't be used changes nothing."""
        now = time.monotonic()
        if self._file is None or now < self._next_look:
            return
        self._next_look = now + _LOOK_EVERY
        try:
            status = self._file.stat()
            stamp = (status.st_mtime_ns, status.st_ino)
        except OSError:
            return
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            knob = make_knob(self._mars, self._named)
            knob.change("admin", read_knob_file(self._file))
        except MarsError as error:
            logger.warning("%s Nothing was changed.", error)
            return
        self.knob = knob
        self._of.clear()
        logger.info("MARS settings: %s", knob.defaults)

    def settings(self, request_id: str, params: Any) -> DecodingSettings:
        """A request's settings at this moment."""
        known = self._of.get(request_id)
        if known is None:
            try:
                known = resolve(self.knob, getattr(params, "extra_args", None))
            except MarsError as error:
                logger.warning("Request %s: %s It is decoded with the server's settings.", request_id, error)
                known = resolve(self.knob, None)
            self._of[request_id] = known
        return known

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._of.pop(request_id, None)
