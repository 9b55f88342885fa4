"""What a model can be decoded with: trees, chains only, or neither; found out on the model itself.

Beside the reasons that are known, there is a self-test: one verify step over a small tree, a commit
and one step more must give the logits of ordinary forward passes over each path. It catches ALiBi,
recurrent layers, custom code, and whatever comes next.

The test's prompt is short. So it is made again just across every position that the config names,
where something may change: with position ids that begin there, at no cost, and with as many tokens
where that is few. A window of thousands of tokens stays untested even so. What guards those is that
the model must be seen to ask the mask interface for a rule which hides what lies behind its window:
:mod:`specheads.attention.mask` measures that rule in positions for any window. And what is known to
change for a whole pass is in :mod:`specheads.models.forward`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from specheads.attention.cache import TreeCache
from specheads.attention.mask import SUPPORTED_ATTENTION, hearing, tree_attention
from specheads.attention.tree import Tree
from specheads.config import ConfigError
from specheads.models.base import context_length, input_device
from specheads.models.forward import named_positions, pad_rows, thresholds
from specheads.models.manifest import one_line
from specheads.verification.sampling import ROUNDING

NUM_PROMPT_TOKENS = 5
MAX_PATHS = 8  # that are compared: logits of large vocabularies take room
# wide, so that slots and positions differ by much: in bfloat16 ALiBi's error over a few nodes looks
# like rounding
TREE = Tree.from_choices([*((i,) for i in range(24)), (0, 0), (23, 0), (23, 0, 0)])
CHAIN = Tree.chain(3)
SMALL_TREE = Tree.from_choices([*((i,) for i in range(6)), (5, 0), (5, 0, 0)])
MOST_READ = 128  # tokens, to get across a position that the config names
# a choice compares two logits, of longer texts than the test's: five times its error was seen
MARGIN = 10.0

# its local layers mask by slot, in a window of 256 tokens that a short self-test would not show
_OWN_MASKS = ("gpt_neo",)


@dataclass(frozen=True)
class Support:
    """What a model can be decoded with, and still give the tokens of plain decoding.

    Attributes:
        kind: ``tree``; or ``chain``, proposals without branches, one row at a time.
        reason: why not trees; empty where they are possible.
        error: difference between logits in the self-test and ordinary ones.
        limit: what rounding stays below.
        rounding: of logits relative to the largest, below which two of them are a near-tie: more
            than ``sampling.ROUNDING`` where more was measured.
    """

    kind: str
    reason: str
    error: float
    limit: float
    rounding: float = ROUNDING

    def check_batch(self, batch_size: int) -> None:
        """Refuse what only trees' masks can do.

        Raises:
            ConfigError: for several rows where only a chain is exact.
        """
        if self.kind == "chain" and batch_size > 1:
            raise ConfigError(
                f"{self.reason}; so it decodes chains of 1 row at a time, got {batch_size} rows"
            )


def tree_support(model: PreTrainedModel) -> Support:
    """Find out what ``model`` can be decoded with; remembered per model and attention.

    Raises:
        ConfigError: where not even a chain is exact; with the reason.
        ValueError: in training mode.
    """
    name = type(model).__name__
    if model.training:
        raise ValueError(f"{name} is in training mode; call model.eval() before decoding")
    attention = str(model.config.get_text_config()._attn_implementation)
    known = _known.get(model)
    if known is not None and known[0] == attention:
        return known[1]
    layers = cache_layers(model)
    if reason := _why_not_at_all(model, layers):
        raise ConfigError(f"{name} {reason}")
    with one_line(f"{name} cannot be decoded step by step with {attention} attention"):
        support = _try_out(model, attention, layers)
    _known[model] = attention, support
    return support


_known: WeakKeyDictionary[PreTrainedModel, tuple[str, Support]] = WeakKeyDictionary()


def _has_alibi(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config()
    return (
        config.model_type == "bloom"
        or getattr(config, "alibi", False)
        or getattr(getattr(config, "attn_config", None), "alibi", False)
        or getattr(config, "position_embedding_type", None) == "alibi"
    )


def cache_layers(model: PreTrainedModel) -> Sequence[object]:
    """Return the layers of the cache that transformers would make; none where it cannot tell."""
    try:
        return DynamicCache(config=model.config).layers
    except Exception:  # custom code's configs need not know layers; the self-test decides then
        return []


def _why_not_at_all(model: PreTrainedModel, layers: Sequence[object]) -> str:
    """Return why neither trees nor chains can be verified, as far as that is known beforehand."""
    if model.config.is_encoder_decoder:
        return "is an encoder-decoder; specheads decodes decoder-only models"
    kinds = {type(layer).__name__ for layer in layers}
    kinds -= {DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__, "DummyLayer"}
    if getattr(model, "_is_stateful", False) or any("LinearAttention" in kind for kind in kinds):
        return (
            "keeps a recurrent state, which can neither branch into a tree nor forget a rejected"
            " guess"
        )
    if kinds:
        return (
            f"needs {', '.join(sorted(kinds))} in its cache, for which specheads' has no substitute"
        )
    return ""


@torch.no_grad()
def _try_out(model: PreTrainedModel, attention: str, layers: Sequence[object]) -> Support:
    name, reason = type(model).__name__, ""
    if attention not in SUPPORTED_ATTENTION:
        options = ", ".join(SUPPORTED_ATTENTION)
        reason = f"{name} uses {attention} attention, which takes no tree's mask ({options} do)"
    elif model.config.get_text_config().model_type in _OWN_MASKS:
        reason = f"{name} masks keys by slot in its own code, which would be wrong in a tree"
    elif _has_alibi(model):  # the self-test finds it too; in bfloat16 not if it is faint
        reason = f"{name} has ALiBi, which takes slots for positions and would be wrong in a tree"
    own_masks = bool(reason)
    if not reason:
        worst = _worst(model, TREE, chain_only=False)
        if not worst.passes:
            reason = (
                f"{name} fails the tree self-test{worst.where}: logits in a tree differ from linear"
                f" ones by {worst.error:.2g} (limit {worst.limit:.2g}); it ignores masks or"
                " positions"
            )
    if reason:
        worst = _worst(model, CHAIN, chain_only=True)
        if not worst.passes:
            raise RuntimeError(
                f"logits in a chain with a rejected guess differ from ordinary ones{worst.where} by"
                f" {worst.error:.2g} (limit {worst.limit:.2g})"
            )
    longest = context_length(model) or float("inf")
    windows = [x.sliding_window for x in layers if isinstance(x, DynamicSlidingWindowLayer)]
    windows = [window for window in windows if window < longest]
    if windows and not own_masks and not _hides(worst.rules, max(windows)):
        raise ConfigError(
            f"{name} has a window of {max(windows)} tokens, but asks for no mask that does: only"
            " transformers' own cache forgets what lies behind it, and specheads' does not"
        )
    kind, rounding = "chain" if reason else "tree", max(ROUNDING, MARGIN * worst.rounding)
    return Support(kind, reason, worst.error, worst.limit, rounding)


def _worst(model: PreTrainedModel, tree: Tree, *, chain_only: bool) -> Comparison:
    """Return the worst comparison behind a short prompt and across the positions that are named."""
    first = compare(model, tree, chain_only=chain_only)
    if not first.passes:
        return first
    small = tree if chain_only else SMALL_TREE
    across = _across(model, small, chain_only=chain_only)
    found = [first, *across]
    worst = max(found, key=lambda each: (not each.passes, each.error / each.limit))
    return worst._replace(rounding=max(each.rounding for each in found))


def _across(model: PreTrainedModel, tree: Tree, *, chain_only: bool) -> Iterator[Comparison]:
    """Compare just across every position that the config names, and the model can reach."""
    known, context = thresholds(model), context_length(model)

    def possible(first: int, last: int) -> bool:
        """Tell whether decoding has tokens of both positions in one pass."""
        same_side = known.side(first) == known.side(last)
        return first > 0 and (context is None or last < context) and same_side

    for position in named_positions(model):
        divides = known.side(position) != known.side(position - 1)
        start = position if divides else position - NUM_PROMPT_TOKENS - 1
        if possible(start, start + NUM_PROMPT_TOKENS + tree.num_nodes + 1):
            yield compare(model, tree, first_position=start, chain_only=chain_only).at(position)
        num_read = position + bool(known.name)
        if num_read <= MOST_READ and possible(num_read - 1, num_read + tree.num_nodes + 1):
            yield compare(model, tree, num_read, chain_only=chain_only).at(position)


class Comparison(NamedTuple):
    """What :func:`compare` has found.

    Attributes:
        error: the largest difference of logits; in bfloat16 and float16, where rounding may send a
            token to another expert, the root mean square of each node's, averaged.
        limit: which rounding stays below and a wrong mask or position does not.
        rounding: the error relative to the largest logit; 0 in bfloat16 and float16.
        rules: the mask rules that the model asked for.
        where: words about the position that it was made at.
    """

    error: float
    limit: float
    rounding: float
    rules: list[Callable[..., Tensor]]
    where: str = ""

    @property
    def passes(self) -> bool:
        """Whether the difference is rounding; False where it is not a number."""
        return self.error <= self.limit

    def at(self, position: int) -> Comparison:
        """Return it with the position that the config names."""
        return self._replace(where=f" across position {position}, which its config names")


@torch.no_grad()
def compare(
    model: PreTrainedModel,
    tree: Tree,
    num_prompt_tokens: int = NUM_PROMPT_TOKENS,
    *,
    first_position: int = 0,
    chain_only: bool = False,
) -> Comparison:
    """Compare decoding steps with ordinary forward passes on random tokens.

    A prompt is read, ``tree`` is verified, half of its last path is committed, and two tokens more
    are read: so in a chain a rejected guess has to be forgotten.

    Args:
        model: in eval mode.
        tree: of any shape.
        num_prompt_tokens: P.
        first_position: the prompt's position ids begin there, which costs no tokens before it.
        chain_only: ``tree`` is a chain, to be verified with the model's own mask.
    """
    device, start = input_device(model), num_prompt_tokens
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.randint(vocab_size, (1, start + tree.num_nodes + 2), generator=generator).to(device)
    prompt, nodes, more = ids[:, :start], ids[:, start:-2], ids[:, -2:]
    every = -(-len(tree.paths) // MAX_PATHS)
    paths = [path[path >= 0] for path in tree.paths.flip(0)[::every].flip(0)]  # the last too
    kept = paths[-1][: (len(paths[-1]) + 1) // 2]
    cache = TreeCache()

    def step(tokens: Tensor, depths: Tensor, shape: Tree | None) -> Tensor:
        cache.reserve(1, tokens.shape[1])
        plain = shape is None or chain_only
        with contextlib.nullcontext() if plain else tree_attention(shape, cache):
            output = model(
                input_ids=tokens,
                position_ids=(first_position + cache.lengths[0] + depths)[None].to(device),
                past_key_values=cache,
                use_cache=True,
            )
        return output.logits[0].float()

    before = step(prompt, torch.arange(start), None)[-1:]
    cache.extend([start])
    in_tree = step(nodes, tree.depths, tree)
    cache.commit(kept[None], [len(kept)])
    after = step(more, torch.arange(2), None)

    rows = [nodes[0, path] for path in paths] + [torch.cat([nodes[0, kept], more[0]])]
    width = max(len(row) for row in rows)
    # what is padded comes after what is compared
    linear = pad_rows([torch.cat([prompt[0], row]).tolist() for row in rows], device)
    rules: list[Callable[..., Tensor]] = []
    with hearing(rules):
        positions = first_position + torch.arange(linear.shape[1], device=device)[None]
        given = {"position_ids": positions} if first_position else {}
        output = model(input_ids=linear, use_cache=False, logits_to_keep=width + 1, **given)
        logits = output.logits[:, -width - 1 :].float().to(device)
    # the prompt's last token too: what comes after must not change it
    pairs = [
        (torch.cat([before, in_tree[path]]), logits[i, : 1 + len(path)])
        for i, path in enumerate(paths)
    ]
    pairs.append((after, logits[-1, 1 + len(kept) : 3 + len(kept)]))
    errors = torch.cat([ours.to(device) - theirs for ours, theirs in pairs])
    error = size_of(errors, model)
    spread = max(float(theirs.std(-1).max()) for _, theirs in pairs)
    # a wrong mask or position moves logits by their own spread
    if model.dtype in (torch.float32, torch.float64):
        largest = max(float(theirs.abs().max()) for _, theirs in pairs)
        return Comparison(error, 1e-3 * spread, error / largest if largest else 0.0, rules)
    return Comparison(error, 0.05 * spread, 0.0, rules)


def size_of(errors: Tensor, model: PreTrainedModel) -> float:
    """Return the errors [..., V] of a model's logits as one number, which a ``limit`` is for."""
    if model.dtype in (torch.float32, torch.float64):
        return float(errors.abs().max())
    return float(errors.square().mean(-1).sqrt().mean())


def _hides(rules: list[Callable[..., Tensor]], window: int) -> bool:
    """Tell whether one of ``rules`` hides the first token from one that is two windows behind."""
    zero = torch.zeros((), dtype=torch.long)
    return any(not bool(rule(zero, zero, zero + 2 * window + 1, zero)) for rule in rules)
