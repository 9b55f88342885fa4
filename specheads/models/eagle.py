"""EAGLE-3: one layer drafts token by token, from the base's states and from what it made itself.

At position t the layer reads the embedding of the token that came next, x_{t+1}, beside a state
g_t, and what it makes, a_t, guesses x_{t+2} (arXiv:2503.01840). Of the text, g_t is made of the
base's hidden states at three of its layers (taps). Where the base has not been yet, a_{t-1} takes
the place of g_t: so head i stands i drafted tokens behind the last state that the base gave.

Training goes these K steps with the text's own tokens (training-time test): a step sees, of the
text, what the first step's keys are made of, up to its anchor, and of its own chain the steps
before. Keys of the text follow from tokens and taps alone, so that steps are taken from some
positions only (``anchors``), as blocks are.

Shapes: K heads, d hidden size, n taps, B rows, T positions, A anchors of a row, H key heads of
width h in each, N nodes of a tree so far without the root, L slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads.models.head_cache import RootCache, RootWalk, Slots, last_places, rows_at, visible
from specheads.models.kinds import Begin, given
from specheads.models.output import OutputLayer, layers_of
from specheads.models.tapped import Norm, TappedForm, TappedHeads, TappedLayer, attended
from specheads.system.errors import check

Pair = tuple[Tensor, Tensor]  # keys and values
_TOGETHER = 64  # anchors that attend in one call: more would mask away what they compute


@dataclass
class EagleForm(TappedForm):
    """The form of an EAGLE-3 head; the first attributes are those of ``TappedForm``.

    The last three are those of EAGLE-3.1.

    Attributes:
        norm_before_residual: the residual stream begins behind the norm of the state, not before.
        norm_before_fc: a norm over all taps side by side, before they are joined.
        fc_norm: a norm for each tap, before they are joined.
        norm_output: the last norm stands before what is read as the next state, too.
    """

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


def eagle_taps(num_base: int, num_taps: int) -> tuple[int, ...]:
    """Return the layers that EAGLE-3 taps: of n those behind which 2, n / 2 and n - 3 were run.

    Engines and trainers count states (behind k layers), here the layers are counted from 0. For
    another number of taps they are spaced evenly between the outer two; a base too shallow for as
    many distinct ones gives fewer. Never the last, whose state transformers counts behind the final
    norm and engines before it.
    """
    first, last = 2, max(num_base - 3, 2)
    behind = [first + round(i * (last - first) / max(num_taps - 1, 1)) for i in range(num_taps)]
    if num_taps == 3:
        behind[1] = num_base // 2
    return tuple(sorted({max(min(each, num_base - 1), 1) - 1 for each in behind}))


class EagleHeads(TappedHeads):
    """K steps of one EAGLE-3 layer; their contract is :class:`specheads.models.kinds.Heads`.

    Arguments and errors are those of :class:`specheads.models.tapped.TappedHeads`.
    """

    config_keys = ("num_heads", "hidden_size", "vocab_size", "lm_head", "num_kept", "form")
    form_class = EagleForm
    tensor_prefix: ClassVar[str] = "eagle3."
    kind = "eagle3"
    sequential = walks_text = True
    form: EagleForm

    def __init__(self, *sizes: Any, **more: Any) -> None:
        super().__init__(*sizes, **more)
        form, hidden_size, num_taps = self.form, self.hidden_size, len(self.taps)
        normed = partial(Norm, eps=form.rms_norm_eps)
        self.layer = TappedLayer(hidden_size, form, 2 * hidden_size, normed=False)
        self.hidden_norm = normed(hidden_size)
        self.input_norm = normed(num_taps * hidden_size) if form.norm_before_fc else None
        self.fc_norm = nn.ModuleList(normed(hidden_size) for _ in range(num_taps * form.fc_norm))

    @classmethod
    def from_settings(cls, settings: Any, base: PreTrainedModel, output: OutputLayer) -> EagleHeads:
        """Build the heads of the section ``heads`` of a recipe's settings, for a base.

        Raises:
            ValueError: as the class and :class:`EagleForm` do, and for more than one layer.
        """
        vocab_size, hidden_size = output.weight.shape
        check(settings.num_layers == 1, "num_layers", settings.num_layers, "1, EAGLE-3's one layer")
        rule = partial(eagle_taps, len(layers_of(base)))
        form = EagleForm.of(settings.options).sized(base, hidden_size, rule)
        sizes = settings.num_heads, hidden_size, vocab_size, settings.lm_head, form
        found = cls(*sizes, settings.num_kept)
        found.start_from(base)
        return found

    def joined(self, hidden: Tensor) -> Tensor:
        """Return the states g [..., d] of what the base said at the taps, [..., n * d]."""
        hidden = hidden.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            hidden = self.input_norm(hidden)
        if len(self.fc_norm):
            parts = hidden.chunk(len(self.fc_norm), dim=-1)
            hidden = torch.cat([norm(x) for norm, x in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(hidden)

    def read(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream [..., d], and what the attention reads, [..., 2 * d].

        Args:
            states: [..., d], g, or what the layer made before.
            tokens: [...], the ones that came, or were drafted, behind them.
        """
        with torch.no_grad():  # the base's own, which stays as it is
            embedded = given(self.embed, "embed")(tokens)
        normed = self.hidden_norm(states)
        side = torch.cat([self.layer.input_layernorm(embedded), normed], dim=-1)
        return (normed if self.form.norm_before_residual else states), side

    def made(self, x: Tensor) -> Tensor:
        """Return the next state, of what the layer made, [..., d]."""
        return self.norm(x) if self.form.norm_output else x

    def finished(self, state: Tensor) -> Tensor:
        """Return what the output matrix reads of a state that the layer made, [..., d]."""
        return state if self.form.norm_output else self.norm(state)

    def contextual(
        self,
        hidden: Tensor,
        position_ids: Tensor,
        tokens: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """Take K steps from some positions; return what the output matrix reads at each.

        Args:
            hidden: [B, T, n * d], the base's, at ``taps``; of several documents in a row if packed.
            position_ids: [B, T], restarting at 0 with every document.
            tokens: [B, T], the texts.
            places: [B, A], positions in ascending order; None takes all.

        Returns:
            [K, B, A, d].
        """
        (num_rows, num_tokens), tokens = position_ids.shape, given(tokens, "tokens")
        every = torch.arange(num_tokens, device=hidden.device)
        at = every.expand(num_rows, -1) if places is None else places
        table = self._table(num_tokens + self.num_heads)
        # at the end of a document the token is another's: there nothing is asked, nor seen later
        stream, side = self.read(self.joined(hidden), tokens.roll(-1, dims=1))
        text = self.layer.keys(side, table[:, position_ids])
        documents = (position_ids == 0).cumsum(1)
        seen = (every <= at[..., None]) & (documents[:, None] == documents.gather(1, at)[..., None])
        state = x = rows_at(stream, at)
        side = rows_at(side, at)
        chain: list[Pair] = []
        found: list[Tensor] = []

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            if found:  # those of the first step are part of the text
                chain.append((keys, values))
            return _attend_chains(queries, text, seen, chain)

        for step in range(self.num_heads):
            if step:
                ahead = tokens.gather(1, (at + 1 + step).clamp(max=num_tokens - 1))
                x, side = self.read(state, ahead)
            waves = table[:, position_ids.gather(1, at) + step]
            state = self.made(self.layer.run(x, side, waves, attend))
            found.append(self.finished(state))
        return torch.stack(found)

    def steps(self, output: OutputLayer, depth: int) -> Callable[[], Begin]:
        """Return a function that returns how the heads begin a step."""

        def begin() -> Begin:
            products = self.own_products(output)

            def logits(state: Tensor) -> Tensor:
                return self.finish(products(self.finished(state)), output)

            return partial(EagleWalk, logits)

        return begin

    def memory(self, num_rows: int) -> EagleCache:
        """Return the cache of rows of which nothing was read yet."""
        root = self.fc.weight.new_zeros(num_rows, self.hidden_size)
        return EagleCache(Slots(1, self._table), (0,) * num_rows, root, self)


def _attend_chains(queries: Tensor, text: Pair, seen: Tensor, chain: list[Pair]) -> Tensor:
    """Return what the queries of anchors read of the text and of their chains, [B, G * H, A, h].

    Args:
        queries: [B, G * H, A, h], of one step.
        text: its keys and values, [B, H, T, h].
        seen: [B, A, T], which of them each anchor sees.
        chain: keys and values [B, H, A, h] of the steps so far that are no part of the text.
    """
    found = []
    for first in range(0, queries.shape[2], _TOGETHER):
        some = slice(first, first + _TOGETHER)
        visible = seen[:, some]
        end = int(visible.any(1).any(0).nonzero().max()) + 1
        num = visible.shape[1]
        itself = torch.eye(num, dtype=torch.bool, device=seen.device).repeat(1, len(chain))
        mask = torch.cat([visible[..., :end], itself.expand(len(visible), -1, -1)], dim=2)
        parts = [[each[i][:, :, some] for each in chain] for i in range(2)]
        k, v = (torch.cat([text[i][:, :, :end], *parts[i]], dim=2) for i in range(2))
        found.append(attended(queries[:, :, some], k, v, mask[:, None]))
    return torch.cat(found, dim=2)


@dataclass(frozen=True)
class EagleCache(RootCache):
    """What the layer remembers of every row's text, as it is after :meth:`append`.

    Keys, rotated, and values are [B, H, L, h]; the root [B, d] is before the last norm.

    Attributes:
        heads: whose.
    """

    heads: EagleHeads

    def append(self, hidden: Tensor, counts: Sequence[int], tokens: Tensor) -> tuple[Self, Tensor]:
        """Read on.

        Args:
            hidden: [B, T, n * d], the base's at the taps, of the positions that follow,
                right-padded.
            counts: per row how many of the T are real; where it is 0, nothing changes.
            tokens: [B, T], the token that came after each of them, the root at the last one.

        Returns:
            The cache with them, and what the layer made of each row's last position, [B, d].
        """
        last = last_places(counts, self.ends.device)
        cache = self.moved(counts, self._read(hidden, tokens, last)[:, 0])
        return cache, cache.root

    def read(self, hidden: Tensor, counts: Sequence[int], tokens: Tensor) -> tuple[Self, Tensor]:
        """Do what :meth:`append` does; return what the layer made everywhere, [B, T, d]."""
        every = torch.arange(tokens.shape[1], device=self.ends.device).expand_as(tokens)
        made = self._read(hidden, tokens, every)
        last = last_places(counts, self.ends.device)
        return self.moved(counts, rows_at(made, last)[:, 0]), made

    @torch.no_grad()
    def _read(self, hidden: Tensor, tokens: Tensor, asked: Tensor) -> Tensor:
        """Remember new positions; return what the layer makes of those ``asked`` [B, Q]."""
        heads, layer = self.heads, self.heads.layer
        seen = self.slots.reserve(self.lengths, tokens.shape[1])
        places = self.ends[:, None] + torch.arange(tokens.shape[1], device=self.ends.device)
        stream, side = heads.read(heads.joined(hidden), tokens)
        table = self.slots.waves
        keys, values = self.slots.layers[0].update(*layer.keys(side, table[:, places]))
        at = places.gather(1, asked)
        mask = visible(at, seen)[:, None]

        def attend(queries: Tensor, _keys: Tensor, _values: Tensor) -> Tensor:
            return attended(queries, keys, values, mask)

        made = layer.run(rows_at(stream, asked), rows_at(side, asked), table[:, at], attend)
        return heads.made(made)


class EagleWalk(RootWalk):
    """One step's way down a tree.

    Args:
        logits: of states that the layer made [B, n, d], [B, n, V'].
        hidden: [B, d], what it made of the last position.
        root: [B], the tokens that came there.
        memory: of the texts up to there.
    """

    _memory: EagleCache

    def __init__(
        self, logits: Callable[[Tensor], Tensor], hidden: Tensor, root: Tensor, memory: EagleCache
    ) -> None:
        super().__init__(root, memory)
        self._logits, self._made = logits, hidden[:, None]  # [B, n, d], of the nodes at hand

    def logits(self) -> Tensor:
        """Return what is guessed below the nodes at hand, [B, n, V']."""
        return self._logits(self._made)

    def descend(self, tokens: Tensor, parents: Tensor) -> None:
        """Go to nodes one deeper.

        Args:
            tokens: [B, n'], the tokens of these nodes.
            parents: the places of their parents among the n nodes at hand, [n'] where all rows
                share them, else [B, n'].
        """
        memory, heads, num_before = self._memory, self._memory.heads, self._lines.shape[2]
        parents = self.go_to(tokens, parents)
        x, side = heads.read(rows_at(self._made, parents), tokens)
        # behind those of the levels above, which lie behind each row's text
        num_new, ends = tokens.shape[1], memory.ends[:, None]
        num_slots = memory.slots.reserve([n + num_before for n in memory.lengths], num_new)
        mask = self.seen(visible(ends - 1, num_slots), self._lines)[:, None]
        places = (ends + self.depth - 1).expand(-1, num_new)
        layer, cache = heads.layer, memory.slots.layers[0]

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return attended(queries, *cache.update(keys, values), mask)

        made = layer.run(x, side, memory.slots.waves[:, places], attend)
        self._made = heads.made(made)
