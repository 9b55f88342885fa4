"""Many processes under DeepSpeed give the weights, and the exports, of one under plain torch."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import TCPStore

from specheads.models.base import load_base_model
from specheads.models.checkpoint import load_export
from tests.end_to_end import parts, toy_runs
from tests.processes import Process

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
# stages 1 and 2 are one optimizer of DeepSpeed's
SKIPPED = [f"{stage}:float32" for stage in range(4)]
SKIPPED += ["0:bfloat16", "2:bfloat16", "3:bfloat16", "1:float16", "3:float16"]


# What DeepSpeed compiles is a step of its own Muon, which nobody here takes: asking for it imports
# half of torch in every rank.
PROGRAM = """import runpy, sys, torch
torch.compile = lambda function, *_, **__: function
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def on_ranks(number: int, script: str, *arguments: str) -> str:
    """Run a script of this folder as several processes, as torchrun would; return what they say."""
    words = ("-c", PROGRAM, str(SCRIPTS / script), *arguments)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on any free port
    place = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    ranks = [
        Process(*words, env={**place, "RANK": n, "LOCAL_RANK": n}) for n in map(str, range(number))
    ]
    try:
        while {each.poll() for each in ranks} in ({None}, {None, 0}):
            time.sleep(0.05)
        failed = "".join(each.stdout[-3000:] + each.stderr[-6000:] for each in ranks)
        assert not any(each.poll() for each in ranks), failed
    finally:
        for each in ranks:
            each.kill()
    return "".join(each.stdout for each in ranks)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder where one process under plain torch trains and exports."""
    folder = tmp_path_factory.mktemp("ranks")
    toy_runs.write_base(folder / "base")
    return folder


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare tensors by name."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def exported(path: Path, kind: str) -> dict[str, Tensor]:
    """Return the weights of an export, read as users read it."""
    if kind in ("draft", "pretrain"):
        return dict(load_base_model(str(path), dtype="float32").named_parameters())
    found = load_export(path)
    heads = {f"heads.{name}": p for name, p in found.heads.named_parameters()}
    return {**heads, **dict(found.base.named_parameters())}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(2, ["2:medusa1", "2:mtp_sequential", "2:draft", "3:medusa2_lora"], id="some"),
        *(
            pytest.param(
                ranks,
                [f"{stage}:{kind}" for kind in toy_runs.KINDS],
                id=f"zero{stage} on {ranks}",
                marks=pytest.mark.slow,
            )
            for ranks, stages in ((2, range(4)), (8, (2, 3)))
            for stage in stages
        ),
    ],
)
def test_ranks_equal_one_process(
    reference: Path, tmp_path: Path, ranks: int, cases: list[str]
) -> None:
    """Ranks agree with each other even when all are wrong; only a reference shows it.

    Labels are unequal per rank and per micro-batch, so that a mean of means differs too; one of
    eight ranks is slow. What is exported must be what was trained: under ZeRO-3 no rank has it.
    """
    (tmp_path / "base").symlink_to(reference / "base")
    on_ranks(ranks, "toy_runs.py", str(tmp_path), *cases)
    for case in cases:
        stage, _, kind = case.partition(":")
        if not (reference / f"one-{kind}").is_dir():
            toy_runs.train(reference, "one", kind, {})
        one = load_file(reference / f"one-{kind}.safetensors")
        same(load_file(tmp_path / f"zero{stage}-{kind}.safetensors"), one)
        export = exported(reference / f"one-{kind}", kind)
        same(exported(tmp_path / f"zero{stage}-{kind}", kind), export)


@pytest.mark.distributed
def test_a_base_in_parts_is_the_base(tmp_path: Path) -> None:
    """A tensor in the wrong rank's part, or a layer that stays whole: wrong numbers, or no memory.

    Logits, merged adapters and written files are those of the base read whole, bit for bit; what
    transformers puts together from several tensors, or names otherwise, is not read so, and said.
    """
    assert on_ranks(2, "parts.py", str(tmp_path)).count(" ok") == 2 * len(parts.BASES)


@pytest.mark.distributed
def test_a_step_that_is_not_finite_never_happened() -> None:
    """A NaN that one rank sees would reach the weights of all, and the moments for good.

    In every stage and precision; one process under plain torch clips to the same steps.
    """
    assert on_ranks(2, "skipped_steps.py", *SKIPPED).count(" ok") == len(SKIPPED)


@pytest.mark.distributed
@pytest.mark.slow
@WITHOUT
def test_offloaded_steps() -> None:
    """DeepSpeed's Adam for the processor is another program, with gradients in other places."""
    cases = ["2:float32:offload", "3:float32:offload", "2:bfloat16:offload"]
    assert on_ranks(2, "skipped_steps.py", *cases).count(" ok") == len(cases)
