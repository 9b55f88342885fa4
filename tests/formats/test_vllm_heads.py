"""Heads for vLLM, against a re-statement of how its first model runner calls model and proposer."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from specheads.attention.tree import Tree
from specheads.config import ConfigError
from specheads.drafters.contract import Prefill
from specheads.drafters.heads import HeadsDrafter, heads_drafter
from specheads.models.checkpoint import load_heads, save_export
from specheads.models.output import FINAL, output_layer, packed_taps
from specheads.vllm_heads import PAST, UNSEEN, HeadsProposer, logger
from tests.conftest import build_byte_tokenizer, build_tiny_llama
from tests.formats.test_vllm_proposer import MAX_LENGTH, Engine, Request, prompts
from tests.formats.test_vllm_proposer import vllm_config as settings
from tests.models.test_heads_contract import FORMS, NUM_HEADS, drawn

LIMITS = (12, 24, MAX_LENGTH, 16)
PADDING = 5  # rows that vLLM's output matrix has behind the vocabulary


class Context(ModuleType):
    """What ``vllm.forward_context`` is to a hook: where each request begins in the pass."""

    starts: Tensor | None = None

    def get_forward_context(self) -> Any:
        """Return what vLLM's function does."""
        metadata = {"layer": SimpleNamespace(query_start_loc=self.starts)}
        return SimpleNamespace(attn_metadata=None if self.starts is None else metadata)


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Context:
    """A module in vLLM's place."""
    module = Context("vllm.forward_context")
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.forward_context", module)
    return module


class Target(nn.Module):
    """vLLM's model: a flat pass over all requests' tokens, hidden states behind some layers."""

    def __init__(self, base: LlamaForCausalLM) -> None:
        super().__init__()
        self.base, self.config = base, base.config
        self.between: tuple[int, ...] = ()
        matrix = torch.nn.functional.pad(base.lm_head.weight.detach(), (0, 0, 0, PADDING))
        self.lm_head = SimpleNamespace(weight=matrix)
        self.logits_processor = SimpleNamespace(scale=1.0, soft_cap=None)
        self.texts: list[list[int]] = []  # of the pass, each up to the last token that it reads

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Give hidden states between layers from now on."""
        self.between = layers

    def embed_input_ids(self, ids: Tensor) -> Tensor:
        """Return [tokens, d]."""
        assert ids.dim() == 1
        found: Tensor = self.base.get_input_embeddings()(ids)
        return found

    def forward(self, input_ids: Tensor, positions: Tensor) -> Any:
        """Return the final hidden states, and beside them those that were asked for."""
        taps = [f"layer.{place - 1}" for place in self.between]
        found: dict[str, list[Tensor]] = {tap: [] for tap in (FINAL, *taps)}
        begin = 0
        for text in self.texts:
            ids = torch.tensor([text])
            place: Tensor = torch.arange(len(text))[None]
            size = len(text) - int(positions[begin])
            for tap, each in found.items():
                each.append(packed_taps(self.base, ids, place, [tap])[1][0, -size:])
            begin += size
        assert begin == len(input_ids)
        final, *others = (torch.cat(each) for each in found.values())
        return (final, others) if taps else final


@dataclass
class HiddenEngine(Engine):
    """The batch, with a pass of the model before the proposer is asked; preempts now and then."""

    target: Any = None
    context: Any = None
    passes: list[tuple[int, list[int]]] = field(default_factory=list)
    checked: int = 0

    def _verify(self, request: Request) -> list[int]:
        text, first = [*request.text, *request.guesses], request.read
        new = super()._verify(request)
        self.passes.append((first, text if new else text[: request.read]))
        return new

    def _check(self, found: Any, sampled: list[list[int]]) -> None:
        super()._check(found, sampled)
        for guesses, new, request in zip(found, sampled, self.rows, strict=True):
            if new:
                room = max(min(NUM_HEADS, MAX_LENGTH - len(request.text) - 1), 0)
                assert guesses == self.expected(request.text)[:room]
                self.checked += 1

    def run_pass(self) -> None:
        """Read what this step's rows read."""
        flat = [text[first:] for first, text in self.passes]
        self.context.starts = torch.tensor([0, *np.cumsum([len(each) for each in flat])])
        self.target.texts = [text for _, text in self.passes]
        places = [range(first, len(text)) for first, text in self.passes]
        self.target(
            input_ids=torch.tensor([token for each in flat for token in each]),
            positions=torch.tensor([place for each in places for place in each]),
        )
        self.passes = []

    def _shuffle(self) -> None:
        super()._shuffle()
        for request in self.aside:
            if self.chance.random() < 0.5:  # preempted: it is read again from its beginning
                request.read, request.guesses = 0, []

    def expected(self, text: list[int]) -> list[int]:
        """Return the guesses of the chain that starts behind the whole text."""
        base, drafter = self.target.base, self.reference
        ids = torch.tensor([text[:-1]])
        place = torch.arange(len(text) - 1)[None]
        hidden = {tap: packed_taps(base, ids, place, [tap])[1] for tap in drafter.taps}
        prefill = Prefill([text[:-1]], ids, [len(text) - 1], hidden, torch.tensor([text[-1]]))
        return drafter.propose(drafter.start(prefill)).tokens[0, 1:].tolist()

    @cached_property
    def reference(self) -> HeadsDrafter:
        """Our chain with the same heads."""
        base, chain = self.target.base, Tree.chain(NUM_HEADS)
        return heads_drafter(base, self.proposer.heads, output_layer(base), chain)


class Asked:
    """A proposer that is asked after a pass of the model."""

    def __init__(self, proposer: HeadsProposer, heads: Any) -> None:
        self.proposer, self.heads = proposer, heads
        self.engine: HiddenEngine | None = None

    def propose(self, *given: Any, **more: Any) -> Any:
        """Return the proposer's guesses."""
        assert self.engine is not None
        self.engine.run_pass()
        return self.proposer.propose(*given, **more)


def agreeing(text: list[int]) -> list[int]:
    """Return what a model says after each token, which agrees with two guesses in three."""
    return [
        text[i + 1] if i + 1 < len(text) and i % 3 else (7 * text[i] + i) % 40
        for i in range(len(text))
    ]


def vllm_config(folder: Path, base: str = "", tokens: int = NUM_HEADS, **given: Any) -> Any:
    """Return what the class reads of vLLM's settings."""
    found = settings(tokens)
    found.model_config.model = base
    found.parallel_config = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
    found.additional_config = {"specheads": {"heads": str(folder), "other_base": not base, **given}}
    return found


@pytest.fixture
def base() -> Iterator[LlamaForCausalLM]:
    """A tiny base model."""
    yield build_tiny_llama(seed=3, std=0.2).eval()


def exported(folder: Path, base: LlamaForCausalLM, form: str) -> Path:
    """Write an export of heads of a form."""
    heads = drawn(FORMS[form](base))
    info = {"base": {"name": "base", "digest": "0" * 64, "dtype": "float32"}, "training": {}}
    save_export(folder, heads, build_byte_tokenizer(), Tree.chain(NUM_HEADS), info)
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_guesses_are_those_of_our_chain(
    form: str, base: LlamaForCausalLM, context: Context, tmp_path: Path
) -> None:
    """A state that another request, a refused guess or an earlier life left is guessed from.

    Nothing but fewer accepted guesses would show it: prompts are read in parts, rows change places,
    requests wait and are read again from their beginning.
    """
    folder, target = exported(tmp_path / "export", base, form), Target(base)
    proposer = HeadsProposer(vllm_config(folder))
    proposer.load_model(target)
    asked = Asked(proposer, load_heads(folder).requires_grad_(False).eval())
    asks = zip(prompts(), LIMITS, strict=False)
    requests = [Request(name, text, limit) for name, (text, limit) in enumerate(asks)]
    engine = HiddenEngine(asked, agreeing, requests, target=target, context=context)
    asked.engine = engine
    assert {len(text) for text in engine.run().values()} == set(LIMITS)
    assert engine.checked > 25 and engine.accepted > 20
    assert not proposer.counts[PAST] and not proposer.counts[UNSEEN]
    assert proposer.counts["rows"] == engine.checked


def loaded(folder: Path, base: LlamaForCausalLM) -> tuple[HeadsProposer, Target]:
    """Return the class with its model."""
    proposer, target = HeadsProposer(vllm_config(folder)), Target(base)
    proposer.load_model(target)
    return proposer, target


def ask(
    proposer: HeadsProposer, target: Target, context: Context, text: list[int], first: int
) -> list[int]:
    """Return the guesses behind a text that was read from ``first`` on, but for its last token."""
    context.starts, target.texts = torch.tensor([0, len(text) - 1 - first]), [text[:-1]]
    places = torch.arange(first, len(text) - 1)
    target(input_ids=torch.tensor(text[first:-1]), positions=places)
    found = proposer.propose([[text[-1]]], np.array([len(text)]), np.array([text]))
    (guesses,) = found
    return guesses


TEXT = [5, 9, 14, 3, 22, 31, 8, 17, 4]


@pytest.mark.parametrize("form", ["medusa", "hydra"])
def test_a_prompt_that_was_not_read_here(
    form: str, base: LlamaForCausalLM, context: Context, tmp_path: Path
) -> None:
    """Prefixes that vLLM has in its cache are never read: a class that waits for them is silent.

    Heads that look at one hidden state need no past; those that attend guess from what is new, and
    the count says so.
    """
    proposer, target = loaded(exported(tmp_path / "export", base, form), base)
    whole = ask(proposer, target, context, TEXT, 0)
    part = ask(proposer, target, context, TEXT, 5)
    assert len(whole) == len(part) == NUM_HEADS
    assert proposer.counts[PAST] == (form == "hydra")
    assert whole == part or form == "hydra"


def test_a_pass_that_was_not_seen(
    base: LlamaForCausalLM,
    context: Context,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CUDA graph replays a pass without its hooks: the step before would be guessed from."""
    # a command that another test ran in this process has silenced every logger
    monkeypatch.setattr(logger, "disabled", False)
    caplog.set_level(logging.WARNING, logger.name)
    proposer, target = loaded(exported(tmp_path / "export", base, "hydra"), base)
    assert ask(proposer, target, context, TEXT, 0)
    longer = [*TEXT, 6]
    for _ in range(4):
        found = proposer.propose([[6]], np.array([len(longer)]), np.array([longer]))
        assert found == [[]]
    context.starts, target.texts = (
        None,
        [longer[:-1]],
    )  # an attention backend that does not say where requests begin
    target(input_ids=torch.tensor(TEXT[-1:]), positions=torch.tensor([len(TEXT) - 1]))
    assert proposer.propose([[6]], np.array([len(longer)]), np.array([longer])) == [[]]
    assert proposer.counts[UNSEEN] == 5
    said = [record.getMessage() for record in caplog.records]
    assert [line.split()[3] for line in said] == ["1", "2", "4"]


def test_wrong_settings_are_one_line(
    base: LlamaForCausalLM, tmp_path: Path, context: Context
) -> None:
    """A server that starts with another model's heads guesses badly for as long as it runs."""
    folder = exported(tmp_path / "export", base, "medusa")

    def refused(*words: str, config: Any) -> None:
        with pytest.raises(ConfigError) as error:
            HeadsProposer(config)
        assert "\n" not in str(error.value) and all(word in str(error.value) for word in words)

    refused("--additional-config", config=unnamed(folder))
    refused("num_speculative_tokens is 4", "3 heads", config=vllm_config(folder, tokens=4))
    base.save_pretrained(tmp_path / "other")
    refused("other weights", "other_base", config=vllm_config(folder, str(tmp_path / "other")))
    HeadsProposer(vllm_config(folder, str(tmp_path / "other"), other_base=True))
    several = vllm_config(folder)
    several.parallel_config.tensor_parallel_size = 2
    refused("one device", config=several)
    refused(str(tmp_path / "nothing"), config=vllm_config(tmp_path / "nothing"))
    narrow = Target(build_tiny_llama(seed=3).eval())
    narrow.lm_head.weight = narrow.lm_head.weight[:100]
    with pytest.raises(ConfigError, match=r"\[100, 32\], the heads need \[272, 32\]"):
        HeadsProposer(vllm_config(folder)).load_model(narrow)


def unnamed(folder: Path) -> Any:
    """Return settings that name no heads."""
    config = vllm_config(folder)
    config.additional_config = {}
    return config
