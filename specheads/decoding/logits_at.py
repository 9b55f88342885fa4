"""What a model says at chosen places of a text that is known: one pass, no cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.models.base import input_device

_ROWS = 256  # rows that become float32 at a time: they are as wide as a vocabulary


@torch.inference_mode()
def logits_at(model: PreTrainedModel, ids: Sequence[int], places: Sequence[int]) -> Tensor:
    """Return the logits [N, V] of the token behind each of ``places``, in the model's dtype.

    Args:
        model: any causal language model.
        ids: the text, at most as long as the model's context.
        places: N of its positions, rising.
    """
    device = input_device(model)
    text = torch.tensor([list(ids)], device=device)
    kept = torch.tensor(list(places), device=device)
    logits: Tensor = model(
        input_ids=text,
        position_ids=torch.arange(text.shape[1], device=device)[None],
        use_cache=False,
        logits_to_keep=kept,
    ).logits[0]
    if logits.shape[0] != len(places):  # the model has returned them all
        logits = logits[kept.to(logits.device)]
    return logits


@torch.inference_mode()
def log_likelihood(logits: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the logarithm of each token's probability [N], and whether it was the likeliest [N].

    Args:
        logits: [N, V].
        tokens: N.
    """
    chosen = torch.tensor(list(tokens), device=logits.device)
    found, best = [], []
    for rows, of in zip(logits.split(_ROWS), chosen.split(_ROWS), strict=True):
        found.append(rows.float().log_softmax(-1).gather(1, of[:, None])[:, 0])
        best.append(rows.argmax(-1) == of)
    return torch.cat(found).cpu(), torch.cat(best).cpu()


@torch.inference_mode()
def divergence(original: Tensor, tuned: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(original || tuned) per row, in nats, and whether both have the same best token.

    Args:
        original: logits [N, V].
        tuned: logits [N, V']; where embeddings are padded to another size, what both have counts.
    """
    width = min(original.shape[1], tuned.shape[1])
    distances, same = [], []
    for p, q in zip(original.split(_ROWS), tuned.split(_ROWS), strict=True):
        p, q = p[:, :width].float(), q[:, :width].float().to(p.device)
        log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
        terms = log_p.exp() * (log_p - log_q)
        distances.append(terms.masked_fill(log_p.isneginf(), 0.0).sum(-1))
        same.append(p.argmax(-1) == q.argmax(-1))
    return torch.cat(distances).cpu(), torch.cat(same).cpu()
