"""The served page in a browser: its source asks the server, and a newer question ends an older."""

import threading

import pytest
import uvicorn

from clearhead.serve import Reader, server
from clearhead.views import html
from clearhead.views.html.hosted import hosted
from clearhead_cli.serve import _listen
from tests.views.test_page import browser  # noqa: F401  # a fixture

TEXT = "Once upon a time a queen slept. She dreamt."
TOKEN = "a-token"


@pytest.fixture
def page(browser):  # noqa: F811
    """The page in a browser; at the end, nothing was refused and nothing failed."""
    reader, door, problems = Reader(), _listen(0), []
    port = door.getsockname()[1]
    text = hosted(html.report_page(reader.report(TEXT)), "remote.js", connects=True)
    config = uvicorn.Config(server.app(reader, text, TOKEN, port), log_level="error", ws="none")
    served = uvicorn.Server(config)
    thread = threading.Thread(target=served.run, kwargs={"sockets": [door]})
    thread.start()
    opened = browser.new_page()
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda it: it.type == "error" and problems.append(it.text))
    opened.goto(f"http://127.0.0.1:{port}/{TOKEN}/")
    yield opened
    opened.close()
    served.should_exit = True
    thread.join(20)
    assert not problems


def test_the_source_of_a_served_page_is_the_server(page):
    edits = {"off": [[0, 7]], "temperature": 2, "mask": None, "scale": None, "dropout": 0}
    found = page.evaluate("edits => pageSource().compute('He slept.', edits)", edits)
    assert found["tokens"] == ["He", "slept", "."]
    part = {"layer": 1, "head": 2, "queries": [0, 2], "keys": [0, 1]}
    layer = page.evaluate("part => pageSource().tile('He slept.', {}, part)", part)
    assert layer["steps"][0]["stored"] == [1, 3, 2]


def test_errors_are_told_in_three_parts(page):
    told = page.evaluate("pageSource().compute('', {}).catch((error) => error.message)")
    assert told == (
        "The text is empty. Rule: a text has at least one word and at most 200,000 letters. "
        "Way out: type one."
    )


def test_a_newer_question_ends_an_older_one(page):
    ended, found = page.evaluate(
        """() => {
          const source = pageSource();
          const older = source.compute("He slept.", {}).catch((error) => error.name);
          return Promise.all([older, source.compute("She sang.", {})]);
        }"""
    )
    assert ended == "AbortError" and found["tokens"][:2] == ["She", "sang"]
