"""What every command shares: compose, check, run, and turn mistakes into one line.

Exit codes: 0 done, 1 failed, 2 wrong usage, 75 interrupted and resumable.
``HYDRA_FULL_ERROR=1`` shows the whole traceback instead of the line.

A command called with ``json=true`` answers with one JSON object on standard output. What it prints
on its way (tables, progress, text as it appears) then goes to standard error, so that
``... json=true | jq .headline`` reads the object and nothing else. Where the command fails,
standard output stays empty, or holds the object if it was complete; the exit code tells.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from specheads.config.compose import explain, register_schemas, to_config
from specheads.config.own import with_own_file
from specheads.system import dist, errors
from specheads.system.errors import ConfigError, InterruptedRunError, RunError
from specheads.system.files import conf_dir, shipped_export
from specheads.system.launch import take_local_rank
from specheads.system.terminal import escape_output, lose_stdout, stop

if TYPE_CHECKING:
    from omegaconf import DictConfig

T = TypeVar("T")
Main = Callable[[], None]


def tidy_arguments(argv: list[str], *, data_group: bool = True) -> list[str]:
    """Return the command line as Hydra wants it.

    ``model=`` with anything but a file of conf/model, a folder or a name on the hub, becomes
    ``model.name=``, and ``data=`` with a file ``data.path=`` and how it is read. ``recipe=`` and
    ``debug=`` get the ``+`` by which Hydra adds a group, and ``data.columns={ours: theirs}`` the
    ``++`` without which it adds nothing to a dict. Flags go first: argparse takes settings behind
    them for unknown arguments. The runs of a sweep are told apart by what is swept, see
    conf/train.yaml.

    Args:
        argv: the command line.
        data_group: whether ``data=`` names a file of conf/data; to one command it is a path.

    Raises:
        ConfigError: if a word is neither a setting, ``key=value``, nor a flag of Hydra, or data is
            a file that holds no records.
    """
    flags, settings = _flags_and_settings(argv)
    places = [conf_dir(), *(Path(after) for flag, after in pairwise(flags) if flag in _PLACES)]
    models = {path.stem for place in places for path in (place / "model").glob("*.yaml")}

    def rewrite(arg: str) -> list[str]:
        key, _, value = arg.partition("=")
        if key.startswith("data.columns"):
            return [f"++{arg}"]
        if key == "resume.trust":  # resume itself is a word, which has no keys below it
            return [f"resume_trust={value}"]
        if key in ("recipe", "debug"):
            return [f"+{arg}"]
        if key == "data" and data_group and (source := _source(value)):
            return [f"data={source}", f"data.path={_quoted(value)}"]
        if key != "model" or models.issuperset(value.split(",")):
            return [arg]
        return [f"model.name={_quoted(value)}"]

    settings = [each for arg in settings for each in rewrite(arg)]
    if {"-m", "--multirun"} & set(flags):
        from hydra.core.override_parser.overrides_parser import OverridesParser

        parsed = OverridesParser.create().parse_overrides(settings)
        same = [each.key_or_group for each in parsed if not each.is_sweep_override()]
        keys = ",".join(f"'{key}'" for key in same)
        settings.append(f"hydra.job.config.override_dirname.exclude_keys=[{keys}]")
    return flags + settings


_PLACES = ("--config-dir", "-cd")  # flags of Hydra, followed by a folder like conf


def _quoted(value: str) -> str:
    # anything else means something to Hydra
    return value if re.fullmatch(r"[\w./:@~+,-]+", value) else f"'{value}'"


def _source(value: str) -> str:
    """Return which file of conf/data reads the file or folder ``value``; empty if it is neither.

    Raises:
        ConfigError: if it is a file with another ending.
    """
    path = Path(value).expanduser()
    sources = {".jsonl": "jsonl", ".json": "jsonl", ".jsonl.gz": "jsonl", ".parquet": "parquet"}
    ending = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    if source := sources.get(ending, "parquet" if path.is_dir() else ""):
        return source
    if path.is_file() or "/" in value or (path.suffix and "," not in value):
        raise ConfigError(
            f"data={value}: expected a file that ends in {', '.join(sources)}, a folder of .parquet"
            " files, or a name of conf/data as pycode"
        )
    return ""


def _flags_and_settings(argv: list[str]) -> tuple[list[str], list[str]]:
    from hydra._internal.utils import get_args_parser

    known = get_args_parser()._option_string_actions
    valued = {name for name, action in known.items() if action.nargs != 0}
    flags: list[str] = []
    settings = []
    for at, (before, word) in enumerate(pairwise(["", *argv])):
        if word in known or word.partition("=")[0] in valued:
            flags += word.split("=", 1)
        elif re.match(r"~|[^-=][^=]*=", word):
            settings.append(word)
        elif before in valued:
            flags.append(word)
        else:
            raise ConfigError(_meant(word, before, argv[at + 1 :]))
    return flags, settings


def _meant(word: str, before: str, after: list[str]) -> str:
    """Return what to write in place of a word that is neither a setting nor a flag."""
    if word.startswith("-"):
        key, _, value = word.lstrip("-").partition("=")
        value = value or next((each for each in after[:1] if each[:1] not in "-="), "<value>")
        key = key.replace("-", "_")
        return f"{word} is no option; settings have no dashes: write {key}={value}"
    if after and after[0].startswith("="):
        return f"{word} {after[0]}: write {word}={''.join(after[:2])[1:]}, without blanks around ="
    if before.endswith("="):
        return f"{before} {word}: write {before}{word}, without blanks around ="
    return (
        f"{word!r} is no setting; settings are written key=value, and a value with blanks in"
        " quotes, key='two words'"
    )


def hydra_main(
    name: str,
    schema: type[T],
    task: Callable[[T], None],
    *,
    literal: Sequence[str] = (),
    around: Callable[[DictConfig], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Compose ``conf/<name>.yaml`` with the command line, check it, and run ``task``.

    Args:
        name: primary config, without ``.yaml``.
        schema: the dataclass the composed config is checked against.
        task: gets the checked config.
        literal: keys whose values are taken as they stand, see :func:`take_literals`; of several
            values the last one counts, where the setting is no list.
        around: from the composed config to what is entered for the check and the task.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    started = False
    taken: dict[str, list[str]] = {}

    def checked(cfg: DictConfig) -> None:
        nonlocal started
        started = True
        try:
            with around(cfg):
                config: Any = to_config(cfg, schema)
                for key, values in taken.items():
                    is_list = isinstance(getattr(config, key), list)
                    config = replace(config, **{key: values if is_list else values[-1]})
                if isinstance(named := getattr(config, "checkpoint", None), str):
                    config.checkpoint = shipped_export(named)
                with answering(config):
                    task(config)
        except (ConfigError, RunError, InterruptedRunError) as error:
            if wants_traceback and error.exit_code != errors.EXIT_INTERRUPTED:
                raise
            if error.on_every_rank and not dist.is_main():
                raise SystemExit(error.exit_code) from None
            stop(str(error), error.exit_code)
        except BrokenPipeError:  # `specheads ... | head` has read enough
            lose_stdout()
            stop("standard output was closed", errors.EXIT_FAILED)
        except KeyboardInterrupt as error:
            stop(str(error) or "interrupted", errors.EXIT_INTERRUPTED)

    escape_output()
    register_schemas()
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors reach us instead of printing many lines
    try:
        for key in literal:
            sys.argv[1:], values = take_literals(sys.argv[1:], key)
            taken |= {key: values} if values else {}
        group = "Config" in str(schema.__annotations__.get("data"))
        words = with_own_file(take_local_rank(sys.argv[1:]))
        sys.argv[1:] = tidy_arguments(words, data_group=group)
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=name)(checked)()
    except (HydraException, OmegaConfBaseException, ConfigError) as error:
        if wants_traceback:
            raise
        stop(str(error) if isinstance(error, ConfigError) else explain(error), errors.EXIT_USAGE)
    except OSError as error:
        if started or wants_traceback:
            raise
        reason = error.strerror or error  # Hydra makes the folder before the task can look at it
        stop(f"run directory {error.filename} cannot be made: {reason}", errors.EXIT_USAGE)
    finally:
        if not wants_traceback:
            os.environ.pop("HYDRA_FULL_ERROR", None)


def entry_point(name: str, schema: type[T], task: Callable[[T], None], **more: Any) -> Main:
    """Return a command's ``main``: :func:`hydra_main` with these arguments."""
    return functools.partial(hydra_main, name, schema, task, **more)


def take_literals(argv: list[str], key: str) -> tuple[list[str], list[str]]:
    """Take every ``key=value`` out of a command line before Hydra sees it.

    Hydra gives meaning to quotes, commas, brackets, ``$`` and line breaks in values; prompts are
    full of them.

    Returns:
        The other arguments, and the values given for ``key``.
    """
    values = [arg.partition("=")[2] for arg in argv if arg.startswith(f"{key}=")]
    others = [arg for arg in argv if not arg.startswith(f"{key}=")]
    # An argument that is not UTF-8 arrives with surrogates, which no tokenizer takes.
    return others, [v.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for v in values]


_stdout: ContextVar[TextIO | None] = ContextVar("specheads_json_answer", default=None)


@contextlib.contextmanager
def answering(config: object) -> Iterator[None]:
    """While open, only :func:`answer` reaches stdout where the settings hold ``json=true``."""
    if not getattr(config, "json", False):
        yield
        return
    token = _stdout.set(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _stdout.reset(token)


def report(out: Path, result: Mapping[str, Any], text: str) -> None:
    """Write what a command found as JSON, print it as text, and answer with it."""
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{text}\nwrote {out}")
    answer(result)


def answer(found: Mapping[str, Any]) -> None:
    """Print the command's object, on one line, if it was asked for; call it once.

    Args:
        found: of JSON's types. A figure that is not finite becomes null, as JSON has no other word.
    """
    if (out := _stdout.get()) is not None:
        finite = json.loads(json.dumps(found), parse_constant=lambda name: None)
        out.write(json.dumps(finite) + "\n")
        out.flush()
