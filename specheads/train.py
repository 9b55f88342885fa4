"""Train heads or a base model: ``python -m specheads.train +recipe=medusa2``.

Hydra composes ``conf/train.yaml``, the recipe's YAML and the command line; the recipe named by
``recipe`` (a file of ``recipes/``, or your own ``.py``) does the work. Nothing heavy is imported
before the settings are known to be right.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from specheads.config import ConfigError, TrainConfig
from specheads.config.compose import check_recipe, load_recipe
from specheads.config.main import hydra_main
from specheads.runs.directory import check_run_dir, leaving_nothing, read_rows
from specheads.system import dist, hardware
from specheads.system.errors import EXIT_INTERRUPTED, need
from specheads.system.hardware import keep_freed_memory
from specheads.system.launch import read_launcher
from specheads.system.signals import StopSignal
from specheads.system.terminal import stop


def say(line: str) -> None:
    """Print one line, on rank 0."""
    if dist.is_main():
        print(f"specheads: {line}", flush=True)


def train(cfg: TrainConfig) -> None:
    """Run the recipe that ``cfg`` names.

    Raises:
        ConfigError: if the settings ask for something that cannot be.
    """
    read_launcher()
    if dist.world_size() > 1 and _is_sweep():
        raise ConfigError("a sweep (-m) runs in one process; start one torchrun per setting")
    if dist.world_size() > 1 and not cfg.deepspeed:
        raise ConfigError(
            f"{dist.world_size()} processes were started, but deepspeed=none trains with one; "
            "choose deepspeed=zero1, zero2 or zero3"
        )
    check_recipe(cfg.recipe)
    hardware.pick_device(cfg.device)  # or a line why not, before anything is read
    optimizer, quantization = cfg.optim.name, cfg.model.quantization
    wanted = {  # before records are read, which takes minutes
        ("deepspeed", "deepspeed", "deepspeed="): bool(cfg.deepspeed),
        ("peft", "train", "adapter=lora"): cfg.adapter.kind == "lora",
        ("bitsandbytes", "quant", f"model.quantization={quantization}"): quantization != "none",
        ("bitsandbytes", "quant", f"optim.name={optimizer}"): optimizer == "adamw8bit",
    }
    for package, asked in wanted.items():
        if asked:
            need(*package)
    run = load_recipe(cfg.recipe)
    check_run_dir(Path(cfg.run_dir), cfg.resume)
    from specheads.pipeline import run_recipe

    if (cfg.deepspeed.get("zero_optimization") or {}).get("stage") != 3:
        keep_freed_memory()  # ZeRO-3 is for those who are short of it
    run_recipe(run, cfg, say)


def compare_runs(runs: Sequence[TrainConfig]) -> list[str]:
    """Return a table of a sweep's runs, the best first, and the line that names it.

    They are compared by the accept length of their exports at the lowest temperature, which is what
    training itself chooses weights by; where there is nothing to draft with, by the held-out loss.

    Args:
        runs: those that have ended.
    """
    rows = [read_rows(Path(run.run_dir) / "metrics.jsonl") for run in runs]
    found = [{key: value for row in of_run for key, value in row.items()} for of_run in rows]
    common = set.intersection(*map(set, found)) if len(found) > 1 else set()
    lengths = [key for key in common if key.startswith("final/accept_length/t")]
    key = min(lengths, key=lambda key: float(key.rpartition("/t")[2]), default="heldout/loss")
    if key not in common:
        return []
    order = sorted(range(len(runs)), key=lambda i: found[i][key], reverse=bool(lengths))
    shown = [key, *common & {key.replace("accept_length", "speedup")} - {key}]
    lines = ["  ".join([*shown, "run"])]
    for i in order:
        lines.append("  ".join([*(f"{found[i][k]:{len(k)}.4f}" for k in shown), runs[i].name]))
    best, figure = runs[order[0]], found[order[0]][key]
    lines.append(f"best of {len(runs)} runs: {best.name}, {key} {figure:.4f}, {best.run_dir}")
    return lines


def _is_sweep() -> bool:
    return HydraConfig.get().mode is RunMode.MULTIRUN


def main() -> None:
    """Compose, check, train; at the end of a sweep, compare its runs."""
    ended: list[TrainConfig] = []
    began = time.time()

    def around(cfg: DictConfig) -> AbstractContextManager[None]:
        made = Path(HydraConfig.get().runtime.output_dir)
        return leaving_nothing(Path(cfg.run_dir), made, began)

    def task(cfg: TrainConfig) -> None:
        if swept := HydraConfig.get().sweep.subdir if _is_sweep() else "":
            cfg = replace(cfg, name=f"{cfg.name}/{swept}")
        train(cfg)
        if swept:
            ended.append(cfg)

    with StopSignal(at_once=True):
        try:
            try:
                hydra_main("train", TrainConfig, task, around=around)
            finally:  # one of the runs may have failed
                for line in compare_runs(ended):
                    say(line)
        except KeyboardInterrupt as asked:
            stop(str(asked) or "interrupted", EXIT_INTERRUPTED)
        except SystemExit as stopped:
            if stopped.code and dist.world_size() > 1:
                sys.stdout.flush()
                # the interpreter's own end waits for ranks that are gone, or aborts over them
                os._exit(int(stopped.code))
            raise


if __name__ == "__main__":
    main()
