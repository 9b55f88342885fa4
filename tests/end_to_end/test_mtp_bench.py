"""The table of models that predict one token or several: fair by construction."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from specheads.config import TrainConfig, register_schemas, to_config
from specheads.data.tokenizers import byte_tokenizer, complete_init
from specheads.models.base import build_from_init, load_tokenizer
from specheads.models.mtp import MtpHeads, block_config
from tests.end_to_end.commands import start
from tests.scripts import load_script

bench: Any = load_script("bench_mtp")


def compose(*overrides: str) -> TrainConfig:
    """Compose what a run of the table is started with."""
    import hydra

    from specheads.system.files import conf_dir

    register_schemas()
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        composed = hydra.compose("train", overrides=[*overrides, "run_dir=unused"])
    return to_config(composed, TrainConfig)


def test_all_models_get_the_same() -> None:
    """More layers, tokens or weight decay on one side win or lose for that reason."""
    options = bench.parse(["--variants", "parallel", "sequential", "--heads", "4", "8"])
    settings = {
        arm.name: compose(
            *bench.overrides(arm, options),
            *bench.rate_overrides("3e-3"),
            *bench.length_overrides(600, 0),
        )
        for arm in bench.arms(options)
    }
    assert len(settings) == 2 * (1 + 2 * 2)
    for name, cfg in settings.items():
        like = settings[name.partition("-")[0] + "-n1"]
        for part in ("data", "optim", "tokenizer", "tokenizer_size", "autocast", "features"):
            assert getattr(cfg, part) == getattr(like, part), f"{part} of {name}"
        init, likes = (complete_init(c.model.init, byte_tokenizer()) for c in (cfg, like))
        assert init == likes and cfg.optim.lr == cfg.optim.base_lr == 3e-3
        assert cfg.recipe == ("pretrain" if cfg is like else "mtp")
        if cfg is not like:
            assert f"n{cfg.mtp.num_heads}-{cfg.mtp.variant}" in name and cfg.mtp.parity


@pytest.mark.parametrize("variant", ["parallel", "causal"])
def test_the_parameters_are_equal_but_for_a_norm_per_head(variant: str) -> None:
    """Heads with matrices of their own, or on top of all layers, would make the larger model."""
    options = bench.parse(["--layers", "6", "--hidden", "64", "--heads", "4"])
    cfg = compose(*bench.overrides(bench.Arm("byte", 4, variant), options))
    init = {**cfg.model.init, "vocab_size": 320}

    def count(module: torch.nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    whole = build_from_init(init)
    base = build_from_init({**init, "num_hidden_layers": 3})
    heads = MtpHeads(3, block_config(base.config), 320, variant=variant, lm_head=cfg.mtp.lm_head)
    assert count(base) + count(heads) == count(whole) + 3 * 64


def test_the_rate_is_chosen_by_the_next_tokens_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen by another figure than the one in which they are compared, one side is held back."""
    losses = {"1e-3": 1.3, "2e-3": 1.1, "4e-3": 1.2}
    lengths = []

    def trained(arm: Any, options: Any, rate: str, steps: int, seed: int) -> tuple[Path, Any]:
        lengths.append(steps)
        return Path(), {"nats_per_token": losses[rate]}

    monkeypatch.setattr(bench, "trained", trained)
    options = bench.parse(["--rates", *losses, "--tuning-steps", "7"])
    rate, tried = bench.tune(bench.Arm("byte", 1), options)
    assert (rate, lengths) == ("2e-3", [7, 7, 7])
    assert [each["rate"] for each in tried] == list(losses)


def test_loss_per_byte_by_the_definition(
    tiny_llama: LlamaForCausalLM, tiny_model_dir: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Over tokens, or over other texts than the other model's, tokenizers do not compare."""
    messages = [("def ä(x):", "    return x"), ("y" * 400, "too long"), ("def f():", "    pass")]
    records: list[dict[str, Any]] = [
        {
            "id": str(number),
            "kind": "chat",
            "messages": [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": answer},
            ],
        }
        for number, (asked, answer) in enumerate(messages)
    ]
    monkeypatch.setattr(bench, "load_records", lambda data, split: records)
    (tmp_path / "export").symlink_to(tiny_model_dir)
    (tmp_path / "config.yaml").write_text("data: {source: pycode}\n")
    options = SimpleNamespace(num_texts=5, seq_len=100)
    found = bench.heldout_loss(tiny_llama, tmp_path, options)
    tokenizer, nats, tokens, size = load_tokenizer(str(tiny_model_dir)), 0.0, 0, 0
    for record in (records[0], records[2]):
        ids = tokenizer.apply_chat_template(record["messages"], return_dict=False)
        for end in range(1, len(ids)):
            with torch.no_grad():
                logits = tiny_llama(input_ids=torch.tensor([ids[:end]])).logits[0, -1]
            nats -= float(logits.log_softmax(-1)[ids[end]])
            tokens += 1
        size += sum(len(each["content"].encode()) for each in record["messages"])
    assert found["nats_per_token"] == pytest.approx(nats / tokens, rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-4)
    assert found["num_bytes"] == size == 10 + 12 + 8 + 8


def test_other_texts_are_not_compared() -> None:
    """A corpus that grew between two models' runs moves the loss of one of them."""
    byte, bpe = ({"num_bytes": 9, "bytes_per_token": share} for share in (1.0, 2.5))
    entries = [{"tokenizer": "byte", "loss": byte}, {"tokenizer": "bpe", "loss": bpe}]
    bench.check_same_texts(entries)
    for other in ({"num_bytes": 8}, {"bytes_per_token": 2.4}):
        entry = {"tokenizer": "bpe", "loss": {**bpe, **other}}
        with pytest.raises(SystemExit, match=f"differ: .*{next(iter(other))}"):
            bench.check_same_texts([*entries, entry])


def test_the_table_from_the_first_step_to_the_last(
    tmp_path: Path,
    tiny_jsonl: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It runs once per publication, long after what it measures was last renamed."""
    started = []

    def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        started.append(command[-1].rpartition("/")[2])
        with monkeypatch.context() as patch:  # a process of its own would load torch again
            return subprocess.CompletedProcess(command, start(patch, *command[3:]))

    monkeypatch.setattr(bench, "subprocess", SimpleNamespace(run=run))
    arguments = [
        "--steps=2", "--clock-steps=4", "--layers=3", "--hidden=32", "--rows=2", "--seq-len=128",
        "--tokenizers=byte", "--heads=2", "--rates=3e-3", "--num-texts=4", "--num-prompts=1",
        "--max-new-tokens=8", "--repeats=1", "--dtype=float32", f"--runs={tmp_path / 'runs'}",
        f"--out={tmp_path / 'table.json'}", "--seeds=0",
        "--data", "data=jsonl", f"data.path={tiny_jsonl}", "data.eval_fraction=0.5",
    ]  # fmt: skip
    bench.main([*arguments, "--clock"])
    bench.main([*arguments, "--train-only"])
    assert len(started) == 4
    bench.main(arguments)
    assert len(started) == 4, "what is there is not made again"
    found = json.loads((tmp_path / "table.json").read_text())
    one, two = found["rows"]
    assert (one["arm"], two["arm"]) == ("byte-n1", "byte-n2-parallel")
    assert two["parameters"] == one["parameters"] + 32
    assert one["loss"]["num_bytes"] == two["loss"]["num_bytes"]
    assert [row["method"] for row in one["rows"]][:3] == ["plain", "hf_generate", "prompt_lookup"]
    ms = two["step_ms"]
    assert 0 < ms["heads"] < ms["step"] and ms["verify"] == pytest.approx(
        ms["step"] - ms["heads"], abs=2e-4
    )
    for row in two["rows"]:
        assert row["identical"] == row["compared"] or row["method"] == "hf_generate"
    assert {row["temperature"] for row in two["rows"] if row["method"] == "tree"} == {0, 1}
    clocked = found["training"]["byte-n2-parallel"]
    assert clocked["seconds_per_step"] > 0 and clocked["peak_memory"] > 2**20
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
