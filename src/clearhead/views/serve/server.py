"""The server of one page: check requests, run the model, stream the responses.

It listens on loopback. The address has a random token, `Host` and `Origin` are checked, and texts
and bodies are bounded. The model runs in a dedicated thread; a run is cancelled when its client
disconnects.
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

from ...core.errors import AttentionError, BadValue
from ...core.errors.limits import MOST_LETTERS, MOST_REQUEST_BYTES, MOST_REQUESTS
from .answer import ANSWERS, Answer, answer
from .reader import Cancelled, OnProgress, Reader
from .refusal import HEADERS, NDJSON, Connection, line, refusal

POLL_SECONDS = 0.25  # between checks whether the client has disconnected

Job: TypeAlias = Callable[[OnProgress], Answer]


def app(
    reader: Reader, page: str, token: str, port: int, survey_page: str | None = None
) -> ASGIApp:
    """Return the application.

    ``/TOKEN/`` is the `page`, ``/TOKEN/compute`` the snapshot of a text with edits, ``/TOKEN/tile``
    exact weights of a part of one head, ``/TOKEN/steps`` every step of one layer, ``/TOKEN/why``
    the parts of one weight. With a `survey_page`, this is the first page, and the `page` is
    ``/TOKEN/explore``; ``/TOKEN/vectors`` has the vectors of one head at examples of the survey.
    """
    model = _Model()

    def page_at(path: str, html: str) -> Route:
        async def respond(request: Request) -> Response:
            return HTMLResponse(html)

        return Route(f"/{{token}}/{path}", respond)

    def answered(path: str) -> Route:
        async def respond(request: Request) -> Response:
            return await _response(request, model, reader, path)

        return Route(f"/{{token}}/{path}", respond, methods=["POST"])

    routes = [
        page_at("", page if survey_page is None else survey_page),
        page_at("explore", page),
        *map(answered, ANSWERS),
    ]
    inner = Starlette(routes=routes, exception_handlers={HTTPException: _no_such_route})
    return Guard(inner, token, (f"127.0.0.1:{port}", f"localhost:{port}"))


def start(served: ASGIApp, listener: socket.socket) -> None:
    """Serve requests on the socket, until Ctrl-C."""
    with suppress(KeyboardInterrupt):
        server_of(served).run(sockets=[listener])


def server_of(served: ASGIApp) -> uvicorn.Server:
    """Return the HTTP server of the application."""
    config = uvicorn.Config(
        served,
        access_log=False,  # addresses contain the token
        log_level="error",  # malformed requests are not reported: any program may send them
        http=Connection,
        lifespan="off",
        ws="none",
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    return uvicorn.Server(config)


# ---- access ----------------------------------------------------------------------------


class Guard:
    """Refuses every request except those of the page, and adds headers to every response."""

    def __init__(self, inner: ASGIApp, token: str, hosts: tuple[str, ...]) -> None:
        self.inner, self.token, self.hosts = inner, token, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        error = self.why_not(scope)
        application = self.inner if error is None else refusal(error, 403, scope["method"])
        await application(scope, receive, send_with_headers)

    def why_not(self, scope: Scope) -> BadValue | None:
        """Return why a request is refused, or None.

        DNS rebinding gives another host, a cross-origin request another origin, and neither has the
        token.
        """
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if host not in self.hosts:
            return _not_ours(f"The host is {host[:100]!r}")
        if origin is not None and origin not in [f"http://{name}" for name in self.hosts]:
            return _not_ours(f"The request comes from {origin[:100]!r}")
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return _not_ours("The request comes from another site")
        token = scope["path"].partition("/")[2].partition("/")[0]  # empty for "*"
        if not secrets.compare_digest(token.encode(errors="replace"), self.token.encode()):
            return _not_ours("The address has no token, or another one")
        return None


def _not_ours(gave: str) -> BadValue:
    rule = "the server responds only to the address that clearhead serve printed."
    return BadValue(f"{gave}.", rule, "open that address; it changes with every start.")


async def _no_such_route(request: Request, error: Exception) -> Response:
    """Respond to an unknown path or method."""
    assert isinstance(error, HTTPException)
    gave = f"The server has no {request.method[:20]} at this path."
    rule = "a browser loads the page with GET, and the page sends POST to compute."
    refused = BadValue(gave, rule, "open the address that clearhead serve printed.")
    response = refusal(refused, error.status_code, request.method)
    response.headers.update(error.headers or {})
    return response


# ---- requests --------------------------------------------------------------------------


class TooLarge(BadValue):
    """A request with too many bytes."""


async def _body(request: Request) -> object:
    """Return the JSON of a request. Raises `BadValue` if it is too large or not JSON."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_REQUEST_BYTES:
            rule = f"a text has at most {MOST_LETTERS:,} letters."
            hint = "send a shorter text."
            raise TooLarge(f"The request has more than {MOST_REQUEST_BYTES:,} bytes.", rule, hint)
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as error:
        rule = 'a request is an object such as {"text": "a text"}.'
        raise BadValue(f"The request is not JSON: {error}.", rule, "send an object.") from error
    return parsed


# ---- responses -------------------------------------------------------------------------


class _Model:
    """The thread in which the model runs, and the number of requests that run in it or wait."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "model")
        self.requests = 0


async def _response(request: Request, model: _Model, reader: Reader, path: str) -> Response:
    try:
        body = await _body(request)
    except TooLarge as error:
        return refusal(error, 413, request.method)
    except AttentionError as error:
        return refusal(error, 400, request.method)
    except ClientDisconnect:
        return Response(status_code=400)  # nobody receives it
    if model.requests >= MOST_REQUESTS:
        gave = f"{model.requests} requests wait for the model."
        busy = BadValue(gave, "the model runs on one text at a time.", "wait, and try again.")
        return refusal(busy, 503, request.method)
    run = _Run(model, partial(answer, reader, path, body))
    # If a client disconnects at once, `lines` never starts, and cannot end the run.
    return StreamingResponse(
        run.lines(request), media_type=NDJSON, background=BackgroundTask(run.ended.set)
    )


class _Run:
    """A request that runs in the model's thread, after those before it."""

    def __init__(self, model: _Model, job: Job) -> None:
        self.job, self.ended = job, threading.Event()
        self._loop, self._messages = asyncio.get_running_loop(), asyncio.Queue[Answer]()
        model.requests += 1
        self._loop.run_in_executor(model.thread, self._run).add_done_callback(
            lambda _: setattr(model, "requests", model.requests - 1)
        )

    def _run(self) -> None:
        with suppress(Cancelled):
            if not self.ended.is_set():
                self._send(self.job(self._on_progress))

    def _on_progress(self, done: int, total: int | None) -> None:
        if self.ended.is_set():
            raise Cancelled
        self._send({"progress": [done, total]})

    def _send(self, message: Answer) -> None:
        with suppress(RuntimeError):  # the server has ended, and its loop is closed
            self._loop.call_soon_threadsafe(self._messages.put_nowait, message)

    async def lines(self, request: Request) -> AsyncIterator[bytes]:
        """Yield progress, then the result or an error. If the page disconnects, end the run."""
        try:
            while True:
                try:
                    message = await asyncio.wait_for(self._messages.get(), POLL_SECONDS)
                except asyncio.TimeoutError:
                    if await request.is_disconnected():
                        return
                    continue
                yield line(message)
                if "progress" not in message:
                    return
        finally:
            self.ended.set()
