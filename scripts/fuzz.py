"""Draw other examples for the tests of properties than ``make test`` does, and keep what fails.

    python scripts/fuzz.py              # all of them, at random: make fuzz
    python scripts/fuzz.py --seed 17    # what another run drew: make fuzz FUZZ="--seed 17"
    python scripts/fuzz.py tests/attention/test_tree.py

Prints the seed. An example that fails is written above its test as ``@example(...)``, so that every
later run begins with it; commit it together with what mends it. Exits with 1 if any was found.
"""

import argparse
import ast
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import is_hypothesis_test, settings

TIMES = 10  # as many examples as in the default run


class Keep:
    """A plug-in of pytest: more examples for each test, and the failing ones are written down.

    Args:
        times: as many examples as a test has by itself.
        origin: said beside an example that is written.
    """

    def __init__(self, times: int, origin: str) -> None:
        self._times, self._origin = times, origin
        self._found: dict[tuple[Path, str], list[str]] = {}
        self.said: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Let each test draw more."""
        for test in {each.obj for each in items if is_hypothesis_test(getattr(each, "obj", None))}:
            own = test._hypothesis_internal_use_settings
            more = settings(own, max_examples=own.max_examples * self._times)
            test._hypothesis_internal_use_settings = more

    def pytest_runtest_teardown(self, item: pytest.Function) -> None:
        """Take the failing examples of a test, as Hypothesis writes them."""
        for call in getattr(item, "_hypothesis_failing_examples", ()):
            name = item.function.__name__
            try:
                line = decorator(call, set(item.fixturenames), vars(item.module), self._origin)
            except (ValueError, SyntaxError) as error:
                self.said.append(f"{item.nodeid}: not kept, write a test of it ({error}):\n{call}")
                continue
            lines = self._found.setdefault((item.path, name), [])
            if line not in lines:
                lines.append(line)

    def write(self) -> None:
        """Write the examples above their tests."""
        for (path, name), lines in self._found.items():
            path.write_text(pinned(path.read_text(encoding="utf-8"), name, lines), encoding="utf-8")
            self.said += [f"{path}: {name}: {line}" for line in lines]
        if files := sorted({str(path) for path, _ in self._found}):
            ruff = [sys.executable, "-m", "ruff"]
            subprocess.run([*ruff, "check", "-q", "--fix", "--select", "I", *files], check=False)
            subprocess.run([*ruff, "format", "-q", *files], check=False)


class _Numbers(ast.NodeTransformer):
    """Writes the numbers that Python prints as names so that it can read them."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in ("nan", "inf"):
            return ast.parse(f"float({node.id!r})", mode="eval").body
        return node


def decorator(call: str, fixtures: set[str], names: dict[str, Any], origin: str) -> str:
    """Return the ``@example(...)`` of a failing call.

    Args:
        call: as Hypothesis writes it: ``test(``, an argument per line, ``)``.
        fixtures: arguments that pytest gives, which are left out, whatever they look like.
        names: of the test's module.
        origin: where the example comes from.

    Raises:
        ValueError: if its values, as they are written, mean nothing in that module.
        SyntaxError: if they are no Python.
    """
    # an argument begins at four spaces with its name; a string that spans lines has \n written out
    _, *lines = re.split(r"\n    (?=[^\W\d]\w*=)", call.strip().removesuffix(")"))
    given = [line for line in lines if line.partition("=")[0] not in fixtures]
    text = ast.unparse(_Numbers().visit(ast.parse("dict(" + "\n".join([*given, ")"]))))
    try:
        eval(text, dict(names))
    except Exception as error:  # whatever a test's own class raises
        raise ValueError(f"{type(error).__name__}: {error}") from None
    return f"@example{text.removeprefix('dict')}.via({origin!r})"


def pinned(source: str, name: str, lines: list[str]) -> str:
    """Return a test file with decorators above one of its tests."""
    tree = ast.parse(source)
    tests = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    test = next(node for node in tests if node.name == name)
    rows = source.splitlines(keepends=True)
    above = [f"{' ' * test.col_offset}{line}\n" for line in lines]
    rows[test.lineno - 1 : test.lineno - 1] = [line for line in above if line not in rows]
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    imports = [node for node in imports if node.module == "hypothesis"]
    if not any(each.name == "example" for node in imports for each in node.names):
        rows.insert(imports[0].lineno - 1, "from hypothesis import example\n")
    return "".join(rows)


def main() -> int:
    """Entry point."""
    text = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=text)
    parser.add_argument("--seed", type=int, help="of an earlier run; none: a new one")
    parser.add_argument("--times", type=int, default=TIMES, help="as many examples as by default")
    given, more = parser.parse_known_args()
    seed = random.SystemRandom().randrange(2**32) if given.seed is None else given.seed
    again = f"--seed {seed}" + (f" --times {given.times}" if given.times != TIMES else "")
    print(f'fuzz: seed {seed}; the same again: make fuzz FUZZ="{again}"', flush=True)
    keep = Keep(given.times, f"make fuzz, seed {seed}")
    options = ["-q", "--timeout=0", "--disable-warnings", "--hypothesis-profile=fuzz"]
    chosen = ["-m", "hypothesis and not slow and not gpu and not real", f"--hypothesis-seed={seed}"]
    code = pytest.main([*options, *chosen, *more], plugins=[keep])
    keep.write()
    print("\n".join(["", *keep.said, f"fuzz: seed {seed}, {len(keep.said)} found"]))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
