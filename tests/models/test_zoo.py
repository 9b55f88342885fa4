"""The models that other tests rely on are not degenerate."""

from __future__ import annotations

import pytest
import torch

from tests.zoo import CHAIN_MODELS, TREE_MODELS, VOCAB, build


@pytest.mark.parametrize("name", TREE_MODELS | CHAIN_MODELS)
@torch.no_grad()
def test_logits_depend_on_what_is_seen_and_where(name: str) -> None:
    """Prevents tests that pass on a model which would not notice a wrong mask or position."""
    model = build(name)
    ids = torch.randint(VOCAB, (1, 16), generator=torch.Generator().manual_seed(0))
    logits = model(ids).logits[0, -1]
    assert logits.std() > 0.3, "logits nearly equal: any error would hide in rounding"

    def moved(changed: torch.Tensor) -> float:
        return float((model(changed).logits[0, -1] - logits).abs().max())

    near, far, swapped = ids.clone(), ids.clone(), ids.clone()
    near[0, -3] += 1 - 2 * (near[0, -3] == VOCAB - 1).long()
    far[0, 1] += 1 - 2 * (far[0, 1] == VOCAB - 1).long()
    swapped[0, -3], swapped[0, -4] = ids[0, -4], ids[0, -3]
    assert moved(near) > 0.02
    assert moved(swapped) > 0.02
    if not any(part in name for part in ("window", "llama4", "gpt_neo")):
        assert moved(far) > 0.01  # else no layer, or one of two, may reach so far


@torch.no_grad()
def test_the_window_bites() -> None:
    """Prevents a window so wide that slots and positions could not be told apart."""
    ids = torch.randint(VOCAB, (1, 20), generator=torch.Generator().manual_seed(0))
    pairs = [
        ("mistral-window", {"sliding_window": 64}),
        ("qwen2-window", {"sliding_window": 64}),
        ("gemma2", {"sliding_window": 64}),
        ("gemma3", {"sliding_window": 64}),
        ("llama4", {"attention_chunk_size": 64}),
        ("gpt_neo", {"window_size": 64}),
    ]
    for name, wide in pairs:
        difference = build(name)(ids).logits[0, -1] - build(name, **wide)(ids).logits[0, -1]
        assert difference.abs().max() > 0.05, name
