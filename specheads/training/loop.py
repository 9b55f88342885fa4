"""The training loop. A recipe chooses what is trained; ``fit`` owns how.

One optimizer step: gather its micro-batches, count their valid labels over micro-batches and
ranks, run them, look at the losses, step. Counting first is what makes unequal micro-batches
exact (each loss is a sum divided by the count of the whole step).
"""

from __future__ import annotations

import contextlib
import math
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from specheads import dist
from specheads.config import InterruptedRunError, RunError, TrainConfig
from specheads.log import RunLog
from specheads.losses import count_valid
from specheads.training import best
from specheads.training.checkpoints import checkpoint_to_resume, new_checkpoint, prune, verify
from specheads.training.engine import Batch, Engine, Objective, learning_rates, open_engine
from specheads.training.schedule import lambda_scale, lr_factor
from specheads.training.state import (
    Progress,
    load_progress,
    load_rank,
    same_random_state,
    save_rank,
)


class Batches(Protocol):
    """An endless, resumable iterator of micro-batches (``data/pack.py``)."""

    def __next__(self) -> Batch:
        """Return the next micro-batch of this rank."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        ...


class StopSignal:
    """Turn the first SIGINT or SIGTERM into a flag; the second one acts as usual."""

    def __init__(self) -> None:
        """Start unset."""
        self.name = ""
        self._before: dict[signal.Signals, Any] = {}

    def _set(self, signum: int, frame: FrameType | None) -> None:
        del frame
        self.name = signal.Signals(signum).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __enter__(self) -> StopSignal:
        """Install the handlers; only the main thread may."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._set)
        return self

    def __exit__(self, *error: object) -> None:
        """Put the earlier handlers back."""
        self._restore()


def _peak_memory(device: torch.device) -> float:
    """Return bytes: the allocator's peak on a GPU, the process's peak on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def _place(batch: Batch, device: torch.device) -> Batch:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}


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
    """
    micro = [next(batches) for _ in range(num_micro)]
    counts = torch.zeros(num_heads + 2, dtype=torch.float64)
    for batch in micro:
        counts[: num_heads + 1] += count_valid(
            batch["labels"], batch["segment_ids"], num_heads
        ).cpu()
        counts[num_heads + 1] += (batch["segment_ids"] > 0).sum().cpu()
    counts = dist.sum_over_ranks(counts.to(device)).cpu()
    num_valid = counts[: num_heads + 1].to(torch.float32)
    placed = [_place({**batch, "num_valid": num_valid}, device) for batch in micro]
    return placed, float(counts[num_heads + 1])


def run_micro_batches(
    engine: Engine, micro: list[Batch], step: int, asked_to_stop: Callable[[], bool]
) -> tuple[dict[str, float], bool]:
    """Run forward and backward over one optimizer step's micro-batches.

    Returns:
        The metrics of the step, summed over micro-batches and ranks, and whether any rank was
        asked to stop.

    Raises:
        RunError: if a loss is not finite, on any rank, naming the records of the batch.
    """
    total: dict[str, Tensor] = {}
    losses = []
    for index, batch in enumerate(micro):
        loss, metrics = engine.forward(batch)
        engine.backward(loss, last=index == len(micro) - 1)
        losses.append(loss.detach())
        for key, value in metrics.items():
            total[key] = total[key] + value if key in total else value
    bad = ~torch.isfinite(torch.stack(losses).float())
    values = torch.stack([value.double() for value in total.values()])
    flags = torch.tensor([float(bad.any()), float(asked_to_stop())], device=values.device)
    summed = dist.sum_over_ranks(torch.cat([values, flags.double()])).cpu()
    if summed[-2] > 0:
        mine = [micro[i] for i in bad.nonzero().flatten().tolist()]
        ids = [str(name) for batch in mine for name in batch.get("ids", [])]
        where = f"records {', '.join(ids[:8])}" if ids else "a batch of another rank"
        raise RunError(
            f"the loss of step {step + 1} is not finite; stopped before the optimizer step; "
            f"{where}{' ...' if len(ids) > 8 else ''}"
        )
    return dict(zip(total, summed.tolist(), strict=False)), bool(summed[-1] > 0)


class _Meter:
    """Means since the last line, and the rate in tokens per second."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.tokens, self.steps = 0.0, 0
        self.since = time.perf_counter()
        self.seconds_per_step = 0.0

    def add(self, metrics: Mapping[str, float], tokens: float) -> None:
        self.tokens += tokens
        self.steps += 1
        window = self.progress.window
        for key, value in metrics.items():
            window[key] = window.get(key, 0.0) + value
        self.progress.window_steps += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what happens inside out of the rate."""
        begin = time.perf_counter()
        yield
        self.since += time.perf_counter() - begin

    def read(self, *, keep: bool) -> dict[str, float]:
        """Return the means; start a new window unless ``keep``."""
        steps = self.progress.window_steps
        means = {f"train/{key}": value / steps for key, value in self.progress.window.items()}
        if not keep:
            self.progress.window, self.progress.window_steps = {}, 0
        now = time.perf_counter()
        means["train/tokens_per_second"] = self.tokens / (now - self.since)
        self.seconds_per_step = (now - self.since) / self.steps
        self.tokens, self.steps, self.since = 0.0, 0, now
        return means


def fit(
    objective: nn.Module,
    batches: Batches,
    cfg: TrainConfig,
    *,
    groups: list[dict[str, Any]],
    run: RunLog,
    stage: str = "train",
    first_step: int = 0,
    last_step: int | None = None,
    evaluate: Callable[[int], Mapping[str, float]] | None = None,
) -> int:
    """Train ``objective`` from ``first_step`` to ``last_step``, or go on from a checkpoint.

    A recipe with several stages calls this once per stage; a stage that the resumed checkpoint
    has already left behind returns at once. The last stage ends with the weights of its best
    evaluation, where ``evaluate.keep_best`` says so; those of an earlier stage do not compare with
    its own, and what follows an earlier stage starts from that one's last weights.

    Args:
        objective: ``forward(batch) -> (loss, metrics)``, see ``training/objectives.py``.
        batches: this rank's micro-batches.
        cfg: the run's settings.
        groups: from ``schedule.param_groups``.
        run: the open run directory.
        stage: name of the stage, in checkpoints.
        first_step: optimizer steps that earlier stages took.
        last_step: end of the stage; None is the end of the run.
        evaluate: called every ``evaluate.every`` steps, on every rank; its metrics are logged. By
            ``eval/accept_length`` evaluations are compared, at the end of the stage too.

    Returns:
        The number of optimizer steps taken so far by the whole run.

    Raises:
        InterruptedRunError: after SIGINT or SIGTERM, with a checkpoint saved.
        RunError: if a loss is not finite.
    """
    last_step = cfg.steps if last_step is None else last_step
    end = min(last_step, cfg.max_steps or last_step)
    if cfg.max_steps and first_step >= cfg.max_steps:
        return cfg.max_steps
    checkpoint = checkpoint_to_resume(cfg)
    progress = Progress(step=first_step, stage=stage)
    if checkpoint is not None:
        reached = load_progress(checkpoint)
        if reached.stage != stage and reached.step >= last_step:
            return last_step
        if reached.stage == stage:
            progress = reached
        else:
            checkpoint = None
    parameters = best.trained(objective, groups)
    engine = open_engine(objective, groups, cfg)
    if checkpoint is not None:
        verify(checkpoint)
        engine.load(checkpoint)
        batches.load_state_dict(load_rank(checkpoint))
    run.begin(progress.step)
    trained = cast(Objective, objective)
    device = next(objective.parameters()).device
    meter = _Meter(progress)
    objective.train()
    with StopSignal() as signals, contextlib.closing(engine):
        while progress.step < end and not progress.stopped:
            step = progress.step
            trained.lambda_scale = lambda_scale(step, first_step, last_step, cfg.loss)
            micro, tokens = gather(batches, cfg.optim.accumulation, trained.num_heads, device)
            metrics, stopping = run_micro_batches(engine, micro, step, lambda: bool(signals.name))
            factor = lr_factor(step, first_step, last_step, cfg.optim, cfg.steps)
            norm = metrics["grad_norm"] = engine.step(factor)
            if not (math.isfinite(norm) or engine.overflowed):
                raise RunError(f"the gradient norm is {norm}; stopped before the optimizer step")
            progress.step += 1
            meter.add(metrics, tokens)
            run.advance()
            if evaluate and best.due(cfg, progress, last_step):
                with meter.paused(), same_random_state():
                    found = evaluate(progress.step)
                    found = best.judge(found, parameters, cfg, progress, run)
                    run.metrics(progress.step, found)
                objective.train()
            due = progress.step % cfg.log.every == 0 or progress.step == last_step
            due = due or progress.stopped
            if due or stopping or progress.step == end:
                # a row at an early stop leaves the window as it is, for the row after the resume
                row = meter.read(keep=not due)
                row |= {f"train/lr/{k}": v for k, v in learning_rates(groups, factor).items()}
                row["train/peak_memory"] = _peak_memory(device)
                left = meter.seconds_per_step * (cfg.steps - progress.step)
                run.metrics(progress.step, row, seconds_left=left)
            save = cfg.checkpoint.every and progress.step % cfg.checkpoint.every == 0
            over = progress.step == end or progress.stopped
            if save or stopping or (over and end in (cfg.max_steps, cfg.steps)):
                with meter.paused():
                    _save(engine, batches, cfg, run, progress)
            if stopping:
                raise InterruptedRunError(
                    f"stopped after step {progress.step} of {cfg.steps}; go on with resume=auto"
                )
    if last_step == cfg.steps:
        best.finish(parameters, cfg, progress, run)
    return progress.step


def _save(engine: Engine, batches: Batches, cfg: TrainConfig, run: RunLog, now: Progress) -> None:
    with new_checkpoint(run.dir, now.step) as folder:
        engine.save(folder)
        save_rank(folder, cfg, now, batches.state_dict())
    best_step = now.best_step if cfg.checkpoint.keep_best else 0
    prune(run.dir, cfg.checkpoint.keep, newest=now.step, best=best_step)
