"""What every entry point shares: compose, check, run, and turn mistakes into one line.

Exit codes: 0 done, 1 failed, 2 wrong usage, 75 interrupted and resumable.
``HYDRA_FULL_ERROR=1`` shows the whole traceback instead of the line.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, TypeVar

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from specheads import dist
from specheads.assets import conf_dir
from specheads.config import (
    ConfigError,
    InterruptedRunError,
    RunError,
    explain,
    register_schemas,
    to_config,
)
from specheads.launch import take_local_rank
from specheads.redact import redact
from specheads.terminal import escape_output, harmless

T = TypeVar("T")

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 75


def stop(message: str, code: int) -> NoReturn:
    """Print ``message`` as one line on stderr and leave with ``code``."""
    line = harmless(redact(" ".join(message.split())))
    print(f"specheads: {line}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def tidy_arguments(argv: list[str]) -> list[str]:
    """Return the command line as Hydra wants it.

    ``model=/a/folder`` and ``model=org/name`` become ``model.name=`` (``model=`` itself picks a
    file of conf/model, whose names hold no slash). ``data.columns={ours: theirs}`` gets the ``++``
    without which Hydra adds nothing to a dict. ``-m`` goes first: between settings, argparse would
    take those after it for unknown arguments.
    """

    def rewrite(arg: str) -> str:
        key, _, value = arg.partition("=")
        if key.startswith("data.columns"):
            return f"++{arg}"
        if key == "resume.trust":  # resume itself is a word, which has no keys below it
            return f"resume_trust={value}"
        if key != "model" or "/" not in value:
            return arg
        plain = re.fullmatch(r"[\w./:@~+,-]+", value)  # anything else must be quoted for Hydra
        return f"model.name={value}" if plain else f"model.name='{value}'"

    flags = [arg for arg in argv if arg in ("-m", "--multirun")]
    return flags + [rewrite(arg) for arg in argv if arg not in flags]


def hydra_main(
    name: str,
    schema: type[T],
    task: Callable[[T], None],
    *,
    around: Callable[[DictConfig], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Compose ``conf/<name>.yaml`` with the command line, check it, and run ``task``.

    Args:
        name: primary config, without ``.yaml``.
        schema: the dataclass the composed config is checked against.
        task: gets the checked config.
        around: from the composed config to what is entered for the check and the task.
    """
    started = False

    def checked(cfg: DictConfig) -> None:
        nonlocal started
        started = True
        try:
            with around(cfg):
                task(to_config(cfg, schema))
        except ConfigError as error:
            if wants_traceback:
                raise
            stop(str(error), EXIT_USAGE)
        except RunError as error:
            if wants_traceback:
                raise
            if error.on_every_rank and not dist.is_main():
                raise SystemExit(EXIT_FAILED) from None
            stop(str(error), EXIT_FAILED)
        except InterruptedRunError as error:
            if not dist.is_main():  # all ranks stop alike
                raise SystemExit(EXIT_INTERRUPTED) from None
            stop(str(error), EXIT_INTERRUPTED)
        except BrokenPipeError:  # `specheads ... | head` has read enough
            # what is left in the buffer is written at exit, and must not fail once more
            with open(os.devnull, "w") as nowhere:  # noqa: PTH123
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
            stop("standard output was closed", EXIT_FAILED)
        except KeyboardInterrupt as error:
            stop(str(error) or "interrupted", EXIT_INTERRUPTED)

    escape_output()
    register_schemas()
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors reach us instead of printing many lines
    sys.argv[1:] = tidy_arguments(take_local_rank(sys.argv[1:]))
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=name)(checked)()
    except (HydraException, OmegaConfBaseException) as error:
        if wants_traceback:
            raise
        stop(explain(error), EXIT_USAGE)
    except OSError as error:
        if started or wants_traceback:
            raise
        reason = error.strerror or error  # Hydra makes the folder before the task can look at it
        stop(f"run directory {error.filename} cannot be made: {reason}", EXIT_USAGE)
    finally:
        if not wants_traceback:
            os.environ.pop("HYDRA_FULL_ERROR", None)
