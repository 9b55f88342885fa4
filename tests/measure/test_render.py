"""What the pages show is rendered from the files of benchmarks/, or says that there is none."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from specheads.measure.render import bench_text
from tests.script_modules import ROOT, load_script

render: Any = load_script("render")
READ = render.reader(render.FOLDER)
PAGES = [page.read_text() for page in render.PAGES]
MARKS = sorted({mark for page in PAGES for _, mark, _, _ in render.BLOCK.findall(page)})
END = "<!-- figures: end -->\n"
NO_PROSE = r"<!-- figures: (?!end).*?<!-- figures: end -->|```.*?```|`[^`]*`|\]\([^)]*\)"
# speed-ups of nobody's file: a limit and engines before this one, and what others have published
TYPED = {"BENCHMARKS.md": 7, "docs/benchmarks.md": 23, "docs/faq.md": 4}


def page_of(*marks: str) -> str:
    """Return a page with empty blocks."""
    return "".join(f"Text.\n\n<!-- figures: {mark} -->\n{END}\n" for mark in marks) + "End.\n"


def row(method: str, temperature: float, batch: int = 1) -> dict[str, Any]:
    """Return a row of a bench, in which every figure is another one."""
    return {
        "method": method,
        "temperature": temperature,
        "batch": batch,
        "tree_nodes": 17,
        "dtype": "bfloat16",
        "num_prompts": 48,
        "tokens_per_second": 123.4,
        "speedup_vs_plain": 1.555 if method == "plain" else 2.345,
        "speedup_vs_plain_ci95": [2.111, 2.666],
        "speedup_vs_hf_generate": 2.777,
        "accept_length": 3.218,
        "rep8": 0.127,
        "identical": 47,
        "compared": 48,
        "near_ties": 1,
        "per_kind": {"body": {"num_prompts": 8, "accept_length": 3.141, "speedup_vs_plain": 1.414}},
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return made-up measurements: a bench, and the memory of training steps."""
    place = {
        **{"processor": "some processor", "torch": "2.13.0+cpu", "date": "2026-11-21"},
        **{"contended": True, "baseline_drift": 1.234, "largest_other_share": 0.456},
    }
    settings = {"checkpoint": "runs/medusa1", "max_new_tokens": 128, "threads": 2, "repeats": 2}
    rows = [
        row(method, heat, size)
        for size in (1, 8)
        for heat in (0.0, 1.0)
        for method in render.NAMES
        if size == 1 or method != "lookahead"
    ]
    crossover = [{"method": "suffix", "temperature": 1.0, "batch": 8}]
    bench = {"environment": place, "settings": settings, "crossover": crossover, "rows": rows}
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    peaks = [
        {"side": side, "num_heads": n, "allocator_peak": n * 2**21, "growth": n / 7}
        for side in ("ours", "naive")
        for n in (1, 4)
    ]
    time = {"allocator": "kept", "seconds_vs_naive": 1.37, "ours": {"seconds": [2.5]}}
    time["naive"] = {"seconds": [2.4, 2.7]}
    steps = {"vocab": 32000, "tokens": 1024, "timed_heads": 4}
    memory = {"environment": place, "settings": steps, "rows": peaks, "times": [time]}
    (tmp_path / "memory.json").write_text(json.dumps(memory))
    cells = tmp_path / "equal" / "tinycode"
    cells.mkdir(parents=True)
    rows = {heat: [row("plain", n), row("prompt_lookup", n)] for n, heat in enumerate(("t0", "t1"))}
    (cells / "prompt_lookup.json").write_text(json.dumps({"rows": rows}))
    gains = {"medusa1-0": (1.65, 0.8), "block-0": (1.5, 1.75), "block-1": (1.7, 1.95)}
    for name, gained in gains.items():
        lines = {
            heat: [row("plain", n), {**row("tree_8", n), "speedup_vs_plain": gained[n]}]
            for n, heat in enumerate(("t0", "t1"))
        }
        found: dict[str, Any] = {"rows": lines, "shape": "tree_8", "steps": 1234, "minutes": 3}
        found["chain"] = {"t0": {"accept_length": 1.91}, "t1": {"accept_length": 1.82}}
        found["parts_ms"] = {"step": 9.1, "base": 5.2, "guesses": 3.3, "loop": 0.6}
        found |= {"rate": "6e-3", "tried": {"3e-3": 1.71, "6e-3": 1.83}}
        found |= {"parameters": 1_750_000, "bytes_per_token": 4608}
        (cells / f"{name}.json").write_text(json.dumps(found))
    return tmp_path


def test_pages_are_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a reader quotes was measured, and stands in a file."""
    monkeypatch.setattr("sys.argv", ["render.py", "--check"])
    render.main()
    assert len(MARKS) > 40


def test_no_figure_stands_on_two_pages() -> None:
    """A reader who finds a table twice compares them, and cannot tell which is the newer one."""
    found = [mark for page in PAGES for _, mark, _, _ in render.BLOCK.findall(page)]
    assert len(found) == len(MARKS)


@pytest.mark.parametrize("mark", MARKS)
def test_a_changed_digit_is_found(mark: str) -> None:
    """A figure typed by hand outlives the measurement it came from."""
    page = render.fill(page_of(mark), READ)
    assert page.startswith("Text.\n") and page.endswith("\nEnd.\n")
    assert not render.differing(page, READ) and render.fill(page, READ) == page
    if render.ABSENT in page:
        return
    start = page.index("-->") + 3
    digits = [i for i in range(start, page.index(END)) if page[i].isdigit()]
    for i in (digits[0], digits[len(digits) // 2], digits[-1]):
        other = str((int(page[i]) + 1) % 10)
        assert render.differing(page[:i] + other + page[i + 1 :], READ) == [mark]


def test_figures_in_prose_are_rendered() -> None:
    """A speed-up that was typed into a sentence stays when its file changes."""
    typed = {}
    for path in (ROOT / "README.md", ROOT / "BENCHMARKS.md", *(ROOT / "docs").glob("*.md")):
        prose = re.sub(NO_PROSE, "", path.read_text(), flags=re.DOTALL)
        if found := re.findall(r"\d+\.\d+x", prose):
            typed[str(path.relative_to(ROOT))] = len(found)
    assert typed == TYPED, "put it into a block of scripts/render.py"


def test_figures_reach_the_page(folder: Path) -> None:
    """A column that shows another key's figure is wrong in every row, and looks right."""
    marks = [f"{name} bench" for name in ("clocked", "speeds", "kinds", "batches", "identical")]
    page = render.fill(page_of(*marks, "memory memory"), render.reader(folder))
    cells = "2.35 (2.11-2.67) | 2.78 | 3.22 | 0.73 | 0.13 | 47/48 (+1) |"
    assert f"| 0 | Medusa-1 heads, static tree | 17 | 123 | {cells}" in page
    cells = "| 2.35 (2.11-2.67) | 2.35 (2.11-2.67) | 3.22 / 3.22 | 0.13 | 47/48 (+1) |"
    assert f"| suffix copies {cells}" in page
    assert "| 1 | suffix copies | 3.14 (1.41x) |" in page
    assert "plain decoding varied 1.23x between repeats, others took up to 46%" in page
    assert "catches up with suffix copies at batch 8 (T=1)." in page
    assert "| 4 | 8 | 57.1% | 8 | 57.1% |" in page
    assert "2.50 s (2.50-2.50) against 2.55 s (2.40-2.70), 1.37 times, with freed" in page
    lookahead = next(line for line in page.splitlines() if line.startswith("| 0 | lookahead | 123"))
    assert lookahead.endswith("|  |")  # not measured in batches, and not called 0
    assert "In float32 1974 of 2016 outputs of 11 drafters" in page


def test_drafters_on_equal_terms_reach_the_page(folder: Path) -> None:
    """A comparison ranked by name, or by one temperature, recommends the wrong drafter."""
    marks = [f"{name} tinycode" for name in ("equal", "equal_training", "equal_kinds")]
    page = render.fill(page_of(*marks), render.reader(folder))
    first, rest = page.split("<!-- figures: equal_training")
    head, _, *lines = (line for line in first.splitlines() if line.startswith("|"))
    assert {line.count("|") for line in (head, *lines)} == {head.count("|")}
    cells = "8 | 3.22 (3.22-3.22) | 3.22 (3.22-3.22) | 1.91 (1.91-1.91) | 1.82 (1.82-1.82)"
    block = f"| block heads, joined form | 1.60 (1.50-1.70) | 1.85 (1.75-1.95) | {cells}"
    assert lines[0] == f"{block} | 8.1 | 9.1 | 5.2 | 3.3 | 0.6 | 0.13 |"
    assert lines[1].startswith("| Medusa-1 | 1.65 (2.11-2.67) | 0.80 (2.11-2.67) | 8 | 3.22 |")
    assert lines[2].startswith("| prompt lookup, not trained | 2.35 (2.11-2.67) | 2.35")
    assert "| Medusa-1 | 1,234 | 6e-3 | 3e-3: 1.71, 6e-3: 1.83 | 1.8 M | 4,608 | CPU | 1 |" in rest
    assert "3 minutes each." in rest and "| 1 | Medusa-1 | 3.14 (1.41x) |" in rest
    render.draw_equal("tinycode", render.reader(folder), folder / "equal.svg")
    assert (folder / "equal.svg").read_text().count("Medusa-1") >= 1
    absent = render.fill(page_of("equal smollm2"), render.reader(folder))
    assert render.ABSENT in absent


def test_block_heads_with_one_thing_changed_reach_the_page(tmp_path: Path) -> None:
    """A row that shows one seed of three claims a difference that the others deny."""
    shapes = ("chain", "tree_8", "tree_16", "tree_24")
    rows = [
        {
            "row": name,
            "accept": {"parameters": 1_750_000}
            | {
                heat: {
                    shape: {"accept_length": 2 + n + seed / 10} for n, shape in enumerate(shapes)
                }
                for heat in ("t0", "t1")
            },
        }
        for name, seeds in (("joined", (0, 1, 2)), ("hard", (0,)))
        for seed in seeds
    ]
    (tmp_path / "block_ablation.json").write_text(json.dumps({"rows": rows}))
    page = render.fill(page_of("ablation"), render.reader(tmp_path))
    assert "| joined | 2.10 (2.00-2.20) | 3.10 (3.00-3.20) |" in page
    assert "| hard | 2.00 | 3.00 | 4.00 | 5.00 | 2.00 | 3.00 | 4.00 | 5.00 | 1.8 M | 1 |" in page


def test_what_is_not_measured_is_said(folder: Path) -> None:
    """An empty block, or last year's, would stand for a measurement."""
    page = render.fill(page_of("speeds bench", "memory memory"), render.reader(folder))
    (folder / "bench.json").unlink()
    assert render.differing(page, render.reader(folder)) == ["speeds bench"]
    assert render.ABSENT in render.fill(page, render.reader(folder))
    with pytest.raises(SystemExit, match="no block is called speed:"):
        render.fill(page_of("speed bench"), READ)


def test_the_same_figures_draw_the_same_files(tmp_path: Path) -> None:
    """The script runs once per publication, long after the keys it reads were last touched."""
    page = Path(shutil.copy(ROOT / "README.md", tmp_path))
    lines = render.render(render.FOLDER, tmp_path, [page])
    assert len(lines) == len(render.DRAWINGS) + 1
    first = {path: path.read_bytes() for path in tmp_path.glob("*.svg")}
    assert len(first) == sum(line.startswith("wrote") for line in lines) >= 3
    assert page.read_text() == (ROOT / "README.md").read_text()
    render.render(render.FOLDER, tmp_path, [page])
    assert all(path.read_bytes() == found for path, found in first.items())


def test_a_bench_of_plain_decoding_and_heads_alone_is_printed() -> None:
    """Without generate or T=0.7 the table ended in a traceback behind minutes of measuring."""
    found = json.loads((ROOT / "benchmarks" / "smollm2_block" / "questions.json").read_text())
    assert found["headline"] is None
    said = bench_text(found)
    assert "tree_dynamic" in said and "Headline" not in said
