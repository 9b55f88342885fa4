"""Smaller heads of trained ones, as ``python -m specheads.export`` is asked for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specheads.config import ConfigError, ExportConfig

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from specheads.data.rows import Record
    from specheads.models.kinds import Heads


def changed(
    config: ExportConfig,
    heads: Heads,
    tokenizer: PreTrainedTokenizerBase,
    records: list[Record],
) -> tuple[Heads, dict[str, Any]]:
    """Return the heads that are asked for, and what the new export says about how they came."""
    from specheads import hardware
    from specheads.models.compress import low_rank_heads, pruned_heads, relative_errors
    from specheads.models.mtp import MtpHeads

    if config.lm_head == "keep" or isinstance(heads, MtpHeads):
        return heads, {}
    try:
        if config.lm_head == "low_rank":
            smaller = low_rank_heads(heads.to(hardware.pick_device(config.device)), config.rank)
            errors = relative_errors(heads, smaller)
            for i, error in enumerate(errors):
                print(f"head {i}: relative error of its output matrix {error:.4f}")
            return smaller, {"rank": config.rank, "relative_errors": errors}
        kept, coverage = _most_frequent(config, heads, tokenizer, records)
        return pruned_heads(heads, kept), {"num_kept": config.num_kept, **coverage}
    except ValueError as error:
        raise ConfigError(f"{config.checkpoint}: {error}") from None


def _most_frequent(
    config: ExportConfig,
    heads: Heads,
    tokenizer: PreTrainedTokenizerBase,
    records: list[Record],
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the tokens to keep, and how much of the counted answers they are; prints that."""
    import numpy as np
    from tqdm import tqdm

    from specheads.data.chat import Encoder
    from specheads.losses import IGNORE
    from specheads.training.parts import most_frequent

    encode = Encoder(tokenizer)
    documents = [encode(record) for record in tqdm(records, unit="record", disable=None)]
    learned = np.concatenate([document.labels for document in documents])
    learned = learned[learned != IGNORE]
    if not len(learned):
        raise ConfigError(f"counted={config.counted}: its records hold no answers")
    kept = most_frequent(documents, heads.vocab_size, config.num_kept)
    share, seen = float(np.isin(learned, kept.numpy()).mean()), len(np.unique(learned))
    print(
        f"the {len(kept):,} kept tokens are {share:.2%} of the {len(learned):,} answer tokens of"
        f" {config.counted}"
    )
    if seen < len(kept):
        print(f"only {seen:,} different tokens occur there; the others are kept by their number")
    return kept, {"counted_tokens": len(learned), "counted_share": share}


def choice(config: ExportConfig) -> str:
    """Return the settings that ask for smaller heads, as the user wrote them."""
    if config.lm_head == "low_rank":
        return f"lm_head=low_rank rank={config.rank}"
    return f"lm_head=pruned num_kept={config.num_kept}"


def num_bytes(heads: Heads, dtype: str | None = None) -> int:
    """Return the size of all tensors of ``heads``, as they are or in ``dtype``."""
    from specheads.models.base import torch_dtype

    return sum(
        tensor.numel()
        * (torch_dtype(dtype) if dtype and tensor.is_floating_point() else tensor.dtype).itemsize
        for tensor in heads.state_dict().values()
    )


def size(heads: Heads, dtype: str | None = None) -> str:
    """Return how many parameters ``heads`` have and what they take, in words."""
    parameters = sum(parameter.numel() for parameter in heads.parameters())
    return f"{parameters:,} parameters in {num_bytes(heads, dtype) / 1e6:,.2f} MB"
