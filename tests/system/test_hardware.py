"""What the machine lends: threads and devices, and what is said where it does not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specheads import config as settings
from specheads.config import ConfigError
from specheads.models.base import load_base_model
from specheads.system import hardware

V2 = "31 23 0:28 {root} {mount} rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "32 31 0:29 {root} {mount} rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
OTHERS = "30 23 0:27 / /proc rw - proc proc rw\n33 31 0:30 / /pids rw - cgroup cgroup rw,pids\n"


class Machine:
    """A fake of what Linux says: processors, cgroups of this process, and their files."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, patch
        (folder / "self").mkdir()
        patch.setattr(hardware, "PROCESS", folder / "self", raising=False)
        patch.setattr(os, "sched_getaffinity", lambda number: set(range(8)), raising=False)
        patch.delenv("OMP_NUM_THREADS", raising=False)
        self.taken: list[int] = []
        patch.setattr(torch, "set_num_threads", self.taken.append)
        patch.setattr(torch, "get_num_threads", lambda: self.taken[-1] if self.taken else 4)

    def cgroup(self, lines: str, mounts: str, limits: dict[str, str], *, root: str = "/") -> None:
        """Say which cgroups there are, and write the files of their limits."""
        mount = self.folder / "cgroup"
        for name, text in limits.items():
            file = mount / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        (self.folder / "self" / "cgroup").write_text(lines)
        filled = mounts.format(root=root, mount=mount)
        (self.folder / "self" / "mountinfo").write_text(OTHERS + filled)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a machine of 8 processors without limits."""
    return Machine(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("lines", "mounts", "root", "limits", "expected"),
    [
        ("0::/\n", V2, "/", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", V2, "/", {"cpu.max": "max 100000\n"}, 8),
        ("0::/\n", V2, "/", {"cpu.max": "250000 100000\n"}, 2),
        ("0::/\n", V2, "/", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", V2, "/", {"cpu.max": "1600000 100000\n"}, 8),
        ("0::/\n", V2, "/", {"cpu.max": "what\n"}, 8),
        ("0::/\n", V2, "/", {"other": ""}, 8),
        # the tightest of a cgroup and of those above it
        ("0::/a/b\n", V2, "/", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3),
        ("0::/a/b\n", V2, "/", {"a/cpu.max": "500000 100000", "a/b/cpu.max": "20000 10000"}, 2),
        ("0::/a\n", V2, "/", {"cpu.max": "300000 100000", "a/b/cpu.max": "100000 100000"}, 3),
        # a container that sees the host's names, and only its own part of the tree
        ("0::/docker/c0\n", V2, "/docker/c0", {"cpu.max": "300000 100000"}, 3),
        ("0::/docker/c0/x\n", V2, "/docker/c0", {"x/cpu.max": "300000 100000"}, 3),
        ("0::/docker/c0\n", V2, "/", {"cpu.max": "300000 100000"}, 3),
        ("0::/../c1\n", V2, "/", {"cpu.max": "300000 100000", "../c1/cpu.max": "1 1"}, 3),
        ("4:cpu,cpuacct:/\n2:pids:/x\n", V1, "/",
         {"cpu.cfs_quota_us": "350000\n", "cpu.cfs_period_us": "100000\n"}, 3),
        ("4:cpu,cpuacct:/\n", V1, "/",
         {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, 8),
        ("4:cpu,cpuacct:/a/b\n0::/\n", V1, "/",
         {"a/cpu.cfs_quota_us": "400000", "a/cpu.cfs_period_us": "100000",
          "a/b/cpu.cfs_quota_us": "-1", "a/b/cpu.cfs_period_us": "100000"}, 4),
        # both: the controller is in version 1, and version 2 has no file of it
        ("4:cpu,cpuacct:/\n0::/\n", V1 + "41 31 0:38 / /none rw - cgroup2 cgroup2 rw\n", "/",
         {"cpu.cfs_quota_us": "200000\n", "cpu.cfs_period_us": "100000\n"}, 2),
    ],
)  # fmt: skip
def test_a_containers_quota_bounds_the_threads(
    machine: Machine, capsys: pytest.CaptureFixture[str], lines: str, mounts: str, root: str,
    limits: dict[str, str], expected: int,
) -> None:  # fmt: skip
    """Threads beyond the quota are stopped while the others wait for them: 20 times slower."""
    machine.cgroup(lines, mounts, limits, root=root)
    assert hardware.pin_threads(0) == expected
    assert machine.taken == [expected]
    err = capsys.readouterr().err
    assert err.startswith(f"specheads: {expected} thread") and err.count("\n") == 1
    assert ("CPU quota" in err) == (expected < 8 or limits.get("cpu.max", "").startswith("16"))


@pytest.mark.parametrize(
    ("variable", "quota", "threads", "expected", "said"),
    [
        ("3", None, 0, 3, "3 threads, the least of: OMP_NUM_THREADS 3, processors 8"),
        ("1", "200000", 0, 1, "1 thread, the least of: OMP_NUM_THREADS 1, CPU quota 2, proc"),
        ("16", "250000", 0, 2, "2 threads, the least of: OMP_NUM_THREADS 16, CPU quota 2.5, proc"),
        ("16", None, 0, 8, "8 threads, the least of: OMP_NUM_THREADS 16, processors 8"),
        ("4,2", None, 0, 4, "4 threads, the least of: OMP_NUM_THREADS 4, processors 8"),
        ("many", None, 0, 8, "8 threads, the least of: processors 8"),
        ("0", None, 0, 8, "8 threads, the least of: processors 8"),
        # what is asked for is taken, and what speaks against it said
        ("3", "200000", 6, 6, "6 threads, as threads=6 says; there are: OMP_NUM_THREADS 3, CPU"),
    ],
)
def test_threads_heed_the_variable_and_say_why(
    machine: Machine, capsys: pytest.CaptureFixture[str], variable: str, quota: str | None,
    threads: int, expected: int, said: str,
) -> None:  # fmt: skip
    """A bench that takes more threads than its user lent it measures their quarrel."""
    machine.patch.setenv("OMP_NUM_THREADS", variable)
    machine.cgroup("0::/\n", V2, {"cpu.max": f"{quota or 'max'} 100000"})
    assert hardware.pin_threads(threads) == expected
    assert machine.taken == [expected]
    assert f"specheads: {said}" in capsys.readouterr().err


def test_torchs_own_number_is_only_lowered(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands without threads= stood still in a container as well; elsewhere nothing changes."""
    machine.cgroup("0::/\n", V2, {"cpu.max": "max 100000"})
    assert hardware.pin_threads(None) == 4 and not machine.taken
    assert not capsys.readouterr().err
    machine.cgroup("0::/\n", V2, {"cpu.max": "300000 100000"})
    assert hardware.pin_threads(None) == 3 and machine.taken == [3]
    assert "specheads: 3 threads" in capsys.readouterr().err


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Return a function that puts GPUs into this machine, and returns which become current."""

    def there_are(number: int) -> list[int]:
        current: list[int] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
        for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        return current

    return there_are


@pytest.mark.parametrize(
    ("asked", "number", "expected"),
    [
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda:0"),
        ("cpu", 0, "cpu"),
        ("cpu", 2, "cpu"),
        ("cuda", 2, "cuda:0"),
        ("cuda:0", 1, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
        ("cuda", 0, "device=cuda, but torch finds no GPU here .*doctor.*: device=cpu or auto"),
        ("cuda:1", 0, "device=cuda:1, but torch finds no GPU here"),
        ("cuda:1", 1, "device=cuda:1, but this process sees cuda:0: choose"),
        ("cuda:2", 2, "device=cuda:2, but this process sees cuda:0 to cuda:1: choose"),
        ("mps", 2, "device=mps, but torch finds no Apple GPU here: device=cpu or auto"),
        ("gpu", 1, "device must be one of auto, cpu, cuda, cuda:<number>, mps, got 'gpu'"),
        ("cuda:", 1, "device must be one of"),
        ("", 1, "device must be one of"),
    ],
)
def test_one_name_for_a_device(
    gpus: Callable[[int], list[int]], asked: str, number: int, expected: str
) -> None:
    """A GPU that is silently not used, or fifty lines of CUDA about one that is not there."""
    current = gpus(number)
    if " " in expected:
        with pytest.raises(ConfigError, match=expected) as refused:
            hardware.pick_device(asked)
        assert "\n" not in str(refused.value) and not current
        return
    found = hardware.pick_device(asked)
    assert str(found) == expected
    # kernels and memory figures that name no device are those of the current one
    assert current == ([found.index] if found.type == "cuda" else [])


def test_every_rank_has_its_own_gpu(
    gpus: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's own error is about an invalid device ordinal, after minutes of loading."""
    current = gpus(2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    for asked in ("auto", "cuda"):
        assert hardware.pick_device(asked) == torch.device("cuda", 1)
    assert hardware.pick_device("cpu") == torch.device("cpu") and current == [1, 1]
    with pytest.raises(ConfigError, match="device=cuda:1 is one GPU for 4 processes"):
        hardware.pick_device("cuda:1")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="LOCAL_RANK is 2, but this process sees 2 GPUs"):
        hardware.pick_device("auto")
    assert hardware.pick_device("cpu") == torch.device("cpu"), "ranks on a CPU need no GPU each"


def test_loading_takes_the_gpu_that_is_there(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of billions on the CPU, in a program whose author meant the GPU beside it."""
    asked: list[str] = []

    def stand_in(name: str = "auto") -> torch.device:
        asked.append(name)
        return torch.device("meta")

    monkeypatch.setattr(hardware, "pick_device", stand_in, raising=False)
    assert load_base_model(str(tiny_model_dir)).device.type == "meta"
    assert load_base_model(str(tiny_model_dir), device="cuda:1").device.type == "meta"
    assert load_base_model(str(tiny_model_dir), device=torch.device("cpu")).device.type == "cpu"
    assert asked == ["auto", "cuda:1"]
    with pytest.raises(ConfigError, match="device must be one of auto"):
        monkeypatch.undo()
        load_base_model(str(tiny_model_dir), device="gpu")


LOADING = ("Generate", "Chat", "Bench", "TreeSearch", "Compare", "Quality", "SpecBench",
           "Regenerate", "Export", "Doctor", "Train")  # fmt: skip


@pytest.mark.parametrize("command", LOADING)
def test_every_command_has_the_setting(command: str) -> None:
    """A command that calls it otherwise sends its user round in a circle."""
    schema = getattr(settings, f"{command}Config")
    assert schema().device == "auto"
    assert schema(device="cuda:3").device == "cuda:3", "what is there is asked when it is used"
    for wrong in ("gpu", "cuda:x", "0", ""):
        with pytest.raises(ConfigError, match=f"device must be one of .*, got '{wrong}'"):
            schema(device=wrong)
    if "device_map" in schema.__dataclass_fields__:
        with pytest.raises(ConfigError, match="device_map must be .*device= .*, got 'cuda'"):
            schema(device_map="cuda")
        with pytest.raises(ConfigError, match="device must be auto with device_map=auto"):
            schema(device="cpu", device_map="auto")
        assert schema(device_map="balanced").device == "auto"


def test_training_on_mps_is_refused() -> None:
    """Its loss sums in float64: the first step would end in torch's own error."""
    with pytest.raises(ConfigError, match="device must be auto, cpu or cuda.*got 'mps'"):
        settings.TrainConfig(device="mps")


@pytest.mark.parametrize(
    ("native", "seconds", "expected"),
    [
        (True, 1.7, torch.float32),  # AVX-512 BF16 without AMX
        (True, 1.1, torch.bfloat16),  # as fast: the next start might find it the other way
        (True, 0.5, torch.bfloat16),
        (False, 0.5, torch.float32),  # emulated: not even clocked
    ],
)
def test_many_rows_are_multiplied_in_the_faster_dtype(
    native: bool, seconds: float, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor's flag says that it multiplies bfloat16, and not that this is any faster."""
    clock, real = [0.0], torch.nn.functional.linear

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        clock[0] += seconds if x.dtype == torch.bfloat16 else 1.0
        return real(x[:1], weight)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    monkeypatch.setattr(hardware.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(hardware, "has_native_bfloat16", lambda: native)
    hardware.faster_dtype.cache_clear()
    try:
        assert hardware.faster_dtype(torch.device("cpu")) == expected
        assert bool(clock[0]) == native
    finally:
        hardware.faster_dtype.cache_clear()
