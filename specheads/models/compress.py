"""Smaller output matrices for heads that are trained already; more training can follow.

Shapes: K heads, d hidden size, V vocabulary, V' the tokens that are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specheads.losses.cross_entropy import IGNORE
from specheads.models.blocks import LowRank, low_rank_factors
from specheads.models.heads import MedusaHeads


@torch.no_grad()
def low_rank_heads(heads: MedusaHeads, rank: int) -> MedusaHeads:
    """Return heads whose output matrices are the nearest ones of ``rank`` to those of ``heads``.

    Everything else is copied; see :func:`low_rank_factors`.

    Args:
        heads: with matrices of their own, whole or of low rank.
        rank: the inner size of the new ones.

    Raises:
        ValueError: if ``heads`` share the base's matrix or are pruned, or ``rank`` is out of range.
    """
    if heads.lm_head not in ("own", "low_rank"):
        raise ValueError(
            f"lm_head=low_rank needs heads with a matrix of their own for all tokens, these are "
            f"{heads.lm_head}"
        )
    state, smaller = _rest(heads), _like(heads, "low_rank", rank=rank)
    for i in range(heads.num_heads):
        matrix = output_matrix(heads, i)
        up, down = low_rank_factors(matrix, rank)
        state[f"heads.{i}.lm_head.up.weight"] = up.to(matrix.dtype)
        state[f"heads.{i}.lm_head.down.weight"] = down.to(matrix.dtype)
    return _filled(smaller, state, heads)


@torch.no_grad()
def pruned_heads(heads: MedusaHeads, token_ids: Tensor) -> MedusaHeads:
    """Return heads that guess only the tokens ``token_ids``, with the rows that they have now.

    Everything else is copied. Their logits are those of ``heads`` at these tokens.

    Args:
        heads: with matrices of their own, for all tokens or pruned before.
        token_ids: distinct ids to keep, in any order; the new heads have them sorted.

    Raises:
        ValueError: if ``heads`` share the base's matrix or are of low rank, or cannot guess one of
            the tokens.
    """
    if heads.lm_head not in ("own", "pruned"):
        raise ValueError(
            f"lm_head=pruned needs heads with a whole matrix of their own, these are "
            f"{heads.lm_head}"
        )
    tokens = token_ids.to(output_matrix(heads, 0).device).sort().values
    rows = heads.map_labels(tokens)
    if gone := int((rows == IGNORE).sum()):
        raise ValueError(f"{gone} of the tokens to keep were pruned from these heads before")
    state, smaller = _rest(heads), _like(heads, "pruned", num_kept=len(tokens))
    for i in range(heads.num_heads):
        state[f"heads.{i}.lm_head.weight"] = output_matrix(heads, i)[rows].clone()
        if heads.markov_rank:
            name = f"heads.{i}.markov.up.weight"
            state[name] = state[name][rows].clone()
    state["token_map"] = tokens
    return _filled(smaller, state, heads)


@torch.no_grad()
def relative_errors(heads: MedusaHeads, others: MedusaHeads) -> list[float]:
    """Return ``|A - B| / |A|`` (Frobenius) of the output matrices A of ``heads``, B of ``others``.

    Both guess the same tokens.
    """
    errors = []
    for i in range(heads.num_heads):
        matrix, other = output_matrix(heads, i).float(), output_matrix(others, i).float()
        errors.append(float((matrix - other).norm() / matrix.norm()))
    return errors


def output_matrix(heads: MedusaHeads, i: int) -> Tensor:
    """Return what head ``i`` multiplies the output of its blocks with, [V', d]; no correction.

    Raises:
        ValueError: if it shares the base's.
    """
    layer = heads.head(i).lm_head
    if layer is None:
        raise ValueError("heads that share the base's output matrix have none of their own")
    if isinstance(layer, LowRank):
        return (layer.up.weight @ layer.down.weight).detach()
    return layer.weight.detach()


def _like(heads: MedusaHeads, lm_head: str, *, rank: int = 0, num_kept: int = 0) -> MedusaHeads:
    config = heads.to_config() | {"lm_head": lm_head, "rank": rank, "num_kept": num_kept}
    with torch.device("meta"):  # every weight is replaced, and drawing them costs
        smaller = MedusaHeads.from_config(config)
    smaller.make_tables()
    return smaller


def _filled(smaller: MedusaHeads, state: dict[str, Tensor], heads: MedusaHeads) -> MedusaHeads:
    smaller.load_state_dict(state, assign=True)
    return smaller.to(output_matrix(heads, 0).device).train(heads.training)


def _rest(heads: MedusaHeads) -> dict[str, Tensor]:
    """Return copies of all tensors but the output matrices and the token map."""
    return {
        name: tensor.detach().clone()
        for name, tensor in heads.state_dict().items()
        if ".lm_head." not in name and name != "token_map"
    }
