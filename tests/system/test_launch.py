"""What launchers say about the ranks, and the templates that start them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import socket
import subprocess
import sysconfig
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.run import parse_args

from specheads.config import ConfigError, TrainConfig
from specheads.system.launch import check_launcher, first_host, read_launcher, take_local_rank
from specheads.training.deepspeed_engine import check_build_lock, need_compiler
from tests.composed import composed
from tests.processes import Process

TEMPLATES = Path(__file__).parents[2] / "scripts" / "launch"
TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "12345",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_JOB_NODELIST": "gpu[07-09,12],big1",
}


def test_srun_is_read() -> None:
    """Eight processes that each take themselves for the only one would write one directory."""
    environment = dict(SRUN)
    read_launcher(environment)
    assert {key: environment[key] for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE")} == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
    }
    assert environment["MASTER_ADDR"] == "gpu07"
    others = {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    read_launcher(others)
    assert others["MASTER_PORT"] == environment["MASTER_PORT"]
    later = {**SRUN, "SLURM_STEP_ID": "1"}
    read_launcher(later)
    assert later["MASTER_PORT"] != environment["MASTER_PORT"]
    own = {**SRUN, "CUDA_VISIBLE_DEVICES": "3"}
    read_launcher(own)
    assert own["LOCAL_RANK"] == "0"
    said = {**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    read_launcher(said)
    assert (said["MASTER_ADDR"], said["MASTER_PORT"]) == ("10.0.0.1", "1234")


@pytest.mark.parametrize(
    "environment",
    [
        TORCHRUN | SRUN,  # torchrun inside srun: one srun task per machine
        {k: v for k, v in SRUN.items() if k != "SLURM_STEP_NUM_TASKS"},  # a batch script itself
        SRUN | {"SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
        {},
    ],
    ids=["torchrun", "sbatch", "interactive", "none"],
)
def test_others_are_left_alone(environment: dict[str, str]) -> None:
    """A batch script's variables look like rank 0 of all tasks, which would wait for the others."""
    before = dict(environment)
    read_launcher(environment)
    assert environment == before


def test_an_srun_without_its_variables_is_refused() -> None:
    """A missing rank would be taken for 0, on every process."""
    with pytest.raises(ConfigError, match="without SLURM_LOCALID; use torchrun"):
        read_launcher({k: v for k, v in SRUN.items() if k != "SLURM_LOCALID"})


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set while RANK is 3 and LOCAL_RANK is 1"),
        ({"RANK": "x"}, "RANK is 'x' while"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK is not set while RANK is 3 and WORLD_SIZE is 4"),
        ({"RANK": "4"}, "RANK is 4, but WORLD_SIZE is 4: ranks go from 0 to 3"),
        ({"LOCAL_RANK": "9"}, "LOCAL_RANK is 9, but WORLD_SIZE is 4"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set while WORLD_SIZE is 4"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    ],
)
def test_variables_that_contradict_each_other(change: dict[str, str | None], line: str) -> None:
    """Torch waits half an hour for a rank that nobody started, or fails with a traceback."""
    environment = {k: v for k, v in (TORCHRUN | change).items() if v is not None}
    with pytest.raises(ConfigError) as caught:
        check_launcher(environment)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_torchrun_sets_is_fine() -> None:
    """A check that is too strict stops every run of many processes."""
    check_launcher(TORCHRUN)
    check_launcher({})
    check_launcher({"LOCAL_RANK": "0"})  # some images set it for everybody
    check_launcher({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})


@given(
    prefix=st.from_regex(r"[a-z]{1,4}-?", fullmatch=True),
    numbers=st.lists(st.from_regex(r"[0-9]{1,3}", fullmatch=True), min_size=1, max_size=4),
    more=st.lists(st.from_regex(r"[a-z]{1,3}[0-9]{1,2}(\[[0-9]-[0-9]\])?", fullmatch=True)),
    suffix=st.sampled_from(["", ".cluster", "-ib"]),
)
def test_first_host(prefix: str, numbers: list[str], more: list[str], suffix: str) -> None:
    """Ranks that take another host for the first one never meet."""
    nodes = ",".join([f"{prefix}[{','.join(numbers)}]{suffix}", *more])
    assert first_host(nodes) == f"{prefix}{numbers[0]}{suffix}"
    assert first_host(",".join([f"{prefix}{numbers[0]}", *more])) == f"{prefix}{numbers[0]}"
    assert first_host(f"{prefix}[{numbers[0]}-999]{suffix}") == f"{prefix}{numbers[0]}{suffix}"


def test_the_launchers_local_rank_goes_to_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hydra calls it an unrecognized argument, and the run never starts."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    left = take_local_rank(["--local_rank=3", "+recipe=medusa1", "name=--local_rank"])
    assert left == ["+recipe=medusa1", "name=--local_rank"]
    assert os.environ["LOCAL_RANK"] == "3"
    assert take_local_rank(["--local-rank=1"]) == []
    assert os.environ["LOCAL_RANK"] == "1"


@pytest.mark.parametrize("autocast", ["float16"])
def test_float16_needs_a_loss_scale(autocast: str) -> None:
    """Plain torch scales no loss: small gradients would be zero, and nothing would say so.

    DeepSpeed's stage 0 scales none either, and divides the gradients by the scale all the same.
    """
    with pytest.raises(ConfigError, match="autocast must be bfloat16 or none with deepspeed=none"):
        TrainConfig(run_dir="x", autocast=autocast)
    TrainConfig(run_dir="x", autocast=autocast, deepspeed={"zero_optimization": {"stage": 2}})
    with pytest.raises(ConfigError, match="deepspeed must be zero1, zero2 or zero3 with autocast"):
        TrainConfig(run_dir="x", autocast=autocast, deepspeed={"zero_optimization": {"stage": 0}})


def commands(text: str) -> list[list[str]]:
    """Return the settings of every specheads command in a template, shell variables filled in."""
    joined = re.sub(r"\\\n\s*", " ", text)
    found = []
    for line in joined.splitlines():
        match = re.search(r"-m specheads\.train\s+(.*)|--module specheads\.train\s+(.*)", line)
        if match and not line.lstrip().startswith("#"):
            words = shlex.split((match[1] or match[2]).replace('"$@"', ""))
            found.append([re.sub(r"\$\{?\w+(:-([^}]*))?\}?", r"\2", word) for word in words])
    return found


@pytest.mark.parametrize("path", sorted(TEMPLATES.iterdir()), ids=lambda path: path.name)
def test_templates(path: Path) -> None:
    """A template that no longer composes costs a place in the queue to find out."""
    text = path.read_text()
    if path.suffix == ".yaml":
        import yaml

        documents = [each for each in yaml.safe_load_all(text) if each]
        assert documents
        scripts = [s for document in documents for s in strings(document) if "specheads.train" in s]
    else:
        scripts = [text]
    assert scripts
    for script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
    found = [each for script in scripts for each in commands(script)]
    assert found
    for arguments in found:
        assert "resume=auto" in arguments, "what is requeued must go on, not start again"
        cfg = composed("train", take_local_rank(arguments))
        assert cfg.deepspeed, "several processes train under DeepSpeed only"
        assert cfg.optim.name == "adamw"
        assert cfg.recipe


@pytest.mark.parametrize("path", sorted(TEMPLATES.iterdir()), ids=lambda path: path.name)
def test_templates_name_modules_and_options_that_exist(path: Path) -> None:
    """A module that moved, or an option that torchrun never had, fails on every machine at once."""
    text = re.sub(r"\\\n\s*", " ", path.read_text())
    modules = re.findall(r"(?:-m|--module) ((?:specheads|torch)[\w.]*)", text)
    assert modules
    assert all(importlib.util.find_spec(module) for module in modules)
    for line in re.findall(r"-m specheads\.torchrun (.*)", text):
        words = [re.sub(r"\$\{?\w+(:-\w*)?\}?", "1", word) for word in shlex.split(line)]
        parsed = parse_args(words)
        assert parsed.module and parsed.training_script == "specheads.train"
        assert "resume=auto" in parsed.training_script_args


def test_sbatch_lines_are_well_formed() -> None:
    """Slurm takes a line that it cannot read, or that stands too late, for a remark."""
    lines = (TEMPLATES / "slurm.sbatch").read_text().splitlines()
    said = [line for line in lines if "SBATCH" in line]
    options = [re.fullmatch(r"#SBATCH --([a-z][a-z-]+)(?:=(\S+))?", line) for line in said]
    assert said and all(options)
    named = {option[1]: option[2] for option in options if option}
    assert len(named) == len(said)
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert max(lines.index(line) for line in said) < first
    assert re.fullmatch(r"(B:)?[A-Z]+\d?@\d+", named["signal"])
    assert re.fullmatch(r"(\d+-)?\d\d:\d\d:\d\d", named["time"])
    numbers = ("nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task")
    assert all(named[key].isdigit() for key in numbers)
    assert named["ntasks-per-node"] == named["gpus-per-node"], "a rank for each GPU"


def strings(value: object) -> list[str]:
    """Return every string inside a YAML document."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [each for inner in value.values() for each in strings(inner)]
    if isinstance(value, list):
        return [each for inner in value for each in strings(inner)]
    return []


MEET = """
import os, torch
from specheads.system import dist
from specheads.system.launch import read_launcher
read_launcher()
torch.distributed.init_process_group("gloo")
print(dist.rank(), int(dist.sum_over_ranks(torch.tensor([dist.rank() + 1.0]))[0]), flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.mark.distributed
def test_two_tasks_of_srun_meet() -> None:
    """Variables that look right and lead nowhere end in a timeout of half an hour."""
    step = {**SRUN, "SLURM_JOB_NODELIST": "localhost"}
    for number in range(os.getpid() % 1_000, 2_000):  # the first whose port nobody uses now
        place = {**step, "SLURM_JOB_ID": str(number)}
        read_launcher(place)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", int(place["MASTER_PORT"])))
            break
    both = {**dict.fromkeys(TORCHRUN), **step, "SLURM_STEP_NUM_TASKS": "2"}
    tasks = [
        Process(
            "-c",
            MEET,
            env={
                **both,
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank),
                "SLURM_JOB_ID": str(number),
            },
        )
        for rank in range(2)
    ]
    assert [task.wait() for task in tasks] == [0, 0]
    assert [task.stdout.split() for task in tasks] == [["0", "3"], ["1", "3"]]


def test_a_build_that_was_killed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed waits for its lock file without end, and without a word."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    check_build_lock()
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir(exist_ok=True)
    lock.touch()
    check_build_lock()  # somebody may be at it
    before = time.time() - 3600
    os.utime(lock, (before, before))
    with pytest.raises(ConfigError, match="a build that began 60 minutes ago.*remove .*lock"):
        check_build_lock()


def test_missing_build_tools_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's own error is fifty lines long, and comes after the model was loaded."""
    monkeypatch.setattr(shutil, "which", lambda name, **_: None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(ConfigError) as caught:
        need_compiler()
    for word in ("ninja", "g++", "python3-dev", "for offload", "deepspeed=zero2 or zero3"):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
