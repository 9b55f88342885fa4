"""``python -m specheads.compare`` on tiny models."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specheads.compare import run
from specheads.config import CompareConfig, ConfigError
from specheads.decoding.exported import load_subject
from specheads.measure.clock import two_sets
from specheads.system import hardware
from tests.conftest import build_byte_tokenizer, build_tiny_llama
from tests.zoo import disturbed

Program = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def candidates(tmp_path: Path) -> list[str]:
    """Return folders of a draft model that agrees with the base often, and of one that does not."""
    folders = []
    for name, noise in (("near", 0.2), ("far", 3.0)):
        model = disturbed(build_tiny_llama(), noise)
        model.save_pretrained(tmp_path / name)
        build_byte_tokenizer().save_pretrained(tmp_path / name)
        folders.append(str(tmp_path / name))
    return folders


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Return a .jsonl of six different prompts of two kinds."""
    path = tmp_path / "questions.jsonl"
    records = [
        {
            "id": f"{kind}-{i}",
            "kind": kind,
            "prompt": f"def {kind}{i}(x):\n    ",
            "completion": "pass",
        }
        for kind in ("body", "edit")
        for i in range(3)
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def settings_of(model: Path, candidates: list[str], prompts: Path, **more: Any) -> CompareConfig:
    """Return settings of a comparison of a second or two."""
    short: dict[str, Any] = {
        "num_prompts": 3,
        "num_measured": 2,
        "max_new_tokens": 12,
        "max_tokens": 3,
        "repeats": 1,
        "dtype": "float32",
        "threads": 1,
        "out": str(prompts.with_name("compare.json")),
    }
    paths = {"model": str(model), "prompts": str(prompts), "candidates": candidates}
    return CompareConfig(**paths | short | more)


def test_compare_predicts_measures_and_recommends(
    tiny_model_dir: Path,
    candidates: list[str],
    questions: Path,
    program: Program,
) -> None:
    """A prediction that was made on the measured prompts is no prediction."""
    out = questions.with_name("compare.json")
    done = program(
        "compare",
        f"model={tiny_model_dir}",
        f"candidates=[{','.join(candidates)}]",
        f"prompts={questions}",
        "num_prompts=3",
        "num_measured=3",
        "max_new_tokens=12",
        "max_tokens=3",
        "repeats=1",
        "dtype=float32",
        "threads=1",
        f"out={out}",
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert {"environment", "settings", "base", "verify_cost", "candidates"} <= result.keys()
    near, far = result["candidates"]
    assert [near["name"], far["name"]] == candidates
    assert 0 < far["alpha"] < near["alpha"] < 1
    assert far["measured"]["accept_length"] < near["measured"]["accept_length"]
    for each in (near, far):
        assert [row["num_tokens"] for row in each["lengths"]] == [1, 2, 3]
        best = max(each["lengths"], key=lambda row: row["predicted"])
        assert each["predicted"] == best and each["num_tokens"] == best["num_tokens"]
        assert each["times_smaller"] == 1
        assert each["c"] is None or each["c"] > 0, "unmeasured where the machine was busy"
        assert each["alpha_ci95"][0] <= each["alpha"] <= each["alpha_ci95"][1]
        assert each["measured"]["num_prompts"] == 3
        assert each["per_kind"].keys() == {"body", "edit"}
        ratio = each["predicted"]["predicted"] / each["measured"]["speedup"]
        assert each["predicted_over_measured"] == pytest.approx(ratio, rel=1e-3)
    # a draft model as large as its base can hardly pay
    assert result["recommended"] in (None, candidates[0])
    assert "recommended: " in done.stdout and "rule of thumb: 5 to 10 times smaller" in done.stdout
    assert candidates[1] in done.stdout
    assert f"1: {result['verify_cost']['1']:.2f}, 2: " in done.stdout


def test_greedy_decoding_is_compared_too(
    tiny_model_dir: Path,
    candidates: list[str],
    questions: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At temperature 0 alpha is the share of equal best tokens, and texts must be plain's.

    Figures of a machine that did other work must not pass for the draft model's.
    """
    config = settings_of(tiny_model_dir, candidates[:1], questions, temperature=0.0)
    shares = iter((0.6, 0.0))  # while steps were clocked, while texts were
    between = hardware.between
    monkeypatch.setattr(
        hardware, "between", lambda a, b: between(a, b) | {"other_share": next(shares)}
    )
    run(config)
    result = json.loads(Path(config.out).read_text())
    assert result["environment"]["contended"] and len(result["environment"]["watched"]) == 2
    busy = "The machine was busy: other processes took 60% of the processors"
    assert result["warnings"][0].startswith(busy)
    out, err = capsys.readouterr()
    assert busy in out
    for part in ("clock steps", f"alpha of {candidates[0]}", "measure"):
        assert f"specheads: {part}: text 0 of 4" in err
    (near,) = result["candidates"]
    assert near["alpha"] == near["best_guess_rate"]
    assert near["measured"]["identical"] == 2 == near["measured"]["num_prompts"]
    assert result["settings"]["sampling"] == "greedy"


def test_an_export_is_a_base_model_too(
    tiny_export: Path, candidates: list[str], questions: Path
) -> None:
    """Prevents a tuned base from being compared with drafts of its original."""
    config = settings_of(tiny_export, candidates[:1], questions, max_new_tokens=6)
    run(config)
    assert json.loads(Path(config.out).read_text())["candidates"]


def test_mistakes_are_named_before_anything_is_measured(
    tiny_model_dir: Path, candidates: list[str], questions: Path, tmp_path: Path
) -> None:
    """Measuring takes minutes; a wrong tokenizer makes every figure of it meaningless."""
    other = tmp_path / "other"
    shutil.copytree(candidates[0], other)
    tokenizer = build_byte_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(other)
    mistakes: list[tuple[list[str], dict[str, Any], str]] = [
        ([str(other)], {}, r"candidates=.*other: its tokenizer is not the base model's"),
        ([], {}, r"candidates must name at least 1 draft model, got \[\]"),
        ([candidates[0]] * 2, {}, "candidates names .*near twice"),
        (["/no/such"], {}, "candidates=/no/such: there is no such folder"),
        (candidates, {"out": "nowhere/compare.json"}, "no folder nowhere"),
        (candidates, {"num_prompts": 6}, "leaves no prompts to measure on beside the 6"),
        (candidates, {"max_new_tokens": 600}, "600.*context is 512"),
    ]
    for folders, more, message in mistakes:
        config = settings_of(tiny_model_dir, folders, questions, **more)
        with pytest.raises(ConfigError, match=message):
            run(config)
    with pytest.raises(ConfigError, match="no value given for model"):
        run(CompareConfig(candidates=candidates))


def test_prompts_are_predicted_on_or_measured_on(
    tiny_model_dir: Path, candidates: list[str], questions: Path, prompt_file: Path
) -> None:
    """A speed-up that is predicted on the measured prompts agrees with itself."""
    subject = load_subject(str(tiny_model_dir))

    def texts(path: Path) -> tuple[list[str], list[str]]:
        config = settings_of(tiny_model_dir, candidates, path, num_prompts=3, num_measured=3)
        found = two_sets(config, config.model, subject.base, subject.tokenizer)
        return tuple(  # type: ignore[return-value]
            [bytes(each.input_ids[0].tolist()).decode() for each in part] for part in found
        )

    first, others = texts(questions)
    assert len(first) == len(others) == 3 and not set(first) & set(others)
    first, others = texts(prompt_file)  # whose two kinds ask the same three questions
    assert len(first) == 3 and others and not set(first) & set(others)
