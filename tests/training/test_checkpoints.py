"""Checkpoint folders: what is damaged is named, what is whole is found, what is needed is kept."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from specheads.config import ConfigError, ModelConfig
from specheads.config.main import tidy_arguments
from specheads.data.pack import GrowingBatches
from specheads.models.manifest import MANIFEST, write_manifest
from specheads.training.checkpoints import (
    Progress,
    checkpoint_to_resume,
    checkpoints_of,
    load_progress,
    new_checkpoint,
    prune,
    ready_to_resume,
    restore_rank,
    save_rank,
    step_of,
    verify,
)
from specheads.training.engine import param_groups
from specheads.training.loop import open_engine
from specheads.training.teachers import OnPolicyBatches
from tests.toys import ToyBatches, ToyObjective, toy_config

ZERO = {"zero_optimization": {"stage": 2}}
FILES = (
    "model.safetensors", "optimizer.json", "optimizer.safetensors", "random-0.safetensors",
    "rank-0.json", "state.json",
)  # fmt: skip


def trained(run_dir: Path, steps: int) -> tuple[ToyObjective, list[dict[str, object]]]:
    """Train a toy for some steps, saving each in ``run_dir``; return it with its groups."""
    cfg = toy_config(run_dir)
    objective = ToyObjective()
    groups = param_groups(cfg.optim, heads=(objective, 1e-2))
    engine, batches = open_engine(objective, groups, cfg), ToyBatches()
    for step in range(1, steps + 1):
        loss, _ = engine.forward({**next(batches), "num_valid": torch.full((3,), 9.0)})
        engine.backward(loss, last=True)
        engine.step(1.0)
        with new_checkpoint(run_dir, step) as folder:
            engine.save(folder)
            save_rank(folder, cfg, Progress(step=step, stage="train"), batches.state_dict())
    return objective, groups


def empty(run_dir: Path, step: int, **changes: object) -> Path:
    """Write a checkpoint without weights."""
    with new_checkpoint(run_dir, step) as folder:
        cfg = toy_config(run_dir, **changes)
        save_rank(folder, cfg, Progress(step=step, stage="train"), {"at": step})
    return checkpoints_of(run_dir)[-1]


def rewritten(path: Path, change: Callable[[Path], None]) -> None:
    """Change a checkpoint as somebody would who fixes the manifest up."""
    change(path)
    (path / MANIFEST).unlink()
    write_manifest(path)


def test_the_manifest_lists_every_file(tmp_path: Path) -> None:
    """A file that the manifest forgets is one whose damage nobody sees."""
    trained(tmp_path, 1)
    (path,) = checkpoints_of(tmp_path)
    listed = json.loads((path / MANIFEST).read_text())["files"]
    assert tuple(listed) == FILES
    assert {p.name for p in path.iterdir()} == {*FILES, MANIFEST}
    verify(path)
    (path / "notes.md").write_text("may be edited")
    verify(path)


def test_every_damage_is_named_with_both_numbers(tmp_path: Path) -> None:
    """A damaged file that loads trains on from garbage; one that does not ends in a traceback."""
    trained(tmp_path / "run", 2)
    earlier, newest = checkpoints_of(tmp_path / "run")
    cfg = toy_config(tmp_path / "run", resume=str(newest))
    draw = random.Random(0)
    for name in FILES:
        file, whole = newest / name, (newest / name).read_bytes()
        for _ in range(4):
            flipped = bytearray(whole)
            flipped[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
            file.write_bytes(flipped)
            with pytest.raises(ConfigError, match=rf"{name} was changed .* sha256 \w+, .* \w+"):
                ready_to_resume(cfg, print)
        file.write_bytes(whole[: len(whole) // 2])
        numbers = rf"{name} has {len(whole) // 2} bytes, manifest.json says {len(whole)}"
        with pytest.raises(ConfigError, match=numbers) as damage:
            ready_to_resume(cfg, print)
        assert str(damage.value).endswith(f"the one before it: resume={earlier}")
        file.unlink()
        with pytest.raises(ConfigError, match=rf"{newest} lacks {name}"):
            ready_to_resume(cfg, print)
        file.write_bytes(whole)
    ready_to_resume(cfg, print)


@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
def test_a_damaged_manifest_is_one_line(tmp_path: Path, where: float, bit: int, cut: bool) -> None:
    """The file that all others are held to has nothing to be held to itself."""
    path = tmp_path / "checkpoints" / "step-0000001"
    if not path.exists():
        empty(tmp_path, 1)
    whole = (path / MANIFEST).read_bytes()
    place = int(where * len(whole))
    damaged = bytearray(whole[:place] if cut else whole)
    if not cut:
        damaged[place] ^= 1 << bit
    (path / MANIFEST).write_bytes(damaged)
    cfg = toy_config(tmp_path, resume=str(path))
    try:
        ready_to_resume(cfg, print)
    except ConfigError as error:
        assert "\n" not in str(error)
    else:  # a byte between the words, and nothing else
        assert json.loads(damaged) == json.loads(whole)
    finally:
        (path / MANIFEST).write_bytes(whole)


@pytest.mark.parametrize("name", ["../../other/model.safetensors", "/etc/passwd", ""])
def test_a_manifest_names_no_file_elsewhere(tmp_path: Path, name: str) -> None:
    """A manifest from elsewhere that lists a file of the machine would have it read."""
    path = empty(tmp_path, 1)
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"][name] = {"size": 1, "sha256": "0"}
    (path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="is no file of that folder"):
        verify(path)


def test_auto_passes_over_a_torn_copy_and_says_so(tmp_path: Path) -> None:
    """A folder copied in part must neither be loaded nor stop the run, nor throw it away."""
    lines: list[str] = []
    cfg = toy_config(tmp_path, resume="auto")
    for step in (1, 2, 3):
        empty(tmp_path, step)
    first, second, third = checkpoints_of(tmp_path)
    (third / MANIFEST).unlink()
    (second / "rank-0.json").write_text("{")
    assert checkpoint_to_resume(cfg, lines.append) == first
    assert len(lines) == 2
    assert lines[0].startswith("passing over") and str(third / MANIFEST) in lines[0]
    assert "rank-0.json has 1 bytes, manifest.json says" in lines[1]
    (first / "state.json").unlink()
    with pytest.raises(ConfigError, match="none of the 3 checkpoints .* is whole"):
        checkpoint_to_resume(cfg)


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_damage_is_passed_over_by_auto(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A requeued run would end at the same flipped bit or cut file every time, unattended.

    Ranks that each look at a part would go on from other steps, so that each must find it alone.
    """
    trained(tmp_path, 3)
    first, second, third = checkpoints_of(tmp_path)
    cfg = toy_config(tmp_path, resume="auto")
    monkeypatch.setattr("specheads.training.checkpoints.check_settings", lambda *_: None)
    for name in FILES:
        whole = (third / name).read_bytes()
        for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[: len(whole) // 2]):
            (third / name).write_bytes(damaged)
            for rank in range(ranks):
                monkeypatch.setenv("WORLD_SIZE", str(ranks))
                monkeypatch.setenv("RANK", str(rank))
                lines: list[str] = []
                assert checkpoint_to_resume(cfg, lines.append) == second, (name, rank)
                (line,) = lines
                assert line.startswith("passing over") and str(third / name) in line
        (third / name).write_bytes(whole)
    content = (second / "model.safetensors").read_bytes()
    (second / "model.safetensors").write_bytes(content[::-1])
    (third / "rank-0.json").unlink()
    assert checkpoint_to_resume(cfg) == first
    # what is advised to take instead of a named one is whole, too
    with pytest.raises(ConfigError, match=rf"lacks rank-0.json.*; the one before .*={first}$"):
        verify(third)
    (first / "state.json").write_bytes((first / "state.json").read_bytes()[::-1])
    with pytest.raises(ConfigError, match="none of the 3 checkpoints .* is whole: .*rank-0.json"):
        checkpoint_to_resume(cfg)


@settings(max_examples=60)
@given(
    steps=st.sets(st.integers(1, 40), min_size=1, max_size=7),
    keep=st.integers(1, 4),
    newest=st.integers(0, 6),
)
def test_pruning_keeps_the_newest(
    tmp_path_factory: pytest.TempPathFactory, steps: set[int], keep: int, newest: int
) -> None:
    """A pruned new checkpoint is gone for good; a kept future would be resumed by auto."""
    run_dir = tmp_path_factory.mktemp("run")
    newest = sorted(steps)[newest % len(steps)]
    for step in steps:
        (run_dir / "checkpoints" / f"step-{step:07d}").mkdir(parents=True)
    (run_dir / "checkpoints" / ".step-0000099.tmp").mkdir()
    prune(run_dir, keep, newest=newest)
    expected = set(sorted(step for step in steps if step <= newest)[-keep:])
    assert {step_of(path) for path in (run_dir / "checkpoints").iterdir()} == expected


def test_an_earlier_one_taken_by_path_is_gone_on_from(tmp_path: Path) -> None:
    """The given-up later ones would push the new ones out, and auto would go on from them."""
    for step in (2, 4, 6):
        empty(tmp_path, step)
    empty(tmp_path, 3)  # after resume=.../step-0000002
    prune(tmp_path, 2, newest=3)
    assert [step_of(path) for path in checkpoints_of(tmp_path)] == [2, 3]


def with_pickle(run_dir: Path) -> Path:
    """Write a checkpoint that holds DeepSpeed's state, as far as files go."""
    with new_checkpoint(run_dir, 1) as folder:
        (folder / "deepspeed").mkdir()
        (folder / "deepspeed" / "state.pt").write_bytes(b"a pickle")
        cfg = toy_config(run_dir, deepspeed=ZERO)
        save_rank(folder, cfg, Progress(step=1, stage="train"), {"at": 1})
    return checkpoints_of(run_dir)[-1]


def test_pickle_is_taken_from_this_run_only(tmp_path: Path) -> None:
    """Resuming a checkpoint that somebody sent would run what they put into it."""
    assert tidy_arguments(["resume.trust=true"]) == ["resume_trust=true"]
    own, other = with_pickle(tmp_path / "own"), with_pickle(tmp_path / "other")

    def resume(path: str, **changes: object) -> Path | None:
        return checkpoint_to_resume(
            toy_config(tmp_path / "own", deepspeed=ZERO, resume=path, **changes)
        )

    assert resume("auto") == resume(str(own)) == own
    with pytest.raises(ConfigError, match=r"which can run any code .* resume.trust=true"):
        resume(str(other))
    assert resume(str(other), resume_trust=True) == other
    # a link from inside leads out all the same
    shutil.rmtree(own)
    own.symlink_to(other)
    with pytest.raises(ConfigError, match="resume.trust=true"):
        resume("auto")


def test_nothing_is_loaded_that_the_manifest_leaves_out(tmp_path: Path) -> None:
    """A manifest without a file would let it be anything."""
    path = empty(tmp_path, 1)
    (path / MANIFEST).write_text('{"files": {}}')
    with pytest.raises(ConfigError, match=r"which its manifest.json does not list"):
        checkpoint_to_resume(toy_config(tmp_path, resume="auto"))


def test_no_pickle_beside_the_listed_ones(tmp_path: Path) -> None:
    """DeepSpeed loads by patterns of names: a file more would be loaded unverified."""
    path = with_pickle(tmp_path)
    verify(path)
    (path / "deepspeed" / "more.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"holds deepspeed/more.pt, which .* does not list"):
        verify(path)


def test_other_ranks_keep_the_global_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as many ranks with the same accumulation would train on batches of half the size."""
    lines: list[str] = []

    def resume(ranks: int, **changes: object) -> int:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        cfg = toy_config(tmp_path, resume="auto", deepspeed=ZERO, **changes)
        return ready_to_resume(cfg, lines.append).optim.accumulation

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with new_checkpoint(tmp_path, 1) as folder:  # rank 1 writes its part, rank 0 the rest
        folder.mkdir(parents=True)
        cfg = toy_config(tmp_path, deepspeed=ZERO, optim__accumulation=3)
        save_rank(folder, cfg, Progress(), {"at": 1})
        monkeypatch.setenv("RANK", "0")
        save_rank(folder, cfg, Progress(), {"at": 1})
        monkeypatch.setenv("WORLD_SIZE", "1")
    assert resume(2, optim__accumulation=3) == 3
    assert not lines
    assert resume(1, optim__accumulation=3) == 6
    assert "optim.accumulation=6 keeps the global batch" in lines[-1]
    assert resume(1, optim__accumulation=6) == 6
    assert resume(3, optim__accumulation=3) == 2
    with pytest.raises(ConfigError, match=r"this run has 4: the 12 rows .* 6 micro-batches"):
        resume(4, optim__accumulation=3)
    with pytest.raises(ConfigError, match=r"optim.accumulation was 3, is 5"):
        resume(1, optim__accumulation=5)
    monkeypatch.setenv("WORLD_SIZE", "3")
    path = checkpoints_of(tmp_path)[0]
    drawn = set()
    for rank in range(3):  # the stored generators are those of two ranks
        monkeypatch.setenv("RANK", str(rank))
        batches = Mock()
        restore_rank(path, batches)
        batches.load_state_dict.assert_called_once_with({"at": 1})
        drawn.add(float(torch.rand(())))
        restore_rank(path, batches)
        assert float(torch.rand(())) in drawn
    assert len(drawn) == 3


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"deepspeed": {}}, "deepspeed=none"),
        ({"autocast": "float16"}, "float16"),
        ({"model": ModelConfig(dtype="bfloat16")}, "model.dtype=bfloat16 under ZeRO-2"),
        (
            {"deepspeed": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}},
            "an optimizer or model that is offloaded",
        ),
    ],
)
def test_what_cannot_change_its_ranks_says_so(
    tmp_path: Path, changes: dict[str, object], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion that nothing holds to the truth would go on with other moments, silently."""
    settings = {"deepspeed": ZERO} | changes
    empty(tmp_path, 1, optim__accumulation=2, **settings)
    monkeypatch.setenv("WORLD_SIZE", "2")
    cfg = toy_config(tmp_path, resume="auto", optim__accumulation=1, **settings)
    with pytest.raises(ConfigError, match=f"this run has 2: {why} goes on with as many as before"):
        ready_to_resume(cfg, print)


@pytest.mark.parametrize(
    ("file", "name", "tensor", "line"),
    [
        ("model", "lm_head.bias", torch.zeros(1), r"lm_head.bias has shape \[1\], expected \[11\]"),
        ("model", "lm_head.bias", torch.zeros(11).double(), "lm_head.bias holds F64, expected F32"),
        ("model", "more", torch.zeros(1), r"tensors where \d+ are expected; unexpected: more"),
        ("optimizer", "lm_head.bias/exp_avg", torch.zeros(3), r"has shape \[3\], expected \[11\]"),
        (
            "optimizer",
            "lm_head.bias/step",
            torch.zeros(3),
            r"\[3\], expected \[\] or \[1\]",
        ),
        ("optimizer", "more/exp_avg", torch.zeros(3), "belongs to nothing here"),
    ],
)
def test_shapes_are_checked_before_anything_changes(
    tmp_path: Path, file: str, name: str, tensor: torch.Tensor, line: str
) -> None:
    """copy_ spreads one number over a whole matrix without a word."""
    objective, groups = trained(tmp_path, 1)
    (path,) = checkpoints_of(tmp_path)
    stored = path / f"{file}.safetensors"
    rewritten(path, lambda _: save_file({**load_file(stored), name: tensor}, stored))
    verify(path)
    engine = open_engine(objective, groups, toy_config(tmp_path))
    before = {n: p.detach().clone() for n, p in objective.named_parameters()}
    with pytest.raises(ConfigError, match=line):
        engine.load(path)
    for n, p in objective.named_parameters():
        assert torch.equal(before[n], p)


@pytest.mark.parametrize(
    ("file", "changes", "line"),
    [
        ("state.json", {"step": "1"}, "step must be int, found '1'"),
        ("state.json", {"step": -1}, "counts below zero"),
        ("state.json", {"window": [1]}, r"window must be dict, found \[1\]"),
        ("state.json", {"stopped": 1}, "stopped must be bool"),
        ("state.json", {"world_size": None}, "world_size must be int, found None"),
        ("state.json", {"settings": {}}, "settings lack 'optim.accumulation'"),
        ("rank-0.json", {"data": None}, "data must be an object"),
        ("rank-0.json", {"data": {}}, "holds no place in this data: there is no 'position'"),
        ("rank-0.json", {"random": {}}, "no state of the random generators"),
        ("rank-0.json", {"random": {"python": [3, [0], 0], "numpy": []}}, "random generators"),
    ],
)
def test_values_of_a_wrong_kind_are_one_line(
    tmp_path: Path, file: str, changes: dict[str, object], line: str
) -> None:
    """A checkpoint put together by hand fails where it is read, not in the middle of a step."""
    path = empty(tmp_path, 1)

    def change(path: Path) -> None:
        content = json.loads((path / file).read_text())
        (path / file).write_text(json.dumps(content | changes))

    rewritten(path, change)
    with pytest.raises(ConfigError, match=line):
        ready_to_resume(toy_config(tmp_path, resume=str(path)), print)
        load_progress(path)
        restore_rank(path, ToyBatches())


def test_only_what_is_needed_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading every checkpoint of a folder before the newest is taken would take hours."""
    for step in (1, 2):
        empty(tmp_path, step)
    read: list[Path] = []
    monkeypatch.setattr(
        "specheads.training.checkpoints._known_sha256",
        lambda file: read.append(file) or hashlib.sha256(file.read_bytes()).hexdigest(),
    )
    newest = checkpoints_of(tmp_path)[-1]
    assert checkpoint_to_resume(toy_config(tmp_path, resume="auto")) == newest
    assert {file.parent for file in read} == {newest} and len(read) > 1


class Counted:
    """Batches whose place is given."""

    def __next__(self) -> dict[str, object]:
        return {}

    def state_dict(self) -> dict[str, object]:
        """Return no place."""
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Have none."""


@pytest.mark.parametrize("kind", ["growing", "on_policy"])
def test_places_count_all_ranks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted per rank, half as many ranks would change to longer rows twice as late."""

    def make() -> GrowingBatches | OnPolicyBatches:
        if kind == "growing":
            return GrowingBatches([(6, Counted()), (9, Counted())])  # type: ignore[list-item]
        options = {"share": 0.0, "max_new_tokens": 1, "seed": 0, "vocab_size": 1}
        return OnPolicyBatches(Counted(), lambda *_: [], **options)  # type: ignore[arg-type]

    monkeypatch.setenv("WORLD_SIZE", "2")
    before = make()
    for _ in range(4):
        next(before)
    place = json.loads(json.dumps(before.state_dict()))
    for ranks, taken in ((1, 8), (2, 4), (4, 2)):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        after = make()
        after.load_state_dict(place)
        assert after.taken == taken
        assert after.state_dict() == place
