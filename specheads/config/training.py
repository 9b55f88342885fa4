"""The settings of ``python -m specheads.train``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specheads.config.data import DataConfig, FeaturesConfig
from specheads.config.declared import Section, Settings, at_least, one_of, positive, within
from specheads.system import errors
from specheads.system.errors import DEVICE_MAPS, DTYPES, MISSING, check, check_device, dtype_name


@dataclass
class ModelConfig(Section):
    """Which base model, and how it is loaded."""

    name: str = "tinycode"  # "tinycode" (embedded), "smollm2", a folder, a .gguf, or a hub name
    revision: str | None = None
    dtype: str = "float32"  # of the weights while training: fp32, bf16, fp16, or torch's names
    # flash_attention_2 for training only
    attn: str = one_of("sdpa", "eager", "flex_attention", "flash_attention_2")
    # bitsandbytes, CPU or GPU; GPTQ and AWQ bases say it themselves
    quantization: str = one_of("none", "nf4", "int8")
    gradient_checkpointing: bool = False  # recompute the base's layers in backward
    # spread a frozen base over the devices of one process: auto, balanced, sequential, or a device
    # for each part; heads go where its output matrix is
    device_map: Any = ""
    trust_remote_code: bool = False
    # numbers that suit the model ``name`` in it, by recipe; recipes read them while they compose
    tuned: dict[str, Any] = field(default_factory=dict)
    other_base: bool = False  # heads.start may be an export that was made for other weights
    # pretrain, mtp: a transformers config to build from scratch (model_type and sizes)
    init: dict[str, Any] = field(default_factory=dict)

    def _check_together(self) -> None:
        self.dtype = dtype_name("model.dtype", self.dtype)
        known = isinstance(self.device_map, dict) or self.device_map in ("", *DEVICE_MAPS)
        devices = f"one of {', '.join(DEVICE_MAPS)}, or a device for each part"
        check(known, "model.device_map", self.device_map, devices)
        self.tuned = {}  # they are where they belong now


RULED = ("medusa1",)  # recipes that decide by specheads/training/rule.py
LM_HEADS = ("own", "shared", "low_rank", "pruned", "shared_pruned")


@dataclass
class HeadsConfig(Section):
    """Medusa heads (arXiv:2401.10774, section 2.1), and Hydra heads (arXiv:2402.05109)."""

    kind: str = "medusa"  # Hydra heads too (condition); or another one of models/kinds.py
    options: dict[str, Any] = field(default_factory=dict)  # of such another kind: its own settings
    num_heads: int = at_least(1, 4)
    num_layers: int = at_least(0, 1)  # residual blocks per head; 0 leaves only the output matrix
    # own (copy of the base's output matrix), shared (the base's), low_rank, pruned (own, for the
    # num_kept tokens that are most frequent in the training data), or shared_pruned (the base's
    # rows of these tokens, not stored again); auto: pruned where the vocabulary is large, else own
    lm_head: str = one_of(*LM_HEADS, "auto")
    rank: int = at_least(1, 64)  # low_rank: inner size of up @ down
    # pruned, shared_pruned: tokens that a head can guess; 0: as many as cover 98% of the answers
    num_kept: int = at_least(0, 32_000)
    condition: bool = False  # Hydra: each head reads the tokens drafted before its own
    prefix_layer: bool = False  # Hydra++: one attention layer between base and heads
    correction: str = one_of("none", "markov")  # a low-rank bias from the token drafted before
    markov_rank: int = at_least(1, 64)
    start: str = ""  # an export whose heads to start from, of the same shape

    def _check_together(self) -> None:
        trained = self.num_layers > 0 or "shared" not in self.lm_head or self.condition
        expected = f"at least 1 with heads.lm_head={self.lm_head} (nothing would be trained)"
        self.check(trained, "num_layers", expected)
        taken = self.kind != "medusa" or not self.options
        self.check(taken, "options", "empty with heads.kind=medusa, which has keys")


@dataclass
class MtpConfig(Section):
    """Multi-token prediction (arXiv:2404.19737), or DeepSeek-V3's modules (arXiv:2412.19437)."""

    # n of the paper: the next-token head counts, n - 1 are drafting heads
    num_heads: int = at_least(2, 4)
    variant: str = one_of("parallel", "causal", "sequential")  # sequential: DeepSeek-V3's
    lm_head: str = one_of("shared", "own")  # the base's output matrix, or one per head
    parity: bool = True  # mtp: take n - 1 layers from the trunk, as many as heads are added
    hidden_first: bool = False  # sequential: [hidden; embedding], as in the paper
    start: str = one_of("base", "random")  # mtp_finetune: base: copies of its last layer
    train_base: bool = False  # mtp_finetune: tune the base too, whole or by its adapter


DRAFT_LOSSES = ("labels", "forward_kl", "reverse_kl", "jsd", "tv", "lk_alpha", "lk_lambda")


@dataclass
class DraftConfig(Section):
    """A draft model, distilled from its base (arXiv:2310.08461)."""

    # random (the base's architecture, smaller), base (some of its layers), or a folder or hub name
    # of a smaller model with the same tokenizer
    start: str = "random"
    layers: int = at_least(1, 1)  # random, base: layers of the draft model
    hidden: int = at_least(0, 0)  # random: its hidden size, of the base's head width; 0: the base's
    keep: list[int] = field(default_factory=list)  # base: these layers; empty: evenly spread ones
    learn_prompts: bool = False  # learn all tokens, not the answers alone: for draft.start=random
    # labels (the data's tokens, black box), or the base's distribution: forward_kl, reverse_kl,
    # jsd, tv, lk_alpha, lk_lambda. loss.temperature, loss.top_k, loss.lk_eta go with them
    loss: str = one_of(*DRAFT_LOSSES, default="forward_kl")
    # jsd: weight of the base in the mixture; towards 0 forward, 1 reverse KL
    jsd_beta: float = within("(0, 1)", 0.5)
    on_policy: float = within("[0, 1]", 0.0)  # share of steps on its own answers (2306.13649)
    on_policy_temperature: float = positive(1.0)
    on_policy_tokens: int = at_least(1, 128)  # longest answer
    stored: str = ""  # folder of the base's top-k log-probabilities, made if it is not there
    stored_top_k: int = at_least(1, 32)

    def _check_together(self) -> None:
        expected = "empty with draft.on_policy, whose answers nobody has stored"
        self.check(not (self.stored and self.on_policy), "stored", expected)


@dataclass
class LossConfig(Section):
    """L = L_LM + lambda_0 * sum_i decay^(i+1) * L_i; each L_i a mean over its own labels."""

    # of the heads: hard (the data's tokens), soft (the base's distribution), or, aimed at
    # acceptance: tv, lk_alpha, lk_lambda (arXiv:2602.23881)
    heads: str = one_of("hard", "soft", "tv", "lk_alpha", "lk_lambda")
    top_k: int = at_least(0, 0)  # not hard: keep the base's k most likely tokens only; 0: all
    temperature: float = positive(1.0)  # not hard: of the base's distribution
    lk_eta: float = positive(3.0)  # lk_lambda: lambda = exp(-eta * acceptance)
    # of the base (medusa2): labels (the data's tokens), or distill (KL to the original model,
    # which is the same weights with their adapter off: needs adapter=lora)
    base: str = one_of("labels", "distill")
    decay: float = within("(0, 1]", 0.8)
    # above 0: instead of the decay, weigh each guess by how likely those before it are right, and
    # those behind that wait for it; the a of D-PACE (arXiv:2605.18810), whose authors take 0.5
    pace: float = within("[0, 1]", 0.0)
    # weight of the heads' loss beside L_LM (medusa2); medusa1 uses 1
    lambda_0: float = at_least(0, 0.2)
    average: bool = False  # divide the heads' losses by their number (DeepSeek-V3, equation 25)
    # constant; linear or sine, sin(pi/2 * progress): it rises; step: it falls to lambda_end
    lambda_schedule: str = one_of("constant", "linear", "sine", "step")
    # share of the stage after which lambda_0 is reached; step: is left
    lambda_ramp: float = within("(0, 1]", 1.0)
    lambda_end: float = at_least(0, 0.1)  # step: what lambda_0 is then
    # tokens whose logits exist at one time; 0: by the vocabulary
    chunk_size: int = at_least(0, 0)

    def _check_together(self) -> None:
        if self.lambda_schedule == "step":  # lambda_end is reached by a factor of it
            self.check(self.lambda_0 > 0, "lambda_0", "positive with a step")


@dataclass
class AdapterConfig(Section):
    """LoRA on the base model (arXiv:2106.09685); on a quantised base that is QLoRA."""

    kind: str = one_of("none", "lora")  # none: the base itself is tuned
    rank: int = at_least(1, 32)
    alpha: float = positive(16.0)
    dropout: float = within("[0, 1)", 0.05)
    targets: list[str] = field(default_factory=list)  # module names; empty: every linear layer
    # in the export; false: in adapter/; auto: true unless quantised
    merge: str = one_of("auto", "true", "false")

    def __post_init__(self) -> None:
        self.merge = str(self.merge).lower()
        super().__post_init__()


@dataclass
class OptimConfig(Section):
    """Optimizer and learning-rate schedule; one learning rate for heads, one for the base."""

    # adamw8bit: of bitsandbytes; muon: hidden matrices by Muon, the rest by AdamW
    name: str = one_of("adamw", "adamw8bit", "muon")
    lr: float = at_least(
        0, 1e-3
    )  # heads, weights and biases alike; 0: by rule, from the base's width
    base_lr: float = positive(2.5e-4)  # base model, where it is trained
    muon_ratio: float = positive(6.7)  # Muon's learning rate relative to AdamW's
    weight_decay: float = 0.0  # with muon: of the hidden matrices only
    beta1: float = 0.9
    beta2: float = 0.95
    warmup_steps: int = at_least(0, 20)
    schedule: str = one_of("cosine", "constant", "wsd")  # wsd: constant, then linear to zero
    decay_fraction: float = within("[0, 1]", 0.3)  # wsd: the last part of the run that decays
    grad_clip: float = positive(1.0)
    accumulation: int = at_least(1, 1)  # micro-batches per optimizer step
    # steps of the whole run that may be left out for a loss or gradient that is not finite; the
    # next one stops the run
    skip_nonfinite: int = at_least(0, 0)


@dataclass
class TreeConfig(Section):
    """The tree used to decode: given choices, or grown from measured hit rates."""

    num_nodes: int = at_least(0, 0)  # root included; 0: the fastest size that was measured
    choices: list[list[int]] = field(default_factory=list)


@dataclass
class EvaluateConfig(Section):
    """Held-out decoding and held-out loss, during and after training."""

    every: int = at_least(0, 0)  # optimizer steps; 0: only at the end
    num_prompts: int = at_least(1, 16)
    max_new_tokens: int = at_least(2, 96)  # the first one is the prefill's
    temperatures: list[float] = at_least(0, [0.0, 1.0])
    num_nodes: int = at_least(2, 16)  # of the tree that is decoded with while training
    loss_rows: int = at_least(0, 32)  # packed held-out rows for the loss and the KL; 0: all
    keep_best: bool = True  # export the heads of the evaluation with the best accept length
    patience: int = at_least(0, 0)  # stop after so many evaluations without a better one; 0: never
    # for tree and final figures, after training; 0: a fifth of what training takes, at least one
    minutes: float = at_least(0, 0.0)

    def _check_together(self) -> None:
        self.check(self.temperatures, "temperatures", "at least one")


@dataclass
class LogConfig(Section):
    """Console line, metrics.jsonl and Weights & Biases."""

    every: int = at_least(1, 10)
    # auto: online with a key, else offline
    wandb: str = one_of("auto", "online", "offline", "disabled")
    project: str = "specheads"
    # decoded texts at the end: samples.jsonl, and a table on wandb
    samples: int = at_least(0, 4)
    artifacts: str = one_of("none", "export")  # sent to wandb at the end


@dataclass
class CheckpointConfig(Section):
    """Resumable state under checkpoints/step-*/."""

    every: int = at_least(0, 0)  # optimizer steps; 0: only when the run stops
    keep: int = at_least(1, 2)  # the newest ones


@dataclass
class TrainConfig(Settings):
    """Everything ``python -m specheads.train`` accepts."""

    recipe: str = ""  # a file in recipes/, or a path to your own .py with run(cfg)
    name: str = "run"
    run_dir: str = MISSING
    seed: int = 0
    # optimizer steps of the whole recipe; 0: by rule, from the data
    steps: int = at_least(0, 300)
    # as many steps as so many minutes hold, clocked before they begin, in place of `steps`; what is
    # stored before them and measured after them comes on top. 0: `steps`
    minutes: float = at_least(0, 0.0)
    max_steps: int = at_least(0, 0)  # stop after this many steps, resumably; 0: run all
    # medusa2: share of the steps that train the heads alone
    warmup_heads: float = within("[0, 1)", 0.2)
    # none, bfloat16 (fp32 weights, bf16 matrix products), float16 (DeepSpeed's: 16-bit weights with
    # fp32 masters, and a loss scale that finds itself); heads: auto, bfloat16 where it is faster
    autocast: str = "none"
    resume: str = ""  # "auto": newest checkpoint of this run; or the path of one
    # resume.trust=true: load DeepSpeed's state, which is pickle, from another run's directory too
    resume_trust: bool = False
    dry_run: bool = False  # check everything, print the plan, train nothing
    device: str = "auto"  # auto: a GPU if there is one, each rank its own; cpu, cuda, cuda:1
    # seconds after which a process that no longer answers stops all others
    dist_timeout: float = at_least(1, 600.0)
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

    def _check_together(self) -> None:
        fixed = self.recipe and self.recipe not in RULED and not self.recipe.endswith(".py")
        given = f"given: {self.recipe} has no rule for it"
        self.check(self.steps > 0 or not fixed, "steps", given)
        self.check(self.optim.lr > 0 or not fixed, "optim.lr", given)
        self.check(not (self.minutes and fixed), "minutes", f"0, and steps given: {self.recipe}")
        self.check(self.tokenizer_size > 272, "tokenizer_size", "more than 272")
        check_device(self.device)
        spread = f"with model.device_map={self.model.device_map}, which spreads over one process"
        alone = not self.model.device_map
        check(alone or not self.deepspeed, "deepspeed", "zero", f"none {spread}")
        self.check(alone or self.device == "auto", "device", f"auto {spread}")
        # the loss sums in float64
        self.check(self.device != "mps", "device", "auto, cpu or cuda: mps has no float64")
        adapted = self.loss.base == "labels" or self.adapter.kind == "lora"
        lora = "adapter=lora beside it: the original is the same weights with the adapter off"
        self.check(adapted, "loss.base", lora)
        self.autocast = DTYPES.get(self.autocast, self.autocast)
        by_rule = () if fixed else ("auto",)
        errors.one_of("autocast", self.autocast, "none", "bfloat16", "float16", *by_rule)
        scaled = bool(self.deepspeed) and self.model.dtype != "bfloat16"
        what = "bfloat16 or none with deepspeed=none, which scales no loss, or model.dtype=bfloat16"
        self.check(self.autocast != "float16" or scaled, "autocast", what)
        stage = (self.deepspeed.get("zero_optimization") or {}).get("stage", 0)
        half = bool(self.deepspeed) and "float16" in (self.autocast, self.model.dtype)
        # stage 0 divides gradients by a loss scale that no loss was multiplied by
        zero = "zero1, zero2 or zero3 with autocast=float16 or model.dtype=float16"
        check(not half or stage > 0, "deepspeed", "zero0", zero)
        whole = "0 with deepspeed=zero3, where no rank has whole weights to decode with (zero2 has)"
        self.check(stage != 3 or not self.evaluate.every, "evaluate.every", whole)
