"""Time a verify step against the memory-bandwidth floor, on random weights of a Llama's shape.

    python scripts/bench_gpu.py --shape 1b --out benchmarks/h200/bench_1b.json
    python scripts/bench_gpu.py --shape 8b --modes eager graphs --out benchmarks/h200/bench_8b.json
    python scripts/bench_gpu.py --shape 8b --parts medusa1_8b --out benchmarks/h200/medusa1_8b.json
    python scripts/bench_gpu.py --shape tiny --device cpu --modes eager --repeats 3

The floor is the time that reading every weight once takes at the bandwidth of a large copy on the
same device. A plain step is the same code with a tree that is its root alone, behind the same
cache of --context tokens. Modes:

eager         what the decoding loop does without compile
compiled      torch.compile of the pass, without graphs
graphs        the eager pass captured by torch.cuda.CUDAGraph over the same cache; what changes from
              step to step (tokens, positions, slots, mask) is copied into its inputs each time, and
              that is part of the time
loop          what the decoding loop does with compile: torch.compile with CUDA graphs of its own

Every step is waited for, as in decoding. Heads are timed apart, on one hidden state. Each result is
written as soon as it is there; compiling an 8b takes minutes per tree.

The part medusa1_8b trains heads on a frozen base of 8 billion random weights with the project's own
engines: tokens per second, MFU (floating-point operations of training/shapes.py over what the data
sheet promises), peak memory, and what the cost model says of it. --shape tiny makes a toy of it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.masking_utils import create_masks_for_generate

from specheads.attention.cache import TreeCache
from specheads.attention.mask import grouped_attention, grouped_attention_traced, tree_attention
from specheads.attention.tree import Tree, default_tree
from specheads.config import ConfigError, DataConfig, ModelConfig, OptimConfig, TrainConfig
from specheads.models.forward import ModelPass, run_compiled
from specheads.models.heads import MedusaHeads
from specheads.models.output import OutputLayer
from specheads.system import dist
from specheads.system.hardware import environment, peak_memory
from specheads.training.capacity import Load, Shape, Spread, load_of, need
from specheads.training.loop import open_engine
from specheads.training.objectives import HeadsObjective
from specheads.training.schedule import param_groups

NUM_HEADS = 4
MODES = ("eager", "compiled", "graphs", "loop")
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "tie_word_embeddings": True,
    },
    "1b": {  # Llama 3.2 1B
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "8b": {  # Llama 3.1 8B
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
}
PARTS = ("heads", "base", "medusa1_8b")
ENGINES: dict[str, dict[str, Any]] = {  # package that it needs -> what is set for it
    "torch": {},
    "bitsandbytes": {"optim": OptimConfig(name="adamw8bit")},
    "deepspeed": {"deepspeed": {"zero_optimization": {"stage": 2}}},
}
FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # bfloat16, dense, vendor's
DATASHEET = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.0e12}  # bytes per second, vendor's


class NotRun(Exception):  # noqa: N818 - no error
    """A mode that this machine cannot do; the message says why."""


def build(shape: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Build the model on the device, its weights drawn once."""
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=8192)
    with torch.device(device), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    assert isinstance(model, PreTrainedModel)
    model.tie_weights()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1)
            else:
                parameter.normal_(0, 0.02)
    return model.eval()


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of weights that one pass reads: an embedding is only looked up."""
    looked_up = model.get_input_embeddings().weight
    shared = looked_up is model.get_output_embeddings().weight
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    return total if shared else total - looked_up.numel() * looked_up.element_size()


def cache_bytes(model: PreTrainedModel, context: int) -> int:
    """Return the bytes of keys and values behind ``context`` tokens."""
    config = model.config
    width = config.num_key_value_heads * config.head_dim
    return 2 * config.num_hidden_layers * width * context * model.dtype.itemsize


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def clock(run: Callable[[], Any], device: torch.device, repeats: int, warmup: int) -> list[float]:
    """Return the milliseconds of every call, each waited for."""
    for _ in range(warmup):
        run()
    times = []
    for _ in range(repeats):
        wait(device)
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - start))
    return times


def summary(times: list[float]) -> dict[str, float]:
    """Return median, tenth and ninetieth percentile in milliseconds."""
    ordered = sorted(times)
    at = [ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9)]
    return {"ms": statistics.median(ordered), "ms_p10": at[0], "ms_p90": at[1]}


def measure_bandwidth(device: torch.device, repeats: int) -> dict[str, Any]:
    """Copy a large buffer; return bytes per second, read and written ones counted."""
    size = 2**30 if device.type == "cuda" else 2**26
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    times = clock(lambda: target.copy_(source), device, repeats, 3)
    found: dict[str, Any] = {"copied": 2e3 * size / statistics.median(times)}
    if device.type == "cuda":
        known = torch.cuda.get_device_properties(device)
        clock_khz = getattr(known, "memory_clock_rate", 0)
        bits = getattr(known, "memory_bus_width", 0)
        if clock_khz and bits:
            found["from_properties"] = 2e3 * clock_khz * bits / 8  # two transfers per clock
        for name, rate in DATASHEET.items():
            if name in known.name:
                found["datasheet"] = rate
    return found


def capture(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Capture what ``run`` launches; return the graph and what it leaves its result in."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # workspaces and kernels are chosen before
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


class Step:
    """One verify step over a tree behind a filled cache, not committed, so that it repeats.

    Args:
        model: the base model.
        tree: the root alone is a plain step.
        context: tokens in the cache.
    """

    def __init__(self, model: PreTrainedModel, tree: Tree, context: int) -> None:
        self.model, self.tree, self.device = model, tree.to(model.device), model.device
        self.base = ModelPass(model, TreeCache())
        self.cache = self.base.cache
        generator = torch.Generator().manual_seed(0)
        vocab_size = model.config.vocab_size
        ids = torch.randint(vocab_size, (1, context + tree.num_nodes), generator=generator)
        ids = ids.to(self.device)
        self.base.read(ids[:, :context], [context])
        self.tokens = ids[:, context:]
        self.cache.reserve(1, tree.num_nodes)

    def eager(self) -> Tensor:
        """Run as the decoding loop does; logits [1, N, V]."""
        return self.base.verify(self.tokens, self.tree)

    def loop_compiled(self) -> Tensor:
        """Run as the decoding loop does with compile."""
        return run_compiled(self.model, self.cache, self.tokens, self.positions(), self.tree)

    def positions(self) -> Tensor:
        """Return the nodes' positions [1, N]."""
        return self.tree.depths[None] + self.cache.lengths[0]

    def inputs(self) -> dict[str, Tensor]:
        """Return all that differs from step to step."""
        slots = self.cache.rows.slots(self.tree.num_nodes, self.device)[1]
        tokens, positions = self.tokens, self.positions()
        with tree_attention(self.tree, self.cache):
            like = torch.empty(*tokens.shape, 0, dtype=self.model.dtype, device=self.device)
            mask = create_masks_for_generate(self.model.config, like, None, self.cache, positions)
        assert isinstance(mask, Tensor)
        return {"tokens": tokens, "positions": positions, "slots": slots, "mask": mask}

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Run the model on ``inputs``, which alone say where to write and what to see."""
        self.cache.rows.fixed_slots = inputs["slots"]
        logits: Tensor = self.model(
            input_ids=inputs["tokens"],
            attention_mask=inputs["mask"],
            position_ids=inputs["positions"],
            past_key_values=self.cache,
            use_cache=True,
        ).logits
        return logits

    def fixed(self) -> contextlib.AbstractContextManager[None]:
        """While open, keys and values are shown at one width whatever the length."""
        return self.cache.fix(self.tree.num_nodes, self.cache.capacity)

    def captured(self) -> Callable[[], Tensor]:
        """Capture the pass; return a function that copies new inputs in and replays it."""
        with self.fixed(), grouped_attention():
            static = {name: tensor.clone() for name, tensor in self.inputs().items()}
            graph, logits = capture(lambda: self.forward(static))

        def run() -> Tensor:
            with self.fixed():
                for name, tensor in self.inputs().items():
                    static[name].copy_(tensor)
            graph.replay()
            return logits

        return run

    def compiled(self) -> Callable[[], Tensor]:
        """Compile the pass without graphs; return a function that runs it on new inputs."""
        forward = torch.compile(self.forward, dynamic=False)

        def run() -> Tensor:
            with self.fixed(), grouped_attention_traced():
                return forward(self.inputs())

        return run

    def mode(self, name: str) -> Callable[[], Tensor]:
        """Return the step in one of MODES.

        Raises:
            NotRun: where the device cannot do it.
        """
        if name == "eager":
            return self.eager
        if name == "loop":
            return self.loop_compiled
        if name == "compiled":
            return self.compiled()
        if self.device.type != "cuda":
            raise NotRun("CUDA graphs need a CUDA device")
        return self.captured()

    def check(self, run: Callable[[], Tensor]) -> float:
        """Compare with the eager step, here and some tokens on; the largest relative difference."""
        worst = 0.0
        for committed in (0, 3):
            if committed:
                self.cache.extend([committed])  # whatever was there: both see the same
                self.cache.reserve(1, self.tree.num_nodes)
            expected = self.eager().clone()
            found = run()
            worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
        self.cache.shorten([self.cache.lengths[0] - 3])
        return worst


@torch.inference_mode()
def time_heads(
    model: PreTrainedModel, lm_head: str, repeats: int, warmup: int
) -> list[dict[str, Any]]:
    """Time one pass of the heads over one hidden state: eager, and as a CUDA graph."""
    device, dtype = model.device, model.dtype
    output = OutputLayer(model.get_output_embeddings())
    vocab_size, hidden_size = output.weight.shape
    with torch.device(device):
        heads = MedusaHeads(NUM_HEADS, 1, hidden_size, vocab_size, lm_head, dtype)
    heads.init_from_output(output.weight)
    hidden = torch.randn(1, hidden_size, dtype=dtype, device=device)
    predict = heads.snapshot(output)
    read = sum(p.numel() * p.element_size() for p in heads.parameters())
    if lm_head == "shared":
        read += output.weight.numel() * dtype.itemsize
    runs: dict[str, Callable[[], Any]] = {"eager": lambda: predict(hidden)}
    if device.type == "cuda":
        graph, _ = capture(lambda: predict(hidden))
        runs["graphs"] = graph.replay
    return [
        {
            "part": "heads",
            "lm_head": lm_head,
            "num_heads": NUM_HEADS,
            "mode": mode,
            "bytes_read": read,
            **summary(clock(run, device, repeats, warmup)),
        }
        for mode, run in runs.items()
    ]


@torch.inference_mode()
def time_step(model: PreTrainedModel, mode: str, nodes: int, args: Any) -> dict[str, Any]:
    """Time one mode at one tree size."""
    row: dict[str, Any] = {"part": "base", "mode": mode, "nodes": nodes}
    torch._dynamo.reset()  # else a second size is compiled for any size, which is slower
    step = Step(model, default_tree(NUM_HEADS, nodes) if nodes > 1 else Tree.chain(0), args.context)
    start = time.perf_counter()
    run = step.mode(mode)
    skipped = counters["inductor"]["cudagraph_skips"]
    row["difference"] = step.check(run)
    if row["difference"] > (1e-3 if model.dtype == torch.float32 else 0.1):
        raise RuntimeError(f"logits differ from eager ones by {row['difference']:.2g}")
    row["graphs_skipped"] = counters["inductor"]["cudagraph_skips"] - skipped
    row["prepare_seconds"] = time.perf_counter() - start
    peak_memory(model.device, reset=True)
    row |= summary(clock(run, model.device, args.repeats, args.warmup))
    row["peak_memory"] = peak_memory(model.device)
    return row


def training_load(shape: Shape, lm_head: str, args: Any) -> Load:
    """Return what a rank needs for heads on a frozen base, as plain torch has it."""
    dtype = getattr(torch, args.dtype)
    return load_of(
        shape,
        "frozen",
        tokens=args.train_rows * args.train_seq_len,
        size=dtype.itemsize,
        head_size=4,
        num_heads=NUM_HEADS,
        own_heads=lm_head == "own",
        seq_len=args.train_seq_len,
    )


def time_training(engine: str, lm_head: str, device: torch.device, args: Any) -> dict[str, Any]:
    """Train heads on a frozen random base for some steps.

    Raises:
        NotRun: if the device or a package for it is missing.
    """
    shape_name = "tiny" if args.shape == "tiny" else "8b"
    if device.type != "cuda" and shape_name != "tiny":
        raise NotRun("needs a CUDA device; --shape tiny tries it on a CPU")
    if importlib.util.find_spec(engine) is None:
        raise NotRun(f"{engine} is not installed here")
    dtype = getattr(torch, args.dtype)
    model = build(shape_name, dtype, device)
    output = OutputLayer(model.get_output_embeddings())
    vocab_size, hidden_size = output.weight.shape
    with torch.device(device):
        heads = MedusaHeads(NUM_HEADS, 1, hidden_size, vocab_size, lm_head)
    heads.init_from_output(output.weight)
    objective = HeadsObjective(model, heads, train_base=False, output=output)
    cfg = TrainConfig(
        run_dir=tempfile.gettempdir(),
        model=ModelConfig(dtype=args.dtype),
        data=DataConfig(rows=args.train_rows, seq_len=args.train_seq_len),
        # DeepSpeed casts everything to the base's dtype by itself
        autocast="bfloat16" if dtype == torch.bfloat16 and engine != "deepspeed" else "none",
        **ENGINES[engine],
    )
    groups = param_groups(cfg.optim, heads=(heads, 1e-4))
    try:
        runner = open_engine(objective, groups, cfg)
    except ConfigError as error:
        raise NotRun(str(error)) from None
    ids = torch.randint(vocab_size, (args.train_rows, args.train_seq_len), device=device)
    batch = {
        "input_ids": ids,
        "labels": ids,
        "position_ids": torch.arange(args.train_seq_len, device=device).expand_as(ids),
        "segment_ids": torch.ones_like(ids),
    }

    def step() -> None:
        loss, _ = runner.forward(batch)
        runner.backward(loss, last=True)
        runner.step(1.0)

    step()  # the optimizer's state comes into being
    peak_memory(device, reset=True)
    times = summary(clock(step, device, args.train_steps, 1))
    peak = peak_memory(device)
    runner.close()
    shape = Shape.from_config(model.config)
    assert shape is not None
    load = training_load(shape, lm_head, args)
    flops = 1e3 * load.flops / times["ms"]
    promised = [rate for name, rate in FLOPS.items() if name in environment()["device"]]
    spread = Spread.from_config(cfg.deepspeed)
    return {
        "part": "medusa1_8b",
        "shape": shape_name,
        "engine": engine,
        "lm_head": lm_head,
        **times,
        "tokens_per_second": 1e3 * ids.numel() / times["ms"],
        "flops_per_second": flops,
        "mfu": flops / promised[0] if promised else None,
        "peak_memory": peak,
        # the cost model's widths are those of plain torch
        "predicted_memory": need(load, spread, 1).training if engine == "torch" else None,
    }


def describe_training(row: dict[str, Any]) -> str:
    """Return a line about a training row."""
    mfu = "unknown" if row["mfu"] is None else f"{100 * row['mfu']:.1f}%"
    told = row["predicted_memory"]
    predicted = f", predicted {told / 1e9:.2f}" if told else ""
    return (
        f"{row['ms']:.1f} ms a step ({row['ms_p10']:.1f} to {row['ms_p90']:.1f}),"
        f" {row['tokens_per_second']:,.0f} tokens/s, MFU {mfu},"
        f" peak {row['peak_memory'] / 1e9:.2f} GB{predicted}"
    )


def compare(report: dict[str, Any]) -> None:
    """Add to every row its ratio to the floor and to the plain step of the same mode."""
    done = [row for row in report["rows"] if "ms" in row and row["part"] != "medusa1_8b"]
    plain = {row["mode"]: row["ms"] for row in done if row.get("nodes") == 1}
    heads = {(row["lm_head"], row["mode"]): row["ms"] for row in done if row["part"] == "heads"}
    for row in done:
        read = row.get("bytes_read", report["weight_bytes"])
        row["floor_ms"] = 1e3 * read / report["bandwidth"]["copied"]
        row["vs_floor"] = row["ms"] / row["floor_ms"]
        if row["part"] == "heads" or row["mode"] not in plain:
            continue
        row["vs_plain"] = row["ms"] / plain[row["mode"]]
        with_graphs = "graphs" if row["mode"] in ("graphs", "loop") else "eager"
        row["with_heads_vs_plain"] = {
            lm_head: (row["ms"] + ms) / plain[row["mode"]]
            for (lm_head, mode), ms in heads.items()
            if mode == with_graphs and row["nodes"] > 1
        }


def table(report: dict[str, Any]) -> str:
    """Lay the rows out as text."""
    lines = [
        f"{report['settings']['shape']}, {report['settings']['dtype']}, context"
        f" {report['settings']['context']}, {report['environment']['device']}"
    ]
    if "bandwidth" in report:
        bandwidth = report["bandwidth"]["copied"] / 1e12
        lines[0] += (
            f": weights {report['weight_bytes'] / 1e9:.2f} GB, cache"
            f" {report['cache_bytes'] / 1e9:.3f} GB, copy {bandwidth:.2f} TB/s"
        )
        lines.append(
            f"{'what':24}{'ms':>9}{'p10':>9}{'p90':>9}{'floor':>9}{'x floor':>9}{'x plain':>9}"
            "  and with heads"
        )
    return "\n".join([*lines, *map(line_of, report["rows"])])


def line_of(row: dict[str, Any]) -> str:
    """Return a row as text."""
    name = {
        "base": "{mode}, {nodes} nodes",
        "heads": "heads, {lm_head}, {mode}",
        "medusa1_8b": "medusa1, {lm_head}, {engine}",
    }[row["part"]].format(**row)
    if row["part"] == "medusa1_8b":
        name = f"{name:32}"
    if "ms" not in row:
        return f"{name:24}{row['status']}: {row['detail']}"
    if row["part"] == "medusa1_8b":
        return f"{name:24}{describe_training(row)}"
    cells = (row["ms"], row["ms_p10"], row["ms_p90"], row["floor_ms"], row["vs_floor"])
    shown = "".join(f"{cell:9.3f}" for cell in cells)
    ratio = format(row["vs_plain"], "9.3f") if "vs_plain" in row else ""
    with_heads = [
        f"  {lm_head} {value:.3f}" for lm_head, value in row.get("with_heads_vs_plain", {}).items()
    ]
    skipped = f"  {row['graphs_skipped']} without graphs" if row.get("graphs_skipped") else ""
    return f"{name:24}{shown}{ratio}{''.join(with_heads)}{skipped}"


def attempt(report: dict[str, Any], about: dict[str, Any], run: Callable[[], Any]) -> None:
    """Add what ``run`` returns to the rows; what fails says so and costs nothing else."""
    try:
        found = run()
        report["rows"] += found if isinstance(found, list) else [found]
    except NotRun as reason:
        report["rows"].append({**about, "status": "not run", "detail": str(reason)})
    except Exception as error:  # a machine that is lent for minutes is not asked twice
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        detail = f"{type(error).__name__}: {first}"
        report["rows"].append({**about, "status": "failed", "detail": detail})


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, measure, print and write; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["heads", "base"])
    parser.add_argument("--train-rows", type=int, default=4, help="medusa1_8b: rows of a step")
    parser.add_argument("--train-seq-len", type=int, default=2048, help="medusa1_8b: of a row")
    parser.add_argument("--train-steps", type=int, default=10, help="medusa1_8b: timed steps")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 16, 32, 64])
    parser.add_argument("--context", type=int, default=1024, help="tokens in the cache")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--out", type=Path, help="write JSON there, after every result")
    args = parser.parse_args(arguments)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {device}: torch {torch.__version__} sees no CUDA device")
    decoding = {"heads", "base"} & set(args.parts)
    if device.type == "cpu" and args.shape != "tiny" and decoding:
        parser.error(f"--shape {args.shape} is for a GPU; --shape tiny tries the program on a CPU")
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    report: dict[str, Any] = {"environment": environment(), "settings": settings, "rows": []}

    def save() -> None:
        compare(report)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    if decoding:
        bench_decoding(report, device, args, save)
        gc.collect()
    if "medusa1_8b" in args.parts:
        for engine in ENGINES:
            for lm_head in ("own", "shared"):
                about = {"part": "medusa1_8b", "engine": engine, "lm_head": lm_head}
                attempt(report, about, lambda: time_training(engine, lm_head, device, args))  # noqa: B023
                gc.collect()
                save()
                print(table(report).splitlines()[-1], flush=True)
    print(table(report))
    dist.shutdown()
    return 1 if any(row.get("status") == "failed" for row in report["rows"]) else 0


def bench_decoding(
    report: dict[str, Any], device: torch.device, args: Any, save: Callable[[], None]
) -> None:
    """Add the rows of heads and of verify steps."""
    model = build(args.shape, getattr(torch, args.dtype), device)
    report |= {
        "bandwidth": measure_bandwidth(device, max(3, args.repeats // 2)),
        "weight_bytes": weight_bytes(model),
        "cache_bytes": cache_bytes(model, args.context),
    }
    for lm_head in ("shared", "own") if "heads" in args.parts else ():
        about = {"part": "heads", "lm_head": lm_head, "mode": "eager"}
        attempt(report, about, lambda: time_heads(model, lm_head, args.repeats, args.warmup))  # noqa: B023
        save()
    for mode in args.modes if "base" in args.parts else ():
        for nodes in args.nodes:
            about = {"part": "base", "mode": mode, "nodes": nodes}
            attempt(report, about, lambda: time_step(model, mode, nodes, args))  # noqa: B023
            save()
            print(table(report).splitlines()[-1], flush=True)


if __name__ == "__main__":
    sys.exit(main())
