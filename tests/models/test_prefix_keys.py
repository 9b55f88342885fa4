"""The prefix layer while decoding, against the layer over the whole text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from specheads.attention import cache
from specheads.attention.cache import TreeCache
from specheads.attention.tree import Tree, default_tree
from specheads.decoding.loop import decode, plain_decode
from specheads.drafters.contract import StepResult
from specheads.drafters.heads import HeadsState, heads_drafter
from specheads.measure.clock import pad_left
from specheads.models.blocks import prefix_sizes
from specheads.models.heads import MedusaHeads
from specheads.models.output import FINAL, capture_hidden, output_layer

LENGTHS = (7, 18, 2)


def build(base: LlamaForCausalLM, **options: Any) -> MedusaHeads:
    """Return heads with a prefix layer that does something, and that hit now and then."""
    heads = MedusaHeads(3, 1, 32, 272, prefix=prefix_sizes(base.config), **options)
    with torch.no_grad():
        heads.init_from_output(output_layer(base).weight)
        for name, parameter in heads.named_parameters():
            if "norm" not in name:
                parameter.add_((0.05 if "prefix" in name else 0.02) * torch.randn_like(parameter))
    return heads.eval()


def hidden_of(base: LlamaForCausalLM, ids: list[int]) -> Tensor:
    """Return the hidden states [1, T, d] of a text read at once."""
    with capture_hidden(base) as captured:
        base(input_ids=torch.tensor([ids]), use_cache=False)
    return captured[FINAL]


class Watched:
    """A drafter that compares every state with the layer over the row's whole text."""

    def __init__(self, drafter: Any, base: LlamaForCausalLM, first: int = 0) -> None:
        self.drafter, self.base, self.first = drafter, base, first
        self.taps, self.deterministic = drafter.taps, True
        self.propose = drafter.propose
        self.texts: list[list[int]] = []
        self.compared = 0

    def check(self, state: HeadsState) -> HeadsState:
        """Compare; the root is not read yet."""
        heads = self.drafter.heads
        for row, text in enumerate(self.texts):
            positions = torch.arange(len(text))[None, self.first :]
            whole = heads.contextual(hidden_of(self.base, text)[:, self.first :], positions)
            read = self.drafter.read(state)[row]
            torch.testing.assert_close(read, whole[0, -1], rtol=1e-4, atol=1e-5)
            self.compared += 1
        return state

    def start(self, prefill: Any) -> HeadsState:
        """Note the texts."""
        self.texts = [list(ids) for ids in prefill.ids]
        self.roots = prefill.root.tolist()
        return self.check(self.drafter.start(prefill))

    def observe(self, state: HeadsState, result: StepResult) -> HeadsState:
        """Note what was gained: the root is certain, and the new tokens but the last."""
        state = self.drafter.observe(state, result)
        for row, new in enumerate(result.new_tokens):
            self.texts[row] += [self.roots[row], *new[:-1]]
        self.roots = result.next_root.tolist()
        return self.check(state)

    def select(self, state: HeadsState, rows: Tensor) -> HeadsState:
        """Note who is left."""
        self.texts = [self.texts[row] for row in rows.tolist()]
        self.roots = [self.roots[row] for row in rows.tolist()]
        return self.drafter.select(state, rows)


@pytest.mark.parametrize("lengths", [LENGTHS[:1], LENGTHS], ids=["one", "ragged"])
@pytest.mark.parametrize("condition", [False, True])
def test_the_layer_sees_the_whole_committed_text(
    tiny_llama: LlamaForCausalLM,
    lengths: tuple[int, ...],
    condition: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rejected nodes remembered, or positions off by one, only show as low acceptance."""
    monkeypatch.setattr(cache, "BLOCK", 8)  # so that it grows on the way
    heads = build(tiny_llama, condition=condition)
    prompts = [torch.randint(0, 256, (1, length)) for length in lengths]
    ids, mask = pad_left(prompts)
    truth = [plain_decode(tiny_llama, each, max_new_tokens=30).new_tokens for each in prompts]
    eos = (truth[0][12],) if len(prompts) > 1 else ()  # the first row ends before the others
    tree = default_tree(3, 12)
    drafter = Watched(heads_drafter(tiny_llama, heads, output_layer(tiny_llama), tree), tiny_llama)
    result = decode(
        tiny_llama,
        drafter,
        ids,
        attention_mask=mask,
        max_new_tokens=30,
        eos_token_ids=eos,
    )
    for row, new in zip(result.rows, truth, strict=True):
        assert row.new_tokens == new[: len(row.new_tokens)]
        assert row.finished or row.new_tokens == new
    assert drafter.compared > 8 * len(prompts)
    steps = [length for row in result.rows for length in row.accept_lengths]
    assert min(steps) == 1 < max(steps)


def test_a_conversation_goes_on_behind_a_cache(tiny_llama: LlamaForCausalLM) -> None:
    """What was read before is unknown to the layer; taken for zeros it would mislead the heads.

    Compared with the layer at the text's true positions: only distances count.
    """
    heads, output = build(tiny_llama), output_layer(tiny_llama)
    plain = heads_drafter(tiny_llama, heads, output, Tree.chain(3))
    prompt, cache = torch.randint(0, 256, (1, 9)), TreeCache()
    first = decode(tiny_llama, plain, prompt, max_new_tokens=10, cache=cache)
    more = torch.cat([first.sequences, torch.randint(0, 256, (1, 4))], dim=1)
    known = len(cache.tokens[0])
    watched = Watched(plain, tiny_llama, first=known)
    second = decode(tiny_llama, watched, more, max_new_tokens=10, cache=cache)
    assert second.new_tokens == plain_decode(tiny_llama, more, max_new_tokens=10).new_tokens
    assert watched.compared > 3 and known == 18


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_rows_and_steps_do_not_matter(tiny_llama: LlamaForCausalLM, dtype: torch.dtype) -> None:
    """A row that reads its neighbour's keys, or padding that is remembered."""
    heads = build(tiny_llama).to(dtype)
    layer, keys = heads.prefix, heads.memory(3)
    assert layer is not None and keys is not None
    near = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    hidden, counts = torch.randn(3, 6, 32).to(dtype), [6, 2, 4]
    more, later = torch.randn(3, 3, 32).to(dtype), [1, 3, 2]
    keys, first = keys.append(hidden, counts)
    kept = torch.tensor([2, 1])
    keys, second = keys.select(kept).append(more[kept], [2, 3])
    for row in range(3):
        text = torch.cat([hidden[row, : counts[row]], more[row, : later[row]]])[None]
        positions = torch.arange(text.shape[1])[None]
        whole = layer(text, positions)[0]
        torch.testing.assert_close(first[row], whole[counts[row] - 1], **near)
        if row in (1, 2):
            torch.testing.assert_close(second[2 - row], whole[-1], **near)
    assert keys.lengths == (6, 5)
