"""What a run needs, from settings and config.json alone: no data, no weights.

The run's own objective is built of tensors without memory, and counted as a dry run counts it
(:func:`specheads.training.plan.load_of`). What cannot be measured so is arithmetic: activations
(``training/shapes.py``), and the operations of the matrix products; attention's own products, norms
and the reading of data are left out of these. Time follows from operations where somebody says what
a GPU reaches; communication and the optimizer's own time are then not in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads.config import AdapterConfig, HeadsConfig, TrainConfig
from specheads.data.teacher_cache import readable
from specheads.data.tokenizers import byte_tokenizer, choose_tokenizer, complete_init
from specheads.models import draft as drafts
from specheads.models.adapters import adapter_parameters, add_adapter, check_tunable, require_grad
from specheads.models.base import build_from_init, described, input_embedding, torch_dtype
from specheads.models.kinds import Heads
from specheads.models.mtp import MtpHeads
from specheads.models.output import OutputLayer, with_final
from specheads.system.errors import refuse
from specheads.training.engine import Groups, Objective, Spread, param_groups
from specheads.training.objectives import DraftObjective, HeadsObjective, LMObjective
from specheads.training.plan import (
    SPREADS,
    Need,
    Parts,
    clock,
    count_parameters,
    load_of,
    need,
    optimizer_bytes,
    tensor_bytes,
)
from specheads.training.setup import heads_of, shortened
from specheads.training.shapes import Shape, decoder_activations

RANKS, MEMORY = 8, 80e9  # what is planned for where nobody says otherwise
STEPS = 2000  # where a rule would find their number in the data
# operations per number of a matrix and row: forward; with what its input learns; with it itself
FORWARD, FROZEN, TRAINED = 2, 4, 6
# bytes per number of what bitsandbytes packs, scales included
PACKED = {"nf4": 0.5 + 1 / 64, "int8": 1.0}
FROM_SCRATCH = ("pretrain", "mtp")
PLANNED = (*FROM_SCRATCH, "medusa1", "medusa2", "mtp_finetune", "distill")


def _products(heads: Heads, rows: int, seq_len: int) -> Iterator[tuple[str, Tensor, int]]:
    """Yield the heads' own matrices by name, and how many rows each multiplies.

    Heads that guess from some positions of a row, ``heads.anchors``, run their layers there, once
    for every head; what joins the taps runs at every position, as other heads do.
    """
    everywhere = rows * seq_len
    anchors = rows * min(heads.anchors, seq_len) if heads.anchors else everywhere
    shared = heads.one_matrix or "shared" in heads.lm_head
    for name, weight in cast(nn.Module, heads).named_parameters():
        if weight.dim() != 2 or (shared and "lm_head" in name):
            continue
        times = anchors * heads.num_heads if heads.anchors else everywhere
        if heads.anchors and name.startswith("fc."):
            times = everywhere
        elif name.startswith("inject"):  # makes all slots of an anchor at once
            times = anchors
        yield name, weight, times


def operations(heads: Heads, rows: int, seq_len: int) -> float:
    """Return the operations of a training step of ``rows`` rows in the heads' matrix products."""
    total = sum(TRAINED * w.numel() * times for _, w, times in _products(heads, rows, seq_len))
    if heads.one_matrix or "shared" in heads.lm_head:
        # of one matrix every head makes its products; it learns where it is their own
        each = TRAINED if "shared" not in heads.lm_head else FROZEN
        places = rows * (min(heads.anchors, seq_len) if heads.anchors else seq_len)
        total += each * heads.num_outputs * heads.hidden_size * places * heads.num_heads
    return float(total)


def heads_activations(heads: Heads, rows: int, seq_len: int, size: int) -> float:
    """Return the bytes that heads keep for backward: what every matrix reads, and what it makes.

    Heads whose ``features`` run layers make those again in backward, one head's at a time.

    Args:
        heads: the heads.
        rows: of a micro-batch.
        seq_len: of a row.
        size: bytes of a number.
    """
    kept, again = 0.0, defaultdict[str, float](float)
    for name, weight, times in _products(heads, rows, seq_len):
        group, _, rest = name.partition(".")
        if "lm_head" in name or "markov" in name:
            continue
        found = float(size * times * sum(weight.shape))
        if heads.anchors and name.endswith(("k_proj.weight", "v_proj.weight")):
            found += size * rows * seq_len * weight.shape[0]  # of the text that anchors attend to
        if heads.num_layers and group in ("heads", "layers"):
            again[rest.partition(".")[0]] += found
        else:
            kept += found
    if heads.anchors:  # the norm of what joins the taps: float32, normalised, and its output
        kept += (4 + 2 * size) * rows * seq_len * heads.hidden_size
    places = rows * (min(heads.anchors, seq_len) if heads.anchors else seq_len)
    # what each head's output matrix reads, and its gradient
    read = 2 * size * places * heads.num_heads * heads.hidden_size
    return kept + read + max(again.values(), default=0.0)


@dataclass(frozen=True)
class Sketch:
    """A run on tensors without memory.

    Attributes:
        objective: what its last stage trains.
        groups: the optimizer's.
        parts: ``base``, ``heads``, ``draft``: all that lies in memory.
        output: the output matrix [V, d] of the loss.
        parameters: part -> number of trained and of frozen ones, as before they are packed.
        activations: bytes of a micro-batch; None where the base is of no kind that is counted.
        base_operations: of a forward pass of the base, for each token.
        operations: of an optimizer step of one rank.
        taps: hidden states of the base that heads read; 0 where none are.
    """

    objective: Objective
    groups: Groups
    parts: Parts
    output: Tensor
    parameters: dict[str, tuple[int, int]]
    activations: float | None
    base_operations: float
    operations: float
    taps: int


def sketch(cfg: TrainConfig) -> Sketch:
    """Build what a recipe trains without memory.

    Raises:
        ConfigError: if the recipe cannot be planned, or its settings contradict each other.
    """
    named = f"recipe={cfg.recipe} trains what its own code says; plan knows {', '.join(PLANNED)}"
    refuse({named: cfg.recipe not in PLANNED})
    with torch.device("meta"):
        base = _base(cfg)
        output = OutputLayer(base.get_output_embeddings())
        if cfg.recipe == "distill":
            return _draft_sketch(cfg, base, output)
        heads = None
        if cfg.recipe in ("mtp", "mtp_finetune"):
            heads = MtpHeads.from_settings(cfg.mtp, base, output)
        elif cfg.recipe != "pretrain":
            heads = heads_of(_sized(cfg.heads, output), base, output)
    tuned = cfg.recipe not in ("medusa1", "mtp_finetune") or (
        cfg.recipe == "mtp_finetune" and cfg.mtp.train_base
    )
    return _heads_sketch(cfg, base, output, heads, tuned)


def _base(cfg: TrainConfig) -> PreTrainedModel:
    model = cfg.model
    if cfg.recipe in FROM_SCRATCH:
        known = cfg.tokenizer != "bpe"  # which is learned from the data
        tokenizer = choose_tokenizer(cfg) if known else byte_tokenizer()
        init = model.init if known else {**model.init, "vocab_size": cfg.tokenizer_size}
        init = complete_init(init, tokenizer)
        if cfg.recipe == "mtp" and cfg.mtp.parity:
            init = shortened(init, cfg.mtp.num_heads - 1)
        return build_from_init(init, attn=model.attn)
    base = described(model.name, revision=model.revision, trust_remote_code=model.trust_remote_code)
    own = getattr(base.config, "quantization_config", None)
    packed = f"model.name={model.name} is quantised already, and its size is not in config.json"
    refuse({packed: own})
    return base.to(torch_dtype(model.dtype))  # type: ignore[arg-type]


def _heads_sketch(
    cfg: TrainConfig, base: PreTrainedModel, output: OutputLayer, heads: Any, tuned: bool
) -> Sketch:
    rows, length = cfg.data.rows, cfg.data.seq_len
    inner, matrix = _inner(base), output.weight.numel()
    total, lora = count_parameters(base), 0
    if tuned and cfg.recipe not in FROM_SCRATCH:
        check_tunable(cfg.model.quantization, cfg.adapter)
        if cfg.adapter.kind == "lora":
            with torch.device("meta"):
                add_adapter(base, cfg.adapter)
            lora = sum(p.numel() for p in adapter_parameters(base).values())
    if heads is None:
        objective: Objective = LMObjective(base, cfg.loss, output)
    else:
        embed = base.get_input_embeddings()
        objective = HeadsObjective(
            base, heads, cfg.loss, train_base=tuned, output=output, embed=embed
        )
    _pack(base, output, cfg.model.quantization)
    learning = {"heads": (heads, cfg.optim.lr)} if heads is not None else {}
    learning |= {"base": (base, cfg.optim.base_lr)} if tuned else {}
    parts = {"base": base} | ({} if heads is None else {"heads": cast(nn.Module, heads)})
    whole = tuned and not lora
    parameters = {"base": (total, 0) if whole else (0, total)}
    parameters |= {"adapter": (lora, 0)} if lora else {}
    kept = _decoder(cfg, base, total, tuned, lora)
    step = float(FORWARD * inner * rows * length)
    if tuned:
        again = FORWARD * inner if cfg.model.gradient_checkpointing else 0
        each = FROZEN if lora else TRAINED
        own = each * (inner + matrix) + TRAINED * lora + again
        original = FORWARD * (inner + matrix) if cfg.loss.base == "distill" else 0
        step = float((own + original) * rows * length)
    if heads is not None:
        parameters["heads"] = count_parameters(heads), 0
        size = _size(cfg, cfg.model.dtype)
        kept = kept and kept + heads_activations(heads, rows, length, size)
        step += operations(heads, rows, length)
    return Sketch(
        objective, param_groups(cfg.optim, **learning), parts, output.weight, parameters, kept,
        float(FORWARD * (inner + matrix)), step * cfg.optim.accumulation,
        0 if heads is None or tuned else len(with_final(heads.taps)),
    )  # fmt: skip


def _draft_sketch(cfg: TrainConfig, base: PreTrainedModel, output: OutputLayer) -> Sketch:
    wanted, rows = cfg.draft, cfg.data.rows * cfg.data.seq_len
    if wanted.start == "random":
        config = drafts.draft_config(base.config, wanted.layers, wanted.hidden)
        draft = drafts.new_draft(config, attn=cfg.model.attn)
    elif wanted.start == "base":
        total = int(base.config.get_text_config().num_hidden_layers)
        draft = drafts.pruned(base, wanted.keep or drafts.spread(total, wanted.layers))
    else:
        draft = described(wanted.start, trust_remote_code=cfg.model.trust_remote_code)
    draft.to(torch.float32)  # type: ignore[arg-type]
    own = OutputLayer(draft.get_output_embeddings())
    runs = not wanted.stored and wanted.loss != "labels"
    objective = DraftObjective(
        draft, base if runs else None, wanted, cfg.loss, output=own, base_output=output,
        vocab_size=min(len(own.weight), len(output.weight)),
    )  # fmt: skip
    require_grad(base, False)
    learned, frozen = count_parameters(draft), count_parameters(base)
    forward = float(FORWARD * (_inner(base) + output.weight.numel()))
    each = TRAINED * (_inner(draft) + own.weight.numel()) + (forward if runs else 0.0)
    _pack(base, output, cfg.model.quantization)
    kept = _decoder(replace(cfg, adapter=AdapterConfig()), draft, learned, True, 0)
    if kept is not None and runs:
        shape = Shape.from_config(base.config)
        kept += (
            0.0
            if shape is None
            else rows * decoder_activations(shape, _size(cfg, cfg.model.dtype), trained=False)
        )
    return Sketch(
        objective, param_groups(cfg.optim, draft=(draft, cfg.optim.lr)),
        {"base": base, "draft": draft}, own.weight,
        {"base": (0, frozen), "draft": (learned, 0)}, kept, forward,
        float(each * rows * cfg.optim.accumulation), 0,
    )  # fmt: skip


def _inner(model: PreTrainedModel) -> int:
    """Return the parameters of what is multiplied for every token, but for the output matrix."""
    return count_parameters(model.base_model) - input_embedding(model).numel()


def _size(cfg: TrainConfig, dtype: str) -> int:
    return 2 if "16" in dtype or cfg.autocast != "none" else 4


def _decoder(
    cfg: TrainConfig, model: PreTrainedModel, parameters: int, trained: bool, lora: int
) -> float | None:
    """Return the bytes of a micro-batch in a decoder; None if its kind is not counted."""
    shape = Shape.from_config(model.config)
    if shape is None or abs(shape.parameters / parameters - 1) > 0.02:
        return None
    size = _size(cfg, str(next(model.parameters()).dtype))
    found = decoder_activations(
        shape, size, trained=trained, adapter=size if lora else 0, rank=cfg.adapter.rank,
        checkpointed=cfg.model.gradient_checkpointing, mask=4 if cfg.device == "cpu" else 1,
    )  # fmt: skip
    return cfg.data.rows * cfg.data.seq_len * found


def _pack(base: PreTrainedModel, output: OutputLayer, quantization: str) -> None:
    """Let linear layers take as many bytes as bitsandbytes gives them."""
    if quantization == "none":
        return
    for name, module in base.named_modules():
        if isinstance(module, nn.Linear) and module is not output.module and ".lora_" not in name:
            packed = round(PACKED[quantization] * module.weight.numel())
            module.weight.data = torch.empty(packed, dtype=torch.uint8, device="meta")


def _sized(wanted: HeadsConfig, output: OutputLayer) -> HeadsConfig:
    """Return settings whose output matrix is decided where data would: the most a rule takes."""
    if wanted.lm_head == "auto":
        wanted = replace(wanted, lm_head="pruned")
    if "pruned" not in wanted.lm_head or wanted.num_kept:
        return wanted
    return replace(wanted, num_kept=1 << (output.weight.shape[0] // 4).bit_length() - 1)


@dataclass(frozen=True)
class Forecast:
    """What a run needs on some GPUs.

    Attributes:
        cfg: its settings.
        drawn: what it trains.
        gpus: their number.
        memory: bytes of each.
        flops: operations per second that a GPU is said to reach; 0: nobody has said.
        needs: values of ``deepspeed`` -> bytes of a rank.
    """

    cfg: TrainConfig
    drawn: Sketch
    gpus: int
    memory: float
    flops: float
    needs: dict[str, Need]

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return self.cfg.steps or STEPS

    @property
    def tokens(self) -> int:
        """Positions of all steps and ranks."""
        cfg = self.cfg
        rows = cfg.data.rows * cfg.optim.accumulation * self.gpus
        return self.steps * rows * cfg.data.seq_len

    @property
    def per_token(self) -> int:
        """Bytes of hidden states of one token; 0 where the heads' base learns too, or none are."""
        cfg, drawn = self.cfg, self.drawn
        given = cfg.model.dtype if cfg.features.dtype == "auto" else cfg.features.dtype
        return drawn.taps * drawn.output.shape[1] * torch_dtype(given).itemsize

    @property
    def cheapest(self) -> str:
        """The value of ``deepspeed`` that fits and communicates least; empty if none fits."""
        fitting = [name for name, each in self.needs.items() if each.fits(self.memory)]
        return fitting[0] if fitting else ""

    def found(self) -> dict[str, Any]:
        """Return all figures, of JSON's types, in bytes and seconds; None is not predicted."""
        drawn, rate = self.drawn, self.flops or None
        regenerating = self.tokens * drawn.base_operations
        return {
            "recipe": self.cfg.recipe,
            "model": self.cfg.model.name,
            "gpus": self.gpus,
            "memory": self.memory,
            "parameters": {
                part: {"trained": trained, "frozen": frozen}
                for part, (trained, frozen) in drawn.parameters.items()
            },
            "activations_counted": drawn.activations is not None,
            "stages": {
                name: {**asdict(each), "step": each.training, "peak": each.peak}
                | {"fits": each.fits(self.memory)}
                for name, each in self.needs.items()
            },
            "cheapest": self.cheapest or None,
            "steps": self.steps,
            "tokens": self.tokens,
            "hidden_bytes_per_token": self.per_token,
            "flops": rate,
            "operations_per_step": drawn.operations,
            "seconds_per_step": rate and drawn.operations / rate,
            "regenerate_operations": regenerating,
            "regenerate_seconds": rate and regenerating / (rate * self.gpus),
        }

    def __str__(self) -> str:
        """Return the lines of ``specheads plan``."""
        cfg, drawn, gpus = self.cfg, self.drawn, self.gpus
        rows = f"{cfg.data.rows} x {cfg.data.seq_len}"
        counts = (
            f"{part} {number / 1e6:,.1f} M {kind}"
            for part, numbers in drawn.parameters.items()
            for kind, number in zip(("trained", "frozen"), numbers, strict=True)
            if number
        )
        weights = drawn.parts["base"].named_parameters()
        base = readable(tensor_bytes(p for name, p in weights if ".lora_" not in name))
        source = "model.init" if cfg.recipe in FROM_SCRATCH else f"{cfg.model.name}/config.json"
        left = "" if drawn.activations is not None else "; activations left out, as not counted"
        lines = [
            f"planned from {source} alone: nothing was loaded, read or timed",
            f"parameters: {', '.join(counts)}; the base takes {base}",
            f"memory of each of {gpus} GPUs of {self.memory / 1e9:g} GB, AdamW, {rows} tokens of a"
            f" micro-batch{left}:",
            *self._table(),
            self._choice(),
            f"tokens: {self.tokens:,} positions in {self.steps:,} steps"
            f"{'' if cfg.steps else ' (assumed)'} of {rows} x {cfg.optim.accumulation} on each of"
            f" {gpus} GPUs",
            *self._hidden(),
            *self._time(),
        ]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        head = ["deepspeed", "weights", "gradients", "optimizer", "communication", "activations"]
        lines = [[*head, "a step's peak", "while loading", "main memory", ""]]
        for name, each in self.needs.items():
            active = each.activations + each.logits + each.formed + each.held
            parts = (
                each.weights, each.gradients, each.optimizer, each.buckets + each.gathered, active,
                each.training, each.loading, each.host,
            )  # fmt: skip
            fits = "fits" if each.fits(self.memory) else "too much"
            lines.append([name, *map(readable, parts), fits])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return [
            "  " + "  ".join(map(str.rjust, line, widths)).rstrip()  # names of sizes end alike
            for line in lines
        ]

    def _choice(self) -> str:
        if name := self.cheapest:
            needs = self.cfg.optim.name != "adamw" and name != "none"
            return (
                f"cheapest that fits (least communication): deepspeed={name}"
                f"{', with optim=adamw, which ZeRO needs' if needs else ''}"
            )
        name, least = min(self.needs.items(), key=lambda each: each[1].peak)
        return (
            f"none fits: the least is {readable(least.peak)} with deepspeed={name}; more GPUs, or"
            " smaller data.rows, data.seq_len or heads, need less"
        )

    def _hidden(self) -> list[str]:
        if not self.per_token:
            return []
        step, cfg = self.tokens // self.steps, self.cfg
        given = cfg.model.dtype if cfg.features.dtype == "auto" else cfg.features.dtype
        rate = ""
        if self.flops:
            rate = f", {readable(step * self.per_token * self.flops / self.drawn.operations)}/s"
        return [
            f"hidden states: {self.drawn.taps} taps x {self.drawn.output.shape[1]:,} as {given},"
            f" {self.per_token:,} bytes per token: stored (features.dir=auto)"
            f" {readable(self.per_token * self.tokens)} if none of these comes twice,"
            f" {readable(self.per_token * 1e9)} for a billion; online (features.dir='')"
            f" {readable(step * self.per_token)} a step{rate}, and the base runs in every step"
        ]

    def _time(self) -> list[str]:
        drawn, rate = self.drawn, self.flops
        said = f"at flops={rate:g} of each GPU, as given"
        step = f"time: {drawn.operations:.3g} operations a step and GPU"
        again = ""
        if self.cfg.recipe not in FROM_SCRATCH:
            total = drawn.base_operations * self.tokens
            again = f"regenerating the data: {total:.3g} operations of the base's forward pass"
        if not rate:
            ask = "not predicted without flops=, what a GPU reaches per second (400e12, say)"
            return [f"{step}; {ask}", *([f"{again}; time not predicted"] if again else [])]
        seconds = drawn.operations / rate
        lines = [
            f"{step}, {seconds:.3g} s {said}, {clock(seconds * self.steps)} for all; communication"
            " and the optimizer's own time are not predicted"
        ]
        if again:
            least = clock(total / (rate * self.gpus))
            lines.append(f"{again}, {least} {said}, at the least: decoding reads all weights anew")
        return lines


def forecast(
    cfg: TrainConfig, *, gpus: int = RANKS, memory: float = MEMORY, flops: float = 0.0
) -> Forecast:
    """Return what a run needs on ``gpus`` GPUs, counted without data and weights.

    Args:
        cfg: the run's settings; what a rule would decide from data is assumed.
        gpus: their number.
        memory: bytes of each.
        flops: operations per second that each reaches; 0 predicts no time.

    Raises:
        ConfigError: if there is no such model, the recipe cannot be planned, or its settings
            contradict each other.
    """
    if cfg.autocast == "auto":  # what a rule takes on a GPU
        cfg = replace(cfg, autocast="bfloat16")
    drawn = sketch(cfg)
    spreads = {"none": SPREADS["none"]} if gpus == 1 else {}
    spreads |= {name: each for name, each in SPREADS.items() if each.deepspeed}
    given = Spread.from_config(cfg.deepspeed)
    if cfg.deepspeed and given not in spreads.values():
        spreads["as set"] = given
    needs = {}
    for name, spread in spreads.items():
        if spread.stage == 3 and cfg.model.quantization != "none":
            continue  # ZeRO-3 cannot spread quantised weights
        load = load_of(drawn.objective, drawn.groups, drawn.parts, drawn.output, cfg, spread)
        load = replace(load, activations=drawn.activations or 0.0)
        needs[name] = need(load, spread, gpus, temporaries=2 if cfg.device == "cpu" else 1)
    if gpus == 1 and not cfg.deepspeed:
        own = sum(optimizer_bytes(group, cfg) for group in drawn.groups)
        needs["none"] = replace(needs["none"], optimizer=float(own))
    return Forecast(cfg, drawn, gpus, memory, flops, needs)
