"""Medusa-2: heads first, then base model and heads together; the output is the tuned base's.

Cai et al., arXiv:2401.10774, section 2.2.2. Two stages, or one with warmup_heads=0; the base tuned
itself, or through LoRA (adapter=lora), on a quantised base QLoRA; held to the labels, or to its
original (loss.base=distill).   python -m specheads.train +recipe=medusa2
"""

from pathlib import Path

import torch
from torch import nn

from specheads import dist
from specheads.config import TrainConfig
from specheads.data.chat import Encoder
from specheads.decoding.evaluate import (
    choose_tree,
    decode_heldout,
    write_prompts,
)
from specheads.decoding.expected import describe_expected, expect
from specheads.decoding.measure import end_tokens
from specheads.decoding.outcome import final_evaluation
from specheads.formats import card
from specheads.log import RunLog
from specheads.models.adapters import has_adapter, merge_adapter, merges
from specheads.models.base import context_length
from specheads.models.checkpoint import Export, read_config, save_export
from specheads.models.digest import base_digest
from specheads.models.heads_files import as_loaded
from specheads.training.best import chosen as chosen_step
from specheads.training.describe import describe_costs, describe_run
from specheads.training.heldout import heldout_loss, remember_original
from specheads.training.loop import fit
from specheads.training.parts import build_heads, heads_accuracy, heads_objective
from specheads.training.plan import plan_stage
from specheads.training.prepare import load_base, load_data, prompt_records
from specheads.training.reading import read_data
from specheads.training.schedule import param_groups


def run(cfg: TrainConfig) -> None:
    """Train in two stages, compare the tuned base with the original, export both parts."""
    torch.manual_seed(cfg.seed)
    read = read_data(cfg)
    base, output, tokenizer = load_base(cfg, train_base=True)
    data = load_data(cfg, base, tokenizer, train_base=True, read=read)
    heads = build_heads(cfg, base, output, data)
    records = prompt_records(cfg, data, tokenizer, context_length(base))
    prompts = [torch.tensor([Encoder(tokenizer).prompt(r)], device=base.device) for r in records]
    eos = end_tokens(base, tokenizer)

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
            objective = heads_objective(cfg, base, heads, output, train_base=joint)
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
                evaluate=lambda step: decode_heldout(
                    base, heads, output, prompts, cfg.evaluate, eos
                ),
            )
        if cfg.dry_run:
            log.say(describe_costs(cfg, plans, {"base": base, "heads": heads}))
        if not dist.is_main():
            return
        if cfg.dry_run:
            expected = expect(
                base, heads, output, prompts, cfg.tree, cfg.evaluate, start=cfg.heads.start
            )
            log.say(describe_expected(expected))
            return
        if has_adapter(base) and merges(base, cfg.adapter.merge):
            merge_adapter(base)  # what is measured from here on is what is exported
        moved = heldout_loss(base, output, data.heldout, original)
        moved |= heads_accuracy(base, heads, output, data.heldout)
        log.record(steps, {f"heldout/{key}": value for key, value in moved.items()})
        log.say(
            f"held-out loss {moved['loss']:.4f} tuned, {moved['original_loss']:.4f} original, "
            f"KL(original || tuned) {moved['kl']:.4f} nats per token"
        )
        log.say("measuring trees ...")
        chosen = choose_tree(
            base, heads, output, prompts, cfg.tree, cfg.evaluate, eos, seed=cfg.seed
        )
        export = Path(cfg.run_dir) / "export"
        save_export(
            export,
            heads,
            base_name=cfg.model.name,
            base_revision=cfg.model.revision,
            base_digest=base_digest(cfg.model.name, revision=cfg.model.revision),
            base_dtype=cfg.model.dtype,
            tuned_base=base,
            merge=cfg.adapter.merge,
            tokenizer=tokenizer,
            tree=chosen.tree,
            expected_accept_length=chosen.expected_accept_length or None,
            measured_on=chosen.measured_on,
            training={
                "recipe": cfg.recipe,
                "steps": steps,
                "data": data.summary,
                "heldout": moved,
                "best": chosen_step(log.dir),
            },
        )
        log.say(f"tree of {chosen.tree.num_nodes} nodes; exported to {export}")
        if not chosen.speculate:
            log.say("slower than plain decoding on this machine: do not speculate here")
        write_prompts(log.dir / "prompts.jsonl", records)
        base.eval()
        loaded = Export(base, as_loaded(heads, base), tokenizer, chosen.tree, read_config(export))
        found = final_evaluation(
            loaded, log.dir / "prompts.jsonl", cfg.evaluate, samples=cfg.log.samples
        )
        log.outcome(steps, found)
        card.write(export, "native", read_config(export), final=found.figures)
