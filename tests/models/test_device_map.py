"""A base model that accelerate spreads decodes as one that lies in one place.

Here the places are CPU and disk, where weights come and go around every layer. What needs several
GPUs is marked and was not run.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from specheads.attention.tree import default_tree
from specheads.decoding.loop import decode, plain_decode
from specheads.drafters.heads import HeadsDrafter
from specheads.models.base import input_device, load_base_model, output_device
from specheads.models.heads import MedusaHeads
from specheads.models.output import output_layer
from specheads.models.support import tree_support
from tests.end_to_end.commands import SHORT, on_files, start
from tests.scripted import ScriptedDrafter

MAPS: dict[str, dict[str, str | int]] = {
    "disk in the middle": {
        "model.embed_tokens": "cpu",
        "model.rotary_emb": "cpu",
        "model.layers.0": "disk",
        "model.layers.1": "cpu",
        "model.norm": "cpu",
        "lm_head": "cpu",
    },
    "ends on disk": {
        "model.embed_tokens": "disk",
        "model.rotary_emb": "cpu",
        "model.layers": "cpu",
        "model.norm": "disk",
        "lm_head": "disk",
    },
}


def decode_both(base: PreTrainedModel, ids: torch.Tensor) -> list[list[int]]:
    """Return what heads and a drafter that guesses well give, after plain decoding."""
    heads = MedusaHeads(4, 1, 32, 272).to(output_device(base))
    torch.manual_seed(0)
    torch.nn.init.normal_(heads.heads[0].lm_head.weight)
    plain = plain_decode(base, ids, max_new_tokens=24)
    drafters = [
        HeadsDrafter(heads, output_layer(base), default_tree(4, 9)),
        ScriptedDrafter(default_tree(4, 9), plain.sequences[0].tolist(), 0.8, vocab=272),
    ]
    runs = [decode(base, drafter, ids, max_new_tokens=24) for drafter in drafters]
    assert runs[1].accept_length > 1.5
    return [plain.new_tokens, *(run.new_tokens for run in runs)]


@pytest.mark.parametrize("name", MAPS)
def test_offloaded_layers_give_the_same_tokens(
    name: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Prevents token ids sent to a device that holds no data, and layers that forget their keys."""
    ids = torch.randint(256, (1, 12))
    whole = decode_both(load_base_model(str(tiny_model_dir)), ids)
    spread = load_base_model(str(tiny_model_dir), device_map=MAPS[name])
    assert any(parameter.is_meta for parameter in spread.parameters()), "nothing was offloaded"
    assert input_device(spread) == output_device(spread) == torch.device("cpu")
    assert tree_support(spread).kind == "tree"
    assert decode_both(spread, ids) == whole
    assert whole[0] == whole[1] == whole[2]


def test_a_map_of_one_device_is_that_device(tiny_model_dir: Path) -> None:
    """Prevents a map that is silently not used."""
    base = load_base_model(str(tiny_model_dir), device_map="cpu")
    assert input_device(base) == torch.device("cpu")
    ids = torch.randint(256, (1, 12))
    assert decode_both(base, ids) == decode_both(load_base_model(str(tiny_model_dir)), ids)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs; never run so far")
def test_two_gpus_give_the_same_tokens(tiny_model_dir: Path) -> None:
    """Prevents tensors of two devices meeting; ids enter at the first, heads sit at the last."""
    device_map: dict[str, str | int] = {
        "model.embed_tokens": 0,
        "model.rotary_emb": 0,
        "model.layers.0": 0,
        "model.layers.1": 1,
        "model.norm": 1,
        "lm_head": 1,
    }
    spread = load_base_model(str(tiny_model_dir), device_map=device_map)
    assert input_device(spread) == torch.device("cuda", 0)
    assert output_device(spread) == torch.device("cuda", 1)
    ids = torch.randint(256, (1, 12))
    found = decode_both(spread, ids.to("cuda:0"))
    assert found[0] == found[1] == found[2]
    assert found[0] == decode_both(load_base_model(str(tiny_model_dir), device="cuda:0"), ids)[0]


@pytest.mark.parametrize("recipe", ["medusa1", "eagle3", "mtp_finetune"])
def test_heads_train_on_a_base_that_is_spread(
    recipe: str, tiny_model_dir: Path, tiny_jsonl: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Hidden states left behind on another place than the heads, or layers that lost their weights.

    The heads are those of a base in one place, bit for bit.
    """
    words = [f"+recipe={recipe}", "optim=adamw", "steps=3", "features.dir=", "data.rows=2"]
    if recipe == "mtp_finetune":
        words += ["mtp.num_heads=3", "mtp.lm_head=own", "mtp.start=random"]
    found = []
    for name, where in (("whole", ""), ("spread", MAPS["disk in the middle"])):
        spread = ",".join(f"{part}: {place}" for part, place in dict(where or {}).items())
        files = on_files(tiny_model_dir, tiny_jsonl, tmp_path / name)
        given = [f"model.device_map={{{spread}}}"] if where else []
        assert start(monkeypatch, *files, *SHORT, *words, *given) == 0
        found.append(load_file(tmp_path / name / "export" / "model.safetensors"))
    for key, expected in found[0].items():
        assert torch.equal(found[1][key], expected), key


def test_what_a_spread_base_cannot_do_is_said(
    tiny_model_dir: Path, tiny_jsonl: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A base that is trained where it lies on disk would lose every step without a word."""
    files = on_files(tiny_model_dir, tiny_jsonl, tmp_path / "run")
    for words, said in (
        (["+recipe=medusa2", "model.device_map=auto"], "spreads a frozen base; medusa2 trains it"),
        (["+recipe=medusa1", "model.device_map=both"], "model.device_map must be one of auto"),
        (["+recipe=medusa1", "model.device_map=auto", "deepspeed=zero1"], "deepspeed must be none"),
        (
            ["+recipe=medusa1", "model.device_map={model: cpu, lm_head: disk}"],
            "puts the output matrix on disk",
        ),
    ):
        assert start(monkeypatch, *files, *SHORT, *words) == 2
        assert said in capsys.readouterr().err
