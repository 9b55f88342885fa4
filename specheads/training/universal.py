"""DeepSpeed's universal checkpoint: its state, made independent of the number of ranks.

DeepSpeed stores a part per rank. ``ds_to_universal`` puts the parts of every parameter together,
and a run on another number of ranks takes its own parts from there. Weights, both moments and
their step count are carried over exactly.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from specheads import dist
from specheads.config import ConfigError
from specheads.files import aside, writing


@contextlib.contextmanager
def converted(folder: Path, run_dir: Path) -> Iterator[Path]:
    """Convert a checkpoint's ``deepspeed/state`` beside the run's checkpoints, for a while.

    Args:
        folder: a checkpoint that DeepSpeed's engine wrote.
        run_dir: the run's directory, where the disk has room.

    Yields:
        A folder with the universal ``state``, removed afterwards.

    Raises:
        ConfigError: if DeepSpeed cannot convert it.
        RunError: if the disk is full.
    """
    path = run_dir / "checkpoints" / f"universal-{folder.name}"
    with writing(path) as out:
        if dist.is_main():
            shutil.rmtree(out, ignore_errors=True)
            (out / "state").mkdir(parents=True)
            _convert(folder / "deepspeed" / "state", out / "state")
        dist.barrier()
        yield out
        dist.barrier()
    if dist.is_main():
        shutil.rmtree(aside(path))


def _convert(source: Path, target: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    arguments = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,  # forking a process that has started threads can hang
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    try:
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            ds_to_universal.main(arguments)
    except (AssertionError, KeyError, NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"DeepSpeed cannot convert {source} for another number of processes: {error}"
        ) from None


def load_universal(engine: Any, folder: Path) -> None:
    """Load what :func:`converted` made into a DeepSpeed engine.

    Args:
        engine: of ``deepspeed.initialize``.
        folder: holds ``state``.

    Raises:
        ConfigError: if DeepSpeed finds nothing in it.
    """
    optimizer = engine.optimizer
    own = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    settings = engine._config
    settings.load_universal_checkpoint = True
    try:
        found, _ = engine.load_checkpoint(str(folder), tag="state", load_module_strict=False)
    finally:
        settings.load_universal_checkpoint = False
    if found is None:
        raise ConfigError(f"{folder} holds no DeepSpeed state")
    # stage 3 gives all groups the settings of the first (0.19.8)
    for group, settings_before in zip(optimizer.param_groups, own, strict=True):
        group.update(settings_before)
    # and all of them one counter of steps, which AdamW then counts up once per group
    for state in optimizer.optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()
