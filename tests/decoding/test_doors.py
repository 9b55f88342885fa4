"""What others import: the package loads nothing heavy, and names of version 0.1 go on working."""

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
from specheads import registration

ROOT = Path(__file__).parents[2]
# what README, docs and scripts/launch of version 0.1 import, and where it is now
OLD_NAMES = {
    "specheads.acceptance.walk": "specheads.verification.acceptance",
    "specheads.assets.tinycode_dir": "specheads.system.files",
    "specheads.decoding.deciding.Acceptance": "specheads.decoding.accept",
    "specheads.decoding.html_page.html_page": "specheads.measure.render",
    "specheads.decoding.markdown.markdown_page": "specheads.measure.render",
    "specheads.decoding.measure.end_tokens": "specheads.models.base",
    "specheads.decoding.measure.read_prompts": "specheads.measure.clock",
    "specheads.decoding.plain.plain_decode": "specheads.decoding.loop",
    "specheads.dist.is_main": "specheads.system.dist",
    "specheads.drafters.hybrid.HybridDrafter": "specheads.drafters.merge",
    "specheads.drafters.made.dynamic_drafter": "specheads.drafters.heads",
    "specheads.drafters.made.static_drafter": "specheads.drafters.heads",
    "specheads.drafters.suffix.SuffixDrafter": "specheads.drafters.lookup",
    "specheads.files.whole_file": "specheads.system.files",
    "specheads.hardware.pick_device": "specheads.system.hardware",
    "specheads.kv_cache.TreeCache": "specheads.attention.cache",
    "specheads.log.RunLog": "specheads.runs.log",
    "specheads.sampling.Sampler": "specheads.verification.sampling",
    "specheads.training.describe.describe_costs": "specheads.training.plan",
    "specheads.training.describe.describe_run": "specheads.training.plan",
    "specheads.training.prepare.load_base": "specheads.training.setup",
    "specheads.training.prepare.load_data": "specheads.training.setup",
    "specheads.training.prepare.prompt_records": "specheads.training.setup",
    "specheads.training.reading.read_data": "specheads.training.setup",
    "specheads.training.schedule.param_groups": "specheads.training.engine",
    "specheads.tree.Tree": "specheads.attention.tree",
}
# what they import from modules that stand where they stood
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
    """Run Python with warnings as errors that are about old names."""
    warn = ["-W", "error::FutureWarning:specheads"]
    return subprocess.run([sys.executable, *warn, *argv], capture_output=True, text=True, cwd=ROOT)


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
    from specheads.registration import register

    offered = (specheads.TreeCache, specheads.SpecDecoder, specheads.load_export)
    assert offered == (TreeCache, SpecDecoder, load_export) and specheads.register is register
    assert set(specheads.__all__) <= set(dir(specheads))
    with pytest.raises(AttributeError, match="'specheads' has no attribute 'nothing'"):
        specheads.nothing  # noqa: B018


@pytest.mark.parametrize("old", OLD_NAMES)
def test_old_names_give_the_very_same_objects(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of version 0.1 that no longer starts, or whose class is another than ours."""
    module, _, name = old.rpartition(".")
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.warns(FutureWarning, match=f"{module} is specheads.* now; the old name goes with"):
        found = importlib.import_module(module)
    new = importlib.import_module(OLD_NAMES[old])
    assert getattr(found, name) is getattr(new, name)
    assert new.__spec__ is not None and new.__spec__.name == new.__name__ == OLD_NAMES[old]
    with pytest.raises(AttributeError):
        found.nothing  # noqa: B018


def test_every_moved_module_is_tried() -> None:
    """A line of the table that leads nowhere is an ImportError of a module nobody asked for."""
    assert {old.rpartition(".")[0] for old in OLD_NAMES} == set(registration._MOVED)


@pytest.mark.parametrize("name", KEPT_NAMES)
def test_documented_names_stay_where_they_are(name: str) -> None:
    """A move that the table forgot breaks what users copied out of the documents."""
    module, _, attribute = name.rpartition(".")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert hasattr(importlib.import_module(module), attribute)


def test_modules_are_imported_from_the_package_as_before() -> None:
    """``from specheads import dist`` asks the package first, and the finder only after it."""
    code = "from specheads import dist; import specheads.system.dist as new; assert dist is new"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("specheads.dist is specheads.system.dist now") == 1


@pytest.mark.parametrize(
    ("program", "line"),
    [("specheads.torchrun", r"usage: .*nproc-per-node"), ("specheads.lm_eval_model", "lm.eval")],
)
def test_programs_keep_their_names(
    program: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Launch scripts outlive a version, and a warning on every rank of each start helps nobody."""
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    with warnings.catch_warnings(record=True) as told, pytest.raises(SystemExit) as ended:
        warnings.simplefilter("always")
        runpy.run_module(program, run_name="__main__", alter_sys=True)  # as ``python -m`` does
    printed = "".join(capsys.readouterr())
    assert ended.value.code in (0, 2) and "Warning" not in printed and "Traceback" not in printed
    assert not [each for each in told if "the old name" in str(each.message)]
    assert re.search(line, printed, re.DOTALL)
    found = importlib.import_module(program)
    assert found is importlib.import_module(registration._PROGRAMS[program])
    assert callable(found.main)
