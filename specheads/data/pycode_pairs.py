"""Instruction pairs made from one Python module with ``ast``.

Six kinds. Two ask for new code: ``body`` (signature and docstring to body) and ``next`` (the next
statement of a function). Four are edits of code that the prompt holds: ``normalise`` (written the
way ``ast.unparse`` writes it), ``rename`` (one variable), ``add_import`` (the one import that the
code lacks) and ``type_hint``. All are short, because the default model reads bytes: 100 to 700 of
them per pair.
"""

from __future__ import annotations

import ast
import builtins
import copy
import hashlib
import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

KINDS = ("body", "next", "normalise", "rename", "add_import", "type_hint")
EDIT_KINDS = ("normalise", "rename", "add_import", "type_hint")
INSTRUCTIONS = {
    "body": "Write the body of this function.",
    "next": "Write the next statement.",
    "normalise": "Normalise this code.",
    "rename": "Rename `{old}` to `{new}`.",
    "add_import": "Add the missing import.",
    "type_hint": "Add type hints.",
}
MAX_PROMPT, MAX_ANSWER, SHORT_ANSWER = 440, 240, 120
PER_MODULE = {
    "body": 40
}  # pairs of one kind taken from one module: documented short bodies are rare
PER_MODULE_DEFAULT = 10
_NEW_NAMES = (
    "value",
    "items",
    "result",
    "index",
    "entry",
    "current",
    "total",
    "buffer",
    "source",
    "target",
    "node",
    "path",
    "text",
    "key",
    "left",
    "right",
    "count",
    "offset",
    "record",
    "chunk",
    "group",
    "state",
    "flag",
    "limit",
    "handle",
    "parts",
    "names",
    "size",
    "width",
    "start",
    "end",
    "rows",
)
_BUILTINS = frozenset(dir(builtins)) | {"self", "cls"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Pair(NamedTuple):
    """One instruction with its answer; ``code`` is the canonical form of where it came from."""

    kind: str
    name: str
    prompt: str
    answer: str
    code: str


def rank(*parts: object) -> int:
    """A stable pseudo-random number from ``parts``: every choice here is made with it."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, parts)).encode()).digest()[:8], "big")


def pairs_of_module(path: str, text: str, kinds: tuple[str, ...] = KINDS) -> list[Pair]:
    """All pairs of one module, a limited number per kind, in a fixed order."""
    tree = ast.parse(text)
    lines = text.split("\n")
    imports = _imports(tree)
    found: dict[str, list[Pair]] = {kind: [] for kind in kinds}
    seen: set[tuple[str, str]] = set()
    for name, function in _functions(tree):
        for pair in _pairs_of_function(path, name, function, lines, imports, set(kinds)):
            size = len(pair.answer.encode())
            if not 8 <= size <= MAX_ANSWER or len(pair.prompt.encode()) > MAX_PROMPT:
                continue
            if size > SHORT_ANSWER and pair.kind != "body" and rank("long", path, pair.prompt) % 3:
                continue
            if (pair.kind, pair.prompt) not in seen:
                seen.add((pair.kind, pair.prompt))
                found[pair.kind].append(pair)
    chosen = []
    for kind, pairs in found.items():
        pairs.sort(key=lambda pair: rank(kind, path, pair.prompt))
        chosen += pairs[: PER_MODULE.get(kind, PER_MODULE_DEFAULT)]
    return chosen


def _functions(tree: ast.Module) -> Iterator[tuple[str, _Function]]:
    stack: list[tuple[str, ast.AST]] = [("", tree)]
    while stack:
        prefix, node = stack.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _Function):
                yield prefix + child.name, child
            if isinstance(child, _Function | ast.ClassDef):
                stack.append((f"{prefix}{child.name}.", child))


def _pairs_of_function(
    path: str,
    name: str,
    function: _Function,
    lines: list[str],
    imports: dict[str, str],
    kinds: set[str],
) -> Iterator[Pair]:
    function = copy.copy(function)
    function.decorator_list = []
    doc = ast.get_docstring(function)
    body = function.body[1:] if doc else function.body
    if not body or _is_stub(body):
        return
    if doc and "body" in kinds:
        yield from _body(name, function, doc, body)
    bare = copy.copy(function)
    bare.body = body
    if "next" in kinds:
        yield from _next(path, name, bare)
    if "type_hint" in kinds:
        yield from _type_hint(name, bare)
    for node in (bare, *(node for node in body if not isinstance(node, _Function | ast.ClassDef))):
        if (node.end_lineno or 0) - node.lineno > 12:
            continue
        code = ast.unparse(node)
        if len(code) > MAX_ANSWER or code.count("\n") > 9:
            continue
        if "normalise" in kinds:
            source = _source(node, lines)
            if source and source.rstrip() != code and len(code) > 24 and not (node is bare and doc):
                yield Pair("normalise", name, _prompt("normalise", source), code, code)
        if "rename" in kinds:
            yield from _rename(path, name, node, code)
        if "add_import" in kinds:
            yield from _add_import(name, node, code, imports)


def _body(name: str, function: _Function, doc: str, body: list[ast.stmt]) -> Iterator[Pair]:
    summary = " ".join(doc.split("\n\n")[0].split())
    if not 10 <= len(summary) <= 160 or len(body) > 5:
        return
    head = copy.copy(function)
    head.body = [ast.Expr(ast.Constant(summary))]
    answer = textwrap.indent("\n".join(map(ast.unparse, body)), "    ")
    yield Pair("body", name, _prompt("body", ast.unparse(head)), answer, answer)


def _next(path: str, name: str, function: _Function) -> Iterator[Pair]:
    for cut in sorted(range(1, len(function.body)), key=lambda cut: rank("next", path, name, cut))[
        :3
    ]:
        head = copy.copy(function)
        head.body = function.body[:cut]
        if (head.body[-1].end_lineno or 0) - head.lineno > 20:
            continue
        answer = textwrap.indent(ast.unparse(function.body[cut]), "    ")
        if len(answer) <= SHORT_ANSWER and not isinstance(function.body[cut], _Function):
            yield Pair("next", name, _prompt("next", ast.unparse(head)), answer, answer)


def _rename(path: str, name: str, node: ast.stmt, code: str) -> Iterator[Pair]:
    if any(
        isinstance(child, ast.Global | ast.Nonlocal | ast.Import | ast.ImportFrom)
        for child in ast.walk(node)
    ):
        return
    uses = Counter(child.id for child in ast.walk(node) if isinstance(child, ast.Name))
    uses.update(child.arg for child in ast.walk(node) if isinstance(child, ast.arg))
    bound = {
        child.id
        for child in ast.walk(node)
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)
    }
    bound |= {child.arg for child in ast.walk(node) if isinstance(child, ast.arg)}
    olds = sorted(
        old
        for old in uses
        if uses[old] > 1 and old in bound and old not in _BUILTINS and len(old) > 1
    )
    if not olds:
        return
    old = olds[rank("old", path, code) % len(olds)]
    taken = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    news = [new for new in _NEW_NAMES if new not in taken and new not in code]
    if not news:
        return
    new = news[rank("new", path, code) % len(news)]
    renamed = copy.deepcopy(node)
    for child in ast.walk(renamed):
        if isinstance(child, ast.Name) and child.id == old:
            child.id = new
        elif isinstance(child, ast.arg) and child.arg == old:
            child.arg = new
    yield Pair(
        "rename", name, _prompt("rename", code, old=old, new=new), ast.unparse(renamed), code
    )


def _add_import(name: str, node: ast.stmt, code: str, imports: dict[str, str]) -> Iterator[Pair]:
    used = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)} & imports.keys()
    if len(used) == 1 and not any(
        isinstance(child, ast.Import | ast.ImportFrom) for child in ast.walk(node)
    ):
        line = imports[used.pop()]
        yield Pair("add_import", name, _prompt("add_import", code), f"{line}\n\n{code}", code)


def _type_hint(name: str, function: _Function) -> Iterator[Pair]:
    arguments = [child for child in ast.walk(function.args) if isinstance(child, ast.arg)]
    if not (function.returns or any(argument.annotation for argument in arguments)):
        return
    hinted = copy.deepcopy(function)
    if (function.end_lineno or 0) - function.lineno > 8 or len(ast.unparse(hinted)) > SHORT_ANSWER:
        hinted.body = [ast.Expr(ast.Constant(...))]
    bare = copy.deepcopy(hinted)
    bare.returns = None
    for child in ast.walk(bare.args):
        if isinstance(child, ast.arg):
            child.annotation = None
    answer, code = ast.unparse(hinted), ast.unparse(bare)
    if len(answer) <= 200:
        yield Pair("type_hint", name, _prompt("type_hint", code), answer, answer)


def _prompt(kind: str, code: str, **names: str) -> str:
    return f"{INSTRUCTIONS[kind].format(**names)}\n{code}"


def _source(node: ast.stmt, lines: list[str]) -> str:
    """The node as it stands in the file, dedented; empty where it shares a line."""
    rows = lines[node.lineno - 1 : node.end_lineno]
    if rows[0][: node.col_offset].strip() or "\t" in rows[0]:
        return ""
    source = textwrap.dedent("\n".join(row.rstrip() for row in rows))
    try:
        same = ast.unparse(ast.parse(source)) == ast.unparse(node)
    except SyntaxError:  # a multi-line string with less indentation than its statement
        return ""
    return source if same else ""


def _is_stub(body: list[ast.stmt]) -> bool:
    only = body[0]
    if len(body) > 1:
        return False
    if isinstance(only, ast.Raise):
        return "NotImplemented" in ast.unparse(only)
    return isinstance(only, ast.Pass) or (
        isinstance(only, ast.Expr) and isinstance(only.value, ast.Constant)
    )


def _imports(tree: ast.Module) -> dict[str, str]:
    """Name bound by a top-level absolute import -> the shortest statement that binds it."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if "." not in alias.name or alias.asname:
                    found[alias.asname or alias.name] = ast.unparse(ast.Import([alias]))
        elif (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and node.module not in (None, "__future__")
        ):
            for alias in node.names:
                if alias.name != "*":
                    found[alias.asname or alias.name] = ast.unparse(
                        ast.ImportFrom(node.module, [alias], 0)
                    )
    return found
