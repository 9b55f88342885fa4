"""Two processes under DeepSpeed give the weights of one process under plain torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("two_ranks.py")
MEDUSA, MTP = ["medusa1", "medusa2"], ["mtp_parallel", "mtp_sequential"]


def missing() -> str:
    """Return what DeepSpeed would fail to compile with, empty if nothing."""
    folder = str(Path(sys.executable).parent)
    path = os.pathsep.join([folder, os.environ.get("PATH", "")])
    wanted = [name for name in ("ninja", "g++") if not shutil.which(name, path=path)]
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        wanted.append("Python.h")
    return ", ".join(wanted)


def start(command: list[str]) -> None:
    """Run a command from the repository and show what it printed if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


@pytest.mark.distributed
@pytest.mark.skipif(bool(missing()), reason=f"DeepSpeed cannot compile without {missing()}")
@pytest.mark.parametrize(
    ("stage", "kinds"),
    [
        (2, [*MEDUSA, "mtp_sequential", "draft"]),
        pytest.param(2, ["mtp_parallel"], marks=pytest.mark.slow),
        *(pytest.param(stage, MTP, marks=pytest.mark.slow) for stage in (0, 1)),
        pytest.param(3, [*MEDUSA, *MTP, "draft"], marks=pytest.mark.slow),
    ],
)
def test_two_ranks_equal_one_process(tmp_path: Path, stage: int, kinds: list[str]) -> None:
    """Ranks agree with each other even when both are wrong; only a reference shows it.

    Labels are unequal per rank and per micro-batch, so that a mean of means differs too.
    """
    zero: dict[str, object] = {"stage": stage}
    if stage == 3:  # else parameters this small are never split
        zero["stage3_param_persistence_threshold"] = 0
    start([sys.executable, str(SCRIPT), str(tmp_path / "one"), "{}", *kinds])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    engine = json.dumps({"zero_optimization": zero})
    start([*launcher, str(SCRIPT), str(tmp_path / "two"), engine, *kinds])
    for kind in kinds:
        one = load_file(tmp_path / f"one-{kind}.safetensors")
        two = load_file(tmp_path / f"two-{kind}.safetensors")
        assert one.keys() == two.keys()
        for name, expected in one.items():
            torch.testing.assert_close(two[name], expected, rtol=1e-5, atol=1e-6, msg=name)
