"""A turn of a conversation in words: how it went, and how it compares with plain decoding."""

from __future__ import annotations

import torch

from specheads.decoding.conversation import Turn


def summary(turn: Turn) -> str:
    """Return one line about a turn; the first token is the prefill's, and no step's."""
    num_tokens, num_steps = len(turn.new_tokens), len(turn.accept_lengths)
    line = f"1 + {num_tokens - 1} tokens in {num_steps} steps: {turn.accept_length:.2f} per step, "
    line += f"{turn.tokens_per_second:.0f} tokens/s; read {turn.num_read} of"
    line += f" {len(turn.prompt)} prompt tokens"
    if turn.stopped:
        return line + "; stopped"
    if turn.context_full:
        return line + "; the context is full: /undo or /reset makes room"
    return line if turn.finished else line + f"; max_new_tokens={num_tokens} ended it"


def comparison(fast: Turn, plain: Turn, dtype: torch.dtype) -> str:
    """Return both speeds, and whether the tokens are the same.

    Args:
        fast: the turn as it was decoded.
        plain: the same, one token at a time; compared as far as it goes, if it was stopped.
        dtype: of the base model.
    """
    rows = [
        f"{name:<12}{turn.tokens_per_second:7.0f} tokens/s{turn.accept_length:7.2f} tokens per step"
        for name, turn in (("speculative", fast), ("plain", plain))
    ]
    if fast.tokens_per_second and plain.tokens_per_second:
        rows.append(f"{fast.tokens_per_second / plain.tokens_per_second:.2f}x the speed of plain")
    else:
        rows.append("too short to compare speeds")
    ours, theirs = fast.new_tokens, plain.new_tokens
    num = len(theirs) if plain.stopped else max(len(ours), len(theirs))
    pairs = enumerate(zip(ours, theirs, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    if same >= num:
        rows.append(f"all {num} tokens are equal")
    else:
        rows.append(f"the first {same} of {num} tokens are equal{_why_not_all(fast, dtype)}")
    return "\n".join(rows)


def _why_not_all(turn: Turn, dtype: torch.dtype) -> str:
    decode = turn.config.decode
    if decode.acceptance != "exact":
        return f": decode.acceptance={decode.acceptance} is not the base's distribution"
    if decode.draft_sampling == "sampled" and turn.config.temperature > 0:
        return ": decode.draft_sampling=sampled keeps the distribution, not the tokens of a seed"
    if dtype in (torch.float32, torch.float64):
        return ", which must not be: please report it"
    return f": in {turn.config.dtype} near-ties fall either way, see docs/decoding.md"
