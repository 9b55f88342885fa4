"""Train objectives of the recipes' kinds for a few steps; started by test_distributed.py.

Alone it is the reference, with as many micro-batches as all ranks together would see:
``python two_ranks.py OUT {} KIND...``; under ``torchrun --nproc-per-node 2`` it is what is
compared: ``two_ranks.py OUT '{"zero_optimization": {"stage": 2}}' KIND...``. Every micro-batch has
another number of labels; medusa1 stops and resumes; medusa2 has two stages, so that its heads are
wrapped twice; mtp trains base and heads at once, on one output matrix; draft trains a model of its
own against the frozen base.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from specheads import dist
from specheads.log import RunLog
from specheads.models.heads import MedusaHeads
from specheads.models.kinds import Heads
from specheads.models.mtp import MtpHeads
from specheads.models.mtp_layer import block_config
from specheads.training.draft_objective import DraftObjective
from specheads.training.loop import fit
from specheads.training.objectives import HeadsObjective
from specheads.training.schedule import param_groups
from tests.conftest import build_tiny_llama, redraw
from tests.toys import toy_config

STEPS, MICRO_BATCHES, ROWS, SEQ_LEN, VOCAB_SIZE = 3, 4, 2, 24, 272


class Labelled:
    """Micro-batch n has n-dependent labels; rank r sees every world-th."""

    def __init__(self, rank: int, world: int) -> None:
        self.position, self.rank, self.world = 0, rank, world

    def __next__(self) -> dict[str, Any]:
        number = self.position + self.rank
        self.position += self.world
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, VOCAB_SIZE, (ROWS, SEQ_LEN), generator=generator)
        labels = ids.clone()
        labels[:, : (5 * number) % (SEQ_LEN - 2)] = -100
        segments = torch.ones_like(ids)
        segments[:, SEQ_LEN // 2 :] = 2  # two documents per row
        positions = torch.arange(SEQ_LEN // 2).repeat(2).expand(ROWS, -1)
        return {
            "input_ids": ids,
            "labels": labels,
            "position_ids": positions,
            "segment_ids": segments,
            "ids": [str(number)],
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        self.position = state["position"]


STAGES = {
    "medusa1": [("heads", 0, STEPS)],
    "medusa2": [("heads", 0, 1), ("joint", 1, STEPS)],
    "mtp_parallel": [("joint", 0, STEPS)],
    "mtp_sequential": [("joint", 0, STEPS)],
    "draft": [("train", 0, STEPS)],
}


def build_heads(kind: str, base: Any) -> tuple[Heads, dict[str, Any]]:
    """Return heads of a kind, and how their losses are weighed."""
    if kind.startswith("medusa"):
        medusa = MedusaHeads(3, 1, 16, VOCAB_SIZE, "shared" if kind == "medusa2" else "own")
        medusa.init_from_output(base.get_output_embeddings().weight)
        return medusa, {}
    variant = kind.removeprefix("mtp_")
    mtp = MtpHeads(3, block_config(base.config), VOCAB_SIZE, variant=variant)
    redraw(mtp, seed=1)
    share = {"lambda_0": 0.3, "average": True} if variant == "sequential" else {"lambda_0": 1.0}
    return mtp, {"decay": 1.0, **share}


def build_objective(
    kind: str, base: Any, stage: str, heads: Any = None
) -> tuple[nn.Module, nn.Module]:
    """Return what a stage trains besides the base, from an earlier stage if any, and the loss."""
    if kind == "draft":  # its teacher is a frozen module of the objective
        draft = build_tiny_llama(seed=3, hidden_size=8, intermediate_size=16, num_hidden_layers=1)
        return draft, DraftObjective(draft, base, loss="lk_lambda")
    made, weights = build_heads(kind, base)
    heads = heads or made
    return heads, HeadsObjective(base, heads, train_base=stage == "joint", **weights)


def train(out: Path, kind: str, deepspeed: dict[str, Any], **changes: Any) -> None:
    """Train what recipe ``kind`` trains and save all its weights beside ``out``."""
    base = build_tiny_llama(hidden_size=16, intermediate_size=32)
    world = dist.world_size()
    cfg = toy_config(
        out.with_name(f"{out.name}-{kind}-run"),
        steps=STEPS,
        deepspeed=deepspeed,
        optim__accumulation=MICRO_BATCHES // world,
        optim__grad_clip=0.5,
        data__rows=ROWS,
        log__every=1,
        **changes,
    )
    batches = Labelled(dist.rank(), world)
    with RunLog(cfg) as log:
        heads = None
        for stage, first, last in STAGES[kind]:
            heads, objective = build_objective(kind, base, stage, heads)
            fit(
                objective,
                batches,
                cfg,
                groups=param_groups(cfg.optim, heads=(heads, 1e-3), base=(base, 3e-4)),
                run=log,
                stage=stage,
                first_step=first,
                last_step=last,
            )
    if dist.is_main():
        state = {name: p.detach().float().contiguous() for name, p in objective.named_parameters()}
        save_file(state, out.with_name(f"{out.name}-{kind}.safetensors"))


if __name__ == "__main__":
    target, engine = Path(sys.argv[1]), json.loads(sys.argv[2])
    for name in sys.argv[3:]:
        if engine and name == "medusa1":  # what is compared also stops and resumes
            train(target, name, engine, max_steps=2)
        train(target, name, engine, resume="auto" if name == "medusa1" else "")
    dist.shutdown()
