"""Logits processors see every row's own text, at every node of a tree its own prefix."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specheads.attention.tree import RowTrees, Tree, default_tree
from specheads.decoding.processors import RowProcessors, Rows, bind
from specheads.drafters.contract import Candidates
from specheads.verification.sampling import Survivors

V = 272
PAD = 256
PROMPTS = ([11, 12, 13, 11, 12, 14, 15], [12, 11, 12], [40, 41, 42, 40, 41], [13, 14, 13])
SETTINGS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "no_repeat": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[11], [12, 13], [11, 12, 14]]},
    "bias": {"sequence_bias": {(11,): 2.0, (12, 11): -3.0}},
    "min_new": {"min_new_tokens": 5, "eos_token_id": [14, 15]},
    "forced_eos": {"forced_eos_token_id": 15, "max_length": 10},
    "decay": {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": 14},
    "suppress": {"suppress_tokens": [11, 12], "begin_suppress_tokens": [13, 40]},
    "allowed": {"prefix_allowed_tokens_fn": lambda row, ids: [11 + row, 12, 13, int(ids[-1])]},
    "warpers": {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.01,
        "typical_p": 0.95,
        "epsilon_cutoff": 1e-3,
        "eta_cutoff": 1e-3,
        "renormalize_logits": True,
    },
    "many": {
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 0,
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 6,
        "eos_token_id": 12,
        "remove_invalid_values": True,
    },
}
WALKED = ("allowed",)  # not to be asked about nodes that may be rejected


def processors_of(model: PreTrainedModel, prompts: list[list[int]], **settings: Any) -> Any:
    """Return what generate() builds for left-padded prompts, as bind() takes it."""
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    ids = torch.tensor([[PAD] * n + p for n, p in zip(padding, prompts, strict=True)])
    mask = torch.tensor([[0] * n + [1] * len(p) for n, p in zip(padding, prompts, strict=True)])
    found: list[LogitsProcessorList] = []

    def catch(
        model: object,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: object,
        generation_config: object,
        **kwargs: object,
    ) -> Tensor:
        found.append(logits_processor)
        return input_ids

    settings = {"max_new_tokens": 6, "pad_token_id": PAD, **settings}
    if "max_length" in settings:
        del settings["max_new_tokens"]
    model.generate(ids, attention_mask=mask, custom_generate=catch, **settings)
    return found[0], prompts, longest


def after(
    bound: RowProcessors, logits: Tensor, rows: Sequence[int], texts: Sequence[Sequence[int]]
) -> Tensor:
    """Return scores [R, V] after texts from logits [R, V]."""
    roots = Candidates(torch.zeros(len(rows), 1, dtype=torch.long), Tree.chain(0))
    going = [True] * len(rows)
    return bound.at_nodes(roots, logits[:, None], Rows(rows, texts, going))[1][:, 0]


def random_trees(kind: str, num_rows: int) -> Tree | RowTrees:
    """Return one tree for all rows, or one per row."""
    if kind == "shared":
        return default_tree(3, 11)
    parents = [[-1, 0, 0, 1, 1, 3], [-1, 0, 1, 2, 2, 2], [-1, 0, 0, 0, 3, 2], [-1, 0, 1, 2, 0, 1]]
    return RowTrees.from_parents(torch.tensor(parents[:num_rows]), 3)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", ["shared", "per_row"])
def test_nodes_and_rows_are_as_if_alone(tiny_llama: LlamaForCausalLM, name: str, kind: str) -> None:
    """Prevents a penalty from a neighbour's row or path, and lengths that count the padding."""
    rows = [list(prompt) for prompt in PROMPTS]
    settings = SETTINGS[name]
    bound = bind(*processors_of(tiny_llama, rows, **settings))
    assert bound is not None
    generator = torch.Generator().manual_seed(3)
    texts = [
        [*row, *more] for row, more in zip(rows, ([12], [13, 12], [40, 13], [14, 13]), strict=True)
    ]
    tree = random_trees(kind, len(rows))
    tokens = torch.randint(11, 16, (4, tree.num_nodes), generator=generator)
    tokens[:, 0] = torch.tensor([text[-1] for text in texts])
    logits = torch.randn(4, tree.num_nodes, V, generator=generator)
    if name not in WALKED:
        every = Rows([0, 1, 2, 3], texts, [True] * 4)
        _, scores = bound.at_nodes(Candidates(tokens, tree), logits, every)
    changed = 0
    for i, text in enumerate(texts):
        kwargs = dict(settings)
        if "max_length" in settings:  # counts the padding
            kwargs["max_length"] = settings["max_length"] - len(PROMPTS[0]) + len(rows[i])
        if name == "allowed":
            kwargs["prefix_allowed_tokens_fn"] = lambda _, ids, i=i: SETTINGS["allowed"][
                "prefix_allowed_tokens_fn"
            ](i, ids)
        alone, *_ = processors_of(tiny_llama, [rows[i]], **kwargs)
        lines = tree.ancestors if isinstance(tree, Tree) else tree.ancestors[i]
        for node, line in enumerate(lines.tolist()):
            prefix = text + [int(tokens[i, j]) for j in line[1:] if j >= 0]
            expected = alone(torch.tensor([prefix]), logits[i, node][None].clone())
            assert after(bound, logits[i, node][None], [i], [prefix]).equal(expected)
            changed += not expected.equal(logits[i, node][None])
            if name not in WALKED:
                assert scores[i, node].equal(expected[0])
    assert changed > 0, "the test would prove nothing"
    assert bound.stateless is (name not in WALKED)
    assert any(bound.rows) is (name != "warpers")


def test_rows_may_have_gone(tiny_llama: LlamaForCausalLM) -> None:
    """Prevents a row's processors being taken for those of the row that moved into its place."""
    bound = bind(
        *processors_of(tiny_llama, [list(p) for p in PROMPTS], min_new_tokens=3, eos_token_id=12)
    )
    assert bound is not None
    logits = torch.randn(2, V)
    texts = [[*PROMPTS[1], 5, 5, 5], [*PROMPTS[2], 5, 5]]
    scores = after(bound, logits, [1, 2], texts)
    assert scores[0, 12] == logits[0, 12] and scores[1, 12] == -float("inf")


class Counting(LogitsProcessor):
    """Allows a token that depends on how often it was called."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Keep the text."""
        assert input_ids.shape[0] == scores.shape[0] == 1
        self.seen.append(input_ids[0].tolist())
        return scores + len(self.seen)


def test_processors_of_unknown_type_have_a_state_per_row() -> None:
    """Prevents one row's state, say of a grammar, being moved on by another row's tokens."""
    processor = Counting(nn.Linear(2, 2))
    bound = bind(LogitsProcessorList([processor]), [[1], [7]], 1)
    assert bound is not None and not bound.stateless
    for step in range(3):
        texts = [[1, 2, 3][: step + 1], [7, 8, 9][: step + 1]]
        assert after(bound, torch.zeros(2, 4), [0, 1], texts).tolist() == [[step + 1.0] * 4] * 2
    assert processor.seen == [[1], [1, 2], [1, 2, 3]]
    (copied,) = bound.rows[1]
    assert isinstance(copied, Counting)
    assert copied.seen == [[7], [7, 8], [7, 8, 9]]
    assert copied.model is processor.model, "a model is shared, not copied"
    with pytest.raises(ValueError, match="accepted path"):
        candidates = Candidates(torch.zeros(2, 2), Tree.chain(1))
        bound.at_nodes(candidates, torch.zeros(2, 2, 4), Rows([], [], []))


def test_what_cannot_be_copied_is_refused_for_a_batch_only() -> None:
    """Prevents one shared state where each row needs its own."""

    class Locked(LogitsProcessor):
        def __init__(self) -> None:
            self.generator = (i for i in range(3))

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores

    processors = LogitsProcessorList([Locked()])
    assert bind(processors, [[1]], 1) is not None
    with pytest.raises(ValueError, match="Locked cannot be copied for row 1 .* one prompt at a"):
        bind(processors, [[1], [2]], 1)


CHAINS = {
    "k": [TopKLogitsWarper(4)],
    "p": [TopPLogitsWarper(0.7)],
    "little p": [TopPLogitsWarper(0.05, min_tokens_to_keep=2)],
    "m": [MinPLogitsWarper(0.4)],
    "most m": [MinPLogitsWarper(1.0, min_tokens_to_keep=2)],
    "all": [
        SuppressTokensLogitsProcessor([0, 3]),
        TemperatureLogitsWarper(0.5),
        TopKLogitsWarper(7),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.2),
        LogitNormalization(),
    ],
    "reversed": [MinPLogitsWarper(0.2), TopPLogitsWarper(0.8), TopKLogitsWarper(4)],
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("slack", [0.2, 1e-4])
def test_what_rounding_may_cut_is_known(chain: str, slack: float) -> None:
    """Prevents an edge found too narrow: a token comes and goes, and no tie is seen.

    Scores come in clusters, so that edges fall between equals; each is then moved by up to half the
    slack, at random and to either end, and cut by transformers' own.
    """
    generator = torch.Generator().manual_seed(4)
    bound = bind(LogitsProcessorList(CHAINS[chain]), [[1]], 1)
    assert bound is not None and bound.cut
    places = torch.randn(400, 4, generator=generator)
    places[:, 1] = places[:, 0] + math.log(0.4)  # an edge of min-p
    which = torch.randint(4, (400, 12), generator=generator)
    scores = places.gather(1, which) + 0.4 * slack * torch.randn(400, 12, generator=generator)
    spread = torch.randn(40, 12, generator=generator)  # as a model's own are
    noise = torch.randn(440, 12, generator=generator)
    scores = torch.cat([scores, spread])
    left = Survivors(scores, torch.full((440, 1), slack))
    bound.leave(left)
    undecided = left.undecided(left.scores + noise)
    assert not (left.certain & ~left.possible).any()
    winners = torch.zeros(440, 12, dtype=torch.bool)
    for i in range(60):
        moved = torch.rand(scores.shape, generator=generator) - 0.5
        logits = scores + slack * (moved if i % 2 else 0.499 * moved.sign())
        cut = after(bound, logits, [], [])
        kept = cut.isfinite()
        assert not (kept & ~left.possible).any()
        assert not (left.certain & ~kept).any()
        winners.scatter_(1, (cut + noise).argmax(-1, keepdim=True), True)
    assert not ((winners.sum(-1) > 1) & ~undecided).any()
    assert 0 < undecided[:400].sum() < 400
    if slack < 1e-3:
        assert left.certain[400:].equal(left.possible[400:]) and not undecided[400:].any()


def test_rows_of_one_length_are_processed_together(
    tiny_llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a call per node, which would cost more than the step that it serves."""
    rows = [list(PROMPTS[0]), list(PROMPTS[0]), list(PROMPTS[1])]
    bound = bind(*processors_of(tiny_llama, rows, repetition_penalty=1.3, do_sample=True))
    assert bound is not None
    calls: list[tuple[int, ...]] = []
    original: Callable[..., Tensor] = LogitsProcessorList.__call__

    def count(self: Any, ids: Any, scores: Any, **kwargs: Any) -> Any:
        calls.append(tuple(ids.shape))
        return original(self, ids, scores, **kwargs)

    monkeypatch.setattr(LogitsProcessorList, "__call__", count)
    tree = default_tree(2, 6)
    widths = [tree.depths.tolist().count(d) for d in range(tree.max_depth + 1)]
    logits = torch.randn(3, tree.num_nodes, V)
    tokens = torch.zeros(3, tree.num_nodes, dtype=torch.long)
    bound.at_nodes(Candidates(tokens, tree), logits, Rows([0, 1, 2], rows, [True] * 3))
    assert calls == [
        *((2 * n, 7 + d) for d, n in enumerate(widths)),
        *((n, 3 + d) for d, n in enumerate(widths)),
        (3 * tree.num_nodes, 1),
    ]
