"""Compiled passes: the same tokens, and nothing compiled anew at every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from specheads.attention.tree import Tree, default_tree
from specheads.decoding.loop import decode, plain_decode
from specheads.drafters.contract import Candidates
from specheads.drafters.lookup import NgramDrafter
from specheads.models import support as tree_support
from specheads.models.output import FINAL, capture_hidden
from specheads.verification.sampling import Sampler
from tests.decoding.test_batch import alone, left_padded, prompts
from tests.scripted import ScriptedDrafter, build


@pytest.fixture(autouse=True)
def _traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    # tracing is what can go wrong here; the code generator's work takes minutes
    from specheads.models import forward

    forward._compiled_forward.cache_clear()
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, mode=None: real(f, backend="eager"))
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize(
    "name",
    [
        "mistral-window",
        pytest.param("llama", marks=pytest.mark.slow),
        pytest.param("gemma2", marks=pytest.mark.slow),
        pytest.param("gpt2", marks=pytest.mark.slow),
    ],
)
def test_compiled_passes_give_the_same_tokens(name: str) -> None:
    """Prevents a mask, a slot or a position frozen into the compiled pass."""
    model = build(name, num_hidden_layers=1)
    rows = prompts((9, 4, 14))
    ids, mask = left_padded(rows)
    for sampler in (Sampler(), Sampler(1.0, seed=5)):
        settings: dict[str, Any] = {"max_new_tokens": 20, "sampler": sampler}
        truth = alone(model, rows, **settings)
        texts = [row[0].tolist() + new for row, new in zip(rows, truth, strict=True)]
        drafter = ScriptedDrafter(default_tree(4, 9), texts, 0.7)
        one = ScriptedDrafter(default_tree(4, 9), texts[0], 0.7)
        batch = decode(model, drafter, ids, attention_mask=mask, compile=True, **settings)
        assert [row.new_tokens for row in batch.rows] == truth
        assert decode(model, one, rows[0], compile=True, **settings).new_tokens == truth[0]
        plain = plain_decode(model, ids, attention_mask=mask, compile=True, **settings)
        assert [row.new_tokens for row in plain.rows] == truth
        assert plain_decode(model, rows[0], compile=True, **settings).new_tokens == truth[0]
    assert counters["graph_break"] == {}, dict(counters["graph_break"])


def test_a_long_text_is_not_compiled_at_every_step() -> None:
    """Prevents a pass compiled for every length of the text: slower than none by far."""
    model = build("llama", num_hidden_layers=1)
    (row,) = prompts((9,))
    truth = plain_decode(model, row, max_new_tokens=80)
    drafter = ScriptedDrafter(Tree.chain(3), truth.sequences[0].tolist(), 0.5)
    for max_new_tokens in (40, 80):
        decode(model, drafter, row, max_new_tokens=max_new_tokens, compile=True)
    assert counters["stats"]["unique_graphs"] <= 3


@pytest.mark.parametrize("taps", [(FINAL,), ("layer.0", FINAL)])
def test_hidden_states_are_those_of_the_pass_at_hand(taps: tuple[str, ...]) -> None:
    """Prevents heads fed with the hidden states of an earlier text, in the mix of both loops.

    The passes are compiled for a drafter that wants none, before one comes that wants them.
    """
    model = build("llama", num_hidden_layers=2)
    (row,) = prompts((9,))
    truth = plain_decode(model, row, max_new_tokens=30).sequences
    decode(model, Blind(truth[0].tolist()), row, max_new_tokens=30, compile=True)
    for forward in (True, False, True):
        plain_decode(model, row, max_new_tokens=5, compile=forward)
        with capture_hidden(model, taps) as captured:
            model(truth, use_cache=False)
        drafter = Watching(truth[0].tolist(), dict(captured))
        decode(model, drafter, row, max_new_tokens=30, compile=forward)


class Blind(NgramDrafter):
    """Proposes chains as long as those of ``Watching``, from the text alone."""

    def __init__(self, truth: list[int]) -> None:
        super().__init__(num_tokens=3)
        self.truth = truth

    def propose(self, state: Any) -> Candidates:
        """Propose what comes."""
        at = len(state.rows[0].tokens) - 1
        chain = [*self.truth[at : at + 4], 0, 0, 0, 0][:4]
        return Candidates(torch.tensor([chain]), Tree.chain(3))


class Watching(ScriptedDrafter):
    """Checks the hidden states at the accepted nodes."""

    def __init__(self, truth: list[int], hidden: dict[str, torch.Tensor]) -> None:
        super().__init__(Tree.chain(3), truth, 0.6)
        self.true_hidden, self.taps = hidden, tuple(hidden)

    def observe(self, state: Any, result: Any) -> Any:
        """Compare, then move on."""
        start = state.positions[0]
        for depth, node in enumerate(result.path[0].tolist()):
            for tap, (true,) in self.true_hidden.items():
                if node >= 0 and start + depth < len(true):
                    found = result.hidden[tap][0, node]
                    torch.testing.assert_close(found, true[start + depth], atol=1e-4, rtol=1e-4)
        return super().observe(state, result)


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents masks that the compiled pass would ignore."""
    model = build("llama")
    # as if the self-test had passed, for which flex attention would be compiled: a minute
    monkeypatch.setitem(
        tree_support._known, model, ("flex_attention", tree_support.tree_support(model))
    )
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="compile=True needs sdpa or eager attention"):
        plain_decode(model, prompts((3,))[0], max_new_tokens=2, compile=True)
