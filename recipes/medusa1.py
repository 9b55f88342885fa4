"""Medusa-1: heads on a frozen base model, whose own output decoding therefore reproduces.

Cai et al., arXiv:2401.10774, section 2.2.1.   python -m specheads.train +recipe=medusa1
"""

from pathlib import Path

import torch

from specheads import dist
from specheads.config import TrainConfig
from specheads.decoding.evaluate import choose_tree, decode_heldout
from specheads.decoding.measure import end_tokens
from specheads.log import RunLog
from specheads.models.checkpoint import save_export
from specheads.models.digest import base_digest
from specheads.training.loop import fit
from specheads.training.parts import build_heads, heads_accuracy, medusa_objective
from specheads.training.prepare import calibration_prompts, describe_plan, load_base, load_data
from specheads.training.schedule import param_groups


def run(cfg: TrainConfig) -> None:
    """Train heads, choose their tree, export them."""
    torch.manual_seed(cfg.seed)
    base, output, tokenizer = load_base(cfg)
    data = load_data(cfg, base, tokenizer, train_base=False)
    heads = build_heads(cfg, base, output, data)
    objective = medusa_objective(cfg, base, heads, output)
    prompts = calibration_prompts(cfg, data, tokenizer, base.device)
    eos = end_tokens(base, tokenizer)

    with RunLog(cfg) as log:
        log.say(describe_plan(cfg, data, base=base, heads=heads))
        if cfg.dry_run:
            return
        steps = fit(
            objective,
            data.train,
            cfg,
            groups=param_groups(cfg.optim, heads=(heads, cfg.optim.lr)),
            run=log,
            evaluate=lambda step: decode_heldout(base, heads, output, prompts, cfg.evaluate, eos),
        )
        if not dist.is_main():
            return
        accuracy = heads_accuracy(objective, data.heldout, base.device)
        log.record(steps, {f"heldout/{key}": value for key, value in accuracy.items()})
        log.say("measuring trees ...")
        chosen = choose_tree(
            base, heads, output, prompts, cfg.tree, cfg.evaluate, eos, seed=cfg.seed
        )
        export = Path(cfg.run_dir) / "export"
        save_export(
            export,
            heads,
            base_name=cfg.model.name,
            base_revision=cfg.model.revision,
            base_digest=base_digest(cfg.model.name, revision=cfg.model.revision),
            base_dtype=cfg.model.dtype,
            tokenizer=tokenizer,
            tree=chosen.tree,
            expected_accept_length=chosen.expected_accept_length or None,
            measured_on=chosen.measured_on,
            training={
                "recipe": cfg.recipe,
                "steps": steps,
                "data": data.summary,
                "heldout": accuracy,
            },
        )
        log.say(f"tree of {chosen.tree.num_nodes} nodes; exported to {export}")
        if not chosen.speculate:
            log.say("slower than plain decoding on this machine: do not speculate here")
