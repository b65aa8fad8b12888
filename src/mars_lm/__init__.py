"""MARS (Mask AutoRegreSsion): several tokens per forward pass from an ordinary causal LM checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["generate"]

if TYPE_CHECKING:
    from mars_lm.decoding.huggingface import generate


def __getattr__(name: str) -> Any:
    if name == "generate":  # for `custom_generate=`; read late, so that `import mars_lm` stays cheap
        from mars_lm.decoding.huggingface import generate

        return generate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
