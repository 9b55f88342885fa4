"""A draft model with heads of its own: its chain is its own greedy text, the end is its heads'."""

from __future__ import annotations

import copy
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.attention.tree import Tree
from specheads.decoding.loop import decode, plain_decode
from specheads.drafters.contract import FINAL, Candidates, Prefill
from specheads.drafters.draft_heads import DraftHeadsDrafter
from specheads.drafters.heads import heads_drafter
from specheads.models.blocks import prefix_sizes
from specheads.models.heads import MedusaHeads
from specheads.models.output import capture_hidden, output_layer
from specheads.verification.sampling import Sampler
from tests.drafter_laws import check_deterministic, check_greedy_identity
from tests.drafters.test_draft_model import near
from tests.drafters.test_draft_tree import check_fresh, paths_of, prefill_of
from tests.ragged import ROWS, new_tokens, padded
from tests.zoo import VOCAB, build

TREE = Tree.from_choices([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)])
KINDS: dict[str, dict[str, Any]] = {
    "medusa": {},
    "hydra": {"condition": True},
    "markov": {"markov_rank": 4},
}


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    """Return a base model."""
    return build("llama")


@pytest.fixture(scope="module")
def draft(base: PreTrainedModel) -> PreTrainedModel:
    """Return a model that often says what the base says."""
    return near(base, 0.015)


@lru_cache
def written(draft: PreTrainedModel) -> Tensor:
    """Return texts [S, T] that the draft model has written, those after the laws' prompts first."""
    generator = torch.Generator().manual_seed(3)
    prompts = [*ROWS, *torch.randint(VOCAB, (9, 1, 4), generator=generator)]
    found = [
        plain_decode(draft, prompt, max_new_tokens=48 - prompt.shape[1]).sequences
        for prompt in prompts
    ]
    return torch.cat(found)


@lru_cache
def trained(draft: PreTrainedModel, kind: str, prefix: bool = False) -> MedusaHeads:
    """Return two heads that are often right about what the draft model writes; read only."""
    torch.manual_seed(0)
    more = {"prefix": prefix_sizes(draft.config)} if prefix else {}
    heads = MedusaHeads(2, 1, draft.config.hidden_size, VOCAB, **KINDS[kind], **more)
    output = output_layer(draft)
    heads.init_from_output(output.weight)
    texts = written(draft).clone()
    with torch.no_grad(), capture_hidden(draft) as captured:
        draft(input_ids=texts)
        hidden = captured[FINAL].clone()
    optimizer = torch.optim.Adam(heads.parameters(), lr=3e-3)
    heads.read_through(draft)
    for _ in range(60):
        loss = torch.zeros(())
        for i in range(2):
            seen = hidden[:, 3 : -2 - i]
            tokens = torch.stack([texts[:, 4 + j : texts.shape[1] - 1 - i + j] for j in (0, 1)], -1)
            features = heads.features(i, seen, tokens[..., : i + 1])
            products = torch.nn.functional.linear(features, heads.output_weight(i, output.weight))
            logits = heads.finish(products, output)
            labels = texts[:, 5 + i :]
            loss = loss + torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return heads.eval()


@pytest.fixture(scope="module")
def heads(draft: PreTrainedModel) -> MedusaHeads:
    """Return Medusa heads of the draft model."""
    return trained(draft, "medusa")


def slow(
    draft: PreTrainedModel, heads: MedusaHeads, text: list[int], num_passes: int
) -> tuple[list[int], set[tuple[int, ...]]]:
    """Return the chain and what hangs below it, with a pass over the whole text for each token."""
    drafter = heads_drafter(draft, heads, output_layer(draft), TREE)

    def guesses(chain: list[int]) -> set[tuple[int, ...]]:
        ids = torch.tensor([text + chain[:-1]])
        with torch.no_grad(), capture_hidden(draft) as captured:
            draft(input_ids=ids)
            hidden = {FINAL: captured[FINAL]}
        root = torch.tensor([chain[-1]])
        state = drafter.start(Prefill(ids.tolist(), ids, [ids.shape[1]], hidden, root))
        return set(paths_of(drafter.propose(state), 0))

    # as much as the draft model could possibly write
    written = plain_decode(
        draft, torch.tensor([text]), max_new_tokens=num_passes * (TREE.max_depth + 1)
    ).new_tokens
    length = 1
    for _ in range(num_passes - 1):
        below = guesses(written[:length])
        num = 0
        while tuple(written[length : length + num + 1]) in below:
            num += 1
        length += num + 1
    return written[:length], guesses(written[:length])


@pytest.mark.parametrize("num_passes", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_chain_is_the_draft_models_own_text(
    kind: str, num_passes: int, draft: PreTrainedModel
) -> None:
    """Heads that stand a token off, or a cache with refused guesses in it, only accept less."""
    heads = trained(draft, kind)
    texts = [written(draft)[row, :length].tolist() for row, length in ((0, 20), (1, 6), (2, 11))]
    drafter = DraftHeadsDrafter(draft, heads, output_layer(draft), TREE, num_passes=num_passes)
    state = drafter.start(prefill_of(texts, Sampler()))
    candidates = drafter.propose(state)
    chains = []
    for row, text in enumerate(texts):
        chain, below = slow(draft, heads, text, num_passes)
        expected = {tuple(chain[: i + 1]) for i in range(len(chain))}
        expected |= {(*chain, *path) for path in below}
        assert set(paths_of(candidates, row)) == expected
        chains.append(len(chain))
    assert max(chains) > num_passes or num_passes == 1, "no guess of the heads was ever right"
    assert state.cache.lengths == [len(text) for text in texts]
    again = drafter.propose(state)
    assert again.tokens.equal(candidates.tokens)


def test_the_laws_hold(base: PreTrainedModel, draft: PreTrainedModel, heads: MedusaHeads) -> None:
    """Prevents other tokens than plain decoding's, and rows that depend on the rest of a batch."""
    make = partial(DraftHeadsDrafter, draft, heads, output_layer(draft), TREE, num_passes=3)
    assert check_deterministic(base, make) > 1.5
    check_fresh(base, make, Sampler())


def test_a_prefix_layer_follows_the_text(base: PreTrainedModel, draft: PreTrainedModel) -> None:
    """A layer that remembers refused guesses, or misses tokens, only accepts less."""
    heads = copy.deepcopy(trained(draft, "medusa", prefix=True))
    assert heads.prefix is not None
    with torch.no_grad():  # it is the identity at the start
        for parameter in heads.prefix.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    make = partial(DraftHeadsDrafter, draft, heads, output_layer(draft), TREE, num_passes=2)
    assert check_greedy_identity(base, make) > 1.5
    check_fresh(base, make, Sampler())


def test_heads_save_passes(draft: PreTrainedModel, heads: MedusaHeads) -> None:
    """Prevents passes that verify nothing: then heads would only cost."""
    lengths = []
    for tree in (Tree.chain(0), TREE):
        drafter = DraftHeadsDrafter(draft, heads, output_layer(draft), tree, num_passes=3)
        lengths.append(decode(draft, drafter, ROWS[0], max_new_tokens=37).accept_length)
    assert lengths[0] == 4 and lengths[1] > 5.5


def test_nothing_is_proposed_beyond_limits(draft: PreTrainedModel, heads: MedusaHeads) -> None:
    """Prevents deeper trees than were asked for, tokens the base lacks, positions that are not."""
    make = partial(DraftHeadsDrafter, draft, heads, output_layer(draft), TREE, num_passes=3)

    def propose(drafter: DraftHeadsDrafter, length: int, vocab_size: int) -> Candidates:
        text = [3, 5, 8, 2] * (length // 4) + [1] * (length % 4)
        return drafter.propose(drafter.start(prefill_of([text], Sampler(), vocab_size)))

    assert propose(make(), 8, VOCAB).tree.max_depth >= 5
    assert propose(make(max_tokens=4), 8, VOCAB).tree.max_depth == 4
    room = draft.config.max_position_embeddings
    assert propose(make(), room - 1, VOCAB).tree.max_depth == 2
    assert propose(make(), room + 1, VOCAB).tree.max_depth == 0
    for vocab_size in (8, 20):
        tokens: Tensor = propose(make(), 8, vocab_size).tokens
        assert int(tokens.max()) < vocab_size


def test_vocabularies_may_differ(base: PreTrainedModel) -> None:
    """Prevents that a base of fewer tokens, or more, gets other tokens than its own."""
    for size in (48, 80):
        other = build("llama", vocab_size=size)
        heads = MedusaHeads(2, 1, 32, size)
        heads.init_from_output(output_layer(other).weight)
        drafter = DraftHeadsDrafter(other, heads.eval(), output_layer(other), TREE)
        found = decode(base, drafter, **padded(ROWS), max_new_tokens=12)
        plain = plain_decode(base, **padded(ROWS), max_new_tokens=12)
        assert new_tokens(found) == new_tokens(plain)


def test_settings_are_checked(draft: PreTrainedModel, heads: MedusaHeads) -> None:
    """Prevents a step without a pass, and trees that the heads cannot fill."""
    output = output_layer(draft)
    with pytest.raises(ValueError, match="num_passes must be at least 1"):
        DraftHeadsDrafter(draft, heads, output, TREE, num_passes=0)
    with pytest.raises(ValueError, match="at most 2, one per head, got 3"):
        DraftHeadsDrafter(draft, heads, output, Tree.chain(3))
