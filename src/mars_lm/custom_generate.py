"""The `custom_generate/` folder of a checkpoint: MARS decoding for whoever has transformers alone.

transformers copies the folder's modules one by one, following relative imports, and knows no sub-packages.
So the folder is flat, and made of this package's own modules: those that decoding needs, found by following
their imports, with `from mars_lm.decoding.engine import ...` turned into `from .engine import ...`.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

from mars_lm import __version__

FOLDER = "custom_generate"

_PACKAGE = "mars_lm"
_ENTRY = "mars_lm.decoding.beside_checkpoint"  # becomes generate.py
# What the modules import beside the standard library. (A test runs the folder without anything else of ours.)
_LIBRARIES = ("torch", "transformers", "numpy")


def write(checkpoint: Path) -> None:
    """Write `custom_generate/` into a checkpoint's folder: generate.py, what it imports, requirements.txt."""
    folder = checkpoint / FOLDER
    folder.mkdir(exist_ok=True)
    for name, source in _modules().items():
        (folder / f"{_flat(name)}.py").write_text(_notice(name) + _relative(source), encoding="utf-8")
    (folder / "requirements.txt").write_text(_requirements(), encoding="utf-8")


def _modules() -> dict[str, str]:
    """Every module that the entry needs, by its full name, with its source."""
    found: dict[str, str] = {}
    waiting = [_ENTRY]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = _source(name)
            waiting += [
                str(node.module)
                for node, kind in _own_imports(found[name])
                if kind == "needed" and node.module
            ]
    names = [_flat(name) for name in found]
    assert len(set(names)) == len(names), f"two modules would have one name in a flat folder: {sorted(names)}"
    return found


def _source(name: str) -> str:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


def _own_imports(source: str) -> Iterator[tuple[ast.ImportFrom, str]]:
    """The imports of this package, each "needed", "optional" (inside `try`) or for "types" alone."""

    def visit(node: ast.AST, kind: str) -> Iterator[tuple[ast.ImportFrom, str]]:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == _PACKAGE:
            yield node, kind
        for child in ast.iter_child_nodes(node):
            inner = kind
            if isinstance(node, ast.Try):
                inner = "optional"
            elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                inner = "types"
            yield from visit(child, inner)

    return visit(ast.parse(source), "needed")


def _flat(name: str) -> str:
    return "generate" if name == _ENTRY else name.rpartition(".")[2]


def _relative(source: str) -> str:
    """The source with its imports of this package made relative.

    An optional one stays: where the package is not installed, it fails, as its `try` expects. One for type
    checkers goes, since transformers takes every import that it reads for a requirement.
    """
    lines = source.splitlines(keepends=True)
    for node, kind in _own_imports(source):
        first = node.lineno - 1
        statement = f"from {node.module} import"
        assert lines[first].lstrip().startswith(statement), lines[first]
        if kind == "needed":
            lines[first] = lines[first].replace(statement, f"from .{_flat(str(node.module))} import", 1)
        elif kind == "types":
            indent = " " * node.col_offset
            lines[first : node.end_lineno] = [f"{indent}pass\n"] + [""] * (
                (node.end_lineno or 0) - node.lineno
            )
    return "".join(lines)


def _notice(name: str) -> str:
    return (
        f"# {name} of mars-lm {__version__}, written beside the checkpoint; do not edit it here.\n"
        "# SPDX-License-Identifier: Apache-2.0\n"
    )


def _requirements() -> str:
    """One lower bound a line: transformers reads no more than one comparison."""
    lines = [f"# MARS decoding of mars-lm {__version__}; mars-lm itself is not needed."]
    for entry in importlib.metadata.requires("mars-lm") or ():
        requirement = Requirement(entry)
        if requirement.name in _LIBRARIES and requirement.marker is None:
            lower = [str(bound) for bound in requirement.specifier if bound.operator == ">="]
            lines.append(requirement.name + "".join(lower[:1]))
    return "\n".join(lines) + "\n"
