"""Every recipe runs from command line to export, with losses that are pinned."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specheads import train
from specheads.attention.tree import Tree
from specheads.config import TrainConfig
from specheads.models.checkpoint import load_export
from specheads.models.manifest import read_provenance
from specheads.train import compare_runs
from tests.end_to_end.commands import SHORT, on_files, start

PINNED = {
    "medusa1": [7.79074, 7.49051, 7.66689, 7.50087],
    "medusa2": [7.79074, 7.43832, 10.95992, 10.55338],
    "mtp": [16.80243, 16.60391, 16.14275, 15.71710],
    "mtp_finetune": [7.79074, 7.48793, 7.66915, 7.49747],
    "pretrain": [5.58126, 5.48584, 5.30085, 5.14577],
}
PRETRAIN = (
    "model.init={model_type: llama, vocab_size: 272, hidden_size: 32, intermediate_size: 64,"
    " num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,"
    " max_position_embeddings: 512, pad_token_id: 256, bos_token_id: 257, eos_token_id: 258}",
    "data.growth=[[32, 0.5]]",
    "autocast=none",
)
MTP = ("mtp.num_heads=3", "autocast=none")
OWN = {
    "pretrain": PRETRAIN,
    "mtp": (
        "tokenizer=",
        "model.init={vocab_size: 272, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 4,"
        " num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 512}",
        "data.growth=[[32, 0.5]]",
        *MTP,
    ),
    "mtp_finetune": MTP,
    "medusa1": ("autocast=none", "optim.lr=1e-3"),  # that of a base so narrow is another by rule
}


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl that are training steps."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "train/loss" in row]


@pytest.mark.parametrize("recipe", sorted(PINNED))
def test_four_steps_have_pinned_losses(
    recipe: str,
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_jsonl: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A changed default, order of data or normalisation moves every figure, and fails nothing."""
    run_dir = tmp_path / "run"
    # bfloat16 products round differently on processors without them
    own = OWN.get(recipe, ("autocast=none",))
    arguments = [f"+recipe={recipe}", *on_files(tiny_model_dir, tiny_jsonl, run_dir), *SHORT, *own]
    assert start(monkeypatch, *arguments) == 0
    rows = rows_of(run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["train/loss"] for row in rows] == pytest.approx(PINNED[recipe], rel=1e-4)
    for row in rows:
        assert row["train/grad_norm"] > 0
        assert row["train/tokens_per_second"] > 0
        assert row["train/peak_memory"] > 0
    card = (run_dir / "export" / "README.md").read_text()
    assert f"| recipe | {recipe} |\n| steps | 4 |\n" in card
    if recipe == "pretrain":
        assert {"train/lr/base", "train/lr/base_muon", "train/lm/top5"} <= rows[-1].keys()
        model = AutoModelForCausalLM.from_pretrained(run_dir / "export")
        assert model.dtype == torch.bfloat16
        return
    assert {"train/lr/heads", "train/head_1/loss", "train/head_1/top5"} <= rows[-1].keys()
    export = load_export(run_dir / "export")
    assert export.config["training"]["steps"] == 4
    assert export.config["training"]["recipe"] == recipe
    assert export.tree.to_json() == [[0], [1], [0, 0]]
    assert "At the end of training, on held-out prompts (" in card and "| 0 | 2 |" in card


def test_medusa1_leaves_the_base_alone(
    tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weight decay or a stray gradient would change what decoding reproduces."""
    run_dir = tmp_path / "run"
    files = on_files(tiny_model_dir, tiny_jsonl, run_dir)
    decay = ("optim.weight_decay=0.5", "optim.lr=0.1")
    assert start(monkeypatch, "+recipe=medusa1", *files, *SHORT, *decay) == 0
    export = load_export(run_dir / "export")
    before = load_file(tiny_model_dir / "model.safetensors")
    for name, tensor in export.base.state_dict().items():
        assert torch.equal(before[name], tensor), name
    assert not (run_dir / "export" / "base").exists()
    assert not export.config["base"]["tuned"]


def test_medusa2_trains_heads_first_and_says_how_far_the_base_moved(
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_jsonl: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A tuned base is another model: its distance from the original must be in sight."""
    run_dir = tmp_path / "run"
    files = on_files(tiny_model_dir, tiny_jsonl, run_dir)
    assert start(monkeypatch, "+recipe=medusa2", *files, *SHORT, "warmup_heads=0.5") == 0
    rows = rows_of(run_dir)
    assert [("train/lm/loss" in row, "train/lr/base" in row) for row in rows] == [
        (False, False),
        (False, False),
        (True, True),
        (True, True),
    ]
    heldout = json.loads((run_dir / "export" / "config.json").read_text())["training"]["heldout"]
    assert heldout["kl"] > 0
    assert heldout["loss"] != heldout["original_loss"]
    assert "KL(original || tuned)" in capsys.readouterr().out
    tuned = load_export(run_dir / "export").base.state_dict()
    before = load_file(tiny_model_dir / "model.safetensors")
    assert any(not torch.equal(before[name], tensor) for name, tensor in tuned.items())


def test_the_tree_is_measured_and_evaluation_is_logged(
    tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without choices the export must carry a measured tree, not a default."""
    run_dir = tmp_path / "run"
    files = on_files(tiny_model_dir, tiny_jsonl, run_dir)
    extra = ("tree.choices=[]", "tree.num_nodes=4", "evaluate.every=4")
    assert start(monkeypatch, "+recipe=medusa1", *files, *SHORT, *extra) == 0
    tree = json.loads((run_dir / "export" / "config.json").read_text())["tree"]
    assert len(tree["choices"]) == 3
    assert tree["expected_accept_length"] >= 1
    (row,) = [
        row
        for row in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        if "eval/accept_length" in row
    ]
    assert row["eval/identical"] == 1.0
    assert row["step"] == 4


def test_a_sweep_names_its_runs_and_the_best(
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_jsonl: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Runs called 0 and 1, in one directory, leave it to the user which was which and won."""
    files = on_files(tiny_model_dir, tiny_jsonl, tmp_path)[:-1]
    monkeypatch.chdir(tmp_path)
    sweep = ["recipe=medusa1", "debug=cpu", "name=mine", "optim.lr=1e-3,1e-4", "-m"]
    assert start(monkeypatch, *files, *SHORT[1:], "steps=1", *sweep) == 0
    said = capsys.readouterr().out
    lengths = {}
    for name, lr in (("mine/optim.lr=0.001", 1e-3), ("mine/optim.lr=0.0001", 1e-4)):
        run_dir = tmp_path / "runs" / name
        rows = [*map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())]
        assert rows[0]["train/lr/heads"] == pytest.approx(lr)
        assert f"name: {name}\n" in (run_dir / "config.yaml").read_text()
        assert (run_dir / "export" / "config.json").exists()
        lengths[name] = rows[-1]["final/accept_length/t0"]
    best = max(lengths, key=lambda name: lengths[name])
    assert f"best of 2 runs: {best}, final/accept_length/t0 {lengths[best]:.4f}" in said


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        ([{"final/accept_length/t0": 2.0}, {"final/accept_length/t0": 3.0}], "run1"),
        ([{"heldout/loss": 2.0}, {"heldout/loss": 3.0}], "run0"),
        (
            [
                {"final/accept_length/t1": 9.0, "final/accept_length/t0.7": 1.0, "heldout/loss": 1},
                {"final/accept_length/t1": 1.0, "final/accept_length/t0.7": 2.0, "heldout/loss": 2},
            ],
            "run1",
        ),
        ([{"final/accept_length/t0": 2.0, "heldout/loss": 2.0}, {"heldout/loss": 1.0}], "run1"),
        ([{"heldout/loss": 2.0}], None),
        ([{}, {}], None),
    ],
)
def test_runs_are_compared_by_what_all_report(
    rows: list[dict[str, float]], best: str | None, tmp_path: Path
) -> None:
    """A loss taken for a figure that should be large names the worst run."""
    runs = []
    for i, row in enumerate(rows):
        runs.append(TrainConfig(name=f"run{i}", run_dir=str(tmp_path / str(i))))
        (tmp_path / str(i)).mkdir()
        lines = [json.dumps({"step": 1, **dict.fromkeys(row, 5.0)}), json.dumps({"step": 2, **row})]
        (tmp_path / str(i) / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    said = compare_runs(runs)
    assert (best is None) == (not said)
    if best is not None:
        assert said[-1].startswith(f"best of 2 runs: {best}, ")
        assert said[1].endswith(best) and len(said) == 4


def test_a_dry_run_prints_the_plan_and_leaves_nothing(
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_jsonl: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A dry run that creates the directory makes the real run fail."""
    files = on_files(tiny_model_dir, tiny_jsonl, tmp_path / "run")
    assert start(monkeypatch, "+recipe=medusa2", *files, *SHORT, "dry_run=true") == 0
    assert "4 steps of 128 tokens" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


SILENT = {
    "medusa2": ("tree.choices=[]",),
    "mtp_finetune": ("tree.choices=[]", "mtp.num_heads=3"),
    "distill": (),
}


def words_of(*words: str) -> list[str]:
    """Return settings without those that a later one replaces."""
    return list({word.partition("=")[0]: word for word in words}.values())


@pytest.mark.parametrize("recipe", SILENT)
def test_a_base_whose_answers_end_at_once_still_gives_an_export(
    recipe: str,
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_jsonl: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Training completes, nothing can be measured, and what was trained must not be lost by it."""
    model = shutil.copytree(tiny_model_dir, tmp_path / "silent")
    settings = json.loads((model / "generation_config.json").read_text())
    settings["eos_token_id"] = list(range(272))
    (model / "generation_config.json").write_text(json.dumps(settings))
    words = words_of(*SHORT, "autocast=none", "evaluate.every=2", *SILENT[recipe])
    files = on_files(model, tiny_jsonl, tmp_path / "run")
    assert start(monkeypatch, f"+recipe={recipe}", *files, *words) == 0
    export = tmp_path / "run" / "export"
    (line,) = [x for x in capfd.readouterr().out.splitlines() if x.startswith("not measured: ")]
    assert "the base ends every text with its first token" in line and str(export) in line
    assert "Nothing was measured yet" in (export / "README.md").read_text()
    if recipe == "distill":
        provenance = read_provenance(export)
        assert provenance is not None and provenance["measured"] == {}
        assert provenance["training"]["heldout"]["alpha"] > 0
        return
    loaded = load_export(export)
    assert loaded.tree == Tree.chain(2) and loaded.config["tree"]["measured_on"] is None
    assert 0 <= loaded.config["training"]["heldout"]["head_1/top1"] <= 1


def raises() -> None:
    """Be a defect of ours."""
    raise TypeError("a defect")


def is_stopped() -> None:
    """Be asked to stop by a scheduler."""
    os.kill(os.getpid(), signal.SIGTERM)
    while True:
        pass


@pytest.mark.parametrize(
    ("recipe", "place", "what"),
    [
        ("medusa1", "pipeline.calibrate", is_stopped),
        ("medusa2", "training.heldout._num_valid", raises),
        ("mtp", "formats.card._by_training", raises),
        ("mtp_finetune", "measure.evaluate.Heldout.decode", raises),
        ("distill", "measure.evaluate.clock", is_stopped),
        ("pretrain", "training.heldout._hidden_at_labels", raises),
    ],
)
def test_what_fails_after_training_never_costs_the_export(
    recipe: str,
    place: str,
    what: Callable[[], None],
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_jsonl: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A defect in what only measures, or a signal there, threw days of training away."""
    files = on_files(tiny_model_dir, tiny_jsonl, tmp_path / "run")
    words = words_of(*SHORT, "autocast=none", *OWN.get(recipe, ()))
    fast = ("tree.choices=[]", "tree.num_nodes=4", "evaluate.num_prompts=1")
    arguments = (f"+recipe={recipe}", *files, *words_of(*words, *fast))
    with monkeypatch.context() as patch:
        patch.setattr(f"specheads.{place}", lambda *_, **__: what())
        if what is raises:
            with pytest.raises(TypeError, match="a defect"):
                start(patch, *arguments)
        else:
            assert start(patch, *arguments) == 75
    export = tmp_path / "run" / "export"
    said = f"{export} is whole; what followed it failed: TypeError: a defect; resume=auto"
    assert (said in capfd.readouterr().out) == (what is raises)
    if recipe in ("distill", "pretrain"):
        AutoModelForCausalLM.from_pretrained(export)
        assert recipe == "pretrain" or read_provenance(export)
    else:
        assert load_export(export).tree.num_nodes > 1
    # the rest of it, and with other settings of what is measured
    more = ("resume=auto", "evaluate.max_new_tokens=12", "log.samples=1")
    assert start(monkeypatch, *arguments, *more) == 0
    if recipe.startswith("m"):
        assert load_export(export).config["tree"]["measured_on"]["max_new_tokens"] == 12


def test_one_seed_for_all_generators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe that shuffles by Python's or numpy's generator would differ from run to run."""
    drawn: list[tuple[float, ...]] = []

    def recipe(cfg: object) -> None:
        del cfg
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))

    monkeypatch.setattr(train, "load_recipe", lambda name: recipe)
    for seed in (3, 3, 4):
        words = ("+recipe=medusa1", f"hydra.run.dir={tmp_path / 'run'}", f"seed={seed}")
        assert start(monkeypatch, *words) == 0
    assert drawn[0] == drawn[1]
    assert all(one != other for one, other in zip(drawn[0], drawn[2], strict=True))
