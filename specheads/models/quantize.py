"""Quantised bases: 4-bit NF4 and 8-bit by bitsandbytes, others as their own config.json says.

NF4 with double quantisation: arXiv:2305.14314, section 3. 8-bit: arXiv:2208.07339, section 2, one
scale per row of activations and of weights, without the outliers of its section 3: which columns
are outliers depends on all tokens of a pass, later ones too, so that a token's logits would
depend on what is verified beside it. Bases with strong outliers (above 6 billion parameters there)
are better off in NF4. Output matrix and embeddings stay in the model's dtype, because heads and
losses read the matrix itself.
"""

from __future__ import annotations

import logging
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from specheads.config import ConfigError
from specheads.system.errors import need

METHODS = ("nf4", "int8")


def bnb_config(quantization: str, dtype: torch.dtype) -> BitsAndBytesConfig | None:
    """Return what transformers is given for ``nf4`` or ``int8``, None for ``none``.

    Args:
        quantization: ``model.quantization``.
        dtype: of the matrix products, and of what is not quantised.

    Raises:
        ConfigError: if bitsandbytes is not installed.
    """
    if quantization == "none":
        return None
    need_bitsandbytes(f"model.quantization={quantization}")
    if quantization == "nf4":
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)


def need_bitsandbytes(setting: str) -> None:
    """Check that bitsandbytes is installed, and keep it quiet.

    Raises:
        ConfigError: naming the ``setting`` that needs it.
    """
    need("bitsandbytes", "quant", setting)
    quiet_bitsandbytes()


def quiet_bitsandbytes() -> None:
    """Keep back a warning at import and one for every int8 product; both name what is normal."""
    for name in ("bitsandbytes.autograd._functions", "bitsandbytes.backends.cpu.ops"):
        logging.getLogger(name).setLevel(logging.ERROR)


def check_own_quantization(name: str, own: dict[str, Any] | None, quantization: str) -> None:
    """Check, before any weight is read, that a base is not quantised twice.

    Where the library of its own quantisation is missing, transformers names it.

    Args:
        name: of the base, for the message.
        own: ``quantization_config`` of its config.json, None where there is none.
        quantization: ``model.quantization``.

    Raises:
        ConfigError: if it is quantised already, and to be quantised again.
    """
    if own is not None and quantization != "none":
        method = str(own.get("quant_method", "bitsandbytes"))
        raise ConfigError(
            f"model.quantization={quantization}: {name} is quantised already ({method});"
            " leave model.quantization=none"
        )


def prepare_quantized(model: PreTrainedModel) -> None:
    """Make a freshly loaded quantised base exact and quiet.

    On a CPU with AVX512-BF16, bitsandbytes repacks 4-bit weights at their first forward in eval
    mode: products are in bfloat16 from then on whatever the dtype, no gradient passes them, and
    ``state_dict`` gives other numbers than were loaded. And in training mode its 8-bit layers leave
    their activations unrounded on a CPU, so that another model is trained than decodes. Exactness
    comes before that speed, and before outliers (see above) in a base that asks for them.

    Raises:
        ConfigError: if the output matrix itself is quantised.
    """
    for module in model.modules():
        if is_quantized_linear(module):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010 - not nn.Module's
            if type(module).__name__ == "Linear8bitLt":
                module.eval()
                module.state.threshold = 0.0  # type: ignore[union-attr]
                setattr(module, "train", MethodType(_stay, module))  # noqa: B010
    output = model.get_output_embeddings()
    weight = getattr(output, "weight", None)
    if output is not None and not (isinstance(weight, Tensor) and weight.is_floating_point()):
        raise ConfigError(
            f"{model.name_or_path}: its output matrix is quantised; heads need it as numbers"
        )


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    """Stand in for ``train``: the layer has no dropout, and keeps to what it computes in eval."""
    return module


def quantization_of(model: PreTrainedModel) -> dict[str, Any] | None:
    """Return how ``model`` is quantised, as an export records it; None where it is not.

    ``{"method": "nf4"}`` and ``{"method": "int8"}`` were asked for with ``model.quantization``; any
    other method comes with the base's own files.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        return None
    config = quantizer.quantization_config
    method = getattr(config.quant_method, "value", config.quant_method)
    if quantizer.pre_quantized or method != "bitsandbytes":
        return {"method": str(method), "own": True}
    if config.load_in_8bit:
        return {"method": "int8"}
    return {"method": "nf4", "double_quant": bool(config.bnb_4bit_use_double_quant)}


def is_quantized_linear(module: nn.Module) -> bool:
    """Return whether ``module`` is a linear layer of bitsandbytes."""
    return type(module).__module__.startswith("bitsandbytes.nn")


def plain_weight(module: nn.Module) -> Tensor:
    """Return the matrix of a linear layer as numbers, those of bitsandbytes dequantised.

    Raises:
        ConfigError: if it is quantised in a way that cannot be undone here.
    """
    weight: Any = getattr(module, "weight", None)
    if is_quantized_linear(module):
        import bitsandbytes.functional as bnb

        # peft's own helper leaves an int8 layer on the CPU without its scales
        if (state := getattr(weight, "quant_state", None)) is not None:
            return bnb.dequantize_4bit(weight.data, state)
        scales = weight.SCB if weight.SCB is not None else module.state.SCB  # type: ignore[union-attr]
        return bnb.int8_vectorwise_dequant(weight.data, scales)
    if not (isinstance(weight, Tensor) and weight.is_floating_point()):
        raise ConfigError(
            f"a {type(module).__name__} cannot be dequantised: leave adapter.merge=false"
        )
    return weight.detach()
