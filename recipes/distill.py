"""A draft model, distilled from the base model it is to draft for; an ordinary model of its own.

Zhou et al., arXiv:2310.08461: a smaller model (new, the base with fewer layers, or one that exists)
learns the base's distribution, on texts, on the base's own answers, or on its own
(draft.on_policy), from the running base or from what was stored of it (draft.stored), by this
recipe or by a server that wrote the answers (regenerate logprobs=); or, where only the base's texts
are known, from those (draft.loss=labels). For both of the last two its weights need not be here.
python -m specheads.train +recipe=distill
"""

from typing import Any

from specheads.config import TrainConfig
from specheads.models.base import without_weights
from specheads.models.draft import vocab_size
from specheads.models.output import output_layer
from specheads.pipeline import Drafting, start
from specheads.runs.log import RunLog
from specheads.training.engine import param_groups
from specheads.training.loop import Batches, Stage, fit
from specheads.training.objectives import DraftObjective
from specheads.training.plan import count_parameters
from specheads.training.setup import build_draft, check_draft, load_base, load_data, read_data
from specheads.training.teachers import OnPolicyBatches, stored_teacher


def run(cfg: TrainConfig) -> None:
    """Train a draft model, decode with it, export it as a plain Hugging Face folder."""
    check_draft(cfg)
    wanted, read = cfg.draft, read_data(cfg)
    base, output, tokenizer = load_base(cfg, weights=not without_weights(cfg.model.name))
    draft = build_draft(cfg, base, tokenizer)
    compared = min(vocab_size(base), vocab_size(draft))  # what is beyond is padding
    data = load_data(
        cfg, base, tokenizer, train_base=False, learn_all=wanted.learn_prompts, read=read
    )
    own: dict[str, Any] = {"vocab_size": compared, "output": output_layer(draft)}
    judge = DraftObjective(draft, base, wanted, cfg.loss, base_output=output, **own)
    drafting = Drafting(cfg, judge, tokenizer, data)

    with RunLog(cfg) as log:
        start(cfg, log, data, base=base, draft=draft)
        ratio = count_parameters(base) / count_parameters(draft)
        log.say(f"the draft model is {ratio:.1f} times as small as its base")
        batches: Batches = data.train
        notes: list[str] = []
        if wanted.stored:
            batches, notes = stored_teacher(cfg, base, output, data.train, compared, log)
        if wanted.on_policy:
            batches = OnPolicyBatches(
                data.train,
                drafting.write,
                share=wanted.on_policy,
                max_new_tokens=wanted.on_policy_tokens,
                seed=cfg.seed,
                vocab_size=compared,
                pad_token_id=int(tokenizer.pad_token_id or 0),
            )
            notes = ["answers that the draft model writes itself: their time on top"]
        objective = judge
        if wanted.stored or wanted.loss == "labels":  # the base is not run
            objective = DraftObjective(draft, None, wanted, cfg.loss, **own)
        stage = Stage(objective, batches, param_groups(cfg.optim, draft=(draft, cfg.optim.lr)))
        if cfg.dry_run:
            drafting.plan(log, stage, notes)
            return
        steps = fit(stage, cfg, log, drafting.evaluate)
        drafting.export(log, steps)
