"""Let vLLM write the hidden states of texts; runs in an environment of vLLM's own.

    python states_vllm.py job.json

``scripts/engine_features.py`` writes the job. Every text's file is moved to its place when vLLM has
finished it.
"""

import fcntl
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

AT_ONCE = 64  # texts between two moves of files
PATIENCE = 60.0  # seconds for a file to be written


def written_file(llm: Any, path: str) -> Path:
    """Return the file of a text that was run, once it is whole.

    The last ones are written in the engine's next step, and each under a lock.

    Raises:
        TimeoutError: if it is not written.
    """
    file, end = Path(path), time.monotonic() + PATIENCE
    while not file.is_file():
        if time.monotonic() > end:
            raise TimeoutError(f"vLLM did not write {file}")
        llm.llm_engine.step()
        time.sleep(0.01)
    with Path(f"{file}.lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
    return file


def main() -> None:
    """Run the texts."""
    import vllm

    job = json.loads(Path(sys.argv[1]).read_text())
    states, engine = Path(job["folder"]), Path(job["engine"])
    states.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=states.parent) as written:
        kept = job["options"]["kv_transfer_config"]["kv_connector_extra_config"]
        kept["shared_storage_path"] = written
        llm, one = vllm.LLM(**job["options"]), vllm.SamplingParams(max_tokens=1, temperature=0)
        dtype = str(llm.llm_engine.model_config.dtype).removeprefix("torch.")
        about = {**job["about"], "computation": f"vLLM {vllm.__version__}, {dtype}"}
        before = json.loads(engine.read_text()) if engine.is_file() else about
        if before != about:
            raise SystemExit(f"{engine}: {before} was written there; this is {about}")
        engine.write_text(json.dumps(about))
        names = list(job["texts"])
        for first in range(0, len(names), AT_ONCE):
            some = names[first : first + AT_ONCE]
            asked = [{"prompt_token_ids": job["texts"][name]} for name in some]
            for name, found in zip(some, llm.generate(asked, one, use_tqdm=False), strict=True):
                file = written_file(llm, found.kv_transfer_params["hidden_states_path"])
                file.replace(states / f"{name}.safetensors")
            print(f"{first + len(some):,} of {len(names):,}", flush=True)


if __name__ == "__main__":
    main()
