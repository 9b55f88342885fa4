"""What a decoder of Llama's kind keeps for backward, from its sizes alone.

Counted for transformers' modules as they are (tests/scripts/test_shapes.py holds them to what
autograd really saves): a norm keeps its float32 input, its normalised input and its output; sdpa
its q, k, v and output; the MLP its gate, the gate's activation, the other factor and the product. A
frozen matrix keeps no input; an adapter keeps its own, after dropout, and dropout its mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder: d, layers, m, width of keys, V.

    Attributes:
        hidden: hidden size d.
        layers: decoder layers.
        intermediate: width m of the MLP.
        key_width: numbers of a key, all heads together; d without grouped queries.
        vocab: tokens V.
        query_width: numbers of a query, all heads together.
        tied: whether the output matrix is the embedding.
    """

    hidden: int
    layers: int
    intermediate: int
    key_width: int
    vocab: int
    query_width: int
    tied: bool = False

    @classmethod
    def from_config(cls, config: Any) -> Shape | None:
        """Read a transformers config; None if it is not of this kind."""
        try:
            head_dim = getattr(config, "head_dim", None) or (
                config.hidden_size // config.num_attention_heads
            )
            return cls(
                config.hidden_size, config.num_hidden_layers, config.intermediate_size,
                head_dim * config.num_key_value_heads, config.vocab_size,
                head_dim * config.num_attention_heads, bool(config.tie_word_embeddings),
            )  # fmt: skip
        except AttributeError:
            return None

    @property
    def layer_matrices(self) -> int:
        """Numbers of a layer's matrices."""
        return self.hidden * (2 * self.query_width + 2 * self.key_width + 3 * self.intermediate)

    @property
    def parameters(self) -> int:
        """All parameters."""
        d = self.hidden
        matrices = self.vocab * d * (1 if self.tied else 2)
        return self.layers * (self.layer_matrices + 2 * d) + d + matrices


def layer_activations(
    shape: Shape, size: int, *, adapter: int = 0, rank: int = 0, mask: int = 1
) -> int:
    """Return the bytes that one layer keeps for backward, for each token.

    Attention's matrix is not among them: sdpa does not keep it.

    Args:
        shape: the model's sizes.
        size: bytes of a number of the base, 2 or 4.
        adapter: bytes of a number of its LoRA adapter, which has dropout; 0: the base is trained.
        rank: the adapter's rank.
        mask: bytes of an element of a dropout mask: 1 on a GPU, 4 on a CPU.
    """
    d, m, query, key = shape.hidden, shape.intermediate, shape.query_width, shape.key_width
    attention = 2 * size * (query + key)
    small = 2 * 4  # the norms' scale
    if not adapter:
        return 2 * (4 + 2 * size) * d + attention + 4 * size * m + small
    own = (adapter + mask) * (5 * d + query + m) + 7 * adapter * rank
    return 2 * 4 * d + attention + 3 * size * m + own + small


def decoder_activations(
    shape: Shape,
    size: int,
    *,
    trained: bool,
    adapter: int = 0,
    rank: int = 0,
    mask: int = 1,
    checkpointed: bool = False,
) -> float:
    """Return the bytes that a pass through a decoder brings for each token, at its largest.

    Args:
        shape: the model's sizes.
        size: bytes of a number of the base, 2 or 4.
        trained: whether gradients go through it; otherwise nothing is kept, and what counts are the
            largest temporaries, those of an MLP.
        adapter: as for :func:`layer_activations`.
        rank: the adapter's rank.
        mask: as for :func:`layer_activations`.
        checkpointed: the layers are computed again in backward, and only their inputs kept.
    """
    d, m = shape.hidden, shape.intermediate
    last = (4 + 2 * size) * d  # the final norm
    if not trained:
        return size * 3 * (m + d) + last
    layer = layer_activations(shape, size, adapter=adapter, rank=rank, mask=mask)
    kept = shape.layers * size * d + layer if checkpointed else shape.layers * layer
    return kept + size * 2 * m + last  # and gradients of a layer's widest tensors
