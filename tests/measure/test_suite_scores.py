"""Scores of answer files, against Spec-Bench's formula stated anew."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from specheads.config import ConfigError
from specheads.data.suites import Question
from specheads.measure.suites import (
    AnswerFile,
    Turn,
    accept_length,
    corrected,
    format_scores,
    published,
    read_answers,
    score,
    tasks_of,
)
from tests import spec_bench_formula

CATEGORIES = ["writing", "coding", "translation", "qa", "math_reasoning", "rag", "stem"]


def made(number: int, category: str, turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Return an answer whose turns are given as text, tokens, seconds and accept lengths."""
    choice = {
        "index": 0,
        "turns": [turn["text"] for turn in turns],
        "decoding_steps": [len(turn["lengths"]) for turn in turns],
        "new_tokens": [turn["tokens"] for turn in turns],
        "wall_time": [turn["seconds"] for turn in turns],
        "accept_lengths": [n for turn in turns for n in turn["lengths"]],
    }
    return {
        "question_id": number,
        "category": category,
        "answer_id": "a",
        "model_id": "m",
        "choices": [choice],
        "tstamp": 1.0,
    }


def suite(rng: random.Random, lengths: tuple[int, int]) -> list[dict[str, Any]]:
    """Return random answers to two questions of every category."""
    answers = []
    for number, category in enumerate(CATEGORIES * 2):
        turns = []
        for _ in range(2 if category in ("writing", "coding", "stem") else 1):
            steps = [rng.randint(*lengths) for _ in range(rng.randint(1, 9))]
            text = "x" * rng.randint(1, 40)
            seconds = rng.uniform(0.1, 3.0)
            turns.append({"text": text, "tokens": sum(steps), "seconds": seconds, "lengths": steps})
        answers.append(made(number, category, turns))
    return answers


def ids_of(text: str) -> list[int]:
    """A tokenizer with a bos token and a token per two characters."""
    return [0, *range((len(text) + 1) // 2)]


def written(path: Path, answers: list[dict[str, Any]]) -> Path:
    """Write an answer file."""
    path.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    return path


def test_scores_are_those_of_the_published_formula(tmp_path: Path) -> None:
    """A formula that is nearly Spec-Bench's compares with no figure of its leaderboard."""
    rng = random.Random(0)
    ours, base = suite(rng, (1, 5)), suite(rng, (1, 1))
    base = base[1:]  # speed.py takes each file as it is
    paths = written(tmp_path / "ours.jsonl", ours), written(tmp_path / "base.jsonl", base)
    rows = score(*map(read_answers, paths), lambda text: len(ids_of(text)))
    tasks = ["mt_bench", "translation", "qa", "math_reasoning", "rag", "overall"]
    assert [row["task"] for row in rows] == tasks
    for row in rows:
        expected = spec_bench_formula.speed(*paths, ids_of, row["task"])
        assert tuple(row["published"].values()) == pytest.approx(expected, rel=1e-12)
        assert row["accept_length"] == pytest.approx(expected[3], rel=1e-12)
    printed = format_scores(rows).splitlines()
    overall = spec_bench_formula.speed(*paths, ids_of, "overall")
    line = next(line for line in printed if line.startswith("overall")).split()
    assert line[1:6] == [
        "14", f"{overall[0]:.1f}", f"{overall[1]:.1f}", f"{overall[2]:.2f}x", f"{overall[3]:.2f}",
    ]  # fmt: skip
    by_hand = {row["task"]: row for row in rows}["mt_bench"]
    both = [a for a in ours[1:] if a["category"] in ("writing", "coding", "stem")]
    theirs = [a for a in base if a["category"] in ("writing", "coding", "stem")]
    tokens, seconds = (
        [sum(sum(a["choices"][0][key]) for a in side) for side in (both, theirs)]
        for key in ("new_tokens", "wall_time")
    )
    ratio = tokens[0] / seconds[0] / (tokens[1] / seconds[1])
    assert by_hand["corrected"]["speedup"] == pytest.approx(ratio, rel=1e-12)
    low, high = by_hand["corrected"]["speedup_ci95"]
    assert low < ratio < high
    assert by_hand["num_questions"] == 6 and by_hand["decode_only"] is None


def test_equal_speed_is_one_by_the_corrected_formula_only() -> None:
    """The published formula gives a method that counts its end token a speed-up for nothing."""
    text = "y" * 40  # 20 tokens
    for bos, expected in ((0, 22 / 19), (1, 22 / 20)):

        def count(text: str, bos: int = bos) -> int:
            return len(ids_of(text)) - 1 + bos

        counted = made(1, "qa", [{"text": text, "tokens": 22, "seconds": 2.0, "lengths": [2] * 11}])
        honest = made(1, "qa", [{"text": text, "tokens": 20, "seconds": 2.0, "lengths": [2] * 10}])
        plain = made(1, "qa", [{"text": text, "tokens": 20, "seconds": 2.0, "lengths": [1] * 21}])
        assert published([counted], [plain], count)["speedup"] == pytest.approx(expected)
        assert corrected([honest], [plain])["speedup"] == 1
    assert round(22 / 19, 3) == 1.158


def test_empty_answers_are_no_speedup() -> None:
    """A baseline that said nothing would make the method infinitely fast, or the JSON invalid."""
    silent = made(1, "qa", [{"text": "", "tokens": 0, "seconds": 1.0, "lengths": [1]}])
    spoken = made(1, "qa", [{"text": "abcd", "tokens": 2, "seconds": 1.0, "lengths": [2]}])
    rows = score([spoken], [silent], lambda text: len(ids_of(text)))
    assert rows[0]["corrected"]["speedup"] is rows[0]["published"]["speedup"] is None
    assert "NaN" not in json.dumps(rows) and " -" in format_scores(rows)


def test_other_suites_have_their_own_tasks() -> None:
    """SPEED-Bench's math and coding would be averaged into a task that it does not have."""
    step = [{"text": "t", "tokens": 1, "seconds": 1.0, "lengths": [1]}]
    answers = [made(i, c, step) for i, c in enumerate(["math", "multilingual", "coding", "math"])]
    assert {task: len(of) for task, of in tasks_of(answers).items()} == {
        "math": 2, "multilingual": 1, "coding": 1, "overall": 4,
    }  # fmt: skip


def test_accept_lengths_by_depth() -> None:
    """The share of steps that went a guess further is what says how many heads pay."""
    one = made(0, "qa", [{"text": "t", "tokens": 9, "seconds": 1.0, "lengths": [4, 1, 3, 1]}])
    two = made(1, "qa", [{"text": "t", "tokens": 1, "seconds": 1.0, "lengths": []}])
    found = accept_length([one, two])
    assert found["accept_length"] == 9 / 4
    assert found["accepted_at"] == [2 / 4, 2 / 4, 1 / 4]
    assert accept_length([two]) == {
        "accept_length": 0.0, "accept_length_ci95": [0.0, 0.0], "accepted_at": [],
    }  # fmt: skip


def turn(text: str, seconds: float = 1.0) -> Turn:
    """Return an answer of one token per character."""
    return {
        "turns": text, "decoding_steps": 3, "new_tokens": len(text), "wall_time": seconds,
        "accept_lengths": [2, 1], "prefill_time": 0.25, "num_emitted": len(text) + 1,
        "num_prompt_tokens": 7, "limit": 64,
    }  # fmt: skip


def test_an_answer_file_is_gone_on_with(tmp_path: Path) -> None:
    """A run that was killed must neither lose answers nor count one twice."""
    questions = [Question(i, "qa", (f"q{i}",)) for i in (12, 3)]
    settings = {"temperature": 0.0, "dtype": "float32"}
    file = AnswerFile(tmp_path, "m", settings)
    assert not file.has(questions[0])
    file.append(questions[0], [turn("abc")])
    path = tmp_path / "m.jsonl"
    with path.open("a") as lines:
        lines.write('{"question_id": 3, "cat')  # killed while it wrote
    again = AnswerFile(tmp_path, "m", settings)
    assert again.has(questions[0]) and not again.has(questions[1])
    again.append(questions[1], [turn("de")])
    again.append(questions[1], [turn("fgh")])
    again.reorganise()
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(a["question_id"], a["choices"][0]["turns"]) for a in kept] == [
        (3, ["fgh"]), (12, ["abc"]),
    ]  # fmt: skip
    for line in path.read_text().splitlines():
        spec_bench_formula.check_schema(line)
    assert [each["specheads"]["num_emitted"] for each in kept] == [[4], [4]]
    with pytest.raises(ConfigError, match=r"made with other .* temperature \(0.0 there, 0.7 here"):
        AnswerFile(tmp_path, "m", {**settings, "temperature": 0.7})
    with pytest.raises(ConfigError, match="answers another question 12"):
        AnswerFile(tmp_path, "m", settings).has(Question(12, "qa", ("another",)))
    written(tmp_path / "theirs.jsonl", kept)
    with pytest.raises(ConfigError, match="not made by this command; give another name"):
        AnswerFile(tmp_path, "theirs", settings)
    (tmp_path / "m.json").write_text('{"temperature": 0')
    with pytest.raises(ConfigError, match=r"cannot read .*m\.json"):
        AnswerFile(tmp_path, "m", settings)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"question_id": None}, "question_id is missing or wrong"),
        ({"choices": []}, r"choices\[0\].turns is missing or wrong, got None"),
        ({"choices": [{"turns": ["x"]}]}, r"choices\[0\].new_tokens is missing or wrong"),
    ],
)
def test_wrong_answers_are_named(tmp_path: Path, change: Any, message: str) -> None:
    """A baseline of another program may lack anything; a missing figure must not count as 0."""
    answer = made(1, "qa", [{"text": "t", "tokens": 1, "seconds": 1.0, "lengths": [1]}])
    path = written(tmp_path / "a.jsonl", [answer, {**answer, **change}])
    with pytest.raises(ConfigError, match=rf"a.jsonl:2: {message}"):
        read_answers(path)
    free = made(1, "qa", [{"text": "t", "tokens": 1, "seconds": 0.0, "lengths": [1]}])
    with pytest.raises(ConfigError, match="wall_time must be above 0"):
        read_answers(written(tmp_path / "b.jsonl", [free]))
    with pytest.raises(ConfigError, match="holds no answers"):
        read_answers(written(tmp_path / "c.jsonl", []))
