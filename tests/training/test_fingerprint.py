"""A base is recognised by its weights, under any name."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from specheads.config import ConfigError, ModelConfig, TrainConfig
from specheads.models import names
from specheads.models.names import base_fingerprint
from specheads.training.checkpoints import Progress, check_settings, read_state, save_rank
from tests.toys import toy_config


def on_base(run_dir: Path, name: str) -> TrainConfig:
    """Return settings of a run on base ``name``."""
    return replace(toy_config(run_dir), model=ModelConfig(name=name))


@pytest.mark.parametrize("whole", [names._WHOLE, 0])
def test_moved_is_the_same_and_changed_is_another(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, whole: int
) -> None:
    """Heads that go on on another base than they began on train wrongly without a word."""
    monkeypatch.setattr(names, "_WHOLE", whole)  # 0: as of files of many gigabytes
    base_fingerprint.cache_clear()
    moved = shutil.copytree(tiny_model_dir, tmp_path / "moved")
    before = base_fingerprint(str(tiny_model_dir))
    assert before and base_fingerprint(str(moved)) == before
    content = bytearray((moved / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (moved / "model.safetensors").write_bytes(content)
    base_fingerprint.cache_clear()
    assert base_fingerprint(str(moved)) not in ("", before)


def test_no_weights_is_unknown(tmp_path: Path) -> None:
    """Two unknown bases must not count as one; nor must a save fail because the base is gone."""
    assert base_fingerprint(str(tmp_path)) == base_fingerprint(str(tmp_path / "gone")) == ""


def test_resume_goes_by_the_weights_of_the_base(tmp_path: Path, tiny_model_dir: Path) -> None:
    """A moved base must not end a run; another one under its name must not be trained on."""
    there, elsewhere = tmp_path / "there", tmp_path / "elsewhere"
    shutil.copytree(tiny_model_dir, there)
    saved = tmp_path / "step-1"
    saved.mkdir()
    save_rank(saved, on_base(tmp_path, str(there)), Progress(step=1), {})
    there.rename(elsewhere)
    base_fingerprint.cache_clear()
    state = read_state(saved)
    check_settings(saved, state, on_base(tmp_path, str(elsewhere)))
    shutil.copytree(elsewhere, there)
    weights = there / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(ConfigError, match=f"other weights than model.name={there}"):
        check_settings(saved, state, on_base(tmp_path, str(there)))
    shutil.rmtree(there)
    with pytest.raises(ConfigError, match="model.name was"):  # nothing to recognise it by
        base_fingerprint.cache_clear()
        check_settings(saved, state, on_base(tmp_path, f"{there}-gone"))
