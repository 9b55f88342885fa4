"""Tables of BENCHMARKS.md about training, made from the files of benchmarks/."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # a test imports this from elsewhere

from table_cells import Bench, interval, line, of, rows_of

MIB = 2**20


def heads(folder: Path) -> list[str]:
    """Ways to train heads: means of seeds, lowest and highest."""
    data = of(folder, "tinycode_heads")
    speeds = data["settings"]["training_tokens_per_second"]["speeds"]
    names = {
        "medusa1": "Medusa-1",
        "regenerated": "... on the base's own answers",
        "markov": "... with a Markov bias",
        "hydra": "Hydra",
        "hydra_plus": "Hydra++ (a prefix layer)",
        "medusa2": "Medusa-2",
        "self_distilled": "Medusa-2, self-distilled, own answers",
    }
    lines = []
    for arm, label in names.items():
        seeds = [row for row in data["rows"] if row["arm"] == arm]

        def steps(heat: str, seeds: list[Bench] = seeds) -> str:
            found = [row["accept"][heat]["accept_length"] for row in seeds]
            spread = f" ({min(found):.2f}-{max(found):.2f})" if len(found) > 1 else ""
            return f"{statistics.fmean(found):.2f}{spread}"

        def hits(top: str, seeds: list[Bench] = seeds) -> str:
            values = [
                statistics.fmean(row["heldout"][f"head_{i}/{top}"] for row in seeds)
                for i in range(5)
            ]
            return " ".join(f"{value:.2f}".removeprefix("0") for value in values)

        first = rows_of({"rows": seeds[0]["rows"]})
        clocked = [f"{first['tree', heat, 1]['speedup_vs_plain']:.2f}x" for heat in (0, 1)]
        extra = f"{first['tree', 0, 1]['extra_parameters'] / 1e6:.2f} M"
        lines.append(
            line(
                label,
                steps("t0"),
                steps("t1"),
                hits("top1"),
                hits("top5"),
                *clocked,
                extra,
                _training_speed(speeds[arm], seeds[0]["rates"]),
                _kept(seeds),
            )
        )
    return lines


def _training_speed(stages: Sequence[float], rates: Sequence[str]) -> str:
    # heads alone for the first stage, then base and heads: each a share of the steps
    given = dict(each.split("=") for each in rates)
    alone = float(given["warmup_heads"]) if len(stages) > 1 else 1.0
    shares = (alone, 1 - alone)[: len(stages)]
    speed = 1 / sum(share / each for share, each in zip(shares, stages, strict=True))
    return f"{float(f'{speed:.3g}'):,.0f}"


def _kept(seeds: Sequence[Bench]) -> str:
    found = [row["heldout"] for row in seeds]
    if "original_loss" not in found[0]:
        return "same"
    changes = [each["loss"] / each["original_loss"] - 1 for each in found]
    kl = statistics.fmean(each["kl"] for each in found)
    mean = statistics.fmean(changes)
    if len(changes) == 1:
        return f"{mean:+.1%}, KL {kl:.3f}"
    low, high = min(changes) * 100, max(changes) * 100
    return f"{mean:+.2%} ({low:+.2f} to {high:+.2f}), KL {kl:.3f}"


def distill(folder: Path) -> list[str]:
    """Alpha by loss and data; the best at T=1 is bold."""
    rows = [row for row in of(folder, "tinycode_distill")["rows"] if row["part"] == "table"]
    names = {
        "labels": "labels",
        "forward_kl": "forward KL",
        "reverse_kl": "reverse KL",
        "jsd": "JSD, beta 0.5",
        "tv": "TV",
        "lk_alpha": "LK-alpha",
        "lk_lambda": "LK-lambda",
    }
    best = max(row["t1"]["alpha"] for row in rows)
    by_cell = {(row["loss"], row["data"]): row for row in rows}
    lines = []
    for loss, label in names.items():
        cells = []
        for data in ("documents", "corpus", "regenerated", "on_policy"):
            row = by_cell.get((loss, data))
            if row is None:
                cells.append("")
                continue
            warm = f"{row['t1']['alpha']:.3f}"
            mark = "**" if row["t1"]["alpha"] == best else ""
            cells.append(f"{mark}{warm}{mark} / {row['t0']['alpha']:.3f}")
        lines.append(line(label, *cells))
    return lines


def claim(folder: Path) -> list[str]:
    """Alpha of three seeds, each arm at its own best rate."""
    rows = [row for row in of(folder, "tinycode_distill")["rows"] if row["part"] == "claim"]

    def alphas(loss: str, data: str) -> list[float]:
        return [r["t1"]["alpha"] for r in rows if (r["loss"], r["data"]) == (loss, data)]

    best = statistics.fmean(alphas("jsd", "corpus"))
    lines = []
    for label, loss, data, mark in (
        ("labels, whole files and prompts as the base was pre-trained", "labels", "documents", ""),
        ("labels, corpus", "labels", "corpus", "**"),
        ("JSD, corpus", "jsd", "corpus", ""),
    ):
        found = alphas(loss, data)
        mean = statistics.fmean(found)
        above = "" if loss == "jsd" else f"{mark}{best / mean - 1:+.1%}{mark}"
        lines.append(line(label, f"{mean:.3f} ({min(found):.3f}, {max(found):.3f})", above))
    return lines


def memory(folder: Path) -> list[str]:
    """Memory and time of a training step."""
    rows = {
        (r["recipe"], r["lm_head"], r["implementation"], r["num_heads"]): r
        for r in of(folder, "memory")["rows"]
    }
    lines = []
    for recipe in ("medusa1", "medusa2"):
        for lm_head in ("shared", "own"):
            for loss in ("fused", "naive"):
                one, four = (rows[recipe, lm_head, loss, n] for n in (1, 4))
                versus = "1" if loss == "naive" else f"{four['seconds_vs_naive']:.2f}"
                lines.append(
                    line(
                        recipe,
                        lm_head,
                        loss,
                        f"{one['allocator_peak'] / MIB:.1f}",
                        f"{four['allocator_peak'] / MIB:.1f}",
                        f"{four['allocator_ratio']:.3f}",
                        f"{four['resident_ratio']:.3f}",
                        f"{statistics.median(four['seconds']):.2f}",
                        versus,
                    )
                )
    return lines


def mtp_table(folder: Path) -> list[str]:
    """One token or several, over three seeds."""
    data = of(folder, "mtp_table")
    lines = []
    for arm, training in data["training"].items():
        seeds = [row for row in data["rows"] if row["arm"] == arm]
        first = seeds[0]
        clocked = rows_of({"rows": first["rows"]})

        def spread(find: Callable[[Bench], float], digits: int, seeds: Any = seeds) -> str:
            found = [find(row) for row in seeds]
            mean = statistics.fmean(found)
            return f"{mean:.{digits}f} ({min(found):.{digits}f}-{max(found):.{digits}f})"

        def at(
            heat: int, rows: Any = clocked, seeds: Any = seeds, spread: Any = spread
        ) -> list[str]:
            key = f"t{heat}"
            copies = statistics.fmean(
                row["accept"][key]["prompt_lookup"]["accept_length"] for row in seeds
            )
            if "calibration" not in seeds[0]:
                return ["1", "", f"{copies:.2f}"]
            steps = spread(lambda row: row["accept"][key]["tree"]["accept_length"], 2)
            return [steps, interval(rows["tree", heat, 1], "x"), f"{copies:.2f}"]

        times, ratio = first["step_ms"], ""
        if "step" in times:
            row = clocked["tree", 0, 1]
            ratio = f"{row['speedup_vs_plain'] / row['accept_length']:.2f}"
            shown = f"{times['plain']:.2f} / {times['verify']:.2f} / {times['heads']:.2f}"
        else:
            shown = f"{times['plain']:.2f}"
        rep8 = statistics.fmean(row["accept"]["t0"]["rep8"] for row in seeds)
        cells = [
            arm,
            f"{first['parameters'] / 1e6:.2f} M",
            spread(lambda row: row["loss"]["nats_per_token"], 3),
            spread(lambda row: row["loss"]["bits_per_byte"], 3),
            first.get("num_nodes", ""),
            *at(0),
            f"{rep8:.2f}",
            *at(1),
            shown,
            ratio,
            f"{training['seconds_per_step']:.2f}, {training['peak_memory'] / MIB:.0f}",
        ]
        lines.append(line(*cells))
    return lines


def mtp_memory(folder: Path) -> list[str]:
    """Peaks over the number of heads."""
    rows = {(r["side"], r["num_heads"]): r for r in of(folder, "mtp_memory")["rows"]}
    lines = []
    for count in (1, 2, 4, 8):
        cells = []
        for side in ("ours", "naive"):
            row = rows[side, count]
            digits = 1 if side == "ours" else 0
            growth = "" if count == 1 else f"{row['growth']:.{digits}%}"
            cells += [f"{row['allocator_peak'] / MIB:,.0f}", growth]
        lines.append(line(count, *cells))
    return lines


def train(folder: Path) -> list[str]:
    """Training beside the reference loss."""
    labels = {
        ("system", 1.0): ("system's, as a plain program has it", "all"),
        ("system", 0.5): ("system's", "half"),
        ("kept", 1.0): ("keeps freed memory, as our trainer sets it", "all"),
        ("kept", 0.5): ("keeps freed memory", "half"),
    }
    rows = {(row["allocator"], row["learned"]): row for row in of(folder, "train")["rows"]}
    lines = []
    for key, label in labels.items():
        row = rows[key]
        ratio, peak = row["speed_ratio"], ""
        if "allocator_peak" in row:
            found = row["allocator_peak"]
            peak = (
                f"{found['ours'] / MIB:,.0f} of {found['reference'] / MIB:,.0f} MiB"
                f" ({row['allocator_ratio']:.2f}x)"
            )
        lines.append(
            line(
                *label,
                f"{row['ours_tokens_per_second']:,.0f}",
                f"{row['reference_tokens_per_second']:,.0f}",
                f"{ratio['median']:.2f}x ({ratio['min']:.2f}-{ratio['max']:.2f})",
                peak,
            )
        )
    return lines


def features(folder: Path) -> list[str]:
    """Training from stored hidden states."""
    labels = (
        "tinycode, 6.4 M, 4 own matrices",
        "16 layers, 13.1 M, 4 low-rank matrices",
    )
    lines = []
    for label, row in zip(labels, of(folder, "features")["rows"], strict=True):
        found = row["seconds"]
        ratio = found["ratio"]
        lines.append(
            line(
                label,
                f"{found['t_base']['median'] * 1e3:.0f}",
                f"{found['t_heads']['median'] * 1e3:.0f}",
                f"{found['t_base_over_t_heads']:.2f}",
                f"{ratio['median']:.2f}x ({ratio['q25']:.2f}-{ratio['q75']:.2f})",
                f"{found['aim']:.2f}",
            )
        )
    return lines


def zero(folder: Path) -> list[str]:
    """Memory and time of ZeRO."""
    lines = []
    for row in of(folder, "zero")["rows"]:
        stage = row["stage"]
        label = "plain torch, one process" if stage < 0 else f"ZeRO-{stage}"
        alive = row["memory"][0]["alive"]
        kinds = ("weights", "moments", "copied weights", "gradients", "other")
        predicted = row["predicted"]
        lines.append(
            line(
                label,
                *(f"{alive[kind] / 1e6:.0f}" for kind in kinds),
                f"{row['peak'] / 1e6:.0f}",
                f"{predicted['peak'] / 1e6:.0f}",
                f"{predicted['peak'] / row['peak']:.2f}",
                f"{row['seconds']:.2f}",
                f"{predicted['seconds']:.2f}",
                f"{predicted['seconds'] / row['seconds']:.2f}",
            )
        )
    return lines
