"""A hub that does not answer is asked once."""

from __future__ import annotations

import socket

import pytest
from huggingface_hub import constants

from specheads.models.names import resolve_name
from specheads.system import hub


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "getproxies", dict)


def test_an_unreachable_hub_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cached base on a machine without a network would load for minutes, file by file."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert resolve_name("nobody/tiny") == "nobody/tiny"
    assert constants.HF_HUB_OFFLINE
    assert capsys.readouterr().err.count("cannot be reached") == 1
    resolve_name("nobody/tiny")
    assert not capsys.readouterr().err


def test_a_hub_that_answers_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new revision would never be seen."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        resolve_name("nobody/tiny")
        assert not constants.HF_HUB_OFFLINE
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hub, "getproxies", lambda: {"https": "http://proxy:3128"})
    resolve_name("nobody/tiny")
    assert not constants.HF_HUB_OFFLINE, "only the proxy can tell"
    resolve_name("tinycode")


def test_a_folder_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model on disk needs no network, nor five seconds to learn that there is none."""

    def connect(*given: object, **more: object) -> None:
        raise AssertionError

    monkeypatch.setattr(socket, "create_connection", connect)
    assert resolve_name("tinycode").endswith("tinycode")
