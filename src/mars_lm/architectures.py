"""Which models the method's cache can hold: full causal attention in every layer."""

from __future__ import annotations

from typing import Any

from mars_lm.errors import MarsError

# What the CPU kernels run (mars_lm.decoding.native): attention with rotary positions over whole heads, RMS
# norms, a SiLU-gated MLP, no biases but q, k and v's.
KERNEL_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

# Decoder-only models whose positions are learned vectors: they take position ids, as rotary models do.
_LEARNED_POSITIONS = ("gpt2", "gpt_bigcode")

# Attributes that only models with a kind of layer other than plain full attention have, and what they tell.
_OTHER_LAYERS = {
    "recurrent or state-space layers": (
        "state_size",
        "conv_kernel",
        "conv_L_cache",
        "conv_kernel_size",
        "mamba_d_state",
        "mamba_d_conv",
        "mamba_num_heads",
        "use_mamba_kernels",
        "block_types",
        "lru_width",
        "attention_hidden_size",
        "linear_conv_kernel_dim",
        "linear_num_key_heads",
        "linear_attn_alpha_factor",
        "linear_head_dim",
        "n_recurrent_layers",
        "H_cycles",
    ),
    "latent attention (MLA), which caches compressed vectors instead of keys and values": ("kv_lora_rank",),
    "attention in chunks": ("attention_chunk_size",),
    "local attention": (
        "attention_window_size",
        "window_size",
        "attention_types",
        "local_attention",
        "local_attention_window_len",
        "keep_window_size",
        "sliding_window_size",
    ),
    "sparse attention": ("index_topk", "index_local_blocks", "o_lora_rank"),
    "cross-attention": ("cross_attention_layers", "cross_attn_k"),
}


def check_supported(config: Any) -> None:
    """Refuse a model that the method's cache cannot hold (SPEC 5, 7).

    The cache keeps one key and one value for every position (slot = position), and void entries are
    overwritten in place. A layer that forgets old positions, or folds them into a state, cannot be rewound.

    Args:
        config: the model's `PretrainedConfig`.
    Raises:
        MarsError: the model has such layers, or is no decoder-only causal language model.
    """
    reason = _why_not(config)
    if reason:
        name = getattr(config, "model_type", None) or type(config).__name__
        raise MarsError(
            f"This model ({name}) cannot be used: {reason}. MARS needs a decoder-only causal language model "
            "whose layers all have full attention, such as Llama, SmolLM2, Qwen2, Qwen2.5, Qwen3, Gemma (1), "
            "Phi, or Mistral without a sliding window."
        )


def _why_not(config: Any) -> str | None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = getattr(config, "model_type", None)
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    try:
        text_config = config.get_text_config()
    except ValueError:
        text_config = None
    parts = ("vision_config", "audio_config", "audio_encoder_config")
    if text_config is not config or any(_is_set(getattr(config, part, None)) for part in parts):
        return "it is a multi-modal model, with parts that are no language model"
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "it is not a causal language model that transformers knows"
    return _other_layers(config) or _sliding_window(config) or _positions(config)


def _other_layers(config: Any) -> str | None:
    for what, attributes in _OTHER_LAYERS.items():
        if any(_is_set(getattr(config, attribute, None)) for attribute in attributes):
            return f"it has {what}, and the method's cache cannot hold that"
    layer_types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    # A window that the sliding layers never outgrow is judged by `_sliding_window`.
    for kind in sorted(set(layer_types) - {"full_attention", "sliding_attention"}):
        return f"it has layers of type {kind}, and the method's cache cannot hold that"
    if getattr(config, "alibi", False) or getattr(config, "model_type", None) in ("bloom", "mpt"):
        return "its positions are ALiBi biases, which the method's attention mask does not carry"
    return None


def _is_set(value: Any) -> bool:
    return value is not None and value is not False


def _sliding_window(config: Any) -> str | None:
    layer_types = getattr(config, "layer_types", None) or ()
    window = getattr(config, "sliding_window", None)
    # Some families keep a window in the config that no layer uses. `use_sliding_window` is the user's word.
    unused = bool(layer_types) and "sliding_attention" not in layer_types
    if unused and not getattr(config, "use_sliding_window", False):
        return None
    if window is None:
        return (
            "some of its layers are sliding-window attention" if "sliding_attention" in layer_types else None
        )
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and isinstance(window, int) and window >= longest:
        return None
    return (
        f"it has sliding-window attention (sliding_window = {window}, context = {longest}), and the method's "
        "cache keeps every position for every layer"
    )


def _positions(config: Any) -> str | None:
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        if getattr(config, "model_type", None) in _LEARNED_POSITIONS or getattr(config, "rotary_dim", None):
            return None
        return "its positions are not rotary, and models of that kind have not been tried"
    kinds = {rope.get("rope_type")} | {v.get("rope_type") for v in rope.values() if isinstance(v, dict)}
    for kind in sorted({"dynamic", "longrope"} & kinds):
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if isinstance(original, int) and config.max_position_embeddings <= original:
            continue
        # The frequencies change with the longest row of the batch: rows would not be independent, and keys
        # cached before the change would no longer fit.
        return (
            f"its rotary frequencies change with the length of the text (rope_type '{kind}'), so cached keys "
            f"go stale; to use it up to its original context, set max_position_embeddings to {original} in "
            "its config.json"
        )
    return None
