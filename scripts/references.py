"""Losses of heads as their authors' trainers compute them, in plain torch, for bench_train.py.

Each is computed over the very parameters of our heads, so that the two sides differ in how the loss
is made and in nothing else:

- :class:`Medusa`: medusa/train/train_legacy.py of the Medusa repository. The logits of all heads
  are stacked to [K, B, T, V]; then for each head a cross entropy over what the shift leaves, and
  its top-1.
- :class:`Hydra`: hydra/train/train.py of the Hydra repository. Logits of each head apart, from the
  hidden state and the embeddings of the tokens before, rolled and laid side by side. What it logs
  beside the loss and top-1 (the base's scores, top-2 to top-5, two more losses whose weights are 0
  by default) is left out, which favours it.
- :class:`DFlash`: specforge/core/dflash.py of SpecForge, on sdpa. One attention over the row and
  all blocks under a dense mask, the logits of all slots at once, the root's among them, a cross
  entropy of each under decay weights, and argmax. Anchors are drawn as ours, and a slot's losses
  are averaged over its own labels, or it would be another loss.
- :class:`Mtp`: the loop that follows from equation 2 of arXiv:2404.19737. All layers' activations
  and all heads' logits at once, a cross entropy each, their sum.

``fused`` takes ``torch.nn.functional.linear_cross_entropy`` (torch 2.13) in place of logits and
cross entropy, one call per head or slot, in chunks of as many rows as ours: its own default is two
to three times as slow on a CPU. No logits are left then to count hits in.

:func:`all_logits` is the library's own cross entropy in the obvious way, for its tests and for
bench_memory.py.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specheads.losses.fused import IGNORE, Output, rows_at_once
from specheads.training import objectives
from specheads.training.objectives import anchors_of

Batch = Mapping[str, Tensor]
Log = dict[str, float]
T = TypeVar("T", bound=nn.Module)


def all_logits(
    hidden: Tensor, output: Output, labels: Tensor, row_weight: Tensor, *, chunk_size: int = 0
) -> tuple[Tensor, Tensor]:
    """Return what ``linear_cross_entropy`` does, which says what is what, from all logits.

    ``chunk_size`` is not used here.
    """
    logits = F.linear(hidden.to(output.weight.dtype), output.weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if output.bias is not None:
        logits = logits + output.bias
    logits = logits * output.scale
    if output.softcap is not None:
        logits = torch.tanh(logits / output.softcap) * output.softcap
    flat = labels.flatten()
    ce = F.cross_entropy(logits, flat, ignore_index=IGNORE, reduction="none")
    loss = (ce * row_weight.detach().flatten()).sum()
    with torch.no_grad():
        target = logits.gather(1, flat.clamp_min(0)[:, None])
        near = (logits > target).sum(1, dtype=torch.int32) < 5
        columns = torch.stack([ce.float(), (logits.argmax(1) == flat).float(), near.float()], 1)
        columns = columns * (flat != IGNORE)[:, None]
        num_groups = 1 if labels.dim() == 1 else labels.shape[0]
        stats = columns.reshape(num_groups, flat.numel() // num_groups, 3).sum(1)
    return loss, stats


def by_all_logits(objective: T) -> T:
    """Let an objective compute its cross entropies with :func:`all_logits`; return it."""
    forward = objective.forward

    def patched(*args: Any) -> Any:
        with patch.object(objectives, "linear_cross_entropy", all_logits):
            return forward(*args)

    objective.forward = patched
    return objective


class Reference(nn.Module):
    """Heads that guess from every position of a row, each scored by itself.

    Args:
        base: a Llama.
        heads: on it.
        decay: of the weights from slot to slot, where the trainer has such.
        fused: form no logits.

    Attributes:
        ahead: how far ahead of its position the first head guesses.
        counts_hits: top-1 is logged.
        features: from a batch to what the output matrices read, [B, T, d] for each head.
    """

    ahead = 2
    counts_hits = True
    features: Callable[[Batch], Sequence[Tensor]]

    def __init__(self, base: Any, heads: Any, *, decay: float = 1.0, fused: bool = False) -> None:
        super().__init__()
        self.base, self.heads, self.decay, self.fused = base, heads, decay, fused

    def weights(self) -> Sequence[Tensor]:
        """Return the output matrix [V, d] of each head."""
        return [head.lm_head.weight for head in self.heads.heads]

    def logits(self, batch: Batch) -> Sequence[Tensor]:
        """Return the logits [B, T, V] of each head."""
        return list(map(F.linear, self.features(batch), self.weights()))

    def forward(self, batch: Batch) -> tuple[Tensor, Log]:
        """Return the sum of the heads' mean losses, and what the trainer logs."""
        total, log = torch.zeros(()), Log()
        rows = self.features(batch) if self.fused else self.logits(batch)
        for i, (each, weight) in enumerate(zip(rows, self.weights(), strict=True)):
            shift = self.ahead + i
            each = each[:, :-shift].contiguous().view(-1, each.shape[-1])
            target = batch["labels"][:, shift:].contiguous().view(-1)
            if self.fused:
                loss = fused_loss(each, weight, target)
            else:
                loss = F.cross_entropy(each, target, ignore_index=IGNORE)
            total = total + loss
            log[f"head_{i}/loss"] = loss.item()
            if self.counts_hits and not self.fused:
                log[f"head_{i}/top1"] = top1(each, target)
        return total, log

    @torch.no_grad()
    def hidden(self, batch: Batch) -> Tensor:
        """Return the final hidden states [B, T, d] of a frozen base."""
        found: Tensor = self.base.model(input_ids=batch["input_ids"], use_cache=False)[0]
        return found


class Medusa(Reference):
    """The loss of Medusa's train_legacy.py."""

    def features(self, batch: Batch) -> Sequence[Tensor]:
        """Return each head's residual blocks over the hidden states."""
        hidden = self.hidden(batch)
        return [residual_blocks(head, hidden) for head in self.heads.heads]

    def logits(self, batch: Batch) -> Tensor:
        """Return the logits of all heads, stacked to [K, B, T, V]."""
        return torch.stack(list(super().logits(batch)))


class Hydra(Reference):
    """The loss of Hydra's train.py."""

    def features(self, batch: Batch) -> Sequence[Tensor]:
        """Return each head's residual blocks over hidden states and tokens before."""
        hidden, read, found = self.hidden(batch), list[Tensor](), []
        with torch.no_grad():
            embedded = self.base.model.embed_tokens(batch["input_ids"])
            embedded = F.rms_norm(embedded, embedded.shape[-1:], eps=1e-6)  # as our heads read it
        for i, head in enumerate(self.heads.heads):
            read.append(embedded.roll(-1 - i, dims=1))
            condition = head.condition
            joined = F.linear(torch.cat(read, dim=-1), condition.weight, condition.bias)
            found.append(residual_blocks(head, hidden + joined))
        return found


class Mtp(Reference):
    """The plain sum of cross entropies, the next token's among them; the base learns too."""

    ahead = 1
    counts_hits = False

    def features(self, batch: Batch) -> Sequence[Tensor]:
        """Return the final hidden states, and each head's layer over the trunk's."""
        output = self.base.model(
            input_ids=batch["input_ids"], output_hidden_states=True, use_cache=False
        )
        trunk, positions = output.hidden_states[-2], batch["position_ids"]
        waves, found = self.base.model.rotary_emb(trunk, positions), [output.last_hidden_state]
        for layer in self.heads.layers:  # without a mask attention is causal
            made = layer.block(trunk, position_ids=positions, position_embeddings=waves)
            found.append(layer.norm(made))
        return found

    def weights(self) -> Sequence[Tensor]:
        """Return the base's output matrix for all."""
        return [self.base.lm_head.weight] * (1 + self.heads.num_heads)


class DFlash(Reference):
    """The loss of SpecForge's DFlash, over block heads of the published form."""

    def forward(self, batch: Batch) -> tuple[Tensor, Log]:
        """Return the weighted loss of all slots, and what the trainer logs."""
        labels = self.labels(batch["labels"])
        learned = (labels != IGNORE).any(-1).flatten()
        places = anchors_of(batch["input_ids"], learned, self.heads.anchors)
        target = labels.gather(1, places[..., None].expand(-1, -1, labels.shape[-1]))
        slots, matrix = self.slots(batch, places), self.base.lm_head.weight
        weights = self.decay ** torch.arange(target.shape[-1])
        if self.fused:
            losses = [
                weights[s]
                * fused_loss(slots[:, :, s].flatten(0, 1), matrix, target[..., s].flatten())
                for s in range(1, target.shape[-1])
            ]
            loss = torch.stack(losses).sum()
            return loss, {"loss": loss.item()}
        logits, flat = F.linear(slots, matrix).flatten(0, 2), target.flatten()
        each = F.cross_entropy(logits, flat, ignore_index=IGNORE, reduction="none")
        valid = target != IGNORE
        by_label = weights * valid / valid.sum((0, 1)).clamp_min(1)
        loss = (each * by_label.flatten()).sum()
        return loss, {"loss": loss.item(), "top1": top1(logits, flat)}

    def labels(self, labels: Tensor) -> Tensor:
        """Return the labels of the slots behind every position, [B, T, S]; the root's has none."""
        num_slots = self.heads.num_slots
        found = F.pad(labels, (0, num_slots), value=IGNORE).unfold(1, num_slots, 1)[:, 1:].clone()
        found[..., 0] = IGNORE
        return found

    def slots(self, batch: Batch, places: Tensor) -> Tensor:
        """Return what the output matrix reads of the slots, [B, A, S, d], at places [B, A]."""
        heads, ids = self.heads, batch["input_ids"]
        (num_rows, num_tokens), num_slots = ids.shape, heads.num_slots
        with torch.no_grad():
            output = self.base.model(input_ids=ids, output_hidden_states=True, use_cache=False)
            tapped = [output.hidden_states[tap + 1] for tap in heads.form.taps]
            noise = torch.full((*places.shape, num_slots), heads.form.mask_token_id)
            noise[..., 0] = ids.gather(1, (places + 1).clamp_max(num_tokens - 1))
            x = self.base.model.embed_tokens(noise.flatten(1))
        context = heads.hidden_norm(heads.fc(torch.cat(tapped, dim=-1)))
        own = (places[..., None] + 1 + torch.arange(num_slots)).flatten(1)
        positions = torch.cat([torch.arange(num_tokens).expand(num_rows, -1), own], dim=1)
        mask = block_mask(places, num_tokens, num_slots)
        for layer in heads.layers:
            x = x + attention(layer, layer.input_layernorm(x), context, positions, mask, heads.form)
            normed, mlp = layer.post_attention_layernorm(x), layer.mlp
            x = x + mlp["down_proj"](F.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed))
        found: Tensor = heads.norm(x).unflatten(1, (-1, num_slots))
        return found


def residual_blocks(head: Any, x: Tensor) -> Tensor:
    """Return x + SiLU(W x + b) of each block of a head in turn."""
    for block in head.blocks:
        x = x + F.silu(F.linear(x, block.weight, block.bias))
    return x


def fused_loss(rows: Tensor, matrix: Tensor, target: Tensor) -> Tensor:
    """Return torch's mean cross entropy of rows [N, d] under a matrix [V, d], in chunks."""
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=rows_at_once(matrix))
    return F.linear_cross_entropy(rows, matrix, target, ignore_index=IGNORE, options=options)


def top1(logits: Tensor, target: Tensor) -> float:
    """Return how often the label is the most likely token."""
    valid = target.ne(IGNORE)
    _, top = logits.topk(1, dim=-1)
    return top[valid].eq(target[valid].unsqueeze(-1)).any(-1).float().mean().item()


def block_mask(places: Tensor, num_tokens: int, num_slots: int) -> Tensor:
    """Return where the slots of all blocks may look, [B, 1, A * S, T + A * S].

    That is at the row up to the block's place, and at the slots of their own block.
    """
    blocks = torch.arange(places.shape[1]).repeat_interleave(num_slots)
    seen = torch.arange(num_tokens) <= places.repeat_interleave(num_slots, 1)[..., None]
    own = (blocks[:, None] == blocks).expand(len(places), -1, -1)
    return torch.cat([seen, own], dim=2)[:, None]


def attention(
    layer: Any, x: Tensor, context: Tensor, positions: Tensor, mask: Tensor, form: Any
) -> Tensor:
    """Return what slots read of the row and of each other.

    Args:
        layer: of the heads.
        x: [B, Q, d], the slots, normed.
        context: [B, T, d], of the row.
        positions: [B, T + Q], of both.
        mask: [B, 1, Q, T + Q].
        form: of the heads.
    """
    parts, width = layer.self_attn, form.head_dim
    both = torch.cat([context, x], dim=1)
    q, k, v = (
        parts[name](states).unflatten(-1, (-1, width))
        for name, states in (("q_proj", x), ("k_proj", both), ("v_proj", both))
    )
    q, k = parts["q_norm"](q), parts["k_norm"](k)
    places = torch.arange(width // 2) / (width // 2)
    angles = (positions[..., None] * form.rope_theta**-places).repeat(1, 1, 2)[:, :, None]
    k = rotated(k, angles)
    q = rotated(q, angles[:, -x.shape[1] :])
    read = F.scaled_dot_product_attention(
        *(each.transpose(1, 2) for each in (q, k, v)),
        attn_mask=mask,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    found: Tensor = parts["o_proj"](read.transpose(1, 2).flatten(2))
    return found


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Return x [..., h] turned by angles, its halves being the two coordinates."""
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()
