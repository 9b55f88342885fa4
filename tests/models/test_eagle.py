"""EAGLE-3's own: the layers that it taps, and what it cannot be.

Its layer is held to a slow reader of the published rules in tests/formats/test_drafters.py.
"""

from __future__ import annotations

import pytest
from transformers import LlamaForCausalLM

from specheads.config import ConfigError, HeadsConfig
from specheads.models.eagle import EagleForm, EagleHeads, eagle_taps
from specheads.models.output import output_layer


def test_taps_by_rule() -> None:
    """Other layers than engines tap by default cost accept length, and no error says so.

    Engines' default states are those behind 2, n / 2 and n - 3 layers.
    """
    assert eagle_taps(32, 3) == (1, 15, 28) and eagle_taps(30, 3) == (1, 14, 26)
    assert eagle_taps(2, 3) == (0,) and eagle_taps(5, 3) == (1,) and eagle_taps(8, 3) == (1, 3, 4)
    assert eagle_taps(32, 2) == (1, 28) and eagle_taps(1, 3) == (0,)


def test_what_it_cannot_be_is_one_line(tiny_llama: LlamaForCausalLM) -> None:
    """A second layer that is left out, or a misspelt option, trains other heads than were asked."""
    output = output_layer(tiny_llama)
    for settings, message in (
        (HeadsConfig("eagle3", num_layers=2), "num_layers must be 1, EAGLE-3's one layer, got 2"),
        (HeadsConfig("eagle3", {"windows": 3}), "options must be one of taps, num_taps"),
    ):
        with pytest.raises(ConfigError, match=message):
            EagleHeads.from_settings(settings, tiny_llama, output)
    with pytest.raises(ConfigError, match="form.head_dim"):
        EagleForm.stored({"head_dim": 1 << 20})
