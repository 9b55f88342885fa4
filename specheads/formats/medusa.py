"""Base model and Medusa heads in one Hugging Face folder, as the medusa-1.0 checkpoints are.

The base's own files, with any adapter merged, and ``medusa_head.{h}.*`` among its tensors in the
names of version 1 (see :mod:`specheads.formats.medusa`); its config has the number of heads
and layers. Whatever loads the base alone loads this too, and passes over the heads.

Which tensors of a foreign file belong to which head: told by their names, not by its config.

Configs of published checkpoints are known to lie (two heads where the file holds five, layers
that are one layer under several names), so that everything is counted. A name that no layout knows
is refused: skipped, it would be heads that guess nothing right.

Medusa heads of foreign files as ours: the same logits, or one line that says why not.

Medusa heads as every foreign format knows them: residual blocks and an output matrix, no more.

Shapes: K heads, L blocks each, d hidden size, V vocabulary, V' the tokens that a head can guess.

Medusa heads as the original repository and TGI read them: ``medusa_lm_head.safetensors``.

Version 1 (the paper, axolotl, all published weights, TensorRT-LLM's converter): per head the blocks
``{h}.{l}.linear.weight|bias`` and a matrix of its own, ``{h}.{L}.weight``. Version 2 (April 2024):
blocks alone, the base's output matrix makes the logits. ``config.json`` has no ``architectures``:
TGI takes a folder with one for no speculator at all. The number of heads is there in the two
spellings that readers look for.

Medusa heads for vLLM 0.28 to 0.32: a folder that its ``{"method": "medusa"}`` loads.

Read from vLLM's ``models/medusa.py`` and its config class. It drafts one chain: every head's best
guess, no tree. vLLM 0.33 removed the method. Tensors: ``blocks.{h}.layers.{l}.weight|bias``, and
``lm_heads.{h}.weight``, or one ``lm_head.weight`` for all heads (``original_lm_head``), a copy of
the base's. It skips tensors of other names without a word, and drops biases unless the config has
``medusa_fc_bias``.
"""

from __future__ import annotations

import copy
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads.config import ConfigError
from specheads.models.checkpoint import save_as
from specheads.models.compress import output_matrix
from specheads.models.heads import MedusaHeads
from specheads.models.manifest import TensorFiles, write_json
from specheads.models.output import OutputLayer
from specheads.system.files import tinycode_dir

MOST_HEADS, MOST_LAYERS = 256, 64  # of native exports, see models/export_config.py
_PREFIXES = ("module.", "medusa_heads.", "medusa_head.", "model.medusa_head.")
_ORIGINAL = re.compile(r"(\d{1,3})\.(\d{1,3})\.(linear\.weight|linear\.bias|weight)")
_VLLM = re.compile(r"blocks\.(\d{1,3})\.layers\.(\d{1,3})\.(weight|bias)")
_VLLM_MATRIX = re.compile(r"lm_heads\.(\d{1,3})\.weight")


@dataclass
class Layout:
    """Names of tensors in their files.

    Attributes:
        blocks: per head, per block, the names of weight and bias; no bias is zero.
        matrices: per head the name of its output matrix; empty where they use the base's.
        token_map: name of the ids that the rows of the matrices stand for, if they are fewer.
        notes: what the user has to know, in lines.
    """

    blocks: list[list[tuple[str, str | None]]]
    matrices: list[str]
    token_map: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def num_layers(self) -> int:
        """Blocks per head."""
        return len(self.blocks[0])

    def names(self) -> set[str]:
        """Return all names."""
        pairs = [name for head in self.blocks for pair in head for name in pair]
        return {name for name in (*pairs, *self.matrices, self.token_map) if name is not None}


def layout_of(files: TensorFiles, config: dict[str, Any]) -> Layout:
    """Find the heads among the tensors of ``files``.

    Args:
        files: of Medusa heads alone.
        config: the config.json beside them; empty where there is none.

    Raises:
        ConfigError: with the first name that is unknown, or missing.
    """
    blocks: dict[tuple[int, int], dict[str, str]] = {}
    matrices: dict[int, tuple[int, str]] = {}
    token_map = common = None
    for name in sorted(files.header):
        plain = _without_prefix(name)
        if found := _ORIGINAL.fullmatch(plain):
            head, place, part = int(found[1]), int(found[2]), found[3]
            if part == "weight":
                _once(files, matrices, head, (place, name))
            else:
                _once(files, blocks.setdefault((head, place), {}), part.split(".")[1], name)
        elif found := _VLLM.fullmatch(plain):
            _once(files, blocks.setdefault((int(found[1]), int(found[2])), {}), found[3], name)
        elif found := _VLLM_MATRIX.fullmatch(plain):
            _once(files, matrices, int(found[1]), (-1, name))
        elif plain == "lm_head.weight":
            common = name
        elif plain == "token_map":
            token_map = name
        else:
            raise ConfigError(f"{files.where}: {name:.120} is no tensor of Medusa heads")
    number = 1 + max((*matrices, *(head for head, _ in blocks)), default=-1)
    if not 1 <= number <= MOST_HEADS:
        raise ConfigError(f"{files.where} holds {number} heads, expected 1 to {MOST_HEADS}")
    notes = list(files.notes)
    layers = [
        _blocks_of(files.where, head, blocks, matrices.get(head, (None, ""))[0], notes)
        for head in range(number)
    ]
    if len(counts := {len(each) for each in layers}) > 1:
        raise ConfigError(
            f"{files.where}: its heads have {min(counts)} to {max(counts)} layers, expected the"
            " same number in all"
        )
    names = _matrices(files.where, number, matrices, common, config)
    _say_lies(config, number, len(layers[0]), notes)
    return Layout(layers, names, token_map, notes)


def _without_prefix(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _once(files: TensorFiles, found: dict[Any, Any], key: Any, value: Any) -> None:
    if key in found:
        raise ConfigError(f"{files.where} holds the same tensor under two names: {value}")
    found[key] = value


def _blocks_of(
    where: Path,
    head: int,
    blocks: dict[tuple[int, int], dict[str, str]],
    end: int | None,
    notes: list[str],
) -> list[tuple[str, str | None]]:
    """Return the names of one head's blocks.

    Args:
        where: the file, for messages.
        head: which.
        blocks: names by head and layer.
        end: the place of its output matrix behind its blocks; None or -1 where that says nothing.
        notes: a line is added where one block stands for several.
    """
    own = {layer: names for (owner, layer), names in blocks.items() if owner == head}
    number = end if end is not None and end >= 0 else 1 + max(own, default=-1)
    if number > MOST_LAYERS:
        raise ConfigError(f"{where}: head {head} has {number} layers, at most {MOST_LAYERS} can be")
    if len(own) == 1 and number > 1:
        # `[block] * n` is one module under n names; savers that drop shared tensors leave one
        [only] = own.values()
        own = dict.fromkeys(range(number), only)
        line = f"one block stands for the {number} layers of a head, as it was trained"
        if line not in notes:
            notes.append(line)
    for layer in range(number):
        if layer not in own or "weight" not in own[layer]:
            raise ConfigError(f"{where} lacks the weight of layer {layer} of head {head}")
    if extra := sorted(set(own) - set(range(number))):
        raise ConfigError(f"{where}: layer {extra[0]} of head {head} stands behind its matrix")
    return [(own[layer]["weight"], own[layer].get("bias")) for layer in range(number)]


def _matrices(
    where: Path,
    number: int,
    matrices: dict[int, tuple[int, str]],
    common: str | None,
    config: dict[str, Any],
) -> list[str]:
    if common is not None and matrices:
        raise ConfigError(f"{where} holds lm_head.weight and {matrices[min(matrices)][1]}")
    if common is not None:
        return [common] * number
    if not matrices:
        return []
    if config.get("original_lm_head") and set(matrices) == {0}:
        return [matrices[0][1]] * number
    if missing := sorted(set(range(number)) - matrices.keys()):
        raise ConfigError(f"{where} lacks the output matrix of head {missing[0]}")
    return [matrices[head][1] for head in range(number)]


def _say_lies(config: dict[str, Any], heads: int, layers: int, notes: list[str]) -> None:
    claims = {
        "heads": ("medusa_num_heads", "num_medusa_heads", "num_heads", heads),
        "layers": ("medusa_num_layers", "num_medusa_layers", "num_hidden_layers", layers),
    }
    medusa = config.get("model_type") == "medusa"  # elsewhere num_hidden_layers is the base's
    for what, (*keys, counted) in claims.items():
        for key in keys if medusa else keys[:2]:
            if key in config and config[key] != counted:
                notes.append(
                    f"config.json says {key}={config[key]!r:.40}, the tensors are of {counted}"
                    f" {what}: those are taken"
                )
                break


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
    readable = {
        "medusa": None,
        "hydra": "are Hydra heads, which read the tokens drafted before their own",
    }
    if (kind := info["kind"]) not in readable:
        other = {"mtp": "; format=mtp_standard holds those"}.get(kind, "")
        raise ConfigError(f"format={form} is for Medusa heads, {checkpoint} is {kind}{other}")
    problem = readable[kind]
    if problem is None and info.get("correction", "none") != "none":
        problem = "correct their logits by the token drafted before (markov_rank)"
    elif problem is None and info.get("prefix_layer"):
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


HEADS_FILE = "medusa_lm_head.safetensors"


def check_v1(form: str, checkpoint: str | Path, info: dict[str, Any]) -> None:
    """Refuse what a matrix for all tokens cannot hold, from config.json alone.

    Raises:
        ConfigError: for pruned heads.
    """
    if info["lm_head"] == "pruned" and info["num_kept"] < info["vocab_size"]:
        raise ConfigError(
            f"format={form} has output matrices for all tokens; those of {checkpoint} are pruned to"
            f" {info['num_kept']} of {info['vocab_size']}, which vllm_medusa can hold"
        )


def check_v2(checkpoint: str | Path, info: dict[str, Any]) -> None:
    """Refuse heads with matrices of their own, from config.json alone.

    Raises:
        ConfigError: unless they share the base's.
    """
    if info["lm_head"] != "shared":
        raise ConfigError(
            "format=fasterdecoding_v2 holds heads that share the base's output matrix; those of"
            f" {checkpoint} have their own (lm_head={info['lm_head']}): use fasterdecoding_v1"
        )


def write_v1(
    folder: Path,
    heads: MedusaHeads,
    output: OutputLayer,
    dtype: torch.dtype | None,
    *,
    base: str,
) -> list[str]:
    """Write heads with a matrix each into ``folder``; a shared one is copied for every head.

    Args:
        folder: an empty one.
        heads: parallel ones for the whole vocabulary.
        output: the base's output layer; a factor on its logits goes into the matrices.
        dtype: of the tensors; None keeps each as it is.
        base: name or folder of the base model.

    Returns:
        What the user has to know, in lines.

    Raises:
        ConfigError: if the base's output layer has a bias.
    """
    notes = ["for TGI, TensorRT-LLM's old converter, and the original repository"]
    notes += check_output("fasterdecoding_v1", output)
    if heads.lm_head == "shared":
        copies = heads.num_heads * output.weight.numel()
        notes.append(
            f"the base's output matrix was copied for each of {heads.num_heads} heads,"
            f" {copies:,} numbers; fasterdecoding_v2 needs none"
        )
    _write(folder, named_v1(heads, output), _config(heads, base), dtype)
    return notes


def write_v2(
    folder: Path, heads: MedusaHeads, dtype: torch.dtype | None, *, base: str
) -> list[str]:
    """Write heads that share the base's output matrix into ``folder``; as :func:`write_v1`."""
    tensors = _blocks(heads)
    _write(folder, tensors, {**_config(heads, base), "version": "2"}, dtype)
    notes = ["for TGI, which computes the heads' logits by the base model's output matrix"]
    if heads.num_layers > 1:
        notes.append(f"TGI reads such heads with one block each, these have {heads.num_layers}")
    return notes


def named_v1(heads: MedusaHeads, output: OutputLayer) -> dict[str, Tensor]:
    """Return the tensors of heads with a matrix each, by the names that version 1 gives them."""
    tensors = _blocks(heads)
    for i, head in enumerate(parallel_heads(heads)):
        tensors[f"{i}.{heads.num_layers}.weight"] = own_matrix(head, output, output.scale)
    return tensors


def counts(heads: MedusaHeads) -> dict[str, int]:
    """Return the numbers of heads and layers in all the spellings that readers look for."""
    return {
        "medusa_num_heads": heads.num_heads,
        "num_medusa_heads": heads.num_heads,
        "medusa_num_layers": heads.num_layers,
        "num_medusa_layers": heads.num_layers,
    }


def _blocks(heads: MedusaHeads) -> dict[str, Tensor]:
    tensors = {}
    for i, head in enumerate(parallel_heads(heads)):
        for j, (weight, bias) in enumerate(head.blocks):
            tensors[f"{i}.{j}.linear.weight"] = weight
            tensors[f"{i}.{j}.linear.bias"] = bias
    return tensors


def _config(heads: MedusaHeads, base: str) -> dict[str, Any]:
    return {"base_model_name_or_path": base, **counts(heads)}


def _write(
    folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], dtype: torch.dtype | None
) -> None:
    save_file(stored(tensors, dtype), folder / HEADS_FILE, metadata={"format": "pt"})
    write_json(folder / "config.json", config)


PREFIX = "medusa_head."


def write_merged(
    folder: Path,
    base: PreTrainedModel,
    heads: MedusaHeads,
    output: OutputLayer,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype | None,
) -> list[str]:
    """Write base, heads and tokenizer into ``folder``.

    Args:
        folder: an empty one.
        base: the model; an adapter is merged and a quantised base dequantised in what is written.
        heads: parallel ones for the whole vocabulary.
        output: the base's output layer; a factor on its logits goes into the heads' matrices.
        tokenizer: written beside them.
        dtype: of all tensors; None takes the base's.

    Returns:
        What the user has to know, in lines.

    Raises:
        ConfigError: if the base's output layer has a bias, or its quantisation cannot be undone.
    """
    notes = check_output("merged", output)
    config = copy.deepcopy(base.config)
    vars(config).pop("quantization_config", None)
    for key, value in counts(heads).items():
        setattr(config, key, value)
    extra = {PREFIX + name: tensor for name, tensor in named_v1(heads, output).items()}
    save_as(folder, type(base), config, base, extra, tokenizer, dtype)
    return ["base and heads in one folder; what loads the base alone passes over the heads", *notes]


VERSIONS = "0.28 to 0.32"
_COUNTS = ("num_heads", "num_hidden_layers")


def write_vllm_medusa(
    folder: Path, heads: MedusaHeads, output: OutputLayer, dtype: torch.dtype | None
) -> list[str]:
    """Write config and tensors into ``folder``.

    Args:
        folder: an empty one.
        heads: parallel ones.
        output: the base's output layer.
        dtype: of the tensors; None keeps each as it is.

    Returns:
        What the user has to know, in lines.

    Raises:
        ConfigError: if the base's output layer has a bias.
    """
    notes = check_output("vllm_medusa", output)
    shared, pruned = heads.lm_head == "shared", heads.num_outputs < heads.vocab_size
    config: dict[str, Any] = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": heads.hidden_size,
        "vocab_size": heads.vocab_size,
        "truncated_vocab_size": heads.num_outputs,
        "num_heads": heads.num_heads,
        # a model of no layers is nothing that engines are made for: one of zeros changes nothing
        "num_hidden_layers": max(heads.num_layers, 1),
        "medusa_fc_bias": True,
        "original_lm_head": shared,
    }
    if output.scale != 1.0:
        config["logit_scale"] = output.scale
    check_keys(config)
    tensors: dict[str, Tensor] = {}
    for i, head in enumerate(parallel_heads(heads)):
        for j, (weight, bias) in enumerate(head.blocks or [_nothing(heads)]):
            tensors[f"blocks.{i}.layers.{j}.weight"] = weight
            tensors[f"blocks.{i}.layers.{j}.bias"] = bias
        if not shared:
            tensors[f"lm_heads.{i}.weight"] = own_matrix(head, output, 1.0)
    if shared:
        tensors["lm_head.weight"] = output.weight
    if pruned:
        assert heads.token_map is not None
        tensors["token_map"] = heads.token_map
    save_file(stored(tensors, dtype), folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config)
    return [
        f"for vLLM {VERSIONS} alone: 0.33 removed the method; it drafts a chain of the heads' best"
        f" guesses, num_speculative_tokens={heads.num_heads} or fewer, no tree",
        *notes,
    ]


def check_keys(config: dict[str, Any]) -> None:
    """Refuse keys that vLLM would take for another: it renames whatever sounds like a count.

    A key that holds ``num`` and ``heads`` becomes ``num_heads``, one with ``num`` and ``layers``
    becomes ``num_hidden_layers``, so that ``num_attention_heads`` would be the number of heads.

    Raises:
        ValueError: with the first such key.
    """
    for key in config:
        counts = "num" in key and ("heads" in key or "layers" in key)
        if counts and key not in _COUNTS:
            raise ValueError(f"vLLM would take the key {key!r} for the number of heads or layers")


def _nothing(heads: MedusaHeads) -> tuple[Tensor, Tensor]:
    size = heads.hidden_size
    dtype = next(heads.parameters()).dtype
    return torch.zeros(size, size, dtype=dtype), torch.zeros(size, dtype=dtype)
