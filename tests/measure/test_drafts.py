"""How well draft models match their base, and the formulas and costs of speculative decoding."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from specheads.decoding import costs as speculation
from specheads.decoding.costs import (
    Blank,
    CostCurve,
    DraftCosts,
    clock_drafts,
    clocked_lengths,
    drafting_costs,
    expected_tokens,
    leviathan_speedup,
)
from specheads.decoding.loop import decode, plain_decode
from specheads.decoding.result import DecodedRow
from specheads.drafters.draft_model import DraftModelDrafter
from specheads.drafters.length import FixedLength
from specheads.measure.clock import Runs
from specheads.measure.drafts import (
    Agreement,
    Alpha,
    Gained,
    advice,
    figures,
    fit_vocabulary,
    format_compared,
    measure_alpha,
    num_proposed,
    predictions,
    recommended,
    replay_chain,
)
from specheads.verification.sampling import Sampler
from tests.ragged import ROWS
from tests.zoo import VOCAB, build, disturbed

NUM_NEW = 18


@pytest.fixture(scope="module")
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a base model and a draft model that agrees with it now and then."""
    base = build("llama")
    return base, disturbed(base, seed=0)


@given(
    rates=st.lists(st.floats(0, 1), max_size=6),
    num_tokens=st.integers(1, 4),
    room=st.integers(0, 3),
)
@settings(max_examples=60)
def test_a_chain_along_a_text_is_every_outcome_weighed(
    rates: list[float], num_tokens: int, room: int
) -> None:
    """A count that loses the steps after a refusal promises the speed of the lucky ones."""
    limit = len(rates) + room

    @cache
    def follow(start: int) -> tuple[float, float, float]:
        """Return expected steps, proposals and acceptances from ``start`` on."""
        if start >= len(rates):
            return 0.0, 0.0, 0.0
        depth = min(num_tokens, limit - start - 1)
        steps, proposed, accepted = 1.0, float(depth), 0.0
        for right in range(depth + 1):  # guesses accepted in this step
            chance = 1.0
            for i in range(start, start + right):
                chance *= rates[i] if i < len(rates) else 1.0
            ends = start + right >= len(rates)  # the text ended within the guesses
            if right < depth and not ends:
                chance *= 1 - rates[start + right]
            after = (0.0, 0.0, 0.0) if ends else follow(start + right + 1)
            kept = min(right, len(rates) - start)
            steps += chance * after[0]
            proposed += chance * after[1]
            accepted += chance * (after[2] + kept)
            if ends:
                break
        return steps, proposed, accepted

    found = replay_chain(rates, num_tokens, limit)
    expected = follow(0)
    assert (found.steps, found.proposed, found.accepted) == pytest.approx(expected, abs=1e-9)
    assert found.tokens == len(rates)


def test_greedy_chains_take_the_steps_that_were_foretold(
    pair: tuple[PreTrainedModel, PreTrainedModel],
) -> None:
    """Prevents predictions for another loop: other limits, other first tokens, a shifted text."""
    base, draft = pair
    alpha = measure_alpha(base, draft, ROWS, max_new_tokens=NUM_NEW, temperature=0.0)
    assert 0.2 < alpha.alpha < 1
    for num_tokens in (1, 2, 3, 5):
        drafter = DraftModelDrafter(draft, FixedLength(num_tokens))
        lengths = [
            length
            for row in ROWS
            for length in decode(base, drafter, row, max_new_tokens=NUM_NEW).accept_lengths
        ]
        foretold = alpha.chain(num_tokens)
        assert foretold.steps == len(lengths)
        assert foretold.tokens == sum(lengths)
        assert foretold.accepted == sum(lengths) - len(lengths)
        assert foretold.accept_length == pytest.approx(sum(lengths) / len(lengths))


def test_sampled_chains_are_foretold_on_average(
    pair: tuple[PreTrainedModel, PreTrainedModel],
) -> None:
    """Prevents an acceptance rate that is that of greedy guesses, or of other positions."""
    base, draft = pair
    drafter = DraftModelDrafter(draft, FixedLength(1), sampling="sampled")  # blocks are tokens here
    prompt, num_steps, num_tokens = ROWS[0], 0, 0
    for seed in range(30):
        sampler = Sampler(temperature=1.0, seed=1000 + seed)
        result = decode(base, drafter, prompt, max_new_tokens=NUM_NEW, sampler=sampler)
        num_steps += len(result.accept_lengths)
        num_tokens += sum(result.accept_lengths)
    alpha = measure_alpha(base, draft, [prompt] * 30, max_new_tokens=NUM_NEW, temperature=1.0)
    found = alpha.chain(1).accept_length
    # accept lengths are 1 or 2: a standard error of at most 0.5 / sqrt(steps), on either side
    assert found == pytest.approx(num_tokens / num_steps, abs=4 * 0.5 * (2 / num_steps) ** 0.5)
    greedy = Alpha(
        [replace(text, kept=[float(best) for best in text.best]) for text in alpha.texts]
    )
    best = greedy.chain(1).accept_length
    assert abs(best - found) > 4 * 0.5 * (2 / num_steps) ** 0.5, (
        "the test could not tell them apart"
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_alpha_is_what_distributions_share(
    pair: tuple[PreTrainedModel, PreTrainedModel], temperature: float
) -> None:
    """Alpha over the prompt too, or one token late, is a plausible number of something else."""
    base, draft = pair
    found = measure_alpha(
        base, draft, ROWS, max_new_tokens=NUM_NEW, temperature=temperature, seed=5
    )
    shared, kept = [], []
    for n, row in enumerate(ROWS):
        sampler = Sampler(temperature=temperature, seed=5 + n)
        new = plain_decode(base, row, max_new_tokens=NUM_NEW, sampler=sampler).new_tokens
        for i in range(1, len(new)):  # one pass per token, no cache
            text = torch.cat([row, torch.tensor([new[:i]])], dim=1)
            with torch.no_grad():
                ours, theirs = (m(text, use_cache=False).logits[0, -1] for m in (base, draft))
            if temperature == 0:
                share = float(ours.argmax() == theirs.argmax())
                shared.append(share)
                kept.append(share)
                continue
            p, q = ((logits / temperature).softmax(-1) for logits in (ours, theirs))
            shared.append(float(torch.minimum(p, q).sum()))
            kept.append(min(1.0, float(q[new[i]] / p[new[i]])))
    assert found.num_tokens == len(shared) == len(ROWS) * (NUM_NEW - 1)
    assert found.alpha == pytest.approx(sum(shared) / len(shared), abs=1e-5)
    assert [x for text in found.texts for x in text.kept] == pytest.approx(kept, abs=1e-4)
    per_prompt = [sum(shared[i : i + NUM_NEW - 1]) / (NUM_NEW - 1) for i in (0, 17, 34)]
    assert [Alpha([text]).alpha for text in found.texts] == pytest.approx(per_prompt, abs=1e-5)


def test_a_model_agrees_with_itself() -> None:
    """The scale's end: every guess accepted, however long the chain."""
    base = build("llama")
    for temperature in (0.0, 1.0):
        alpha = measure_alpha(base, base, ROWS, max_new_tokens=9, temperature=temperature)
        assert alpha.alpha == pytest.approx(1, abs=1e-6)
        assert alpha.chain(1).acceptance_rate == pytest.approx(1, abs=1e-5)
        assert alpha.chain(3).accept_length == pytest.approx(4, abs=1e-4)  # 8 tokens, 2 steps


def test_texts_of_one_token_have_nothing_to_verify() -> None:
    """Prevents NaN in a table, or a prompt that counts as a perfect one."""
    base = build("llama")
    alpha = measure_alpha(base, base, ROWS, max_new_tokens=1, temperature=1.0)
    assert (alpha.alpha, alpha.num_tokens, len(alpha.texts)) == (0.0, 0, len(ROWS))
    assert alpha.chain(2) == Gained()
    assert alpha.chain(2).accept_length == alpha.chain(2).acceptance_rate == 0.0


@pytest.mark.parametrize("size", [VOCAB - 8, VOCAB + 8])
def test_vocabularies_of_other_sizes_are_compared_over_the_bases(size: int) -> None:
    """Outputs that the base has no token for are never guessed: their mass is the others'."""
    base, draft = build("llama"), build("llama", seed=2, vocab_size=size)
    prompt = ROWS[0] % (VOCAB - 8)
    alpha = measure_alpha(base, draft, [prompt], max_new_tokens=2, temperature=1.0)
    first = plain_decode(
        base, prompt, max_new_tokens=1, sampler=Sampler(temperature=1.0)
    ).new_tokens
    assert first[0] < size, "else the draft model reads another token"
    text = torch.cat([prompt, torch.tensor([first])], dim=1)
    with torch.no_grad():
        p = base(text).logits[0, -1].softmax(-1)
        q = draft(text).logits[0, -1]
    both = min(size, VOCAB)
    expected = torch.minimum(p[:both], q[:both].softmax(-1)).sum()
    assert alpha.alpha == pytest.approx(float(expected), abs=1e-5)


def test_missing_outputs_cannot_be_drawn() -> None:
    """A zero in place of minus infinity gives mass to tokens that the draft does not know."""
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    assert fit_vocabulary(logits, 2).tolist() == [[1.0, 2.0]]
    assert fit_vocabulary(logits, 4).softmax(-1)[0, 3] == 0


FLAT = CostCurve.through({1: [1.0], 9: [1.0]})


def test_expected_tokens_are_the_published_ones() -> None:
    """Off by one in the exponent, and every draft looks one token better."""
    for alpha, values in {
        0.8: (1.80, 2.44, 2.95, 3.36, 3.69),
        0.6: (1.60, 1.96, 2.18, 2.31, 2.38),
        0.9: (1.90, 2.71, 3.44, 4.10, 4.69),
    }.items():
        for n, value in enumerate(values, start=1):
            assert expected_tokens(alpha, n) == pytest.approx(value, abs=0.006)
            closed = (1 - alpha ** (n + 1)) / (1 - alpha)
            assert expected_tokens(alpha, n) == pytest.approx(closed)
            assert leviathan_speedup(alpha, 0.1, n) == pytest.approx(closed / (0.1 * n + 1))
    assert expected_tokens(1.0, 4) == 5  # where the closed form divides by zero
    assert expected_tokens(0.0, 4) == 1


def test_some_draft_pays_just_where_alpha_exceeds_its_cost() -> None:
    """Leviathan et al., corollary 3.9: then one guess gains (1 + alpha) / (1 + c)."""
    for alpha in (0.1, 0.5, 0.9):
        for cost in (0.05, 0.3, 0.6, 0.95):
            speedups = [leviathan_speedup(alpha, cost, n) for n in range(1, 40)]
            assert (max(speedups) > 1) == (alpha > cost)
            assert max(speedups) >= (1 + alpha) / (1 + cost) or alpha <= cost


def test_costs_come_apart_into_draft_and_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a draft that looks free, as its cost was counted as the verify step's."""
    clocked = {"plain": 2.0, "blank": {1: 2.2, 2: 2.4, 4: 2.8}, "c": 0.5}

    def clock(base: Any, drafters: list[Any], prompt: Any, *, repeats: int, **_: Any) -> Any:
        seconds = [clocked["plain"], *clocked["blank"].values()]  # type: ignore[attr-defined]
        starts = [6.0] * 4
        for each in (0.5, 1.5):  # seconds of a draft pass of two models, and 0.2 of any drafting
            seconds += [blank + n * each + 0.2 for n, blank in clocked["blank"].items()]  # type: ignore
            starts += [6.0 + 4 * each] * 3
        assert len(drafters) == len(seconds)
        return [[value] * repeats for value in seconds], [[value] * repeats for value in starts]

    monkeypatch.setattr(speculation, "clock_steps", clock)
    base = build("llama")
    makes = {"small": Blank, "large": Blank}
    found = clock_drafts(base, makes, torch.tensor([[1, 2]]), max_tokens=4)
    assert found["small"].draft == pytest.approx(0.25)
    assert found["large"].draft == pytest.approx(0.75)
    assert found["small"].verify.at(5) == pytest.approx(1.4)
    assert found["large"].overhead == pytest.approx(0.1)
    assert found["small"].step(4) == pytest.approx(4 * 0.25 + 0.1 + 1.4)
    assert found["small"].step(3) == pytest.approx(3 * 0.25 + 0.1 + 1.3), "in between, a line"
    assert found["small"].step(0) == pytest.approx(1.0), "a step that drafts nothing is a plain one"
    rule = found["small"].by_nodes(4)
    assert [rule.of_chain(n) for n in range(5)] == pytest.approx(
        [found["small"].step(n) for n in range(5)]
    )
    assert (found["small"].start, found["small"].draft_start) == pytest.approx((3.0, 1.0))
    assert clocked_lengths(1) == [1]
    assert clocked_lengths(8) == [1, 2, 4, 8]
    assert clocked_lengths(5) == [1, 2, 4, 5]
    assert drafting_costs({1: 0.9}, FLAT) == (0, 0), "no pass costs less than nothing"
    assert drafting_costs({1: 1.4}, FLAT) == pytest.approx((0.4, 0)), "one length: all of it"
    assert drafting_costs({1: 1.5, 2: 1.4}, FLAT) == pytest.approx((0, 0.45))
    assert drafting_costs({1: 1.1, 4: 1.7}, FLAT)[1] == 0, "no overhead below nothing"


def test_prefills_dilute_a_speedup() -> None:
    """On short texts a prediction without prefills promises what nobody ever sees."""
    costs = DraftCosts(FLAT, 0.25, {}, overhead=0.5, start=3.0, draft_start=1.0)
    # 10 texts: 30 + 100 plain steps against 40 + 40 steps of 1 + 0.5 + 2 * 0.25
    assert costs.speedup(10, 40, 100, 2) == pytest.approx(130 / 120)


def alpha_of(kept: list[float]) -> Alpha:
    """Return the agreement of one text."""
    return Alpha([Agreement(kept, kept, [each > 0.5 for each in kept], len(kept))])


def test_predictions_agree_where_the_assumptions_hold() -> None:
    """With free verification and equal rates the replay is the formula: one checks the other."""
    alpha = alpha_of([0.7] * 6000)
    rows = predictions(alpha, DraftCosts(FLAT, 0.1, {}), 5)
    for n, row in enumerate(rows, start=1):
        assert row["num_tokens"] == n
        assert row["leviathan"] == pytest.approx(leviathan_speedup(0.7, 0.1, n), abs=1e-4)
        assert row["formula_with_costs"] == row["leviathan"]
        assert row["predicted"] == pytest.approx(row["leviathan"], rel=2e-3)
        assert row["accept_length"] == pytest.approx(row["formula_accept_length"], rel=2e-3)
    steep = CostCurve.through({1: [1.0], 9: [5.0]})
    costly = predictions(alpha, DraftCosts(steep, 0.1, {}), 5)
    assert costly[4]["leviathan"] == rows[4]["leviathan"]
    assert costly[4]["predicted"] == pytest.approx(rows[4]["accept_length"] / 4.0, rel=2e-3)


def test_figures_count_what_was_verified() -> None:
    """A rate over guesses that the limit forbade looks worse than the draft model is."""
    text = DecodedRow(list(range(10)), [4, 4, 1])  # limit 10: 3 + 3 + 0 guesses
    assert num_proposed(text, 3, 10) == 6
    runs = Runs(seconds=[[1.0, 3.0]], decoded=[text, DecodedRow([1, 2], [1], finished=True)])
    plain = Runs(seconds=[[2.0, 2.0]], decoded=[text, DecodedRow([1, 3], [1], finished=True)])
    found = figures(runs, plain, 3, 10)
    assert found["speedup"] == 1 and found["identical"] == 1
    assert found["acceptance_rate"] == pytest.approx(6 / 9, abs=1e-4)
    alone = figures(runs.only([0]), plain.only([0]), 3, 10)
    assert (alone["speedup"], alone["acceptance_rate"], alone["num_prompts"]) == (2, 1, 1)


def candidate(name: str, smaller: float, speedup: float, low: float) -> dict[str, Any]:
    """Return what advice reads of a candidate."""
    measured = {"speedup": speedup, "speedup_ci95": [low, speedup + 0.1]}
    return {
        "name": name,
        "times_smaller": smaller,
        "c": 0.2,
        "alpha": 0.6,
        "num_tokens": 3,
        "measured": measured,
    }


def test_none_is_a_recommendation() -> None:
    """Whoever asks which draft model to use is told to use one, though all make it slower."""
    slow = candidate("slow", 7.0, 0.8, 0.7)
    lucky = candidate("lucky", 3.0, 1.4, 0.9)  # faster on the mean, by chance
    sure = candidate("sure", 12.0, 1.2, 1.1)
    assert recommended([slow]) is None
    assert recommended([slow, lucky]) is None
    assert recommended([slow, lucky, sure]) == "sure"
    none = advice([slow, lucky], None, "greedy")
    assert none[0].startswith("recommended: none: the fastest candidate, lucky")
    lines = advice([slow, lucky, sure], "sure", "sampled")
    assert "decode.draft=sure decode.draft_tokens=3 decode.draft_sampling=sampled" in lines[0]
    assert "5 to 10 times smaller" in lines[1] and "12.0 times smaller" in lines[1]
    assert "where its size alone would say 0.08" in lines[1]
    assert len(lines) == 2, "sizes and speed-ups of all stand in the table; nothing is unmeasured"
    assert replace(DraftCosts(FLAT, 0.1, {1: 1.1}), draft=0.2).to_json() == {
        "c": 0.2,
        "overhead": 0.0,
        "start": 1.0,
        "draft_start": 0.0,
        "step": {"1": 1.1},
    }


def test_a_cost_that_cannot_be_is_unmeasured() -> None:
    """A draft pass that costs 0.00 plain steps makes every draft model look free."""
    draft, overhead = drafting_costs({1: 1.5, 2: 1.4}, FLAT)
    costs = DraftCosts(FLAT, draft, {1: 1.5, 2: 1.4}, overhead)
    assert costs.to_json()["c"] is None
    rows = predictions(alpha_of([0.7] * 60), costs, 2)
    assert [row["leviathan"] for row in rows] == [None, None] and rows[0]["predicted"] > 0
    each = {
        **candidate("busy", 7.0, 1.4, 1.2),
        "c": None,
        "predicted": rows[0],
        "per_kind": {},
    }
    each["measured"] |= {"accept_length": 1.7, "acceptance_rate": 0.7}
    lines = advice([each, candidate("quiet", 8.0, 1.1, 1.0)], "busy", "greedy")
    assert "a pass of it costs an unknown number of plain steps" in lines[1]
    assert lines[2].startswith("c of busy is unmeasured: longer drafts were clocked as no dearer")
    result = {
        "settings": {"temperature": 0, "sampling": "greedy", "dtype": "float32", "threads": 1},
        "candidates": [each],
        "verify_cost": {"1": 1.0},
        "plain": {"rep8": 0.0},
        "advice": lines,
        "warnings": ["The machine was busy"],
    }
    shown = format_compared(result).splitlines()
    assert shown[1].split()[2:5] == ["?", "3", "?"] and len(shown[0]) < len(shown[1]) + 10
    assert shown[-1] == "The machine was busy"
