"""Measure every figure of the README again, from the shipped checkpoints: ``make bench``.

    python scripts/bench_readme.py [--resume] [--only drafters ...]
    python scripts/bench_readme.py --quick      # minutes of nonsense, to see that it works

Each part of bench_readme.toml writes a file of benchmarks/readme/. When all went well,
``scripts/render.py`` draws the figures in docs/ and writes the marked blocks of the pages anew. The
machine should do nothing else meanwhile: about 50 minutes on two cores. ``--quick`` writes to
build/bench_quick/ only.
"""

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path

import harness
from render import FIGURES, PAGES, render

FOLDER, QUICK_FOLDER = "benchmarks/readme", "build/bench_quick/readme"
RECORD = "parts.json"
# what --quick asks for instead; the methods stay, so that every one of them is tried
QUICK = {"num_prompts": "2", "max_new_tokens": "8", "repeats": "1"}
QUICK_MEMORY = (
    *("--vocab", "512", "--hidden", "64", "--tokens", "64", "--heads", "1", "2"),
    *("--timed-heads", "2", "--repeats", "1"),
)


@dataclass
class Settings(harness.PartsSettings):
    """What can be asked.

    Attributes:
        quick: tiny, into build/bench_quick/
    """

    quick: bool = False


def readme_parts(folder: str = FOLDER, *, quick: bool = False) -> list[harness.Part]:
    """Return the parts; their files go to ``folder``, relative to the repository."""
    parts = harness.read_parts(harness.ROOT / "scripts" / "bench_readme.toml", folder=folder)
    if quick:
        parts = [dataclasses.replace(p, commands=tuple(map(shorter, p.commands))) for p in parts]
    return parts


def shorter(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command whose measurement takes seconds."""
    if command[0] != "-m":
        return (*command, *QUICK_MEMORY)
    asked = dict(word.split("=", 1) for word in command[2:]) | QUICK
    if "batch_sizes" in asked:
        asked["batch_sizes"] = "[1,2]"
    return (*command[:2], *(f"{key}={value}" for key, value in asked.items()))


def main() -> None:
    """Measure, draw, fill."""
    settings = harness.parse(Settings)
    folder = harness.ROOT / (QUICK_FOLDER if settings.quick else FOLDER)
    parts = readme_parts(str(folder.relative_to(harness.ROOT)), quick=settings.quick)
    folder.mkdir(parents=True, exist_ok=True)
    pages, figures = PAGES, FIGURES
    if settings.quick:
        pages = tuple(Path(shutil.copy(page, folder.parent)) for page in PAGES)
        figures = folder.parent
    if harness.perform(parts, settings, folder / RECORD):
        print("\n".join(render(folder.parent, figures, pages)))


if __name__ == "__main__":
    main()
