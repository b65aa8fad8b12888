"""MARS decoding for whoever has transformers, and loads this folder's model with trust_remote_code=True.

    model.generate(**inputs, max_new_tokens=100, custom_generate=folder, trust_remote_code=True)

`from_pretrained(folder, trust_remote_code=True)` puts it in the place of the model's own `generate`.
"""

from __future__ import annotations

from typing import Any

from mars_lm.decoding.huggingface import generate as mars_generate


def generate(
    *args: Any,
    model: Any,
    custom_generate: Any = None,
    trust_remote_code: bool | None = None,
    **kwargs: Any,
) -> Any:
    """What `model.generate` gives, decoded by MARS: all its arguments, and those of mars_lm.generate."""
    whole = type(model).generate  # the model's own attribute may be this function
    if custom_generate is not None:
        return whole(
            model, *args, custom_generate=custom_generate, trust_remote_code=trust_remote_code, **kwargs
        )
    # The C kernels stay with the package.
    return whole(model, *args, custom_generate=mars_generate, **{"kernels": "torch", **kwargs})
