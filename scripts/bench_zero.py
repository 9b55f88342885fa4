"""Measure memory and step time per rank of ZeRO 0 to 3, and hold the cost model to it.

    python scripts/bench_zero.py --out benchmarks/zero.json    # two ranks on a CPU, some minutes
    python scripts/bench_zero.py --table                       # what 8 GPUs of 80 GB can train

A random Llama is trained whole with AdamW through the project's own engine. Every stage runs
twice in processes of its own: once with an allocator that returns memory at once, for the peak of
resident memory above that of the loaded libraries and for the tensors that are alive after a
backward pass, by kind; once as usual, for the time. The model of costs (training/plan.py)
knows sizes only for memory; for time it gets three speeds of this machine, measured in the same
processes without DeepSpeed: arithmetic of the plain objective, an all-reduce, Adam on one tensor.

DeepSpeed's buckets are made smaller than its defaults (--bucket), as these would hold all of so
small a model; the cost model gets the same settings. Both ranks share this machine, memory
bandwidth included: with fewer than two free cores the times mean nothing.
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import harness
import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM
from zero_costs import (
    A100_OF_8,
    ADAM_TRAFFIC,
    LLAMA_7B,
    LLAMA_13B,
    LLAMA_70B,
    Brought,
    Machine,
    Shape,
    load_of,
    seconds,
)

from specheads.config import ConfigError, TrainConfig
from specheads.config.compose import composed
from specheads.models.adapters import add_adapter
from specheads.models.output import output_layer
from specheads.system import dist, hardware, heartbeat
from specheads.training import ranks
from specheads.training.deepspeed_engine import need_compiler
from specheads.training.engine import Objective, Spread, param_groups
from specheads.training.forecast import forecast
from specheads.training.loop import open_engine
from specheads.training.objectives import HeadsObjective, LMObjective
from specheads.training.plan import RESERVED, SPREADS, need
from specheads.training.setup import heads_of

SMALL = 65_536  # bytes; tensors below are not told apart
PATIENCE = 900  # seconds for one measurement
NUMBERS = 4_000_000  # of the tensor with which Adam and the link are timed
KINDS = ("frozen", "lora", "full")
BASES = {"7B": LLAMA_7B, "13B": LLAMA_13B, "70B": LLAMA_70B}
# kind -> the recipe that trains so, and what is set beside it
RECIPES = {
    "frozen": ("+recipe=medusa1", "heads=medusa", "heads.lm_head=own", "features.dir="),
    "lora": ("+recipe=medusa2", "heads=medusa", "heads.lm_head=own", "adapter=lora"),
    "full": ("+recipe=pretrain", "tokenizer=byte", "data.growth=[]", "evaluate.every=0"),
}


@dataclass
class Settings:
    """What is trained, and how.

    Attributes:
        table: print what fits, measure nothing
        profile: print where the time of a step goes, by rank 0's profiler, and measure nothing else
        kinds: frozen: heads on a frozen base; lora: and its adapter; full: the base alone, whole
        stages: values of deepspeed; none: plain torch in one process; those with offload are left
            out where there is no compiler
        hidden: a multiple of 64
        rows: of a micro-batch
        bucket: numbers; 5e8 in DeepSpeed
        overlap: whether gradients are sent while others are formed; auto: as DeepSpeed has it
        repeats: timed steps; 0: memory only
        threads: per rank
        out: write the JSON there
    """

    table: bool = False
    profile: bool = False
    kinds: tuple[str, ...] = KINDS
    stages: tuple[str, ...] = tuple(SPREADS)
    ranks: int = 2
    hidden: int = 512
    intermediate: int = 1408
    layers: int = 12
    vocab: int = 8192
    rows: int = 1
    seq_len: int = 256
    bucket: int = 4_000_000
    overlap: Literal["auto", "true", "false"] = "auto"
    repeats: int = 5
    threads: int = 1
    out: Path | None = None


def sizes_of(given: Settings) -> dict[str, Any]:
    """Return the config of the model that is measured."""
    return {
        "vocab_size": given.vocab,
        "hidden_size": given.hidden,
        "intermediate_size": given.intermediate,
        "num_hidden_layers": given.layers,
        "num_attention_heads": given.hidden // 64,
        "num_key_value_heads": given.hidden // 64,
        "tie_word_embeddings": False,
    }


def run_config(given: Settings, kind: str, stage: str, folder: str) -> TrainConfig:
    """Return the settings of a run; its base is described in ``folder``.

    Args:
        given: the sizes.
        kind: one of ``RECIPES``.
        stage: a value of ``deepspeed``.
        folder: where ``config.json`` of the base is, or will be.
    """
    words = [
        *RECIPES[kind],
        *(f"run_dir={folder}", f"deepspeed={stage}", "optim=adamw", "model.dtype=float32"),
        *("device=cpu", "autocast=none", f"data.rows={given.rows}"),
        *(f"data.seq_len={given.seq_len}", f"loss.chunk_size={max(256, 2**22 // given.vocab)}"),
    ]
    if kind == "full":
        words += [f"model.init.{key}={value}" for key, value in sizes_of(given).items()]
    else:
        words += [f"model.name={folder}"]
    if stage != "none":
        zero = {
            "reduce_bucket_size": given.bucket,
            "stage3_max_live_parameters": given.bucket,
            "stage3_max_reuse_distance": given.bucket,
            "stage3_prefetch_bucket_size": given.bucket // 4,
        } | ({} if given.overlap == "auto" else {"overlap_comm": given.overlap})
        words += [f"+deepspeed.zero_optimization.{key}={value}" for key, value in zero.items()]
    return composed("train", TrainConfig, words)


def describe_base(given: Settings, folder: str) -> None:
    """Write ``config.json`` of the model that is measured, and nothing else."""
    LlamaConfig(**sizes_of(given)).save_pretrained(folder)


def storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Return address -> bytes of what ``tensors`` lie in, each once."""
    found: dict[int, int] = {}
    for tensor in tensors:
        # what ran in this process before may have left a compiler's tensors, which lie nowhere, and
        # oneDNN's packed weights, which do not say where
        real = isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor)
        if real and tensor.layout == torch.strided and tensor.device.type in ("cpu", "cuda"):
            storage = tensor.untyped_storage()
            if storage.nbytes() >= SMALL:
                found[storage.data_ptr()] = storage.nbytes()
    return found


def live_tensors(engine: Any, model: torch.nn.Module) -> dict[str, int]:
    """Return kind -> bytes of all tensors that are alive, at the end of a backward pass."""
    gc.collect()  # a circle that nobody holds any more lives until its next round
    inner = getattr(engine, "engine", None)
    outer = getattr(inner, "optimizer", None)
    basic: Any = getattr(outer, "optimizer", outer) if inner else engine.optimizers[0]
    parameters = list(model.parameters())
    weights = storages([*parameters, *(getattr(p, "ds_tensor", None) for p in parameters)])
    stepped = [p for group in basic.param_groups for p in group["params"]]
    stepped += getattr(outer, "fp32_partitioned_groups_flat", [])  # stage 3 steps each in its turn
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
    # one address may hold weights and their flat copy at once: the first kind that has it counts it
    seen, total = set[int](), {}
    for kind, found in kinds.items():
        total[kind] = sum(size for address, size in found.items() if address not in seen)
        seen |= found.keys()
    return total


class Work:
    """One rank's training: model, engine and a batch that never changes."""

    def __init__(self, given: Settings, kind: str, stage: str, folder: str) -> None:
        self.cfg = cfg = run_config(given, kind, stage, folder)
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(LlamaConfig(**sizes_of(given), use_cache=False))
        self.objective: Objective = LMObjective(self.model)
        learning: dict[str, tuple[torch.nn.Module, float]] = {"base": (self.model, 1e-5)}
        if kind != "full":
            if kind == "lora":
                add_adapter(self.model, cfg.adapter)
            output = output_layer(self.model)
            heads = heads_of(cfg.heads, self.model, output)
            tuned = kind == "lora"
            self.objective = HeadsObjective(
                self.model, heads, cfg.loss, train_base=tuned, output=output
            )
            learning = {"heads": (heads, 1e-5)} | (learning if tuned else {})
        self.groups = param_groups(cfg.optim, **learning)
        rows, length, heads_too = given.rows, given.seq_len, self.objective.num_heads
        generator = torch.Generator().manual_seed(dist.rank())
        ids = torch.randint(given.vocab, (rows, length), generator=generator)
        all_rows = dist.world_size() * rows
        valid = [float(all_rows * (length - 1 - ahead)) for ahead in range(heads_too + 1)]
        self.batch: dict[str, Any] = {**harness.batch_of(ids), "num_valid": torch.tensor(valid)}
        self.engine: Any = None

    def open(self) -> None:
        """Wrap the objective as a run does."""
        self.engine = open_engine(self.objective, self.groups, self.cfg)

    def backward(self) -> None:
        """Run forward and backward of the micro-batch."""
        loss, _ = self.engine.forward(self.batch)
        self.engine.backward(loss, last=True)

    def step(self) -> None:
        """Run a whole optimizer step."""
        self.backward()
        self.engine.step(1.0)

    def plain(self) -> None:
        """Forward and backward without any engine."""
        loss, _ = self.objective(self.batch)
        loss.backward()
        for parameter in self.objective.parameters():
            parameter.grad = None


def clock(run: Callable[[], Any], repeats: int) -> list[float]:
    """Return the seconds of calls, which all ranks begin together."""
    found = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return found[1:]


def measure_memory(given: Settings, kind: str, stage: str, folder: str) -> dict[str, Any]:
    """Return peak resident memory above the libraries' own, and live tensors by kind."""
    # code that is loaded with its first use is not the model's
    toy = replace(given, hidden=64, intermediate=64, layers=1, vocab=64, seq_len=8)
    Work(toy, kind, "none", folder).plain()
    gc.collect()
    hardware.peak_memory(harness.CPU, reset=True)
    loaded = hardware.peak_memory(harness.CPU)
    work = Work(given, kind, stage, folder)
    work.open()
    found = {"peak_loading": hardware.peak_memory(harness.CPU) - loaded}
    for _ in range(2):  # the optimizer's state comes into being with the first
        hardware.peak_memory(harness.CPU, reset=True)
        work.backward()
        found["peak_backward"] = hardware.peak_memory(harness.CPU) - loaded
        alive = live_tensors(work.engine, work.objective)
        work.engine.step(1.0)
    return {"peak": hardware.peak_memory(harness.CPU) - loaded, **found, "alive": alive}


def measure_time(given: Settings, kind: str, stage: str, folder: str) -> dict[str, Any]:
    """Return seconds of steps, and this machine's speeds without DeepSpeed."""
    work = Work(given, kind, stage, folder)
    plain = clock(work.plain, given.repeats)
    flat = torch.zeros(NUMBERS, requires_grad=True)
    flat.grad = torch.ones_like(flat)
    adam = torch.optim.AdamW([flat], lr=1e-3)
    stepping = statistics.median(clock(adam.step, given.repeats))
    link, world = 0.0, dist.world_size()
    if world > 1:
        bucket, sent = torch.zeros(NUMBERS), 2 * (world - 1) / world * 4 * NUMBERS
        reducing = clock(lambda: torch.distributed.all_reduce(bucket), given.repeats)
        link = sent / statistics.median(reducing)
    del flat, adam
    work.open()
    return {
        "seconds": clock(work.step, given.repeats),
        "plain_seconds": statistics.median(plain),
        "adam_bytes_per_second": ADAM_TRAFFIC * NUMBERS / stepping,
        "link_bytes_per_second": link,
    }


# names of torch's operators and of gloo's by what they do; the rest is arithmetic
MOVES = {
    f"aten::{name}"
    for name in ("copy_", "_to_copy", "cat", "narrow", "clone", "zero_", "fill_", "empty", "zeros")
}


def measure_profile(given: Settings, kind: str, stage: str, folder: str) -> dict[str, Any]:
    """Return seconds of a step by what the main thread and the group's threads do."""
    work = Work(given, kind, stage, folder)
    work.open()
    step = statistics.median(clock(work.step, given.repeats))
    with profile(activities=[ProfilerActivity.CPU]) as found:
        begin = time.perf_counter()
        for _ in range(given.repeats):
            work.step()
        wall = (time.perf_counter() - begin) / given.repeats
    parts = {"communication": 0.0, "copies": 0.0, "optimizer": 0.0, "arithmetic": 0.0}
    for event in found.key_averages():
        name, seconds = event.key, event.self_cpu_time_total / 1e6 / given.repeats
        if name.startswith(("gloo:", "c10d::", "record_param_comms")):
            parts["communication"] += seconds
        elif any(each in name for each in ("adam", "foreach", "addcdiv", "lerp", "sqrt")):
            parts["optimizer"] += seconds
        elif name in MOVES:
            parts["copies"] += seconds
        else:
            parts["arithmetic"] += seconds
    return {"step": step, "profiled": wall, **parts}


def worker(given: dict[str, Any], kind: str, stage: str, what: str, folder: str) -> None:
    """Measure one thing on this rank and write it."""
    settings = Settings(**given)
    hardware.pin_threads(settings.threads)
    if dist.world_size() > 1:  # what a run loads is there before anything is measured
        ranks.join(run_config(settings, kind, stage, folder))
        if stage.endswith("offload"):
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            DeepSpeedCPUAdam([torch.zeros(8, requires_grad=True)]).step()
    torch.mm(torch.ones(256, 256), torch.ones(256, 256))
    parts = {"memory": measure_memory, "time": measure_time, "profile": measure_profile}
    with heartbeat.together():
        found = parts[what](settings, kind, stage, folder)
        Path(folder, f"rank{dist.rank()}.json").write_text(json.dumps(found))


def on_ranks(given: Settings, kind: str, stage: str, what: str) -> list[dict[str, Any]]:
    """Start the ranks, wait, and return what each of them measured.

    Raises:
        SystemExit: with what they printed, if one fails or they take too long.
    """
    world = given.ranks if stage != "none" else 1
    environ = {**os.environ, "OMP_NUM_THREADS": str(given.threads), "PYTHONPATH": str(harness.ROOT)}
    environ |= harness.RETURNING if what == "memory" else {}
    launcher = ["-m", "specheads.torchrun", "--standalone", f"--nproc-per-node={world}"]
    with tempfile.TemporaryDirectory() as folder:
        job = json.dumps([{**vars(given), "out": None}, kind, stage, what, folder])
        process = subprocess.Popen(
            [sys.executable, *launcher, harness.__file__, "bench_zero", "worker", job],
            env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            said = process.communicate(timeout=PATIENCE)[0]
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher ends its ranks
            said = process.communicate()[0]
        if process.returncode:
            raise SystemExit(f"{kind}, {stage}, {what}: a rank failed\n{said[-6000:]}")
        return [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(world)]


def shape_of(given: Settings) -> Shape:
    """Return the sizes of the model that is measured."""
    return Shape(
        given.hidden, given.layers, given.intermediate, given.hidden, given.vocab, given.hidden
    )


def load(given: Settings, kind: str) -> Brought:
    """Return what the measured model brings to a rank, for the arithmetic and the traffic of it."""
    return load_of(
        shape_of(given),
        kind,
        tokens=given.rows * given.seq_len,
        seq_len=given.seq_len,
        size=4,
        num_heads=0 if kind == "full" else 4,
        own_heads=kind != "full",
        checkpointed=False,
    )


def predict(given: Settings, kind: str, stage: str, machine: Machine | None) -> dict[str, Any]:
    """Return what ``specheads plan`` says of a stage, and of time what the cost model does."""
    world = given.ranks if stage != "none" else 1
    with tempfile.TemporaryDirectory() as folder:
        describe_base(given, folder)
        cfg = run_config(given, kind, stage, folder)
        needs = forecast(cfg, gpus=world).needs
    spread = Spread.from_config(cfg.deepspeed)
    found = needs["none" if stage == "none" else "as set"]
    states = found.weights + found.gradients + found.optimizer
    # a processor's memory is the host's
    told: dict[str, Any] = {"peak": found.training + found.host, "states": states}
    told |= {key: value for key, value in vars(found).items() if value}
    if machine:
        times = seconds(load(given, kind), spread, world, machine)
        told |= {"seconds": times.total, "flops": load(given, kind).flops}
        told |= {f"seconds_{key}": value for key, value in asdict(times).items()}
    return told


def speeds(given: Settings, rows: list[dict[str, Any]]) -> Machine | None:
    """Return this machine's speeds, medians over all processes that measured them."""
    timed = [rank for row in rows for rank in row.get("times", []) if row["stage"] != "none"]
    if not timed:
        return None
    names = ("plain_seconds", "link_bytes_per_second", "adam_bytes_per_second")
    plain, link, adam = (statistics.median(rank[name] for rank in timed) for name in names)
    flops = load(given, rows[0]["kind"]).flops / plain
    # Adam for offload runs on the same processor
    return Machine(
        "this machine", 0, flops, link, bandwidth=adam, host_link=adam, host_bandwidth=adam
    )


def summarise(given: Settings, rows: list[dict[str, Any]]) -> None:
    """Add the medians, the prediction and their ratio to every row."""
    machines = {
        kind: speeds(given, [row for row in rows if row["kind"] == kind])
        for kind in dict.fromkeys(row["kind"] for row in rows)
    }
    for row in rows:
        machine = machines[row["kind"]]
        row["predicted"] = told = predict(given, row["kind"], row["stage"], machine)
        row["peak"] = max(rank["peak"] for rank in row["memory"])
        row["states"] = max(sum(rank["alive"].values()) for rank in row["memory"])
        row["peak_ratio"] = told["peak"] / row["peak"]
        if "times" in row:  # a step is over when its last rank is
            steps = zip(*(rank["seconds"] for rank in row["times"]), strict=True)
            row["seconds"] = statistics.median(map(max, steps))
            if machine and row["stage"] != "none":
                row["seconds_ratio"] = told["seconds"] / row["seconds"]


def fits_table(machine: Machine = A100_OF_8, ranks: int = 8, tokens: int = 2048) -> str:
    """Return what ``ranks`` GPUs can train, by the cost model alone.

    A cell is the peak of a step per rank in GB. ``x`` does not fit; ``load`` would fit once it is
    divided, but every rank loads the whole base before that; ``host`` lacks main memory.
    """
    names = ["none, 1 GPU" if name == "none" else name for name in SPREADS]
    lines = [["base", "trained", *names, "s/step"]]
    for base, shape in BASES.items():
        for kind in KINDS:
            cells, fitting = [], []
            for name, spread in SPREADS.items():
                world = 1 if name == "none" else ranks
                wide = 4 if name == "none" else 2  # plain torch leaves heads and adapters float32
                load = load_of(shape, kind, tokens=tokens, head_size=wide)
                found = need(load, spread, world)
                cell = f"{found.training / 1e9:.0f}"
                if found.training > machine.memory - RESERVED:
                    cell += " x"
                elif not found.fits(machine.memory):
                    cell += " load"
                elif found.host > machine.host_memory:
                    cell += " host"
                elif name != "none":
                    fitting.append((seconds(load, spread, world, machine).total, name))
                cells.append(cell)
            best = "{:.2f} {}".format(*min(fitting)) if fitting else "-"
            lines.append([base, kind, *cells, best])
    return harness.markdown(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    given = harness.parse(Settings, argv)
    if given.table:
        print(fits_table())
        return
    stages = list(given.stages)
    try:
        need_compiler()
    except ConfigError as error:
        stages = [stage for stage in stages if not stage.endswith("offload")]
        print(f"without offload: {error}", file=sys.stderr)
    print(f"{shape_of(given).parameters / 1e6:.1f} M parameters, {given.ranks} ranks")
    if given.profile:
        for kind in given.kinds:
            for stage in stages:
                found = on_ranks(given, kind, stage, "profile")[0]
                said = ", ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in found.items())
                print(f"{kind:<7} {stage:<6} ms: {said}", flush=True)
        return
    rows: list[dict[str, Any]] = []
    for kind in given.kinds:
        for stage in stages:
            memory = on_ranks(given, kind, stage, "memory")
            rows.append({"kind": kind, "stage": stage, "memory": memory})
            if given.repeats:
                rows[-1]["times"] = on_ranks(given, kind, stage, "time")
            print(f"{kind}, {stage} measured", file=sys.stderr, flush=True)
    summarise(given, rows)
    harness.publish(given, rows)


if __name__ == "__main__":
    main()
