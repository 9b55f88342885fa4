"""``make bench-full``: every figure of BENCHMARKS.md has a part, every command exists."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from specheads.measure.clock import read_prompts
from specheads.models.base import load_tokenizer
from tests.composed import composed
from tests.script_modules import ROOT, load_script, options_of

full: Any = load_script("bench_full")
PARTS = full.full_parts()


def test_every_file_has_one_part() -> None:
    """A file that nothing makes is kept for ever; one that two parts make is the last one's."""
    made = Counter(path for part in PARTS for path in part.outputs)
    assert not [path for path, count in made.items() if count > 1]
    kept = {str(path.relative_to(ROOT)) for path in (ROOT / "benchmarks").rglob("*.json")}
    kept |= {str(path.relative_to(ROOT)) for path in (ROOT / "benchmarks").rglob("*.jsonl")}
    kept = {
        path for path in kept if not re.search("/h[12]00/", path)
    }  # of a GPU, which it has none of
    assert not kept - set(made)
    folders = {str(Path(path).parent) for path in made if path.startswith("benchmarks/")}
    assert all((ROOT / folder).is_dir() or folder.endswith("readme") for folder in folders)


def test_every_section_has_a_part() -> None:
    """A section that was added without one is measured once, by hand, and never again."""
    page = (ROOT / "BENCHMARKS.md").read_text()
    bodies = re.split(r"^## (.*)$", page, flags=re.MULTILINE)
    sections = dict(zip(bodies[1::2], bodies[2::2], strict=True))
    measured = {title for title, body in sections.items() if "\n|" in body}
    assert measured == {part.section for part in PARTS if part.section}
    for part in PARTS:  # the section names the part's file, or a reader cannot find it
        named = [path for path in part.outputs if path.startswith("benchmarks/")]
        for path in named if part.section else ():
            folder = str(Path(path).parent)
            places = (path, f"({folder})") if folder != "benchmarks" else (path,)
            assert any(place in sections[part.section] for place in places), (part.section, path)


def test_what_parts_need_comes_before_them() -> None:
    """A bench in front of its training measures last month's checkpoint."""
    names = [part.name for part in PARTS]
    assert len(set(names)) == len(names)
    for number, part in enumerate(PARTS):
        assert set(part.needs) <= set(names[:number]), part.name
        made = {path for name in part.needs for path in PARTS[names.index(name)].outputs}
        words = [word for command in part.commands for word in command]
        runs = {run for word in words for run in re.findall(r"runs/full/(\w+)/export", word)}
        if part.name.startswith("train_"):
            continue
        assert all(f"runs/full/{run}/export/config.json" in made for run in runs), part.name


COMMANDS = [command for part in PARTS for command in part.commands]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words)[:70])
def test_commands_exist(words: tuple[str, ...]) -> None:
    """A renamed key ends a day's work in its sixth hour."""
    if words[0] == "scripts/harness.py":
        assert callable(getattr(load_script(words[1]), words[2])) and json.loads(words[3])
        return
    if words[0].startswith("scripts/"):
        assert {word for word in words if word.startswith("--")} <= options_of(words[0])
        return
    assert words[0] == "-m"
    composed(words[1].removeprefix("specheads."), words[2:])


def test_unseen_prompts_are_those_that_were_measured(tmp_path: Path) -> None:
    """Prompts that a setting was looked at on would flatter the figures to quote."""
    path = tmp_path / "new" / "unseen.jsonl"
    full.write_unseen(str(path))
    tokenizer = load_tokenizer("tinycode")
    chosen: dict[Path, tuple[set[str], str]] = {}
    for source in (path, ROOT / "data" / "tinycode" / "prompts.jsonl"):
        prompts, digest = read_prompts(
            source, tokenizer, 48, max_length=1920, device=torch.device("cpu")
        )
        chosen[source] = {prompt.id for prompt in prompts}, digest
    (unseen, digest), (seen, _) = chosen.values()
    assert len(unseen) == len(seen) == 48 and not unseen & seen
    published = json.loads((ROOT / "benchmarks" / "tinycode_medusa2_unseen.json").read_text())
    assert digest == published["settings"]["prompts_sha256"]


def test_the_list_shows_what_would_run() -> None:
    """Nobody starts a day of work without seeing what it is."""
    shown = full.harness.list_of(PARTS, {})
    assert "$ python -m specheads.train +recipe=hydra run_dir=runs/full/hydra" in shown
    assert "-> benchmarks/tinycode_heads.json" in shown and "(to do, about 270 min)" in shown
