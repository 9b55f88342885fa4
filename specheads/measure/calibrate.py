"""Choose the tree that decodes fastest here: counted hits against clocked cost.

How many tokens a tree gains is counted from texts (:mod:`specheads.measure.hits`) and holds on
any machine; what its step costs is clocked (:mod:`specheads.decoding.costs`). Trees of all sizes
are prefixes of one order of nodes, so the fastest is found by looking at every size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from specheads.attention.tree import Tree
from specheads.decoding.costs import CostCurve, clock_steps, ratios
from specheads.decoding.loop import decode
from specheads.drafters.contract import Drafter
from specheads.drafters.growing import Grown
from specheads.drafters.heads import HeadsDrafter, heads_drafter
from specheads.measure import hits
from specheads.measure.clock import Budget
from specheads.measure.render import estimate
from specheads.measure.rows import DRIFT_LIMIT
from specheads.models.checkpoint import Export
from specheads.models.kinds import Heads
from specheads.models.output import OutputLayer, output_layer

LEAST_TOKENS = 16  # of a clocked text, however little time there is
SIZES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # clocked; those between are interpolated
_REFINEMENTS = 3  # rounds of clocking around the fastest size


@dataclass(frozen=True)
class Calibration:
    """A chosen tree, and what it was chosen from.

    Attributes:
        tree: the fastest.
        expected_accept_length: tokens per verify step on prompts like those of the calibration.
        measured_on: JSON for the export, see :func:`calibrate`; empty for a tree that was given.
    """

    tree: Tree
    expected_accept_length: float
    measured_on: dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """Static or dynamic trees of all sizes.

    Attributes:
        gains: what they gain.
        make: from a number of nodes to the drafter.
        clocked: per clocked number of nodes its costs in plain steps.
    """

    gains: hits.Gains
    make: Callable[[int], Drafter]
    clocked: dict[int, list[float]] = field(default_factory=dict)

    @property
    def largest(self) -> int:
        """The largest number of nodes."""
        return self.gains.tokens.shape[1] + 1

    def fastest(self) -> tuple[int, CostCurve]:
        """Return the number of nodes with the most tokens per second, and the cost curve.

        All sizes are looked at; of equals it is the smallest.
        """
        curve = CostCurve.through(self.clocked)
        lengths = dict(enumerate(self.gains.lengths(), start=2))
        return max(lengths, key=lambda size: lengths[size] / curve.at(size)), curve

    def worth_clocking(self) -> list[int]:
        """Return the fastest size and those halfway to its neighbours, if any of them is new.

        Between clocked sizes the cost is a guess: a jump there would hide how far a tree may grow
        before it.
        """
        best, curve = self.fastest()
        left = max((size for size in curve.sizes if size < best), default=best)
        right = min((size for size in curve.sizes if size > best), default=best)
        sizes = {(left + best) // 2, best, (best + right) // 2}
        return sorted(sizes) if sizes - set(curve.sizes) else []


@dataclass(frozen=True)
class Search:
    """Which trees are looked at, and how they are clocked.

    Attributes:
        num_nodes: size of the tree, root included; 0 chooses the fastest.
        max_nodes: largest size.
        batch_size: rows of the clocked steps.
        repeats: of the clocking.
        budget: time for all of it. Where it does not suffice, fewer prompts are decoded (those of a
            batch at the least), shorter texts, fewer sizes and fewer repeats are clocked.
    """

    num_nodes: int = 0
    max_nodes: int = 48
    batch_size: int = 1
    repeats: int = 5
    budget: Budget = field(default_factory=Budget)


def calibrate(
    base: PreTrainedModel,
    heads: Heads,
    output: OutputLayer,
    texts: hits.Texts,
    search: Search | None = None,
) -> Calibration:
    """Measure the heads on ``texts`` and return the tree with the most tokens per second.

    ``measured_on`` of the result holds: ``speculate`` and ``speedup`` over plain decoding,
    ``acceptance`` (per choice of the tree the probability that it is accepted), ``sizes`` (per
    clocked number of nodes the accept length, milliseconds per step and speed-up), with ``dynamic``
    the same for trees grown at each step, ``plain_step_drift`` (slowest over fastest round of plain
    steps: well above 1, something interfered), and on what all that was measured.

    Args:
        base: base model, in the dtype and on the device of use.
        heads: heads in the same dtype, on the same device.
        output: the base's output layer.
        texts: not those that will be reported on. Hits are pooled over their temperatures; steps
            are clocked at the first.
        search: sizes, and how to clock.

    Raises:
        ValueError: if there are no prompts.
        ConfigError: if their texts are too short to measure anything.
    """
    search = search or Search()
    decoding = search.budget.part(0.5)
    some = replace(texts, progress=lambda items: decoding.within(texts.progress(items)))
    seen = hits.collect_hits(base, heads, output, some)
    measured_on: dict[str, Any] = {
        "num_prompts": len(seen),
        "num_positions": sum(len(text.ranks) for of_prompt in seen for text in of_prompt),
        "temperatures": list(texts.temperatures),
        "max_new_tokens": texts.max_new_tokens,
        "batch_size": search.batch_size,
        "dtype": str(base.dtype).removeprefix("torch."),
        "device": base.device.type,
        "threads": torch.get_num_threads(),
    }
    largest = search.num_nodes or search.max_nodes
    nodes = hits.grow_nodes(seen, max(search.num_nodes, search.max_nodes))
    most = min(largest, len(nodes) + 1)
    if most < 2:  # no guess was ever right
        measured_on |= {"accept_length": 1.0, "speedup": 1.0, "speculate": False}
        return Calibration(Tree.chain(0), 1.0, measured_on)

    def static(size: int) -> Drafter:
        return heads_drafter(base, heads, output, Tree.from_choices(nodes[: size - 1]))

    def grown(size: int) -> HeadsDrafter:
        return heads_drafter(base, heads, output, Grown(size, temperatures=scales))

    scales = hits.fit_temperatures(seen)
    kinds = {
        "static": Kind(hits.static_gains(seen, most), static),
        "dynamic": Kind(hits.drafter_gains(seen, grown(largest)), grown),
    }
    plain = _clock_sizes(base, kinds, texts, search)
    fixed = search.num_nodes > 0
    found = {name: _summary(kind, median(plain), fixed=fixed) for name, kind in kinds.items()}
    measured_on |= {**found["static"], "plain_step_drift": round(max(plain) / min(plain), 4)}
    tree = Tree.from_choices(nodes[: measured_on["num_nodes"] - 1])
    measured_on["acceptance"] = [round(share, 4) for share in hits.acceptance(tree, seen)]
    measured_on["dynamic"] = {**found["dynamic"], "temperatures": scales}
    return Calibration(tree, measured_on["accept_length"], measured_on)


def _clock_sizes(
    base: PreTrainedModel, kinds: Mapping[str, Kind], texts: hits.Texts, search: Search
) -> list[float]:
    """Clock plain steps beside those of trees of many sizes, then of sizes around the fastest.

    Returns:
        Seconds of a plain step, one per round; the costs of the trees are added to ``kinds``.
    """
    longest = max(texts.prompts, key=lambda prompt: prompt.shape[1]).expand(search.batch_size, -1)
    limit = texts.max_new_tokens
    plain: list[float] = []
    smaller: tuple[int, ...] = () if search.num_nodes else SIZES
    if (left := search.budget.left) < math.inf:
        began = time.perf_counter()
        decode(base, None, longest, max_new_tokens=limit)
        runs_of_all = (1 + 2 * len(smaller)) * (1 + search.repeats)
        wanted_seconds = runs_of_all * (time.perf_counter() - began)
        if wanted_seconds > left:
            limit = min(limit, max(LEAST_TOKENS, int(limit * left / wanted_seconds)))
            smaller = smaller[::2]
    wanted = {
        name: [size for size in smaller if size < kind.largest] + [kind.largest]
        for name, kind in kinds.items()
    }
    how: dict[str, Any] = {"max_new_tokens": limit, "temperature": texts.temperatures[0]}
    how |= {"repeats": search.repeats, "enough": search.budget.spent}
    for _ in range(1 if search.num_nodes else 1 + _REFINEMENTS):
        trees = [(kinds[name], size) for name, sizes in wanted.items() for size in sizes]
        if not trees or (plain and search.budget.spent()):
            break
        drafters = [None, *(kind.make(size) for kind, size in trees)]
        seconds, _ = clock_steps(base, drafters, longest, **how)
        plain += seconds[0]
        # in plain steps of the same round, so that a slow minute of the machine cancels out
        for (kind, size), costs in zip(trees, ratios(seconds)[1:], strict=True):
            kind.clocked.setdefault(size, []).extend(costs)
        wanted = {name: kind.worth_clocking() for name, kind in kinds.items()}
    return plain


def _summary(kind: Kind, plain: float, *, fixed: bool) -> dict[str, Any]:
    """Return JSON about the fastest size (or the one asked for) and the clocked ones."""
    lengths = kind.gains.lengths()
    best, curve = kind.fastest()
    best = kind.largest if fixed else best

    def of_size(size: int) -> dict[str, Any]:
        length, cost = lengths[size - 2], curve.at(size)
        return {
            "num_nodes": size,
            "accept_length": round(length, 4),
            "step_ms": round(cost * plain * 1e3, 4),
            "speedup": round(length / cost, 4),
        }

    chosen = of_size(best)
    return {
        "plain_step_ms": round(plain * 1e3, 4),
        **chosen,
        "accept_length_ci95": [round(bound, 4) for bound in kind.gains.ci95(best - 2)],
        "speculate": chosen["speedup"] > 1,
        "sizes": [
            {**of_size(size), "clocked_ms": round(cost * plain * 1e3, 4)}
            for size, cost in zip(curve.sizes, curve.clocked, strict=True)
        ],
    }


def format_sizes(measured_on: dict[str, Any]) -> str:
    """Return the measured sizes as a table of plain text."""
    kinds = {"static tree": measured_on, "tree grown at each step": measured_on["dynamic"]}
    sizes = {
        name: {each["num_nodes"]: each for each in kind["sizes"]} for name, kind in kinds.items()
    }
    lines = [
        f"plain step {measured_on['plain_step_ms']:.2f} ms ({measured_on['dtype']}, "
        f"{measured_on['threads']} threads, batch {measured_on['batch_size']})",
        "     " + "".join(f"   {name:^25}" for name in kinds).rstrip(),
        "nodes" + "   accept  ms/step  speed-up" * len(kinds),
    ]
    for nodes in sorted({nodes for row in sizes.values() for nodes in row}):
        line = f"{nodes:5d}"
        for name, kind in kinds.items():
            if (size := sizes[name].get(nodes)) is None:
                line += " " * 28
                continue
            mark = "*" if nodes == kind["num_nodes"] else " "
            line += f"   {size['accept_length']:6.2f}  {size['step_ms']:7.2f}"
            line += f"  {size['speedup']:6.2f}x{mark}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def format_calibration(measured_on: dict[str, Any], depth: int) -> str:
    """Return what was chosen, what is expected of it and what came of it."""
    if "sizes" not in measured_on:
        return "do not speculate here: no guess of any head was right"
    lines = []
    checked = measured_on.get("measured", {})
    for name, kind in (("static", measured_on), ("dynamic", measured_on["dynamic"])):
        deep = f", depth {depth}" if name == "static" else ""
        lines.append(
            f"{name}: {kind['num_nodes']} nodes{deep}, expected accept length"
            f" {estimate(kind, 'accept_length')}, {kind['speedup']:.2f}x plain decoding"
        )
        if came := checked.get(name):
            lines.append(
                f"  measured on {checked['num_prompts']} other prompts:"
                f" {estimate(came, 'accept_length')},"
                f" {came['relative_to_expected']:+.1%} from the expected"
            )
    if not checked:
        lines.append("not measured on other prompts: none were given")
    static, dynamic = measured_on["speedup"], measured_on["dynamic"]["speedup"]
    if max(static, dynamic) <= 1:
        lines.append(
            f"do not speculate here: the fastest tree is expected at {max(static, dynamic):.2f}x "
            "plain decoding"
        )
    elif static <= 1:
        lines.append("do not speculate here with the static tree, but with trees of each step")
    elif dynamic > static:
        lines.append(
            f"trees grown at each step are expected to be {dynamic / static:.2f}x as fast here: "
            "decode.tree=auto, the default, takes them"
        )
    if (drift := measured_on.get("plain_step_drift", 1.0)) > DRIFT_LIMIT:
        lines.append(
            f"The machine was busy: plain steps varied {drift:.2f}x between rounds; search again."
        )
    return "\n".join(lines)


def check_expected(
    export: Export, found: Calibration, unseen: hits.Texts
) -> dict[str, dict[str, Any]]:
    """Decode prompts that were not calibrated on, and compare accept lengths with the expected.

    Args:
        export: base model and heads.
        found: what :func:`calibrate` did, with the size of grown trees if it looked at any.
        unseen: the prompts, and how they are continued.
    """
    base, heads, output = export.base, export.heads, output_layer(export.base)
    static = heads_drafter(base, heads, output, found.tree)
    drafters: dict[str, tuple[Drafter, float]] = {"static": (static, found.expected_accept_length)}
    if grown := found.measured_on.get("dynamic"):
        nodes, scales = grown["num_nodes"], grown["temperatures"]
        growing = heads_drafter(base, heads, output, Grown(nodes, temperatures=scales))
        drafters["dynamic"] = growing, grown["accept_length"]
    result = {}
    for name, (drafter, expected) in drafters.items():
        gains = hits.decoded_gains(base, drafter, unseen, heads.num_heads)
        (length,) = gains.lengths()
        result[name] = {
            "accept_length": round(length, 4),
            "accept_length_ci95": [round(bound, 4) for bound in gains.ci95(0)],
            "relative_to_expected": round(length / expected - 1, 4),
        }
    return result
