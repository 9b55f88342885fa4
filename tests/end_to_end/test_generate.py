"""``python -m specheads.generate`` on a tiny model."""

import io
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from specheads.config import ConfigError, GenerateConfig
from specheads.generate import run, take_literal

Program = Callable[..., subprocess.CompletedProcess[str]]
AWKWARD = "def f(a, \"b\", [c], ${d}, k=1):\n    x = 'é' \\"


def text_of(capsys: pytest.CaptureFixture[str], **settings: object) -> str:
    """Return what generate prints to standard output with these settings."""
    capsys.readouterr()
    run(GenerateConfig(max_new_tokens=24, **settings))  # type: ignore[arg-type]
    return capsys.readouterr().out


def test_prompt_survives_the_command_line(
    tiny_export: Path, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hydra reads quotes, commas, brackets and ``$`` in values: the prompt would arrive changed."""
    done = program(
        "generate", f"checkpoint={tiny_export}", f"prompt={AWKWARD}", "max_new_tokens=24"
    )
    assert done.returncode == 0, done.stderr
    assert "tokens per step" in done.stderr
    expected = text_of(capsys, checkpoint=str(tiny_export), prompt=AWKWARD)
    assert done.stdout == expected
    assert expected != text_of(capsys, checkpoint=str(tiny_export), prompt=AWKWARD[:-1])


def test_literal_argument() -> None:
    """The last value wins as everywhere on a command line; other arguments keep their order."""
    argv = ["seed=1", "prompt=a=b", "-x", "prompt=c,d"]
    assert take_literal(argv, "prompt") == (["seed=1", "-x"], "c,d")
    assert take_literal(["seed=1"], "prompt") == (["seed=1"], None)
    assert take_literal(["prompt=\udcff"], "prompt") == ([], "\ufffd")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tree_writes_what_plain_writes(
    tiny_export: Path, capsys: pytest.CaptureFixture[str], temperature: float
) -> None:
    """A demonstration whose two modes disagree would show a different model, not a faster one."""
    settings = {
        "checkpoint": str(tiny_export),
        "prompt": "def f(x):",
        "temperature": temperature,
        "seed": 3,
    }
    tree = text_of(capsys, **settings)
    assert tree == text_of(capsys, **settings, plain=True)
    colored = text_of(capsys, **settings, color="always")
    assert "\x1b[" in colored and "\x1b[" not in tree
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == tree


def test_prompt_from_standard_input(
    tiny_export: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pipes must give the same text as the argument, and silence is no prompt."""
    monkeypatch.setattr("sys.stdin", io.StringIO("def f(x):"))
    piped = text_of(capsys, checkpoint=str(tiny_export))
    assert piped == text_of(capsys, checkpoint=str(tiny_export), prompt="def f(x):")
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    with pytest.raises(ConfigError, match="no prompt"):
        text_of(capsys, checkpoint=str(tiny_export))


def test_context_is_a_limit(tiny_export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Positions beyond the context give nonsense without an error from the model."""
    run(GenerateConfig(checkpoint=str(tiny_export), prompt="x" * 505, raw=True))
    assert "the context is full" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="600 tokens.* 512"):
        text_of(capsys, checkpoint=str(tiny_export), prompt="x" * 600, raw=True)


def test_bad_usage_is_one_line(tiny_export: Path, program: Program) -> None:
    """A traceback hides which word was mistyped."""
    done = program("generate", f"checkpoint={tiny_export}", "prompt=x", "max_new_tokns=3")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and "max_new_tokns" in done.stderr
