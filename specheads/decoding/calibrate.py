"""Choose the tree that decodes fastest here, from measured hits and measured time per step.

The text that tree decoding writes is the text that plain decoding writes. So one plain decoding of
each prompt, and one look at what every head ranked where along it, tells exactly how many tokens
any tree would have gained at every step; only its time per step must be clocked.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.loop import decode
from specheads.decoding.plain import plain_decode
from specheads.decoding.sampling import Sampler
from specheads.drafters.heads import HeadsDrafter
from specheads.models.base import OutputLayer, capture_hidden
from specheads.models.heads import MedusaHeads
from specheads.tree import Choice, Tree

MISS = 1 << 30  # the rank of a token that does not exist, because the text ended before it
SIZES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_MAX_RANK = 10  # guesses per head that a tree may use
_TIE = 0.05  # relative speed below which two sizes are taken for equally fast
_PRIOR = 16.0  # positions by which a rate measured over all paths outweighs that of one path


@dataclass(frozen=True)
class Calibration:
    """A chosen tree, and what it was chosen from.

    Attributes:
        tree: the fastest.
        expected_accept_length: tokens per verify step over the calibration prompts.
        measured_on: JSON for the export: prompts, temperatures, dtype, and per number of nodes the
            accept length, milliseconds per step, and speed-up over plain decoding.
    """

    tree: Tree
    expected_accept_length: float
    measured_on: dict[str, Any]


@torch.inference_mode()
def measure_hit_ranks(
    base: PreTrainedModel,
    heads: MedusaHeads,
    output: OutputLayer,
    sequence: Tensor,
    num_prompt: int,
    *,
    ended: bool,
) -> Tensor:
    """Rank the tokens that came where the heads had to guess them.

    Position s stands for a verify step whose root is new token s. A text that was cut off tells
    nothing about tokens beyond the cut, so its last positions are left out; one that has ended
    gains nothing there, so there every guess is a miss.

    Args:
        base: base model.
        heads: heads on its last hidden state.
        output: its output layer.
        sequence: prompt and new tokens, [1, P + L].
        num_prompt: P.
        ended: whether the last token is an end of text.

    Returns:
        [S, K] long: ``[s, d]`` is how many tokens head d held more likely than the one that came
        ``d + 1`` after the root.
    """
    with capture_hidden(base) as captured:
        base(input_ids=sequence, use_cache=False, logits_to_keep=1)
    hidden = captured.hidden
    assert hidden is not None
    new = sequence[0, num_prompt:]
    num_new, num_heads = len(new), heads.num_heads
    # There is no step with the last token as its root.
    positions = max(num_new - (1 if ended else num_heads), 0)
    ranks = torch.full((positions, num_heads), MISS, dtype=torch.long)
    if not positions:
        return ranks
    # The root's own hidden state is not known yet when the heads guess: theirs is the one before.
    start = num_prompt - 1
    logits = heads.logits(hidden[0, start : start + positions], output)  # [K, S, V]
    for head in range(num_heads):
        known = min(positions, num_new - 1 - head)
        if known <= 0:
            continue
        came = new[head + 1 : head + 1 + known, None]  # [known, 1]
        of_head = logits[head, :known]
        ranks[:known, head] = (of_head > of_head.gather(1, came)).sum(1).cpu()
    return ranks


def grow_from_ranks(ranks: Tensor, num_nodes: int) -> Tree:
    """Grow the tree of ``num_nodes`` nodes, root included, that these positions would hit most.

    Best-first as :func:`specheads.tree.grow_tree`, with hit rates measured given the very path
    above a node: after a second-best guess the third token is harder than after the best. Paths
    seen rarely borrow from the rate of that rank at that depth after any hit.

    Args:
        ranks: from :func:`measure_hit_ranks`, of all prompts together, [S, K].
        num_nodes: root included; the tree is smaller where there are too few useful nodes.
    """
    num_heads = ranks.shape[1]
    top = _MAX_RANK
    pooled: list[Tensor] = []  # per depth [top]: rate of each rank where the tokens before were hit
    alive = torch.ones(len(ranks), dtype=torch.bool)
    for depth in range(num_heads):
        counts = torch.bincount(ranks[alive, depth].clamp(max=top), minlength=top + 1)[:top]
        pooled.append(counts.double() / max(int(alive.sum()), 1))
        alive &= ranks[:, depth] < top
    choices: list[Choice] = []
    order = itertools.count()  # breaks ties without comparing tensors
    frontier: list[tuple[float, int, Choice, Tensor]] = []

    def offer_children(node: Choice, value: float, seen: Tensor) -> None:
        if len(node) == num_heads:
            return
        depth = len(node)
        counts = torch.bincount(seen[:, depth].clamp(max=top), minlength=top + 1)[:top]
        rates = (counts + _PRIOR * pooled[depth]) / (len(seen) + _PRIOR)
        for rank, rate in enumerate(rates.tolist()):
            if rate > 0:
                below = seen[seen[:, depth] == rank]
                heapq.heappush(frontier, (-value * rate, next(order), (*node, rank), below))

    offer_children((), 1.0, ranks)
    while frontier and len(choices) + 1 < num_nodes:
        negative, _, node, below = heapq.heappop(frontier)
        choices.append(node)
        offer_children(node, -negative, below)
    return Tree.from_choices(choices)


def replay(tree: Tree, ranks: Tensor, *, ended: bool) -> Iterator[int]:
    """Yield the tokens gained by each verify step of ``tree`` along one text.

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


def collect_ranks(
    base: PreTrainedModel,
    heads: MedusaHeads,
    output: OutputLayer,
    prompts: Sequence[Tensor],
    *,
    eos_token_ids: Sequence[int],
    max_new_tokens: int = 64,
    temperatures: Sequence[float] = (0.0, 1.0),
    seed: int = 0,
    progress: Callable[[Sequence[Tensor]], Any] = iter,
) -> list[tuple[Tensor, bool]]:
    """Decode plainly from every prompt; return per text its hit ranks and whether it ended.

    The arguments are those of :func:`calibrate`.

    Raises:
        ValueError: if there are no prompts, or their texts are too short to measure anything.
    """
    if not prompts:
        raise ValueError("prompts must hold at least 1 prompt, got 0")
    eos = tuple(eos_token_ids)
    texts: list[tuple[Tensor, bool]] = []
    for index, prompt in enumerate(progress(prompts)):
        for temperature in temperatures:
            result = plain_decode(
                base,
                prompt,
                max_new_tokens=max_new_tokens,
                sampler=Sampler(temperature=temperature, seed=seed + index),
                eos_token_ids=eos,
            )
            ranks = measure_hit_ranks(
                base, heads, output, result.sequences, prompt.shape[1], ended=result.finished
            )
            texts.append((ranks, result.finished))
    if not any(len(ranks) for ranks, _ in texts):
        raise ValueError(
            f"max_new_tokens {max_new_tokens} leaves no position to measure "
            f"{heads.num_heads} heads at, over {len(prompts)} prompts"
        )
    return texts


def measure_step_seconds(
    run: Sequence[Callable[[int], tuple[float, int]]], *, max_new_tokens: int, repeats: int
) -> list[float]:
    """Clock decoders against each other, in turn, so that a slow moment hits all of them.

    Args:
        run: decode up to so many tokens; return seconds and the number of verify steps.
        max_new_tokens: tokens to decode.
        repeats: the fastest of these is returned, since interference only ever adds time.

    Returns:
        Seconds per verify step, without the prefill.
    """
    for each in run:
        each(min(8, max_new_tokens))
    seconds: list[list[float]] = [[] for _ in run]
    for _ in range(repeats):
        for index, each in enumerate(run):
            prefill, _ = each(1)
            total, num_steps = each(max_new_tokens)
            seconds[index].append(max(total - prefill, 1e-9) / max(num_steps, 1))
    return [min(each) for each in seconds]


def pick_size(lengths: Sequence[float], seconds: Sequence[float]) -> int:
    """Return the index of the fastest size; of those that tie within the clock's noise the last.

    The accept length of a tree is counted and holds on any machine; its time per step is clocked
    on one text. Where the clock cannot tell two sizes apart, the count decides.

    Args:
        lengths: tokens per verify step, per size, sizes ascending.
        seconds: seconds per verify step, likewise.
    """
    speeds = [length / second for length, second in zip(lengths, seconds, strict=True)]
    return max(i for i, speed in enumerate(speeds) if speed >= (1 - _TIE) * max(speeds))


def calibrate(
    base: PreTrainedModel,
    heads: MedusaHeads,
    output: OutputLayer,
    prompts: Sequence[Tensor],
    *,
    eos_token_ids: Sequence[int],
    max_new_tokens: int = 64,
    temperatures: Sequence[float] = (0.0, 1.0),
    seed: int = 0,
    num_nodes: int = 0,
    max_nodes: int = 48,
    repeats: int = 5,
    progress: Callable[[Sequence[Tensor]], Any] = iter,
) -> Calibration:
    """Measure the heads on ``prompts`` and return the tree with the most tokens per second.

    Args:
        base: base model, in the dtype and on the device of use.
        heads: heads, likewise.
        output: the base's output layer.
        prompts: token ids [1, P] each; not those that will be reported on.
        eos_token_ids: tokens that end a text.
        max_new_tokens: per prompt.
        temperatures: of the texts; hits are pooled over them.
        seed: of the sampling.
        num_nodes: size of the tree, root included; 0 chooses the fastest.
        max_nodes: largest size that is tried.
        repeats: of the clocking.
        progress: wraps the prompts, to show a bar.

    Raises:
        ValueError: if there are no prompts, or they are too short to measure anything.
    """
    texts = collect_ranks(
        base,
        heads,
        output,
        prompts,
        eos_token_ids=eos_token_ids,
        max_new_tokens=max_new_tokens,
        temperatures=temperatures,
        seed=seed,
        progress=progress,
    )
    ranks = torch.cat([each for each, _ in texts])
    sizes = [num_nodes] if num_nodes else [n for n in SIZES if n <= max_nodes]
    grown = (grow_from_ranks(ranks, size) for size in sizes)
    trees = list({tree.num_nodes: tree for tree in grown}.values())
    gained = [
        [step for text, ended in texts for step in replay(tree, text, ended=ended)]
        for tree in trees
    ]
    lengths = [sum(each) / max(len(each), 1) for each in gained]

    longest = max(prompts, key=lambda prompt: prompt.shape[1])
    greedy = Sampler(temperature=0.0, seed=seed)

    def clock(tree: Tree | None) -> Callable[[int], tuple[float, int]]:
        drafter = HeadsDrafter(heads, output, tree) if tree else None

        def run(limit: int) -> tuple[float, int]:
            start = time.perf_counter()
            if drafter is None:
                result = plain_decode(base, longest, max_new_tokens=limit, sampler=greedy)
            else:
                result = decode(base, drafter, longest, max_new_tokens=limit, sampler=greedy)
            result.sequences.cpu()  # waits for the device
            return time.perf_counter() - start, result.num_steps

        return run

    plain, *seconds = measure_step_seconds(
        [clock(None), *map(clock, trees)], max_new_tokens=max_new_tokens, repeats=repeats
    )
    best = pick_size(lengths, seconds)
    measured_on = {
        "num_prompts": len(prompts),
        "num_positions": len(ranks),
        "temperatures": list(temperatures),
        "dtype": str(base.dtype).removeprefix("torch."),
        "device": base.device.type,
        "threads": torch.get_num_threads(),
        "plain_step_ms": round(plain * 1e3, 4),
        "sizes": [
            {
                "num_nodes": tree.num_nodes,
                "accept_length": round(length, 4),
                "step_ms": round(second * 1e3, 4),
                "speedup": round(length / second * plain, 4),
            }
            for tree, length, second in zip(trees, lengths, seconds, strict=True)
        ],
    }
    return Calibration(trees[best], lengths[best], measured_on)
