"""What others import: the package loads nothing heavy, and documented names stay."""

from __future__ import annotations

import importlib
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import specheads

ROOT = Path(__file__).parents[2]
# what README and docs import
KEPT_NAMES = (
    "specheads.decoding.conversation.Conversation", "specheads.decoding.exported.exported_drafter",
    "specheads.decoding.generate.SpecDecoder", "specheads.decoding.loop.decode",
    "specheads.drafters.contract.Candidates", "specheads.drafters.draft_model.DraftModelDrafter",
    "specheads.drafters.length.FixedLength", "specheads.losses.IGNORE",
    "specheads.losses.count_valid", "specheads.losses.shift_labels",
    "specheads.models.base.context_length", "specheads.models.base.load_base_model",
    "specheads.models.checkpoint.load_export", "specheads.models.draft.pruned",
    "specheads.models.forward.ModelPass", "specheads.models.output.output_layer",
    "specheads.spec_bench.forward", "specheads.spec_bench.load",
    "specheads.train.keep_freed_memory", "specheads.training.loop.fit",
    "specheads.training.plan.plan_stage",
)  # fmt: skip


def ran(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the clone."""
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, cwd=ROOT)


def test_the_package_itself_loads_nothing_heavy() -> None:
    """Every ``--help`` would take the seconds that torch takes to import."""
    code = (
        "import specheads, sys; print(sorted({'torch', 'transformers', 'hydra'} & {*sys.modules}))"
    )
    done = ran("-c", code)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_what_the_package_offers() -> None:
    """A name in the list that fails when it is used is found by the first user alone."""
    from specheads.attention.cache import TreeCache
    from specheads.decoding.generate import SpecDecoder
    from specheads.models.checkpoint import load_export
    from specheads.system.registration import register

    offered = (specheads.TreeCache, specheads.SpecDecoder, specheads.load_export)
    assert offered == (TreeCache, SpecDecoder, load_export) and specheads.register is register
    assert set(specheads.__all__) <= set(dir(specheads))
    with pytest.raises(AttributeError, match="'specheads' has no attribute 'nothing'"):
        specheads.nothing  # noqa: B018


@pytest.mark.parametrize("name", KEPT_NAMES)
def test_documented_names_stay_where_they_are(name: str) -> None:
    """A move breaks what users copied out of the documents."""
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize(
    ("program", "line"),
    [("specheads.torchrun", r"usage: .*nproc-per-node"), ("specheads.measure.lm_eval", "lm.eval")],
)
def test_programs_keep_their_names(
    program: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Launch scripts outlive a version, and a warning on every rank of each start helps nobody."""
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    monkeypatch.delitem(sys.modules, program, raising=False)  # as in a process of its own
    with warnings.catch_warnings(record=True) as told, pytest.raises(SystemExit) as ended:
        warnings.simplefilter("always")
        runpy.run_module(program, run_name="__main__", alter_sys=True)  # as ``python -m`` does
    printed = "".join(capsys.readouterr())
    assert ended.value.code in (0, 2) and "Warning" not in printed and "Traceback" not in printed
    assert not [each for each in told if "specheads" in str(each.message)]
    assert re.search(line, printed, re.DOTALL)
    assert callable(importlib.import_module(program).main)
