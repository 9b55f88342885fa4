"""What the recipes share around their training: what it is measured on, and the export after it.

The export comes first, with a tree that nobody has measured, and is improved then: what fails after
training costs figures, never what was trained.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads.attention.tree import Tree
from specheads.config import ConfigError, EvaluateConfig, TrainConfig, TreeConfig
from specheads.data.chat import Encoder
from specheads.data.schema import Record
from specheads.formats import card
from specheads.measure.calibrate import Calibration, describe_expected, expect
from specheads.measure.evaluate import choose_tree, decode_heldout, final_evaluation, write_prompts
from specheads.models.adapters import has_adapter, merge_adapter, merges
from specheads.models.base import context_length, end_tokens
from specheads.models.checkpoint import Export, as_loaded, read_config, save_export, set_tree
from specheads.models.kinds import Heads
from specheads.models.names import base_digest
from specheads.models.output import OutputLayer
from specheads.models.quantize import quantization_of
from specheads.runs.log import Outcome, RunLog
from specheads.system import dist
from specheads.training.best import chosen as chosen_step
from specheads.training.heldout import Original, heldout_loss
from specheads.training.setup import Data, heads_accuracy, prompt_records


def check_tree(tree: TreeConfig, evaluate: EvaluateConfig, num_heads: int) -> None:
    """Refuse, before anything is loaded, a tree that these heads cannot have or cannot measure.

    Raises:
        ConfigError: naming the key, what was found and what was expected.
    """
    if not tree.choices:
        least = num_heads + 2  # the first token is the prefill's, and the last is nobody's root
        if evaluate.max_new_tokens < least:
            raise ConfigError(
                f"evaluate.max_new_tokens is {evaluate.max_new_tokens}, which leaves no position to"
                f" measure a tree of {num_heads} heads at: expected at least {least}, or the tree"
                " in tree.choices"
            )
        return
    try:
        depth = Tree.from_choices(tree.choices).max_depth
    except ValueError as error:
        raise ConfigError(f"tree.{error}") from None
    if depth > num_heads:
        raise ConfigError(f"tree.choices is {depth} deep, but there are {num_heads} heads")


def heldout_prompts(
    cfg: TrainConfig, data: Data, tokenizer: PreTrainedTokenizerBase, *models: PreTrainedModel
) -> tuple[list[Record], list[Tensor]]:
    """Return the held-out records that ``models`` decode, and their prompts, token ids [1, P] each.

    Raises:
        ConfigError: if there is none that leaves the models room for the new tokens.
    """
    context = min((n for model in models if (n := context_length(model))), default=None)
    records = prompt_records(cfg, data, tokenizer, context)
    if not records:
        raise ConfigError(
            "no held-out record has a prompt that leaves room for evaluate.max_new_tokens="
            f"{cfg.evaluate.max_new_tokens}: it may have at most data.seq_len={cfg.data.seq_len}"
            f" tokens, and the model's context is {context or 'not known'}"
        )
    encoder, device = Encoder(tokenizer), models[0].device
    return records, [torch.tensor([encoder.prompt(record)], device=device) for record in records]


@dataclass
class Improving:
    """What could not be measured, each with the reason."""

    missing: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def measuring(self, what: str) -> Iterator[None]:
        """Go on without ``what`` where it cannot be measured, which a ConfigError says."""
        try:
            yield
        except ConfigError as error:
            self.missing.append(f"{what} ({error})")


@contextlib.contextmanager
def improving(export: Path, log: RunLog) -> Iterator[Improving]:
    """Measure what lies whole in ``export``, and say in one line what could not be.

    Any other error is raised, after a line which says that the export is not touched by it.
    """
    found = Improving()
    try:
        yield found
    except Exception as error:
        log.say(
            f"{export} is whole; what followed it failed: {type(error).__name__}: {error};"
            " resume=auto tries again"
        )
        raise
    if found.missing:
        log.say(f"not measured: {'; '.join(found.missing)}; {export} is whole without")


class Speculation:
    """Heads, the base that they guess for, and the held-out prompts that both are measured on."""

    def __init__(
        self,
        cfg: TrainConfig,
        base: PreTrainedModel,
        heads: Heads,
        output: OutputLayer,
        tokenizer: PreTrainedTokenizerBase,
        data: Data,
    ) -> None:
        """Choose the prompts.

        Args:
            cfg: the run's settings, whose tree :func:`check_tree` has nothing against.
            base: base model.
            heads: to be trained.
            output: the base's output layer.
            tokenizer: of the base.
            data: the run's.

        Raises:
            ConfigError: if there are no prompts, or the tree has ranks that no head can guess.
        """
        deepest = max((rank for choice in cfg.tree.choices for rank in choice), default=-1)
        if deepest >= heads.num_outputs:
            raise ConfigError(
                f"tree.choices uses rank {deepest}, a head guesses among {heads.num_outputs} tokens"
            )
        self.cfg, self.base, self.heads, self.output = cfg, base, heads, output
        self.tokenizer, self.data = tokenizer, data
        self.records, self.prompts = heldout_prompts(cfg, data, tokenizer, base)
        self.eos = end_tokens(base, tokenizer)

    def evaluate(self, step: int) -> dict[str, float]:
        """Decode the prompts with the heads as they are, see ``decode_heldout``."""
        del step
        return decode_heldout(
            self.base, self.heads, self.output, self.prompts, self.cfg.evaluate, self.eos
        )

    def say_expected(self, log: RunLog) -> None:
        """Say, on rank 0, what speculation is expected to bring; nothing has to be trained yet."""
        if dist.is_main():
            expected = expect(
                self.base, self.heads, self.output, self.prompts, self.cfg.tree, self.cfg.evaluate,
                start=self.cfg.heads.start,
            )  # fmt: skip
            log.say(describe_expected(expected))

    def export(
        self,
        log: RunLog,
        steps: int,
        heldout: Sequence[dict[str, Any]],
        *,
        tuned: bool = False,
        original: Original | None = None,
    ) -> None:
        """Write the export, then choose its tree and measure it; on rank 0, alone.

        Args:
            log: the open run directory.
            steps: that were taken.
            heldout: packed held-out rows for the losses; with cached features if there are any.
            tuned: whether the base was trained too; an adapter is merged as the settings say.
            original: what a tuned base predicted before, from ``remember_original``; None where
                there was none, as it was trained from scratch.

        Raises:
            RunError: if the disk is full.
        """
        if not dist.is_main():
            return
        cfg, base, heads = self.cfg, self.base, self.heads
        if tuned and has_adapter(base) and merges(base, cfg.adapter.merge):
            merge_adapter(base)  # what is measured from here on is what is exported
        name = "" if tuned and original is None else cfg.model.name
        export, tree = Path(cfg.run_dir) / "export", self._tree()
        save_export(
            export,
            heads,
            base_name=name,
            base_revision=cfg.model.revision if name else None,
            base_digest=base_digest(name, revision=cfg.model.revision) if name else "",
            base_dtype=cfg.model.dtype,
            base_quantization=quantization_of(base),
            tuned_base=base if tuned else None,
            merge=cfg.adapter.merge,
            tokenizer=self.tokenizer,
            tree=tree,
            training={
                "recipe": cfg.recipe,
                "steps": steps,
                "data": self.data.summary,
                "best": chosen_step(log.dir),
            },
        )
        with improving(export, log) as now:
            card.write(export, "native", read_config(export))
            figures: dict[str, float] = {}
            with now.measuring("held-out loss and accuracy"):
                figures = self._heldout(log, heldout, original, tuned=tuned)
                log.record(steps, {f"heldout/{key}": value for key, value in figures.items()})
            log.say("measuring trees ...")
            chosen = Calibration(tree, 0.0, {})
            with now.measuring("the tree"):
                chosen = choose_tree(
                    base, heads, self.output, self.prompts, cfg.tree, cfg.evaluate, self.eos,
                    seed=cfg.seed,
                )  # fmt: skip
            set_tree(
                export,
                chosen.tree,
                chosen.expected_accept_length or None,
                chosen.measured_on or None,
                heldout=figures,
            )
            log.say(f"tree of {chosen.tree.num_nodes} nodes; exported to {export}")
            if not chosen.speculate:
                log.say("slower than plain decoding on this machine: do not speculate here")
            write_prompts(log.dir / "prompts.jsonl", self.records)
            base.eval()
            config = read_config(export)
            loaded = Export(base, as_loaded(heads, base), self.tokenizer, chosen.tree, config)
            found = Outcome({})
            with now.measuring("accept length and speed"):
                found = final_evaluation(
                    loaded, log.dir / "prompts.jsonl", cfg.evaluate, samples=cfg.log.samples
                )
                log.outcome(steps, found)
            card.write(export, "native", config, final=found.figures)

    def _tree(self) -> Tree:
        """Return the tree of the settings, or a chain until one is measured."""
        tree, num_heads = self.cfg.tree, self.heads.num_heads
        if tree.choices:
            return Tree.from_choices(tree.choices)
        return Tree.chain(min(num_heads, tree.num_nodes - 1) if tree.num_nodes else num_heads)

    def _heldout(
        self,
        log: RunLog,
        heldout: Sequence[dict[str, Any]],
        original: Original | None,
        *,
        tuned: bool,
    ) -> dict[str, float]:
        """Return the held-out figures of the heads and of a trained base, and say its loss."""
        base, output = self.base, self.output
        figures = heldout_loss(base, output, heldout, original) if tuned else {}
        if original:
            log.say(
                f"held-out loss {figures['loss']:.4f} tuned, {figures['original_loss']:.4f}"
                f" original, KL(original || tuned) {figures['kl']:.4f} nats per token"
            )
        elif tuned:
            log.say(f"held-out loss {figures['loss']:.4f} nats per token")
        return figures | heads_accuracy(base, self.heads, output, heldout)
