"""What ``make quickstart`` prints first of all."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch

from specheads.data.pycode import KINDS
from specheads.measure.clock import Prompt
from specheads.system.files import tinycode_dir
from tests.script_modules import ROOT, load_script

quickstart: Any = load_script("quickstart")


def test_as_many_prompts_ask_for_new_text_as_for_edits() -> None:
    """Four kinds in six are edits: over all of them copies win what new text does not give."""
    lines = (tinycode_dir() / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    prompts = [Prompt(str(i), kind, torch.zeros(1, 1)) for i, kind in enumerate(kinds)]
    chosen = quickstart.balanced(prompts)
    groups = quickstart.groups_of(chosen)
    assert [*groups] == [*KINDS, "new text", "edits", "all"]
    assert len(groups["new text"]) == len(groups["edits"]) >= 12
    assert sorted(groups["new text"] + groups["edits"]) == groups["all"]
    for kind, count in Counter(prompt.kind for prompt in chosen).items():
        assert {chosen[i].kind for i in groups[kind]} == {kind} and len(groups[kind]) == count
    other = [Prompt("0", "question", torch.zeros(1, 1))]
    assert quickstart.groups_of(other) == {"question": [0], "all": [0]}


def test_it_says_what_training_adds_to_copies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without what is free beside it, a first look sells training that does not pay."""
    for name, few in {"NUM_NEW": 1, "NUM_EDITS": 1, "MAX_NEW_TOKENS": 12}.items():
        monkeypatch.setattr(quickstart, name, few)
    monkeypatch.setattr(quickstart.hardware, "pick_dtype", lambda *_: torch.float32)
    export = str(ROOT / "data" / "checkpoints" / "medusa1")
    monkeypatch.setattr("sys.argv", ["quickstart.py", "--checkpoint", export])
    quickstart.main()
    printed = capsys.readouterr().out
    assert printed.count("prompt lookup          copies         trained            both") == 2
    for line in ("T=0 ", "T=1 ", "new text ", "edits ", "all "):
        assert f"\n{line}" in printed
    shares = [f"{name} 12 of 12" for name in quickstart.DRAFTERS]
    assert f"in float32: {', '.join(shares)}." in printed
    assert f"The export: {export}" in printed
