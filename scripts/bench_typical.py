"""Typical acceptance is lossy: how much faster, and how far from the base model's distribution.

Decodes the same prompts with plain decoding, the exact tree, and typical acceptance (Medusa,
arXiv:2401.10774, section 2.3.1) at several thresholds epsilon with delta = sqrt(epsilon), then lets
the base model read every text: what it finds typical is more likely than what it would draw. An
exact method gives texts whose mean log-likelihood is minus the base's entropy, as plain sampling's.

    python scripts/bench_typical.py --checkpoint runs/hydra/export
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import torch
from transformers import PreTrainedModel

from specheads.decoding.accept import Acceptance
from specheads.decoding.result import DecodedRow
from specheads.measure.bench import Contest
from specheads.measure.clock import Prompt, clock
from specheads.measure.rows import rep8
from specheads.models.checkpoint import load_export
from specheads.system import hardware

THRESHOLDS = (0.05, 0.09, 0.15)


@dataclass
class Settings:
    """What is decoded."""

    checkpoint: Path = Path("runs/hydra/export")
    out: Path = Path("benchmarks/tinycode_typical.json")
    num_prompts: int = 48
    max_new_tokens: int = 128
    repeats: int = 3
    temperature: float = 1.0


@torch.inference_mode()
def distance(
    base: PreTrainedModel,
    prompts: Sequence[Prompt],
    texts: Sequence[DecodedRow],
    temperature: float,
) -> dict[str, float]:
    """Return what the base thinks of the texts, at the temperature they were decoded at.

    ``nats``: mean -log p(token) at that temperature (of exact texts: the entropy, within noise);
    ``entropy``: the base's mean entropy along the texts; ``not_best``: share of tokens that are not
    the base's first choice.
    """
    nats = entropy = others = count = 0.0
    for prompt, text in zip(prompts, texts, strict=True):
        if not text.new_tokens:
            continue
        tokens = prompt.input_ids.new_tensor(text.new_tokens)
        ids = torch.cat([prompt.input_ids[0], tokens])[None]
        logits = base(input_ids=ids, use_cache=False).logits[0, -len(tokens) - 1 : -1].float()
        log_probs = (logits / temperature).log_softmax(-1)
        nats -= float(log_probs.gather(1, tokens[:, None]).sum())
        entropy -= float((log_probs.exp() * log_probs).sum())
        others += float((logits.argmax(-1) != tokens).sum())
        count += len(tokens)
    return {"nats": nats / count, "entropy": entropy / count, "not_best": others / count}


def main(argv: Sequence[str] | None = None) -> None:
    """Decode, score, print, write."""
    given = harness.parse(Settings, argv)
    hardware.pin_threads(0)
    limit = given.max_new_tokens
    export, prompts, digest = harness.open_export(given.checkpoint, given.num_prompts, limit)
    base, contest = export.base, Contest.of(export, limit)
    drafter, nodes = harness.tree_drafter(export), export.tree.num_nodes
    rules = {"exact": Acceptance()}
    for epsilon in THRESHOLDS:
        typical = Acceptance("lossy_typical", epsilon=epsilon, delta=math.sqrt(epsilon))
        rules[f"typical_{epsilon:g}"] = typical
    drafted = [contest.ours(name, drafter, nodes, rule=rule) for name, rule in rules.items()]
    methods = [contest.ours(), *drafted]
    runs = clock(methods, prompts, given.temperature, repeats=given.repeats)
    plain = runs["plain"]
    # not clocked beside them: a speed-up of greedy decoding would be of other texts
    greedy = clock(methods[:1], prompts, 0.0, repeats=1)["plain"]
    judge = load_export(given.checkpoint, dtype=torch.float32, device="cpu").base
    rows: list[dict[str, Any]] = []
    for name, of in [*runs.items(), ("greedy", greedy)]:
        tokens, of_plain = (sum(len(t.new_tokens) for t in r.decoded) for r in (of, plain))
        pairs = zip(of.seconds, plain.seconds, strict=True) if name in runs else ()
        ratios = [tokens / sum(ours) / (of_plain / sum(theirs)) for ours, theirs in pairs]
        length, bounds = harness.accepted(of.decoded)
        found = distance(judge, prompts, of.decoded, given.temperature)
        row = {"method": name, "speedup_vs_plain": ratios, "accept_length": length}
        row |= {"accept_length_ci95": bounds, **found}
        rows.append(row | {"rep8": statistics.fmean(rep8(t.new_tokens) for t in of.decoded)})
    about = {"checkpoint": given.checkpoint.name, "prompts_sha256": digest, "tree_nodes": nodes}
    dtype = str(base.dtype).removeprefix("torch.")
    harness.publish(given, rows, about | {"dtype": dtype})


if __name__ == "__main__":
    main()
