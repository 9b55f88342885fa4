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
    path = ROOT / script
    tree = ast.parse(path.read_text(encoding="utf-8"))
    said = {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return said | {f"--{field.replace('_', '-')}" for field in fields_of(path, "Settings")}


def fields_of(path: Path, name: str) -> set[str]:
    """Return the fields of a class of a script, and of those that it extends."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name == name:
            own = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
            found |= {ast.unparse(field) for field in own}
            for extended in map(ast.unparse, node.bases):
                module, _, its_name = extended.rpartition(".")
                found |= fields_of(path.with_name(f"{module}.py") if module else path, its_name)
    return found
