"""Noise that belongs to a position: a pure function of (seed, row, absolute position, token).

Counter-based (the splitmix64 finaliser over a lattice), hence without state, equal on every device,
and free to be asked for any position at any time. Each use has a stream of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

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
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@lru_cache(maxsize=16)
def _lattice(vocab_size: int, device: torch.device) -> Tensor:
    return torch.arange(1, vocab_size + 1, device=device) * _TOKEN_STEP


def gumbel_noise(
    seed: int, positions: Tensor, vocab_size: int, rows: Sequence[int] | None = None
) -> Tensor:
    """Return standard Gumbel noise that depends on nothing but its arguments.

    Args:
        seed: any integer; row b uses ``seed + b``, so that a row of a batch draws what it would
            draw alone with that seed.
        positions: [B, ...] long, absolute positions of the tokens to be drawn.
        vocab_size: V.
        rows: [B], which rows these are; 0 to B - 1 if None.

    Returns:
        [B, ..., V] float32.
    """
    return gumbel(keys_of(seed, positions, rows), vocab_size)


def draft_noise(
    seed: int,
    root_positions: Tensor,
    num_levels: int,
    vocab_size: int,
    rows: Sequence[int] | None = None,
) -> Tensor:
    """Return Gumbel noise for a drafter that samples, unrelated to all other noise.

    It belongs to the root's position and the level, not to the guessed token's position: a
    position is guessed at in several steps, and whether it was reached may depend on the guess.

    Args:
        seed: as in :func:`gumbel_noise`.
        root_positions: [B] long.
        num_levels: of the tree, or whatever draws are to be independent.
        vocab_size: V.
        rows: [B], which rows these are; 0 to B - 1 if None.

    Returns:
        [B, num_levels, V] float32.
    """
    levels = torch.arange(num_levels, device=root_positions.device) * SITE_STEP
    keys = keys_of(seed, root_positions, rows, DRAFT)[:, None] + levels
    return gumbel(keys, vocab_size)


def keys_of(seed: int, positions: Tensor, rows: Sequence[int] | None, stream: int = 0) -> Tensor:
    """Return what the noise at positions [B, ...] is made from, [B, ...]."""
    numbers = range(positions.shape[0]) if rows is None else rows
    seeds = [_mix_seed(seed + row) for row in numbers]
    if stream:
        seeds = [_mix_seed(mixed + stream) for mixed in seeds]
    first = torch.tensor(seeds, device=positions.device)
    return first.view(-1, *[1] * (positions.dim() - 1)) + positions * _POSITION_STEP


def uniform(keys: Tensor, num: int) -> Tensor:
    """Return ``num`` numbers strictly inside (0, 1) for each key, [...] to [..., num] float64."""
    x = keys[..., None] + _lattice(num, keys.device)
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - (1 << 64))
    x = x ^ _shifted(x, 31)
    return (_shifted(x, 11).double() + 0.5) * 2.0**-53


def gumbel(keys: Tensor, num: int) -> Tensor:
    """Return ``num`` standard Gumbel numbers for each key, [...] to [..., num] float32."""
    return uniform(keys, num).log_().neg_().log_().neg_().float()


def noise_ahead(
    seed: int,
    starts: Sequence[int],
    num: int,
    vocab_size: int,
    device: torch.device,
    rows: Sequence[int] | None = None,
) -> Tensor:
    """Return the noise of :func:`gumbel_noise` at ``num`` positions from each row's start on.

    With small vocabularies it is made for many positions at once and kept: two dozen operations on
    a few hundred numbers cost as much as on some thousands.

    Args:
        seed: row b uses ``seed + b``.
        starts: [B], the first position of each row.
        num: positions per row.
        vocab_size: V.
        device: of the noise.
        rows: [B], which rows these are.

    Returns:
        [B, num, V] float32.
    """
    numbers = range(len(starts)) if rows is None else rows
    size = min(64, _KEPT_NOISE // vocab_size)
    if size < 2 * num:
        positions = torch.tensor(starts, device=device)[:, None] + torch.arange(num, device=device)
        return gumbel_noise(seed, positions, vocab_size, numbers)
    pieces = []
    for row, start in zip(numbers, starts, strict=True):
        block, first = divmod(start, size)
        noise = _noise_block(seed + row, block, size, vocab_size, device)[first : first + num]
        if len(noise) < num:
            following = _noise_block(seed + row, block + 1, size, vocab_size, device)
            noise = torch.cat([noise, following[: num - len(noise)]])
        pieces.append(noise)
    return torch.stack(pieces) if len(pieces) > 1 else pieces[0][None]


_KEPT_NOISE = 1 << 14  # numbers per block


@lru_cache(maxsize=64)
def _noise_block(seed: int, block: int, size: int, vocab_size: int, device: torch.device) -> Tensor:
    positions = torch.arange(block * size, (block + 1) * size, device=device)
    return gumbel_noise(seed, positions[None], vocab_size)[0]
