"""The console command: ``specheads train +recipe=medusa2`` is ``python -m specheads.train ...``."""

from __future__ import annotations

import difflib
import importlib
import sys
from pathlib import Path

from specheads.system import __version__

COMMANDS = {
    "auto": ("specheads.auto", "from a model's name to heads for it, in the minutes you give"),
    "init": ("specheads.init", "begin a YAML file of a run, with a reason for each setting"),
    "train": ("specheads.train", "train heads, a draft model, or a base model"),
    "generate": ("specheads.generate", "decode a prompt, or a file of prompts"),
    "chat": ("specheads.chat", "talk to a model in the terminal"),
    "bench": ("specheads.bench", "measure a checkpoint against plain decoding"),
    "spec_bench": ("specheads.spec_bench", "answer Spec-Bench's questions and score the speed"),
    "quality": ("specheads.quality", "what a tuned base or a lossy rule costs in quality"),
    "tree": ("specheads.tree_search", "measure and store the fastest tree of a checkpoint"),
    "export": ("specheads.export", "write a checkpoint in another form, or read a foreign one"),
    "regenerate": ("specheads.regenerate", "let the base model answer the prompts itself"),
    "preview": ("specheads.preview", "show records with their loss masks"),
    "compare": ("specheads.compare", "find out which draft model pays, if any"),
    "doctor": ("specheads.doctor", "what is missing here, and what a model can be decoded with"),
}
# the same under the names of the modules, and as people type them
ALIASES = {"tree_search": "tree", "tree-search": "tree", "spec-bench": "spec_bench"}


def usage() -> str:
    """Return the list of commands."""
    lines = [f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items()]
    head = [f"specheads {__version__}", "usage: specheads <command> key=value ..."]
    examples = Path(__file__).with_name("examples.txt").read_text(encoding="utf-8").rstrip()
    return "\n".join([*head, *lines, examples])


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
        close = difflib.get_close_matches(name, [*COMMANDS, *ALIASES], n=1)
        advice = f"there are {', '.join(COMMANDS)}"
        if close:
            advice = f"did you mean {ALIASES.get(close[0], close[0])}?"
        print(f"specheads: unknown command {name!r}; {advice}", file=sys.stderr)
        raise SystemExit(2)
    sys.argv = [f"specheads {name}", *arguments[1:]]
    importlib.import_module(COMMANDS[name][0]).main()


if __name__ == "__main__":
    main()
