"""The preview as a command: what it prints, and the exit codes that scripts look at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.commands import start
from tests.end_to_end.conftest import Program


def test_preview_reads_what_training_reads(
    tiny_model_dir: Path, tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Prevents a command that does not start, and settings that the shell or Hydra takes apart."""
    rows = [{"instruction": f"ask {i}", "input": "", "output": "answer"} for i in range(40)]
    alpaca = tmp_path / "alpaca.json"
    alpaca.write_text(json.dumps(rows))
    turns = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "there"}]
    shared = tmp_path / "shared.jsonl"
    shared.write_text(
        "".join(json.dumps({"id": i, "conversations": turns, "n": i}) + "\n" for i in range(9))
        + json.dumps({"id": "other", "conversations": [{**turns[0], "value": "bye"}, turns[1]]})
    )
    columns = "{user: instruction+input, assistant: output}"
    done = program(
        "preview",
        f"model={tiny_model_dir}",
        "data=mixture",
        f"data.mixture=[{{source: jsonl, path: {alpaca}, columns: {columns}, weight: 3}},"
        f"{{source: jsonl, path: {shared}, weight: 1}}]",
        "data.max_records=8",
        "data.seq_len=64",
        "num_records=8",
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert done.stdout.count("<|assistant|>⟦answer<eos>⟧") >= 1
    assert "[1 of " in done.stdout and "0:alpaca.json[" in done.stdout
    assert "\nmask: " in done.stdout and "\npacked: " in done.stdout
    code = start(
        monkeypatch,
        f"model={tiny_model_dir}",
        "data=jsonl",
        f"data.path={alpaca}",
        "data.columns={prompt:instruction+input,completion:output}",
        "color=always",
        command="preview",
    )
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert "\x1b[38;5;16;48;5;157manswer<eos>\x1b[0m" in shown.out


def test_nothing_to_learn_is_one_line_and_exit_code_1(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Prevents an all-zero mask that a script goes on with."""
    path = tmp_path / "questions.jsonl"
    lines = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(9)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = (f"model={tiny_model_dir}", "data=jsonl", f"data.path={path}")
    assert start(monkeypatch, *given, command="preview") == 1
    error = capsys.readouterr().err
    assert error.startswith("specheads: all labels are masked in ")
    assert f"the chat template of {tiny_model_dir} hides them" in error
    assert error.count("\n") == 1
