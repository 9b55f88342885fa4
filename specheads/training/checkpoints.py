"""The folders ``checkpoints/step-*/`` of a run: written whole, found, verified, removed.

A checkpoint has a ``manifest.json`` with the size and sha256 of every file. It is written last,
before the folder gets its name; a folder without one, or with a file of another size or content,
is damaged and not a checkpoint.

A checkpoint is safetensors and JSON. It holds the trained weights, the optimizer's state, where the
data stands, the random generators and the running means, so that a resumed run ends bit-identical
to one that never stopped. The engine writes its part (``engine.py``); this module writes the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import random
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specheads.config import ConfigError, TrainConfig
from specheads.config.own import leaves
from specheads.models import manifest
from specheads.models.names import base_digest
from specheads.system import dist
from specheads.system.files import aside, flush_folder, publish, writing
from specheads.system.redact import redact
from specheads.training.engine import Spread
from specheads.training.rule import as_decided, open_keys

# These may differ between a run and its continuation; anything else would change what is learned.
FREE_TO_CHANGE = (
    "name", "run_dir", "max_steps", "resume", "resume_trust", "dry_run", "log", "checkpoint",
    "device", "dist_timeout", "optim.skip_nonfinite", "tree", "evaluate", "model.tuned",
    "model.device_map",
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
    """Return the settings that decide a run's numbers, as ``{"optim.lr": 0.001, ...}``.

    Secrets in them are hidden: checkpoints keep what is returned, and later runs compare with it.
    """
    settings = dict(leaves(redact(dataclasses.asdict(cfg))))
    settings["features.endpoint"] = bool(cfg.features.endpoint)  # one server is as good as another
    return {key: value for key, value in settings.items() if not _is_free(key)}


def _is_free(key: str) -> bool:
    names = key.split(".")  # of a device map each part is a setting
    return not {key, names[0], ".".join(names[:2])}.isdisjoint(FREE_TO_CHANGE)


def read_state(folder: Path) -> dict[str, Any]:
    """Return what ``state.json`` of a checkpoint says.

    Raises:
        ConfigError: if it is missing or is not what ``save_rank`` writes.
    """
    state = manifest.read_json(folder / "state.json", f"{folder} is not a whole checkpoint")
    kinds = {key: type(value) for key, value in vars(Progress()).items()}
    for key, kind in {**kinds, "world_size": int, "settings": dict}.items():
        if type(state.get(key)) not in ({kind, int} if kind is float else {kind}):
            raise ConfigError(
                f"{folder / 'state.json'}: {key} must be {kind.__name__}, "
                f"found {state.get(key)!r:.40}"
            )
    if state["world_size"] < 1 or min(state["step"], state["best_step"]) < 0:
        raise ConfigError(f"{folder / 'state.json'} counts below zero")
    return state


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
    weights. A setting that there was none of then was what its default says.

    Raises:
        ConfigError: naming the setting, what it was and what it is.
    """
    needed = accumulation_here(path, state)
    now = json.loads(json.dumps(flatten_settings(cfg)))
    defaults = json.loads(json.dumps(flatten_settings(TrainConfig(run_dir=""))))
    before = {key: defaults[key] for key in now if key in defaults} | state["settings"]
    base, theirs = _base_of(cfg), state.get("base_digest")
    if base and theirs and base != theirs:
        raise ConfigError(
            f"cannot resume {path}: it was written with other weights than model.name="
            f"{cfg.model.name} holds now"
        )
    # known to be the same, it may have moved, or have another name
    may_differ = {"model.name", "model.revision"} if base and theirs else set()
    may_differ |= set(open_keys(cfg))  # they become what they were then, see ready_to_resume
    if now["optim.accumulation"] == needed:
        may_differ.add("optim.accumulation")
    for key in sorted((now.keys() | before.keys()) - may_differ):
        if now.get(key) != before.get(key) and not _is_free(key):
            cure = f"; {_more_steps(path, cfg)}" if key == "steps" else ""
            raise ConfigError(
                f"cannot resume {path}: {key} was {before.get(key)!r}, is {now.get(key)!r}{cure}"
            )
    if state["world_size"] != dist.world_size() and (why := _one_world_only(cfg)):
        raise ConfigError(
            f"{path} was written by {state['world_size']} processes, this run has "
            f"{dist.world_size()}: {why} goes on with as many as before; start"
            f" {state['world_size']} processes"
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
    spread = Spread.from_config(cfg.deepspeed)
    if cfg.data.streaming:
        return "data.streaming=true"
    if not cfg.deepspeed:
        return "deepspeed=none"
    if "float16" in (cfg.model.dtype, cfg.autocast):
        return "float16"
    if cfg.model.dtype == "bfloat16" and spread.stage in (1, 2):
        return f"model.dtype=bfloat16 under ZeRO-{spread.stage}"
    offloaded = spread.offload_optimizer or spread.offload_parameters
    return "an optimizer or model that is offloaded" if offloaded else ""


def _base_of(cfg: TrainConfig) -> str:
    """Return what the base model is recognised by, empty where there is none, or no more."""
    if not cfg.model.init:
        with contextlib.suppress(ConfigError, OSError):
            return base_digest(cfg.model.name, revision=cfg.model.revision)
    return ""


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
    manifest.save_tensors(folder / f"random-{dist.rank()}.safetensors", tensors)
    mine = {"random": values, "data": data}
    (folder / f"rank-{dist.rank()}.json").write_text(json.dumps(mine))
    if dist.is_main():
        state = {
            **dataclasses.asdict(progress),
            "world_size": dist.world_size(),
            "settings": flatten_settings(cfg),
            "base_digest": _base_of(cfg),
        }
        (folder / "state.json").write_text(json.dumps(state, indent=1))


def load_progress(folder: Path) -> Progress:
    """Read how far the run had come."""
    state = read_state(folder)
    return Progress(**{field.name: state[field.name] for field in dataclasses.fields(Progress)})


def restore_rank(folder: Path, batches: Any) -> None:
    """Put this rank's random generators and its data back to where the checkpoint was written.

    Where another number of ranks wrote the checkpoint, the generators are seeded anew, and the
    data position is that of rank 0: it counts the rows of all ranks.

    Raises:
        ConfigError: naming the file that is missing, does not hold what ``save_rank`` writes, or is
            of other data.
    """
    state = read_state(folder)
    same = state["world_size"] == dist.world_size()
    file = folder / f"rank-{dist.rank() if same else 0}.json"
    mine = manifest.read_json(file, f"{folder} is not a whole checkpoint")
    data = mine.get("data")
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: data must be an object, found {data!r:.40}")
    if same:
        stored = manifest.load_tensors(folder / f"random-{dist.rank()}.safetensors")
        with manifest.one_line(f"{file} holds no state of the random generators"):
            set_random_state(stored, mine["random"])
    else:
        numbers = (state["settings"].get("seed"), state["step"], dist.world_size(), dist.rank())
        digest = hashlib.sha256(repr(numbers).encode()).digest()
        seed_generators(int.from_bytes(digest[:4], "big"))
    with manifest.one_line(f"{folder} holds no place in this data"):
        batches.load_state_dict(data)


def step_of(path: Path) -> int:
    """Return the optimizer step that the folder ``path`` is named after, -1 for another name."""
    number = path.name.removeprefix("step-")
    return int(number) if number.isdecimal() else -1


def checkpoints_of(run_dir: Path) -> list[Path]:
    """Return the checkpoint folders of a run, oldest first; a torn copy among them too."""
    found = [path for path in (run_dir / "checkpoints").glob("step-*") if path.is_dir()]
    return sorted((path for path in found if step_of(path) >= 0), key=step_of)


def check_whole(path: Path) -> None:
    """Check that every file of checkpoint ``path`` has its size, and its sha256, and is listed.

    Raises:
        ConfigError: naming the file and both numbers.
    """
    listed = manifest.read_manifest(path, "checkpoint")["files"]
    for name, entry in listed.items():
        manifest.check_size(path, name, entry)
    for file in path.rglob("*"):
        name = file.relative_to(path).as_posix()
        # DeepSpeed takes whatever lies in its folder, and it is pickle
        harmless = file.suffix == ".md" or file.name.startswith(".") or name == manifest.MANIFEST
        harmless = harmless and not name.startswith("deepspeed/")
        if not (file.is_dir() or name in listed or harmless):
            raise ConfigError(f"{path} holds {name}, which its {manifest.MANIFEST} does not list")
    for name, entry in sorted(listed.items()):
        manifest.check_sha256(path / name, _known_sha256(path / name), entry)


def verify(path: Path) -> None:
    """Check that checkpoint ``path`` is whole.

    Raises:
        ConfigError: naming the file and both numbers, and an earlier checkpoint if there is one.
    """
    try:
        check_whole(path)
    except ConfigError as error:
        of_run = checkpoints_of(path.parent.parent)
        earlier, _ = _newest_whole([each for each in of_run if step_of(each) < step_of(path)])
        if earlier is None:
            raise
        raise ConfigError(f"{error}; the one before it: resume={earlier}") from None


def _newest_whole(found: Sequence[Path]) -> tuple[Path | None, list[str]]:
    """Return the last of some checkpoints that is whole, and what is wrong with those behind it."""
    torn = []
    for path in reversed(found):
        try:
            check_whole(path)
        except ConfigError as error:
            torn.append(str(error))
        else:
            return path, torn
    return None, torn


def _known_sha256(file: Path) -> str:
    stat = file.stat()
    return _sha256(file.resolve(), stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4096)  # a run of several stages asks again
def _sha256(file: Path, size: int, time: int) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def checkpoint_to_resume(
    cfg: TrainConfig, say: Callable[[str], None] = lambda line: None
) -> Path | None:
    """Return the checkpoint that ``cfg.resume`` means, None to start from the beginning.

    All of it has been verified, on every rank, as all must choose the same one before they can
    talk.

    Args:
        cfg: the run's settings.
        say: told of each damaged checkpoint that ``resume=auto`` passes over.

    Raises:
        ConfigError: if there is none, if it is damaged, if it was written with other settings, or
            if it holds pickle of another run and ``resume_trust`` is not set.
    """
    if not cfg.resume:
        return None
    if cfg.resume == "auto":
        found = checkpoints_of(Path(cfg.run_dir))
        path, torn = _newest_whole(found)
        if path is None and torn:  # starting anew would throw the run away
            raise ConfigError(
                f"resume=auto: none of the {len(found)} checkpoints of {cfg.run_dir} is whole:"
                f" {torn[0]}; remove them to start from the beginning"
            )
        if path is None:
            return None
        for line in torn:
            say(f"passing over {line}")
    else:
        path = Path(cfg.resume)
        if not path.is_dir():
            raise ConfigError(f"resume={cfg.resume}: no checkpoint at {path}")
        verify(path)
    # links are followed: what counts is where the files lie
    inside = path.resolve().is_relative_to(Path(cfg.run_dir).resolve())
    if (path / "deepspeed").exists() and not inside and not cfg.resume_trust:
        raise ConfigError(
            f"{path} is not below this run's directory {cfg.run_dir}, and DeepSpeed's state is "
            "pickle, which can run any code when it is loaded; if you trust who wrote it, add "
            "resume.trust=true"
        )
    check_settings(path, read_state(path), cfg)
    return path


def ready_to_resume(cfg: TrainConfig, say: Callable[[str], None]) -> TrainConfig:
    """Check what ``cfg.resume`` means, all of it, before a model is loaded.

    Args:
        cfg: the run's settings.
        say: told of damaged checkpoints, and of what another number of ranks changes.

    Returns:
        ``cfg`` with what it leaves open as it was decided then; on another number of ranks than
        before with the ``optim.accumulation`` that keeps the global batch.

    Raises:
        ConfigError: if it cannot be resumed; see :func:`checkpoint_to_resume`.
    """
    path = checkpoint_to_resume(cfg, say)
    if path is None:
        return cfg
    state = read_state(path)
    cfg = as_decided(cfg, state["settings"])
    if state["world_size"] == dist.world_size():
        return cfg
    needed = accumulation_here(path, state)
    say(
        f"{path} was written by {state['world_size']} processes, this run has {dist.world_size()}: "
        f"optim.accumulation={needed} keeps the global batch, the random generators are seeded anew"
    )
    return dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, accumulation=needed))


@contextlib.contextmanager
def new_checkpoint(run_dir: Path, step: int) -> Iterator[Path]:
    """Write ``checkpoints/step-<step>`` from all ranks; it appears whole or not at all.

    Yields:
        The folder to write into, before the manifest is.

    Raises:
        RunError: if the disk is full; earlier checkpoints are untouched.
    """
    path = run_dir / "checkpoints" / f"step-{step:07d}"
    with writing(path) as folder:
        if dist.is_main():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        dist.barrier()
        yield folder
        dist.barrier()
        flush_folder(folder)  # what this rank's machine still holds back
        dist.barrier()
        _write_manifest(folder)
        if dist.is_main():
            publish(path)
        dist.barrier()


def _write_manifest(folder: Path) -> None:
    """List every file of a checkpoint; the ranks share the hashing out."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.suffix != ".md")
    entries: dict[str, dict[str, Any]] = {}
    for file in files[dist.rank() :: dist.world_size()]:
        entry = {"size": file.stat().st_size, "sha256": _known_sha256(file)}
        entries[file.relative_to(folder).as_posix()] = entry
    for part in dist.gather_texts(json.dumps(entries)):
        entries |= json.loads(part)
    if dist.is_main():
        manifest.write_json(folder / manifest.MANIFEST, {"files": dict(sorted(entries.items()))})


def prune(run_dir: Path, keep: int, *, newest: int | None = None) -> None:
    """Remove old checkpoints, and what killed runs left half-written.

    Args:
        run_dir: the run's directory.
        keep: how many of the newest to keep.
        newest: step of the one just saved. Later ones are of a continuation that was given up by
            ``resume=path``: they go, or ``resume=auto`` would take them for this run's.
    """
    if not dist.is_main():
        return
    found = checkpoints_of(run_dir)
    now = [path for path in found if newest is None or step_of(path) <= newest]
    remove(run_dir / "checkpoints", set(found).difference(now[-keep:]))


def remove(folder: Path, steps: Collection[Path]) -> None:
    """Remove some of the folders ``step-*`` in ``folder``, and what killed runs left half-written.

    They are renamed first: one that is half removed must not look like a whole one.
    """
    for path in steps:
        path.rename(aside(path))
    for pattern in (".step-*.tmp", ".step-*.old"):
        for path in folder.glob(pattern):
            shutil.rmtree(path)
