"""The notebook of docs/ runs, and shows what it says; without Jupyter."""

import copy
import json
import re
from typing import Any

import pytest

from tests.script_modules import ROOT, load_script

PATH = ROOT / "docs" / "speculation.ipynb"
notebook_script = load_script("run_notebook")


@pytest.fixture(scope="module")
def notebook() -> dict[str, Any]:
    """Return the notebook as it is stored; not to be changed."""
    return json.loads(PATH.read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def outputs(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return what its cells print and draw now."""
    return notebook_script.execute(notebook)  # type: ignore[no-any-return]


def test_cells_print_what_is_stored(
    notebook: dict[str, Any], outputs: list[list[dict[str, Any]]]
) -> None:
    """Stored outputs hide that a cell no longer runs: readers look, and do not start it."""
    assert notebook_script.differing(notebook, outputs) == []
    text = "".join(notebook_script.printed(each) for each in outputs)
    assert text.count("the tokens of plain decoding: True") == 2
    assert "below 1e-4: True" in text and "'c': 0.12" in text


def test_pictures_are_drawn(notebook: dict[str, Any], outputs: list[list[dict[str, Any]]]) -> None:
    """An explanation with small pictures, of which none is empty, in a file that git can hold."""
    pictures = [o for each in outputs for o in each if o["output_type"] == "display_data"]
    assert len(pictures) == 5
    assert all(len(each["data"]["image/png"]) > 2000 for each in pictures)
    assert PATH.stat().st_size < 150_000
    again = notebook_script.code_cells(notebook)
    assert [each["execution_count"] for each in again] == list(range(1, len(again) + 1))


def test_another_output_is_noticed(
    notebook: dict[str, Any], outputs: list[list[dict[str, Any]]]
) -> None:
    """A comparison that cannot fail would let stored outputs age."""
    changed = copy.deepcopy(notebook)
    cells = notebook_script.code_cells(changed)
    cells[0]["outputs"][0]["text"][0] = "0 depth 9"
    cells[1]["outputs"].clear()
    wrong = notebook_script.differing(changed, outputs)
    assert len(wrong) == 2 and wrong[0].startswith("cell 1 ") and wrong[1].startswith("cell 2: ")


def test_notebook_is_whole(notebook: dict[str, Any]) -> None:
    """Jupyter refuses a file whose cells have no ids, and a link that leads nowhere is dead."""
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    prose = "".join("".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "markdown")
    for target in re.findall(r"\]\(([^)#]+)", prose):
        assert (PATH.parent / target).is_file(), target
    assert not re.search(r"/(home|tmp|root)/", json.dumps(notebook))
