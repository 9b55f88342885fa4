"""GGUF files as bases: the same logits, the same tokens, and one line for what is not whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from specheads.models.base import load_base_model
from tests import gguf_files

pytest.importorskip("gguf")
ARCHITECTURES = list(gguf_files.MODELS)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECHEADS_CACHE", str(tmp_path / "cache"))


def logits_of(model: PreTrainedModel, length: int = 40) -> torch.Tensor:
    """Return logits of a text that is longer than every sliding window here."""
    ids = torch.arange(length)[None] * 7 % model.config.vocab_size
    with torch.inference_mode():
        return model(ids).logits


@pytest.mark.parametrize("quantized", [False, True], ids=["F32", "Q4_1"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_what_was_written(
    tmp_path: Path, architecture: str, quantized: bool
) -> None:
    """A head that is permuted wrongly, or a norm that is off by one, still writes fluent nonsense."""
    model, file = gguf_files.build(architecture), tmp_path / "model.gguf"
    read = gguf_files.write(file, architecture, model, quantized=quantized)
    loaded = load_base_model(str(file), attn="eager")
    if quantized:
        written = gguf_files.stored(architecture, loaded)
        for name, tensor in written.items():
            torch.testing.assert_close(tensor, read[name], rtol=0, atol=1e-6)
        before = logits_of(model)
        assert not torch.allclose(logits_of(loaded), before, atol=1e-3), "it was quantised"
        model.load_state_dict(loaded.state_dict())
    torch.testing.assert_close(logits_of(loaded), logits_of(model), rtol=0, atol=1e-5)
