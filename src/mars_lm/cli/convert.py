"""`mars convert`: any base, or a base and an adapter, to a MARS-ready folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mars_lm.cli import options
from mars_lm.cli.terminal import quiet_libraries
from mars_lm.errors import MarsError


def convert(
    source: Annotated[str, typer.Argument(help="A Hub id, a folder, a .gguf file, or an adapter's folder.")],
    target: Annotated[Path, typer.Argument(help="The folder to write.")],
    adapter: options.Adapter = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="B",
            help="The most tokens of one forward; for a source without MARS settings.",
            show_default="4",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="Number format of the weights written: float32, bfloat16 or float16.",
            show_default="the source's",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint at TARGET.")] = False,
) -> None:
    """Write a MARS-ready checkpoint: mask token chosen, settings in config.json, an adapter merged.

    The result is an ordinary checkpoint for transformers. Once trained, it yields several tokens per forward.
    """
    if (target / "config.json").exists() and not overwrite:
        raise MarsError(f"{target} holds a checkpoint already: name another folder, or add --overwrite.")
    from mars_lm import checkpoint as checkpoints

    quiet_libraries()
    if dtype not in (None, "auto", *checkpoints.DTYPES):
        raise MarsError(
            f"--dtype is {dtype!r}, and what can be written is {', '.join(checkpoints.DTYPES)}"
            + ("; load that with --dtype int8." if dtype == checkpoints.INT8 else ".")
        )
    loaded = checkpoints.load(source, adapter=adapter, dtype=dtype or _stored_dtype(source))
    if loaded.mars is None:
        settings = checkpoints.make_mars_ready(
            loaded.model, loaded.tokenizer, block_size=block_size or 4, base_model=source
        )
    else:
        settings = loaded.mars
        if block_size not in (None, settings.block_size):
            raise MarsError(
                f"{source} was trained for B = {settings.block_size}, so it can't be converted to "
                f"B = {block_size}: leave --block-size out; decoding takes any smaller B."
            )
    checkpoints.save(loaded.model, loaded.tokenizer, target)
    token = loaded.tokenizer.convert_ids_to_tokens(settings.mask_token_id)
    print(f"{target}: B = {settings.block_size}, mask token {token} (id {settings.mask_token_id})")


def _stored_dtype(source: str) -> str:
    """The number format that a source's config names; float32, which holds them all, where it names none."""
    from transformers import AutoConfig

    try:
        stored = str(AutoConfig.from_pretrained(source).dtype).removeprefix("torch.")
    except (OSError, ValueError):  # a GGUF file, an adapter, or no model at all, which `load` will tell
        return "float32"
    return stored if stored in ("float32", "bfloat16", "float16") else "float32"
