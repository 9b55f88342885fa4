"""Write the figures of the pages from the files of benchmarks/: tables, sentences, drawings.

    python scripts/render.py            # write all blocks, and the drawings of docs/
    python scripts/render.py --check    # write nothing; name the blocks that differ, exit code 1

A block stands between ``<!-- figures: NAME FILE ... -->`` and ``<!-- figures: end -->``. NAME is a
function of this module or of ``render_training``, which gets the files; several pages may show the
same block. A sentence with a measured figure belongs into one: nothing else holds it to its file.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from math import isnan
from pathlib import Path
from statistics import harmonic_mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # a test imports this from elsewhere

import render_training
from render_training import MIB, Bench, Read, cells, rows_of, speedup, table

from specheads.data.pycode import NEW_TEXT
from specheads.measure.render import headline_line, same_cell, with_bounds

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks"
FIGURES = ROOT / "docs"
PAGES = (
    ROOT / "README.md",
    ROOT / "BENCHMARKS.md",
    *(page for page in sorted(FIGURES.glob("*.md")) if "<!-- figures: " in page.read_text()),
)
BLOCK = re.compile(r"(<!-- figures: (?!end )(.+?) -->\n)(.*?)(<!-- figures: end -->)", re.DOTALL)
ABSENT = "Not measured yet"
SHADES = ("#2f6f9f", "#6fa3c7", "#e0b15e", "#c9ced6")  # from the lowest temperature on
LINES = ("#2f6f9f", "#7fb0d3", "#e0b15e", "#b5651d", "#6b8e23", "#9aa5b1", "#8e5ea2", "#333333")
TREES = ("prompt_lookup", "tree", "tree_dynamic")
KINDS = ("tree", "hydra/tree", "draft_tree", "suffix", "heads+suffix")
NAMES = {
    "plain": "plain, one token at a time",
    "hf_generate": "transformers' `generate`",
    "hf_assisted": "transformers' assisted generation, same draft model",
    "hf_lookup": "transformers' prompt lookup",
    "prompt_lookup": "prompt lookup (ours)",
    "tree": "Medusa-1 heads, static tree",
    "tree_dynamic": "Medusa-1 heads, tree of each step",
    "hydra/tree": "Hydra heads, static tree",
    "hydra/tree_dynamic": "Hydra heads, tree of each step",
    "one_by_one": "plain, one prompt after the other",
    "draft": "draft model, chain of 4",
    "draft_tree": "draft model, tree",
    "lookahead": "lookahead",
    "suffix": "suffix copies",
    "heads+suffix": "Medusa-1 heads + suffix copies",
    "draft+suffix": "draft model + suffix copies",
}


def heats_of(bench: Bench) -> list[float]:
    """Return the temperatures that were measured."""
    return sorted({row["temperature"] for row in bench["rows"]})


def name_of(bench: Bench, method: str) -> str:
    """Return what a method is called; heads are the export's own unless they are known."""
    known = "medusa1" in bench["settings"]["checkpoint"]
    return NAMES[method] if known else NAMES[method].replace("Medusa-1", "its own")


def ranked(bench: Bench) -> list[str]:
    """Return all methods, the fastest at the lowest temperature first, batches' own ones last."""
    first = (1, heats_of(bench)[0])
    rows = [row for row in bench["rows"] if (row["batch"], row["temperature"]) == first]
    order = [row["method"] for row in sorted(rows, key=lambda row: -row["speedup_vs_plain"])]
    return list(dict.fromkeys([*order, *(row["method"] for row in bench["rows"])]))


def drafts(method: str) -> bool:
    """Return whether a method is a drafter in our own loop."""
    return method not in ("plain", "one_by_one") and not method.startswith("hf_")


def steps(row: Bench) -> str:
    """Return a row's accept length; transformers' loops do not say how many steps they took."""
    return "" if row["method"].startswith("hf_") else f"{row['accept_length']:.2f}"


def place_of(bench: Bench) -> str:
    """Return prompts, limits, dtype, machine and date, as a table's last line says them."""
    settings, place, row = bench["settings"], bench["environment"], bench["rows"][0]
    busy, others = "", place.get("largest_other_share")
    if place["contended"]:
        drift = f"{place['baseline_drift']:.2f}x between repeats"
        share = f", others took up to {others:.0%} of the processors" if others else ""
        busy = f" The machine was disturbed: plain decoding varied {drift}{share}."
    return (
        f"{row['num_prompts']} held-out prompts of up to {settings['max_new_tokens']} new tokens,"
        f" {settings['repeats']} repeat{'s' * (settings['repeats'] > 1)}, {row['dtype']},"
        f" {place['processor']}, {settings['threads']} threads, torch"
        f" {place['torch'].split('+')[0]}, {place['date']}.{busy}"
    )


def headline(read: Read, file: str) -> str:
    """Say what to quote of a bench, and how large the margins are where outputs differ."""
    bench = read(file)
    found = [each["margin_fp32"] for row in bench["rows"] for each in row["divergences"]]
    return (
        f"{headline_line(bench)}. All outputs that differ from plain decoding's differ first at a"
        f" near-tie: the largest margin in float32 is {max(found):.2f}, the noise between shapes"
        f" {bench['settings']['noise']['shape']:.2f}."
    )


def clocked(
    read: Read, *files: str, methods: Sequence[str] = (), heats: Sequence[float] = ()
) -> str:
    """Return a line per bench, temperature and method at batch 1.

    Args:
        read: of the files.
        files: the benches; with several, the first column says which.
        methods: all that were measured where none are given.
        heats: temperatures, likewise.
    """
    lines = []
    for file in files:
        bench = read(file)
        rows = rows_of(bench)
        for heat in heats or heats_of(bench):
            for method in methods or dict.fromkeys(row["method"] for row in bench["rows"]):
                row = rows[method, heat, 1]
                heads = method.split("/")[-1] in ("tree", "tree_dynamic")
                ratio = f"{row['speedup_vs_plain'] / row['accept_length']:.2f}" if heads else ""
                lines.append(
                    f"{file} | "
                    * (len(files) > 1)
                    + f"{heat:g} | {name_of(bench, method)} | {row['tree_nodes']}"
                    f" | {row['tokens_per_second']:.0f} | {speedup(row)}"
                    f" | {row['speedup_vs_hf_generate']:.2f} | {steps(row)} | {ratio}"
                    f" | {row['rep8']:.2f} | {same_cell(row)}"
                )
    head = "bench | " * (len(files) > 1) + "T | drafter | nodes | tokens/s | speed-up (95%)"
    head += " | vs generate | accept length | speed-up / accept length | rep8 | same"
    places = dict.fromkeys(place_of(read(file)) for file in files)
    return f"{table(head, lines)}\n\n{' '.join(places)}"


def trees(read: Read, *files: str) -> str:
    """Return the heads' trees and copying alone."""
    return clocked(read, *files, methods=TREES)


def compiled(read: Read) -> str:
    """Return trees over compiled plain decoding; the rows at T=0 contain compilation."""
    return clocked(read, "tinycode_medusa2_compiled", methods=("plain", *TREES[1:]), heats=(0.7, 1))


def fastest(row: Bench) -> str:
    """Return a row's speed-up, over the faster rival where there are two; empty for no row."""
    name = "speedup_vs_fastest" if "speedup_vs_fastest" in row else "speedup_vs_plain"
    return with_bounds(row.get(name), row.get(f"{name}_ci95"))


def speeds(read: Read, file: str) -> str:
    """Return speed-ups, accept lengths and identity, a line per method, the fastest first."""
    bench = read(file)
    rows, heats = rows_of(bench), heats_of(bench)
    lines = []
    for method in ranked(bench):
        of = [rows.get((method, heat, 1), {}) for heat in heats]
        ratios = " | ".join("1" if method == "plain" else fastest(row) for row in of)
        lengths = f"{steps(of[0])} / {steps(of[-1])}" if drafts(method) else ""
        ends = f"{of[0]['rep8']:.2f} | {same_cell(of[0])}"
        lines.append(f"{name_of(bench, method)} | {ratios} | {lengths} | {ends}")
    first, *others = (f"T={heat:g}" for heat in heats)
    head = " | ".join([f"drafter | {first}: speed-up (95%)", *others])
    plain = (rows["plain", heat, 1]["tokens_per_second"] for heat in heats)
    rival = ""
    if ratios := bench["settings"].get("generate_over_plain"):
        rival = (
            "Speed-ups are over the faster of plain decoding and transformers' `generate`, which"
            f" makes {cells((ratios[f'{heat:g}'] for heat in heats), '.2f', ', ')} times as many"
            f" tokens per second ({bench['settings']['generate_questions']} questions). "
        )
    return (
        f"{table(f'{head} | accept length, {first} / {heats[-1]:g} | rep8 | same', lines)}\n\n"
        f"{rival}Plain decoding: {cells(plain, '.0f', ', ')} tokens per second at"
        f" T={cells(heats, 'g', ', ')}. rep8 (share of repeated 8-grams) and same (outputs equal to"
        " plain decoding's, token by token; in brackets those that first differ at a near-tie) are"
        f" at {first}. {place_of(bench)}"
    )


def summary(read: Read) -> str:
    """Say what the README's table of drafters says, in three lines."""
    bench = read("readme/drafters")
    rows, heats = rows_of(bench), heats_of(bench)
    found, slower = {}, []
    for method in ranked(bench):
        ratios = [rows[method, heat, 1]["speedup_vs_plain"] for heat in heats]
        if method not in ("plain", "hf_generate"):
            found[method] = f"{NAMES[method]} {', '.join(f'{each:.2f}x' for each in ratios)}"
            slower += [found[method]] if max(ratios) < 1 else []
    trained = ("tree", "tree_dynamic", "draft", "draft_tree")
    return (
        f"Speed-up over plain decoding at T={cells(heats, 'g', ', ')}, on the embedded model:\n\n"
        f"- the fastest of {len(found)}: {next(iter(found.values()))};\n"
        "- the fastest that is trained and copies nothing:"
        f" {next(line for method, line in found.items() if method.split('/')[-1] in trained)};\n"
        f"- slower than plain decoding at every temperature: {'; '.join(slower) or 'none'}."
    )


def kinds(read: Read, file: str) -> str:
    """Return accept length and speed-up per kind of prompt."""
    bench = read(file)
    rows, heats, methods = rows_of(bench), heats_of(bench), TREES
    if ("suffix", heats[0], 1) in rows:
        heats = [heats[0], heats[-1]]
        own = KINDS if ("tree", heats[0], 1) in rows else ("tree_dynamic", *KINDS)
        methods = tuple(method for method in own if (method, heats[0], 1) in rows)
    columns = sorted(bench["rows"][0]["per_kind"])
    balanced = {*NEW_TEXT} < {*columns}
    last = ["half new text"] if balanced else []
    head = " | ".join(["T | drafter", *(f"`{kind}`" for kind in columns), *last])
    lines = []
    for heat in heats:
        for method in methods:
            of = [rows[method, heat, 1]["per_kind"][kind] for kind in columns]
            both = [f"{k['accept_length']:.2f} ({k['speedup_vs_plain']:.2f}x)" for k in of]
            if balanced:
                gains = {kind: k["speedup_vs_plain"] for kind, k in zip(columns, of, strict=True)}
                new = [gains.pop(kind) for kind in NEW_TEXT]
                both.append(f"{harmonic_mean([*map(harmonic_mean, (new, gains.values()))]):.2f}x")
            lines.append(f"{heat:g} | {name_of(bench, method)} | {' | '.join(both)}")
    counts = sorted({kind["num_prompts"] for kind in bench["rows"][0]["per_kind"].values()})
    return (
        f"{table(head, lines)}\n\nAccept length (speed-up over plain decoding),"
        f" {cells(counts, 'd', ' or ')} prompts of each kind."
        + " Last the speed-up where new text (`body`, `next`) is half of the time: a harmonic mean."
        * balanced
    )


def batches(read: Read, file: str) -> str:
    """Return speeds over the batch size, and where plain decoding catches up."""
    bench = read(file)
    rows, heats = rows_of(bench), heats_of(bench)
    sizes = sorted({row["batch"] for row in bench["rows"]})
    lines = []
    for heat in (heats[0], heats[-1]):
        for method in ranked(bench):
            lines.append(f"{heat:g} | {name_of(bench, method)}")
            for size in sizes:
                row = rows.get((method, heat, size))
                ratio = f" ({row['speedup_vs_plain']:.2f}x)" if row and method != "plain" else ""
                lines[-1] += f" | {row['tokens_per_second']:.0f}{ratio}" if row else " | "
    caught = "; ".join(
        f"{name_of(bench, of['method'])} at batch {of['batch']} (T={of['temperature']:g})"
        for of in bench["crossover"]
        if of["batch"] is not None
    )
    return (
        f"{table(f'T | method | batch {sizes[0]} | ' + cells(sizes[1:], 'd'), lines)}\n\n"
        "Tokens per second (speed-up over plain decoding in batches of the same size). Plain"
        f" decoding catches up with {caught or f'none of the drafters up to batch {sizes[-1]}'}."
        f" {place_of(bench)}"
    )


def pairs(read: Read, file: str) -> str:
    """Return the ratios of two methods over the same prompts."""
    found: dict[str, list[str]] = {}
    for of in read(file)["pairs"]:
        if of["batch"] == 1:
            name = f"{of['method']} / {of['other']}"
            found.setdefault(name, []).append(with_bounds(of["speedup"], of["ci95"]))
    lines = [" | ".join([name, *ratios]) for name, ratios in found.items()]
    return table("pair (95%) | T=0 | T=0.7 | T=1", lines)


def identical(read: Read, file: str) -> str:
    """Say how many outputs are identical where rounding hardly matters."""
    bench = read(file)
    held = [row for row in bench["rows"] if drafts(row["method"]) and row["identical"] is not None]
    keys = "identical", "compared", "near_ties"
    equal, compared, ties = (sum(row[key] for row in held) for key in keys)
    rest = f"; {ties} of the others first differ at a near-tie" if equal < compared else ""
    return (
        f"In float32 {equal} of {compared} outputs of {len({row['method'] for row in held})}"
        " drafters are plain decoding's, token by token"
        f" (T={cells(heats_of(bench), 'g', ', ')}{rest}). {place_of(bench)}"
    )


def lossy(read: Read, file: str) -> str:
    """Return lossy rules beside exact decoding: speed, and how far from the base."""
    found = read(file)
    lines = []
    for row in found["rows"]:
        clocked, off = row["speedup_vs_plain"], ""
        clock = f"{median(clocked):.2f}x | {row['accept_length']:.2f}" if clocked else " | "
        if (tv := row.get("tv")) is not None:
            off = f"{'' if isnan(row['kl']) else format(row['kl'], '.4f')} | {tv:.4f}"
        lines.append(
            f"{row['method']} | {clock} | {off or ' | '} | {row['nats']:.3f}"
            f" | {row['not_best']:.1%} | {row['common_prefix']:.0f} | {row['rep8']:.2f}"
        )
    head = "nats per token | not its best token | tokens alike | rep8"
    rows = table(f"rule | speed-up | accept length | KL | TV | {head}", lines)
    return f"{rows}\n\n{done_on(found)} ([Raw](../benchmarks/{file}.json).)"


def beams(read: Read, file: str) -> str:
    """Return searches with drafted trees beside transformers' own."""
    found = read(file)
    lines = [
        f"{row['beams']} | {row['method']} | {speedup_of(row['speedup'])} | {row['passes']:.2f}"
        f" | {row['equal']}/{row['compared']} | {row['score_difference']:.0e}"
        for row in found["rows"]
    ]
    head = "beams | method | times as fast (quartiles) | passes | equal beams"
    rows = table(f"{head} | largest difference of scores", lines)
    return f"{rows}\n\n{done_on(found)}"


def done_on(found: dict[str, Any]) -> str:
    """Return dtype, machine and date of an experiment."""
    place, settings = found["environment"], found["settings"]
    return (
        f"{settings['dtype']}, {place['threads']} threads of {place['processor']}, torch"
        f" {place['torch']}, {place['date']}."
    )


def speedup_of(found: dict[str, float]) -> str:
    """Return a ratio and its quartiles."""
    return f"{found['median']:.2f}x ({found['q25']:.2f}-{found['q75']:.2f})"


def invariant(read: Read) -> str:
    """Return how many texts are plain decoding's with invariant passes, and what these cost."""
    found = read("rounding")
    lines = []
    for row in found["texts"]:
        shape = " | ".join(f"{row[key]:g}" for key in ("temperature", "nodes", "batch"))
        lines.append(f"{shape} | {row['equal']}/{row['equal'] + row['differ']}")
    texts = table("T | nodes | batch | texts equal to plain decoding's", lines)
    contexts = sorted({row["context"] for row in found["costs"]})
    costs = []
    for nodes in sorted({row["nodes"] for row in found["costs"]}):
        of = {row["context"]: row["ratio"] for row in found["costs"] if row["nodes"] == nodes}
        costs.append(" | ".join([str(nodes), *(f"{of[each]['median']:.2f}" for each in contexts)]))
    head = "nodes | " + " | ".join(f"behind {each} tokens" for each in contexts)
    return (
        f"{texts}\n\nA pass takes so many times as long as without ({done_on(found)[:-1]}):\n\n"
        + table(head, costs)
    )


def quality(read: Read) -> str:
    """Say what the tuned base costs on the embedded prompts' answers."""
    found = read("tinycode_medusa2_quality")
    held, texts = found["heldout"], found["texts"]
    return (
        f"On the answers of the embedded model's {held['num_records']} prompts, which the benches"
        " decode, the loss of the tuned base of `medusa2` is above the original's by"
        f" {held['loss_difference']:.4f} nats per token"
        f" (95%: {cells(held['loss_difference_ci95'], '.4f', ' to ')}),"
        f" {held['loss_difference'] / held['original_loss']:.1%} of the original's loss;"
        f" perplexity {held['perplexity']:.3f} against {held['original_perplexity']:.3f}, KL"
        f" {held['kl']:.4f}; the same best token in {held['same_best']:.1%} of the places,"
        f" {texts['identical']} of {texts['compared']} greedy texts identical."
    )


def real_headline(read: Read) -> str:
    """Say what the heads of a real base give, by the rule of the headline."""
    bench = read("real/bench")
    first, rows = bench["headline"], rows_of(bench)
    hot = rows[first["method"], 1.0, 1]
    alone = (
        f"{with_bounds(of['speedup'], of['ci95'], 'x')} as fast as {NAMES[of['other']]} at"
        f" T={of['temperature']:g}"
        for of in bench["without_copying"]
        if of["other"] != "plain"
    )
    return (
        f"The heads alone: **{first['speedup_vs_fastest']:.2f}x** at T={first['temperature']:g}"
        f" (95% {cells(first['speedup_vs_fastest_ci95'], '.2f', ' to ')}; plain greedy rep8"
        f" {first['rep8_plain_greedy']:.2f}), accept length {first['accept_length']:.2f};"
        f" **{hot['speedup_vs_fastest']:.2f}x** at T=1"
        f" ({cells(hot['speedup_vs_fastest_ci95'], '.2f', ' to ')}), {hot['accept_length']:.2f}. On"
        f" the five kinds that give nothing to copy they are {', '.join(alone)}."
    )


def real_beside(read: Read) -> str:
    """Return what else was measured: transformers' loops, Spec-Bench's formula, own questions."""
    few, suite = read("real/transformers"), read("real/spec_bench")
    lines = [
        f"{NAMES[row['method']]} | {row['temperature']:g} | {row['num_prompts']}"
        f" | {speedup(row)} | "
        for row in few["rows"]
        if row["method"].startswith("hf_")
    ]
    (whole,) = (each for each in suite["scores"] if each["task"] == "overall")
    for name, key in (
        ("Spec-Bench's formula", "published"),
        ("that formula corrected", "corrected"),
    ):
        found = whole[key]
        bounds = found.get("speedup_ci95")
        ratio = with_bounds(found["speedup"], bounds) if bounds else f"{found['speedup']:.2f}"
        ends = f"{whole['num_questions']} | {ratio} | {whole['accept_length']:.2f}"
        lines.append(f"its own heads, {name} | {suite['settings']['temperature']:g} | {ends}")
    try:
        own = read("real/own")["rows"]
    except FileNotFoundError:  # of an export that holds no questions of its base
        own = []
    lines += [
        f"{name_of(few, row['method'])}, questions that the base wrote"
        f" itself | {row['temperature']:g} | {row['num_prompts']} | {speedup(row)} | {steps(row)}"
        for row in own
        if row["method"] != "plain"
    ]
    return table("beside | T | questions | speed-up over plain (95%) | accept length", lines)


def real_identity(read: Read) -> str:
    """Return how many greedy texts are plain decoding's, beside what rounding alone does."""
    found, lines = read("real/identity"), []
    for bench in map(read, ("real/bench", "real/float32")):
        for row in bench["rows"]:
            if row["temperature"] or not drafts(row["method"]):
                continue
            error = found["self_test_error"][row["dtype"]]
            margins = [each["margin_dtype"] or 0.0 for each in row["divergences"]]
            lines.append(
                f"{name_of(bench, row['method'])} | {row['dtype']}"
                f" | {row['identical']}/{row['compared']} | {row['near_ties']}"
                f" | {sum(margin < error for margin in margins)} | {max(margins, default=0.0):.2g}"
                f" | {error:.2g}"
            )
    lines += [
        f"plain decoding itself, passes {of['passes']} | {read('real/bench')['rows'][0]['dtype']}"
        f" | {of['identical']}/{of['compared']} |  |  |  | "
        for of in found["plain_against_itself"]
    ]
    head = "decoding, T=0 | dtype | texts equal to plain decoding's | others that differ at a"
    head += " near-tie | ... closer than the self-test's error | largest margin | self-test's error"
    if (alike := found.get("invariant")) is None:  # measured before there was such a part
        return table(head, lines)
    plain, heads = (with_bounds(of["speedup"], of["ci95"]) for of in alike["speed"])
    price = (
        f"With `decode.invariant=true` {alike['identical']} of {alike['compared']} texts of the"
        f" heads are plain decoding's; plain decoding then makes {plain} and the heads {heads}"
        " times as many tokens per second as without (95%)."
    )
    return f"{table(head, lines)}\n\n{price}"


def tree_search(read: Read) -> str:
    """Return accept lengths that the search expected, and those measured on other prompts."""
    found = read("tinycode_medusa2_trees")
    lines = []
    for label, of in (("static", found), ("dynamic", found["dynamic"])):
        measured = found["measured"][label]
        lines.append(
            f"{label} | {of['num_nodes']} | {of['speedup']:.2f}x"
            f" | {with_bounds(of['accept_length'], of['accept_length_ci95'])}"
            f" | {with_bounds(measured['accept_length'], measured['accept_length_ci95'])}"
            f" | {measured['relative_to_expected']:+.1%}"
        )
    head = "tree | nodes | expected speed-up of steps | expected accept length (95%)"
    return table(f"{head} | measured | more than expected", lines)


def step(read: Read) -> str:
    """Return where the time of a step goes."""
    lines = []
    for of in read("tinycode_step")["budget"]:
        phases, rest = of["phases_ms"], of["overhead_by_difference_ms"]
        times = (of["plain_step_ms"], of["step_ms"], phases["base forward"], phases["heads"])
        lines.append(
            f"{of['temperature']:g} | {cells(each['median'] for each in times)}"
            f" | {rest:.2f} ({rest / of['step_ms']['median']:.1%})"
            f" | {of['overhead_ms']['median']:.2f}"
        )
    loop = "the loop: step less both | the loop, its phases clocked one by one"
    return table(f"T | plain step, ms | step | base forward | heads | {loop}", lines)


def budget(read: Read, file: str) -> str:
    """Return where the time of a step goes, of several drafters and batches."""
    found = read(file)
    parts = ("base forward", "heads", "propose", "verify", "accept", "commit")
    lines = []
    for of in found["budget"]:
        phases = {name: each["median"] for name, each in of["phases_ms"].items()}
        step, plain = (of[f"{name}step_ms"]["median"] for name in ("", "plain_"))
        rest = sum(value for name, value in phases.items() if name not in (*parts, "replay"))
        lines.append(
            f"`{of['drafter']}` | {of['batch']} | {of['temperature']:g} | {of['accept_length']:.2f}"
            f" | {cells((plain, step))} ({step / plain:.2f})"
            f" | {cells((*(phases[name] for name in parts), rest))}"
        )
    head = "drafter | batch | T | accept length | plain step, ms | step (plain steps)"
    place, settings = found["environment"], found["settings"]
    said = (
        f"Medians; {settings['num_prompts']} prompts, up to {settings['max_new_tokens']} new"
        f" tokens, {settings['dtype']}, {place['processor']}, {place['threads']} threads,"
        f" torch {place['torch']}, {place['date']}."
    )
    head = " | ".join((head, *parts, "emit, observe, rest"))
    return f"{table(head, lines)}\n\n{said}"


def passes(read: Read) -> str:
    """Return what a verify step costs, alone and beside a raw call over as many tokens."""
    lines = [
        f"{of['num_nodes']} | {of['verify_ms']['median']:.2f} | {of['ratio']['median']:.2f}"
        f" ({cells(of['ratio_ci95'], '.3f', '-')})"
        for of in read("tinycode_step")["verify"]
    ]
    return table("nodes | ms per verify step | over a raw `model(...)` call (95%)", lines)


def growth(read: Read) -> str:
    """Say how the cost of a step grows along a text."""
    found = read("tinycode_step")["growth"]
    keys = "beyond_plain_per_token", "beyond_plain_per_step"
    token, step = (cells((of[key]["median"] for of in found), sign=" and ") for key in keys)
    return (
        f"In a text of {found[0]['new_tokens']:,} tokens the second half costs the tree {token} of"
        " what it costs plain decoding, both relative to the first half, at"
        f" T={cells((of['temperature'] for of in found), 'g', ' and ')}; per step {step}."
    )


def served(read: Read) -> str:
    """Return what became of a crowd's texts, and of the memory of a server that was asked on."""
    texts, soak = read("serve_texts")["found"], read("serve_soak")["found"]
    whole, left = (texts["became"].get(name, 0) for name in ("whole", "left"))
    wrong = texts["wrong"]
    held = soak["held"]
    quarter = held[len(held) // 4]
    later = [each["mib"] for each in held[len(held) // 4 :]]
    return (
        f"{texts['clients']} clients at once, {left} of which hung up: {wrong} wrong texts, whole"
        f" or as far as they came, of {whole + left}. Over {held[-1]['requests']:,} requests, 16 at"
        f" once and every third of them left, the server's memory was {quarter['mib']:.0f} MiB"
        f" after {quarter['requests']:,} and {held[-1]['mib']:.0f} MiB at the end"
        f" ({held[-1]['seconds'] / 60:.0f} minutes), between {min(later):.0f} and"
        f" {max(later):.0f} meanwhile."
    )


def serving_clock(read: Read) -> str:
    """Return times to the first token and tokens per second of servers, by requests under way."""
    found = read("serve_clock")["found"]
    lines = []
    for rate in next(iter(found.values())):
        for name, of in found.items():
            row = of[rate]
            speed, ratio = row["tokens_per_second"], row["ratio"]
            lines.append(
                f"{rate} | {name} | {row['first_p50']:.2f} | {row['first_p99']:.2f}"
                f" | {speed['median']:.0f} ({speed['q25']:.0f}-{speed['q75']:.0f})"
                f" | {ratio['median']:.1f} ({ratio['q25']:.1f}-{ratio['q75']:.1f})"
            )
    head = "under way | server | first token, s, p50 | p99 | tokens/s (quartiles)"
    return table(f"{head} | times transformers serve", lines)


def attacks(read: Read) -> str:
    """Return what a server answers to what clients should not do."""
    found = read("serve_attack")["found"]
    return table("what is sent | what comes back", (f"{k} | {v}" for k, v in found.items()))


def gpu_check(read: Read) -> str:
    """Say how the checks on a GPU ended, and what was not run."""
    found = read("h200/gpu_check")
    machine, checks = found["environment"], found["checks"]
    missing = [each for each in checks if each["status"] == "not run"]
    why = "; ".join(f"{each['check']} ({each['detail'].split(';')[0]})" for each in missing)
    counts = Counter(each["status"] for each in checks)
    (waits,) = (each for each in checks if each["check"] == "synchronisations")
    return (
        f"{machine['device']}, torch {machine['torch']}, transformers {machine['transformers']},"
        f" {machine['date']}: {counts['ok']} checks ok, {counts['failed']} failed,"
        f" {len(missing)} not run: {why}. A step of decoding waits for the device"
        f" {waits['detail'].split()[0]} times."
    )


def gpu_steps(read: Read, file: str) -> str:
    """Return verify steps on a GPU beside the floor that reading the weights sets."""
    found = read(file)
    heads = {row["lm_head"]: row["ms"] for row in found["rows"] if row["part"] == "heads"}
    head = "passes | nodes | ms | over reading the weights | over a plain step"
    lines = [
        f"{'compiled' if row['mode'] == 'loop' else row['mode']} | {row['nodes']} |"
        f" {row['ms']:.2f} ({cells((row['ms_p10'], row['ms_p90']), sign='-')}) |"
        f" {row['vs_floor']:.1f} | {row['vs_plain']:.2f}"
        for row in found["rows"]
        if row["part"] == "base"
    ]
    slowest = max(row["prepare_seconds"] for row in found["rows"] if row["part"] == "base")
    return (
        f"{table(head, lines)}\n\n{gpu_line(found)}; median and middle 80% of"
        f" {found['settings']['repeats']} passes behind {found['settings']['context']} tokens; a"
        f" copy moves {found['bandwidth'] / 1e12:.1f} TB/s; four heads take {heads['own']:.2f} ms"
        f" more with output matrices of their own, {heads['shared']:.2f} with the base's; a tree"
        f" size takes up to {slowest:.0f} s to compile."
    )


def gpu_training(read: Read, file: str) -> str:
    """Return the pace and memory of heads on a frozen base of 8 billion, beside the cost model."""
    found = read(file)
    head = "output matrices of the heads | s/step | tokens/s | MFU | peak, GB | predicted, GB"
    names = {"own": "of their own", "shared": "the base's"}
    lines = [
        f"{names[row['lm_head']]} | {cells([row['ms'] / 1e3])} | {row['tokens_per_second']:,.0f} |"
        f" {row['mfu']:.2f} |"
        f" {cells((row['peak_memory'] / 1e9, row['predicted_memory'] / 1e9), '.1f')}"
        for row in found["rows"]
        if "ms" in row
    ]
    rows, length = found["settings"]["train_rows"], found["settings"]["train_seq_len"]
    return f"{table(head, lines)}\n\n{gpu_line(found)}; {rows} rows of {length:,} tokens a step."


def gpu_line(found: Bench) -> str:
    """Return where figures of a GPU were measured."""
    machine = found["environment"]
    return (
        f"{machine['device']}, torch {machine['torch']}, {found['settings']['dtype']},"
        f" {machine['date']}"
    )


def reader(folder: Path) -> Read:
    """Return what gives the content of a file of ``folder``, by its name without the ending."""
    return cache(lambda name: json.loads((folder / f"{name}.json").read_text()))


def rendered(mark: str, read: Read) -> str:
    """Return a block's content; a line that says so where nothing was measured yet.

    Raises:
        SystemExit: if there is no such block.
    """
    name, *files = mark.split()
    block = globals().get(name) or getattr(render_training, name, None)
    if block is None:
        raise SystemExit(f"no block is called {name}: see the functions of scripts/render.py")
    try:
        return str(block(read, *files))
    except FileNotFoundError:
        command = f"make bench{'-real' * ('real' in mark)}"
        if name.startswith("equal"):
            command = f"python scripts/bench_equal.py --base {files[0]}"
        return f"{ABSENT}; `{command}` does."


def fill(page: str, read: Read) -> str:
    """Return ``page`` with every block rendered anew."""
    return BLOCK.sub(lambda match: f"{match[1]}{rendered(match[2], read)}\n{match[4]}", page)


def differing(page: str, read: Read) -> list[str]:
    """Return the marks of the blocks of ``page`` that are not what their files say."""
    return [mark for _, mark, old, _ in BLOCK.findall(page) if old != f"{rendered(mark, read)}\n"]


@contextmanager
def drawing(path: Path, panels: int, size: tuple[float, float], **more: Any) -> Iterator[Any]:
    """Give empty axes and write what was drawn on them; the same figures give the same file.

    Args:
        path: of the SVG.
        panels: number of axes side by side.
        size: width and height in inches.
        **more: of matplotlib's ``subplots``.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "specheads"}):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(1, panels, squeeze=False, **more)[0]
        for each in axes:
            each.spines[["top", "right"]].set_visible(False)
        yield axes
        figure.savefig(path, metadata={"Date": None})


def draw_speed(read: Read, path: Path) -> None:
    """Draw every method's speed-up by temperature, and accept length by kind of prompt."""
    bench = read("readme/drafters")
    rows, heats = rows_of(bench), heats_of(bench)
    methods = [method for method in ranked(bench) if method != "plain"][::-1]
    size, width = (11, 0.36 * len(methods) + 1.4), 0.8 / len(heats)
    with drawing(path, 2, size, width_ratios=(3, 2)) as (left, right):
        for index, heat in enumerate(heats):
            places = [n + ((len(heats) - 1) / 2 - index) * width for n in range(len(methods))]
            found = [rows[method, heat, 1] for method in methods]
            speeds = [row["speedup_vs_plain"] for row in found]
            left.barh(places, speeds, width, color=SHADES[index], label=f"T={heat:g}")
            ends = zip(*(row["speedup_vs_plain_ci95"] for row in found), strict=True)
            left.hlines(places, *ends, color="#555555", linewidth=0.7)
        left.axvline(1, color="#333333", linewidth=1)
        names = [NAMES[method].replace("`", "") for method in methods]
        left.set_yticks(range(len(methods)), names, fontsize=8)
        left.set_xlabel("speed-up over plain decoding (95%)")
        left.legend(frameon=False, fontsize=8, loc="lower right")
        kinds = sorted(rows["plain", heats[0], 1]["per_kind"])
        for index, method in enumerate(("hydra/tree", "suffix", "heads+suffix")):
            by_kind = rows[method, heats[0], 1]["per_kind"]
            lengths = [by_kind[kind]["accept_length"] for kind in kinds]
            places = [n + (index - 1) * 0.8 / 3 for n in range(len(kinds))]
            right.bar(places, lengths, 0.8 / 3, color=LINES[index], label=NAMES[method])
        right.axhline(1, color="#333333", linewidth=1)
        right.set_xticks(range(len(kinds)), kinds, rotation=25, fontsize=8)
        right.set_ylabel(f"accept length at T={heats[0]:g}")
        right.margins(y=0.22)  # room for the legend
        right.legend(frameon=False, fontsize=8, loc="upper left")


def draw_batches(read: Read, path: Path) -> None:
    """Draw speed-ups over the batch size; at 1 plain decoding in such batches is as fast."""
    bench = read("readme/batches")
    heats = heats_of(bench)
    ticks = sorted({row["batch"] for row in bench["rows"]})
    with drawing(path, 2, (9, 3.2), sharey=True) as panels:
        for axes, heat in zip(panels, (heats[0], heats[-1]), strict=True):
            for index, method in enumerate(m for m in ranked(bench) if m != "plain"):
                found = {
                    row["batch"]: row["speedup_vs_plain"]
                    for row in bench["rows"]
                    if (row["method"], row["temperature"]) == (method, heat)
                }
                look = {"color": LINES[index], "label": NAMES[method].replace("`", "")}
                axes.plot(*zip(*sorted(found.items()), strict=True), "o-", markersize=3, **look)
            axes.axhline(1, color="#333333", linewidth=1)
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [str(size) for size in ticks])
            axes.set_xlabel(f"batch, T={heat:g}")
        panels[0].set_ylabel("speed-up over plain decoding\nin batches of that size")
        panels[1].legend(frameon=False, fontsize=7)


def draw_memory(read: Read, path: Path) -> None:
    """Draw the peaks over the number of heads, and the growth that no head owns."""
    rows = read("readme/mtp_memory")["rows"]
    counts = sorted({row["num_heads"] for row in rows})
    with drawing(path, 1, (5.5, 3.4)) as (axes,):
        for side, color in (("naive", "#e0b15e"), ("ours", "#2f6f9f")):
            found = [row for row in rows if row["side"] == side]
            peaks = [row["allocator_peak"] / MIB for row in found]
            axes.plot(counts, peaks, "o-", color=color, label=f"{side}, all of it")
            rest = [(row["allocator_peak"] - row["owned_bytes"]) / MIB for row in found]
            label = f"{side}, less the heads' parameters and gradients"
            axes.plot(counts, rest, "o--", color=color, alpha=0.6, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("heads, the next-token head included")
        axes.set_ylabel("peak of the allocator, MiB")
        axes.legend(frameon=False, fontsize=8)


def draw_equal(base: str, read: Read, path: Path) -> None:
    """Draw accept length against the cost of a step, with lines of equal speed-up."""
    found = render_training.equal_cells(read, base)
    with drawing(path, 1, (7, 4)) as (axes,):
        places = []
        for index, (name, seeds) in enumerate(found):
            row = render_training.equal_row(seeds[0], "t0")
            places.append((row["accept_length"] / row["speedup_vs_plain"], row["accept_length"]))
            look = {"color": LINES[index % len(LINES)], "marker": "os"[index // len(LINES)]}
            axes.plot(*places[-1], linestyle="", label=name, **look)
        costs, lengths = zip(*places, strict=True)
        ends, top = (0.95, max(costs) + 0.1), max(lengths) * 1.1
        for speed in (1, 1.25, 1.5, 2, 2.5, 3):
            if speed * ends[0] < top:
                far = min(ends[1], top / speed)
                axes.plot((ends[0], far), (speed * ends[0], speed * far), color="#c9ced6", zorder=0)
                axes.annotate(f"{speed:g}x", (far, speed * far), color="#777777", fontsize=8)
        axes.set_ylim(0.95, top)
        axes.set_xlabel("a step, in steps of plain decoding (T=0)")
        axes.set_ylabel("accept length at T=0")
        axes.set_title(f"{base}: lines of equal speed-up", fontsize=9)
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.05, 0.5))


DRAWINGS: dict[str, Callable[[Read, Path], None]] = {
    "speed": draw_speed,
    "batches": draw_batches,
    "mtp_memory": draw_memory,
    "equal_smollm2": partial(draw_equal, "smollm2"),
    "equal_tinycode": partial(draw_equal, "tinycode"),
}


def render(folder: Path, figures: Path, pages: Sequence[Path]) -> list[str]:
    """Draw and fill what was measured; return a line for each thing written or missing.

    Args:
        folder: of the measurements, laid out like benchmarks/.
        figures: where the drawings go.
        pages: whose blocks are written.
    """
    read, lines = reader(folder), []
    for name, draw in DRAWINGS.items():
        path = figures / f"{name}.svg"
        try:
            draw(read, path)
            lines.append(f"wrote {path}")
        except FileNotFoundError as error:
            lines.append(f"{error.filename} is not there: {path.name} was not drawn")
    for page in pages:
        text = page.read_text()
        changed = differing(text, read)
        page.write_text(fill(text, read))
        lines.append(f"{page}: {', '.join(changed) or 'nothing'} changed")
    return lines


def main() -> None:
    """Draw and fill, or check."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only name the blocks that differ")
    if not parser.parse_args().check:
        print("\n".join(render(FOLDER, FIGURES, PAGES)))
        return
    marks = {page.name: differing(page.read_text(), reader(FOLDER)) for page in PAGES}
    if found := [f"{page}: {name}" for page, names in marks.items() for name in names]:
        raise SystemExit("not what benchmarks/ says: " + "; ".join(found))


if __name__ == "__main__":
    main()
