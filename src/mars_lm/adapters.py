"""LoRA adapters with a trained mask row: read, checked, and merged into plain weights (SPEC 7)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from mars_lm.errors import MarsError
from mars_lm.mask_token import adopt_mask_token
from mars_lm.settings import MarsSettings
from mars_lm.sources import check_weights, is_hub_id, read_json, told_in_one_sentence

SETTINGS_FILE = "mars.json"


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter's folder.

    Attributes:
        folder: where it is.
        base: the base that it names, or None.
        mars: what it was trained for; None for an ordinary LoRA adapter.
    """

    folder: Path
    base: str | None
    mars: MarsSettings | None


def is_adapter(folder: Path) -> bool:
    """True for a folder that holds an adapter and no whole model."""
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def read_adapter(name: str) -> Adapter:
    """Find an adapter and see that its files are whole.

    Args:
        name: a folder, or a Hub id.
    Raises:
        MarsError: no adapter there, or a damaged one.
    """
    folder = Path(name).expanduser()
    if not folder.exists() and is_hub_id(name):
        from huggingface_hub import snapshot_download

        with told_in_one_sentence(
            f"There is no folder {name}, and it cannot be had from the Hugging Face Hub either"
        ):
            folder = Path(snapshot_download(name))
    if not folder.is_dir():
        raise MarsError(f"There is no adapter folder {name}.")
    if not (folder / "adapter_config.json").is_file():
        raise MarsError(f"{name} is no LoRA adapter: it has no adapter_config.json.")
    config = read_json(folder / "adapter_config.json")
    check_weights(folder)
    mars = None
    if (folder / SETTINGS_FILE).is_file():
        mars = settings_from_dict(read_json(folder / SETTINGS_FILE))
    return Adapter(folder, config.get("base_model_name_or_path") or None, mars)


def settings_from_dict(value: dict[str, Any]) -> MarsSettings | None:
    """Read `mars.json`, which holds what a whole checkpoint has in its config.json under `mars`."""
    holder = type("Config", (), {"mars": value})
    return MarsSettings.from_config(holder)


def merge(model: Any, tokenizer: Any, adapter: Adapter, base: str) -> Any:
    """Merge an adapter into its base.

    Args:
        model: the base, changed in place.
        tokenizer: its tokenizer; it gets the adapter's mask token.
        adapter: the adapter.
        base: the base's name, for sentences.
    Returns:
        The plain model, with `config.mars` set if the adapter has MARS settings.
    Raises:
        MarsError: the adapter is of another base.
    """
    from peft import PeftConfig, PeftModel
    from peft.utils import load_peft_weights, set_peft_model_state_dict

    what = f"The adapter {adapter.folder} does not fit the base {base}"
    with told_in_one_sentence(what):
        ready = MarsSettings.from_config(model.config)
        if adapter.mars is not None:
            if ready is not None and ready.mask_token_id != adapter.mars.mask_token_id:
                raise MarsError(
                    f"{what}: its mask token is {adapter.mars.mask_token_id}, and the base's "
                    f"{ready.mask_token_id}."
                )
            # As before training: rows that the adapter does not hold (an untied output matrix) then agree.
            adopt_mask_token(model, tokenizer, adapter.mars.mask_token_id, initialise=ready is None)
        config = PeftConfig.from_pretrained(str(adapter.folder))
        config.inference_mode = True
        peft_model = PeftModel(model, config)
        weights = load_peft_weights(str(adapter.folder), device="cpu")
        report: Any = set_peft_model_state_dict(peft_model, weights)
        if report.unexpected_keys:
            raise MarsError(f"{what}: the base has no place for {min(report.unexpected_keys)}.")
        # A tied output matrix shares the mask's row, and has no row of its own in the file.
        kinds = ["lora_"]
        if not any("trainable_tokens" in key for key in weights):
            kinds.append("trainable_tokens")
        lacking = [key for key in report.missing_keys if any(kind in key for kind in kinds)]
        if lacking:
            raise MarsError(f"{what}: the adapter has nothing for {min(lacking)}.")
        model = peft_model.merge_and_unload()
    if adapter.mars is not None:
        model.config.mars = adapter.mars.to_dict()
    return model


def write_adapter(
    peft_model: Any, mars: MarsSettings, provenance: dict[str, Any], folder: Path, *, dtype: Any
) -> None:
    """Write an adapter's files into an empty folder.

    Args:
        peft_model: a `PeftModel`.
        mars: what it was trained for.
        provenance: how it was made; a JSON object.
        folder: where.
        dtype: of the stored tensors.
    """
    from safetensors.torch import load_file, save_file

    # The base's embedding matrix is not trained as a whole; the mask's row is stored by itself.
    peft_model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # a model card with nothing but blanks to fill in
    weights = folder / "adapter_model.safetensors"
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in load_file(weights).items()}
    weights.unlink()
    save_file(tensors, weights, metadata={"format": "pt"})
    if mars.base_model is not None:
        config = read_json(folder / "adapter_config.json")
        config["base_model_name_or_path"] = mars.base_model
        write_json(folder / "adapter_config.json", config)
    write_json(folder / SETTINGS_FILE, mars.to_dict())
    write_json(folder / "provenance.json", provenance)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file as people read it."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
