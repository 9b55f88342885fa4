"""Encode the records of a data set as documents for packed rows, and count what becomes of them.

Which tokens of a record are learned: :mod:`specheads.data.encoder`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from specheads.config import ConfigError
from specheads.data.dropped import Dropped, RecordError, check_share
from specheads.data.encoder import Encoded, Encoder
from specheads.data.rows import Record
from specheads.data.stored import tokenizer_digest
from specheads.losses import IGNORE

__all__ = [
    "Documents",
    "Encoded",
    "EncodedRecords",
    "Encoder",
    "NothingLearnedError",
    "encode",
    "encode_prompt",
    "encode_records",
    "pad_token_id",
    "tokenizer_digest",
]

Progress = Callable[[str, int, int], None]

_COUNTS = (
    "records", "documents", "tokens", "learned", "too_long", "unlabelled", "split", "retokenized",
    "refused",
)  # fmt: skip


class NothingLearnedError(ConfigError):
    """No record of a data set has a token to learn."""


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
    """Return what a model is given to produce the record's last answer, or the one it lacks.

    ``messages``: all but an answer that ends them, with the generation prompt;
    ``prompt``/``completion``: the prompt; ``text``: the whole text.
    """
    return Encoder(tokenizer).prompt(record)


class Documents:
    """Turns records into documents that fit a row, and counts what becomes of them.

    Texts longer than a row become several documents; an answer longer than a row is dropped, since
    its end would never be seen.

    Args:
        tokenizer: of the base model.
        seq_len: tokens per packed row.
        context: the longest sequence that the base model takes, if it says so.
        learn_all: learn prompts too, as pre-training does.

    Attributes:
        counts: so far; the keys are those of :class:`EncodedRecords`.

    Raises:
        ConfigError: if ``seq_len`` exceeds ``context``, or the tokenizer has no eos.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seq_len: int,
        context: int | None = None,
        learn_all: bool = False,
    ) -> None:
        if context is not None and seq_len > context:
            raise ConfigError(
                f"data.seq_len is {seq_len}, longer than the base model's context of {context}"
            )
        self.encoder, self.seq_len, self.learn_all = Encoder(tokenizer), seq_len, learn_all
        self.counts = dict.fromkeys(_COUNTS, 0)

    def of(self, record: Record) -> list[Encoded]:
        """Return the documents of one record, none if it is longer than a row.

        Raises:
            RecordError: if it cannot be encoded, or holds nothing to learn; it is counted.
        """
        counts = self.counts
        counts["records"] += 1
        try:
            encoded = self.encoder(record)
        except RecordError:
            counts["refused"] += 1
            raise
        counts["retokenized"] += "tokens" in record and not self.encoder.is_stored(record)
        if reason := self._without_lesson(record, encoded):
            counts["unlabelled"] += 1
            raise RecordError(f"record {record['id']}", reason)
        if len(encoded.input_ids) <= self.seq_len:
            found = [encoded]
        elif "text" in record:
            counts["split"] += 1
            found = _pieces(encoded, self.seq_len)
        else:
            counts["too_long"] += 1
            return []
        if self.learn_all:
            found = [replace(document, labels=document.input_ids) for document in found]
        counts["documents"] += len(found)
        counts["tokens"] += sum(len(d.input_ids) for d in found)
        counts["learned"] += sum(int((d.labels != IGNORE).sum()) for d in found)
        return found

    def _without_lesson(self, record: Record, encoded: Encoded) -> str:
        if not _has_labels(encoded):
            return "with nothing to learn"
        # tokens that only open and close an empty answer teach to say nothing
        if not _says_something(record) and self.encoder.is_special(encoded):
            return "with empty answers"
        return ""


def _says_something(record: Record) -> bool:
    if "messages" in record:
        answers = [m["content"] for m in record["messages"] if m["role"] == "assistant"]
    else:
        answers = [record["completion"] if "completion" in record else record["text"]]
    return any(answer.strip() for answer in answers)


def encode_records(
    records: Sequence[Record],
    tokenizer: PreTrainedTokenizerBase,
    *,
    seq_len: int,
    context: int | None = None,
    progress: Progress | None = None,
    max_bad_fraction: float = 0.0,
    dropped: Dropped | None = None,
    learn_all: bool = False,
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
        max_bad_fraction: share of the records that the tokenizer or its template may refuse, or
            that have nothing to learn; with 0 the first that is refused is raised.
        dropped: is told of them.
        learn_all: learn prompts too, as pre-training does.

    Raises:
        ConfigError: if ``seq_len`` exceeds ``context``, there are no records, or too many of them
            are refused.
        NothingLearnedError: if no record is left.
    """
    if not records:
        raise ConfigError("the data set is empty")
    making = Documents(tokenizer, seq_len=seq_len, context=context, learn_all=learn_all)
    documents: list[Encoded] = []
    errors: list[RecordError] = []
    for number, record in enumerate(records):
        if progress and number % 1000 == 0:
            progress("tokenize", number, len(records))
        refused = making.counts["refused"]
        try:
            documents += making.of(record)
        except RecordError as error:
            if max_bad_fraction == 0 and making.counts["refused"] > refused:
                raise
            errors.append(error)
            if dropped is not None:
                dropped.add(error, record)
    if progress:
        progress("tokenize", len(records), len(records))
    if documents or making.counts["refused"] == len(records):
        check_share(errors, len(records), max_bad_fraction, "encoding the records")
    if not documents:
        raise NothingLearnedError(_nothing_left(making.counts, seq_len, making.encoder))
    return EncodedRecords(documents, making.counts)


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


def _nothing_left(counts: Mapping[str, int], seq_len: int, encoder: Encoder) -> str:
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


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return an id to fill rows with; it is masked by position, so any valid id will do."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    return 0
