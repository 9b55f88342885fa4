"""What vLLM 0.32 or 0.33 needs to draft with :mod:`specheads.vllm_proposer`: settings, and a base.

These proposers guess from the text, without heads, for a base that was tuned together with its
heads or for any other. The folder holds ``speculative_config.json``, the value of
``--speculative-config``, and beside it the base as a plain Hugging Face folder where the recipe
changed it.
"""

from __future__ import annotations

from typing import Any

from specheads.formats import Job
from specheads.formats.serving import Serving, llama_cpp, load, sglang, tensorrt, vllm
from specheads.models.base import torch_dtype
from specheads.models.checkpoint import load_export, save_hf
from specheads.models.manifest import write_json
from specheads.system.files import whole_folder

SETTINGS = "speculative_config.json"
CLASSES = ("SuffixProposer", "NgramProposer", "LookaheadPoolProposer")
COPIED = 8  # tokens guessed per step at most; where nothing was written before, nothing is guessed


def settings(proposer: str = CLASSES[0]) -> dict[str, Any]:
    """Return the value of vLLM's ``--speculative-config`` for one of ``CLASSES``."""
    return {
        "method": "custom_class",
        "model": f"specheads.vllm_proposer.{proposer}",
        "num_speculative_tokens": COPIED,
    }


def write(job: Job) -> list[str]:
    """Write the settings, and a tuned base beside them.

    An original that is unchanged is not written: vLLM loads that one by its own name.
    """
    notes = ["vLLM guesses from the text with it: the heads are not in it"]
    with whole_folder(job.output) as folder:
        if job.info["base"]["tuned"]:
            export = load_export(job.checkpoint, device="cpu")
            dtype = None if job.dtype is None else torch_dtype(job.dtype)
            save_hf(folder, export.base, export.tokenizer, dtype)
            notes.append("the tuned base model lies beside the settings")
        write_json(folder / SETTINGS, settings())
    return notes


def text_copies(place: str, note: str = "", needed: str = "") -> list[Serving]:
    """Return how engines serve a plain model, guessing from the text where they can.

    Args:
        place: the model's folder or name.
        note: for transformers.
        needed: the beginning of vLLM's note.
    """
    needs = "needs specheads in vLLM's environment, and its first model runner: docs/serving.md"
    return [
        Serving(
            "transformers",
            f"{load(place)}.generate(**inputs, prompt_lookup_num_tokens={COPIED})",
            note,
        ),
        vllm(place, settings(), needed + needs),
        sglang(place, "NGRAM", num_draft_tokens=COPIED),
        tensorrt(place, decoding_type="NGram", max_draft_len=COPIED, max_matching_ngram_size=4),
        llama_cpp(f"base.gguf --spec-type ngram-simple --spec-ngram-simple-size-m {COPIED}", place),
    ]


def serve(place: str, base: str, info: dict[str, Any]) -> list[Serving]:
    """Return how engines serve the base model that the settings are for."""
    return text_copies(base, needed="the settings in speculative_config.json; ")
