"""The group of processes that DeepSpeed talks over, and the settings that it gets."""

from __future__ import annotations

import logging
import os
import warnings
from datetime import timedelta
from typing import Any

from specheads.config import ConfigError, TrainConfig
from specheads.system import dist, hardware, heartbeat


def join(cfg: TrainConfig) -> dict[str, Any]:
    """Start the group of ranks, if this process is in none yet; return DeepSpeed's settings.

    Raises:
        ConfigError: if the device has no float16.
    """
    dist.set_defaults()
    device = hardware.pick_device(cfg.device).type
    os.environ.setdefault("DS_ACCELERATOR", device)
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    # DeepSpeed calls functions of torch that have newer names, on every rank
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # 16-bit weights get float32 masters, and float16 ones a loss scale that finds itself
    half = "float16" in (cfg.model.dtype, cfg.autocast)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": cfg.data.rows,
        "gradient_accumulation_steps": cfg.optim.accumulation,
        "gradient_clipping": cfg.optim.grad_clip,
        "steps_per_print": 10**9,
        "bf16": {"enabled": cfg.model.dtype == "bfloat16"},
        "fp16": {"enabled": half, "loss_scale": 0},
    }
    if cfg.autocast == "bfloat16":
        settings["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    settings |= cfg.deepspeed
    if settings["fp16"].get("enabled") and not get_accelerator().is_fp16_supported():
        raise ConfigError(
            f"autocast={cfg.autocast} model.dtype={cfg.model.dtype}: DeepSpeed has no float16 "
            "on this processor; choose bfloat16 or none"
        )
    # on a processor it would compile a part that only its inference uses, whose lock outlives
    # a process that is killed, and then every later start waits for it without end
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "nccl" if device == "cuda" else "gloo"
    # the heartbeat knows earlier of a process that is gone; this is for one that is stuck
    patience = timedelta(seconds=cfg.dist_timeout + 30)
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, timeout=patience)
    heartbeat.start(cfg.dist_timeout)
    return settings
