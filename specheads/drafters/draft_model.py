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
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from specheads.attention.cache import TreeCache
from specheads.attention.tree import RowTrees, Tree
from specheads.drafters.contract import Candidates, Prefill, StepResult, picked
from specheads.drafters.length import Length
from specheads.models.base import context_length, input_embedding
from specheads.models.forward import ModelPass, pad_rows
from specheads.models.support import tree_support
from specheads.system.errors import one_of
from specheads.verification.sampling import draft_noise

# tokens that are read as a tree that happens to be a chain, whose mask need not be built anew
MAX_CHAIN = 32


class DraftCache:
    """The rows' texts in a draft model, and how the base model's tokens are drawn.

    It is changed in place; nothing is read before a drafter proposes.

    Args:
        draft: the draft model, in eval mode.
        prefill: as the drafter got it.
        previous: where a conversation goes on behind a cache of the base's, what it holds is taken
            over as far as it is the same text; ``previous`` reads its own text again should anyone
            ask it.

    Attributes:
        forward: the model's passes. Whatever is verified behind the text (``forward.verify``)
            without a commit leaves no trace.
        texts: per row all certain tokens, the root included.
        root: [B], the last of them.
        rows: which rows of the batch these are, for their seeds.
        sampler: how the base model's tokens are drawn.
        vocab_size: V of the base model; 0: that of the draft model.
        room: tokens that the model was made for; None where its config does not say.

    Raises:
        ConfigError: for a model that cannot be decoded step by step, or not so many rows.
    """

    def __init__(
        self, draft: PreTrainedModel, prefill: Prefill, previous: DraftCache | None = None
    ) -> None:
        support, self.root = tree_support(draft), prefill.root
        roots = self.root.tolist()
        self.texts = [[*ids, root] for ids, root in zip(prefill.ids, roots, strict=True)]
        support.check_batch(len(self.texts))
        self.forward = ModelPass(draft, TreeCache(), chain_only=support.kind == "chain")
        self.rows = prefill.rows
        self.sampler, self.vocab_size = prefill.sampler, prefill.vocab_size
        self.room = context_length(draft)
        self._num_embeddings = input_embedding(draft).shape[0]
        goes_on = [*map(len, prefill.ids)] != list(prefill.num_tokens)
        if previous is not None and goes_on and len(previous.texts) == len(self.texts):
            held = previous.forward.cache
            if held.lengths:
                self.forward.cache, previous.forward.cache = held, self.forward.cache
                held.tokens = previous.texts
                held.align(self.texts)
                # the texts are kept here, where they grow without the cache being told
                held.tokens = []

    @property
    def lengths(self) -> list[int]:
        """Per row the tokens in the cache; those behind the row's text are guesses."""
        return self.forward.cache.lengths or [0] * len(self.texts)

    def _forget(self, behind: Sequence[int]) -> None:
        """Keep at most so many tokens of each row."""
        if held := self.forward.cache.lengths:
            self.forward.cache.shorten([min(*each) for each in zip(held, behind, strict=True)])

    def follow(
        self, new_tokens: Sequence[Sequence[int]], drafted: Sequence[Sequence[int]] | None = None
    ) -> list[int]:
        """Append certain tokens to the texts; nothing is read yet.

        Args:
            new_tokens: per row the tokens gained; none where it has ended.
            drafted: per row what was guessed behind the text before; the front of it may have been
                read by :meth:`read`. None: nothing.

        Returns:
            Per row how many guesses came true.
        """
        pairs = zip(new_tokens, drafted or [()] * len(self.texts), strict=True)
        # commonprefix is made for paths, and takes any lists
        matched = [len(commonprefix([list(new), list(guessed)])) for new, guessed in pairs]
        self._forget([len(text) + num for text, num in zip(self.texts, matched, strict=True)])
        for text, new in zip(self.texts, new_tokens, strict=True):
            text.extend(new)
        return matched

    def observe(self, result: StepResult) -> DraftCache:
        """Append the tokens gained."""
        self.follow(result.new_tokens)
        self.root = result.next_root
        return self

    @torch.inference_mode()
    def sync(self) -> Tensor:
        """Read what has not been read; return the logits after each row's last certain token.

        Returns:
            [B, V] of the draft model, on its output's device.
        """
        # the last token is read again where its logits are gone
        self._forget([len(text) - 1 for text in self.texts])
        unread = [text[n:] for text, n in zip(self.texts, self.lengths, strict=True)]
        counts = [len(tokens) for tokens in unread]
        tokens = pad_rows(unread, self.forward.device).clamp_(max=self._num_embeddings - 1)
        width, cache = tokens.shape[1], self.forward.cache
        plain = width == 1 or width > MAX_CHAIN or self.forward.reaches_threshold(width)
        if plain or not cache.lengths:
            return self.forward.read(tokens, counts)
        logits = self.forward.verify(tokens, Tree.chain(width - 1))
        cache.extend(counts)
        rows = torch.arange(len(counts), device=logits.device)
        return logits[rows, torch.tensor(counts, device=logits.device) - 1]

    @torch.inference_mode()
    def read(self, tokens: Tensor, going: Sequence[bool]) -> Tensor:
        """Read a guess behind each row's text, and the guesses read there before.

        Args:
            tokens: [B], of the draft model's vocabulary.
            going: which rows; the others stay as they are, and their logits mean nothing.

        Returns:
            Logits [B, V] after the guesses.
        """
        return self.forward.read(tokens[:, None], list(map(int, going)))

    def verify_again(self, tokens: Tensor, tree: Tree | RowTrees) -> Tensor:
        """Return the logits [B, N, V'] at a tree whose root is the last token held.

        The cache is left as it was.

        Args:
            tokens: [B, N], node 0 the last certain token.
            tree: their shape.
        """
        held = self.forward.cache
        held.crop(-1)
        # the root may be a token that only the base model has
        logits = self.forward.verify(tokens.clamp(max=self._num_embeddings - 1), tree)
        held.extend([1] * len(held.lengths))
        return logits

    def select(self, rows: Tensor) -> DraftCache:
        """Keep the rows ``rows`` [R] (long), in that order."""
        if self.forward.cache.lengths:
            self.forward.cache.select(rows)
        kept = rows.tolist()
        self.texts, self.rows = picked(self.texts, kept), [self.rows[i] for i in kept]
        self.root = self.root[rows.to(self.root.device)]
        return self

    def join(self, other: DraftCache) -> DraftCache:
        """Take over the rows of ``other``; both read what they have not."""
        for each in (self, other):
            each.sync()
        self.forward.cache.join(other.forward.cache)
        self.texts, self.rows = self.texts + other.texts, self.rows + other.rows
        self.root = torch.cat([self.root, other.root])
        return self

    def limits(self, wanted: Sequence[int]) -> list[int]:
        """Return per row how deep its guesses may be: the draft model has positions for no more."""
        if self.room is None:
            return list(wanted)
        pairs = zip(wanted, self.texts, strict=True)
        # the deepest guess is not read
        return [max(0, min(limit, self.room - len(text) + 1)) for limit, text in pairs]

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
        size, device = logits.shape[-1], logits.device
        after = [len(text) for text in self.texts]  # where the first guess stands
        if coupled:
            whole = max(size, self.vocab_size)  # the base keeps noise of its own vocabulary
            return self.sampler.noise_from(after, num, whole, device, self.rows)[..., :size]
        roots = torch.tensor(after, device=device) - 1
        return draft_noise(self.sampler.seeds_of(self.rows), roots, num, size)


SAMPLINGS = ("greedy", "sampled", "coupled")


@dataclass
class DraftState:
    """Where the rows of one batch stand.

    Attributes:
        cache: the draft model's view of them.
        lengths: per row the state of the rule that says how long drafts are.
        ended: which rows gained nothing lately, and will gain nothing any more.
        drafted: [B, n], the guesses of this step, padded with -1; None before it was asked for any.
    """

    cache: DraftCache
    lengths: list[Any]
    ended: list[bool]
    drafted: Tensor | None = None


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

    Attributes:
        deterministic: whether the candidates are a function of text and seed.

    Raises:
        ValueError: for an unknown ``sampling``, or a draft model in training mode.
        ConfigError: for a draft model that cannot be decoded step by step.
    """

    taps: tuple[str, ...] = ()

    def __init__(self, draft: PreTrainedModel, length: Length, *, sampling: str = "greedy") -> None:
        one_of("sampling", sampling, *SAMPLINGS)
        tree_support(draft)  # so that it is refused before the base reads anything
        self.draft, self.length, self.sampling = draft, length, sampling
        self.deterministic = sampling != "sampled"
        self._latest: DraftCache | None = None

    def start(self, prefill: Prefill) -> DraftState:
        """Take the texts; they are read with the first proposal."""
        self._latest = cache = DraftCache(self.draft, prefill, self._latest)
        lengths = [self.length.start() for _ in cache.rows]
        return DraftState(cache, lengths, [False] * len(lengths))

    @torch.inference_mode()
    def propose(self, state: DraftState) -> Candidates:
        """One pass of the draft model per token, for all rows that go on."""
        cache, length, sampler = state.cache, self.length, state.cache.sampler
        root = cache.root[:, None]
        rows = zip(state.lengths, state.ended, strict=True)
        limits = cache.limits([0 if ended else length.limit(each) for each, ended in rows])
        state.drafted = root[:, :0]
        if not any(limits):
            return Candidates(root, Tree.chain(0).to(root.device))
        known = cache.vocab_size or None  # outputs that the base model does not have are cut
        logits = cache.sync()[:, :known]
        noise = None
        if self.sampling != "greedy" and sampler.temperature > 0:
            noise = cache.noise(max(limits), logits, coupled=self.sampling == "coupled")
        keeps_probs = noise is not None and self.sampling == "sampled"
        tokens_of: list[Tensor] = []
        probs_of: list[Tensor] = []
        said: list[list[float]] = [[] for _ in limits]
        counts, going = [0] * len(limits), [limit > 0 for limit in limits]
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
                    self._ask(probs, tokens, said, going)
            if not any(going):
                break
            logits = cache.read(tokens, going)[:, :known]
        drafted = torch.stack(tokens_of, dim=1).to(root.device)
        if min(counts) < len(tokens_of):
            level = torch.arange(len(tokens_of), device=root.device)
            own = level < torch.tensor(counts, device=root.device)[:, None]
            drafted = drafted.masked_fill(~own, -1)
        state.drafted = drafted
        tree = Tree.chain(len(tokens_of)).to(root.device)
        tokens = torch.cat([root, drafted], dim=1)
        if not keeps_probs:
            return Candidates(tokens, tree, follows_noise=noise is not None)
        return Candidates(tokens, tree, _draft_probs(probs_of, cache.vocab_size), "chain")

    def _ask(
        self, probs: Tensor, tokens: Tensor, said: Sequence[list[float]], going: list[bool]
    ) -> None:
        """Ask for every row that might go on whether it does; ``going`` and ``said`` are changed.

        Args:
            probs: [B, V'], the draft's distribution.
            tokens: [B], what was chosen from it.
            said: per row the probabilities of the tokens of this step so far.
            going: per row.
        """
        for row, prob in enumerate(probs.gather(1, tokens[:, None])[:, 0].tolist()):
            if going[row]:
                said[row].append(prob)
                going[row] = self.length.goes_on(said[row])

    def observe(self, state: DraftState, result: StepResult) -> DraftState:
        """Note what was gained; it is read with the next proposal."""
        drafted, new_tokens = None, result.new_tokens
        if state.drafted is not None:
            drafted = [[token for token in row if token >= 0] for row in state.drafted.tolist()]
        matched = state.cache.follow(new_tokens, drafted)
        state.cache.root = result.next_root
        if drafted is not None:  # else it was not asked
            for row, own in enumerate(result.places):
                num_new, num_proposed, num = len(new_tokens[row]), len(drafted[row]), matched[row]
                if not num_new or max(own, default=-1) < 0:
                    continue  # it has ended, or only other rows of the batch wanted guesses
                if not self.deterministic:
                    # a token drawn in place of a refused guess may be the same one
                    num = min(num, num_new - 1)
                if num == num_new:  # what was drafted behind that, nobody has verified
                    num_proposed = num
                state.lengths[row] = self.length.observe(state.lengths[row], num_proposed, num)
        return DraftState(state.cache, state.lengths, [not new for new in new_tokens])

    def select(self, state: DraftState, rows: Tensor) -> DraftState:
        """Keep some rows."""
        kept = rows.tolist()
        lengths, ended = [state.lengths[row] for row in kept], [state.ended[row] for row in kept]
        return DraftState(state.cache.select(rows), lengths, ended)

    def join(self, state: DraftState, other: DraftState) -> DraftState:
        """Take the rows of both."""
        lengths, ended = state.lengths + other.lengths, state.ended + other.ended
        return DraftState(state.cache.join(other.cache), lengths, ended)


def _draft_probs(probs_of: Sequence[Tensor], vocab_size: int) -> Tensor:
    """Return [B, n + 1, V] of the base's vocabulary from n times [B, V']; the last are zeros."""
    probs = torch.stack([*probs_of, torch.zeros_like(probs_of[0])], dim=1)
    return F.pad(probs, (0, max(0, vocab_size - probs.shape[-1])))
