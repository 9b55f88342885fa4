"""Multi-token-prediction heads for a base model that exists, and stays as it is or is tuned along.

Heads of arXiv:2404.19737 or DeepSeek-V3's (arXiv:2412.19437) that start as copies of the base's
last layer. mtp.train_base=true tunes the base too, itself or through LoRA (adapter=lora), on a
quantised base QLoRA.   python -m specheads.train +recipe=mtp_finetune
"""

from specheads.config import TrainConfig
from specheads.pipeline import Speculation, check_tree, start
from specheads.runs.log import RunLog
from specheads.training.heldout import remember_original
from specheads.training.loop import fit
from specheads.training.setup import build_mtp_heads, check_mtp, load_base, load_data, read_data


def run(cfg: TrainConfig) -> None:
    """Train heads, and the base along with them if asked; choose their tree, export them."""
    check_mtp(cfg)
    tuned = cfg.mtp.train_base
    check_tree(cfg.tree, cfg.evaluate, cfg.mtp.num_heads - 1)
    read = read_data(cfg)
    base, output, tokenizer = load_base(cfg, train_base=tuned)
    data = load_data(cfg, base, tokenizer, train_base=tuned, read=read)
    heads = build_mtp_heads(cfg, base, output, start=cfg.mtp.start)
    speculation = Speculation(cfg, base, heads, output, tokenizer, data)

    with RunLog(cfg) as log:
        start(cfg, log, data, base=base, heads=heads)
        original = None
        if tuned and not cfg.dry_run:
            original = remember_original(base, output, data.heldout)
        stage, heldout, notes = speculation.stage(log, "joint" if tuned else "heads", tuned=tuned)
        if cfg.dry_run:
            speculation.plan(log, [stage], notes)
            return
        steps = fit(stage, cfg, log, speculation.evaluate)
        speculation.export(log, steps, heldout, tuned=tuned, original=original)
