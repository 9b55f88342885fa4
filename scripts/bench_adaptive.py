"""Clock rules of draft length: fixed ones, and ``decode.draft_tokens=0``.

    python scripts/bench_adaptive.py --draft runs/distill/export

The same prompts are decoded with every rule in turn, greedily in float32. Figures are speed-ups
over plain decoding, by kind of prompt and over their mix; the best fixed length is known in
hindsight only.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness

from specheads.config import DecodeConfig
from specheads.decoding.exported import choose_drafter, load_subject
from specheads.drafters.contract import Drafter
from specheads.drafters.draft_model import DraftModelDrafter
from specheads.drafters.length import FixedLength
from specheads.measure.bench import Contest
from specheads.measure.clock import Prompt, Runs, clock, prompts_of
from specheads.measure.rows import ratio_ci95
from specheads.models.draft import load_draft
from specheads.system import hardware
from specheads.system.files import tinycode_dir

MIX = "mix"
ADAPTIVE = "adaptive, unmeasured"  # what decode.draft_tokens=0 does


@dataclass
class Settings:
    """What is decoded.

    Attributes:
        draft: folder or hub name of the draft model
        kinds: of prompts, the columns
        num_prompts: of all kinds, chosen or not
        lengths: the fixed ones
        repeats: clocked rounds
    """

    draft: str
    base: str = "tinycode"
    kinds: tuple[str, ...] = ("body", "next", "rename", "type_hint")
    num_prompts: int = 120
    lengths: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    max_new_tokens: int = 128
    repeats: int = 3
    out: Path = Path("benchmarks/tinycode_adaptive.json")


def of_clock(runs: Mapping[str, Runs], prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return speed-ups over plain decoding by rule: per kind, in the mix, its interval."""

    def seconds(name: str) -> list[float]:
        # per prompt the median over repeats, which an interrupted moment does not move
        return list(map(statistics.median, zip(*runs[name].seconds, strict=True)))

    theirs, found = seconds("plain"), {}
    for name in [each for each in runs if each != "plain"]:
        ours = seconds(name)
        speedup = {}
        for kind in [*dict.fromkeys(prompt.kind for prompt in prompts), MIX]:
            rows = [i for i, prompt in enumerate(prompts) if kind in (prompt.kind, MIX)]
            speedup[kind] = sum(theirs[i] for i in rows) / sum(ours[i] for i in rows)
        texts = zip(runs[name].decoded, runs["plain"].decoded, strict=True)
        found[name] = {
            "speedup": speedup,
            "ci95": ratio_ci95([theirs], [ours]),
            "identical": sum(own.new_tokens == plain.new_tokens for own, plain in texts),
        }
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Clock, print, write."""
    given = harness.parse(Settings, argv)
    hardware.pin_threads(0)
    limit, longest = given.max_new_tokens, max(given.lengths)
    subject = load_subject(given.base, dtype="float32", device="cpu")
    draft = load_draft(given.draft, tokenizer=subject.tokenizer, where="--draft", device="cpu")

    def read(name: str, number: int) -> list[Prompt]:
        path = tinycode_dir() / name
        found, _ = prompts_of(subject.base, subject.tokenizer, path, number, limit)
        return [prompt for prompt in found if prompt.kind in given.kinds]

    def clocked(rules: Mapping[str, Drafter], prompts: list[Prompt], repeats: int) -> Any:
        contest = Contest.of(subject, limit)
        drafted = [contest.ours(name, drafter, longest + 1) for name, drafter in rules.items()]
        methods = [contest.ours(), *drafted]
        return of_clock(clock(methods, prompts, 0.0, repeats=repeats), prompts)

    prompts = read("prompts.jsonl", given.num_prompts)
    if not prompts:
        raise SystemExit(f"no prompts of the kinds {', '.join(given.kinds)}")
    adaptive = DecodeConfig(drafter="draft", draft=given.draft, draft_tokens=0)
    rules = {f"fixed {n}": DraftModelDrafter(draft, FixedLength(n)) for n in given.lengths}
    rules |= {ADAPTIVE: choose_drafter(subject, adaptive, draft=draft).drafter}
    found = clocked(rules, prompts, given.repeats)
    print(harness.describe(found))
    harness.write(given.out, harness.report(given, clocked=found))


if __name__ == "__main__":
    main()
