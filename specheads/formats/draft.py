"""A draft model as a plain Hugging Face folder, which every engine with a draft slot loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specheads.models.base import load_base_model, load_config, load_tokenizer
from specheads.models.checkpoint import save_plain_model
from specheads.models.draft_files import save_draft
from specheads.models.model_files import read_provenance


def write(
    form: str, checkpoint: str, output: Path, dtype: str | None
) -> tuple[list[str], dict[str, Any]]:
    """Write a draft model again.

    Args:
        form: ``native``, with what specheads knows of its origin; ``draft``, without.
        checkpoint: the draft model's folder.
        output: a new one.
        dtype: of the written tensors; None keeps that of its config.

    Returns:
        What the user has to know, in lines; and what the folder says of its origin.

    Raises:
        ConfigError: if the folder is not whole.
        RunError: if the disk is full.
    """
    info = read_provenance(Path(checkpoint))
    tokenizer = load_tokenizer(checkpoint)
    model = load_base_model(checkpoint, dtype=dtype or recorded_dtype(checkpoint), device="cpu")
    if form == "native":
        base = info["base"]
        save_draft(
            output, model, tokenizer, base_name=base["name"], base_digest=base["digest"],
            base_dtype=base["dtype"], base_revision=base.get("revision"), dtype=dtype,
            training=info["training"], measured=info["measured"],
        )  # fmt: skip
        return ["a draft model, its origin beside it"], info
    save_plain_model(output, model, tokenizer, dtype=dtype)
    trained_for = info["base"]["name"] or "a base model trained from scratch"
    return [f"a draft model for {trained_for}, AutoModelForCausalLM.from_pretrained loads it"], info


def recorded_dtype(name: str) -> str:
    """Return the dtype that a model's config names, float32 where it names none.

    Raises:
        ConfigError: if its config cannot be read.
    """
    config = load_config(name)
    dtype = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    return str(dtype or "float32").removeprefix("torch.")
