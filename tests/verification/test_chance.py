"""The random choices of rules for sampled candidates, and the noise of drafters that sample."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specheads.verification.sampling import Chance, draft_noise, gumbel_noise

NUM = 20_000


def chances(seed: int = 5, num_sites: int = 4) -> Chance:
    """Return the choices of many steps of one row, as if of many rows."""
    return Chance([seed] * NUM, torch.arange(NUM), num_sites)


def uniform(noise: Tensor) -> Tensor:
    """Return the uniform numbers that Gumbel noise was made from."""
    return (-(-noise.double()).exp()).exp()


def assert_independent(first: Tensor, second: Tensor) -> None:
    """Check that pairs of uniform numbers fill the unit square evenly."""
    cells = (torch.stack([first, second], 1) * 10).long().clamp(0, 9)
    counts = (cells[:, 0] * 10 + cells[:, 1]).bincount(minlength=100).double()
    expected = len(first) / 100
    # Wilson-Hilferty, alpha 1e-5
    limit = 99 * (1 - 2 / (9 * 99) + 4.27 * math.sqrt(2 / (9 * 99))) ** 3
    assert ((counts - expected) ** 2 / expected).sum() < limit


def test_choices_belong_to_seed_row_position_and_site() -> None:
    """Prevents choices by call order or batch: a row would not be the row alone."""
    positions = torch.tensor([7, 7, 30])
    whole = Chance([3, 7, 12], positions, 6)
    probability, probs = torch.tensor([0.4, 0.5, 0.6]), torch.rand(3, 50)
    for site in (5, 0):
        accepted, drawn = whole.accept(probability, site), whole.draw(probs, site)
        for i, row in enumerate((0, 4, 9)):
            alone = Chance([3 + row], positions[i : i + 1], site + 1)
            assert bool(alone.accept(probability[i : i + 1], site)) == bool(accepted[i])
            assert int(alone.draw(probs[i : i + 1], site)) == int(drawn[i])
    assert draft_noise([3, 7, 12], positions, 2, 8)[1].equal(
        draft_noise([7], positions[1:2], 5, 8)[0, :2]
    )


def test_probabilities_are_met() -> None:
    """Prevents certain things failing, impossible ones happening, and a biased coin."""
    chance = chances()
    for p in (0.0, 0.1, 0.5, 0.9, 1.0):
        hits = float(chance.accept(torch.full((NUM,), p), 2).double().sum())
        assert abs(hits - NUM * p) <= 4.5 * math.sqrt(NUM * p * (1 - p))
    probs = torch.tensor([0.0, 0.6, 0.3, 0.1])
    counts = chance.draw(probs.expand(NUM, -1), 0).bincount(minlength=4)
    assert counts[0] == 0
    assert ((counts - NUM * probs)[1:] ** 2 / (NUM * probs)[1:]).sum() < 23


def test_streams_are_independent() -> None:
    """Prevents a draft and its test from the same noise, which would accept what it likes."""
    positions = torch.arange(NUM)
    chance = chances()
    accept = chance._accept_uniform
    drawn = [
        # the first of two: the larger noise decides, so feed the draws through probabilities
        chance.draw(torch.full((NUM, 100), 0.01), site).double().add(0.5) / 100
        for site in (0, 1)
    ]
    plain = uniform(gumbel_noise([5], positions[None], 2)[0])
    draft = uniform(draft_noise([5] * NUM, positions, 2, 2))
    streams = {
        "accept": accept[:, 0],
        "accept at the next site": accept[:, 1],
        "draw": drawn[0],
        "draw at the next site": drawn[1],
        "plain": plain[:, 0],
        "draft": draft[:, 0, 0],
        "draft at the next level": draft[:, 1, 0],
        "draft of the next token": draft[:, 0, 1],
    }
    names = list(streams)
    for i, name in enumerate(names):
        for other in names[i + 1 :]:
            assert_independent(streams[name], streams[other])
        assert_independent(streams[name][:-1], streams[name][1:])
