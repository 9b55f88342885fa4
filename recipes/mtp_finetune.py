"""Multi-token-prediction heads for a base model that exists, and stays as it is or is tuned along.

Heads of arXiv:2404.19737 or DeepSeek-V3's (arXiv:2412.19437) that start as copies of the base's
last layer. mtp.train_base=true tunes the base too, itself or through LoRA (adapter=lora), on a
quantised base QLoRA.   python -m specheads.train +recipe=mtp_finetune
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
from specheads.models.quantize import quantization_of
from specheads.training.best import chosen as chosen_step
from specheads.training.cached import FeatureCache
from specheads.training.describe import describe_costs, describe_run
from specheads.training.heldout import heldout_loss, remember_original
from specheads.training.loop import Batches, fit
from specheads.training.parts import build_mtp_heads, check_mtp, heads_accuracy, heads_objective
from specheads.training.plan import plan_stage
from specheads.training.prepare import load_base, load_data, prompt_records
from specheads.training.reading import read_data
from specheads.training.schedule import param_groups


def run(cfg: TrainConfig) -> None:
    """Train heads, and the base along with them if asked; choose their tree, export them."""
    torch.manual_seed(cfg.seed)
    check_mtp(cfg)
    tuned = cfg.mtp.train_base
    read = read_data(cfg)
    base, output, tokenizer = load_base(cfg, train_base=tuned)
    data = load_data(cfg, base, tokenizer, train_base=tuned, read=read)
    heads = build_mtp_heads(cfg, base, output, start=cfg.mtp.start)
    cache = FeatureCache(cfg, base, data.train, data.heldout) if cfg.features.dir else None
    records = prompt_records(cfg, data, tokenizer, context_length(base))
    prompts = [torch.tensor([Encoder(tokenizer).prompt(r)], device=base.device) for r in records]
    eos = end_tokens(base, tokenizer)

    with RunLog(cfg) as log:
        log.say(describe_run(cfg, data, base=base, heads=heads))
        objective = heads_objective(
            cfg, None if cache else base, heads, output,
            train_base=tuned, embed=base.get_input_embeddings(),
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
            if dist.is_main():
                expected = expect(
                    base, heads, output, prompts, cfg.tree, cfg.evaluate, start=cfg.heads.start
                )
                log.say(describe_expected(expected))
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
            evaluate=lambda step: decode_heldout(base, heads, output, prompts, cfg.evaluate, eos),
        )
        if not dist.is_main():
            return
        if has_adapter(base) and merges(base, cfg.adapter.merge):
            merge_adapter(base)  # what is measured from here on is what is exported
        figures = heldout_loss(base, output, data.heldout, original) if tuned else {}
        if tuned:
            log.say(
                f"held-out loss {figures['loss']:.4f} tuned, {figures['original_loss']:.4f}"
                f" original, KL(original || tuned) {figures['kl']:.4f} nats per token"
            )
        figures |= heads_accuracy(base, heads, output, heldout)
        log.record(steps, {f"heldout/{key}": value for key, value in figures.items()})
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
            tuned_base=base if tuned else None,
            merge=cfg.adapter.merge,
            tokenizer=tokenizer,
            tree=chosen.tree,
            expected_accept_length=chosen.expected_accept_length or None,
            measured_on=chosen.measured_on,
            training={
                "recipe": cfg.recipe,
                "steps": steps,
                "data": data.summary,
                "heldout": figures,
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
