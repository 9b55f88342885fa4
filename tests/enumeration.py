"""Go through every outcome of a random function, and of decoding a toy model with it.

A bias too small for any sample shows: results are exact to rounding, in float64.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from specheads.attention.tree import Tree

Prefix = tuple[int, ...]
NEGLIGIBLE = 1e-14  # outcomes that only rounding gives a probability


class Outcomes:
    """A ``Randomness`` whose row b has the outcomes that ``scripts[b]`` lists.

    Choices that leave no choice are not listed. Past its script a row takes the first outcome, and
    the other ones are added to ``untried``. ``weights`` is the probability of what each row took.
    """

    def __init__(self, scripts: list[Prefix]) -> None:
        self.scripts = scripts
        self.weights = [1.0] * len(scripts)
        self.untried: list[tuple[int, Prefix]] = []
        self._taken: list[list[int]] = [[] for _ in scripts]
        self._sites: set[tuple[str, int, int]] = set()

    def accept(self, probability: Tensor, site: int) -> Tensor:
        """Return the listed outcomes, 0 or 1."""
        assert probability.dtype == torch.float64
        return self._outcomes(torch.stack([1 - probability, probability], -1), "accept", site) == 1

    def draw(self, probs: Tensor, site: int) -> Tensor:
        """Return the listed tokens."""
        assert probs.dtype == torch.float64
        torch.testing.assert_close(probs.sum(-1), torch.ones_like(probs[:, 0]))
        return self._outcomes(probs, "draw", site)

    def _outcomes(self, probs: Tensor, kind: str, site: int) -> Tensor:
        chosen, options = probs.argmax(-1).tolist(), probs.tolist()
        is_open = (probs > NEGLIGIBLE).sum(-1) != 1  # of most choices one outcome is left
        for row in is_open.nonzero().flatten().tolist():
            chosen[row] = self._choose(row, options[row], (kind, site, row))
        return torch.tensor(chosen)

    def row(self, row: int) -> OneRow:
        """Return the randomness of one row, for rules that are written for one."""
        return OneRow(self, row)

    def _choose(self, row: int, options: list[float], key: tuple[str, int, int]) -> int:
        possible = [i for i, p in enumerate(options) if p > NEGLIGIBLE]
        if len(possible) == 1:
            return possible[0]
        assert key not in self._sites, f"{key} is used twice: the outcomes would not be independent"
        self._sites.add(key)
        taken, script = self._taken[row], self.scripts[row]
        if len(taken) < len(script):
            outcome = script[len(taken)]
        else:
            outcome, *others = possible
            self.untried += [(row, (*taken, other)) for other in others]
        taken.append(outcome)
        self.weights[row] *= options[outcome]
        return outcome


class OneRow:
    """One row's part in :class:`Outcomes`."""

    def __init__(self, outcomes: Outcomes, row: int) -> None:
        self.outcomes, self.index = outcomes, row

    def accept(self, probability: float, site: int) -> bool:
        """Return the listed outcome."""
        key = ("accept", site, self.index)
        return self.outcomes._choose(self.index, [1 - probability, probability], key) == 1

    def draw(self, probs: Tensor, site: int) -> int:
        """Return the listed token."""
        return self.outcomes._choose(self.index, probs.tolist(), ("draw", site, self.index))


# a step: contexts [B] (after the root) and the randomness to the new tokens of each row
Step = Callable[[Tensor, Outcomes], list[list[int]]]


def outcomes_of(step: Step, contexts: Tensor) -> list[dict[Prefix, float]]:
    """Return, for every context, the probability of each outcome of a step."""
    results: list[dict[Prefix, float]] = [defaultdict(float) for _ in contexts]
    pending: list[tuple[int, Prefix]] = [(i, ()) for i in range(len(contexts))]
    while pending:
        starts, scripts = zip(*pending, strict=True)
        chance = Outcomes(list(scripts))
        for start, weight, new in zip(
            starts, chance.weights, step(contexts[list(starts)], chance), strict=True
        ):
            results[start][tuple(new)] += weight
        pending = [(starts[row], script) for row, script in chance.untried]
    return results


class ToyModel:
    """A random language model that sees the last three tokens; [V] float64 after each context."""

    def __init__(self, vocab_size: int, seed: int, sharpness: float = 1.5) -> None:
        self.vocab_size, self._base = vocab_size, vocab_size + 1
        generator = torch.Generator().manual_seed(seed)
        shape = (self._base**3, vocab_size)
        logits = torch.randn(shape, generator=generator, dtype=torch.float64) * sharpness
        self._table = logits.softmax(-1)
        self.nothing = self._base**3 - 1  # the context before the first token

    def probs(self, contexts: Tensor) -> Tensor:
        """Return the distributions [..., V] after contexts [...]."""
        return self._table[contexts]

    def after(self, contexts: Tensor, tokens: Tensor) -> Tensor:
        """Return the contexts after one token more each; padding counts as token 0."""
        return contexts % self._base**2 * self._base + tokens.clamp(min=0)

    def at_nodes(self, contexts: Tensor, tokens: Tensor, parents: Tensor) -> Tensor:
        """Return the contexts [B, N] at the nodes of a tree; parents [N]."""
        nodes = [contexts]
        for i in range(1, tokens.shape[1]):
            nodes.append(self.after(nodes[int(parents[i])], tokens[:, i]))
        return torch.stack(nodes, dim=1)

    def context(self, prefix: Prefix) -> int:
        """Return the context after ``prefix``."""
        context = torch.tensor(self.nothing)
        for token in prefix:
            context = self.after(context, torch.tensor(token))
        return int(context)

    def joint(self, num_tokens: int) -> Tensor:
        """Return the distribution of the first tokens, V^num_tokens values."""
        contexts, joint = torch.tensor([self.nothing]), torch.ones(1, dtype=torch.float64)
        for _ in range(num_tokens):
            joint = (joint[:, None] * self.probs(contexts)).flatten()
            tokens = torch.arange(self.vocab_size).expand(len(contexts), -1)
            contexts = self.after(contexts[:, None], tokens).flatten()
        return joint


def decoded_joint(model: ToyModel, step: Step, num_tokens: int = 3) -> Tensor:
    """Return the distribution of the first tokens that decoding writes, V^num_tokens values.

    The first one is drawn plainly; then steps follow until there are enough.
    """
    first = model.probs(torch.tensor(model.nothing)).tolist()
    open_: dict[Prefix, float] = {(token,): p for token, p in enumerate(first)}
    joint = torch.zeros(model.vocab_size**num_tokens, dtype=torch.float64)
    while open_:
        shortest = min(len(prefix) for prefix in open_)
        prefixes = [prefix for prefix in open_ if len(prefix) == shortest]
        contexts = torch.tensor([model.context(prefix) for prefix in prefixes])
        weights = [open_.pop(prefix) for prefix in prefixes]
        for prefix, weight, outcomes in zip(
            prefixes, weights, outcomes_of(step, contexts), strict=True
        ):
            for new, probability in outcomes.items():
                text = (prefix + new)[:num_tokens]
                if len(text) < num_tokens:
                    open_[text] = open_.get(text, 0.0) + weight * probability
                    continue
                index = 0
                for token in text:
                    index = index * model.vocab_size + token
                joint[index] += weight * probability
    return joint


def distance(model: ToyModel, step: Step, num_tokens: int = 3) -> float:
    """Return the total variation distance between decoding and the model."""
    got = decoded_joint(model, step, num_tokens)
    return float((got - model.joint(num_tokens)).abs().sum() / 2)


# a drafter: contexts [B] and the randomness to tokens [B, N] and draft_probs [B, N, V]
Draft = Callable[[Tensor, Outcomes], tuple[Tensor, Tensor]]
DRAFT_SITES = 1000  # away from those of the rules


class ToyDrafter:
    """Samples the children of every node as its ``sampling`` says.

    Args:
        model: the distributions that children are drawn from.
        tree: ranks are draw order.
        sampling: "without_replacement" or "none" (the most likely tokens).
        shared: every parent of a level has the same draws, and a distribution that depends on the
            root's context alone, as parallel heads have it. Else each parent draws anew.
    """

    def __init__(self, model: ToyModel, tree: Tree, sampling: str, shared: bool = False) -> None:
        self.model, self.tree, self.sampling, self.shared = model, tree, sampling, shared
        parents = tree.parents.tolist()
        self._children = {
            node: [i for i in range(tree.num_nodes) if parents[i] == node] for node in set(parents)
        }

    def __call__(self, contexts: Tensor, chance: Outcomes) -> tuple[Tensor, Tensor]:
        """Fill the tree; node 0's token is not looked at by any rule."""
        num_rows, num_nodes = len(contexts), self.tree.num_nodes
        tokens = torch.zeros(num_rows, num_nodes, dtype=torch.long)
        probs = torch.zeros(num_rows, num_nodes, self.model.vocab_size, dtype=torch.float64)
        shared: dict[int, tuple[Tensor, Tensor]] = {}
        for node in range(num_nodes):
            children = self._children.get(node, [])
            if not children:
                continue
            depth = int(self.tree.depths[node])
            if self.shared:
                if depth not in shared:
                    widest = max(
                        len(self._children.get(i, []))
                        for i in range(num_nodes)
                        if int(self.tree.depths[i]) == depth
                    )
                    # some other distribution for every level
                    seen = self.model.after(contexts, torch.full_like(contexts, depth))
                    shared[depth] = self._siblings(seen, widest, chance, depth)
                drawn, drawn_from = shared[depth]
            else:
                seen = self.model.at_nodes(contexts, tokens, self.tree.parents)[:, node]
                drawn, drawn_from = self._siblings(seen, len(children), chance, node)
            tokens[:, children] = drawn[:, : len(children)]
            probs[:, node] = drawn_from
        return tokens, probs

    def _siblings(
        self, contexts: Tensor, num: int, chance: Outcomes, place: int
    ) -> tuple[Tensor, Tensor]:
        probs = self.model.probs(contexts)
        if self.sampling == "none":
            return probs.argsort(-1, descending=True)[:, :num], probs
        left, tokens = probs, []
        for i in range(num):
            tokens.append(chance.draw(left, DRAFT_SITES * (place + 1) + i))
            left = without_tokens(left, tokens[-1][:, None])
        return torch.stack(tokens, dim=1), probs


def without_tokens(probs: Tensor, tokens: Tensor) -> Tensor:
    """Return probs [B, V] without tokens [B, R], normalised unless nothing is left."""
    left = probs.scatter(-1, tokens, 0.0)
    return left / left.sum(-1, keepdim=True).clamp(min=1e-300)


# a rule: tokens, tree, base_probs, draft_probs and the randomness to path, num_accepted, next_token
Rule = Callable[..., tuple[Tensor, Tensor, Tensor]]


def verified(model: ToyModel, tree: Tree, draft: Draft, rule: Rule) -> Step:
    """Return the step that drafts, asks the model at every node, and accepts by ``rule``."""

    def step(contexts: Tensor, chance: Outcomes) -> list[list[int]]:
        tokens, draft_probs = draft(contexts, chance)
        base_probs = model.probs(model.at_nodes(contexts, tokens, tree.parents))
        path, num_accepted, next_token = rule(tokens, tree, base_probs, draft_probs, chance)
        emitted = tokens.gather(1, path.clamp(min=0)).tolist()
        return [
            [*row[1 : int(num) + 1], int(last)]
            for row, num, last in zip(emitted, num_accepted, next_token, strict=True)
        ]

    return step


def expected_accepted(step: Step, context: int) -> float:
    """Return the mean number of accepted tokens of one step."""
    (outcomes,) = outcomes_of(step, torch.tensor([context]))
    return sum(weight * (len(new) - 1) for new, weight in outcomes.items())


def replay(tree: Tree, ranks: Tensor, *, ended: bool) -> Iterator[int]:
    """Yield the tokens gained by each verify step of ``tree`` along one text, the obvious way.

    Args:
        tree: shape of the guesses.
        ranks: of this text, [S, K].
        ended: whether the text ends after these positions, so that no step gains a token beyond.
    """
    choices: set[tuple[int, ...]] = set(tree.choices)
    rows = ranks.tolist()
    root = 0
    while root < len(rows):
        num_accepted = 0
        while tuple(rows[root][: num_accepted + 1]) in choices:
            num_accepted += 1
            if num_accepted == ranks.shape[1]:
                break
        yield min(num_accepted + 1, len(rows) - root) if ended else num_accepted + 1
        root += num_accepted + 1
