"""Train objectives of the recipes' kinds for a few steps; started by test_distributed.py.

Alone (``train`` in the test's own process) it is the reference, with as many micro-batches as all
ranks together would see; under torchrun it is what is compared:
``torchrun --nproc-per-node N toy_runs.py FOLDER STAGE:KIND...``, STAGE being 0 to 3. Every
micro-batch has another number of labels, one has none. medusa1 stops and resumes; medusa2 has two
stages, so that its heads are wrapped twice; medusa2_lora tunes an adapter, medusa2_distilled holds
it to the original, too; block and eagle3 learn from some positions of each row; mtp trains base and
heads at once, on one output matrix, which is the embedding as well; draft trains a model of its own
against the frozen base. What is exported is written as the recipes do it.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from specheads.attention.tree import default_tree
from specheads.config import AdapterConfig, HeadsConfig
from specheads.config.training import DraftConfig, LossConfig
from specheads.models.adapters import add_adapter, has_adapter, merge_adapter
from specheads.models.checkpoint import KINDS as TAPPED
from specheads.models.checkpoint import origin, save_export, save_plain_model
from specheads.models.draft import save_draft
from specheads.models.heads import MedusaHeads
from specheads.models.kinds import Heads
from specheads.models.mtp import MtpHeads, block_config
from specheads.models.output import output_layer
from specheads.runs.log import RunLog
from specheads.system import dist
from specheads.training.engine import param_groups
from specheads.training.loop import Stage, fit
from specheads.training.objectives import DraftObjective, HeadsObjective, LMObjective
from tests.conftest import build_byte_tokenizer, build_tiny_llama, redraw
from tests.toys import toy_config

STEPS, MICRO_BATCHES, ROWS, SEQ_LEN, VOCAB_SIZE = 5, 8, 2, 24, 272
NO_LABELS = 6  # a micro-batch where nothing is learned
SLOW_RANK = 3


class Labelled:
    """Micro-batch n has n-dependent labels; rank r sees every world-th."""

    def __init__(self, rank: int, world: int) -> None:
        self.position, self.rank, self.world = 0, rank, world

    def __next__(self) -> dict[str, Any]:
        if self.rank == SLOW_RANK:  # of two there is none
            time.sleep(0.2)
        number = self.position + self.rank
        self.position += self.world
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, VOCAB_SIZE, (ROWS, SEQ_LEN), generator=generator)
        labels = ids.clone()
        labels[:, : SEQ_LEN if number == NO_LABELS else (5 * number) % (SEQ_LEN - 2)] = -100
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


TWO_STAGES = [("heads", 0, 2), ("joint", 2, STEPS)]
JOINT = [("joint", 0, STEPS)]
FROZEN = [("heads", 0, STEPS)]
KINDS = {
    "medusa1": FROZEN,
    "hydra": FROZEN,
    "medusa2": TWO_STAGES,
    "medusa2_lora": TWO_STAGES,
    "medusa2_distilled": JOINT,
    "block": FROZEN,
    "eagle3": FROZEN,
    "mtp_parallel": JOINT,
    "mtp_sequential": JOINT,
    "mtp_causal": FROZEN,  # as mtp_finetune has them
    "pretrain": [("train", 0, STEPS)],
    "draft": [("train", 0, STEPS)],
}


def build_base(kind: str) -> Any:
    """Return the base of a kind, with its adapter."""
    base = build_tiny_llama(
        hidden_size=16, intermediate_size=32, tie_word_embeddings=kind.startswith("mtp")
    )
    if kind in ("medusa2_lora", "medusa2_distilled"):
        add_adapter(base, AdapterConfig(kind="lora", rank=2, dropout=0.0))
    return base


def build_heads(kind: str, base: Any) -> tuple[Heads, dict[str, Any]]:
    """Return heads of a kind, and how their losses are weighed."""
    if kind == "hydra" or kind.startswith("medusa"):
        own = {"condition": True} if kind == "hydra" else {}
        medusa = MedusaHeads(3, 1, 16, VOCAB_SIZE, "shared" if kind == "medusa2" else "own", **own)
        medusa.init_from_output(base.get_output_embeddings().weight)
        return medusa, {}
    if kind in ("block", "eagle3"):
        options = {"anchors": 8, "num_taps": 2}
        asked = HeadsConfig(kind, options, 3, 1, "own", correction="markov", markov_rank=4)
        tapped = TAPPED[kind].from_settings(asked, base, output_layer(base))
        redraw(tapped, seed=1)
        return tapped, {}
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
        return draft, DraftObjective(draft, base, DraftConfig(loss="lk_lambda"))
    if kind == "pretrain":
        return nn.Module(), LMObjective(base)
    made, weights = build_heads(kind, base)
    heads = heads or made
    loss = LossConfig(**weights, base="distill" if kind == "medusa2_distilled" else "labels")
    return heads, HeadsObjective(base, heads, loss, train_base=stage == "joint")


def write_base(folder: Path) -> Path:
    """Write the original base where exports can find it."""
    build_tiny_llama(hidden_size=16, intermediate_size=32).save_pretrained(folder)
    build_byte_tokenizer().save_pretrained(folder)
    return folder


def export(path: Path, kind: str, base: Any, heads: Any, original: Path) -> None:
    """Write what the recipe of a kind writes, with its own functions."""
    # MTP models are from scratch
    scratch = KINDS[kind] is not FROZEN and kind.startswith("mtp")
    name, tokenizer = "" if scratch else str(original), build_byte_tokenizer()
    info = origin(name, {"recipe": kind, "steps": STEPS})
    if kind == "draft":
        save_draft(path, heads, tokenizer, info | {"measured": {}})
        return
    if kind == "pretrain":
        save_plain_model(path, base, tokenizer, dtype="float32")
        return
    if has_adapter(base):
        merge_adapter(base)
    tuned = None if KINDS[kind] is FROZEN else base
    save_export(path, heads, tokenizer, default_tree(3, 6), info, tuned_base=tuned)


def train(folder: Path, name: str, kind: str, deepspeed: dict[str, Any], **changes: Any) -> None:
    """Train what recipe ``kind`` trains; its weights and export go to ``folder/<name>-<kind>``."""
    base = build_base(kind)
    world = dist.world_size()
    cfg = toy_config(
        folder / f"run-{name}-{kind}",
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
        for stage, first, last in KINDS[kind]:
            heads, objective = build_objective(kind, base, stage, heads)
            groups = param_groups(cfg.optim, heads=(heads, 1e-3), base=(base, 3e-4))
            fit(Stage(objective, batches, groups, stage, first, last), cfg, log)
    if dist.is_main():
        state = {name: p.detach().clone() for name, p in objective.named_parameters()}
        save_file(state, folder / f"{name}-{kind}.safetensors")
        export(folder / f"{name}-{kind}", kind, base, heads, folder / "base")


def settings(stage: int) -> dict[str, Any]:
    """Return DeepSpeed's settings for a ZeRO stage."""
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:  # else parameters this small are never split
        zero["stage3_param_persistence_threshold"] = 0
    return {"zero_optimization": zero}


if __name__ == "__main__":
    place, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    for case in cases:
        number, _, wanted = case.partition(":")
        found = Path(place), f"zero{number}", wanted, settings(int(number))
        if wanted == "medusa1":  # what is compared also stops and resumes
            train(*found, max_steps=2)
        train(*found, resume="auto" if wanted == "medusa1" else "")
    dist.shutdown()
