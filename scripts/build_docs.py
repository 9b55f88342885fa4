"""Build the site of the pages: ``make docs``, into build/site.

The pages keep the links that they have in the repository: all that is reached by them from README
and docs/ is gathered at the same places in build/pages, where mkdocs finds it. A link that leads
nowhere, or to a heading that is not there, ends the build.

    python scripts/build_docs.py
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "pages"
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)|<img[^>]+src=\"([^\"]+)\"")


def gather() -> list[Path]:
    """Return README, what lies in docs/, and all that they lead to, relative to the repository."""
    found: dict[Path, None] = {}
    waiting = [ROOT / "README.md", *sorted((ROOT / "docs").iterdir())]
    while waiting:
        path = waiting.pop(0)
        if path.is_dir():  # a link to a folder is one to its page, where it has one
            path = path / "README.md"
        inside = path.is_relative_to(ROOT) and path.is_file()
        if not inside or path in found:
            continue
        found[path] = None
        if path.suffix == ".md":
            text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
            targets = [one or other for one, other in LINK.findall(text)]
            waiting += [(path.parent / each).resolve() for each in targets if "://" not in each]
    return [path.relative_to(ROOT) for path in found]


def main() -> None:
    """Gather, and build."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for path in gather():
        (PAGES / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, PAGES / path)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    raise SystemExit(subprocess.run(command, cwd=ROOT, check=False).returncode)


if __name__ == "__main__":
    main()
