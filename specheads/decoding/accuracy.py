"""How often every head's guesses were right along the texts of a bench, and its tree's nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.grow import acceptance
from specheads.decoding.hits import NUM_RANKS, Hits, measure_hits
from specheads.decoding.measure import Decoded, Prompt, Runs
from specheads.models.checkpoint import Export
from specheads.models.kinds import Heads
from specheads.models.output import OutputLayer, output_layer
from specheads.tree import Tree


def accuracy_of(
    exports: Mapping[str, Export],
    prompts: Sequence[Prompt],
    clocked: Mapping[tuple[float, int], Mapping[str, Runs]],
) -> dict[str, list[dict[str, Any]]]:
    """Return :func:`measure_accuracy` of each export's heads, by the name of the export.

    Args:
        exports: heads on one base model.
        prompts: what was continued.
        clocked: by temperature and batch size, then by the method's name; plain decoding's texts of
            batch 1 are looked at.
    """
    texts = {
        temperature: runs["plain"].decoded
        for (temperature, size), runs in clocked.items()
        if size == 1
    }
    return {
        name: measure_accuracy(
            each.base, each.heads, output_layer(each.base), each.tree, prompts, texts
        )
        for name, each in exports.items()
    }


def measure_accuracy(
    base: PreTrainedModel,
    heads: Heads,
    output: OutputLayer,
    tree: Tree,
    prompts: Sequence[Prompt],
    texts: Mapping[float, Sequence[Decoded]],
) -> list[dict[str, Any]]:
    """Ask the heads at every position of texts that are there already; nothing is decoded again.

    Args:
        base: base model.
        heads: on it.
        output: its output layer.
        tree: whose nodes are to be counted.
        prompts: what was continued.
        texts: per temperature what plain decoding made of the prompts.

    Returns:
        Per temperature ``temperature``; ``heads``, for each head ``num_positions`` and ``top``,
        the share of them at which the token that came was among its first 1, 2, ... guesses;
        ``choices`` of the tree, and ``acceptance``, the share of its steps that accept each.
        Texts that are too short to ask a head about leave ``top`` empty.
    """
    found = []
    for temperature, decoded in texts.items():
        hits: list[list[Hits]] = []
        ranks: list[Tensor] = []
        counted: list[Tensor] = []
        for prompt, text in zip(prompts, decoded, strict=True):
            new = prompt.input_ids.new_tensor([text.tokens])
            sequence = torch.cat([prompt.input_ids, new], dim=1)
            asked = measure_hits(
                base, heads, output, sequence, prompt.input_ids.shape[1], ended=text.ended
            )
            hits.append([asked])
            ranks.append(asked.ranks)
            counted.append(came_after(len(asked.ranks), heads.num_heads, len(text.tokens)))
        found.append(
            {
                "temperature": temperature,
                "heads": top_shares(torch.cat(ranks), torch.cat(counted)),
                "choices": [list(choice) for choice in tree.choices],
                "acceptance": [round(share, 4) for share in acceptance(tree, hits)],
            }
        )
    return found


def came_after(num_positions: int, num_heads: int, num_new: int) -> Tensor:
    """Return whether a token came where head k guesses from position s, [S, K]; a text has an end.

    Args:
        num_positions: S, each the root of a step.
        num_heads: K; head k guesses the token ``k + 1`` after the root.
        num_new: tokens of the text.
    """
    places = torch.arange(num_positions)[:, None] + torch.arange(1, num_heads + 1)
    return places < num_new


def top_shares(ranks: Tensor, counted: Tensor) -> list[dict[str, Any]]:
    """Return per head at how many positions its first 1, 2, ... guesses held the right token.

    Args:
        ranks: [S, K], which guess was right; larger than any number of guesses where none was.
        counted: [S, K] bool, where there was a token to be guessed.
    """
    shares = []
    for head in range(ranks.shape[1]):
        of_head = ranks[counted[:, head], head]
        top = [
            round(float((of_head < k).float().mean()), 4)
            for k in range(1, NUM_RANKS + 1)
            if len(of_head)
        ]
        shares.append({"head": head, "num_positions": len(of_head), "top": top})
    return shares
