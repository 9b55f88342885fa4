"""A server of hidden states as vLLM's is, whose base transformers runs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from specheads.models.output import capture_hidden


class StatesServer:
    """Answers as vLLM with its ``ExampleHiddenStatesConnector`` does.

    Attributes:
        url: with the version.
        root: the folder of the served model.
        layers: of each state behind how many layers it is.
        dtype: of the states.
        fails: called with the number of a request before it is answered: a status to answer with,
            -1 to break the connection off, -2 to leave half a file, 0 to answer.
        asked: texts so far.
        most_files: the most files of states that there were at one time.
    """

    def __init__(self, folder: Path, root: Path, layers: Sequence[int]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.root, self.layers = folder, root, list(layers)
        self.dtype = torch.float32
        self.fails = lambda number: 0
        self.asked = self.most_files = 0
        self._lock = threading.Lock()
        self.load(root)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:  # noqa: N802
                assert self.path == "/v1/models"
                self.reply(200, {"data": [{"id": "served", "root": str(outer.root)}]})

            def do_POST(self) -> None:  # noqa: N802
                assert self.path == "/v1/completions"
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    outer.asked += 1
                    number = outer.asked
                    failure = outer.fails(number)
                if failure == -1:
                    self.close_connection = True
                    return
                if failure > 0:
                    self.reply(failure, {"error": "not now"})
                    return
                path = outer.write(number, body, half=failure == -2)
                told = {"hidden_states_path": str(path)}
                self.reply(200, {"id": f"cmpl-{number}", "kv_transfer_params": told})

            def reply(self, status: int, content: Any) -> None:
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        class Http(ThreadingHTTPServer):
            request_queue_size = 128  # else connections that come together wait for a second

        self._http = Http(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def load(self, root: Path) -> None:
        """Serve another model, or the same one again."""
        self.model = AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32).eval()

    def close(self) -> None:
        """Stop."""
        self._http.shutdown()
        self._http.server_close()

    def states(self, ids: list[int]) -> torch.Tensor:
        """Return the states [n, layers, d] of a text."""
        taps = [f"layer.{behind - 1}" for behind in self.layers]
        with torch.no_grad(), capture_hidden(self.model, taps) as captured:
            self.model(torch.tensor([ids]), use_cache=False)
        return torch.stack([captured[tap][0] for tap in taps], 1).to(self.dtype)

    def write(self, number: int, body: dict[str, Any], *, half: bool) -> Path:
        """Return the path of a file, which is still being written."""
        ids = body["prompt"]
        assert body["max_tokens"] == 1 and body["model"] == "served"
        path = self.folder / f"cmpl-{number}-0-abc.safetensors"
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        with self._lock:
            tensors = {"token_ids": torch.tensor(ids), "hidden_states": self.states(ids)}

        def finish() -> None:
            time.sleep(0.002)
            if half:
                path.write_bytes(b"half")
            else:
                save_file(tensors, path)
            self.most_files = max(self.most_files, len(list(self.folder.glob("*.safetensors"))))
            os.close(lock)

        threading.Thread(target=finish, daemon=True).start()
        return path
