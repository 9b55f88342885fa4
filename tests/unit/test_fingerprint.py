"""A base is recognised by its weights, under any name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from specheads.models import fingerprint
from specheads.models.fingerprint import base_fingerprint


@pytest.mark.parametrize("whole", [fingerprint._WHOLE, 0])
def test_moved_is_the_same_and_changed_is_another(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, whole: int
) -> None:
    """Heads that go on on another base than they began on train wrongly without a word."""
    monkeypatch.setattr(fingerprint, "_WHOLE", whole)  # 0: as of files of many gigabytes
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
