"""The table of ways to train heads: fair by construction, and scored by what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from specheads.config import TrainConfig, register_schemas, to_config
from specheads.measure.clock import Decoded, Prompt
from tests.scripts import load_script

bench: Any = load_script("bench_medusa")
typical: Any = load_script("bench_typical")


def compose(*overrides: str) -> TrainConfig:
    """Compose what a run of the table is started with."""
    import hydra

    from specheads.system.files import conf_dir

    register_schemas()
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        composed = hydra.compose("train", overrides=[*overrides, "run_dir=unused"])
    return to_config(composed, TrainConfig)


def test_all_arms_get_the_same(tmp_path: Path) -> None:
    """An arm with more tokens, nodes or tuning runs wins for that reason."""
    answers = tmp_path / "own.jsonl"
    answers.write_text("")
    arms = bench.arms(answers)
    assert len({len(arm.rates) for arm in arms}) == 1
    settings = [
        compose(*bench.overrides(tmp_path, arm), *arm.rates[0], *bench.COMMON) for arm in arms
    ]
    for cfg in settings:
        assert (cfg.data.rows, cfg.data.seq_len, cfg.optim.accumulation) == (8, 512, 1)
        assert (cfg.heads.num_heads, cfg.tree.num_nodes) == (bench.NUM_HEADS, bench.NUM_NODES)
        assert (cfg.optim.name, cfg.optim.schedule) == ("muon", "wsd")
        assert cfg.data.source != "pycode" or cfg.data.documents == 0
    kinds = {arm.name: cfg for arm, cfg in zip(arms, settings, strict=True)}
    assert kinds["hydra"].heads.condition and kinds["markov"].heads.correction == "markov"
    assert kinds["self_distilled"].loss.base == "distill"
    assert kinds["regenerated"].data.path == str(answers)


def test_tuning_keeps_to_the_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The largest rate gives the best heads and the worst base; it must not be chosen for that."""
    heads = {f"head_{i}/loss": 1.0 for i in range(bench.NUM_HEADS)}
    found = {
        "tune0": {**heads, "loss": 1.0, "original_loss": 1.0, "kl": 0.001},
        "tune1": {**heads, "head_0/loss": 0.8, "loss": 1.005, "original_loss": 1.0, "kl": 0.02},
        "tune2": {**heads, "head_0/loss": 0.1, "loss": 1.2, "original_loss": 1.0, "kl": 0.2},
    }

    def train(run: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
        return {"training": {"heldout": found["tune" + run.name.split("-")[1]]}}

    monkeypatch.setattr(bench, "train", train)
    for limit, best in (("", 2), ("loss", 1), ("kl", 0)):
        arm = bench.Arm("x", (), (("a=0",), ("a=1",), ("a=2",)), limit)
        rates, tried = bench.tune(tmp_path, arm)
        assert rates == (f"a={best}",) and len(tried) == 3


def test_speeds_of_stages_add_up_as_times() -> None:
    """The mean of a fast short stage and a slow long one is a speed that no run ever has."""
    seconds = 0.2 * 500 / 20 + 0.8 * 500 / 5
    speed = bench.whole_run([20.0, 5.0], ["optim.lr=1", "warmup_heads=0.2"])
    assert speed == pytest.approx(500 / seconds)
    assert bench.whole_run([20.0], ["optim.lr=1"]) == 20


def test_likelihood_and_entropy_by_the_definition(tiny_llama: LlamaForCausalLM) -> None:
    """Scored one position off, every text looks as unlikely as noise."""
    prompt = Prompt("p", "k", torch.tensor([[5, 9, 2]]))
    texts = [Decoded([7, 11, 3], [3], True)]
    found = typical.distance(tiny_llama, [prompt], texts, 0.7)
    ids, nats, entropy, others = [5, 9, 2], 0.0, 0.0, 0
    for token in texts[0].tokens:
        with torch.no_grad():
            logits = tiny_llama(input_ids=torch.tensor([ids])).logits[0, -1]
        p = (logits / 0.7).softmax(-1)
        nats -= float(p[token].log())
        entropy -= float((p * p.log()).sum())
        others += int(logits.argmax()) != token
        ids.append(token)
    expected = {"nats": nats / 3, "entropy": entropy / 3, "not_best": others / 3}
    assert found == pytest.approx(expected, rel=1e-5)
