"""Streamed data: every record once per epoch over all ranks, and resuming at any place is exact."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from specheads.config import ConfigError, DataConfig, RunError
from specheads.data.chat import Documents, encode_records
from specheads.data.load import load_records
from specheads.data.readers import Reader, Row
from specheads.data.schema import Dropped
from specheads.data.stream import Place, RecordStream, StreamedBatches, shuffled
from tests.data.test_sources import as_folder, as_hub, as_jsonl, as_parquet, write_lines

MAKERS = {"jsonl": as_jsonl, "parquet": as_parquet, "folder": as_folder, "hub": as_hub}


def numbers(n: int, *, with_places: bool) -> Reader:
    """Return a reader of ``n`` rows that hold their own numbers; its places are those numbers."""

    def read(row: int = 0, place: list[int] | None = None) -> Iterator[Row]:
        assert place is None or place == [row]
        for number in range(row, n):
            yield Row("", "", partial(int, number), [number + 1] if with_places else None)

    return Reader("numbers", "numbers", read)


def numbers_of(taken: Iterable[tuple[Row, Place]]) -> list[int]:
    """The numbers of the rows."""
    return [cast(int, row.parse()) for row, _ in taken]


@settings(max_examples=60)
@given(
    n=st.integers(1, 40),
    buffer=st.integers(1, 50),
    world=st.integers(1, 5),
    limit=st.integers(0, 50),
    seed=st.integers(0, 3),
    with_places=st.booleans(),
)
def test_ranks_share_every_epoch_without_loss_or_repeat(
    n: int, buffer: int, world: int, limit: int, seed: int, with_places: bool
) -> None:
    """A rank that reads another's rows, or a window that is cut short, shows in no loss curve."""
    reader, size = numbers(n, with_places=with_places), min(n, limit or n)
    options: dict[str, Any] = {"buffer": buffer, "seed": seed, "limit": limit}
    order = numbers_of(islice(shuffled(reader, Place(), **options), 3 * size))
    for epoch in range(3):
        assert sorted(order[epoch * size : (epoch + 1) * size]) == list(range(size))
    for rank in range(world):
        own = shuffled(reader, Place(), rank=rank, world=world, **options)
        assert numbers_of(islice(own, len(order[rank::world]))) == order[rank::world]


@settings(max_examples=60)
@given(
    n=st.integers(1, 30),
    buffer=st.integers(1, 12),
    world=st.integers(1, 3),
    rank=st.integers(0, 2),
    at=st.integers(0, 61),
    with_places=st.booleans(),
)
def test_every_place_is_gone_back_to(
    n: int, buffer: int, world: int, rank: int, at: int, with_places: bool
) -> None:
    """A resumed stream that is off by one row, or shuffled anew, looks like a normal one."""
    reader = numbers(n, with_places=with_places)
    options: dict[str, Any] = {"buffer": buffer, "seed": 1, "rank": rank % world, "world": world}
    whole = list(islice(shuffled(reader, Place(), **options), 2 * n + 2))
    at %= len(whole)
    place = Place(**json.loads(json.dumps(vars(whole[at][1]))))
    again = islice(shuffled(reader, place, **options), len(whole) - at - 1)
    assert numbers_of(again) == numbers_of(whole[at + 1 :])


def test_epochs_are_shuffled_differently() -> None:
    """Rows that always meet in the same window in the same order are no shuffle."""
    rows = numbers_of(
        islice(shuffled(numbers(200, with_places=True), Place(), buffer=50, seed=0), 600)
    )
    epochs = [rows[i : i + 200] for i in (0, 200, 400)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert sum(a == b for a, b in zip(epochs[0], range(200), strict=True)) < 20
    with pytest.raises(ConfigError, match="no rows any more"):
        next(shuffled(numbers(0, with_places=True), Place(), buffer=5, seed=0))


def items(n: int) -> list[dict[str, Any]]:
    """Records of very unequal lengths."""
    return [
        {"id": f"r{i}", "text": f"{i} " * (1 + i * 7 % 23)}
        if i % 3
        else {"id": f"r{i}", "prompt": f"p {i}", "completion": "c" * (i % 40 + 1)}
        for i in range(n)
    ]


class SmallPools(StreamedBatches):
    """Batches with pools of 4 rows, so that a small file has many."""

    POOL = 4


def opened(data: DataConfig, tokenizer: PreTrainedTokenizerFast, **options: Any) -> StreamedBatches:
    """Batches of the stream, 2 rows of 64 tokens each."""
    data.streaming, data.shuffle_buffer = True, 16
    stream = RecordStream(data, Dropped())
    given: dict[str, Any] = {"rows": 2, "seed": 3, "pad_token_id": 256, **options}
    return SmallPools(stream, Documents(tokenizer, seq_len=64), **given)


@pytest.fixture(autouse=True)
def _own_datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.mark.parametrize("source", MAKERS)
@pytest.mark.parametrize("world", [1, 3])
def test_an_epoch_is_what_is_held_in_memory_otherwise(
    source: str, world: int, tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Streaming must change the order alone: same documents, same labels, same held-out side."""
    data = MAKERS[source](tmp_path, items(60))
    data.eval_fraction = 0.1
    encoded = encode_records(load_records(data, "train"), Documents(byte_tokenizer, seq_len=64))
    wanted = Counter(
        (d.id, tuple(d.input_ids.tolist()), tuple(d.labels.tolist())) for d in encoded.documents
    )
    ranks = [opened(data, byte_tokenizer, rank=r, world=world, rows=1) for r in range(world)]
    assert ranks[0].stream.heldout == load_records(data, "heldout")
    found: Counter[Any] = Counter()
    for batches in ranks:
        while True:
            batch = next(batches)
            if batches._place.epoch:
                break
            found.update(documents(batch))
    assert found == wanted


def documents(batch: dict[str, Any]) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """The documents of a batch: id, tokens, labels."""
    found, ids = [], iter(batch["ids"])
    for b, segments in enumerate(batch["segment_ids"]):
        for segment in range(1, int(segments.max()) + 1):
            inside = segments == segment
            tokens, labels = (batch[key][b][inside].tolist() for key in ("input_ids", "labels"))
            found.append((next(ids), tuple(tokens), tuple(labels)))
    return found


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two batches are alike in everything."""
    return a.keys() == b.keys() and all(
        torch.equal(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key]
        for key in a
    )


@pytest.mark.parametrize("source", MAKERS)
def test_resuming_at_every_batch_is_exact(
    source: str, tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    """The rest of the run would train on other rows, and count others, than one that went on."""
    data = MAKERS[source](tmp_path, items(40))
    options = {"rank": 1, "world": 2}
    whole, states = opened(data, byte_tokenizer, **options), []
    batches = []
    for _ in range(24):
        states.append(json.loads(json.dumps(whole.state_dict())))
        batches.append(next(whole))
    assert whole._place.epoch >= 2
    resumed = opened(data, byte_tokenizer, **options)
    for at in (0, 23, *range(1, 23, 1 if source == "jsonl" else 5)):
        resumed.load_state_dict(states[at])
        assert all(same(next(resumed), batch) for batch in batches[at : at + 5])
    resumed.load_state_dict(states[3])
    for _ in range(24 - 3):
        next(resumed)
    assert resumed.state_dict() == whole.state_dict() and resumed.counts == whole.counts


def test_other_data_and_other_ranks_are_refused(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    """A file that was edited in place would put other records at the saved place."""
    data = as_jsonl(tmp_path, items(40))
    stream = opened(data, byte_tokenizer)
    state = stream.state_dict()
    with pytest.raises(ConfigError, match="shared by 1 processes, this run has 2"):
        opened(data, byte_tokenizer, world=2).load_state_dict(state)
    with pytest.raises(ConfigError, match="settings: seed .3 there, 4 here"):
        opened(data, byte_tokenizer, seed=4).load_state_dict(state)
    with pytest.raises(ConfigError, match="made without data.streaming"):
        stream.load_state_dict({"rows_taken": 3, "seed": 3, "data": "x"})
    text = Path(str(data.path)).read_text()
    Path(str(data.path)).write_text(text.replace("ccc", "ddd"))
    with pytest.raises(ConfigError, match="does not hold the rows that it held"):
        opened(data, byte_tokenizer).load_state_dict(state)
    Path(str(data.path)).write_text(text + "\n")
    with pytest.raises(ConfigError, match="other training data or settings: data .d.jsonl"):
        opened(data, byte_tokenizer).load_state_dict(state)


def test_bad_rows_are_set_aside_once_and_again_after_a_resume(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    """A row that vanishes is a smaller data set; one written twice a larger problem than it is."""
    mute = {"id": "mute", "prompt": "p", "completion": ""}
    lines = [*items(1200), "{torn", *items(20)[3:4], mute, *items(30)]
    path = write_lines(tmp_path / "d.jsonl", lines)
    data = DataConfig(source="jsonl", path=str(path), max_bad_fraction=0.05)
    batches = opened(data, byte_tokenizer, rows=8)
    file = tmp_path / "quarantine.jsonl"
    batches.write_quarantine(file)
    states = []
    while not batches._place.epoch:
        states.append(batches.state_dict())
        next(batches)
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert {(row["where"], row["reason"]) for row in found} == {
        (f"{path}:1201", "not JSON"),
        (f"{path}:1203", "with empty answers"),
    }
    before = file.read_text()
    with file.open("a") as torn:
        torn.write('{"where": "of a killed ru')
    for state in (states[-1], states[len(states) // 2], states[0]):
        again = opened(data, byte_tokenizer, rows=8)
        again.write_quarantine(file)
        again.load_state_dict(state)
        while not again._place.epoch:
            next(again)
        assert file.read_text() == before
        assert again.counts == batches.counts


def test_too_many_bad_rows_stop_it_before_and_while_training(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    """A terabyte whose second half is broken must not become a run on the first half."""
    torn = ["{torn"] * 400
    for lines, complaint in (
        ([*items(900), *torn], "the start of .*d.jsonl: 100 of 1,000 records cannot be used"),
        ([*items(90), *torn[:30]], "30 of 120 records cannot be used, more than"),
        ([], "holds no records"),
        (["null"] * 3, "3 of 3 records cannot be used"),
    ):
        path = write_lines(tmp_path / "d.jsonl", lines)
        data = DataConfig(source="jsonl", path=str(path))
        with pytest.raises(ConfigError, match=complaint):
            opened(data, byte_tokenizer)
    path = write_lines(tmp_path / "d.jsonl", [*items(1500), *torn])
    held = write_lines(tmp_path / "e.jsonl", [{"text": "held out"}])
    data = DataConfig(source="jsonl", path=str(path), eval_path=str(held))
    batches = opened(data, byte_tokenizer)
    with pytest.raises(RunError, match=r"records read so far cannot be used.*not JSON"):
        for _ in range(2000):
            next(batches)
    with pytest.raises(ConfigError, match="nothing to learn|no record that rank 0 learns"):
        opened(
            DataConfig(
                source="jsonl",
                path=str(write_lines(tmp_path / "m.jsonl", [{"text": ""}] * 3)),
                eval_path=str(held),
                max_bad_fraction=1.0,
            ),
            byte_tokenizer,
        )


def test_what_cannot_be_streamed_says_so(tmp_path: Path) -> None:
    """Half of the features of a run must not be those of the first pool alone."""
    from specheads.config import TrainConfig
    from specheads.training.setup import read_data

    data = as_jsonl(tmp_path, items(40))
    data.streaming = True
    cfg = TrainConfig(run_dir="x", data=data)
    assert len(read_data(cfg).heldout) >= 1
    cfg.features.dir = "cache"
    with pytest.raises(ConfigError, match="features.dir=cache needs all training records at one"):
        read_data(cfg)
    (tmp_path / "l.json").write_text(json.dumps(items(9)))
    with pytest.raises(ConfigError, match="holds a list, which is read in one piece"):
        RecordStream(DataConfig(source="jsonl", path=str(tmp_path / "l.json")), Dropped())
    with pytest.raises(ConfigError, match="data.streaming must be false with data.source=pycode"):
        DataConfig(streaming=True)
