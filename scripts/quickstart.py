"""Train a drafter on the embedded base model, and show what it is worth: ``make quickstart``.

Two minutes of ``python -m specheads.train +recipe=block``, then held-out prompts, as many that ask
for new text as edits of given text: plain decoding, what copies alone give, what was trained alone,
and both together. ``--checkpoint`` skips the training and shows an export that is there already.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import harness
import torch
from tqdm import tqdm

from specheads.config import DecodeConfig
from specheads.data.pycode import NEW_TEXT
from specheads.decoding.conversation import StepPrinter
from specheads.decoding.exported import Subject, choose_drafter, load_subject
from specheads.decoding.loop import decode
from specheads.measure import rows as report
from specheads.measure.bench import Contest
from specheads.measure.clock import Method, Prompt, Runs, clock, prompt_file, prompts_of
from specheads.models.base import end_tokens
from specheads.system import hardware

MINUTES = 2  # of the training
NUM_NEW, NUM_EDITS, MAX_NEW_TOKENS = 6, 3, 96  # prompts of each such kind, and of each other
NUM_EXACT = 8  # prompts compared in float32, where the fastest dtype is another
DRAFTERS = {
    "prompt lookup": "lookup",
    "copies": "suffix",
    "trained": "heads",
    "both": "heads+suffix",
}
Clocked = Mapping[float, Mapping[str, Runs]]  # temperature -> method -> its runs


def run(*command: str) -> None:
    """Run a command as a user would.

    Raises:
        SystemExit: with its exit code, if it failed.
    """
    print("$ python", *command, flush=True)
    if code := subprocess.run([sys.executable, *command], cwd=harness.ROOT, check=False).returncode:
        raise SystemExit(code)


def train(overrides: Sequence[str]) -> Path:
    """Train under a name that no earlier run has taken; return the export."""
    names = ["quickstart", *(f"quickstart-{number}" for number in range(2, 1000))]
    name = next(name for name in names if not (harness.ROOT / "runs" / name).exists())
    given = f"name={name}", f"minutes={MINUTES}"
    run("-m", "specheads.train", "+recipe=block", *given, *overrides)
    return harness.ROOT / "runs" / name / "export"


def methods_of(subject: Subject, limit: int) -> list[Method]:
    """Return plain decoding, copies, heads, and heads with copies.

    Args:
        subject: the base model with its heads.
        limit: of the new tokens.
    """
    contest = Contest.of(subject, limit)
    methods = [contest.ours()]
    for name, drafter in DRAFTERS.items():
        chosen = choose_drafter(subject, DecodeConfig(drafter=drafter))
        methods.append(contest.ours(name, chosen.drafter, chosen.num_nodes))
    return methods


def clocked(methods: Sequence[Method], prompts: Sequence[Prompt], *heats: float) -> Clocked:
    """Decode all prompts with all methods in turn, at each temperature."""
    found = {}
    for heat in heats:
        total = len(methods) * len(prompts)
        with tqdm(total=total, desc=f"decoding, T={heat:g}", unit="text") as bar:
            found[heat] = clock(methods, prompts, heat, repeats=1, tick=bar.update)
    return found


def balanced(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return as many prompts that ask for new text as edits, in their order."""
    kept, counts = [], dict[str, int]()
    for prompt in prompts:
        most = NUM_NEW if prompt.kind in NEW_TEXT else NUM_EDITS
        counts[prompt.kind] = number = counts.get(prompt.kind, 0) + 1
        kept += [prompt] * (number <= most)
    return kept


def groups_of(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """Return the numbers of the prompts of each kind, of new text, of edits, and of all."""
    kinds = [prompt.kind for prompt in prompts]
    ordered = sorted(dict.fromkeys(kinds), key=lambda kind: kind not in NEW_TEXT)
    groups = {kind: [i for i, each in enumerate(kinds) if each == kind] for kind in ordered}
    new = [i for i, kind in enumerate(kinds) if kind in NEW_TEXT]
    if new:
        groups["new text"] = new
        groups["edits"] = [i for i in range(len(kinds)) if i not in new]
    return groups | {"all": [*range(len(kinds))]}


def print_tables(found: Clocked, groups: Mapping[str, list[int]]) -> None:
    """Print for each temperature a line per group: plain tokens/s, and speed-ups over it."""
    width = max(map(len, groups))
    for heat, runs in found.items():
        names = [name for name in runs if name != "plain"]
        head = f"T={heat:g}".ljust(width) + "  rep8  plain tok/s"
        print("\n" + head + "".join(f"{name:>16}" for name in names))
        for group, chosen in groups.items():
            plain = runs["plain"].only(chosen)
            work, cells = report.whole(plain), ""
            for name in names:
                own = runs[name].only(chosen)
                ratio, _ = report.speedup(report.whole(own), work)
                length = report.mean_accept_length([each.accept_lengths for each in own.decoded])
                cells += f"{f'{ratio:.2f}x ({length:.2f})':>16}"
            repeated, speed = report.mean_rep8(plain), report.speed(work)
            print(f"{group:<{width}}  {repeated:>4.2f}  {speed:>11.0f}{cells}")
    print("Times as fast as plain decoding (tokens per forward pass of the base).")


def best_of(runs: Mapping[str, Runs]) -> str:
    """Return the drafter with the most tokens per second."""
    return max(DRAFTERS, key=lambda name: report.speed(report.whole(runs[name])))


def print_identical(found: Clocked, said: str) -> None:
    """Print how many texts are plain decoding's, token by token."""
    told = []
    for name in DRAFTERS:
        same = total = 0
        for runs in found.values():
            pairs = zip(runs[name].decoded, runs["plain"].decoded, strict=True)
            same += sum(own.new_tokens == plain.new_tokens for own, plain in pairs)
            total += len(runs[name].decoded)
        told.append(f"{name} {same} of {total}")
    print(f"Token by token the texts of plain decoding {said}: {', '.join(told)}.")


def show_sample(subject: Subject, name: str, prompt: Prompt) -> None:
    """Decode one prompt greedily and show which tokens came from one verify step."""
    pieces: list[str] = []
    color = sys.stdout.isatty()
    printer = StepPrinter(subject.tokenizer, pieces.append, color=color)
    drafter = choose_drafter(subject, DecodeConfig(drafter=DRAFTERS[name])).drafter
    eos = end_tokens(subject.base, subject.tokenizer)
    request = {"max_new_tokens": MAX_NEW_TOKENS, "eos_token_ids": eos, "on_tokens": printer}
    result = decode(subject.base, drafter, prompt.input_ids, **request)
    printer.finish()
    asked = subject.tokenizer.decode(prompt.input_ids[0], skip_special_tokens=True)
    rule, text = "-" * 40, ("" if color else "|").join(pieces)
    how = "share a colour" if color else "stand between two bars"
    said = f"{len(result.new_tokens)} tokens in {result.num_steps} verify steps; the tokens of one"
    print(asked, rule, text, rule, f"{said} step {how}.", sep="\n")


def main() -> None:
    """Train, decode, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, help="show this export; train nothing")
    parser.add_argument("overrides", nargs="*", help="key=value for specheads.train")
    given = parser.parse_args()
    start = time.perf_counter()
    path = given.checkpoint or train(given.overrides)
    threads, device = hardware.pin_threads(0), hardware.pick_device()
    hardware.quiet_loading()
    dtype = hardware.pick_dtype("auto", device)
    subject = load_subject(str(path), dtype=dtype, device=device)
    file = prompt_file("", str(path), "prompts.jsonl")
    if given.checkpoint is None:  # those of the run are fewer, and what its tree was chosen on
        file = prompt_file("", "tinycode", "prompts.jsonl")
    many, _ = prompts_of(subject.base, subject.tokenizer, file, 1000, MAX_NEW_TOKENS)
    prompts = balanced(many)
    found = clocked(methods_of(subject, MAX_NEW_TOKENS), prompts, 0.0, 1.0)
    name = str(dtype).removeprefix("torch.")
    print(
        f"\n{len(prompts)} held-out prompts, up to {MAX_NEW_TOKENS} new tokens, {name}, {threads}"
        " threads; copies are free, and what was trained is worth what it adds to them:"
    )
    print_tables(found, groups_of(prompts))
    print()
    print_identical(found, f"in {name}")
    if dtype != torch.float32:  # where rounding can decide a near-tie
        exact = load_subject(str(path), device=device)
        methods = methods_of(exact, MAX_NEW_TOKENS)
        print_identical(clocked(methods, prompts[:NUM_EXACT], 0.0, 1.0), "in float32")
    best = best_of(found[0.0])
    print(f"\nThe fastest drafter at T=0 is {best}; a prompt decoded with it:\n")
    show_sample(subject, best, prompts[0])
    print(f"\n{(time.perf_counter() - start) / 60:.1f} minutes. The export: {path}")


if __name__ == "__main__":
    main()
