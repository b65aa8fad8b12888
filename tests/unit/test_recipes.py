"""Every recipe is read and built; what a bad one is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mars_lm.errors import MarsError
from mars_lm.training import run
from mars_lm.training.objective import Objective
from mars_lm.training.recipe import read_recipe
from training_tools import BLOCK_DIFFUSION

RECIPES = Path(__file__).parents[2] / "recipes"
FILES = sorted(RECIPES.rglob("*.yaml"))
DATA = {"train_data": ["rows.jsonl"]}


def objective_of(name: str, tmp_path: Path) -> Objective:
    path = RECIPES / f"{name}.yaml"
    recipe = read_recipe(path, {**DATA, "output_dir": str(tmp_path), "use_cpu": True, "fsdp": False})
    return run._config(recipe, path).objective()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_recipe_builds_its_configuration(path, tmp_path):
    recipe = read_recipe(path, DATA)
    config = run._config(
        read_recipe(path, {**DATA, "output_dir": str(tmp_path), "use_cpu": True, "fsdp": False}), path
    )
    assert config.learning_rate == recipe.training["learning_rate"] > 0
    assert config.max_length == 512
    assert not config.activation_checkpointing
    assert path.read_text().startswith("# ")


def test_recipes_have_names_of_their_own_as_their_runs_have_folders():
    assert len({path.stem for path in FILES}) == len(FILES) >= 16
    for path in FILES:
        for word in (path.stem,) if path.parent == RECIPES else (path.stem.split("-", 2)[-1],):
            assert word in (RECIPES / "README.md").read_text(), word


def test_overlays_change_one_thing(tmp_path):
    for base in ("smollm2-135m", "qwen2.5-0.5b"):
        plain = objective_of(base, tmp_path)
        for overlay, changed in {
            "b8": {"block_size": 8},
            "b16": {"block_size": 16},
            "paper-layout": {"layout": "paper"},
            "no-sft-loss": {"ar_weight": 0.0},
        }.items():
            assert objective_of(f"ablations/{base}-{overlay}", tmp_path) == Objective(
                **{**vars(plain), **changed}
            )
        diffusion = objective_of(f"ablations/{base}-block-diffusion", tmp_path)
        assert (diffusion.gaps, diffusion.ar_weight, diffusion.mask_loss) == (BLOCK_DIFFUSION, 0.0, "ce")
    assert objective_of("smollm2-135m", tmp_path).mask_loss == "kd"
    assert objective_of("ablations/smollm2-135m-ce", tmp_path).mask_loss == "ce"
    assert objective_of("ablations/qwen2.5-0.5b-kd", tmp_path).mask_loss == "kd"
    for name in ("smollm2-135m-ar-sft", "qwen2.5-0.5b-twice-ar-sft"):
        assert not objective_of(f"ablations/{name}", tmp_path).noisy


@pytest.mark.parametrize("size", ["0.5b", "7b"])
@pytest.mark.parametrize("stage", ["", "-ar-sft"])
def test_the_papers_hyperparameters(size, stage):
    values = read_recipe(RECIPES / f"qwen2.5-{size}{stage}.yaml").flat()
    assert values["learning_rate"] == 5e-6
    assert values["per_device_train_batch_size"] * 8 == 384
    assert (values["max_length"], values["num_train_epochs"]) == (512, 5)
    assert values["train_data"] == ["allenai/Dolci-Instruct-SFT"]
    assert values["preset"] == ("ar-sft" if stage else "mars")


def written(tmp_path: Path, values: object, name: str = "r.yaml") -> Path:
    path = tmp_path / name
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
    return path


def test_a_recipe_extends_another_and_overrides_come_last(tmp_path):
    (tmp_path / "sub").mkdir()
    written(tmp_path, {"train_data": "a.jsonl", "seed": 1, "max_steps": 5, "block_size": 8}, "base.yaml")
    written(tmp_path, {"extends": "base.yaml", "seed": 2, "lora_rank": 4}, "middle.yaml")
    top = written(tmp_path, {"extends": "../middle.yaml", "max_steps": 7}, "sub/top.yaml")
    recipe = read_recipe(top, {"block_size": 16})
    assert recipe.train_data == ["a.jsonl"]
    assert recipe.lora_rank == 4
    assert recipe.training == {"seed": 2, "max_steps": 7, "block_size": 16}


def test_values_are_what_their_keys_want(tmp_path):
    recipe = read_recipe(
        written(
            tmp_path,
            "train_data: a.jsonl\nlearning_rate: 5e-6\nmax_steps: 1e3\neval_strategy: no\nlora_alpha: 8\n"
            "max_length: null\n",
        )
    )
    assert recipe.training == {
        "learning_rate": 5e-6,
        "max_steps": 1000,
        "eval_strategy": "no",
        "max_length": None,
    }
    assert type(recipe.training["max_steps"]) is int
    assert recipe.lora_alpha == 8


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ("a: [", r"r\.yaml, line \d: not valid YAML \("),
        ("- a\n- b\n", r"r\.yaml: expected a mapping of keys to values"),
        ("", r"r\.yaml: expected a mapping"),
        ("\x00", r"r\.yaml.*: not valid YAML"),
        ({"extends": "r.yaml"}, "the recipe extends itself"),
        ({"extends": "none.yaml"}, r"none\.yaml: the recipe can't be read \(No such file"),
        ({"seed": 1}, "no train_data; name JSONL files or Hub ids"),
        ({**DATA, "learning_rat": 1}, "unknown key 'learning_rat'; did you mean learning_rate"),
        ({**DATA, 3: 1}, "unknown key 3"),
        ({**DATA, "learning_rate": "fast"}, "learning_rate is 'fast', expected a number"),
        ({**DATA, "max_steps": 1.5}, "max_steps is 1.5, expected a whole number"),
        ({**DATA, "max_steps": True}, "max_steps is True, expected a whole number"),
        ({**DATA, "packing": "perhaps"}, "packing is 'perhaps', expected true or false"),
        ({**DATA, "lora_rank": None}, "lora_rank is None, expected a whole number"),
        ({**DATA, "model": 7}, "model is 7, expected text"),
        ({"train_data": [1]}, r"train_data is \[1\], expected a list of texts"),
        ({**DATA, "eval_rows": -1}, "eval_rows and lora_rank are expected to be 0 or more"),
        ({**DATA, "lora_dropout": 1.0}, "lora_dropout is 1.0, expected a number from 0 to 1"),
        ({**DATA, "save_dtype": "int4"}, "save_dtype is 'int4', expected float32, bfloat16 or float16"),
    ],
)
def test_a_bad_recipe_is_a_sentence(tmp_path, values, sentence):
    with pytest.raises(MarsError, match=sentence):
        read_recipe(written(tmp_path, values))


def test_a_recipe_that_is_not_there(tmp_path):
    with pytest.raises(MarsError, match=r"none\.yaml: the recipe can't be read \(No such file"):
        read_recipe(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"eval_strategy": "sometimes"}, "sometimes"),
        ({"lr_scheduler_type": "wavy"}, "wavy"),
        ({"precision": "int8"}, "precision is 'int8', expected auto, float32 or bfloat16"),
        ({"preset": "block_diffusion"}, "preset is 'block_diffusion', expected one of"),
        ({"layout": "windows"}, "layout is 'windows'"),
    ],
)
def test_a_value_that_no_run_has_is_a_sentence(tmp_path, values, sentence):
    path = written(tmp_path, {**DATA, "use_cpu": True, "output_dir": str(tmp_path), **values})
    with pytest.raises(MarsError, match=sentence):
        run._config(read_recipe(path), path)
