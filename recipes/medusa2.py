"""Medusa-2: heads first, then base model and heads together; the output is the tuned base's.

Cai et al., arXiv:2401.10774, section 2.2.2. Two stages, or one with warmup_heads=0; the base tuned
itself, or through LoRA (adapter=lora), on a quantised base QLoRA; held to the labels, or to its
original (loss.base=distill).   python -m specheads.train +recipe=medusa2
"""

from collections.abc import Iterator

from specheads.config import TrainConfig
from specheads.pipeline import Speculation, check_tree, start
from specheads.runs.log import RunLog
from specheads.training.engine import param_groups
from specheads.training.heldout import remember_original
from specheads.training.loop import Stage, fit
from specheads.training.objectives import HeadsObjective
from specheads.training.rule import decide
from specheads.training.setup import build_heads, load_base, load_data, read_data


def run(cfg: TrainConfig) -> None:
    """Train in two stages, compare the tuned base with the original, export both parts."""
    check_tree(cfg.tree, cfg.evaluate, cfg.heads.num_heads)
    read = read_data(cfg)
    base, output, tokenizer = load_base(cfg, train_base=True)
    data = load_data(cfg, base, tokenizer, train_base=True, read=read)
    cfg = decide(cfg, base, data.train)
    heads = build_heads(cfg, base, output, data)
    speculation = Speculation(cfg, base, heads, output, tokenizer, data)

    def stages() -> Iterator[Stage]:  # one after the other: an objective freezes and thaws the base
        warmup, parts = round(cfg.warmup_heads * cfg.steps), {"heads": (heads, cfg.optim.lr)}
        if warmup:
            objective = HeadsObjective(base, heads, cfg.loss, train_base=False, output=output)
            groups = param_groups(cfg.optim, **parts)
            yield Stage(objective, data.train, groups, "heads", 0, warmup)
        objective = HeadsObjective(base, heads, cfg.loss, train_base=True, output=output)
        groups = param_groups(cfg.optim, **parts, base=(base, cfg.optim.base_lr))
        yield Stage(objective, data.train, groups, "joint", warmup, cfg.steps)

    with RunLog(cfg) as log:
        start(cfg, log, data, base=base, heads=heads)
        if cfg.dry_run:
            speculation.plan(log, stages())
            return
        original = remember_original(base, output, data.heldout)
        for stage in stages():
            steps = fit(stage, cfg, log, speculation.evaluate)
        speculation.export(log, steps, data.heldout, tuned=True, original=original)
