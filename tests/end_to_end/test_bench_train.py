"""``scripts/bench_train.py`` on tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from specheads.losses.cross_entropy import IGNORE
from tests.scripts import load_script

TINY = [
    "--vocab=101", "--hidden=64", "--base-layers=1", "--heads=2", "--rows=2", "--seq-len=12",
    "--repeats=2", "--threads=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """Import the script."""
    return load_script("bench_train")


def test_both_sides_are_timed_and_weighed(
    script: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It runs once per publication, long after what it compares was last renamed."""
    # four processes would take long to import torch
    monkeypatch.setattr(script, "in_subprocess", lambda _, *case: script.allocator_peak(*case))
    out = tmp_path / "train.json"
    script.main([*TINY, "--learned", "1", "--allocators", "system", "--out", str(out)])
    (row,) = json.loads(out.read_text())["rows"]
    assert row["difference"]["loss"] < 1e-6 and row["difference"]["gradient"] < 1e-5
    assert all(len(row["seconds"][side]) == 2 for side in ("ours", "reference"))
    assert row["speed_ratio"]["min"] <= row["speed_ratio"]["median"] <= row["speed_ratio"]["max"]
    assert min(row["allocator_peak"].values()) > 4 * 101 * 64 * 4 * 2, "state of two matrices"
    said = capsys.readouterr().out
    assert "tokens/s" in said and "allocator" in said and "differs by" in said


def test_memory_is_measured_in_a_process_of_its_own(script: ModuleType) -> None:
    """The peak of one side would be found in the other's."""
    case = script.Case(101, 64, 1, 2, 1, 2, 12, 1.0, 0, 1)
    assert script.in_subprocess("resident", case, "ours") > 0


@pytest.mark.parametrize("learned", [1.0, 0.5])
def test_the_reference_is_that_of_the_paper(script: ModuleType, learned: float) -> None:
    """Another loss, or other rows, would be compared with ours as if they were the same work."""
    case = script.Case(101, 64, 1, 2, 1, 2, 12, learned, 0, 1)
    reference = script.Setup(case, "reference")
    batch = reference.batch
    logits = reference.objective.logits(batch["input_ids"])
    assert logits.shape == (2, 2, 12, 101)
    expected = torch.zeros(())
    for i in range(2):  # one label at a time: head i at t learns the token at t + 2 + i
        terms = [
            -logits[i, b, t].log_softmax(-1)[batch["labels"][b, t + 2 + i]]
            for b in range(2)
            for t in range(12 - 2 - i)
            if batch["labels"][b, t + 2 + i] != IGNORE
        ]
        expected = expected + torch.stack(terms).mean()
    loss, log = reference.objective(batch)
    torch.testing.assert_close(loss, expected)
    assert log.keys() == {f"head_{i}/{kind}" for i in range(2) for kind in ("loss", "top1")}


def test_another_loss_is_refused(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A speed-up over a loss that does more or other work says nothing."""
    forward = script.Reference.forward

    def with_decay(self: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[object, object]:
        loss, log = forward(self, batch)
        return 0.8 * loss, log

    monkeypatch.setattr(script.Reference, "forward", with_decay)
    with pytest.raises(SystemExit, match="not the same loss"):
        script.main([*TINY, "--no-memory", "--allocators", "system"])
