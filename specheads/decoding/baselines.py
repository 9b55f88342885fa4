"""More baselines beside plain decoding: without batches, without and with compiled passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import CompileConfig, PreTrainedModel

from specheads.decoding.measure import Batch, Decode, Decoded, Method, hf_generate_method


def one_by_one_method(plain: Method) -> Method:
    """Return ``plain`` over the prompts of a batch one after the other, as without batching.

    What a batch gains by itself, before anything is drafted: a decoder that is slower than this has
    no use for its batch. Of one prompt it would be ``plain`` again, so it is left out there.

    Args:
        plain: decodes any batch.
    """
    assert plain.prefill is not None

    def alone(decode: Decode) -> Decode:
        def run(batch: Batch, temperature: float, seed: int) -> list[Decoded]:
            found = []
            for row, (ids, mask) in enumerate(
                zip(batch.input_ids, batch.attention_mask, strict=True)
            ):
                prompt = ids[mask.bool()][None]
                one = Batch(prompt, mask[mask.bool()][None], batch.first + row)
                found += decode(one, temperature, seed + row)
            return found

        return run

    return replace(
        plain,
        name="one_by_one",
        decode=alone(plain.decode),
        prefill=alone(plain.prefill),
        in_batches=True,
    )


def hf_compiled_method(
    base: PreTrainedModel, eos: tuple[int, ...], pad: int | None, max_new_tokens: int
) -> Method:
    """Return ``generate`` with transformers' static cache, for which it compiles its passes.

    It does so by itself on a GPU; on other devices it has to be told.
    """
    on_gpu = base.device.type == "cuda"
    how: Any = CompileConfig(mode="reduce-overhead" if on_gpu else "default")
    how._compile_all_devices = True
    return hf_generate_method(
        base,
        eos,
        pad,
        max_new_tokens,
        name="hf_compiled",
        options={"cache_implementation": "static", "compile_config": how},
        compiled=True,
    )
