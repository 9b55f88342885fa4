"""The weights of the evaluation with the longest accept length, and when to stop waiting for one.

They lie in ``best/step-*/`` beside the checkpoints, which a resumed run must be able to go back
to: a folder is removed only when neither the run nor a checkpoint counts on it any more.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specheads.config import EvaluateConfig, TrainConfig
from specheads.models import manifest
from specheads.runs.log import RunLog
from specheads.system import dist
from specheads.system.errors import refuse
from specheads.system.files import whole_folder, write_whole
from specheads.training.checkpoints import Progress, checkpoints_of, load_progress, remove

Figures = Mapping[str, float]  # metrics by name
Weights = Mapping[str, nn.Parameter]  # what is trained, by name
KEY = "eval/accept_length"
_TENSORS, _FIGURES, _CHOSEN = "model.safetensors", "best.json", "chosen.json"


def due(evaluate: EvaluateConfig, progress: Progress, last_step: int) -> bool:
    """Whether to evaluate now: every so often, and once more to compare the last with the best."""
    at_end = progress.step == last_step and progress.best_step > 0
    return evaluate.every > 0 and (at_end or progress.step % evaluate.every == 0)


def judge(
    found: Figures, parameters: Weights, cfg: TrainConfig, progress: Progress, run: RunLog
) -> dict[str, float]:
    """Compare an evaluation with the best of its stage, keep the weights of a better one.

    Sets ``progress.stopped`` after ``evaluate.patience`` evaluations without a better one.

    Args:
        found: the evaluation's metrics; every rank brings its own, their mean counts.
        parameters: those that are trained, by name.
        cfg: the run's settings.
        progress: is brought up to date.
        run: the open run directory.

    Returns:
        ``found``, with what became of it where there is an accept length to compare.

    Raises:
        ConfigError: if ``evaluate.patience`` is set and there is no accept length.
    """
    if KEY not in found:
        asked = f"evaluate.patience={cfg.evaluate.patience} needs accept lengths, which recipe"
        refuse({f"{asked} {cfg.recipe} does not measure while training": cfg.evaluate.patience})
        return dict(found)
    # one verdict for all ranks, or some would stop and the others wait for them
    total = dist.sum_over_ranks(torch.tensor([found[KEY]], dtype=torch.float64))
    length = float(total) / dist.world_size()
    progress.since_best = 0 if length > progress.best else progress.since_best + 1
    if length >= progress.best:  # of equals the one that has trained longer
        progress.best, progress.best_step = length, progress.step
        if cfg.evaluate.keep_best and dist.is_main():
            with whole_folder(folder_of(run.dir, progress.step)) as folder:
                manifest.save_tensors(folder / _TENSORS, parameters)
                figures = {"step": progress.step, "stage": progress.stage, "metrics": dict(found)}
                (folder / _FIGURES).write_text(json.dumps(figures, indent=1) + "\n")
                manifest.write_manifest(folder)
            prune(run.dir, progress)
    patience = cfg.evaluate.patience
    progress.stopped = bool(patience) and progress.since_best >= patience
    if progress.stopped:
        run.say(
            f"stage {progress.stage} stops at step {progress.step}: the accept length no longer "
            f"rises above {progress.best:.3f} (evaluate.patience={patience})"
        )
    return {
        **found,
        "eval/best/accept_length": progress.best,
        "eval/best/step": float(progress.best_step),
        "eval/best/stopped": float(progress.stopped),
    }


def folder_of(run_dir: Path, step: int) -> Path:
    """Return where the best weights lie if they are those of ``step``."""
    return run_dir / "best" / f"step-{step:07d}"


def bring(run_dir: Path, checkpoint: Path, progress: Progress) -> None:
    """Have the best weights that ``checkpoint`` counts on in ``run_dir``, before training goes on.

    A run that goes on in another directory than its checkpoint's gets a copy.

    Raises:
        ConfigError: if they are gone: the end of the run would be too late to learn it.
        RunError: if the disk is full.
    """
    here = folder_of(run_dir, progress.best_step)
    if not progress.best_step or (here / _FIGURES).is_file():
        return
    there = folder_of(checkpoint.parent.parent, progress.best_step)
    gone = f"{here} is gone, and with it the weights of the best evaluation before {checkpoint};"
    cure = "evaluate.keep_best=false goes on without them"
    refuse({f"{gone} {cure}": not (there / _FIGURES).is_file()})
    with whole_folder(here) as folder:
        shutil.copytree(there, folder, dirs_exist_ok=True)


def prune(run_dir: Path, progress: Progress) -> None:
    """Remove weights that neither ``progress`` nor a checkpoint calls the best."""
    wanted = {load_progress(path).best_step for path in checkpoints_of(run_dir)}
    kept = {folder_of(run_dir, step) for step in wanted | {progress.best_step}}
    remove(run_dir / "best", set((run_dir / "best").glob("step-*")) - kept)


def finish(parameters: Weights, evaluate: EvaluateConfig, progress: Progress, run: RunLog) -> None:
    """Put the best weights of the last stage back into ``parameters``, to be exported.

    On rank 0 alone: it is the one that exports. Without a best evaluation nothing is changed.

    Raises:
        ConfigError: if the best weights are gone, or of another model.
    """
    if not dist.is_main():
        return
    place = run.dir / "best" / _CHOSEN
    if not (evaluate.keep_best and progress.best_step):
        place.unlink(missing_ok=True)
        return
    folder = folder_of(run.dir, progress.best_step)
    gone = f"{folder} is gone, and with it the best weights of this run;"
    cure = "evaluate.keep_best=false exports the last ones"
    refuse({f"{gone} {cure}": not (folder / _FIGURES).is_file()})
    manifest.check_manifest(folder)
    manifest.check_header(folder / _TENSORS, parameters, exact=True)
    manifest.copy_tensors(manifest.load_tensors(folder / _TENSORS), parameters)
    write_whole(place, (folder / _FIGURES).read_text())
    prune(run.dir, progress)
    if progress.best_step < progress.step:
        run.say(
            f"going back to the weights of step {progress.best_step}: their accept length "
            f"{progress.best:.3f} is the best that was measured"
        )


def chosen(run_dir: Path) -> dict[str, Any] | None:
    """Return step, stage and metrics of the weights that :func:`finish` took; None: the last ones.

    For an export's ``training`` section.
    """
    place = run_dir / "best" / _CHOSEN
    return json.loads(place.read_text()) if place.is_file() else None
