"""``python -m specheads.generate`` on a tiny model."""

import io
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specheads.config import ConfigError, DecodeConfig, GenerateConfig
from specheads.config.main import answering, take_literals
from specheads.generate import run
from specheads.system.terminal import harmless
from tests.end_to_end.commands import start

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
        "generate", f"checkpoint={tiny_export}", "prompt=x", f"prompt={AWKWARD}",
        "max_new_tokens=24",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr  # of two prompts the last one counts, as of any key
    assert "tokens per step" in done.stderr
    expected = text_of(capsys, checkpoint=str(tiny_export), prompt=AWKWARD)
    assert done.stdout == expected
    assert expected != text_of(capsys, checkpoint=str(tiny_export), prompt=AWKWARD[:-1])


def test_literal_argument() -> None:
    """A prompt that Hydra reads loses its brackets, or ends the program; a stop text likewise."""
    argv = ["stop=\n\n", "seed=1", "-x", "stop=[a,b]=c"]
    assert take_literals(argv, "stop") == (["seed=1", "-x"], ["\n\n", "[a,b]=c"])
    assert take_literals(["prompt=\udcff"], "prompt") == ([], ["\ufffd"])


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


def test_a_lossy_rule_says_how_far_it_was(
    tiny_export: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prevents a text of another distribution that looks like the base's."""
    given: dict[str, Any] = {
        "checkpoint": str(tiny_export),
        "prompt": "def f(x):",
        "temperature": 1.0,
    }
    for drafter, said in (
        ("heads", "of the tokens are not the base's draws"),
        ("suffix", "KL in nats"),
    ):
        decode = DecodeConfig(drafter=drafter, acceptance="lossy_kl", bound=0.05)
        run(GenerateConfig(**given, max_new_tokens=24, decode=decode))
        told = capsys.readouterr().err
        assert "lossy_kl, bound 0.05: " in told and said in told


class Screen(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


@pytest.mark.parametrize("batch", [False, True])
def test_a_file_gets_the_text_and_a_terminal_its_escapes(
    tiny_export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Random bytes hold control characters: a terminal obeys them, a file must have them."""
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"text": "def"}) + "\n")
    given = {"prompts": str(file)} if batch else {"prompt": "def", "raw": True}
    settings = {**given, "checkpoint": str(tiny_export), "temperature": 1.5, "max_new_tokens": 200}
    with answering(config := GenerateConfig(**settings, json=True)):
        run(config)
    answer = json.loads(capsys.readouterr().out)
    text = answer["rows"][0]["text"] if batch else answer["text"]
    assert harmless(text) != text
    run(GenerateConfig(**settings))
    exact = capsys.readouterr().out
    assert (json.loads(exact)["text"] if batch else exact.removesuffix("\n")) == text
    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)
    run(GenerateConfig(**settings, color="never"))
    shown = screen.getvalue()
    assert shown == harmless(exact)
    assert not batch or json.loads(shown) == json.loads(exact)


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


def test_bad_usage_is_one_line(
    tiny_export: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A traceback hides which word was mistyped."""
    given = (f"checkpoint={tiny_export}", "prompt=x", "max_new_tokns=3")
    assert start(monkeypatch, *given, command="generate") == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1 and "max_new_tokns" in error


SETTINGS: list[dict[str, object]] = [
    {"repetition_penalty": 1.5},
    {"no_repeat_ngram_size": 1},
    {"temperature": 0.9, "top_k": 3},
    {"temperature": 0.9, "top_p": 0.3},
    {"temperature": 0.9, "min_p": 0.3},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_settings_reach_the_text(
    tiny_export: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, object]
) -> None:
    """A setting that is read and then forgotten looks like one that has little effect."""
    given = {"checkpoint": str(tiny_export), "prompt": "def f(x):", "seed": 3}
    without = text_of(capsys, **given, temperature=settings.get("temperature", 0.0))
    tree = text_of(capsys, **given, **settings)
    assert tree == text_of(capsys, **given, **settings, plain=True)
    assert tree != without


def test_text_stops_behind_a_string(
    tiny_export: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stop strings are full of what Hydra reads: line breaks, quotes, brackets."""
    given = {"checkpoint": str(tiny_export), "prompt": "def f(x):", "temperature": 1.0, "seed": 5}
    whole = text_of(capsys, **given).removesuffix("\n")
    stop = next(c for c in whole[4:] if c not in whole[:4] and c != "\ufffd")
    expected = whole[: whole.index(stop) + 1] + "\n"
    assert text_of(capsys, **given, stop=["no such", stop]) == expected
    assert text_of(capsys, **given, stop=[stop], plain=True) == expected
    words = [f"{key}={value}" for key, value in given.items()]
    words += ["max_new_tokens=24", "stop=[${", f"stop={stop}"]
    assert start(monkeypatch, *words, command="generate") == 0
    assert capsys.readouterr().out == expected


def test_prompts_are_decoded_in_batches(
    tiny_export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt's text must not depend on its neighbours, on padding or on the batch size."""
    texts = ["def f(x):", "x", "for i in range(10):\n", "y" * 495, "import os"]
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"id": t[:5], "text": t}) + "\n" for t in texts))
    for more in ({}, {"temperature": 0.9, "repetition_penalty": 1.2, "stop": ["e"]}):
        alone = [
            text_of(capsys, checkpoint=str(tiny_export), prompt=t, raw=True, seed=7 + i, **more)
            for i, t in enumerate(texts)
        ]
        for batch_size in (1, 2, 8):
            capsys.readouterr()
            settings = {"prompts": str(path), "batch_size": batch_size, "seed": 7, **more}
            run(GenerateConfig(str(tiny_export), max_new_tokens=24, **settings))  # type: ignore
            out, err = capsys.readouterr()
            lines = [json.loads(line) for line in out.splitlines()]
            assert [line["id"] for line in lines] == [t[:5] for t in texts]
            assert [line["text"] + "\n" for line in lines] == alone
            assert f"for 5 prompts in batches of up to {batch_size}" in err
            assert lines[3]["num_tokens"] <= 512 - 495 and not lines[3]["finished"]


def test_base_model_that_was_moved(
    tiny_export: Path, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An export on another machine finds its base model only where it is told to look."""
    given = {"checkpoint": str(tiny_export), "prompt": "def f(x):"}
    before = text_of(capsys, **given)
    moved = tmp_path / "moved"
    shutil.move(tiny_model_dir, moved)
    try:
        with pytest.raises(ConfigError, match="needs its base model"):
            text_of(capsys, **given)
        assert text_of(capsys, **given, base=str(moved)) == before
    finally:
        shutil.move(moved, tiny_model_dir)  # other tests need it


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_p": 2.0}, r"min_p must be in \[0, 1\], got 2.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be more than 0"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size must be at least 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"prompt": "a", "prompts": "b"}, "prompts must be left out with prompt"),
        ({"stop": [""]}, "stop must be strings that are not empty"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], message: str) -> None:
    """Transformers would say it in words of its own, after loading."""
    with pytest.raises(ConfigError, match=message):
        GenerateConfig("x", **settings)  # type: ignore[arg-type]


def test_a_spread_base_writes_the_same(
    tiny_export: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prevents a setting that moves the base model away from its heads and its input."""
    settings = {"checkpoint": str(tiny_export), "prompt": "def f(x):"}
    assert text_of(capsys, **settings, device_map="auto") == text_of(capsys, **settings)
    with pytest.raises(ConfigError, match="device_map must be empty or one of auto"):
        GenerateConfig(checkpoint="x", device_map="gpu")
