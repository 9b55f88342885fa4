"""Turn records into token ids and labels, so that only what a model has to produce is learned.

Chat records go through the tokenizer's own template. Which tokens are the assistant's comes from
the template's ``{% generation %}`` markers where it has them; otherwise the conversation is
rendered message by message, and every step is checked to continue the one before. Records that
bring ids of this very tokenizer along (:mod:`specheads.data.stored`) are not tokenized at all.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from specheads.config import ConfigError
from specheads.data.dropped import Dropped, RecordError, check_share
from specheads.data.records import Progress, Record
from specheads.data.stored import tokenizer_digest
from specheads.losses import IGNORE

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class NothingLearnedError(ConfigError):
    """No record of a data set has a token to learn."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One document. ``labels`` is not shifted: the token's own id where it is learned, else -100.

    Both arrays are int32 of one length.
    """

    id: str
    kind: str
    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]


@dataclass(frozen=True)
class EncodedRecords:
    """The documents of a data set, and what happened to the records.

    ``counts`` has ``records``, ``documents``, ``tokens``, ``learned`` (tokens with a label),
    ``too_long`` (answers longer than a row, dropped), ``split`` (texts cut into several documents),
    ``unlabelled`` (records without anything to learn, dropped), ``refused`` (records that cannot be
    encoded, dropped) and ``retokenized`` (records whose stored ids are of another tokenizer or
    template, so that their text was encoded anew).
    """

    documents: list[Encoded]
    counts: dict[str, int]

    def summary(self) -> str:
        """Return one line about the counts, dropped records included."""
        c = self.counts
        line = f"{c['records']:,} records, {c['tokens']:,} tokens, {c['learned']:,} learned"
        notes = {
            "too_long": "dropped: longer than data.seq_len",
            "unlabelled": "dropped: nothing to learn",
            "refused": "dropped: cannot be encoded",
            "split": "texts cut into pieces",
            "retokenized": "encoded anew: their stored ids are of another tokenizer",
        }
        return line + "".join(f"; {c[key]:,} {note}" for key, note in notes.items() if c[key])


class Encoder:
    """Encodes records for one tokenizer; see :func:`encode`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.name = tokenizer.name_or_path or type(tokenizer).__name__
        if tokenizer.eos_token_id is None:
            raise ConfigError(f"tokenizer {self.name} has no eos token, so no answer could end")
        self._eos = int(tokenizer.eos_token_id)
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = special | set(tokenizer.all_special_ids)
        self._prefix = _added_before(tokenizer)
        template = tokenizer.chat_template
        if isinstance(template, dict):  # several, by purpose
            template = template.get("default")
        marked = isinstance(template, str) and _MARKER.search(template) is not None
        self._marked = marked and tokenizer.is_fast  # the mask needs the tokens' offsets

    def __call__(self, record: Record) -> Encoded:
        """Encode one record."""
        if self.is_stored(record):
            ids, learned = self._stored_ids(record), [False] * len(record["tokens"]["ids"])
            for start, stop in record["tokens"]["answers"]:
                learned[start:stop] = [True] * (stop - start)
        elif "messages" in record:
            ids, learned = self._encode_chat(record)
        elif "completion" in record:
            prompt, answer = self._encode_pair(record["prompt"], record["completion"])
            ids = prompt + answer
            learned = [False] * len(prompt) + [True] * len(answer)
        else:
            ids = [*self._prefix, *self._plain(record["text"]), self._eos]
            learned = [True] * len(ids)
        input_ids = np.asarray(ids, dtype=np.int32)
        labels = np.where(np.asarray(learned, dtype=bool), input_ids, np.int32(IGNORE))
        return Encoded(str(record["id"]), str(record["kind"]), input_ids, labels)

    def prompt(self, record: Record) -> list[int]:
        """Return the ids up to where the (last) answer starts; see :func:`encode_prompt`."""
        if self.is_stored(record):
            return self._stored_ids(record)[: record["tokens"]["answers"][-1][0]]
        if "messages" in record:
            messages = record["messages"]
            answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
            return self._render(messages[: answers[-1]] if answers else messages, record, True)
        text = record["prompt"] if "completion" in record else record["text"]
        return [*self._prefix, *self._plain(text)]

    def is_stored(self, record: Record) -> bool:
        """Whether ``record`` brings ids along that are this tokenizer's own."""
        return "tokens" in record and record["tokens"]["tokenizer"] == self._digest

    @cached_property
    def _digest(self) -> str:
        return tokenizer_digest(self.tokenizer)

    def _stored_ids(self, record: Record) -> list[int]:
        ids: list[int] = record["tokens"]["ids"]
        if max(ids) >= len(self.tokenizer):
            raise RecordError(
                f"record {record['id']}",
                "with a token id beyond the vocabulary",
                f"tokens.ids holds {max(ids)}, {self.name} has {len(self.tokenizer)} tokens",
            )
        return list(ids)

    def _plain(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def _encode_pair(self, prompt: str, completion: str) -> tuple[list[int], list[int]]:
        # The prompt is tokenized as decoding will see it. The rest follows from the joint text
        # where that agrees, because some tokenizers put a space before any text on its own.
        before = [*self._prefix, *self._plain(prompt)]
        joint = [*self._prefix, *self._plain(prompt + completion)]
        if joint[: len(before)] == before:
            return before, [*joint[len(before) :], self._eos]
        return before, [*self._plain(completion), self._eos]

    def _encode_chat(self, record: Record) -> tuple[list[int], list[bool]]:
        if self.tokenizer.chat_template is None:
            raise ConfigError(
                f"tokenizer {self.name} has no chat template, which records with messages need"
                f" (record {record['id']}); give prompt and completion, or a tokenizer with one"
            )
        ids, learned = self._by_markers(record) if self._marked else self._by_steps(record)
        self._trim(ids, learned)
        ends = [t for t, flag in enumerate(learned) if flag][-1:]
        closed = bool(ends) and ids[ends[0]] in self._special
        if record["messages"][-1]["role"] == "assistant" and not closed:
            ids, learned = [*ids, self._eos], [*learned, True]  # else nothing teaches it to end
        return ids, learned

    def _by_markers(self, record: Record) -> tuple[list[int], list[bool]]:
        out = self._apply(
            record["messages"],
            record,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True},
        )
        ids, offsets = list(out["input_ids"]), list(out["offset_mapping"])
        learned = [bool(flag) for flag in out["assistant_masks"]]
        for t in range(1, len(ids)):
            # the mask stops at the first token of its last character, which may have several, and
            # some templates close their block before the eos that ends the answer
            rest_of_character = offsets[t] == offsets[t - 1]
            closing = ids[t] == self._eos and ids[t - 1] not in self._special
            learned[t] = learned[t] or (learned[t - 1] and (rest_of_character or closing))
        if not any(learned) and any(
            m["role"] == "assistant" and m["content"].strip() for m in record["messages"]
        ):
            raise RecordError(
                f"record {record['id']}",
                "whose answers the chat template does not mark",
                f"the chat template of {self.name} marks no token of the answers as generated;"
                " check its generation block",
            )
        return ids, learned

    def _by_steps(self, record: Record) -> tuple[list[int], list[bool]]:
        messages = record["messages"]
        ids = self._render(messages, record, False)
        learned = [False] * len(ids)
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:i], record, True) if i else []
            after = self._render(messages[: i + 1], record, False)
            for part in (before, after):
                if ids[: len(part)] != part:
                    raise RecordError(
                        f"record {record['id']}",
                        "whose earlier messages the chat template rewrites",
                        f"the chat template of {self.name} rewrites earlier messages when later"
                        f" ones follow (message {i}), so the answer's tokens cannot be told"
                        " apart; use records with one answer, or a template with generation"
                        " markers",
                    )
            learned[len(before) : len(after)] = [True] * (len(after) - len(before))
        return ids, learned

    def _trim(self, ids: list[int], learned: list[bool]) -> None:
        # many templates put a line break behind the closing token; decoding stops before it
        stop = len(ids)
        while stop:
            if not learned[stop - 1]:
                stop -= 1
                continue
            start = stop
            while start and learned[start - 1]:
                start -= 1
            closing = [t for t in range(start, stop) if ids[t] in self._special]
            if closing and not str(self.tokenizer.decode(ids[closing[-1] + 1 : stop])).strip():
                learned[closing[-1] + 1 : stop] = [False] * (stop - closing[-1] - 1)
            stop = start

    def _render(self, messages: Sequence[Any], record: Record, prompt: bool) -> list[int]:
        if not messages:
            return []
        out = self._apply(messages, record, return_dict=True, add_generation_prompt=prompt)
        return list(out["input_ids"])

    def _apply(self, messages: Sequence[Any], record: Record, **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(list(messages), tokenize=True, **options)
        except TemplateError as error:
            raise RecordError(
                f"record {record['id']}",
                "that the chat template refuses",
                f"the chat template of {self.name} refuses it: {error}",
            ) from None


def encode(record: Record, tokenizer: PreTrainedTokenizerBase) -> Encoded:
    """Encode one record; for many, make one :class:`Encoder` or call :func:`encode_records`.

    Learned are: in ``messages`` the tokens of every assistant answer and the token that closes it;
    in ``prompt``/``completion`` the completion and eos; in ``text`` everything and eos. A bos goes
    before prompts and texts where the tokenizer itself puts one. Where ``tokens`` are stored for
    this tokenizer, they are taken as they are and exactly their answers are learned.

    Raises:
        ConfigError: if there is no eos token, no chat template for messages, the template
            refuses the record or rewrites its history, or a stored id is not in the vocabulary.
    """
    return Encoder(tokenizer)(record)


def encode_prompt(record: Record, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return what a model is given to produce the record's last answer.

    ``messages``: all before the last assistant message, with the generation prompt;
    ``prompt``/``completion``: the prompt; ``text``: the whole text.
    """
    return Encoder(tokenizer).prompt(record)


def encode_records(
    records: Sequence[Record],
    tokenizer: PreTrainedTokenizerBase,
    *,
    seq_len: int,
    context: int | None = None,
    progress: Progress | None = None,
    max_bad_fraction: float = 0.0,
    dropped: Dropped | None = None,
) -> EncodedRecords:
    """Encode a data set for rows of ``seq_len`` tokens.

    Texts longer than a row become several documents; an answer longer than a row is dropped, since
    its end would never be seen. Both are counted.

    Args:
        records: checked records, see :mod:`specheads.data.records`.
        tokenizer: of the base model.
        seq_len: tokens per packed row.
        context: the longest sequence that the base model takes, if it says so.
        progress: called now and then with what, done and total.
        max_bad_fraction: share of the records that the tokenizer or its template may refuse; with
            0 the first of them is raised.
        dropped: is told of refused records.

    Raises:
        ConfigError: if ``seq_len`` exceeds ``context``, there are no records, or too many of them
            are refused.
        NothingLearnedError: if no record is left.
    """
    if context is not None and seq_len > context:
        raise ConfigError(
            f"data.seq_len is {seq_len}, longer than the base model's context of {context}"
        )
    if not records:
        raise ConfigError("the data set is empty")
    encoder = Encoder(tokenizer)
    documents: list[Encoded] = []
    counts: Counter[str] = Counter(
        records=len(records), too_long=0, unlabelled=0, split=0, retokenized=0, refused=0
    )
    errors: list[RecordError] = []
    for number, record in enumerate(records):
        if progress and number % 1000 == 0:
            progress("tokenize", number, len(records))
        try:
            encoded = encoder(record)
        except RecordError as error:
            if max_bad_fraction == 0:
                raise
            errors.append(error)
            if dropped is not None:
                dropped.add(error, record)
            continue
        counts["retokenized"] += "tokens" in record and not encoder.is_stored(record)
        if not _has_labels(encoded):
            counts["unlabelled"] += 1
        elif len(encoded.input_ids) <= seq_len:
            documents.append(encoded)
        elif "text" in record:
            counts["split"] += 1
            documents += _pieces(encoded, seq_len)
        else:
            counts["too_long"] += 1
    if progress:
        progress("tokenize", len(records), len(records))
    check_share(errors, len(records), max_bad_fraction, "encoding the records")
    counts["refused"] = len(errors)
    if not documents:
        raise NothingLearnedError(_nothing_left(counts, seq_len, encoder))
    counts["documents"] = len(documents)
    counts["tokens"] = sum(len(d.input_ids) for d in documents)
    counts["learned"] = sum(int((d.labels != IGNORE).sum()) for d in documents)
    return EncodedRecords(documents, dict(counts))


def _has_labels(encoded: Encoded) -> bool:
    return bool((encoded.labels[1:] != IGNORE).any())  # nothing predicts the first token


def _pieces(encoded: Encoded, seq_len: int) -> list[Encoded]:
    cuts = range(0, len(encoded.input_ids), seq_len)
    pieces = [
        Encoded(
            f"{encoded.id}+{cut}" if cut else encoded.id,
            encoded.kind,
            encoded.input_ids[cut : cut + seq_len],
            encoded.labels[cut : cut + seq_len],
        )
        for cut in cuts
    ]
    return [piece for piece in pieces if _has_labels(piece)]


def _nothing_left(counts: Counter[str], seq_len: int, encoder: Encoder) -> str:
    total, masked, long = counts["records"], counts["unlabelled"], counts["too_long"]
    if masked >= long:
        return (
            f"all labels are masked in {masked} of {total} records ({long} are longer than a row):"
            f" no assistant answer, no text, or the chat template of {encoder.name} hides them"
        )
    return (
        f"{long} of {total} records are longer than data.seq_len={seq_len} and the others have"
        " nothing to learn; raise data.seq_len"
    )


def _added_before(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    # what the tokenizer itself puts before a text: models differ, and base models rely on it
    alone = list(tokenizer("a", add_special_tokens=False).input_ids)
    whole = list(tokenizer("a").input_ids)
    for start in range(len(whole) - len(alone) + 1):
        if whole[start : start + len(alone)] == alone:
            return whole[:start]
    return []


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return an id to fill rows with; it is masked by position, so any valid id will do."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    return 0
