"""Answer a suite's questions: ``python -m specheads.spec_bench checkpoint= questions=<file>``.

With a drafter and plainly, question by question in turn, into answer files of Spec-Bench's format;
then Spec-Bench's own formula stands beside one that counts both sides alike. Started again, it
answers what is missing. For Spec-Bench's own harness there is :func:`forward`::

    from specheads.spec_bench import forward, load
    decoder = load("runs/hydra/export", dtype="float16", device="cuda")
    run_eval(model=decoder.base, tokenizer=decoder.tokenizer, forward_func=forward, decoder=decoder, ...)
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specheads.config import ConfigError, SpecBenchConfig
from specheads.config.main import answer, answers_json, hydra_main
from specheads.system.files import check_folder
from specheads.system.terminal import progress_bar

if TYPE_CHECKING:
    from specheads.data.suites import Question, QuestionPrompts
    from specheads.measure.suites import AnswerFile


def __getattr__(name: str) -> Any:
    """Import :func:`forward` and :func:`load`, hence torch, when somebody asks for them."""
    if name not in ("forward", "load"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from specheads.decoding.exported import load_decoder
    from specheads.measure.suites import forward

    return forward if name == "forward" else load_decoder


@answers_json
def run(config: SpecBenchConfig) -> None:
    """Read the questions, answer those without an answer, score, print, write.

    Raises:
        ConfigError: for wrong settings or files.
    """
    import json

    from specheads.data.suites import QuestionPrompts, read_questions
    from specheads.decoding.exported import check_drafter, is_plain_model
    from specheads.measure.suites import (
        details_of,
        format_scores,
        read_answers,
        read_details,
        score,
    )
    from specheads.models.base import load_tokenizer
    from specheads.system import hardware

    out = check_folder("out", config.out)
    questions = read_questions(config.questions, config.begin, config.end)
    baseline = read_answers(Path(config.baseline)) if config.baseline else []
    names = check_drafter(config.decode, has_heads=not is_plain_model(config.checkpoint))
    device, torch_dtype, threads = hardware.prepare(config.device, config.dtype, config.threads)
    dtype = str(torch_dtype).removeprefix("torch.")
    tokenizer = load_tokenizer(config.checkpoint)
    prompts = QuestionPrompts(tokenizer, config.template)
    ours, plain = model_ids(config, names, dtype)
    shared = _settings(config, prompts.kind, dtype)
    files = _open_files(config, ours, plain, shared)
    before = hardware.sample()
    left_out = _answer_missing(config, questions, files, prompts, dtype)
    others = None if left_out is None else hardware.between(before, hardware.sample())
    asked = {question.id for question in questions}
    found = {}
    for name, file in files.items():
        file.reorganise()
        found[name] = [each for each in file.answers.values() if each["question_id"] in asked]
    if not found["drafted"]:
        raise ConfigError(f"none of the {len(questions)} questions fits the base model's context")
    details = read_details(files["drafted"].details_path)
    against = Path(config.baseline or f"{config.answers}/{plain}.jsonl")
    rows = score(
        found["drafted"],
        baseline or found.get("plain", []),
        lambda text: len(tokenizer(text, verbose=False).input_ids),
        details,
        read_details(details_of(against)),  # an earlier run of ours has them too
    )
    result = {
        "environment": {**hardware.environment(device), "contention": others},
        "settings": {**asdict(config), **shared, "threads": threads, "drafter": "+".join(names)},
        "answers": {name: str(file.path) for name, file in files.items()}
        | ({"baseline": config.baseline} if config.baseline else {}),
        "num_questions": len(questions),
        "too_long": left_out or [],
        "cut_by_context": sum(
            min(row["limit"]) < config.max_new_tokens for row in details.values()
        ),
        "scores": rows,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(format_scores(rows))
    sides = [{a["question_id"] for a in each} for each in (*found.values(), baseline) if each]
    for line in _remarks(config, result, all(side == sides[0] for side in sides)):
        print(line)
    print(f"answers: {', '.join(result['answers'].values())}; wrote {out}")
    answer(result)


def model_ids(config: SpecBenchConfig, names: Sequence[str], dtype: str) -> tuple[str, str]:
    """Return the ``model_id`` of the drafter's answers, and of plain decoding's."""
    path = Path(config.checkpoint)
    short = path.resolve().parent.name if path.name == "export" else path.name
    end = f"{dtype}-temp-{config.temperature:g}"
    rule = "" if config.decode.acceptance == "exact" else f"-{config.decode.acceptance}"
    ours = config.name or f"{short}-{'+'.join(names)}{rule}-{end}"
    plain = f"{short}-plain-{end}"
    if ours == plain:
        raise ConfigError(f"name is {ours}, which plain decoding's answers are called")
    return ours, plain


def _settings(config: SpecBenchConfig, template: str, dtype: str) -> dict[str, Any]:
    """Return what decides the answers and their times, but for the drafter."""
    from specheads.decoding.exported import is_plain_model
    from specheads.models.manifest import MANIFEST
    from specheads.models.names import base_digest, file_sha256

    weights = config.checkpoint
    if not is_plain_model(weights):
        weights = file_sha256(Path(weights) / MANIFEST)
    elif weights == "tinycode" or Path(weights).expanduser().is_dir():  # not a name on the hub
        weights = base_digest(weights)
    same = {key: getattr(config, key) for key in ("max_new_tokens", "temperature", "seed")}
    return {
        "weights": weights,
        "template": template,
        **same,
        "dtype": dtype,
        "threads": config.threads,
    }


def _open_files(
    config: SpecBenchConfig, ours: str, plain: str, shared: Mapping[str, Any]
) -> dict[str, AnswerFile]:
    """Open the drafter's answer file, and plain decoding's where there is no other baseline.

    Raises:
        ConfigError: if one of them was begun with other settings than ``shared`` and those of its
            decoding.
    """
    from specheads.measure.suites import AnswerFile

    folder, decode = Path(config.answers), config.decode
    files = {"drafted": AnswerFile(folder, ours, {**shared, "decode": asdict(decode)})}
    if config.plain and not config.baseline:
        compiled = {"decode": {"compile": decode.compile}}
        files["plain"] = AnswerFile(folder, plain, {**shared, **compiled})
    return files


def _answer_missing(
    config: SpecBenchConfig,
    questions: Sequence[Question],
    files: Mapping[str, AnswerFile],
    prompts: QuestionPrompts,
    dtype: str,
) -> list[int | str] | None:
    """Load, and answer what is missing; return the ids of questions that are too long.

    None where nothing is missing: then nothing is loaded.
    """
    from specheads.decoding.exported import load_decoder
    from specheads.decoding.generate import SpecDecoder
    from specheads.measure.suites import Asked, answer_all

    todo = {
        number: missing
        for number, question in enumerate(questions)
        if (missing := [name for name, file in files.items() if not file.has(question)])
    }
    if not todo:
        return None
    drafted = load_decoder(
        config.checkpoint, config.decode, base=config.base, dtype=dtype, device=config.device
    )
    plain = SpecDecoder(
        drafted.base, None, tokenizer=drafted.tokenizer, compile=config.decode.compile
    )
    with progress_bar("question", total=len(todo)) as bar:
        return answer_all(
            {"drafted": drafted, "plain": plain},
            questions,
            todo,
            files,
            Asked(
                prompts,
                config.max_new_tokens,
                config.temperature,
                config.seed,
                config.warmup,
                config.skip_long,
            ),
            bar.update,
        )


def _remarks(config: SpecBenchConfig, result: Mapping[str, Any], alike: bool) -> list[str]:
    """Return what a reader of the table has to know."""
    from specheads.system.hardware import SHARE_LIMIT

    lines = []
    overall = result["scores"][-1]
    others = (result["environment"]["contention"] or {}).get("other_share") or 0.0
    if others > SHARE_LIMIT:
        lines.append(f"the machine was busy: others took {others:.0%} of the processors meanwhile")
    if num_long := len(result["too_long"]):
        total = result["num_questions"]
        lines.append(
            f"left out, longer than the base model's context: {num_long} of {total} questions"
        )
    if result["cut_by_context"]:
        lines.append(f"answers that the context may have cut: {result['cut_by_context']}")
    if not alike:
        lines.append(
            "the files do not answer the same questions: Spec-Bench's formula compares all of each,"
            " the corrected columns those in both"
        )
    if different := overall["different"]:
        shown = ", ".join(map(str, different[:5])) + (", ..." if len(different) > 5 else "")
        lines.append(f"answers that differ from plain decoding's: {len(different)} ({shown})")
    if config.decode.acceptance != "exact":
        lines.append(f"decode.acceptance={config.decode.acceptance} is lossy: other answers")
    return lines


def main() -> None:
    """Entry point."""
    hydra_main("spec_bench", SpecBenchConfig, run)


if __name__ == "__main__":
    main()
