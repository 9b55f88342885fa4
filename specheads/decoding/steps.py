"""The raw records behind a bench's figures: every text of every method, step by step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specheads.decoding.measure import Prompt, Runs


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
