"""Nothing that is read can run code: no pickle, no eval, no modules, sandboxed templates."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from specheads.config import ConfigError
from specheads.data.chat import Encoder

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "specheads").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")])

MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
CALLS = {
    "eval", "exec", "compile", "__import__", "torch.load", "torch.hub.load", "os.system",
    "os.popen", "np.load", "numpy.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load",
    "pd.read_pickle", "runpy.run_path", "torch.jit.load",
    "torch.package.PackageImporter",
}  # fmt: skip
# (file below the root, what it does): why it may. DeepSpeed's own loading of pickle is not seen
# here: resume.trust guards it
ALLOWED: dict[tuple[str, str], str] = {
    ("specheads/models/manifest.py", "torch.load"): "weights_only, where the user asks for it",
}


def name_of(node: ast.AST) -> str:
    """Return a dotted name, empty for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (inner := name_of(node.value)):
        return f"{inner}.{node.attr}"
    return ""


def findings(source: str) -> Iterator[str]:
    """Yield what in ``source`` could run code that was read."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            name = name_of(node.func)
            if name in CALLS:
                yield name
            for keyword in node.keywords:
                value = getattr(keyword.value, "value", None)
                if keyword.arg == "trust_remote_code" and value is True:
                    yield "trust_remote_code=True"
                if keyword.arg == "shell" and value is True:
                    yield "shell=True"
                if keyword.arg == "weights_only" and value is False:
                    yield "weights_only=False"
                if keyword.arg == "allow_pickle" and value is True:
                    yield "allow_pickle=True"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_runs_what_it_reads(path: Path) -> None:
    """One ``torch.load`` for convenience, and a downloaded file owns the machine."""
    name = str(path.relative_to(ROOT))
    found = [what for what in findings(path.read_text()) if (name, what) not in ALLOWED]
    assert not found, f"{name}: {', '.join(found)}"


@pytest.mark.parametrize(
    "line",
    ["import pickle", "from pickle import loads", "eval(x)", "torch.load(f)", "exec('x')",
     "f(trust_remote_code=True)", "run(a, shell=True)", "torch.load(f, weights_only=False)",
     "np.load(f, allow_pickle=True)", "import torch.hub; torch.hub.load(a, b)"],
)  # fmt: skip
def test_the_search_finds_it(line: str) -> None:
    """A search that finds nothing anywhere would look the same."""
    assert list(findings(line))


def test_defaults_trust_nobody() -> None:
    """A default of true is a literal that no call shows."""
    for path in FILES:
        if "trust" not in (text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            # without a value it is a keyword that its callee has a default for
            if isinstance(node, ast.AnnAssign) and node.value and name_of(node.target) in (
                "trust_remote_code", "resume_trust",
            ):  # fmt: skip
                assert isinstance(node.value, ast.Constant) and node.value.value is False, path
    conf = [file.read_text() for file in (ROOT / "conf").rglob("*.yaml")]
    assert not any("trust_remote_code: true" in text.lower() for text in conf)


MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
RECORD = {"id": "r", "kind": "chat", "messages": MESSAGES}
ATTACKS = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['os'].system('touch exploded') }}",
    "init": "{{ self.__init__.__globals__ }}",
    "cycler": "{{ cycler.__init__.__globals__.os.popen('touch exploded').read() }}",
    "format": "{{ '{0.__class__.__base__}'.format(messages) }}",
    "attr filter": "{{ ((messages|attr('__class__'))|attr('__base__')).x }}",
    "change": "{{ messages.append(messages[0]) }}",
    "change in place": "{% set _ = messages[0].update({'content': 'other'}) %}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import '/etc/passwd' as x %}{{ x }}",
    "range": "{% for i in range(10 ** 12) %}{{ i }}{% endfor %}",
    "endless": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_templates_are_sandboxed(
    attack: str, make_byte_tokenizer: Callable[..., PreTrainedTokenizerFast],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A chat template is a program that comes with a tokenizer, and runs for every record."""
    monkeypatch.chdir(tmp_path)
    encoder = Encoder(make_byte_tokenizer(ATTACKS[attack]))
    with pytest.raises(ConfigError) as caught:
        encoder(RECORD)
    assert "\n" not in str(caught.value) and "template" in str(caught.value)
    assert not list(tmp_path.iterdir())
    assert RECORD["messages"] == MESSAGES and len(MESSAGES) == 2
