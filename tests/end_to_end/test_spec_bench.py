"""``python -m specheads.spec_bench`` on a tiny model, and its ``forward_func``."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from specheads.config import ConfigError, DecodeConfig, SpecBenchConfig
from specheads.decoding.generate import SpecDecoder
from specheads.decoding.loop import plain_decode
from specheads.measure import suites
from specheads.models.base import load_base_model, load_tokenizer
from specheads.spec_bench import forward, load, main, run
from tests import spec_bench_formula

QUESTIONS = [
    {"question_id": 82, "category": "writing", "turns": ["def f(x):", "def g(y):"]},
    {"question_id": 81, "category": "qa", "turns": ["x = 1\ny ="], "reference": ["2"]},
    {"question_id": 90, "category": "qa", "turns": ["a b a b a b"]},
    {"question_id": 91, "category": "coding", "turns": ["print(", "print(print("]},
]
EOS = 258


def suite(path: Path, questions: list[dict[str, Any]]) -> Path:
    """Write a question.jsonl."""
    path.write_text("".join(json.dumps(question) + "\n" for question in questions))
    return path


@pytest.fixture
def config(tiny_export: Path, tmp_path: Path) -> SpecBenchConfig:
    """Return settings for a run of a second."""
    return SpecBenchConfig(
        checkpoint=str(tiny_export),
        questions=str(suite(tmp_path / "question.jsonl", QUESTIONS)),
        answers=str(tmp_path / "answers"),
        out=str(tmp_path / "out.json"),
        max_new_tokens=24,
        warmup=1,
        dtype="float32",
        threads=1,
    )


def by_hand(checkpoint: str, questions: list[dict[str, Any]], limit: int) -> dict[int, list[str]]:
    """Answer every turn with plain decoding, the texts of the turns before it in the prompt."""
    model, tokenizer = load_base_model(checkpoint), load_tokenizer(checkpoint)
    texts: dict[int, list[str]] = {}
    for question in questions:
        said, answers = [], []
        for turn in question["turns"]:
            said.append({"role": "user", "content": turn})
            ids = tokenizer.apply_chat_template(
                said, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
            result = plain_decode(model, ids, max_new_tokens=limit, eos_token_ids=(EOS,))
            text = tokenizer.decode(result.new_tokens, skip_special_tokens=True).strip()
            said.append({"role": "assistant", "content": text})
            answers.append(text)
        texts[question["question_id"]] = answers
    return texts


def test_answers_are_written_and_scored(
    config: SpecBenchConfig,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Files that others score to other numbers than ours prove nothing to them."""
    keys = ("checkpoint", "questions", "answers", "out", "max_new_tokens", "warmup", "dtype")
    arguments = [f"{key}={getattr(config, key)}" for key in keys]
    monkeypatch.setattr(sys, "argv", ["spec_bench", *arguments, "threads=1"])
    main()
    printed = capsys.readouterr().out
    result = json.loads(Path(config.out).read_text())
    ours, base = (Path(result["answers"][name]) for name in ("drafted", "plain"))
    expected = by_hand(str(tiny_model_dir), QUESTIONS, 24)
    for path in (ours, base):
        lines = path.read_text().splitlines()
        for line in lines:
            spec_bench_formula.check_schema(line)
        answers = [json.loads(line) for line in lines]
        assert [answer["question_id"] for answer in answers] == [81, 82, 90, 91], "sorted"
        assert {answer["model_id"] for answer in answers} == {path.stem}
        for answer in answers:
            (choice,) = answer["choices"]
            assert choice["turns"] == expected[answer["question_id"]]
            assert all(n <= 24 for n in choice["new_tokens"])
            if path == base:
                assert choice["accept_lengths"] == [1] * sum(choice["decoding_steps"])
            else:  # the prefill is a pass, but no step
                turns = len(choice["turns"])
                assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"]) - turns
                assert sum(choice["accept_lengths"]) >= sum(choice["new_tokens"]) - turns
    tokenizer = load_tokenizer(str(tiny_model_dir))
    assert [row["task"] for row in result["scores"]] == ["mt_bench", "qa", "overall"]
    for row in result["scores"]:
        again = spec_bench_formula.speed(
            ours, base, lambda text: tokenizer(text).input_ids, row["task"]
        )
        assert tuple(row["published"].values()) == pytest.approx(again, rel=1e-12)
        shown = next(line for line in printed.splitlines() if line.startswith(row["task"])).split()
        assert shown[2:6] == [
            f"{again[0]:.1f}", f"{again[1]:.1f}", f"{again[2]:.2f}x", f"{again[3]:.2f}",
        ]  # fmt: skip
        assert row["identical"] == row["compared"] and not row["different"]
        assert row["decode_only"]["speedup"] > 0
    assert result["scores"][-1]["accept_length"] > 1.2, "these heads give the base's own guesses"
    assert result["num_questions"] == 4 and not result["too_long"]


def test_a_run_goes_on_where_it_stopped(
    config: SpecBenchConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours of answers must survive a kill, and none may be answered twice."""
    asked: list[tuple[int | str, bool]] = []
    real = suites.answer

    def counted(decoder: SpecDecoder, question: Any, *rest: Any) -> Any:
        if len(asked) == 5:
            raise KeyboardInterrupt
        asked.append((question.id, decoder.drafter is None))
        return real(decoder, question, *rest)

    monkeypatch.setattr(suites, "answer", counted)
    config = replace(config, warmup=0)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    files = sorted(Path(config.answers).glob("*.jsonl"))
    before = [[json.loads(line) for line in file.open()] for file in files]
    assert [len(answers) for answers in before] == [2, 2], "the third question was half answered"
    monkeypatch.setattr(suites, "answer", real)
    run(config)
    for file, kept in zip(files, before, strict=True):
        answers = {a["question_id"]: a for a in map(json.loads, file.open())}
        assert answers.keys() == {81, 82, 90, 91}
        assert all(answers[each["question_id"]] == each for each in kept)
    loads = "specheads.decoding.generate.SpecDecoder.from_pretrained"
    monkeypatch.setattr(loads, lambda *_, **__: pytest.fail("loaded"))
    run(config)  # nothing is missing: scored at once
    rows = json.loads(Path(config.out).read_text())["scores"]
    plain = next(file for file in files if "-plain-" in file.name)
    run(replace(config, baseline=str(plain)))  # an earlier run's, its prefills known as well
    assert json.loads(Path(config.out).read_text())["scores"] == rows
    with pytest.raises(ConfigError, match=r"other .* max_new_tokens \(24 there, 8 here"):
        run(replace(config, max_new_tokens=8))


def test_too_long_questions_end_nothing_silently(
    config: SpecBenchConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One question beyond the context would end a run, or vanish from a score."""
    long = [*QUESTIONS, {"question_id": 99, "category": "rag", "turns": ["x" * 600]}]
    late = [*long, {"question_id": 98, "category": "rag", "turns": ["y", "x" * 600]}]
    config = replace(config, questions=str(suite(tmp_path / "long.jsonl", late)), warmup=0)
    with pytest.raises(ConfigError, match="question 99, turn 0: the prompt is 603 tokens.* 512"):
        run(config)
    assert not list(Path(config.answers).glob("*.jsonl")), "said before hours of answers"
    capsys.readouterr()
    run(replace(config, skip_long=True))
    result = json.loads(Path(config.out).read_text())
    assert result["too_long"] == [99, 98] and result["scores"][-1]["num_questions"] == 4
    assert "context: 2 of 6 questions" in capsys.readouterr().out
    only = replace(config, questions=str(suite(tmp_path / "only.jsonl", [long[-1]])), name="only")
    with pytest.raises(ConfigError, match="none of the 1 questions fits"):
        run(replace(only, skip_long=True))


def test_a_baseline_of_another_program(config: SpecBenchConfig, tmp_path: Path) -> None:
    """Scored against given answers, nothing is decoded plainly, and the ids need not be ours."""
    answer = {
        "question_id": 81,
        "category": "qa",
        "choices": [
            {"turns": ["12"], "new_tokens": [2], "wall_time": [1.0], "accept_lengths": [1]}
        ],
    }
    theirs = tmp_path / "theirs.jsonl"
    theirs.write_text(json.dumps(answer) + "\n")
    run(replace(config, baseline=str(theirs), end=2, name="mine"))
    assert [file.name for file in Path(config.answers).glob("*.jsonl")] == ["mine.jsonl"]
    result = json.loads(Path(config.out).read_text())
    rows = {row["task"]: row for row in result["scores"]}
    assert rows["qa"]["published"]["tokens_per_second_baseline"] == 1  # two bytes less one
    assert rows["qa"]["corrected"]["tokens_per_second_baseline"] == 2
    assert rows["mt_bench"]["published"] is None
    assert rows["overall"]["different"] == [81] and rows["overall"]["decode_only"] is None


def harness(
    questions: list[dict[str, Any]], model: Any, tokenizer: PreTrainedTokenizerBase, **kw: Any
) -> list[dict[str, Any]]:
    """Call a forward_func as Spec-Bench's get_model_answers does."""
    model.eval()
    answers = []
    for question in questions:
        torch.manual_seed(0)
        inputs = tokenizer([question["turns"][0]], return_tensors="pt")
        output_ids, new_token, step, lengths = forward(inputs, model, tokenizer, 16, **kw)
        text = tokenizer.decode(
            output_ids[0][len(inputs.input_ids[0]) :], spaces_between_special_tokens=False
        )
        answers.append(
            {"text": text, "new": int(new_token), "step": int(step), "lengths": list(lengths)}
        )
    return answers


def test_forward_serves_spec_benchs_harness(tiny_export: Path) -> None:
    """The harness believes what a forward_func returns, wrong counts included."""
    decoder = load(str(tiny_export), DecodeConfig(drafter="heads+suffix"))
    assert decoder.tokenizer is not None
    ours = harness(
        QUESTIONS, decoder.base, decoder.tokenizer, decoder=decoder, temperature=0.0, do_sample=0
    )
    plain = harness(QUESTIONS, decoder.base, decoder.tokenizer)
    assert [each["text"] for each in ours] == [each["text"] for each in plain]
    for one, other in zip(ours, plain, strict=True):
        ended = one["text"].endswith("<eos>")
        assert one["new"] == other["new"] == len(other["lengths"]) - ended
        assert other["lengths"] == [1] * other["step"]
        assert one["step"] == len(one["lengths"]) + 1 and sum(one["lengths"]) == other["step"] - 1
    with pytest.raises(ValueError, match="not the base model of decoder"):
        inputs = SimpleNamespace(input_ids=torch.tensor([[1]]))
        forward(inputs, object(), decoder.tokenizer, 4, decoder=decoder)
    with pytest.raises(ValueError, match="1 prompt, got 2"):
        two = SimpleNamespace(input_ids=torch.tensor([[1], [2]]))
        forward(two, decoder.base, decoder.tokenizer, 4, decoder=decoder)


def test_an_end_token_is_no_token_of_the_answer(tiny_export: Path) -> None:
    """Counted on the method's side only, it makes short answers faster than they are."""
    decoder = load(str(tiny_export))
    assert decoder.tokenizer is not None
    weight = decoder.base.get_output_embeddings().weight
    inputs = decoder.tokenizer(["def f(x):"], return_tensors="pt")
    sequence, _ = suites.decode_turn(decoder, inputs.input_ids, 8)
    fourth = int(sequence[0, inputs.input_ids.shape[1] + 3])
    with torch.no_grad():  # from now on the fourth token ends the text
        weight[[EOS, fourth]] = weight[[fourth, EOS]]
    ended = load(str(tiny_export))
    with torch.no_grad():
        ended.base.get_output_embeddings().weight.copy_(weight)
    out, new, step, lengths = forward(inputs, ended.base, ended.tokenizer, 8, decoder=ended)
    tokens = out[0, inputs.input_ids.shape[1] :].tolist()
    assert tokens[-1] == EOS and new == len(tokens) - 1 <= 3
    assert sum(lengths) == len(tokens) - 1 and step == len(lengths) + 1


def test_commands_and_names(config: SpecBenchConfig) -> None:
    """Two runs under one name would mix their answers."""
    from specheads.spec_bench import model_ids

    assert model_ids(config, ["heads", "suffix"], "float32")[0].endswith(
        "heads+suffix-float32-temp-0"
    )
    lossy = replace(config, decode=DecodeConfig(acceptance="lossy_typical"), temperature=0.7)
    ours, plain = model_ids(lossy, ["heads"], "float16")
    assert ours.endswith("heads-lossy_typical-float16-temp-0.7")
    assert plain.endswith("plain-float16-temp-0.7")
    with pytest.raises(ConfigError, match="which plain decoding's answers are called"):
        model_ids(replace(lossy, name=plain), ["heads"], "float16")
    with pytest.raises(ConfigError, match="out is .* but there is no folder"):
        run(replace(config, out="/nowhere/out.json"))
    with pytest.raises(ConfigError, match="end must be 0 or above 3"):
        SpecBenchConfig(begin=3, end=2)
