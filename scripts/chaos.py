"""Hurt training runs in every way that a rented machine knows, and print what each one lost.

    python scripts/chaos.py [--only NAME ...] [--json OUT] [--jobs 2]

Each fault trains Medusa-1 on a tiny random model, hurts the run, resumes it with ``resume=auto``
and compares weights and metrics with those of a run that nothing happened to: bit-identical with
one process, to 1e-6 with two. The table says what the user saw, the exit code, and what was lost;
the program ends with 1 if any fault lost something or ended in anything but one clear line.
Needs Linux. Full and read-only disks are real ones, in memory, in a mount namespace of their own;
where users may not have those, and where DeepSpeed cannot compile, the rows say so.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed
sys.path.insert(0, str(Path(__file__).resolve().parent))  # a test imports this from elsewhere

from chaos_lab import (
    POISON,
    SAVED_EVERY,
    STEPS,
    Lab,
    Seen,
    Workshop,
    contents,
    laboratory,
    metric_rows,
)
from chaos_runs import Ended, NotRun, Wrong, need_deepspeed
from safetensors.torch import load_file

from specheads.system.hardware import environment

Fault = Callable[[Lab], Seen]
SLOW = {"CHAOS": "step=0.03"}  # so that a run is not over before it is hurt
NOWHERE = "http://127.0.0.1:9"  # nothing listens there


def seen(ended: Ended, lost: str) -> Seen:
    """Return the row of a command that ended."""
    return Seen(ended.line or "(nothing)", ended.code, lost)


def some_step(lab: Lab) -> int:
    """Return a step to hurt a run at: another one for every fault, the same in every run."""
    return random.Random(lab.folder.name).randrange(2, STEPS - 8)


# killed


def kill(lab: Lab) -> Seen:
    """A process that vanishes at any moment, as on a pre-empted machine."""
    ended = lab.start(**SLOW).at(some_step(lab)).send(signal.SIGKILL).wait()
    return seen(ended, lab.goes_on())


def kill_in_save(lab: Lab) -> Seen:
    """The same while a checkpoint is half-written."""
    run = lab.start(CHAOS="fsync=0.1")
    run.until(lambda: lab.saved() and lab.saving(), "a second save").send(signal.SIGKILL)
    ended = run.wait()
    if not lab.saving():
        raise Wrong("was not inside the save: nothing half-written is left")
    return seen(ended, lab.goes_on())


# disks


def full_while_saving(lab: Lab) -> Seen:
    """A disk with room for two checkpoints, of which three exist for a moment."""
    whole = next((lab.shop.unhurt(1) / "checkpoints").glob("step-*"))
    size = sum(-(-path.stat().st_size // 4096) * 4 for path in whole.rglob("*"))
    disk = lab.on_small_disk("64m")
    run = lab.start(**SLOW).at(1)
    disk.remount(f"size={round(2.6 * size) + 40}k")
    ended = run.wait().must(1, "no room|disk full")
    if not lab.saved():
        raise Wrong("the earlier checkpoints are gone")
    disk.remount("size=64m")
    return seen(ended, lab.goes_on())


def full_while_logging(lab: Lab) -> Seen:
    """Rows of metrics.jsonl that find no room, long before the next save."""
    disk = lab.on_small_disk("16m")
    run = lab.start("checkpoint.every=20", **SLOW).at(21)
    disk.fill()
    ended = run.wait().must(1, "no room|disk full", one_of=[75])
    (disk.inside / "filler").unlink()
    return seen(ended, lab.goes_on())


def full_run_dir(lab: Lab) -> Seen:
    """A disk that is full before anything begins."""
    disk = lab.on_small_disk("1m")
    disk.fill()
    ended = lab.train().must(1, "no room|disk full|No space", one_of=[2])
    begun(ended)
    (disk.inside / "filler").unlink()
    disk.remount("size=64m")
    lab.goes_on()
    return seen(ended, "nothing: nothing was begun")


def readonly_run_dir(lab: Lab) -> Seen:
    """A run directory on a disk that cannot be written."""
    disk = lab.on_small_disk("64m")
    disk.remount("ro")
    ended = lab.train().must(1, "[Rr]ead-only|cannot write", one_of=[2])
    begun(ended)
    disk.remount("rw")
    lab.goes_on()
    return seen(ended, "nothing: nothing was begun")


def file_as_run_dir(lab: Lab) -> Seen:
    """A file where the run directory should be."""
    lab.run_dir.write_text("mine\n")
    ended = lab.train().must(2, str(lab.run_dir), one_of=[1])
    begun(ended)
    if lab.run_dir.read_text() != "mine\n":
        raise Wrong("the file was overwritten")
    return seen(ended, "nothing: nothing was begun")


def begun(ended: Ended) -> None:
    """Raise Wrong if data or model were read before the directory was looked at."""
    if "train: " in ended.out:
        raise Wrong("the data and the model were read before the directory was looked at")


# numbers


def nan_loss(lab: Lab) -> Seen:
    """One record whose loss is not a number."""
    return not_finite(lab, "nan")


def inf_gradient(lab: Lab) -> Seen:
    """One record with a finite loss and infinite gradients."""
    return not_finite(lab, "inf")


def not_finite(lab: Lab, what: str) -> Seen:
    """The run stops before the step, names the record, and goes on once that is mended."""
    ended = lab.train(CHAOS=what).must(1, "not finite", r"step \d+", POISON)
    return seen(ended, lab.goes_on())


def nan_skipped(lab: Lab) -> Seen:
    """As many such steps as the user allows are left out, counted, and named."""
    ended = lab.train("optim.skip_nonfinite=99", CHAOS="nan").must(0)
    rows = (lab.run_dir / "nonfinite.jsonl").read_text().splitlines()
    skipped = len({json.loads(row)["step"] for row in rows})
    if not skipped or not all(POISON in json.dumps(json.loads(row)) for row in rows):
        raise Wrong(f"nonfinite.jsonl names {len(rows)} batches, not those with {POISON}")
    counted = max(row.get("train/skipped", 0) for row in metric_rows(lab.run_dir).values())
    if counted != skipped:
        raise Wrong(f"train/skipped says {counted}, nonfinite.jsonl {skipped}")
    tensors = load_file(lab.run_dir / "export" / "model.safetensors")
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise Wrong("the exported weights are not finite")
    said = next((line for line in ended.out.splitlines() if "not finite" in line), "(nothing)")
    return Seen(said, ended.code, f"nothing but the {skipped} steps that were to be skipped")


def nan_too_often(lab: Lab) -> Seen:
    """More of them than the user allows."""
    allowed = ("optim.skip_nonfinite=1", "resume=auto")
    ended = lab.train(*allowed, CHAOS="nan").must(1, "not finite", POISON)
    before, kept = lab.reached(), max(lab.saved(), default=0)
    lab.train(*allowed).must(0)
    if (count := len(metric_rows(lab.run_dir))) != STEPS - 1:  # a step left out has no losses
        raise Wrong(f"metrics.jsonl has losses of {count} steps, not {STEPS - 1}")
    return seen(ended, f"nothing: resumed after step {kept}, {before - kept} steps again")


# signals


def stop(lab: Lab, number: signal.Signals) -> Seen:
    """The step is finished, the state saved, and the code is the one to requeue on."""
    ended = lab.start(**SLOW).at(some_step(lab)).send(number).wait()
    ended.must(75, "stopped after step")
    if lab.reached() != max(lab.saved()):
        raise Wrong(f"saved step {max(lab.saved())} of {lab.reached()}")
    return seen(ended, lab.goes_on())


def sigterm(lab: Lab) -> Seen:
    """What most schedulers send."""
    return stop(lab, signal.SIGTERM)


def sigint(lab: Lab) -> Seen:
    """Ctrl-C."""
    return stop(lab, signal.SIGINT)


def sigusr1(lab: Lab) -> Seen:
    """What Slurm sends with --signal=USR1@120."""
    return stop(lab, signal.SIGUSR1)


def second_signal(lab: Lab) -> Seen:
    """An impatient user, in the middle of the save that the first signal asked for."""
    run = lab.start(CHAOS="fsync=0.5").at(3).send(signal.SIGTERM)
    run.until(lab.saving, "the save")
    time.sleep(1.1)  # within a second they count as one, sent to a process and to its group
    if not lab.saving():
        raise Wrong("the save was over before the second signal")
    ended = run.send(signal.SIGTERM).wait(5).must(143)
    return seen(ended, lab.goes_on())


def signal_while_loading(lab: Lab) -> Seen:
    """Before there is anything to save."""
    run = lab.start(**SLOW)
    run.until(lambda: "train: " in run.out, "the data").send(signal.SIGTERM)
    ended = run.wait().must(75)
    return seen(ended, lab.goes_on())


def signal_while_measuring(lab: Lab) -> Seen:
    """After the last step, while trees are measured for the export."""
    longer = "evaluate.max_new_tokens=300"
    run = lab.start(longer)
    run.until(lambda: "measuring trees" in run.out, "the measuring").send(signal.SIGTERM)
    ended = run.wait().must(75)
    return seen(ended, lab.goes_on("resume=auto", longer))


# two ranks


def rank_dies(lab: Lab) -> Seen:
    """One of two ranks is killed; the other waits for it in a sum."""
    run = lab.start("dist_timeout=20", **SLOW).at(SAVED_EVERY + 3)
    os.kill(run.rank(1), signal.SIGKILL)
    ended = run.wait(60).must(1, "specheads: .*rank 1")
    return seen(ended, lab.goes_on())


def rank_hangs(lab: Lab) -> Seen:
    """One of two ranks stops answering; the other says so within dist_timeout."""
    soon = {**SLOW, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}  # after which the launcher kills it
    run = lab.start("dist_timeout=10", **soon).at(SAVED_EVERY + 3)
    os.kill(run.rank(1), signal.SIGSTOP)
    ended = run.wait(90).must(1, "specheads: .*rank 1 has not answered for 10 s")
    return seen(ended, lab.goes_on())


def ranks_sigterm(lab: Lab) -> Seen:
    """The launcher of two ranks is told to stop."""
    ended = lab.start(**SLOW).at(SAVED_EVERY + 3).send(signal.SIGTERM).wait(60)
    ended.must(75, "specheads: stopped after step")
    if lab.reached() != max(lab.saved()):
        raise Wrong(f"saved step {max(lab.saved())} of {lab.reached()}")
    return seen(ended, lab.goes_on())


# the network


def wandb_unreachable(lab: Lab) -> Seen:
    """Weights & Biases is asked for, and does not answer."""
    ended = lab.train(
        "log.wandb=online", WANDB_BASE_URL=NOWHERE, WANDB_API_KEY="x" * 40, WANDB_MODE=""
    ).must(0, "wandb")
    lab.compare()
    said = [line for line in (ended.out + ended.err).splitlines() if "wandb" in line]
    return Seen(said[0], ended.code, "nothing: trained to the end, metrics are on disk")


def hub_unreachable(lab: Lab) -> Seen:
    """A base model of the hub that is not on this machine."""
    ended = lab.train("model=nobody/nothing", **offline(lab)).must(2, "nobody/nothing", one_of=[1])
    if contents(lab.run_dir):
        raise Wrong("something was written")
    return seen(ended, "nothing: nothing was begun")


def hub_unreachable_cached(lab: Lab) -> Seen:
    """The same with a base model that is in the hub's cache."""
    hub = lab.folder / "hf" / "hub" / "models--nobody--tiny"
    shutil.copytree(lab.shop.base, hub / "snapshots" / ("0" * 40))
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("0" * 40)
    ended = lab.train("model=nobody/tiny", **offline(lab)).must(0)
    lab.compare()
    return seen(ended, "nothing: trained to the end from the cache")


def offline(lab: Lab) -> dict[str, str]:
    """Return an environment in which the hub does not answer."""
    home = str(lab.folder / "hf")
    return {"HF_ENDPOINT": NOWHERE, "HF_HOME": home, "HF_HUB_OFFLINE": "", "HF_HUB_CACHE": ""}


# directories and files


def two_runs(lab: Lab) -> Seen:
    """A second run in the directory of one that lives."""
    first = lab.start(CHAOS="step=0.3").at(2)
    ended = lab.train("resume=auto").must(2, "in use by process")
    first.wait().must(0)
    lab.compare()
    return seen(ended, "nothing: the first run came to its end")


def used_run_dir(lab: Lab) -> Seen:
    """A new run in the directory of one that is over."""
    lab.train("max_steps=8").must(0)
    before = contents(lab.run_dir)
    ended = lab.train().must(2, "resume=auto")
    if contents(lab.run_dir) != before:
        raise Wrong("the earlier run was changed")
    return seen(ended, lab.goes_on())


def checkpoint_truncated(lab: Lab) -> Seen:
    """The newest checkpoint is a torn copy: passed over, with a line that says so."""
    return passed_over(lab, lambda file: os.truncate(file, file.stat().st_size // 2))


def checkpoint_lacks_file(lab: Lab) -> Seen:
    """The newest checkpoint lacks a file."""
    return passed_over(lab, Path.unlink)


def passed_over(lab: Lab, hurt: Callable[[Path], Any]) -> Seen:
    """Save at steps 8 and 16, damage the largest file of the later one, resume after the other."""
    lab.train(f"max_steps={2 * SAVED_EVERY}").must(0)
    newest = max((lab.run_dir / "checkpoints").glob("step-*"))
    file = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    hurt(file)
    lab.goes_on()
    text = (said := lab.runs[-1].wait()).out + said.err
    line = next((line for line in text.splitlines() if file.name in line), "")
    if not line:
        raise Wrong(f"nobody was told of {file.name}")
    return Seen(line, 0, f"nothing: resumed after step {SAVED_EVERY}, {SAVED_EVERY} steps again")


def checkpoint_altered(lab: Lab) -> Seen:
    """One bit of the newest checkpoint is another."""
    return passed_over(lab, flip)


def flip(file: Path) -> None:
    """Change one bit in the middle of ``file``."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def base_moved(lab: Lab) -> Seen:
    """The base model has another place when the run is resumed."""
    there = shutil.copytree(lab.shop.base, lab.folder / "there")
    lab.train(f"model={there}", "max_steps=16").must(0)
    moved = there.rename(lab.folder / "elsewhere")
    ended = lab.train(f"model={there}", "resume=auto").must(2, str(there))
    return seen(ended, lab.goes_on(f"model={moved}", "resume=auto"))


def base_changed(lab: Lab) -> Seen:
    """Another model stands where the base stood: heads must not go on on it."""
    there = shutil.copytree(lab.shop.base, lab.folder / "there")
    lab.train(f"model={there}", "max_steps=16").must(0)
    flip(there / "model.safetensors")
    ended = lab.train(f"model={there}", "resume=auto").must(2, str(there))
    flip(there / "model.safetensors")
    return seen(ended, lab.goes_on(f"model={there}", "resume=auto"))


# data


def bad_data(lab: Lab, lines: Sequence[bytes], says: str, *settings: str) -> Seen:
    """The run is refused before it begins."""
    path = lab.folder / "bad.jsonl"
    path.write_bytes(b"".join(lines))
    ended = lab.train(f"data.path={path}", *settings).must(2, says, one_of=[1])
    if set(contents(lab.run_dir)) - {"quarantine.jsonl"}:
        raise Wrong("something was written")
    return seen(ended, "nothing: nothing was begun")


def malformed(lab: Lab) -> Seen:
    """More rows that cannot be used than data.max_bad_fraction allows."""
    good = lab.shop.records.read_bytes().splitlines(keepends=True)
    return bad_data(lab, [*good, *[b"{not json\n"] * 9], r"9 of 57 .*cannot be used")


def empty_data(lab: Lab) -> Seen:
    """A file without a row."""
    return bad_data(lab, [], "bad.jsonl")


def wrong_schema(lab: Lab) -> Seen:
    """Rows of other columns than ours."""
    rows = [b'{"instruction": "add", "output": "a + b"}\n'] * 40
    return bad_data(lab, rows, "instruction|columns")


def some_bad_rows(lab: Lab) -> Seen:
    """A few rows that are not JSON, not UTF-8, empty, null or huge: kept aside, counted."""
    path = lab.folder / "mixed.jsonl"
    bad = [b"{\n", b'{"text": "\xff"}\n', b"{}\n", b"null\n"]
    bad += [b'{"text": "%s"}\n' % (b"x" * 2**20)]
    path.write_bytes(lab.shop.records.read_bytes() + b"".join(bad))
    ended = lab.train(
        f"data.path={path}", "data.max_bad_fraction=0.2", f"data.max_row_bytes={2**16}"
    ).must(0)
    kept = (lab.run_dir / "quarantine.jsonl").read_text().splitlines()
    if len(kept) != len(bad) or not all(json.loads(row)["reason"] for row in kept):
        raise Wrong(f"{len(kept)} of {len(bad)} bad rows are in quarantine.jsonl")
    lab.compare()  # the good rows are the same ones
    said = next((line for line in ended.out.splitlines() if line.startswith("read:")), "(nothing)")
    return Seen(said, ended.code, "nothing: every good row was trained on")


FAULTS: dict[str, Fault] = {
    "kill -9 at a random moment": kill,
    "kill -9 inside a save": kill_in_save,
    "disk full while saving": full_while_saving,
    "disk full while logging": full_while_logging,
    "run directory: disk full": full_run_dir,
    "run directory: read-only": readonly_run_dir,
    "run directory: a file": file_as_run_dir,
    "loss is NaN": nan_loss,
    "gradients are Inf": inf_gradient,
    "loss is NaN, to be skipped": nan_skipped,
    "loss is NaN, too often": nan_too_often,
    "SIGTERM": sigterm,
    "SIGINT": sigint,
    "SIGUSR1": sigusr1,
    "second signal while saving": second_signal,
    "SIGTERM while loading": signal_while_loading,
    "SIGTERM while measuring": signal_while_measuring,
    "wandb unreachable": wandb_unreachable,
    "hub unreachable": hub_unreachable,
    "hub unreachable, base cached": hub_unreachable_cached,
    "two runs in one directory": two_runs,
    "directory of an earlier run": used_run_dir,
    "checkpoint truncated": checkpoint_truncated,
    "checkpoint lacks a file": checkpoint_lacks_file,
    "checkpoint altered": checkpoint_altered,
    "base moved between runs": base_moved,
    "base changed between runs": base_changed,
    "data: too many bad rows": malformed,
    "data: empty": empty_data,
    "data: wrong schema": wrong_schema,
    "data: a few bad rows": some_bad_rows,
}
TWO_RANKS: dict[str, Fault] = {
    "two ranks: SIGTERM": ranks_sigterm,
    "two ranks: one killed": rank_dies,
    "two ranks: one hangs": rank_hangs,
}


def try_fault(shop: Workshop, name: str) -> dict[str, Any]:
    """Return the row of a fault: verdict ``ok``, ``FAILED``, or ``not run``."""
    begin = time.monotonic()
    row: dict[str, Any] = {"fault": name, "saw": "", "code": None, "lost": "", "verdict": "ok"}
    ranks = 2 if name in TWO_RANKS else 1
    try:
        if ranks > 1:
            need_deepspeed()
        with laboratory(shop, name, ranks) as lab:
            found = (FAULTS | TWO_RANKS)[name](lab)
        tidy = found.saw.replace(str(shop.folder), "...")
        row |= {"saw": tidy, "code": found.code, "lost": found.lost}
    except NotRun as reason:
        row |= {"lost": str(reason), "verdict": "not run"}
    except Wrong as wrong:
        row |= {"lost": str(wrong).replace(str(shop.folder), "..."), "verdict": "FAILED"}
    except Exception as error:  # of this program, which has other faults to try
        traceback.print_exc()
        row |= {"lost": f"not known: {type(error).__name__}: {error}", "verdict": "FAILED"}
    row["seconds"] = round(time.monotonic() - begin, 1)
    why = "" if row["verdict"] == "ok" else f": {row['lost']}"
    print(f"{row['verdict']:>7}  {name} ({row['seconds']:.0f} s){why}", file=sys.stderr, flush=True)
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as text; what was seen is wrapped."""
    widths = {"fault": 29, "saw": 62, "code": 4, "lost": 42, "verdict": 7}
    titles = {"saw": "what the user saw", "lost": "what was lost"}

    def line(cells: dict[str, str]) -> str:
        wrapped = {k: textwrap.wrap(cells[k], width) or [""] for k, width in widths.items()}
        height = max(map(len, wrapped.values()))
        return "\n".join(
            " | ".join(
                f"{wrapped[k][i] if i < len(wrapped[k]) else '':{width}}"
                for k, width in widths.items()
            ).rstrip()
            for i in range(height)
        )

    rule = "-+-".join("-" * width for width in widths.values())
    texts = [{k: "" if row[k] is None else str(row[k]) for k in widths} for row in rows]
    return "\n".join(
        [line({k: titles.get(k, k) for k in widths}), *(rule + "\n" + line(t) for t in texts)]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Try the faults; return 1 if one lost something."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="faults whose name has this text")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the rows as JSON")
    parser.add_argument("--jobs", type=int, default=2, help="faults of one process at a time")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the runs are left")
    parser.add_argument("--list", action="store_true", help="print the names of the faults")
    args = parser.parse_args(argv)
    faults = FAULTS | TWO_RANKS
    names = list(faults)
    if args.only:
        named = {name: f"{name} {fault.__name__}" for name, fault in faults.items()}
        names = [name for name in names if any(text in named[name] for text in args.only)]
        if not names:
            parser.error(f"no fault is named like {' or '.join(args.only)}; see --list")
    if args.list:
        print("\n".join(names))
        return 0
    folder = args.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    shop = Workshop(folder.resolve())
    try:
        alone = [name for name in names if name not in TWO_RANKS]
        with ThreadPoolExecutor(args.jobs) as pool:
            rows = list(pool.map(lambda name: try_fault(shop, name), alone))
        rows += [try_fault(shop, name) for name in names if name in TWO_RANKS]
    finally:
        shop.stable.close()
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print(table(rows))
    counts = {v: sum(row["verdict"] == v for row in rows) for v in ("ok", "FAILED", "not run")}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        report = {"environment": environment(), "steps": STEPS, "rows": rows}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return int(counts["FAILED"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
