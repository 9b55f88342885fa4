"""What the heads guessed and what came: the facts from which the gain of any tree is counted.

The text that tree decoding writes is the text that plain decoding writes. So one plain decoding of
each prompt, and one look at what every head ranked where along it, tells exactly how many tokens
any tree would have gained at every step, without decoding with that tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from specheads.config import ConfigError
from specheads.decoding.plain import plain_decode
from specheads.drafters.made import embedding
from specheads.models.hidden import capture_hidden
from specheads.models.kinds import Heads
from specheads.models.output import OutputLayer
from specheads.sampling import Sampler

MISS = 1 << 30  # the rank of a token that no tree may hold: too unlikely, or beyond the end
NUM_RANKS = 10  # guesses per head that a tree may use
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
    came: all that counts for a tree is what they guess below the accepted ones.

    Attributes:
        ranks: [S, K] long, which guess of head d is the token that came ``d + 1`` after the root;
            ``MISS`` if none of the R is.
        logits: [S, K, R], those of the guesses, descending.
        came: [S, K], the logit of the token that came; NaN beyond the end, and where the head knows
            no such token.
        norms: [S, K, G], logsumexp of all logits divided by each of ``TEMPERATURES``.
        ended: whether the text ends after these positions.
        hidden: [S, d], what the heads read; None for parallel heads, which are not asked again.
            Of sequential MTP heads [P - 1 + S, d], all that the base made up to the last root.
        tokens: [S, K + 1], the root and what came after it, -1 beyond the end; None likewise.
        ahead: [P - 1 + S], of sequential MTP heads: the token after each hidden state; else None.
    """

    ranks: Tensor
    logits: Tensor
    came: Tensor
    norms: Tensor
    ended: bool
    hidden: Tensor | None = None
    tokens: Tensor | None = None
    ahead: Tensor | None = None


@torch.inference_mode()
def measure_hits(
    base: PreTrainedModel,
    heads: Heads,
    output: OutputLayer,
    sequence: Tensor,
    num_prompt: int,
    *,
    ended: bool,
) -> Hits:
    """Compare the heads' guesses with the tokens that came.

    Args:
        base: base model.
        heads: heads on its last hidden state.
        output: its output layer.
        sequence: prompt and new tokens, [1, P + L].
        num_prompt: P.
        ended: whether the last token is an end of text.
    """
    with capture_hidden(base, (heads.tap,)) as captured:
        base(input_ids=sequence, use_cache=False, logits_to_keep=1)
    whole, embed = captured.at[heads.tap], embedding(base, heads)
    places = torch.arange(whole.shape[1], device=whole.device)[None]
    hidden = heads.contextual(whole, places, sequence.to(whole.device), embed).squeeze(-3)
    new = sequence[0, num_prompt:].to(hidden.device)
    num_new, num_heads = len(new), heads.num_heads
    # There is no step with the last token as its root, and near a cut the limit hides guesses: a
    # step may gain one token more than there are heads.
    positions = max(num_new - (1 if ended else num_heads + 1), 0)
    # The root's own hidden state is not known yet when the heads guess: theirs is the one before.
    start = num_prompt - 1
    hidden = hidden[..., start : start + positions, :]
    places = torch.arange(num_heads + 1, device=new.device) + torch.arange(
        positions, device=new.device
    ).view(-1, 1)
    known = places < num_new
    tokens = new[places.clamp(max=num_new - 1)]  # [S, K + 1]
    # what a head reads beyond the end is nothing that it could be asked about
    logits = heads.logits(hidden, output, tokens, embed).float()  # [K, S, V']
    # in the order of the drafter's own top-k, for equal logits are common in bfloat16
    best = logits.topk(min(NUM_RANKS, logits.shape[-1]), dim=-1)
    wanted = heads.map_labels(tokens[:, 1:]).T.masked_fill(~known[:, 1:].T, -1)  # [K, S]
    hit = best.indices == wanted[..., None]  # [K, S, R]
    ranks = torch.where(hit.any(-1), hit.int().argmax(-1), MISS)
    came = logits.gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
    came = came.masked_fill(wanted < 0, torch.nan)
    norms = torch.stack([(logits / each).logsumexp(-1) for each in TEMPERATURES], dim=-1)
    ranks, values, came, norms = (
        each.transpose(0, 1).cpu() for each in (ranks, best.values, came, norms)
    )
    found = Hits(ranks, values, came, norms, ended)
    if not heads.sequential:
        return found
    found = replace(found, tokens=tokens.masked_fill(~known, -1).cpu())
    if heads.kind != "mtp":
        return replace(found, hidden=hidden.cpu())
    end = start + positions  # MTP heads read more than one hidden state
    return replace(found, hidden=whole[0, :end].cpu(), ahead=sequence[0, 1 : end + 1].cpu())


def collect_hits(
    base: PreTrainedModel,
    heads: Heads,
    output: OutputLayer,
    prompts: Sequence[Tensor],
    *,
    eos_token_ids: Sequence[int],
    max_new_tokens: int = 64,
    temperatures: Sequence[float] = (0.0, 1.0),
    seed: int = 0,
    progress: Callable[[Sequence[int]], Any] = iter,
) -> list[list[Hits]]:
    """Decode plainly from every prompt; return its hits, one text per temperature.

    The arguments are those of :func:`specheads.decoding.calibrate.calibrate`.

    Raises:
        ValueError: if there are no prompts.
        ConfigError: if their texts are too short to measure anything.
    """
    if not prompts:
        raise ValueError("prompts must hold at least 1 prompt, got 0")
    found: list[list[Hits]] = []
    for first in progress(range(0, len(prompts), ROWS)):
        rows = prompts[first : first + ROWS]
        input_ids, attention_mask = pad_left(rows)
        texts: list[list[Hits]] = [[] for _ in rows]
        for temperature in temperatures:
            result = plain_decode(
                base,
                input_ids,
                attention_mask=attention_mask,
                max_new_tokens=max_new_tokens,
                sampler=Sampler(temperature=temperature, seed=seed + first),
                eos_token_ids=tuple(eos_token_ids),
            )
            for prompt, row, of_prompt in zip(rows, result.rows, texts, strict=True):
                sequence = torch.cat([prompt, prompt.new_tensor([row.new_tokens])], dim=1)
                of_prompt.append(
                    measure_hits(base, heads, output, sequence, prompt.shape[1], ended=row.finished)
                )
        found += texts
    if not any(len(text.ranks) for texts in found for text in texts):
        if all(text.ended for texts in found for text in texts):
            raise ConfigError("the base ends every text with its first token")
        raise ConfigError(
            f"max_new_tokens {max_new_tokens} leaves no position to measure "
            f"{heads.num_heads} heads at, over {len(prompts)} prompts; give more"
        )
    return found


def pad_left(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return prompts [1, P] of several lengths as one batch [B, T], and its attention mask."""
    longest = max(prompt.shape[1] for prompt in prompts)
    rows = [F.pad(prompt, (longest - prompt.shape[1], 0)) for prompt in prompts]
    real = [F.pad(torch.ones_like(prompt), (longest - prompt.shape[1], 0)) for prompt in prompts]
    return torch.cat(rows), torch.cat(real)


def fit_temperatures(hits: Sequence[Sequence[Hits]]) -> list[float]:
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
