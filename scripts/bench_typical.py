"""Typical acceptance is lossy: how much faster, and how far from the base model's distribution.

Decodes the same prompts with plain decoding, the exact tree, and typical acceptance (Medusa,
arXiv:2401.10774, section 2.3.1) at several thresholds epsilon with delta = sqrt(epsilon), then lets
the base model read every text: what it finds typical is more likely than what it would draw. An
exact method gives texts whose mean log-likelihood is minus the base's entropy, as plain sampling's.

    python scripts/bench_typical.py --checkpoint runs/hydra/export
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from specheads.decoding.accept import Acceptance
from specheads.drafters.heads import static_drafter
from specheads.measure.clock import (
    Decoded,
    Prompt,
    clock,
    drafted_method,
    max_prompt_length,
    plain_method,
    prompt_file,
    read_prompts,
)
from specheads.measure.rows import rep8
from specheads.measure.stats import ratio_ci95
from specheads.models.base import end_tokens
from specheads.models.checkpoint import load_export
from specheads.models.manifest import write_json
from specheads.models.output import output_layer
from specheads.system import hardware
from specheads.system.hardware import environment

THRESHOLDS = (0.05, 0.09, 0.15)
MAX_NEW_TOKENS = 128


@torch.inference_mode()
def distance(
    base: PreTrainedModel, prompts: Sequence[Prompt], texts: Sequence[Decoded], temperature: float
) -> dict[str, float]:
    """Return what the base thinks of the texts, at the temperature they were decoded at.

    ``nats``: mean -log p(token) at that temperature (of exact texts: the entropy, within noise);
    ``entropy``: the base's mean entropy along the texts; ``not_best``: share of tokens that are not
    the base's first choice.
    """
    nats = entropy = others = count = 0.0
    for prompt, text in zip(prompts, texts, strict=True):
        if not text.tokens:
            continue
        tokens = prompt.input_ids.new_tensor(text.tokens)
        ids = torch.cat([prompt.input_ids[0], tokens])[None]
        logits = base(input_ids=ids, use_cache=False).logits[0, -len(tokens) - 1 : -1].float()
        log_probs = (logits / temperature).log_softmax(-1)
        nats -= float(log_probs.gather(1, tokens[:, None]).sum())
        entropy -= float((log_probs.exp() * log_probs).sum())
        others += float((logits.argmax(-1) != tokens).sum())
        count += len(tokens)
    return {"nats": nats / count, "entropy": entropy / count, "not_best": others / count}


def main() -> None:
    """Decode, score, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/hydra/export"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/tinycode_typical.json"))
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args()
    device, temperature = torch.device("cpu"), options.temperature
    hardware.pin_threads(0)
    dtype = hardware.pick_dtype("auto", device)
    export = load_export(options.checkpoint, dtype=dtype, device=device)
    prompts, digest = read_prompts(
        prompt_file("", str(options.checkpoint), "prompts.jsonl"),
        export.tokenizer,
        options.num_prompts,
        max_length=max_prompt_length(export.base, MAX_NEW_TOKENS),
        device=device,
    )
    eos = end_tokens(export.base, export.tokenizer)
    drafter = static_drafter(export.base, export.heads, output_layer(export.base), export.tree)
    rules = {"exact": Acceptance()} | {
        f"typical_{epsilon:g}": Acceptance(
            "lossy_typical", epsilon=epsilon, delta=math.sqrt(epsilon)
        )
        for epsilon in THRESHOLDS
    }
    methods = [plain_method(export.base, eos, MAX_NEW_TOKENS)]
    methods += [
        drafted_method(
            name, export.base, drafter, eos, MAX_NEW_TOKENS,
            tree_nodes=export.tree.num_nodes, acceptance=rule,
        )
        for name, rule in rules.items()
    ]  # fmt: skip
    runs = clock(methods, prompts, temperature, repeats=options.repeats)
    greedy = clock(methods[:1], prompts, 0.0, repeats=1)["plain"]
    judge = load_export(options.checkpoint, dtype=torch.float32, device=device).base
    plain = runs["plain"]
    rows: list[dict[str, Any]] = []
    for name, of in [*runs.items(), ("greedy", greedy)]:
        tokens = [float(len(text.tokens)) for text in of.decoded]
        gained = [float(sum(text.accept_lengths)) for text in of.decoded]
        steps = [float(len(text.accept_lengths)) for text in of.decoded]
        speedups: list[float] = []
        if name in runs:  # greedy decoding was not clocked beside them
            of_plain = sum(len(text.tokens) for text in plain.decoded)
            speedups = [
                sum(tokens) / sum(ours) / (of_plain / sum(theirs))
                for ours, theirs in zip(of.seconds, plain.seconds, strict=True)
            ]
        rows.append(
            {
                "method": name,
                "speedup_vs_plain": [round(speedup, 4) for speedup in speedups],
                "accept_length": round(sum(gained) / sum(steps), 4),
                "accept_length_ci95": [round(b, 4) for b in ratio_ci95([gained], [steps])],
                "rep8": round(sum(rep8(t.tokens) for t in of.decoded) / len(of.decoded), 4),
                **{
                    key: round(value, 4)
                    for key, value in distance(judge, prompts, of.decoded, temperature).items()
                },
            }
        )
    print(f"{'method':<14}{'speed-up':>9}{'accept':>8}{'nats':>8}{'entropy':>9}{'not best':>10}")
    for row in rows:
        ratios = sorted(row["speedup_vs_plain"])
        speed = f"{ratios[len(ratios) // 2]:.2f}x" if ratios else ""
        print(
            f"{row['method']:<14}{speed:>9}{row['accept_length']:>8.2f}{row['nats']:>8.3f}"
            f"{row['entropy']:>9.3f}{row['not_best']:>10.1%}  rep8 {row['rep8']:.2f}"
        )
    settings = {
        "checkpoint": options.checkpoint.name,
        "temperature": temperature,
        "num_prompts": len(prompts),
        "prompts_sha256": digest,
        "max_new_tokens": MAX_NEW_TOKENS,
        "tree_nodes": export.tree.num_nodes,
        "dtype": str(dtype).removeprefix("torch."),
        "repeats": options.repeats,
    }
    write_json(options.out, {"environment": environment(), "settings": settings, "rows": rows})
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
