"""The settings of ``python -m specheads.train``."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from specheads.config.errors import MISSING, check, one_of


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
        one_of("model.dtype", self.dtype, "float32", "bfloat16", "float16")
        one_of("model.attn", self.attn, "sdpa", "eager", "flex_attention", "flash_attention_2")


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
        one_of("data.source", self.source, "pycode", "jsonl")
        check(0 < self.eval_fraction < 1, "data.eval_fraction", self.eval_fraction, "in (0, 1)")
        check(0 <= self.documents <= 1, "data.documents", self.documents, "in [0, 1]")
        check(self.seq_len >= 2, "data.seq_len", self.seq_len, "at least 2")
        check(self.rows >= 1, "data.rows", self.rows, "at least 1")
        stages = [*self.growth, [self.seq_len, 1.0]]
        check(
            all(len(stage) == 2 for stage in stages)
            and all(a[0] < b[0] and 0 < a[1] < b[1] for a, b in pairwise(stages))
            and all(self.seq_len % stage[0] == 0 for stage in stages),
            "data.growth",
            self.growth,
            f"[divisor of seq_len={self.seq_len}, share of the steps until then], both rising",
        )
        check(self.source != "jsonl" or bool(self.path), "data.path", self.path, "a .jsonl file")


@dataclass
class HeadsConfig:
    """Medusa heads (arXiv:2401.10774, section 2.1): K stacks of residual blocks."""

    num_heads: int = 4
    num_layers: int = 1  # residual blocks per head; 0 leaves only the output matrix
    lm_head: str = "own"  # own (copy of the base's output matrix) or shared

    def __post_init__(self) -> None:
        check(self.num_heads >= 1, "heads.num_heads", self.num_heads, "at least 1")
        check(self.num_layers >= 0, "heads.num_layers", self.num_layers, "at least 0")
        one_of("heads.lm_head", self.lm_head, "own", "shared")
        check(
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
        check(0 < self.decay <= 1, "loss.decay", self.decay, "in (0, 1]")
        check(self.lambda_0 >= 0, "loss.lambda_0", self.lambda_0, "at least 0")
        one_of("loss.lambda_schedule", self.lambda_schedule, "constant", "sine")
        check(self.chunk_size >= 0, "loss.chunk_size", self.chunk_size, "at least 0")
        one_of("loss.implementation", self.implementation, "fused", "torch", "liger", "naive")


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
        one_of("optim.name", self.name, "adamw", "muon")
        check(self.lr > 0, "optim.lr", self.lr, "positive")
        check(self.base_lr > 0, "optim.base_lr", self.base_lr, "positive")
        check(self.muon_ratio > 0, "optim.muon_ratio", self.muon_ratio, "positive")
        check(self.warmup_steps >= 0, "optim.warmup_steps", self.warmup_steps, "at least 0")
        one_of("optim.schedule", self.schedule, "cosine", "constant", "wsd")
        check(
            0 <= self.decay_fraction <= 1, "optim.decay_fraction", self.decay_fraction, "in [0, 1]"
        )
        check(self.grad_clip > 0, "optim.grad_clip", self.grad_clip, "positive")
        check(self.accumulation >= 1, "optim.accumulation", self.accumulation, "at least 1")


@dataclass
class TreeConfig:
    """The tree used to decode: given choices, or grown from measured hit rates."""

    num_nodes: int = 0  # root included; 0: the fastest size that was measured
    choices: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        check(self.num_nodes >= 0, "tree.num_nodes", self.num_nodes, "at least 0")


@dataclass
class EvaluateConfig:
    """Held-out decoding and held-out loss, during and after training."""

    every: int = 0  # optimizer steps; 0: only at the end
    num_prompts: int = 16
    max_new_tokens: int = 96
    loss_rows: int = 32  # packed held-out rows for the loss and the KL

    def __post_init__(self) -> None:
        check(self.every >= 0, "evaluate.every", self.every, "at least 0")
        check(self.num_prompts >= 1, "evaluate.num_prompts", self.num_prompts, "at least 1")


@dataclass
class LogConfig:
    """Console line, metrics.jsonl and Weights & Biases."""

    every: int = 10
    wandb: str = "auto"  # auto (online with a key, else offline), online, offline, disabled
    project: str = "specheads"

    def __post_init__(self) -> None:
        check(self.every >= 1, "log.every", self.every, "at least 1")
        one_of("log.wandb", self.wandb, "auto", "online", "offline", "disabled")


@dataclass
class CheckpointConfig:
    """Resumable state under checkpoints/step-*/."""

    every: int = 0  # optimizer steps; 0: only when the run stops
    keep: int = 2

    def __post_init__(self) -> None:
        check(self.every >= 0, "checkpoint.every", self.every, "at least 0")
        check(self.keep >= 1, "checkpoint.keep", self.keep, "at least 1")


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
        check(self.steps >= 1, "steps", self.steps, "at least 1")
        check(self.max_steps >= 0, "max_steps", self.max_steps, "at least 0")
        check(0 <= self.warmup_heads < 1, "warmup_heads", self.warmup_heads, "in [0, 1)")
        one_of("autocast", self.autocast, "none", "bfloat16")
