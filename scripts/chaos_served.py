"""Train on the hidden states of a real vLLM server, kill server and trainer, compare the weights.

    python scripts/chaos_served.py --out benchmarks/online_features.json

For each base: heads that run the base themselves; heads that train from a server and that nothing
happens to; and the same again while kill -9 meets the server, which is started anew some seconds
later, and the trainer, which goes on with ``resume=auto``, at steps that are drawn. The weights of
the last two have to be equal bit by bit, whichever texts the server ran together: before, its
states of the same texts are compared, asked for one by one, all at one time, and after a new start.
vLLM runs in .engines, on a CPU or a GPU.

The program ends with 1 if weights differ or files are left.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import harness
import httpx
import torch
from bench_serve import free_port
from chaos_auto import in_order

from specheads.data.served import StatesServer
from specheads.models.base import load_base_model
from specheads.models.names import base_digest
from specheads.models.output import FINAL

START = 600.0  # seconds for a server to begin to answer
DATA = ("data=jsonl", "data.path=data/real/answers.jsonl.gz", "data.max_records=600")
SMALL = ("data.rows=2", "log.every=1", "log.wandb=disabled", "tree.choices=[[0],[1],[0,0]]")
MEASURED = ("evaluate.num_prompts=2", "evaluate.max_new_tokens=16", "autocast=none", "heads=shared")


@dataclass
class Settings:
    """What is trained, and how often it is killed.

    Attributes:
        bases: what is served and trained on
        steps: of each run
        kills: of the server, and of the trainer, each
        pause: seconds for which the server stays away
        texts: whose states are compared
        seed: of the moments
        folder: of the runs
        out: write the JSON there
    """

    bases: tuple[Literal["tinycode", "smollm2"], ...] = ("tinycode",)
    steps: int = 30
    kills: int = 2
    pause: float = 5.0
    texts: int = 32
    seed: int = 0
    folder: Path = Path("runs/served")
    out: Path | None = None


class Server:
    """A server of hidden states, by ``scripts/engine_features.py``.

    Attributes:
        files: the most texts' files that its folder held at one time, and their bytes.
    """

    def __init__(self, base: str, folder: Path) -> None:
        self.port, self.log = free_port(), folder / "server.log"
        self.root = f"http://127.0.0.1:{self.port}"
        script = harness.ROOT / "scripts" / "engine_features.py"
        self.command = [sys.executable, str(script), "--port", str(self.port)]
        self.command += ["--training", "+recipe=medusa1", f"model={base}", *DATA, *MEASURED]
        self.shared = Path(f"/dev/shm/specheads-states-{os.getuid()}-{self.port}")
        self.files = self.bytes = 0
        self.stopped = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()
        self.start()

    def start(self) -> None:
        """Start it; it answers some time later."""
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, cwd=harness.ROOT, start_new_session=True
            )

    def wait(self) -> float:
        """Wait until it answers; return the seconds that took.

        Raises:
            SystemExit: if it does not.
        """
        begun = time.monotonic()
        while time.monotonic() < begun + START and self.process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.root}/health", timeout=2).status_code == 200:
                    return time.monotonic() - begun
            time.sleep(0.2)
        raise SystemExit(f"the server did not start: see {self.log}")

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Kill all of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        self.process.wait()

    def _watch(self) -> None:
        while not self.stopped.wait(0.005):
            sizes = []
            for path in self.shared.glob("*.safetensors"):
                with contextlib.suppress(FileNotFoundError):
                    sizes.append(path.stat().st_size)
            self.files, self.bytes = max(self.files, len(sizes)), max(self.bytes, sum(sizes))

    def left(self) -> list[str]:
        """Return what lies in its folder."""
        return sorted(path.name for path in self.shared.iterdir())


def trainer(folder: Path, base: str, given: Settings, *words: str) -> subprocess.Popen[bytes]:
    """Start a training in a folder."""
    command = [sys.executable, "-m", "specheads.train", "+recipe=medusa1", f"model={base}", *DATA]
    command += [*SMALL, *MEASURED, f"steps={given.steps}", "checkpoint.every=4", *words]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.log").open("a") as log:
        return subprocess.Popen(
            [*command, f"run_dir={folder}"], stdout=log, stderr=log, cwd=harness.ROOT,
            env={**os.environ, "PYTHONPATH": str(harness.ROOT)}, start_new_session=True,
        )  # fmt: skip


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the steps so far."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [row for row in map(json.loads, lines) if "train/loss" in row]


def done(folder: Path, base: str, given: Settings, *words: str) -> float:
    """Train to the end; return the seconds of the process.

    Raises:
        SystemExit: if it fails.
    """
    begun = time.monotonic()
    if code := trainer(folder, base, given, *words).wait():
        raise SystemExit(f"{folder} ended with {code}: see {folder}.log")
    return time.monotonic() - begun


def at_step(process: subprocess.Popen[bytes], folder: Path, step: int) -> bool:
    """Wait until a run has taken a step; False if it has ended."""
    while process.poll() is None:
        if (rows := rows_of(folder)) and rows[-1]["step"] >= step:
            return True
        time.sleep(0.02)
    return False


def hurt(folder: Path, base: str, given: Settings, server: Server) -> list[dict[str, Any]]:
    """Train while server and trainer are killed in turn; return the kills."""
    draw, url = random.Random(given.seed), f"features.endpoint={server.root}/v1"
    steps = sorted(draw.sample(range(2, given.steps - 2), 2 * given.kills))
    whom = draw.sample(["server", "trainer"] * given.kills, 2 * given.kills)
    kills, process = [], trainer(folder, base, given, url)
    for step, what in zip(steps, whom, strict=True):
        if not at_step(process, folder, step):
            raise SystemExit(f"{folder} ended before step {step}: see {folder}.log")
        time.sleep(draw.random())
        now = rows_of(folder)[-1]["step"]
        if what == "trainer":
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process = trainer(folder, base, given, url, "resume=auto")
        else:
            server.kill()
            time.sleep(given.pause)
            server.start()
            server.wait()
        kills.append({"killed": what, "behind_step": now})
        print(kills[-1], flush=True)
    if code := process.wait():
        raise SystemExit(f"{folder} ended with {code}: see {folder}.log")
    return kills


@contextlib.contextmanager
def serving(base: str, folder: Path) -> Iterator[Server]:
    """Yield a server that answers; stop it."""
    server = Server(base, folder)
    try:
        server.wait()
        yield server
    finally:
        server.stopped.set()
        server.kill(signal.SIGTERM)
        server.kill()


def reproduced(base: str, server: Server, given: Settings) -> dict[str, int]:
    """Return how many texts have the very same states when they are asked for otherwise."""
    draw, longest = random.Random(given.seed), 500
    lengths = torch.tensor([draw.randint(8, longest) for _ in range(given.texts)])
    inside = torch.arange(longest) < lengths[:, None]
    ids = torch.randint(256, inside.shape, generator=torch.Generator().manual_seed(given.seed))
    every = {"input_ids": ids, "segment_ids": inside.long()}
    model = load_base_model(base, dtype="float32", device=torch.device("cpu"))
    named: Any = f"{server.root}/v1", model, base_digest(base), (FINAL,)
    client = StatesServer(*named, patience=START, say=print)

    def states(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return client.filled(batch)["hidden"]

    first = torch.cat(
        [states({k: v[i : i + 1] for k, v in every.items()}) for i in range(len(ids))]
    )
    found = {"texts": given.texts, "all_at_once": states(every)}
    server.kill()
    server.start()
    found["after_a_new_start"] = states(every)
    for name in ("all_at_once", "after_a_new_start"):
        found[name] = sum(map(torch.equal, first, found[name]))
    return found


def measure(base: str, given: Settings) -> dict[str, Any]:
    """Return everything about one base."""
    folder = (given.folder / base).absolute()
    folder.mkdir(parents=True)
    own, whole, killed = (folder / name for name in ("own", "whole", "killed"))
    seconds = {"base_runs_here": done(own, base, given, "features.dir=")}
    with serving(base, folder) as server:
        same = reproduced(base, server, given)
        print(same, flush=True)
        server.files = server.bytes = 0
        url = f"features.endpoint={server.root}/v1"
        seconds["served"] = done(whole, base, given, url)
        served = {
            "most_files": server.files,
            "most_bytes": server.bytes,
            "left": len(server.left()),
        }
        kills = hurt(killed, base, given, server)
        served["left_after_kills"] = len(server.left())
        server.kill()
        server.start()
        server.wait()
        served["left_after_a_new_start"] = len(server.left())
    weights = [
        {path.name: in_order(path) for path in sorted((run / "export").glob("*.safetensors"))}
        for run in (whole, killed)
    ]
    losses = [[row["train/loss"] for row in rows_of(run)] for run in (own, whole, killed)]
    pairs = [abs(a - b) / a for a, b in zip(losses[0], losses[1], strict=True)]
    return {
        "base": base,
        "reproduced": same,
        **served,
        "kills": kills,
        "weights_equal": weights[0] == weights[1] and bool(weights[0]),
        "losses_equal": losses[1] == losses[2],
        "largest_loss_difference_from_own_base": max(pairs),
        "seconds": seconds,
    }


def main() -> None:
    """Train, kill, compare."""
    given = harness.parse(Settings)
    rows = []
    for base in given.bases:
        rows.append(measure(base, given))
        print(harness.describe(rows[-1]), flush=True)
        harness.write(given.out, harness.report(given, rows=rows))
    lost = [
        row["base"]
        for row in rows
        if row["left"] or row["left_after_a_new_start"]
        or not (row["weights_equal"] and row["losses_equal"])
    ]  # fmt: skip
    raise SystemExit(bool(lost))


if __name__ == "__main__":
    main()
