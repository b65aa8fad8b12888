"""`mars train`: a recipe, and changes to it from the command line."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer

from mars_lm.errors import MarsError


def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="The recipe; recipes/ has some.")],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A key of the recipe and its value, as YAML writes it; repeatable.",
        ),
    ] = None,
) -> None:
    """Train a model as a recipe says; a run that was stopped goes on from its last checkpoint.

    Ctrl-C stops after the step at work and keeps a checkpoint.
    """
    _check_extra()
    overrides = parse_overrides(set_ or [])
    from mars_lm.training.run import train as run

    print(run(recipe, overrides))


def _check_extra() -> None:
    missing = [name for name in ("trl", "datasets", "yaml") if importlib.util.find_spec(name) is None]
    if missing:
        raise MarsError(f"Training needs {', '.join(missing)}: pip install 'mars-lm[train]'.")


def parse_overrides(assignments: list[str]) -> dict[str, Any]:
    """`key=value` texts as a mapping, each value read as YAML.

    Raises:
        MarsError: an assignment without `=` or key, or a value that is no YAML.
    """
    import yaml

    overrides = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise MarsError(f"--set {assignment!r}: expected KEY=VALUE, such as --set learning_rate=5e-6.")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise MarsError(f"--set {assignment!r}: the value is not valid YAML.") from None
        overrides[key.strip()] = _number_or_same(value) if value == text.strip() else value
    return overrides


def _number_or_same(text: str) -> float | str:
    """YAML 1.1 takes 5e-6, which has no point, for a text; whoever writes it bare means the number."""
    try:
        return float(text)
    except ValueError:
        return text
