"""Checkpoints: whole or not at all, of this run, with every random generator."""

from __future__ import annotations

import json
import random
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from specheads.config import ConfigError, HeadsConfig, RunError, TreeConfig
from specheads.models.manifest import save_tensors
from specheads.system.files import aside, whole_folder
from specheads.training.checkpoints import (
    Progress,
    check_settings,
    checkpoint_to_resume,
    checkpoints_of,
    load_progress,
    new_checkpoint,
    prune,
    restore_rank,
    save_rank,
)
from tests.toys import toy_config


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """Make every file larger than ``limit`` bytes fail, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def save_step(run_dir: Path, step: int, size: int = 4) -> None:
    """Write a small checkpoint."""
    with new_checkpoint(run_dir, step) as folder:
        save_tensors(folder / "model.safetensors", {"x": torch.full((size,), float(step))})
        save_rank(folder, toy_config(run_dir), Progress(step=step, stage="train"), {"at": step})


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """A half-written checkpoint that looks whole is found by resume=auto and loads garbage."""
    save_step(tmp_path, 1)
    with full_disk(50_000), pytest.raises(RunError, match=r"no room to write .*step-0000002"):
        save_step(tmp_path, 2, size=100_000)
    (kept,) = checkpoints_of(tmp_path)
    assert load_progress(kept).step == 1
    assert not list((tmp_path / "checkpoints").glob(".*"))
    save_step(tmp_path, 2, size=100_000)
    assert len(checkpoints_of(tmp_path)) == 2


def test_a_killed_save_is_not_a_checkpoint(tmp_path: Path) -> None:
    """A kill between two files leaves no exception handler to clean up."""
    save_step(tmp_path, 1)
    half = aside(tmp_path / "checkpoints" / "step-0000002")
    half.mkdir()
    (half / "state.json").write_text("{")
    cfg = toy_config(tmp_path, resume="auto")
    assert checkpoint_to_resume(cfg) == tmp_path / "checkpoints" / "step-0000001"
    save_step(tmp_path, 2)
    prune(tmp_path, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-0000002"]


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    """Files of an earlier export that survive in the new one would be loaded with it."""
    for name in ("old", "new"):
        with whole_folder(tmp_path / "export") as folder:
            (folder / f"{name}.json").write_text("{}")
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["new.json"]
    with pytest.raises(ZeroDivisionError), whole_folder(tmp_path / "export") as folder:
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_every_random_generator_is_restored(tmp_path: Path) -> None:
    """A forgotten generator resumes with other dropout or other data, without an error."""

    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    random.gauss(0, 1)  # leaves a second number behind in the state
    np.random.randn()
    save_step(tmp_path, 1)
    expected = draw() + draw()
    draw()
    batches = Mock()
    restore_rank(checkpoints_of(tmp_path)[0], batches)
    batches.load_state_dict.assert_called_once_with({"at": 1})
    assert draw() + draw() == expected


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"optim__lr": 0.5}, r"optim.lr was 0.01, is 0.5"),
        ({"steps": 9}, r"steps was 8, is 9; .* start a new run with heads\.start=\S+/export$"),
        ({"seed": 1}, r"seed was 0, is 1"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, changes: dict[str, object], line: str) -> None:
    """A run that continues with other settings is neither of the two experiments."""
    save_step(tmp_path, 1)
    with pytest.raises(ConfigError, match=line):
        checkpoint_to_resume(toy_config(tmp_path, resume="auto", **changes))
    free = {"max_steps": 3, "log__every": 7, "name": "other", "evaluate__max_new_tokens": 16}
    cfg = toy_config(tmp_path, resume="auto", tree=TreeConfig(choices=[[0]]), **free)
    assert checkpoint_to_resume(cfg) is not None


def test_a_longer_run_starts_from_what_was_exported(tmp_path: Path) -> None:
    """A line that only says no sends the user into the state files."""
    save_step(tmp_path, 1)
    (path,) = checkpoints_of(tmp_path)
    state = json.loads((path / "state.json").read_text())
    state["settings"]["recipe"] = "distill"
    line = rf"start a new run with draft\.start={tmp_path}/export$"
    with pytest.raises(ConfigError, match=line):
        check_settings(path, state, toy_config(tmp_path, steps=9, recipe="distill"))
    (tmp_path / "export" / "base").mkdir(parents=True)
    line = rf"with model={tmp_path}/export/base heads\.start={tmp_path}/export$"
    with pytest.raises(ConfigError, match=line):
        checkpoint_to_resume(toy_config(tmp_path, resume="auto", steps=9))


def test_settings_that_became_free_do_not_bind_an_older_checkpoint(tmp_path: Path) -> None:
    """A run of an earlier version would be refused for a setting that may change."""
    save_step(tmp_path, 1)
    (path,) = checkpoints_of(tmp_path)
    state = json.loads((path / "state.json").read_text())
    state["settings"] |= {"evaluate.max_new_tokens": 5, "tree.num_nodes": 3}
    check_settings(path, state, toy_config(tmp_path))


def test_settings_of_today_do_not_bind_an_older_checkpoint(tmp_path: Path) -> None:
    """A run of an earlier version would be refused for a setting that it could not have."""
    save_step(tmp_path, 1)
    (path,) = checkpoints_of(tmp_path)
    state = json.loads((path / "state.json").read_text())
    for key in ("heads.kind", "heads.options", "model.other_base"):
        del state["settings"][key]
    check_settings(path, state, toy_config(tmp_path))
    other = toy_config(tmp_path, heads=HeadsConfig(kind="block", options={"window": 3}))
    with pytest.raises(ConfigError, match="heads.kind was 'medusa', is 'block'"):
        check_settings(path, state, other)
    state["settings"] |= {"heads.kind": "block", "heads.options.window": 3}
    check_settings(path, state, other)
    del state["settings"]["heads.options.window"]
    with pytest.raises(ConfigError, match="heads.options.window was None, is 3"):
        check_settings(path, state, other)


def test_what_cannot_be_resumed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistyped path must not start a new run from scratch."""
    assert checkpoint_to_resume(toy_config(tmp_path, resume="auto")) is None
    with pytest.raises(ConfigError, match="no checkpoint at"):
        checkpoint_to_resume(toy_config(tmp_path, resume=str(tmp_path / "step-9")))
    save_step(tmp_path, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="written by 1 processes, this run has 2"):
        checkpoint_to_resume(toy_config(tmp_path, resume="auto"))


def test_state_is_json_and_safetensors_only(tmp_path: Path) -> None:
    """A pickle in a checkpoint runs code when somebody else's run is resumed."""
    save_step(tmp_path, 1)
    names = sorted(path.name for path in checkpoints_of(tmp_path)[0].iterdir())
    assert names == [
        "manifest.json", "model.safetensors", "random-0.safetensors", "rank-0.json", "state.json",
    ]  # fmt: skip
    json.loads((checkpoints_of(tmp_path)[0] / "rank-0.json").read_text())


def test_there_is_never_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between two renames would leave neither the old checkpoint nor the new one."""
    seen = []
    remove = shutil.rmtree

    def watched(path: Path, **options: bool) -> None:
        seen.append(sorted(p.name for p in (tmp_path / "out").iterdir()))
        remove(path, **options)

    def write(content: str) -> None:
        with whole_folder(tmp_path / "out") as folder:
            (folder / content).touch()

    def no_two_renames(self: Path, target: Path) -> None:
        raise AssertionError(f"{self} was renamed to {target}")

    write("old")
    monkeypatch.setattr("specheads.system.files.shutil.rmtree", watched)
    monkeypatch.setattr(Path, "rename", no_two_renames)
    write("new")
    assert seen[0] == ["old"] and seen[-1] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
