"""What a training step of block heads costs per anchor, beside Hydra++ per position.

    python scripts/bench_anchors.py --out benchmarks/anchors.json

Both train from stored hidden states, which are random here: no time depends on them. Steps of all
arms are taken in turn in one process, forward, backward and optimizer. Memory is the most that
tensors occupy at one time in a step, as the allocator counts; how it grows from one number of
anchors to the next is shown beside what the mask of a block layer needs for as many. Operations are
those of products and attention in a step, as torch counts them.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
from torch.utils.flop_counter import FlopCounterMode

from specheads.config import TrainConfig
from specheads.config.compose import composed
from specheads.models.base import load_base_model
from specheads.models.kinds import Heads
from specheads.models.output import output_layer, with_final
from specheads.system import hardware
from specheads.training.engine import TorchEngine, param_groups
from specheads.training.loop import run_micro_batches
from specheads.training.objectives import HeadsObjective
from specheads.training.setup import heads_of

HYDRA = "hydra_plus"


@dataclass
class Settings:
    """Sizes, and what is measured.

    Attributes:
        bases: whose widths and vocabularies are taken
        anchors: per row
        kept: tokens that heads guess among, where the vocabulary is larger
        steps: of each arm
        out: write the JSON there
    """

    bases: tuple[str, ...] = ("tinycode", "smollm2")
    anchors: tuple[int, ...] = (32, 64, 128, 256)
    kept: int = 8192
    num_heads: int = 5
    rows: int = 4
    seq_len: int = 512
    steps: int = 15
    threads: int = 0
    out: Path | None = None


@dataclass(frozen=True)
class Arm:
    """A kind of heads in training.

    Attributes:
        name: of the kind, and how many anchors it has.
        places: positions per step at which it guesses.
        heads: the heads.
        start: makes all that a step needs, and returns the step.
    """

    name: str
    places: int
    heads: Heads
    start: Callable[[], Callable[[], Any]]


def arms(name: str, given: Settings) -> list[Arm]:
    """Return Hydra++, and block heads of both forms with several numbers of anchors."""
    base = load_base_model(name, dtype="bfloat16")
    output = output_layer(base)
    vocab, width = output.weight.shape
    pruned = given.kept < vocab
    size = ("pruned", "shared_pruned") if pruned else ("own", "shared")
    common = ("model=tinycode", "autocast=bfloat16", "steps=100", "optim.lr=1e-3")
    common += (f"heads.num_heads={given.num_heads}", f"heads.num_kept={given.kept}")
    asked = {HYDRA: ("+recipe=hydra", f"heads.lm_head={size[0]}")}
    for kind in ("block", "dspark"):
        for count in given.anchors:
            words = (f"heads.lm_head={size[1]}", f"heads.options.anchors={count}")
            asked[f"{kind} {count}"] = (f"+recipe={kind}", *words)
    found = []
    positions = torch.arange(given.seq_len).expand(given.rows, -1)
    ids = torch.randint(vocab, positions.shape)
    for arm, words in asked.items():
        cfg = composed("train", TrainConfig, [*words, *common, "run_dir=unused"])
        heads = heads_of(cfg.heads, base, output)
        heads.init_from_output(output.weight)
        states = len(with_final(heads.taps)) * width
        batch = {
            "input_ids": ids,
            "labels": ids,
            "position_ids": positions,
            "segment_ids": torch.ones_like(ids),
            "hidden": torch.randn(*ids.shape, states, dtype=torch.bfloat16),
        }
        places = given.rows * (min(heads.anchors, given.seq_len) or given.seq_len)
        heads.read_through(base)
        start = partial(stepping, cfg, heads, output, batch)
        found.append(Arm(arm, places, heads, start))
    return found


def stepping(
    cfg: TrainConfig, heads: Any, output: Any, batch: dict[str, torch.Tensor]
) -> Callable[[], Any]:
    """Return a step of training."""
    objective = HeadsObjective(None, heads, cfg.loss, train_base=False, output=output)
    groups = param_groups(replace(cfg.optim, warmup_steps=0), heads=(heads, cfg.optim.lr))
    engine = TorchEngine(objective.train(), groups, cfg)

    def step() -> None:
        run_micro_batches(engine, [dict(batch)], lambda: False)
        engine.step(1.0)

    return step


def mask_bytes(num_slots: int, places: int, given: Settings) -> int:
    """Return the bytes of the masks of a step: every slot over the row and its group's slots."""
    together = min(32, places // given.rows)
    return places * num_slots * (given.seq_len + together * num_slots)


def measure(name: str, given: Settings) -> list[dict[str, Any]]:
    """Return a row for each arm on a base."""
    torch.manual_seed(0)
    found = arms(name, given)
    times = harness.take_turns({arm.name: arm.start() for arm in found}, given.steps, warmup=2)
    rows = []
    per_position = 0.0
    for arm in found:
        seconds = times[arm.name]["seconds"]
        each = [1e6 * second / arm.places for second in seconds]
        per_position = per_position or statistics.median(each)
        peak, _ = harness.allocator_peak(arm.start)
        slots = getattr(arm.heads, "num_slots", 0)
        step = arm.start()
        with FlopCounterMode(display=False) as counter:
            step()
        rows.append(
            {
                "base": name,
                "arm": arm.name,
                "places_per_step": arm.places,
                "step_ms": harness.spread([1e3 * second for second in seconds]),
                "microseconds_per_place": harness.spread(each),
                "times_hydra_plus": statistics.median(each) / per_position,
                "operations_per_place": counter.get_total_flops() / arm.places,
                "peak_bytes": peak,
                "mask_bytes": mask_bytes(slots, arm.places, given),
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    given = harness.parse(Settings, argv)
    hardware.pin_threads(given.threads)
    hardware.quiet_loading()
    harness.publish(given, [row for name in given.bases for row in measure(name, given)])


if __name__ == "__main__":
    main()
