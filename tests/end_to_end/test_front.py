"""The library's front door: the program of the README, what it prints, and heads by name."""

from __future__ import annotations

import http.server
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import huggingface_hub
import pytest
import torch

import specheads
from specheads.config import ConfigError
from specheads.models.digest import file_sha256
from specheads.system import hub
from tests.processes import ROOT

HEADS = ROOT / "data" / "checkpoints" / "hydra"


@pytest.fixture(scope="module")
def model() -> specheads.Model:
    """Return the shipped Hydra heads on the embedded base."""
    return specheads.load(HEADS, dtype="float32")


def test_the_program_on_the_page(model: specheads.Model, tmp_path: Path) -> None:
    """The first program that a user types is the one that must not fail."""
    messages = [{"role": "user", "content": "Write a function that adds."}]
    prompts = ["def mean(values):"]
    found = model.generate("def add(a, b):", max_new_tokens=24)
    assert found.text and f"{len(found.tokens)} tokens in" in str(found)
    pieces = list(model.stream(messages, temperature=0.7, seed=1, max_new_tokens=24))
    whole = model.generate(messages, temperature=0.7, seed=1, max_new_tokens=24)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.tokens] == whole.tokens
    compared = model.compare(prompts, max_new_tokens=16, repeats=1)
    assert (compared.identical, compared.compared, compared.num_prompts) == (1, 1, 1)
    assert "x plain decoding" in str(compared) and "\n" not in str(compared)
    assert repr(model).startswith("<specheads.Model ") and ": heads, float32 on cpu>" in repr(model)


def test_every_kind_of_prompt(model: specheads.Model) -> None:
    """A list that is taken for one prompt, or a prompt for a list, answers another question."""
    text, messages = "x = 1", [{"role": "user", "content": "x = 1"}]
    ids = model.prompt(text)
    assert ids == model.prompt(messages) == model.prompt(torch.tensor([ids]))
    assert len(model.prompt(text, raw=True)) < len(ids)
    one = model.generate(text, max_new_tokens=6)
    several = model.generate([text, messages, ids], max_new_tokens=6)
    assert isinstance(several, list)
    assert [each.tokens for each in several] == [one.tokens] * 3
    assert model.generate([], max_new_tokens=6) == []
    plain = specheads.load("tinycode", dtype="float32")
    assert plain.drafter == "suffix" and plain.generate(ids, max_new_tokens=6).tokens == one.tokens


def test_a_stream_that_nobody_reads_ends(model: specheads.Model) -> None:
    """A server whose clients leave would decode for them until the limit, one thread for each."""
    before = threading.active_count()
    pieces = model.stream("def f():", max_new_tokens=400)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="num_beams"):
        list(model.stream("def f():", max_new_tokens=4, num_beams=2))


def test_what_is_wrong_is_one_line(model: specheads.Model, tmp_path: Path) -> None:
    """A traceback from within transformers does not say which argument was wrong."""
    for call, message in (
        (lambda: model.generate(torch.zeros(0, dtype=torch.long)), "the prompt has 0 tokens"),
        (lambda: model.compare([]), "compare.. needs prompts, got none"),
        (lambda: specheads.load(tmp_path / "nothing"), "nothing"),
        (lambda: specheads.load("tinycode", drafter="heads"), "needs the heads of an export"),
        (lambda: specheads.load("tinycode", device="abacus"), "abacus"),
        (lambda: specheads.run_recipe("medusa1", model="tinycode", stepz=4), "stepz"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            call()  # type: ignore[no-untyped-call]
        assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_recipe_from_python(tmp_path: Path) -> None:
    """Settings that mean something else in Python than on the command line train something else."""
    run = specheads.run_recipe(
        "medusa1", model="tinycode", steps=4, run_dir=str(tmp_path / "run"), data__rows=1,
        evaluate__num_prompts=2, evaluate__temperatures=[0.0], log__wandb="disabled",
        data="pycode", data__max_records=40,
    )  # fmt: skip
    assert run == tmp_path / "run"
    assert specheads.load(run / "export").generate("x", max_new_tokens=3).tokens


def test_the_import_is_light() -> None:
    """An import that takes torch along makes every program that mentions specheads wait seconds."""
    code = (
        "import sys, time; begin = time.perf_counter(); import specheads;"
        "took = time.perf_counter() - begin;"
        "print(took, [name for name in ('torch', 'transformers', 'hydra') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip().endswith("[]")


def test_names_are_there_after_every_command_was_imported() -> None:
    """A module of the same name, once imported, would stand in the place of what is promised."""
    code = (
        "import importlib, pkgutil, specheads\n"
        "for each in pkgutil.iter_modules(specheads.__path__):\n"
        "    if each.name not in ('vllm_proposer', 'torchrun'):\n"
        "        importlib.import_module(f'specheads.{each.name}')\n"
        "for name in specheads.__all__:\n"
        "    assert not hasattr(getattr(specheads, name), '__path__')\n"
        "    assert type(getattr(specheads, name)).__name__ != 'module', name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_users_file_is_typed(tmp_path: Path) -> None:
    """Without types that a checker sees, every user writes casts."""
    file = tmp_path / "program.py"
    file.write_text(
        "import specheads\n\n"
        'model = specheads.load("smollm2", drafter="heads+suffix", device="cpu")\n'
        'text: str = model.generate("a", max_new_tokens=4).text\n'
        'for piece in model.stream([{"role": "user", "content": "b"}], seed=1):\n'
        "    print(piece.text, end='')\n"
        'low: float = model.compare(["c"]).speedup_ci95[0]\n'
        'run = specheads.run_recipe("medusa1", model="tinycode", steps=4)\n'
        "print(run.name)\n"
    )
    checked = [sys.executable, "-m", "mypy", "--strict", "--config-file=", str(file)]
    done = subprocess.run(checked, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


class HubHandler(http.server.BaseHTTPRequestHandler):
    """As much of the hub as a download asks for: one repository, one commit."""

    commit = "a" * 40

    def __init__(self, folder: Path, asked: list[str], *args: Any) -> None:
        self.folder, self.asked = folder, asked
        super().__init__(*args)

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:  # noqa: N802 - the name that http.server gives it
        """Answer what a file is."""
        self.do_GET(body=False)

    def do_GET(self, body: bool = True) -> None:  # noqa: N802
        """Answer with a file."""
        path = unquote(self.path.partition("?")[0])
        self.asked.append(path)
        name = path.rpartition("/")[2]
        file = self.folder / name
        if not path.startswith("/org/heads/resolve/") or not file.is_file():
            self.send_response(404)
            missing = "EntryNotFound" if "/org/heads/" in path else "RepoNotFound"
            self.send_header("X-Error-Code", missing)
            self.send_header("X-Repo-Commit", self.commit)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        tag = {"ETag": f'"{file_sha256(file)}"', "X-Repo-Commit": self.commit}
        self._send(file.read_bytes(), tag, body)

    def _send(self, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(200)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Serve the shipped heads as ``org/heads``; return the paths that were asked for."""
    folder = tmp_path / "repository"
    shutil.copytree(HEADS, folder)
    paths: list[str] = []
    handler = partial(HubHandler, folder, paths)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        endpoint + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(huggingface_hub.hf_api, "api", huggingface_hub.HfApi(endpoint=endpoint))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    hub._answers.cache_clear()
    yield paths
    server.shutdown()
    server.server_close()
    hub._answers.cache_clear()


def test_heads_by_their_name_on_the_hub(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads that only a folder can name are heads that nobody shares."""
    cache = str(tmp_path / "cache")
    fetch = partial(huggingface_hub.hf_hub_download, cache_dir=cache)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    folder = Path(hub.fetched_export("org/heads"))
    assert (folder / "manifest.json").read_bytes() == (HEADS / "manifest.json").read_bytes()
    assert folder.name == HubHandler.commit and asked
    pinned = f"org/heads@{HubHandler.commit}"
    model = specheads.load(pinned, dtype="float32")
    expected = specheads.load(HEADS, dtype="float32").generate("x = 1", max_new_tokens=8)
    assert model.generate("x = 1", max_new_tokens=8).tokens == expected.tokens
    decoder = specheads.SpecDecoder.from_pretrained(pinned, dtype="float32")
    assert decoder.generate(torch.tensor([[5, 6, 7]]), 4, temperature=0).new_tokens
    # a commit is asked for once, and without the hub what is there goes on working
    asked.clear()
    assert hub.fetched_export(pinned) == str(folder)
    assert not [path for path in asked if not path.endswith("prompts.jsonl")]  # there is none
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert hub.fetched_export("org/heads") == str(folder)
    assert hub.fetched_export("org/base") == "org/base" == hub.fetched_export("org/base")
    assert hub.fetched_export(str(HEADS)) == str(HEADS)
