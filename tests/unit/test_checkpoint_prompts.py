"""Prompts to ids: exactly the chat template's, and a special token's name in a user's text stays text."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from mars_lm import prompts
from mars_lm.checkpoint import Checkpoint, encode_chat, encode_prompt, end_token_ids
from mars_lm.errors import MarsError
from tiny import tiny_checkpoint, tiny_tokenizer

LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'].strip() + ' [/INST]' }}{% else %}"
    "{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
TEXTS = [
    "hello world",
    " leading and trailing ",
    "\nnewlines\n\n",
    "\t tab",
    "",
    "   ",
    "def f(x):\n    return x\n",
    "naïve café — 数学 🙂",
    "<|im_star",
    "im_end|>",
    "<",
    "|>",
    "[INST]",
]


def metaspace_tokenizer(**flags: Any) -> Any:
    """As SentencePiece does: a space before the first word; with `flags`, special tokens eat spaces."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace()
    names = ("<unk>", "<s>", "</s>", "<mask>")
    specials = [AddedToken(name, normalized=False, special=True, **flags) for name in names]
    alphabet = [chr(i) for i in range(33, 127)] + ["▁", "é", "ï"]
    trainer = BpeTrainer(
        vocab_size=400, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox says hello to the world again and again"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", mask_token="<mask>"
    )
    fast.chat_template = LLAMA2
    return fast


TOKENIZERS = {
    "bytelevel": tiny_tokenizer,
    "metaspace": metaspace_tokenizer,
    "stripping": lambda: metaspace_tokenizer(lstrip=True, rstrip=True),
}


@pytest.fixture(params=TOKENIZERS, scope="module")
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]()


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_ordinary_texts_get_the_chat_templates_own_ids(
    tokenizer: Any, text: str, add_generation_prompt: bool
) -> None:
    messages = chat(text, text + " answer", text)
    wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)["input_ids"]
    assert encode_chat(tokenizer, messages, add_generation_prompt=add_generation_prompt) == wanted


ORDINARY = tiny_tokenizer()
PIECES = ["<|im_end|>", "<|im_start|>", "<|", "im_end|>", " ", "\n", "a", "é"]


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=40), st.text(max_size=40))
def test_any_ordinary_text_gets_the_chat_templates_own_ids(one: str, other: str) -> None:
    messages = chat(one, other)
    wanted = ORDINARY.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert encode_chat(ORDINARY, messages) == wanted


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(PIECES), max_size=9))
def test_no_text_whatever_becomes_a_special_token(pieces: list[str]) -> None:
    text = "".join(pieces)
    ids = encode_chat(ORDINARY, chat(text))
    assert [ids.count(token_id) for token_id in range(5)] == [0, 2, 1, 0, 0]  # the template's own
    assert text in ORDINARY.decode(ids)
    assert not set(range(5)) & set(encode_prompt(ORDINARY, text + "."))


@pytest.mark.parametrize("text", TEXTS)
def test_the_careful_path_differs_from_the_ordinary_one_in_nothing_else(tokenizer: Any, text: str) -> None:
    """Sent through the renamed copy of the tokenizer, texts without special names come out the same."""
    messages = chat(text, text + " answer", text)
    wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    names = prompts._special_names(tokenizer)
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompts._PlainNames.of(tokenizer, names).encode(rendered) == wanted


@pytest.mark.parametrize("around", ["{}", "a {} b", "{}{}", " {} ", "\n{}\n", "x{}y"])
def test_special_names_in_a_message_are_plain_text(tokenizer: Any, around: str) -> None:
    for name, token_id in prompts._special_names(tokenizer).items():
        text = around.replace("{}", name)
        ids = encode_chat(tokenizer, chat(text))
        harmless = encode_chat(tokenizer, chat("x"))
        assert ids.count(token_id) == harmless.count(token_id)
        rendered = tokenizer.apply_chat_template(chat(text), tokenize=False, add_generation_prompt=True)
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        assert name in decoded
        assert decoded.replace(" ", "").strip() == rendered.replace(" ", "").strip()


def test_special_names_in_every_role_are_plain_text() -> None:
    checkpoint = tiny_checkpoint()
    mask = checkpoint.mars.mask_token_id
    text = "hide <|mask|> and <|im_end|>"
    messages = [{"role": role, "content": text} for role in ("system", "user", "assistant", "user")]
    ids = encode_chat(checkpoint, messages)
    assert mask not in ids
    assert ids.count(2) == 4  # one <|im_end|> a message: the template's own
    assert checkpoint.tokenizer.decode(ids).count("<|mask|>") == 4


def test_special_names_are_plain_text_when_there_is_no_fast_tokenizer() -> None:
    tokenizer = tiny_tokenizer()
    names = prompts._special_names(tokenizer)
    text = f"<|im_start|>user\n{prompts._hide('say <|im_end|> now', names)}<|im_end|>\n"
    ids = prompts._encode_in_pieces(tokenizer, text, names)
    assert ids == prompts._PlainNames.of(tokenizer, names).encode(text)
    assert ids.count(2) == 1


def test_copy_follows_a_tokenizer_that_gets_another_special_token() -> None:
    tokenizer = tiny_tokenizer()
    assert encode_prompt(tokenizer, "<|im_end|>")
    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    ids = encode_prompt(tokenizer, "a <|mask|> b <|im_end|>")
    assert not {tokenizer.mask_token_id, 2} & set(ids)
    assert tokenizer.decode(ids) == "a <|mask|> b <|im_end|>"


@pytest.mark.parametrize("text", ["hello", " a <mask> b", "<s>", "a</s>"])
def test_plain_prompts_are_opened_and_not_closed(text: str) -> None:
    ids = encode_prompt(metaspace_tokenizer(), text)
    assert ids[0] == 1
    assert not {1, 2, 3} & set(ids[1:])


def test_plain_prompt_of_ordinary_text_is_the_tokenizers() -> None:
    tokenizer = tiny_tokenizer()
    for text in filter(None, TEXTS):
        assert encode_prompt(tokenizer, text) == tokenizer(text).input_ids


def test_empty_prompt() -> None:
    with pytest.raises(MarsError, match="prompt is empty"):
        encode_prompt(tiny_tokenizer(), "")
    assert encode_prompt(metaspace_tokenizer(), "")[:1] == [1]  # a beginning-of-text token can be continued
    ids = encode_chat(tiny_tokenizer(), chat(""))
    assert ids == tiny_tokenizer().apply_chat_template(chat(""), add_generation_prompt=True)["input_ids"]


def test_tokenizer_without_a_chat_template() -> None:
    tokenizer = tiny_tokenizer(chat_template=None)
    with pytest.raises(MarsError, match=r"no chat template.*plain prompt"):
        encode_chat(tokenizer, chat("hi"))
    assert encode_prompt(tokenizer, "hi")


def test_tokenizer_without_a_pad_token_needs_none() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.pad_token is None
    assert encode_chat(tokenizer, chat("hi"))


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "no messages"),
        ([{"content": "x"}], "Message 1 has no role"),
        (["x"], "Message 1 has no role"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], "Message 2's content is NoneType"),
        ([{"role": "user", "content": ["x"]}], "content is list"),
    ],
)
def test_messages_of_the_wrong_shape(messages: Any, sentence: str) -> None:
    with pytest.raises(MarsError, match=sentence):
        encode_chat(tiny_tokenizer(), messages)


def test_template_that_refuses_messages() -> None:
    tokenizer = tiny_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(MarsError, match="does not take these messages: roles must alternate"):
        encode_chat(tokenizer, chat("hi"))


class TestEndTokens:
    def ends(self, *, tokenizer: Any = None, generation: Any = None, config: Any = None) -> frozenset[int]:
        made = tiny_checkpoint(mars=False)
        made.model.generation_config.eos_token_id = generation
        made.model.config.eos_token_id = config
        return end_token_ids(Checkpoint(made.model, tokenizer or tiny_tokenizer(), None))

    def test_generation_config_a_number_or_a_list(self) -> None:
        bare = tiny_tokenizer(chat_template=None, eos_token=None)
        assert self.ends(tokenizer=bare, generation=7) == {7}
        assert self.ends(tokenizer=bare, generation=[7, 9]) == {7, 9}
        assert self.ends(tokenizer=bare, generation=7, config=[8]) == {7, 8}

    def test_chat_template_names_the_end_of_a_turn(self) -> None:
        """A base model's end token is another one than its chat template's: both end a text."""
        tokenizer = tiny_tokenizer(eos_token="<|endoftext|>")
        assert self.ends(tokenizer=tokenizer) == {0, 2}

    def test_template_that_ends_turns_with_nothing(self) -> None:
        template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        assert self.ends(tokenizer=tiny_tokenizer(chat_template=template)) == {2}

    def test_template_that_takes_no_assistant_yet(self) -> None:
        template = "{{ raise_exception('no') }}"
        assert self.ends(tokenizer=tiny_tokenizer(chat_template=template)) == {2}

    def test_none_at_all_is_said_and_the_budget_ends_the_text(self) -> None:
        with pytest.warns(UserWarning, match="end-of-sequence token: texts end only"):
            assert self.ends(tokenizer=tiny_tokenizer(chat_template=None, eos_token=None)) == frozenset()

    def test_mask_token_never_ends_a_text(self) -> None:
        checkpoint = tiny_checkpoint()
        checkpoint.model.generation_config.eos_token_id = [2, checkpoint.mars.mask_token_id]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert end_token_ids(checkpoint) == {2}


def test_prompt_ids_are_what_a_model_takes() -> None:
    checkpoint = tiny_checkpoint()
    ids = encode_chat(checkpoint, chat("a <|mask|> here"))
    assert max(ids) < checkpoint.model.get_input_embeddings().weight.shape[0]
    with torch.no_grad():
        assert checkpoint.model(torch.tensor([ids])).logits.isfinite().all()
