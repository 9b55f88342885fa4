"""The table of draft models by loss and data: fair by construction, and whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specheads.config import TrainConfig, register_schemas, to_config
from specheads.config.training import DRAFT_LOSSES
from tests.scripts import load_script

bench: Any = load_script("bench_distill")


def compose(*overrides: str) -> TrainConfig:
    """Compose what a run of the table is started with."""
    import hydra

    from specheads.system.files import conf_dir

    register_schemas()
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        composed = hydra.compose("train", overrides=[*overrides, "run_dir=unused"])
    return to_config(composed, TrainConfig)


def test_all_draft_models_get_the_same() -> None:
    """More tokens, layers or decay on one side win or lose for that reason."""
    options = bench.parse([])
    settings = {arm: compose(*bench.overrides(arm, options)) for arm in bench.arms(options)}
    assert len(settings) == 3 * len(DRAFT_LOSSES)
    like = next(iter(settings.values()))
    for arm, cfg in settings.items():
        assert (cfg.draft.loss, bool(cfg.draft.on_policy)) == (arm.loss, arm.data == "on_policy")
        assert (cfg.data.source == "jsonl") == (arm.data == "regenerated")
        assert (cfg.data.documents > 0) == (arm.data == "documents") <= (arm.loss == "labels")
        assert (cfg.data.rows, cfg.data.seq_len) == (like.data.rows, like.data.seq_len)
        assert (cfg.optim, cfg.loss, cfg.draft.layers) == (like.optim, like.loss, like.draft.layers)
        assert cfg.draft.learn_prompts == like.draft.learn_prompts


def test_the_best_and_the_plain_arm_get_all_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a claim over seeds that one side never had, or a rate tuned on one side only."""
    better = {"labels": 0.5, "forward_kl": 0.6, "tv": 0.7}
    asked = []

    def train(arm: Any, options: Any, rate: str, steps: int, seed: int) -> Path:
        asked.append((arm.name, rate, steps, seed))
        return Path(f"{arm.loss}-{rate}-{steps}")

    def alphas(export: Path, prompts: Path, options: Any) -> dict[str, Any]:
        loss, rate, steps = str(export).split("-")
        alpha = better[loss] + (0.1 if rate == ("2" if steps == "100" else "1") else 0.0)
        return {f"t{t}": {"alpha": alpha} for t in (0, 1)}

    monkeypatch.setattr(bench, "trained", train)
    monkeypatch.setattr(bench, "alphas", alphas)
    out = tmp_path / "table.json"
    losses = ["--losses", *better, "--data", "documents", "corpus"]
    losses += ["--rates", "1", "2", "--tuning-rates", "1", "2"]
    bench.main([*losses, "--runs", str(tmp_path / "runs"), "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    names = ["labels-documents", "labels-corpus", "tv-corpus"]
    short = {(name, rate) for name, rate, steps, _ in asked if steps == 100}
    assert short == {("forward_kl-corpus", rate) for rate in "12"}
    of = {part: [row for row in rows if row["part"] == part] for part in ("table", "claim")}
    assert {row["rate"] for row in of["table"]} == {"2"}
    assert sorted(f"{row['loss']}-{row['data']}" for row in of["table"]) == sorted(
        ["forward_kl-corpus", *names]
    )
    assert [(f"{row['loss']}-{row['data']}", row["rate"], row["seed"]) for row in of["claim"]] == [
        (name, "1", seed) for name in names for seed in range(3)
    ]
    for name in names:  # each at both rates over the whole length
        assert {rate for each, rate, steps, _ in asked if (each, steps) == (name, 300)} == {
            "1",
            "2",
        }


@pytest.mark.slow
def test_a_short_table(tmp_path: Path) -> None:
    """Prevents a script that nobody can run to its end."""
    out = tmp_path / "table.json"
    bench.main(
        f"--steps 2 --tuning-steps 1 --losses labels tv --data corpus --seeds 0 1 --rates 3e-3"
        f" --tuning-rates 3e-3 --num-prompts 2 --max-new-tokens 8 --rows 1 --draft draft.hidden=64"
        f" --runs {tmp_path / 'runs'} --out {out}".split()
    )
    rows = json.loads(out.read_text())["rows"]
    assert [(row["part"], row["loss"], row["data"], row["seed"]) for row in rows] == [
        ("table", "labels", "corpus", 0),
        ("table", "tv", "corpus", 0),
        *(
            ("claim", *arm, seed)
            for arm in (("labels", "documents"), ("labels", "corpus"), ("tv", "corpus"))
            for seed in (0, 1)
        ),
    ]
    assert all(0 < row["t1"]["alpha"] < 1 for row in rows)
