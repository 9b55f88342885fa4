"""Count what trees would have gained along texts whose hits are known; all sizes at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.grow import grow_nodes, static_sizes
from specheads.decoding.hits import MISS, ROWS, TEMPERATURES, Hits, pad_left
from specheads.decoding.loop import decode
from specheads.decoding.stats import ratio_ci95
from specheads.drafters.contract import Drafter
from specheads.drafters.dynamic import best_trees
from specheads.drafters.grown import DynamicSequentialDrafter
from specheads.drafters.made import DynamicDrafter
from specheads.models.mtp_steps import MtpSteps, MtpWalk
from specheads.models.mtp_texts import MtpTexts
from specheads.models.stepwise import Walk
from specheads.sampling import Sampler
from specheads.tree import Choice, Tree

_FOLDS = 5
_CHUNK = 1024  # positions whose trees are grown at once
_NUMBERS = 1 << 22  # logits in memory where sequential heads are asked
_COPIED = 1 << 26  # numbers of hidden states of the texts that MTP heads read side by side


def replay(tree: Tree, ranks: Tensor, *, ended: bool) -> Iterator[int]:
    """Yield the tokens gained by each verify step of ``tree`` along one text.

    The obvious way, for one tree; :func:`gained` gives the sums for many sizes at once.

    Args:
        tree: shape of the guesses.
        ranks: of this text, [S, K].
        ended: whether the text ends after these positions, so that no step gains a token beyond.
    """
    choices: Collection[Choice] = set(tree.choices)
    rows = ranks.tolist()
    root = 0
    while root < len(rows):
        num_accepted = 0
        while tuple(rows[root][: num_accepted + 1]) in choices:
            num_accepted += 1
            if num_accepted == ranks.shape[1]:
                break
        yield min(num_accepted + 1, len(rows) - root) if ended else num_accepted + 1
        root += num_accepted + 1


def dynamic_sizes(hits: Hits, max_nodes: int, temperatures: Sequence[float]) -> Tensor:
    """Return how large a tree grown at each position must be to hold the path that came.

    A tree of fewer nodes holds the most probable of those of the largest, so one growth at every
    position tells all sizes.

    Args:
        hits: of one text.
        max_nodes: of the largest tree.
        temperatures: one per head, among ``TEMPERATURES``.

    Returns:
        [S, K] long, as :func:`static_sizes`.
    """
    sizes = torch.full_like(hits.ranks, MISS)
    which = torch.tensor([TEMPERATURES.index(each) for each in temperatures])
    norms = hits.norms.gather(2, which[None, :, None].expand(len(sizes), -1, 1))
    log_probs = (hits.logits / torch.tensor(temperatures)[:, None] - norms).clamp(max=0)
    for chunk in torch.arange(len(sizes)).split(_CHUNK):
        sizes[chunk] = _sizes_of(log_probs[chunk].transpose(0, 1), hits.ranks[chunk], max_nodes)
    return sizes


def _sizes_of(log_probs: Tensor, ranks: Tensor, max_nodes: int) -> Tensor:
    num_heads, num_rows, num_ranks = log_probs.shape
    parents, slots = best_trees(log_probs, max_nodes)
    own = log_probs.transpose(0, 1).flatten(1).gather(1, slots)  # [S, N - 1], each node's
    own = torch.cat([own.new_zeros(num_rows, 1), own], dim=1)
    values = own
    for _ in range(num_heads - 1):  # added up from the root down, as best_trees does
        values = own + values.gather(1, parents.clamp(min=0))
    # a node's place in the order of values: the size of the tree in which it comes last
    places = values.argsort(dim=1, descending=True, stable=True).argsort(dim=1) + 1
    slots = torch.cat([slots.new_full((num_rows, 1), -1), slots], dim=1)
    node = torch.zeros(num_rows, 1, dtype=torch.long)
    found = torch.full_like(ranks, MISS)
    alive = torch.ones(num_rows, dtype=torch.bool)
    for d in range(num_heads):
        here = (parents == node) & (slots == d * num_ranks + ranks[:, d, None])
        alive = alive & here.any(1) & (ranks[:, d] != MISS)
        node = torch.where(alive[:, None], here.int().argmax(1, keepdim=True), node)
        found[:, d] = torch.where(alive, places.gather(1, node)[:, 0], MISS)
    return found


def grown_sizes(hits: Hits, drafter: DynamicSequentialDrafter) -> Tensor:
    """Return what :func:`dynamic_sizes` does, for sequential heads.

    Which nodes a tree holds beside the path that came depends on what the heads say below tokens
    that did not come, and that no text tells. So the largest tree is really grown at every
    position; a smaller one holds the most probable of its nodes.

    Args:
        hits: of one text.
        drafter: of the largest tree.

    Returns:
        [S, K] long, as :func:`static_sizes`.
    """
    assert hits.tokens is not None
    found = torch.full_like(hits.ranks, MISS)
    for chunk, walk in _walks(hits, drafter):
        tokens = hits.tokens[chunk]
        grown = drafter.grow(walk)
        parents, guesses, values = (
            each.cpu() for each in (grown.parents, grown.tokens, grown.values)
        )
        places = values.argsort(dim=1, descending=True, stable=True).argsort(dim=1) + 1
        node = torch.zeros(len(chunk), 1, dtype=torch.long)
        alive = torch.ones(len(chunk), dtype=torch.bool)
        for d in range(drafter.max_depth):
            here = (parents == node) & (guesses == tokens[:, d + 1, None])
            alive = alive & here.any(1)
            node = torch.where(alive[:, None], here.int().argmax(1, keepdim=True), node)
            found[chunk, d] = torch.where(alive, places.gather(1, node)[:, 0], MISS)
    return found


def _walks(
    hits: Hits, drafter: DynamicSequentialDrafter
) -> Iterator[tuple[Tensor, Walk | MtpWalk]]:
    """Yield some positions [n] of a text, and the heads at the roots that stand there, n rows."""
    if not len(hits.ranks):
        return
    assert hits.hidden is not None and hits.tokens is not None
    steps = drafter.steps()
    device = next(drafter.heads.parameters()).device
    num_rows = max(1, _NUMBERS // (drafter.width * drafter.heads.num_outputs))
    positions, roots = torch.arange(len(hits.ranks)), hits.tokens[:, 0].to(device)
    if not isinstance(steps, MtpSteps):
        for chunk in positions.split(num_rows):
            yield chunk, steps.begin(hits.hidden[chunk].to(device), roots[chunk])
        return
    assert hits.ahead is not None
    num_read = len(hits.hidden)
    text, every = MtpTexts.empty(steps.heads, 1, steps.embed).read(
        hits.hidden[None].to(device), [num_read], hits.ahead[None].to(device)
    )
    first = num_read - len(positions) + 1
    for chunk in positions.split(max(1, min(num_rows, _COPIED // hits.hidden.numel()))):
        # the same text many times over, each read up to another root
        memory = text.as_it_was((first + chunk).tolist(), every)
        yield chunk, steps.begin(memory.root, roots[chunk], memory)


def gained(sizes_needed: Tensor, sizes: Tensor, *, ended: bool) -> tuple[Tensor, Tensor]:
    """Count tokens and verify steps along one text for trees of many sizes at once.

    Args:
        sizes_needed: [S, K], from :func:`static_sizes` or :func:`dynamic_sizes`.
        sizes: [M] long, numbers of nodes.
        ended: as in :func:`replay`.

    Returns:
        tokens [M] and steps [M], long.
    """
    num_positions = len(sizes_needed)
    accepted = (sizes_needed[..., None] <= sizes).sum(1)  # [S, M]
    root, tokens, steps = torch.zeros(3, len(sizes), dtype=torch.long)
    while num_positions and bool((live := root < num_positions).any()):
        new = accepted.gather(0, root.clamp(max=num_positions - 1)[None])[0] + 1
        counted = torch.minimum(new, num_positions - root) if ended else new
        tokens += counted * live
        steps += live
        root += new
    return tokens, steps


@dataclass(frozen=True)
class Gains:
    """Tokens and verify steps per prompt [P, M], for M trees, as a rule of 2, 3, ... nodes."""

    tokens: Tensor
    steps: Tensor

    def lengths(self) -> list[float]:
        """Return the accept length of each size; every step weighs the same."""
        return (self.tokens.sum(0) / self.steps.sum(0).clamp(min=1)).tolist()

    def ci95(self, column: int) -> tuple[float, float]:
        """Return the 95% interval of one tree's accept length, over prompts."""
        tokens, steps = self.tokens[:, column].tolist(), self.steps[:, column].tolist()
        return ratio_ci95([tokens], [steps])


def count_gains(
    hits: Sequence[Sequence[Hits]], needed: Callable[[int, Hits], Tensor], most: int
) -> Gains:
    """Count what trees of 2 to ``most`` nodes gain along the texts of every prompt.

    Args:
        hits: per prompt, per text.
        needed: from a prompt's number and one of its texts to the sizes needed, [S, K].
        most: the largest number of nodes.
    """
    sizes = torch.arange(2, most + 1)
    tokens, steps = torch.zeros(2, len(hits), len(sizes), dtype=torch.long)
    for prompt, texts in enumerate(hits):
        for text in texts:
            more = gained(needed(prompt, text), sizes, ended=text.ended)
            tokens[prompt] += more[0]
            steps[prompt] += more[1]
    return Gains(tokens, steps)


def static_gains(hits: Sequence[Sequence[Hits]], max_nodes: int) -> Gains:
    """Count what static trees gain on prompts that they were not grown from.

    A tree looks better on the texts it was grown from than on others, the more so the larger it is.
    So the prompts are dealt into folds, and each fold meets the trees of the others.
    """
    folds = min(_FOLDS, len(hits))
    orders = []
    for fold in range(folds):
        others = [texts for i, texts in enumerate(hits) if i % folds != fold] or hits
        orders.append(grow_nodes(others, max_nodes))
    return count_gains(
        hits, lambda prompt, text: static_sizes(orders[prompt % folds], text.ranks), max_nodes
    )


def dynamic_gains(
    hits: Sequence[Sequence[Hits]], max_nodes: int, temperatures: Sequence[float]
) -> Gains:
    """Count what trees grown at each step gain; nothing of them is fitted but the temperatures."""
    return count_gains(
        hits, lambda _, text: dynamic_sizes(text, max_nodes, temperatures), max_nodes
    )


def drafter_gains(
    hits: Sequence[Sequence[Hits]], drafter: DynamicDrafter, temperatures: Sequence[float]
) -> Gains:
    """Count what trees grown at each step gain, of heads of any kind and up to this drafter's size.

    Args:
        hits: per prompt, per text.
        drafter: of the largest tree.
        temperatures: its own, one per head.
    """
    if isinstance(drafter, DynamicSequentialDrafter):
        return count_gains(hits, lambda _, text: grown_sizes(text, drafter), drafter.num_nodes)
    return dynamic_gains(hits, drafter.num_nodes, temperatures)


def decoded_gains(
    base: PreTrainedModel,
    drafter: Drafter,
    prompts: Sequence[Tensor],
    *,
    num_heads: int,
    eos_token_ids: Sequence[int],
    max_new_tokens: int,
    temperatures: Sequence[float],
    seed: int = 0,
    progress: Callable[[Sequence[int]], Any] = iter,
) -> Gains:
    """Decode, and return what one drafter really gained, M = 1.

    Of a text that is cut off the last steps, whose trees the limit may have cut off too, are not
    counted, as :class:`specheads.decoding.hits.Hits` does not.

    Args:
        base: base model.
        drafter: proposes.
        prompts: token ids [1, P] each.
        num_heads: K, the depth of the deepest tree.
        eos_token_ids: tokens that end a text.
        max_new_tokens: per prompt.
        temperatures: each prompt is decoded at each of them.
        seed: prompt n is sampled with ``seed + n``.
        progress: wraps the batches of prompts, to show a bar.
    """
    tokens, steps = torch.zeros(2, len(prompts), 1, dtype=torch.long)
    for first in progress(range(0, len(prompts), ROWS)):
        input_ids, attention_mask = pad_left(prompts[first : first + ROWS])
        for temperature in temperatures:
            result = decode(
                base,
                drafter,
                input_ids,
                attention_mask=attention_mask,
                max_new_tokens=max_new_tokens,
                sampler=Sampler(temperature=temperature, seed=seed + first),
                eos_token_ids=tuple(eos_token_ids),
            )
            for prompt, row in enumerate(result.rows, start=first):
                root = 0
                known = max_new_tokens - (0 if row.finished else num_heads + 1)
                for length in row.accept_lengths:
                    if root >= known:
                        break
                    tokens[prompt] += length
                    steps[prompt] += 1
                    root += length
    return Gains(tokens, steps)
