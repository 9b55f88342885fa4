"""What quality found, as lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def format_quality(result: Mapping[str, Any]) -> str:
    """Return the table.

    Args:
        result: the content of quality.json.
    """
    lines = []
    if (read := result["heldout"]) is not None:
        lines += _heldout(read)
    if (texts := result["texts"]) is not None:
        lines.append(
            f"greedy texts of both: {texts['identical']} of {texts['compared']} identical;"
            f" {_with_interval(texts, 'common_prefix', '.1f')} tokens alike before the first"
            f" difference, of {texts['length']:.1f}"
        )
    if result["original"] is None:
        lines.append(result["why_no_original"])
    if (lossy := result["lossy"]) is not None:
        lines += _lossy(lossy, result["rule"])
    return "\n".join(lines)


def _heldout(read: Mapping[str, Any]) -> list[str]:
    lines = [
        f"held-out answers: {read['num_records']} records, {read['num_tokens']:,} tokens",
        f"  perplexity            {_with_interval(read, 'perplexity', '.4f')}",
    ]
    if "kl" not in read:
        return lines
    worse = read["loss_difference"] / read["original_loss"] if read["original_loss"] else 0.0
    return [
        *lines,
        f"  of the original       {_with_interval(read, 'original_perplexity', '.4f')}",
        f"  loss less original's  {_with_interval(read, 'loss_difference', '+.4f')} nats per token,"
        f" {worse:+.1%} of the original's",
        f"  KL(original || this)  {_with_interval(read, 'kl', '.4f')} nats per token",
        f"  same best token       {_with_interval(read, 'same_best', '.4f')} of the tokens",
    ]


def _lossy(found: Mapping[str, Any], rule: str) -> list[str]:
    lines = [
        f"{rule} at T={found['temperature']:g}, {found['compared']} texts, judged by the base:",
        f"  {'':8}{'perplexity':>12}{'95%':>18}{'rep8':>7}{'accept':>8}{'ended':>7}",
    ]
    for name in ("exact", "lossy"):
        of = found[name]
        low, high = of["perplexity_ci95"]
        lines.append(
            f"  {name:8}{of['perplexity']:>12.4f}{f'{low:.4f}-{high:.4f}':>18}{of['rep8']:>7.2f}"
            f"{of['accept_length']:>8.2f}{of['ended']:>7.0%}"
        )
    difference = _with_interval(found, "loss_difference", "+.4f")
    return [
        *lines,
        f"  loss less that of exact texts {difference} nats per token; below 0 the rule writes what"
        " is likelier, not better",
        f"  {found['identical']} of {found['compared']} texts identical;"
        f" {_with_interval(found, 'common_prefix', '.1f')} tokens alike before the first"
        f" difference, of {found['length']:.1f}",
    ]


def _with_interval(found: Mapping[str, Any], key: str, form: str) -> str:
    low, high = found[f"{key}_ci95"]
    return f"{found[key]:{form}} (95%: {low:{form}} to {high:{form}})"
