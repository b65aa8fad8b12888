"""`mars convert`: any base, or a base and an adapter, to a folder that plain transformers loads."""

from __future__ import annotations

import json

import peft
import pytest
import torch
import transformers

from mars_lm import checkpoint as checkpoints
from mars_lm.settings import MarsSettings
from run_mars import run_mars
from tiny import tiny_checkpoint, tiny_model, tiny_tokenizer


def saved(folder, *, dtype=torch.float32, **kinds):
    made = tiny_checkpoint(**kinds)
    checkpoints.save(made.model.to(dtype), made.tokenizer, folder)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_base_becomes_mars_ready_and_keeps_weights_and_number_format(tmp_path, dtype):
    base = saved(tmp_path / "base", dtype=dtype, mars=False)
    done = run_mars("convert", tmp_path / "base", tmp_path / "ready", "--block-size", 8)
    assert done.code == 0
    assert str(tmp_path / "ready") in done.out
    assert "B = 8" in done.out
    settings = MarsSettings(**json.loads((tmp_path / "ready" / "config.json").read_text())["mars"])
    assert settings.block_size == 8
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ready", dtype="auto")
    assert model.dtype == dtype
    for name, value in base.model.state_dict().items():
        converted = model.state_dict()[name]
        if converted.shape[:1] == base.model.get_input_embeddings().weight.shape[:1]:
            converted, value = (
                torch.cat([t[: settings.mask_token_id], t[settings.mask_token_id + 1 :]])
                for t in (converted, value)
            )
        assert torch.equal(converted, value), name
    assert run_mars("generate", "hi", "--model", tmp_path / "ready", "--max-new-tokens", 4).code == 0


def test_an_adapter_is_merged_and_the_result_answers_as_base_and_adapter_did(tmp_path):
    made = saved(tmp_path / "base", mars=False)
    settings = checkpoints.make_mars_ready(made.model, made.tokenizer, block_size=4, base_model=None)
    config = peft.LoraConfig(
        r=4,
        target_modules="all-linear",
        init_lora_weights=False,
        trainable_token_indices=[settings.mask_token_id],
        task_type="CAUSAL_LM",
    )
    checkpoints.save_adapter(peft.get_peft_model(made.model, config), settings, {}, tmp_path / "adapter")
    common = ["--dtype", "float32", "--max-new-tokens", 12]
    with_adapter = run_mars(
        "generate", "hello", "--model", tmp_path / "base", "--adapter", tmp_path / "adapter", *common
    )
    assert with_adapter.code == 0
    done = run_mars("convert", tmp_path / "base", tmp_path / "merged", "--adapter", tmp_path / "adapter")
    assert done.code == 0
    assert "B = 4" in done.out
    merged = run_mars("generate", "hello", "--model", tmp_path / "merged", *common)
    assert merged.out == with_adapter.out
    plain = run_mars("generate", "hello", "--model", tmp_path / "base", *common)
    assert plain.out != with_adapter.out


def test_a_checkpoint_at_the_target_stays_unless_told(tmp_path):
    saved(tmp_path / "base", mars=False)
    saved(tmp_path / "precious", seed=1)
    before = (tmp_path / "precious" / "model.safetensors").read_bytes()
    done = run_mars("convert", tmp_path / "base", tmp_path / "precious")
    assert done.code == 2
    assert "--overwrite" in done.err
    assert (tmp_path / "precious" / "model.safetensors").read_bytes() == before
    assert run_mars("convert", tmp_path / "base", tmp_path / "precious", "--overwrite").code == 0
    assert (tmp_path / "precious" / "model.safetensors").read_bytes() != before


def test_a_trained_block_size_is_not_relabelled(tmp_path):
    saved(tmp_path / "trained", block_size=4)
    done = run_mars("convert", tmp_path / "trained", tmp_path / "other", "--block-size", 8)
    assert done.code == 2
    assert "trained for B = 4" in done.err
    assert not (tmp_path / "other").exists()


def test_a_base_without_a_free_row_gets_one_and_a_sentence(tmp_path):
    tokenizer = tiny_tokenizer(special_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    checkpoints.save(tiny_model(rows=len(tokenizer)), tokenizer, tmp_path / "base")
    done = run_mars("convert", tmp_path / "base", tmp_path / "ready")
    assert done.code == 0
    assert done.err.startswith("mars: ")
    assert ".py:" not in done.err


@pytest.mark.parametrize("damage", ["no config", "half weights", "not json"])
def test_a_damaged_source_is_a_sentence(tmp_path, damage):
    saved(tmp_path / "base", mars=False)
    config, weights = tmp_path / "base" / "config.json", tmp_path / "base" / "model.safetensors"
    if damage == "no config":
        config.unlink()
    elif damage == "half weights":
        weights.write_bytes(weights.read_bytes()[:1000])
    else:
        config.write_text("{")
    done = run_mars("convert", tmp_path / "base", tmp_path / "ready")
    assert done.code == 2
    assert done.err.startswith("mars: ")
    assert "Traceback" not in done.err
    assert not (tmp_path / "ready").exists()
