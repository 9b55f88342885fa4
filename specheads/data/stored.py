"""Token ids that a record brings along: whose they are, and which of them an assistant produced.

A record may carry ``"tokens": {"ids": [...], "answers": [[start, stop], ...], "tokenizer": "..."}``
beside its content. Decoding and encoding a generated text need not give the ids back that were
generated, so these are trained on as they are, wherever the tokenizer is still the same one.
"""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from typing import TYPE_CHECKING

from specheads.data.dropped import RecordError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a sha256 over all that decides which ids a conversation becomes.

    That is the vocabulary and its rules, the special tokens and the chat template; not the
    folder's name, nor the padding and truncation that the last call asked for.
    """
    special = tokenizer.special_tokens_map.items()
    parts = {
        "vocabulary": _vocabulary(tokenizer),
        # many programs set a missing pad token, which no conversation holds
        "special": {key: str(value) for key, value in special if key != "pad_token"},
        "template": tokenizer.chat_template,
    }
    line = json.dumps(parts, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(line.encode("utf-8", "surrogatepass")).hexdigest()


def _vocabulary(tokenizer: PreTrainedTokenizerBase) -> object:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str"):
        return [type(tokenizer).__name__, tokenizer.get_vocab()]
    rules = json.loads(backend.to_str())
    return {key: value for key, value in rules.items() if key not in ("truncation", "padding")}


def check_tokens(tokens: object, where: str) -> None:
    """Check the stored tokens of a record.

    Raises:
        RecordError: if ids are not token ids, or the answers are not rising spans [start, stop)
            inside them; names ``where``.
    """

    def wrong(detail: str) -> RecordError:
        return RecordError(where, "with stored tokens that are wrong", detail)

    if not isinstance(tokens, dict):
        raise wrong(f"tokens must be an object, got {tokens!r:.60}")
    ids, answers = tokens.get("ids"), tokens.get("answers")
    if not isinstance(ids, list) or not all(_is_count(i) for i in ids):
        raise wrong(f"tokens.ids must be a list of token ids, got {ids!r:.60}")
    if not isinstance(tokens.get("tokenizer"), str):
        raise wrong(
            f"tokens.tokenizer must be the digest of the tokenizer,"
            f" got {tokens.get('tokenizer')!r:.60}"
        )
    spans = answers if isinstance(answers, list) else []
    if not spans or not all(
        isinstance(span, list) and len(span) == 2 and all(map(_is_count, span)) for span in spans
    ):
        raise wrong(
            f"tokens.answers must be a list of at least one [start, stop], got {answers!r:.60}"
        )
    for start, stop in spans:
        if not start < stop <= len(ids):
            raise wrong(f"tokens.answers has [{start}, {stop}], which is no span of {len(ids)} ids")
    for before, after in pairwise(spans):
        if after[0] < before[1]:
            raise wrong(f"tokens.answers must rise without overlap, got {before} before {after}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
