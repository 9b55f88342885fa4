"""Figures that others have published, to stand beside measured ones, and what nobody measured here.

Only what was read at its source is here; a figure read off a picture says so. None of them can be
compared with a row of bench.json directly: model, hardware, texts and baseline differ.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """One figure of somebody else's.

    Attributes:
        method: as its authors call it.
        base: base model.
        speedup: over ``baseline``, as it was printed.
        accept_length: tokens per step, as it was printed; empty where none was.
        setup: hardware, precision, batch, temperature and texts, as far as they are given.
        baseline: what it is compared with.
        source: where it stands.
        read: how it was read: as ``text`` or off a ``picture``.
    """

    method: str
    base: str
    speedup: str
    accept_length: str
    setup: str
    baseline: str
    source: str
    read: str = "text"


_SPEC_BENCH = "https://github.com/hemingkx/Spec-Bench (Leaderboard.md, fd2c1cd)"
_A100 = "A100 80 GB, fp16, batch 1, greedy, Spec-Bench (third party, mean of 3 runs)"
_3090 = "RTX 3090, fp16, batch 1, greedy, Spec-Bench (third party, mean of 3 runs)"
_LOOP = "Hugging Face loop, one token per step"
_HYDRA = "https://github.com/zankner/Hydra (assets/hydra_plus_plus_perf.png)"
_HYDRA_SETUP = "batch 1; the picture names no hardware"
_EAGLE3 = "https://arxiv.org/abs/2503.01840"
_DFLASH = "https://arxiv.org/abs/2602.06036"

PUBLISHED = (
    Published("Medusa-1", "Vicuna-7B v1.3", "1.71x", "2.31", _A100, _LOOP, _SPEC_BENCH),
    Published("Medusa-1", "Vicuna-7B v1.3", "1.44x", "2.32", _3090, _LOOP, _SPEC_BENCH),
    Published("Medusa-1", "Vicuna-13B v1.3", "1.80x", "2.39", _A100, _LOOP, _SPEC_BENCH),
    Published("Medusa-1", "Vicuna-33B v1.3", "1.76x", "2.33", _A100, _LOOP, _SPEC_BENCH),
    Published(
        "Medusa, any recipe",
        "Vicuna and Zephyr, 7B to 33B",
        "2.2x to 3.6x",
        "",
        "the authors' own figures",
        "the original model",
        "https://github.com/FasterDecoding/Medusa (README.md)",
    ),
    Published(
        "Medusa-1, top-1 chain",
        "Mistral-7B",
        "1.20x at 1 request, 0.73x at 64",
        "",
        "vLLM, H100, MT-bench, greedy",
        "vLLM without speculation",
        "https://github.com/vllm-project/vllm/pull/4978",
    ),
    Published("Hydra", "Vicuna-7B v1.3", "2.07x", "3.26", _A100, _LOOP, _SPEC_BENCH),
    Published("Hydra", "Vicuna-7B v1.3", "1.91x", "3.26", _3090, _LOOP, _SPEC_BENCH),
    Published("Hydra", "Vicuna-13B v1.3", "2.20x", "3.35", _A100, _LOOP, _SPEC_BENCH),
    Published("Hydra", "Vicuna-33B v1.3", "2.22x", "3.24", _A100, _LOOP, _SPEC_BENCH),
    Published(
        "Hydra", "Vicuna-7B", "2.36x", "3.04", _HYDRA_SETUP, "plain decoding", _HYDRA, "picture"
    ),
    Published(
        "Hydra++", "Vicuna-7B", "2.70x", "3.70", _HYDRA_SETUP, "plain decoding", _HYDRA, "picture"
    ),
    Published("EAGLE-3", "Vicuna-13B v1.3", "3.02x", "5.71", _A100, _LOOP, _SPEC_BENCH),
    Published(
        "EAGLE-3",
        "Vicuna-13B",
        "5.58x",
        "6.65",
        "batch 1, greedy, MT-bench (the authors' table 1)",
        "Hugging Face loop",
        _EAGLE3,
    ),
    Published(
        "EAGLE-3",
        "Llama-3.1-8B-Instruct",
        "4.40x",
        "6.13",
        "batch 1, greedy, MT-bench (the authors' table 1)",
        "Hugging Face loop",
        _EAGLE3,
    ),
    Published(
        "EAGLE-3",
        "Llama-3.1-8B-Instruct",
        "2.36x (373.25 over 158.34 tokens/s)",
        "",
        "SGLang, one H100, MT-bench",
        "SGLang without speculation",
        "https://docs.sglang.io/advanced_features/speculative_decoding.html",
    ),
    Published(
        "EAGLE-3",
        "Llama-3.1-8B-Instruct",
        "1.38x",
        "",
        "SGLang, batch 64",
        "SGLang without speculation",
        _EAGLE3,
    ),
    Published(
        "EAGLE-3, chain",
        "Llama-3.1-8B-Instruct",
        "1.75x at batch 2, 1.01x at 56",
        "",
        "vLLM",
        "vLLM without speculation",
        _EAGLE3,
    ),
    Published(
        "DFlash",
        "Qwen3-8B",
        "up to 6.17x",
        "",
        "the authors' own figures, best of their tasks",
        "plain decoding",
        "https://z-lab.ai/projects/dflash",
    ),
    Published(
        "DFlash",
        "several",
        "over 6x; up to 2.5x that of EAGLE-3",
        "",
        "the authors' own figures (abstract)",
        "plain decoding; EAGLE-3",
        _DFLASH,
    ),
)

NEVER_RUN = (
    "any pretrained base model of 0.5 billion parameters or more: what is measured in this project"
    " are models of a few million parameters, trained here",
    "any GPU: every figure of this project is a CPU's",
    "several GPUs, and decoding that is spread over devices",
    "Medusa, Hydra, EAGLE-3 and DFlash themselves: their published figures are quoted, their code"
    " and checkpoints were not run",
    "vLLM, SGLang, TensorRT-LLM, llama.cpp or TGI serving what is exported here",
)
