"""Turn records into token ids and labels, so that only what a model has to produce is learned.

Chat records go through the tokenizer's own template. Which tokens are the assistant's comes from
the template's ``{% generation %}`` markers where it has them; otherwise the conversation is
rendered message by message, and every step is checked to continue the one before. Records that
bring ids of this very tokenizer along (:mod:`specheads.data.stored`) are not tokenized at all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from specheads.config import ConfigError
from specheads.data.dropped import RecordError
from specheads.data.rendering import is_generated, render
from specheads.data.rows import Record
from specheads.data.stored import tokenizer_digest
from specheads.losses import IGNORE

# what a template raises on purpose, and what its expressions do with fields of an odd type
_REFUSALS = (
    TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
    RecursionError,
)  # fmt: skip
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Encoded:
    """One document. ``labels`` is not shifted: the token's own id where it is learned, else -100.

    Both arrays are int32 of one length.
    """

    id: str
    kind: str
    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]


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
        """Return the ids up to where the last answer starts; see :func:`encode_prompt`."""
        if self.is_stored(record):
            return self._stored_ids(record)[: record["tokens"]["answers"][-1][0]]
        if "messages" in record:
            messages = record["messages"]
            answered = messages[-1]["role"] == "assistant"
            return self._render(messages[:-1] if answered else messages, record, True)
        text = record["prompt"] if "completion" in record else record["text"]
        return [*self._prefix, *self._plain(text)]

    def is_stored(self, record: Record) -> bool:
        """Whether ``record`` brings ids along that are this tokenizer's own."""
        return "tokens" in record and record["tokens"]["tokenizer"] == self._digest

    def is_special(self, encoded: Encoded) -> bool:
        """Whether all learned tokens are special ones."""
        return set(encoded.labels.tolist()) - {IGNORE} <= self._special

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
        text, spans = self._apply(record["messages"], record, return_assistant_tokens_mask=True)
        out = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ids, offsets = list(out["input_ids"]), list(out["offset_mapping"])
        learned = is_generated(out, spans, len(ids))
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
        return self._plain(self._apply(messages, record, add_generation_prompt=prompt)[0])

    def _apply(
        self, messages: Sequence[Any], record: Record, **options: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        try:
            return render(self.tokenizer, messages, **options)
        except _REFUSALS as error:
            raise RecordError(
                f"record {record['id']}",
                "that the chat template refuses",
                f"the chat template of {self.name} refuses it: {error or type(error).__name__}",
            ) from None


def _added_before(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    # what the tokenizer itself puts before a text: models differ, and base models rely on it
    alone = list(tokenizer("a", add_special_tokens=False).input_ids)
    whole = list(tokenizer("a").input_ids)
    for start in range(len(whole) - len(alone) + 1):
        if whole[start : start + len(alone)] == alone:
            return whole[:start]
    return []
