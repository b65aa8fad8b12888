"""`model.generate(..., custom_generate=mars_lm.generate)` against transformers' own generate, float32."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

import mars_lm
from decoding_reference import biased
from mars_lm.decoding import generate as engine_generate
from mars_lm.errors import MarsError
from mars_lm.settings import DecodingSettings
from tiny import tiny_checkpoint

PROMPTS = [[5, 6, 7, 70, 71], [40], [33, 44, 55]]
PAD = 0


@pytest.fixture(scope="module")
def checkpoint():
    return biased(tiny_checkpoint(), range(60, 80), gain=2.5)


def batch(prompts):
    """Padded on the left: ids and attention mask."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def both(checkpoint, prompts=PROMPTS, mars=None, **arguments):
    """What transformers and MARS make of the same arguments (a callable makes new ones for each)."""
    answers = []
    for own in ({}, {"custom_generate": mars_lm.generate, **(mars or {})}):
        values = {name: value() if name in FRESH else value for name, value in arguments.items()}
        values = {"max_new_tokens": 24, "pad_token_id": PAD, **values}
        # transformers may choose the mask token, MARS never does.
        values["suppress_tokens"] = [checkpoint.mars.mask_token_id]
        answers.append(checkpoint.model.generate(**batch(prompts), **values, **own))
    return answers


FRESH = ("stopping_criteria", "streamer", "logits_processor")


class Turns(LogitsProcessor):
    """One's own: reads the ids, and what each row of the batch may not say."""

    def __call__(self, input_ids, scores):
        for number, (ids, row) in enumerate(zip(input_ids, scores, strict=True)):
            row[60 + (int(ids.sum()) + number) % 5 : 80 : 5] -= 30.0
        return scores


class Until(StoppingCriteria):
    """A batch's criterion that remembers its rows, and when it was asked."""

    def __init__(self, token, times):
        self.token, self.times, self.widths, self.seen = token, times, [], None

    def __call__(self, input_ids, scores, **_):
        self.widths.append(input_ids.shape[1])
        if self.seen is None:
            self.seen = torch.zeros(len(input_ids))
        self.seen += input_ids[:, -1] == self.token
        return self.seen >= self.times


ARGUMENTS = {
    "plain": {},
    "max_length": {"max_new_tokens": None, "max_length": 11},
    "several ends": {"eos_token_id": [66, 79, 100000]},
    "minimum": {"eos_token_id": [60, 62], "min_new_tokens": 9},
    "minimum length": {"eos_token_id": [60, 62], "min_length": 9},
    "repetition": {"repetition_penalty": 1.7},
    "n-grams": {"no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
    "bad words": {"bad_words_ids": [[60], [79, 79], [62, 66, 67, 68, 69]], "eos_token_id": 66},
    "bias": {"sequence_bias": [[[61], 3.0], [[62, 62], -9.0]]},
    "first and last": {"begin_suppress_tokens": [65, 79], "forced_eos_token_id": 66, "eos_token_id": 66},
    "decay": {"exponential_decay_length_penalty": (5, 1.5), "eos_token_id": 77},
    "allowed": {"prefix_allowed_tokens_fn": lambda row, ids: [60 + row, 64 + row, 70 + (len(ids) + row) % 5]},
    "encoder": {"encoder_no_repeat_ngram_size": 1, "encoder_repetition_penalty": 1.3},
    "own processor": {"logits_processor": lambda: LogitsProcessorList([Turns()])},
    "own criterion": {"stopping_criteria": lambda: StoppingCriteriaList([Until(60, 3)]), "eos_token_id": 66},
    "criterion alone": {"stopping_criteria": lambda: StoppingCriteriaList([Until(60, 2)])},
    "low config": {"generation_config": GenerationConfig(max_new_tokens=7, pad_token_id=PAD)},
    "no time": {"max_time": 0.0},
}


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=list(ARGUMENTS))
def test_greedy_batches_are_transformers_own(checkpoint, arguments):
    wanted, got = both(checkpoint, **arguments)
    assert got.tolist() == wanted.tolist()
    _, slow = both(checkpoint, **arguments, mars={"tau": 1.0, "max_rows": 2})
    assert slow.tolist() == wanted.tolist()


@pytest.mark.parametrize("family", ["qwen2", "gemma"])
def test_families(family):
    checkpoint = biased(tiny_checkpoint(family), range(60, 80), gain=2.5)
    wanted, got = both(checkpoint)
    assert got.tolist() == wanted.tolist()


def test_a_criterion_sees_the_batch_grow_one_column_at_a_time(checkpoint):
    seen = [Until(60, 3), Until(60, 3)]
    for criterion, own in zip(seen, ({}, {"custom_generate": mars_lm.generate}), strict=True):
        checkpoint.model.generate(
            **batch(PROMPTS),
            **own,
            max_new_tokens=24,
            pad_token_id=PAD,
            suppress_tokens=[checkpoint.mars.mask_token_id],
            stopping_criteria=StoppingCriteriaList([criterion]),
        )
    assert seen[0].widths == seen[1].widths
    assert seen[0].seen.tolist() == seen[1].seen.tolist()


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["a batch", "one"])
def test_stop_strings(checkpoint, prompts):
    tokenizer = checkpoint.tokenizer
    whole, _ = both(checkpoint, prompts)
    text = tokenizer.decode(whole[0, len(PROMPTS[0]) :])
    wanted, got = both(
        checkpoint,
        prompts,
        stop_strings=[text[6:9]],
        tokenizer=tokenizer,
        eos_token_id=tokenizer.eos_token_id,
    )
    assert got.tolist() == wanted.tolist()
    if len(prompts) == 1:
        assert got.shape[1] < whole.shape[1]


class Columns(BaseStreamer):
    def __init__(self):
        self.columns, self.ended = [], 0

    def put(self, value):
        self.columns.append(value.tolist())

    def end(self):
        self.ended += 1


def test_streamers_get_what_transformers_gives_them(checkpoint, capsys):
    streamers = []

    def new():
        streamers.append(Columns())
        return streamers[-1]

    both(checkpoint, streamer=new, eos_token_id=66)
    assert streamers[0].columns == streamers[1].columns
    assert streamers[0].ended == streamers[1].ended == 1
    both(checkpoint, PROMPTS[:1], streamer=lambda: TextStreamer(checkpoint.tokenizer))
    lines = capsys.readouterr().out.splitlines()
    half = len(lines) // 2
    assert lines[:half] == lines[half:] != []


def test_a_text_iterator_ends(checkpoint):
    streamer = TextIteratorStreamer(checkpoint.tokenizer, skip_prompt=True, timeout=5)
    ids = checkpoint.model.generate(
        **batch(PROMPTS[:1]),
        max_new_tokens=9,
        pad_token_id=PAD,
        streamer=streamer,
        custom_generate=mars_lm.generate,
    )
    assert "".join(streamer) == checkpoint.tokenizer.decode(ids[0, len(PROMPTS[0]) :])


def test_scores_logits_and_numbers_come_with_the_dictionary(checkpoint):
    wanted, got = both(
        checkpoint,
        eos_token_id=66,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        repetition_penalty=1.3,
        no_repeat_ngram_size=3,
    )
    assert got.sequences.tolist() == wanted.sequences.tolist()
    width = len(PROMPTS[0])
    mask = checkpoint.mars.mask_token_id
    for name in ("scores", "logits"):
        ours, theirs = getattr(got, name), getattr(wanted, name)
        assert len(ours) == len(theirs) == got.sequences.shape[1] - width
        for row, result in enumerate(got.mars):
            for column in range(len(result.token_ids)):
                a, b = ours[column][row].clone(), theirs[column][row].clone()
                a[mask] = b[mask] = 0  # transformers suppresses it late, MARS at once
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert sum(map(len, (r.token_ids for r in got.mars))) == sum(sum(r.accepted_lengths) for r in got.mars)
    assert sum(r.forwards for r in got.mars) < sum(len(r.token_ids) for r in got.mars)
    plain, ours = both(checkpoint, return_dict_in_generate=True)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert ours.scores is None
    assert ours.logits is None


SAMPLING = {
    "plain": {"top_k": 0},
    "all four": {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    "others between": {"temperature": 1.4, "top_k": 12, "typical_p": 0.9, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize("arguments", SAMPLING.values(), ids=list(SAMPLING))
def test_sampling_draws_the_engines_words_and_obeys_torchs_seed(checkpoint, arguments):
    def draw(**own):
        return checkpoint.model.generate(
            **batch(PROMPTS),
            max_new_tokens=16,
            pad_token_id=PAD,
            do_sample=True,
            custom_generate=mars_lm.generate,
            **{**arguments, **own},
        )

    exact = draw(seed=5)
    assert draw(seed=5, tau=1.0).tolist() == exact.tolist()  # whatever the drafts
    assert draw(seed=6).tolist() != exact.tolist()
    # Each draw is from what transformers would draw from: the words that its processors leave.
    recorded = draw(seed=5, return_dict_in_generate=True, output_scores=True)
    assert recorded.sequences.tolist() == exact.tolist()
    if "min_p" in arguments:
        settings = [DecodingSettings(max_new_tokens=16, seed=seed, **arguments) for seed in (5, 6, 7)]
        alone = engine_generate(checkpoint, PROMPTS, settings)
        width = len(PROMPTS[0])
        assert [result.token_ids for result in alone] == exact[:, width:].tolist()
    torch.manual_seed(3)
    first = draw()
    torch.manual_seed(3)
    assert draw().tolist() == first.tolist()
    assert draw().tolist() != first.tolist()


def test_several_answers_to_a_prompt_differ_and_stand_together(checkpoint):
    arguments = {"max_new_tokens": 12, "pad_token_id": PAD, "do_sample": True, "top_k": 0, "seed": 4}
    got = checkpoint.model.generate(
        **batch(PROMPTS), **arguments, num_return_sequences=2, custom_generate=mars_lm.generate
    )
    width = len(PROMPTS[0])
    assert got[:, :width].tolist() == batch(PROMPTS)["input_ids"].repeat_interleave(2, 0).tolist()
    assert len({tuple(row) for row in got.tolist()}) == 6


def test_recorded_scores_are_those_of_transformers_warpers(checkpoint):
    output = checkpoint.model.generate(
        **batch(PROMPTS),
        max_new_tokens=6,
        pad_token_id=PAD,
        do_sample=True,
        top_k=7,
        temperature=0.5,
        return_dict_in_generate=True,
        output_scores=True,
        custom_generate=mars_lm.generate,
    )
    for column, scores in enumerate(output.scores):
        assert (scores > -torch.inf).sum(-1).tolist() == [7, 7, 7]
        token = output.sequences[:, len(PROMPTS[0]) + column]
        assert (scores.gather(1, token[:, None]) > -torch.inf).all()
    gains = checkpoint.model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
    assert gains.shape == (3, 6)


def test_mars_own_arguments(checkpoint):
    def lossy(**own):
        return checkpoint.model.generate(
            **batch(PROMPTS),
            max_new_tokens=16,
            pad_token_id=PAD,
            return_dict_in_generate=True,
            custom_generate=mars_lm.generate,
            **own,
        ).mars

    wanted = engine_generate(
        checkpoint, PROMPTS, DecodingSettings(max_new_tokens=16, exact=False, tau=0.0, block_size=3)
    )
    got = lossy(exact=False, tau=0.0, block_size=3)
    assert [r.token_ids for r in got] == [r.token_ids for r in wanted]
    assert [r.accepted_lengths for r in got] == [r.accepted_lengths for r in wanted]
    assert max(max(r.accepted_lengths) for r in got) == 3
    assert {max(r.accepted_lengths) for r in lossy(rule="entropy", tau=0.0, exact=False)} == {1}
    assert [r.accepted_lengths for r in lossy(tau=1.0)] == [[1] * 16] * 3
    partial = functools.partial(mars_lm.generate, exact=False, tau=0.0, block_size=3)
    ids = checkpoint.model.generate(
        **batch(PROMPTS), max_new_tokens=16, pad_token_id=PAD, custom_generate=partial
    )
    assert ids[:, len(PROMPTS[0]) :].tolist() == [r.token_ids for r in wanted]


def test_a_plain_model_decodes_one_token_at_a_time():
    plain = biased(tiny_checkpoint(mars=False), range(60, 80), gain=2.5)
    arguments = {**batch(PROMPTS), "max_new_tokens": 12, "pad_token_id": PAD}
    got = plain.model.generate(
        **arguments, custom_generate=mars_lm.generate, return_dict_in_generate=True, streamer=None
    )
    assert got.sequences.tolist() == plain.model.generate(**arguments).tolist()
    assert all(r.forwards == len(r.token_ids) for r in got.mars)


def test_prompts_without_a_mask_are_taken_whole(checkpoint):
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    arguments = {"max_new_tokens": 8, "pad_token_id": PAD, "suppress_tokens": [checkpoint.mars.mask_token_id]}
    wanted = checkpoint.model.generate(ids, **arguments)
    assert checkpoint.model.generate(ids, **arguments, custom_generate=mars_lm.generate).equal(wanted)


REFUSED = {
    "beams": ({"num_beams": 2}, "greedy or samples, and the arguments ask for beam search"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "ask for assisted generation"),
    "a filled cache": ({"past_key_values": "filled"}, "filled cache"),
    "embeddings": ({"inputs_embeds": "embeds", "input_ids": None}, "leave inputs_embeds out"),
    "attentions": (
        {"return_dict_in_generate": True, "output_attentions": True},
        "leave output_attentions out",
    ),
    "states": ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states out"),
    "another cache": ({"cache_implementation": "static"}, "cache of its own"),
    "guidance": ({"guidance_scale": 1.5}, "guidance_scale"),
    "right padding": ({"attention_mask": torch.tensor([[1, 1, 0]])}, "padding_side='left'"),
    "a hole": ({"attention_mask": torch.tensor([[1, 0, 1]])}, "padding_side='left'"),
    "an empty row": ({"attention_mask": torch.tensor([[0, 0, 0]])}, "empty"),
    "positions": ({"position_ids": torch.tensor([[3, 4, 5]])}, "leave position_ids out"),
    "another B": ({"block_size": 9}, "trained with 4"),
    "a tau out of range": ({"tau": 2.0}, "tau is 2.0"),
    "a seed": ({"do_sample": True, "seed": -1}, "seed is -1"),
    "no token left": (
        {"bad_words_ids": [[token] for token in range(320)], "min_new_tokens": 2},
        "No token was left",
    ),
    "too long": ({"input_ids": torch.full((1, 256), 5)}, "context"),
    "kernels": ({"kernels": "none"}, "kernels"),
}


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED.values(), ids=list(REFUSED))
def test_what_can_not_be_is_refused_in_one_sentence(checkpoint, arguments, sentence):
    values = {"input_ids": torch.tensor([[5, 6, 7]]), "max_new_tokens": 4, "pad_token_id": PAD, **arguments}
    if values.get("past_key_values"):
        out = checkpoint.model(input_ids=torch.tensor([[5, 6]]), use_cache=True)
        values["past_key_values"] = getattr(out, "cache", None) or out.past_key_values
    if values.get("inputs_embeds"):
        values["inputs_embeds"] = checkpoint.model.get_input_embeddings()(torch.tensor([[5, 6, 7]]))
        del values["input_ids"]
    with pytest.raises(MarsError, match=sentence) as refusal:
        checkpoint.model.generate(**values, custom_generate=mars_lm.generate)
    assert "\n" not in str(refusal.value)


def test_an_assistant_is_refused(checkpoint):
    with pytest.raises(ValueError, match=r"assisted|assistant"):
        checkpoint.model.generate(
            torch.tensor([[5, 6, 7]]),
            max_new_tokens=4,
            pad_token_id=PAD,
            assistant_model=checkpoint.model,
            custom_generate=mars_lm.generate,
        )


def test_other_callables_and_transformers_own_modes_are_as_before(checkpoint):
    seen = {}

    def other(model, input_ids, **kwargs):
        seen.update(kwargs)
        return input_ids

    ids = torch.tensor([[5, 6, 7]])
    checkpoint.model.generate(ids, custom_generate=other, streamer=Columns(), max_new_tokens=3)
    assert "tau" not in seen
    streamer = Columns()
    checkpoint.model.generate(ids, streamer=streamer, max_new_tokens=3, pad_token_id=PAD)
    assert len(streamer.columns) == 4
    assert streamer.ended == 1


def test_importing_the_package_imports_no_torch():
    code = "import sys, mars_lm; assert 'torch' not in sys.modules; print(mars_lm.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == mars_lm.__version__
    with pytest.raises(AttributeError, match="no attribute 'generat'"):
        mars_lm.generat  # noqa: B018
