"""DFlash, DSpark and EAGLE-3 in other readers' hands: logits, names, numbers, and the way back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from specheads.attention.tree import Tree
from specheads.config import ConfigError, ExportConfig, HeadsConfig
from specheads.export import run as export
from specheads.formats.drafters import LAYOUTS
from specheads.models.base import load_base_model, load_tokenizer
from specheads.models.checkpoint import KINDS, load_export, origin, save_export
from specheads.models.output import output_layer, packed_taps
from tests.models.test_heads_contract import drawn
from tests.readers.drafters import DFlash, Drafter, Eagle3
from tests.toys import full_logits

STEPS, AT = 3, 6
Damage = Callable[[dict[str, Any], dict[str, Tensor]], None]
PUBLISHED = {"form": "published", "mask_token_id": 256}
DSPARK: dict[str, Any] = {"correction": "markov", "markov_rank": 6}
# what is exported, the format, and who reads it
CASES: dict[str, tuple[HeadsConfig, str, type[Drafter]]] = {
    "dflash": (
        HeadsConfig(
            "block", {**PUBLISHED, "sample_from_anchor": False}, STEPS, 2, "shared"
        ),
        "dflash", DFlash,
    ),
    "dflash, reduced": (
        HeadsConfig(
            "block", {**PUBLISHED, "sample_from_anchor": False}, STEPS, 1, "pruned", num_kept=90
        ),
        "dflash", DFlash,
    ),
    "dspark": (HeadsConfig("block", PUBLISHED, STEPS, 2, "shared", **DSPARK), "dspark", DFlash),
    "dspark, reduced": (
        HeadsConfig("block", PUBLISHED, STEPS, 1, "shared_pruned", num_kept=90, **DSPARK),
        "dspark", DFlash,
    ),
    "eagle3": (HeadsConfig("eagle3", {}, STEPS, 1, "pruned", num_kept=90), "eagle3", Eagle3),
    "eagle3, shared": (HeadsConfig("eagle3", {}, STEPS, 1, "shared"), "eagle3", Eagle3),
    "eagle3, own": (
        HeadsConfig("eagle3", {"norm_before_residual": True, "taps": [0, 1]}, STEPS, 1, "own"),
        "eagle3", Eagle3,
    ),
    "eagle3, all norms": (
        HeadsConfig(
            "eagle3",
            {"norm_before_fc": True, "fc_norm": True, "norm_output": True, "taps": [0, 1]},
            STEPS, 1, "shared_pruned", num_kept=90,
        ),
        "eagle3", Eagle3,
    ),
}  # fmt: skip


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return the folder of a base of four layers, so that taps can be off by one."""
    from tests.conftest import build_byte_tokenizer, build_tiny_llama

    folder = tmp_path / "base"
    build_tiny_llama(num_hidden_layers=4).save_pretrained(folder)
    build_byte_tokenizer().save_pretrained(folder)
    return folder


def make(name: str, base: Path, tmp_path: Path) -> Path:
    """Return a native export of one case, every tensor drawn."""
    settings = CASES[name][0]
    model = load_base_model(str(base), dtype="float32")
    output = output_layer(model)
    heads: Any = KINDS[settings.kind].from_settings(settings, model, output)
    kept = torch.randperm(output.weight.shape[0])[: heads.num_outputs]
    heads.init_from_output(output.weight, kept)
    drawn(heads)
    chain = Tree.chain(heads.num_heads)
    # heads in float32 that were written as the base is loaded would lose half of their digits
    info = origin(str(base), {"recipe": "none", "steps": 0}, dtype="bfloat16")
    save_export(tmp_path / "native", heads, load_tokenizer(str(base)), chain, info)
    return tmp_path / "native"


@torch.no_grad()
def ours(folder: Path, base: Path, ids: list[int]) -> Tensor:
    """Return the logits [K, V] of a native export behind position ``AT``, -inf where none."""
    loaded = load_export(folder, base=str(base), dtype="float32")
    heads: Any = loaded.heads
    tokens, places = torch.tensor([ids]), torch.arange(len(ids))[None]
    hidden = packed_taps(loaded.base, tokens, places, heads.taps)[1]
    made = heads.contextual(hidden, places, tokens)[:, :, AT]
    ahead = tokens[:, AT + 1 : AT + 1 + STEPS]
    return full_logits(heads, heads.logits(made, output_layer(loaded.base), ahead))[:, 0]


@torch.no_grad()
def theirs(reader: type[Drafter], folder: Path, base: Path, ids: list[int]) -> Tensor:
    """Return what an engine's reader makes of a written folder, spread over the vocabulary."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    found = model(torch.tensor([ids]), output_hidden_states=True)
    drafter: Any = reader(folder, model.get_input_embeddings().weight, model.lm_head.weight)
    logits = drafter.logits(ids, list(found.hidden_states), AT, STEPS)
    full = torch.full((STEPS, len(model.lm_head.weight)), -torch.inf)
    for step, each in enumerate(logits):
        for place, value in enumerate(each):
            full[step, drafter.token(place)] = value
    return full


ALL = [(name, layout) for name in CASES for layout in LAYOUTS]


@pytest.mark.parametrize(("name", "layout"), ALL)
def test_engines_read_the_same_logits_and_so_do_we(
    name: str, layout: str, base: Path, tmp_path: Path
) -> None:
    """A tap off by one, ids for offsets or another norm costs acceptance, and no error says so."""
    settings, form, reader = CASES[name]
    native, written = make(name, base, tmp_path), tmp_path / f"out-{form}"
    asked = {"format": form, "layout": layout, "dtype": "float32"}
    export(ExportConfig(checkpoint=str(native), output=str(written), **asked))
    ids = torch.randint(0, 256, (AT + STEPS + 4,)).tolist()
    expected = ours(native, base, ids)
    torch.testing.assert_close(theirs(reader, written, base, ids), expected, rtol=1e-5, atol=1e-5)
    reduced = "pruned" in settings.lm_head
    assert ("d2t" in load_file(written / "model.safetensors")) == reduced
    # and back again
    back = tmp_path / "back"
    export(ExportConfig(checkpoint=str(written), base=str(base), output=str(back)))
    again = ours(back, base, ids)
    if layout == "native" and form == "eagle3":  # its config names no number of steps
        assert load_export(back, base=str(base)).heads.num_heads == 5
        again = again[:STEPS]
    torch.testing.assert_close(again, expected, rtol=1e-5, atol=1e-5)


def damaged(damage: Damage, base: Path, tmp_path: Path, name: str = "eagle3") -> tuple[Path, Path]:
    """Return a native export, and what it was written as, changed by ``damage``."""
    native, written = make(name, base, tmp_path), tmp_path / "out"
    export(ExportConfig(checkpoint=str(native), output=str(written), format=CASES[name][1]))
    config = json.loads((written / "config.json").read_text())
    tensors = load_file(written / "model.safetensors")
    damage(config, tensors)
    (written / "config.json").write_text(json.dumps(config))
    save_file(tensors, written / "model.safetensors")
    return native, written


def off_by_one(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Tap the next layers."""
    ids = config["eagle_aux_hidden_state_layer_ids"]
    config["eagle_aux_hidden_state_layer_ids"] = [each + 1 for each in ids]


def ids_for_offsets(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write token ids as d2t."""
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def other_norm(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Read the residual from the other side of its norm."""
    config["norm_before_residual"] = not config["norm_before_residual"]


@pytest.mark.parametrize("damage", [off_by_one, ids_for_offsets, other_norm])
def test_the_reader_sees_what_engines_would_not(damage: Damage, base: Path, tmp_path: Path) -> None:
    """A reader that makes the same of a damaged folder proves nothing about a whole one."""
    native, written = damaged(damage, base, tmp_path)
    ids = torch.randint(0, 256, (AT + STEPS + 4,)).tolist()
    try:
        found = theirs(Eagle3, written, base, ids)
    except IndexError:  # an id beyond the vocabulary, or a state behind the last layer
        return
    assert not torch.allclose(found, ours(native, base, ids), atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "asked", "message"),
    [
        (HeadsConfig("block", {}, STEPS, 1, "shared"), {"format": "dflash"}, "joined form"),
        (CASES["dspark"][0], {"format": "dflash"}, "format=dspark holds"),
        (CASES["dflash"][0], {"format": "dspark"}, "format=dflash holds"),
        (
            HeadsConfig("block", PUBLISHED, STEPS, 1, "shared"),
            {"format": "dflash", "layout": "native"}, "layout=native has no key for",
        ),
        (HeadsConfig("block", PUBLISHED, STEPS, 1, "own"), {"format": "dflash"}, "of their own"),
        (
            HeadsConfig("block", {**PUBLISHED, "window": 4}, STEPS, 1, "shared"),
            {"format": "dflash"}, "counted from the root",
        ),
        (CASES["eagle3"][0], {"format": "dflash"}, "which format=eagle3 holds"),
        (HeadsConfig("eagle3", {"taps": [0, -1]}, STEPS), {"format": "eagle3"}, "final state"),
        (CASES["eagle3"][0], {"format": "plain", "layout": "native"}, "layout=native is for"),
        (CASES["eagle3"][0], {"format": "eagle3", "output": "my-dspark"}, "'dspark'"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_one_line(
    settings: HeadsConfig, asked: dict[str, Any], message: str, base: Path, tmp_path: Path
) -> None:
    """Heads that an engine decodes otherwise than they were trained draft nothing there."""
    model = load_base_model(str(base), dtype="float32")
    heads: Any = KINDS[settings.kind].from_settings(settings, model, output_layer(model))
    info = origin(str(base), {"recipe": "none", "steps": 0})
    tokenizer = load_tokenizer(str(base))
    save_export(tmp_path / "native", heads, tokenizer, Tree.chain(heads.num_heads), info)
    output = tmp_path / asked.get("output", "out")
    config = ExportConfig(checkpoint=str(tmp_path / "native"), output=str(output), format="native")
    with pytest.raises(ConfigError, match=message) as caught:
        export(replace(config, **{**asked, "output": str(output)}))
    assert "\n" not in str(caught.value) and not output.exists()


def changed(key: str, value: object) -> Damage:
    """Return what sets a key of the layer's config, or of all."""

    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        layer = config["transformer_layer_config"]
        (layer if key in layer else config)[key] = value

    return change


def without(name: str) -> Damage:
    """Return what takes a tensor away."""
    return lambda config, tensors: tensors.__delitem__(name)


def more(name: str) -> Damage:
    """Return what adds a tensor."""
    return lambda config, tensors: tensors.__setitem__(name, torch.zeros(4))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (ids_for_offsets, "d2t, how far each token.s id lies from its place, holds"),
        (without("d2t"), "d2t is missing"),
        (without("fc.weight"), "lacks fc.weight"),
        (more("layers.1.mlp.weight"), "layers.1.mlp.weight is no tensor of a eagle3 drafter"),
        (more("embed_tokens.weight"), "is not the base's embedding"),
        (changed("hidden_size", 64), "hidden_size is 64, expected 32"),
        (changed("attention_bias", True), "attention_bias is True, expected False"),
        (changed("head_dim", 1 << 20), "head_dim"),
        (changed("num_attention_heads", None), "num_attention_heads"),
        (changed("eagle_aux_hidden_state_layer_ids", [0]), "the layers that are tapped"),
        (changed("eagle_aux_hidden_state_layer_ids", None), "the layers that are tapped"),
        (changed("rope_parameters", {"rope_type": "yarn"}), "plain rotary positions"),
    ],
)
def test_a_damaged_folder_is_one_line(
    damage: Damage,
    message: str,
    base: Path,
    tmp_path: Path,
) -> None:
    """A folder that says one thing and holds another becomes heads that guess nothing."""
    native, written = damaged(damage, base, tmp_path)
    back = tmp_path / "back"
    with pytest.raises(ConfigError, match=message) as caught:
        export(ExportConfig(checkpoint=str(written), base=str(base), output=str(back)))
    assert "\n" not in str(caught.value) and not back.exists()


KEYS = (
    "speculators_config", "transformer_layer_config", "rope_parameters", "layer_types",
    "block_size", "draft_vocab_size", "num_attention_heads", "num_hidden_layers", "markov_rank",
    "mask_token_id", "aux_hidden_state_layer_ids", "architectures", "rms_norm_eps",
    "intermediate_size",
)  # fmt: skip


@pytest.mark.parametrize("value", ["x", 1 << 40, -3, [1], {"a": 2}], ids=str)
def test_a_strangers_config_never_ends_in_a_traceback(
    value: object, base: Path, tmp_path: Path
) -> None:
    """A key of another type, or a number that builds modules for hours, is found by its users."""
    for key in KEYS:
        place = tmp_path / key
        place.mkdir()
        written = damaged(changed(key, value), base, place, "dspark")[1]
        back = place / "back"
        try:
            export(ExportConfig(checkpoint=str(written), base=str(base), output=str(back)))
        except ConfigError as error:
            assert "\n" not in str(error) and not back.exists()


def test_a_tap_beyond_the_base_is_found_before_it_is_decoded(base: Path, tmp_path: Path) -> None:
    """The heads of a deeper base of the same width would be brought in, and fail at first use."""
    written = damaged(changed("aux_hidden_state_layer_ids", [5]), base, tmp_path, "dflash")[1]
    with pytest.raises(ConfigError, match=r"tapped is \[4\], expected layers of the base's 4"):
        export(ExportConfig(checkpoint=str(written), base=str(base), output=str(tmp_path / "b")))
