"""Loading: types, devices, and one clear sentence for whatever is no checkpoint or a damaged one."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mars_lm import checkpoint as checkpoints
from mars_lm import sources
from mars_lm.checkpoint import load, save
from mars_lm.errors import MarsError
from tiny import tiny_checkpoint, tiny_model, tiny_tokenizer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    made = tiny_checkpoint(tied=False)
    save(made.model, made.tokenizer, tmp_path / "saved")
    return tmp_path / "saved"


def sentence(*args: Any, **kwargs: Any) -> str:
    """What loading says; a sentence, and no stack of lines."""
    with pytest.raises(MarsError) as refusal:
        load(*args, **kwargs)
    said = str(refusal.value)
    assert "\n" not in said
    assert said.endswith(".")
    return said


class TestTypesAndDevices:
    @pytest.mark.parametrize("computes", [True, False])
    def test_auto_on_a_cpu_follows_the_processor(
        self, computes: bool, saved: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(checkpoints, "cpu_computes_bfloat16", lambda: computes)
        wanted = torch.bfloat16 if computes else torch.float32
        assert load(saved, device="cpu").model.dtype == wanted

    @pytest.mark.parametrize("amx", [True, False])
    @pytest.mark.parametrize("avx512", [True, False])
    def test_processor_computes_bfloat16_with_either_unit(
        self, amx: bool, avx512: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
        assert checkpoints.cpu_computes_bfloat16() == (amx or avx512)

    def test_auto_elsewhere_is_the_checkpoints_own(self) -> None:
        cuda = torch.device("cuda")
        assert checkpoints._dtype("auto", cuda) == "auto"
        assert checkpoints._dtype("auto", cuda, gguf=True) == torch.bfloat16
        assert checkpoints._dtype("float32", cuda, gguf=True) == torch.float32

    def test_rotary_frequencies_stay_exact(self, saved: Path) -> None:
        exact = load(saved, dtype="float32").model.model.rotary_emb.inv_freq
        rounded = load(saved, dtype="bfloat16").model.model.rotary_emb.inv_freq
        assert rounded.dtype == torch.float32
        assert torch.equal(exact, rounded)

    @pytest.mark.parametrize("dtype", ["float64", "fp16", "", "int4"])
    def test_unknown_type(self, dtype: str, saved: Path) -> None:
        assert "expected one of auto, float32, bfloat16, float16" in sentence(saved, dtype=dtype)

    def test_eight_bits(self, saved: Path, tmp_path: Path) -> None:
        made = tiny_checkpoint("llama", hidden_size=64, head_dim=16)
        save(made.model, made.tokenizer, tmp_path)
        whole, rounded = load(tmp_path, dtype="float32"), load(tmp_path, dtype="int8")
        assert (whole.dtype, rounded.dtype) == ("float32", "int8")
        weights = [c.model.base_model.layers[0].mlp.up_proj.weight.detach() for c in (whole, rounded)]
        assert 0 < float((weights[0] - weights[1]).abs().max()) <= float(weights[0].abs().max()) / 250
        assert rounded.model.dtype == torch.float32
        with pytest.raises(MarsError, match="runs on a CPU"):
            checkpoints._dtype("int8", torch.device("cuda", 0))

    def test_eight_bits_are_refused_before_weights_are_read(self, saved: Path, monkeypatch) -> None:
        monkeypatch.setattr(checkpoints.AutoModelForCausalLM, "from_pretrained", None)
        config = json.loads((saved / "config.json").read_text())
        monkeypatch.setattr(checkpoints, "check_supported", lambda config: None)
        (saved / "config.json").write_text(json.dumps({**config, "model_type": "gemma"}))
        assert "int8 is for llama, mistral, qwen2, qwen3 models, and this is gemma" in sentence(
            saved, dtype="int8"
        )

    def test_eight_bits_run_on_the_cpu_where_there_is_a_gpu(self, monkeypatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert checkpoints._device(None, "int8").type == "cpu"
        assert checkpoints._device(None, "auto").type == "cuda"

    def test_unknown_device(self, saved: Path) -> None:
        assert "expected such as cpu" in sentence(saved, device="gpu")
        if not torch.cuda.is_available():
            assert "no CUDA device" in sentence(saved, device="cuda")


class TestNoModel:
    def test_paths_that_are_none(self, tmp_path: Path) -> None:
        (tmp_path / "file.txt").write_text("x")
        (tmp_path / "empty").mkdir()
        assert "There is no folder /no/such/place" in sentence("/no/such/place")
        assert "There is no folder ./nothing" in sentence("./nothing")
        assert "is a file" in sentence(tmp_path / "file.txt")
        assert "no checkpoint: it has no config.json" in sentence(tmp_path / "empty")
        assert "name is empty" in sentence("")
        assert "There is no file" in sentence(tmp_path / "none.gguf")

    def test_a_folder_with_only_a_gguf_file_names_it(self, tmp_path: Path) -> None:
        (tmp_path / "m.gguf").write_bytes(b"GGUF")
        assert f"name the GGUF file itself, such as {tmp_path / 'm.gguf'}" in sentence(tmp_path)

    def test_hub_out_of_reach_is_said_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sources, "_hub_answers", lambda: False)
        said = sentence("some/model")
        assert said.startswith(
            "There is no folder some/model, and it cannot be had from the Hugging Face Hub"
        )

    def test_hub_is_tried_by_one_short_connection(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from huggingface_hub import constants

        asked = []

        def refuse(address: Any, timeout: float) -> Any:
            asked.append((address, timeout))
            raise OSError("Network is unreachable")

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(sources.urllib.request, "getproxies", dict)
        monkeypatch.setattr(socket, "create_connection", refuse)
        assert not sources._hub_answers()
        assert asked[0][0][1] == 443
        assert asked[0][1] <= 5
        monkeypatch.setattr(sources.urllib.request, "getproxies", lambda: {"https": "http://proxy"})
        assert sources._hub_answers()  # the Hub's client finds out by itself
        assert len(asked) == 1


class TestDamaged:
    def test_tensors_cut_short(self, saved: Path) -> None:
        weights = saved / "model.safetensors"
        whole = weights.read_bytes()
        for size in (0, 5, 8, 100, len(whole) // 2, len(whole) - 1):
            weights.write_bytes(whole[:size])
            assert "model.safetensors is damaged or cut short" in sentence(saved)
        weights.write_bytes(whole + b"\0")
        assert "model.safetensors is damaged" in sentence(saved)
        weights.write_bytes(b"\x08\0\0\0\0\0\0\0" + b"nonsense")
        assert "model.safetensors is damaged" in sentence(saved)

    def test_tensors_missing_altogether(self, saved: Path) -> None:
        (saved / "model.safetensors").unlink()
        assert "cannot be loaded" in sentence(saved)

    def test_a_tensor_missing(self, saved: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(saved / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
        said = sentence(saved)
        assert "is incomplete: 1 of its tensors" in said
        assert "model.layers.1.mlp.up_proj.weight" in said

    def test_a_tensor_of_another_shape(self, saved: Path) -> None:
        config = json.loads((saved / "config.json").read_text())
        config["intermediate_size"] = 52
        (saved / "config.json").write_text(json.dumps(config))
        said = sentence(saved)
        assert "is not of one piece" in said
        assert "[48, 32], by its configuration [52, 32]" in said or "[32, 48]" in said

    def test_a_shard_missing(self, saved: Path, tmp_path: Path) -> None:
        tiny_model().save_pretrained(saved, max_shard_size="20KB")
        (saved / "model.safetensors").unlink()
        assert load(saved).model is not None
        shard = sorted(saved.glob("model-*.safetensors"))[1]
        shard.unlink()
        assert f"is incomplete: {shard.name} is missing" in sentence(saved)

    @pytest.mark.parametrize("text", ["", "{", "[1]", '{"model_type": "llama"', "\0"])
    def test_config_that_is_no_json_object(self, text: str, saved: Path) -> None:
        (saved / "config.json").write_text(text)
        assert "config.json is not" in sentence(saved)

    @pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
    def test_other_json_cut_short(self, name: str, saved: Path) -> None:
        (saved / name).write_text('{"eos_token_id": 2')
        assert f"{name} is not readable JSON" in sentence(saved)

    def test_config_with_values_that_cannot_be(self, saved: Path) -> None:
        config = json.loads((saved / "config.json").read_text())
        (saved / "config.json").write_text(json.dumps({**config, "hidden_size": "a"}))
        said = sentence(saved)
        assert "hidden_size" in said
        assert "expected int" in said

    def test_pickled_tensors_that_are_none(self, saved: Path) -> None:
        (saved / "model.safetensors").unlink()
        (saved / "pytorch_model.bin").write_bytes(b"PK junk")
        assert "the file is damaged or cut short" in sentence(saved)

    def test_config_that_says_nothing(self, saved: Path) -> None:
        (saved / "config.json").write_text("{}")
        assert "cannot be loaded" in sentence(saved)

    def test_config_of_a_model_that_nobody_knows(self, saved: Path) -> None:
        (saved / "config.json").write_text('{"model_type": "nonesuch"}')
        assert "nonesuch" in sentence(saved)

    def test_config_of_a_model_that_is_refused(self, saved: Path) -> None:
        config = json.loads((saved / "config.json").read_text())
        (saved / "config.json").write_text(
            json.dumps({**config, "model_type": "mistral", "sliding_window": 16})
        )
        assert "sliding-window" in sentence(saved)

    def test_tokenizer_missing_or_damaged(self, saved: Path) -> None:
        whole = (saved / "tokenizer.json").read_text()
        (saved / "tokenizer.json").write_text(whole[:1000])
        assert "has no tokenizer that can be read" in sentence(saved)
        (saved / "tokenizer.json").unlink()
        assert "has no tokenizer that can be read: there is no tokenizer.json" in sentence(saved)

    @pytest.mark.parametrize(
        ("mars", "part"),
        [
            ([1], "expected an object"),
            ({"block_size": 4}, "no mask_token_id"),
            ({"mask_token_id": 5, "format_version": 99}, "format version 99"),
            ({"mask_token_id": 5, "surprise": 1}, "unknown fields (surprise)"),
            ({"mask_token_id": 5000}, "5000, but it has 320 embedding rows"),
        ],
    )
    def test_settings_that_are_wrong(self, mars: Any, part: str, saved: Path) -> None:
        config = json.loads((saved / "config.json").read_text())
        (saved / "config.json").write_text(json.dumps({**config, "mars": mars}))
        assert part in sentence(saved)


def test_an_ordinary_model_has_no_settings(tmp_path: Path) -> None:
    save(tiny_model(), tiny_tokenizer(), tmp_path / "plain")
    assert load(tmp_path / "plain").mars is None


def test_remote_code_is_never_run(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    config |= {"model_type": "nonesuch", "auto_map": {"AutoConfig": "evil.Config"}}
    (saved / "config.json").write_text(json.dumps(config))
    (saved / "evil.py").write_text("raise SystemExit('ran')")
    assert sentence(saved)


def test_loading_and_saving_are_silent(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = transformers.logging.get_verbosity(), transformers.utils.logging.is_progress_bar_enabled()
    made = load(saved)
    save(made.model, made.tokenizer, saved)
    (saved / "model.safetensors").unlink()
    assert sentence(saved)
    said = capfd.readouterr()
    assert said.err + said.out == ""
    after = transformers.logging.get_verbosity(), transformers.utils.logging.is_progress_bar_enabled()
    assert after == before


def test_not_enough_memory() -> None:
    with pytest.raises(MarsError, match="x: there is not enough memory"), sources.told_in_one_sentence("x"):
        raise MemoryError
