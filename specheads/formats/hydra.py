"""Published Hydra heads (Ankner et al., arXiv:2402.05109), as their repository saves them, to ours.

``hydra_mlp.{h}.{place}.``: the first block reads hidden state and embeddings side by side, through
``linear`` and ``res_connection``; further ones are residual blocks, one module under several places
where it was repeated. Dropout takes places of its own. ``hydra_lm_head.{h}.`` has a bias,
``prefix_embeding_layer.`` (its spelling) is one Llama layer with its norm. The head kinds
``cross-attn`` and ``eagle-attn`` are other models.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.config import ConfigError
from specheads.formats.medusa import MOST_HEADS, MOST_LAYERS
from specheads.models.blocks import FINAL_NORM, prefix_sizes
from specheads.models.heads import MedusaHeads
from specheads.models.manifest import TensorFiles
from specheads.models.output import OutputLayer

_KINDS = ("mlp", "prefix-mlp")
_BLOCK = re.compile(r"hydra_mlp\.(\d{1,3})\.(\d{1,3})\.(linear|res_connection)\.(weight|bias)")
_MATRIX = re.compile(r"hydra_lm_head\.(\d{1,3})\.(?:1\.)?(weight|bias)")
_PREFIX = "prefix_embeding_layer."
_FREQUENCIES = re.compile(rf"{_PREFIX}(layers\.0\.self_attn\.)?rotary_emb\.inv_freq")
_UNUSED = f"{_PREFIX}embed_tokens.weight"  # made with the layer, and never read
_THETA = 10_000.0  # of our prefix layer


@dataclass
class HydraLayout:
    """Names of tensors in their files.

    Attributes:
        blocks: per head, per block, names by ``linear.weight``, ``res_connection.bias``, ...
        outputs: per head the names of ``weight`` and ``bias``.
        prefix: names of the prefix layer's tensors, by those within the layer.
        frequencies: names of stored rotary tables.
        grounded: whether the heads read the tokens drafted before.
        notes: what the user has to know, in lines.
    """

    blocks: list[list[dict[str, str]]]
    outputs: list[dict[str, str]]
    prefix: dict[str, str]
    frequencies: list[str]
    grounded: bool
    notes: list[str] = field(default_factory=list)


def layout_of(files: TensorFiles, config: dict[str, Any]) -> HydraLayout:
    """Find the heads among the tensors of ``files``.

    Args:
        files: of Hydra heads alone.
        config: the config.json beside them; empty where there is none.

    Raises:
        ConfigError: with the first name that is unknown or missing, or what kind of heads these
            are, if another one.
    """
    kind = config.get("hydra_head_arch", "mlp")
    if kind not in _KINDS:
        raise ConfigError(
            f"config.json: hydra_head_arch is {kind!r:.40}; of Hydra's heads {' and '.join(_KINDS)}"
            " can be brought in, the others are attention layers that specheads has not"
        )
    if offset := config.get("hidden_state_offset", 0):
        raise ConfigError(
            f"config.json: hidden_state_offset is {offset!r:.40}: these heads read a layer below"
            " the last, those of specheads the last"
        )
    blocks: dict[int, dict[int, dict[str, str]]] = {}
    outputs: dict[int, dict[str, str]] = {}
    prefix: dict[str, str] = {}
    frequencies, notes = [], list(files.notes)
    for name in sorted(files.header):
        plain = name.removeprefix("module.").removeprefix("hydra_head.")
        if found := _BLOCK.fullmatch(plain):
            place = blocks.setdefault(int(found[1]), {}).setdefault(int(found[2]), {})
            place[f"{found[3]}.{found[4]}"] = name
        elif found := _MATRIX.fullmatch(plain):
            outputs.setdefault(int(found[1]), {})[found[2]] = name
        elif plain == _UNUSED:
            notes.append(f"{name} is left out: nothing reads it")
        elif _FREQUENCIES.fullmatch(plain):
            frequencies.append(name)
        elif plain.startswith(_PREFIX):
            prefix[plain.removeprefix(_PREFIX)] = name
        else:
            raise ConfigError(f"{files.where}: {name:.120} is no tensor of Hydra heads")
    number = 1 + max((*blocks, *outputs), default=-1)
    if not 1 <= number <= MOST_HEADS:
        raise ConfigError(f"{files.where} holds {number} heads, expected 1 to {MOST_HEADS}")
    for head in range(number):
        if head not in blocks or outputs.get(head, {}).keys() != {"weight", "bias"}:
            raise ConfigError(f"{files.where} lacks tensors of head {head}")
    if (claimed := config.get("hydra_num_heads", number)) != number:
        notes.append(
            f"config.json says hydra_num_heads={claimed!r:.40}, the tensors are of {number} heads:"
            " those are taken"
        )
    layers = config.get("hydra_num_layers")
    ordered = [
        _ordered(files, head, [each for _, each in sorted(blocks[head].items())], layers, notes)
        for head in range(number)
    ]
    grounded = {"res_connection.weight" in head[0] for head in ordered}
    if len(grounded) > 1 or len({len(head) for head in ordered}) > 1:
        raise ConfigError(f"{files.where}: its heads are not all of one kind")
    return HydraLayout(
        ordered, [outputs[head] for head in range(number)], prefix, frequencies, grounded == {True},
        notes,
    )  # fmt: skip


def _ordered(
    files: TensorFiles, head: int, found: list[dict[str, str]], layers: object, notes: list[str]
) -> list[dict[str, str]]:
    for j, names in enumerate(found):
        wanted = {"linear.weight", "linear.bias"}
        if j == 0 and "res_connection.weight" in names:
            wanted |= {"res_connection.weight", "res_connection.bias"}
        if names.keys() != wanted:
            raise ConfigError(f"{files.where}: block {j} of head {head} is not whole")
    # further blocks are one module under several names, of which some savers leave one
    if type(layers) is int and len(found) == 2 < layers <= MOST_LAYERS:
        found = [found[0], *[found[1]] * (layers - 1)]
        line = f"one block stands for {layers - 1} of the {layers} layers of a head"
        if line not in notes:
            notes.append(line)
    elif type(layers) is int and layers != len(found):
        line = f"config.json says hydra_num_layers={layers}, the tensors are of {len(found)}"
        if line not in notes:
            notes.append(line)
    if len(found) > MOST_LAYERS:
        raise ConfigError(f"{files.where}: head {head} has {len(found)} layers")
    return found


def check_sizes(files: TensorFiles, layout: HydraLayout, hidden_size: int, vocab_size: int) -> None:
    """Hold the shapes of the heads to a base model's; nothing is read.

    Raises:
        ConfigError: with the first tensor that is of another size.
    """
    wanted: dict[str, tuple[int, ...]] = {}
    for i, (head, output) in enumerate(zip(layout.blocks, layout.outputs, strict=True)):
        for j, names in enumerate(head):
            width = hidden_size * (i + 2 if layout.grounded and j == 0 else 1)
            for part, name in names.items():
                wanted[name] = (hidden_size, width) if part.endswith("weight") else (hidden_size,)
        wanted[output["weight"]] = (vocab_size, hidden_size)
        wanted[output["bias"]] = (vocab_size,)
    for name, shape in wanted.items():
        if files.shape(name) != shape:
            raise ConfigError(
                f"{files.where}: {name} has shape {list(files.shape(name))}, the base model's sizes"
                f" ask for {list(shape)}"
            )


@torch.no_grad()
def build(
    files: TensorFiles, layout: HydraLayout, base: PreTrainedModel, output: OutputLayer
) -> MedusaHeads:
    """Read the heads.

    The bias of an output matrix becomes a Markov correction of rank 1 that is the same for every
    token: 1 times the bias.

    Args:
        files: that hold them.
        layout: of these files.
        base: the model that they are for.
        output: its output layer.

    Raises:
        ConfigError: if their logits cannot be had from a native export.
    """
    vocab_size, hidden_size = output.weight.shape
    check_sizes(files, layout, hidden_size, vocab_size)
    if output.bias is not None:
        raise ConfigError(
            "the base model's output layer has a bias, which a native export adds to the heads'"
            " logits, and these heads do not"
        )
    if output.softcap is not None:
        layout.notes.append(
            f"the base model caps its logits at {output.softcap:g}: so are those of the heads now,"
            " in the same order"
        )
    sizes = _prefix_sizes(files, layout, base)
    found = files.read(
        {name for head in layout.blocks for names in head for name in names.values()}
        | {name for names in layout.outputs for name in names.values()}
        | set(layout.prefix.values())
    )
    biased = any(bool(found[names["bias"]].any()) for names in layout.outputs)
    first = 1 if layout.grounded else 0
    heads = MedusaHeads(
        len(layout.blocks), len(layout.blocks[0]) - first, hidden_size, vocab_size, "own",
        markov_rank=int(biased), condition=layout.grounded, joined=layout.grounded, prefix=sizes,
    )  # fmt: skip
    state: dict[str, Tensor] = {
        f"prefix.model.{name}": found[there].clone() for name, there in layout.prefix.items()
    }
    for i, (head, names) in enumerate(zip(layout.blocks, layout.outputs, strict=True)):
        ours = f"heads.{i}"
        if layout.grounded:
            for part, name in head[0].items():
                kind, what = part.split(".")
                kind = {"linear": "gate", "res_connection": "residual"}[kind]
                state[f"{ours}.joined.{kind}.{what}"] = found[name].clone()
        for j, block in enumerate(head[first:]):
            for what in ("weight", "bias"):
                state[f"{ours}.blocks.{j}.{what}"] = found[block[f"linear.{what}"]].clone()
        matrix, bias = (_scaled(found[names[what]], output.scale) for what in ("weight", "bias"))
        state[f"{ours}.lm_head.weight"] = matrix
        if biased:
            state[f"{ours}.markov.down.weight"] = bias.new_ones(vocab_size, 1)
            state[f"{ours}.markov.up.weight"] = bias[:, None].clone()
    heads.load_state_dict(state, assign=True)
    if biased:
        layout.notes.append("the bias of their output matrices is stored as a Markov correction")
    return heads


def _scaled(tensor: Tensor, scale: float) -> Tensor:
    """Return what the base's factor makes ``tensor`` of."""
    return tensor.clone() if scale == 1.0 else (tensor.double() / scale).to(tensor.dtype)


def _prefix_sizes(
    files: TensorFiles, layout: HydraLayout, base: PreTrainedModel
) -> dict[str, Any] | None:
    """Return the sizes of the prefix layer, checked against its tensors; None without one."""
    if not layout.prefix:
        return None
    config = base.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta", getattr(config, "rope_theta", _THETA))
    if rope.get("rope_type", "default") != "default" or theta != _THETA:
        raise ConfigError(
            "the prefix layer of these heads has the rotary positions of its base,"
            f" {rope or theta}; that of specheads has plain ones of theta {_THETA:g}"
        )
    sizes = {**prefix_sizes(base.config), FINAL_NORM: True}
    with torch.device("meta"):
        expected = MedusaHeads(1, 0, sizes["hidden_size"], 2, "own", prefix=sizes).prefix
    assert expected is not None
    shapes = {name: tuple(each.shape) for name, each in expected.model.state_dict().items()}
    for name in sorted(shapes.keys() | layout.prefix.keys()):
        there = layout.prefix.get(name)
        stored = None if there is None else files.shape(there)
        if stored != shapes.get(name):
            raise ConfigError(
                f"{files.where}: {_PREFIX}{name} has shape {stored and list(stored)}, a layer of"
                f" the base model's sizes {list(shapes.get(name, ())) or 'has no such tensor'}"
            )
    width = sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
    plain = _THETA ** -(torch.arange(0, width, 2).float() / width)
    for name, table in files.read(layout.frequencies).items():
        if table.shape != plain.shape or not torch.allclose(table.float(), plain, rtol=1e-2):
            raise ConfigError(
                f"{files.where}: {name} is not the rotary table of theta {_THETA:g}, which the"
                " prefix layer of specheads has"
            )
    return sizes
