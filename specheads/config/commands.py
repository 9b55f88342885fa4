"""The settings of every command but ``train``: what each accepts, its default and its range."""

from __future__ import annotations

from dataclasses import dataclass, field

from specheads.config.data import DataConfig
from specheads.config.declared import Section, Settings, at_least, one_of, positive, within
from specheads.config.training import TrainConfig
from specheads.system import errors
from specheads.system.errors import DEVICE_MAPS, MISSING, check_device, dtype_name

# what proposes, and what it needs: heads (of an export), draft (a draft model), or nothing
DRAFTERS = {
    "heads": "heads",
    "draft": "draft",  # a chain
    "draft_tree": "draft",
    "draft_heads": "draft",  # a draft model with heads of its own
    "lookup": "",  # n-grams of the text
    "suffix": "",  # the text's longest repeat
    "lookahead": "",
}


@dataclass
class DecodeConfig(Section):
    """How guesses are made, and accepted."""

    # one of DRAFTERS, or several as heads+suffix; auto: the draft model if one is given, else heads
    # if there are, else suffix
    drafter: str = "auto"
    draft: str = ""  # draft...: folder or hub name of the draft model; or an export of its heads
    # draft: tokens per step; 0: as many as pay, adapted while decoding
    draft_tokens: int = at_least(0, 0)
    draft_sampling: str = one_of("greedy", "sampled", "coupled")  # see drafters/draft_model.py
    window: int = at_least(2, 7)  # lookahead: W
    ngram: int = at_least(2, 4)  # lookahead: N
    guesses: int = at_least(1, 7)  # lookahead: G
    # static: the export's; dynamic: grown at each step; auto: what tree_search found faster
    tree: str = one_of("auto", "static", "dynamic")
    # of a tree that is grown at each step or merged, root included; 0: what tree_search found, all
    num_nodes: int = 0
    compile: bool = False  # torch.compile the base's passes, CUDA graphs on a GPU; slow to start
    # in 16 bits on a CPU: a row's bits are the same whatever else is in a pass, so that texts are
    # plain decoding's; slower
    invariant: bool = False
    # lossy ones: NOT the base's distribution
    acceptance: str = one_of("exact", "lossy_kl", "lossy_tv", "lossy_typical", "lossy_lenient")
    # of lossy_kl in nats, of lossy_tv a probability: how far a token's distribution may be off
    bound: float = at_least(0, 0.0)
    epsilon: float = at_least(0, 0.09)  # of lossy_typical, larger is stricter
    delta: float = at_least(0, 0.3)  # of lossy_typical, larger is stricter
    lenience: float = within("(0, 1]", 0.5)  # of lossy_lenient, 1 is exact

    def _check_together(self) -> None:
        names = [] if self.drafter == "auto" else self.drafter.split("+")
        for name in names:
            errors.one_of("decode.drafter", name, "auto", *DRAFTERS)
        self.check(len(set(names)) == len(names), "drafter", "without repetition")
        there = self.draft or all(DRAFTERS[name] != "draft" for name in names)
        self.check(there, "draft", f"a draft model with decode.drafter={self.drafter}")
        self.check(self.num_nodes == 0 or self.num_nodes >= 2, "num_nodes", "0 or above 1")


@dataclass
class CheckpointSettings:
    """Which model a command decodes with."""

    # an export (smollm2: the shipped one), or a base model: a folder, a .gguf, a hub name, tinycode
    checkpoint: str = MISSING
    base: str | None = ""  # where the export's base model is now, if it was moved
    other_base: bool = False  # take a base with other weights: exact, but fewer guesses may fit


@dataclass
class DecodeSettings(CheckpointSettings):
    """The same, where it is said how."""

    decode: DecodeConfig = field(default_factory=DecodeConfig)


@dataclass
class JsonSettings(Settings):
    """What a command is called with whose answer a program reads."""

    json: bool = False  # one JSON object on standard output, everything else on standard error


@dataclass
class LoadSettings(Settings):
    """How weights are loaded, and where to."""

    dtype: str = "auto"  # auto: bfloat16 where the processor has it
    device: str = "auto"  # auto: a GPU if there is one; cpu, cuda, cuda:1, mps

    def _check_together(self) -> None:
        self.dtype = dtype_name("dtype", self.dtype, "auto")
        check_device(self.device)


@dataclass
class SpreadSettings(LoadSettings):
    """The same, where one model may lie on several devices."""

    device_map: str = ""  # in place of device, spread the model: auto, balanced, sequential

    def _check_together(self) -> None:
        expected = f"empty or one of {', '.join(DEVICE_MAPS)} (device= puts it on one device)"
        self.check(self.device_map in ("", *DEVICE_MAPS), "device_map", expected)
        alone = not self.device_map or self.device == "auto"
        self.check(alone, "device", f"auto with device_map={self.device_map}")


@dataclass
class TextSettings(SpreadSettings, DecodeSettings):
    """How ``generate`` and ``chat`` choose tokens and show them."""

    max_new_tokens: int = at_least(1, 128)
    temperature: float = at_least(0, 0.0)
    top_k: int = at_least(0, 0)
    top_p: float = within("(0, 1]", 1.0)
    min_p: float = within("[0, 1]", 0.0)
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = at_least(0, 0)
    seed: int = 0
    dtype: str = "float32"
    color: str = one_of("auto", "always", "never")  # one per verify step; auto heeds NO_COLOR

    def _check_together(self) -> None:
        self.check(self.repetition_penalty > 0, "repetition_penalty", "more than 0")


@dataclass
class MeasureSettings(LoadSettings, JsonSettings):
    """What the commands share that decode many texts and write figures or records."""

    threads: int = 0  # 0: OMP_NUM_THREADS, the container's quota, the processors: the least
    seed: int = 0
    max_new_tokens: int = at_least(1, 128)


@dataclass
class GenerateConfig(TextSettings, JsonSettings):
    """Everything ``python -m specheads.generate`` accepts."""

    # seed is that of the first prompt; the next has the next
    prompt: str = ""  # empty: read standard input
    prompts: str = ""  # a .jsonl of texts or chats instead, decoded in batches; writes JSON lines
    batch_size: int = at_least(1, 8)
    raw: bool = False  # continue the prompt as text instead of applying the chat template
    stop: list[str] = field(default_factory=list)  # stop="..." as often as there are strings
    plain: bool = False  # one token at a time, for comparison

    def _check_together(self) -> None:
        self.check(not (self.prompt and self.prompts), "prompts", "left out with prompt")
        self.check(all(self.stop), "stop", "strings that are not empty")


@dataclass
class ChatConfig(TextSettings):
    """Everything ``python -m specheads.chat`` accepts."""

    # max_new_tokens is the limit of one answer, seed that of every turn
    max_new_tokens: int = at_least(1, 512)
    system: str = ""  # the first message, where the chat template has a place for it
    template: str = ""  # a .jinja file in place of the tokenizer's own chat template
    beside: bool = False  # decode every turn plainly as well, and compare


@dataclass
class ServeConfig(SpreadSettings, DecodeSettings):
    """Everything ``python -m specheads.serve`` accepts; the API key is ``SPECHEADS_API_KEY``."""

    host: str = "127.0.0.1"  # 0.0.0.0 or ::: every address of this machine
    port: int = within("[0, 65535]", 8000)  # 0: a free one
    name: str = ""  # of the model, for clients; empty: the last part of checkpoint
    drafters: list[str] = field(default_factory=list)  # more of decode.drafter's names, to choose
    batch_size: int = at_least(1, 8)  # prompts that are decoded together
    queue: int = at_least(0, 64)  # prompts that may wait; further ones are answered 429
    max_new_tokens: int = at_least(1, 4096)  # of one answer, whatever is asked for
    piece: int = at_least(16, 256)  # tokens of a prompt that are read between two steps
    prefix_tokens: int = at_least(0, 8192)  # of earlier texts that are not read again; 0: none
    deadline: float = positive(600.0)  # seconds that an answer may take, waiting included
    grace: float = at_least(0, 30.0)  # seconds for what is being answered when a signal comes
    max_body: int = at_least(1, 1 << 20)  # bytes of a request
    body_seconds: float = positive(30.0)  # that it may take to arrive, and a connection be idle


@dataclass
class BenchConfig(MeasureSettings, DecodeSettings):
    """Everything ``python -m specheads.bench`` accepts."""

    out: str = "bench.json"
    prompts: str = ""  # a .jsonl of prompts; empty: the export's or the embedded set
    num_prompts: int = at_least(1, 48)
    # 0, 0.7 and 1 are always measured
    temperatures: list[float] = at_least(0, [0.0, 0.3, 0.7, 1.0])
    batch_sizes: list[int] = at_least(1, [1])  # 1 is always measured
    repeats: int = at_least(1, 3)
    tree_nodes: list[int] = field(default_factory=list)  # other sizes beside the export's tree
    drafters: list[str] = field(default_factory=list)  # more of decode.drafter's names, a row each
    exports: list[str] = field(default_factory=list)  # more heads on checkpoint's own base model
    steps: str = ""  # a .jsonl of raw records beside the figures: every verify step of every text
    report: str = ""  # all figures and plots as one .html without outside parts; needs matplotlib
    card: bool = False  # write the figures into the model card of the export that was measured

    def _check_together(self) -> None:
        for name, suffix in (("steps", ".jsonl"), ("report", ".html")):
            given: str = getattr(self, name)
            self.check(not given or given.endswith(suffix), name, f"a file name with {suffix}")


@dataclass
class CompareConfig(MeasureSettings):
    """Everything ``python -m specheads.compare`` accepts."""

    model: str = ""  # the base model: a folder, a hub name, tinycode, or an export
    candidates: list[str] = field(default_factory=list)  # draft models: folders or hub names
    prompts: str = ""  # a .jsonl of prompts; empty: the embedded set
    num_prompts: int = at_least(1, 24)  # to measure alpha and c on
    num_measured: int = at_least(1, 24)  # others, to measure the speed-up on
    temperature: float = at_least(0, 1.0)
    max_tokens: int = at_least(1, 8)  # longest draft to consider
    repeats: int = at_least(1, 3)
    out: str = "compare.json"
    trust_remote_code: bool = False


@dataclass
class TreeSearchConfig(MeasureSettings, CheckpointSettings):
    """Everything ``python -m specheads.tree_search`` accepts; its checkpoint is an export."""

    prompts: str = ""  # to calibrate on; empty: the export's calibration.jsonl, or the embedded one
    num_prompts: int = at_least(1, 60)
    # to check the expectation on: the rest of prompts, or of the export's prompts.jsonl, or of the
    num_measured: int = at_least(0, 120)  # embedded one. 0: no check
    max_new_tokens: int = at_least(1, 96)
    num_nodes: int = 0  # root included; 0: the fastest size
    max_nodes: int = at_least(2, 48)
    temperature: float = at_least(0, 0.0)  # T=1 is always looked at as well
    batch_size: int = at_least(1, 1)  # rows of the clocked steps
    repeats: int = at_least(1, 5)  # of the clocking
    out: str = ""  # the tree's picture; empty: tree.svg in the export

    def _check_together(self) -> None:
        self.check(self.num_nodes == 0 or self.num_nodes >= 2, "num_nodes", "0 or above 1")


@dataclass
class SpecBenchConfig(MeasureSettings, DecodeSettings):
    """Everything ``python -m specheads.spec_bench`` accepts."""

    # a suite's file, which you bring: question.jsonl of Spec-Bench, SPEED-Bench, plain prompts
    questions: str = MISSING
    answers: str = "model_answer"  # folder of the answer files; finished questions are kept
    name: str = ""  # model_id and name of the answer file; empty: after checkpoint and drafter
    out: str = "spec_bench.json"
    # of the conversation: auto (chat if the tokenizer has a template, else none), chat, vicuna,
    # none, or the path of a file with a template
    template: str = "auto"
    begin: int = at_least(0, 0)  # leave out questions before this place in the file
    end: int = 0  # and from this place on; 0: none
    skip_long: bool = False  # leave out questions that do not fit the base model's context
    max_new_tokens: int = at_least(1, 1024)  # per turn
    temperature: float = at_least(0, 0.0)
    warmup: int = at_least(0, 3)  # times the first question is answered before the first is clocked
    plain: bool = True  # answer with plain decoding too, question by question in turn
    baseline: str = ""  # an answer file to compare with instead, of any program

    def _check_together(self) -> None:
        self.check(self.template, "template", "chat, vicuna, none or a file")
        self.check("/" not in self.name, "name", "a file name, without a slash")
        self.check(self.end == 0 or self.end > self.begin, "end", f"0 or above {self.begin}")


@dataclass
class QualityConfig(MeasureSettings, DecodeSettings):
    """Everything ``python -m specheads.quality`` accepts."""

    original: str = ""  # what to compare with; empty: the base that a tuned export came from
    data: str = ""  # a .jsonl of held-out records with answers; empty: the export's prompts.jsonl
    out: str = "quality.json"
    num_records: int = at_least(0, 0)  # to read with both models; 0: all
    num_prompts: int = at_least(0, 24)  # to continue freely
    temperature: float = at_least(0, 0.7)  # of the texts that a lossy rule is judged by
    dtype: str = "float32"  # rounding is a distance too; auto: bfloat16 where there is


@dataclass
class QuestionsConfig(Section):
    """With ``prompts=self``: how the base model asks questions."""

    temperature: float = at_least(0, 1.0)
    top_p: float = within("(0, 1]", 0.95)
    # of a user's turn; one that has not ended by then is left out
    max_new_tokens: int = at_least(1, 160)
    # of the user in a conversation; later ones answer what the base has said
    turns: int = at_least(1, 1)
    # names in conf/questions.json; empty: all of them, in the shares that it states
    kinds: list[str] = field(default_factory=list)


@dataclass
class RegenerateConfig(MeasureSettings):
    """Everything ``python -m specheads.regenerate`` accepts."""

    # the base model that answers; empty: the checkpoint's, or tinycode. With an endpoint: whose
    # tokenizer the stored token ids are of; empty stores none
    model: str = ""
    revision: str | None = None
    checkpoint: str = ""  # an export on that base: its heads make the answers come faster
    other_base: bool = False  # the export was made for other weights: exact, perhaps slower
    endpoint: str = ""  # an OpenAI-compatible server instead, e.g. http://localhost:8000/v1
    endpoint_model: str = ""  # the model's name there; empty: the first that the server lists
    # endpoint: how many of the likeliest tokens to store at every token of an answer, with their
    # log-probabilities, from which draft.stored distils; needs model
    logprobs: int = at_least(0, 0)
    concurrency: int = at_least(1, 32)  # endpoint: requests at one time
    retries: int = at_least(0, 4)  # endpoint: of a failed request, with growing pauses
    timeout: float = positive(300.0)  # endpoint: seconds without a byte until a request has failed
    # a .jsonl of records or of prompts, or a .txt with a prompt per line; self: questions that the
    # base writes itself; empty: the records that data says
    prompts: str = ""
    questions: QuestionsConfig = field(default_factory=QuestionsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    output: str = MISSING  # the .jsonl to write; one that is there is continued
    # records of the input; 0: all. With prompts=self: how many questions
    limit: int = at_least(0, 0)
    batch_size: int = at_least(1, 8)
    # of one answer; longer ones are quarantined as truncated
    max_new_tokens: int = at_least(1, 512)
    keep_truncated: bool = False  # keep answers that reached the limit, without their end
    temperature: float = at_least(0, 0.0)
    top_k: int = at_least(0, 0)
    top_p: float = within("(0, 1]", 1.0)
    trust_remote_code: bool = False

    def _check_together(self) -> None:
        self.check(not (self.endpoint and self.checkpoint), "endpoint", "left out with checkpoint")
        self.check(not self.logprobs or self.endpoint, "logprobs", "0 without endpoint=")
        if self.prompts == "self":
            self.check(self.limit > 0, "limit", "the number of questions with prompts=self")
            here = "left out with prompts=self: a server does not let its model write a user's turn"
            self.check(not self.endpoint, "endpoint", here)


@dataclass
class AutoConfig(LoadSettings, JsonSettings):
    """Everything ``python -m specheads.auto`` accepts."""

    model: str = ""  # any chat model: a folder, a .gguf, a name on the hub, smollm2, tinycode
    minutes: float = positive(60.0)  # for everything, from the questions to the figures
    name: str = ""  # of the folder below runs/; empty: auto-<model>
    # recipe on the frozen base; auto: what suits it
    kind: str = one_of("auto", "block", "hydra", "medusa1")
    prompts: str = ""  # prompts of your own beside the base's: .txt or .jsonl
    data: DataConfig | None = None  # the same, as any other command takes records
    endpoint: str = ""  # an OpenAI-compatible server that writes questions' answers instead
    endpoint_model: str = ""  # the model's name there; empty: the first that the server lists
    batch_size: int = at_least(1, 64)  # questions that are written and answered together
    threads: int = 0  # 0: OMP_NUM_THREADS, the container's quota, the processors: the least
    seed: int = 0
    trust_remote_code: bool = False

    def _check_together(self) -> None:
        self.check("/" not in self.name, "name", "a folder's name, without a slash")


@dataclass
class PreviewConfig(JsonSettings):
    """Everything ``python -m specheads.preview`` accepts."""

    model: str = "tinycode"  # whose tokenizer and chat template
    revision: str | None = None
    num_records: int = at_least(0, 5)  # shown, of each kind at least one
    color: str = one_of("auto", "always", "never")
    seed: int = 0
    trust_remote_code: bool = False
    data: DataConfig = field(default_factory=DataConfig)


@dataclass
class InitConfig:
    """Everything ``python -m specheads.init`` accepts."""

    model: str = "smollm2"  # the base: a folder, a .gguf, a name on the hub, a file of conf/model
    data: str = ""  # a file of records, or a name of conf/data; empty: the recipe's
    recipe: str = "hydra"
    name: str = ""  # of the run; empty: the file's
    output: str = "my.yaml"


@dataclass
class PlanConfig(TrainConfig, JsonSettings):
    """Everything ``python -m specheads.plan`` accepts: the settings of ``train``, and on what."""

    gpus: int = at_least(1, 8)
    memory: float = positive(80.0)  # GB (1e9 bytes) of each
    # operations per second that a GPU reaches in training, 400e12 say; 0: no time is predicted
    flops: float = at_least(0, 0.0)


@dataclass
class DoctorConfig(SpreadSettings, JsonSettings):
    """Everything ``python -m specheads.doctor`` accepts."""

    # a folder, a name on the hub, or tinycode; empty: what of the installation is missing
    model: str = ""
    revision: str | None = None
    attn: str = "auto"  # auto: sdpa where the model has it
    trust_remote_code: bool = False
    dist_timeout: float = at_least(1, 60.0)  # seconds that a rank of a launcher may take to answer


@dataclass
class ExportConfig(JsonSettings):
    """Everything ``python -m specheads.export`` accepts."""

    checkpoint: str = MISSING
    output: str = MISSING  # a new folder
    format: str = "native"  # one of FORMATS in specheads/formats/write.py, see docs/formats.md
    # dflash, dspark, eagle3; native: as their first code's
    layout: str = one_of("speculators", "native")
    # low_rank: by SVD of the trained heads; pruned: fewer tokens
    lm_head: str = one_of("keep", "low_rank", "pruned")
    rank: int = at_least(1, 64)  # low_rank
    # pruned: tokens that stay, the most frequent in counted
    num_kept: int = at_least(1, 32_000)
    counted: str = ""  # pruned: a .jsonl of records whose answers' tokens are counted
    merge: bool = False  # merge a separate adapter into the base model
    dtype: str | None = None  # of the written tensors; None keeps them
    device: str = "auto"  # of the SVD: auto, a GPU if there is one; cpu, cuda, cuda:1, mps
    base: str = ""  # of a foreign checkpoint, which is brought into native: the model it is for
    allow_pickle: bool = False  # read a foreign checkpoint's .pt too: tensors alone, no code is run
    push: str = ""  # organisation/name: upload the written folder to that repository of the hub
    private: bool = False  # push: the repository, if it is made

    def _check_together(self) -> None:
        self.format = self.format.replace("-", "_")
        if self.format != "native":
            self.check(self.lm_head == "keep", "lm_head", f"keep with format={self.format}")
        check_device(self.device)
        if self.dtype is not None:
            self.dtype = dtype_name("dtype", self.dtype)
