"""Turn records into token ids and labels, so that only what a model has to produce is learned.

Chat records go through the tokenizer's own template. Which tokens are the assistant's comes from
the template's ``{% generation %}`` markers where it has them; otherwise the conversation is
rendered message by message, and every step is checked to continue the one before. Records that
bring ids of this very tokenizer along (:mod:`specheads.data.schema`) are not tokenized at all.

Below are the encoding of a whole data set for packed rows, and the preview of what is learned.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise, zip_longest
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from specheads.config import ConfigError
from specheads.data.rendering import render
from specheads.data.schema import (
    Dropped,
    Record,
    RecordError,
    Tally,
    Top,
    naming,
    tokenizer_digest,
    unpacked_top,
)
from specheads.losses.cross_entropy import IGNORE
from specheads.system.terminal import RESET, harmless

# what a template raises on purpose, and what its expressions do with fields of an odd type
_REFUSALS = (
    TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
    RecursionError,
)  # fmt: skip
Message = dict[str, Any]
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Encoded:
    """One document. ``labels`` is not shifted: the token's own id where it is learned, else -100.

    Both arrays are int32 of one length. ``top`` is what a record stores beside its tokens, see
    :func:`specheads.data.schema.unpacked_top`: a row for every learned token, in order.
    """

    id: str
    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    top: Top | None = None


class Encoder:
    """Encodes records for one tokenizer.

    Learned are: in ``messages`` the tokens of every assistant answer and the token that closes it;
    in ``prompt``/``completion`` the completion and eos; in ``text`` everything and eos. A bos goes
    before prompts and texts where the tokenizer itself puts one. Where ``tokens`` are stored for
    this tokenizer, they are taken as they are and exactly their answers are learned.

    Raises:
        ConfigError: if there is no eos token; on a record, if there is no chat template for
            messages, the template refuses the record or rewrites its history, or a stored id is not
            in the vocabulary.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.name = tokenizer.name_or_path or type(tokenizer).__name__
        if tokenizer.eos_token_id is None:
            raise ConfigError(f"tokenizer {self.name} has no eos token, so no answer could end")
        self._eos = int(tokenizer.eos_token_id)
        self._special = special_ids(tokenizer)
        self._prefix = _added_before(tokenizer)
        template = tokenizer.chat_template
        if isinstance(template, dict):  # several, by purpose
            template = template.get("default")
        marked = isinstance(template, str) and _MARKER.search(template) is not None
        self._marked = marked and tokenizer.is_fast  # the mask needs the tokens' offsets

    def __call__(self, record: Record) -> Encoded:
        """Encode one record."""
        top = None
        with naming(f"record {record['id']}", record):
            if self.is_stored(record):
                ids, learned = self._stored_ids(record), [False] * len(record["tokens"]["ids"])
                for start, stop in record["tokens"]["answers"]:
                    learned[start:stop] = [True] * (stop - start)
                if "top" in record["tokens"]:
                    top = unpacked_top(record["tokens"]["top"], sum(learned))
            elif "messages" in record:
                ids, learned = self._encode_chat(record)
            elif "completion" in record:
                prompt, answer = self._encode_pair(record["prompt"], record["completion"])
                ids = prompt + answer
                learned = [False] * len(prompt) + [True] * len(answer)
            else:
                ids = [*self._prefix, *self.plain(record["text"]), self._eos]
                learned = [True] * len(ids)
        input_ids = np.asarray(ids, dtype=np.int32)
        labels = np.where(np.asarray(learned, dtype=bool), input_ids, np.int32(IGNORE))
        return Encoded(str(record["id"]), input_ids, labels, top)

    def prompt(self, record: Record) -> list[int]:
        """Return what a model is given to produce the record's last answer, or the one it lacks.

        ``messages``: all but an answer that ends them, with the generation prompt;
        ``prompt``/``completion``: the prompt; ``text``: the whole text.
        """
        with naming(f"record {record['id']}", record):
            if self.is_stored(record):
                return self._stored_ids(record)[: record["tokens"]["answers"][-1][0]]
            if "messages" in record:
                messages = record["messages"]
                answered = messages[-1]["role"] == "assistant"
                return self._render(messages[:-1] if answered else messages, True)
        text = record["prompt"] if "completion" in record else record["text"]
        return [*self._prefix, *self.plain(text)]

    def is_stored(self, record: Record) -> bool:
        """Whether ``record`` brings ids along that are this tokenizer's own."""
        return "tokens" in record and record["tokens"]["tokenizer"] == self.digest

    def is_special(self, encoded: Encoded) -> bool:
        """Whether all learned tokens are special ones."""
        return set(encoded.labels.tolist()) - {IGNORE} <= self._special

    @cached_property
    def digest(self) -> str:
        """The digest of the tokenizer, which is stored with ids of its own."""
        return tokenizer_digest(self.tokenizer)

    def _stored_ids(self, record: Record) -> list[int]:
        ids: list[int] = record["tokens"]["ids"]
        if max(ids) >= len(self.tokenizer):
            raise RecordError(
                "with a token id beyond the vocabulary",
                f"tokens.ids holds {max(ids)}, {self.name} has {len(self.tokenizer)} tokens",
            )
        return list(ids)

    def plain(self, text: str) -> list[int]:
        """Return the tokens of ``text``, with nothing added around them."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def _encode_pair(self, prompt: str, completion: str) -> tuple[list[int], list[int]]:
        # The prompt is tokenized as decoding will see it. The rest follows from the joint text
        # where that agrees, because some tokenizers put a space before any text on its own.
        before = [*self._prefix, *self.plain(prompt)]
        joint = [*self._prefix, *self.plain(prompt + completion)]
        if joint[: len(before)] == before:
            return before, [*joint[len(before) :], self._eos]
        return before, [*self.plain(completion), self._eos]

    def _encode_chat(self, record: Record) -> tuple[list[int], list[bool]]:
        if self.tokenizer.chat_template is None:
            raise ConfigError(
                f"tokenizer {self.name} has no chat template, which records with messages need"
                f" (record {record['id']}); give prompt and completion, or a tokenizer with one"
            )
        encode = self._by_markers if self._marked else self._by_steps
        ids, learned = encode(record["messages"])
        # many templates put a line break behind the closing token; decoding stops before it
        for start, stop in runs(learned):
            closing = [t for t in range(start, stop) if ids[t] in self._special]
            if closing and not str(self.tokenizer.decode(ids[closing[-1] + 1 : stop])).strip():
                learned[closing[-1] + 1 : stop] = [False] * (stop - closing[-1] - 1)
        spans = runs(learned)
        closed = bool(spans) and ids[spans[-1][1] - 1] in self._special
        if record["messages"][-1]["role"] == "assistant" and not closed:
            ids, learned = [*ids, self._eos], [*learned, True]  # else nothing teaches it to end
        return ids, learned

    def _by_markers(self, messages: Sequence[Any]) -> tuple[list[int], list[bool]]:
        text, spans = self._apply(messages, return_assistant_tokens_mask=True)
        out = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ids, offsets = list(out["input_ids"]), np.reshape(out["offset_mapping"], (-1, 2))
        learned = np.zeros(len(ids), dtype=bool)
        for start, stop in spans:  # a character may have several tokens
            learned |= (offsets[:, 0] < stop) & (offsets[:, 1] > start)
        for t in range(1, len(ids)):
            # some templates close their block before the eos that ends the answer
            closing = ids[t] == self._eos and ids[t - 1] not in self._special
            learned[t] |= learned[t - 1] and closing
        if not learned.any() and _says_something({"messages": messages}):
            raise RecordError(
                "whose answers the chat template does not mark",
                f"the chat template of {self.name} marks no token of the answers as generated;"
                " check its generation block",
            )
        return ids, learned.tolist()

    def _by_steps(self, messages: Sequence[Any]) -> tuple[list[int], list[bool]]:
        ids = self._render(messages, False)
        learned = [False] * len(ids)
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:i], True)
            after = self._render(messages[: i + 1], False)
            for part in (before, after):
                if ids[: len(part)] != part:
                    raise RecordError(
                        "whose earlier messages the chat template rewrites",
                        f"the chat template of {self.name} rewrites earlier messages when later"
                        f" ones follow (message {i}), so the answer's tokens cannot be told"
                        " apart; use records with one answer, or a template with generation"
                        " markers",
                    )
            learned[len(before) : len(after)] = [True] * (len(after) - len(before))
        return ids, learned

    def _render(self, messages: Sequence[Any], prompt: bool) -> list[int]:
        if not messages:
            return []
        return self.plain(self._apply(messages, add_generation_prompt=prompt)[0])

    def _apply(self, messages: Sequence[Any], **options: bool) -> tuple[str, list[tuple[int, int]]]:
        try:
            return render(self.tokenizer, messages, **options)
        except _REFUSALS as error:
            raise RecordError(
                "that the chat template refuses",
                f"the chat template of {self.name} refuses it: {error or type(error).__name__}",
            ) from None


def conversation(turns: Sequence[Sequence[Message]], answers: Sequence[str]) -> list[Message]:
    """Return the messages of turns with an answer behind each, up to the turn after ``answers``."""
    found: list[Message] = []
    for turn, answer in zip_longest(turns[: len(answers) + 1], answers):
        found += turn
        if answer is not None:
            found.append({"role": "assistant", "content": answer})
    return found


def learned_counts(documents: Iterable[Encoded], vocab_size: int) -> NDArray[np.int64]:
    """Return how often each token is learned, [vocab_size]."""
    labels = np.concatenate([document.labels for document in documents])
    return np.bincount(labels[labels != IGNORE], minlength=vocab_size)


def most_frequent(counts: NDArray[np.int64], num_kept: int) -> NDArray[np.int64]:
    """Return the ``num_kept`` ids that occur most often, ties by id, [num_kept]."""
    return np.argsort(-counts, kind="stable")[:num_kept]


def runs(learned: Sequence[bool]) -> list[tuple[int, int]]:
    """Return [start, stop) of every run of learned tokens."""
    cuts = [t for t, (a, b) in enumerate(pairwise([False, *learned, False])) if a != b]
    return list(zip(cuts[::2], cuts[1::2], strict=True))


def _added_before(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    # what the tokenizer itself puts before a text: models differ, and base models rely on it
    alone = list(tokenizer("a", add_special_tokens=False).input_ids)
    whole = list(tokenizer("a").input_ids)
    for start in range(len(whole) - len(alone) + 1):
        if whole[start : start + len(alone)] == alone:
            return whole[:start]
    return []


_NOTES = {
    "too_long": "dropped: longer than data.seq_len",
    "unlabelled": "dropped: nothing to learn",
    "refused": "dropped: cannot be encoded",
    "split": "texts cut into pieces",
    "retokenized": "encoded anew: their stored ids are of another tokenizer",
}


class Documents:
    """Turns records into documents that fit a row, and counts what becomes of them.

    Texts longer than a row become several documents; an answer longer than a row is dropped, since
    its end would never be seen.

    Args:
        tokenizer: the base model's tokenizer.
        seq_len: tokens per packed row.
        context: the longest sequence that the base model takes, if it says so.
        learn_all: learn prompts too, as pre-training does.

    Attributes:
        documents: those of a whole data set, see :func:`encode_records`.
        counts: so far: ``records``, ``documents``, ``tokens``, ``learned`` (tokens with a label),
            ``too_long`` (answers longer than a row, dropped), ``split`` (texts cut into several
            documents), ``unlabelled`` (records without anything to learn, dropped), ``refused``
            (records that cannot be encoded, dropped) and ``retokenized`` (records whose stored ids
            are of another tokenizer or template, so that their text was encoded anew).

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
        self.counts = dict.fromkeys(("records", "documents", "tokens", "learned", *_NOTES), 0)
        self.documents: list[Encoded] = []

    def summary(self) -> str:
        """Return one line about the counts, dropped records included."""
        c = self.counts
        line = f"{c['records']:,} records, {c['tokens']:,} tokens, {c['learned']:,} learned"
        return line + "".join(f"; {c[key]:,} {note}" for key, note in _NOTES.items() if c[key])

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
        learned = _has_labels(encoded)
        # tokens that only open and close an empty answer teach to say nothing
        if not learned or (not _says_something(record) and self.encoder.is_special(encoded)):
            counts["unlabelled"] += 1
            reason = "with empty answers" if learned else "with nothing to learn"
            raise RecordError(reason, where=f"record {record['id']}", row=record)
        found = [encoded]
        if len(encoded.input_ids) > self.seq_len:
            if "text" not in record:
                counts["too_long"] += 1
                return []
            counts["split"] += 1
            found = _pieces(encoded, self.seq_len)
        if self.learn_all:
            found = [replace(document, labels=document.input_ids, top=None) for document in found]
        counts["documents"] += len(found)
        counts["tokens"] += sum(len(d.input_ids) for d in found)
        counts["learned"] += sum(int((d.labels != IGNORE).sum()) for d in found)
        return found


def encode_records(
    records: Sequence[Record], documents: Documents, tally: Tally | None = None
) -> Documents:
    """Encode a data set for packed rows.

    Args:
        records: checked records, see :mod:`specheads.data.load`.
        documents: the encoder of single records, with which none has been counted yet.
        tally: counts, and sets aside, the records that the tokenizer or its template refuses, or
            that have nothing to learn; where it allows none the first of them is raised.

    Returns:
        The encoder, which now holds the documents.

    Raises:
        ConfigError: if there are no records, too many of them are set aside, or none is left.
    """
    if not records:
        raise ConfigError("the data set is empty")
    found, counts = documents.documents, documents.counts
    tally, total = tally or Tally(0, Dropped()), len(records)
    for record in records:
        found += tally.take(documents.of, record) or []
    if found or counts["refused"] == total:
        tally.check("encoding the records")
    if not found:
        masked, long = counts["unlabelled"], counts["too_long"]
        raise ConfigError(
            f"all labels are masked in {masked} of {total} records (no assistant answer, no text,"
            f" or the chat template of {documents.encoder.name} hides them), and {long} are longer"
            f" than data.seq_len={documents.seq_len}"
        )
    return documents


def _says_something(record: Record) -> bool:
    answers = [record["completion"] if "completion" in record else record.get("text", "")]
    if "messages" in record:
        answers = [m["content"] for m in record["messages"] if m["role"] == "assistant"]
    return any(answer.strip() for answer in answers)


def _has_labels(encoded: Encoded) -> bool:
    return bool((encoded.labels[1:] != IGNORE).any())  # nothing predicts the first token


def _pieces(encoded: Encoded, seq_len: int) -> list[Encoded]:
    pieces = []
    for cut in range(0, len(encoded.input_ids), seq_len):
        name, place = f"{encoded.id}+{cut}" if cut else encoded.id, slice(cut, cut + seq_len)
        ids, labels = encoded.input_ids[place], encoded.labels[place]
        pieces.append(Encoded(name, ids, labels))
    return [piece for piece in pieces if _has_labels(piece)]


PLAIN = ("⟦", "⟧")
_LEARNED = "\x1b[38;5;16;48;5;157m"  # black on pale green


def segments(encoded: Encoded, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, bool]]:
    """Cut a document where learned tokens begin or end.

    Yields:
        The text of each run of tokens, and whether they are learned. The texts join to that of the
        document.
    """
    ids, shown, start = encoded.input_ids.tolist(), "", 0
    for learned, run in groupby((encoded.labels != IGNORE).tolist()):
        stop = start + len(list(run))
        # some tokenizers drop the space before a text, so a run is read behind what precedes it
        whole = _decode(tokenizer, ids[:stop])
        goes_on = whole.startswith(shown)
        yield whole[len(shown) :] if goes_on else _decode(tokenizer, ids[start:stop]), learned
        shown, start = whole, stop


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids of the special tokens, those that were added later among them."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return special | set(tokenizer.all_special_ids)


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def render_mask(
    encoded: Encoded, tokenizer: PreTrainedTokenizerBase, brackets: tuple[str, str] | None = PLAIN
) -> str:
    """Return a document's text, special tokens included, with its learned parts marked.

    Characters that a terminal would obey are shown as escapes.

    Args:
        encoded: the document.
        tokenizer: the tokenizer that encoded it.
        brackets: what stands before and after a learned part; None: colours of the terminal.
    """
    shown = ""
    for text, learned in segments(encoded, tokenizer):
        text = harmless(text)
        if learned and brackets:
            text = text.join(brackets)
        elif learned:  # terminals paint the rest of a line that ends in colour
            text = "\n".join(_LEARNED + line + RESET if line else "" for line in text.split("\n"))
        shown += text
    return shown


def share(learned: int, tokens: int) -> str:
    """Return the mask ratio as people read it."""
    return f"{tokens:,} tokens, {learned:,} learned ({100 * learned / max(1, tokens):.1f}%)"


def pick(records: Sequence[Record], number: int, seed: int) -> list[Record]:
    """Return ``number`` records drawn by ``seed``, more where there are more kinds, in order.

    Every kind is there at least once, unless ``number`` is 0.
    """
    if not number:
        return []
    order = list(range(len(records)))
    random.Random(seed).shuffle(order)
    chosen = set({records[i]["kind"]: i for i in reversed(order)}.values())  # the first of each
    others = [i for i in order if i not in chosen]
    return [records[i] for i in sorted([*chosen, *others[: max(0, number - len(chosen))]])]
