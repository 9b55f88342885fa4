"""Noise that belongs to a position, and the draws made with it."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specheads.attention.tree import Tree, default_tree
from specheads.verification import sampling
from specheads.verification.sampling import Sampler, gumbel_noise
from tests.sampled import drawn


def chi_squared_limit(dof: int) -> float:
    """Return a bound that a right sampler exceeds with probability below 1e-5 (Wilson-Hilferty)."""
    return dof * (1 - 2 / (9 * dof) + 4.27 * math.sqrt(2 / (9 * dof))) ** 3


def test_noise_depends_on_its_key_alone() -> None:
    """Prevents noise by call order or shape: tree and plain decoding would draw differently."""
    positions = torch.arange(20)[None]
    whole = gumbel_noise([3], positions, 50)
    for i in (0, 7, 19):
        assert gumbel_noise([3], torch.tensor([i]), 50)[0].equal(whole[0, i])
    assert gumbel_noise([3], positions, 20).equal(whole[..., :20])
    rows = gumbel_noise([3, 4], positions.repeat(2, 1), 50)
    assert rows[0].equal(whole[0])
    assert rows[1].equal(gumbel_noise([4], positions, 50)[0])
    assert len({float(x) for x in rows.flatten()}) == rows.numel()


def test_noise_is_pinned() -> None:
    """Prevents a change of the generator, which would change every seeded result unannounced."""
    noise = gumbel_noise([7], torch.tensor([5]), 3)
    assert noise.dtype == torch.float32
    torch.testing.assert_close(
        noise, torch.tensor([[0.807608, 4.415173, -0.174928]]), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("axis", ["seed", "position", "token"])
def test_noise_is_gumbel_along_every_axis(axis: str) -> None:
    """Prevents a weak hash: neighbouring seeds, positions or tokens with related noise."""
    num = 20_000
    if axis == "seed":
        noise = gumbel_noise(range(num), torch.full((num,), 9), 2)
    elif axis == "position":
        noise = gumbel_noise([5], torch.arange(num)[None], 2)[0]
    else:
        noise = gumbel_noise([5], torch.tensor([9]), 2 * num)[0].view(num, 2)
    uniform = (-(-noise.double()).exp()).exp()
    # pairs of neighbours must fill the unit square evenly
    pairs = torch.cat([uniform, torch.stack([uniform[:-1, 0], uniform[1:, 0]], 1)])
    for part in (pairs[:num], pairs[num:]):
        cells = (part * 10).long().clamp(max=9)
        counts = (cells[:, 0] * 10 + cells[:, 1]).bincount(minlength=100).double()
        expected = part.shape[0] / 100
        assert ((counts - expected) ** 2 / expected).sum() < chi_squared_limit(99)


@pytest.mark.parametrize("settings", [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.3, 4, 1.0), (1.0, 0, 0.7)])
def test_draws_follow_the_softmax(settings: tuple[float, int, float]) -> None:
    """Prevents a temperature applied twice, or noise of the wrong scale."""
    temperature, top_k, top_p = settings
    sampler = Sampler(temperature, top_k, top_p, seed=11)
    logits = torch.randn(8) * 1.5
    num = 20_000
    found = drawn(sampler, logits.expand(1, num, 8), torch.arange(num)[None])
    probs = sampler.warp(logits).softmax(-1).double()
    kept = probs > 0
    counts = found.flatten().bincount(minlength=8).double()
    assert counts[~kept].sum() == 0
    expected = probs[kept] * num
    statistic = ((counts[kept] - expected) ** 2 / expected).sum()
    assert statistic < chi_squared_limit(int(kept.sum()) - 1)


def test_warpers_are_those_of_transformers() -> None:
    """Prevents top-k and top-p that mean something else than users know."""
    logits = torch.randn(5, 40) * 2
    expected = logits
    for warper in (TemperatureLogitsWarper(0.7), TopKLogitsWarper(12), TopPLogitsWarper(0.8)):
        expected = warper(torch.zeros(5, 1, dtype=torch.long), expected)
    torch.testing.assert_close(Sampler(0.7, 12, 0.8).warp(logits), expected)


@pytest.mark.parametrize("p", [0.05, 0.6, 0.95, 0.9999])
def test_a_large_vocabulary_is_cut_as_a_small_one(p: float) -> None:
    """Prevents a top-p of the best thousand tokens where a flat distribution needs more."""
    logits = torch.randn(2, 4, 5000) * torch.tensor([[0.1], [2.0], [4.0], [30.0]])
    expected = TopPLogitsWarper(p)(torch.zeros(8, 1, dtype=torch.long), logits.flatten(0, 1))
    found = Sampler(1.0, top_p=p).warp(logits)
    assert found.isfinite().equal(expected.view_as(found).isfinite())
    assert found.equal(torch.where(found.isfinite(), logits, -math.inf))
    counts = found.isfinite().sum(-1)
    assert counts.min() >= 1 and (p < 0.5 or counts.max() > sampling._NUCLEUS)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drawing_a_tree_is_drawing_its_nodes(temperature: float) -> None:
    """Prevents nodes that use the noise of their slot instead of their position."""
    tree = default_tree(4, 12)
    sampler = Sampler(temperature, seed=2)
    logits = torch.randn(2, tree.num_nodes, 30)
    start = [5, 17]
    found = sampler.tree_scores(logits, tree, start).argmax(-1)
    positions = torch.tensor(start)[:, None] + tree.depths + 1
    assert found.equal(drawn(sampler, logits, positions))


@pytest.mark.parametrize("vocab_size", [5, 300, 9000, 20_000])
def test_noise_made_ahead_is_the_positions_own(vocab_size: int) -> None:
    """Prevents another text where a block of kept noise ends, or for another row of a batch."""
    sampler = Sampler(seeds=[11, 7])
    for num in (1, 5):
        for start in (0, 7, 50, 59, 61, 62, 63, 64, 127, 1000):
            starts = [start, start + 3]
            positions = torch.tensor(starts)[:, None] + torch.arange(num)
            for _ in range(2):  # made, then kept
                found = sampler.noise_from(starts, num, vocab_size, torch.device("cpu"))
                assert found.equal(gumbel_noise(sampler.seeds, positions, vocab_size))


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_near_ties_are_seen(temperature: float) -> None:
    """Prevents near-ties judged without regard to the size of the logits or the temperature."""
    sampler = Sampler(temperature)
    for size in (1.0, 100.0):
        logits = torch.tensor([[0.0, -1.0, 0.3, -0.5]]) * size
        for gap, tied in ((1e-6, True), (1e-4, False)):
            logits[0, 3] = logits[0, 2] * (1 - gap)
            scores = logits / (temperature or 1.0)
            assert sampler.near_ties(logits, scores).tolist() == [tied]


def test_greedy_takes_the_best() -> None:
    """Prevents noise at temperature 0."""
    logits = torch.randn(1, 9, 30)
    assert Sampler().tree_scores(logits, Tree.chain(8), [0]).equal(logits)


@pytest.mark.parametrize(
    "settings", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_bad_settings_are_refused(settings: dict[str, float]) -> None:
    """Prevents a negative temperature, which would prefer the worst tokens."""
    with pytest.raises(ValueError, match=next(iter(settings))):
        Sampler(**settings)  # type: ignore[arg-type]
