"""Start vLLM as a server of a base's hidden states, from which a training's heads learn.

    python scripts/engine_features.py --training +recipe=medusa1 model=smollm2
    python -m specheads.train +recipe=medusa1 model=smollm2 features.endpoint=http://localhost:8000/v1

The words behind ``--training`` are those of the training, which name the base, its dtype, the
length of rows and the heads, for whose layers it is started. vLLM runs in an environment of its own
(scripts/engines/vllm.txt), or in that of ``--python``. Its connector writes a file for each text
that it is asked for; the training reads and deletes it. Stop it with Ctrl-C.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engines
import harness
import torch

from specheads.config import TrainConfig
from specheads.config.compose import composed
from specheads.config.main import tidy_arguments
from specheads.models.mtp import MtpHeads
from specheads.models.names import resolve_name
from specheads.models.output import layers_behind, with_final
from specheads.training.setup import heads_of, load_base


@dataclass
class Settings:
    """What is served, and where.

    Attributes:
        training: the words of the training
        port: of the server
        shared: folder on a disk that server and training see, for the files of texts under way
        python: of an environment with vLLM; without it one is made in .engines
        options: what else vLLM is told, as JSON, as {"tensor_parallel_size": 4}
    """

    training: tuple[str, ...] = ()
    port: int = 8000
    shared: Path = Path("/dev/shm")
    python: str = ""
    options: str = "{}"


def layers_of(cfg: TrainConfig) -> list[int]:
    """Return behind how many layers the heads of a training read."""
    base, output, _ = load_base(cfg, weights=False)
    with torch.device("meta"):
        if cfg.recipe == "mtp_finetune":
            taps = MtpHeads.from_settings(cfg.mtp, base, output).taps
        else:
            taps = heads_of(cfg.heads, base, output).taps
    return sorted(set(layers_behind(base, with_final(taps))))


def command_of(cfg: TrainConfig, given: Settings, folder: Path) -> list[str]:
    """Return what follows Python on vLLM's command line.

    Args:
        cfg: the training.
        given: what else it is told.
        folder: where the connector writes.
    """
    longest, heads = cfg.data.seq_len, {"eagle_aux_hidden_state_layer_ids": layers_of(cfg)}
    told: dict[str, Any] = {
        "port": given.port,
        "dtype": cfg.model.dtype,
        "max_model_len": longest + 1,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(2048, longest + 1),
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": heads},
        },
        "kv_transfer_config": {
            "kv_connector": "StatesConnector",
            "kv_connector_module_path": "states_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        },
        **json.loads(given.options),
    }
    command = ["-m", "vllm.entrypoints.cli.main", "serve", resolve_name(cfg.model.name)]
    for name, value in told.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            command += [f"--{flag}" if value else f"--no-{flag}"]
        else:
            command += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return command


def main() -> None:
    """Compose the training, and become the server."""
    given = harness.parse(Settings)
    words = tidy_arguments(list(given.training))
    cfg = composed(
        "train", TrainConfig, ["run_dir=unused", *words]
    )  # its default is of a running command
    vllm = engines.Vllm(engines.Settings())
    environ = engines.environ_of(vllm)
    environ["PYTHONPATH"] += f"{os.pathsep}{engines.HERE}"  # of the connector
    # a port is one server's, and so is the folder of that name, which it empties
    folder = given.shared.absolute() / f"specheads-states-{os.getuid()}-{given.port}"
    folder.mkdir(mode=0o700, exist_ok=True)
    python = given.python or str(vllm.install())
    os.execve(python, [python, *command_of(cfg, given, folder)], environ)


if __name__ == "__main__":
    main()
