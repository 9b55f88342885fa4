"""Clock fixed sizes of what is drafted beside those that follow the text.

    python scripts/bench_adaptive.py --draft runs/distill/export
    python scripts/bench_adaptive.py --checkpoint runs/hydra/export --out build/sizes.json

With a draft model the sizes are lengths of drafts, and ``decode.draft_tokens=0`` follows the text;
with an export of heads they are numbers of nodes of ``heads+suffix``, and ``decode.num_nodes=0``
does. The same prompts are decoded with every size in turn, greedily and sampled. Figures are
speed-ups over plain decoding in batches of as many, by kind of prompt and over their mix; the best
fixed size is known in hindsight only.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import harness

from specheads.config import DecodeConfig
from specheads.decoding.exported import Subject, choose_drafter, load_subject
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
ADAPTIVE = "adaptive"  # what decode.draft_tokens=0 or decode.num_nodes=0 does


@dataclass
class Settings:
    """What is decoded.

    Attributes:
        draft: folder or hub name of the draft model
        checkpoint: an export of heads, in place of a draft model
        base: of the draft model
        dtype: of the weights
        prompts: JSONL with the prompts; empty: those embedded beside tinycode
        kinds: of prompts, the columns
        num_prompts: of all kinds, chosen or not
        lengths: the fixed ones of drafts
        sizes: the fixed ones of trees
        batches: prompts decoded together
        temperatures: of the sampling
        repeats: clocked rounds
    """

    draft: str = ""
    checkpoint: str = ""
    base: str = "tinycode"
    dtype: str = "float32"
    prompts: str = ""
    kinds: tuple[str, ...] = ("body", "next", "rename", "type_hint")
    num_prompts: int = 120
    lengths: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    sizes: tuple[int, ...] = (4, 8, 12, 16, 24, 32)
    batches: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    max_new_tokens: int = 128
    repeats: int = 3
    out: Path = Path("benchmarks/tinycode_adaptive.json")


def of_clock(runs: Mapping[str, Runs], prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return speed-ups over plain decoding by rule: per kind, in the mix, its interval.

    Batches hold prompts of several kinds, so that they have speed-ups in the mix alone.
    """

    def seconds(name: str) -> list[float]:
        # per batch the median over repeats, which an interrupted moment does not move
        return list(map(statistics.median, zip(*runs[name].seconds, strict=True)))

    theirs, found = seconds("plain"), {}
    kinds = [prompt.kind for prompt in prompts] if len(theirs) == len(prompts) else []
    for name in [each for each in runs if each != "plain"]:
        ours = seconds(name)
        speedup = {MIX: sum(theirs) / sum(ours)}
        for kind in dict.fromkeys(kinds):
            rows = [i for i, each in enumerate(kinds) if each == kind]
            speedup[kind] = sum(theirs[i] for i in rows) / sum(ours[i] for i in rows)
        texts = zip(runs[name].decoded, runs["plain"].decoded, strict=True)
        found[name] = {
            "speedup": speedup,
            "ci95": ratio_ci95([theirs], [ours]),
            "identical": sum(own.new_tokens == plain.new_tokens for own, plain in texts),
        }
    return found


def rules_of(given: Settings, subject: Subject) -> dict[str, tuple[Drafter, int]]:
    """Return by name what drafts, and how many nodes it verifies at most."""
    if given.checkpoint:
        name = {"drafter": "heads+suffix"}
        sizes: Mapping[str, Any] = {f"fixed {n}": name | {"num_nodes": n} for n in given.sizes}
        settings = {**sizes, ADAPTIVE: name}
        chosen = {key: choose_drafter(subject, DecodeConfig(**s)) for key, s in settings.items()}
        return {key: (each.drafter, each.num_nodes) for key, each in chosen.items()}
    draft = load_draft(given.draft, tokenizer=subject.tokenizer, where="--draft", device="cpu")
    lengths = {f"fixed {n}": FixedLength(n) for n in given.lengths}
    found: dict[str, Drafter] = {key: DraftModelDrafter(draft, n) for key, n in lengths.items()}
    adaptive = DecodeConfig(drafter="draft", draft=given.draft, draft_tokens=0)
    found[ADAPTIVE] = choose_drafter(subject, adaptive, draft=draft).drafter
    return {key: (drafter, max(given.lengths) + 1) for key, drafter in found.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Clock, print, write."""
    given = harness.parse(Settings, argv)
    if bool(given.draft) == bool(given.checkpoint):
        raise SystemExit("give either --draft or --checkpoint")
    hardware.pin_threads(0)
    model = given.checkpoint or given.base
    subject = load_subject(model, dtype=given.dtype, device="cpu")
    path = Path(given.prompts) if given.prompts else tinycode_dir() / "prompts.jsonl"
    limit = given.max_new_tokens
    read, _ = prompts_of(subject.base, subject.tokenizer, path, given.num_prompts, limit)
    prompts = [prompt for prompt in read if prompt.kind in given.kinds]
    if not prompts:
        raise SystemExit(f"no prompts of the kinds {', '.join(given.kinds)}")
    contest, rules = Contest.of(subject, limit), rules_of(given, subject)
    methods = [contest.ours(), *(contest.ours(name, *each) for name, each in rules.items())]
    found = {}
    for heat, size in product(given.temperatures, given.batches):
        runs = clock(methods, prompts, heat, batch_size=size, repeats=given.repeats)
        found[f"T={heat:g}, batch {size}"] = of_clock(runs, prompts)
    print(harness.describe(found))
    harness.write(given.out, harness.report(given, clocked=found))


if __name__ == "__main__":
    main()
