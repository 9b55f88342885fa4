"""The run directory is held by one run, and one that cannot serve is refused at once."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
from pathlib import Path

import pytest

from specheads.config import ConfigError, RunError
from specheads.runs.directory import check_run_dir, lock, unlock
from specheads.runs.log import RunLog
from tests.runs.test_metrics_file import room_for
from tests.toys import toy_config


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """Found only at the first checkpoint, it costs the hours up to there."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is a file; choose another run_dir="):
        check_run_dir(tmp_path / "file", "")
    with pytest.raises(ConfigError, match="cannot be written: Not a directory"):
        check_run_dir(tmp_path / "file" / "run", "")
    with pytest.raises(ConfigError, match="cannot be written"):
        check_run_dir(Path("/proc/run"), "")  # as on a file system that is mounted read-only


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """Found only at the first checkpoint, it costs the hours up to there."""
    with room_for(4096), pytest.raises(RunError, match=r"no room .* nothing was started"):
        check_run_dir(tmp_path / "a" / "run", "")
    assert list(tmp_path.iterdir()) == []  # also without the folders above it


def test_the_check_leaves_no_trace(tmp_path: Path) -> None:
    """A directory that the check had marked as used would refuse the run itself."""
    check_run_dir(tmp_path / "a" / "run", "")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "notes.txt").write_text("mine")
    check_run_dir(tmp_path, "")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_the_lock_of_a_killed_run_does_not_stay(tmp_path: Path) -> None:
    """A LOCK file that outlives its process would have to be removed by hand."""
    (tmp_path / "LOCK").write_text("process 1 on elsewhere since yesterday\n")
    check_run_dir(tmp_path, "")
    with RunLog(toy_config(tmp_path)):
        assert str(os.getpid()) in (tmp_path / "LOCK").read_text()


def _enter(folder: str, rounds: int, trace: str) -> None:
    for _ in range(rounds):
        try:
            handle = lock(Path(folder) / "LOCK")
        except ConfigError:
            continue
        with open(trace, "ab", buffering=0) as file:  # noqa: PTH123
            file.write(b"(")
            os.sched_yield()
            file.write(b")")
        unlock(Path(folder), handle)


def test_never_two_at_once(tmp_path: Path) -> None:
    """A process that locks the file which the holder is just removing holds a lock on nothing."""
    folder, trace = tmp_path / "run", tmp_path / "trace"
    folder.mkdir()
    (folder / "keep").write_text("")  # else the directory itself would come and go
    trace.write_text("")
    context = multiprocessing.get_context("fork")
    runs = [context.Process(target=_enter, args=(str(folder), 2_000, str(trace))) for _ in range(4)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(60)
        assert run.exitcode == 0
    entered = trace.read_bytes()
    assert entered == b"()" * (len(entered) // 2) and entered


def test_a_lock_that_is_removed_while_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback in the one run of a thousand whose neighbour ends at that very moment."""
    path, fstat, looks = tmp_path / "LOCK", os.fstat, []

    def look(number: int) -> os.stat_result:
        if not looks:
            path.unlink()  # the neighbour
        looks.append(number)
        return fstat(number)

    monkeypatch.setattr(os, "fstat", look)
    handle = lock(path)
    assert len(looks) == 2 and os.path.samestat(fstat(handle.fileno()), path.stat())
    handle.close()


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some NFS mounts have none: refusing would make them useless, silence would promise a lock."""

    def flock(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    lock(tmp_path / "LOCK").close()
    assert "has no locks; nothing here keeps a second run out" in capsys.readouterr().out


def test_a_torn_provenance_is_one_line(tmp_path: Path) -> None:
    """It is written whole; a file that a copy tore must not be replaced by a shorter history."""
    with RunLog(toy_config(tmp_path)):
        pass
    record = tmp_path / "provenance.json"
    assert len(json.loads(record.read_text())) == 1
    record.write_text(record.read_text()[:-20])
    with pytest.raises(ConfigError, match=r"provenance.json is damaged .*; move it away to go on"):
        RunLog(toy_config(tmp_path, resume="auto"))
    assert not (tmp_path / "LOCK").exists()
