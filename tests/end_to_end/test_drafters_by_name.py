"""``decode.drafter`` in generate and bench: any drafter, with heads or on a base model alone."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specheads.attention.tree import default_tree
from specheads.bench import run as bench
from specheads.config import BenchConfig, ConfigError, DecodeConfig, GenerateConfig
from specheads.config.commands import DRAFTERS
from specheads.decoding import costs as clocking
from specheads.decoding import exported
from specheads.decoding.exported import (
    Subject,
    check_drafter,
    choose_drafter,
    is_plain_model,
    load_subject,
)
from specheads.decoding.loop import decode, plain_decode
from specheads.drafters.length import StepCosts
from specheads.generate import run as generate
from specheads.models.base import load_base_model, load_tokenizer
from specheads.models.checkpoint import origin, save_export
from specheads.models.heads import MedusaHeads
from specheads.models.manifest import write_manifest
from specheads.verification.sampling import Sampler
from tests.conftest import build_byte_tokenizer, build_tiny_llama
from tests.zoo import disturbed


@pytest.fixture(scope="module")
def draft_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a draft model for ``tiny_model_dir``."""
    path = tmp_path_factory.mktemp("drafts") / "draft"
    disturbed(build_tiny_llama()).save_pretrained(path)
    build_byte_tokenizer().save_pretrained(path)
    return path


COSTS = {name: 0.1 * bool(needs) for name, needs in DRAFTERS.items()}
VERIFY_COSTS = clocking.verify_costs  # as it is, where tests do without it


@pytest.fixture(autouse=True)
def _costs(monkeypatch: pytest.MonkeyPatch) -> None:
    # clocking would make lengths, hence these tests, depend on the machine
    monkeypatch.setattr(
        exported, "step_costs", lambda base, draft, n: StepCosts(0.1, [1.0] * (n + 2))
    )

    def costs(base: Any, names: list[str], *rest: Any, max_nodes: int) -> Any:
        return [StepCosts(COSTS[name], [1.0] * (max_nodes + 1)) for name in names]

    monkeypatch.setattr(exported, "member_costs", costs)


def test_verify_steps_are_clocked_up_to_the_largest_tree(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents merged trees that are cut by the costs of other sizes."""
    asked: list[int] = []

    def clock(base: Any, drafters: Any, prompt: Any, **options: Any) -> Any:
        asked.append(len(drafters))
        return [[1.0 + i] for i in range(len(drafters))], []

    monkeypatch.setattr(clocking, "clock_steps", clock)
    costs = VERIFY_COSTS(load_base_model(str(tiny_model_dir)), 9)
    assert asked == [1 + 4], "a plain step, and trees of 2, 3, 5 and 9 nodes"
    assert costs == [1.0, 1.0, 2.0, 3.0, 3.5, 4.0, 4.25, 4.5, 4.75, 5.0]


OF_HEADS = ("heads", "draft_heads")  # which a base model alone has not
EVERY: list[dict[str, Any]] = [
    {},
    *({"drafter": name} for name in DRAFTERS if name not in (*OF_HEADS, "lookahead")),
    {"drafter": "lookahead", "window": 3, "ngram": 3, "guesses": 2},
    {"drafter": "draft", "draft_tokens": 3},
    {"drafter": "draft", "draft_sampling": "coupled"},
    {"drafter": "draft_tree", "draft_sampling": "coupled"},
    {"drafter": "draft_tree", "draft_tokens": 2, "num_nodes": 6},
    {"drafter": "draft+suffix", "num_nodes": 8},
    {"drafter": "lookahead+lookup+draft_tree"},
    {"drafter": "suffix+draft_tree", "draft_sampling": "coupled"},
]


@pytest.fixture(scope="module")
def plain_texts(tiny_model_dir: Path) -> dict[float, str]:
    """Return what plain decoding prints, by temperature."""
    found = {}
    for temperature in (0.0, 0.9):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            generate(asked(tiny_model_dir, temperature, plain=True))
        found[temperature] = out.getvalue()
    return found


def asked(base: Path, temperature: float, **more: Any) -> GenerateConfig:
    """Return the settings of a text over a base model."""
    given = {"prompt": "def f(x): def f(x):", "temperature": temperature, "seed": 3}
    return GenerateConfig(str(base), max_new_tokens=24, **given, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", EVERY, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_base_model_alone_decodes_with_any_drafter(
    tiny_model_dir: Path,
    draft_dir: Path,
    plain_texts: dict[float, str],
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, Any],
    temperature: float,
) -> None:
    """A drafter that is named must draft, and none may change the text."""
    if "draft" in settings.get("drafter", ""):
        settings = {**settings, "draft": str(draft_dir)}
    generate(asked(tiny_model_dir, temperature, decode=DecodeConfig(**settings)))
    out, err = capsys.readouterr()
    assert out == plain_texts[temperature]
    if "draft" in settings and temperature == 0:
        assert " in 23 steps" not in err, "the draft model was never right"


@pytest.mark.parametrize(
    "settings",
    [
        {"drafter": "heads"},
        {"drafter": "heads+suffix"},
        {"drafter": "heads+draft", "num_nodes": 9},
        {"drafter": "suffix"},
    ],
    ids=str,
)
def test_heads_merge_with_others(
    tiny_export: Path, draft_dir: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any]
) -> None:
    """Prevents an export that is decoded by its heads whatever was asked for."""
    if "draft" in settings["drafter"].split("+"):
        settings = {**settings, "draft": str(draft_dir)}
    subject = load_subject(str(tiny_export))
    chosen = choose_drafter(subject, DecodeConfig(**settings))
    assert chosen.name == settings["drafter"]
    prompt = torch.tensor([list(b"def f(x): def f(x):")])
    for temperature in (0.0, 1.0):
        sampler = Sampler(temperature=temperature, seed=4)
        options: dict[str, Any] = {"max_new_tokens": 20, "sampler": sampler}
        found = decode(subject.base, chosen.drafter, prompt, **options)
        assert found.new_tokens == plain_decode(subject.base, prompt, **options).new_tokens
    heads = choose_drafter(subject, DecodeConfig(drafter="heads"))
    if "+" in chosen.name:
        assert set(heads.drafter.taps) <= set(chosen.drafter.taps)
    if "heads" in chosen.name:
        assert chosen.extra_parameters >= heads.extra_parameters > 0
    if "num_nodes" in settings:
        assert chosen.num_nodes == settings["num_nodes"]


def test_sampled_drafts_keep_processors_in_mind(
    tiny_model_dir: Path, draft_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Temperature is a processor there: a draft that draws at 1 instead agrees much less."""
    subject = load_subject(str(tiny_model_dir))
    decoding = DecodeConfig(draft=str(draft_dir), draft_tokens=3, draft_sampling="coupled")
    chosen = choose_drafter(subject, decoding)
    prompt = torch.tensor([list(b"def f(x):")])
    bare = decode(
        subject.base,
        chosen.drafter,
        prompt,
        max_new_tokens=24,
        sampler=Sampler(temperature=0.3, top_k=5, seed=2),
        eos_token_ids=(258,),
    )
    generate(
        GenerateConfig(
            str(tiny_model_dir),
            prompt="def f(x):",
            raw=True,
            max_new_tokens=24,
            temperature=0.3,
            top_k=5,
            seed=2,
            decode=decoding,
        )
    )
    steps = f"{len(bare.new_tokens)} tokens in {bare.num_steps} steps"
    assert steps in capsys.readouterr().err


def test_auto_is_what_there_is(tiny_export: Path, tiny_model_dir: Path, draft_dir: Path) -> None:
    """A draft model that is given and then not used looks like one that does not help."""
    with_heads, alone = load_subject(str(tiny_export)), load_subject(str(tiny_model_dir))
    given = DecodeConfig(draft=str(draft_dir))
    assert choose_drafter(with_heads, DecodeConfig()).name == "heads"
    assert choose_drafter(alone, DecodeConfig()).name == "suffix"
    assert choose_drafter(alone, given).name == choose_drafter(with_heads, given).name == "draft"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drafter": "heads"}, "decode.drafter=heads needs the heads of an export"),
        ({"drafter": "suffix+heads"}, "needs the heads of an export"),
        (
            {"drafter": "draft+suffix", "draft": "x", "draft_sampling": "sampled"},
            "must be greedy or coupled, got 'sampled'",
        ),
        (
            {"drafter": "draft", "draft": "/no/such"},
            "decode.draft=/no/such: there is no such folder",
        ),
    ],
)
def test_what_does_not_go_is_said(
    tiny_model_dir: Path, settings: dict[str, Any], message: str
) -> None:
    """A wrong word must not fall back to another drafter."""
    with pytest.raises(ConfigError, match=message):
        generate(GenerateConfig(str(tiny_model_dir), prompt="x", decode=DecodeConfig(**settings)))
    if "/no/such" not in message:
        with pytest.raises(ConfigError, match=message):
            check_drafter(DecodeConfig(**settings), has_heads=False)


def test_a_draft_model_with_another_tokenizer_is_refused(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """It would be slow and never wrong: its guesses mean other texts."""
    build_tiny_llama().save_pretrained(tmp_path)
    tokenizer = build_byte_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(tmp_path)
    decoding = DecodeConfig(draft=str(tmp_path))
    with pytest.raises(ConfigError, match="decode.draft=.*tokenizer"):
        generate(GenerateConfig(str(tiny_model_dir), prompt="x", decode=decoding))


def test_checkpoints_are_told_apart(
    tiny_export: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """An export taken for a base model decodes without its heads; a typing mistake asks the hub."""
    assert is_plain_model("tinycode") and is_plain_model(str(tiny_model_dir))
    assert is_plain_model("owner/model")
    for name in (str(tiny_export), str(tmp_path / "none"), "./a/b", "runs/a/export", "missing"):
        assert not is_plain_model(name)
    with pytest.raises(ConfigError, match=r"base is x, but checkpoint=.* is a base model itself"):
        load_subject(str(tiny_model_dir), base="x")
    with pytest.raises(ConfigError, match="checkpoint=owner/model is no export, and as a base"):
        load_subject("owner/model")
    subject = load_subject(str(tiny_model_dir))
    assert isinstance(subject, Subject) and subject.export is None


def test_bench_names_its_drafters(
    tiny_model_dir: Path, draft_dir: Path, prompt_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table that says `tree` for all of them cannot be read; a base alone has no tree at all."""
    out = prompt_file.with_name("bench.json")
    bench(
        BenchConfig(
            checkpoint=str(tiny_model_dir),
            out=str(out),
            prompts=str(prompt_file),
            num_prompts=2,
            max_new_tokens=5,
            repeats=1,
            dtype="float32",
            threads=1,
            batch_sizes=[2],
            drafters=["suffix", "draft+lookup"],
            decode=DecodeConfig(draft=str(draft_dir), draft_tokens=2),
        )
    )
    result = json.loads(out.read_text())
    rows = {(r["method"], r["temperature"], r["batch"]): r for r in result["rows"]}
    drafted = {
        "prompt_lookup": "ngram",
        "hf_assisted": "hf assistant",
        "hf_lookup": "hf prompt lookup",
        "draft": "draft",
        "suffix": "suffix",
        "draft+lookup": "draft+lookup",
    }
    assert {name for name, _, _ in rows} == {"plain", "hf_generate", "one_by_one", *drafted}
    for name, drafter in drafted.items():
        for size in (1, 2):
            assert rows[name, 0.0, size]["drafter"] == drafter
            assert rows[name, 0.0, size]["identical"] == 2
    assert rows["draft", 1.0, 1]["identical"] == 2
    assert rows["hf_assisted", 1.0, 1]["identical"] is None
    assert rows["draft", 0.0, 1]["extra_parameters"] > 0
    assert rows["draft", 0.0, 1]["tree_nodes"] == 3
    assert result["headline"]["method"] == "draft"
    assert result["settings"]["drafters"] == ["draft", "suffix", "draft+lookup"]
    assert "draft+lookup" in capsys.readouterr().out


def test_bench_does_not_compare_what_was_sampled(
    tiny_export: Path, draft_dir: Path, prompt_file: Path
) -> None:
    """Sampled candidates give other tokens of the same distribution, which is no failure."""
    out = prompt_file.with_name("bench.json")
    bench(
        BenchConfig(
            checkpoint=str(tiny_export),
            out=str(out),
            prompts=str(prompt_file),
            num_prompts=2,
            max_new_tokens=5,
            repeats=1,
            dtype="float32",
            threads=1,
            decode=DecodeConfig(
                draft=str(draft_dir), drafter="draft", draft_tokens=2, draft_sampling="sampled"
            ),
        )
    )
    result = json.loads(out.read_text())
    rows = {(row["method"], row["temperature"]): row for row in result["rows"]}
    assert rows["draft", 0.0]["identical"] == 2
    assert rows["draft", 1.0]["identical"] is None and rows["draft", 1.0]["compared"] == 0
    assert rows["tree", 1.0]["identical"] == 2 and result["headline"]["method"] == "draft"


def test_other_heads_on_the_same_base_get_rows_of_their_own(
    tiny_export: Path, tiny_model_dir: Path, prompt_file: Path, tmp_path: Path
) -> None:
    """Prevents heads that are compared from two processes, or that draft for another base."""
    other = tmp_path / "worse" / "export"
    info = origin(str(tiny_model_dir), {"recipe": "none", "steps": 0})
    tokenizer = load_tokenizer(str(tiny_model_dir))
    save_export(other, MedusaHeads(2, 1, 32, 272), tokenizer, default_tree(2, 4), info)
    settings = BenchConfig(
        checkpoint=str(tiny_export), out=str(tmp_path / "bench.json"), prompts=str(prompt_file),
        exports=[str(other)], num_prompts=2, max_new_tokens=5, repeats=1, dtype="float32",
        threads=1,
    )  # fmt: skip
    bench(settings)
    result = json.loads((tmp_path / "bench.json").read_text())
    rows = {row["method"]: row for row in result["rows"] if row["temperature"] == 0}
    assert rows["worse/tree"]["tree_nodes"] == 4 and rows["worse/tree"]["identical"] == 2
    assert 0 < rows["worse/tree"]["extra_parameters"] < rows["tree"]["extra_parameters"]
    assert result["settings"]["exports"] == [str(other)]
    twice = replace(settings, exports=[str(other), str(other)])
    with pytest.raises(ConfigError, match="would be called worse, as another one is"):
        bench(twice)
    with pytest.raises(ConfigError, match="other heads beside those of checkpoint, which has none"):
        bench(replace(settings, checkpoint=str(tiny_model_dir)))
    config = json.loads((other / "config.json").read_text())
    config["base"]["digest"] = "0" * 64
    (other / "config.json").write_text(json.dumps(config))
    write_manifest(other)
    with pytest.raises(ConfigError, match="base digest 000000000000 recorded, the export beside"):
        bench(settings)
    config["base"]["tuned"] = True
    (other / "config.json").write_text(json.dumps(config))
    write_manifest(other)
    with pytest.raises(ConfigError, match="worse/export brings a tuned one of its own"):
        bench(settings)


def test_a_draft_model_may_bring_heads(
    tiny_export: Path, tiny_model_dir: Path, draft_dir: Path
) -> None:
    """Prevents an export that is refused as a draft model, or whose heads are left aside."""
    subject = load_subject(str(tiny_model_dir))
    prompt = torch.tensor([list(b"def f(x): def f(x):")])
    expected = plain_decode(subject.base, prompt, max_new_tokens=20)
    for name in ("draft", "draft_heads", "suffix+draft_heads"):
        decoding = DecodeConfig(drafter=name, draft=str(tiny_export), draft_tokens=4)
        chosen = choose_drafter(subject, decoding)
        found = decode(subject.base, chosen.drafter, prompt, max_new_tokens=20)
        assert found.new_tokens == expected.new_tokens
        assert found.num_steps < expected.num_steps, "the draft model is the base itself"
    with_heads = choose_drafter(
        subject, DecodeConfig(drafter="draft_heads", draft=str(tiny_export))
    )
    alone = choose_drafter(subject, DecodeConfig(drafter="draft", draft=str(tiny_export)))
    assert with_heads.extra_parameters > alone.extra_parameters > 0
    with pytest.raises(ConfigError, match="draft_heads needs Medusa or Hydra heads of a draft"):
        choose_drafter(subject, DecodeConfig(drafter="draft_heads", draft=str(draft_dir)))
