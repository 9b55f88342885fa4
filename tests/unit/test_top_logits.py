"""The stored teacher: what training reads from it is what the base would have said, or an error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from specheads.config import ConfigError, RunError
from specheads.config.training import DraftConfig, LossConfig
from specheads.data import teacher_cache as features_module
from specheads.data.chat import Encoded
from specheads.data.pack import PackedBatches
from specheads.data.teacher_cache import (
    CachedBatches,
    Plan,
    TeacherCache,
    plan_top_logits,
    still_missing,
    write_cache,
)
from specheads.losses.cross_entropy import IGNORE
from specheads.models.output import output_layer
from specheads.training.draft_objective import DraftObjective
from tests.zoo import VOCAB, build

SEQ_LEN, ROWS, K = 32, 2, 5


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    """Return a base model that no test changes."""
    return build("llama", seed=3)


def _documents(count: int = 20) -> list[Encoded]:
    rng, documents = np.random.default_rng(0), []
    for i in range(count):
        ids = rng.integers(0, VOCAB, int(rng.integers(2, SEQ_LEN)), dtype=np.int32)
        labels = np.where(np.arange(len(ids)) < 2, np.int32(IGNORE), ids)
        documents.append(Encoded(f"d{i}", "text", ids, labels))
    return documents


def _plan(
    folder: Path,
    documents: list[Encoded],
    base: str = "ab" * 32,
    computed: str = "float32, quantization none, autocast none",
    **changed: Any,
) -> Plan:
    given: dict[str, Any] = {"vocab_size": VOCAB, "top_k": K, "shard_bytes": 3000, **changed}
    made_of = {"base model": base, "computation": computed}
    return plan_top_logits(folder, documents, made_of, **given)


def _write(
    plan: Plan, documents: list[Encoded], base: PreTrainedModel, **more: Any
) -> TeacherCache:
    write_cache(plan, documents, base, (ROWS, SEQ_LEN), output=output_layer(base), **more)
    return TeacherCache(plan)


def _batches(documents: list[Encoded]) -> PackedBatches:
    return PackedBatches(documents, seq_len=SEQ_LEN, rows=ROWS, seed=3, pad_token_id=0)


@pytest.mark.parametrize("vocab_size", [VOCAB, VOCAB - 9])
def test_every_document_has_the_bases_own_tokens(
    base: PreTrainedModel, tmp_path: Path, vocab_size: int
) -> None:
    """Shifted by a token or taken from a neighbour, a stored teacher still has the right shape."""
    documents = _documents()
    top = _write(_plan(tmp_path / "t", documents, vocab_size=vocab_size), documents, base)
    assert len(top.plan.shards) > 2
    for i, document in enumerate(documents):
        ids = torch.from_numpy(document.input_ids).long()
        with torch.no_grad():
            logits = base(input_ids=ids[None]).logits[0, :, :vocab_size]
        expected, where = logits.log_softmax(1).topk(K, dim=1)
        assert torch.equal(top[i]["teacher_ids"], where)
        torch.testing.assert_close(top[i]["teacher_log_probs"], expected, rtol=1e-4, atol=1e-5)


def test_rows_lie_as_the_tokens_do(base: PreTrainedModel, tmp_path: Path) -> None:
    """Laid out in another order than the tokens, every position would learn another's future."""
    documents = _documents()
    top = _write(_plan(tmp_path / "t", documents), documents, base)
    plain, taught = _batches(documents), CachedBatches(_batches(documents), top)
    for _ in range(2 * plain.rows_per_epoch // ROWS):
        assert taught.state_dict() == plain.state_dict()
        expected, batch = next(plain), next(taught)
        assert all(torch.equal(batch[k], v) for k, v in expected.items() if k != "ids")
        names = iter(batch["ids"])
        for b, segments in enumerate(batch["segment_ids"]):
            for segment in range(1, int(segments.max()) + 1):
                for name, stored in top[int(next(names)[1:])].items():
                    assert torch.equal(batch[name][b, segments == segment], stored)
            assert not batch["teacher_ids"][b, segments == 0].any()
    again = CachedBatches(_batches(documents), top)
    again.load_state_dict(plain.state_dict())
    assert torch.equal(next(again)["input_ids"], next(plain)["input_ids"])


@pytest.mark.parametrize("loss", ["forward_kl", "lk_alpha"])
def test_offline_learns_as_online(base: PreTrainedModel, tmp_path: Path, loss: str) -> None:
    """With the base's top_k the k stored tokens are all there is: the losses must be the same."""
    documents, curves = _documents(), []
    top = _write(_plan(tmp_path / "t", documents), documents, base)
    for teacher in (base, None):
        packed = _batches(documents)
        batches = packed if teacher is not None else CachedBatches(packed, top)
        draft = build("llama", seed=2, num_hidden_layers=1)
        objective = DraftObjective(draft, teacher, DraftConfig(loss=loss), LossConfig(top_k=K))
        optimizer = torch.optim.SGD(draft.parameters(), lr=0.1)
        losses = []
        for _ in range(2 * packed.rows_per_epoch // ROWS):
            value, _ = objective(next(batches))
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.item())
        curves.append(losses)
    assert curves[0][-1] < 0.95 * curves[0][0], "nothing was learned: no test"
    assert max(abs(a - b) for a, b in zip(*curves, strict=True)) < 1e-4


def test_an_interrupted_run_goes_on_where_it_was(
    base: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base over all data is the expensive part; finished shards must be kept, and right."""
    documents, calls = _documents(), 0
    whole = _plan(tmp_path / "whole", documents)
    _write(whole, documents, base)
    run = features_module.packed_hidden

    def dies(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return run(*args)

    monkeypatch.setattr(features_module, "packed_hidden", dies)
    plan = _plan(tmp_path / "t", documents)
    with pytest.raises(KeyboardInterrupt):
        _write(plan, documents, base)
    left = plan.missing()
    assert 0 < len(left) < len(plan.shards)
    assert "still to be written" in still_missing(plan)
    with pytest.raises(ConfigError, match=f"{plan.shards[left[0]].file} is missing"):
        TeacherCache(plan)
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(features_module, "packed_hidden", run)
    again = _plan(tmp_path / "t", documents, shard_bytes=99)  # the layout there is the one used
    _write(again, documents, base, progress=lambda _, done, total: seen.append((done, total)))
    missing = sum(plan.shards[number].tokens for number in left)
    assert seen[-1] == (missing, missing)
    for shard in whole.shards:
        one, other = (tmp_path / name / shard.file for name in ("whole", "t"))
        expected, found = load_file(one), load_file(other)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert still_missing(again) == "complete"
    monkeypatch.setattr(features_module, "packed_hidden", None)  # nothing is left to be run
    _write(again, documents, base)


def test_another_base_or_data_is_refused(base: PreTrainedModel, tmp_path: Path) -> None:
    """A teacher of other weights or other texts fits in shape, and teaches something else."""
    documents = _documents()
    _write(_plan(tmp_path / "t", documents), documents, base)
    for changed, message in (
        ({"base": "cd" * 32}, "another base model .abababababab there, cdcdcdcdcdcd here"),
        ({"computed": "bfloat16"}, "another computation .float32.* there, bfloat16 here"),
        ({"top_k": 6}, "another stored_top_k .5 there, 6 here"),
        ({"vocab_size": 60}, "another vocabulary .64 there, 60 here"),
    ):
        with pytest.raises(ConfigError, match=f"draft.stored=.* was made with {message}"):
            _plan(tmp_path / "t", documents, **changed)
    with pytest.raises(ConfigError, match="made with another documents"):
        _plan(tmp_path / "t", documents[1:])


def test_damage_is_named(base: PreTrainedModel, tmp_path: Path) -> None:
    """A shard that lost its end, or a number, would be read as if nothing were wrong."""
    documents = _documents()
    plan = _plan(tmp_path / "t", documents)
    _write(plan, documents, base)
    first, second = (plan.folder / shard.file for shard in plan.shards[:2])
    contents = first.read_bytes()
    first.write_bytes(contents[:-1])
    with pytest.raises(ConfigError, match=f"{first.name} is damaged"):
        TeacherCache(plan)
    first.write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]))
    second.unlink()
    with pytest.raises(ConfigError, match=f"{first.name} is damaged: its numbers"):
        _write(plan, documents, base)
    first.write_bytes(contents)
    _write(plan, documents, base)
    other = _plan(tmp_path / "other", documents, base="cd" * 32)
    _write(other, documents, base)
    shutil.copy(other.folder / first.name, first)
    with pytest.raises(ConfigError, match=f"{first.name} is damaged: it is of another cache"):
        TeacherCache(plan)
    for text in ("{", "{}", json.dumps({"made_of": {}, "shards": [{"file": "x"}]})):
        (plan.folder / "index.json").write_text(text)
        with pytest.raises(ConfigError, match="is no stored teacher index"):
            _plan(plan.folder, documents)


def test_what_cannot_work_is_said_first(
    base: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours into the base's passes is late for a full disk or numbers that are none."""
    documents = _documents()
    for k in (0, VOCAB):
        with pytest.raises(ConfigError, match=f"stored_top_k must be in 1..63, got {k}"):
            _plan(tmp_path / "t", documents, top_k=k)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="draft.stored=.*file is a file"):
        _plan(tmp_path / "file", documents)
    broken = build("llama", seed=3)
    with torch.no_grad():
        broken.lm_head.weight[7] = torch.inf
    output = output_layer(base)
    object.__setattr__(output, "module", broken.lm_head)
    plan = _plan(tmp_path / "t", documents)
    with pytest.raises(RunError, match=r"logits of record d\d+ are not finite"):
        write_cache(plan, documents, base, (ROWS, SEQ_LEN), output=output)
    assert len(plan.missing()) == len(plan.shards)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match="needs .*, that disk has 1.0 kB free"):
        _write(plan, documents, base)
