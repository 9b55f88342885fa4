"""What other processes took of the processors while something was clocked; Linux says it.

A bench whose machine also does other work measures that work. Load averages count what waits for a
disk, and lag by minutes; /proc/stat counts the busy time of every processor, so what this process
did not use itself others did, on the very processors that it may run on.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STAT = Path("/proc/stat")
SHARE_LIMIT = 0.1  # of the processors; above it figures are said to be disturbed
LEAST_SECONDS = 0.5  # in less the counters, of hundredths of a second, say nothing


@dataclass(frozen=True)
class Sample:
    """Counters at one moment, in seconds since the machine or the process was started.

    Attributes:
        wall: a clock.
        busy: of the processors that this process may use, all processes together; None where the
            system does not say.
        stolen: of the same processors, taken by other virtual machines; None likewise.
        own: of this process, its threads and the children it waited for.
    """

    wall: float
    busy: float | None
    stolen: float | None
    own: float


def processors() -> set[int]:
    """Return the numbers of the processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return set(affinity(0)) if affinity else set(range(os.cpu_count() or 1))


def sample(stat: Path = STAT) -> Sample:
    """Read the counters.

    Args:
        stat: the file, as Linux writes /proc/stat; one that is not there gives no busy time.
    """
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    wall = time.perf_counter()
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return Sample(wall, None, None, own)
    wanted = {f"cpu{number}" for number in processors()}
    rows = [line.split()[1:] for line in lines if line.split(" ", 1)[0] in wanted]
    if len(rows) != len(wanted):  # a sandbox that shows other processors than it lends
        return Sample(wall, None, None, own)
    tick = os.sysconf("SC_CLK_TCK")
    # user, nice, system, idle, iowait, irq, softirq, steal; what a guest used is in user as well
    busy = sum(int(row[i]) for row in rows for i in (0, 1, 2, 5, 6)) / tick
    stolen = sum(int(row[7]) for row in rows if len(row) > 7) / tick
    return Sample(wall, busy, stolen, own)


def between(first: Sample, last: Sample) -> dict[str, Any]:
    """Return what others used between two samples, as processors and as a share of all.

    Returns:
        ``seconds``; ``processors``, which this process may use; ``own_processors``,
        ``other_processors`` and ``stolen_processors``, means over the time; ``other_share``, of
        others and stolen together, between 0 and 1. None where the system does not say, and where
        the time is too short for its counters.
    """
    seconds = max(last.wall - first.wall, 1e-9)
    own = (last.own - first.own) / seconds
    count = len(processors())
    found: dict[str, Any] = {
        "seconds": round(seconds, 3),
        "processors": count,
        "own_processors": round(own, 3),
        "other_processors": None,
        "stolen_processors": None,
        "other_share": None,
    }
    if first.busy is None or last.busy is None or first.stolen is None or last.stolen is None:
        return found
    if seconds < LEAST_SECONDS:
        return found
    # the counters lag behind each other: a process may seem to have used more than all together
    other = max((last.busy - first.busy) / seconds - own, 0.0)
    stolen = max((last.stolen - first.stolen) / seconds, 0.0)
    return found | {
        "other_processors": round(other, 3),
        "stolen_processors": round(stolen, 3),
        "other_share": round(min((other + stolen) / count, 1.0), 4),
    }
