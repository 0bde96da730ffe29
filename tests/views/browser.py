"""A browser, and visits to pages in it.

Every visit begins with a check that the page has drawn something, and ends with four: no request
but the file itself, no message on the console, no script error, no dialog.
"""

import os
import shutil
from contextlib import contextmanager

import pytest

from clearhead.core.functional.trace import Trace
from clearhead.views.html import write_page, write_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-quic "
    "--no-first-run --disable-component-update --disable-sync"
).split()
SIZE = {"width": 1280, "height": 720}

# What the page gives a console, and its store, by their plain names.
PLAIN_NAMES = """
Object.defineProperty(globalThis, "clearhead", { configurable: true, set(page) {
  for (const from of [page, page.store]) {
    for (const name of Object.keys(from)) {
      Object.defineProperty(globalThis, name, { configurable: true, get: () => from[name] });
    }
  }
} });
"""


@contextmanager
def launched():
    """A browser with one context, for every visit that needs no other: a new one takes 0.2 s."""
    if os.environ.get("CLEARHEAD_NO_BROWSER") == "1":
        pytest.skip("CLEARHEAD_NO_BROWSER=1: the page was not opened in a browser")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.fail(
            "The page must be opened in a browser and there is none. Install Chromium (on Debian: "
            "apt-get install chromium), or set CLEARHEAD_NO_BROWSER=1 to leave this out."
        )
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=FLAGS)
        new_context(browser)
        yield browser
        browser.close()


def new_context(browser, **options):
    usual = {"reduced_motion": "reduce", "viewport": SIZE}
    context = browser.new_context(**usual | options)
    context.add_init_script(PLAIN_NAMES)
    context.set_default_navigation_timeout(90_000)  # milliseconds, for a machine with a high load
    return context


@contextmanager
def visits(browser, folder):
    """Open traces and reports in the browser; at the end, make the four checks.

    A tab serves one visit after another, which takes half the time of a new one, unless the visit
    prepares it or has options of a context."""
    opened, plain, happened = [], [], []
    file = (folder / "page.html").as_uri()

    def on_request(request):  # what the page saves is a blob of its own
        url = request.url
        if url.split("#")[0].split("?")[0] != file and not url.startswith("blob:"):
            happened.append(f"request {url}")

    def on_dialog(dialog):
        happened.append(f"dialog {dialog.message}")
        dialog.dismiss()

    listeners = {
        "request": on_request,
        "console": lambda it: happened.append(f"console {it.text}"),
        "pageerror": lambda it: happened.append(f"error {it}"),
        "dialog": on_dialog,
    }

    def open_page(
        shown,
        *,
        title="clearhead",
        note="",
        query=None,
        hash="",
        prepare=None,
        beside=None,
        **options,
    ):
        if isinstance(shown, Trace):
            write_page(shown, folder / "page.html", title=title, note=note, query=query)
        else:
            write_report(shown, folder / "page.html", title=title, note=note, beside=beside)
        if prepare is None and options.keys() <= {"viewport", "color_scheme"}:
            tab = free_tab(browser, **options)
            plain.append(tab)
        else:
            context = new_context(browser, **options) if options else browser.contexts[0]
            tab = context.new_page()
            opened.append(context if options else tab)
            if prepare is not None:
                prepare(tab)
        for event, listener in listeners.items():
            tab.on(event, listener)
        tab.goto(file + hash)
        if options.get("java_script_enabled", True):
            must_be_drawn(tab)
        return tab

    yield open_page
    for tab_or_context in opened:
        tab_or_context.close()
    for tab in plain:
        for event, listener in listeners.items():
            tab.remove_listener(event, listener)
        put_back(tab)
    assert happened == []


def free_tab(browser, viewport=SIZE, color_scheme="light"):
    """A tab of the shared context that nobody uses, or a new one."""
    context = browser.contexts[0]
    blank = (tab for tab in context.pages if tab.url == "about:blank")
    tab = next(blank, None) or context.new_page()
    tab.bring_to_front()  # a hidden tab draws once a second
    tab.set_viewport_size(viewport)
    tab.emulate_media(media="null", color_scheme=color_scheme)
    return tab


IS_DRAWN = """() => {
  const [canvas, panel] = ["picture", "panel"].map((id) => document.getElementById(id));
  const isSeen = (it) => it?.checkVisibility();
  if (!isSeen(canvas)) return isSeen(panel) && panel.innerText.trim() !== "";
  const { width, height } = canvas, copy = new OffscreenCanvas(width, height);
  const pen = copy.getContext("2d", { willReadFrequently: true });
  pen.drawImage(canvas, 0, 0);
  const { data } = pen.getImageData(0, 0, width, height);
  return data.some((number, i) => i % 4 === 3 && number > 0);
}"""


def must_be_drawn(tab):
    """The picture has paint, or the panel that is there in its place has text."""
    assert tab.evaluate(IS_DRAWN), "the page is blank"


def put_back(tab):
    """Leave a tab of the shared context to the next visit."""
    tab.mouse.move(0, 0)
    tab.goto("about:blank")
