"""How well a draft model matches its base, measured on the base's own continuations.

At each token that a verify step would decide, the draft's distribution is laid over the base's;
Leviathan's alpha is the mean of what they share (arXiv:2211.17192, definition 3.1). Nothing is
drafted: given the text, what a chain of any length would have gained follows from the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.plain import plain_decode
from specheads.models.base import input_device, input_embedding
from specheads.sampling import Sampler

_AT_ONCE = 1 << 24  # probabilities compared at one time


@dataclass(frozen=True)
class Agreement:
    """Base and draft along one text of the base; of each verified token, T of them.

    Verified are all new tokens but the first, which the prefill gives.

    Attributes:
        shared: sum over the vocabulary of min(base, draft).
        kept: the probability that a sampled guess was accepted, given that this token came out:
            min(1, draft / base) of the token. Its mean over texts is that of ``shared``.
        best: whether the draft's best guess is this token: what a greedy draft is accepted by.
        limit: tokens that there was room for; the text is shorter if it ended by itself.
    """

    shared: list[float]
    kept: list[float]
    best: list[bool]
    limit: int


@dataclass(frozen=True)
class Alpha:
    """Agreement over all texts.

    Attributes:
        alpha: mean over verified tokens of sum_x min(base, draft); greedy: the share of tokens
            that are the draft's best guess. 0 where there was nothing to verify.
        acceptance_rate: accepted over proposed of a chain that is verified token by token, one
            guess at a time: alpha as the practitioner counts it. :meth:`chain` has it for more.
        num_tokens: verified tokens.
        per_prompt: alpha of each prompt; 0 where a text had one token.
        texts: the numbers behind it.
    """

    alpha: float
    acceptance_rate: float
    num_tokens: int
    per_prompt: list[float]
    texts: list[Agreement]

    @staticmethod
    def of(texts: Sequence[Agreement]) -> Alpha:
        """Sum up texts."""
        num = sum(len(text.shared) for text in texts)
        singly = total(replay_chain(text.kept, 1, text.limit) for text in texts)
        return Alpha(
            alpha=sum(sum(text.shared) for text in texts) / max(1, num),
            acceptance_rate=singly.acceptance_rate,
            num_tokens=num,
            per_prompt=[sum(text.shared) / max(1, len(text.shared)) for text in texts],
            texts=list(texts),
        )

    def chain(self, num_tokens: int, *, sampled: bool = True) -> Gained:
        """Return what chains of ``num_tokens`` guesses are expected to gain on these texts.

        Args:
            num_tokens: guesses per step, at least 1.
            sampled: drawn from the draft and verified by speculative sampling; else the draft's
                best ones.
        """
        rates = ((text.kept if sampled else text.best, text.limit) for text in self.texts)
        return total(replay_chain(each, num_tokens, limit) for each, limit in rates)


@dataclass(frozen=True)
class Gained:
    """Expected numbers of steps, proposed and accepted tokens, and tokens gained."""

    steps: float = 0.0
    proposed: float = 0.0
    accepted: float = 0.0
    tokens: float = 0.0

    @property
    def accept_length(self) -> float:
        """Tokens per verify step, the base's own included."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0


def total(parts: Iterable[Gained]) -> Gained:
    """Add up texts."""
    rows = [(each.steps, each.proposed, each.accepted, each.tokens) for each in parts]
    return Gained(*map(sum, zip(*rows, strict=True))) if rows else Gained()


def replay_chain(rates: Sequence[float], num_tokens: int, limit: int) -> Gained:
    """Return what chains of guesses are expected to gain along one text.

    Given the text, guesses are accepted independently of each other: which token comes out does
    not depend on whether it was a guess. So the expectation is exact, correlations of easy and hard
    places included, which a formula with one alpha leaves out.

    Args:
        rates: per token of the text the probability that its guess is accepted.
        num_tokens: guesses per step; fewer where ``limit`` leaves no room for them.
        limit: tokens that the text had room for, at least as many as there are rates.

    Raises:
        ValueError: if ``num_tokens`` is below 1.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
    length = len(rates)
    starts = [1.0, *[0.0] * (length + num_tokens)]  # probability that a step starts here
    steps = proposed = accepted = 0.0
    for start in range(length):
        alive = starts[start]
        depth = min(num_tokens, limit - start - 1)
        steps += alive
        proposed += alive * depth
        for i in range(start, start + depth):
            if i == length:  # the text ended within the guesses
                break
            starts[i + 1] += alive * (1 - rates[i])
            alive *= rates[i]
            accepted += alive
        else:
            starts[start + depth + 1] += alive
    return Gained(steps, proposed, accepted, float(length))


def measure_alpha(
    base: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Tensor],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int = 0,
    eos_token_ids: Sequence[int] = (),
) -> Alpha:
    """Let the base continue ``prompts`` and compare the draft's distributions with its own.

    Args:
        base: base model, in eval mode.
        draft: draft model with the same tokenizer, in eval mode; another dtype or device is fine.
            Outputs beyond the base's vocabulary are never guessed.
        prompts: token ids [1, P] each.
        max_new_tokens: per prompt.
        temperature: of the texts and of both distributions; 0: greedy, each is its best token.
        seed: prompt n is continued with ``seed + n``.
        eos_token_ids: tokens that end a text.
    """
    texts = []
    for n, prompt in enumerate(prompts):
        sampler = Sampler(temperature=temperature, seed=seed + n)
        result = plain_decode(
            base,
            prompt,
            max_new_tokens=max_new_tokens,
            sampler=sampler,
            eos_token_ids=eos_token_ids,
        )
        text = [*prompt[0].tolist(), *result.new_tokens]
        texts.append(agreement(base, draft, text, prompt.shape[1] + 1, sampler, max_new_tokens - 1))
    return Alpha.of(texts)


@torch.inference_mode()
def agreement(
    base: PreTrainedModel,
    draft: PreTrainedModel,
    text: Sequence[int],
    first: int,
    sampler: Sampler,
    limit: int,
) -> Agreement:
    """Compare base and draft at the tokens ``text[first:]``, each given all tokens before it.

    Args:
        base: base model.
        draft: draft model.
        text: prompt and continuation.
        first: index of the first token compared, at least 1.
        sampler: makes distributions of logits.
        limit: see :class:`Agreement`.
    """
    num = len(text) - first
    if num < 1:
        return Agreement([], [], [], limit)
    base_logits = _logits_before(base, text, num)
    draft_logits = fit_vocabulary(
        _logits_before(draft, text, num).to(base_logits.device), base_logits.shape[-1]
    )
    tokens = torch.tensor(text[first:], device=base_logits.device)
    shared, kept, best = [], [], []
    size = max(1, _AT_ONCE // base_logits.shape[-1])
    for ours, theirs, here in zip(
        base_logits.split(size), draft_logits.split(size), tokens.split(size), strict=True
    ):
        hit = theirs.argmax(-1) == here
        best.append(hit)
        if sampler.temperature == 0:
            shared.append(hit.double())
            kept.append(hit.double())
            continue
        base_probs, draft_probs = sampler.probs(ours), sampler.probs(theirs)
        shared.append(torch.minimum(base_probs, draft_probs).sum(-1).double())
        at = here[:, None]
        ratio = draft_probs.gather(-1, at) / base_probs.gather(-1, at).clamp_min(1e-38)
        kept.append(ratio[:, 0].clamp(max=1).double())
    columns = [torch.cat(each).tolist() for each in (shared, kept, best)]
    return Agreement(columns[0], columns[1], columns[2], limit)


def fit_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Bring a draft's logits [..., W] to ``vocab_size`` outputs: cut, or filled up with -inf."""
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))


def _logits_before(model: PreTrainedModel, text: Sequence[int], num: int) -> Tensor:
    """Return the logits [num, V] that the last ``num`` tokens of ``text`` are chosen from."""
    # a draft has no embedding for what the base alone pads its vocabulary with
    ids = torch.tensor([text[:-1]], device=input_device(model))
    ids = ids.clamp(max=input_embedding(model).shape[0] - 1)
    logits: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=num).logits
    return logits[0, -num:]
