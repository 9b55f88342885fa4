"""The laws of tests/drafter_laws.py for every drafter and every form that it has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import cache, partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specheads.attention.tree import Tree, default_tree
from specheads.config import HeadsConfig
from specheads.decoding.costs import Blank
from specheads.decoding.generate import SpecDecoder
from specheads.decoding.loop import Settings, decode
from specheads.decoding.stream import Job, Stream
from specheads.drafters.contract import Drafter
from specheads.drafters.draft_model import DraftModelDrafter
from specheads.drafters.draft_tree import DraftTreeDrafter, SampledTreeDrafter
from specheads.drafters.growing import Grown
from specheads.drafters.heads import heads_drafter
from specheads.drafters.length import AdaptiveLength, FixedLength, StepCosts
from specheads.drafters.lookahead import LookaheadDrafter
from specheads.drafters.lookup import NgramDrafter, SuffixDrafter
from specheads.drafters.merge import HybridDrafter
from specheads.models.blocks import prefix_sizes
from specheads.models.checkpoint import KINDS as HEADS
from specheads.models.heads import MedusaHeads
from specheads.models.mtp import MtpHeads, block_config
from specheads.models.output import output_layer
from specheads.verification.sampling import Sampler
from tests.drafter_laws import check_deterministic, check_sampled
from tests.drafters.test_draft_model import near
from tests.elsewhere import CPU, elsewhere, place
from tests.ragged import ROWS, padded
from tests.zoo import VOCAB, build

MIXED = Tree.from_choices([(0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (1, 0, 0)])
WIDE = Tree.from_choices([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
BY_NODES = [0] + [1 + n / 20 for n in range(24)]
FREE = StepCosts(0.0, BY_NODES)
CONFIDENT = AdaptiveLength(StepCosts(0.05, BY_NODES), 4)
LOOPING = 4  # a seed whose model repeats itself
KINDS: dict[str, dict[str, Any]] = {
    "medusa": {},
    "pruned": {"markov_rank": 5, "lm_head": "pruned", "num_kept": 40},
    "rows": {"lm_head": "shared_pruned", "num_kept": 40},
    "hydra": {"condition": True},
    "everything": {"condition": True, "markov_rank": 5},
}
TAPPED = {
    "block": HeadsConfig("block", {"form": "joined"}, 3, 1, "shared"),
    "dflash": HeadsConfig("block", {"form": "published", "sample_from_anchor": False}, 3, 1, "own"),
    "dspark": HeadsConfig(
        "block", {"form": "published"}, 3, 2, "pruned", num_kept=40, correction="markov"
    ),
    "eagle3": HeadsConfig("eagle3", {}, 3, 1, "pruned", num_kept=40),
}


def base(seed: int = 1, name: str = "llama") -> PreTrainedModel:
    """Return a base model; read only."""
    return _base(seed, name, place())


@cache
def _base(seed: int, name: str, device: torch.device) -> PreTrainedModel:
    return build(name, seed=seed).to(device)


def random_heads(kind: str) -> Any:
    """Return heads of ``llama`` that hit now and then."""
    return _placed_heads(kind, place())


@cache
def _placed_heads(kind: str, device: torch.device) -> Any:
    # a copy of the CPU's, which must be there: elsewhere other numbers are drawn
    return _heads(kind) if device == CPU else deepcopy(_placed_heads(kind, CPU)).to(device)


def _heads(kind: str) -> Any:
    model = base()
    torch.manual_seed(3)
    if kind.startswith("mtp"):
        variant = kind.removeprefix("mtp_")
        heads: Any = MtpHeads(3, block_config(model.config), VOCAB, variant=variant)
        heads.init_from_base(model)
    elif kind in TAPPED:
        asked, output = TAPPED[kind], output_layer(model)
        heads = HEADS[asked.kind].from_settings(asked, model, output)
        heads.init_from_output(output.weight)
    else:
        options = {**KINDS[kind.removesuffix("_prefix")]}
        if kind.endswith("_prefix"):
            options["prefix"] = prefix_sizes(model.config)
        heads = MedusaHeads(3, 1, model.config.hidden_size, VOCAB, **options)
        heads.init_from_output(output_layer(model).weight)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    return heads.eval()


def of_heads(kind: str, shape: Tree | Grown = WIDE) -> Drafter:
    """Return a drafter of such heads."""
    return heads_drafter(base(), random_heads(kind), output_layer(base()), shape)


def draft(noise: float) -> PreTrainedModel:
    """Return a model that often says what ``llama`` says."""
    return _draft(noise, place())


@cache
def _draft(noise: float, device: torch.device) -> PreTrainedModel:
    return near(_base(1, "llama", CPU), noise).to(device)


def windowed(num_nodes: int = 0) -> Drafter:
    """Return a hybrid within a hybrid, with probes."""
    inner = HybridDrafter([NgramDrafter(), LookaheadDrafter(3, 3, 3)], num_nodes)
    return HybridDrafter([inner, SuffixDrafter(6)], num_nodes and num_nodes + 2)


def lazy() -> Drafter:
    """Return a hybrid that asks another one only where there is little to copy."""
    free, dear = (StepCosts(price, BY_NODES) for price in (0, 0.3))
    inner = HybridDrafter([of_heads("medusa"), NgramDrafter(), SuffixDrafter(6)])
    return HybridDrafter([inner, SuffixDrafter(6)], costs=[dear, free])


def perfect() -> Drafter:
    """Return a hybrid with a draft model that says and draws what the base does."""
    coupled = DraftModelDrafter(build("llama").to(place()), FixedLength(3), sampling="coupled")
    return HybridDrafter([NgramDrafter(), coupled])


# what is made, and the accept length of greedy decoding that it must exceed
DETERMINISTIC: dict[str, tuple[Callable[[], Drafter], float]] = {
    "blank": (lambda: Blank(3), 0.9),
    **{
        f"{kind}, {name}": (partial(of_heads, kind, shape), 1)
        for kind in (*KINDS, "medusa_prefix", "hydra_prefix")
        for name, shape in {"static": default_tree(3, 14), "grown": Grown(12)}.items()
    },
    **{
        f"{kind}, {name}": (partial(of_heads, kind, shape), 0.9)
        for kind in ("mtp_parallel", "mtp_causal", "mtp_sequential", *TAPPED)
        for name, shape in {"static": default_tree(3, 14), "grown": Grown(12)}.items()
    },
    "medusa, two nodes": (partial(of_heads, "medusa", Grown(2)), 1),
    "cut heads": (lambda: HybridDrafter([of_heads("medusa")], costs=[FREE]), 1),
    "draft": (lambda: DraftModelDrafter(draft(0.015), FixedLength(3)), 1.5),
    "coupled": (lambda: DraftModelDrafter(draft(0.015), CONFIDENT, sampling="coupled"), 1.5),
    "tree": (lambda: DraftTreeDrafter(draft(0.04), 12, max_depth=4, width=3), 2),
    "stopping": (lambda: DraftTreeDrafter(draft(0.04), 12, max_depth=4, width=3, min_gain=0.5), 2),
    "coupled tree": (lambda: SampledTreeDrafter(draft(0.04), MIXED, coupled=True), 1.5),
    "lookup": (NgramDrafter, 1),
    "suffix": (lambda: SuffixDrafter(8, per_match=2.0), 1),
    "whole suffix": (lambda: SuffixDrafter(8, per_match=99.0), 1),
    "hybrid": (lambda: HybridDrafter([of_heads("medusa"), NgramDrafter()], 4), 1),
    "windowed": (windowed, 1),
    "cut windowed": (partial(windowed, 4), 1),
    "lazy": (lazy, 1),
    "perfect": (perfect, 3),
}
SAMPLED: dict[str, Callable[[], Drafter]] = {
    "fixed": lambda: DraftModelDrafter(draft(0.015), FixedLength(3), sampling="sampled"),
    "confident": lambda: DraftModelDrafter(draft(0.015), CONFIDENT, sampling="sampled"),
    "without_replacement": lambda: SampledTreeDrafter(draft(0.04), MIXED),
}


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_the_laws_hold(name: str) -> None:
    """Prevents other tokens than plain decoding's, and rows that depend on the rest of a batch."""
    make, least = DETERMINISTIC[name]
    assert check_deterministic(base(), make) > least


@pytest.mark.parametrize("name", SAMPLED)
def test_the_laws_of_samples_hold(name: str) -> None:
    """Prevents that samples spoil greedy decoding, caches, limits, or other rows."""
    assert check_sampled(base(), SAMPLED[name]) > 1.5


@pytest.mark.parametrize("name", [*DETERMINISTIC, *SAMPLED])
def test_no_tensor_is_left_on_the_cpu(name: str) -> None:
    """One tensor on the CPU ends decoding on every GPU, of which the tests have none."""
    made = {name: make for name, (make, _) in DETERMINISTIC.items()} | SAMPLED
    found = []
    for anywhere in (nullcontext(CPU), elsewhere()):
        with anywhere as device:
            given = {key: value.to(device) for key, value in padded(ROWS).items()}
            for sampler in (Sampler(), Sampler(temperature=0.8, seed=3)):
                result = decode(base(), made[name](), **given, max_new_tokens=9, sampler=sampler)
                found.append([(row.new_tokens, row.accept_lengths) for row in result.rows])
    assert found[:2] == found[2:]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_laws_of_lookahead_hold(name: str) -> None:
    """Prevents rows that share a pool or a window, on models that repeat themselves."""
    assert check_deterministic(base(LOOPING, name), lambda: LookaheadDrafter(4, 3, 3)) > 1


@pytest.mark.parametrize("piece", [0, 4])
@pytest.mark.parametrize("name", [*DETERMINISTIC, *SAMPLED])
def test_rows_that_come_later_get_what_they_would_get_alone(name: str, piece: int) -> None:
    """Prevents a server in which a newcomer draws with another's noise, or reads another's text.

    Prompts come one at a time, while other rows are at any step of theirs, read whole or in pieces.
    """
    made = {name: make for name, (make, _) in DETERMINISTIC.items()} | SAMPLED
    texts = [row[0].tolist() for row in ROWS]
    waiting = [Job(texts[i % 3] + [i] * i, 5 + 4 * (i % 3), 50 + i) for i in range(5)]
    alone = {
        job.seed: decode(
            base(),
            made[name](),
            torch.tensor([job.ids]),
            max_new_tokens=job.limit,
            sampler=Sampler(0.8, seed=job.seed),
        ).new_tokens
        for job in waiting
    }
    how = Settings(sampler=Sampler(0.8))
    stream = Stream(base(), made[name](), how, batch_size=3, piece=piece)

    def take(num: int) -> list[Job]:
        return [waiting.pop(0)] if num and waiting else []

    found = {job.seed: row.new_tokens for ended in stream.run(take) for job, row in ended}
    assert found == alone


@pytest.mark.parametrize("name", [*DETERMINISTIC, *SAMPLED])
def test_beams_go_their_own_ways(name: str) -> None:
    """Prevents beams of one parent that share a drafter's state, and guesses that change beams."""
    made = {name: make for name, (make, _) in DETERMINISTIC.items()} | SAMPLED
    ids, mask = padded(ROWS[:2]).values()
    how: dict[str, Any] = {"attention_mask": mask, "num_beams": 3, "temperature": 0.0}
    plain = SpecDecoder(base(), None).generate(ids, 14, **how)
    found = SpecDecoder(base(), made[name]()).generate(ids, 14, **how)
    torch.testing.assert_close(found.sequences_scores, plain.sequences_scores, atol=1e-4, rtol=0)
    assert found.sequences.equal(plain.sequences)
    assert found.num_steps <= plain.num_steps
