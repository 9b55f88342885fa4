"""The first hour of a new user, as scripts/new_user.py performs it."""

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.script_modules import ROOT, load_script

new_user = load_script("new_user")
RECORD, PAGE = ROOT / "benchmarks" / "first_hour.json", ROOT / "docs" / "first_hour.md"


def test_six_short_commands() -> None:
    """Commands grow by a setting at a time until nobody types them any more."""
    assert len(new_user.COMMANDS) == len(new_user.TITLES) <= 6
    assert all(len(command) < 100 for command in new_user.COMMANDS)
    names = [shlex.split(command)[1] for command in new_user.COMMANDS]
    assert {"train", "tree", "bench", "export"} <= set(names)
    assert set(names) == set(new_user.QUICK)


def test_readme_has_these_commands() -> None:
    """From the README alone: what the transcript shows has to stand there, letter by letter."""
    readme = (ROOT / "README.md").read_text()
    missing = [command for command in new_user.COMMANDS if command not in readme]
    assert not missing


def test_page_is_what_was_printed() -> None:
    """A transcript that somebody tidied by hand shows a program that does not exist."""
    record = json.loads(RECORD.read_text())
    assert [each["command"] for each in record["commands"]] == list(new_user.COMMANDS)
    assert all(each["exit"] == 0 and not each["extra"] for each in record["commands"])
    assert PAGE.read_text() == new_user.render(record)
    assert not re.search(r"/(home|root|tmp|work)/", PAGE.read_text())


def test_records_and_kept_ones_are_apart(tmp_path: Path) -> None:
    """A bench on prompts whose answers were learned measures memory."""
    new_user.write_files(tmp_path, 30, 5)
    used, kept = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("my.jsonl", "test.jsonl")
    )
    assert (len(used), len(kept)) == (30, 5)
    assert not {each["prompt"] for each in used} & {each["prompt"] for each in kept}
    for each in used + kept:  # the halves are one function
        question, code = each["prompt"].split("\n", 1)
        assert question == "Write the body of this function."
        tree = ast.parse(code + each["completion"])
        assert isinstance(tree.body[0], ast.FunctionDef)


def test_bars_and_folders_are_left_out(tmp_path: Path) -> None:
    """A progress bar prints itself a hundred times, and a folder of one machine is nobody's."""
    output = f"a\r  10%|#  | 1/9\r 100%|###| 9/9\nwrote {tmp_path}/x.json\n\x1b[32mgreen\x1b[0m\n\n"
    assert new_user.tidy(output, tmp_path) == ["wrote x.json", "green"]
    lines = [str(number) for number in range(50)]
    shown = new_user.shown(lines)
    assert shown[0] == "0" and shown[-1] == "49" and "12 lines" in shown[new_user.SHOWN_HEAD]


@pytest.mark.slow
def test_new_user_gets_there(tmp_path: Path) -> None:
    """Each command works in its own tests; what one leaves, the next has to find."""
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "scripts" / "new_user.py"), "--quick",
            "--folder", str(tmp_path / "here"), "--json", str(tmp_path / "hour.json"),
            "--out", str(tmp_path / "hour.md"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "hour.json").read_text())
    assert [each["exit"] for each in record["commands"]] == [0] * 6
    assert (tmp_path / "here" / "mine-v1" / "config.json").is_file()
    assert (tmp_path / "here" / "bench.json").is_file()
    page = (tmp_path / "hour.md").read_text()
    assert page.count("```sh") == 6 and str(tmp_path) not in page
