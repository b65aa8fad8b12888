"""A training recipe: one YAML file of `Recipe` and `MarsConfig` fields, read and checked."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mars_lm.errors import MarsError
from mars_lm.training.trainer import MarsConfig

_EXPECTED = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}


@dataclasses.dataclass
class Recipe:
    """A training run as its YAML file describes it; every other key is a field of `MarsConfig`."""

    model: str = "default"  # a Hub id, a folder or a GGUF file; "default" is the package's own base weights
    adapter: str | None = None  # start from this adapter: merged into the base (full), or trained on (LoRA)
    train_data: list[str] = dataclasses.field(default_factory=list)
    eval_data: list[str] = dataclasses.field(default_factory=list)
    eval_rows: int = 0  # rows held out of train_data, where eval_data is empty
    skip_bad_rows: bool = False  # leave rows of another shape out, instead of refusing the data
    lora_rank: int = 0  # 0: full fine-tuning
    lora_alpha: float | None = None  # default: twice the rank
    lora_dropout: float = 0.0
    attention: str | None = None
    precision: str = "auto"  # auto, float32, bfloat16; what the matrix products run in
    save_dtype: str = "float32"  # of the result's weights; training keeps float32 ones in any case
    training: dict[str, Any] = dataclasses.field(default_factory=dict)

    def flat(self) -> dict[str, Any]:
        """All keys as a YAML file has them."""
        values = dataclasses.asdict(self)
        training = values.pop("training")
        return {**values, **training}


def read_recipe(path: Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Read a recipe, its `extends` chain first, then the overrides.

    Raises:
        MarsError: the file is missing or no YAML mapping, a key is unknown (the nearest names are given), or
            a value is of another type.
    """
    values = {**_load(Path(path), ()), **(overrides or {})}
    own = typing.get_type_hints(Recipe)
    del own["training"]
    hints = {**typing.get_type_hints(MarsConfig), **own}
    for name in list(values):
        if name not in hints:
            near = difflib.get_close_matches(str(name), hints, n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else "."
            raise MarsError(f"{path}: unknown key {name!r}{hint}")
        values[name] = _typed(path, name, values[name], hints[name])
    recipe = Recipe(**{name: value for name, value in values.items() if name in own})
    recipe.training = {name: value for name, value in values.items() if name not in own}
    if not recipe.train_data:
        raise MarsError(
            f"{path}: no train_data; name JSONL files or Hub ids, for example "
            "--set 'train_data=[rows.jsonl]'."
        )
    if recipe.eval_rows < 0 or recipe.lora_rank < 0:
        raise MarsError(f"{path}: eval_rows and lora_rank are expected to be 0 or more.")
    if recipe.save_dtype not in ("float32", "bfloat16", "float16"):
        raise MarsError(
            f"{path}: save_dtype is {recipe.save_dtype!r}, expected float32, bfloat16 or float16."
        )
    if not 0 <= recipe.lora_dropout < 1:
        raise MarsError(f"{path}: lora_dropout is {recipe.lora_dropout}, expected a number from 0 to 1.")
    return recipe


def _load(file: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    if file.resolve() in seen:
        raise MarsError(f"{file}: the recipe extends itself.")
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise MarsError(f"{file}: the recipe can't be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise MarsError(f"{file}: the recipe is not UTF-8 text.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise MarsError(f"{file}{where}: not valid YAML ({problem}).") from None
    if not isinstance(values, dict):
        raise MarsError(f"{file}: expected a mapping of keys to values.")
    parent = values.pop("extends", None)
    if parent is None:
        return values
    return {**_load(file.parent / str(parent), (*seen, file.resolve())), **values}


def _typed(path: Path, name: str, value: Any, hint: Any) -> Any:
    """The value as its field's type; YAML 1.1 reads 5e-6 as text, and a bare `no` as false.

    Raises:
        MarsError: it is of another type.
    """
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = set(typing.get_args(hint) if union else (hint,))
    if hint == list[str] and isinstance(value, str):
        return [value]
    if value is False and name.endswith("_strategy"):
        return "no"
    if name == "fsdp":  # declared as text, and true by now
        return value
    if isinstance(value, str) and kinds & {int, float} and str not in kinds:
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(value, float) and value.is_integer() and int in kinds and float not in kinds:
        value = int(value)
    if hint == list[str]:
        good = isinstance(value, list) and all(isinstance(item, str) for item in value)
        expected = "a list of texts"
    elif kinds <= {*_EXPECTED, type(None)}:
        good = (value is None and type(None) in kinds) or any(
            isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool)
            for kind in (kinds | {int} if float in kinds else kinds) - {type(None)}
        )
        expected = " or ".join(words for kind, words in _EXPECTED.items() if kind in kinds)
    else:
        return value  # dictionaries and enumerations: transformers checks them
    if not good:
        raise MarsError(f"{path}: {name} is {value!r}, expected {expected}.")
    return value
