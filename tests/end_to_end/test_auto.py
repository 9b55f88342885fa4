"""``specheads auto``: from a model's name to heads for it, however often it is stopped."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from specheads import stages
from specheads.config import AutoConfig, ConfigError, DecodeConfig, RunError
from specheads.data.tokenizers import byte_tokenizer
from specheads.decoding.exported import exported_drafter
from specheads.decoding.generate import SpecDecoder
from specheads.measure.bench import quoted_method
from specheads.models.checkpoint import load_export
from specheads.regeneration import questions
from tests.toys import save_talker
from tests.zoo import build

ARCHITECTURES = "gemma2", "gpt2", "deepseek_v3"  # eager attention, learned positions, experts
MORE = (
    "llama", "qwen2", "qwen3", "mistral-window", "gemma3", "phi3", "gpt_neox", "qwen3_moe",
    "mixtral",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    for name, value in {"FIRST": 4, "LEAST": 4, "ANSWER_TOKENS": 16, "NUM_PROMPTS": 2}.items():
        monkeypatch.setattr(stages, name, value)
    monkeypatch.setattr(stages, "NEW_TOKENS", 8)
    monkeypatch.setattr(questions, "BLOCK", 8)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Return a file of prompts, one per line."""
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"Write {i} words about the {i}th day.\n" for i in range(40)))
    return path


@pytest.fixture
def talker(tmp_path: Path) -> Path:
    """Return the folder of a tiny model whose texts end by themselves, most of them soon."""
    return save_talker(tmp_path / "talker")


def settings(model: Path, **given: Any) -> AutoConfig:
    """Return settings of a run that has no time but for the least of everything."""
    return AutoConfig(**{"model": str(model), "minutes": 0.001, "dtype": "float32", **given})


@pytest.mark.parametrize(
    "name", [*ARCHITECTURES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_any_architecture_comes_to_heads(name: str, tmp_path: Path, prompts: Path) -> None:
    """A base of another kind would train for an hour and then fail at its export or figures."""
    model = build(name, vocab_size=280)
    folder = tmp_path / "base"
    model.save_pretrained(folder)
    byte_tokenizer(256).save_pretrained(folder)
    found = stages.auto(settings(folder, prompts=str(prompts)), lambda line: None)
    export = load_export(found["export"])
    ids = torch.tensor([[5, 6, 7, 8]])
    drafted = SpecDecoder(export.base, exported_drafter(export)).generate(ids, 12)
    assert drafted.new_tokens == SpecDecoder(export.base, None).generate(ids, 12).new_tokens
    quoted = found["bench"]["headline"]["method"]
    assert quoted == quoted_method(export, DecodeConfig(), [])
    rows = [row for row in found["bench"]["rows"] if row["method"] == quoted]
    assert {row["temperature"] for row in rows} == {0.0, 0.7, 1.0}
    assert all(row["identical"] == row["compared"] > 0 for row in rows)


class KilledError(Exception):
    """What a process that is killed leaves undone, as far as a test can do it in passing."""


def test_a_run_goes_on_where_it_was_killed(
    talker: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill after 50 of 60 minutes would begin anew, or train on other data than was planned."""
    del prompts
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if len(said) == stop:
            raise KilledError(line)

    given = settings(talker, name="killed")
    finished, kills, stop = list[str](), 0, 3
    while True:
        said.clear()
        try:
            found = stages.auto(given, say)
            break
        except KilledError:
            kills, stop = kills + 1, stop + 8
        state = Path("runs/killed/auto.json")
        done = json.loads(state.read_text())["seconds"] if state.exists() else {}
        assert list(done)[: len(finished)] == finished  # nothing that has ended is done again
        assert all(f"{name}: done before" in said for name in finished)
        finished = list(done)
    assert kills > 2 and Path(found["export"], "model.safetensors").is_file()
    whole = stages.auto(settings(talker, name="whole"), lambda line: None)
    for file in ("answers.jsonl", "answers.jsonl.questions.jsonl"):
        one, other = (records(Path("runs", name, file)) for name in ("killed", "whole"))
        shared = one.keys() & other.keys()  # how many there are is a matter of time
        assert len(shared) >= 4 and all(one[key] == other[key] for key in shared)
    assert whole["plan"]["recipe"] == "block"


def test_a_server_answers_what_the_base_asks(talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour of a running server would not be used, or it be asked to write a user's turn."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body["messages"][-1]["content"])
            choice = {"message": {"content": "As you say."}, "finish_reason": "stop"}
            data = json.dumps({"choices": [choice], "usage": {"completion_tokens": 3}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    monkeypatch.setattr(stages._Stages, "store_features", lambda self: None)
    monkeypatch.setattr(stages._Stages, "train", lambda self: pytest.skip("trained elsewhere"))
    stop = pytest.raises(pytest.skip.Exception)
    try:
        with stop:
            stages.auto(settings(talker, endpoint=url, endpoint_model="m"), lambda line: None)
    finally:
        server.shutdown()
        server.server_close()
    (folder,) = Path("runs").iterdir()
    answered = records(folder / "answers.jsonl")
    assert len(answered) >= 4 and len(asked) == len(answered)
    assert {of["messages"][-1]["content"] for of in answered.values()} == {"As you say."}


def records(path: Path) -> dict[str, Any]:
    """Return the records of a file by their ids."""
    return {each["id"]: each for each in map(json.loads, path.read_text().splitlines())}


def test_what_cannot_be_is_said_in_a_line(
    talker: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour with the wrong settings, or too little of it, would end in heads of no use."""
    quiet: Callable[[str], None] = lambda line: None  # noqa: E731
    monkeypatch.setattr(stages, "LEAST", 1 << 20)
    with pytest.raises(RunError, match=r"minutes=0.001 is too short .* expected at least minutes="):
        stages.auto(settings(talker), quiet)
    with pytest.raises(ConfigError, match=r"auto.json was begun with .* seed .0 there, 1 here"):
        stages.auto(settings(talker, seed=1), quiet)
    with pytest.raises(ConfigError, match="kind must be one of"):
        settings(talker, kind="medusa9")
    build("opt", vocab_size=280).save_pretrained(tmp_path / "opt")
    byte_tokenizer(256).save_pretrained(tmp_path / "opt")
    with pytest.raises(ConfigError, match="does not keep packed documents apart"):
        stages.auto(settings(tmp_path / "opt", prompts=str(prompts)), quiet)
    assert not list(Path("runs").glob("*opt/*.jsonl"))  # said before anything is written
    path = Path("runs/auto-" + str(talker).strip("/").replace("/", "-"), "auto.json")
    for damaged in ("{", "[]", '{"asked": 1, "seconds": {}, "plan": {}}', '{"asked": {}}'):
        path.write_text(damaged)
        with pytest.raises(ConfigError, match=r"auto.json is damaged"):
            stages.auto(settings(talker), quiet)
