"""``json=true``: one object on standard output, and everything else on standard error."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import pytest

from specheads import config as settings
from specheads.config.main import answer, answering

PACKAGE = Path(__file__).parents[2] / "specheads"


@dataclass
class Asked:
    """Settings of a command."""

    json: bool = False


def run(config: Asked) -> None:
    """Print, answer, print."""
    with answering(config):
        print("a table")
        answer({"figures": (1, 2.5, float("nan"), float("inf")), "text": "é\n", "none": None})
        print("a remark")


def test_only_the_object_is_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    """A line of a table before the object breaks every program that reads it."""
    run(Asked(json=True))
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    assert json.loads(out, parse_constant=pytest.fail) == {
        "figures": [1, 2.5, None, None],
        "text": "é\n",
        "none": None,
    }
    assert err == "a table\na remark\n"
    run(Asked())
    assert capsys.readouterr() == ("a table\na remark\n", "")


def test_nothing_leaks_out_of_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """A command that fails must neither print half an object nor swallow later output."""
    with pytest.raises(ValueError, match="no"), answering(Asked(json=True)):
        print("begun")
        raise ValueError("no")
    assert capsys.readouterr() == ("", "begun\n")
    run(Asked())
    assert capsys.readouterr().out == "a table\na remark\n"


def test_every_command_with_the_key_answers() -> None:
    """A key that is accepted and then ignored leaves a script waiting for its object."""
    asked = {
        name
        for name, schema in vars(settings).items()
        if is_dataclass(schema) and any(field.name == "json" for field in fields(schema))
    }
    assert {"GenerateConfig", "BenchConfig", "DoctorConfig", "TreeSearchConfig"} <= asked
    answered = set()
    for path in PACKAGE.glob("*.py"):
        tree = ast.parse(path.read_text())
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef) or node.name != "run":
                continue
            annotation = node.args.args[0].annotation
            if calls & {"answer", "report"}:
                assert annotation is not None
                answered.add(ast.unparse(annotation))
    assert answered == asked
