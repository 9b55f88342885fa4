"""Where drafters of heads stand: the last certain token, and the hidden state that predicted it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specheads.drafters.contract import FINAL, Prefill, StepResult

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
    """

    root: Tensor
    hidden: Tensor
    predict: Any


class Follower:
    """Goes from one certain token to the next.

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

    def start(self, prefill: Prefill, predict: Any) -> HeadsState:
        """Start from the prompt's last hidden state."""
        return HeadsState(prefill.root, prefill.last_hidden(FINAL).to(self.device), predict)

    def observe(self, state: HeadsState, result: StepResult) -> HeadsState:
        """Move to the last accepted node."""
        hidden = result.hidden[FINAL]
        if len(hidden) == 1 and result.path.device.type == "cpu":  # nothing to wait for
            accepted = hidden[:, result.path[0].tolist()[int(result.num_accepted)]]
        else:
            rows = torch.arange(len(hidden), device=hidden.device)
            accepted = hidden[rows, result.last_node.to(hidden.device)]
        return replace(state, root=result.next_root, hidden=accepted.to(self.device))

    def select(self, state: HeadsState, rows: Tensor) -> HeadsState:
        """Keep some rows."""
        hidden = state.hidden[rows.to(self.device)]
        return replace(state, root=state.root[rows], hidden=hidden)
