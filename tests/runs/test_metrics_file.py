"""metrics.jsonl: no row lost, none twice, none in halves."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specheads.config import RunError
from specheads.runs.directory import MetricsFile, read_rows
from specheads.runs.log import RunLog
from tests.toys import toy_config

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond ``num_bytes``, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def steps_of(path: Path) -> list[int]:
    """Return the step of every row; all lines are whole rows."""
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@settings(max_examples=60)
@given(
    rooms=st.lists(st.integers(0, 400), min_size=1, max_size=8),
    widths=st.lists(st.integers(0, 90), min_size=1, max_size=12),
)
def test_every_row_is_whole_and_arrives_once(rooms: list[int], widths: list[int]) -> None:
    """A disk that is full for a while would leave half rows, gaps or rows written twice.

    The room changes from row to row; the file must at all times hold a prefix of the rows.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        file = MetricsFile(path, 0)
        for number, width in enumerate(widths):
            with room_for(rooms[number % len(rooms)]):
                file.append({"step": number, "text": "x" * width})
            written = steps_of(path)
            assert written == list(range(len(written)))
            assert bool(file.trouble) == (len(written) <= number)
        assert file.close() == 0  # there is room now
        assert steps_of(path) == list(range(len(widths)))


def test_rows_without_room_are_in_the_checkpoint(tmp_path: Path) -> None:
    """A run that stops for want of room and goes on later would miss the rows in between."""
    path, checkpoint = tmp_path / "metrics.jsonl", tmp_path / "step-4"
    checkpoint.mkdir()
    file = MetricsFile(path, 0)
    file.append({"step": 2, "text": "x" * 500})
    with room_for(path.stat().st_size + 5):
        file.append({"step": 4})
        assert file.trouble == f"{path} cannot be written: no room (disk full?)"
        file.append({"step": 4, "eval/alpha": 0.5})
        file.save(checkpoint)
        assert file.close() == 2
    assert steps_of(path) == [2]
    MetricsFile(path, 4, checkpoint).close()
    assert steps_of(path) == [2, 4, 4]


def test_a_checkpoint_knows_its_rows(tmp_path: Path) -> None:
    """Of a run killed while it measured, the last figures would stand in the file twice.

    They have the step of the last checkpoint, as the row before it has: the step does not tell
    them apart.
    """
    path, checkpoint = tmp_path / "metrics.jsonl", tmp_path / "step-4"
    checkpoint.mkdir()
    file = MetricsFile(path, 0)
    for row in ({"step": 4, "eval/alpha": 0.5}, {"step": 4, "train/loss": 1.0}):
        file.append(row)
    file.save(checkpoint)
    file.append({"step": 4, "final/alpha": 0.6})
    file.close()
    MetricsFile(path, 4, checkpoint).close()
    assert [sorted(row)[0] for row in read_rows(path)] == ["eval/alpha", "step"]
    MetricsFile(path, 3, checkpoint).close()  # an earlier checkpoint of a file that was cut
    assert path.read_text() == ""


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    """A torn row of a killed run would keep its directory from ever being resumed."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1}\n\xff\xfe\n[]\n{"step": "2"}\n{"ste{"step": 3}\n{"step": 4}\n{"st'
    )
    MetricsFile(path, 9).close()
    assert steps_of(path) == [1, 4]


def test_a_killed_run_leaves_its_rows(tmp_path: Path) -> None:
    """Rows in a buffer die with the process, up to thousands of steps of them."""
    code = (
        "from pathlib import Path; from specheads.runs.directory import MetricsFile; import time\n"
        f"file = MetricsFile(Path({str(tmp_path / 'metrics.jsonl')!r}), 0)\n"
        "for step in range(100): file.append({'step': step})\n"
        "print('written', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as run:
        assert run.stdout is not None and run.stdout.readline() == "written\n"
        run.send_signal(signal.SIGKILL)
    assert steps_of(tmp_path / "metrics.jsonl") == list(range(100))


def test_a_run_whose_last_rows_found_no_room_says_so(tmp_path: Path) -> None:
    """A finished run without its final figures would look complete: exit code 0."""
    with (
        pytest.raises(RunError, match=r"no room \(disk full\?\); its last 1 rows are missing"),
        room_for(20_000),
        RunLog(toy_config(tmp_path)) as log,
    ):
        log.begin(0)
        assert not log.trouble
        log.record(2, {f"final/{i}": float(i) for i in range(2_000)})
        assert "disk full" in log.trouble
        (tmp_path / "export").mkdir()
    assert not (tmp_path / "LOCK").exists()
