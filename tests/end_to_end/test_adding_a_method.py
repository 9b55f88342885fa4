"""The example of docs/adding_a_method.md, as a reader would copy it."""

import importlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.commands import SHORT, start

PAGE = (Path(__file__).parents[2] / "docs" / "adding_a_method.md").read_text()


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write the page's files into an empty folder, and stand in it as ``python -m`` does."""
    found = re.findall(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert [name for name, _ in found] == [
        "table.py", "train_table.py", "conf/recipe/table.yaml", "test_table.py",
    ]  # fmt: skip
    for name, code in found:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for module in ("table", "test_table", "specheads_recipe_train_table"):
        sys.modules.pop(module, None)


def test_example_trains(
    written: Path,
    tiny_model_dir: Path,
    tiny_jsonl: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A page about adding methods whose own method no longer starts turns away whoever tries."""
    (command,) = re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "specheads.train"]
    given = [word for word in words[3:] if not word.startswith("data.path=")]
    given += [f"data.path={tiny_jsonl}", f"model={tiny_model_dir}", *SHORT]
    given += ["steps=30", "data.rows=2", "evaluate.num_prompts=2", "evaluate.max_new_tokens=8"]
    assert start(monkeypatch, *given, "hydra.run.dir=dry", "dry_run=true") == 0
    assert "memory" in capfd.readouterr().out and not Path("dry/table.safetensors").exists()
    assert start(monkeypatch, *given, "hydra.run.dir=run") == 0
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses[-1] < 0.8 * losses[0]
    assert rows[-1]["final/accept_length/t0"] >= 1
    table = load_file("run/table.safetensors")["table"]
    assert table.shape == (272, 272) and torch.isfinite(table).all()


def test_the_tests_of_the_example_hold(written: Path) -> None:
    """A test that is shown as a model of its kind should pass, and should be one."""
    module = importlib.import_module("test_table")
    tests = [getattr(module, name) for name in dir(module) if name.startswith("test_")]
    assert len(tests) == 2 and all(test.__doc__ for test in tests)
    for test in tests:
        test()


def test_a_broken_example_is_noticed(written: Path) -> None:
    """The page says that tests were seen failing; these fail where the table forgets its text."""
    table = importlib.import_module("table")
    module = importlib.import_module("test_table")
    whole = table.TableObjective.forward

    def unmasked(self: torch.nn.Module, batch: dict[str, torch.Tensor]) -> object:
        return whole(self, {**batch, "labels": batch["input_ids"]})

    table.TableObjective.forward = unmasked
    with pytest.raises(AssertionError):
        module.test_loss_is_the_mean_over_labels()
