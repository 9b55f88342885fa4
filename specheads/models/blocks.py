"""What one head is made of. ``heads.py`` puts K of them together.

Shapes: d hidden size, V vocabulary, V' the tokens that the head can guess, r an inner size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
