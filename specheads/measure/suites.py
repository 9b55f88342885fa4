"""Answer a suite's questions one at a time, write the answers in Spec-Bench's format, score them.

A line of an answer file holds ``question_id``, ``category``, ``answer_id``, ``model_id``,
``choices`` and ``tstamp``; a choice ``index``, and per turn ``turns`` (texts), ``decoding_steps``,
``new_tokens`` and ``wall_time``, and over all turns ``accept_lengths``. What else there is to know
of an answer of ours stands behind them under a key of its own, ``specheads``.

Scores are Spec-Bench's own and corrected ones. Its speed.py (hemingkx/Spec-Bench) takes a method's
tokens from ``new_tokens``, but counts the baseline's anew, in its texts, less one per turn; and it
averages speeds over questions, so that a short answer weighs as much as a long one. With short
answers that favours the method: at truly equal speed, 20-token answers and a method that counts its
end token and one more, the formula says 1.16x for a tokenizer without a bos token. The corrected
columns take ``new_tokens`` and seconds of both files, all tokens over all seconds, and once more
without the prefill.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads.config import ConfigError, SpecBenchConfig
from specheads.data.readers import json_lines
from specheads.data.schema import keep_settings
from specheads.data.suites import Question, QuestionPrompts
from specheads.decoding.generate import SpecDecoder, TooLongError, ending, room
from specheads.measure.clock import now
from specheads.measure.render import Columns, estimate, figure, interval, make_table
from specheads.measure.rows import Work, accept_length_ci95, mean_accept_length, ratio_ci95, speed
from specheads.models.base import input_device
from specheads.system.files import cut_torn_line, write_whole
from specheads.system.terminal import progress_bar

Answer = dict[str, Any]  # a line of an answer file
Turn = dict[str, Any]  # what one turn was answered with, see :func:`decode_turn`

OURS = "specheads"  # key of what Spec-Bench's format has no place for
_NO_LIMIT = 1 << 30  # bytes of a line
_MORE = ("prefill_time", "num_emitted", "num_prompt_tokens", "limit")  # of a turn, and OURS
_SCORED = ("turns", "new_tokens", "wall_time", "accept_lengths")  # speed.py reads no more


class AnswerFile:
    """``<folder>/<model_id>.jsonl``, to be gone on with; its settings stand in a .json beside it.

    Args:
        folder: of the answers; made where it is missing.
        model_id: name of the file.
        settings: all that decides the answers; those of an earlier run must be the same.

    Attributes:
        answers: by question.

    Raises:
        ConfigError: if the file was written with other settings, or not by this class.
    """

    def __init__(self, folder: Path, model_id: str, settings: Mapping[str, Any]) -> None:
        self.path, self.model_id = folder / f"{model_id}.jsonl", model_id
        kept, begun = (
            self.path.with_suffix(".json"),
            self.path.exists() and self.path.stat().st_size,
        )
        folder.mkdir(parents=True, exist_ok=True)
        if not begun:
            kept.unlink(missing_ok=True)
        keep_settings(self.path, kept, settings, "give another name or folder")
        cut_torn_line(self.path)
        self.answers: dict[int | str, Answer] = {}
        if begun and self.path.stat().st_size:
            self.answers = {each["question_id"]: each for each in read_answers(self.path)}

    def has(self, question: Question) -> bool:
        """Return whether the question is answered.

        Raises:
            ConfigError: if another question of that id is.
        """
        if question.id not in self.answers:
            return False
        if self.answers[question.id][OURS]["question"] != question_digest(question):
            raise ConfigError(
                f"{self.path} answers another question {question.id!r} than the one asked now:"
                " give another name or folder"
            )
        return True

    def append(self, question: Question, turns: Sequence[Turn]) -> None:
        """Write an answer behind the others, at once and for good."""
        of = {key: [turn[key] for turn in turns] for key in turns[0]}
        of["accept_lengths"] = list(chain.from_iterable(of["accept_lengths"]))
        more = {key: of.pop(key) for key in _MORE}
        self.answers[question.id] = {
            "question_id": question.id,
            "category": question.category,
            "answer_id": uuid.uuid4().hex,
            "model_id": self.model_id,
            "choices": [{"index": 0, **of}],
            "tstamp": time.time(),
            OURS: {"question": question_digest(question), **more},
        }
        with self.path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(self.answers[question.id]) + "\n")
            lines.flush()
            os.fsync(lines.fileno())

    def reorganise(self) -> None:
        """Sort by question, the last of several answers to one kept, as Spec-Bench does at last."""
        ordered = sorted(self.answers, key=lambda name: (isinstance(name, str), name))
        if rows := [json.dumps(self.answers[name]) + "\n" for name in ordered]:
            write_whole(self.path, "".join(rows))


def question_digest(question: Question) -> str:
    """Return a short digest of all that is asked."""
    content = json.dumps([question.category, question.system, question.turns])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def read_answers(path: Path) -> list[Answer]:
    """Read an answer file, of any program.

    Raises:
        ConfigError: if it is missing, empty, or a line lacks what is scored; names the line.
    """
    answers = [_checked(row.parse(), row.where) for row in json_lines(path, _NO_LIMIT)]
    if not answers:
        raise ConfigError(f"{path} holds no answers")
    return answers


def _checked(value: object, where: str) -> Answer:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected an object, got {type(value).__name__}")
    for key, kind in (("question_id", int | str), ("category", str), ("choices", list)):
        if not isinstance(value.get(key), kind):
            raise ConfigError(f"{where}: {key} is missing or wrong, got {value.get(key)!r:.60}")
    choice: Any = value["choices"][0] if value["choices"] else None
    for key in _SCORED:
        given = choice.get(key) if isinstance(choice, dict) else None
        kind = str if key == "turns" else int | float
        if not isinstance(given, list) or not all(isinstance(each, kind) for each in given):
            raise ConfigError(f"{where}: choices[0].{key} is missing or wrong, got {given!r:.60}")
    if sum(choice["wall_time"]) <= 0:
        raise ConfigError(f"{where}: choices[0].wall_time must be above 0 seconds")
    return value


def answer(
    decoder: SpecDecoder,
    question: Question,
    number: int,
    prompts: QuestionPrompts,
    config: SpecBenchConfig,
) -> list[Turn]:
    """Return the answers to all turns of a question, each given those before it.

    Args:
        decoder: answers, with a tokenizer bound; without a drafter, plainly.
        question: asked.
        number: its place in the suite, which is added to the seed.
        prompts: makes them of questions.
        config: limit, temperature and seed of the answers.

    Raises:
        TooLongError: if a turn does not fit the base model's context.
        ConfigError: if the chat template refuses the conversation.
    """
    turns: list[Turn] = []
    drawn: dict[str, Any] = {"temperature": config.temperature, "seed": config.seed + number}
    for i in range(len(question.turns)):
        ids = prompts.ids(question, [turn["turns"] for turn in turns])
        limit = min(config.max_new_tokens, _room(decoder, ids, question, i))
        input_ids = torch.tensor([ids], device=input_device(decoder.base))
        turns.append(decode_turn(decoder, input_ids, limit, **drawn)[1])
    return turns


def answer_missing(
    config: SpecBenchConfig,
    questions: Sequence[Question],
    files: Mapping[str, AnswerFile],
    prompts: QuestionPrompts,
    dtype: str,
) -> list[int | str] | None:
    """Load, and answer what is missing, the decoders in turn, each first in every other question.

    Args:
        config: how; ``warmup`` times each decoder answers a question before the first is clocked.
        questions: of the suite.
        files: of ``drafted`` and ``plain``; every answer is written before the next question is
            asked.
        prompts: makes them of questions.
        dtype: of the weights.

    Returns:
        The ids of the questions left out; None where nothing is missing: then nothing is loaded.

    Raises:
        ConfigError: if a question does not fit, and ``skip_long`` is false.
    """
    todo = [
        (number, question, missing)
        for number, question in enumerate(questions)
        if (missing := [name for name, file in files.items() if not file.has(question)])
    ]
    if not todo:
        return None
    drafted = SpecDecoder.from_pretrained(
        config.checkpoint, config.decode, base=config.base, dtype=dtype, device=config.device
    )
    decoders = {"drafted": drafted, "plain": replace(drafted, drafter=None, acceptance=None)}
    left_out: list[int | str] = []
    fitting: list[tuple[int, Question, list[str]]] = []
    with progress_bar("question", total=len(todo)) as bar:

        @contextlib.contextmanager
        def leaving_out(question: Question) -> Iterator[None]:
            try:
                yield
            except TooLongError as error:
                if config.skip_long:
                    left_out.append(question.id)
                    bar.update()
                    return
                raise ConfigError(f"{error}; skip_long=true leaves such questions out") from None

        for each in todo:  # all of them first: the last question must not end a run of hours
            with leaving_out(each[1]):
                _room(drafted, prompts.ids(each[1]), each[1])
                fitting.append(each)
        for number, question, _ in fitting[:1]:
            for decoder in [decoders[name] for name in files] * config.warmup:
                with contextlib.suppress(TooLongError):  # of a later turn; the clocked one says it
                    answer(decoder, question, number, prompts, config)
        for number, question, missing in fitting:
            order = missing if number % 2 else missing[::-1]
            with leaving_out(question):
                asked = question, number, prompts, config
                turns = {name: answer(decoders[name], *asked) for name in order}
                for name in missing:
                    files[name].append(question, turns[name])
                bar.update()
    return left_out


def decode_turn(
    decoder: SpecDecoder,
    input_ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> tuple[Tensor, Turn]:
    """Decode one prompt [1, P].

    The token that ends an answer is no token of it: Spec-Bench counts a baseline's tokens in its
    text, which has none, and a method that counted it would be faster by nothing but that. Of
    plain decoding every pass gains a token; with a drafter the prefill's belongs to no step.

    Returns:
        The sequence [1, P + L], and by the names that they have in an answer file: ``turns``, the
        text without special tokens, stripped; ``decoding_steps``, forward passes of the base model,
        the prefill included; ``new_tokens`` of the answer; ``wall_time``, seconds, prefill
        included; ``accept_lengths``, tokens gained by each verify step, of plain decoding by each
        pass. Beside them ``prefill_time``, seconds until the first token was there;
        ``num_emitted``, tokens that were decoded, the one that ends the answer included, and their
        ``limit``; ``num_prompt_tokens`` before the answer.
    """
    tokenizer, device = decoder.tokenizer, decoder.base.device
    assert tokenizer is not None
    times: list[float] = []
    ends = ending(decoder)
    drawn: dict[str, Any] = {"top_k": 0, "top_p": 1.0} if temperature > 0 else {}
    start = now(device)
    result = decoder.generate(
        input_ids,
        max_new_tokens,
        attention_mask=torch.ones_like(input_ids),
        temperature=temperature,
        seed=seed,
        on_tokens=lambda row, tokens: times.append(time.perf_counter()),
        **ends,
        **drawn,
    )
    seconds, tokens = now(device) - start, result.new_tokens
    said = tokens[:-1] if result.finished and tokens[-1] in ends["eos_token_id"] else tokens
    text = tokenizer.decode(said, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    num_passes = result.num_steps + 1
    lengths = [1] * num_passes if decoder.drafter is None else list(result.accept_lengths)
    return result.sequences, {
        "turns": str(text).strip(),
        "decoding_steps": num_passes,
        "new_tokens": len(said),
        "wall_time": seconds,
        "accept_lengths": lengths,
        "prefill_time": times[0] - start,
        "num_emitted": len(tokens),
        "num_prompt_tokens": input_ids.shape[1],
        "limit": max_new_tokens,
    }


def _room(decoder: SpecDecoder, ids: list[int], question: Question, turn: int = 0) -> int:
    return room(decoder.base, ids, f"question {question.id}, turn {turn}: the prompt")


def forward(
    inputs: Any,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
    *,
    decoder: SpecDecoder | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    **ignored: Any,
) -> tuple[Tensor, int, int, list[int]]:
    """Serve as ``forward_func`` of Spec-Bench's ``run_eval``.

    Args:
        inputs: what the tokenizer gave, with ``input_ids`` [1, P].
        model: the base model.
        tokenizer: its tokenizer.
        max_new_tokens: limit.
        decoder: what ``load`` returned; None decodes plainly, the baseline.
        temperature: of the sampling.
        seed: of the sampling.
        **ignored: what the harness hands to every method.

    Returns:
        ``output_ids`` [1, P + L]; new tokens, the one that ends the answer not counted; forward
        passes, the prefill included; tokens gained per verify step (of the baseline: per pass).

    Raises:
        ValueError: for another model than the decoder's base, or more than one prompt.
    """
    del ignored
    if decoder is None:
        decoder = SpecDecoder(model, None, tokenizer=tokenizer)
    elif decoder.base is not model:
        raise ValueError("model is not the base model of decoder: model=decoder.base")
    if inputs.input_ids.shape[0] != 1:
        raise ValueError(f"inputs must hold 1 prompt, got {inputs.input_ids.shape[0]}")
    sequences, turn = decode_turn(
        decoder, inputs.input_ids, max_new_tokens, temperature=temperature, seed=seed
    )
    return sequences, turn["new_tokens"], turn["decoding_steps"], turn["accept_lengths"]


MT_BENCH = (
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
)  # fmt: skip
TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")

CountTokens = Callable[[str], int]  # ids that the tokenizer makes of a text, bos included


def tasks_of(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    """Return the answers by sub-task, ``overall`` at last.

    Of Spec-Bench's categories, eight make up ``mt_bench``; in any other suite each is a task of its
    own, even where it is called like one of them.
    """
    categories = dict.fromkeys(answer["category"] for answer in answers)
    names: dict[str, tuple[str, ...]] = {category: (category,) for category in categories}
    if categories.keys() <= {*MT_BENCH, *TASKS[1:]}:
        names = {task: (task,) for task in TASKS} | {TASKS[0]: MT_BENCH}
    found = {task: [a for a in answers if a["category"] in of] for task, of in names.items()}
    return {**{task: of for task, of in found.items() if of}, "overall": list(answers)}


def published(
    answers: Sequence[Answer], baseline: Sequence[Answer], count: CountTokens
) -> dict[str, float | None]:
    """Return what speed.py prints for one task.

    Args:
        answers: of the method.
        baseline: of plain decoding.
        count: the tokenizer's number of ids of a text, with what it puts before it.

    Returns:
        ``tokens_per_second``, ``tokens_per_second_baseline``, ``speedup`` and
        ``mean_accepted_tokens``, which is 0 where no step was made. ``speedup`` is None where the
        baseline's answers are empty.
    """
    speeds = [_sum(each, "new_tokens") / _sum(each, "wall_time") for each in answers]
    speeds0 = [
        sum(count(text) - 1 for text in each["choices"][0]["turns"]) / _sum(each, "wall_time")
        for each in baseline
    ]
    lengths = [each["choices"][0]["accept_lengths"] for each in answers]
    ours, theirs = sum(speeds) / len(speeds), sum(speeds0) / len(speeds0)
    return {
        "tokens_per_second": ours,
        "tokens_per_second_baseline": theirs,
        "speedup": ours / theirs if theirs else None,
        "mean_accepted_tokens": mean_accept_length(lengths),
    }


def corrected(answers: Sequence[Answer], baseline: Sequence[Answer]) -> dict[str, Any]:
    """Return the same with one rule of counting for both sides; both of the same questions.

    Returns:
        ``tokens_per_second``, ``tokens_per_second_baseline``, ``speedup`` and ``speedup_ci95``: the
        bootstrap interval over questions.
    """
    return _speeds(_work(answers), _work(baseline))


def _work(answers: Sequence[Answer]) -> Work:
    return [_sum(each, "new_tokens") for each in answers], [_sum(a, "wall_time") for a in answers]


def _speeds(ours: Work, theirs: Work) -> dict[str, Any]:
    silent = not sum(theirs[0])  # nothing is faster than a baseline that said nothing
    bounds = ratio_ci95([ours[0], theirs[1]], [ours[1], theirs[0]])
    return {
        "tokens_per_second": speed(ours),
        "tokens_per_second_baseline": speed(theirs),
        "speedup": None if silent else speed(ours) / speed(theirs),
        "speedup_ci95": list(bounds),
    }


def decode_only(answers: Sequence[Answer], baseline: Sequence[Answer]) -> dict[str, Any] | None:
    """Return :func:`corrected` without the prefill and the token it gives.

    None where answers do not say how long that took, or nothing but prefills was done.
    """
    if not all(OURS in answer for answer in (*answers, *baseline)):
        return None
    sides: list[Work] = []
    for side in (answers, baseline):
        tokens = [float(sum(n - 1 for n in answer[OURS]["num_emitted"])) for answer in side]
        seconds = [_sum(each, "wall_time") - sum(each[OURS]["prefill_time"]) for each in side]
        sides.append((tokens, seconds))
    return _speeds(*sides) if all(sum(tokens) for tokens, _ in sides) else None


def accept_length(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return tokens per step, its interval over questions, and how deep guesses were accepted.

    Returns:
        ``accept_length`` and ``accept_length_ci95``, 0 where no step was made; ``accepted_at``: for
        1, 2, ... guesses, the share of the steps that accepted at least as many.
    """
    lengths = [answer["choices"][0]["accept_lengths"] for answer in answers]
    steps = Counter(chain.from_iterable(lengths))
    deeper = (
        sum(number for length, number in steps.items() if length > guesses)
        for guesses in range(1, max(steps, default=1))
    )
    return {
        "accept_length": mean_accept_length(lengths),
        "accept_length_ci95": accept_length_ci95(lengths),
        "accepted_at": [number / steps.total() for number in deeper],
    }


def score(
    answers: Sequence[Answer], baseline: Sequence[Answer], count: CountTokens
) -> list[dict[str, Any]]:
    """Return a row per sub-task, and ``overall``.

    Spec-Bench's formula is given each file as it is, as speed.py is. What is corrected compares the
    questions that stand in both.

    Args:
        answers: of the method.
        baseline: of plain decoding; empty if there is none.
        count: see :func:`published`.

    Returns:
        Rows with ``task``, ``num_questions``, :func:`accept_length`'s keys, ``published``,
        ``corrected``, ``decode_only`` (each None without a baseline), ``identical`` texts among
        those ``compared``, and ``different``: the questions whose answers are not the same.
    """
    theirs = tasks_of(baseline)

    def row(task: str, of: Sequence[Answer]) -> dict[str, Any]:
        against = theirs.get(task, [])
        known = {answer["question_id"]: answer for answer in against}
        both = [answer for answer in of if answer["question_id"] in known]
        others = [known[answer["question_id"]] for answer in both]
        texts = [
            (a["question_id"], one == other)
            for a, b in zip(both, others, strict=True)
            for one, other in zip(a["choices"][0]["turns"], b["choices"][0]["turns"], strict=False)
        ]
        return {
            "task": task,
            "num_questions": len(of),
            **accept_length(of),
            "published": published(of, against, count) if against else None,
            "corrected": corrected(both, others) if both else None,
            "decode_only": decode_only(both, others) if both else None,
            "identical": sum(same for _, same in texts),
            "compared": len(texts),
            "different": list(dict.fromkeys(name for name, same in texts if not same)),
        }

    return [row(*each) for each in tasks_of(answers).items()]


def _speed(speeds: Mapping[str, Any] | None, key: str = "speedup", form: str = ".2fx") -> str:
    return figure(speeds[key] if speeds else None, form, "-")


def _bounds(speeds: Mapping[str, Any] | None) -> str:
    return interval(speeds["speedup_ci95"]) if speeds else "-"


_SCORES: Columns = {
    "task": lambda row: str(row["task"]),
    "n": lambda row: str(row["num_questions"]),
    "tok/s": lambda row: _speed(row["published"], "tokens_per_second", ".1f"),
    "base": lambda row: _speed(row["published"], "tokens_per_second_baseline", ".1f"),
    "speed-up": lambda row: _speed(row["published"]),
    "MAT": lambda row: f"{row['accept_length']:.2f}",
    "corrected": lambda row: _speed(row["corrected"]),
    "95%": lambda row: _bounds(row["corrected"]),
    "decode": lambda row: _speed(row["decode_only"]),
    "decode 95%": lambda row: _bounds(row["decode_only"]),
    "same": lambda row: f"{row['identical']}/{row['compared']}" if row["corrected"] else "-",
}


def format_scores(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table: Spec-Bench's own figures on the left, corrected ones on the right."""
    overall = rows[-1]
    deep = ", ".join(f"{i}: {share:.2f}" for i, share in enumerate(overall["accepted_at"], 1))
    return (
        "Up to MAT by Spec-Bench's formula, then corrected: one rule for both\n"
        f"{make_table(rows, _SCORES).text()}\n"
        f"Accept length {estimate(overall, 'accept_length')}"
        + (f"; share of steps that accepted at least so many guesses: {deep}" if deep else "")
    )


def _sum(answer: Answer, key: str) -> float:
    """Return a figure of an answer over all its turns."""
    return float(sum(answer["choices"][0][key]))
