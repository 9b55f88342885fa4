"""``python -m specheads.quality`` on tiny models."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specheads.attention.tree import default_tree
from specheads.config import ConfigError, DecodeConfig, QualityConfig
from specheads.config.main import answering
from specheads.models.base import load_base_model, load_tokenizer
from specheads.models.checkpoint import origin, save_export
from specheads.models.heads import MedusaHeads
from specheads.quality import main, run
from tests.conftest import build_byte_tokenizer


@pytest.fixture(scope="module")
def tuned_export(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an export of untrained heads whose base was moved a little."""
    path = tmp_path_factory.mktemp("tuned") / "export"
    base = load_base_model(str(tiny_model_dir), dtype="float32")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    info = origin(str(tiny_model_dir), {"recipe": "none", "steps": 0})
    tokenizer, tree = load_tokenizer(str(tiny_model_dir)), default_tree(2, 4)
    save_export(path, MedusaHeads(2, 1, 32, 272), tokenizer, tree, info, tuned_base=base)
    return path


def settings(checkpoint: Path | str, data: Path, out: Path, **more: object) -> QualityConfig:
    """Return settings for a run of a second."""
    return QualityConfig(
        checkpoint=str(checkpoint), data=str(data), out=str(out / "quality.json"),
        num_prompts=3, max_new_tokens=12, threads=1, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_tuned_base_is_compared_with_its_original(
    tuned_export: Path,
    tiny_jsonl: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """medusa2's speed-up counts only beside what the base has become."""
    config = settings(tuned_export, tiny_jsonl, tmp_path, num_records=6)
    command = f"num_records=6 num_prompts=3 max_new_tokens=12 threads=1 out={config.out}"
    arguments = [f"checkpoint={tuned_export}", f"data={tiny_jsonl}", *command.split()]
    monkeypatch.setattr(sys, "argv", ["quality", *arguments])
    main()  # data= is a group of conf/, too
    printed = capsys.readouterr().out
    result = json.loads(Path(config.out).read_text())
    read = result["heldout"]
    assert read["num_records"] == 6 and read["kl"] > 0 and read["loss_difference"] != 0
    assert read["perplexity"] != read["original_perplexity"]
    assert result["texts"]["compared"] == 3 and result["lossy"] is None
    assert f"{read['kl']:.4f}" in printed and "greedy texts of both" in printed
    itself = replace(config, checkpoint=result["original"], original=result["original"])
    run(itself)
    read = json.loads(Path(config.out).read_text())["heldout"]
    assert read["kl"] == 0 and read["perplexity"] == pytest.approx(read["original_perplexity"])


def test_an_untouched_base_needs_no_comparison(
    tiny_export: Path, tiny_jsonl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Zeros that nobody measured look like a result."""
    config = settings(tiny_export, tiny_jsonl, tmp_path, json=True)
    with answering(config):
        run(config)
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert result["original"] is None and result["texts"] is None
    assert "kl" not in result["heldout"] and result["heldout"]["num_records"] == 32
    assert "the base was not tuned" in shown.err


def test_a_lossy_rule_is_judged(
    tiny_export: Path, tiny_jsonl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A lossy rule measured by its speed alone looks like the best drafter there is."""
    loose = DecodeConfig(acceptance="lossy_typical", epsilon=0.0, delta=0.0)
    config = settings(tiny_export, tiny_jsonl, tmp_path, decode=loose, temperature=1.0)
    run(config)
    result = json.loads(Path(config.out).read_text())
    found = result["lossy"]
    assert result["rule"] == "lossy_typical" and found["compared"] == 3
    assert found["lossy"]["accept_length"] > found["exact"]["accept_length"] == 1
    assert "lossy_typical at T=1, 3 texts" in capsys.readouterr().out


def test_mistakes_are_one_line(
    tuned_export: Path, tiny_export: Path, tiny_jsonl: Path, tmp_path: Path
) -> None:
    """An original that is another model, or other data, makes figures about nothing."""
    config = settings(tuned_export, tiny_jsonl, tmp_path)

    def refused(message: str, config: QualityConfig) -> None:
        with pytest.raises(ConfigError, match=message) as error:
            run(config)
        assert "\n" not in str(error.value)

    refused("out is .*, but there is no folder", replace(config, out="/nowhere/q.json"))
    refused("data is .*missing.jsonl, which is no file", replace(config, data="missing.jsonl"))
    lossy = DecodeConfig(drafter="heads", acceptance="lossy_lenient")
    refused("needs the heads of an export", replace(config, checkpoint="tinycode", decode=lossy))
    refused("there is no such folder|no such", replace(config, original="./nowhere"))
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"text": "x" * 600}) + "\n")
    refused("holds no record to read: 1 too long for the context", replace(config, data=str(long)))


def test_an_original_that_changed_is_refused(
    tuned_export: Path, tiny_jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the original may hold another model by now, with the same tokenizer."""
    monkeypatch.setattr("specheads.models.names.base_digest", lambda *_, **__: "0" * 64)
    config = settings(tuned_export, tiny_jsonl, tmp_path)
    with pytest.raises(ConfigError, match=r"was tuned from .* with digest .*, now it has 000000"):
        run(config)


def test_another_tokenizer_is_refused(
    tuned_export: Path,
    tiny_jsonl: Path,
    tmp_path: Path,
    make_tiny_llama: Callable[..., torch.nn.Module],
) -> None:
    """The same ids would mean other words, and the KL would be large for no reason."""
    folder = tmp_path / "other"
    make_tiny_llama().save_pretrained(folder)  # type: ignore[operator]
    tokenizer = build_byte_tokenizer()
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(folder)
    config = settings(tuned_export, tiny_jsonl, tmp_path, original=str(folder))
    with pytest.raises(ConfigError, match="original=.*: its tokenizer is not the base model's"):
        run(config)
