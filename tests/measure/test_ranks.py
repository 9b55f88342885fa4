"""The doctor on all ranks of a launcher: who is there, and who is not like the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from specheads.measure.ranks import differences, look, table
from tests.processes import ROOT, Process

ALONE = {
    "rank": "0", "host": "a", "device": "cpu", "python": "3.11", "torch": "2.13",
    "deepspeed": "0.19", "specheads": "0.1", "model": "", "problem": "",
}  # fmt: skip
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
DEEPSPEED = ["-m", "deepspeed.launcher.runner", "--num_gpus=2", "--master_port=PORT"]


def place(number: int, port: int, world: int) -> dict[str, str | None]:
    """Return the variables of a rank on this machine."""
    return {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def test_ranks_that_are_not_alike_are_named() -> None:
    """Two versions of torch on eight machines hang in the first collective, without a word."""
    others = [ALONE | {"rank": f"{i}", "host": f"h{i}", "free": f"{i} GB"} for i in (1, 2)]
    assert differences([ALONE, *others]) == []
    odd = ALONE | {"rank": "3", "torch": "2.12"}
    assert differences([ALONE, *others, odd]) == ["torch differs: 2.13 on 0, 1, 2; 2.12 on 3"]
    lines = table([ALONE, *others, odd]).splitlines()
    assert len(lines) == 5 and lines[0].split() == [
        "rank", "host", "device", "python", "torch", "deepspeed", "specheads", "free"
    ]  # fmt: skip


def test_what_a_rank_does_not_find_is_a_problem() -> None:
    """A base that lies on one machine's disk alone is found out after the others have loaded."""
    found = look("/no/such", None, "cpu")
    assert (found["model"], found["device"]) == ("none", "cpu")
    assert "no such folder" in found["problem"]
    assert look("tinycode", None, "cpu")["problem"] == ""


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "srun"])
def test_launchers_start_the_doctor(launcher: str) -> None:
    """A rank that cannot be read from a launcher takes itself for the only one."""
    port = 20_000 + os.getpid() % 10_000
    words = ["model=tinycode", "json=true"]
    if launcher == "srun":
        step = {
            "SLURM_JOB_ID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_NODELIST": "localhost",
            "MASTER_PORT": str(port),
        }  # fmt: skip
        ranks = [
            Process(
                "-m", "specheads.doctor", *words,
                env={**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            )
            for rank in range(2)
        ]  # fmt: skip
        assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
        assert not ranks[1].stdout
        said = ranks[0].stdout
    else:
        start, module = {"torchrun": (TORCHRUN, "-m"), "deepspeed": (DEEPSPEED, "--module")}[
            launcher
        ]
        start = [word.replace("PORT", str(port)) for word in start]
        done = subprocess.run(
            [sys.executable, *start, module, "specheads.doctor", *words],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        said = done.stdout
    (line,) = (line for line in said.splitlines() if line.startswith('{"ranks"'))
    answer = json.loads(line)
    assert answer["ok"] and [each["rank"] for each in answer["ranks"]] == ["0", "1"]


@pytest.mark.distributed
@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named() -> None:
    """A launcher that was told one machine too many waits half an hour, and names nobody."""
    port = 20_000 + (os.getpid() + 1) % 10_000
    words = ("dist_timeout=15", "device=cpu")
    ranks = [
        Process("-m", "specheads.doctor", *words, env=place(number, port, 3)) for number in (0, 1)
    ]
    assert [rank.wait() for rank in ranks] == [1, 0]
    assert ranks[0].stderr == "specheads: rank 2 did not answer within 15 s\n"
    alone = Process("-m", "specheads.doctor", "dist_timeout=2", env=place(1, port + 1, 2))
    assert alone.wait() == 1
    assert f"cannot meet the others at 127.0.0.1:{port + 1}" in alone.stderr
