"""What Medusa and Hydra heads are made of: one head, and the attention layer before all of them.

Shapes: d hidden size, V vocabulary, V' the tokens that a head can guess, r an inner size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel, PreTrainedConfig


class ZeroLinear(nn.Linear):
    """A linear layer whose weight and bias start as zero.

    As the condition of a Hydra head it adds what the tokens drafted before say. Hydra's first block
    reads the hidden state and the embeddings side by side, through a residual and a gated matrix of
    their own. Here the embeddings join the hidden state, and the block reads the sum: the same with
    its two matrices tied, at half the parameters, and what a token adds does not depend on the
    hidden state, so that small vocabularies can be tabulated.
    """

    def reset_parameters(self) -> None:
        """Set weight and bias to zero."""
        for each in self.parameters():
            nn.init.zeros_(each)


class ResBlock(ZeroLinear):
    """``x + SiLU(W x + b)``, starting as the identity: W and b are zero."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., d] to [..., d]."""
        x = x.to(self.weight.dtype)  # the base may run in a narrower one
        return x + F.silu(super().forward(x))


class Joined(nn.Module):
    """The first block of published Hydra heads: hidden state and embeddings side by side.

    ``residual(x) + SiLU(gate(x))``, two matrices [d, (n + 1) d] with biases. Heads that are trained
    here have a :class:`ZeroLinear` instead; this is for those that were trained elsewhere.
    """

    def __init__(self, num_tokens: int, hidden_size: int) -> None:
        super().__init__()
        width = (num_tokens + 1) * hidden_size
        self.gate = nn.Linear(width, hidden_size)
        self.residual = nn.Linear(width, hidden_size)

    def forward(self, hidden: Tensor, conditions: Tensor) -> Tensor:
        """Map [..., d] and [..., n * d] to [..., d]; the first may be the same for many of them."""
        hidden = hidden.expand(*conditions.shape[:-1], hidden.shape[-1])
        x = torch.cat([hidden, conditions.to(hidden.dtype)], dim=-1).to(self.gate.weight.dtype)
        return self.residual(x) + F.silu(self.gate(x))


class LowRank(nn.Module):
    """An output matrix ``up @ down``: [V, r] times [r, d]."""

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.down = nn.Linear(hidden_size, rank, bias=False)
        self.up = nn.Linear(rank, vocab_size, bias=False)


def low_rank_factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return ``up`` and ``down`` of the nearest matrix of ``rank``, in float32 at least.

    Nearest in the sum of squared differences: the truncated SVD (Eckart and Young, 1936). The two
    factors share the singular values, so that both have numbers of one size.
    """
    wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    left, values, right = torch.linalg.svd(wide, full_matrices=False)
    root = values[:rank].sqrt()
    return left[:, :rank] * root, root[:, None] * right[:rank]


class Markov(nn.Module):
    """A bias on the logits from one token, ``up @ down[token]``; zero at the start.

    The correction that block-parallel drafters of 2026 put on their logits (DSpark), on heads.

    Args:
        num_rows: of the table ``down``.
        num_outputs: V'.
        rank: r.

    Attributes:
        row_of: maps tokens to rows of the table; None where there is one for every token.
    """

    row_of: Callable[[Tensor], Tensor] | None = None

    def __init__(self, num_rows: int, num_outputs: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Embedding(num_rows, rank)
        self.up = nn.Linear(rank, num_outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return what ``up`` reads of tokens [...], [..., r]."""
        return self.down(tokens if self.row_of is None else self.row_of(tokens))

    def behind(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Return features [..., d] and what ``up`` reads of tokens [...], [..., d + rank]."""
        bias = self(tokens)
        return torch.cat([features.to(bias.dtype), bias], dim=-1)

    def beside(self, weight: Tensor) -> Tensor:
        """Return an output matrix [V', d] with the bias's own beside it, [V', d + rank]."""
        return torch.cat([weight.to(self.up.weight.dtype), self.up.weight], dim=1)


class MedusaHead(nn.Module):
    """One head: its blocks, its own output matrix if it has one, and what reads drafted tokens.

    Args:
        num_layers: residual blocks.
        hidden_size: d.
        lm_head: its own output matrix; None shares the base's.
        markov: its correction of the logits, if any.
        reader: what reads the tokens drafted before, if anything: added to the hidden state, or
            joined with it as published Hydra heads do.
    """

    def __init__(
        self,
        num_layers: int,
        hidden_size: int,
        lm_head: nn.Linear | LowRank | None,
        markov: Markov | None,
        reader: ZeroLinear | Joined | None,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResBlock(hidden_size, hidden_size) for _ in range(num_layers))
        self.lm_head, self.markov = lm_head, markov
        self.condition = reader if isinstance(reader, ZeroLinear) else None
        self.joined = reader if isinstance(reader, Joined) else None

    def conditioned(self, hidden: Tensor, conditions: Tensor) -> Tensor:
        """Put the tokens drafted before into the hidden state, [..., d].

        Args:
            hidden: [..., d].
            conditions: [..., tokens * d], embeddings of the tokens drafted before, side by side.
        """
        if self.joined is not None:
            return self.joined(hidden, conditions)
        assert self.condition is not None
        weight = self.condition.weight
        return hidden.to(weight.dtype) + self.condition(conditions.to(weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., d], the condition added, to what its own part of the matrix reads.

        That is [..., d], or [..., r] before a low-rank matrix.
        """
        for block in self.blocks:
            x = block(x)
        if isinstance(self.lm_head, LowRank):
            x = self.lm_head.down(x.to(self.lm_head.down.weight.dtype))
        return x

    def own_product(self, x: Tensor, base_weight: Tensor) -> Tensor:
        """Map [..., d], the condition added, to [..., V'], without a Markov correction."""
        weight = self.own_weight(base_weight)
        return F.linear(self(x).to(weight.dtype), weight)

    def own_weight(self, base_weight: Tensor) -> Tensor:
        """Return the output matrix but for a Markov correction; ``base_weight`` [V, d] if shared.

        Its last factor, if it is of low rank.
        """
        if self.lm_head is None:
            return base_weight
        last = self.lm_head.up if isinstance(self.lm_head, LowRank) else self.lm_head
        return last.weight

    def output_weight(self, base_weight: Tensor) -> Tensor:
        """Return the matrix, with a Markov correction's beside it; ``base_weight`` if shared."""
        weight = self.own_weight(base_weight)
        return weight if self.markov is None else self.markov.beside(weight)


SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip

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
    """

    def __init__(self, sizes: dict[str, Any]) -> None:
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
        hidden = hidden.to(weight.dtype)
        output = self.model(inputs_embeds=hidden, position_ids=position_ids, use_cache=False)
        return output.last_hidden_state


def normalised(embedding: Tensor) -> Tensor:
    """Return embeddings [..., d] at unit root mean square: their scale differs between models."""
    return F.rms_norm(embedding, embedding.shape[-1:], eps=1e-6)
