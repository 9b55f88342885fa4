"""Published Hydra checkpoints as native exports: the heads say the same, and decode."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from specheads import generate
from specheads.config import ConfigError, GenerateConfig
from specheads.models.checkpoint import Export, load_export, load_heads, read_config
from specheads.models.heads import MedusaHeads, low_rank_heads
from specheads.models.output import output_layer
from tests.damaged import damaged, flip, no_hang, replace_value
from tests.medusa_exports import SIZE, VOCAB, made
from tests.readers.hydra import Hydra

HEADS, LENGTH = 3, 6
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
ABOUT = {
    "hydra_num_heads": HEADS, "base_model_name_or_path": "x", "hidden_state_offset": 0,
}  # fmt: skip


def published(num_layers: int = 2, *, grounded: bool = True, prefix: Any = None) -> Hydra:
    """Return heads as their repository builds them, every number drawn."""
    torch.manual_seed(2)
    heads = Hydra(HEADS, num_layers, SIZE, VOCAB, grounded=grounded, prefix=prefix)
    for name, parameter in heads.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.15)
    return heads.eval()


def foreign(
    folder: Path, heads: Hydra, num_layers: int, hydra_head_arch: str = "mlp", **config: Any
) -> Path:
    """Write the folder that the repository would."""
    folder.mkdir()
    state = {name: tensor.clone() for name, tensor in heads.state_dict().items()}
    save_file(state, folder / "hydra_lm_head.safetensors")
    names = {"hydra_num_layers": num_layers, "hydra_head_arch": hydra_head_arch}
    about = {**names, **ABOUT, **config}
    (folder / "config.json").write_text(json.dumps(about))
    return folder


@torch.no_grad()
def inputs() -> tuple[Tensor, Tensor]:
    """Return hidden states [2, T, d] and token ids [2, T + K]."""
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(2, LENGTH, SIZE, generator=generator)
    ids = torch.randint(0, 256, (2, LENGTH + HEADS), generator=generator)
    return hidden, ids


@torch.no_grad()
def said(export: Export) -> tuple[Tensor, Tensor]:
    """Return the logits [K, 2, T, V] of imported heads, and what they read [2, T, d]."""
    hidden, ids = inputs()
    heads, output = export.heads, output_layer(export.base)
    read = heads.contextual(hidden, torch.arange(LENGTH).expand(2, -1), ids)
    after = torch.stack([ids[:, j : j + LENGTH] for j in range(1, HEADS + 1)], dim=-1)
    return heads.logits(read, output, after), read


KINDS = {
    "mlp": (1, True, False), "mlp-3": (3, True, False), "prefix-mlp": (2, True, True),
    "prefix-mlp-4": (4, True, True), "ungrounded": (2, False, False),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_heads_say_what_they_said(
    kind: str, tiny_model_dir: Path, tiny_llama: LlamaForCausalLM, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """One matrix for another, an embedding normed or one place off: only the guesses show it."""
    num_layers, grounded, prefix = KINDS[kind]
    config = tiny_llama.config if prefix else None
    heads = published(num_layers, grounded=grounded, prefix=config)
    arch = "prefix-mlp" if prefix else "mlp"
    folder = foreign(tmp_path / "hydra", heads, num_layers, arch, grounded_heads=grounded)
    back = made(folder, tmp_path / "back", base=str(tiny_model_dir))
    info = read_config(back)
    assert info["kind"] == ("hydra" if grounded else "medusa")
    assert info["num_layers"] == num_layers - grounded and info.get("joined", False) == grounded
    export = load_export(back)
    hidden, ids = inputs()
    with torch.no_grad():
        expected = heads.logits(hidden, export.base.get_input_embeddings()(ids))
    found, read = said(export)
    torch.testing.assert_close(found, expected, **CLOSE)

    # asked level by level, as while decoding
    output = output_layer(export.base)
    with torch.no_grad():
        walk = export.heads.steps(output, HEADS)()(read[:, -1], ids[:, LENGTH])
        for i in range(HEADS):
            torch.testing.assert_close(walk.logits()[:, 0], expected[i, :, -1], **CLOSE)
            if i + 1 < HEADS:
                walk.descend(ids[:, LENGTH + i + 1, None], torch.tensor([0]))
    if prefix:  # token by token, as while decoding
        memory: Any = export.heads.memory(2)
        with torch.no_grad():
            for t in range(LENGTH):
                memory, last = memory.append(hidden[:, t : t + 1], [1, 1])
        torch.testing.assert_close(last, read[:, -1], **CLOSE)
        assert "embed_tokens.weight is left out: nothing reads it" in capsys.readouterr().out

    texts = []
    for plain in (False, True):
        capsys.readouterr()
        generate.run(
            GenerateConfig(checkpoint=str(back), prompt="def f(", max_new_tokens=12, plain=plain)
        )
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_joined_heads_are_no_others(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Written again without the word, two matrices would be looked for under other names."""
    folder = foreign(tmp_path / "hydra", published(), 2, grounded_heads=True)
    back = made(folder, tmp_path / "back", base=str(tiny_model_dir))
    half = made(back, tmp_path / "half", dtype="bfloat16")
    assert read_config(half)["joined"] is True
    heads = load_heads(back)
    assert isinstance(heads, MedusaHeads)
    smaller = low_rank_heads(heads, 8)
    assert smaller.joined and smaller.state_dict().keys() >= {"heads.2.joined.gate.weight"}
    with pytest.raises(ValueError, match="condition must be true where joined is, got False"):
        MedusaHeads(1, 1, SIZE, VOCAB, joined=True)
    config = json.loads((back / "config.json").read_text())
    (back / "config.json").write_text(json.dumps({**config, "joined": 1}))
    with pytest.raises(ConfigError, match="joined is 1, expected bool"):
        read_config(back)


def test_a_pickle_on_request(tiny_model_dir: Path, tmp_path: Path) -> None:
    """All published Hydra heads are .pt files."""
    heads = published(3)
    folder = foreign(tmp_path / "hydra", heads, 3)
    export = load_export(made(folder, tmp_path / "one", base=str(tiny_model_dir)))
    (folder / "hydra_lm_head.safetensors").unlink()
    torch.save(heads.state_dict(), folder / "hydra_lm_head.pt")
    with pytest.raises(ConfigError, match=r"hydra_lm_head\.pt is pickle: allow_pickle=true"):
        made(folder, tmp_path / "two", base=str(tiny_model_dir))
    two = made(folder, tmp_path / "two", base=str(tiny_model_dir), allow_pickle=True)
    assert torch.equal(said(load_export(two))[0], said(export)[0])


def test_configs_lie_about_hydra_too(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The number of heads is an option of their loader: any may stand in the file."""
    heads = published(2)
    folder = foreign(tmp_path / "hydra", heads, 2, hydra_num_heads=5)
    back = made(folder, tmp_path / "back", base=str(tiny_model_dir))
    assert read_config(back)["num_heads"] == HEADS
    assert "3 hydra heads of" in capsys.readouterr().out
    folder = foreign(tmp_path / "tied", heads, 4)  # savers that leave one of three names
    back = made(folder, tmp_path / "tied_back", base=str(tiny_model_dir))
    assert read_config(back)["num_layers"] == 3
    assert "one block stands for 3 of the 4 layers" in capsys.readouterr().out


def test_what_cannot_be_brought_in_is_said(
    tiny_model_dir: Path, tiny_llama: LlamaForCausalLM, tmp_path: Path,
    make_tiny_llama: Callable[..., LlamaForCausalLM], byte_tokenizer: Any,
) -> None:  # fmt: skip
    """Heads that are nearly right guess nothing right, and no error ever says so."""
    heads, with_prefix = published(), published(prefix=tiny_llama.config)
    far = make_tiny_llama(rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})
    far.save_pretrained(tmp_path / "far")
    byte_tokenizer.save_pretrained(tmp_path / "far")
    here, there = str(tiny_model_dir), str(tmp_path / "far")
    extra = {"hydra_mlp.0.0.norm.weight": torch.zeros(SIZE)}
    table = {"prefix_embeding_layer.rotary_emb.inv_freq": torch.arange(4.0)}
    cut = {"prefix_embeding_layer.norm.weight": None}
    cases: list[tuple[Hydra, dict[str, Any], dict[str, Any], str, str]] = [
        (heads, {"hydra_head_arch": "eagle-attn"}, {}, here, "hydra_head_arch is 'eagle-attn'"),
        (heads, {"hidden_state_offset": 1}, {}, here, "hidden_state_offset is 1: these heads read"),
        (heads, {}, extra, here, r"hydra_mlp\.0\.0\.norm\.weight is no tensor of Hydra heads"),
        (heads, {}, {"hydra_lm_head.1.bias": None}, here, "lacks the output bias of head 1"),
        (heads, {}, {"hydra_mlp.1.0.linear.bias": None}, here, "lacks linear.bias of layer 0 of"),
        (heads, {}, {"hydra_lm_head.1.bias": torch.zeros(9)}, here, r"has shape \[9\], the base"),
        (with_prefix, {}, {}, there, "has the rotary positions of its base, .*500000"),
        (with_prefix, {}, table, here, "is not the rotary table of theta 10000"),
        (with_prefix, {}, cut, here, r"lacks prefix_embeding_layer\.norm\.weight"),
    ]
    for i, (module, config, change, base, message) in enumerate(cases):
        folder = foreign(tmp_path / f"hydra{i}", module, 2, **config)
        state = {name: tensor.clone() for name, tensor in module.state_dict().items()} | change
        state = {name: tensor for name, tensor in state.items() if tensor is not None}
        save_file(state, folder / "hydra_lm_head.safetensors")
        with pytest.raises(ConfigError, match=message) as refused:
            made(folder, tmp_path / "back", base=base)
        assert "\n" not in str(refused.value) and not (tmp_path / "back").exists()


@pytest.mark.parametrize("saved", ["safetensors", "pt"])
def test_damage_is_one_line(
    saved: str, tiny_model_dir: Path, tiny_llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    """A stranger's folder may hold anything: no traceback, no endless wait, nothing half done."""
    heads = published(prefix=tiny_llama.config)
    folder, random, refused = foreign(tmp_path / "hydra", heads, 2, "prefix-mlp"), Random(3), 0
    weights = folder / f"hydra_lm_head.{saved}"
    if saved == "pt":
        (folder / "hydra_lm_head.safetensors").unlink()
        torch.save(heads.state_dict(), weights)
    for number in range(20):
        file = folder / "config.json" if number % 2 else weights
        data = file.read_bytes()
        changed = (
            replace_value(data.decode(), random).encode() if number % 2 else flip(data, random)
        )
        with damaged(file, changed), no_hang():
            output = tmp_path / f"back{number}"
            try:
                made(folder, output, base=str(tiny_model_dir), allow_pickle=True)
            except ConfigError as error:
                refused += 1
                assert "\n" not in str(error) and not output.exists()
    assert 5 < refused < 20
