"""Resumable state of a training run: ``checkpoints/step-*/``, safetensors and JSON.

A checkpoint holds the trained weights, the optimizer's state, where the data stands, the random
generators and the running means, so that a resumed run ends bit-identical to one that never
stopped. The engine writes its part (``engine.py``); this module writes the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from specheads import dist
from specheads.config import ConfigError, TrainConfig
from specheads.models.fingerprint import base_fingerprint
from specheads.models.manifest import read_json
from specheads.redact import redact
from specheads.training.tensor_files import load_tensors, save_tensors

# These may differ between a run and its continuation; anything else would change what is learned.
FREE_TO_CHANGE = (
    "name", "run_dir", "max_steps", "resume", "resume_trust", "dry_run", "log", "checkpoint",
    "device", "dist_timeout", "optim.skip_nonfinite", "tree", "evaluate",
)  # fmt: skip


_OFFLOADED = ("optimizer", "param")


class Resumable(Protocol):
    """What has a place that is saved and restored (``loop.Batches``)."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        ...


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
    """Return the settings that decide a run's numbers, as ``{"optim.lr": 0.001, ...}``.

    Secrets in them are hidden: checkpoints keep what is returned, and later runs compare with it.
    """

    def walk(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, Mapping) and value:
            for key, inner in value.items():
                yield from walk(f"{prefix}.{key}" if prefix else key, inner)
        else:
            yield prefix, value

    settings = redact(dataclasses.asdict(cfg))
    return {key: value for key, value in walk("", settings) if not _is_free(key)}


def _is_free(key: str) -> bool:
    return key in FREE_TO_CHANGE or key.split(".")[0] in FREE_TO_CHANGE


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


def accumulation_here(path: Path, state: Mapping[str, Any]) -> int:
    """Return the micro-batches per rank and step with which the global batch stays what it was.

    Args:
        path: a checkpoint.
        state: its ``state.json``.

    Raises:
        ConfigError: if this number of ranks cannot share the global batch out.
    """
    before, now = state["world_size"], dist.world_size()
    try:
        micro = int(state["settings"]["optim.accumulation"])
        rows = micro * before * int(state["settings"]["data.rows"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path / 'state.json'}: settings lack {error}") from None
    if micro * before % now:
        raise ConfigError(
            f"{path} was written by {before} processes, this run has {now}: the {rows} rows of a "
            f"step, {micro * before} micro-batches, cannot be shared out evenly; start a number of "
            f"processes that divides {micro * before}"
        )
    return micro * before // now


def check_settings(path: Path, state: Mapping[str, Any], cfg: TrainConfig) -> None:
    """Refuse to go on with other settings than those that a checkpoint was written with.

    ``optim.accumulation`` may be what it was, or what keeps the global batch on this number of
    ranks (see :func:`accumulation_here`). The base model may have another name, but no other
    weights.

    Raises:
        ConfigError: naming the setting, what it was and what it is.
    """
    if cfg.data.streaming and state["world_size"] != dist.world_size():
        raise ConfigError(
            f"{path} was written by {state['world_size']} processes, this run has"
            f" {dist.world_size()}; with data.streaming=true a run goes on with as many as before"
        )
    needed = accumulation_here(path, state)
    now = json.loads(json.dumps(flatten_settings(cfg)))
    before = state["settings"]
    same_base = _check_base(path, state.get("base"), cfg)
    for key in sorted(now.keys() | before.keys()):
        if key == "optim.accumulation" and now[key] == needed:
            continue
        if key in ("model.name", "model.revision") and same_base:
            continue  # the base was moved or renamed
        if now.get(key) != before.get(key) and not _is_free(key):
            cure = f"; {_more_steps(path, cfg)}" if key == "steps" else ""
            raise ConfigError(
                f"cannot resume {path}: {key} was {before.get(key)!r}, is {now.get(key)!r}{cure}"
            )
    if state["world_size"] != dist.world_size() and (why := _one_world_only(cfg)):
        raise ConfigError(
            f"{path} was written by {state['world_size']} processes, this run has "
            f"{dist.world_size()}: {why} goes on with as many as before"
        )


def _more_steps(path: Path, cfg: TrainConfig) -> str:
    """Return how to train longer than a run was planned for."""
    export = path.parent.parent / "export"
    start = f"{'draft' if cfg.recipe == 'distill' else 'heads'}.start={export}"
    if (export / "base").is_dir():  # tuned along with the heads
        start = f"model={export / 'base'} {start}"
    return (
        "its learning rates follow from all its steps; to train what it exported further, start a"
        f" new run with {start}"
    )


def _one_world_only(cfg: TrainConfig) -> str:
    """Return what keeps a run from going on with another number of ranks, as settings."""
    zero = cfg.deepspeed.get("zero_optimization") or {}
    if not cfg.deepspeed:
        return "deepspeed=none"
    if "float16" in (cfg.model.dtype, cfg.autocast):
        return "float16"
    if cfg.model.dtype == "bfloat16" and zero.get("stage", 0) in (1, 2):
        return f"model.dtype=bfloat16 under ZeRO-{zero['stage']}"
    if any((zero.get(f"offload_{w}") or {}).get("device", "none") != "none" for w in _OFFLOADED):
        return "an optimizer or model that is offloaded"
    return ""


def _base_of(cfg: TrainConfig) -> str:
    """Return what the base model is recognised by, empty where there is none."""
    return "" if cfg.model.init else base_fingerprint(cfg.model.name, cfg.model.revision)


def _check_base(path: Path, before: object, cfg: TrainConfig) -> bool:
    """Return whether the base is known to be that of checkpoint ``path``, whatever its name.

    Raises:
        ConfigError: if it is known to be another one.
    """
    now = _base_of(cfg)
    if not (before and now):
        return False
    if now != before:
        raise ConfigError(
            f"cannot resume {path}: it was written with other weights than model.name="
            f"{cfg.model.name} holds now"
        )
    return True


def seed_generators(seed: int) -> None:
    """Seed the random generators of torch, Python and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


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
            "base": _base_of(cfg),
        }
        (folder / "state.json").write_text(json.dumps(state, indent=1))


def load_progress(folder: Path) -> Progress:
    """Read how far the run had come."""
    state = read_state(folder)
    return Progress(**{field.name: state[field.name] for field in dataclasses.fields(Progress)})


def load_rank(folder: Path) -> dict[str, Any]:
    """Restore this rank's random generators and return its data position.

    Where another number of ranks wrote the checkpoint, the generators are seeded anew, and the
    data position is that of rank 0: it counts the rows of all ranks.

    Raises:
        ConfigError: naming the file that is missing or does not hold what ``save_rank`` writes.
    """
    state = read_state(folder)
    same = state["world_size"] == dist.world_size()
    file = folder / f"rank-{dist.rank() if same else 0}.json"
    mine = read_json(file, f"{folder} is not a whole checkpoint")
    data = mine.get("data")
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: data must be an object, found {data!r:.40}")
    if not same:
        numbers = (state["settings"].get("seed"), state["step"], dist.world_size(), dist.rank())
        digest = hashlib.sha256(repr(numbers).encode()).digest()
        seed_generators(int.from_bytes(digest[:4], "big"))
        return data
    tensors = folder / f"random-{dist.rank()}.safetensors"
    stored = load_tensors(tensors)
    try:
        set_random_state(stored, mine["random"])
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ConfigError(
            f"{file} and {tensors.name} hold no state of the random generators: {error}"
        ) from None
    return data


def restore_rank(folder: Path, batches: Resumable) -> None:
    """Put this rank's random generators and its data back to where the checkpoint was written.

    Raises:
        ConfigError: if a file of it cannot be used, or is of other data.
    """
    data = load_rank(folder)
    try:
        batches.load_state_dict(data)
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"{folder} holds no place in this data: {type(error).__name__}: {error}"
        ) from None
