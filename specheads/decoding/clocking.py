"""What drafting and verifying cost on this machine, clocked briefly where settings do not say."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.cost import CostCurve, clock_steps, ratios, runner
from specheads.decoding.speculation import Blank, clock_drafts, clocked_lengths
from specheads.drafters.adaptive import StepCosts
from specheads.drafters.contract import Drafter
from specheads.drafters.draft_model import DraftModelDrafter
from specheads.drafters.hybrid import HybridDrafter
from specheads.drafters.length import FixedLength
from specheads.models.base import input_device, input_embedding

OF_A_MODEL = {"draft", "draft_tree", "draft_heads"}  # drafters that run a draft model
_NUM_TOKENS, _REPEATS, _PROMPT = 16, 5, 16


def step_costs(base: PreTrainedModel, draft: PreTrainedModel, max_tokens: int) -> StepCosts:
    """Clock briefly, on tokens that mean nothing, what drafting and verifying cost here.

    Args:
        base: base model.
        draft: draft model.
        max_tokens: longest chain.
    """
    vocab_size = min(input_embedding(model).shape[0] for model in (base, draft))
    prompt = torch.arange(_PROMPT, device=input_device(base))[None] % vocab_size
    costs = clock_drafts(
        base,
        {"draft": lambda n: DraftModelDrafter(draft, FixedLength(n))},
        prompt,
        max_tokens=max_tokens,
        max_new_tokens=_NUM_TOKENS,
        repeats=_REPEATS,
    )["draft"]
    return costs.by_nodes(max_tokens)


def verify_costs(base: PreTrainedModel, max_nodes: int) -> list[float]:
    """Clock briefly what verify steps cost, in plain steps: of n nodes at index n, up to the most.

    Args:
        base: base model.
        max_nodes: largest tree, root included.
    """
    prompt = _prompt(base)
    sizes = [length + 1 for length in clocked_lengths(max(1, max_nodes - 1))]
    runs = [
        runner(base, None if size == 1 else Blank(size - 1), prompt, max_new_tokens=_NUM_TOKENS)
        for size in (1, *sizes)
    ]
    costs = ratios(clock_steps(runs, repeats=_REPEATS))
    curve = CostCurve.through(dict(zip((1, *sizes), costs, strict=True)))
    return [curve.at(max(1, n)) for n in range(max_nodes + 1)]


def member_costs(
    base: PreTrainedModel,
    names: Sequence[str],
    drafters: Sequence[Drafter],
    sizes: Sequence[int],
    draft: PreTrainedModel | None,
    *,
    max_nodes: int,
) -> list[StepCosts]:
    """Clock briefly what each of several drafters costs: where it copies, the verify step alone.

    Args:
        base: base model.
        names: as in ``decode.drafter``.
        drafters: their drafters.
        sizes: nodes of their largest trees.
        draft: the draft model, if one of them runs it.
        max_nodes: most that is verified in one step, root included.
    """
    verify = verify_costs(base, max_nodes)
    found = []
    for name, drafter, size in zip(names, drafters, sizes, strict=True):
        per_level = 0.0
        if name in OF_A_MODEL:
            assert draft is not None
            per_level = step_costs(base, draft, 2).draft
        elif name == "heads":
            # merging the guesses of heads with others' costs time as well
            runs = [
                runner(base, each, _prompt(base), max_new_tokens=_NUM_TOKENS)
                for each in (None, HybridDrafter([drafter]))
            ]
            whole = median(ratios(clock_steps(runs, repeats=_REPEATS))[1])
            # all levels at once: what one of them costs depends on how many there are
            per_level = max(0.0, whole - verify[size]) / _depth(drafter)
        found.append(StepCosts(per_level, verify))
    return found


def _depth(drafter: object) -> int:
    """Return the deepest level of a drafter of heads."""
    tree = getattr(drafter, "tree", None)
    depth: int = tree.max_depth if tree is not None else getattr(drafter, "max_depth", 1)
    return max(1, depth)


def _prompt(base: PreTrainedModel) -> Tensor:
    """Return tokens that mean nothing, [1, P]."""
    vocab_size = input_embedding(base).shape[0]
    return torch.arange(_PROMPT, device=input_device(base))[None] % vocab_size
