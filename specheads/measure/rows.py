"""Turn clocked runs into the rows of bench.json, and say what follows from the rows.

Methods beside each other rather than beside plain decoding: what a merged tree adds.

The raw records behind a bench's figures: every text of every method, step by step.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from specheads.measure.clock import Method, Prompt, Runs
from specheads.measure.identity import Identity
from specheads.measure.stats import crossover, mean_accept_length, ratio_ci95, rep8
from specheads.system.hardware import SHARE_LIMIT

REP8_LIMIT = 0.25  # above it greedy text is mostly loops, and its speed says little
LOOPING_HEADLINE = 0.7  # the temperature of the headline then
DRIFT_LIMIT = 1.15  # slowest over fastest repeat of the baseline


def per_batch_seconds(runs: Runs) -> list[float]:
    """Return the median over repeats of each batch's seconds."""
    return [median(column) for column in zip(*runs.seconds, strict=True)]


def per_batch_decoding(runs: Runs) -> list[float] | None:
    """Return the median over repeats of each batch's seconds less those of its prefill.

    The two were clocked right after each other, so the difference is formed before the median. None
    where the prefill was not clocked.
    """
    if not runs.prefill:
        return None
    pairs = zip(runs.seconds, runs.prefill, strict=True)
    rest = [[a - b for a, b in zip(whole, first, strict=True)] for whole, first in pairs]
    return [median(column) for column in zip(*rest, strict=True)]


def make_row(
    method: Method,
    runs: dict[str, Runs],
    prompts: Sequence[Prompt],
    temperature: float,
    identity: Identity | None,
    *,
    dtype: str,
    device: str,
) -> dict[str, Any]:
    """Return one row of bench.json: ``method`` at ``temperature``, beside plain decoding.

    In a batch a kind of prompt has no seconds of its own, hence no speed.

    Args:
        method: which.
        runs: of all methods at this temperature and batch size.
        prompts: those decoded.
        temperature: of the sampling.
        identity: comparison with plain decoding; None where the draws differ by design.
        dtype: of the weights.
        device: of the weights.
    """
    of = _Totals(runs[method.name])
    plain, hf = _Totals(runs["plain"]), _Totals(runs["hf_generate"])
    kinds = sorted({prompt.kind for prompt in prompts})
    chosen = {k: [i for i, prompt in enumerate(prompts) if prompt.kind == k] for k in kinds}
    batch_size = runs[method.name].batch_size
    alone = batch_size == 1
    return {
        "method": method.name,
        "drafter": method.drafter,
        "tree_nodes": method.tree_nodes,
        "dtype": dtype,
        "device": device,
        "batch": batch_size,
        "temperature": temperature,
        "num_prompts": len(prompts),
        "new_tokens": int(sum(of.tokens)),
        "seconds": [round(sum(repeat), 6) for repeat in runs[method.name].seconds],
        "prefill_seconds": [round(sum(repeat), 6) for repeat in runs[method.name].prefill],
        "tokens_per_second": round(of.speed(), 3),
        "speedup_vs_plain": round(of.speed() / plain.speed(), 4),
        "speedup_vs_plain_ci95": _speedup_ci95(of, plain),
        "speedup_vs_hf_generate": round(of.speed() / hf.speed(), 4),
        **_decoding(of, plain),
        "accept_length": round(of.accept_length(), 4),
        "accept_length_ci95": [round(b, 4) for b in ratio_ci95([of.gained], [of.steps])],
        "accept_lengths": of.histogram(),
        "rep8": round(of.rep8(), 4),
        "peak_memory": runs[method.name].peak_memory,
        "extra_parameters": method.extra_parameters,
        "identical": identity.identical if identity else None,
        "compared": identity.compared if identity else 0,
        "near_ties": identity.near_ties if identity else None,
        "divergences": [asdict(each) for each in identity.divergences] if identity else [],
        "ended": sum(each.ended for each in runs[method.name].decoded),
        "num_replays": sum(each.num_replays for each in runs[method.name].decoded),
        "num_replay_passes": sum(each.num_replay_passes for each in runs[method.name].decoded),
        "per_kind": {
            kind: {
                "num_prompts": len(rows),
                "tokens_per_second": round(of.speed(rows), 3) if alone else None,
                "speedup_vs_plain": round(of.speed(rows) / plain.speed(rows), 4) if alone else None,
                "speedup_vs_plain_ci95": _speedup_ci95(of, plain, rows) if alone else None,
                "accept_length": round(of.accept_length(rows), 4),
                "rep8": round(of.rep8(rows), 4),
            }
            for kind, rows in chosen.items()
        },
    }


def _speedup_ci95(of: _Totals, plain: _Totals, batches: Sequence[int] | None = None) -> list[float]:
    batches = range(len(of.tokens)) if batches is None else batches
    (tokens, seconds, plain_tokens, plain_seconds) = (
        [values[i] for i in batches]
        for values in (of.tokens, of.seconds, plain.tokens, plain.seconds)
    )
    bounds = ratio_ci95([tokens, plain_seconds], [seconds, plain_tokens])
    return [round(bound, 4) for bound in bounds]


def _decoding(of: _Totals, plain: _Totals) -> dict[str, Any]:
    """Return the speed without prefill; None where it was not clocked, or nothing came after it."""
    own, other = of.decode_speed(), plain.decode_speed()
    found: dict[str, Any] = {
        "decode_tokens_per_second": None if own is None else round(own, 3),
        "decode_speedup_vs_plain": None,
        "decode_speedup_vs_plain_ci95": None,
    }
    if own is None or other is None:
        return found
    assert of.decoding is not None and plain.decoding is not None
    bounds = ratio_ci95([of.later, plain.decoding], [of.decoding, plain.later])
    return found | {
        "decode_speedup_vs_plain": round(own / other, 4),
        "decode_speedup_vs_plain_ci95": [round(bound, 4) for bound in bounds],
    }


class _Totals:
    """Figures of one method per prompt or batch, and their ratios over all of them or some."""

    def __init__(self, runs: Runs) -> None:
        self.texts = [each.tokens for each in runs.decoded]
        # per batch, of which each prompt is one where they are decoded alone
        self.tokens = [float(sum(len(self.texts[i]) for i in rows)) for rows in runs.batches]
        self.seconds = per_batch_seconds(runs)
        # without the first token of each text, which comes of the prefill
        firsts = (sum(bool(self.texts[i]) for i in rows) for rows in runs.batches)
        self.later = [n - first for n, first in zip(self.tokens, firsts, strict=True)]
        self.decoding = per_batch_decoding(runs)
        self.lengths = [each.accept_lengths for each in runs.decoded]
        self.gained = [float(sum(each)) for each in self.lengths]
        self.steps = [float(len(each)) for each in self.lengths]

    def speed(self, batches: Sequence[int] | None = None) -> float:
        batches = range(len(self.tokens)) if batches is None else batches
        return sum(self.tokens[i] for i in batches) / sum(self.seconds[i] for i in batches)

    def decode_speed(self) -> float | None:
        if self.decoding is None or sum(self.decoding) <= 0 or not sum(self.later):
            return None
        return sum(self.later) / sum(self.decoding)

    def histogram(self) -> dict[str, int]:
        """Count verify steps by their accept length; JSON wants strings as keys."""
        counts = Counter(length for each in self.lengths for length in each)
        return {str(length): counts[length] for length in sorted(counts)}

    def accept_length(self, rows: Sequence[int] | None = None) -> float:
        rows = range(len(self.texts)) if rows is None else rows
        return mean_accept_length([self.lengths[i] for i in rows])

    def rep8(self, rows: Sequence[int] | None = None) -> float:
        rows = range(len(self.texts)) if rows is None else rows
        return sum(rep8(self.texts[i]) for i in rows) / len(rows)


def baseline_drift(runs: Sequence[dict[str, Runs]]) -> float:
    """Return slowest over fastest repeat of plain decoding; well above 1, something interfered.

    Args:
        runs: per temperature and batch size, all methods.
    """
    totals = [[sum(repeat) for repeat in each["plain"].seconds] for each in runs]
    return max(max(each) / min(each) for each in totals)


def disturbance(watched: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the environment block says about other work on the machine.

    Args:
        watched: per temperature and batch size ``drift`` of plain decoding, where it was clocked
            more than once, and what :func:`specheads.system.hardware.between` returns.
    """
    drift = max(each["drift"] for each in watched if "drift" in each)
    shares = [each["other_share"] for each in watched]
    known = [
        (share, each["seconds"])
        for share, each in zip(shares, watched, strict=True)
        if share is not None
    ]
    mean = sum(s * t for s, t in known) / sum(t for _, t in known) if known else None
    worst = max((share for share, _ in known), default=None)
    return {
        "baseline_drift": drift,
        "other_share": None if mean is None else round(mean, 4),
        "largest_other_share": worst,
        "contended": drift > DRIFT_LIMIT or (worst or 0.0) > SHARE_LIMIT,
        "watched": list(watched),
    }


def headline(rows: Sequence[dict[str, Any]], method: str = "tree") -> dict[str, Any]:
    """Return the figure to quote, at batch 1: greedy, or T=0.7 where greedy text repeats itself.

    Args:
        rows: of bench.json.
        method: whose; settled before anything was measured.

    Raises:
        ValueError: if the rows lack the temperature that the rule asks for.
    """
    by_key = {(row["method"], row["temperature"]): row for row in rows if row["batch"] == 1}
    repeated = by_key["plain", 0.0]["rep8"]
    temperature = LOOPING_HEADLINE if repeated > REP8_LIMIT else 0.0
    if (method, temperature) not in by_key:
        raise ValueError(f"rows must hold method {method} at temperature {temperature}, got none")
    row = by_key[method, temperature]
    keys = ("speedup_vs_plain", "speedup_vs_plain_ci95", "speedup_vs_hf_generate")
    more = ("accept_length", "accept_length_ci95", "identical", "compared", "near_ties")
    return {
        "method": method,
        "temperature": temperature,
        "rep8_plain_greedy": repeated,
        **{key: row[key] for key in (*keys, *more)},
    }


def crossovers(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return per drafted method and temperature the batch at which plain decoding catches up."""
    found = []
    for method, temperature in in_order(rows, "method", "temperature"):
        series = series_of(rows, method, temperature)
        if not series[0]["drafter"]:
            continue
        sizes = [row["batch"] for row in series]
        size, between = crossover(sizes, [row["speedup_vs_plain"] for row in series])
        found.append(
            {
                "method": method,
                "temperature": temperature,
                "batch": size,
                "interpolated": None if between is None else round(between, 2),
                "largest_measured": sizes[-1],
            }
        )
    return found


def in_order(rows: Sequence[dict[str, Any]], *keys: str) -> list[tuple[Any, ...]]:
    """Return the distinct values of ``keys``, in the order in which rows bring them."""
    return list(dict.fromkeys(tuple(row[key] for key in keys) for row in rows))


def series_of(
    rows: Sequence[dict[str, Any]], method: str, temperature: float
) -> list[dict[str, Any]]:
    """Return a method's rows at one temperature by ascending batch size."""
    chosen = [r for r in rows if (r["method"], r["temperature"]) == (method, temperature)]
    return sorted(chosen, key=lambda row: row["batch"])


def failures(result: dict[str, Any]) -> list[str]:
    """Return a line for every difference from plain decoding that rounding does not explain."""
    noise, lines = result["settings"]["noise"], []
    for row in result["rows"]:
        for each in row["divergences"]:
            if each["near_tie"]:
                continue
            where = (
                f"{row['method']} at T={row['temperature']:g}, batch {row['batch']}: prompt "
                f"{each['prompt']} differs from plain decoding at new token {each['index']}"
            )
            if each["margin_fp32"] is None:
                lines.append(f"{where}, where one of the texts had ended")
                continue
            lines.append(
                f"{where} (token {each['other_token']} for {each['plain_token']}), margin "
                f"{each['margin_dtype']:.5f} in {row['dtype']} (limit {noise['shape']:.5f}), "
                f"{each['margin_fp32']:.5f} in float32 (limit {noise['dtype']:.5f})"
            )
    return lines


def is_static_tree(method: str) -> bool:
    """Return whether a method is the export's heads in a static tree: ``tree`` or ``tree_<N>``."""
    return method == "tree" or method.removeprefix("tree_").isdecimal()


# what the parts of a merged drafter's name are called where they are measured alone
_ALONE = {"heads": ("tree", "tree_dynamic"), "lookup": ("lookup", "prompt_lookup")}
_TRANSFORMERS = {
    "draft": "hf_assisted",
    "draft_tree": "hf_assisted",
    "draft_heads": "hf_assisted",
    "prompt_lookup": "hf_lookup",
    "suffix": "hf_lookup",
}


def rivals(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs worth a line: merged drafters and their members, ours and transformers'."""
    found = [(name, other) for name, other in _TRANSFORMERS.items() if {name, other} <= set(names)]
    for name in names:
        if "+" in name:
            alone = [each for part in name.split("+") for each in _ALONE.get(part, (part,))]
            found += [(name, other) for other in alone if other in names]
    return found


def versus(runs: Mapping[str, Runs], name: str, other: str) -> dict[str, Any]:
    """Return how many times as fast ``name`` is as ``other``, in tokens per second.

    Both decoded the same prompts in turn, so the interval is a bootstrap over prompts of the ratio
    itself, which is narrower than what two speeds over plain decoding would let one say.

    Args:
        runs: of all methods at one temperature and batch size.
        name: of a method.
        other: likewise.
    """
    tokens, seconds = {}, {}
    for each in (name, other):
        run = runs[each]
        tokens[each] = [
            float(sum(len(run.decoded[i].tokens) for i in rows)) for rows in run.batches
        ]
        seconds[each] = per_batch_seconds(run)
    ratio = sum(tokens[name]) * sum(seconds[other]) / (sum(seconds[name]) * sum(tokens[other]))
    low, high = ratio_ci95([tokens[name], seconds[other]], [seconds[name], tokens[other]])
    return {
        "method": name,
        "other": other,
        "speedup": round(ratio, 4),
        "ci95": [round(low, 4), round(high, 4)],
    }


def pairs(clocked: Mapping[tuple[float, int], Mapping[str, Runs]]) -> list[dict[str, Any]]:
    """Return :func:`versus` of all :func:`rivals` at every temperature and batch size.

    Of a merged drafter's members the fastest at that temperature is marked ``best_member``.
    """
    found = []
    for (temperature, batch), runs in clocked.items():
        rows = [versus(runs, *pair) for pair in rivals(list(runs))]
        for row in rows:
            of = [each["speedup"] for each in rows if each["method"] == row["method"]]
            row["best_member"] = "+" in row["method"] and row["speedup"] == min(of)
        found += [{"temperature": temperature, "batch": batch, **row} for row in rows]
    return found


def format_pairs(found: Sequence[dict[str, Any]]) -> str:
    """Return a line for every pair."""
    return "\n".join(
        f"T={row['temperature']:g}, batch {row['batch']}: {row['method']} is {row['speedup']:.2f}x"
        f" ({row['ci95'][0]:.2f}-{row['ci95'][1]:.2f}) as fast as {row['other']}"
        + (", its best member" if row["best_member"] else "")
        for row in found
    )


def step_records(
    clocked: Mapping[tuple[float, int], Mapping[str, Runs]], prompts: Sequence[Prompt]
) -> Iterator[dict[str, Any]]:
    """Yield one record per method, temperature, batch size and prompt.

    Args:
        clocked: the runs, by temperature and batch size, then by the method's name.
        prompts: those decoded.

    Yields:
        ``method``, ``temperature``, ``batch``, ``prompt``, ``kind``, ``prompt_tokens``;
        ``tokens``, the new ones of the first repeat, and ``new_tokens``, their number; ``ended``;
        ``accept_lengths``, one per verify step: without the first token, which comes of the
        prefill. ``together`` names all prompts that were clocked as one; ``seconds`` and
        ``prefill_seconds`` are theirs, one per repeat, the former with the prefill.
    """
    for (temperature, batch), runs in clocked.items():
        for method, of in runs.items():
            for index, rows in enumerate(of.batches):
                for row in rows:
                    prompt, text = prompts[row], of.decoded[row]
                    yield {
                        "method": method,
                        "temperature": temperature,
                        "batch": batch,
                        "prompt": prompt.id,
                        "kind": prompt.kind,
                        "prompt_tokens": prompt.input_ids.shape[1],
                        "new_tokens": len(text.tokens),
                        "ended": text.ended,
                        "accept_lengths": text.accept_lengths,
                        "tokens": text.tokens,
                        "together": [prompts[i].id for i in rows],
                        "seconds": [round(repeat[index], 6) for repeat in of.seconds],
                        "prefill_seconds": [round(repeat[index], 6) for repeat in of.prefill],
                    }


def write_steps(
    path: Path,
    clocked: Mapping[tuple[float, int], Mapping[str, Runs]],
    prompts: Sequence[Prompt],
) -> int:
    """Write the records as JSON lines, in the place of what was there; return their number."""
    fresh = path.with_name(f".{path.name}.tmp")
    number = 0
    with fresh.open("w") as file:
        for number, record in enumerate(step_records(clocked, prompts), 1):  # noqa: B007
            file.write(json.dumps(record) + "\n")
    fresh.replace(path)
    return number
