"""Answer a suite's questions: ``python -m specheads.spec_bench checkpoint= questions=<file>``.

With a drafter and plainly, question by question in turn, into answer files of Spec-Bench's format;
then Spec-Bench's own formula stands beside one that counts both sides alike. Started again, it
answers what is missing. For Spec-Bench's own harness there is :func:`forward`::

    from specheads.spec_bench import forward, load
    decoder = load("runs/hydra/export", dtype="float16", device="cuda")
    run_eval(model=decoder.base, tokenizer=decoder.tokenizer, forward_func=forward, decoder=decoder, ...)
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specheads.config import ConfigError, SpecBenchConfig
from specheads.config.main import entry_point, report
from specheads.system.files import check_folder


def __getattr__(name: str) -> Any:
    """Import :func:`forward` and :func:`load`, hence torch, when somebody asks for them."""
    if name not in ("forward", "load"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from specheads.decoding.generate import SpecDecoder
    from specheads.measure.suites import forward

    return forward if name == "forward" else SpecDecoder.from_pretrained


def run(config: SpecBenchConfig) -> None:
    """Read the questions, answer those without an answer, score, print, write.

    Raises:
        ConfigError: for wrong settings or files.
    """
    from specheads.data.suites import QuestionPrompts, read_questions
    from specheads.decoding import exported
    from specheads.measure import suites
    from specheads.measure.render import suite_remarks
    from specheads.models.base import load_tokenizer
    from specheads.system import hardware

    out, decode = check_folder("out", config.out), config.decode
    questions = read_questions(config.questions, config.begin, config.end)
    baseline = suites.read_answers(Path(config.baseline)) if config.baseline else []
    names = exported.check_drafter(decode, has_heads=not exported.is_plain_model(config.checkpoint))
    device, torch_dtype, threads = hardware.prepare(config.device, config.dtype, config.threads)
    dtype = str(torch_dtype).removeprefix("torch.")
    tokenizer = load_tokenizer(config.checkpoint)
    prompts = QuestionPrompts(tokenizer, config.template)
    ours, plain = model_ids(config, names, dtype)
    same = {key: getattr(config, key) for key in ("max_new_tokens", "temperature", "seed")}
    # what decides the answers and their times, but for the drafter
    weights = exported.weights_digest(config.checkpoint)
    shared = {"weights": weights, "template": prompts.kind, **same}
    shared |= {"dtype": dtype, "threads": config.threads}
    folder, how = Path(config.answers), shared | {"decode": asdict(decode)}
    files = {"drafted": suites.AnswerFile(folder, ours, how)}
    if config.plain and not config.baseline:
        how = shared | {"decode": {"compile": decode.compile}}
        files["plain"] = suites.AnswerFile(folder, plain, how)
    before = hardware.sample()
    left_out = suites.answer_missing(config, questions, files, prompts, dtype)
    others = None if left_out is None else hardware.between(before, hardware.sample())
    asked = {question.id for question in questions}
    found = {}
    for name, file in files.items():
        file.reorganise()
        found[name] = [each for each in file.answers.values() if each["question_id"] in asked]
    if not found["drafted"]:
        raise ConfigError(f"none of the {len(questions)} questions fits the base model's context")
    rows = suites.score(
        found["drafted"],
        baseline or found.get("plain", []),
        lambda text: len(tokenizer(text, verbose=False).input_ids),
    )
    written = {name: str(file.path) for name, file in files.items()}
    limits = [min(each[suites.OURS]["limit"]) for each in found["drafted"]]
    result = {
        "environment": {**hardware.environment(device), "contention": others},
        "settings": {**asdict(config), **shared, "threads": threads, "drafter": "+".join(names)},
        "answers": written | ({"baseline": config.baseline} if config.baseline else {}),
        "num_questions": len(questions),
        "too_long": left_out or [],
        "cut_by_context": sum(limit < config.max_new_tokens for limit in limits),
        "scores": rows,
    }
    sides = [{a["question_id"] for a in each} for each in (*found.values(), baseline) if each]
    lines = suite_remarks(result, alike=all(side == sides[0] for side in sides))
    files_said = f"answers: {', '.join(result['answers'].values())}"
    report(out, result, "\n".join([suites.format_scores(rows), *lines, files_said]))


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


main = entry_point("spec_bench", SpecBenchConfig, run)


if __name__ == "__main__":
    main()
