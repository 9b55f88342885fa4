"""Turn clocked runs into the rows of bench.json, and say what follows from the rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from specheads.decoding.result import mean_divergence
from specheads.measure.clock import Method, Prompt, Runs
from specheads.measure.identity import Divergence
from specheads.system import hardware
from specheads.system.files import whole_file

REP8_LIMIT = 0.25  # above it greedy text is mostly loops, and its speed says little
LOOPING_HEADLINE = 0.7  # the temperature of the headline then
DRIFT_LIMIT = 1.15  # slowest over fastest repeat of the baseline
Clocked = Mapping[tuple[float, int], Mapping[str, Runs]]  # (temperature, batch) -> method -> runs


def rep8(tokens: Sequence[int], n: int = 8) -> float:
    """Return the share of ``n``-grams that have occurred before; loops are easy to draft."""
    total = len(tokens) - n + 1
    if total <= 0:
        return 0.0
    return 1 - len({tuple(tokens[i : i + n]) for i in range(total)}) / total


def mean_accept_length(accept_lengths: Sequence[Sequence[int]]) -> float:
    """Return tokens per verify step over all prompts; every step weighs the same.

    Args:
        accept_lengths: per prompt, the tokens gained by each of its verify steps.
    """
    steps = sum(len(lengths) for lengths in accept_lengths)
    return sum(map(sum, accept_lengths)) / steps if steps else 0.0


def ratio_ci95(
    numerators: Sequence[Sequence[float]], denominators: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """Bootstrap over prompts the 95% interval of a product of ratios of sums.

    Prompts are drawn with replacement, the same draw for every sum, because a prompt that is easy
    for one method is often easy for the other. One pair gives an accept length (tokens over
    steps); two pairs give a speed-up (tokens over seconds, times seconds over tokens).

    Args:
        numerators: lists of one value per prompt, [R][N].
        denominators: as ``numerators``.

    Raises:
        ValueError: if the lists differ in length.
    """
    num = len(numerators)
    return bootstrap_ci95(
        lambda sums: (sums[:num] / sums[num:].clamp_min(1e-12)).prod(0), *numerators, *denominators
    )


def bootstrap_ci95(
    figure: Callable[[Tensor], Tensor], *columns: Sequence[float]
) -> tuple[float, float]:
    """Bootstrap over prompts the 95% interval of a figure of sums.

    Args:
        figure: from the sums [C, 2000] of the columns over 2000 draws of prompts to it, [2000].
        *columns: C of them, each of one value per prompt.

    Raises:
        ValueError: if they differ in length.
    """
    values = torch.tensor(columns, dtype=torch.float64)
    size, generator = values.shape[1], torch.Generator().manual_seed(0)
    draws = torch.randint(size, (2000, size), generator=generator)
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = figure(values[:, draws].sum(-1)).quantile(ends).tolist()
    return low, high


Work = tuple[Sequence[float], Sequence[float]]  # tokens and seconds, of each batch or prompt


def speed(work: Work) -> float:
    """Return tokens per second over all of ``work``."""
    return sum(work[0]) / sum(work[1])


def speedup(work: Work, other: Work) -> tuple[float, list[float]]:
    """Return how many times as fast ``work`` is as ``other``, with its 95% interval, rounded.

    Both are of the same prompts in turn, so the interval is a bootstrap over prompts of the ratio
    itself, which is narrower than what two speeds with an interval each would let one say.
    """
    bounds = ratio_ci95([work[0], other[1]], [work[1], other[0]])
    return round(speed(work) / speed(other), 4), rounded(bounds)


def accept_length_ci95(accept_lengths: Sequence[Sequence[int]]) -> list[float]:
    """Return the 95% interval, over prompts, of :func:`mean_accept_length`."""
    return list(ratio_ci95([list(map(sum, accept_lengths))], [list(map(len, accept_lengths))]))


def rounded(values: Sequence[float]) -> list[float]:
    """Round to the four digits of bench.json."""
    return [round(value, 4) for value in values]


def whole(runs: Runs) -> Work:
    """Return all tokens per batch, and the median over repeats of the batch's seconds."""
    tokens = [float(sum(len(runs.decoded[i].new_tokens) for i in rows)) for rows in runs.batches]
    return tokens, [median(column) for column in zip(*runs.seconds, strict=True)]


def without_prefill(runs: Runs) -> Work | None:
    """Return what is left of :func:`whole` without the prefill and the first token of each text.

    Prefill and text were clocked right after each other, so the difference is formed before the
    median. None where the prefill was not clocked, or nothing came after it.
    """
    if not runs.prefill:
        return None
    texts = [[runs.decoded[i].new_tokens for i in rows] for rows in runs.batches]
    tokens = [float(sum(len(each) - bool(each) for each in rows)) for rows in texts]
    pairs = zip(runs.seconds, runs.prefill, strict=True)
    rest = [[a - b for a, b in zip(both, first, strict=True)] for both, first in pairs]
    seconds = [median(column) for column in zip(*rest, strict=True)]
    return (tokens, seconds) if sum(seconds) > 0 and sum(tokens) else None


def make_row(
    method: Method,
    runs: Mapping[str, Runs],
    prompts: Sequence[Prompt],
    temperature: float,
    divergences: Sequence[Divergence] | None,
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
        divergences: from plain decoding; None where the draws differ by design.
        dtype: of the weights.
        device: of the weights.
    """
    of, plain = runs[method.name], runs["plain"]
    work, generate = whole(of), runs.get("hf_generate")
    vs_generate = round(speed(work) / speed(whole(generate)), 4) if generate else None
    lengths = [each.accept_lengths for each in of.decoded]
    steps = Counter(length for each in lengths for length in each)
    counted: dict[str, int | None] = {"identical": None, "compared": 0, "near_ties": None}
    if divergences is not None:
        identical, near = len(prompts) - len(divergences), sum(e.near_tie for e in divergences)
        counted = {"identical": identical, "compared": len(prompts), "near_ties": near}
    return {
        "method": method.name,
        "drafter": method.drafter,
        "tree_nodes": method.tree_nodes,
        "dtype": dtype,
        "device": device,
        "batch": of.batch_size,
        "temperature": temperature,
        "num_prompts": len(prompts),
        "new_tokens": int(sum(work[0])),
        "seconds": [round(sum(repeat), 6) for repeat in of.seconds],
        "prefill_seconds": [round(sum(repeat), 6) for repeat in of.prefill],
        **_speeds(work, whole(plain)),
        "speedup_vs_hf_generate": vs_generate,
        **_speeds(without_prefill(of), without_prefill(plain), "decode_"),
        "accept_length": round(mean_accept_length(lengths), 4),
        "accept_length_ci95": rounded(accept_length_ci95(lengths)),
        "accept_lengths": {str(length): steps[length] for length in sorted(steps)},
        "rep8": mean_rep8(of),
        "peak_memory": of.peak_memory,
        "extra_parameters": method.extra_parameters,
        **counted,
        **({"divergence": found} if (found := mean_divergence(of.decoded)) else {}),
        "divergences": [asdict(each) for each in divergences or ()],
        "ended": sum(each.finished for each in of.decoded),
        "num_replays": sum(each.num_replays for each in of.decoded),
        "num_replay_passes": sum(each.num_replay_passes for each in of.decoded),
        "per_kind": {
            kind: _of_kind(of, plain, [i for i, each in enumerate(prompts) if each.kind == kind])
            for kind in sorted({prompt.kind for prompt in prompts})
        },
    }


def mean_rep8(runs: Runs) -> float:
    """Return the mean over texts of :func:`rep8`, rounded."""
    return round(sum(rep8(each.new_tokens) for each in runs.decoded) / len(runs.decoded), 4)


def _speeds(own: Work | None, plain: Work | None, prefix: str = "") -> dict[str, Any]:
    """Return the speed, and the speed-up over plain decoding; None where they are unknown."""
    ratio, bounds = speedup(own, plain) if own and plain else (None, None)
    return {
        f"{prefix}tokens_per_second": round(speed(own), 3) if own else None,
        f"{prefix}speedup_vs_plain": ratio,
        f"{prefix}speedup_vs_plain_ci95": bounds,
    }


def _of_kind(of: Runs, plain: Runs, chosen: Sequence[int]) -> dict[str, Any]:
    """Return the figures of some prompts; of a batch nobody knows whose the seconds were."""
    own, alone = of.only(chosen), of.batch_size == 1
    works = (whole(own), whole(plain.only(chosen))) if alone else (None, None)
    return {
        "num_prompts": len(chosen),
        **_speeds(*works),
        "accept_length": round(mean_accept_length([e.accept_lengths for e in own.decoded]), 4),
        "rep8": mean_rep8(own),
    }


def seen_beside(runs: Mapping[str, Runs], temperature: float) -> dict[str, Any]:
    """Return what was seen of other work on the machine, from the first clocked text until now.

    Args:
        runs: of all methods at one temperature and batch size, just clocked.
        temperature: for the record.

    Returns:
        ``temperature``, ``batch``, ``drift``: slowest over fastest repeat of plain decoding (well
        above 1, something interfered), and what :func:`specheads.system.hardware.between` says.
    """
    plain = runs["plain"]
    assert plain.started is not None
    return {
        "temperature": temperature,
        "batch": plain.batch_size,
        "drift": round(baseline_drift(plain), 4),
        **hardware.between(plain.started, hardware.sample()),
    }


def baseline_drift(plain: Runs) -> float:
    """Return slowest over fastest repeat."""
    totals = [sum(repeat) for repeat in plain.seconds]
    return max(totals) / min(totals)


def disturbance(watched: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the environment block says about other work on the machine.

    Args:
        watched: :func:`seen_beside` of every temperature and batch size; ``drift`` may be missing
            where plain decoding was not clocked.
    """
    drift = max(each["drift"] for each in watched if "drift" in each)
    known = [each for each in watched if each["other_share"] is not None]
    worst = max((each["other_share"] for each in known), default=None)
    total = sum(each["seconds"] for each in known)
    mean = sum(each["other_share"] * each["seconds"] for each in known) / total if known else None
    return {
        "baseline_drift": drift,
        "other_share": None if mean is None else round(mean, 4),
        "largest_other_share": worst,
        "contended": drift > DRIFT_LIMIT or (worst or 0.0) > hardware.SHARE_LIMIT,
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


def crossovers(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return per drafted method and temperature the batch at which plain decoding catches up."""
    found = []
    drafted = [row for row in rows if row["drafter"]]
    for method, temperature in in_order(drafted, "method", "temperature"):
        series = [r for r in drafted if (r["method"], r["temperature"]) == (method, temperature)]
        lost = [row["batch"] for row in series if row["speedup_vs_plain"] <= 1]
        at = {"batch": min(lost, default=None), "largest_measured": max(r["batch"] for r in series)}
        found.append({"method": method, "temperature": temperature, **at})
    return found


def in_order(rows: Sequence[Mapping[str, Any]], *keys: str) -> list[tuple[Any, ...]]:
    """Return the distinct values of ``keys``, in the order in which rows bring them."""
    return list(dict.fromkeys(tuple(row[key] for key in keys) for row in rows))


def failures(result: Mapping[str, Any]) -> list[str]:
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


# drafters that copy what was written before, by their names in rows
_COPYING = {"ngram", "lookup", "suffix", "lookahead", "hf prompt lookup"}


def only_copies(row: Mapping[str, Any]) -> bool:
    """Tell whether a row's drafter copies from texts and nothing of it was trained."""
    return bool(row["drafter"]) and _COPYING.issuperset(row["drafter"].split("+"))


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
    """Return how many times as fast method ``name`` is as ``other``, in tokens per second.

    Args:
        runs: of all methods at one temperature and batch size, by name.
        name: of the first method.
        other: name of the method that it is compared with.
    """
    ratio, bounds = speedup(whole(runs[name]), whole(runs[other]))
    return {"method": name, "other": other, "speedup": ratio, "ci95": bounds}


def pairs(clocked: Clocked) -> list[dict[str, Any]]:
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


def step_records(clocked: Clocked, prompts: Sequence[Prompt]) -> Iterator[dict[str, Any]]:
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
                        "new_tokens": len(text.new_tokens),
                        "ended": text.finished,
                        "accept_lengths": text.accept_lengths,
                        "tokens": text.new_tokens,
                        "together": [prompts[i].id for i in rows],
                        "seconds": [round(repeat[index], 6) for repeat in of.seconds],
                        "prefill_seconds": [round(repeat[index], 6) for repeat in of.prefill],
                    }


def write_steps(path: Path, clocked: Clocked, prompts: Sequence[Prompt]) -> None:
    """Write the records as JSON lines, in the place of what was there."""
    with whole_file(path) as fresh, fresh.open("w") as file:
        file.writelines(f"{json.dumps(record)}\n" for record in step_records(clocked, prompts))
