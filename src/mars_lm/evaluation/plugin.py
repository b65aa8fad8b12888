"""`lm_eval --model mars`: `plugin.pth` imports this where the command `lm_eval` starts, and nowhere else."""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):
    import lm_eval.models  # noqa: F401  (fills the registry, which it would not do once it holds something)
    from lm_eval.api.registry import model_registry

    if "mars" not in model_registry:
        model_registry.register("mars", target="mars_lm.evaluation.harness_model:MarsLM")
