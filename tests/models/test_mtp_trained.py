"""Sequential MTP heads that were trained: what a tree gains over the chain that others serve."""

from __future__ import annotations

import torch

from specheads.attention.tree import Tree
from specheads.config.training import LossConfig
from specheads.decoding.loop import decode
from specheads.drafters.heads import heads_drafter
from specheads.models.mtp import MtpHeads, block_config
from specheads.models.output import output_layer
from specheads.training.objectives import HeadsObjective
from specheads.verification.sampling import Sampler
from tests import zoo

VOCAB, NUM_HEADS = 24, 3
CHAIN = [(0,), (0, 0), (0, 0, 0)]
TREE = Tree.from_choices([*CHAIN, (1,), (1, 0), (1, 1), (0, 1), (0, 1, 0), (0, 0, 1), (1, 0, 0)])


def walks(num_rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Return texts [B, T] in which two tokens may follow each, one twice as often as the other."""
    follows = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(7))
    rows = torch.randint(0, VOCAB, (num_rows, 1), generator=generator)
    for _ in range(length - 1):
        rare = torch.rand(num_rows, generator=generator) < 1 / 3
        after = torch.where(rare, (follows[rows[:, -1]] + 5) % VOCAB, follows[rows[:, -1]])
        rows = torch.cat([rows, after[:, None]], dim=1)
    return rows


def test_a_tree_accepts_more_than_the_chain_of_the_same_heads() -> None:
    """Prevents trees that cost a wider verify step and gain nothing over what others can serve.

    The chain is what ``generate(use_mtp=True)`` drafts (``test_mtp_transformers.py``).
    """
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    base = zoo.build("llama", vocab_size=VOCAB)
    heads = MtpHeads(NUM_HEADS, block_config(base.config), VOCAB, variant="sequential")
    objective = HeadsObjective(base, heads, LossConfig(decay=1.0, lambda_0=1.0), train_base=True)
    optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-2)
    objective.train()
    for _ in range(40):
        ids = walks(16, 24, generator)
        batch = {
            "input_ids": ids,
            "labels": ids,
            "position_ids": torch.arange(24).expand(16, -1),
            "segment_ids": torch.ones_like(ids),
        }
        loss, _ = objective(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    objective.eval()
    found = {}
    for name, tree in (("chain", Tree.chain(NUM_HEADS)), ("tree", TREE)):
        drafter = heads_drafter(base, heads, output_layer(base), tree)
        lengths: list[int] = []
        for row, prompt in enumerate(walks(8, 8, generator.manual_seed(1))):
            sampler = Sampler(temperature=1.0, seed=row)
            result = decode(base, drafter, prompt[None], max_new_tokens=48, sampler=sampler)
            lengths += result.rows[0].accept_lengths
        found[name] = sum(lengths) / len(lengths)
    assert found["chain"] > 1.5, "heads that have learned nothing show nothing"
    assert found["tree"] > found["chain"] + 0.15
