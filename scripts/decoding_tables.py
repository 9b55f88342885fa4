"""Tables of BENCHMARKS.md about decoding, made from the files of benchmarks/."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # a test imports this from elsewhere

from readme_blocks import same
from table_cells import Bench, interval, line, of, rows_of

Maker = Callable[[Path], list[str]]
BASIC = {"prompt lookup": "prompt_lookup", "static tree": "tree"}
TREES = BASIC | {"tree of each step": "tree_dynamic"}
LONG = {"plain": "plain", "transformers generate": "hf_generate"} | TREES
DRAFTERS = {
    "plain": "plain",
    "transformers generate": "hf_generate",
    "prompt lookup (ours)": "prompt_lookup",
    "Medusa-1 heads, static tree": "tree",
    "Medusa-1 heads, tree of each step": "tree_dynamic",
    "transformers' assisted generation, same draft, 4 tokens": "hf_assisted",
    "transformers' prompt lookup": "hf_lookup",
    "draft model, chain of 4": "draft",
    "draft model, tree": "draft_tree",
    "lookahead 7/4/7": "lookahead",
    "suffix copies": "suffix",
    "Medusa-1 heads + suffix": "heads+suffix",
    "draft model + suffix": "draft+suffix",
    "Hydra heads, static tree": "hydra/tree",
    "Hydra heads, tree of each step": "hydra/tree_dynamic",
}


def per_kind(file: str, names: dict[str, str], heats: Sequence[float] = (0, 0.7, 1)) -> Maker:
    """Return the maker of accept length (speed-up) by kind of prompt."""

    def make(folder: Path) -> list[str]:
        rows = rows_of(of(folder, file))
        lines = []
        for heat in heats:
            for label, method in names.items():
                kinds = rows[method, heat, 1]["per_kind"]
                cells = [
                    f"{kinds[k]['accept_length']:.2f} ({kinds[k]['speedup_vs_plain']:.2f}x)"
                    for k in sorted(kinds)
                ]
                lines.append(line(f"{heat:g}", label, *cells))
        return lines

    return make


def typical(folder: Path) -> list[str]:
    """Typical acceptance beside exact decoding."""
    names = {
        "plain": "plain sampling",
        "exact": "exact tree",
        "typical_0.05": "typical, epsilon 0.05",
        "typical_0.09": "typical, epsilon 0.09",
        "typical_0.15": "typical, epsilon 0.15",
        "greedy": "greedy decoding",
    }
    lines = []
    for row in of(folder, "tinycode_typical")["rows"]:
        method, found = row["method"], row.get("speedup_vs_plain")
        speed = f"{statistics.median(found):.2f}x" if found else ""
        steps = f"{row['accept_length']:.2f}" if found else ""
        if method == "plain":
            speed, steps = "1", "1"
        if method == "greedy":
            speed = steps = ""
        texts = [f"{row['nats']:.3f}", f"{row['entropy']:.3f}", f"{row['not_best']:.1%}"]
        lines.append(line(names[method], speed, steps, *texts, f"{row['rep8']:.2f}"))
    return lines


def unseen(folder: Path) -> list[str]:
    """Prompts that no setting was looked at on."""
    rows = rows_of(of(folder, "tinycode_medusa2_unseen"))
    lines = []
    for heat in (0, 0.7, 1):
        cells = []
        for method in ("tree_dynamic", "tree"):
            row = rows[method, heat, 1]
            cells.append(
                f"{interval(row, 'x')}, {row['speedup_vs_hf_generate']:.2f}x,"
                f" {row['accept_length']:.2f}"
            )
        row = rows["prompt_lookup", heat, 1]
        cells.append(f"{row['speedup_vs_plain']:.2f}x, {row['accept_length']:.2f}")
        lines.append(line(f"{heat:g}", *cells))
    return lines


def batches(folder: Path) -> list[str]:
    """Speeds over the batch size."""
    rows = rows_of(of(folder, "tinycode_medusa2_batches"))
    lines = []
    for heat in (0, 1):
        for label, method in LONG.items():
            cells = []
            for size in (1, 2, 4, 8):
                row = rows[method, heat, size]
                ratio = f" ({row['speedup_vs_plain']:.2f}x)" if method != "plain" else ""
                cells.append(f"{row['tokens_per_second']:.0f}{ratio}")
            lines.append(line(f"{heat:g}", label, *cells))
    return lines


def step(folder: Path) -> list[str]:
    """Where the time of a step goes."""
    found = of(folder, "tinycode_step")["budget"]

    def cells(show: Callable[[Bench], str]) -> list[str]:
        return [show(each) for each in found]

    def share(each: Bench) -> str:
        rest = each["overhead_by_difference_ms"]
        return f"{rest:.2f} ({rest / each['step_ms']['median']:.1%})"

    return [
        line("plain step", *cells(lambda e: f"{e['plain_step_ms']['median']:.2f}")),
        line("step", *cells(lambda e: f"{e['step_ms']['median']:.2f}")),
        line("base forward", *cells(lambda e: f"{e['phases_ms']['base forward']['median']:.2f}")),
        line("heads", *cells(lambda e: f"{e['phases_ms']['heads']['median']:.2f}")),
        line("the loop: step less both", *cells(share)),
        line(
            "the loop, its phases clocked one by one",
            *cells(lambda e: f"{e['overhead_ms']['median']:.2f}"),
        ),
    ]


def compiled(folder: Path) -> list[str]:
    """Trees over compiled plain decoding."""
    rows = rows_of(of(folder, "tinycode_medusa2_compiled"))
    return [
        line(
            f"{heat:g}",
            label,
            interval(rows[method, heat, 1], "x"),
            f"{rows[method, heat, 1]['speedup_vs_hf_generate']:.2f}x",
        )
        for heat in (0.7, 1)
        for label, method in TREES.items()
        if method != "prompt_lookup"
    ]


def compare(folder: Path) -> list[str]:
    """Predicted and measured speed-ups of draft models."""
    labels = (
        "`+recipe=distill optim.lr=6e-3`",
        "`+recipe=distill draft.hidden=128 data.rows=2 steps=1200`",
    )
    lines = []
    for label, each in zip(labels, of(folder, "tinycode_compare")["candidates"], strict=True):
        predicted, measured = each["predicted"], each["measured"]
        low, high = measured["speedup_ci95"]
        lines.append(
            line(
                label,
                f"{each['times_smaller']:.1f}",
                f"{each['alpha']:.3f}",
                f"{each['c']:.2f}",
                f"{each['overhead']:.2f}",
                predicted["num_tokens"],
                f"{predicted['leviathan']:.2f}x",
                f"{predicted['predicted']:.2f}x",
                f"{measured['speedup']:.2f}x ({low:.2f}-{high:.2f})",
                f"{each['predicted_over_measured'] - 1:+.1%}",
            )
        )
    return lines


def adaptive(folder: Path) -> list[str]:
    """Rules of draft length, judged and clocked."""
    data = of(folder, "tinycode_adaptive")
    names = {
        "fixed 2": "fixed 2",
        "fixed 3": "fixed 3 (the best single one)",
        "fixed 4": "fixed 4",
        "adaptive": "acceptance so far (priors measured)",
        "adaptive, unmeasured": (
            "acceptance and confidence, nothing measured: `decode.draft_tokens=0`"
        ),
        "adaptive+confidence": "acceptance and confidence, measured",
        "confidence": "confidence alone",
        "entropy": "entropy alone",
    }
    lines = []
    for rule, label in names.items():
        judged = [
            f"{data['judged'][rule][k]:.2f}x" for k in ("body", "next", "rename", "type_hint")
        ]
        clocked = data["clocked"].get(rule)
        cell = ""
        if clocked:
            low, high = clocked["ci95"]
            cell = f"{clocked['speedup']['mix']:.2f}x ({low:.2f}-{high:.2f})"
        lines.append(line(label, *judged, f"{data['judged'][rule]['mix']:.2f}x", cell))
    return lines


def drafters(folder: Path) -> list[str]:
    """All drafters in one process."""
    rows = rows_of(of(folder, "tinycode_drafters"))
    lines = []
    for heat in (0, 1):
        for label, method in DRAFTERS.items():
            row = rows[method, heat, 1]
            silent = method.startswith("hf_")
            lines.append(
                line(
                    f"{heat:g}",
                    label,
                    row["tree_nodes"],
                    f"{row['tokens_per_second']:.0f}",
                    interval(row),
                    f"{row['speedup_vs_hf_generate']:.2f}",
                    "" if silent else f"{row['accept_length']:.2f}",
                    f"{row['rep8']:.2f}",
                    same(row),
                )
            )
    return lines


def paired(file: str, names: Iterable[str]) -> Maker:
    """Return the maker of ratios over the same prompts."""

    def make(folder: Path) -> list[str]:
        found = {
            (f"{p['method']} / {p['other']}", p["temperature"]): p
            for p in of(folder, file)["pairs"]
            if p["batch"] == 1
        }
        lines = []
        for name in names:
            cells = []
            for heat in (0, 0.7, 1):
                pair = found[name, heat]
                low, high = pair["ci95"]
                cells.append(f"{pair['speedup']:.2f} ({low:.2f}-{high:.2f})")
            lines.append(line(name, *cells))
        return lines

    return make


def mtp_benches(folder: Path) -> list[str]:
    """Both models of multi-token prediction."""
    lines = []
    for label, file in (("bytes, n=8", "mtp_byte/bench"), ("BPE, n=4", "mtp_bpe/bench")):
        rows = rows_of(of(folder, file))
        for heat in (0, 0.7, 1):
            for name, method in LONG.items():
                row = rows[method, heat, 1]
                ratio = ""
                if method in ("tree", "tree_dynamic"):
                    ratio = f"{row['speedup_vs_plain'] / row['accept_length']:.2f}"
                ties = f" (+{row['near_ties']} near ties)" if row["near_ties"] else ""
                equal = "" if row["identical"] is None else f"{row['identical']}/{row['compared']}"
                cells = [
                    *(label, f"{heat:g}", name, f"{row['tokens_per_second']:.0f}", interval(row)),
                    *(f"{row['speedup_vs_hf_generate']:.2f}", f"{row['accept_length']:.2f}"),
                    *(ratio, f"{row['rep8']:.2f}", equal + ties),
                ]
                lines.append(line(*cells))
    return lines
