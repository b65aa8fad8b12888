"""The trainer: one loss and one gradient however a step's rows are cut, packed, padded or spread out."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path

import datasets
import pytest
import torch

from mars_lm.errors import MarsError
from mars_lm.training.objective import Objective
from mars_lm.training.streams import IGNORE
from mars_lm.training.trainer import MarsTrainer, _logit_scale, micro_batches, partition, row_costs
from tiny import tiny_model
from training_tools import (
    MASK,
    collate,
    config_for,
    example,
    exit_code,
    free_port,
    join_ranks,
    pretokenized,
    row,
    start_child,
    step_of,
    trainer_for,
)

# Eight examples of unlike lengths, and with unlike shares of responses.
EXAMPLES = [example(seed, 3 + seed % 4, 2 + 3 * seed, words=300) for seed in range(1, 9)]
ROWS = [row(item) for item in EXAMPLES]
SUPERVISED = sum(len(item.targets) for item in EXAMPLES)
TOKENS = sum(item.length for item in EXAMPLES)


def assert_same(one, other):
    (moved, log), (expected, expected_log) = one, other
    assert log["loss"] == pytest.approx(expected_log["loss"], rel=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(moved[name], gradient, rtol=1e-3, atol=2e-6, msg=name)
    for name in expected_log.keys() & log.keys():
        if name.startswith(("loss/", "accuracy/", "agreement/", "ar_share")):
            assert log[name] == pytest.approx(expected_log[name], rel=1e-4), name


@pytest.fixture(scope="module")
def whole_step(tmp_path_factory):
    """The step with all rows in one micro-batch."""
    return step_of(trainer_for(tmp_path_factory.mktemp("whole"), pretokenized(*ROWS), mask_loss="kd"))


@pytest.mark.parametrize(
    "cut",
    [
        {"max_tokens_per_micro_batch": 100},
        {"max_tokens_per_micro_batch": 1},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "max_tokens_per_micro_batch": 90,
        },
        {"packing": True, "max_length": 64},
    ],
    ids=["some rows", "one row", "accumulated", "both", "packed"],
)
def test_loss_and_gradient_do_not_depend_on_how_a_step_is_cut(whole_step, cut, tmp_path):
    trainer = trainer_for(tmp_path, pretokenized(*ROWS), mask_loss="kd", **cut)
    if cut.get("packing"):
        assert len(trainer.train_dataset) < len(ROWS)
    assert_same(step_of(trainer), whole_step)


def test_padding_changes_nothing(tmp_path):
    """The shortest rows, padded to the longest, train what they train alone."""
    trainer = trainer_for(tmp_path, pretokenized(*ROWS))
    trainer.model.train()

    def gradient(batches):
        trainer.model.zero_grad()
        for batch in batches:
            trainer.compute_loss(trainer.model, batch, num_items_in_batch=SUPERVISED).backward()
        return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])

    padded = gradient([trainer.data_collator(ROWS)])
    alone = gradient([trainer.data_collator([one]) for one in ROWS])
    torch.testing.assert_close(padded, alone, rtol=1e-3, atol=2e-6)


def one_rank(rank: int, port: int, folder: Path, values: dict) -> None:
    join_ranks(rank, 2, port)
    trainer = trainer_for(folder, pretokenized(*ROWS), ddp_backend="gloo", **values)
    moved, log = step_of(trainer)
    if rank == 0:
        torch.save((moved, log), folder / "moved.pt")


@pytest.mark.parametrize(
    "values",
    [
        {"per_device_train_batch_size": 4, "mask_loss": "kd"},
        # Two steps of accumulation, of micro-batches whose number differs between the ranks.
        {
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_tokens_per_micro_batch": 60,
            "mask_loss": "kd",
        },
    ],
    ids=["halves", "accumulated"],
)
def test_two_processes_make_the_step_of_one(whole_step, values, tmp_path):
    port = free_port()
    children = [start_child(one_rank, rank, port, tmp_path, values) for rank in range(2)]
    assert [exit_code(child) for child in children] == [0, 0]
    assert_same(torch.load(tmp_path / "moved.pt", weights_only=False), whole_step)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_lora_trains_its_matrices_and_the_masks_row(tied, tmp_path):
    trainer = trainer_for(tmp_path / "a", pretokenized(*ROWS), lora=True, tied=tied, mask_loss="kd")
    moved, log = step_of(trainer)
    assert any("lora_B" in name for name in moved)
    masks = [name for name in moved if "trainable_tokens" in name]
    assert masks
    assert all(moved[name].abs().sum() > 0 for name in [*masks, *(n for n in moved if "lora_B" in n)])
    cut = trainer_for(
        tmp_path / "b",
        pretokenized(*ROWS),
        lora=True,
        tied=tied,
        mask_loss="kd",
        max_tokens_per_micro_batch=80,
    )
    assert_same(step_of(cut), (moved, log))


def test_ar_sft_is_what_transformers_trains(tmp_path):
    trainer = trainer_for(tmp_path, pretokenized(*ROWS), preset="ar-sft", max_tokens_per_micro_batch=80)
    model = trainer.model
    batch = collate(ROWS)
    logits = model(input_ids=batch["input_ids"], attention_mask=(batch["example"] > 0).long()).logits
    logits[..., trainer.mars.mask_token_id] = -torch.inf  # never a candidate
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORE
    )
    expected = torch.autograd.grad(loss, model.model.embed_tokens.weight)[0]
    moved, log = step_of(trainer)
    assert log["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert log["loss/ar"] == pytest.approx(loss.item(), rel=1e-5)
    assert log["ar_share"] == 1
    assert "loss/mask" not in log
    torch.testing.assert_close(-moved["model.embed_tokens.weight"], expected, rtol=1e-3, atol=2e-6)


def test_what_is_logged(whole_step, tmp_path):
    _, log = whole_step
    assert {
        "loss",
        "loss/ar",
        "loss/mask",
        "ar_share",
        "tokens_per_second",
        "stream_tokens_per_second",
        "learning_rate",
        "epoch",
        *(f"{kind}/distance_{distance}" for kind in ("accuracy", "agreement") for distance in (2, 3, 4)),
    } <= log.keys()
    assert 0.5 < log["ar_share"] < 0.7
    assert log["stream_tokens_per_second"] > log["tokens_per_second"] > 0
    share = log["ar_share"]
    assert log["loss"] == pytest.approx(log["loss/ar"] + log["loss/mask"] * (1 - share) / share, rel=1e-4)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_held_out_loss_is_the_mean_over_all_held_out_tokens(size, tmp_path):
    trainer = trainer_for(
        tmp_path,
        pretokenized(*ROWS[:2]),
        eval_dataset=pretokenized(*ROWS[2:]),
        per_device_eval_batch_size=size,
        max_tokens_per_micro_batch=150,
        mask_loss="kd",
        ar_weight=0.5,
    )
    trainer.model.eval()
    with torch.no_grad():
        expected = trainer.compute_loss(trainer.model, trainer.data_collator(ROWS[2:])).item()
    trainer._totals["eval"].clear()
    measures = trainer.evaluate()
    assert measures["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert measures["eval_loss/ar"] > 0
    assert "eval_agreement/distance_2" in measures


def test_bfloat16_autocast_on_a_cpu(whole_step, tmp_path):
    moved, log = step_of(trainer_for(tmp_path, pretokenized(*ROWS), mask_loss="kd", bf16=True))
    expected, expected_log = whole_step
    assert log["loss"] == pytest.approx(expected_log["loss"], rel=0.02)
    assert all(gradient.dtype == torch.float32 for gradient in moved.values())
    mine, theirs = (torch.cat([g.flatten() for g in step.values()]) for step in (moved, expected))
    assert torch.nn.functional.cosine_similarity(mine, theirs, dim=0) > 0.99


def test_each_epoch_is_a_visit_of_its_own(tmp_path, monkeypatch):
    visits = []
    trainer = trainer_for(tmp_path, pretokenized(*ROWS), max_steps=6, per_device_train_batch_size=4)
    plain = trainer.streams

    def noted(batch):
        visits.append(trainer.state.epoch)
        streams = plain(batch)
        phases.append(tuple(streams.block.sum(dim=1).tolist()))
        return streams

    phases: list = []
    monkeypatch.setattr(trainer, "streams", noted)
    trainer.train()
    assert [int(epoch + 1e-6) for epoch in visits] == [0, 0, 1, 1, 2, 2]
    assert len({frozenset(pair) for pair in zip(phases[::2], phases[1::2], strict=True)}) > 1


@pytest.mark.parametrize("layout", ["window", "paper"])
@pytest.mark.parametrize("max_tokens", [1, 60, 150, 10_000])
def test_micro_batches_hold_each_row_once_and_stay_within_their_tokens(tmp_path, layout, max_tokens):
    objective = Objective(layout=layout)
    batch = collate(ROWS)
    costs = row_costs(batch, objective)
    parts = partition(costs, max_tokens)
    assert sorted(number for rows in parts for number in rows) == list(range(len(ROWS)))
    trainer = trainer_for(tmp_path, pretokenized(*ROWS[:1]), layout=layout)
    for rows, micro in zip(parts, micro_batches(batch, parts), strict=True):
        streams = trainer.streams(micro)
        assert streams.input_ids.numel() <= max_tokens or len(rows) == 1
        assert micro["input_ids"].shape[1] == max(EXAMPLES[number].length for number in rows)
    more = list(micro_batches(batch, parts, len(parts) + 2))
    assert len(more) == len(parts) + 2
    for empty in more[-2:]:
        assert (empty["labels"] == IGNORE).all()
        assert (empty["example"] > 0).all()


def test_the_collator_drops_labels_that_nothing_can_predict():
    first = example(3, 0, 4)
    second = example(4, 2, 4)
    second.ids[3] = second.labels[3] = MASK
    batch = collate([row(first, second), row(first)])
    assert batch["labels"][0].tolist() == [
        IGNORE, *first.ids[1:], IGNORE, IGNORE, second.ids[2], IGNORE, *second.ids[4:]
    ]  # fmt: skip
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    assert batch["example"].tolist() == [[1] * 4 + [2] * 6, [1] * 4 + [0] * 6]


TEXT = [
    {"prompt": "hello ", "completion": "the quick brown fox"},
    {"prompt": "hello ", "completion": "  "},
    {"prompt": "the quick brown fox jumps over the lazy dog " * 5, "completion": "dog"},
    {"prompt": "a user asks ", "completion": "0 1 2 3"},
    {"prompt": "hello", "completion": ""},
]
MESSAGES = [
    {
        "prompt": [{"role": "user", "content": text["prompt"]}],
        "completion": [{"role": "assistant", "content": text["completion"]}],
    }
    for text in TEXT
]


@pytest.mark.parametrize("rows", [TEXT, MESSAGES], ids=["text", "messages"])
@pytest.mark.parametrize("packing", [False, True], ids=["", "packed"])
def test_rows_without_a_response_are_dropped_counted_and_told(rows, packing, tmp_path, caplog):
    trainer = trainer_for(
        tmp_path,
        datasets.Dataset.from_list(rows),
        eval_dataset=datasets.Dataset.from_list(rows[:2]),
        max_length=60,
        packing=packing,
    )
    assert trainer.dropped_rows == {"train": 3, "eval": 1}
    assert "3 of 5 rows of the train data dropped" in caplog.text
    assert len(trainer.train_dataset) == (1 if packing else 2)
    _, log = step_of(trainer)
    assert math.isfinite(log["loss"])


@pytest.mark.parametrize("packing", [False, True], ids=["", "packed"])
def test_no_row_with_a_response_is_a_sentence(packing, tmp_path):
    for rows in ([TEXT[1]], [TEXT[2]]):
        with pytest.raises(MarsError, match="No row of the train data has a response left to train on"):
            trainer_for(tmp_path, datasets.Dataset.from_list(rows), max_length=60, packing=packing)


def test_split_packing_keeps_what_lies_behind_max_length(tmp_path):
    long = example(1, 4, 50, words=300)
    trainer = trainer_for(
        tmp_path, pretokenized(row(long)), packing=True, packing_strategy="bfd_split", max_length=20
    )
    assert sum(len(item["input_ids"]) for item in trainer.train_dataset) == long.length
    _, log = step_of(trainer)
    assert math.isfinite(log["loss"])


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"attention": "flex_attention"}, "trains on a CUDA GPU only, and this run is on cpu: expected sdpa"),
        ({"attention": "eager"}, "attention is 'eager', expected one of sdpa, flex_attention"),
        ({"packing": True, "packing_strategy": "wrapped"}, "packing_strategy is 'wrapped'"),
        ({"max_tokens_per_micro_batch": 0}, "max_tokens_per_micro_batch is 0, expected"),
        ({"preset": "nothing"}, "preset is 'nothing', expected one of"),
        ({"gap_alignment": "left"}, "gap_alignment is 'left', expected one of next, same"),
    ],
)
def test_settings_that_cannot_be_are_refused(values, sentence, tmp_path):
    with pytest.raises(MarsError, match=sentence):
        trainer_for(tmp_path, pretokenized(*ROWS), **values)


@pytest.mark.parametrize(
    ("family", "options", "scale"),
    [
        ("llama", {}, 1.0),
        ("granite", {"logits_scaling": 8.0}, 1 / 8),
        ("cohere", {"logit_scale": 0.0625}, 0.0625),
    ],
)
def test_a_models_own_scale_of_its_logits_is_found(family, options, scale):
    assert _logit_scale(tiny_model(family, **options)) == pytest.approx(scale, rel=1e-4)


def test_a_model_that_bends_its_logits_is_refused():
    model = tiny_model("llama")
    plain = model.forward

    def bent(*args, **kwargs):
        output = plain(*args, **kwargs)
        output.logits = output.logits.tanh()
        return output

    model.forward = bent
    with pytest.raises(MarsError, match="does more to its logits than scale them"):
        _logit_scale(model)


def test_settings_and_provenance_lie_beside_every_checkpoint(tmp_path):
    trainer = trainer_for(
        tmp_path,
        pretokenized(*ROWS),
        max_steps=2,
        save_strategy="steps",
        save_steps=1,
        provenance={"command": "mars train r.yaml", "seed": 3},
    )
    trainer.train()
    for step in (1, 2):
        folder = tmp_path / f"checkpoint-{step}"
        assert json.loads((folder / "mars.json").read_text()) == trainer.mars.to_dict()
        facts = json.loads((folder / "provenance.json").read_text())
        assert facts == {"command": "mars train r.yaml", "seed": 3, "step": step, "epoch": float(step)}


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("I/O error: No space left on device")],
)
def test_a_full_disk_leaves_the_checkpoint_before_and_a_sentence(tmp_path, monkeypatch, error):
    trainer = trainer_for(tmp_path, pretokenized(*ROWS), max_steps=2, save_strategy="steps", save_steps=1)
    plain = MarsTrainer._save_optimizer_and_scheduler

    def fills_up(self, folder):
        if self.state.global_step == 2:
            raise error
        plain(self, folder)

    monkeypatch.setattr(MarsTrainer, "_save_optimizer_and_scheduler", fills_up)
    with pytest.raises(MarsError, match=r"No space is left on the disk of .*: checkpoint-2 was not saved"):
        trainer.train()
    assert sorted(folder.name for folder in tmp_path.glob("checkpoint-*")) == ["checkpoint-1"]


def test_generation_still_works_on_the_trained_model(tmp_path):
    trainer = trainer_for(tmp_path, pretokenized(*ROWS))
    trainer.train()
    trainer.model.eval()
    assert trainer.model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False).shape[1] > 3


def test_a_configuration_names_its_objective(tmp_path):
    config = config_for(tmp_path, preset="mars", block_size=8, layout="paper", mask_loss="kd", ar_weight=0.5)
    assert config.objective() == Objective(block_size=8, layout="paper", mask_loss="kd", ar_weight=0.5)
