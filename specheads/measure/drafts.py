"""How well a draft model matches its base, measured on the base's own continuations.

At each token that a verify step would decide, the draft's distribution is laid over the base's;
Leviathan's alpha is the mean of what they share (arXiv:2211.17192, definition 3.1). Nothing is
drafted: given the text, what a chain of any length would have gained follows from the same numbers.

Which draft model is worth drafting with: predicted on some prompts, measured on others.

Per candidate alpha, its cost c and the cost of verify steps are measured on the first prompts; from
them follow the best draft length and the speed-up, by Leviathan's formula and by the clocked costs.
On the other prompts all candidates then decode in turn with plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.costs import (
    DraftCosts,
    best_length,
    clock_drafts,
    expected_tokens,
    leviathan_speedup,
)
from specheads.decoding.exported import num_parameters
from specheads.decoding.loop import plain_decode
from specheads.drafters.contract import Drafter
from specheads.drafters.draft_model import DraftModelDrafter
from specheads.drafters.length import FixedLength
from specheads.measure.clock import Decoded, Prompt, Runs, clock, drafted_method, plain_method
from specheads.measure.render import advice, recommended
from specheads.measure.rows import baseline_drift, disturbance, per_batch_seconds
from specheads.measure.stats import mean_accept_length, ratio_ci95, rep8
from specheads.models.base import input_device, input_embedding
from specheads.system import hardware
from specheads.verification.sampling import Sampler

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


_CLOCK_TOKENS = 48  # of the texts that steps are clocked on


@dataclass(frozen=True)
class Settings:
    """What a comparison is made with.

    Attributes:
        max_new_tokens: per prompt.
        temperature: of all texts; above 0 drafts are sampled, at 0 they are greedy.
        max_tokens: longest draft to consider.
        repeats: of clocked rounds.
        eos_token_ids: tokens that end a text.
        seed: prompt n is continued with ``seed + n``.
    """

    max_new_tokens: int
    temperature: float
    max_tokens: int
    repeats: int
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0

    @property
    def sampling(self) -> str:
        """How drafts are made."""
        return "sampled" if self.temperature > 0 else "greedy"


@dataclass(frozen=True)
class Prospect:
    """What the first prompts say about one draft model.

    Attributes:
        alpha: how well it agrees with the base.
        costs: of its passes and of verify steps.
        make: from a draft length to the drafter.
        lengths: predictions for drafts of 1, 2, ... tokens.
    """

    alpha: Alpha
    costs: DraftCosts
    make: Callable[[int], Drafter]
    lengths: list[dict[str, Any]]

    @property
    def num_tokens(self) -> int:
        """The draft length that promises most."""
        return best_length([row["predicted"] for row in self.lengths])


def compare_drafts(
    base: PreTrainedModel,
    drafts: Mapping[str, PreTrainedModel],
    prompts: Sequence[Prompt],
    measured: Sequence[Prompt],
    settings: Settings,
    *,
    progress: Callable[[str], object] = lambda text: None,
    tick: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Predict on ``prompts``, measure on ``measured``; return the body of compare.json.

    Args:
        base: base model, in eval mode.
        drafts: draft models by name, with the base's tokenizer.
        prompts: to measure alpha and costs on.
        measured: others, to measure speed-ups on.
        settings: how.
        progress: told what is being done.
        tick: called after every decoded prompt.

    Returns:
        ``disturbance`` (see :func:`specheads.measure.rows.disturbance`; of the steps that were
        clocked, and of the measured texts), ``plain`` (the baseline's figures), ``verify_cost`` (T
        by number of nodes, in plain steps), ``candidates`` in the given order, ``recommended`` (a
        name, or None) and ``advice`` (lines).
    """
    samples = [hardware.sample()]
    found = prospects(base, drafts, prompts, settings, progress)
    samples.append(hardware.sample())
    progress("measure")
    limit, eos = settings.max_new_tokens, settings.eos_token_ids
    methods = [plain_method(base, eos, limit)]
    for i, each in enumerate(found.values()):
        n = each.num_tokens
        drafter = each.make(n)
        methods.append(drafted_method(f"draft_{i}", base, drafter, eos, limit, tree_nodes=n + 1))
    runs = clock(
        methods,
        measured,
        settings.temperature,
        repeats=settings.repeats,
        seed=settings.seed + len(prompts),
        tick=tick,
        started=samples,  # when the warm-up is over
    )
    samples.append(hardware.sample())
    watched = [
        {"temperature": settings.temperature, "batch": 1, **hardware.between(*each)}
        for each in (samples[:2], samples[2:])
    ]
    watched[1]["drift"] = round(baseline_drift([runs]), 4)
    plain, size = runs["plain"], num_parameters(base)
    candidates = []
    for i, (name, each) in enumerate(found.items()):
        own = num_parameters(drafts[name])
        best = each.lengths[each.num_tokens - 1]
        real = figures(runs[f"draft_{i}"], plain, each.num_tokens, limit)
        candidates.append(
            {
                "name": name,
                "parameters": own,
                "times_smaller": round(size / own, 3),
                "alpha": round(each.alpha.alpha, 4),
                "alpha_ci95": _interval(each.alpha),
                "best_guess_rate": _best_guesses(each.alpha),
                "num_verified": each.alpha.num_tokens,
                **each.costs.to_json(),
                "lengths": each.lengths,
                "num_tokens": each.num_tokens,
                "predicted": best,
                "measured": real,
                "predicted_over_measured": round(best["predicted"] / real["speedup"], 4),
                "per_kind": _kinds(each, runs[f"draft_{i}"], plain, prompts, measured, limit),
            }
        )
    verify = next(iter(found.values())).costs.verify
    best_name = recommended(candidates)
    texts = [each.tokens for each in plain.decoded]
    return {
        "disturbance": disturbance(watched),
        "base": {"parameters": size},
        "plain": {
            "seconds": [round(sum(repeat), 6) for repeat in plain.seconds],
            "new_tokens": sum(map(len, texts)),
            "rep8": round(sum(map(rep8, texts)) / len(texts), 4),
        },
        "verify_cost": {
            str(n): round(cost, 4) for n, cost in zip(verify.sizes, verify.smoothed, strict=True)
        },
        "candidates": candidates,
        "recommended": best_name,
        "advice": advice(candidates, best_name, settings.sampling),
    }


def prospects(
    base: PreTrainedModel,
    drafts: Mapping[str, PreTrainedModel],
    prompts: Sequence[Prompt],
    settings: Settings,
    progress: Callable[[str], object] = lambda text: None,
) -> dict[str, Prospect]:
    """Clock all draft models in turn, measure alpha of each, and predict."""
    progress("clock steps")

    def maker(draft: PreTrainedModel) -> Callable[[int], Drafter]:
        return lambda n: DraftModelDrafter(draft, FixedLength(n), sampling=settings.sampling)

    makes = {name: maker(draft) for name, draft in drafts.items()}
    by_length = sorted((prompt.input_ids for prompt in prompts), key=lambda ids: ids.shape[1])
    costs = clock_drafts(
        base,
        makes,
        by_length[len(by_length) // 2],
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        max_new_tokens=min(settings.max_new_tokens, _CLOCK_TOKENS),
        repeats=settings.repeats,
    )
    found = {}
    for name, draft in drafts.items():
        progress(f"alpha of {name}")
        alpha = measure_alpha(
            base,
            draft,
            [prompt.input_ids for prompt in prompts],
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            seed=settings.seed,
            eos_token_ids=settings.eos_token_ids,
        )
        table = predictions(alpha, costs[name], settings.max_tokens)
        found[name] = Prospect(alpha, costs[name], makes[name], table)
    return found


def predictions(alpha: Alpha, costs: DraftCosts, max_tokens: int) -> list[dict[str, Any]]:
    """Return what drafts of 1 to ``max_tokens`` tokens are expected to bring.

    Returns:
        Per length ``leviathan`` (the published formula; None without a measured c),
        ``formula_with_costs`` (the same accept length over the clocked cost of the step),
        ``predicted`` (the accept length of chains along the measured texts over the clocked cost,
        prefills included) and the two accept lengths.
    """
    rows = []
    for n in range(1, max_tokens + 1):
        gained, tokens = alpha.chain(n), expected_tokens(alpha.alpha, n)
        published = leviathan_speedup(alpha.alpha, costs.draft, n) if costs.draft > 0 else None
        rows.append(
            {
                "num_tokens": n,
                "leviathan": None if published is None else round(published, 4),
                "formula_with_costs": round(tokens / costs.step(n), 4),
                "predicted": round(
                    costs.speedup(len(alpha.texts), gained.steps, gained.tokens, n), 4
                ),
                "formula_accept_length": round(tokens, 4),
                "accept_length": round(gained.accept_length, 4),
                "acceptance_rate": round(gained.acceptance_rate, 4),
            }
        )
    return rows


def figures(
    runs: Runs,
    plain: Runs,
    num_tokens: int,
    max_new_tokens: int,
    chosen: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return what one draft model did, beside plain decoding of the same prompts.

    Args:
        runs: of the draft model.
        plain: of plain decoding.
        num_tokens: guesses per step.
        max_new_tokens: the limit of both.
        chosen: which prompts; None: all.
    """
    rows = list(range(len(runs.decoded))) if chosen is None else list(chosen)
    ours, theirs = ([each.decoded[i] for i in rows] for each in (runs, plain))
    tokens, plain_tokens = ([float(len(each.tokens)) for each in of] for of in (ours, theirs))
    seconds, plain_seconds = ([per_batch_seconds(each)[i] for i in rows] for each in (runs, plain))
    lengths = [each.accept_lengths for each in ours]
    speed = sum(tokens) / sum(seconds)
    low, high = ratio_ci95([tokens, plain_seconds], [seconds, plain_tokens])
    shortest, longest = ratio_ci95(
        [[float(sum(each)) for each in lengths]], [list(map(len, lengths))]
    )
    accepted = sum(sum(each) - len(each) for each in lengths)
    proposed = sum(num_proposed(each, num_tokens, max_new_tokens) for each in ours)
    return {
        "num_prompts": len(rows),
        "tokens_per_second": round(speed, 3),
        "speedup": round(speed / (sum(plain_tokens) / sum(plain_seconds)), 4),
        "speedup_ci95": [round(low, 4), round(high, 4)],
        "accept_length": round(mean_accept_length(lengths), 4),
        "accept_length_ci95": [round(shortest, 4), round(longest, 4)],
        "acceptance_rate": round(accepted / proposed, 4) if proposed else 0.0,
        "identical": sum(a.tokens == b.tokens for a, b in zip(ours, theirs, strict=True)),
    }


def num_proposed(decoded: Decoded, num_tokens: int, max_new_tokens: int) -> int:
    """Return how many guesses were verified for one text; the limit cuts the last steps'."""
    left, proposed = max_new_tokens - 1, 0
    for gained in decoded.accept_lengths:
        proposed += min(num_tokens, left - 1)
        left -= gained
    return proposed


def _kinds(
    prospect: Prospect,
    runs: Runs,
    plain: Runs,
    prompts: Sequence[Prompt],
    measured: Sequence[Prompt],
    max_new_tokens: int,
) -> dict[str, dict[str, Any]]:
    """Return prediction and measurement per kind of prompt, where both have some."""
    found, n = {}, prospect.num_tokens
    for kind in sorted({each.kind for each in prompts} & {each.kind for each in measured}):
        texts = zip(prospect.alpha.texts, prompts, strict=True)
        own = Alpha.of([text for text, each in texts if each.kind == kind])
        rows = [i for i, each in enumerate(measured) if each.kind == kind]
        expected = predictions(own, prospect.costs, n)[-1]
        found[kind] = {
            "alpha": round(own.alpha, 4),
            "predicted": expected["predicted"],
            "predicted_accept_length": expected["accept_length"],
            **figures(runs, plain, n, max_new_tokens, rows),
        }
    return found


def _interval(alpha: Alpha) -> list[float]:
    shared = [sum(text.shared) for text in alpha.texts]
    counts = [float(len(text.shared)) for text in alpha.texts]
    return [round(bound, 4) for bound in ratio_ci95([shared], [counts])]


def _best_guesses(alpha: Alpha) -> float:
    hits = sum(sum(text.best) for text in alpha.texts)
    return round(hits / max(1, alpha.num_tokens), 4)
