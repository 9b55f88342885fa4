"""Every mistake ends in one clear line and the right exit code, and damages nothing earlier."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from specheads import train
from specheads.training.checkpoints import checkpoints_of
from tests.end_to_end.commands import SHORT, on_files, start

Start = Callable[..., tuple[int, str]]
ROOT = Path(__file__).resolve().parents[2]
RECIPES = (
    "block", "dflash", "distill", "dspark", "eagle3", "hydra", "medusa1", "medusa2",
    "medusa2_distilled", "mtp", "mtp_finetune", "mtp_sequential", "pretrain",
)  # fmt: skip


@pytest.fixture
def run(
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_jsonl: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Start:
    """Return a function that trains medusa1 with further arguments: exit code, last error line."""

    def started(*arguments: str, recipe: str = "+recipe=medusa1") -> tuple[int, str]:
        files = on_files(tiny_model_dir, tiny_jsonl, tmp_path / "run")
        capfd.readouterr()
        code = start(monkeypatch, recipe, *files, *SHORT, *arguments)
        errors = capfd.readouterr().err.strip().splitlines()
        assert not any("Traceback" in line for line in errors)
        lines = [line for line in errors if line.startswith("specheads: ")]
        assert len(lines) == (code != 0), errors
        return code, lines[-1] if lines else ""

    return started


MEASURED: list[tuple[list[str], str]] = [
    (["tree.choices=[[0],[0,0],[0,0,0]]"], "tree.choices is 3 deep, but there are 2 heads"),
    (["tree.choices=[[0],[1,0]]"], "tree.choices has node (1, 0) without its parent (1,)"),
    (["tree.choices=[[0],[0]]"], "tree.choices has node (0,) twice"),
    (["tree.choices=[[-1]]"], "tree.choices must be paths of ranks from 0 up, got (-1,)"),
    (["tree.choices=[[0],[272]]"], "tree.choices uses rank 272, a head guesses among 272 tokens"),
    (
        ["tree.choices=[[0],[1]]", "tree.choices=[]", "evaluate.max_new_tokens=3"],
        "evaluate.max_new_tokens is 3, which leaves no position to measure a tree of 2 heads at:"
        " expected at least 4, or the tree in tree.choices",
    ),
    (["evaluate.max_new_tokens=1"], "evaluate.max_new_tokens must be at least 2, got 1"),
    (
        ["evaluate.max_new_tokens=512"],
        "no held-out record has a prompt that leaves room for evaluate.max_new_tokens=512",
    ),
    (["evaluate.loss_rows=-1"], "evaluate.loss_rows must be at least 0, got -1"),
]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["optim.lrr=1"], "unknown key optim.lrr; did you mean optim.lr?"),
        (["+optim.lrr=1"], "unknown key optim.lrr; did you mean optim.lr?"),
        (["optm.lr=1"], "unknown key optm"),
        (["optim.lr=abc"], "could not be converted to Float"),
        (["optim.lr=-1"], "optim.lr must be at least 0, got -1.0"),
        (["heads=medusaa"], "Available options in 'heads': block, dflash, dspark, eagle3"),
        (["model=/no/such/folder"], "/no/such/folder: there is no such folder"),
        (["model=tinycod"], "tinycod"),
        (["data.path=/no/such.jsonl"], "/no/such.jsonl"),
        (
            ["data.seq_len=1024"],
            "data.seq_len is 1024, longer than the base model's context of 512",
        ),
        (["resume=/no/such/checkpoint"], "no checkpoint at /no/such/checkpoint"),
        (["loss.base=logits"], "must be one of labels, distill, got 'logits'"),
        (["deepspeed=zero2", "optim=muon"], "needs deepspeed=none, as ZeRO flattens the matrices"),
        *MEASURED,
    ],
)
def test_wrong_settings(run: Start, tmp_path: Path, arguments: list[str], line: str) -> None:
    """Hydra's own answer is up to fifty lines and advises `+key=value`, which trains wrongly.

    A folder that is left behind would be refused when the advice of the line is followed.
    """
    code, error = run(*arguments)
    assert code == 2
    assert line in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("arguments", "line"), MEASURED[::3])
def test_what_is_measured_at_the_end_is_checked_in_a_dry_run(
    run: Start, arguments: list[str], line: str
) -> None:
    """A tree that these heads cannot have was found after the last step, with no way out."""
    code, error = run(*arguments, "dry_run=true")
    assert code == 2 and line in error


def test_a_refused_run_removes_nothing_of_others(run: Start, tmp_path: Path) -> None:
    """What lay in the folder, and an empty folder that somebody made, are not the run's."""
    folder = tmp_path / "run"
    folder.mkdir()
    time.sleep(0.02)  # a file system's clock ticks more slowly than ours
    wrong = ("deepspeed=zero2", "optim=muon")
    assert run(*wrong)[0] == 2
    assert folder.is_dir() and not list(folder.iterdir())
    made = ("tokenizer=bpe", "tokenizer_size=300", "data.growth=[]")
    init = "model.init={model_type: llama, vocab_size: 0, hidden_size: 32, num_hidden_layers: 1}"
    assert run(*wrong, *made, init, recipe="+recipe=pretrain")[0] == 2
    assert folder.is_dir() and not list(folder.iterdir())
    (folder / "notes.txt").write_text("mine")
    (folder / "wandb").mkdir()
    assert run(*wrong, "resume=auto")[0] == 2
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt", "wandb"]
    assert run("max_steps=1")[0] == 0
    before = sorted(path.name for path in folder.iterdir())
    assert run(*wrong, "resume=auto")[0] == 2
    assert sorted(path.name for path in folder.iterdir()) == before


DEVICE_LESS = {
    "generate": ["checkpoint={export}", "prompt=x"],
    "chat": ["checkpoint={export}"],
    "bench": ["checkpoint={export}"],
    "tree_search": ["checkpoint={export}"],
    "compare": ["model={model}", "candidates=[{model}]"],
    "quality": ["checkpoint={export}", "data={records}"],
    "spec_bench": ["checkpoint={export}", "questions={questions}"],
    "regenerate": ["model={model}", "prompts={questions}", "output=answers.jsonl"],
    "export": ["checkpoint={export}", "lm_head=low_rank", "output=out"],
    "doctor": ["model={model}"],
    "train": ["+recipe=medusa1", "model={model}", "hydra.run.dir=run"],
}


@pytest.mark.parametrize("command", DEVICE_LESS)
def test_a_device_that_is_not_there_is_one_line(
    command: str, tiny_export: Path, tiny_model_dir: Path, tiny_jsonl: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Fifty lines of torch, minutes after the start, or the CPU without a word."""
    questions = tmp_path / "questions.jsonl"
    question = {"question_id": 1, "category": "a", "turns": ["x"], "prompt": "x"}
    questions.write_text(json.dumps(question) + "\n")
    places = {"export": tiny_export, "model": tiny_model_dir, "records": tiny_jsonl}
    words = [word.format(**places, questions=questions) for word in DEVICE_LESS[command]]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", _loads)
    assert start(monkeypatch, *words, "device=cuda", command=command) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("specheads: device=cuda, but torch finds no")]
    assert "Traceback" not in "".join(lines) and not (tmp_path / "run" / "LOCK").exists()


def _loads(*arguments: object, **settings: object) -> None:
    pytest.fail("a model was loaded")


def test_a_folder_without_a_model(run: Start, tmp_path: Path) -> None:
    """The first line of what transformers says about it announces a list, which was cut off."""
    empty = tmp_path / "empty"
    empty.mkdir()
    for found in ("nothing", "notes.md"):
        code, error = run(f"model={empty}")
        assert code == 2
        assert f"model.name={empty}: the folder holds no model" in error
        assert "config.json, model.safetensors and tokenizer.json" in error
        assert error.endswith(f"; it holds {found}")
        (empty / "notes.md").write_text("")
    (empty / "config.json").write_text('{"model_type": "llama"}')
    code, error = run(f"model={empty}")
    assert code == 2 and "tokenizer" in error and not error.endswith(":")


def test_columns_of_other_names(run: Start, tmp_path: Path) -> None:
    """Training needs `data.columns`, which the error must name as it is to be written."""
    records = tmp_path / "records.jsonl"
    rows = [{"question": f"what is {i}?", "answer": str(i)} for i in range(40)]
    records.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, error = run(f"data.path={records}")
    assert code == 2
    assert "'data.columns={prompt: question, completion: answer}'" in error
    pasted = error.split("'")[-2]
    assert run(f"data.path={records}", pasted, "dry_run=true")[0] == 0


def test_unknown_recipe_lists_those_there_are(run: Start) -> None:
    """The first thing a user gets wrong."""
    code, error = run(recipe="+recipe=medusa3")
    assert code == 2
    assert ", ".join(RECIPES) in error
    code, error = run(recipe="name=x")
    assert code == 2
    assert f" recipe={'|'.join(RECIPES)}" in error


def test_empty_and_all_masked_data(run: Start, tmp_path: Path) -> None:
    """Nothing to learn from gives NaN, or a model that did not change."""
    records = tmp_path / "records.jsonl"
    records.write_text("")
    code, error = run(f"data.path={records}")
    assert code == 2
    assert "records.jsonl" in error
    questions = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(9)]
    records.write_text("".join(json.dumps(question) + "\n" for question in questions))
    code, error = run(f"data.path={records}")
    assert code == 2
    assert "learn" in error or "mask" in error


def test_tokenizer_of_another_model(run: Start, tmp_path: Path, tiny_model_dir: Path) -> None:
    """Ids beyond the embedding fail deep in a kernel; fewer ids than that train quietly wrong."""
    other = shutil.copytree(tiny_model_dir, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    extra = {**tokenizer["added_tokens"][-1], "id": 300, "content": "<extra>"}
    vocab = tokenizer["model"]["vocab"]
    vocab.update({f"<{i}>": i for i in range(262, 300)})
    tokenizer["added_tokens"].append(extra)
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    code, error = run(f"model={other}")
    assert code == 2
    assert "301" in error and "272" in error


def test_a_used_run_directory_is_refused_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A base of 70 GB loads for minutes; the directory was taken before the first of them."""
    (tmp_path / "metrics.jsonl").write_text("{}\n")

    def loads(name: str) -> object:
        del name
        return lambda cfg: pytest.fail("the recipe ran")

    monkeypatch.setattr(train, "load_recipe", loads)
    assert start(monkeypatch, "+recipe=medusa1", f"hydra.run.dir={tmp_path}") == 2
    assert "holds an earlier run" in capsys.readouterr().err


def test_a_run_directory_is_used_once(run: Start, tmp_path: Path) -> None:
    """A second run into a directory would replace the first one's export."""
    assert run("max_steps=1")[0] == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    code, error = run()
    assert code == 2
    assert "holds an earlier run" in error
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    code, error = run("resume=auto", "optim.lr=0.5")
    assert code == 2
    assert "optim.lr was 0.003, is 0.5" in error


def test_a_file_in_place_of_the_run_directory(run: Start, tmp_path: Path) -> None:
    """Hydra makes the folder before anything of ours looks at it: its error is a traceback."""
    (tmp_path / "run").write_text("mine\n")
    code, error = run()
    assert code == 2
    assert f"run directory {tmp_path / 'run'} cannot be made" in error
    assert (tmp_path / "run").read_text() == "mine\n"


def test_a_full_disk_keeps_the_earlier_checkpoint(run: Start, tmp_path: Path) -> None:
    """The run that dies of a full disk must be resumable once there is room."""
    assert run("max_steps=2")[0] == 0
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        code, error = run("resume=auto")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 1
    assert "disk full" in error
    assert [path.name for path in checkpoints_of(tmp_path / "run")] == ["step-0000002"]
    assert run("resume=auto")[0] == 0


def test_help_is_quick_and_mistakes_reach_the_shell() -> None:
    """Importing torch for `--help` costs seconds at every look."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "specheads.train", "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "hydra" in imported
    assert not imported & {"torch", "transformers", "datasets", "deepspeed", "wandb"}
    assert done.returncode == 0
    assert f"recipe: {', '.join(RECIPES)}" in done.stdout
    done = subprocess.run(
        [sys.executable, "-m", "specheads.cli", "train", "+recipe=medusa1", "+optim.lrr=1"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 2
    assert done.stderr == "specheads: unknown key optim.lrr; did you mean optim.lr?\n"


def test_bad_records_are_counted_and_kept_aside(
    run: Start, tmp_path: Path, tiny_jsonl: Path
) -> None:
    """A record that vanishes without a word is a data set smaller than the user believes."""
    records = tmp_path / "mixed.jsonl"
    bad = json.dumps({"id": "odd", "conversations": [{"from": "gpt", "value": "a"}] * 2}) + "\n"
    records.write_text(tiny_jsonl.read_text() + bad + "{not json\n")
    code, error = run(f"data.path={records}", "data.max_bad_fraction=0.01")
    assert code != 0
    assert "2 of 34 records cannot be used" in error
    assert run(f"data.path={records}", "data.max_bad_fraction=0.1", "max_steps=1")[0] == 0
    lines = (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()
    assert len(lines) == 2 and all(json.loads(line)["reason"] for line in lines)
