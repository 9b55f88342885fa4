"""Who answers when ``regenerate`` is run: which weights, with which settings, and their engine."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specheads import hardware
from specheads.config import ConfigError, RegenerateConfig
from specheads.data.client import Client
from specheads.data.dialogue import TurnEncoder
from specheads.data.outcome import Sampling
from specheads.decoding.exported import exported_drafter
from specheads.decoding.regenerate import Engine
from specheads.models.base import check_tokenizer, end_tokens, load_base_model, load_tokenizer
from specheads.models.checkpoint import load_export, read_config
from specheads.models.digest import base_digest, file_sha256, model_folder, weight_files
from specheads.models.names import resolve_name


@dataclass(frozen=True)
class Answering:
    """Whose answers these are.

    Attributes:
        model: a folder or a name; at an endpoint, the name there.
        digest: of its weights; empty where a server has them.
        tuned: whether it is the tuned base of an export, and not an original.
        quantization: of an export's base, as it is recorded there.
    """

    model: str
    digest: str = ""
    tuned: bool = False
    quantization: str | None = None


def who_answers(config: RegenerateConfig, client: Client | None = None) -> Answering:
    """Return whose answers the settings ask for, without loading a model.

    Raises:
        RunError: if the server has to be asked, and does not say.
        ConfigError: if model and checkpoint contradict each other, or the checkpoint's base was
            tuned and ``model`` does not ask for that tuned base by name.
    """
    if client is not None:
        return Answering(config.endpoint_model or client.first_model())
    if not config.checkpoint:
        model = config.model or "tinycode"
        return Answering(model, _digest(model, config))
    info = read_config(config.checkpoint)["base"]
    method = (info.get("quantization") or {}).get("method")
    if not info["tuned"]:
        found = _digest(config.model, config) if config.model else info["digest"]
        if found != info["digest"]:
            raise ConfigError(
                f"{config.checkpoint} was trained on {info['name']}, digest"
                f" {info['digest'][:12]}; model={config.model} has {found[:12]}"
            )
        return Answering(config.model or info["name"], found, quantization=method)
    tuned = Path(config.checkpoint) / ("adapter" if info.get("adapter") else "base")
    if not config.model or Path(config.model).resolve() != tuned.resolve():
        raise ConfigError(
            f"{config.checkpoint} brings a tuned base, so the answers would not be those of"
            f" {config.model or info['name'] or 'tinycode'}; leave checkpoint out, or ask for the"
            f" tuned base's answers with model={tuned}"
        )
    return Answering(str(tuned), _tuned_digest(tuned, info), tuned=True, quantization=method)


def _tuned_digest(tuned: Path, info: dict[str, Any]) -> str:
    if not info.get("adapter"):
        return base_digest(str(tuned))
    files = sorted(file for file in tuned.iterdir() if file.suffix in (".safetensors", ".json"))
    lines = [info["digest"], *(f"{file.name}\0{file_sha256(file)}" for file in files)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _digest(model: str, config: RegenerateConfig) -> str:
    folder = model_folder(model, revision=config.revision)
    if folder != Path(resolve_name(model)) and not weight_files(folder):
        load_base_model(  # a hub model that was never used here: fetch it
            model,
            revision=config.revision,
            device="cpu",
            attn="auto",
            trust_remote_code=config.trust_remote_code,
        )
    return base_digest(model, revision=config.revision)


def settings_of(config: RegenerateConfig, who: Answering) -> dict[str, Any]:
    """Return all that decides which answers there are; a file is continued with the same only."""
    if config.endpoint:
        ours = {"model": who.model, "endpoint": True, "tokenizer": config.model}
    else:
        dtype = hardware.pick_dtype(config.dtype, hardware.pick_device(config.device))
        ours = {
            "model_digest": who.digest,  # its folder may move
            "tuned": who.tuned,
            "quantization": who.quantization,
            "dtype": str(dtype).removeprefix("torch."),
        }
    # greedy answers do not depend on how others would be drawn
    drawn = {"top_k": config.top_k, "top_p": config.top_p, "seed": config.seed}
    return {
        **ours,
        "temperature": config.temperature,
        **(drawn if config.temperature else {}),
        "max_new_tokens": config.max_new_tokens,
        "keep_truncated": config.keep_truncated,
    }


def sampling_of(config: RegenerateConfig) -> Sampling:
    """Return how answers are drawn."""
    return Sampling(
        config.temperature,
        config.top_k,
        config.top_p,
        config.seed,
        config.max_new_tokens,
        config.keep_truncated,
    )


def load_engine(config: RegenerateConfig, who: Answering) -> Engine:
    """Load the base model, and the heads of ``checkpoint`` where there is one."""
    device = hardware.pick_device(config.device)
    dtype = hardware.pick_dtype(config.dtype, device)
    hardware.pin_threads(config.threads)
    trust = config.trust_remote_code
    drafter = None
    if config.checkpoint:
        export = load_export(
            config.checkpoint,
            base=None if who.tuned or not config.model else config.model,
            dtype=dtype,
            device=device,
            trust_remote_code=trust,
        )
        base, tokenizer, drafter = export.base, export.tokenizer, exported_drafter(export)
    else:
        tokenizer = load_tokenizer(who.model, revision=config.revision, trust_remote_code=trust)
        base = load_base_model(
            who.model,
            revision=config.revision,
            dtype=dtype,
            device=device,
            attn="auto",
            trust_remote_code=trust,
        )
        check_tokenizer(tokenizer, base)
    turns = TurnEncoder(tokenizer, end_tokens(base, tokenizer))
    size = config.batch_size
    return Engine(base, turns, sampling_of(config), drafter=drafter, batch_size=size)
