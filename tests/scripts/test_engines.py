"""What ``make test-engines`` says of an engine's texts and steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specheads.attention.tree import Tree
from specheads.config import HeadsConfig
from specheads.decoding.result import DecodedRow
from specheads.models.base import load_base_model, load_tokenizer
from specheads.models.checkpoint import KINDS as HEADS
from specheads.models.checkpoint import load_export, origin, save_export
from specheads.models.output import output_layer
from tests.script_modules import load_script

bench_engines: Any = load_script("bench_engines")
engines: Any = load_script("engines")
run_llamacpp: Any = load_script("run_llamacpp")
run_openvino: Any = load_script("run_openvino")

TEXTS = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 1]]
STEPS = [2, 1, 2, 2]


def run(texts: list[list[int]] = TEXTS, steps: list[int] = STEPS) -> dict[str, Any]:
    """Return what an engine gave one by one and together."""
    one = {"texts": texts, "steps": steps, "accepted": [3, 1], "seconds": [0.5] * len(texts)}
    return {"version": "0", "runs": {"1": one, "16": {**one, "texts": list(texts)}}}


def said(theirs: dict[str, Any], own: dict[str, Any] | None = None, **more: Any) -> Any:
    """Return what is said, beside our chain."""
    given = {"expected": TEXTS, "most": 1, "plain": run()} | more
    own = own or {"texts": TEXTS, "steps": STEPS, "accepted": [3, 1]}
    return engines.judged(theirs, own, **given)


def test_what_is_as_it_should_be_does_not_fail() -> None:
    """A judge that fails at everything is switched off."""
    found = said(run())
    assert found["failed"] == [] and found["steps"] == found["our_steps"] == 7
    assert found["steps_of_agreeing"] == [7, 7]


def test_one_step_more_fails() -> None:
    """Heads that are shifted by one, or read the wrong layer, change no text: steps alone tell."""
    assert said(run(steps=[2, 2, 2, 2]))["failed"] == [
        "its verify steps are not those of our chain"
    ]
    # more on one text and fewer on another is no agreement
    assert said(run(steps=[1, 2, 2, 2]))["failed"]


def test_a_drafter_that_is_never_right_fails() -> None:
    """Without one accepted guess any engine takes as many steps, also one that reads it wrongly."""
    steps = [len(text) - 1 for text in TEXTS]
    never = {"texts": TEXTS, "steps": steps, "accepted": [0, 0]}
    (problem,) = said(run(steps=steps), never)["failed"]
    assert "train longer" in problem


def test_texts_that_differ_are_no_matter_of_steps() -> None:
    """A near-tie makes another text, whose steps are its own."""
    other = [*TEXTS[:3], [1, 1, 2]]
    found = said(run(other, [*STEPS[:3], 9]), plain=run(other))
    assert found["failed"] == [] and found["as_transformers"] == 3
    assert found["steps_of_agreeing"] == [5, 5]
    worse = [*TEXTS[:2], [7, 8, 8], [1, 1, 2]]
    assert said(run(worse), plain=run(worse))["failed"] == [
        "too many texts differ from transformers'"
    ]


@pytest.mark.parametrize("where", ["alone", "together"])
def test_an_engine_that_writes_otherwise_with_speculation_fails(where: str) -> None:
    """An engine whose verification is wrong serves texts that its model would not write."""
    theirs = run()
    theirs["runs"]["1" if where == "alone" else "16"]["texts"] = [*TEXTS[:3], [1, 1, 2]]
    problem = {
        "alone": "texts differ from its own without speculation",
        "together": "texts of 16 together differ from those of one alone",
    }
    assert problem[where] in said(theirs)["failed"]


def test_accepted_guesses_are_counted_by_their_place() -> None:
    """Positions that are counted from one shift every figure of the table."""
    rows = [DecodedRow(accept_lengths=[3, 1]), DecodedRow(accept_lengths=[2])]
    assert engines.accepted_per_position(rows, 3) == [2, 1, 0]


def test_a_base_in_four_bits_is_held_to_our_shares() -> None:
    """Rounding makes other texts there, and heads that read the wrong layer would pass for it."""
    own = {"texts": TEXTS, "steps": [25] * 4, "accepted": [50, 20]}
    theirs = run([[*text, 0] for text in TEXTS], steps=[50] * 4)
    for accepted, fails in (([103, 45], False), ([110, 45], True)):
        theirs["runs"]["1"]["accepted"] = accepted
        found = said(theirs, own, plain=run([[*text, 0] for text in TEXTS]), exact=False)
        assert bool(found["failed"]) == fails


def test_requests_that_come_and_go_get_their_texts() -> None:
    """A request that got its neighbour's text, or half of its own, is a wrong answer."""
    asked = [
        {"prompt": 0, "limit": 2, "step": 0, "abort": 0},
        {"prompt": 3, "limit": 3, "step": 0, "abort": 2},
        {"prompt": 1, "limit": 9, "step": 4, "abort": 7},  # the text ends before it is aborted
    ]
    right = [[1, 2], [1, 1, 1], [4, 5, 6]]
    assert engines.as_asked(right, asked, TEXTS) == 3
    for number, text in ((0, [1]), (0, [1, 2, 3]), (0, [1, 3]), (1, [1]), (1, [7, 8]), (2, [4, 5])):
        assert engines.as_asked([*right[:number], text, *right[number + 1 :]], asked, TEXTS) == 2
    drawn = engines.requests(48, 64)
    assert len(drawn) == engines.REQUESTS and 20 < sum(each["abort"] > 0 for each in drawn) < 60


def test_steps_are_read_from_the_log() -> None:
    """Guesses behind a text's end, and steps without guesses, are counted by one side alone."""
    launched = "".join(
        f"slot launch_slot_: id  0 | task {task} | processing task, is_child = 0\n"
        for task in (0, 7, 9, 11)
    )
    log = launched + (
        "slot update_slots: id  0 | task 7 | accepted  2/ 5 draft tokens\n"
        "slot update_slots: id  0 | task 11 | accepted  0/ 5 draft tokens\n"
        "slot update_slots: id  0 | task 7 | accepted  4/ 5 draft tokens\n"
        "slot update_slots: id  0 | task 11 | accepted  1/ 2 draft tokens\n"
    )
    # seven tokens, of which the prompt's pass gave one; a last step of one token without guesses,
    # and a text that nothing was guessed in, as n-gram copies often do not
    steps = [[3, 3], [1, 1], [1, 2, 1]]
    assert run_llamacpp.lengths_of(log, [[0] * 7, [0] * 3, [0] * 5]) == steps
    with pytest.raises(ValueError, match="the log has 4 texts, expected 5"):
        run_llamacpp.lengths_of(log, [[0] * 7] * 5)
    with pytest.raises(ValueError, match="expected 1"):  # another text's steps
        run_llamacpp.lengths_of(log, [[0] * 7])


def exported(folder: Path, tiny_model_dir: Path, wanted: HeadsConfig) -> Any:
    """Save block heads that were not trained; return them."""
    base = load_base_model(str(tiny_model_dir), dtype="float32")
    heads = HEADS["block"].from_settings(wanted, base, output_layer(base))
    tree, info = Tree.chain(3), origin(str(tiny_model_dir), {"recipe": "dflash"})
    save_export(folder, heads, load_tokenizer(str(tiny_model_dir)), tree, info)
    return heads


def test_widened_heads_guess_among_all_tokens(tiny_model_dir: Path, tmp_path: Path) -> None:
    """llama.cpp is given all tokens; a copy with fewer would be another draft than ours."""
    wanted = HeadsConfig("block", {"form": "published"}, 3, 2, "shared_pruned", num_kept=100)
    exported(tmp_path / "export", tiny_model_dir, wanted)
    wide: Any = load_export(engines.widened(tmp_path / "export")).heads
    assert wide.num_outputs == wide.vocab_size and wide.token_map is None


def test_levelled_heads_have_one_norm_and_load(tiny_model_dir: Path, tmp_path: Path) -> None:
    """A copy that kept its norms, or the old manifest, would fail in vLLM or here."""
    wanted = HeadsConfig("block", {"form": "published"}, 3, 2, "shared")
    heads = exported(tmp_path / "first", tiny_model_dir, wanted)
    heads.layers[1].self_attn["k_norm"].weight.data.fill_(2.0)
    info = origin(str(tiny_model_dir), {"recipe": "dflash"})
    tokenizer = load_tokenizer(str(tiny_model_dir))
    save_export(tmp_path / "export", heads, tokenizer, Tree.chain(3), info)
    level: Any = load_export(engines.level(tmp_path / "export")).heads
    norms = [layer.self_attn["k_norm"].weight for layer in level.layers]
    assert norms[1].equal(norms[0]) and not norms[1].eq(2.0).any()


def test_passes_of_openvino_are_steps_up_to_the_end_of_a_text() -> None:
    """What it accepts behind an end would stand beside a chain that stops there."""
    assert run_openvino.lengths_of([1, 3, 1, 6], list(range(8))) == [3, 1, 3]
    assert run_openvino.lengths_of([1, 7, 5], list(range(8))) == [7]
    assert run_openvino.lengths_of([1], [258]) == []


def test_gains_of_engines_are_of_tokens_over_time() -> None:
    """Of seconds alone, an engine whose text ends early is fast; a batch has no prompts to draw."""
    alone, way = TEXTS, bench_engines.Way("vllm", "vLLM", "draft", dict)

    def round_of(seconds: float, texts: list[list[int]] = alone) -> dict[str, Any]:
        each = {"texts": texts, "seconds": [seconds] * len(texts)}
        together = {"texts": texts, "seconds": [seconds]}
        return {"version": "0", "runs": {"1": each, "16": together}}

    shorter = [*alone[:3], [1, 1]]  # a text that differs is shorter here, and gives fewer tokens
    mine, plain = [round_of(t, shorter) for t in (1.0, 3.0)], [round_of(t) for t in (2.0, 6.0)]
    row = bench_engines.row_of(way, mine, plain)
    one, all_of_them = row["batch_1"], row["batch_16"]
    assert one["gain"] == all_of_them["gain"] == pytest.approx(2 * 11 / 12, abs=1e-4)
    assert one["tokens_per_second"] == pytest.approx(11 / 8) and one["texts_as_plain"] == 3
    low, high = one["gain_ci95"]
    assert low < one["gain"] < high <= 2 and all_of_them["gain_ci95"] is None


def test_a_slow_minute_of_the_machine_is_clocked_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour on the host made an engine look half as fast, and no counter showed it."""
    seconds, runs = iter([1.0, 3.0, 1.0, 1.1]), iter([{"run": 1}, {"run": 2}])
    monkeypatch.setattr(bench_engines, "gauge", lambda: next(seconds))
    way = bench_engines.Way("vllm", "vLLM", "draft", lambda: next(runs))
    kept = tmp_path / "way.json"
    assert bench_engines.clocked(way, kept, 1.25) == {"run": 1, "gauge": 3.0}
    assert bench_engines.clocked(way, kept, 3.5)["run"] == 1  # slow, but not for this limit
    assert bench_engines.clocked(way, kept, 1.25) == {"run": 2, "gauge": 1.1}
    assert bench_engines.clocked(way, kept, 1.25)["run"] == 2
