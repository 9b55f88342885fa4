r"""Let the base model answer the prompts itself: ``python -m specheads.regenerate output=<file>``.

Heads learn to guess what their base model would say, so they learn best from its own words. Answers
in the input are dropped and given anew, turn by turn. The output is appended to as answers come;
the same command continues it, and ``train data=jsonl data.path=<output>`` reads it.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from specheads.config import ConfigError, InterruptedRunError, RegenerateConfig, RunError
from specheads.config.main import answer, answers_json, hydra_main
from specheads.system.signals import StopSignal
from specheads.system.terminal import progress_bar

if TYPE_CHECKING:
    from specheads.data.schema import Record
    from specheads.regeneration.answers import AnswerFile, Outcome


@answers_json
def run(config: RegenerateConfig) -> None:
    """Check, load, answer, and say what came of it."""
    from specheads.regeneration import engine
    from specheads.regeneration.answers import AnswerFile
    from specheads.regeneration.endpoint import Client
    from specheads.system import hardware

    hardware.quiet_loading()
    output = config.output
    if config.prompts and Path(config.prompts).resolve() == Path(output).resolve():
        raise ConfigError(f"output={output} is the input itself")
    client = None
    if config.endpoint:
        client = Client(config.endpoint, timeout=config.timeout, retries=config.retries)
    records = read_input(config)
    who = engine.who_answers(config, client)
    with AnswerFile(output, engine.settings_of(config, who)) as answers:
        left, num_before = answers.left(records), len(answers.done)
        cut = f", {answers.num_cut} bytes of an unfinished line cut off" if answers.num_cut else ""
        _say(
            f"{output}: {num_before:,} done before, {answers.reasons()}{cut},"
            f" {len(left):,} left of {len(records):,}"
        )
        if left and who.tuned:
            _say(f"the answers are those of the tuned base {who.model}, not of its original")
        try:
            if left:
                _append(engine.asker(config, who, client)(left), answers, len(left))
        except KeyboardInterrupt:
            raise InterruptedRunError(
                f"interrupted: {output} holds {len(answers.done):,} records;"
                " the same command goes on"
            ) from None
        num_left = len(answers.left(records))
        _say(
            f"{output}: {len(answers.done) - num_before:,} done now, {len(answers.done):,} in all,"
            f" {answers.reasons()}, {num_left:,} left"
        )
        bad = Counter(answers.bad.values())
        if bad["server"]:
            _say(f"the server failed {bad['server']:,} of them; the same command tries those again")
        cure = _cure_of_cut_answers(answers.done, answers.bad, config.max_new_tokens)
        if not answers.done:
            raise RunError(f"no record was answered: {answers.reasons()}{cure and f'; {cure}'}")
        if cure:
            _say(cure)
        done = {"done": len(answers.done), "done_before": num_before}
        answer({"output": output, **done, "left": num_left, "bad": dict(bad)})


def _cure_of_cut_answers(done: Collection[str], bad: Mapping[str, str], max_new_tokens: int) -> str:
    """Return what to do where a tenth of all records or more is truncated, else nothing.

    Those that are left are the short ones: heads would learn from them that answers are short.

    Args:
        done: ids of the answered records.
        bad: id -> reason of the others.
        max_new_tokens: that the answers were given.
    """
    num_cut = sum(reason == "truncated" for reason in bad.values())
    if not num_cut or num_cut * 10 < len(done) + len(bad):
        return ""
    return (
        f"{num_cut:,} of {len(done) + len(bad):,} records reached max_new_tokens={max_new_tokens}"
        f" (or the context's end) before an answer's end: max_new_tokens={4 * max_new_tokens} with"
        " another output= lets more answers end, keep_truncated=true keeps them as they are"
    )


def read_input(config: RegenerateConfig) -> list[Record]:
    """Return the records to answer, in an order of which every beginning is a fair sample.

    Raises:
        ConfigError: if the input is wrong, or one of its records holds a text.
    """
    from specheads.data.load import load_records, read_jsonl
    from specheads.data.schema import Dropped
    from specheads.regeneration.dialogue import check_answerable

    if config.prompts:
        records = read_jsonl(config.prompts)
    else:
        dropped = Dropped()
        records = load_records(config.data, "train", dropped=dropped)
        if dropped:
            _say(dropped.summary())
    check_answerable(records)

    def rank(record: Record) -> bytes:
        return hashlib.sha256(record["id"].encode("utf-8", "surrogatepass")).digest()

    records = sorted(records, key=rank)
    return records[: config.limit] if config.limit else records


def _append(outcomes: Iterable[Outcome], answers: AnswerFile, total: int) -> None:
    """Write what becomes of records as it comes."""
    num_tokens, start = 0, time.monotonic()
    with progress_bar("record", seconds=60, total=total) as bar:
        for outcome in outcomes:
            answers.append(outcome.answered, outcome.quarantined)
            num_tokens += outcome.num_tokens
            rate = num_tokens / max(time.monotonic() - start, 1e-9)
            bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
            bar.update(len(outcome.answered) + len(outcome.quarantined))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Entry point."""
    with StopSignal(at_once=True, advice="the same command goes on"):
        hydra_main("regenerate", RegenerateConfig, run, literal=("model",))


if __name__ == "__main__":
    main()
