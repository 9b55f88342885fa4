"""vLLM's connector that writes hidden states, on a CPU too, and without leaving files behind.

vLLM imports it by its name (``kv_connector_module_path``), in whichever of its processes.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
)

FORGOTTEN = 600.0  # seconds after which nobody comes for a file


class Past:
    """Stands for a CUDA event where nothing is asynchronous: it has happened."""

    def record(self, *_: Any) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return whether it has happened."""
        return True


@contextlib.contextmanager
def without_accelerator() -> Iterator[None]:
    """Let the connector write on a CPU, where it fails at pinned memory and at CUDA's events."""
    if torch.accelerator.is_available():
        yield
        return
    made, event = torch.empty_like, torch.cuda.Event
    torch.empty_like = lambda *of, pin_memory=False, **more: made(*of, **more)
    torch.cuda.Event = Past
    try:
        yield
    finally:
        torch.empty_like, torch.cuda.Event = made, event


class StatesConnector(ExampleHiddenStatesConnector):
    """Writes the hidden states of each text, and removes files that nobody has come for.

    The folder holds nothing but what this connector writes. What a server that was killed left
    there is removed when the next one starts.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.WORKER:
            self._sweep(older=0.0)

    def _sweep(self, older: float) -> None:
        before = time.time() - older
        for file in Path(self._storage_path).glob("cmpl-*.safetensors*"):
            with contextlib.suppress(FileNotFoundError):  # a reader was faster
                if file.stat().st_mtime < before:
                    file.unlink()

    def _submit_async_write(self, pending: Any) -> None:
        self._sweep(older=FORGOTTEN)
        with without_accelerator():
            super()._submit_async_write(pending)
