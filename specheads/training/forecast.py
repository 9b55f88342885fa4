"""What a run needs, from settings and config.json alone: no data, no weights.

What it trains is built of tensors without memory, and counted as a dry run counts it
(:func:`specheads.training.plan.needs_of`). What cannot be measured so is arithmetic: activations
(``training/shapes.py``), and the operations of the matrix products; attention's own products, norms
and the reading of data are left out of these. Time follows from operations where somebody says what
a GPU reaches; communication and the optimizer's own time are then not in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads.config import HeadsConfig, TrainConfig
from specheads.data.teacher_cache import readable
from specheads.data.tokenizers import byte_tokenizer, choose_tokenizer, complete_init
from specheads.models.adapters import adapter_parameters, add_adapter, check_tunable, require_grad
from specheads.models.base import build_from_init, described, input_embedding, torch_dtype
from specheads.models.kinds import Heads
from specheads.models.mtp import MtpHeads
from specheads.models.output import OutputLayer, with_final
from specheads.system.errors import refuse
from specheads.training import plan
from specheads.training.engine import Spread, param_groups
from specheads.training.plan import Need, Work
from specheads.training.setup import fresh_draft, heads_of, shortened
from specheads.training.shapes import Shape, decoder_activations

RANKS, MEMORY = 8, 80e9  # what is planned for where nobody says otherwise
STEPS = 2000  # where a rule would find their number in the data
# operations per number of a matrix and row: forward; with what its input learns; with it itself
FORWARD, FROZEN, TRAINED = 2, 4, 6
FROM_SCRATCH = ("pretrain", "mtp")
PLANNED = (*FROM_SCRATCH, "medusa1", "medusa2", "mtp_finetune", "distill")


def _places(heads: Heads, rows: int, seq_len: int) -> int:
    """Return at how many positions each head guesses."""
    return rows * min(heads.anchors or seq_len, seq_len)


def _products(heads: Heads, rows: int, seq_len: int) -> Iterator[tuple[str, Tensor, int]]:
    """Yield the heads' own matrices by name, and how many rows each multiplies.

    Heads that guess from some positions of a row, ``heads.anchors``, run their layers there, once
    for every head; what joins the taps runs at every position, as other heads do.
    """
    shared = heads.one_matrix or "shared" in heads.lm_head
    for name, weight in cast(nn.Module, heads).named_parameters():
        if weight.dim() != 2 or (shared and "lm_head" in name):
            continue
        if not heads.anchors or name.startswith("fc."):
            yield name, weight, rows * seq_len
        else:  # the injection makes all slots of an anchor at once
            slots = 1 if name.startswith("inject") else heads.num_heads
            yield name, weight, slots * _places(heads, rows, seq_len)


def operations(heads: Heads, rows: int, seq_len: int) -> float:
    """Return the operations of a training step of ``rows`` rows in the heads' matrix products."""
    total = sum(TRAINED * w.numel() * times for _, w, times in _products(heads, rows, seq_len))
    if heads.one_matrix or "shared" in heads.lm_head:
        # of one matrix every head makes its products; it learns where it is their own
        each = FROZEN if "shared" in heads.lm_head else TRAINED
        guesses = _places(heads, rows, seq_len) * heads.num_heads
        total += each * heads.num_outputs * heads.hidden_size * guesses
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
    kept = defaultdict[str, float](float)  # by the head that makes it again; "": once, for good
    for name, weight, times in _products(heads, rows, seq_len):
        if "lm_head" in name or "markov" in name:
            continue
        group, part, *_ = name.split(".")
        again = part if heads.num_layers and group in ("heads", "layers") else ""
        kept[again] += size * times * sum(weight.shape)
        if heads.anchors and name.endswith(("k_proj.weight", "v_proj.weight")):
            kept[again] += size * rows * seq_len * weight.shape[0]  # of the text attended to
    if heads.anchors:  # the norm of what joins the taps: float32, normalised, and its output
        kept[""] += (4 + 2 * size) * rows * seq_len * heads.hidden_size
    # what each head's output matrix reads, and its gradient
    read = 2 * size * _places(heads, rows, seq_len) * heads.num_heads * heads.hidden_size
    return kept.pop("", 0.0) + read + max(kept.values(), default=0.0)


def sketch(cfg: TrainConfig) -> Work:
    """Build what a recipe trains without memory.

    Raises:
        ConfigError: if the recipe cannot be planned, or its settings contradict each other.
    """
    recipe, quantization = cfg.recipe, cfg.model.quantization
    named = f"recipe={recipe} trains what its own code says; plan knows {', '.join(PLANNED)}"
    refuse({named: recipe not in PLANNED})
    with torch.device("meta"):
        base = _base(cfg)
        output = OutputLayer(base.get_output_embeddings())
        parts: dict[str, Any] = {"base": base}
        if recipe == "distill":
            draft = fresh_draft(cfg.draft, base, cfg.model.attn)
            draft = draft or described(
                cfg.draft.start, trust_remote_code=cfg.model.trust_remote_code
            )
            parts["draft"] = draft.to(torch.float32)  # type: ignore[arg-type]
        elif recipe in ("mtp", "mtp_finetune"):
            parts["heads"] = MtpHeads.from_settings(cfg.mtp, base, output)
        elif recipe != "pretrain":
            parts["heads"] = heads_of(_sized(cfg.heads, output), base, output)
        tuned = recipe == "medusa2" or (recipe == "mtp_finetune" and cfg.mtp.train_base)
        if tuned:
            check_tunable(quantization, cfg.adapter)
            if cfg.adapter.kind == "lora":
                add_adapter(base, cfg.adapter)
    require_grad(base, tuned or recipe in FROM_SCRATCH)
    if quantization != "none":
        for name, module in base.named_modules():
            if isinstance(module, nn.Linear) and not (module is output.module or ".lora_" in name):
                _pack(module.weight, quantization)
    groups = param_groups(cfg.optim, **{name: (part, 0.0) for name, part in parts.items()})
    learner = parts.get("draft", base)
    return Work(parts, groups, learner.get_output_embeddings().weight)


def _base(cfg: TrainConfig) -> PreTrainedModel:
    model = cfg.model
    if cfg.recipe in FROM_SCRATCH:
        # one that is learned has the size that is set
        learned = {"vocab_size": cfg.tokenizer_size} if cfg.tokenizer == "bpe" else {}
        tokenizer = byte_tokenizer() if learned else choose_tokenizer(cfg)
        init = complete_init({**model.init, **learned}, tokenizer)
        if cfg.recipe == "mtp" and cfg.mtp.parity:
            init = shortened(init, cfg.mtp.num_heads - 1)
        return build_from_init(init, attn=model.attn)
    base = described(model.name, revision=model.revision, trust_remote_code=model.trust_remote_code)
    own = getattr(base.config, "quantization_config", None)
    packed = f"model.name={model.name} is quantised already, and its size is not in config.json"
    refuse({packed: own})
    return base.to(torch_dtype(model.dtype))  # type: ignore[arg-type]


def _pack(weight: Any, quantization: str) -> None:
    """Let a matrix take as many bytes as bitsandbytes gives it, scales of 4 bits included."""
    per_number = 1.0 if quantization == "int8" else 0.5 + 1 / 64
    weight.quant_state = SimpleNamespace(shape=weight.shape)
    weight.data = torch.empty(round(per_number * weight.numel()), dtype=torch.uint8, device="meta")


def _sized(wanted: HeadsConfig, output: OutputLayer) -> HeadsConfig:
    """Return settings whose output matrix is decided where data would: the most a rule takes."""
    if wanted.lm_head == "auto":
        wanted = replace(wanted, lm_head="pruned")
    if "pruned" not in wanted.lm_head or wanted.num_kept:
        return wanted
    return replace(wanted, num_kept=1 << (output.weight.shape[0] // 4).bit_length() - 1)


def _activations(cfg: TrainConfig, drawn: Work) -> float | None:
    """Return the bytes of a micro-batch; None if the decoder's kind is not counted.

    The temporaries of a teacher that runs beside a draft are left out.
    """
    base, heads = drawn.parts["base"], drawn.parts.get("heads")
    learner = drawn.parts.get("draft", base)
    shape, adapters = Shape.from_config(learner.config), _adapters(learner)
    numbers = plan.count_parameters(learner) - adapters
    if shape is None or abs(shape.parameters / numbers - 1) > 0.02:
        return None

    def size(dtype: str) -> int:
        return 2 if "16" in dtype or cfg.autocast != "none" else 4

    own = size(str(next(learner.parameters()).dtype))
    kept = cfg.data.rows * cfg.data.seq_len * decoder_activations(
        shape, own, trained=any(p.requires_grad for p in learner.parameters()),
        adapter=own if adapters else 0, rank=cfg.adapter.rank,
        checkpointed=cfg.model.gradient_checkpointing, mask=4 if cfg.device == "cpu" else 1,
    )  # fmt: skip
    if heads is not None:
        kept += heads_activations(heads, cfg.data.rows, cfg.data.seq_len, size(cfg.model.dtype))
    return kept


def _adapters(model: PreTrainedModel) -> int:
    return sum(p.numel() for p in adapter_parameters(model).values())


def _forward(model: PreTrainedModel, matrix: bool = True) -> int:
    """Return the operations of a token's forward pass, with or without the output matrix."""
    inner = (
        plan.count_parameters(model.base_model) - input_embedding(model).numel() - _adapters(model)
    )
    return FORWARD * (inner + matrix * model.get_output_embeddings().weight.numel())


def _step(cfg: TrainConfig, drawn: Work) -> float:
    """Return the operations of an optimizer step of one rank."""
    base, heads = drawn.parts["base"], drawn.parts.get("heads")
    learner = drawn.parts.get("draft", base)
    each = _forward(base, matrix=False)
    if any(p.requires_grad for p in learner.parameters()):
        adapters = _adapters(learner)
        each = _forward(learner) * (FROZEN if adapters else TRAINED) // FORWARD
        each += TRAINED * adapters
        each += cfg.model.gradient_checkpointing * _forward(learner, matrix=False)
        runs = cfg.draft.loss != "labels" and not cfg.draft.stored
        if runs if learner is not base else cfg.loss.base == "distill":
            each += _forward(base)
    total = float(each * cfg.data.rows * cfg.data.seq_len)
    if heads is not None:
        total += operations(heads, cfg.data.rows, cfg.data.seq_len)
    return total * cfg.optim.accumulation


@dataclass(frozen=True)
class Forecast:
    """What a run needs on some GPUs.

    Attributes:
        figures: of JSON's types, in bytes, operations and seconds; None is not predicted.
        needs: values of ``deepspeed`` -> bytes of a rank.
    """

    figures: dict[str, Any]
    needs: dict[str, Need]

    def __str__(self) -> str:
        """Return the lines of ``specheads plan``."""
        found = self.figures
        gpus, memory, rate = found["gpus"], found["memory"], found["flops"]
        steps, per_token = found["steps"], found["hidden_bytes_per_token"]
        assumed = " (assumed)" if found["steps_assumed"] else ""
        lines = [
            "planned from settings and config.json alone: nothing was loaded, read or timed",
            f"parameters: {plan.describe_parameters(found['parameters'])}",
            f"memory of each of {gpus} GPUs of {memory / 1e9:g} GB, AdamW:",
            *plan.describe_needs(self.needs, memory, counted=found["activations_counted"]),
            "cheapest that fits (least communication): " + (found["cheapest"] or "none fits"),
            f"tokens: {found['tokens']:,} positions in {steps:,} steps{assumed} on {gpus} GPUs",
        ]
        if per_token:
            lines.append(
                f"hidden states: {per_token:,} bytes per token: stored (features.dir=auto)"
                f" {readable(per_token * found['tokens'])} if none of these comes twice; online"
                f" (features.dir='') {readable(per_token * found['tokens'] / steps)} a step, and"
                " the base runs in every step"
            )
        for what, total in (
            ("training", found["operations_per_step"] * steps * gpus),
            ("regenerating the data", found["regenerate_operations"]),
        ):
            time = "time not predicted without flops=, what a GPU reaches per second (400e12, say)"
            if rate:
                time = (
                    f"{plan.clock(total / (rate * gpus))} at flops={rate:g} of each GPU, as given;"
                    " communication, the optimizer and reading weights for decoding not predicted"
                )
            lines += [f"{what}: {total:.3g} operations; {time}"] if total else []
        return "\n".join(lines)


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
    base, heads = drawn.parts["base"], drawn.parts.get("heads")
    spreads = {name: each for name, each in plan.SPREADS.items() if each.deepspeed or gpus == 1}
    given = Spread.from_config(cfg.deepspeed)
    if cfg.deepspeed and given not in spreads.values():
        spreads["as set"] = given
    activations = _activations(cfg, drawn)
    needs = plan.needs_of(drawn, cfg, activations or 0.0, spreads, gpus)
    taps = 0
    if heads is not None and not any(p.requires_grad for p in base.parameters()):
        taps = len(with_final(heads.taps))
    kept = torch_dtype(cfg.model.dtype if cfg.features.dtype == "auto" else cfg.features.dtype)
    steps, step, rate = cfg.steps or STEPS, _step(cfg, drawn), flops or None
    tokens = steps * cfg.data.rows * cfg.data.seq_len * cfg.optim.accumulation * gpus
    again = 0 if cfg.recipe in FROM_SCRATCH else tokens * _forward(base)
    stages = {
        name: {**asdict(each), "step": each.training, "peak": each.peak, "fits": each.fits(memory)}
        for name, each in needs.items()
    }
    figures = {
        "gpus": gpus,
        "memory": memory,
        "parameters": plan.parameters_of(drawn),
        "activations_counted": activations is not None,
        "stages": stages,
        "cheapest": next((name for name, each in stages.items() if each["fits"]), None),
        "steps": steps,
        "steps_assumed": not cfg.steps,
        "tokens": tokens,
        "hidden_bytes_per_token": taps * drawn.output.shape[1] * kept.itemsize,
        "flops": rate,
        "operations_per_step": step,
        "seconds_per_step": rate and step / rate,
        "regenerate_operations": again,
        "regenerate_seconds": rate and again / (rate * gpus),
    }
    return Forecast(figures, needs)
