"""A server of the embedded model with the heads that ship, in this process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

import uvicorn

from specheads.config import ServeConfig
from specheads.decoding.generate import SpecDecoder
from specheads.serve import listening, serve
from specheads.serve.api import Server
from specheads.serve.engine import Engine
from tests.serve.test_engine import HYDRA, decoders


@contextlib.contextmanager
def served(
    key: str = "", made: Mapping[str, SpecDecoder] | None = None, **changes: Any
) -> Iterator[str]:
    """Yield its address; ``made`` are other decoders than the usual."""
    config = ServeConfig(checkpoint=HYDRA, port=0, grace=0.5, **changes)
    bound = listening(config)
    engine = Engine(
        made or decoders(),
        batch_size=config.batch_size,
        queue=config.queue,
        piece=config.piece,
        prefix_tokens=config.prefix_tokens,
    )
    app = Server(engine, config, key).app()
    servers: list[uvicorn.Server] = []
    with patch.object(uvicorn.Server, "run", lambda own, **how: _run(own, servers, **how)):
        thread = threading.Thread(target=serve, args=(app, bound, config))
        thread.start()
        while not (servers and servers[0].started):
            time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        servers[0].should_exit = True
        thread.join()
        bound.close()


_RUN = uvicorn.Server.run


def _run(server: uvicorn.Server, servers: list[uvicorn.Server], **how: Any) -> None:
    servers.append(server)
    _RUN(server, **how)
