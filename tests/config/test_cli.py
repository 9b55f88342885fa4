"""The console command, and the help of every command behind it."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from specheads import cli
from specheads.config.main import tidy_arguments
from specheads.system import errors
from specheads.system.files import conf_dir
from tests.composed import composed
from tests.processes import ROOT

PROGRAMS = {module.removeprefix("specheads."): name for name, module in cli.COMMANDS.items()}


def called(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Return the exit code of ``specheads <words>``."""
    monkeypatch.setattr(sys, "argv", ["specheads", *words])
    try:
        cli.main()
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


def help_text(program: str) -> str:
    """Return what ``--help`` shows, keys to be filled in left as they are."""
    shown = yaml.safe_load((conf_dir() / f"{program}.yaml").read_text())["hydra"]["help"]
    return "\n".join(shown.get(part, "") for part in ("header", "template", "footer"))


def test_every_command_is_there() -> None:
    """A command that is listed and cannot be imported, or that the list has forgotten."""
    for module in cli.COMMANDS.values():
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None, module
        text = Path(spec.origin).read_text()
        assert "\ndef main() -> None:" in text or "\nmain = entry_point(" in text
    settings = {path.stem for path in conf_dir().glob("*.yaml")}
    assert settings == set(PROGRAMS)
    assert set(cli.ALIASES.values()) <= set(cli.COMMANDS)


def test_usage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Help that fails, or wrong usage that scripts take for success."""
    for words in (["--help"], ["help"], ["-h"]):
        assert called(monkeypatch, *words) == 0
        out, err = capsys.readouterr()
        assert not err and all(f"\n  {name} " in out for name in cli.COMMANDS)
    assert called(monkeypatch) == 2
    assert capsys.readouterr().out == ""
    assert called(monkeypatch, "--version") == 0
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("trian", "did you mean train?"),
        ("tree-serach", "did you mean tree-search?"),
        ("docter", "did you mean doctor?"),
        ("xyzzy", "there are auto, init, plan, train,"),
    ],
)
def test_unknown_commands_get_advice(
    word: str, advice: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped command that answers with a traceback of importlib."""
    assert called(monkeypatch, word) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"specheads: unknown command {word!r}; {advice}")
    assert err.count("\n") == 1


def test_arguments_reach_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents an alias, or help, that loses what stands behind it."""
    seen: list[list[str]] = []

    class Module:
        @staticmethod
        def main() -> None:
            seen.append(list(sys.argv))

    asked: list[str] = []
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: asked.append(name) or Module)
    for words in (["tree", "checkpoint=x"], ["tree-search", "checkpoint=x"], ["help", "tree"]):
        assert called(monkeypatch, *words) == 0
    assert asked == ["specheads.tree_search"] * 3
    assert seen == [["specheads tree", "checkpoint=x"]] * 2 + [["specheads tree", "--help"]]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("checkpoint = x", "checkpoint =: write checkpoint=x, without blanks around ="),
        ("checkpoint =x", "checkpoint =x: write checkpoint=x, without"),
        ("checkpoint= x", "checkpoint= x: write checkpoint=x, without"),
        ("seed=1 x", "'x' is no setting; settings are written key=value, and a value with blanks"),
        (
            "--checkpoint x",
            "--checkpoint is no option; settings have no dashes: write checkpoint=x",
        ),
        ("--max-new-tokens=5", "settings have no dashes: write max_new_tokens=5"),
        ("-recipe", "settings have no dashes: write recipe=<value>"),
        ("checkpoint=a(b", "quoted for the shell and for Hydra: \"checkpoint='a(b'\""),
        ("checkpoint=x model=gpt2", "unknown key model; did you mean checkpoint?"),
        ("checkpoint=x model=/a/b", "unknown key model; did you mean checkpoint?"),
    ],
)
def test_words_that_are_no_settings(
    words: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hydra's grammar, or argparse's usage, in answer to a blank too many."""
    assert called(monkeypatch, "generate", *words.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith("specheads: ") and err.count("\n") == 1 and line in err


def test_flags_may_stand_anywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Settings behind a flag are unknown arguments to argparse, which prints its usage."""
    given = ["seed=1", "--cfg", "job", "steps=2", "--info", "-cn=other", "~data.path"]
    flags = ["--cfg", "job", "--info", "-cn", "other"]
    assert tidy_arguments(given) == [*flags, "seed=1", "steps=2", "~data.path"]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("name: /x\n")
    for place in (["--config-dir", str(tmp_path)], [f"--config-dir={tmp_path}"]):
        assert tidy_arguments(["model=mine", *place])[-1] == "model=mine"
    assert tidy_arguments(["recipe=a", "+recipe=b", "debug=cpu", "+debug=cpu"]) == [
        "+recipe=a", "+recipe=b", "+debug=cpu", "+debug=cpu",
    ]  # fmt: skip


def examples(program: str) -> list[list[str]]:
    """Return the examples that a command's help shows, split into words."""
    _, _, after = help_text(program).partition("Examples:\n")
    lines = after.partition("\n\n")[0].replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines]


@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_help_shows_examples_that_compose(program: str) -> None:
    """An example in the help is what people paste first, and nobody reads again."""
    found = examples(program)
    assert len(found) >= 2, "no examples"
    for words in found:
        if "|" in words:
            words = words[: words.index("|")]
        starts = (["python", "-m", f"specheads.{program}"], ["specheads", PROGRAMS[program]])
        start = next(each for each in starts if words[: len(each)] == each)
        composed(program, words[len(start) :])


def test_exit_codes_are_documented() -> None:
    """A script that takes 75 for a failure throws a resumable run away."""
    assert (errors.EXIT_FAILED, errors.EXIT_USAGE, errors.EXIT_INTERRUPTED) == (1, 2, 75)
    said = "0 done, 1 failed, 2 wrong usage, 75 interrupted and resumable"
    assert said in cli.usage()
    assert said in (ROOT / "docs" / "commands.md").read_text()
