"""Serve a model as OpenAI's API does: ``python -m specheads.serve checkpoint=<export or model>``.

``/v1/models``, ``/v1/completions`` and ``/v1/chat/completions``, and at ``/`` a race of plain
against speculative decoding. Needs ``specheads[serve]``. A key in ``SPECHEADS_API_KEY`` has to be
shown by clients. Without ``host`` the server listens to this machine only.
"""

from __future__ import annotations

import os
import resource
import socket
from dataclasses import replace
from typing import Any

from specheads.config import RunError, ServeConfig
from specheads.config.main import entry_point
from specheads.system.errors import need
from specheads.system.terminal import note


def listening(config: ServeConfig) -> socket.socket:
    """Return a socket bound to the port, before any model is loaded.

    Raises:
        RunError: if the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((config.host, config.port))
    except OSError as error:
        bound.close()
        raise RunError(
            f"port={config.port} on host={config.host} cannot be listened to ({error.strerror}):"
            " give another port="
        ) from None
    return bound


def run(config: ServeConfig) -> None:
    """Bind, load, serve until a signal comes."""
    for module in ("fastapi", "uvicorn", "prometheus_client"):
        need(module, "serve", "specheads serve")
    bound = listening(config)
    from specheads.decoding.exported import choose_drafter, subject_of
    from specheads.decoding.generate import SpecDecoder
    from specheads.serve.api import PLAIN, Server
    from specheads.serve.engine import Engine

    subject = subject_of(config, config.decode)
    decoders = {}
    for name in [config.decode.drafter, *config.drafters]:
        asked = replace(config.decode, drafter=name)
        chosen = choose_drafter(subject, asked)
        decoders[chosen.name] = SpecDecoder.of(subject, config.decode, chosen.drafter)
    decoders[PLAIN] = SpecDecoder.of(subject, config.decode, None)
    limits = ("batch_size", "queue", "piece", "prefix_tokens")
    engine = Engine(decoders, **{name: getattr(config, name) for name in limits})
    server = Server(engine, config, os.environ.get("SPECHEADS_API_KEY", ""))
    host, port = bound.getsockname()[:2]
    note(f"{server.name} on http://{host}:{port}, drafters: {', '.join(decoders)}")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a file for each connection
    serve(server.app(), bound, config)


def serve(app: Any, bound: socket.socket, config: ServeConfig) -> None:
    """Run the application until a signal comes; answers that are under way are finished."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Impatient(H11Protocol):
        """Closes connections on which no request comes, or not to its end."""

        _before: object = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.loop.call_later(config.body_seconds, self._look)

        def _look(self) -> None:
            idle = self.cycle is None or self.cycle.response_complete
            if idle and self.cycle is self._before:
                self.transport.close()
            elif not self.transport.is_closing():
                self._before = self.cycle
                self.loop.call_later(config.body_seconds, self._look)

    options: dict[str, Any] = {"http": Impatient, "log_level": "error", "backlog": 2048}
    # the engine answers what it has before the lifespan ends
    options["timeout_graceful_shutdown"] = int(config.grace) + 1
    uvicorn.Server(uvicorn.Config(app, **options)).run(sockets=[bound])


main = entry_point("serve", ServeConfig, run)
