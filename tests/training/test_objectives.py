"""What the objectives train on what: labels, means, gradients, and what stays frozen."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from specheads.config import AdapterConfig, LossConfig
from specheads.losses.cross_entropy import IGNORE, count_valid, shift_labels
from specheads.models.adapters import adapter_parameters, add_adapter
from specheads.models.heads import MedusaHeads
from specheads.models.output import OutputLayer, packed_hidden
from specheads.training.objectives import Batch, HeadsObjective, LMObjective
from tests.script_modules import load_script

naive: Any = load_script("references").by_all_logits
RECIPES = [(kind, train) for kind in ("own", "shared") for train in (False, True)]


class Counter(nn.Module):
    """A base model that only counts: the hidden state of token v is its one-hot vector."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="sdpa")
        self.lm_head = nn.Linear(vocab, vocab, bias=False)
        nn.init.zeros_(self.lm_head.weight)
        for token in range(vocab):
            self.lm_head.weight.data[(token + 1) % vocab, token] = 50.0

    def base_model(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        """Return the one-hot vectors [B, T, V]."""
        vocab = self.lm_head.in_features
        return SimpleNamespace(last_hidden_state=nn.functional.one_hot(input_ids, vocab).float())


def pack(rows: list[list[list[int]]], length: int) -> Batch:
    """Pack documents (lists of tokens, all to be learned) into padded rows."""
    batch = {
        key: torch.zeros(len(rows), length, dtype=torch.long)
        for key in ("input_ids", "position_ids", "segment_ids")
    }
    for row, documents in enumerate(rows):
        at = 0
        for number, tokens in enumerate(documents, 1):
            span = slice(at, at + len(tokens))
            batch["input_ids"][row, span] = torch.tensor(tokens)
            batch["position_ids"][row, span] = torch.arange(len(tokens))
            batch["segment_ids"][row, span] = number
            at += len(tokens)
        batch["position_ids"][row, at:] = torch.arange(length - at)
    real = batch["segment_ids"] > 0
    batch["labels"] = torch.where(real, batch["input_ids"], IGNORE)
    return batch


def random_batch(seed: int, num_rows: int = 2, masked: float = 0.4) -> Batch:
    """Return packed random documents, a part of whose labels are masked."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(num_rows):
        lengths = torch.randint(1, 12, (3,), generator=generator).tolist()
        rows.append([torch.randint(0, 200, (n,), generator=generator).tolist() for n in lengths])
    batch = pack(rows, 40)
    hide = torch.rand(batch["labels"].shape, generator=generator) < masked
    batch["labels"][hide] = IGNORE
    return batch


def build(base: LlamaForCausalLM, lm_head: str, train_base: bool, **options: Any) -> HeadsObjective:
    """Return an objective with three heads that have moved a little from their start."""
    torch.manual_seed(1)
    heads = MedusaHeads(3, 1, base.config.hidden_size, base.config.vocab_size, lm_head)
    heads.init_from_output(base.lm_head.weight)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return HeadsObjective(base, heads, LossConfig(chunk_size=16, **options), train_base=train_base)


def gradients(objective: nn.Module, *batches: Batch) -> dict[str, Tensor]:
    """Return the gradients after a backward pass per batch."""
    objective.zero_grad()
    for batch in batches:
        objective(batch)[0].backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in objective.named_parameters()
        if parameter.grad is not None
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare gradients by the norm of their difference, to 1e-5."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 1e-5 * value.norm() + 1e-12, name


@pytest.mark.parametrize(("lm_head", "train_base"), RECIPES)
def test_fused_equals_naive(
    lm_head: str, train_base: bool, make_tiny_llama: Callable[..., LlamaForCausalLM]
) -> None:
    """One call for shared matrices and one per head otherwise: both must be the plain sum."""
    found: dict[str, Any] = {}
    expected: dict[str, Any] = {}
    for as_it_is, results in ((lambda it: it, found), (naive, expected)):
        objective = as_it_is(build(make_tiny_llama(), lm_head, train_base))
        objective.lambda_scale = 0.5
        batch = random_batch(0)
        results["metrics"] = objective(batch)[1]
        results["grads"] = gradients(objective, batch)
    assert_same(found["grads"], expected["grads"])
    torch.testing.assert_close(found["metrics"], expected["metrics"])
    assert all(name.startswith("heads.") for name in found["grads"]) == (not train_base)


def test_head_i_learns_the_token_i_plus_2_ahead() -> None:
    """One position off, and every head drafts the token that is already certain."""
    vocab, num_heads = 30, 4
    base = Counter(vocab)
    heads = MedusaHeads(num_heads, 1, vocab, vocab, "own")
    for i in range(num_heads):
        weight = torch.zeros(vocab, vocab)
        weight[(torch.arange(vocab) + i + 2) % vocab, torch.arange(vocab)] = 50.0
        heads.get_parameter(f"heads.{i}.lm_head.weight").data.copy_(weight)
    objective = HeadsObjective(base, heads, train_base=True, output=OutputLayer(base.lm_head))
    # neighbouring documents count from elsewhere, so a label across the border is a wrong one
    rows = [[list(range(3, 10)), [20, 21], list(range(11, 18))], [[5], list(range(8, 20))]]
    batch = pack(rows, 20)
    loss, metrics = objective(batch)
    assert loss < 1e-4
    for name in ("lm", *(f"head_{i}" for i in range(num_heads))):
        assert metrics[f"{name}/top1"] == metrics[f"{name}/top5"] == 1.0, name
    lengths = [len(document) for row in rows for document in row]
    expected = [sum(max(0, n - offset) for n in lengths) for offset in range(1, num_heads + 2)]
    assert count_valid(batch["labels"], batch["segment_ids"], num_heads).tolist() == expected


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_medusa1_leaves_the_base_bit_identical(
    lm_head: str, make_tiny_llama: Callable[..., LlamaForCausalLM]
) -> None:
    """An output matrix left trainable drifts with the heads and is then not saved."""
    base = make_tiny_llama()
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    objective = build(base, lm_head, train_base=False)
    # everything is given to the optimizer, with decay: only a frozen base survives that
    optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-2, weight_decay=0.1)
    start = {name: tensor.clone() for name, tensor in objective.heads.state_dict().items()}
    for step in range(3):
        objective.train()
        objective(random_batch(step))[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not base.training and objective.heads.training
    assert all(torch.equal(base.state_dict()[name], tensor) for name, tensor in before.items())
    assert all(parameter.grad is None for parameter in base.parameters())
    for name, tensor in objective.heads.state_dict().items():
        assert not torch.equal(tensor, start[name]), name


def test_a_frozen_base_thaws_for_the_second_stage(
    make_tiny_llama: Callable[..., LlamaForCausalLM],
) -> None:
    """Stage two on a base still frozen by stage one trains the heads alone, silently."""
    base = make_tiny_llama()
    first = build(base, "shared", train_base=False)
    assert not any(parameter.requires_grad for parameter in base.parameters())
    second = HeadsObjective(base, first.heads, train_base=True)
    grads = gradients(second, random_batch(0, masked=0.0))
    assert all(f"base.{name}" in grads for name, _ in base.named_parameters())


@pytest.mark.parametrize(("lm_head", "train_base"), RECIPES)
def test_unequal_micro_batches_add_up_to_the_mean(
    lm_head: str, train_base: bool, make_tiny_llama: Callable[..., LlamaForCausalLM]
) -> None:
    """A mean per micro-batch gives a label in a short micro-batch more weight than in a long."""
    objective = build(make_tiny_llama(), lm_head, train_base)
    small, large = random_batch(1, num_rows=1, masked=0.8), random_batch(2, num_rows=3)
    whole = {key: torch.cat([small[key], large[key]]) for key in small}
    num_valid = count_valid(whole["labels"], whole["segment_ids"], 3)
    expected, mean = gradients(objective, whole), objective(whole)[1]
    small["num_valid"] = large["num_valid"] = num_valid
    assert_same(gradients(objective, small, large), expected)
    first, second = objective(small)[1], objective(large)[1]
    torch.testing.assert_close({k: first[k] + second[k] for k in mean}, mean)


def test_each_loss_is_the_mean_over_its_own_labels(
    make_tiny_llama: Callable[..., LlamaForCausalLM],
) -> None:
    """Divided by another head's number of labels, the losses are wrong and look plausible."""
    base, batch = make_tiny_llama(), random_batch(0)
    heads = build(base, "own", train_base=False).heads
    with torch.no_grad():
        hidden = packed_hidden(base, batch["input_ids"], batch["position_ids"])
        logits = heads.logits(hidden, OutputLayer(base.lm_head))
    for train_base in (False, True):
        metrics = build(base, "own", train_base)(batch)[1]
        for i in range(3):
            labels = shift_labels(batch["labels"], batch["segment_ids"], i + 2)
            mean = nn.functional.cross_entropy(logits[i].flatten(0, 1), labels.flatten())
            torch.testing.assert_close(metrics[f"head_{i}/loss"], mean)


def test_blocks_run_only_where_something_is_learned(tiny_llama: LlamaForCausalLM) -> None:
    """With the loss on answers alone, most positions are prompt: work on them is thrown away."""
    objective, batch = build(tiny_llama, "own", train_base=False), random_batch(0, masked=0.9)
    rows: list[int] = []
    objective.heads.heads[0].register_forward_hook(lambda _, args, out: rows.append(len(args[0])))
    objective(batch)
    shifted = [shift_labels(batch["labels"], batch["segment_ids"], i + 2) for i in range(3)]
    assert rows == [int((torch.stack(shifted) != IGNORE).any(0).sum())] and rows[0] < 30


def test_loss_is_the_weighted_sum_of_the_papers(
    make_tiny_llama: Callable[..., LlamaForCausalLM],
) -> None:
    """A decay one power off changes all weights and no shape."""
    batch, factors = random_batch(0), [0.7, 0.7**2, 0.7**3]
    base = make_tiny_llama()
    loss, metrics = build(base, "own", train_base=False, decay=0.7, lambda_0=9.0)(batch)
    heads = sum(f * metrics[f"head_{i}/loss"] for i, f in enumerate(factors))
    torch.testing.assert_close(loss.detach(), heads)
    assert "lm/loss" not in metrics
    objective = build(base, "own", train_base=True, decay=0.7, lambda_0=0.2)
    objective.lambda_scale, objective.engine_scale = 0.5, 6.0
    loss, metrics = objective(batch)
    heads = sum(f * metrics[f"head_{i}/loss"] for i, f in enumerate(factors))
    expected = metrics["lm/loss"] + 0.1 * heads
    torch.testing.assert_close(metrics["loss"], expected)
    torch.testing.assert_close(loss.detach(), 6.0 * expected)


@pytest.mark.parametrize(("lm_head", "train_base"), RECIPES)
def test_heads_and_batches_without_labels_add_zero(
    lm_head: str, train_base: bool, make_tiny_llama: Callable[..., LlamaForCausalLM]
) -> None:
    """Zero labels over zero labels is NaN, and one NaN ends the run."""
    objective = build(make_tiny_llama(), lm_head, train_base)
    short = pack([[[1, 2, 3], [4, 5], [6]]], 8)  # head 0 has one label, the others none
    loss, metrics = objective(short)
    assert loss.isfinite() and metrics["head_0/loss"] > 0
    assert metrics["head_1/loss"] == metrics["head_2/loss"] == 0
    grads = gradients(objective, short)
    assert all(bool(grad.isfinite().all()) for grad in grads.values())
    assert not grads["heads.heads.1.blocks.0.weight"].any()

    expected = naive(build(make_tiny_llama(), lm_head, train_base))(short)[0]
    torch.testing.assert_close(expected, loss)

    short["labels"].fill_(IGNORE)
    loss, metrics = objective(short)
    assert loss == 0 and all(value == 0 for value in metrics.values())
    grads = gradients(objective, short)  # every parameter takes part, or ranks would disagree
    trained = [name for name, p in objective.named_parameters() if p.requires_grad]
    assert sorted(grads) == sorted(trained)
    assert not any(grad.any() for grad in grads.values())


def test_documents_do_not_see_each_other(make_tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    """Attention across packed documents lowers the loss in training and helps nobody after."""
    objective = build(make_tiny_llama(), "own", train_base=True)
    first, second = list(range(10, 20)), list(range(40, 47))
    num_valid = torch.tensor([17.0, 15, 13, 11])
    packed = {**pack([[first, second]], 20), "num_valid": num_valid}
    apart = {**pack([[first], [second]], 20), "num_valid": num_valid}
    torch.testing.assert_close(objective(packed)[1], objective(apart)[1])


@pytest.mark.parametrize("train_base", [False, True])
def test_no_graph_without_grad(
    train_base: bool, make_tiny_llama: Callable[..., LlamaForCausalLM]
) -> None:
    """Held-out loss computed through the objective must not form gradients."""
    objective = build(make_tiny_llama(), "shared", train_base)
    with torch.no_grad():
        loss, metrics = objective(random_batch(0))
    assert not loss.requires_grad and not any(m.requires_grad for m in metrics.values())
    torch.testing.assert_close(objective(random_batch(0))[1], metrics)


def test_a_frozen_base_keeps_no_activations(
    make_tiny_llama: Callable[..., LlamaForCausalLM],
) -> None:
    """Without no_grad around the trunk, Medusa-1 costs the memory of Medusa-2."""
    objective = build(make_tiny_llama(), "own", train_base=False)
    seen = []
    objective.base.base_model.register_forward_hook(
        lambda *args: seen.append(torch.is_grad_enabled())
    )
    objective(random_batch(0))
    assert seen == [False]


def test_lm_objective_is_the_models_own_loss(tiny_llama: LlamaForCausalLM) -> None:
    """Pretraining on labels shifted twice looks like slow learning."""
    batch = pack([[list(range(5, 35))], [list(range(60, 90))]], 30)
    with torch.no_grad():
        expected = tiny_llama(input_ids=batch["input_ids"], labels=batch["labels"]).loss
    objective = LMObjective(tiny_llama, LossConfig(chunk_size=16))
    loss, metrics = objective(batch)
    torch.testing.assert_close(loss.detach(), expected)
    torch.testing.assert_close(metrics["lm/loss"], expected)
    fused = gradients(objective, batch)
    assert_same(fused, gradients(naive(LMObjective(tiny_llama)), batch))


def test_the_reference_is_not_the_loss_itself(tiny_llama: LlamaForCausalLM) -> None:
    """Compared with itself the fused loss would always be right."""
    batch, weight = random_batch(0), tiny_llama.lm_head.weight
    loss, _ = naive(LMObjective(tiny_llama))(batch)
    torch.autograd.grad(loss, weight, create_graph=True)  # which the fused loss refuses
    loss, _ = LMObjective(tiny_llama)(batch)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, weight, create_graph=True)


def test_lm_objective_with_tied_embeddings(
    make_tiny_llama: Callable[..., LlamaForCausalLM],
) -> None:
    """A tied matrix gets gradients from both of its ends; one of them must not be dropped."""
    base, batch = make_tiny_llama(tie_word_embeddings=True), random_batch(3)
    base.tie_weights()
    expected = gradients(naive(LMObjective(base)), batch)
    assert_same(gradients(LMObjective(base, LossConfig(chunk_size=8)), batch), expected)


@pytest.mark.parametrize(("lm_head", "train_base"), RECIPES)
def test_autocast_trains_in_float32(
    lm_head: str, train_base: bool, make_tiny_llama: Callable[..., LlamaForCausalLM]
) -> None:
    """Under autocast dtypes meet that never meet without it (checkpointed blocks, the cat)."""
    objective = build(make_tiny_llama(), lm_head, train_base)
    batch = random_batch(0)
    expected = gradients(objective, batch)
    objective.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = objective(batch)
    loss.backward()
    for name, value in expected.items():
        grad = objective.get_parameter(name).grad
        assert grad is not None and grad.dtype == torch.float32
        assert (grad - value).norm() < 0.1 * value.norm(), name


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_float32_heads_on_a_bfloat16_base(
    lm_head: str, make_tiny_llama: Callable[..., LlamaForCausalLM]
) -> None:
    """Medusa-1 on a large model: the base is narrow, what is trained is not."""
    base = make_tiny_llama().to(torch.bfloat16)
    objective = build(base, lm_head, train_base=False)
    grads = gradients(objective, random_batch(0))
    assert grads and all(g.dtype == torch.float32 and g.any() for g in grads.values())


def test_misuse_names_both_numbers(tiny_llama: LlamaForCausalLM) -> None:
    """Counts of another number of heads would scale every loss wrongly."""
    objective = build(tiny_llama, "own", train_base=False)
    batch = {**random_batch(0), "num_valid": torch.ones(3)}
    with pytest.raises(ValueError, match=r"num_valid has shape \(3,\), 3 heads need \(4,\)"):
        objective(batch)
    heads = MedusaHeads(3, 1, 32, 100)
    with pytest.raises(ValueError, match=r"\(100, 32\), the base has \(272, 32\)"):
        HeadsObjective(tiny_llama, heads, train_base=False)


@pytest.mark.parametrize(("lm_head", "train_base"), RECIPES)
def test_four_heads_take_hardly_more_memory_than_one(lm_head: str, train_base: bool) -> None:
    """Logits or activations kept per head grow the peak with the heads; nothing else notices."""
    bench: Any = load_script("bench_memory")
    case = {
        "recipe": "medusa2" if train_base else "medusa1",
        "lm_head": lm_head,
        "implementation": "fused",
        "vocab": 8000,
        "hidden": 64,
        "tokens": 256,
        "chunk_size": 64,
        "threads": 1,
    }
    peaks = []
    for num_heads in (1, 4):
        case["num_heads"] = num_heads
        peaks.append(bench.allocator_peak(case) - (lm_head == "own") * bench.owned_bytes(case))
    assert peaks[1] <= 1.15 * peaks[0]


KINDS: dict[str, dict[str, Any]] = {
    "hydra": {"condition": True},
    "hydra_shared": {"condition": True, "lm_head": "shared"},
    "markov": {"markov_rank": 4},
    "low_rank": {"lm_head": "low_rank", "rank": 6},
    "pruned": {"lm_head": "pruned", "num_kept": 120},
    "shared_pruned": {"lm_head": "shared_pruned", "num_kept": 120},
    "everything": {
        "condition": True,
        "markov_rank": 4,
        "lm_head": "pruned",
        "num_kept": 120,
        "prefix": {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4},
    },
}


def build_kind(
    model: LlamaForCausalLM, kind: str, *, train_base: bool = False, **options: Any
) -> HeadsObjective:
    """Return an objective with three heads of a kind, moved a little from their start."""
    torch.manual_seed(1)
    vocab_size, hidden_size = model.lm_head.weight.shape
    heads = MedusaHeads(3, 1, hidden_size, vocab_size, **KINDS[kind])
    heads.init_from_output(model.lm_head.weight)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    loss = LossConfig(chunk_size=16, **options)
    return HeadsObjective(model, heads, loss, train_base=train_base)


def distance(kind: str, logits: Tensor, expected: Tensor, label: int, kept: Tensor) -> Tensor:
    """Return one row's loss from its definition: ``logits`` [V'], the base's ``expected`` [V]."""
    if kind == "hard":
        found = (kept == label).nonzero()
        return nn.functional.cross_entropy(logits, found[0, 0]) if len(found) else logits.sum() * 0
    student, teacher = logits.softmax(-1), expected.softmax(-1)[kept]
    acceptance = torch.minimum(student, teacher).sum()
    part = teacher / teacher.sum()
    kl = (part * (part.log() - logits.log_softmax(-1))).sum()
    if kind == "soft":
        return kl
    if kind == "tv":
        return 1 - acceptance
    if kind == "lk_alpha":
        return -acceptance.log()
    share = (-3.0 * acceptance.detach()).exp()
    return share * kl + (1 - share) * (1 - acceptance)


def one_by_one(objective: HeadsObjective, batch: Batch, kind: str) -> Tensor:
    """Return the heads' loss from its definition: document by document, position by position."""
    base, heads, pace = objective.base, objective.heads, objective.loss.pace
    assert base is not None
    output = objective.output
    kept = heads.token_map if heads.token_map is not None else torch.arange(heads.vocab_size)
    sums = [torch.zeros(()) for _ in range(heads.num_heads)]
    counts = [0] * heads.num_heads
    for row in range(len(batch["input_ids"])):
        for segment in range(1, int(batch["segment_ids"][row].max()) + 1):
            here = batch["segment_ids"][row] == segment
            ids, labels = batch["input_ids"][row][here], batch["labels"][row][here]
            positions = torch.arange(len(ids))[None]
            with torch.no_grad():
                hidden = packed_hidden(base, ids[None], positions)
                teacher = output(hidden)[0]
            hidden = heads.contextual(hidden, positions)[0]
            for t in range(len(ids) - 2):
                guesses, reached = [], 1.0
                for i in range(min(heads.num_heads, len(ids) - t - 2)):
                    label = int(labels[t + i + 2])
                    if label == IGNORE:
                        reached = 0.0
                        continue
                    ahead = ids[t + 1 : t + i + 2]
                    features = heads.features(i, hidden[t], ahead)
                    matrix = heads.output_weight(i, output.weight)
                    logits = heads.finish(torch.nn.functional.linear(features, matrix), output)
                    right = float(logits.detach().softmax(-1)[kept == label].sum())
                    reached *= (1 - pace) * right + pace
                    counts[i] += 1
                    far = distance(kind, logits, teacher[t + i + 1], label, kept)
                    guesses.append((i, far, reached))
                for n, (i, far, _) in enumerate(guesses):
                    waiting = sum(reached for *_, reached in guesses[n:])
                    sums[i] = sums[i] + far * (waiting if pace else 1.0)
    decay = 1.0 if pace else objective.loss.decay
    weights = [decay ** (i + 1) for i in range(heads.num_heads)]
    return torch.stack(
        [w * s / max(1, n) for w, s, n in zip(weights, sums, counts, strict=True)]
    ).sum()


@pytest.mark.parametrize(
    ("loss", "pace"),
    [(loss, 0.0) for loss in ("hard", "soft", "tv", "lk_alpha", "lk_lambda")]
    + [("hard", 0.5), ("tv", 0.2)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_head_learns_what_it_will_see(
    kind: str, loss: str, pace: float, make_tiny_llama: Callable[..., LlamaForCausalLM]
) -> None:
    """A token or a teacher one place off, or of the next document: a plausible, worse drafter."""
    objective = build_kind(make_tiny_llama(), kind, heads=loss, pace=pace)
    batch = random_batch(3)
    value, metrics = objective(batch)
    value.backward()
    heads = objective.heads
    found = {name: p.grad.clone() for name, p in heads.named_parameters() if p.grad is not None}
    heads.zero_grad()
    expected = one_by_one(objective, batch, loss)
    expected.backward()
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    assert found.keys() == {name for name, _ in heads.named_parameters()}
    for name, parameter in heads.named_parameters():
        assert parameter.grad is not None
        # rows that no batch reached have no gradient here, and a zero one there
        error = (found[name] - parameter.grad).norm()
        assert error <= 2e-5 * parameter.grad.norm() + 1e-7, name
    assert all(p.grad is None for p in objective.base.parameters())  # type: ignore[union-attr]
    assert 0 <= metrics["head_0/top1"] <= metrics["head_0/top5"] <= 1


def test_shared_rows_pass_gradients_to_a_base_that_is_trained(
    make_tiny_llama: Callable[..., LlamaForCausalLM],
) -> None:
    """Rows taken as constants would train the base without what its heads say of them."""
    found = []
    for as_it_is in (lambda it: it, naive):
        base = make_tiny_llama()
        objective = as_it_is(build_kind(base, "shared_pruned", train_base=True, lambda_0=1.0))
        found.append(gradients(objective, random_batch(3)))
    assert_same(*found)
    alone = build_kind(make_tiny_llama(), "shared_pruned", train_base=True, lambda_0=0.0)
    without = gradients(alone, random_batch(3))
    assert not torch.allclose(found[0]["base.lm_head.weight"], without["base.lm_head.weight"])


@pytest.mark.parametrize("kind", ["hydra", "everything"])
def test_kept_hidden_states_are_the_base_s(
    kind: str, make_tiny_llama: Callable[..., LlamaForCausalLM]
) -> None:
    """Heads trained on states of another position would be trained on another model."""
    base, batch = make_tiny_llama(), random_batch(4)
    online = build_kind(base, kind, heads="soft")
    expected = gradients(online, batch)
    with torch.no_grad():
        hidden = packed_hidden(base, batch["input_ids"], batch["position_ids"])
    offline = HeadsObjective(
        None,
        online.heads,
        LossConfig(heads="soft", chunk_size=16),
        train_base=False,
        output=online.output,
    )
    assert_same(gradients(offline, {**batch, "hidden": hidden}), expected)
    with pytest.raises(ValueError, match="without a base model there must be output"):
        HeadsObjective(None, online.heads, train_base=True, output=online.output)


def test_the_distilled_base_is_held_to_its_original(
    make_tiny_llama: Callable[..., LlamaForCausalLM],
) -> None:
    """With the tuned model as its own teacher the KL is 0 for ever, and nothing holds it."""
    base = make_tiny_llama()
    before = make_tiny_llama()
    add_adapter(base, AdapterConfig(kind="lora", rank=2, dropout=0.0))
    settings = {"lambda_0": 0.5, "base": "distill", "decay": 1.0}
    objective = build_kind(base, "hydra", train_base=True, **settings)
    batch = random_batch(5)
    assert objective(batch)[1]["lm/loss"].abs() < 1e-6  # nothing has moved yet
    with torch.no_grad():
        for parameter in adapter_parameters(base).values():
            parameter.normal_(std=0.3)
    loss, metrics = objective(batch)
    labels = shift_labels(batch["labels"], batch["segment_ids"], 1)
    with torch.no_grad():
        places = (batch["input_ids"], batch["position_ids"])
        now, then = (packed_hidden(model, *places) for model in (base, before))
        p = before.lm_head(then)[labels != IGNORE].log_softmax(-1)
        q = base.lm_head(now)[labels != IGNORE].log_softmax(-1)
    torch.testing.assert_close(metrics["lm/loss"], (p.exp() * (p - q)).sum(-1).mean())
    heads = sum(metrics[f"head_{i}/loss"] for i in range(3))
    torch.testing.assert_close(loss.detach(), metrics["lm/loss"] + 0.5 * heads)
    trained = gradients(objective, batch)
    assert {name for name in trained if name.startswith("base.")} == {
        f"base.{name}" for name in adapter_parameters(base)
    }
