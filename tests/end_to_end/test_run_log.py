"""What a whole run leaves in its directory and on Weights & Biases, also on a full disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specheads.config import InterruptedRunError
from specheads.training.checkpoints import checkpoints_of
from tests.end_to_end.commands import SHORT, on_files, start
from tests.runs.test_metrics_file import room_for
from tests.toys import toy_config
from tests.training.test_loop import assert_same, rows_of, train
from tests.wandb_records import offline_run


@pytest.mark.slow
def test_a_run_shows_figures_samples_and_tree(
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_jsonl: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Figures without a text to look at hide a drafter that repeats one token for ever."""
    run_dir = tmp_path / "run"
    monkeypatch.delenv("WANDB_MODE", raising=False)
    given = [
        "log.wandb=offline", "log.artifacts=export", "log.samples=3", "log.every=1",
        "evaluate.every=4", "evaluate.num_prompts=2", "evaluate.max_new_tokens=8",
        "evaluate.temperatures=[0,1]", "tree.choices=[]", "tree.num_nodes=3",
        "data.eval_fraction=0.3",
    ]  # fmt: skip
    files = on_files(tiny_model_dir, tiny_jsonl, run_dir)
    assert start(monkeypatch, "+recipe=medusa1", *files, *SHORT, *given) == 0
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert [sample["temperature"] for sample in samples] == [0, 1, 0]
    for sample in samples:
        assert sample["plain"]
        assert not sample["identical"] or sample["plain"] == sample["drafted"]
        # the first token is the prefill's; every other one was gained by a verify step
        assert 1 <= sum(sample["accept_lengths"]) <= 7
    assert samples[0]["identical"]
    svg = (run_dir / "tree.svg").read_text()
    assert svg.startswith("<svg") and "tokens expected per step" in svg
    found = offline_run(run_dir)
    sent = {key for row in found["history"] for key in row}
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {key for row in rows for key in row} <= sent
    assert {"samples/_type", "tree/_type", "heads/loss_table/_type"} <= sent
    assert found["config"]["recipe"] == "medusa1"
    assert "model.safetensors" in found["artifacts"]["export"][0]


def test_a_disk_that_fills_up_loses_nothing(tmp_path: Path) -> None:
    """Steps whose rows found no room would leave a hole in every curve of the run."""
    whole, _ = train(toy_config(tmp_path / "whole", steps=120, log__every=1))
    cfg = toy_config(tmp_path / "full", steps=120, log__every=1)
    with room_for(24_000), pytest.raises(InterruptedRunError) as stopped:
        train(cfg)
    path = tmp_path / "full" / "metrics.jsonl"
    (checkpoint,) = checkpoints_of(tmp_path / "full")
    step = int(checkpoint.name.removeprefix("step-"))
    assert str(stopped.value) == (
        f"{path} cannot be written: no room (disk full?); stopped after step {step} of 120; "
        "go on with resume=auto"
    )
    written = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert written == list(range(1, len(written) + 1)) and written[-1] < step
    again, _ = train(toy_config(tmp_path / "full", steps=120, log__every=1, resume="auto"))
    assert_same(whole, again)
    assert rows_of(cfg) == rows_of(toy_config(tmp_path / "whole"))
