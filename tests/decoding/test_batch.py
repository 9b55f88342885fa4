"""Batches: every row is the row decoded alone, and a conversation goes on where it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
)

from specheads.attention.cache import TreeCache
from specheads.attention.tree import Tree, default_tree
from specheads.decoding import accept
from specheads.decoding.loop import decode, plain_decode
from specheads.drafters.heads import HeadsDrafter
from specheads.drafters.lookup import NgramDrafter
from specheads.models.forward import ModelPass
from specheads.models.heads import MedusaHeads
from specheads.models.output import output_layer
from specheads.verification.sampling import Sampler
from tests.scripted import MODELS, VOCAB, ScriptedDrafter, build, pretend_rounding

LENGTHS = (9, 3, 14, 1, 6)
NUM_NEW = 18


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    """Return fixed random prompts [1, P] of these lengths."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, VOCAB, (1, n), generator=generator) for n in lengths]


def left_padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return input_ids and attention_mask [B, P]; the padding is a token like any other."""
    longest = max(row.shape[1] for row in rows)
    ids = torch.full((len(rows), longest), 7)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, longest - row.shape[1] :] = row[0]
        mask[i, longest - row.shape[1] :] = 1
    return ids, mask


def alone(model: PreTrainedModel, rows: list[Tensor], **settings: Any) -> list[list[int]]:
    """Decode every row plainly by itself; row b with its seed + b."""
    sampler: Sampler = settings.pop("sampler", Sampler())
    found = []
    for i, row in enumerate(rows):
        own = Sampler(sampler.temperature, sampler.top_k, sampler.top_p, sampler.seed + i)
        found.append(plain_decode(model, row, sampler=own, **settings).new_tokens)
    return found


@pytest.fixture
def llama() -> PreTrainedModel:
    """Return a small random Llama with VOCAB tokens."""
    return build("llama")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sampler", [Sampler(), Sampler(1.0, seed=3)], ids=["greedy", "sampled"])
def test_every_row_is_the_row_decoded_alone(name: str, sampler: Sampler) -> None:
    """Prevents rows that see padding, a neighbour, or another row's noise."""
    model = build(name)
    rows = prompts()
    ids, mask = left_padded(rows)
    settings: dict[str, Any] = {"max_new_tokens": NUM_NEW, "sampler": sampler}
    truth = alone(model, rows, **settings)
    texts = [row[0].tolist() + new for row, new in zip(rows, truth, strict=True)]
    results = [plain_decode(model, ids, attention_mask=mask, **settings)]
    for tree in (Tree.chain(4), default_tree(4, 16)):
        for row_trees in (False, True):
            drafter = ScriptedDrafter(tree, texts, 0.7, row_trees=row_trees)
            result = decode(model, drafter, ids, attention_mask=mask, **settings)
            assert result.accept_length > 1.5
            results.append(result)
    for result in results:
        assert [row.new_tokens for row in result.rows] == truth
        assert result.sequences[:, : ids.shape[1]].equal(ids)
        for row in result.rows:
            assert sum(row.accept_lengths) == NUM_NEW - 1


@pytest.mark.parametrize("keep", [False, True], ids=["dropped", "kept"])
def test_rows_end_each_by_itself(llama: PreTrainedModel, keep: bool) -> None:
    """Prevents rows that go on past their eos, or stop when another one does."""
    rows = prompts()
    ids, mask = left_padded(rows)
    free = alone(llama, rows, max_new_tokens=NUM_NEW)
    eos = (free[0][5], free[1][11], free[2][0])
    settings: dict[str, Any] = {"max_new_tokens": NUM_NEW, "eos_token_ids": eos}
    truth = alone(llama, rows, **settings)
    assert len({len(new) for new in truth}) > 2
    texts = [row[0].tolist() + new for row, new in zip(rows, free, strict=True)]
    for row_trees in (False, True):
        drafter = ScriptedDrafter(default_tree(4, 12), texts, 0.8, row_trees=row_trees)
        for run in (
            lambda **more: plain_decode(llama, ids, **settings, **more),
            lambda **more: decode(llama, drafter, ids, **settings, **more),  # noqa: B023
        ):
            cache = TreeCache() if keep else None
            result = run(attention_mask=mask, pad_token_id=60, cache=cache)
            assert [row.new_tokens for row in result.rows] == truth
            for row, new in zip(result.rows, truth, strict=True):
                assert row.finished == (new[-1] in eos)
            width = max(map(len, truth))
            padded = [new + [60] * (width - len(new)) for new in truth]
            assert result.sequences[:, ids.shape[1] :].tolist() == padded
            if cache is not None:
                held = [row[0].tolist() + new[:-1] for row, new in zip(rows, truth, strict=True)]
                assert cache.tokens == held
                assert cache.lengths == [len(text) for text in held]


def test_a_device_walks_as_the_host_does(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents an error in what only a GPU would run, near-ties included."""
    monkeypatch.setattr(accept, "follow_on_host", accept.follow_on_device)
    pretend_rounding(monkeypatch, llama, 1e-3)  # more near-ties than there are
    rows = prompts()
    ids, mask = left_padded(rows)
    for sampler in (Sampler(), Sampler(1.0, seed=3)):
        truth = alone(llama, rows, max_new_tokens=NUM_NEW, sampler=sampler)
        texts = [row[0].tolist() + new for row, new in zip(rows, truth, strict=True)]
        drafter = ScriptedDrafter(default_tree(4, 12), texts, 0.7)
        result = decode(
            llama, drafter, ids, attention_mask=mask, max_new_tokens=NUM_NEW, sampler=sampler
        )
        assert [row.new_tokens for row in result.rows] == truth
        assert result.accept_length > 1.5


def test_ended_rows_cost_nothing_more(llama: PreTrainedModel) -> None:
    """Prevents a batch that pays for its longest row with every other."""
    rows = prompts((5, 5, 5))
    free = alone(llama, rows, max_new_tokens=NUM_NEW)
    sizes = []
    read = ModelPass.verify

    def watch(base: ModelPass, tokens: Tensor, tree: Any) -> Tensor:
        sizes.append(tokens.shape[0])
        return read(base, tokens, tree)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelPass, "verify", watch)
        decode(
            llama,
            NgramDrafter(),
            torch.cat(rows),
            max_new_tokens=NUM_NEW,
            eos_token_ids=(free[0][3],),
        )
    assert sizes[0] == 3 and sizes[-1] < 3
    assert sizes == sorted(sizes, reverse=True)


def test_heads_and_ngrams_draft_for_batches(tiny_llama: LlamaForCausalLM) -> None:
    """Prevents a drafter that mixes up rows: it would only be slow, never wrong."""
    heads = MedusaHeads(4, 1, 32, 272)
    heads.init_from_output(tiny_llama.lm_head.weight)
    rows = prompts()
    ids, mask = left_padded(rows)
    drafters = (
        HeadsDrafter(heads, output_layer(tiny_llama), default_tree(4, 12)),
        NgramDrafter(max_ngram=2, num_tokens=4),
    )
    for drafter in drafters:
        batch = decode(tiny_llama, drafter, ids, attention_mask=mask, max_new_tokens=60)
        for row, result in zip(rows, batch.rows, strict=True):
            by_itself = decode(tiny_llama, drafter, row, max_new_tokens=60)
            assert result.new_tokens == by_itself.new_tokens
            assert result.accept_lengths == by_itself.accept_lengths


def test_processors_see_rows_without_padding(llama: PreTrainedModel) -> None:
    """Prevents penalties on the padding token, which is an ordinary token here."""
    rows = prompts()
    ids, mask = left_padded(rows)
    settings: dict[str, Any] = {
        "max_new_tokens": NUM_NEW,
        "logits_processor": LogitsProcessorList(
            [RepetitionPenaltyLogitsProcessor(1.3), NoRepeatNGramLogitsProcessor(2)]
        ),
    }
    truth = alone(llama, rows, **settings)
    texts = [row[0].tolist() + new for row, new in zip(rows, truth, strict=True)]
    plain = plain_decode(llama, ids, attention_mask=mask, **settings)
    assert [row.new_tokens for row in plain.rows] == truth
    for row_trees in (False, True):
        drafter = ScriptedDrafter(default_tree(4, 12), texts, 0.7, row_trees=row_trees)
        result = decode(llama, drafter, ids, attention_mask=mask, **settings)
        assert [row.new_tokens for row in result.rows] == truth


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gpt2"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_conversation_goes_on_without_a_new_prefill(name: str, num_rows: int) -> None:
    """Prevents a second turn that reads everything again, or answers to another text."""
    model = build(name)
    generator = torch.Generator().manual_seed(1)
    texts = [row[0].tolist() for row in prompts()[:num_rows]]
    caches = TreeCache(), TreeCache()
    num_read: list[int] = []
    read = ModelPass.read

    def watch(base: ModelPass, tokens: Tensor, counts: Any) -> Tensor:
        num_read.append(max(counts))
        return read(base, tokens, counts)

    for turn in range(4):
        if turn == 3:  # the user takes back some of what was said
            texts = [text[: len(text) // 2] for text in texts]
        texts = [
            text + torch.randint(VOCAB, (3 + i,), generator=generator).tolist()
            for i, text in enumerate(texts)
        ]
        rows = [torch.tensor([text]) for text in texts]
        ids, mask = left_padded(rows)
        sampler = Sampler(1.0 if turn else 0.0, seed=turn)
        truth = alone(model, rows, max_new_tokens=11, sampler=sampler)
        whole = [text + new for text, new in zip(texts, truth, strict=True)]
        drafter = ScriptedDrafter(default_tree(4, 12), whole, 0.8)
        settings: dict[str, Any] = {
            "attention_mask": mask,
            "max_new_tokens": 11,
            "sampler": sampler,
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ModelPass, "read", watch)
            num_read.clear()
            result = decode(model, drafter, ids, cache=caches[0], **settings)
        # the last token of the answer, and what the user said
        assert num_read[0] <= (9 + num_rows if turn in (1, 2) else ids.shape[1])
        plain = plain_decode(model, ids, cache=caches[1], **settings)
        for found in (result, plain):
            assert [row.new_tokens for row in found.rows] == truth
        assert result.cache is caches[0] and plain.cache is caches[1]
        texts = whole


def test_rows_may_fill_the_context_each_by_itself() -> None:
    """Prevents a lookup beyond learned positions where one row is near the end and others not."""
    model = build("gpt2")
    rows = prompts((220, 250, 3))
    ids, mask = left_padded(rows)
    truth = alone(model, rows, max_new_tokens=6)
    texts = [row[0].tolist() + new for row, new in zip(rows, truth, strict=True)]
    for row_trees in (False, True):
        drafter = ScriptedDrafter(Tree.chain(8), texts, 0.5, row_trees=row_trees)
        result = decode(model, drafter, ids, attention_mask=mask, max_new_tokens=6)
        assert [row.new_tokens for row in result.rows] == truth
    with pytest.raises(ValueError, match="is 257 tokens, but the model's context is 256"):
        decode(model, drafter, ids, attention_mask=mask, max_new_tokens=7)


def test_bad_batches_are_refused(llama: PreTrainedModel) -> None:
    """Prevents right-padded prompts decoded with a hole in the middle."""
    ids = torch.ones(2, 3, dtype=torch.long)
    for mask, message in (
        (torch.tensor([[1, 1, 0], [1, 1, 1]]), "attention_mask row 0 is not left padding"),
        (
            torch.tensor([[1, 1, 1], [0, 0, 0]]),
            "row 1 must be at least 1 token, got 0",
        ),
        (torch.ones(2, 4), r"attention_mask must be that of input_ids, \[2, 3\], got \[2, 4\]"),
    ):
        with pytest.raises(ValueError, match=message):
            plain_decode(llama, ids, attention_mask=mask, max_new_tokens=3)
    result = plain_decode(llama, ids, max_new_tokens=3)
    with pytest.raises(ValueError, match="there are 2 rows"):
        _ = result.new_tokens
    cache = TreeCache()
    plain_decode(llama, ids, max_new_tokens=3, cache=cache)
    with pytest.raises(ValueError, match="cache has 2 rows, the batch 1"):
        plain_decode(llama, ids[:1], max_new_tokens=3, cache=cache)
