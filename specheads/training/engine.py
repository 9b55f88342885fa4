"""The one door between the training loop and what runs it: plain torch, or DeepSpeed.

``forward`` and ``backward`` once per micro-batch, ``step`` once per optimizer step. The objective
returns ``sum / num_valid``; an engine that divides (DeepSpeed averages over ranks and
micro-batches) sets ``objective.engine_scale`` to undo it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from specheads.config import ConfigError, OptimConfig, TrainConfig
from specheads.models.manifest import (
    check_header,
    check_moments,
    load_tensors,
    read_json,
    save_tensors,
)
from specheads.models.quantize import need_bitsandbytes

Batch = dict[str, Any]
Groups = list[dict[str, Any]]


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch with its tensors on ``device``."""
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}


class Objective(Protocol):
    """What the loop trains (``training/objectives.py``): a module whose forward is the loss."""

    num_heads: int
    engine_scale: float
    lambda_scale: float

    def __call__(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and additive metrics."""


class Engine(Protocol):
    """What the loop calls.

    Attributes:
        overflowed: whether the last ``step`` was one that the engine itself skipped to lower its
            loss scale, which fp16 does now and then; such a step is no sign of a fault.
        loss_scale: what fp16 multiplies the loss by, 1 without it.
    """

    @property
    def overflowed(self) -> bool: ...  # noqa: D102

    @property
    def loss_scale(self) -> float: ...  # noqa: D102

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of one micro-batch and its metrics."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add this micro-batch's gradients; ``last`` marks the end of the optimizer step."""

    def step(self, factor: float) -> float:
        """Clip, step with every learning rate times ``factor``, return the gradient norm.

        A norm that is not finite changes nothing, on any rank: no weight, no moment, no counter.
        The gradients are gone then, and what comes back is that norm, or infinity.
        """

    def drop(self) -> None:
        """Throw away the gradients of this step instead of stepping; all ranks call it."""

    def save(self, folder: Path) -> None:
        """Write trained weights and optimizer state; all ranks call it."""

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote."""

    def close(self) -> None:
        """Leave the module usable without the engine."""


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


def check_names(folder: Path, stored: Iterable[str], trained: Iterable[str]) -> None:
    """Check that a checkpoint holds the trained parameters and no others.

    Raises:
        ConfigError: naming one that is in one only.
    """
    if odd := sorted(set(stored) ^ set(trained)):
        raise ConfigError(
            f"{folder} is of another model: {len(odd)} parameters are in one only, e.g. {odd[0]}"
        )


class TorchEngine:
    """One process, plain torch."""

    overflowed = False
    loss_scale = 1.0

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
        """Clip, step with every learning rate times ``factor``, return the gradient norm.

        One that is not finite changes nothing; the gradients are dropped.
        """
        norm = float(nn.utils.clip_grad_norm_(self.trained, self.cfg.optim.grad_clip))
        if not math.isfinite(norm):
            self.drop()
            return norm
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return norm

    def drop(self) -> None:
        """Throw away the gradients of this step."""
        for parameter in self.trained:
            parameter.grad = None

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
        """Restore weights and optimizer state; every name and shape must match.

        Raises:
            ConfigError: if the checkpoint is of another model, before anything is changed.
        """
        trained = dict(zip(self.names, self.trained, strict=True))
        check_header(folder / "model.safetensors", trained, exact=True)
        check_moments(folder / "optimizer.safetensors", trained)
        values = read_json(folder / "optimizer.json", f"{folder} is not a whole checkpoint")
        if odd := [n for n, v in values.items() if type(v) not in (bool, int, float)]:
            raise ConfigError(f"{folder / 'optimizer.json'}: {odd[0]} must be a number")
        weights = load_tensors(folder / "model.safetensors")
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(weights[name])
        state: dict[str, dict[str, Any]] = {}
        stored = load_tensors(folder / "optimizer.safetensors")
        for name, value in (stored | values).items():
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
        self.drop()
