"""A process that dies, hangs or fails is known to the others soon, over any backend."""

from __future__ import annotations

import signal
import socket

import pytest

from tests.processes import Process

# two ranks of plain torch; the body runs in both. Rank 0 keeps the store, as under srun.
PROGRAM = """
import os, sys, time
import torch
import torch.distributed as group
from specheads.config import RunError, InterruptedRunError
from specheads.system import dist, heartbeat

def main():
    group.init_process_group("gloo")
    heartbeat.start({timeout})
    rank = dist.rank()
    dist.barrier()
    print(f"rank {{rank}} began", flush=True)
    try:
{body}
    except RuntimeError as error:
        if not isinstance(error, (RunError, InterruptedRunError)):
            assert heartbeat.is_collective(error), error
            error = heartbeat.explain(error)
        print(f"{{type(error).__name__}}: {{error}}", flush=True)
        os._exit(7)
    heartbeat.stop()
    dist.shutdown()
main()
"""


class Pair:
    """Two ranks running ``body``."""

    def __init__(self, body: str, *, timeout: float = 60) -> None:
        lines = "".join(f"        {line}\n" for line in body.splitlines())
        while not self._started(PROGRAM.format(body=lines, timeout=timeout)):
            pass

    def _started(self, program: str) -> bool:
        """Start both; return whether they met: another program may have taken the port."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        self.ranks = [Process("-c", program, env={**place, "RANK": str(i)}) for i in range(2)]
        try:
            for process in self.ranks:
                process.wait_for(r"^rank \d began$")
        except AssertionError:
            self.__exit__()
            errors = "".join(process.stderr for process in self.ranks)
            assert "EADDRINUSE" in errors, errors
            return False
        return True

    def end(self, rank: int) -> tuple[int, str]:
        """Wait for a rank; return its exit code, and what it printed after it began."""
        process = self.ranks[rank]
        code = process.wait()
        return code, process.stdout.partition("began\n")[2] + process.stderr

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.ranks:
            process.kill()


WORKING = """for _ in range(10**6):
    time.sleep(0.05)
    dist.sum_over_ranks(torch.ones(1))"""


def test_a_killed_rank_is_named() -> None:
    """Gloo names an address, and NCCL nothing: nobody knows which machine to look at."""
    with Pair(WORKING, timeout=2) as pair:
        pair.ranks[1].send_signal(signal.SIGKILL)
        code, said = pair.end(0)
    assert code == 7
    assert said.startswith("RunError: rank 0 stops, as rank 1 has")


@pytest.mark.slow
def test_a_killed_rank_0_takes_the_store_with_it() -> None:
    """Under srun rank 0 keeps the store: without it nobody can be asked any more."""
    with Pair(WORKING, timeout=2) as pair:
        pair.ranks[0].send_signal(signal.SIGKILL)
        code, said = pair.end(1)
    assert code == 7
    assert said.startswith("RunError: rank 1 stops, as rank 0 or its launcher is gone")


@pytest.mark.parametrize("hung", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stopped_rank_ends_the_other_within_the_timeout(hung: int) -> None:
    """Its connections stay open: over gloo the others wait for hours, and pay for their GPUs."""
    with Pair(WORKING, timeout=2) as pair:
        pair.ranks[hung].send_signal(signal.SIGSTOP)
        code, said = pair.end(1 - hung)
    assert code == 1
    assert f"specheads: rank {1 - hung} stops, as rank {hung} has not answered for 2 s" in said
    assert said.count("specheads:") == 1


@pytest.mark.slow
def test_the_others_wait_for_rank_0_as_long_as_it_lives() -> None:
    """Measuring takes longer than any timeout that is good for a training step."""
    body = """if rank == 0:
    time.sleep(6)
    print("measured", flush=True)
heartbeat.wait_for_main()
print("done", flush=True)"""
    with Pair(body, timeout=2) as pair:
        assert pair.end(1) == (0, "done\n")
        assert pair.end(0) == (0, "measured\ndone\n")


@pytest.mark.slow
def test_why_rank_0_failed_is_told() -> None:
    """A rank that only waits would else say that its connection broke, hiding the reason."""
    body = """if rank == 0:
    heartbeat.announce("no room to write\\n the export", 1)
    time.sleep(3)
    os._exit(1)
heartbeat.wait_for_main()"""
    with Pair(body, timeout=30) as pair:
        code, said = pair.end(1)
    assert code == 7
    reason = "rank 1 stops, as rank 0 stopped: no room to write the export; "
    assert said.startswith(f"RunError: {reason}")


@pytest.mark.slow
def test_a_rank_that_is_stuck_with_a_failed_one_is_ended() -> None:
    """Over NCCL a collective with a rank that has failed does not return; here a sleep does not."""
    body = """if rank == 1:
    heartbeat.announce("OSError: the prompts are gone", 1)
    time.sleep(60)
time.sleep(60)"""
    with Pair(body, timeout=60) as pair:
        code, said = pair.end(0)
    assert code == 1
    assert said.startswith("specheads: rank 0 stops, as rank 1 stopped: OSError: the prompts are")
