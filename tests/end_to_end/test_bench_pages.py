"""What a bench writes beside its JSON: raw records, one file of HTML with plots."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from specheads.bench import run as bench
from specheads.config import BenchConfig, ConfigError
from specheads.formats import card
from specheads.measure.plots import draw
from specheads.measure.render import html_page, sections, verdict
from specheads.measure.rows import only_copies
from specheads.models.checkpoint import read_config
from tests.processes import ROOT

PROMPTS = [("body", "def f(x):\n    "), ("edit", "def gcd(a, b):\n"), ("body", "import os\n")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a bench that wrote everything."""
    path = tmp_path_factory.mktemp("bench")
    records = [
        {"id": f"{kind}-{i}", "kind": kind, "prompt": text, "completion": "pass"}
        for i, (kind, text) in enumerate(PROMPTS)
    ]
    (path / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    shutil.copytree(ROOT / "tests" / "golden" / "export", path / "export")
    card.write(path / "export", "native", read_config(path / "export"))
    text = (path / "export" / card.CARD).read_text()
    (path / "export" / card.CARD).write_text(text + "Written by hand.\n")
    bench(
        BenchConfig(
            checkpoint=str(path / "export"),
            card=True,
            prompts=str(path / "prompts.jsonl"),
            out=str(path / "bench.json"),
            steps=str(path / "steps.jsonl"),
            report=str(path / "bench.html"),
            max_new_tokens=6,
            temperatures=[0.0],
            batch_sizes=[2],
            tree_nodes=[3],
            drafters=["suffix"],
            repeats=2,
            dtype="float32",
            threads=1,
        )
    )
    return path


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    """Return its bench.json."""
    found = json.loads((folder / "bench.json").read_text())
    assert isinstance(found, dict)
    return found


def middle(values: list[float]) -> float:
    """Return the median."""
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def test_every_figure_follows_from_the_raw_records(folder: Path, result: dict[str, Any]) -> None:
    """Records that are not those of the figures let nobody check the figures."""
    records: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for line in (folder / "steps.jsonl").read_text().splitlines():
        each = json.loads(line)
        records[each["method"], each["temperature"], each["batch"]].append(each)
    assert records.keys() == {(r["method"], r["temperature"], r["batch"]) for r in result["rows"]}
    speeds, decoding = {}, {}
    for key, texts in records.items():
        assert [each["prompt"] for each in texts] == ["body-0", "edit-1", "body-2"]
        clocked = {tuple(each["together"]): each for each in texts}  # once per batch
        assert len(clocked) == (3 if key[2] == 1 else 2)
        seconds = sum(middle(each["seconds"]) for each in clocked.values())
        rest = sum(
            middle([a - b for a, b in zip(each["seconds"], each["prefill_seconds"], strict=True)])
            for each in clocked.values()
        )
        tokens = sum(each["new_tokens"] for each in texts)
        speeds[key] = tokens / seconds
        decoding[key] = (tokens - len(texts)) / rest if rest > 0 else None
    for row in result["rows"]:
        key = (row["method"], row["temperature"], row["batch"])
        plain = ("plain", *key[1:])
        texts = records[key]
        assert row["tokens_per_second"] == pytest.approx(speeds[key], rel=1e-3)
        assert row["speedup_vs_plain"] == pytest.approx(speeds[key] / speeds[plain], rel=2e-3)
        own, base = decoding[key], decoding[plain]
        if own is not None and base is not None:
            assert row["decode_tokens_per_second"] == pytest.approx(own, rel=1e-2)
            assert row["decode_speedup_vs_plain"] == pytest.approx(own / base, rel=2e-2)
        steps = [length for each in texts for length in each["accept_lengths"]]
        assert row["accept_length"] == pytest.approx(sum(steps) / len(steps), abs=1e-4)
        assert {int(n): count for n, count in row["accept_lengths"].items()} == {
            n: steps.count(n) for n in set(steps)
        }
        assert row["new_tokens"] == sum(len(each["tokens"]) for each in texts)
        assert row["ended"] == sum(each["ended"] for each in texts)
        if row["identical"] == 3:
            alone = records["plain", row["temperature"], 1]
            assert [each["tokens"] for each in texts] == [each["tokens"] for each in alone]
        if row["drafter"] and "hf" not in row["drafter"]:
            for each in texts:  # the first token comes of the prefill
                assert sum(each["accept_lengths"]) == each["new_tokens"] - 1


def test_rows_of_a_bench(result: dict[str, Any]) -> None:
    """Baselines that go missing make the ones that stay look good."""
    sampled = [row for row in result["rows"] if row["temperature"] == 1]
    methods = {n: [row["method"] for row in sampled if row["batch"] == n] for n in (1, 2)}
    alone = ["plain", "hf_generate", "prompt_lookup", "tree", "tree_3", "hf_lookup", "suffix"]
    assert methods[1] == alone
    assert sorted(methods[2]) == sorted([*alone, "one_by_one"])
    for row in result["rows"]:
        assert len(row["prefill_seconds"]) == 2 and min(row["prefill_seconds"]) > 0
        assert row["method"] != "one_by_one" or row["identical"] == 3
    place = result["environment"]
    assert len(place["watched"]) == 6 and all(each["seconds"] > 0 for each in place["watched"])
    assert place["processor"] and place["torch"] and place["date"]
    assert result["settings"]["base_parameters"] > 1000


class Page(HTMLParser):
    """Collects what a page opens, closes, names and fetches."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note it."""
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "data") and not (value or "").startswith("#"):
                self.fetched.append(value or "")
            if "url(" in (value or "") and "url(#" not in (value or ""):
                self.fetched.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note it as closed."""
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        """Check that it closes what was opened last."""
        if tag != "meta":
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Keep the text."""
        self.text.append(data)


def test_the_report_is_one_file(folder: Path, result: dict[str, Any]) -> None:
    """A report that fetches its parts is empty in a mail, behind a wall, and in a year."""
    text = (folder / "bench.html").read_text()
    page = Page()
    page.feed(text)
    assert page.open == [] and page.fetched == []
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    assert "@import" not in text
    assert page.tags.count("svg") == 2  # speed, batches
    assert len(set(page.ids)) == len(page.ids), "pictures that share names draw each other's parts"
    shown = "".join(page.text)
    for row in result["rows"]:
        if row["batch"] == 1:
            assert f"{row['tokens_per_second']:.1f}" in shown
    assert result["environment"]["processor"] in shown
    assert "In batches, T=" in shown
    assert html_page(result) == text, "the same figures, the same file"


def test_the_report_opens_with_its_verdict(result: dict[str, Any]) -> None:
    """A page that hides below tables that copying was faster sells what was trained."""

    def row(method: str, drafter: str | None, heat: float, speed: float) -> dict[str, Any]:
        bounds = [speed - 0.1, speed + 0.1]
        numbers = {"temperature": heat, "speedup_vs_plain": speed, "speedup_vs_plain_ci95": bounds}
        return {"method": method, "drafter": drafter, "batch": 1, **numbers}

    rows = [
        row("tree", "heads", 1.0, 1.02),
        row("plain", None, 0.0, 1.0),
        row("tree", "heads", 0.0, 1.5),
        row("lossy_tree", "heads", 0.0, 9.0),
        row("suffix", "suffix", 0.0, 2.0),
    ]
    assert verdict(rows) == (
        "At T=0 suffix is fastest, 2.00x plain decoding's speed (95% 1.90-2.10), what is trained"
        " 1.50x (tree); at T=1 nothing is surely faster than plain decoding (tree: 1.02x,"
        " 95% 0.92-1.12)."
    )
    both = [row("tree", "heads", 0.0, 3.0), row("copies", "suffix+lookup", 0.0, 2.0)]
    assert verdict(both).endswith("(95% 2.90-3.10), copying alone 2.00x (copies).")
    text = html_page(result)
    assert (
        text.index(verdict(result["rows"]).split("'")[0]) < text.index("<svg") < text.index("<nav")
    )


def test_what_is_drawn_can_be_told_apart(result: dict[str, Any]) -> None:
    """Two methods of one colour are one method to a reader, and black on black is none."""
    row = next(each for each in result["rows"] if each["method"] == "tree" and each["batch"] == 1)
    rows = [{**row, "method": f"tree_{number}"} for number in range(24)]
    speed = draw({**result, "rows": rows})["speed"]
    filled = re.findall(r'<path d="[^"]*z\s*" clip-path[^>]*style="fill: (#\w+)', speed)
    assert len(filled) == len(set(filled)) == 24
    shown = draw(result)
    assert not any("#000000" in svg or "#ffffff" in svg for svg in shown.values())
    copying = {each["method"] for each in result["rows"] if only_copies(each)}
    assert copying == {"prompt_lookup", "hf_lookup", "suffix"}
    assert shown["speed"].count("<pattern") == len(copying)


def test_names_do_not_become_parts_of_the_report(result: dict[str, Any]) -> None:
    """A checkpoint's folder, an export's name and a prompt's kind are anybody's text."""
    bad = "<script>alert(1)</script>"
    rows = [
        {
            **row,
            "method": row["method"].replace("suffix", bad),
            "per_kind": {kind.replace("body", bad): of for kind, of in row["per_kind"].items()},
        }
        for row in result["rows"]
    ]
    settings = {**result["settings"], "checkpoint": bad}
    page = Page()
    page.feed(html_page({**result, "settings": settings, "rows": rows}))
    assert "script" not in page.tags and page.open == []
    assert "".join(page.text).count(bad) > 20


def test_what_disturbed_is_the_first_thing_said(result: dict[str, Any]) -> None:
    """Below the tables nobody reads that the machine was busy."""
    place = {**result["environment"], "baseline_drift": 1.5}
    titles = list(sections({**result, "environment": place}, {}))
    assert titles[:2] == ["Result", "Warnings"]
    quiet = {**result["environment"], "baseline_drift": 1.0, "largest_other_share": 0.0}
    quiet["other_share"] = 0.0
    assert "Warnings" not in sections({**result, "environment": quiet}, {})


@pytest.mark.parametrize(
    "name", ["tinycode_drafters", "tinycode_medusa2_batches", "mtp_byte/bench", "tinycode_hydra"]
)
def test_older_files_have_pages_too(name: str) -> None:
    """Figures that were measured before a column came can still be looked at."""
    older = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())
    page, text = Page(), html_page(older)
    page.feed(text)
    assert f"{older['headline']['speedup_vs_plain']:.2f}x plain decoding" in text
    assert page.open == [] and page.tags.count("svg") >= 1


def test_without_matplotlib_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour of measuring must not end in an import error."""
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name)
    )
    config = BenchConfig(checkpoint="nowhere", report=str(tmp_path / "bench.html"))
    with pytest.raises(ConfigError, match=r"bench\.html needs matplotlib.*specheads\[plots\]"):
        bench(config)


def test_the_card_gets_the_figures(folder: Path, result: dict[str, Any]) -> None:
    """A card that still says that nothing was measured, or has lost what its owner wrote."""
    text = (folder / "export" / card.CARD).read_text()
    measured = text[text.index(card.BEGIN) : text.index(card.END)]
    of = next(row for row in result["rows"] if (row["method"], row["temperature"]) == ("tree", 0.7))
    assert f"{of['tokens_per_second']:.1f}" in measured
    assert text.endswith("Written by hand.\n")


def test_a_card_without_a_place_is_refused_at_once(tmp_path: Path) -> None:
    """An hour of measuring must not end in a file that has no place for it."""
    with pytest.raises(ConfigError, match="card=true needs an export, tinycode is a base model"):
        bench(BenchConfig(checkpoint="tinycode", card=True))
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / card.CARD).write_text("# Mine\n")
    with pytest.raises(ConfigError, match="lacks the line"):
        bench(BenchConfig(checkpoint=str(folder), card=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"report": "bench.pdf"}, "report must be a file name with .html"),
        ({"steps": "steps.json"}, "steps must be a file name with .jsonl"),
        ({"report": "nowhere/bench.html"}, "report is nowhere/bench.html.*no folder nowhere"),
    ],
)
def test_wrong_names_of_files_are_refused(settings: dict[str, Any], message: str) -> None:
    """Whatever cannot be written is refused before it is measured."""
    with pytest.raises(ConfigError, match=message):
        bench(BenchConfig(checkpoint="nowhere", **settings))
