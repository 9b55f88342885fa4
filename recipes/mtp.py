"""Multi-token prediction from scratch: base model and heads learn together from the first step.

Gloeckle et al., arXiv:2404.19737; mtp.variant=sequential: DeepSeek-V3, arXiv:2412.19437, section
2.2. The base that is exported is an ordinary model, the heads draft for it.
python -m specheads.train +recipe=mtp
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
from specheads.models.heads_files import as_loaded
from specheads.training.best import chosen as chosen_step
from specheads.training.describe import describe_costs, describe_run
from specheads.training.heldout import heldout_loss
from specheads.training.loop import fit
from specheads.training.parts import build_mtp_heads, heads_accuracy, heads_objective
from specheads.training.plan import plan_stage
from specheads.training.prepare import load_data, prompt_records
from specheads.training.reading import read_data
from specheads.training.schedule import param_groups
from specheads.training.scratch import new_base


def run(cfg: TrainConfig) -> None:
    """Build the model that model.init describes, train it with its heads, export both."""
    torch.manual_seed(cfg.seed)
    added = cfg.mtp.num_heads - 1
    read = read_data(cfg)
    base, output, tokenizer = new_base(cfg, fewer_layers=added if cfg.mtp.parity else 0)
    data = load_data(cfg, base, tokenizer, train_base=True, learn_all=True, read=read)
    heads = build_mtp_heads(cfg, base, output, start="random")
    records = prompt_records(cfg, data, tokenizer, context_length(base))
    prompts = [torch.tensor([Encoder(tokenizer).prompt(r)], device=base.device) for r in records]
    eos = end_tokens(base, tokenizer)

    def evaluate(step: int) -> dict[str, float]:
        del step
        found = decode_heldout(base, heads, output, prompts, cfg.evaluate, eos)
        return found | {"heldout/loss": heldout_loss(base, output, data.heldout)["loss"]}

    with RunLog(cfg) as log:
        log.say(describe_run(cfg, data, base=base, heads=heads))
        layers = base.config.get_text_config().num_hidden_layers
        log.say(f"{layers} layers in the base, its own output among the {added + 1} heads")
        objective = heads_objective(cfg, base, heads, output, train_base=True)
        parts = {"base": base, "heads": heads}
        groups = param_groups(
            cfg.optim, base=(base, cfg.optim.base_lr), heads=(heads, cfg.optim.lr)
        )
        if cfg.dry_run:
            plan = plan_stage(
                "joint", cfg.steps, objective, data.train, groups, cfg,
                output_weight=output.weight, parts=parts,
            )  # fmt: skip
            log.say(describe_costs(cfg, [plan], parts))
            if dist.is_main():
                expected = expect(base, heads, output, prompts, cfg.tree, cfg.evaluate)
                log.say(describe_expected(expected))
            return
        data.quarantine(log.dir)
        steps = fit(
            objective,
            data.train,
            cfg,
            groups=groups,
            run=log,
            stage="joint",
            evaluate=evaluate,
        )
        if not dist.is_main():
            return
        heldout = heldout_loss(base, output, data.heldout)
        heldout |= heads_accuracy(base, heads, output, data.heldout)
        log.record(steps, {f"heldout/{key}": value for key, value in heldout.items()})
        log.say(f"held-out loss {heldout['loss']:.4f} nats per token")
        log.say("measuring trees ...")
        chosen = choose_tree(
            base, heads, output, prompts, cfg.tree, cfg.evaluate, eos, seed=cfg.seed
        )
        export = Path(cfg.run_dir) / "export"
        save_export(
            export,
            heads,
            base_name="",
            base_digest="",
            tuned_base=base,
            tokenizer=tokenizer,
            tree=chosen.tree,
            expected_accept_length=chosen.expected_accept_length or None,
            measured_on=chosen.measured_on,
            training={
                "recipe": cfg.recipe,
                "steps": steps,
                "data": data.summary,
                "heldout": heldout,
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
