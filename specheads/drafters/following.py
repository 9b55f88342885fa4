"""Where drafters of heads stand: the last certain token, and the hidden state that predicted it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specheads.drafters.contract import FINAL, Prefill, StepResult
from specheads.models.prefix_keys import PrefixKeys

if TYPE_CHECKING:
    from specheads.models.base import OutputLayer
    from specheads.models.heads import MedusaHeads


@dataclass(frozen=True)
class HeadsState:
    """Where the next guesses start.

    Attributes:
        root: [B], the last certain token.
        hidden: [B, d], the hidden state that predicted it, behind the prefix layer if there is one.
        predict: the heads as they were when the text began.
        prefix: what the prefix layer remembers of the text, if there is one.
    """

    root: Tensor
    hidden: Tensor
    predict: Any
    prefix: PrefixKeys | None = None


class Follower:
    """Goes from one certain token to the next, and takes the prefix layer along.

    Where a conversation goes on behind a cache, hidden states of what was read before are not at
    hand: the prefix layer then sees what is new only. That costs accepted tokens and changes none.

    The heads may lie on another device than the token ids: that of the output layer, where a base
    model is spread over several.

    Args:
        heads: the heads.
        output: the base model's output layer.

    Attributes:
        device: of the heads.
    """

    def __init__(self, heads: MedusaHeads, output: OutputLayer) -> None:
        self.device = next((p.device for p in heads.parameters()), output.weight.device)
        self._layer = heads.prefix

    def start(self, prefill: Prefill, predict: Any) -> HeadsState:
        """Start behind the prompt."""
        if self._layer is None:
            hidden = prefill.last_hidden(FINAL).to(self.device)
            return HeadsState(prefill.root, hidden, predict)
        keys = PrefixKeys.empty(self._layer, len(prefill.num_tokens))
        keys, hidden = keys.append(prefill.hidden[FINAL].to(self.device), prefill.num_tokens)
        return HeadsState(prefill.root, hidden, predict, keys)

    def observe(self, state: HeadsState, result: StepResult) -> HeadsState:
        """Move to the last accepted node."""
        hidden, path = result.hidden[FINAL], result.path
        if state.prefix is not None:
            # per row the accepted nodes, as many as tokens were gained
            counts = [len(new) for new in result.new_tokens]
            nodes = path[:, : max(1, *counts)].clamp(min=0).to(hidden.device)
            if len(hidden) == 1:
                hidden = hidden.index_select(1, nodes[0])
            else:
                hidden = hidden[torch.arange(len(hidden), device=hidden.device)[:, None], nodes]
            prefix, last = state.prefix.append(hidden.to(self.device), counts)
            return replace(state, root=result.next_root, hidden=last, prefix=prefix)
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
            hidden=state.hidden[rows.to(self.device)],
            prefix=None if state.prefix is None else state.prefix.select(rows),
        )
