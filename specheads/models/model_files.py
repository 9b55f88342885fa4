"""Look at the files of a base or draft model before transformers does.

Weights are safetensors or nothing. A config is held to them before memory is taken: a damaged or
hostile size in it would otherwise be allocated and filled with random numbers. What specheads
itself has written (``base/`` of an export, draft models) is looked at more closely.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from specheads.config import ConfigError
from specheads.models.digest import weight_files
from specheads.models.foreign import one_line
from specheads.models.manifest import MANIFEST, check_inside, check_manifest, read_json
from specheads.models.names import check_recorded
from specheads.models.tensor_headers import read_header

PROVENANCE = "specheads.json"  # beside a draft model of ours
_PICKLED = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_NEEDS_SAFETENSORS = (
    "specheads loads safetensors alone, since pickle can run any code; save it as safetensors"
    " where you trust it"
)
# what modules may be made for one by one, and how many: widths have other names
_COUNTED = {
    re.compile(r"(num|n)_\w*(layer|block)s?|(\w+_)?(layers|blocks|depth)"): 1024,
    re.compile(r"(num|n)_\w*experts?|(\w+_)?experts"): 1 << 16,
}
_PACKED = 16  # numbers that one of a quantised tensor may stand for: int32 of two bits each
# what would make transformers run other code, or read other files, than those of the folder
_FORBIDDEN = ("auto_map", "quantization_config", "transformers_weights", "per_layer_config")


def check_model_files(name: str, place: str, *, trust_remote_code: bool = False) -> bool:
    """Check a model's folder before it is loaded; a name on the hub is not looked at.

    Args:
        name: as the user gave it, for messages.
        place: what :func:`specheads.models.names.resolve_name` makes of it.
        trust_remote_code: whether code in the folder may be run.

    Returns:
        Whether specheads wrote it, so that nothing may be left over in its files.

    Raises:
        ConfigError: if its weights are pickle, its index names files elsewhere, they are far fewer
            than its config describes, or, if specheads wrote it, a file was changed.
    """
    folder = Path(place)
    if not folder.is_dir():
        return False
    files = weight_files(folder)
    pickled = sorted(file.name for pattern in _PICKLED for file in folder.glob(pattern))
    if not files and pickled:
        raise ConfigError(
            f"model.name={name} has no model.safetensors, but {pickled[0]}: {_NEEDS_SAFETENSORS}"
        )
    is_draft = (folder / PROVENANCE).is_file()
    if is_draft:
        if read_provenance(folder)["format_version"] > 1 or (folder / MANIFEST).exists():
            check_manifest(folder)
    elif not (folder.name == "base" and (folder.parent / MANIFEST).is_file()):
        if files and (folder / "config.json").is_file():
            _check_sizes(folder, files, trust_remote_code, f"cannot load model.name={name}")
        return False
    for file in folder.iterdir():
        check_inside(folder if is_draft else folder.parent, file)
    if (folder / "adapter_config.json").exists():  # transformers would load it, from anywhere
        raise ConfigError(f"{folder} holds adapter_config.json, which was not saved with it")
    _check_own(folder, files, trust_remote_code)
    return True


def read_provenance(folder: Path) -> dict[str, Any]:
    """Return what a draft model of ours says about its origin.

    Raises:
        ConfigError: if it cannot be read, or this version of specheads does not know it.
    """
    file = folder / PROVENANCE
    found = read_json(file, f"{folder} is not a draft model of specheads")
    if (version := found.get("format_version")) not in (1, 2) or type(version) is not int:
        raise ConfigError(f"{file} has format version {version!r:.20}, this specheads reads 2")
    if (kind := found.get("kind")) != "draft":
        raise ConfigError(f"{file} holds kind {kind!r:.40}, expected 'draft'")
    for key in ("base", "training", "measured"):
        if not isinstance(found.get(key), dict):
            raise ConfigError(f"{file}: {key} must be an object, found {found.get(key)!r:.40}")
    base = found["base"]
    try:
        check_recorded(base.get("name"), base.get("revision"))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    for key in ("digest", "dtype"):
        if not isinstance(base.get(key), str):
            raise ConfigError(f"{file}: base.{key} is {base.get(key)!r:.40}, expected a string")
    for key, value in found["measured"].items():
        if value is not None and type(value) not in (int, float):
            raise ConfigError(f"{file}: measured.{key:.40} is {value!r:.40}, expected a number")
    return found


def refuse_kernels(name: str, config: PreTrainedConfig, *, trust_remote_code: bool) -> None:
    """Refuse a config that names code on the hub for its attention or its experts.

    Raises:
        ConfigError: unless ``trust_remote_code``.
    """
    for each in (config, *(v for v in vars(config).values() if isinstance(v, PreTrainedConfig))):
        for key in ("_attn_implementation", "_experts_implementation"):
            value = getattr(each, key, None)
            if isinstance(value, str) and "/" in value and not trust_remote_code:
                raise ConfigError(
                    f"model.name={name}: its config asks for the code of {value:.80}; load it with"
                    " trust_remote_code=true if you trust that"
                )


def needs_safetensors(name: str, error: OSError) -> OSError | ConfigError:
    """Return what to raise for an error of transformers: in our words where files are missing."""
    if "safetensors" not in str(error):
        return error
    return ConfigError(f"model.name={name} has no model.safetensors: {_NEEDS_SAFETENSORS}")


def check_counts(about: object, config: dict[str, Any]) -> None:
    """Refuse numbers of layers and the like that would keep a machine busy for hours.

    Args:
        about: where the config is from, for messages.
        config: as it was read: transformers makes lists from such numbers.

    Raises:
        ConfigError: one line with the key.
    """
    for key, value in _settings(config):
        for counted, most in _COUNTED.items():
            if type(value) is int and value > most and counted.fullmatch(key):
                raise ConfigError(f"{about}: {key} is {value}, expected at most {most}")


def _check_own(folder: Path, files: list[Path], trust_remote_code: bool) -> None:
    """Refuse what specheads would not have written."""
    about = folder / "config.json"
    config = read_json(about, f"{folder} is no model", strict=False)
    if not files:
        raise ConfigError(f"{folder} lacks model.safetensors")
    names = [name for file in files for name in read_header(file)]
    if len(set(names)) < len(names):
        raise ConfigError(f"{folder}: a tensor is in two of its files")
    for key, _ in _settings(config):
        if key in _FORBIDDEN and not (key == "auto_map" and trust_remote_code):
            raise ConfigError(f"{about}: {key} must not be there")
    text = _check_sizes(folder, files, trust_remote_code, f"{about} describes no model")
    _check_generation(folder / "generation_config.json", text.vocab_size)


def _check_sizes(
    folder: Path, files: list[Path], trust_remote_code: bool, problem: str
) -> PreTrainedConfig:
    """Hold the config to the headers of the weights, in numbers of values; nothing is allocated.

    Returns:
        The config of the text model.
    """
    about = folder / "config.json"
    config = read_json(about, problem, strict=False)
    check_counts(about, config)
    shapes = [shape for file in files for shape, _ in read_header(file).values()]
    packed = any(key == "quantization_config" and value for key, value in _settings(config))
    stored = sum(map(math.prod, shapes)) * (_PACKED if packed else 1)
    with one_line(problem):
        known = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        refuse_kernels(str(folder), known, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(
                known, trust_remote_code=trust_remote_code
            )
    wanted = sum(parameter.numel() for parameter in model.parameters())
    tables = sum(buffer.numel() for buffer in model.buffers())
    if wanted > 2 * stored or tables > max(stored, 1 << 28):
        raise ConfigError(
            f"{about} describes a model of {wanted:,} weights and {tables:,} numbers in tables,"
            f" its files hold {stored:,}"
        )
    text: PreTrainedConfig = known.get_text_config()
    return text


def _check_generation(file: Path, vocab_size: int) -> None:
    """Check what transformers would pass over without a word, and decoding ends by."""
    if not file.is_file():
        return
    found = read_json(file, "", strict=False)
    for key, value in found.items():
        if key.endswith("_token_id"):
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(each) is int and -1 <= each < vocab_size for each in ids):
                raise ConfigError(f"{file}: {key} is {value!r:.40}, expected 0 to {vocab_size - 1}")
    with one_line(f"{file} cannot be used"):
        GenerationConfig.from_dict(found).validate()


def _settings(values: Any) -> list[tuple[str, Any]]:
    """Return every key of nested objects with its value."""
    if isinstance(values, list):
        return [pair for value in values for pair in _settings(value)]
    if not isinstance(values, dict):
        return []
    return [pair for key, value in values.items() for pair in ((key, value), *_settings(value))]
