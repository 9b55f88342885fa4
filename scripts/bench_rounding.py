"""Measure what rounding in 16 bits changes between plain and drafted decoding, and what evens it.

    python scripts/bench_rounding.py --base FOLDER --prompts questions.jsonl --out rounding.json

A pass over several tokens may round otherwise than one over one token; with ``same_rounding`` both
round alike, where ``rounds_by_shape`` of specheads/models/forward.py says that they can. All is
done without it ("shape") and with it ("alike"):

rows   random trees of several sizes behind several contexts: the largest difference of logits to
       those of one-token passes along each path, and the share of nodes whose logits are bit-equal.
costs  a pass over one token and over trees, with and without, in turn; the ratio's median and
       quartiles over pairs of neighbouring calls. On a machine that is not idle they mean nothing.
texts  greedy texts: how many of drafted decoding equal plain's, the drafter knowing plain's text
       and lying in a share of its guesses; beside them what rounding alone does to plain decoding:
       plain in a batch of two equal rows, and in passes as wide as the tree's, all guesses wrong.
       Of first differences it counts those where plain's two best tokens lay within the noise.
"""

import random
from collections.abc import Callable, Mapping, Sequence
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
        tree_nodes: texts: of the drafter's tree
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
    tree_nodes: int = 12
    hit_rate: float = 0.5
    seed: int = 0
    out: Path | None = None


class Told:
    """A drafter that is told the text beforehand, and lies in a share of its guesses.

    Args:
        tree: its shape.
        text: prompt and continuation.
        hit_rate: how often a node's best guess is the text's next token.
    """

    taps, deterministic = (), True

    def __init__(self, tree: Tree, text: Sequence[int], hit_rate: float) -> None:
        self.tree, self.text, self.hit_rate = tree, text, hit_rate
        self.random = random.Random(0)

    def start(self, prefill: Prefill) -> tuple[int, Tensor]:
        """Return where the text's root stands, and the root."""
        return len(prefill.ids[0]), prefill.root

    def propose(self, state: tuple[int, Tensor]) -> Candidates:
        """Guess."""
        position, root = state
        tokens = [int(root)]
        for depth, rank in zip(
            self.tree.depths[1:].tolist(), self.tree.ranks[1:].tolist(), strict=True
        ):
            place = position + depth
            right = self.text[place] if place < len(self.text) else 0
            hit = rank == 0 and self.random.random() < self.hit_rate
            tokens.append(right if hit else right + 1 + rank if right < 1000 else right - 1 - rank)
        return Candidates(torch.tensor([tokens]), self.tree)

    def observe(self, state: tuple[int, Tensor], result: StepResult) -> tuple[int, Tensor]:
        """Move on."""
        return state[0] + len(result.new_tokens[0]), result.next_root

    def select(self, state: tuple[int, Tensor], rows: Tensor) -> tuple[int, Tensor]:
        """Keep the only row."""
        return state


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
    base = ModelPass(model, TreeCache(), same_rounding=alike)
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


def texts(model: PreTrainedModel, given: Settings, tokenizer: Any) -> dict[str, Any]:
    """Count the greedy texts that equal plain decoding's, with and without."""
    assert given.prompts is not None
    limit = given.max_new_tokens
    prompts, _ = prompts_of(model, tokenizer, given.prompts, given.num_prompts, limit)
    settings = {"max_new_tokens": limit, "eos_token_ids": end_tokens(model, tokenizer)}
    tree = default_tree(3, given.tree_nodes)
    plain: dict[str, list[list[int]]] = {name: [] for name in WAYS}
    others: dict[str, list[list[int]]] = {}

    def note(name: str, text: Sequence[int]) -> None:
        others.setdefault(name, []).append(list(text))

    for number, prompt in enumerate(prompts, 1):
        ids = prompt.input_ids
        for name, alike in WAYS.items():
            own = plain_decode(model, ids, same_rounding=alike, **settings).new_tokens
            plain[name].append(own)
            known = [*ids[0].tolist(), *own]
            for kind, hit_rate in (("drafted", given.hit_rate), ("widened", 0.0)):
                drafter = Told(tree, known, hit_rate)
                drafted = decode(model, drafter, ids, same_rounding=alike, **settings)
                note(f"{name}_{kind}", drafted.new_tokens)
        twice = plain_decode(model, ids.repeat(2, 1), **settings).rows[0].new_tokens
        note("shape_pair", twice)
        equal = {name: count(name, plain, texts) for name, texts in others.items()}
        between = count("shape", plain, plain["alike"])
        print(
            f"{number} texts, equal to plain's: {equal}; plain with and without: {between}",
            flush=True,
        )
    judged = {name: judge(model, prompts, plain, name, others[name], given) for name in others}
    return {"texts": len(prompts), "plain_with_and_without": between, "ways": judged}


def count(name: str, plain: Mapping[str, Sequence[Any]], other: Sequence[Any]) -> int:
    """Return how many of some texts equal plain decoding's of the same way."""
    return sum(a == b for a, b in zip(plain[name.partition("_")[0]], other, strict=True))


def judge(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    plain: Mapping[str, list[list[int]]],
    name: str,
    other: list[list[int]],
    given: Settings,
) -> dict[str, int]:
    """Return how many texts are plain's, and how many first differences rounding explains."""
    way = name.partition("_")[0]
    pairs = [(p.input_ids, text) for p, text in zip(prompts, plain[way], strict=True)]
    differing = [i for i, text in enumerate(other) if text != plain[way][i]]
    noise = Rounding(model, [pairs[i] for i in differing], [given.tree_nodes])
    first = compare(prompts, plain[way], other, [Sampler()] * len(other), rounding=noise)
    near = sum(each.near_tie for each in first)
    return {"equal": len(other) - len(first), "differ": len(first), "near_ties": near}


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
