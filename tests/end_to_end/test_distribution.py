"""The distribution of decoded text through the whole engine: chi-squared on three tokens.

The enumerations of the unit tests prove the rules; here the base model, the masks, the KV cache and
the noise take part.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from specheads.attention.cache import TreeCache
from specheads.attention.tree import Tree
from specheads.decoding import accept
from specheads.decoding.accept import Acceptance
from specheads.decoding.loop import decode, plain_decode
from specheads.verification import acceptance
from specheads.verification.sampling import Chance, Sampler
from tests.sampled import SampledDrafter

VOCAB, BATCH = 5, 2000
PROMPT = (1, 3, 0, 2)
SKIPPED, COUNTED = 1, 3  # later tokens rest on what earlier steps left in the cache
NUM_NEW = 5  # one more, so that trees keep their depth

TREE = Tree.from_choices([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
CASES = {
    "walk": ("none", TREE, False),
    "siblings of parallel heads": ("without_replacement", TREE, True),
    "block": ("chain", Tree.chain(3), False),
}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Return a model whose next tokens depend on all before them; one layer, to be quick."""
    from tests.conftest import build_tiny_llama

    tiny = build_tiny_llama(
        seed=3,
        std=0.3,
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.no_grad():  # the past must matter, or a wrong cache would not show
        for projection in ("q", "v", "o"):
            tiny.get_parameter(f"model.layers.0.self_attn.{projection}_proj.weight").mul_(2)
    return tiny


@pytest.fixture(scope="module")
def expected(model: LlamaForCausalLM) -> Tensor:
    """Return the exact probabilities of the counted tokens, V^3 values in float64."""
    exact = copy.deepcopy(model).double()
    num_tokens = SKIPPED + COUNTED
    texts = torch.tensor(list(itertools.product(range(VOCAB), repeat=num_tokens)))
    ids = torch.cat([torch.tensor(PROMPT).expand(len(texts), -1), texts], dim=1)
    with torch.no_grad():
        probs = exact(ids).logits[:, len(PROMPT) - 1 : -1].softmax(-1)
    joint = probs.gather(2, texts[..., None])[..., 0].prod(1)
    return joint.view(VOCAB**SKIPPED, -1).sum(0)


def counts_of(model: LlamaForCausalLM, case: str, num_rows: int, **settings: object) -> Tensor:
    """Decode and count the texts, V^3 values."""
    sampling, tree, shared = CASES[case]
    prompt = torch.tensor([PROMPT]).repeat(BATCH, 1)
    counts = torch.zeros(VOCAB**COUNTED, dtype=torch.long)
    place = VOCAB ** torch.arange(COUNTED - 1, -1, -1)
    for seed in range(0, num_rows, BATCH):
        result = decode(
            model,
            SampledDrafter(tree, VOCAB, sampling, seed, shared=shared),
            prompt,
            max_new_tokens=NUM_NEW,
            sampler=Sampler(temperature=1.0, seed=seed),
            **settings,  # type: ignore[arg-type]
        )
        assert result.accept_length > 1.05, "too few guesses are right to test anything"
        new = result.sequences[:, len(PROMPT) + SKIPPED :][:, :COUNTED]
        counts += (new * place).sum(1).bincount(minlength=len(counts))
    return counts


def excess(counts: Tensor, expected: Tensor) -> float:
    """Return chi-squared over what a right sampler exceeds with probability 1e-4."""
    wanted = expected * int(counts.sum())
    rare = wanted < 5
    got = torch.cat([counts[~rare].double(), counts[rare].sum()[None].double()])
    want = torch.cat([wanted[~rare], wanted[rare].sum()[None].clamp(min=1e-9)])
    dof = len(got) - (1 if rare.any() else 2)
    limit = dof * (1 - 2 / (9 * dof) + 3.719 * math.sqrt(2 / (9 * dof))) ** 3  # Wilson-Hilferty
    return float(((got - want) ** 2 / want).sum()) / limit


@pytest.mark.parametrize("num_rows", [10_000, pytest.param(200_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_the_distribution_is_the_base_models(
    case: str, num_rows: int, model: LlamaForCausalLM, expected: Tensor
) -> None:
    """Prevents any bias: of a rule, of a cache that keeps the wrong nodes, of related noise.

    A distribution at a chi-squared distance c from the model's adds c per row to a statistic of 124
    on average, whose limit is 190: 10,000 rows show 0.016 in 999 of 1,000 runs. What is broken
    below lies 0.06 away and more.
    """
    assert excess(counts_of(model, case, num_rows), expected) < 1


def keep_in_place(patch: pytest.MonkeyPatch) -> None:
    """Break the commit: the accepted nodes stay where the tree was written."""
    commit = TreeCache.commit

    def lazy(self: TreeCache, path: Tensor, counts: object) -> None:
        in_place = torch.arange(path.shape[1]).expand_as(path)
        commit(self, torch.where(path < 0, path, in_place), counts)  # type: ignore[arg-type]

    patch.setattr(TreeCache, "commit", lazy)


def repeat_choices(patch: pytest.MonkeyPatch) -> None:
    """Break the noise: a row makes the same choices in every step."""
    patch.setattr(
        accept,
        "Chance",
        lambda seeds, positions, num: Chance(seeds, torch.zeros_like(positions), num),
    )


BREAKS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "residual": (
        "siblings of parallel heads",
        lambda patch: patch.setattr(acceptance, "subtract", lambda residual, drawn_from: residual),
    ),
    "renormalisation of siblings": (
        "siblings of parallel heads",
        lambda patch: patch.setattr(acceptance, "without", lambda draft, index: draft),
    ),
    "residual of a block": (
        "block",
        lambda patch: patch.setattr(acceptance, "normalise", lambda weights, otherwise: otherwise),
    ),
    "noise of its own for every step": ("block", repeat_choices),
    "cache commit": ("siblings of parallel heads", keep_in_place),
    "cache commit for a walk": ("walk", keep_in_place),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_what_is_broken_shows(
    broken: str, model: LlamaForCausalLM, expected: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a test without power: fewer rows than above are enough to see each of these."""
    case, break_it = BREAKS[broken]
    break_it(monkeypatch)
    assert excess(counts_of(model, case, 6_000), expected) > 2


def test_walking_gives_plain_decodings_tokens(model: LlamaForCausalLM) -> None:
    """Prevents rejection where a seed's own tokens were asked for, or at temperature 0."""
    prompt = torch.tensor([PROMPT]).repeat(50, 1)
    drafter = SampledDrafter(TREE, VOCAB, "without_replacement", seed=4)
    for sampler, rule in ((Sampler(1.0, seed=9), "walk"), (Sampler(), "exact")):
        plain = plain_decode(model, prompt, max_new_tokens=12, sampler=sampler)
        tree = decode(
            model,
            drafter,
            prompt,
            max_new_tokens=12,
            sampler=sampler,
            acceptance=Acceptance(rule=rule),
        )
        assert tree.sequences.equal(plain.sequences)
        assert tree.accept_length > 1.05
    other = decode(model, drafter, prompt, max_new_tokens=12, sampler=Sampler(1.0, seed=9))
    assert not other.sequences.equal(plain.sequences)


@pytest.mark.parametrize("sampling", ["without_replacement", "chain"])
def test_a_sampled_row_is_the_row_alone(sampling: str, model: LlamaForCausalLM) -> None:
    """Prevents draws that depend on which rows are left, or on how deep their trees may be."""
    tree = Tree.chain(3) if sampling == "chain" else TREE
    prompt = torch.tensor([PROMPT]).repeat(8, 1)
    mask = torch.ones_like(prompt)
    mask[::2, 0] = 0
    together = decode(
        model,
        SampledDrafter(tree, VOCAB, sampling, seed=4),
        prompt,
        attention_mask=mask,
        max_new_tokens=20,
        sampler=Sampler(0.8, seed=7),
        eos_token_ids={3},
    )
    assert len({len(row.new_tokens) for row in together.rows}) > 2
    for row in range(8):
        alone = decode(
            model,
            SampledDrafter(tree, VOCAB, sampling, seed=4 + row),
            prompt[row : row + 1, 1 - row % 2 :],
            max_new_tokens=20,
            sampler=Sampler(0.8, seed=7 + row),
            eos_token_ids={3},
        )
        assert alone.new_tokens == together.rows[row].new_tokens


def test_lossy_rules_say_so_and_accept_more(model: LlamaForCausalLM, expected: Tensor) -> None:
    """Prevents a lossy rule that does nothing, or passes for a lossless one."""
    lenient = Acceptance("lossy_lenient", lenience=0.3)
    assert Acceptance().lossless and Acceptance("walk").lossless and not lenient.lossless
    assert (
        excess(counts_of(model, "siblings of parallel heads", 10_000, acceptance=lenient), expected)
        > 2
    )
    prompt = torch.tensor([PROMPT]).repeat(100, 1)

    def accept_length(acceptance: Acceptance, temperature: float) -> float:
        drafter = SampledDrafter(TREE, VOCAB, "without_replacement", seed=0)
        sampler = Sampler(temperature, seed=3)
        result = decode(
            model, drafter, prompt, max_new_tokens=9, sampler=sampler, acceptance=acceptance
        )
        return result.accept_length

    exact = accept_length(Acceptance(), 1.0)
    assert accept_length(lenient, 1.0) > exact
    assert accept_length(Acceptance("lossy_typical", epsilon=0.02), 1.0) > exact
    greedy = accept_length(Acceptance(), 0.0)
    assert accept_length(lenient, 0.0) > greedy
    assert accept_length(Acceptance("lossy_typical", epsilon=1.0, delta=5.0), 0.0) == 1.0
    assert accept_length(Acceptance("lossy_lenient", lenience=1.0), 0.0) == greedy


@pytest.mark.parametrize(
    "settings", [{"rule": "typical"}, {"epsilon": -0.1}, {"delta": -1.0}, {"lenience": 0.0}]
)
def test_unknown_rules_are_refused(settings: dict[str, object]) -> None:
    """Prevents a misspelt lossy rule that silently decodes exactly, or the other way round."""
    with pytest.raises(ValueError, match=next(iter(settings))):
        Acceptance(**settings)  # type: ignore[arg-type]
