"""Medusa-1: heads on a frozen base model, whose own output decoding therefore reproduces.

Cai et al., arXiv:2401.10774, section 2.2.1; with heads=hydra Ankner et al., arXiv:2402.05109.
python -m specheads.train +recipe=medusa1
"""

from specheads.config import TrainConfig
from specheads.pipeline import Speculation, check_tree, start
from specheads.runs.log import RunLog
from specheads.training.loop import fit
from specheads.training.rule import decide
from specheads.training.setup import build_heads, load_base, load_data, read_data


def run(cfg: TrainConfig) -> None:
    """Train heads, choose their tree, export them."""
    check_tree(cfg.tree, cfg.evaluate, cfg.heads.num_heads)
    read = read_data(cfg)
    base, output, tokenizer = load_base(cfg)
    data = load_data(cfg, base, tokenizer, train_base=False, read=read)
    cfg = decide(cfg, base, data.train)
    heads = build_heads(cfg, base, output, data)
    speculation = Speculation(cfg, base, heads, output, tokenizer, data)
    cfg = speculation.in_time()

    with RunLog(cfg) as log:
        start(cfg, log, data, base=base, heads=heads)
        stage, heldout, notes = speculation.stage(log)
        if cfg.dry_run:
            speculation.plan(log, [stage], notes)
            return
        steps = fit(stage, cfg, log, speculation.evaluate)
        speculation.export(log, steps, heldout)
