"""Published Hydra heads (Ankner et al., arXiv:2402.05109), as their repository saves them, to ours.

``hydra_mlp.{h}.{place}.``: the first block reads hidden state and embeddings side by side, through
``linear`` and ``res_connection``; further ones are residual blocks, one module under several places
where it was repeated. Dropout takes places of its own. ``hydra_lm_head.{h}.`` has a bias,
``prefix_embeding_layer.`` (its spelling) is one Llama layer with its norm. The head kinds
``cross-attn`` and ``eagle-attn`` are other models.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import PreTrainedModel

from specheads.config import ConfigError
from specheads.formats.medusa import MOST_LAYERS, check_number, check_output, check_shape, times
from specheads.models.blocks import FINAL_NORM, prefix_sizes
from specheads.models.heads import MedusaHeads
from specheads.models.manifest import TensorFiles
from specheads.models.output import output_layer

_KINDS = ("mlp", "prefix-mlp")
_BLOCK = re.compile(r"hydra_mlp\.(\d{1,3})\.(\d{1,3})\.(linear|res_connection)\.(weight|bias)")
_MATRIX = re.compile(r"hydra_lm_head\.(\d{1,3})\.(?:1\.)?(weight|bias)")
_PREFIX = "prefix_embeding_layer."
_FREQUENCIES = re.compile(rf"{_PREFIX}(layers\.0\.self_attn\.)?rotary_emb\.inv_freq")
_UNUSED = f"{_PREFIX}embed_tokens.weight"  # made with the layer, and never read
_THETA = 10_000.0  # of our prefix layer
# the two matrices of a first block, in our names
_JOINED = {"linear": "gate", "res_connection": "residual"}


class Layout:
    """Which tensors of foreign files, which hold Hydra heads alone, belong to which head.

    Attributes:
        files: that hold them.
        blocks: per head, per block, names by ``linear.weight``, ``res_connection.bias``, ...
        outputs: per head the names of ``weight`` and ``bias``.
        prefix: names of the prefix layer's tensors, by those within the layer.
        frequencies: names of stored rotary tables.
        grounded: whether the heads read the tokens drafted before.
        notes: what the user has to know, in lines.

    Raises:
        ConfigError: with the first name that is unknown or missing, or what kind of heads these
            are, if another one.
    """

    def __init__(self, files: TensorFiles, config: dict[str, Any]) -> None:
        kind, offset = config.get("hydra_head_arch", "mlp"), config.get("hidden_state_offset", 0)
        if kind not in _KINDS:
            raise ConfigError(
                f"config.json: hydra_head_arch is {kind!r:.40}; of Hydra's heads"
                f" {' and '.join(_KINDS)} can be brought in, the others are attention layers that"
                " specheads has not"
            )
        if offset:
            raise ConfigError(
                f"config.json: hidden_state_offset is {offset!r:.40}: these heads read a layer"
                " below the last, those of specheads the last"
            )
        blocks: dict[int, dict[int, dict[str, str]]] = {}
        outputs: dict[int, dict[str, str]] = {}
        self.files, self.frequencies = files, list[str]()
        self.prefix: dict[str, str] = {}
        notes = dict.fromkeys(files.notes)  # each line once, in this order
        for name in sorted(files.header):
            plain = name.removeprefix("module.").removeprefix("hydra_head.")
            if found := _BLOCK.fullmatch(plain):
                place = blocks.setdefault(int(found[1]), {}).setdefault(int(found[2]), {})
                place[f"{found[3]}.{found[4]}"] = name
            elif found := _MATRIX.fullmatch(plain):
                outputs.setdefault(int(found[1]), {})[found[2]] = name
            elif plain == _UNUSED:
                notes[f"{name} is left out: nothing reads it"] = None
            elif _FREQUENCIES.fullmatch(plain):
                self.frequencies.append(name)
            elif plain.startswith(_PREFIX):
                self.prefix[plain.removeprefix(_PREFIX)] = name
            else:
                raise ConfigError(f"{files.where}: {name:.120} is no tensor of Hydra heads")
        number = 1 + max((*blocks, *outputs), default=-1)
        check_number(files, number)
        for head in range(number):
            if head not in blocks or outputs.get(head, {}).keys() != {"weight", "bias"}:
                raise ConfigError(f"{files.where} lacks tensors of head {head}")
        if (claimed := config.get("hydra_num_heads", number)) != number:
            lie = f"config.json says hydra_num_heads={claimed!r:.40}"
            notes[f"{lie}, the tensors are of {number} heads: those are taken"] = None
        self.blocks: list[list[dict[str, str]]] = []
        layers = config.get("hydra_num_layers")
        for head in range(number):
            own = [each for _, each in sorted(blocks[head].items())]
            _check_whole(files, head, own)
            # further blocks are one module under several names, of which some savers leave one
            if type(layers) is int and len(own) == 2 < layers <= MOST_LAYERS:
                own = [own[0], *[own[1]] * (layers - 1)]
                notes[f"one block stands for {layers - 1} of the {layers} layers of a head"] = None
            elif type(layers) is int and layers != len(own):
                line = f"config.json says hydra_num_layers={layers}, the tensors are of {len(own)}"
                notes[line] = None
            self.blocks.append(own)
        grounded = {"res_connection.weight" in head[0] for head in self.blocks}
        if len(grounded) > 1 or len({len(head) for head in self.blocks}) > 1:
            raise ConfigError(f"{files.where}: its heads are not all of one kind")
        self.outputs = [outputs[head] for head in range(number)]
        self.grounded, self.notes = grounded == {True}, list(notes)

    def check_sizes(self, hidden_size: int, vocab_size: int) -> None:
        """Hold the shapes of the heads to a base model's; nothing is read.

        Raises:
            ConfigError: with the first tensor that is of another size.
        """
        for i, (head, output) in enumerate(zip(self.blocks, self.outputs, strict=True)):
            for j, names in enumerate(head):
                width = hidden_size * (i + 2 if self.grounded and j == 0 else 1)
                for part, name in names.items():
                    matrix = part.endswith("weight")
                    check_shape(self.files, name, (hidden_size, width)[: 1 + matrix])
            check_shape(self.files, output["weight"], (vocab_size, hidden_size))
            check_shape(self.files, output["bias"], (vocab_size,))

    @torch.no_grad()
    def read(self, base: PreTrainedModel) -> MedusaHeads:
        """Read the heads, whose logits are the same over ``base``.

        The bias of an output matrix becomes a Markov correction of rank 1 that is the same for
        every token: 1 times the bias.

        Raises:
            ConfigError: if they are of other sizes, or their logits cannot be had.
        """
        output = output_layer(base)
        vocab_size, hidden_size = output.weight.shape
        self.notes += check_output("these heads have", output, "so are those of the heads now,")
        sizes = self._prefix_sizes(base)
        names = {name for head in self.blocks for block in head for name in block.values()}
        names |= {name for pair in self.outputs for name in pair.values()}
        found = self.files.read(names | set(self.prefix.values()))
        biased = any(bool(found[pair["bias"]].any()) for pair in self.outputs)
        first = 1 if self.grounded else 0
        heads = MedusaHeads(
            len(self.blocks), len(self.blocks[0]) - first, hidden_size, vocab_size, "own",
            markov_rank=int(biased), condition=self.grounded, joined=self.grounded, prefix=sizes,
        )  # fmt: skip
        state = {f"prefix.model.{name}": found[there] for name, there in self.prefix.items()}
        for i, (head, pair) in enumerate(zip(self.blocks, self.outputs, strict=True)):
            for part, name in head[0].items() if self.grounded else ():
                kind, what = part.split(".")
                state[f"heads.{i}.joined.{_JOINED[kind]}.{what}"] = found[name]
            for j, block in enumerate(head[first:]):
                for what in ("weight", "bias"):
                    state[f"heads.{i}.blocks.{j}.{what}"] = found[block[f"linear.{what}"]]
            matrix, bias = (times(found[pair[x]], 1 / output.scale) for x in ("weight", "bias"))
            state[f"heads.{i}.lm_head.weight"] = matrix
            if biased:
                state[f"heads.{i}.markov.down.weight"] = bias.new_ones(vocab_size, 1)
                state[f"heads.{i}.markov.up.weight"] = bias[:, None]
        # a block that stands under several names gets memory of its own for each
        heads.load_state_dict({name: each.clone() for name, each in state.items()}, assign=True)
        if biased:
            self.notes.append("the bias of their output matrices is stored as a Markov correction")
        return heads

    def _prefix_sizes(self, base: PreTrainedModel) -> dict[str, Any] | None:
        """Return the sizes of the prefix layer, checked against its tensors; None without one."""
        if not self.prefix:
            return None
        config, where = base.config.get_text_config(), self.files.where
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
        for name in sorted(shapes.keys() | self.prefix.keys()):
            stored = self.files.shape(self.prefix[name]) if name in self.prefix else None
            if stored != shapes.get(name):
                raise ConfigError(
                    f"{where}: {_PREFIX}{name} has shape {stored and list(stored)}, a layer of the"
                    f" base model's sizes {list(shapes.get(name, ())) or 'has no such tensor'}"
                )
        width = sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
        plain = _THETA ** -(torch.arange(0, width, 2).float() / width)
        # stored in half precision mostly, hence the tolerance; another theta is off by far more
        for name, table in self.files.read(self.frequencies).items():
            if table.shape != plain.shape or not torch.allclose(table.float(), plain, rtol=1e-2):
                raise ConfigError(
                    f"{where}: {name} is not the rotary table of theta {_THETA:g}, which the prefix"
                    " layer of specheads has"
                )
        return sizes


def _check_whole(files: TensorFiles, head: int, blocks: list[dict[str, str]]) -> None:
    """Refuse a head one of whose blocks lacks a tensor, or which has too many blocks."""
    for j, names in enumerate(blocks):
        kinds = _JOINED if j == 0 and "res_connection.weight" in names else ("linear",)
        if names.keys() != {f"{kind}.{what}" for kind in kinds for what in ("weight", "bias")}:
            raise ConfigError(f"{files.where}: block {j} of head {head} is not whole")
    if len(blocks) > MOST_LAYERS:
        raise ConfigError(f"{files.where}: head {head} has {len(blocks)} layers")
