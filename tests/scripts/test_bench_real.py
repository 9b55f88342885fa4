"""``make bench-real``: nothing is measured twice, nothing quoted but against the faster rival."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from specheads.decoding import exported
from specheads.decoding.costs import StepCosts
from specheads.measure import bench
from tests.composed import composed
from tests.script_modules import ROOT, load_script

real: Any = load_script("bench_real")
show: Any = load_script("real")
render: Any = load_script("render")
GOLDEN = ROOT / "tests" / "golden" / "export"


def start(monkeypatch: pytest.MonkeyPatch, folder: Path, *more: str) -> list[str]:
    """Run the program on a tiny export; return what it asked of spec_bench."""
    asked: list[list[str]] = []
    words = [
        f"--checkpoint={GOLDEN}",
        f"--out={folder / 'out' / 'real'}",
        f"--work={folder / 'work'}",
    ]
    words += ["--num-questions=9", "--max-new-tokens=3", "--threads=1", *more]
    monkeypatch.setattr(real.harness, "run_command", lambda command: asked.append(command))
    monkeypatch.setattr("sys.argv", ["bench_real.py", *words])
    real.main()
    (command,) = asked
    return command


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], list[str]]:
    """Run the program, killed in the middle and gone on with; return turns taken and command."""
    folder = tmp_path_factory.mktemp("real")
    turns: list[str] = []
    turn = real.Part._clocked

    def clocked(part: Any, number: int) -> Any:
        if len(turns) == 20 and turns[-1] != "killed":
            turns.append("killed")
            raise KeyboardInterrupt
        turns.append(f"{part.name} {number}")
        return turn(part, number)

    def costs(_: Any, names: list[str], *__: Any, max_nodes: int) -> list[StepCosts]:
        return [StepCosts(0.1, [1.0] * (max_nodes + 1)) for _ in names]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exported, "member_costs", costs)
        patch.setattr(real.Part, "_clocked", clocked)
        with pytest.raises(KeyboardInterrupt):
            start(patch, folder)
        command = start(patch, folder, "--resume")
    return folder, turns, command


def test_what_was_answered_is_not_asked_again(
    measured: tuple[Path, list[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour that is measured twice is not measured at all."""
    folder, turns, _ = measured
    assert turns.count("killed") == 1 and len(turns) == len(set(turns))
    parts = {name.rsplit(" ", 1)[0] for name in turns if name != "killed"}
    assert parts == {"pace", "T=0", "T=1", "T=0.7", "float32", "same rounding"}
    assert all(f"{part} 8" in turns for part in parts - {"pace"})
    with pytest.raises(SystemExit, match="holds answers of"):
        start(monkeypatch, folder, "--resume", "--max-new-tokens=4")


def test_the_figures_are_those_of_all_questions(
    measured: tuple[Path, list[str], list[str]],
) -> None:
    """A method that lacks some questions, or a temperature, is faster for that reason."""
    folder, _, command = measured
    found = {path.stem: json.loads(path.read_text()) for path in (folder / "out/real").iterdir()}
    assert found.keys() == {"bench", "transformers", "identity", "float32"}
    bench, own = found["bench"], ["plain", "prompt_lookup", "tree", "suffix", "heads+suffix"]
    rows = [(row["temperature"], row["method"]) for row in bench["rows"]]
    few = [(0.7, name) for name in own[:3]]
    assert sorted(rows) == sorted([*((heat, name) for heat in (0, 1) for name in own), *few])
    for row in bench["rows"]:
        assert row["num_prompts"] == 9 and len(row["per_kind"]) == 8 and row["new_tokens"] <= 27
        assert row["identical"] is not None
        generate = bench["settings"]["generate_over_plain"][f"{row['temperature']:g}"]
        ratio = row["speedup_vs_plain"] / max(1.0, generate)
        assert row["speedup_vs_fastest"] == pytest.approx(ratio, abs=1e-3)
    theirs = [row for row in found["transformers"]["rows"] if row["method"].startswith("hf_")]
    heats = [(row["method"], row["temperature"]) for row in theirs]
    assert heats == [(n, t) for t in (0.0, 1.0) for n in ("hf_generate", "hf_lookup")] + [
        ("hf_generate", 0.7)
    ]
    assert [row["dtype"] for row in found["float32"]["rows"]] == ["float32", "float32"]
    exact = found["float32"]["rows"][1]
    assert exact["identical"] + exact["near_ties"] == exact["compared"] == 9
    assert found["identity"]["self_test_error"].keys() == {"bfloat16", "float32"}
    assert [of["compared"] for of in found["identity"]["plain_against_itself"]] == [9, 9]
    alike = found["identity"]["invariant"]
    assert alike["identical"] <= alike["compared"] == 9
    assert [of["other"] for of in alike["speed"]] == ["plain without", "tree without"]
    assert composed("spec_bench", command[2:]).max_new_tokens == 3
    lines = (folder / "work" / "few.jsonl").read_text().splitlines()
    assert len({json.loads(line)["kind"] for line in lines}) == 8
    read = render.reader(folder / "out")
    for mark in ("speeds real/bench", "kinds real/bench", "real_headline", "real_identity"):
        assert render.ABSENT not in render.rendered(mark, read)


def test_the_invariant_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Texts that are equal for another reason, or a price of nothing, would pass for the cure's."""
    asked: dict[bool, int] = {True: 0, False: 0}
    decode = bench.decode

    def noted(*args: Any, **settings: Any) -> Any:
        asked[settings["invariant"]] += 1
        return decode(*args, **settings)

    monkeypatch.setattr(bench, "decode", noted)
    monkeypatch.setattr(
        exported, "member_costs", lambda _, names, *__, **___: [StepCosts(0.1, [1.0] * 99)] * 2
    )
    given = real.Settings(checkpoint=str(GOLDEN), max_new_tokens=2)
    with real.Status(1.0) as status:
        one = real.Contestants.load(given, "float32", real.QUESTIONS, 1)
        real.invariant(one, tmp_path, status)
    assert asked == {True: 4, False: 4}  # two methods, and once more to warm up


def test_the_time_is_kept_to() -> None:
    """A part that takes what it likes ends after the night for which it was planned."""
    assert [real.affordable(left, 10.0, 24, 96) for left in (-5, 300, 500, 9000)] == [
        24,
        24,
        48,
        96,
    ]
    assert real.affordable(500, 10.0, 9, 9) == 9


def test_the_faster_rival_counts() -> None:
    """Where generate is faster than our plain loop, a speed-up over the latter flatters."""
    row = {"speedup_vs_plain": 2.0, "speedup_vs_plain_ci95": [1.8, 2.2]}
    rows = [{**row, "method": "tree", "temperature": heat} for heat in (0.0, 1.0)]
    bench = {"rows": rows, "settings": {}, "headline": {"method": "tree", "temperature": 0.0}}
    few = {
        "settings": {"num_prompts": 24},
        "rows": [
            {"method": "hf_generate", "temperature": heat, "speedup_vs_plain": ratio}
            for heat, ratio in ((0.0, 1.25), (1.0, 0.8))
        ],
    }
    real.against_the_fastest(bench, few)
    assert [each["speedup_vs_fastest"] for each in rows] == [1.6, 2.0]
    assert [each["speedup_vs_hf_generate"] for each in rows] == [1.6, 2.5]
    assert bench["headline"]["speedup_vs_fastest_ci95"] == [1.44, 1.76]


def test_the_commands_of_the_training_exist() -> None:
    """Settings that were renamed end the training of the shipped heads at its start."""
    parts = show.harness.read_parts(ROOT / "scripts" / "real.toml")
    assert [part.minutes for part in parts] == [show.LIMIT, show.LIMIT]
    for part in parts:
        (command,) = part.commands
        composed(command[1].removeprefix("specheads."), command[2:])
    assert parts[1].commands[0].count(f"data.path={parts[0].outputs[0]}") == 1


def test_its_lines_end_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever ran next in the process had lines about questions among what it wrote."""
    monkeypatch.setattr(real, "LINE_EVERY", 0.001)
    with pytest.raises(KeyboardInterrupt), real.Status(1.0) as status:
        while "loading" not in capsys.readouterr().out:
            time.sleep(0.001)
        raise KeyboardInterrupt
    assert not status._thread.is_alive()
