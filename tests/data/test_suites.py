"""Questions of public suites, and how they become prompts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specheads.config import ConfigError
from specheads.data.suites import (
    Question,
    QuestionPrompts,
    messages,
    prompt_records,
    read_questions,
)
from specheads.measure.clock import read_prompts
from tests.conftest import build_byte_tokenizer


def written(path: Path, *lines: Any) -> Path:
    """Write lines, objects as JSON, to ``path``."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return path


def test_suites_are_read(tmp_path: Path) -> None:
    """A turn, a category or an id that gets lost makes other questions than the suite's."""
    spec = {"question_id": 81, "category": "writing", "turns": ["a", "b"], "reference": ["x", "y"]}
    speed = {
        "question_id": "0f" * 16,
        "category": "multilingual",
        "sub_category": "x",
        "turns": ["c"],
        "source": "s",
        "multiturn": False,
    }
    talk = {
        "question_id": "m",
        "category": "chat",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "d"},
            {"role": "assistant", "content": "an old answer"},
            {"role": "user", "content": "e"},
        ],
    }
    ours = {"id": "p", "kind": "body", "prompt": "f", "completion": "an answer"}
    bare = {"prompt": ["g", "h"]}
    path = written(tmp_path / "q.jsonl", spec, speed, "", talk, ours, bare)
    assert read_questions(path) == [
        Question(81, "writing", ("a", "b")),
        Question("0f" * 16, "multilingual", ("c",)),
        Question("m", "chat", ("d", "e"), "be brief"),
        Question("p", "body", ("f",)),
        Question(5, "prompt", ("g", "h")),
    ]
    assert [q.id for q in read_questions(path, 1, 3)] == ["0f" * 16, "m"]
    text = written(tmp_path / "p.txt", "\ufefffirst", "", "second \r")
    assert read_questions(text) == [
        Question(1, "prompt", ("first",)),
        Question(3, "prompt", ("second ",)),
    ]


def test_speed_bench_is_read_from_parquet(tmp_path: Path) -> None:
    """SPEED-Bench comes as parquet; one that was not prepared holds no questions, only a notice."""
    from pyarrow import parquet, table

    columns = {
        "question_id": ["a", "b"],
        "category": ["qa", "math"],
        "turns": [["one"], ["two", "three"]],
        "source": ["s", "t"],
    }
    parquet.write_table(table(columns), tmp_path / "test.parquet")
    expected = [Question("a", "qa", ("one",)), Question("b", "math", ("two", "three"))]
    assert read_questions(tmp_path / "test.parquet") == read_questions(tmp_path) == expected
    notice = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    raw = written(tmp_path / "raw.jsonl", {"question_id": "a", "category": "qa", "turns": [notice]})
    with pytest.raises(ConfigError, match=r"raw.jsonl:1: turn 0 stands for a text .* prepare"):
        read_questions(raw)


@pytest.mark.parametrize(
    "line,message",
    [
        ("{", r"q.jsonl:2: not JSON"),
        ([1], r"q.jsonl:2: expected an object, got list"),
        ({"question": "x"}, r"q.jsonl:2: a question holds turns, .*; found question"),
        ({"turns": "x"}, r"q.jsonl:2: turns must be a list with at least one turn"),
        ({"turns": []}, r"q.jsonl:2: turns must be a list with at least one turn"),
        ({"turns": ["x", " "]}, r"q.jsonl:2: turns\[1\] must be a string that is not empty"),
        ({"turns": ["x", 3]}, r"q.jsonl:2: turns\[1\] must be a string, got 3"),
        ({"turns": ["x"], "question_id": True}, r"q.jsonl:2: question_id must be .*, got True"),
        ({"turns": ["x"], "question_id": None}, r"q.jsonl:2: question_id must be .*, got None"),
        ({"turns": ["x"], "category": 3}, r"q.jsonl:2: category must be a string, got 3"),
        ({"turns": ["x"], "question_id": 7}, r"q.jsonl has question_id 7 twice"),
        ({"turns": ["\ud800"]}, r"q.jsonl:2: turns\[0\] holds half of a surrogate pair"),
        ({"messages": ["x"]}, r"q.jsonl:2: messages\[0\] must be an object with a role"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            r"q.jsonl:2: messages\[0\] .*got {.role.: .tool",
        ),
        ({"messages": [{"role": "system", "content": "x"}]}, r"q.jsonl:2: no message is a user's"),
    ],
)
def test_malformed_questions_are_named(tmp_path: Path, line: Any, message: str) -> None:
    """A question that is skipped or bent without a word makes another suite of it."""
    path = written(tmp_path / "q.jsonl", {"question_id": 7, "turns": ["x"]}, line)
    with pytest.raises(ConfigError, match=message) as error:
        read_questions(path)
    assert "\n" not in str(error.value)


def test_files_without_questions_are_refused(tmp_path: Path) -> None:
    """An empty suite would be scored as one."""
    with pytest.raises(ConfigError, match="cannot read .*missing.jsonl"):
        read_questions(tmp_path / "missing.jsonl")
    with pytest.raises(ConfigError, match="cannot read .*missing.txt"):
        read_questions(tmp_path / "missing.txt")
    for name in ("empty.jsonl", "empty.txt"):
        with pytest.raises(ConfigError, match="holds no questions"):
            read_questions(written(tmp_path / name, ""))
    path = written(tmp_path / "one.txt", "x")
    with pytest.raises(ConfigError, match="holds 1 questions, none from begin=1 on"):
        read_questions(path, 1)


def test_suites_are_prompts_of_the_bench(tmp_path: Path) -> None:
    """The bench would refuse a suite's file, or ask later turns without the answers before them."""
    path = written(
        tmp_path / "q.jsonl", {"question_id": 81, "category": "writing", "turns": ["a", "b"]}
    )
    assert prompt_records(path, chat=True) == [
        {"id": "81", "kind": "writing", "messages": [{"role": "user", "content": "a"}]}
    ]
    assert prompt_records(path, chat=False) == [{"id": "81", "kind": "writing", "text": "a"}]
    ours = written(tmp_path / "ours.jsonl", {"id": "x", "prompt": "a", "completion": "b"})
    assert prompt_records(ours, chat=True) == [
        {"id": "x", "kind": "completion", "prompt": "a", "completion": "b"}
    ]
    lines = written(tmp_path / "p.txt", "a", "b")
    assert [record["text"] for record in prompt_records(lines, chat=False)] == ["a", "b"]


def test_the_bench_decodes_a_suite(tmp_path: Path) -> None:
    """The categories are what a table per kind of prompt stands on."""
    path = written(
        tmp_path / "q.jsonl",
        *({"question_id": i, "category": kind, "turns": [f"{kind}{i}", "later"]}
          for i, kind in enumerate(["qa", "qa", "math", "rag"])),
    )  # fmt: skip
    settings: dict[str, Any] = {"max_length": 64, "device": torch.device("cpu")}
    prompts, _ = read_prompts(path, build_byte_tokenizer(), 3, **settings)
    assert [prompt.kind for prompt in prompts] == ["qa", "math", "rag"]
    assert prompts[0].input_ids[0].tolist() == [257, 260, *b"qa0", 261]
    bare, _ = read_prompts(path, build_byte_tokenizer(chat_template=None), 1, **settings)
    assert bare[0].input_ids[0].tolist() == [*b"qa0"]


def test_templates_render_earlier_answers(tmp_path: Path) -> None:
    """A later turn that does not see the model's own answer is another conversation."""
    tokenizer = build_byte_tokenizer()
    question = Question(1, "x", ("one", "two", "three"), "")
    told = Question(1, "x", ("one", "two"), "be brief")
    answers = ["first", "second"]

    def text(template: str, question: Question, answers: list[str]) -> str:
        return str(tokenizer.decode(QuestionPrompts(tokenizer, template).ids(question, answers)))

    chat = "<bos><|user|>one<|assistant|>first<eos><|user|>two<|assistant|>"
    assert text("chat", question, answers[:1]) == text("auto", question, answers[:1]) == chat
    assert text("chat", told, []) == "<bos><|system|>be brief<|user|>one<|assistant|>"
    assert len(messages(question, answers)) == 5
    vicuna = (
        "A chat between a curious user and an artificial intelligence assistant. The assistant "
        "gives helpful, detailed, and polite answers to the user's questions. USER: one "
        "ASSISTANT: first</s>USER: two ASSISTANT: second</s>USER: three ASSISTANT:"
    )
    assert text("vicuna", question, answers) == vicuna
    assert text("vicuna", told, []) == "be brief USER: one ASSISTANT:"
    assert text("none", question, answers) == "onefirst\ntwosecond\nthree"
    assert text("none", told, []) == "be brief\none"
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}>")
    assert text(str(own), question, answers[:1]) == "[user]one[assistant]first[user]two>"
    before = QuestionPrompts(tokenizer, str(own)).kind
    own.write_text("{{ messages }}")
    after = QuestionPrompts(tokenizer, str(own)).kind
    assert before.startswith("own.jinja ") and before != after, "other words, other answers"
    assert "generation" in tokenizer.chat_template, "the tokenizer itself is left as it was"


def test_templates_that_are_missing_are_named(tmp_path: Path) -> None:
    """A template that silently falls back asks every question in words nobody meant."""
    bare = build_byte_tokenizer(chat_template=None)
    assert QuestionPrompts(bare).kind == "none"
    with pytest.raises(ConfigError, match="template=chat, but the tokenizer .* has no chat templ"):
        QuestionPrompts(bare, "chat")
    with pytest.raises(
        ConfigError, match="template must be auto, .*; cannot read vicunna: .*No such"
    ):
        QuestionPrompts(bare, "vicunna")
    (tmp_path / "empty.jinja").write_text(" ")
    with pytest.raises(ConfigError, match="is empty"):
        QuestionPrompts(bare, str(tmp_path / "empty.jinja"))
    strict = build_byte_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ConfigError, match="roles must alternate"):
        QuestionPrompts(strict).ids(Question(1, "x", ("one",)))
