"""A patient client of an OpenAI-compatible server.

Written with urllib: what is needed here is a POST that ends in time, and no HTTP package is among
those that specheads asks for. Those have no time limit for a whole request either.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import random
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from functools import partial
from typing import Any

from specheads import __version__
from specheads.config import ConfigError, RunError

_LONGEST_PAUSE = 60.0  # seconds
_MOST_BYTES = 16 << 20  # of a body: far more than any answer
_BUSY = {408, 409, 425, 429}  # may go well later, as all from 500 on
_HOPELESS = {401, 403, 404, 405, 407}  # no other request would go better


class ServerError(RuntimeError):
    """A request that failed.

    Attributes:
        transient: whether the same request may go well later.
        hopeless: whether no request can go well.
        pause: seconds that the server asks to wait.
    """

    def __init__(
        self, text: str, *, transient: bool = False, hopeless: bool = False, pause: float = 0.0
    ) -> None:
        super().__init__(text)
        self.transient = transient
        self.hopeless = hopeless
        self.pause = pause


class StoppedError(Exception):
    """The client was told to stop while it waited."""


class Client:
    """Sends requests to one server, each again with growing pauses where it fails for a time.

    The key comes from ``OPENAI_API_KEY`` and goes nowhere but into the requests; redirections,
    which might carry it to another host, are not followed.

    Args:
        url: with its version, e.g. ``http://localhost:8000/v1``.
        timeout: seconds in which a whole answer must have come, however slowly it trickles.
        retries: of a failed request.
        pause: seconds before the first of them; later ones wait twice as long each.

    Raises:
        ConfigError: for a url that is none, or that holds a password: it would be written down.
    """

    def __init__(
        self, url: str, *, timeout: float = 300.0, retries: int = 4, pause: float = 1.0
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"endpoint must be like http://localhost:8000/v1, got {url!r}")
        if parts.username or parts.password:
            raise ConfigError("endpoint must not hold a password; set OPENAI_API_KEY")
        self.url = url.rstrip("/")
        self.timeout = timeout
        self.retries = retries
        self.pause = pause
        self.stopped = threading.Event()
        self._key = os.environ.get("OPENAI_API_KEY", "")
        self._opener = urllib.request.build_opener(_NoRedirect, _Http, _Https)

    def call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return what the server answers; a request without ``body`` is a GET.

        Raises:
            ServerError: after the last retry.
            StoppedError: if the client was stopped meanwhile.
        """
        pause = self.pause
        for attempt in range(self.retries + 1):
            try:
                return self._try(path, body)
            except ServerError as error:
                if not error.transient or attempt == self.retries:
                    raise
                # without chance in it, all that failed together would come back together
                wait = max(min(pause, _LONGEST_PAUSE) * random.uniform(0.5, 1.5), error.pause)
            if self.stopped.wait(wait):
                raise StoppedError
            pause *= 2
        raise AssertionError

    def _try(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "User-Agent": f"specheads/{__version__}"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with self._opener.open(request, timeout=self.timeout) as response:
                text = response.read(_MOST_BYTES + 1)
        except urllib.error.HTTPError as error:
            raise self._http_error(error) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            problem = str(reason) or type(reason).__name__
            if isinstance(reason, TimeoutError):
                problem = f"no whole answer within timeout={self.timeout:g} seconds"
            raise ServerError(problem, transient=True) from None
        if len(text) > _MOST_BYTES:
            raise ServerError(f"more than {_MOST_BYTES >> 20} MiB came back")
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ServerError(f"no JSON object came back: {text[:80]!r}", transient=True)
        return found

    def _http_error(self, error: urllib.error.HTTPError) -> ServerError:
        with error:
            try:
                body = error.read(300).decode("utf-8", "replace")
            except (OSError, http.client.HTTPException):
                body = ""
        if self._key:
            body = body.replace(self._key, "***")
        code, asked = error.code, error.headers.get("Retry-After") or ""
        return ServerError(
            f"HTTP {code} {' '.join(body.split())}".strip(),
            transient=code in _BUSY or code >= 500,
            hopeless=code in _HOPELESS or 300 <= code < 400,
            pause=min(float(asked), _LONGEST_PAUSE) if asked.isdecimal() else 0.0,
        )

    def first_model(self) -> str:
        """Return the name of the first model that the server lists.

        Raises:
            RunError: if it does not answer, or lists none.
        """
        try:
            listed = self.call("/models").get("data")
        except ServerError as error:
            raise RunError(f"{self.url}/models: {error}") from None
        for each in listed if isinstance(listed, list) else []:
            if isinstance(each, dict) and isinstance(name := each.get("id"), str) and name:
                return name
        raise RunError(f"{self.url} lists no models; give endpoint_model=")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def http_error_302(self, *args: Any, **kwargs: Any) -> None:
        """Leave it an error, without a look at where it leads."""

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


class _InTime(urllib.request.AbstractHTTPHandler):
    """Opens connections whose whole answer must come within the request's ``timeout``.

    A socket's own limit begins anew with every byte.
    """

    def do_open(self, http_class: Any, req: Any, **given: Any) -> Any:
        end = time.monotonic() + req.timeout

        def connect(*args: Any, **kwargs: Any) -> Any:
            connection = http_class(*args, **kwargs)
            connection.response_class = partial(_Answer, end=end)
            return connection

        return super().do_open(connect, req, **given)


class _Http(_InTime, urllib.request.HTTPHandler):
    pass


class _Https(_InTime, urllib.request.HTTPSHandler):
    pass


class _Answer(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, end: float, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_Until(end, sock, self.fp.detach()))


class _Until(io.RawIOBase):
    """The bytes of ``raw``; each read waits for what is left of the time until ``end``."""

    def __init__(self, end: float, sock: socket.socket, raw: io.RawIOBase) -> None:
        self.end, self.sock, self.raw = end, sock, raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.sock.settimeout(left)
        return self.raw.readinto(buffer)

    def close(self) -> None:
        self.raw.close()
        super().close()
