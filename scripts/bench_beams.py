"""Beam search with drafted trees beside transformers' own: equal beams, passes, time.

    python scripts/bench_beams.py --checkpoint data/checkpoints/smollm2
    python scripts/bench_beams.py --drafters plain heads draft suffix

Every prompt is continued by transformers' ``generate(num_beams=W)`` and by ours with each drafter,
one after the other, in another order for every prompt. Ratios are of the time for one prompt, their
median and quartiles over the prompts. Where texts differ, the scores say if the other beams are as
good: the largest difference of scores stands beside.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import torch
from harness import spread

from specheads.config import DecodeConfig
from specheads.decoding.exported import Subject, choose_drafter
from specheads.decoding.generate import SpecDecoder
from specheads.measure.clock import Prompt
from specheads.models.base import end_tokens
from specheads.system import hardware

THEIRS = "transformers"


@dataclass
class Settings:
    """What is searched.

    Attributes:
        checkpoint: an export
        drafters: of the settings of decode.drafter; plain: no guesses
        draft: folder of the draft model of "draft"
        beams: numbers of beams
        num_prompts: that none of the drafters was trained on
        max_new_tokens: of each text
        dtype: of the weights
        out: write the JSON there
    """

    checkpoint: str = "data/checkpoints/hydra"
    drafters: tuple[str, ...] = ("plain", "heads", "suffix")
    draft: str = "data/checkpoints/draft"
    beams: tuple[int, ...] = (2, 4, 8)
    num_prompts: int = 12
    max_new_tokens: int = 48
    dtype: str = "float32"
    out: Path | None = None


def search(
    decoder: SpecDecoder, prompt: Prompt, options: dict[str, Any], *, theirs: bool
) -> dict[str, Any]:
    """Search from a prompt, with transformers' own ``generate`` or ours."""
    start = time.perf_counter()
    if theirs:
        how = {**options, "return_dict_in_generate": True, "output_scores": True}
        found: Any = decoder.base.generate(prompt.input_ids, **how)  # type: ignore[operator]
        passes = len(found.scores) - 1
    else:
        found = decoder.generate(prompt.input_ids, temperature=0, **options)
        passes = found.num_steps
    seconds = time.perf_counter() - start
    text = found.sequences[0, prompt.input_ids.shape[1] :].tolist()
    return {"seconds": seconds, "passes": passes, "text": text, "scores": found.sequences_scores}


def main(argv: Sequence[str] | None = None) -> None:
    """Search, print, write."""
    given = harness.parse(Settings, argv)
    hardware.pin_threads(0)
    limit = given.max_new_tokens
    export, prompts, digest = harness.open_export(
        given.checkpoint, given.num_prompts, limit, dtype=given.dtype
    )
    subject = Subject(export.base, export.tokenizer, export)
    decoders = {THEIRS: SpecDecoder(export.base, None)}
    for name in given.drafters:
        drafter = None
        if name != "plain":
            draft = given.draft if "draft" in name else ""
            drafter = choose_drafter(subject, DecodeConfig(drafter=name, draft=draft)).drafter
        decoders[name] = SpecDecoder(export.base, drafter)
    eos, pad = end_tokens(export.base, export.tokenizer), export.tokenizer.pad_token_id
    rows = []
    for width in given.beams:
        options: dict[str, Any] = {"num_beams": width, "num_return_sequences": width}
        options |= {"max_new_tokens": limit, "do_sample": False, "eos_token_id": list(eos) or None}
        options["pad_token_id"] = pad if pad is not None else next(iter(eos), 0)
        ways = list(decoders)
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
        for name in ways:  # not clocked
            search(decoders[name], prompts[0], options, theirs=name == THEIRS)
        for prompt in prompts:
            ways = [*ways[1:], ways[0]]
            for name in ways:
                runs[name].append(search(decoders[name], prompt, options, theirs=name == THEIRS))
        for name, found in runs.items():
            pairs = list(zip(found, runs[THEIRS], strict=True))
            differences = [float((a["scores"] - b["scores"]).abs().max()) for a, b in pairs]
            row = {
                "beams": width,
                "method": name,
                "speedup": spread([b["seconds"] / a["seconds"] for a, b in pairs]),
                "passes": sum(a["passes"] for a, _ in pairs) / sum(b["passes"] for _, b in pairs),
                "equal": sum(a["text"] == b["text"] for a, b in pairs),
                "compared": len(pairs),
                "score_difference": max(differences),
            }
            print(row, flush=True)
            rows.append(row)
    harness.write(given.out, harness.report(given, rows=rows, prompts_sha256=digest))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
