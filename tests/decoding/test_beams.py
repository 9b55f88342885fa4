"""Beam search whose scores come from drafted trees gives transformers' beams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specheads.attention.cache import TreeCache
from specheads.attention.tree import Tree
from specheads.decoding.accept import Acceptance
from specheads.decoding.generate import SpecDecoder
from specheads.drafters.contract import Drafter
from specheads.drafters.draft_model import DraftModelDrafter
from specheads.drafters.draft_tree import DraftTreeDrafter
from specheads.drafters.length import FixedLength
from specheads.drafters.lookup import SuffixDrafter
from tests import zoo

ARCHITECTURES = sorted(zoo.TREE_MODELS)
SETTINGS: list[dict[str, Any]] = [
    {},
    {"length_penalty": 2.0, "early_stopping": True},
    {"length_penalty": 0.0, "early_stopping": "never"},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
]
NEAR = 1e-4


def prompts_of(num: int) -> tuple[Tensor, Tensor]:
    """Return ragged prompts, left-padded, and their mask."""
    draw = torch.Generator().manual_seed(num)
    lengths = [11, 7, 9][:num]
    ids = torch.zeros(num, max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.randint(3, zoo.VOCAB, (length,), generator=draw)
        mask[row, -length:] = 1
    return ids, mask


def drafters(model: PreTrainedModel) -> dict[str, Drafter]:
    """Return drafters of three kinds."""
    draft = zoo.disturbed(model)
    return {
        "tree": DraftTreeDrafter(draft, 8, max_depth=3),
        "chain": DraftModelDrafter(draft, FixedLength(3)),
        "suffix": SuffixDrafter(),
    }


def check_beams(theirs: Any, ours: Any) -> int:
    """Compare sequences and scores; return how many texts differ, all of them near-ties."""
    scores = (theirs.sequences_scores - ours.sequences_scores).abs()
    num = min(theirs.sequences.shape[1], ours.sequences.shape[1])
    same = (theirs.sequences[:, :num] == ours.sequences[:, :num]).all(-1)
    same &= theirs.sequences.shape == ours.sequences.shape
    # another text may stand in the place of one that is as good to within rounding
    assert (scores <= NEAR).all(), (scores, theirs.sequences, ours.sequences)
    return int((~same).sum())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_beams_are_those_of_transformers(name: str) -> None:
    """Prevents a beam that is lost, scored in another row, or read behind another's keys."""
    model = zoo.build(name)
    eos = 5
    differing = compared = passes = steps = 0
    for number, width in enumerate((2, 4, 8)):
        for num_rows in (1, 3):
            ids, mask = prompts_of(num_rows)
            how = SETTINGS[(number + num_rows) % len(SETTINGS)]
            # an end of text that comes early, and one that never does
            ends = [eos, 17] if number % 2 else [eos]
            given = {
                **how,
                "attention_mask": mask,
                "num_beams": width,
                "num_return_sequences": width // 2,
                "do_sample": False,
                "max_new_tokens": 12,
                "eos_token_id": ends if num_rows == 3 else None,
                "pad_token_id": 0,
                "output_scores": True,
                "return_dict_in_generate": True,
            }
            theirs: Any = model.generate(ids, **given)  # type: ignore[operator]
            for drafter in drafters(model).values():
                decoder = SpecDecoder(model, drafter)
                ours: Any = model.generate(ids, custom_generate=decoder, **given)  # type: ignore[operator]
                differing += check_beams(theirs, ours)
                compared += len(theirs.sequences)
                assert decoder.last_result is not None
                passes += decoder.last_result.num_steps
                steps += len(theirs.scores) - 1
    assert differing <= compared // 50, f"{differing} of {compared}"
    assert passes < steps, "no pass was saved"


def test_perfect_guesses_save_passes_and_none_saves_none() -> None:
    """Prevents trees that are verified and not read, and a count of passes that hides some."""
    model = zoo.build("llama")
    ids, mask = prompts_of(1)
    given: dict[str, Any] = {"num_beams": 2, "max_new_tokens": 16, "temperature": 0.0}
    plain = SpecDecoder(model, None).generate(ids, attention_mask=mask, **given)
    assert plain.num_steps == 15
    wide = DraftTreeDrafter(model, 40, max_depth=5)
    found = SpecDecoder(model, wide).generate(ids, attention_mask=mask, **given)
    assert found.sequences.equal(plain.sequences)
    assert found.num_steps < 8


def test_what_does_not_go_with_beams() -> None:
    """Prevents settings that are silently without effect."""
    model = zoo.build("llama")
    ids, _ = prompts_of(1)
    given: dict[str, Any] = {"num_beams": 2, "max_new_tokens": 4}
    lossy = SpecDecoder(model, None, acceptance=Acceptance("lossy_kl", bound=0.1))
    with pytest.raises(ValueError, match="lossy"):
        lossy.generate(ids, **given)
    with pytest.raises(ValueError, match="invariant"):
        SpecDecoder(model, None, invariant=True).generate(ids, **given)
    with pytest.raises(ValueError, match="on_tokens"):
        SpecDecoder(model, None).generate(ids, on_tokens=lambda *_: None, **given)
    with pytest.raises(ValueError, match="beam_sample"):
        SpecDecoder(model, None).generate(ids, temperature=0.7, **given)
    with pytest.raises(ValueError, match="TreeCache"):
        SpecDecoder(model, None).generate(ids, past_key_values=DynamicCache(), **given)


def test_rows_that_are_kept_twice_take_their_uncommitted_tokens_along() -> None:
    """Prevents beams that share a parent and lose the nodes on their way."""
    model = zoo.build("llama")
    from specheads.models.forward import ModelPass

    base, tree = ModelPass(model, TreeCache()), Tree.from_choices([(0,), (1,), (1, 0)])
    with torch.inference_mode():
        base.read(torch.tensor([[1, 2, 3], [4, 5, 6]]), [3, 3])
        nodes = torch.tensor([[7, 8, 9, 10], [11, 12, 13, 14]])
        base.verify(nodes, tree)
        base.cache.select(torch.tensor([1, 1]), ahead=4)
        base.cache.commit(torch.tensor([[0, 1, -1], [0, 2, 3]]), [2, 3])
        got = base.read(torch.tensor([[15], [15]]), [1, 1])
        for row, text in enumerate(([4, 5, 6, 11, 12, 15], [4, 5, 6, 11, 13, 14, 15])):
            alone = ModelPass(model, TreeCache())
            wanted = alone.read(torch.tensor([text]), [len(text)])
            torch.testing.assert_close(got[row], wanted[0], atol=1e-4, rtol=1e-4)
