"""What speculation is expected to bring, before anything is trained: ``dry_run=true``.

The accept length is an assumption, named as such; the cost of a verify step is measured here, on
this base model and machine. Where their ratio is below 1, training would be paid for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from torch import Tensor
from transformers import PreTrainedModel

from specheads.config import EvaluateConfig, TreeConfig
from specheads.decoding.cost import clock_steps, ratios, runner
from specheads.drafters.made import static_drafter
from specheads.models.checkpoint import read_config
from specheads.models.forward import undisturbed
from specheads.models.kinds import Heads
from specheads.models.output import OutputLayer
from specheads.tree import Choice, Tree, grow_tree

# Top-1 and top-5 accuracy of the five Medusa-1 heads of Vicuna-7B v1.3 after an epoch of ShareGPT:
# assets/medusa_acc.csv of github.com/FasterDecoding/Medusa, version 0.1.
PUBLISHED = ((0.560, 0.780), (0.316, 0.562), (0.201, 0.417), (0.147, 0.340), (0.118, 0.300))
_SOURCE = "accuracies published for Medusa-1 heads of Vicuna-7B, guesses as if independent"
_NUM_RANKS = 10
_REPEATS = 3
_NEW_TOKENS = 48  # per clocked text


@dataclass(frozen=True)
class Expected:
    """Accept length and cost of one tree.

    Attributes:
        tree: which.
        accept_length: expected tokens per verify step.
        source: where that number comes from.
        cost: of a verify step, in plain steps of this machine; one per round.
    """

    tree: Tree
    accept_length: float
    source: str
    cost: list[float]

    @property
    def speedup(self) -> float:
        """Expected, over plain decoding."""
        return self.accept_length / median(self.cost)


def published_rates(num_heads: int) -> list[list[float]]:
    """Return for every head the probability that its guess of each rank is right, [K][R].

    Top-1 and top-5 are the published ones; ranks fall geometrically such that they meet both. Heads
    beyond the fifth are taken to be as good as the fifth, which flatters them a little.
    """
    rates = []
    for head in range(num_heads):
        top1, top5 = PUBLISHED[min(head, len(PUBLISHED) - 1)]
        low, high = 0.0, 1.0
        for _ in range(50):
            factor = (low + high) / 2
            if top1 * sum(factor**rank for rank in range(5)) < top5:
                low = factor
            else:
                high = factor
        rates.append([top1 * low**rank for rank in range(_NUM_RANKS)])
    return rates


def expected_length(tree: Tree, rates: Sequence[Sequence[float]]) -> float:
    """Return 1 plus the probability of every node, guesses of different heads independent."""
    values: dict[Choice, float] = {(): 1.0}
    for choice in tree.choices:
        above = rates[len(choice) - 1]
        rate = above[choice[-1]] if choice[-1] < len(above) else 0.0
        values[choice] = values[choice[:-1]] * rate
    return sum(values.values())


def assumed(
    num_heads: int, tree: TreeConfig, evaluate: EvaluateConfig, start: str = ""
) -> tuple[Tree, float, str]:
    """Return the tree at hand, its expected accept length, and the assumption behind it.

    Args:
        num_heads: of the heads to be trained.
        tree: ``choices``, else the tree of ``start``, else one of ``num_nodes`` nodes (of
            ``evaluate.num_nodes`` where that is 0) grown from the published accuracies.
        evaluate: see ``tree``.
        start: an export whose heads training starts from: what its tree was measured to gain.

    Raises:
        ConfigError: if ``start`` is no export.
    """
    measured: Mapping[Choice, float] = {}
    found = Tree.chain(0)
    if start:
        section = read_config(Path(start))["tree"]
        found = Tree.from_json(section["choices"])
        acceptance = (section.get("measured_on") or {}).get("acceptance")
        if acceptance:
            measured = dict(zip(map(tuple, section["choices"]), acceptance, strict=True))
    rates = published_rates(num_heads)
    if tree.choices:
        found = Tree.from_choices(tree.choices)
    elif not start:
        found, _ = grow_tree(rates, tree.num_nodes or evaluate.num_nodes)
    if not measured:
        return found, expected_length(found, rates), _SOURCE
    # nodes that were not measured count as never accepted
    known = sum(measured.get(choice, 0.0) for choice in found.choices)
    least = "" if all(choice in measured for choice in found.choices) else "at least, "
    return found, 1 + known, f"{least}as measured for the heads of {start}"


def expect(
    base: PreTrainedModel,
    heads: Heads,
    output: OutputLayer,
    prompts: Sequence[Tensor],
    tree: TreeConfig,
    evaluate: EvaluateConfig,
    *,
    start: str = "",
) -> Expected:
    """Clock verify steps of the tree at hand beside plain steps; heads need not be trained yet.

    Args:
        base: base model.
        heads: of the shape that is to be trained.
        output: the base's output layer.
        prompts: token ids [1, P] each; the longest is decoded.
        tree: see :func:`assumed`.
        evaluate: likewise; texts are as long as ``max_new_tokens``, 48 at most.
        start: see :func:`assumed`.

    Raises:
        ConfigError: if ``start`` is no export.
        ValueError: if there are no prompts.
    """
    if not prompts:
        raise ValueError("prompts must hold at least 1 prompt, got 0")
    shape, length, source = assumed(heads.num_heads, tree, evaluate, start)
    longest = max(prompts, key=lambda prompt: prompt.shape[1])
    with undisturbed(base, heads):
        drafters = [None, static_drafter(base, heads, output, shape)]
        tokens = min(evaluate.max_new_tokens, _NEW_TOKENS)
        runs = [runner(base, drafter, longest, max_new_tokens=tokens) for drafter in drafters]
        cost = ratios(clock_steps(runs, repeats=_REPEATS))[1]
    return Expected(shape, length, source, cost)


def describe_expected(expected: Expected) -> str:
    """Return the lines about expected accept length and speed-up, and a warning where it is due."""
    nodes, cost, speedup = expected.tree.num_nodes, median(expected.cost), expected.speedup
    text = (
        f"speculation: a verify step of {nodes} nodes costs {cost:.2f} plain steps here"
        f" ({min(expected.cost):.2f} to {max(expected.cost):.2f}); accept length"
        f" {expected.accept_length:.2f} ({expected.source}): expected speed-up {speedup:.2f}"
    )
    if speedup < 1:
        text += (
            f"\nwarning: expected speed-up {speedup:.2f} is below 1: on this machine decoding with"
            f" this tree would be slower than without; try fewer nodes (tree.num_nodes)"
        )
    return text
