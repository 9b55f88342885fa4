"""Signals: the first stops a run at its next safe place, the second one leaves at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specheads.system.signals import ASKING, StopAsked, StopSignal, saving_first

ROOT = Path(__file__).resolve().parents[2]
# what main() does in a process of its own; stuck() is a call that never looks for signals
PROGRAM = """
import hashlib, os, signal, sys, time
from specheads.system import signals
signals._ONE_REQUEST_SECONDS = {once}
def stuck():
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2 * 10**9)
def main():
    with signals.StopSignal() as asked:
        print("ready", flush=True)
{body}
main()
"""


def ended(body: str, *numbers: signal.Signals, once: float = 0.1) -> tuple[int, str]:
    """Run ``body`` in a process, send it signals 0.15 s apart; return exit code and stderr.

    A stuck body is sent the last one until it ends: on a busy machine two may arrive as one.
    """
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    process = subprocess.Popen(
        [
            sys.executable,
            "-W",
            "ignore::DeprecationWarning",
            "-c",
            PROGRAM.format(body=lines, once=once),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        stuck = "stuck" in body and numbers
        for number in (*numbers, *([numbers[-1]] * 1000 if stuck else [])):
            if process.poll() is not None:
                break
            process.send_signal(number)
            time.sleep(0.15)
        _, errors = process.communicate(timeout=600)
        return process.returncode, errors
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", ASKING)
def test_a_second_signal_leaves_a_call_that_never_returns(number: signal.Signals) -> None:
    """Python hands signals over between bytecodes; a process in a dead collective has none."""
    code, errors = ended("stuck()", number, number)
    assert code == 128 + number
    assert errors.splitlines()[-1].startswith("specheads: a second signal")


def test_one_request_may_come_twice() -> None:
    """timeout(1) signals the process, then its group: taken for two, nothing would be saved."""
    code, _ = ended("time.sleep(0.5)\nsys.exit(75)", signal.SIGTERM, signal.SIGTERM, once=600)
    assert code == 75


def test_slurms_warning_and_what_it_warned_of_are_one_request() -> None:
    """Slurm sends SIGUSR1 early and SIGTERM in the end, which still leaves time to save."""
    code, _ = ended("time.sleep(0.5)\nsys.exit(75)", signal.SIGUSR1, signal.SIGTERM)
    assert code == 75
    code, _ = ended("stuck()", signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM)
    assert code == 128 + signal.SIGTERM


def test_a_second_signal_after_the_save_is_no_failure() -> None:
    """Torchrun signals the ranks that end last, as the first has ended with a code that is not 0.

    Leaving with 143 then would make a saved run look like a lost one.
    """
    code, errors = ended("asked.saved = True\nstuck()", signal.SIGTERM, signal.SIGTERM)
    assert (code, errors.count("second")) == (75, 0)


def test_a_forked_process_keeps_out_of_it() -> None:
    """A pool ends its workers by SIGTERM: the run would take that for its own and stop."""
    body = """begun, began = os.pipe()
pid = os.fork()
if not pid:
    os.write(began, b".")
    time.sleep(600)
os.read(begun, 1)
os.kill(pid, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
time.sleep(0.2)
assert not asked.name
print("fine", file=sys.stderr)"""
    assert ended(body) == (0, "fine\n")


@pytest.mark.parametrize("number", ASKING)
def test_at_once_interrupts_and_restores(number: signal.Signals) -> None:
    """While loading there is nothing to save; the handlers of the program around must survive."""
    before = signal.getsignal(number), signal.set_wakeup_fd(-1)
    with pytest.raises(StopAsked, match=number.name), StopSignal(at_once=True):
        os.kill(os.getpid(), number)
        time.sleep(5)
    assert (signal.getsignal(number), signal.set_wakeup_fd(-1)) == before


def test_a_signal_waits_from_block_to_block() -> None:
    """Between two stages nothing is saved yet: interrupted there, the first one would be lost."""
    with pytest.raises(StopAsked, match="everything is saved"), StopSignal(at_once=True) as outer:
        with saving_first(then_at_once=False) as asked:
            assert asked is outer
        os.kill(os.getpid(), signal.SIGTERM)
        with saving_first(then_at_once=True) as asked:
            assert asked.name == "SIGTERM"
    with StopSignal(at_once=True) as outer:
        with saving_first(then_at_once=True):
            assert not outer.at_once
        assert outer.at_once


def test_interrupting_ends_what_can_be_made_up_for() -> None:
    """An evaluation of minutes does not fit into the seconds that a scheduler grants."""
    with StopSignal() as asked:
        with pytest.raises(StopAsked), asked.interrupting():
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(5)
        assert asked.name == "SIGUSR1"
        with pytest.raises(StopAsked), asked.interrupting():
            pytest.fail("a block that begins after the signal")
