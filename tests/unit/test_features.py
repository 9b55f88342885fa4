"""The feature cache: what training reads from it is what the base would have given, or an error."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from transformers import PreTrainedModel

from specheads.config import (
    ConfigError,
    DataConfig,
    FeaturesConfig,
    ModelConfig,
    RunError,
    TrainConfig,
)
from specheads.data import teacher_cache as features_module
from specheads.data.chat import Encoded
from specheads.data.pack import PackedBatches, one_pass
from specheads.data.teacher_cache import (
    CachedBatches,
    Plan,
    TeacherCache,
    header_bytes,
    metadata,
    plan_features,
    write_cache,
)
from specheads.losses.cross_entropy import IGNORE
from specheads.models.heads import MedusaHeads
from specheads.models.output import output_layer, packed_hidden
from specheads.training.objectives import HeadsObjective
from specheads.training.teachers import FeatureCache

SEQ_LEN, ROWS, PAD = 64, 3, 256
DTYPES = ("float32", "bfloat16", "int8")


def _documents(count: int = 40, seed: int = 0) -> list[Encoded]:
    rng = np.random.default_rng(seed)
    documents = []
    for i, drawn in enumerate(rng.lognormal(3.0, 0.7, count)):
        ids = rng.integers(0, 256, int(np.clip(drawn, 2, SEQ_LEN)), dtype=np.int32)
        labels = np.where(np.arange(len(ids)) < 2, np.int32(IGNORE), ids)
        documents.append(Encoded(f"d{i}", "text", ids, labels))
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
        base, CachedBatches(_batches(documents), features), steps, autocast=autocast, cached=True
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
    batches = CachedBatches(_batches(documents), features)
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


def test_a_run_resumes_in_the_middle_of_an_epoch(
    tiny_llama: PreTrainedModel, tmp_path: Path
) -> None:
    """Tokens of one batch beside hidden states of another give a loss that still falls."""
    documents = _documents()
    features = _write(_plan(tmp_path / "f", documents, tiny_llama), documents, tiny_llama)
    plain, cached = _batches(documents), CachedBatches(_batches(documents), features)
    for _ in range(2):
        next(plain)
        next(cached)
    assert 0 < plain.epoch < 1
    assert cached.state_dict() == plain.state_dict()
    again = CachedBatches(_batches(documents), features)
    again.load_state_dict(json.loads(json.dumps(plain.state_dict())))  # of a run without a cache
    for _ in range(4):
        tokens, one, other = next(plain), next(cached), next(again)
        assert tokens["ids"] == one["ids"] == other["ids"]
        assert torch.equal(tokens["input_ids"], other["input_ids"])
        assert torch.equal(one["hidden"], other["hidden"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shard_bytes", [1, 3000, 33_000, 1 << 30])
def test_the_announced_size_is_that_on_the_disk(
    tiny_llama: PreTrainedModel, tmp_path: Path, dtype: str, shard_bytes: int
) -> None:
    """A size that leaves headers or scales out is believed until the disk is full."""
    documents = _documents(12)
    plan = _plan(tmp_path / "f", documents, tiny_llama, dtype=dtype, shard_bytes=shard_bytes)
    assert not plan.folder.exists(), "announced before anything is written"
    _write(plan, documents, tiny_llama)
    sizes = {path.name: path.stat().st_size for path in plan.folder.iterdir()}
    assert plan.num_bytes == sum(sizes.values())
    assert all(sizes[shard.file] == shard.bytes for shard in plan.shards)
    assert len(sizes) == len(plan.shards) + 2  # index.json and the empty LOCK
    per_token = {"float32": 128, "bfloat16": 64, "int8": 36}[dtype]
    numbers = sum(len(d.input_ids) for d in documents) * per_token
    assert numbers < plan.num_bytes < numbers + len(plan.shards) * 600 + 1000


@pytest.mark.parametrize("dtype", [*DTYPES, "top"])
def test_headers_are_counted_to_the_byte(tmp_path: Path, dtype: str) -> None:
    """Safetensors orders tensors by the kind of their numbers; offsets take as many digits."""
    kind = "stored teacher" if dtype == "top" else "features"
    for num_tokens in (1, 3, 10, 99, 1250, 25_000):
        for size in (2, 30, 256):
            settings = {"hidden_size": size, "dtype": dtype, "given_as": "float32", "top_k": size}
            plan = Plan(kind, tmp_path, {"base model": "x"}, settings, [], [])
            tensors = {
                name: torch.zeros(num_tokens, *shape, dtype=stored)
                for name, (stored, shape) in plan.tensors.items()
            }
            header = len(save(tensors, metadata(plan, "0" * 64))) - sum(
                tensor.numel() * tensor.element_size() for tensor in tensors.values()
            )
            assert header == header_bytes(plan, num_tokens), (num_tokens, size)


def test_processes_share_the_work_of_one(
    tiny_llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that all write the same cache cost each other time, or each other's files."""
    documents = _documents()
    plan = _plan(tmp_path / "f", documents, tiny_llama)
    run, ranks = features_module.packed_hidden, []

    def counted(*args: Any) -> torch.Tensor:
        ranks.append(threading.get_ident())
        time.sleep(0.001)  # let the other one in, if anything does
        return run(*args)

    monkeypatch.setattr(features_module, "packed_hidden", counted)
    with ThreadPoolExecutor(2) as pool:  # a lock is of the open file, not of the process
        both = [pool.submit(_write, plan, documents, tiny_llama) for _ in range(2)]
        one, other = (each.result() for each in both)
    assert len(set(ranks)) == 1
    assert all(torch.equal(one[i]["hidden"], other[i]["hidden"]) for i in range(len(documents)))


def test_padding_is_not_stored_and_rows_may_have_any_length(
    tiny_llama: PreTrainedModel, tmp_path: Path
) -> None:
    """A cache per row length would be written again for every setting."""
    documents = _documents(12)
    features = _write(_plan(tmp_path / "f", documents, tiny_llama), documents, tiny_llama)
    again = _plan(tmp_path / "f", [dataclasses.replace(d, id="x") for d in documents], tiny_llama)
    assert again == features.plan, "names are no part of it"
    longer = PackedBatches(documents, seq_len=200, rows=1, seed=0, pad_token_id=PAD)
    places = longer.take()
    batch = longer.lay_out(places)
    with torch.no_grad():
        online = packed_hidden(tiny_llama, batch["input_ids"], batch["position_ids"])
    real = batch["segment_ids"] > 0
    stored = features.rows(places, 200)["hidden"]
    torch.testing.assert_close(stored[real], online[real], atol=2e-5, rtol=0)


class _KilledError(BaseException):
    """Stands for a signal in the middle of a pass."""


def test_interrupted_writing_goes_on_where_it_was(
    tiny_llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours of a large base model are lost, or half a shard is taken for a whole one."""
    documents = _documents()
    plan = _plan(tmp_path / "f", documents, tiny_llama)
    run, passes = features_module.packed_hidden, 0

    def counted(*args: Any) -> torch.Tensor:
        nonlocal passes
        passes += 1
        if passes == 4:
            raise _KilledError
        return run(*args)

    monkeypatch.setattr(features_module, "packed_hidden", counted)
    with pytest.raises(_KilledError):
        _write(plan, documents, tiny_llama)
    done = sorted(set(range(len(plan.shards))) - set(plan.missing()))
    assert done and plan.missing()
    with pytest.raises(ConfigError, match=r"features-\d+.safetensors is missing"):
        TeacherCache(plan)
    # what kill -9 leaves is written over
    (plan.folder / f".{plan.shards[plan.missing()[0]].file}.tmp").write_bytes(b"half")
    times = {n: (plan.folder / plan.shards[n].file).stat().st_mtime_ns for n in done}
    said: list[tuple[int, int]] = []
    resumed = _plan(tmp_path / "f", documents, tiny_llama, shard_bytes=1 << 30)
    assert resumed.shards == plan.shards, "the layout is that of the run that began"
    found = _write(
        resumed, documents, tiny_llama, progress=lambda _, done, total: said.append((done, total))
    )
    assert times == {n: (plan.folder / plan.shards[n].file).stat().st_mtime_ns for n in done}
    assert said[-1][0] == said[-1][1] == plan.num_tokens - sum(plan.shards[n].tokens for n in done)
    whole = _write(_plan(tmp_path / "g", documents, tiny_llama), documents, tiny_llama)
    assert all(torch.equal(found[i]["hidden"], whole[i]["hidden"]) for i in range(len(documents)))
    assert not list(plan.folder.glob(".*"))
    before = passes
    _write(resumed, documents, tiny_llama)
    assert passes == before, "a whole cache is not made again"


def test_a_cache_of_something_else_is_refused(tiny_llama: PreTrainedModel, tmp_path: Path) -> None:
    """Heads trained on another model's hidden states learn, and are useless on their own base."""
    documents = _documents(12)
    _write(_plan(tmp_path / "f", documents, tiny_llama), documents, tiny_llama)
    cases: list[tuple[str, dict[str, Any]]] = [
        (r"base model \(abababababab there, cdcdcdcdcdcd here\)", {"base": "cd" * 32}),
        (r"computation \(float32, .* there, bfloat16 here\)", {"computed": "bfloat16"}),
        (r"dtype \(float32 there, int8 here\)", {"dtype": "int8"}),
    ]
    for message, changed in cases:
        with pytest.raises(ConfigError, match=r"features.dir=.* was made with another " + message):
            _plan(tmp_path / "f", documents, tiny_llama, **changed)
    other = [documents[1], documents[0], *documents[2:]]
    with pytest.raises(ConfigError, match=r"was made with another documents \(\w{12} there"):
        _plan(tmp_path / "f", other, tiny_llama)
    (tmp_path / "f" / "index.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"index.json is no features index"):
        _plan(tmp_path / "f", documents, tiny_llama)


def test_damaged_shards_are_named(tiny_llama: PreTrainedModel, tmp_path: Path) -> None:
    """A shard cut short reads as zeros or ends the process; changed numbers are never noticed."""
    documents = _documents()
    plan = _plan(tmp_path / "f", documents, tiny_llama)
    _write(plan, documents, tiny_llama)
    path = plan.folder / plan.shards[1].file
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    for use in (TeacherCache, lambda plan: _write(plan, documents, tiny_llama)):
        with pytest.raises(ConfigError, match=r"features-00001.safetensors is damaged: it has"):
            use(plan)
    path.write_bytes(b"\0" * len(good))
    with pytest.raises(ConfigError, match="features-00001.safetensors is damaged"):
        TeacherCache(plan)
    other = _plan(tmp_path / "g", documents, tiny_llama, base="cd" * 32)
    _write(other, documents, tiny_llama)
    shutil.copy(other.folder / path.name, path)
    with pytest.raises(ConfigError, match="features-00001.safetensors .* it is of another cache"):
        TeacherCache(plan)
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    (plan.folder / plan.shards[0].file).unlink()
    with pytest.raises(ConfigError, match="its numbers are not those that were written"):
        _write(plan, documents, tiny_llama)
    path.unlink()
    _write(plan, documents, tiny_llama)
    again = path.read_bytes()  # safetensors writes its notes in any order
    assert len(again) == len(good) and again[-500:] == good[-500:]


def test_a_full_disk_is_known_before_the_base_runs(
    tiny_llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours later the write would fail."""
    documents = _documents(12)
    plan = _plan(tmp_path / "f", documents, tiny_llama)
    usage = shutil.disk_usage(tmp_path)._replace(free=20_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(features_module, "packed_hidden", None)
    with pytest.raises(ConfigError, match=r"needs \d+.\d kB, that disk has 20.0 kB free") as error:
        _write(plan, documents, tiny_llama)
    assert "\n" not in str(error.value)


def test_a_folder_that_cannot_be_is_one_line(tiny_llama: PreTrainedModel, tmp_path: Path) -> None:
    """A traceback out of the standard library says nothing about features.dir."""
    documents = _documents(12)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"features.dir=.*file is a file"):
        _plan(tmp_path / "file", documents, tiny_llama)
    plan = _plan(tmp_path / "file" / "f", documents, tiny_llama)
    with pytest.raises(ConfigError, match=r"features.dir=.*f cannot be written: .*Not a directory"):
        _write(plan, documents, tiny_llama)


def test_states_that_are_not_finite_are_refused(
    tiny_llama: PreTrainedModel, tmp_path: Path
) -> None:
    """One NaN in the cache ends every later run, at a step that says nothing about its cause."""
    documents = _documents(12)
    with torch.no_grad():
        tiny_llama.get_input_embeddings().weight[documents[5].input_ids[0]] = torch.nan
    with pytest.raises(RunError, match=r"hidden states of record d\d+ are not finite"):
        _write(_plan(tmp_path / "f", documents, tiny_llama), documents, tiny_llama)


def _config(model: Path, folder: Path, **changed: Any) -> TrainConfig:
    return TrainConfig(
        run_dir="x",
        model=ModelConfig(name=str(model)),
        data=DataConfig(seq_len=SEQ_LEN, rows=ROWS),
        features=FeaturesConfig(dir=str(folder)),
        **changed,
    )


def test_a_run_plans_writes_and_reuses_its_cache(
    tiny_model_dir: Path, tiny_llama: PreTrainedModel, tmp_path: Path
) -> None:
    """Held-out rows with the training documents' states would measure nothing."""
    documents = _documents()
    heldout = one_pass(_documents(15, seed=1), seq_len=SEQ_LEN, rows=2, pad_token_id=PAD)
    cfg = _config(tiny_model_dir, tmp_path / "f")
    cache = FeatureCache(cfg, tiny_llama, _batches(documents), heldout)
    assert not (tmp_path / "f").exists()
    assert "still to be written" in cache.describe() and "\n" not in cache.describe()
    batches, rows = cache.open(tiny_llama)
    assert cache.num_bytes == sum(
        path.stat().st_size for path in (tmp_path / "f").rglob("*") if path.is_file()
    )
    assert cache.describe().endswith("complete")
    for batch in (next(batches), *rows):
        with torch.no_grad():
            online = packed_hidden(tiny_llama, batch["input_ids"], batch["position_ids"])
        real = batch["segment_ids"] > 0
        torch.testing.assert_close(batch["hidden"][real], online[real], atol=2e-5, rtol=0)
    assert [list(row["ids"]) for row in rows] == [batch["ids"] for batch in heldout]
    with pytest.raises(ConfigError, match="another computation"):
        other = _config(tiny_model_dir, tmp_path / "f", autocast="bfloat16")
        FeatureCache(other, tiny_llama, _batches(documents), heldout)
    with pytest.raises(ConfigError, match="data.growth"):
        FeatureCache(cfg, tiny_llama, object())
