"""Which architectures are taken, and with what sentence the others are refused."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import AutoConfig

from mars_lm.checkpoint import check_supported
from mars_lm.errors import MarsError
from tiny import FAMILIES, tiny_config, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_full_attention_are_supported(family: str) -> None:
    check_supported(tiny_config(family))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_cache_of_a_supported_family_rewinds(family: str, tied: bool) -> None:
    """What "supported" promises: entries can be dropped from the end without a trace."""
    model = tiny_model(family, tied=tied)
    ids = torch.tensor([[5, 9, 40, 7, 77, 12, 30, 8]])
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        wanted = model(ids).logits[:, 5:]
        model(torch.cat([ids[:, :5], torch.full((1, 3), 99)], dim=1), past_key_values=cache)
        cache.crop(-3)
        got = model(ids[:, 5:], past_key_values=cache, position_ids=torch.arange(5, 8)[None]).logits
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "values", "reason"),
    [
        ("mistral", {"sliding_window": 64}, "sliding-window"),
        ("phi4_multimodal", {}, "multi-modal"),
        ("phi3", {"sliding_window": 64}, "sliding-window"),
        ("starcoder2", {"sliding_window": 64}, "sliding-window"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
            "sliding-window",
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            "sliding-window",
        ),
        ("gemma2", {}, "sliding-window"),
        ("gemma3_text", {}, "sliding-window"),
        ("gpt_oss", {}, "sliding-window"),
        ("cohere2", {}, "sliding-window"),
        ("ministral", {}, "sliding-window"),
        ("gpt_neo", {}, "local attention"),
        ("llama4_text", {}, "chunks"),
        ("mamba", {}, "state-space"),
        ("mamba2", {}, "state-space"),
        ("falcon_mamba", {}, "state-space"),
        ("rwkv", {}, "recurrent"),
        ("recurrent_gemma", {}, "recurrent"),
        ("jamba", {}, "state-space"),
        ("bamba", {}, "state-space"),
        ("zamba2", {}, "state-space"),
        ("nemotron_h", {}, "recurrent"),
        ("falcon_h1", {}, "state-space"),
        ("granitemoehybrid", {}, "recurrent"),
        ("qwen3_next", {}, "recurrent"),
        ("lfm2", {}, "state-space"),
        ("minimax", {}, "recurrent"),
        ("xlstm", {}, "not rotary"),
        ("deepseek_v3", {}, "MLA"),
        ("minicpm3", {}, "MLA"),
        ("deepseek_v32", {}, "MLA"),
        ("doge", {}, "local attention"),
        ("mllama_text_model", {}, "not a causal language model"),
        ("t5", {}, "encoder-decoder"),
        ("bart", {}, "encoder-decoder"),
        ("bert", {}, "not rotary"),
        ("bloom", {}, "ALiBi"),
        ("mpt", {}, "ALiBi"),
        ("falcon", {"alibi": True}, "ALiBi"),
        ("gemma3", {}, "multi-modal"),
        ("qwen2_vl", {}, "multi-modal"),
        ("vit", {}, "not a causal language model"),
    ],
)
def test_other_layers_are_refused_with_the_reason(model_type: str, values: dict, reason: str) -> None:
    with pytest.raises(MarsError, match=reason) as refusal:
        check_supported(AutoConfig.for_model(model_type, **values))
    assert "full attention" in str(refusal.value)  # says what would do
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("mistral", {"sliding_window": 4096, "max_position_embeddings": 4096}),  # a window never outgrown
        ("qwen2", {"use_sliding_window": False, "sliding_window": 64}),  # as Qwen2.5's config.json has it
        ("falcon", {}),
        ("gpt_neox", {}),
        ("gpt2", {}),
        ("mixtral", {}),
        ("olmo2", {}),
        ("stablelm", {}),
    ],
)
def test_full_attention_is_told_by_the_config_and_not_by_a_list_of_names(
    model_type: str, values: dict
) -> None:
    check_supported(AutoConfig.for_model(model_type, **values))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_frequencies_that_follow_the_length_are_refused_beyond_the_original_context(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    family = "phi3" if kind == "longrope" else "llama"
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    with pytest.raises(MarsError, match="set max_position_embeddings to 64"):
        check_supported(tiny_config(family, rope_parameters=rope, original_max_position_embeddings=64))
    check_supported(
        tiny_config(
            family, rope_parameters=rope, original_max_position_embeddings=64, max_position_embeddings=64
        )
    )


def test_static_rope_scaling_is_supported() -> None:
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    check_supported(tiny_config("llama", rope_parameters=rope))
