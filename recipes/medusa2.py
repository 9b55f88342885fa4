"""Medusa-2: heads first, then base model and heads together; the output is the tuned base's.

Cai et al., arXiv:2401.10774, section 2.2.2. Two stages, or one with warmup_heads=0; the base tuned
itself, or through LoRA (adapter=lora), on a quantised base QLoRA; held to the labels, or to its
original (loss.base=distill).   python -m specheads.train +recipe=medusa2
"""

from torch import nn

from specheads.config import TrainConfig
from specheads.pipeline import Speculation, check_tree
from specheads.runs.log import RunLog
from specheads.training.heldout import remember_original
from specheads.training.loop import fit
from specheads.training.objectives import HeadsObjective
from specheads.training.plan import describe_costs, describe_run, plan_stage
from specheads.training.schedule import param_groups
from specheads.training.setup import build_heads, load_base, load_data, read_data


def run(cfg: TrainConfig) -> None:
    """Train in two stages, compare the tuned base with the original, export both parts."""
    check_tree(cfg.tree, cfg.evaluate, cfg.heads.num_heads)
    read = read_data(cfg)
    base, output, tokenizer = load_base(cfg, train_base=True)
    data = load_data(cfg, base, tokenizer, train_base=True, read=read)
    heads = build_heads(cfg, base, output, data)
    speculation = Speculation(cfg, base, heads, output, tokenizer, data)

    with RunLog(cfg) as log:
        log.say(describe_run(cfg, data, base=base, heads=heads))
        original = None
        if not cfg.dry_run:
            data.quarantine(log.dir)
            original = remember_original(base, output, data.heldout)
        warmup = round(cfg.warmup_heads * cfg.steps)
        stages = [("heads", 0, warmup), ("joint", warmup, cfg.steps)]
        steps, plans = 0, []
        for stage, first, last in stages[0 if warmup else 1 :]:
            joint = stage == "joint"
            objective = HeadsObjective(base, heads, cfg.loss, train_base=joint, output=output)
            parts: dict[str, tuple[nn.Module, float]] = {"heads": (heads, cfg.optim.lr)}
            if joint:
                parts["base"] = (base, cfg.optim.base_lr)
            groups = param_groups(cfg.optim, **parts)
            if cfg.dry_run:
                plan = plan_stage(
                    stage, last - first, objective, data.train, groups, cfg,
                    output_weight=output.weight, parts={"base": base, "heads": heads},
                )  # fmt: skip
                plans.append(plan)
                continue
            steps = fit(
                objective,
                data.train,
                cfg,
                groups=groups,
                run=log,
                stage=stage,
                first_step=first,
                last_step=last,
                evaluate=speculation.evaluate,
            )
        if cfg.dry_run:
            log.say(describe_costs(cfg, plans, {"base": base, "heads": heads}))
            speculation.say_expected(log)
            return
        speculation.export(log, steps, data.heldout, tuned=True, original=original)
