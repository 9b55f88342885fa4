"""What the heads guessed and what came: the facts from which the gain of any tree is counted.

The text that tree decoding writes is the text that plain decoding writes. So one plain decoding of
each prompt, and one look at what every head ranked where along it, tells exactly how many tokens
any tree would have gained at every step, without decoding with that tree. Static trees are grown
from these hits, and the gain of trees of all sizes is counted from them.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.attention.tree import Choice, Tree
from specheads.config import ConfigError
from specheads.decoding.loop import decode
from specheads.decoding.result import DecodedRow
from specheads.drafters.contract import Drafter
from specheads.drafters.growing import NUM_RANKS
from specheads.drafters.heads import Draws, HeadsDrafter, HeadsState
from specheads.measure.clock import pad_left
from specheads.measure.rows import ratio_ci95
from specheads.models.kinds import Heads
from specheads.models.output import OutputLayer, capture_hidden, side_by_side
from specheads.verification.sampling import Sampler

Progress = Callable[[Sequence[int]], Any]  # wraps a sequence that is iterated over
MISS = 1 << 30  # the rank of a token that no tree may hold: too unlikely, or beyond the end
ROWS = 8  # prompts that are decoded at once
TEMPERATURES = (
    0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0,
)  # fmt: skip


@dataclass(frozen=True)
class Hits:
    """One text; K heads, R guesses of each, G temperatures.

    Position s stands for a verify step whose root is new token s. A text that was cut off tells
    nothing about tokens beyond the cut, so its last positions are left out; one that has ended
    gains nothing there, so there every guess is a miss. Sequential heads are given the tokens that
    came: all that counts for a tree is what they guess below the accepted ones. Where tokens were
    drawn, all logits have the noise of the draws, as the drafter's have.

    Attributes:
        ranks: [S, K] long, which guess of head d is the token that came ``d + 1`` after the root;
            ``MISS`` if none of the R is.
        came: [S, K], the logit of the token that came; NaN beyond the end, and where the head knows
            no such token.
        norms: [S, K, G], logsumexp of all logits divided by each of ``TEMPERATURES``; NaN where
            ``came`` is, and where a head above was wrong.
        ended: whether the text ends after these positions.
        hidden: [S, d] or [K, S, d], what the heads read; of sequential MTP heads [P - 1 + S, d],
            all that the base made up to the last root.
        tokens: [S, K + 1], the root and what came after it, -1 beyond the end.
        ahead: [P - 1 + S], of sequential MTP heads: the token after each hidden state; else None.
        draws: what guesses at the S positions follow.
    """

    ranks: Tensor
    came: Tensor
    norms: Tensor
    ended: bool
    hidden: Tensor | None = None
    tokens: Tensor | None = None
    ahead: Tensor | None = None
    draws: Draws | None = None


AllHits = Sequence[Sequence[Hits]]  # per prompt, per text


@torch.inference_mode()
def measure_hits(
    base: PreTrainedModel,
    heads: Heads,
    output: OutputLayer,
    prompt: Tensor,
    row: DecodedRow,
    sampler: Sampler,
) -> Hits:
    """Compare the heads' guesses with the tokens that came.

    Args:
        base: base model.
        heads: heads on its last hidden state.
        output: its output layer.
        prompt: token ids, [1, P].
        row: what was put behind it, L new tokens.
        sampler: how they were drawn, alone.
    """
    num_prompt, num_new, num_heads = prompt.shape[1], len(row.new_tokens), heads.num_heads
    sequence = torch.cat([prompt, prompt.new_tensor([row.new_tokens])], dim=1)  # [1, P + L]
    with capture_hidden(base, heads.taps) as captured:
        base(input_ids=sequence, use_cache=False, logits_to_keep=1)
    heads.read_through(base)
    whole = side_by_side(captured, heads.taps)
    places = torch.arange(whole.shape[1], device=whole.device)[None]
    hidden = heads.contextual(whole, places, sequence.to(whole.device)).squeeze(-3)
    new = sequence[0, num_prompt:].to(hidden.device)
    # There is no step with the last token as its root, and near a cut the limit hides guesses: a
    # step may gain one token more than there are heads.
    positions = max(num_new - (1 if row.finished else num_heads + 1), 0)
    # The root's own hidden state is not known yet when the heads guess: theirs is the one before.
    start = num_prompt - 1
    hidden = hidden[..., start : start + positions, :]
    roots = torch.arange(positions, device=new.device)[:, None]
    places = roots + torch.arange(num_heads + 1, device=new.device)
    known = places < num_new
    tokens = new[places.clamp(max=num_new - 1)]  # [S, K + 1]
    # what a head reads beyond the end is nothing that it could be asked about
    logits = heads.logits(hidden, output, tokens).float()  # [K, S, V']
    size = max(output.weight.shape[0], heads.vocab_size)
    lengths = [num_prompt + 1 + root for root in range(positions)]
    draws = Draws(sampler, size, [0] * positions, lengths)
    if sampler.temperature > 0 and positions:  # places of one text share most of their noise
        noise = draws.select([0]).noise(0, positions + num_heads, heads, logits.device)[:, 0]
        ahead = torch.arange(num_heads, device=logits.device)[:, None] + roots[:, 0]
        logits = sampler.warp(logits) + noise[ahead]
    # in the order of the drafter's own top-k, for equal logits are common in bfloat16
    best = logits.topk(min(NUM_RANKS, logits.shape[-1]), dim=-1).indices
    wanted = heads.map_labels(tokens[:, 1:]).T.masked_fill(~known[:, 1:].T, -1)  # [K, S]
    hit = best == wanted[..., None]  # [K, S, R]
    ranks = torch.where(hit.any(-1), hit.int().argmax(-1), MISS)
    came = logits.gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
    came = came.masked_fill(wanted < 0, torch.nan)
    right = (ranks != MISS).cumprod(0)
    counted = torch.cat([torch.ones_like(right[:1]), right[:-1]]).bool() & (wanted >= 0)
    norms, some = came.new_full((*came.shape, len(TEMPERATURES)), torch.nan), logits[counted]
    norms[counted] = torch.stack([(some / each).logsumexp(-1) for each in TEMPERATURES], dim=-1)
    ranks, came, norms = (each.transpose(0, 1).cpu() for each in (ranks, came, norms))
    tokens = tokens.masked_fill(~known, -1).cpu()
    found = Hits(ranks, came, norms, row.finished, hidden.cpu(), tokens, draws=draws)
    if not heads.walks_text:
        return found
    end = start + positions  # they read more than one hidden state
    return replace(found, hidden=whole[0, :end].cpu(), ahead=sequence[0, 1 : end + 1].cpu())


@dataclass(frozen=True)
class Texts:
    """Prompts, and how they are continued.

    Attributes:
        prompts: token ids [1, P] each.
        eos_token_ids: tokens that end a text.
        max_new_tokens: limit per prompt.
        temperatures: each prompt is continued at each of them.
        seed: prompt n is sampled with ``seed + n``.
        progress: wraps the batches of prompts, to show a bar; where it ends early, only those
            before are continued.
    """

    prompts: Sequence[Tensor]
    eos_token_ids: Sequence[int] = ()
    max_new_tokens: int = 64
    temperatures: Sequence[float] = (0.0, 1.0)
    seed: int = 0
    progress: Progress = iter

    def decode(
        self, base: PreTrainedModel, drafter: Drafter | None
    ) -> Iterator[tuple[int, float, DecodedRow]]:
        """Yield the number of a prompt, the temperature and what came of it, for all texts.

        Args:
            base: base model.
            drafter: proposes; None decodes plainly.
        """
        how: dict[str, Any] = {"max_new_tokens": self.max_new_tokens}
        how["eos_token_ids"] = tuple(self.eos_token_ids)
        for first in self.progress(range(0, len(self.prompts), ROWS)):
            input_ids, mask = pad_left(self.prompts[first : first + ROWS])
            for temperature in self.temperatures:
                how["sampler"] = Sampler(temperature=temperature, seed=self.seed + first)
                result = decode(base, drafter, input_ids, attention_mask=mask, **how)
                for number, row in enumerate(result.rows, start=first):
                    yield number, temperature, row


def collect_hits(
    base: PreTrainedModel, heads: Heads, output: OutputLayer, texts: Texts
) -> list[list[Hits]]:
    """Decode plainly from every prompt; return its hits, one text per temperature.

    Args:
        base: base model.
        heads: heads on its last hidden state.
        output: its output layer.
        texts: to write.

    Raises:
        ValueError: if there are no prompts.
        ConfigError: if their texts are too short to measure anything.
    """
    if not texts.prompts:
        raise ValueError("prompts must hold at least 1 prompt, got 0")
    found: list[list[Hits]] = [[] for _ in texts.prompts]
    for number, temperature, row in texts.decode(base, None):
        prompt, drawn = texts.prompts[number], Sampler(temperature, seed=texts.seed + number)
        found[number].append(measure_hits(base, heads, output, prompt, row, drawn))
    found = [of_prompt for of_prompt in found if of_prompt]
    if not any(len(text.ranks) for of_prompt in found for text in of_prompt):
        if all(text.ended for of_prompt in found for text in of_prompt):
            raise ConfigError("the base ends every text with its first token")
        raise ConfigError(
            f"max_new_tokens {texts.max_new_tokens} leaves no position to measure "
            f"{heads.num_heads} heads at, over {len(texts.prompts)} prompts; give more"
        )
    return found


def fit_temperatures(hits: AllHits) -> list[float]:
    """Return for every head the temperature that makes the tokens that came most likely.

    Only positions count where each head above had the token that came among its guesses: nodes of
    this head elsewhere hang under a wrong one and are worth nothing, however sure the head is.

    Args:
        hits: per prompt, per text.
    """
    texts = [text for of_prompt in hits for text in of_prompt]
    ranks = torch.cat([text.ranks for text in texts])
    came = torch.cat([text.came for text in texts])
    norms = torch.cat([text.norms for text in texts])
    temperatures = torch.tensor(TEMPERATURES)
    found = []
    alive = torch.ones(len(ranks), dtype=torch.bool)
    for head in range(ranks.shape[1]):
        counted = alive & ~came[:, head].isnan()
        loss = norms[counted, head] - came[counted, head, None] / temperatures
        found.append(float(temperatures[loss.mean(0).argmin()]) if len(loss) else 1.0)
        alive &= ranks[:, head] != MISS
    return [round(each, 4) for each in found]


_PRIOR = 16.0  # positions by which a rate measured over all paths outweighs that of one path
_TYPICAL_NODES = 8  # of the tree whose steps' positions all sizes are grown on
_ROUNDS = 3


def grow_order(ranks: Tensor, max_nodes: int) -> list[tuple[Choice, float]]:
    """Order nodes by the probability that they are accepted; every prefix is the best of its size.

    Best-first as :func:`specheads.attention.tree.grow_tree`, with hit rates measured given the very
    path above a node: after a second-best guess the third token is harder than after the best.
    Paths seen rarely borrow from the rate of that rank at that depth after any hit.

    Args:
        ranks: of all texts together, [S, K].
        max_nodes: root included; there are fewer where too few nodes are useful.

    Returns:
        The nodes below the root, each with its probability.
    """
    num_heads = ranks.shape[1]
    pooled: list[Tensor] = []  # per depth [R]: rate of each rank where the tokens before were hit
    alive = torch.ones(len(ranks), dtype=torch.bool)
    for depth in range(num_heads):
        pooled.append(_counts(ranks[alive, depth]).double() / max(int(alive.sum()), 1))
        alive &= ranks[:, depth] < NUM_RANKS
    nodes: list[tuple[Choice, float]] = []
    order = itertools.count()  # breaks ties without comparing tensors
    frontier: list[tuple[float, int, Choice, Tensor]] = []

    def offer_children(node: Choice, value: float, seen: Tensor) -> None:
        depth = len(node)
        if depth == num_heads:
            return
        rates = (_counts(seen[:, depth]) + _PRIOR * pooled[depth]) / (len(seen) + _PRIOR)
        for rank, rate in enumerate(rates.tolist()):
            if rate > 0:
                below = seen[seen[:, depth] == rank]
                heapq.heappush(frontier, (-value * rate, next(order), (*node, rank), below))

    offer_children((), 1.0, ranks)
    while frontier and len(nodes) + 1 < max_nodes:
        negative, _, node, below = heapq.heappop(frontier)
        nodes.append((node, -negative))
        offer_children(node, -negative, below)
    return nodes


def _counts(ranks: Tensor) -> Tensor:
    return torch.bincount(ranks.clamp(max=NUM_RANKS), minlength=NUM_RANKS + 1)[:NUM_RANKS]


def static_sizes(order: Sequence[Choice], ranks: Tensor) -> Tensor:
    """Return how large a static tree must be to hold the path that came.

    Args:
        order: the tree of N nodes holds the first N - 1 of these.
        ranks: of one text, [S, K].

    Returns:
        [S, K] long: the least N that accepts the token at depth d + 1; ``MISS`` if none does.
    """
    size_with = {node: index + 2 for index, node in enumerate(order)}
    rows = [
        [size_with.get(tuple(row[: depth + 1]), MISS) for depth in range(len(row))]
        for row in ranks.tolist()
    ]
    return torch.tensor(rows, dtype=torch.long).view(ranks.shape)


def step_ranks(order: Sequence[Choice], hits: AllHits, num_nodes: int) -> Tensor:
    """Return the ranks [R, K] at those positions only where a step of this tree would start.

    They are harder than others: a step starts where the tree did not reach, and misses come close
    together.

    Args:
        order: the tree of ``num_nodes`` nodes holds the first ``num_nodes - 1`` of these.
        hits: per prompt, per text.
        num_nodes: root included.
    """
    kept = []
    for text in (text for texts in hits for text in texts):
        gained = (static_sizes(order, text.ranks) <= num_nodes).sum(1).add(1).tolist()
        starts, root = [], 0
        while root < len(gained):
            starts.append(root)
            root += gained[root]
        kept.append(text.ranks[starts])
    return torch.cat(kept)


def grow_nodes(hits: AllHits, max_nodes: int) -> list[Choice]:
    """Order nodes for static trees of all sizes, as :func:`grow_order`, where steps start.

    Which positions these are depends on the tree, so the nodes are ordered again for those at which
    the tree found before starts its steps. (On the embedded model trees of 6 nodes gain 4.6% from
    it, those of 8 nodes 1.8%, larger ones nothing.)

    Args:
        hits: per prompt, per text.
        max_nodes: root included.
    """
    ranks = torch.cat([text.ranks for texts in hits for text in texts])
    found: list[tuple[int, list[Choice]]] = []
    for _ in range(_ROUNDS):
        nodes = [node for node, _ in grow_order(ranks, max_nodes)]
        ranks = step_ranks(nodes, hits, _TYPICAL_NODES)
        found.append((len(ranks), nodes))
    return min(found, key=lambda each: each[0])[1]  # the fewest steps for the same texts


def grow_static(hits: AllHits, num_nodes: int) -> Tree:
    """Grow the tree of ``num_nodes`` nodes that gains most; smaller if too few are useful."""
    return Tree.from_choices(grow_nodes(hits, num_nodes))


def acceptance(tree: Tree, hits: AllHits) -> list[float]:
    """Return per choice of a tree the share of its verify steps that accept it.

    One more than their sum is the accept length, but for steps at the end of a text.
    """
    ranks = step_ranks(tree.choices, hits, tree.num_nodes)
    paths = Counter(
        tuple(row[:depth]) for row in ranks.tolist() for depth in range(1, len(row) + 1)
    )
    return [paths[choice] / max(len(ranks), 1) for choice in tree.choices]


_FOLDS = 5
_NUMBERS = 1 << 22  # logits in memory where heads are asked
_COPIED = 1 << 26  # numbers of hidden states of the texts that MTP heads read side by side


def _sizes_needed(parents: Tensor, values: Tensor, guesses: Tensor, came: Tensor) -> Tensor:
    """Return which sizes hold the paths that came, where a smaller tree holds the best nodes.

    Args:
        parents: of each row's largest tree, [S, N].
        values: the nodes' log-probabilities, [S, N].
        guesses: what each node guesses, [S, N].
        came: what came at each depth, [S, K].

    Returns:
        [S, K] long, as :func:`static_sizes`.
    """
    # a node's place in the order of values: the size of the tree in which it comes last
    places = values.argsort(dim=1, descending=True, stable=True).argsort(dim=1) + 1
    node = torch.zeros(len(came), 1, dtype=torch.long)
    alive = torch.ones(len(came), dtype=torch.bool)
    found = []
    for guess in came.T:
        here = (parents == node) & (guesses == guess[:, None])
        alive = alive & here.any(1)
        node = torch.where(alive[:, None], here.int().argmax(1, keepdim=True), node)
        found.append(torch.where(alive, places.gather(1, node)[:, 0], MISS))
    return torch.stack(found, dim=1)


def grown_sizes(hits: Hits, drafter: HeadsDrafter) -> Tensor:
    """Return how large a tree grown at each position must be to hold the path that came.

    Which nodes a tree holds beside that path depends on what heads say below tokens that did not
    come, and that no text tells. So the largest tree is really grown at every position; a smaller
    one holds the most probable of its nodes.

    Args:
        hits: of one text.
        drafter: of the largest tree.

    Returns:
        [S, K] long, as :func:`static_sizes`.
    """
    assert hits.tokens is not None
    found = torch.full_like(hits.ranks, MISS)
    depth = drafter.max_depth
    for chunk, state in _states(hits, drafter):
        parents, guesses, values = (each.cpu() for each in drafter.grow(state))
        came = hits.tokens[chunk, 1 : depth + 1]
        found[chunk, :depth] = _sizes_needed(parents, values, guesses, came)
    return found


def _states(hits: Hits, drafter: HeadsDrafter) -> Iterator[tuple[Tensor, HeadsState]]:
    """Yield some positions [n] of a text, and where guesses behind them start, n rows."""
    if not len(hits.ranks):
        return
    assert hits.hidden is not None and hits.tokens is not None and hits.draws is not None
    begin, draws = drafter.steps(), hits.draws
    device = next(drafter.heads.parameters()).device
    num_rows = max(1, _NUMBERS // (drafter.width * drafter.heads.num_outputs))
    positions, roots = torch.arange(len(hits.ranks)), hits.tokens[:, 0].to(device)
    if not drafter.heads.walks_text:
        for chunk in positions.split(num_rows):
            hidden = hits.hidden.index_select(-2, chunk).to(device)
            of = draws.select(chunk.tolist())
            yield chunk, HeadsState(roots[chunk], hidden, begin, None, of)
        return
    assert hits.ahead is not None
    num_read = len(hits.hidden)
    empty: Any = drafter.heads.memory(1)
    text, every = empty.read(hits.hidden[None].to(device), [num_read], hits.ahead[None].to(device))
    first = num_read - len(positions) + 1
    for chunk in positions.split(max(1, min(num_rows, _COPIED // hits.hidden.numel()))):
        # the same text many times over, each read up to another root
        memory = text.as_it_was((first + chunk).tolist(), every)
        of = draws.select(chunk.tolist())
        yield chunk, HeadsState(roots[chunk], memory.root, begin, memory, of)


def gained(sizes_needed: Tensor, sizes: Tensor, *, ended: bool) -> tuple[Tensor, Tensor]:
    """Count tokens and verify steps along one text for trees of many sizes at once.

    Args:
        sizes_needed: [S, K], from :func:`static_sizes` or :func:`grown_sizes`.
        sizes: [M] long, numbers of nodes.
        ended: whether the text ends after these positions, so that no step gains a token beyond.

    Returns:
        tokens [M] and steps [M], long.
    """
    num_positions = len(sizes_needed)
    # sizes never fall along a path: as many as are small enough, so deep it is accepted; [S, M]
    accepted = (sizes_needed[..., None] <= sizes).sum(1)
    root, tokens, steps = torch.zeros(3, len(sizes), dtype=torch.long)
    # each size goes from root to root in strides of its own; those that are through wait
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


def count_gains(hits: AllHits, needed: Callable[[int, Hits], Tensor], most: int) -> Gains:
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


def static_gains(hits: AllHits, max_nodes: int) -> Gains:
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


def drafter_gains(hits: AllHits, drafter: HeadsDrafter) -> Gains:
    """Count what trees grown at each step gain, of heads of any kind and up to this drafter's size.

    Args:
        hits: per prompt, per text.
        drafter: of the largest tree.
    """
    return count_gains(hits, lambda _, text: grown_sizes(text, drafter), drafter.num_nodes)


def decoded_gains(base: PreTrainedModel, drafter: Drafter, texts: Texts, num_heads: int) -> Gains:
    """Decode, and return what one drafter really gained, M = 1.

    Of a text that is cut off the last steps, whose trees the limit may have cut off too, are not
    counted, as :class:`Hits` does not.

    Args:
        base: base model.
        drafter: proposes.
        texts: to write.
        num_heads: K, the depth of the deepest tree.
    """
    tokens, steps = torch.zeros(2, len(texts.prompts), 1, dtype=torch.long)
    for number, _, row in texts.decode(base, drafter):
        known = texts.max_new_tokens - (0 if row.finished else num_heads + 1)
        roots = itertools.accumulate(row.accept_lengths, initial=0)
        counted = [n for n, at in zip(row.accept_lengths, roots, strict=False) if at < known]
        tokens[number] += sum(counted)
        steps[number] += len(counted)
    return Gains(tokens, steps)
