"""Time a verify step against the memory-bandwidth floor, on random weights of a Llama's shape.

    python scripts/bench_gpu.py --shape 1b --out benchmarks/h200/bench_1b.json
    python scripts/bench_gpu.py --shape 8b --modes loop --out benchmarks/h200/bench_8b.json
    python scripts/bench_gpu.py --shape 8b --parts medusa1_8b --out benchmarks/h200/medusa1_8b.json
    python scripts/bench_gpu.py --shape gqa --device cpu --modes eager expanded --context 8192
    python scripts/bench_gpu.py --shape tiny --device cpu --modes eager --repeats 3

The floor is the time that reading every weight once takes at the bandwidth of a large copy on the
same device. A plain step is the same code with a tree that is its root alone, behind the same
cache of --context tokens. Modes:

eager         what the decoding loop does without compile
loop          what it does with compile: torch.compile, on a GPU with CUDA graphs of its own
expanded      eager, with the cache expanded to all query heads, as transformers does by itself

Every step is waited for, as in decoding. Heads are timed apart, on one hidden state. Each result is
written as soon as it is there; compiling an 8b takes minutes per tree.

The part medusa1_8b trains heads on a frozen base of 8 billion random weights with the project's own
engines: tokens per second, MFU (floating-point operations of zero_costs.py over what the
data sheet promises), peak memory, and what the cost model says of it. --shape tiny makes a toy of
it.
"""

import gc
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import harness
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from zero_costs import Shape, load_of

from specheads.attention.cache import TreeCache
from specheads.attention.mask import tree_attention
from specheads.attention.tree import Tree, default_tree
from specheads.config import ConfigError, DataConfig, ModelConfig, OptimConfig, TrainConfig
from specheads.models.forward import ModelPass, run_compiled
from specheads.models.heads import MedusaHeads
from specheads.models.output import OutputLayer
from specheads.system import dist, hardware
from specheads.training.engine import Spread, param_groups
from specheads.training.loop import open_engine
from specheads.training.objectives import HeadsObjective
from specheads.training.plan import need

NUM_HEADS = 4
NAMES = (  # of the numbers in SHAPES
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings"),
)
SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 16, 320, True),
    "gqa": (1024, 3072, 4, 16, 2, 64, 1024, False),
    "1b": (2048, 8192, 16, 32, 8, 64, 128256, True),  # Llama 3.2 1B
    "8b": (4096, 14336, 32, 32, 8, 128, 128256, False),  # Llama 3.1 8B
}
TRAINING = "medusa1_8b"
ENGINES: dict[str, dict[str, Any]] = {  # package that it needs -> what is set for it
    "torch": {},
    "bitsandbytes": {"optim": OptimConfig(name="adamw8bit")},
    "deepspeed": {"deepspeed": {"zero_optimization": {"stage": 2}}},
}
FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # bfloat16, dense, vendor's


@dataclass
class Settings:
    """What is timed.

    Attributes:
        device: auto, cpu, cuda
        context: tokens in the cache
        train_rows: medusa1_8b: rows of a step
        train_seq_len: medusa1_8b: of a row
        train_steps: medusa1_8b: timed steps
        out: write JSON there, after every result
    """

    shape: Literal["tiny", "gqa", "1b", "8b"] = "1b"
    device: str = "auto"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    parts: tuple[Literal["heads", "base", "medusa1_8b"], ...] = ("heads", "base")
    train_rows: int = 4
    train_seq_len: int = 2048
    train_steps: int = 10
    modes: tuple[Literal["eager", "loop", "expanded"], ...] = ("eager", "loop")
    nodes: tuple[int, ...] = (1, 16, 32, 64)
    context: int = 1024
    repeats: int = 50
    warmup: int = 10
    out: Path | None = None

    def __post_init__(self) -> None:
        self.device = str(hardware.pick_device(self.device))
        large = self.shape in ("1b", "8b") and {"heads", "base"} & {*self.parts}
        if self.device == "cpu" and large:
            raise ValueError(f"--shape {self.shape} is for a GPU; tiny and gqa try it on a CPU")


def build(shape: str, dtype: str, device: torch.device | str) -> PreTrainedModel:
    """Build the model on the device, its weights drawn once."""
    sizes: dict[str, Any] = dict(zip(NAMES, SHAPES[shape], strict=True))
    config = LlamaConfig(**sizes, max_position_embeddings=1 << 17)
    how = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
    with torch.device(device), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, **how)
    model.tie_weights()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1) if "norm" in name else parameter.normal_(0, 0.02)
    return model.eval()


def make_heads(output: OutputLayer, lm_head: str, dtype: torch.dtype) -> MedusaHeads:
    """Return heads where the output matrix lies."""
    vocab_size, hidden_size = output.weight.shape
    with torch.device(output.weight.device):
        heads = MedusaHeads(NUM_HEADS, 1, hidden_size, vocab_size, lm_head).to(dtype)
    heads.init_from_output(output.weight)
    return heads


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of weights that one pass reads: an embedding is only looked up."""
    looked_up = model.get_input_embeddings().weight
    shared = looked_up is model.get_output_embeddings().weight
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    return total if shared else total - looked_up.numel() * looked_up.element_size()


def clock(
    run: Callable[[], Any], device: torch.device, repeats: int, warmup: int
) -> dict[str, float]:
    """Return median, tenth and ninetieth percentile in milliseconds of calls, each waited for."""
    for _ in range(warmup):
        run()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
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
    times.sort()
    low, high = (times[round(share * (len(times) - 1))] for share in (0.1, 0.9))
    return {"ms": statistics.median(times), "ms_p10": low, "ms_p90": high}


def measure_bandwidth(device: torch.device, repeats: int) -> float:
    """Copy a large buffer; return bytes per second, read and written ones counted."""
    size = 2**30 if device.type == "cuda" else 2**26
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2e3 * size / clock(lambda: target.copy_(source), device, repeats, 3)["ms"]


class Step:
    """One verify step over a tree behind a filled cache, not committed, so that it repeats.

    Args:
        model: the base model.
        tree: the root alone is a plain step.
        context: tokens in the cache.
    """

    def __init__(self, model: PreTrainedModel, tree: Tree, context: int) -> None:
        self.model, self.tree = model, tree.to(model.device)
        self.base = ModelPass(model, TreeCache())
        self.cache = self.base.cache
        generator = torch.Generator().manual_seed(0)
        vocab_size = model.config.vocab_size
        ids = torch.randint(vocab_size, (1, context + tree.num_nodes), generator=generator)
        read, self.tokens = ids.to(model.device).tensor_split([context], dim=1)
        self.base.read(read, [context])
        self.cache.reserve(1, tree.num_nodes)

    def eager(self) -> Tensor:
        """Run as the decoding loop does; logits [1, N, V]."""
        return self.base.verify(self.tokens, self.tree)

    def loop(self) -> Tensor:
        """Run as the decoding loop does with compile."""
        return run_compiled(self.model, self.cache, self.tokens, self.positions(), self.tree)

    def expanded(self) -> Tensor:
        """Run without grouped attention, as transformers does by itself."""
        with tree_attention(self.tree, self.cache):
            given = {"input_ids": self.tokens, "position_ids": self.positions()}
            return self.model(**given, past_key_values=self.cache, use_cache=True).logits

    def positions(self) -> Tensor:
        """Return the nodes' positions [1, N]."""
        return self.tree.depths[None] + self.cache.lengths[0]

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
def time_heads(model: PreTrainedModel, lm_head: str, given: Settings) -> dict[str, Any]:
    """Time one pass of the heads over one hidden state, as the decoding loop does it."""
    device, dtype = model.device, model.dtype
    output = OutputLayer(model.get_output_embeddings())
    heads = make_heads(output, lm_head, dtype)
    hidden = torch.randn(1, output.weight.shape[1], dtype=dtype, device=device)
    predict = heads.snapshot(output)
    read = sum(p.numel() * p.element_size() for p in heads.parameters())
    if lm_head == "shared":
        read += output.weight.numel() * dtype.itemsize
    about = {"part": "heads", "lm_head": lm_head, "num_heads": NUM_HEADS, "bytes_read": read}
    return {**about, **clock(lambda: predict(hidden), device, given.repeats, given.warmup)}


@torch.inference_mode()
def time_step(model: PreTrainedModel, mode: str, nodes: int, given: Settings) -> dict[str, Any]:
    """Time one mode at one tree size."""
    torch._dynamo.reset()  # else a second size is compiled for any size, which is slower
    tree = default_tree(NUM_HEADS, nodes) if nodes > 1 else Tree.chain(0)
    step = Step(model, tree, given.context)
    start = time.perf_counter()
    run: Callable[[], Tensor] = getattr(step, mode)
    skipped = counters["inductor"]["cudagraph_skips"]
    difference = step.check(run)
    if difference > (1e-3 if model.dtype == torch.float32 else 0.1):
        raise RuntimeError(f"logits differ from eager ones by {difference:.2g}")
    row = {"part": "base", "mode": mode, "nodes": nodes, "difference": difference}
    row["graphs_skipped"] = counters["inductor"]["cudagraph_skips"] - skipped
    row["prepare_seconds"] = time.perf_counter() - start
    hardware.peak_memory(model.device, reset=True)
    row |= clock(run, model.device, given.repeats, given.warmup)
    return {**row, "peak_memory": hardware.peak_memory(model.device)}


def time_training(engine: str, lm_head: str, given: Settings) -> dict[str, Any]:
    """Train heads on a frozen random base for some steps.

    Raises:
        NotRun: if the device or a package for it is missing.
    """
    device, shape_name = torch.device(given.device), "tiny" if given.shape == "tiny" else "8b"
    if device.type != "cuda" and shape_name != "tiny":
        raise harness.NotRun("needs a CUDA device; --shape tiny tries it on a CPU")
    if importlib.util.find_spec(engine) is None:
        raise harness.NotRun(f"{engine} is not installed here")
    model = build(shape_name, given.dtype, device)
    output = OutputLayer(model.get_output_embeddings())
    heads = make_heads(output, lm_head, torch.float32)
    objective = HeadsObjective(model, heads, train_base=False, output=output)
    cfg = TrainConfig(
        run_dir=tempfile.gettempdir(),
        model=ModelConfig(dtype=given.dtype),
        data=DataConfig(rows=given.train_rows, seq_len=given.train_seq_len),
        # DeepSpeed casts everything to the base's dtype by itself
        autocast="bfloat16" if given.dtype == "bfloat16" and engine != "deepspeed" else "none",
        **ENGINES[engine],
    )
    try:
        runner = open_engine(objective, param_groups(cfg.optim, heads=(heads, 1e-4)), cfg)
    except ConfigError as error:
        raise harness.NotRun(str(error)) from None
    sizes = (given.train_rows, given.train_seq_len)
    batch = harness.batch_of(torch.randint(output.weight.shape[0], sizes, device=device))

    def step() -> None:
        loss, _ = runner.forward(batch)
        runner.backward(loss, last=True)
        runner.step(1.0)

    step()  # the optimizer's state comes into being
    hardware.peak_memory(device, reset=True)
    times = clock(step, device, given.train_steps, 1)
    peak = hardware.peak_memory(device)
    runner.close()
    shape = Shape.from_config(model.config)
    tokens = given.train_rows * given.train_seq_len
    load = load_of(  # as plain torch has it
        shape,
        "frozen",
        tokens=tokens,
        seq_len=given.train_seq_len,
        size=model.dtype.itemsize,
        num_heads=NUM_HEADS,
        own_heads=lm_head == "own",
        head_size=4,
    )
    flops = 1e3 * load.flops / times["ms"]
    machine = hardware.environment()["device"]
    promised = [rate for name, rate in FLOPS.items() if name in machine]
    spread = Spread.from_config(cfg.deepspeed)
    return {
        "part": TRAINING,
        "shape": shape_name,
        "engine": engine,
        "lm_head": lm_head,
        **times,
        "tokens_per_second": 1e3 * tokens / times["ms"],
        "flops_per_second": flops,
        "mfu": flops / promised[0] if promised else None,
        "peak_memory": peak,
        # the cost model's widths are those of plain torch
        "predicted_memory": need(load, spread, 1).training if engine == "torch" else None,
    }


def compare(report: dict[str, Any]) -> None:
    """Add to every row its ratio to the floor and to the plain step of the same mode."""
    done = [row for row in report["rows"] if "ms" in row and row["part"] in ("heads", "base")]
    plain = {row["mode"]: row["ms"] for row in done if row.get("nodes") == 1}
    heads = {row["lm_head"]: row["ms"] for row in done if row["part"] == "heads"}
    for row in done:
        read = row.get("bytes_read", report["weight_bytes"])
        row["floor_ms"] = 1e3 * read / report["bandwidth"]
        row["vs_floor"] = row["ms"] / row["floor_ms"]
        if row["part"] == "heads" or row["mode"] not in plain:
            continue
        row["vs_plain"] = row["ms"] / plain[row["mode"]]
        if row["nodes"] > 1:
            steps = {lm_head: row["ms"] + ms for lm_head, ms in heads.items()}
            row["with_heads_vs_plain"] = {k: ms / plain[row["mode"]] for k, ms in steps.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; return the exit code."""
    given = harness.parse(Settings, argv)
    device = torch.device(given.device)
    report = harness.report(given, rows=[])

    def attempt(about: dict[str, Any], measure: Callable[..., Any], *arguments: Any) -> None:
        status, found = harness.attempt(lambda: measure(*arguments, given))
        failed = {**about, "status": status, "detail": found}
        report["rows"].append(found if status == "ok" else failed)
        compare(report)
        harness.write(given.out, report, quiet=True)

    if {"heads", "base"} & set(given.parts):
        model = build(given.shape, given.dtype, device)
        report["bandwidth"] = measure_bandwidth(device, max(3, given.repeats // 2))
        report["weight_bytes"] = weight_bytes(model)
        for lm_head in ("shared", "own") if "heads" in given.parts else ():
            attempt({"part": "heads", "lm_head": lm_head}, time_heads, model, lm_head)
        for mode in given.modes if "base" in given.parts else ():
            for nodes in given.nodes:
                about = {"part": "base", "mode": mode, "nodes": nodes}
                attempt(about, time_step, model, mode, nodes)
        del model
        gc.collect()
    for engine in ENGINES if TRAINING in given.parts else ():
        for lm_head in ("own", "shared"):
            about = {"part": TRAINING, "engine": engine, "lm_head": lm_head}
            attempt(about, time_training, engine, lm_head)
            gc.collect()
    print("\n\n".join(map(harness.describe, report["rows"])))
    dist.shutdown()
    return int(any(row.get("status") == "failed" for row in report["rows"]))


if __name__ == "__main__":
    raise SystemExit(main())
