"""Where drafters of heads stand: the last certain token, and the hidden state that predicted it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from specheads.drafters.contract import Prefill, StepResult

if TYPE_CHECKING:
    from specheads.models.kinds import Heads
    from specheads.models.output import OutputLayer
    from specheads.models.stepwise import Embed


class Memory(Protocol):
    """What layers of heads that attend remember of the rows' texts."""

    def append(
        self, hidden: Tensor, counts: Sequence[int], tokens: Tensor
    ) -> tuple[Memory, Tensor]:
        """Read on.

        Args:
            hidden: [B, T, d], the base's hidden states of the positions that follow, right-padded.
            counts: per row how many of the T are real; where it is 0, the output means nothing.
            tokens: [B, T], the token that came after each of them, the root at the last one.

        Returns:
            The memory with them, and what the layers make of each row's last position, [..., B, d].
        """

    def select(self, rows: Tensor) -> Memory:
        """Return the memory of the rows ``rows`` [R] (long), in that order."""


@dataclass(frozen=True)
class HeadsState:
    """Where the next guesses start.

    Attributes:
        root: [B], the last certain token.
        hidden: [B, d], the hidden state that predicted it, behind the prefix layer if there is one;
            of MTP heads [K, B, d], what each of their layers makes of it.
        predict: the heads as they were when the text began.
        memory: what layers of the heads remember of the text, if they have any that attend.
    """

    root: Tensor
    hidden: Tensor
    predict: Any
    memory: Memory | None = None


class Follower:
    """Goes from one certain token to the next, and takes along what attends.

    Where a conversation goes on behind a cache, hidden states of what was read before are not at
    hand: layers of the heads that attend then see what is new only. That costs accepted tokens and
    changes none.

    The heads may lie on another device than the token ids: that of the output layer, where a base
    model is spread over several.

    Args:
        heads: the heads.
        output: the base model's output layer.
        embed: the base's input embedding, where layers of the heads read tokens through it.

    Attributes:
        device: of the heads.
    """

    def __init__(self, heads: Heads, output: OutputLayer, embed: Embed | None = None) -> None:
        self.device = next((p.device for p in heads.parameters()), output.weight.device)
        self._heads, self._embed = heads, embed

    def start(self, prefill: Prefill, predict: Any) -> HeadsState:
        """Start behind the prompt."""
        memory: Memory | None = self._heads.memory(len(prefill.num_tokens), self._embed)
        tap = self._heads.tap
        if memory is None:
            return HeadsState(prefill.root, prefill.last_hidden(tap).to(self.device), predict)
        ahead = prefill.tokens.roll(-1, dims=1).to(self.device)
        rows = torch.arange(len(ahead), device=self.device)
        last = torch.tensor(prefill.num_tokens, device=self.device) - 1
        ahead[rows, last] = prefill.root.to(self.device)
        hidden = prefill.hidden[tap].to(self.device)
        memory, last_hidden = memory.append(hidden, prefill.num_tokens, ahead)
        return HeadsState(prefill.root, last_hidden, predict, memory)

    def observe(self, state: HeadsState, result: StepResult) -> HeadsState:
        """Move to the last accepted node."""
        hidden, path = result.hidden[self._heads.tap], result.path
        if state.memory is not None:
            # per row the accepted nodes, as many as tokens were gained
            counts = [len(new) for new in result.new_tokens]
            width = max(1, *counts)
            nodes = path[:, :width].clamp(min=0).to(hidden.device)
            if len(hidden) == 1:
                hidden = hidden.index_select(1, nodes[0])
            else:
                hidden = hidden[torch.arange(len(hidden), device=hidden.device)[:, None], nodes]
            padded = [[*new, *[0] * (width - len(new))] for new in result.new_tokens]
            tokens = torch.tensor(padded, device=self.device)
            memory, last = state.memory.append(hidden.to(self.device), counts, tokens)
            return replace(state, root=result.next_root, hidden=last, memory=memory)
        if len(hidden) == 1 and path.device.type == "cpu":  # nothing to wait for
            accepted = hidden[:, path[0].tolist()[int(result.num_accepted)]]
        else:
            rows = torch.arange(len(hidden), device=hidden.device)
            accepted = hidden[rows, result.last_node.to(hidden.device)]
        return replace(state, root=result.next_root, hidden=accepted.to(self.device))

    def select(self, state: HeadsState, rows: Tensor) -> HeadsState:
        """Keep some rows."""
        return replace(
            state,
            root=state.root[rows],
            hidden=state.hidden.index_select(-2, rows.to(self.device)),
            memory=None if state.memory is None else state.memory.select(rows),
        )
