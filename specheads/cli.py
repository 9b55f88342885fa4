"""The console command: ``specheads train +recipe=medusa2`` is ``python -m specheads.train ...``."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

from specheads.system import __version__
from specheads.system.errors import EXIT_USAGE, did_you_mean
from specheads.system.terminal import stop

USAGE = Path(__file__).with_name("usage.txt").read_text(encoding="utf-8").rstrip()
# each that the text lists, with its module
COMMANDS = {name: f"specheads.{name}" for name in re.findall(r"^  (\w+)  ", USAGE, re.MULTILINE)}
COMMANDS["tree"] = "specheads.tree_search"
# the same under the names of the modules, and as people type them
ALIASES = {"tree_search": "tree", "tree-search": "tree", "spec-bench": "spec_bench"}


def usage() -> str:
    """Return the list of commands."""
    return f"specheads {__version__}\n{USAGE}"


def main() -> None:
    """Run the command named first, with the rest of the command line."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [arguments[1], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage(), file=sys.stdout if arguments else sys.stderr)
        raise SystemExit(0 if arguments else 2)
    if arguments[0] in ("-V", "--version", "version"):
        print(__version__)
        return
    name = ALIASES.get(arguments[0], arguments[0])
    if name not in COMMANDS:
        advice = did_you_mean(name, [*COMMANDS, *ALIASES], f"there are {', '.join(COMMANDS)}")
        stop(f"unknown command {name!r}{advice}", EXIT_USAGE)
    sys.argv = [f"specheads {name}", *arguments[1:]]
    importlib.import_module(COMMANDS[name]).main()


if __name__ == "__main__":
    main()
