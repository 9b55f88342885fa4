"""Spec-Bench's scoring stated anew from its published definition; imports nothing of specheads.

evaluation/speed.py of hemingkx/Spec-Bench: per question of a task the method's speed is the sum of
``new_tokens`` over the sum of ``wall_time``; the baseline's is, over the same, the ids that the
tokenizer makes of each answer text less one; a task's speed is the mean over its questions, the
speed-up the ratio of the two means, #MAT the mean over all steps of all its questions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

ANSWER_KEYS = {
    "question_id": int, "category": str, "answer_id": str, "model_id": str, "choices": list,
    "tstamp": float,
}  # fmt: skip
CHOICE_KEYS = {
    "index": int, "turns": str, "decoding_steps": int, "new_tokens": int, "wall_time": float,
    "accept_lengths": int,
}  # fmt: skip
_EIGHT = (
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
)  # fmt: skip


def check_schema(line: str) -> None:
    """Check one line of an answer file, key by key, in the order in which Spec-Bench writes.

    Its own programs look keys up by their names: one more, behind all of its own, is not seen.
    """
    answer = json.loads(line)
    assert list(answer) == [*ANSWER_KEYS, "specheads"]
    for key, kind in ANSWER_KEYS.items():
        assert type(answer[key]) is kind, key
    (choice,) = answer["choices"]
    assert list(choice) == list(CHOICE_KEYS)
    assert choice["index"] == 0
    for key in list(CHOICE_KEYS)[1:]:
        assert type(choice[key]) is list, key
        assert all(type(value) is CHOICE_KEYS[key] for value in choice[key]), key
    num_turns = {len(choice[key]) for key in list(CHOICE_KEYS)[1:-1]}
    assert len(num_turns) == 1, "a number per turn"


def speed(
    file: Path, base_file: Path, ids_of: Callable[[str], list[int]], task: str
) -> tuple[float, float, float, float]:
    """Return tokens per second of method and baseline, speed-up and #MAT of one task."""
    ours = [each for each in _read(file) if _belongs(each, task)]
    theirs = [each for each in _read(base_file) if _belongs(each, task)]
    speeds, accepted = [], []
    for each in ours:
        choice = each["choices"][0]
        speeds.append(sum(choice["new_tokens"]) / sum(choice["wall_time"]))
        accepted += choice["accept_lengths"]
    speeds0 = []
    for each in theirs:
        choice = each["choices"][0]
        tokens = sum(len(ids_of(text)) - 1 for text in choice["turns"])
        speeds0.append(tokens / sum(choice["wall_time"]))
    return fmean(speeds), fmean(speeds0), fmean(speeds) / fmean(speeds0), fmean(accepted)


def _read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _belongs(answer: dict, task: str) -> bool:
    if task == "overall":
        return True
    return answer["category"] in (_EIGHT if task == "mt_bench" else (task,))
