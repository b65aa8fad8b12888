"""Choose the mask token and give it its row (SPEC 7)."""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
from tokenizers import AddedToken
from torch import nn

from mars_lm.architectures import check_supported
from mars_lm.errors import MarsError
from mars_lm.prompts import as_ids
from mars_lm.settings import MarsSettings

MASK_TOKEN = "<|mask|>"

# Names that say "nobody uses this row".
_RESERVED = re.compile(r"reserved|unused|extra_id|extra_\d|placeholder|dummy|control_\d", re.IGNORECASE)
# Tokens that mark up pre-training corpora and mean nothing in a chat, the least missed first.
_CORPUS_MARKERS = (
    "<empty_output>",
    "<jupyter_script>",
    "<jupyter_output>",
    "<jupyter_code>",
    "<jupyter_text>",
    "<jupyter_start>",
    "<issue_closed>",
    "<issue_comment>",
    "<issue_start>",
    "<gh_stars>",
    "<|gh_stars|>",
    "<commit_after>",
    "<commit_msg>",
    "<commit_before>",
    "<reponame>",
    "<filename>",
    "<file_sep>",
    "<repo_name>",
)
# Tokens that steer a chat, a tool call, a picture, or a text's shape: taking one would break what it steers.
_NEVER = re.compile(
    r"tool|func|call|think|reason|vision|image|video|audio|speech|box|quad|object_ref|user|assistant|system|"
    r"role|header|turn|inst|im_|chat|eot|eom|eos|bos|pad|unk|sep>|cls|end_of|endof|begin_of|start_of|python_tag",
    re.IGNORECASE,
)


def make_mars_ready(
    model: Any, tokenizer: Any, *, block_size: int, base_model: str | None, **mars_fields: Any
) -> MarsSettings:
    """Choose the mask token, give it its row, and write `model.config.mars` (SPEC 7).

    The mask token is, in this order: the one that the model is MARS-ready with; the tokenizer's own; a new
    special token `<|mask|>` in an embedding row that the model has and the tokenizer does not use; a
    reserved special token of the tokenizer; one added row, with a warning. Its embedding row, and its output
    row where embeddings are not tied, become the mean of all other rows (a row that is MARS-ready already is
    left as it was trained). The tokenizer's `mask_token` becomes the chosen one.

    Args:
        model: a causal LM; embeddings `[rows, hidden]`, changed in place.
        tokenizer: its tokenizer, changed in place.
        block_size: B, the most tokens that one forward may yield.
        base_model: the name of the base, for the record.
        **mars_fields: other fields of `MarsSettings` (layout, mask_loss, ar_weight, decoding).
    Returns:
        The settings, as written to `model.config.mars`.
    Raises:
        MarsError: a model that is not supported, a tokenizer that does not fit it, or a field out of range.
    """
    check_supported(model.config)
    ready = MarsSettings.from_config(model.config)
    # Validate the fields before anything is changed.
    settings = MarsSettings(
        mask_token_id=ready.mask_token_id if ready else 0,
        block_size=block_size,
        base_model=base_model,
        **mars_fields,
    )
    if ready:
        adopt_mask_token(model, tokenizer, ready.mask_token_id, initialise=False)
        mask_id = ready.mask_token_id
    else:
        mask_id = _choose(model, tokenizer)
        adopt_mask_token(model, tokenizer, mask_id, initialise=True)
    settings = MarsSettings(**{**settings.to_dict(), "mask_token_id": mask_id})
    model.config.mars = settings.to_dict()
    return settings


def adopt_mask_token(model: Any, tokenizer: Any, mask_id: int, *, initialise: bool) -> None:
    """Make a given id the mask token of a model and its tokenizer.

    Args:
        model: a causal LM, changed in place: rows are added up to `mask_id`.
        tokenizer: its tokenizer; `<|mask|>` is added if `mask_id` is its next free id.
        mask_id: the id.
        initialise: set the row (and the output row of untied embeddings) to the mean of the others.
    Raises:
        MarsError: the tokenizer has no such id and would not give it to its next token.
    """
    name = tokenizer.convert_ids_to_tokens(mask_id) if mask_id < _next_id(tokenizer) else None
    if name is None:
        if mask_id != _next_id(tokenizer):
            raise MarsError(
                f"The mask token's id is {mask_id}, but the tokenizer has {_next_id(tokenizer)} tokens: "
                "the tokenizer is not the one that this checkpoint was made with."
            )
        name = MASK_TOKEN
    if tokenizer.mask_token != name or tokenizer.mask_token_id != mask_id:
        token = tokenizer.added_tokens_decoder.get(mask_id) or AddedToken(name, normalized=False)
        token.special = True
        tokenizer.add_special_tokens({"mask_token": token})
    if tokenizer.convert_tokens_to_ids(name) != mask_id:
        raise MarsError(
            f"The mask token {name!r} has id {tokenizer.convert_tokens_to_ids(name)} in the tokenizer, "
            f"expected {mask_id}: the tokenizer is not the one that this checkpoint was made with."
        )
    if mask_id >= model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(mask_id + 1, mean_resizing=False)
        initialise = True
    if initialise:
        _set_to_mean(model, mask_id)


@torch.no_grad()
def _set_to_mean(model: Any, row: int) -> None:
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    parameters = [inputs.weight]
    if outputs is not None and outputs.weight is not inputs.weight:
        parameters.append(outputs.weight)
    if isinstance(getattr(outputs, "bias", None), nn.Parameter):
        parameters.append(outputs.bias)
    for parameter in parameters:
        # Summed in float64: the mean of 150,000 bfloat16 rows must not depend on how the sum is split.
        total = parameter.sum(dim=0, dtype=torch.float64) - parameter[row].double()
        parameter[row] = (total / (parameter.shape[0] - 1)).to(parameter.dtype)


def _choose(model: Any, tokenizer: Any) -> int:
    rows = model.get_input_embeddings().weight.shape[0]
    own = tokenizer.mask_token_id
    if own is not None and own < rows and own not in _ids_in_use(model, tokenizer):
        return int(own)
    known = tokenizer.get_added_vocab().get(MASK_TOKEN)
    if known is not None and known < rows:
        return int(known)
    free = _next_id(tokenizer)
    if free < rows:
        return free
    reserved = _reserved_token(model, tokenizer)
    if reserved is not None:
        return reserved
    if free > rows:
        raise MarsError(
            f"The tokenizer has {free} tokens but the model has {rows} embedding rows: they are not "
            "of one model."
        )
    warnings.warn(
        f"The model has no unused embedding row and the tokenizer no reserved token: one row was added for "
        f"{MASK_TOKEN} (vocabulary {rows} -> {rows + 1}).",
        stacklevel=3,
    )
    return free


def _next_id(tokenizer: Any) -> int:
    """The id that the tokenizer would give its next new token."""
    ids = tokenizer.get_vocab().values()
    return max(len(tokenizer), max(ids, default=-1) + 1)


def _reserved_token(model: Any, tokenizer: Any) -> int | None:
    in_use = _ids_in_use(model, tokenizer)
    rows = model.get_input_embeddings().weight.shape[0]
    templates = "\n".join(_chat_templates(tokenizer))
    reserved, markers = [], {}
    for token_id, token in tokenizer.added_tokens_decoder.items():
        name = str(token.content)
        if token_id in in_use or token_id >= rows or name in templates:
            continue
        if _RESERVED.search(name):
            reserved.append(token_id)
        elif token.special and name in _CORPUS_MARKERS and not _NEVER.search(name):
            markers[name] = token_id
    if reserved:
        return max(reserved)  # fine-tunes that need tokens take reserved ones from the front
    return next((markers[name] for name in _CORPUS_MARKERS if name in markers), None)


def _ids_in_use(model: Any, tokenizer: Any) -> set[int]:
    used: set[int] = set()
    for key in (
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "sep_token_id",
        "cls_token_id",
    ):
        for holder in (tokenizer, model.config, getattr(model, "generation_config", None)):
            used.update(as_ids(getattr(holder, key, None)))
    generation = getattr(model, "generation_config", None)
    for key in ("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"):
        used.update(as_ids(getattr(generation, key, None)))
    return used


def _chat_templates(tokenizer: Any) -> list[str]:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        return [str(text) for text in template.values()]
    return [template] if isinstance(template, str) else []
