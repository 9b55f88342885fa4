"""The settings of ``python -m specheads.train``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specheads.config.data import DataConfig, FeaturesConfig
from specheads.system.errors import (
    DTYPES,
    MISSING,
    at_least,
    check,
    check_device,
    dtype_name,
    one_of,
    positive,
    within,
)


@dataclass
class ModelConfig:
    """Which base model, and how it is loaded."""

    name: str = "tinycode"  # "tinycode" (embedded), "smollm2", a folder, a .gguf, or a hub name
    revision: str | None = None
    dtype: str = "float32"  # of the weights while training: fp32, bf16, fp16, or torch's names
    attn: str = "sdpa"  # sdpa, eager, flex_attention; flash_attention_2 for training only
    # none, nf4 or int8 (bitsandbytes, CPU or GPU); GPTQ and AWQ bases say it themselves
    quantization: str = "none"
    gradient_checkpointing: bool = False  # recompute the base's layers in backward
    trust_remote_code: bool = False
    # numbers that suit the model ``name`` in it, by recipe; recipes read them while they compose
    tuned: dict[str, Any] = field(default_factory=dict)
    other_base: bool = False  # heads.start may be an export that was made for other weights
    # pretrain, mtp: a transformers config to build from scratch (model_type and sizes)
    init: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dtype = dtype_name("model.dtype", self.dtype)
        self.tuned = {}  # they are where they belong now
        one_of("model.attn", self.attn, "sdpa", "eager", "flex_attention", "flash_attention_2")
        one_of("model.quantization", self.quantization, "none", "nf4", "int8")


RULED = ("medusa1",)  # recipes that decide by specheads/training/rule.py
LM_HEADS = ("own", "shared", "low_rank", "pruned", "shared_pruned")


@dataclass
class HeadsConfig:
    """Medusa heads (arXiv:2401.10774, section 2.1), and Hydra heads (arXiv:2402.05109)."""

    kind: str = "medusa"  # Hydra heads too (condition); or another one of models/kinds.py
    options: dict[str, Any] = field(default_factory=dict)  # of such another kind: its own settings
    num_heads: int = 4
    num_layers: int = 1  # residual blocks per head; 0 leaves only the output matrix
    # own (copy of the base's output matrix), shared (the base's), low_rank, pruned (own, for the
    # num_kept tokens that are most frequent in the training data), or shared_pruned (the base's
    # rows of these tokens, not stored again); auto: pruned where the vocabulary is large, else own
    lm_head: str = "own"
    rank: int = 64  # low_rank: inner size of up @ down
    # pruned, shared_pruned: tokens that a head can guess; 0: as many as cover 98% of the answers
    num_kept: int = 32_000
    condition: bool = False  # Hydra: each head reads the tokens drafted before its own
    prefix_layer: bool = False  # Hydra++: one attention layer between base and heads
    correction: str = "none"  # none, or markov: a low-rank bias from the token drafted before
    markov_rank: int = 64
    start: str = ""  # an export whose heads to start from, of the same shape

    def __post_init__(self) -> None:
        at_least(self, "heads.", num_heads=1, num_layers=0, rank=1, num_kept=0, markov_rank=1)
        one_of("heads.lm_head", self.lm_head, *LM_HEADS, "auto")
        one_of("heads.correction", self.correction, "none", "markov")
        trained = self.num_layers > 0 or "shared" not in self.lm_head or self.condition
        expected = f"at least 1 with heads.lm_head={self.lm_head} (nothing would be trained)"
        check(trained, "heads.num_layers", self.num_layers, expected)
        taken = self.kind != "medusa" or not self.options
        check(taken, "heads.options", self.options, "empty with heads.kind=medusa, which has keys")


@dataclass
class MtpConfig:
    """Multi-token prediction (arXiv:2404.19737), or DeepSeek-V3's modules (arXiv:2412.19437)."""

    num_heads: int = 4  # n of the paper: the next-token head counts, n - 1 are drafting heads
    variant: str = "parallel"  # parallel, causal, or sequential (DeepSeek-V3's)
    lm_head: str = "shared"  # shared (the base's output matrix), or own (one per head)
    parity: bool = True  # mtp: take n - 1 layers from the trunk, as many as heads are added
    hidden_first: bool = False  # sequential: [hidden; embedding], as in the paper
    start: str = "base"  # mtp_finetune: base (copies of its last layer), or random
    train_base: bool = False  # mtp_finetune: tune the base too, whole or by its adapter

    def __post_init__(self) -> None:
        at_least(self, "mtp.", num_heads=2)
        one_of("mtp.variant", self.variant, "parallel", "causal", "sequential")
        one_of("mtp.lm_head", self.lm_head, "shared", "own")
        one_of("mtp.start", self.start, "base", "random")


DRAFT_LOSSES = ("labels", "forward_kl", "reverse_kl", "jsd", "tv", "lk_alpha", "lk_lambda")


@dataclass
class DraftConfig:
    """A draft model, distilled from its base (arXiv:2310.08461)."""

    # random (the base's architecture, smaller), base (some of its layers), or a folder or hub name
    # of a smaller model with the same tokenizer
    start: str = "random"
    layers: int = 1  # random, base: layers of the draft model
    hidden: int = 0  # random: its hidden size, of the base's head width; 0: the base's
    keep: list[int] = field(default_factory=list)  # base: these layers; empty: evenly spread ones
    learn_prompts: bool = False  # learn all tokens, not the answers alone: for draft.start=random
    # labels (the data's tokens, black box), or the base's distribution: forward_kl, reverse_kl,
    # jsd, tv, lk_alpha, lk_lambda. loss.temperature, loss.top_k, loss.lk_eta go with them
    loss: str = "forward_kl"
    jsd_beta: float = 0.5  # jsd: weight of the base in the mixture; towards 0 forward, 1 reverse KL
    on_policy: float = 0.0  # share of steps on the draft's own answers (2306.13649)
    on_policy_temperature: float = 1.0
    on_policy_tokens: int = 128  # longest answer
    stored: str = ""  # folder of the base's top-k log-probabilities, made if it is not there
    stored_top_k: int = 32

    def __post_init__(self) -> None:
        one_of("draft.loss", self.loss, *DRAFT_LOSSES)
        at_least(self, "draft.", layers=1, hidden=0, on_policy_tokens=1, stored_top_k=1)
        within(self, "draft.", jsd_beta="(0, 1)", on_policy="[0, 1]")
        positive(self, "draft.", "on_policy_temperature")
        expected = "empty with draft.on_policy, whose answers nobody has stored"
        check(not (self.stored and self.on_policy), "draft.stored", self.stored, expected)


@dataclass
class LossConfig:
    """L = L_LM + lambda_0 * sum_i decay^(i+1) * L_i; each L_i a mean over its own labels."""

    # of the heads: hard (the data's tokens), soft (the base's distribution), or, aimed at
    # acceptance: tv, lk_alpha, lk_lambda (arXiv:2602.23881)
    heads: str = "hard"
    top_k: int = 0  # not hard: keep the base's k most likely tokens only; 0: all
    temperature: float = 1.0  # not hard: of the base's distribution
    lk_eta: float = 3.0  # lk_lambda: lambda = exp(-eta * acceptance)
    # of the base (medusa2): labels (the data's tokens), or distill (KL to the original model,
    # which is the same weights with their adapter off: needs adapter=lora)
    base: str = "labels"
    decay: float = 0.8
    # above 0: instead of the decay, weigh each guess by how likely those before it are right, and
    # those behind that wait for it; the a of D-PACE (arXiv:2605.18810), whose authors take 0.5
    pace: float = 0.0
    lambda_0: float = 0.2  # weight of the heads' loss beside L_LM (medusa2); medusa1 uses 1
    average: bool = False  # divide the heads' losses by their number (DeepSeek-V3, equation 25)
    # constant; linear or sine, sin(pi/2 * progress): it rises; step: it falls to lambda_end
    lambda_schedule: str = "constant"
    lambda_ramp: float = 1.0  # share of the stage after which lambda_0 is reached; step: is left
    lambda_end: float = 0.1  # step: what lambda_0 is then
    chunk_size: int = 0  # tokens whose logits exist at one time; 0: by the vocabulary
    implementation: str = "fused"  # fused (ours), torch, liger, naive

    def __post_init__(self) -> None:
        one_of("loss.heads", self.heads, "hard", "soft", "tv", "lk_alpha", "lk_lambda")
        one_of("loss.base", self.base, "labels", "distill")
        one_of("loss.lambda_schedule", self.lambda_schedule, "constant", "linear", "sine", "step")
        one_of("loss.implementation", self.implementation, "fused", "torch", "liger", "naive")
        at_least(self, "loss.", top_k=0, lambda_0=0, lambda_end=0, chunk_size=0)
        positive(self, "loss.", "temperature", "lk_eta")
        within(self, "loss.", decay="(0, 1]", lambda_ramp="(0, 1]", pace="[0, 1]")
        if self.lambda_schedule == "step":  # lambda_end is reached by a factor of it
            check(self.lambda_0 > 0, "loss.lambda_0", self.lambda_0, "positive with a step")


@dataclass
class AdapterConfig:
    """LoRA on the base model (arXiv:2106.09685); on a quantised base that is QLoRA."""

    kind: str = "none"  # none (the base itself is tuned), or lora
    rank: int = 32
    alpha: float = 16.0
    dropout: float = 0.05
    targets: list[str] = field(default_factory=list)  # module names; empty: every linear layer
    merge: str = "auto"  # in the export: true, false (adapter/), auto: true unless quantised

    def __post_init__(self) -> None:
        one_of("adapter.kind", self.kind, "none", "lora")
        at_least(self, "adapter.", rank=1)
        positive(self, "adapter.", "alpha")
        within(self, "adapter.", dropout="[0, 1)")
        self.merge = str(self.merge).lower()
        one_of("adapter.merge", self.merge, "auto", "true", "false")


@dataclass
class OptimConfig:
    """Optimizer and learning-rate schedule; one learning rate for heads, one for the base."""

    # adamw, adamw8bit (bitsandbytes), or muon (hidden matrices by Muon, the rest by AdamW)
    name: str = "adamw"
    lr: float = 1e-3  # heads, weights and biases alike; 0: by rule, from the base's width
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
    # steps of the whole run that may be left out for a loss or gradient that is not finite; the
    # next one stops the run
    skip_nonfinite: int = 0

    def __post_init__(self) -> None:
        one_of("optim.name", self.name, "adamw", "adamw8bit", "muon")
        one_of("optim.schedule", self.schedule, "cosine", "constant", "wsd")
        positive(self, "optim.", "base_lr", "muon_ratio", "grad_clip")
        check(self.lr >= 0, "optim.lr", self.lr, "positive")
        at_least(self, "optim.", warmup_steps=0, accumulation=1, skip_nonfinite=0)
        within(self, "optim.", decay_fraction="[0, 1]")


@dataclass
class TreeConfig:
    """The tree used to decode: given choices, or grown from measured hit rates."""

    num_nodes: int = 0  # root included; 0: the fastest size that was measured
    choices: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        at_least(self, "tree.", num_nodes=0)


@dataclass
class EvaluateConfig:
    """Held-out decoding and held-out loss, during and after training."""

    every: int = 0  # optimizer steps; 0: only at the end
    num_prompts: int = 16
    max_new_tokens: int = 96
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    num_nodes: int = 16  # of the tree that is decoded with while training
    loss_rows: int = 32  # packed held-out rows for the loss and the KL; 0: all
    keep_best: bool = True  # export the heads of the evaluation with the best accept length
    patience: int = 0  # stop after so many evaluations without a better one; 0: never
    # for tree and final figures, after training; 0: a fifth of what training takes, at least one
    minutes: float = 0.0

    def __post_init__(self) -> None:
        at_least(self, "evaluate.", every=0, num_prompts=1, num_nodes=2, loss_rows=0, patience=0)
        at_least(self, "evaluate.", max_new_tokens=2)  # the first one is the prefill's
        at_least(self, "evaluate.", minutes=0)
        found = self.temperatures
        ok = len(found) > 0 and all(each >= 0 for each in found)
        check(ok, "evaluate.temperatures", found, "at least one, none negative")


@dataclass
class LogConfig:
    """Console line, metrics.jsonl and Weights & Biases."""

    every: int = 10
    wandb: str = "auto"  # auto (online with a key, else offline), online, offline, disabled
    project: str = "specheads"
    samples: int = 4  # decoded texts at the end: samples.jsonl, and a table on wandb
    # sent to wandb: none, export (at the end), or checkpoints (each of them, and the export)
    artifacts: str = "none"

    def __post_init__(self) -> None:
        at_least(self, "log.", every=1, samples=0)
        one_of("log.artifacts", self.artifacts, "none", "export", "checkpoints")
        one_of("log.wandb", self.wandb, "auto", "online", "offline", "disabled")


@dataclass
class CheckpointConfig:
    """Resumable state under checkpoints/step-*/."""

    every: int = 0  # optimizer steps; 0: only when the run stops
    keep: int = 2  # the newest ones

    def __post_init__(self) -> None:
        at_least(self, "checkpoint.", every=0, keep=1)


@dataclass
class TrainConfig:
    """Everything ``python -m specheads.train`` accepts."""

    recipe: str = ""  # a file in recipes/, or a path to your own .py with run(cfg)
    name: str = "run"
    run_dir: str = MISSING
    seed: int = 0
    steps: int = 300  # optimizer steps of the whole recipe; 0: by rule, from the data
    max_steps: int = 0  # stop after this many steps, resumably; 0: run all
    warmup_heads: float = 0.2  # medusa2: share of the steps that train the heads alone
    # none, bfloat16 (fp32 weights, bf16 matrix products), float16 (DeepSpeed's: 16-bit weights with
    # fp32 masters, and a loss scale that finds itself); heads: auto, bfloat16 where it is faster
    autocast: str = "none"
    resume: str = ""  # "auto": newest checkpoint of this run; or the path of one
    # resume.trust=true: load DeepSpeed's state, which is pickle, from another run's directory too
    resume_trust: bool = False
    dry_run: bool = False  # check everything, print the plan, train nothing
    device: str = "auto"  # auto: a GPU if there is one, each rank its own; cpu, cuda, cuda:1
    # seconds after which a process that no longer answers stops all others
    dist_timeout: float = 600.0
    # models trained from scratch: byte (no vocabulary to learn), bpe (learned from the training
    # data), a folder or hub name (that model's); empty: the one of model.name
    tokenizer: str = ""
    tokenizer_size: int = 4096  # bpe: tokens in all, 256 bytes and 16 special ones among them
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    features: FeaturesConfig = field(default_factory=FeaturesConfig)
    heads: HeadsConfig = field(default_factory=HeadsConfig)
    mtp: MtpConfig = field(default_factory=MtpConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    tree: TreeConfig = field(default_factory=TreeConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    deepspeed: dict[str, Any] = field(default_factory=dict)  # {} is plain torch

    def __post_init__(self) -> None:
        at_least(self, steps=0, max_steps=0, dist_timeout=1)
        fixed = self.recipe and self.recipe not in RULED and not self.recipe.endswith(".py")
        given = f"given: {self.recipe} has no rule for it"
        check(self.steps > 0 or not fixed, "steps", self.steps, given)
        check(self.optim.lr > 0 or not fixed, "optim.lr", self.optim.lr, given)
        within(self, warmup_heads="[0, 1)")
        check(self.tokenizer_size > 272, "tokenizer_size", self.tokenizer_size, "more than 272")
        check_device(self.device)
        # the loss sums in float64
        mps = "auto, cpu or cuda: mps has no float64"
        check(self.device != "mps", "device", self.device, mps)
        adapted = self.loss.base == "labels" or self.adapter.kind == "lora"
        lora = "adapter=lora beside it: the original is the same weights with the adapter off"
        check(adapted, "loss.base", self.loss.base, lora)
        self.autocast = DTYPES.get(self.autocast, self.autocast)
        by_rule = () if fixed else ("auto",)
        one_of("autocast", self.autocast, "none", "bfloat16", "float16", *by_rule)
        scaled = bool(self.deepspeed) and self.model.dtype != "bfloat16"
        what = "bfloat16 or none with deepspeed=none, which scales no loss, or model.dtype=bfloat16"
        check(self.autocast != "float16" or scaled, "autocast", self.autocast, what)
        stage = (self.deepspeed.get("zero_optimization") or {}).get("stage", 0)
        half = bool(self.deepspeed) and "float16" in (self.autocast, self.model.dtype)
        # stage 0 divides gradients by a loss scale that no loss was multiplied by
        zero = "zero1, zero2 or zero3 with autocast=float16 or model.dtype=float16"
        check(not half or stage > 0, "deepspeed", "zero0", zero)
        whole = "0 with deepspeed=zero3, where no rank has whole weights to decode with (zero2 has)"
        check(stage != 3 or not self.evaluate.every, "evaluate.every", self.evaluate.every, whole)
