"""Score answer files: by Spec-Bench's own formula, and by one that counts both sides alike.

Spec-Bench's speed.py (hemingkx/Spec-Bench) takes a method's tokens from ``new_tokens``, but counts
the baseline's anew, in its texts, less one per turn; and it averages speeds over questions, so
that a short answer weighs as much as a long one. With short answers that favours the method: at
truly equal speed, 20-token answers and a method that counts its end token and one more, the
formula says 1.16x for a tokenizer without a bos token. The corrected columns take ``new_tokens``
and seconds of both files, all tokens over all seconds, and once more without the prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from specheads.decoding.answer_files import Answer
from specheads.decoding.stats import ratio_ci95

MT_BENCH = (
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
)  # fmt: skip
TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")

CountTokens = Callable[[str], int]  # ids that the tokenizer makes of a text, bos included
Details = Mapping[int | str, Mapping[str, Any]]  # question_id -> what lies beside its answer


def tasks_of(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    """Return the answers by sub-task, ``overall`` at last.

    Of Spec-Bench's categories, eight make up ``mt_bench``; in any other suite each is a task of its
    own, even where it is called like one of them.
    """
    categories = list(dict.fromkeys(answer["category"] for answer in answers))
    if set(categories) <= {*MT_BENCH, *TASKS[1:]}:
        found = {
            task: [a for a in answers if a["category"] in (MT_BENCH if i == 0 else (task,))]
            for i, task in enumerate(TASKS)
        }
        found = {task: of for task, of in found.items() if of}
    else:
        found = {each: [a for a in answers if a["category"] == each] for each in categories}
    return {**found, "overall": list(answers)}


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
    speeds = [_new_tokens(each) / _seconds(each) for each in answers]
    speeds0 = [
        sum(count(text) - 1 for text in each["choices"][0]["turns"]) / _seconds(each)
        for each in baseline
    ]
    lengths = [length for each in answers for length in each["choices"][0]["accept_lengths"]]
    ours, theirs = sum(speeds) / len(speeds), sum(speeds0) / len(speeds0)
    return {
        "tokens_per_second": ours,
        "tokens_per_second_baseline": theirs,
        "speedup": ours / theirs if theirs else None,
        "mean_accepted_tokens": sum(lengths) / len(lengths) if lengths else 0.0,
    }


def corrected(answers: Sequence[Answer], baseline: Sequence[Answer]) -> dict[str, Any]:
    """Return the same with one rule of counting for both sides; both of the same questions.

    Returns:
        ``tokens_per_second``, ``tokens_per_second_baseline``, ``speedup`` and ``speedup_ci95``: the
        bootstrap interval over questions.
    """
    tokens, tokens0 = _each(_new_tokens, answers), _each(_new_tokens, baseline)
    seconds, seconds0 = _each(_seconds, answers), _each(_seconds, baseline)
    return _speeds(tokens, seconds, tokens0, seconds0)


def decode_only(
    answers: Sequence[Answer],
    baseline: Sequence[Answer],
    details: Details,
    details0: Details,
) -> dict[str, Any] | None:
    """Return :func:`corrected` without the prefill and the token it gives.

    None where the files beside the answers do not say how long that took, or nothing but prefills
    was done.
    """
    sides = []
    for each, beside in ((answers, details), (baseline, details0)):
        if any(answer["question_id"] not in beside for answer in each):
            return None
        rows = [beside[answer["question_id"]] for answer in each]
        tokens = [float(sum(n - 1 for n in row["num_emitted"])) for row in rows]
        seconds = [
            _seconds(a) - sum(row["prefill_time"]) for a, row in zip(each, rows, strict=True)
        ]
        sides += [tokens, seconds]
    return _speeds(*sides) if sum(sides[0]) and sum(sides[2]) else None


def accept_length(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return tokens per step, its interval over questions, and how deep guesses were accepted.

    Returns:
        ``accept_length`` and ``accept_length_ci95``, 0 where no step was made; ``accepted_at``: for
        1, 2, ... guesses, the share of the steps that accepted at least as many.
    """
    lengths = [answer["choices"][0]["accept_lengths"] for answer in answers]
    steps = sum(map(len, lengths))
    if not steps:
        return {"accept_length": 0.0, "accept_length_ci95": [0.0, 0.0], "accepted_at": []}
    low, high = ratio_ci95([list(map(sum, lengths))], [list(map(len, lengths))])
    counts = [0] * (max(map(max, filter(None, lengths))) + 1)
    for length in (length for each in lengths for length in each):
        counts[length] += 1
    at_least = list(accumulate(reversed(counts)))[::-1]  # steps of this length and more
    return {
        "accept_length": sum(map(sum, lengths)) / steps,
        "accept_length_ci95": [low, high],
        "accepted_at": [n / steps for n in at_least[2:]],
    }


def score(
    answers: Sequence[Answer],
    baseline: Sequence[Answer],
    count: CountTokens,
    details: Details,
    details0: Details,
) -> list[dict[str, Any]]:
    """Return a row per sub-task, and ``overall``.

    Spec-Bench's formula is given each file as it is, as speed.py is. What is corrected compares the
    questions that stand in both.

    Args:
        answers: of the method.
        baseline: of plain decoding; empty if there is none.
        count: see :func:`published`.
        details: of the method's answers.
        details0: of the baseline's.

    Returns:
        Rows with ``task``, ``num_questions``, :func:`accept_length`'s keys, ``published``,
        ``corrected``, ``decode_only`` (each None without a baseline), ``identical`` texts among
        those ``compared``, and ``different``: the questions whose answers are not the same.
    """
    theirs, rows = tasks_of(baseline), []
    for task, of in tasks_of(answers).items():
        against = theirs.get(task, [])
        known = {answer["question_id"]: answer for answer in against}
        both = [answer for answer in of if answer["question_id"] in known]
        others = [known[answer["question_id"]] for answer in both]
        texts = [
            (a["question_id"], one == other)
            for a, b in zip(both, others, strict=True)
            for one, other in zip(a["choices"][0]["turns"], b["choices"][0]["turns"], strict=False)
        ]
        rows.append(
            {
                "task": task,
                "num_questions": len(of),
                **accept_length(of),
                "published": published(of, against, count) if against else None,
                "corrected": corrected(both, others) if both else None,
                "decode_only": decode_only(both, others, details, details0) if both else None,
                "identical": sum(same for _, same in texts),
                "compared": len(texts),
                "different": list(dict.fromkeys(name for name, same in texts if not same)),
            }
        )
    return rows


def format_scores(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table: Spec-Bench's own figures on the left, corrected ones on the right."""
    width = max(14, *(len(row["task"]) for row in rows))
    lines = [
        f"{'':{width}}{'':>6}  {'Spec-Bench formula':^32}  {'corrected: one rule for both':^51}",
        f"{'task':<{width}}{'n':>6}  {'tok/s':>8}{'base':>8}{'speed-up':>10}{'MAT':>6}"
        f"  {'speed-up':>9}{'95%':>12}{'decode':>8}{'95%':>12}{'same':>10}",
    ]
    for row in rows:
        ours, fair, decode = row["published"], row["corrected"], row["decode_only"]
        cells = f"{row['task']:<{width}}{row['num_questions']:>6}  "
        if ours is None or fair is None:
            lines.append(f"{cells}{'-':>8}{'-':>8}{'-':>10}{row['accept_length']:>6.2f}")
            continue
        cells += (
            f"{ours['tokens_per_second']:>8.1f}{ours['tokens_per_second_baseline']:>8.1f}"
            f"{_times(ours):>10}{ours['mean_accepted_tokens']:>6.2f}"
            f"  {_times(fair):>9}{_interval(fair):>12}"
        )
        cells += f"{_times(decode):>8}{_interval(decode):>12}" if decode else f"{'-':>20}"
        same = f"{row['identical']}/{row['compared']}"
        lines.append(f"{cells}{same:>10}")
    overall = rows[-1]
    low, high = overall["accept_length_ci95"]
    deep = ", ".join(f"{i}: {share:.2f}" for i, share in enumerate(overall["accepted_at"], 1))
    lines.append(
        f"Accept length {overall['accept_length']:.2f} (95%: {low:.2f} to {high:.2f})"
        + (f"; share of steps that accepted at least so many guesses: {deep}" if deep else "")
    )
    return "\n".join(lines)


def _times(speeds: Mapping[str, Any]) -> str:
    return "-" if speeds["speedup"] is None else f"{speeds['speedup']:.2f}x"


def _interval(speeds: Mapping[str, Any]) -> str:
    low, high = speeds["speedup_ci95"]
    return f"{low:.2f}-{high:.2f}"


def _speeds(
    tokens: list[float], seconds: list[float], tokens0: list[float], seconds0: list[float]
) -> dict[str, Any]:
    ours, theirs = sum(tokens) / sum(seconds), sum(tokens0) / sum(seconds0)
    low, high = ratio_ci95([tokens, seconds0], [seconds, tokens0])
    return {
        "tokens_per_second": ours,
        "tokens_per_second_baseline": theirs,
        "speedup": ours / theirs if theirs else None,
        "speedup_ci95": [low, high],
    }


def _each(of: Callable[[Answer], float], answers: Sequence[Answer]) -> list[float]:
    return [of(answer) for answer in answers]


def _new_tokens(answer: Answer) -> float:
    return float(sum(answer["choices"][0]["new_tokens"]))


def _seconds(answer: Answer) -> float:
    return float(sum(answer["choices"][0]["wall_time"]))
