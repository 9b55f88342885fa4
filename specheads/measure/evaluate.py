"""Decode held-out prompts before, during and after training, with heads or with a draft model.

The recipes hand :func:`decode_heldout` and :func:`decode_with_draft` to the training loop; a
finished run shows what :func:`final_evaluation` or :func:`final_draft_evaluation` returns.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads.attention.tree import Tree, default_tree
from specheads.config import ConfigError, EvaluateConfig
from specheads.decoding.costs import clock_drafts, expected_tokens
from specheads.decoding.result import DecodedRow
from specheads.drafters.contract import Drafter
from specheads.drafters.draft_model import DraftModelDrafter
from specheads.drafters.heads import static_drafter
from specheads.drafters.length import FixedLength
from specheads.measure.bench import Contest
from specheads.measure.clock import Budget, Prompt, Runs, clock, prompts_of
from specheads.measure.drafts import Alpha, agreement
from specheads.measure.plots import tree_svg
from specheads.measure.rows import accept_length_ci95, mean_accept_length, rep8, speed, whole
from specheads.models.base import end_tokens
from specheads.models.checkpoint import Export
from specheads.models.forward import undisturbed
from specheads.models.kinds import Heads
from specheads.models.output import OutputLayer, output_layer
from specheads.runs.log import Outcome
from specheads.system.files import write_whole
from specheads.verification.sampling import Sampler

SEED = 0  # of what is drawn, in all runs alike, so that they differ by their weights only; bench's
LEAST = 3  # prompts that are decoded however little time there is
NUM_TOKENS = 4  # of a draft model's chain, the same at every step of a run and in all runs

RunsAt = dict[str, dict[str, Runs]]  # t<temperature> -> plain or the drafter's name -> runs
FiguresAt = dict[str, dict[str, float]]  # t<temperature> -> figures


def decode_all(
    base: PreTrainedModel,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Prompt],
    evaluate: EvaluateConfig,
    eos_token_ids: tuple[int, ...],
    budget: Budget | None = None,
) -> RunsAt:
    """Decode all prompts once at every temperature, plainly and with each of ``drafters``.

    With a budget only the first ones, in their order, as far as the time goes that each temperature
    has, and ``LEAST`` of them at the least.
    """
    contest = Contest(base, eos_token_ids, None, evaluate.max_new_tokens)
    methods = [contest.ours(), *(contest.ours(*each) for each in drafters.items())]
    budget, count, found = budget or Budget(), len(evaluate.temperatures), {}
    for number, temperature in enumerate(evaluate.temperatures):
        part = budget.part(1 / (count - number))
        found[f"t{temperature:g}"] = clock(
            methods, prompts, temperature, repeats=1, seed=SEED, budget=part, least=LEAST
        )
    return found


def decode_heldout(
    base: PreTrainedModel,
    heads: Heads,
    output: OutputLayer,
    prompts: Sequence[Tensor],
    evaluate: EvaluateConfig,
    eos_token_ids: tuple[int, ...],
) -> dict[str, float]:
    """Measure real acceptance: decode plainly, with a tree of ``evaluate.num_nodes``, and a chain.

    The tree is the same at every step of a run, so that one step compares with another. The model
    is left as it was found, modes and random generators included.

    Args:
        base: base model.
        heads: heads as they are now.
        output: the base's output layer.
        prompts: token ids [1, P] each, held out.
        evaluate: how many tokens and at which temperatures.
        eos_token_ids: tokens that end a text.

    Returns:
        ``eval/accept_length`` (choose by it) and ``eval/speedup``: of the tree, means over the
        temperatures; ``eval/identical``: the share of all texts that are plain decoding's. For
        each shape (``tree``, ``chain``) and temperature (``t0``, ``t1``) what :func:`figures`
        names, as ``eval/tree/t0/accept_length``; ``eval/t0/rep8`` of plain output.
    """
    shapes = {
        "tree": default_tree(heads.num_heads, evaluate.num_nodes),
        "chain": Tree.chain(heads.num_heads),
    }
    drafters = {name: static_drafter(base, heads, output, tree) for name, tree in shapes.items()}
    with undisturbed(base, heads):
        runs = decode_all(base, drafters, _named(prompts), evaluate, eos_token_ids)
    found = {
        name: {at: figures(of, name, evaluate, tree.max_depth) for at, of in runs.items()}
        for name, tree in shapes.items()
    }
    rows = _means(found["tree"], "accept_length", "speedup")
    rows["eval/identical"] = fmean(
        of["identical"] / of["compared"] for shape in found.values() for of in shape.values()
    )
    for at, runs_at in runs.items():
        rows[f"eval/{at}/rep8"] = _plain_rep8(runs_at)
        for shape, of in found.items():
            rows |= {f"eval/{shape}/{at}/{key}": value for key, value in of[at].items()}
    return rows


def _named(prompts: Sequence[Tensor]) -> list[Prompt]:
    return [Prompt(str(i), "heldout", ids) for i, ids in enumerate(prompts)]


def _means(found: FiguresAt, *keys: str) -> dict[str, float]:
    """Return means over the temperatures."""
    return {f"eval/{key}": fmean(of[key] for of in found.values()) for key in keys}


def _plain_rep8(runs: Mapping[str, Runs]) -> float:
    return fmean(rep8(each.new_tokens) for each in runs["plain"].decoded)


def figures(
    runs: Mapping[str, Runs], name: str, evaluate: EvaluateConfig, max_depth: int
) -> dict[str, float]:
    """Return what a drafter did at one temperature, beside plain decoding of the same prompts.

    Args:
        runs: of plain decoding and of the drafter.
        name: of the drafter.
        evaluate: with which they were decoded.
        max_depth: of the drafter's tree.

    Returns:
        ``accept_length`` and its 95% interval over prompts ``accept_length_low|high``;
        ``head_{i}/acceptance`` where head i was tried at all, see :func:`conditional_acceptance`;
        ``speedup`` in tokens per second; ``identical`` texts among those ``compared``.
    """
    of, plain = runs[name], runs["plain"]
    lengths = [each.accept_lengths for each in of.decoded]
    low, high = accept_length_ci95(lengths)
    shares = conditional_acceptance(of.decoded, evaluate.max_new_tokens, max_depth)
    pairs = list(zip(of.decoded, plain.decoded, strict=True))
    return {
        "accept_length": mean_accept_length(lengths),
        "accept_length_low": low,
        "accept_length_high": high,
        **{f"head_{i}/acceptance": share for i, share in shares.items()},
        "speedup": speed(whole(of)) / speed(whole(plain)),
        "identical": float(sum(a.new_tokens == b.new_tokens for a, b in pairs)),
        "compared": float(len(pairs)),
    }


def conditional_acceptance(
    decoded: Sequence[DecodedRow], max_new_tokens: int, max_depth: int
) -> dict[int, float]:
    """Return for each head i in how many of the steps that accepted head i-1 it was accepted too.

    What the end of a text hides is not counted: guesses beyond the limit are never verified, and
    of a step that met the end of the text nobody knows whether a guess or the base brought it.

    Args:
        decoded: texts of one drafter.
        max_new_tokens: the limit they were decoded to.
        max_depth: of its tree, and thereby how many heads guess.

    Returns:
        Shares by head, without heads that no counted step reached.
    """
    tried, accepted = Counter[int](), Counter[int]()
    for text in decoded:
        left = max_new_tokens - 1  # the prefill gives the first token
        for step, length in enumerate(text.accept_lengths):
            ends = text.finished and step == len(text.accept_lengths) - 1
            # head i was right where the step gained i + 2 tokens; it had the chance where the
            # head before it was right and the limit leaves room for as many, but for the end's
            for i in range(min(length - ends, left - 1, max_depth)):
                tried[i] += 1
                accepted[i] += length >= i + 2
            left -= length
    return {i: accepted[i] / count for i, count in sorted(tried.items())}


def write_prompts(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write records so that :func:`prompts_of`, and ``bench prompts=``, read these very prompts.

    Args:
        path: the .jsonl; replaced whole.
        records: with the kinds in turn; ids that occur twice are told apart.
    """
    keys = ("messages", "prompt", "completion", "text", "tokens")
    lines, seen = [], set[str]()
    for number, record in enumerate(records):
        name = str(record["id"])
        name = f"{name}#{number}" if name in seen else name
        seen.add(name)
        content = {key: record[key] for key in keys if key in record}
        lines.append(json.dumps({"id": name, "kind": record["kind"], **content}) + "\n")
    write_whole(path, "".join(lines))


def final_evaluation(
    export: Export,
    path: Path,
    evaluate: EvaluateConfig,
    budget: Budget | None = None,
    *,
    samples: int = 0,
) -> Outcome:
    """Decode with an export as users will: what ``specheads.bench`` measures on the same prompts.

    The bench, given ``prompts``, ``num_prompts`` and ``max_new_tokens`` of this call, the export's
    dtype and as many threads, prints these accept lengths in its row ``tree``. Where the export's
    tree was chosen on these prompts, as recipes do, the figure is slightly flattering.

    Args:
        export: loaded, in the dtype in question.
        path: prompts, see :func:`specheads.measure.evaluate.write_prompts`.
        evaluate: how many prompts and tokens, and at which temperatures.
        budget: the time for it; see :func:`decode_all`.
        samples: texts to keep.

    Returns:
        Figures ``final/<figure>/t<temperature>`` of the export's tree, see
        :func:`specheads.measure.evaluate.figures`; lengths and intervals rounded as the bench
        rounds them; ``final/rep8/t...`` of plain output. Samples, see :func:`sample_texts`, and
        the picture of the tree.

    Raises:
        ConfigError: if no prompt fits, or the base ends every text with its first token.
    """
    base, tokenizer = export.base, export.tokenizer
    limits = evaluate.num_prompts, evaluate.max_new_tokens
    prompts, _ = prompts_of(base, tokenizer, path, *limits)
    drafter = static_drafter(base, export.heads, output_layer(base), export.tree)
    with undisturbed(base, export.heads):
        eos = end_tokens(base, tokenizer)
        runs = decode_all(base, {"tree": drafter}, prompts, evaluate, eos, budget)
    found = {
        at: figures(of, "tree", evaluate, export.tree.max_depth) | {"rep8": _plain_rep8(of)}
        for at, of in runs.items()
    }
    texts = sample_texts(prompts, runs, "tree", tokenizer, samples)
    return Outcome(_final(found, runs), texts, tree_picture(export))


def _final(found: FiguresAt, runs: RunsAt) -> dict[str, float]:
    """Return the figures as a finished run shows them.

    Raises:
        ConfigError: if the base has ended every text with its first token: nobody knows the accept
            length of texts without a verify step.
    """
    if not any(each.accept_lengths for of in runs.values() for each in of["plain"].decoded):
        raise ConfigError("the base ends every text with its first token")
    prompts = {f"final/prompts/{at}": float(len(of["plain"].decoded)) for at, of in runs.items()}
    return prompts | {
        f"final/{key}/{at}": round(value, 4)
        for at, of in found.items()
        for key, value in of.items()
    }


def sample_texts(
    prompts: Sequence[Prompt],
    runs: Mapping[str, Mapping[str, Runs]],
    drafter: str,
    tokenizer: PreTrainedTokenizerBase,
    num_samples: int,
) -> list[dict[str, Any]]:
    """Return what plain decoding and a drafter wrote, the temperatures in turn.

    Args:
        prompts: the first of them are those of ``runs``.
        runs: ``t<temperature>`` -> method -> its runs; ``plain`` among the methods.
        drafter: the method beside it.
        tokenizer: makes text of tokens, special ones included.
        num_samples: how many at most.

    Returns:
        ``prompt, temperature, plain, drafted, accept_lengths, identical``: texts, the tokens that
        each verify step gained, and whether the tokens are the same.
    """
    found = (
        {
            "prompt": tokenizer.decode(prompt.input_ids[0].tolist()),
            "temperature": float(at.removeprefix("t")),
            "plain": tokenizer.decode(plain.new_tokens),
            "drafted": tokenizer.decode(drafted.new_tokens),
            "accept_lengths": drafted.accept_lengths,
            "identical": plain.new_tokens == drafted.new_tokens,
        }
        for number, prompt in enumerate(prompts)
        for at, of in runs.items()
        if number < len(of["plain"].decoded)
        for plain, drafted in [(of["plain"].decoded[number], of[drafter].decoded[number])]
    )
    return list(islice(found, num_samples))


def tree_picture(export: Export) -> str:
    """Return the export's tree as SVG, as wide as was measured; empty for one never measured."""
    chances = (export.config["tree"].get("measured_on") or {}).get("acceptance", [])
    if not chances or len(chances) != len(export.tree.choices):
        return ""
    length = export.config["tree"]["expected_accept_length"]
    title = f"{export.tree.num_nodes} nodes, {length:.2f} tokens expected per step"
    return tree_svg(export.tree, chances, title=title)


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
    """
    found, _ = measure_draft(base, draft, _named(prompts), evaluate, eos_token_ids)
    rows = _means(found, "accept_length", "alpha", "speedup")
    for at, of in found.items():
        rows |= {f"eval/chain/{at}/{key}": value for key, value in of.items()}
    return rows


def final_draft_evaluation(
    base: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    evaluate: EvaluateConfig,
    budget: Budget | None = None,
    *,
    samples: int = 0,
) -> Outcome:
    """Decode with base and draft as users will, on the prompts of a file.

    Args:
        base: base model, in the dtype in question.
        draft: the draft model as it is exported.
        tokenizer: of both.
        path: prompts, see :func:`specheads.measure.evaluate.write_prompts`.
        evaluate: how many prompts and tokens, and at which temperatures.
        budget: the time for it; see :func:`decode_all`.
        samples: texts to keep.

    Returns:
        Figures ``final/<figure>/t<temperature>``, see :func:`measure_draft`, and samples.

    Raises:
        ConfigError: if no prompt fits, or the base ends every text with its first token.
    """
    limits = evaluate.num_prompts, evaluate.max_new_tokens
    prompts, _ = prompts_of(base, tokenizer, path, *limits, draft)
    eos = end_tokens(base, tokenizer)
    found, runs = measure_draft(base, draft, prompts, evaluate, eos, budget)
    texts = sample_texts(prompts, runs, "chain", tokenizer, samples)
    return Outcome(_final(found, runs), texts)


def measure_draft(
    base: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Prompt],
    evaluate: EvaluateConfig,
    eos_token_ids: tuple[int, ...],
    budget: Budget | None = None,
) -> tuple[FiguresAt, RunsAt]:
    """Decode all prompts once at every temperature, plainly and with chains of ``NUM_TOKENS``.

    At a temperature above 0 guesses are drawn from the draft and verified by rejection: the texts
    are then others than plain decoding's, of the same distribution.

    Returns:
        ``t<temperature>`` -> ``alpha``, the mean of sum_x min(base, draft) along plain decoding's
        texts (arXiv:2211.17192; at temperature 0 the share of tokens that the draft guesses best);
        ``accept_length`` with its 95% interval and ``speedup``, see :func:`figures`;
        ``depth_{i}/acceptance``, how often guess i is accepted where those before it were;
        ``rep8`` of plain output; at temperature 0 ``identical`` texts among those ``compared``.
        And the runs, by ``t<temperature>`` and method: ``plain`` and ``chain``.
    """
    found: FiguresAt = {}
    with undisturbed(base, draft):
        drafter = DraftModelDrafter(draft, FixedLength(NUM_TOKENS), sampling="sampled")
        runs = decode_all(base, {"chain": drafter}, prompts, evaluate, eos_token_ids, budget)
        for temperature in evaluate.temperatures:
            at = f"t{temperature:g}"
            of = figures(runs[at], "chain", evaluate, NUM_TOKENS)
            if temperature > 0:
                del of["identical"], of["compared"]
            found[at] = {key.replace("head_", "depth_"): value for key, value in of.items()}
            sampler, limit = Sampler(temperature=temperature), evaluate.max_new_tokens - 1
            texts = [
                agreement(base, draft, prompt.input_ids, text.new_tokens, sampler, limit)
                for prompt, text in zip(prompts, runs[at]["plain"].decoded, strict=False)
            ]
            found[at] |= {"alpha": Alpha(texts).alpha, "rep8": _plain_rep8(runs[at])}
    return found, runs


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
    makes = {"draft": lambda n: DraftModelDrafter(draft, FixedLength(n))}
    how = {"max_tokens": NUM_TOKENS, "max_new_tokens": evaluate.max_new_tokens, "repeats": 2}
    with undisturbed(base, draft):
        costs = clock_drafts(base, makes, prompt, **how)["draft"]

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
