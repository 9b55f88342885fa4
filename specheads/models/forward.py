"""A model's forward passes: read tokens, or verify a tree, behind what the cache holds.

A compiled pass computes the same at fewer microseconds per layer. What changes from step to step
(tokens, positions, slots, mask) enters as tensors. The mask is made outside, by the functions that
the model itself would call, since they ask Python what tree is active. On a GPU the compiled pass
is captured in CUDA graphs (``mode="reduce-overhead"``), which want every shape to repeat: keys are
then shown up to a multiple of the cache's block.

:class:`Thresholds` are positions at which a model computes differently, and does so for a whole
forward pass at once. Most models give each token what its own position asks for, whatever else is
in the pass. Two mechanisms of transformers do not:

- ``rope_type=longrope`` (Phi-3, PhiMoE; any model may have it): the largest position of a pass
  decides whether all its tokens get the short or the long frequencies. Keys that are in the cache
  keep what they got, except that the models with a ``prepare_inputs_for_generation`` of their own
  read the text anew where it grows over the threshold.
- Llama 4's ``attn_temperature_tuning``: each ``floor_scale`` tokens the queries are scaled anew, by
  their slots in the cache, which are positions in a chain of one row only.

So no pass may have tokens on both sides of a threshold. Frequencies that grow with the text
(``rope_type=dynamic``) change beyond the model's context only, which no text may leave.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from specheads.attention import mask as masks
from specheads.attention.cache import TreeCache, grown_capacity
from specheads.attention.tree import RowTrees, Tree, batched
from specheads.config import ConfigError
from specheads.models.base import context_length, input_device
from specheads.models.manifest import one_line
from specheads.models.output import FINAL, TRUNK, capture_hidden, layers_of

_Captured = dict[str, Tensor]  # hidden states by tap
_Recording = tuple[_Captured, set[str], contextlib.AbstractContextManager[_Captured]]
_captured: WeakKeyDictionary[PreTrainedModel, _Recording] = WeakKeyDictionary()


def _forward(model: PreTrainedModel, **inputs: Any) -> Tensor:
    return model(**inputs, use_cache=True).logits


@lru_cache(maxsize=2)
def _compiled_forward(mode: str | None) -> Callable[..., Tensor]:
    """Return the pass compiled; it is compiled anew for every model and shape it meets."""
    return torch.compile(_forward, mode=mode)


def capture_for_good(model: PreTrainedModel, taps: Collection[str] = ()) -> _Captured:
    """Do what ``capture_hidden`` does, but for good: a hook is part of what is compiled.

    torch.compile does not look whether hooks have come or gone since, so that one that goes with
    its context would leave passes that record into nowhere. And a pass that was compiled before the
    hook came would go on without it: so it comes with the first compiled pass, needed or not.
    """
    known = _captured.get(model)
    if known is None or not known[1].issuperset(taps):
        wanted = {FINAL, *taps} if known is None else known[1].union(taps)
        if known is None:
            with contextlib.suppress(ValueError):  # a model without a list of layers has no trunk
                layers_of(model)
                wanted.add(TRUNK)
        else:  # a hook in place of another is seen by what is compiled, one more would not be
            known[2].__exit__(None, None, None)
        forever = capture_hidden(model, wanted, every_thread=True)
        _captured[model] = forever.__enter__(), wanted, forever
    return _captured[model][0]


def run_compiled(
    model: PreTrainedModel,
    cache: TreeCache,
    tokens: Tensor,
    positions: Tensor,
    tree: Tree | RowTrees,
) -> Tensor:
    """Return the logits [B, N, V] of a tree behind what the cache holds.

    Args:
        model: the base model.
        cache: with room for the tree.
        tokens: [B, N].
        positions: [1 or B, N].
        tree: a root alone is a plain step.
    """
    capture_for_good(model)
    num_rows, num_tokens = tokens.shape
    width = cache.rows.longest + num_tokens
    on_gpu = tokens.device.type == "cuda"
    if on_gpu:
        width = min(grown_capacity(width), cache.capacity)
    with cache.fix(num_tokens, width):
        with masks.tree_attention(tree, cache):
            like = torch.empty(num_rows, num_tokens, 0, dtype=model.dtype, device=tokens.device)
            mask = create_masks_for_generate(model.config, like, None, cache, positions)
        with masks.grouped_attention_traced():
            if on_gpu:
                torch.compiler.cudagraph_mark_step_begin()  # what the last one returned is used up
            return _compiled_forward("reduce-overhead" if on_gpu else None)(
                model,
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
            )


@dataclass(frozen=True)
class Thresholds:
    """Where the sides of a model's positions begin; most models have one side.

    Attributes:
        name: the setting, for messages; empty where there is no threshold.
        starts: the first position of each side but the first, as positions are given.
        period: if not 0, position p lies on side ``(p + 1) // period``, by slots.
    """

    name: str = ""
    starts: tuple[int, ...] = ()
    period: int = 0

    def side(self, position: int) -> int:
        """Return the number of the side that ``position`` lies on."""
        if self.period:
            return (position + 1) // self.period
        return sum(start <= position for start in self.starts)

    def after(self, position: int) -> int:
        """Return the first position behind ``position`` on another side, a huge number if none."""
        if self.period:
            return (self.side(position) + 1) * self.period - 1
        return min((start for start in self.starts if start > position), default=sys.maxsize)

    def shared_side(self, spans: Sequence[tuple[int, int]]) -> int | None:
        """Return the side on which all tokens of all rows lie that a batch may compute together.

        Args:
            spans: per row the tokens of its prompt, and of its whole text at most.

        Returns:
            None where there are several sides.
        """
        # the last token of a text is never read, and a prompt is read as one pass
        sides = {self.side(n) for prompt, whole in spans for n in (prompt - 1, max(whole, 2) - 2)}
        return sides.pop() if len(sides) == 1 else None


def thresholds(model: PreTrainedModel) -> Thresholds:
    """Return the thresholds of ``model``."""
    config = model.config.get_text_config()
    starts = set()
    for rope in _rope_settings(config):
        kind = rope.get("rope_type", rope.get("type"))
        if kind in ("longrope", "su") or "long_mscale" in rope:
            name = "original_max_position_embeddings"
            starts.add(int(rope.get(name) or getattr(config, name)))
    if starts:
        found = tuple(sorted(starts))
        numbers = ", ".join(map(str, found))
        return Thresholds(f"longrope, original_max_position_embeddings={numbers}", found)
    if getattr(config, "attn_temperature_tuning", False) and getattr(config, "floor_scale", 0):
        period = int(config.floor_scale)
        return Thresholds(f"attn_temperature_tuning, floor_scale={period}", period=period)
    return Thresholds()


def named_positions(model: PreTrainedModel) -> list[int]:
    """Return the positions that the config names, at which something may change; ascending."""
    config = model.config.get_text_config()
    names = ("original_max_position_embeddings", "attention_chunk_size", "sliding_window")
    values = [getattr(config, name, None) for name in (*names, "floor_scale", "keep_window_size")]
    values += [rope.get(names[0]) for rope in _rope_settings(config)]
    return sorted({int(value) for value in values if isinstance(value, int) and value > 0})


def _rope_settings(config: object) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of rotary embeddings, those of each type of layer too."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if isinstance(rope, Mapping):
        yield rope
        yield from (own for own in rope.values() if isinstance(own, Mapping))


def check_sides(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> None:
    """Refuse a batch with rows on several sides of a threshold, and a text that cannot cross it.

    Raises:
        ConfigError: with the threshold and what to do.
    """
    found = thresholds(model)
    lengths = [len(prompt) for prompt in prompts]
    if found.shared_side([(length, length + max_new_tokens) for length in lengths]) is not None:
        return
    if len(prompts) == 1:
        last = lengths[0] + max_new_tokens - 2
        for start in found.starts:
            if lengths[0] <= start <= last:
                reads_anew(model, start)  # for its error
    else:
        raise ConfigError(
            f"{type(model).__name__} computes a whole batch differently from position"
            f" {found.after(min(lengths) - 1)} on ({found.name}), and rows of {min(lengths)} to"
            f" {max(lengths)} tokens with max_new_tokens {max_new_tokens} do not all stay on one"
            " side of it: decode them one by one (batch_size=1)"
        )


def reads_anew(model: PreTrainedModel, length: int) -> bool:
    """Tell whether ``generate`` reads the whole text again where its cache holds ``length`` tokens.

    The model itself is asked, with a text of one token more and an empty stand-in for the cache.

    Raises:
        ConfigError: where it forgets the cache and reads the last token only, or does not say.
    """
    cache = SimpleNamespace(get_seq_length=lambda layer_idx=0: length)
    name = type(model).__name__
    prepare: Any = model.prepare_inputs_for_generation
    ids = torch.zeros(1, length + 1, dtype=torch.long)
    with one_line(f"{name} does not say how it goes on where a text grows beyond {length} tokens"):
        inputs = prepare(ids, past_key_values=cache, next_sequence_length=1, use_cache=True)
    if inputs.get("past_key_values") is cache:
        return False
    if inputs["input_ids"].shape[1] != length + 1:
        raise ConfigError(
            f"{name} forgets all tokens but the last where a text grows beyond"
            f" {length}: keep prompt and max_new_tokens together at {length + 1} at most"
        )
    return True


class ModelPass:
    """Runs the base model, or a draft model, over new tokens of every row of a cache.

    Args:
        model: the model.
        cache: empty, or holding the rows' texts so far.
        chain_only: the model masks by itself, so that no mask of ours may be asked for: one row,
            and a chain in place of a tree.
        compiled: run all passes but the prefill compiled; the first of each shape takes a while.
        invariant: in 16 bits, let a token's pass round as if no other token were in it.

    Attributes:
        num_tokens: T of the latest pass, without what it was padded with.

    Raises:
        ValueError: for a model that cannot be compiled with masks of ours.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: TreeCache,
        *,
        chain_only: bool = False,
        compiled: bool = False,
        invariant: bool = False,
    ) -> None:
        attention, name = model.config.get_text_config()._attn_implementation, type(model).__name__
        if compiled and attention not in ("sdpa", "eager"):
            raise ValueError(f"compile=True needs sdpa or eager attention, {name} uses {attention}")
        if compiled and chain_only:
            raise ValueError(
                f"compile=True needs a model that verifies trees, {name} masks by itself"
            )
        self.model = model
        self.cache = cache
        self.chain_only = chain_only
        self.compiled = compiled
        self.num_tokens = 0
        self.invariant = invariant and model.dtype in (torch.bfloat16, torch.float16)
        if self.invariant and (chain_only or compiled or not rounds_by_shape(model)):
            raise ValueError(
                f"invariant decoding in {model.dtype} needs a CPU, sdpa attention without windows"
                f" or position thresholds and passes that are not compiled: {name} is on"
                f" {input_device(model)} with {attention} attention; float32 needs none of it"
            )
        self.device = input_device(model)
        self._context = context_length(model)
        self._thresholds = thresholds(model)

    def align(self, texts: Sequence[Sequence[int]]) -> list[int]:
        """Keep of the cache what plain decoding of ``texts`` [B] would have in it; see its align.

        Keys that were made on another side of a threshold than the prompts are read again.
        """
        known, found = self.cache.align(texts), self._thresholds
        if not any(known):
            return known
        lengths = [len(text) for text in texts]
        # where rows end apart, the padding behind the longest one reaches this far
        last = max(known) + max(n - k for n, k in zip(lengths, known, strict=True)) - 1
        if found.period:  # which queries are scaled by; keys are the same on all sides
            stale = len(set(known)) > 1 and found.side(min(known)) != found.side(last)
        else:
            side = found.side(max(lengths) - 1)
            stale = bool(self.cache.sides - {side}) or found.side(last) != side
        if stale:
            known = [0] * len(texts)
            self.cache.shorten(known)
        return known

    def within(self, budgets: Sequence[int]) -> list[int]:
        """Return how many of ``budgets`` tokens per row a step may give this side of a threshold.

        A step's guesses stand behind each row's end, beginning with its root.
        """
        after, lengths = self._thresholds.after, self.cache.lengths
        pairs = zip(budgets, lengths, strict=True)
        return [min(budget, after(length) - length) for budget, length in pairs]

    @property
    def num_slots(self) -> int | None:
        """How many nodes a step may have where slots are taken for positions; None elsewhere."""
        found, longest = self._thresholds, self.cache.rows.longest
        limited = found.period and not self.chain_only
        return found.after(longest) - longest if limited else None

    def reaches_threshold(self, num_tokens: int) -> bool:
        """Tell whether the next tokens of the longest row lie on several sides of a threshold."""
        longest = self.cache.rows.longest
        return longest + num_tokens > self._thresholds.after(longest)

    def starts_over(self) -> bool:
        """Tell whether ``generate`` would read the only row's text anew before its next token."""
        lengths = self.cache.lengths
        at_start = len(lengths) == 1 and lengths[0] in self._thresholds.starts
        return at_start and reads_anew(self.model, lengths[0])

    def read_anew(self, text: Sequence[int]) -> Tensor:
        """Read the only row from its start; return the logits [1, V] after its last token."""
        self.cache.shorten([0])
        return self.read(torch.tensor([text], device=self.device), [len(text)])

    def read_next(
        self, tokens: Tensor, counts: Sequence[int], text: Callable[[], Sequence[int]]
    ) -> Tensor:
        """Do what :meth:`read` does, as ``generate`` does it, which may start over.

        Args:
            tokens: [B, T].
            counts: per row.
            text: returns the whole text of the first row, these tokens included.
        """
        return self.read_anew(text()) if self.starts_over() else self.read(tokens, counts)

    def _note_side(self, num_tokens: int) -> None:
        """Remember on which side the keys are made, to which :meth:`align` holds later texts."""
        cache, found = self.cache, self._thresholds
        if not cache.rows.longest:
            cache.sides.clear()
        cache.sides.add(found.side(cache.rows.longest + num_tokens - 1))

    def read(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """Read the first ``counts[b]`` tokens of each row; return the logits after them.

        Args:
            tokens: [B, T], right-padded.
            counts: per row, at most T; 0 leaves the row as it is, and its logits mean nothing.

        Returns:
            [B, V].
        """
        cache = self.cache
        if cache.rows.multiple > 1 and tokens.numel() == 1:
            # matrix products round one row otherwise than several
            cache.reserve(1, 1)
            cache.select(torch.zeros(2, dtype=torch.long))
            logits = self.read(tokens.repeat(2, 1), [*counts, *counts])[:1]
            cache.select(torch.zeros(1, dtype=torch.long))
            return logits
        num_rows, num_tokens = tokens.shape
        self.num_tokens = num_tokens
        cache.reserve(num_rows, num_tokens)
        self._note_side(num_tokens)
        compiled = self.compiled and num_tokens == 1 and cache.layers
        if compiled or (self.invariant and num_tokens == 1 and cache.layers):
            logits = self.verify(tokens, Tree.chain(0))[:, -1]
            cache.extend(counts)
            return logits
        last = [max(count, 1) - 1 for count in counts]
        kept = sorted(set(last))
        whole = kept == [num_tokens - 1]
        ahead = torch.arange(num_tokens, device=self.device)[None]
        # rows that end together see each other's padding in no way: it comes after all they have
        ragged = not cache.rows.uniform or cache.rows.multiple > 1
        apart = masks.tree_attention(None, cache) if ragged else contextlib.nullcontext()
        with masks.grouped_attention(in_blocks=cache.rows.multiple > 1), apart:
            logits = self.model(
                input_ids=tokens.to(self.device),
                position_ids=self._positions(ahead),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1 if whole else torch.tensor(kept, device=self.device),
            ).logits
        cache.extend(counts)
        if whole:
            return logits[:, -1]
        if logits.shape[1] == len(kept):  # else the model has returned them all
            last = [kept.index(each) for each in last]
        rows = torch.arange(num_rows, device=logits.device)
        return logits[rows, torch.tensor(last, device=logits.device)]

    def verify(self, tokens: Tensor, tree: Tree | RowTrees) -> Tensor:
        """Run the model over all nodes at once; the cache is to be committed after.

        Args:
            tokens: [B, N]; negative ones are padding.
            tree: their shape.

        Returns:
            Logits [B, N, V].
        """
        self.num_tokens = tokens.shape[1]
        if self.invariant and tokens.numel() == 1:
            # matrix products round one row otherwise than two or more: nobody reads the second
            tokens, tree = F.pad(tokens, (0, 1)), Tree.chain(1)
        self.cache.reserve(*tokens.shape)
        self._note_side(1)
        tokens, positions = tokens.clamp(min=0).to(self.device), self._node_positions(tree)
        if self.compiled:
            return run_compiled(self.model, self.cache, tokens, positions, tree)
        # a root alone behind rows of one length is a plain step
        plain = self.chain_only or (tree.num_nodes == 1 and self.cache.rows.uniform)
        along = contextlib.nullcontext() if plain else masks.tree_attention(tree, self.cache)
        layout = None
        if self.invariant:
            layout = masks.invariant_layout(tree, self.cache.lengths, self.model.dtype)
        with masks.grouped_attention(layout=layout), along:
            logits: Tensor = self.model(
                input_ids=tokens, position_ids=positions, past_key_values=self.cache, use_cache=True
            ).logits
        return logits[:, : self.num_tokens]

    def _node_positions(self, tree: Tree | RowTrees) -> Tensor:
        """Return the position ids [1 or B, N] of a tree; those of forbidden guesses may be less."""
        positions = self._positions(batched(tree, tree.depths).to(self.device))
        if not self.reaches_threshold(tree.max_depth + 1):
            return positions
        # a guess beyond a threshold is forbidden, but would decide for the others of its pass
        return positions.clamp(max=self._thresholds.after(self.cache.rows.longest) - 1)

    def _positions(self, ahead: Tensor) -> Tensor:
        """Return the position ids of tokens that stand ``ahead`` [1 or B, T] of their row's end."""
        rows = self.cache.rows
        positions = ahead + (rows.longest if rows.uniform else rows.on(self.device)[:, None])
        if self._context is None or rows.longest + ahead.shape[1] <= self._context:
            return positions
        # padding, and guesses that the limit forbids: whatever is said of them is ignored, but a
        # learned embedding has no row for positions outside the context
        return positions.clamp(max=self._context - 1)


def rounds_by_shape(model: PreTrainedModel) -> bool:
    """Tell whether a token's pass can be made to round the same whatever else is in it.

    In 16 bits on a CPU a pass over one token rounds otherwise than one over a tree, and a row
    otherwise alone than beside others. The cure, two tokens at least and attention by blocks of
    positions, has its price: see docs/exactness.md. In float32 near-ties are settled by replays.
    GPUs choose kernels by shape in all products, which no padding evens out. Masks with a window,
    and positions with thresholds, are left to the model.
    """
    config = model.config.get_text_config()
    return (
        input_device(model).type == "cpu"
        and model.dtype in (torch.bfloat16, torch.float16)
        and config._attn_implementation == "sdpa"
        and not getattr(config, "sliding_window", None)
        and set(getattr(config, "layer_types", None) or ()) <= {"full_attention"}
        and not thresholds(model).name
    )


def pad_rows(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return rows of tokens as [B, T], padded with 0 on the right."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)


def replay(model: PreTrainedModel, ids: Tensor, num_prompt_tokens: int) -> Tensor:
    """Return the logits [1, V] after ``ids`` [1, T] to the last bit as plain decoding sees them."""
    base = ModelPass(model, TreeCache())
    logits = base.read(ids[:, :num_prompt_tokens], [num_prompt_tokens])
    for i in range(num_prompt_tokens, ids.shape[1]):
        so_far = ids[:, : i + 1]
        logits = base.read_next(so_far[:, i:], [1], so_far[0].tolist)
    return logits


@contextlib.contextmanager
def undisturbed(*modules: Any) -> Iterator[None]:
    """Put modules into eval mode; give every submodule its mode back, and torch its randomness."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    places = {tensor.device for module in modules for tensor in module.parameters()}
    with torch.random.fork_rng([place for place in places if place.type == "cuda"]):
        for module in modules:
            module.eval()
        try:
            yield
        finally:
            for part, mode in modes:
                part.training = mode
