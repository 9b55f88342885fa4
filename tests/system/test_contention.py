"""What others took of the processors, from counters that are given."""

from pathlib import Path

import pytest

from specheads.system import hardware
from specheads.system.hardware import Sample, between, sample

# user nice system idle iowait irq softirq steal guest guest_nice, in hundredths of a second
STAT = """cpu  900 90 300 5000 70 9 6 44 800 0
cpu0 300 30 100 2000 20 3 2 11 300 0
cpu1 300 30 100 2000 20 3 2 22 300 0
cpu2 300 30 100 1000 30 3 2 11 200 0
intr 12345 0
"""


@pytest.fixture(autouse=True)
def _two_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "processors", lambda: {0, 2})
    monkeypatch.setattr(hardware.os, "sysconf", lambda name: 100)


def test_only_the_own_processors_count(tmp_path: Path) -> None:
    """Pinned to one processor, a bench is not disturbed by work on the others, nor blind to it."""
    stat = tmp_path / "stat"
    stat.write_text(STAT)
    found = sample(stat)
    # user, nice, system, irq, softirq and steal; neither idle nor waiting, and a guest is in user
    assert found.busy == pytest.approx((2 * (300 + 30 + 100 + 3 + 2 + 11)) / 100)
    assert found.own > 0


@pytest.mark.parametrize("text", [None, "cpu  1 2 3\n", STAT.replace("cpu2", "cpu7")])
def test_what_the_system_does_not_say_is_unknown(tmp_path: Path, text: str | None) -> None:
    """Zero in place of unknown would say that a machine was quiet that nobody looked at."""
    stat = tmp_path / "stat"
    if text is not None:
        stat.write_text(text)
    first, last = sample(stat), sample(stat)
    assert first.busy is None and between(first, last)["other_share"] is None


def test_shares_by_hand() -> None:
    """A share of the wrong number of processors hides, or makes up, a busy machine."""
    first = Sample(wall=10.0, busy=100.0, own=50.0)
    last = Sample(wall=20.0, busy=116.5, own=62.0)
    # 16.5 busy, 12 of them own, of 2 processors in 10 seconds
    assert between(first, last) == {"seconds": 10, "other_share": 0.225}
    # counters tick slower than the clock: less than what the process used itself is nothing
    quiet = between(first, Sample(wall=20.0, busy=111.9, own=62.0))
    assert quiet["other_share"] == 0
    # a tick of each counter is much of a moment: nothing is known of it
    short = between(first, Sample(wall=10.1, busy=100.1, own=50.05))
    assert short["other_share"] is None


def test_this_machine_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real /proc/stat that is no longer understood would be unknown for ever."""
    monkeypatch.undo()
    if not hardware.STAT.is_file():
        pytest.skip("no /proc/stat here")
    first = sample()
    total = sum(i * i for i in range(200_000))
    last = sample()
    assert total and last.own >= first.own
    if first.busy is not None:
        assert last.busy is not None and last.busy >= first.busy
