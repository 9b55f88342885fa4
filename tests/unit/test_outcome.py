"""What a finished run shows is what was decoded, each text in its own column."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from specheads.measure.clock import Decoded, Prompt, Runs
from specheads.measure.evaluate import sample_texts


class Letters:
    """Token i is the i-th letter."""

    def decode(self, tokens: list[int]) -> str:
        """Return one letter per token."""
        return "".join(chr(97 + token) for token in tokens)


def runs(*texts: tuple[list[int], list[int]]) -> Runs:
    """Return runs that decoded these tokens with these accept lengths."""
    return Runs(decoded=[Decoded(tokens, lengths, ended=True) for tokens, lengths in texts])


@pytest.mark.parametrize("num_samples", [0, 1, 3, 4, 9])
def test_samples_are_told_apart(num_samples: int) -> None:
    """Columns swapped, or a text beside another prompt, look just as convincing in a table."""
    prompts = [Prompt(str(i), "k", torch.tensor([[i]])) for i in range(2)]
    found: dict[str, Any] = {
        "t0": {
            "plain": runs(([4, 5], [1]), ([6, 7], [1])),
            "tree": runs(([4, 5], [2]), ([6, 7], [1, 1])),
        },
        "t0.7": {
            "plain": runs(([8], [1]), ([9], [1])),
            "tree": runs(([10, 11, 12], [3]), ([13], [1])),
        },
    }
    tokenizer = cast(PreTrainedTokenizerBase, Letters())
    rows = sample_texts(prompts, found, "tree", tokenizer, num_samples)
    assert [tuple(row.values()) for row in rows] == [
        ("a", 0.0, "ef", "ef", [2], True),
        ("a", 0.7, "i", "klm", [3], False),
        ("b", 0.0, "gh", "gh", [1, 1], True),
        ("b", 0.7, "j", "n", [1], False),
    ][:num_samples]
