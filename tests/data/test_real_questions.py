"""The questions in data/real/, on which the figures of real base models are held."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from specheads.data.load import read_jsonl
from specheads.data.suites import read_questions
from tests.near_duplicates import near_duplicates
from tests.processes import ROOT

FOLDER = ROOT / "data" / "real"
QUESTIONS = read_jsonl(FOLDER / "questions.jsonl")
GIVEN = ("summary", "question", "rewriting")
KINDS = ("chat", "reasoning", "arithmetic", "code", "translation", *GIVEN)


def texts(records: Iterable[dict[str, object]]) -> list[str]:
    """Return what the users say."""
    found = []
    for record in records:
        messages = record["messages"]
        assert isinstance(messages, list)
        (message,) = messages
        assert message["role"] == "user"
        found.append(message["content"])
    return found


def test_the_kinds_are_in_equal_parts() -> None:
    """A kind that is missing, or counts twice, moves the one figure that is quoted."""
    assert Counter(each["kind"] for each in QUESTIONS) == dict.fromkeys(KINDS, 12)
    assert all(re.fullmatch(rf"{each['kind']}:[a-z-]+", each["id"]) for each in QUESTIONS)
    assert len({each["id"] for each in QUESTIONS}) == len(QUESTIONS) == len(set(texts(QUESTIONS)))
    assert [
        (each.id, each.category, each.turns) for each in read_questions(FOLDER / "questions.jsonl")
    ] == [
        (each["id"], each["kind"], (text,))
        for each, text in zip(QUESTIONS, texts(QUESTIONS), strict=True)
    ], "spec_bench must ask what bench asks"


def test_given_texts_are_long_enough_to_copy_from() -> None:
    """The page says what the last three kinds hold, and what the first five do not."""
    for each, text in zip(QUESTIONS, texts(QUESTIONS), strict=True):
        assert (60 <= len(text.split()) <= 190) == (each["kind"] in GIVEN), each["id"]


def test_the_page_names_this_very_file() -> None:
    """A question that is changed later changes every figure that was held on it."""
    digest = hashlib.sha256((FOLDER / "questions.jsonl").read_bytes()).hexdigest()
    page = (FOLDER / "README.md").read_text()
    assert digest in page and "Apache-2.0" in page


def test_no_question_is_nearly_another() -> None:
    """Two of a kind would weigh double, and an interval over questions would be too narrow."""
    found = texts(QUESTIONS)
    assert near_duplicates(found, found) == []
    openings = Counter(" ".join(text.split()[:2]).lower() for text in found)
    assert openings.most_common(1)[0][1] <= 4, "questions of users do not all begin alike"


def test_near_duplicates_are_found() -> None:
    """A measure that finds nothing lets the questions stand among those that are trained on."""
    question = texts(QUESTIONS)[0]
    reworded = (
        question.replace("this afternoon", "tonight").replace("three", "4").upper() + " Thanks!"
    )
    inside = f"Hello. {question} I have no idea."
    assert near_duplicates([question], ["Something else.", reworded, inside]) == [(0, 1), (0, 2)]


ANSWERS = sorted(FOLDER.glob("answers*.jsonl.*z"))


@pytest.mark.parametrize("path", ANSWERS, ids=lambda path: path.name)
def test_no_question_was_trained_on(path: Path) -> None:
    """Heads that have seen a question's answer are measured on their memory."""
    unpack = {".gz": gzip.decompress, ".xz": lzma.decompress}[path.suffix]
    lines = unpack(path.read_bytes()).decode("utf-8").splitlines()
    asked = [
        "\n".join(
            turn["content"] for turn in json.loads(line)["messages"] if turn["role"] == "user"
        )
        for line in lines
    ]
    found = near_duplicates(texts(QUESTIONS), asked)
    assert [(QUESTIONS[i]["id"], asked[j]) for i, j in found] == []
