"""Fixtures shared by all tests: tiny random models, a byte tokenizer, small files; no downloads.

Everything here is offline, seeded, and fast (a tiny model builds in milliseconds).
"""

from __future__ import annotations

import gc
import json
import os
import random
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

# before transformers, wandb and datasets are imported anywhere
os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    WANDB_MODE="offline",
    WANDB_SILENT="true",
    TOKENIZERS_PARALLELISM="false",
)

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

# torch takes seconds to import, and the process that hands out the tests has no use for it
if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from specheads.models.heads import MedusaHeads
    from specheads.models.output import OutputLayer

# the default run draws the same examples everywhere; `make fuzz` (scripts/fuzz.py) draws at random
_ANY_SPEED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "database": None}
settings.register_profile("default", derandomize=True, print_blob=False, **_ANY_SPEED)
settings.register_profile("fuzz", derandomize=False, print_blob=True, **_ANY_SPEED)
settings.load_profile("default")

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>")
TINY_VOCAB_SIZE = 272  # the tokenizer has 262: embeddings padded to a round size are normal

# bos, then each message behind its role's token; answers close with eos, and the
# `generation` block marks exactly the tokens the assistant has to produce
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

TINY_MESSAGES = (
    ("add", "def add(a, b):", "    return a + b"),
    ("sub", "def sub(a, b):", "    return a - b"),
    ("mul", "def mul(a, b):", "    return a * b"),
    ("neg", "def neg(a):", "    return -a"),
    ("inc", "def inc(a):", "    return a + 1"),
    ("dec", "def dec(a):", "    return a - 1"),
    ("sqr", "def sqr(a):", "    return a * a"),
    ("idt", "def idt(a):", "    return a"),
)


def redraw(model: torch.nn.Module, std: float = 0.1, seed: int = 0) -> None:
    """Draw all weights anew with ``std``: a model at its small default init is degenerate.

    Attention is then nearly uniform and logits nearly equal, so that a wrong mask or position
    would change nothing a test can see. Norm weights are drawn around 1.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator) * std
            param.copy_(noise + 1.0 if "norm" in name and name.endswith("weight") else noise)


def build_tiny_llama(seed: int = 0, std: float = 0.1, **overrides: Any) -> LlamaForCausalLM:
    """Build a random two-layer Llama (hidden 32, 4 heads, 2 KV heads, context 512) in eval mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": TINY_VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 257,
        "eos_token_id": 258,
        "pad_token_id": 256,
        "tie_word_embeddings": False,
        "attn_implementation": "sdpa",
        **overrides,
    }
    model = LlamaForCausalLM(LlamaConfig(**settings))
    redraw(model, std, seed)
    return model.eval()


def build_byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per byte (ids 0..255) and six special tokens after them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = _byte_alphabet()
    vocab = {char: byte for byte, char in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def _byte_alphabet() -> list[str]:
    # GPT-2's printable stand-ins for the 256 bytes, in byte order
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(others)) for byte in range(256)]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for another order."""
    parser.addoption(
        "--shuffle", type=int, metavar="SEED", help="files and their tests in disorder"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs and earlier imports from tests, which must give the same on every machine.

    Tests that are not for GPUs compare with tensors on the CPU, and what Hypothesis draws must not
    depend on the tests that this process ran before.
    """
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if config.getoption("--hypothesis-profile") != "fuzz":
        # it also draws constants of the modules imported so far: they stay unknown to it
        providers._get_local_constants = lambda: providers._local_constants


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle the files, and the tests within each, if asked."""
    if (seed := config.getoption("--shuffle")) is None:
        return
    files = [list(tests) for _, tests in groupby(items, key=lambda item: item.path)]
    order = random.Random(seed)
    order.shuffle(files)
    for tests in files:
        order.shuffle(tests)
    items[:] = [test for tests in files for test in tests]


def pytest_collection_finish() -> None:
    """Keep what is imported and collected out of every later garbage collection; have fewer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # by default a twelfth of the time goes into looking for cycles


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> None:
    """Let no fixture that several tests share depend on which of them came first."""
    import torch

    if fixturedef.scope != "function":
        torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    import torch

    # tiny matrices: more threads only cost, and results must not depend on the machine
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_the_disk() -> Iterator[None]:
    # what a power cut would take away no test can see, and an export waits for dozens of files
    patch = pytest.MonkeyPatch()
    patch.setattr(os, "fsync", lambda handle: None)
    yield
    patch.undo()


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # digests of temporary files do not belong in the user's ~/.cache/specheads
    patch = pytest.MonkeyPatch()
    patch.setenv("SPECHEADS_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.fixture
def make_tiny_llama() -> Callable[..., LlamaForCausalLM]:
    """Return ``build(seed=0, std=0.1, **config_overrides)`` for random tiny Llama models."""
    return build_tiny_llama


@pytest.fixture
def tiny_llama() -> LlamaForCausalLM:
    """Return a fresh random tiny Llama in float32 and eval mode; tests may change it."""
    return build_tiny_llama()


Medusa: TypeAlias = "tuple[LlamaForCausalLM, MedusaHeads, OutputLayer]"


@pytest.fixture
def medusa(tiny_llama: LlamaForCausalLM) -> Medusa:
    """Return a base with three heads that differ from one another and hit now and then."""
    import torch

    from specheads.models.heads import MedusaHeads
    from specheads.models.output import output_layer

    output = output_layer(tiny_llama)
    heads = MedusaHeads(3, 1, 32, 272)
    with torch.no_grad():
        heads.init_from_output(output.weight)
        for i, parameter in enumerate(heads.parameters()):
            parameter += 0.02 * (1 + i % 3) * torch.randn_like(parameter)
    return tiny_llama, heads.eval(), output


def three_prompts() -> list[Tensor]:
    """Return prompts of several lengths."""
    import torch

    return [torch.randint(0, 256, (1, size)) for size in (5, 17, 3)]


@pytest.fixture(scope="session")
def redraw_weights() -> Callable[..., None]:
    """Return ``redraw(model, std=0.1, seed=0)`` for models of other architectures."""
    return redraw


@pytest.fixture
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a fresh byte tokenizer whose chat template marks the assistant's tokens."""
    return build_byte_tokenizer()


@pytest.fixture
def make_byte_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """Return ``build(chat_template=...)`` for byte tokenizers with other templates."""
    return build_byte_tokenizer


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model and its tokenizer, usable as model.name; read only."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    build_tiny_llama().save_pretrained(path)
    build_byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tiny_jsonl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a .jsonl of 32 short records: messages, prompt/completion and text; read only."""
    path = tmp_path_factory.mktemp("data") / "tiny.jsonl"
    lines: list[dict[str, Any]] = []
    for name, question, answer in TINY_MESSAGES:
        roles = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        lines += [
            {"id": f"chat/{name}", "messages": roles},
            {"id": f"chat2/{name}", "messages": [*roles, *roles]},
            {"id": f"pair/{name}", "prompt": question + "\n", "completion": answer},
            {"id": f"text/{name}", "text": f"{question}\n{answer}\n"},
        ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
