"""How the base model's next token is drawn: greedily, or with noise that belongs to a position.

A draw is ``argmax(logits / temperature + noise)`` with Gumbel noise, which samples the softmax. The
noise is a pure function of (seed, row, absolute position, token): plain decoding and tree decoding,
which meet the same positions in different steps and shapes, therefore draw the same tokens. It is
counter-based (the splitmix64 finaliser over a lattice), hence without state, equal on every device,
and free to be asked for any position at any time.

Rules for sampled candidates make random choices of other kinds (:class:`Chance`), and drafters that
sample need noise of their own: streams of the same generator that have nothing in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from specheads.attention.tree import RowTrees, Tree
from specheads.system.errors import at_least, within

_MASK = (1 << 64) - 1
_POSITION_STEP = 0xD1B54A32D192ED03 - (1 << 64)  # odd, far from multiples of the token step
_TOKEN_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
SITE_STEP = 0xDA942042E4DD58B5 - (1 << 64)
ACCEPT, DRAW, DRAFT = 1, 2, 3  # streams beside that of plain decoding


def _mix_seed(seed: int) -> int:
    """Scatter neighbouring seeds over 64 bits (splitmix64), as a signed integer."""
    x = (seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return signed(x ^ (x >> 31))


def signed(x: int) -> int:
    """Wrap as 64-bit integers do."""
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift as unsigned 64-bit integers do; torch's shift copies the sign bit."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


@lru_cache(maxsize=16)
def _lattice(vocab_size: int, device: torch.device) -> Tensor:
    return torch.arange(1, vocab_size + 1, device=device) * _TOKEN_STEP


def gumbel_noise(seeds: Sequence[int], positions: Tensor, vocab_size: int) -> Tensor:
    """Return standard Gumbel noise that depends on nothing but its arguments.

    Args:
        seeds: [B], any integers, one per row.
        positions: [B, ...] long, absolute positions of the tokens to be drawn.
        vocab_size: V.

    Returns:
        [B, ..., V] float32.
    """
    return gumbel(keys_of(seeds, positions), vocab_size)


def draft_noise(
    seeds: Sequence[int], root_positions: Tensor, num_levels: int, vocab_size: int
) -> Tensor:
    """Return Gumbel noise for a drafter that samples, unrelated to all other noise.

    It belongs to the root's position and the level, not to the guessed token's position: a
    position is guessed at in several steps, and whether it was reached may depend on the guess.

    Args:
        seeds: [B], as in :func:`gumbel_noise`.
        root_positions: [B] long.
        num_levels: of the tree, or whatever draws are to be independent.
        vocab_size: V.

    Returns:
        [B, num_levels, V] float32.
    """
    levels = torch.arange(num_levels, device=root_positions.device) * SITE_STEP
    keys = keys_of(seeds, root_positions, DRAFT)[:, None] + levels
    return gumbel(keys, vocab_size)


def keys_of(seeds: Sequence[int], positions: Tensor, stream: int = 0) -> Tensor:
    """Return what the noise at positions [B, ...] is made from, [B, ...]."""
    mixed = [_mix_seed(seed) for seed in seeds]
    if stream:
        mixed = [_mix_seed(each + stream) for each in mixed]
    first = torch.tensor(mixed, device=positions.device)
    return first.view(-1, *[1] * (positions.dim() - 1)) + positions * _POSITION_STEP


def uniform(keys: Tensor, num: int) -> Tensor:
    """Return ``num`` numbers strictly inside (0, 1) for each key, [...] to [..., num] float64."""
    x = keys[..., None] + _lattice(num, keys.device)
    x.bitwise_xor_(_shifted(x, 30)).mul_(0xBF58476D1CE4E5B9 - (1 << 64))
    x.bitwise_xor_(_shifted(x, 27)).mul_(0x94D049BB133111EB - (1 << 64))
    x.bitwise_xor_(_shifted(x, 31))
    return _shifted(x, 11).double().add_(0.5).mul_(2.0**-53)


def gumbel(keys: Tensor, num: int) -> Tensor:
    """Return ``num`` standard Gumbel numbers for each key, [...] to [..., num] float32."""
    # a CPU does it in a quarter of the time by pieces that stay in its caches
    size = max(1, _PIECE // num) if keys.device.type == "cpu" else max(1, keys.numel())
    parts = keys.flatten().split(size)
    pieces = [uniform(some, num).log_().neg_().log_().neg_().float() for some in parts]
    return torch.cat(pieces).view(*keys.shape, num)


_PIECE = 1 << 16  # numbers that are made together on a CPU
_KEPT_NOISE = 1 << 14  # numbers per block, or those of one position
_KEPT_BLOCKS = 64  # of 150,000 numbers they are 40 MB


@lru_cache(maxsize=_KEPT_BLOCKS)
def _noise_block(seed: int, block: int, size: int, vocab_size: int, device: torch.device) -> Tensor:
    positions = torch.arange(block * size, (block + 1) * size, device=device)
    return gumbel_noise([seed], positions[None], vocab_size)[0]


# of float32 logits relative to the largest, between passes of different shapes; 1.5e-6 was seen on
# a 5-layer model, and a choice compares two logits
ROUNDING = 1e-5
_SUMS = 1e-5  # of float32 sums of probabilities over a vocabulary, relative


@dataclass(frozen=True)
class Chance:
    """The random choices of one verify step, as rules for sampled candidates ask for them.

    Rules take any object with ``accept`` and ``draw``, so that tests can go through every outcome.
    Each is a function of seed, root position and site alone. Root positions differ between the
    steps of a row, so no choice is made twice.

    Attributes:
        seeds: [B], of the rows' noise.
        root_positions: [B] long, absolute.
        num_sites: how many sites there are to accept at: N, the nodes.
    """

    seeds: Sequence[int]
    root_positions: Tensor
    num_sites: int

    @cached_property
    def _accept_uniform(self) -> Tensor:
        return uniform(keys_of(self.seeds, self.root_positions, ACCEPT), self.num_sites)

    def accept(self, probability: Tensor, site: int) -> Tensor:
        """Return [B] bool, true with ``probability`` [B]."""
        return self._accept_uniform[:, site] < probability

    def draw(self, probs: Tensor, site: int) -> Tensor:
        """Draw one token per row from ``probs`` [B, V]; returns [B]."""
        keys = keys_of(self.seeds, self.root_positions, DRAW) + signed(site * SITE_STEP)
        return (probs.log() + gumbel(keys, probs.shape[-1])).argmax(-1)


@dataclass(frozen=True)
class Sampler:
    """Draws tokens from logits.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the fewest tokens that together reach this probability; 1 keeps all.
        seed: of the noise; row b of a batch draws with ``seed + b``. Unused when greedy.
        seeds: per row, in place of that.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    seeds: Sequence[int] = ()

    def __post_init__(self) -> None:
        at_least(self, temperature=0, top_k=0)
        within(self, top_p="(0, 1]")

    def seeds_of(self, rows: Iterable[int]) -> list[int]:
        """Return the seeds that rows draw with."""
        return [self.seeds[row] if self.seeds else self.seed + row for row in rows]

    def warp(self, logits: Tensor) -> Tensor:
        """Apply temperature, then top-k, then top-p, as transformers does; [..., V] to float32."""
        scores = logits.float()
        if self.temperature != 1:
            scores = scores / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            kth = scores.topk(self.top_k, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < kth, float("-inf"))
        return scores if self.top_p == 1 else _nucleus(scores, self.top_p)

    def warped(self, logits: Tensor) -> Tensor:
        """Return :meth:`warp` of logits, [..., V] float32; greedy: the logits themselves."""
        return self.warp(logits) if self.temperature > 0 else logits.float()

    def probs(self, logits: Tensor) -> Tensor:
        """Return the distributions that are drawn from, [..., V] float32; greedy: the model's."""
        return self.warped(logits).softmax(-1)

    def tree_scores(
        self,
        logits: Tensor,
        tree: Tree | RowTrees,
        root_positions: Sequence[int],
        rows: Sequence[int] | None = None,
    ) -> Tensor:
        """Return what draws after every node of a tree are the argmax of: warped logits and noise.

        Nodes of one depth stand at one position and share its noise.

        Args:
            logits: [B, N, V].
            tree: on the device of the logits.
            root_positions: [B], the absolute position of the root.
            rows: [B], which rows of the batch these are, for their seeds.

        Returns:
            [B, N, V]; the logits themselves when greedy.
        """
        if self.temperature == 0:
            return logits
        starts = [root + 1 for root in root_positions]
        num, vocab_size = tree.max_depth + 1, logits.shape[-1]
        noise = self.noise_from(starts, num, vocab_size, logits.device, rows)
        each = torch.arange(len(noise), device=logits.device)[:, None]
        return self.warp(logits) + noise[each, tree.depths]

    def noise_from(
        self,
        starts: Sequence[int],
        num: int,
        vocab_size: int,
        device: torch.device,
        rows: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the noise of the draws at ``num`` positions from each row's start on.

        It is kept, as the trees of two steps share most of their positions, and with small
        vocabularies made for many positions at once: two dozen operations on a few hundred numbers
        cost as much as on some thousands.

        Args:
            starts: [B], the first position of each row.
            num: positions per row.
            vocab_size: V.
            device: of the noise.
            rows: [B], which rows of the batch these are, for their seeds; 0 to B - 1 if None.

        Returns:
            [B, num, V] float32, as :func:`gumbel_noise` makes it.
        """
        numbers = range(len(starts)) if rows is None else rows
        seeds = self.seeds_of(numbers)
        size = max(1, min(64, _KEPT_NOISE // vocab_size))
        if len(starts) * (2 + (num - 1) // size) > _KEPT_BLOCKS:
            ahead = torch.arange(num, device=device)
            positions = torch.tensor(starts, device=device)[:, None] + ahead
            return gumbel_noise(seeds, positions, vocab_size)
        pieces = []
        for seed, start in zip(seeds, starts, strict=True):
            blocks = range(start // size, (start + num - 1) // size + 1)
            made = [_noise_block(seed, block, size, vocab_size, device) for block in blocks]
            whole = torch.cat(made) if len(made) > 1 else made[0]
            pieces.append(whole[start % size :][:num])
        return torch.stack(pieces) if len(pieces) > 1 else pieces[0][None]

    def near_ties(self, logits: Tensor, scores: Tensor, *, rounding: float = ROUNDING) -> Tensor:
        """Tell where rounding might change a draw: the two best scores are closer than it.

        What a cut has removed is not looked at: see :class:`Survivors`.

        Args:
            logits: [..., V], as the model gave them; their size sets the size of rounding.
            scores: [..., V].
            rounding: of a difference of two logits, relative to the largest.

        Returns:
            [...] bool.
        """
        best = scores.topk(2, dim=-1).values
        slack = rounding * logits.abs().amax(-1) / (self.temperature or 1.0)
        return best[..., 0] - best[..., 1] < slack


_NUCLEUS = 1024  # tokens among which most distributions have their top-p


def _nucleus(scores: Tensor, p: float, num: int = _NUCLEUS) -> Tensor:
    """Set scores [..., V] to -inf but for the fewest best that together reach probability ``p``.

    The best ``num`` are looked at first, and of rows in which these are not enough, all. To sort
    a large vocabulary takes longer than all else that a draw needs.
    """
    num_tokens = scores.shape[-1]
    best, index = scores.topk(min(num, num_tokens), dim=-1)
    # sums in float64: near 1, a token's probability is less than what float32 rounds away
    total = (scores - best[..., :1]).exp().sum(-1, keepdim=True, dtype=torch.float64)
    weights = (best - best[..., :1]).exp().double()
    cut = weights.cumsum(-1) - weights >= p * total  # what stands before a token is enough
    cut[..., 0] = False
    best.masked_fill_(cut, -math.inf)
    left = torch.full_like(scores, -math.inf).scatter_(-1, index, best)
    flat = ~cut[..., -1]
    if num < num_tokens and flat.any():
        left[flat] = _nucleus(scores[flat], p, num_tokens)
    return left


class Survivors:
    """Which tokens are left by cuts, where rounding may have moved every score.

    A cut leaves the upper end of the scores. Each method is told of one, in their order, and finds
    between which two bounds its edge is for all scores that rounding could have given.

    Args:
        scores: [..., V], before the first cut.
        slack: [..., 1], how far rounding may move two of them against each other.

    Attributes:
        scores: [..., V], without any cut.
        slack: [..., 1].
        possible: [..., V] bool, tokens that may be left.
        certain: [..., V] bool, tokens that are left in any case.
    """

    def __init__(self, scores: Tensor, slack: Tensor) -> None:
        self.scores, self.slack = scores.float(), slack
        self.possible = self.certain = torch.ones_like(scores, dtype=torch.bool)

    def temper(self, temperature: float) -> None:
        """Divide by a temperature."""
        self.scores, self.slack = self.scores / temperature, self.slack / temperature

    def top_k(self, k: int) -> None:
        """Cut all but the ``k`` best."""
        self._cut(*self._best(k))

    def top_p(self, p: float, at_least: int = 1) -> None:
        """Cut all but the best that together reach probability ``p``, and ``at_least`` as many."""
        ordered, index = self.scores.masked_fill(~self.possible, -math.inf).sort(dim=-1)
        weights = (ordered - ordered[..., -1:]).exp()
        possible, certain = (kept.gather(-1, index) for kept in (self.possible, self.certain))
        total = (weights * possible).sum(-1, keepdim=True)
        # what stands at a token and below it, at most and at least; the odds of such a share move
        # by no more than a score does
        most, least = ((weights * kept).cumsum(-1) / total for kept in (possible, certain))
        odds, slack = torch.tensor(1.0 - p).logit(), self.slack + _SUMS
        cut = most <= (odds - slack).sigmoid()
        low = ordered.masked_fill(cut, math.inf).amin(-1, keepdim=True) - self.slack
        cut = certain & (least <= (odds + slack).sigmoid())
        high = ordered.masked_fill(~cut, -math.inf).amax(-1, keepdim=True) + self.slack
        self._cut(low, high, at_least)

    def min_p(self, p: float, at_least: int = 1) -> None:
        """Cut what is less than ``p`` times as likely as the best, but ``at_least`` as many."""
        least, most = (
            self.scores.masked_fill(~kept, -math.inf).amax(-1, keepdim=True) + math.log(p or 1e-45)
            for kept in (self.certain, self.possible)
        )
        slack = self.slack + _SUMS
        self._cut(least - slack, most + slack, at_least)

    def other(self, cut: Callable[[Tensor], Tensor]) -> None:
        """Cut where ``cut`` gives -inf; of its edge nothing is known, rounding may not move it."""
        self.possible, self.certain = (
            kept & cut(self.scores.masked_fill(~kept, -math.inf)).isfinite()
            for kept in (self.possible, self.certain)
        )

    def undecided(self, noised: Tensor) -> Tensor:
        """Tell where rounding might change which token is the best of those left.

        Args:
            noised: [..., V], ``scores`` with the noise of their draw.

        Returns:
            [...] bool.
        """
        best = noised.masked_fill(~self.possible, -math.inf).topk(2, dim=-1)
        close = best.values[..., 0] - best.values[..., 1] < self.slack[..., 0]
        return close | ~self.certain.gather(-1, best.indices[..., :1])[..., 0]

    def _cut(self, low: Tensor, high: Tensor, at_least: int = 0) -> None:
        """Cut below an edge between ``low`` and ``high`` [..., 1], but leave some of the best."""
        if at_least:
            lowest, highest = self._best(at_least)
            low, high = torch.minimum(low, lowest), torch.minimum(high, highest)
        self.possible = self.possible & (self.scores >= low)
        self.certain = self.certain & (self.scores > high)

    def _best(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the bounds [..., 1] of the edge below the ``k`` best."""
        if k >= self.scores.shape[-1]:
            nothing = torch.full_like(self.slack, -math.inf)
            return nothing, nothing
        most = self.scores.masked_fill(~self.possible, -math.inf).topk(k + 1).values
        least = most
        if self.certain is not self.possible:
            least = self.scores.masked_fill(~self.certain, -math.inf).topk(k).values
        return least[..., k - 1 : k] - self.slack, most[..., k : k + 1] + self.slack
