"""Products with packed weights are those of torch, whatever happens to the weights in between."""

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from specheads.models import adapters, packed
from specheads.models.blocks import ZeroLinear
from specheads.models.packed import Kept, PackedLinear, pack_linears, product

LAYOUTS = {"bfloat16": torch.bfloat16, "float32": torch.float32, "cached": torch.float32}


@pytest.fixture(params=LAYOUTS)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Return each dtype whose products are packed here, float32 in both layouts of Intel's."""
    found = LAYOUTS[request.param]
    if not packed._has_kernel(found):
        pytest.skip(f"oneDNN has no {found} here")
    if request.param != "cached":
        monkeypatch.setattr(packed, "_CACHED", 0)
    monkeypatch.setattr(packed, "is_amd", lambda: False)
    return found


def _layer(dtype: torch.dtype, *, bias: bool = True) -> PackedLinear:
    torch.manual_seed(0)
    layer = nn.Linear(96, 160, bias=bias).to(dtype).eval()
    pack_linears(layer)
    assert isinstance(layer, PackedLinear)
    return layer.requires_grad_(False)


def _close(layer: nn.Linear, x: Tensor) -> bool:
    """Tell whether the layer's products are those with its weight as it is now."""
    expected = nn.functional.linear(
        x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double()
    )
    near = 1e-5 if x.dtype == torch.float32 else 1e-2
    with torch.no_grad():
        return torch.allclose(layer(x).double(), expected, rtol=near, atol=near)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 96), (1, 12, 96), (3, 5, 96), (7, 96), (96,), (0, 96)])
def test_products_are_right_for_every_shape(
    shape: tuple[int, ...], dtype: torch.dtype, bias: bool
) -> None:
    """Prevents a layout made for some number of rows from giving other rows wrong numbers."""
    layer = _layer(dtype, bias=bias)
    _close(layer, torch.randn(4, 96, dtype=dtype))  # lays it out
    assert layer._packed is not None
    x = torch.randn(shape, dtype=dtype)
    with torch.no_grad():
        assert layer(x).shape == (*shape[:-1], 160)
    assert _close(layer, x)


def _in_place(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(-2)


def _replaced(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(-layer.weight.detach())


def _loaded(layer: nn.Linear) -> None:
    layer.load_state_dict({key: -value for key, value in layer.state_dict().items()})


def _stepped(layer: nn.Linear) -> None:
    """Step as training does, whose fused kernel no counter sees; the loss may read the weight."""
    layer.requires_grad_()
    layer.weight.sum().backward()
    torch.optim.AdamW(layer.parameters(), lr=1.0, fused=True).step()


def _stepped_and_frozen(layer: nn.Linear) -> None:
    adapters.require_grad(cast(Any, layer), True)
    _stepped(layer)
    adapters.require_grad(cast(Any, layer), False)


def _wider(layer: nn.Linear) -> None:
    layer.double()


@pytest.mark.parametrize(
    "change", [_in_place, _replaced, _loaded, _stepped, _stepped_and_frozen, _wider]
)
def test_a_changed_weight_is_not_multiplied_as_it_was(
    change: Callable[[nn.Linear], None], dtype: torch.dtype
) -> None:
    """Prevents figures of a base in training that are those of the base it was before."""
    layer = _layer(dtype)
    assert _close(layer, torch.randn(4, 96, dtype=dtype))
    change(layer)
    assert _close(layer, torch.randn(4, 96, dtype=layer.weight.dtype))


def test_gradients_are_formed_as_ever(dtype: torch.dtype) -> None:
    """Prevents heads behind the base's output matrix from learning nothing, without an error."""
    layer, x = _layer(dtype), torch.randn(4, 96, dtype=dtype, requires_grad=True)
    assert _close(layer, x.detach())
    layer(x).sum().backward()
    assert layer._packed is None
    expected = layer.weight.detach().double().sum(0).expand(4, -1)
    assert x.grad is not None
    near = 1e-5 if dtype == torch.float32 else 1e-2
    assert torch.allclose(x.grad.double(), expected, rtol=near, atol=near)


def test_a_copy_has_all_but_the_packed_weight(dtype: torch.dtype) -> None:
    """Prevents torch's refusal to copy what oneDNN keeps, where a base is copied to measure it."""
    layer, x = _layer(dtype), torch.randn(4, 96, dtype=dtype)
    assert _close(layer, x)
    other = copy.deepcopy(layer)
    assert other._packed is None and _close(other, x)
    assert other.state_dict().keys() == {"weight", "bias"}


def test_only_plain_layers_within_the_memory(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Prevents a layer that computes otherwise from being replaced, and a machine from swapping."""

    class Other(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    parts = nn.Sequential(Other(96, 96), nn.Linear(96, 96)).to(dtype)
    parts.append(nn.Linear(96, 96, dtype=torch.float64))
    parts.append(nn.Linear(64, 64, dtype=dtype))  # torch's own library for one row of it
    parts.append(ZeroLinear(96, 96, dtype=dtype))  # starts otherwise, computes the same
    pack_linears(parts)
    packs = [isinstance(part, PackedLinear) for part in parts]
    assert packs == [False, True, False, False, True]
    monkeypatch.setattr(packed, "_physical_memory", lambda: 8 * 96 * 96)
    large = nn.Linear(96, 96).to(dtype)
    pack_linears(large)
    assert type(large) is nn.Linear


def test_many_rows_alone_lay_nothing_out(dtype: torch.dtype) -> None:
    """Prevents a run that collects features from holding its base twice for nothing."""
    layer = _layer(dtype)
    assert _close(layer, torch.randn(packed.MOST_ROWS + 1, 96, dtype=dtype))
    assert layer._packed is None


def test_few_rows_in_float32_keep_their_bits_on_intel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents plain decoding in float32 from being slower, and other than without packing."""
    monkeypatch.setattr(packed, "is_amd", lambda: False)
    layer = _layer(torch.float32)
    assert _close(layer, torch.randn(4, 96))
    for shape in ((1, 96), (3, 1, 96)):
        x = torch.randn(shape)
        with torch.no_grad():  # else nothing is packed
            assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("rows", [1, 3, 4, packed._MOST_CACHED_ROWS + 1])
@pytest.mark.parametrize("cached", [True, False])
def test_float32_is_onednns_with_any_number_of_rows_on_amd(
    rows: int, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents steps that MKL multiplies in half as long again, or twice as long."""
    if not packed._has_kernel(torch.float32):
        pytest.skip("oneDNN has no float32 here")
    monkeypatch.setattr(packed, "is_amd", lambda: True)
    weight, x = torch.randn(160, 96), torch.randn(rows, 96)
    laid_out = torch.ops.mkldnn._reorder_linear_weight(weight, packed._FEW_ROWS)
    expected = torch.ops.mkldnn._linear_pointwise.default(x, laid_out, None, "none", [], "")
    assert torch.equal(product(weight, cached=cached)(x), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_product_alone_is_the_layers(dtype: torch.dtype) -> None:
    """Prevents heads that share rows of the base's matrix from guessing by other numbers."""
    torch.manual_seed(0)
    weight = torch.randn(160, 96).to(dtype)
    x = torch.randn(5, 1, 96)
    expected = nn.functional.linear(x.to(dtype).double(), weight.double())
    assert torch.allclose(product(weight)(x).double(), expected, rtol=1e-2, atol=1e-2)
    assert torch.allclose(product(weight.t().contiguous().t())(x).double(), expected, atol=1e-1)


@pytest.mark.parametrize("rows", [1, 3, 4, 12, 60])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cached", [True, False])
def test_joint_products_are_those_of_each(
    dtype: torch.dtype, rows: int, bias: bool, cached: bool
) -> None:
    """Prevents keys that are made by the queries' weight, where few rows go another way."""
    torch.manual_seed(0)
    weights = [torch.randn(size, 96).to(dtype) for size in (160, 96, 64)]
    biases = [torch.randn(len(each)).to(dtype) if bias else None for each in weights]
    x = torch.randn(rows, 96).to(dtype)
    each = [nn.functional.linear(x, *pair) for pair in zip(weights, biases, strict=True)]
    found = product(*weights, biases=biases, cached=cached)(x)
    assert torch.allclose(found, torch.cat(each, dim=-1), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "change", [_in_place, _replaced, _loaded, _stepped, _stepped_and_frozen, _wider]
)
def test_a_kept_product_is_that_of_the_weight_as_it_is(
    change: Callable[[nn.Linear], None], dtype: torch.dtype
) -> None:
    """Prevents heads from guessing with rows of the matrix that the base had before training."""
    torch.manual_seed(0)
    layer, rows = nn.Linear(96, 160, bias=False, dtype=dtype), torch.arange(0, 160, 2)
    layer.requires_grad_(False)
    kept, x = Kept(), torch.randn(5, 1, 96)

    def right() -> bool:
        expected = nn.functional.linear(x.double(), layer.weight.detach()[rows].double())
        made = kept.of([layer.weight, rows], lambda: product(layer.weight[rows]))
        found = made(x).double()
        return torch.allclose(found, expected, rtol=2e-2, atol=1e-1)

    assert right() and right()
    change(layer)
    assert right()
    rows.add_(1)
    assert right()


def test_a_product_is_kept_and_not_copied() -> None:
    """Prevents laying out megabytes for every text, and heads' copies that share what one made."""
    weight, rows = torch.randn(160, 96, dtype=torch.bfloat16), torch.arange(80)
    kept = Kept()

    def of(kept: Kept, *sources: Tensor) -> Callable[[Tensor], Tensor]:
        return cast(Callable[[Tensor], Tensor], kept.of(sources, lambda: product(sources[0])))

    made = of(kept, weight, rows)
    assert of(kept, weight, rows) is made
    assert of(kept, weight) is not made
    assert of(kept, weight[:80]) is not of(kept, weight), "a view begins at the same address"
    assert of(copy.deepcopy(kept), weight, rows) is not of(kept, weight, rows)
