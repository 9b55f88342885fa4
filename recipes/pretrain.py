"""Pre-train a base model from scratch: how the embedded tinycode was made.

python -m specheads.train +recipe=pretrain
"""

from pathlib import Path

from specheads.config import TrainConfig
from specheads.formats import card
from specheads.models.checkpoint import save_plain_model
from specheads.pipeline import improving, say_plan, start
from specheads.runs.log import RunLog
from specheads.system import dist
from specheads.training.engine import param_groups
from specheads.training.heldout import heldout_loss
from specheads.training.loop import Stage, fit
from specheads.training.objectives import LMObjective
from specheads.training.setup import load_data, new_base, read_data


def run(cfg: TrainConfig) -> None:
    """Build the model that model.init describes, train it, save it as a Hugging Face folder."""
    read = read_data(cfg)
    base, output, tokenizer = new_base(cfg)
    data = load_data(cfg, base, tokenizer, train_base=True, learn_all=True, read=read)

    def evaluate(step: int) -> dict[str, float]:
        return {"heldout/loss": heldout_loss(base, output, data.heldout)["loss"]}

    with RunLog(cfg) as log:
        start(cfg, log, data, base=base)
        objective = LMObjective(base, cfg.loss, output)
        groups = param_groups(cfg.optim, base=(base, cfg.optim.base_lr))
        stage = Stage(objective, data.train, groups)
        if cfg.dry_run:
            say_plan(cfg, log, [stage], {"base": base}, output.weight)
            return
        steps = fit(stage, cfg, log, evaluate)
        if not dist.is_main():
            return
        export = Path(cfg.run_dir) / "export"
        save_plain_model(export, base, tokenizer, dtype="bfloat16")
        log.say(f"saved to {export}")
        with improving(export, log):
            training = {"recipe": cfg.recipe, "steps": steps, "data": data.summary}
            card.write(export, "plain", {"training": training})
            log.metrics(steps, evaluate(steps))
