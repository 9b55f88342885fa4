"""A base is recognised by its weights, under any name."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from specheads.config import ConfigError, ModelConfig, TrainConfig
from specheads.training.checkpoints import Progress, check_settings, read_state, save_rank
from tests.toys import toy_config


def on_base(run_dir: Path, name: str) -> TrainConfig:
    """Return settings of a run on base ``name``."""
    return replace(toy_config(run_dir), model=ModelConfig(name=name))


def test_resume_goes_by_the_weights_of_the_base(tmp_path: Path, tiny_model_dir: Path) -> None:
    """A moved base must not end a run; another one under its name must not be trained on."""
    there, elsewhere = tmp_path / "there", tmp_path / "elsewhere"
    shutil.copytree(tiny_model_dir, there)
    saved = tmp_path / "step-1"
    saved.mkdir()
    save_rank(saved, on_base(tmp_path, str(there)), Progress(step=1), {})
    there.rename(elsewhere)
    state = read_state(saved)
    check_settings(saved, state, on_base(tmp_path, str(elsewhere)))
    shutil.copytree(elsewhere, there)
    weights = there / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(ConfigError, match=f"other weights than model.name={there}"):
        check_settings(saved, state, on_base(tmp_path, str(there)))
    shutil.rmtree(there)
    with pytest.raises(ConfigError, match="model.name was"):  # nothing to recognise it by
        check_settings(saved, state, on_base(tmp_path, f"{there}-gone"))
    save_rank(saved, on_base(tmp_path, f"{there}-gone"), Progress(step=1), {})
    assert read_state(saved)["base_digest"] == "", "a save must not fail because the base is gone"
