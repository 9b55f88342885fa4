"""A run goes on with another number of processes than it was begun with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specheads.training.checkpoints import checkpoints_of
from tests import processes
from tests.end_to_end.test_distributed import missing, on_two_ranks
from tests.end_to_end.two_ranks import write_base

SCRIPT = str(Path(__file__).with_name("other_ranks.py"))
STAGES = (0, 1, 2, 3)


def on_one(*arguments: str) -> None:
    """Run the script in one process."""
    done = processes.run(SCRIPT, *arguments)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(bool(missing()), reason=f"DeepSpeed cannot compile without {missing()}")
@pytest.mark.parametrize("kind", ["medusa1", "mtp_sequential"])
@pytest.mark.parametrize("before", [1, 2])
def test_another_number_of_ranks(tmp_path: Path, kind: str, before: int) -> None:
    """DeepSpeed 0.19.8 gives all groups of ZeRO-3 one counter of steps, without a word.

    Stopped after three of five steps on one rank and gone on with on two, or the other way round,
    the weights are those of one process under plain torch: the moments, their steps, the learning
    rates of each group, the data and the global batch have come along. medusa1 has a frozen base,
    which no checkpoint holds.
    """
    write_base(tmp_path / "base")
    stages = ",".join(map(str, STAGES))
    first, second = ("3", "", kind), ("0", "auto", kind)
    on_one(str(tmp_path), "one", "-1", "0", "", kind)
    if before == 1:
        on_one(str(tmp_path), "zero", stages, *first)
        on_two_ranks(SCRIPT, str(tmp_path), "zero", stages, *second)
    else:
        on_two_ranks(SCRIPT, str(tmp_path), "zero", stages, *first)
        on_one(str(tmp_path), "zero", stages, *second)
    expected = load_file(tmp_path / f"one-1-{kind}.safetensors")
    for stage in STAGES:
        found = load_file(tmp_path / f"zero{stage}-{kind}.safetensors")
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(
                found[name], tensor, rtol=1e-5, atol=1e-6, msg=f"ZeRO-{stage} {name}"
            )
        run_dir = tmp_path / f"run-zero{stage}-{kind}"
        worlds = [
            json.loads((path / "state.json").read_text())["world_size"]
            for path in checkpoints_of(run_dir)
        ]
        assert worlds == [before, 3 - before]
        left = [path.name for path in (run_dir / "checkpoints").iterdir()]
        assert all(name.startswith("step-") for name in left), left
