"""The embedded model on its own held-out prompts: every way to decode writes the same tokens."""

from __future__ import annotations

import pytest
import torch

from specheads.attention.tree import default_tree
from specheads.decoding.loop import decode, plain_decode
from specheads.drafters.heads import HeadsDrafter
from specheads.measure.clock import Prompt, read_prompts
from specheads.models.base import end_tokens, load_base_model, load_tokenizer
from specheads.models.heads import MedusaHeads
from specheads.models.output import output_layer
from specheads.system.files import tinycode_dir
from specheads.verification.sampling import Sampler

NUM_PROMPTS, MAX_NEW_TOKENS = 40, 128


@pytest.fixture(scope="module")
def embedded() -> tuple[torch.nn.Module, list[Prompt], tuple[int, ...]]:
    """Return the embedded model in float32, its held-out prompts, and its end of text."""
    base = load_base_model("tinycode", dtype=torch.float32).eval()
    tokenizer = load_tokenizer("tinycode")
    prompts, _ = read_prompts(
        tinycode_dir() / "prompts.jsonl", tokenizer, NUM_PROMPTS, max_length=1024, device="cpu"
    )
    assert len(prompts) == NUM_PROMPTS
    return base, prompts, end_tokens(base, tokenizer)


def untrained_drafter(base: torch.nn.Module) -> HeadsDrafter:
    """Return heads whose guesses are mostly wrong: as at step 0, all of them guess one ahead."""
    output = output_layer(base)
    vocab_size, hidden_size = output.weight.shape
    heads = MedusaHeads(4, 1, hidden_size, vocab_size, "own").eval()
    heads.init_from_output(output.weight)
    return HeadsDrafter(heads, output, default_tree(4, 16))


@pytest.mark.parametrize("num_prompts", [2, pytest.param(NUM_PROMPTS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_untrained_heads_write_what_plain_decoding_writes(
    embedded: tuple[torch.nn.Module, list[Prompt], tuple[int, ...]],
    temperature: float,
    num_prompts: int,
) -> None:
    """A cache or mask off by one shows on real text of real length, not on tiny random models."""
    base, prompts, eos = embedded
    drafter = untrained_drafter(base)
    lengths = []
    for seed, prompt in enumerate(prompts[:num_prompts]):
        request = {
            "max_new_tokens": MAX_NEW_TOKENS,
            "sampler": Sampler(temperature=temperature, seed=seed),
            "eos_token_ids": eos,
        }
        plain = plain_decode(base, prompt.input_ids, **request)
        tree = decode(base, drafter, prompt.input_ids, **request)
        assert tree.new_tokens == plain.new_tokens, prompt.id
        lengths += tree.accept_lengths
        if temperature == 0:
            ids = base.generate(
                prompt.input_ids,
                attention_mask=torch.ones_like(prompt.input_ids),
                do_sample=False,
                max_new_tokens=MAX_NEW_TOKENS,
            )
            assert ids[0, prompt.input_ids.shape[1] :].tolist() == plain.new_tokens, prompt.id
    # both branches of the loop must have been walked
    assert min(lengths) == 1
    assert max(lengths) > 1
