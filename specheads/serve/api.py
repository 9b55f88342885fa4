"""OpenAI's interface over HTTP: models, completions and chats, whole or as server-sent events.

What OpenAI's documentation asks for and a language model alone cannot give (tools, images, sound)
is refused by its name. Beyond it there are ``top_k``, ``min_p``, ``repetition_penalty``,
``drafter`` (one of those that ``/v1/models`` lists), ``return_tokens_as_token_ids`` as vLLM has it,
and ``return_steps``: events then say which tokens one step gave, and what it verified.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, Counter, generate_latest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from transformers import SequenceBiasLogitsProcessor

from specheads.config import ConfigError, ServeConfig
from specheads.config.commands import TextSettings
from specheads.data.chat import Encoder
from specheads.data.schema import RecordError
from specheads.decoding.conversation import GrowingText
from specheads.decoding.generate import TooLongError
from specheads.serve.engine import BusyError, Engine, Step, Ticket, frequency_penalty
from specheads.system.terminal import harmless

PLAIN = "plain"  # the drafter that is none
_MOST_CHOICES, _MOST_LOGPROBS = 16, 20
_DRAWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_Token = Annotated[int, Field(ge=0)]


def _whole(text: str) -> str:
    if any("\ud800" <= char <= "\udfff" for char in text):  # which JSON may hold
        raise ValueError("half of a surrogate pair is no text")
    return text


_Str = Annotated[str, AfterValidator(_whole)]
_Stop = Annotated[_Str, Field(min_length=1)]


class _Asked(BaseModel):
    """What both kinds of requests have in common."""

    model_config = ConfigDict(extra="forbid")

    model: str = ""
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    n: int = Field(1, ge=1, le=_MOST_CHOICES)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=_MOST_CHOICES)] | None = None
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    drafter: str = ""
    return_tokens_as_token_ids: bool = False
    return_steps: bool = False
    # about the caller and not about the answer
    user: Any = None
    metadata: Any = None
    store: Any = None

    @property
    def stops(self) -> list[str]:
        """The strings that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class _Completion(_Asked):
    prompt: _Str | list[_Str] | list[_Token] | list[list[_Token]]
    logprobs: int | None = Field(None, ge=0, le=_MOST_LOGPROBS)
    echo: Literal[False] = False
    best_of: Literal[1] | None = None
    suffix: None = None

    @property
    def top(self) -> int | None:
        """How many likely tokens to tell of; None: no log-probabilities."""
        return self.logprobs


class _Part(BaseModel):
    type: Literal["text"]
    text: _Str


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: _Str | list[_Part]
    name: str | None = None


class _Chat(_Asked):
    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=_MOST_LOGPROBS)

    @property
    def top(self) -> int | None:
        """How many likely tokens to tell of; None: no log-probabilities."""
        return self.top_logprobs if self.logprobs else None


class ApiError(HTTPException):
    """An answer that is an error, in OpenAI's form."""

    def __init__(self, status: int, message: str, code: str = "", param: str | None = None) -> None:
        super().__init__(status, message)
        kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
        error = {"message": message, "type": kind, "param": param, "code": code or None}
        self.status, self.body = status, {"error": error}

    def response(self) -> JSONResponse:
        """Return it as a response."""
        again = {"Retry-After": "1"} if self.status in (429, 503) else None
        return JSONResponse(self.body, self.status, again)


class Server:
    """The application, over an engine.

    Args:
        engine: which is started and stopped with the application.
        config: the settings.
        key: what clients have to show; empty: nothing.
    """

    def __init__(self, engine: Engine, config: ServeConfig, key: str = "") -> None:
        self.engine, self.config, self.key = engine, config, key
        decoder = next(iter(engine.decoders.values()))
        assert decoder.tokenizer is not None
        self.tokenizer = decoder.tokenizer
        self.encoder = Encoder(self.tokenizer)
        self.lossy = decoder.acceptance.label if decoder.acceptance else ""
        self.name = config.name or Path(config.checkpoint).name
        self.created = int(time.time())
        about, registry = "answers by HTTP status", engine.registry
        self.answers = Counter("specheads_requests", about, ["status"], registry=registry)

    def app(self) -> Callable[..., Any]:
        """Return the ASGI application."""

        @asynccontextmanager
        async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
            self.engine.start()
            yield
            await asyncio.to_thread(self.engine.stop, self.config.grace)

        app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
        app.get("/")(self.page)
        app.get("/health")(self.health)
        app.get("/metrics")(self.metrics)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.model)
        app.post("/v1/completions")(self.completions)
        app.post("/v1/chat/completions")(self.chat)
        app.add_exception_handler(ApiError, lambda _request, error: error.response())
        app.add_exception_handler(RequestValidationError, _invalid)  # type: ignore[arg-type]
        app.add_exception_handler(HTTPException, _http_error)  # type: ignore[arg-type]
        failed = ApiError(500, "the server failed at this request")  # which its log tells of
        app.add_exception_handler(Exception, lambda _request, _error: failed.response())
        return self._guarded(app)

    def _guarded(self, app: Callable[..., Any]) -> Callable[..., Any]:
        """Ask for the key, read the body within its size and time, and count the answers."""

        async def called(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)

            async def noted(message: Any) -> None:
                if message["type"] == "http.response.start":
                    self.answers.labels(message["status"]).inc()
                await send(message)

            try:
                shown = dict(scope["headers"]).get(b"authorization", b"").removeprefix(b"Bearer ")
                open_path = scope["path"] in ("/", "/health")
                if self.key and not open_path and not hmac.compare_digest(shown, self.key.encode()):
                    raise ApiError(401, "the API key is missing or wrong", "invalid_api_key")
                given = [await self._body(receive)]
            except ApiError as error:
                return await error.response()(scope, receive, noted)

            async def read() -> Any:  # the body, and then the client's leave
                return given.pop() if given else await receive()

            return await app(scope, read, noted)

        return called

    async def _body(self, receive: Any) -> dict[str, Any]:
        """Return a request's whole body as one message.

        Raises:
            ApiError: if it is too large, or takes too long.
        """
        body, more = bytearray(), True
        limit, patience = self.config.max_body, self.config.body_seconds
        try:
            async with asyncio.timeout(patience):
                while more:
                    message = await receive()
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > limit:
                        raise ApiError(413, f"the body has more than {limit} bytes", "too_large")
        except TimeoutError:
            raise ApiError(408, f"the body took more than {patience:g} seconds") from None
        return {"type": "http.request", "body": bytes(body)}

    async def page(self) -> HTMLResponse:
        """The race."""
        html = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        return HTMLResponse(html, headers={"Content-Security-Policy": _POLICY})

    async def health(self) -> JSONResponse:
        """Whether the engine's thread lives."""
        alive = self.engine.is_alive()
        return JSONResponse({"status": "ok" if alive else "stopped"}, 200 if alive else 503)

    async def models(self) -> dict[str, Any]:
        """The one model there is."""
        return {"object": "list", "data": [await self.model(self.name)]}

    async def model(self, name: str) -> dict[str, Any]:
        """The model, and the drafters that are loaded for it."""
        if name != self.name:
            message = f"the model {harmless(name)!r:.80} is not here: {self.name} is"
            raise ApiError(404, message, "model_not_found", "model")
        about = {"id": name, "object": "model", "created": self.created, "owned_by": "specheads"}
        more = {"drafters": list(self.engine.decoders), "chat": bool(self.tokenizer.chat_template)}
        return {**about, **more, "lossy": self.lossy}

    async def metrics(self) -> Response:
        """What Prometheus collects."""
        return Response(generate_latest(self.engine.registry), media_type=CONTENT_TYPE_LATEST)

    async def completions(self, asked: _Completion, request: Request) -> Response:
        """Continue texts, or token ids."""
        given = asked.prompt
        prompts: list[Any] = [given] if isinstance(given, str) else given
        if prompts and isinstance(prompts[0], int):
            prompts = [given]
        if not 1 <= len(prompts) * asked.n <= _MOST_CHOICES:
            raise ApiError(400, f"prompt: 1 to {_MOST_CHOICES} choices in all", "", "prompt")
        ids = [self._ids(prompt) for prompt in prompts]
        return await self._answer(asked, request, ids, asked.max_tokens or 16, "text_completion")

    def _ids(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            if max(prompt, default=0) >= len(self.tokenizer):
                raise ApiError(400, "prompt: token ids beyond the vocabulary", "", "prompt")
            return prompt
        return self.encoder.prompt({"id": "prompt", "kind": "prompt", "text": prompt})

    async def chat(self, asked: _Chat, request: Request) -> Response:
        """Answer a conversation."""
        if not self.tokenizer.chat_template:
            raise ApiError(
                400, "the model has no chat template: use /v1/completions", "", "messages"
            )
        messages = []
        for each in asked.messages:
            content = each.content
            if not isinstance(content, str):
                content = "".join(part.text for part in content)
            role = "system" if each.role == "developer" else each.role
            messages.append({"role": role, "content": content})
        if messages[-1]["role"] != "user":
            raise ApiError(400, "messages: the last one must be the user's", "", "messages")
        try:
            ids = self.encoder.prompt({"id": "of this request", "messages": messages})
        except (ConfigError, RecordError) as error:
            raise ApiError(400, f"messages: {harmless(str(error))}", "", "messages") from None
        limit = asked.max_completion_tokens or asked.max_tokens or 1 << 30
        return await self._answer(asked, request, [ids], limit, "chat.completion")

    async def _answer(
        self,
        asked: _Completion | _Chat,
        request: Request,
        prompts: Sequence[list[int]],
        limit: int,
        kind: str,
    ) -> Response:
        await self.model(asked.model or self.name)
        drafter = asked.drafter or next(iter(self.engine.decoders))
        if drafter not in self.engine.decoders:
            raise ApiError(400, f"drafter: one of {', '.join(self.engine.decoders)}", "", "drafter")
        events: asyncio.Queue[tuple[int, Step]] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        seed = secrets.randbits(62) if asked.seed is None else asked.seed
        drawn: dict[str, Any] = {name: getattr(asked, name) for name in _DRAWN}
        tickets: list[Ticket] = []
        for prompt in prompts:
            if not prompt:
                raise ApiError(400, "prompt: at least one token", "", "prompt")
            for choice in range(asked.n):
                number = len(tickets)

                def tell(step: Step, number: int = number) -> None:
                    loop.call_soon_threadsafe(events.put_nowait, (number, step))

                ticket = Ticket(
                    prompt,
                    TextSettings(checkpoint="", seed=seed + choice, **drawn),
                    drafter,
                    tell,
                    min(limit, self.config.max_new_tokens),
                    stop=asked.stops,
                    processors=self._processors(asked, len(prompt)),
                    top_logprobs=asked.top,
                    wants_tree=asked.return_steps,
                    deadline=time.monotonic() + self.config.deadline,
                )
                tickets.append(ticket)
        try:
            self.engine.submit(tickets)
        except BusyError as error:
            raise ApiError(429, f"{error}: try again later", "queue_full") from None
        except ConfigError as error:
            code = "context_length_exceeded" if isinstance(error, TooLongError) else ""
            raise ApiError(400, str(error), code) from None
        writer = _Writer(self, asked, tickets, kind)
        if asked.stream:
            stream = writer.stream(events)
            return StreamingResponse(stream, media_type="text/event-stream")
        whole = asyncio.create_task(writer.whole(events))
        gone = asyncio.create_task(_gone(request))
        try:
            await asyncio.wait((whole, gone), return_when=asyncio.FIRST_COMPLETED)
            if not whole.done():
                raise ApiError(499, "the client has gone")
            return JSONResponse(whole.result())
        finally:
            gone.cancel()
            whole.cancel()
            for ticket in tickets:
                ticket.cancelled = True

    def _processors(self, asked: _Asked, num_prompt: int) -> list[Any]:
        found: list[Any] = []
        if asked.presence_penalty or asked.frequency_penalty:
            both = asked.presence_penalty, asked.frequency_penalty
            found.append(frequency_penalty(num_prompt, *both))
        if asked.logit_bias:
            if max(asked.logit_bias) >= len(self.tokenizer) or min(asked.logit_bias) < 0:
                raise ApiError(400, "logit_bias: tokens of the vocabulary", "", "logit_bias")
            bias: Any = [[[token], float(value)] for token, value in asked.logit_bias.items()]
            found.append(SequenceBiasLogitsProcessor(bias))
        return found


_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
)


async def _gone(request: Request) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(0.1)


async def _invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
    first = error.errors()[0]
    # of a union pydantic names the branch too
    loc = [str(part) for part in first["loc"] if part != "body" and "[" not in str(part)]
    where, said = ".".join(loc), first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        where, said = "", f"it is no JSON from character {where} on"
    message = harmless(f"{where or 'body'}: {said}")
    return ApiError(400, message[:300], first["type"], where or None).response()


async def _http_error(_request: Request, error: HTTPException) -> JSONResponse:
    return ApiError(error.status_code, harmless(str(error.detail))).response()


class _Writer:
    """Makes answers of steps, in the form of one kind of request."""

    def __init__(
        self, server: Server, asked: _Completion | _Chat, tickets: Sequence[Ticket], kind: str
    ) -> None:
        self.asked, self.tickets, self.kind = asked, tickets, kind
        self.tokenizer, self.is_chat = server.tokenizer, kind == "chat.completion"
        self.texts = [GrowingText(server.tokenizer, asked.stops) for _ in tickets]
        self.head: dict[str, Any] = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": server.name,
        }
        if server.lossy and tickets[0].drafter != PLAIN:
            self.head["lossy"] = server.lossy

    @property
    def usage(self) -> dict[str, int]:
        """Tokens read and written; a prompt counts once for all its choices."""
        prompt = sum(len(ticket.ids) for ticket in self.tickets[:: self.asked.n])
        new = sum(len(text.tokens) for text in self.texts)
        both = {"prompt_tokens": prompt, "completion_tokens": new}
        return {**both, "total_tokens": prompt + new}

    async def steps(
        self, events: asyncio.Queue[tuple[int, Step]]
    ) -> AsyncIterator[tuple[int, Step]]:
        """Yield steps until all choices have ended.

        Raises:
            ApiError: if one ends in an error.
        """
        left = len(self.tickets)
        while left:
            number, step = await events.get()
            if step.error:
                late = "time" in step.error
                raise ApiError(504 if late else 500, step.error, "timeout" if late else "")
            left -= bool(step.finish)
            yield number, step

    def _token(self, token: int) -> str:
        if self.asked.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return str(self.tokenizer.decode([token]))

    def _logprobs(self, step: Step, start: int) -> dict[str, Any] | None:
        if self.asked.top is None:
            return None
        pairs = list(zip(step.tokens, step.logprobs, strict=True))
        if self.is_chat:

            def one(token: int, logprob: float) -> dict[str, Any]:
                text = self._token(token)
                return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

            content = [
                {**one(token, own), "top_logprobs": [one(*each) for each in best]}
                for token, (own, best) in pairs
            ]
            return {"content": content, "refusal": None}
        texts = [self._token(token) for token, _ in pairs]
        offsets = [start + sum(map(len, texts[:i])) for i in range(len(texts))]
        return {
            "tokens": texts,
            "token_logprobs": [own for _, (own, _) in pairs],
            "top_logprobs": [{self._token(t): p for t, p in best} for _, (_, best) in pairs],
            "text_offset": offsets,
        }

    async def whole(self, events: asyncio.Queue[tuple[int, Step]]) -> dict[str, Any]:
        """Return the answer at once."""
        found: list[dict[str, Any]] = [
            {"index": i, "text": "", "finish_reason": "", "logprobs": None}
            for i in range(len(self.texts))
        ]
        async for number, step in self.steps(events):
            choice, new = found[number], self._choice(number, step)
            if (own := new["logprobs"]) is not None:
                known = choice["logprobs"] or {}
                joined = {key: v and [*known.get(key, ()), *v] for key, v in own.items()}
                new["logprobs"] = joined
            choice |= {**new, "text": choice["text"] + new["text"]}
        for choice in found if self.is_chat else ():
            content = {"content": choice.pop("text"), "refusal": None}
            choice["message"] = {"role": "assistant", **content}
        return {**self.head, "choices": found, "usage": self.usage}

    def _choice(self, number: int, step: Step) -> dict[str, Any]:
        """Return what a step adds to a choice, in the form of completions."""
        text = self.texts[number]
        logprobs = self._logprobs(step, len(text.shown))
        new, finish = text.add(step.tokens, ended=bool(step.finish)), step.finish or None
        return {"index": number, "text": new, "finish_reason": finish, "logprobs": logprobs}

    async def stream(self, events: asyncio.Queue[tuple[int, Step]]) -> AsyncIterator[str]:
        """Yield the answer as server-sent events, one for each step."""
        head = self.head | {"object": self.kind + ".chunk" * self.is_chat}
        wants_usage = (self.asked.stream_options or {}).get("include_usage", False)
        began: set[int] = set()
        try:
            async for number, step in self.steps(events):
                choice = self._choice(number, step)
                if self.is_chat:
                    role = {} if number in began else {"role": "assistant"}
                    choice["delta"] = {**role, "content": choice.pop("text")}
                began.add(number)
                if choice["logprobs"] is None:
                    del choice["logprobs"]
                if self.asked.return_steps:
                    nodes = [[above, self._token(t), taken] for above, t, taken in step.tree]
                    choice["step"] = {"tokens": list(step.tokens), "tree": nodes}
                yield _event({**head, "choices": [choice]})
            if wants_usage:
                yield _event({**head, "choices": [], "usage": self.usage})
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield _event(error.body)
        finally:  # also where the client has gone
            for ticket in self.tickets:
                ticket.cancelled = True


def _event(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"
