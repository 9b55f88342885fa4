"""In 16 bits on a CPU, a pass over one token and one over a tree give the same bits."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from specheads.attention import mask as module
from specheads.attention.cache import TreeCache
from specheads.attention.mask import KEY_BLOCK, attend_in_blocks, attend_invariant
from specheads.attention.tree import RowTrees, Tree, default_tree
from specheads.config import DecodeConfig
from specheads.decoding.exported import Subject
from specheads.decoding.generate import SpecDecoder
from specheads.decoding.loop import decode, plain_decode
from specheads.decoding.result import pad_left
from specheads.decoding.stream import Job, continue_prompts
from specheads.drafters.lookup import SuffixDrafter
from specheads.measure.bench import Contest
from specheads.measure.clock import Prompt, make_batches
from specheads.models.forward import ModelPass, rounds_by_shape
from specheads.verification.sampling import Sampler
from tests.conftest import build_byte_tokenizer, build_tiny_llama
from tests.ragged import steps_and_differing
from tests.scripted import ScriptedDrafter

SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 1024}
# siblings on every level, whose keys lie in other slots than plain decoding's
TREES = [Tree.from_choices([(0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 0)]), default_tree(4, 16)]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Return a Llama that is wide enough, with logits that differ."""
    return build_tiny_llama(**SIZES, **HEADS).to(torch.bfloat16)


def needs_rows_alike() -> None:
    """Skip, aloud, where products of two rows and of many differ: there no padding helps."""
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(n, 1536, generator=generator).bfloat16() for n in (17, 512))
    few, many = (nn.functional.linear(rows[:n], weight)[:2] for n in (2, 17))
    if not torch.equal(few, many):
        pytest.skip("matrix products of this machine round by the number of rows in bfloat16")


def one_by_one(base: ModelPass, nodes: Tensor, tree: Tree) -> Tensor:
    """Return the logits [N, V] of one-token passes along every path, as plain decoding's are."""
    length = base.cache.lengths[0]
    found: dict[int, Tensor] = {}
    for path in tree.paths.tolist():
        base.cache.shorten([length])
        for node in (each for each in path if each >= 0):
            found[node] = base.read(nodes[:, node : node + 1], [1])[0]
    return torch.stack([found[node] for node in range(tree.num_nodes)])


# with the edge of a block before, inside and behind the tree
@pytest.mark.parametrize("context", [5, KEY_BLOCK - 4, KEY_BLOCK - 1, KEY_BLOCK, 400])
@torch.inference_mode()
def test_trees_and_single_tokens_give_the_same_bits(model: LlamaForCausalLM, context: int) -> None:
    """Prevents texts that leave plain decoding's at the first near-tie."""
    needs_rows_alike()
    ids = torch.randint(0, 256, (1, context), generator=torch.Generator().manual_seed(context))
    trees = TREES if context > 200 else [Tree.chain(n) for n in (0, 1, 2, 7)] + TREES
    for tree in trees:
        base = ModelPass(model, TreeCache(), invariant=True)
        base.read(ids, [context])
        nodes = torch.randint(0, 256, (1, tree.num_nodes))
        in_tree = base.verify(nodes, tree)[0]
        assert in_tree.shape[0] == tree.num_nodes
        assert torch.equal(in_tree, one_by_one(base, nodes, tree))


def test_greedy_texts_are_plain_decodings(model: LlamaForCausalLM) -> None:
    """Prevents keys of accepted nodes, or a dummy node's, that plain decoding would not have."""
    needs_rows_alike()
    prompt = torch.randint(0, 256, (1, KEY_BLOCK - 12), generator=torch.Generator().manual_seed(3))
    plain = plain_decode(model, prompt, max_new_tokens=40, invariant=True).sequences
    for hit_rate in (0.0, 0.6):
        drafter = ScriptedDrafter(TREES[0], plain[0].tolist(), hit_rate, 256)
        drafted = decode(model, drafter, prompt, max_new_tokens=40, invariant=True)
        assert torch.equal(drafted.sequences, plain)


@contextmanager
def calls(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Give a list of the rows of every product with a weight, and -1 per invariant attention."""
    seen: list[int] = []

    def note(*given: object) -> Tensor:
        seen.append(-1)
        return attend_invariant(*given)  # type: ignore[arg-type]

    def rows(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0].shape[:-1].numel())

    hooks = [m.register_forward_pre_hook(rows) for m in model.modules() if type(m) is nn.Linear]
    with monkeypatch.context() as patch:
        patch.setattr(module, "attend_invariant", note)
        yield seen
    for hook in hooks:
        hook.remove()


@torch.inference_mode()
def test_both_passes_make_the_same_calls(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds on every machine: prevents a single row, or another attention, in one of the two."""
    base = ModelPass(model, TreeCache(), invariant=True)
    base.read(torch.ones(1, 9, dtype=torch.long), [9])
    tokens = torch.ones(1, 7, dtype=torch.long)
    with calls(model, monkeypatch) as seen:
        base.verify(tokens, TREES[0])
        in_tree = [*seen]
        seen.clear()
        base.read(tokens[:, :1], [1])
        assert [2 if rows == 7 else rows for rows in in_tree] == seen
        assert seen.count(-1) == SIZES["num_hidden_layers"]
        assert base.num_tokens == 1


@pytest.mark.parametrize("asked", [False, True])
def test_it_is_there_where_it_is_asked_for(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    """Prevents a setting that does nothing, and a slower baseline where nobody asked."""
    subject = Subject(model, build_byte_tokenizer(), None)
    decoder = SpecDecoder.of(subject, DecodeConfig(invariant=asked), None)
    contest = Contest.of(subject, 4, invariant=asked)
    ids = torch.ones(1, 9, dtype=torch.long)
    for decode_some in (
        lambda: decoder.generate(ids, 4),
        lambda: contest.ours().decode(make_batches([Prompt("a", "b", ids)], 1)[0], 0.0, 0),
    ):
        decode_some()  # a base is tested once, with passes of several sizes
        with calls(model, monkeypatch) as seen:
            decode_some()
        assert (-1 in seen) == asked and (2 in seen) == asked


def test_an_answer_is_the_same_beside_any_others(model: LlamaForCausalLM) -> None:
    """Prevents other answers after a restart, which puts other rows beside those that are left.

    Single rows and odd prompts round otherwise in larger models only: test_real.py.
    """
    needs_rows_alike()
    chance = random.Random(5)
    own = (33, 1, 9, 12, 40, 33, 20, 25, 2)
    jobs = [Job([*range(7), *chance.choices(range(256), k=num)], 12, num) for num in own]
    turns = ((4, jobs), (3, jobs[::-1]), (2, jobs[4:]), (9, jobs), (5, jobs[:1]))
    assert steps_and_differing(model, turns) == (9 * 12, 0)


# in float16 twenty times as many of the differences between kernels show as in bfloat16
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_queries", [1, 3, 9, 40])
def test_attention_in_blocks_depends_on_what_a_query_sees_alone(
    num_queries: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents near-ties that fall by how long the texts of other rows are."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(num_queries))
    num_rows, num_keys = 24, 4 * KEY_BLOCK
    query = draw(num_rows, 3, num_queries, 64).to(dtype) * 3
    key, value = draw(2, num_rows, 3, num_keys, 64).to(dtype)
    # ends on both sides of every block's edge, and within a query's own row
    ends = torch.arange(num_rows)[:, None] * 17 + 1 + torch.arange(num_queries)
    hidden = torch.arange(num_keys) >= ends[..., None].clamp(max=num_keys - 1)
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, torch.finfo(dtype).min)
    mask = mask.to(dtype)[:, None]
    whole = attend_in_blocks(query, key, value, mask, None)
    wanted = nn.functional.scaled_dot_product_attention(
        *(each.double() for each in (query, key, value)), mask.double()
    )
    # two roundings: of the weights, and of the sum
    assert (whole - wanted).abs().max() < torch.finfo(dtype).eps * value.abs().max()
    for row in range(num_rows):
        own = slice(row, row + 1)
        shown = -(-int(ends[row].max()) // KEY_BLOCK) * KEY_BLOCK
        short = (each[own, :, :shown] for each in (key, value))
        alone = attend_in_blocks(query[own], *short, mask[own, ..., :shown], None)
        assert torch.equal(alone[0], whole[row])
    for num in range(1, num_queries):
        fewer = attend_in_blocks(query[:, :, :num], key, value, mask[:, :, :num], None)
        assert torch.equal(fewer, whole[:, :, :num])
    # rows that are too many for one call are attended a few at a time
    monkeypatch.setattr(module, "_MERGED", 5 * query[0].numel())
    assert torch.equal(attend_in_blocks(query, key, value, mask, None), whole)


def test_streams_attend_in_blocks(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a way of attending that is right and that no stream takes, prompts included."""
    seen: list[int] = []

    def noted(query: Tensor, *rest: Any) -> Tensor:
        seen.append(query.shape[2])
        return attend_in_blocks(query, *rest)

    monkeypatch.setattr(module, "attend_in_blocks", noted)
    continue_prompts(model, [[1, 2, 3], [1, 2, 4, 5, 6]], [3, 3], [0, 0], temperature=0)
    # four query heads to a group: what both begin with, the rest, and two steps, in both layers
    assert seen == [8, 8, 12, 12, 4, 4, 4, 4]


@torch.inference_mode()
def test_rows_beside_others_give_the_same_bits(model: LlamaForCausalLM) -> None:
    """Prevents a row that rounds by its neighbours' number, trees or lengths."""
    needs_rows_alike()
    draw = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 256, (n,), generator=draw).tolist() for n in (3, 31, 32, 70, 200)]
    shapes = [Tree.chain(5), TREES[0], Tree.from_choices([(0,), (1,), (2,), (0, 0), (0, 0, 0)])]
    width = max(tree.num_nodes for tree in shapes)
    parents = [
        [*tree.parents.tolist(), *[0] * (width - tree.num_nodes)]
        for tree in (shapes[n % 3] for n in range(len(texts)))
    ]
    trees = RowTrees.from_parents(torch.tensor(parents), 5)
    nodes = torch.randint(0, 256, (len(texts), width), generator=draw)
    alone = []
    for row, text in enumerate(texts):
        base = ModelPass(model, TreeCache(), invariant=True)
        base.read(torch.tensor([text]), [len(text)])
        own = base.verify(nodes[row : row + 1], trees.select(torch.tensor([row])))
        base.cache.shorten([len(text)])
        alone.append((base, own[0], base.read(nodes[row : row + 1, :1], [1])[0]))
        base.cache.shorten([len(text)])
    together, *others = (base for base, _, _ in alone)
    for other in others:
        together.cache.join(other.cache)
    got = together.verify(nodes, trees)
    together.cache.shorten([len(text) for text in texts])
    following = together.read(nodes[:, :1], [1] * len(texts))
    for row, (_, in_tree, after) in enumerate(alone):
        assert torch.equal(got[row], in_tree)
        assert torch.equal(following[row], after)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_batches_write_what_each_prompt_gives_alone(
    model: LlamaForCausalLM, temperature: float
) -> None:
    """Prevents prompts that are read together, and drafted batches that leave plain decoding."""
    needs_rows_alike()
    draw = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 256, (1, n), generator=draw) for n in (40, 9, 25, 61)]
    how: dict[str, Any] = {"max_new_tokens": 24, "invariant": True}
    plain = [
        plain_decode(model, ids, sampler=Sampler(temperature, seed=row), **how).new_tokens
        for row, ids in enumerate(prompts)
    ]
    ids, mask = pad_left(prompts)
    how |= {"attention_mask": mask, "sampler": Sampler(temperature)}
    assert [row.new_tokens for row in plain_decode(model, ids, **how).rows] == plain
    drafter = SuffixDrafter()
    drafted = decode(model, drafter, ids, **how)
    assert [row.new_tokens for row in drafted.rows] == plain
    assert drafted.num_steps <= 23


def test_prompts_of_a_batch_are_read_alone(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents prompts that round by their neighbours, which small models do not show."""
    rows: list[int] = []
    read = ModelPass.read

    def noted(base: ModelPass, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        rows.extend([len(tokens)] * (tokens.shape[1] > 1))
        return read(base, tokens, counts)

    monkeypatch.setattr(ModelPass, "read", noted)
    for invariant, expected in ((True, [1, 1, 1]), (False, [3])):
        rows.clear()
        plain_decode(model, torch.ones(3, 9).long(), max_new_tokens=2, invariant=invariant)
        assert rows == expected


@torch.inference_mode()
def test_elsewhere_nothing_changes(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents slower passes where nobody asked, and a promise that is silently not kept."""
    token = torch.ones(2, 1, dtype=torch.long)
    wide = build_tiny_llama(**SIZES, **HEADS)
    for base in (ModelPass(model, TreeCache()), ModelPass(wide, TreeCache(), invariant=True)):
        base.read(torch.ones(2, 9, dtype=torch.long), [9, 9])
        with calls(model, monkeypatch) as seen:
            base.read(token, [1, 1])
            assert -1 not in seen
    assert not rounds_by_shape(wide)
    for changed in ({"compiled": True}, {"chain_only": True}):
        with pytest.raises(ValueError, match="invariant decoding in torch.bfloat16 needs"):
            ModelPass(model, TreeCache(), invariant=True, **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize("heads,groups,width", [(2, 3, 64), (4, 1, 80), (1, 4, 128), (2, 7, 64)])
@pytest.mark.parametrize("cached", [2, 31, 126])
def test_invariant_attention_is_attention(heads: int, groups: int, width: int, cached: int) -> None:
    """Prevents a fast path that attends to something else; the reference is in float64."""
    generator = torch.Generator().manual_seed(0)
    tree = TREES[0]
    num_tokens, num_keys = tree.num_nodes, cached + tree.num_nodes
    query = torch.randn(1, heads * groups, num_tokens, width, generator=generator)
    key, value = torch.randn(2, 1, heads, num_keys, width, generator=generator)
    hidden = torch.zeros(num_tokens, num_keys, dtype=torch.bool)
    hidden[:, cached:] = ~tree.tree_mask
    scores = query.double() @ key.double().repeat_interleave(groups, 1).transpose(2, 3) * 0.1
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    expected = weights @ value.double().repeat_interleave(groups, 1)
    layout = module.invariant_layout(tree, [cached], torch.float32)
    given = attend_invariant(query, key, value, 0.1, layout)
    torch.testing.assert_close(given.double(), expected.transpose(1, 2), atol=1e-5, rtol=1e-5)
