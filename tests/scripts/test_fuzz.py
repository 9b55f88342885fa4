"""What the tests themselves draw: the same in every default run, other things in ``make fuzz``."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import conftest
from tests.script_modules import ROOT, load_script

fuzz = load_script("fuzz")

PROPERTIES = """
from hypothesis import given
from hypothesis import strategies as st
import pytest


@pytest.mark.parametrize("side", ["left", "right"])
@given(number=st.integers(0, 999), text=st.text(max_size=3))
def test_rare(tmp_path_factory, side, number, text):
    assert number % 50 != 7 or side == "left"


@given(st.data())
def test_unwritten(data):
    assert data.draw(st.integers()) < 5
"""


def drawn() -> list[Any]:
    """Return what the examples of a test are."""
    found: list[Any] = []

    @given(st.integers(), st.text(), st.floats())
    @settings(max_examples=100)
    def collect(number: int, text: str, share: float) -> None:
        found.append((number, text, str(share)))

    collect()
    return found


def test_what_was_imported_before_changes_no_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Green or red would depend on which tests a process ran before, and so on the machine's speed.

    Hypothesis draws the constants of the modules that are imported so far, derandomised or not.
    """
    assert settings.default is not None and settings.default.derandomize
    assert settings.default.deadline is None and settings.default.database is None
    first = drawn()
    assert len(set(map(str, first))) > 50
    module = ModuleType("imported_elsewhere")
    module.__file__ = str(tmp_path / "imported_elsewhere.py")
    numbers = [random.Random(i).randrange(10**9, 10**12) for i in range(200)]
    Path(module.__file__).write_text(f"NUMBERS = {numbers}\nTEXTS = {[str(n) for n in numbers]}\n")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert drawn() == first


def run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder of tests that has the profile of ours."""
    return subprocess.run([sys.executable, *args], cwd=folder, capture_output=True, text=True)


def test_what_fuzzing_finds_is_kept(tmp_path: Path) -> None:
    """An example that is found by chance and not written down is not found again for months."""
    file = tmp_path / "test_properties.py"
    file.write_text(PROPERTIES)
    (tmp_path / "conftest.py").write_text(
        "from hypothesis import settings\n"
        "settings.register_profile('fuzz', database=None)\n"
        "settings.register_profile('default', derandomize=True, database=None)\n"
        "settings.load_profile('default')\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    gpu\n")
    program = [str(ROOT / "scripts" / "fuzz.py"), "--times", "4"]
    done = run(tmp_path, *program, "--seed", "3")
    assert done.returncode == 1, done.stdout + done.stderr
    assert 'make fuzz FUZZ="--seed 3 --times 4"' in done.stdout
    assert "test_unwritten: not kept, write a test of it" in done.stdout
    assert "fuzz: seed 3, 2 found" in done.stdout
    kept = file.read_text()
    assert kept.count("@example(") == 1 and '"make fuzz, seed 3"' in kept
    again = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "rare")
    assert "Failing" in again.stdout and "explicit" in again.stdout
    assert "1 failed, 1 passed" in again.stdout


@pytest.mark.parametrize(
    "call,expected",
    [
        ("t(\n    tmp=<a\n     tmp=1>,\n    b=[-inf, nan],\n)", "b=[-float('inf'), float('nan')]"),
        ("t(\n    a='\\x1b\\n    b=1',\n    tmp=1,\n)", "a='\\x1b\\n    b=1'"),
        ("t(\n    a=Path('x'),  # or any other generated value\n    tmp=1,\n)", "a=Path('x')"),
        ("t(\n    a=unknown(1),\n)", None),
        ("t(\n    a=<object>,\n)", None),
        ("t(\n    data=data(...),\n)", None),
    ],
)
def test_examples_are_written_so_that_python_reads_them(call: str, expected: str | None) -> None:
    """A line that does not run would break the file, and all of its tests with it."""
    names = {"Path": Path}
    if expected is None:
        with pytest.raises((ValueError, SyntaxError)):
            fuzz.decorator(call, {"tmp"}, names, "here")
        return
    found = fuzz.decorator(call, {"tmp"}, names, "here")
    assert found == f"@example({expected}).via('here')"


def test_another_order_has_all_tests_and_keeps_files_together() -> None:
    """A file's tests share what they build: apart from each other they would build it again."""
    places = [(Path(f"{name}.py"), i) for name in "abcd" for i in range(5)]

    def order(seed: int | None) -> list[tuple[Path, int]]:
        items: Any = [SimpleNamespace(path=path, number=i) for path, i in places]
        config: Any = SimpleNamespace(getoption=lambda name: seed)
        conftest.pytest_collection_modifyitems(config, items)
        return [(each.path, each.number) for each in items]

    assert order(None) == places
    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == places != order(1)
    files = [path for path, _ in order(1)]
    assert [path for i, path in enumerate(files) if i % 5 == 0] != sorted(set(files))
    assert all(len(set(files[i : i + 5])) == 1 for i in range(0, 20, 5))
