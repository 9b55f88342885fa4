"""Medusa heads as every foreign format knows them: residual blocks and an output matrix, no more.

Shapes: K heads, L blocks each, d hidden size, V vocabulary, V' the tokens that a head can guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specheads.assets import tinycode_dir
from specheads.config import ConfigError
from specheads.models.compress import output_matrix
from specheads.models.heads import MedusaHeads
from specheads.models.output import OutputLayer

Block = tuple[Tensor, Tensor]  # weight [d, d] and bias [d]


@dataclass(frozen=True)
class ParallelHead:
    """One head: ``x + SiLU(W x + b)`` per block, then the matrix.

    Attributes:
        blocks: L of them.
        matrix: [V', d]; None where the base's is shared.
    """

    blocks: tuple[Block, ...]
    matrix: Tensor | None


def check_parallel(form: str, checkpoint: str | Path, info: dict[str, Any]) -> None:
    """Refuse heads that a Medusa format has no place for, from config.json alone.

    Args:
        form: the format, for the message.
        checkpoint: the export, for the message.
        info: what its config.json holds.

    Raises:
        ConfigError: with what is in the way.
    """
    if info["kind"] == "mtp":
        raise ConfigError(
            f"format={form} is for Medusa heads, {checkpoint} is mtp; format=mtp_standard holds"
            " those"
        )
    problem = None
    if info["kind"] == "hydra":
        problem = "are Hydra heads, which read the tokens drafted before their own"
    elif info.get("correction", "none") != "none":
        problem = "correct their logits by the token drafted before (markov_rank)"
    elif info.get("prefix_layer"):
        problem = "read the text through an attention layer of their own (prefix_layer)"
    if problem:
        raise ConfigError(
            f"format={form} holds heads that read one hidden state; those of {checkpoint} {problem}"
        )


@torch.no_grad()
def parallel_heads(heads: MedusaHeads) -> list[ParallelHead]:
    """Return the K heads; a low-rank matrix is multiplied out, in double precision."""
    found = []
    for i in range(heads.num_heads):
        head = heads.head(i)
        blocks = tuple(
            (head.get_parameter(f"blocks.{j}.weight"), head.get_parameter(f"blocks.{j}.bias"))
            for j in range(heads.num_layers)
        )
        matrix: Tensor | None = None
        if heads.lm_head == "low_rank":
            up = head.get_parameter("lm_head.up.weight")
            down = head.get_parameter("lm_head.down.weight")
            matrix = (up.double() @ down.double()).to(up.dtype)
        elif heads.lm_head != "shared":
            matrix = output_matrix(heads, i)
            if heads.token_map is not None and heads.num_outputs == heads.vocab_size:
                matrix = matrix[heads.token_map.argsort()]  # all tokens, in any order
        found.append(ParallelHead(blocks, matrix))
    return found


def check_output(form: str, output: OutputLayer) -> list[str]:
    """Check that a head's logits can be those of a matrix alone, or of one and a factor.

    Args:
        form: the format, for the message.
        output: of the base model.

    Returns:
        What the user has to know, in lines.

    Raises:
        ConfigError: if the base adds a bias to its logits, which the heads' get as well.
    """
    if output.bias is not None:
        raise ConfigError(
            f"format={form} holds output matrices without a bias, but the base model's output layer"
            " has one, which the heads' logits get as well"
        )
    if not output.weight.is_floating_point():
        raise ConfigError(
            f"format={form}: the base model's output matrix is quantised ({output.weight.dtype})"
        )
    if output.softcap is None:
        return []
    return [
        f"the base model caps its logits at {output.softcap:g}, the format does not: the heads'"
        " logits are larger there, in the same order"
    ]


@torch.no_grad()
def own_matrix(head: ParallelHead, output: OutputLayer, scale: float) -> Tensor:
    """Return a matrix [V', d] of this head's own, times ``scale``; a copy where it was shared."""
    matrix = output.weight if head.matrix is None else head.matrix
    if scale == 1.0:
        return matrix.detach().clone()
    return (matrix.double() * scale).to(matrix.dtype)


def stored(tensors: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return tensors as they are written: on the CPU, each with memory of its own, in ``dtype``.

    Token ids stay what they are; None keeps every dtype.
    """
    found = {}
    for name, tensor in tensors.items():
        keep = dtype is None or not tensor.is_floating_point()
        found[name] = tensor.detach().to("cpu", None if keep else dtype).contiguous()
    return found


def place_of_base(info: dict[str, Any], output: Path) -> str:
    """Return where an engine finds the base model of heads that were written to ``output``.

    Args:
        info: what the native export's config.json holds.
        output: the folder with the heads; a tuned base lies in its ``base/``.
    """
    if info["base"]["tuned"]:
        return str(output.resolve() / "base")
    name = str(info["base"]["name"])
    return str(tinycode_dir()) if name == "tinycode" else name
