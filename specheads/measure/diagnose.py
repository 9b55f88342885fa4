"""Find out on the actual model what decoding can promise; ``python -m specheads.doctor`` prints it.

Every finding is measured where it can be: trees against ordinary forward passes over each path,
rows of a batch against the same rows alone, decoded tokens against plain decoding's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads.attention.cache import TreeCache, TreeLayer
from specheads.attention.tree import Tree, default_tree
from specheads.config import ConfigError
from specheads.decoding.choose import EXACT_DTYPES
from specheads.decoding.loop import decode, plain_decode
from specheads.drafters.lookup import NgramDrafter
from specheads.models import base as bases
from specheads.models.forward import ModelPass, thresholds
from specheads.models.manifest import first_line
from specheads.models.output import output_layer
from specheads.models.support import cache_layers, compare, size_of, tree_support
from specheads.verification.sampling import ROUNDING

TREES = {
    "chain": Tree.chain(6),
    "wide": Tree.from_choices([*((i,) for i in range(12)), (0, 0), (11, 0)]),
    "bushy": default_tree(4, 24),
}
PROMPT_LENGTHS = (5, 64)
LONGEST_WINDOW = 2048  # a longer one takes a prompt that few machines read in passing


@dataclass(frozen=True)
class Finding:
    """One line of the report; not ``ok`` where decoding could not be trusted."""

    name: str
    text: str
    ok: bool = True


def examine(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[Finding]:
    """Yield what is found, the verdict last.

    Args:
        model: in eval mode.
        tokenizer: the one that comes with it, if there is one.
    """
    yield _what(model)
    yield _where(model)
    context = bases.context_length(model)
    yield Finding("context", f"{context:,} tokens" if context else "its config names no limit")
    yield _tokenizer(model, tokenizer)
    yield _output(model)
    try:
        support = tree_support(model)
    except ValueError as error:
        yield Finding("verdict", f"refused: {error}", ok=False)
        return
    yield _cache(model)
    yield Finding("self-test", f"{support.kind}, {_error(support.error, support.limit)}")
    if support.rounding > ROUNDING:
        text = (
            f"{support.rounding:.1e} of the largest logit, more than {ROUNDING:.0e}: closer tokens"
            " are decided by a plain replay, but plain decoding's very tokens are not promised"
        )
        yield Finding("rounding", text)
    if (found := thresholds(model)).name:
        text = f"{found.name}: one row at a time may cross it; rows of a batch lie on one side"
        yield Finding("threshold", text)
    lengths, window = _prompt_lengths(model)
    checks = {
        name: partial(_tree, model, name, lengths, chain_only=support.kind == "chain")
        for name in (TREES if support.kind == "tree" else ("chain",))
    }
    if support.kind == "tree":
        checks["batch"] = partial(_rows, model)
    checks["tokens"] = partial(_tokens, model)
    wrong = []
    for name, check in checks.items():
        ok, text = _run(check)
        wrong += [] if ok else [name]
        yield Finding(name, text, ok)
    if window is not None:
        reached = window < lengths[-1]
        how = "measured beyond it" if reached else "not reached; its mask rule was seen"
        yield Finding("window", f"{window:,} tokens, {how}")
    if wrong:
        text = f"{support.kind} by the self-test, but {', '.join(wrong)} above contradict it"
        yield Finding("verdict", text, ok=False)
    elif support.kind == "tree":
        yield Finding("verdict", "tree: decodes trees and batches with the base's own output")
    else:
        yield Finding("verdict", f"chain only, 1 row at a time: {support.reason}")


def _run(check: Callable[[], tuple[bool, str]]) -> tuple[bool, str]:
    try:
        return check()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model or its kernels may raise
        return False, f"cannot be run: {first_line(error)}"


def _what(model: PreTrainedModel) -> Finding:
    config = model.config.get_text_config()
    count = sum(parameter.numel() for parameter in model.parameters())
    return Finding("model", f"{type(model).__name__} ({config.model_type}), {count:,} parameters")


def _where(model: PreTrainedModel) -> Finding:
    first, last = bases.input_device(model), bases.output_device(model)
    spread = getattr(model, "hf_device_map", None)
    place = str(first)
    if spread and len(places := dict.fromkeys(map(str, spread.values()))) > 1:
        place = f"{', '.join(places)} (token ids on {first}, heads on {last})"
    dtype = str(model.dtype).removeprefix("torch.")
    attention = model.config.get_text_config()._attn_implementation
    return Finding("loaded", f"{dtype}, on {place}, {attention} attention")


def _tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Finding:
    if tokenizer is None:
        return Finding("tokenizer", "none comes with the model; token ids can be decoded")
    try:
        bases.check_tokenizer(tokenizer, model)
    except ConfigError as error:
        return Finding("tokenizer", str(error), ok=False)
    ends, num_rows = bases.end_tokens(model, tokenizer), bases.input_embedding(model).shape[0]
    if outside := [token for token in ends if not 0 <= token < num_rows]:
        text = f"ends texts with {outside}, but there are {num_rows} embeddings"
        return Finding("tokenizer", text, ok=False)
    names = ", ".join(f"{token} {tokenizer.convert_ids_to_tokens(token)!r}" for token in ends)
    end = f"texts end at {names}" if ends else "no end token: texts end at the token limit only"
    return Finding("tokenizer", f"{len(tokenizer):,} ids for {num_rows:,} embeddings; {end}")


def _output(model: PreTrainedModel) -> Finding:
    try:
        layer = output_layer(model)
    except ConfigError as error:
        return Finding("output", str(error), ok=False)
    rows, columns = layer.weight.shape
    extras = [
        "with bias" if layer.bias is not None else "",
        f"scale {layer.scale:g}" if layer.scale != 1 else "",
        f"softcap {layer.softcap:g}" if layer.softcap else "",
    ]
    text = ", ".join(filter(None, [f"{columns:,} to {rows:,}", *extras]))
    return Finding("output", f"{text}; it explains the logits")


@torch.no_grad()
def _cache(model: PreTrainedModel) -> Finding:
    cache = TreeCache()
    ModelPass(model, cache, chain_only=True).read(_random_ids(model, 1, 4), [4])
    layers = [layer for layer in cache.layers if isinstance(layer, TreeLayer)]
    buffers = [t for x in layers for t in (x.keys, x.values) if t is not None]
    num_bytes = sum(t.shape[1] * t.shape[3] * t.element_size() for t in buffers)
    config = model.config.get_text_config()
    key_heads = buffers[0].shape[1] if buffers else 0
    query_heads = getattr(config, "num_attention_heads", key_heads)
    text = f"{num_bytes:,} bytes per token and row in {len(buffers) // 2} layers"
    if query_heads > key_heads > 0:
        whole = config._attn_implementation == "sdpa"
        how = "without expanding it" if whole else "expanded in every step; attn=sdpa would not"
        text += f"; {query_heads} query heads share {key_heads}, {how}"
    return Finding("cache", text)


def _prompt_lengths(model: PreTrainedModel) -> tuple[list[int], int | None]:
    """Return lengths of prompts to try, beyond the window where that is feasible; the window."""
    largest = max(tree.num_nodes for tree in TREES.values())
    longest = (bases.context_length(model) or 1 << 30) - largest - 2
    lengths, window = [length for length in PROMPT_LENGTHS if length <= longest], _window(model)
    if window is not None and window <= min(LONGEST_WINDOW, longest - 8):
        lengths = sorted({*lengths, window + 8})
    return lengths, window


def _tree(
    model: PreTrainedModel, name: str, lengths: list[int], *, chain_only: bool
) -> tuple[bool, str]:
    """Compare a verify step over one of TREES with a forward pass over each path."""
    tree, ok, parts = TREES[name], True, []
    for length in lengths:
        found = compare(model, tree, length, chain_only=chain_only)
        parts.append(f"{_error(found.error, found.limit)} behind {length} tokens")
        ok = ok and found.passes
    return ok, f"{tree.num_nodes} nodes: {'; '.join(parts)}"


def _window(model: PreTrainedModel) -> int | None:
    """Return the widest sliding window or chunk, None where all layers see everything."""
    windows = (getattr(layer, "sliding_window", None) for layer in cache_layers(model))
    return max(filter(None, windows), default=None)


@torch.no_grad()
def _rows(model: PreTrainedModel) -> tuple[bool, str]:
    """Compare a verify step over rows of different lengths with each row's own."""
    tree, lengths = TREES["bushy"], [3, 17, 9]
    prompts = _random_ids(model, len(lengths), max(lengths))
    nodes = _random_ids(model, len(lengths), tree.num_nodes, seed=1)

    def verify(rows: slice) -> Tensor:
        base = ModelPass(model, TreeCache())
        counts = lengths[rows]
        base.read(prompts[rows, : max(counts)], counts)
        return base.verify(nodes[rows], tree).float()

    together = verify(slice(None))
    alone = torch.cat([verify(slice(row, row + 1)) for row in range(len(lengths))])
    error, limit = size_of(together - alone, model), tree_support(model).limit
    text = f"{len(lengths)} rows of different lengths against each alone: {_error(error, limit)}"
    return error <= limit, text


def _tokens(model: PreTrainedModel) -> tuple[bool, str]:
    """Compare decoded tokens with plain decoding's."""
    room = bases.context_length(model) or 1 << 30
    half = _random_ids(model, 1, max(1, min(16, room // 4)))
    ids, limit = torch.cat([half, half], dim=1), min(32, room - 2 * half.shape[1])
    plain = plain_decode(model, ids, max_new_tokens=limit).new_tokens
    ours = decode(model, NgramDrafter(), ids, max_new_tokens=limit).new_tokens
    same = next((i for i in range(limit) if plain[i] != ours[i]), limit)
    text = f"{same} of {limit} tokens as plain decoding's, guessed by prompt lookup"
    if same < limit and model.dtype not in EXACT_DTYPES:
        return True, f"{text}; two equally good ones differ by rounding in this dtype"
    return same == limit, text


def _random_ids(model: PreTrainedModel, num_rows: int, num_tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    num_ids = bases.input_embedding(model).shape[0]
    ids = torch.randint(num_ids, (num_rows, num_tokens), generator=generator)
    return ids.to(bases.input_device(model))


def _error(error: float, limit: float) -> str:
    return f"error {error:.1e} (limit {limit:.1e})"
