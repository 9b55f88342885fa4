"""Two processes under DeepSpeed give the weights, and the exports, of one under plain torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specheads.models.base import load_base_model
from specheads.models.checkpoint import load_export
from tests.end_to_end import two_ranks

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent


def missing() -> str:
    """Return what DeepSpeed would fail to compile with, empty if nothing."""
    folder = str(Path(sys.executable).parent)
    path = os.pathsep.join([folder, os.environ.get("PATH", "")])
    wanted = [name for name in ("ninja", "g++") if not shutil.which(name, path=path)]
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        wanted.append("Python.h")
    return ", ".join(wanted)


WITHOUT = pytest.mark.skipif(
    bool(missing()), reason=f"DeepSpeed cannot compile without {missing()}"
)
SKIPPED = [f"{stage}:{dtype}" for dtype in ("float32", "bfloat16") for stage in range(4)]
SKIPPED += [f"{stage}:float16" for stage in (1, 2, 3)]


def start(command: list[str]) -> str:
    """Run a command from the repository; return what it printed, or show it if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def on_two_ranks(script: str, *arguments: str) -> str:
    """Run a script of this folder as two processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return start([*launcher, str(SCRIPTS / script), *arguments])


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder where one process under plain torch trains and exports."""
    folder = tmp_path_factory.mktemp("ranks")
    two_ranks.write_base(folder / "base")
    return folder


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare tensors by name."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def exported(path: Path, kind: str) -> dict[str, Tensor]:
    """Return the weights of an export, read as users read it."""
    if kind == "draft":
        return dict(load_base_model(str(path), dtype="float32").named_parameters())
    found = load_export(path)
    heads = {f"heads.{name}": p for name, p in found.heads.named_parameters()}
    return {**heads, **dict(found.base.named_parameters())}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("stages", "kinds"),
    [
        pytest.param([2], ["medusa1", "mtp_sequential", "draft"], id="zero2"),
        pytest.param([3], ["medusa2_lora"], id="zero3"),
        *(
            pytest.param([stage], [*two_ranks.KINDS], id=f"all{stage}", marks=pytest.mark.slow)
            for stage in range(4)
        ),
    ],
)
def test_two_ranks_equal_one_process(
    reference: Path, tmp_path: Path, stages: list[int], kinds: list[str]
) -> None:
    """Ranks agree with each other even when both are wrong; only a reference shows it.

    Labels are unequal per rank and per micro-batch, so that a mean of means differs too. What is
    exported must be what was trained: under ZeRO-3 no rank has it.
    """
    (tmp_path / "base").symlink_to(reference / "base")
    on_two_ranks("two_ranks.py", str(tmp_path), ",".join(map(str, stages)), *kinds)
    for kind in kinds:
        if not (reference / f"one-{kind}").is_dir():
            two_ranks.train(reference, "one", kind, {})
        one = load_file(reference / f"one-{kind}.safetensors")
        export = exported(reference / f"one-{kind}", kind)
        for stage in stages:
            name = f"zero{stage}-{kind}"
            same(load_file(tmp_path / f"{name}.safetensors"), one)
            same(exported(tmp_path / name, kind), export)


@pytest.mark.distributed
def test_a_step_that_is_not_finite_never_happened() -> None:
    """A NaN that one rank sees would reach the weights of all, and the moments for good.

    In every stage and precision; one process under plain torch clips to the same steps.
    """
    assert on_two_ranks("skipped_steps.py", *SKIPPED).count(" ok") == len(SKIPPED)


@pytest.mark.distributed
@pytest.mark.slow
@WITHOUT
def test_offloaded_steps() -> None:
    """DeepSpeed's Adam for the processor is another program, with gradients in other places."""
    cases = ["2:float32:offload", "3:float32:offload", "2:bfloat16:offload"]
    assert on_two_ranks("skipped_steps.py", *cases).count(" ok") == len(cases)
