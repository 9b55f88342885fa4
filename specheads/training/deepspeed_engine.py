"""The engine of many processes: DeepSpeed, ZeRO stages 0 to 3, with or without offload.

DeepSpeed skips a step whose gradient norm is not finite by itself, for the sake of its fp16 loss
scale, in every precision and stage but one: 0 in float32, which is a plain torch optimizer. There
the check is made here, and so is the counting: a skipped step leaves no counter behind.

A checkpoint has a part for every rank. For a run on another number of ranks it becomes a universal
one: ``ds_to_universal`` puts the parts of every parameter together, and the run takes its own from
there. Weights, both moments and their step count are carried over exactly.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from specheads.config import ConfigError, RunError, TrainConfig
from specheads.data.pack import Batch
from specheads.models import manifest
from specheads.models.quantize import is_quantized_linear
from specheads.system import dist, hardware
from specheads.system.errors import refuse
from specheads.system.files import aside, writing
from specheads.training.checkpoints import read_state
from specheads.training.engine import Groups, Objective, Spread, make_optimizers, trained_parameters
from specheads.training.ranks import join


@contextlib.contextmanager
def converted(folder: Path, run_dir: Path) -> Iterator[Path]:
    """Convert a checkpoint's ``deepspeed/state`` beside the run's checkpoints, for a while.

    Args:
        folder: a checkpoint that DeepSpeed's engine wrote.
        run_dir: the run's directory, where the disk has room.

    Yields:
        A folder with the universal ``state``, removed afterwards.

    Raises:
        ConfigError: if DeepSpeed cannot convert it.
        RunError: if the disk is full.
    """
    from deepspeed.checkpoint import ds_to_universal

    path = run_dir / "checkpoints" / f"universal-{folder.name}"
    source = folder / "deepspeed" / "state"
    # one worker each: forking a process that has started threads can hang
    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    options = {"keep_temp_folder": False, "strict": True, "inject_missing_state": True}
    settings = argparse.Namespace(**workers, **options)
    with writing(path) as out:
        if dist.is_main():
            shutil.rmtree(out, ignore_errors=True)
            (out / "state").mkdir(parents=True)
            settings.input_folder, settings.output_folder = str(source), str(out / "state")
            problem = f"DeepSpeed cannot convert {source} for another number of processes"
            with contextlib.redirect_stdout(io.StringIO()), manifest.one_line(problem):
                ds_to_universal.main(settings)
        dist.barrier()
        yield out
        dist.barrier()
    if dist.is_main():
        shutil.rmtree(aside(path))


LONGEST_BUILD = 900.0  # seconds


def need_compiler() -> None:
    """Check what DeepSpeed compiles its Adam for offload with, before its own error of fifty lines.

    Raises:
        ConfigError: naming what is missing.
    """
    # pip puts ninja beside the interpreter, which need not be on the PATH
    folder = str(Path(sys.executable).parent)
    if folder not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = folder + os.pathsep + os.environ.get("PATH", "")
    missing = [] if shutil.which("ninja") else ["ninja"]
    if not (shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")):
        missing.append("a C++ compiler (g++)")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        missing.append("the Python headers (python3-dev)")
    if missing:
        raise ConfigError(
            f"DeepSpeed needs {' and '.join(missing)} on this machine for offload; "
            "install that, or use deepspeed=zero2 or zero3"
        )


def check_build_lock() -> None:
    """Check that no build that was killed holds DeepSpeed's Adam for offload back.

    Raises:
        ConfigError: naming the file that its builds wait for, if it is older than any build takes.
    """
    from torch.utils.cpp_extension import _get_build_directory

    lock = Path(_get_build_directory("cpu_adam", False)) / "lock"
    if lock.is_file() and (age := time.time() - lock.stat().st_mtime) > LONGEST_BUILD:
        raise ConfigError(
            f"DeepSpeed would wait for a build that began {age / 60:.0f} minutes ago; it was "
            f"probably killed: remove {lock}"
        )


def check_deepspeed(objective: nn.Module, cfg: TrainConfig) -> None:
    """Refuse what ZeRO cannot train.

    Raises:
        ConfigError: naming the setting.
    """
    name, stage = cfg.optim.name, Spread.from_config(cfg.deepspeed).stage
    plain = f"optim.name={name} needs deepspeed=none, as ZeRO"
    quantised = any(map(is_quantized_linear, objective.modules()))
    refuse(
        {
            f"{plain} flattens the matrices; add optim=adamw": name == "muon",
            f"{plain} keeps the moments in parts of its own; add optim=adamw": name == "adamw8bit",
            f"model.quantization={cfg.model.quantization}: ZeRO-3 cannot spread quantised weights;"
            " choose deepspeed=zero1 or zero2": quantised and stage == 3,
        }
    )


class DeepSpeedEngine:
    """One or many processes under DeepSpeed; its ZeRO state is pickle, by its own design."""

    def __init__(self, objective: Objective, groups: Groups, cfg: TrainConfig) -> None:
        """Start the process group and wrap ``objective``.

        Raises:
            ConfigError: if a setting needs plain torch, DeepSpeed cannot compile here, or the
                device has no float16.
        """
        check_deepspeed(objective, cfg)
        offloads = Spread.from_config(cfg.deepspeed).offload_optimizer
        if offloads:
            need_compiler()
            check_build_lock()
        config = join(cfg)
        import deepspeed

        half = bool(config["fp16"].get("enabled"))
        named = dict(objective.named_parameters())
        self.trained = trained_parameters(objective, groups)
        self.dtypes = {name: p.dtype for name, p in named.items()}
        # with float16 DeepSpeed rounds what it wraps, and keeps masters of what learns only
        frozen = [n for n in named if n not in self.trained and named[n].dtype == torch.float32]
        self.frozen = {n: named[n].detach().to("cpu", copy=True) for n in frozen if half}
        # what came in parts stays so
        self.sharded = {name for name, p in named.items() if hasattr(p, "ds_id")}
        if self.sharded:  # DeepSpeed takes the rest of such a model for ready
            low = next(named[name] for name in self.sharded)
            for name in named.keys() - self.sharded:
                named[name].data = named[name].data.to(hardware.pick_device(cfg.device), low.dtype)
        self.engine: Any = deepspeed.initialize(
            model=objective,
            optimizer=make_optimizers(groups, cfg.optim, offloads=offloads)[0],
            config=config,
        )[0]
        self._fp16 = bool(self.engine.fp16_enabled())
        # torch's own optimizer would step on anything
        self._plain = isinstance(self.engine.optimizer, torch.optim.Optimizer)
        self.run_dir = Path(cfg.run_dir)
        self.overflowed = False
        scaler: Any = getattr(self.engine.optimizer, "loss_scaler", None)
        if hasattr(scaler, "raise_error_at_min_scale"):
            scaler.raise_error_at_min_scale = False  # the loop decides, as for other precisions
        objective.engine_scale = float(dist.world_size() * cfg.optim.accumulation)

    @property
    def loss_scale(self) -> float:
        """What fp16 multiplies the loss by, 1 without it."""
        return float(self.engine._get_optimizer_loss_scale() or 1.0) if self._fp16 else 1.0

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of one micro-batch and its metrics."""
        return cast("tuple[Tensor, dict[str, Tensor]]", self.engine(batch))

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add this micro-batch's gradients."""
        self.engine.backward(loss)
        if not last:
            self.engine.step()  # counts the micro-batch, changes nothing

    def step(self, factor: float) -> float:
        """Step with every learning rate times ``factor``, return the gradient norm.

        One that is not finite changes nothing, on any rank.

        Raises:
            RunError: if DeepSpeed took a step of which it gives no norm, or none that is finite.
        """
        for group in self.engine.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        self.overflowed = False
        if self._plain:
            # stage 0 has summed the gradients over all ranks already
            grads = [p.grad.float() for p in self.engine.module.parameters() if p.grad is not None]
            norm = float(nn.utils.get_total_norm(grads))
            if math.isfinite(norm):
                self.engine.step()
            else:
                self.engine.zero_grad()
                self.engine.micro_steps += 1  # as a step does, which would divide by the norm
            return norm
        scale = self.loss_scale
        with self._counters():
            self.engine.step()
        found = self.engine.get_global_grad_norm()
        norm = math.nan if found is None else float(found)
        if math.isfinite(norm) and norm >= 0:
            return norm
        if self.engine.was_step_applied():
            raise RunError(
                f"DeepSpeed stepped with a gradient norm of {found}: the weights in memory are not "
                "to be trusted; go on from the last checkpoint with resume=auto"
            )
        # a scale that cannot be lowered further is not to blame
        self.overflowed = self._fp16 and self.engine.dynamic_loss_scale() and scale > 1.0
        return norm

    @contextlib.contextmanager
    def _counters(self) -> Iterator[None]:
        """Put DeepSpeed's counters of steps back if what happens inside takes none."""
        names = ("global_steps", "global_samples", "skipped_steps")
        before = {name: getattr(self.engine, name) for name in names}
        yield
        if not self.engine.was_step_applied():
            for name, value in before.items():
                setattr(self.engine, name, value)

    def save(self, folder: Path) -> None:
        """Write DeepSpeed's own checkpoint."""
        place = str(folder / "deepspeed")
        self.engine.save_checkpoint(place, tag="state", exclude_frozen_parameters=True)
        if dist.is_main():
            (folder / "trained.json").write_text(json.dumps(list(self.trained)))

    def load(self, folder: Path) -> None:
        """Restore DeepSpeed's own checkpoint, also one of another number of ranks.

        Raises:
            ConfigError: if it is of another model, or cannot be converted for this many ranks.
        """
        with manifest.one_line(f"cannot read {folder / 'trained.json'}"):
            stored = set(map(str, json.loads((folder / "trained.json").read_text())))
        # the frozen ones are not stored, so that DeepSpeed itself cannot be strict
        if odd := sorted(stored ^ self.trained.keys()):
            raise ConfigError(
                f"{folder} is of another model: {len(odd)} parameters are in one only, e.g."
                f" {odd[0]}"
            )
        before = read_state(folder)["world_size"]
        other = before != dist.world_size() and self.engine.zero_optimization_stage() > 0
        stored_at = contextlib.nullcontext(folder / "deepspeed")
        with converted(folder, self.run_dir) if other else stored_at as place:
            self._load(place, universal=other)

    def _load(self, place: Path, *, universal: bool) -> None:
        """Load DeepSpeed's ``state`` in ``place``; ``universal`` is what :func:`converted` made."""
        optimizer, settings = self.engine.optimizer, self.engine._config
        own = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        settings.load_universal_checkpoint = universal
        try:
            found, _ = self.engine.load_checkpoint(
                str(place), tag="state", load_module_strict=False
            )
        finally:
            settings.load_universal_checkpoint = False
        if found is None:
            raise ConfigError(f"{place} holds no DeepSpeed state")
        if not universal:
            return
        # stage 3 gives all groups the settings of the first (0.19.8)
        for group, settings_before in zip(optimizer.param_groups, own, strict=True):
            group.update(settings_before)
        # and all of them one counter of steps, which AdamW then counts up once per group
        for state in optimizer.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()

    def close(self) -> None:
        """Remove DeepSpeed's hooks, so that the module can be used or wrapped again.

        Every parameter is whole and of the dtype that it came with; trained ones are the float32
        masters, where there are any. What came in parts (``models/sharded.py``) stays in parts.
        """
        whole = self._whole()
        self.engine.destroy()
        for module in self.engine.module.modules():
            # of this engine's hooks; those of the next one would call them and free no weights
            for key in ("pre_bwd_fn", "post_bwd_fn"):
                vars(module).pop(key, None)
        for name, parameter in self.engine.module.named_parameters():
            if name in self.sharded:
                parameter.grad = None
                continue
            if name in whole:
                parameter.grad = None
                parameter.data = whole[name]
            for key in [key for key in vars(parameter) if key.startswith("ds_")]:
                delattr(parameter, key)  # else the next engine takes it for partitioned

    @torch.no_grad()
    def _whole(self) -> dict[str, Tensor]:
        """Return the parameters that DeepSpeed keeps in parts or in another dtype; collective."""
        named = dict(self.engine.module.named_parameters())
        named = {name: p for name, p in named.items() if name not in self.sharded}
        stage3 = self.engine.zero_optimization_stage() == 3
        cast = [name for name, p in named.items() if p.dtype != self.dtypes[name]]
        wanted = list(named) if stage3 else cast
        masters = self._masters()
        found = {name: masters[name] for name in wanted if name in masters}
        found |= {n: t.to(named[n].device) for n, t in self.frozen.items() if n in wanted}
        rest = [name for name in wanted if name not in found]
        if stage3:
            import deepspeed

            with deepspeed.zero.GatheredParameters([named[name] for name in rest]):
                found |= {name: named[name].detach().clone() for name in rest}
        else:
            found |= {name: named[name].detach() for name in rest}
        return {name: tensor.to(self.dtypes[name]) for name, tensor in found.items()}

    def _masters(self) -> dict[str, Tensor]:
        """Return the float32 masters of the trained parameters; empty where there are none."""
        if not (self._fp16 or self.engine.bfloat16_enabled()):
            return {}
        from deepspeed.utils import safe_get_full_fp32_param

        optimizer = self.engine.optimizer
        if self.engine.zero_optimization_stage() == 0 and hasattr(optimizer, "fp32_groups"):
            low: list[Tensor] = sum(optimizer.fp16_groups, [])
            high: list[Tensor] = sum(optimizer.fp32_groups, [])
            masters = dict(zip(map(id, low), high, strict=True))
            return {name: masters[id(p)].detach() for name, p in self.trained.items()}
        trained = {n: p for n, p in self.trained.items() if n not in self.sharded}
        found = {name: safe_get_full_fp32_param(p) for name, p in trained.items()}
        return {name: tensor.clone() for name, tensor in found.items() if tensor is not None}
