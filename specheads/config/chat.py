"""The settings of the terminal chat."""

from __future__ import annotations

from dataclasses import dataclass, field

from specheads.config.commands import DecodeConfig, check_devices
from specheads.config.errors import MISSING, check, dtype_name, one_of


@dataclass
class ChatConfig:
    """Everything ``python -m specheads.chat`` accepts."""

    checkpoint: str = MISSING  # an export, or a base model: a folder, a hub name, tinycode
    base: str | None = None  # where the original base model is now, if it was moved
    system: str = ""  # the first message, where the chat template has a place for it
    template: str = ""  # a .jinja file in place of the tokenizer's own chat template
    max_new_tokens: int = 512  # of one answer
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    seed: int = 0  # of every turn
    dtype: str = "float32"
    device: str = "auto"  # auto: a GPU if there is one; cpu, cuda, cuda:1, mps
    device_map: str = ""  # in place of device, spread the model: auto, balanced, sequential
    color: str = "auto"  # auto, always, never: one colour per verify step; auto heeds NO_COLOR
    beside: bool = False  # decode every turn plainly as well, and compare
    decode: DecodeConfig = field(default_factory=DecodeConfig)

    def __post_init__(self) -> None:
        check(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1")
        check(self.temperature >= 0, "temperature", self.temperature, "at least 0")
        check(self.top_k >= 0, "top_k", self.top_k, "at least 0")
        check(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        check(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        penalty, ngram = self.repetition_penalty, self.no_repeat_ngram_size
        check(penalty > 0, "repetition_penalty", penalty, "more than 0")
        check(ngram >= 0, "no_repeat_ngram_size", ngram, "at least 0")
        self.dtype = dtype_name("dtype", self.dtype)
        one_of("color", self.color, "auto", "always", "never")
        check_devices(self.device, self.device_map)
