"""The one door between the training loop and what runs it: plain torch, or DeepSpeed.

``forward`` and ``backward`` once per micro-batch, ``step`` once per optimizer step. The objective
returns ``sum / num_valid``; an engine that divides (DeepSpeed averages over ranks and
micro-batches) sets ``objective.engine_scale`` to undo it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from specheads import dist
from specheads.config import ConfigError, OptimConfig, RunError, TrainConfig
from specheads.models.quantize import is_quantized_linear, need_bitsandbytes
from specheads.training.state import load_tensors, save_tensors

Batch = dict[str, Any]
Groups = list[dict[str, Any]]


class Objective(Protocol):
    """What the loop trains (``training/objectives.py``): a module whose forward is the loss."""

    num_heads: int
    engine_scale: float
    lambda_scale: float

    def __call__(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and additive metrics."""
        ...


class Engine(Protocol):
    """What the loop calls."""

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of one micro-batch and its metrics."""
        ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add this micro-batch's gradients; ``last`` marks the end of the optimizer step."""
        ...

    def step(self, factor: float) -> float:
        """Clip, step with every learning rate times ``factor``, return the gradient norm."""
        ...

    def save(self, folder: Path) -> None:
        """Write trained weights and optimizer state; all ranks call it."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote."""
        ...

    def close(self) -> None:
        """Leave the module usable without the engine."""
        ...


def make_optimizers(
    groups: Groups, optim: OptimConfig, *, fused: bool | None = None
) -> list[torch.optim.Optimizer]:
    """Return AdamW for the groups, and Muon for those named ``*_muon``.

    With ``optim.name == "adamw8bit"`` the two moments are kept in 8 bits, block by block
    (arXiv:2110.02861); those of parameters below 4,096 numbers stay in 32.

    Raises:
        ConfigError: if bitsandbytes is needed and not installed.
    """
    for group in groups:
        group["initial_lr"] = group["lr"]
    muon = [g for g in groups if g["name"].endswith("_muon")]
    adamw = [g for g in groups if not g["name"].endswith("_muon")]
    made: list[torch.optim.Optimizer] = []
    if adamw:
        decay = 0.0 if muon else optim.weight_decay
        betas = (optim.beta1, optim.beta2)
        if optim.name == "adamw8bit":
            need_bitsandbytes("optim.name=adamw8bit")
            from bitsandbytes.optim import AdamW8bit

            made.append(AdamW8bit(adamw, betas=betas, weight_decay=decay))
        else:
            made.append(torch.optim.AdamW(adamw, betas=betas, weight_decay=decay, fused=fused))
    if muon:
        made.append(torch.optim.Muon(muon, weight_decay=optim.weight_decay))
    return made


def learning_rates(groups: Groups, factor: float) -> dict[str, float]:
    """Return the learning rate of every group, for the log."""
    return {group["name"]: group["initial_lr"] * factor for group in groups}


def _not_finite(norm: float) -> RunError:
    return RunError(f"the gradient norm is {norm}; stopped before the optimizer step")


def _check_names(folder: Path, stored: Iterable[str], trained: Iterable[str]) -> None:
    if odd := sorted(set(stored) ^ set(trained)):
        raise ConfigError(
            f"{folder} is of another model: {len(odd)} parameters are in one only, e.g. {odd[0]}"
        )


class TorchEngine:
    """One process, plain torch."""

    def __init__(self, objective: nn.Module, groups: Groups, cfg: TrainConfig) -> None:
        """Build the optimizers for ``groups``."""
        self.objective = objective
        self.cfg = cfg
        self.optimizers = make_optimizers(groups, cfg.optim, fused=True)
        self.trained = [p for group in groups for p in group["params"]]
        names = {id(p): name for name, p in objective.named_parameters()}
        self.names = [names[id(p)] for p in self.trained]
        objective.engine_scale = 1.0  # type: ignore[assignment]

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of one micro-batch and its metrics."""
        kind = self.trained[0].device.type
        with torch.autocast(kind, torch.bfloat16, enabled=self.cfg.autocast == "bfloat16"):
            return cast("tuple[Tensor, dict[str, Tensor]]", self.objective(batch))

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add this micro-batch's gradients."""
        del last
        loss.backward()

    def step(self, factor: float) -> float:
        """Clip, step with every learning rate times ``factor``, return the gradient norm."""
        norm = float(nn.utils.clip_grad_norm_(self.trained, self.cfg.optim.grad_clip))
        if not math.isfinite(norm):
            raise _not_finite(norm)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return norm

    def save(self, folder: Path) -> None:
        """Write trained weights and the optimizers' tensors as safetensors."""
        save_tensors(folder / "model.safetensors", dict(zip(self.names, self.trained, strict=True)))
        names = dict(zip(map(id, self.trained), self.names, strict=True))
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    name = f"{names[id(parameter)]}/{key}"
                    if isinstance(value, Tensor):
                        # 8-bit states share their code books, which safetensors refuses
                        tensors[name] = value.clone() if key.startswith("qmap") else value
                    else:
                        values[name] = value
        save_tensors(folder / "optimizer.safetensors", tensors)
        (folder / "optimizer.json").write_text(json.dumps(values))

    def load(self, folder: Path) -> None:
        """Restore weights and optimizer state; every name must match.

        Raises:
            ConfigError: if the checkpoint is of another model.
        """
        weights = load_tensors(folder / "model.safetensors")
        _check_names(folder, weights.keys(), self.names)
        with torch.no_grad():
            for name, parameter in zip(self.names, self.trained, strict=True):
                parameter.copy_(weights[name])
        state: dict[str, dict[str, Any]] = {}
        stored = load_tensors(folder / "optimizer.safetensors")
        for name, value in (stored | json.loads((folder / "optimizer.json").read_text())).items():
            parameter_name, _, key = name.rpartition("/")
            state.setdefault(parameter_name, {})[key] = value
        names = dict(zip(map(id, self.trained), self.names, strict=True))
        for optimizer in self.optimizers:
            layout = optimizer.state_dict()
            order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
            layout["state"] = {i: state[name] for i, name in enumerate(order) if name in state}
            optimizer.load_state_dict(layout)

    def close(self) -> None:
        """Free the gradients; the module itself was never changed."""
        for parameter in self.trained:
            parameter.grad = None


def _need_compiler() -> None:
    """Check what DeepSpeed compiles with on a CPU, before its own error of fifty lines.

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
            f"DeepSpeed needs {' and '.join(missing)} on this machine; "
            "install that, or use deepspeed=none"
        )


class DeepSpeedEngine:
    """One or many processes under DeepSpeed; its ZeRO state is pickle, by its own design."""

    def __init__(self, objective: nn.Module, groups: Groups, cfg: TrainConfig) -> None:
        """Start the process group and wrap ``objective``."""
        if cfg.optim.name == "muon":
            raise ConfigError(
                "optim.name=muon needs deepspeed=none, as ZeRO flattens the matrices; "
                "add optim=adamw"
            )
        if cfg.optim.name == "adamw8bit":
            raise ConfigError(
                "optim.name=adamw8bit needs deepspeed=none, as ZeRO keeps the moments in parts of "
                "its own; add optim=adamw"
            )
        stage = (cfg.deepspeed.get("zero_optimization") or {}).get("stage", 0)
        if stage == 3 and any(is_quantized_linear(module) for module in objective.modules()):
            raise ConfigError(
                f"model.quantization={cfg.model.quantization}: ZeRO-3 cannot spread quantised "
                "weights; choose deepspeed=zero1 or zero2"
            )
        if not torch.cuda.is_available():
            _need_compiler()
        dist.set_defaults()
        os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
        import deepspeed
        from deepspeed.utils import logger

        logger.setLevel(logging.WARNING)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        # the other ranks wait while rank 0 measures and exports at the end
        patience = timedelta(hours=3)
        deepspeed.init_distributed(backend, auto_mpi_discovery=False, timeout=patience)
        (optimizer,) = make_optimizers(groups, cfg.optim)
        precision: dict[str, Any] = {"bf16": {"enabled": cfg.model.dtype == "bfloat16"}}
        if cfg.autocast == "bfloat16":
            precision["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        self.engine: Any = deepspeed.initialize(
            model=objective,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": cfg.data.rows,
                "gradient_accumulation_steps": cfg.optim.accumulation,
                "gradient_clipping": cfg.optim.grad_clip,
                "steps_per_print": 10**9,
                **precision,
                **cfg.deepspeed,
            },
        )[0]
        self.groups = groups
        trained = {id(p) for group in groups for p in group["params"]}
        self.names = [name for name, p in objective.named_parameters() if id(p) in trained]
        scale = dist.world_size() * cfg.optim.accumulation
        objective.engine_scale = float(scale)  # type: ignore[assignment]

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of one micro-batch and its metrics."""
        return cast("tuple[Tensor, dict[str, Tensor]]", self.engine(batch))

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add this micro-batch's gradients."""
        self.engine.backward(loss)
        if not last:
            self.engine.step()  # counts the micro-batch, changes nothing

    def step(self, factor: float) -> float:
        """Step with every learning rate times ``factor``, return the gradient norm."""
        rates = learning_rates(self.groups, factor)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rates[group["name"]]
        self.engine.step()
        norm = float(self.engine.get_global_grad_norm() or 0.0)
        if not math.isfinite(norm):
            raise _not_finite(norm)
        return norm

    def save(self, folder: Path) -> None:
        """Write DeepSpeed's own checkpoint."""
        self.engine.save_checkpoint(
            str(folder / "deepspeed"), tag="state", exclude_frozen_parameters=True
        )
        if dist.is_main():
            (folder / "trained.json").write_text(json.dumps(self.names))

    def load(self, folder: Path) -> None:
        """Restore DeepSpeed's own checkpoint, written by this run."""
        stored = json.loads((folder / "trained.json").read_text())
        _check_names(folder, stored, self.names)  # the frozen ones are not stored: no strict load
        found, _ = self.engine.load_checkpoint(
            str(folder / "deepspeed"), tag="state", load_module_strict=False
        )
        if found is None:
            raise ConfigError(f"{folder} holds no DeepSpeed state")

    def close(self) -> None:
        """Remove DeepSpeed's hooks, so that the module can be used or wrapped again."""
        if self.engine.zero_optimization_stage() < 3:
            self.engine.destroy()
            return
        import deepspeed

        # stage 3 leaves every rank a part of each parameter: make them whole again
        parameters = list(self.engine.module.parameters())
        with deepspeed.zero.GatheredParameters(parameters):
            whole = [parameter.detach().clone() for parameter in parameters]
        self.engine.destroy()
        for parameter, data in zip(parameters, whole, strict=True):
            parameter.data = data
            for name in [name for name in vars(parameter) if name.startswith("ds_")]:
                delattr(parameter, name)  # else the next engine takes it for partitioned


def open_engine(objective: nn.Module, groups: Groups, cfg: TrainConfig) -> Engine:
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
