"""The settings of the commands that load an export or a base model.

The settings of the commands that run public suites of questions, and measure quality.

The settings of the terminal chat.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specheads.system.errors import MISSING, check, check_device, dtype_name, one_of


def check_devices(device: str, device_map: str) -> None:
    """Raise ConfigError unless these say where a model goes: one device, or a way to spread it."""
    check_device(device)
    options = ("auto", "balanced", "balanced_low_0", "sequential")
    expected = "empty or one of " + ", ".join(options) + " (device= puts it on one device)"
    check(device_map in ("", *options), "device_map", device_map, expected)
    check(not device_map or device == "auto", "device", device, f"auto with {device_map=!s}")


# what proposes: heads (the export's), draft (a draft model's chain), draft_tree, draft_heads (a
# draft model with heads of its own), lookup (n-grams of the text), suffix (its longest repeat),
# lookahead, or several of them merged, joined by a plus
DRAFTERS = ("heads", "draft", "draft_tree", "draft_heads", "lookup", "suffix", "lookahead")


@dataclass
class DecodeConfig:
    """How guesses are made, and accepted."""

    # one of DRAFTERS, or several as heads+suffix; auto: the draft model if one is given, else heads
    # if there are, else suffix
    drafter: str = "auto"
    draft: str = ""  # draft...: folder or hub name of the draft model; or an export of its heads
    draft_tokens: int = 0  # draft: tokens per step; 0: as many as pay, adapted while decoding
    draft_sampling: str = "greedy"  # greedy, sampled, coupled: see drafters/draft_model.py
    window: int = 7  # lookahead: W
    ngram: int = 4  # lookahead: N
    guesses: int = 7  # lookahead: G
    # static: the export's; dynamic: grown at each step; auto: what tree_search found faster
    tree: str = "auto"
    # of a tree that is grown at each step or merged, root included; 0: what tree_search found, all
    num_nodes: int = 0
    compile: bool = False  # torch.compile the base's passes, CUDA graphs on a GPU; slow to start
    acceptance: str = "exact"  # exact; lossy_typical, lossy_lenient: NOT the base's distribution
    epsilon: float = 0.09  # of lossy_typical, larger is stricter
    delta: float = 0.3  # of lossy_typical, larger is stricter
    lenience: float = 0.5  # of lossy_lenient, 1 is exact

    def __post_init__(self) -> None:
        names = [] if self.drafter == "auto" else self.drafter.split("+")
        for name in names:
            one_of("decode.drafter", name, "auto", *DRAFTERS)
        check(len(set(names)) == len(names), "decode.drafter", self.drafter, "without repetition")
        check(
            bool(self.draft) or not {"draft", "draft_tree", "draft_heads"} & set(names),
            "decode.draft",
            self.draft,
            f"a draft model with decode.drafter={self.drafter}",
        )
        check(self.draft_tokens >= 0, "decode.draft_tokens", self.draft_tokens, "at least 0")
        one_of("decode.draft_sampling", self.draft_sampling, "greedy", "sampled", "coupled")
        check(self.window >= 2, "decode.window", self.window, "at least 2")
        check(self.ngram >= 2, "decode.ngram", self.ngram, "at least 2")
        check(self.guesses >= 1, "decode.guesses", self.guesses, "at least 1")
        one_of("decode.tree", self.tree, "auto", "static", "dynamic")
        check(
            self.num_nodes == 0 or self.num_nodes >= 2,
            "decode.num_nodes",
            self.num_nodes,
            "0 or above 1",
        )
        one_of("decode.acceptance", self.acceptance, "exact", "lossy_typical", "lossy_lenient")
        check(self.epsilon >= 0, "decode.epsilon", self.epsilon, "at least 0")
        check(self.delta >= 0, "decode.delta", self.delta, "at least 0")
        check(0 < self.lenience <= 1, "decode.lenience", self.lenience, "in (0, 1]")


@dataclass
class GenerateConfig:
    """Everything ``python -m specheads.generate`` accepts."""

    checkpoint: str = MISSING  # an export, or a base model: a folder, a hub name, tinycode
    base: str | None = None  # where the original base model is now, if it was moved
    prompt: str = ""  # empty: read standard input
    prompts: str = ""  # a .jsonl of texts or chats instead, decoded in batches; writes JSON lines
    batch_size: int = 8
    raw: bool = False  # continue the prompt as text instead of applying the chat template
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    stop: list[str] = field(default_factory=list)  # stop="..." as often as there are strings
    seed: int = 0  # of the first prompt; the next has the next
    dtype: str = "float32"
    device: str = "auto"  # auto: a GPU if there is one; cpu, cuda, cuda:1, mps
    device_map: str = ""  # in place of device, spread the model: auto, balanced, sequential
    color: str = "auto"  # auto, always, never: one colour per verify step
    plain: bool = False  # one token at a time, for comparison
    json: bool = False  # one JSON object on standard output, everything else on standard error
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
        check(self.batch_size >= 1, "batch_size", self.batch_size, "at least 1")
        check(not (self.prompt and self.prompts), "prompts", self.prompts, "left out with prompt")
        check(all(self.stop), "stop", self.stop, "strings that are not empty")
        self.dtype = dtype_name("dtype", self.dtype)
        check_devices(self.device, self.device_map)
        one_of("color", self.color, "auto", "always", "never")


@dataclass
class BenchConfig:
    """Everything ``python -m specheads.bench`` accepts."""

    checkpoint: str = MISSING  # an export, or a base model: a folder, a hub name, tinycode
    base: str = ""  # where the export's base model is now, if it was moved
    out: str = "bench.json"
    prompts: str = ""  # a .jsonl of prompts; empty: the export's or the embedded set
    num_prompts: int = 48
    max_new_tokens: int = 128
    # 0, 0.7 and 1 are always measured
    temperatures: list[float] = field(default_factory=lambda: [0.0, 0.3, 0.7, 1.0])
    batch_sizes: list[int] = field(default_factory=lambda: [1])  # 1 is always measured
    repeats: int = 3
    dtype: str = "auto"  # auto: bfloat16 where the processor has it
    device: str = "auto"  # auto: a GPU if there is one; cpu, cuda, cuda:1, mps
    threads: int = 0  # 0: OMP_NUM_THREADS, the container's quota, the processors: the least
    seed: int = 0
    tree_nodes: list[int] = field(default_factory=list)  # other sizes beside the export's tree
    drafters: list[str] = field(default_factory=list)  # more of decode.drafter's names, a row each
    exports: list[str] = field(default_factory=list)  # more heads on checkpoint's own base model
    json: bool = False  # one JSON object on standard output, everything else on standard error
    steps: str = ""  # a .jsonl of raw records beside the figures: every verify step of every text
    markdown: str = ""  # all figures as a page of Markdown
    report: str = ""  # all figures and plots as one .html without outside parts; needs matplotlib
    card: bool = False  # write the figures into the model card of the export that was measured
    decode: DecodeConfig = field(default_factory=DecodeConfig)

    def __post_init__(self) -> None:
        check(self.num_prompts >= 1, "num_prompts", self.num_prompts, "at least 1")
        check(self.repeats >= 1, "repeats", self.repeats, "at least 1")
        self.dtype = dtype_name("dtype", self.dtype, "auto")
        check_device(self.device)
        for name, suffix in (("steps", ".jsonl"), ("markdown", ".md"), ("report", ".html")):
            given: str = getattr(self, name)
            check(not given or given.endswith(suffix), name, given, f"a file name with {suffix}")
        for temperature in self.temperatures:
            check(temperature >= 0, "temperatures", temperature, "at least 0")
        for size in self.batch_sizes:
            check(size >= 1, "batch_sizes", size, "at least 1")


@dataclass
class CompareConfig:
    """Everything ``python -m specheads.compare`` accepts."""

    model: str = ""  # the base model: a folder, a hub name, tinycode, or an export
    candidates: list[str] = field(default_factory=list)  # draft models: folders or hub names
    prompts: str = ""  # a .jsonl of prompts; empty: the embedded set
    num_prompts: int = 24  # to measure alpha and c on
    num_measured: int = 24  # others, to measure the speed-up on
    max_new_tokens: int = 128
    temperature: float = 1.0
    max_tokens: int = 8  # longest draft to consider
    repeats: int = 3
    dtype: str = "auto"
    device: str = "auto"  # auto: a GPU if there is one; cpu, cuda, cuda:1, mps
    threads: int = 0  # 0: OMP_NUM_THREADS, the container's quota, the processors: the least
    seed: int = 0
    out: str = "compare.json"
    json: bool = False  # one JSON object on standard output, everything else on standard error
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check(self.num_prompts >= 1, "num_prompts", self.num_prompts, "at least 1")
        check(self.num_measured >= 1, "num_measured", self.num_measured, "at least 1")
        check(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1")
        check(self.temperature >= 0, "temperature", self.temperature, "at least 0")
        check(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        check(self.repeats >= 1, "repeats", self.repeats, "at least 1")
        self.dtype = dtype_name("dtype", self.dtype, "auto")
        check_device(self.device)


@dataclass
class TreeSearchConfig:
    """Everything ``python -m specheads.tree_search`` accepts."""

    checkpoint: str = MISSING
    prompts: str = ""  # to calibrate on; empty: the export's calibration.jsonl, or the embedded one
    num_prompts: int = 60
    measured_prompts: str = ""  # to check the expectation on; empty: the rest of prompts, or the
    num_measured: int = 120  # export's prompts.jsonl, or the embedded one. 0: no check
    max_new_tokens: int = 96
    num_nodes: int = 0  # root included; 0: the fastest size
    max_nodes: int = 48
    temperature: float = 0.0  # T=1 is always looked at as well
    batch_size: int = 1  # rows of the clocked steps
    repeats: int = 5  # of the clocking
    dtype: str = "auto"
    device: str = "auto"  # auto: a GPU if there is one; cpu, cuda, cuda:1, mps
    threads: int = 0  # 0: OMP_NUM_THREADS, the container's quota, the processors: the least
    seed: int = 0
    out: str = ""  # the tree's picture; empty: tree.svg in the export
    json: bool = False  # one JSON object on standard output, everything else on standard error

    def __post_init__(self) -> None:
        check(self.num_prompts >= 1, "num_prompts", self.num_prompts, "at least 1")
        check(self.num_measured >= 0, "num_measured", self.num_measured, "at least 0")
        check(
            self.num_nodes >= 0 and self.num_nodes != 1, "num_nodes", self.num_nodes, "0 or above 1"
        )
        check(self.max_nodes >= 2, "max_nodes", self.max_nodes, "at least 2")
        check(self.temperature >= 0, "temperature", self.temperature, "at least 0")
        check(self.batch_size >= 1, "batch_size", self.batch_size, "at least 1")
        check(self.repeats >= 1, "repeats", self.repeats, "at least 1")
        self.dtype = dtype_name("dtype", self.dtype, "auto")
        check_device(self.device)


@dataclass
class DoctorConfig:
    """Everything ``python -m specheads.doctor`` accepts."""

    # a folder, a name on the hub, or tinycode; empty: what of the installation is missing
    model: str = ""
    revision: str | None = None
    dtype: str = "auto"  # auto: bfloat16 where the processor has it; float32 finds the most
    device: str = "auto"  # auto: a GPU if there is one; cpu, cuda, cuda:1, mps
    device_map: str = ""  # in place of device, spread the model: auto, balanced, sequential
    attn: str = "auto"  # auto: sdpa where the model has it
    trust_remote_code: bool = False
    json: bool = False  # one JSON object on standard output, everything else on standard error

    def __post_init__(self) -> None:
        self.dtype = dtype_name("dtype", self.dtype, "auto")
        check_devices(self.device, self.device_map)


@dataclass
class ExportConfig:
    """Everything ``python -m specheads.export`` accepts."""

    checkpoint: str = MISSING
    output: str = MISSING  # a new folder
    format: str = "native"  # one of FORMATS in specheads/formats/write.py, see docs/formats.md
    lm_head: str = "keep"  # keep; low_rank: by SVD of the trained heads; pruned: fewer tokens
    rank: int = 64  # low_rank
    num_kept: int = 32_000  # pruned: tokens that stay, the most frequent in counted
    counted: str = ""  # pruned: a .jsonl of records whose answers' tokens are counted
    merge: bool = False  # merge a separate adapter into the base model
    dtype: str | None = None  # of the written tensors; None keeps them
    device: str = "auto"  # of the SVD: auto, a GPU if there is one; cpu, cuda, cuda:1, mps
    base: str = ""  # of a foreign checkpoint, which is brought into native: the model it is for
    allow_pickle: bool = False  # read a foreign checkpoint's .pt too: tensors alone, no code is run
    push: str = ""  # organisation/name: upload the written folder to that repository of the hub
    private: bool = False  # push: the repository, if it is made
    json: bool = False  # one JSON object on standard output, everything else on standard error

    def __post_init__(self) -> None:
        self.format = self.format.replace("-", "_")
        if self.format != "native":
            expected = f"keep with format={self.format}"
            check(self.lm_head == "keep", "lm_head", self.lm_head, expected)
        one_of("lm_head", self.lm_head, "keep", "low_rank", "pruned")
        check_device(self.device)
        check(self.rank >= 1, "rank", self.rank, "at least 1")
        check(self.num_kept >= 1, "num_kept", self.num_kept, "at least 1")
        if self.dtype is not None:
            self.dtype = dtype_name("dtype", self.dtype)


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
