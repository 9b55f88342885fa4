"""Lossy rules: how much faster, and how far from the base model's distribution.

Decodes the same prompts with plain decoding, by the exact rule, and by every lossy rule at several
bounds, then lets the base model read every text: a rule that likes what is likely anyway writes
texts that are more likely than what the base would draw. An exact method gives texts whose mean
log-likelihood is minus the base's entropy, as plain sampling's.

    python scripts/bench_lossy.py --checkpoint data/checkpoints/smollm2
    python scripts/bench_lossy.py --checkpoint data/checkpoints/hydra --drafter draft
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

from specheads.config import DecodeConfig
from specheads.decoding.accept import Acceptance
from specheads.decoding.exported import Subject, choose_drafter
from specheads.decoding.result import DecodedRow, mean_divergence
from specheads.measure.bench import Contest
from specheads.measure.clock import Prompt, clock
from specheads.measure.quality import agreement
from specheads.measure.rows import rep8
from specheads.models.checkpoint import load_export
from specheads.system import hardware

RULES = {
    "exact": Acceptance(),
    **{f"kl {bound:g}": Acceptance("lossy_kl", bound=bound) for bound in (0.01, 0.05, 0.2)},
    **{f"tv {bound:g}": Acceptance("lossy_tv", bound=bound) for bound in (0.03, 0.1, 0.3)},
    **{f"lenience {of:g}": Acceptance("lossy_lenient", lenience=of) for of in (0.7, 0.4)},
    **{
        f"typical {epsilon:g}": Acceptance(
            "lossy_typical", epsilon=epsilon, delta=math.sqrt(epsilon)
        )
        for epsilon in (0.05, 0.09, 0.15)
    },
}


@dataclass
class Settings:
    """What is decoded.

    Attributes:
        checkpoint: an export
        drafter: of decode.drafter's names
        draft: folder of the draft model, where the drafter is one
        draft_sampling: how it guesses
        num_prompts: that none of the drafters was trained on
        max_new_tokens: of each text
        repeats: clocked rounds
        temperature: of the sampling
        dtype: of the weights
        out: write the JSON there
    """

    checkpoint: str = "data/checkpoints/hydra"
    drafter: str = "heads"
    draft: str = ""
    draft_sampling: str = "sampled"
    num_prompts: int = 48
    max_new_tokens: int = 128
    repeats: int = 3
    temperature: float = 1.0
    dtype: str = "auto"
    out: Path = Path("benchmarks/lossy/tinycode_heads.json")


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
    export, prompts, digest = harness.open_export(
        given.checkpoint, given.num_prompts, limit, dtype=given.dtype
    )
    base, contest = export.base, Contest.of(export, limit)
    decode = DecodeConfig(
        drafter=given.drafter, draft=given.draft, draft_sampling=given.draft_sampling
    )
    chosen = choose_drafter(Subject(base, export.tokenizer, export), decode)
    methods = [contest.ours()]
    for name, rule in RULES.items():
        methods.append(contest.ours(name, chosen.drafter, chosen.num_nodes, rule=rule))
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
        row |= {"accept_length_ci95": bounds, **found, **mean_divergence(of.decoded)}
        texts = ([text.new_tokens for text in r.decoded] for r in (of, plain))
        row["common_prefix"] = agreement(*texts)["common_prefix"]
        rows.append(row | {"rep8": statistics.fmean(rep8(t.new_tokens) for t in of.decoded)})
    about = {"prompts_sha256": digest, "tree_nodes": chosen.num_nodes}
    about["dtype"] = str(base.dtype).removeprefix("torch.")
    harness.publish(given, rows, about)


if __name__ == "__main__":
    main()
