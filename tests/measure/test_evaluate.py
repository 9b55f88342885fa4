"""Real acceptance while training: the figures, and that measuring them changes nothing."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specheads.attention.tree import Tree, default_tree
from specheads.config import EvaluateConfig
from specheads.decoding.loop import decode, plain_decode
from specheads.decoding.result import DecodedRow
from specheads.drafters.contract import StepResult
from specheads.drafters.heads import HeadsDrafter
from specheads.measure.clock import Prompt, Runs, read_prompts
from specheads.measure.evaluate import (
    Heldout,
    conditional_acceptance,
    decode_heldout,
    write_prompts,
)
from specheads.measure.rows import rep8
from specheads.models.forward import undisturbed
from specheads.verification.sampling import Sampler
from tests.conftest import Medusa
from tests.conftest import three_prompts as prompts

EVALUATE = EvaluateConfig(max_new_tokens=16, temperatures=[0.0, 0.3], num_nodes=6)


class Watched(HeadsDrafter):
    """Remembers how deep each verified tree was and how much of it was accepted."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[tuple[int, int]] = []

    def observe(self, state: Any, result: StepResult) -> Any:
        """Take notes."""
        self.seen.append((result.tree.max_depth, int(result.num_accepted)))
        return super().observe(state, result)


def heldout(medusa: Medusa, texts: list[Tensor]) -> Heldout:
    """Return prompts to decode with a base model."""
    prompts = [Prompt(str(i), "heldout", ids) for i, ids in enumerate(texts)]
    return Heldout(medusa[0], prompts, EVALUATE, ())


def test_figures_are_those_of_decoding(medusa: Medusa) -> None:
    """A curve of accept lengths that decoding does not have chooses the wrong checkpoint."""
    _, heads, output = medusa
    texts = prompts()
    row = decode_heldout(heldout(medusa, texts), heads, output)
    for shape in ("tree", "chain"):
        for temperature in EVALUATE.temperatures:
            compare_with_decoding(medusa, texts, row, shape, temperature)
    of_tree = [row[f"eval/tree/t{t}/accept_length"] for t in (0, 0.3)]
    assert row["eval/accept_length"] == sum(of_tree) / 2, "of greedy text alone loops decide"
    assert of_tree[0] != of_tree[1]
    assert row["eval/identical"] == 1 and row["eval/speedup"] > 0


def compare_with_decoding(
    medusa: Medusa, texts: list[Tensor], row: dict[str, float], shape: str, temperature: float
) -> None:
    """Hold the figures of one tree at one temperature to those of decoding again."""
    base, heads, output = medusa
    tree = default_tree(3, 6) if shape == "tree" else Tree.chain(3)
    tried: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    gained = steps = 0
    repeated = []
    for n, prompt in enumerate(texts):
        drafter, sampler = Watched(heads, output, tree), Sampler(temperature=temperature, seed=n)
        result = decode(base, drafter, prompt, max_new_tokens=16, sampler=sampler)
        gained, steps = gained + len(result.new_tokens) - 1, steps + result.num_steps
        for depth, num_accepted in drafter.seen:
            for i in range(min(depth, num_accepted + 1)):
                tried[i] += 1
                accepted[i] += num_accepted > i
        plain = plain_decode(base, prompt, max_new_tokens=16, sampler=sampler)
        repeated.append(rep8(plain.new_tokens))
    at = f"eval/{shape}/t{temperature:g}"
    assert row[f"{at}/accept_length"] == gained / steps > 1
    low, high = row[f"{at}/accept_length_low"], row[f"{at}/accept_length_high"]
    assert low <= gained / steps <= high and low < high
    heads_seen = {key: v for key, v in row.items() if key.startswith(f"{at}/head_")}
    assert heads_seen == {f"{at}/head_{i}/acceptance": accepted[i] / tried[i] for i in tried}
    assert row[f"{at}/identical"] == row[f"{at}/compared"] == 3
    assert row[f"eval/t{temperature:g}/rep8"] == pytest.approx(sum(repeated) / 3)


def test_what_an_end_hides_is_not_counted() -> None:
    """Counting guesses beyond the limit, or the end of a text, as misses slanders the heads."""
    cut = DecodedRow([0] * 6, [3, 2])  # 5 after the prefill's: then 2 were left
    # step 1: heads 0 and 1 right, head 2 wrong; step 2: room for one guess, which was right
    assert conditional_acceptance([cut], 6, 3) == {0: 1.0, 1: 1.0, 2: 0.0}
    assert conditional_acceptance([cut], 6, 2) == {0: 1.0, 1: 1.0}  # a tree without head 2
    # the end came by a guess of head 1, or after it
    ended = DecodedRow([0] * 6, [3, 2], finished=True)
    assert conditional_acceptance([ended], 90, 3) == {0: 1.0, 1: 1.0, 2: 0.0}
    alone = DecodedRow([0] * 2, [1], finished=True)
    assert conditional_acceptance([alone], 90, 3) == {}


def test_the_model_is_left_as_it_was(medusa: Medusa) -> None:
    """A module that stays in eval mode trains without its dropout from the first evaluation on."""
    base, heads, output = medusa
    base.train()
    base.model.layers[1].eval()  # as a frozen part would be
    heads.train()
    modes = [part.training for part in [*base.modules(), *heads.modules()]]
    weights = {k: v.clone() for k, v in [*base.state_dict().items(), *heads.state_dict().items()]}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with undisturbed(base, heads):
        assert not any(part.training for part in [*base.modules(), *heads.modules()])
        torch.rand(7)
    decode_heldout(heldout(medusa, [torch.randint(0, 9, (1, 4))] * 2), heads, output)
    torch.manual_seed(5)
    decode_heldout(heldout(medusa, [torch.full((1, 4), 7)]), heads, output)
    assert torch.equal(torch.rand(3), expected)
    assert [part.training for part in [*base.modules(), *heads.modules()]] == modes
    after = dict([*base.state_dict().items(), *heads.state_dict().items()])
    assert all(torch.equal(after[name], tensor) for name, tensor in weights.items())


def test_written_prompts_are_read_back_as_they_were(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    """A bench on other prompts, or in another order, prints another accept length."""
    from specheads.data.chat import Encoder
    from specheads.data.schema import tokenizer_digest

    chat = {"messages": [{"role": "user", "content": "hé"}, {"role": "assistant", "content": "b"}]}
    stored = {"ids": [9, 8, 7, 258], "answers": [[2, 4]]}
    records: list[dict[str, Any]] = [
        {"id": "a", "kind": "chat", **chat},
        {"id": "a", "kind": "completion", "prompt": "x\n", "completion": "y", "source": object()},
        {"id": "c", "kind": "text", "text": "z" * 30},
        {
            "id": "d",
            "kind": "chat",
            **chat,
            "tokens": {**stored, "tokenizer": tokenizer_digest(byte_tokenizer)},
        },
    ]
    path = tmp_path / "heldout.jsonl"
    write_prompts(path, records)
    found, _ = read_prompts(path, byte_tokenizer, 4, max_length=99, device=torch.device("cpu"))
    encoder = Encoder(byte_tokenizer)
    assert [prompt.input_ids[0].tolist() for prompt in found] == [
        encoder.prompt(record) for record in records
    ]
    assert found[3].input_ids.tolist() == [[9, 8]]
    assert len({json.loads(line)["id"] for line in path.read_text().splitlines()}) == 4
    assert [each.name for each in tmp_path.iterdir()] == ["heldout.jsonl"]


class Letters:
    """Token i is the i-th letter."""

    def decode(self, tokens: list[int]) -> str:
        """Return one letter per token."""
        return "".join(chr(97 + token) for token in tokens)


def runs(*texts: tuple[list[int], list[int]]) -> Runs:
    """Return runs that decoded these tokens with these accept lengths."""
    return Runs(decoded=[DecodedRow(tokens, lengths, finished=True) for tokens, lengths in texts])


@pytest.mark.parametrize("num_samples", [0, 1, 3, 4, 9])
def test_samples_are_told_apart(num_samples: int) -> None:
    """Columns swapped, or a text beside another prompt, look just as convincing in a table."""
    prompts = [Prompt(str(i), "k", torch.tensor([[i]])) for i in range(2)]
    found: dict[str, Any] = {
        "t0": {
            "plain": runs(([4, 5], [1]), ([6, 7], [1])),
            "tree": runs(([4, 5], [2]), ([6, 7], [1, 1])),
        },
        "t0.7": {
            "plain": runs(([8], [1]), ([9], [1])),
            "tree": runs(([10, 11, 12], [3]), ([13], [1])),
        },
    }
    tokenizer = cast(PreTrainedTokenizerBase, Letters())
    heldout = Heldout(cast(Any, None), prompts, EVALUATE, ())
    rows = heldout.samples(found, "tree", tokenizer, num_samples)
    assert [tuple(row.values()) for row in rows] == [
        ("a", 0.0, "ef", "ef", [2], True),
        ("a", 0.7, "i", "klm", [3], False),
        ("b", 0.0, "gh", "gh", [1, 1], True),
        ("b", 0.7, "j", "n", [1], False),
    ][:num_samples]
