"""What training heads would need of a base whose weights are not here: a dry run from config.json.

Nothing is loaded, read or timed. Sizes are counted on modules without memory. Time follows from the
operations of the matrix products and from a rate that is assumed and named; attention's own
products, norms and the reading of data are left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from specheads.config import ConfigError, HeadsConfig, TrainConfig
from specheads.data.teacher_cache import readable
from specheads.losses.fused import rows_at_once
from specheads.models.base import described, torch_dtype
from specheads.models.kinds import Heads
from specheads.models.output import OutputLayer, with_final
from specheads.training.plan import SPREADS, Load, clock, count_parameters, need, tensor_bytes
from specheads.training.setup import heads_of

RANKS, MEMORY = 8, 80e9  # what is planned for where no GPU says otherwise
PEAK, SHARE = 989e12, 0.4  # bfloat16 products of an H100 per second, and what is assumed of them
STEPS = 2000  # where a rule would find their number in the data
# operations per number of a matrix and row: forward; with what its input learns; with it itself
FORWARD, FROZEN, TRAINED = 2, 4, 6


def operations(heads: Heads, rows: int, seq_len: int) -> float:
    """Return the operations of a training step of ``rows`` rows in the heads' matrix products.

    Heads that guess from some positions of a row, ``heads.anchors``, run their layers there, once
    for every head; what joins the taps runs at every position, as other heads do.
    """
    everywhere = rows * seq_len
    anchors = rows * min(heads.anchors, seq_len) if heads.anchors else everywhere
    shared = heads.one_matrix or "shared" in heads.lm_head
    total = 0.0
    for name, weight in cast(nn.Module, heads).named_parameters():
        if weight.dim() != 2 or (shared and "lm_head" in name):
            continue
        times = anchors * heads.num_heads if heads.anchors else everywhere
        if heads.anchors and name.startswith("fc."):
            times = everywhere
        elif name.startswith("inject"):  # makes all slots of an anchor at once
            times = anchors
        total += TRAINED * weight.numel() * times
    if shared:  # of one matrix every head makes its products; it learns where it is their own
        each = TRAINED if "shared" not in heads.lm_head else FROZEN
        total += each * heads.num_outputs * heads.hidden_size * anchors * heads.num_heads
    return total


def forecast(cfg: TrainConfig) -> str:
    """Return the lines of a dry run for a base of which only config.json is known.

    Raises:
        ConfigError: if the recipe trains something else than heads on a frozen base.
    """
    if cfg.recipe != "medusa1":
        raise ConfigError(
            f"model.name={cfg.model.name} holds config.json and no weights, from which recipes that"
            f" train heads alone can be planned; recipe={cfg.recipe} needs model.safetensors there"
        )
    dtype = torch_dtype(cfg.model.dtype)
    base: Any = described(cfg.model.name)
    base.to(dtype)
    with torch.device("meta"):
        output = OutputLayer(base.get_output_embeddings())
        heads = heads_of(_sized(cfg.heads, output), base, output)
    steps, rows = cfg.steps or STEPS, cfg.data.rows * cfg.optim.accumulation
    tokens = steps * rows * cfg.data.seq_len * RANKS
    stored = with_final(heads.taps)
    given = dtype if cfg.features.dtype == "auto" else torch_dtype(cfg.features.dtype)
    per_token = len(stored) * heads.hidden_size * given.itemsize
    rate = RANKS * PEAK * SHARE
    inner = count_parameters(base.base_model) - base.get_input_embeddings().weight.numel()
    base_time = FORWARD * inner * tokens / rate
    heads_time = steps * RANKS * operations(heads, rows, cfg.data.seq_len) / rate
    base_bytes, trained = tensor_bytes(base.parameters()), count_parameters(cast(nn.Module, heads))
    logits = 4.0 * heads.num_outputs * min(rows * cfg.data.seq_len, rows_at_once(output.weight))
    load = Load(
        trained={4: trained},
        frozen=count_parameters(base),
        frozen_bytes=base_bytes,
        logits=logits,
        accumulation=cfg.optim.accumulation,
        outer=output.weight.numel(),
    )
    return "\n".join(
        [
            f"planned from {cfg.model.name}/config.json alone: nothing was loaded, read or timed",
            f"base: {count_parameters(base) / 1e6:,.0f} M parameters, {readable(base_bytes)}",
            f"heads: {trained / 1e6:,.1f} M parameters, of {heads.num_outputs:,} tokens",
            f"memory of each of {RANKS} GPUs of {MEMORY / 1e9:.0f} GB with AdamW, activations left"
            f" out: {_memory(load)}",
            f"tokens: {tokens:,} positions in {steps:,} steps{'' if cfg.steps else ' (assumed)'} of"
            f" {rows} x {cfg.data.seq_len} on each of {RANKS} GPUs",
            f"hidden states: {len(stored)} taps x {heads.hidden_size:,} as"
            f" {str(given).removeprefix('torch.')}, {per_token:,} bytes per token:"
            f" {readable(per_token * tokens)} if none of these comes twice,"
            f" {readable(per_token * 1e9)} for a billion",
            f"time on {RANKS} GPUs, at {SHARE:.0%} of {PEAK / 1e12:.0f} TFLOP/s each (assumed; no"
            f" GPU was timed): base {clock(base_time)}, heads {clock(heads_time)}",
            "online (features.dir=''): no hidden states on disk; the base runs in every step, so"
            f" that training takes {clock(base_time + heads_time)} for every epoch instead of"
            f" {clock(heads_time)}, {1 + base_time / heads_time:.1f} times as long, and"
            f" {readable(base_bytes)} of weights lie on every GPU, or an {RANKS}th of them with"
            " deepspeed=zero3",
        ]
    )


def _sized(wanted: HeadsConfig, output: OutputLayer) -> HeadsConfig:
    """Return settings whose output matrix is decided where data would: the most a rule takes."""
    if wanted.lm_head == "auto":
        wanted = replace(wanted, lm_head="pruned")
    if "pruned" not in wanted.lm_head or wanted.num_kept:
        return wanted
    return replace(wanted, num_kept=1 << (output.weight.shape[0] // 4).bit_length() - 1)


def _memory(load: Load) -> str:
    """Return what a GPU needs with each value of ``deepspeed``."""
    told = []
    for name, spread in SPREADS.items():
        found = need(load, spread, RANKS)
        much = "" if found.fits(MEMORY) else " (too much)"
        size = readable(found.training)
        told.append(f"{name} {size}, while loading {readable(found.peak)}{much}")
    return "; ".join(told)
