"""Train heads on the embedded base model, then decode with them: ``make quickstart``.

Runs ``python -m specheads.train +recipe=hydra`` as a user would, and prints what the result does
on held-out prompts. ``--checkpoint`` skips the training and shows an export that is there already.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import torch
from tqdm import tqdm

from specheads.config import DecodeConfig
from specheads.decoding.conversation import StepPrinter
from specheads.decoding.exported import exported_drafter, tree_kind
from specheads.decoding.loop import decode, plain_decode
from specheads.measure.bench import Contest
from specheads.measure.clock import Prompt
from specheads.measure.rows import LOOPING_HEADLINE, REP8_LIMIT
from specheads.models.base import end_tokens
from specheads.models.checkpoint import Export
from specheads.system import hardware
from specheads.verification.sampling import Sampler

NUM_PROMPTS, MAX_NEW_TOKENS = 12, 96
NUM_COMPARED = 16  # float32 prompts whose tokens are compared


def run(*command: str) -> None:
    """Run a command as a user would.

    Raises:
        SystemExit: with its exit code, if it failed.
    """
    print("$ python", *command, flush=True)
    if code := subprocess.run([sys.executable, *command], cwd=harness.ROOT, check=False).returncode:
        raise SystemExit(code)


def train(overrides: Sequence[str]) -> Path:
    """Train under a name that no earlier run has taken, choose the tree; return the export."""
    names = ["hydra", *(f"hydra-{number}" for number in range(2, 1000))]
    name = next(name for name in names if not (harness.ROOT / "runs" / name).exists())
    export = harness.ROOT / "runs" / name / "export"
    named = [f"name={name}"] * (name != "hydra")
    run("-m", "specheads.train", "+recipe=hydra", *named, *overrides)
    print()
    # in the dtype of use: training clocked its own in that of the weights
    search = ("num_prompts=24", "num_measured=24", "max_new_tokens=64", "max_nodes=32")
    run("-m", "specheads.tree_search", f"checkpoint={export}", *search)
    return export


def measure(
    export: Export,
    prompts: list[Prompt],
    max_new_tokens: int = MAX_NEW_TOKENS,
    heats: Sequence[float] = (0.0, 1.0, LOOPING_HEADLINE),
) -> list[dict[str, Any]]:
    """Clock plain, generate, prompt lookup and the tree; return the rows of a bench."""
    methods = harness.methods_of(export, export.heads, [export.tree], max_new_tokens)
    if tree_kind(export, DecodeConfig()) == "dynamic":
        contest = Contest.of(export, max_new_tokens)
        methods += contest.of_export(export, DecodeConfig(tree="dynamic"))
    rows: list[dict[str, Any]] = []
    for heat in heats:
        if heat == LOOPING_HEADLINE and rows[0]["rep8"] <= REP8_LIMIT:
            break  # greedy text does not loop, so its figures mean something
        total = len(methods) * len(prompts)
        with tqdm(total=total, desc=f"decoding, T={heat:g}", unit="text") as bar:
            rows += harness.measure_rows(
                export.base, methods, prompts, heat, repeats=1, tick=bar.update
            )
    return rows


def count_identical(export: Export, prompts: list[Prompt], temperature: float) -> int:
    """Count prompts whose tree decoding gives the very tokens of plain decoding."""
    base, drafter, same = export.base, exported_drafter(export), 0
    eos = end_tokens(base, export.tokenizer)
    for seed, prompt in enumerate(tqdm(prompts, desc=f"comparing tokens, T={temperature:g}")):
        sampler = Sampler(temperature=temperature, seed=seed)
        request = {"max_new_tokens": MAX_NEW_TOKENS, "sampler": sampler, "eos_token_ids": eos}
        plain = plain_decode(base, prompt.input_ids, **request)
        same += plain.new_tokens == decode(base, drafter, prompt.input_ids, **request).new_tokens
    return same


def show_sample(export: Export, prompt: Prompt) -> None:
    """Decode one prompt greedily and show which tokens came from one verify step."""
    pieces: list[str] = []
    color = sys.stdout.isatty()
    printer = StepPrinter(export.tokenizer, pieces.append, color=color)
    eos, drafter = end_tokens(export.base, export.tokenizer), exported_drafter(export)
    request = {"max_new_tokens": MAX_NEW_TOKENS, "eos_token_ids": eos, "on_tokens": printer}
    result = decode(export.base, drafter, prompt.input_ids, **request)
    printer.finish()
    asked = export.tokenizer.decode(prompt.input_ids[0], skip_special_tokens=True)
    rule, text = "-" * 40, ("" if color else "|").join(pieces)
    how = "share a colour" if color else "stand between two bars"
    said = f"{len(result.new_tokens)} tokens in {result.num_steps} verify steps; the tokens of one"
    print(asked, rule, text, rule, f"{said} step {how}.", sep="\n")


def print_table(rows: list[dict[str, Any]], method: str) -> None:
    """Print one line per temperature."""
    found = {(row["method"], row["temperature"]): row for row in rows}
    print(
        "  T  plain tok/s  tree tok/s  speed-up  accept length  rep8 plain  "
        "lookup: speed-up  accept length  generate tok/s"
    )
    for heat in sorted({row["temperature"] for row in rows}):
        plain, tree = found["plain", heat], found[method, heat]
        lookup, generate = found["prompt_lookup", heat], found["hf_generate", heat]
        print(
            f"{heat:>3g}  {plain['tokens_per_second']:>11.0f}  "
            f"{tree['tokens_per_second']:>10.0f}  {tree['speedup_vs_plain']:>7.2f}x  "
            f"{tree['accept_length']:>13.2f}  {plain['rep8']:>10.2f}  "
            f"{lookup['speedup_vs_plain']:>15.2f}x  {lookup['accept_length']:>13.2f}  "
            f"{generate['tokens_per_second']:>14.0f}"
        )


def print_heldout(training: dict[str, Any]) -> None:
    """Print how far the tuned base has moved from the original."""
    heldout = training.get("heldout") or {}
    if "original_loss" not in heldout:
        print("The base model is the original one.")
        return
    tuned, original = heldout["loss"], heldout["original_loss"]
    change = f"({tuned / original - 1:+.2%}), KL(original || tuned) {heldout['kl']:.4f} nats/token."
    print(f"Held-out loss {tuned:.4f} nats/token tuned, {original:.4f} original {change}")


def main() -> None:
    """Train, decode, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, help="show this export; train nothing")
    parser.add_argument("overrides", nargs="*", help="key=value for specheads.train")
    given = parser.parse_args()
    start = time.perf_counter()
    path = given.checkpoint or train(given.overrides)
    threads, device = hardware.pin_threads(0), hardware.pick_device()
    sizes = (NUM_COMPARED, MAX_NEW_TOKENS, "float32")
    exact, compared, _ = harness.open_export(path, *sizes, device=device)
    same = {heat: count_identical(exact, compared, heat) for heat in (0.0, 1.0)}
    fast, prompts, _ = harness.open_export(path, NUM_PROMPTS, MAX_NEW_TOKENS, device=device)
    rows = measure(fast, prompts)
    name = str(fast.base.dtype).removeprefix("torch.")
    dynamic = tree_kind(fast, DecodeConfig()) == "dynamic"
    method = "tree_dynamic" if dynamic else "tree"
    tree = next(row for row in rows if row["method"] == method and row["temperature"] == 0)
    print(
        f"\n{len(prompts)} held-out prompts, up to {MAX_NEW_TOKENS} new tokens, {name}, "
        f"{threads} threads, {'a tree grown at each step' if dynamic else 'a static tree'} of"
        f" {tree['tree_nodes']} nodes:"
    )
    print_table(rows, method)
    found = [f"{number} of {len(compared)}" for number in same.values()]
    print("\nToken-identical to plain decoding of the same base in float32:", end=" ")
    print(f"{found[0]} greedy, {found[1]} sampled at T=1 with a seed.")
    if fast.base.dtype != torch.float32:
        print(
            f"In {name}, where rounding can decide a near tie: {tree['identical']} of "
            f"{tree['compared']} greedy, {tree['near_ties']} more differ first at a near tie."
        )
    print_heldout(exact.config["training"])
    print()
    show_sample(exact, max(prompts, key=lambda prompt: prompt.kind == "body"))
    print(f"\n{(time.perf_counter() - start) / 60:.1f} minutes. The export: {path}")


if __name__ == "__main__":
    main()
