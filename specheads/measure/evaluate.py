"""Decode held-out prompts before, during and after training, with heads or with a draft model.

The recipes hand :func:`decode_heldout` and :func:`decode_with_draft` to the training loop; a
finished run shows what :func:`final_evaluation` returns.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads.attention.tree import Tree, default_tree
from specheads.config import ConfigError, EvaluateConfig, TreeConfig
from specheads.decoding.costs import clock_drafts, clock_steps, expected_tokens, ratios
from specheads.decoding.result import DecodedRow
from specheads.drafters.contract import Drafter
from specheads.drafters.draft_model import DraftModelDrafter
from specheads.drafters.heads import heads_drafter
from specheads.drafters.length import FixedLength
from specheads.measure.bench import Contest
from specheads.measure.clock import Budget, Prompt, Runs, clock
from specheads.measure.drafts import Alpha, agreement
from specheads.measure.plots import tree_svg
from specheads.measure.rows import accept_length_ci95, mean_accept_length, rep8, speed, whole
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


@dataclass(frozen=True)
class Heldout:
    """Prompts that heads or a draft model are measured on, and how.

    Attributes:
        base: base model.
        prompts: to decode.
        evaluate: how many tokens and at which temperatures.
        eos_token_ids: tokens that end a text.
        budget: time for all of it; where it ends, only the first prompts are decoded, as far as the
            time goes that each temperature has, and ``LEAST`` of them at the least.
    """

    base: PreTrainedModel
    prompts: Sequence[Prompt]
    evaluate: EvaluateConfig
    eos_token_ids: tuple[int, ...]
    budget: Budget = field(default_factory=Budget)

    def decode(self, drafters: Mapping[str, Drafter]) -> RunsAt:
        """Decode the prompts once at every temperature, plainly and with each of ``drafters``."""
        contest = Contest(self.base, self.eos_token_ids, None, self.evaluate.max_new_tokens)
        methods = [contest.ours(), *(contest.ours(*each) for each in drafters.items())]
        count, found = len(self.evaluate.temperatures), {}
        for number, temperature in enumerate(self.evaluate.temperatures):
            how: dict[str, Any] = {"budget": self.budget.part(1 / (count - number)), "least": LEAST}
            runs = clock(methods, self.prompts, temperature, repeats=1, seed=SEED, **how)
            found[f"t{temperature:g}"] = runs
        return found

    def of_trees(
        self, heads: Heads, output: OutputLayer, trees: Mapping[str, Tree]
    ) -> tuple[dict[str, FiguresAt], RunsAt]:
        """Measure heads with static trees; leave modes and random generators as they were found.

        Returns:
            By the trees' names, and temperature, what :func:`figures` names; and the runs.
        """
        drafters = {
            name: heads_drafter(self.base, heads, output, tree) for name, tree in trees.items()
        }
        with undisturbed(self.base, heads):
            runs = self.decode(drafters)
        return {
            name: {at: figures(of, name, self.evaluate, tree.max_depth) for at, of in runs.items()}
            for name, tree in trees.items()
        }, runs

    def of_draft(self, draft: PreTrainedModel) -> tuple[FiguresAt, RunsAt]:
        """Measure chains of ``NUM_TOKENS`` guesses of a draft model, likewise.

        At a temperature above 0 guesses are drawn from the draft and verified by rejection: the
        texts are then others than plain decoding's, of the same distribution.

        Args:
            draft: with the base's tokenizer; another dtype is fine.

        Returns:
            By temperature ``alpha``, the mean of sum_x min(base, draft) along plain decoding's
            texts (arXiv:2211.17192; at temperature 0 the share of tokens that the draft guesses
            best), and what :func:`figures` names, with ``depth`` for ``head``: how often guess i is
            accepted where those before it were. Texts are compared at temperature 0 only. And the
            runs, of ``plain`` and ``chain``.
        """
        found: FiguresAt = {}
        with undisturbed(self.base, draft):
            drafter = DraftModelDrafter(draft, FixedLength(NUM_TOKENS), sampling="sampled")
            runs = self.decode({"chain": drafter})
            for temperature in self.evaluate.temperatures:
                at = f"t{temperature:g}"
                of = figures(runs[at], "chain", self.evaluate, NUM_TOKENS)
                if temperature > 0:
                    del of["identical"], of["compared"]
                found[at] = {key.replace("head_", "depth_"): value for key, value in of.items()}
                how = Sampler(temperature=temperature), self.evaluate.max_new_tokens - 1
                pairs = zip(self.prompts, runs[at]["plain"].decoded, strict=False)
                texts = [
                    agreement(self.base, draft, prompt.input_ids, text.new_tokens, *how)
                    for prompt, text in pairs
                ]
                found[at]["alpha"] = Alpha(texts).alpha
        return found, runs

    def samples(
        self, runs: RunsAt, drafter: str, tokenizer: PreTrainedTokenizerBase, number: int
    ) -> list[dict[str, Any]]:
        """Return what plain decoding and a drafter wrote, the temperatures in turn.

        Args:
            runs: of the first prompts, as far as there was time.
            drafter: its name in ``runs``.
            tokenizer: makes text of tokens, special ones included.
            number: how many at most.

        Returns:
            ``prompt, temperature, plain, drafted, accept_lengths, identical``: texts, the tokens
            that each verify step gained, and whether the tokens are the same.
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
            for i, prompt in enumerate(self.prompts)
            for at, of in runs.items()
            if i < len(of["plain"].decoded)
            for plain, drafted in [(of["plain"].decoded[i], of[drafter].decoded[i])]
        )
        return list(islice(found, number))


def decode_heldout(heldout: Heldout, heads: Heads, output: OutputLayer) -> dict[str, float]:
    """Measure real acceptance: decode plainly, with a tree of ``evaluate.num_nodes``, and a chain.

    The tree is the same at every step of a run, so that one step compares with another.

    Args:
        heldout: prompts, and how they are decoded.
        heads: heads as they are now.
        output: the base's output layer.

    Returns:
        ``eval/accept_length`` (choose by it) and ``eval/speedup``: of the tree, means over the
        temperatures; ``eval/identical``: the share of all texts that are plain decoding's. For
        each shape (``tree``, ``chain``) and temperature (``t0``, ``t1``) what :func:`figures`
        names, as ``eval/tree/t0/accept_length``; ``eval/t0/rep8`` of plain output.
    """
    shapes = {
        "tree": default_tree(heads.num_heads, heldout.evaluate.num_nodes),
        "chain": Tree.chain(heads.num_heads),
    }
    found, _ = heldout.of_trees(heads, output, shapes)
    rows = _means(found["tree"], "accept_length", "speedup")
    rows["eval/identical"] = fmean(
        of["identical"] / of["compared"] for shape in found.values() for of in shape.values()
    )
    for shape, of_shape in found.items():
        for at, of in of_shape.items():
            rows[f"eval/{at}/rep8"] = of.pop("rep8")
            rows |= {f"eval/{shape}/{at}/{key}": value for key, value in of.items()}
    return rows


def decode_with_draft(heldout: Heldout, draft: PreTrainedModel) -> dict[str, float]:
    """Measure what a draft model is worth now: decode plainly, and with a chain of its guesses.

    Returns:
        ``eval/accept_length`` (choose by it), ``eval/alpha`` and ``eval/speedup``: means over the
        temperatures; and for each of them (``t0``, ``t1``) what :meth:`Heldout.of_draft` names, as
        ``eval/chain/t0/accept_length``.
    """
    found, _ = heldout.of_draft(draft)
    rows = _means(found, "accept_length", "alpha", "speedup")
    for at, of in found.items():
        rows |= {f"eval/chain/{at}/{key}": value for key, value in of.items()}
    return rows


def _means(found: FiguresAt, *keys: str) -> dict[str, float]:
    """Return means over the temperatures."""
    return {f"eval/{key}": fmean(of[key] for of in found.values()) for key in keys}


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
        ``speedup`` in tokens per second; ``identical`` texts among those ``compared``; ``rep8`` of
        plain output.
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
        "rep8": fmean(rep8(each.new_tokens) for each in plain.decoded),
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
    """Write records so that ``bench prompts=`` reads these very prompts.

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
    heldout: Heldout,
    tokenizer: PreTrainedTokenizerBase,
    measured: Export | PreTrainedModel,
    *,
    samples: int = 0,
) -> Outcome:
    """Decode with an export, or with a draft model, as users will.

    What ``specheads.bench`` measures on the same prompts: given what :func:`write_prompts` wrote of
    them as ``prompts``, their ``num_prompts`` and ``max_new_tokens``, the export's dtype and as
    many threads, it prints these accept lengths in its row ``tree``. Where the export's tree was
    chosen on these prompts, as recipes do, the figure is slightly flattering.

    Args:
        heldout: prompts, base and limits.
        tokenizer: of the base.
        measured: heads and tree on that base, or a draft model, as it is exported.
        samples: texts to keep.

    Returns:
        Figures ``final/<figure>/t<temperature>`` of the export's tree, see
        :func:`specheads.measure.evaluate.figures`, or of the draft model, see
        :meth:`Heldout.of_draft`; lengths and intervals rounded as the bench rounds them. Samples,
        see :meth:`Heldout.samples`, and the picture of the tree.

    Raises:
        ConfigError: if the base ends every text with its first token.
    """
    if isinstance(measured, Export):
        name, output, picture = "tree", output_layer(heldout.base), tree_picture(measured)
        by_name, runs = heldout.of_trees(measured.heads, output, {name: measured.tree})
        found = by_name[name]
    else:
        name, picture = "chain", ""
        found, runs = heldout.of_draft(measured)
    # nobody knows the accept length of texts without a verify step
    if not any(each.accept_lengths for of in runs.values() for each in of["plain"].decoded):
        raise ConfigError("the base ends every text with its first token")
    final = {f"final/prompts/{at}": float(len(of["plain"].decoded)) for at, of in runs.items()}
    for at, of in found.items():
        final |= {f"final/{key}/{at}": round(value, 4) for key, value in of.items()}
    return Outcome(final, heldout.samples(runs, name, tokenizer, samples), picture)


def tree_picture(export: Export) -> str:
    """Return the export's tree as SVG, as wide as was measured; empty for one never measured."""
    chances = (export.config["tree"].get("measured_on") or {}).get("acceptance", [])
    if not chances or len(chances) != len(export.tree.choices):
        return ""
    length = export.config["tree"]["expected_accept_length"]
    title = f"{export.tree.num_nodes} nodes, {length:.2f} tokens expected per step"
    return tree_svg(export.tree, chances, title=title)


_REPEATS = 3  # of what is clocked before training
_NEW_TOKENS = 48  # per clocked text


def describe_expected(
    heldout: Heldout, heads: Heads, output: OutputLayer, config: TreeConfig
) -> str:
    """Clock verify steps of the tree at hand beside plain steps; heads need not be trained yet.

    Args:
        heldout: the longest of its prompts is decoded, 48 tokens at most.
        heads: of the shape that is to be trained.
        output: the base's output layer.
        config: its ``choices``, else one of ``num_nodes`` nodes, or of the evaluation's, for heads
            that nobody has measured.

    Returns:
        The line about the cost, and above which accept length it pays.
    """
    base, evaluate = heldout.base, heldout.evaluate
    if config.choices:
        tree = Tree.from_choices(config.choices)
    else:
        tree = default_tree(heads.num_heads, config.num_nodes or evaluate.num_nodes)
    longest = max((each.input_ids for each in heldout.prompts), key=lambda ids: ids.shape[1])
    with undisturbed(base, heads):
        drafters = [None, heads_drafter(base, heads, output, tree)]
        tokens = min(evaluate.max_new_tokens, _NEW_TOKENS)
        how: dict[str, Any] = {"repeats": _REPEATS, "max_new_tokens": tokens}
        costs = ratios(clock_steps(base, drafters, longest, **how)[0])[1]
    cost = median(costs)
    return (
        f"speculation: a verify step of {tree.num_nodes} nodes costs {cost:.2f} plain steps here"
        f" ({min(costs):.2f} to {max(costs):.2f}): it pays above an accept length of {cost:.2f}"
    )


def describe_costs_of_drafting(heldout: Heldout, draft: PreTrainedModel) -> str:
    """Return a line for before the training: how good the draft model has to become to pay.

    What a pass costs does not depend on weights, so it is clocked now; the expected tokens of a
    step are those of arXiv:2211.17192, equation 1.

    Args:
        heldout: its first prompt is continued by both models.
        draft: draft model, trained or not.
    """
    base, prompt = heldout.base, heldout.prompts[0].input_ids
    makes = {"draft": lambda n: DraftModelDrafter(draft, FixedLength(n))}
    how = {"max_tokens": NUM_TOKENS, "max_new_tokens": heldout.evaluate.max_new_tokens}
    with undisturbed(base, draft):
        costs = clock_drafts(base, makes, prompt, repeats=2, **how)["draft"]

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
