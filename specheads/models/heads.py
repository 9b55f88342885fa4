"""Heads on the base model's last hidden state: Medusa heads, and what makes Hydra heads of them.

Head i (counted from 0) predicts the token i + 2 positions ahead (Medusa, arXiv:2401.10774, section
2.1). Parallel heads guess from the hidden state alone. Sequential ones also read the tokens drafted
before their own: all of them (``condition``, Hydra, arXiv:2402.05109), or the last one through a
low-rank bias on the logits (``markov_rank``). Shapes: K heads, d hidden size, V vocabulary, V' the
tokens that the heads can guess (V unless pruned).

What one head is made of. ``heads.py`` puts K of them together.

Shapes: d hidden size, V vocabulary, V' the tokens that the head can guess, r an inner size.

One attention layer between base model and heads (Hydra++, arXiv:2402.05109, section 4.3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel, PreTrainedConfig

from specheads.losses.cross_entropy import IGNORE
from specheads.models.head_cache import PrefixKeys
from specheads.models.output import FINAL

if TYPE_CHECKING:
    from specheads.models.output import OutputLayer


class ResBlock(nn.Linear):
    """``x + SiLU(W x + b)``, starting as the identity: W and b are zero."""

    def __init__(self, hidden_size: int, dtype: torch.dtype | None = None) -> None:
        super().__init__(hidden_size, hidden_size, dtype=dtype)

    def reset_parameters(self) -> None:
        """Set weight and bias to zero."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., d] to [..., d]."""
        x = x.to(self.weight.dtype)  # the base may run in a narrower one
        return x + F.silu(super().forward(x))


class Condition(nn.Linear):
    """Adds what the tokens drafted before say; zero at the start.

    Hydra's first block reads the hidden state and the embeddings side by side, through a residual
    and a gated matrix of their own. Here the embeddings join the hidden state, and the block reads
    the sum: the same with its two matrices tied, at half the parameters, and what a token adds does
    not depend on the hidden state, so that small vocabularies can be tabulated.
    """

    def __init__(self, num_tokens: int, hidden_size: int, dtype: torch.dtype | None) -> None:
        super().__init__(num_tokens * hidden_size, hidden_size, dtype=dtype)

    def reset_parameters(self) -> None:
        """Set weight and bias to zero."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class Joined(nn.Module):
    """The first block of published Hydra heads: hidden state and embeddings side by side.

    ``residual(x) + SiLU(gate(x))``, two matrices [d, (n + 1) d] with biases. Heads that are trained
    here have :class:`Condition` instead; this is for those that were trained elsewhere.
    """

    def __init__(self, num_tokens: int, hidden_size: int, dtype: torch.dtype | None) -> None:
        super().__init__()
        width = (num_tokens + 1) * hidden_size
        self.gate = nn.Linear(width, hidden_size, dtype=dtype)
        self.residual = nn.Linear(width, hidden_size, dtype=dtype)

    def forward(self, hidden: Tensor, conditions: Tensor) -> Tensor:
        """Map [..., d] and [..., n * d] to [..., d]; the first may be the same for many of them."""
        hidden = hidden.expand(*conditions.shape[:-1], hidden.shape[-1])
        x = torch.cat([hidden, conditions.to(hidden.dtype)], dim=-1).to(self.gate.weight.dtype)
        found: Tensor = self.residual(x) + F.silu(self.gate(x))
        return found


class LowRank(nn.Module):
    """An output matrix ``up @ down``: [V, r] times [r, d]."""

    def __init__(
        self, vocab_size: int, rank: int, hidden_size: int, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.down = nn.Linear(hidden_size, rank, bias=False, dtype=dtype)
        self.up = nn.Linear(rank, vocab_size, bias=False, dtype=dtype)


class Markov(nn.Module):
    """A bias on the logits from one token, ``up @ down[token]``; zero at the start.

    The correction that block-parallel drafters of 2026 put on their logits (DSpark), on heads.
    """

    def __init__(
        self, vocab_size: int, num_outputs: int, rank: int, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.down = nn.Embedding(vocab_size, rank, dtype=dtype)
        self.up = nn.Linear(rank, num_outputs, bias=False, dtype=dtype)
        nn.init.zeros_(self.up.weight)


class MedusaHead(nn.Module):
    """One head: its blocks, its own output matrix if it has one, and what reads drafted tokens.

    Args:
        num_layers: residual blocks.
        hidden_size: d.
        vocab_size: V.
        num_outputs: rows of its own output matrix; None shares the base's.
        rank: inner size of a low-rank one, 0 for a whole one.
        markov_rank: inner size of the Markov correction, 0 for none.
        markov_outputs: V'.
        num_conditions: tokens drafted before that it reads.
        joined: read them as published Hydra heads do, see :class:`Joined`.
        dtype: of the parameters.
    """

    def __init__(
        self,
        num_layers: int,
        hidden_size: int,
        vocab_size: int,
        num_outputs: int | None,
        *,
        rank: int = 0,
        markov_rank: int = 0,
        markov_outputs: int = 0,
        num_conditions: int = 0,
        joined: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResBlock(hidden_size, dtype) for _ in range(num_layers))
        self.lm_head: nn.Linear | LowRank | None = None
        if num_outputs is not None and rank:
            self.lm_head = LowRank(num_outputs, rank, hidden_size, dtype)
        elif num_outputs is not None:
            self.lm_head = nn.Linear(hidden_size, num_outputs, bias=False, dtype=dtype)
        self.markov = (
            Markov(vocab_size, markov_outputs, markov_rank, dtype) if markov_rank else None
        )
        self.condition: Condition | None = None
        self.joined: Joined | None = None
        if num_conditions and joined:
            self.joined = Joined(num_conditions, hidden_size, dtype)
        elif num_conditions:
            self.condition = Condition(num_conditions, hidden_size, dtype)

    def forward(
        self, hidden: Tensor, conditions: Tensor | None = None, before: Tensor | None = None
    ) -> Tensor:
        """Map the base's hidden states to what the output matrix reads.

        Args:
            hidden: [..., d].
            conditions: [..., tokens * d], embeddings of the tokens drafted before, side by side.
            before: [...], the token drafted before, for the Markov correction.

        Returns:
            [..., d], or [..., r] before a low-rank matrix; with a Markov correction and r more.
        """
        if conditions is not None:
            hidden = self.conditioned(hidden, conditions)
        hidden = self.own_features(hidden)
        if self.markov is not None:
            assert before is not None
            bias = self.markov.down(before)
            hidden = torch.cat([hidden.to(bias.dtype), bias], dim=-1)
        return hidden

    def conditioned(self, hidden: Tensor, conditions: Tensor) -> Tensor:
        """Put the tokens drafted before into the hidden state; the arguments are ``forward``'s."""
        if self.joined is not None:
            found: Tensor = self.joined(hidden, conditions)
            return found
        assert self.condition is not None
        weight = self.condition.weight
        return hidden.to(weight.dtype) + self.condition(conditions.to(weight.dtype))

    def own_features(self, x: Tensor) -> Tensor:
        """Map [..., d], the condition added, to what its own part of the matrix reads."""
        for block in self.blocks:
            x = block(x)
        if isinstance(self.lm_head, LowRank):
            x = self.lm_head.down(x.to(self.lm_head.down.weight.dtype))
        return x

    def own_product(self, x: Tensor, base_weight: Tensor) -> Tensor:
        """Map [..., d], the condition added, to [..., V'], without a Markov correction."""
        weight = self.own_weight(base_weight)
        return F.linear(self.own_features(x).to(weight.dtype), weight)

    def own_weight(self, base_weight: Tensor) -> Tensor:
        """Return the output matrix but for a Markov correction; ``base_weight`` [V, d] if shared.

        Its last factor, if it is of low rank.
        """
        if self.lm_head is None:
            return base_weight
        last = self.lm_head.up if isinstance(self.lm_head, LowRank) else self.lm_head
        weight: Tensor = last.weight
        return weight

    def output_weight(self, base_weight: Tensor) -> Tensor:
        """Return the matrix for what ``forward`` returns; ``base_weight`` [V, d] if shared."""
        weight = self.own_weight(base_weight)
        if self.markov is None:
            return weight
        return torch.cat([weight.to(self.markov.up.weight.dtype), self.markov.up.weight], dim=1)


SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
)

FINAL_NORM = "final_norm"  # among the sizes: true where a norm follows, as in published Hydra heads


def prefix_sizes(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the sizes of a layer like those of the base model with ``config``; plain JSON."""
    config = config.get_text_config()
    found = {key: getattr(config, key, None) for key in SIZES}
    found["intermediate_size"] = found["intermediate_size"] or 4 * config.hidden_size
    return {key: value for key, value in found.items() if value is not None}


class PrefixLayer(nn.Module):
    """A Llama layer over the base's last hidden states, the identity at the start.

    A head sees one hidden state; this layer lets it look back over all of them. Whatever the base
    model is, the layer is Llama's, of the same sizes; rotary positions are those of the text.

    Args:
        sizes: from :func:`prefix_sizes`.
        dtype: of the parameters; None means torch's default.
    """

    def __init__(self, sizes: dict[str, Any], dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.sizes = dict(sizes)
        config = LlamaConfig(
            **{key: value for key, value in sizes.items() if key != FINAL_NORM},
            vocab_size=1,
            num_hidden_layers=1,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
        config._attn_implementation = "sdpa"
        # transformers' own model builds masks, packed documents and caches; only its one layer and
        # the rotary table are used
        model = LlamaModel(config)
        model.embed_tokens = cast(Any, None)
        if not sizes.get(FINAL_NORM):
            model.norm = cast(Any, nn.Identity())
        self.model = model
        if dtype is not None:
            self.to(dtype)
        layer = cast(Any, model.layers[0])
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PrefixLayer:
        """Move or cast everything but the rotary table, which would be rounded: it only moves."""
        rotary: Any = self.model.rotary_emb
        table = rotary.inv_freq
        super()._apply(fn, recurse)
        rotary.inv_freq = table.to(rotary.inv_freq.device)
        return self

    def forward(self, hidden: Tensor, position_ids: Tensor) -> Tensor:
        """Map hidden states [B, T, d] of whole documents to [B, T, d].

        Args:
            hidden: several documents in a row if packed.
            position_ids: [B, T], restarting at 0 with every document.
        """
        weight = cast(Tensor, cast(Any, self.model.layers[0]).self_attn.o_proj.weight)
        output = self.model(
            inputs_embeds=hidden.to(weight.dtype), position_ids=position_ids, use_cache=False
        )
        found: Tensor = output.last_hidden_state
        return found


LM_HEADS = ("own", "shared", "low_rank", "pruned")
_MAX_STACKED = 1 << 22  # parameters that a snapshot may copy


class MedusaHeads(nn.Module):
    """K heads.

    Args:
        num_heads: K.
        num_layers: residual blocks per head; 0 leaves only the output matrix.
        hidden_size: d of the base model.
        vocab_size: V of the base model.
        lm_head: ``own``, one matrix per head (fill it with ``init_from_output``); ``shared``, the
            base's; ``low_rank``, one ``up @ down`` per head; ``pruned``, own ones for some tokens.
        dtype: of the parameters; None means torch's default.
        rank: low_rank: the inner size.
        num_kept: pruned: V', the number of tokens (choose them with ``init_from_output``).
        markov_rank: inner size of the bias from the token drafted before; 0 for none.
        condition: read the tokens drafted before (Hydra).
        joined: read them as published Hydra heads do, side by side with the hidden state; only with
            ``condition``.
        prefix: sizes of one attention layer in front of all heads, see :class:`PrefixLayer`.

    Attributes:
        token_map: [V'] token ids that the heads can guess; None for all.

    Raises:
        ValueError: for an unknown ``lm_head`` or numbers out of range.
    """

    token_map: Tensor | None

    def __init__(
        self,
        num_heads: int,
        num_layers: int,
        hidden_size: int,
        vocab_size: int,
        lm_head: str = "own",
        dtype: torch.dtype | None = None,
        *,
        rank: int = 0,
        num_kept: int = 0,
        markov_rank: int = 0,
        condition: bool = False,
        joined: bool = False,
        prefix: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if lm_head not in LM_HEADS:
            raise ValueError(f"lm_head must be one of {', '.join(LM_HEADS)}, got {lm_head!r}")
        if num_heads < 1 or num_layers < 0:
            raise ValueError(
                f"num_heads must be at least 1 and num_layers at least 0, got {num_heads} and "
                f"{num_layers}"
            )
        if joined and not condition:
            raise ValueError("joined is how a condition is read, and there is none")
        if markov_rank < 0:
            raise ValueError(f"markov_rank must be at least 0, got {markov_rank}")
        if lm_head == "low_rank" and not 1 <= rank <= min(hidden_size, vocab_size):
            most = min(hidden_size, vocab_size)
            raise ValueError(f"rank must be in 1..{most}, the sizes of the matrix, got {rank}")
        if lm_head == "pruned" and not 1 <= num_kept <= vocab_size:
            raise ValueError(f"num_kept must be in 1..{vocab_size}, the vocabulary, got {num_kept}")
        self.num_heads, self.num_layers = num_heads, num_layers
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.lm_head, self.condition, self.markov_rank = lm_head, condition, markov_rank
        self.joined = joined
        self.rank = rank if lm_head == "low_rank" else 0
        self.num_outputs = num_kept if lm_head == "pruned" else vocab_size
        kept = torch.arange(self.num_outputs) if lm_head == "pruned" else None
        self.register_buffer("token_map", kept)
        self.heads = nn.ModuleList(
            MedusaHead(
                num_layers,
                hidden_size,
                vocab_size,
                None if lm_head == "shared" else self.num_outputs,
                rank=self.rank,
                markov_rank=markov_rank,
                markov_outputs=self.num_outputs,
                num_conditions=i + 1 if condition else 0,
                joined=joined,
                dtype=dtype,
            )
            for i in range(num_heads)
        )
        self.prefix = PrefixLayer(prefix, dtype) if prefix else None

    @property
    def kind(self) -> str:
        """What an export calls them: ``medusa`` or ``hydra``."""
        return "hydra" if self.condition else "medusa"

    @property
    def sequential(self) -> bool:
        """Whether a head reads tokens drafted before its own."""
        return self.condition or self.markov_rank > 0

    @property
    def tap(self) -> str:
        """Which hidden state of the base the heads read."""
        return FINAL

    def memory(self, num_rows: int, embed: object = None) -> PrefixKeys | None:
        """Return what the prefix layer remembers of texts while decoding, before any was read."""
        del embed
        return None if self.prefix is None else PrefixKeys.empty(self.prefix, num_rows)

    def head(self, i: int) -> MedusaHead:
        """Return head ``i``."""
        head = self.heads[i]
        assert isinstance(head, MedusaHead)
        return head

    @torch.no_grad()
    def init_from_output(self, weight: Tensor, kept: Tensor | None = None) -> None:
        """Make every head's output matrix the base's [V, d], or as near to it as its form allows.

        Low rank takes the nearest matrix of that rank (truncated SVD); nothing happens if shared.

        Args:
            weight: the base's output matrix.
            kept: pruned: the [V'] token ids to keep; None keeps the first ones.

        Raises:
            ValueError: if shapes differ, or ``kept`` is not a set of V' tokens.
        """
        if weight.shape != (self.vocab_size, self.hidden_size):
            raise ValueError(
                f"the output matrix is {tuple(weight.shape)}, the heads were built for "
                f"{(self.vocab_size, self.hidden_size)}"
            )
        if self.token_map is not None and kept is not None:
            tokens = kept.unique()
            if len(tokens) != self.num_outputs or not 0 <= tokens[0] <= tokens[-1] < len(weight):
                raise ValueError(
                    f"{len(tokens)} distinct tokens are to be kept, expected {self.num_outputs}, "
                    f"all below {len(weight)}"
                )
            self.token_map.copy_(tokens)
        if self.lm_head == "low_rank":
            left, values, right = torch.linalg.svd(weight.float(), full_matrices=False)
            root = values[: self.rank].sqrt()
            up, down = left[:, : self.rank] * root, root[:, None] * right[: self.rank]
        for head in map(self.head, range(self.num_heads)):
            if self.lm_head == "low_rank":
                head.get_parameter("lm_head.up.weight").copy_(up)
                head.get_parameter("lm_head.down.weight").copy_(down)
            elif self.lm_head != "shared":
                own = weight if self.token_map is None else weight[self.token_map.to(weight.device)]
                head.get_parameter("lm_head.weight").copy_(own)

    def contextual(
        self,
        hidden: Tensor,
        position_ids: Tensor,
        tokens: Tensor | None = None,
        embed: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return what the heads read: ``hidden`` [B, T, d] behind the prefix layer, if any.

        Args:
            hidden: last hidden states of whole documents, several in a row if packed.
            position_ids: [B, T], restarting at 0 with every document.
            tokens: not read here.
            embed: not used here.
        """
        del tokens, embed
        return hidden if self.prefix is None else self.prefix(hidden, position_ids)

    def features(
        self,
        i: int,
        hidden: Tensor,
        tokens: Tensor | None = None,
        embed: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return what the output matrix of head ``i`` reads, [..., d_i].

        Args:
            i: the head.
            hidden: [..., d], behind the prefix layer if there is one.
            tokens: [..., >= i + 1], the tokens after the hidden state's own, the root first; for
                sequential heads.
            embed: the base's input embedding; for ``condition``.
        """
        head = self.head(i)
        if not self.sequential:
            return head(hidden)
        if tokens is None:
            raise ValueError("these heads read the tokens drafted before, but tokens is None")
        conditions = None
        if self.condition:
            if embed is None:
                raise ValueError("these heads read tokens through embed, which is None")
            with torch.no_grad():  # the base's own; Hydra leaves it as it is
                conditions = self.embedded(tokens[..., : i + 1], embed).flatten(-2)
        return head(hidden, conditions, tokens[..., i] if self.markov_rank else None)

    def embedded(self, tokens: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Return how the heads read tokens [...], as [..., d]; ``embed`` is the base's."""
        found = embed(tokens)
        return found if self.joined else normalised(found)

    def output_weight(self, i: int, base_weight: Tensor) -> Tensor:
        """Return the matrix [V', d_i] that head ``i`` multiplies its features with.

        With a Markov correction this joins two matrices into a new one.
        """
        return self.head(i).output_weight(base_weight)

    def output_bias(self, bias: Tensor | None) -> Tensor | None:
        """Return the entries [V'] of the base's output bias [V] that the heads use."""
        if bias is None or self.token_map is None:
            return bias
        return bias[self.token_map.to(bias.device)]

    def token_ids(self, places: Tensor) -> Tensor:
        """Return the token ids of ``places`` among the V' tokens, of any shape."""
        return places if self.token_map is None else self.token_map[places]

    def map_labels(self, labels: Tensor) -> Tensor:
        """Return places among the V' tokens; IGNORE for tokens that the heads cannot guess."""
        if self.token_map is None:
            return labels
        places = torch.full((self.vocab_size,), IGNORE, device=labels.device)
        places[self.token_map] = torch.arange(self.num_outputs, device=labels.device)
        return torch.where(labels == IGNORE, IGNORE, places[labels.clamp_min(0)])

    def full_logits(self, logits: Tensor) -> Tensor:
        """Spread logits [..., V'] over the vocabulary, [..., V]; -inf for tokens not guessed."""
        if self.token_map is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        full[..., self.token_map] = logits
        return full

    def forward(self, hidden: Tensor, output: OutputLayer, **sequential: Any) -> Tensor:
        """Return the logits of all heads; see ``logits``."""
        return self.logits(hidden, output, **sequential)

    def head_logits(
        self,
        i: int,
        hidden: Tensor,
        output: OutputLayer,
        tokens: Tensor | None = None,
        embed: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return the logits [..., V'] of head ``i``; the arguments are those of ``features``."""
        matrix = self.output_weight(i, output.weight)
        features = self.features(i, hidden, tokens, embed)
        return self.finish(F.linear(features.to(matrix.dtype), matrix), output)

    def logits(
        self,
        hidden: Tensor,
        output: OutputLayer,
        tokens: Tensor | None = None,
        embed: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return the logits [K, ..., V'] of all heads, computed as the base computes its own.

        Args:
            hidden: [..., d], behind the prefix layer if there is one.
            output: the base's output layer; its matrix is used where the heads share it.
            tokens: [..., >= K] of sequential heads, see ``features``.
            embed: the base's input embedding, see ``features``.
        """
        if self.lm_head != "shared" or self.markov_rank:
            heads = range(self.num_heads)
            return torch.stack([self.head_logits(i, hidden, output, tokens, embed) for i in heads])
        # one product reads the matrix once for all heads
        features = [self.features(i, hidden, tokens, embed) for i in range(self.num_heads)]
        products = F.linear(torch.stack(features).to(output.weight.dtype), output.weight)
        return self.finish(products, output)

    @torch.no_grad()
    def snapshot(self, output: OutputLayer) -> Callable[[Tensor], Tensor]:
        """Return a function like ``logits``, for decoding: the weights as they are now, stacked.

        Raises:
            ValueError: if the heads are sequential.
        """
        if self.sequential:
            raise ValueError("sequential heads cannot guess all at once")
        products = self.own_products(output)
        return lambda hidden: self.finish(products(hidden), output)

    @torch.no_grad()
    def own_products(self, output: OutputLayer) -> Callable[[Tensor], Tensor]:
        """Return a function from hidden states [..., d] to what all heads make of them alone.

        That is [K, ..., V'], before ``finish`` and without a Markov correction; heads with a
        condition make nothing of a hidden state alone.

        One batched product per layer replaces one per head, which is most of the time of small
        heads (146 to 55 us for six of width 256). Large heads are not copied: reading them costs
        what it costs.
        """
        heads = list(map(self.head, range(self.num_heads)))
        if sum(parameter.numel() for parameter in self.heads.parameters()) > _MAX_STACKED:

            @torch.no_grad()
            def each(hidden: Tensor) -> Tensor:
                if self.lm_head != "shared":
                    return torch.stack([head.own_product(hidden, output.weight) for head in heads])
                # one product reads the matrix once for all heads
                features = torch.stack([head.own_features(hidden) for head in heads])
                return F.linear(features.to(output.weight.dtype), output.weight)

            return each

        def stacked(name: str) -> Tensor:
            return torch.stack([head.get_parameter(name) for head in heads])

        blocks = [
            (stacked(f"blocks.{i}.weight").transpose(1, 2), stacked(f"blocks.{i}.bias")[:, None])
            for i in range(self.num_layers)
        ]
        names = {"shared": [], "low_rank": ["lm_head.down.weight", "lm_head.up.weight"]}
        matrices = [
            stacked(name).transpose(1, 2) for name in names.get(self.lm_head, ["lm_head.weight"])
        ]

        @torch.no_grad()
        def all_at_once(hidden: Tensor) -> Tensor:
            x = hidden.reshape(1, -1, hidden.shape[-1]).expand(self.num_heads, -1, -1)
            for weight, bias in blocks:
                x = x.to(weight.dtype)
                x = x + F.silu(torch.baddbmm(bias, x, weight))
            for matrix in matrices:
                x = torch.bmm(x.to(matrix.dtype), matrix)
            if not matrices:
                x = F.linear(x.to(output.weight.dtype), output.weight)
            return x.view(self.num_heads, *hidden.shape[:-1], self.num_outputs)

        return all_at_once

    def finish(self, products: Tensor, output: OutputLayer) -> Tensor:
        """Return logits [..., V'] as the base makes its own: with its bias, scale and softcap."""
        bias = self.output_bias(output.bias)
        return output.finish(products if bias is None else products + bias)


def normalised(embedding: Tensor) -> Tensor:
    """Return embeddings [..., d] at unit root mean square: their scale differs between models."""
    return F.rms_norm(embedding, embedding.shape[-1:], eps=1e-6)
