"""How well draft models match their base, and which of them is worth drafting with.

At each token that a verify step would decide, the draft's distribution is laid over the base's;
Leviathan's alpha is the mean of what they share (arXiv:2211.17192, definition 3.1). Nothing is
drafted: given the text, what a chain of any length would have gained follows from the same numbers.

A comparison measures alpha, the cost c of each candidate and the cost of verify steps on the first
prompts; from them follow the best draft length and the speed-up, by Leviathan's formula and by the
clocked costs. On the other prompts all candidates then decode in turn with plain decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from specheads.config import CompareConfig
from specheads.decoding.costs import DraftCosts, clock_drafts, expected_tokens, leviathan_speedup
from specheads.decoding.exported import Subject, num_parameters
from specheads.decoding.loop import plain_decode
from specheads.decoding.result import DecodedRow
from specheads.drafters.contract import Drafter
from specheads.drafters.draft_model import DraftModelDrafter
from specheads.drafters.length import FixedLength
from specheads.measure import rows as report
from specheads.measure.bench import Contest
from specheads.measure.clock import Prompt, Runs, clock
from specheads.measure.identity import logits_at
from specheads.measure.render import Columns, figure, interval, make_table
from specheads.models.base import input_embedding
from specheads.system import hardware
from specheads.system.terminal import progress_bar
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
        texts: the numbers of each text.
    """

    texts: Sequence[Agreement]

    @property
    def num_tokens(self) -> int:
        """Verified tokens."""
        return sum(len(text.shared) for text in self.texts)

    @property
    def alpha(self) -> float:
        """Mean over verified tokens of sum_x min(base, draft); 0 where there were none.

        Greedy: the share of tokens that are the draft's best guess.
        """
        return sum(sum(text.shared) for text in self.texts) / max(1, self.num_tokens)

    def chain(self, num_tokens: int) -> Gained:
        """Return what chains of ``num_tokens`` guesses are expected to gain on these texts.

        Of one guess, accepted over proposed is alpha as practitioners count it.
        """
        parts = [replay_chain(text.kept, num_tokens, text.limit) for text in self.texts]
        return Gained(*map(sum, zip(*parts, strict=True)))


class Gained(NamedTuple):
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


def replay_chain(rates: Sequence[float], num_tokens: int, limit: int) -> Gained:
    """Return what chains of guesses are expected to gain along one text.

    Given the text, guesses are accepted independently of each other: which token comes out does
    not depend on whether it was a guess. So the expectation is exact, correlations of easy and hard
    places included, which a formula with one alpha leaves out.

    Args:
        rates: per token of the text the probability that its guess is accepted.
        num_tokens: guesses per step; fewer where ``limit`` leaves no room for them.
        limit: tokens that the text had room for, at least as many as there are rates.
    """
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
            # refused: the base's own token stands here, and the next step starts behind it
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
    how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "eos_token_ids": eos_token_ids}
    texts = []
    for n, prompt in enumerate(prompts):
        sampler = Sampler(temperature=temperature, seed=seed + n)
        tokens = plain_decode(base, prompt, sampler=sampler, **how).new_tokens
        texts.append(agreement(base, draft, prompt, tokens, sampler, max_new_tokens - 1))
    return Alpha(texts)


@torch.inference_mode()
def agreement(
    base: PreTrainedModel,
    draft: PreTrainedModel,
    prompt: Tensor,
    new_tokens: Sequence[int],
    sampler: Sampler,
    limit: int,
) -> Agreement:
    """Compare base and draft at all new tokens but the first, each given all tokens before it.

    Args:
        base: base model.
        draft: draft model.
        prompt: token ids, [1, P].
        new_tokens: what the base put behind it.
        sampler: makes distributions of logits.
        limit: see :class:`Agreement`.
    """
    num = len(new_tokens) - 1
    if num < 1:
        return Agreement([], [], [], limit)
    text = [*prompt[0].tolist(), *new_tokens]
    base_logits = _logits_before(base, text, num)
    device, width = base_logits.device, base_logits.shape[-1]
    draft_logits = fit_vocabulary(_logits_before(draft, text, num).to(device), width)
    tokens = torch.tensor(new_tokens[1:], device=device)

    def compared(ours: Tensor, theirs: Tensor, here: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hit = theirs.argmax(-1) == here
        if sampler.temperature == 0:
            return hit.double(), hit.double(), hit
        base_probs, draft_probs = sampler.probs(ours), sampler.probs(theirs)
        shared, at = torch.minimum(base_probs, draft_probs).sum(-1), here[:, None]
        ratio = draft_probs.gather(-1, at) / base_probs.gather(-1, at).clamp_min(1e-38)
        return shared.double(), ratio[:, 0].clamp(max=1).double(), hit

    columns = base_logits, draft_logits, tokens
    parts = (column.split(max(1, _AT_ONCE // width)) for column in columns)
    rows = [compared(*part) for part in zip(*parts, strict=True)]
    shared, kept, best = (torch.cat(each).tolist() for each in zip(*rows, strict=True))
    return Agreement(shared, kept, best, limit)


def fit_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Bring a draft's logits [..., W] to ``vocab_size`` outputs: cut, or filled up with -inf."""
    return F.pad(logits, (0, vocab_size - logits.shape[-1]), value=-torch.inf)  # below 0 it cuts


def _logits_before(model: PreTrainedModel, text: Sequence[int], num: int) -> Tensor:
    """Return the logits [num, V] that the last ``num`` tokens of ``text`` are chosen from."""
    # a draft has no embedding for what the base alone pads its vocabulary with
    last = input_embedding(model).shape[0] - 1
    ids = [min(token, last) for token in text[:-1]]
    return logits_at(model, ids, range(len(ids) - num, len(ids)))


_CLOCK_TOKENS = 48  # of the texts that steps are clocked on


def sampling_of(config: CompareConfig) -> str:
    """Return how drafts are made: sampled as the texts are, or greedy."""
    return "sampled" if config.temperature > 0 else "greedy"


def _chain(config: CompareConfig, draft: PreTrainedModel, num_tokens: int) -> Drafter:
    """Return the drafter of chains of ``num_tokens`` guesses."""
    return DraftModelDrafter(draft, FixedLength(num_tokens), sampling=sampling_of(config))


@dataclass(frozen=True)
class Prospect:
    """What the first prompts say about one draft model.

    Attributes:
        alpha: how well it agrees with the base.
        costs: of its passes and of verify steps.
        lengths: predictions for drafts of 1, 2, ... tokens.
    """

    alpha: Alpha
    costs: DraftCosts
    lengths: list[dict[str, Any]]

    @property
    def num_tokens(self) -> int:
        """The draft length that promises most."""
        return int(max(self.lengths, key=lambda row: float(row["predicted"]))["num_tokens"])


def _candidate(prospect: Prospect, runs: Runs, plain: Runs, limit: int) -> dict[str, Any]:
    """Return what was predicted and measured of one draft model."""
    alpha, predicted = prospect.alpha, prospect.lengths[prospect.num_tokens - 1]
    shared = [sum(text.shared) for text in alpha.texts]
    counts = [float(len(text.shared)) for text in alpha.texts]
    measured = figures(runs, plain, prospect.num_tokens, limit)
    best_guesses = sum(sum(text.best) for text in alpha.texts)
    return {
        "alpha": round(alpha.alpha, 4),
        "alpha_ci95": report.rounded(report.ratio_ci95([shared], [counts])),
        "best_guess_rate": round(best_guesses / max(1, alpha.num_tokens), 4),
        "num_verified": alpha.num_tokens,
        **prospect.costs.to_json(),
        "lengths": prospect.lengths,
        "num_tokens": prospect.num_tokens,
        "predicted": predicted,
        "measured": measured,
        "predicted_over_measured": round(predicted["predicted"] / measured["speedup"], 4),
    }


def predictions(alpha: Alpha, costs: DraftCosts, max_tokens: int) -> list[dict[str, Any]]:
    """Return what drafts of 1 to ``max_tokens`` tokens are expected to bring.

    Returns:
        Per length ``leviathan`` (the published formula; None without a measured c),
        ``formula_with_costs`` (the same accept length over the clocked cost of the step),
        ``predicted`` (the accept length of chains along the measured texts over the clocked cost,
        prefills included) and the two accept lengths.
    """

    def prediction(n: int) -> dict[str, Any]:
        gained, tokens = alpha.chain(n), expected_tokens(alpha.alpha, n)
        published = leviathan_speedup(alpha.alpha, costs.draft, n)
        promised = costs.speedup(len(alpha.texts), gained.steps, gained.tokens, n)
        return {
            "num_tokens": n,
            "leviathan": round(published, 4) if costs.draft > 0 else None,
            "formula_with_costs": round(tokens / costs.step(n), 4),
            "predicted": round(promised, 4),
            "formula_accept_length": round(tokens, 4),
            "accept_length": round(gained.accept_length, 4),
            "acceptance_rate": round(gained.acceptance_rate, 4),
        }

    return [prediction(n) for n in range(1, max_tokens + 1)]


def figures(runs: Runs, plain: Runs, num_tokens: int, max_new_tokens: int) -> dict[str, Any]:
    """Return what one draft model did, beside plain decoding of the same prompts.

    Args:
        runs: of the draft model.
        plain: of plain decoding.
        num_tokens: guesses per step.
        max_new_tokens: the limit of both.
    """
    lengths = [each.accept_lengths for each in runs.decoded]
    ratio, bounds = report.speedup(report.whole(runs), report.whole(plain))
    accepted = sum(sum(each) - len(each) for each in lengths)
    proposed = sum(num_proposed(each, num_tokens, max_new_tokens) for each in runs.decoded)
    pairs = zip(runs.decoded, plain.decoded, strict=True)
    return {
        "num_prompts": len(lengths),
        "tokens_per_second": round(report.speed(report.whole(runs)), 3),
        "speedup": ratio,
        "speedup_ci95": bounds,
        "accept_length": round(report.mean_accept_length(lengths), 4),
        "accept_length_ci95": report.rounded(report.accept_length_ci95(lengths)),
        "acceptance_rate": round(accepted / proposed, 4) if proposed else 0.0,
        "identical": sum(a.new_tokens == b.new_tokens for a, b in pairs),
    }


def num_proposed(decoded: DecodedRow, num_tokens: int, max_new_tokens: int) -> int:
    """Return how many guesses were verified for one text; the limit cuts the last steps'."""
    left, proposed = max_new_tokens - 1, 0
    for gained in decoded.accept_lengths:
        proposed += min(num_tokens, left - 1)
        left -= gained
    return proposed


@dataclass(frozen=True)
class DraftComparison:
    """Draft models of one base, to be predicted on some prompts and measured on others.

    Attributes:
        subject: base model, in eval mode, and tokenizer.
        drafts: draft models by name, with the base's tokenizer.
        prompts: to measure alpha and costs on.
        measured: others, to measure speed-ups on.
        config: lengths, temperature, repeats and seed; prompt n is continued with ``seed + n``.
    """

    subject: Subject
    drafts: Mapping[str, PreTrainedModel]
    prompts: Sequence[Prompt]
    measured: Sequence[Prompt]
    config: CompareConfig

    def run(self) -> dict[str, Any]:
        """Predict, then measure; return the body of compare.json.

        Returns:
            ``disturbance`` (see :func:`specheads.measure.rows.disturbance`; of the steps that were
            clocked, and of the measured texts), ``plain`` (the baseline's figures), ``verify_cost``
            (T by number of nodes, in plain steps), ``candidates`` in the given order,
            ``recommended`` (a name, or None) and ``advice`` (lines).
        """
        config, heat, repeats = self.config, self.config.temperature, self.config.repeats
        contest = Contest.of(self.subject, config.max_new_tokens)
        methods = [contest.ours()]
        texts = (len(self.drafts) + 1) * len(self.measured) * repeats
        with progress_bar("text", total=texts) as bar:
            begun = hardware.sample()
            found = self._prospects(contest, bar)
            predicted = hardware.sample()
            bar.set_description("measure")
            for i, (name, each) in enumerate(found.items()):
                drafter = _chain(config, self.drafts[name], each.num_tokens)
                methods.append(contest.ours(f"draft_{i}", drafter))
            how: dict[str, Any] = {"repeats": repeats, "seed": config.seed + len(self.prompts)}
            runs = clock(methods, self.measured, heat, tick=bar.update, **how)
        plain = runs["plain"]
        clocking = {"temperature": heat, "batch": 1, **hardware.between(begun, predicted)}
        size = num_parameters(self.subject.base)
        candidates = []
        for i, (name, each) in enumerate(found.items()):
            own, drafted = num_parameters(self.drafts[name]), runs[f"draft_{i}"]
            about = {"name": name, "parameters": own, "times_smaller": round(size / own, 3)}
            of = _candidate(each, drafted, plain, config.max_new_tokens)
            candidates.append({**about, **of, "per_kind": self._kinds(each, drafted, plain)})
        verify = next(iter(found.values())).costs.verify
        costs = zip(verify.sizes, verify.smoothed, strict=True)
        best = recommended(candidates)
        return {
            "disturbance": report.disturbance([clocking, report.seen_beside(runs, heat)]),
            "base": {"parameters": size},
            "plain": {
                "seconds": [round(sum(repeat), 6) for repeat in plain.seconds],
                "new_tokens": sum(len(each.new_tokens) for each in plain.decoded),
                "rep8": report.mean_rep8(plain),
            },
            "verify_cost": {str(n): round(cost, 4) for n, cost in costs},
            "candidates": candidates,
            "recommended": best,
            "advice": advice(candidates, best, sampling_of(config)),
        }

    def _prospects(self, contest: Contest, bar: Any) -> dict[str, Prospect]:
        """Clock all draft models in turn, measure alpha of each, and predict."""
        config, limit = self.config, contest.max_new_tokens
        bar.set_description("clock steps")
        texts = [prompt.input_ids for prompt in self.prompts]
        makes = {name: partial(_chain, config, draft) for name, draft in self.drafts.items()}
        middle = sorted(texts, key=lambda ids: ids.shape[1])[len(texts) // 2]
        how: dict[str, Any] = {"max_new_tokens": min(limit, _CLOCK_TOKENS)}
        how |= {"repeats": config.repeats, "temperature": config.temperature}
        costs = clock_drafts(contest.base, makes, middle, max_tokens=config.max_tokens, **how)
        how = {"max_new_tokens": limit, "eos_token_ids": contest.eos}
        how |= {"temperature": config.temperature, "seed": config.seed}
        found = {}
        for name, draft in self.drafts.items():
            bar.set_description(f"alpha of {name}")
            alpha = measure_alpha(contest.base, draft, texts, **how)
            rows = predictions(alpha, costs[name], config.max_tokens)
            found[name] = Prospect(alpha, costs[name], rows)
        return found

    def _kinds(self, prospect: Prospect, runs: Runs, plain: Runs) -> dict[str, dict[str, Any]]:
        """Return prediction and measurement per kind of prompt, where both have some."""
        found, n = {}, prospect.num_tokens
        kinds, measured = ([each.kind for each in of] for of in (self.prompts, self.measured))
        for kind in sorted({*kinds} & {*measured}):
            texts = zip(prospect.alpha.texts, kinds, strict=True)
            own = Alpha([text for text, each in texts if each == kind])
            rows = [i for i, each in enumerate(measured) if each == kind]
            expected = predictions(own, prospect.costs, n)[-1]
            found[kind] = {
                "alpha": round(own.alpha, 4),
                "predicted": expected["predicted"],
                "predicted_accept_length": expected["accept_length"],
                **figures(runs.only(rows), plain.only(rows), n, self.config.max_new_tokens),
            }
        return found


_COMPARED: Columns = {
    "smaller": lambda of: f"{of['times_smaller']:.1f}x",
    "alpha": lambda of: f"{of['alpha']:.3f}",
    "c": lambda of: figure(of["c"], ".2f", "?"),
    "n": lambda of: str(of["num_tokens"]),
    "Leviathan": lambda of: figure(of["predicted"]["leviathan"], ".2fx", "?"),
    "predicted": lambda of: f"{of['predicted']['predicted']:.2f}x",
    "measured": lambda of: f"{of['measured']['speedup']:.2f}x",
    "95%": lambda of: interval(of["measured"]["speedup_ci95"]),
    "accept": lambda of: f"{of['measured']['accept_length']:.2f}",
    "rate": lambda of: f"{of['measured']['acceptance_rate']:.2f}",
    "candidate": lambda of: str(of["name"]),
}


def format_compared(result: Mapping[str, Any]) -> str:
    """Return what ``compare`` found: a row per candidate, its draft lengths, and the advice.

    Args:
        result: the content of compare.json.
    """
    settings, candidates = result["settings"], result["candidates"]
    lines = [make_table(candidates, _COMPARED).text()]
    kinds = sorted({kind for each in candidates for kind in each["per_kind"]})
    if len(kinds) > 1:
        lines.append("\nPer kind of prompt: alpha, predicted and measured speed-up, accept length")
        lines += [
            f"{kind:<16.16}{of['alpha']:>7.3f}{of['predicted']:>7.2f}x{of['speedup']:>7.2f}x"
            f"{of['accept_length']:>7.2f}  {each['name']}"
            for each in candidates
            for kind in kinds
            if (of := each["per_kind"].get(kind))
        ]
    costs = ", ".join(f"{n}: {cost:.2f}" for n, cost in result["verify_cost"].items())
    lines.append(
        f"\nT={settings['temperature']:g}, {settings['sampling']} drafts, {settings['dtype']},"
        f" {settings['threads']} threads, plain rep8 {result['plain']['rep8']:.2f}. Cost of a"
        f" verify step by nodes, in plain steps: {costs}"
    )
    return "\n".join([*lines, *result["advice"], *result["warnings"]])


def _speedup(candidate: Mapping[str, Any]) -> float:
    return float(candidate["measured"]["speedup"])


def recommended(candidates: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the fastest candidate whose interval lies above 1; None: draft with none of them."""
    better = [each for each in candidates if each["measured"]["speedup_ci95"][0] > 1]
    best = max(better, key=_speedup, default=None)
    return None if best is None else str(best["name"])


def advice(candidates: Sequence[Mapping[str, Any]], best: str | None, sampling: str) -> list[str]:
    """Return the recommendation, and the rule of thumb beside what was measured, as lines.

    Args:
        candidates: of compare.json.
        best: the recommended one.
        sampling: how drafts were made.
    """
    fastest = max(candidates, key=_speedup)
    taken = next((each for each in candidates if each["name"] == best), fastest)
    below, above = taken["measured"]["speedup_ci95"]
    measured = f"{_speedup(taken):.2f}x plain decoding (95% {below:.2f} to {above:.2f})"
    if best is None:
        first = f"none: the fastest candidate, {taken['name']}, was measured at {measured}"
    else:
        first = (
            f"{best}: decode.draft={best} decode.draft_tokens={taken['num_tokens']}"
            f" decode.draft_sampling={sampling}, measured at {measured}"
        )
    factor = taken["times_smaller"]
    rule = (
        f"rule of thumb: 5 to 10 times smaller than the base. This one is {factor:.1f} times"
        " smaller; a pass of it costs"
        f" {figure(taken['c'], '.2f', 'an unknown number of')} plain steps where its size alone"
        f" would say {1 / factor:.2f}, and alpha is {taken['alpha']:.2f}"
    )
    lines = [f"recommended: {first}", rule]
    if unknown := [str(each["name"]) for each in candidates if each["c"] is None]:
        lines.append(
            f"c of {', '.join(unknown)} is unmeasured: longer drafts were clocked as no dearer than"
            " shorter ones, which cannot be; measure again on a quiet machine"
        )
    return lines
