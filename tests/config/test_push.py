"""Uploads, against a hub that is made up here: nothing of this touches a network."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
from huggingface_hub.utils import filter_repo_objects

from specheads.config import ConfigError, RunError
from specheads.formats import write

CLIENT = huggingface_hub.HfApi  # the real one, for the names of its arguments


class TransportError(Exception):
    """As the network library below the hub's client calls it, with no base of ours."""


TransportError.__module__ = "httpx2._exceptions"


def answered(status: int) -> Exception:
    """Return the error with which the hub's client reports an answer."""
    error = HfHubHTTPError.__new__(HfHubHTTPError)
    Exception.__init__(error, f"{status} Client Error\nRequest ID: secret-looking words")
    vars(error)["response"] = SimpleNamespace(status_code=status)
    return error


class Hub:
    """What is called of HfApi; raises ``error`` at the call named ``at``."""

    def __init__(self, at: str = "", error: Exception | None = None) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.at, self.error = at, error

    def _called(self, name: str, values: dict[str, Any]) -> None:
        inspect.signature(getattr(CLIENT, name)).bind(None, **values)
        self.calls.append((name, values))
        if name == self.at and self.error is not None:
            raise self.error

    def whoami(self, **values: Any) -> dict[str, str]:
        """Say who asks."""
        self._called("whoami", values)
        return {"name": "someone"}

    def create_repo(self, repo_id: str, **values: Any) -> None:
        """Make a repository."""
        self._called("create_repo", {"repo_id": repo_id, **values})

    def upload_folder(self, **values: Any) -> None:
        """Take a folder."""
        self._called("upload_folder", values)


@pytest.fixture
def use_hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a hub of ours in the place of HfApi."""

    def use(hub: Hub) -> Hub:
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
        return hub

    return use


@pytest.mark.parametrize(
    "name", ["name", "a/b/c", "/b", "a/", "a b/c", "a/../b", "a/b--c", "a/b.git", "a/" + "b" * 99]
)
def test_names_that_the_hub_refuses_are_found_before_anything_is_asked(
    name: str, use_hub: Any
) -> None:
    """A wrong name would be found out after hours of writing."""
    hub = use_hub(Hub())
    with pytest.raises(ConfigError, match=r"^push is '"):
        write.check_push(name)
    assert not hub.calls


REFUSALS = [
    (LocalTokenNotFoundError("no token"), "nobody is logged in: set HF_TOKEN"),
    (answered(401), "does not accept the token"),
    (answered(403), "needs the write permission"),
    (answered(500), "the hub answered 500"),
    (ConnectionError("[Errno 111]"), "the hub cannot be reached"),
    (TransportError("timed out"), "the hub cannot be reached"),
    (OSError("no such file\nmore"), "no such file"),
]


@pytest.mark.parametrize("error,said", REFUSALS, ids=[each[1][:20] for each in REFUSALS])
def test_refusals_are_one_line(error: Exception, said: str, use_hub: Any, tmp_path: Path) -> None:
    """A traceback of a network library hides that the folder is written, and what to do."""
    use_hub(Hub("whoami", error))
    with pytest.raises(ConfigError, match=said) as found:
        write.check_push("org/name")
    assert "\n" not in str(found.value) and "secret" not in str(found.value)
    use_hub(Hub("upload_folder", error))
    with pytest.raises(RunError, match=said) as failed:
        write.upload(tmp_path, "org/name")
    assert str(failed.value).startswith(f"{tmp_path} is written, but was not uploaded to org/name:")
    assert "\n" not in str(failed.value) and "secret" not in str(failed.value)


def test_errors_of_our_own_are_not_hidden(use_hub: Any, tmp_path: Path) -> None:
    """A mistake in this program that reads like a refusal of the hub would never be found."""
    use_hub(Hub("whoami", AttributeError("ours")))
    with pytest.raises(AttributeError):
        write.check_push("org/name")
    use_hub(Hub("create_repo", AttributeError("ours")))
    with pytest.raises(AttributeError):
        write.upload(tmp_path, "org/name")


@pytest.mark.parametrize("private", [False, True])
def test_what_is_asked_of_the_hub(private: bool, use_hub: Any, tmp_path: Path) -> None:
    """A private repository that is made public cannot be taken back, nor can a token in a call."""
    hub = use_hub(Hub())
    write.check_push("org/name")
    where = write.upload(tmp_path, "org/name", private=private)
    assert where == "https://huggingface.co/org/name"
    names = [name for name, _ in hub.calls]
    assert names == ["whoami", "create_repo", "upload_folder"]
    made, sent = hub.calls[1][1], hub.calls[2][1]
    assert made["repo_id"] == sent["repo_id"] == "org/name"
    assert made["private"] is private and made["exist_ok"] is True
    assert sent["folder_path"] == str(tmp_path)
    names = ["README.md", "base/config.json", ".git/config", "base/.DS_Store", "a.b/c"]
    kept = list(filter_repo_objects(names, ignore_patterns=sent["ignore_patterns"]))
    assert kept == ["README.md", "base/config.json", "a.b/c"]
    assert not any("token" in values for _, values in hub.calls)
