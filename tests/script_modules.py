"""Import the programs in scripts/, which is no package, and what their tests share."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "scripts" / "engines")]


def load_script(name: str) -> ModuleType:
    """Import ``scripts/<name>.py``, or a runner of ``scripts/engines``."""
    return importlib.import_module(name)


def options_of(script: str) -> set[str]:
    """Return the options of a script: fields of its settings, and what it gives to argparse."""
    found = set()
    harness = ROOT / "scripts" / "harness.py"
    for path in (ROOT / script, harness):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name in ("Settings", "PartsSettings"):
                fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
                found |= {f"--{ast.unparse(field).replace('_', '-')}" for field in fields}
            elif isinstance(node, ast.Constant) and path != harness:
                found.add(str(node.value))
    return found
