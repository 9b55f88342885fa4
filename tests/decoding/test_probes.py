"""Probes: nodes of a tree that are read and never accepted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from specheads.attention.cache import TreeCache
from specheads.attention.tree import RowTrees, Tree
from specheads.decoding.accept import RULES, Acceptance
from specheads.decoding.loop import decode, first_chain, plain_decode, propose
from specheads.decoding.processors import Rows, bind
from specheads.drafters.contract import Candidates, Prefill, StepResult
from specheads.models.forward import ModelPass
from specheads.verification.acceptance import merge_siblings, walk, walk_on_host
from specheads.verification.sampling import Chance, Sampler
from tests.ragged import ROWS, new_tokens, padded
from tests.zoo import VOCAB, build

# a chain of probes below the root, and beside it a chain of guesses
TREE = Tree.from_choices([(0,), (1,), (0, 0), (1, 0), (0, 0, 0)])
PROBED = torch.tensor([False, True, False, True, False, True])


class Probing:
    """Guesses two tokens, and has its true continuation read as probes, which were all accepted.

    Args:
        truth: prompts and continuations.
        row_trees: a tree per row.
    """

    taps: tuple[str, ...] = ()
    deterministic = True

    def __init__(self, truth: list[list[int]], *, row_trees: bool = False) -> None:
        self.truth, self.row_trees = truth, row_trees
        self.said: list[tuple[int, list[int]]] = []  # row and position, what was said after probes

    def start(self, prefill: Prefill) -> list[list[int]]:
        """Return per row its number and the root's position."""
        return [[row, len(ids)] for row, ids in enumerate(prefill.ids)]

    def propose(self, state: list[list[int]]) -> Candidates:
        """Probe what is right; guess what is right at one position in three."""
        probes = []
        for row, at in state:
            ahead = [*self.truth[row][at : at + 4], 0, 0, 0, 0]
            hit = int(at % 3 == 0)
            second = (ahead[2] + 1) % VOCAB
            probes.append(
                [ahead[0], ahead[1], (ahead[1] + 1 - hit) % VOCAB, ahead[2], second, ahead[3]]
            )
        read = torch.tensor(probes)
        tree: Tree | RowTrees = TREE
        if self.row_trees:
            tree = RowTrees.from_parents(TREE.parents.repeat(len(state), 1), TREE.max_depth)
        return Candidates(read.masked_fill(PROBED, -1), tree, probes=read)

    def observe(self, state: list[list[int]], result: StepResult) -> list[list[int]]:
        """Keep what was said."""
        nodes = PROBED[: result.tokens.shape[1]].nonzero()[:, 0]
        for (row, at), said in zip(state, result.base_tokens[:, nodes].tolist(), strict=True):
            if result.own is None:
                self.said.append((row, [at, *said]))
        return [
            [row, at + len(new)] for (row, at), new in zip(state, result.new_tokens, strict=True)
        ]

    def select(self, state: list[list[int]], rows: Tensor) -> list[list[int]]:
        """Keep some rows."""
        return [state[row] for row in rows.tolist()]


@pytest.mark.parametrize("row_trees", [False, True])
@pytest.mark.parametrize("sampler", [Sampler(), Sampler(temperature=1.0, seed=3)], ids=str)
def test_the_base_says_what_follows_a_probe(sampler: Sampler, row_trees: bool) -> None:
    """Prevents probes read as token 0, accepted, or cut off beside the guesses a limit forbids."""
    model = build("llama")
    truth = []
    for i, row in enumerate(ROWS):
        own = Sampler(sampler.temperature, seed=sampler.seed + i)
        plain = plain_decode(model, row, max_new_tokens=24, sampler=own)
        truth.append(plain.sequences[0].tolist())
    drafter = Probing(truth, row_trees=row_trees)
    result = decode(model, drafter, **padded(ROWS), max_new_tokens=20, sampler=sampler)
    for row, ids, tokens in zip(result.rows, ROWS, truth, strict=True):
        start = ids.shape[1]
        assert row.new_tokens == tokens[start : start + 20]
        assert max(row.accept_lengths) == 2  # a guess; the probes would have given four
    for number, (at, *said) in drafter.said:
        assert said == truth[number][at + 2 : at + 5][: len(said)]
        assert len(said) == 3 or not row_trees


def test_processors_are_given_the_probes_own_prefix() -> None:
    """Prevents penalties at a probe that count token 0 in place of it."""
    processors = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.7), NoRepeatNGramLogitsProcessor(2)]
    )
    texts = [[3, 4, 5, 3], [6, 3, 4, 3, 9]]
    bound = bind(processors, texts, 5)
    assert bound is not None and bound.stateless
    read = torch.randint(3, 8, (2, TREE.num_nodes), generator=torch.Generator().manual_seed(0))
    logits = torch.randn(2, TREE.num_nodes, VOCAB)
    candidates = Candidates(read.masked_fill(PROBED, -1), TREE, probes=read)
    _, scores = bound.at_nodes(candidates, logits, Rows([0, 1], texts, [True] * 2))
    for i, text in enumerate(texts):
        for node, line in enumerate(TREE.ancestors.tolist()):
            prefix = [*text, *(int(read[i, each]) for each in line[1:] if each >= 0)]
            alone = processors(torch.tensor([prefix]), logits[i, node][None])
            assert scores[i, node].equal(alone[0])


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_no_rule_accepts_a_probe(rule: str, greedy: bool) -> None:
    """Prevents a text that goes on along tokens nobody guessed."""
    read = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 2, 4, 4, 6]])
    candidates = Candidates(read.masked_fill(PROBED, -1), TREE, probes=read)
    base_probs = torch.full((2, TREE.num_nodes, VOCAB), 1e-4)
    after = {0: 2, 1: 4, 2: 5, 3: 6, 4: 7, 5: 8}  # the base would follow the probes
    for node, token in after.items():
        base_probs[:, node, token] = 1.0
    base_probs /= base_probs.sum(-1, keepdim=True)
    acceptance = Acceptance(rule)
    if acceptance.walks(candidates, greedy=greedy):
        path, num_accepted = walk(candidates.tokens, TREE, base_probs.argmax(-1))
        on_host = walk_on_host(
            candidates.tokens.tolist(),
            [TREE.parents.tolist()] * 2,
            base_probs.argmax(-1).tolist(),
        )
        assert on_host == [[n for n in row if n >= 0] for row in path.tolist()]
    else:
        chance = Chance([0, 1], torch.tensor([9, 9]), TREE.num_nodes)
        path, num_accepted, _ = acceptance.decide(candidates, base_probs, chance, greedy=greedy)
    assert not set(path.flatten().tolist()) & {1, 3, 5}
    assert int(num_accepted[0]) == 0
    assert path[1, 1] == 2  # the equal guess beside the probe


def test_merging_leaves_probes_apart() -> None:
    """Prevents a probe that takes the guesses below an equal sibling with it."""
    read = torch.tensor([[1, 2, 2, 4, 4, 6]])
    tokens, tree = merge_siblings(read.masked_fill(PROBED, -1), TREE)
    assert tokens.tolist() == [[1, -1, 2, -1, 4, -1]]
    assert tree.parents.tolist() == [TREE.parents.tolist()]


class Fixed:
    """Proposes given candidates."""

    taps: tuple[str, ...] = ()
    deterministic = True

    def __init__(self, candidates: Candidates) -> None:
        self.candidates = candidates

    def propose(self, state: object) -> Candidates:
        """Propose them."""
        return self.candidates


@torch.no_grad()
def test_limits_forbid_guesses_and_leave_probes() -> None:
    """Prevents a probe misread because its row is near the limit while another is not."""
    read = torch.tensor([[1, 2, 3, 4, 5, 6]] * 2)
    drafter = Fixed(Candidates(read.masked_fill(PROBED, -1), TREE, probes=read))

    def base(*, compiled: bool = False) -> ModelPass:
        made = ModelPass(build("llama"), TreeCache(), compiled=compiled)
        made.read(torch.tensor([[7, 8]] * 2), [2, 2])
        return made

    asked: Any = drafter, None, base()
    found = propose(*asked, [2, 9])
    assert found.tokens.tolist() == [[1, -1, 3, -1, -1, -1], [1, -1, 3, -1, 5, -1]]
    assert found.inputs.equal(read) and found.own is None
    found = propose(*asked, [2, 2])
    assert found.inputs.tolist() == [[1, 2, 3]] * 2
    kept = propose(*asked[:2], base(compiled=True), [2, 2])
    assert kept.inputs.equal(read) and kept.tree == TREE


def test_a_chain_skips_probes_and_says_what_is_left() -> None:
    """Prevents a drafter that looks for its own nodes in the chain and finds others there."""
    read = torch.tensor([[1, 2, 3, 4, 5, 6]])
    chain = first_chain(Candidates(read.masked_fill(PROBED, -1), TREE, probes=read))
    assert chain.tokens.tolist() == chain.inputs.tolist() == [[1, 3, 5]]
    assert chain.own is not None and chain.own.tolist() == [[0, -1, 1, -1, 2, -1]]
    model = build("bloom")
    plain = plain_decode(model, ROWS[0], max_new_tokens=24).sequences
    drafter = Probing([plain[0].tolist()])
    result = decode(model, drafter, ROWS[0], max_new_tokens=20)
    assert result.new_tokens == plain[0, ROWS[0].shape[1] :][:20].tolist()
    assert max(result.accept_lengths) == 2 and not drafter.said


@torch.no_grad()
def test_compiled_passes_read_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a compiled pass that is given tokens where it should be given probes."""
    from specheads.models import forward

    forward._compiled_forward.cache_clear()
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, mode=None: real(f, backend="eager"))
    torch._dynamo.reset()
    model = build("llama", num_hidden_layers=1)
    plain = [plain_decode(model, row, max_new_tokens=24).sequences[0].tolist() for row in ROWS]
    drafter = Probing(plain)
    result = decode(model, drafter, **padded(ROWS), max_new_tokens=20, compile=True)
    assert new_tokens(result) == [
        text[row.shape[1] : row.shape[1] + 20] for text, row in zip(plain, ROWS, strict=True)
    ]
    assert drafter.said
    for number, (at, *said) in drafter.said:
        assert said == plain[number][at + 2 : at + 5]


@torch.no_grad()
def test_a_cache_holds_no_probes() -> None:
    """Prevents keys of probes committed in place of accepted tokens'."""
    model = build("llama")
    plain = plain_decode(model, ROWS[0], max_new_tokens=24).sequences[0].tolist()
    cache, fresh = TreeCache(), TreeCache()
    decode(model, Probing([plain]), ROWS[0], max_new_tokens=20, cache=cache)
    length = cache.lengths[0]
    ModelPass(model, fresh).read(torch.tensor([plain[:length]]), [length])
    for kept, new in zip(cache.layers, fresh.layers, strict=True):
        assert kept.keys is not None and new.keys is not None
        torch.testing.assert_close(
            kept.keys[:, :, :length], new.keys[:, :, :length], atol=1e-5, rtol=1e-4
        )
