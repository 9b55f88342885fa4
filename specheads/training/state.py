"""Resumable state of a training run: ``checkpoints/step-*/``, safetensors and JSON.

A checkpoint holds the trained weights, the optimizer's state, where the data stands, the random
generators and the running means, so that a resumed run ends bit-identical to one that never
stopped. The engine writes its part (``engine.py``); this module writes the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specheads import dist
from specheads.config import ConfigError, TrainConfig
from specheads.models.manifest import read_json

# These may differ between a run and its continuation; anything else would change the numbers.
FREE_TO_CHANGE = (
    "name", "run_dir", "max_steps", "resume", "resume_trust", "dry_run", "log", "checkpoint",
    "dist_timeout", "optim.skip_nonfinite",
)  # fmt: skip


@dataclasses.dataclass
class Progress:
    """How far a run has come."""

    step: int = 0  # optimizer steps taken
    stage: str = ""
    # sums since the last line of metrics.jsonl, so that the line after a resume is the same
    window: dict[str, float] = dataclasses.field(default_factory=dict)
    window_steps: int = 0
    # the evaluation of this stage with the longest accept length; step 0: none yet
    best_step: int = 0
    best: float = 0.0
    since_best: int = 0  # evaluations after it
    stopped: bool = False  # the stage ended early, by evaluate.patience
    skipped: int = 0  # steps of the whole run left out, as a loss or gradient was not finite
    unevaluated: bool = False  # stopped before or in the evaluation that is due at this step


def flatten_settings(cfg: TrainConfig) -> dict[str, Any]:
    """Return the settings that decide a run's numbers, as ``{"optim.lr": 0.001, ...}``."""

    def walk(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, Mapping) and value:
            for key, inner in value.items():
                yield from walk(f"{prefix}.{key}" if prefix else key, inner)
        else:
            yield prefix, value

    settings = dataclasses.asdict(cfg)
    return {
        key: value
        for key, value in walk("", settings)
        if key not in FREE_TO_CHANGE and key.split(".")[0] not in FREE_TO_CHANGE
    }


def read_state(folder: Path) -> dict[str, Any]:
    """Return what ``state.json`` of a checkpoint says.

    Raises:
        ConfigError: if it is missing or is not what ``save_rank`` writes.
    """
    state = read_json(folder / "state.json", f"{folder} is not a whole checkpoint")
    kinds = {"world_size": int, "settings": dict}
    kinds |= {field.name: type(field.default) for field in _simple_fields()}
    kinds["window"] = dict
    for key, kind in kinds.items():
        if type(state.get(key)) not in ({kind, int} if kind is float else {kind}):
            raise ConfigError(
                f"{folder / 'state.json'}: {key} must be {kind.__name__}, "
                f"found {state.get(key)!r:.40}"
            )
    if state["world_size"] < 1 or min(state["step"], state["best_step"]) < 0:
        raise ConfigError(f"{folder / 'state.json'} counts below zero")
    return state


def _simple_fields() -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(Progress) if f.default is not dataclasses.MISSING]


def check_settings(path: Path, state: Mapping[str, Any], cfg: TrainConfig) -> None:
    """Refuse to go on with other settings than those that a checkpoint was written with.

    Raises:
        ConfigError: naming the setting, what it was and what it is.
    """
    if state["world_size"] != dist.world_size():
        raise ConfigError(
            f"{path} was written by {state['world_size']} processes, this run has "
            f"{dist.world_size()}"
        )
    now = json.loads(json.dumps(flatten_settings(cfg)))
    before = state["settings"]
    for key in sorted(now.keys() | before.keys()):
        if now.get(key) != before.get(key):
            raise ConfigError(
                f"cannot resume {path}: {key} was {before.get(key)!r}, is {now.get(key)!r}"
            )


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write ``tensors`` as safetensors, copied to the CPU, none sharing memory with another."""
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a file that ``save_tensors`` wrote."""
    return load_file(path)


def random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state of all random generators: tensors, and what fits into JSON."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    name, keys, *rest = np.random.get_state(legacy=True)
    numpy_state = [name, np.asarray(keys).tolist(), *rest]
    return tensors, {"python": random.getstate(), "numpy": numpy_state}


def set_random_state(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Put all random generators back to what ``random_state`` returned."""
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    version, internal, gauss = values["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = values["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


@contextlib.contextmanager
def same_random_state() -> Iterator[None]:
    """Put all random generators back to where they were before."""
    tensors, values = random_state()
    try:
        yield
    finally:
        set_random_state(tensors, values)


def save_rank(folder: Path, cfg: TrainConfig, progress: Progress, data: dict[str, Any]) -> None:
    """Write this rank's random generators and data position; rank 0 also the common part."""
    tensors, values = random_state()
    save_tensors(folder / f"random-{dist.rank()}.safetensors", tensors)
    mine = {"random": values, "data": data}
    (folder / f"rank-{dist.rank()}.json").write_text(json.dumps(mine))
    if dist.is_main():
        state = {
            **dataclasses.asdict(progress),
            "world_size": dist.world_size(),
            "settings": flatten_settings(cfg),
        }
        (folder / "state.json").write_text(json.dumps(state, indent=1))


def load_progress(folder: Path) -> Progress:
    """Read how far the run had come."""
    state = read_state(folder)
    return Progress(**{field.name: state[field.name] for field in dataclasses.fields(Progress)})


def load_rank(folder: Path) -> dict[str, Any]:
    """Restore this rank's random generators and return its data position."""
    mine: dict[str, Any] = json.loads((folder / f"rank-{dist.rank()}.json").read_text())
    set_random_state(load_tensors(folder / f"random-{dist.rank()}.safetensors"), mine["random"])
    data: dict[str, Any] = mine["data"]
    return data
