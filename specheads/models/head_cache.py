"""The prefix layer while decoding: keys and values of what was read, one query per step and row.

Heads read the layer's output at the last position only, and there is but one layer: earlier
positions need keys and values, and no queries. transformers' own model computes all of them and
builds masks anew, at several times the small ops. Positions are counted from the first one that is
remembered: rotary attention knows distances only. Shapes: B rows, H key heads, G queries for each.

Whether the layers of MTP heads are of the kind that :mod:`specheads.models.head_cache` computes.

transformers has hundreds of kinds of layers. What is not built from the known parts is refused by
its parts, and what uses them otherwise (norms around 1, multipliers, layers without rotation) by
its numbers.

Layers of MTP heads side by side: a single product makes all their queries, keys and values.

Shapes: B rows, T new positions, N = B * T, n layers, H key heads of width h in each with G queries
each, d hidden size, I inner size.

Parallel and causal MTP heads while decoding: their keys and values, and one pass per step.

transformers' own layers would be called one by one, at several times the small ops, and would
compute outputs that nobody reads. Here the layers of parallel heads, which read the same hidden
states, are one layer of n times the attention heads: a single product makes all queries, keys and
values, and what follows is made for the last position only. Causal heads go one behind the other
through the same code, n = 1; every layer but the last needs outputs at all new positions.

Positions are counted from the first one that is remembered: rotary attention knows distances only.
Shapes: B rows, T new positions, n layers side by side, H key heads of width h in each, C slots, d
hidden size.

What sequential MTP heads remember of texts: keys and values of each module at certain tokens.

At token position p module k reads the token's embedding and G^{k-1}_{p-1}, what the module before
made of the position before; G^{-1} is the base's final hidden state (arXiv:2412.19437, equations
21 to 24). Unrolled, G^k_p needs the base's hidden state at p - 1 - k and the tokens from there on.
So everything up to the root (the last certain token, whose hidden state is not known yet) follows
from certain tokens and true hidden states, and is computed from nothing else: what was drafted and
refused leaves no trace. The layers are transformers' own, whatever they are made of, and take
:class:`Pass` for their cache. Position p lies in slot p - 1 of every module; module k has nothing
at positions up to k, and its first k slots are masked. Shapes: B rows, K modules, d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from specheads.config import ConfigError

if TYPE_CHECKING:
    from specheads.models.heads import PrefixLayer
    from specheads.models.mtp import MtpHeads

    pass
if TYPE_CHECKING:
    pass  # MOVED
    from specheads.models.mtp import MtpLayer
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from specheads.models.mtp import MtpHeads
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specheads.models.mtp import Embed, MtpHeads

PREFIX_BLOCK = 256  # slots; capacity is a multiple of it


@dataclass(frozen=True)
class PrefixKeys:
    """What the layer remembers of every row, as it is after the last :meth:`append`.

    Attributes:
        layer: the layer.
        keys: [B, H, C, h], rotated; slots behind a row's length hold nothing.
        values: [B, H, C, h].
        waves: cosines and sines of all positions, [2, C, h].
        lengths: per row the positions remembered.
    """

    layer: PrefixLayer
    keys: Tensor
    values: Tensor
    waves: Tensor
    lengths: tuple[int, ...]

    @staticmethod
    def empty(layer: PrefixLayer, num_rows: int) -> PrefixKeys:
        """Return the memory of rows of which nothing was read yet."""
        heads = cast(Any, layer.model).config.num_key_value_heads
        weight = _parts(layer).self_attn.k_proj.weight
        keys = weight.new_zeros(num_rows, heads, 0, weight.shape[0] // heads)
        return PrefixKeys(layer, keys, keys, keys[:0, 0], (0,) * num_rows)

    @torch.no_grad()
    def append(
        self, hidden: Tensor, counts: Sequence[int], tokens: Tensor | None = None
    ) -> tuple[PrefixKeys, Tensor]:
        """Read on.

        Args:
            hidden: [B, T, d], the base's hidden states of the positions that follow, right-padded.
            counts: per row how many of the T are real; where it is 0, the output means nothing.
            tokens: not read.

        Returns:
            The memory with them, and the layer's output [B, d] at each row's last position.
        """
        del tokens
        memory = self._with_room(hidden.shape[1])
        parts = _parts(self.layer)
        attention = parts.self_attn
        num_rows, num_new = hidden.shape[:2]
        last = [max(count, 1) - 1 for count in counts]
        hidden = hidden.to(attention.o_proj.weight.dtype)
        normed = _norm(parts.input_layernorm, hidden)
        shape = (num_rows, num_new, memory.keys.shape[1], memory.keys.shape[3])
        keys = F.linear(normed, attention.k_proj.weight).view(shape).transpose(1, 2)
        values = F.linear(normed, attention.v_proj.weight).view(shape).transpose(1, 2)
        lengths = tuple(n + count for n, count in zip(self.lengths, counts, strict=True))
        if num_rows == 1:
            start, end = self.lengths[0], self.lengths[0] + num_new
            cos, sin = memory.waves[:, start:end]
            memory.keys[:, :, start:end] = _rotated(keys, cos, sin)
            memory.values[:, :, start:end] = values
            normed = normed[:, last[0] : last[0] + 1]
            residual = hidden[:, last[0] : last[0] + 1]
            cos, sin = cos[last[0]], sin[last[0]]
            mask = None
        else:
            device = hidden.device
            rows = torch.arange(num_rows, device=device)
            before, final, after = torch.tensor([self.lengths, last, lengths], device=device)
            ahead = before[:, None] + torch.arange(num_new, device=device)  # [B, T]
            cos, sin = memory.waves[:, ahead]  # [B, T, h]
            memory.keys[rows[:, None], :, ahead] = _rotated(
                keys, cos[:, None], sin[:, None]
            ).transpose(1, 2)
            memory.values[rows[:, None], :, ahead] = values.transpose(1, 2)
            normed, residual = (each[rows, final][:, None] for each in (normed, hidden))
            cos, sin = (each[rows, final][:, None, None] for each in (cos, sin))
            slots = torch.arange(max(lengths), device=device)
            mask = (slots < after[:, None])[:, None, None]  # [B, 1, 1, L]
        queries = F.linear(normed, attention.q_proj.weight)
        queries = queries.view(num_rows, shape[2], -1, shape[3])  # [B, H, G, h]
        seen = max(lengths)
        read = F.scaled_dot_product_attention(
            _rotated(queries, cos, sin),
            memory.keys[:, :, :seen],
            memory.values[:, :, :seen],
            attn_mask=mask,
        )
        output = residual + F.linear(read.reshape(num_rows, 1, -1), attention.o_proj.weight)
        output = output + parts.mlp(_norm(parts.post_attention_layernorm, output))
        norm = cast(Any, self.layer.model.norm)
        output = output if isinstance(norm, nn.Identity) else _norm(norm, output)
        return replace(memory, lengths=lengths), output[:, 0]

    def select(self, rows: Tensor) -> PrefixKeys:
        """Keep the rows ``rows`` [R] (long), in that order."""
        kept = rows.tolist()
        return replace(
            self,
            keys=self.keys[rows.to(self.keys.device)],
            values=self.values[rows.to(self.values.device)],
            lengths=tuple(self.lengths[row] for row in kept),
        )

    def _with_room(self, num_new: int) -> PrefixKeys:
        capacity, needed = self.keys.shape[2], max(self.lengths) + num_new
        if needed <= capacity:
            return self
        capacity = -(-max(needed, 2 * capacity) // PREFIX_BLOCK) * PREFIX_BLOCK
        added = capacity - self.keys.shape[2]
        rotary = cast(Any, self.layer.model.rotary_emb)
        positions = torch.arange(capacity, device=self.keys.device)[None]
        cos, sin = rotary(self.keys, positions)
        return replace(
            self,
            keys=F.pad(self.keys, (0, 0, 0, added)),
            values=F.pad(self.values, (0, 0, 0, added)),
            waves=torch.cat([cos, sin]),
        )


def _parts(layer: PrefixLayer) -> Any:
    return layer.model.layers[0]


def _norm(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


# MOVED

_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
_PRODUCTS = tuple(f"self_attn.{name}_proj.weight" for name in "qkvo") + tuple(
    f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")
)
_OPTIONAL = (
    *(name.replace("weight", "bias") for name in _PRODUCTS),
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
)
_PLACES = 7  # compared: a prompt of three, then two steps

_checked: WeakSet[MtpHeads] = WeakSet()


def window_of(config: PreTrainedConfig) -> int | None:
    """Return how many positions one sees, itself included; None for all before it."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    window = getattr(config, "sliding_window", None)
    return int(window) if window and kinds[-1] == "sliding_attention" else None


def check_layers(heads: MtpHeads, empty: Callable[[MtpHeads, int], MtpKeys]) -> None:
    """Compare the memory with transformers' layers, once for these heads.

    Args:
        heads: parallel or causal ones.
        empty: makes their memory.

    Raises:
        ConfigError: if they differ; names the type of model.
    """
    if heads in _checked:
        return
    if problem := _odd_part(heads) or _odd_numbers(heads, empty):
        raise ConfigError(
            f"MTP heads of variant {heads.variant} cannot decode with layers of model_type"
            f" {heads.config.model_type}: {problem}; layers like those of llama, qwen3 and mistral"
            " are known"
        )
    _checked.add(heads)


def _odd_part(heads: MtpHeads) -> str | None:
    config, layer = heads.config, heads.layer(0)
    names = {name for name, _ in layer.block.named_parameters()}
    if missing := sorted({*_NORMS, *_PRODUCTS} - names):
        return f"they have no {missing[0]}"
    if extra := sorted(names - {*_NORMS, *_PRODUCTS, *_OPTIONAL}):
        return f"they have {extra[0]}"
    if any(kind not in ("full_attention", "sliding_attention") for kind in _kinds(config)):
        return f"they attend by {_kinds(config)[-1]}"
    if getattr(config, "attention_chunk_size", None):
        return "they attend in chunks"
    block = cast(Any, layer.block)
    attention = block.self_attn
    within = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    norms = [block.input_layernorm, block.post_attention_layernorm, layer.norm]
    norms += [norm for norm in within if norm is not None]
    epsilons = {getattr(norm, "variance_epsilon", None) for norm in norms}
    if None in epsilons or len(epsilons) > 1:
        return "their norms are of several kinds, or of an unknown one"
    if getattr(attention, "scaling", None) is None or not hasattr(block.mlp, "act_fn"):
        return "their attention or MLP is of an unknown kind"
    width = getattr(attention, "head_dim", None)
    if any(norm is not None and norm.weight.shape != (width,) for norm in within):
        return "norms of queries and keys span all heads"
    weight = attention.k_proj.weight
    cos, _ = heads.rotary_emb(weight, torch.zeros(1, 1, dtype=torch.long, device=weight.device))
    if cos.shape[-1] != width:
        return f"{cos.shape[-1]} of {width} numbers per head are rotated"
    return None


def _kinds(config: PreTrainedConfig) -> list[str]:
    return getattr(config, "layer_types", None) or []


@torch.no_grad()
def _odd_numbers(heads: MtpHeads, empty: Callable[[MtpHeads, int], MtpKeys]) -> str | None:
    weight = next(heads.parameters())
    generator = torch.Generator().manual_seed(0)  # the decoding's own draws must not move
    hidden = torch.randn(1, _PLACES, heads.hidden_size, generator=generator)
    hidden = hidden.to(device=weight.device, dtype=weight.dtype)
    training = heads.training
    heads.eval()  # no dropout
    try:
        positions = torch.arange(_PLACES, device=weight.device)[None]
        whole = heads.contextual(hidden, positions)[:, 0].float()  # [K, T, d]
    finally:
        heads.train(training)
    memory, found = empty(heads, 1), []
    for first, end in ((0, 3), (3, 4), (4, _PLACES)):
        memory, features = memory.append(hidden[:, first:end], [end - first])
        found.append(features[:, 0].float())
    wanted = whole[:, [2, 3, _PLACES - 1]]
    error = float((torch.stack(found, dim=1) - wanted).norm() / wanted.norm().clamp_min(1e-30))
    allowed = max(1e-4, 10 * torch.finfo(weight.dtype).eps)  # the sums are in another order
    if error <= allowed:
        return None
    return f"what is computed here differs from transformers by {error:.2g} of it"


_JOINT = 16  # positions; beyond, queries that nobody asks about are not computed
_FEW = 8  # positions for which float32 products are faster the other way round


@dataclass(frozen=True)
class Stack:
    """The weights of n layers that read the same. Those of norms are multiplied into what follows.

    Attributes:
        read: [(2 + G) * n * H * h, d], rows for all values, then keys, then queries.
        read_bias: [1, (2 + G) * n * H * h].
        turned_norm: [(1 + G) * n * H, h], norms of keys and queries.
        out: [n, d, G * H * h]; ``out_bias`` [n, 1, d].
        up: [n, 2 * I, d], gate and up; ``up_bias`` [n, 1, 2 * I].
        down: [n, d, I]; ``down_bias`` [n, 1, d].
        norm: [n, 1, d], the heads' last.
        num_keys: n * H.
        width: h.
        scale: of the attention's scores.
        epsilon: of all norms.
        activate: the inner activation.
    """

    read: Tensor
    read_bias: Tensor | None
    turned_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    norm: Tensor
    num_keys: int
    width: int
    scale: float
    epsilon: float
    activate: Callable[[Tensor], Tensor]

    @staticmethod
    def of(layers: Sequence[MtpLayer]) -> Stack:
        """Copy the weights as they are now."""
        blocks = [cast(Any, layer.block) for layer in layers]
        attentions, inners = [each.self_attn for each in blocks], [each.mlp for each in blocks]
        read = [[getattr(each, f"{name}_proj") for each in attentions] for name in "vkq"]
        up = [[getattr(each, f"{name}_proj") for each in inners] for name in ("gate", "up")]
        outs, downs = [each.o_proj for each in attentions], [each.down_proj for each in inners]
        before = torch.stack([each.input_layernorm.weight for each in blocks])[:, None]
        within = torch.stack([each.post_attention_layernorm.weight for each in blocks])[:, None]
        first, turned_norm = attentions[0], None
        heads = [part[0].out_features // first.head_dim for part in read]  # H, H, G * H
        if getattr(first, "q_norm", None) is not None:
            norms = [each.k_norm.weight.repeat(heads[1], 1) for each in attentions]
            norms += [each.q_norm.weight.repeat(heads[2], 1) for each in attentions]
            turned_norm = torch.cat(norms)
        return Stack(
            read=torch.cat([(_weights(part) * before).flatten(0, 1) for part in read]),
            read_bias=_bias(*read, flat=True),
            turned_norm=turned_norm,
            out=_weights(outs),
            out_bias=_bias(outs),
            up=torch.cat([_weights(part) for part in up], dim=1) * within,
            up_bias=_bias(*up),
            down=_weights(downs),
            down_bias=_bias(downs),
            norm=torch.stack([cast(Any, layer.norm).weight for layer in layers])[:, None],
            num_keys=heads[1] * len(layers),
            width=first.head_dim,
            scale=first.scaling,
            epsilon=blocks[0].input_layernorm.variance_epsilon,
            activate=inners[0].act_fn,
        )

    def run(
        self, hidden: Tensor, step: Step, keys: Tensor, values: Tensor, *, every: bool
    ) -> Tensor:
        """Remember new positions, and return what the layers make of them, before the last norm.

        Args:
            hidden: [N, d], what they read.
            step: where they go.
            keys: [B, n * H, C, h], of these layers; written to.
            values: likewise.
            every: return [n, N, d], and not [n, B, d] at the last positions.
        """
        last = slice(None) if every else step.last
        normed = self._normed(hidden)
        size = self.num_keys * self.width
        if every or len(hidden) <= _JOINT:
            read = self._read(normed, 0, None)
            turned = self._turned(read[:, size:], step.waves, 0)
            new_keys, queries = turned[:, : self.num_keys], turned[last, self.num_keys :]
        else:
            read = self._read(normed, 0, 2 * size)
            new_keys = self._turned(read[:, size:], step.waves, 0)
            queries = self._read(normed[last], 2 * size, None)
            queries = self._turned(queries, step.waves[:, last], self.num_keys)
        step.store(values, read[:, :size].unflatten(1, (self.num_keys, self.width)))
        step.store(keys, new_keys)
        found = self._attend(queries, step, keys, values, every=every)
        output = _product(self.out, found, hidden[last])
        if self.out_bias is not None:
            output = output + self.out_bias
        inner = _product(self.up, self._normed(output), self.up_bias)
        gate, up = inner.chunk(2, dim=-1)
        output = _product(self.down, self.activate(gate) * up, output)
        return output if self.down_bias is None else output + self.down_bias

    def finish(self, output: Tensor) -> Tensor:
        """Return what the output matrices read, [n, B, d], of the layers' output [n, B, d]."""
        return self._normed(output) * self.norm

    def _normed(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.epsilon)

    def _read(self, normed: Tensor, first: int, end: int | None) -> Tensor:
        """Return rows ``first`` to ``end`` of what is made of ``normed`` [N, d], [N, rows]."""
        bias = None if self.read_bias is None else self.read_bias[:, first:end]
        return _product(self.read[None, first:end], normed[None], bias)[0]

    def _turned(self, read: Tensor, waves: Tensor, first: int) -> Tensor:
        """Return keys or queries [N, heads, h], normed and rotated.

        Args:
            read: [N, heads * h].
            waves: [2, N, h].
            first: the place of the first of them among all keys and queries.
        """
        shaped = read.unflatten(1, (-1, self.width))
        if self.turned_norm is not None:
            norm = self.turned_norm[first : first + shaped.shape[1]]
            shaped = self._normed(shaped) * norm
        cos, sin = waves[:, :, None]
        return torch.addcmul(shaped * cos, shaped.roll(self.width // 2, -1), sin)

    def _attend(
        self, queries: Tensor, step: Step, keys: Tensor, values: Tensor, *, every: bool
    ) -> Tensor:
        """Return what queries [positions, n * H * G, h] read, [n, positions, G * H * h].

        Queries that share a key head lie one behind the other in the query's length.
        """
        groups = queries.shape[1] // self.num_keys
        queries = queries.unflatten(0, (step.num_rows, -1)).unflatten(2, (self.num_keys, groups))
        queries = queries.permute(0, 2, 3, 1, 4).contiguous()  # [B, n * H, G, positions, h]
        found = []
        for places, slots, mask in step.spans(every=every):
            if mask is not None and mask.shape[2] > 1:
                mask = mask.repeat(1, 1, groups, 1)
            read = F.scaled_dot_product_attention(
                queries[:, :, :, places].flatten(2, 3),
                keys[:, :, slots],
                values[:, :, slots],
                attn_mask=mask,
                scale=self.scale,
            )
            found.append(read.unflatten(2, (groups, -1)))
        together = found[0] if len(found) == 1 else torch.cat(found, dim=3)
        together = together.unflatten(1, (len(self.out), -1))  # [B, n, H, G, positions, h]
        return together.permute(1, 0, 4, 2, 3, 5).reshape(len(self.out), -1, self.out.shape[2])


def _product(weight: Tensor, x: Tensor, added: Tensor | None) -> Tensor:
    """Return ``x @ weight.T + added``, [n, N, outputs], per layer.

    Args:
        weight: [n, outputs, inputs].
        x: [n, N, inputs].
        added: [N or 1, outputs] or [n, N or 1, outputs], or None.
    """
    if not _turns(x):
        matrix = weight.transpose(1, 2)
        return torch.bmm(x, matrix) if added is None else torch.baddbmm(added, x, matrix)
    # through a flat view, so that strides of single rows are those by which kernels are chosen
    columns = x.reshape(-1).view(x.shape).transpose(1, 2)
    num_layers, num_outputs, num_inputs = weight.shape
    if num_layers == 1:  # in two halves, for a batch of one is multiplied the slow way
        weight = weight.reshape(2, -1, num_inputs)
        columns = columns.expand(2, -1, -1)
    if added is None:
        found = torch.bmm(weight, columns)
    else:
        added = added.transpose(-1, -2)
        added = added.reshape(-1, weight.shape[1], added.shape[-1])
        found = torch.baddbmm(added, weight, columns)
    return found.reshape(num_layers, num_outputs, -1).transpose(1, 2)


def _turns(x: Tensor) -> bool:
    """Whether ``weight @ x.T`` is faster than ``x @ weight.T``, x [..., N, inputs].

    On a CPU, float32, seven [1376, 256] matrices read from memory: 360 to 704 us for one position,
    926 to 1215 for eight, 2225 to 1423 for twelve; bfloat16 850 to 438 for one.
    """
    return x.shape[-2] <= _FEW and x.device.type == "cpu" and x.dtype.itemsize >= 4


def _weights(parts: Sequence[nn.Linear]) -> Tensor:
    return torch.stack([part.weight for part in parts])


def _bias(*kinds: Sequence[nn.Linear], flat: bool = False) -> Tensor | None:
    """Return the biases of n layers, [n, 1, outputs of all kinds]; None if there are none.

    Args:
        kinds: per kind of product the n layers'.
        flat: return [1, n * outputs] instead, one kind after the other.
    """
    if all(part.bias is None for parts in kinds for part in parts):
        return None
    found = [torch.stack([_bias_of(part) for part in parts]) for parts in kinds]
    if flat:
        return torch.cat([each.flatten() for each in found])[None]
    return torch.cat(found, dim=1)[:, None]


def _bias_of(part: nn.Linear) -> Tensor:
    return part.weight.new_zeros(part.out_features) if part.bias is None else part.bias


KEYS_BLOCK = 256  # slots; capacity is a multiple of it
_SPAN = 512  # positions that attend at once: bounds the mask of a long prompt


@dataclass(frozen=True)
class MtpKeys:
    """What the heads' layers remember of every row, as it is after the last :meth:`append`.

    Attributes:
        heads: parallel or causal ones.
        stacks: their weights as they were when the text began: those of parallel heads in one
            stack, of causal ones in one stack each.
        keys: per stack [B, n * H, C, h], rotated; slots behind a row's length hold nothing.
        values: likewise.
        waves: cosines, and sines with their sign, of all positions, [2, C, h].
        known_waves: those of other capacities, shared by texts.
        window: a position sees so many, itself included; None for all before it.
        lengths: per row the positions remembered.
    """

    heads: MtpHeads
    stacks: tuple[Stack, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    waves: Tensor
    known_waves: dict[int, Tensor]
    window: int | None
    lengths: tuple[int, ...]

    @staticmethod
    @torch.no_grad()
    def empty(heads: MtpHeads, num_rows: int) -> MtpKeys:
        """Return the memory of rows of which nothing was read yet.

        It holds a copy of the layers' weights, for training may change them between texts; heads
        that do not learn (``requires_grad_(False)``, as exports are loaded) are copied once.

        Raises:
            ConfigError: if the heads' layers are of a kind that is not computed here.
            ValueError: for sequential heads.
        """
        if heads.sequential:
            raise ValueError("sequential heads cannot read a text all at once")
        check_layers(heads, _empty)
        return _empty(heads, num_rows)

    @torch.no_grad()
    def append(
        self, hidden: Tensor, counts: Sequence[int], tokens: Tensor | None = None
    ) -> tuple[MtpKeys, Tensor]:
        """Read on.

        Args:
            hidden: [B, T, d], the base's hidden states, at the heads' tap, of the positions that
                follow, right-padded.
            counts: per row how many of the T are real; where it is 0, the output means nothing.
            tokens: not read.

        Returns:
            The memory with them, and what the output matrices read, [K, B, d], at each row's last
            position: ``heads.contextual`` of the whole text there.
        """
        del tokens
        memory = self._with_room(hidden.shape[1])
        step = Step(memory, counts, hidden.shape[1])
        source = hidden.to(memory.waves.dtype).flatten(0, 1)  # [B * T, d]
        found = []
        for stack, keys, values in zip(memory.stacks, memory.keys, memory.values, strict=True):
            chained = stack is not memory.stacks[-1]
            output = stack.run(source, step, keys, values, every=chained)
            if chained:
                source, output = output[0], output[:, step.last]
            found.append(stack.finish(output))
        features = found[0] if len(found) == 1 else torch.cat(found)
        return replace(memory, lengths=step.lengths), features

    def select(self, rows: Tensor) -> MtpKeys:
        """Keep the rows ``rows`` [R] (long), in that order."""
        kept, rows = rows.tolist(), rows.to(self.waves.device)
        return replace(
            self,
            keys=tuple(each[rows] for each in self.keys),
            values=tuple(each[rows] for each in self.values),
            lengths=tuple(self.lengths[row] for row in kept),
        )

    def _with_room(self, num_new: int) -> MtpKeys:
        capacity, needed = self.waves.shape[1], max(self.lengths) + num_new
        if needed <= capacity:
            return self
        added = -(-max(needed, 2 * capacity) // KEYS_BLOCK) * KEYS_BLOCK - capacity
        return replace(
            self,
            keys=tuple(F.pad(each, (0, 0, 0, added)) for each in self.keys),
            values=tuple(F.pad(each, (0, 0, 0, added)) for each in self.values),
            waves=self._waves(capacity + added),
        )

    def _waves(self, capacity: int) -> Tensor:
        if capacity not in self.known_waves:
            positions = torch.arange(capacity, device=self.waves.device)[None]
            cos, sin = (each[0] for each in self.heads.rotary_emb(self.waves, positions))
            half = sin.shape[1] // 2
            turned = torch.stack([cos, torch.cat([-sin[:, :half], sin[:, half:]], dim=1)])
            self.known_waves[capacity] = turned
        return self.known_waves[capacity]


@dataclass(frozen=True)
class _Kept:
    """What is made of heads that do not learn, as long as their tensors stay as they are."""

    state: list[tuple[int, int]]
    stacks: tuple[Stack, ...]
    waves: dict[int, Tensor]  # by capacity


_kept: WeakKeyDictionary[MtpHeads, _Kept] = WeakKeyDictionary()


def _made_of(heads: MtpHeads) -> _Kept:
    """Return the layers' weights as they are now; of heads that do not learn they are copied once.

    Engines write to weights that learn behind autograd's back, so those are copied for every text:
    half of what a short prompt costs the heads of a small model.
    """
    layers = [heads.layer(i) for i in range(heads.num_heads)]
    groups = [layers] if heads.variant == "parallel" else [[layer] for layer in layers]
    tensors = list(heads.parameters())
    if any(each.requires_grad or each.is_inference() for each in tensors):
        return _Kept([], tuple(map(Stack.of, groups)), {})
    tensors += heads.rotary_emb.buffers()
    state = [(each.data_ptr(), each._version) for each in tensors]
    known = _kept.get(heads)
    if known is None or known.state != state:
        known = _kept[heads] = _Kept(state, tuple(map(Stack.of, groups)), {})
    return known


def _empty(heads: MtpHeads, num_rows: int) -> MtpKeys:
    made = _made_of(heads)
    stacks = made.stacks
    keys = tuple(each.down.new_zeros(num_rows, each.num_keys, 0, each.width) for each in stacks)
    waves = stacks[0].down.new_zeros(2, 0, stacks[0].width)
    window = window_of(heads.config)
    return MtpKeys(heads, stacks, keys, keys, waves, made.waves, window, (0,) * num_rows)


class Step:
    """Where the positions of one ``append`` go, and what they see.

    Args:
        memory: with room for them.
        counts: per row how many are real.
        num_new: T.

    Attributes:
        last: places of the rows' last ones among all.
        waves: [2, B * T, h], theirs.
        lengths: per row the positions remembered afterwards.
    """

    def __init__(self, memory: MtpKeys, counts: Sequence[int], num_new: int) -> None:
        before, device = memory.lengths, memory.waves.device
        final = [max(count, 1) - 1 for count in counts]
        self.num_new, self.num_rows = num_new, len(before)
        self.lengths = tuple(n + count for n, count in zip(before, counts, strict=True))
        self._window, self._most = memory.window, max(before) + num_new
        self._start = before[0]
        self._spans: list[tuple[slice, slice, Tensor | None]] | None = None
        self.last: slice | Tensor
        if self.num_rows == 1:
            self._position = before[0] + final[0]
            self.last = slice(final[0], final[0] + 1)
            self.waves = memory.waves[:, before[0] : before[0] + num_new]
            return
        self._rows = torch.arange(self.num_rows, device=device)[:, None]
        starts, ends = torch.tensor([before, final], device=device)
        self._ahead = starts[:, None] + torch.arange(num_new, device=device)  # [B, T]
        self._ends = (starts + ends)[:, None]
        self.last = self._rows[:, 0] * num_new + ends
        self.waves = memory.waves[:, self._ahead.flatten()]

    def store(self, buffer: Tensor, new: Tensor) -> None:
        """Write ``new`` [B * T, n * H, h] into ``buffer`` [B, n * H, C, h]."""
        if self.num_rows == 1:
            buffer[0, :, self._start : self._start + self.num_new] = new.transpose(0, 1)
        else:
            buffer[self._rows, :, self._ahead] = new.unflatten(0, (self.num_rows, self.num_new))

    def spans(self, *, every: bool) -> list[tuple[slice, slice, Tensor | None]]:
        """Return who attends to what: places among a row's queries, slots, and their mask.

        Masks are [B or 1, 1, queries, slots]; None where all slots are seen.

        Args:
            every: all new positions ask, and not each row's last one only.
        """
        if self.num_rows == 1 and (self.num_new == 1 or not every):
            return [(slice(0, 1), self._seen(self._position, self._position + 1), None)]
        if not every:
            return [self._span(slice(0, 1), self._ends, 0, self._most)]
        if self._spans is None:  # the same for all layers
            self._spans = []
            for first in range(0, self.num_new, _SPAN):
                places = slice(first, min(first + _SPAN, self.num_new))
                if self.num_rows == 1:
                    first, end = self._start + first, self._start + places.stop
                    at = torch.arange(first, end, device=self.waves.device)[None]
                    self._spans.append(self._span(places, at, first, end))
                else:
                    self._spans.append(self._span(places, self._ahead[:, places], 0, self._most))
        return self._spans

    def _seen(self, first: int, end: int) -> slice:
        """Return the slots before ``end`` that a position at ``first`` or later may see."""
        return slice(0 if self._window is None else max(0, first + 1 - self._window), end)

    def _span(
        self, places: slice, positions: Tensor, first: int, end: int
    ) -> tuple[slice, slice, Tensor]:
        seen = self._seen(first, end)
        slots = torch.arange(seen.start, end, device=positions.device)
        mask = slots <= positions[..., None]
        if self._window is not None:
            mask &= slots > positions[..., None] - self._window
        return places, seen, mask[:, None]


BLOCK = 256  # slots; capacity is a multiple of it


class Slots:
    """Room for what the layers hand to their caches, and the rotary waves of every slot.

    Writing happens in place, and several memories of one text share it: each knows by its lengths
    what is its own. What lies behind belongs to nobody, and nodes of trees are put there.

    Args:
        heads: sequential ones.

    Attributes:
        kept: per module what its layer calls keys and values, [B, H, C, h] each, of any H and h;
            nothing before it has run.
    """

    def __init__(self, heads: MtpHeads) -> None:
        self._heads = heads
        self.kept: list[list[Tensor]] = [[] for _ in range(heads.num_heads)]
        self._capacity = 0
        self._waves: Any = None

    def reserve(self, size: int) -> None:
        """Make room for ``size`` slots."""
        if size <= self._capacity:
            return
        capacity = -(-max(size, 2 * self._capacity) // BLOCK) * BLOCK
        added = capacity - self._capacity
        self.kept = [[F.pad(each, (0, 0, 0, added)) for each in layer] for layer in self.kept]
        self._capacity = capacity
        weight = next(self._heads.parameters())
        positions = torch.arange(capacity, device=weight.device)[None]
        self._waves = self._heads.waves(weight, positions)

    def waves(self, places: Tensor) -> Any:
        """Return the position embeddings [B, T, ...] of the slots ``places`` [B, T]."""
        if isinstance(self._waves, tuple):
            return tuple(each[0, places] for each in self._waves)
        return self._waves[0, places]

    def write(self, module: int, pair: Sequence[Tensor], where: Any) -> list[Tensor]:
        """Put [B, H, T, h] each into the slots ``where``, and return all there is of the module."""
        if not self.kept[module]:
            self.kept[module] = [
                each.new_zeros(*each.shape[:2], self._capacity, each.shape[3]) for each in pair
            ]
        for kept, new in zip(self.kept[module], pair, strict=True):
            if isinstance(where, slice):
                kept[:, :, where] = new
            else:
                kept[where[0], :, where[1]] = new.transpose(1, 2)
        return self.kept[module]

    def select(self, rows: Tensor) -> Slots:
        """Return a copy of the rows ``rows`` [R] (long), in that order."""
        found = Slots(self._heads)
        found.kept = [[each[rows.to(each.device)] for each in layer] for layer in self.kept]
        found._capacity, found._waves = self._capacity, self._waves
        return found


@dataclass(frozen=True)
class Pass:
    """What the layer of one module takes for its cache, in one pass.

    Attributes:
        slots: where its keys and values are kept.
        module: which one it is.
        where: the slots of the new ones: a slice that all rows share, or rows [B, 1] and
            slots [B, T].
        seen: the layer looks at the first so many slots, those of ``where`` among them.
    """

    slots: Slots
    module: int
    where: Any
    seen: int

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int = 0, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep what is new, and return all up to ``seen``, as transformers' caches do."""
        kept = self.slots.write(self.module, (keys, values), self.where)
        return kept[0][:, :, : self.seen], kept[1][:, :, : self.seen]


@dataclass(frozen=True)
class MtpTexts:
    """What the modules remember of every row, as it is after the last :meth:`append`.

    Attributes:
        heads: sequential ones.
        embed: the base's input embedding.
        slots: keys and values; slots behind a row's length hold nothing.
        lengths: per row the position of the root, which is the number of slots in use.
        ends: the same, [B] long where the heads lie.
        root: [K, B, d], G^k at the root; where the text is too short for it, anything finite.
    """

    heads: MtpHeads
    embed: Embed
    slots: Slots
    lengths: tuple[int, ...]
    ends: Tensor
    root: Tensor

    @staticmethod
    def empty(heads: MtpHeads, num_rows: int, embed: Embed | None) -> MtpTexts:
        """Return the memory of rows of which nothing was read yet.

        Raises:
            ValueError: without an embedding, or if the layers' attention is neither full nor that
                of a sliding window.
        """
        if embed is None:
            raise ValueError("these heads read tokens through embed, which is None")
        text_window(heads.config)
        weight = next(heads.parameters())
        ends = torch.zeros(num_rows, dtype=torch.long, device=weight.device)
        root = weight.new_zeros(heads.num_heads, num_rows, heads.hidden_size)
        return MtpTexts(heads, embed, Slots(heads), (0,) * num_rows, ends, root)

    def append(
        self, hidden: Tensor, counts: Sequence[int], tokens: Tensor
    ) -> tuple[MtpTexts, Tensor]:
        """Read on.

        Args:
            hidden: [B, T, d], the base's final hidden states of the positions that follow,
                right-padded.
            counts: per row how many of the T are real; where it is 0, nothing changes.
            tokens: [B, T], the token that came after each of them, the root at the last one.

        Returns:
            The memory with them, and G^k at each row's root, [K, B, d].
        """
        memory, _ = self.read(hidden, counts, tokens)
        return memory, memory.root

    @torch.no_grad()
    def read(
        self, hidden: Tensor, counts: Sequence[int], tokens: Tensor
    ) -> tuple[MtpTexts, Tensor]:
        """Do what :meth:`append` does; return G^k at every new token, [K, B, T, d]."""
        heads, device = self.heads, self.ends.device
        num_rows, num_new = tokens.shape
        start = max(self.lengths)
        seen = start + num_new
        self.slots.reserve(seen)
        ahead = torch.arange(num_new, device=device)
        places = self.ends[:, None] + ahead  # [B, T]
        where: Any = slice(start, seen)
        if min(self.lengths) < start:
            where = torch.arange(num_rows, device=device)[:, None], places
        distances = places[..., None] - torch.arange(seen, device=device)  # [B, T, L]
        allowed = distances >= 0
        if (window := text_window(heads.config)) is not None:
            allowed &= distances < window
        mask = additive(allowed, self.root.dtype)
        waves = self.slots.waves(places)
        embedded = self.embed(tokens).to(self.root.dtype)
        before = hidden.to(self.root.dtype)
        found: list[Tensor] = []
        for i in range(heads.num_heads):
            if i:
                # what was before the first token of this module is no part of it
                hide(mask[:, 0, :, i - 1], places >= i)
                before = torch.cat([self.root[i - 1, :, None], found[-1][:, :-1]], dim=1)
            cache = Pass(self.slots, i, where, seen)
            joined = heads.layer(i).join(before, embedded, hidden_first=heads.hidden_first)
            found.append(heads.attend(i, joined, mask, places, waves, cache)[1])
        every = torch.stack(found)
        lengths = tuple(n + count for n, count in zip(self.lengths, counts, strict=True))
        if num_rows == 1:
            ends = self.ends + counts[0]
            root = every[:, :, counts[0] - 1] if counts[0] else self.root
        else:
            new = torch.tensor(counts, device=device)
            ends = self.ends + new
            rows = torch.arange(num_rows, device=device)
            root = every[:, rows, (new - 1).clamp(min=0)]
            if min(counts) == 0:
                root = torch.where(new[:, None] > 0, root, self.root)
        return replace(self, lengths=lengths, ends=ends, root=root), every

    def select(self, rows: Tensor) -> MtpTexts:
        """Keep the rows ``rows`` [R] (long), in that order."""
        here = rows.to(self.ends.device)
        return replace(
            self,
            slots=self.slots.select(here),
            lengths=tuple(self.lengths[row] for row in rows.tolist()),
            ends=self.ends[here],
            root=self.root[:, here],
        )

    def as_it_was(self, lengths: Sequence[int], every: Tensor) -> MtpTexts:
        """Return this memory of one row as it was when the root stood elsewhere, one row for each.

        Args:
            lengths: of the rows to come: positions of the root.
            every: [K, 1, T, d], G^k at the positions from 1 on, as :meth:`read` returned them.
        """
        ends = torch.tensor(lengths, device=self.ends.device)
        memory = self.select(torch.zeros_like(ends))
        return replace(memory, lengths=tuple(lengths), ends=ends, root=every[:, 0, ends - 1])


def text_window(config: PreTrainedConfig) -> int | None:
    """Return how many tokens a layer looks back upon, itself included; None for all.

    Raises:
        ValueError: for attention of another kind.
    """
    kinds = getattr(config, "layer_types", None)
    window: int | None = getattr(config, "sliding_window", None)
    kind = kinds[0] if kinds else "full_attention" if window is None else "sliding_attention"
    if not kinds and window is None and getattr(config, "attention_chunk_size", None):
        kind = "chunked_attention"
    if kind not in ("full_attention", "sliding_attention"):
        raise ValueError(
            f"sequential MTP heads with {kind} cannot draft: their layers must have"
            " full_attention or sliding_attention"
        )
    return window if kind == "sliding_attention" else None


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask [B, 1, T, L] that layers add to their scores, of bools [B, T, L]."""
    zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return hide(zeros, ~allowed)[:, None]


def hide(mask: Tensor, which: Tensor) -> Tensor:
    """Mask more of an additive mask, in place."""
    return mask.masked_fill_(which, torch.finfo(mask.dtype).min)
