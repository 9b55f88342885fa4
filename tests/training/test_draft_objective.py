"""What a draft model learns of its base: the right tokens, the right means, and nothing else."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.config.training import DRAFT_LOSSES, DraftConfig, LossConfig
from specheads.data.chat import Encoded
from specheads.data.pack import collate
from specheads.losses.cross_entropy import IGNORE, count_valid
from specheads.training.objectives import LABELS, Batch, DraftObjective, LMObjective
from tests.zoo import VOCAB, build

SMALLER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SOFT = [loss for loss in DRAFT_LOSSES if loss != LABELS]


def documents(lengths: Sequence[int], seed: int = 0) -> list[Encoded]:
    """Return random documents whose first two tokens are not learned."""
    rng, found = np.random.default_rng(seed), []
    for i, length in enumerate(lengths):
        ids = rng.integers(0, VOCAB, length, dtype=np.int32)
        labels = np.where(np.arange(length) < 2, np.int32(IGNORE), ids)
        found.append(Encoded(f"d{i}", ids, labels))
    return found


def batch_of(*rows: Sequence[int], seed: int = 0) -> Batch:
    """Return a packed batch, one row of documents for each list of lengths."""
    return collate([documents(row, seed + b) for b, row in enumerate(rows)], 24, 7)


def models(draft: str = "llama", **changes: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a small draft model and its base."""
    model = build(draft, seed=2, **SMALLER | changes)
    return model, build("llama", seed=3)


def distances(log_s: Tensor, log_t: Tensor, kind: str, eta: float, beta: float) -> Tensor:
    """Return the distance of each row, by the definitions of the papers."""
    s, t = log_s.exp(), log_t.exp()
    m = beta * t + (1 - beta) * s
    accepted = torch.where(s < t, s, t).sum(1)
    forward, tv = (t * (log_t - log_s)).sum(1), 1 - accepted
    share = (-eta * accepted.detach()).exp()
    jsd = beta * t * (log_t - m.log()) + (1 - beta) * s * (log_s - m.log())
    return {
        "forward_kl": forward,
        "reverse_kl": (s * (log_s - log_t)).sum(1),
        "jsd": jsd.sum(1),
        "tv": tv,
        "lk_alpha": -accepted.log(),
        "lk_lambda": share * forward + (1 - share) * tv,
    }[kind]


def reference(
    draft: PreTrainedModel,
    base: PreTrainedModel,
    batch: Batch,
    kind: str,
    *,
    eta: float = 3.0,
    beta: float = 0.5,
    temperature: float = 1.0,
    size: int = VOCAB,
) -> tuple[Tensor, dict[str, float]]:
    """Run every document by itself, form all logits, and take the mean over the learned tokens."""
    rows: list[Tensor] = []
    sums = {"lm/loss": 0.0, "lm/top1": 0.0, "draft/alpha": 0.0}
    for b, segments in enumerate(batch["segment_ids"]):
        for segment in range(1, int(segments.max()) + 1):
            inside = segments == segment
            ids, labels = batch["input_ids"][b, inside], batch["labels"][b, inside]
            learned = (labels[1:] != IGNORE).nonzero().squeeze(1)
            z = draft(input_ids=ids[None]).logits[0, learned, :size].double()
            with torch.no_grad():
                theirs = base(input_ids=ids[None]).logits[0, learned, :size].double()
            log_s, target = z.log_softmax(1), labels[1:][learned]
            log_t = (theirs / temperature).log_softmax(1)
            rows.append(distances(log_s, log_t, kind, eta, beta))
            found = log_s.detach()
            lower = torch.minimum(found.exp(), theirs.softmax(1)).sum()
            sums["lm/loss"] -= float(found.gather(1, target[:, None]).sum())
            sums["lm/top1"] += float((found.argmax(1) == target).sum())
            sums["draft/alpha"] += float(lower)
    distance = torch.cat(rows)
    loss = distance.mean()
    means = {name: value / len(distance) for name, value in sums.items()}
    return loss, means | {"loss": float(loss.detach()), "draft/loss": float(loss.detach())}


def gradients(objective: torch.nn.Module, *batches: Batch) -> dict[str, Tensor]:
    """Return the gradients after a backward pass per batch."""
    objective.zero_grad()
    for batch in batches:
        objective(batch)[0].backward()
    named = objective.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tol: float = 1e-5) -> None:
    """Compare gradients by the norm of their difference."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).norm() <= tol * value.norm() + 1e-9, name


@pytest.mark.parametrize("kind", SOFT)
@pytest.mark.parametrize("draft", ["llama", "gemma2"])
def test_the_loss_is_the_mean_over_learned_tokens_of_documents_alone(kind: str, draft: str) -> None:
    """A position off, a neighbour's document or a prompt's token: it trains, only worse."""
    if draft == "gemma2":  # a softcap, which the base has not
        student, base = models(draft, final_logit_softcapping=2.0, query_pre_attn_scalar=8)
    else:
        student, base = models(draft)
    options = {"eta": 2.0, "temperature": 0.8 if kind == "jsd" else 1.0}
    batch = batch_of([9, 3, 11], [1, 2, 14], seed=4)
    loss_config = LossConfig(chunk_size=5, lk_eta=2.0, temperature=options["temperature"])
    objective = DraftObjective(student, base, DraftConfig(loss=kind, jsd_beta=0.3), loss_config)
    loss, metrics = objective(batch)
    expected, means = reference(student, base, batch, kind, beta=0.3, **options)
    assert set(metrics) == set(means)
    for name, value in means.items():
        assert metrics[name].item() == pytest.approx(value, rel=1e-4), name
    found = gradients(objective, batch)
    objective.zero_grad()
    expected.backward()
    named = {name: p.grad for name, p in objective.named_parameters() if p.grad is not None}
    assert_same(found, named, 1e-4)
    assert all(name.startswith("draft.") for name in found)


@pytest.mark.parametrize("kind", ["labels", "forward_kl", "tv"])
def test_unequal_micro_batches_add_up_to_the_mean(kind: str) -> None:
    """A mean per micro-batch gives a token of a short one more weight than of a long one."""
    objective = DraftObjective(*models(), DraftConfig(loss=kind))
    small, large = batch_of([4], seed=1), batch_of([20], [9, 12], [7], seed=5)
    whole = {key: torch.cat([small[key], large[key]]) for key in small if key != "ids"}
    expected, mean = gradients(objective, whole), objective(whole)[1]
    num_valid = count_valid(whole["labels"], whole["segment_ids"], 0)
    small["num_valid"] = large["num_valid"] = num_valid
    assert_same(gradients(objective, small, large), expected)
    first, second = objective(small)[1], objective(large)[1]
    torch.testing.assert_close({k: first[k] + second[k] for k in mean}, mean)
    objective.engine_scale = 4.0  # what the engine divides by, and no metric shows
    loss, metrics = objective(whole)
    assert loss.item() == pytest.approx(4 * metrics["loss"].item())


def test_the_base_is_still_and_stays_as_it_is() -> None:
    """A teacher with its dropout on, or drifting with its student, teaches noise."""
    draft = build("llama", seed=2, **SMALLER)
    base = build("llama", seed=3, attention_dropout=0.5)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    objective = DraftObjective(draft, base, DraftConfig(loss="lk_alpha")).train()
    optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-2, weight_decay=0.1)
    batch = batch_of([20], [9, 12])
    losses = []
    for _ in range(20):
        loss, _ = objective(batch)
        assert torch.equal(loss, objective(batch)[0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], "nothing was learned: no test"
    assert draft.training and not base.training
    assert not any(p.requires_grad for p in base.parameters())
    assert all(torch.equal(base.state_dict()[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("kind", SOFT)
def test_a_copy_of_the_base_has_nothing_to_learn(kind: str) -> None:
    """An alpha of less than 1 for the base itself would measure something else."""
    base = build("llama", seed=3)
    objective = DraftObjective(copy.deepcopy(base), base, DraftConfig(loss=kind))
    batch = batch_of([20], [9, 12])
    _, metrics = objective(batch)
    assert metrics["draft/alpha"].item() == pytest.approx(1.0, abs=1e-5)
    assert abs(metrics["draft/loss"].item()) < 1e-5
    assert max(float(grad.norm()) for grad in gradients(objective, batch).values()) < 1e-3


@pytest.mark.parametrize("padded", ["base", "draft"])
def test_padded_vocabularies_are_compared_without_the_padding(padded: str) -> None:
    """A padded row of logits that nobody trained takes mass from every real token."""
    sizes = {"base": VOCAB, "draft": VOCAB} | {padded: VOCAB + 6}
    base = build("llama", seed=3, vocab_size=sizes["base"])
    draft = build("llama", seed=2, **SMALLER, vocab_size=sizes["draft"])
    objective = DraftObjective(draft, base, DraftConfig(loss="jsd"), vocab_size=VOCAB)
    batch = batch_of([20], [9, 12])
    _, metrics = objective(batch)
    _, means = reference(draft, base, batch, "jsd")
    for name, value in means.items():
        assert metrics[name].item() == pytest.approx(value, rel=1e-4), name
    grad = gradients(objective, batch)["draft.lm_head.weight"]
    assert grad.shape[0] == sizes["draft"] and not grad[VOCAB:].any()
    assert bool(grad[:VOCAB].any())


def test_labels_are_the_loss_of_pretraining() -> None:
    """The student that learns from texts alone is what distillation is compared with."""
    draft, base = models()
    batch = batch_of([20], [9, 12])
    expected = gradients(LMObjective(draft), batch)
    _, lm = LMObjective(draft)(batch)
    loss = LossConfig(top_k=3, temperature=0.5)
    for teacher in (None, base):
        objective = DraftObjective(draft, teacher, DraftConfig(loss=LABELS), loss)
        _, metrics = objective(batch)
        names = {"loss", "lm/loss", "lm/top1", "draft/loss"}
        assert set(metrics) == names | ({"draft/alpha"} if teacher else set())
        for name in ("loss", "lm/loss", "draft/loss"):
            torch.testing.assert_close(metrics[name], lm["lm/loss"])
        torch.testing.assert_close(metrics["lm/top1"], lm["lm/top1"])
        found = {
            name.replace("draft.", "base."): g for name, g in gradients(objective, batch).items()
        }
        assert_same(found, expected)
    _, means = reference(draft, base, batch, "tv")
    assert metrics["draft/alpha"].item() == pytest.approx(means["draft/alpha"], rel=1e-4)


@pytest.mark.parametrize("kind", DRAFT_LOSSES)
def test_a_stored_teacher_needs_no_base(kind: str) -> None:
    """Offline, a draft must learn what it would online; with all tokens but one that is exact."""
    draft, base = models()
    batch = batch_of([20], [9, 12])
    online = DraftObjective(draft, base, DraftConfig(loss=kind))
    expected, (_, metrics) = gradients(online, batch), online(batch)
    taught = {**batch, **_stored(base, batch, VOCAB - 1)}
    for teacher in (None, base):
        offline = DraftObjective(draft, teacher, DraftConfig(loss=kind))
        if teacher is not None:  # what is stored is not computed again
            base.forward = base.base_model.forward = None  # type: ignore[assignment]
        _, found = offline(taught)
        assert "draft/alpha" not in found
        assert found["draft/alpha_top"].item() <= metrics["draft/alpha"].item() + 1e-6
        for name in ("loss", "lm/loss", "lm/top1", "draft/loss"):
            torch.testing.assert_close(found[name], metrics[name], rtol=1e-4, atol=1e-6)
        assert_same(gradients(offline, taught), expected, 1e-3)


def _stored(base: PreTrainedModel, batch: Batch, k: int) -> Batch:
    """Return the k best tokens of every position, 0 in the padding."""
    shape = (*batch["input_ids"].shape, k)
    ids, log_probs = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
    for b, segments in enumerate(batch["segment_ids"]):
        for segment in range(1, int(segments.max()) + 1):
            inside = segments == segment
            logits = base(input_ids=batch["input_ids"][b, inside][None]).logits[0].detach()
            log_probs[b, inside], ids[b, inside] = logits.log_softmax(1).topk(k, dim=1)
    return {"teacher_ids": ids, "teacher_log_probs": log_probs}


def test_no_learned_token_gives_zero_not_nan() -> None:
    """A micro-batch of prompts alone must count nothing and move nothing."""
    objective = DraftObjective(*models(), DraftConfig(loss="lk_lambda"))
    loss, metrics = objective(batch_of([2], [2, 1]))
    assert loss.item() == 0.0 and not any(value.item() for value in metrics.values())
    assert all(math.isfinite(v.item()) for v in metrics.values())


def test_misuse_is_said_before_a_step() -> None:
    """Without a teacher there would be nothing to learn, and with reverse KL and top_k too much."""
    draft, base = models()
    with pytest.raises(ValueError, match="draft.loss must be one of labels, .*, got 'kl'"):
        DraftConfig(loss="kl")
    with pytest.raises(ValueError, match="top_k must be 0 for reverse_kl"):
        DraftObjective(draft, base, DraftConfig(loss="reverse_kl"), LossConfig(top_k=5))
    tv = DraftConfig(loss="tv")
    with pytest.raises(ValueError, match="loss tv needs a base model, or teacher_ids"):
        DraftObjective(draft, None, tv)(batch_of([9]))
    taught = {**(batch := batch_of([9])), **_stored(base, batch, 4)}
    with pytest.raises(ValueError, match="needs a top_k of 1 to 4"):
        DraftObjective(draft, None, tv, LossConfig(temperature=0.5))(taught)
