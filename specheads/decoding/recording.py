"""Record what drafts of full length would have been worth at every position of a plain text.

With deterministic guesses (greedy or coupled ones of a draft model, copies of the text) the tokens
do not depend on how many are drafted: they are plain decoding's. One recording then serves every
rule of draft length, see :mod:`specheads.decoding.judging`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.plain import plain_decode
from specheads.drafters.contract import Drafter, Prefill, StepResult
from specheads.models.draft import vocab_size
from specheads.sampling import Sampler

if TYPE_CHECKING:
    from specheads.drafters.length import Length


@dataclass(frozen=True)
class Recording:
    """What a draft of the full length would have been at every position of one plain text.

    Position t stands behind new token t, the root of a step; the last token has none. Lists have
    one entry per position.

    Attributes:
        kind: of the prompt.
        max_tokens: length of the recorded drafts; some may be shorter, where a drafter had no more.
        max_new_tokens: the limit under which the text was decoded.
        num_drafted: tokens drafted there.
        num_right: how many of them, from the first on, are the text's.
        probs: what the draft model gave each drafted token, but for the last, after which no rule
            is asked.
        entropies: likewise, of its distributions, in nats.
    """

    kind: str
    max_tokens: int
    max_new_tokens: int
    num_drafted: tuple[int, ...]
    num_right: tuple[int, ...]
    probs: tuple[tuple[float, ...], ...] = ()
    entropies: tuple[tuple[float, ...], ...] = ()

    @property
    def num_tokens(self) -> int:
        """New tokens of the text, that of the prefill included."""
        return len(self.num_right) + 1

    def decided(self) -> list[tuple[int, bool]]:
        """Return per position the tokens that were right, and whether one after them was wrong.

        It was not where none was drafted, or the text ended there.
        """
        left = range(len(self.num_right), 0, -1)
        return [
            (right, right < min(drafted, rest))
            for right, drafted, rest in zip(self.num_right, self.num_drafted, left, strict=True)
        ]


class Listening:
    """A ``Length`` that always drafts ``max_tokens`` and remembers what it was shown."""

    asks = True

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.probs: tuple[float, ...] = ()
        self.entropies: tuple[float, ...] = ()

    def start(self) -> None:
        """There is nothing to remember from step to step."""

    def limit(self, state: None) -> int:
        """Return ``max_tokens``."""
        return self.max_tokens

    def goes_on(self, probs: Sequence[float], entropies: Sequence[float]) -> bool:
        """Remember; never stop."""
        self.probs, self.entropies = tuple(probs), tuple(entropies)
        return True

    def observe(self, state: None, num_proposed: int, num_accepted: int) -> None:
        """Forget."""


def record(
    base: PreTrainedModel,
    make: Callable[[Length], Drafter],
    input_ids: Tensor,
    *,
    max_tokens: int,
    max_new_tokens: int,
    kind: str = "",
    sampler: Sampler | None = None,
    eos_token_ids: Collection[int] = (),
) -> Recording:
    """Decode one prompt plainly, and let a drafter draft at every position of the text.

    Args:
        base: base model.
        make: returns the drafter of chains whose length a ``Length`` sets; it must need no hidden
            states, and its guesses must be a function of the text and the seed.
        input_ids: [1, P].
        max_tokens: to draft at every position.
        max_new_tokens: limit of the text.
        kind: of the prompt.
        sampler: how the base's tokens are drawn; greedy if None.
        eos_token_ids: end the text.

    Raises:
        ValueError: for a drafter that samples its guesses or taps hidden states.
    """
    sampler = Sampler() if sampler is None else sampler
    ear = Listening(max_tokens)
    drafter = make(ear)
    if not drafter.deterministic or drafter.taps:
        raise ValueError(
            "only drafters with deterministic guesses and without taps can be recorded, got "
            f"{type(drafter).__name__} (deterministic={drafter.deterministic}, "
            f"taps={drafter.taps})"
        )
    new = plain_decode(
        base,
        input_ids,
        max_new_tokens=max_new_tokens,
        sampler=sampler,
        eos_token_ids=eos_token_ids,
    ).new_tokens
    num_drafted: list[int] = []
    num_right: list[int] = []
    probs: list[tuple[float, ...]] = []
    entropies: list[tuple[float, ...]] = []
    with torch.inference_mode():
        root = input_ids.new_tensor(new[:1])
        prompt = input_ids.tolist()
        prefill = Prefill(prompt, input_ids, [len(prompt[0])], {}, root, sampler, vocab_size(base))
        state = drafter.start(prefill)
        for t, truth in enumerate(new[1:], start=1):
            ear.probs = ear.entropies = ()
            candidates = drafter.propose(state)
            chain = [token for token in candidates.tokens[0, 1:].tolist() if token >= 0]
            num_right.append(_num_equal(chain, new[t:]))
            num_drafted.append(len(chain))
            probs.append(ear.probs)
            entropies.append(ear.entropies)
            path = torch.full((1, candidates.tree.max_depth + 1), -1, device=root.device)
            path[0, 0] = 0
            root = input_ids.new_tensor([truth])
            rejected = StepResult(  # the base's token came, and no guess was looked at
                candidates.tree,
                candidates.tokens,
                root.new_full(candidates.tokens.shape, truth),
                {},
                path,
                torch.zeros_like(root),
                root,
                [[truth]],
            )
            state = drafter.observe(state, rejected)
    return Recording(
        kind,
        max_tokens,
        max_new_tokens,
        tuple(num_drafted),
        tuple(num_right),
        tuple(probs),
        tuple(entropies),
    )


def _num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many tokens two texts have in common from their start on."""
    num = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        num += 1
    return num
