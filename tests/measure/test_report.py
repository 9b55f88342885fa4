"""Interleaving, batches, rows, the rule of the headline, and what fails a run."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from specheads.decoding.result import DecodedRow
from specheads.measure.bench import Contest, Plan, benchmark
from specheads.measure.clock import Batch, Method, Prompt, Runs, clock, make_batches
from specheads.measure.identity import Divergence
from specheads.measure.render import (
    TEXT_COLUMNS,
    crossover_lines,
    disturbance_lines,
    format_divergences,
    kinds_table,
    make_table,
)
from specheads.measure.rows import (
    baseline_drift,
    crossovers,
    disturbance,
    failures,
    format_pairs,
    headline,
    make_row,
    pairs,
    rivals,
    versus,
)


def method(name: str, log: list[str], length: int = 1) -> Method:
    """Return a method that notes when it was called and gains ``length`` tokens per step."""

    def run(batch: Batch, temperature: float, seed: int, *prefill: int) -> list[DecodedRow]:
        log.append(f"{name}{'*' * len(prefill)}{int(batch.input_ids[0, -1])}@{seed}")
        text = DecodedRow(list(range(13)), [length] * (12 // length))
        return [text] * len(batch.input_ids)

    return Method(name, run, drafter="heads" if length > 1 else None)


def prompts() -> list[Prompt]:
    """Return three prompts of two kinds."""
    return [Prompt(str(i), "ab"[i % 2], torch.tensor([[i]])) for i in range(3)]


def test_methods_take_turns_per_prompt() -> None:
    """Measured one after the other, a slow minute of the machine falls on one method alone."""
    log: list[str] = []
    runs = clock([method("x", log), method("y", log)], prompts(), 0.0, repeats=2, seed=5)
    clocked = log[4:]  # after two warm-up texts per method
    assert clocked[:6] == ["x0@5", "y0@5", "y1@6", "x1@6", "x2@7", "y2@7"]
    assert clocked[6:8] == ["y0@5", "x0@5"], "the order must change from repeat to repeat"
    assert len(clocked) == 12
    assert [len(each) for each in runs["x"].seconds] == [3, 3]
    assert len(runs["y"].decoded) == 3


def test_batches_keep_order_and_seeds() -> None:
    """With the seeds of other prompts, no row of a batch is what the prompt gives alone."""
    log: list[str] = []
    ticks: list[int] = []
    runs = clock(
        [method("x", log)],
        prompts(),
        1.0,
        repeats=1,
        batch_size=2,
        seed=5,
        tick=lambda: ticks.append(1),
    )["x"]
    assert log[2:] == ["x0@5", "x2@7"]
    assert [len(each) for each in runs.seconds] == [2] and len(runs.decoded) == 3
    assert runs.batches == [range(2), range(2, 3)] and len(ticks) == 3


def test_batches_are_padded_on_the_left() -> None:
    """Padding behind a prompt would become part of the text that is continued."""
    uneven = [Prompt(str(n), "a", torch.arange(1, n + 1)[None]) for n in (3, 1, 2)]
    first, second = make_batches(uneven, 2)
    assert first.input_ids.tolist() == [[1, 2, 3], [0, 0, 1]]
    assert first.attention_mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert second.input_ids.tolist() == [[1, 2]] and second.first == 2


def test_every_method_continues_a_batch_as_its_prompts(tiny_llama: LlamaForCausalLM) -> None:
    """Tokens of padding, or behind a row's end, would be counted as speed."""
    uneven = [Prompt(str(n), "a", torch.randint(0, 256, (1, n))) for n in (7, 3, 5)]
    (batch,) = make_batches(uneven, 3)
    alone = [make_batches([prompt], 1)[0] for prompt in uneven]
    plain = Contest(tiny_llama, (), 256, 12).ours()
    eos = (plain.decode(alone[1], 0.0, 0)[0].new_tokens[4],)  # ends one row before the others
    contest = Contest(tiny_llama, eos, 256, 12)
    for each in (contest.ours(), contest.generate()):
        together = each.decode(batch, 0.0, 0)
        assert together == [each.decode(one, 0.0, 0)[0] for one in alone], each.name
        assert together[1].finished and len(together[1].new_tokens) <= 5
        assert any(not row.finished for row in together), "rows must end apart"
    plain_drawn = plain.decode(batch, 1.0, 9)
    assert plain_drawn == [plain.decode(one, 1.0, 9 + i)[0] for i, one in enumerate(alone)]


def rows(runs: dict[str, Runs], log: list[str]) -> list[dict[str, Any]]:
    """Return rows of a plain, a generate and a tree method."""
    methods = [method("plain", log), method("hf_generate", log), method("tree", log, 4)]
    return [
        make_row(each, runs, prompts(), 0.0, None, dtype="float32", device="cpu")
        for each in methods
    ]


def test_rows_hold_ratios_of_medians() -> None:
    """Means over repeats would let one disturbed repeat make or break a speed-up."""
    text = DecodedRow(list(range(13)), [1] * 12)
    tree = DecodedRow(list(range(13)), [4] * 3, num_replays=2, num_replay_passes=9)
    runs = {
        "plain": Runs([[3.0] * 3, [30.0, 3.0, 3.0], [3.0] * 3], [text] * 3),
        "hf_generate": Runs([[6.0] * 3] * 3, [text] * 3),
        "tree": Runs([[1.0] * 3, [1.0, 9.0, 1.0], [1.0] * 3], [tree] * 3),
    }
    found = rows(runs, [])
    row = found[2]
    assert row["speedup_vs_plain"] == pytest.approx(3)
    assert row["speedup_vs_plain_ci95"] == pytest.approx([3, 3])
    assert row["speedup_vs_hf_generate"] == pytest.approx(6)
    assert row["accept_length"] == 4 and found[0]["accept_length"] == 1
    assert row["seconds"] == [3, 11, 3] and row["new_tokens"] == 39
    assert (row["num_replays"], row["num_replay_passes"]) == (6, 27), "time that no step took"
    assert row["identical"] is None and row["compared"] == 0
    assert row["per_kind"]["a"]["num_prompts"] == 2
    assert baseline_drift(runs["plain"]) == 4
    assert "3.00x" in make_table(found, TEXT_COLUMNS).text()
    assert "4.00 (3.00x)" in kinds_table(found).text()


def test_rows_of_batches_count_their_prompts() -> None:
    """Seconds of a batch divided among its prompts would make up a speed per kind."""
    text = DecodedRow(list(range(13)), [1] * 12)
    short = DecodedRow([1], [], finished=True)
    runs = {
        name: Runs([[2.0, 1.0]], [text, short, text], batch_size=2)
        for name in ("plain", "hf_generate", "tree")
    }
    row = rows(runs, [])[0]
    assert row["batch"] == 2 and row["new_tokens"] == 27
    assert row["tokens_per_second"] == pytest.approx(9)
    assert row["per_kind"]["b"] == {
        "num_prompts": 1,
        "tokens_per_second": None,
        "speedup_vs_plain": None,
        "speedup_vs_plain_ci95": None,
        "accept_length": 0,
        "rep8": 0,
    }
    assert row["accept_length"] == 1


def test_crossover_is_found_per_method_and_temperature() -> None:
    """Naming the wrong batch sends users to the slower decoder."""
    speedups = {("tree", 0.0): [1.8, 1.2, 0.8], ("tree", 1.0): [1.5, 1.4, 1.1]}
    bench = [
        {
            "method": name,
            "drafter": "heads",
            "temperature": temperature,
            "batch": batch,
            "speedup_vs_plain": speedup,
            "tokens_per_second": 100 * speedup,
        }
        for (name, temperature), series in speedups.items()
        for batch, speedup in zip((1, 2, 4), series, strict=True)
    ]
    plain = [{**row, "method": "plain", "drafter": None, "speedup_vs_plain": 1.0} for row in bench]
    first, second = crossovers([*plain, *bench])
    assert (first["temperature"], first["batch"]) == (0.0, 4)
    assert (second["batch"], second["largest_measured"]) == (None, 4)
    table = crossover_lines(bench)
    assert "tree at T=0: no faster than plain decoding from batch 4" in table
    assert "tree at T=1: faster than plain decoding up to batch 4" in table


def test_failures_name_prompt_position_margin_and_limit() -> None:
    """A run that fails without saying where has to be run again."""
    found = [
        Divergence("body-1", 7, 3, 5, 0.01, 0.02, near_tie=True),
        Divergence("body-2", 9, 3, 6, 0.75, 0.5, near_tie=False),
        Divergence("edit-1", 2, None, 6, None, None, near_tie=False),
    ]
    text = DecodedRow(list(range(13)), [1] * 12)
    runs = {name: Runs([[1.0] * 3], [text] * 3) for name in ("plain", "hf_generate")}
    row = make_row(method("plain", []), runs, prompts(), 0.7, found, dtype="bfloat16", device="cpu")
    assert (row["identical"], row["compared"], row["near_ties"]) == (0, 3, 1)
    noise = {"shape": 0.25, "dtype": 0.375, "typical_shape": 0.0625, "num_positions": 99}
    result = {"settings": {"noise": noise}, "rows": [row]}
    first, second = failures(result)
    for part in ("T=0.7", "batch 1", "body-2", "token 9", "0.50000", "0.25000", "0.75000"):
        assert part in first
    assert "edit-1" in second and "ended" in second
    table = format_divergences(result).splitlines()
    assert table[-3].split()[-4:] == ["0.02000", "0.01000", "near-tie", "body-1"]
    assert "NOT ROUNDING" in table[-2] and "text ended" in table[-1]


@pytest.mark.parametrize("wrong", [False, True])
def test_a_wrong_decoder_is_found_in_any_batch(tiny_llama: LlamaForCausalLM, wrong: bool) -> None:
    """Rows compared with those of another prompt, or not at all, let a broken batch pass."""
    contest = Contest(tiny_llama.bfloat16(), (), 256, 6)
    plain = contest.ours()

    def decode(batch: Batch, temperature: float, seed: int, *prefill: int) -> list[DecodedRow]:
        decoded = plain.decode(batch, temperature, seed, *prefill)
        if wrong and len(decoded) == 2 and not prefill:
            decoded[1].new_tokens[3] = (decoded[1].new_tokens[3] + 11) % 256
        return decoded

    methods = [
        Method("plain", decode),
        contest.generate(),
        Method("tree", decode, "scripted", tree_nodes=4),
    ]
    asked = [Prompt(f"p{n}", "a", torch.randint(0, 256, (1, n))) for n in (4, 6, 5)]
    result, _ = benchmark(tiny_llama, methods, asked, Plan((0.0, 0.7), 1, (1, 2)))
    assert [row["batch"] for row in result["rows"]] == [1] * 3 + [2] * 3 + [1] * 3 + [2] * 3
    found = failures(result)
    # plain decoding is no measure of itself: a batch of it is held to its prompts alone
    assert len(found) == (4 if wrong else 0)
    if wrong:
        assert found[1].startswith("tree at T=0, batch 2: prompt p6 differs from plain decoding")
        assert "at new token 3 " in found[1] and "p6" in format_divergences(result)
        assert result["settings"]["noise"]["widths"] == (2, 4, 6)


@pytest.mark.parametrize("rep8,temperature", [(0.24, 0.0), (0.26, 0.7)])
def test_headline_leaves_greedy_where_it_loops(rep8: float, temperature: float) -> None:
    """Loops are easy to draft: a headline at T=0 would then measure the base's weakness."""
    row: dict[str, Any] = dict.fromkeys(
        (
            "speedup_vs_plain",
            "speedup_vs_plain_ci95",
            "speedup_vs_hf_generate",
            "accept_length",
            "accept_length_ci95",
            "identical",
            "compared",
            "near_ties",
        )
    )
    both = [
        {"method": name, "temperature": t, "batch": batch, "rep8": rep8 if batch == 1 else 0, **row}
        for batch in (1, 2)
        for name in ("plain", "tree")
        for t in (0.0, 0.7)
    ]
    assert headline(both)["temperature"] == temperature


def test_headline_needs_its_rows() -> None:
    """Falling back to the temperature that was measured would quote the wrong figure."""
    rows = [{"method": "plain", "temperature": 0.0, "batch": 1, "rep8": 0.5}]
    with pytest.raises(ValueError, match="0.7"):
        headline(rows)


def test_decoding_is_what_the_prefill_leaves() -> None:
    """With the prefill in it, a speed-up of long prompts and short answers says nothing of steps.

    The two are clocked after each other, so each repeat's own prefill is taken off it.
    """
    text = DecodedRow(list(range(13)), [1] * 12)
    tree = DecodedRow(list(range(13)), [4] * 3)
    runs = {
        "plain": Runs([[7.0] * 3], [text] * 3, prefill=[[1.0] * 3]),
        "hf_generate": Runs([[7.0] * 3], [text] * 3),
        # a slow moment in which both took three times as long
        "tree": Runs(
            [[4.0] * 3, [12.0] * 3, [4.0] * 3],
            [tree] * 3,
            prefill=[[2.0] * 3, [6.0] * 3, [2.0] * 3],
        ),
    }
    plain, hf, row = rows(runs, [])
    assert plain["prefill_seconds"] == [3] and row["prefill_seconds"] == [6, 18, 6]
    # twelve tokens of each text come after the prefill, in six seconds and in two
    assert plain["decode_tokens_per_second"] == pytest.approx(2)
    assert row["decode_tokens_per_second"] == pytest.approx(6)
    assert row["decode_speedup_vs_plain"] == pytest.approx(3)
    assert row["decode_speedup_vs_plain_ci95"] == pytest.approx([3, 3])
    assert row["speedup_vs_plain"] == pytest.approx(7 / 4)
    assert row["accept_lengths"] == {"4": 9} and plain["accept_lengths"] == {"1": 36}
    assert hf["prefill_seconds"] == [] and hf["decode_tokens_per_second"] is None
    assert hf["decode_speedup_vs_plain"] is None, "unknown, not equal"


def test_prefills_are_clocked_in_turn_where_asked() -> None:
    """Clocked beforehand, they would meet another machine than the decoding they are taken from."""
    log: list[str] = []
    both = [method("x", log), method("y", log)]
    runs = clock(both, prompts(), 0.0, repeats=2, prefill=True)
    assert log[4:10] == ["x*0@0", "x0@0", "y*0@0", "y0@0", "y*1@1", "y1@1"]
    assert [len(each) for each in runs["x"].prefill] == [3, 3]
    log.clear()
    assert clock(both, prompts(), 0.0, repeats=1)["x"].prefill == []
    assert not any("*" in entry for entry in log), "training decodes too, and pays for every pass"


def test_without_a_batch_there_is_no_one_by_one(tiny_llama: LlamaForCausalLM) -> None:
    """A baseline of batches that read padding, or drew with other seeds, is no baseline."""
    contest = Contest(tiny_llama, (), 256, 6)
    plain, alone = contest.ours(), contest.one_by_one()
    asked = [Prompt(f"p{n}", "a", torch.randint(0, 256, (1, n))) for n in (4, 6, 5)]
    for size in (1, 2):
        runs = clock([plain, alone], asked, 0.7, repeats=1, batch_size=size)
        assert ("one_by_one" in runs) == (size > 1)
        if size > 1:
            assert runs["one_by_one"].decoded == runs["plain"].decoded
        assert runs["plain"].started is not None, "when the warm-up was over"
    (first,) = alone.decode(make_batches(asked[:1], 2)[0], 0.0, 0, 1)
    assert len(first.new_tokens) == 1, "the prefill"


def watched(share: float | None, drift: float = 1.0, batch: int = 1) -> dict[str, Any]:
    """Return what was seen of others during one batch size."""
    return {
        "temperature": 0.7,
        "batch": batch,
        "drift": drift,
        "seconds": 2.0 * batch,
        "other_share": share,
    }


@pytest.mark.parametrize(
    ("seen", "contended", "line"),
    [
        ([watched(0.02), watched(0.04, batch=2)], False, None),
        ([watched(0.02, batch=8), watched(0.35, batch=2)], True, "35% of the processors .*batch 2"),
        ([watched(0.02, drift=1.3)], True, "1.30x between repeats"),
        ([watched(None)], False, "unknown"),
    ],
)
def test_other_work_is_said(seen: list[dict[str, Any]], contended: bool, line: str | None) -> None:
    """A mean over all sizes hides the minute in which something else ran."""
    found = disturbance(seen)
    assert found["contended"] is contended
    lines = disturbance_lines({"environment": found, "settings": {"repeats": 2}})
    assert len(lines) == (line is not None)
    if line is not None:
        assert re.search(line, lines[0])
    once = disturbance_lines({"environment": found, "settings": {"repeats": 1}})
    assert len(once) == len(lines) + 1 and "One repeat" in once[-1]


def test_shares_are_weighed_by_their_time() -> None:
    """Short quiet parts must not make up for a long busy one."""
    found = disturbance([watched(0.3, batch=3), watched(0.0)])
    assert found["other_share"] == 0.225 and found["largest_other_share"] == 0.3


def runs_of(seconds: list[list[float]], lengths: list[int]) -> Runs:
    """Return runs of prompts that got so many tokens."""
    return Runs(seconds, [DecodedRow([1] * n, [n - 1]) for n in lengths])


def test_the_ratio_is_of_tokens_per_second() -> None:
    """Prevents a faster method that is one because its sampled texts were shorter."""
    runs = {
        "draft": runs_of([[1.0, 2.0], [9.0, 2.0], [1.0, 2.0]], [10, 20]),
        "hf_assisted": runs_of([[2.0, 4.0]], [5, 10]),
    }
    found = versus(runs, "draft", "hf_assisted")
    assert found["speedup"] == (30 / 3) / (15 / 6) == 4.0
    assert found["ci95"] == [4.0, 4.0], "the prompts are alike"


def test_merged_drafters_meet_their_members_under_the_names_they_have_alone() -> None:
    """Prevents a hybrid that is only compared with the weaker of its members."""
    names = [
        "plain",
        "prompt_lookup",
        "tree",
        "tree_dynamic",
        "suffix",
        "heads+suffix",
        "hf_lookup",
    ]
    assert rivals(names) == [
        ("prompt_lookup", "hf_lookup"),
        ("suffix", "hf_lookup"),
        ("heads+suffix", "tree"),
        ("heads+suffix", "tree_dynamic"),
        ("heads+suffix", "suffix"),
    ]
    speeds = {"tree": 2.0, "suffix": 1.0, "heads+suffix": 0.5}
    clocked = {(0.0, 1): {name: runs_of([[s, s]], [8, 8]) for name, s in speeds.items()}}
    found = pairs(clocked)
    assert [(row["other"], row["speedup"], row["best_member"]) for row in found] == [
        ("tree", 4.0, False),
        ("suffix", 2.0, True),
    ]
    assert "heads+suffix is 2.00x (2.00-2.00) as fast as suffix, its best member" in format_pairs(
        found
    )
