"""What the recipes share around their training: what it is measured on, and the export after it.

The export comes first, with a tree that nobody has measured, and is improved then: what fails after
training costs figures, never what was trained.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads.attention.tree import Tree
from specheads.config import ConfigError, EvaluateConfig, TrainConfig, TreeConfig
from specheads.data.chat import Encoder
from specheads.data.pack import Batch
from specheads.data.schema import Record
from specheads.decoding.stream import continue_prompts
from specheads.formats import card
from specheads.measure import evaluate as evaluation
from specheads.measure.calibrate import Calibration, Search, calibrate
from specheads.measure.clock import Budget, Prompt
from specheads.measure.hits import Texts
from specheads.models import checkpoint
from specheads.models.adapters import has_adapter, merge_adapter, merges
from specheads.models.base import (
    context_length,
    end_tokens,
    input_device,
    torch_dtype,
    without_weights,
)
from specheads.models.draft import save_draft
from specheads.models.kinds import Heads
from specheads.models.manifest import read_provenance
from specheads.models.output import OutputLayer
from specheads.models.quantize import quantization_of
from specheads.models.sharded import is_sharded, runnable, take_part
from specheads.runs.log import RunLog
from specheads.system import dist, hardware, heartbeat
from specheads.system.errors import refuse
from specheads.training.best import chosen as chosen_step
from specheads.training.checkpoints import ready_to_resume, seed_generators
from specheads.training.engine import param_groups
from specheads.training.forecast import forecast
from specheads.training.heldout import Original, heads_accuracy, heldout_agreement, heldout_loss
from specheads.training.loop import Stage
from specheads.training.objectives import DraftObjective, HeadsObjective
from specheads.training.plan import describe_costs, describe_run, plan_stage, tokens_per_step
from specheads.training.rule import steps_for_time
from specheads.training.setup import Data, in_section, prompt_records
from specheads.training.teachers import Log, cached_features


def run_recipe(
    run: Callable[[TrainConfig], None], cfg: TrainConfig, say: Callable[[str], None]
) -> None:
    """Run a recipe in its directory, resumed where that is asked for, with its threads and seeds.

    Raises:
        ConfigError: if there is nothing that could be resumed.
    """
    if cfg.dry_run and cfg.recipe != "distill" and without_weights(cfg.model.name):
        say(str(forecast(cfg)))
        return
    if cfg.resume:
        cfg = ready_to_resume(cfg, say)
    hardware.pin_threads(None)
    seed_generators(cfg.seed)
    if not sys.stderr.isatty():
        hardware.quiet_loading()
    with heartbeat.together():
        run(cfg)


def check_tree(tree: TreeConfig, evaluate: EvaluateConfig, num_heads: int) -> None:
    """Refuse, before anything is loaded, a tree that these heads cannot have or cannot measure.

    Raises:
        ConfigError: naming the key, what was found and what was expected.
    """
    if not tree.choices:
        least = num_heads + 2  # the first token is the prefill's, and the last is nobody's root
        short = evaluate.max_new_tokens < least
        found = f"evaluate.max_new_tokens is {evaluate.max_new_tokens}, which leaves no position to"
        asked = f"expected at least {least}, or the tree in tree.choices"
        refuse({f"{found} measure a tree of {num_heads} heads at: {asked}": short})
        return
    with in_section("tree"):
        depth = Tree.from_choices(tree.choices).max_depth
    deeper = f"tree.choices is {depth} deep, but there are {num_heads} heads"
    refuse({deeper: depth > num_heads})


def heldout_prompts(
    cfg: TrainConfig, data: Data, tokenizer: PreTrainedTokenizerBase, *models: PreTrainedModel
) -> tuple[list[Record], evaluation.Heldout]:
    """Return the held-out records that ``models``, the base first, decode, and their prompts.

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
    encoder, base = Encoder(tokenizer), models[0]
    ids = [torch.tensor([encoder.prompt(record)], device=input_device(base)) for record in records]
    prompts = [Prompt(str(i), "heldout", each) for i, each in enumerate(ids)]
    return records, evaluation.Heldout(base, prompts, cfg.evaluate, end_tokens(base, tokenizer))


def start(cfg: TrainConfig, log: RunLog, data: Data, **parts: nn.Module) -> None:
    """Say what the run is going to do with its parts, and keep the records that it cannot use."""
    log.say(describe_run(cfg, data, **parts))
    if not cfg.dry_run:
        data.quarantine(log.dir)


def say_plan(
    cfg: TrainConfig,
    log: RunLog,
    stages: Iterable[Stage],
    parts: Mapping[str, nn.Module],
    output_weight: Tensor,
    notes: Sequence[str] = (),
) -> None:
    """Say what the stages of a dry run need, see ``plan_stage`` and ``describe_costs``."""
    plans = [plan_stage(stage, cfg, parts, output_weight) for stage in stages]
    log.say(describe_costs(cfg, plans, parts, *notes))


TRAINING_SHARE = 0.2  # of the time that training takes, for what is measured after it


def measuring_time(evaluate: EvaluateConfig, log: RunLog) -> Budget:
    """Return the time for tree and final figures: ``evaluate.minutes``, or a share of the training.

    At least a minute. Without limit where this start of a run took no step of it.
    """
    return Budget(60 * evaluate.minutes or max(60.0, TRAINING_SHARE * log.training_seconds()))


def measure_final(
    speculation: Speculation | Drafting,
    log: RunLog,
    steps: int,
    measured: checkpoint.Export | PreTrainedModel,
    budget: Budget,
) -> dict[str, float]:
    """Return the final figures of what a user loads, kept in the log, and the prompts beside it.

    A line says how many prompts they are of, where ``budget`` does not suffice for all.
    """
    evaluation.write_prompts(log.dir / "prompts.jsonl", speculation.records)
    log.doing("measuring accept length and speed")
    timed, samples = replace(speculation.heldout, budget=budget), speculation.cfg.log.samples
    found = evaluation.final_evaluation(timed, speculation.tokenizer, measured, samples=samples)
    log.outcome(steps, found)
    asked = len(speculation.records)
    used = min(n for key, n in found.figures.items() if key.startswith("final/prompts/"))
    if used < asked:
        log.say(f"measured on {used:.0f} of {asked} prompts: its time was over (evaluate.minutes)")
    return found.figures


@contextlib.contextmanager
def improving(export: Path, log: RunLog) -> Iterator[Callable[[str], AbstractContextManager[None]]]:
    """Measure what lies whole in ``export``, and say in one line what could not be.

    Yields:
        A context that goes on without what it is given the name of where that cannot be measured,
        which a ConfigError says. Any other error is raised, after a line which says that the export
        is not touched by it.
    """
    missing: list[str] = []

    @contextlib.contextmanager
    def measuring(what: str) -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            missing.append(f"{what} ({error})")

    try:
        yield measuring
    except Exception as error:
        log.say(
            f"{export} is whole; what followed it failed: {type(error).__name__}: {error};"
            " resume=auto tries again"
        )
        raise
    if missing:
        log.say(f"not measured: {'; '.join(missing)}; {export} is whole without")


@dataclass
class Speculation:
    """Heads, the base that they guess for, and the held-out prompts that both are measured on.

    Attributes:
        cfg: the run's settings, whose tree :func:`check_tree` has nothing against.
        base: base model.
        heads: to be trained.
        output: the base's output layer.
        tokenizer: of the base.
        data: the run's.

    Raises:
        ConfigError: if there are no prompts, or the tree has ranks that no head can guess.
    """

    cfg: TrainConfig
    base: PreTrainedModel
    heads: Heads
    output: OutputLayer
    tokenizer: PreTrainedTokenizerBase
    data: Data

    def __post_init__(self) -> None:
        """Choose the prompts."""
        cfg, heads = self.cfg, self.heads
        deepest = max((rank for choice in cfg.tree.choices for rank in choice), default=-1)
        few = f"tree.choices uses rank {deepest}, a head guesses among {heads.num_outputs} tokens"
        refuse({few: deepest >= heads.num_outputs})
        self.records, self.heldout = heldout_prompts(cfg, self.data, self.tokenizer, self.base)
        self.parts = {"base": self.base, "heads": cast(nn.Module, heads)}

    def stage(
        self, log: Log | None, name: str = "train", *, tuned: bool = False
    ) -> tuple[Stage, list[Batch], list[str]]:
        """Return the one stage of a run: the heads, on the base itself or on its stored states.

        Args:
            log: told of what is stored; nothing is without it, and states that are read are zeros.
            name: of the stage in checkpoints.
            tuned: whether the base learns too.

        Returns:
            The stage, held-out rows and lines for a dry run, see ``cached_features``.
        """
        cfg, base, heads = self.cfg, self.base, self.heads
        with runnable(base):
            batches, heldout, notes = cached_features(cfg, base, self.data, log, heads.taps)
        heads.read_through(base)
        objective = HeadsObjective(
            None if cfg.features.source else base, heads, cfg.loss,
            train_base=tuned, output=self.output,
        )  # fmt: skip
        parts = {"heads": (cast(nn.Module, heads), cfg.optim.lr)}
        if tuned:
            parts["base"] = (base, cfg.optim.base_lr)
        groups = param_groups(cfg.optim, **parts)
        return Stage(objective, batches, groups, name), heldout, notes

    def pace(self, log: Log | None) -> float:
        """Return the measured seconds of a step's passes; ``log`` as for :meth:`stage`."""
        stage, _, _ = self.stage(log)
        with runnable(self.base):
            return plan_stage(stage, self.cfg, self.parts, self.output.weight).seconds_per_step

    def in_time(self) -> TrainConfig:
        """Return the settings, with the steps that ``minutes`` hold where these are asked for."""
        if self.cfg.minutes:
            pace = self.pace(None)
            steps = steps_for_time(self.cfg.minutes, pace)
            if dist.is_main():
                print(f"{self.cfg.minutes:g} minutes: {steps:,} steps of {pace:.2f} s", flush=True)
            self.cfg = replace(self.cfg, steps=steps, minutes=0.0)
        return self.cfg

    def evaluate(self, step: int) -> dict[str, float]:
        """Decode the prompts with the heads as they are, see ``decode_heldout``."""
        return evaluation.decode_heldout(self.heldout, self.heads, self.output)

    def plan(self, log: RunLog, stages: Iterable[Stage], notes: Sequence[str] = ()) -> None:
        """Say what a dry run's stages need, and above which accept length speculation pays."""
        say_plan(self.cfg, log, stages, self.parts, self.output.weight, notes)
        if dist.is_main():
            log.say(
                evaluation.describe_expected(self.heldout, self.heads, self.output, self.cfg.tree)
            )

    def heldout_figures(
        self, heldout: Sequence[dict[str, Any]], original: Original | None, *, tuned: bool
    ) -> dict[str, float]:
        """Return held-out losses of a tuned base and accuracies of the heads.

        All ranks call it together where the base lies in parts.
        """
        with runnable(self.base):
            figures = heldout_loss(self.base, self.output, heldout, original) if tuned else {}
            return figures | heads_accuracy(self.base, self.heads, self.output, heldout)

    def export(
        self,
        log: RunLog,
        steps: int,
        heldout: Sequence[dict[str, Any]],
        *,
        tuned: bool = False,
        original: Original | None = None,
    ) -> None:
        """Write the export, then choose its tree and measure it; on rank 0.

        Other ranks have something to do where the base lies in parts. No tree is searched then.

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
        cfg, base, heads = self.cfg, self.base, self.heads
        merged = tuned and has_adapter(base) and merges(base, cfg.adapter.merge)
        in_parts = is_sharded(base)
        if not dist.is_main():
            if in_parts and tuned and (merged or not has_adapter(base)):
                take_part(base)
            if in_parts and not cfg.features.source:  # which stands in for the base
                self.heldout_figures(heldout, original, tuned=tuned)
            return
        if merged and not in_parts:
            merge_adapter(base)  # what is measured from here on is what is exported
        name = "" if tuned and original is None else cfg.model.name
        export, count = Path(cfg.run_dir) / "export", heads.num_heads
        if cfg.tree.choices:
            tree = Tree.from_choices(cfg.tree.choices)
        else:  # until one is measured
            tree = Tree.chain(min(count, (cfg.tree.num_nodes or count + 1) - 1))
        training = {
            "recipe": cfg.recipe,
            "steps": steps,
            "data": self.data.summary,
            "best": chosen_step(log.dir),
        }
        info = checkpoint.origin(
            name, training, revision=cfg.model.revision, dtype=cfg.model.dtype,
            quantization=quantization_of(base),
        )  # fmt: skip
        tuned_base = base if tuned else None
        checkpoint.save_export(
            export, heads, self.tokenizer, tree, info, tuned_base=tuned_base, merge=merged
        )
        with improving(export, log) as measuring:
            card.write(export, "native", checkpoint.read_config(export))
            figures: dict[str, float] = {}
            budget = measuring_time(cfg.evaluate, log)
            log.doing("measuring held-out loss and accuracy")
            with measuring("held-out loss and accuracy"):
                figures = self.heldout_figures(heldout, original, tuned=tuned)
                if tuned:
                    moved = ""
                    if original:
                        moved = f" tuned, {figures['original_loss']:.4f} original,"
                        moved += f" KL(original || tuned) {figures['kl']:.4f}"
                    log.say(f"held-out loss {figures['loss']:.4f}{moved} nats per token")
                log.record(steps, {f"heldout/{key}": value for key, value in figures.items()})
            if in_parts:
                checkpoint.set_tree(export, tree, None, None, heldout=figures)
                log.say(
                    f"exported to {export} with a chain: no rank has the whole base to decode with;"
                    f" python -m specheads.tree_search checkpoint={export} finds the tree on a"
                    " machine that holds it, python -m specheads.bench measures"
                )
                return
            log.say("measuring trees ...")
            log.doing("measuring trees")
            base.eval()
            heads.eval()
            chosen = Calibration(tree, 0.0, {})
            ids, ends = [p.input_ids for p in self.heldout.prompts], self.heldout.eos_token_ids
            texts = Texts(ids, ends, cfg.evaluate.max_new_tokens, seed=cfg.seed)
            search = Search(cfg.tree.num_nodes, budget=budget.part(0.5))
            if not cfg.tree.choices:
                with measuring("the tree"), torch.inference_mode():
                    chosen = calibrate(base, heads, self.output, texts, search)
            length, about = chosen.expected_accept_length or None, chosen.measured_on or None
            checkpoint.set_tree(export, chosen.tree, length, about, heldout=figures)
            log.say(f"tree of {chosen.tree.num_nodes} nodes; exported to {export}")
            if not chosen.measured_on.get("speculate", True):
                log.say("slower than plain decoding on this machine: do not speculate here")
            config = checkpoint.read_config(export)
            parts = base, checkpoint.as_loaded(heads, base), self.tokenizer, chosen.tree
            loaded = checkpoint.Export(*parts, config)
            final: dict[str, float] = {}
            with measuring("accept length and speed"):
                final = measure_final(self, log, steps, loaded, budget)
            card.write(export, "native", config, final=final)


@dataclass
class Drafting:
    """A draft model, its base, and the held-out prompts that both are measured on.

    Attributes:
        cfg: the run's settings.
        judge: the objective with draft and base, which measures agreement.
        tokenizer: of the base.
        data: the run's.

    Raises:
        ConfigError: if there are no prompts.
    """

    cfg: TrainConfig
    judge: DraftObjective
    tokenizer: PreTrainedTokenizerBase
    data: Data

    def __post_init__(self) -> None:
        """Choose the prompts."""
        assert self.judge.base is not None
        self.draft, self.base = self.judge.draft, self.judge.base
        models = self.base, self.draft
        self.records, self.heldout = heldout_prompts(self.cfg, self.data, self.tokenizer, *models)

    def write(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int], seeds: Sequence[int]
    ) -> list[list[int]]:
        """Let the draft model, as it is, continue prompts by at most ``limits`` new tokens."""
        heat, ends = self.cfg.draft.on_policy_temperature, self.heldout.eos_token_ids
        return continue_prompts(
            self.draft, prompts, limits, seeds, temperature=heat, eos_token_ids=ends
        )

    def evaluate(self, step: int) -> dict[str, float]:
        """Decode the prompts with the draft model as it is, and compare it with its base."""
        found = evaluation.decode_with_draft(self.heldout, self.draft)
        heldout = heldout_agreement(self.judge, self.data.heldout)
        return found | {f"heldout/{key}": value for key, value in heldout.items()}

    def plan(self, log: RunLog, stage: Stage, notes: Sequence[str]) -> None:
        """Say what a dry run needs, and what a draft costs."""
        parts = {"base": self.base, "draft": self.draft}
        say_plan(self.cfg, log, [stage], parts, self.draft.get_output_embeddings().weight, notes)
        if dist.is_main() and self.base.device.type != "meta":
            log.say(evaluation.describe_costs_of_drafting(self.heldout, self.draft))

    def export(self, log: RunLog, steps: int) -> None:
        """Write the draft model as a plain Hugging Face folder, then measure it; on rank 0, alone.

        Raises:
            RunError: if the disk is full.
        """
        if not dist.is_main():
            return
        cfg, model, export = self.cfg, self.cfg.model, Path(self.cfg.run_dir) / "export"
        exported = copy.deepcopy(self.draft).eval()
        exported.to(torch_dtype(model.dtype))
        training = {
            "recipe": cfg.recipe,
            "draft": asdict(cfg.draft),
            "steps": steps,
            "positions": steps * tokens_per_step(cfg),
            "data": self.data.summary,
            "best": chosen_step(log.dir),
        }
        info = checkpoint.origin(model.name, training, revision=model.revision, dtype=model.dtype)
        save = partial(save_draft, export, exported, self.tokenizer)
        save(info | {"measured": {}})
        log.say(f"saved to {export}")
        with improving(export, log) as measuring:
            card.write(export, "native", read_provenance(export) or {})
            if self.base.device.type == "meta":
                log.say(f"not measured: {model.name} holds no weights to decode with")
                return
            if is_sharded(self.base):
                log.say("not measured: no rank has the whole base to decode with")
                return
            budget = measuring_time(cfg.evaluate, log)
            log.doing("measuring the draft model")
            heldout = heldout_agreement(self.judge, self.data.heldout)
            log.record(steps, {f"heldout/{key}": value for key, value in heldout.items()})
            log.say(
                f"held-out alpha {heldout['alpha']:.4f}, the share of drawn guesses that is"
                f" accepted; loss {heldout['loss']:.4f} nats per token"
            )
            final: dict[str, float] = {}
            with measuring("accept length and speed"):
                final = measure_final(self, log, steps, exported, budget)
            info["training"] = {**training, "heldout": heldout}
            save(info | {"measured": final})
            card.write(export, "native", read_provenance(export) or {}, final=final)
