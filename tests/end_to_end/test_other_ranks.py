"""A run goes on with another number of processes than it was begun with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specheads.training.checkpoints import checkpoints_of
from tests import processes
from tests.end_to_end.test_distributed import missing, on_ranks
from tests.end_to_end.toy_runs import write_base

SCRIPT = str(Path(__file__).with_name("other_ranks.py"))
STAGES = (0, 1, 2, 3)


def started(ranks: int, *arguments: str) -> None:
    """Run the script on some ranks; one is a process without a launcher."""
    if ranks > 1:
        on_ranks(ranks, SCRIPT, *arguments)
        return
    done = processes.run(SCRIPT, *arguments)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(bool(missing()), reason=f"DeepSpeed cannot compile without {missing()}")
@pytest.mark.parametrize("kind", ["medusa1", "mtp_sequential"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_another_number_of_ranks(tmp_path: Path, kind: str, before: int, after: int) -> None:
    """DeepSpeed 0.19.8 gives all groups of ZeRO-3 one counter of steps, without a word.

    Stopped after three of five steps and gone on with on twice or half as many ranks, the weights
    are those of one process under plain torch: the moments, their steps, the learning rates of each
    group, the data and the global batch have come along. medusa1 has a frozen base, which no
    checkpoint holds.
    """
    write_base(tmp_path / "base")
    stages = ",".join(map(str, STAGES))
    first, second = ("3", "", kind), ("0", "auto", kind)
    started(1, str(tmp_path), "one", "-1", "0", "", kind)
    started(before, str(tmp_path), "zero", stages, *first)
    started(after, str(tmp_path), "zero", stages, *second)
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
        assert worlds == [before, after]
        left = [path.name for path in (run_dir / "checkpoints").iterdir()]
        assert all(name.startswith("step-") for name in left), left
