"""Adaptive draft length against every fixed one: judged by measured costs, the clock beside it.

Drafts are recorded once at every position of the base's plain texts, so that all rules of draft
length are replayed on the same texts (:mod:`specheads.decoding.judging`), at costs measured here.
What adaptive rules know beforehand (how often guesses are right, by depth and by the draft's
confidence) comes from the calibration prompts. Asked: is the adaptive length within 3% of the best
fixed length of each kind of prompt, which is known in hindsight only, and is it better than the
best single fixed length over their mix? Then the same rules are clocked.

    python scripts/bench_adaptive.py --draft runs/distill/export
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from specheads.decoding.judging import judge, learn_chances, learn_rates
from specheads.decoding.recording import Recording, record

from specheads.decoding.costs import clock_drafts
from specheads.drafters.draft_model import DraftModelDrafter
from specheads.drafters.length import (
    CALIBRATED,
    AdaptiveLength,
    ConfidentLength,
    EntropyLength,
    FixedLength,
    StepCosts,
)
from specheads.measure.clock import Prompt, Runs, clock, drafted_method, plain_method, read_prompts
from specheads.measure.stats import ratio_ci95
from specheads.models.base import context_length, end_tokens, load_base_model, load_tokenizer
from specheads.models.draft import load_draft
from specheads.models.manifest import write_json
from specheads.system import hardware
from specheads.system.hardware import environment
from specheads.verification.sampling import Sampler

if TYPE_CHECKING:
    from specheads.drafters.length import Length

DATA = Path(__file__).resolve().parents[1] / "data" / "tinycode"
KINDS = ("body", "next", "rename", "type_hint")
CLOSE = 0.97  # of the best fixed length's speed
MIX = "mix"


def rules(costs: StepCosts, max_tokens: int, calibration: Sequence[Recording]) -> dict[str, Length]:
    """Return the rules that are compared beside fixed lengths, by name.

    The unmeasured one knows the costs only, as a user's first run does. Confidence and entropy
    alone get the threshold that is best on the calibration prompts.
    """
    prior = learn_rates(calibration, max_tokens)
    chances = learn_chances(calibration)

    def best(options: Sequence[Length]) -> Length:
        return max(options, key=lambda rule: judge(rule, calibration, costs).speedup)

    thresholds = [i / 20 for i in range(1, 20)]
    return {
        "adaptive": AdaptiveLength(costs, max_tokens, prior=prior),
        "adaptive, unmeasured": AdaptiveLength(costs, max_tokens, chances=CALIBRATED),
        "adaptive+confidence": AdaptiveLength(costs, max_tokens, prior=prior, chances=chances),
        "confidence": best([ConfidentLength(max_tokens, each) for each in thresholds]),
        "entropy": best([EntropyLength(max_tokens, each) for each in thresholds]),
    }


def judged(
    lengths: Mapping[str, Length], recordings: Sequence[Recording], costs: StepCosts
) -> dict[str, dict[str, float]]:
    """Return the judged speed-up over plain decoding by rule, kind of prompt and in the mix."""
    kinds = list(dict.fromkeys(each.kind for each in recordings))
    of_kind = {kind: [each for each in recordings if each.kind == kind] for kind in kinds}
    return {
        name: {
            kind: judge(length, chosen, costs).speedup
            for kind, chosen in {**of_kind, MIX: list(recordings)}.items()
        }
        for name, length in lengths.items()
    }


def verdicts(
    speedups: Mapping[str, Mapping[str, float]], fixed: Sequence[str], name: str
) -> dict[str, Any]:
    """Return whether a rule keeps what is asked of an adaptive one.

    Args:
        speedups: by rule and kind; plain decoding's are 1.
        fixed: names of the fixed lengths.
        name: of the rule.

    Returns:
        Per kind its speed relative to the best fixed length there, in hindsight; in the mix,
        relative to the best single one; and whether all of them suffice.
    """
    relative = {}
    for kind, speed in speedups[name].items():
        relative[kind] = speed / max(1.0, *(speedups[each][kind] for each in fixed))
    close = all(ratio >= CLOSE for kind, ratio in relative.items() if kind != MIX)
    return {"relative": relative, "kept": close and relative[MIX] > 1}


def table(
    speedups: Mapping[str, Mapping[str, float]], fixed: Sequence[str], clocked: Mapping[str, Any]
) -> list[str]:
    """Return the lines of the table; the best fixed length of each column is marked."""
    kinds = list(next(iter(speedups.values())))
    best = {kind: max(fixed, key=lambda name: speedups[name][kind]) for kind in kinds}
    lines = [f"{'draft length':<22}" + "".join(f"{kind:>12}" for kind in kinds) + "   clocked mix"]
    for name, row in speedups.items():
        cells = [f"{row[kind]:.3f}x{'*' if best[kind] == name else ' '}" for kind in kinds]
        line = f"{name:<22}" + "".join(f"{cell:>12}" for cell in cells)
        if name in clocked:
            speed, (low, high) = clocked[name]["speedup"][MIX], clocked[name]["ci95"]
            line += f"   {speed:.3f}x ({low:.3f} to {high:.3f})"
        lines.append(line)
    return lines


def of_clock(runs: Mapping[str, Runs], prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return clocked speed-ups over plain decoding by rule: per kind, in the mix, its interval."""
    plain, found = runs["plain"], {}
    for name, own in runs.items():
        if name == "plain":
            continue
        # per prompt the median over repeats, which an interrupted moment does not move
        ours, theirs = (
            [median(of_prompt) for of_prompt in zip(*each.seconds, strict=True)]
            for each in (own, plain)
        )
        speedup = {}
        for kind in [*dict.fromkeys(prompt.kind for prompt in prompts), MIX]:
            rows = [i for i, prompt in enumerate(prompts) if kind in (prompt.kind, MIX)]
            speedup[kind] = sum(theirs[i] for i in rows) / sum(ours[i] for i in rows)
        same = [a.tokens == b.tokens for a, b in zip(own.decoded, plain.decoded, strict=True)]
        found[name] = {
            "speedup": speedup,
            "ci95": ratio_ci95([theirs], [ours]),
            "identical": sum(same),
        }
    return found


def options() -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base", default="tinycode")
    parser.add_argument("--draft", required=True, help="folder or hub name of the draft model")
    parser.add_argument("--prompts", type=Path, default=DATA / "prompts.jsonl")
    parser.add_argument("--calibration", type=Path, default=DATA / "calibration.jsonl")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), help="of prompts, the columns")
    parser.add_argument("--num-prompts", type=int, default=120, help="of all kinds, chosen or not")
    parser.add_argument("--num-calibration", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=8, help="longest draft")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--sampling", default="greedy", choices=("greedy", "coupled"))
    parser.add_argument("--repeats", type=int, default=3, help="clocked rounds; 0 clocks nothing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/tinycode_adaptive.json"))
    return parser.parse_args()


def main() -> None:
    """Record, judge, clock, print, write."""
    asked = options()
    device = torch.device("cpu")
    hardware.pin_threads(0)
    # float32: in coarser numbers a verify step's tokens may not be the recorded ones
    tokenizer = load_tokenizer(asked.base)
    base = load_base_model(asked.base, device=device, attn="auto")
    draft = load_draft(asked.draft, tokenizer=tokenizer, where="--draft", device=device)
    eos = end_tokens(base, tokenizer)
    context = context_length(base)
    longest = 1 << 30 if context is None else context - asked.max_new_tokens

    def read(path: Path, number: int) -> tuple[list[Prompt], str]:
        found, digest = read_prompts(path, tokenizer, number, max_length=longest, device=device)
        return [prompt for prompt in found if prompt.kind in asked.kinds], digest

    calibration, calibration_digest = read(asked.calibration, asked.num_calibration)
    prompts, digest = read(asked.prompts, asked.num_prompts)
    if not calibration or not prompts:
        raise SystemExit(f"no prompts of the kinds {', '.join(asked.kinds)}")

    def drafter(length: Length) -> DraftModelDrafter:
        return DraftModelDrafter(draft, length, sampling=asked.sampling)

    make: Callable[[int], DraftModelDrafter] = lambda num: drafter(FixedLength(num))  # noqa: E731
    text = max(calibration, key=lambda prompt: prompt.input_ids.shape[1]).input_ids
    measured = clock_drafts(
        base,
        {"draft": make},
        text,
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        max_new_tokens=min(48, asked.max_new_tokens),
        repeats=max(1, asked.repeats),
    )["draft"]
    costs = measured.by_nodes(asked.max_tokens)
    print(
        f"draft pass {costs.draft:.3f} plain steps, {measured.overhead:.3f} for drafting at all;"
        " verify step by its nodes, with that:"
    )
    print("  " + " ".join(f"{n}:{cost:.2f}" for n, cost in enumerate(costs.verify) if n))

    def recorded(of: Sequence[Prompt]) -> list[Recording]:
        return [
            record(
                base,
                drafter,
                prompt.input_ids,
                max_tokens=asked.max_tokens,
                max_new_tokens=asked.max_new_tokens,
                kind=prompt.kind,
                sampler=Sampler(temperature=asked.temperature, seed=asked.seed + index),
                eos_token_ids=eos,
            )
            for index, prompt in enumerate(of)
        ]

    known, texts = recorded(calibration), recorded(prompts)
    fixed: dict[str, Length] = {
        f"fixed {num}": FixedLength(num) for num in range(1, asked.max_tokens + 1)
    }
    others = rules(costs, asked.max_tokens, known)
    speedups = judged({**fixed, **others}, texts, costs)
    single = max(fixed, key=lambda name: speedups[name][MIX])
    clocked: dict[str, Any] = {}
    if asked.repeats:
        compared = {single: fixed[single], **others}
        methods = [plain_method(base, eos, asked.max_new_tokens)]
        methods += [
            drafted_method(
                name, base, drafter(length), eos, asked.max_new_tokens,
                tree_nodes=length.max_tokens + 1,
            )
            for name, length in compared.items()
        ]  # fmt: skip
        runs = clock(methods, prompts, asked.temperature, repeats=asked.repeats, seed=asked.seed)
        clocked = of_clock(runs, prompts)
    print("judged speed-up over plain decoding; *: the best fixed length, in hindsight")
    print("\n".join(table(speedups, list(fixed), clocked)))
    found = {name: verdicts(speedups, list(fixed), name) for name in others}
    for name, verdict in found.items():
        shown = ", ".join(f"{kind} {each - 1:+.1%}" for kind, each in verdict["relative"].items())
        print(f"{name}: {shown}{'' if verdict['kept'] else ' (not enough)'}")
    settings = {
        key: os.path.relpath(value) if isinstance(value, Path) else value
        for key, value in vars(asked).items()
        if key != "out"
    }
    settings |= {"prompts_sha256": digest, "calibration_sha256": calibration_digest}
    result = {
        "environment": environment(),
        "settings": settings,
        "costs": {"draft": costs.draft, "verify": list(costs.verify)},
        "judged": speedups,
        "clocked": clocked,
        "relative_to_best_fixed": found,
    }
    write_json(asked.out, result)
    print(f"wrote {asked.out}")


if __name__ == "__main__":
    main()
