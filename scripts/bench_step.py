"""Measure what a verify step costs, and what of it is the loop's own.

    python scripts/bench_step.py --checkpoint runs/hydra/export --out benchmarks/step.json

budget  per step, of every drafter and batch size asked for: the base model's forward pass, one pass
        of the heads, and the rest, phase by phase. Overhead is the step less those two. Clocked
        phases are of one decoding, the step without clocks of another, in turn with it and with
        plain decoding; in a batch of steps in which all rows take part.
verify  a verify step of N nodes beside model(...) on N tokens with the same cache, position ids and
        rows of logits, in turn; the ratio is the median over pairs of neighbouring calls.
growth  the second half of a long text beside the first, tree and plain decoding in turn. Tokens per
        step vary along a text, so growth per step is shown beside growth per token.

Times are medians with quartiles, in one process. On a machine that is not idle they mean nothing.
"""

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import harness
import numpy as np
import torch
from harness import spread
from torch import Tensor
from transformers import PreTrainedModel

from specheads.attention.cache import TreeCache
from specheads.attention.tree import default_tree
from specheads.config import DecodeConfig
from specheads.decoding import loop
from specheads.decoding.exported import Subject, choose_drafter
from specheads.decoding.result import Output, pad_left
from specheads.drafters.contract import Drafter
from specheads.drafters.heads import HeadsDrafter
from specheads.measure.clock import Prompt, now
from specheads.models import forward
from specheads.models.base import context_length, end_tokens
from specheads.models.block import BlockCache
from specheads.models.checkpoint import Export
from specheads.models.eagle import EagleCache
from specheads.models.forward import ModelPass
from specheads.models.head_cache import LayerCache
from specheads.models.heads import Steps, Walk
from specheads.models.mtp import TextCache
from specheads.system import hardware
from specheads.verification.sampling import Sampler

SHARE_LIMIT, MS_LIMIT = 0.08, 0.3  # of the overhead: one of the two is to be kept
VERIFY_LIMIT, GROWTH_LIMIT = 1.05, 1.10
REST = "rest of the loop"
FORWARD, HEADS = "base forward", "heads"
PHASES = (FORWARD, HEADS, "propose", "verify", "accept", "emit", "commit", "observe", "replay")
PASSES = (FORWARD, "verify", "commit")
CACHES = (LayerCache, BlockCache, EagleCache, TextCache)  # of heads that attend
ROWS = "rows"  # of a step: how many took part
KINDS = ("per_token", "per_step")


@dataclass
class Settings:
    """What is measured.

    Attributes:
        checkpoint: an export
        base: where the export's base model is now, if it was moved
        dtype: auto, float32, bfloat16, float16
        threads: 0: all
        repeats: decodings per prompt and method
        num_prompts: budget: held-out prompts
        drafters: budget: as in decode.drafter; heads are those of the export's own tree
        batches: budget: rows decoded together
        max_new_tokens: budget
        context: verify: cached tokens
        calls: verify: pairs per number of nodes
        compile: budget, growth: compiled passes, plain ones too
        out: write the JSON there
    """

    checkpoint: str
    base: str | None = None
    parts: tuple[Literal["budget", "verify", "growth"], ...] = ("budget", "verify", "growth")
    dtype: str = "auto"
    threads: int = 0
    repeats: int = 5
    temperatures: tuple[float, ...] = (0.0, 1.0)
    num_prompts: int = 6
    drafters: tuple[str, ...] = ("heads",)
    batches: tuple[int, ...] = (1,)
    max_new_tokens: int = 128
    nodes: tuple[int, ...] = (2, 8, 16, 24, 32, 64)
    context: int = 256
    calls: int = 200
    growth_tokens: int = 2000
    compile: bool = False
    seed: int = 0
    out: Path | None = None


def clock_steps(decode: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[list[float], ...]:
    """Decode; return when the tokens of the prefill and of each step were there, and how many.

    As long as all rows take part: when those of the first row were there, how many of every row.
    """
    times: list[float] = []
    counts: list[float] = []
    ended = False
    limits = [kwargs["max_new_tokens"]] * len(args[-1])

    def note(row: int, tokens: list[int]) -> None:
        nonlocal ended
        if not ended:
            if row == 0:
                times.append(time.perf_counter())
            counts.append(len(tokens))
        limits[row] -= len(tokens)
        ended |= len(limits) > 1 and limits[row] <= 0

    decode(*args, on_tokens=note, **kwargs)
    return times, counts


def differences(times: Sequence[float]) -> list[float]:
    """Return the milliseconds from each time to the next."""
    return [1e3 * (after - before) for before, after in pairwise(times)]


class Phases:
    """Clocks nested calls, each without what it calls that is clocked too, step by step.

    Attributes:
        steps: per step the seconds of every phase, and of the whole as ``step``.

    Args:
        device: waited for before every look at the clock.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps: list[dict[str, float]] = []
        self._step: dict[str, float] | None = None  # the one that is going on
        self._begin = 0.0
        self._open: list[list[Any]] = []  # [name, seconds of clocked calls inside]

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, clocked as ``name``; a call of propose begins a step."""

        def run(*args: Any, **kwargs: Any) -> Any:
            start = now(self.device)
            if name == "propose":
                if self._step is not None:
                    self.steps.append({**self._step, "step": start - self._begin})
                self._step, self._begin = dict.fromkeys(PHASES, 0.0), start
            outer = [each[0] for each in self._open]
            self._open.append([name, 0.0])
            if name == "emit" and self._step is not None:
                self._step[ROWS] = len(args[1])
            try:
                return function(*args, **kwargs)
            finally:
                total = now(self.device) - start
                _, inside = self._open.pop()
                if self._open:
                    self._open[-1][1] += total
                if self._step is not None:  # before the first step there is the prefill
                    label = "replay" if name == FORWARD and "accept" in outer else name
                    if outer[:1] in (["propose"], ["observe"]) and name in PASSES:
                        label = outer[0]  # a draft model's own
                    self._step[label] += total - inside

        return run

    @contextlib.contextmanager
    def watching(
        self,
        base: PreTrainedModel,
        drafter: Drafter,
        *,
        compile: bool = False,
    ) -> Iterator[None]:
        """Clock the phases of one text decoded while open; its last step is left out.

        Args:
            base: base model.
            drafter: that decodes.
            compile: the passes are compiled ones.
        """
        compiled_forward = forward._compiled_forward

        def clocked_forward(mode: str | None) -> Callable[..., Tensor]:
            return self.timed(FORWARD, compiled_forward(mode))

        places: list[tuple[Any, str, str]] = [
            (loop, "propose", "propose"),
            (loop, "accept", "accept"),
            (ModelPass, "verify", "verify"),
            (Output, "emit", "emit"),
            (TreeCache, "commit", "commit"),
            (drafter, "observe", "observe"),
            (Steps, "begin", HEADS),
            (Walk, "logits", HEADS),
            (Walk, "descend", HEADS),
            (Walk, "alone", HEADS),
            (Walk, "added", HEADS),
            *((cache, "append", HEADS) for cache in CACHES),
        ]
        if not compile:  # a forward in place of the model's own would be compiled with it
            places.append((base, "forward", FORWARD))
        with contextlib.ExitStack() as stack:
            for owner, attribute, name in places:
                clocked = self.timed(name, getattr(owner, attribute))
                stack.enter_context(patch.object(owner, attribute, clocked))
            for member in getattr(drafter, "members", [drafter]):
                if isinstance(member, HeadsDrafter):
                    clocked = self.clocked_snapshot(member.heads.snapshot)
                    stack.enter_context(patch.object(member.heads, "snapshot", clocked))
            stack.enter_context(patch.object(forward, "_compiled_forward", clocked_forward))
            yield
        self._step = None  # nothing tells where it ended

    def clocked_snapshot(self, snapshot: Callable[..., Any]) -> Callable[..., Any]:
        """Return what takes snapshots of parallel heads whose calls are clocked."""
        return lambda output: self.timed(HEADS, snapshot(output))


def measure_budget(
    export: Export,
    prompts: Sequence[Prompt],
    name: str,
    num_rows: int,
    temperature: float,
    given: Settings,
) -> dict[str, Any]:
    """Return where the time of a step goes, of batches of ``num_rows`` prompts."""
    base, num_nodes = export.base, export.tree.num_nodes
    drafter: Drafter = harness.tree_drafter(export)
    if name != "heads":
        subject = Subject(base, export.tokenizer, export)
        chosen = choose_drafter(subject, DecodeConfig(drafter=name))
        drafter, num_nodes = chosen.drafter, chosen.num_nodes
    texts = [prompt.input_ids for prompt in prompts]
    batches = [pad_left(texts[i : i + num_rows]) for i in range(0, len(texts), num_rows)]
    phases, plain_ms, step_ms, gained = Phases(base.device), [], [], []
    request: dict[str, Any] = {"compile": given.compile, "max_new_tokens": given.max_new_tokens}
    if num_rows == 1:  # rows of a batch go on to the limit together
        request["eos_token_ids"] = end_tokens(base, export.tokenizer)
    for repeat in range(given.repeats + 1):
        for index, (ids, mask) in enumerate(batches):
            request["sampler"] = Sampler(temperature, seed=given.seed + index)
            request["attention_mask"] = mask if num_rows > 1 else None
            plain, _ = clock_steps(loop.plain_decode, base, ids, **request)
            tree, counts = clock_steps(loop.decode, base, drafter, ids, **request)
            with phases.watching(base, drafter, compile=given.compile):
                loop.decode(base, drafter, ids, **request)
            if repeat == 0:  # to warm up
                phases.steps.clear()
                continue
            plain_ms += differences(plain)
            step_ms += differences(tree)
            gained += counts[len(ids) :]
    whole_steps = [step for step in phases.steps if step[ROWS] == num_rows]
    clocked = [{key: 1e3 * step[key] for key in (*PHASES, "step")} for step in whole_steps]
    overhead = [step["step"] - step[FORWARD] - step[HEADS] for step in clocked]
    share = spread([own / step["step"] for own, step in zip(overhead, clocked, strict=True)])
    for step in clocked:
        step[REST] = step["step"] - sum(step[key] for key in PHASES)
    found = {key: spread([step[key] for step in clocked]) for key in (*PHASES, REST)}
    whole, own = spread(step_ms), spread(overhead)
    rest = whole["median"] - found[FORWARD]["median"] - found[HEADS]["median"]
    return {
        "drafter": name,
        "batch": num_rows,
        "temperature": temperature,
        "tree_nodes": num_nodes,
        "accept_length": sum(gained) / max(len(gained), 1),
        "num_steps": len(step_ms),
        "plain_step_ms": spread(plain_ms),
        "step_ms": whole,
        "clocked_step_ms": spread([step["step"] for step in clocked]),
        "phases_ms": found,
        "overhead_ms": own,
        "overhead_share": share,
        "overhead_by_difference_ms": rest,
        "kept": share["median"] <= SHARE_LIMIT or own["median"] <= MS_LIMIT,
    }


@torch.inference_mode()
def measure_verify(export: Export, num_nodes: int, given: Settings) -> dict[str, Any]:
    """Return the cost of a verify step of ``num_nodes`` beside that of a raw forward pass."""
    base, device, context = export.base, export.base.device, given.context
    generator = torch.Generator().manual_seed(given.seed)
    vocab = base.get_output_embeddings().weight.shape[0]
    step = ModelPass(base, TreeCache())
    read = torch.randint(vocab, (1, context), generator=generator).to(device)
    step.read(read, [context])
    tree = default_tree(export.heads.num_heads, num_nodes).to(device)
    nodes = torch.randint(vocab, (1, tree.num_nodes), generator=generator).to(device)
    positions = torch.arange(context, context + tree.num_nodes, device=device)[None]
    more = {"past_key_values": step.cache, "use_cache": True, "position_ids": positions}

    def verify() -> None:
        assert step.verify(nodes, tree).shape[1] == tree.num_nodes

    def raw() -> None:
        assert base(input_ids=nodes, **more).logits.shape[1] == tree.num_nodes

    taken = harness.take_turns({"verify": verify, "raw": raw}, given.calls, warmup=10)
    ours, theirs = taken["verify"]["seconds"], taken["raw"]["seconds"]
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    draws = random.Random(0)
    medians = sorted(statistics.median(draws.choices(ratios, k=len(ratios))) for _ in range(500))
    return {
        "num_nodes": tree.num_nodes,
        "context": context,
        "verify_ms": spread([1e3 * each for each in ours]),
        "raw_ms": spread([1e3 * each for each in theirs]),
        "ratio": spread(ratios),
        "kept": statistics.median(ratios) <= VERIFY_LIMIT,
        "ratio_ci95": [medians[12], medians[-13]],  # bootstrap of the median
    }


def halves(times: Sequence[float], counts: Sequence[float]) -> dict[str, tuple[float, float]]:
    """Return milliseconds per token, per step, and tokens per step, of both halves of a text."""
    ms, gained = np.array(differences(times)), np.array(counts[1:])
    left = sum(counts) / 2 - np.cumsum(counts)[:-1]  # tokens to the middle when a step begins
    first = np.clip(left / gained, 0, 1)  # a step across the middle is divided
    halves = np.stack([first, 1 - first])
    time, tokens, steps = halves @ ms, halves @ gained, halves.sum(1)
    found = {"ms_per_token": time / tokens, "ms_per_step": time / steps}
    found["tokens_per_step"] = tokens / steps
    return {key: tuple(each.tolist()) for key, each in found.items()}


def measure_growth(
    export: Export, prompt: Tensor, temperature: float, given: Settings
) -> dict[str, Any]:
    """Return by how much the second half of a long text is slower than the first."""
    base, drafter = export.base, harness.tree_drafter(export)
    runs: dict[str, list[dict[str, tuple[float, float]]]] = {"plain": [], "tree": []}
    # nothing ends a text, so that all are of one length
    request = {"sampler": Sampler(temperature, seed=given.seed), "compile": given.compile}
    for repeat in range(-1, given.repeats):
        limit = given.growth_tokens if repeat >= 0 else 16  # to warm up
        for name in ("plain", "tree") if repeat % 2 else ("tree", "plain"):
            decode, more = (loop.decode, [drafter]) if name == "tree" else (loop.plain_decode, [])
            clocked = clock_steps(decode, base, *more, prompt, max_new_tokens=limit, **request)
            if repeat >= 0:
                runs[name].append(halves(*clocked))
    row: dict[str, Any] = {"temperature": temperature, "new_tokens": given.growth_tokens}
    row["prompt_tokens"] = prompt.shape[1]
    grown: dict[tuple[str, str], list[float]] = {}
    for name, found in runs.items():
        row[name] = {
            key: [spread([each[key][i] for each in found]) for i in (0, 1)] for key in found[0]
        }
        for kind in KINDS:
            parts = (each[f"ms_{kind}"] for each in found)
            grown[name, kind] = [second / first for first, second in parts]
            row[name][f"growth_{kind}"] = spread(grown[name, kind])
    for kind in KINDS:
        pairs = zip(grown["tree", kind], grown["plain", kind], strict=True)
        row[f"beyond_plain_{kind}"] = spread([tree / plain for tree, plain in pairs])
    row["kept"] = row["beyond_plain_per_token"]["median"] <= GROWTH_LIMIT
    return row


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    given = harness.parse(Settings, argv)
    device = hardware.pick_device()
    hardware.pin_threads(given.threads)
    export, prompts, digest = harness.open_export(
        given.checkpoint, given.num_prompts, given.max_new_tokens, given.dtype, given.base, device
    )
    context = context_length(export.base) or 1 << 30
    room = min(*(p.input_ids.shape[1] for p in prompts), context - given.growth_tokens)
    if "growth" in given.parts and room < 1:
        raise SystemExit(f"--growth-tokens {given.growth_tokens}: the context is {context}")
    start = prompts[0].input_ids[:, :room]
    rows: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "budget": lambda: [
            measure_budget(export, prompts, *chosen, given)
            for chosen in product(given.drafters, given.batches, given.temperatures)
        ],
        "verify": lambda: [measure_verify(export, nodes, given) for nodes in given.nodes],
        "growth": lambda: [measure_growth(export, start, t, given) for t in given.temperatures],
    }
    found = {part: rows[part]() for part in given.parts}
    print(harness.describe(found))
    document = harness.report(given, **found)
    dtype = str(export.base.dtype).removeprefix("torch.")
    document["settings"] |= {"dtype": dtype, "prompts_sha256": digest}
    harness.write(given.out, document)


if __name__ == "__main__":
    main()
