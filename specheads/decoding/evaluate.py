"""Decode held-out prompts during and after training: the recipes hand these to the two loops."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.config import ConfigError, EvaluateConfig, TreeConfig
from specheads.decoding.calibrate import Calibration, calibrate
from specheads.decoding.measure import (
    Decoded,
    Prompt,
    Runs,
    clock,
    drafted_method,
    plain_method,
)
from specheads.decoding.stats import mean_accept_length, ratio_ci95, rep8
from specheads.drafters.made import static_drafter
from specheads.models.forward import undisturbed
from specheads.models.kinds import Heads
from specheads.models.output import OutputLayer
from specheads.tree import Tree, default_tree

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
