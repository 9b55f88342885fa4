"""A user's own file of settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specheads.config import ConfigError, TrainConfig
from specheads.config.compose import composed
from specheads.config.main import tidy_arguments
from specheads.config.own import hydra_word, with_own_file
from tests.end_to_end.commands import start

WORDS = st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=12)


def written(folder: Path, text: str) -> str:
    """Write a file; return the word that names it."""
    path = folder / "my.yaml"
    path.write_text(text, encoding="utf-8")
    return f"config={path}"


def test_a_file_says_what_a_command_line_does(tmp_path: Path) -> None:
    """A value that is read as another type, or not at all, trains something else for hours."""
    word = written(
        tmp_path,
        "recipe: block\nmodel: ./my-model\nsteps: 7\noptim: {lr: 1e-3}\nheads.num_heads: 3\n"
        "heads: {options: {anchors: 9}}\nfeatures.dir: ''\ndata: {packages: [a, b c]}\nseed: 5\n",
    )
    words = tidy_arguments(with_own_file([word, "seed=6"]))
    cfg = composed("train", TrainConfig, [*words, "run_dir=x"])
    assert (cfg.model.name, cfg.steps, cfg.optim.lr) == ("./my-model", 7, 1e-3)
    assert (cfg.heads.kind, cfg.heads.num_heads, cfg.heads.options["anchors"]) == ("block", 3, 9)
    assert (cfg.features.dir, cfg.data.packages, cfg.seed) == ("", ["a", "b c"], 6)


@settings(max_examples=60, deadline=None)
@given(value=st.one_of(WORDS, st.lists(WORDS, max_size=3), st.integers(), st.booleans()))
def test_values_arrive_as_they_are(value: Any) -> None:
    """A path with a comma or a quote that Hydra splits names files that are not there."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_override(f"key={hydra_word(value)}").value()

    def plain(found: Any) -> Any:
        if isinstance(found, list):
            return [plain(each) for each in found]
        return getattr(found, "text", found)

    assert plain(parsed) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("", "holds no settings"),
        ("- a\n- b\n", "holds no settings"),
        ("a: [1\n", "is no YAML"),
        ("steps: ${nope\n", "is no YAML"),
    ],
)
def test_a_file_that_is_none_is_one_line(text: str | None, message: str, tmp_path: Path) -> None:
    """A parser's page of marks does not say which of the files was meant."""
    word = f"config={tmp_path / 'my.yaml'}" if text is None else written(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        with_own_file([word])
    assert "my.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_a_mistyped_key_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A key that nobody reads leaves the default in force."""
    word = written(tmp_path, "recipe: medusa1\noptim.rl: 1e-3\n")
    assert start(monkeypatch, word, f"hydra.run.dir={tmp_path / 'run'}") == 2
    assert "optim.rl" in capfd.readouterr().err


def test_init_writes_a_file_that_trains(
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_jsonl: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The first file that a user has must be one that the next command takes."""
    out = tmp_path / "my.yaml"
    words = "recipe=medusa1", f"model={tiny_model_dir}", f"data={tiny_jsonl}", f"output={out}"
    assert start(monkeypatch, *words, command="init") == 0
    text = out.read_text()
    assert text.count("\n# ") == 10 and "optim.lr: " in text
    assert f"specheads train config={out}" in capfd.readouterr().out
    assert start(monkeypatch, *words, command="init") == 2  # nothing is written over
    assert "is there already" in capfd.readouterr().err
    more = "steps=2", "data.seq_len=64", "dry_run=true", f"hydra.run.dir={tmp_path / 'run'}"
    assert start(monkeypatch, f"config={out}", *more) == 0
    assert "2 steps of" in capfd.readouterr().out
