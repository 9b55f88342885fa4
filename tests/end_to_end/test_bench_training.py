"""The experiments about steps of training, on tiny sizes: both sides do the same work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specheads.losses.cross_entropy import IGNORE
from tests.script_modules import load_script

features: Any = load_script("bench_features")
memory: Any = load_script("bench_memory")
mtp: Any = load_script("bench_mtp_memory")
references: Any = load_script("references")
render_training: Any = load_script("render_training")
train: Any = load_script("bench_train")
SIZES = ["--vocab=101", "--hidden=64", "--threads=1"]
CASE = {
    "vocab": 101, "hidden": 64, "base_layers": 5, "num_heads": 3, "num_layers": 1,
    "block_layers": 2, "anchors": 4, "rows": 2, "seq_len": 12, "chunk_size": 0, "lr": 1e-3,
    "threads": 1, "learned": 1.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure here: processes of their own would take long to import torch."""

    def here(function: Any, *given: Any, **environ: str) -> Any:
        return 2**20 if function.__name__ == "resident_peak" else function(*given)

    monkeypatch.setattr(train.harness, "in_fresh_process", here)
    monkeypatch.setattr(mtp, "keep_freed_memory", lambda: None)


def test_heads_beside_the_naive_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ratios to other heads, or over what a head owns anyway, are of nothing."""
    out = tmp_path / "memory.json"
    more = ["--tokens=16", "--recipes", "medusa1", "--repeats=1", f"--out={out}"]
    memory.main([*SIZES, *more])
    rows = json.loads(out.read_text())["rows"]
    by_key = {(r["lm_head"], r["implementation"], r["num_heads"]): r for r in rows}
    assert len(by_key) == 8
    for (lm_head, loss, count), row in by_key.items():
        one = by_key[lm_head, loss, 1]
        own = [each["owned_bytes"] * (lm_head == "own") for each in (row, one)]
        expected = (row["allocator_peak"] - own[0]) / (one["allocator_peak"] - own[1])
        assert row["allocator_ratio"] == pytest.approx(expected)
        naive = by_key[lm_head, "naive", count]
        assert row["seconds_vs_naive"] == pytest.approx(row["seconds"][0] / naive["seconds"][0])
    assert "allocator_ratio" in capsys.readouterr().out


@pytest.mark.parametrize("variant", ["parallel", "causal", "sequential"])
def test_eight_heads_take_hardly_more_memory_than_one(variant: str) -> None:
    """Logits or activations kept per head grow the peak with the heads; nothing else notices."""
    sizes = {"vocab": 8000, "hidden": 64, "tokens": 256, "chunk_size": 64, "threads": 1}
    rows = [{"side": "ours", "variant": variant, "num_heads": n, **sizes} for n in (1, 8)]
    for row in rows:
        row |= mtp.peak(row)
    mtp.add_growth(rows)
    assert rows[1]["growth"] <= 0.15
    # what is subtracted is what the heads own, and no more
    assert 0 == rows[0]["owned_bytes"] < rows[1]["owned_bytes"] < 0.3 * rows[1]["allocator_peak"]


@pytest.mark.parametrize("variant", ["parallel", "causal", "sequential"])
def test_both_loops_compute_the_same_loss(variant: str) -> None:
    """Compared with a loop that computes something else, any figure can be had."""
    sizes = {"vocab": 300, "hidden": 64, "tokens": 32, "chunk_size": 0, "threads": 1}
    for count in (1, 3):
        case = {"variant": variant, "num_heads": count, **sizes}
        losses = [mtp.Setup({"side": side, **case}).step()["loss"] for side in mtp.SIDES]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_mtp_memory_is_written(tmp_path: Path) -> None:
    """It runs once per publication, long after what it measures was last renamed."""
    out = tmp_path / "memory.json"
    more = ["--tokens=16", "--heads", "1", "2", "--timed-heads=2", "--repeats=1"]
    mtp.main([*SIZES, *more, f"--out={out}"])
    found = json.loads(out.read_text())
    assert [(row["side"], row["num_heads"]) for row in found["rows"]] == [
        (side, count) for side in ("ours", "naive") for count in (1, 2)
    ]
    assert [each["allocator"] for each in found["times"]] == ["kept", "system"]
    for each in found["times"]:
        ratio = each["ours"]["seconds"][0] / each["naive"]["seconds"][0]
        assert each["seconds_vs_naive"] == pytest.approx(ratio)


def test_ours_and_references_are_timed_and_weighed(tmp_path: Path) -> None:
    """The wrong side's tokens per second, or a ratio the other way round, is published."""
    out = tmp_path / "train.json"
    more = ["--base-layers=2", "--heads=2", "--seq-len=12", "--repeats=2", "--learned", "1"]
    more += ["--steps=2", "--seeds", "0", "1", "--allocators", "system", f"--out={out}"]
    train.main([*SIZES, *more])
    found = json.loads(out.read_text())
    assert [row["kind"] for row in found["rows"]] == list(train.KINDS)
    for row in found["rows"]:
        assert row["difference"]["loss"] < 1e-6 and row["difference"]["gradient"] < 1e-5
        for side, name in (("reference", "speed_ratio"), ("fused", "fused_speed_ratio")):
            ours, theirs = (row["seconds"][each] for each in ("ours", side))
            ratios = sorted(b / a for a, b in zip(ours, theirs, strict=True))
            spread = row[name]
            assert [spread["min"], spread["max"]] == pytest.approx(ratios)
            assert row[f"{side}_tokens_per_second"] == pytest.approx(24 / (sum(theirs) / 2))
        assert row["ours_tokens_per_second"] == pytest.approx(24 / (sum(ours) / 2))
        peaks = row["allocator_peak"]
        assert min(peaks.values()) > 2 * 101 * 64 * 4, "the base's two matrices"
        assert row["allocator_ratio"] == pytest.approx(peaks["ours"] / peaks["reference"])
    for each in found["accuracy"]:
        heads = ["lm", "head_0"] if each["kind"] == "mtp" else ["head_0", "head_1"]
        assert {side: list(of) for side, of in each["top1"].items()} == dict.fromkeys(
            train.SIDES, heads
        )
    read = lambda name: found  # noqa: E731
    page = render_training.train(read)
    for row in found["rows"]:
        line = f"| {render_training.TRAINED[row['kind']]} | system | 100% |"
        assert f"{line} {row['ours_tokens_per_second']:,.0f} |" in page
    heads = {
        line.count("|") for line in page.splitlines() if "tokens/s" in line or "system" in line
    }
    assert len(heads) == 1, "as many cells as titles"
    assert "means of 2 seeds" in page


def test_equal_steps_learn_the_same() -> None:
    """A side that trains on other batches, or not at all, is as accurate only by chance."""
    case = {**CASE, "kind": "medusa1", "seq_len": 64, "lr": 1e-2}
    first, ours, reference = (
        train.learn(case, side, steps, 0)
        for side, steps in (("ours", 0), ("ours", 6), ("reference", 6))
    )
    assert ours == pytest.approx(reference, abs=0.01)
    assert ours["head_0"] > first["head_0"] + 0.02


@pytest.mark.parametrize("learned", [1.0, 0.5])
@pytest.mark.parametrize("kind", ["medusa1", "hydra", "mtp"])
def test_references_are_those_of_the_papers(kind: str, learned: float) -> None:
    """Another loss, or other rows, would be compared with ours as if they were the same work."""
    reference = train.Setup({**CASE, "kind": kind, "learned": learned}, "reference")
    batch, ahead = reference.batch, reference.objective.ahead
    logits = reference.objective.logits(batch)
    assert len(logits) == 3 and logits[0].shape == (2, 12, 101)
    expected = torch.zeros(())
    for i in range(3):  # one label at a time: head i at t learns the token at t + ahead + i
        terms = [
            -logits[i][b, t].log_softmax(-1)[batch["labels"][b, t + ahead + i]]
            for b in range(2)
            for t in range(12 - ahead - i)
            if batch["labels"][b, t + ahead + i] != IGNORE
        ]
        expected = expected + torch.stack(terms).mean()
    loss, log = reference.objective(batch)
    torch.testing.assert_close(loss, expected)
    kinds = ("loss",) if kind == "mtp" else ("loss", "top1")
    assert log.keys() == {f"head_{i}/{name}" for i in range(3) for name in kinds}


@pytest.mark.parametrize("learned", [1.0, 0.5])
def test_slots_learn_the_tokens_of_their_places(learned: float) -> None:
    """A slot off by one learns another token on both sides of the comparison."""
    reference = train.Setup({**CASE, "kind": "dflash", "learned": learned}, "reference")
    batch, objective = reference.batch, reference.objective
    labels = objective.labels(batch["labels"])
    places = references.anchors_of(batch["input_ids"], (labels != IGNORE).any(-1).flatten(), 4)
    logits = torch.nn.functional.linear(
        objective.slots(batch, places), objective.base.lm_head.weight
    )
    expected = torch.zeros(())
    for s in range(1, 4):  # slot 0 is the root, the token behind the anchor
        terms = [
            -logits[b, a, s].log_softmax(-1)[batch["labels"][b, place + 1 + s]]
            for b in range(2)
            for a, place in enumerate(places[b].tolist())
            if place + 1 + s < 12 and batch["labels"][b, place + 1 + s] != IGNORE
        ]
        expected = expected + 0.7788**s * torch.stack(terms).mean()
    torch.testing.assert_close(objective(batch)[0], expected)


def other_loss(loss: Any, weight: Any) -> Any:
    """Return another loss, with the same gradients but for a factor."""
    return 0.8 * loss


def other_gradient(loss: Any, weight: Any) -> Any:
    """Return the same loss with another gradient of one weight."""
    return loss + 1e-2 * (weight - weight.detach()).sum()


@pytest.mark.parametrize("change", [other_loss, other_gradient])
@pytest.mark.parametrize("side", ["reference", "fused"])
@pytest.mark.parametrize("kind", list(train.KINDS))
def test_another_loss_is_refused(
    kind: str, side: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A speed-up over a loss that does more or other work says nothing."""
    trainer = train.KINDS[kind].reference
    forward = trainer.forward

    def other(self: Any, batch: Any) -> Any:
        loss, log = forward(self, batch)
        if self.fused == (side == "fused"):
            loss = change(loss, next(p for p in self.heads.parameters() if p.requires_grad))
        return loss, log

    assert train.compare_losses({**CASE, "kind": kind, "learned": 0.5})["gradient"] < 1e-5
    monkeypatch.setattr(trainer, "forward", other)
    with pytest.raises(SystemExit, match=f"not the same loss of {kind}: .*{side}"):
        train.compare_losses({**CASE, "kind": kind})


@pytest.mark.parametrize("features_dtype", ["auto", "int8"])
def test_both_sides_are_timed_on_the_same_work(features_dtype: str, tmp_path: Path) -> None:
    """Sides that train on other batches, or leave reading out, give a ratio of nothing."""
    out = tmp_path / "features.json"
    tiny = "--deep-layers=2 --deep-hidden=64 --deep-vocab=101 --rank=8 --heads=2 --rows=1"
    tiny += " --seq-len=32 --documents=12 --steps=2 --repeats=2 --warmup=1 --threads=1"
    features.main([*tiny.split(), f"--features-dtype={features_dtype}", f"--out={out}"])
    rows = json.loads(out.read_text())["rows"]
    assert [row["base"] for row in rows] == ["tinycode", "deep"]
    for row in rows:
        assert 0 <= row["bytes_on_disk"] - row["bytes_announced"] < 10_000
        assert row["largest_loss_difference"] < (1e-4 if features_dtype == "auto" else 0.05)
        for kind in ("seconds", "processor_seconds"):
            found = row[kind]
            assert 0 < found["t_base"]["median"] < found["online"]["median"]
            assert 0 < found["reading"]["median"] < found["cached"]["median"]


def test_aim_and_ratio_follow_from_the_times() -> None:
    """The aim and the ratio are what is published; they must follow from the times alone."""
    online, cached = (features.Side.__new__(features.Side) for _ in range(2))
    online.steps = [{"step": [4.0], "inner": [3.0]}] * 4  # t_base / t_heads = 3
    cached.steps = [{"step": [s], "inner": [0.1]} for s in (1.0, 1.0, 2.0, 2.0)]
    found = features.summary({"online": online, "cached": cached}, 0, 2)
    assert found["t_base_over_t_heads"] == 3 and found["aim"] == pytest.approx(3.6)
    assert found["ratio"]["median"] == pytest.approx(3.0) and not found["kept"]
    online.steps = [{"step": [2.0], "inner": [1.0]}] * 4
    found = features.summary({"online": online, "cached": cached}, 0, 2)
    assert found["aim"] == pytest.approx(1.8)
