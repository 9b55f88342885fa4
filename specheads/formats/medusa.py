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

vLLM 0.28 to 0.32 loaded a layout of its own (``blocks.{h}.layers.{l}.weight|bias``), which is read,
see :mod:`specheads.formats.head_files`. 0.33 removed it; heads are brought there by ``vllm_heads``.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from specheads.config import ConfigError
from specheads.formats.serving import Job, Serving, base_name, text_copies, without_heads
from specheads.models.base import load_tokenizer
from specheads.models.checkpoint import cast_tensors, load_export, load_heads, save_as, save_hf
from specheads.models.heads import MedusaHeads, output_matrix
from specheads.models.manifest import save_tensors, write_json
from specheads.models.output import OutputLayer, output_layer
from specheads.system.files import whole_folder

PREFIX = "medusa_head."
SPELLINGS = ("medusa_num_{}", "num_medusa_{}")  # of the numbers of heads and layers
_SHARED = "fasterdecoding_v2"  # the layout without output matrices


def _check(job: Job) -> None:
    """Refuse Medusa heads that a format has no place for, from config.json alone.

    Raises:
        ConfigError: with what is in the way.
    """
    form, checkpoint, info = job[:3]
    holds, problem = "holds heads that read one hidden state", ""
    if info.get("correction", "none") != "none":
        problem = "correct their logits by the token drafted before (markov_rank)"
    elif info.get("prefix_layer"):
        problem = "read the text through an attention layer of their own (prefix_layer)"
    elif form == _SHARED:
        holds = "holds heads that share the base's output matrix"
        if not info["lm_head"].startswith("shared"):
            problem = f"have their own (lm_head={info['lm_head']}): use fasterdecoding_v1"
    elif info["lm_head"] in ("pruned", "shared_pruned"):
        kept, all_tokens = info["num_kept"], info["vocab_size"]
        holds = "has output matrices for all tokens"
        if kept < all_tokens:
            problem = f"are pruned to {kept} of {all_tokens}, which vllm_heads can hold"
    if problem:
        raise ConfigError(f"format={form} {holds}; those of {checkpoint} {problem}")


def write(job: Job) -> list[str]:
    """Write an export in one of the three layouts."""
    _check(job)
    heads = cast(MedusaHeads, load_heads(job.checkpoint))  # in the precision they are stored in
    tokenizer, tuned = load_tokenizer(job.checkpoint), job.info["base"]["tuned"]
    place = str(job.output.resolve() / "base") if tuned else base_name(job.info, "")
    base: Any = None
    if tuned or job.form != _SHARED:  # otherwise nothing of the base is written
        base = load_export(job.checkpoint, device="cpu").base
    output = None if job.form == _SHARED else output_layer(base)
    with whole_folder(job.output) as folder:
        if job.form == "merged":
            tensors, notes = _tensors(job.form, heads, output)
            config = copy.deepcopy(base.config)
            config.update(_counts(heads))
            save_as(folder, type(base), config, base, tensors, tokenizer, job.dtype)
            return notes
        notes = write_heads(job.form, folder, heads, output, job.dtype, place)
        tokenizer.save_pretrained(folder)  # the original repository looks for it there
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
            logits goes into the matrices.
        dtype: of the tensors; None keeps each as it is.
        base: name or folder of the base model.

    Returns:
        What the user has to know, in lines.

    Raises:
        ConfigError: if the base's output layer has a bias, or is quantised.
    """
    tensors, notes = _tensors(form, heads, output)
    config: dict[str, Any] = {"base_model_name_or_path": base, **_counts(heads)}
    if output is None:
        config["version"] = "2"
        if heads.num_layers > 1:
            notes.append(f"TGI reads such heads with one block each, these have {heads.num_layers}")
    elif heads.lm_head == "shared":
        notes.append(
            f"the base's output matrix was copied for each of {heads.num_heads} heads,"
            f" {heads.num_heads * output.weight.numel():,} numbers; fasterdecoding_v2 needs none"
        )
    file = folder / "medusa_lm_head.safetensors"
    save_tensors(file, cast_tensors(tensors, dtype), {"format": "pt"})
    write_json(folder / "config.json", config)
    return notes


@torch.no_grad()
def _tensors(
    form: str, heads: MedusaHeads, output: OutputLayer | None
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors of ``heads`` by the names of a layout, and what the user has to know."""
    before, notes = PREFIX if form == "merged" else "", list[str]()
    found = {
        f"{before}{i}.{j}.linear.{part}": tensor
        for i in range(heads.num_heads)
        for j, block in enumerate(heads.head(i).blocks)
        for part, tensor in block.state_dict().items()
    }
    if output is None:
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
    notes += check_output(output, form)
    shared, tokens = heads.lm_head.startswith("shared"), heads.token_map
    for i in range(heads.num_heads):
        matrix = output.weight if shared else output_matrix(heads, i)
        if not shared and tokens is not None:  # all tokens, in another order
            matrix = matrix[tokens.argsort()]
        # copies, since safetensors writes no two tensors that share their memory
        found[f"{before}{i}.{heads.num_layers}.weight"] = times(matrix, output.scale)
    return found, notes


def times(tensor: Tensor, factor: float) -> Tensor:
    """Return ``tensor * factor``, with memory of its own, computed in double precision."""
    if factor == 1.0:
        return tensor.detach().clone()
    return (tensor.double() * factor).to(tensor.dtype)


def _counts(heads: MedusaHeads) -> dict[str, int]:
    """Return the numbers of heads and layers in all the spellings that readers look for."""
    counts = {"heads": heads.num_heads, "layers": heads.num_layers}
    return {form.format(what): n for what, n in counts.items() for form in SPELLINGS}


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


def check_output(output: OutputLayer, form: str = "") -> list[str]:
    """Check that a head's logits can be those of a matrix alone, or of one and a factor.

    Args:
        output: of the base model.
        form: the format that the heads are to be written in; empty where they are brought in.

    Returns:
        What the user has to know, in lines.

    Raises:
        ConfigError: if the base adds a bias to its logits, which the heads' get as well.
    """
    if output.bias is not None:
        raise ConfigError(
            f"{f'format={form} holds' if form else 'these heads have'} output matrices without a"
            " bias, but the base model's output layer has one, which the heads' logits get as well"
            " in a native export"
        )
    if output.softcap is None:
        return []
    heads = "so are those of the heads now"
    if form:
        heads = "the format does not: the heads' logits are larger there"
    return [f"the base model caps its logits at {output.softcap:g}, {heads}, in the same order"]
