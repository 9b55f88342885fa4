"""From a base model's name to heads for it: the stages of ``specheads auto``, in order.

Each stage writes what the next one reads below the run's folder, and ``auto.json`` says which have
ended: the same command goes on behind the last of them. How the time is divided is decided once,
from what the first questions and answers took here, and kept in the same file, so that a run which
was killed comes to the same data as one that was not.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specheads.config import AutoConfig, ConfigError, RegenerateConfig, RunError, TrainConfig
from specheads.config.compose import composed, load_recipe
from specheads.data.schema import json_digest
from specheads.decoding.exported import load_subject
from specheads.formats import card
from specheads.measure import bench
from specheads.measure.clock import prompts_of
from specheads.measure.diagnose import examine
from specheads.measure.render import bench_text, interval
from specheads.models.base import load_base_model, load_tokenizer
from specheads.pipeline import run_recipe
from specheads.regeneration.engine import regenerate
from specheads.runs.directory import is_used
from specheads.system import hardware
from specheads.system.files import whole_file
from specheads.system.terminal import progress_bar

Say = Callable[[str], None]

# which recipe, by what the base can be decoded with, and the settings that its numbers are not
RECIPES = {
    "tree": ("hydra", ["heads.lm_head=shared_pruned"]),
    "chain": ("hydra", ["heads.lm_head=shared_pruned"]),
}
FIRST = 64  # questions that are written and answered to learn how long that takes
LEAST = 256  # questions without which nothing is learned that holds for others
MEASURING = 0.12  # share of the time for the tree and the figures
TEMPERATURE = 0.7  # of the answers: more varied than greedy ones, closer to what is asked for
ANSWER_TOKENS = 192  # of one answer at most; those that reach it are learned without their end


class Progress:
    """What has ended, and what was decided, in ``auto.json``.

    Args:
        folder: of the run.
        asked: the settings that what is written depends on.
        minutes: of the whole run.

    Raises:
        ConfigError: if the folder holds a run with other settings.
    """

    def __init__(self, folder: Path, asked: dict[str, Any], minutes: float, say: Say) -> None:
        self.path, self.minutes, self.say = folder / "auto.json", minutes, say
        self.found: dict[str, Any] = {"asked": asked, "seconds": {}, "plan": {}}
        if self.path.exists():
            try:
                self.found = json.loads(self.path.read_text(encoding="utf-8"))
                before, self.ended = self.found["asked"], self.found["seconds"]
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{self.path} is damaged ({error}); choose another name=") from None
            for key, value in asked.items():
                if before.get(key) != value:
                    raise ConfigError(
                        f"{self.path} was begun with {key}={before.get(key)}, now it is {value};"
                        " choose another name=, or give what it was begun with"
                    )
        self.ended = self.found["seconds"]

    @property
    def left(self) -> float:
        """Minutes that are left of those asked for, by the stages that have ended."""
        return self.minutes - sum(self.ended.values()) / 60

    def stage(self, name: str, what: Callable[[], Any]) -> None:
        """Do what the stage ``name`` does, unless it has been done."""
        if name in self.ended:
            self.say(f"{name}: done before")
            return
        self.say(f"{name}: {max(self.left, 0):.0f} minutes left")
        begun = time.monotonic()
        what()
        gc.collect()  # the models of a stage, which hold each other
        self.ended[name] = round(time.monotonic() - begun, 1)
        self.write()

    def write(self) -> None:
        """Write the file whole."""
        with whole_file(self.path) as fresh:
            fresh.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
