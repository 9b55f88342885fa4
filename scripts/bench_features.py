"""Measure training of heads from the feature cache beside training that runs the base.

    python scripts/bench_features.py --out benchmarks/features.json

Both sides go through the training loop's own parts (batches, gather, forward, backward, clipping,
AdamW), on the same batches in the same order, in one process, block after block in turn; the cached
side's time includes reading the cache. The base's forward pass is clocked inside the online step
(t_base); t_heads is the rest of that step. Without the base a step could be 1 + t_base / t_heads
times as fast; the aim is 0.9 of that, so more than 3 where t_base / t_heads exceeds 2.5.

tinycode is the embedded model with heads of their own matrices; deep is a random model of many
layers with small heads. The documents are random tokens: no time depends on them. The cache is read
from the system's page cache, since it has just been written. On a machine that is not idle, trust
the processor time (with --threads 1) rather than the clock.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import harness
import numpy as np
import torch
from transformers import PreTrainedModel

from specheads.config import DataConfig, OptimConfig, TrainConfig
from specheads.data.chat import Encoded
from specheads.data.pack import Mapped, PackedBatches
from specheads.data.teacher_cache import TeacherCache, cached_batches, plan_features, write_cache
from specheads.models.base import load_base_model
from specheads.models.heads import MedusaHeads
from specheads.models.output import output_layer
from specheads.system import hardware
from specheads.training.engine import TorchEngine, param_groups
from specheads.training.loop import gather, run_micro_batches
from specheads.training.objectives import HeadsObjective

SHARE = 0.9  # of the speed that is possible: the aim
SIDES = ("online", "cached")
KINDS = ("seconds", "processor_seconds")


@dataclass
class Settings:
    """Sizes, and what is measured.

    Attributes:
        rank: of the deep model's low-rank matrices
        steps: of a block
        repeats: blocks per side
        warmup: steps before the first block
        folder: of the caches; default: temporary
        threads: 0: all
        out: write the JSON there
    """

    bases: tuple[Literal["tinycode", "deep"], ...] = ("tinycode", "deep")
    deep_layers: int = 16
    deep_hidden: int = 256
    deep_vocab: int = 1024
    rank: int = 64
    heads: int = 4
    rows: int = 8
    seq_len: int = 512
    documents: int = 400
    steps: int = 4
    repeats: int = 9
    warmup: int = 2
    features_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    folder: Path | None = None
    threads: int = 0
    seed: int = 0
    out: Path | None = None


def clocked(function: Callable[..., Any], times: list[list[float]]) -> Callable[..., Any]:
    """Return ``function``, whose calls add wall-clock and processor seconds to ``times``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        begin = now()
        result = function(*args, **kwargs)
        times.append([b - a for a, b in zip(begin, now(), strict=True)])
        return result

    return run


def now() -> list[float]:
    """Return both times, when everything that was started is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return [time.perf_counter(), time.process_time()]


class Side:
    """Heads in training, online or from the cache.

    Attributes:
        inner: times of the calls in a step that are clocked by themselves.
        steps: of every step both times, as a whole (``step``) and of that part (``inner``).
    """

    def __init__(self, base: PreTrainedModel, batches: Any, lm_head: str, given: Settings) -> None:
        torch.manual_seed(given.seed)
        self.batches, self.device = batches, base.device
        output = output_layer(base)
        vocab, hidden = output.weight.shape
        low_rank = {"rank": given.rank} if lm_head == "low_rank" else {}
        heads = MedusaHeads(given.heads, 1, hidden, vocab, lm_head, **low_rank).to(self.device)
        heads.init_from_output(output.weight)
        run_base = None if isinstance(batches, Mapped) else base
        self.objective = HeadsObjective(run_base, heads, train_base=False, output=output)
        data = DataConfig(seq_len=given.seq_len, rows=given.rows)
        cfg = TrainConfig(run_dir="unused", data=data, optim=OptimConfig(lr=1e-3))
        self.engine = TorchEngine(self.objective, param_groups(cfg.optim, heads=(heads, 1e-3)), cfg)
        self.inner: list[list[float]] = []
        self.losses: list[float] = []
        self.tokens = 0.0
        self.steps: list[dict[str, list[float]]] = []

    def step(self) -> None:
        """Train one step."""
        self.inner.clear()
        whole: list[list[float]] = []
        clocked(self._step, whole)()
        inner = [sum(each) for each in zip(*self.inner, strict=True)]
        self.steps.append({"step": whole[0], "inner": inner})

    def _step(self) -> None:
        micro, tokens = gather(self.batches, 1, self.objective.num_heads, self.device)
        metrics, *_ = run_micro_batches(self.engine, micro, lambda: False)
        self.engine.step(1.0)
        self.losses.append(metrics["loss"])
        self.tokens += tokens


def random_documents(given: Settings, vocab: int) -> list[Encoded]:
    """Return documents of random tokens, all learned, of a few tokens up to a row."""
    rng = np.random.default_rng(given.seed)
    lengths = np.clip(rng.lognormal(4.5, 0.8, given.documents), 8, given.seq_len).astype(int)
    drawn = [rng.integers(0, vocab, length, dtype=np.int32) for length in lengths]
    return [Encoded(f"d{i}", ids, ids) for i, ids in enumerate(drawn)]


def make_base(name: str, given: Settings) -> PreTrainedModel:
    """Return the embedded model, or a random one of the given sizes."""
    device = hardware.pick_device()
    if name == "tinycode":
        return load_base_model("tinycode", dtype="float32", device=device)
    model = harness.llama(given.deep_vocab, given.deep_hidden, given.deep_layers).eval()
    return model.to(device)


def measure(name: str, folder: Path, given: Settings) -> dict[str, Any]:
    """Return everything about one base model."""
    lm_head = "own" if name == "tinycode" else "low_rank"
    base = make_base(name, given)
    vocab, hidden = output_layer(base).weight.shape
    documents = random_documents(given, vocab)
    of_rows = {"seq_len": given.seq_len, "rows": given.rows}

    batches = partial(PackedBatches, documents, seed=given.seed, pad_token_id=0, **of_rows)

    about = {"base model": name, "computation": "float32, autocast none"}
    plan = plan_features(
        folder / name,
        documents,
        about,
        hidden_size=hidden,
        given_as=base.dtype,
        dtype=given.features_dtype,
    )
    print(f"\n{name}: {plan.describe()}", flush=True)
    begin = time.perf_counter()
    write_cache(plan, documents, base, (given.rows, given.seq_len))
    write_seconds = time.perf_counter() - begin
    features = TeacherCache(plan)
    sides = {
        "online": Side(base, batches(), lm_head, given),
        "cached": Side(base, cached_batches(batches(), features), lm_head, given),
    }
    forward = clocked(base.base_model.forward, sides["online"].inner)
    rows = clocked(features.rows, sides["cached"].inner)
    with patch.object(base.base_model, "forward", forward), patch.object(features, "rows", rows):
        for repeat in range(-1, given.repeats):
            for each in SIDES if repeat % 2 else SIDES[::-1]:
                for _ in range(given.steps if repeat >= 0 else given.warmup):
                    sides[each].step()
            if repeat < 0:
                for each in SIDES:
                    sides[each].steps, sides[each].tokens = [], 0.0
    pairs = zip(*(sides[each].losses for each in SIDES), strict=True)
    return {
        "base": name,
        "parameters": sum(p.numel() for p in base.parameters()),
        "hidden_size": hidden,
        "vocab_size": vocab,
        "lm_head": lm_head,
        "num_heads": given.heads,
        "tokens_per_step": sides["online"].tokens / len(sides["online"].steps),
        "bytes_announced": plan.num_bytes,
        "bytes_on_disk": sum(p.stat().st_size for p in plan.folder.iterdir()),
        "write_seconds": write_seconds,
        "largest_loss_difference": max(abs(a - b) for a, b in pairs),
        **{kind: summary(sides, index, given.steps) for index, kind in enumerate(KINDS)},
    }


def summary(sides: dict[str, Side], index: int, block: int) -> dict[str, Any]:
    """Return times, ratio and aim by one of the two clocks.

    Args:
        sides: what was trained.
        index: 0 for the clock, 1 for the processor's time.
        block: steps of a block; a ratio is of two neighbouring blocks.
    """

    def times(side: str, part: str) -> list[float]:
        return [step[part][index] for step in sides[side].steps]

    online, cached, t_base = (
        times("online", "step"),
        times("cached", "step"),
        times("online", "inner"),
    )
    t_heads = [step - base for step, base in zip(online, t_base, strict=True)]
    blocks = [slice(at, at + block) for at in range(0, len(online), block)]
    share = statistics.median(t_base) / statistics.median(t_heads)
    ratio = harness.spread([sum(online[each]) / sum(cached[each]) for each in blocks])
    aim = SHARE * (1 + share)
    return {
        "online": harness.spread(online),
        "cached": harness.spread(cached),
        "reading": harness.spread(times("cached", "inner")),
        "t_base": harness.spread(t_base),
        "t_heads": harness.spread(t_heads),
        "t_base_over_t_heads": share,
        "ratio": ratio,
        "aim": aim,
        "kept": ratio["median"] >= aim,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    given = harness.parse(Settings, argv)
    hardware.pin_threads(given.threads)
    hardware.quiet_loading()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in given.bases:
            rows.append(measure(name, given.folder or Path(temporary), given))
            print(harness.describe(rows[-1]), flush=True)
    harness.write(given.out, harness.report(given, rows=rows))


if __name__ == "__main__":
    main()
