"""The numbers of a run that follow from its base and its data, where nobody has given them.

Recipes leave open what suits one model only (``steps: 0``, ``optim.lr: 0``, ``features.dir: auto``,
``heads.lm_head: auto``, ``heads.num_kept: 0``, ``autocast: auto``); what was measured for a model
stands in its file in conf/model, under ``tuned``. :func:`decide` fills in the rest, once, before
anything is built; a run that is resumed takes what its checkpoint says (:func:`as_decided`),
whatever the rule says then.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from specheads.config import TrainConfig
from specheads.data import teacher_cache
from specheads.data.chat import learned_counts
from specheads.data.pack import GrowingBatches, PackedBatches
from specheads.models.checkpoint import read_config
from specheads.models.output import OutputLayer, with_final
from specheads.system import dist, hardware
from specheads.system.errors import refuse
from specheads.training.setup import heads_of

# key -> the value that leaves it to the rule
OPEN: dict[str, Any] = {
    "steps": 0, "optim.lr": 0, "features.dir": "auto", "heads.lm_head": "auto", "heads.num_kept": 0,
    "autocast": "auto",
}  # fmt: skip

# The anchor, by a trial on SmolLM2-135M (d = 576), not by a sweep: a drafter trained well there
# with AdamW at 1e-3 and Muon at 1e-2, and Hydra heads badly at 6e-3 and 4e-2. That rates fall as
# 1/width is assumed, from the theory of wide networks, as are the bounds.
ANCHOR_LR, ANCHOR_WIDTH = 1e-3, 576
LR_BOUNDS = 1e-4, 3e-3
EPOCHS = 3  # assumed: the heads of the trial learned their data by heart in more
STEPS_BOUNDS = 100, 20_000  # fewer leave no room for warm-up and decay
STREAMED_STEPS = 300  # of records that nobody has counted
COVERED = 0.98  # of the answers' tokens; on 206,000 of SmolLM2's 8,192 tokens are 98.6%
SMALLEST_VOCABULARY = 2_048
DISK_SHARE = 0.25  # of the free room, that stored hidden states may take


def learning_rate(width: int) -> float:
    """Return AdamW's rate for heads on a base of this width, ``ANCHOR_LR * ANCHOR_WIDTH / width``.

    With matrices of size d x d a step of one size in every weight changes what they put out by d
    times as much, and Adam's steps are of one size: so the rate that is stable falls as 1/d (Yang
    et al., arXiv:2203.03466, table 3). Muon's rate is ``optim.muon_ratio`` of it. Kept in
    ``LR_BOUNDS``, to two digits.
    """
    low, high = LR_BOUNDS
    return float(f"{min(high, max(low, ANCHOR_LR * ANCHOR_WIDTH / width)):.1e}")


def steps_for_rows(rows: int, rows_per_step: int) -> int:
    """Return the optimizer steps of ``EPOCHS`` passes over ``rows``, in ``STEPS_BOUNDS``.

    Heads are small beside what they read and learn little after a few passes; more of them teach
    the texts by heart.
    """
    low, high = STEPS_BOUNDS
    return min(high, max(low, math.ceil(EPOCHS * rows / rows_per_step)))


def steps_for_time(minutes: float, seconds_per_step: float) -> int:
    """Return the optimizer steps that ``minutes`` hold, of passes of a measured length; at least 1.

    To be asked once, and given to the run as ``steps``: the schedule's decay needs to know the end,
    and a resumed run the same one. All ranks are told what the first one finds.
    """
    # steps of the optimizer, and evaluations, are not in what was clocked
    return max(1, int(dist.gather_texts(str(int(0.85 * 60 * minutes / seconds_per_step)))[0]))


def draft_vocabulary(counts: NDArray[Any], wanted: int = 0) -> tuple[int, float]:
    """Return how many of the most frequent tokens heads should guess among, and their share.

    The smallest power of two, from ``SMALLEST_VOCABULARY`` on, that covers ``COVERED`` of all
    occurrences. At most a quarter of the vocabulary: what is beyond that costs more to multiply
    than its guesses bring. A vocabulary of which that is too little is taken whole.

    Args:
        counts: [V], how often each token is learned.
        wanted: a size that is given; 0 for none.
    """
    counted = np.sort(counts)[::-1]
    total = max(1, counted.sum())
    size, most = wanted or SMALLEST_VOCABULARY, len(counted) // 4
    if not wanted and most < size:
        return len(counted), 1.0
    while not wanted and 2 * size <= most and counted[:size].sum() < COVERED * total:
        size *= 2
    return size, float(counted[:size].sum() / total)


def decide(cfg: TrainConfig, base: PreTrainedModel, batches: object) -> TrainConfig:
    """Return the settings with what they leave open decided; one line says what and why.

    Args:
        cfg: the run's settings.
        base: the base model, loaded.
        batches: the run's training data.

    Raises:
        ConfigError: if the rule cannot decide: steps of rows that grow.
    """
    heads, open_now = cfg.heads, open_keys(cfg)
    if not open_now:
        return cfg
    weight = base.get_output_embeddings().weight
    (vocab_size, width), output_device = weight.shape, weight.device
    packed = batches if isinstance(batches, PackedBatches) else None
    counts = np.zeros(vocab_size)
    if packed is not None:
        counts = learned_counts(packed.documents, vocab_size)
    found: dict[str, Any] = {}
    said = []
    if "optim.lr" in open_now:
        found["optim.lr"] = learning_rate(width)
        said.append(f"lr {found['optim.lr']:.1e} (width {width})")
    by_data = "steps" in open_now and not cfg.minutes
    if by_data and packed is not None:
        per_step = cfg.data.rows * cfg.optim.accumulation * dist.world_size()
        steps = found["steps"] = steps_for_rows(packed.rows_per_epoch, per_step)
        epochs = f"{steps * per_step / packed.rows_per_epoch:.3g} epochs"
        said.append(f"steps {steps:,} ({epochs} of {int(counts.sum()):,} learned tokens)")
    elif by_data:
        grow = "steps=0 needs rows of one length; give steps=, or data.growth=[]"
        refuse({grow: isinstance(batches, GrowingBatches)})
        found["steps"] = STREAMED_STEPS
        said.append(f"steps {STREAMED_STEPS} (the records are streamed, nobody has counted them)")
    if heads.lm_head == "auto" and heads.start:  # they are what they are
        info = read_config(heads.start)
        found |= {f"heads.{key}": info[key] for key in ("lm_head", "num_kept") if key in info}
    elif heads.lm_head == "auto" or ("pruned" in heads.lm_head and not heads.num_kept):
        kept, share = vocab_size, 1.0
        if packed is not None:
            kept, share = draft_vocabulary(counts, heads.num_kept)
        if kept < vocab_size:
            said.append(f"draft vocabulary {kept:,} ({share:.1%} of the answers' tokens)")
        if not heads.num_kept:
            found["heads.num_kept"] = kept
        if heads.lm_head == "auto":
            found["heads.lm_head"] = "pruned" if kept < vocab_size else "own"
    if "autocast" in open_now:
        dtype = str(hardware.faster_dtype(output_device)).removeprefix("torch.")
        without = dtype == "float32" or cfg.model.dtype == "float16"
        found["autocast"] = "none" if without else dtype  # heads are float32, whatever the base is
        said.append(f"autocast {found['autocast']}")
    if "features.dir" in open_now:
        found["features.dir"], why = _features(_filled(cfg, found), base, packed)
        said.append(f"features.dir {found['features.dir'] or 'none'} ({why})")
    if said and dist.is_main():
        print(f"by rule: {', '.join(said)}", flush=True)
    return _filled(cfg, found)


def _features(
    cfg: TrainConfig, base: PreTrainedModel, packed: PackedBatches | None
) -> tuple[str, str]:
    """Return the folder of stored hidden states beside the run's, or none, and why.

    It is called by what its numbers are made of, base and documents among it, so that runs on the
    same data share one, and other data takes another.
    """
    if packed is None or dist.world_size() > 1:
        return "", "not for rows that stream or grow, nor for several processes"
    output = OutputLayer(base.get_output_embeddings())
    with torch.device("meta"):  # for what they read; nothing is drawn and nothing takes memory
        taps = heads_of(cfg.heads, base, output).taps
    root = Path(cfg.run_dir).parent / "features"
    made_of = teacher_cache.computed_by(cfg.model, cfg.autocast)
    numbers: dict[str, Any] = {"hidden_size": output.weight.shape[1], "given_as": base.dtype}
    numbers |= {"dtype": cfg.features.dtype, "taps": with_final(taps)}
    plan = teacher_cache.plan_features(root / "none", packed.documents, made_of, **numbers)
    folder = root / plan.digest[:12]
    size = teacher_cache.readable(plan.num_bytes)
    free = shutil.disk_usage(next(each for each in root.absolute().parents if each.exists())).free
    if not folder.exists() and plan.num_bytes > DISK_SHARE * free:
        return "", f"{size} is too much for a disk with {teacher_cache.readable(free)} free"
    return str(folder), size


def as_decided(cfg: TrainConfig, settings: Mapping[str, Any]) -> TrainConfig:
    """Return the settings with what they leave open as it was in an earlier start of the run.

    Args:
        cfg: the settings of now.
        settings: of then, ``{"optim.lr": 0.001, ...}``; what they lack stays open.
    """
    return _filled(cfg, {key: settings[key] for key in open_keys(cfg) if key in settings})


def open_keys(cfg: TrainConfig) -> list[str]:
    """Return the keys that the settings leave to the rule, or to the time that a step takes."""
    found = [key for key, value in OPEN.items() if attrgetter(key)(cfg) == value]
    return [*found, "steps", "minutes"] if cfg.minutes else found


def _filled(cfg: TrainConfig, found: Mapping[str, Any]) -> TrainConfig:
    for key, value in found.items():
        section, _, name = key.rpartition(".")
        if section:
            value = replace(getattr(cfg, section), **{name: value})
        cfg = replace(cfg, **{section or name: value})
    return cfg
