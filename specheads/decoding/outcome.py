"""What a finished run shows: figures of its export, texts behind them, and its tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from specheads.config import EvaluateConfig
from specheads.decoding.draw_tree import tree_svg
from specheads.decoding.evaluate import compare, decode_all, need_steps
from specheads.decoding.measure import Prompt, Runs, read_prompts
from specheads.log import Outcome
from specheads.models.base import context_length, end_tokens
from specheads.models.checkpoint import Export
from specheads.models.output import output_layer


def final_evaluation(
    export: Export, path: Path, evaluate: EvaluateConfig, *, samples: int = 0
) -> Outcome:
    """Decode with an export as users will: what ``specheads.bench`` measures on the same prompts.

    The bench, given ``prompts``, ``num_prompts`` and ``max_new_tokens`` of this call, the export's
    dtype and as many threads, prints these accept lengths in its row ``tree``. Where the export's
    tree was chosen on these prompts, as recipes do, the figure is slightly flattering.

    Args:
        export: loaded, in the dtype in question.
        path: prompts, see :func:`specheads.decoding.evaluate.write_prompts`.
        evaluate: how many prompts and tokens, and at which temperatures.
        samples: texts to keep.

    Returns:
        Figures ``final/<figure>/t<temperature>`` of the export's tree, see
        :func:`specheads.decoding.evaluate.figures`; lengths and intervals rounded as the bench
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
