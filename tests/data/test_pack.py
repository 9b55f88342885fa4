"""Packing: nothing lost or repeated, resumable, and no leak between documents."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specheads.config import ConfigError
from specheads.data.chat import Encoded
from specheads.data.pack import PackedBatches, check_isolation, collate, one_pass, pack_lengths
from specheads.losses.cross_entropy import IGNORE, shift_labels
from specheads.models.output import packed_hidden

PAD = 258  # eos: the usual choice, and the dangerous one


def _documents(lengths: list[int], seed: int = 0) -> list[Encoded]:
    rng = np.random.default_rng(seed)
    documents = []
    for i, length in enumerate(lengths):
        ids = rng.integers(0, 256, length, dtype=np.int32)
        ids[-1] = PAD  # a real eos
        documents.append(Encoded(f"d{i}", ids, ids.copy()))
    return documents


def _lengths(count: int, longest: int, seed: int = 0) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(3.0, 1.0, count)
    return [int(x) for x in np.clip(drawn, 1, longest)]


def _stream(documents: list[Encoded], **settings: Any) -> PackedBatches:
    given = {"seq_len": 64, "rows": 3, "seed": 1, "pad_token_id": PAD, **settings}
    return PackedBatches(documents, **given)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 32), min_size=1, max_size=60))
def test_every_item_is_packed_once_and_fits(lengths: list[int]) -> None:
    """A lost or doubled document, or a row that overflows, shows in no loss curve."""
    rows = pack_lengths(lengths, 32)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[item] for item in row) <= 32 for row in rows)
    # best fit decreasing opens a row only for what fits nowhere: two half-empty rows cannot be
    assert sum(sum(lengths[i] for i in row) <= 16 for row in rows) <= 1


def test_packing_is_dense_and_the_row_count_constant() -> None:
    """Padding is paid for like text; an epoch whose row count varies cannot be resumed by place."""
    stream = _stream(_documents(_lengths(2000, 64)))
    assert stream.efficiency > 0.98
    assert {len(stream._packed(epoch)) for epoch in range(4)} == {stream.rows_per_epoch}


def test_wrong_lengths_are_refused() -> None:
    """A document that fits no row must not vanish."""
    with pytest.raises(ValueError, match="item 1 has 9 tokens, seq_len is 8"):
        pack_lengths([3, 9], 8)


def test_batch_layout() -> None:
    """Positions restart, segments count up, padding is a segment of its own and has no labels."""
    first, second = _documents([3, 2])
    batch = collate([[first, second], [second]], 8, PAD)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5]]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 0, 0, 0], [1, 1] + [0] * 6]
    assert batch["input_ids"][0, 5:].tolist() == [PAD] * 3
    assert batch["labels"][0].tolist() == [*first.labels, *second.labels] + [IGNORE] * 3
    assert batch["labels"][0, [2, 4]].tolist() == [PAD, PAD], "real eos keeps its label"
    assert batch["ids"] == ["d0", "d1", "d1"]
    assert all(batch[k].dtype == torch.long and batch[k].shape == (2, 8) for k in list(batch)[:4])


@pytest.mark.parametrize("offset", [1, 2, 4])
def test_no_label_crosses_a_document(offset: int) -> None:
    """Head labels shifted across a boundary teach to predict the next, unrelated document."""
    documents = _documents(_lengths(60, 40))
    owner = {}
    for n, document in enumerate(documents):
        document.input_ids[:] = 300 + n  # every token says which document it is from
        document.labels[:] = 300 + n
        owner[300 + n] = len(document.input_ids)
    for batch in one_pass(documents, seq_len=64, rows=4, pad_token_id=PAD):
        labels = shift_labels(batch["labels"], batch["segment_ids"], offset)
        learned = labels != IGNORE
        assert torch.equal(labels[learned], batch["input_ids"][learned])
        counts = Counter(labels[learned].tolist())
        for token, length in owner.items():
            if (batch["input_ids"] == token).any():
                assert counts[token] == max(length - offset, 0)


@pytest.mark.parametrize(("world", "rows"), [(1, 3), (2, 3), (3, 2), (4, 50)])
def test_ranks_share_an_epoch_without_loss_or_repeat(world: int, rows: int) -> None:
    """Ranks that repeat or drop data still agree with each other and train."""
    documents = _documents(_lengths(100, 64))
    ranks = [_stream(documents, rows=rows, rank=r, world=world) for r in range(world)]
    per_epoch = ranks[0].rows_per_epoch
    seen: list[str] = []  # rows of the stream, as the ids in them, in order
    while len(seen) < 3 * per_epoch:
        for rank in ranks:
            batch = next(rank)
            numbers = batch["segment_ids"].amax(1).tolist()
            ids = iter(batch["ids"])
            seen += [" ".join(next(ids) for _ in range(n)) for n in numbers]
    orders = [seen[e * per_epoch : (e + 1) * per_epoch] for e in range(3)]
    for order in orders:
        names = " ".join(order).split()
        assert sorted(names) == sorted(d.id for d in documents)
    assert orders[0] != orders[1] != orders[2], "epochs are shuffled differently"


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    tensors = ("input_ids", "labels", "position_ids", "segment_ids")
    return a["ids"] == b["ids"] and all(torch.equal(a[k], b[k]) for k in tensors)


@pytest.mark.parametrize("steps", [0, 1, 7, 20])
def test_resuming_gives_the_very_same_batches(steps: int) -> None:
    """A place that is off by one batch, or by a shuffle, looks like a normal resumed run."""
    documents = _documents(_lengths(100, 64))
    stream = _stream(documents)
    for _ in range(steps):
        next(stream)
    state = json.loads(json.dumps(stream.state_dict()))
    expected = [next(stream) for _ in range(15)]
    again = _stream(_documents(_lengths(100, 64)))
    next(again)
    again.load_state_dict(state)
    assert again.state_dict()["rows_taken"] == steps * 3
    for batch in expected:
        assert _same(next(again), batch)


def test_resuming_on_other_ranks_goes_on_in_the_stream() -> None:
    """The place counts rows of the whole run, so the number of ranks may change."""
    documents = _documents(_lengths(100, 64))
    two = [_stream(documents, rows=2, rank=r, world=2) for r in range(2)]
    for stream in two:
        next(stream)
    one = _stream(documents, rows=4)
    one.load_state_dict(two[1].state_dict())
    ids = [name for stream in two for name in next(stream)["ids"]]
    assert next(one)["ids"] == ids


def test_a_state_of_other_data_is_refused() -> None:
    """The same place in other data, or another order, would resume without complaint."""
    stream = _stream(_documents([5, 6, 7]))
    state = stream.state_dict()
    reworded = _documents([5, 6, 7])
    reworded[1].input_ids[0] += 1
    for other in (
        _stream(reworded),
        _stream(_documents([5, 6, 8])),
        _stream(_documents([5, 6, 7], seed=1)),
        _stream(_documents([5, 6, 7]), seq_len=32),
        _stream(_documents([5, 6, 7]), seed=2),
    ):
        with pytest.raises(ConfigError, match="other training data or settings"):
            other.load_state_dict(state)


def test_one_pass_is_complete_and_fixed() -> None:
    """Held-out losses of two models compare only on the same rows."""
    documents = _documents(_lengths(100, 64))
    batches = one_pass(documents, seq_len=64, rows=4, pad_token_id=PAD)
    assert sorted(n for b in batches for n in b["ids"]) == sorted(d.id for d in documents)
    few = one_pass(documents, seq_len=64, rows=4, pad_token_id=PAD, max_rows=6)
    assert [len(b["input_ids"]) for b in few] == [4, 2]
    again = one_pass(documents, seq_len=64, rows=4, pad_token_id=PAD, max_rows=6)
    assert all(_same(a, b) for a, b in zip(few, again, strict=True))


def _check_rows(model: PreTrainedModel, tolerance: float) -> None:
    # every document packed behind others, beside padding, against the document alone
    documents = _documents([9, 5, 1, 14, 3])
    batch = collate([documents[:3], documents[3:]], 24, PAD)
    with torch.no_grad():
        hidden = model.base_model(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
        ).last_hidden_state
        for b, row in enumerate((documents[:3], documents[3:])):
            for segment, document in enumerate(row, 1):
                ids = torch.from_numpy(document.input_ids).long()[None]
                alone = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
                packed = hidden[b][batch["segment_ids"][b] == segment]
                torch.testing.assert_close(packed, alone, atol=tolerance, rtol=0)
        loose = model.base_model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state
    assert (loose - hidden).abs().max() > 100 * tolerance, "the model ignores its mask: no test"


@pytest.mark.parametrize("attn", ["sdpa", "eager", "flex_attention"])
def test_packed_documents_do_not_see_each_other(
    make_tiny_llama: Callable[..., PreTrainedModel], attn: str
) -> None:
    """Attention into the neighbour's text lowers the loss and is never noticed."""
    settings = {"hidden_size": 64} if attn == "flex_attention" else {}  # head size 16 at least
    with torch.compiler.set_stance("force_eager"):  # compiling flex takes a minute
        _check_rows(make_tiny_llama(attn_implementation=attn, **settings), 2e-5)


def test_sliding_windows_are_packed_right_too(redraw_weights: Callable[..., None]) -> None:
    """A window counted over the row instead of the document cuts other tokens off."""
    config = AutoConfig.for_model(
        "mistral", vocab_size=272, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=4,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    redraw_weights(model)
    _check_rows(model, 2e-5)


def test_a_model_that_leaks_is_refused(
    tiny_llama: PreTrainedModel, redraw_weights: Callable[..., None]
) -> None:
    """ALiBi and recurrent models ignore position_ids: they would learn across documents."""
    check_isolation(tiny_llama)
    check_isolation(tiny_llama.bfloat16(), backward=True)
    config = AutoConfig.for_model("bloom", vocab_size=272, hidden_size=32, n_layer=2, n_head=4)
    bloom = AutoModelForCausalLM.from_config(config)
    redraw_weights(bloom)
    with pytest.raises(
        ConfigError, match="BloomForCausalLM .*does not keep packed documents apart"
    ):
        check_isolation(bloom)


def test_flash_attention_gets_joined_rows(
    tiny_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With flash-attention transformers isolates documents in a batch of one row only."""
    ids, positions = torch.arange(30).view(2, 15), torch.arange(5).repeat(2, 3)
    expected = packed_hidden(tiny_llama, ids, positions)
    config, forward = tiny_llama.config, tiny_llama.base_model.forward

    def like_flash(input_ids: torch.Tensor, position_ids: Any, use_cache: bool) -> Any:
        implementation = config._attn_implementation
        config._attn_implementation = "sdpa"  # no kernel here; it has to be told about documents
        try:
            position_ids = position_ids if len(input_ids) == 1 else None
            return forward(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)
        finally:
            config._attn_implementation = implementation

    monkeypatch.setattr(tiny_llama.base_model, "forward", like_flash)
    with pytest.raises(ConfigError, match="model.attn=sdpa does not keep packed documents apart"):
        check_isolation(tiny_llama)
    config._attn_implementation = "flash_attention_2"
    check_isolation(tiny_llama)
    torch.testing.assert_close(packed_hidden(tiny_llama, ids, positions), expected)


def test_flex_attention_cannot_train_on_cpu(
    make_tiny_llama: Callable[..., PreTrainedModel],
) -> None:
    """The missing backward pass shows only after the first forward, deep inside torch."""
    model = make_tiny_llama(attn_implementation="flex_attention", hidden_size=64)
    with pytest.raises(ConfigError, match="flex_attention has no backward pass on CPU"):
        check_isolation(model, backward=True)
