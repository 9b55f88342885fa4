"""Which draft model is worth drafting with: predicted on some prompts, measured on others.

Per candidate alpha, its cost c and the cost of verify steps are measured on the first prompts; from
them follow the best draft length and the speed-up, by Leviathan's formula and by the clocked costs.
On the other prompts all candidates then decode in turn with plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from specheads import contention
from specheads.decoding.advice import advice, recommended
from specheads.decoding.alpha import Alpha, measure_alpha
from specheads.decoding.drafting import num_parameters
from specheads.decoding.measure import Decoded, Prompt, Runs, clock, drafted_method, plain_method
from specheads.decoding.report import baseline_drift, disturbance, per_batch_seconds
from specheads.decoding.speculation import (
    DraftCosts,
    best_length,
    clock_drafts,
    expected_tokens,
    leviathan_speedup,
)
from specheads.decoding.stats import mean_accept_length, ratio_ci95, rep8
from specheads.drafters.contract import Drafter
from specheads.drafters.draft_model import DraftModelDrafter
from specheads.drafters.length import FixedLength

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
        ``disturbance`` (see :func:`specheads.decoding.report.disturbance`; of the steps that were
        clocked, and of the measured texts), ``plain`` (the baseline's figures), ``verify_cost`` (T
        by number of nodes, in plain steps), ``candidates`` in the given order, ``recommended`` (a
        name, or None) and ``advice`` (lines).
    """
    samples = [contention.sample()]
    found = prospects(base, drafts, prompts, settings, progress)
    samples.append(contention.sample())
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
    samples.append(contention.sample())
    watched = [
        {"temperature": settings.temperature, "batch": 1, **contention.between(*each)}
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
