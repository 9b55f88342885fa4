"""Medusa heads of foreign files as ours: the same logits, or one line that says why not."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from specheads.config import ConfigError
from specheads.formats.layouts import Layout
from specheads.formats.tensor_files import TensorFiles
from specheads.models.heads import MedusaHeads
from specheads.models.output import OutputLayer


def read_heads(
    files: TensorFiles, layout: Layout, config: dict[str, Any], output: OutputLayer
) -> MedusaHeads:
    """Read the heads of ``layout``.

    Args:
        files: that hold them.
        layout: of these files; a line is added where the user has to know something.
        config: the config.json beside them.
        output: of the base model that they are for.

    Raises:
        ConfigError: if they are of other sizes than the base, or their logits cannot be had.
    """
    vocab_size, hidden_size = output.weight.shape
    check_sizes(files, layout, config, hidden_size, vocab_size)
    num_heads, num_layers = len(layout.blocks), layout.num_layers
    kept = _kept(files, layout, config, vocab_size)
    _check_biases(files, layout, config)
    found = files.read(layout.names() - {layout.token_map})
    matrices = _finished(found, layout, config, output, kept)
    lm_head = "shared" if matrices is None else "own" if kept is None else "pruned"
    with torch.device("meta"):
        heads = MedusaHeads(
            num_heads, num_layers, hidden_size, vocab_size, lm_head,
            num_kept=0 if kept is None else len(kept),
        )  # fmt: skip
    state: dict[str, Tensor] = {} if kept is None or matrices is None else {"token_map": kept}
    for i, head in enumerate(layout.blocks):
        for j, (weight, bias) in enumerate(head):
            state[f"heads.{i}.blocks.{j}.weight"] = found[weight].clone()
            matching = found[weight].new_zeros(hidden_size)
            state[f"heads.{i}.blocks.{j}.bias"] = matching if bias is None else found[bias].clone()
        if matrices is not None:
            state[f"heads.{i}.lm_head.weight"] = matrices[i]
    heads.load_state_dict(state, assign=True)
    return heads


def check_sizes(
    files: TensorFiles, layout: Layout, config: dict[str, Any], hidden_size: int, vocab_size: int
) -> None:
    """Hold the shapes of heads to a base model's; nothing is read.

    Raises:
        ConfigError: with the first tensor that is of another size.
    """
    rows = {vocab_size}
    if layout.token_map is not None and _truncated(config, vocab_size) != vocab_size:
        rows |= set(files.header[layout.token_map][0][:1])
    for weight, bias in (pair for head in layout.blocks for pair in head):
        _check_shape(files, weight, [(hidden_size, hidden_size)])
        if bias is not None:
            _check_shape(files, bias, [(hidden_size,)])
    for name in set(layout.matrices):
        _check_shape(files, name, [(each, hidden_size) for each in sorted(rows)])


def _finished(
    found: dict[str, Tensor],
    layout: Layout,
    config: dict[str, Any],
    output: OutputLayer,
    kept: Tensor | None,
) -> list[Tensor] | None:
    """Return the matrices so that ours, times the base's factor, give the logits of these heads.

    None where the base's own does.
    """
    if not layout.matrices:
        return None
    if output.bias is not None:
        raise ConfigError(
            "these heads have output matrices without a bias; a native export adds that of the base"
            " model's output layer, which has one"
        )
    if output.softcap is not None:
        layout.notes.append(
            f"the base model caps its logits at {output.softcap:g}: so are those of the heads now,"
            " in the same order"
        )
    scale = config.get("logit_scale", 1.0)
    if type(scale) not in (int, float) or not math.isfinite(scale) or scale <= 0:
        raise ConfigError(f"config.json: logit_scale is {scale!r:.40}, expected a number above 0")
    factor = float(scale) / output.scale
    first = found[layout.matrices[0]]
    common = len(layout.matrices) > 1 and len(set(layout.matrices)) == 1
    whole = kept is None and (common or len(layout.matrices) == 1)
    if whole and factor == 1.0 and torch.equal(first.to(output.weight.dtype), output.weight):
        layout.notes.append("their output matrix is the base's: it is shared, not stored again")
        return None
    matrices = []
    for name in layout.matrices:
        matrix = found[name]
        if kept is not None and len(matrix) > len(kept):
            matrix = matrix[kept]
        exact = matrix if factor == 1.0 else (matrix.double() * factor).to(matrix.dtype)
        matrices.append(exact.clone())
    return matrices


def _kept(
    files: TensorFiles, layout: Layout, config: dict[str, Any], vocab_size: int
) -> Tensor | None:
    """Return the [V'] token ids that the heads can guess, None for all; as vLLM understands it."""
    truncated = _truncated(config, vocab_size)
    if layout.token_map is None:
        if truncated != vocab_size:
            raise ConfigError(
                f"{files.where} lacks token_map, but config.json says truncated_vocab_size is"
                f" {truncated!r:.40}, the base has {vocab_size} tokens"
            )
        return None
    shape, dtype = files.header[layout.token_map]
    if len(shape) != 1 or dtype not in ("I64", "I32") or not 1 <= shape[0] <= vocab_size:
        raise ConfigError(
            f"{files.where}: {layout.token_map} is {dtype} of shape {list(shape)}, expected at most"
            f" {vocab_size} token ids"
        )
    if truncated == vocab_size:
        layout.notes.append(
            "its token_map is not used, as in vLLM: truncated_vocab_size is that of all tokens"
        )
        return None
    if not layout.matrices:
        raise ConfigError(f"{files.where} holds token_map, but no output matrix")
    kept = files.read([layout.token_map])[layout.token_map].long()
    if len(kept) != truncated or len(kept.unique()) < len(kept):
        raise ConfigError(
            f"{files.where}: {layout.token_map} holds {len(kept.unique())} different tokens,"
            f" config.json says truncated_vocab_size is {truncated!r:.40}"
        )
    if kept.min() < 0 or kept.max() >= vocab_size:
        raise ConfigError(
            f"{files.where}: {layout.token_map} holds {int(kept.min())} to {int(kept.max())},"
            f" expected 0 to {vocab_size - 1}"
        )
    return kept


def _truncated(config: dict[str, Any], vocab_size: int) -> Any:
    """Return how many tokens a vLLM config says the heads can guess."""
    return config.get("truncated_vocab_size") or vocab_size


def _check_shape(files: TensorFiles, name: str, expected: list[tuple[int, ...]]) -> None:
    if (shape := files.shape(name)) not in expected:
        wanted = " or ".join(str(list(each)) for each in expected)
        raise ConfigError(
            f"{files.where}: {name} has shape {list(shape)}, the base model's sizes ask for"
            f" {wanted}"
        )


def _check_biases(files: TensorFiles, layout: Layout, config: dict[str, Any]) -> None:
    biases = {bias is not None for head in layout.blocks for _, bias in head}
    if biases == {True, False} or (config.get("medusa_fc_bias") and biases == {False}):
        raise ConfigError(f"{files.where} lacks the bias of some of its blocks")
    dropped = config.get("model_type") == "medusa" and not config.get("medusa_fc_bias")
    if dropped and biases == {True}:
        layout.notes.append(
            "its blocks have biases, which vLLM drops unless config.json says medusa_fc_bias; they"
            " are kept here"
        )
