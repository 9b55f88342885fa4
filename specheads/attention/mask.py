"""Tree attention in unmodified transformers models, through the public mask interface.

Every model of transformers 5 builds its masks by calling a registered function with an index-based
rule (causal, sliding window, chunked). We register wrappers: while a tree is active, the indices of
tree slots are translated to logical positions (prefix + depth) before the rule sees them, and the
result is ANDed with the ancestor matrix. So windows and chunks are measured in positions and not in
slots, with no code per model. A ready-made 4-D mask would be silently wrong on sliding-window
models and under eager attention.

:func:`grouped_attention` spares a copy of the cache for every query head: transformers' sdpa
attention expands keys and values to all query heads (``repeat_kv``) whenever a mask is given, in
every layer and step: with 16 query and 2 key heads, eight times the memory traffic of what it
reads. Here the query heads of a group are laid one behind the other along the query length, and
share the mask's rows: kernels with masks have no grouped mode (``enable_gqa``) on a GPU, and the
one on a CPU takes up to five times as long for a query per row.

:func:`attend_invariant` gives a token the same bits whatever else is in its pass. The kernels do
not: a node's key lies in another slot than plain decoding would give it, so that sums over keys are
formed in another order, and bfloat16 keeps too few bits to hide it. :func:`attend_in_blocks` does
as much for rows of plain decoding in batches, at a lower price.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specheads.attention.cache import RowEnds, TreeCache
from specheads.attention.tree import RowTrees, Tree, batched

SUPPORTED_ATTENTION = ("sdpa", "eager", "flex_attention")

# takes the rules that forward passes ask masks for, where somebody wants to know them
_heard: ContextVar[list[Callable[..., Tensor]] | None] = ContextVar("specheads_rules", default=None)
# what the forward pass at hand runs over: its tree, None for tokens one after the other, and where
# each row of the cache ends and the tokens begin
_active: ContextVar[tuple[Tree | RowTrees | None, RowEnds] | None] = ContextVar(
    "specheads_tree", default=None
)


@contextlib.contextmanager
def held(variable: ContextVar[Any], value: object) -> Iterator[None]:
    """While open, a variable of the context has a value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def tree_attention(
    tree: Tree | RowTrees | None, cache: TreeCache
) -> contextlib.AbstractContextManager[None]:
    """While open, a forward pass with ``cache`` attends along the tree behind each row's end.

    The pass must be given ``position_ids = length of the row + tree.depths``: transformers does not
    notice when they are missing. Without a tree the tokens follow one another, which needs this
    context where rows of the cache differ in length.
    """
    _install()
    return held(_active, (tree, cache.rows))


def hearing(rules: list[Callable[..., Tensor]]) -> contextlib.AbstractContextManager[None]:
    """While open, the rules that forward passes ask masks for are added to ``rules``."""
    _install()
    return held(_heard, rules)


@lru_cache(maxsize=1)
def _install() -> None:
    """Register the wrappers once; without an active tree they only pass through."""
    for name in SUPPORTED_ATTENTION:
        stock = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[name]
        masking_utils.AttentionMaskInterface.register(name, _tree_aware(stock, name))


def _tree_aware(make_mask: Callable[..., Any], name: str) -> Callable[..., Any]:
    def make_tree_mask(*args: Any, **kwargs: Any) -> Any:
        active, heard = _active.get(), _heard.get()
        if heard is not None:
            heard.append(kwargs["mask_function"])
        if active is None:
            return make_mask(*args, **kwargs)
        (tree, rows), num_tokens = active, kwargs["q_length"]
        if tree is not None and num_tokens != tree.num_nodes:
            raise ValueError(
                f"the active tree has {tree.num_nodes} nodes, the forward pass {num_tokens} tokens"
            )
        rule, device = kwargs["mask_function"], torch.device(kwargs["device"])
        plain = rule is masking_utils.causal_mask_function and kwargs.get("attention_mask") is None
        if plain and name != "flex_attention":
            exact = kwargs["kv_length"] == rows.longest + num_tokens
            if exact and isinstance(tree, Tree) and rows.uniform:
                return causal_tree_mask(tree, rows.longest, kwargs["dtype"], device)
            return ragged_mask(tree, rows.on(device), kwargs)
        start = rows.longest if rows.uniform else rows.on(device)
        kwargs["mask_function"] = _along_tree(rule, tree, start, num_tokens, kwargs)
        kwargs["allow_is_causal_skip"] = False
        return make_mask(*args, **kwargs)

    return make_tree_mask


def _along_tree(
    rule: Callable[..., Tensor],
    tree: Tree | RowTrees | None,
    start: int | Tensor,
    num_tokens: int,
    sizes: dict[str, Any],
) -> Callable[..., Tensor]:
    """Wrap ``rule``, which knows positions, so that it can be asked about slots."""
    last, q_offset, device = num_tokens - 1, sizes["q_offset"], sizes["device"]
    if tree is None:
        depths = torch.arange(num_tokens, device=device)[None]
        tree_mask = None
    else:
        depths = batched(tree, tree.depths).to(device)
        tree_mask = batched(tree, tree.tree_mask).to(device)
    shared = depths.shape[0] == 1

    def rule_along_tree(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        first = start if isinstance(start, int) else start[b]
        row = b * 0 if shared else b
        q_node = (q - q_offset).clamp(0, last)
        k_node = (k - first).clamp(0, last)
        behind = k >= first
        q_position = first + depths[row, q_node]
        k_position = torch.where(behind, first + depths[row, k_node], k)
        above = k_node <= q_node if tree_mask is None else tree_mask[row, q_node, k_node]
        live = k <= first + last  # other rows and static caches reach further
        return rule(b, h, q_position, k_position) & live & (~behind | above)

    return rule_along_tree


def causal_tree_mask(
    tree: Tree, num_cached: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the additive mask [1, 1, N, num_cached + N] of a tree under plain causal attention.

    It is the end of one prepared buffer ``[0 ... 0 | tree]``, so that a step builds nothing; and it
    is additive because attention would otherwise convert a bool mask anew in every layer.
    """
    width = -(-num_cached // 1024) * 1024
    mask = _mask_buffer(tree, width, dtype, device)[..., width - num_cached :]
    # GPU kernels want aligned rows
    return mask if device.type == "cpu" else mask.contiguous()


@lru_cache(maxsize=64)
def _mask_buffer(tree: Tree, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    num_nodes = tree.num_nodes
    mask = torch.zeros(1, 1, num_nodes, width + num_nodes, dtype=dtype)
    mask[..., width:].masked_fill_(~tree.tree_mask.cpu(), torch.finfo(dtype).min)
    return mask.to(device)


def ragged_mask(tree: Tree | RowTrees | None, starts: Tensor, sizes: dict[str, Any]) -> Tensor:
    """Return the additive mask [B, 1, T, S] under plain causal attention, rows ending apart.

    Args:
        tree: of the T tokens; None where they follow one another.
        starts: [B], the slot of each row's first new token.
        sizes: ``q_length`` T, ``kv_length`` S, and ``dtype``, as transformers gives them.
    """
    num_tokens, dtype = sizes["q_length"], sizes["dtype"]
    slots = torch.arange(sizes["kv_length"], device=starts.device)
    node = slots - starts[:, None]  # [B, S]; negative: cached
    floor = torch.finfo(dtype).min
    if tree is None:
        unseen = node[:, None] > torch.arange(num_tokens, device=starts.device)[:, None]
        return unseen.new_zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, floor)[:, None]
    # a column for what is cached before the tree's own, and one for what is nobody's after them
    hidden = ~batched(tree, tree.tree_mask).to(starts.device)
    table = torch.zeros(*hidden.shape[:2], num_tokens + 2, dtype=dtype, device=starts.device)
    table[..., 1:-1].masked_fill_(hidden, floor)
    table[..., -1] = floor
    column = (node + 1).clamp_(0, num_tokens + 1)
    shape = (len(starts), num_tokens, slots.shape[0])
    return table.expand(shape[0], -1, -1).gather(2, column[:, None].expand(shape))[:, None]


_ALIGNMENT = 8  # elements: GPU kernels copy a mask whose rows start elsewhere

# of the forward pass at hand: a mask and the same laid out for groups, by the mask's id and groups
_Folded = dict[tuple[int, int], tuple[Tensor, Tensor]]
_traced = False  # a plain global: what torch.compile traces cannot ask a ContextVar


@contextlib.contextmanager
def grouped_attention_traced() -> Iterator[None]:
    """While open, passes traced by torch.compile do not expand their cache either."""
    global _traced
    _install_grouped()
    before, _traced = _traced, True
    try:
        yield
    finally:
        _traced = before


KEY_BLOCK = 128  # keys of a call where prompts and rows of plain decoding are read in blocks
# Positions whose keys a guess is shown in their own places: as few as may be, as they are copied
# for each, but the blocks of all positions before them are weighed one by one
_INVARIANT_BLOCK = 32


class _Layout(NamedTuple):
    """Where a pass finds the keys of positions, see :func:`attend_invariant`.

    Attributes:
        whole: per row the blocks of positions that lie before its end.
        slots: per row [N * M * 32], for each of the N tokens those of the M blocks behind them.
        mask: per row [N * M, 1, 1, 32], additive: what a token does not see.
    """

    whole: list[int]
    slots: Tensor
    mask: Tensor


class _Pass(NamedTuple):
    """How the forward pass at hand attends; see :func:`grouped_attention`."""

    folded: _Folded
    in_blocks: bool = False
    layout: _Layout | None = None


_pass: ContextVar[_Pass | None] = ContextVar("specheads_pass", default=None)


def grouped_attention(
    *, in_blocks: bool = False, layout: _Layout | None = None
) -> contextlib.AbstractContextManager[None]:
    """While open, models with sdpa attention do not expand their cache; open it around one pass.

    Args:
        in_blocks: rows that show ``KEY_BLOCK`` slots, or twice as many, round alike.
        layout: tokens round as if each of them were read alone, see :func:`invariant_layout`.
    """
    _install_grouped()
    return held(_pass, _Pass({}, in_blocks, layout))


def invariant_layout(tree: Tree | RowTrees, lengths: Sequence[int], dtype: torch.dtype) -> _Layout:
    """Return where the keys are that :func:`attend_invariant` shows the nodes of a tree.

    Args:
        tree: of the pass.
        lengths: per row the tokens in the cache, behind which the tree lies.
        dtype: of the mask.
    """
    size, ends = _INVARIANT_BLOCK, torch.tensor(lengths)
    whole = ends // size
    num_blocks = int((ends % size).max() + tree.max_depth) // size + 1
    ahead = torch.arange(num_blocks * size) - (ends % size)[:, None]  # of each row's end, [B, T]
    ancestors = batched(tree, tree.ancestors).expand(len(lengths), -1, -1)
    depth = ahead.clamp(0, tree.max_depth)[:, None].expand(-1, tree.num_nodes, -1)
    above = ancestors.gather(2, depth).clamp(min=0)
    slots = ends[:, None, None] + torch.where(ahead[:, None] < 0, ahead[:, None], above)
    hidden = ahead[:, None] > batched(tree, tree.depths)[..., None]
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)
    return _Layout(whole.tolist(), slots.flatten(1), mask.view(len(lengths), -1, 1, 1, size))


def attend_invariant(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, layout: _Layout
) -> Tensor:
    """Attend on a CPU so that a token's bits depend on the tokens before it alone.

    Neither other rows and tokens nor the slots of keys play a part. The kernel of
    ``scaled_dot_product_attention`` sums over the keys of a call in the order of their slots; here
    each call is over the 32 keys of a block of positions. All tokens of a row share the blocks that
    lie before its end. Of those behind, every token is given its own copy, its ancestors in the
    places of their positions. Blocks are weighed in float64, where the order does not show.

    Args:
        query: [B, H * G, N, d].
        key: [B, H, L, d].
        value: [B, H, L, d].
        scale: None is 1 / sqrt(d).
        layout: of the pass.

    Returns:
        [B, N, H * G, d].
    """
    size, num_heads, num_tokens = _INVARIANT_BLOCK, key.shape[1], query.shape[2]
    by_token = query.unflatten(1, (num_heads, -1)).permute(0, 3, 1, 2, 4)  # [B, N, H, G, d]
    outputs = []
    for asked, keys, values, num_whole, slots, mask in zip(
        by_token, key, value, *layout, strict=True
    ):
        num_own = len(mask) // num_tokens
        k, v = (
            each.index_select(1, slots).unflatten(1, (-1, size)).transpose(0, 1)
            for each in (keys, values)
        )
        own = _attend_alike(asked.repeat_interleave(num_own, 0), k, v, mask, scale)
        # [M, N, H, G, ...]
        parts, sums = (each.unflatten(0, (num_tokens, num_own)).transpose(0, 1) for each in own)
        if num_whole:
            k, v = (
                each[:, : num_whole * size].unflatten(1, (num_whole, size)).transpose(0, 1)
                for each in (keys, values)
            )
            every = asked.transpose(0, 1).flatten(1, 2).expand(num_whole, -1, -1, -1)
            found = _attend_alike(every, k, v, None, scale)  # [W, H, N * G, ...]
            before = (each.unflatten(2, (num_tokens, -1)).transpose(1, 2) for each in found)
            parts, sums = map(torch.cat, zip(before, (parts, sums), strict=True))
        weights = sums.double().softmax(0)[..., None]
        outputs.append((weights * parts).sum(0).to(query.dtype))
    return torch.stack(outputs).flatten(2, 3)


@lru_cache(maxsize=1)
def _install_grouped() -> None:
    """Register the wrapper once; without an open context it only passes through."""
    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        compiling = torch.compiler.is_compiling()
        how = (_Pass({}) if _traced else None) if compiling else _pass.get()
        scale = kwargs.get("scaling")
        if how is None or not _is_plain(args, kwargs):
            return stock(module, query, key, value, attention_mask, *args, **kwargs)
        if how.layout is not None:
            return attend_invariant(query, key, value, scale, how.layout), None
        # the kernel takes values as wide as keys; models with others round by shape
        in_blocks = how.in_blocks and attention_mask is not None
        in_blocks = in_blocks and key.shape[3] == value.shape[3]
        if (
            (attention_mask is None and query.shape[2] > 1)  # causal, and not said by a mask
            or (query.shape[1] == key.shape[1] and not in_blocks)
        ):
            return stock(module, query, key, value, attention_mask, *args, **kwargs)
        output = attend_folded(
            query, key, value, attention_mask, scale, how.folded, in_blocks=in_blocks
        )
        return output.transpose(1, 2).contiguous(), None

    AttentionInterface.register("sdpa", attend)


def _is_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call asks for nothing but attention; the rest is left to transformers."""
    extras = ("dropout", "position_bias", "cache", "softcap", "output_attentions", "s_aux")
    return not args and not any(kwargs.get(name) for name in extras)


def attend_folded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    folded: _Folded,
    *,
    in_blocks: bool = False,
) -> Tensor:
    """Attend with the G query heads of a group one behind the other.

    Args:
        query: [B, H * G, N, d].
        key: [B, H, L, d].
        value: [B, H, L, e].
        mask: [B or 1, H * G or 1, N, L], bool or additive; None lets every query see every key.
        scale: None is 1 / sqrt(d).
        folded: masks of this pass that were laid out before; most layers share one.
        in_blocks: see :func:`attend_in_blocks`; there has to be a mask.

    Returns:
        [B, H * G, N, e].
    """
    num_tokens, groups = query.shape[2], query.shape[1] // key.shape[1]
    by_group = query.unflatten(1, (-1, groups)).flatten(2, 3)  # [B, H, G * N, d]
    if mask is not None:
        # a traced pass lays the mask out in every layer: the compiler sees that it is one
        known = (0 if torch.compiler.is_compiling() else id(mask), groups)
        if known not in folded:
            folded[known] = mask, _fold_mask(mask, groups)
        mask = folded[known][1]
    if in_blocks:
        assert mask is not None
        output = attend_in_blocks(by_group, key, value, mask, scale)
    else:
        output = scaled_dot_product_attention(by_group, key, value, mask, scale=scale)
    return output.unflatten(2, (groups, num_tokens)).flatten(1, 2)


_QUERIES = 4
_MERGED = 2**20  # numbers of an output: of more, merging blocks would go through memory


def attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None
) -> Tensor:
    """Attend on a CPU so that a query's bits depend on what it sees alone.

    They depend neither on other rows and queries nor on how many keys are shown beside those that
    it sees. The kernel of ``scaled_dot_product_attention`` sums products over all keys of a call in
    an order that depends on their number; here every call is over ``KEY_BLOCK`` keys, and blocks
    are weighed by their sums of exponentials, one after the other, where hidden ones count exactly
    nothing (as flash attention joins its blocks, arXiv:2205.14135, algorithm 1).

    Args:
        query: [B, H, N, d].
        key: [B, H, L, d], L a multiple of ``KEY_BLOCK``, each in the slot of its position.
        value: [B, H, L, d].
        mask: [B, 1 or H, N, L], additive, with finite numbers; every query sees a key.
        scale: None is 1 / sqrt(d).

    Returns:
        [B, H, N, d].
    """
    if query.numel() > _MERGED and len(query) > 1:
        rows = max(1, _MERGED // query[0].numel())
        parts = zip(*(given.split(rows) for given in (query, key, value, mask)), strict=True)
        return torch.cat([attend_in_blocks(q, k, v, seen, scale) for q, k, v, seen in parts])
    split = (given.split(KEY_BLOCK, dim) for given, dim in ((key, 2), (value, 2), (mask, 3)))
    blocks = [_attend_alike(query, k, v, seen, scale) for k, v, seen in zip(*split, strict=True)]
    if len(blocks) == 1:
        return blocks[0][0]
    sums = torch.stack([each for _, each in blocks])  # [blocks, B, H, N] logarithms
    weights = sums.sub_(sums.amax(0)).exp_()[..., None]
    total, output = weights[0], blocks[0][0] * weights[0]
    for (part, _), weight in zip(blocks[1:], weights[1:], strict=True):
        total, output = total + weight, output.addcmul_(part, weight)
    return output.div_(total).to(query.dtype)


def _attend_alike(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attend on a CPU so that a query's bits do not depend on how many there are.

    The kernel takes queries in parts of 32, 64 or 256, and if three or fewer are left for the last,
    it multiplies those by other code: so their number is made a multiple of ``_QUERIES``.

    Returns:
        The output [B, H, N, d], and the logarithms [B, H, N] of the sums of exponentials.
    """
    num_queries = query.shape[2]
    if missing := -num_queries % _QUERIES:
        query = pad(query, (0, 0, 0, missing))
        if mask is not None and mask.shape[2] > 1:
            mask = pad(mask, (0, 0, 0, missing))
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, sums = attend(query, key, value, attn_mask=mask, scale=scale)
    return output[:, :, :num_queries], sums[..., :num_queries]


def _fold_mask(mask: Tensor, groups: int) -> Tensor:
    """Return [B, H or 1, G * N, L] with rows that start where kernels want them."""
    num_heads, num_slots = mask.shape[1], mask.shape[3]
    if num_heads == 1:
        mask = mask[:, :, None].expand(-1, -1, groups, -1, -1)
    else:
        mask = mask.unflatten(1, (-1, groups))
    if mask.device.type != "cpu":  # there it would be one more shape to compile for
        mask = pad(mask, (0, -num_slots % _ALIGNMENT))[..., :num_slots]
    return mask.flatten(2, 3)
