"""MTP heads in foreign formats, used as they will be: by transformers, in fresh processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.generation.candidate_generator import MTPCandidateGenerator

from specheads import export
from specheads.attention.tree import default_tree
from specheads.config import ConfigError, ExportConfig
from specheads.formats import mtp_standard
from specheads.models.base import load_base_model, load_tokenizer
from specheads.models.checkpoint import origin, save_export
from specheads.models.heads import MedusaHeads
from specheads.models.mtp import MtpHeads, block_config
from specheads.models.output import output_layer
from tests import processes, zoo

FEW = 12  # tokens: so few that some drafts are right by chance
GLM = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
CASES = {
    "llama-3": ("llama", {"tie_word_embeddings": True}, 3, False),
    "llama-first": ("llama", {}, 2, True),
    "qwen3-1": ("qwen3", {}, 1, False),
    "mistral-window-3": ("mistral-window", {}, 3, False),
    "deepseek_v3-3": ("deepseek_v3", {}, 3, True),
    "glm4_moe-1": ("glm4_moe", {}, 1, False),
}


def made(
    name: str, num_heads: int, *, vocab_size: int = FEW, hidden_first: bool = False, **changes: Any
) -> tuple[Any, MtpHeads]:
    """Return a base and sequential heads on it, with random weights."""
    if name == "glm4_moe":
        zoo.MODELS.setdefault(name, zoo.Kind(name, GLM))
    base = zoo.build(name, vocab_size=vocab_size, std=0.2, **changes)
    config = block_config(base.config)
    heads = MtpHeads(num_heads, config, vocab_size, variant="sequential", hidden_first=hidden_first)
    zoo.redraw(heads, seed=4, std=0.2)  # type: ignore[arg-type]
    return base, heads.eval()


@torch.no_grad()
def guesses(model: Any, heads: MtpHeads, text: Tensor, drafted: Tensor) -> Tensor:
    """Return logits [K, V] of what follows ``text`` [T], the slow way: everything again.

    Head i reads the whole text and the first i drafted tokens, whatever was drafted before.
    """
    final = model.model(text[None, :-1]).last_hidden_state
    length = final.shape[1]
    hidden = torch.cat([final, final.new_zeros(1, len(drafted) + 1, final.shape[2])], dim=1)
    tokens, positions = torch.cat([text, drafted])[None], torch.arange(hidden.shape[1])[None]
    heads.read_through(model)
    found = heads.contextual(hidden, positions, tokens)
    return heads.logits(found, output_layer(model))[:, 0, length - 1]


@pytest.mark.parametrize("case", CASES)
def test_transformers_drafts_with_these_very_heads(
    case: str, tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Verified drafts cannot go wrong, only miss: swapped halves or norms would stay unseen."""
    name, changes, num_heads, first = CASES[case]
    base, heads = made(name, num_heads, hidden_first=first, **changes)
    mtp_standard.write(tmp_path / "model", base, heads, byte_tokenizer)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for layer in mtp_standard.unlisted_layers(base, num_heads):
        model._keys_to_ignore_on_load_unexpected.add(rf"model\.layers\.{layer}\.")
    calls = []
    draft = MTPCandidateGenerator.get_candidates

    def spy(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = draft(self, input_ids, *args, **kwargs)
        calls.append((input_ids[0].clone(), found[0][0, input_ids.shape[1] :].clone()))
        return found

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", spy)
    prompt = torch.arange(1, FEW)[None]
    plain = model.generate(prompt, do_sample=False, max_new_tokens=24)
    assert torch.equal(plain, base.generate(prompt, do_sample=False, max_new_tokens=24))
    assert torch.equal(
        model.generate(prompt, do_sample=False, max_new_tokens=24, use_mtp=True), plain
    )
    checked = [call for call in calls if len(call[1])]
    assert 24 / (num_heads + 1) <= len(checked) < 24, "no draft was right, or all were"
    for text, drafted in checked:
        logits = guesses(model, heads, text, drafted)
        assert drafted.shape == (num_heads,)
        chosen = logits.gather(1, drafted[:, None])[:, 0]
        torch.testing.assert_close(chosen, logits.max(dim=-1).values, atol=1e-4, rtol=0)


def test_the_files_are_those_of_transformers(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    """One name of our own, and an engine that skips unknown tensors drafts with random ones."""
    base, heads = made("deepseek_v3", 2)
    mtp_standard.write(tmp_path / "model", base, heads, byte_tokenizer)
    base.save_pretrained(tmp_path / "base")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    own = load_file(tmp_path / "base" / "model.safetensors")
    last = {name for name in own if name.startswith("model.layers.1.")}  # with experts, as all here
    layers = {
        name.replace("layers.1.", f"layers.{layer}.") for name in last for layer in (2, 3)
    } | {
        f"model.layers.{layer}.{part}.weight"
        for layer in (2, 3)
        for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    }
    assert tensors.keys() == own.keys() | layers
    assert all(torch.equal(tensors[name], own[name]) for name in own)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    expected = json.loads((tmp_path / "base" / "config.json").read_text())
    assert config == expected | {"num_nextn_predict_layers": 2}

    base, heads = made("qwen3", 2)
    mtp_standard.write(tmp_path / "qwen3", base, heads, byte_tokenizer)
    config = json.loads((tmp_path / "qwen3" / "config.json").read_text())
    assert config["model_type"] == "qwen3_mtp" and config["num_mtp_layers"] == 2
    assert config["mtp_layer_types"] == ["full_attention"] * 2
    assert config["architectures"] == ["Qwen3MtpForCausalLM"]


def test_what_the_standard_cannot_hold_is_refused(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    """A folder that loads and drafts something else has no error that anyone would see."""
    base, heads = made("llama", 1)
    block = block_config(base.config)
    other = block_config(base.config)
    other.rope_parameters = {"rope_type": "default", "rope_theta": 77.0}
    phi, _ = made("phi3", 1)
    sequential: dict[str, Any] = {"variant": "sequential"}
    for model, found, message in (
        (base, MedusaHeads(1, 1, 32, FEW), "sequential MTP heads, these are medusa ones"),
        (base, MtpHeads(1, block, FEW), "sequential MTP heads, these are parallel ones"),
        (base, MtpHeads(1, block, FEW, lm_head="own", **sequential), "these have their own"),
        (base, MtpHeads(1, other, FEW, **sequential), "rope_parameters is .*77.0.*, the base's"),
        (phi, heads, "of type 'phi3', the standard is known for llama, mistral, qwen3, deepseek"),
    ):
        with pytest.raises(ConfigError, match=message) as refused:
            mtp_standard.write(tmp_path / "model", model, found, byte_tokenizer)
        assert "\n" not in str(refused.value) and not (tmp_path / "model").exists()


def write_export(path: Path, model: Path, heads: MtpHeads | MedusaHeads) -> Path:
    """Write heads of the tiny model as an export of ours, and return its folder."""
    info, tree = origin(str(model), {"recipe": "none"}), default_tree(heads.num_heads, 6)
    save_export(path, heads, load_tokenizer(str(model)), tree, info)
    return path


def exported(path: Path, model: Path, form: str, **options: Any) -> Path:
    """Write an export with MTP heads, and it again in the format ``form``."""
    base = load_base_model(str(model))
    heads = MtpHeads(options.pop("num_heads"), block_config(base.config), 272, **options)
    zoo.redraw(heads, seed=4, std=0.2)  # type: ignore[arg-type]
    source = write_export(path.with_name(f"{path.name}-export"), model, heads)
    export.run(ExportConfig(checkpoint=str(source), output=str(path), format=form))
    return path


def in_a_process(folder: Path, code: str) -> dict[str, Any]:
    """Run ``code`` in a process without specheads, which prints JSON; return that."""
    done = processes.run("-c", code, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "UNEXPECTED" not in done.stdout + done.stderr, "a report of unknown tensors"
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


USE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

prompt = torch.arange(60, 75)[None]
found = {}
def use(name, mtp=True, patterns=()):
    model = AutoModelForCausalLM.from_pretrained(name)
    model._keys_to_ignore_on_load_unexpected |= set(patterns)
    settings = {"do_sample": False, "max_new_tokens": 12}
    text = model.generate(prompt, **settings)[0].tolist()
    same = mtp and model.generate(prompt, use_mtp=True, **settings)[0].tolist() == text
    with torch.no_grad():
        logits = model(prompt).logits[0, -1].tolist()
    found[name] = {"class": type(model).__name__, "text": text, "same": same, "logits": logits}
"""


def test_with_specheads_imported_and_nothing_else(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Registered only where some module of ours was loaded, it works in our tests alone."""
    for number in (1, 3):
        exported(
            tmp_path / f"mtp{number}", tiny_model_dir, "mtp_standard",
            num_heads=number, variant="sequential",
        )  # fmt: skip
    exported(tmp_path / "full", tiny_model_dir, "hf", num_heads=2, variant="causal", lm_head="own")
    ends = """
use("mtp1"), use("mtp3"), use("full", mtp=False)
found["tokens"] = AutoTokenizer.from_pretrained("full")("def f(x):")["input_ids"]
print(json.dumps(found))
"""
    found = in_a_process(tmp_path, f"import specheads\n{USE}{ends}")
    base: Any = load_base_model(str(tiny_model_dir))
    prompt = torch.arange(60, 75)[None]
    text = base.generate(prompt, do_sample=False, max_new_tokens=12)[0].tolist()
    for name in ("mtp1", "mtp3", "full"):
        assert found[name]["class"] == "LlamaMtpForCausalLM"
        assert found[name]["text"] == text
    assert found["mtp1"]["same"] and found["mtp3"]["same"]
    assert found["tokens"] == load_tokenizer(str(tiny_model_dir))("def f(x):")["input_ids"]
    with torch.no_grad():
        expected = base(prompt).logits[0, -1]
    torch.testing.assert_close(torch.tensor(found["full"]["logits"]), expected, atol=1e-6, rtol=0)


def test_with_transformers_alone(
    tiny_model_dir: Path, tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    """What is sold as plain must not need us, nor must heads of an architecture that has such."""
    exported(tmp_path / "plain", tiny_model_dir, "plain", num_heads=2, variant="parallel")
    exported(tmp_path / "full", tiny_model_dir, "hf", num_heads=2, variant="parallel")
    # as many layers as the published one, whose class looks for layer 61 and for no other
    deep = {"num_hidden_layers": 61, "first_k_dense_replace": 60}
    for name, number, changes in (("deep1", 1, deep), ("deep3", 3, {})):
        base, heads = made("deepseek_v3", number, vocab_size=272, **changes)
        mtp_standard.write(tmp_path / name, base, heads, byte_tokenizer)
        layers = mtp_standard.unlisted_layers(base, number)
        assert layers == ([] if number == 1 else [2, 3, 4])
    ends = r"""
use("plain", mtp=False), use("deep1")
import logging; logging.disable(logging.WARNING)  # its class does not know these layers
use("deep3", patterns=[r"model\.layers\.(2|3|4)\."])
assert not any(name.startswith("specheads") for name in sys.modules)
print(json.dumps(found))
"""
    found = in_a_process(tmp_path, USE + ends)
    assert found["plain"]["class"] == "LlamaForCausalLM"
    assert json.loads((tmp_path / "plain" / "config.json").read_text())["model_type"] == "llama"
    full: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "full")
    with torch.no_grad():
        expected = full(torch.arange(60, 75)[None]).logits[0, -1]
    torch.testing.assert_close(torch.tensor(found["plain"]["logits"]), expected, atol=1e-6, rtol=0)
    for name in ("deep1", "deep3"):
        assert found[name]["class"] == "DeepseekV3ForCausalLM" and found[name]["same"]


def test_the_command_refuses_in_one_line(
    tiny_model_dir: Path, tiny_export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half a folder, or one in another format than was asked for, is found out much later."""
    parallel = tmp_path / "parallel"
    assert exported(parallel, tiny_model_dir, "hf", num_heads=1, variant="parallel").is_dir()
    assert "model.mtp" in capsys.readouterr().out
    source, low_rank = f"{parallel}-export", {"lm_head": "low_rank"}
    for checkpoint, settings, message in (
        (tiny_export, {"format": "hf"}, "format=hf holds base and MTP heads, .* is medusa; plain"),
        (
            tiny_export,
            {"format": "mtp_standard"},
            "format=mtp_standard holds .* MTP heads",
        ),
        (source, {"format": "mtp_standard"}, "holds sequential MTP heads, these are parallel"),
        (source, {"format": "mlx"}, "format must be one of native, plain, draft, hf,"),
        (source, {"format": "hf", **low_rank}, "lm_head must be keep with format=hf"),
        (source, low_rank, "low_rank rank=64 is not for MTP heads"),
        (source, {}, "nothing to change: .* or another format="),
    ):
        with pytest.raises(ConfigError, match=message) as refused:
            values = {"checkpoint": str(checkpoint), "output": str(tmp_path / "made"), **settings}
            export.run(ExportConfig(**values))  # type: ignore[arg-type]
        assert "\n" not in str(refused.value) and not (tmp_path / "made").exists()
