"""A draft model's view of the rows' texts: what its KV cache holds, and what it has yet to read.

Besides the certain text the cache may hold guesses that were drafted behind it. Those which come
true stay; the rest is forgotten, which costs nothing. So every token is read once, but for one case
in which the logits after a token that is there already are needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.drafters.contract import Prefill
from specheads.kv_cache import TreeCache
from specheads.models.base import context_length, input_embedding
from specheads.models.forward import ModelPass, pad_rows
from specheads.tree import Tree
from specheads.tree_support import tree_support

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
