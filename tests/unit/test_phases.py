"""Clocks around the phases of the loop."""

import pytest
import torch
from transformers import LlamaForCausalLM

from specheads.attention.tree import default_tree
from specheads.decoding import loop
from specheads.drafters.heads import static_drafter
from specheads.measure import clock as module
from specheads.measure.clock import FORWARD, HEADS, PHASES, Phases
from specheads.models.forward import ModelPass
from specheads.models.heads import MedusaHeads
from specheads.models.output import OutputLayer


@pytest.mark.parametrize("sequential", [False, True])
def test_phases_add_up_to_their_step(
    tiny_llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, sequential: bool
) -> None:
    """A phase counted twice, or in another step, is an overhead that nobody can find."""
    output = OutputLayer(tiny_llama.lm_head)
    heads = MedusaHeads(3, 1, 32, 272, condition=sequential)
    heads.init_from_output(output.weight)
    drafter = static_drafter(tiny_llama, heads.eval(), output, default_tree(3, 6))
    forward = tiny_llama.forward
    clock = 0.0

    def look(device: torch.device) -> float:
        nonlocal clock
        clock += 1
        return clock

    def slow_forward(*args: object, **kwargs: object) -> object:
        nonlocal clock
        clock += 100
        return forward(*args, **kwargs)

    monkeypatch.setattr(module, "now", look)  # each look takes a second, a pass 100
    monkeypatch.setattr(tiny_llama, "forward", slow_forward)
    verify, propose = ModelPass.verify, loop.propose
    ids = torch.randint(0, 256, (1, 6))
    wanted = loop.decode(tiny_llama, drafter, ids, max_new_tokens=24)
    phases = Phases(torch.device("cpu"))
    for _ in range(2):
        with phases.watching(tiny_llama, drafter):
            found = loop.decode(tiny_llama, drafter, ids, max_new_tokens=24)
        assert found.new_tokens == wanted.new_tokens
    assert (ModelPass.verify, loop.propose) == (verify, propose), "the clocks are gone again"
    assert len(phases.steps) == 2 * (wanted.num_steps - 1), "the last of each text has no end"
    for step in phases.steps:
        assert step.keys() == {*PHASES, "step"}
        assert step[FORWARD] == 101 and 0 < step[HEADS] < 100 and 0 < step["verify"] < 100
        phased = sum(step[name] for name in PHASES)
        assert 0.9 * step["step"] < phased <= step["step"]
