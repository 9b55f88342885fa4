"""Medusa-1: heads on a frozen base model, whose own output decoding therefore reproduces.

Cai et al., arXiv:2401.10774, section 2.2.1; with heads=hydra Ankner et al., arXiv:2402.05109.
python -m specheads.train +recipe=medusa1
"""

from pathlib import Path

import torch

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
from specheads.models.base import context_length
from specheads.models.checkpoint import Export, read_config, save_export
from specheads.models.digest import base_digest
from specheads.models.heads_files import as_loaded
from specheads.models.quantize import quantization_of
from specheads.training.best import chosen as chosen_step
from specheads.training.cached import FeatureCache
from specheads.training.describe import describe_costs, describe_run
from specheads.training.loop import Batches, fit
from specheads.training.parts import build_heads, heads_accuracy, heads_objective
from specheads.training.plan import plan_stage
from specheads.training.prepare import load_base, load_data, prompt_records
from specheads.training.reading import read_data
from specheads.training.schedule import param_groups


def run(cfg: TrainConfig) -> None:
    """Train heads, choose their tree, export them."""
    torch.manual_seed(cfg.seed)
    read = read_data(cfg)
    base, output, tokenizer = load_base(cfg)
    data = load_data(cfg, base, tokenizer, train_base=False, read=read)
    heads = build_heads(cfg, base, output, data)
    cache = FeatureCache(cfg, base, data.train, data.heldout) if cfg.features.dir else None
    records = prompt_records(cfg, data, tokenizer, context_length(base))
    prompts = [torch.tensor([Encoder(tokenizer).prompt(r)], device=base.device) for r in records]
    eos = end_tokens(base, tokenizer)

    with RunLog(cfg) as log:
        log.say(describe_run(cfg, data, base=base, heads=heads))
        objective = heads_objective(
            cfg, None if cache else base, heads, output, embed=base.get_input_embeddings()
        )
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
            if dist.is_main():
                expected = expect(
                    base, heads, output, prompts, cfg.tree, cfg.evaluate, start=cfg.heads.start
                )
                log.say(describe_expected(expected))
            return
        data.quarantine(log.dir)
        if cache:
            log.say(cache.describe())
        heldout = data.heldout
        if cache:
            batches, heldout = cache.open(base)
        steps = fit(
            objective,
            batches,
            cfg,
            groups=groups,
            run=log,
            evaluate=lambda step: decode_heldout(base, heads, output, prompts, cfg.evaluate, eos),
        )
        if not dist.is_main():
            return
        accuracy = heads_accuracy(base, heads, output, heldout)
        log.record(steps, {f"heldout/{key}": value for key, value in accuracy.items()})
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
            base_quantization=quantization_of(base),
            tokenizer=tokenizer,
            tree=chosen.tree,
            expected_accept_length=chosen.expected_accept_length or None,
            measured_on=chosen.measured_on,
            training={
                "recipe": cfg.recipe,
                "steps": steps,
                "data": data.summary,
                "heldout": accuracy,
                "best": chosen_step(log.dir),
            },
        )
        log.say(f"tree of {chosen.tree.num_nodes} nodes; exported to {export}")
        if not chosen.speculate:
            log.say("slower than plain decoding on this machine: do not speculate here")
        write_prompts(log.dir / "prompts.jsonl", records)
        loaded = Export(base, as_loaded(heads, base), tokenizer, chosen.tree, read_config(export))
        found = final_evaluation(
            loaded, log.dir / "prompts.jsonl", cfg.evaluate, samples=cfg.log.samples
        )
        log.outcome(steps, found)
        card.write(export, "native", read_config(export), final=found.figures)
