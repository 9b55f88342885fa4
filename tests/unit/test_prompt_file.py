"""Which prompts a command decodes where none are given."""

import json
from pathlib import Path

import pytest

from specheads.measure.clock import prompt_file
from specheads.system.files import tinycode_dir


def export(folder: Path, base: str) -> Path:
    """Write the part of an export that is looked at."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"base": {"name": base}}))
    return folder


def test_own_prompts_come_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts of the wrong file give a good-looking table about something else."""
    folder = export(tmp_path / "export", "/a/model")
    assert prompt_file("mine.jsonl", str(folder), "prompts.jsonl") == Path("mine.jsonl")
    (folder / "prompts.jsonl").write_text("")
    assert prompt_file("", str(folder), "prompts.jsonl") == folder / "prompts.jsonl"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("base", ["/a/model", "", "org/name"])
def test_another_base_is_told_of_the_embedded_prompts(
    base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tree fitted to Python questions, for a model of anything else, is no better than none."""
    folder = export(tmp_path / "run" / "export", base)
    assert prompt_file("", str(folder), "calibration.jsonl").parent == tinycode_dir()
    said = capsys.readouterr().err
    assert "about Python" in said and said.count("\n") == 1 and "run/prompts.jsonl" not in said
    (tmp_path / "run" / "prompts.jsonl").write_text("")
    prompt_file("", str(folder), "calibration.jsonl")
    assert "run/prompts.jsonl" in capsys.readouterr().err


def test_the_embedded_base_is_told_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hint that always comes is read by nobody."""
    prompt_file("", "tinycode", "prompts.jsonl")
    prompt_file("", str(export(tmp_path / "export", "tinycode")), "prompts.jsonl")
    assert capsys.readouterr() == ("", "")
