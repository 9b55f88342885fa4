"""Train heads on the embedded base model, then decode with them: ``make quickstart``.

Runs ``python -m specheads.train +recipe=hydra`` as a user would, and prints what the result does
on held-out prompts. ``--checkpoint`` skips the training and shows an export that is there already.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from specheads import tree_search
from specheads.config import DecodeConfig, TreeSearchConfig
from specheads.decoding.conversation import StepPrinter
from specheads.decoding.exported import exported_drafter, tree_kind
from specheads.decoding.loop import decode, plain_decode
from specheads.measure.bench import make_methods, measure_rows
from specheads.measure.clock import Prompt, max_prompt_length, prompt_file, read_prompts
from specheads.measure.rows import LOOPING_HEADLINE, REP8_LIMIT
from specheads.models.base import end_tokens
from specheads.models.checkpoint import Export, load_export
from specheads.models.output import output_layer
from specheads.system import hardware
from specheads.verification.sampling import Sampler

ROOT = Path(__file__).resolve().parents[1]
NUM_PROMPTS, MAX_NEW_TOKENS = 12, 96
NUM_COMPARED = 16  # float32 prompts whose tokens are compared


def free_name(runs: Path, wanted: str = "hydra") -> str:
    """Return a name that no earlier run has taken: ``hydra``, then ``hydra-2``, ..."""
    names = [wanted, *(f"{wanted}-{number}" for number in range(2, 1000))]
    return next(name for name in names if not (runs / name).exists())


def train(overrides: Sequence[str]) -> Path:
    """Train as a user would; return the export.

    Raises:
        SystemExit: with the exit code of the training, if it failed.
    """
    name = free_name(ROOT / "runs")
    command = ["-m", "specheads.train", "+recipe=hydra"]
    command += [f"name={name}"] if name != "hydra" else []
    command += overrides
    print("$ python", *command, flush=True)
    done = subprocess.run([sys.executable, *command], cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    return ROOT / "runs" / name / "export"


def search_tree(checkpoint: Path) -> None:
    """Choose the tree in the dtype of use; training clocked its own in that of the weights."""
    settings = TreeSearchConfig(
        checkpoint=str(checkpoint),
        num_prompts=24,
        num_measured=24,
        max_new_tokens=64,
        max_nodes=32,
    )
    tree_search.run(settings)


def load(checkpoint: Path, dtype: torch.dtype, num_prompts: int) -> tuple[Export, list[Prompt]]:
    """Return the export in ``dtype``, and prompts that it was neither trained nor calibrated on."""
    export = load_export(checkpoint, dtype=dtype, device=hardware.pick_device())
    prompts, _ = read_prompts(
        prompt_file("", str(checkpoint), "prompts.jsonl"),
        export.tokenizer,
        num_prompts,
        max_length=max_prompt_length(export.base, MAX_NEW_TOKENS),
        device=hardware.pick_device(),
    )
    return export, prompts


def measure(export: Export, prompts: list[Prompt]) -> list[dict[str, Any]]:
    """Clock plain, generate, prompt lookup and the tree; return the rows of a bench."""
    drafter = exported_drafter(export)
    methods = make_methods(
        export.base,
        export.heads,
        output_layer(export.base),
        [export.tree],
        eos=end_tokens(export.base, export.tokenizer),
        pad=export.tokenizer.pad_token_id,
        max_new_tokens=MAX_NEW_TOKENS,
        dynamic=drafter if drafter.grows else None,
    )
    rows: list[dict[str, Any]] = []
    for temperature in (0.0, 1.0, LOOPING_HEADLINE):
        if temperature == LOOPING_HEADLINE and rows[0]["rep8"] <= REP8_LIMIT:
            break  # greedy text does not loop, so its figures mean something
        with tqdm(
            total=len(methods) * len(prompts), desc=f"decoding, T={temperature:g}", unit="text"
        ) as bar:
            rows += measure_rows(
                export.base, methods, prompts, temperature, repeats=1, tick=bar.update
            )
    return rows


def count_identical(export: Export, prompts: list[Prompt], temperature: float) -> int:
    """Count prompts whose tree decoding gives the very tokens of plain decoding."""
    eos = end_tokens(export.base, export.tokenizer)
    drafter = exported_drafter(export)
    same = 0
    for seed, prompt in enumerate(tqdm(prompts, desc=f"comparing tokens, T={temperature:g}")):
        sampler = Sampler(temperature=temperature, seed=seed)
        plain = plain_decode(
            export.base,
            prompt.input_ids,
            max_new_tokens=MAX_NEW_TOKENS,
            sampler=sampler,
            eos_token_ids=eos,
        )
        tree = decode(
            export.base,
            drafter,
            prompt.input_ids,
            max_new_tokens=MAX_NEW_TOKENS,
            sampler=sampler,
            eos_token_ids=eos,
        )
        same += plain.new_tokens == tree.new_tokens
    return same


def show_sample(export: Export, prompt: Prompt) -> None:
    """Decode one prompt greedily and show which tokens came from one verify step."""
    pieces: list[str] = []
    color = sys.stdout.isatty()
    printer = StepPrinter(export.tokenizer, pieces.append, color=color)
    result = decode(
        export.base,
        exported_drafter(export),
        prompt.input_ids,
        max_new_tokens=MAX_NEW_TOKENS,
        eos_token_ids=end_tokens(export.base, export.tokenizer),
        on_tokens=printer,
    )
    printer.finish()
    print(export.tokenizer.decode(prompt.input_ids[0], skip_special_tokens=True))
    print("-" * 40)
    print(("" if color else "|").join(pieces))
    print("-" * 40)
    how = "share a colour" if color else "stand between two bars"
    print(
        f"{len(result.new_tokens)} tokens in {result.num_steps} verify steps; "
        f"the tokens of one step {how}."
    )


def chosen_method(export: Export) -> str:
    """Return the row of the trees that tree_search found fastest."""
    return "tree_dynamic" if tree_kind(export, DecodeConfig()) == "dynamic" else "tree"


def print_table(rows: list[dict[str, Any]], method: str) -> None:
    """Print one line per temperature."""
    found = {(row["method"], row["temperature"]): row for row in rows}
    print(
        "  T  plain tok/s  tree tok/s  speed-up  accept length  rep8 plain  "
        "lookup: speed-up  accept length  generate tok/s"
    )
    for temperature in sorted({row["temperature"] for row in rows}):
        plain, tree, lookup, generate = (
            found[name, temperature] for name in ("plain", method, "prompt_lookup", "hf_generate")
        )
        print(
            f"{temperature:>3g}  {plain['tokens_per_second']:>11.0f}  "
            f"{tree['tokens_per_second']:>10.0f}  {tree['speedup_vs_plain']:>7.2f}x  "
            f"{tree['accept_length']:>13.2f}  {plain['rep8']:>10.2f}  "
            f"{lookup['speedup_vs_plain']:>15.2f}x  {lookup['accept_length']:>13.2f}  "
            f"{generate['tokens_per_second']:>14.0f}"
        )


def print_heldout(training: dict[str, Any]) -> None:
    """Print how far the tuned base has moved from the original."""
    heldout = training.get("heldout")
    if not heldout or "original_loss" not in heldout:
        print("The base model is the original one.")
        return
    tuned, original = heldout["loss"], heldout["original_loss"]
    print(
        f"Held-out loss {tuned:.4f} nats/token tuned, {original:.4f} original "
        f"({tuned / original - 1:+.2%}), KL(original || tuned) {heldout['kl']:.4f} nats/token."
    )


def main() -> None:
    """Train, decode, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, help="show this export; train nothing")
    parser.add_argument("overrides", nargs="*", help="key=value for specheads.train")
    arguments = parser.parse_args()
    start = time.perf_counter()
    checkpoint = arguments.checkpoint or train(arguments.overrides)
    if not arguments.checkpoint:
        print("\n$ python -m specheads.tree_search", f"checkpoint={checkpoint}", flush=True)
        search_tree(checkpoint)
    hardware.quiet_loading()
    threads = hardware.pin_threads(0)
    dtype = hardware.pick_dtype("auto", hardware.pick_device())
    exact, compared = load(checkpoint, torch.float32, NUM_COMPARED)
    same = {
        temperature: count_identical(exact, compared, temperature) for temperature in (0.0, 1.0)
    }
    fast, prompts = load(checkpoint, dtype, NUM_PROMPTS)
    rows = measure(fast, prompts)
    name = str(dtype).removeprefix("torch.")
    method = chosen_method(fast)
    tree = next(row for row in rows if row["method"] == method and row["temperature"] == 0)
    how = "a tree grown at each step" if method == "tree_dynamic" else "a static tree"
    print(
        f"\n{len(prompts)} held-out prompts, up to {MAX_NEW_TOKENS} new tokens, {name}, "
        f"{threads} threads, {how} of {tree['tree_nodes']} nodes:"
    )
    print_table(rows, method)
    print(
        f"\nToken-identical to plain decoding of the same base in float32: {same[0.0]} of "
        f"{len(compared)} greedy, {same[1.0]} of {len(compared)} sampled at T=1 with a seed."
    )
    if dtype != torch.float32:
        print(
            f"In {name}, where rounding can decide a near tie: {tree['identical']} of "
            f"{tree['compared']} greedy, {tree['near_ties']} more differ first at a near tie."
        )
    print_heldout(exact.config["training"])
    print()
    show_sample(exact, max(prompts, key=lambda prompt: prompt.kind == "body"))
    print(f"\n{(time.perf_counter() - start) / 60:.1f} minutes. The export: {checkpoint}")


if __name__ == "__main__":
    main()
