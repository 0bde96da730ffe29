"""The server of one page: who may ask, what is asked, and how the answer is streamed.

It listens on loopback. An address holds a random token, `Host` and `Origin` must be its own, and
texts and bodies are bounded. The model runs in one thread of its own; who goes away ends the run.
"""

import asyncio
import json
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeAlias

import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...errors import AttentionError, BadValue
from ...errors.limits import MOST_LETTERS, MOST_REQUEST_BYTES, MOST_REQUESTS
from .answer import Answer, answer
from .reader import Cancelled, OnProgress, Reader
from .refusal import HEADERS, NDJSON, Connection, line, refusal

LOOK_UP = 0.25  # seconds after which a silent answer looks whether anybody is still there

Job: TypeAlias = Callable[[OnProgress], Answer]


def app(reader: Reader, page: str, token: str, port: int) -> ASGIApp:
    """The server: ``/TOKEN/`` is the `page`, ``/TOKEN/compute`` a snapshot of a text under edits,
    ``/TOKEN/tile`` exact weights of a part of one head."""
    model = _Model()

    async def show(request: Request) -> Response:
        return HTMLResponse(page)

    async def compute(request: Request) -> Response:
        return await _answered(request, model, reader, "compute")

    async def tile(request: Request) -> Response:
        return await _answered(request, model, reader, "tile")

    routes = [
        Route("/{token}/", show),
        Route("/{token}/compute", compute, methods=["POST"]),
        Route("/{token}/tile", tile, methods=["POST"]),
    ]
    inner = Starlette(routes=routes, exception_handlers={HTTPException: _no_such_route})
    return Guard(inner, token, (f"127.0.0.1:{port}", f"localhost:{port}"))


def start(served: ASGIApp, listener: socket.socket) -> None:
    """Answer what comes to the socket, until Ctrl-C."""
    with suppress(KeyboardInterrupt):
        server_of(served).run(sockets=[listener])


def server_of(served: ASGIApp) -> uvicorn.Server:
    """Return the server that speaks HTTP for the application."""
    config = uvicorn.Config(
        served,
        access_log=False,  # addresses hold the token
        log_level="error",  # malformed requests are not reported: any program may send them
        http=Connection,
        lifespan="off",
        ws="none",
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    return uvicorn.Server(config)


# ---- who may ask -----------------------------------------------------------------------


class Guard:
    """Refuses every request but those of the page itself, and adds headers to every answer."""

    def __init__(self, inner: ASGIApp, token: str, hosts: tuple[str, ...]) -> None:
        self.inner, self.token, self.hosts = inner, token, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        error = self.why_not(scope)
        answers = self.inner if error is None else refusal(error, 403, scope["method"])
        await answers(scope, receive, send_with_headers)

    def why_not(self, scope: Scope) -> BadValue | None:
        """Why a request is refused. A page from elsewhere, whose name was made to lead here, has
        another host; one that asks across origins says so; neither knows the token."""
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if host not in self.hosts:
            return _not_ours(f"The host is {host[:100]!r}")
        if origin is not None and origin not in [f"http://{name}" for name in self.hosts]:
            return _not_ours(f"The request comes from {origin[:100]!r}")
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return _not_ours("The request comes from another site")
        given = scope["path"].partition("/")[2].partition("/")[0]  # of "*" nothing
        if not secrets.compare_digest(given.encode(errors="replace"), self.token.encode()):
            return _not_ours("The address has no token, or another one")
        return None


def _not_ours(gave: str) -> BadValue:
    return BadValue(
        f"{gave}.",
        "only the address that clearhead serve printed is answered.",
        "open that address; it changes with every start.",
    )


async def _no_such_route(request: Request, error: Exception) -> Response:
    """Respond to a path or a method that no route has."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        gave = f"The method is {request.method[:20]}."
        rule = "the page is read with GET, and sends POST to compute."
    else:
        gave, rule = "The address has another path.", "the address of the page ends in its token."
    shown = BadValue(gave, rule, "open the address that clearhead serve printed.")
    response = refusal(shown, error.status_code, request.method)
    response.headers.update(error.headers or {})
    return response


# ---- what is asked ---------------------------------------------------------------------


class TooLarge(BadValue):
    """A request of too many bytes."""


async def _body(request: Request) -> object:
    """The JSON of a request. Raises `BadValue` for one that is too large, or is none."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_REQUEST_BYTES:
            raise TooLarge(
                f"The request has more than {MOST_REQUEST_BYTES:,} bytes.",
                f"a text has at most {MOST_LETTERS:,} letters.",
                "send a shorter text.",
            )
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadValue(
            f"The request is no JSON: {error}.",
            'a request is an object such as {"text": "a text"}.',
            "send one.",
        ) from error
    return given


# ---- how it is answered ----------------------------------------------------------------


class _Model:
    """The one thread in which the model runs, and how many requests run in it or wait."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "model")
        self.requests = 0


async def _answered(request: Request, model: _Model, reader: Reader, path: str) -> Response:
    try:
        given = await _body(request)
    except TooLarge as error:
        return refusal(error, 413, request.method)
    except AttentionError as error:
        return refusal(error, 400, request.method)
    except ClientDisconnect:
        return Response(status_code=400)  # which nobody receives
    if model.requests >= MOST_REQUESTS:
        busy = BadValue(
            f"{model.requests} requests wait for the model.",
            "the model reads one text at a time.",
            "wait until it is done, and ask again.",
        )
        return refusal(busy, 503, request.method)
    run = _Run(model, partial(answer, reader, path, given))
    # Of a client that goes away at once, `lines` never starts, and so cannot end the run.
    return StreamingResponse(
        run.lines(request), media_type=NDJSON, background=BackgroundTask(run.ended.set)
    )


class _Run:
    """A request that the model's thread answers, when its turn comes."""

    def __init__(self, model: _Model, job: Job) -> None:
        self.job, self.ended = job, threading.Event()
        self._loop, self._told = asyncio.get_running_loop(), asyncio.Queue[Answer]()
        model.requests += 1
        self._loop.run_in_executor(model.thread, self._run).add_done_callback(
            lambda _: setattr(model, "requests", model.requests - 1)
        )

    def _run(self) -> None:
        with suppress(Cancelled):
            if not self.ended.is_set():
                self._tell(self.job(self._on_progress))

    def _on_progress(self, done: int, total: int | None) -> None:
        if self.ended.is_set():
            raise Cancelled
        self._tell({"progress": [done, total]})

    def _tell(self, told: Answer) -> None:
        with suppress(RuntimeError):  # the server has ended, and its loop is closed
            self._loop.call_soon_threadsafe(self._told.put_nowait, told)

    async def lines(self, request: Request) -> AsyncIterator[bytes]:
        """Progress, then the answer or an error. If the page goes away, the run ends."""
        try:
            while True:
                try:
                    told = await asyncio.wait_for(self._told.get(), LOOK_UP)
                except asyncio.TimeoutError:
                    if await request.is_disconnected():
                        return
                    continue
                yield line(told)
                if "progress" not in told:
                    return
        finally:
            self.ended.set()
