"""What the README and the pages of docs/ say can be done, can be done."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from specheads import cli
from tests.composed import composed
from tests.processes import ROOT
from tests.script_modules import options_of

README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs" / "decoding.md").read_text()
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.md")),
    ]
}
FOREIGN = ("cd", "export", "git", "mkdir", "pip", "source")  # programs that are not ours


def blocks(language: str, page: str = README) -> list[str]:
    """Return a page's code blocks in ``language``."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    """Return the pages' shell commands, split into words, comments and what is piped left out."""
    code = "\n".join(block for page in PAGES.values() for block in blocks("sh", page))
    found: dict[tuple[str, ...], None] = {}
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        ends = [words.index(sign) for sign in ("|", ">", "2>", "<") if sign in words]
        words = words[: min(ends, default=len(words))]
        while words and re.match(r"[A-Z_]+=", words[0]):  # a variable for this command
            words = words[1:]
        if words:
            found[tuple(words)] = None
    return [list(words) for words in found]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_exist(words: list[str]) -> None:
    """A renamed key or target leaves a page whose first command fails."""
    if words[0] in FOREIGN:
        return
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    if words[0] == "pytest":
        assert words[1:] == ["-m", "gpu"]
        return
    if words[0] == "python" and words[1].startswith("scripts/"):
        assert {word for word in words if word.startswith("--")} <= options_of(words[1])
        return
    if words[:2] == ["wandb", "sync"]:
        assert importlib.util.find_spec("wandb")
        return
    if words[0] == "specheads":
        program, given = program_of(words[1]), words[2:]
    else:
        assert words[:2] == ["python", "-m"], words
        program, given = words[2].removeprefix("specheads."), words[3:]
    if "--help" in given or not program:
        return
    composed(program, given)


def program_of(command: str) -> str:
    """Return the module that ``specheads <command>`` starts; empty: it starts none."""
    if command in ("--help", "--version", "help", "version"):
        return ""
    return cli.COMMANDS[command].removeprefix("specheads.")


def test_settings_of_the_table_exist() -> None:
    """A setting that was renamed is refused with an error the README provoked."""
    page = PAGES["docs/training.md"].partition("## Settings that are often needed")[2]
    cells = re.findall(r"^\| (`[^|]*`[^|]*) \|", page, re.MULTILINE)
    words = [
        word for cell in cells for code in re.findall("`(.*?)`", cell) for word in code.split()
    ]
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    assert len(overrides) > 10
    values = [word.split(",")[0] for word in overrides]
    composed("train", ["+recipe=medusa1", *values])


def test_python_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example is what people paste first."""
    (code,) = blocks("python")
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(code, names)
    assert capsys.readouterr().out.strip()
    assert (Path(str(names["run"])) / "export" / "config.json").is_file()


def test_readme_is_two_pages() -> None:
    """A front page grows by a table at a time, until nobody reads to its second command."""
    assert README.count("\n") <= 200 and "**Status" in "\n".join(README.splitlines()[:15])


def test_guide_to_decoding_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """A page of examples goes stale line by line, and its claims of identity with it."""
    code = "\n".join(blocks("python", GUIDE))
    assert "runs/hydra/export" in code and code.count("assert ") > 5
    golden = ROOT / "tests" / "golden" / "export"
    exec(code.replace("runs/hydra/export", str(golden)), {})
    assert capsys.readouterr().out.strip()


# those of docs/adding_a_method.md are files and edits: test_adding_a_method.py applies them
OWN_TESTS = ("README.md", "docs/decoding.md", "docs/adding_a_method.md")
OTHERS = [name for name in PAGES if name not in OWN_TESTS]


@pytest.mark.parametrize("page", [name for name in OTHERS if blocks("python", PAGES[name])])
def test_python_of_other_pages_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An example that nobody runs names functions that were renamed.

    A block behind ``<!-- not run: why -->`` needs what is not here; it must be Python all the same.
    """
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    pattern = r"(<!-- not run: [^>]+ -->\n)?^```python\n(.*?)^```"
    for excuse, code in re.findall(pattern, PAGES[page], re.DOTALL | re.MULTILINE):
        compiled = compile(
            re.sub(r"runs/(hydra|quickstart)/export", str(ROOT / "tests/golden/export"), code),
            page,
            "exec",
        )
        if not excuse:
            exec(compiled, names)
    capsys.readouterr()


@pytest.mark.parametrize("page", [*PAGES, "BENCHMARKS.md", "benchmarks/README.md"])
def test_links_lead_somewhere(page: str) -> None:
    """A page that was moved leaves links that nobody clicks before publishing."""
    path = ROOT / page
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose):
        if target.startswith("http"):
            continue
        found = (path.parent / target).resolve()
        late = found.suffix in {".svg", ".json"} or "tinycode" in found.parts
        assert found.exists() or (late and not published()), f"{page} links to {target}"


def anchors(path: Path) -> set[str]:
    """Return the anchors that a page's headings make, as GitHub spells them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", [*PAGES, "BENCHMARKS.md"])
def test_anchors_exist(page: str) -> None:
    """A heading that was reworded leaves links to the top of a page of 700 lines."""
    path = ROOT / page
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", path.read_text()):
        if target.startswith("http") or (target and not target.endswith(".md")):
            continue
        found = (path.parent / target).resolve() if target else path
        assert anchor in anchors(found), f"{page} links to {target}#{anchor}"


def published() -> bool:
    """Say whether what `make bench` measures lies in the repository yet."""
    return (ROOT / "benchmarks" / "readme" / "parts.json").is_file()
