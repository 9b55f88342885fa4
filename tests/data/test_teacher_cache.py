"""Teacher caches: what training reads from them is what the base would have said, or an error."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from specheads.config import (
    ConfigError,
    DataConfig,
    FeaturesConfig,
    ModelConfig,
    RunError,
    TrainConfig,
)
from specheads.config.training import DraftConfig, LossConfig
from specheads.data import teacher_cache
from specheads.data.chat import Encoded
from specheads.data.pack import PackedBatches, one_pass
from specheads.data.teacher_cache import (
    Plan,
    TeacherCache,
    cached_batches,
    plan_features,
    plan_top_logits,
    readable,
    still_missing,
    write_cache,
)
from specheads.losses.cross_entropy import IGNORE
from specheads.models.heads import MedusaHeads
from specheads.models.output import (
    FINAL,
    TRUNK,
    output_layer,
    packed_hidden,
    packed_taps,
)
from specheads.training.objectives import DraftObjective, HeadsObjective
from specheads.training.teachers import cached_features
from tests.zoo import VOCAB, build

SEQ_LEN, ROWS, PAD = 64, 3, 256
ROW, K = 32, 5  # of the caches of both kinds
DTYPES = ("float32", "bfloat16", "int8")


def _documents(count: int = 40, seed: int = 0) -> list[Encoded]:
    rng = np.random.default_rng(seed)
    documents = []
    for i, drawn in enumerate(rng.lognormal(3.0, 0.7, count)):
        ids = rng.integers(0, 256, int(np.clip(drawn, 2, SEQ_LEN)), dtype=np.int32)
        labels = np.where(np.arange(len(ids)) < 2, np.int32(IGNORE), ids)
        documents.append(Encoded(f"d{i}", ids, labels))
    return documents


def _plan(
    folder: Path,
    documents: list[Encoded],
    model: PreTrainedModel,
    base: str = "ab" * 32,
    computed: str = "float32, quantization none, autocast none",
    **changed: Any,
) -> Plan:
    given: dict[str, Any] = {
        "hidden_size": model.config.hidden_size,
        "given_as": model.dtype,
        "shard_bytes": 9000,  # several shards
        **changed,
    }
    made_of = {"base model": base, "computation": computed}
    with patch.object(teacher_cache, "SHARD_BYTES", given.pop("shard_bytes")):
        return plan_features(folder, documents, made_of, **given)


def _write(
    plan: Plan, documents: list[Encoded], base: PreTrainedModel, rows: int = ROWS, **changed: Any
) -> TeacherCache:
    write_cache(plan, documents, base, (rows, SEQ_LEN), **changed)
    return TeacherCache(plan)


def _batches(documents: list[Encoded]) -> PackedBatches:
    return PackedBatches(documents, seq_len=SEQ_LEN, rows=ROWS, seed=3, pad_token_id=PAD)


def _losses(
    base: PreTrainedModel, batches: Any, steps: int, *, autocast: bool = False, cached: bool
) -> list[float]:
    """Train heads for some steps; return the losses."""
    torch.manual_seed(0)
    output = output_layer(base)
    heads = MedusaHeads(2, 1, base.config.hidden_size, base.config.vocab_size, "own")
    heads.init_from_output(output.weight)
    objective = HeadsObjective(None if cached else base, heads, train_base=False, output=output)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        batch = next(batches)
        assert ("hidden" in batch) == cached
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss, _ = objective(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("model_dtype", "dtype", "autocast", "tolerance"),
    [
        ("float32", "float32", False, 1e-6),
        ("bfloat16", "bfloat16", False, 1e-4),
        ("bfloat16", "float32", False, 1e-4),
        ("float32", "float32", True, 1e-4),
        ("float32", "bfloat16", False, 5e-4),
        ("float32", "int8", False, 2e-3),
    ],
)
def test_losses_are_those_of_online_training(
    make_tiny_llama: Callable[..., PreTrainedModel],
    tmp_path: Path,
    model_dtype: str,
    dtype: str,
    autocast: bool,
    tolerance: float,
) -> None:
    """Features of the wrong token, document or precision train heads that decode poorly."""
    base = make_tiny_llama().to(getattr(torch, model_dtype))
    documents = _documents()
    features = _write(
        _plan(tmp_path / "f", documents, base, dtype=dtype), documents, base, autocast=autocast
    )
    assert len(features.plan.shards) > 2
    steps = 2 * _batches(documents).rows_per_epoch // ROWS  # two epochs: other neighbours
    online = _losses(base, _batches(documents), steps, autocast=autocast, cached=False)
    cached = _losses(
        base, cached_batches(_batches(documents), features), steps, autocast=autocast, cached=True
    )
    assert online[-1] < online[0] - 0.1, "nothing was learned: no test"
    assert max(abs(a - b) for a, b in zip(online, cached, strict=True)) <= tolerance


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_document_has_its_own_states(
    tiny_llama: PreTrainedModel, tmp_path: Path, dtype: str
) -> None:
    """Shifted by a token or taken from a neighbour, features still have the right shape."""
    documents = _documents()
    features = _write(
        _plan(tmp_path / "f", documents, tiny_llama, dtype=dtype), documents, tiny_llama
    )
    for i, document in enumerate(documents):
        ids = torch.from_numpy(document.input_ids).long()[None]
        with torch.no_grad():
            alone = packed_hidden(tiny_llama, ids, torch.arange(ids.shape[1])[None])[0]
        bound = {
            "float32": torch.tensor(2e-5),
            "bfloat16": alone.abs() * 2**-8 + 1e-5,
            "int8": alone.abs().amax(1, keepdim=True) / 253,
        }[dtype]
        assert features[i]["hidden"].dtype == torch.float32
        assert bool(((features[i]["hidden"] - alone).abs() <= bound).all()), f"document {i}"
    batches = cached_batches(_batches(documents), features)
    batch = next(batches)
    padding = batch["segment_ids"] == 0
    assert padding.any() and bool((batch["hidden"][padding] == 0).all())
    assert bool((batch["hidden"][~padding].abs().amax(1) > 0).all())


def test_bfloat16_states_are_stored_bit_for_bit(
    make_tiny_llama: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    """A cast on the way to the disk and back would cost precision that nobody asked to give up."""
    base, documents = make_tiny_llama().bfloat16(), _documents(12)
    plan = _plan(tmp_path / "f", documents, base, shard_bytes=1 << 30)
    features = _write(plan, documents, base, rows=1000)
    assert plan.settings["dtype"] == "bfloat16"
    assert features[0]["hidden"].dtype == torch.bfloat16
    (batch,) = one_pass(documents, seq_len=SEQ_LEN, rows=1000, pad_token_id=PAD)
    stored = features.rows(
        [[i for i in range(12) if documents[i].id == name] for name in batch["ids"]], SEQ_LEN
    )["hidden"]
    with torch.no_grad():
        online = packed_hidden(base, batch["input_ids"], batch["position_ids"])
    expected = [
        online[b, batch["segment_ids"][b] == s]
        for b in range(len(online))
        for s in range(1, int(batch["segment_ids"][b].max()) + 1)
    ]
    assert all(torch.equal(row[: len(e)], e) for row, e in zip(stored, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shard_bytes", [1, 3000, 33_000, 1 << 30])
def test_the_announced_size_is_that_on_the_disk(
    tiny_llama: PreTrainedModel, tmp_path: Path, dtype: str, shard_bytes: int
) -> None:
    """A size that leaves scales out is believed until the disk is full."""
    documents = _documents(12)
    plan = _plan(tmp_path / "f", documents, tiny_llama, dtype=dtype, shard_bytes=shard_bytes)
    assert not plan.folder.exists(), "announced before anything is written"
    _write(plan, documents, tiny_llama)
    sizes = {path.name: path.stat().st_size for path in plan.folder.iterdir()}
    headers = [sizes[shard.file] - shard.bytes for shard in plan.shards]
    assert plan.num_bytes == sum(sizes.values()) - sum(headers) and 0 < max(headers) < 600
    assert len(sizes) == len(plan.shards) + 2  # index.json and the empty LOCK
    per_token = {"float32": 128, "bfloat16": 64, "int8": 36}[dtype]
    numbers = sum(len(d.input_ids) for d in documents) * per_token
    assert plan.num_bytes == numbers + sizes["index.json"]


def test_padding_is_not_stored_and_rows_may_have_any_length(
    tiny_llama: PreTrainedModel, tmp_path: Path
) -> None:
    """A cache per row length would be written again for every setting."""
    documents = _documents(12)
    features = _write(_plan(tmp_path / "f", documents, tiny_llama), documents, tiny_llama)
    again = _plan(tmp_path / "f", [dataclasses.replace(d, id="x") for d in documents], tiny_llama)
    assert again == features.plan, "names are no part of it"
    longer = PackedBatches(documents, seq_len=200, rows=1, seed=0, pad_token_id=PAD)
    batch = next(longer)
    with torch.no_grad():
        online = packed_hidden(tiny_llama, batch["input_ids"], batch["position_ids"])
    real = batch["segment_ids"] > 0
    stored = features.rows(longer.places, 200)["hidden"]
    torch.testing.assert_close(stored[real], online[real], atol=2e-5, rtol=0)


KINDS = ("features", "stored teacher")


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    """Return a base model that no test changes."""
    return build("llama", seed=3)


def some_documents(count: int = 20) -> list[Encoded]:
    """Return documents of the base's small vocabulary."""
    rng, documents = np.random.default_rng(0), []
    for i in range(count):
        ids = rng.integers(0, VOCAB, int(rng.integers(2, ROW)), dtype=np.int32)
        labels = np.where(np.arange(len(ids)) < 2, np.int32(IGNORE), ids)
        documents.append(Encoded(f"d{i}", ids, labels))
    return documents


def planned(
    kind: str,
    folder: Path,
    documents: list[Encoded],
    digest: str = "ab" * 32,
    computed: str = "float32, quantization none, autocast none",
    **changed: Any,
) -> Plan:
    """Return the layout of a cache of several shards."""
    made_of = {"base model": digest, "computation": computed}
    given: dict[str, Any] = {"hidden_size": 32, "given_as": torch.float32, "shard_bytes": 9000}
    plan = plan_features
    if kind == "stored teacher":
        given, plan = {"vocab_size": VOCAB, "top_k": K, "shard_bytes": 3000}, plan_top_logits
    given |= changed
    with patch.object(teacher_cache, "SHARD_BYTES", given.pop("shard_bytes")):
        return plan(folder, documents, made_of, **given)


def filled(
    plan: Plan, documents: list[Encoded], base: PreTrainedModel, output: Any = None, **more: Any
) -> TeacherCache:
    """Write what is missing and open the cache."""
    if plan.kind == "stored teacher" and output is None:
        output = output_layer(base)
    write_cache(plan, documents, base, (2, ROW), output=output, **more)
    return TeacherCache(plan)


def same(one: TeacherCache, other: TeacherCache) -> bool:
    """Whether two caches of the same documents hold the same."""
    return all(
        torch.equal(values, other[i][name])
        for i in range(len(one.plan.lengths))
        for name, values in one[i].items()
    )


@pytest.mark.parametrize("vocab_size", [VOCAB, VOCAB - 9])
def test_every_document_has_the_bases_own_tokens(
    base: PreTrainedModel, tmp_path: Path, vocab_size: int
) -> None:
    """Shifted by a token or taken from a neighbour, a stored teacher still has the right shape."""
    documents = some_documents()
    plan = planned("stored teacher", tmp_path / "t", documents, vocab_size=vocab_size)
    top = filled(plan, documents, base)
    assert len(plan.shards) > 2
    for i, document in enumerate(documents):
        ids = torch.from_numpy(document.input_ids).long()
        with torch.no_grad():
            logits = base(input_ids=ids[None]).logits[0, :, :vocab_size]
        expected, where = logits.log_softmax(1).topk(K, dim=1)
        assert torch.equal(top[i]["teacher_ids"], where)
        torch.testing.assert_close(top[i]["teacher_log_probs"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", ["forward_kl", "lk_alpha"])
def test_offline_learns_as_online(base: PreTrainedModel, tmp_path: Path, loss: str) -> None:
    """With the base's top_k the k stored tokens are all there is: the losses must be the same."""
    documents, curves = some_documents(), []
    top = filled(planned("stored teacher", tmp_path / "t", documents), documents, base)
    for teacher in (base, None):
        packed = PackedBatches(documents, seq_len=ROW, rows=2, seed=3, pad_token_id=0)
        batches = packed if teacher is not None else cached_batches(packed, top)
        draft = build("llama", seed=2, num_hidden_layers=1)
        objective = DraftObjective(draft, teacher, DraftConfig(loss=loss), LossConfig(top_k=K))
        optimizer = torch.optim.SGD(draft.parameters(), lr=0.1)
        losses = []
        for _ in range(2 * packed.rows_per_epoch // 2):
            value, _ = objective(next(batches))
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.item())
        curves.append(losses)
    assert curves[0][-1] < 0.95 * curves[0][0], "nothing was learned: no test"
    assert max(abs(a - b) for a, b in zip(*curves, strict=True)) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_rows_lie_as_the_tokens_do(base: PreTrainedModel, tmp_path: Path, kind: str) -> None:
    """Laid out in another order than the tokens, every position would learn another's future.

    Resumed at another place than its tokens, a cache gives a loss that still falls.
    """
    documents = some_documents()
    cache = filled(planned(kind, tmp_path / "t", documents), documents, base)
    plain, cached, again = (
        PackedBatches(documents, seq_len=ROW, rows=2, seed=3, pad_token_id=0) for _ in range(3)
    )
    with_cache, resumed = cached_batches(cached, cache), cached_batches(again, cache)
    for _ in range(plain.rows_per_epoch):
        assert with_cache.state_dict() == plain.state_dict()
        # of a run without a cache
        resumed.load_state_dict(json.loads(json.dumps(plain.state_dict())))
        expected, batch, other = next(plain), next(with_cache), next(resumed)
        assert all(torch.equal(batch[k], v) for k, v in expected.items() if k != "ids")
        names = iter(batch["ids"])
        for b, segments in enumerate(batch["segment_ids"]):
            for segment in range(1, int(segments.max()) + 1):
                for name, stored in cache[int(next(names)[1:])].items():
                    assert torch.equal(batch[name][b, segments == segment], stored)
                    assert torch.equal(batch[name], other[name])
                    assert not batch[name][b, segments == 0].any()
    assert plain.state_dict()["rows_taken"] >= 2 * plain.rows_per_epoch


def test_processes_share_the_work_of_one(
    base: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that all write the same cache cost each other time, or each other's files."""
    documents = some_documents()
    plan = planned("features", tmp_path / "f", documents)
    run, ranks = teacher_cache.packed_taps, []

    def counted(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ranks.append(threading.get_ident())
        time.sleep(0.001)  # let the other one in, if anything does
        return run(*args)

    monkeypatch.setattr(teacher_cache, "packed_taps", counted)
    with ThreadPoolExecutor(2) as pool:  # a lock is of the open file, not of the process
        both = [pool.submit(filled, plan, documents, base) for _ in range(2)]
        one, other = (each.result() for each in both)
    assert len(set(ranks)) == 1 and same(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_writing_goes_on_where_it_was(
    base: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Hours of a large base model are lost, or half a shard is taken for a whole one."""
    documents = some_documents()
    plan = planned(kind, tmp_path / "f", documents)
    run, passes = teacher_cache.packed_taps, 0

    def counted(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal passes
        passes += 1
        if passes == 4:
            raise KeyboardInterrupt
        return run(*args)

    monkeypatch.setattr(teacher_cache, "packed_taps", counted)
    with pytest.raises(KeyboardInterrupt):
        filled(plan, documents, base)
    left = plan.missing()
    done = [plan.folder / shard.file for shard in plan.shards if shard not in left]
    assert done and left and "still to be written" in still_missing(plan)
    # what kill -9 leaves is written over
    (plan.folder / f".{left[0].file}.tmp").write_bytes(b"half")
    times = [path.stat().st_mtime_ns for path in done]
    resumed = planned(kind, tmp_path / "f", documents, shard_bytes=1 << 30)
    assert resumed.shards == plan.shards, "the layout is that of the run that began"
    found = filled(resumed, documents, base)
    assert times == [path.stat().st_mtime_ns for path in done]
    assert same(found, filled(planned(kind, tmp_path / "g", documents), documents, base))
    assert not list(plan.folder.glob(".*"))
    assert still_missing(resumed) == "complete"
    before = passes
    filled(resumed, documents, base)
    assert passes == before, "a whole cache is not made again"


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_of_something_else_is_refused(
    base: PreTrainedModel, tmp_path: Path, kind: str
) -> None:
    """A teacher of other weights or other texts fits in shape, and teaches something else."""
    documents = some_documents()
    plan = planned(kind, tmp_path / "f", documents)
    filled(plan, documents, base)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"digest": "cd" * 32}, r"base model \(abababababab there, cdcdcdcdcdcd here\)"),
        ({"computed": "bfloat16"}, r"computation \(float32, .* there, bfloat16 here\)"),
    ]
    if kind == "features":
        cases.append(({"dtype": "int8"}, r"dtype \(float32 there, int8 here\)"))
    else:
        cases.append(({"top_k": 6}, r"stored_top_k \(5 there, 6 here\)"))
        cases.append(({"vocab_size": 60}, r"vocabulary \(64 there, 60 here\)"))
    for changed, message in cases:
        with pytest.raises(ConfigError, match=f"{plan.key}=.* was made with another {message}"):
            planned(kind, tmp_path / "f", documents, **changed)
    other = [documents[1], documents[0], *documents[2:]]
    with pytest.raises(ConfigError, match=r"was made with another documents \(\w{12} there"):
        planned(kind, tmp_path / "f", other)
    for text in ("{", "{}", json.dumps({"made_of": {}, "shards": [{"file": "x"}]})):
        (plan.folder / "index.json").write_text(text)
        with pytest.raises(ConfigError, match=f"index.json is no {kind} index"):
            planned(kind, plan.folder, documents)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_shards_are_named(base: PreTrainedModel, tmp_path: Path, kind: str) -> None:
    """A shard cut short reads as zeros or ends the process; another cache's are other numbers."""
    documents = some_documents()
    plan = planned(kind, tmp_path / "f", documents)
    filled(plan, documents, base)
    path = plan.folder / plan.shards[1].file
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    for use in (TeacherCache, lambda plan: filled(plan, documents, base)):
        with pytest.raises(ConfigError, match=f"{path.name} is damaged"):
            use(plan)
    path.write_bytes(b"\0" * len(good))
    with pytest.raises(ConfigError, match=f"{path.name} is damaged"):
        TeacherCache(plan)
    other = planned(kind, tmp_path / "g", documents, digest="cd" * 32)
    filled(other, documents, base)
    shutil.copy(other.folder / path.name, path)
    with pytest.raises(ConfigError, match=f"{path.name} .* it is of another cache"):
        TeacherCache(plan)
    path.unlink()
    filled(plan, documents, base)
    again = path.read_bytes()  # safetensors writes its notes in any order
    assert len(again) == len(good) and again[-500:] == good[-500:]


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_work_is_said_first(
    base: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Hours into the base's passes is late for a full disk; a traceback says nothing of the key."""
    documents = some_documents()
    for k in (0, VOCAB):
        with pytest.raises(ConfigError, match=f"stored_top_k must be in 1..63, got {k}"):
            planned("stored teacher", tmp_path / "t", documents, top_k=k)
    (tmp_path / "file").touch()
    plan = planned(kind, tmp_path / "file" / "f", documents)
    with pytest.raises(ConfigError, match=f"{plan.key}=.*file is a file"):
        planned(kind, tmp_path / "file", documents)
    with pytest.raises(ConfigError, match=f"{plan.key}=.*f cannot be written: .*Not a directory"):
        filled(plan, documents, base)
    usage = shutil.disk_usage(tmp_path)._replace(free=20_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(teacher_cache, "packed_taps", None)
    plan = planned(kind, tmp_path / "t", documents)
    with pytest.raises(ConfigError, match=r"needs .*B, that disk has 20.0 kB free") as error:
        filled(plan, documents, base)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, kind: str) -> None:
    """One NaN in the cache ends every later run, at a step that says nothing about its cause."""
    documents, broken = some_documents(), build("llama", seed=3)
    output = None if kind == "features" else output_layer(broken)
    part = broken.get_input_embeddings() if kind == "features" else broken.lm_head
    with torch.no_grad():
        part.weight[documents[5].input_ids[0]] = torch.nan
    what = "hidden states" if kind == "features" else "logits"
    plan = planned(kind, tmp_path / "f", documents)
    with pytest.raises(RunError, match=rf"{what} of record d\d+ are not finite"):
        filled(plan, documents, broken, output=output)
    assert len(plan.missing()) >= (1 if kind == "features" else len(plan.shards))


def _config(model: Path, folder: Path, **changed: Any) -> TrainConfig:
    return TrainConfig(
        run_dir="x",
        model=ModelConfig(name=str(model)),
        data=DataConfig(seq_len=SEQ_LEN, rows=ROWS),
        features=FeaturesConfig(dir=str(folder)),
        **changed,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_states_of_several_layers_lie_side_by_side(
    dtype: str, tiny_llama: PreTrainedModel, tmp_path: Path
) -> None:
    """Heads trained on another layer's states guess worse, and nothing says why.

    A cache that holds more than is asked for gives what is asked for, in the asker's order.
    """
    taps, documents = ("layer.0", TRUNK, FINAL), _documents()
    plan = _plan(tmp_path, documents, tiny_llama, dtype=dtype, taps=taps)
    cache = _write(plan, documents, tiny_llama)
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("*.*"))
    assert 0 < on_disk - plan.num_bytes < 600 * len(plan.shards)
    assert _plan(tmp_path, documents, tiny_llama, dtype=dtype, taps=taps).missing() == []
    with pytest.raises(ConfigError, match="was made with another taps"):
        _plan(tmp_path, documents, tiny_llama, dtype=dtype, taps=("layer.1", FINAL))
    for asked in ((FINAL,), (FINAL, "layer.0")):
        part = _plan(tmp_path, documents, tiny_llama, dtype=dtype, taps=asked)
        assert part.missing() == []
        whole = cache[3]["hidden"].unflatten(1, (len(taps), -1))
        wanted = torch.cat([whole[:, taps.index(tap)] for tap in asked], 1)
        assert torch.equal(TeacherCache(part)[3]["hidden"], wanted)
    index = tmp_path / "index.json"
    told = index.read_text()
    index.write_text(json.dumps({**json.loads(told), "taps": [FINAL, TRUNK, "layer.0"]}))
    with pytest.raises(ConfigError, match="was made with another taps"):
        _plan(tmp_path, documents, tiny_llama, dtype=dtype, taps=(FINAL,))
    index.write_text(told)
    size = tiny_llama.config.hidden_size
    for i, document in enumerate(documents[:5]):
        ids = torch.from_numpy(document.input_ids).long()[None]
        with torch.no_grad():
            _, online = packed_taps(
                tiny_llama, ids, torch.arange(ids.shape[1])[None], ("layer.0", TRUNK, FINAL)
            )
        found = cache[i]["hidden"]
        assert found.dtype == tiny_llama.dtype
        for tap, (mine, theirs) in enumerate(
            zip(found.split(size, 1), online[0].split(size, 1), strict=True)
        ):
            # of int8 each tap has a scale of its own: the largest state is that of the last norm
            largest = theirs.abs().amax(1, keepdim=True)
            allowed = {"float32": 1e-5, "bfloat16": 2**-8, "int8": 0.51 / 127}[dtype] * largest
            assert bool(((mine - theirs).abs() <= allowed + 2e-5).all()), tap


def test_a_run_plans_writes_and_reuses_its_cache(
    tiny_model_dir: Path, tiny_llama: PreTrainedModel, tmp_path: Path
) -> None:
    """Held-out rows with the training documents' states would measure nothing."""
    documents = _documents()
    heldout = one_pass(_documents(15, seed=1), seq_len=SEQ_LEN, rows=2, pad_token_id=PAD)
    cfg = _config(tiny_model_dir, tmp_path / "f")
    data: Any = SimpleNamespace(train=_batches(documents), heldout=heldout)
    said: list[str] = []
    shares: list[float] = []
    log = SimpleNamespace(say=said.append, doing=lambda what, share: shares.append(share))
    given: Any = tiny_llama, data, log, [FINAL]
    dry = _config(tiny_model_dir, tmp_path / "f", dry_run=True)
    (planned,) = cached_features(dry, *given)[2]
    assert "still to be written" in planned and "\n" not in planned
    assert not (tmp_path / "f").exists()
    batches, rows, _ = cached_features(cfg, *given)
    # of the texts and of the held-out ones, which waiting users see
    assert shares.count(0.0) == shares.count(1.0) == 2 and len(shares) > 4
    for folder in (tmp_path / "f", tmp_path / "f" / "heldout"):
        files = [path.read_bytes() for path in folder.glob("*.safetensors")]
        headers = sum(8 + int.from_bytes(data[:8], "little") for data in files)
        size = sum(map(len, files)) - headers + (folder / "index.json").stat().st_size
        assert f" {readable(size)}" in planned
    assert cached_features(cfg, *given)[1] and said[0] == planned
    assert said[1].endswith("complete")
    for batch in (next(batches), *rows):
        with torch.no_grad():
            online = packed_hidden(tiny_llama, batch["input_ids"], batch["position_ids"])
        real = batch["segment_ids"] > 0
        torch.testing.assert_close(batch["hidden"][real], online[real], atol=2e-5, rtol=0)
    assert [list(row["ids"]) for row in rows] == [batch["ids"] for batch in heldout]
    with pytest.raises(ConfigError, match="another computation"):
        other = _config(tiny_model_dir, tmp_path / "f", autocast="bfloat16")
        cached_features(other, *given)
    with pytest.raises(ConfigError, match="data.growth"):
        cached_features(cfg, tiny_llama, SimpleNamespace(train=object(), heldout=[]), *given[2:])
