"""Gradients of multi-token prediction, against a loop that could not be plainer.

The loop runs transformers' own layers over each document by itself, holds all logits of all heads
at once, takes torch's cross entropy, and calls backward once for all micro-batches.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specheads.config import ConfigError, LossConfig
from specheads.losses.cross_entropy import IGNORE, count_valid
from specheads.models.base import checkpoint_layers
from specheads.models.mtp import MtpHeads, block_config
from specheads.models.output import TRUNK, packed_taps
from specheads.training.engine import lambda_scale
from specheads.training.objectives import Batch, HeadsObjective
from tests import zoo
from tests.script_modules import load_script

LENGTH = 24
ROWS = (((5, 11, 8), (24,)), ((3, 1, 2, 13), (20,), (9, 9)))  # of two micro-batches


class Case(NamedTuple):
    """What is compared with the loop."""

    model: str
    variant: str
    lm_head: str = "shared"
    tied: bool = False
    implementation: str = "fused"
    chunk_size: int = 0
    recompute: bool = False  # the base's layers
    hidden_first: bool = False
    train_base: bool = True


CASES = [
    Case("llama", "parallel", chunk_size=7),
    Case("llama", "causal", tied=True, chunk_size=1, recompute=True),
    Case("llama", "sequential", tied=True, chunk_size=16),
    Case("llama", "sequential", "own", train_base=False),
    Case("llama", "parallel", train_base=False),
    Case("qwen3", "parallel", "own", implementation="naive"),
    Case("qwen3", "causal", tied=True, chunk_size=8),
    Case("qwen3", "sequential", "own", chunk_size=5, recompute=True),
    Case("mistral-window", "parallel", tied=True, recompute=True),
    Case("mistral-window", "causal", "own", chunk_size=100),
    Case("mistral-window", "sequential", implementation="naive", hidden_first=True),
]


def case_name(case: Case) -> str:
    """Return what differs from the defaults."""
    words = [case.model, case.variant, case.lm_head, case.implementation, f"{case.chunk_size}"]
    flags = {
        "tied": case.tied,
        "recompute": case.recompute,
        "hidden_first": case.hidden_first,
        "frozen": not case.train_base,
    }
    return "-".join(words + [name for name, on in flags.items() if on])


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let norms compute in their input's dtype: transformers' round all to float32."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        square = hidden_states.pow(2).mean(-1, keepdim=True)
        found: Tensor = self.weight * hidden_states * torch.rsqrt(square + self.variance_epsilon)
        return found

    for name in ("Llama", "Qwen3", "Mistral"):
        module = importlib.import_module(f"transformers.models.{name.lower()}")
        modeling = importlib.import_module(f"{module.__name__}.modeling_{name.lower()}")
        monkeypatch.setattr(getattr(modeling, f"{name}RMSNorm"), "forward", forward)


def build(case: Case, *, num_heads: int = 3, **options: Any) -> HeadsObjective:
    """Return an objective whose every weight is random."""
    base = zoo.build(case.model, std=0.2, tie_word_embeddings=case.tied, vocab_size=zoo.VOCAB)
    if case.tied:
        base.tie_weights()
    heads = MtpHeads(
        num_heads,
        block_config(base.config),
        zoo.VOCAB,
        variant=case.variant,
        lm_head=case.lm_head,
        hidden_first=case.hidden_first,
    )
    zoo.redraw(heads, seed=2, std=0.2)  # type: ignore[arg-type]
    if case.recompute:
        checkpoint_layers(base)
    settings: dict[str, Any] = {"decay": 0.7, "lambda_0": 0.5, **options}
    loss = LossConfig(**settings, chunk_size=case.chunk_size)
    objective = HeadsObjective(base, heads, loss, train_base=case.train_base).train()
    if case.implementation == "naive":
        load_script("references").by_all_logits(objective)
    return objective


def pack(rows: Sequence[Sequence[Tensor]], masked: float = 0.0, seed: int = 0) -> Batch:
    """Pack documents, given as their tokens, into rows; a share of the labels is ignored."""
    shape = (len(rows), LENGTH)
    ids, positions, segments = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
    for row, documents in enumerate(rows):
        at = 0
        for number, tokens in enumerate(documents, 1):
            span = slice(at, at + len(tokens))
            ids[row, span], segments[row, span] = tokens, number
            positions[row, span] = torch.arange(len(tokens))
            at += len(tokens)
        positions[row, at:] = torch.arange(LENGTH - at)
    generator = torch.Generator().manual_seed(seed)
    ignored = (segments == 0) | (torch.rand(shape, generator=generator) < masked)
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ignored, IGNORE),
        "position_ids": positions,
        "segment_ids": segments,
    }


def random_batches(num_heads: int = 3) -> list[Batch]:
    """Return the micro-batches of one step, with the counts of them all."""
    generator = torch.Generator().manual_seed(7)
    batches = []
    for number, rows in enumerate(ROWS):
        tokens = [
            [torch.randint(0, zoo.VOCAB, (n,), generator=generator) for n in lengths]
            for lengths in rows
        ]
        batches.append(pack(tokens, masked=0.3, seed=number))
    counts = [count_valid(b["labels"], b["segment_ids"], num_heads) for b in batches]
    num_valid = torch.stack(counts).sum(0)
    return [{**batch, "num_valid": num_valid} for batch in batches]


def gradients(objective: nn.Module, batches: Sequence[Batch]) -> dict[str, Tensor]:
    """Return the gradients of a step, a backward pass per micro-batch."""
    objective.zero_grad()
    for batch in batches:
        objective(batch)[0].backward()
    return grads_of(objective)


def grads_of(module: nn.Module) -> dict[str, Tensor]:
    """Return all gradients that there are."""
    named = module.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    """Compare by the norm of the difference."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.norm() > 0, name
        assert (found[name] - value).norm() <= bound * value.norm(), name


def look_back(length: int, window: int | None, like: Tensor) -> Tensor:
    """Return what is added to attention scores [1, 1, T, T]: 0 where a position may look."""
    at = torch.arange(length)
    allowed = at[:, None] >= at
    if window is not None:
        allowed &= at[:, None] - at < window
    return torch.where(allowed, 0.0, -torch.inf).to(like)[None, None]


def plain_features(base: Any, heads: MtpHeads, case: Case, ids: Tensor) -> list[Tensor]:
    """Return what the matrices of base and heads read of one document, [T', d] each.

    Those of a sequential head end where it has no token ahead to read.
    """
    output = base.model(input_ids=ids[None], use_cache=False, output_hidden_states=True)
    final, trunk = output.last_hidden_state, output.hidden_states[-2]
    found, state = [final[0]], final if case.variant == "sequential" else trunk
    window = getattr(base.config, "sliding_window", None)
    for i in range(heads.num_heads):
        layer: Any = heads.layer(i)
        if case.variant == "sequential":
            ahead = base.model.embed_tokens(ids[i + 1 :])[None]
            state = layer.hnorm(state[:, : ahead.shape[1]])
            pair = [state, layer.enorm(ahead)] if case.hidden_first else [layer.enorm(ahead), state]
            state = torch.cat(pair, -1) @ layer.eh_proj.weight.t()
        if not state.shape[1]:
            break
        positions = torch.arange(state.shape[1])[None]
        made = layer.block(
            state,
            attention_mask=look_back(state.shape[1], window, state),
            position_ids=positions,
            position_embeddings=base.model.rotary_emb(state, positions),
        )
        found.append(layer.norm(made)[0])
        state = {"parallel": trunk, "causal": made, "sequential": layer.norm(made)}[case.variant]
    return found


def plain_losses(objective: HeadsObjective, case: Case, batches: Sequence[Batch]) -> list[Tensor]:
    """Return the mean losses of base and heads: all logits at once, over whole documents."""
    base: Any = objective.base
    heads = objective.heads
    assert isinstance(heads, MtpHeads)
    logits: list[list[Tensor]] = [[] for _ in range(heads.num_heads + 1)]
    labels: list[list[Tensor]] = [[] for _ in logits]
    for batch in batches:
        for row, segments in enumerate(batch["segment_ids"]):
            for number in range(1, int(segments.max()) + 1):
                here = segments == number
                ids, wanted = batch["input_ids"][row][here], batch["labels"][row][here]
                for i, hidden in enumerate(plain_features(base, heads, case, ids)):
                    owner: Any = heads.layer(i - 1) if i and case.lm_head == "own" else base
                    matrix = owner.lm_head.weight
                    rows = max(0, len(ids) - 1 - i)
                    logits[i].append(hidden[:rows] @ matrix.t())
                    labels[i].append(wanted[1 + i :])
    return [
        F.cross_entropy(torch.cat(z), torch.cat(y), ignore_index=IGNORE)
        for z, y in zip(logits, labels, strict=True)
    ]


def plain_gradients(
    objective: HeadsObjective, case: Case, batches: Sequence[Batch], factors: Sequence[float]
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the gradients of the loop, and its losses; ``factors`` weigh base and heads."""
    objective = copy.deepcopy(objective).eval()  # nothing is made again in backward
    losses = plain_losses(objective, case, batches)
    num_valid = batches[0]["num_valid"]
    total = torch.stack(
        [loss * rounded(f, n) for loss, f, n in zip(losses, factors, num_valid, strict=True)]
    ).sum()
    total.backward()
    return grads_of(objective), losses


def rounded(factor: float, count: Tensor) -> float:
    """Return ``factor`` as it is when its quotient with ``count`` is rounded to float32."""
    return float((torch.tensor(factor) / count.float()).double() * count)


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_every_gradient_is_that_of_a_plain_loop(case: Case) -> None:
    """A head that sees too much, or a gradient that is lost on its way, trains all the same."""
    objective, batches = build(case).double(), random_batches()
    heads = [0.7, 0.7**2, 0.7**3]
    factors = [1.0, *(0.5 * each for each in heads)] if case.train_base else [0.0, *heads]
    expected, losses = plain_gradients(objective, case, batches, factors)
    found = gradients(objective, batches)
    trained = [name for name, p in objective.named_parameters() if p.requires_grad]
    assert sorted(found) == sorted(trained)
    assert_same(found, expected, 1e-9)
    metrics = [objective(batch)[1] for batch in batches]
    for i, loss in enumerate(losses[1:]):
        share = sum(m[f"head_{i}/loss"] for m in metrics)
        torch.testing.assert_close(share, loss.detach().float(), rtol=1e-6, atol=0)


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize(("step", "weight"), [(0, 0.3), (6, 0.3), (7, 0.1), (9, 0.1)])
def test_deepseeks_weight_is_lambda_over_d(step: int, weight: float) -> None:
    """Forgetting 1 / D, or the fall of lambda, changes a loss that looks as plausible as before."""
    loss = LossConfig(
        decay=1.0, lambda_0=0.3, average=True, lambda_schedule="step", lambda_ramp=0.7
    )
    case = Case("llama", "sequential", tied=True)
    objective = build(case, decay=loss.decay, lambda_0=loss.lambda_0, average=loss.average).double()
    objective.lambda_scale = lambda_scale(step, 0, 10, loss)
    batches = random_batches()
    expected, losses = plain_gradients(objective, case, batches, [1.0] + [weight / 3] * 3)
    assert_same(gradients(objective, batches), expected, 1e-7)  # weights are float32
    total = sum(objective(batch)[0].detach() for batch in batches)
    torch.testing.assert_close(total, losses[0] + weight / 3 * sum(losses[1:]), rtol=1e-7, atol=0)


@pytest.mark.parametrize("variant", ["parallel", "causal", "sequential"])
@pytest.mark.parametrize("lm_head", ["shared", "own"])
def test_autocast_is_near_float32(variant: str, lm_head: str) -> None:
    """Layers that are made again in backward must be made again in bfloat16."""
    objective, batches = build(Case("llama", variant, lm_head)), random_batches()
    expected = gradients(objective, batches)
    objective.zero_grad()
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = objective(batch)
        loss.backward()
    found = grads_of(objective)
    assert all(grad.dtype == torch.float32 for grad in found.values())
    assert_same(found, expected, 0.1)


@pytest.mark.parametrize("variant", ["parallel", "causal", "sequential"])
def test_a_document_learns_nothing_of_its_neighbours(variant: str) -> None:
    """Heads that train across a border learn what no text will show them while decoding."""
    objective = build(Case("llama", variant, tied=True)).double()
    generator = torch.Generator().manual_seed(3)
    ours = [torch.randint(0, zoo.VOCAB, (n,), generator=generator) for n in (9, 10)]
    found = []
    for _ in range(2):  # before and behind, so that the row's end meets its beginning, too
        others = [torch.randint(0, zoo.VOCAB, (n,), generator=generator) for n in (12, 7, 5)]
        batch = pack([[others[0], ours[0]], [ours[1], *others[1:]]])
        for row, foreign in ((0, 1), (1, 2), (1, 3)):
            batch["labels"][row][batch["segment_ids"][row] == foreign] = IGNORE
        loss, metrics = objective(batch)
        assert all(metrics[f"head_{i}/loss"] > 0 for i in range(3))
        found.append({"loss": loss.detach(), **gradients(objective, [batch])})
    assert found[0].keys() == found[1].keys() and len(found[0]) > 20
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-12, atol=1e-15, msg=name)


@pytest.mark.parametrize("variant", ["parallel", "causal", "sequential"])
def test_a_slot_sees_its_own_past_only(variant: str) -> None:
    """One future hidden state in reach, and the loss falls to a level no decoding reaches.

    A sequential head also embeds the token i + 1 ahead, which at the end of a document is another
    document's: the slots where it is have no label.
    """
    base = zoo.build("llama")
    heads = MtpHeads(3, block_config(base.config), zoo.VOCAB, variant=variant).train()
    zoo.redraw(heads, seed=2)  # type: ignore[arg-type]
    lengths = (7, 10, 6)
    batch = pack([[torch.randint(0, zoo.VOCAB, (n,)) for n in lengths]])
    hidden = torch.randn(1, LENGTH, heads.hidden_size, requires_grad=True)
    read = torch.randn(1, LENGTH, heads.hidden_size, requires_grad=True)  # in place of embeddings
    heads.embed = lambda _: read
    found = heads.contextual(hidden, batch["position_ids"], batch["input_ids"])
    segments, at = batch["segment_ids"][0], torch.arange(LENGTH)
    for i in range(3):
        # around the borders of documents, and in the middle of one
        for slot in (0, 1, 5, 6, 7, 8, 11, 15, 16, 17, 20, 21, 22):
            same = segments == segments[slot]
            grads = torch.autograd.grad(
                found[i, 0, slot].square().sum(),
                (hidden, read),
                retain_graph=True,
                allow_unused=True,
            )
            seen = [None if g is None else g[0].any(-1) for g in grads]
            assert seen[0] is not None and torch.equal(seen[0], same & (at <= slot))
            if seen[1] is None:
                assert variant != "sequential"
                continue
            if slot + i + 2 < LENGTH and same[slot + i + 2]:  # there is a label
                first = at[same].min() + 1
                assert torch.equal(seen[1], same & (at >= first) & (at <= slot + i + 1))
            elif same[slot : slot + i + 2].sum() < i + 2:
                assert seen[1][~same].any()  # so that this test would notice


@pytest.mark.parametrize("variant", ["parallel", "causal", "sequential"])
@pytest.mark.parametrize("lm_head", ["shared", "own"])
def test_without_labels_every_gradient_is_zero(variant: str, lm_head: str) -> None:
    """One rank without labels and without gradients, and the others wait for it for ever."""
    objective = build(Case("llama", variant, lm_head))
    short = pack([[torch.tensor([1, 2, 3]), torch.tensor([4])]])  # one label of head 0
    for ignore_all in (False, True):
        if ignore_all:
            short["labels"].fill_(IGNORE)
        grads = gradients(objective, [short])
        assert sorted(grads) == sorted(name for name, _ in objective.named_parameters())
        assert all(bool(grad.isfinite().all()) for grad in grads.values())
        first = [g for name, g in grads.items() if "layers.0." in name and "heads" in name]
        last = [g for name, g in grads.items() if "layers.2." in name and "heads" in name]
        assert not any(g.any() for g in last)
        assert any(g.any() for g in first) != ignore_all


@pytest.mark.parametrize("heads", ["hard", "soft"])
def test_stored_hidden_states_are_those_of_the_trunk(heads: str) -> None:
    """Trained on final hidden states, heads on the trunk would meet others while decoding."""
    batch = pack([[torch.arange(10)]])
    objective = build(Case("llama", "parallel", train_base=False), heads=heads)
    online = objective(batch)[0]
    assert objective.base is not None
    with torch.no_grad():
        final, trunk = packed_taps(
            objective.base, batch["input_ids"], batch["position_ids"], (TRUNK,)
        )
    stored = objective({**batch, "hidden": torch.cat([trunk, final], dim=-1)})[0]
    swapped = objective({**batch, "hidden": torch.cat([final, trunk], dim=-1)})[0]
    assert torch.equal(stored, online) and not torch.allclose(swapped, online)
    with pytest.raises(ValueError, match="32 numbers; those at trunk, final are 64"):
        objective({**batch, "hidden": final})


def test_a_step_needs_something_to_fall_from() -> None:
    """Divided by a lambda of 0, the run would end where the step is."""
    with pytest.raises(ConfigError, match=r"loss.lambda_0"):
        LossConfig(lambda_0=0.0, lambda_schedule="step")
