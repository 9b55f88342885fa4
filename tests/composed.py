"""Compose the settings of a command line as its entry point does."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import compress
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from specheads import config
from specheads.config.main import tidy_arguments
from specheads.system.files import conf_dir
from tests.processes import ROOT


def composed(program: str, words: Sequence[str]) -> Any:
    """Return the checked settings of ``python -m specheads.<program> <words>``."""
    given = [word for word in words if not word.startswith(taken_literally(program))]
    overrides = [word for word in tidy_arguments(given) if word not in ("-m", "--multirun")]
    if program == "train":  # made by Hydra where it runs the program
        overrides.append("run_dir=unused")
    keys = [each.lstrip("+").split("=")[0] for each in overrides]
    by_hydra = [key.startswith("hydra.") or (conf_dir() / key).is_dir() for key in keys]
    files = list(compress(overrides, by_hydra))
    found = copy.deepcopy(_of_files(program, tuple(files)))
    values = [each for each in overrides if each not in files]
    parsed = OverridesParser.create().parse_overrides(values)
    ConfigLoaderImpl._apply_overrides_to_config(parsed, found)
    name = "".join(part.title() for part in program.split("_"))
    return config.to_config(found, getattr(config, f"{name}Config"))


@cache
def _of_files(program: str, files: tuple[str, ...]) -> DictConfig:
    """Compose what a command line names of conf/ or tells Hydra; values are set afterwards."""
    config.register_schemas()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        return compose(program, overrides=[*files])


def changed(cfg: Any, word: str) -> Any:
    """Return checked settings with one of them, ``section.key=value``, given anew."""
    key, _, text = word.partition("=")
    (section, _, name), value = key.rpartition("."), yaml.safe_load(text)
    if section:
        name, value = section, replace(getattr(cfg, section), **{name: value})
    return replace(cfg, **{name: value})


def taken_literally(program: str) -> tuple[str, ...]:
    """Return the keys of a command that Hydra never sees."""
    module = ROOT / "specheads" / program
    code = (module / "__init__.py" if module.is_dir() else module.with_suffix(".py")).read_text()
    _, _, keys = code.partition("literal=(")
    return tuple(f"{key}=" for key in re.findall(r'"(\w+)"', keys.partition(")")[0]))
