"""``python -m specheads.tree_search``: what it expects is what comes, on other prompts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from specheads import tree_search
from specheads.config import ConfigError, TreeSearchConfig
from specheads.drafters.contract import Drafter
from specheads.drafters.growing import Grown
from specheads.drafters.heads import HeadsDrafter
from specheads.measure import calibrate, clock
from specheads.measure.clock import read_prompts
from specheads.measure.hits import (
    Gains,
    Hits,
    Texts,
    collect_hits,
    decoded_gains,
    drafter_gains,
    fit_temperatures,
    grow_static,
    static_gains,
)
from specheads.models.base import end_tokens
from specheads.models.checkpoint import Export, load_export
from specheads.models.output import output_layer
from specheads.system.files import tinycode_dir

GOLDEN = Path(__file__).parents[1] / "golden" / "export"
NUM_NODES = 10
SETTINGS: dict[str, Any] = {"max_new_tokens": 48, "temperatures": (0.0, 1.0)}


@pytest.fixture(scope="module")
def golden() -> Export:
    """Return a small trained model with heads; not to be changed."""
    return load_export(GOLDEN, dtype="float32")


@pytest.fixture(scope="module")
def unseen(golden: Export) -> list[Tensor]:
    """Return prompts that the golden model was not trained on."""
    prompts, _ = read_prompts(
        tinycode_dir() / "prompts.jsonl",
        golden.tokenizer,
        96,
        max_length=700,
        device=torch.device("cpu"),
    )
    return [prompt.input_ids for prompt in prompts]


@pytest.fixture(scope="module")
def hits(golden: Export, unseen: list[Tensor]) -> list[list[Hits]]:
    """Return the hits on every other of them."""
    eos = end_tokens(golden.base, golden.tokenizer)
    output = output_layer(golden.base)
    return collect_hits(golden.base, golden.heads, output, Texts(unseen[::2], eos, **SETTINGS))


def measure(golden: Export, drafter: Drafter, prompts: list[Tensor]) -> Gains:
    """Decode the prompts."""
    texts = Texts(prompts, end_tokens(golden.base, golden.tokenizer), **SETTINGS)
    return decoded_gains(golden.base, drafter, texts, golden.heads.num_heads)


def grown(golden: Export, most: int, temperatures: list[float]) -> HeadsDrafter:
    """Return a drafter that grows trees at each step."""
    shape = Grown(most, temperatures=temperatures)
    return HeadsDrafter(golden.heads, output_layer(golden.base), shape)


@pytest.mark.parametrize("dynamic", [False, True])
def test_expected_accept_length_is_within_5_percent_of_the_measured_one(
    golden: Export, unseen: list[Tensor], hits: list[list[Hits]], dynamic: bool
) -> None:
    """A tree chosen for gains that never come; calibrated and measured on disjoint prompts.

    Multiplying hit rates over all positions overstates it by 20% here, since misses come close
    together and steps start behind them.
    """
    if dynamic:
        drafter = grown(golden, NUM_NODES, fit_temperatures(hits))
        expected = drafter_gains(hits, drafter).lengths()[-1]
    else:
        expected = static_gains(hits, NUM_NODES).lengths()[-1]
        shape = grow_static(hits, NUM_NODES)
        drafter = HeadsDrafter(golden.heads, output_layer(golden.base), shape)
    gains = measure(golden, drafter, unseen[1::2])
    (came,) = gains.lengths()
    assert came > 1.5
    assert abs(came / expected - 1) < 0.05
    low, high = gains.ci95(0)
    assert low < came < high < 1.25 * low


def test_measured_temperatures_pay_for_heads_too_sure_of_themselves(
    golden: Export, hits: list[list[Hits]]
) -> None:
    """The golden heads know their training texts by heart: as they say it, trees grow too deep."""
    temperatures = fit_temperatures(hits)
    assert min(temperatures) > 1.5
    scaled = drafter_gains(hits, grown(golden, 16, temperatures)).lengths()[-1]
    bare = drafter_gains(hits, grown(golden, 16, [1.0] * len(temperatures))).lengths()[-1]
    assert scaled > 1.08 * bare


def search(checkpoint: Path, **settings: Any) -> None:
    """Run the command in this process."""
    values = {"max_new_tokens": 16, "max_nodes": 6, "repeats": 1, "dtype": "float32", "threads": 1}
    tree_search.run(TreeSearchConfig(checkpoint=str(checkpoint), **{**values, **settings}))


def test_the_command_saves_prints_and_draws(
    tiny_export: Path,
    prompt_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A figure that is printed and not saved, or saved for prompts that were calibrated on."""
    cost = 0.5

    def fake_clock(base: Any, drafters: list[Any], ids: Any, *, repeats: int, **_: Any) -> Any:
        return [[0.001] * repeats, *[[0.001 * cost] * repeats for _ in drafters[1:]]], []

    monkeypatch.setattr(calibrate, "clock_steps", fake_clock)
    out = prompt_file.with_name("picture.svg")
    search(tiny_export, prompts=str(prompt_file), num_prompts=4, num_measured=9, out=str(out))
    export = load_export(tiny_export)  # checks the manifest
    section = export.config["tree"]["measured_on"]
    printed = capsys.readouterr().out
    assert section["num_prompts"] == 4 and section["measured"]["num_prompts"] == 2
    for kind in ("static", "dynamic"):
        came = section["measured"][kind]
        expected = (section if kind == "static" else section["dynamic"])["accept_length"]
        assert came["relative_to_expected"] == pytest.approx(
            came["accept_length"] / expected - 1, abs=1e-3
        )
        low, high = came["accept_length_ci95"]
        assert f"{came['accept_length']:.2f} (95%: {low:.2f} to {high:.2f})" in printed
    assert section["speculate"] and "do not speculate" not in printed
    assert len(section["acceptance"]) == len(export.tree.choices)
    assert ElementTree.parse(out).getroot().tag.endswith("svg")
    assert "└─" in printed and "tree grown at each step" in printed

    cost = 4.0
    search(tiny_export, prompts=str(prompt_file))  # six prompts: none is left to measure
    printed = capsys.readouterr().out
    section = load_export(tiny_export).config["tree"]["measured_on"]
    assert section["speculate"] is False and section["speedup"] < 1
    assert "do not speculate here" in printed and "not measured on other prompts" in printed
    assert "measured" not in section
    assert (tiny_export / "tree.svg").is_file()


def test_no_prompt_is_calibrated_and_measured_on(
    tiny_export: Path, prompt_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy under another name would make the expectation look better than it is."""
    folder = prompt_file.with_name("copied")
    shutil.copytree(tiny_export, folder)
    export = load_export(folder)
    records = [json.loads(line) for line in prompt_file.read_text().splitlines()]
    other = folder / "prompts.jsonl"
    copies = [{**record, "id": f"copy of {record['id']}"} for record in records[:2]]
    new = {"id": "new", "kind": "body", "prompt": "def g():\n", "completion": "pass"}
    other.write_text("".join(json.dumps(record) + "\n" for record in [*copies, new]))
    shutil.copy(prompt_file, folder / "calibration.jsonl")
    config = TreeSearchConfig(checkpoint=str(folder))
    calibration, measured = clock.two_sets(config, config.checkpoint, export.base, export.tokenizer)
    assert [prompt.id for prompt in measured] == ["new"]
    assert len(calibration) == 6
    assert "2 prompts" in capsys.readouterr().out
    other.write_text("".join(json.dumps(record) + "\n" for record in copies))
    with pytest.raises(ConfigError, match="no prompt but those that are calibrated on"):
        clock.two_sets(config, config.checkpoint, export.base, export.tokenizer)


def test_the_embedded_prompt_files_share_no_prompt(tiny_export: Path) -> None:
    """Every published expectation is calibrated on one of them and measured on the other."""
    export = load_export(tiny_export)
    config = TreeSearchConfig(checkpoint=str(tiny_export), num_prompts=999, num_measured=999)
    calibration, measured = clock.two_sets(config, config.checkpoint, export.base, export.tokenizer)
    texts = [{tuple(p.input_ids[0].tolist()) for p in each} for each in (calibration, measured)]
    assert len(texts[0]) >= 8 and len(texts[1]) >= 16  # those that fit the tiny context
    assert not texts[0] & texts[1]


def test_a_missing_folder_is_named_before_measuring(tiny_export: Path) -> None:
    """Minutes of measuring, and then no file."""
    with pytest.raises(ConfigError, match="no folder nowhere"):
        search(tiny_export, out="nowhere/tree.svg")


@pytest.mark.parametrize(
    ("static", "dynamic", "advice"),
    [
        (1.5, 1.4, None),
        (
            1.2,
            1.5,
            "trees grown at each step are expected to be 1.25x as fast here: "
            "decode.tree=auto, the default, takes them",
        ),
        (0.9, 1.1, "do not speculate here with the static tree, but with trees of each step"),
        (0.9, 0.95, "do not speculate here: the fastest tree is expected at 0.95x plain decoding"),
    ],
)
def test_the_advice_is_for_the_faster_of_both(
    static: float, dynamic: float, advice: str | None
) -> None:
    """Users told not to speculate where one kind of tree pays, or to where none does."""
    kind = {"num_nodes": 4, "accept_length": 1.5, "accept_length_ci95": [1.4, 1.6], "sizes": []}
    found = {**kind, "speedup": static, "dynamic": {**kind, "speedup": dynamic}}
    last = calibrate.format_calibration(found, 3).split("\n")[-1]
    assert last == (advice or "not measured on other prompts: none were given")
    found["plain_step_drift"] = 1.4
    assert "The machine was busy" in calibrate.format_calibration(found, 3)
