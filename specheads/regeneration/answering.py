"""All that ``regenerate`` does: prompts are read or asked by the base itself, answers are written.

Commands and pipelines call :func:`regenerate`, which says on its way what it does.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from specheads.config import ConfigError, InterruptedRunError, RegenerateConfig, RunError
from specheads.data.load import load_records, read_prompts
from specheads.data.schema import Dropped, Record, text_digest
from specheads.models.base import described, end_tokens, load_tokenizer
from specheads.regeneration import engine
from specheads.regeneration.answers import AnswerFile, Outcome, read_lines
from specheads.regeneration.dialogue import TurnEncoder, check_answerable
from specheads.regeneration.endpoint import ask_server
from specheads.regeneration.questions import Questioner, read_leads
from specheads.system.client import Client
from specheads.system.terminal import advance, progress_bar, waiting_for

Say = Callable[[str], object]
Ask = Callable[[Sequence[Record]], Iterator[Outcome]]


def regenerate(config: RegenerateConfig, say: Say) -> dict[str, Any]:
    """Answer the prompts that the settings name, or go on with the file of answers.

    Args:
        config: the settings.
        say: called with what a user wants to know on the way.

    Returns:
        What :func:`write_answers` returns.

    Raises:
        ConfigError: if settings or prompts are wrong.
        RunError: if too few questions can be used, no record is answered, or a server fails.
        InterruptedRunError: on Ctrl-C; the same call goes on.
    """
    client, output = None, config.output
    own = config.prompts == "self"
    if not own and config.prompts and Path(config.prompts).resolve() == Path(output).resolve():
        raise ConfigError(f"output={output} is the input itself")
    if config.logprobs and not config.model:
        raise ConfigError(f"logprobs={config.logprobs} needs model=, whose tokens they are of")
    if config.endpoint:
        client = Client(config.endpoint, timeout=config.timeout, retries=config.retries)
    with waiting_for("specheads: reading the prompts and the model's files"):
        read_leads(config.questions.kinds)
        records = [] if own else read_input(config, say)
        who = engine.who_answers(config, client)

    @cache
    def local() -> engine.Engine:
        with waiting_for(f"specheads: loading {who.model}"):
            return engine.load_engine(config, who)

    def ask(left: Sequence[Record]) -> Iterator[Outcome]:
        if who.tuned:
            say(f"the answers are those of the tuned base {who.model}, not of its original")
        if client is None:
            return local().answer(left)
        return ask_endpoint(config, who, client, left)

    settings = engine.settings_of(config, who)
    try:
        if own:
            whose = engine.weights_of(config, who)
            questioner = Questioner(local(), config.questions, config.seed, whose)
            records, told = questioner.write(Path(f"{output}.questions.jsonl"), config.limit)
            say(told)
            records = in_fair_order(records)
        for turn in range(1, config.questions.turns if own else 1):
            said = f"{output}.turn{turn}.jsonl"
            write_answers(said, settings, records, ask, say)
            answered = [record for _, record in read_lines(Path(said))]
            questioner = Questioner(local(), config.questions, config.seed, settings)
            records = questioner.go_on(Path(f"{said}.next.jsonl"), answered)
        return write_answers(output, settings, records, ask, say)
    except KeyboardInterrupt:
        raise InterruptedRunError(
            f"interrupted: {output} keeps what is there; the same command goes on"
        ) from None


def ask_endpoint(
    config: RegenerateConfig, who: engine.Answering, client: Client, records: Sequence[Record]
) -> Iterator[Outcome]:
    """Let the server of ``client`` answer records."""
    turns: TurnEncoder | None = None
    how: Any = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    if config.model:
        tokenizer = load_tokenizer(config.model, **how)
        ends = end_tokens(described(config.model, **how), tokenizer) if config.logprobs else ()
        turns = TurnEncoder(tokenizer, ends)
    whose = {"model": who.model, "endpoint": client.url} | engine.drawn_by(config)
    sampling, many = engine.sampling_of(config), config.concurrency
    return ask_server(client, who.model, sampling, records, whose, many, turns)


def write_answers(
    output: str, settings: Mapping[str, Any], records: Sequence[Record], ask: Ask, say: Say
) -> dict[str, Any]:
    """Append the answers to ``records`` to a file, but for those that it holds already.

    Where none is left, the answers stand in the order of their records, whenever they came.

    Args:
        output: the .jsonl.
        settings: JSON of all that decides what answers there are.
        records: what to answer, with different ids.
        ask: answers them; it is called where some are left only.
        say: called before with what is to be done, and after with what was.

    Returns:
        ``output``, and the numbers of records ``done``, ``done_before``, ``left`` and ``bad``.

    Raises:
        ConfigError: if the file was made otherwise.
        RunError: if no record is answered, or as ``ask`` does.
    """
    with AnswerFile(output, settings) as answers:
        left, num_before = answers.left(records), len(answers.done)
        cut = f", {answers.num_cut} bytes of an unfinished line cut off" if answers.num_cut else ""
        say(
            f"{output}: {num_before:,} done before, {answers.reasons()}{cut},"
            f" {len(left):,} left of {len(records):,}"
        )
        if left:
            _append(ask(left), answers, len(left))
        num_left = len(answers.left(records))
        if not num_left:
            answers.sort(records)
        say(
            f"{output}: {len(answers.done) - num_before:,} done now, {len(answers.done):,} in all,"
            f" {answers.reasons()}, {num_left:,} left"
        )
        bad = Counter(answers.bad.values())
        if bad["server"]:
            say(f"the server failed {bad['server']:,} of them; the same command tries those again")
        num_judged, limit = len(answers.done) + bad.total(), int(settings["max_new_tokens"])
        cure = ""
        if 0 < num_judged <= 10 * bad["truncated"]:
            # those that are left are the short ones: heads would learn that answers are short
            cure = (
                f"{bad['truncated']:,} of {num_judged:,} records reached max_new_tokens={limit} (or"
                f" the context's end) before an answer's end: max_new_tokens={4 * limit} with"
                " another output= lets more answers end, keep_truncated=true keeps them as they are"
            )
        if not answers.done:
            raise RunError(f"no record was answered: {answers.reasons()}{cure and f'; {cure}'}")
        if cure:
            say(cure)
        done = {"done": len(answers.done), "done_before": num_before}
        return {"output": output, **done, "left": num_left, "bad": dict(bad)}


def read_input(config: RegenerateConfig, say: Say) -> list[Record]:
    """Return the records to answer, in an order of which every beginning is a fair sample.

    Raises:
        ConfigError: if the input is wrong, or one of its records holds a text.
    """
    if config.prompts:
        records = read_prompts(config.prompts, chat=_takes_messages(config))
    else:
        dropped = Dropped()
        records = load_records(config.data, "train", dropped=dropped)
        if dropped:
            say(dropped.summary())
    check_answerable(records)
    records = in_fair_order(records)
    return records[: config.limit] if config.limit else records


def _takes_messages(config: RegenerateConfig) -> bool:
    """Tell whether who answers has a chat template; a server of which nothing is known has one."""
    if config.endpoint and not config.model:
        return True
    tokenizer = load_tokenizer(
        config.checkpoint or config.model or "tinycode",
        revision=None if config.checkpoint else config.revision,
        trust_remote_code=config.trust_remote_code,
    )
    return tokenizer.chat_template is not None


def in_fair_order(records: Sequence[Record]) -> list[Record]:
    """Return records in an order by their ids of which every beginning is a fair sample."""
    return sorted(records, key=lambda record: text_digest(record["id"]))


def _append(outcomes: Iterator[Outcome], answers: AnswerFile, total: int) -> None:
    """Write what becomes of records as it comes."""
    num_tokens, start = 0, time.monotonic()
    with progress_bar("record", total=total) as bar:
        for outcome in outcomes:
            answers.append(outcome.answered, outcome.quarantined)
            num_tokens += outcome.num_tokens
            rate = num_tokens / max(time.monotonic() - start, 1e-9)
            num = len(outcome.answered) + len(outcome.quarantined)
            advance(bar, num, f"{rate:,.0f} tokens/s")
