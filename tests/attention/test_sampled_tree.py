"""Fixed trees that a draft model samples: exact by enumeration, and the same from slow passes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.attention.tree import Tree
from specheads.decoding.accept import Acceptance
from specheads.decoding.loop import decode
from specheads.drafters import draft_model, draft_tree
from specheads.drafters.contract import Candidates
from specheads.drafters.draft_tree import SampledTreeDrafter, sequoia_tree
from specheads.verification.acceptance import sample_siblings
from specheads.verification.sampling import Sampler, draft_noise, gumbel_noise
from tests.drafters.test_draft_model import near
from tests.drafters.test_draft_tree import check_fresh, prefill_of, says
from tests.end_to_end.test_distribution import excess
from tests.enumeration import (
    DRAFT_SITES,
    Outcomes,
    ToyModel,
    distance,
    expected_accepted,
    verified,
    without_tokens,
)
from tests.ragged import ROWS, padded
from tests.zoo import build

TREE = sequoia_tree([0.5, 0.25, 0.1], 8, 3)[0]
# numbers of children that differ within a level, and parents that are not the first
MIXED = Tree.from_choices([(0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (1, 0, 0)])


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    """Return a base model."""
    return build("llama")


@pytest.fixture(scope="module")
def draft(base: PreTrainedModel) -> PreTrainedModel:
    """Return a model that often says what the base says."""
    return near(base, 0.04)


# --- exact --------------------------------------------------------------------------------


class PrefixModel(ToyModel):
    """A random language model that sees its whole prefix, as far as ``longest`` tokens."""

    def __init__(self, vocab_size: int, seed: int, longest: int) -> None:
        super().__init__(vocab_size, seed)
        generator = torch.Generator().manual_seed(seed)
        shape = ((vocab_size + 1) ** longest, vocab_size)
        logits = 1.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
        self._table = logits.softmax(-1)
        self.nothing = 0

    def after(self, contexts: Tensor, tokens: Tensor) -> Tensor:
        """Return the contexts after one token more each; padding counts as token 0."""
        return contexts * self._base + tokens.clamp(min=0) + 1

    def text(self, context: int) -> list[int]:
        """Return the prefix of a context."""
        tokens: list[int] = []
        while context:
            tokens.append(context % self._base - 1)
            context //= self._base
        return tokens[::-1]


class Exact(Sampler):
    """Keeps distributions in float64."""

    def warp(self, logits: Tensor) -> Tensor:
        """Apply temperature and top-k."""
        scores = logits.double() / self.temperature
        if self.top_k:
            kth = scores.topk(self.top_k, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < kth, float("-inf"))
        return scores


VOCAB_SIZE = 3
PROMPT = [1, 0, 2]


def tiny_draft() -> PreTrainedModel:
    """Return a draft model of few tokens whose distributions depend on the whole prefix."""
    return build(
        "llama", vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=16, num_hidden_layers=1
    ).double()


Filler = Callable[[Tensor, Outcomes], tuple[Tensor, Tensor]]


def enumerated(
    drafter: SampledTreeDrafter, model: PrefixModel, sampler: Sampler, patch: pytest.MonkeyPatch
) -> Filler:
    """Return the drafter as a function of contexts and outcomes; its draws are outcomes."""

    def numbers(seeds: object, roots: Tensor, num_levels: int, vocab_size: int) -> Tensor:
        sites = torch.arange(num_levels, dtype=torch.float64)
        return sites[:, None].expand(len(roots), -1, vocab_size)

    def fill(contexts: Tensor, chance: Outcomes) -> tuple[Tensor, Tensor]:
        def one_place(probs: Tensor, num: int, site: int) -> Tensor:
            tokens: list[Tensor] = []
            for i in range(num):
                if float(probs.sum()) == 0:  # nothing is left, in any row
                    tokens.append(torch.full_like(contexts, -1))
                    continue
                tokens.append(chance.draw(probs, DRAFT_SITES * (site + 1) + i))
                probs = without_tokens(probs, tokens[-1][:, None])
            return torch.stack(tokens, dim=1)

        def siblings(probs: Tensor, num: int, noise: Tensor) -> Tensor:
            sites = noise[0, :, 0].long().tolist()
            drawn = [one_place(probs[:, i], num, site) for i, site in enumerate(sites)]
            return torch.stack(drawn, dim=1)

        patch.setattr(draft_model, "draft_noise", numbers)
        patch.setattr(draft_tree, "sample_siblings", siblings)
        texts = [PROMPT + model.text(context) for context in contexts.tolist()]
        prefill = prefill_of(texts, sampler, VOCAB_SIZE)
        candidates = drafter.propose(drafter.start(prefill))
        assert candidates.draft_probs is not None
        return candidates.tokens, candidates.draft_probs

    return fill


def error(tree: Tree, patch: pytest.MonkeyPatch, broken: str = "", top_k: int = 0) -> float:
    """Return the total variation distance of decoded tokens to the base model's."""
    model = PrefixModel(VOCAB_SIZE, seed=1, longest=6)
    drafter = SampledTreeDrafter(tiny_draft(), tree)
    if broken:
        BREAKS[broken](drafter)

    def rule(
        tokens: Tensor, tree: Tree, base_probs: Tensor, draft_probs: Tensor, chance: Outcomes
    ) -> tuple[Tensor, Tensor, Tensor]:
        candidates = Candidates(tokens, tree, draft_probs, "without_replacement")
        return Acceptance().decide(candidates, base_probs, chance, greedy=False)

    step = verified(model, tree, enumerated(drafter, model, Exact(1.0, top_k), patch), rule)
    assert expected_accepted(step, int(model.context((1, 2)))) > 0.3
    return distance(model, step, num_tokens=3)


def reorder(drafter: SampledTreeDrafter) -> None:
    """Break the order of siblings."""
    drafter._levels = [replace(each, slots=each.slots.flip(0)) for each in drafter._levels]


def misplace(drafter: SampledTreeDrafter) -> None:
    """Break whose distributions they are."""
    drafter._inner = drafter._inner.flip(0)


BREAKS: dict[str, Callable[[SampledTreeDrafter], None]] = {
    "siblings in another order": reorder,
    "distributions of other nodes": misplace,
}
DEEP = Tree.from_choices([(0,), (1,), (0, 0), (1, 0), (1, 1)])
WIDE = Tree.from_choices([(0,), (1,), (2,), (0, 0), (1, 0)])  # more than a top-k may leave
CHAINS = Tree.from_choices([(0,), (1,), (0, 0), (0, 0, 0)])


@pytest.mark.parametrize("tree", [DEEP, CHAINS, WIDE], ids=["deep", "chains", "wide"])
def test_the_distribution_is_the_base_models(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents every bias, however small, of the drafter and its rule together."""
    assert error(tree, monkeypatch, top_k=2 if tree is WIDE else 0) < 1e-9


@pytest.mark.parametrize("broken", BREAKS)
def test_what_is_broken_shows(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents an enumeration that anything would pass."""
    assert error(DEEP, monkeypatch, broken) > 1e-3


NUM_ROWS = 6_000


def test_the_engine_keeps_the_distribution() -> None:
    """Prevents noise that is not independent, where the enumeration has outcomes in its place."""
    sizes: dict[str, Any] = {"vocab_size": 4, "hidden_size": 16, "intermediate_size": 16}
    base = build("llama", num_hidden_layers=1, **sizes)
    drafter = SampledTreeDrafter(near(base, 0.2), DEEP)
    texts = torch.tensor(list(itertools.product(range(4), repeat=3)))
    prompt = torch.tensor([PROMPT])
    with torch.no_grad():
        ids = torch.cat([prompt.expand(len(texts), -1), texts], dim=1)
        probs = base(input_ids=ids).logits[:, len(PROMPT) - 1 : -1].double().softmax(-1)
    expected = probs.gather(2, texts[..., None])[..., 0].prod(1)
    counts = torch.zeros(len(texts), dtype=torch.long)
    for seed in range(0, NUM_ROWS, 3000):
        result = decode(
            base,
            drafter,
            prompt.repeat(3000, 1),
            max_new_tokens=4,  # one more, so that trees keep their depth
            sampler=Sampler(1.0, seed=seed),
        )
        assert result.accept_length > 1.2
        new = result.sequences[:, len(PROMPT) :][:, :3]
        counts += (new * torch.tensor([16, 4, 1])).sum(1).bincount(minlength=len(counts))
    assert excess(counts, expected) < 1


# --- the same from slow passes ------------------------------------------------------------


def slow_tree(
    draft: PreTrainedModel, text: list[int], tree: Tree, coupled: bool, sampler: Sampler
) -> list[int]:
    """Fill a tree node by node, each from a pass of its own without a cache."""
    choices = [(), *tree.choices]
    inner = [choice for choice in choices if (*choice, 0) in choices]
    position = torch.tensor([len(text) - 1])
    found: dict[tuple[int, ...], list[int]] = {(): []}
    for site, choice in enumerate(inner):
        logits = says(draft, text + found[choice])
        num = sum(1 for other in choices if other and other[:-1] == choice)
        if sampler.temperature == 0:
            children = logits.topk(num).indices
        elif coupled:
            noise = gumbel_noise([sampler.seed], position + 1 + len(choice), len(logits))[0]
            children = (sampler.warp(logits) + noise).topk(num).indices
        else:
            noise = draft_noise([sampler.seed], position, len(inner), len(logits))[0, site]
            children = sample_siblings(sampler.probs(logits), num, noise)
        for rank, token in enumerate(children.tolist()):
            found[(*choice, rank)] = [*found[choice], token]
    return [found[choice][-1] for choice in tree.choices]


@pytest.mark.parametrize("tree", [TREE, MIXED, Tree.chain(3)], ids=["best", "mixed", "chain"])
@pytest.mark.parametrize("coupled", [False, True])
def test_each_node_continues_its_own_path(
    coupled: bool, tree: Tree, draft: PreTrainedModel
) -> None:
    """A distribution of another node is sampled exactly all the same, and accepts less."""
    texts = [[3, 5, 8, 2, 9, 11], [7, 1, 4], [6, 2, 2, 40]]
    for sampler in (Sampler(1.0, seed=5), Sampler(0.7, top_k=9, top_p=0.95, seed=1), Sampler()):
        drafter = SampledTreeDrafter(draft, tree, coupled=coupled)
        state = drafter.start(prefill_of(texts, sampler))
        candidates = drafter.propose(state)
        for row, text in enumerate(texts):
            own = replace(sampler, seed=sampler.seed + row)
            expected = slow_tree(draft, text, tree, coupled, own)
            assert candidates.tokens[row].tolist() == [text[-1], *expected]
        assert state.lengths == [len(text) for text in texts]
        drawn = sampler.temperature > 0 and not drafter.deterministic
        assert candidates.sampling == ("without_replacement" if drawn else "none")
        if candidates.draft_probs is not None:
            for node in set(tree.parents[1:].tolist()):
                path = [int(i) for i in tree.ancestors[node] if i > 0]
                probs = sampler.probs(says(draft, texts[0] + candidates.tokens[0, path].tolist()))
                torch.testing.assert_close(candidates.draft_probs[0, node], probs)


def test_samples_depend_on_the_text_alone(base: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Prevents guesses from a cache that holds what was refused; they are only accepted less."""
    check_fresh(base, partial(SampledTreeDrafter, draft, MIXED), Sampler(1.0, seed=3))


def test_siblings_that_cannot_be_drawn_are_padding(
    base: PreTrainedModel, draft: PreTrainedModel
) -> None:
    """Prevents tokens of no probability in place of siblings for which nothing is left."""
    drafter = SampledTreeDrafter(draft, MIXED)
    sampler = Sampler(1.0, top_k=2, seed=5)
    candidates = drafter.propose(drafter.start(prefill_of([[3, 5, 8], [7, 1]], sampler)))
    assert (candidates.tokens[:, 3] == -1).all()
    assert (candidates.tokens[:, 2] >= 0).all()
    for rule in ("exact", "walk"):
        settings: dict[str, Any] = {"acceptance": Acceptance(rule), "max_new_tokens": 12}
        together = decode(base, drafter, **padded(ROWS), sampler=sampler, **settings)
        alone = decode(base, drafter, ROWS[0], sampler=sampler, **settings)
        assert alone.new_tokens == together.rows[0].new_tokens


def test_coupled_guesses_are_better_than_others(
    base: PreTrainedModel, draft: PreTrainedModel
) -> None:
    """Prevents noise of another position, with which coupled guesses are worse than the best."""
    prompt, lengths = ROWS[0].repeat(12, 1), []
    for coupled in (False, True):
        drafter = SampledTreeDrafter(draft, MIXED, coupled=coupled)
        settings: dict[str, Any] = {"max_new_tokens": 24, "sampler": Sampler(1.5, seed=2)}
        found = decode(base, drafter, prompt, acceptance=Acceptance("walk"), **settings)
        lengths.append(found.accept_length)
    assert lengths[1] > lengths[0] + 0.2


def test_settings_are_checked(draft: PreTrainedModel) -> None:
    """Ranks without those before them are never drawn, and a wide tree runs out of tokens."""
    with pytest.raises(ValueError, match=r"lack the sibling drawn before them, got \[\(2,\)\]"):
        SampledTreeDrafter(draft, Tree.from_choices([(0,), (2,)]))
    with pytest.raises(ValueError, match="at least 2: a guess"):
        SampledTreeDrafter(draft, Tree.chain(0))
    wide = Tree.from_choices([(rank,) for rank in range(65)])
    with pytest.raises(ValueError, match="ranks must be below the draft's 64 tokens, got 64"):
        SampledTreeDrafter(draft, wide)
