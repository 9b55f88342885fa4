"""What the names of models mean, and how their weights are recognised.

A name is a folder, a GGUF file, a name on the hub, or a model that specheads knows. Weights are
recognised by the sha256 of their files.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from transformers.utils import cached_file

from specheads.config import ConfigError
from specheads.models.digest import file_sha256, weight_files
from specheads.models.gguf import gguf_folder, smollm2_folder
from specheads.models.manifest import one_line
from specheads.system.files import tinycode_dir
from specheads.system.hub import keep_to_the_cache_if_unreachable

# models that mean the same weights everywhere, whatever lies in the current folder
OURS = ("tinycode", "smollm2")


def resolve_name(name: str) -> str:
    """Return what transformers calls the model: its folder, or its name on the hub.

    A GGUF file is converted, and ``smollm2`` fetched, where that has not been done yet. For a name
    on the hub it is found out whether the hub answers.

    Raises:
        ConfigError: if ``name`` looks like a folder that does not exist, or one without a model, or
            is a GGUF file that cannot be converted.
        RunError: if the disk is full, or ``smollm2`` cannot be fetched.
    """
    if name == "tinycode":
        return str(tinycode_dir())
    if name == "smollm2":
        return str(smollm2_folder())
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"model.name={name}: there is no such file")
        return str(gguf_folder(path))
    if path.is_dir():
        if not any(path.glob("*.json")):  # which a tokenizer alone has too
            found = ", ".join(sorted(each.name for each in path.iterdir())[:5])
            raise ConfigError(
                f"model.name={name}: the folder holds no model, which is config.json,"
                " model.safetensors and tokenizer.json as save_pretrained writes them; it holds"
                f" {found or 'nothing'}"
            )
        return str(path)
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        raise ConfigError(f"model.name={name}: there is no such folder")
    keep_to_the_cache_if_unreachable()
    return name


def base_digest(name: str, *, revision: str | None = None) -> str:
    """Return one sha256 over the names and contents of a model's weight files.

    Args:
        name: ``tinycode``, a folder, or a hub name whose files have been downloaded.
        revision: of a hub model.

    Raises:
        ConfigError: if no weight files are found.
    """
    folder = model_folder(name, revision=revision)
    lines = [f"{file.name}\0{file_sha256(file)}\n" for file in weight_files(folder)]
    if not lines:
        raise ConfigError(f"{folder} holds no weights (model.safetensors)")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def model_folder(name: str, *, revision: str | None = None) -> Path:
    """Return the folder with a model's files: itself, or the hub's snapshot in the local cache.

    Raises:
        ConfigError: if it is neither a folder nor a hub model that can be reached.
    """
    resolved = resolve_name(name)
    if Path(resolved).is_dir():
        return Path(resolved)
    with one_line(f"cannot find model {name}"):
        config = cached_file(resolved, "config.json", revision=revision or "main")
    assert config is not None
    return Path(config).parent
