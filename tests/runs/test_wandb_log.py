"""Weights & Biases: everything arrives, also offline, and nothing of it ends a training."""

from __future__ import annotations

import json
import os
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specheads.runs import wandb
from specheads.runs.directory import read_rows
from specheads.runs.log import Outcome, RunLog
from specheads.runs.wandb import has_credentials, head_lines, run_id, wanted_mode
from specheads.system.files import whole_file
from tests import processes
from tests.fake_wandb import FakeServer
from tests.toys import toy_config
from tests.wandb_records import offline_run

NOWHERE = "http://127.0.0.1:9"  # nobody listens on this port
TRAINED = {"train/loss": 2.0, "train/head_0/loss": 3.0, "train/head_1/loss": 4.0}
EVALUATED = {
    "eval/accept_length": 2.5,
    "eval/tree/t0/head_0/acceptance": 0.5,
    "eval/tree/t0/head_1/acceptance": 0.25,
    "eval/tree/t1/head_0/acceptance": 0.1,
}


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Keep the machine's own account and settings out of the tests, and each one's out of others.

    Wandb reads the environment once per process and service.
    """
    import wandb

    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    wandb.teardown()
    yield
    wandb.teardown()


def test_an_offline_run_is_complete(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What is not in the offline files is missing after wandb sync, and nobody notices."""
    folder = tmp_path / "run"
    cfg = toy_config(folder, log__wandb="offline", log__artifacts="export")
    with RunLog(cfg) as log:
        log.begin(0)
        log.metrics(2, TRAINED)
        checkpoint = folder / "checkpoints" / "step-0000002"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text("{}")
        log.save(checkpoint)
    with RunLog(toy_config(folder, log__wandb="offline", log__artifacts="export",
                           resume="auto")) as log:  # fmt: skip
        log.begin(2, checkpoint)
        log.metrics(4, {key: value / 2 for key, value in TRAINED.items()})
        log.metrics(4, EVALUATED)
        (folder / "export").mkdir()
        (folder / "export" / "config.json").write_text("{}")
        sample = {"prompt": "p", "plain": "ab", "drafted": "ab", "accept_lengths": [2, 1]}
        log.outcome(4, Outcome({"final/accept_length/t0": 3.0}, [sample], "<svg><!--x--></svg>"))
    found = offline_run(folder)
    assert len(found["ids"]) == 2 and set(found["ids"]) == {run_id(folder)}
    assert found["config"]["optim"]["lr"] == 0.01
    assert found["config"]["provenance"]["packages"]["torch"]
    rows = {row["_step"]: row for row in found["history"]}
    assert rows[2]["train/head_1/loss"] == 4.0 and rows[2]["step"] == 2
    assert rows[4]["eval/accept_length"] == 2.5 and rows[4]["final/accept_length/t0"] == 3.0
    assert found["metrics"]["*"].step_metric == "step"
    assert found["metrics"]["eval/accept_length"].summary.max
    media = {Path(name).parts[2].split("_")[0]: name for name in found["files"]}
    (run,) = [path for path in (folder / "wandb").glob("offline-run-*") if "table" in str(
        sorted(path.rglob("*.json")))]  # fmt: skip
    table = json.loads((run / "files" / media["samples"]).read_text())
    assert table["columns"] == list(sample) and table["data"] == [["p", "ab", "ab", "2 1"]]
    assert (run / "files" / media["tree"]).read_text() == "<svg><!--x--></svg>"
    panels = [name for name in found["files"] if "/heads/" in name]
    loss = [name for name in panels if "loss_table" in name][-1]
    lines = json.loads((run / "files" / loss).read_text())
    # the steps before the resume too, all heads in one panel
    assert sorted(map(str, lines["data"])) == sorted(
        map(str, [[2, "head 0", 3.0], [4, "head 0", 1.5], [2, "head 1", 4.0], [4, "head 1", 2.0]])
    )
    assert any("acceptance_table" in name for name in panels)
    assert found["artifacts"]["export"] == [["config.json"]]
    assert f"wandb sync {folder / 'wandb'}\n" in capfd.readouterr().out
    assert json.loads((folder / "samples.jsonl").read_text()) == sample
    assert (folder / "tree.svg").read_text() == "<svg><!--x--></svg>"


def test_an_unreachable_server_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run on a rented machine would end, or wait for minutes, because a web page is down.

    Wandb's service holds records back for up to 15 seconds, and learns of a run's end without
    anyone waiting for it. At the latest when the process ends they are all on disk.
    """
    from wandb.sdk.lib.service.service_connection import ServiceConnection

    monkeypatch.setattr(ServiceConnection, "inform_finish", lambda *args, **kwargs: None)
    monkeypatch.setenv("WANDB_BASE_URL", NOWHERE)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    with RunLog(toy_config(tmp_path, log__wandb="auto")) as log:
        log.begin(0)
        log.metrics(2, TRAINED)
    out, err = capfd.readouterr()
    assert out.count("Weights & Biases cannot be reached") == 1
    assert out.count(f"wandb sync {tmp_path / 'wandb'}\n") == 2  # at once, and again at the end
    assert "Traceback" not in out + err
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["train/loss"] == 2.0
    found = offline_run(tmp_path)
    assert found["ids"] == [run_id(tmp_path)]
    assert [row["train/loss"] for row in found["history"]] == [2.0]


def test_a_network_that_goes_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the network gone a finished run would hold its rented machine for ever."""
    monkeypatch.setattr(wandb, "_FINISH", 600.0)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    cfg = toy_config(tmp_path, log__wandb="auto")
    with FakeServer() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        with RunLog(cfg) as log:
            log.begin(0)
            log.metrics(2, TRAINED)
        assert [row["train/loss"] for row in server.rows] == [2.0]
        assert set(server.ids) == {run_id(tmp_path)}
        out, err = capfd.readouterr()
        assert f"Weights & Biases: {server.url}/" in out and "wandb sync" not in out

        cfg.resume = "auto"
        monkeypatch.setattr(wandb, "_FINISH", 2.0)
        with RunLog(cfg) as log:
            log.begin(2)
            server.leave()
            log.metrics(4, TRAINED)
            begin = time.monotonic()
        assert time.monotonic() - begin < 300
        assert set(server.ids) == {run_id(tmp_path)}
    out, err = capfd.readouterr()
    assert out.count("did not take everything") == out.count("wandb sync --include-online") == 1
    assert "Traceback" not in out + err
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [2, 4]


@pytest.mark.slow
def test_a_service_that_dies_is_one_line(tmp_path: Path) -> None:
    """Wandb's own process may be killed for memory; the training must not see its broken pipe."""
    code = f"""
import os, signal, subprocess, time
from pathlib import Path
from specheads.runs.log import RunLog
from tests import processes
from tests.fake_wandb import FakeServer
from tests.toys import toy_config
with RunLog(toy_config(Path({str(tmp_path)!r}), log__wandb="offline")) as log:
    log.begin(0)
    log.metrics(2, {{"train/loss": 1.0}})
    lines = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())],
                           capture_output=True, text=True).stdout.splitlines()
    (service,) = [int(line.split()[0]) for line in lines if "wandb-core" in line]
    os.kill(service, signal.SIGKILL)
    time.sleep(0.5)
    for step in (4, 6, 8):
        log.metrics(step, {{"train/loss": 1.0}})
"""
    done = processes.run("-c", code)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert done.stdout.count("Weights & Biases is lost") == 1
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4, 6, 8]


class FakeRun:
    """A run on a server that has steps below ``step`` already."""

    def __init__(self, step: int = 0) -> None:
        self.step, self.id, self.url = step, "fake", "https://example.org"
        self.settings = types.SimpleNamespace(sync_dir="wandb/run-1-fake")
        self.logged: list[tuple[int, dict[str, Any]]] = []

    def log(self, values: dict[str, Any], step: int) -> None:
        """Take figures as wandb does: steps never go back."""
        assert step >= self.step
        self.step = step
        self.logged.append((step, values))

    def define_metric(self, *names: str, **options: Any) -> None:
        """Do nothing."""

    def finish(self, exit_code: int) -> None:
        """Run into the limit."""
        raise TimeoutError("timed out")


def test_the_end_waits_within_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wandb's own limits are 90 seconds at the start and none at the end."""
    import wandb

    asked: dict[str, Any] = {}
    monkeypatch.setattr(wandb, "init", lambda **options: asked.update(options) or FakeRun())
    with RunLog(toy_config(tmp_path, log__wandb="online")) as log:
        log.begin(0)
    assert 0 < asked["settings"].finish_timeout <= 60
    assert 0 < asked["settings"].init_timeout <= 30
    out = capsys.readouterr().out
    assert "did not take everything (timed out)" in out and "wandb sync" in out


def test_steps_taken_again_are_not_sent_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wandb drops, with only a debug line, what comes for a step behind its last one.

    Steps taken again bring what it has; but the last figures of a run that was killed while it
    measured belong to a step that it has too, and must not be dropped.
    """
    import wandb

    server = FakeRun(step=7)  # killed after step 6, its newest checkpoint at 4
    monkeypatch.setattr(wandb, "init", lambda **options: server)
    with RunLog(toy_config(tmp_path, log__wandb="online", steps=8)) as log:
        log.begin(4)
        for step in (5, 6, 8):
            log.metrics(step, {"train/loss": float(step)})
        log.metrics(8, {"final/alpha": 0.5})
    assert [(step, each["step"]) for step, each in server.logged] == [(7, 6), (8, 8), (8, 8)]


def test_the_id_is_on_disk_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run killed while it registers would come back as another run, its curves in two halves."""
    import wandb

    class KilledError(BaseException):
        pass

    asked = []

    def init(**options: Any) -> None:
        asked.append(options["id"])
        raise KilledError

    monkeypatch.setattr(wandb, "init", init)
    for _ in range(2):
        with (
            pytest.raises(KilledError),
            RunLog(toy_config(tmp_path, log__wandb="online", resume="auto")) as log,
        ):
            log.begin(0)
    assert asked[0] == asked[1] == (tmp_path / "wandb" / "id").read_text()


def test_other_ranks_stay_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks would be eight runs on the server, and eight writers in one file."""
    import wandb

    monkeypatch.setattr(wandb, "init", lambda **options: pytest.fail("rank 1 asked for a run"))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with RunLog(toy_config(tmp_path / "run", log__wandb="offline")) as log:
        log.begin(0)
        log.metrics(2, TRAINED)
        log.outcome(2, Outcome({}, [{"prompt": "p"}], "<svg/>"))
        log.save(tmp_path)
    assert not (tmp_path / "run").exists()


def test_the_environment_decides_where_the_setting_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A cluster without a network sets WANDB_MODE once for all jobs."""
    assert wanted_mode("auto") == "auto" and wanted_mode("offline") == "offline"
    for given, meant in (("disabled", "disabled"), ("dryrun", "offline"), ("online", "online")):
        monkeypatch.setenv("WANDB_MODE", given)
        assert wanted_mode("auto") == meant
        assert wanted_mode("offline") == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with RunLog(toy_config(tmp_path, log__wandb="auto")) as log:
        log.begin(0)
    assert not (tmp_path / "wandb").exists()


def test_credentials_are_found_where_wandb_puts_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a key overlooked every run of a logged-in user stays offline."""
    url = "https://api.wandb.ai"
    assert not has_credentials(url)
    with whole_file(tmp_path / "no-netrc") as file:
        file.write_text("machine api.wandb.ai\n  login user\n  password abc\n")
    assert has_credentials(url) and not has_credentials("https://wandb.example.org")
    (tmp_path / "no-netrc").write_text("machine\n\n???")
    assert not has_credentials(url)
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert has_credentials(url)


def test_heads_share_a_panel() -> None:
    """Eight panels of one line each say nothing about the order of the heads."""
    rows = [
        {"step": 1, "train/head_0/loss": 3.0, "train/head_1/loss": 4.0, "train/loss": 5.0},
        {"step": 2, "train/head_0/loss": 2.0, "train/head_0/top1": 0.5, **EVALUATED},
    ]
    assert head_lines(rows) == {
        "heads/loss": {"head 0": ([1, 2], [3.0, 2.0]), "head 1": ([1], [4.0])},
        "heads/top1": {"head 0": ([2], [0.5])},
        "heads/acceptance": {"head 0": ([2], [0.5]), "head 1": ([2], [0.25])},
    }
    many = [{"step": step, "train/head_0/loss": float(step)} for step in range(1, 1202)]
    steps, values = head_lines(many)["heads/loss"]["head 0"]
    assert len(steps) <= 500 and steps[-1] == 1201 and values[-1] == 1201.0
    assert len({b - a for a, b in zip(steps, steps[1:], strict=False)}) == 1


def test_a_run_without_wandb_installed_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The package is a convenience; a missing one must not end a run after its model is loaded."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with RunLog(toy_config(tmp_path, log__wandb="auto")) as log:
        log.begin(0)
        log.metrics(2, TRAINED)
    assert "wandb is not installed" in capsys.readouterr().out
