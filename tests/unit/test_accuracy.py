"""How good the heads' guesses are along texts, beside asking them one position at a time."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from specheads.attention.tree import Tree
from specheads.decoding.loop import plain_decode
from specheads.measure.clock import Decoded, Prompt
from specheads.measure.hits import came_after, measure_accuracy, top_shares
from specheads.models.heads import MedusaHeads
from specheads.models.output import output_layer

NUM_HEADS = 2


def trained(base: LlamaForCausalLM) -> MedusaHeads:
    """Return heads that guess more than nothing."""
    weight = base.get_output_embeddings().weight
    heads = MedusaHeads(NUM_HEADS, 1, weight.shape[1], weight.shape[0])
    with torch.no_grad():
        heads.init_from_output(weight)
        for parameter in heads.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return heads.eval()


@pytest.mark.parametrize("ended", [False, True])
def test_shares_are_those_of_asking_every_position(
    tiny_llama: LlamaForCausalLM, ended: bool
) -> None:
    """Off by one, a head is graded by its neighbour's token, and every curve is a little low."""
    torch.manual_seed(3)
    heads = trained(tiny_llama)
    prompts = [Prompt(str(n), "a", torch.randint(0, 200, (1, n))) for n in (5, 9)]
    texts = []
    for prompt in prompts:
        found = plain_decode(tiny_llama, prompt.input_ids, max_new_tokens=14)
        texts.append(Decoded(found.new_tokens, [1] * 13, ended))
    tree = Tree.from_choices([(0,), (1,), (0, 0)])
    (measured,) = measure_accuracy(
        tiny_llama, heads, output_layer(tiny_llama), tree, prompts, {0.7: texts}
    )
    assert measured["temperature"] == 0.7
    hits = [[0] * 10 for _ in range(NUM_HEADS)]
    counts = [0] * NUM_HEADS
    for prompt, text in zip(prompts, texts, strict=True):
        whole = prompt.input_ids[0].tolist() + text.tokens
        start = prompt.input_ids.shape[1]
        # a text that was cut off hides what its last steps would have gained
        last = len(whole) - (1 if ended else NUM_HEADS + 1)
        for root in range(start, last):
            ids = torch.tensor([whole[:root]])  # the root's own hidden state is not known yet
            with torch.inference_mode():
                hidden = tiny_llama.model(ids).last_hidden_state[0, -1]
                logits = heads.logits(hidden[None], output_layer(tiny_llama), None, None)[:, 0]
            for head in range(NUM_HEADS):
                if root + head + 1 >= len(whole):
                    continue
                counts[head] += 1
                order = logits[head].argsort(descending=True)[:10].tolist()
                came = whole[root + head + 1]
                for k in range(10):
                    hits[head][k] += came in order[: k + 1]
    assert [each["num_positions"] for each in measured["heads"]] == counts
    for head in range(NUM_HEADS):
        expected = [round(hit / counts[head], 4) for hit in hits[head]]
        assert measured["heads"][head]["top"] == expected
    assert measured["choices"] == [[0], [1], [0, 0]]
    first, second, deep = measured["acceptance"]
    assert 0 <= deep <= first <= 1 and 0 <= second <= 1


def test_positions_beyond_the_end_do_not_count() -> None:
    """A guess about nothing counts as wrong, and deep heads look worse than they are."""
    assert came_after(3, 2, 4).tolist() == [[True, True], [True, True], [True, False]]
    ranks = torch.tensor([[0, 1 << 30], [2, 0], [1 << 30, 1 << 30]])
    shares = top_shares(ranks, came_after(3, 2, 4))
    assert [each["num_positions"] for each in shares] == [3, 2]
    assert shares[0]["top"][:3] == [0.3333, 0.3333, 0.6667]
    assert shares[1]["top"][:3] == [0.5, 0.5, 0.5]
    empty = top_shares(ranks[:0], came_after(0, 2, 1))
    assert [each["top"] for each in empty] == [[], []]
