"""The README's blocks are what their files say, and say so where there is no file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import ROOT, load_script

blocks: Any = load_script("readme_blocks")
plot: Any = load_script("plot_readme")


def row(method: str, temperature: float, batch: int = 1, **more: Any) -> dict[str, Any]:
    """Return a row of a bench, in which every figure is another one."""
    return {
        "method": method,
        "temperature": temperature,
        "batch": batch,
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
        **more,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return measurements of every block."""
    bench = {
        "environment": {
            "processor": "some processor",
            "torch": "2.13.0+cpu",
            "date": "2026-11-21",
            "contended": True,
            "baseline_drift": 1.234,
            "largest_other_share": 0.456,
        },
        "settings": {"max_new_tokens": 128, "threads": 2, "repeats": 2},
        "crossover": [{"method": "suffix", "temperature": 1.0, "batch": 8}],
        "rows": [
            row(method, heat, size)
            for size in (1, 8)
            for heat in (0.0, 1.0)
            for method in blocks.NAMES
            if size == 1 or method != "lookahead"
        ],
    }
    sides = [
        {"side": side, "num_heads": n, "allocator_peak": n * 2**21, "growth": n / 7}
        for side in ("ours", "naive")
        for n in (1, 4)
    ]
    times = {"allocator": "kept", "ours": {"seconds": [2.5]}, "naive": {"seconds": [2.4, 2.6]}}
    memory = {
        "environment": bench["environment"],
        "settings": {"vocab": 32000, "tokens": 1024, "timed_heads": 4},
        "rows": sides,
        "times": [times],
    }
    readme = tmp_path / "readme"
    readme.mkdir()
    for name in ("drafters", "mtp_byte", "batches", "float32"):
        (readme / f"{name}.json").write_text(json.dumps(bench))
    (readme / "mtp_memory.json").write_text(json.dumps(memory))
    headline = {"method": "tree", "temperature": 0.0, "rep8_plain_greedy": 0.127}
    bench["headline"] = headline | {"speedup_vs_plain": 2.345}
    (tmp_path / "tinycode_hydra.json").write_text(json.dumps(bench))
    return readme


def page_of(*names: str) -> str:
    """Return a page with empty blocks."""
    return "".join(f"Text.\n\n<!-- figures: {n} -->\n{blocks.END}\n\n" for n in names) + "End.\n"


@pytest.mark.parametrize("name", list(blocks.RENDERERS))
def test_a_changed_digit_is_found(name: str, folder: Path) -> None:
    """A figure typed by hand outlives the measurement it came from."""
    page = blocks.fill(page_of(name), folder)
    assert page.startswith("Text.\n") and page.endswith("\nEnd.\n")
    assert not blocks.differing(page, folder) and blocks.fill(page, folder) == page
    content = blocks.blocks_of(page)[0][1]
    digits = [i for i, letter in enumerate(content) if letter.isdigit()]
    assert len(digits) > 5
    start = page.index(content)
    for i in (digits[0], digits[len(digits) // 2], digits[-1]):
        other = str((int(content[i]) + 1) % 10)
        assert blocks.differing(page[: start + i] + other + page[start + i + 1 :], folder) == [name]


def test_figures_reach_the_page(folder: Path) -> None:
    """A column that shows another key's figure is wrong in every row, and looks right."""
    page = blocks.fill(page_of("drafters", "kinds", "batches", "float32", "memory"), folder)
    cells = "| 2.35 (2.11-2.67) | 2.35 (2.11-2.67) | 3.22 / 3.22 | 0.13 | 47/48 (+1) |"
    assert f"| suffix copies {cells}" in page
    assert "| 1 | suffix copies | 3.14 (1.41x) |" in page
    assert "plain decoding varied 1.23x between repeats, others took up to 46%" in page
    assert "catches up with suffix copies at batch 8 (T=1)." in page
    assert "| 4 | 8 | 57.1% | 8 | 57.1% |" in page and "2.50 s against 2.50 s with freed" in page
    lookahead = next(line for line in page.splitlines() if line.startswith("| 0 | lookahead |"))
    assert lookahead.endswith("|  |")  # not measured in batches, and not called 0


def test_what_is_not_measured_is_said(folder: Path) -> None:
    """An empty block, or last year's, would stand for a measurement."""
    page = blocks.fill(page_of("drafters", "mtp"), folder)
    (folder / "drafters.json").unlink()
    assert blocks.differing(page, folder) == ["drafters"]
    assert blocks.ABSENT in blocks.fill(page, folder)
    with pytest.raises(SystemExit, match="no block is called speed"):
        blocks.fill(page_of("speed"), folder)


def test_the_same_figures_draw_the_same_files(folder: Path, tmp_path: Path) -> None:
    """The script runs once per publication, long after the keys it reads were last touched."""
    page = tmp_path / "page.md"
    page.write_text(page_of("drafters"))
    assert len(plot.render(folder, tmp_path, [page])) == 3 and "suffix copies" in page.read_text()
    first = {name: (tmp_path / name).read_bytes() for name in ("speed.svg", "batches.svg")}
    plot.render(folder, tmp_path, [page])
    assert all((tmp_path / name).read_bytes() == found for name, found in first.items())


def test_published_blocks_are_the_measured_ones() -> None:
    """What README and BENCHMARKS.md show is rendered from the files beside them."""
    for name, wanted in (("README.md", 6), ("BENCHMARKS.md", 1)):
        page = (ROOT / name).read_text()
        assert len(blocks.blocks_of(page)) >= wanted
        assert not blocks.differing(page, plot.FOLDER), "python scripts/plot_readme.py"
