"""A client of OpenAI-compatible servers, which asks again where a request failed for a time."""

from __future__ import annotations

import json
import logging
import os
import random
import reprlib
import threading
import urllib.parse
from typing import Any

import httpx

from specheads.system import __version__
from specheads.system.errors import ConfigError, RunError

logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for each request
_LONGEST_PAUSE = 60.0  # seconds
_MOST_BYTES = 64 << 20  # of a body: more than any answer with its log-probabilities
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
        self.transient, self.hopeless, self.pause = transient, hopeless, pause


class Client:
    """Sends requests to one server, each again with growing pauses where it fails for a time.

    The key comes from ``OPENAI_API_KEY`` and goes nowhere but into the requests; redirections,
    which might carry it to another host, are not followed.

    Args:
        url: the server's address with its version, e.g. ``http://localhost:8000/v1``.
        timeout: seconds without a byte after which a request has failed.
        retries: how often a failed request is sent again.
        pause: seconds before the first of them; later ones wait twice as long each.

    Raises:
        ConfigError: for a url that is none, or that holds a password: it would be written down.
    """

    def __init__(self, url: str, *, timeout: float, retries: int, pause: float = 1.0) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"endpoint must be like http://localhost:8000/v1, got {url!r}")
        if parts.username or parts.password:
            raise ConfigError("endpoint must not hold a password; set OPENAI_API_KEY")
        self.url, self.timeout, self.retries, self.pause = url.rstrip("/"), timeout, retries, pause
        self.stopped = threading.Event()
        self.refusal = ""  # what the server said that it will say to every request
        self._key = os.environ.get("OPENAI_API_KEY", "")
        headers = {"User-Agent": f"specheads/{__version__}", "Content-Type": "application/json"}
        headers["Accept-Encoding"] = "identity"  # a body is read as it comes
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        many = httpx.Limits(max_connections=None)
        self._http = httpx.Client(headers=headers, timeout=timeout, limits=many)

    def call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return what the server answers; a request without ``body`` is a GET.

        Raises:
            ServerError: after the last retry, or if the client was stopped meanwhile.
        """
        for attempt in range(self.retries + 1):
            try:
                return self._try(path, body)
            except ServerError as error:
                if not error.transient or attempt == self.retries:
                    raise
                pause = min(self.pause * 2 ** min(attempt, 30), _LONGEST_PAUSE)
                # without chance in it, all that failed together would come back together
                wait = max(pause * random.uniform(0.5, 1.5), error.pause)
            if self.stopped.wait(wait):
                break
        raise ServerError("stopped while it waited")

    def _try(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        text = bytearray()
        try:
            method = "GET" if body is None else "POST"
            # in ASCII: half of a surrogate pair has no UTF-8, and httpx's own json= needs it
            content = None if body is None else json.dumps(body)
            with self._http.stream(method, self.url + path, content=content) as response:
                for part in response.iter_raw():
                    text += part
                    if len(text) > _MOST_BYTES:
                        break
        except httpx.TimeoutException:
            problem = f"nothing came for timeout={self.timeout:g} seconds"
            raise ServerError(problem, transient=True) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerError(str(error) or type(error).__name__, transient=True) from None
        if not response.is_success:
            raise self._http_error(response, text[:300].decode("utf-8", "replace"))
        if len(text) > _MOST_BYTES:
            raise ServerError(f"more than {_MOST_BYTES >> 20} MiB came back")
        if response.headers.get("Content-Type", "").startswith("text/event-stream"):
            return joined(text)
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ServerError(f"no JSON object came back: {bytes(text[:80])!r}", transient=True)
        return found

    def _http_error(self, response: httpx.Response, body: str) -> ServerError:
        if self._key:
            body = body.replace(self._key, "***")
        code, asked = response.status_code, response.headers.get("Retry-After", "")
        return ServerError(
            f"HTTP {code} {' '.join(body.split())}".strip(),
            transient=code in _BUSY or code >= 500,
            hopeless=code in _HOPELESS or 300 <= code < 400,
            pause=min(float(asked), _LONGEST_PAUSE) if asked.isdecimal() else 0.0,
        )

    def models(self) -> list[dict[str, Any]]:
        """Return the models that the server lists, each with its name as ``id``.

        Raises:
            ServerError: if it does not answer.
        """
        listed = self.call("/models").get("data")
        found = [each for each in listed if isinstance(each, dict)] if type(listed) is list else []
        return [each for each in found if isinstance(name := each.get("id"), str) and name]

    def first_model(self) -> str:
        """Return the name of the first model that the server lists.

        Raises:
            RunError: if it does not answer, or lists none.
        """
        try:
            found = self.models()
        except ServerError as error:
            raise RunError(f"{self.url}/models: {error}") from None
        if not found:
            raise RunError(f"{self.url} lists no models; give endpoint_model=")
        return str(found[0]["id"])


def joined(events: bytes | bytearray) -> dict[str, Any]:
    """Return the answer that a stream of server-sent events adds up to, as if it had come whole.

    Raises:
        ServerError: if the stream breaks off, reports an error, or is malformed.
    """
    text, reason, usage = "", None, None
    logprobs: dict[str, list[Any]] = {}
    try:
        for line in events.splitlines():
            if not line.startswith(b"data:"):
                continue
            if (data := line[5:].strip()) == b"[DONE]":
                break
            event = json.loads(data)
            if "error" in event:
                problem = f"it stopped within an answer: {reprlib.repr(event['error'])}"
                raise ServerError(problem, transient=True)
            usage = event.get("usage") or usage
            for choice in event["choices"][:1]:  # the last event, with the usage, has none
                text += text_of(
                    choice["delta"].get("content") if "delta" in choice else choice["text"]
                )
                reason = choice.get("finish_reason") or reason
                for key, some in (choice.get("logprobs") or {}).items():
                    logprobs.setdefault(key, []).extend(some or ())
        else:
            raise ServerError("an answer broke off", transient=True)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise ServerError(f"malformed events: {bytes(events[:80])!r}", transient=True) from None
    choice = {"message": {"content": text}, "text": text, "finish_reason": reason}
    return {"choices": [choice | {"logprobs": logprobs}], "usage": usage}


def text_of(content: Any) -> str:
    """Return the text of an answer's content, which may come in parts.

    Raises:
        TypeError: if it holds none.
    """
    if isinstance(content, list):  # parts; others than texts are thoughts and the like
        texts = ("text", "output_text")
        return "".join(part["text"] for part in content if part["type"] in texts)
    if not isinstance(content, str | None):
        raise TypeError
    return content or ""
