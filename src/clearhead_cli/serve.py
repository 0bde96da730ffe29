"""`clearhead serve`: explore a model in a browser, computed by this process."""

import secrets
import socket
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from .options import Model, Text, refuse
from .output import say, say_loading
from .text_input import read_text

EXAMPLE = (
    "Once upon a time there was a quiet queen and a young wizard. She danced in the castle because "
    "she was proud. He gave his books to her."
)


def serve(
    context: typer.Context,
    text: Text = None,
    model: Model = None,
    survey: Annotated[
        Path | None,
        typer.Option(help="The folder of a survey of the model: explore its heads and examples."),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(
            metavar="OTHER",
            help="With --survey: a survey of the same texts, to show where the two differ.",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port; 0 means any free port.")
    ] = 0,
    open_: Annotated[bool, typer.Option("--open", help="Open the address in a browser.")] = False,
) -> None:
    """Explore a model in a browser: type a text, edit attention.

    Prints the address of the page, which only this machine can open. Ctrl-C ends it.

    \b
    Examples:
      clearhead serve --open
      clearhead serve story.txt --model DIR --port 8000
      clearhead serve --model DIR --survey out/survey
      clearhead serve --model DIR --survey out/tuned --compare out/base
    """
    if survey is None:
        rule, hint = "two surveys are compared.", "write --survey OUT --compare OTHER."
        refuse(context, ["compare"], "without --survey", rule, hint)
    say_loading(model)
    from clearhead.core.errors import needs
    from clearhead.core.formatting import visible
    from clearhead.corpus import Survey
    from clearhead.views import html
    from clearhead.views.serve import Reader

    with needs("serve", "the server needs starlette and uvicorn."):
        from clearhead.views.serve.server import app, start
    words = EXAMPLE if text is None else read_text(text)
    with _listen(port) as listener:
        surveyed, other = (None if x is None else Survey.open(x) for x in (survey, compare))
        reader = Reader(model, surveyed)
        overview = None
        if surveyed is not None:
            overview = html.survey_page(surveyed, other=other, host="server")
        page = html.report_page(reader.report(words, progress=None), host="server")
        port = listener.getsockname()[1]
        token = secrets.token_urlsafe(24)
        address = f"http://127.0.0.1:{port}/{token}/"
        typer.echo(address)
        say(f"{visible(reader.model.name, 200)}, for this machine only; Ctrl-C ends it")
        if open_:
            webbrowser.open(address)
        start(app(reader, page, token, port, overview), listener)
    say("ended")


def _listen(port: int) -> socket.socket:
    """Return a socket that listens on loopback.

    It is opened before anything is computed, so that a port in use raises an error at once, and
    early requests are answered later.
    """
    from clearhead.core.errors import BadValue, why_failed

    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen()
    except OSError as error:
        listener.close()
        rule = "one program uses a port, and ports below 1024 are reserved."
        hint = "pass another --port, or none."
        raise BadValue(f"Port {port} is not available: {why_failed(error)}.", rule, hint) from error
    return listener
