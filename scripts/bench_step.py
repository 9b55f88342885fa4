"""Measure what a verify step costs, and what of it is the loop's own.

    python scripts/bench_step.py --checkpoint runs/hydra/export --out benchmarks/step.json

budget  per step at batch 1: the base model's forward pass, one pass of the heads, and the rest,
        phase by phase. Overhead is the step less those two. Clocked phases are of one decoding, the
        step without clocks of another, in turn with it and with plain decoding.
verify  a verify step of N nodes beside model(...) on N tokens with the same cache, position ids and
        rows of logits, in turn; the ratio is the median over pairs of neighbouring calls.
growth  the second half of a long text beside the first, tree and plain decoding in turn. Tokens per
        step vary along a text, so growth per step is shown beside growth per token.

Times are medians with quartiles, in one process. On a machine that is not idle they mean nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed

import torch
from torch import Tensor

from specheads.attention.cache import TreeCache
from specheads.attention.tree import default_tree
from specheads.decoding import loop
from specheads.decoding.loop import plain_decode
from specheads.decoding.result import DecodeResult
from specheads.drafters.contract import Candidates
from specheads.drafters.heads import static_drafter
from specheads.measure.clock import (
    FORWARD,
    HEADS,
    PHASES,
    Phases,
    Prompt,
    max_prompt_length,
    now,
    prompt_file,
    read_prompts,
)
from specheads.models.base import context_length, end_tokens
from specheads.models.checkpoint import Export, load_export
from specheads.models.forward import ModelPass
from specheads.models.output import output_layer
from specheads.system import hardware
from specheads.verification.sampling import Sampler

SHARE_LIMIT, MS_LIMIT = 0.08, 0.3  # of the overhead: one of the two is to be kept
VERIFY_LIMIT, GROWTH_LIMIT = 1.05, 1.10
Decode = Callable[..., DecodeResult]


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Return median and quartiles."""
    ordered = sorted(values)
    low, middle, high = (
        statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    )
    return {"median": round(middle, digits), "q25": round(low, digits), "q75": round(high, digits)}


def clock_steps(decode: Decode, *args: Any, **kwargs: Any) -> tuple[list[float], list[int]]:
    """Decode; return when the tokens of the prefill and of each step were there, and how many."""
    times: list[float] = []
    counts: list[int] = []

    def note(row: int, tokens: list[int]) -> None:
        del row
        times.append(time.perf_counter())
        counts.append(len(tokens))

    decode(*args, on_tokens=note, **kwargs)
    return times, counts


def differences(times: Sequence[float]) -> list[float]:
    """Return the milliseconds from each time to the next."""
    return [1e3 * (b - a) for a, b in zip(times, times[1:], strict=False)]


def measure_budget(
    export: Export, prompts: Sequence[Prompt], temperature: float, args: argparse.Namespace
) -> dict[str, Any]:
    """Return where the time of a step goes."""
    base, device = export.base, export.base.device
    drafter = static_drafter(base, export.heads, output_layer(base), export.tree)
    phases, plain_ms, step_ms = Phases(device), list[float](), list[float]()
    gained: list[int] = []
    for repeat in range(args.repeats + 1):
        for index, prompt in enumerate(prompts):
            request: dict[str, Any] = {
                "max_new_tokens": args.max_new_tokens,
                "sampler": Sampler(temperature=temperature, seed=args.seed + index),
                "eos_token_ids": end_tokens(base, export.tokenizer),
                "compile": args.compile,
            }
            ids = prompt.input_ids
            plain, _ = clock_steps(plain_decode, base, ids, **request)
            tree, counts = clock_steps(loop.decode, base, drafter, ids, **request)
            with phases.watching(base, drafter, compile=args.compile):
                loop.decode(base, drafter, ids, **request)
            if repeat == 0:  # to warm up
                phases.steps.clear()
                continue
            plain_ms += differences(plain)
            step_ms += differences(tree)
            gained += counts[1:]
    clocked = [{name: 1e3 * step[name] for name in (*PHASES, "step")} for step in phases.steps]
    overhead = [step["step"] - step[FORWARD] - step[HEADS] for step in clocked]
    for step in clocked:
        step["rest of the loop"] = step["step"] - sum(step[name] for name in PHASES)
    found = {name: spread([s[name] for s in clocked]) for name in (*PHASES, "rest of the loop")}
    whole, own = spread(step_ms), spread(overhead)
    shares = [o / s["step"] for o, s in zip(overhead, clocked, strict=True)]
    share = spread(shares)
    return {
        "temperature": temperature,
        "tree_nodes": export.tree.num_nodes,
        "accept_length": round(sum(gained) / max(len(gained), 1), 4),
        "num_steps": len(step_ms),
        "plain_step_ms": spread(plain_ms),
        "step_ms": whole,
        "clocked_step_ms": spread([step["step"] for step in clocked]),
        "phases_ms": found,
        "overhead_ms": own,
        "overhead_share": share,
        "overhead_by_difference_ms": round(
            whole["median"] - found[FORWARD]["median"] - found[HEADS]["median"], 4
        ),
        "kept": share["median"] <= SHARE_LIMIT or own["median"] <= MS_LIMIT,
    }


@torch.inference_mode()
def measure_verify(export: Export, num_nodes: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the cost of a verify step of ``num_nodes`` beside that of a raw forward pass."""
    base, device = export.base, export.base.device
    generator = torch.Generator().manual_seed(args.seed)
    vocab = base.get_output_embeddings().weight.shape[0]

    def random_tokens(count: int) -> Tensor:
        return torch.randint(vocab, (1, count), generator=generator).to(device)

    step = ModelPass(base, TreeCache())
    step.read(random_tokens(args.context), [args.context])
    tree = default_tree(export.heads.num_heads, num_nodes).to(device)
    nodes = random_tokens(tree.num_nodes)
    positions = torch.arange(args.context, args.context + tree.num_nodes, device=device)[None]
    candidates = Candidates(nodes, tree)

    def raw() -> Tensor:
        logits: Tensor = base(
            input_ids=nodes, past_key_values=step.cache, use_cache=True, position_ids=positions
        ).logits
        return logits

    calls: dict[str, Callable[[], Tensor]] = {
        "verify": lambda: step.verify(candidates.tokens, candidates.tree),
        "raw": raw,
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for pair in range(-10, args.calls):
        for name in ("verify", "raw") if pair % 2 else ("raw", "verify"):
            start = now(device)
            logits = calls[name]()
            end = now(device)
            assert logits.shape[1] == tree.num_nodes
            if pair >= 0:
                seconds[name].append(end - start)
    ratios = [a / b for a, b in zip(seconds["verify"], seconds["raw"], strict=True)]
    draws = random.Random(0)
    medians = sorted(statistics.median(draws.choices(ratios, k=len(ratios))) for _ in range(500))
    return {
        "num_nodes": tree.num_nodes,
        "context": args.context,
        "verify_ms": spread([1e3 * each for each in seconds["verify"]]),
        "raw_ms": spread([1e3 * each for each in seconds["raw"]]),
        "ratio": spread(ratios),
        "kept": statistics.median(ratios) <= VERIFY_LIMIT,
        "ratio_ci95": [round(medians[12], 4), round(medians[-13], 4)],  # bootstrap of the median
    }


def halves(times: Sequence[float], counts: Sequence[int]) -> dict[str, tuple[float, float]]:
    """Return milliseconds per token, per step, and tokens per step, of both halves of a text."""
    half = sum(counts) / 2
    done, steps = float(counts[0]), differences(times)
    parts = [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]  # milliseconds, tokens, steps
    for ms, count in zip(steps, counts[1:], strict=True):
        first = min(max((half - done) / count, 0.0), 1.0)  # a step across the middle is divided
        for part, share in zip(parts, (first, 1 - first), strict=True):
            part[0] += ms * share
            part[1] += count * share
            part[2] += share
        done += count
    (ms1, tokens1, steps1), (ms2, tokens2, steps2) = parts
    return {
        "ms_per_token": (ms1 / tokens1, ms2 / tokens2),
        "ms_per_step": (ms1 / steps1, ms2 / steps2),
        "tokens_per_step": (tokens1 / steps1, tokens2 / steps2),
    }


def measure_growth(
    export: Export, prompt: Tensor, temperature: float, args: argparse.Namespace
) -> dict[str, Any]:
    """Return by how much the second half of a long text is slower than the first."""
    base = export.base
    drafter = static_drafter(base, export.heads, output_layer(base), export.tree)
    runs: dict[str, list[dict[str, tuple[float, float]]]] = {"plain": [], "tree": []}
    for repeat in range(-1, args.repeats):
        # nothing ends a text, so that all are of one length
        request: dict[str, Any] = {
            "max_new_tokens": args.growth_tokens if repeat >= 0 else 16,  # to warm up
            "sampler": Sampler(temperature=temperature, seed=args.seed),
            "compile": args.compile,
        }
        order = ("plain", "tree") if repeat % 2 else ("tree", "plain")
        for name in order:
            decode, more = (loop.decode, [drafter]) if name == "tree" else (plain_decode, [])
            times, counts = clock_steps(decode, base, *more, prompt, **request)
            if repeat >= 0:
                runs[name].append(halves(times, counts))
    row: dict[str, Any] = {
        "temperature": temperature,
        "new_tokens": args.growth_tokens,
        "prompt_tokens": prompt.shape[1],
    }
    for name, found in runs.items():
        row[name] = {
            key: [spread([each[key][i] for each in found]) for i in (0, 1)] for key in found[0]
        }
        for key in ("ms_per_token", "ms_per_step"):
            grown = [each[key][1] / each[key][0] for each in found]
            row[name][f"growth_{key[3:]}"] = spread(grown)
    for key in ("ms_per_token", "ms_per_step"):
        row[f"beyond_plain_{key[3:]}"] = spread(
            [
                (tree[key][1] / tree[key][0]) / (plain[key][1] / plain[key][0])
                for tree, plain in zip(runs["tree"], runs["plain"], strict=True)
            ]
        )
    row["kept"] = row["beyond_plain_per_token"]["median"] <= GROWTH_LIMIT
    return row


def shown(values: dict[str, float], digits: int = 3) -> str:
    """Return a median with its quartiles as text."""
    return f"{values['median']:.{digits}f} ({values['q25']:.{digits}f}-{values['q75']:.{digits}f})"


def print_budget(row: dict[str, Any]) -> None:
    """Print where the time of a step goes."""
    print(
        f"\nA step at T={row['temperature']:g}: tree of {row['tree_nodes']} nodes, "
        f"{row['accept_length']:.2f} tokens; median ms (quartiles)"
    )
    for name, values in (("plain step", row["plain_step_ms"]), ("step", row["step_ms"])):
        print(f"  {name:<20}{shown(values)}")
    print(f"  {'step, clocked':<20}{shown(row['clocked_step_ms'])}")
    for name, values in row["phases_ms"].items():
        print(f"    {name:<18}{shown(values)}")
    print(
        f"  {'overhead':<20}{shown(row['overhead_ms'])}, {row['overhead_share']['median']:.1%} of "
        f"the step (aim: {SHARE_LIMIT:.0%} or {MS_LIMIT} ms{'' if row['kept'] else '; MISSED'}); "
        f"{row['overhead_by_difference_ms']:.3f} by difference from the step without clocks"
    )


def print_verify(row: dict[str, Any]) -> None:
    """Print a verify step beside a raw pass."""
    low, high = row["ratio_ci95"]
    print(
        f"{row['num_nodes']:>5}  {shown(row['verify_ms']):<22}  {shown(row['raw_ms']):<22}  "
        f"{row['ratio']['median']:.3f} ({low:.3f}-{high:.3f}), "
        f"{row['ratio']['q25']:.3f}-{row['ratio']['q75']:.3f}"
        f"{'' if row['kept'] else f'  MISSED the aim of {VERIFY_LIMIT}'}"
    )


def print_growth(row: dict[str, Any]) -> None:
    """Print the halves of a long text."""
    print(f"\n{row['new_tokens']} tokens at T={row['temperature']:g}, first and second half")
    for name in ("plain", "tree"):
        first, second = (each["median"] for each in row[name]["ms_per_token"])
        tokens = [each["median"] for each in row[name]["tokens_per_step"]]
        print(
            f"  {name:<6}{first:.3f} and {second:.3f} ms/token, growth "
            f"{shown(row[name]['growth_per_token'])}; per step "
            f"{shown(row[name]['growth_per_step'])}; tokens per step {tokens[0]:.2f} and "
            f"{tokens[1]:.2f}"
        )
    print(
        f"  beyond plain decoding's: {shown(row['beyond_plain_per_token'])} per token (aim: "
        f"{GROWTH_LIMIT}{'' if row['kept'] else '; MISSED'}), "
        f"{shown(row['beyond_plain_per_step'])} per step"
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", required=True, help="an export")
    parser.add_argument("--base", help="where the export's base model is now, if it was moved")
    parser.add_argument("--parts", nargs="+", default=["budget", "verify", "growth"])
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16")
    parser.add_argument("--threads", type=int, default=0, help="0: all")
    parser.add_argument("--repeats", type=int, default=5, help="decodings per prompt and method")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--num-prompts", type=int, default=6, help="budget: held-out prompts")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="budget")
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 8, 16, 24, 32, 64])
    parser.add_argument("--context", type=int, default=256, help="verify: cached tokens")
    parser.add_argument("--calls", type=int, default=200, help="verify: pairs per number of nodes")
    parser.add_argument("--growth-tokens", type=int, default=2000)
    parser.add_argument(
        "--compile", action="store_true", help="budget, growth: compiled passes, plain ones too"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", "--json", type=Path, help="write the JSON there")
    args = parser.parse_args(argv)
    if unknown := set(args.parts) - {"budget", "verify", "growth"}:
        parser.error(f"--parts must be among budget, verify, growth; got {sorted(unknown)}")
    if args.out and not args.out.parent.is_dir():
        parser.error(f"--out is {args.out}, but there is no folder {args.out.parent}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    args = parse(argv)
    device = hardware.pick_device()
    hardware.pin_threads(args.threads)
    dtype = hardware.pick_dtype(args.dtype, device)
    hardware.quiet_loading()
    export = load_export(args.checkpoint, base=args.base, dtype=dtype, device=device)
    environment = hardware.environment()
    print(json.dumps(environment))
    settings = {k: v for k, v in vars(args).items() if k != "out"}
    settings["dtype"] = str(dtype).removeprefix("torch.")
    report: dict[str, Any] = {"environment": environment, "settings": settings}
    prompts, report["settings"]["prompts_sha256"] = read_prompts(
        prompt_file("", args.checkpoint, "prompts.jsonl"),
        export.tokenizer,
        args.num_prompts,
        max_length=max_prompt_length(export.base, args.max_new_tokens),
        device=device,
    )
    if "budget" in args.parts:
        report["budget"] = [measure_budget(export, prompts, t, args) for t in args.temperatures]
        for row in report["budget"]:
            print_budget(row)
    if "verify" in args.parts:
        print("\nnodes  verify ms (quartiles)   raw ms (quartiles)      ratio (95%), quartiles")
        report["verify"] = []
        for num_nodes in args.nodes:
            report["verify"].append(measure_verify(export, num_nodes, args))
            print_verify(report["verify"][-1])
    if "growth" in args.parts:
        context = context_length(export.base)
        room = min(p.input_ids.shape[1] for p in prompts)
        room = room if context is None else min(room, context - args.growth_tokens)
        if room < 1:
            raise SystemExit(f"--growth-tokens {args.growth_tokens}: the context is {context}")
        prompt = prompts[0].input_ids[:, :room]
        report["growth"] = [measure_growth(export, prompt, t, args) for t in args.temperatures]
        for row in report["growth"]:
            print_growth(row)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
        print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
