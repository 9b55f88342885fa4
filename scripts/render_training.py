"""Blocks of the rendered pages about training and draft models, and what all tables share.

A block is a public function whose first argument is ``read``, which returns the content of
``benchmarks/NAME.json`` by its NAME. It gives a table with its head, or sentences.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import prod
from statistics import fmean, median
from typing import Any

from specheads.measure.render import with_bounds

Bench = dict[str, Any]
Read = Callable[[str], Any]

MIB, TOPS, PARTS = 2**20, ("top1", "top5"), ("step", "base", "guesses", "loop")
HEATS = ("t0", "t1")
TRAINERS = ("ours", "reference", "fused")
TRAINED = {
    "medusa1": "Medusa-1",
    "hydra": "Hydra",
    "dflash": "DFlash",
    "mtp": "MTP, with the base",
}
WAYS = {
    "medusa1": "Medusa-1",
    "regenerated": "... on the base's own answers",
    "markov": "... with a Markov bias",
    "hydra": "Hydra",
    "hydra_plus": "Hydra++ (a prefix layer)",
    "medusa2": "Medusa-2",
    "self_distilled": "Medusa-2, self-distilled, own answers",
}

EQUAL = {
    "medusa1": "Medusa-1",
    "markov": "Medusa-1 with a Markov bias",
    "hydra_plus": "Hydra++",
    "mtp": "MTP heads on the frozen base",
    "eagle3": "EAGLE-3",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "block": "block heads, joined form",
    "draft": "draft model",
}


def table(head: str, lines: Iterable[str]) -> str:
    """Return a table in Markdown.

    Args:
        head: the titles of its columns, with `` | `` between them.
        lines: the cells of each line below, likewise.
    """
    rule = "|" + "---|" * len(head.split(" | "))
    return "\n".join([f"| {head} |", rule, *(f"| {line} |" for line in lines)])


def cells(values: Iterable[Any], form: str = ".2f", sign: str = " | ") -> str:
    """Return numbers in one format, as neighbouring cells or with another sign between them."""
    return sign.join(f"{value:{form}}" for value in values)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the mean, and in brackets the lowest and the highest where there are several."""
    ends = f" ({cells((min(values), max(values)), f'.{digits}f', '-')})" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{ends}"


def rows_of(bench: Bench) -> dict[tuple[str, float, int], Bench]:
    """Return the rows by method, temperature and batch."""
    return {(row["method"], row["temperature"], row["batch"]): row for row in bench["rows"]}


def speedup(row: Bench, unit: str = "") -> str:
    """Return a row's speed-up with its interval."""
    return with_bounds(row["speedup_vs_plain"], row["speedup_vs_plain_ci95"], unit)


def adaptive(read: Read) -> str:
    """Return fixed draft lengths beside the one that follows the text."""
    found = read("tinycode_adaptive")
    (clocked,), kinds, lines = found["clocked"].values(), found["settings"]["kinds"], []
    for rule, of in clocked.items():
        mix = with_bounds(of["speedup"]["mix"], of["ci95"], "x")
        lines.append(f"`{rule}` | {cells(of['speedup'][kind] for kind in kinds)} | {mix}")
    return table(f"draft length | {' | '.join(kinds)} | mix (95%)", lines) + _ahead(clocked)


def sizes(read: Read) -> str:
    """Return fixed sizes of the trees of a union beside the one that follows the text."""
    clocked = read("tinycode_sizes")["clocked"]
    rules = list(next(iter(clocked.values())))
    lines = [
        f"`{rule}` | "
        + " | ".join(
            with_bounds(of[rule]["speedup"]["mix"], of[rule]["ci95"], "x")
            for of in clocked.values()
        )
        for rule in rules
    ]
    said = "".join(f"{_ahead(of)} ({where})" for where, of in clocked.items())
    return table(f"nodes | {' | '.join(clocked)}", lines) + said


def _ahead(clocked: Bench) -> str:
    """Return how a rule that follows the text stands beside the best fixed one."""
    speeds = {rule: of["speedup"]["mix"] for rule, of in clocked.items()}
    own = speeds.pop("adaptive")
    best = max(speeds, key=speeds.__getitem__)
    return f"\n\n`adaptive` runs at {own / speeds[best]:.2f} of the speed of `{best}`, the best"


def compare(read: Read) -> str:
    """Return predicted and measured speed-ups of draft models."""
    lines = []
    for of in read("tinycode_compare")["candidates"]:
        predicted, measured = of["predicted"], of["measured"]
        lines.append(
            f"`{of['name']}` | {of['times_smaller']:.1f} | {of['alpha']:.3f} | {of['c']:.2f}"
            f" | {of['overhead']:.2f} | {predicted['num_tokens']} | {predicted['leviathan']:.2f}x"
            f" | {predicted['predicted']:.2f}x"
            f" | {with_bounds(measured['speedup'], measured['speedup_ci95'], 'x')}"
            f" | {of['predicted_over_measured'] - 1:+.1%}"
        )
    head = "draft model | times smaller | alpha | c | drafting at all | best n"
    formula = "Leviathan's formula | predicted | measured (95%) | predicted / measured"
    return table(f"{head} | {formula}", lines)


def distill(read: Read) -> str:
    """Return alpha by loss and data; the best at T=1 is bold."""
    found = [row for row in read("tinycode_distill")["rows"] if row["part"] == "table"]
    best = max(row["t1"]["alpha"] for row in found)
    shown = {}
    for row in found:
        bold = "**" * (row["t1"]["alpha"] == best)
        both = f"{bold}{row['t1']['alpha']:.3f}{bold} / {row['t0']['alpha']:.3f}"
        shown[row["loss"], row["data"]] = both
    data = ("documents", "corpus", "regenerated", "on_policy")
    lines = [
        " | ".join([f"`{loss}`", *(shown.get((loss, each), "") for each in data)])
        for loss in dict.fromkeys(row["loss"] for row in found)
    ]
    return table(" | ".join(["loss", *data]), lines)


def claim(read: Read) -> str:
    """Return alpha of three seeds, each loss at its own best rate."""
    alphas: dict[tuple[str, str], list[float]] = {}
    for row in read("tinycode_distill")["rows"]:
        if row["part"] == "claim":
            alphas.setdefault((row["loss"], row["data"]), []).append(row["t1"]["alpha"])
    best = fmean(alphas["jsd", "corpus"])
    lines = [
        f"`{loss}`, {data} | {spread(found, 3)}"
        f" | {f'{best / fmean(found) - 1:+.1%}' if loss != 'jsd' else ''}"
        for (loss, data), found in alphas.items()
    ]
    head = "alpha at T=1: mean of three seeds (lowest-highest)"
    return table(f"trained with | {head} | `jsd` above it", lines)


def recipes(read: Read) -> str:
    """Return what whole runs took, and what was measured on their held-out records."""
    lines = []
    for run in read("recipes")["runs"]:
        found = {key.removeprefix("heldout/"): value for key, value in run["measured"].items()}
        loss = f"{found['loss']:.3f}" if "loss" in found else ""
        if "original_loss" in found:
            change = found["loss"] / found["original_loss"] - 1
            loss = f"{found['loss']:.4f}, the original's {found['original_loss']:.4f}"
            loss += f" ({change:+.2%}), KL {found['kl']:.4f}"
        heads = {key: value for key, value in found.items() if key.startswith("head_")}
        top = (cells((v for k, v in heads.items() if k.endswith(n)), sign=" ") for n in TOPS)
        lines.append(
            f"{run['run']} | {run['steps']:,} | {run['tokens_per_second']:,} | {run['threads']}"
            f" | {run['peak_memory_gb']:.2f} GB | {loss} | {' | '.join(top)}"
        )
    took = "run | steps | tokens/s in training | threads | peak memory"
    return table(f"{took} | held-out loss, nats per token | top-1 of heads | top-5", lines)


def heads(read: Read) -> str:
    """Return ways to train heads: means of the seeds, lowest and highest."""
    data = read("tinycode_heads")
    trained = data["settings"]["training_tokens_per_second"]["speeds"]
    lines = []
    for way, label in WAYS.items():
        seeds = _seeds(data, way)
        tree = [rows_of(seeds[0])["tree", heat, 1] for heat in (0, 1)]
        lines.append(
            f"{label} | {' | '.join(spread(each) for each in _accepted(data, way))}"
            f" | {_hits(seeds, 'top1')} | {_hits(seeds, 'top5')}"
            f" | {cells((row['speedup_vs_plain'] for row in tree), '.2f')}"
            f" | {tree[0]['extra_parameters'] / 1e6:.2f} M"
            f" | {_training_speed(trained[way], seeds[0]['rates'])} | {_kept(seeds)}"
        )
    head = "heads | accept length T=0 | T=1 | top-1 | top-5 | speed-up T=0 | T=1"
    more = "parameters added | training, tokens/s | held-out loss of the base"
    return table(f"{head} | {more}", lines)


def _seeds(data: Bench, way: str) -> list[Bench]:
    return [row for row in data["rows"] if row["arm"] == way]


def _accepted(data: Bench, way: str) -> list[list[float]]:
    """Return the accept lengths of a way's seeds at T=0 and T=1."""
    return [[row["accept"][t]["accept_length"] for row in _seeds(data, way)] for t in ("t0", "t1")]


def _hits(seeds: Sequence[Bench], top: str) -> str:
    shares = [fmean(row["heldout"][f"head_{i}/{top}"] for row in seeds) for i in range(5)]
    return " ".join(f"{share:.2f}".removeprefix("0") for share in shares)


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
    changes = [100 * (each["loss"] / each["original_loss"] - 1) for each in found]
    ends = f" ({min(changes):+.2f} to {max(changes):+.2f})" if len(changes) > 1 else ""
    kl = fmean(each["kl"] for each in found)
    return f"{fmean(changes):+.{2 if ends else 1}f}%{ends}, KL {kl:.3f}"


def head_gains(read: Read) -> str:
    """Return what each way to train heads gains over Medusa-1."""
    data = read("tinycode_heads")
    least = [fmean(each) for each in _accepted(data, "medusa1")]
    lines = []
    for way in list(WAYS)[1:]:
        pairs = zip(_accepted(data, way), least, strict=True)
        lines.append(f"{WAYS[way]} | {cells((fmean(own) - low for own, low in pairs), '+.2f')}")
    return table("accept length above Medusa-1's | T=0 | T=1", lines)


def heads_lookup(read: Read) -> str:
    """Return copying, and repeated 8-grams, on the bases of three ways to train heads."""
    data = read("tinycode_heads")
    lines = []
    for way in ("medusa1", "medusa2", "self_distilled"):
        rows = rows_of(_seeds(data, way)[0])
        copies = (rows["prompt_lookup", heat, 1] for heat in (0, 1))
        both = (f"{c['accept_length']:.2f} ({c['speedup_vs_plain']:.2f}x)" for c in copies)
        rep8 = cells(rows["plain", heat, 1]["rep8"] for heat in (0, 1))
        lines.append(f"{WAYS[way]} | {' | '.join(both)} | {rep8}")
    lookup = "prompt lookup: accept length (speed-up) T=0 | T=1"
    return table(f"base of | {lookup} | rep8 of plain output T=0 | T=1", lines)


def memory_step(read: Read) -> str:
    """Return memory and time of a training step."""
    names, lines = ("recipe", "lm_head", "implementation", "num_heads"), []
    rows = {tuple(row[name] for name in names): row for row in read("memory")["rows"]}
    for key in dict.fromkeys(key[:3] for key in rows):
        one, four = rows[(*key, 1)], rows[(*key, 4)]
        lines.append(
            f"{' | '.join(key)} | {cells((r['allocator_peak'] / MIB for r in (one, four)), '.1f')}"
            f" | {four['allocator_ratio']:.3f} | {four['resident_ratio']:.3f}"
            f" | {median(four['seconds']):.2f} | {four['seconds_vs_naive']:.2f}"
        )
    head = "recipe | `lm_head` | loss | 1 head, MiB | 4 heads, MiB | ratio | resident ratio"
    return table(f"{head} | s per step, 4 heads | vs naive", lines)


def memory(read: Read, file: str) -> str:
    """Return peaks of a training step over the number of heads, and its time."""
    report = read(file)
    rows = {(row["side"], row["num_heads"]): row for row in report["rows"]}
    lines = []
    for count in sorted({count for _, count in rows}):
        pair = (rows[side, count] for side in ("ours", "naive"))
        both = (f"{row['allocator_peak'] / MIB:,.0f} | {row['growth']:.1%}" for row in pair)
        lines.append(f"{count} | {' | '.join(both)}")
    settings, place = report["settings"], report["environment"]
    allocators = {"kept": "freed memory kept", "system": "the system's allocator"}
    times = []
    for of in report["times"]:
        clock = (of[side]["seconds"] for side in ("ours", "naive"))
        ours, naive = (f"{median(t):.2f} s ({min(t):.2f}-{max(t):.2f})" for t in clock)
        ratio, how = of["seconds_vs_naive"], allocators[of["allocator"]]
        times.append(f"{ours} against {naive}, {ratio:.2f} times, with {how}")
    return (
        f"{table('heads | ours, MiB | growth | naive, MiB | growth', lines)}\n\n"
        "Peak of the allocator in a training step, and its growth over one head, the heads' own"
        f" parameters and gradients left out; a step with {settings['timed_heads']} heads takes"
        f" {'; '.join(times)}. Vocabulary of {settings['vocab']:,}, {settings['tokens']:,}"
        f" tokens, float32, {place['processor']}, one thread, {place['date']}."
    )


def mtp_table(read: Read) -> str:
    """Return one token or several, over three seeds."""
    data = read("mtp_table")
    lines = []
    for way, training in data["training"].items():
        seeds = _seeds(data, way)
        rows, times = rows_of(seeds[0]), seeds[0]["step_ms"]
        found = {t: [row["accept"][t] for row in seeds] for t in ("t0", "t1")}

        def lengths(t: str, method: str, found: Any = found) -> list[float]:
            return [each[method]["accept_length"] for each in found[t]]

        copies = [f"{fmean(lengths(t, 'prompt_lookup')):.2f}" for t in found]
        own, ratio, shown = ["1 | "] * 2, "", ["plain"]
        if "step" in times:
            own = [
                f"{spread(lengths(t, 'tree'))} | {speedup(rows['tree', heat, 1], 'x')}"
                for heat, t in enumerate(found)
            ]
            row, shown = rows["tree", 0, 1], ["plain", "verify", "heads"]
            ratio = f"{row['speedup_vs_plain'] / row['accept_length']:.2f}"
        lines.append(
            f"{way} | {seeds[0]['parameters'] / 1e6:.2f} M"
            f" | {spread([row['loss']['nats_per_token'] for row in seeds], 3)}"
            f" | {spread([row['loss']['bits_per_byte'] for row in seeds], 3)}"
            f" | {seeds[0].get('num_nodes', '')} | {own[0]} | {copies[0]}"
            f" | {fmean(each['rep8'] for each in found['t0']):.2f} | {own[1]} | {copies[1]}"
            f" | {cells((times[name] for name in shown), sign=' / ')} | {ratio}"
            f" | {training['seconds_per_step']:.2f}, {training['peak_memory'] / MIB:.0f}"
        )
    head = "model | parameters | nats per token | bits per byte | tree"
    at = "tokens per forward | speed-up | lookup"
    rest = "plain / verify / heads, ms | per token per forward | training: s per step, MiB"
    return table(f"{head} | T=0: {at} | rep8 | T=1: {at} | {rest}", lines)


def mtp_cost(read: Read) -> str:
    """Say what predicting several tokens costs in next-token loss."""
    data = read("mtp_table")
    seeds = {way: _seeds(data, way) for way in data["training"]}
    bits = {way: fmean(row["loss"]["bits_per_byte"] for row in of) for way, of in seeds.items()}
    byte, bpe = bits["byte-n1"], bits["bpe-n1"]
    return (
        "With layers and tokens equal, predicting four bytes costs"
        f" {bits['byte-n4-parallel'] / byte - 1:.0%} of the bits per byte, eight"
        f" {bits['byte-n8-parallel'] / byte - 1:.0%}, and four BPE tokens"
        f" {bits['bpe-n4-parallel'] / bpe - 1:.1%}, after {data['settings']['tokens'] / 1e6:.1f}"
        " million tokens, far from convergence."
    )


def mtp_plain(read: Read) -> str:
    """Say how fast the byte model decodes plainly in either dtype."""
    half, single = (rows_of(read(f"mtp_byte/bench{end}")) for end in ("", "_fp32"))
    rows = half["plain", 0, 1], single["plain", 0, 1], half["tree", 0, 1]
    slow, fast, tree = (row["tokens_per_second"] for row in rows)
    return (
        f"Plain decoding of the byte model makes {fast:.0f} tokens per second in float32 and"
        f" {slow:.0f} in bfloat16 at T=0, as its matrices are too small for bfloat16 to pay one row"
        " at a time, and a verify step is not: beside the fastest plain decoding of either dtype"
        f" its static tree in bfloat16 is {tree / fast:.1f}x as fast."
    )


def train(read: Read) -> str:
    """Return training beside reference trainers: speed and memory, then accuracy if compared."""
    found, lines = read("train"), []
    for row in found["rows"]:
        peaks = row.get("allocator_peak", {})
        lines.append(
            f"{TRAINED[row.get('kind', 'medusa1')]} | {row['allocator']} | {row['learned']:.0%}"
            f" | {row['ours_tokens_per_second']:,.0f} | {beside(row, 'reference', 'speed_ratio')}"
            f" | {beside(row, 'fused', 'fused_speed_ratio')}"
            f" | {' | '.join(f'{peaks[s] / MIB:,.0f}' if s in peaks else '' for s in TRAINERS)}"
        )
    head = "heads | allocator | labels learned | ours, tokens/s | reference | ours over it (range)"
    head += " | reference, fused | ours over it (range) | peak MiB, ours | reference | fused"
    learned = found.get("accuracy")
    return table(head, lines) + (f"\n\n{train_accuracy(learned)}" if learned else "")


def beside(row: Bench, side: str, ratio: str) -> str:
    """Return a reference's tokens per second, and how many times as many ours makes."""
    if ratio not in row:
        return " | "
    of = row[ratio]
    bounds = with_bounds(of["median"], (of["min"], of["max"]), "x")
    return f"{row[f'{side}_tokens_per_second']:,.0f} | {bounds}"


def train_accuracy(learned: Sequence[Bench]) -> str:
    """Return top-1 of every head after as many steps of every trainer, and how far they differ."""
    most, lines, away = max(len(each["top1"]["ours"]) for each in learned), [], 0.0
    for each in learned:
        ours = each["top1"]["ours"]
        for side in TRAINERS:
            heads = each["top1"][side]
            shown = [spread([100 * value for value in of], 1) for of in heads.values()]
            shown += [""] * (most - len(shown))
            lines.append(f"{TRAINED[each['kind']]} | {side} | {' | '.join(shown)}")
            pairs = [zip(heads[name], ours[name], strict=True) for name in ours]
            away = max(away, *(abs(a - b) for of_head in pairs for a, b in of_head))
    head = " | ".join(f"head {i + 1}" for i in range(most))
    one = learned[0]
    return (
        f"{table(f'heads | trained by | {head}', lines)}\n\nHeld-out top-1 in percent after"
        f" {one['steps']} steps, means of {len(one['seeds'])} seeds and their range; with the same"
        f" seed no trainer's head is more than {100 * away:.2f} points from ours."
    )


def features(read: Read) -> str:
    """Return training from stored hidden states."""
    rows = read("features")["rows"]
    lines = []
    for row in rows:
        found, ratio = row["seconds"], row["seconds"]["ratio"]
        lines.append(
            f"{row['base']}, {row['parameters'] / 1e6:.1f} M, {row['num_heads']} heads with"
            f" {row['lm_head'].replace('_', '-')} matrices"
            f" | {cells((1e3 * found[key]['median'] for key in ('t_base', 't_heads')), '.0f')}"
            f" | {found['t_base_over_t_heads']:.2f}"
            f" | {with_bounds(ratio['median'], (ratio['q25'], ratio['q75']), 'x')}"
            f" | {found['aim']:.2f}"
        )
    head = "base | t_base, ms per step | t_heads | ratio | cached / online, tokens/s (quartiles)"
    return (
        f"{table(f'{head} | 0.9 (1 + t_base / t_heads)', lines)}\n\nThe largest difference between"
        f" losses is {max(row['largest_loss_difference'] for row in rows):.1e}."
    )


def anchors(read: Read) -> str:
    """Return what an anchor of block heads costs in training, beside a position of Hydra++."""
    lines = [
        f"{row['base']} | {row['arm'].replace('_plus', '++')} | {row['places_per_step']}"
        f" | {row['step_ms']['median']:.0f} | {row['microseconds_per_place']['median']:,.0f}"
        f" | {row['times_hydra_plus']:.2f} | {row['operations_per_place'] / 1e6:,.0f}"
        f" | {row['peak_bytes'] / MIB:,.0f}"
        f" | {row['mask_bytes'] / MIB:.1f}"
        for row in read("anchors")["rows"]
    ]
    head = "base | heads, anchors per row | places per step | ms per step | us per place"
    return table(f"{head} | over Hydra++ | MFLOP per place | peak, MiB | of it a mask", lines)


def ablation(read: Read) -> str:
    """Return the accept lengths of block heads with one thing changed at a time."""
    shapes, by_row = ("chain", "tree_8", "tree_16", "tree_24"), dict[str, list[Bench]]()
    for row in read("block_ablation")["rows"]:
        by_row.setdefault(row["row"], []).append(row["accept"])
    lines = []
    for name, seeds in by_row.items():
        lengths = [
            spread([each[heat][shape]["accept_length"] for each in seeds])
            for heat in ("t0", "t1")
            for shape in shapes
        ]
        lines.append(
            f"{name} | {' | '.join(lengths)} | {seeds[0]['parameters'] / 1e6:.1f} M | {len(seeds)}"
        )
    each = " | ".join(["chain", "8 nodes", "16", "24"])
    return table(f"heads | T=0: {each} | T=1: {each} | parameters | seeds", lines)


def equal_cells(read: Read, base: str) -> list[tuple[str, list[Bench]]]:
    """Return the kinds of drafters that were trained on equal terms, the fastest first.

    Returns:
        for each kind its name, and what was found with every seed.

    Raises:
        FileNotFoundError: if the comparison was not begun, whose first file is prompt lookup's.
    """
    read(f"equal/{base}/prompt_lookup")
    found: list[tuple[str, list[Bench]]] = []
    for kind, name in EQUAL.items():
        seeds = []
        for seed in range(3):
            with suppress(FileNotFoundError):
                seeds.append(read(f"equal/{base}/{kind}-{seed}"))
        if seeds:
            found.append((name, seeds))
    return sorted(found, key=lambda each: -fmean(map(equal_gain, each[1])))


def equal_row(cell: Bench, heat: str) -> Bench:
    """Return the clocked row of a cell's shape at a temperature."""
    return next(row for row in cell["rows"][heat] if row["method"] == cell["shape"])


def equal_gain(cell: Bench) -> float:
    """Return the product of the speed-ups at T=0 and T=1, by which kinds are ranked."""
    return prod(float(equal_row(cell, heat)["speedup_vs_plain"]) for heat in HEATS)


def equal(read: Read, base: str) -> str:
    """Return every kind of drafter trained as long on one base, the fastest first."""
    lines = []
    for name, seeds in equal_cells(read, base):
        rows = [[equal_row(cell, heat) for cell in seeds] for heat in HEATS]
        chains = [[cell["chain"][heat] for cell in seeds] for heat in HEATS]
        speeds = (
            speedup(of[0]) if len(of) == 1 else spread([row["speedup_vs_plain"] for row in of])
            for of in rows
        )
        lengths = (spread([each["accept_length"] for each in of]) for of in (*rows, *chains))
        shape, parts = seeds[0]["shape"].replace("tree_", ""), seeds[0]["parts_ms"]
        plain = next(row for row in seeds[0]["rows"][HEATS[0]] if row["method"] == "plain")
        lines.append(
            f"{name} | {' | '.join(speeds)} | {shape} | {' | '.join(lengths)}"
            f" | {1000 / plain['tokens_per_second']:.1f}"
            f" | {cells((parts[part] for part in PARTS), '.1f')} | {rows[0][0]['rep8']:.2f}"
        )
    beside = read(f"equal/{base}/prompt_lookup")["rows"]
    copies = [row for heat in HEATS for row in beside[heat] if row["method"] != "plain"]
    copied = f"{' | '.join(map(speedup, copies))} | | {cells(r['accept_length'] for r in copies)}"
    copied += f" | | | | | | | | {copies[0]['rep8']:.2f}"
    head = "drafter | speed-up T=0 (95%) | T=1 | nodes | accept length T=0 | T=1 | chain T=0 | T=1"
    head += f" | ms of a plain step | of its own | {' | '.join(PARTS[1:])} | rep8"
    return table(head, [*lines, f"prompt lookup, not trained | {copied}"])


def equal_training(read: Read, base: str) -> str:
    """Return how every kind was trained: steps in the minutes, learning rates, sizes."""
    lines = []
    for name, seeds in equal_cells(read, base):
        one, where = seeds[0], {on for cell in seeds for on in cell.get("trained_on", ["CPU"])}
        tried = ", ".join(f"{rate}: {length:.2f}" for rate, length in one["tried"].items())
        lines.append(
            f"{name} | {one['steps']:,} | {one['rate']} | {tried} | {one['parameters'] / 1e6:.1f} M"
            f" | {one['bytes_per_token']:,} | {', '.join(sorted(where))} | {len(seeds)}"
        )
    head = "drafter | steps | learning rate | accept length of each that was tried | parameters"
    minutes = equal_cells(read, base)[0][1][0]["minutes"]
    return (
        f"{table(f'{head} | stored bytes per token | trained on | seeds', lines)}"
        f"\n\n{minutes:g} minutes each."
    )


def equal_kinds(read: Read, base: str) -> str:
    """Return accept length and speed-up per kind of text, of every kind of drafter."""
    found, lines = equal_cells(read, base), []
    kinds = sorted(equal_row(found[0][1][0], "t0")["per_kind"])
    for heat in HEATS:
        for name, seeds in found:
            row = equal_row(seeds[0], heat)["per_kind"]
            each = (
                f"{row[kind]['accept_length']:.2f} ({row[kind]['speedup_vs_plain']:.2f}x)"
                for kind in kinds
            )
            lines.append(f"{heat[1:]} | {name} | {' | '.join(each)}")
    return table(f"T | drafter | {' | '.join(f'`{kind}`' for kind in kinds)}", lines)


def engines(read: Read, base: str, engine: str, *formats: str) -> str:
    """Return what an engine made of our exports, beside our own chain."""
    lines, machine = [], {}
    for name in formats:
        found = read(f"engines/{base}/{engine}_{name}")
        machine = found["environment"]
        if "steps" not in found:
            lines.append(f"`{name}` | {found['failed'][0]} | | | | | |")
            continue
        all_texts = found["compared"]
        counts = (found[key] for key in ("as_without", "as_transformers", "together_as_alone"))
        texts = " | ".join(f"{count}/{all_texts}" for count in counts)
        steps, ours = found["steps"], found.get("our_steps")
        theirs = cells((each / steps for each in found["accepted"]), ".3f", " ")
        own = cells((each / ours for each in found["our_accepted"]), ".3f", " ") if ours else ""
        lines.append(
            f"`{name}` | {texts} | {steps:,} | {f'{ours:,}' if ours else ''} | {theirs} | {own}"
        )
    head = "format | texts as without speculation | as transformers' | 16 together as alone"
    head += " | verify steps | ours | guesses accepted per step and position | ours"
    dtype = "4 bits" if engine.endswith("q4_1") else "float32"
    return (
        f"{table(head, lines)}\n\n{found['engine']} {found['version']}, {dtype},"
        f" {machine['processor']},"
        f" {machine['date']}; {found['compared']} prompts of {base.partition('_')[0]},"
        f" {found['settings']['max_new_tokens']} new tokens, greedy."
    )


def engine_speed(read: Read, base: str) -> str:
    """Return the tokens per second of engines, plainly and with speculation."""
    found, lines = read(f"engines/speed_{base}"), []
    given, machine = found["settings"], found["environment"]
    dtype = "bfloat16" if machine["native_bfloat16"] else "float32"
    for row in found["rows"]:
        title = f"{row['engine']}, 4 bits" if row["key"].endswith("q4_1") else row["engine"]
        each = []
        for size in (1, 16):
            here, plain = row[f"batch_{size}"], row["way"] == "plain"
            bounds = here["gain_ci95"]
            ends = f" ({cells(bounds, '.2f', '-')})" if bounds else ""
            gain = "" if plain else f"{here['gain']:.2f}x{ends}"
            each += [f"{here['tokens_per_second']:.1f}", gain]
        lines.append(f"{title} | `{row['way']}` | {' | '.join(each)} | {row['machine']:.2f}")
    versions = dict.fromkeys(
        f"{row['engine']} {row['version'].removeprefix('version: ')}" for row in found["rows"]
    )
    head = (
        "engine | way | tokens/s, one at a time | of its plain (95%) | 16 together | of its plain"
    )
    rounds = "One round" if given["rounds"] == 1 else f"Medians of {given['rounds']} rounds"
    return (
        f"{table(f'{head} | machine', lines)}\n\nMachine: how many times as long as at best a"
        f" product of fixed size took beside it. {rounds}; {given['num_prompts']} prompts of"
        f" {base}, {given['max_new_tokens']} new tokens, greedy,"
        f" {dtype} but for the 4 bits, {machine['threads']} threads, {machine['processor']},"
        f" {machine['date']}; {', '.join(versions)}."
    )


def zero(read: Read) -> str:
    """Return memory and time of ZeRO, and how far the predictions are off."""
    rows = read("zero")["rows"]
    kept = ("weights", "moments", "copied weights", "gradients", "other")
    trained = {"frozen": "heads", "lora": "heads, LoRA", "full": "the base"}
    lines, memory, slower = [], [], []
    for row in rows:
        alive, predicted = row["memory"][0]["alive"], row["predicted"]
        peaks = row["peak"], predicted["peak"]
        label = "plain torch, one process" if row["stage"] == "none" else f"`{row['stage']}`"
        memory.append(peaks[1] / peaks[0] - 1)
        time = "- | - | -"
        if "seconds" in row:
            times = row["seconds"], predicted["seconds"]
            time = f"{cells(times)} | {times[1] / times[0]:.2f}"
            slower += [times[0] / times[1]] * (row["stage"] != "none")
        lines.append(
            f"{trained[row['kind']]} | {label} | {cells((alive[k] / 1e6 for k in kept), '.0f')}"
            f" | {cells((peak / 1e6 for peak in peaks), '.0f')} | {100 * memory[-1]:+.0f}% | {time}"
        )
    head = ["trained", "engine", *kept, "peak", "predicted", "error"]
    head += ["s/step", "arithmetic", "arithmetic / measured"]
    told = f"Memory is predicted within {max(map(abs, memory)):.0%}"
    if slower:
        told += f"; under DeepSpeed a step takes {cells((min(slower), max(slower)), '.1f', ' to ')}"
        told += " times its arithmetic, so that its time counts as not predicted"
    return f"{table(' | '.join(head), lines)}\n\n{told}."


def sharded(read: Read) -> str:
    """Return the resident memory of ranks that train a base which none may hold whole."""
    found = read("sharded")
    gigabytes = lambda number: f"{number / 1e9:.2f}"  # noqa: E731
    lines = []
    for row in found["rows"]:
        above, told = max(row["peaks"]) - row["peak_of_toy"], row["planned"]
        end = "killed | | " if row["killed"] else "trained and exported"
        end += "" if row["killed"] else f" | {gigabytes(above)} | {gigabytes(told)}"
        lines.append(f"{row['case']} | {', '.join(map(gigabytes, row['peaks']))} | {end}")
    given, machine = found["settings"], found["environment"]
    head = "run | peak of each rank, GB | end | above the toy's | planned"
    bound = gigabytes(given["share"] * found["held_whole"])
    return (
        f"{table(head, lines)}\n\nA base of {found['numbers'] / 1e6:,.0f} million parameters,"
        f" {gigabytes(found['base_bytes'])} GB in {given['dtype']}. A process that only holds"
        f" it has {gigabytes(found['held_whole'])} GB; a rank is killed at {given['share']} of it,"
        f" {bound} GB, libraries included. {given['ranks']} ranks, {given['steps']} steps each;"
        f" {machine['processor']}, {machine['date']}."
    )
