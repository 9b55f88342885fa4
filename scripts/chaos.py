"""Hurt training runs in every way that a rented machine knows, and print what each one lost.

    python scripts/chaos.py [--only NAME ...] [--json OUT] [--jobs 2]
    python scripts/chaos.py --kills 20 [--ranks 2 [--one-rank]] [--json OUT]

Each fault trains Medusa-1 on a tiny random model, hurts the run, resumes it with ``resume=auto``
and compares weights and metrics with those of a run that nothing happened to: bit-identical with
one process, to 1e-6 with two. The table says what the user saw, the exit code, and what was lost.
Needs Linux. Full and read-only disks are real ones, in memory, in a mount namespace of their own;
where users may not have those, and where DeepSpeed cannot compile, the rows say so.

``--kills`` kills one run with -9 again and again instead, resumes it each time, and compares it
with one left alone: medusa2 with LoRA and dropout, evaluations whose best weights are kept, a
checkpoint every two steps. A third of the kills comes while a checkpoint is being written (proven
by the half-written folder that is left), the others at random moments from the start of the
process on: all ranks at once, or with --one-rank a drawn one alone, of which the others learn.

The program ends with 1 if anything was lost or ended in anything but one clear line.
"""

import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGSTOP, SIGTERM, SIGUSR1
from typing import Any

import harness
from chaos_runs import FORKS, IMPORTED, POISON, SAVED_EVERY, STEPS, Lab, Run, Workshop

from specheads.system.hardware import environment

SLOW = {"step": 0.03}  # so that a run is not over before it is hurt
NOWHERE = "http://127.0.0.1:9"  # nothing listens there
NOT_BEGUN = "nothing: nothing was begun"
FULL = "no room|disk full|No space"
KILLED = """+recipe=medusa2 name=kill resume=auto warmup_heads=0.3 adapter=lora optim=adamw
    optim.warmup_steps=2 evaluate.every=5 checkpoint.every=2"""

# the run that shows it, what was lost, and what the user saw where that is not its last line
Seen = tuple[Run, str] | tuple[Run, str, str]


@dataclass
class Settings:
    """What is tried.

    Attributes:
        only: faults whose name has this text
        json: also write the rows as JSON
        jobs: faults of one process at a time
        keep: folder where the runs are left
        list: print the names of the faults
        kills: kill one run as often, instead of the faults
        ranks: of the killed run
        one_rank: kill one rank alone, another each time
        steps: of the killed run
        seed: of the moments of the kills
    """

    only: tuple[str, ...] = ()
    json: Path | None = None
    jobs: int = 2
    keep: Path | None = None
    list: bool = False
    kills: int = 0
    ranks: int = 1
    one_rank: bool = False
    steps: int = 160
    seed: int = 0

    def __post_init__(self) -> None:
        if not chosen(self.only):
            raise ValueError(f"no fault is named like {' or '.join(self.only)}; see --list")


def signalled(lab: Lab, number: int, *settings: str, text: str = "", code: int = 75) -> Seen:
    """A signal at some step, or when the console has said ``text``; all but SIGKILL save."""
    run = lab.start(*settings, **SLOW)
    if text:
        run.until(lambda: text in run.printed("out"), text)
    else:  # another step for every fault, the same in every run
        run.at(random.Random(lab.folder.name).randrange(2, STEPS - 8))
    run.send(number).ends(code, seconds=60)
    done = lab.reached() if code == 75 else lab.saved()
    assert lab.saved() == done, f"saved step {lab.saved()} of {done}"
    return run, lab.goes_on("resume=auto", *settings)


def kill_in_save(lab: Lab) -> Seen:
    """A process that vanishes while a checkpoint is half-written."""
    run = lab.start(fsync=0.1)
    run.until(lambda: lab.saved() and lab.half_saved(), "a second save").send(SIGKILL).ends(-9)
    assert lab.half_saved(), "was not inside the save: nothing half-written is left"
    return run, lab.goes_on()


def second_signal(lab: Lab) -> Seen:
    """An impatient user, in the middle of the save that the first signal asked for."""
    run = lab.start(fsync=0.5).at(3).send(SIGTERM).until(lab.half_saved, "the save")
    time.sleep(1.1)  # within a second they count as one, sent to a process and to its group
    assert lab.half_saved(), "the save was over before the second signal"
    return run.send(SIGTERM).ends(143, seconds=5), lab.goes_on()


def full_while_saving(lab: Lab) -> Seen:
    """A disk with room for two checkpoints, of which three exist for a moment."""
    whole = next((lab.shop.unhurt(1).seen / "checkpoints").glob("step-*"))
    size = sum(-(-path.stat().st_size // 4096) * 4 for path in whole.rglob("*"))
    disk = lab.on_small_disk("64m")
    run = lab.start(**SLOW).at(1)
    disk.remount(f"size={round(2.6 * size) + 40}k")
    run.ends(1, says=[FULL])
    assert lab.saved(), "the earlier checkpoints are gone"
    disk.remount("size=64m")
    return run, lab.goes_on()


def full_while_logging(lab: Lab) -> Seen:
    """Rows of metrics.jsonl that find no room, long before the next save."""
    disk = lab.on_small_disk("16m")
    run = lab.start("checkpoint.every=20", **SLOW).at(21)
    disk.fill()
    run.ends(1, 75, says=[FULL])
    disk.empty()
    return run, lab.goes_on()


def unusable(lab: Lab, says: str, *, kind: str) -> Seen:
    """A run directory whose disk is ``full`` or ``ro``, or that is a file; seen before all else."""
    if kind == "file":
        lab.run_dir.write_text("mine\n")
    else:
        disk = lab.on_small_disk("1m")
        disk.fill()
        disk.remount("ro" if kind == "ro" else "rw")
    run = lab.start().ends(1, 2, says=[says])
    assert "train: " not in run.printed(), "data and model were read before the directory"
    if kind != "file":
        disk.empty()
        lab.goes_on()
    else:
        assert lab.run_dir.read_text() == "mine\n", "the file was overwritten"
    return run, NOT_BEGUN


def not_finite(lab: Lab, **hurt: float) -> Seen:
    """The run stops before the step, names the record, and goes on once that is mended."""
    run = lab.start(**hurt).ends(1, says=["not finite", r"step \d+", POISON])
    return run, lab.goes_on()


def nan_skipped(lab: Lab) -> Seen:
    """As many such steps as the user allows are left out, counted, and named."""
    run = lab.start("optim.skip_nonfinite=99", loss=float("nan")).ends(0)
    lines = (lab.run_dir / "nonfinite.jsonl").read_text().splitlines()
    skipped = len({json.loads(line)["step"] for line in lines})
    named = sum(POISON in line for line in lines)
    assert 0 < named == len(lines), f"{named} of {len(lines)} batches left out hold {POISON}"
    counted = max(row.get("train/skipped", 0) for row in lab.rows())
    assert counted == skipped, f"train/skipped says {counted}, nonfinite.jsonl {skipped}"
    odd = [name for name, tensor in lab.tensors().items() if not tensor.isfinite().all()]
    assert not odd, f"exported weights are not finite: {odd[0]}"
    lost = f"nothing but the {skipped} steps that were to be skipped"
    return run, lost, run.said("not finite")


def nan_too_often(lab: Lab) -> Seen:
    """More of them than the user allows."""
    allowed = ("optim.skip_nonfinite=1", "resume=auto")
    run = lab.start(*allowed, loss=float("nan")).ends(1, says=["not finite", POISON])
    before, kept = lab.reached(), lab.saved()
    lab.start(*allowed).ends(0)
    count = sum("train/loss" in row for row in lab.rows())
    assert count == STEPS - 1, f"metrics.jsonl has losses of {count} steps, not {STEPS - 1}"
    return run, f"nothing: resumed after step {kept}, {before - kept} steps again"


def rank_gone(lab: Lab, number: int, says: str, **env: str) -> Seen:
    """One of two ranks is killed, or stops answering; the other waits for it in a sum."""
    run = lab.start("dist_timeout=10", env=env).at(SAVED_EVERY + 3).send(number, rank=1)
    return run.ends(1, says=[f"specheads: .*{says}"], seconds=90), lab.goes_on()


def wandb_unreachable(lab: Lab) -> Seen:
    """Weights & Biases is asked for, and does not answer."""
    away = {"WANDB_BASE_URL": NOWHERE, "WANDB_API_KEY": "x" * 40, "WANDB_MODE": ""}
    run = lab.start("log.wandb=online", env=away).ends(0, says=["wandb"])
    lab.compare(lab.shop.unhurt(1))
    return run, "nothing: trained to the end, metrics are on disk", run.said("wandb")


def hub_unreachable(lab: Lab, *, cached: bool) -> Seen:
    """A base model of the hub, which does not answer: in the hub's cache, or not here."""
    home = lab.folder / "hf"
    if cached:
        hub = home / "hub" / "models--nobody--tiny"
        shutil.copytree(lab.shop.base, hub / "snapshots" / ("0" * 40))
        (hub / "refs").mkdir()
        (hub / "refs" / "main").write_text("0" * 40)
    away = {"HF_ENDPOINT": NOWHERE, "HF_HOME": str(home), "HF_HUB_OFFLINE": "", "HF_HUB_CACHE": ""}
    run = lab.start("model=nobody/tiny", env=away)
    if cached:
        run.ends(0)
        lab.compare(lab.shop.unhurt(1))
        return run, "nothing: trained to the end from the cache"
    run.ends(2, 1, says=["nobody/tiny"])
    assert not lab.contents(), "something was written"
    return run, NOT_BEGUN


def two_runs(lab: Lab) -> Seen:
    """A second run in the directory of one that lives."""
    first = lab.start(step=0.3).at(2)
    run = lab.start("resume=auto").ends(2, says=["in use by process"])
    first.ends(0)
    lab.compare(lab.shop.unhurt(1))
    return run, "nothing: the first run came to its end"


def used_run_dir(lab: Lab) -> Seen:
    """A new run in the directory of one that is over."""
    lab.start("max_steps=8").ends(0)
    before = lab.contents()
    run = lab.start().ends(2, says=["resume=auto"])
    assert lab.contents() == before, "the earlier run was changed"
    return run, lab.goes_on()


def halve(file: Path) -> None:
    """Cut a file in its middle."""
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    """Change one bit in the middle of ``file``."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def passed_over(lab: Lab, hurt: Callable[[Path], Any]) -> Seen:
    """Save at steps 8 and 16, damage the largest file of the later one, resume after the other."""
    lab.start(f"max_steps={2 * SAVED_EVERY}").ends(0)
    newest = max((lab.run_dir / "checkpoints").glob("step-*"))
    file = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    hurt(file)
    lab.goes_on()
    lost = f"nothing: resumed after step {SAVED_EVERY}, {SAVED_EVERY} steps again"
    return lab.runs[-1], lost, lab.runs[-1].said(file.name)


def base_differs(lab: Lab, *, moved: bool) -> Seen:
    """The base has another place when the run is resumed, or another model stands in its own."""
    there = shutil.copytree(lab.shop.base, lab.folder / "there")
    lab.start(f"model={there}", "max_steps=16").ends(0)
    right = there.rename(lab.folder / "elsewhere")
    if not moved:
        shutil.copytree(right, there)
        flip(there / "model.safetensors")
    run = lab.start(f"model={there}", "resume=auto").ends(2, says=[str(there)])
    return run, lab.goes_on(f"model={right}", "resume=auto")


def bad_data(lab: Lab, content: bytes, says: str, *, beside_good: bool = False) -> Seen:
    """The run is refused before it begins."""
    path = lab.folder / "bad.jsonl"
    path.write_bytes(lab.shop.records.read_bytes() * beside_good + content)
    run = lab.start(f"data.path={path}").ends(2, 1, says=[says])
    assert not set(lab.contents()) - {"quarantine.jsonl"}, "something was written"
    return run, NOT_BEGUN


def some_bad_rows(lab: Lab) -> Seen:
    """A few rows that are not JSON, not UTF-8, empty, null or huge: kept aside, counted."""
    path = lab.folder / "mixed.jsonl"
    bad = [b"{\n", b'{"text": "\xff"}\n', b"{}\n", b"null\n", b'{"text": "%s"}\n' % (b"x" * 2**20)]
    path.write_bytes(lab.shop.records.read_bytes() + b"".join(bad))
    allowed = ("data.max_bad_fraction=0.2", f"data.max_row_bytes={2**16}")
    run = lab.start(f"data.path={path}", *allowed).ends(0)
    lines = (lab.run_dir / "quarantine.jsonl").read_text().splitlines()
    kept = sum(bool(json.loads(line)["reason"]) for line in lines)
    assert kept == len(lines) == len(bad), f"{kept} of {len(bad)} rows are in quarantine.jsonl"
    lab.compare(lab.shop.unhurt(1))  # the good rows are the same ones
    return run, "nothing: every good row was trained on", run.said("read:")


SCHEMA = b'{"instruction": "add", "output": "a + b"}\n' * 40
TOO_MANY = partial(bad_data, content=b"{not json\n" * 9, says=r"9 of 57 .*cannot be used")
HANGS = partial(rank_gone, number=SIGSTOP, says="rank 1 has not answered for 10 s")
LATE = "evaluate.max_new_tokens=300"
FAULTS: dict[str, Callable[[Lab], Seen]] = {
    "kill -9 at a random moment": partial(signalled, number=SIGKILL, code=-9),
    "kill -9 inside a save": kill_in_save,
    "disk full while saving": full_while_saving,
    "disk full while logging": full_while_logging,
    "run directory: disk full": partial(unusable, says=FULL, kind="full"),
    "run directory: read-only": partial(unusable, says="[Rr]ead-only|cannot write", kind="ro"),
    "run directory: a file": partial(unusable, says="run", kind="file"),
    "loss is NaN": partial(not_finite, loss=float("nan")),
    "gradients are Inf": partial(not_finite, gradient=float("inf")),
    "loss is NaN, to be skipped": nan_skipped,
    "loss is NaN, too often": nan_too_often,
    "SIGTERM": partial(signalled, number=SIGTERM),
    "SIGINT": partial(signalled, number=SIGINT),
    "SIGUSR1": partial(signalled, number=SIGUSR1),
    "second signal while saving": second_signal,
    "SIGTERM while loading": partial(signalled, number=SIGTERM, text="train: "),
    "SIGTERM while measuring": lambda lab: signalled(lab, SIGTERM, LATE, text="measuring trees"),
    "wandb unreachable": wandb_unreachable,
    "hub unreachable": partial(hub_unreachable, cached=False),
    "hub unreachable, base cached": partial(hub_unreachable, cached=True),
    "two runs in one directory": two_runs,
    "directory of an earlier run": used_run_dir,
    "checkpoint truncated": partial(passed_over, hurt=halve),
    "checkpoint lacks a file": partial(passed_over, hurt=Path.unlink),
    "checkpoint altered": partial(passed_over, hurt=flip),
    "base moved between runs": partial(base_differs, moved=True),
    "base changed between runs": partial(base_differs, moved=False),
    "data: too many bad rows": partial(TOO_MANY, beside_good=True),
    "data: empty": partial(bad_data, content=b"", says="bad.jsonl"),
    "data: wrong schema": partial(bad_data, content=SCHEMA, says="instruction|columns"),
    "data: a few bad rows": some_bad_rows,
    "two ranks: SIGTERM": partial(signalled, number=SIGTERM),
    "two ranks: one killed": partial(rank_gone, number=SIGKILL, says="rank 1"),
    # after these seconds the launcher kills the rank that hangs
    "two ranks: one hangs": partial(HANGS, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="5"),
}


def chosen(only: Sequence[str]) -> list[str]:
    """Return the faults whose name has one of some texts, or all."""
    return [name for name in FAULTS if not only or any(text in name for text in only)]


def try_fault(shop: Workshop, name: str) -> dict[str, Any]:
    """Return the row of a fault: verdict ``ok``, ``failed``, or ``not run``."""
    begin, lab = time.monotonic(), Lab(shop, name, ranks=2 if name.startswith("two ranks") else 1)
    row: dict[str, Any] = {"fault": name, "saw": "", "code": None}
    status, found = harness.attempt(partial(FAULTS[name], lab))
    lab.close()
    if status == "ok":
        run, found, *saw = found
        row |= {"saw": (*saw, run.line)[0].replace(str(shop.folder), "..."), "code": run.poll()}
    row |= {"lost": found.replace(str(shop.folder), "..."), "verdict": status}
    row["seconds"] = round(time.monotonic() - begin, 1)
    print(f"{status:>7}  {name} ({row['seconds']:.0f} s)", file=sys.stderr, flush=True)
    return row


def hurt_once_each(shop: Workshop, given: Settings) -> bool:
    """Try the faults; return whether one lost something."""
    names = chosen(given.only)
    alone = [name for name in names if not name.startswith("two ranks")]
    with ThreadPoolExecutor(given.jobs) as pool:
        rows = list(pool.map(partial(try_fault, shop), alone))
    rows += [try_fault(shop, name) for name in names if name not in alone]
    print("\n\n".join(map(harness.describe, rows)))
    counts = {v: sum(row["verdict"] == v for row in rows) for v in ("ok", "failed", "not run")}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    harness.write(given.json, {"environment": environment(), "steps": STEPS, "rows": rows})
    return counts["failed"] > 0


def kill_once(
    lab: Lab, moment: str, draw: random.Random, loading: float, *, one_rank: bool
) -> dict[str, Any] | None:
    """Start a run, kill all its processes or one rank at a moment, and return what that left.

    Args:
        lab: of the run.
        moment: save, step or start.
        draw: for the exact moment.
        loading: seconds within which a kill comes that is meant for the start.
        one_rank: kill a drawn rank, and wait until the others have ended by themselves.

    Returns:
        None where the run was over before; else the moment, the last step of metrics.jsonl, the
        newest checkpoint's, and whether a half-written one was left.
    """
    half, rows = lab.half_saved(), lab.seen / "metrics.jsonl"
    goal = lab.saved() + draw.randint(1, 3)
    # a resumed run puts the rows that it keeps into a new file
    earlier, end = rows.exists() and rows.stat().st_ino, time.monotonic() + loading * draw.random()
    has_come: dict[str, Callable[[], Any]] = {
        "save": lambda: lab.half_saved() - half,
        "step": lambda: rows.exists() and rows.stat().st_ino != earlier and lab.reached() >= goal,
        "start": lambda: time.monotonic() > end,
    }
    run = lab.start()
    while run.poll() is None and not has_come[moment]():
        time.sleep(0.001)
    time.sleep(draw.uniform(0, {"save": 0.02, "step": 0.1, "start": 0.0}[moment]))
    if run.poll() is not None:
        run.ends(0)
        return None
    left: dict[str, Any] = {"moment": moment}
    written = lab.half_saved() - half
    if one_rank:
        left["rank"], begin = draw.randrange(lab.ranks), time.monotonic()
        # one that waits for the group to form hears no signal, and its launcher waits for it
        run.send(SIGKILL, left["rank"]).ends(1, seconds=300)
        left["others_ended_after"] = time.monotonic() - begin
    else:
        run.kill()
    left |= {"step": lab.reached(), "checkpoint": lab.saved()}
    # ranks that end by themselves remove what they have half written
    torn = any(path.name > f".step-{lab.saved():07d}.tmp" for path, _ in written)
    return {**left, "inside_save": torn if one_rank else bool(lab.half_saved() - half)}


def kill_again_and_again(shop: Workshop, given: Settings) -> bool:
    """Kill one run, resume it, kill it again; return whether something was lost."""
    settings = f"{KILLED} steps={given.steps} optim.accumulation={4 // given.ranks}"
    whole, hurt = (Lab(shop, name, given.ranks, settings) for name in ("whole", "hurt"))
    kills: list[dict[str, Any]] = []
    differences: list[str] = []
    try:
        hurt.start("dry_run=true").ends(0)  # what runs are forked from is there
        begin = time.monotonic()
        run = whole.start().until(whole.reached, "the first step")
        loading = 1.1 * (time.monotonic() - begin)  # while it loads, and sometimes a little later
        run.ends(0, seconds=600)
        draw = random.Random(given.seed)
        for number in range(3 * given.kills):
            if len(kills) == given.kills:
                break
            moment = ("save", "step", "start")[number % 3]
            left = kill_once(hurt, moment, draw, loading, one_rank=given.one_rank)
            if left:
                kills.append(left)
                print(f"kill {len(kills)}: {left}", flush=True)
        hurt.start().ends(0, seconds=600)
        hurt.compare(whole)
    except AssertionError as wrong:
        differences.append(str(wrong))
    finally:
        whole.close()
        hurt.close()
    inside = sum(kill["inside_save"] for kill in kills)
    came = f"{len(kills)} kills, {inside} inside a save"
    if len(kills) < given.kills or not inside:
        differences.append(f"only {came}")
    found = "; ".join(differences) or ("bit-identical" if given.ranks == 1 else "equal to 1e-6")
    print(f"{given.ranks} ranks: {came}; weights and rows of metrics.jsonl {found}")
    harness.write(given.json, harness.report(given, kills=kills, differences=differences))
    return bool(differences)


def main(argv: Sequence[str] | None = None) -> int:
    """Hurt runs; return 1 if something was lost."""
    given = harness.parse(Settings, argv)
    if given.list:
        print("\n".join(chosen(given.only)))
        return 0
    folder = given.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        shop = Workshop(folder.resolve())
        return int((kill_again_and_again if given.kills else hurt_once_each)(shop, given))
    finally:
        if not given.keep:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    FORKS.set_forkserver_preload(IMPORTED)  # of all forks of this process, which is ours alone here
    raise SystemExit(main())
