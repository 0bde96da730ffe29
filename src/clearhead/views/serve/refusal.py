"""Error responses of the server, and the headers of its responses.

An error is a line of JSON for the page's script, or a text for a person.
"""

from starlette.responses import PlainTextResponse, Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...core.errors import AttentionError
from ...core.formatting import visible_in_browser
from ..html.document import as_json
from .answer import Answer, error_for_page

NDJSON = "application/x-ndjson"

HEADERS = {  # of every response of the application
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the page itself has the rest
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def refusal(error: AttentionError, status: int, method: str) -> Response:
    """Return the error as a response.

    Scripts send POST and read JSON; a browser that opens an address sends GET and shows a text.
    """
    if method == "POST":
        return Response(line(error_for_page(error)), status, media_type=NDJSON)
    parts = error.gave, f"Rule: {error.rule}", f"Hint: {error.hint}"
    return PlainTextResponse("\n".join(map(visible_in_browser, parts)), status)


def line(value: Answer) -> bytes:
    """Return one line of JSON."""
    return as_json(value).encode() + b"\n"


class Connection(H11Protocol):
    """A connection that ends when the server ends, without waiting for the model."""

    def shutdown(self) -> None:
        self.transport.abort()
