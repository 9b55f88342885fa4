"""A server that answers wandb as far as a run needs it, until it is told to be gone."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class FakeServer:
    """Collects the history rows it gets in ``rows``, and run ids in ``ids``."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self.gone = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if outer.gone:  # connections that are open already
                    self.close_connection = True
                    return
                answer = json.dumps(outer.answer(self.path, body)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_PUT = do_GET = do_POST  # noqa: N815

            def log_message(self, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: object, address: object) -> None:
                """Say nothing: a client that closes its end is not what is being tested."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        """Return the answer to one request."""
        if path.endswith("/file_stream"):
            history = json.loads(body).get("files", {}).get("wandb-history.jsonl", {})
            self.rows += [json.loads(line) for line in history.get("content", [])]
        if path != "/graphql":
            return {}
        query = json.loads(body)
        given = query.get("variables") or {}
        if query.get("operationName") == "UpsertBucket":
            self.ids.append(given["name"])
        bucket = {
            "id": "x", "name": given.get("name"), "displayName": "x", "config": "{}",
            "project": {"id": "x", "name": "x", "entity": {"id": "x", "name": "x"}},
            "historyLineCount": 0,
        }  # fmt: skip
        files = [{"name": name, "uploadUrl": f"{self.url}/up"} for name in given.get("files", [])]
        data = {
            "upsertBucket": {"bucket": bucket, "inserted": True},
            "viewer": {"id": "x", "entity": "x", "username": "x", "flags": "{}"},
            "createRunFiles": {"runID": "x", "uploadHeaders": [], "files": files},
            "serverInfo": {"features": []},
            "model": None,
        }
        return {"data": data}

    def leave(self) -> None:
        """Answer nothing from here on."""
        self.gone = True
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        if not self.gone:
            self.leave()
