"""Medusa-1: heads on a frozen base model, whose own output decoding therefore reproduces.

Cai et al., arXiv:2401.10774, section 2.2.1; with heads=hydra Ankner et al., arXiv:2402.05109.
python -m specheads.train +recipe=medusa1
"""

from specheads.config import TrainConfig
from specheads.pipeline import Speculation, check_tree
from specheads.runs.log import RunLog
from specheads.training.loop import Batches, fit
from specheads.training.objectives import HeadsObjective
from specheads.training.plan import describe_costs, describe_run, plan_stage
from specheads.training.schedule import param_groups
from specheads.training.setup import build_heads, load_base, load_data, read_data
from specheads.training.teachers import FeatureCache


def run(cfg: TrainConfig) -> None:
    """Train heads, choose their tree, export them."""
    check_tree(cfg.tree, cfg.evaluate, cfg.heads.num_heads)
    read = read_data(cfg)
    base, output, tokenizer = load_base(cfg)
    data = load_data(cfg, base, tokenizer, train_base=False, read=read)
    heads = build_heads(cfg, base, output, data)
    cache = FeatureCache(cfg, base, data.train, data.heldout) if cfg.features.dir else None
    speculation = Speculation(cfg, base, heads, output, tokenizer, data)

    with RunLog(cfg) as log:
        log.say(describe_run(cfg, data, base=base, heads=heads))
        objective = HeadsObjective(
            None if cache else base, heads, cfg.loss,
            train_base=False, output=output, embed=base.get_input_embeddings(),
        )  # fmt: skip
        groups = param_groups(cfg.optim, heads=(heads, cfg.optim.lr))
        batches: Batches = data.train
        notes: list[str] = []
        if cfg.dry_run:
            if cache:
                batches, notes = cache.stand_in(base)
            parts = {"base": base, "heads": heads}
            plan = plan_stage(
                "heads", cfg.steps, objective, batches, groups, cfg,
                output_weight=output.weight, parts=parts,
            )  # fmt: skip
            log.say(describe_costs(cfg, [plan], parts, *notes))
            speculation.say_expected(log)
            return
        data.quarantine(log.dir)
        if cache:
            log.say(cache.describe())
        heldout = data.heldout
        if cache:
            batches, heldout = cache.open(base)
        steps = fit(objective, batches, cfg, groups=groups, run=log, evaluate=speculation.evaluate)
        speculation.export(log, steps, heldout)
