"""Decode held-out prompts with a draft model: before, during and after its training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads.config import EvaluateConfig
from specheads.decoding.alpha import Alpha, agreement
from specheads.decoding.evaluate import SEED, figures, need_steps
from specheads.decoding.measure import (
    Prompt,
    Runs,
    clock,
    drafted_method,
    plain_method,
    read_prompts,
)
from specheads.decoding.outcome import sample_texts
from specheads.decoding.speculation import clock_drafts, expected_tokens
from specheads.decoding.stats import rep8
from specheads.drafters.draft_model import DraftModelDrafter
from specheads.drafters.length import FixedLength
from specheads.log import Outcome
from specheads.models.base import context_length, end_tokens
from specheads.models.forward import undisturbed
from specheads.sampling import Sampler

NUM_TOKENS = 4  # of the chain, the same at every step of a run and in all runs

Figures = dict[str, dict[str, float]]


def decode_with_draft(
    base: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Tensor],
    evaluate: EvaluateConfig,
    eos_token_ids: tuple[int, ...],
) -> dict[str, float]:
    """Measure what a draft model is worth now: decode plainly, and with a chain of its guesses.

    Both models are left as they were found, modes and random generators included.

    Args:
        base: base model.
        draft: draft model with the same tokenizer; another dtype is fine.
        prompts: token ids [1, P] each, held out.
        evaluate: how many tokens and at which temperatures.
        eos_token_ids: tokens that end a text.

    Returns:
        ``eval/accept_length`` (choose by it), ``eval/alpha`` and ``eval/speedup``: means over the
        temperatures; and for each of them (``t0``, ``t1``) what :func:`measure_draft` names, as
        ``eval/chain/t0/accept_length``.

    Raises:
        ValueError: if there are no prompts.
    """
    named = [Prompt(str(i), "heldout", ids) for i, ids in enumerate(prompts)]
    found, _ = measure_draft(base, draft, named, evaluate, eos_token_ids)
    rows = {
        f"eval/{key}": sum(of[key] for of in found.values()) / len(found)
        for key in ("accept_length", "alpha", "speedup")
    }
    for at, of in found.items():
        rows |= {f"eval/chain/{at}/{key}": value for key, value in of.items()}
    return rows


def final_draft_evaluation(
    base: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    evaluate: EvaluateConfig,
    *,
    samples: int = 0,
) -> Outcome:
    """Decode with base and draft as users will, on the prompts of a file.

    Args:
        base: base model, in the dtype in question.
        draft: the draft model as it is exported.
        tokenizer: of both.
        path: prompts, see :func:`specheads.decoding.evaluate.write_prompts`.
        evaluate: how many prompts and tokens, and at which temperatures.
        samples: texts to keep.

    Returns:
        Figures ``final/<figure>/t<temperature>``, see :func:`measure_draft`, and samples.

    Raises:
        ConfigError: if no prompt fits, or the base ends every text with its first token.
    """
    prompts, _ = read_prompts(
        path,
        tokenizer,
        evaluate.num_prompts,
        max_length=room(base, draft, evaluate) or 1 << 30,
        device=base.device,
    )
    found, runs = measure_draft(base, draft, prompts, evaluate, end_tokens(base, tokenizer))
    need_steps(runs)
    figures = {
        f"final/{key}/{at}": round(value, 4)
        for at, of in found.items()
        for key, value in of.items()
    }
    return Outcome(figures, sample_texts(prompts, runs, "chain", tokenizer, samples))


def room(base: PreTrainedModel, draft: PreTrainedModel, evaluate: EvaluateConfig) -> int | None:
    """Return the longest prompt that leaves both models room for the new tokens; None: any."""
    known = [length for model in (base, draft) if (length := context_length(model))]
    return min(known) - evaluate.max_new_tokens if known else None


def measure_draft(
    base: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Prompt],
    evaluate: EvaluateConfig,
    eos_token_ids: tuple[int, ...],
) -> tuple[Figures, dict[str, dict[str, Runs]]]:
    """Decode all prompts once at every temperature, plainly and with chains of ``NUM_TOKENS``.

    At a temperature above 0 guesses are drawn from the draft and verified by rejection: the texts
    are then others than plain decoding's, of the same distribution.

    Returns:
        ``t<temperature>`` -> ``alpha``, the mean of sum_x min(base, draft) along plain decoding's
        texts (arXiv:2211.17192; at temperature 0 the share of tokens that the draft guesses best);
        ``accept_length`` with its 95% interval and ``speedup``, see
        :func:`specheads.decoding.evaluate.figures`; ``depth_{i}/acceptance``, how often guess i is
        accepted where those before it were; ``rep8`` of plain output; at temperature 0
        ``identical`` texts among those ``compared``. And the runs, by ``t<temperature>`` and
        method: ``plain`` and ``chain``.

    Raises:
        ValueError: if there are no prompts.
    """
    if not prompts:
        raise ValueError("prompts must hold at least 1 prompt, got 0")
    limit = evaluate.max_new_tokens
    found, all_runs = {}, {}
    with undisturbed(base, draft):
        drafter = DraftModelDrafter(draft, FixedLength(NUM_TOKENS), sampling="sampled")
        methods = [
            plain_method(base, eos_token_ids, limit),
            drafted_method("chain", base, drafter, eos_token_ids, limit, tree_nodes=NUM_TOKENS + 1),
        ]
        for temperature in evaluate.temperatures:
            runs = clock(methods, prompts, temperature, repeats=1, seed=SEED)
            plain = runs["plain"]
            of = figures(runs["chain"], plain, limit, NUM_TOKENS)
            if temperature > 0:
                del of["identical"], of["compared"]
            of = {key.replace("head_", "depth_"): value for key, value in of.items()}
            of["alpha"] = _alpha(base, draft, prompts, plain, temperature, limit)
            of["rep8"] = sum(rep8(each.tokens) for each in plain.decoded) / len(prompts)
            found[f"t{temperature:g}"], all_runs[f"t{temperature:g}"] = of, runs
    return found, all_runs


def _alpha(
    base: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Prompt],
    plain: Runs,
    temperature: float,
    limit: int,
) -> float:
    """Return alpha along the texts that the base has just written."""
    sampler = Sampler(temperature=temperature)
    texts = []
    for prompt, decoded in zip(prompts, plain.decoded, strict=True):
        ids = prompt.input_ids[0].tolist()
        texts.append(
            agreement(base, draft, [*ids, *decoded.tokens], len(ids) + 1, sampler, limit - 1)
        )
    return Alpha.of(texts).alpha


def describe_costs_of_drafting(
    base: PreTrainedModel, draft: PreTrainedModel, prompt: Tensor, evaluate: EvaluateConfig
) -> str:
    """Return a line for before the training: how good the draft model has to become to pay.

    What a pass costs does not depend on weights, so it is clocked now; the expected tokens of a
    step are those of arXiv:2211.17192, equation 1.

    Args:
        base: base model.
        draft: draft model, trained or not.
        prompt: [1, P], continued by both.
        evaluate: how many new tokens.
    """

    def make(num_tokens: int) -> DraftModelDrafter:
        return DraftModelDrafter(draft, FixedLength(num_tokens))

    with undisturbed(base, draft):
        costs = clock_drafts(
            base,
            {"draft": make},
            prompt,
            max_tokens=NUM_TOKENS,
            max_new_tokens=evaluate.max_new_tokens,
            repeats=2,
        )["draft"]

    def best(alpha: float) -> float:
        lengths = range(1, NUM_TOKENS + 1)
        return max(expected_tokens(alpha, n) / costs.step(n) for n in lengths)

    percent = next((number for number in range(101) if best(number / 100) > 1), None)
    promised = ", ".join(f"{best(alpha):.2f}x at alpha {alpha}" for alpha in (0.5, 0.7, 0.9))
    pays = "pay at no alpha" if percent is None else f"pay from alpha {percent / 100} on"
    return (
        f"drafting: a pass of the draft model costs {costs.draft:.2f} plain steps here; chains of"
        f" up to {NUM_TOKENS} tokens {pays}: {promised}"
    )
