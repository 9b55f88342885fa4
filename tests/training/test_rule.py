"""The numbers that follow from base and data where nobody gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from specheads.models.checkpoint import load_export
from specheads.training import rule
from tests.end_to_end.commands import on_files, start


@given(st.integers(1, 100_000), st.integers(1, 100_000))
def test_wider_bases_learn_at_lower_rates(one: int, other: int) -> None:
    """A rate of one width on another diverges, or learns nothing in the time."""
    low, high = rule.LR_BOUNDS
    narrow, wide = map(rule.learning_rate, sorted((one, other)))
    assert low <= wide <= narrow <= high
    assert rule.learning_rate(rule.ANCHOR_WIDTH) == rule.ANCHOR_LR
    assert rule.learning_rate(2 * rule.ANCHOR_WIDTH) == rule.ANCHOR_LR / 2


@given(st.integers(1, 10**7), st.integers(1, 10**7), st.integers(1, 512))
def test_more_data_takes_more_steps(one: int, other: int, per_step: int) -> None:
    """Steps of one data set are a hundred epochs of a small one, or a corner of a large one."""
    low, high = rule.STEPS_BOUNDS
    few, many = (rule.steps_for_rows(rows, per_step) for rows in sorted((one, other)))
    assert low <= few <= many <= high
    if low < few < high:
        assert 0 <= few * per_step - rule.EPOCHS * min(one, other) < per_step


def test_steps_of_a_measured_length_end_in_time() -> None:
    """Rounded up, or as if the optimizer took no time, a run given ten minutes ends after them."""
    assert rule.steps_for_time(10, 3.2) == 159
    assert rule.steps_for_time(0.01, 60) == 1


def counts(shares: dict[int, float], vocab_size: int = 49_152) -> NDArray[Any]:
    """Return counts [V] of which the first n tokens have the given share, in any order."""
    found, done, before = np.zeros(vocab_size), 0, 0.0
    for size, share in shares.items():
        found[done:size] = 1e6 * (share - before) / (size - done)
        done, before = size, share
    return np.random.permutation(found)


def test_the_draft_vocabulary_covers_the_answers() -> None:
    """A token that no head can guess is a miss at every place where it comes."""
    trial = {2_048: 0.882, 4_096: 0.943, 8_192: 0.986, 16_384: 1.0}
    size, share = rule.draft_vocabulary(counts(trial))
    assert (size, round(share, 3)) == (8_192, 0.986)
    assert rule.draft_vocabulary(counts({1_000: 1.0})) == (2_048, 1.0)
    flat = counts({49_152: 1.0})
    size, share = rule.draft_vocabulary(flat)
    assert size == 8_192 and share == pytest.approx(1 / 6)  # at most a quarter
    assert rule.draft_vocabulary(flat[:8_000]) == (8_000, 1.0)
    assert rule.draft_vocabulary(flat, wanted=4_915)[0] == 4_915


def test_a_recipe_needs_nothing_but_base_and_data(
    tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Numbers decided anew by a resumed run are others, and its schedule breaks in the middle."""
    monkeypatch.setattr(rule, "STEPS_BOUNDS", (3, 5))
    monkeypatch.setattr(rule, "SMALLEST_VOCABULARY", 64)
    monkeypatch.setattr(rule.hardware, "faster_dtype", lambda device: torch.bfloat16)
    run_dir = tmp_path / "runs" / "mine"
    wanted = ["+recipe=hydra", *on_files(tiny_model_dir, tiny_jsonl, run_dir)]
    small = ["log.wandb=disabled", "data.seq_len=64", "evaluate.max_new_tokens=12"]
    small += ["evaluate.num_prompts=2", "heads.num_heads=2", "tree.choices=[[0],[0,0]]"]
    assert start(monkeypatch, *wanted, *small, "max_steps=2") == 0
    printed = capsys.readouterr().out
    (said,) = [line for line in printed.splitlines() if line.startswith("by rule: ")]
    assert "lr 3.0e-03 (width 32), steps 5 (" in said
    assert "learned tokens), draft vocabulary 64 (" in said and "features.dir " in said
    first = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert (first["steps"], first["optim"]["lr"], first["autocast"]) == (5, 3e-3, "bfloat16")
    assert (first["heads"]["lm_head"], first["heads"]["num_kept"]) == ("pruned", 64)
    (features,) = (tmp_path / "runs" / "features").iterdir()
    assert first["features"]["dir"] == str(features)
    # what decides has changed since
    monkeypatch.setattr(rule, "STEPS_BOUNDS", (9, 9))
    monkeypatch.setattr(rule, "ANCHOR_LR", 1e-5)
    monkeypatch.setattr(rule, "DISK_SHARE", 0.0)
    monkeypatch.setattr(rule, "SMALLEST_VOCABULARY", 32)
    monkeypatch.setattr(rule.hardware, "faster_dtype", lambda device: torch.float32)
    assert start(monkeypatch, *wanted, *small, "resume=auto") == 0
    assert "by rule" not in capsys.readouterr().out
    again = yaml.safe_load((run_dir / "config.yaml").read_text())
    for key in ("steps", "optim", "heads", "features", "autocast"):
        assert again[key] == first[key]
    export = load_export(run_dir / "export")
    assert export.config["training"]["steps"] == 5 and export.config["num_kept"] == 64
    # another data's vocabulary would be another one; heads that go on are as they were
    more = [f"heads.start={run_dir / 'export'}", f"hydra.run.dir={tmp_path / 'more'}", "steps=1"]
    assert start(monkeypatch, *wanted, *small, *more) == 0
    assert "draft vocabulary" not in capsys.readouterr().out
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 5


@pytest.mark.parametrize("cached", [True, False])
def test_a_run_of_some_minutes_goes_on_with_the_steps_that_it_began_with(
    tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path, *, cached: bool,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Steps clocked anew by a resumed run are others, and its decay begins in another place."""
    run_dir, clocked = tmp_path / "runs" / "mine", list[float]()
    monkeypatch.setattr("specheads.pipeline.steps_for_time", lambda m, s: clocked.append(s) or 4)
    asked = ["+recipe=hydra", *on_files(tiny_model_dir, tiny_jsonl, run_dir), "minutes=0.1"]
    asked += ["log.wandb=disabled", "data.seq_len=64", "evaluate.max_new_tokens=12", "steps=9"]
    asked += ["evaluate.num_prompts=2", "heads.num_heads=2", "tree.choices=[[0],[0,0]]"]
    asked += [] if cached else ["features.dir="]
    assert start(monkeypatch, *asked, "max_steps=2") == 0
    assert "0.1 minutes: 4 steps of " in capsys.readouterr().out and clocked[0] > 0
    assert start(monkeypatch, *asked, "resume=auto") == 0
    assert len(clocked) == 1 and load_export(run_dir / "export").config["training"]["steps"] == 4


def test_a_recipe_without_a_rule_has_no_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Minutes that a recipe does not look at are ignored, and it trains for its steps, in hours."""
    assert start(monkeypatch, "+recipe=distill", f"hydra.run.dir={tmp_path}", "minutes=3") == 2
    assert "minutes" in capsys.readouterr().err


def test_shared_rows_are_not_in_the_export(
    tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Stored once more, a drafter of a few megabytes is as large as the base's output matrix."""
    run_dir = tmp_path / "run"
    wanted = ["+recipe=hydra", *on_files(tiny_model_dir, tiny_jsonl, run_dir), "+debug=cpu"]
    wanted += ["heads.lm_head=shared_pruned", "heads.num_kept=100", "data.seq_len=64"]
    wanted += ["evaluate.minutes=1e-6", "evaluate.num_prompts=4", "data.eval_fraction=0.4"]
    assert start(monkeypatch, *wanted, "heads.num_heads=2", "tree.choices=[[0],[0,0]]") == 0
    assert "measured on 3 of 4 prompts" in capsys.readouterr().out
    export = load_export(run_dir / "export")
    assert not [name for name in export.heads.state_dict() if "lm_head" in name]
    assert export.heads.token_map is not None and export.heads.num_outputs == 100
    assert "shared_pruned" in (run_dir / "export" / "config.json").read_text()
