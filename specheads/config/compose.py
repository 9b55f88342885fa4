"""From what Hydra composed to a checked dataclass, and from its errors to one line."""

from __future__ import annotations

import difflib
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from specheads.config import commands, data, training
from specheads.system.errors import ConfigError
from specheads.system.files import conf_dir, recipes_dir
from specheads.system.hub import fetched_export

if TYPE_CHECKING:
    from omegaconf import DictConfig

T = TypeVar("T")
Recipe = Callable[[training.TrainConfig], None]
_MODULES = (training, commands, data)


def explain(error: Exception) -> str:
    """Return one line that says what is wrong, for an error of Hydra or OmegaConf."""
    from omegaconf.errors import OmegaConfBaseException

    if override := getattr(error, "override", ""):  # no value of Hydra's grammar
        key, _, value = override.partition("=")
        return (
            f"cannot read {override}: a list or dict must be closed, and a text with signs like"
            f" these quoted for the shell and for Hydra: \"{key}='{value}'\""
        )
    text = str(error)
    if isinstance(error.__cause__, OmegaConfBaseException):
        text += "\n" + str(error.__cause__)
    full_key = re.search(r"full_key: (\S+)", text)
    unknown = re.search(r"Key '(\w+)' (?:is )?not in '(\w+)'", text)
    if unknown:  # Hydra's own advice is "+key=value", which to_config refuses
        key, owner = unknown.groups()
        schema = next((vars(m)[owner] for m in _MODULES if owner in vars(m)), None)
        names = [f.name for f in fields(schema)] if is_dataclass(schema) else []
        path = full_key.group(1) if full_key else key
        close = difflib.get_close_matches(key, names, n=1)
        if key == "model" and "checkpoint" in names:
            close = ["checkpoint"]
        prefix = path.removesuffix(key)
        return f"unknown key {path}" + (f"; did you mean {prefix}{close[0]}?" if close else "")
    lines = [line.strip() for line in text.partition("Config search path:")[0].splitlines()]
    lines = [line for line in lines if line and not line.startswith(("full_key", "object_type"))]
    listing = [i for i, line in enumerate(lines) if line.startswith("Available options")]
    if listing:  # one option per line after it
        start = listing[0]
        lines = [*lines[:start], lines[start] + " " + ", ".join(lines[start + 1 :])]
    shown = list(dict.fromkeys(lines[:3]))
    if full_key and full_key.group(1) not in " ".join(shown):
        shown.insert(0, full_key.group(1))
    return ": ".join(line.rstrip(":.") for line in shown)


# settings that name exports, among them lists
_EXPORTS = ("checkpoint", "exports", "candidates", "decode.draft", "heads.start", "draft.start")


def export_of(path: str) -> str:
    """Return the folder of an export that a run directory or a name on the hub stands for.

    Any other path is returned as it is.

    Raises:
        ConfigError: if the run has written none yet.
    """
    path = fetched_export(path)
    folder = Path(path).expanduser()
    if (folder / "config.json").exists() or not (folder / "config.yaml").is_file():
        return path
    if not (folder / "export").is_dir():
        raise ConfigError(
            f"{path} is a run directory without an export: its run has not ended; go on with"
            " resume=auto"
        )
    return str(Path(path) / "export")


def to_config(cfg: DictConfig, schema: type[T]) -> T:
    """Turn Hydra's composed ``cfg`` into a checked instance of the dataclass ``schema``.

    Raises:
        ConfigError: if a value is missing, mistyped, out of range, or unknown.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if missing := sorted(OmegaConf.missing_keys(cfg)):
        raise ConfigError(f"no value given for {', '.join(missing)}")
    for key in _EXPORTS:
        given = OmegaConf.select(cfg, key)
        if isinstance(given, str):
            OmegaConf.update(cfg, key, export_of(given))
        elif OmegaConf.is_list(given):
            OmegaConf.update(cfg, key, [export_of(each) for each in given])
    try:  # merging again refuses keys that `+typo=1` slipped past Hydra
        values = OmegaConf.to_container(cfg, resolve=True)
        checked = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), values))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from None
    assert isinstance(checked, schema)
    return checked


def swept(overrides: str, number: int) -> str:
    """Return the name of one run of a sweep, which is its folder's too.

    Args:
        overrides: the settings that are swept, ``key=value``, joined by commas.
        number: of the run, which goes into the name where the settings are no file name.
    """
    told = re.sub(r"(^|,)\++", r"\1", overrides)
    name = re.sub(r"[^\w.,=+-]+", "_", told)[:100]
    return name if name == told else f"{name}-{number}"


def tuned(key: str, otherwise: Any, *, _root_: Any) -> Any:
    """Return ``model.tuned.<key>``, or ``otherwise`` where those numbers are another model's."""
    from omegaconf import OmegaConf

    mine = OmegaConf.select(_root_, "model.tuned.name") == OmegaConf.select(_root_, "model.name")
    found = OmegaConf.select(_root_, f"model.tuned.{key}") if mine else None
    return otherwise if found is None else found


@cache
def register_schemas() -> None:
    """Make known to Hydra what conf/*.yaml name: dataclasses, :func:`swept`, :func:`tuned`."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("swept", swept, replace=True)
    OmegaConf.register_new_resolver("tuned", tuned, replace=True)
    for module in _MODULES:
        for name, schema in vars(module).items():  # TreeSearchConfig is tree_search_schema
            if kind := re.fullmatch(r"(\w+)Config", name):
                key = re.sub(r"\B(?=[A-Z])", "_", kind[1]).lower()
                ConfigStore.instance().store(name=f"{key}_schema", node=schema)


def composed(name: str, schema: type[T], words: Sequence[str]) -> T:
    """Return the checked settings of ``conf/<name>.yaml`` with ``words``, Hydra's overrides.

    As a command composes them, for those who are called by a program: by Python, or by a command
    that trains on its way.

    Raises:
        ConfigError: if a setting is wrong.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    register_schemas()
    around, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None  # a command's own
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
            return to_config(compose(name, overrides=list(words)), schema)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from None
    finally:
        GlobalHydra.instance().hydra = around


def check_recipe(name: str) -> None:
    """Raise ConfigError that lists the recipes if none is named."""
    if not name:
        names = sorted(path.stem for path in (conf_dir() / "recipe").glob("*.yaml"))
        raise ConfigError(f"choose a recipe: recipe={'|'.join(names)}")


def load_recipe(name: str) -> Recipe:
    """Return ``run`` of ``recipes/<name>.py``, or of the user's own file ``<name>.py``.

    Raises:
        ConfigError: if there is no such file, or it has no function ``run``.
    """
    path = Path(name) if name.endswith(".py") else recipes_dir() / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"specheads_recipe_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"recipe={name}: there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    run = getattr(module, "run", None)
    if not callable(run):
        raise ConfigError(f"recipe={name}: {path} has no function run(cfg)")
    return run
