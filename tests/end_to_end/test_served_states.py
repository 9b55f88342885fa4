"""Heads that train on the hidden states of a running server, whatever becomes of either."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specheads.data import served
from specheads.system import client
from specheads.training.engine import TorchEngine
from tests.end_to_end.commands import SHORT, on_files, start
from tests.end_to_end.test_resume_recipes import rows_of, weights_of
from tests.states_server import StatesServer

LONG = ("steps=8", "checkpoint.every=2", "optim.accumulation=2", "data.rows=1", "log.every=1")


@pytest.fixture
def server(tmp_path: Path, tiny_model_dir: Path) -> Iterator[StatesServer]:
    """Return a server of the tiny base's states, behind both of its layers."""
    found = StatesServer(tmp_path / "shared", tiny_model_dir, [2, 1])
    yield found
    found.close()


@pytest.fixture
def train(
    tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., int]:
    """Return a function that trains into the folder of a name, and gives the exit code."""
    monkeypatch.setattr(client, "_LONGEST_PAUSE", 0.02)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    def run(name: str, *words: str) -> int:
        settings: dict[str, str] = {}
        files = on_files(tiny_model_dir, tiny_jsonl, tmp_path / name)
        for word in ("+recipe=medusa1", *SHORT, *files, "autocast=none", *words):
            settings[word.partition("=")[0]] = word
        return start(monkeypatch, *settings.values())

    return run


def _losses(run_dir: Path) -> list[float]:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [row["train/loss"] for row in rows if "train/loss" in row]


def _same_weights(one: Path, other: Path) -> None:
    expected, found = (weights_of(run_dir / "export") for run_dir in (one, other))
    assert expected and all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def _threads() -> list[threading.Thread]:
    """Return the threads of pools, once what has ended had a moment to end."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        gc.collect()
        # of multiprocessing.dummy, and not of a test's server
        found = [t for t in threading.enumerate() if type(t).__name__ == "DummyProcess"]
        if not found:
            return []
        time.sleep(0.05)
    return found


@pytest.mark.parametrize(
    "words",
    [
        ("heads=hydra_plus", "loss.heads=soft"),
        ("data.streaming=true",),
        ("+recipe=mtp_finetune", "mtp.num_heads=3"),  # reads behind the first layer
    ],
)
def test_served_states_train_the_same_heads(
    words: tuple[str, ...], tmp_path: Path, server: StatesServer, train: Callable[..., int]
) -> None:
    """States of another text, layer or row train heads as well, only worse."""
    assert train("base", "features.dir=", *words) == 0
    assert train("served", f"features.endpoint={server.url}", *words) == 0
    expected, found = (_losses(tmp_path / name) for name in ("base", "served"))
    assert found and found == pytest.approx(expected, rel=1e-6)
    expected, found = (weights_of(tmp_path / name / "export") for name in ("base", "served"))
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 1e-5 * tensor.norm().clamp_min(1.0), name
    assert not list(server.folder.iterdir()) and not _threads()
    assert 0 < server.most_files <= served.AT_ONCE


def test_a_server_fills_a_cache(
    tmp_path: Path, server: StatesServer, train: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A cache of other texts' states; a complete one that asks for the server once more."""
    words = f"features.dir={tmp_path / 'cache'}", f"features.endpoint={server.url}"
    assert train("base", "features.dir=") == 0
    assert train("served", *words) == 0
    expected, found = (_losses(tmp_path / name) for name in ("base", "served"))
    assert found and found == pytest.approx(expected, rel=1e-6)
    asked = server.asked
    assert train("again", *words) == 0
    assert _losses(tmp_path / "again") == found and server.asked == asked
    assert train("other", words[0]) == 2
    assert "was made with another computation" in capsys.readouterr().err


def test_no_more_is_asked_for_than_is_soon_needed(
    server: StatesServer, train: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is faster than the trainer would fill the disk and the memory."""
    texts, ahead = [0], []
    ask, taken = served.StatesServer.ask, TorchEngine.step

    def asked(self: Any, batch: Any) -> Any:
        texts[0] += 1
        return ask(self, batch)

    def step(self: Any, factor: float) -> float:
        ahead.append(texts[0] - heldout - len(ahead) - 1)
        return taken(self, factor)

    monkeypatch.setattr(served.StatesServer, "ask", asked)
    monkeypatch.setattr(TorchEngine, "step", step)
    heldout = 1
    assert train("run", f"features.endpoint={server.url}", "data.rows=2") == 0
    assert ahead == [served.AHEAD] * 4


def test_a_server_that_comes_back_changes_nothing(
    tmp_path: Path, server: StatesServer, train: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A text that is left out, or read from half a file, changes what is learned, unseen."""
    url = f"features.endpoint={server.url}"
    assert train("whole", url, *LONG) == 0
    first, begun = server.asked, [0.0]

    def fails(number: int) -> int:
        if number == first + 12:
            return -2
        if first + 20 < number:
            begun[0] = begun[0] or time.monotonic()
            return (503, -1)[number % 2] if time.monotonic() - begun[0] < 2.5 else 0
        return 0

    server.fails = fails
    capsys.readouterr()
    assert train("hurt", url, *LONG) == 0
    assert capsys.readouterr().out.count("waiting for up to 600 s") == 1
    _same_weights(tmp_path / "whole", tmp_path / "hurt")
    assert not list(server.folder.iterdir())


def test_a_server_that_stays_away_ends_the_run_with_all_it_has(
    tmp_path: Path, server: StatesServer, train: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """What was learned since the last checkpoint would be lost, or what was asked for left out."""
    url = f"features.endpoint={server.url}"
    assert train("whole", url, *LONG) == 0
    before = server.asked
    server.fails = lambda number: 503 if number > before + 30 else 0
    assert train("hurt", url, *LONG, "checkpoint.every=100", "dist_timeout=1") == 1
    error = capsys.readouterr().err
    assert "HTTP 503" in error and "no answer for 1 s (dist_timeout); step" in error
    assert "is saved, resume=auto goes on" in error and not _threads()
    # at once again, with the server still away: the checkpoint stays what it was
    server.fails = lambda number: 503
    assert train("hurt", url, *LONG, "dist_timeout=1", "resume=auto") == 1
    server.fails = lambda number: 0
    assert train("hurt", url, *LONG, "resume=auto") == 0
    _same_weights(tmp_path / "whole", tmp_path / "hurt")
    key = "train/loss"
    expected, found = (
        [(row["step"], row[key]) for row in rows_of(tmp_path / name) if key in row]
        for name in ("whole", "hurt")
    )
    assert found == expected


def test_a_run_that_waits_can_be_stopped(
    server: StatesServer, train: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """A preempted machine gives half a minute, and the server may be away for longer."""

    def fails(number: int) -> int:
        if number == 40:
            os.kill(os.getpid(), signal.SIGTERM)
        return 503 if number > 30 else 0

    server.fails = fails
    words = f"features.endpoint={server.url}", *LONG, "checkpoint.every=100"
    assert train("run", *words) == 75
    error = capsys.readouterr().err
    assert "HTTP 503" in error and "; SIGTERM; step" in error and not _threads()


def test_a_killed_trainer_goes_on_where_it_was(
    tmp_path: Path, server: StatesServer, train: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A place that counts what was asked for leaves out texts that nobody learned."""
    url = f"features.endpoint={server.url}"
    assert train("whole", url, *LONG) == 0
    taken, count = TorchEngine.step, [0]

    def step(self: Any, factor: float) -> float:
        count[0] += 1
        if count[0] == 6:
            raise RuntimeError("killed")
        return taken(self, factor)

    with monkeypatch.context() as patched:
        patched.setattr(TorchEngine, "step", step)
        with pytest.raises(RuntimeError, match="killed"):
            train("halves", url, *LONG)
    moved = f"features.endpoint={server.url.replace('127.0.0.1', 'localhost')}"
    assert train("halves", moved, *LONG, "resume=auto") == 0
    _same_weights(tmp_path / "whole", tmp_path / "halves")


def test_another_server_is_refused(
    tmp_path: Path, server: StatesServer, train: Callable[..., int], tiny_model_dir: Path,
    make_tiny_llama: Callable[..., PreTrainedModel], capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Heads would learn another base, another layer, or go on with other numbers."""
    url = f"features.endpoint={server.url}"

    def refused(*words: str, name: str = "run") -> str:
        capsys.readouterr()
        assert train(name, url, *LONG, *words) in (1, 2)
        lines = capsys.readouterr().err.strip().splitlines()
        assert len([line for line in lines if line.startswith("specheads:")]) == 1, lines
        assert not _threads() and not list(server.folder.iterdir())
        return lines[-1]

    other = tmp_path / "other"
    shutil.copytree(tiny_model_dir, other)
    make_tiny_llama(seed=3).save_pretrained(other)
    server.load(other)
    assert "those behind layer 2 are" in refused()
    server.root = other  # and says so
    assert "which holds other weights" in refused()
    server.root = tiny_model_dir
    server.load(tiny_model_dir)
    server.layers = [1]
    assert "those behind layer 2 are" in refused()
    server.layers = [2]
    server.fails = lambda number: 404
    assert "HTTP 404" in refused()
    server.fails = lambda number: 0
    assert train("run", url, *LONG, "max_steps=4") == 0
    server.dtype = torch.bfloat16
    assert "bfloat16, expected torch.float32 (model.dtype)" in refused("resume=auto")
    server.dtype = torch.float32
    assert "features.endpoint was True, is False" in refused(
        "features.endpoint=", "features.dir=", "resume=auto"
    )
    # in its place, while the run goes on
    before = server.asked

    def swap(number: int) -> int:
        if number == before + 20:
            server.model = make_tiny_llama(seed=3).eval()
        return 0

    server.fails = swap
    error = refused("resume=auto", "checkpoint.every=100")
    assert "those behind layer 2 are" in error and "is saved" in error


def test_no_other_file_is_deleted(
    tmp_path: Path, server: StatesServer, train: Callable[..., int],
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A server could name any file of the user's."""
    mine = tmp_path / "model.safetensors"
    mine.write_bytes(b"precious")
    monkeypatch.setattr(server, "write", lambda *_, **__: mine)
    assert train("run", f"features.endpoint={server.url}") == 1
    assert "no file of hidden states" in capsys.readouterr().err
    assert mine.read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("features.endpoint=localhost:8000",), "features.endpoint must be like http://"),
        (("features.endpoint=http://h/v1", "+recipe=medusa2"), "of a frozen base"),
        (("features.endpoint=http://h/v1", "+recipe=distill"), "keeps hidden states for heads"),
    ],
)
def test_settings_that_cannot_be(
    words: tuple[str, ...], message: str, train: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A wrong combination should cost a line, not a wait for a server."""
    assert train("run", *words) == 2
    assert message in capsys.readouterr().err
