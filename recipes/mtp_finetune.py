"""Multi-token-prediction heads for a base model that exists, and stays as it is or is tuned along.

Heads of arXiv:2404.19737 or DeepSeek-V3's (arXiv:2412.19437) that start as copies of the base's
last layer. mtp.train_base=true tunes the base too, itself or through LoRA (adapter=lora), on a
quantised base QLoRA.   python -m specheads.train +recipe=mtp_finetune
"""

from torch import nn

from specheads.config import TrainConfig
from specheads.pipeline import Speculation, check_tree
from specheads.runs.log import RunLog
from specheads.training.heldout import remember_original
from specheads.training.loop import Batches, fit
from specheads.training.objectives import HeadsObjective
from specheads.training.plan import describe_costs, describe_run, plan_stage
from specheads.training.schedule import param_groups
from specheads.training.setup import (
    build_mtp_heads,
    check_mtp,
    load_base,
    load_data,
    read_data,
)
from specheads.training.teachers import FeatureCache


def run(cfg: TrainConfig) -> None:
    """Train heads, and the base along with them if asked; choose their tree, export them."""
    check_mtp(cfg)
    tuned = cfg.mtp.train_base
    check_tree(cfg.tree, cfg.evaluate, cfg.mtp.num_heads - 1)
    read = read_data(cfg)
    base, output, tokenizer = load_base(cfg, train_base=tuned)
    data = load_data(cfg, base, tokenizer, train_base=tuned, read=read)
    heads = build_mtp_heads(cfg, base, output, start=cfg.mtp.start)
    cache = FeatureCache(cfg, base, data.train, data.heldout) if cfg.features.dir else None
    speculation = Speculation(cfg, base, heads, output, tokenizer, data)

    with RunLog(cfg) as log:
        log.say(describe_run(cfg, data, base=base, heads=heads))
        objective = HeadsObjective(
            None if cache else base, heads, cfg.loss,
            train_base=tuned, output=output, embed=base.get_input_embeddings(),
        )  # fmt: skip
        trained: dict[str, tuple[nn.Module, float]] = {"heads": (heads, cfg.optim.lr)}
        if tuned:
            trained["base"] = (base, cfg.optim.base_lr)
        groups = param_groups(cfg.optim, **trained)
        batches: Batches = data.train
        notes: list[str] = []
        if cfg.dry_run:
            if cache:
                batches, notes = cache.stand_in(base)
            parts = {"base": base, "heads": heads}
            plan = plan_stage(
                "joint" if tuned else "heads", cfg.steps, objective, batches, groups, cfg,
                output_weight=output.weight, parts=parts,
            )  # fmt: skip
            log.say(describe_costs(cfg, [plan], parts, *notes))
            speculation.say_expected(log)
            return
        data.quarantine(log.dir)
        original = remember_original(base, output, data.heldout) if tuned else None
        heldout = data.heldout
        if cache:
            log.say(cache.describe())
            batches, heldout = cache.open(base)
        steps = fit(
            objective,
            batches,
            cfg,
            groups=groups,
            run=log,
            stage="joint" if tuned else "heads",
            evaluate=speculation.evaluate,
        )
        speculation.export(log, steps, heldout, tuned=tuned, original=original)
