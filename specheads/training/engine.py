"""The one door between the training loop and what runs it: plain torch, or DeepSpeed.

``forward`` and ``backward`` once per micro-batch, ``step`` once per optimizer step. The objective
returns ``sum / num_valid``; an engine that divides (DeepSpeed averages over ranks and
micro-batches) sets ``objective.engine_scale`` to undo it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from specheads.config import ConfigError, LossConfig, OptimConfig, TrainConfig
from specheads.data.pack import Batch
from specheads.models import manifest
from specheads.models.quantize import need_bitsandbytes
from specheads.system.hardware import pick_dtype

Groups = list[dict[str, Any]]


class Objective(nn.Module):
    """What the loop trains (``training/objectives.py``): its forward is loss and additive metrics.

    Attributes:
        num_heads: heads whose labels are counted beside those of the language model.
        engine_scale: what the engine will divide the loss by, world size times accumulation for
            DeepSpeed; the engine sets it.
        lambda_scale: further factor of lambda_0, for a schedule; the loop sets it.
    """

    num_heads: int = 0
    engine_scale: float = 1.0
    lambda_scale: float = 1.0


@dataclass(frozen=True)
class Spread:
    """How a run is spread over ranks: plain torch, or a stage of ZeRO.

    Attributes:
        deepspeed: whether DeepSpeed runs it; plain torch otherwise, in one process.
        stage: 0 to 3.
        offload_optimizer: whether the optimizer lies in the host's memory.
        offload_parameters: whether the weights do; stage 3 only.
        bucket: numbers that are reduced at one time.
        overlap: a second bucket is filled while the first is sent.
        max_live: numbers of gathered weights that stay for their next use; stage 3.
        prefetch: numbers that are gathered ahead; stage 3.
    """

    deepspeed: bool = False
    stage: int = 0
    offload_optimizer: bool = False
    offload_parameters: bool = False
    bucket: int = 500_000_000
    overlap: bool = False
    max_live: int = 1_000_000_000
    prefetch: int = 50_000_000

    @classmethod
    def from_config(cls, deepspeed: Mapping[str, Any]) -> Spread:
        """Read the settings' ``deepspeed`` section, with DeepSpeed's own defaults."""
        zero = deepspeed.get("zero_optimization") or {}
        stage, overlap = int(zero.get("stage", 0)), zero.get("overlap_comm")
        optimizer, parameters = (
            str((zero.get(f"offload_{what}") or {}).get("device") or "none") != "none"
            for what in ("optimizer", "param")
        )
        return cls(
            bool(deepspeed),
            stage,
            optimizer,
            parameters,
            int(float(zero.get("reduce_bucket_size", cls.bucket))),
            stage == 3 if overlap is None else bool(overlap),
            int(float(zero.get("stage3_max_live_parameters", cls.max_live))),
            int(float(zero.get("stage3_prefetch_bucket_size", cls.prefetch))),
        )


def lr_factor(step: int, first_step: int, last_step: int, optim: OptimConfig, steps: int) -> float:
    """Return what the learning rates are multiplied with in optimizer step ``step`` (from 0).

    Warm-up restarts with every stage; the decay spans the whole run.

    Args:
        step: the step about to be taken, ``first_step <= step < last_step``.
        first_step: first step of this stage.
        last_step: end of this stage.
        optim: names the schedule.
        steps: optimizer steps of the whole run.
    """
    warmup_steps = min(optim.warmup_steps, (last_step - first_step) // 2)
    warmup = min(1.0, (step - first_step + 1) / (warmup_steps + 1))
    if optim.schedule == "cosine":
        return warmup * (0.5 + 0.5 * math.cos(math.pi * step / steps))
    if optim.schedule == "wsd":
        decay_steps = optim.decay_fraction * steps
        return warmup * min(1.0, (steps - step) / max(decay_steps, 1.0))
    return warmup


def lambda_scale(step: int, first_step: int, last_step: int, loss: LossConfig) -> float:
    """Return the factor of lambda_0 in optimizer step ``step``, by the stage's progress.

    1, the progress, or ``sin(pi/2 * progress)``, where the progress is complete after the share
    ``loss.lambda_ramp`` of the stage. arXiv:2401.10774, section 2.2.2, lets the weight rise. With
    ``step`` it is 1 until then, and what makes lambda_0 ``loss.lambda_end`` from then on, as
    DeepSeek-V3's falls from 0.3 to 0.1 (arXiv:2412.19437, section 4.2).
    """
    if loss.lambda_schedule == "constant":
        return 1.0
    if loss.lambda_schedule == "step":
        early = step - first_step < (last_step - first_step) * loss.lambda_ramp
        return 1.0 if early else loss.lambda_end / loss.lambda_0
    done = (step - first_step + 1) / ((last_step - first_step) * loss.lambda_ramp)
    progress = min(1.0, done)
    return progress if loss.lambda_schedule == "linear" else math.sin(math.pi / 2 * progress)


def _no_hidden_matrix(module: nn.Module) -> set[int]:
    """Ids of parameters that Muon must not touch: embeddings, output matrices, not 2-D."""
    skipped = {id(p) for p in module.parameters() if p.ndim != 2}
    for name, child in module.named_modules():
        # an output matrix in two parts is one still, and so is a Markov correction; orthogonal
        # steps of LoRA's factors are none of their product
        last = name.rsplit(".", 1)[-1]
        if isinstance(child, nn.Embedding) or last in ("lm_head", "markov", "lora_A", "lora_B"):
            skipped |= {id(p) for p in child.parameters()}
    return skipped


def param_groups(optim: OptimConfig, **parts: tuple[nn.Module, float]) -> list[dict[str, Any]]:
    """Return the optimizer's groups: one per part, weights and biases alike.

    With ``optim.name == "muon"`` each part's hidden matrices form a group of their own
    (``<part>_muon``).

    Args:
        optim: the optimizer's settings.
        **parts: name -> (module, learning rate), e.g. ``heads=(heads, optim.lr)``.
    """
    groups: list[dict[str, Any]] = []
    for name, (module, lr) in parts.items():
        trained = [p for p in module.parameters() if p.requires_grad]
        skipped = _no_hidden_matrix(module) if optim.name == "muon" else {id(p) for p in trained}
        for suffix, chosen in (
            ("", [p for p in trained if id(p) in skipped]),
            ("_muon", [p for p in trained if id(p) not in skipped]),
        ):
            if chosen:
                rate = lr * optim.muon_ratio if suffix else lr
                groups.append({"name": name + suffix, "params": chosen, "lr": rate})
    return groups


def trained_parameters(objective: nn.Module, groups: Groups) -> dict[str, nn.Parameter]:
    """Return the parameters of the groups by their names in ``objective``.

    To be asked before an engine is opened: DeepSpeed puts tensors of its own into the groups.
    """
    names = {id(p): name for name, p in objective.named_parameters()}
    return {names[id(p)]: p for group in groups for p in group["params"]}


class Muon(torch.optim.Muon):
    """torch's Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/) in float32.

    torch makes the gradients orthogonal in bfloat16 on every device. A processor that does not
    multiply bfloat16 spends more time on that than on the pass and its gradients. In float32 the
    steps are the same up to bfloat16's rounding, and so is the state that is saved.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every matrix that has a gradient."""
        for group in self.param_groups:
            for matrix in (p for p in group["params"] if p.grad is not None):
                state = self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix.grad)
                momentum = state["momentum_buffer"].lerp_(matrix.grad, 1 - group["momentum"])
                update = matrix.grad.lerp(momentum, group["momentum"]).float()
                rows, columns = update.shape
                update = update.T if rows > columns else update
                update = update / update.norm().clamp(min=group["eps"])
                a, b, c = group["ns_coefficients"]
                for _ in range(group["ns_steps"]):
                    gram = update @ update.T
                    update = a * update + (b * gram + c * gram @ gram) @ update
                update = update.T if rows > columns else update
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                rate = group["lr"] * math.sqrt(max(1, rows / columns))
                matrix.add_(update, alpha=-rate)


def make_optimizers(
    groups: Groups, optim: OptimConfig, *, fused: bool | None = None, offloads: bool = False
) -> list[torch.optim.Optimizer]:
    """Return AdamW for the groups, and Muon for those named ``*_muon``.

    With ``optim.name == "adamw8bit"`` the two moments are kept in 8 bits, block by block
    (arXiv:2110.02861); those of parameters below 4,096 numbers stay in 32. ``offloads`` takes
    DeepSpeed's AdamW for the processor.

    Raises:
        ConfigError: if bitsandbytes is needed and not installed.
    """
    for group in groups:
        group["initial_lr"] = group["lr"]
    muon = [g for g in groups if g["name"].endswith("_muon")]
    adamw = [g for g in groups if not g["name"].endswith("_muon")]
    made: list[torch.optim.Optimizer] = []
    settings: dict[str, Any] = {"betas": (optim.beta1, optim.beta2)}
    settings["weight_decay"] = 0.0 if muon else optim.weight_decay
    if adamw and offloads:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        made.append(DeepSpeedCPUAdam(adamw, **settings, adamw_mode=True))
    elif adamw and optim.name == "adamw8bit":
        need_bitsandbytes("optim.name=adamw8bit")
        from bitsandbytes.optim import AdamW8bit

        made.append(AdamW8bit(adamw, **settings))
    elif adamw:
        made.append(torch.optim.AdamW(adamw, **settings, fused=fused))
    if muon:
        device = muon[0]["params"][0].device
        native = pick_dtype("auto", device) == torch.bfloat16
        chosen = torch.optim.Muon if native else Muon
        made.append(chosen(muon, weight_decay=optim.weight_decay))
    return made


class TorchEngine:
    """One process, plain torch. What it can do, the loop asks of every engine.

    Attributes:
        trained: the parameters that it trains, by name.
        overflowed: whether the last ``step`` was one that the engine itself skipped to lower its
            loss scale, which fp16 does now and then; such a step is no sign of a fault.
        loss_scale: what fp16 multiplies the loss by, 1 without it.
    """

    overflowed = False
    loss_scale = 1.0

    def __init__(self, objective: Objective, groups: Groups, cfg: TrainConfig) -> None:
        """Build the optimizers for ``groups``."""
        self.objective = objective
        self.cfg = cfg
        self.optimizers = make_optimizers(groups, cfg.optim, fused=True)
        self.trained = trained_parameters(objective, groups)
        self.names = {id(p): name for name, p in self.trained.items()}
        objective.engine_scale = 1.0

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of one micro-batch and its metrics."""
        kind = next(iter(self.trained.values())).device.type
        with torch.autocast(kind, torch.bfloat16, enabled=self.cfg.autocast == "bfloat16"):
            return cast("tuple[Tensor, dict[str, Tensor]]", self.objective(batch))

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add this micro-batch's gradients; ``last`` marks the end of the optimizer step."""
        loss.backward()

    def step(self, factor: float) -> float:
        """Clip, step with every learning rate times ``factor``, return the gradient norm.

        A norm that is not finite changes nothing, on any rank: no weight, no moment, no counter.
        The gradients are gone then, and what comes back is that norm, or infinity.
        """
        norm = float(nn.utils.clip_grad_norm_(self.trained.values(), self.cfg.optim.grad_clip))
        if math.isfinite(norm):
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["initial_lr"] * factor
                optimizer.step()
        self.close()
        return norm

    def save(self, folder: Path) -> None:
        """Write trained weights and the optimizers' tensors as safetensors; all ranks call it."""
        manifest.save_tensors(folder / "model.safetensors", self.trained)
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    name = f"{self.names[id(parameter)]}/{key}"
                    if isinstance(value, Tensor):
                        # 8-bit states share their code books, which safetensors refuses
                        tensors[name] = value.clone() if key.startswith("qmap") else value
                    else:
                        values[name] = value
        manifest.save_tensors(folder / "optimizer.safetensors", tensors)
        (folder / "optimizer.json").write_text(json.dumps(values))

    def load(self, folder: Path) -> None:
        """Restore weights and optimizer state; every name and shape must match.

        Raises:
            ConfigError: if the checkpoint is of another model, before anything is changed.
        """
        manifest.check_header(folder / "model.safetensors", self.trained, exact=True)
        manifest.check_moments(folder / "optimizer.safetensors", self.trained)
        about = folder / "optimizer.json"
        values = manifest.read_json(about, f"{folder} is not a whole checkpoint")
        if odd := [n for n, v in values.items() if type(v) not in (bool, int, float)]:
            raise ConfigError(f"{about}: {odd[0]} must be a number")
        manifest.copy_tensors(manifest.load_tensors(folder / "model.safetensors"), self.trained)
        state: dict[str, dict[str, Any]] = {}
        stored = manifest.load_tensors(folder / "optimizer.safetensors")
        for name, value in (stored | values).items():
            parameter_name, _, key = name.rpartition("/")
            state.setdefault(parameter_name, {})[key] = value
        for optimizer in self.optimizers:
            # torch numbers its parameters by their place in the groups, checkpoints name them: a
            # group that grew or moved would else get another one's moments, of the same shape
            layout = optimizer.state_dict()
            order = [self.names[id(p)] for group in optimizer.param_groups for p in group["params"]]
            layout["state"] = {i: state[name] for i, name in enumerate(order) if name in state}
            optimizer.load_state_dict(layout)

    def close(self) -> None:
        """Free the gradients; the module itself was never changed."""
        for parameter in self.trained.values():
            parameter.grad = None
