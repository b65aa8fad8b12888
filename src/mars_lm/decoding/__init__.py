"""Decoding: several tokens per forward, the words of AR (SPEC 3 to 6)."""

from mars_lm.decoding.engine import Engine, GenerationResult, StepOutput, generate
from mars_lm.decoding.window import TokenLogprob

__all__ = ["Engine", "GenerationResult", "StepOutput", "TokenLogprob", "generate"]
