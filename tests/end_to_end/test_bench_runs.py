"""The experiments that compare models: fair by construction, and scored by what they say."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from specheads.config.training import DRAFT_LOSSES
from specheads.data.tokenizers import byte_tokenizer, complete_init
from specheads.decoding import exported
from specheads.decoding.costs import StepCosts
from specheads.decoding.result import DecodedRow
from specheads.measure.clock import Prompt, Runs
from specheads.models.base import build_from_init, load_tokenizer
from specheads.models.mtp import MtpHeads, block_config
from tests.composed import composed
from tests.end_to_end.commands import start
from tests.script_modules import load_script

adaptive: Any = load_script("bench_adaptive")
anchors: Any = load_script("bench_anchors")
block: Any = load_script("bench_block")
distill: Any = load_script("bench_distill")
equal: Any = load_script("bench_equal")
medusa: Any = load_script("bench_medusa")
mtp: Any = load_script("bench_mtp")
beams: Any = load_script("bench_beams")
lossy: Any = load_script("bench_lossy")


def test_all_heads_get_the_same(tmp_path: Path) -> None:
    """An arm with more tokens, nodes or tuning runs wins for that reason."""
    arms = medusa.arms(tmp_path / "own.jsonl")
    assert len({len(arm.rates) for arm in arms}) == 1
    kinds = {
        arm.name: composed("train", [*arm.overrides, *arm.rates[0], *medusa.COMMON]) for arm in arms
    }
    for cfg in kinds.values():
        assert (cfg.data.rows, cfg.data.seq_len, cfg.optim.accumulation) == (8, 512, 1)
        assert (cfg.heads.num_heads, cfg.tree.num_nodes) == (medusa.NUM_HEADS, medusa.NUM_NODES)
        assert (cfg.optim.name, cfg.optim.schedule) == ("muon", "wsd")
        assert cfg.data.source != "pycode" or cfg.data.documents == 0
    assert kinds["hydra"].heads.condition and kinds["markov"].heads.correction == "markov"
    assert kinds["self_distilled"].loss.base == "distill"
    assert kinds["regenerated"].data.path == str(tmp_path / "own.jsonl")


@pytest.mark.parametrize("base", ["smollm2", "tinycode"])
def test_all_kinds_of_drafters_get_the_same(base: str, tmp_path: Path) -> None:
    """A kind with more text, more rows or more learning rates to choose from wins for that."""
    about = equal.bases()[base]
    assert len(set(map(len, about.rates))) == 1
    found = {}
    for kind in equal.kinds(about):
        rate = about.rates[0 if kind.muon else 1][0]
        words = equal.words_of(kind, about, tmp_path)
        cfg = composed("train", [*words, f"optim.lr={rate}", *equal.harness.training_length(9, 1)])
        assert (cfg.data.rows, cfg.data.seq_len, cfg.optim.accumulation) == (8, 512, 1)
        assert (cfg.model.name, cfg.steps, cfg.optim.lr) == (base, 9, float(rate))
        assert (cfg.optim.name == "muon") or kind.name == "mtp"
        found[kind.name] = cfg
    assert len({(c.data.source, c.data.path, c.data.max_records) for c in found.values()}) == 1
    heads = {name: c for name, c in found.items() if name not in ("mtp", equal.DRAFT)}
    assert {c.heads.num_heads for c in heads.values()} == {equal.DEPTH}
    assert {c.heads.num_kept for c in heads.values()} <= {about.kept, 0} or not about.kept
    assert {(c.features.dir, c.features.dtype) for c in [*heads.values(), found["mtp"]]} == {
        (str(tmp_path / "features"), "bfloat16")
    }


def test_questions_that_choose_are_not_reported_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape that is chosen on what it is reported on wins by luck; halves may lack a kind."""
    monkeypatch.setattr(equal, "load_subject", lambda *a, **k: SimpleNamespace(base=0, tokenizer=0))
    asked = [Prompt(f"p{i}", f"kind{i % 6}", torch.zeros(1, 4)) for i in range(96)]
    monkeypatch.setattr(equal, "prompts_of", lambda *a: (list(asked), ""))
    kind = next(each for each in equal.kinds(equal.bases()["tinycode"]) if each.name == "block")
    parts = [
        equal.opened(kind, Path(), equal.Settings(base="tinycode"), first=first).prompts
        for first in (True, False)
    ]
    assert [len(part) for part in parts] == [24, 48]
    assert len({prompt.id for part in parts for prompt in part}) == 72
    for part in parts:
        counts = {sum(p.kind == one.kind for p in part) for one in part}
        assert counts == {len(part) // 6}


def test_heads_that_a_base_ships_with_are_no_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of the draft model would be of the heads that ``smollm2`` names, and look fine."""
    ships = exported.Subject(Any, Any, export=Any)  # type: ignore[arg-type]
    monkeypatch.setattr(equal, "load_subject", lambda *a, **k: ships)
    monkeypatch.setattr(equal, "questions", lambda *a, **k: [])
    kinds = {kind.name: kind for kind in equal.kinds(equal.bases()["smollm2"])}
    opened = {
        name: equal.opened(kinds[name], Path("made"), equal.Settings(), first=True)
        for name in (equal.DRAFT, "block")
    }
    assert opened[equal.DRAFT].subject.export is None and opened["block"].subject.export
    assert opened[equal.DRAFT].decode.draft == "made" and opened["block"].decode.draft == ""


def test_a_learning_rate_is_judged_on_held_out_text(tmp_path: Path) -> None:
    """Prevents the rate that learned the training text by heart, and figures of an earlier step."""
    heads = {f"heldout/head_{i}/top1": 0.5 for i in range(equal.DEPTH)}
    first = {"heldout/head_0/top1": 0.9} | {f"heldout/head_{i}/top1": 0.9 for i in range(1, 5)}
    lines = [{"train/head_0/top1": 0.99}, first, heads, {"final/accept_length/t0": 9.0}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert equal.expected(tmp_path) == 1 + 0.5 + 0.25 + 0.125 + 0.0625 + 0.03125
    lines = [{"train/top1": 0.99}, {"heldout/loss": 3.0, "heldout/top1": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert equal.expected(tmp_path) == 1.96875


def test_another_machine_trains_as_many_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that clocks its own pace trains a hundred times as long as what it is compared with."""
    asked: list[list[str]] = []

    def train(run: Path, words: list[str]) -> Path:
        asked.append(words)
        return run / "export"

    monkeypatch.setattr(equal.harness, "train", train)
    monkeypatch.setattr(equal, "store", lambda *a: None)
    (tmp_path / "block-pace.json").write_text('{"value": 2.0}')
    base = equal.bases()["tinycode"]
    (kind,) = (k for k in equal.kinds(base) if k.name == "block")
    _, about = equal.trained(kind, base, tmp_path, "1e-3", 3, 0)
    assert about["steps"] == 90 and len(asked) == 1 and "steps=90" in asked[0]


@pytest.mark.slow
def test_a_short_comparison_of_drafters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a script of hours that fails in its last minute, or trains again what is there."""
    about = {
        name: replace(base, minutes=(0.001, 0.001), rates=(base.rates[0][:1],) * 2)
        for name, base in equal.bases().items()
    }
    monkeypatch.setattr(equal, "bases", lambda: about)
    monkeypatch.setattr(equal, "PROBE", 3)
    sizes = ["--base=tinycode", "--num-prompts=24", "--max-new-tokens=8", f"--out={tmp_path}/out"]
    given = [*sizes, f"--runs={tmp_path}/runs", "--kinds", "eagle3", "block", "mtp", "draft"]
    equal.main(given)
    cells = sorted((tmp_path / "out" / "tinycode").glob("*-0.json"))
    assert [cell.stem for cell in cells] == ["block-0", "draft-0", "eagle3-0", "mtp-0"]
    for cell in cells:
        found = json.loads(cell.read_text())
        assert found["steps"] == 3 and found["shape"] in ("chain", "tree_8", "tree_16", "tree_32")
        assert set(found["rows"]) == {"t0", "t1"} and found["parameters"] > 0
    monkeypatch.setattr(equal, "cell", None)
    equal.main(given)


def test_the_cost_of_an_anchor_is_measured(tmp_path: Path) -> None:
    """A script that ran on no machine fails on the one that is lent for half an hour."""
    out = tmp_path / "anchors.json"
    sizes = ["--rows=1", "--seq-len=32", "--steps=1", "--num-heads=2", "--threads=1"]
    given = [*sizes, "--bases", "tinycode", "--anchors", "4", "8", f"--out={out}"]
    anchors.main(given)
    rows = json.loads(out.read_text())["rows"]
    assert [row["arm"] for row in rows] == ["hydra_plus"] + [
        f"{kind} {count}" for kind in ("block", "dspark") for count in (4, 8)
    ]
    assert [row["places_per_step"] for row in rows] == [32, 4, 8, 4, 8]
    assert all(row["peak_bytes"] > row["mask_bytes"] for row in rows)


def test_rows_of_block_heads_differ_in_one_thing(tmp_path: Path) -> None:
    """Prevents a row whose figure is that of a second change, of more text, or of the first row."""
    settings = {
        row.name: asdict(composed("train", [*row.form, *block.COMMON, *row.overrides]))
        for row in block.rows(tmp_path / "own.jsonl")
    }
    first = settings.pop("joined")
    wider = {"recipe", "name", "model"}

    def changed(cfg: dict[str, Any]) -> dict[str, set[str]]:
        parts = {
            key: {name for name in value if value[name] != first[key][name]}
            for key, value in cfg.items()
            if isinstance(value, dict) and key not in wider
        }
        assert all(cfg[key] == first[key] for key in cfg if key not in {*parts, *wider})
        return {key: names for key, names in parts.items() if names}

    found = {name: changed(cfg) for name, cfg in settings.items()}
    assert not found.pop("random-start")  # which differs in what is run
    assert found.pop("own-answers").keys() == {"data"}
    adamw, published = {"optim": {"name", "lr"}}, found.pop("published")
    assert found.pop("published-adamw") == {**published, **adamw}
    published["heads"].remove("num_kept")  # of a matrix with rows for some tokens, which none has
    assert published == {"heads": {"options"}} and found.pop("adamw") == adamw
    assert all(sum(map(len, each.values())) == 1 for each in found.values())


def test_tuning_keeps_to_the_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The largest rate gives the best heads and the worst base; it must not be chosen for that."""
    heads = {f"head_{i}/loss": 1.0 for i in range(medusa.NUM_HEADS)}
    found = {
        "0": {**heads, "loss": 1.0, "original_loss": 1.0, "kl": 0.001},
        "1": {**heads, "head_0/loss": 0.8, "loss": 1.005, "original_loss": 1.0, "kl": 0.02},
        "2": {**heads, "head_0/loss": 0.1, "loss": 1.2, "original_loss": 1.0, "kl": 0.2},
    }
    monkeypatch.setattr(medusa.harness, "train", lambda run, overrides: run.name.split("-")[1])
    monkeypatch.setattr(medusa, "read_config", lambda of: {"training": {"heldout": found[of]}})
    for limit, best in (("", 2), ("loss", 1), ("kl", 0)):
        arm = medusa.Arm("x", (), (("a=0",), ("a=1",), ("a=2",)), limit)
        rates, tried = medusa.tune(tmp_path, arm)
        assert rates == (f"a={best}",) and len(tried) == 3


def test_all_draft_models_get_the_same() -> None:
    """More tokens, layers or decay on one side win or lose for that reason."""
    given = distill.Settings()
    settings = {
        arm: composed("train", distill.overrides(arm, given)) for arm in distill.arms(given)
    }
    assert len(settings) == 3 * len(DRAFT_LOSSES)
    like = next(iter(settings.values()))
    for (loss, data), cfg in settings.items():
        assert (cfg.draft.loss, bool(cfg.draft.on_policy)) == (loss, data == "on_policy")
        assert (cfg.data.source == "jsonl") == (data == "regenerated")
        assert (cfg.data.documents > 0) == (data == "documents") <= (loss == "labels")
        assert (cfg.data.rows, cfg.data.seq_len) == (like.data.rows, like.data.seq_len)
        assert (cfg.optim, cfg.loss, cfg.draft.layers) == (like.optim, like.loss, like.draft.layers)
        assert cfg.draft.learn_prompts == like.draft.learn_prompts


def test_the_best_and_the_plain_arm_get_all_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a claim over seeds that one side never had, or a rate tuned on one side only."""
    better = {"labels": 0.5, "forward_kl": 0.6, "tv": 0.7}
    asked = []

    def train(arm: tuple[str, str], given: Any, rate: str, steps: int, seed: int) -> str:
        asked.append(("-".join(arm), rate, steps))
        return f"{arm[0]}-{rate}-{steps}"

    def alphas(export: str, prompts: Path, given: Any) -> dict[str, Any]:
        loss, rate, steps = export.split("-")
        alpha = better[loss] + (0.1 if rate == ("2" if steps == "100" else "1") else 0.0)
        return {f"t{t}": {"alpha": alpha} for t in (0, 1)}

    monkeypatch.setattr(distill, "trained", train)
    monkeypatch.setattr(distill, "alphas", alphas)
    out = tmp_path / "table.json"
    rates = ["--rates", "1", "2", "--tuning-rates", "1", "2", f"--runs={tmp_path}", f"--out={out}"]
    distill.main(["--losses", *better, "--data", "documents", "corpus", *rates])
    found = json.loads(out.read_text())
    names = ["labels-documents", "labels-corpus", "tv-corpus"]
    kl = "forward_kl-corpus"
    assert {each for each in asked if each[2] == 100} == {(kl, rate, 100) for rate in "12"}
    assert [each["rate"] for each in found["tuned"]["table"]["tried"]] == ["1", "2"]
    of = {
        part: [
            (f"{row['loss']}-{row['data']}", row["rate"], row["seed"])
            for row in found["rows"]
            if row["part"] == part
        ]
        for part in ("table", "claim")
    }
    assert sorted(of["table"]) == sorted((name, "2", 0) for name in [kl, *names])
    assert of["claim"] == [(name, "1", seed) for name in names for seed in range(3)]
    for name in names:  # each at both rates over the whole length
        assert {rate for each, rate, steps in asked if (each, steps) == (name, 300)} == {"1", "2"}


@pytest.mark.slow
def test_a_short_table_of_draft_models(tmp_path: Path) -> None:
    """Prevents a script that nobody can run to its end."""
    out = tmp_path / "table.json"
    distill.main(
        f"--steps 2 --tuning-steps 1 --losses labels tv --data corpus --seeds 0 1 --rates 3e-3"
        f" --tuning-rates 3e-3 --num-prompts 2 --max-new-tokens 8 --rows 1 --draft draft.hidden=64"
        f" --runs {tmp_path / 'runs'} --out {out}".split()
    )
    rows = json.loads(out.read_text())["rows"]
    arms = (("labels", "documents"), ("labels", "corpus"), ("tv", "corpus"))
    assert [(row["part"], row["loss"], row["data"], row["seed"]) for row in rows] == [
        *(("table", *arm, 0) for arm in arms[1:]),
        *(("claim", *arm, seed) for arm in arms for seed in (0, 1)),
    ]
    assert all(0 < row["t1"]["alpha"] < 1 for row in rows)


def test_all_models_get_the_same() -> None:
    """More layers, tokens or weight decay on one side win or lose for that reason."""
    kinds = ("n1", "n4-parallel", "n8-parallel", "n4-sequential")
    given = mtp.Settings(arms=tuple(f"{name}-{kind}" for name in ("byte", "bpe") for kind in kinds))
    length = mtp.harness.training_length(600, 0)
    settings = {
        arm: composed("train", [*mtp.overrides(arm, given), *mtp.rate_overrides("3e-3"), *length])
        for arm in given.arms
    }
    for name, cfg in settings.items():
        like = settings[name.partition("-")[0] + "-n1"]
        for part in ("data", "optim", "tokenizer", "tokenizer_size", "autocast", "features"):
            assert getattr(cfg, part) == getattr(like, part), f"{part} of {name}"
        init, likes = (complete_init(c.model.init, byte_tokenizer()) for c in (cfg, like))
        assert init == likes and cfg.optim.lr == cfg.optim.base_lr == 3e-3
        assert cfg.recipe == ("pretrain" if cfg is like else "mtp")
        if cfg is not like:
            assert f"n{cfg.mtp.num_heads}-{cfg.mtp.variant}" in name and cfg.mtp.parity
    for wrong in ("byte-n1-parallel", "byte-n4", "word-n1", "byte-n14-parallel"):
        with pytest.raises(ValueError, match="--arms"):
            mtp.Settings(arms=(wrong,))


@pytest.mark.parametrize("variant", ["parallel", "causal"])
def test_the_parameters_are_equal_but_for_a_norm_per_head(variant: str) -> None:
    """Heads with matrices of their own, or on top of all layers, would make the larger model."""
    cfg = composed(
        "train", mtp.overrides(f"byte-n4-{variant}", mtp.Settings(layers=6, hidden=64, arms=()))
    )
    init = {**cfg.model.init, "vocab_size": 320}

    def count(module: torch.nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    base = build_from_init({**init, "num_hidden_layers": 3})
    heads = MtpHeads(3, block_config(base.config), 320, variant=variant, lm_head=cfg.mtp.lm_head)
    assert count(base) + count(heads) == count(build_from_init(init)) + 3 * 64


def test_the_rate_is_chosen_by_the_next_tokens_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen by another figure than the one in which they are compared, one side is held back."""
    losses = {"1e-3": 1.3, "2e-3": 1.1, "4e-3": 1.2}
    lengths = []

    def trained(arm: str, given: Any, rate: str, steps: int, seed: int) -> tuple[Path, Any]:
        lengths.append(steps)
        return Path(), {"nats_per_token": losses[rate]}

    monkeypatch.setattr(mtp, "trained", trained)
    rate, tried = mtp.tune("byte-n1", mtp.Settings(rates=tuple(losses), tuning_steps=7))
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
                {"role": role, "content": text}
                for role, text in zip(("user", "assistant"), pair, strict=True)
            ],
        }
        for number, pair in enumerate(messages)
    ]
    monkeypatch.setattr(mtp, "load_records", lambda data, split: records)
    monkeypatch.setattr(mtp, "load_subject", lambda *_, **__: SimpleNamespace(base=tiny_llama))
    (tmp_path / "export").symlink_to(tiny_model_dir)
    (tmp_path / "config.yaml").write_text("data: {source: pycode}\n")
    found = mtp.heldout_loss(tmp_path / "export", mtp.Settings(num_texts=5, seq_len=100))
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
    rows = [{"tokenizer": "byte", "loss": byte}, {"tokenizer": "bpe", "loss": bpe}]
    mtp.check_same_texts(rows)
    for other in ({"num_bytes": 8}, {"bytes_per_token": 2.4}):
        with pytest.raises(SystemExit, match=f"differ: .*{next(iter(other))}"):
            mtp.check_same_texts([*rows, {"tokenizer": "bpe", "loss": {**bpe, **other}}])


def test_the_table_from_the_first_step_to_the_last(
    tmp_path: Path, tiny_jsonl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs once per publication, long after what it measures was last renamed."""
    started = []

    def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        started.append(command[-1].rpartition("/")[2])
        with monkeypatch.context() as patch:  # a process of its own would load torch again
            return subprocess.CompletedProcess(command, start(patch, *command[3:]))

    monkeypatch.setattr(mtp.harness, "subprocess", SimpleNamespace(run=run))
    arguments = [
        "--steps=2", "--clock-steps=4", "--layers=3", "--hidden=32", "--rows=2", "--seq-len=128",
        "--arms", "byte-n1", "byte-n2-parallel", "--rates=3e-3", "--num-texts=4", "--seeds=0",
        "--num-prompts=1", "--max-new-tokens=8", "--repeats=1", "--dtype=float32",
        f"--runs={tmp_path / 'runs'}", f"--out={tmp_path / 'table.json'}",
        "--data", "data=jsonl", f"data.path={tiny_jsonl}", "data.eval_fraction=0.5",
    ]  # fmt: skip
    mtp.main([*arguments, "--clock"])
    mtp.main([*arguments, "--train-only"])
    assert len(started) == 4
    mtp.main(arguments)
    assert len(started) == 4, "what is there is not made again"
    found = json.loads((tmp_path / "table.json").read_text())
    one, two = found["rows"]
    assert (one["arm"], two["arm"]) == ("byte-n1", "byte-n2-parallel")
    assert two["parameters"] == one["parameters"] + 32
    assert one["loss"]["num_bytes"] == two["loss"]["num_bytes"]
    assert [row["method"] for row in one["rows"]][:3] == ["plain", "hf_generate", "prompt_lookup"]
    ms = two["step_ms"]
    assert ms["heads"] > 0 and ms["step"] > 0
    assert ms["verify"] == pytest.approx(ms["step"] - ms["heads"], abs=2e-4)
    for row in two["rows"]:
        assert row["identical"] == row["compared"] or row["method"] == "hf_generate"
    trees = {row["temperature"]: row for row in two["rows"] if row["method"] == "tree"}
    for heat in (0, 1):  # decoded once, and clocked
        again = two["accept"][f"t{heat}"]["tree"]["accept_length"]
        assert again == pytest.approx(trees[heat]["accept_length"], abs=1e-3)
    clocked = found["training"]["byte-n2-parallel"]
    assert clocked["seconds_per_step"] > 0 and clocked["peak_memory"] > 2**20


def test_likelihood_and_entropy_by_the_definition(tiny_llama: LlamaForCausalLM) -> None:
    """Scored one position off, every text looks as unlikely as noise."""
    prompt = Prompt("p", "k", torch.tensor([[5, 9, 2]]))
    texts = [DecodedRow([7, 11, 3], [3], finished=True)]
    found = lossy.distance(tiny_llama, [prompt], texts, 0.7)
    ids, nats, entropy, others = [5, 9, 2], 0.0, 0.0, 0
    for token in texts[0].new_tokens:
        with torch.no_grad():
            logits = tiny_llama(input_ids=torch.tensor([ids])).logits[0, -1]
        p = (logits / 0.7).softmax(-1)
        nats -= float(p[token].log())
        entropy -= float((p * p.log()).sum())
        others += int(logits.argmax()) != token
        ids.append(token)
    expected = {"nats": nats / 3, "entropy": entropy / 3, "not_best": others / 3}
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_clock_is_read_per_kind() -> None:
    """Seconds of one kind's prompts divided by another's, or repeats mistaken for prompts."""
    prompts = [Prompt(str(i), kind, torch.zeros(1, 1)) for i, kind in enumerate(["a", "b", "b"])]
    texts = [DecodedRow([1], [1], finished=True)] * 3
    runs = {
        "plain": Runs([[4.0, 6.0, 9.0], [4.0, 6.0, 9.0], [40.0, 6.0, 9.0]], texts),
        "rule": Runs([[2.0, 3.0, 3.0], [2.0, 3.0, 30.0], [2.0, 3.0, 3.0]], texts),
    }
    found = adaptive.of_clock(runs, prompts)["rule"]
    assert found["speedup"] == {"mix": 19 / 8, "a": 2.0, "b": 2.5}
    assert found["identical"] == 3


@pytest.mark.parametrize("what", ["lengths", "sizes"])
def test_fixed_sizes_are_clocked_beside_those_that_follow_the_text(
    what: str, tiny_export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that nobody runs is broken when the figures are needed."""
    monkeypatch.setattr(exported, "step_costs", lambda _, draft, n: StepCosts(0.1, [1.0] * (n + 2)))
    costs = [StepCosts(0.1, [1.0] * 99), StepCosts(0.0, [1.0] * 99)]
    monkeypatch.setattr(exported, "member_costs", lambda *_, **__: costs)
    out, batches = tmp_path / "adaptive.json", ["1"] if what == "lengths" else ["1", "3"]
    model = "--draft=tinycode" if what == "lengths" else f"--checkpoint={tiny_export}"
    few = f"{model} --kinds next --num-prompts 3 --max-new-tokens 5 --repeats 1 --{what} 2 3"
    adaptive.main([*few.split(), "--batches", *batches, f"--out={out}"])
    clocked = json.loads(out.read_text())["clocked"]
    assert list(clocked) == [f"T=0, batch {size}" for size in batches]
    for found in clocked.values():
        assert list(found) == ["fixed 2", "fixed 3", adaptive.ADAPTIVE]
        assert len({each["identical"] for each in found.values()} - {0}) == 1


def test_lossy_rules_are_scored(tiny_export: Path, tmp_path: Path) -> None:
    """As above: figures of other rules than the rows are called after, or of none."""
    out = tmp_path / "lossy.json"
    few = f"--checkpoint {tiny_export} --num-prompts 2 --max-new-tokens 8 --repeats 1 --out {out}"
    lossy.main(few.split())
    rows = {row["method"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == ["plain", *lossy.RULES, "greedy"]
    assert rows["plain"]["speedup_vs_plain"] == [1.0] and rows["greedy"]["speedup_vs_plain"] == []
    assert rows["greedy"]["not_best"] <= rows["plain"]["not_best"]
    assert all(row["accept_length"] >= 1 for row in rows.values())
    assert {name for name, row in rows.items() if "tv" in row} == {*lossy.RULES} - {"exact"}


def test_beams_are_searched_by_all(tiny_export: Path, tmp_path: Path) -> None:
    """As above: other beams than transformers' behind a speed-up."""
    out = tmp_path / "beams.json"
    few = f"--checkpoint {tiny_export} --num-prompts 2 --max-new-tokens 8 --beams 2 --out {out}"
    beams.main(few.split())
    rows = {row["method"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == ["transformers", "plain", "heads", "suffix"]
    assert all(row["equal"] == 2 and row["score_difference"] < 1e-4 for row in rows.values())
    assert rows["plain"]["passes"] == 1.0 and rows["heads"]["passes"] <= 1.0
