"""The accept phase of a step: from the base model's logits at the nodes to the path that is kept.

:class:`Acceptance` says which rule decides. Where the base model's own draws decide, the tree is
walked along them, and near-ties on the way are settled; else a rule of
:mod:`specheads.verification` decides from the distributions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from specheads.attention.tree import Tree
from specheads.decoding.choose import Chooser
from specheads.decoding.processors import Rows
from specheads.drafters.contract import Candidates, StepResult
from specheads.drafters.growing import padded
from specheads.system.errors import at_least, one_of, within
from specheads.verification import acceptance as rules
from specheads.verification.sampling import Chance

BOUNDED = {"lossy_kl": "kl", "lossy_tv": "tv"}  # and what bounds them
RULES = ("exact", "walk", *BOUNDED, "lossy_typical", "lossy_lenient")


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
            lossy_kl, lossy_tv: NOT the base model's distribution, but within ``bound`` of it, see
            ``tilted`` in :mod:`specheads.verification.acceptance`. At temperature 0, where there is
            one token to be near to, and with a bound of 0 they are exact.
            lossy_typical, lossy_lenient: NOT the base model's distribution, see ``typical`` and
            ``reject`` in :mod:`specheads.verification.acceptance`. At temperature 0 they compare
            likelihoods at temperature 1.
        epsilon: of lossy_typical; larger is stricter.
        delta: of lossy_typical; larger is stricter.
        lenience: of lossy_lenient; 1 is exact, smaller accepts more.
        bound: of lossy_kl in nats, of lossy_tv a probability; of every token, given its prefix.
    """

    rule: str = "exact"
    epsilon: float = 0.09
    delta: float = 0.3
    lenience: float = 0.5
    bound: float = 0.0

    def __post_init__(self) -> None:
        one_of("acceptance rule", self.rule, *RULES)
        at_least(self, epsilon=0, delta=0, bound=0)
        within(self, lenience="(0, 1]")
        if self.rule == "lossy_tv":
            within(self, bound="[0, 1]")

    @property
    def lossless(self) -> bool:
        """Whether the output is distributed as the base model's."""
        return not self.rule.startswith("lossy") or (self.rule in BOUNDED and self.bound == 0)

    @property
    def follows_draws(self) -> bool:
        """Whether the base model's draws decide, all or most, so that guesses may follow them."""
        return self.lossless or self.rule in BOUNDED

    @property
    def label(self) -> str:
        """What output under a lossy rule is to be called; empty where nothing is lost."""
        if self.lossless:
            return ""
        numbers = {"lossy_typical": ("epsilon", "delta"), "lossy_lenient": ("lenience",)}
        names = numbers.get(self.rule, ("bound",))
        return f"{self.rule}, " + ", ".join(f"{name} {getattr(self, name):g}" for name in names)

    def walks(self, candidates: Candidates, *, greedy: bool) -> bool:
        """Whether the base model's own draws decide; :meth:`decide` is for all other cases.

        Under a bounded rule some of them are converted where guesses follow their noise.
        """
        if self.rule == "walk" or greedy:
            return self.lossless or self.rule in BOUNDED
        converts = self.rule in BOUNDED and candidates.follows_noise
        return (self.lossless or converts) and candidates.sampling == "none"

    def output_probs(
        self, candidates: Candidates, base_probs: Tensor, *, greedy: bool
    ) -> Tensor | None:
        """Return what tokens are drawn from after each node, given its prefix, under a lossy rule.

        Args:
            candidates: the trees, equal siblings merged.
            base_probs: see :meth:`decide`.
            greedy: whether temperature is 0.

        Returns:
            [B, N, V]; not a number where there is no closed form (lossy_lenient with siblings that
            were sampled); None where a rule leaves nothing to chance.
        """
        tokens, tree, drafted = candidates.tokens, candidates.tree, candidates.draft_probs
        if self.rule in BOUNDED:
            among = rules.guessed(tokens, tree, base_probs.shape[-1])
            if drafted is not None:  # where there are no guesses, there is nothing to be near to
                among = torch.where(among.any(-1, keepdim=True), drafted.to(base_probs), base_probs)
            return rules.tilted(base_probs, among, self.bound, BOUNDED[self.rule])
        if self.rule == "lossy_typical" or greedy:
            return None
        if candidates.sampling == "without_replacement":
            return torch.full_like(base_probs, torch.nan)
        drafted = None if drafted is None else drafted.to(base_probs)
        return rules.leniently(tokens, tree, base_probs, drafted, self.lenience)

    def decide(
        self, candidates: Candidates, base_probs: Tensor, chance: Chance, *, greedy: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Apply the rule.

        Args:
            candidates: the trees, equal siblings merged where they are deterministic.
            base_probs: [B, N, V], after all warpers, each given its node's prefix; at temperature
                0 those of temperature 1; of lossy_kl and lossy_tv those of :meth:`output_probs`.
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
            return rules.typical(tokens, tree, base_probs, epsilon=self.epsilon, delta=self.delta)
        lenient = self.rule == "lossy_lenient"
        if lenient and greedy:
            return rules.lenient_greedy(tokens, tree, base_probs, lenience=self.lenience)
        if sampling == "chain" and draft_probs is not None and not lenient:
            return rules.block(tokens, base_probs, draft_probs, chance)
        lenience = self.lenience if lenient else 1.0
        return rules.reject(tokens, tree, base_probs, draft_probs, chance, sampling, lenience)


def accept(
    candidates: Candidates,
    logits: Tensor,
    hidden: dict[str, Tensor],
    chooser: Chooser,
    rows: Rows,
    acceptance: Acceptance,
) -> tuple[StepResult, Tensor]:
    """Accept a path of the tree, and give the token after it.

    Args:
        candidates: what was verified.
        logits: [B, N, V].
        hidden: tap -> [B, N, d].
        chooser: how tokens are chosen.
        rows: whose texts the trees continue.
        acceptance: the rule.

    Returns:
        The result, and the logits [B, N, V] after processors.
    """
    greedy = chooser.sampler.temperature == 0
    if not acceptance.walks(candidates, greedy=greedy):
        found = _apply_rule(candidates, logits, chooser, rows, acceptance)
    elif greedy or acceptance.lossless:
        found = _walk_down(candidates, logits, chooser, rows)
    else:
        found = _walk_converted(candidates, logits, chooser, rows, acceptance)
    base_tokens, processed, followed, divergence = found
    tree, tokens, own = candidates.tree, candidates.tokens, candidates.own
    result = StepResult(tree, tokens, base_tokens, hidden, *followed, own, divergence)
    return result, processed


# path [B, D+1], num_accepted [B], next_root [B], tokens gained: as they stand in a StepResult
Followed = tuple[Tensor, Tensor, Tensor, list[list[int]]]
# tokens [B, N], logits [B, N, V] after processors, the way, and a lossy rule's divergence
Found = tuple[Tensor, Tensor, Followed, Tensor | None]


def _walk_down(candidates: Candidates, logits: Tensor, chooser: Chooser, rows: Rows) -> Found:
    """Choose the base model's token at the nodes and walk down the tree along them."""
    scored = chooser.at_nodes(candidates, logits, rows)
    follow = follow_on_host if logits.device.type == "cpu" else follow_on_device
    while True:
        base_tokens = scored.best()
        near_ties = partial(chooser.near_ties, logits, scored, rows)
        followed, tied = follow(candidates, base_tokens, near_ties)
        unsettled = [i for i, going in enumerate(rows.going) if going and 1 in tied[i]]
        if not unsettled:
            return base_tokens, scored.processed, followed, None
        path, _, _, gained = followed
        scores = scored.scores.clone()
        for i in unsettled:
            first = tied[i].index(1)
            text = [*rows.texts[i], *gained[i][:first]]
            scores[i, path[i, first]] = chooser.settle(rows.numbers[i], text)[0].to(scores)
        # only the first near-tie is settled: what it gives may lead down another path, so the walk
        # is begun anew
        scored = scored._replace(scores=scores)


def _walk_converted(
    candidates: Candidates, logits: Tensor, chooser: Chooser, rows: Rows, acceptance: Acceptance
) -> Found:
    """Walk down the tree along draws some of which were converted, see ``rules.converted``.

    Of the divergence is known how often tokens differ from the draws, which their total variation
    is at most on average.
    """
    sampler, tree = chooser.sampler, candidates.tree
    # of all nodes: a draw that is converted leads where the base's own draws would not
    _, processed = chooser.processors.at_nodes(candidates, logits, rows)
    drawn = sampler.tree_scores(processed, tree, rows.roots, rows.numbers).max(-1).indices
    tokens, base_probs = candidates.tokens.to(logits.device), sampler.probs(processed)
    measure = BOUNDED[acceptance.rule]
    chance = _chance(chooser, rows, tree.num_nodes, logits.device)
    written = rules.converted(tokens, tree, drawn, base_probs, chance, acceptance.bound, measure)
    follow = follow_on_host if logits.device.type == "cpu" else follow_on_device
    followed, _ = follow(candidates, written, lambda path: torch.zeros_like(path, dtype=torch.bool))
    differs = (written != drawn).gather(1, followed[0].clamp(min=0)).to(base_probs)
    divergence = torch.stack([torch.full_like(differs, torch.nan), differs], dim=-1)
    return written, processed, followed, divergence


def _chance(chooser: Chooser, rows: Rows, num_sites: int, device: torch.device) -> Chance:
    """Return the random choices of a step."""
    positions = torch.tensor(rows.roots, device=device)
    return Chance(chooser.sampler.seeds_of(rows.numbers), positions, num_sites)


def follow_on_host(
    candidates: Candidates, base_tokens: Tensor, near_ties: Callable[[Tensor], Tensor]
) -> tuple[Followed, list[list[int]]]:
    """Walk in Python: on a CPU nothing waits for a device, and small ops cost more.

    Args:
        candidates: the trees.
        base_tokens: [B, N], the base model's token after each node.
        near_ties: tells which nodes of a path [B, D+1] are near-ties, [B, D+1] bool.

    Returns:
        The way, and per row and place on the path whether the choice there is a near-tie.
    """
    tree = candidates.tree
    drawn: list[list[int]] = base_tokens.tolist()
    parents = tree.parents.tolist()
    above = [parents] * len(drawn) if isinstance(tree, Tree) else parents
    paths = rules.walk_on_host(candidates.tokens.tolist(), above, drawn)
    width = tree.max_depth + 1
    path = padded(paths, width)
    gained = [[row[node] for node in nodes] for row, nodes in zip(drawn, paths, strict=True)]
    tied = near_ties(path[:, : max(map(len, paths))]).long().tolist()
    num_accepted = torch.tensor([len(nodes) - 1 for nodes in paths])
    next_root = torch.tensor([tokens[-1] for tokens in gained])
    return (path, num_accepted, next_root, gained), tied


def follow_on_device(
    candidates: Candidates, base_tokens: Tensor, near_ties: Callable[[Tensor], Tensor]
) -> tuple[Followed, list[list[int]]]:
    """Do what :func:`follow_on_host` does in tensors, with the step's only synchronisation."""
    path, num_accepted = rules.walk(candidates.tokens, candidates.tree, base_tokens)
    emitted = base_tokens.gather(1, path.clamp(min=0)).masked_fill(path < 0, -1)
    next_root = emitted.gather(1, num_accepted[:, None])[:, 0]
    rows, tied = torch.stack([emitted, near_ties(path)]).tolist()
    gained = [[token for token in row if token >= 0] for row in rows]
    return (path, num_accepted, next_root, gained), tied


def _apply_rule(
    candidates: Candidates, logits: Tensor, chooser: Chooser, rows: Rows, acceptance: Acceptance
) -> Found:
    """Let the rule decide from the base model's distributions at the nodes.

    Its tokens [B, N] are the base model's likeliest.
    """
    sampler = chooser.sampler
    _, processed = chooser.processors.at_nodes(candidates, logits, rows)
    greedy, base_probs = sampler.temperature == 0, sampler.probs(processed)
    chance = _chance(chooser, rows, candidates.tree.num_nodes, logits.device)
    if candidates.sampling == "none":
        merged = rules.merge_siblings(candidates.tokens.to(logits.device), candidates.tree)
        candidates = replace(candidates, tokens=merged[0], tree=merged[1])
    probs = divergence = None
    if not acceptance.lossless:
        probs = acceptance.output_probs(candidates, base_probs, greedy=greedy)
    given = probs if acceptance.rule in BOUNDED and probs is not None else base_probs
    path, num_accepted, next_token = acceptance.decide(candidates, given, chance, greedy=greedy)
    tokens = candidates.tokens.to(logits.device)
    guessed = tokens.gather(1, path.clamp(min=0)).masked_fill(path < 0, -1)
    emitted = torch.cat([guessed[:, 1:], torch.full_like(guessed[:, :1], -1)], dim=1)
    emitted = emitted.scatter(1, num_accepted[:, None], next_token[:, None])
    if not acceptance.lossless:
        each, nodes = torch.arange(len(path), device=path.device)[:, None], path.clamp(min=0)
        along = base_probs[each, nodes]
        if probs is None:  # a rule that gives one token
            written = torch.zeros_like(along).scatter(2, emitted.clamp(min=0)[..., None], 1)
        else:
            written = probs[each, nodes]
        divergence = rules.divergences(written, along)
    # the step's only synchronisation
    gained = [[token for token in row if token >= 0] for row in emitted.tolist()]
    followed = path, num_accepted, next_token, gained
    return base_probs.argmax(-1), processed, followed, divergence
