"""Questions that a base asks itself: the same ones after any kill, and none that is no question."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from specheads import regenerate
from specheads.config import ConfigError, QuestionsConfig, RegenerateConfig, RunError
from specheads.data.load import read_jsonl
from specheads.data.similar import NEAR, SimilarTexts, shingles, words
from specheads.decoding.loop import Settings
from specheads.decoding.result import DecodedRow
from specheads.decoding.stream import Job, Stream
from specheads.regeneration import answers
from specheads.regeneration.answers import Sampling
from specheads.regeneration.dialogue import TurnEncoder, dialogue
from specheads.regeneration.engine import Engine
from specheads.regeneration.questions import BLOCK, MOST, Questioner, read_leads

EOS = 258


@pytest.fixture
def asker(
    tmp_path: Path,
    make_tiny_llama: Callable[..., Any],
    make_byte_tokenizer: Callable[..., PreTrainedTokenizerFast],
) -> Callable[..., Path]:
    """Return a function that makes the folder of a tiny model which writes short ASCII texts."""

    def make(name: str = "base", **template: Any) -> Path:
        model = make_tiny_llama(std=0.2, vocab_size=262)
        with torch.no_grad():
            direction = torch.randn(32, generator=torch.Generator().manual_seed(5))
            direction /= direction.norm()
            model.model.embed_tokens.weight += 2 * direction  # a part of all hidden states
            for unprintable in (slice(32), slice(127, 258), slice(259, None)):
                model.lm_head.weight[unprintable] -= 30 * direction
            model.lm_head.weight[EOS] += 1.2 * direction
            model.lm_head.weight[10] += 30.4 * direction
        model.save_pretrained(tmp_path / name)
        make_byte_tokenizer(**template).save_pretrained(tmp_path / name)
        return tmp_path / name

    return make


def run(output: Path, **settings: Any) -> list[dict[str, Any]]:
    """Regenerate in this process; return the lines of the output."""
    given: dict[str, Any] = {
        "max_new_tokens": 30, "temperature": 1.0, "dtype": "float32", "threads": 1, "seed": 5,
        "prompts": "self", "limit": 12, "batch_size": 4, "keep_truncated": True,
    }  # fmt: skip
    regenerate.run(RegenerateConfig(output=str(output), **(given | settings)))
    return [json.loads(line) for line in output.read_bytes().splitlines()]


ASKED = QuestionsConfig(max_new_tokens=40)


def files_of(folder: Path) -> dict[str, bytes]:
    """Return name -> content of the files in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_killed_run_ends_with_the_same_files(
    asker: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads that were trained on other data than the seed says could never be made again.

    The run is stopped at every write, its last line torn, and goes on with other batch sizes. All
    files are compared byte by byte.
    """
    base = str(asker())
    whole = run(tmp_path / "a" / "out.jsonl", model=base, questions=ASKED)
    append, left = answers._append, 0

    def torn(file: FileIO, values: Any) -> None:
        nonlocal left
        values = list(values)
        left -= bool(values)
        if values and not left:
            append(file, values[:-1])
            answers.os.write(file.fileno(), answers._lines(values[-1:])[:-7])
            raise KeyboardInterrupt
        append(file, values)

    monkeypatch.setattr(answers, "_append", torn)
    for size in range(1, 150):
        left, output = 1 + size % 4, tmp_path / "b" / "out.jsonl"
        try:
            again = run(output, model=base, questions=ASKED, batch_size=1 + size % 5)
            break
        except Exception as error:
            assert "interrupted" in str(error)
    assert size > 8 and again == whole
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert len(whole) > 8 and len({record["kind"] for record in whole}) > 4
    for record in whole:
        (user, _), lead = record["messages"], read_leads([record["kind"]])[record["kind"]]
        assert user["role"] == "user" and "system" not in str(record["messages"][0])
        assert user["content"].startswith(tuple(lead["openings"]))
        assert read_jsonl(output)


def test_a_larger_limit_adds_to_the_same_questions(
    asker: Callable[..., Path], tmp_path: Path
) -> None:
    """More questions on another day must not make the answers to the first ones worthless."""
    base, output = str(asker()), tmp_path / "out.jsonl"
    few = run(output, model=base, questions=ASKED, limit=5)
    many = run(output, model=base, questions=ASKED, limit=9)
    assert many == run(tmp_path / "b.jsonl", model=base, questions=ASKED, limit=9)
    assert all(record in many for record in few) and 3 < len(few) <= 5 < len(many) <= 9
    with pytest.raises(ConfigError, match=r"questions\.jsonl was made with other settings: top_p"):
        run(output, model=base, questions=QuestionsConfig(max_new_tokens=40, top_p=0.5))


def test_later_turns_follow_the_answers_that_are_kept(
    asker: Callable[..., Path], tmp_path: Path
) -> None:
    """A user's second turn behind another answer than the one it was written for is a riddle."""
    asked = QuestionsConfig(max_new_tokens=120, turns=2, kinds=["chat"])
    output = tmp_path / "out.jsonl"
    records = run(
        output,
        model=str(asker()),
        questions=asked,
        keep_truncated=False,
        max_new_tokens=120,
    )
    roles = [[message["role"] for message in record["messages"]] for record in records]
    assert ["user", "assistant", "user", "assistant"] in roles
    first = {r["id"]: r for r in read_jsonl(f"{output}.turn1.jsonl")}
    for record in records:
        before = first[record["id"]]
        assert record["messages"][:2] == before["messages"]
        span = before["tokens"]["answers"][0]
        assert record["tokens"]["answers"][0] == span
        assert record["tokens"]["ids"][: span[1]] == before["tokens"]["ids"]


def test_a_base_without_a_template_goes_on_from_nothing(
    asker: Callable[..., Path], tmp_path: Path
) -> None:
    """A base that knows no turns would be given a template's words as text."""
    base = asker(chat_template=None)
    records = run(tmp_path / "out.jsonl", model=str(base), questions=ASKED)
    assert {record["kind"] for record in records} == {"text"}
    for record in records:
        assert "messages" not in record and "\n" not in record["prompt"]
        ids = record["tokens"]["ids"]
        assert bytes(ids[: len(record["prompt"])]).decode() == record["prompt"]


class Scripted:
    """In place of a stream: gives to attempt n the tokens that ``write(n)`` returns."""

    def __init__(self, write: Callable[[int], list[int]]) -> None:
        self.write, self.output = write, SimpleNamespace(num_tokens=0)

    def run(self, take: Callable[[int], list[Job]]) -> Iterator[list[tuple[Job, DecodedRow]]]:
        """Yield eight at a time, in another order than they were begun."""
        while jobs := take(8):
            rows = [DecodedRow(self.write(job.owner)) for job in jobs]
            for job, row in zip(jobs, rows, strict=True):
                row.finished = row.new_tokens[-1] == EOS or row.new_tokens[-1] in job.ends
            yield list(zip(jobs, rows, strict=True))[::-1]


@pytest.fixture
def scripted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_tiny_llama: Any, make_byte_tokenizer: Any
) -> Callable[..., tuple[Questioner, Path]]:
    """Return a function that makes a questioner whose base writes what a script says."""

    def make(write: Callable[[int], list[int]], **asked: Any) -> tuple[Questioner, Path]:
        turns = TurnEncoder(make_byte_tokenizer(), [EOS])
        engine = Engine(make_tiny_llama(vocab_size=262), turns, Sampling(), {}, batch_size=4)
        monkeypatch.setattr(engine, "stream", lambda sampler: Scripted(write))
        return Questioner(engine, QuestionsConfig(**asked), 0, {}), tmp_path / "q.jsonl"

    return make


def tokens(text: str) -> list[int]:
    """Return the ids of a text and of its end."""
    return [*text.encode(), EOS]


DISTINCT = [f"{a}{b}{c}" for a in "bdgk" for b in "aeo" for c in "lmn"]


def different(number: int) -> str:
    """Return a text that shares no three words with that of another number, nor its opening."""
    first = DISTINCT[number % 36] + DISTINCT[number // 36 % 36]
    return f" {first}{number} {number}th of {number} and {first} {number}?"


@pytest.mark.parametrize(
    ("write", "reason", "cure"),
    [
        (lambda n: [EOS], "empty", "prompts=<file>"),
        (lambda n: [32, 10, 32, EOS], "empty", "prompts=<file>"),
        (lambda n: [*b"what is it", 257], "special", "questions.temperature"),
        (lambda n: list(b"and so on and so on"), "truncated", "questions.max_new_tokens="),
        (lambda n: [0xC3, *b" is half a letter", EOS], "text", "prompts=<file>"),
        (lambda n: [*b"what is this", 300, EOS], "token", "prompts=<file>"),
        (lambda n: tokens(" tell me about the one and only thing"), "similar", "temperature"),
    ],
    ids=["empty", "blank", "special", "endless", "half", "unknown", "alike"],
)
def test_a_base_that_asks_nothing_is_one_line(
    write: Callable[[int], list[int]], reason: str, cure: str, scripted: Callable[..., Any]
) -> None:
    """An hour of questions of which none is one must end early, and say what was wrong with them.

    What was written is kept with its reasons, and the same call says the same at once.
    """
    for _ in range(2):
        questioner, path = scripted(write, kinds=["chat"])
        with pytest.raises(RunError) as caught:
            questioner.write(path, 500)
        said = str(caught.value)
        bad = [json.loads(line) for line in Path(f"{path}.bad.jsonl").read_text().splitlines()]
        kept = len(path.read_text().splitlines())
        assert "\n" not in said and f"{reason} " in said and cure in said and str(path) in said
        assert f"of {len(bad) + kept} questions that the base wrote {kept} can be used" in said
        assert len(bad) + kept == BLOCK + MOST * kept
        assert reason in {line["reason"] for line in bad}
        if reason not in ("similar", "empty"):
            assert {line["reason"] for line in bad} == {reason} and kept == 0


def test_no_opening_is_on_more_than_a_tenth(scripted: Callable[..., Any]) -> None:
    """A third of what a small model asks begins with "Can you", and heads learn that by heart."""

    def write(number: int) -> list[int]:
        return tokens(" can you" * (number % 3 == 0) + different(number))

    questioner, path = scripted(write, kinds=["chat"])
    kept, told = questioner.write(path, 200)
    for num in range(20, 201):
        texts = [record["messages"][0]["content"] for record in kept[:num]]
        openings = [" ".join(words(text)[:2]) for text in texts]
        assert max(map(openings.count, openings)) <= num / 10
    assert "opening" in told and "200 questions (chat 200)" in told
    assert [int(record["id"][5:]) for record in kept] == sorted(int(r["id"][5:]) for r in kept)


def test_kinds_have_their_shares_of_what_is_kept(scripted: Callable[..., Any]) -> None:
    """A kind of which every second question is no use would be half as frequent in training."""
    holder: list[Questioner] = []

    def write(number: int) -> list[int]:
        return [EOS] if number % 2 and number % 5 else tokens(different(number))

    questioner, path = scripted(write)
    holder.append(questioner)
    kept, _ = questioner.write(path, 900)
    shares = {kind: lead["share"] for kind, lead in read_leads([]).items()}
    assert len(shares) == 8
    for kind, share in shares.items():
        num = sum(record["kind"] == kind for record in kept)
        assert num / 900 == pytest.approx(share / sum(shares.values()), rel=0.35), kind


def test_unknown_kinds_and_settings_are_refused() -> None:
    """A mistyped kind would silently leave a kind of use out."""
    with pytest.raises(ConfigError, match=r"questions.kinds: unknown cod; there are chat, "):
        read_leads(["cod"])
    for wrong, message in (
        ({"limit": 0}, "limit must be the number of questions"),
        ({"endpoint": "http://x", "limit": 3}, "endpoint must be left out with prompts=self"),
    ):
        with pytest.raises(ConfigError, match=message):
            RegenerateConfig(prompts="self", output="o.jsonl", **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"questions.turns must be at least 1"):
        QuestionsConfig(turns=0)


@given(st.lists(st.text("ab c,", max_size=12), max_size=12), st.text("ab c,", max_size=12))
def test_near_duplicates_are_those_of_the_definition(texts: list[str], text: str) -> None:
    """An index that misses pairs lets the questions of the test into training.

    The reference compares with every text in turn.
    """
    similar = SimilarTexts()
    for each in texts:
        similar.add(each)
    new = shingles(text)
    near = [
        number
        for number, each in enumerate(texts)
        if len(shingles(each) & new) >= NEAR * len(shingles(each) | new)
    ]
    assert similar.near(text) == min(near, default=None)


@pytest.mark.parametrize(
    ("text", "other", "alike"),
    [
        ("What is the capital of France?", "what is the capital of france", True),
        ("What is the capital of France?", "What is the capital of Spain?", True),
        ("What is the capital of France?", "Who is the president of France?", False),
        ("Hi!", "hi", True),
        ("你是谁?", "你是谁呢?", False),
        ("你今天过得怎么样?", "你今天过得怎么样!", True),
    ],
)
def test_what_counts_as_a_near_duplicate(text: str, other: str, alike: bool) -> None:
    """The measure has to say of plain pairs what a reader says."""
    similar = SimilarTexts()
    similar.add(text)
    assert (similar.near(other) == 0) == alike


def test_the_stream_ends_rows_by_their_own_tokens(make_tiny_llama: Any) -> None:
    """A line that ends a question must not end the answers beside it."""
    model = make_tiny_llama()
    stream = Stream(model, None, Settings(sampler=Sampling()), batch_size=2)
    waiting = [Job([5, 6], 20, owner="all"), Job([5, 6], 20, owner="cut")]
    done = {job.owner: row for ended in stream.run(lambda n: [waiting.pop()][:n] if waiting else [])
            for job, row in ended}  # fmt: skip
    first = done["all"].new_tokens
    assert done["cut"].new_tokens == first and not done["all"].finished
    end = first[3]
    waiting = [Job([5, 6], 20, owner="all"), Job([5, 6], 20, owner="cut", ends={end})]
    stream = Stream(model, None, Settings(sampler=Sampling()), batch_size=2)
    done = {job.owner: row for ended in stream.run(lambda n: [waiting.pop()][:n] if waiting else [])
            for job, row in ended}  # fmt: skip
    assert done["all"].new_tokens == first and done["cut"].finished
    assert done["cut"].new_tokens == first[: first.index(end) + 1]


def test_an_answer_that_was_given_just_so_is_taken_again(scripted: Callable[..., Any]) -> None:
    """In bfloat16 it might come out otherwise, and the user's next turn follows the first one."""
    begun: list[int] = []
    questioner, _ = scripted(lambda n: begun.append(1) or tokens("anew"))
    engine = questioner.engine
    engine.generation = {"model": "x"}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "old"}]
    record: dict[str, Any] = {"id": "a", "kind": "chat", "messages": messages}
    ids = engine.turns.ask(dialogue(record))
    record["tokens"] = {"ids": ids + tokens("old"), "answers": [[len(ids), len(ids) + 4]]}
    record["generation"] = {"model": "x", "finish_reason": ["stop"]}
    (outcome,) = engine.answer([record])
    assert not begun and outcome.answered[0]["messages"] == messages
    edited = [{"role": "user", "content": "hello"}, messages[1]]
    for other in ({"messages": edited}, {"generation": {"model": "y"}}):
        begun.clear()
        found = [each for outcome in engine.answer([record | other]) for each in outcome.answered]
        assert begun and found[0]["messages"][1]["content"] == "anew"
