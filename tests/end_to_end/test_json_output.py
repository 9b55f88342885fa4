"""Every command's ``json=true``, on a tiny model: what scripts read."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specheads import bench, compare, doctor, generate, preview, regenerate, tree_search
from specheads.config import (
    BenchConfig,
    CompareConfig,
    DataConfig,
    DoctorConfig,
    GenerateConfig,
    PreviewConfig,
    RegenerateConfig,
    TreeSearchConfig,
)
from specheads.config.main import answering

GOLDEN = Path(__file__).parents[1] / "golden" / "export"
Capture = pytest.CaptureFixture[str]


def asked(run: Callable[[Any], None], config: object) -> None:
    """Run a command as its entry point does."""
    with answering(config):
        run(config)


def answered(capsys: Capture) -> tuple[dict[str, Any], str]:
    """Return the one object on standard output, and what is on standard error."""
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 and out.endswith("\n"), out[:300]
    found = json.loads(out, parse_constant=pytest.fail)
    assert isinstance(found, dict)
    return found, err


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """Return a copy of the golden export, which tree_search may change."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "export"))


def test_generate(capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Text that goes to both streams, or figures that are not those of the text."""
    given = {"checkpoint": str(GOLDEN), "prompt": "def f(x):", "max_new_tokens": 24}
    asked(generate.run, GenerateConfig(**given))  # type: ignore[arg-type]
    text = capsys.readouterr().out
    asked(generate.run, GenerateConfig(**given, json=True))  # type: ignore[arg-type]
    found, err = answered(capsys)
    assert found["text"] + "\n" == text and text in err
    assert len(found["new_tokens"]) == 24 == 1 + sum(found["accept_lengths"])
    assert found["num_steps"] == len(found["accept_lengths"])
    path = tmp_path / "two.jsonl"
    path.write_text('{"id": "a", "prompt": "def f(x):", "completion": ""}\n{"text": "x"}\n')
    asked(generate.run, GenerateConfig(str(GOLDEN), prompts=str(path), max_new_tokens=8, json=True))
    found, _ = answered(capsys)
    assert [row["id"] for row in found["rows"]] == ["a", "two.jsonl:2"]
    assert [len(row["new_tokens"]) for row in found["rows"]] == [8, 8]


def test_preview(capsys: Capture, tmp_path: Path) -> None:
    """A count that a script cannot read is one that nobody checks before a long run."""
    path = tmp_path / "data.jsonl"
    lines = [f'{{"prompt": "{i}", "completion": "b"}}' for i in range(30)] + ["{broken"]
    path.write_text("\n".join(lines))
    data = DataConfig(source="jsonl", path=str(path), seq_len=64, max_bad_fraction=0.5)
    asked(preview.run, PreviewConfig(data=data, json=True))
    found, err = answered(capsys)
    assert found["counts"]["records"] > 20 and 0 < found["full"] <= 1
    (where,) = found["left_out"]
    assert "31" in where and "not JSON" in found["left_out"][where]
    assert "packed:" in err


def test_measuring(capsys: Capture, export: Path, tmp_path: Path) -> None:
    """An object that differs from the file beside it, or that tables stand before."""
    out = tmp_path / "bench.json"
    asked(
        bench.run,
        BenchConfig(
            str(export), num_prompts=2, max_new_tokens=6, temperatures=[0.0], repeats=1,
            threads=1, dtype="float32", out=str(out), json=True,
        ),
    )  # fmt: skip
    found, err = answered(capsys)
    assert found == json.loads(out.read_text()) and "Headline" in err
    asked(
        tree_search.run,
        TreeSearchConfig(
            str(export), num_prompts=4, num_measured=2, max_new_tokens=8, max_nodes=4,
            repeats=1, threads=1, json=True,
        ),
    )  # fmt: skip
    found, err = answered(capsys)
    stored = json.loads((export / "config.json").read_text())["tree"]
    assert found["choices"] == stored["choices"]
    assert found["measured_on"] == stored["measured_on"]
    assert "wrote the static tree" in err


def test_comparing(capsys: Capture, tiny_model_dir: Path, tmp_path: Path) -> None:
    """As above, for draft models."""
    out = tmp_path / "compare.json"
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"text": "def f{i}("}}\n' for i in range(4)))
    asked(
        compare.run,
        CompareConfig(
            model=str(tiny_model_dir), candidates=[str(tiny_model_dir)],
            prompts=str(path), num_prompts=2,
            num_measured=2, max_new_tokens=6, max_tokens=2, repeats=1, threads=1, out=str(out),
            json=True,
        ),
    )  # fmt: skip
    found, _ = answered(capsys)
    assert found == json.loads(out.read_text())


def test_answering(capsys: Capture, tiny_model_dir: Path, tmp_path: Path) -> None:
    """A script that goes on training has to know how many answers are usable."""
    path, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    path.write_text('{"prompt": "a", "completion": ""}\n{"prompt": "b", "completion": ""}\n')
    config = RegenerateConfig(
        model=str(tiny_model_dir), prompts=str(path), output=str(out), max_new_tokens=4,
        keep_truncated=True, threads=1, json=True,
    )  # fmt: skip
    asked(regenerate.run, config)
    found, _ = answered(capsys)
    assert found == {"output": str(out), "done": 2, "done_before": 0, "left": 0, "bad": {}}
    asked(regenerate.run, config)
    assert answered(capsys)[0]["done_before"] == 2


def test_examining(capsys: Capture, tiny_model_dir: Path) -> None:
    """A verdict that can only be read by people."""
    asked(doctor.run, DoctorConfig(model=str(tiny_model_dir), dtype="float32", json=True))
    found, err = answered(capsys)
    assert found["ok"] and not found["wrong"]
    assert found["findings"][-1]["name"] == "verdict" and "verdict" in err


def test_the_key_is_one_of_the_command_line(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra prints to standard output too, where it is not told otherwise."""
    monkeypatch.setattr("sys.stdin", io.StringIO("def f(x):"))
    argv = ["generate", f"checkpoint={GOLDEN}", "max_new_tokens=4", "json=true"]
    monkeypatch.setattr("sys.argv", argv)
    generate.main()
    assert len(answered(capsys)[0]["new_tokens"]) == 4
