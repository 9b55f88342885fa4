"""Bounded rules: how far the output may be from the base model's, and that no rule accepts more."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linprog, minimize
from torch import Tensor
from transformers import LogitsProcessorList

from specheads.attention.tree import RowTrees, Tree
from specheads.decoding.accept import BOUNDED, Acceptance
from specheads.decoding.generate import SpecDecoder
from specheads.drafters.contract import Candidates
from specheads.drafters.heads import heads_drafter
from specheads.drafters.lookup import SuffixDrafter
from specheads.models.heads import MedusaHeads
from specheads.models.output import output_layer
from specheads.verification.acceptance import (
    _swing,
    converted,
    divergences,
    guessed,
    leniently,
    reject,
    tilted,
)
from tests import zoo
from tests.enumeration import (
    Outcomes,
    Rule,
    ToyDrafter,
    ToyModel,
    decoded_joint,
    expected_accepted,
    outcomes_of,
    verified,
)

MODEL, DRAFT = ToyModel(4, seed=1), ToyModel(4, seed=2)
TREE = Tree.from_choices([(0,), (1,), (0, 0), (1, 0)])
CHAIN = Tree.chain(2)
SAMPLINGS = {"none": TREE, "without_replacement": TREE, "chain": CHAIN}
BOUNDS = {"lossy_tv": (0.02, 0.1, 0.4), "lossy_kl": (0.002, 0.05, 0.5)}
CASES = [(rule, bound) for rule, bounds in BOUNDS.items() for bound in bounds]


def by_rule(acceptance: Acceptance, sampling: str) -> Rule:
    """Return a rule as decoding applies it."""

    def rule(
        tokens: Tensor, tree: Tree, base_probs: Tensor, draft_probs: Tensor, chance: Outcomes
    ) -> tuple[Tensor, Tensor, Tensor]:
        drawn_from = None if sampling == "none" else draft_probs
        candidates = Candidates(tokens, tree, drawn_from, sampling)
        probs = acceptance.output_probs(candidates, base_probs, greedy=False)
        assert probs is not None
        given: Any = chance
        return acceptance.decide(candidates, probs, given, greedy=False)

    return rule


def drafter(sampling: str) -> ToyDrafter:
    """Return a drafter of one way of sampling."""
    kind = "none" if sampling == "none" else "without_replacement"  # one child each: a chain
    return ToyDrafter(DRAFT, SAMPLINGS[sampling], kind)


def conditionals(joint: Tensor) -> Tensor:
    """Return the distribution of the last token after all others, not a number after none."""
    table = joint.view(-1, 4)
    return table / table.sum(-1, keepdim=True)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("rule,bound", CASES)
def test_the_next_token_has_the_closed_form(rule: str, bound: float, sampling: str) -> None:
    """Prevents an output that is none of what was stated: all outcomes, summed over all drafts."""
    acceptance, tree = Acceptance(rule, bound=bound), SAMPLINGS[sampling]
    step = verified(MODEL, tree, drafter(sampling), by_rule(acceptance, sampling))
    context = MODEL.context((1, 2))
    (outcomes,) = outcomes_of(step, torch.tensor([context]))
    got = torch.zeros(4, dtype=torch.float64)
    for new, weight in outcomes.items():
        got[new[0]] += weight
    base = MODEL.probs(torch.tensor(context))
    if sampling == "none":
        best = DRAFT.probs(torch.tensor(context)).topk(2).indices
        guesses = torch.zeros(4, dtype=torch.bool).scatter(0, best, True)
    else:
        guesses = DRAFT.probs(torch.tensor(context))
    wanted = tilted(base, guesses, bound, BOUNDED[rule])
    assert (got - wanted).abs().max() < 1e-9
    kl, tv = divergences(got, base).tolist()
    assert (kl if rule == "lossy_kl" else tv) <= bound + 1e-9
    assert tv > min(bound, 0.01) / 4, "nothing was changed: the bound is not tested"


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("rule,bound", [(rule, bounds[1]) for rule, bounds in BOUNDS.items()])
def test_texts_keep_the_bound(rule: str, bound: float, sampling: str) -> None:
    """Prevents a bound of the first token of a step alone: three tokens, over two steps or more."""
    acceptance, tree = Acceptance(rule, bound=bound), SAMPLINGS[sampling]
    step = verified(MODEL, tree, drafter(sampling), by_rule(acceptance, sampling))
    got, base = decoded_joint(MODEL, step, 3), MODEL.joint(3)
    assert float(got.sum()) == pytest.approx(1, abs=1e-9)
    kl, tv = divergences(got, base).tolist()
    # the first token is drawn plainly; two may differ
    assert (kl if rule == "lossy_kl" else tv) <= 2 * bound + 1e-9
    each = divergences(conditionals(got), conditionals(base))
    # after one prefix a token may be the first of a step or a later one: a mixture of both
    assert each[:, 0 if rule == "lossy_kl" else 1].nan_to_num(0).max() <= bound + 1e-9


@pytest.mark.parametrize("rule,bound", CASES)
def test_no_distribution_within_the_bound_accepts_more(rule: str, bound: float) -> None:
    """Prevents speed that is given away: a linear programme and a convex solver find no better."""
    generator = torch.Generator().manual_seed(5)
    for case in range(12):
        base, draft = (torch.randn(2, 5, generator=generator).double() * 1.5).softmax(-1)
        if case % 3 == 0:  # a token that the base cannot give
            base = base.clone()
            base[case % 5] = 0
            base /= base.sum()
        guesses = draft if case % 2 else draft >= draft.topk(2).values[-1]
        ours = tilted(base, guesses, bound, BOUNDED[rule])
        assert float(ours.sum()) == pytest.approx(1, abs=1e-9)
        distance = divergences(ours, base)[0 if rule == "lossy_kl" else 1]
        assert distance <= bound + 1e-9
        assert (ours[base == 0] == 0).all()
        wanted = torch.where(guesses, 1.0, 0.0) if guesses.dtype == torch.bool else guesses
        accepted = float(torch.minimum(wanted.double(), ours).sum())
        best = (_best_tv if rule == "lossy_tv" else _best_kl)(base.numpy(), wanted.numpy(), bound)
        assert accepted == pytest.approx(best, abs=1e-6 if rule == "lossy_kl" else 1e-9)


def _best_tv(base: np.ndarray, wanted: np.ndarray, bound: float) -> float:
    """Maximise sum min(w, h): variables h, the minima, and |h - p|."""
    num = len(base)
    eye, zero = np.eye(num), np.zeros((num, num))
    above = np.block([[-eye, eye, zero], [eye, zero, -eye], [-eye, zero, -eye]])
    limits = np.concatenate([np.zeros(num), base, -base])
    total = np.concatenate([np.zeros(2 * num), np.full(num, 0.5)])
    found = linprog(
        np.concatenate([np.zeros(num), -np.ones(num), np.zeros(num)]),
        A_ub=np.vstack([above, total]),
        b_ub=np.append(limits, bound),
        A_eq=[np.concatenate([np.ones(num), np.zeros(2 * num)])],
        b_eq=[1.0],
        bounds=[(0, 0 if p == 0 else None) for p in base]
        + [(0, w) for w in wanted]
        + [(0, None)] * num,
    )
    assert found.success
    return float(-found.fun)


def _best_kl(base: np.ndarray, wanted: np.ndarray, bound: float) -> float:
    """Maximise sum min(w, h) with KL(h || p) <= bound; variables h and the minima."""
    there = base > 0
    base, wanted = base[there], wanted[there]
    num = len(base)

    def left(x: np.ndarray) -> float:
        h = np.maximum(x[:num], 1e-300)
        return bound - float((h * np.log(h / base)).sum())

    found = minimize(
        lambda x: -x[num:].sum(),
        np.concatenate([base, np.minimum(base, wanted)]),
        constraints=[
            {"type": "ineq", "fun": left},
            {"type": "ineq", "fun": lambda x: x[:num] - x[num:]},
            {"type": "eq", "fun": lambda x: x[:num].sum() - 1},
        ],
        bounds=[(1e-12, 1)] * num + [(0, w) for w in wanted],
        method="SLSQP",
        options={"maxiter": 500, "ftol": 1e-13},
    )
    assert found.success, found.message
    return float(-found.fun)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sharpness", [1.0, 5.0, 12.0])
@pytest.mark.parametrize("rule", BOUNDED)
def test_the_bound_holds_for_sharp_distributions(
    rule: str, sharpness: float, dtype: torch.dtype
) -> None:
    """Prevents sums that round, and ratios of a billion, from voiding a bound: as models are."""
    draw = torch.Generator().manual_seed(7)
    base, draft = (torch.randn(2, 300, 257, generator=draw) * sharpness).to(dtype).softmax(-1)
    draft = torch.where(torch.arange(300)[:, None] % 2 > 0, draft, (base + draft) / 2)
    for guesses in (draft, draft >= draft.topk(3).values[..., -1:]):
        for bound in (1e-4, 0.01, 0.3):
            found = tilted(base, guesses, bound, BOUNDED[rule])
            assert ((found.sum(-1) - 1).abs() < 1e-5).all()
            worst = divergences(found.double(), base.double())[
                :, 0 if rule == "lossy_kl" else 1
            ].max()
            assert bound / 2 < worst <= bound + (1e-9 if dtype == torch.float64 else 3e-6)


@pytest.mark.parametrize("rule", BOUNDED)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_more_bound_accepts_more_and_none_is_exact(rule: str, sampling: str) -> None:
    """Prevents a bound that works the other way round, and one of 0 that still changes texts."""
    tree, means = SAMPLINGS[sampling], []
    for bound in (0.0, *BOUNDS[rule]):
        acceptance = Acceptance(rule, bound=bound)
        step = verified(MODEL, tree, drafter(sampling), by_rule(acceptance, sampling))
        means.append(expected_accepted(step, MODEL.context((1, 2))))
        if not bound:
            assert acceptance.lossless
            assert (decoded_joint(MODEL, step, 3) - MODEL.joint(3)).abs().max() < 1e-9
    assert means == sorted(means) and means[-1] > means[0] + 0.05


def test_a_looser_coin_breaks_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents vacuous bounds: the expansion that others use is beyond this one, and is seen."""
    from specheads.verification import acceptance

    def expanded(probability: Tensor, bound: float) -> Tensor:
        more = (2 * bound * probability * (1 - probability)).sqrt()
        return (probability + more).clamp(max=1)

    monkeypatch.setattr(acceptance, "_coin", expanded)
    bound = 0.05
    base = torch.tensor([0.9, 0.06, 0.04], dtype=torch.float64)
    found = tilted(base, torch.tensor([True, False, False]), bound, "kl")
    assert divergences(found, base)[0] > 1.2 * bound


def test_what_is_measured_of_a_lenient_rule() -> None:
    """Prevents a divergence that is printed of another distribution than what is drawn from."""
    for sampling, tree in (("none", TREE), ("chain", CHAIN)):
        drawn = drafter(sampling)

        def rule(*given: Any, sampling: str = sampling) -> tuple[Tensor, Tensor, Tensor]:
            tokens, tree, base, draft, chance = given
            return reject(tokens, tree, base, draft, chance, sampling, 0.4)

        context = torch.tensor([MODEL.context((1, 2))])
        (outcomes,) = outcomes_of(verified(MODEL, tree, drawn, rule), context)
        got = torch.zeros(4, dtype=torch.float64)
        for new, weight in outcomes.items():
            got[new[0]] += weight
        tokens, draft = drawn(context, Outcomes([()]))
        base = MODEL.probs(MODEL.at_nodes(context, tokens, tree.parents))
        given = None if sampling == "none" else draft
        assert (leniently(tokens, tree, base, given, 0.4)[0, 0] - got).abs().max() < 1e-9


def test_guesses_are_the_children_of_their_node() -> None:
    """Prevents mass that goes to another node's children, padding, or another row's."""
    tokens = torch.tensor([[7, 1, 2, 3, -1], [7, 4, 4, 0, 5]])
    parents = torch.tensor([[-1, 0, 0, 1, 2], [-1, 0, 1, 2, 0]])
    found = guessed(tokens, RowTrees.from_parents(parents, 3), 8)
    listed = [sorted(map(tuple, row.nonzero().tolist())) for row in found]
    assert listed == [[(0, 1), (0, 2), (1, 3)], [(0, 4), (0, 5), (1, 4), (2, 0)]]


def test_bounds_are_checked() -> None:
    """Prevents a bound that means nothing."""
    for rule, bound in (("lossy_tv", 1.5), ("lossy_tv", -0.1), ("lossy_kl", -1.0)):
        with pytest.raises(ValueError, match="bound"):
            Acceptance(rule, bound=bound)
    assert math.isclose(Acceptance("lossy_kl", bound=3.0).bound, 3.0)
    assert partial(Acceptance, "lossy_kl")().lossless


@pytest.mark.parametrize("rule,bound", CASES)
def test_conversions_keep_the_bound_of_guesses_that_follow_the_noise(
    rule: str, bound: float
) -> None:
    """Prevents a bound that holds only where what is guessed is independent of what is drawn.

    The law of the next token, over all noise: guesses are the best of the draft's scores with the
    noise of the draw, as heads make them. A mixture over many draws, each with its chances summed.
    """
    generator = torch.Generator().manual_seed(1)
    base = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64)
    draft = torch.tensor([0.2, 0.3, 0.1, 0.4], dtype=torch.float64)
    num = 60_000
    noise = -(-torch.rand(num, 4, generator=generator, dtype=torch.float64).log()).log()
    drawn = (base.log() + noise).argmax(-1)
    tokens = torch.cat([torch.zeros(num, 1).long(), (draft.log() + noise).topk(2).indices], 1)
    tree = Tree.from_choices([(0,), (1,)])
    law, rates = torch.zeros(4, dtype=torch.float64), []

    class Noted:
        """Says no, and keeps what was asked."""

        def accept(self, probability: Tensor, site: int) -> Tensor:
            if site == 0:
                rates.append(probability)
            return torch.ones_like(probability, dtype=torch.bool)

    at_nodes = torch.stack([drawn, drawn, drawn], 1)
    probs = base.expand(num, 3, 4)
    chance: Any = Noted()
    turned = converted(tokens, tree, at_nodes, probs, chance, bound, BOUNDED[rule])[:, 0]
    rate = torch.where(turned == drawn, 0.0, rates[0])
    law.scatter_add_(0, drawn, 1 - rate).scatter_add_(0, turned, rate)
    law /= num
    sampled = torch.bincount(drawn, minlength=4).double() / num  # with the error of the sample
    kl, tv = divergences(law, sampled).tolist()
    assert (kl if rule == "lossy_kl" else tv) <= bound
    assert tv > bound / 20, "nothing was converted: the bound is not tested"
    missed = float((tokens[:, 1:] != drawn[:, None]).all(-1).double().mean())
    assert float(rate.mean()) <= missed


@pytest.mark.parametrize("bound", [0.001, 0.05, 0.3, math.log(2), 5.0])
def test_the_swing_is_the_largest_within_the_bound(bound: float) -> None:
    """Prevents a swing beyond the bound: two tokens at both ends reach it."""
    swing = _swing(bound)
    assert 0 < swing <= 1
    ends = torch.tensor([1 + swing, 1 - swing], dtype=torch.float64) / 2
    kl = float(divergences(ends, torch.tensor([0.5, 0.5], dtype=torch.float64))[0])
    assert kl == pytest.approx(min(bound, math.log(2)), abs=1e-9)


@pytest.mark.parametrize("drafter", ["heads", "suffix"])
def test_processors_that_keep_a_state_are_refused(drafter: str) -> None:
    """Prevents a processor that is not asked where a draw was turned into a guess."""
    model, ids = zoo.build("llama"), torch.tensor([[5, 6, 7, 5, 6]])

    def forbids(_: Tensor, scores: Tensor) -> Tensor:
        return scores

    heads = MedusaHeads(2, 1, model.config.hidden_size, zoo.VOCAB)
    tree = Tree.from_choices([(0,), (1,)])
    by_heads = heads_drafter(model, heads, output_layer(model), tree)
    made: Any = by_heads if drafter == "heads" else SuffixDrafter()
    decoder = SpecDecoder(model, made, acceptance=Acceptance("lossy_tv", bound=0.2))
    processors = LogitsProcessorList([forbids])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="stateless"):
        decoder.generate(ids, 12, temperature=1.0, logits_processor=processors)
