"""Let vLLM run a base over the texts of a training, which is trained from its hidden states.

    python scripts/engine_features.py --training +recipe=medusa1 model=smollm2 features.dir=runs/of
    python -m specheads.train +recipe=medusa1 model=smollm2 features.dir=runs/of

writes them once. While a training runs a server can give them, of which nothing is stored:

    python scripts/engine_features.py --serve 8000 --training +recipe=medusa1 model=smollm2
    python -m specheads.train +recipe=medusa1 model=smollm2 features.endpoint=http://localhost:8000/v1

The words behind ``--training`` are those of the training, which name the base, the data, the heads
and the folder. vLLM runs in an environment of its own (scripts/engines/vllm.txt), or in that of
``--python``, and its connector writes a file of all hidden states for each text. A text that is
there is not run again. The training makes its own store of them, and the folder ``states`` may then
be deleted. Of a server a text's file is there until the training has read it.
"""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engines
import harness
import torch

from specheads.config import ConfigError, TrainConfig
from specheads.config.compose import composed
from specheads.config.main import tidy_arguments
from specheads.data.pack import PackedBatches
from specheads.data.teacher_cache import ENGINE, EngineStates, computed_by, ids_digest
from specheads.models.mtp import MtpHeads
from specheads.models.names import resolve_name
from specheads.models.output import layers_behind, with_final
from specheads.training.setup import heads_of, load_base, load_data


@dataclass
class Settings:
    """What is run where.

    Attributes:
        training: the words of the training
        serve: the port of a server that gives states until it is stopped
        shared: folder on a disk that server and training see, for files of texts under way
        python: of an environment with vLLM; without it one is made in .engines
        options: what else vLLM's LLM is told, as JSON, as {"tensor_parallel_size": 4}
    """

    training: tuple[str, ...] = ()
    serve: int = 0
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


def texts_of(cfg: TrainConfig) -> list[list[int]]:
    """Return the texts of a training as token ids.

    Raises:
        ConfigError: if the settings say no folder, or rows of no one length.
    """
    if cfg.features.dir in ("", "auto"):
        raise ConfigError("features.dir is empty; name the folder of the hidden states")
    base, _, tokenizer = load_base(cfg, weights=False)
    data = load_data(cfg, base, tokenizer, train_base=False)
    if not isinstance(data.train, PackedBatches):
        raise ConfigError("features.dir needs rows of one length; leave data.growth out")
    held = [each for batch in data.heldout for row in batch["documents"] for each in row]
    return [each.input_ids.tolist() for each in (*data.train.documents, *held)]


def options_of(cfg: TrainConfig, layers: list[int], longest: int, folder: Path) -> dict[str, Any]:
    """Return what vLLM is told.

    Args:
        cfg: the training.
        layers: behind how many layers states are taken.
        longest: tokens of the longest text.
        folder: where the connector writes.
    """
    heads = {"eagle_aux_hidden_state_layer_ids": layers}
    return {
        "model": resolve_name(cfg.model.name),
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
    }


def serve(cfg: TrainConfig, given: Settings, python: str, environ: dict[str, str]) -> None:
    """Become a server of hidden states."""
    # a port is one server's, and so is what lies in the folder
    folder = given.shared / f"specheads-states-{os.getuid()}-{given.serve}"
    folder.mkdir(mode=0o700, exist_ok=True)
    told = options_of(cfg, layers_of(cfg), cfg.data.seq_len, folder) | json.loads(given.options)
    command = [python, "-m", "vllm.entrypoints.cli.main", "serve", told.pop("model")]
    for name, value in told.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            command += [f"--{flag}" if value else f"--no-{flag}"]
        else:
            command += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    os.execve(python, [*command, "--port", str(given.serve)], environ)


def store(cfg: TrainConfig, given: Settings, python: str, environ: dict[str, str]) -> None:
    """Run vLLM where states are missing in the folder.

    Raises:
        SystemExit: if the folder holds the states behind other layers.
    """
    texts, layers = texts_of(cfg), layers_of(cfg)
    folder = Path(cfg.features.dir).expanduser().absolute()
    base_model = computed_by(cfg.model, cfg.autocast)["base model"]
    there = EngineStates.found(folder, base_model)
    if there and not set(layers) <= set(there.layers):
        raise SystemExit(
            f"{folder} holds the states behind the layers {list(there.layers)}, these heads read"
            f" {layers}; name another features.dir"
        )
    layers = list(there.layers) if there else layers
    known = there.files if there else {}
    missing = {ids_digest(ids): ids for ids in texts}
    missing = {name: ids for name, ids in missing.items() if name not in known}
    print(f"{len(texts):,} texts, {len(missing):,} of them still to be run", flush=True)
    if not missing:
        return
    told = options_of(cfg, layers, max(map(len, missing.values())), folder)
    job = {
        "about": {"base model": base_model, "layers": layers},
        **{"texts": missing, "folder": str(folder / "states"), "engine": str(folder / ENGINE)},
        "options": told | json.loads(given.options),
    }
    work = folder / "job.json"
    folder.mkdir(parents=True, exist_ok=True)
    work.write_text(json.dumps(job))
    subprocess.run([python, engines.HERE / "states_vllm.py", work], env=environ, check=True)
    work.unlink()


def main() -> None:
    """Compose the training, and run vLLM for it."""
    given = harness.parse(Settings)
    words = tidy_arguments(list(given.training))
    cfg = composed(
        "train", TrainConfig, ["run_dir=unused", *words]
    )  # its default is of a running command
    vllm = engines.Vllm(engines.Settings())
    environ = engines.environ_of(vllm)
    environ["PYTHONPATH"] += f"{os.pathsep}{engines.HERE}"  # of the connector
    (serve if given.serve else store)(cfg, given, given.python or str(vllm.install()), environ)


if __name__ == "__main__":
    main()
