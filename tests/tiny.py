"""Tiny random models and tokenizers of every supported family, made in milliseconds and without a network."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mars_lm.checkpoint import Checkpoint, make_mars_ready

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "phi", "phi3")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The special tokens of SmolLM2, in short: named ones, chat ones, and markers of a pre-training corpus.
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<gh_stars>", "<empty_output>")
_TEXT = (
    "The quick brown fox jumps over the lazy dog. A user asks a question and the assistant answers it:\n"
    "def add(a, b):\n    return a + b\n\nsystem user assistant hello world 0 1 2 3 4 5 6 7 8 9 10 11 12\n"
)


@functools.lru_cache
def _bpe(special_tokens: tuple[str, ...]) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300 + len(special_tokens),
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in special_tokens],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    return tokenizer.to_str()


def tiny_tokenizer(
    *,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    chat_template: str | None = CHATML,
    eos_token: str | None = "<|im_end|>",
    **named: Any,
) -> Any:
    """A byte-level BPE tokenizer of about 300 tokens, with ChatML as its chat template.

    Args:
        special_tokens: they get the first ids.
        chat_template: None for a tokenizer without one.
        eos_token: None for a tokenizer without an end token.
        **named: other named tokens, such as pad_token, bos_token or mask_token.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_bpe(tuple(special_tokens))), eos_token=eos_token, **named
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def tiny_config(family: str = "llama", *, rows: int = 320, tied: bool = True, **overrides: Any) -> Any:
    """The configuration of a model of two layers and 32 dimensions."""
    values: dict[str, Any] = {
        "vocab_size": rows,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family in ("qwen3", "gemma"):
        values["head_dim"] = 8
    if family == "mistral":
        values["sliding_window"] = None
    return transformers.AutoConfig.for_model(family, **{**values, **overrides})


def tiny_model(
    family: str = "llama", *, rows: int = 320, tied: bool = True, seed: int = 0, **overrides: Any
) -> Any:
    """A random float32 model; biases and norms are random too, so that none can be left out unseen."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            tiny_config(family, rows=rows, tied=tied, **overrides)
        ).float()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.3)
                else:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def tiny_checkpoint(
    family: str = "llama",
    *,
    tied: bool = True,
    mars: bool = True,
    block_size: int = 4,
    seed: int = 0,
    **overrides: Any,
) -> Checkpoint:
    """A tiny model with its tokenizer; MARS-ready (mask in a free row) unless `mars` is False."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(family, tied=tied, seed=seed, **overrides)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    settings = make_mars_ready(model, tokenizer, block_size=block_size, base_model=None) if mars else None
    return Checkpoint(model=model, tokenizer=tokenizer, mars=settings)
