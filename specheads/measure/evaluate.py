"""Decode held-out prompts during and after training: the recipes hand these to the two loops.

What a finished run shows: figures of its export, texts behind them, and its tree.

Decode held-out prompts with a draft model: before, during and after its training.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads.attention.tree import Tree, default_tree
from specheads.config import ConfigError, EvaluateConfig, TreeConfig
from specheads.decoding.costs import clock_drafts, expected_tokens
from specheads.drafters.draft_model import DraftModelDrafter
from specheads.drafters.growing import static_drafter
from specheads.drafters.length import FixedLength
from specheads.measure.calibrate import Calibration, calibrate
from specheads.measure.clock import (
    Decoded,
    Prompt,
    Runs,
    clock,
    drafted_method,
    plain_method,
    read_prompts,
)
from specheads.measure.drafts import Alpha, agreement
from specheads.measure.plots import tree_svg
from specheads.measure.stats import mean_accept_length, ratio_ci95, rep8
from specheads.models.base import context_length, end_tokens
from specheads.models.checkpoint import Export
from specheads.models.forward import undisturbed
from specheads.models.kinds import Heads
from specheads.models.output import OutputLayer, output_layer
from specheads.runs.log import Outcome
from specheads.verification.sampling import Sampler

SEED = 0  # of what is drawn, in all runs alike, so that they differ by their weights only; bench's


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

    Raises:
        ValueError: if there are no prompts.
    """
    shapes = {
        "tree": default_tree(heads.num_heads, evaluate.num_nodes),
        "chain": Tree.chain(heads.num_heads),
    }
    named = [Prompt(str(i), "heldout", ids) for i, ids in enumerate(prompts)]
    runs = decode_all(base, heads, output, shapes, named, evaluate, eos_token_ids)
    found = compare(runs, shapes, evaluate)
    rows = {
        f"eval/{key}": _mean(of["tree"][key] for of in found.values())
        for key in ("accept_length", "speedup")
    }
    rows["eval/identical"] = _mean(
        of[shape]["identical"] / of[shape]["compared"] for of in found.values() for shape in shapes
    )
    for at, of in found.items():
        rows[f"eval/{at}/rep8"] = of["plain"]["rep8"]
        for shape in shapes:
            rows |= {f"eval/{shape}/{at}/{key}": value for key, value in of[shape].items()}
    return rows


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def decode_all(
    base: PreTrainedModel,
    heads: Heads,
    output: OutputLayer,
    shapes: Mapping[str, Tree],
    prompts: Sequence[Prompt],
    evaluate: EvaluateConfig,
    eos_token_ids: tuple[int, ...],
) -> dict[str, dict[str, Runs]]:
    """Decode all prompts once at every temperature, plainly and with trees of several shapes.

    Returns:
        ``t<temperature>`` -> ``plain`` or name of the shape -> its runs.

    Raises:
        ValueError: if there are no prompts.
    """
    if not prompts:
        raise ValueError("prompts must hold at least 1 prompt, got 0")
    limit = evaluate.max_new_tokens
    methods = [plain_method(base, eos_token_ids, limit)]
    for name, tree in shapes.items():
        drafter = static_drafter(base, heads, output, tree)
        methods.append(
            drafted_method(name, base, drafter, eos_token_ids, limit, tree_nodes=tree.num_nodes)
        )
    with undisturbed(base, heads):
        return {
            f"t{temperature:g}": clock(methods, prompts, temperature, repeats=1, seed=SEED)
            for temperature in evaluate.temperatures
        }


def compare(
    runs: Mapping[str, Mapping[str, Runs]], shapes: Mapping[str, Tree], evaluate: EvaluateConfig
) -> dict[str, dict[str, dict[str, float]]]:
    """Return what :func:`decode_all` found, in figures.

    Returns:
        ``t<temperature>`` -> name of the shape -> :func:`figures`; of ``plain`` only ``rep8``, the
        mean share of repeated 8-grams.
    """
    found = {}
    for at, of in runs.items():
        plain = of["plain"]
        found[at] = {"plain": {"rep8": _mean(rep8(each.tokens) for each in plain.decoded)}}
        for name, tree in shapes.items():
            found[at][name] = figures(of[name], plain, evaluate.max_new_tokens, tree.max_depth)
    return found


def need_steps(runs: Mapping[str, Mapping[str, Runs]]) -> None:
    """Refuse texts without a single verify step, whose accept length nobody knows.

    Raises:
        ConfigError: if the base has ended every text with its first token.
    """
    if not any(each.accept_lengths for of in runs.values() for each in of["plain"].decoded):
        raise ConfigError("the base ends every text with its first token")


def figures(runs: Runs, plain: Runs, max_new_tokens: int, max_depth: int) -> dict[str, float]:
    """Return what a drafter did at one temperature, beside plain decoding of the same prompts.

    Args:
        runs: of the drafter.
        plain: of plain decoding.
        max_new_tokens: the limit of both.
        max_depth: of the drafter's tree.

    Returns:
        ``accept_length`` and its 95% interval over prompts ``accept_length_low|high``;
        ``head_{i}/acceptance`` where head i was tried at all, see :func:`conditional_acceptance`;
        ``speedup`` in tokens per second; ``identical`` texts among those ``compared``.
    """
    lengths = [each.accept_lengths for each in runs.decoded]
    low, high = ratio_ci95([list(map(sum, lengths))], [list(map(len, lengths))])
    pairs = list(zip(runs.decoded, plain.decoded, strict=True))
    return {
        "accept_length": mean_accept_length(lengths),
        "accept_length_low": low,
        "accept_length_high": high,
        **{
            f"head_{i}/acceptance": share
            for i, share in conditional_acceptance(runs.decoded, max_new_tokens, max_depth).items()
        },
        "speedup": _speed(runs) / _speed(plain),
        "identical": float(sum(a.tokens == b.tokens for a, b in pairs)),
        "compared": float(len(pairs)),
    }


def _speed(runs: Runs) -> float:
    return sum(len(each.tokens) for each in runs.decoded) / sum(runs.seconds[0])


def conditional_acceptance(
    decoded: Sequence[Decoded], max_new_tokens: int, max_depth: int
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
    tried: dict[int, int] = {}
    accepted: dict[int, int] = {}
    for text in decoded:
        left = max_new_tokens - 1  # the prefill gives the first token
        for step, length in enumerate(text.accept_lengths):
            ends = text.ended and step == len(text.accept_lengths) - 1
            # head i was right where the step gained i + 2 tokens; it had the chance where the
            # head before it was right and the limit leaves room for as many
            for i in range(min(length, left - 1, max_depth)):
                if ends and i == length - 1:
                    continue
                tried[i] = tried.get(i, 0) + 1
                accepted[i] = accepted.get(i, 0) + (length >= i + 2)
            left -= length
    return {i: accepted[i] / count for i, count in sorted(tried.items())}


def write_prompts(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write records so that :func:`read_prompts`, and ``bench prompts=``, read these very prompts.

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
    aside = path.with_suffix(".tmp")
    aside.write_text("".join(lines), encoding="utf-8")
    aside.replace(path)


def choose_tree(
    base: PreTrainedModel,
    heads: Heads,
    output: OutputLayer,
    prompts: Sequence[Tensor],
    tree: TreeConfig,
    evaluate: EvaluateConfig,
    eos_token_ids: tuple[int, ...],
    *,
    seed: int = 0,
) -> Calibration:
    """Return the tree that the settings give, or the fastest one measured on ``prompts``."""
    if tree.choices:
        return Calibration(Tree.from_choices(tree.choices), 0.0, {})
    base.eval()
    heads.eval()
    with torch.inference_mode():
        return calibrate(
            base,
            heads,
            output,
            prompts,
            eos_token_ids=eos_token_ids,
            max_new_tokens=evaluate.max_new_tokens,
            num_nodes=tree.num_nodes,
            seed=seed,
            dynamic=True,
        )


def final_evaluation(
    export: Export, path: Path, evaluate: EvaluateConfig, *, samples: int = 0
) -> Outcome:
    """Decode with an export as users will: what ``specheads.bench`` measures on the same prompts.

    The bench, given ``prompts``, ``num_prompts`` and ``max_new_tokens`` of this call, the export's
    dtype and as many threads, prints these accept lengths in its row ``tree``. Where the export's
    tree was chosen on these prompts, as recipes do, the figure is slightly flattering.

    Args:
        export: loaded, in the dtype in question.
        path: prompts, see :func:`specheads.measure.evaluate.write_prompts`.
        evaluate: how many prompts and tokens, and at which temperatures.
        samples: texts to keep.

    Returns:
        Figures ``final/<figure>/t<temperature>`` of the export's tree, see
        :func:`specheads.measure.evaluate.figures`; lengths and intervals rounded as the bench
        rounds them; ``final/rep8/t...`` of plain output. Samples, see :func:`sample_texts`, and
        the picture of the tree.

    Raises:
        ConfigError: if no prompt fits, or the base ends every text with its first token.
    """
    base, heads = export.base, export.heads
    context = context_length(base)
    prompts, _ = read_prompts(
        path,
        export.tokenizer,
        evaluate.num_prompts,
        max_length=1 << 30 if context is None else context - evaluate.max_new_tokens,
        device=base.device,
    )
    shapes, eos = {"tree": export.tree}, end_tokens(base, export.tokenizer)
    runs = decode_all(base, heads, output_layer(base), shapes, prompts, evaluate, eos)
    need_steps(runs)
    found = compare(runs, shapes, evaluate)
    figures = {
        f"final/{key}/{each}": round(value, 4)
        for each, of in found.items()
        for key, value in {**of["tree"], "rep8": of["plain"]["rep8"]}.items()
    }
    texts = sample_texts(prompts, runs, "tree", export.tokenizer, samples)
    return Outcome(figures, texts, tree_picture(export))


def sample_texts(
    prompts: Sequence[Prompt],
    runs: Mapping[str, Mapping[str, Runs]],
    drafter: str,
    tokenizer: PreTrainedTokenizerBase,
    num_samples: int,
) -> list[dict[str, Any]]:
    """Return what plain decoding and a drafter wrote, the temperatures in turn.

    Args:
        prompts: as many as there are texts in each of ``runs``.
        runs: ``t<temperature>`` -> method -> its runs; ``plain`` among the methods.
        drafter: the method beside it.
        tokenizer: makes text of tokens, special ones included.
        num_samples: how many at most.

    Returns:
        ``prompt, temperature, plain, drafted, accept_lengths, identical``: texts, the tokens that
        each verify step gained, and whether the tokens are the same.
    """
    found = []
    for number, prompt in enumerate(prompts):
        for at, of in runs.items():
            plain, drafted = of["plain"].decoded[number], of[drafter].decoded[number]
            found.append(
                {
                    "prompt": tokenizer.decode(prompt.input_ids[0].tolist()),
                    "temperature": float(at.removeprefix("t")),
                    "plain": tokenizer.decode(plain.tokens),
                    "drafted": tokenizer.decode(drafted.tokens),
                    "accept_lengths": drafted.accept_lengths,
                    "identical": plain.tokens == drafted.tokens,
                }
            )
            if len(found) >= num_samples:
                return found[:num_samples]
    return found


def tree_picture(export: Export) -> str:
    """Return the export's tree as SVG, as wide as was measured; empty for one never measured."""
    chances = (export.config["tree"].get("measured_on") or {}).get("acceptance", [])
    if not chances or len(chances) != len(export.tree.choices):
        return ""
    length = export.config["tree"]["expected_accept_length"]
    title = f"{export.tree.num_nodes} nodes, {length:.2f} tokens expected per step"
    return tree_svg(export.tree, chances, title=title)


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
        path: prompts, see :func:`specheads.measure.evaluate.write_prompts`.
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
        :func:`specheads.measure.evaluate.figures`; ``depth_{i}/acceptance``, how often guess i is
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
