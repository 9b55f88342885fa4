"""Medusa heads in the layouts of other programs: written, and served.

Shapes: K heads, L blocks each, d hidden size, V vocabulary, V' the tokens that a head can guess.

``fasterdecoding_v1`` and ``_v2`` are what the original repository and TGI read,
``medusa_lm_head.safetensors``. Version 1 (the paper, axolotl, all published weights, TensorRT-LLM's
converter) has per head the blocks ``{h}.{l}.linear.weight|bias`` and a matrix of its own,
``{h}.{L}.weight``. Version 2 (April 2024) has blocks alone, the base's output matrix makes the
logits. ``config.json`` has no ``architectures``: TGI takes a folder with one for no speculator at
all. The number of heads is there in the two spellings that readers look for.

``merged`` is base and heads in one Hugging Face folder, as the medusa-1.0 checkpoints are: the
base's own files, with any adapter merged, and version 1's names behind ``medusa_head.``. Whatever
loads the base alone loads this too, and passes over the heads.

``vllm_medusa`` is what vLLM 0.28 to 0.32 loads for ``{"method": "medusa"}``, from its
``models/medusa.py`` and config class: ``blocks.{h}.layers.{l}.weight|bias``, and
``lm_heads.{h}.weight``, or one ``lm_head.weight`` for all heads (``original_lm_head``), a copy of
the base's. It drafts one chain, every head's best guess. It skips tensors of other names without a
word, and drops biases unless the config has ``medusa_fc_bias``. vLLM 0.33 removed the method.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from specheads.config import ConfigError
from specheads.formats.serving import Job, Serving, base_name, text_copies, vllm, without_heads
from specheads.models.base import load_tokenizer
from specheads.models.checkpoint import cast_tensors, load_export, load_heads, save_as, save_hf
from specheads.models.heads import MedusaHeads, output_matrix
from specheads.models.manifest import save_tensors, write_json
from specheads.models.output import OutputLayer, output_layer
from specheads.system.files import whole_folder

PREFIX = "medusa_head."
SPELLINGS = ("medusa_num_{}", "num_medusa_{}")  # of the numbers of heads and layers
# names of the tensors of head i: its block j, and its matrix behind its last block
_BLOCK, _MATRIX = "{i}.{j}.linear.{part}", "{i}.{last}.weight"


class _Names(NamedTuple):
    """How a layout names its tensors, and which output matrices it has a place for.

    Attributes:
        block: of head ``{i}``, block ``{j}``; ``{part}`` is weight or bias.
        matrix: of head ``{i}``, which has ``{last}`` blocks; empty where all share the base's.
        common: of one matrix for all heads; empty where a shared one is copied for each.
        file: empty where they lie among the base's tensors.
    """

    block: str
    matrix: str
    common: str = ""
    file: str = "medusa_lm_head.safetensors"


_NAMES = {
    "fasterdecoding_v1": _Names(_BLOCK, _MATRIX),
    "fasterdecoding_v2": _Names(_BLOCK, ""),
    "merged": _Names(PREFIX + _BLOCK, PREFIX + _MATRIX, file=""),
    "vllm_medusa": _Names(
        "blocks.{i}.layers.{j}.{part}",
        "lm_heads.{i}.weight",
        common="lm_head.weight",
        file="model.safetensors",
    ),
}


def _check(job: Job) -> None:
    """Refuse Medusa heads that a format has no place for, from config.json alone.

    Raises:
        ConfigError: with what is in the way.
    """
    form, checkpoint, info = job[:3]
    names, holds, problem = _NAMES[form], "holds heads that read one hidden state", ""
    if info.get("correction", "none") != "none":
        problem = "correct their logits by the token drafted before (markov_rank)"
    elif info.get("prefix_layer"):
        problem = "read the text through an attention layer of their own (prefix_layer)"
    elif not names.matrix and not info["lm_head"].startswith("shared"):
        holds = "holds heads that share the base's output matrix"
        problem = f"have their own (lm_head={info['lm_head']}): use fasterdecoding_v1"
    elif names.matrix and info["lm_head"] in ("pruned", "shared_pruned") and not names.common:
        kept, all_tokens = info["num_kept"], info["vocab_size"]
        holds = "has output matrices for all tokens"
        if kept < all_tokens:
            problem = f"are pruned to {kept} of {all_tokens}, which vllm_medusa can hold"
    if problem:
        raise ConfigError(f"format={form} {holds}; those of {checkpoint} {problem}")


def write(job: Job) -> list[str]:
    """Write an export in one of the four layouts."""
    _check(job)
    heads = cast(MedusaHeads, load_heads(job.checkpoint))  # in the precision they are stored in
    tokenizer, tuned = load_tokenizer(job.checkpoint), job.info["base"]["tuned"]
    place = str(job.output.resolve() / "base") if tuned else base_name(job.info, "")
    base: Any = None
    if tuned or _NAMES[job.form].matrix:  # otherwise nothing of the base is written
        base = load_export(job.checkpoint, device="cpu").base
    output = None if base is None else output_layer(base)
    with whole_folder(job.output) as folder:
        if not _NAMES[job.form].file:
            tensors, notes = _tensors(job.form, heads, output)
            config = copy.deepcopy(base.config)
            config.update(_counts(heads))
            save_as(folder, type(base), config, base, tensors, tokenizer, job.dtype)
            return notes
        notes = write_heads(job.form, folder, heads, output, job.dtype, place)
        if job.form != "vllm_medusa":  # the original repository looks for it beside the heads
            tokenizer.save_pretrained(folder)
        if tuned:
            save_hf(folder / "base", base, tokenizer, job.dtype)
            notes.append(f"these heads belong to the tuned base model, which is in {place}")
    return notes


def write_heads(
    form: str,
    folder: Path,
    heads: MedusaHeads,
    output: OutputLayer | None,
    dtype: torch.dtype | None,
    base: str = "",
) -> list[str]:
    """Write config and tensors of heads alone into ``folder``.

    Args:
        form: any of the layouts but ``merged``.
        folder: an empty one.
        heads: those that :func:`write` has nothing against.
        output: the base's output layer; None where the layout has no matrices. A factor on its
            logits goes into the matrices, or into vLLM's config.
        dtype: of the tensors; None keeps each as it is.
        base: name or folder of the base model.

    Returns:
        What the user has to know, in lines.

    Raises:
        ConfigError: if the base's output layer has a bias, or is quantised.
    """
    tensors, notes = _tensors(form, heads, output)
    if output is not None and form == "vllm_medusa":
        config = _vllm_config(heads, output)
    else:
        config = {"base_model_name_or_path": base, **_counts(heads)}
    if form == "fasterdecoding_v1" and output is not None and heads.lm_head == "shared":
        notes.append(
            f"the base's output matrix was copied for each of {heads.num_heads} heads,"
            f" {heads.num_heads * output.weight.numel():,} numbers; fasterdecoding_v2 needs none"
        )
    if form == "fasterdecoding_v2":
        config["version"] = "2"
        if heads.num_layers > 1:
            notes.append(f"TGI reads such heads with one block each, these have {heads.num_layers}")
    # token ids keep their dtype: half precision would name other tokens from 2,048 on
    save_tensors(folder / _NAMES[form].file, cast_tensors(tensors, dtype), {"format": "pt"})
    write_json(folder / "config.json", config)
    return notes


@torch.no_grad()
def _tensors(
    form: str, heads: MedusaHeads, output: OutputLayer | None
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors of ``heads`` by the names of a layout, and what the user has to know."""
    names, shared = _NAMES[form], heads.lm_head.startswith("shared")
    notes: list[str] = []
    found = {}
    for i in range(heads.num_heads):
        blocks = [block.state_dict() for block in heads.head(i).blocks]
        if names.common and not blocks:
            # a model of no layers is nothing that vLLM is made for: one of zeros changes nothing
            size, zeros = heads.hidden_size, next(heads.parameters()).new_zeros
            blocks = [{"weight": zeros(size, size), "bias": zeros(size)}]
        for j, block in enumerate(blocks):
            for part, tensor in block.items():
                found[names.block.format(i=i, j=j, part=part)] = tensor
    if output is None or not names.matrix:
        if heads.num_outputs < heads.vocab_size:
            notes.append(
                f"engines multiply by the base's whole matrix: these heads guess among all"
                f" {heads.vocab_size:,} tokens there, among {heads.num_outputs:,} of them here"
            )
        return found, notes
    if not output.weight.is_floating_point():
        raise ConfigError(
            f"format={form}: the base model's output matrix is quantised ({output.weight.dtype})"
        )
    capped = "the format does not: the heads' logits are larger there,"
    notes += check_output(f"format={form} holds", output, capped)
    rows, pruned = output.weight, heads.num_outputs < heads.vocab_size
    if shared and pruned:
        found["token_map"], rows = heads.token_map, heads.shared_rows(output.weight)
    elif pruned:
        notes.append(
            f"vLLM loads no matrices of fewer tokens for each head: the matrices of"
            f" {heads.num_outputs:,} tokens are written with all {heads.vocab_size:,} rows"
        )
    if shared and names.common:
        return found | {names.common: rows}, notes
    for i in range(heads.num_heads):
        # copies, since safetensors writes no two tensors that share their memory
        matrix = rows if shared else _matrix(heads, i)
        scale = 1.0 if names.common else output.scale
        found[names.matrix.format(i=i, last=heads.num_layers)] = times(matrix, scale)
    return found, notes


def _matrix(heads: MedusaHeads, i: int) -> Tensor:
    """Return the output matrix of head ``i`` [V, d]; a low-rank one is multiplied out.

    Tokens that a pruned one leaves out get the mean of its rows: the mean of the logits of those
    that it has, which is never the largest, so that the best guess is the same.
    """
    if heads.lm_head == "low_rank":
        up, down = (heads.get_parameter(f"heads.{i}.lm_head.{n}.weight") for n in ("up", "down"))
        return (up.double() @ down.double()).to(up.dtype)
    matrix = output_matrix(heads, i)
    if heads.token_map is None:
        return matrix
    whole = matrix.mean(0).expand(heads.vocab_size, -1).clone()
    whole[heads.token_map] = matrix
    return whole


def times(tensor: Tensor, factor: float) -> Tensor:
    """Return ``tensor * factor``, with memory of its own, computed in double precision."""
    if factor == 1.0:
        return tensor.detach().clone()
    return (tensor.double() * factor).to(tensor.dtype)


def _counts(heads: MedusaHeads) -> dict[str, int]:
    """Return the numbers of heads and layers in all the spellings that readers look for."""
    counts = {"heads": heads.num_heads, "layers": heads.num_layers}
    return {form.format(what): n for what, n in counts.items() for form in SPELLINGS}


def _vllm_config(heads: MedusaHeads, output: OutputLayer) -> dict[str, Any]:
    shared = heads.lm_head.startswith("shared")
    # No other key may hold "num" and "heads", or "num" and "layers": vLLM renames each of them to
    # num_heads or num_hidden_layers, so that num_attention_heads would be the number of heads.
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": heads.hidden_size,
        "vocab_size": heads.vocab_size,
        # of one matrix for all heads; each head's own has all rows, whatever this says
        "truncated_vocab_size": heads.num_outputs if shared else heads.vocab_size,
        "num_heads": heads.num_heads,
        "num_hidden_layers": max(heads.num_layers, 1),
        "medusa_fc_bias": True,
        "original_lm_head": shared,
    }
    if output.scale != 1.0:
        config["logit_scale"] = output.scale
    return config


def serve_vllm(place: str, base: str, info: dict[str, Any]) -> list[Serving]:
    """Return how engines serve a ``vllm_medusa`` folder."""
    config = {"method": "medusa", "model": place, "num_speculative_tokens": info["num_heads"]}
    note = (
        "a chain of the heads' best guesses, no tree; num_speculative_tokens may be smaller; 0.33"
        " removed the method"
    )
    version = "0.28 to 0.32, their files; the last tried on a CPU"
    return [vllm(base, config, note, version), *without_heads(info, "0.33 removed Medusa heads")]


def serve_tgi(place: str, base: str, info: dict[str, Any]) -> list[Serving]:
    """Return how engines serve a folder in the original layout."""
    command = f"text-generation-launcher --model-id {place} --speculate {info['num_heads']}"
    note = "a chain of the heads' best guesses, no tree; TGI is no longer maintained"
    return [Serving("TGI", command, note), *without_heads(info)]


def serve_merged(place: str, base: str, info: dict[str, Any]) -> list[Serving]:
    """Return how engines serve a folder with base and heads."""
    command = f"python -m medusa.inference.cli --model {place}"
    note = "the code of the paper: transformers of 2023, its own trees"
    return [
        *text_copies(place, "the base alone: the heads are passed over"),
        Serving("FasterDecoding/Medusa", command, note),
    ]


def check_output(holder: str, output: OutputLayer, heads: str) -> list[str]:
    """Check that a head's logits can be those of a matrix alone, or of one and a factor.

    Args:
        holder: ``format=... holds``, or ``these heads have``.
        output: of the base model.
        heads: what becomes of the heads' logits where the base caps its own.

    Returns:
        What the user has to know, in lines.

    Raises:
        ConfigError: if the base adds a bias to its logits, which the heads' get as well.
    """
    if output.bias is not None:
        raise ConfigError(
            f"{holder} output matrices without a bias, but the base model's output layer has one,"
            " which the heads' logits get as well in a native export"
        )
    if output.softcap is None:
        return []
    return [f"the base model caps its logits at {output.softcap:g}, {heads} in the same order"]
