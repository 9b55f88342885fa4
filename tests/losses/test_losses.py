"""The fused loss must be the naive one: nothing but these tests checks gradients made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specheads.losses.cross_entropy import (
    IGNORE,
    Output,
    count_valid,
    linear_cross_entropy,
    shift_labels,
)
from tests.script_modules import load_script

IMPLEMENTATIONS = ("fused", "naive")


class Watch(TorchDispatchMode):
    """Counts matrix products and remembers the largest result."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.largest = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


def problem(
    num_rows: int = 200, size: int = 24, vocab: int = 130, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Return arguments of the loss: a third of the rows ignored, two groups or five."""
    generator = torch.Generator().manual_seed(num_rows)
    groups = 2 if num_rows % 5 else 5
    labels = torch.randint(0, vocab, (num_rows,), generator=generator)
    labels[torch.rand(num_rows, generator=generator) < 0.3] = IGNORE
    return {
        "hidden": torch.randn(num_rows, size, generator=generator).to(dtype).requires_grad_(),
        "weight": torch.randn(vocab, size, generator=generator).to(dtype).requires_grad_(),
        "labels": labels.view(groups, num_rows // groups),
        "row_weight": torch.rand(groups, num_rows // groups, generator=generator) / num_rows,
    }


def loss_of(
    hidden: Tensor, weight: Tensor, labels: Tensor, row_weight: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return loss and statistics; the options are those of the output and of the loss.

    ``implementation`` is ``fused`` or ``naive``, the obvious one that holds all logits.
    """
    losses = {"fused": linear_cross_entropy, "naive": load_script("references").all_logits}
    loss = losses[options.pop("implementation", "fused")]
    facts = {key: options.pop(key) for key in ("bias", "scale", "softcap") if key in options}
    found: tuple[Tensor, Tensor] = loss(
        hidden, Output(weight, **facts), labels, row_weight, **options
    )
    return found


def with_bias(p: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with an output bias."""
    bias = torch.linspace(-1, 1, p["weight"].shape[0]).to(p["weight"].dtype)
    return {**p, "bias": bias.requires_grad_()}


def wide(p: dict[str, Any]) -> dict[str, Any]:
    """Return the same numbers in float64."""
    return {
        key: value.detach().double().requires_grad_(value.requires_grad)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for key, value in p.items()
    }


def run(p: dict[str, Any], outer: float = 1.0, **options: Any) -> dict[str, Tensor]:
    """Return loss, statistics, and the gradients of ``outer * loss`` by argument."""
    tensors = {k: v for k, v in p.items() if isinstance(v, Tensor) and v.requires_grad}
    loss, stats = loss_of(**p, **options)
    grads = torch.autograd.grad(loss * outer, list(tensors.values()))
    return {"loss": loss.detach(), "stats": stats, **dict(zip(tensors, grads, strict=True))}


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference relative to that of ``expected``."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_implementation_is_the_same_loss(
    implementation: str, biased: bool, softcap: float | None
) -> None:
    """A wrong factor in one implementation would only show as slightly worse training."""
    p = with_bias(problem()) if biased else problem()
    options = {"scale": 0.6, "softcap": softcap}
    expected = run(wide(p), outer=3.0, implementation="naive", **options)
    found = run(p, outer=3.0, implementation=implementation, chunk_size=64, **options)
    for name, value in expected.items():
        assert distance(found[name], value) < 1e-5, name
    assert torch.equal(found["stats"][:, 1:], expected["stats"][:, 1:].float())


@pytest.mark.parametrize("chunk_size", [0, 1, 7, 64, 1000])
def test_chunk_size_changes_nothing(chunk_size: int) -> None:
    """The last chunk is shorter and the first one fills the buffers: both are easy to get wrong."""
    p = problem(num_rows=65)
    expected = run(wide(p), implementation="naive")
    found = run(p, chunk_size=chunk_size)
    for name, value in expected.items():
        assert distance(found[name], value) < 1e-5, name


def test_no_row_is_skipped_where_all_are_valid() -> None:
    """Held-out rows are chosen before: a loss that counts on skipped ones would end with them."""
    p = problem()
    p["labels"] = p["labels"].clamp_min(0)
    expected, found = run(wide(p), implementation="naive"), run(p, chunk_size=33)
    for name, value in expected.items():
        assert distance(found[name], value) < 1e-5, name


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_gradients_against_finite_differences(softcap: float | None) -> None:
    """The naive loss could share a mistake with the fused one; finite differences do not."""
    p = with_bias(wide(problem(num_rows=6, size=3, vocab=7)))
    options: dict[str, Any] = {"softcap": softcap, "scale": 1.3, "chunk_size": 4}
    found, step = run(p, **options), 1e-6
    for name in ("hidden", "weight", "bias"):
        for i in range(p[name].numel()):
            losses = []
            for sign in (1, -1):
                moved = p[name].detach().clone()
                moved.view(-1)[i] += sign * step
                losses.append(loss_of(**{**p, name: moved}, **options)[0].detach())
            slope = float(losses[0] - losses[1]) / (2 * step)
            assert abs(slope - float(found[name].view(-1)[i])) < 1e-8


@pytest.mark.parametrize(
    ("hidden", "weight", "grad", "products"),
    [
        (True, True, True, 3),
        (True, False, True, 2),
        (False, True, True, 2),
        (False, False, True, 1),
        (True, True, False, 1),
    ],
)
def test_no_gradient_is_formed_that_nobody_needs(
    hidden: bool, weight: bool, grad: bool, products: int
) -> None:
    """Evaluation and frozen matrices would silently cost three times the work and V * d memory."""
    p = problem(num_rows=40)
    p["labels"] = p["labels"].clamp_min(0)
    p["hidden"].requires_grad_(hidden)
    p["weight"].requires_grad_(weight)
    with torch.set_grad_enabled(grad), Watch() as watch:
        loss, stats = loss_of(**p, chunk_size=10)
    assert watch.products == 4 * products
    assert loss.requires_grad == (grad and (hidden or weight))
    assert not stats.requires_grad


def test_never_more_than_one_chunk_of_logits() -> None:
    """Holding all logits is the memory the fused loss exists to avoid."""
    p = problem(num_rows=256, size=8, vocab=500)
    with Watch() as watch:
        loss, _ = loss_of(**p, chunk_size=16)
        loss.backward()
    assert watch.largest == 16 * 500


def test_gradients_accumulate_over_micro_batches() -> None:
    """A buffer handed to .grad and then written again would corrupt the first micro-batch."""
    parts = [problem(num_rows=30), problem(num_rows=50)]
    weight = parts[0]["weight"].detach()
    grads = []
    for implementation in ("fused", "naive"):
        shared = weight.clone().requires_grad_()
        for p in parts:
            loss, _ = loss_of(**{**p, "weight": shared}, implementation=implementation)
            (0.37 * loss).backward()
        grads.append(shared.grad)
    assert distance(grads[0], grads[1]) < 1e-5


def test_grad_takes_over_the_buffer_without_a_copy() -> None:
    """A copy of the V * d gradient would be one more buffer of that size at every step."""
    p = problem(num_rows=30)
    loss, _ = loss_of(**p)
    buffer = loss.grad_fn.grads[1].data_ptr()  # type: ignore[union-attr]
    loss.backward()
    assert p["weight"].grad.data_ptr() == buffer


def test_second_backward_is_refused() -> None:
    """The buffers are scaled in place: a second pass would return gradients scaled twice."""
    p = problem(num_rows=10)
    loss, _ = loss_of(**p)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="hands out its gradients once"):
        loss.backward()


def test_double_backward_is_refused() -> None:
    """The fused gradients carry no graph; a gradient penalty on them would silently be zero."""
    p = problem(num_rows=10)
    loss, _ = loss_of(**p)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, p["hidden"], create_graph=True)


def test_bfloat16_sums_chunks_in_float32() -> None:
    """Summed in bfloat16, a gradient stops growing after some hundred chunks of equal size."""
    rows, size = 2048, 16
    p = problem(num_rows=rows, size=size, vocab=40, dtype=torch.bfloat16)
    p["labels"].fill_(3)
    expected = run(wide(p), implementation="naive")
    found = run(p, chunk_size=4)
    assert found["weight"].dtype == torch.bfloat16 and found["loss"].dtype == torch.float32
    for name in ("loss", "weight", "hidden"):
        assert distance(found[name], expected[name]) < 1e-2, name


def test_bfloat16_gradient_is_scaled_exactly() -> None:
    """Multiplied by a factor rounded to bfloat16, every gradient would be off by up to 0.4%."""
    p = problem(num_rows=64, dtype=torch.bfloat16)
    one, third = run(p), run(p, outer=1 / 3)
    factor = torch.tensor(1 / 3)
    for name in ("hidden", "weight"):
        assert torch.equal(third[name], (one[name].float() * factor).bfloat16())


@pytest.mark.parametrize("matrix_dtype", [torch.float16, torch.float32])
def test_float16_gradients_survive_until_the_loss_scale(matrix_dtype: torch.dtype) -> None:
    """Formed in forward, probability / num_valid is below float16's smallest number: all zero."""
    p = problem(num_rows=64, vocab=50, dtype=torch.float16)
    p["hidden"].data.mul_(0.1)
    p["weight"] = p["weight"].detach().to(matrix_dtype).requires_grad_()
    p["row_weight"] = p["row_weight"] * 1e-6
    expected = run(wide(p), outer=2.0**16, implementation="naive")
    found = run(p, outer=2.0**16, chunk_size=16)
    assert distance(found["loss"], expected["loss"]) < 1e-2
    for name in ("weight", "hidden"):
        assert found[name].dtype == p[name].dtype
        assert distance(found[name], expected[name]) < 1e-2, name


def test_float16_weight_gradient_does_not_overflow() -> None:
    """A thousand rows of one label and large activations sum to more than 65504 in a chunk."""
    p = problem(num_rows=1024, size=8, vocab=20, dtype=torch.float16)
    p["labels"].fill_(3)
    p["hidden"] = (p["hidden"].detach() * 0 + 100).requires_grad_()
    p["weight"] = (p["weight"].detach() * 0.001).requires_grad_()
    p["row_weight"].fill_(1e-3)
    expected = run(wide(p), implementation="naive")
    assert distance(run(p)["weight"], expected["weight"]) < 1e-2


def test_autocast_decides_the_dtype_of_the_products() -> None:
    """Custom functions are not autocast: without care the products run in float32, unseen."""
    p = problem()
    expected = run(wide(p), implementation="naive")
    with torch.autocast("cpu", torch.bfloat16):
        found = run(p, chunk_size=64)
        reference = run(p, implementation="naive")
    for name in ("loss", "weight", "hidden"):
        assert found[name].dtype == torch.float32
        assert 1e-5 < distance(found[name], expected[name]) < 1e-2, name
        assert distance(found[name], reference[name]) < 1e-2, name


def test_narrow_hidden_states_under_a_wide_matrix() -> None:
    """A frozen bfloat16 base with float32 heads mixes dtypes in every step."""
    p = problem()
    p["hidden"] = p["hidden"].detach().bfloat16().requires_grad_()
    expected = run(wide(p), implementation="naive")
    found = run(p)
    assert found["hidden"].dtype == torch.bfloat16 and found["weight"].dtype == torch.float32
    assert distance(found["weight"], expected["weight"]) < 1e-5
    assert distance(found["hidden"], expected["hidden"]) < 1e-2


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_rows", [0, 12])
def test_no_valid_label_gives_zero_not_nan(num_rows: int, implementation: str) -> None:
    """A micro-batch of prompts alone divides zero by zero; the NaN then ends the run."""
    p = problem(num_rows=num_rows)
    p["labels"].fill_(IGNORE)
    found = run(p, implementation=implementation)
    assert all(float(found[name].abs().sum()) == 0.0 for name in ("loss", "weight", "hidden"))
    assert float(found["stats"].nan_to_num().abs().sum()) == 0.0


def test_large_logits_stay_finite() -> None:
    """exp() of an unshifted logit overflows at 89."""
    p = problem()
    with torch.no_grad():
        p["weight"].mul_(1e4)
    expected, found = run(wide(p), implementation="naive"), run(p)
    assert distance(found["loss"], expected["loss"]) < 1e-5
    assert distance(found["weight"], expected["weight"]) < 1e-3  # logits of 1e5 in float32


def test_hits_with_ties() -> None:
    """bfloat16 logits tie often; counting every tie as a hit would flatter top-1."""
    logits = torch.tensor([[2.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0]]).repeat(4, 1)
    labels = torch.tensor([0, 1, 2, IGNORE])
    for implementation in ("fused", "naive"):
        _, stats = loss_of(
            logits, torch.eye(7), labels, torch.ones(4), implementation=implementation
        )
        assert stats[0, 1:].tolist() == [1.0, 3.0]


def test_fewer_than_five_tokens_are_all_in_the_top_five() -> None:
    """topk(5) of a vocabulary of three raises; the rank does not."""
    _, stats = loss_of(torch.randn(6, 4), torch.randn(3, 4), torch.arange(6) % 3, torch.ones(6))
    assert stats[0, 2] == 6


def test_ranks_are_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a large vocabulary the rows of a chunk are compared in parts; none may be lost."""
    p = problem()
    expected = run(p)["stats"]
    monkeypatch.setattr("specheads.losses.fused._COMPARED", 3 * p["weight"].shape[0])
    assert torch.equal(run(p)["stats"], expected)


def test_head_labels_on_packed_counting_sequences() -> None:
    """Labels shifted across documents or off by one train every head on the wrong token."""
    lengths, num_heads = [5, 1, 7, 3], 4
    segment_ids = torch.tensor([[n + 1 for n, length in enumerate(lengths) for _ in range(length)]])
    segment_ids = F.pad(segment_ids, (0, 4))
    labels = torch.arange(segment_ids.shape[1])[None] + 100 * segment_ids
    for offset in range(1, num_heads + 2):
        shifted = shift_labels(labels, segment_ids, offset)
        for t, segment in enumerate(segment_ids[0].tolist()):
            target = t + offset
            inside = target < len(segment_ids[0]) and segment_ids[0, target] == segment != 0
            assert shifted[0, t] == (labels[0, target] if inside else IGNORE)
    expected = [sum(max(0, length - o) for length in lengths) for o in range(1, num_heads + 2)]
    assert count_valid(labels, segment_ids, num_heads).tolist() == expected


def test_masked_targets_stay_masked() -> None:
    """A position counts if its *target* is to be learned, whatever its own label is."""
    labels = torch.tensor([[IGNORE, IGNORE, 7, 8, IGNORE]])
    segment_ids = torch.ones_like(labels)
    assert shift_labels(labels, segment_ids, 2).tolist() == [[7, 8, IGNORE, IGNORE, IGNORE]]
    assert shift_labels(labels, segment_ids, 9).tolist() == [[IGNORE] * 5]


def test_misuse_names_both_numbers() -> None:
    """Shapes that broadcast would give a loss, only not the right one."""
    p = problem(num_rows=10)
    for change, message in (
        ({"labels": p["labels"][:4]}, r"labels has shape \(4, 2\), hidden has 10 rows"),
        ({"row_weight": torch.ones(1)}, r"row_weight has shape \(1,\), labels \(5, 2\)"),
        ({"weight": p["weight"][:, :5]}, r"\(10, 24\) and weight \(130, 5\)"),
        ({"bias": torch.ones(1)}, "bias has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            loss_of(**{**p, **change})
    with pytest.raises(ValueError, match="offset"):
        shift_labels(torch.zeros(1, 4), torch.ones(1, 4), 0)
    with pytest.raises(ValueError, match="differ"):
        shift_labels(torch.zeros(1, 4), torch.ones(1, 5), 1)


def test_labels_out_of_range_are_an_error() -> None:
    """A negative label other than IGNORE must not index from the end of the vocabulary."""
    p = problem(num_rows=10)
    for bad in (-1, 130):
        p["labels"][0, 0] = bad
        with pytest.raises((IndexError, RuntimeError)):
            loss_of(**p)
