"""Files, the hub and mixtures give the same records, each once, and say what they lack."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from transformers import PreTrainedTokenizerFast

from specheads.config import ConfigError, DataConfig
from specheads.data import pycode
from specheads.data.chat import Documents, encode_records
from specheads.data.load import load_records, read_jsonl, shares
from specheads.data.schema import Dropped, Tally

Make = Callable[[Path, Iterable[dict[str, Any]]], DataConfig]


def rows(n: int, start: int = 0) -> list[dict[str, Any]]:
    """Rows of mixed contents; every tenth is a copy of the one before it, under another id."""
    made: list[dict[str, Any]] = []
    for i in range(start, start + n):
        number = i - 1 if i % 10 == 9 else i
        if number % 2:
            made.append({"id": f"r{i}", "prompt": f"p {number}", "completion": f"c {number}"})
        else:
            turns = [{"from": "human", "value": f"q {number}"}, {"from": "gpt", "value": "a"}]
            made.append({"id": f"r{i}", "conversations": turns})
    return made


def content(record: dict[str, Any]) -> str:
    """What is learned of a record, as a key."""
    return json.dumps({k: v for k, v in record.items() if k not in ("id", "kind")}, sort_keys=True)


def write_lines(path: Path, items: Iterable[object]) -> Path:
    """Write JSON lines; strings as they are."""
    lines = (item if isinstance(item, str) else json.dumps(item) for item in items)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def write_parquet(path: Path, items: Iterable[dict[str, Any]]) -> Path:
    """Write a parquet file in small groups; columns that a row lacks hold null."""
    parquet.write_table(pa.Table.from_pylist(_same_keys(items)), path, row_group_size=7)
    return path


def _same_keys(items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    items = list(items)
    names = dict.fromkeys(key for item in items for key in item)
    return [{name: item.get(name) for name in names} for item in items]


def as_jsonl(folder: Path, items: Iterable[dict[str, Any]]) -> DataConfig:
    """JSON lines."""
    return DataConfig(source="jsonl", path=str(write_lines(folder / "d.jsonl", items)))


def as_gzip(folder: Path, items: Iterable[dict[str, Any]]) -> DataConfig:
    """JSON lines, packed."""
    path = folder / "d.jsonl.gz"
    path.write_bytes(gzip.compress(write_lines(folder / "d.jsonl", items).read_bytes()))
    return DataConfig(source="jsonl", path=str(path))


def as_json(folder: Path, items: Iterable[dict[str, Any]]) -> DataConfig:
    """A JSON list."""
    (folder / "d.json").write_text(json.dumps(list(items), indent=1))
    return DataConfig(source="jsonl", path=str(folder / "d.json"))


def as_parquet(folder: Path, items: Iterable[dict[str, Any]]) -> DataConfig:
    """One parquet file."""
    return DataConfig(source="parquet", path=str(write_parquet(folder / "d.parquet", items)))


def as_folder(folder: Path, items: Iterable[dict[str, Any]]) -> DataConfig:
    """Parquet files in a folder and one below it."""
    items = _same_keys(items)
    (folder / "many" / "b").mkdir(parents=True)
    write_parquet(folder / "many" / "a.parquet", items[:20])
    write_parquet(folder / "many" / "b" / "a.parquet", items[20:])
    return DataConfig(source="parquet", path=str(folder / "many"))


def as_hub(folder: Path, items: Iterable[dict[str, Any]]) -> DataConfig:
    """A folder that datasets reads."""
    (folder / "set").mkdir(exist_ok=True)
    write_parquet(folder / "set" / "train.parquet", items)
    return DataConfig(source="hub", path=str(folder / "set"))


def as_stream(folder: Path, items: Iterable[dict[str, Any]]) -> DataConfig:
    """The same, read as a stream."""
    as_hub(folder, items)
    return DataConfig(source="hub", path=str(folder / "set"), streaming=True)


def as_mixture(folder: Path, items: Iterable[dict[str, Any]]) -> DataConfig:
    """Half of the rows in either of two files."""
    items = list(items)
    (folder / "x").mkdir()
    first, second = as_jsonl(folder, items[:50]), as_parquet(folder / "x", items[50:])
    parts = [{"source": p.source, "path": p.path} for p in (first, second)]
    return DataConfig(source="mixture", mixture=parts)


ALL: list[Make] = [as_jsonl, as_gzip, as_json, as_parquet, as_folder, as_hub, as_stream, as_mixture]


@pytest.fixture(autouse=True)
def _own_datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.mark.parametrize("make", ALL)
def test_every_source_gives_every_record_once(make: Make, tmp_path: Path) -> None:
    """A row lost, repeated or held out and trained on flatters or spoils every figure."""
    items = rows(100)
    data = make(tmp_path, items)
    data.eval_fraction = 0.2
    train, heldout = load_records(data, "train"), load_records(data, "heldout")
    ids = [record["id"] for record in train + heldout]
    assert len(set(ids)) == len(ids) == 100
    assert not {content(r) for r in train} & {content(r) for r in heldout}
    assert 8 <= len(heldout) <= 40
    wanted = Counter(content(r) for r in load_records(as_whole(tmp_path, items), "heldout"))
    assert Counter(map(content, train + heldout)) == wanted
    assert load_records(data, "train") == train, "not the same twice"


def as_whole(folder: Path, items: Iterable[dict[str, Any]]) -> DataConfig:
    """All rows as the held-out part of a .jsonl, as the reference."""
    everything = write_lines(folder / "all.jsonl", items)
    other = write_lines(folder / "one.jsonl", [{"text": "other"}])
    return DataConfig(source="jsonl", path=str(other), eval_path=str(everything))


@pytest.mark.parametrize("make", [as_parquet, as_folder, as_hub, as_stream])
def test_tables_are_split_like_lines(make: Make, tmp_path: Path) -> None:
    """Changing the format of a file must not move held-out records into the training part."""
    (tmp_path / "lines").mkdir()
    lines = as_jsonl(tmp_path / "lines", rows(100))
    table = make(tmp_path, rows(100))
    for split in ("train", "heldout"):
        assert load_records(table, split) == load_records(lines, split)


@pytest.mark.parametrize("make", [as_jsonl, as_parquet, as_hub])
def test_bad_records_are_left_out_and_counted(make: Make, tmp_path: Path) -> None:
    """One broken row must not cost the run, nor vanish."""
    items = rows(100)
    items[7] = {"id": "r7", "prompt": "no completion"}
    items[12]["conversations"].append({"from": "gpt", "value": "twice"})
    items[31]["id"] = "r30"
    data = make(tmp_path, items)
    dropped = Dropped()
    train = load_records(data, "train", dropped=dropped)
    heldout = load_records(data, "heldout", dropped=dropped)
    assert len(train) + len(heldout) == 97
    assert dropped.counts["read"] == 100
    assert dropped.reasons == {
        "without a content": 1,
        "whose roles do not alternate": 1,
        "with the id of an earlier one": 1,
    }
    data.max_bad_fraction = 0.02
    with pytest.raises(ConfigError, match="3 of 100 records cannot be used, more than data.max"):
        load_records(data, "train")
    data.max_bad_fraction = 0
    with pytest.raises(ConfigError, match="found completion|found id, prompt|found prompt"):
        load_records(data, "train")


def test_lines_that_are_not_json_are_bad_records(tmp_path: Path) -> None:
    """The last line of a file whose writer was killed is half a line."""
    path = write_lines(tmp_path / "d.jsonl", [*rows(30), '{"id": "r31", "prom'])
    dropped = Dropped()
    load_records(DataConfig(source="jsonl", path=str(path)), "train", dropped=dropped)
    assert dropped.reasons == {"not JSON": 1}
    assert next(iter(dropped.rows)) == f"{path}:31"
    assert '{"id": "r31", "prom' in dropped.rows[f"{path}:31"]["error"]


def test_a_packed_file_that_is_cut_off_or_none_is_one_line(tmp_path: Path) -> None:
    """A download that broke off would be trained on as if it were whole, or end in a traceback."""
    path = tmp_path / "d.jsonl.gz"
    whole = gzip.compress(b'{"text": "a"}\n' * 9_000)
    damaged = whole[:40] + bytes(8) + whole[48:]
    for content in (whole[:-9], whole[: len(whole) // 2], damaged, b'{"text": "a"}\n'):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="cannot read .*d.jsonl.gz: ") as caught:
            read_jsonl(path)
        assert "\n" not in str(caught.value)


def test_an_item_of_a_list_is_judged_as_a_line_is(tmp_path: Path) -> None:
    """A repeated key would be read in two ways, and one item too large or deep end the whole file.

    Every item is written as a line and as part of a list, with spaces and commas around and in it.
    """
    items = [
        '{"text": "a, ] b"}', '{"text": "a", "text": "b"}', '{"x": NaN, "text": "c"}', '["x", []]',
        '{"text": "d", "x": ' + "[" * 64 + "]" * 64 + "}", '{"text": "' + "e" * 300 + '"}', "7",
        '{"text" :\t"\\ud83d", "id": "f"}', '{"text": "ä",\r"id": 3}', '"[,"',
    ]  # fmt: skip
    (tmp_path / "d.jsonl").write_text("\n".join(items), encoding="utf-8", newline="")
    listed = "\ufeff [\n" + " ,\t".join(items) + "\n]\n"
    (tmp_path / "d.json").write_text(listed, encoding="utf-8", newline="")
    found = []
    for name in ("d.jsonl", "d.json"):
        how: dict[str, Any] = {"max_row_bytes": 200, "max_bad_fraction": 1, "eval_fraction": 0.5}
        dropped, data = Dropped(), DataConfig(source="jsonl", path=str(tmp_path / name), **how)
        kept = sorted(
            record["text"]
            for split in ("train", "heldout")
            for record in load_records(data, split, dropped=dropped)
        )
        found.append((kept, dropped.reasons))
    assert found[0] == found[1]
    assert found[0][0] == ["a, ] b", "ä"] and sum(found[0][1].values()) == 8


def test_a_json_file_may_hold_lines_or_a_list(tmp_path: Path) -> None:
    """Both are common under that name; a list read by lines would be one bad record."""
    write_lines(tmp_path / "d.json", rows(30))
    data = DataConfig(source="jsonl", path=str(tmp_path / "d.json"))
    assert len(load_records(data, "train")) + len(load_records(data, "heldout")) == 30
    (tmp_path / "d.json").write_text('[{"text": "a"},\n {"text": ]')
    with pytest.raises(ConfigError, match=r"d.json is not JSON: .*line 2"):
        load_records(data, "train")
    (tmp_path / "d.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds no records"):
        load_records(data, "train")
    (tmp_path / "d.json").write_text('{"text":\n "a"}\n')
    with pytest.raises(ConfigError, match="most often .* not JSON, first: .*d.json:1"):
        load_records(data, "train")


def test_held_out_records_are_not_trained_on(tmp_path: Path) -> None:
    """A held-out file that was sampled from the training file flatters every held-out figure."""
    every = rows(40)
    data = as_jsonl(tmp_path, every)
    data.eval_path = str(write_lines(tmp_path / "e.jsonl", [{**every[3], "id": "other"}]))
    dropped = Dropped()
    train = load_records(data, "train", dropped=dropped)
    assert len(train) == 39
    assert "1 not trained on, since they are held out too" in dropped.summary()
    data.eval_path = data.path
    with pytest.raises(ConfigError, match="every record of .* is held out too, by .*d.jsonl"):
        load_records(data, "train")


@pytest.mark.parametrize("make", [as_parquet, as_hub, as_stream])
def test_columns_of_a_table(make: Make, tmp_path: Path) -> None:
    """Instruction sets; and the rows of a table without our columns are not all bad one by one."""
    items = [{"instruction": f"i {n}", "output": f"o {n}", "when": n} for n in range(20)]
    data = make(tmp_path, items)
    with pytest.raises(ConfigError, match="has the columns instruction, output, when; a record"):
        load_records(data, "train")
    data.columns = {"prompt": "instruction", "completion": "answer"}
    with pytest.raises(ConfigError, match="has no column answer, .* there are instruction, output"):
        load_records(data, "train")
    data.columns["completion"] = "output"
    record = load_records(data, "train")[0]
    assert record.keys() == {"id", "kind", "prompt", "completion"}
    data.columns = {"user": "instruction", "assistant": "output"}
    assert [m["role"] for m in load_records(data, "train")[0]["messages"]] == ["user", "assistant"]


def test_files_that_are_no_parquet(tmp_path: Path) -> None:
    """Each is one line that names the file."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "d.parquet").write_text("PAR1 not quite")
    for path, complaint in (
        (tmp_path / "empty", "holds no .parquet file"),
        (tmp_path / "none.parquet", "cannot read .*none.parquet: "),
        (tmp_path / "d.parquet", "cannot read .*d.parquet: "),
    ):
        with pytest.raises(ConfigError, match=complaint) as caught:
            load_records(DataConfig(source="parquet", path=str(path)), "train")
        assert "\n" not in str(caught.value)


def test_a_stream_is_read_no_further_than_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten thousand records of a data set of a terabyte must not download the terabyte."""
    from specheads.data import load

    data = as_stream(tmp_path, rows(100))
    data.max_records = 30
    seen: list[str] = []
    stock = load.to_record

    def seeing(row: object, where: str, *rest: Any) -> dict[str, Any]:
        seen.append(where)
        return stock(row, where, *rest)

    monkeypatch.setattr(load, "to_record", seeing)
    train, heldout = load_records(data, "train"), load_records(data, "heldout")
    assert len(train) + len(heldout) == 30
    assert len(seen) == 60  # each split reads the same thirty
    assert {record["id"] for record in train + heldout} == {f"r{i}" for i in range(30)}


def test_hub_splits_and_mistakes(tmp_path: Path) -> None:
    """Datasets answers with up to a page; the hub's names are typed by hand."""
    data = as_hub(tmp_path, rows(30))
    write_parquet(tmp_path / "set" / "test.parquet", rows(5, start=200))
    data.eval_split = "test"
    assert len(load_records(data, "train")) == 30
    assert [r["id"] for r in load_records(data, "heldout")] == [f"r{i}" for i in range(200, 205)]
    nameless = DataConfig(source="hub", path=str(tmp_path / "set"), columns={"id": ""})
    assert load_records(nameless, "train")[0]["id"].startswith(f"{tmp_path}/set/train:")
    for changes, complaint in (
        ({"split": "nope"}, r"data.split=nope: .*\['train', 'test'\]"),
        ({"split": "nope", "streaming": True}, "data.split=nope: "),
        ({"subset": "nope"}, r"data.subset=nope, .*Available: \['default'\]"),
        ({"path": "no/such_thing"}, "data.path=no/such_thing, .*Couldn't reach"),
        ({"path": str(tmp_path / "nowhere")}, "Couldn't find any data file"),
    ):
        wrong = DataConfig(**{"source": "hub", "path": data.path, **changes})
        with pytest.raises(ConfigError, match=complaint) as caught:
            load_records(wrong, "train")
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="data.eval_path must be left out with data.source=hub"):
        DataConfig(source="hub", path="x", eval_path="y")
    with pytest.raises(ConfigError, match="data.eval_split must be left out unless"):
        DataConfig(source="jsonl", path="x", eval_split="y")


PARTS = st.lists(st.tuples(st.integers(1, 400), st.floats(0.01, 10)), min_size=1, max_size=5)


@given(PARTS, st.integers(0, 600))
def test_shares_are_those_of_the_weights(parts: list[tuple[int, float]], limit: int) -> None:
    """A part that runs out would otherwise hand its share to the others."""
    sizes, weights = [size for size, _ in parts], [weight for _, weight in parts]
    taken = shares(sizes, weights, limit)
    total = sum(taken)
    assert all(0 <= t <= n for t, n in zip(taken, sizes, strict=True))
    assert not limit or total <= limit
    for t, w in zip(taken, weights, strict=True):
        assert abs(t - total * w / sum(weights)) <= 1
    # no larger mixture has these shares: one more record in all is too much for some part
    if not limit or total < limit:
        more = [(total + 1) * w / sum(weights) for w in weights]
        assert any(m > n - 1e-6 for m, n in zip(more, sizes, strict=True))
    assert shares([10, 10], [0.7, 0.3], 10) == [7, 3]
    assert shares([7, 100], [0.7, 0.3]) == [7, 3]


def _mixture(folder: Path, **more: Any) -> DataConfig:
    (folder / "b").mkdir(exist_ok=True)
    first = as_jsonl(folder, [{"text": f"a {i}"} for i in range(400)])
    second = as_jsonl(folder / "b", [{"text": f"b {i}"} for i in range(60)])
    parts = [
        {"source": "jsonl", "path": first.path, "weight": 3},
        {"source": "jsonl", "path": second.path, "weight": 1},
    ]
    return DataConfig(source="mixture", mixture=parts, eval_fraction=0.25, **more)


def test_a_mixture_has_the_weights_and_says_what_limits_it(tmp_path: Path) -> None:
    """The small part is what one wants more of; a share that is not kept must not look kept."""
    dropped = Dropped()
    data = _mixture(tmp_path)
    train = load_records(data, "train", dropped=dropped)
    sides = Counter(record["text"][0] for record in train)
    assert sides["b"] > 30
    assert abs(sides["a"] - 3 * sides["b"]) <= 2
    assert f"{len(train)} of " in dropped.summary()
    assert "since part 1 (jsonl " in dropped.summary()
    assert {r["id"].split(":")[0] for r in train} == {"0", "1"}
    assert len({r["id"] for r in train}) == len(train)
    few = load_records(_mixture(tmp_path, max_records=40), "train")
    assert Counter(record["text"][0] for record in few) == {"a": 30, "b": 10}
    assert {r["text"] for r in few} <= {r["text"] for r in train}, "not chosen by content"
    quiet = Dropped()
    load_records(_mixture(tmp_path, max_records=40), "train", dropped=quiet)
    assert not quiet
    whole = _mixture(tmp_path)
    for part in whole.mixture:
        del part["weight"]
    sides = Counter(r["text"][0] for s in ("train", "heldout") for r in load_records(whole, s))
    assert sides == {"a": 400, "b": 60}


def test_a_part_does_not_train_on_what_another_holds_out(tmp_path: Path) -> None:
    """The same records under two names is how mixtures are made."""
    data = _mixture(tmp_path)
    data.mixture[1] = {"source": "jsonl", "path": data.mixture[0]["path"], "eval_fraction": 0.5}
    del data.mixture[0]["weight"]
    train, heldout = load_records(data, "train"), load_records(data, "heldout")
    assert not {r["text"] for r in train} & {r["text"] for r in heldout}
    assert len({r["id"] for r in train + heldout}) == len(train + heldout)


def test_a_mixture_with_pycode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part keeps its own rule of what is held out."""
    made = {
        split: [
            {"id": each, "kind": "next", "messages": [{"role": "user", "content": each}]}
            for each in (f"{split}{i}" for i in range(50))
        ]
        for split in ("train", "heldout")
    }
    monkeypatch.setattr(pycode, "pairs", lambda split, *_rest: made[split])
    part = as_jsonl(tmp_path, rows(100))
    parts = [{"source": "jsonl", "path": part.path}, {"source": "pycode", "kinds": ["next"]}]
    parts = [{**entry, "weight": 2} for entry in parts]
    data = DataConfig(source="mixture", mixture=parts, max_records=20)
    train = load_records(data, "train")
    assert sum(r["id"].startswith("1:train") for r in train) == 10
    assert not any("heldout" in r["id"] for r in train)
    made["heldout"].clear()
    with pytest.raises(ConfigError, match=r"data.mixture\[1\] \(pycode\) has no heldout records"):
        load_records(data, "heldout")


@pytest.mark.parametrize(
    ("mixture", "complaint"),
    [
        ([], r"data.mixture must be \[\{source"),
        (["a.jsonl"], r"data.mixture\[0\] must be \{source"),
        (
            [{"path": "a"}],
            r"data.mixture\[0\].source must be one of pycode, jsonl, parquet, hub, got",
        ),
        ([{"source": "mixture"}], r"data.mixture\[0\].source must be one of"),
        ([{"source": "jsonl"}], r"data.mixture\[0\]: data.path must be a .jsonl file"),
        (
            [{"source": "pycode"}, {"source": "jsonl", "pth": "a"}],
            r"unknown key data.mixture\[1\].pth; did you mean path\?",
        ),
        ([{"source": "pycode", "seq_len": 8}], r"unknown key data.mixture\[0\].seq_len"),
        ([{"source": "pycode", "weigth": 1}], r"did you mean weight\?"),
        ([{"source": "pycode", "weight": 0}], r"data.mixture\[0\].weight must be a positive"),
        ([{"source": "pycode", "weight": "x"}], r"data.mixture\[0\].weight must be a positive"),
        ([{"source": "jsonl", "path": 3}], r"data.mixture\[0\].path must be of type str, got 3"),
        ([{"source": "pycode", "max_records": 1.5}], "max_records must be of type int"),
        ([{"source": "pycode", "max_records": True}], "max_records must be of type int"),
        ([{"source": "pycode", "weight": 1}, {"source": "pycode"}], "every part has a weight, or"),
        ([{"source": "pycode", "eval_fraction": 2}], r"\[0\]: data.eval_fraction must be in"),
    ],
)
def test_mistakes_in_a_mixture_are_named(mixture: list[Any], complaint: str) -> None:
    """Nobody checks what stands in a list, before a base model has been loaded."""
    with pytest.raises(ConfigError, match=complaint):
        DataConfig(source="mixture", mixture=mixture)


def test_records_that_a_template_refuses(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    """Templates have rules of their own; one conversation that breaks them must not end a run."""
    byte_tokenizer.chat_template = (
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}"
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<eos>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    good = [{"id": f"g{i}", "kind": "chat", "messages": turns} for i in range(9)]
    bad = {"id": "b", "kind": "chat", "messages": turns[1:]}
    dropped = Dropped()
    encoded = encode_records(
        [*good, bad], Documents(byte_tokenizer, seq_len=32), Tally(0.1, dropped)
    )
    assert encoded.counts["refused"] == 1
    assert encoded.counts["documents"] == 9
    assert dropped.reasons == {"that the chat template refuses": 1}
    assert "1 dropped: cannot be encoded" in encoded.summary()
    with pytest.raises(ConfigError, match="1 of 10 records cannot be used.*user first"):
        encode_records([*good, bad], Documents(byte_tokenizer, seq_len=32), Tally(0.09, Dropped()))
