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
from specheads.decoding.conversation import text_of
from specheads.decoding.result import DecodedRow
from specheads.decoding.stream import Job
from specheads.regeneration.answers import AnswerFile, read_lines, record_seed
from specheads.regeneration.dialogue import STAND_IN
from specheads.regeneration.engine import Engine
from specheads.system.files import conf_dir
from specheads.system.terminal import advance, progress_bar
from specheads.verification.sampling import Sampler

BLOCK = 256  # attempts that are shared out to kinds together; also those that may all be of no use
MOST = 8  # attempts per question beyond those, before it is given up
MOST_OPENING = 0.1  # of the questions may begin with the same two words
SHORTEST = 8  # characters of a question


def read_leads(kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return what leads a base to each of ``kinds``; to all where there are none.

    Raises:
        ConfigError: for an unknown kind.
    """
    leads = json.loads((conf_dir() / "questions.json").read_text(encoding="utf-8"))
    if unknown := sorted(set(kinds) - set(leads)):
        raise ConfigError(
            f"questions.kinds: unknown {', '.join(unknown)}; there are {', '.join(leads)}"
        )
    return {kind: leads[kind] for kind in kinds or leads}


class Questioner:
    """Lets a base model write what users say.

    Args:
        engine: the base model.
        asked: how user's turns are drawn, and which kinds there are.
        seed: of the draws.
        whose: JSON about the base, and how it answers; a file made with others is refused.
    """

    def __init__(
        self, engine: Engine, asked: QuestionsConfig, seed: int, whose: Mapping[str, Any]
    ) -> None:
        self.engine, self.asked, self.seed = engine, asked, seed
        self.tokenizer, self._plain = engine.turns.tokenizer, engine.turns.encoder.plain
        self.has_template = self.tokenizer.chat_template is not None
        self.leads = read_leads(asked.kinds)
        if not self.has_template:
            self.leads = {"text": {"share": 1, "system": "", "openings": [""], "one_line": True}}
        self._settings = {**whose, **asdict(asked), "question_seed": seed}
        self._settings["leads"] = json_digest(self.leads).hex()
        self._special = frozenset(special_ids(self.tokenizer))
        self._around = cache(self._rendered)  # by a kind's system turn

    def write(self, path: Path, limit: int) -> tuple[list[Record], str]:
        """Write questions into a file, or go on with it; return ``limit`` of them.

        What an attempt becomes depends on its number, the seed and the attempts before it: a larger
        limit adds to the same questions, and a run that was killed ends with the same file.

        Args:
            path: the .jsonl of questions, with ``.bad.jsonl`` and ``.json`` beside it.
            limit: how many are wanted.

        Returns:
            The questions, records without answers; and one line about them and what was left out.

        Raises:
            ConfigError: if the file was made otherwise.
            RunError: if too few of the attempts are of use; names what the others were.
        """
        with AnswerFile(path, self._settings) as file:
            known: dict[str, Record | RecordError] = {r["id"]: r for _, r in read_lines(path)}
            known |= {name: RecordError(reason) for name, reason in file.bad.items()}
            attempts = _Attempts(self, limit, file)
            with progress_bar("question", total=limit) as bar:
                for _ in attempts.steps(known):
                    advance(bar, len(attempts.kept) - bar.n)
            left_out = file.reasons().replace("in quarantine", "left out")
            num, kinds = len(attempts.kept), Counter(each["kind"] for each in attempts.kept)
            if num < limit:
                raise RunError(
                    f"of {attempts.num_judged:,} questions that the base wrote {num:,} can be"
                    f" used, {limit:,} are wanted; {left_out}, see {file.bad_path};"
                    " questions.max_new_tokens= or questions.temperature= with another number, or"
                    " prompts=<file>, changes that"
                )
        told = ", ".join(f"{kind} {num:,}" for kind, num in kinds.items())
        return attempts.kept, f"{path}: {num:,} questions ({told}), {left_out}"

    def go_on(self, path: Path, answered: Sequence[Record]) -> list[Record]:
        """Write the user's next turn behind each conversation; one that has none stays as it is.

        Args:
            path: the .jsonl of conversations.
            answered: conversations that end with an answer.

        Returns:
            The conversations in their order.
        """
        bar = progress_bar("conversation", total=len(answered))
        with bar, AnswerFile(path, self._settings) as file:
            left = (record for record in answered if record["id"] not in file.done)

            def take(num: int) -> list[Job]:
                return [self._next_turn(record) for record in islice(left, num)]

            for ended in self._stream(take):
                for job, row in ended:
                    with contextlib.suppress(RecordError):
                        text = self._text(row, *self._before(job.owner)[1:]).strip()
                        turn = [{"role": "user", "content": text}] if text else []
                        job.owner["messages"] = [*job.owner["messages"], *turn]
                file.append([job.owner for job, _ in ended])
                advance(bar, len(file.done) - bar.n)
            file.sort(answered)
            return [record for _, record in read_lines(path)]

    def _stream(self, take: Callable[[int], list[Job]]) -> Iterator[list[tuple[Job, DecodedRow]]]:
        sampler = Sampler(self.asked.temperature, top_p=self.asked.top_p)
        return self.engine.stream(sampler).run(take)

    def _before(self, talk: Record) -> tuple[str, frozenset[int], str]:
        return self._rendered(self.leads[talk["kind"]]["system"], talk["messages"])

    def _next_turn(self, record: Record) -> Job:
        name = f"turn {len(record['messages'])} {record['id']}"
        return self._job(self._before(record)[0], name, dict(record), frozenset())

    def _rendered(self, system: str, past: Sequence[Any] = ()) -> tuple[str, frozenset[int], str]:
        """Return what the template puts before a user's turn, and the tokens, or the text, behind.

        Without a template nothing stands before it, and the base's own tokens end it.

        Args:
            system: a system turn; left out where it is empty, or the template knows none.
            past: the messages between it and the turn.

        Raises:
            ConfigError: if the template does not show the turn.
        """
        if not self.has_template:
            return "", self.engine.turns.end_tokens, ""
        led, before, found, behind = [{"role": "system", "content": system}], "", "", ""
        for first in (led, [])[not system :]:
            messages = [*first, *past, {"role": "user", "content": STAND_IN}]
            with contextlib.suppress(TemplateError):
                text, _ = render(self.tokenizer, messages, add_generation_prompt=True)
                before, found, behind = text.partition(STAND_IN)
                break
        if not found:
            raise ConfigError(
                f"the chat template of {self.tokenizer.name_or_path} does not show a user's turn,"
                " so that none can be written; give prompts=<file>"
            )
        after = [i for i in self._plain(behind) if i in self._special][:1]
        ends = frozenset([*self.engine.turns.end_tokens, *after])
        return before, ends, "" if after else behind.strip()

    def _job(self, before: str, name: str, owner: Any, ends: frozenset[int]) -> Job:
        """Return the job of going on with ``before``; without it, of a text from its beginning."""
        start = self._plain(before) or self.engine.turns.encoder.prompt({"id": "", "text": ""})
        eos, bos = self.tokenizer.eos_token_id, self.tokenizer.bos_token_id
        start = start or [eos if bos is None else bos]
        limit = min(self.asked.max_new_tokens, self.engine.context - len(start))
        if limit < 1:
            raise ConfigError(f"the base's context of {self.engine.context} holds no question")
        return Job(start, limit, record_seed(self.seed, name), owner, ends | self._special)

    def _text(self, row: DecodedRow, ends: frozenset[int], marker: str) -> str:
        """Return the text of a turn.

        Args:
            row: what was written.
            ends: tokens that end it.
            marker: a text that does, where no token does.

        Raises:
            RecordError: if it has not ended, or is none.
        """
        tokens, last, found = row.new_tokens, row.new_tokens[-1], ""
        if max(tokens) >= len(self.tokenizer):
            raise RecordError("token", f"token {max(tokens)} stands for nothing")
        if last in self._special - ends:
            raise RecordError("special", f"token {last} within it")
        text = text_of(self.tokenizer, tokens)
        if marker:
            text, found, _ = text.partition(marker)
        if not found and last not in ends:
            raise RecordError("truncated", f"no end within {len(tokens)} tokens")
        if "\ufffd" in text:
            raise RecordError("text", "half a character")
        return text

    @cached_property
    def _breaks(self) -> frozenset[int]:
        """The tokens with a line break in them."""
        ids = range(len(self.tokenizer))
        return frozenset(i for i in ids if "\n" in str(self.tokenizer.decode([i])))

    def begin(self, number: int, kind: str) -> Job:
        """Return the job of an attempt at a question; the attempt's number is its owner."""
        lead = self.leads[kind]
        before = self._around(lead["system"])[0] + self._opening(number, kind)
        ends = self._breaks if lead.get("one_line") else frozenset()
        return self._job(before, f"question {number}", number, ends)

    def _opening(self, number: int, kind: str) -> str:
        lead, chance = self.leads[kind], random.Random(f"{self.seed}/{number}")
        return chance.choice(lead["openings"]) + chance.choice(lead.get("beginnings", [""]))

    def question(self, number: int, kind: str, row: DecodedRow) -> str:
        """Return the question that an attempt has become; RecordError if it is none."""
        lead = self.leads[kind]
        _, ends, marker = self._around(lead["system"])
        if lead.get("one_line"):
            text = self._text(row, ends | self._breaks, marker).partition("\n")[0]
        else:
            text = self._text(row, ends, marker)
        whole = (self._opening(number, kind) + text).strip()
        if not text.strip() or len(whole) < SHORTEST:
            raise RecordError("empty", f"{len(text)} characters")
        return whole


class _Attempts:
    """The attempts at questions in their order, and what became of them.

    Attributes:
        kept: the questions so far.
        num_judged: attempts that are settled; all others come behind them.
    """

    def __init__(self, questioner: Questioner, limit: int, file: AnswerFile) -> None:
        self.questioner, self.limit, self.file = questioner, limit, file
        self.kept: list[Record] = []
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
                if (name := f"self/{number}") in known:
                    self._judge(number, known[name])
                else:
                    jobs.append(self.questioner.begin(number, self._kinds[number]))
            return jobs

        for ended in self.questioner._stream(take):
            for job, row in ended:
                found: Record | RecordError
                try:
                    kind = self._kinds[job.owner]
                    text = self.questioner.question(job.owner, kind, row)
                    found = self._record(job.owner, text)
                except RecordError as error:
                    found = error
                self._judge(job.owner, found)
            yield
            if self.ended:
                return

    def _next(self) -> int | None:
        """Return the number of the next attempt, None while none is to be begun."""
        number, missing = self._num_begun, self.limit - len(self.kept)
        # about every second one is of use; more than are missing are begun, to keep the rows full
        ahead = 2 * missing + self.questioner.engine.batch_size
        if self.ended or number - self.num_judged >= ahead:
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
        seen, leads = {f"self/{number}" for number in range(num_seen)}, self.questioner.leads
        counts = Counter(record["kind"] for record in self.kept if record["id"] in seen)
        for _ in range(BLOCK):
            kind = min(leads, key=lambda kind: (counts[kind] + 1) / leads[kind]["share"])
            counts[kind] += 1
            self._kinds.append(kind)

    def _record(self, number: int, text: str) -> Record:
        about = {"id": f"self/{number}", "kind": self._kinds[number]}
        if not self.questioner.has_template:
            return about | {"prompt": text, "completion": ""}
        return about | {"messages": [{"role": "user", "content": text}]}

    def _judge(self, number: int, found: Record | RecordError) -> None:
        """Settle the attempts whose turn has come, now that one more is written."""
        self._found[number] = found
        while self.num_judged in self._found and not self.ended:
            number, self.num_judged = self.num_judged, self.num_judged + 1
            try:
                self._keep(self._found.pop(number))
            except RecordError as error:
                error.row = self._record(number, "")
                if error.row["id"] not in self.file.bad:
                    self.file.append([], [error])

    def _keep(self, found: Record | RecordError) -> None:
        """Keep a question; RecordError if there is one like it, or too many begin like it."""
        if isinstance(found, RecordError):
            raise found
        text = found["prompt"] if "prompt" in found else found["messages"][0]["content"]
        opening = " ".join(words(text)[:2])
        if (like := self._similar.near(text)) is not None:
            raise RecordError("similar", f"near-duplicate of {self.kept[like]['id']}")
        if self._openings[opening] + 1 > max(2, MOST_OPENING * (len(self.kept) + 1)):
            raise RecordError("opening", f"too many begin with {opening!r}")
        self.kept.append(found)
        if found["id"] not in self.file.done:
            self.file.append([found])
        self._similar.add(text)
        self._openings[opening] += 1
