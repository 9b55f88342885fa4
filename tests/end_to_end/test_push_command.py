"""``specheads.export push=``: asked before anything is written, and nothing lost where it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from specheads.config import ConfigError, ExportConfig, RunError
from specheads.export import run
from specheads.models.checkpoint import load_export

GOLDEN = Path(__file__).parents[1] / "golden" / "export"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand in for the hub: what it refuses is put under the call's name, what it got stands there.

    Keys: ``refuse``, the name of a call that fails; ``files``, what was uploaded.
    """
    state: dict[str, Any] = {"refuse": "", "files": None, "asked": []}

    class Api:
        def __getattr__(self, name: str) -> Any:
            def called(*args: Any, **values: Any) -> None:
                state["asked"].append(name)
                if name == state["refuse"]:
                    raise ConnectionError("no route to host")
                if name == "upload_folder":
                    folder = Path(values["folder_path"])
                    state["files"] = {p.name for p in folder.rglob("*") if p.is_file()}

            return called

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    return state


def settings(tmp_path: Path, **more: Any) -> ExportConfig:
    """Return the settings of an export of the golden one."""
    values = {"dtype": "bfloat16", "push": "org/name", **more}
    return ExportConfig(checkpoint=str(GOLDEN), output=str(tmp_path / "out"), **values)


@pytest.mark.parametrize("wrong", [{"push": "name"}, {"refuse": "whoami"}])
def test_a_wrong_name_or_login_is_found_before_anything_is_written(
    wrong: dict[str, str], hub: dict[str, Any], tmp_path: Path
) -> None:
    """Hours of merging and writing would end with a typing mistake."""
    hub["refuse"] = wrong.get("refuse", "")
    with pytest.raises(ConfigError, match=r"^push(=| is)"):
        run(settings(tmp_path, push=wrong.get("push", "org/name")))
    assert not list(tmp_path.iterdir())


def test_a_folder_outlives_an_upload_that_fails(hub: dict[str, Any], tmp_path: Path) -> None:
    """What took hours to write must not be gone because a network was."""
    hub["refuse"] = "upload_folder"
    with pytest.raises(RunError, match=r"out is written, but was not uploaded to org/name"):
        run(settings(tmp_path))
    load_export(tmp_path / "out")


def test_the_whole_folder_is_uploaded_with_its_card(
    hub: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An export without its manifest or tokenizer cannot be loaded by anybody else."""
    run(settings(tmp_path))
    out = tmp_path / "out"
    assert hub["asked"] == ["whoami", "create_repo", "upload_folder"]
    assert hub["files"] == {path.name for path in out.rglob("*") if path.is_file()}
    assert {"README.md", "manifest.json", "config.json", "model.safetensors"} <= hub["files"]
    assert "uploaded to https://huggingface.co/org/name" in capsys.readouterr().out
    assert "hf download org/name" in (out / "README.md").read_text()
