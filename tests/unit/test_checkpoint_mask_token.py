"""The mask token: which one is chosen, and what its rows start from (SPEC 7)."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

from mars_lm.checkpoint import MASK_TOKEN, make_mars_ready
from mars_lm.errors import MarsError
from mars_lm.settings import MarsSettings
from tiny import FAMILIES, SPECIAL_TOKENS, tiny_model, tiny_tokenizer


def ready(model: Any, tokenizer: Any, **fields: Any) -> MarsSettings:
    return make_mars_ready(model, tokenizer, **{"block_size": 4, "base_model": "some/base", **fields})


def full(tokenizer: Any, **kwargs: Any) -> Any:
    """A model with exactly one row a token."""
    return tiny_model(rows=len(tokenizer), **kwargs)


class TestOrder:
    def test_first_the_tokenizers_own(self) -> None:
        tokenizer = tiny_tokenizer(mask_token="<gh_stars>")
        assert ready(tiny_model(), tokenizer).mask_token_id == 3
        assert tokenizer.mask_token == "<gh_stars>"

    def test_an_own_one_that_means_something_else_too_is_not_taken(self) -> None:
        tokenizer = tiny_tokenizer(mask_token="<|im_end|>")
        assert ready(full(tokenizer), tokenizer).mask_token_id == SPECIAL_TOKENS.index("<empty_output>")

    def test_then_a_new_token_in_a_row_that_the_model_has(self) -> None:
        tokenizer = tiny_tokenizer()
        model, free = tiny_model(), len(tokenizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert ready(model, tokenizer).mask_token_id == free
        assert tokenizer.mask_token == MASK_TOKEN
        assert tokenizer.convert_tokens_to_ids(MASK_TOKEN) == free
        assert len(tokenizer) == free + 1
        assert model.get_input_embeddings().weight.shape[0] == model.config.vocab_size == 320
        assert tokenizer(f"a{MASK_TOKEN}b").input_ids.count(free) == 1

    @pytest.mark.parametrize(
        "name",
        ["<|reserved_special_token_3|>", "<unused7>", "<|extra_id_1|>", "<|placeholder2|>", "[control_12]"],
    )
    def test_then_a_reserved_token_before_a_corpus_marker(self, name: str) -> None:
        tokenizer = tiny_tokenizer(special_tokens=(*SPECIAL_TOKENS, name))
        assert ready(full(tokenizer), tokenizer).mask_token_id == len(SPECIAL_TOKENS)
        assert tokenizer.mask_token == name

    def test_a_reserved_token_that_is_not_marked_special_becomes_so(self) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.add_tokens([AddedToken("<unused0>", normalized=False, special=False)])
        mask = ready(full(tokenizer), tokenizer).mask_token_id
        assert tokenizer.convert_ids_to_tokens(mask) == "<unused0>"
        assert tokenizer.decode([mask, 70], skip_special_tokens=True) == tokenizer.decode([70])

    def test_smollm2_gives_empty_output(self) -> None:
        names = [
            "<|endoftext|>",
            "<|im_start|>",
            "<|im_end|>",
            "<repo_name>",
            "<reponame>",
            "<file_sep>",
            "<filename>",
            "<gh_stars>",
            "<issue_start>",
            "<issue_comment>",
            "<issue_closed>",
            "<jupyter_start>",
            "<jupyter_text>",
            "<jupyter_code>",
            "<jupyter_output>",
            "<jupyter_script>",
            "<empty_output>",
        ]
        tokenizer = tiny_tokenizer(special_tokens=names)
        assert ready(full(tokenizer), tokenizer).mask_token_id == names.index("<empty_output>") == 16

    @pytest.mark.parametrize(
        "name",
        [
            "<tool_call>",
            "<|function|>",
            "<think>",
            "</think>",
            "<|vision_start|>",
            "<|image_pad|>",
            "<|user|>",
            "<|assistant|>",
            "<|system|>",
            "<|eot_id|>",
            "<|start_header_id|>",
            "<start_of_turn>",
            "<|python_tag|>",
            "<|fim_middle|>",
            "<something>",
        ],
    )
    def test_tokens_that_steer_a_chat_are_never_taken(self, name: str) -> None:
        tokenizer = tiny_tokenizer(special_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>", name))
        with pytest.warns(UserWarning, match="one row was added"):
            mask = ready(full(tokenizer), tokenizer).mask_token_id
        assert tokenizer.convert_ids_to_tokens(mask) == MASK_TOKEN

    def test_tokens_that_the_chat_template_or_the_model_uses_are_never_taken(self) -> None:
        names = ("<|im_start|>", "<|im_end|>", "<unused1>", "<unused2>", "<unused3>", "<unused4>")
        tokenizer = tiny_tokenizer(special_tokens=names, pad_token="<unused2>")
        tokenizer.chat_template += "{{ '<unused4>' }}"
        model = full(tokenizer)
        model.generation_config.eos_token_id = [1, 4]  # <unused3>
        assert ready(model, tokenizer).mask_token_id == names.index("<unused1>")

    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_else_one_added_row_with_a_warning(self, family: str, tied: bool) -> None:
        tokenizer = tiny_tokenizer(special_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
        rows = len(tokenizer)
        model = tiny_model(family, rows=rows, tied=tied)
        before = model.get_input_embeddings().weight.detach().clone()
        with pytest.warns(
            UserWarning, match=rf"one row was added for <\|mask\|> \(vocabulary {rows} -> {rows + 1}"
        ):
            mask = ready(model, tokenizer).mask_token_id
        assert mask == rows
        assert model.config.vocab_size == rows + 1
        assert model.get_output_embeddings().weight.shape[0] == rows + 1
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
        torch.testing.assert_close(model.get_input_embeddings().weight[:rows], before, rtol=0, atol=0)
        assert model(torch.tensor([[5, mask]])).logits.shape[-1] == rows + 1


class TestRows:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_start_at_the_mean_of_the_others(self, family: str, tied: bool, dtype: torch.dtype) -> None:
        model, tokenizer = tiny_model(family, tied=tied).to(dtype), tiny_tokenizer()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        mask = ready(model, tokenizer).mask_token_id
        others = [row for row in range(320) if row != mask]
        changed = set()
        for name, parameter in model.named_parameters():
            if torch.equal(parameter, before[name]):
                continue
            changed.add(name.rsplit(".", 2)[-2])
            assert torch.equal(parameter[others], before[name][others])
            mean = before[name][others].double().mean(dim=0).to(dtype)
            assert torch.equal(parameter[mask], mean)
        assert changed == ({"embed_tokens", "lm_head"} if not tied or family == "phi" else {"embed_tokens"})

    def test_settings_are_written_and_validated_before_anything_changes(self) -> None:
        model, tokenizer = tiny_model(), tiny_tokenizer()
        before = model.get_input_embeddings().weight.detach().clone()
        with pytest.raises(MarsError, match="block_size"):
            ready(model, tokenizer, block_size=0)
        assert torch.equal(model.get_input_embeddings().weight, before)
        assert tokenizer.mask_token is None
        settings = ready(model, tokenizer, layout="paper", mask_loss="kd", ar_weight=0.5)
        assert settings == MarsSettings.from_config(model.config)
        assert (settings.layout, settings.mask_loss, settings.ar_weight) == ("paper", "kd", 0.5)
        assert settings.base_model == "some/base"

    def test_a_second_time_keeps_the_trained_row_and_takes_the_new_fields(self) -> None:
        model, tokenizer = tiny_model(tied=False), tiny_tokenizer()
        first = ready(model, tokenizer)
        with torch.no_grad():
            model.get_input_embeddings().weight[first.mask_token_id] = 1.5
        second = ready(model, tokenizer, block_size=8)
        assert second.mask_token_id == first.mask_token_id
        assert second.block_size == model.config.mars["block_size"] == 8
        assert (model.get_input_embeddings().weight[first.mask_token_id] == 1.5).all()
        assert ready(model, tokenizer, block_size=8) == second
        assert len(tokenizer) == first.mask_token_id + 1

    def test_ready_model_with_a_tokenizer_that_lost_the_token(self) -> None:
        model = tiny_model()
        mask = ready(model, tiny_tokenizer()).mask_token_id
        tokenizer = tiny_tokenizer()
        assert ready(model, tokenizer).mask_token_id == mask == tokenizer.mask_token_id

    def test_a_tokenizer_of_another_model(self) -> None:
        with pytest.raises(MarsError, match="they are not of one model"):
            ready(tiny_model(rows=200), tiny_tokenizer(special_tokens=("<|im_start|>", "<|im_end|>")))
        model = tiny_model()
        model.config.mars = MarsSettings(mask_token_id=318).to_dict()
        with pytest.raises(MarsError, match="not the one that this checkpoint was made with"):
            ready(model, tiny_tokenizer())

    def test_unsupported_model(self) -> None:
        with pytest.raises(MarsError, match="sliding-window"):
            ready(tiny_model("mistral", sliding_window=8), tiny_tokenizer())
