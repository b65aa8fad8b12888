"""`Engine(kernels="compile")`: the eager tokens, graphs that outlast the warm-up, and the fallback."""

from __future__ import annotations

import logging
import random
import shutil

import pytest
import torch
from test_decoding_invariant import others

from decoding_reference import biased
from mars_lm.decoding import Engine
from mars_lm.decoding.compiled import CompiledForward, CompiledInvariantForward
from mars_lm.decoding.executors import make_forward
from mars_lm.settings import DecodingSettings
from tiny import tiny_checkpoint

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="torch.compile needs a C++ compiler"
)
EXACT = DecodingSettings(max_new_tokens=30, ignore_eos=True, adaptive=False)


def texts(checkpoint, kernels: str, **options) -> list[list[int]]:
    engine = Engine(checkpoint, kernels=kernels, max_rows=3, max_length=128, prefill_chunk=24, **options)
    draw = random.Random(0)
    prompts = [[draw.randrange(5, 300) for _ in range(length)] for length in (1, 9, 40, 70, 2)]
    requests = [engine.add(prompt, EXACT) for prompt in prompts]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in engine.stream():
            pass
    return [engine.result(request).token_ids for request in requests]


@needs_compiler
@pytest.mark.parametrize("family", ["llama", "gemma", "phi"])
def test_the_tokens_are_the_eager_forwards_and_no_step_compiles_anew(family, caplog):
    """Prompts in chunks, batches, drafts and masks: all within the graphs that the warm-up left."""
    checkpoint = biased(tiny_checkpoint(family))
    with caplog.at_level(logging.INFO, "mars_lm"):
        compiled = texts(checkpoint, "compile")
    assert compiled == texts(checkpoint, "torch")
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "compiled the model's layers in" in caplog.text


@needs_compiler
def test_compiled_and_invariant_at_once():
    checkpoint = tiny_checkpoint("llama")
    forward = make_forward(checkpoint.model, 1, 32, "compile", invariant=True)
    assert isinstance(forward, CompiledInvariantForward)
    assert others(CompiledInvariantForward, checkpoint, 50, trials=2) == 0


def test_code_that_cannot_be_compiled_runs_without_and_one_warning_says_so(caplog):
    checkpoint = biased(tiny_checkpoint("llama"))

    class Untraceable(torch.nn.SiLU):
        def forward(self, x):
            torch._dynamo.graph_break()
            return super().forward(x)

    for layer in checkpoint.model.base_model.layers:
        layer.mlp.act_fn = Untraceable()
    expected = texts(checkpoint, "torch")
    with caplog.at_level(logging.INFO, "mars_lm"):
        assert texts(checkpoint, "compile") == expected
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Decoding without torch.compile" in caplog.text


def test_no_compiler_is_no_error_either(monkeypatch, caplog):
    def broken(function, **_):
        def run(*_, **__):
            raise RuntimeError("no working C++ compiler")

        return run

    checkpoint = biased(tiny_checkpoint("llama"))
    monkeypatch.setattr(torch, "compile", broken)
    forward = make_forward(checkpoint.model, 1, 32, "compile")
    assert isinstance(forward, CompiledForward)
    assert "no working C++ compiler" in caplog.text
    assert texts(checkpoint, "compile") == texts(checkpoint, "torch")
    # The model is as it was: nothing of ours is left in its layers.
    assert not any("forward" in layer.__dict__ for layer in checkpoint.model.base_model.layers)
