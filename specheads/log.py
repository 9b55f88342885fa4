"""One run's directory and everything it writes about itself.

``runs/<name>/``: ``LOCK`` (held while the run lives), ``config.yaml``, ``provenance.json``,
``metrics.jsonl``, and the folders that others fill: ``checkpoints/``, ``export/``.
The console gets one aligned line per ``log.every`` steps and, on a terminal, a progress bar.
"""

from __future__ import annotations

import dataclasses
import fcntl
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from tqdm import tqdm

from specheads import __version__, dist
from specheads.config import ConfigError, LogConfig

USED = ("config.yaml", "metrics.jsonl", "checkpoints", "export")
# of an evaluation's many figures those for the console; all are in metrics.jsonl
_EVALUATED = re.compile(r"eval/[^/]+|final/(accept_length|alpha|speedup)/[^/]+")
_ALPHA = ("draft/alpha", "draft/alpha_top", "heldout/alpha")  # of a draft model
PACKAGES = ("torch", "transformers", "safetensors", "deepspeed", "hydra-core", "wandb")


class RunConfig(Protocol):
    """The settings that a run directory needs; ``TrainConfig`` has them."""

    name: str
    run_dir: str
    steps: int
    resume: str
    dry_run: bool
    log: LogConfig


def is_used(run_dir: Path) -> bool:
    """Return whether an earlier run left something in ``run_dir``."""
    return any((run_dir / name).exists() for name in USED)


def _lock(path: Path) -> Any:
    """Return the open, locked file ``path``; the lock dies with this process."""
    handle = path.open("a+")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.seek(0)
        holder = handle.read().strip() or "another process"
        handle.close()
        raise ConfigError(f"run directory {path.parent} is in use by {holder}") from None
    handle.truncate(0)
    handle.write(f"process {os.getpid()} on {platform.node()} since {time.ctime()}\n")
    handle.flush()
    return handle


def _git_state() -> dict[str, Any]:
    source = Path(__file__).resolve().parent
    try:
        commit = subprocess.run(
            ["git", "-C", source, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "-C", source, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None}  # an installed wheel
    return {"commit": commit, "modified": bool(changed.strip())}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def provenance() -> dict[str, Any]:
    """Return what is needed to know where a run's figures come from."""
    import torch

    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "argv": sys.argv,
        "specheads": __version__,
        "git": _git_state(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "hardware": {
            "machine": platform.machine(),
            "processors": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "world_size": dist.world_size(),
        },
    }


def format_line(step: int, steps: int, metrics: Mapping[str, float]) -> str:
    """Return the console line: losses, per-head top-1, rates, in columns that stay aligned."""
    width = len(str(steps))
    parts = [f"step {step:>{width}}/{steps}"]
    for key, value in metrics.items():
        name = key.removeprefix("train/")
        if name.endswith("loss"):
            parts.append(f"{name.removesuffix('/loss')} {value:7.4f}")
        elif name.endswith("top1"):
            parts.append(f"{100 * value:4.1f}%")
        elif name in _ALPHA:
            parts.append(f"{name.removeprefix('draft/')} {value:.4f}")
        elif name.startswith("lr/"):
            parts.append(f"{name} {value:.1e}")
        elif name == "grad_norm":
            parts.append(f"grad {value:6.3f}")
        elif name == "tokens_per_second":
            parts.append(f"{value:7.0f} tok/s")
        elif name == "peak_memory":
            parts.append(f"{value / 2**30:5.2f} GiB")
        elif _EVALUATED.fullmatch(key):
            parts.append(f"{key} {value:.4g}")
    return "  ".join(parts)


def _refuse_used(run_dir: Path, resume: str) -> None:
    if is_used(run_dir) and not resume:
        raise ConfigError(
            f"run directory {run_dir} holds an earlier run; choose another name=, "
            "continue it with resume=auto, or delete it"
        )


def check_run_dir(run_dir: Path, resume: str) -> None:
    """Refuse a run directory that :class:`RunLog` would refuse, before anything is loaded.

    Raises:
        ConfigError: if the directory is in use, or used and ``resume`` is empty.
    """
    if not dist.is_main() or not run_dir.is_dir():
        return
    if (run_dir / "LOCK").exists():
        _lock(run_dir / "LOCK").close()
    _refuse_used(run_dir, resume)


class RunLog:
    """The open run directory; rank 0 writes, the other ranks stay silent."""

    def __init__(self, cfg: RunConfig) -> None:
        """Lock and prepare ``cfg.run_dir``.

        Raises:
            ConfigError: if the directory is in use, or used and ``resume`` is empty.
        """
        self.cfg = cfg
        self.dir = Path(cfg.run_dir)
        self._bar: tqdm[Any] | None = None
        self._wandb: Any = None
        self._metrics: Any = None
        if not dist.is_main():
            return
        self.dir.mkdir(parents=True, exist_ok=True)
        self._handle = _lock(self.dir / "LOCK")
        try:
            _refuse_used(self.dir, cfg.resume)
            if not cfg.dry_run:
                self._describe()
        except BaseException:
            self._unlock()
            raise

    def _describe(self) -> None:
        from omegaconf import OmegaConf

        settings = OmegaConf.create(dataclasses.asdict(self.cfg))  # type: ignore[call-overload]
        if not (self.dir / "config.yaml").exists():
            (self.dir / "config.yaml").write_text(OmegaConf.to_yaml(settings))
        record = self.dir / "provenance.json"
        history = json.loads(record.read_text()) if record.exists() else []
        history.append(provenance())  # one entry per start of this run
        record.write_text(json.dumps(history, indent=2) + "\n")

    def _unlock(self) -> None:
        (self.dir / "LOCK").unlink(missing_ok=True)
        self._handle.close()
        if not any(self.dir.iterdir()):  # a dry run leaves nothing behind
            self.dir.rmdir()

    def __enter__(self) -> Self:
        """Return self; the directory is already locked."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close files, bar and wandb, and release the lock."""
        if not dist.is_main():
            return
        if self._bar is not None:
            self._bar.close()
        if self._metrics is not None:
            self._metrics.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=0 if kind is None else 1)
        self._unlock()

    def begin(self, step: int) -> None:
        """Go on after ``step``: later rows of metrics.jsonl are dropped, the bar starts there."""
        if not dist.is_main():
            return
        if self._metrics is None:
            path = self.dir / "metrics.jsonl"
            kept = _rows_until(path, step)
            aside = path.with_suffix(".tmp")
            aside.write_text("".join(kept))
            aside.replace(path)
            self._metrics = path.open("a")
            self._wandb = _open_wandb(self.cfg, self.dir)
        if self._bar is None:
            self._bar = tqdm(
                total=self.cfg.steps,
                initial=step,
                disable=not sys.stderr.isatty(),
                unit="step",
                dynamic_ncols=True,
            )

    def advance(self) -> None:
        """Move the progress bar by one optimizer step."""
        if self._bar is not None:
            self._bar.update()

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Write one row to metrics.jsonl and wandb."""
        if not dist.is_main():
            return
        row = {"step": step, **values}
        if self._metrics is not None:
            self._metrics.write(json.dumps(row) + "\n")
            self._metrics.flush()
        if self._wandb is not None:
            self._wandb.log(dict(values), step=step)

    def metrics(self, step: int, values: Mapping[str, float], *, seconds_left: float = 0) -> None:
        """Write one row to metrics.jsonl, wandb and the console."""
        self.record(step, values)
        line = format_line(step, self.cfg.steps, values)
        if seconds_left and not sys.stderr.isatty():  # the bar shows it on a terminal
            minutes, seconds = divmod(round(seconds_left), 60)
            line += f"  left {minutes}:{seconds:02d}"
        self.say(line)

    def say(self, text: str) -> None:
        """Print ``text`` on rank 0 without tearing the progress bar."""
        if dist.is_main():
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()


def _rows_until(path: Path, step: int) -> list[str]:
    if not path.exists():
        return []
    rows = path.read_text().splitlines(keepends=True)
    # a killed run may leave half a row at the end
    return [row for row in rows if row.endswith("}\n") and json.loads(row)["step"] <= step]


def _open_wandb(cfg: RunConfig, run_dir: Path) -> Any:
    """Return a wandb run, or None where it is switched off or not installed."""
    if cfg.log.wandb == "disabled":
        return None
    try:
        import wandb
    except ImportError:
        print("specheads: wandb is not installed; metrics go to metrics.jsonl only")
        return None
    mode = cfg.log.wandb
    if mode == "auto":
        mode = "online" if wandb.api.api_key else "offline"
    identity = run_dir / "wandb" / "id"  # so that a resumed run continues the same curves
    run = wandb.init(
        project=cfg.log.project,
        name=cfg.name,
        dir=str(run_dir),
        mode=mode,  # type: ignore[arg-type]
        id=identity.read_text() if identity.exists() else None,
        resume="allow",
        config=dataclasses.asdict(cfg),  # type: ignore[call-overload]
        settings=wandb.Settings(console="off", silent=True),
    )
    identity.parent.mkdir(parents=True, exist_ok=True)
    identity.write_text(run.id)
    return run
