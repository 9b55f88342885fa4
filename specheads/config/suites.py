"""The settings of the commands that run public suites of questions, and measure quality."""

from __future__ import annotations

from dataclasses import dataclass, field

from specheads.config.commands import DecodeConfig
from specheads.config.errors import MISSING, check, check_device, dtype_name


@dataclass
class SpecBenchConfig:
    """Everything ``python -m specheads.spec_bench`` accepts."""

    checkpoint: str = MISSING  # an export, or a base model: a folder, a hub name, tinycode
    base: str = ""  # where the export's base model is now, if it was moved
    # a suite's file, which you bring: question.jsonl of Spec-Bench, SPEED-Bench, plain prompts
    questions: str = MISSING
    answers: str = "model_answer"  # folder of the answer files; finished questions are kept
    name: str = ""  # model_id and name of the answer file; empty: after checkpoint and drafter
    out: str = "spec_bench.json"
    # of the conversation: auto (chat if the tokenizer has a template, else none), chat, vicuna,
    # none, or the path of a file with a template
    template: str = "auto"
    begin: int = 0  # leave out questions before this place in the file
    end: int = 0  # and from this place on; 0: none
    skip_long: bool = False  # leave out questions that do not fit the base model's context
    max_new_tokens: int = 1024  # per turn
    temperature: float = 0.0
    seed: int = 0
    warmup: int = 3  # times the first question is answered before the first is clocked
    plain: bool = True  # answer with plain decoding too, question by question in turn
    baseline: str = ""  # an answer file to compare with instead, of any program
    json: bool = False  # one JSON object on standard output, everything else on standard error
    dtype: str = "auto"  # auto: bfloat16 where the processor has it
    device: str = "auto"  # auto: a GPU if there is one; cpu, cuda, cuda:1, mps
    threads: int = 0  # 0: OMP_NUM_THREADS, the container's quota, the processors: the least
    decode: DecodeConfig = field(default_factory=DecodeConfig)

    def __post_init__(self) -> None:
        check(bool(self.template), "template", self.template, "chat, vicuna, none or a file")
        check("/" not in self.name, "name", self.name, "a file name, without a slash")
        check(self.begin >= 0, "begin", self.begin, "at least 0")
        check(self.end == 0 or self.end > self.begin, "end", self.end, f"0 or above {self.begin}")
        check(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1")
        check(self.temperature >= 0, "temperature", self.temperature, "at least 0")
        check(self.warmup >= 0, "warmup", self.warmup, "at least 0")
        self.dtype = dtype_name("dtype", self.dtype, "auto")
        check_device(self.device)


@dataclass
class QualityConfig:
    """Everything ``python -m specheads.quality`` accepts."""

    checkpoint: str = MISSING  # an export, or a base model: a folder, a hub name, tinycode
    base: str = ""  # where an export's base model is now, if it was moved
    original: str = ""  # what to compare with; empty: the base that a tuned export came from
    data: str = ""  # a .jsonl of held-out records with answers; empty: the export's prompts.jsonl
    out: str = "quality.json"
    json: bool = False  # one JSON object on standard output, everything else on standard error
    num_records: int = 0  # to read with both models; 0: all
    num_prompts: int = 24  # to continue freely
    max_new_tokens: int = 128
    temperature: float = 0.7  # of the texts that a lossy rule is judged by
    seed: int = 0
    dtype: str = "float32"  # rounding is a distance too; auto: bfloat16 where there is
    device: str = "auto"  # auto: a GPU if there is one; cpu, cuda, cuda:1, mps
    threads: int = 0  # 0: OMP_NUM_THREADS, the container's quota, the processors: the least
    decode: DecodeConfig = field(default_factory=DecodeConfig)

    def __post_init__(self) -> None:
        check(self.num_records >= 0, "num_records", self.num_records, "at least 0")
        check(self.num_prompts >= 0, "num_prompts", self.num_prompts, "at least 0")
        check(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1")
        check(self.temperature >= 0, "temperature", self.temperature, "at least 0")
        self.dtype = dtype_name("dtype", self.dtype, "auto")
        check_device(self.device)
