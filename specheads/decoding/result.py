"""What decoding returns, and the one rule by which both loops emit, count and stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from specheads.attention.cache import TreeCache
from specheads.decoding.processors import Rows, copy_for_row
from specheads.models.base import context_length
from specheads.models.forward import check_sides
from specheads.system.errors import check
from specheads.verification.sampling import Sampler

OnTokens = Callable[[int, list[int]], None]
Stopping = Callable[..., Tensor]  # transformers: (input_ids [B, T], scores) -> [B] bool


@dataclass
class DecodedRow:
    """What one row of a batch was continued with.

    Attributes:
        new_tokens: the end-of-sequence token included.
        accept_lengths: per step the tokens it emitted; they sum to one less than ``new_tokens``, as
            the prefill gives one.
        finished: ended by an end-of-sequence token or a stopping criterion, not by the limit.
        num_replays: near-ties that were settled by replaying the text plainly.
        num_replay_passes: forward passes of the base model that replays took, which are no steps.
        divergences: under a lossy rule, per token but the first: KL divergence in nats and total
            variation, of the distribution that it was drawn from to the base model's.
    """

    new_tokens: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)
    finished: bool = False
    num_replays: int = 0
    num_replay_passes: int = 0
    divergences: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True)
class DecodeResult:
    """The decoded rows.

    The attributes of :class:`DecodedRow` are here too, for a batch of one.

    Attributes:
        sequences: [B, P+L]: the prompts as they were given, the new tokens, padding on the right.
        num_steps: forward passes of the base model after the prefill, for the whole batch; those of
            replays are not among them, see ``num_replay_passes``.
        rows: one per prompt.
        cache: the KV cache that was handed in, with all tokens of a row in it but the last.
        scores: with ``keep_scores``: per new token [B, V], what it was chosen from, without noise;
            0 where a row has ended.
        logits: likewise, as the base model gave them.
        sequences_scores: of beams: [rows], the sum of a text's log-probabilities over its length to
            the power of the length penalty.
    """

    sequences: Tensor
    num_steps: int
    rows: tuple[DecodedRow, ...]
    cache: TreeCache | None = None
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    sequences_scores: Tensor | None = None

    @property
    def _only_row(self) -> DecodedRow:
        if len(self.rows) != 1:
            raise ValueError(f"there are {len(self.rows)} rows: read result.rows[i]")
        return self.rows[0]

    @property
    def new_tokens(self) -> list[int]:
        """The new tokens of the only row."""
        return self._only_row.new_tokens

    @property
    def accept_lengths(self) -> list[int]:
        """The tokens per step of the only row."""
        return self._only_row.accept_lengths

    @property
    def finished(self) -> bool:
        """Whether the only row ended by itself."""
        return self._only_row.finished

    @property
    def num_replays(self) -> int:
        """Near-ties that were settled by a replay, in all rows."""
        return sum(row.num_replays for row in self.rows)

    @property
    def num_replay_passes(self) -> int:
        """Forward passes of the base model that replays took, in all rows."""
        return sum(row.num_replay_passes for row in self.rows)

    @property
    def accept_length(self) -> float:
        """Mean tokens per step and row; 1 for plain decoding."""
        lengths = [length for row in self.rows for length in row.accept_lengths]
        return sum(lengths) / max(1, len(lengths))

    @property
    def divergence(self) -> dict[str, float]:
        """Under a lossy rule mean and largest ``kl`` (nats) and ``tv`` per token; else empty."""
        return mean_divergence(self.rows)


def mean_divergence(rows: Iterable[DecodedRow]) -> dict[str, float]:
    """Return what :attr:`DecodeResult.divergence` is, of some rows."""
    pairs = [pair for row in rows for pair in row.divergences]
    found: dict[str, float] = {}
    for name, values in zip(("kl", "tv"), zip(*pairs, strict=True), strict=False):
        found |= {name: sum(values) / len(values), f"{name}_max": max(values)}
    return found


def divergence_said(found: Mapping[str, float]) -> str:
    """Return a divergence that was measured under a lossy rule in words, ahead of other words."""
    if not found or math.isnan(found["tv"]):
        return "divergence from the base not measured"
    if math.isnan(found["kl"]):  # of draws that were converted
        return (
            f"{found['tv']:.1%} of the tokens are not the base's draws, which the mean total"
            " variation per token is at most; KL not measured"
        )
    kl, tv = (f"{found[name]:.4f} (at most {found[f'{name}_max']:.4f})" for name in ("kl", "tv"))
    return f"divergence from the base per token: KL in nats {kl}, total variation {tv}"


@dataclass(frozen=True)
class Limits:
    """When rows end, and what is told and kept of them until then.

    Attributes:
        max_new_tokens: limit per row; the end-of-sequence token counts. 0 where rows are given
            limits of their own.
        eos_token_ids: tokens that end a row.
        stopping_criteria: one, or a list of them, asked after every token about one row [1, T] at
            a time, without padding. Those of unknown type are copied for every row but the first,
            as they may keep a state; functions are taken to keep none.
        on_tokens: called with a row's number and its new tokens, for every row and step.
        keep_scores: keep what every token was chosen from; it costs 2 V numbers per token.
    """

    max_new_tokens: int = 0
    eos_token_ids: Collection[int] = ()
    stopping_criteria: Stopping | None = None
    on_tokens: OnTokens | None = None
    keep_scores: bool = False


class Output:
    """The texts so far; says when each of them ends, and counts what they took.

    Args:
        prompts: per row, without padding.
        device: of the texts given to stopping criteria.
        asked: of all rows.

    Attributes:
        rows: per row what has been emitted.
        texts: per row its prompt and its new tokens.
        kept: per row, and token, the logits [V] and scores [V] that it was chosen from.
        num_tokens: that all rows together were given.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], device: torch.device, asked: Limits
    ) -> None:
        rules: Any = asked.stopping_criteria or []
        self._rules = rules if isinstance(rules, list) else [rules]
        self.device, self.asked = device, asked
        self.rows: list[DecodedRow] = []
        self.texts: list[list[int]] = []
        self.limits: list[int] = []
        self.ends: list[Collection[int]] = []
        self.criteria: list[list[Stopping]] = []
        self.kept: list[list[tuple[Tensor, Tensor]]] | None = [] if asked.keep_scores else None
        self.num_calls = self.num_tokens = 0
        self._removed: list[int] = []
        for prompt in prompts:
            self.add(prompt, asked.max_new_tokens)

    def add(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        ends: Collection[int] = (),
        criteria: Sequence[Stopping] = (),
    ) -> int:
        """Begin one more row, and return its number; one that was removed is used again.

        Args:
            prompt: without padding.
            max_new_tokens: its limit.
            ends: tokens that end it beside those that end all rows.
            criteria: asked beside those of all rows.
        """
        row = self._removed.pop() if self._removed else len(self.rows)
        own = [copy_for_row(each, row, "stopping criterion") for each in self._rules]
        here = slice(row, row + 1)  # a new place at the end, or one that is used again
        self.rows[here], self.texts[here] = [DecodedRow()], [list(prompt)]
        self.limits[here], self.ends[here] = [max_new_tokens], [ends]
        self.criteria[here] = [[*own, *criteria]]
        if self.kept is not None:
            self.kept[here] = [[]]
        return row

    def remove(self, row: int) -> None:
        """Forget a row that has ended, and give its number to the next that is added."""
        self.rows[row], self.texts[row], self.criteria[row] = DecodedRow(), [], []
        if self.kept is not None:
            self.kept[row] = []
        self._removed.append(row)

    def at(self, numbers: Sequence[int]) -> Rows:
        """Return some rows as they stand."""
        texts = [self.texts[row] for row in numbers]
        return Rows(numbers, texts, [self.budget(row) > 0 for row in numbers])

    def budget(self, row: int) -> int:
        """Return how many tokens the row may still get; 0 where it has ended."""
        decoded = self.rows[row]
        return 0 if decoded.finished else self.limits[row] - len(decoded.new_tokens)

    def num_prompt(self, row: int) -> int:
        """Return how many tokens the row's prompt has."""
        return len(self.texts[row]) - len(self.rows[row].new_tokens)

    def emit(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> list[int]:
        """Append what one forward pass gave to each of ``rows``, up to the token that ends it.

        The first call is the prefill's; later calls each count as a step.

        Returns:
            How many tokens each of them kept; 0 where it had ended before.
        """
        kept = [self._append(row, gained) for row, gained in zip(rows, tokens, strict=True)]
        self.num_calls += 1
        return kept

    def _append(self, row: int, tokens: Sequence[int]) -> int:
        decoded, kept = self.rows[row], 0
        begun = bool(decoded.new_tokens)  # by the prefill, which is no step
        if not self.budget(row):
            return 0
        for token in tokens[: self.budget(row)]:
            decoded.new_tokens.append(token)
            self.texts[row].append(token)
            kept += 1
            ended = token in self.asked.eos_token_ids or token in self.ends[row]
            if ended or self._stops(row):
                decoded.finished = True
                break
        self.num_tokens += kept
        if begun:
            decoded.accept_lengths.append(kept)
        if self.asked.on_tokens is not None:
            self.asked.on_tokens(row, decoded.new_tokens[-kept:])
        return kept

    def keep(
        self, rows: Rows, path: Tensor, logits: Tensor, processed: Tensor, sampler: Sampler
    ) -> None:
        """Keep what the tokens of accepted paths were chosen from, if that was asked for.

        Args:
            rows: B rows, before their tokens are emitted.
            path: [B, D+1], the accepted nodes, padded with -1.
            logits: [B, N, V], as the base model gave them.
            processed: [B, N, V], after all processors.
            sampler: whose temperature and cuts belong to the scores.
        """
        if self.kept is None:
            return
        for i, (row, going) in enumerate(zip(rows.numbers, rows.going, strict=True)):
            if going:
                nodes = path[i, path[i] >= 0]
                scores = sampler.warped(processed[i, nodes])
                # copies: a view would keep the logits of the whole tree in memory
                own = logits[i, nodes].float().clone()
                self.kept[row] += zip(own, scores.clone(), strict=True)

    def _stops(self, row: int) -> bool:
        if not self.criteria[row]:
            return False
        ids = torch.tensor([self.texts[row]], device=self.device)
        # all of them are asked, as one may count the tokens
        return any([met(each, ids) for each in self.criteria[row]])

    def result(self, input_ids: Tensor, pad_token_id: int, cache: TreeCache | None) -> DecodeResult:
        """Freeze."""
        texts = [row.new_tokens for row in self.rows]
        longest = max(map(len, texts))
        new = [text + [pad_token_id] * (longest - len(text)) for text in texts]
        return DecodeResult(
            sequences=torch.cat([input_ids, torch.tensor(new, device=input_ids.device)], dim=1),
            num_steps=self.num_calls - 1,
            rows=tuple(self.rows),
            cache=cache,
            logits=self._kept(0, longest),
            scores=self._kept(1, longest),
        )

    def _kept(self, which: int, num_tokens: int) -> tuple[Tensor, ...] | None:
        if self.kept is None:
            return None
        # a step may have accepted more than the row could take
        kept = [k[: len(row.new_tokens)] for k, row in zip(self.kept, self.rows, strict=True)]
        nothing = torch.zeros_like(kept[0][0][which])
        return tuple(
            torch.stack([row[i][which] if i < len(row) else nothing for row in kept])
            for i in range(num_tokens)
        )


def met(criterion: Stopping, ids: Tensor) -> bool:
    """Ask a criterion about one row's text [1, T]."""
    answer: object = criterion(ids, None)
    if isinstance(answer, bool) or (isinstance(answer, Tensor) and answer.shape in ((), (1,))):
        return bool(answer)
    got = list(answer.shape) if isinstance(answer, Tensor) else repr(answer)
    name = getattr(criterion, "__name__", type(criterion).__name__)
    raise ValueError(
        f"stopping criterion {name} is asked about one row at a time, [1, {ids.shape[1]}], and has"
        f" to answer a bool of shape [1], got {got}"
    )


def pad_left(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return prompts [1, P] of several lengths as one batch [B, T], and its attention mask."""
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    rows = [prompt[0] for prompt in prompts]
    return pad(rows), pad([torch.ones_like(row) for row in rows])


def read_prompts(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None, max_new_tokens: int
) -> list[list[int]]:
    """Return the rows of ``input_ids`` [B, P] without their padding.

    Args:
        model: for its context length.
        input_ids: left-padded where rows differ in length.
        attention_mask: [B, P], 0 on padding; None is all ones.
        max_new_tokens: that each row is to be continued with.

    Raises:
        ValueError: for no rows or an empty one, a mask of another shape or one that is not left
            padding, more tokens than the model has positions, or a batch that a position threshold
            of the model divides.
    """
    shape = list(input_ids.shape)
    check(len(shape) == 2 and shape[0] > 0, "input_ids", shape, "[B, P] with at least 1 row")
    check(max_new_tokens >= 1, "max_new_tokens", max_new_tokens, "at least 1")
    rows: list[list[int]] = input_ids.tolist()
    if attention_mask is not None:
        given = list(attention_mask.shape)
        check(given == shape, "shape of attention_mask", given, f"that of input_ids, {shape}")
        masks: list[list[int]] = attention_mask.long().tolist()
        for i, mask in enumerate(masks):
            if mask != sorted(mask):
                raise ValueError(f"attention_mask row {i} is not left padding: zeros, then ones")
        rows = [row[mask.count(0) :] for row, mask in zip(rows, masks, strict=True)]
    context = context_length(model)
    for i, row in enumerate(rows):
        check(bool(row), f"length of input_ids row {i}", 0, "at least 1 token")
        whole = len(row) + max_new_tokens
        if context is not None and whole > context:
            raise ValueError(
                f"prompt of {len(row)} plus max_new_tokens {max_new_tokens} is {whole} tokens, but"
                f" the model's context is {context}"
            )
    check_sides(model, rows, max_new_tokens)
    return rows
