"""What a decoder of Llama's kind brings to a rank: parameters, activations, arithmetic.

Counted for transformers' modules as they are (tests/unit/test_shapes.py holds them to what
autograd really saves): a norm keeps its float32 input, its normalised input and its output; sdpa
its q, k, v and output; the MLP its gate, the gate's activation, the other factor and the product.
A frozen matrix keeps no input; an adapter keeps its own, after dropout, and dropout its mask.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from specheads.training.capacity import Load


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder: d, layers, m, width of keys, V.

    Attributes:
        hidden: hidden size d.
        layers: decoder layers.
        intermediate: width m of the MLP.
        key_width: numbers of a key, all heads together; d without grouped queries.
        vocab: tokens V.
        tied: whether the output matrix is the embedding.
    """

    hidden: int
    layers: int
    intermediate: int
    key_width: int
    vocab: int
    tied: bool = False

    @classmethod
    def from_config(cls, config: Any) -> Shape | None:
        """Read a transformers config; None if it is not of this kind."""
        try:
            head_dim = getattr(config, "head_dim", None) or (
                config.hidden_size // config.num_attention_heads
            )
            return cls(
                hidden=config.hidden_size,
                layers=config.num_hidden_layers,
                intermediate=config.intermediate_size,
                key_width=head_dim * config.num_key_value_heads,
                vocab=config.vocab_size,
                tied=bool(config.tie_word_embeddings),
            )
        except AttributeError:
            return None

    @property
    def layer_matrices(self) -> int:
        """Numbers of a layer's matrices."""
        d = self.hidden
        return 2 * d * d + 2 * d * self.key_width + 3 * d * self.intermediate

    @property
    def parameters(self) -> int:
        """All of them."""
        d = self.hidden
        matrices = self.vocab * d * (1 if self.tied else 2)
        return self.layers * (self.layer_matrices + 2 * d) + d + matrices

    def lora_parameters(self, rank: int) -> int:
        """Those of adapters on every linear layer of the decoder."""
        d, m, key = self.hidden, self.intermediate, self.key_width
        return self.layers * rank * (2 * (d + d) + 2 * (d + key) + 3 * (d + m))


# Llama 2's.
LLAMA_7B = Shape(4096, 32, 11008, 4096, 32000)
LLAMA_13B = Shape(5120, 40, 13824, 5120, 32000)
LLAMA_70B = Shape(8192, 80, 28672, 1024, 32000)


def layer_activations(
    shape: Shape, size: int, *, adapter: int = 0, rank: int = 0, mask: int = 1
) -> int:
    """Return the bytes that one layer keeps for backward, for each token.

    Attention's matrix is not among them: sdpa does not keep it.

    Args:
        shape: of the model.
        size: bytes of a number of the base, 2 or 4.
        adapter: bytes of a number of its LoRA adapter, which has dropout; 0: the base is trained.
        rank: of the adapter.
        mask: bytes of an element of a dropout mask: 1 on a GPU, 4 on a CPU.
    """
    d, m, key = shape.hidden, shape.intermediate, shape.key_width
    attention = 2 * size * (d + key)
    small = 2 * 4  # the norms' scale
    if not adapter:
        return 2 * (4 + 2 * size) * d + attention + 4 * size * m + small
    own = (adapter + mask) * (6 * d + m) + 7 * adapter * rank
    return 2 * 4 * d + attention + 3 * size * m + own + small


def load_of(
    shape: Shape,
    kind: str,
    *,
    tokens: int,
    size: int = 2,
    head_size: int | None = None,
    num_heads: int = 4,
    own_heads: bool = True,
    rank: int = 32,
    checkpointed: bool = True,
    accumulation: int = 1,
    seq_len: int = 2048,
    chunk: int = 1024,
) -> Load:
    """Return what training of ``kind`` brings to a rank.

    Args:
        shape: of the base.
        kind: ``frozen`` (medusa1), ``lora`` (medusa2 with an adapter) or ``full`` (medusa2).
        tokens: of a micro-batch.
        size: bytes of a number of the base.
        head_size: of the heads and adapters; None: the base's, as DeepSpeed makes them.
        num_heads: drafting heads of one block each; 0: the base alone.
        own_heads: whether each has an output matrix of its own.
        rank: of the adapter.
        checkpointed: whether the base's layers are computed again in backward.
        accumulation: micro-batches per step.
        seq_len: of a row, for attention's arithmetic.
        chunk: rows of logits at one time.

    Raises:
        ValueError: for another kind.
    """
    if kind not in ("frozen", "lora", "full"):
        raise ValueError(f"kind must be frozen, lora or full, got {kind!r}")
    head_size = head_size or size
    d, vocab = shape.hidden, shape.vocab
    matrix = vocab * d
    blocks = num_heads * (d * d + d)
    matrices = num_heads * matrix if own_heads else 0
    adapters = shape.lora_parameters(rank) if kind == "lora" else 0
    trained = Counter({head_size: blocks + matrices + adapters})
    if kind == "full":
        trained[size] += shape.parameters
    base_trained = kind == "full"
    return Load(
        trained={width: count for width, count in trained.items() if count},
        frozen=0 if base_trained else shape.parameters,
        frozen_bytes=0.0 if base_trained else float(size * shape.parameters),
        activations=float(
            tokens
            * _activations_per_token(shape, kind, size, head_size, num_heads, rank, checkpointed)
        ),
        logits=float(vocab * min(tokens, chunk) * (4 + (size if size < 4 else 0))),
        formed=float(head_size * matrices + (size * matrix if base_trained else 0)),
        accumulation=accumulation,
        flops=tokens
        * _flops_per_token(
            shape, kind, num_heads, own_heads, blocks, adapters, seq_len, checkpointed
        ),
        outer=matrix * (1 + base_trained + (num_heads if own_heads else 0)),  # an embedding, too
        gathers=1 if kind == "frozen" else 2,
    )


def _activations_per_token(
    shape: Shape,
    kind: str,
    size: int,
    head_size: int,
    num_heads: int,
    rank: int,
    checkpointed: bool,
) -> float:
    d, m = shape.hidden, shape.intermediate
    heads = num_heads * d * 2 * head_size  # what a head's matrix reads, and its gradient
    last = (4 + 2 * size) * d  # the final norm
    if kind == "frozen":  # nothing is kept: the largest temporaries, those of an MLP
        return size * 3 * (m + d) + last + heads
    adapter = head_size if kind == "lora" else 0
    layer = layer_activations(shape, size, adapter=adapter, rank=rank)
    backward = size * 2 * m  # gradients of a layer's widest tensors, while they are formed
    kept = shape.layers * size * d + layer if checkpointed else shape.layers * layer
    return kept + backward + last + heads


def _flops_per_token(
    shape: Shape,
    kind: str,
    num_heads: int,
    own_heads: bool,
    blocks: int,
    adapters: int,
    seq_len: int,
    checkpointed: bool,
) -> float:
    """Return multiplications and additions: 2 per weight and pass, backward twice forward."""
    attention = 4 * seq_len * shape.hidden  # no part of the mask is skipped
    forward = shape.layers * (2 * shape.layer_matrices + attention)
    matrix = shape.vocab * shape.hidden
    learned = own_heads or kind == "full"  # a frozen matrix gets no gradient of its own
    heads = num_heads * (6 if learned else 4) * matrix + 8 * blocks  # blocks run again in backward
    passes = {"frozen": 1, "lora": 2, "full": 3}[kind]
    if checkpointed and kind != "frozen":
        passes += 1
    own = {"frozen": 0, "lora": 4, "full": 6}[kind] * matrix  # the base's own loss
    return passes * forward + own + heads + 6 * adapters
