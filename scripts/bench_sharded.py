"""Train a base under ZeRO-3 that no rank may hold whole, and show that a limit on memory holds it.

    python scripts/bench_sharded.py --out benchmarks/sharded.json    # 30 minutes, 12 GB of disk

A base of random weights is written, layer by layer, and ``+recipe=medusa1``, ``medusa2`` with an
adapter and ``dflash`` train on it with two ranks on this processor. A watcher reads the memory of
each rank 50 times a second and kills all of them once one has more than ``--share`` of what a
process has that holds the base whole, and nothing else. The last run reads the base whole on each
rank, as before it was divided while it was read: the same limit ends it. Memory is what is resident
of a process, with the libraries and without pages of mapped files, which Linux takes back where it
needs them. Beside it stands what ``specheads plan`` says of a rank, to be compared with what is
above the peak that the same run has on a base of one small layer.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import harness
import torch
from safetensors.torch import save_file
from torch.distributed import TCPStore
from transformers import LlamaConfig, LlamaForCausalLM

from specheads.models.base import load_tokenizer
from specheads.models.manifest import write_json

WHOLE = "import specheads.training.setup as setup\nsetup._in_parts = lambda cfg: None\n"
HOLD = """
import os, sys
import deepspeed, specheads.train
from bench_sharded import resident
from specheads.models.base import load_base_model
base = load_base_model(sys.argv[1], dtype=sys.argv[2], device="cpu")
for each in base.parameters():
    each.data = each.data.clone()  # its own memory, no longer the file's
print(resident(os.getpid()))
"""
MAIN = "import sys\nfrom specheads.train import main\nsys.argv[0] = 'train'\nmain()\n"
LORA = "+recipe=medusa2 heads=shared adapter=lora adapter.rank=8 model.gradient_checkpointing=true"
CASES = {
    "medusa1": "+recipe=medusa1 heads=shared",
    "medusa2, adapter": LORA,
    "dflash": "+recipe=dflash heads.num_layers=1 heads.options.anchors=16",
    "medusa2, adapter, base in nf4, ZeRO-2": f"{LORA} model.quantization=nf4 deepspeed=zero2",
    "medusa1, read whole": "+recipe=medusa1 heads=shared",
}


@dataclass
class Settings:
    """The base, and what a rank may take of its size.

    Attributes:
        hidden: a multiple of 64
        share: that a rank may have resident, of what holding the base whole takes
        steps: of each run
        dtype: of the weights
        cases: runs by their names in the table
        folder: where base and runs go; a temporary one if it is not given
        out: write the JSON there
    """

    hidden: int = 1024
    intermediate: int = 2816
    layers: int = 96
    vocab: int = 4096
    ranks: int = 2
    share: float = 0.75
    steps: int = 3
    dtype: str = "float32"
    cases: tuple[str, ...] = tuple(CASES)
    folder: Path | None = None
    out: Path | None = None


def write_base(given: Settings, folder: Path) -> int:
    """Write a base of random weights, a file for each layer; return their bytes."""
    config = LlamaConfig(
        vocab_size=given.vocab, hidden_size=given.hidden, intermediate_size=given.intermediate,
        num_hidden_layers=given.layers, num_attention_heads=given.hidden // 64,
        num_key_value_heads=given.hidden // 64, max_position_embeddings=512,
        architectures=["LlamaForCausalLM"], dtype=given.dtype,
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    parts: dict[str, list[str]] = {}
    for name in model.state_dict():
        parts.setdefault(".".join(name.split(".")[:3]) if ".layers." in name else "", []).append(
            name
        )
    place, total, shapes = {}, 0, model.state_dict()
    generator = torch.Generator().manual_seed(0)
    for number, names in enumerate(parts.values(), start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        tensors = {}
        for name in names:
            drawn = torch.empty(shapes[name].shape)
            drawn = (
                drawn.fill_(1.0)
                if drawn.dim() == 1
                else drawn.normal_(0, 0.02, generator=generator)
            )
            tensors[name] = drawn.to(getattr(torch, given.dtype))
            total += tensors[name].numel() * tensors[name].element_size()
        save_file(tensors, folder / file, {"format": "pt"})
        place |= dict.fromkeys(names, file)
    write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": place}, strict=False,
    )  # fmt: skip
    config.save_pretrained(folder)
    load_tokenizer("tinycode").save_pretrained(folder)
    return total


def resident(pid: int) -> int:
    """Return the bytes of a process in memory but for pages of files; 0 where it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    own = ("RssAnon:", "RssShmem:")
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(own))


def held_whole(base: Path, dtype: str) -> int:
    """Return the bytes of a process that holds a base whole."""
    done = subprocess.run(
        [sys.executable, "-c", HOLD, str(base), dtype], cwd=Path(__file__).parent, check=True,
        env={**os.environ, **harness.RETURNING, "PYTHONPATH": str(harness.ROOT)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return int(done.stdout.splitlines()[-1])


def watched(program: str, words: list[str], ranks: int, limit: float) -> dict[str, Any]:
    """Run a program as several ranks, and kill all of them once one of them has ``limit`` bytes."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(harness.ROOT), "WANDB_MODE": "disabled",
    }  # fmt: skip
    peaks = [0] * ranks
    environ = {**os.environ, **harness.RETURNING, **place}
    with tempfile.TemporaryFile("w+") as said:
        started = [
            subprocess.Popen(
                [sys.executable, "-c", program, *words], cwd=harness.ROOT,
                env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=said, stderr=said,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        killed = False
        while any(each.poll() is None for each in started):
            for rank, each in enumerate(started):
                peaks[rank] = max(peaks[rank], resident(each.pid))
            if max(peaks) > limit and not killed:
                killed = True
                for each in started:
                    each.kill()
            time.sleep(0.02)
        said.seek(0)
        text = said.read()
    codes = [each.returncode for each in started]
    if any(codes) and not killed:
        raise SystemExit(f"{words}: {codes}\n{text[-6000:]}")
    return {
        "killed": killed, "peaks": peaks,
        "whole": "every rank reads the base whole" in text,
    }  # fmt: skip


def planned(words: list[str], ranks: int) -> float:
    """Return the bytes of a rank at its peak, as ``specheads plan`` predicts them."""
    words = [word.removeprefix("+") if "+recipe" in word else word for word in words]
    done = subprocess.run(
        [sys.executable, "-m", "specheads.plan", *words, f"gpus={ranks}", "json=true"],
        cwd=harness.ROOT, check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return float(json.loads(done.stdout)["stages"]["as set"]["peak"])


def main() -> None:
    """Write the base, train on it in each way, print a table."""
    given = harness.parse(Settings)
    root = given.folder or Path(tempfile.mkdtemp(prefix="sharded"))
    size = write_base(given, root / "base")
    numbers = size // torch.empty(0, dtype=getattr(torch, given.dtype)).element_size()
    whole = held_whole(root / "base", given.dtype)
    limit = given.share * whole
    print(
        f"{numbers / 1e6:,.0f} M parameters, {size / 1e9:.2f} GB; a process that holds them has"
        f" {whole / 1e9:.2f} GB; limit {limit / 1e9:.2f} GB a rank"
    )
    records = root / "records.jsonl"
    records.write_text(
        "".join(f'{{"text": "def f{i}(x):\\n    return x + {i}\\n"}}\n' for i in range(400))
    )
    layer = 4 * given.hidden**2 + 3 * given.hidden * given.intermediate
    zero = {
        "stage3_max_live_parameters": layer, "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": layer // 4, "reduce_bucket_size": layer // 4,
    }  # fmt: skip
    write_base(replace(given, hidden=64, intermediate=64, layers=1), root / "toy")
    rows, run = [], root / "run"
    for case in given.cases:
        words = CASES[case].split()
        words += [] if "deepspeed=zero2" in words else ["deepspeed=zero3"]
        words += [f"+deepspeed.zero_optimization.{key}={n}" for key, n in zero.items()]
        words += [
            f"model.dtype={given.dtype}", "device=cpu", "optim=adamw", f"steps={given.steps}",
            "optim.lr=1e-4", "autocast=none", "data.rows=1", "data.seq_len=64",
        ]  # fmt: skip
        short = [
            "data=jsonl", f"data.path={records}", f"hydra.run.dir={run}", "evaluate.every=0",
            "evaluate.num_prompts=2", "evaluate.loss_rows=2", "evaluate.max_new_tokens=16",
            "evaluate.minutes=0.1", "log.every=1", "log.wandb=disabled",
        ]  # fmt: skip
        program = (WHOLE if "whole" in case else "") + MAIN
        ends: list[dict[str, Any]] = []
        for name, bound in (("toy", math.inf), ("base", limit)):
            shutil.rmtree(run, ignore_errors=True)
            settings = [f"model={root / name}", *words, *short]
            ends.append(watched(program, settings, given.ranks, bound))
        small, row = max(ends[0]["peaks"]), {"case": case, **ends[1]}
        row |= {
            "peak_of_toy": small,
            "exported": (run / "export" / "manifest.json").is_file(),
            "planned": planned([f"model={root / 'base'}", *words], given.ranks),
        }
        rows.append(row)
        peaks = ", ".join(f"{peak / 1e9:.2f}" for peak in row["peaks"])
        above, told = (max(row["peaks"]) - small) / 1e9, row["planned"] / 1e9
        end = "killed" if row["killed"] else f"{given.steps} steps, exported"
        print(
            f"{case}: {peaks} GB, {above:.2f} above a toy's, planned {told:.2f}; {end}", flush=True
        )
    harness.write(
        given.out,
        harness.report(given, base_bytes=size, held_whole=whole, numbers=numbers, rows=rows),
    )
    if given.folder is None:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
