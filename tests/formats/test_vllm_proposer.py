"""The proposer for vLLM, against a re-statement of how vLLM 0.32 and 0.33 call them."""

from __future__ import annotations

import importlib
import json
import os
import random
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM

from specheads import vllm_proposer
from specheads.formats import serving
from specheads.models import mtp_hf
from specheads.system.registration import register
from specheads.vllm_proposer import SPARED, SuffixProposer

NUM_TOKENS, MAX_LENGTH = 5, 60
GARBAGE = 77  # what stands in vLLM's buffer where nothing was written


def vllm_config(num_tokens: int = NUM_TOKENS, max_length: int = MAX_LENGTH) -> Any:
    """Return what a proposer reads of vLLM's settings."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            num_speculative_tokens=num_tokens,
            **{"prompt_lookup_max": 0, "prompt_lookup_min": 0},
        ),
        model_config=SimpleNamespace(max_model_len=max_length),
    )


@dataclass
class Request:
    """One prompt on its way: ``read`` tokens are in the cache, ``guesses`` wait to be verified."""

    name: int
    text: list[int]
    limit: int
    read: int = 0
    guesses: list[int] = field(default_factory=list)


@dataclass
class Engine:
    """The batch of vLLM's model runner: rows of one buffer, refilled and closed up as it goes.

    In a step every row reads a part of its prompt, which gives no token, or its last token and its
    guesses, of which those are kept that the model says itself, and one more. Sampled tokens are in
    the buffer when the proposer is called; behind them stands what was there before. Requests that
    end leave a hole, which the last row moves into; now and then two rows change places, or one
    request is left out for a step.
    """

    proposer: Any
    next_tokens: Any  # text -> the model's greedy token after each of its tokens
    requests: list[Request]
    max_rows: int = 3
    chunk: int = 6
    rows: list[Request] = field(default_factory=list)
    aside: list[Request] = field(default_factory=list)
    proposed: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        self.tokens = np.full((self.max_rows, MAX_LENGTH), GARBAGE, np.int32)
        self.lengths = np.zeros(self.max_rows, np.int32)
        self.chance = random.Random(0)

    def run(self) -> dict[int, list[int]]:
        """Decode all requests; return their texts."""
        done = {}
        while self.rows or self.aside or self.requests:
            self._refill()
            sampled = [self._verify(request) for request in self.rows]
            for row, request in enumerate(self.rows):
                self._write(row, request)
            found = self.proposer.propose(sampled, self.lengths, self.tokens, slot_mappings=None)
            self._check(found, sampled)
            for row in reversed(range(len(self.rows))):
                request = self.rows[row]
                request.guesses = found[row]
                if len(request.text) >= request.limit:
                    done[request.name] = request.text
                    self._leave(row)
            self._shuffle()
        return done

    def _refill(self) -> None:
        waiting = self.aside or self.requests
        while len(self.rows) < self.max_rows and waiting:
            self.rows.append(waiting.pop(0))
            waiting = self.aside or self.requests
        for row, request in enumerate(self.rows):
            self._write(row, request)

    def _write(self, row: int, request: Request) -> None:
        self.tokens[row, : len(request.text)] = request.text
        self.lengths[row] = len(request.text)

    def _verify(self, request: Request) -> list[int]:
        if request.read + self.chunk < len(request.text) and not request.guesses:
            request.read += self.chunk  # a part of the prompt
            return []
        said = self.next_tokens([*request.text, *request.guesses])[len(request.text) - 1 :]
        kept = 0
        while kept < len(request.guesses) and request.guesses[kept] == said[kept]:
            kept += 1
        new = said[: kept + 1][: request.limit - len(request.text)]
        self.proposed += len(request.guesses)
        self.accepted += kept
        request.text = [*request.text, *new]
        request.read = len(request.text) - 1
        return new

    def _check(self, found: Any, sampled: list[list[int]]) -> None:
        assert type(found) is list and len(found) == len(self.rows)
        for guesses, new, request in zip(found, sampled, self.rows, strict=True):
            assert all(type(token) is int for token in guesses)
            assert new or not guesses  # a prompt that is being read has no place for guesses
            assert len(guesses) <= NUM_TOKENS
            assert len(request.text) + len(guesses) < MAX_LENGTH or not guesses

    def _leave(self, row: int) -> None:
        last = self.rows.pop()
        if row < len(self.rows):
            self.rows[row] = last

    def _shuffle(self) -> None:
        if len(self.rows) > 1 and self.chance.random() < 0.3:
            self.rows[0], self.rows[-1] = self.rows[-1], self.rows[0]
        if len(self.rows) > 1 and self.chance.random() < 0.2:
            self.aside.append(self.rows[-1])
            self._leave(len(self.rows) - 1)


@pytest.fixture(scope="module")
def greedy() -> Iterator[Any]:
    """A tiny model whose greedy texts repeat themselves, and what it says after each token."""
    from tests.conftest import build_tiny_llama

    model: LlamaForCausalLM = build_tiny_llama(seed=3, std=0.2).eval()

    @torch.inference_mode()
    def next_tokens(text: list[int]) -> list[int]:
        logits = model(torch.tensor([text])).logits[0, :, :12]  # few tokens are soon repeated
        said: list[int] = logits.argmax(-1).tolist()
        return said

    yield next_tokens


def prompts() -> list[list[int]]:
    """Prompts of several lengths, two of them equal and one the beginning of another."""
    draw = random.Random(1)
    made = [[draw.randrange(2, 40) for _ in range(size)] for size in (3, 14, 25, 7)]
    return [*made, list(made[1]), made[2][:9]]


LIMITS = (30, 44, MAX_LENGTH, 33, 40, 36)


@pytest.fixture(scope="module")
def plain(greedy: Any) -> dict[int, list[int]]:
    """The texts of decoding one token at a time."""
    texts = {}
    for name, (prompt, limit) in enumerate(zip(prompts(), LIMITS, strict=True)):
        text = list(prompt)
        while len(text) < limit:
            text.append(greedy(text)[-1])
        texts[name] = text
    return texts


def test_an_engine_returns_the_tokens_of_plain_decoding(
    greedy: Any, plain: dict[int, list[int]]
) -> None:
    """A proposer that mixes up rows, or guesses where it may not, stops or slows a server.

    Rows change places, requests come, go and wait, prompts are read in parts.
    """
    requests = [Request(name, text, LIMITS[name]) for name, text in enumerate(prompts())]
    engine = Engine(SuffixProposer(vllm_config()), greedy, requests)
    assert engine.run() == plain
    assert engine.accepted > 10, "nothing was guessed right: the test would not see wrong guesses"


def by_suffix(text: list[int], limit: int) -> list[int]:
    """Return the guesses of the class, by looking at every place of the text anew."""

    def places(part: list[int], end: int) -> list[int]:
        size = len(part)
        return [i + size for i in range(end - size + 1) if text[i : i + size] == part]

    size = len(text) - 1
    while size and not [i for i in places(text[len(text) - size :], len(text)) if i < len(text)]:
        size -= 1
    limit = min(limit, 3 * size)
    part, share = text[len(text) - size :], 1.0
    found: list[int] = []
    while len(found) < limit:
        ends = [i for i in places(part, len(text)) if i < len(text)]
        while not ends:  # the text ends here: go on as after the longest end of it that went on
            part = part[1:]
            ends = [i for i in places(part, len(text)) if i < len(text)]
        followed = [text[i] for i in ends]
        best = max(set(followed), key=lambda token: (followed.count(token), last(followed, token)))
        share *= followed.count(best) / len(followed)
        if share < 0.3:
            break
        found.append(best)
        part = [*part, best]
    return found


def last(values: list[int], value: int) -> int:
    """Return the last index of a value."""
    return max(i for i, each in enumerate(values) if each == value)


def test_guesses_are_those_of_the_text_alone() -> None:
    """A row that keeps what another request wrote guesses its tokens, which are hardly accepted.

    Four texts grow in rows that change at every call; a new one begins with all of another.
    """
    draw = random.Random(5)
    proposer = SuffixProposer(vllm_config(max_length=1000))
    texts = [[draw.randrange(3)] for _ in range(4)]
    tokens, lengths = np.full((5, 1000), GARBAGE, np.int32), np.zeros(5, np.int32)
    guessed = 0
    for call in range(60):
        if call == 30:
            texts[3] = list(texts[2])
        order = draw.sample(range(4), draw.randrange(1, 5))
        sampled = []
        for row, name in enumerate(order):
            new = [draw.randrange(3) for _ in range(draw.randrange(3))]
            texts[name] += new
            tokens[row, : len(texts[name])] = texts[name]
            lengths[row] = len(texts[name])
            sampled.append(new)
        found = proposer.propose(sampled, lengths, tokens, slot_mappings=None)
        expected = [
            by_suffix(texts[name], NUM_TOKENS) if new else []
            for name, new in zip(order, sampled, strict=True)
        ]
        assert found == expected, f"call {call}"
        guessed += sum(map(len, found))
    assert guessed > 100


def propose(proposer: Any, *texts: list[int]) -> list[list[int]]:
    """Call a proposer with whole texts, one row each."""
    tokens = np.full((len(texts), max(map(len, texts)) + 3), GARBAGE, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    found: list[list[int]] = proposer.propose(
        [[text[-1]] for text in texts], np.array([len(text) for text in texts]), tokens
    )
    return found


class Text(list[int]):
    """A state that is the text itself; counts how often one is begun."""

    begun = 0

    def __init__(self) -> None:
        type(self).begun += 1


class Reader(SuffixProposer):
    """Guesses the text that it has read."""

    def _guess(self, state: Any, limit: int) -> list[int]:
        return list(state)


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Reader:
    """Return a proposer whose states are texts."""
    monkeypatch.setattr(vllm_proposer, "SuffixAutomaton", Text)
    monkeypatch.setattr(Text, "begun", 0)
    return Reader(vllm_config())


def test_texts_of_ended_requests_are_let_go(reader: Reader) -> None:
    """A state per request that ever came fills the memory of a server too."""
    for start in range(100):
        assert propose(reader, [start, start + 1]) == [[start, start + 1]]
    assert sum(map(len, reader._states._known.values())) <= 1 + SPARED


def test_a_request_that_waited_is_known_again(reader: Reader) -> None:
    """Reading a long prompt anew each time its request comes back would stall the whole batch."""
    one, two = [*range(50)], [*range(100, 150)]
    propose(reader, one, two)
    propose(reader, [*two, 7])  # the first waits, the second moves into its row
    found = propose(reader, [*one, 8], [*two, 7, 9])
    assert found[0][-2:] == [49, 8] and found[1][-3:] == [149, 7, 9]
    assert Text.begun == 2
    same = [*one, 8]
    propose(reader, same, same)
    assert propose(reader, [*same, 1], [*same, 2]) == [[*same, 1], [*same, 2]]


def test_no_guess_beyond_the_longest_text() -> None:
    """A text that outgrows max_model_len ends the server: vLLM asserts that none does."""
    text = [1, 2, 3, 4] * 4
    for room, expected in [(6, 5), (3, 2), (2, 1), (1, 0), (0, 0)]:
        proposer = SuffixProposer(vllm_config(max_length=len(text) + room))
        assert [len(each) for each in propose(proposer, text)] == [expected], room


def test_settings_are_those_of_the_class() -> None:
    """A setting of a subclass that is not read looks as if it had been taken."""
    text = [1, 2, 9, 5, 2, 8, 1, 2]

    class Surer(SuffixProposer):
        min_match = 3

    assert propose(SuffixProposer(vllm_config()), text) == [[9, 5, 2, 8, 1]]
    assert propose(Surer(vllm_config()), text) == [[]]


def test_another_call_than_the_known_one_is_refused() -> None:
    """Texts without their newest tokens give guesses one step late: none is ever accepted."""
    proposer = SuffixProposer(vllm_config())
    tokens, lengths = np.array([[4, 5, 6, GARBAGE]]), np.array([2])
    with pytest.raises(ValueError, match=r"row 0 ends with \[5\], but \[6\] were sampled"):
        proposer.propose([[6]], lengths, tokens)
    with pytest.raises(TypeError, match="Tensor, expected lists.*--no-async-scheduling"):
        proposer.propose(torch.tensor([[6]]), lengths, tokens)  # type: ignore[arg-type]
    assert proposer.propose([[5]], torch.tensor([2]), torch.tensor([[4, 5, 9]])) == [[]]
    proposer.load_model(object())


def test_the_printed_settings_name_a_class_that_vllm_can_make() -> None:
    """The class is imported by the name in the settings: a renamed one fails at the user's."""
    (served,) = [each for each in serving.text_copies("FOLDER") if each.engine == "vLLM"]
    words = shlex.split(served.command)
    written = json.loads(words[words.index("--speculative-config") + 1])
    assert written.keys() == {"method", "model", "num_speculative_tokens"}
    assert written["method"] == "custom_class" and written["num_speculative_tokens"] == 8
    module, _, found = written["model"].rpartition(".")
    made = getattr(importlib.import_module(module), found)(vllm_config(8))
    assert callable(made.propose) and callable(made.load_model)


def plugin() -> str:
    """Return ``module:function`` of the entry point, which each of vLLM's processes calls."""
    with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    return str(project["entry-points"]["vllm.general_plugins"]["specheads"])


# vLLM's ModelRegistry as a plug-in sees it, in 0.32 and 0.33: model_executor/models/registry.py
REGISTRY = """
class _Registry:
    def __init__(self):
        self.models = {}

    def register_model(self, model_arch, model_cls):
        if not isinstance(model_arch, str):
            raise TypeError(f"`model_arch` should be a string, not a {type(model_arch)}")
        if len(parts := model_cls.split(":")) != 2:
            raise ValueError("Expected a string in the format `<module>:<class>`")
        self.models[model_arch] = parts

ModelRegistry = _Registry()
"""


def test_vllm_knows_the_architectures_that_are_written(tmp_path: Path) -> None:
    """An architecture that was not registered by its name is refused by vLLM: no folder loads.

    It looks for that name in its registry, in the package transformers and in ``auto_map``; the
    Auto classes, which do know ours, are not asked. Each process of a server calls the plug-in,
    some of them twice, and before anything heavy is imported there.
    """
    models = tmp_path / "vllm" / "model_executor" / "models"
    models.mkdir(parents=True)
    for folder in (tmp_path / "vllm", models.parent):
        (folder / "__init__.py").touch()
    (models / "__init__.py").write_text(REGISTRY)
    module, _, name = plugin().partition(":")
    code = (
        f"import json, sys; from {module} import {name} as register; assert 'vllm' not in"
        " sys.modules; register(); register(); from vllm.model_executor.models import"
        " ModelRegistry; assert 'torch' not in sys.modules; from transformers import AutoConfig;"
        " print(json.dumps([ModelRegistry.models,"
        " AutoConfig.for_model('llama_mtp').model_type]))"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    backend = ["vllm.model_executor.models.transformers", "TransformersForCausalLM"]
    written = {each.model.__name__ for each in mtp_hf.CLASSES.values()}
    assert json.loads(done.stdout) == [dict.fromkeys(written, backend), "llama_mtp"]


def test_importing_again_changes_nothing() -> None:
    """A finder that were left in place would be asked at every later import of the process."""
    before = list(sys.meta_path)
    register()
    register()
    assert sys.meta_path == before  # transformers is imported: its table was filled at once
    assert AutoConfig.for_model("llama_mtp").model_type == "llama_mtp"
