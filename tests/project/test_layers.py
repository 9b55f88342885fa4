"""The package's parts import only parts below them: docs/architecture.md, "Layers"."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.script_modules import load_script

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "specheads"
draw_layers = load_script("draw_layers")

COMMANDS = {
    "cli", "auto", "train", "generate", "chat", "serve", "bench", "tree_search", "export",
    "regenerate", "preview", "compare", "doctor", "quality", "spec_bench", "vllm_heads",
    "torchrun", "init", "plan",
}  # fmt: skip
# Lowest first. A part, which is a folder or a module at the root, imports its own layer and the
# layers before it.
LAYERS = [
    {"system"},
    {"attention", "losses"},
    {"config", "verification"},
    {"models", "runs"},
    {"data", "formats", "drafters"},
    {"training", "decoding"},
    {"measure", "regeneration"},
    {"pipeline", "vllm_proposer"},
    {"stages", "front", *COMMANDS},
    {"recipes", "__init__"},  # the front door imports what is asked of it
]
# Siblings that must not know each other though they share a layer.
STRANGERS = {("training", "decoding"), ("decoding", "training")}
# Imported only by the run that needs them: --help answers at once, and a missing one hurts nobody.
LAZY = {
    "hydra",
    "omegaconf",
    "datasets",
    "deepspeed",
    "bitsandbytes",
    "gguf",
    "peft",
    "wandb",
    "matplotlib",
    "vllm",
}


@cache
def parse(path: Path) -> ast.Module:
    """Parse a file once for all tests."""
    return ast.parse(path.read_text())


def imports(path: Path, *, at_load: bool = False) -> Iterator[str]:
    """Yield the dotted names a file imports, inside functions too unless ``at_load``."""
    stack: list[ast.AST] = [parse(path)]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif at_load and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        elif at_load and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack.extend(node.orelse)
            continue
        stack.extend(ast.iter_child_nodes(node))


def part_of(dotted: str) -> str | None:
    """Return the part of specheads that a dotted name lies in, None for other packages."""
    names = dotted.split(".")
    if names[0] != "specheads":
        return None
    return names[1] if len(names) > 1 and layer_of(names[1]) is not None else "__init__"


def layer_of(part: str) -> int | None:
    """Return the index of a part's layer."""
    return next((i for i, layer in enumerate(LAYERS) if part in layer), None)


def files() -> list[tuple[str, Path]]:
    """Return every file with the part it belongs to."""
    found = [
        (path.relative_to(PACKAGE).parts[0].removesuffix(".py"), path)
        for path in sorted(PACKAGE.rglob("*.py"))
    ]
    return found + [("recipes", path) for path in sorted((ROOT / "recipes").glob("*.py"))]


def arrows() -> dict[str, set[str]]:
    """Return part -> parts that it imports."""
    graph: dict[str, set[str]] = {}
    for part, path in files():
        targets = {target for name in imports(path) if (target := part_of(name))}
        graph.setdefault(part, set()).update(targets - {part})
    return graph


def test_every_part_has_a_layer() -> None:
    """A new folder that nobody placed would be exempt from every other rule here."""
    unplaced = {part for part, _ in files() if layer_of(part) is None}
    assert not unplaced, f"{sorted(unplaced)} stand in no layer"


def test_imports_point_down() -> None:
    """An upward import makes the library depend on its own programs, and spreads from there."""
    wrong = [
        f"{part} -> {target}"
        for part, targets in arrows().items()
        for target in sorted(targets)
        if (layer_of(part) or 0) < (layer_of(target) or 0) or (part, target) in STRANGERS
    ]
    assert not wrong, f"upward: {wrong}"


def test_no_file_imports_itself_through_others() -> None:
    """Of files in a circle, inside a folder too, none can be read or imported alone."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    graph = {
        name: {each for each in imports(path) if each in paths} - {name, "specheads"}
        for name, path in paths.items()
    }
    for name, path in paths.items():
        if path.name == "__init__.py":  # a package is what it offers; its files import one another
            graph[name] -= {each for each in graph[name] if each.startswith(f"{name}.")}
    while True:
        wanted = {target for targets in graph.values() for target in targets}
        ends = [n for n, targets in graph.items() if n not in wanted or not targets & graph.keys()]
        if not ends:
            break
        for name in ends:
            del graph[name]
    assert not graph, f"a circle among {sorted(graph)}"


def test_commands_import_no_commands() -> None:
    """What two commands share would be found in one of them, and loaded with all it needs."""
    wrong = [
        f"{part} imports {name}"
        for part, path in files()
        if part in COMMANDS
        for name in imports(path)
        if part_of(name) in COMMANDS - {part}
    ]
    assert not wrong, wrong


def test_recipes_do_not_import_each_other() -> None:
    """Recipes are copied and changed one at a time; a shared one would change under its users."""
    names = {path.stem for path in (ROOT / "recipes").glob("*.py")}
    for path in (ROOT / "recipes").glob("*.py"):
        found = {name.split(".")[-1] for name in imports(path) if name.split(".")[0] == "recipes"}
        assert not found & names, f"{path.name} imports {sorted(found & names)}"


@pytest.mark.parametrize("part,path", files(), ids=lambda value: getattr(value, "name", value))
def test_heavy_packages_are_imported_late(part: str, path: Path) -> None:
    """DeepSpeed or wandb at load time would slow every command and demand a compiler of all."""
    loaded = {name.split(".")[0] for name in imports(path, at_load=True)}
    composes = part in COMMANDS or path.name == "main.py"
    allowed = {"hydra", "omegaconf"} if composes else set()
    assert not (loaded & LAZY) - allowed, f"{path.name} loads {sorted(loaded & LAZY)}"


def test_the_drawing_shows_the_imports() -> None:
    """A drawing that nobody renews sends a newcomer along arrows that are gone."""
    assert draw_layers.drawing() in draw_layers.PAGE.read_text(encoding="utf-8"), (
        "run python scripts/draw_layers.py"
    )


def test_the_page_names_files_that_exist() -> None:
    """Who follows a hidden state through the files must find each of them."""
    page = draw_layers.PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+/[a-z_]+\.py)`", page))
    assert len(named) > 20
    missing = [
        name
        for name in sorted(named)
        if not any((ROOT / p / name).is_file() for p in ("", "specheads"))
    ]
    assert not missing, missing
