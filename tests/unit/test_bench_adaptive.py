"""The table of adaptive draft lengths: what it claims is what was asked, and it can be made."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from specheads.decoding.recording import Recording

from specheads.drafters.length import StepCosts
from specheads.measure.clock import Decoded, Prompt, Runs
from tests.scripts import load_script

bench: Any = load_script("bench_adaptive")


def test_the_claim_is_made_of_both_parts() -> None:
    """Close to the best length of each kind, and better than any single one over the mix."""
    speedups = {
        "fixed 1": {"a": 1.5, "b": 1.2, "mix": 1.35},
        "fixed 4": {"a": 2.0, "b": 0.8, "mix": 1.3},
        "good": {"a": 1.97, "b": 1.19, "mix": 1.5},
        "uneven": {"a": 2.2, "b": 1.1, "mix": 1.6},
        "even": {"a": 1.95, "b": 1.19, "mix": 1.34},
    }
    fixed = ["fixed 1", "fixed 4"]
    found = {name: bench.verdicts(speedups, fixed, name) for name in ("good", "uneven", "even")}
    assert [each["kept"] for each in found.values()] == [True, False, False]
    assert found["good"]["relative"]["a"] == pytest.approx(1.97 / 2)
    # not to draft at all is a fixed length too
    slow = {"fixed 1": {"a": 0.5, "mix": 0.5}, "rule": {"a": 0.9, "mix": 0.9}}
    assert bench.verdicts(slow, ["fixed 1"], "rule")["relative"]["mix"] == pytest.approx(0.9)


def test_the_clock_is_read_per_kind() -> None:
    """Seconds of one kind's prompts divided by another's, or repeats mistaken for prompts."""
    prompts = [Prompt(str(i), kind, torch.zeros(1, 1)) for i, kind in enumerate(["a", "b", "b"])]
    texts = [Decoded([1], [1], True)] * 3
    runs = {
        "plain": Runs([[4.0, 6.0, 9.0], [4.0, 6.0, 9.0], [40.0, 6.0, 9.0]], texts),
        "rule": Runs([[2.0, 3.0, 3.0], [2.0, 3.0, 30.0], [2.0, 3.0, 3.0]], texts),
    }
    found = bench.of_clock(runs, prompts)["rule"]
    assert found["speedup"] == {"a": 2.0, "b": 2.5, "mix": 19 / 8}
    assert found["identical"] == 3


def test_rules_learn_from_the_calibration_only() -> None:
    """A threshold chosen on the judged prompts would win by hindsight."""
    sure = ((0.9, 0.9, 0.9),) * 12
    known = [Recording("a", 3, 13, (3,) * 12, (3,) * 9 + (2, 1, 0), sure, sure)]
    costs = StepCosts(0.1, [0, 1, 1, 1, 1])
    found = bench.rules(costs, 3, known)
    names = {"adaptive", "adaptive, unmeasured", "adaptive+confidence", "confidence", "entropy"}
    assert set(found) == names
    assert found["adaptive"].prior == tuple(bench.learn_rates(known, 3))
    assert found["adaptive+confidence"].asks and not found["adaptive"].asks


def test_the_table_can_be_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A script that nobody runs is broken when the figures are needed."""
    out = tmp_path / "adaptive.json"
    argv = ["bench_adaptive.py", "--draft", "tinycode", "--out", str(out), "--kinds", "next"]
    argv += ["--num-prompts", "3", "--num-calibration", "3", "--max-new-tokens", "8"]
    monkeypatch.setattr(sys, "argv", [*argv, "--max-tokens", "2", "--repeats", "1"])
    bench.main()
    result = json.loads(out.read_text())
    assert set(result["judged"]["fixed 2"]) == {"next", "mix"}
    for clocked in result["clocked"].values():
        assert clocked["identical"] == 1
    assert "adaptive+confidence" in capsys.readouterr().out
