"""``scripts/bench_step.py`` on a tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.script_modules import load_script

script: Any = load_script("bench_step")


def test_every_part_is_measured(tiny_export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It runs once per publication, long after the parts that it clocks were last renamed."""
    out = tiny_export.with_name("step.json")
    few = "--dtype=float32 --threads=1 --repeats=1 --num-prompts=1 --max-new-tokens=12 --context=32"
    few += " --calls=3 --growth-tokens=40 --nodes 2 8"
    script.main([f"--checkpoint={tiny_export}", f"--out={out}", *few.split()])
    report = json.loads(out.read_text())
    assert report.keys() == {"environment", "settings", "budget", "verify", "growth"}
    assert [row["temperature"] for row in report["budget"]] == [0, 1]
    for row in report["budget"]:
        assert row["phases_ms"]["base forward"]["median"] > 0 < row["phases_ms"]["heads"]["median"]
        assert 0 < row["overhead_ms"]["median"] < row["clocked_step_ms"]["median"]
        assert 0 < row["overhead_share"]["median"] < 1 and row["num_steps"] > 0
    assert [row["num_nodes"] for row in report["verify"]] == [2, 8]
    for row in report["verify"]:
        assert row["ratio"]["q25"] <= row["ratio"]["median"] <= row["ratio"]["q75"]
        assert 0 < row["ratio_ci95"][0] <= row["ratio"]["median"] <= row["ratio_ci95"][1]
    for row in report["growth"]:
        assert row["plain"]["tokens_per_step"][0]["median"] == 1
        assert row["tree"]["tokens_per_step"][1]["median"] >= 1
        assert row["beyond_plain_per_token"]["median"] > 0
    said = capsys.readouterr().out
    assert "overhead_share" in said and "ratio" in said and "beyond_plain_per_token" in said


def test_drafters_and_batches_have_a_budget_each(tiny_export: Path) -> None:
    """A union's heads, or a batch's rows, that nobody clocks look free."""
    out = tiny_export.with_name("budget.json")
    few = "--dtype=float32 --threads=1 --repeats=1 --num-prompts=4 --max-new-tokens=12"
    few += " --parts budget --temperatures 0 --batches 1 2 --drafters heads suffix heads+suffix"
    script.main([f"--checkpoint={tiny_export}", f"--out={out}", *few.split()])
    rows = json.loads(out.read_text())["budget"]
    named = [(row["drafter"], row["batch"]) for row in rows]
    assert named == [(d, n) for d in ("heads", "suffix", "heads+suffix") for n in (1, 2)]
    for row in rows:
        assert row["num_steps"] > 0 < row["phases_ms"]["base forward"]["median"]
        assert (row["phases_ms"]["heads"]["q75"] > 0) >= (row["drafter"] == "heads")
        assert row["phases_ms"]["heads"]["q75"] == 0 or row["drafter"] != "suffix"


def test_steps_that_a_row_has_left_do_not_count() -> None:
    """They are shorter, and would make a batch look cheap."""

    def decode(ids: list[int], *, on_tokens: Any, max_new_tokens: int) -> None:
        for row, tokens in ((0, 1), (1, 1), (0, 1), (1, 2), (0, 1)):
            on_tokens(row, [7] * tokens)

    times, counts = script.clock_steps(decode, [1, 2], max_new_tokens=3)
    assert counts == [1, 1, 1, 2] and len(times) == 2  # of both rows; when the first one's came


def test_halves_divide_the_step_in_the_middle() -> None:
    """A whole step on one side makes the other half look faster, the more so in short texts."""
    # the prefill's token at 0, then 4 tokens in 1 s, 4 in 1 s, 1 in 3 s; the middle is at 5
    found = script.halves([0.0, 1.0, 2.0, 5.0], [1, 4, 4, 1])
    assert found["tokens_per_step"] == pytest.approx((4.0, 5 / 2))
    assert found["ms_per_step"] == pytest.approx((1000, 2000))
    # now at 6: a quarter of the second step is in the first half
    found = script.halves([0.0, 1.0, 2.0, 5.0], [1, 4, 4, 3])
    assert found["ms_per_step"] == pytest.approx((1000, 3750 / 1.75))
    assert found["ms_per_token"] == pytest.approx((250, 3750 / 6))
