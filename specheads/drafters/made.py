"""Make the drafter that heads of any kind need."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from specheads.drafters.dynamic import NUM_RANKS, DynamicHeadsDrafter
from specheads.drafters.grown import DynamicSequentialDrafter
from specheads.drafters.heads import HeadsDrafter
from specheads.drafters.sequential import SequentialDrafter
from specheads.models.base import input_device
from specheads.models.kinds import Heads
from specheads.models.output import OutputLayer
from specheads.models.stepwise import Embed
from specheads.tree import Tree

StaticDrafter = HeadsDrafter | SequentialDrafter
DynamicDrafter = DynamicHeadsDrafter | DynamicSequentialDrafter


def static_drafter(
    base: PreTrainedModel, heads: Heads, output: OutputLayer, tree: Tree
) -> StaticDrafter:
    """Return a drafter that fills ``tree`` at every step.

    Args:
        base: the base model, whose input embedding some sequential heads read tokens through.
        heads: of any kind.
        output: the base's output layer.
        tree: at most as deep as there are heads.

    Raises:
        ValueError: if the tree is deeper than the heads or wider than the tokens they can guess.
    """
    if heads.sequential:
        return SequentialDrafter(heads, output, embedding(base, heads), tree)
    return HeadsDrafter(heads, output, tree)


def dynamic_drafter(
    base: PreTrainedModel,
    heads: Heads,
    output: OutputLayer,
    num_nodes: int,
    *,
    max_depth: int | None = None,
    num_ranks: int = NUM_RANKS,
    temperatures: Sequence[float] | None = None,
) -> DynamicDrafter:
    """Return a drafter that grows a tree of ``num_nodes`` nodes anew at every step.

    Args:
        base: the base model.
        heads: of any kind.
        output: the base's output layer.
        num_nodes: N of every tree, root included.
        max_depth: deepest node; None is the number of heads.
        num_ranks: guesses per node to choose from.
        temperatures: one per head; its logits are divided by it.

    Raises:
        ValueError: if a number is out of range, or the number of temperatures is not that of heads.
    """
    if heads.sequential:
        return DynamicSequentialDrafter(
            heads,
            output,
            embedding(base, heads),
            num_nodes,
            max_depth=max_depth,
            num_ranks=num_ranks,
            temperatures=temperatures,
        )
    return DynamicHeadsDrafter(
        heads,
        output,
        num_nodes,
        max_depth=max_depth,
        num_ranks=num_ranks,
        temperatures=temperatures,
    )


def embedding(base: PreTrainedModel, heads: Heads) -> Embed | None:
    """Return the base's input embedding as a function that may be called where the heads lie.

    None where the heads do not read tokens through it.
    """
    if not heads.condition:
        return None
    module, place = base.get_input_embeddings(), input_device(base)
    if module is None:
        raise ValueError(f"{type(base).__name__} has no input embedding that the heads could use")

    def embed(tokens: Tensor) -> Tensor:
        found: Tensor = module(tokens.to(place))
        return found.to(tokens.device)

    return embed
