"""Every setting of specheads, typed, with its default and its range; Hydra composes, this checks.

Only entry points see a ``DictConfig``. Everything below them takes these dataclasses. Importing
this module must stay cheap: no torch, no transformers (``--help`` answers at once), and no Hydra:
the library imports it for its errors, and runs where Hydra is not installed.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from omegaconf import DictConfig

T = TypeVar("T")
MISSING: Any = "???"  # OmegaConf's word for a value that has to be given


class ConfigError(ValueError):
    """A mistake in the user's settings or files; entry points print it as one line, exit code 2."""


class RunError(RuntimeError):
    """A run that cannot go on (NaN loss, full disk); one line at the entry point, exit code 1."""


class InterruptedRunError(RuntimeError):
    """A run that was asked to stop and saved its state; one line, exit code 75."""


def _check(ok: bool, key: str, value: object, expected: str) -> None:
    if not ok:
        raise ConfigError(f"{key} must be {expected}, got {value!r}")


def _one_of(key: str, value: str, *options: str) -> None:
    _check(value in options, key, value, "one of " + ", ".join(options))


@dataclass
class ModelConfig:
    """Which base model, and how it is loaded."""

    name: str = "tinycode"  # "tinycode" (embedded), a folder, or a hub name
    revision: str | None = None
    dtype: str = "float32"  # of the weights while training: float32, bfloat16, float16
    attn: str = "sdpa"  # sdpa, eager, flex_attention; flash_attention_2 for training only
    trust_remote_code: bool = False
    # pretrain only: a transformers config to build from scratch (model_type and sizes)
    init: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _one_of("model.dtype", self.dtype, "float32", "bfloat16", "float16")
        _one_of("model.attn", self.attn, "sdpa", "eager", "flex_attention", "flash_attention_2")


@dataclass
class DataConfig:
    """Which records, and how they become fixed-length rows."""

    source: str = "pycode"  # pycode (from the Python source on this machine) or jsonl
    path: str | None = None  # jsonl: the training file
    eval_path: str | None = None  # jsonl: held-out file; None holds out eval_fraction of path
    eval_fraction: float = 0.05
    kinds: list[str] = field(default_factory=list)  # pycode: kinds of pairs; empty means all
    documents: float = 0.0  # pycode: share of tokens that come from whole documents
    packages: list[str] = field(default_factory=list)  # pycode: empty means the default list
    max_records: int = 0  # 0: all
    seq_len: int = 512  # tokens per packed row
    # pretrain: shorter rows first, e.g. [[512, 0.7], [1024, 0.9]]: 512 for 70% of the steps
    growth: list[Any] = field(default_factory=list)
    rows: int = 16  # rows per micro-batch and rank

    def __post_init__(self) -> None:
        _one_of("data.source", self.source, "pycode", "jsonl")
        _check(0 < self.eval_fraction < 1, "data.eval_fraction", self.eval_fraction, "in (0, 1)")
        _check(0 <= self.documents <= 1, "data.documents", self.documents, "in [0, 1]")
        _check(self.seq_len >= 2, "data.seq_len", self.seq_len, "at least 2")
        _check(self.rows >= 1, "data.rows", self.rows, "at least 1")
        stages = [*self.growth, [self.seq_len, 1.0]]
        _check(
            all(len(stage) == 2 for stage in stages)
            and all(a[0] < b[0] and 0 < a[1] < b[1] for a, b in pairwise(stages))
            and all(self.seq_len % stage[0] == 0 for stage in stages),
            "data.growth",
            self.growth,
            f"[divisor of seq_len={self.seq_len}, share of the steps until then], both rising",
        )
        _check(self.source != "jsonl" or bool(self.path), "data.path", self.path, "a .jsonl file")


@dataclass
class HeadsConfig:
    """Medusa heads (arXiv:2401.10774, section 2.1): K stacks of residual blocks."""

    num_heads: int = 4
    num_layers: int = 1  # residual blocks per head; 0 leaves only the output matrix
    lm_head: str = "own"  # own (copy of the base's output matrix) or shared

    def __post_init__(self) -> None:
        _check(self.num_heads >= 1, "heads.num_heads", self.num_heads, "at least 1")
        _check(self.num_layers >= 0, "heads.num_layers", self.num_layers, "at least 0")
        _one_of("heads.lm_head", self.lm_head, "own", "shared")
        _check(
            self.num_layers > 0 or self.lm_head == "own",
            "heads.num_layers",
            self.num_layers,
            "at least 1 with heads.lm_head=shared (nothing would be trained)",
        )


@dataclass
class LossConfig:
    """L = L_LM + lambda_0 * sum_i decay^(i+1) * L_i; each L_i a mean over its own labels."""

    decay: float = 0.8
    lambda_0: float = 0.2  # weight of the heads' loss beside L_LM (medusa2); medusa1 uses 1
    lambda_schedule: str = "constant"  # constant, or sine: lambda_0 * sin(pi/2 * step/steps)
    chunk_size: int = 0  # tokens whose logits exist at one time; 0: by the vocabulary
    implementation: str = "fused"  # fused (ours), torch, liger, naive

    def __post_init__(self) -> None:
        _check(0 < self.decay <= 1, "loss.decay", self.decay, "in (0, 1]")
        _check(self.lambda_0 >= 0, "loss.lambda_0", self.lambda_0, "at least 0")
        _one_of("loss.lambda_schedule", self.lambda_schedule, "constant", "sine")
        _check(self.chunk_size >= 0, "loss.chunk_size", self.chunk_size, "at least 0")
        _one_of("loss.implementation", self.implementation, "fused", "torch", "liger", "naive")


@dataclass
class OptimConfig:
    """Optimizer and learning-rate schedule; one learning rate for heads, one for the base."""

    name: str = "adamw"  # adamw, or muon (hidden matrices by Muon, the rest by AdamW)
    lr: float = 1e-3  # heads, weights and biases alike
    base_lr: float = 2.5e-4  # base model, where it is trained
    muon_ratio: float = 6.7  # Muon's learning rate relative to AdamW's
    weight_decay: float = 0.0  # with muon: of the hidden matrices only
    beta1: float = 0.9
    beta2: float = 0.95
    warmup_steps: int = 20
    schedule: str = "cosine"  # cosine, constant, or wsd (constant, then linear to zero)
    decay_fraction: float = 0.3  # wsd: the last part of the run that decays
    grad_clip: float = 1.0
    accumulation: int = 1  # micro-batches per optimizer step

    def __post_init__(self) -> None:
        _one_of("optim.name", self.name, "adamw", "muon")
        _check(self.lr > 0, "optim.lr", self.lr, "positive")
        _check(self.base_lr > 0, "optim.base_lr", self.base_lr, "positive")
        _check(self.muon_ratio > 0, "optim.muon_ratio", self.muon_ratio, "positive")
        _check(self.warmup_steps >= 0, "optim.warmup_steps", self.warmup_steps, "at least 0")
        _one_of("optim.schedule", self.schedule, "cosine", "constant", "wsd")
        _check(
            0 <= self.decay_fraction <= 1, "optim.decay_fraction", self.decay_fraction, "in [0, 1]"
        )
        _check(self.grad_clip > 0, "optim.grad_clip", self.grad_clip, "positive")
        _check(self.accumulation >= 1, "optim.accumulation", self.accumulation, "at least 1")


@dataclass
class TreeConfig:
    """The tree used to decode: given choices, or grown from measured hit rates."""

    num_nodes: int = 0  # root included; 0: the fastest size that was measured
    choices: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        _check(self.num_nodes >= 0, "tree.num_nodes", self.num_nodes, "at least 0")


@dataclass
class EvaluateConfig:
    """Held-out decoding and held-out loss, during and after training."""

    every: int = 0  # optimizer steps; 0: only at the end
    num_prompts: int = 16
    max_new_tokens: int = 96
    loss_rows: int = 32  # packed held-out rows for the loss and the KL

    def __post_init__(self) -> None:
        _check(self.every >= 0, "evaluate.every", self.every, "at least 0")
        _check(self.num_prompts >= 1, "evaluate.num_prompts", self.num_prompts, "at least 1")


@dataclass
class LogConfig:
    """Console line, metrics.jsonl and Weights & Biases."""

    every: int = 10
    wandb: str = "auto"  # auto (online with a key, else offline), online, offline, disabled
    project: str = "specheads"

    def __post_init__(self) -> None:
        _check(self.every >= 1, "log.every", self.every, "at least 1")
        _one_of("log.wandb", self.wandb, "auto", "online", "offline", "disabled")


@dataclass
class CheckpointConfig:
    """Resumable state under checkpoints/step-*/."""

    every: int = 0  # optimizer steps; 0: only when the run stops
    keep: int = 2

    def __post_init__(self) -> None:
        _check(self.every >= 0, "checkpoint.every", self.every, "at least 0")
        _check(self.keep >= 1, "checkpoint.keep", self.keep, "at least 1")


@dataclass
class TrainConfig:
    """Everything ``python -m specheads.train`` accepts."""

    recipe: str = ""  # a file in recipes/, or a path to your own .py with run(cfg)
    name: str = "run"
    run_dir: str = MISSING
    seed: int = 0
    steps: int = 300  # optimizer steps of the whole recipe
    max_steps: int = 0  # stop after this many steps, resumably; 0: run all
    warmup_heads: float = 0.2  # medusa2: share of the steps that train the heads alone
    autocast: str = "none"  # none, bfloat16 (fp32 weights, bf16 matrix products)
    resume: str = ""  # "auto": newest checkpoint of this run; or the path of one
    dry_run: bool = False  # check everything, print the plan, train nothing
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    heads: HeadsConfig = field(default_factory=HeadsConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    tree: TreeConfig = field(default_factory=TreeConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    deepspeed: dict[str, Any] = field(default_factory=dict)  # {} is plain torch

    def __post_init__(self) -> None:
        _check(self.steps >= 1, "steps", self.steps, "at least 1")
        _check(self.max_steps >= 0, "max_steps", self.max_steps, "at least 0")
        _check(0 <= self.warmup_heads < 1, "warmup_heads", self.warmup_heads, "in [0, 1)")
        _one_of("autocast", self.autocast, "none", "bfloat16")


@dataclass
class DecodeConfig:
    """How the heads of an export are decoded with."""

    tree: str = "static"  # static: the export's; dynamic: grown at each step
    num_nodes: int = 0  # of a dynamic tree, root included; 0: what tree_search found
    compile: bool = False  # torch.compile the base's passes, CUDA graphs on a GPU; slow to start
    acceptance: str = "exact"  # exact; lossy_typical, lossy_lenient: NOT the base's distribution
    epsilon: float = 0.09  # of lossy_typical, larger is stricter
    delta: float = 0.3  # of lossy_typical, larger is stricter
    lenience: float = 0.5  # of lossy_lenient, 1 is exact

    def __post_init__(self) -> None:
        _one_of("decode.tree", self.tree, "static", "dynamic")
        _check(
            self.num_nodes == 0 or self.num_nodes >= 2,
            "decode.num_nodes",
            self.num_nodes,
            "0 or above 1",
        )
        _one_of("decode.acceptance", self.acceptance, "exact", "lossy_typical", "lossy_lenient")
        _check(self.epsilon >= 0, "decode.epsilon", self.epsilon, "at least 0")
        _check(self.delta >= 0, "decode.delta", self.delta, "at least 0")
        _check(0 < self.lenience <= 1, "decode.lenience", self.lenience, "in (0, 1]")


@dataclass
class GenerateConfig:
    """Everything ``python -m specheads.generate`` accepts."""

    checkpoint: str = MISSING
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
    color: str = "auto"  # auto, always, never: one colour per verify step
    plain: bool = False  # one token at a time, for comparison
    decode: DecodeConfig = field(default_factory=DecodeConfig)

    def __post_init__(self) -> None:
        _check(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1")
        _check(self.temperature >= 0, "temperature", self.temperature, "at least 0")
        _check(self.top_k >= 0, "top_k", self.top_k, "at least 0")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        penalty, ngram = self.repetition_penalty, self.no_repeat_ngram_size
        _check(penalty > 0, "repetition_penalty", penalty, "more than 0")
        _check(ngram >= 0, "no_repeat_ngram_size", ngram, "at least 0")
        _check(self.batch_size >= 1, "batch_size", self.batch_size, "at least 1")
        _check(not (self.prompt and self.prompts), "prompts", self.prompts, "left out with prompt")
        _check(all(self.stop), "stop", self.stop, "strings that are not empty")
        _one_of("dtype", self.dtype, "float32", "bfloat16", "float16")
        _one_of("color", self.color, "auto", "always", "never")


@dataclass
class BenchConfig:
    """Everything ``python -m specheads.bench`` accepts."""

    checkpoint: str = MISSING
    base: str = ""  # where the export's base model is now, if it was moved
    out: str = "bench.json"
    prompts: str = ""  # a .jsonl of prompts; empty: the export's or the embedded set
    num_prompts: int = 48
    max_new_tokens: int = 128
    temperatures: list[float] = field(default_factory=lambda: [0.0, 0.7, 1.0])
    batch_sizes: list[int] = field(default_factory=lambda: [1])  # 1 is always measured
    repeats: int = 3
    dtype: str = "auto"  # auto: bfloat16 where the processor has it
    threads: int = 0  # 0: all
    seed: int = 0
    tree_nodes: list[int] = field(default_factory=list)  # other sizes beside the export's tree
    decode: DecodeConfig = field(default_factory=DecodeConfig)

    def __post_init__(self) -> None:
        _check(self.num_prompts >= 1, "num_prompts", self.num_prompts, "at least 1")
        _check(self.repeats >= 1, "repeats", self.repeats, "at least 1")
        _one_of("dtype", self.dtype, "auto", "float32", "bfloat16", "float16")
        for temperature in self.temperatures:
            _check(temperature >= 0, "temperatures", temperature, "at least 0")
        for size in self.batch_sizes:
            _check(size >= 1, "batch_sizes", size, "at least 1")


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
    threads: int = 0
    seed: int = 0
    out: str = ""  # the tree's picture; empty: tree.svg in the export

    def __post_init__(self) -> None:
        _check(self.num_prompts >= 1, "num_prompts", self.num_prompts, "at least 1")
        _check(self.num_measured >= 0, "num_measured", self.num_measured, "at least 0")
        _check(
            self.num_nodes >= 0 and self.num_nodes != 1, "num_nodes", self.num_nodes, "0 or above 1"
        )
        _check(self.max_nodes >= 2, "max_nodes", self.max_nodes, "at least 2")
        _check(self.temperature >= 0, "temperature", self.temperature, "at least 0")
        _check(self.batch_size >= 1, "batch_size", self.batch_size, "at least 1")
        _check(self.repeats >= 1, "repeats", self.repeats, "at least 1")
        _one_of("dtype", self.dtype, "auto", "float32", "bfloat16", "float16")


@dataclass
class DoctorConfig:
    """Everything ``python -m specheads.doctor`` accepts."""

    model: str = ""  # a folder, a name on the hub, or tinycode
    revision: str | None = None
    dtype: str = "auto"  # auto: bfloat16 where the processor has it; float32 finds the most
    device: str = ""  # empty: a GPU if there is one
    device_map: str = ""  # in place of device: auto, balanced, sequential
    attn: str = "auto"  # auto: sdpa where the model has it
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, "auto", "float32", "bfloat16", "float16")
        _check(
            self.device_map in ("", "auto", "balanced", "balanced_low_0", "sequential"),
            "device_map",
            self.device_map,
            "auto, balanced, balanced_low_0 or sequential",
        )


def explain(error: Exception) -> str:
    """Return one line that says what is wrong, for an error of Hydra or OmegaConf."""
    from omegaconf.errors import OmegaConfBaseException

    text = str(error)
    if isinstance(error.__cause__, OmegaConfBaseException):
        text += "\n" + str(error.__cause__)
    full_key = re.search(r"full_key: (\S+)", text)
    unknown = re.search(r"Key '(\w+)' (?:is )?not in '(\w+)'", text)
    if unknown:  # Hydra's own advice is "+key=value", which to_config refuses
        key, owner = unknown.groups()
        schema = globals().get(owner)
        names = [f.name for f in fields(schema)] if is_dataclass(schema) else []
        path = full_key.group(1) if full_key else key
        close = difflib.get_close_matches(key, names, n=1)
        prefix = path.removesuffix(key)
        return f"unknown key {path}" + (f"; did you mean {prefix}{close[0]}?" if close else "")
    lines = [line.strip() for line in text.splitlines()]
    if "Config search path:" in lines:
        lines = lines[: lines.index("Config search path:")]
    lines = [line for line in lines if line and not line.startswith(("full_key", "object_type"))]
    listing = [i for i, line in enumerate(lines) if line.startswith("Available options")]
    if listing:  # one option per line after it
        start = listing[0]
        lines = [*lines[:start], lines[start] + " " + ", ".join(lines[start + 1 :])]
    shown = list(dict.fromkeys(lines[:3]))
    if full_key and full_key.group(1) not in " ".join(shown):
        shown.insert(0, full_key.group(1))
    return ": ".join(line.rstrip(":.") for line in shown)


def to_config(cfg: DictConfig, schema: type[T]) -> T:
    """Turn Hydra's composed ``cfg`` into a checked instance of the dataclass ``schema``.

    Raises:
        ConfigError: if a value is missing, mistyped, out of range, or unknown.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if missing := sorted(OmegaConf.missing_keys(cfg)):
        raise ConfigError(f"no value given for {', '.join(missing)}")
    try:  # merging again refuses keys that `+typo=1` slipped past Hydra
        values = OmegaConf.to_container(cfg, resolve=True)
        checked = OmegaConf.to_object(OmegaConf.merge(schema, values))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from None
    assert isinstance(checked, schema)
    return checked


def register_schemas() -> None:
    """Make the dataclasses known to Hydra under the names that conf/*.yaml list first."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(name="train_schema", node=TrainConfig)
    store.store(name="generate_schema", node=GenerateConfig)
    store.store(name="bench_schema", node=BenchConfig)
    store.store(name="tree_search_schema", node=TreeSearchConfig)
    store.store(name="doctor_schema", node=DoctorConfig)
