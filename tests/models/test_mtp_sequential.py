"""Sequential MTP heads while decoding, against everything computed anew from the whole text."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from specheads.attention.tree import RowTrees, Tree
from specheads.decoding.loop import decode, plain_decode
from specheads.drafters import growing
from specheads.drafters.contract import FINAL, Candidates, Drafter, Prefill, StepResult
from specheads.drafters.growing import Grown
from specheads.drafters.heads import HeadsDrafter, heads_drafter
from specheads.measure.hits import (
    Texts,
    collect_hits,
    count_gains,
    decoded_gains,
    drafter_gains,
    grow_nodes,
    pad_left,
    static_sizes,
)
from specheads.models.mtp import MtpHeads, block_config
from specheads.models.output import OutputLayer, capture_hidden, output_layer
from specheads.verification.sampling import Sampler
from tests import zoo

KINDS = ("llama", "qwen3", "mistral-window", "gemma3", "deepseek_v3")
VOCAB = 16
SIZES = (9, 1, 2)  # of prompts: the modules behind the first begin in the middle of the tree
# wide enough that some guesses are right, and many wrong
WIDE = Tree.from_choices(
    [
        *((i,) for i in range(6)),
        *((i, j) for i in range(6) for j in range(5)),
        *((i, j, k) for i in (0, 1, 3) for j in (0, 2) for k in range(4)),
    ]
)

Path = tuple[int, ...]
Logits = Callable[[Sequence[Path]], Tensor]


def build(kind: str = "llama", num_heads: int = 3, **more: Any) -> tuple[PreTrainedModel, MtpHeads]:
    """Return a random base in float64, where no guesses tie, and heads of its kind."""
    experts: dict[str, Any] = (
        {"experts_implementation": "eager"} if kind == "deepseek_v3" else {}
    )  # in float64
    base = zoo.build(kind, vocab_size=VOCAB, **experts).double()
    heads = MtpHeads(
        num_heads, block_config(base.config), VOCAB, variant="sequential", **more
    ).double()
    zoo.redraw(heads)  # type: ignore[arg-type]
    return base, heads.eval()


class Watched:
    """A drafter and what it proposed, with each row's text up to the root."""

    deterministic = True

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.taps = drafter, drafter.taps
        self.proposed: list[tuple[list[list[int]], Candidates]] = []

    def start(self, prefill: Prefill) -> Any:
        """Note the prompts."""
        roots = prefill.root.tolist()
        self.texts = [[*ids, root] for ids, root in zip(prefill.ids, roots, strict=True)]
        return self.drafter.start(prefill)

    def propose(self, state: Any) -> Candidates:
        """Note the guesses."""
        candidates = self.drafter.propose(state)
        self.proposed.append(([*self.texts], candidates))
        return candidates

    def observe(self, state: Any, result: StepResult) -> Any:
        """Note what was accepted."""
        pairs = zip(self.texts, result.new_tokens, strict=True)
        self.texts = [text + new for text, new in pairs]
        return self.drafter.observe(state, result)

    def select(self, state: Any, rows: Tensor) -> Any:
        """Drop texts that have ended."""
        self.texts = [self.texts[row] for row in rows.tolist()]
        return self.drafter.select(state, rows)


def slow_logits(
    base: PreTrainedModel, heads: MtpHeads, output: OutputLayer, text: list[int]
) -> Logits:
    """Return a function from n paths of one length below the root to the logits [n, V] behind them.

    Every node's whole text goes through all layers, as in training; the base's hidden states end
    before the root, and what stands in their place behind it must not matter.
    """
    with capture_hidden(base, (FINAL,)) as captured:
        base(input_ids=torch.tensor([text[:-1]]), use_cache=False)
    hidden = captured[FINAL]

    def logits(paths: Sequence[Path]) -> Tensor:
        tokens = torch.tensor([[*text, *path] for path in paths])
        behind = tokens.shape[1] - hidden.shape[1]
        padded = F.pad(hidden, (0, 0, 0, behind), value=7.0).expand(len(paths), -1, -1)
        places = torch.arange(tokens.shape[1]).expand(len(paths), -1)
        made = heads.contextual(padded, places, tokens)
        return heads.logits(made[:, :, len(text) - 2], output)[len(paths[0])]

    return logits


def paths_of(candidates: Candidates, row: int) -> list[Path]:
    """Return each node's path of tokens in one row, the root's first."""
    tokens = candidates.tokens[row]
    tree = candidates.tree
    lines = tree.ancestors[row] if isinstance(tree, RowTrees) else tree.ancestors
    return [tuple(tokens[line[line > 0]].tolist()) for line in lines]


def slow_paths(logits: Logits, tree: Tree) -> list[Path]:
    """Fill a static tree level by level."""
    paths: dict[Path, Path] = {(): ()}
    for depth in range(tree.max_depth):
        inner = sorted({choice[:-1] for choice in tree.choices if len(choice) == depth + 1})
        ranked = logits([paths[choice] for choice in inner]).argsort(descending=True).tolist()
        for choice in tree.choices:
            if len(choice) == depth + 1:
                guesses = ranked[inner.index(choice[:-1])]
                paths[choice] = (*paths[choice[:-1]], guesses[choice[-1]])
    return [(), *(paths[choice] for choice in tree.choices)]


def best_prefixes(logits: Logits, num_heads: int, num_ranks: int, num_nodes: int) -> list[Path]:
    """Return the most probable paths of the best ranks, sorted, of all that there are."""
    values: dict[Path, float] = {(): 0.0}
    for depth in range(num_heads):
        paths = [path for path in values if len(path) == depth]
        best = logits(paths).float().log_softmax(-1).topk(num_ranks)
        for path, log_probs, tokens in zip(
            paths, best.values.tolist(), best.indices.tolist(), strict=True
        ):
            for log_prob, token in zip(log_probs, tokens, strict=True):
                values[*path, token] = values[path] + log_prob
    return sorted(sorted(values, key=values.__getitem__, reverse=True)[:num_nodes])


def prompts(sizes: tuple[int, ...] = SIZES) -> list[Tensor]:
    """Return prompts of these lengths."""
    return [torch.randint(0, VOCAB, (1, size)) for size in sizes]


def run(
    base: PreTrainedModel,
    drafter: Drafter,
    rows: list[Tensor],
    temperature: float = 0.0,
    max_new_tokens: int = 14,
) -> tuple[Watched, list[int]]:
    """Decode, compare with plain decoding, and return what was proposed and the accept lengths."""
    watched = Watched(drafter)
    input_ids, attention_mask = pad_left(rows)
    result = decode(
        base,
        watched,
        input_ids,
        attention_mask=attention_mask,
        max_new_tokens=max_new_tokens,
        sampler=Sampler(temperature=temperature, seed=3),
    )
    for index, (prompt, row) in enumerate(zip(rows, result.rows, strict=True)):
        sampler = Sampler(temperature=temperature, seed=3 + index)
        plain = plain_decode(base, prompt, max_new_tokens=max_new_tokens, sampler=sampler)
        assert row.new_tokens == plain.new_tokens
    return watched, [length for row in result.rows for length in row.accept_lengths]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_every_node_of_a_tree_is_what_the_whole_text_says(kind: str) -> None:
    """A key of a refused token, a sibling's or another module's only shows as low acceptance."""
    base, heads = build(kind)
    output = OutputLayer(base.get_output_embeddings(), scale=0.5, softcap=4.0)
    drafter = heads_drafter(base, heads, output, WIDE)
    found = []
    for sizes in ((9,), SIZES):
        watched, lengths = run(base, drafter, prompts(sizes), max_new_tokens=12)
        assert min(lengths) == 1 and max(lengths) > 1
        found += lengths
        for texts, candidates in watched.proposed:
            assert candidates.tree == WIDE
            for row, text in enumerate(texts):
                expected = slow_paths(slow_logits(base, heads, output, text), WIDE)
                assert paths_of(candidates, row) == expected
    assert max(found) > 2


@pytest.mark.parametrize("more", [{"lm_head": "own"}, {"hidden_first": True}], ids=["own", "first"])
@torch.no_grad()
def test_every_form_of_heads_drafts_what_it_learnt(more: dict[str, Any]) -> None:
    """The base's matrix in place of a head's own, or the parts in the other order."""
    base, heads = build(num_heads=4, **more)
    output = output_layer(base)
    chain = Tree.chain(4)
    watched, _ = run(base, heads_drafter(base, heads, output, chain), prompts((1, 5)))
    for texts, candidates in watched.proposed:
        for row, text in enumerate(texts):
            expected = slow_paths(slow_logits(base, heads, output, text), chain)
            assert paths_of(candidates, row) == expected


@pytest.mark.parametrize(
    ("kind", "host"), [("llama", True), ("mistral-window", False)], ids=["host", "device"]
)
@torch.no_grad()
def test_grown_trees_hold_the_best_of_all_prefixes(
    kind: str, host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows whose nodes hang below different parents must not see one another's."""
    monkeypatch.setattr(growing, "HOSTS", ("cpu",) if host else ())
    base, heads = build(kind)
    output = OutputLayer(base.get_output_embeddings(), scale=0.5)
    shape = Grown(20, num_ranks=4, width=20)
    drafter = heads_drafter(base, heads, output, shape)
    for sizes in ((9,), SIZES):
        watched, lengths = run(base, drafter, prompts(sizes), max_new_tokens=9)
        assert min(lengths) == 1 < max(lengths)
        for texts, candidates in watched.proposed:
            for row, text in enumerate(texts):
                logits = slow_logits(base, heads, output, text)
                assert sorted(paths_of(candidates, row)) == best_prefixes(logits, 3, 4, 20)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_decoding_is_plain_decoding(kind: str, dynamic: bool) -> None:
    """Rows mixed up in a batch, or a step that continues from another row's hidden state."""
    base, heads = build(kind)
    base, heads = base.float(), heads.float()
    output = output_layer(base)
    drafter: Drafter = heads_drafter(base, heads, output, WIDE)
    if dynamic:
        drafter = heads_drafter(base, heads, output, Grown(24))
    for temperature in (0.0, 1.0):
        _, lengths = run(base, drafter, prompts((5, 3, 8)), temperature, max_new_tokens=16)
        assert min(lengths) == 1 < max(lengths)


@torch.no_grad()
def test_narrow_heads_draft_behind_a_wide_base() -> None:
    """Dtypes that do not fit would stop bfloat16 heads, and masks too small hide nothing."""
    base, heads = build()
    base, heads = base.float(), heads.bfloat16()
    output = output_layer(base)
    run(base, heads_drafter(base, heads, output, WIDE), prompts())
    text = prompts((12,))[0][0].tolist()
    wide = copy.deepcopy(heads).float()
    expected = slow_logits(base, wide, output, text)([(1, 2)])
    memory: Any = heads.memory(1)
    with capture_hidden(base, (FINAL,)) as captured:
        base(input_ids=torch.tensor([text[:-1]]), use_cache=False)
    memory, made = memory.append(captured[FINAL], [11], torch.tensor([text[1:]]))
    walk = heads.steps(output, 3)()(made, torch.tensor(text[-1:]), memory)
    for token in (1, 2):
        walk.descend(torch.tensor([[token]]), torch.tensor([0]))
    torch.testing.assert_close(walk.logits()[:, 0].float(), expected, rtol=0.1, atol=0.1)


@torch.no_grad()
def test_a_window_ends_within_the_tree() -> None:
    """A node that sees its whole path where the layer looks back upon fewer tokens."""
    base, heads = build("mistral-window", num_heads=4)
    heads.config.sliding_window = 2
    output, chain = output_layer(base), Tree.chain(4)
    watched, _ = run(base, heads_drafter(base, heads, output, chain), prompts((1, 5)))
    for texts, candidates in watched.proposed:
        for row, text in enumerate(texts):
            expected = slow_paths(slow_logits(base, heads, output, text), chain)
            assert paths_of(candidates, row) == expected


@torch.no_grad()
def test_reading_in_pieces_is_reading_at_once() -> None:
    """Room that grows, rows that wait, and rows that are dropped must not lose what was read."""
    base, heads = build("mistral-window")
    heads.read_through(base)
    lengths = (300, 7, 40)
    hidden = torch.randn(3, 300, 32, dtype=torch.float64)
    tokens = torch.randint(0, VOCAB, (3, 300))
    memory, read = heads.memory(3), [0, 0, 0]
    while read != [*lengths]:
        most = torch.randint(0, 90, (3,)).tolist()
        counts = [min(n - m, many) for n, m, many in zip(lengths, read, most, strict=True)]
        width = max(1, *counts)
        rows = [slice(m, m + width) for m in read]
        pieces = [
            [F.pad(each[i, of], (0, 0) * (each.dim() - 2) + (0, width - len(each[i, of])))
             for i, of in enumerate(rows)]
            for each in (hidden, tokens)
        ]  # fmt: skip
        memory, made = memory.append(torch.stack(pieces[0]), counts, torch.stack(pieces[1]))
        read = [m + n for m, n in zip(read, counts, strict=True)]
    places = torch.arange(301)[None]
    for row, length in enumerate(lengths):
        text = torch.cat([tokens.new_zeros(1), tokens[row, :length]])[None]
        padded = F.pad(hidden[row : row + 1, :length], (0, 0, 0, 1))
        expected = heads.contextual(padded, places[:, : length + 1], text)
        for k in range(3):
            # the rotary table is float32, and counts from elsewhere
            torch.testing.assert_close(
                made[k, row], expected[k, 0, length - 1 - k], rtol=1e-4, atol=1e-4
            )
    kept = memory.select(torch.tensor([2, 0]))
    more = torch.randn(2, 1, 32, dtype=torch.float64)
    last = torch.tensor([[3], [4]])
    _, together = kept.append(more, [1, 1], last)
    for place, row in enumerate((2, 0)):
        alone = memory.select(torch.tensor([row]))
        _, found = alone.append(more[place : place + 1], [1], last[place : place + 1])
        torch.testing.assert_close(found[:, 0], together[:, place])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_trees_of_all_sizes_are_counted_as_they_decode(temperature: float) -> None:
    """Heads asked behind another text than the accepted one choose a wrong tree."""
    base, heads = build()
    output = output_layer(base)
    texts = Texts(prompts((5, 1, 9)), (7,), 18, [temperature])
    hits = collect_hits(base, heads, output, texts)
    scales = [0.8, 1.0, 1.5]

    def grown_of(size: int) -> HeadsDrafter:
        # all nodes of a level are asked, so that a smaller tree holds the best of the largest
        shape = Grown(size, temperatures=scales, width=24)
        return heads_drafter(base, heads, output, shape)

    nodes = grow_nodes(hits, 24)
    largest = grown_of(24)
    dynamic = drafter_gains(hits, largest)
    static = count_gains(hits, lambda _, text: static_sizes(nodes, text.ranks), len(nodes) + 1)
    for size in (2, 14):
        drafter = grown_of(size)
        tree = Tree.from_choices(nodes[: size - 1])
        for counted, tried in (
            (dynamic, drafter),
            (static, heads_drafter(base, heads, output, tree)),
        ):
            real = decoded_gains(base, tried, texts, 3)
            assert counted.tokens[:, size - 2].equal(real.tokens[:, 0])
            assert counted.steps[:, size - 2].equal(real.steps[:, 0])
    assert dynamic.lengths()[-1] > 1.1


def test_what_cannot_draft_is_refused() -> None:
    """Attention in chunks would be masked as if it were full, and heads without tokens be blind."""
    base, heads = build()
    output = output_layer(base)
    with pytest.raises(ValueError, match="embed is None"):
        heads.memory(1).append(torch.zeros(1, 1, 32), [1], torch.zeros(1, 1, dtype=torch.long))
    heads.config.layer_types = ["chunked_attention"]
    with pytest.raises(ValueError, match="attention of sequential MTP heads must be one of full"):
        heads_drafter(base, heads, output, Tree.chain(2))
