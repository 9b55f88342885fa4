"""How a suite's question becomes a prompt: the tokenizer's chat template, Vicuna's, or none."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from specheads.config import ConfigError
from specheads.data.chat import Encoder
from specheads.data.suites import Question, messages

KINDS = ("auto", "chat", "vicuna", "none")
# of FastChat's template vicuna_v1.1, by which Spec-Bench asks every model
_VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant."
    " The assistant gives helpful, detailed, and polite answers to the user's questions."
)


class QuestionPrompts:
    """Gives the token ids before each answer; earlier answers are rendered from their texts.

    Args:
        tokenizer: of the base model.
        template: ``chat``, the tokenizer's own; ``vicuna``; ``none``: texts as they stand, an
            answer right behind its turn and the next turn on a new line; ``auto``: ``chat`` where
            the tokenizer has a template, else ``none``; or the path of a file with a template.

    Attributes:
        kind: ``chat``, ``vicuna`` or ``none``; name and digest of the file, where one is given.

    Raises:
        ConfigError: if there is no such template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str = "auto") -> None:
        if template == "auto":
            template = "none" if tokenizer.chat_template is None else "chat"
        if template not in KINDS:
            tokenizer = copy.copy(tokenizer)
            tokenizer.chat_template = text = _read_template(template)
            digest = hashlib.sha256(text.encode()).hexdigest()[:12]
            template = f"{Path(template).name} {digest}"
        elif template == "chat" and tokenizer.chat_template is None:
            raise ConfigError(
                f"template=chat, but the tokenizer {tokenizer.name_or_path} has no chat template;"
                " template=none, vicuna or a file with one"
            )
        self.kind = template
        self.tokenizer = tokenizer
        self._encoder = None if template in ("vicuna", "none") else Encoder(tokenizer)

    def ids(self, question: Question, answers: Sequence[str] = ()) -> list[int]:
        """Return the tokens up to where the answer to turn ``len(answers)`` starts.

        Raises:
            ConfigError: if the chat template refuses the conversation.
        """
        if self._encoder is not None:
            # the encoder renders what stands before the last answer
            due = {"role": "assistant", "content": ""}
            record = {"id": question.id, "messages": [*messages(question, answers), due]}
            return self._encoder.prompt(record)
        render = _vicuna if self.kind == "vicuna" else _bare
        return list(self.tokenizer(render(question, answers), verbose=False).input_ids)


def _vicuna(question: Question, answers: Sequence[str]) -> str:
    text = question.system or _VICUNA_SYSTEM
    ends = [f" {answer}</s>" for answer in answers]
    for i, (turn, end) in enumerate(zip(question.turns, [*ends, ""], strict=False)):
        text += f"{'' if i else ' '}USER: {turn} ASSISTANT:{end}"
    return text


def _bare(question: Question, answers: Sequence[str]) -> str:
    said = zip(question.turns, [*answers, ""], strict=False)
    text = "\n".join(turn + answer for turn, answer in said)
    return f"{question.system}\n{text}" if question.system else text


def _read_template(template: str) -> str:
    path = Path(template).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        expected = "must be auto, chat, vicuna, none or a file with a chat template"
        raise ConfigError(f"template {expected}; cannot read {template}: {reason}") from None
    if not text.strip():
        raise ConfigError(f"template: {path} is empty")
    return text
