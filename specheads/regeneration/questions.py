"""Questions that the base model asks itself (Magpie, arXiv:2406.08464).

An aligned model that is given its chat template up to the user's turn writes what users write. Left
alone it asks for advice most of the time; so a system turn and a forced beginning lead it to each
kind of use that ``conf/questions.json`` names. The system turn is not part of the question.

A base without a chat template writes texts from their beginning. The first line is the question.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from specheads.config import ConfigError, QuestionsConfig, RunError
from specheads.data.chat import special_ids
from specheads.data.rendering import render
from specheads.data.schema import Record, RecordError, json_digest
from specheads.data.similar import SimilarTexts, words
from specheads.decoding.result import DecodedRow
from specheads.decoding.stream import Job
from specheads.regeneration.answers import AnswerFile, read_lines, record_seed
from specheads.regeneration.dialogue import STAND_IN
from specheads.regeneration.engine import HELD, Engine
from specheads.system.files import conf_dir
from specheads.verification.sampling import Sampler

BLOCK = 256  # attempts that are shared out to kinds together; also those that may all be of no use
MOST = 8  # attempts per question beyond those, before it is given up
MOST_OPENING = 0.1  # of the questions may begin with the same two words
_SHORTEST = 8  # characters of a question

_CURES = {
    "truncated": "questions.max_new_tokens= with a larger number lets more of them end",
    "length": "the base ends its texts at once; prompts=<file> gives it questions of others",
}
_OTHERS = "questions.temperature= with another number, or prompts=<file>, makes them differ"


def read_leads(kinds: Sequence[str], *, chat: bool = True) -> dict[str, dict[str, Any]]:
    """Return what leads a base to each of ``kinds``; to all where there are none.

    Args:
        kinds: names in ``conf/questions.json``.
        chat: whether the base has a chat template; else there is one kind, and nothing leads.

    Raises:
        ConfigError: for an unknown kind.
    """
    leads = json.loads((conf_dir() / "questions.json").read_text(encoding="utf-8"))
    if unknown := sorted(set(kinds) - set(leads)):
        raise ConfigError(
            f"questions.kinds: unknown {', '.join(unknown)}; there are {', '.join(leads)}"
        )
    if not chat:
        return {"text": {"share": 1, "system": "", "openings": [""], "one_line": True}}
    return {kind: leads[kind] for kind in kinds or leads}


def write_questions(
    engine: Engine,
    path: str | Path,
    asked: QuestionsConfig,
    *,
    whose: Mapping[str, Any],
    limit: int,
    seed: int,
    tick: Callable[[int], object] = lambda num: None,
) -> tuple[list[Record], str]:
    """Let the base write questions into a file, or go on with it; return ``limit`` of them.

    What an attempt becomes depends on its number, the seed and the attempts before it: a larger
    limit adds questions to the same ones, and a run that was killed ends with the same file.

    Args:
        engine: the base model.
        path: the .jsonl of questions, with ``.bad.jsonl`` and ``.json`` beside it.
        asked: how they are drawn, and which kinds.
        whose: JSON about the base; a file made with another one is refused.
        limit: how many are wanted.
        seed: of the draws.
        tick: called after every step with how many questions there are.

    Returns:
        The questions, records without answers, and one line about them and what was left out.

    Raises:
        ConfigError: if the file was made otherwise.
        RunError: if too few of the attempts are of use; names what the others were.
    """
    writer = _Writer(engine, asked, seed, limit)
    settings = {**whose, **asdict(asked), "seed": seed, "leads": json_digest(writer.leads).hex()}
    with AnswerFile(path, settings) as file:
        known: dict[str, Record | RecordError] = {r["id"]: r for _, r in read_lines(file.path)}
        known |= {name: RecordError(reason) for name, reason in file.bad.items()}
        start = time.monotonic()
        try:
            for _ in writer.steps(known):
                tick(len(writer.kept))
                if time.monotonic() - start > HELD:
                    writer.flush(file)
                    start = time.monotonic()
        finally:
            writer.flush(file)
        if len(writer.kept) < limit:
            raise RunError(_too_few(len(writer.kept), limit, file))
        kinds = Counter(record["kind"] for record in writer.kept)
        told = ", ".join(f"{kind} {num:,}" for kind, num in kinds.items())
        left_out = file.reasons().replace("in quarantine", "left out")
        return writer.kept, f"{path}: {len(writer.kept):,} questions ({told}), {left_out}"


def write_next_turns(
    engine: Engine,
    path: str | Path,
    asked: QuestionsConfig,
    answered: Sequence[Record],
    *,
    whose: Mapping[str, Any],
    seed: int,
    tick: Callable[[int], object] = lambda num: None,
) -> list[Record]:
    """Let the base write the user's next turn behind each conversation, as far as it writes one.

    Where it does not end, or is empty, the conversation stays as it is.

    Args:
        engine: the base model.
        path: the .jsonl of conversations.
        asked: how turns are drawn.
        answered: conversations that end with an answer.
        whose: as in :func:`write_questions`, and how the answers were drawn.
        seed: of the draws.
        tick: called after every step with how many conversations are done.

    Returns:
        The conversations in their order.
    """
    pen, place = _Pen(engine, asked, seed), {r["id"]: n for n, r in enumerate(answered)}
    leads = read_leads(asked.kinds, chat=pen.chat)
    with AnswerFile(path, {**whose, **asdict(asked), "seed": seed}) as file:
        left = [record for record in answered if record["id"] not in file.done]
        around = {
            record["id"]: pen.around(leads[record["kind"]]["system"], record["messages"])
            for record in left
        }
        waiting, start, fresh = iter(left), time.monotonic(), list[Record]()

        def take(num: int) -> list[Job]:
            jobs: list[Job] = []
            for record in islice(waiting, num):
                name = f"turn {len(record['messages'])} {record['id']}"
                try:
                    jobs.append(pen.job(around[record["id"]][0], record, name))
                except RecordError:
                    fresh.append(record)
            return jobs

        for ended in engine.stream(sampler_of(asked)).run(take):
            for job, row in ended:
                record = job.owner
                with contextlib.suppress(RecordError):
                    text = pen.text(row, *around[record["id"]][1:]).strip()
                    turn = [{"role": "user", "content": text}] if text else []
                    record = record | {"messages": [*record["messages"], *turn]}
                fresh.append(record)
            if time.monotonic() - start > HELD:
                file.append(fresh)
                start, fresh[:] = time.monotonic(), []
            tick(len(file.done))
        file.append(fresh)
        return sorted((r for _, r in read_lines(file.path)), key=lambda r: place[r["id"]])


def _too_few(num_kept: int, limit: int, file: AnswerFile) -> str:
    ((reason, _),) = Counter(file.bad.values()).most_common(1)
    return (
        f"of {num_kept + len(file.bad):,} questions that the base wrote {num_kept:,} can be used,"
        f" {limit:,} are wanted: {file.reasons()}, see {file.bad_path};"
        f" {_CURES.get(reason, _OTHERS)}"
    )


class _Pen:
    """Lets the base write user's turns: which tokens come before one, and where it ends."""

    def __init__(self, engine: Engine, asked: QuestionsConfig, seed: int) -> None:
        self.engine, self.asked, self.seed = engine, asked, seed
        self.tokenizer = engine.turns.tokenizer
        self.special = frozenset(special_ids(self.tokenizer))
        self.chat = self.tokenizer.chat_template is not None
        self.led = cache(self.around)  # by a kind's system turn

    @cached_property
    def breaks(self) -> frozenset[int]:
        """The tokens with a line break in them."""
        ids = range(len(self.tokenizer))
        return frozenset(i for i in ids if "\n" in str(self.tokenizer.decode([i])))

    def around(self, system: str, past: Sequence[Any] = ()) -> tuple[str, frozenset[int], str]:
        """Return what the template puts before a user's turn, and the tokens, or the text, behind.

        Args:
            system: a system turn; left out where it is empty, or the template knows none.
            past: the messages between it and the turn.

        Raises:
            ConfigError: if the template leaves the turn out.
        """
        led = [{"role": "system", "content": system}]
        turn = {"role": "user", "content": STAND_IN}
        before = found = behind = ""
        for first in (led, [])[not system :]:
            with contextlib.suppress(TemplateError):
                text, _ = render(self.tokenizer, [*first, *past, turn], add_generation_prompt=True)
                before, found, behind = text.partition(STAND_IN)
                break
        if not found:
            raise ConfigError(
                f"the chat template of {self.tokenizer.name_or_path} does not show a user's turn,"
                " so that none can be written; give prompts=<file>"
            )
        after = next((i for i in self._ids(behind) if i in self.special), None)
        ends = {*self.engine.turns.end_tokens, *([] if after is None else [after])}
        return before, frozenset(ends), behind.strip() if after is None else ""

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def job(self, before: str, owner: Any, name: str, *, one_line: bool = False) -> Job:
        """Return the job of going on with ``before``; without it, of a text from its beginning.

        Raises:
            RecordError: if nothing fits behind it.
        """
        start, eos, bos = (
            self._ids(before),
            self.tokenizer.eos_token_id,
            self.tokenizer.bos_token_id,
        )
        if not self.chat:
            nothing = self.engine.turns.encoder.prompt({"id": "", "text": ""})
            start = nothing or [eos if bos is None else bos]
        limit = min(self.asked.max_new_tokens, self.engine.context - len(start))
        if limit < 1:
            raise RecordError("too_long", f"{len(start)} tokens come before it")
        ends = self.special | (self.breaks if one_line else frozenset())
        return Job(start, limit, record_seed(self.seed, name), owner, ends)

    def text(self, row: DecodedRow, ends: frozenset[int], marker: str) -> str:
        """Return the text of a turn that has ended.

        Args:
            row: what was written.
            ends: tokens that end it.
            marker: a text that does, where no token does.

        Raises:
            RecordError: if it has not, or is no turn.
        """
        tokens, last = row.new_tokens, row.new_tokens[-1]
        if max(tokens) >= len(self.tokenizer):
            raise RecordError("token", f"token {max(tokens)} stands for nothing")
        if last in self.special - ends:
            raise RecordError("special", f"token {last} within it")
        text, found = self.engine.turns.text(tokens), ""
        if marker:
            text, found, _ = text.partition(marker)
        if not found and last not in ends:
            raise RecordError("truncated", f"no end within {len(tokens)} tokens")
        if "\ufffd" in text:
            raise RecordError("text", "half a character")
        return text


class _Writer:
    """The attempts in their order, and what became of them.

    Attributes:
        kept: the questions so far.
        fresh: those of them that are not in the file yet.
        rejected: attempts that are of no use, and not in the file yet.
        num_judged: attempts that are settled; all others come behind them.
    """

    def __init__(self, engine: Engine, asked: QuestionsConfig, seed: int, limit: int) -> None:
        self.pen, self.limit = _Pen(engine, asked, seed), limit
        self.leads = read_leads(asked.kinds, chat=self.pen.chat)
        self.kept: list[Record] = []
        self.fresh: list[Record] = []
        self.rejected: list[RecordError] = []
        self.num_judged = self._num_begun = 0
        self._kinds: list[str] = []  # of the attempts that are planned
        self._found: dict[int, Record | RecordError] = {}  # ahead of one that is not written yet
        self._similar, self._openings = SimilarTexts(), Counter[str]()

    @property
    def ended(self) -> bool:
        """Whether there are enough questions, or no hope of them."""
        return len(self.kept) == self.limit or self.num_judged >= BLOCK + MOST * len(self.kept)

    def steps(self, known: Mapping[str, Record | RecordError]) -> Iterator[None]:
        """Write until there are enough; what is known by an attempt's id is not written again."""

        def take(num: int) -> list[Job]:
            jobs: list[Job] = []
            while len(jobs) < num and (number := self._next()) is not None:
                if (name := _name(number)) in known:
                    self._found[number] = known[name]
                else:
                    with self._finding(number):
                        jobs.append(self._job(number))
                self._judge(known)
            return jobs

        for ended in self.pen.engine.stream(sampler_of(self.pen.asked)).run(take):
            for job, row in ended:
                with self._finding(job.owner):
                    self._found[job.owner] = self._written(job.owner, row)
            self._judge(known)
            yield
            if self.ended:
                return

    def flush(self, file: AnswerFile) -> None:
        """Append to the file what is not in it yet."""
        file.append(self.fresh, self.rejected)
        self.fresh, self.rejected = [], []

    @contextlib.contextmanager
    def _finding(self, number: int) -> Iterator[None]:
        """Take a RecordError of the block for what the attempt became."""
        try:
            yield
        except RecordError as error:
            self._found[number] = error

    def _next(self) -> int | None:
        """Return the number of the next attempt, None while none is to be begun."""
        number, missing = self._num_begun, self.limit - len(self.kept)
        # about every second one is of use; more than are missing are begun, to keep the rows full
        if self.ended or number - self.num_judged >= 2 * missing + self.pen.engine.batch_size:
            return None
        if number == len(self._kinds):  # a block is planned from all but the block before it
            if self.num_judged < number - BLOCK:
                return None
            self._plan(number - BLOCK)
        self._num_begun += 1
        return number

    def _plan(self, num_seen: int) -> None:
        """Share out a block of attempts, so that each kind comes to its share of what is kept.

        Args:
            num_seen: how many attempts are looked at for that; more may have been judged.
        """
        seen = {_name(number) for number in range(num_seen)}
        counts = Counter(record["kind"] for record in self.kept if record["id"] in seen)
        for _ in range(BLOCK):
            kind = min(self.leads, key=lambda kind: (counts[kind] + 1) / self.leads[kind]["share"])
            counts[kind] += 1
            self._kinds.append(kind)

    def _opening(self, number: int) -> str:
        lead = self.leads[self._kinds[number]]
        chance = random.Random(f"{self.pen.seed}/{number}")
        return chance.choice(lead["openings"]) + chance.choice(lead.get("beginnings", [""]))

    def _job(self, number: int) -> Job:
        lead, before = self.leads[self._kinds[number]], ""
        if self.pen.chat:
            before = self.pen.led(lead["system"])[0] + self._opening(number)
        one_line = lead.get("one_line", False)
        return self.pen.job(before, number, f"question {number}", one_line=one_line)

    def _written(self, number: int, row: DecodedRow) -> Record:
        """Return the question that was written; RecordError if it is none."""
        lead, marker = self.leads[self._kinds[number]], ""
        ends = frozenset(self.pen.engine.turns.end_tokens)
        if self.pen.chat:
            _, ends, marker = self.pen.led(lead["system"])
        if lead.get("one_line"):
            ends |= self.pen.breaks
        text = self.pen.text(row, ends, marker)
        if lead.get("one_line"):
            text = text.partition("\n")[0]
        whole = (self._opening(number) + text).strip()
        if not text.strip() or len(whole) < _SHORTEST:
            raise RecordError("length", f"{len(text)} characters")
        return self._record(number, whole)

    def _record(self, number: int, text: str) -> Record:
        about = {"id": _name(number), "kind": self._kinds[number]}
        if not self.pen.chat:
            return about | {"prompt": text, "completion": ""}
        return about | {"messages": [{"role": "user", "content": text}]}

    def _judge(self, known: Mapping[str, object]) -> None:
        """Settle the attempts whose turn it is."""
        while self.num_judged in self._found and not self.ended:
            number, self.num_judged = self.num_judged, self.num_judged + 1
            found, is_known = self._found.pop(number), _name(number) in known
            try:
                if isinstance(found, RecordError):
                    raise found
                self._keep(found, check=not is_known)
                self.fresh += [] if is_known else [found]
            except RecordError as error:
                error.row = self._record(number, "")
                self.rejected += [] if is_known else [error]

    def _keep(self, record: Record, *, check: bool) -> None:
        """Keep a question; RecordError if there is one like it, or too many begin like it."""
        text = record["prompt"] if "prompt" in record else record["messages"][0]["content"]
        opening = " ".join(words(text)[:2])
        if check:
            if (like := self._similar.near(text)) is not None:
                raise RecordError("similar", f"near-duplicate of {self.kept[like]['id']}")
            if self._openings[opening] + 1 > max(2, MOST_OPENING * (len(self.kept) + 1)):
                raise RecordError("opening", f"too many begin with {opening!r}")
        self.kept.append(record)
        self._similar.add(text)
        self._openings[opening] += 1


def _name(number: int) -> str:
    return f"self/{number}"


def sampler_of(asked: QuestionsConfig) -> Sampler:
    """Return how user's turns are drawn; each has a seed of its own."""
    return Sampler(asked.temperature, top_p=asked.top_p)
