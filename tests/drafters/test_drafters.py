"""The drafters: which tokens they propose."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from specheads.attention.tree import RowTrees, Tree, default_tree
from specheads.drafters.contract import FINAL, Prefill, StepResult
from specheads.drafters.growing import Grown
from specheads.drafters.heads import HeadsDrafter, HeadsState
from specheads.drafters.lookup import NgramDrafter
from specheads.models.heads import MedusaHeads, pruned_heads
from specheads.models.output import OutputLayer, output_layer
from specheads.verification.sampling import Sampler, gumbel_noise


def result_of(tokens: list[int], tree: Tree | None = None, **changes: object) -> StepResult:
    """Return a step that gained ``tokens`` along the first path of a tree."""
    tree = tree or Tree.chain(len(tokens) - 1)
    path = torch.full((1, tree.max_depth + 1), -1)
    path[0, : len(tokens)] = torch.arange(len(tokens))
    values: dict[str, object] = {
        "tree": tree,
        "tokens": torch.zeros(1, tree.num_nodes, dtype=torch.long),
        "base_tokens": torch.zeros(1, tree.num_nodes, dtype=torch.long),
        "hidden": {},
        "path": path,
        "num_accepted": torch.tensor([len(tokens) - 1]),
        "next_root": torch.tensor(tokens[-1:]),
        "new_tokens": [tokens],
    }
    return StepResult(**(values | changes))  # type: ignore[arg-type]


def prefill(tokens: Tensor, root: Tensor, hidden: Tensor | None = None) -> Prefill:
    """Return what was read of whole prompts [B, T]."""
    taps = {} if hidden is None else {FINAL: hidden}
    return Prefill(tokens.tolist(), tokens, [tokens.shape[1]] * len(tokens), taps, root)


def random_heads(lm_head: str, num_layers: int, vocab: int = 40) -> MedusaHeads:
    """Return heads that differ from each other."""
    heads = MedusaHeads(4, num_layers, 16, vocab, lm_head=lm_head)
    for parameter in heads.parameters():
        nn.init.normal_(parameter, std=0.5)
    return heads.eval()


LAYERS = [("own", 0), ("own", 1), ("own", 2), ("shared", 1), ("shared", 2)]


@pytest.mark.parametrize(("lm_head", "num_layers"), LAYERS)
@torch.no_grad()
def test_each_node_holds_its_heads_guess(lm_head: str, num_layers: int) -> None:
    """Prevents depth d filled by the wrong head, which only shows as low acceptance."""
    heads = random_heads(lm_head, num_layers)
    output = OutputLayer(nn.Linear(16, 40), scale=0.5, softcap=3.0)
    tree = default_tree(3, 12)
    drafter = HeadsDrafter(heads, output, tree)
    hidden, root = torch.randn(2, 5, 16), torch.tensor([7, 8])
    state = drafter.start(prefill(torch.zeros(2, 5, dtype=torch.long), root, hidden))
    candidates = drafter.propose(state)
    order = heads.logits(hidden[:, -1], output).argsort(-1, descending=True)  # [K, B, V]
    assert candidates.tree == tree
    assert candidates.tokens[:, 0].equal(root)
    for node in range(1, tree.num_nodes):
        expected = order[int(tree.depths[node]) - 1, :, int(tree.ranks[node])]
        assert candidates.tokens[:, node].equal(expected)


@pytest.mark.parametrize("kept", [None, (1, 4, 5, 9, 20, 21, 30)])
@pytest.mark.parametrize("shape", [default_tree(3, 12), Grown(2)])
@torch.no_grad()
def test_guesses_follow_the_noise_of_the_base_models_draws(
    shape: Tree | Grown, kept: tuple[int, ...] | None
) -> None:
    """Prevents noise of another position, row or token, which shows only as fewer tokens a step."""
    heads = random_heads("own", 1)
    if kept is not None:
        heads = pruned_heads(heads, torch.tensor(kept))
    output, sampler = OutputLayer(nn.Linear(16, 40)), Sampler(0.8, top_k=30, seed=5)
    ids, hidden = [[3] * 5, [4] * 3], torch.randn(2, 5, 16)
    tokens, root = torch.tensor([[3] * 5, [4] * 3 + [0] * 2]), torch.tensor([7, 8])
    read = Prefill(ids, tokens, [5, 3], {FINAL: hidden}, root, sampler, 40)
    drafter = HeadsDrafter(heads, output, shape)
    state = drafter.start(read)
    check_first_guesses(drafter, state, [(0, 6), (1, 4)], kept)
    new = [[1, 2], [3, 4, 5]]
    accepted = torch.tensor([[0, 1, -1], [0, 1, 2]])
    result = result_of(
        new[0], tree=Tree.chain(2), hidden={FINAL: torch.randn(2, 3, 16)}, path=accepted,
        num_accepted=torch.tensor([1, 2]), next_root=torch.tensor([2, 5]), new_tokens=new,
    )  # fmt: skip
    state = drafter.observe(state, result)
    check_first_guesses(drafter, state, [(0, 8), (1, 7)], kept)
    check_first_guesses(drafter, drafter.select(state, torch.tensor([1])), [(1, 7)], kept)
    elsewhere = drafter.start(replace(read, follows_draws=False))  # rules that do not look at draws
    assert elsewhere.draws.sampler.temperature == 0


def check_first_guesses(
    drafter: HeadsDrafter,
    state: HeadsState,
    places: list[tuple[int, int]],
    kept: tuple[int, ...] | None,
) -> None:
    """Compare the best guess of each depth with the draw at (row, position of the first guess)."""
    candidates = drafter.propose(state)
    logits = drafter.heads.logits(state.hidden, drafter.output)  # [K, B, V']
    sampler = Sampler(0.8, top_k=30, seed=5)
    for depth in range(1, candidates.tree.max_depth + 1):
        node = depth if isinstance(candidates.tree, RowTrees) else first_of(candidates.tree, depth)
        for i, (row, first) in enumerate(places):
            noise = gumbel_noise([5 + row], torch.tensor([[first + depth - 1]]), 40)[0, 0]
            allowed = torch.arange(40) if kept is None else torch.tensor(kept)
            scores = sampler.warp(logits[depth - 1, i]) + noise[allowed]
            assert int(candidates.tokens[i, node]) == int(allowed[scores.argmax()])


def first_of(tree: Tree, depth: int) -> int:
    """Return the node of best guesses at a depth."""
    return tree.choices.index((0,) * depth) + 1


@torch.no_grad()
def test_heads_trained_in_between_are_noticed() -> None:
    """Prevents drafting with a stale copy during evaluations in training."""
    heads, output = random_heads("own", 1), OutputLayer(nn.Linear(16, 40))
    drafter = HeadsDrafter(heads, output, Tree.chain(3))
    read = prefill(torch.zeros(1, 5, dtype=torch.long), torch.tensor([7]), torch.randn(1, 5, 16))
    before = drafter.propose(drafter.start(read)).tokens
    for parameter in heads.parameters():
        parameter.data = torch.randn_like(parameter)  # as engines do, unseen by autograd
    assert not drafter.propose(drafter.start(read)).tokens.equal(before)


@torch.no_grad()
def test_heads_continue_from_the_last_accepted_node() -> None:
    """Prevents drafting from the root's or the deepest node's hidden state."""
    drafter = HeadsDrafter(random_heads("own", 1), OutputLayer(nn.Linear(16, 40)), Tree.chain(3))
    ids = torch.zeros(2, 5, dtype=torch.long)
    state = drafter.start(prefill(ids, torch.tensor([1, 2]), torch.randn(2, 5, 16)))
    hidden = torch.randn(2, 4, 16)
    result = result_of(
        [1, 2, 3, 4],
        hidden={FINAL: hidden},
        path=torch.tensor([[0, 1, -1, -1], [0, 1, 2, -1]]),
        num_accepted=torch.tensor([1, 2]),
        next_root=torch.tensor([5, 6]),
        new_tokens=[[1, 5], [2, 3, 6]],
    )
    state = drafter.observe(state, result)
    assert state.root.tolist() == [5, 6]
    assert state.hidden.equal(torch.stack([hidden[0, 1], hidden[1, 2]]))


def test_tree_must_fit_the_heads(tiny_llama: LlamaForCausalLM) -> None:
    """Prevents a tree deeper than the heads from indexing past them."""
    heads = MedusaHeads(2, 1, 32, 272)
    output = output_layer(tiny_llama)
    with pytest.raises(ValueError, match="at most 2, one per head, got 3"):
        HeadsDrafter(heads, output, Tree.chain(3))
    with pytest.raises(ValueError, match="below the 272 tokens of the vocabulary, got 272"):
        HeadsDrafter(heads, output, Tree.from_choices([(272,)]))


def slow_lookup(tokens: list[int], longest: int, shortest: int, num: int) -> list[int]:
    """Search backwards for the longest suffix."""
    for n in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                copied = list(tokens)
                for i in range(num):
                    copied.append(copied[end + i])
                return copied[len(tokens) :]
    return []


@pytest.mark.parametrize(("longest", "shortest"), [(3, 1), (4, 2), (1, 1)])
def test_ngrams_are_looked_up_right(longest: int, shortest: int) -> None:
    """Prevents an index that finds the suffix itself, or misses matches across the prompt's end."""
    drafter = NgramDrafter(max_ngram=longest, num_tokens=5, min_ngram=shortest)
    tokens = torch.randint(4, (1, 9))
    state = drafter.start(prefill(tokens, torch.tensor([2])))
    text, lengths = [*tokens[0].tolist(), 2], set()
    for step in range(60):
        candidates = drafter.propose(state)
        expected = slow_lookup(text, longest, shortest, 5)
        assert candidates.tokens.tolist() == [[text[-1], *expected]]
        assert candidates.tree == Tree.chain(len(expected))
        lengths.add(len(expected))
        new = torch.randint(4 + step // 6, (1 + step % 3,)).tolist()
        state = drafter.observe(state, result_of(new))
        text += new
    assert lengths == {0, 5}


def test_ngram_settings_are_checked() -> None:
    """Prevents an empty n-gram, which would match anywhere."""
    with pytest.raises(ValueError, match="min_ngram must be in 1..3"):
        NgramDrafter(min_ngram=0)
    with pytest.raises(ValueError, match="num_tokens must be at least 1, got 0"):
        NgramDrafter(num_tokens=0)


def test_rows_with_less_to_copy_are_padded() -> None:
    """Prevents a row's guesses from leaking into its neighbour, and padding that counts."""
    tokens = torch.tensor([[1, 2, 3, 4, 1, 2], [5, 6, 7, 8, 9, 5]])
    drafter = NgramDrafter(num_tokens=3)
    state = drafter.start(prefill(tokens, torch.tensor([3, 30])))
    assert drafter.propose(state).tokens.tolist() == [[3, 4, 1, 2], [30, -1, -1, -1]]
    state = drafter.select(state, torch.tensor([1]))
    assert drafter.propose(state).tokens.tolist() == [[30]]
