"""What vLLM calls in each of its processes at the start (`vllm.general_plugins`)."""

from __future__ import annotations

import logging

from mars_lm.errors import MarsError
from mars_lm.vllm.versions import require_tested

logger = logging.getLogger("vllm.mars_lm")


def register() -> None:
    """Say that the plugin is here, or in one sentence that this vLLM is untested; vLLM itself is unchanged.

    The plugin takes part only where its worker, scheduler and proposer are named.
    """
    try:
        require_tested()
    except MarsError as error:
        logger.warning("%s", error)
        return
    logger.debug("mars_lm.vllm is available.")
