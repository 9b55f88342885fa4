"""Multi-token prediction from scratch: base model and heads learn together from the first step.

Gloeckle et al., arXiv:2404.19737; mtp.variant=sequential: DeepSeek-V3, arXiv:2412.19437, section
2.2. The base that is exported is an ordinary model, the heads draft for it.
python -m specheads.train +recipe=mtp
"""

from specheads.config import TrainConfig
from specheads.pipeline import Speculation, check_tree, start
from specheads.runs.log import RunLog
from specheads.training.engine import param_groups
from specheads.training.heldout import heldout_loss
from specheads.training.loop import Stage, fit
from specheads.training.objectives import HeadsObjective
from specheads.training.setup import build_mtp_heads, load_data, new_base, read_data


def run(cfg: TrainConfig) -> None:
    """Build the model that model.init describes, train it with its heads, export both."""
    added = cfg.mtp.num_heads - 1
    check_tree(cfg.tree, cfg.evaluate, added)
    read = read_data(cfg)
    base, output, tokenizer = new_base(cfg, fewer_layers=added if cfg.mtp.parity else 0)
    data = load_data(cfg, base, tokenizer, train_base=True, learn_all=True, read=read)
    heads = build_mtp_heads(cfg, base, output, start="random")
    speculation = Speculation(cfg, base, heads, output, tokenizer, data)

    def evaluate(step: int) -> dict[str, float]:
        loss = heldout_loss(base, output, data.heldout)["loss"]
        return speculation.evaluate(step) | {"heldout/loss": loss}

    with RunLog(cfg) as log:
        start(cfg, log, data, base=base, heads=heads)
        layers = base.config.get_text_config().num_hidden_layers
        log.say(f"{layers} layers in the base, its own output among the {added + 1} heads")
        objective = HeadsObjective(base, heads, cfg.loss, train_base=True, output=output)
        groups = param_groups(
            cfg.optim, base=(base, cfg.optim.base_lr), heads=(heads, cfg.optim.lr)
        )
        stage = Stage(objective, data.train, groups, "joint")
        if cfg.dry_run:
            speculation.plan(log, [stage])
            return
        steps = fit(stage, cfg, log, evaluate)
        speculation.export(log, steps, data.heldout, tuned=True)
