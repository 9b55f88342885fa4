"""What the decoding loop asks of a drafter, and what it tells it after every verify step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from specheads.tree import Tree

FINAL = "final"  # tap: what the base model hands to its output layer, after the last norm


@dataclass(frozen=True)
class Candidates:
    """The guesses of one step.

    Attributes:
        tokens: [B, N], node 0 the root; equal siblings merged.
        tree: their shape, with N nodes; it may differ from step to step.
        draft_probs: what sampled candidates were drawn from; None for deterministic candidates.
    """

    tokens: Tensor
    tree: Tree
    draft_probs: Tensor | None = None


@dataclass(frozen=True)
class StepResult:
    """What the base model said about one tree.

    Attributes:
        tree: the verified tree; shallower than the proposed one where the token limit was near.
        tokens: [B, N], the verified tokens.
        base_tokens: [B, N], the base model's next token after *every* node, accepted or not.
        hidden: tap -> [B, N, d].
        path: [B, D+1], accepted nodes, padded with -1.
        num_accepted: [B], 0..D.
        next_root: [B], the base model's token after the last accepted node.
        new_tokens: per row the tokens gained: those accepted, then ``next_root``.
    """

    tree: Tree
    tokens: Tensor
    base_tokens: Tensor
    hidden: Mapping[str, Tensor]
    path: Tensor
    num_accepted: Tensor
    next_root: Tensor
    new_tokens: list[list[int]]

    @property
    def last_node(self) -> Tensor:
        """[B], the last accepted node."""
        return self.path.gather(1, self.num_accepted[:, None])[:, 0]


class Drafter(Protocol):
    """Proposes trees; keeps whatever it needs in a state of its own, all of it [B, ...].

    Attributes:
        taps: which hidden states of the base model it needs, of those in this module.
        deterministic: its candidates are a function of the prefix (then sample-and-walk is exact).
    """

    @property
    def taps(self) -> tuple[str, ...]:
        """Names of the hidden states to capture."""

    @property
    def deterministic(self) -> bool:
        """Whether the candidates are a function of the prefix."""

    def start(self, prompt_ids: Tensor, hidden: Mapping[str, Tensor], root: Tensor) -> Any:
        """Return the state after the prefill.

        Args:
            prompt_ids: [B, P].
            hidden: tap -> [B, P, d].
            root: [B], the first token after the prompt.
        """

    def propose(self, state: Any) -> Candidates:
        """Return the guesses for the tokens after the root."""

    def observe(self, state: Any, result: StepResult) -> Any:
        """Return the state after a verify step."""
