"""The cost model: ZeRO's arithmetic as published, and as DeepSpeed's settings change it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from specheads.training.engine import Spread
from specheads.training.plan import RESERVED, SPREADS, Load, need
from tests.script_modules import load_script

costs: Any = load_script("zero_costs")

CONF = Path(__file__).parents[2] / "conf" / "deepspeed"


def states(load: Load, spread: Spread, ranks: int) -> float:
    """Return the bytes of what ZeRO divides."""
    found = need(load, spread, ranks)
    return found.weights + found.gradients + found.optimizer


@pytest.mark.parametrize(
    ("ranks", "gigabytes"),
    [
        (4, (120, 52.5, 41.3, 30)),
        (16, (120, 35.6, 21.6, 7.5)),
        (64, (120, 31.4, 16.6, 1.88)),
        (256, (120, 30.4, 15.4, 0.47)),
    ],
)
def test_published_memory_of_zero(ranks: int, gigabytes: tuple[float, ...]) -> None:
    """Table 1 of arXiv:1910.02054, 7.5 billion parameters: whatever differs is not ZeRO."""
    load = Load(trained={2: 7_500_000_000})
    for stage, expected in enumerate(gigabytes):
        found = states(load, SPREADS[f"zero{stage}"], ranks) / 1e9
        assert found == pytest.approx(expected, rel=0.01), stage


def test_every_shipped_setting_is_known() -> None:
    """A table about other settings than those that run is worse than none."""
    files = {path.stem: dict(OmegaConf.load(path)) for path in CONF.glob("*.yaml")}
    assert {name: Spread.from_config(found) for name, found in files.items()} == SPREADS


def test_settings_are_read() -> None:
    """A bucket that is made smaller to fit, and not counted, refuses what would do."""
    zero = {
        "stage": 3,
        "reduce_bucket_size": 5e6,
        "overlap_comm": False,
        "stage3_max_live_parameters": 7,
        "stage3_prefetch_bucket_size": "9",
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "none"},
    }
    found = Spread.from_config({"zero_optimization": zero})
    assert found == Spread(True, 3, False, True, 5_000_000, False, 7, 9)
    assert Spread.from_config({"gradient_clipping": 1}) == Spread(deepspeed=True)


# 1,000 trained numbers and 500 frozen ones; activations 60, logits 40, a matrix of 100 numbers
FLOAT32 = Load(
    trained={4: 1000}, frozen=500, frozen_bytes=2000, activations=60, logits=40, formed=400,
    layers=4000, piece=500,
)  # fmt: skip


@pytest.mark.parametrize(
    ("spread", "weights", "gradients", "optimizer", "reducing", "stepping", "loading"),
    [
        (Spread(), 6000, 4000, 8000, 4000, 4000, 6000),
        # all gradients copied flat to be reduced; Adam's temporary for all parameters
        (Spread(True, 0), 6000, 4000, 8000, 8000, 8000, 6000),
        # halves of: moments and a copy of the weights; weights twice while they are flattened
        (Spread(True, 1, bucket=10), 6000, 4000, 6000, 6000, 2000 + 4000, 10000),
        (Spread(True, 2, bucket=10), 6000, 2000, 6000, 4000, 2000 + 4000, 10000),
        # half of the layers, the largest of them whole, and what is outside of them
        (Spread(True, 3, bucket=10), 3000, 2000, 6000, 4000, 2000 + 4000, 2000 + 2000 + 500),
    ],
)
def test_two_ranks_by_hand(
    spread: Spread,
    weights: int,
    gradients: int,
    optimizer: int,
    reducing: int,
    stepping: int,
    loading: int,
) -> None:
    """Every byte of a small case, so that no stage divides what it does not, or forgets a copy."""
    found = need(FLOAT32, spread, 2 if spread.deepspeed else 1)
    assert (found.weights, found.gradients, found.optimizer) == (weights, gradients, optimizer)
    assert (found.reducing, found.stepping, found.loading) == (reducing, stepping, loading)
    assert (found.activations, found.logits, found.formed, found.host) == (60, 40, 400, 0)
    assert found.held == 0  # nothing is, which this load says
    assert found.buckets == (4 * 10 if spread.stage else 0)
    assert found.gathered == (1500 * 4 if spread.stage == 3 else 0)
    fixed = weights + optimizer + found.buckets + found.gathered
    assert found.training == fixed + max(60 + 40 + 400, reducing, stepping)
    assert found.peak == max(found.training, loading)
    assert found.fits(found.peak + RESERVED) and not found.fits(found.peak + RESERVED - 1)


def test_sixteen_bits_keep_float32_beside_them() -> None:
    """2 bytes a weight are not 2 bytes a parameter: the moments and the master are float32."""
    load = Load(trained={2: 1000}, formed=200)
    plain, first = need(load, Spread(), 1), need(load, Spread(True, 0), 2)
    assert (plain.optimizer, first.optimizer) == (4000, 12000)
    assert first.stepping == 2000 + 4000 + 4000  # float32 gradients, Adam's temporary
    third = need(load, Spread(True, 3, overlap=True, bucket=8, max_live=100, prefetch=20), 4)
    assert (third.weights, third.gradients, third.optimizer) == (500, 500, 3000)
    assert (third.gathered, third.stepping) == (240, 500 + 1000 + 1000)
    assert need(load, Spread(True, 3), 4, temporaries=2).stepping == 500 + 1000 + 2000


def test_gathered_weights_that_autograd_keeps_are_counted() -> None:
    """Without checkpointing a base of 138 GB is whole on every rank when backward begins."""
    spread = Spread(True, 3, overlap=True, bucket=8, max_live=100, prefetch=20)
    load = Load(trained={2: 1000}, frozen=9000, frozen_bytes=18000, held=8000, small=50, outer=500)
    found = need(load, spread, 4)
    assert (found.gathered, found.held) == (2 * (100 + 20 + 500 + 50), 2 * (8000 - 120))
    assert found.training >= found.weights + found.optimizer + found.gathered + found.held
    assert need(load, Spread(True, 2), 4).held == 0
    offload = need(replace(load, largest=300), SPREADS["zero2_offload"], 4)
    assert offload.buckets == 2 * (500_000_000 + 300)
    assert offload.host == 250 * (12 + 4 + 2) + 2 * 300


def test_later_micro_batches_find_gradients_there() -> None:
    """The first micro-batch fits, the second is out of memory."""
    once = need(FLOAT32, Spread(), 1)
    twice = need(
        Load({4: 1000}, 2000, 500, activations=9000, formed=400, accumulation=2), Spread(), 1
    )
    assert once.formed == 400 and once.training == 14000 + 4000
    assert twice.formed == 4400 and twice.training == 14000 + 9000 + 4400


def test_offloading_moves_bytes_and_loses_none() -> None:
    """What leaves the GPU has to fit somewhere: 16 bytes a number, and a buffer."""
    load = Load(trained={2: 8000}, frozen=4000, frozen_bytes=8000)
    optimizer_only = need(load, Spread(True, 2, offload_optimizer=True, bucket=0), 4)
    assert (optimizer_only.weights, optimizer_only.gradients) == (24000, 0)
    assert (optimizer_only.optimizer, optimizer_only.host) == (0, 2000 * (12 + 4 + 2))
    both = need(load, SPREADS["zero3_offload"], 4)
    assert states(load, SPREADS["zero3_offload"], 4) == 0 and both.host == 2000 * 18 + 24000 / 4
    assert both.gathered == 24000  # a model this small is gathered whole


@given(
    trained=st.integers(1, 10**11),
    frozen=st.integers(0, 10**11),
    ranks=st.integers(1, 512),
    size=st.sampled_from([2, 4]),
)
def test_more_ranks_and_higher_stages_never_need_more(
    trained: int, frozen: int, ranks: int, size: int
) -> None:
    """A model that grows with what it divides by would send people to larger machines."""
    load = Load(trained={size: trained}, frozen=frozen, frozen_bytes=2 * frozen)
    for stage in range(4):
        spread = SPREADS[f"zero{stage}"]
        assert states(load, spread, ranks + 1) <= states(load, spread, ranks)
        found = need(load, spread, ranks)
        assert min(vars(found).values()) >= 0
    divided = [states(load, SPREADS[f"zero{stage}"], ranks) for stage in range(4)]
    if size == 2:  # a copy of float32 weights may cost more than the division of moments saves
        assert divided == sorted(divided, reverse=True)


def test_traffic_and_time_by_hand() -> None:
    """Section 7 of arXiv:1910.02054: 2, 2, 2 and 3 times the weights; frozen ones are gathered."""
    load = costs.Brought(
        trained={2: 1000}, frozen=500, frozen_bytes=1000, flops=600, accumulation=3
    )
    sent = [costs.sent_bytes(load, SPREADS[f"zero{stage}"], 4) for stage in range(4)]
    # 3/4 of the bytes; stage 2 reduces every micro-batch, stage 3 also gathers twice in each
    assert sent == [0.75 * 4000, 0.75 * 4000, 0.75 * 8000, 0.75 * 3 * (2 * 3000 + 2000)]
    assert (
        costs.sent_bytes(load, SPREADS["zero3"], 1)
        == costs.sent_bytes(load, SPREADS["none"], 8)
        == 0
    )
    machine = costs.Machine("m", 0, flops=100, link=10, bandwidth=costs.ADAM_TRAFFIC)
    times = costs.seconds(load, SPREADS["zero1"], 4, machine)
    assert (times.computing, times.communication, times.optimizer) == (18, 300, 250)
    assert times.total == 568
    slow = costs.Machine("m", 0, 100, 10, 1e9, host_link=100, host_bandwidth=costs.ADAM_TRAFFIC)
    times = costs.seconds(load, SPREADS["zero3_offload"], 4, slow)
    assert times.optimizer == 250 + 2 * 500 / 100  # Adam there; gradients and weights on the way
    assert times.communication == sent[3] / 10 + 3 * 2 * (3000 / 4) / 100
