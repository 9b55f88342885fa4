"""Medusa and Hydra heads in the files of others: which tensor belongs to which head.

Medusa heads lie in the layouts of :mod:`specheads.formats.medusa`. Hydra heads (Ankner et al.,
arXiv:2402.05109) are published as their repository saves them: ``hydra_mlp.{h}.{place}.``, whose
first block reads hidden state and embeddings side by side, through ``linear`` and
``res_connection``; further ones are Medusa's. Dropout takes places of its own.
``hydra_lm_head.{h}.`` has a bias, ``prefix_embeding_layer.`` (its spelling) is one Llama layer with
its norm. The head kinds ``cross-attn`` and ``eagle-attn`` are other models.

Files are told by the names of their tensors, not by their config. Configs of published checkpoints
are known to lie (two heads where the file holds five, layers that are one layer under several
names), so that everything is counted. A name that no layout knows is refused: skipped, it would be
heads that guess nothing right.

Shapes: V vocabulary, V' the tokens that a head can guess.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.config import ConfigError
from specheads.formats.medusa import check_output, times
from specheads.models.blocks import FINAL_NORM, PrefixLayer, prefix_sizes
from specheads.models.heads import MedusaHeads
from specheads.models.manifest import TensorFiles, check_ids, expect
from specheads.models.output import OutputLayer, output_layer
from specheads.system.errors import refuse

MOST_HEADS, MOST_LAYERS = 256, 64  # of native exports, see models/export_config.py
# what savers and layouts put in place of the names that are taken apart below
_SPELLINGS = {
    r"^((module|medusa_heads|(model\.)?medusa_head|hydra_head|hydra_mlp)\.)+": "",
    r"^hydra_lm_head\.(\d{1,3})\.(1\.)?": r"lm_heads.\1.",
    r"^blocks\.(\d{1,3})\.layers\.(\d{1,3})\.": r"\1.\2.linear.",
}
_BLOCK = re.compile(r"(\d{1,3})\.(\d{1,3})\.((?:linear|res_connection)\.(?:weight|bias))")
# of a head, or of one at the place behind its blocks
_OUTPUT = re.compile(r"(?:lm_heads\.(\d{1,3})|(\d{1,3})\.(\d{1,3}))\.(weight|bias)")
_PREFIX = "prefix_embeding_layer."
_TABLE = re.compile(r"(layers\.0\.self_attn\.)?rotary_emb\.inv_freq")
_KINDS = ("mlp", "prefix-mlp")
_THETA = 10_000.0  # of our prefix layer
# the two matrices of a block that joins hidden state and embeddings, in our names
_JOINED = {"linear": "gate", "res_connection": "residual"}


class Layout:
    """Which tensors of foreign files, which hold Medusa or Hydra heads alone, belong to which head.

    Attributes:
        files: that hold them.
        config: the config.json beside them; empty where there is none.
        hydra: whether they are Hydra's, by the names of the files or the config.
        blocks: per head, per block, names by ``linear.weight``, ``res_connection.bias``, ...
        outputs: per head the names of ``weight`` and ``bias``; empty where it uses the base's.
        joined: whether the first blocks read the tokens drafted before.
        others: names of one matrix for all heads, and of the ids that rows of matrices stand for.
        prefix: names of the prefix layer's tensors, by those within the layer.
        tables: names of stored rotary tables.
        notes: what the user has to know, in lines.
        kept: [V'] token ids that the heads can guess, once the sizes are checked; None: all.

    Raises:
        ConfigError: with the first name that is unknown or missing, or what kind of heads these
            are, if another one.
    """

    def __init__(self, files: TensorFiles, config: dict[str, Any]) -> None:
        self.files, self.config, self.notes = files, config, list(files.notes)
        self.hydra = files.where.stem == "hydra_lm_head" or "hydra_num_heads" in config
        self.kept: Tensor | None = None
        kind, offset = config.get("hydra_head_arch", "mlp"), config.get("hidden_state_offset", 0)
        refuse({
            f"config.json: hydra_head_arch is {kind!r:.40}; of Hydra's heads"
            f" {' and '.join(_KINDS)} can be brought in, the others are attention layers that"
            " specheads has not": kind not in _KINDS,
            f"config.json: hidden_state_offset is {offset!r:.40}: these heads read a layer below"
            " the last, those of specheads the last": offset,
        })  # fmt: skip
        blocks: dict[int, dict[int, dict[str, str]]] = {}  # names by head, place and part
        outputs: dict[int, dict[str, str]] = {}  # names by head and part
        ends: dict[int, int] = {}  # by head, the place of its matrix behind its blocks
        self.others: dict[str, str] = {}
        self.prefix: dict[str, str] = {}
        for name in sorted(files.header):
            key, place = name, self.others
            for spelling, ours in _SPELLINGS.items():
                key = re.sub(spelling, ours, key)
            if found := _BLOCK.fullmatch(key):
                layers, key = blocks.setdefault(int(found[1]), {}), found[3]
                place = layers.setdefault(int(found[2]), {})
            elif found := _OUTPUT.fullmatch(key):
                head, key = int(found[1] or found[2]), found[4]
                place = outputs.setdefault(head, {})
                if found[3]:
                    ends[head] = int(found[3])
            elif key.startswith(_PREFIX):
                key, place = key.removeprefix(_PREFIX), self.prefix
            elif key not in ("lm_head.weight", "token_map"):
                kind = "Hydra" if self.hydra else "Medusa"
                raise ConfigError(f"{files.where}: {name:.120} is no tensor of {kind} heads")
            if key in place:
                raise ConfigError(f"{files.where} holds the same tensor under two names: {name}")
            place[key] = name
        self.tables = [self.prefix.pop(key) for key in [*self.prefix] if _TABLE.fullmatch(key)]
        if unused := self.prefix.pop("embed_tokens.weight", None):  # made with the layer
            self.notes.append(f"{unused} is left out: nothing reads it")
        number = 1 + max((*outputs, *blocks), default=-1)
        check_number(files, number)
        self.outputs = self._outputs_of(number, outputs)
        self.blocks = [self._blocks_of(i, blocks.get(i, {}), ends.get(i)) for i in range(number)]
        if len(counts := {len(each) for each in self.blocks}) > 1:
            raise ConfigError(
                f"{files.where}: its heads have {min(counts)} to {max(counts)} layers, expected the"
                " same number in all"
            )
        self.joined = any("res_connection.weight" in head[0] for head in self.blocks if head)
        self._check_parts()

    def check_sizes(self, hidden_size: int, vocab_size: int) -> None:
        """Hold the shapes of the heads to a base model's; only the ids of ``token_map`` are read.

        Raises:
            ConfigError: with the first tensor that is of another size, or what is wrong with the
                ids.
        """
        self.kept = self._kept(vocab_size)
        rows = {vocab_size} if self.kept is None else {len(self.kept), vocab_size}
        for i, (head, output) in enumerate(zip(self.blocks, self.outputs, strict=True)):
            for j, block in enumerate(head):
                shape = hidden_size, hidden_size * (i + 2 if self.joined and j == 0 else 1)
                for part, name in block.items():
                    check_shape(self.files, name, shape[: 1 + part.endswith("weight")])
            for part, name in output.items():
                shapes = [(each, hidden_size)[: 1 + (part == "weight")] for each in sorted(rows)]
                check_shape(self.files, name, *shapes)

    @torch.no_grad()
    def read(self, base: PreTrainedModel) -> MedusaHeads:
        """Read the heads, whose logits are the same over ``base``; their sizes were checked.

        The bias of an output matrix becomes a Markov correction of rank 1 that is the same for
        every token: 1 times the bias.

        Raises:
            ConfigError: if their logits cannot be had, or the prefix layer is of other sizes.
        """
        output, kept, joined = output_layer(base), self.kept, self.joined
        vocab_size, hidden_size = output.weight.shape
        sizes = self._prefix_sizes(base)
        names = {name for head in self.blocks for block in head for name in block.values()}
        names |= {name for pair in self.outputs for name in pair.values()}
        found = self.files.read(names | set(self.prefix.values()))
        matrices, biases = self._output_tensors(found, output)
        forms = ("own", "pruned") if matrices else ("shared", "shared_pruned")
        with torch.device("meta"):
            heads = MedusaHeads(
                len(self.blocks), len(self.blocks[0]) - joined, hidden_size, vocab_size,
                forms[kept is not None], num_kept=0 if kept is None else len(kept),
                markov_rank=int(bool(biases)), condition=joined, joined=joined, prefix=sizes,
            )  # fmt: skip
        heads.make_tables()
        state = {f"prefix.model.{name}": found[there] for name, there in self.prefix.items()}
        state |= {} if kept is None else {"token_map": kept}
        for i, head in enumerate(self.blocks):
            for j, block in enumerate(head):
                for part, name in block.items():
                    kind, what = part.split(".")
                    place = f"joined.{_JOINED[kind]}" if j < joined else f"blocks.{j - joined}"
                    # a block that stands under several names gets memory of its own for each
                    state[f"heads.{i}.{place}.{what}"] = found[name].clone()
                if "linear.bias" not in block:
                    zeros = found[block["linear.weight"]].new_zeros(hidden_size)
                    state[f"heads.{i}.blocks.{j}.bias"] = zeros
        state |= {f"heads.{i}.lm_head.weight": matrix for i, matrix in enumerate(matrices)}
        for i, bias in enumerate(biases):
            state[f"heads.{i}.markov.down.weight"] = bias.new_ones(vocab_size, 1)
            state[f"heads.{i}.markov.up.weight"] = bias[:, None]
        heads.load_state_dict(state, assign=True)
        return heads

    def _output_tensors(
        self, found: dict[str, Tensor], output: OutputLayer
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return matrices and biases that, times the base's factor, give the logits of these heads.

        Empty where the base's own matrix does, and where all biases are zero.
        """
        if not self.outputs[0]:
            return [], []
        self.notes += check_output(output)
        raw = self.config.get("logit_scale", 1.0)
        fits = type(raw) in (int, float) and math.isfinite(raw) and raw > 0
        expect(fits, "config.json: logit_scale", raw, "a number above 0")
        factor, kept, rows = float(raw) / output.scale, self.kept, output.weight
        names = {part: [each[part] for each in self.outputs] for part in self.outputs[0]}
        made = {part: [found[name] for name in there] for part, there in names.items()}
        if kept is not None:
            rows = rows[kept]
            for part, tensors in made.items():
                made[part] = [each[kept] if len(each) > len(kept) else each for each in tensors]
        one = factor == 1.0 and len(set(names["weight"])) == 1
        if one and torch.equal(made["weight"][0].to(rows.dtype), rows):
            self.notes.append("their output matrix is the base's: it is shared, not stored again")
            made["weight"] = []
        if not any(bool(bias.any()) for bias in made.get("bias", [])):
            made["bias"] = []
        else:
            self.notes.append("the bias of their output matrices is stored as a Markov correction")
        return [times(x, factor) for x in made["weight"]], [times(x, factor) for x in made["bias"]]

    def _kept(self, vocab_size: int) -> Tensor | None:
        """Return the [V'] token ids that the heads can guess, as vLLM understands it; None: all."""
        where, name = self.files.where, self.others.get("token_map")
        truncated = self.config.get("truncated_vocab_size") or vocab_size  # as vLLM's config says
        said = f"config.json says truncated_vocab_size is {truncated!r:.40}"
        if name is None:
            if truncated != vocab_size:
                raise ConfigError(f"{where} lacks token_map, but {said}, the base's {vocab_size}")
            return None
        shape, dtype = self.files.header[name]
        fits = len(shape) == 1 and dtype in ("I64", "I32") and 1 <= shape[0] <= vocab_size
        expect(fits, f"{where}: {name}", (dtype, *shape), f"at most {vocab_size} token ids")
        if truncated == vocab_size:
            self.notes.append(
                "its token_map is not used, as in vLLM: truncated_vocab_size is that of all tokens"
            )
            return None
        if not self.outputs[0]:
            raise ConfigError(f"{where} holds token_map, but no output matrix")
        kept = self.files.read([name])[name].long()
        check_ids(f"{said}, but {where}: {name}", kept, vocab_size, truncated)
        return kept

    def _blocks_of(
        self, head: int, own: dict[int, dict[str, str]], end: int | None
    ) -> list[dict[str, str]]:
        """Return the names of one head's blocks; notes where one block stands for several.

        Args:
            head: which.
            own: names by place and part.
            end: the place of its output matrix behind its blocks; None where that says nothing.
        """
        where, once = self.files.where, 1 + self.hydra
        if self.hydra:
            own = dict(enumerate(own[place] for place in sorted(own)))
            claimed = self.config.get("hydra_num_layers")
            end = claimed if type(claimed) is int and len(own) == once < claimed else None
        number = 1 + max(own, default=-1) if end is None else end
        if number > MOST_LAYERS:
            raise ConfigError(
                f"{where}: head {head} has {number} layers, at most {MOST_LAYERS} can be"
            )
        if len(own) == once < number:
            # `[block] * n` is one module under n names; savers that drop shared tensors leave one
            first, last = own[min(own)], own[max(own)]
            own = {0: first} | dict.fromkeys(range(1, number), last)
            line = f"one block stands for {number - self.hydra} of the {number} layers of a head"
            self.notes += [] if line in self.notes else [line]
        if extra := sorted(set(own) - set(range(number))):
            raise ConfigError(f"{where}: layer {extra[0]} of head {head} stands behind its matrix")
        return [own.get(layer, {}) for layer in range(number)]

    def _check_parts(self) -> None:
        """Refuse a block that lacks a tensor, or has one that other blocks have not."""
        wanted = self.config.get("medusa_fc_bias")
        biased = any("linear.bias" in block for head in self.blocks for block in head)
        if biased and not wanted and self.config.get("model_type") == "medusa":
            self.notes.append(
                "its blocks have biases, which vLLM drops unless config.json says medusa_fc_bias;"
                " they are kept here"
            )
        for i, head in enumerate(self.blocks):
            for j, block in enumerate(head):
                kinds = _JOINED if self.joined and j == 0 else ("linear",)
                whats = ("weight", "bias") if biased or wanted or self.joined else ("weight",)
                parts = {f"{kind}.{what}" for kind in kinds for what in whats}
                if odd := sorted(parts ^ block.keys()):
                    found = "lacks" if odd[0] in parts else "holds, and other blocks do not,"
                    raise ConfigError(
                        f"{self.files.where} {found} {odd[0]} of layer {j} of head {i}"
                    )

    def _outputs_of(self, number: int, found: dict[int, dict[str, str]]) -> list[dict[str, str]]:
        """Return per head the names of its output matrix and bias; empty where there are none."""
        where, common = self.files.where, self.others.get("lm_head.weight")
        if common is not None and found:
            raise ConfigError(f"{where} holds lm_head.weight and {min(found[min(found)].values())}")
        if common is not None:
            return [{"weight": common}] * number
        if self.config.get("original_lm_head") and set(found) == {0}:
            return [found[0]] * number
        parts = {"weight"}.union(*found.values()) if found else set[str]()
        for head in range(number):
            if lacking := parts - found.get(head, {}).keys():
                noun = "matrix" if "weight" in lacking else "bias"
                raise ConfigError(f"{where} lacks the output {noun} of head {head}")
        return [found.get(head, {}) for head in range(number)]

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
            layer: Any = PrefixLayer(sizes).model
        shapes = {name: tuple(each.shape) for name, each in layer.state_dict().items()}
        if odd := sorted(shapes.keys() ^ self.prefix.keys()):
            found = "lacks" if odd[0] in shapes else "holds, and a layer of specheads has not,"
            raise ConfigError(f"{where} {found} {_PREFIX}{odd[0]}")
        for name, there in self.prefix.items():
            check_shape(self.files, there, shapes[name])
        plain = type(layer.rotary_emb)(config=layer.config).inv_freq
        # stored in half precision mostly, hence the tolerance; another theta is off by far more
        for name, table in self.files.read(self.tables).items():
            if table.shape != plain.shape or not torch.allclose(table.float(), plain, rtol=1e-2):
                raise ConfigError(
                    f"{where}: {name} is not the rotary table of theta {_THETA:g}, which the prefix"
                    " layer of specheads has"
                )
        return sizes


def check_number(files: TensorFiles, number: int) -> None:
    """Refuse more heads than a native export may have, and none."""
    if not 1 <= number <= MOST_HEADS:
        raise ConfigError(f"{files.where} holds {number} heads, expected 1 to {MOST_HEADS}")


def check_shape(files: TensorFiles, name: str, *expected: tuple[int, ...]) -> None:
    """Refuse a tensor that has none of the ``expected`` shapes."""
    if (shape := files.shape(name)) not in expected:
        wanted = " or ".join(str(list(each)) for each in expected)
        raise ConfigError(
            f"{files.where}: {name} has shape {list(shape)}, the base model's sizes ask for"
            f" {wanted}"
        )
