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

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specheads.config import DataConfig, OptimConfig, TrainConfig
from specheads.data.chat import Encoded
from specheads.data.pack import PackedBatches
from specheads.data.teacher_cache import (
    CachedBatches,
    TeacherCache,
    plan_features,
    readable,
    write_cache,
)
from specheads.models.base import load_base_model
from specheads.models.heads import MedusaHeads
from specheads.models.output import output_layer
from specheads.system import hardware
from specheads.training.engine import TorchEngine
from specheads.training.loop import gather, run_micro_batches
from specheads.training.objectives import HeadsObjective
from specheads.training.schedule import param_groups

SHARE = 0.9  # of the speed that is possible: the aim
SIDES = ("online", "cached")


class Clock:
    """Wall-clock and processor seconds of calls, added up since it was last read."""

    def __init__(self) -> None:
        self.total = [0.0, 0.0]

    @staticmethod
    def now() -> list[float]:
        """Return both times, when everything that was started is done."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return [time.perf_counter(), time.process_time()]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add the time spent inside."""
        begin = self.now()
        yield
        self.total = [t + b - a for t, a, b in zip(self.total, begin, self.now(), strict=True)]

    def read(self) -> list[float]:
        """Return both totals and start over."""
        total, self.total = self.total, [0.0, 0.0]
        return total


class TimedFeatures(TeacherCache):
    """Features whose reading is clocked."""

    def rows(self, places: Sequence[Sequence[int]], seq_len: int) -> dict[str, Any]:
        """Read, with the clock running."""
        with self.clock.running():
            return super().rows(places, seq_len)

    clock = Clock()


class Side:
    """Heads in training, online or from the cache."""

    def __init__(self, base: PreTrainedModel, batches: Any, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.batches, self.base = batches, base
        self.device = base.device
        output = output_layer(base)
        vocab, hidden = output.weight.shape
        low_rank = {"rank": args.rank} if args.lm_head == "low_rank" else {}
        heads = MedusaHeads(args.heads, 1, hidden, vocab, args.lm_head, **low_rank).to(self.device)
        heads.init_from_output(output.weight)
        cached = isinstance(batches, CachedBatches)
        self.objective = HeadsObjective(
            None if cached else base, heads, train_base=False, output=output
        )
        cfg = TrainConfig(
            run_dir="unused",
            data=DataConfig(seq_len=args.seq_len, rows=args.rows),
            optim=OptimConfig(lr=1e-3),
            autocast=args.autocast,
        )
        self.engine = TorchEngine(self.objective, param_groups(cfg.optim, heads=(heads, 1e-3)), cfg)
        self.losses: list[float] = []
        self.tokens = 0.0
        self.steps: list[dict[str, list[float]]] = []

    def step(self, inner: Clock) -> None:
        """Train one step; ``inner`` runs in the part that is clocked by itself."""
        clock = Clock()
        inner.read()
        with clock.running():
            micro, tokens = gather(self.batches, 1, self.objective.num_heads, self.device)
            metrics, *_ = run_micro_batches(self.engine, micro, lambda: False)
            self.engine.step(1.0)
        self.losses.append(metrics["loss"])
        self.tokens += tokens
        self.steps.append({"step": clock.read(), "inner": inner.read()})


@contextmanager
def clocked(base: PreTrainedModel) -> Iterator[Clock]:
    """Clock the base's forward passes."""
    clock, begun = Clock(), []

    def begin(*_: Any) -> None:
        begun[:] = clock.now()

    def end(*_: Any) -> None:
        both = zip(clock.total, begun, clock.now(), strict=True)
        clock.total = [t + b - a for t, a, b in both]

    handles = [
        base.base_model.register_forward_pre_hook(begin),
        base.base_model.register_forward_hook(end),
    ]
    yield clock
    for handle in handles:
        handle.remove()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median and quartiles."""
    low, middle, high = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    )
    return {"median": middle, "q25": low, "q75": high}


def random_documents(args: argparse.Namespace, vocab: int) -> list[Encoded]:
    """Return documents of random tokens, all learned, of a few tokens up to a row."""
    rng = np.random.default_rng(args.seed)
    lengths = np.clip(rng.lognormal(4.5, 0.8, args.documents), 8, args.seq_len).astype(int)
    drawn = [rng.integers(0, vocab, length, dtype=np.int32) for length in lengths]
    return [Encoded(f"d{i}", "text", ids, ids) for i, ids in enumerate(drawn)]


def make_base(name: str, args: argparse.Namespace) -> PreTrainedModel:
    """Return the embedded model, or a random one of the sizes of the command line."""
    if name == "tinycode":
        return load_base_model("tinycode", dtype=args.dtype, device=hardware.pick_device())
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=args.deep_vocab,
        hidden_size=args.deep_hidden,
        intermediate_size=8 * args.deep_hidden // 3,
        num_hidden_layers=args.deep_layers,
        num_attention_heads=max(1, args.deep_hidden // 64),
        num_key_value_heads=max(1, args.deep_hidden // 64),
        max_position_embeddings=args.seq_len,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval().to(getattr(torch, args.dtype))
    return model.to(hardware.pick_device())


def measure(name: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return everything about one base model."""
    args = argparse.Namespace(**vars(args))
    args.lm_head = "own" if name == "tinycode" else args.deep_lm_head
    base = make_base(name, args)
    output = output_layer(base)
    documents = random_documents(args, output.weight.shape[0])

    def batches() -> PackedBatches:
        return PackedBatches(
            documents, seq_len=args.seq_len, rows=args.rows, seed=args.seed, pad_token_id=0
        )

    plan = plan_features(
        folder / name,
        documents,
        {"base model": name, "computation": f"{args.dtype}, autocast {args.autocast}"},
        hidden_size=output.weight.shape[1],
        given_as=base.dtype,
        dtype=args.features_dtype,
    )
    print(f"\n{name}: {plan.describe()}", flush=True)
    begin = time.perf_counter()
    write_cache(
        plan,
        documents,
        base,
        (args.rows, args.seq_len),
        autocast=args.autocast == "bfloat16",
    )
    write_seconds = time.perf_counter() - begin
    features = TimedFeatures(plan)
    sides = {
        "online": Side(base, batches(), args),
        "cached": Side(base, CachedBatches(batches(), features), args),
    }
    with clocked(base) as clock:
        inner = {"online": clock, "cached": features.clock}
        for repeat in range(-1, args.repeats):
            for each in SIDES if repeat % 2 else SIDES[::-1]:
                for _ in range(args.steps if repeat >= 0 else args.warmup):
                    sides[each].step(inner[each])
            if repeat < 0:
                for side in sides.values():
                    side.steps, side.tokens = [], 0.0
    differences = [
        abs(a - b) for a, b in zip(sides["online"].losses, sides["cached"].losses, strict=True)
    ]
    row: dict[str, Any] = {
        "base": name,
        "parameters": sum(p.numel() for p in base.parameters()),
        "hidden_size": plan.settings["hidden_size"],
        "vocab_size": output.weight.shape[0],
        "lm_head": args.lm_head,
        "num_heads": args.heads,
        "tokens_per_step": sides["online"].tokens / len(sides["online"].steps),
        "bytes_announced": plan.num_bytes,
        "bytes_on_disk": sum(p.stat().st_size for p in plan.folder.iterdir()),
        "write_seconds": write_seconds,
        "largest_loss_difference": max(differences),
    }
    for index, kind in enumerate(("seconds", "processor_seconds")):
        row[kind] = summary(sides, index, args.steps)
    return row


def summary(sides: dict[str, Side], index: int, block: int) -> dict[str, Any]:
    """Return times, ratio and aim by one of the two clocks."""
    online, cached = (
        [{name: both[index] for name, both in step.items()} for step in sides[each].steps]
        for each in SIDES
    )
    t_base = [step["inner"] for step in online]
    t_heads = [step["step"] - step["inner"] for step in online]
    blocks = range(0, len(online), block)
    ratios = [
        sum(step["step"] for step in online[at : at + block])
        / sum(step["step"] for step in cached[at : at + block])
        for at in blocks
    ]
    share = statistics.median(t_base) / statistics.median(t_heads)
    ratio = spread(ratios)
    needed = SHARE * (1 + share)
    return {
        "online": spread([step["step"] for step in online]),
        "cached": spread([step["step"] for step in cached]),
        "reading": spread([step["inner"] for step in cached]),
        "t_base": spread(t_base),
        "t_heads": spread(t_heads),
        "t_base_over_t_heads": share,
        "ratio": ratio,
        "aim": needed,
        "kept": ratio["median"] >= needed,
    }


def print_row(row: dict[str, Any]) -> None:
    """Print one base model's figures."""
    print(
        f"{row['base']}: {row['parameters'] / 1e6:.2f} M parameters, d={row['hidden_size']},"
        f" V={row['vocab_size']:,}; {row['num_heads']} heads, matrices {row['lm_head']};"
        f" {row['tokens_per_step']:,.0f} tokens a step\n"
        f"  cache: announced {row['bytes_announced']:,} bytes, on disk {row['bytes_on_disk']:,}"
        f" ({readable(row['bytes_on_disk'])}), written in {row['write_seconds']:.1f} s;"
        f" largest difference of a loss {row['largest_loss_difference']:.1e}"
    )
    for kind, words in (("seconds", "clock"), ("processor_seconds", "processor")):
        found = row[kind]
        online, cached = (row["tokens_per_step"] / found[side]["median"] for side in SIDES)
        print(f"  by {words}: {online:,.0f} tokens/s online, {cached:,.0f} from the cache")
        for name in ("online", "t_base", "t_heads", "cached", "reading"):
            low, middle, high = (1e3 * found[name][key] for key in ("q25", "median", "q75"))
            print(f"    {name:<9}{middle:9.2f} ms/step ({low:.2f}-{high:.2f})")
        ratio = found["ratio"]
        print(
            f"    t_base / t_heads {found['t_base_over_t_heads']:.2f}; cached / online"
            f" {ratio['median']:.2f}x ({ratio['q25']:.2f}-{ratio['q75']:.2f}), aim"
            f" {found['aim']:.2f}{'' if found['kept'] else '; MISSED'}"
        )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bases", nargs="+", default=["tinycode", "deep"])
    parser.add_argument("--deep-layers", type=int, default=16)
    parser.add_argument("--deep-hidden", type=int, default=256)
    parser.add_argument("--deep-vocab", type=int, default=1024)
    parser.add_argument("--deep-lm-head", default="low_rank", choices=["own", "shared", "low_rank"])
    parser.add_argument("--rank", type=int, default=64, help="deep: of low-rank matrices")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--steps", type=int, default=4, help="of a block")
    parser.add_argument("--repeats", type=int, default=9, help="blocks per side")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the first block")
    parser.add_argument("--dtype", default="float32", help="of the base: float32, bfloat16")
    parser.add_argument("--autocast", default="none", choices=["none", "bfloat16"])
    parser.add_argument("--features-dtype", default="auto", help="auto, float32, bfloat16, int8")
    parser.add_argument("--folder", type=Path, help="of the caches; default: temporary")
    parser.add_argument("--threads", type=int, default=0, help="0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the JSON there")
    args = parser.parse_args(argv)
    if unknown := set(args.bases) - {"tinycode", "deep"}:
        parser.error(f"--bases must be among tinycode, deep; got {sorted(unknown)}")
    if args.out and not args.out.parent.is_dir():
        parser.error(f"--out is {args.out}, but there is no folder {args.out.parent}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    args = parse(argv)
    hardware.pin_threads(args.threads)
    hardware.quiet_loading()
    report: dict[str, Any] = {"environment": hardware.environment(), "rows": []}
    print(json.dumps(report["environment"]))
    report["settings"] = {k: str(v) if k == "folder" else v for k, v in vars(args).items()}
    del report["settings"]["out"]
    with tempfile.TemporaryDirectory() as temporary:
        for name in args.bases:
            row = measure(name, args.folder or Path(temporary), args)
            report["rows"].append(row)
            print_row(row)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
