"""Medusa heads in the layouts of other programs: written, served, and read back.

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

Files of others are told by the names of their tensors, not by their config. Configs of published
checkpoints are known to lie (two heads where the file holds five, layers that are one layer under
several names), so that everything is counted. A name that no layout knows is refused: skipped, it
would be heads that guess nothing right.
"""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.config import ConfigError
from specheads.formats.serving import Job, Serving, base_name, text_copies, vllm, without_heads
from specheads.models.base import load_tokenizer
from specheads.models.checkpoint import cast_tensors, load_export, load_heads, save_as, save_hf
from specheads.models.heads import MedusaHeads, output_matrix
from specheads.models.manifest import TensorFiles, expect, save_tensors, write_json
from specheads.models.output import OutputLayer, output_layer
from specheads.system.files import whole_folder

MOST_HEADS, MOST_LAYERS = 256, 64  # of native exports, see models/export_config.py
PREFIX = "medusa_head."
SPELLINGS = ("medusa_num_{}", "num_medusa_{}")  # of the numbers of heads and layers
# names of the tensors of head i: its block j, and its matrix behind its last block
_BLOCK, _MATRIX = "{i}.{j}.linear.{part}", "{i}.{last}.weight"
_VLLM = "0.28 to 0.32"  # the versions that have the method


class _Names(NamedTuple):
    """How a layout names its tensors, and which output matrices it has a place for.

    Attributes:
        note: what the user has to know; ``{heads}`` is their number.
        block: of head ``{i}``, block ``{j}``; ``{part}`` is weight or bias.
        matrix: of head ``{i}``, which has ``{last}`` blocks; empty where all share the base's.
        common: of one matrix for all heads; empty where a shared one is copied for each.
        file: empty where they lie among the base's tensors.
    """

    note: str
    block: str
    matrix: str
    common: str = ""
    file: str = "medusa_lm_head.safetensors"


_NAMES = {
    "fasterdecoding_v1": _Names(
        "for TGI, TensorRT-LLM's old converter, and the original repository", _BLOCK, _MATRIX
    ),
    "fasterdecoding_v2": _Names(
        "for TGI, which computes the heads' logits by the base model's output matrix", _BLOCK, ""
    ),
    "merged": _Names(
        "base and heads in one folder; what loads the base alone passes over the heads",
        PREFIX + _BLOCK,
        PREFIX + _MATRIX,
        file="",
    ),
    "vllm_medusa": _Names(
        f"for vLLM {_VLLM} alone: 0.33 removed the method; it drafts a chain of the heads' best"
        " guesses, num_speculative_tokens={heads} or fewer, no tree",
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
    notes = [names.note.format(heads=heads.num_heads)]
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
    version = f"{_VLLM}, their files; the last tried on a CPU"
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


_PREFIXES = ("module.", "medusa_heads.", PREFIX, f"model.{PREFIX}")
Block = tuple[str, str | None]  # names of its weight and bias
_BLOCK_NAME = re.compile(
    r"(?:(\d{1,3})\.(\d{1,3})\.linear|blocks\.(\d{1,3})\.layers\.(\d{1,3}))\.(weight|bias)"
)
_MATRIX_NAME = re.compile(r"(?:(\d{1,3})\.(\d{1,3})|lm_heads\.(\d{1,3}))\.weight")


class Layout:
    """Which tensors of foreign files, which hold Medusa heads alone, belong to which head.

    Attributes:
        files: that hold them.
        config: the config.json beside them; empty where there is none.
        blocks: per head, per block, the names of weight and bias; no bias is zero.
        matrices: per head the name of its output matrix; empty where they use the base's.
        token_map: name of the ids that the rows of the matrices stand for, if they are fewer.
        notes: what the user has to know, in lines.
        kept: [V'] token ids that the heads can guess, once the sizes are checked; None: all.

    Raises:
        ConfigError: with the first name that is unknown, or missing.
    """

    def __init__(self, files: TensorFiles, config: dict[str, Any]) -> None:
        self.files, self.config, self.notes = files, config, list(files.notes)
        self.kept: Tensor | None = None
        blocks: dict[int, dict[int, dict[str, str]]] = {}  # names by head, layer and part
        matrices: dict[int, str] = {}
        ends: dict[int, int] = {}  # by head, the place of its matrix behind its blocks
        others: dict[str, str] = {}
        for name in sorted(files.header):
            plain, place, key = name, cast(dict[Any, str], others), cast(Any, None)
            for prefix in _PREFIXES:
                plain = plain.removeprefix(prefix)
            if found := _BLOCK_NAME.fullmatch(plain):
                layers = blocks.setdefault(int(found[1] or found[3]), {})
                place, key = layers.setdefault(int(found[2] or found[4]), {}), found[5]
            elif found := _MATRIX_NAME.fullmatch(plain):
                place, key = matrices, int(found[1] or found[3])
                if found[2]:
                    ends[key] = int(found[2])
            elif plain in ("lm_head.weight", "token_map"):
                key = plain
            else:
                raise ConfigError(f"{files.where}: {name:.120} is no tensor of Medusa heads")
            if key in place:
                raise ConfigError(f"{files.where} holds the same tensor under two names: {name}")
            place[key] = name
        number = 1 + max((*matrices, *blocks), default=-1)
        check_number(files, number)
        self.blocks = [self._blocks_of(i, blocks.get(i, {}), ends.get(i)) for i in range(number)]
        if len(counts := {len(each) for each in self.blocks}) > 1:
            raise ConfigError(
                f"{files.where}: its heads have {min(counts)} to {max(counts)} layers, expected the"
                " same number in all"
            )
        self.matrices = self._matrix_names(number, matrices, others.get("lm_head.weight"))
        self.token_map = others.get("token_map")
        self._say_lies()

    def check_sizes(self, hidden_size: int, vocab_size: int) -> None:
        """Hold the shapes of the heads to a base model's; only the ids of ``token_map`` are read.

        Raises:
            ConfigError: with the first tensor that is of another size, or what is wrong with the
                ids.
        """
        self.kept = self._kept(vocab_size)
        rows = {vocab_size} if self.kept is None else {len(self.kept), vocab_size}
        for weight, bias in (pair for head in self.blocks for pair in head):
            check_shape(self.files, weight, (hidden_size, hidden_size))
            if bias is not None:
                check_shape(self.files, bias, (hidden_size,))
        for name in set(self.matrices):
            check_shape(self.files, name, *((each, hidden_size) for each in sorted(rows)))

    @torch.no_grad()
    def read(self, base: PreTrainedModel) -> MedusaHeads:
        """Read the heads, whose logits are the same over ``base``; their sizes were checked.

        Raises:
            ConfigError: if their logits cannot be had.
        """
        output, kept = output_layer(base), self.kept
        vocab_size, hidden_size = output.weight.shape
        self._check_biases()
        names = {name for head in self.blocks for pair in head for name in pair if name}
        found = self.files.read(names | set(self.matrices))
        matrices = self._matrices(found, output)
        forms = ("own", "pruned") if matrices else ("shared", "shared_pruned")
        lm_head = forms[kept is not None]
        with torch.device("meta"):
            heads = MedusaHeads(
                len(self.blocks), len(self.blocks[0]), hidden_size, vocab_size, lm_head,
                num_kept=0 if kept is None else len(kept),
            )  # fmt: skip
        state: dict[str, Tensor] = {} if kept is None else {"token_map": kept}
        for i, head in enumerate(self.blocks):
            for j, (weight, bias) in enumerate(head):
                zero = found[weight].new_zeros(hidden_size)
                state[f"heads.{i}.blocks.{j}.weight"] = found[weight].clone()
                state[f"heads.{i}.blocks.{j}.bias"] = found[bias].clone() if bias else zero
        state |= {f"heads.{i}.lm_head.weight": matrix for i, matrix in enumerate(matrices)}
        heads.load_state_dict(state, assign=True)
        return heads

    def _matrices(self, found: dict[str, Tensor], output: OutputLayer) -> list[Tensor]:
        """Return the matrices that, times the base's factor, give the logits of these heads.

        Empty where the base's own does.
        """
        kept = self.kept
        if not self.matrices:
            return []
        self.notes += check_output("these heads have", output, "so are those of the heads now,")
        raw = self.config.get("logit_scale", 1.0)
        fits = type(raw) in (int, float) and math.isfinite(raw) and raw > 0
        expect(fits, "config.json: logit_scale", raw, "a number above 0")
        factor = float(raw) / output.scale
        matrices = [found[name] for name in self.matrices]
        rows = output.weight
        if kept is not None:
            rows = rows[kept]
            matrices = [each[kept] if len(each) > len(kept) else each for each in matrices]
        one = factor == 1.0 and len(set(self.matrices)) == 1
        if one and torch.equal(matrices[0].to(rows.dtype), rows):
            self.notes.append("their output matrix is the base's: it is shared, not stored again")
            return []
        return [times(each, factor) for each in matrices]

    def _kept(self, vocab_size: int) -> Tensor | None:
        """Return the [V'] token ids that the heads can guess, as vLLM understands it; None: all."""
        where, name = self.files.where, self.token_map
        truncated = self.config.get("truncated_vocab_size") or vocab_size  # as vLLM's config says
        if name is None:
            if truncated != vocab_size:
                raise ConfigError(
                    f"{where} lacks token_map, but config.json says truncated_vocab_size is"
                    f" {truncated!r:.40}, the base has {vocab_size} tokens"
                )
            return None
        shape, dtype = self.files.header[name]
        if len(shape) != 1 or dtype not in ("I64", "I32") or not 1 <= shape[0] <= vocab_size:
            raise ConfigError(
                f"{where}: {name} is {dtype} of shape {list(shape)}, expected at most {vocab_size}"
                " token ids"
            )
        if truncated == vocab_size:
            self.notes.append(
                "its token_map is not used, as in vLLM: truncated_vocab_size is that of all tokens"
            )
            return None
        if not self.matrices:
            raise ConfigError(f"{where} holds token_map, but no output matrix")
        kept = self.files.read([name])[name].long()
        different, low, high = len(kept.unique()), int(kept.min()), int(kept.max())
        if not len(kept) == different == truncated or low < 0 or high >= vocab_size:
            raise ConfigError(
                f"{where}: {name} holds {different} different tokens, {low} to {high}; expected 0"
                f" to {vocab_size - 1}, config.json says truncated_vocab_size is {truncated!r:.40}"
            )
        return kept

    def _blocks_of(self, head: int, own: dict[int, dict[str, str]], end: int | None) -> list[Block]:
        """Return the names of one head's blocks; notes where one block stands for several.

        Args:
            head: which.
            own: names by layer and part.
            end: the place of its output matrix behind its blocks; None where that says nothing.
        """
        number, where = 1 + max(own, default=-1) if end is None else end, self.files.where
        if number > MOST_LAYERS:
            raise ConfigError(
                f"{where}: head {head} has {number} layers, at most {MOST_LAYERS} can be"
            )
        if len(own) == 1 and number > 1:
            # `[block] * n` is one module under n names; savers that drop shared tensors leave one
            [only] = own.values()
            own = dict.fromkeys(range(number), only)
            line = f"one block stands for the {number} layers of a head, as it was trained"
            if line not in self.notes:
                self.notes.append(line)
        for layer in range(number):
            if "weight" not in own.get(layer, {}):
                raise ConfigError(f"{where} lacks the weight of layer {layer} of head {head}")
        if extra := sorted(set(own) - set(range(number))):
            raise ConfigError(f"{where}: layer {extra[0]} of head {head} stands behind its matrix")
        return [(own[layer]["weight"], own[layer].get("bias")) for layer in range(number)]

    def _matrix_names(self, number: int, matrices: dict[int, str], common: str | None) -> list[str]:
        """Return per head the name of its output matrix; empty where there is none."""
        where = self.files.where
        if common is not None and matrices:
            raise ConfigError(f"{where} holds lm_head.weight and {matrices[min(matrices)]}")
        if common is None and self.config.get("original_lm_head") and set(matrices) == {0}:
            common = matrices[0]
        if common is not None:
            return [common] * number
        missing = [head for head in range(number) if head not in matrices]
        if matrices and missing:
            raise ConfigError(f"{where} lacks the output matrix of head {missing[0]}")
        return [matrices[head] for head in sorted(matrices)]

    def _say_lies(self) -> None:
        """Add a line to the notes for each number that the config has wrong."""
        config, heads, layers = self.config, len(self.blocks), len(self.blocks[0])
        medusa = config.get("model_type") == "medusa"  # elsewhere num_hidden_layers is the base's
        counts = {"heads": (heads, "num_heads"), "layers": (layers, "num_hidden_layers")}
        for what, (counted, of_vllm) in counts.items():
            keys = [form.format(what) for form in SPELLINGS] + [of_vllm] * medusa
            wrong = [key for key in keys if key in config and config[key] != counted]
            if wrong:
                said = f"config.json says {wrong[0]}={config[wrong[0]]!r:.40}"
                self.notes.append(f"{said}, the tensors are of {counted} {what}: those are taken")

    def _check_biases(self) -> None:
        biases = {bias is not None for head in self.blocks for _, bias in head}
        wanted = self.config.get("medusa_fc_bias")
        if biases == {True, False} or (wanted and biases == {False}):
            raise ConfigError(f"{self.files.where} lacks the bias of some of its blocks")
        if self.config.get("model_type") == "medusa" and not wanted and biases == {True}:
            self.notes.append(
                "its blocks have biases, which vLLM drops unless config.json says medusa_fc_bias;"
                " they are kept here"
            )


def check_number(files: TensorFiles, number: int) -> None:
    """Refuse more heads than a native export may have, and none."""
    if not 1 <= number <= MOST_HEADS:
        raise ConfigError(f"{files.where} holds {number} heads, expected 1 to {MOST_HEADS}")


def check_shape(files: TensorFiles, name: str, *expected: tuple[int, ...]) -> None:
    """Refuse a tensor that has none of the ``expected`` shapes."""
    if (shape := files.shape(name)) not in expected:
        wanted = " or ".join(str(list(each)) for each in expected)
        raise ConfigError(
            f"{files.where}: {name} has shape {list(shape)}, the base model's sizes ask for"
            f" {wanted}"
        )


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
