"""The doctor says what a model can be decoded with, and its exit code says whether to go on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from specheads.attention import mask as tree_mask
from specheads.attention.tree import Tree
from specheads.config import ConfigError, DoctorConfig, RunError
from specheads.doctor import run
from specheads.measure import installation
from specheads.measure.diagnose import Finding, examine
from tests.end_to_end.commands import start
from tests.end_to_end.conftest import Program
from tests.zoo import build


def findings(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None = None
) -> dict[str, Finding]:
    """Return what is found, by name."""
    return {finding.name: finding for finding in examine(model, tokenizer)}


def test_a_missing_device_is_said_beside_what_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The doctor is asked about a GPU where there is none, and says that all is well."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(installation, "try_imports", lambda modules: {})  # which takes long
    with pytest.raises(ConfigError, match="device=cuda, but torch finds no GPU here"):
        run(DoctorConfig(device="cuda"))
    assert "\nGPU " in capsys.readouterr().out


def test_a_sound_model_passes(tiny_model_dir: Path, program: Program) -> None:
    """Prevents a command that does not start, or an exit code that scripts cannot use."""
    done = program("doctor", f"model={tiny_model_dir}", "dtype=float32")
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert "LlamaForCausalLM (llama)" in lines["model"]
    assert lines["loaded"] == "float32, on cpu, sdpa attention"
    assert "258 '<eos>'" in lines["tokenizer"]
    assert "4 query heads share 2, without expanding it" in lines["cache"]
    assert "256 bytes per token" in lines["cache"]  # 2 layers, 2 heads of 8, keys and values, fp32
    assert "behind 64 tokens" in lines["bushy"]
    assert lines["tokens"].startswith("32 of 32")
    assert lines["verdict"].startswith("tree: ")


def test_a_path_that_is_not_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prevents a traceback for a typing mistake."""
    assert start(monkeypatch, "model=/no/such/model", command="doctor") == 2
    expected = "specheads: model.name=/no/such/model: there is no such folder\n"
    assert capsys.readouterr().err == expected


def test_mistakes_are_named(tmp_path: Path, tiny_export: Path) -> None:
    """Prevents an hour spent on why a folder is no model."""
    with pytest.raises(ConfigError, match="is an export; its base model is named in its config"):
        run(DoctorConfig(model=str(tiny_export)))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(ConfigError, match="cannot load"):
        run(DoctorConfig(model=str(tmp_path / "broken")))
    with pytest.raises(ConfigError, match="device_map must be empty or"):
        DoctorConfig(device_map="everywhere")


def test_the_embedded_model_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents a release whose own model is refused by its own doctor."""
    run(DoctorConfig(model="tinycode", dtype="float32", device="cpu"))
    assert "verdict    tree: " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["bloom", "mamba"])
def test_other_models_are_told_apart(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prevents a model without sdpa that cannot even be loaded; a refusal that exits with 0."""
    build(name).save_pretrained(tmp_path)
    config = DoctorConfig(model=str(tmp_path), dtype="float32", device="cpu")
    if name == "bloom":
        run(config)
        out = capsys.readouterr().out
        assert "verdict    chain only, 1 row at a time: BloomForCausalLM has ALiBi" in out
        assert "wide" not in out
    else:
        with pytest.raises(RunError, match="see verdict above"):
            run(config)
        out = capsys.readouterr().out
        assert "verdict    refused: MambaForCausalLM keeps a recurrent state" in out
        assert "batch" not in out
    assert "tokenizer  none comes with the model" in out


def test_windows_are_reached_where_they_can_be() -> None:
    """Prevents a clean bill for a window that no prompt went beyond."""
    found = findings(build("gemma2"))
    assert found["window"].text == "6 tokens, measured beyond it"
    assert "behind 14 tokens" in found["bushy"].text
    assert "softcap" in found["output"].text
    assert "expanded in every step" in found["cache"].text  # eager
    found = findings(build("mistral-window", sliding_window=4096))
    assert found["window"].text == "4,096 tokens, not reached; its mask rule was seen"


def test_what_is_wrong_is_found(
    tiny_llama: LlamaForCausalLM,
    byte_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prevents a doctor who finds nobody ill."""
    assert all(finding.ok for finding in findings(tiny_llama, byte_tokenizer).values())
    tiny_llama.generation_config.eos_token_id = [258, 999]
    found = findings(tiny_llama, byte_tokenizer)
    assert [name for name, finding in found.items() if not finding.ok] == ["tokenizer"]
    assert "[999], but there are 272" in found["tokenizer"].text
    byte_tokenizer.add_tokens([f"<{i}>" for i in range(20)])
    assert "do not belong together" in findings(tiny_llama, byte_tokenizer)["tokenizer"].text

    stock = tree_mask.causal_tree_mask

    def wide_ones_see_all(
        tree: Tree, num_cached: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        mask = stock(tree, num_cached, dtype, device)
        return torch.zeros_like(mask) if tree.num_nodes == 15 else mask

    monkeypatch.setattr(tree_mask, "causal_tree_mask", wide_ones_see_all)
    found = findings(tiny_llama)
    assert [name for name, finding in found.items() if not finding.ok] == ["wide", "verdict"]
    assert "wide above contradict it" in found["verdict"].text


def test_rows_and_tokens_are_compared(
    tiny_llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents checks that compare a thing with itself."""
    monkeypatch.setattr(
        tree_mask, "ragged_mask", lambda tree, starts, sizes: torch.zeros(3, 1, 24, 41)
    )
    found = findings(tiny_llama)
    assert not found["batch"].ok
    assert found["tokens"].ok

    def broken(*_: object) -> None:
        raise RuntimeError("kernel of 24 rows\nof a long story")

    monkeypatch.setattr(tree_mask, "ragged_mask", broken)
    assert findings(tiny_llama)["batch"].text == "cannot be run: kernel of 24 rows"
