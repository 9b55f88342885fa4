"""What the bench of ZeRO measures, and the table that it prints for people without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specheads.training.plan import SPREADS, need
from tests.script_modules import load_script

DOCS = Path(__file__).parents[2] / "docs" / "scaling.md"
bench: Any = load_script("bench_zero")
costs: Any = load_script("zero_costs")
SIZES = {"hidden": 128, "intermediate": 300, "layers": 1, "vocab": 2048, "seq_len": 16}
SETTINGS = bench.Settings(**SIZES, bucket=1000, repeats=2)


def test_the_page_shows_what_the_model_says() -> None:
    """A table that was copied once sends people to machines by an older model."""
    assert bench.fits_table() in DOCS.read_text()


def test_the_table_says_what_stands_in_the_way() -> None:
    """A model that cannot be loaded, or has no room in main memory, does not fit."""
    lines = bench.fits_table().splitlines()
    cells = {
        tuple(c.strip() for c in line.split("|")[1:3]): line.split("|")[3:-1] for line in lines
    }
    head = [cell.strip() for cell in cells["base", "trained"]]
    full = dict(zip(head, (cell.strip() for cell in cells["7B", "full"]), strict=True))
    found = need(costs.load_of(costs.LLAMA_7B, "full", tokens=2048), SPREADS["zero0"], 8)
    assert full["zero0"] == f"{found.training / 1e9:.0f} x" and found.training > 80e9
    large = dict(zip(head, (cell.strip() for cell in cells["70B", "frozen"]), strict=True))
    assert large["zero2"].endswith(" x") and large["zero3"].isdigit()  # loaded piece by piece
    assert large["s/step"].endswith(" zero3")
    poor = costs.Machine("m", 400e9, 1, 1, 1, host_memory=1e9)
    assert " host " in bench.fits_table(poor)
    assert " x" not in bench.fits_table(costs.Machine("m", 2e12, 1, 1, 1, host_memory=1e12))


def test_plain_torch_holds_what_was_announced(tmp_path: Path) -> None:
    """A kind that is counted twice, or not at all, makes any prediction look right.

    Weights that an earlier test packed for oneDNN have no storage, and must not end the count.
    """
    left = torch.zeros(256, 256)
    if torch.backends.mkldnn.is_available():
        left = left.to_mkldnn()
    work = bench.Work(SETTINGS, "full", "none", str(tmp_path))
    work.open()
    alive: dict[str, int] = {}
    for _ in range(2):
        work.backward()
        alive = bench.live_tensors(work.engine, work.objective)
        work.engine.step(1.0)
    told = bench.predict(SETTINGS, "full", "none", None)
    # tensors of less than 64 kB are not told apart: the norms, Adam's step counts, and two tables
    # of rotary embeddings
    norms, tables = 4 * 3 * 128, 2 * 4 * 32
    assert alive["weights"] == told["weights"] - norms - tables
    assert alive["gradients"] == told["gradients"] - norms
    assert alive["moments"] == told["optimizer"] - 2 * norms
    assert alive["copied weights"] == 0
    del left  # kept until here, as the count walks over what is alive


def test_ratios_are_of_the_slowest_rank_and_the_largest() -> None:
    """A step is over when the last rank is, and memory runs out where most is needed."""
    alive = {"weights": 1, "moments": 2, "copied weights": 0, "gradients": 3, "other": 4}
    rows: list[dict[str, Any]] = [
        {
            "kind": "full",
            "stage": "zero1",
            "memory": [{"peak": 10, "alive": alive}, {"peak": 20, "alive": alive}],
            "times": [
                {
                    "seconds": [1.0, 4.0, 3.0],
                    "plain_seconds": 0.5,
                    "link_bytes_per_second": 1e9,
                    "adam_bytes_per_second": 1e9,
                },
                {
                    "seconds": [2.0, 2.0, 2.0],
                    "plain_seconds": 1.5,
                    "link_bytes_per_second": 3e9,
                    "adam_bytes_per_second": 3e9,
                },
            ],
        }
    ]
    machine = bench.speeds(SETTINGS, rows)
    assert (machine.link, machine.bandwidth) == (2e9, 2e9)
    told = bench.predict(SETTINGS, "full", "zero1", machine)
    assert told["seconds_computing"] == pytest.approx(1.0)  # the plain objective's own time
    bench.summarise(SETTINGS, rows)
    (row,) = rows
    assert (row["peak"], row["states"], row["seconds"]) == (20, 10, 3.0)
    assert row["peak_ratio"] == row["predicted"]["peak"] / 20
    assert row["seconds_ratio"] == row["predicted"]["seconds"] / 3.0


def test_storages_are_counted_once() -> None:
    """DeepSpeed's parameters are views of one flat tensor: each would count as all of it."""
    flat = torch.zeros(40_000)
    found = bench.storages([flat, flat[:100], flat.view(200, 200), None, torch.zeros(3)])
    assert list(found.values()) == [160_000]
