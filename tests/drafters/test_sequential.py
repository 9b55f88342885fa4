"""Drafters of heads that read the tokens drafted before their own, against one node at a time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from specheads.attention.tree import Tree, default_tree
from specheads.drafters import heads as drafter_module
from specheads.drafters.contract import FINAL, Prefill
from specheads.drafters.heads import HeadsDrafter, heads_drafter
from specheads.models import heads as heads_module
from specheads.models.heads import MedusaHeads
from specheads.models.output import OutputLayer, output_layer
from tests.toys import full_logits

KINDS: dict[str, dict[str, Any]] = {
    "markov": {"markov_rank": 5},
    "markov_shared": {"markov_rank": 5, "lm_head": "shared"},
    "markov_pruned": {"markov_rank": 5, "lm_head": "pruned", "num_kept": 90},
    "hydra": {"condition": True},
    "hydra_shared": {"condition": True, "lm_head": "shared", "num_layers": 0},
    "hydra_rows": {"condition": True, "lm_head": "shared_pruned", "num_kept": 90},
    "hydra_low_rank": {"condition": True, "lm_head": "low_rank", "rank": 8, "num_layers": 2},
    "everything": {"condition": True, "markov_rank": 5, "lm_head": "pruned", "num_kept": 90},
}
TREES = [
    default_tree(3, 12),
    Tree.chain(3),
    Tree.from_choices([(0,), (2,), (5,), (2, 1), (2, 3), (5, 0), (5, 0, 4), (5, 0, 0)]),
    Tree.from_choices([(1,)]),
    Tree.chain(0),
]


def build(base: LlamaForCausalLM, kind: str, std: float = 0.05, **more: Any) -> MedusaHeads:
    """Return three heads of a kind that differ from one another and hit now and then."""
    options = {"num_layers": 1, **KINDS[kind], **more}
    heads = MedusaHeads(3, options.pop("num_layers"), 32, 272, **options)
    with torch.no_grad():
        kept = torch.randperm(262)[:90] if heads.token_map is not None else None
        heads.init_from_output(output_layer(base).weight, kept)
        for name, parameter in heads.named_parameters():
            scale = 6 if "markov" in name or "condition" in name else 1
            parameter.add_(scale * std * torch.randn_like(parameter))
    heads.read_through(base)
    return heads.eval()


def prefill(base: LlamaForCausalLM, num_rows: int = 2) -> Prefill:
    """Return what was read of prompts of several lengths, with hidden states out of the air."""
    counts = [5, 3, 4][:num_rows]
    return Prefill(
        [[0] * count for count in counts],
        torch.zeros(num_rows, 5, dtype=torch.long),
        counts,
        {FINAL: 3 * torch.randn(num_rows, 5, 32)},
        torch.randint(0, 272, (num_rows,)),
    )


def one_by_one(
    heads: MedusaHeads, base: LlamaForCausalLM, output: OutputLayer, hidden: Tensor, root: int
) -> Any:
    """Return a function from a path of tokens to the logits [V] after it, head by head."""

    def logits(path: tuple[int, ...]) -> Tensor:
        tokens = torch.tensor([root, *path, *[0] * (2 - len(path))])  # those behind it are not read
        every = heads.logits(hidden, output, tokens)
        return full_logits(heads, every[len(path)])

    return logits


def slow_tree(logits: Any, tree: Tree) -> list[int]:
    """Fill a tree node by node; no two of its guesses are computed together."""
    tokens: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
    for choice in tree.choices:
        above = tokens[choice[:-1]]
        ranked = logits(above).argsort(descending=True, stable=True)
        tokens[choice] = (*above, int(ranked[choice[-1]]))
    return [tokens[choice][-1] for choice in tree.choices]


@pytest.mark.parametrize("tables", [True, False], ids=["tables", "products"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_each_node_continues_its_own_path(
    tiny_llama: LlamaForCausalLM, kind: str, tables: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that reads a sibling's path, or a place too far, only shows as low acceptance."""
    if not tables:
        monkeypatch.setattr(heads_module, "MAX_TABLE", 0)
    monkeypatch.setattr(drafter_module, "CANDIDATES", 272)  # all there are
    heads = build(tiny_llama, kind)
    output = OutputLayer(tiny_llama.lm_head, scale=0.5, softcap=4.0)
    for tree in TREES:
        read = prefill(tiny_llama, 3)
        drafter = heads_drafter(tiny_llama, heads, output, tree)
        candidates = drafter.propose(drafter.start(read))
        assert candidates.tree == tree and candidates.tokens[:, 0].equal(read.root)
        for row, hidden in enumerate(read.last_hidden(FINAL)):
            logits = one_by_one(heads, tiny_llama, output, hidden, int(read.root[row]))
            assert candidates.tokens[row, 1:].tolist() == slow_tree(logits, tree)


@torch.no_grad()
def test_what_was_drafted_matters(tiny_llama: LlamaForCausalLM) -> None:
    """Heads whose guesses are the same under every parent would pass for sequential ones."""
    heads, output = build(tiny_llama, "hydra"), output_layer(tiny_llama)
    tree = Tree.from_choices([(0,), (1,), (2,), (0, 0), (1, 0), (2, 0)])
    drafter = heads_drafter(tiny_llama, heads, output, tree)
    below = drafter.propose(drafter.start(prefill(tiny_llama))).tokens[:, 4:]
    assert len(set(below[0].tolist())) > 1


@pytest.mark.parametrize("kind", ["markov", "hydra", "everything"])
@torch.no_grad()
def test_weights_changed_in_between_are_noticed(tiny_llama: LlamaForCausalLM, kind: str) -> None:
    """Prevents drafting with stale tables during evaluations in training."""
    heads, output = build(tiny_llama, kind), output_layer(tiny_llama)
    drafter = heads_drafter(tiny_llama, heads, output, TREES[0])
    read = prefill(tiny_llama)
    drafter.propose(drafter.start(read))
    changed: list[Any] = [
        parameter
        for name, parameter in heads.named_parameters()
        if "markov" in name or "condition" in name
    ]
    if heads.condition:
        changed.append(tiny_llama.get_input_embeddings().weight)
    for parameter in changed:
        parameter.data.copy_(torch.randn_like(parameter))  # as engines do, unseen by autograd
        found = drafter.propose(drafter.start(read)).tokens
        anew = heads_drafter(tiny_llama, heads, output, TREES[0])
        assert found.equal(anew.propose(anew.start(read)).tokens)


@pytest.mark.parametrize("tables", [True, False], ids=["tables", "products"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_narrow_weights_are_read_as_they_are(
    tiny_llama: LlamaForCausalLM, kind: str, tables: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dtypes that do not fit would stop bfloat16 decoding; sums of rounded tables would blur it."""
    if not tables:
        monkeypatch.setattr(heads_module, "MAX_TABLE", 0)
    base = tiny_llama.bfloat16()
    heads = build(base, kind).bfloat16()
    hidden, tokens = torch.randn(2, 32).bfloat16(), torch.randint(0, 272, (2, 3))
    walk = heads.steps(output_layer(base), 3)()(hidden, tokens[:, 0])
    exact, wide = copy.deepcopy(base).float(), copy.deepcopy(heads).float()
    wide.read_through(exact)
    for i in range(3):
        if i:
            walk.descend(tokens[:, i : i + 1], torch.tensor([0]))
        found = walk.logits()[:, 0]
        expected = wide.logits(hidden.float(), output_layer(exact), tokens)[i]
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), expected, rtol=3e-2, atol=6e-2)


def test_parallel_heads_of_every_form_draft(tiny_llama: LlamaForCausalLM) -> None:
    """Places among the kept tokens taken for token ids, or a rank beyond them."""
    output = output_layer(tiny_llama)
    for options in ({"lm_head": "pruned", "num_kept": 90}, {"lm_head": "low_rank", "rank": 8}):
        heads = MedusaHeads(3, 1, 32, 272, **options)  # type: ignore[arg-type]
        for parameter in heads.parameters():
            nn.init.normal_(parameter, std=0.3)
        if heads.token_map is not None:
            heads.token_map.copy_(torch.randperm(262)[:90].sort().values)
        read = prefill(tiny_llama)
        drafter = heads_drafter(tiny_llama, heads, output, TREES[2])
        with torch.no_grad():
            candidates = drafter.propose(drafter.start(read))
            logits = full_logits(heads, heads.logits(read.last_hidden(FINAL), output))
        ranked = logits.argsort(-1, descending=True)  # [K, B, V]
        for node, choice in enumerate(TREES[2].choices, start=1):
            expected = ranked[len(choice) - 1, :, choice[-1]]
            assert candidates.tokens[:, node].equal(expected)
        if heads.token_map is not None:
            with pytest.raises(
                ValueError,
                match="below the 90 tokens that the heads guess among, got 90",
            ):
                heads_drafter(tiny_llama, heads, output, Tree.from_choices([(90,)]))


def test_a_tree_must_fit_the_heads(tiny_llama: LlamaForCausalLM) -> None:
    """A tree deeper than the heads would index past them in the middle of a text."""
    heads, output = build(tiny_llama, "everything"), output_layer(tiny_llama)
    with pytest.raises(ValueError, match="at most 3, one per head, got 4"):
        heads_drafter(tiny_llama, heads, output, Tree.chain(4))
    with pytest.raises(ValueError, match="below the 90 tokens that the heads guess among, got 90"):
        heads_drafter(tiny_llama, heads, output, Tree.from_choices([(90,)]))
    assert build(tiny_llama, "markov").embed is None
    heads.embed = None
    drafter = HeadsDrafter(heads, output, Tree.chain(2))
    with pytest.raises(ValueError, match="embed is None"):
        drafter.propose(drafter.start(prefill(tiny_llama)))
