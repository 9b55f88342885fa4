"""Start commands inside the test's process, as the command line would."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore

# a run that takes a second: no wandb, a given tree instead of a measured one, greedy figures alone
SHORT = (
    "+debug=cpu",
    "steps=4",
    "data.seq_len=64",
    "tree.choices=[[0],[1],[0,0]]",
    "heads.num_heads=2",
    "optim.warmup_steps=1",
    "evaluate.temperatures=[0.0]",
)


def start(monkeypatch: pytest.MonkeyPatch, *arguments: str, command: str = "train") -> int:
    """Run ``python -m specheads.<command>`` with ``arguments`` and return the exit code."""
    monkeypatch.setattr(sys, "argv", [command, *arguments])
    # composes everything a first time to read hydra.mode, which nobody sets
    monkeypatch.setattr(Hydra, "get_mode", lambda *_, **__: None)
    # copies all schemas into every composition, which copies those it changes
    monkeypatch.setattr(ConfigStore, "__deepcopy__", lambda store, _: store, raising=False)
    try:
        importlib.import_module(f"specheads.{command}").main()
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


def on_files(model: Path, records: Path, run_dir: Path) -> list[str]:
    """Return the arguments that name a model folder, a .jsonl and a run directory."""
    return [
        f"model={model}",
        "data=jsonl",
        f"data.path={records}",
        f"hydra.run.dir={run_dir}",
    ]
