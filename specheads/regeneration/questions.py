"""Questions that the base model asks itself (Magpie, arXiv:2406.08464).

An aligned model that is given its chat template up to the user's turn writes what users write. Left
alone it asks for advice most of the time; so a system turn and a forced beginning lead it to each
kind of use that ``conf/questions.json`` names. The system turn is not part of the question.

A base without a chat template writes texts from their beginning. The first line is the question.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache, cached_property
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
                if writer.num_judged >= BLOCK + MOST * len(writer.kept):
                    break
                if time.monotonic() - start > HELD:
                    writer.flush(file)
                    start = time.monotonic()
        finally:
            writer.flush(file)
        if len(writer.kept) < limit:
            raise RunError(_too_few(len(writer.kept), limit, file))
        kinds = Counter(record["kind"] for record in writer.kept)
        told = ", ".join(f"{kind} {num:,}" for kind, num in kinds.items())
        return writer.kept, f"{path}: {len(writer.kept):,} questions ({told}), {file.reasons()}"


def _too_few(num_kept: int, limit: int, file: AnswerFile) -> str:
    ((reason, _),) = Counter(file.bad.values()).most_common(1)
    return (
        f"of {num_kept + len(file.bad):,} questions that the base wrote {num_kept:,} can be used,"
        f" {limit:,} are wanted: {file.reasons()}, see {file.bad_path};"
        f" {_CURES.get(reason, _OTHERS)}"
    )


class _Writer:
    """The attempts in their order, and what became of them.

    Attributes:
        kept: the questions so far.
        fresh: those of them that are not in the file yet.
        rejected: attempts that are of no use, and not in the file yet.
        num_judged: attempts that are settled; all others come behind them.
    """

    def __init__(self, engine: Engine, asked: QuestionsConfig, seed: int, limit: int) -> None:
        self.engine, self.asked, self.seed, self.limit = engine, asked, seed, limit
        self.tokenizer = engine.turns.tokenizer
        self.chat = self.tokenizer.chat_template is not None
        self.leads = read_leads(asked.kinds, chat=self.chat)
        self.kept: list[Record] = []
        self.fresh: list[Record] = []
        self.rejected: list[RecordError] = []
        self.num_judged = self._num_begun = 0
        self._kinds: list[str] = []  # of the attempts that are planned
        self._found: dict[int, Record | RecordError] = {}  # ahead of one that is not written yet
        self._similar, self._openings = SimilarTexts(), Counter[str]()
        self._around = cache(self._rendered)

    def steps(self, known: Mapping[str, Record | RecordError]) -> Iterator[None]:
        """Write until there are enough; what is known by an attempt's id is not written again."""

        def take(num: int) -> list[Job]:
            jobs: list[Job] = []
            while len(jobs) < num and (number := self._next()) is not None:
                if (name := f"self/{number}") in known:
                    self._found[number] = known[name]
                    self._judge(known)
                elif (job := self._job(number)) is not None:
                    jobs.append(job)
            return jobs

        sampler = Sampler(self.asked.temperature, top_p=self.asked.top_p)
        for ended in self.engine.stream(sampler).run(take):
            for job, row in ended:
                try:
                    self._found[job.owner] = self._written(job, row)
                except RecordError as error:
                    self._found[job.owner] = error
            self._judge(known)
            yield
            if len(self.kept) == self.limit:
                return

    def flush(self, file: AnswerFile) -> None:
        """Append to the file what is not in it yet."""
        file.append(self.fresh, self.rejected)
        self.fresh, self.rejected = [], []

    def _next(self) -> int | None:
        """Return the number of the next attempt, None while none is to be begun."""
        number, missing = self._num_begun, self.limit - len(self.kept)
        # every second one is of no use
        if number - self.num_judged >= 2 * missing + self.engine.batch_size * (missing > 0):
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
        counts = Counter(r["kind"] for r in self.kept if int(r["id"][5:]) < num_seen)
        for _ in range(BLOCK):
            kind = min(self.leads, key=lambda kind: (counts[kind] + 1) / self.leads[kind]["share"])
            counts[kind] += 1
            self._kinds.append(kind)

    def _opening(self, number: int) -> str:
        lead, chance = self.leads[self._kinds[number]], random.Random(f"{self.seed}/{number}")
        return chance.choice(lead["openings"]) + chance.choice(lead.get("beginnings", [""]))

    def _job(self, number: int) -> Job | None:
        lead, turns = self.leads[self._kinds[number]], self.engine.turns
        if not self.chat:
            eos, bos = self.tokenizer.eos_token_id, self.tokenizer.bos_token_id
            nothing = turns.encoder.prompt({"id": "", "text": ""})
            start = nothing or [eos if bos is None else bos]
        else:
            before = self._around(lead["system"])[0] + self._opening(number)
            start = self.tokenizer(before, add_special_tokens=False, verbose=False).input_ids
        limit = min(self.asked.max_new_tokens, self.engine.context - len(start))
        if limit < 1:
            detail = f"{len(start)} tokens before it in a context of {self.engine.context}"
            self._found[number] = RecordError("too_long", detail)
            return None
        ends = self._special | (self._breaks if lead.get("one_line") else frozenset())
        seed = record_seed(self.seed, f"question {number}")
        return Job(list(start), limit, seed, number, ends)

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(special_ids(self.tokenizer))

    @cached_property
    def _breaks(self) -> frozenset[int]:
        """The tokens with a line break in them."""
        ids = range(len(self.tokenizer))
        return frozenset(i for i in ids if "\n" in str(self.tokenizer.decode([i])))

    def _rendered(self, system: str) -> tuple[str, str]:
        """Return what the chat template puts before and behind a user's turn.

        Raises:
            ConfigError: if it leaves the turn out.
        """
        user = {"role": "user", "content": STAND_IN}
        messages = [{"role": "system", "content": system}, user]
        try:
            text, _ = render(self.tokenizer, messages[not system :], add_generation_prompt=True)
        except TemplateError:  # some know no system turns
            text, _ = render(self.tokenizer, [user], add_generation_prompt=True)
        before, found, behind = text.partition(STAND_IN)
        if not found:
            raise ConfigError(f"the chat template of {self.tokenizer.name_or_path} has no user")
        return before, behind

    def _written(self, job: Job, row: DecodedRow) -> Record:
        """Return the question that was written.

        Raises:
            RecordError: if it is none.
        """
        number, tokens = job.owner, row.new_tokens
        lead, opening, last = self.leads[self._kinds[number]], "", tokens[-1]
        ends, marker = set(self.engine.turns.end_tokens), ""
        if self.chat:
            opening, behind = self._opening(number), self._around(lead["system"])[1]
            ids = self.tokenizer(behind, add_special_tokens=False, verbose=False).input_ids
            first = next((i for i in ids if i in self._special), None)
            ends |= {first} if first is not None else set()
            marker = "" if first is not None else behind.strip()
        if max(tokens) >= len(self.tokenizer):
            raise RecordError(
                "token", f"token {max(tokens)} of {len(self.tokenizer)} was generated"
            )
        text = self.engine.turns.text(tokens[:-1] if last in ends | self._special else tokens)
        if marker and marker in text:
            text, last = text.partition(marker)[0], next(iter(ends))
        if row.finished and lead.get("one_line"):
            text = text.split("\n")[0]
        if last in self._special - ends:
            raise RecordError("special", f"token {last} within a question")
        if last not in ends and not (row.finished and lead.get("one_line")):
            raise RecordError("truncated", f"no end within {len(tokens)} tokens")
        if "\ufffd" in text:
            raise RecordError("text", "half a character")
        whole = (opening + text).strip()
        if not text.strip() or len(whole) < _SHORTEST:
            raise RecordError("length", f"{len(text)} characters")
        return self._record(number, whole)

    def _record(self, number: int, text: str) -> Record:
        about = {"id": f"self/{number}", "kind": self._kinds[number]}
        if not self.chat:
            return about | {"prompt": text, "completion": ""}
        return about | {"messages": [{"role": "user", "content": text}]}

    def _judge(self, known: Mapping[str, object]) -> None:
        """Settle the attempts whose turn it is."""
        while self.num_judged in self._found and len(self.kept) < self.limit:
            number, self.num_judged = self.num_judged, self.num_judged + 1
            found = self._found.pop(number)
            is_known = f"self/{number}" in known
            if not isinstance(found, RecordError):
                try:
                    self._keep(found, check=not is_known)
                    self.fresh += [] if is_known else [found]
                except RecordError as error:
                    found = error
            if isinstance(found, RecordError) and not is_known:
                found.row = self._record(number, "")
                self.rejected.append(found)

    def _keep(self, record: Record, *, check: bool) -> None:
        """Keep a question.

        Raises:
            RecordError: if there is one like it, or too many begin like it.
        """
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
