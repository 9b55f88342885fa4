"""A smaller language model as a drafter: it writes a few tokens ahead, the base verifies them.

Leviathan et al., arXiv:2211.17192. The draft model runs with a cache of its own
(:class:`DraftCache`) and makes one pass per drafted token; the first pass of a step also reads what
the text has gained. Vocabularies may differ in padding: tokens that the base does not have are
never proposed.

Besides the certain text the cache may hold guesses that were drafted behind it. Those which come
true stay; the rest is forgotten, which costs nothing. So every token is read once, but for one case
in which the logits after a token that is there already are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from specheads.attention.cache import TreeCache
from specheads.attention.tree import Tree
from specheads.drafters.contract import Candidates, Prefill, StepResult
from specheads.drafters.length import Length
from specheads.models.base import context_length, input_embedding
from specheads.models.forward import ModelPass, pad_rows
from specheads.models.support import tree_support
from specheads.verification.sampling import Sampler, draft_noise, noise_ahead

# tokens that are read as a tree that happens to be a chain, whose mask need not be built anew
MAX_CHAIN = 32


class DraftCache:
    """The rows' texts in a draft model, made by :meth:`start`.

    Attributes:
        forward: the model's passes. Whatever is verified behind the text (``forward.verify``)
            without a commit leaves no trace.
        texts: per row all certain tokens, the root included.
        room: tokens that the model was made for; None where its config does not say.
    """

    def __init__(self, draft: PreTrainedModel, texts: Sequence[Sequence[int]]) -> None:
        support = tree_support(draft)
        support.check_batch(len(texts))
        self.forward = ModelPass(draft, TreeCache(), chain_only=support.kind == "chain")
        self.texts = [list(text) for text in texts]
        self.room = context_length(draft)
        self._num_embeddings = input_embedding(draft).shape[0]

    @staticmethod
    def start(
        draft: PreTrainedModel, prefill: Prefill, previous: DraftCache | None = None
    ) -> DraftCache:
        """Start behind a prefill; nothing is read yet.

        Args:
            draft: the draft model, in eval mode.
            prefill: as the drafter got it.
            previous: where a conversation goes on behind a cache of the base's, what it holds is
                taken over as far as it is the same text; ``previous`` reads its own text again
                should anyone ask it.

        Raises:
            ConfigError: for a model that cannot be decoded step by step, or not so many rows.
        """
        roots = prefill.root.tolist()
        texts = [[*ids, root] for ids, root in zip(prefill.ids, roots, strict=True)]
        cache = DraftCache(draft, texts)
        goes_on = any(
            num < len(ids) for num, ids in zip(prefill.num_tokens, prefill.ids, strict=True)
        )
        if previous is not None and goes_on and len(previous.texts) == len(texts):
            held = previous.forward.cache
            if held.lengths:
                cache.forward.cache, previous.forward.cache = held, cache.forward.cache
                held.tokens = previous.texts
                held.align(texts)
                held.tokens = []  # kept here
        return cache

    @property
    def lengths(self) -> list[int]:
        """Per row the tokens in the cache; those behind the row's text are guesses."""
        return self.forward.cache.lengths or [0] * len(self.texts)

    def follow(
        self,
        new_tokens: Sequence[Sequence[int]],
        drafted: Sequence[Sequence[int]] | None = None,
    ) -> list[int]:
        """Append certain tokens to the texts; nothing is read yet.

        Args:
            new_tokens: per row the tokens gained; none where it has ended.
            drafted: per row what was guessed behind the text before; the front of it may have been
                read by :meth:`read`. None: nothing.

        Returns:
            Per row how many guesses came true.
        """
        matched = [0] * len(self.texts)
        if drafted is not None:
            for row, (new, guesses) in enumerate(zip(new_tokens, drafted, strict=True)):
                for ours, theirs in zip(guesses, new, strict=False):
                    if ours != theirs:
                        break
                    matched[row] += 1
        if self.forward.cache.lengths:
            self.forward.cache.shorten(
                [
                    min(length, len(text) + num)
                    for length, text, num in zip(self.lengths, self.texts, matched, strict=True)
                ]
            )
        for text, new in zip(self.texts, new_tokens, strict=True):
            text.extend(new)
        return matched

    @torch.inference_mode()
    def sync(self, new_tokens: Sequence[Sequence[int]] | None = None) -> Tensor:
        """Read what has not been read; return the logits after each row's last certain token.

        Args:
            new_tokens: per row tokens to append before, as :meth:`follow` does.

        Returns:
            [B, V] of the draft model, on its output's device.
        """
        if new_tokens is not None:
            self.follow(new_tokens)
        cache = self.forward.cache
        if cache.lengths and any(
            length >= len(text) for length, text in zip(cache.lengths, self.texts, strict=True)
        ):
            cache.shorten(
                [
                    min(length, len(text) - 1)
                    for length, text in zip(cache.lengths, self.texts, strict=True)
                ]
            )
        unread = [text[n:] for text, n in zip(self.texts, self.lengths, strict=True)]
        counts = [len(tokens) for tokens in unread]
        tokens = pad_rows(unread, self.forward.device).clamp_(max=self._num_embeddings - 1)
        width = tokens.shape[1]
        plain = width == 1 or width > MAX_CHAIN or self.forward.reaches_threshold(width)
        if plain or not cache.lengths:
            return self.forward.read(tokens, counts)
        logits = self.forward.verify(tokens, Tree.chain(width - 1))
        cache.extend(counts)
        if len(counts) == 1:
            return logits[:, -1]
        rows = torch.arange(len(counts), device=logits.device)
        return logits[rows, torch.tensor(counts, device=logits.device) - 1]

    @torch.inference_mode()
    def read(self, tokens: Tensor, going: Sequence[bool] | None = None) -> Tensor:
        """Read a guess behind each row's text, and the guesses read there before.

        Args:
            tokens: [B], of the draft model's vocabulary.
            going: which rows; the others stay as they are, and their logits mean nothing. None:
                all.

        Returns:
            Logits [B, V] after the guesses.
        """
        counts = [1] * len(self.texts) if going is None else [int(goes) for goes in going]
        return self.forward.read(tokens[:, None], counts)

    def select(self, rows: Tensor) -> None:
        """Keep the rows ``rows`` [R] (long), in that order."""
        if self.forward.cache.lengths:
            self.forward.cache.select(rows)
        self.texts = [self.texts[row] for row in rows.tolist()]


@dataclass
class DraftRows:
    """Where the rows of a batch stand, for drafters with a draft model.

    Attributes:
        cache: the draft model's view of the texts, root included.
        root: [B], the last certain token.
        rows: which rows of the batch these are, for their seeds.
        sampler: how the base model's tokens are drawn.
        vocab_size: V of the base model; 0: that of the draft model.
    """

    cache: DraftCache
    root: Tensor
    rows: list[int]
    sampler: Sampler
    vocab_size: int

    @staticmethod
    def start(
        draft: PreTrainedModel, prefill: Prefill, previous: DraftCache | None = None
    ) -> DraftRows:
        """Start behind the prompt; nothing is read yet.

        Args:
            draft: the draft model.
            prefill: as the drafter got it.
            previous: of the text before, see :meth:`DraftCache.start`.
        """
        cache = DraftCache.start(draft, prefill, previous)
        rows = list(range(len(prefill.ids)))
        return DraftRows(cache, prefill.root, rows, prefill.sampler, prefill.vocab_size)

    def observe(self, result: StepResult) -> DraftRows:
        """Append the tokens gained."""
        self.cache.follow(result.new_tokens)
        return replace(self, root=result.next_root)

    def select(self, rows: Tensor) -> DraftRows:
        """Keep some rows."""
        self.cache.select(rows)
        kept = [self.rows[row] for row in rows.tolist()]
        return replace(self, root=self.root[rows.to(self.root.device)], rows=kept)

    def limits(self, wanted: Sequence[int]) -> list[int]:
        """Return per row how deep its guesses may be: the draft model has positions for no more."""
        if (room := self.cache.room) is None:
            return list(wanted)
        # the deepest guess is not read
        return [
            max(0, min(limit, room - len(text) + 1))
            for limit, text in zip(wanted, self.cache.texts, strict=True)
        ]

    def shared(self, logits: Tensor) -> Tensor:
        """Bring the draft model's logits [..., V'] to the base model's tokens, [..., V]."""
        missing = self.vocab_size - logits.shape[-1]  # negative: what is too much is cut
        if not self.vocab_size or not missing:
            return logits
        return F.pad(logits, (0, missing), value=float("-inf"))

    def noise(self, num: int, logits: Tensor, *, coupled: bool) -> Tensor:
        """Return the noise [B, num, V'] of a step's draws.

        Args:
            num: levels if coupled, else draws that are to be independent.
            logits: [..., V'], what is drawn from.
            coupled: the noise that the base model draws with at the same positions; else noise that
                nothing else uses.
        """
        sampler, size, device = self.sampler, logits.shape[-1], logits.device
        after = [len(text) for text in self.cache.texts]  # where the first guess stands
        if coupled:
            whole = max(size, self.vocab_size)  # the base keeps noise of its own vocabulary
            return noise_ahead(sampler.seed, after, num, whole, device, self.rows)[..., :size]
        roots = torch.tensor(after, device=device) - 1
        return draft_noise(sampler.seed, roots, num, size, self.rows)


SAMPLINGS = ("greedy", "sampled", "coupled")


@dataclass
class DraftState:
    """Where the rows of one batch stand.

    Attributes:
        rows: the draft model's view of them.
        lengths: per row the state of the rule that says how long drafts are.
        ended: which rows gained nothing lately, and will gain nothing any more.
        drafted: [B, n], the guesses of this step; None before they are made.
        counts: per row how many of them are its own.
    """

    rows: DraftRows
    lengths: list[Any]
    ended: list[bool]
    drafted: Tensor | None = None
    counts: list[int] | None = None


class DraftModelDrafter:
    """Proposes a chain that a draft model wrote.

    It keeps the cache of its latest texts, for the next turn of a conversation.

    Args:
        draft: the draft model, in eval mode, with the base's token ids; device and dtype are its
            own.
        length: how many tokens it writes, see :mod:`specheads.drafters.length`. Rows of a batch
            stop alone. Near the end of what the draft model has positions for there are fewer, and
            none behind it.
        sampling: how they are chosen, by the base's temperature, top-k and top-p:
            greedy: the draft's most likely token. At a temperature above 0 a guess is accepted with
            the base's probability of it.
            sampled: drawn from the draft's distribution, with noise that nothing else uses;
            verified as a block, which accepts at least 1 - TV (total variation distance) per token
            and is the best that an exact rule can do. Output has the base's distribution, but is
            not plain decoding's for the seed.
            coupled: drawn from the draft's distribution with the very noise that the base will draw
            with at that position; accepted where both draw the same, at least with probability
            (1 - TV) / (1 + TV) (arXiv:2408.07978). A function of text and seed, so that output is
            plain decoding's for the seed.
            At temperature 0 all three are greedy.

    Raises:
        ValueError: for an unknown ``sampling``, or a draft model in training mode.
        ConfigError: for a draft model that cannot be decoded step by step.
    """

    taps: tuple[str, ...] = ()

    def __init__(self, draft: PreTrainedModel, length: Length, *, sampling: str = "greedy") -> None:
        if sampling not in SAMPLINGS:
            raise ValueError(f"sampling must be one of {SAMPLINGS}, got {sampling!r}")
        tree_support(draft)  # so that it is refused before the base reads anything
        self.draft, self.length, self.sampling = draft, length, sampling
        self._latest: DraftCache | None = None

    @property
    def deterministic(self) -> bool:
        """Whether the candidates are a function of text and seed."""
        return self.sampling != "sampled"

    def start(self, prefill: Prefill) -> DraftState:
        """Take the texts; they are read with the first proposal."""
        rows = DraftRows.start(self.draft, prefill, self._latest)
        self._latest, num_rows = rows.cache, len(rows.rows)
        lengths = [self.length.start() for _ in range(num_rows)]
        return DraftState(rows, lengths, [False] * num_rows)

    @torch.inference_mode()
    def propose(self, state: DraftState) -> Candidates:
        """One pass of the draft model per token, for all rows that go on."""
        rows, root = state.rows, state.rows.root[:, None]
        limits = rows.limits(
            [
                0 if ended else self.length.limit(each)
                for each, ended in zip(state.lengths, state.ended, strict=True)
            ]
        )
        state.counts, state.drafted = [0] * len(limits), None
        if not any(limits):
            return Candidates(root, Tree.chain(0).to(root.device))
        counts, length, sampler = state.counts, self.length, rows.sampler
        known = rows.vocab_size or None  # outputs that the base model does not have are cut
        logits = rows.cache.sync()[:, :known]
        noise = None
        if self.sampling != "greedy" and sampler.temperature > 0:
            noise = rows.noise(max(limits), logits, coupled=self.sampling == "coupled")
        keeps_probs = noise is not None and self.sampling == "sampled"
        tokens_of: list[Tensor] = []
        probs_of: list[Tensor] = []
        said: list[tuple[list[float], list[float]]] = [([], []) for _ in limits]
        going = [limit > 0 for limit in limits]
        while True:
            if noise is None:
                tokens = logits.argmax(-1)
            else:
                logits = sampler.warp(logits)
                tokens = (logits + noise[:, len(tokens_of)]).argmax(-1)
            tokens_of.append(tokens)
            for row, goes in enumerate(going):
                counts[row] += goes
                going[row] = goes and counts[row] < limits[row]
            if keeps_probs or (length.asks and any(going)):
                probs = sampler.probs(logits) if noise is None else logits.softmax(-1)
                if keeps_probs:
                    probs_of.append(probs)
                if length.asks:
                    _ask(length, probs, tokens, said, going)
            if not any(going):
                break
            logits = rows.cache.read(tokens, going)[:, :known]
        drafted = torch.stack(tokens_of, dim=1).to(root.device)
        if min(counts) < len(tokens_of):
            level = torch.arange(len(tokens_of), device=root.device)
            own = level < torch.tensor(counts, device=root.device)[:, None]
            drafted = drafted.masked_fill(~own, -1)
        state.drafted = drafted
        tree = Tree.chain(len(tokens_of)).to(root.device)
        tokens = torch.cat([root, drafted], dim=1)
        if not keeps_probs:
            return Candidates(tokens, tree)
        return Candidates(tokens, tree, _draft_probs(probs_of, rows.vocab_size), "chain")

    def observe(self, state: DraftState, result: StepResult) -> DraftState:
        """Note what was gained; it is read with the next proposal."""
        counts, new_tokens = state.counts, result.new_tokens
        drafted = None
        if counts is not None and state.drafted is not None:
            guesses = state.drafted.tolist()
            drafted = [row[:num] for row, num in zip(guesses, counts, strict=True)]
        matched = state.rows.cache.follow(new_tokens, drafted)
        state.ended = [not new for new in new_tokens]
        own = None if result.own is None else result.own.tolist()
        if counts is not None:  # else it was not asked
            for row, (new, num_proposed, num) in enumerate(
                zip(new_tokens, counts, matched, strict=True)
            ):
                if not new or (own is not None and max(own[row], default=-1) < 0):
                    continue  # it has ended, or only other rows of the batch wanted guesses
                if not self.deterministic:
                    # a token drawn in place of a refused guess may be the same one
                    num = min(num, len(new) - 1)
                if num == len(new):  # what was drafted behind that, nobody has verified
                    num_proposed = num
                state.lengths[row] = self.length.observe(state.lengths[row], num_proposed, num)
        rows = replace(state.rows, root=result.next_root)
        return DraftState(rows, state.lengths, state.ended)

    def select(self, state: DraftState, rows: Tensor) -> DraftState:
        """Keep some rows."""
        kept = rows.tolist()
        return DraftState(
            state.rows.select(rows),
            [state.lengths[row] for row in kept],
            [state.ended[row] for row in kept],
        )


def _ask(
    length: Length,
    probs: Tensor,
    tokens: Tensor,
    said: Sequence[tuple[list[float], list[float]]],
    going: list[bool],
) -> None:
    """Ask for every row that might go on whether it does; ``going`` and ``said`` are changed.

    Args:
        length: the rule.
        probs: [B, V'], the draft's distribution.
        tokens: [B], what was chosen from it.
        said: per row the probabilities and entropies of this step so far.
        going: per row.
    """
    chosen = probs.gather(1, tokens[:, None])[:, 0]
    both = torch.stack([chosen, torch.special.entr(probs).sum(-1)]).tolist()
    for row, (prob, entropy) in enumerate(zip(*both, strict=True)):
        if going[row]:
            said[row][0].append(prob)
            said[row][1].append(entropy)
            going[row] = length.goes_on(*said[row])


def _draft_probs(probs_of: Sequence[Tensor], vocab_size: int) -> Tensor:
    """Return [B, n + 1, V] of the base's vocabulary from n times [B, V']; the last are zeros."""
    probs = torch.stack([*probs_of, torch.zeros_like(probs_of[0])], dim=1)
    missing = vocab_size - probs.shape[-1]
    return F.pad(probs, (0, missing)) if missing > 0 else probs
