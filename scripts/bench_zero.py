"""Measure memory and step time per rank of ZeRO 0 to 3, and hold the cost model to it.

    python scripts/bench_zero.py --out benchmarks/zero.json    # two ranks on a CPU, some minutes
    python scripts/bench_zero.py --table                       # what 8 GPUs of 80 GB can train

A random Llama is trained whole with AdamW through the project's own engine. Every stage runs
twice in processes of its own: once with an allocator that returns memory at once, for the peak of
resident memory above that of the loaded libraries and for the tensors that are alive after a
backward pass, by kind; once as usual, for the time. The model of costs (training/capacity.py)
knows sizes only for memory; for time it gets three speeds of this machine, measured in the same
processes without DeepSpeed: arithmetic of the plain objective, an all-reduce, Adam on one tensor.

DeepSpeed's buckets are made smaller than its defaults (--bucket), as these would hold all of so
small a model; the cost model gets the same settings. Both ranks share this machine, memory
bandwidth included: with fewer than two free cores the times mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specheads.config import DataConfig, ModelConfig, TrainConfig
from specheads.system import dist
from specheads.system.hardware import environment, peak_memory, pin_threads
from specheads.training.capacity import (
    A100_OF_8,
    ADAM_TRAFFIC,
    LLAMA_7B,
    LLAMA_13B,
    LLAMA_70B,
    RESERVED,
    SPREADS,
    Machine,
    Shape,
    Spread,
    load_of,
    need,
    seconds,
)

MB = 1e6
CPU = torch.device("cpu")
SMALL = 65_536  # bytes; tensors below are not told apart
KINDS = ("frozen", "lora", "full")
BASES = {"7B": LLAMA_7B, "13B": LLAMA_13B, "70B": LLAMA_70B}


def shape_of(settings: dict[str, Any]) -> Shape:
    """Return the sizes of the model that is measured."""
    hidden, intermediate = settings["hidden"], settings["intermediate"]
    return Shape(hidden, settings["layers"], intermediate, hidden, settings["vocab"])


def build(settings: dict[str, Any]) -> LlamaForCausalLM:
    """Return the model, the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=settings["hidden"],
        num_hidden_layers=settings["layers"],
        intermediate_size=settings["intermediate"],
        num_attention_heads=settings["hidden"] // 64,
        vocab_size=settings["vocab"],
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(getattr(torch, settings["dtype"]))


def run_config(settings: dict[str, Any], stage: int, run_dir: str) -> TrainConfig:
    """Return the settings of a run under ``stage``; -1 is plain torch."""
    zero = {
        "stage": stage,
        "reduce_bucket_size": settings["bucket"],
        "stage3_max_live_parameters": settings["bucket"],
        "stage3_max_reuse_distance": settings["bucket"],
        "stage3_prefetch_bucket_size": settings["bucket"] // 4,
    }
    return TrainConfig(
        run_dir=run_dir,
        model=ModelConfig(dtype=settings["dtype"]),
        data=DataConfig(rows=settings["rows"], seq_len=settings["seq_len"]),
        deepspeed={} if stage < 0 else {"zero_optimization": zero},
    )


def storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Return address -> bytes of what ``tensors`` lie in, each once."""
    found: dict[int, int] = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            if storage.nbytes() >= SMALL:
                found[storage.data_ptr()] = storage.nbytes()
    return found


def live_tensors(engine: Any, model: torch.nn.Module) -> dict[str, int]:
    """Return kind -> bytes of all tensors that are alive, at the end of a backward pass."""
    inner = getattr(engine, "engine", None)
    outer = getattr(inner, "optimizer", None)
    basic: Any = getattr(outer, "optimizer", outer) if inner else engine.optimizers[0]
    parameters = list(model.parameters())
    weights = storages([*parameters, *(getattr(p, "ds_tensor", None) for p in parameters)])
    stepped = [p for group in basic.param_groups for p in group["params"]]
    moments = [value for state in basic.state.values() for value in state.values()]
    gradients: list[Any] = [p.grad for p in (*parameters, *stepped)]
    gradients += [getattr(p, "grad_accum", None) for p in parameters]
    gradients.append(getattr(outer, "grad_partitions_flat_buffer", None))
    for name in ("averaged_gradients", "all_grad_tensors"):
        for part in (getattr(outer, name, None) or {}).values():
            gradients += part if isinstance(part, list) else [part]
    kinds = {
        "weights": weights,
        "moments": storages(moments),
        "copied weights": storages(stepped),
        "gradients": storages(gradients),
        "other": storages(o for o in gc.get_objects() if issubclass(type(o), Tensor)),
    }
    seen: set[int] = set()
    total: dict[str, int] = {}
    for kind, found in kinds.items():
        total[kind] = sum(size for address, size in found.items() if address not in seen)
        seen |= found.keys()
    return total


class Work:
    """One rank's training: model, engine and a batch that never changes."""

    def __init__(self, settings: dict[str, Any], stage: int, run_dir: str) -> None:
        from specheads.training.objectives import LMObjective

        self.model = build(settings)
        self.cfg = run_config(settings, stage, run_dir)
        self.objective = LMObjective(self.model)
        rows, length = settings["rows"], settings["seq_len"]
        generator = torch.Generator().manual_seed(dist.rank())
        ids = torch.randint(settings["vocab"], (rows, length), generator=generator)
        self.batch: dict[str, Any] = {
            "input_ids": ids,
            "labels": ids,
            "position_ids": torch.arange(length).expand(rows, -1),
            "segment_ids": torch.ones_like(ids),
            "num_valid": torch.tensor([float(dist.world_size() * rows * (length - 1))]),
        }
        self.engine: Any = None

    def open(self) -> None:
        """Wrap the objective as a run does."""
        from specheads.training.loop import open_engine
        from specheads.training.schedule import param_groups

        groups = param_groups(self.cfg.optim, base=(self.model, 1e-5))
        self.engine = open_engine(self.objective, groups, self.cfg)

    def backward(self) -> None:
        """Run forward and backward of the micro-batch."""
        loss, _ = self.engine.forward(self.batch)
        self.engine.backward(loss, last=True)

    def plain(self) -> None:
        """Forward and backward without any engine."""
        loss, _ = self.objective(self.batch)
        loss.backward()
        for parameter in self.model.parameters():
            parameter.grad = None


def clock(run: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds of ``run``, which all ranks begin together."""
    found = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def measure_memory(settings: dict[str, Any], stage: int, run_dir: str) -> dict[str, Any]:
    """Return peak resident memory above the libraries' own, and live tensors by kind."""
    start_engine()
    # code that is loaded with its first use is not the model's
    toy = {"hidden": 64, "intermediate": 64, "layers": 1, "vocab": 64, "seq_len": 8}
    Work({**settings, **toy}, -1, run_dir).plain()
    gc.collect()
    peak_memory(CPU, reset=True)
    loaded = peak_memory(CPU)
    work = Work(settings, stage, run_dir)
    work.open()
    wrapped = peak_memory(CPU)
    alive: dict[str, int] = {}
    for _ in range(2):  # the optimizer's state comes into being with the first
        peak_memory(CPU, reset=True)
        work.backward()
        after_backward = peak_memory(CPU)
        alive = live_tensors(work.engine, work.model)
        work.engine.step(1.0)
    return {
        "peak": peak_memory(CPU) - loaded,
        "peak_backward": after_backward - loaded,
        "peak_loading": wrapped - loaded,
        "alive": alive,
    }


def measure_time(settings: dict[str, Any], stage: int, run_dir: str) -> dict[str, Any]:
    """Return seconds of steps, and this machine's speeds without DeepSpeed."""
    start_engine()
    repeats = settings["repeats"]
    work = Work(settings, stage, run_dir)
    plain = clock(work.plain, repeats)
    flat = torch.zeros(4_000_000, requires_grad=True)
    flat.grad = torch.ones_like(flat)
    adam = torch.optim.AdamW([flat], lr=1e-3)
    stepping = clock(adam.step, repeats)
    link = 0.0
    if dist.world_size() > 1:
        bucket = torch.zeros(4_000_000)
        sent = 2 * (dist.world_size() - 1) / dist.world_size() * 4 * bucket.numel()
        link = sent / clock(lambda: torch.distributed.all_reduce(bucket), repeats)
    del flat, adam
    work.open()
    found: list[list[float]] = []
    for _ in range(repeats + 1):
        dist.barrier()
        begin = time.perf_counter()
        work.backward()
        middle = time.perf_counter()
        work.engine.step(1.0)
        found.append([middle - begin, time.perf_counter() - middle])
    return {
        "seconds": [sum(pair) for pair in found[1:]],
        "seconds_backward": [pair[0] for pair in found[1:]],
        "plain_seconds": plain,
        "adam_bytes_per_second": ADAM_TRAFFIC * 4_000_000 / stepping,
        "link_bytes_per_second": link,
    }


def start_engine() -> None:
    """Load what a run loads, before anything is measured."""
    if dist.world_size() > 1:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    torch.mm(torch.ones(256, 256), torch.ones(256, 256))


def worker(job: dict[str, Any]) -> None:
    """Measure one thing on this rank and write it."""
    pin_threads(job["settings"]["threads"])
    measure = {"memory": measure_memory, "time": measure_time}[job["what"]]
    found = measure(job["settings"], job["stage"], job["folder"])
    Path(job["folder"], f"rank{dist.rank()}.json").write_text(json.dumps(found))
    dist.shutdown()


def on_ranks(settings: dict[str, Any], stage: int, what: str) -> list[dict[str, Any]]:
    """Start the ranks, wait, and return what each of them measured."""
    world = settings["ranks"] if stage >= 0 else 1
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": str(settings["threads"]),
        "MASTER_ADDR": "localhost",
    }
    if what == "memory":  # freed blocks go back at once, so that resident memory is memory in use
        environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        environ["MASTER_PORT"] = str(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        job = json.dumps({"settings": settings, "stage": stage, "what": what, "folder": folder})
        processes = []
        for rank in range(world):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
            processes.append(
                subprocess.Popen(
                    [sys.executable, __file__, "--worker", job],
                    env={**environ, **{key: str(value) for key, value in own.items()}},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        try:
            said = [process.communicate(timeout=settings["patience"])[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(process.returncode for process in processes):
            raise SystemExit(f"stage {stage}, {what}: a rank failed\n" + "\n".join(said)[-6000:])
        return [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(world)]


def predict(settings: dict[str, Any], stage: int, machine: Machine | None) -> dict[str, Any]:
    """Return what the cost model says of a stage."""
    size = getattr(torch, settings["dtype"]).itemsize
    tokens = settings["rows"] * settings["seq_len"]
    load = load_of(
        shape_of(settings),
        "full",
        tokens=tokens,
        size=size,
        num_heads=0,
        own_heads=False,
        checkpointed=False,
        seq_len=settings["seq_len"],
        chunk=max(256, 2**23 // settings["vocab"]),
    )
    world = settings["ranks"] if stage >= 0 else 1
    spread = Spread.from_config(run_config(settings, stage, "").deepspeed)
    found = need(load, spread, world, temporaries=2)
    told: dict[str, Any] = {
        "peak": found.training,
        "loading": found.loading,
        "states": found.states,
        **{key: value for key, value in vars(found).items() if value},
    }
    if machine:
        times = seconds(load, spread, world, machine)
        told |= {
            "seconds": times.total,
            "seconds_computing": times.computing,
            "seconds_communication": times.communication,
            "seconds_optimizer": times.optimizer,
            "flops": load.flops,
        }
    return told


def speeds(settings: dict[str, Any], rows: list[dict[str, Any]]) -> Machine | None:
    """Return this machine's speeds, medians over all processes that measured them."""
    timed = [rank for row in rows for rank in row.get("times", []) if row["stage"] >= 0]
    if not timed:
        return None
    flops = predict(settings, 0, Machine("", 0, 1, 1, 1))["flops"]
    return Machine(
        "this machine",
        memory=0,
        flops=flops / statistics.median(rank["plain_seconds"] for rank in timed),
        link=statistics.median(rank["link_bytes_per_second"] for rank in timed),
        bandwidth=statistics.median(rank["adam_bytes_per_second"] for rank in timed),
    )


def summarise(settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Add the medians, the prediction and their ratio to every row."""
    machine = speeds(settings, rows)
    for row in rows:
        row["predicted"] = told = predict(settings, row["stage"], machine)
        ranks = row.get("memory", [])
        if ranks:
            row["peak"] = max(rank["peak"] for rank in ranks)
            row["states"] = max(sum(rank["alive"].values()) for rank in ranks)
            row["peak_ratio"] = told["peak"] / row["peak"]
        if "times" in row:
            row["seconds"] = statistics.median(
                max(step) for step in zip(*(rank["seconds"] for rank in row["times"]), strict=True)
            )
            if machine and row["stage"] >= 0:
                row["seconds_ratio"] = told["seconds"] / row["seconds"]


def report_table(rows: list[dict[str, Any]]) -> str:
    """Lay the rows out as text."""
    kinds = ("weights", "moments", "copied weights", "gradients", "other")
    titles = ["ZeRO", *kinds, "peak MB", "predicted", "ratio", "s/step", "predicted", "ratio"]
    lines = [titles]
    for row in rows:
        alive = row["memory"][0]["alive"] if row.get("memory") else {}
        cells = [format(alive[kind] / MB, ".0f") if alive else "" for kind in kinds]
        told = row["predicted"]
        for key, unit, spec in (("peak", MB, ".0f"), ("seconds", 1.0, ".3f")):
            if key in row:
                cells += [format(row[key] / unit, spec)]
                cells += [format(told[key] / unit, spec) if key in told else ""]
                ratio = row.get(f"{key}_ratio")
                cells += [format(ratio, ".2f") if ratio else ""]
            else:
                cells += ["", "", ""]
        name = "plain torch, 1" if row["stage"] < 0 else str(row["stage"])
        lines.append([name, *cells])
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def fits_table(machine: Machine = A100_OF_8, ranks: int = 8, tokens: int = 2048) -> str:
    """Return what ``ranks`` GPUs can train, by the cost model alone.

    A cell is the peak of a step per rank in GB. ``x`` does not fit; ``load`` would fit once it is
    divided, but every rank loads the whole base before that; ``host`` lacks main memory.
    """
    names = list(SPREADS)
    titles = ["base", "trained", *("none, 1 GPU" if n == "none" else n for n in names), "s/step"]
    lines = [titles]
    for base, shape in BASES.items():
        for kind in KINDS:
            cells, fitting = [], []
            for name in names:
                world = 1 if name == "none" else ranks
                wide = 4 if name == "none" else 2  # plain torch leaves heads and adapters float32
                load = load_of(shape, kind, tokens=tokens, head_size=wide)
                found = need(load, SPREADS[name], world)
                cell = f"{found.training / 1e9:.0f}"
                if found.training > machine.memory - RESERVED:
                    cell += " x"
                elif not found.fits(machine.memory):
                    cell += " load"
                elif found.host > machine.host_memory:
                    cell += " host"
                elif name != "none":
                    fitting.append((seconds(load, SPREADS[name], world, machine).total, name))
                cells.append(cell)
            best = "{:.2f} {}".format(*min(fitting)) if fitting else "-"
            lines.append([base, kind, *cells, best])
    return markdown(lines)


def markdown(lines: list[list[str]]) -> str:
    """Lay cells out as a table that is also easy to read as text."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rows = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    return "\n".join([rows[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *rows[1:]])


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, measure, print and write; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="print what fits, measure nothing")
    parser.add_argument("--stages", type=int, nargs="+", default=[-1, 0, 1, 2, 3], help="-1: torch")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--intermediate", type=int, default=1408)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=1, help="of a micro-batch")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--bucket", type=int, default=4_000_000, help="numbers; 5e8 in DeepSpeed")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps; 0: memory only")
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--patience", type=int, default=900, help="seconds for one measurement")
    parser.add_argument("--out", type=Path, help="write the JSON there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.worker:
        worker(json.loads(args.worker))
        return 0
    if args.table:
        print(fits_table())
        return 0
    kept = ("table", "worker", "out", "stages")
    settings = {key: value for key, value in vars(args).items() if key not in kept}
    print(f"{shape_of(settings).parameters / 1e6:.1f} M parameters, {args.ranks} ranks")
    rows: list[dict[str, Any]] = []
    for stage in args.stages:
        row: dict[str, Any] = {"stage": stage, "memory": on_ranks(settings, stage, "memory")}
        if args.repeats:
            row["times"] = on_ranks(settings, stage, "time")
        rows.append(row)
        print(f"stage {stage} measured", file=sys.stderr, flush=True)
    summarise(settings, rows)
    report = {"environment": environment(), "settings": settings, "rows": rows}
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(report_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
