"""What the experiments share: settings, turns by the clock, peaks of memory, runs, parts, files.

    python scripts/harness.py MODULE FUNCTION '[arguments as JSON]'

calls one function of a script and prints what it returns as JSON; :func:`in_fresh_process` starts
it so, for measurements that need a process of their own.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
import tomllib
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a clone need not be installed

# ruff: noqa: E402
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from specheads.system.files import whole_file
from specheads.system.hardware import environment, peak_memory, pick_dtype, quiet_loading

if TYPE_CHECKING:  # what imports transformers takes seconds, which --list and --help need not
    from transformers import LlamaForCausalLM, PreTrainedModel

    from specheads.attention.tree import Tree
    from specheads.decoding.exported import Subject
    from specheads.decoding.result import DecodedRow
    from specheads.drafters.heads import HeadsDrafter
    from specheads.measure.clock import Method, Prompt
    from specheads.models.checkpoint import Export
    from specheads.models.kinds import Heads

S = TypeVar("S")
CPU = torch.device("cpu")
DONE = "done"
PACKAGES = "data.packages=[numpy,accelerate,huggingface_hub,hydra,omegaconf]"
CORPUS = ("data=pycode", "data.documents=0", PACKAGES, "data.max_records=6000")
# freed blocks go back to the system at once, so that resident memory is memory in use
RETURNING = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


# settings and files


def parse(kind: type[S], argv: Sequence[str] | None = None) -> S:
    """Read settings from the command line: ``--some-name`` for each field of a dataclass.

    Args:
        kind: the dataclass. A ValueError of its ``__post_init__`` is a wrong command line; lines
            ``name: text`` of its docstring are the options' help.
        argv: the words; None takes those of this process.
    """
    page, form = sys.modules[kind.__module__].__doc__, argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=page, formatter_class=form)
    documented = "\n".join(each.__doc__ or "" for each in kind.__mro__)
    texts = dict(re.findall(r"^ +(\w+): (.+)$", documented, re.MULTILINE))
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        hint = hints[field.name]
        options: dict[str, Any] = {"help": texts.get(field.name), "default": field.default}
        options["required"] = field.default is dataclasses.MISSING
        if hint is bool:
            options["action"] = "store_true"
        elif typing.get_origin(hint) is tuple:
            options["nargs"], hint = "*", typing.get_args(hint)[0]
        if typing.get_origin(hint) is typing.Literal:
            options["choices"] = typing.get_args(hint)
        elif hint is not bool:
            options["type"] = (*typing.get_args(hint), hint)[0]  # of "Path | None" the first
        parser.add_argument("--" + field.name.replace("_", "-"), **options)
    try:
        return kind(**vars(parser.parse_args(argv)))
    except ValueError as error:
        parser.error(str(error))


def report(settings: Any, **content: Any) -> dict[str, Any]:
    """Return the document of an experiment: environment, settings, and what was found.

    Settings that are places of files on this machine are left out.
    """
    hints = typing.get_type_hints(type(settings))
    places = [name for name, hint in hints.items() if Path in (hint, *typing.get_args(hint))]
    recorded = {name: value for name, value in vars(settings).items() if name not in places}
    return {"environment": environment(), "settings": recorded, **content}


def write(path: Path | None, document: Any, *, quiet: bool = False) -> None:
    """Write a JSON file, whole or not at all, and say so; None writes nothing."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as fresh:
            fresh.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        if not quiet:
            print(f"wrote {path}")


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """Return what a JSON file holds, or make it and keep it there: measuring can be stopped."""
    if not path.is_file():
        write(path, {"value": make()}, quiet=True)
    return json.loads(path.read_text())["value"]


def publish(
    settings: Any, rows: Sequence[Any], about: Mapping[str, Any] | None = None, **content: Any
) -> None:
    """Print rows, and write them and more ``content`` to ``settings.out``, see :func:`report`.

    Args:
        settings: of the experiment.
        rows: what is printed.
        about: written among the settings.
        content: beside the rows.
    """
    print("\n\n".join(map(describe, rows)), flush=True)
    document = report(settings, rows=rows, **content)
    document["settings"] |= about or {}
    write(settings.out, document)


def describe(found: Mapping[str, Any], indent: str = "") -> str:
    """Lay figures out as text: those of one level on a line, deeper ones on indented lines below.

    Floats have four digits; of a list of numbers its median is shown, of a spread the quartiles or
    extremes too; what is empty is left out.
    """
    flat, deeper = [], []
    for name, value in found.items():
        if isinstance(value, Mapping) and "median" in value:
            middle, low, high = (f"{each:.4g}" for each in value.values())
            value = f"{middle} ({low}-{high})" if "q25" in value or "min" in value else middle
        elif isinstance(value, list) and value and isinstance(value[0], float):
            value = statistics.median(value)
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            deeper += [(name, each) for each in value]
        elif isinstance(value, Mapping):
            deeper.append((name, value))
        elif value not in (None, "", []):
            flat.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    lines = [indent + ", ".join(flat)] if flat else []
    lines += [f"{indent}{name}:\n{describe(each, indent + '    ')}" for name, each in deeper]
    return "\n".join(lines)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Lay cells out as a Markdown table that is also easy to read as text; the first is its head.

    Args:
        lines: as many cells in each.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    return "\n".join([rows[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *rows[1:]])


class NotRun(Exception):  # noqa: N818 - no error
    """What this machine cannot do; the message says why."""


def attempt(run: Callable[[], Any]) -> tuple[str, Any]:
    """Return ``ok`` and what ``run`` returns, or ``not run`` or ``failed`` and why.

    A machine that is lent for minutes is not asked twice: what fails costs its own row only.
    """
    try:
        return "ok", run()
    except NotRun as reason:
        return "not run", str(reason)
    except AssertionError as error:  # what a check says itself
        return "failed", str(error)
    except Exception as error:
        traceback.print_exc()
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return "failed", f"{type(error).__name__}: {first}"


# clocks and memory


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median and quartiles."""
    several = [*values] * (1 + (len(values) == 1))
    low, middle, high = statistics.quantiles(several, n=4, method="inclusive")
    return {"median": middle, "q25": low, "q75": high}


def take_turns(
    ways: Mapping[str, Callable[[], Any]], repeats: int, warmup: int = 1
) -> dict[str, dict[str, list[float]]]:
    """Clock some functions in turn, in reversed order every other time.

    So a slow minute of the machine hits all of them, and none always runs on a warmer cache.

    Args:
        ways: the functions by name.
        repeats: clocked rounds.
        warmup: rounds before them that are not clocked.

    Returns:
        By name ``seconds`` and ``processor_seconds`` of each round.
    """
    found = {name: {"seconds": [], "processor_seconds": []} for name in ways}
    for repeat in range(-warmup, repeats):
        for name in list(ways)[:: 1 if repeat % 2 else -1]:
            begin = time.perf_counter(), time.process_time()
            ways[name]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repeat >= 0:
                found[name]["seconds"].append(time.perf_counter() - begin[0])
                found[name]["processor_seconds"].append(time.process_time() - begin[1])
    return found


def allocator_peak(build: Callable[[], Callable[[], Any]]) -> tuple[int, Any]:
    """Return the most bytes that tensors occupy at one time during a step, and what it returns.

    Args:
        build: makes all that the step needs, which counts too, and returns the step.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = build()
        begin = time.time_ns()
        result = step()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    peak = current = 0
    for when, change in changes:
        # what was built before counts for as long as it lives, but not the peak of its building
        current += change
        peak = max(peak, current) if when >= begin else 0
    return peak, result


def resident_peak(build: Callable[[], Callable[[], Any]]) -> int:
    """Return the peak of resident memory during a step above that of Python with torch loaded."""
    torch.mm(torch.ones(256, 256), torch.ones(256, 256))
    peak_memory(CPU, reset=True)
    loaded = peak_memory(CPU)
    step = build()
    peak_memory(CPU, reset=True)
    step()
    return peak_memory(CPU) - loaded


def in_fresh_process(function: Callable[..., Any], *arguments: Any, **environ: str) -> Any:
    """Call a function of a script in a process of its own.

    Args:
        function: of a module in scripts/; returns what JSON can hold.
        arguments: what JSON can hold, or dataclasses, which arrive as dictionaries.
        environ: variables added to the environment.

    Raises:
        SystemExit: with what the process printed, if it fails.
    """
    module = Path(sys.modules[function.__module__].__file__ or "").stem
    command = [sys.executable, __file__, module, function.__name__]
    done = subprocess.run(
        [*command, json.dumps(arguments, default=vars)],
        env={**os.environ, **environ}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{module}.{function.__name__} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# models


def llama(vocab: int, hidden: int, layers: int, *, seed: int = 0, **more: Any) -> LlamaForCausalLM:
    """Return a random Llama, the same in every process; ``more`` are settings of its config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 8 * hidden // 3,
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, hidden // 64),
        "tie_word_embeddings": False,
    }
    return LlamaForCausalLM(LlamaConfig(**(sizes | more)))


def batch_of(ids: Tensor) -> dict[str, Tensor]:
    """Return token ids [B, T] as a batch of whole documents, every token of which is learned."""
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    ones = torch.ones_like(ids)
    return {"input_ids": ids, "labels": ids, "position_ids": positions, "segment_ids": ones}


def open_export(
    checkpoint: str | Path,
    num_prompts: int,
    max_new_tokens: int,
    dtype: str = "auto",
    base: str | None = None,
    device: torch.device = CPU,
) -> tuple[Export, list[Prompt], str]:
    """Return an export, prompts that it was neither trained nor calibrated on, and their sha256."""
    from specheads.measure.clock import prompt_file, prompts_of
    from specheads.models.checkpoint import load_export

    quiet_loading()
    export = load_export(checkpoint, base=base, dtype=pick_dtype(dtype, device), device=device)
    path = prompt_file("", str(checkpoint), "prompts.jsonl")
    found = prompts_of(export.base, export.tokenizer, path, num_prompts, max_new_tokens)
    return export, *found


def tree_drafter(export: Export) -> HeadsDrafter:
    """Return the drafter of an export's own tree."""
    from specheads.drafters.heads import heads_drafter
    from specheads.models.output import output_layer

    return heads_drafter(export.base, export.heads, output_layer(export.base), export.tree)


def methods_of(
    model: Export | Subject, heads: Heads | None, trees: Sequence[Tree], limit: int
) -> list[Method]:
    """Return plain decoding, transformers' generate, prompt lookup, and some trees of heads.

    Args:
        model: the base model with its tokenizer.
        heads: on it, if any.
        trees: static ones.
        limit: of the new tokens.
    """
    from specheads.measure.bench import Contest

    contest = Contest.of(model, limit)
    own = contest.of_trees(heads, trees) if heads is not None else []
    return contest.baselines() + own


def measure_rows(
    base: PreTrainedModel,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    temperature: float,
    *,
    repeats: int,
    tick: Callable[[], object] = lambda: None,
    most_texts: int = 0,
) -> list[dict[str, Any]]:
    """Clock ``methods`` at one temperature, batch 1; return a row of bench.json for each of them.

    Args:
        base: base model.
        methods: plain decoding among them.
        prompts: disjoint from those the tree was chosen on.
        temperature: of the sampling.
        repeats: clocked rounds over all prompts.
        tick: called after every decoded prompt.
        most_texts: along which rounding is measured, to judge texts that differ; 0: all.
    """
    from specheads.measure.bench import make_rows
    from specheads.measure.clock import clock

    runs = clock(methods, prompts, temperature, repeats=repeats, tick=tick)
    clocked = {(temperature, 1): runs}
    rows, _ = make_rows(base, methods, prompts, clocked, most_texts=most_texts)
    return rows


def accepted(decoded: Sequence[DecodedRow]) -> tuple[float, list[float]]:
    """Return the accept length of some texts and its 95% interval."""
    from specheads.measure.rows import ratio_ci95

    gained = [float(sum(text.accept_lengths)) for text in decoded]
    steps = [float(len(text.accept_lengths)) for text in decoded]
    bounds = [round(bound, 4) for bound in ratio_ci95([gained], [steps])]
    return round(sum(gained) / max(sum(steps), 1), 4), bounds


def accept_lengths(
    methods: Sequence[Method], prompts: Sequence[Prompt], temperatures: Sequence[float]
) -> dict[str, Any]:
    """Decode once; return for ``t<temperature>`` the methods' accept lengths, plain's ``rep8``."""
    from specheads.measure.clock import clock
    from specheads.measure.rows import rep8

    found = {}
    for temperature in temperatures:
        runs = clock(methods, prompts, temperature, repeats=1)
        figures: dict[str, Any] = {}
        for name, run in runs.items():
            length, bounds = accepted(run.decoded)
            figures[name] = {"accept_length": length, "ci95": bounds}
        if figures.pop("plain", None):
            repeated = statistics.mean(rep8(text.new_tokens) for text in runs["plain"].decoded)
            figures["rep8"] = round(repeated, 4)
        found[f"t{temperature:g}"] = figures
    return found


def clocked_rows(
    base: Any,
    methods: Any,
    prompts: Any,
    temperatures: Sequence[float],
    repeats: int,
    most_texts: int = 0,
) -> list[dict[str, Any]]:
    """Return the rows of a bench at several temperatures, see :func:`measure_rows`."""
    asked: Any = {"repeats": repeats, "most_texts": most_texts}
    heats = (measure_rows(base, methods, prompts, t, **asked) for t in temperatures)
    return [row for rows in heats for row in rows]


# runs that an experiment compares


def train(
    run: Path, settings: Sequence[str], program: Sequence[str] = ("-m", "specheads.train")
) -> Path:
    """Train into a run directory unless its export is there; return the export.

    Args:
        run: the directory.
        settings: of the recipe.
        program: what reads them, as arguments of Python.

    Raises:
        SystemExit: with the exit code of the training, if it failed.
    """
    if not (run / "export" / "config.json").is_file():
        command = [sys.executable, *program, *settings, f"name={run.name}"]
        command += [f"run_dir={run}", *(["resume=auto"] * (run / "config.yaml").is_file())]
        print("$", *command[1:], flush=True)
        with (run.parent / f"{run.name}.log").open("a") as log:
            done = subprocess.run(command, cwd=ROOT, check=False, stdout=log)
        if done.returncode:
            raise SystemExit(done.returncode)
    return run / "export"


def clocked_lines(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics that say how fast it was."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "train/tokens_per_second" in line]


def training_length(steps: int, seed: int) -> list[str]:
    """Return the settings of how long to train, and of the seed."""
    return [f"steps={steps}", f"seed={seed}", f"optim.warmup_steps={min(50, steps // 5)}"]


def regenerate(answers: Path, temperature: float) -> None:
    """Let the embedded base answer the corpus's prompts; goes on with a file that was begun.

    Raises:
        SystemExit: with its exit code, if it failed.
    """
    command = [sys.executable, "-m", "specheads.regenerate", "model=tinycode", *CORPUS]
    command += [f"output={answers}", f"temperature={temperature:g}", "max_new_tokens=320"]
    if code := subprocess.run([*command, "batch_size=64"], cwd=ROOT, check=False).returncode:
        raise SystemExit(code)


# parts: measurements one after the other


@dataclasses.dataclass(frozen=True)
class Part:
    """One measurement, or a training that others need.

    Attributes:
        name: what ``--only`` and the record call it.
        commands: each the arguments after ``python``; run in this order, from the repository.
        outputs: files that are there afterwards, relative to the repository.
        minutes: that it took on two cores of an AMD EPYC; a guide, no promise.
        needs: parts whose outputs it reads.
        reads: folders of checkpoints that lie in the repository.
        section: heading of BENCHMARKS.md whose figures it makes.
    """

    name: str
    commands: tuple[tuple[str, ...], ...]
    outputs: tuple[str, ...]
    minutes: float
    needs: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    section: str = ""

    def digest(self) -> str:
        """Return a hash of what is run, and on which shipped files."""
        files = [(ROOT / folder / "manifest.json").read_text() for folder in self.reads]
        return hashlib.sha256(json.dumps([self.commands, files]).encode()).hexdigest()[:16]


@dataclasses.dataclass
class PartsSettings:
    """What every program of parts can be asked.

    Attributes:
        resume: keep the parts that are done
        only: run these parts alone
        list: print the parts, run nothing
    """

    resume: bool = False
    only: tuple[str, ...] = ()
    list: bool = False


def outputs_of(words: Sequence[str]) -> Iterator[str]:
    """Yield the files that a command of this project writes, as its settings name them."""
    for option, word in pairwise(words):
        if option in ("--out", "--json"):
            yield word
    for key, _, value in (word.partition("=") for word in words):
        if key == "out":
            yield value
        elif key == "run_dir":
            yield from (f"{value}/export/config.json", f"{value}/metrics.jsonl")


def read_parts(path: Path, **places: str) -> list[Part]:
    """Read parts from a TOML file: their ``name``, ``minutes``, ``section`` and ``run``.

    Args:
        path: the file. ``run`` holds a command per line, as it is typed; ``writes`` names files
            that no option of a command names. What a part needs and reads follows from them.
        places: folders that stand in braces in the file.
    """
    parts: list[Part] = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["part"]:
        text = entry["run"].format(**places)
        commands = [tuple(shlex.split(line)[1:]) for line in text.strip().splitlines()]
        outputs = [each for command in commands for each in outputs_of(command)]
        outputs += [each.format(**places) for each in entry.get("writes", ())]
        runs = {part.name: part.outputs[0].removesuffix("/export/config.json") for part in parts}
        needs = [n for n, run in runs.items() if re.search(rf"{re.escape(run)}(?!\w)", text)]
        reads = dict.fromkeys(re.findall(r"data/checkpoints/\w+", text))
        fields = tuple(commands), tuple(outputs), entry["minutes"], tuple(needs), tuple(reads)
        parts.append(Part(entry["name"], *fields, entry.get("section", "")))
    return parts


def typed(command: Sequence[str]) -> str:
    """Return a command as one would type it."""
    return shlex.join(["python", *command])


def run_command(command: Sequence[str]) -> int:
    """Run ``python`` with ``command`` in the repository; return its exit code."""
    return subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode


def read_record(path: Path) -> dict[str, Any]:
    """Return what earlier runs wrote down; nothing, if there was none."""
    return json.loads(path.read_text()) if path.is_file() else {}


def is_done(part: Part, record: Mapping[str, Any]) -> bool:
    """Return whether ``part`` ended well with the same settings, and its files are still there."""
    entry = record.get(part.name, {})
    same = entry.get("state") == DONE and entry.get("settings") == part.digest()
    return same and all((ROOT / path).exists() for path in part.outputs)


def chosen(parts: Sequence[Part], only: Sequence[str]) -> list[Part]:
    """Return the parts named by ``only``, in their order, or all.

    Raises:
        SystemExit: for a name that no part has.
    """
    names = [part.name for part in parts]
    if unknown := [name for name in only if name not in names]:
        raise SystemExit(f"no part is called {unknown[0]}; there are {', '.join(names)}")
    return [part for part in parts if part.name in (only or names)]


def list_of(parts: Sequence[Part], record: Mapping[str, Any]) -> str:
    """List the parts: state, expected minutes, commands, files."""
    lines = []
    for part in parts:
        state = "done" if is_done(part, record) else "to do"
        lines.append(f"{part.name}  ({state}, about {part.minutes:g} min)")
        lines += [f"    $ {typed(command)}" for command in part.commands]
        lines += [f"    -> {path}" for path in part.outputs]
    return "\n".join([*lines, f"{sum(part.minutes for part in parts):g} min in all"])


def run_parts(parts: Sequence[Part], record_file: Path, *, resume: bool) -> list[str]:
    """Run ``parts`` in order; return the names of those that failed or lack what they need.

    A part is done when all its commands ended with 0 and its files are there. The record is written
    after every part, so that one can stop at any time.

    Args:
        parts: each behind those that it needs.
        record_file: what is done, with which settings, and how long it took.
        resume: leave out what is done.
    """
    record, failed = read_record(record_file), []
    for number, part in enumerate(parts, 1):
        where = f"[{number}/{len(parts)}] {part.name}"
        if resume and is_done(part, record):
            print(f"{where}: done, {record[part.name]['seconds'] / 60:.1f} min", flush=True)
            continue
        if lacking := [name for name in part.needs if name in failed]:
            print(f"{where}: left out, {lacking[0]} failed", flush=True)
            failed.append(part.name)
            continue
        print(f"{where}: about {part.minutes:g} min", flush=True)
        start, state = time.monotonic(), ""
        for command in part.commands:
            print(f"$ {typed(command)}", flush=True)
            if code := run_command(command):
                state = f"exit code {code} of {typed(command)}"
                break
        missing = [path for path in part.outputs if not (ROOT / path).exists()]
        state = state or (f"{missing[0]} was not written" if missing else DONE)
        failed += [part.name] * (state != DONE)
        record[part.name] = {
            "state": state,
            "settings": part.digest(),
            "seconds": round(time.monotonic() - start, 1),
            "finished": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        }
        write(record_file, record, quiet=True)
        print(f"{where}: {record[part.name]['seconds'] / 60:.1f} min, {state}", flush=True)
    spent = sum(record[part.name]["seconds"] for part in parts if part.name in record)
    print(f"{spent / 60:.1f} min in {len(parts)} parts", flush=True)
    return failed


def perform(parts: Sequence[Part], given: PartsSettings, record: Path) -> bool:
    """List the parts that were asked for, or run them; return whether they ran.

    Raises:
        SystemExit: for a name that no part has, or naming the parts that failed.
    """
    parts = chosen(parts, given.only)
    if given.list:
        print(list_of(parts, read_record(record)))
    elif failed := run_parts(parts, record, resume=given.resume):
        raise SystemExit(f"failed: {', '.join(failed)}; go on with --resume")
    return not given.list


if __name__ == "__main__":
    name, function, given = sys.argv[1:]
    print(json.dumps(getattr(importlib.import_module(name), function)(*json.loads(given))))
