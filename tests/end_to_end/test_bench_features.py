"""``scripts/bench_features.py`` on tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.scripts import load_script

TINY = [
    "--deep-layers=2", "--deep-hidden=64", "--deep-vocab=101", "--rank=8", "--heads=2", "--rows=1",
    "--seq-len=32", "--documents=12", "--steps=2", "--repeats=2", "--warmup=1", "--threads=1",
]  # fmt: skip


@pytest.mark.parametrize("features_dtype", ["auto", "int8"])
def test_both_sides_are_timed_on_the_same_work(
    features_dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sides that train on other batches, or leave reading out, give a ratio of nothing."""
    out = tmp_path / "features.json"
    script = load_script("bench_features")
    script.main([*TINY, f"--features-dtype={features_dtype}", f"--out={out}"])
    rows = json.loads(out.read_text())["rows"]
    assert [row["base"] for row in rows] == ["tinycode", "deep"]
    for row in rows:
        assert row["bytes_announced"] == row["bytes_on_disk"]
        assert row["largest_loss_difference"] < (1e-4 if features_dtype == "auto" else 0.05)
        for kind in ("seconds", "processor_seconds"):
            found = row[kind]
            assert 0 < found["t_base"]["median"] < found["online"]["median"]
            assert 0 < found["reading"]["median"] < found["cached"]["median"]
            assert found["aim"] == pytest.approx(0.9 * (1 + found["t_base_over_t_heads"]))
            assert found["kept"] == (found["ratio"]["median"] >= found["aim"])
    said = capsys.readouterr().out
    assert "t_base / t_heads" in said and "announced" in said


def test_aim_and_ratio_follow_from_the_times() -> None:
    """The aim and the ratio are what is published; they must follow from the times alone."""
    script = load_script("bench_features")
    online, cached = (script.Side.__new__(script.Side) for _ in range(2))
    online.steps = [{"step": [4.0], "inner": [3.0]}] * 4  # t_base / t_heads = 3
    cached.steps = [{"step": [s], "inner": [0.1]} for s in (1.0, 1.0, 2.0, 2.0)]
    found = script.summary({"online": online, "cached": cached}, 0, 2)
    assert found["t_base_over_t_heads"] == 3 and found["aim"] == pytest.approx(3.6)
    assert found["ratio"]["median"] == pytest.approx(3.0) and not found["kept"]
    online.steps = [{"step": [2.0], "inner": [1.0]}] * 4
    assert script.summary({"online": online, "cached": cached}, 0, 2)["aim"] == pytest.approx(1.8)
