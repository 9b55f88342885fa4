"""Which acceptance rule decides about a step's candidates."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specheads.acceptance import merge_siblings
from specheads.drafters.contract import Candidates
from specheads.lossy import check_lenience, lenient, lenient_greedy, typical
from specheads.rejection import Randomness, block, reject

RULES = ("exact", "walk", "lossy_typical", "lossy_lenient")


@dataclass(frozen=True)
class Acceptance:
    """How candidates are accepted.

    Attributes:
        rule: one of ``RULES``:
            exact: the base model's distribution, by the rule that accepts the most: sample-and-walk
            for deterministic candidates and at temperature 0, recursive rejection for sampled
            siblings, block verification for sampled chains.
            walk: sample-and-walk for all; with a seed, the tokens of plain decoding even where
            candidates are sampled.
            lossy_typical, lossy_lenient: NOT the base model's distribution, see
            :mod:`specheads.lossy`. At temperature 0 they compare likelihoods at temperature 1.
        epsilon: of lossy_typical; larger is stricter.
        delta: of lossy_typical; larger is stricter.
        lenience: of lossy_lenient; 1 is exact, smaller accepts more.
    """

    rule: str = "exact"
    epsilon: float = 0.09
    delta: float = 0.3
    lenience: float = 0.5

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"acceptance rule must be one of {RULES}, got {self.rule!r}")
        if self.epsilon < 0 or self.delta < 0:
            raise ValueError(
                f"epsilon and delta must be at least 0, got {self.epsilon} and {self.delta}"
            )
        check_lenience(self.lenience)

    @property
    def lossless(self) -> bool:
        """Whether the output is distributed as the base model's."""
        return not self.rule.startswith("lossy")

    def walks(self, candidates: Candidates, *, greedy: bool) -> bool:
        """Whether the base model's own draws decide; :meth:`decide` is for all other cases."""
        sampled = candidates.sampling != "none"
        return self.rule == "walk" or (self.rule == "exact" and (greedy or not sampled))

    def decide(
        self, candidates: Candidates, base_probs: Tensor, chance: Randomness, *, greedy: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Apply the rule.

        Args:
            candidates: the trees.
            base_probs: [B, N, V], after all warpers, each given its node's prefix; at temperature
                0 those of temperature 1.
            chance: the random choices.
            greedy: whether temperature is 0.

        Returns:
            path: [B, D+1], padded with -1.
            num_accepted: [B].
            next_token: [B].
        """
        tokens, tree, sampling = candidates.tokens, candidates.tree, candidates.sampling
        draft_probs = candidates.draft_probs
        if draft_probs is not None:
            draft_probs = draft_probs.to(base_probs)
        if self.rule == "lossy_typical":
            return typical(tokens, tree, base_probs, epsilon=self.epsilon, delta=self.delta)
        if self.rule == "lossy_lenient" and greedy:
            return lenient_greedy(tokens, tree, base_probs, lenience=self.lenience)
        if sampling == "none":
            tokens, tree = merge_siblings(tokens, tree)
        if self.rule == "lossy_lenient":
            return lenient(
                tokens,
                tree,
                base_probs,
                draft_probs,
                chance,
                lenience=self.lenience,
                sampling=sampling,
            )
        if sampling == "chain" and draft_probs is not None:
            return block(tokens, base_probs, draft_probs, chance)
        return reject(tokens, tree, base_probs, draft_probs, chance, sampling)
