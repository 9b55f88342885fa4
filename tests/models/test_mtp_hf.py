"""Models with MTP heads as transformers loads them: nothing lost, nothing loaded unasked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_layers import MtpModel

from specheads.config import ConfigError
from specheads.formats import mtp_standard
from specheads.models import mtp_hf
from specheads.models.mtp import MtpHeads, block_config
from specheads.models.output import output_layer, packed_taps
from tests import zoo

VOCAB = 272
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "llama": ("llama", {}, {"variant": "causal", "lm_head": "own"}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}, {"variant": "parallel"}),
    "llama-scaled": ("llama", {"rope_parameters": SCALED}, {"variant": "sequential"}),
    "qwen3": ("qwen3", {}, {"variant": "parallel", "lm_head": "own"}),
    "mistral-window": ("mistral-window", {}, {"variant": "causal"}),
}
IDS = torch.arange(40, 58)[None]


def made(case: str) -> tuple[Any, MtpHeads]:
    """Return base and heads of one of CASES."""
    name, changes, options = CASES[case]
    base = zoo.build(name, vocab_size=VOCAB, std=0.15, **changes)
    heads = MtpHeads(2, block_config(base.config), VOCAB, **options)  # type: ignore[arg-type]
    zoo.redraw(heads, seed=4, std=0.15)  # type: ignore[arg-type]
    return base, heads.eval()


@torch.no_grad()
def guesses(base: Any, heads: MtpHeads) -> Tensor:
    """Return the logits [K, 1, T, V] of the heads over IDS."""
    positions = torch.arange(IDS.shape[1])[None]
    _, hidden = packed_taps(base, IDS, positions, heads.taps)
    heads.read_through(base)
    found = heads.contextual(hidden, positions, IDS)
    return heads.logits(found, output_layer(base))


@pytest.mark.parametrize("case", CASES)
def test_a_saved_model_comes_back_whole(
    case: str, tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    """A head's tensor drawn anew, or its rotary table left empty, only lowers acceptance."""
    base, heads = made(case)
    mtp_hf.write(tmp_path / "one", base, heads, byte_tokenizer)
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    first.save_pretrained(tmp_path / "two", max_shard_size="40KB")
    assert len(list((tmp_path / "two").glob("*.safetensors"))) > 1
    for folder in ("one", "two"):
        model, report = AutoModelForCausalLM.from_pretrained(
            tmp_path / folder, output_loading_info=True
        )
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys"))
        state = model.state_dict()
        for name, tensor in base.state_dict().items():
            assert torch.equal(state.pop(name), tensor)
        for name, tensor in heads.state_dict().items():
            assert torch.equal(state.pop(f"mtp.{name}"), tensor)
        assert not state
        assert torch.equal(model(IDS).logits, base(IDS).logits)
        torch.testing.assert_close(guesses(model, model.mtp), guesses(base, heads))


def test_bfloat16_and_what_must_stay_float32(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Loaded in one dtype, written in two: half of the tensors would be rounded at loading."""
    base, heads = made("llama")
    mtp_hf.write(tmp_path / "half", base.bfloat16(), heads, byte_tokenizer)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}
    assert AutoConfig.from_pretrained(tmp_path / "half").dtype == torch.bfloat16
    for name, tensor in heads.state_dict().items():
        assert torch.equal(model.state_dict()[f"mtp.{name}"], tensor.bfloat16())
    table = model.mtp.rotary_emb.inv_freq
    assert table.dtype == torch.float32 and torch.equal(table, heads.rotary_emb.inv_freq)  # type: ignore[arg-type]

    experts = zoo.build("deepseek_v3", vocab_size=VOCAB)
    drafting = MtpHeads(1, block_config(experts.config), VOCAB, variant="sequential")
    zoo.redraw(drafting)  # type: ignore[arg-type]
    gate = cast(Any, drafting.layer(0).block).mlp.gate
    gate.e_score_correction_bias.normal_()
    folder = tmp_path / "experts"
    mtp_standard.write(folder, experts, drafting, byte_tokenizer, dtype=torch.bfloat16)
    written = load_file(folder / "model.safetensors")
    kept = {name for name, tensor in written.items() if tensor.dtype == torch.float32}
    assert kept == {f"model.layers.{n}.mlp.gate.e_score_correction_bias" for n in (1, 2)}
    bias = written["model.layers.2.mlp.gate.e_score_correction_bias"]
    assert torch.equal(bias, gate.e_score_correction_bias)
    assert torch.equal(written["model.layers.2.mlp.gate.weight"], gate.weight.bfloat16())


def test_heads_can_be_left_on_disk(tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    """Heads that nobody asked for take memory, and a report of unknown tensors frightens."""
    base, heads = made("qwen3")
    mtp_hf.write(tmp_path / "model", base, heads, byte_tokenizer)
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", mtp_heads=None, output_loading_info=True
    )
    assert not any(report.values())
    assert not hasattr(model, "mtp") and torch.equal(model(IDS).logits, base(IDS).logits)
    model.save_pretrained(tmp_path / "less")
    less = AutoModelForCausalLM.from_pretrained(tmp_path / "less")
    assert torch.equal(less(IDS).logits, base(IDS).logits)
    decoder, report = AutoModel.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not report["missing_keys"] and type(decoder) is mtp_hf.Qwen3MtpModel
    assert torch.equal(decoder(IDS).last_hidden_state, base.model(IDS).last_hidden_state)


def test_generate_is_the_base_alone(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    """``generate`` has one next-token head; a second one joining in would change the text."""
    base, heads = made("mistral-window")
    base.generation_config.max_new_tokens = 7
    mtp_hf.write(tmp_path / "model", base, heads, byte_tokenizer)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    found = model.generate(IDS, do_sample=False)
    assert found.shape[1] == IDS.shape[1] + 7  # the base's own generation config came along
    assert torch.equal(found, base.generate(IDS, do_sample=False))


def test_only_the_layers_behind_the_base_are_ignored() -> None:
    """A pattern that also fits the base's layers would hide that one of them is missing."""
    for name in ("llama", "mistral", "qwen3"):
        base = zoo.build(name, vocab_size=VOCAB, num_hidden_layers=3)
        types = {"mtp_layer_types": ["full_attention"] * 2} if name == "qwen3" else {}
        config = mtp_hf.our_config(base.config, num_mtp_layers=2, **types)
        with torch.device("meta"):
            model: Any = mtp_hf.CLASSES[name].model(config)
        numbers = MtpModel.get_mtp_weights_regex(model)
        for layer in (0, 1, 2, 5, 13, 30, 31, 43):
            assert numbers.search(f"model.layers.{layer}.eh_proj.weight") is None
        for layer in (3, 4):
            assert numbers.search(f"model.layers.{layer}.eh_proj.weight")


def test_other_architectures_are_refused(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Written as a model of another architecture, the base would load and talk nonsense."""
    base = zoo.build("phi3", vocab_size=VOCAB)
    heads = MtpHeads(1, block_config(base.config), VOCAB)
    with pytest.raises(ConfigError, match="of type 'phi3', there are classes for llama, mistral,"):
        mtp_hf.write(tmp_path / "model", base, heads, byte_tokenizer)
    assert not (tmp_path / "model").exists()


def test_importing_specheads_imports_nothing() -> None:
    """Known to transformers at the price of importing it, ``--help`` would take seconds."""
    code = (
        "import sys; before = set(sys.modules); import specheads;"
        " new = {name.split('.')[0] for name in set(sys.modules) - before};"
        " print(sorted(new - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['specheads']"
