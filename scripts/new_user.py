"""Do what the README's first hour says, in an empty folder, and write down what came.

    python scripts/new_user.py --json benchmarks/first_hour.json --out docs/first_hour.md
    python scripts/new_user.py --render benchmarks/first_hour.json --out docs/first_hour.md

A person has a model in a local folder and records of their own in a ``.jsonl``. Here the folder is
a copy of the embedded model under another name, and the records are functions of Python's standard
library: signature and docstring asked, body answered. Then six commands, each as a user types it:
look at the data, train, fit the tree, measure, decode, export. What they print goes into the JSON,
and from there onto the page. Exits with 1 where a command fails.
"""

import ast
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness

from specheads.system.files import tinycode_dir
from specheads.system.hardware import environment

COMMANDS = (
    "specheads preview data=jsonl data.path=my.jsonl model=./my-model",
    "specheads train +recipe=medusa1 model=./my-model data=jsonl data.path=my.jsonl name=mine"
    " steps=100",
    "specheads tree checkpoint=runs/mine/export prompts=runs/mine/prompts.jsonl",
    "specheads bench checkpoint=runs/mine/export prompts=test.jsonl num_prompts=8 repeats=1",
    'specheads generate checkpoint=runs/mine/export prompt="def mean(values):" max_new_tokens=64',
    "specheads export checkpoint=runs/mine/export format=fasterdecoding_v1 output=mine-v1",
)
TITLES = (
    "What is learned of the records",
    "Train heads; the model stays as it is",
    "Fit the tree to this machine",
    "Measure, on prompts that were kept apart",
    "Decode",
    "Give it to another engine",
)
# what makes a run of seconds of it, for the test
QUICK = {
    "preview": (),
    "train": ("steps=3", "data.rows=2", "log.wandb=disabled",
              "evaluate.num_prompts=4", "evaluate.max_new_tokens=8", "tree.choices=[[0],[0,0]]"),
    "tree": ("num_prompts=2", "num_measured=2", "max_new_tokens=8", "max_nodes=3", "repeats=1"),
    "bench": ("num_prompts=2", "max_new_tokens=8"),
    "generate": ("max_new_tokens=8",),
    "export": (),
}  # fmt: skip
SHOWN_HEAD, SHOWN_TAIL = 24, 14  # lines of a longer output that the page shows


@dataclass
class Settings:
    """What is done.

    Attributes:
        out: the page
        json: what the commands printed
        render: make the page of this JSON; run nothing
        folder: an empty folder to work in; it is kept
        quick: seconds instead of minutes
    """

    out: Path | None = None
    json: Path | None = None
    render: Path | None = None
    folder: Path | None = None
    quick: bool = False


def functions(source: Path) -> Iterator[dict[str, str]]:
    """Yield a record per documented function of a file: its head is asked, its body answered."""
    text = source.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, ast.FunctionDef) and ast.get_docstring(node)
        if not documented or len(node.body) < 2:
            continue
        docstring, first = node.body[:2]
        begin, split = node.lineno - 1, docstring.end_lineno or 0
        whole = textwrap.dedent("".join(lines[begin : node.end_lineno])).splitlines(keepends=True)
        head, body = "".join(whole[: split - begin]), "".join(whole[split - begin :])
        if first.lineno > split and 40 < len(body) < 600 and len(head) < 600:
            yield {"prompt": f"Write the body of this function.\n{head}", "completion": body}


def write_files(folder: Path, num_records: int, num_kept: int) -> None:
    """Write ``my-model/``, ``my.jsonl`` and, of other records, ``test.jsonl`` into ``folder``."""
    model = folder / "my-model"
    model.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
                 "tokenizer_config.json", "chat_template.jinja"):  # fmt: skip
        shutil.copyfile(tinycode_dir() / name, model / name)
    library = Path(sysconfig.get_path("stdlib"))
    records = itertools.chain.from_iterable(map(functions, sorted(library.glob("*.py"))))
    unique = list({record["prompt"]: record for record in records}.values())
    every = max(2, len(unique) // num_kept)
    kept = unique[::every][:num_kept]
    used = [record for i, record in enumerate(unique) if i % every][:num_records]
    for name, chosen in (("my.jsonl", used), ("test.jsonl", kept)):
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in chosen))


def run(command: str, folder: Path, extra: Sequence[str] = ()) -> dict[str, Any]:
    """Run one command as it is typed and return it with its output, seconds and exit code."""
    words = shlex.split(command)
    assert words[0] == "specheads"
    started = time.perf_counter()
    environ = {"PYTHONPATH": str(harness.ROOT), "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "specheads.cli", *words[1:], *extra], cwd=folder,
        env={**os.environ, **environ}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    return {
        "command": command,
        "extra": list(extra),
        "seconds": round(time.perf_counter() - started, 1),
        "exit": done.returncode,
        "output": tidy(done.stdout, folder),
    }


def tidy(output: str, folder: Path) -> list[str]:
    """Return the lines as a terminal would leave them: bars that were overwritten are gone."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    plain = plain.replace(str(folder) + "/", "").replace(str(folder), ".")
    lines = (line.split("\r")[-1].rstrip() for line in plain.split("\n"))
    return [line for line in lines if line and not re.search(r"\d+%\|", line)]


def render(record: dict[str, Any]) -> str:
    """Return the page that ``record`` makes."""
    machine = record["environment"]
    minutes = sum(each["seconds"] for each in record["commands"]) / 60
    parts = [
        "# The first hour",
        "Made by `python scripts/new_user.py`, which types the six commands of the README into an "
        "empty folder and writes down what they print; figures: "
        "[benchmarks/first_hour.json](../benchmarks/first_hour.json). The folder holds "
        "`my-model/`, a local model directory, "
        f"`my.jsonl`, {record['num_records']} records of one's own, and "
        f"`test.jsonl`, {record['num_kept']} more that were kept apart. The model is the embedded "
        "one under another name, the records are functions of Python's standard library. "
        "Formats that its lines name may be gone since: see [CHANGELOG.md](../CHANGELOG.md).",
        f"{machine['date']}, {machine['processor']}, threads: {machine['threads']}, "
        f"torch {machine['torch']}, transformers {machine['transformers']}; {minutes:.0f} minutes "
        "in all. A record:",
        "```json\n" + record["example"] + "\n```",
    ]
    for number, (title, done) in enumerate(zip(TITLES, record["commands"], strict=True), start=1):
        parts += [
            f"## {number}. {title}",
            f"```sh\n{done['command']}\n```",
            f"{done['seconds']:.0f} seconds:",
            "```text\n" + "\n".join(shown(done["output"])) + "\n```",
        ]
    return "\n\n".join(parts) + "\n"


def shown(lines: list[str]) -> list[str]:
    """Return the lines that the page shows, cut in their middle where there are many."""
    left_out = len(lines) - SHOWN_HEAD - SHOWN_TAIL
    if left_out <= 1:
        return lines
    return [*lines[:SHOWN_HEAD], f"... {left_out} lines ...", *lines[-SHOWN_TAIL:]]


def perform(folder: Path, *, quick: bool) -> dict[str, Any]:
    """Write the files, run the commands until one fails, and return the record."""
    num_records, num_kept = (40, 4) if quick else (1500, 24)
    write_files(folder, num_records, num_kept)
    lines = (folder / "my.jsonl").read_text().splitlines()
    done = []
    for command in COMMANDS:
        extra = QUICK[shlex.split(command)[1]] if quick else ()
        done.append(run(command, folder, extra))
        print(f"{done[-1]['seconds']:6.1f} s, exit {done[-1]['exit']}: {command}", flush=True)
        if done[-1]["exit"]:
            print("\n".join(done[-1]["output"][-20:]), file=sys.stderr)
            break
    return {
        "environment": environment(),
        "num_records": len(lines),
        "num_kept": num_kept,
        "example": min(lines, key=len),
        "commands": done,
    }


def main() -> None:
    """Perform or only render, and write."""
    given = harness.parse(Settings)
    if given.render:
        record = json.loads(given.render.read_text())
    else:
        with tempfile.TemporaryDirectory() as temporary:
            folder = given.folder or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            record = perform(folder.resolve(), quick=given.quick)
        harness.write(given.json, record)
        if record["commands"][-1]["exit"]:
            raise SystemExit(1)
    if given.out:
        given.out.write_text(render(record))


if __name__ == "__main__":
    main()
