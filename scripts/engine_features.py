"""Let vLLM run a base over the texts of a training, and keep the hidden states it is trained from.

    python scripts/engine_features.py --training +recipe=medusa1 model=smollm2 features.dir=runs/of
    python -m specheads.train +recipe=medusa1 model=smollm2 features.dir=runs/of

The words behind ``--training`` are those of the training, which name the base, the data, the heads
and the folder. vLLM runs in an environment of its own (scripts/engines/vllm.txt), or in that of
``--python``, and its connector writes a file of all hidden states for each text. A text that is
there is not run again. The training makes its own store of them, and the folder ``states`` may then
be deleted.
"""

import json
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
from specheads.models.names import resolve_name
from specheads.models.output import layers_behind, with_final
from specheads.training.setup import heads_of, load_base, load_data


@dataclass
class Settings:
    """What is run where.

    Attributes:
        training: the words of the training
        python: of an environment with vLLM; without it one is made in .engines
        options: what else vLLM's LLM is told, as JSON, as {"tensor_parallel_size": 4}
    """

    training: tuple[str, ...] = ()
    python: str = ""
    options: str = "{}"


def wanted(cfg: TrainConfig) -> tuple[list[list[int]], list[int]]:
    """Return the texts of a training as token ids, and behind how many layers heads read.

    Raises:
        ConfigError: if the settings say no folder, or rows of no one length.
    """
    if cfg.features.dir in ("", "auto"):
        raise ConfigError("features.dir is empty; name the folder of the hidden states")
    base, output, tokenizer = load_base(cfg, weights=False)
    data = load_data(cfg, base, tokenizer, train_base=False)
    if not isinstance(data.train, PackedBatches):
        raise ConfigError("features.dir needs rows of one length; leave data.growth out")
    with torch.device("meta"):
        taps = with_final(heads_of(cfg.heads, base, output).taps)
    held = [each for batch in data.heldout for row in batch["documents"] for each in row]
    documents = [*data.train.documents, *held]
    return [each.input_ids.tolist() for each in documents], sorted(set(layers_behind(base, taps)))


def main() -> None:
    """Compose the training, run vLLM where states are missing."""
    given = harness.parse(Settings)
    words = tidy_arguments(list(given.training))
    cfg = composed(
        "train", TrainConfig, ["run_dir=unused", *words]
    )  # its default is of a running command
    texts, layers = wanted(cfg)
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
    about: dict[str, Any] = {"base model": base_model, "layers": layers}
    job = {
        **{"model": resolve_name(cfg.model.name), "dtype": cfg.model.dtype, "about": about},
        **{"texts": missing, "folder": str(folder / "states"), "engine": str(folder / ENGINE)},
        "options": json.loads(given.options),
    }
    vllm = engines.Vllm(engines.Settings())
    python = given.python or str(vllm.install())
    work = folder / "job.json"
    folder.mkdir(parents=True, exist_ok=True)
    work.write_text(json.dumps(job))
    environ = engines.environ_of(vllm)
    subprocess.run([python, engines.HERE / "states_vllm.py", work], env=environ, check=True)
    work.unlink()


if __name__ == "__main__":
    main()
