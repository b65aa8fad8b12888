"""GGUF files: read into plain models that save and load like any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mars_lm.checkpoint import encode_chat, end_token_ids, load, make_mars_ready, save
from mars_lm.errors import MarsError
from mars_lm.gguf_file import read_metadata
from tiny import CHATML, tiny_tokenizer

HIDDEN, HEADS, KV_HEADS, LAYERS, MLP = 64, 4, 2, 2, 96
KV = HIDDEN * KV_HEADS // HEADS


def write_gguf(
    path: Path, *, arch: str = "llama", pre: str = "smollm", skip: str = "", quantised: bool = True
) -> Path:
    """A tiny Llama in a GGUF file, with the metadata that llama.cpp's converter writes."""
    tokenizer = tiny_tokenizer()
    data = tokenizer.backend_tokenizer
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    merges = [" ".join(pair) for pair in json.loads(data.to_str())["model"]["merges"]]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("Tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 5 + [gguf.TokenType.NORMAL] * (len(tokens) - 5))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)

    rng = np.random.default_rng(0)
    shapes = {"token_embd.weight": (len(tokens), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        for name, shape in {
            "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN), "attn_k": (KV, HIDDEN), "attn_v": (KV, HIDDEN),
            "ffn_gate": (MLP, HIDDEN), "ffn_up": (MLP, HIDDEN), "ffn_down": (HIDDEN, MLP),
        }.items():  # fmt: skip
            shapes[f"blk.{layer}.{name}.weight"] = shape
    for name, shape in shapes.items():
        if skip and skip in name:
            continue
        tensor = (0.2 * rng.standard_normal(shape)).astype(np.float32) + (len(shape) == 1)
        if quantised and len(shape) == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_what_is_saved_is_a_plain_checkpoint(tiny_gguf: Path, tmp_path: Path) -> None:
    made = load(tiny_gguf, dtype="float32", device="cpu")
    assert made.mars is None
    assert not hasattr(made.model.config, "quantization_config")
    assert made.tokenizer.model_max_length == 256
    settings = make_mars_ready(made.model, made.tokenizer, block_size=4, base_model="tiny")
    assert made.tokenizer.convert_ids_to_tokens(settings.mask_token_id) == "<empty_output>"
    save(made.model, made.tokenizer, tmp_path / "saved")
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    wanted, got = made.model.state_dict(), plain.state_dict()
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)
    again = load(tmp_path / "saved", dtype="float32", device="cpu")
    assert again.mars == settings
    messages = [{"role": "user", "content": " naïve\n\nquestion  <|im_end|> 12 "}]
    assert encode_chat(again, messages) == encode_chat(made, messages)
    with torch.no_grad():
        ids = torch.tensor([encode_chat(made, messages)])
        new = [m.generate(ids, max_new_tokens=8, do_sample=False) for m in (made.model, plain)]
    assert torch.equal(*new)


def test_end_of_a_turn_is_honoured(tiny_gguf: Path) -> None:
    made = load(tiny_gguf, dtype="float32", device="cpu")
    assert made.tokenizer.convert_tokens_to_ids("<|im_end|>") in end_token_ids(made)


def test_tokens_are_those_of_the_tokenizer_that_was_packed(tiny_gguf: Path) -> None:
    made = load(tiny_gguf, dtype="float32", device="cpu")
    packed = tiny_tokenizer()
    for text in ("hello world", "a question, answered: 12"):
        assert packed.decode(made.tokenizer(text).input_ids) == text
    assert made.tokenizer.get_vocab() == packed.get_vocab()


def test_digits_are_split_as_the_vocabulary_was_learned(tiny_gguf: Path, tmp_path: Path) -> None:
    """SmolLM's merges were learned on single digits, so spaces and newlines before one stay together."""
    tokenizer = load(tiny_gguf, dtype="float32", device="cpu").tokenizer
    pieces = [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a\n\n12  3")]
    assert pieces == ["a", "ĊĊ", "1", "2", "ĠĠ", "3"]
    other = load(write_gguf(tmp_path / "other.gguf", pre="gpt-2"), dtype="float32", device="cpu").tokenizer
    pieces = [piece for piece, _ in other.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a\n\n12  3")]
    assert pieces == ["a", "Ċ", "Ċ", "12", "Ġ", "Ġ3"]


def test_metadata(tiny_gguf: Path) -> None:
    metadata = read_metadata(tiny_gguf)
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.context_length"] == 256
    assert metadata["llama.rope.freq_base"] == 10000.0
    assert metadata["tokenizer.ggml.pre"] == "smollm"
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert metadata["tokenizer.chat_template"] == CHATML
    assert "tokenizer.ggml.tokens" not in metadata


def test_silence(tiny_gguf: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(tiny_gguf, dtype="float32", device="cpu")
    said = capfd.readouterr()
    assert said.err + said.out == ""


def test_in_bfloat16(tiny_gguf: Path) -> None:
    exact = load(tiny_gguf, dtype="float32", device="cpu").model
    rounded = load(tiny_gguf, dtype="bfloat16", device="cpu").model
    for name, parameter in exact.named_parameters():
        assert torch.equal(parameter.bfloat16(), rounded.get_parameter(name)), name


def sentence(path: Path) -> str:
    with pytest.raises(MarsError) as refusal:
        load(path, dtype="float32", device="cpu")
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


class TestBadFiles:
    def test_unsupported_architecture(self, tmp_path: Path) -> None:
        assert "rwkv" in sentence(write_gguf(tmp_path / "other.gguf", arch="rwkv6"))

    def test_not_gguf_at_all(self, tmp_path: Path) -> None:
        (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04 whatever")
        assert "is not a GGUF file" in sentence(tmp_path / "x.gguf")
        (tmp_path / "x.gguf").write_bytes(b"")
        assert "is not a GGUF file" in sentence(tmp_path / "x.gguf")

    def test_cut_short_anywhere(self, tiny_gguf: Path, tmp_path: Path) -> None:
        whole = tiny_gguf.read_bytes()
        for size in (4, 20, 200, len(whole) // 3, len(whole) // 2, len(whole) - 1000, len(whole) - 1):
            (tmp_path / "cut.gguf").write_bytes(whole[:size])
            assert "cut.gguf cannot be loaded: the file is damaged or cut short" in sentence(
                tmp_path / "cut.gguf"
            ), size

    def test_tensors_missing(self, tmp_path: Path) -> None:
        assert "is incomplete: 1 of its tensors" in sentence(
            write_gguf(tmp_path / "m.gguf", skip="blk.1.ffn_up")
        )
