"""Figures about a tuned base and about lossy rules, against slow references."""

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from specheads.data.chat import Encoded
from specheads.decoding.accept import Acceptance
from specheads.decoding.loop import plain_decode
from specheads.drafters.lookup import SuffixDrafter
from specheads.losses.cross_entropy import IGNORE
from specheads.measure.clock import Prompt
from specheads.measure.identity import logits_at
from specheads.measure.quality import (
    agreement,
    answer_places,
    divergence,
    format_quality,
    greedy_agreement,
    loss_of,
    lossy_cost,
    read_answers,
    summarise,
    text_loss,
)
from specheads.verification.sampling import Sampler


def document(ids: list[int], learned: list[int]) -> Encoded:
    """Return a document whose tokens at ``learned`` are answers."""
    labels = [token if i in learned else IGNORE for i, token in enumerate(ids)]
    return Encoded("d", np.asarray(ids, np.int32), np.asarray(labels, np.int32))


def nudged(model: LlamaForCausalLM, std: float) -> LlamaForCausalLM:
    """Return a copy with weights moved a little."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * std)
    return other


@torch.no_grad()
def slow_reading(base: torch.nn.Module, original: torch.nn.Module, of: Encoded) -> dict[str, float]:
    """Read a document token by token, each from its prefix alone, in float64."""
    base, original = copy.deepcopy(base).double(), copy.deepcopy(original).double()
    found = dict.fromkeys(("loss", "original_loss", "kl", "same_best", "num_tokens"), 0.0)
    for place, label in enumerate(of.labels.tolist()):
        if label == IGNORE or place == 0:
            continue
        prefix = torch.tensor([of.input_ids.tolist()[:place]])
        q, p = (model(input_ids=prefix).logits[0, -1].softmax(0) for model in (base, original))
        found["num_tokens"] += 1
        found["loss"] -= math.log(q[label])
        found["original_loss"] -= math.log(p[label])
        found["kl"] += sum(float(a) * math.log(a / b) for a, b in zip(p, q, strict=True))
        found["same_best"] += int(p.argmax() == q.argmax())
    return found


def test_readings_are_those_of_the_definition(
    make_tiny_llama: Callable[..., LlamaForCausalLM],
) -> None:
    """A loss shifted by one, or a KL the wrong way round, still looks like one."""
    base = make_tiny_llama(std=0.3)
    tuned = nudged(base, 0.05)
    documents = [
        document([257, 5, 9, 40, 41, 258], [3, 4, 5]),
        document([7, 8, 9, 10], [0, 1, 3]),  # nothing predicts the first token
        document([100, 3, 3, 3, 200, 17, 18, 258, 5, 6], [2, 3, 8, 9]),
    ]
    readings = read_answers(tuned, base, documents)
    assert [each["num_tokens"] for each in readings] == [3, 2, 4]
    for reading, of in zip(readings, documents, strict=True):
        slow = slow_reading(tuned, base, of)
        assert slow == pytest.approx({key: reading[key] for key in slow}, rel=1e-3)
        assert reading["loss"] == pytest.approx(slow["loss"], rel=1e-4)
        assert reading["original_loss"] == pytest.approx(slow["original_loss"], rel=1e-4)
        assert reading["same_best"] == slow["same_best"]
        assert reading["loss"] != reading["original_loss"] and reading["kl"] > 0
    found = summarise(readings)
    tokens = 9
    assert found["perplexity"] == pytest.approx(math.exp(sum(r["loss"] for r in readings) / tokens))
    assert found["kl"] == pytest.approx(sum(r["kl"] for r in readings) / tokens)
    assert found["loss_difference"] == pytest.approx(found["loss"] - found["original_loss"])
    for key in ("perplexity", "original_perplexity", "kl", "same_best", "loss_difference"):
        low, high = found[f"{key}_ci95"]
        assert low <= found[key] <= high


def test_the_original_is_at_no_distance_from_itself(
    make_tiny_llama: Callable[..., LlamaForCausalLM],
) -> None:
    """A distance that is not 0 where nothing changed is a distance of the measurement."""
    base = make_tiny_llama(std=0.3)
    readings = read_answers(base, base, [document([1, 2, 3, 4, 5], [2, 3, 4])])
    found = summarise(readings)
    assert found["kl"] == 0 and found["same_best"] == 1 and found["loss_difference"] == 0
    alone = summarise(read_answers(base, None, [document([1, 2, 3, 4, 5], [2, 3, 4])]))
    assert alone["perplexity"] == found["perplexity"] and "kl" not in alone


def test_logits_at_chosen_places(make_tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    """Logits of the neighbours, or of a cut text, would be measured without an error."""
    base = make_tiny_llama(std=0.3)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    whole = base(input_ids=torch.tensor([ids])).logits[0]
    for places in ([0], [2, 5], [7], list(range(8))):
        assert torch.allclose(logits_at(base, ids, places), whole[places], atol=1e-5)

    def deaf(**settings: object) -> object:  # a model that returns all logits whatever is asked
        settings.pop("logits_to_keep")
        return type(base).forward(base, **settings)

    base.forward = deaf  # type: ignore[method-assign, assignment]
    assert torch.allclose(logits_at(base, ids, [2, 5]), whole[[2, 5]], atol=1e-5)


def test_distances_of_many_rows_and_of_other_widths() -> None:
    """Rows are taken in pieces; padding of embeddings and impossible tokens must not count."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(600, 7, generator=generator) * 3 for _ in range(2))
    kl, same = divergence(p, q)
    expected = torch.nn.functional.kl_div(
        q.log_softmax(1), p.log_softmax(1), log_target=True, reduction="none"
    ).sum(1)
    assert torch.allclose(kl, expected, atol=1e-5)
    assert torch.equal(same, p.argmax(1) == q.argmax(1))
    wide = torch.cat([q, torch.full((600, 3), -50.0)], 1)
    assert torch.allclose(divergence(p, wide)[0], kl, atol=1e-5)
    never = p.clone()
    never[:, 2] = -math.inf
    assert divergence(never, q)[0].isfinite().all()
    assert divergence(q, never)[0].isinf().all(), "what the tuned model rules out is lost"
    tokens = list(range(7)) * 85 + [0] * 5
    expected = -p.double().log_softmax(1)[range(600), tokens].sum()
    assert loss_of(p, tokens) == pytest.approx(float(expected), rel=1e-6)


def test_agreement_counts_to_the_first_difference() -> None:
    """A prefix is not an identical text, and the shorter text ends the comparison."""
    theirs = [[1, 2, 3, 4], [5, 6], [7, 8, 9]]
    ours = [[1, 2, 3, 4], [5, 6, 6], [7, 0, 9]]
    found = agreement(ours, theirs)
    assert (found["identical"], found["compared"]) == (1, 3)
    assert found["common_prefix"] == (4 + 2 + 1) / 3 and found["length"] == 3


def test_greedy_texts_of_both_models(make_tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    """Texts of one model compared with themselves agree whatever was tuned."""
    base = make_tiny_llama(std=0.3)
    prompts = [Prompt(str(i), "k", torch.tensor([[i, 7, 11]])) for i in range(3)]
    same = greedy_agreement(base, base, prompts, max_new_tokens=12, eos_token_ids=(258,))
    assert same["identical"] == 3 and same["common_prefix"] == same["length"]
    other = greedy_agreement(
        nudged(base, 0.2), base, prompts, max_new_tokens=12, eos_token_ids=(258,)
    )
    assert other["identical"] < 3 and other["common_prefix"] < other["length"]


def test_cost_of_a_lossy_rule(make_tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    """A lossy text scored as if it were exact, or with the prompt's tokens, hides what it costs."""
    base = make_tiny_llama(std=0.3)
    prompts = [Prompt(str(i), "k", torch.tensor([[i, 7, 11, 7, 11, 7]])) for i in range(4)]

    def cost(rule: Acceptance) -> dict:
        return lossy_cost(
            base, SuffixDrafter(), rule, prompts,
            max_new_tokens=20, temperature=1.0, seed=3, eos_token_ids=(258,),
        )  # fmt: skip

    loose = cost(Acceptance("lossy_typical", epsilon=0.0, delta=0.0))  # accepts all that can be
    assert (
        loose["identical"] < 4 and loose["lossy"]["accept_length"] > loose["exact"]["accept_length"]
    )
    assert loose["exact"]["accept_length"] == 1
    exact = cost(Acceptance("exact"))
    assert exact["identical"] == 4 and exact["loss_difference"] == 0
    total, tokens = 0.0, 0
    for n, prompt in enumerate(prompts):
        result = plain_decode(
            base, prompt.input_ids, max_new_tokens=20, eos_token_ids=(258,),
            sampler=Sampler(temperature=1.0, seed=3 + n),
        )  # fmt: skip
        whole = result.sequences[0].tolist()
        log_probs = base(input_ids=torch.tensor([whole])).logits[0].detach().log_softmax(-1)
        own = -sum(float(log_probs[i - 1, whole[i]]) for i in range(6, len(whole)))
        assert text_loss(base, whole[:6], whole[6:]) == pytest.approx(own, rel=1e-5)
        total, tokens = total + own, tokens + len(whole) - 6
    assert loose["exact"]["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)
    low, high = loose["loss_difference_ci95"]
    assert low <= loose["loss_difference"] <= high


def test_answers_are_told_from_prompts() -> None:
    """The token after a prompt is the first of the answer, and is predicted from the prompt."""
    assert answer_places(document([1, 2, 3, 4], [2, 3])) == [1, 2]


def test_the_table_names_what_was_not_measured() -> None:
    """A missing figure must be a sentence, not an empty table that looks like agreement."""
    read = summarise([{"num_tokens": 3.0, "loss": 2.0}])
    result = {
        "heldout": read, "texts": None, "lossy": None, "original": None, "rule": "exact",
        "why_no_original": "the base was not tuned", "left_out": {},
    }  # fmt: skip
    text = format_quality(result)
    assert "the base was not tuned" in text and f"{math.exp(2 / 3):.4f}" in text
    assert "KL" not in text
