"""docs/adding_a_method.md, applied to a copy of the repository as a reader would apply it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests import processes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding_a_method.md").read_text()
BLOCK = re.compile(r"^```(python|diff)\n# (\S+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def apply(language: str, name: str, text: str, root: Path) -> None:
    """Write a new file of the page, or make its edits of one: each must fit at one place."""
    path = root / name
    if language == "python":
        assert not path.exists(), name
        path.write_text(text)
        return
    for hunk in text.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old, new = ("\n" + "".join(e[1:] for e in lines if e[0] in sign) for sign in (" -", " +"))
        content = path.read_text()
        assert content.count(old) == 1, f"{name} has no one place for\n{hunk}"
        path.write_text(content.replace(old, new))


def test_no_part_takes_more_than_three_files() -> None:
    """A fourth place to edit is the one that is forgotten."""
    found = [
        {name for _, name, _ in BLOCK.findall(part)} for part in re.split("^## ", PAGE, flags=re.M)
    ]
    assert [len(files) for files in found if files] == [3, 3, 3]


def test_what_the_page_adds_trains_and_decodes(tmp_path: Path) -> None:
    """A page whose own heads, drafter or loss no longer work turns away whoever tries."""
    for name in ("specheads", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name)  # what is compiled keeps its age, and is used
    for name in ("conf", "recipes", "data", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    for block in BLOCK.findall(PAGE):
        apply(*block, tmp_path)
    (tmp_path / "page.md").write_text(PAGE)
    files = ("end_to_end/added_method", "models/test_heads_contract", "losses/test_soft_loss")
    done = processes.run(
        "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-k",
        "added or bottleneck or every_kind or hellinger",
        *(f"tests/{file}.py" for file in files),
        cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    ran = re.search(r"(\d+) passed", done.stdout)
    assert ran and int(ran[1]) > 20, done.stdout
