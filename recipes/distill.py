"""A draft model, distilled from the base model it is to draft for; an ordinary model of its own.

Zhou et al., arXiv:2310.08461: a smaller model (new, the base with fewer layers, or one that exists)
learns the base's distribution, on texts, on the base's own answers, or on its own
(draft.on_policy), from the running base or from what was stored of it (draft.stored); or, where
only the base's texts are known, from those (draft.loss=labels).
python -m specheads.train +recipe=distill
"""

import copy
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from specheads.config import TrainConfig
from specheads.data.chat import pad_token_id
from specheads.decoding.stream import continue_prompts
from specheads.formats import card
from specheads.measure.evaluate import (
    decode_with_draft,
    describe_costs_of_drafting,
    final_draft_evaluation,
    write_prompts,
)
from specheads.models.base import end_tokens, torch_dtype
from specheads.models.draft import (
    num_ids,
    read_provenance,
    save_draft,
    shared_vocabulary,
    vocab_size,
)
from specheads.models.names import base_digest
from specheads.models.output import output_layer
from specheads.pipeline import heldout_prompts, improving
from specheads.runs.log import Outcome, RunLog
from specheads.system import dist
from specheads.training.best import chosen as chosen_step
from specheads.training.draft_objective import DraftObjective
from specheads.training.draft_setup import (
    StoredTeacher,
    build_draft,
    check_draft,
    heldout_agreement,
)
from specheads.training.loop import Batches, fit
from specheads.training.plan import (
    count_parameters,
    describe_costs,
    describe_run,
    plan_stage,
    tokens_per_step,
)
from specheads.training.schedule import param_groups
from specheads.training.setup import load_base, load_data, read_data
from specheads.training.teachers import OnPolicyBatches


def run(cfg: TrainConfig) -> None:
    """Train a draft model, decode with it, export it as a plain Hugging Face folder."""
    check_draft(cfg)
    read = read_data(cfg)
    base, output, tokenizer = load_base(cfg)
    draft = build_draft(cfg, base, tokenizer)
    data = load_data(
        cfg, base, tokenizer, train_base=False, learn_all=cfg.draft.learn_prompts, read=read
    )
    compared = shared_vocabulary(vocab_size(base), vocab_size(draft), num_ids(tokenizer))
    records, prompts = heldout_prompts(cfg, data, tokenizer, base, draft)
    eos = end_tokens(base, tokenizer)

    options = {"vocab_size": compared, "output": output_layer(draft)}
    judge = DraftObjective(draft, base, cfg.draft, cfg.loss, base_output=output, **options)
    taught = cfg.draft.loss != "labels" and not cfg.draft.stored
    objective = judge if taught else DraftObjective(draft, None, cfg.draft, cfg.loss, **options)
    stored = None
    if cfg.draft.stored:
        stored = StoredTeacher(cfg, base, output, data, compared=compared)

    def write(
        prompts: Sequence[Sequence[int]], limits: Sequence[int], seeds: Sequence[int]
    ) -> list[list[int]]:
        temperature = cfg.draft.on_policy_temperature
        return continue_prompts(
            draft, prompts, limits, seeds, temperature=temperature, eos_token_ids=eos
        )

    def evaluate(step: int) -> dict[str, float]:
        del step
        found = decode_with_draft(base, draft, prompts, cfg.evaluate, eos)
        heldout = heldout_agreement(judge, data.heldout)
        return found | {f"heldout/{key}": value for key, value in heldout.items()}

    with RunLog(cfg) as log:
        log.say(describe_run(cfg, data, base=base, draft=draft))
        ratio = count_parameters(base) / count_parameters(draft)
        log.say(f"the draft model is {ratio:.1f} times as small as its base")
        groups = param_groups(cfg.optim, draft=(draft, cfg.optim.lr))
        batches: Batches = data.train
        if cfg.draft.on_policy:
            batches = OnPolicyBatches(
                data.train,
                write,
                share=cfg.draft.on_policy,
                max_new_tokens=cfg.draft.on_policy_tokens,
                seed=cfg.seed,
                vocab_size=compared,
                pad_token_id=pad_token_id(tokenizer),
            )
        if cfg.dry_run:
            parts = {"base": base, "draft": draft}
            plan = plan_stage(
                "draft", cfg.steps, objective, stored.stand_in() if stored else batches, groups,
                cfg, output_weight=draft.get_output_embeddings().weight, parts=parts,
            )  # fmt: skip
            notes = [stored.describe()] if stored else []
            if cfg.draft.on_policy:
                notes.append("answers that the draft model writes itself: their time on top")
            log.say(describe_costs(cfg, [plan], parts, *notes))
            if dist.is_main():
                log.say(describe_costs_of_drafting(base, draft, prompts[0], cfg.evaluate))
            return
        data.quarantine(log.dir)
        if stored:
            log.say(stored.describe())
            batches = stored.open()
        steps = fit(objective, batches, cfg, groups=groups, run=log, evaluate=evaluate)
        if not dist.is_main():
            return
        exported = copy.deepcopy(draft).eval()
        exported.to(torch_dtype(cfg.model.dtype))
        export = Path(cfg.run_dir) / "export"
        training = {
            "recipe": cfg.recipe,
            "draft": asdict(cfg.draft),
            "steps": steps,
            "positions": steps * tokens_per_step(cfg),
            "data": data.summary,
            "best": chosen_step(log.dir),
        }
        save = partial(
            save_draft,
            export,
            exported,
            tokenizer,
            base_name=cfg.model.name,
            base_revision=cfg.model.revision,
            base_digest=base_digest(cfg.model.name, revision=cfg.model.revision),
            base_dtype=cfg.model.dtype,
        )
        save(training=training, measured={})
        log.say(f"saved to {export}")
        with improving(export, log) as now:
            card.write(export, "native", read_provenance(export) or {})
            heldout = heldout_agreement(judge, data.heldout)
            log.record(steps, {f"heldout/{key}": value for key, value in heldout.items()})
            log.say(
                f"held-out alpha {heldout['alpha']:.4f}, the share of drawn guesses that is"
                f" accepted; loss {heldout['loss']:.4f} nats per token"
            )
            write_prompts(log.dir / "prompts.jsonl", records)
            found = Outcome({})
            with now.measuring("accept length and speed"):
                found = final_draft_evaluation(
                    base,
                    exported,
                    tokenizer,
                    log.dir / "prompts.jsonl",
                    cfg.evaluate,
                    samples=cfg.log.samples,
                )
                log.outcome(steps, found)
            save(training={**training, "heldout": heldout}, measured=found.figures)
            card.write(export, "native", read_provenance(export) or {}, final=found.figures)
