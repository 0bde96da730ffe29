"""Error responses of the server, and the headers of every response.

An error is a line of JSON for the page's script, or a page for a person.
"""

import html

import h11
from starlette.responses import HTMLResponse, Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...core.errors import AttentionError, BadValue
from ...core.formatting import visible_in_browser
from ..html.document import as_json
from .answer import Answer, error_for_page

NDJSON = "application/x-ndjson"

HEADERS = {  # of every response
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the page itself has the rest
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>clearhead</title>
<h1>{}</h1>
<p>Rule: {}</p>
<p>Hint: {}</p>
</html>
"""


def refusal(error: AttentionError, status: int, method: str) -> Response:
    """Return the error as a response.

    Scripts send POST and read JSON; a browser that opens an address sends GET and shows a page.
    """
    if method == "POST":
        return Response(line(error_for_page(error)), status, media_type=NDJSON)
    parts = (error.gave, error.rule, error.hint)
    return HTMLResponse(PAGE.format(*(html.escape(visible_in_browser(x)) for x in parts)), status)


def line(value: Answer) -> bytes:
    """Return one line of JSON."""
    return as_json(value).encode() + b"\n"


class Connection(H11Protocol):
    """A connection whose response to malformed HTTP, which the application never sees, has the
    headers.

    If a client sends it after the response has begun, the connection closes. When the server ends,
    its connections end too, without waiting for the model.
    """

    def shutdown(self) -> None:
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = BadValue(
                msg,
                "this server reads HTTP/1.1 requests of the page it serves.",
                "open the address that clearhead serve printed.",
            )
            response = refusal(error, 400, "GET")
            headers = [*response.raw_headers, (b"connection", b"close")]
            headers += [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=bytes(response.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event))
        self.transport.close()
