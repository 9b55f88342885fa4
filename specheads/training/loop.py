"""The training loop. A recipe chooses what is trained; ``fit`` owns how.

One optimizer step: gather its micro-batches, count their valid labels over micro-batches and
ranks, run them, look at the losses, step. Counting first is what makes unequal micro-batches
exact (each loss is a sum divided by the count of the whole step).

Steps whose loss or gradients are not finite are written to ``nonfinite.jsonl`` of the run
directory, one line per step: ``{"step", "what": "loss" | "gradient", "batches": [{"rank",
"micro_batch", "ids"}]}``. Of a loss the micro-batches that had it, of a gradient all that it was
summed over.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from specheads.config import ConfigError, InterruptedRunError, RunError, TrainConfig
from specheads.data.pack import Batch, on_device
from specheads.losses.cross_entropy import count_valid
from specheads.runs.directory import keep_rows, read_rows
from specheads.runs.log import RunLog
from specheads.system import dist
from specheads.system.hardware import peak_memory
from specheads.system.signals import StopAsked, StopSignal, saving_first
from specheads.training import best, checkpoints
from specheads.training.deepspeed_engine import DeepSpeedEngine
from specheads.training.engine import Groups, Objective, TorchEngine, lambda_scale, lr_factor

Evaluate = Callable[[int], best.Figures]
Engine = TorchEngine | DeepSpeedEngine


class Batches(Protocol):
    """An endless, resumable iterator of micro-batches (``data/pack.py``)."""

    def __next__(self) -> Batch:
        """Return the next micro-batch of this rank."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as JSON values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""


@dataclass(frozen=True)
class Stage:
    """What one stage of a run trains, on what, and from which step to which.

    Attributes:
        objective: ``forward(batch) -> (loss, metrics)``, see ``training/objectives.py``.
        batches: this rank's micro-batches.
        groups: the optimizer's groups, from ``engine.param_groups``.
        name: the stage's name in checkpoints: a resumed run goes on in the stage of that name.
        first_step: optimizer steps that earlier stages took.
        last_step: end of the stage; 0 is the end of the run.
    """

    objective: Objective
    batches: Batches
    groups: Groups
    name: str = "train"
    first_step: int = 0
    last_step: int = 0


def open_engine(objective: Objective, groups: Groups, cfg: TrainConfig) -> Engine:
    """Return the engine that the settings ask for.

    Raises:
        ConfigError: if several processes were started without DeepSpeed.
    """
    if cfg.deepspeed:
        return DeepSpeedEngine(objective, groups, cfg)
    if dist.world_size() > 1:
        raise ConfigError(
            f"{dist.world_size()} processes were started, but deepspeed=none trains with one; "
            "choose deepspeed=zero1, zero2 or zero3"
        )
    return TorchEngine(objective, groups, cfg)


def gather(
    batches: Batches, num_micro: int, num_heads: int, device: torch.device
) -> tuple[list[Batch], float]:
    """Return the micro-batches of one optimizer step, each with the step's ``num_valid``.

    Args:
        batches: this rank's data.
        num_micro: micro-batches per optimizer step and rank.
        num_heads: heads whose labels are counted; the language model's own come first.
        device: where the batches go.

    Returns:
        The batches, and the number of tokens over all ranks.

    Raises:
        RunError: on all ranks, if the data of one of them cannot be had.
    """
    micro, missing = [], ""
    # all of a step's micro-batches are there before the first is run: a loss is a sum over its own
    # labels divided by the labels of all, else a micro-batch with few of them would count as much
    try:
        micro = [next(batches) for _ in range(num_micro)]
    except RunError as error:
        missing = str(error)
    counts = torch.zeros(num_heads + 3, dtype=torch.float64)
    counts[-1] = bool(missing)
    for batch in micro:
        tokens = (batch["segment_ids"] > 0).sum()[None]
        valid = count_valid(batch["labels"], batch["segment_ids"], num_heads)
        counts[:-1] += torch.cat([valid, tokens]).cpu()
    counts = dist.sum_over_ranks(counts.to(device)).cpu()
    if counts[-1]:
        raise RunError(next(filter(None, dist.gather_texts(missing))))
    num_valid = counts[: num_heads + 1].to(torch.float32)
    placed = [on_device({**batch, "num_valid": num_valid}, device) for batch in micro]
    return placed, float(counts[num_heads + 1])


def run_micro_batches(
    engine: Engine, micro: list[Batch], asked_to_stop: Callable[[], bool]
) -> tuple[dict[str, float], list[int], bool, bool]:
    """Run forward and backward over one optimizer step's micro-batches.

    Returns:
        The metrics, summed over micro-batches and ranks; this rank's micro-batches whose loss is
        not finite; whether any rank has one; whether any rank was asked to stop.
    """
    total: dict[str, Tensor] = {}
    losses = []
    for index, batch in enumerate(micro):
        loss, metrics = engine.forward(batch)
        # of a loss that is not finite no gradient is: the engine then leaves the step out
        factor = torch.where(loss.detach().isfinite(), 1.0, math.nan)
        engine.backward(loss * factor, last=index == len(micro) - 1)
        losses.append(loss.detach())
        for key, value in metrics.items():
            total[key] = total[key] + value if key in total else value
    bad = ~torch.isfinite(torch.stack(losses).float())
    values = torch.stack([value.double() for value in total.values()])
    flags = torch.tensor([float(bad.any()), float(asked_to_stop())], device=values.device)
    summed = dist.sum_over_ranks(torch.cat([values, flags.double()])).tolist()
    means = dict(zip(total, summed, strict=False))
    return means, bad.nonzero().flatten().tolist(), summed[-2] > 0, summed[-1] > 0


@dataclass
class _Training:
    """What the steps of one stage share: who takes them, how far they are, what was measured."""

    stage: Stage
    last_step: int
    cfg: TrainConfig
    run: RunLog
    engine: Engine
    progress: checkpoints.Progress
    # of the steps since the last row
    tokens: float = 0.0
    steps: int = 0
    since: float = field(default_factory=time.perf_counter)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what happens inside out of the rate."""
        begin = time.perf_counter()
        yield
        self.since += time.perf_counter() - begin

    def factor(self, step: int) -> float:
        """Return what the learning rates of ``step`` (from 0) are multiplied with."""
        cfg = self.cfg
        return lr_factor(step, self.stage.first_step, self.last_step, cfg.optim, cfg.steps)

    def take_step(self, device: torch.device, asked_to_stop: Callable[[], bool]) -> bool:
        """Take one optimizer step, or leave it out; return whether any rank was asked to stop.

        Raises:
            RunError: if a loss or gradient is not finite, and no more of them may be left out, or
                there is no data.
        """
        step, stage, optim = self.progress.step, self.stage, self.cfg.optim
        trained, first = stage.objective, stage.first_step
        before = stage.batches.state_dict(), *checkpoints.random_state()
        trained.lambda_scale = lambda_scale(step, first, self.last_step, self.cfg.loss)
        try:
            micro, tokens = gather(stage.batches, optim.accumulation, trained.num_heads, device)
        except RunError as error:
            kind = InterruptedRunError if asked_to_stop() else RunError
            self.give_up(str(error), "resume=auto goes on from there", before, kind)
        metrics, bad, bad_anywhere, stopping = run_micro_batches(self.engine, micro, asked_to_stop)
        metrics["grad_norm"] = self.engine.step(self.factor(step))
        taken = not bad_anywhere and math.isfinite(metrics["grad_norm"])
        if bad_anywhere or not (taken or self.engine.overflowed):
            fault, chosen = ("loss", bad) if bad_anywhere else ("gradient", range(len(micro)))
            where = report(self.run.dir, step + 1, fault, micro, chosen)
            if self.progress.skipped >= optim.skip_nonfinite:
                before_it = self.progress.skipped
                already = f" after {before_it} left out" if before_it else ""
                self.give_up(
                    f"the {fault} of step {step + 1} is not finite{already}; stopped before the"
                    f" optimizer step; {where}",
                    "optim.skip_nonfinite=N goes on past it",
                    before,
                )
            self.progress.skipped += 1
            self.run.say(
                f"step {step + 1} left out, as its {fault} is not finite: {where} "
                f"({self.progress.skipped} of optim.skip_nonfinite={optim.skip_nonfinite})"
            )
        self.progress.step += 1
        self.tokens += tokens
        self.steps += 1
        if taken:  # any other step has no place in the means
            for key, value in metrics.items():
                self.progress.window[key] = self.progress.window.get(key, 0.0) + value
            self.progress.window_steps += 1
        self.run.advance()
        return stopping

    def give_up(
        self,
        why: str,
        how_to_go_on: str,
        before: tuple[Any, ...],
        kind: type[RunError | InterruptedRunError] = RunError,
    ) -> NoReturn:
        """Save the state from before the step that cannot be taken, and stop the run."""
        position, *generators = before
        saved = ""
        if self.progress.step:
            checkpoints.set_random_state(*generators)
            self.save(position)
            saved = f"; step {self.progress.step} is saved, {how_to_go_on}"
        error = kind(why + saved)
        error.on_every_rank = True
        raise error

    def evaluate(self, evaluate: Evaluate, signals: StopSignal) -> bool:
        """Evaluate, unless a signal comes; return whether any rank was asked to stop.

        An evaluation that a signal cut short is due again after the resume.
        """
        found: best.Figures | None = None
        with self.paused(), checkpoints.same_random_state():
            with contextlib.suppress(StopAsked), signals.interrupting():
                found = evaluate(self.progress.step)
            flags = torch.tensor([float(found is None), float(bool(signals.name))])
            cut, asked = dist.sum_over_ranks(flags).tolist()
            self.progress.unevaluated = cut > 0
            if found is not None and not cut:
                found = best.judge(found, self.engine.trained, self.cfg, self.progress, self.run)
                self.run.metrics(self.progress.step, found)
        self.stage.objective.train()
        return asked > 0

    def write_row(self, device: torch.device, *, keep: bool) -> None:
        """Write the means since the last row; ``keep`` them for the next one too."""
        step, now = self.progress.step, time.perf_counter()
        window, steps = self.progress.window, self.progress.window_steps
        row = {f"train/{key}": value / steps for key, value in window.items()}
        if not keep:
            self.progress.window, self.progress.window_steps = {}, 0
        left = 0.0
        if self.steps:  # since the last row; right after a resume there is no rate
            row["train/tokens_per_second"] = self.tokens / (now - self.since)
            left = (now - self.since) / self.steps * (self.cfg.steps - step)
        self.tokens, self.steps, self.since = 0.0, 0, now
        factor = self.factor(step - 1)
        row |= {f"train/lr/{g['name']}": g["initial_lr"] * factor for g in self.stage.groups}
        peak = peak_memory(device) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # on a Mac
        row["train/peak_memory"] = float(peak)
        if self.progress.skipped:
            row["train/skipped"] = float(self.progress.skipped)
        if "float16" in (self.cfg.autocast, self.cfg.model.dtype):
            row["train/loss_scale"] = self.engine.loss_scale
        self.run.metrics(step, row, seconds_left=left)

    def save(self, position: dict[str, Any] | None = None) -> None:
        """Write a checkpoint; of the data's ``position``, if it is not the present one."""
        now = self.progress
        with self.paused():
            with checkpoints.new_checkpoint(self.run.dir, now.step) as folder:
                self.engine.save(folder)
                position = position or self.stage.batches.state_dict()
                checkpoints.save_rank(folder, self.cfg, now, position)
                self.run.save(folder)
            checkpoints.prune(self.run.dir, self.cfg.checkpoint.keep, newest=now.step)


def fit(stage: Stage, cfg: TrainConfig, run: RunLog, evaluate: Evaluate | None = None) -> int:
    """Train ``stage`` from its first step to its last, or go on from a checkpoint.

    A recipe with several stages calls this once per stage; a stage that the resumed checkpoint
    has already left behind returns at once. The last stage ends with the weights of its best
    evaluation, where ``evaluate.keep_best`` says so; those of an earlier stage do not compare with
    its own, and what follows an earlier stage starts from that one's last weights.

    Args:
        stage: what is trained, and on what.
        cfg: the run's settings.
        run: the open run directory.
        evaluate: called every ``evaluate.every`` steps, on every rank; its metrics are logged. By
            ``eval/accept_length`` evaluations are compared, at the end of the stage too.

    Returns:
        The number of optimizer steps taken so far by the whole run.

    Raises:
        InterruptedRunError: after SIGINT, SIGTERM or SIGUSR1, with a checkpoint saved.
        RunError: if a loss or gradient is not finite, once too often for ``optim.skip_nonfinite``,
            or the data of a step cannot be had; what was before that step is saved.
    """
    last_step = stage.last_step or cfg.steps
    end = min(last_step, cfg.max_steps or last_step)
    if cfg.max_steps and stage.first_step >= cfg.max_steps:
        return cfg.max_steps
    checkpoint = checkpoints.checkpoint_to_resume(cfg)
    progress = checkpoints.Progress(step=stage.first_step, stage=stage.name)
    if checkpoint is not None:
        saved = checkpoints.load_progress(checkpoint)
        if saved.stage == stage.name:
            progress = saved
        elif saved.step >= last_step:
            return last_step
        else:  # of an earlier stage
            checkpoint = None
    engine = open_engine(stage.objective, stage.groups, cfg)
    if len(reached := set(dist.gather_texts(str(progress.step)))) > 1:
        raise RunError(
            f"ranks would go on from steps {', '.join(sorted(reached))}: they do not see the same"
            f" whole checkpoints in {run.dir}"
        )
    if checkpoint is not None:
        if cfg.evaluate.keep_best and dist.is_main():
            best.bring(run.dir, checkpoint, progress)
        engine.load(checkpoint)
        checkpoints.restore_rank(checkpoint, stage.batches)
    run.begin(progress.step, checkpoint)
    progress.skipped = max(progress.skipped, begin(run.dir, progress.step))
    device = next(iter(engine.trained.values())).device
    now = _Training(stage, last_step, cfg, run, engine, progress)
    stage.objective.train()
    with saving_first(then_at_once=last_step == cfg.steps) as signals:
        while progress.unevaluated or (progress.step < end and not progress.stopped):
            stopping = False
            if not progress.unevaluated:  # else the run was stopped between step and evaluation
                stopping = now.take_step(device, lambda: bool(signals.name or run.trouble))
                due = best.due(cfg.evaluate, progress, last_step)
                progress.unevaluated = bool(evaluate) and due
            if evaluate and progress.unevaluated and not stopping:
                stopping = now.evaluate(evaluate, signals)
            over = progress.step == end or progress.stopped
            due = progress.step % cfg.log.every == 0 or progress.step == last_step
            due = due or progress.stopped
            if (due or stopping or over) and not progress.unevaluated:
                # a row at an early stop leaves the window as it is, for the row after the resume
                now.write_row(device, keep=not due)
            save = cfg.checkpoint.every and progress.step % cfg.checkpoint.every == 0
            if save or stopping or (over and end in (cfg.max_steps, cfg.steps)):
                now.save()
            if stopping:
                signals.saved = True
                why = f"{run.trouble}; " if run.trouble else ""
                raise InterruptedRunError(
                    f"{why}stopped after step {progress.step} of {cfg.steps}; "
                    "go on with resume=auto"
                )
        # not after an error: it may gather the weights of all ranks, of which one may be gone
        engine.close()
    if last_step == cfg.steps:
        best.finish(engine.trained, cfg.evaluate, progress, run)
    return progress.step


_FILE = "nonfinite.jsonl"
_NAMED = 8  # records in the one line that a user sees


def begin(run_dir: Path, step: int) -> int:
    """Go on after ``step``: later lines are dropped.

    Returns:
        The number of steps up to there that were left out, on every rank.
    """
    path, count = run_dir / _FILE, 0
    if dist.is_main() and path.exists():
        kept = [row for row in read_rows(path) if row["step"] <= step]
        keep_rows(path, kept)
        count = len(kept)
    return int(dist.sum_over_ranks(torch.tensor([float(count)])))


def report(
    run_dir: Path, step: int, what: str, micro: Sequence[Batch], chosen: Sequence[int]
) -> str:
    """Write down what a step was made of; all ranks call it.

    Args:
        run_dir: the run's directory.
        step: number of the step, from 1.
        what: ``loss`` or ``gradient``.
        micro: this rank's micro-batches of the step.
        chosen: those of them to name.

    Returns:
        ``records a, b ...`` for an error message, of all ranks.

    Raises:
        RunError: if the file cannot be written.
    """
    mine = [
        {"rank": dist.rank(), "micro_batch": i, "ids": [str(n) for n in micro[i].get("ids", [])]}
        for i in chosen
    ]
    batches: list[dict[str, Any]] = sum(map(json.loads, dist.gather_texts(json.dumps(mine))), [])
    if dist.is_main():
        path = run_dir / _FILE
        try:
            with path.open("a") as lines:
                lines.write(json.dumps({"step": step, "what": what, "batches": batches}) + "\n")
        except OSError as error:
            raise RunError(f"cannot write {path}: {error}") from error
    ids = [name for batch in batches for name in batch["ids"]]
    if not ids:
        return "records without ids"
    return f"records {', '.join(ids[:_NAMED])}{' ...' if len(ids) > _NAMED else ''}"
