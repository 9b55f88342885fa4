"""Tree decoding gives the tokens of plain decoding, whatever is guessed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specheads.attention.tree import Tree, default_tree
from specheads.decoding.loop import decode, plain_decode
from specheads.drafters.contract import Candidates
from specheads.drafters.heads import HeadsDrafter
from specheads.drafters.lookup import NgramDrafter
from specheads.models.forward import ModelPass
from specheads.models.heads import MedusaHeads
from specheads.models.output import output_layer
from specheads.models.support import tree_support
from specheads.verification.sampling import Sampler
from tests.sampled import drawn
from tests.scripted import MODELS, VOCAB, ScriptedDrafter, build, pretend_rounding

TREES = {
    "chain": Tree.chain(4),
    "wide": Tree.from_choices([(i,) for i in range(6)] + [(0, i) for i in range(3)]),
    "grown": default_tree(4, 16),
    "root": Tree.chain(0),
}
SAMPLERS = {
    "greedy": Sampler(),
    "sampled": Sampler(temperature=1.0, seed=3),
    "warped": Sampler(temperature=0.8, top_k=20, top_p=0.9, seed=4),
}


def prompt(length: int = 9) -> torch.Tensor:
    """Return [1, length] fixed random tokens."""
    return torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("name", MODELS)
def test_tree_equals_plain_equals_generate(name: str) -> None:
    """Prevents any error in masks, positions, acceptance or commit: all show as other tokens."""
    model = build(name)
    ids = prompt()
    for kind, sampler in SAMPLERS.items():
        plain = plain_decode(model, ids, max_new_tokens=30, sampler=sampler)
        if sampler.temperature == 0:
            settings = {"attention_mask": torch.ones_like(ids), "do_sample": False}
            theirs = model.generate(ids, max_new_tokens=30, **settings)
            assert plain.sequences.equal(theirs)
        assert len(set(plain.new_tokens)) > 8, "a degenerate text would prove little"
        # every tree is tried greedily and with one of the other samplers
        turns = {"greedy": TREES, "sampled": ("wide", "root"), "warped": ("chain", "grown")}
        for tree in map(TREES.__getitem__, turns[kind]):
            drafter = ScriptedDrafter(tree, plain.sequences[0].tolist(), 0.7)
            result = decode(model, drafter, ids, max_new_tokens=30, sampler=sampler)
            assert result.sequences.equal(plain.sequences)
            assert result.accept_length > 1.5 or tree.num_nodes == 1


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_untrained_heads_and_ngrams_change_nothing(
    sampler: Sampler, tiny_llama: LlamaForCausalLM
) -> None:
    """Prevents exactness that leans on good guesses."""
    heads = MedusaHeads(4, 1, 32, 272)
    heads.init_from_output(tiny_llama.lm_head.weight)
    output = output_layer(tiny_llama)
    drafters = [HeadsDrafter(heads, output, tree) for tree in TREES.values()]
    for length in (1, 30):
        settings: dict[str, Any] = {"max_new_tokens": 30, "sampler": sampler}
        plain = plain_decode(tiny_llama, prompt(length), **settings)
        for drafter in (*drafters, NgramDrafter()):
            result = decode(tiny_llama, drafter, prompt(length), **settings)
            assert result.sequences.equal(plain.sequences)


@pytest.fixture
def llama() -> PreTrainedModel:
    """Return a small random Llama with VOCAB tokens."""
    return build("llama")


def test_accept_lengths_are_what_was_scripted(llama: PreTrainedModel) -> None:
    """Prevents speed that is not there: perfect guesses must be accepted whole, bad ones never."""
    ids = prompt()
    plain = plain_decode(llama, ids, max_new_tokens=41)
    truth = plain.sequences[0].tolist()
    assert plain.accept_lengths == [1] * 40
    perfect = decode(llama, ScriptedDrafter(Tree.chain(4), truth, 1.0), ids, max_new_tokens=41)
    assert perfect.accept_lengths == [5] * 8
    never = decode(llama, ScriptedDrafter(Tree.chain(4), truth, 0.0), ids, max_new_tokens=41)
    assert never.accept_lengths == [1] * 40
    assert never.num_steps == plain.num_steps == 40


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 5, 6, 7, 13])
def test_the_limit_is_met_exactly(llama: PreTrainedModel, max_new_tokens: int) -> None:
    """Prevents overshooting, and positions past the end of a model with learned ones."""
    ids = prompt()
    plain = plain_decode(llama, ids, max_new_tokens=max_new_tokens)
    long = plain_decode(llama, ids, max_new_tokens=40).sequences
    assert plain.sequences.equal(long[:, : 9 + max_new_tokens])
    for tree in TREES.values():
        drafter = ScriptedDrafter(tree, long[0].tolist(), 1.0)
        result = decode(llama, drafter, ids, max_new_tokens=max_new_tokens)
        assert result.sequences.equal(plain.sequences)
        assert not result.finished
        assert max_new_tokens == sum(result.accept_lengths) + 1


def test_the_context_may_be_filled_to_the_brim() -> None:
    """Prevents an index error in the last step of models with learned positions."""
    model = build("gpt2")
    ids = prompt(200)
    plain = plain_decode(model, ids, max_new_tokens=56)
    drafter = ScriptedDrafter(TREES["grown"], plain.sequences[0].tolist(), 0.9)
    assert decode(model, drafter, ids, max_new_tokens=56).sequences.equal(plain.sequences)
    for run in (plain_decode, lambda *a, **k: decode(a[0], drafter, *a[1:], **k)):
        with pytest.raises(ValueError, match="is 257 tokens, but the model's context is 256"):
            run(model, ids, max_new_tokens=57)


def test_eos_inside_the_tree_ends_the_text(llama: PreTrainedModel) -> None:
    """Prevents tokens after eos where a step accepted past it, and eos missed as next root."""
    ids = prompt()
    long = plain_decode(llama, ids, max_new_tokens=40).new_tokens
    firsts = [i for i in range(14) if long[i] not in long[:i]]
    ends = set()
    for i in firsts:
        eos = (long[i], VOCAB + 1)
        plain = plain_decode(llama, ids, max_new_tokens=40, eos_token_ids=eos)
        assert plain.finished and plain.new_tokens == long[: i + 1]
        drafter = ScriptedDrafter(Tree.chain(4), ids[0].tolist() + long, 1.0)
        result = decode(llama, drafter, ids, max_new_tokens=40, eos_token_ids=eos)
        assert result.finished and result.sequences.equal(plain.sequences)
        assert sum(result.accept_lengths) == len(result.new_tokens) - 1
        ends.add(i % 5)
    assert len(ends) == 5, "eos should have come at every place in a step"


def test_stopping_criteria_are_asked_after_every_token(llama: PreTrainedModel) -> None:
    """Prevents a stop that comes only at the end of a step."""

    def stop(input_ids: torch.Tensor, scores: object) -> torch.Tensor:
        return torch.tensor([input_ids.shape[1] >= 21])

    ids = prompt()
    truth = plain_decode(llama, ids, max_new_tokens=40).sequences
    drafter = ScriptedDrafter(Tree.chain(4), truth[0].tolist(), 1.0)
    for result in (
        plain_decode(llama, ids, max_new_tokens=40, stopping_criteria=stop),
        decode(llama, drafter, ids, max_new_tokens=40, stopping_criteria=stop),
    ):
        assert result.finished
        assert result.sequences.equal(truth[:, :21])


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(temperature=0.7, seed=3)], ids=str)
@pytest.mark.parametrize("processors", [[], [RepetitionPenaltyLogitsProcessor(1.1)]], ids=len)
def test_near_ties_are_settled_as_plain_decoding_does(
    llama: PreTrainedModel,
    sampler: Sampler,
    processors: list[LogitsProcessor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prevents identity that holds only while no two logits are closer than rounding.

    Rounding is made much coarser than it is, in verify steps only.
    """
    ids = prompt()
    settings: dict[str, Any] = {
        "max_new_tokens": 40,
        "sampler": sampler,
        "logits_processor": LogitsProcessorList(processors) if processors else None,
    }
    plain = plain_decode(llama, ids, **settings)
    drafter = ScriptedDrafter(TREES["grown"], plain.sequences[0].tolist(), 0.7)
    assert decode(llama, drafter, ids, **settings).num_replays < 3
    verify = ModelPass.verify

    def coarse(base: ModelPass, tokens: torch.Tensor, tree: Tree) -> torch.Tensor:
        logits = verify(base, tokens, tree)
        return logits + logits.abs().amax() * 0.05 * torch.empty_like(logits).uniform_(-1, 1)

    monkeypatch.setattr(ModelPass, "verify", coarse)
    careless = decode(llama, drafter, ids, **settings)
    assert not careless.sequences.equal(plain.sequences), "the test would prove nothing"
    pretend_rounding(monkeypatch, llama, 0.1)
    careful = decode(llama, drafter, ids, **settings)
    assert careful.sequences.equal(plain.sequences)
    assert careful.num_replays > 2


class Turns(LogitsProcessor):
    """Forbids tokens by the length of the text; of a type that may be asked along the path only."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Shut out every third token."""
        scores = scores.clone()
        scores[:, input_ids.shape[1] % 3 :: 3] = -float("inf")
        return scores


CUTS: dict[str, tuple[Sampler, list[LogitsProcessor]]] = {
    "top_k": (Sampler(1.0, top_k=5), []),
    "top_p": (Sampler(0.7, top_p=0.4), []),
    "top_k, top_p": (Sampler(1.0, top_k=9, top_p=0.6), []),
    "warpers top_k": (Sampler(1.0), [TemperatureLogitsWarper(0.7), TopKLogitsWarper(5)]),
    "warpers top_p": (Sampler(1.0), [TopPLogitsWarper(0.4)]),
    "warpers min_p": (Sampler(1.0), [MinPLogitsWarper(1.0)]),
    "warpers, penalty": (
        Sampler(1.0, top_k=3),
        [RepetitionPenaltyLogitsProcessor(1.1), TopKLogitsWarper(9), TopPLogitsWarper(0.6)],
    ),
    "warpers, unknown": (Sampler(1.0), [Turns(), TopKLogitsWarper(5)]),
}


@pytest.mark.parametrize("name", CUTS)
def test_near_ties_at_the_edge_of_a_cut_are_settled(llama: PreTrainedModel, name: str) -> None:
    """Prevents a token cut off in a tree and kept in plain decoding: the best scores show none.

    And passes that are in no count, which is how a text of few steps takes long.
    """
    head = llama.get_output_embeddings().weight
    noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        # eight groups of eight: which of a group are among the best is a matter of rounding
        head.copy_(head[:8].repeat_interleave(8, dim=0) + 1e-7 * noise)
    sampler, processors = CUTS[name]
    tree_support(llama)  # whose passes are no part of decoding
    passes: list[int] = []
    llama.register_forward_hook(lambda *_: passes.append(1))
    num_replays = 0
    for seed in range(2):
        settings: dict[str, Any] = {
            "max_new_tokens": 8,
            "sampler": replace(sampler, seed=seed),
            "logits_processor": LogitsProcessorList(processors),
        }
        plain = plain_decode(llama, prompt(), **settings)
        drafter = ScriptedDrafter(TREES["grown"], plain.sequences[0].tolist(), 0.7)
        passes.clear()
        found = decode(llama, drafter, prompt(), **settings)
        assert len(passes) == 1 + found.num_steps + found.num_replay_passes, "some uncounted"
        assert found.new_tokens == plain.new_tokens
        in_batch = plain_decode(llama, prompt().repeat(2, 1), **settings)
        assert in_batch.rows[0].new_tokens == plain.new_tokens
        num_replays += found.num_replays
    assert num_replays > 0


PROCESSORS: dict[str, Callable[[int], list[LogitsProcessor]]] = {
    "penalty": lambda eos: [RepetitionPenaltyLogitsProcessor(1.3)],
    "two": lambda eos: [RepetitionPenaltyLogitsProcessor(1.2), NoRepeatNGramLogitsProcessor(2)],
    "length": lambda eos: [MinNewTokensLengthLogitsProcessor(9, 12, eos)],
    "warpers": lambda eos: [TemperatureLogitsWarper(0.7), TopKLogitsWarper(5)],
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("sampler", [Sampler(), Sampler(temperature=1.0, seed=8)], ids=str)
def test_processors_see_each_nodes_own_prefix(
    llama: PreTrainedModel, name: str, sampler: Sampler
) -> None:
    """Prevents penalties computed from the text before the step, or from a neighbour's path."""
    ids = prompt()
    bare = plain_decode(llama, ids, max_new_tokens=24, sampler=sampler)
    eos = bare.new_tokens[3]
    settings: dict[str, Any] = {
        "max_new_tokens": 24,
        "sampler": sampler,
        "logits_processor": LogitsProcessorList(PROCESSORS[name](eos)),
        "eos_token_ids": (eos,) if name == "length" else (),
    }
    plain = plain_decode(llama, ids, **settings)
    if name != "warpers" or sampler.temperature > 0:
        assert not bare.sequences.equal(plain.sequences)
    for tree in TREES.values():
        for hit_rate in (0.5, 0.9):  # at 0.5 with equal siblings
            drafter = ScriptedDrafter(tree, plain.sequences[0].tolist(), hit_rate)
            result = decode(llama, drafter, ids, **settings)
            assert result.sequences.equal(plain.sequences)


def test_tokens_are_handed_over_step_by_step(llama: PreTrainedModel) -> None:
    """Prevents a streamer that gets tokens twice, late, or beyond the end."""
    ids = prompt()
    truth = plain_decode(llama, ids, max_new_tokens=24)
    steps: list[list[int]] = []

    def keep(row: int, tokens: list[int]) -> None:
        assert row == 0
        steps.append(tokens)

    drafter = ScriptedDrafter(Tree.chain(4), truth.sequences[0].tolist(), 0.8)
    result = decode(llama, drafter, ids, max_new_tokens=24, on_tokens=keep)
    assert [len(step) for step in steps] == [1, *result.accept_lengths]
    assert sum(steps, []) == truth.new_tokens


def test_long_texts_outgrow_the_cache_unharmed(llama: PreTrainedModel) -> None:
    """Prevents loss of the prefix when the cache grows in the middle of a text."""
    ids = prompt(30)
    plain = plain_decode(llama, ids, max_new_tokens=226, sampler=Sampler(1.0, seed=1))
    full = llama(plain.sequences[:, :-1]).logits[0, 29:]
    chosen = drawn(Sampler(1.0, seed=1), full[None], torch.arange(30, 256)[None])
    assert chosen[0].tolist() == plain.new_tokens
    drafter = ScriptedDrafter(TREES["grown"], plain.sequences[0].tolist(), 0.8)
    result = decode(llama, drafter, ids, max_new_tokens=226, sampler=Sampler(1.0, seed=1))
    assert result.sequences.equal(plain.sequences)


def test_results_are_ordinary_tensors(llama: PreTrainedModel) -> None:
    """Prevents inference tensors, which refuse to be changed, from reaching the user."""
    ids = prompt()
    for result in (
        plain_decode(llama, ids, max_new_tokens=3),
        decode(llama, NgramDrafter(), ids, max_new_tokens=3),
    ):
        assert not result.sequences.is_inference()
        result.sequences[0, 0] = 1
    llama(input_ids=ids, labels=ids).loss.backward()


def test_bad_requests_are_refused(llama: PreTrainedModel) -> None:
    """Prevents prompts read as something else, and sampled candidates treated as sure."""
    drafter = NgramDrafter()
    for ids, message in (
        (torch.zeros(3, dtype=torch.long), r"\[B, P\].*got \[3\]"),
        (torch.zeros(1, 0, dtype=torch.long), "at least 1 token, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            decode(llama, drafter, ids, max_new_tokens=3)
        with pytest.raises(ValueError, match=message):
            plain_decode(llama, ids, max_new_tokens=3)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        decode(llama, drafter, prompt(), max_new_tokens=0)
    drafter.taps = ("middle",)
    with pytest.raises(ValueError, match="tap 'middle': expected final, trunk or layer.0 to"):
        decode(llama, drafter, prompt(), max_new_tokens=3)


def test_a_drafter_means_what_it_says_of_itself(llama: PreTrainedModel) -> None:
    """Prevents tokens announced as plain decoding's, but decided by rejection."""

    class Sampled(ScriptedDrafter):
        def propose(self, state: Any) -> Candidates:
            return replace(super().propose(state), sampling="chain")

    with pytest.raises(ValueError, match="deterministic, but its candidates are sampled: chain"):
        decode(llama, Sampled(Tree.chain(2), [1, 2, 3], 1.0), prompt(), max_new_tokens=3)
