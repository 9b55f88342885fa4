"""The commands of all pages, run: on tiny models, with settings that make seconds of them."""

from __future__ import annotations

import importlib
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from specheads import cli, export
from specheads.attention.tree import default_tree
from specheads.config import ExportConfig
from specheads.models.base import load_base_model, load_tokenizer
from specheads.models.checkpoint import origin, save_export
from specheads.models.draft import save_draft
from specheads.models.heads import MedusaHeads
from specheads.models.mtp import MtpHeads, block_config
from tests.end_to_end.test_readme import FOREIGN, commands

pytestmark = pytest.mark.slow

SHORT = {
    "generate": ["max_new_tokens=4"],
    "chat": ["max_new_tokens=4"],
    "bench": ["num_prompts=2", "max_new_tokens=4", "repeats=1", "batch_sizes=[1,2]"],
    "tree_search": ["num_prompts=2", "num_measured=2", "max_new_tokens=12",
                    "max_nodes=4", "repeats=1"],
    "compare": ["num_prompts=2", "num_measured=2", "max_new_tokens=4", "max_tokens=2", "repeats=1"],
    "regenerate": ["limit=2", "max_new_tokens=4", "keep_truncated=true"],
    "quality": ["max_new_tokens=4"],
    "spec_bench": ["max_new_tokens=4"],
    "train": ["dry_run=true", "hydra.run.dir=out", "data.growth=[]",
              "data.seq_len=512", "data.rows=2", "data.max_records=60",
              "evaluate.num_prompts=2", "evaluate.max_new_tokens=16", "log.wandb=disabled"],
    "doctor": [],
    "export": [],
    "preview": [],
}  # fmt: skip
# what is not here, and cannot be made small
NEEDS = {
    "endpoint=": "a server",
    "push=": "the hub",
    "minutes=60": "an hour; tests/end_to_end/test_auto.py runs it in seconds",
}


def program_and_rest(words: list[str]) -> tuple[str, list[str]]:
    """Return the module's name and its arguments; no name for a command that is not ours."""
    if words[0] == "specheads" and words[1] in cli.COMMANDS:
        return cli.COMMANDS[words[1]].removeprefix("specheads."), words[2:]
    if words[:2] == ["python", "-m"]:
        return words[2].removeprefix("specheads."), words[3:]
    assert words[0] in (*FOREIGN, "make", "pytest", "wandb", "python", "specheads"), words
    return "", []


OURS = [words for words in commands() if program_and_rest(words)[0] and "--help" not in words]


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, tiny_jsonl: Path
) -> Path:
    """Return a folder that holds what the pages' commands name; they work on copies of it."""
    root = tmp_path_factory.mktemp("pages")
    base = load_base_model(str(tiny_model_dir), dtype="float32")
    output = base.get_output_embeddings().weight
    heads = MedusaHeads(3, 1, output.shape[1], output.shape[0])
    with torch.no_grad():
        heads.init_from_output(output)
    for name in ("mine", "mine2", "hydra", "medusa1", "medusa2"):
        save_export(
            root / "runs" / name / "export",
            heads,
            load_tokenizer(str(tiny_model_dir)),
            default_tree(3, 6),
            origin(str(tiny_model_dir), {"recipe": "medusa1", "steps": 1}),
        )
    for name, variant in (
        ("mtp", "parallel"),
        ("mine5", "parallel"),
        ("mtp_sequential", "sequential"),
    ):
        save_export(
            root / "runs" / name / "export",
            MtpHeads(2, block_config(base.config), output.shape[0], variant=variant),
            load_tokenizer(str(tiny_model_dir)),
            default_tree(2, 4),
            origin("", {"recipe": "mtp", "steps": 1}),
            tuned_base=base,
        )
    for name in ("distill", "mine6", "a", "b"):
        save_draft(
            root / "runs" / name / "export",
            base,
            load_tokenizer(str(tiny_model_dir)),
            origin(str(tiny_model_dir), {"recipe": "distill"}) | {"measured": {"alpha": 1.0}},
        )
    lines = [json.loads(line) for line in tiny_jsonl.read_text().splitlines()]
    asked = [line for line in lines if "text" not in line]
    for name in ("my", "answers", "prompts", "questions", "test", "texts", "huge", "heldout"):
        write_lines(root / f"{name}.jsonl", asked)
    write_lines(root / "runs" / "mine" / "prompts.jsonl", asked)
    turns = [
        {"question_id": i, "category": "coding", "turns": [f"def f{i}(x):", "And again."]}
        for i in range(2)
    ]
    write_lines(root / "question.jsonl", turns)
    pairs = [
        {"instruction": line["prompt"], "output": line["completion"]}
        for line in lines
        if "prompt" in line
    ]
    (root / "folder").mkdir()
    Dataset.from_list(pairs).to_parquet(root / "folder" / "part.parquet")
    export.run(
        ExportConfig(
            checkpoint=str(root / "runs" / "mine" / "export"),
            format="fasterdecoding_v1",
            output=str(root / "medusa-vicuna"),
        )
    )
    shutil.copytree(root / "runs" / "mine" / "export", root / "native")
    (root / "prompts.txt").write_text("def add(a, b):\ndef sub(a, b):\n")
    return root


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write a .jsonl."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def here(word: str, model: Path) -> str:
    """Return a word of a page with this machine's places."""
    for place in (
        "/path/to/model.gguf",
        "/path/to/model",
        "/path/to/small",
        "./my-model",
        "lmsys/vicuna-7b-v1.3",
    ):
        word = word.replace(place, str(model))
    word = word.replace("/path/to/medusa", "medusa-vicuna")
    key, _, value = word.partition("=")
    if word == "checkpoint=smollm2":  # fetched by tests/end_to_end/test_real.py alone
        return "checkpoint=runs/mine/export"
    if value in ("tinycode", "smollm2"):
        return f"{key}={model}"
    return {"num_kept=8000": "num_kept=100", "rank=64": "rank=4"}.get(word, word)


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_command_of_a_page_runs(
    words: list[str],
    folder: Path,
    tmp_path: Path,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A command can compose and still ask for what does not go together."""
    program, given = program_and_rest(words)
    for part, what in NEEDS.items():
        if any(part in word for word in given):
            pytest.skip(f"needs {what}")
    shutil.copytree(folder, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    if program == "regenerate":  # goes on where an earlier one stopped
        Path("answers.jsonl").unlink()
    if "output=native" in given:
        shutil.rmtree("native")
    arguments = [here(word, tiny_model_dir) for word in given] + SHORT[program]
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    monkeypatch.setattr(sys, "stdin", io.StringIO("def add(a, b):\n/quit\n"))
    code = 0
    try:
        importlib.import_module(f"specheads.{program}").main()
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    assert code == 0, capsys.readouterr().err
