"""Measure what rounding in 16 bits changes between plain and drafted decoding, and what evens it.

    python scripts/bench_rounding.py --base FOLDER --prompts questions.jsonl --out rounding.json

A pass over several tokens may round otherwise than one over one token; with ``invariant`` both
round alike, where ``rounds_by_shape`` of specheads/models/forward.py says that they can. All is
done without it ("shape") and with it ("alike"):

rows   random trees of several sizes behind several contexts: the largest difference of logits to
       those of one-token passes along each path, and the share of nodes whose logits are bit-equal.
costs  a pass over one token and over trees, with and without, in turn; the ratio's median and
       quartiles over pairs of neighbouring calls. On a machine that is not idle they mean nothing.
texts  texts by temperature, tree and batch: how many of drafted decoding equal plain decoding's of
       the same way, alone; the drafter knows plain's text and lies in a share of its guesses. Of
       first differences it counts those where plain's two best tokens lay within the noise.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import harness
import torch
from harness import spread, take_turns
from torch import Tensor
from transformers import PreTrainedModel

from specheads.attention.cache import TreeCache
from specheads.attention.tree import Tree, default_tree
from specheads.decoding.loop import decode, plain_decode
from specheads.decoding.result import pad_left
from specheads.drafters.contract import Candidates, Prefill, StepResult
from specheads.measure.clock import Prompt, prompts_of
from specheads.measure.identity import Rounding, compare
from specheads.models.base import end_tokens, load_base_model, load_tokenizer
from specheads.models.forward import ModelPass
from specheads.system import hardware
from specheads.verification.sampling import Sampler

WAYS = {"shape": False, "alike": True}


@dataclass
class Settings:
    """What is measured.

    Attributes:
        base: folder or hub name of a model
        prompts: texts: a file of prompts or questions
        dtype: bfloat16, float16, float32
        threads: 0: all
        nodes: rows, costs: of the trees
        contexts: rows, costs: cached tokens
        calls: costs: pairs per tree and context
        tree_nodes: texts: of the drafter's trees
        temperatures: texts: of the sampling
        batches: texts: prompts that are drafted for together
        ways: texts: without it ("shape"), with it ("alike"), or both
        hit_rate: texts: share of the drafter's best guesses that are right
        out: write the JSON there
    """

    base: str
    prompts: Path | None = None
    parts: tuple[Literal["rows", "costs", "texts"], ...] = ("rows", "costs", "texts")
    dtype: str = "bfloat16"
    threads: int = 0
    nodes: tuple[int, ...] = (2, 4, 8, 12, 16, 32)
    contexts: tuple[int, ...] = (40, 200, 250, 300, 500)
    calls: int = 100
    num_prompts: int = 96
    max_new_tokens: int = 64
    tree_nodes: tuple[int, ...] = (12, 16)
    temperatures: tuple[float, ...] = (0.0, 0.7)
    batches: tuple[int, ...] = (1, 4)
    ways: tuple[Literal["shape", "alike"], ...] = ("shape", "alike")
    hit_rate: float = 0.5
    seed: int = 0
    out: Path | None = None


class Told:
    """A drafter that is told the texts beforehand, and lies in a share of its guesses.

    Its state is, per row, which text it is, where its root stands, and the root.

    Args:
        tree: its shape.
        texts: prompts and continuations.
        hit_rate: how often a node's best guess is the text's next token.
    """

    taps, deterministic = (), True

    def __init__(self, tree: Tree, texts: Sequence[Sequence[int]], hit_rate: float) -> None:
        self.tree, self.texts, self.hit_rate = tree, texts, hit_rate
        self.random = random.Random(0)

    def start(self, prefill: Prefill) -> list[tuple[int, int, int]]:
        """Return the rows."""
        places = map(len, prefill.ids)
        return list(zip(prefill.rows, places, prefill.root.tolist(), strict=True))

    def propose(self, state: list[tuple[int, int, int]]) -> Candidates:
        """Guess."""
        rows = []
        depths, ranks = self.tree.depths[1:].tolist(), self.tree.ranks[1:].tolist()
        for row, position, root in state:
            tokens, text = [root], self.texts[row]
            for depth, rank in zip(depths, ranks, strict=True):
                place = position + depth
                right = text[place] if place < len(text) else 0
                lie = right + 1 + rank if right < 1000 else right - 1 - rank
                tokens.append(right if rank == 0 and self.random.random() < self.hit_rate else lie)
            rows.append(tokens)
        return Candidates(torch.tensor(rows), self.tree)

    def observe(
        self, state: list[tuple[int, int, int]], result: StepResult
    ) -> list[tuple[int, int, int]]:
        """Move on."""
        gained = zip(state, result.new_tokens, result.next_root.tolist(), strict=True)
        return [(row, place + len(new), root) for (row, place, _), new, root in gained]

    def select(self, state: list[tuple[int, int, int]], rows: Tensor) -> list[tuple[int, int, int]]:
        """Keep some rows."""
        return [state[row] for row in rows.tolist()]

    def join(
        self, state: list[tuple[int, int, int]], other: list[tuple[int, int, int]]
    ) -> list[tuple[int, int, int]]:
        """Take the rows of both."""
        return [*state, *other]


def random_tree(num_nodes: int, seed: int) -> Tree:
    """Return a tree grown at random places."""
    place = random.Random(seed)
    choices: list[tuple[int, ...]] = [()]
    while len(choices) < num_nodes:
        parent = place.choice(choices)
        rank = sum(len(each) > len(parent) and each[:-1] == parent for each in choices)
        choices.append((*parent, rank))
    return Tree.from_choices(choices[1:])


def behind(model: PreTrainedModel, ids: Tensor, alike: bool) -> ModelPass:
    """Return passes behind a text [1, P] that was read."""
    base = ModelPass(model, TreeCache(), invariant=alike)
    base.read(ids, [ids.shape[1]])
    return base


@torch.inference_mode()
def rows(model: PreTrainedModel, given: Settings) -> list[dict[str, Any]]:
    """Compare the nodes of trees with one-token passes along their paths."""
    found = []
    draw = torch.Generator().manual_seed(given.seed)
    vocab = model.config.get_text_config().vocab_size
    for context in given.contexts:
        ids = torch.randint(vocab, (1, context), generator=draw)
        for num_nodes in given.nodes:
            tree = random_tree(num_nodes, given.seed)
            nodes = torch.randint(vocab, (1, num_nodes), generator=draw)
            line: dict[str, Any] = {"context": context, "nodes": num_nodes}
            for name, alike in WAYS.items():
                base = behind(model, ids, alike)
                in_tree = base.verify(nodes, tree)[0]
                errors: dict[int, float] = {}
                for path in tree.paths.tolist():
                    base.cache.shorten([context])
                    for node in (each for each in path if each >= 0):
                        alone = base.read(nodes[:, node : node + 1], [1])[0]
                        errors[node] = float((in_tree[node] - alone).abs().max())
                line[f"{name}_error"] = max(errors.values())
                line[f"{name}_equal"] = sum(not e for e in errors.values()) / num_nodes
            print(line, flush=True)
            found.append(line)
    return found


@torch.inference_mode()
def costs(model: PreTrainedModel, given: Settings) -> list[dict[str, Any]]:
    """Clock passes with and without, in turn."""
    found = []
    for context in given.contexts:
        ids = torch.ones(1, context, dtype=torch.long)
        for num_nodes in (1, *given.nodes):
            tree = random_tree(num_nodes, given.seed)
            nodes = torch.ones(1, num_nodes, dtype=torch.long)
            bases = {name: behind(model, ids, alike) for name, alike in WAYS.items()}

            def one(base: ModelPass, nodes: Tensor = nodes, tree: Tree = tree) -> Callable[[], Any]:
                return lambda: base.verify(nodes, tree)

            clocked = take_turns({n: one(b) for n, b in bases.items()}, given.calls, warmup=3)
            shape, alike = (clocked[name]["seconds"] for name in WAYS)
            ratio = spread([b / a for a, b in zip(shape, alike, strict=True)])
            line = {"context": context, "nodes": num_nodes, "ratio": ratio}
            line |= {"shape_ms": 1e3 * spread(shape)["median"]}
            print(line, flush=True)
            found.append(line)
    return found


def texts(model: PreTrainedModel, given: Settings, tokenizer: Any) -> list[dict[str, Any]]:
    """Count the texts that equal plain decoding's, with and without."""
    assert given.prompts is not None
    limit, found = given.max_new_tokens, []
    prompts, _ = prompts_of(model, tokenizer, given.prompts, given.num_prompts, limit)
    settings = {"max_new_tokens": limit, "eos_token_ids": end_tokens(model, tokenizer)}
    for temperature in given.temperatures:
        samplers = [Sampler(temperature, seed=number) for number in range(len(prompts))]
        for name in given.ways:
            alike = WAYS[name]
            plain = [
                plain_decode(
                    model, prompt.input_ids, invariant=alike, sampler=sampler, **settings
                ).new_tokens
                for prompt, sampler in zip(prompts, samplers, strict=True)
            ]
            known = [[*p.input_ids[0].tolist(), *t] for p, t in zip(prompts, plain, strict=True)]
            for num_nodes, size in itertools.product(given.tree_nodes, given.batches):
                tree, drafted = default_tree(3, num_nodes), []
                for first in range(0, len(prompts), size):
                    some = slice(first, first + size)
                    ids, mask = pad_left([prompt.input_ids for prompt in prompts[some]])
                    drafter = Told(tree, known[some], given.hit_rate)
                    how = {"attention_mask": mask, "sampler": samplers[first], "invariant": alike}
                    rows = decode(model, drafter, ids, **how, **settings).rows
                    drafted += [row.new_tokens for row in rows]
                line = {"way": name, "temperature": temperature, "nodes": num_nodes, "batch": size}
                line |= judge(model, prompts, plain, drafted, samplers, num_nodes)
                print(line, flush=True)
                found.append(line)
    return found


def judge(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    plain: list[list[int]],
    drafted: list[list[int]],
    samplers: Sequence[Sampler],
    num_nodes: int,
) -> dict[str, int]:
    """Return how many texts are plain's, and how many first differences rounding explains."""
    pairs = [(p.input_ids, text) for p, text in zip(prompts, plain, strict=True)]
    differing = [i for i, text in enumerate(drafted) if text != plain[i]]
    noise = Rounding(model, [pairs[i] for i in differing], [num_nodes])
    first = compare(prompts, plain, drafted, samplers, rounding=noise)
    near = sum(each.near_tie for each in first)
    return {"equal": len(drafted) - len(first), "differ": len(first), "near_ties": near}


def main() -> None:
    """Measure what was asked for."""
    given = harness.parse(Settings)
    if "texts" in given.parts and given.prompts is None:
        raise SystemExit("texts needs --prompts; or choose --parts rows costs")
    hardware.pin_threads(given.threads)
    model = load_base_model(given.base, dtype=given.dtype)
    found: dict[str, Any] = {}
    if "rows" in given.parts:
        found["rows"] = rows(model, given)
    if "costs" in given.parts:
        found["costs"] = costs(model, given)
    if "texts" in given.parts:
        found["texts"] = texts(model, given, load_tokenizer(given.base))
        print(found["texts"])
    harness.write(given.out, harness.report(given, **found))


if __name__ == "__main__":
    main()
