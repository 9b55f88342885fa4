"""The console command: ``specheads train +recipe=medusa2`` is ``python -m specheads.train ...``."""

from __future__ import annotations

import importlib
import sys

from specheads import __version__

COMMANDS = {
    "train": ("specheads.train", "train heads or a base model"),
    "generate": ("specheads.generate", "decode a prompt with a trained checkpoint"),
    "bench": ("specheads.bench", "measure a checkpoint against plain decoding"),
    "tree": ("specheads.tree_search", "measure and store the fastest tree of a checkpoint"),
    "regenerate": ("specheads.regenerate", "let the base model answer the prompts itself"),
    "preview": ("specheads.preview", "show records with their loss masks"),
    "export": ("specheads.export", "make smaller heads, or another format, of a checkpoint"),
    "compare": ("specheads.compare", "find out which draft model pays, if any"),
    "doctor": ("specheads.doctor", "say what a base model can be decoded with"),
}


def usage() -> str:
    """Return the list of commands."""
    lines = [f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            f"specheads {__version__}",
            "usage: specheads <command> key=value ...",
            *lines,
            "specheads <command> --help lists the settings",
        ]
    )


def main() -> None:
    """Run the command named first, with the rest of the command line."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        raise SystemExit(0 if arguments else 2)
    if arguments[0] in ("-V", "--version", "version"):
        print(__version__)
        return
    if arguments[0] not in COMMANDS:
        names = ", ".join(COMMANDS)
        print(f"specheads: unknown command {arguments[0]!r}; there are {names}", file=sys.stderr)
        raise SystemExit(2)
    module, _ = COMMANDS[arguments[0]]
    sys.argv = [f"specheads {arguments[0]}", *arguments[1:]]
    importlib.import_module(module).main()


if __name__ == "__main__":
    main()
