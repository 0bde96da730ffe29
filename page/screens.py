"""Photograph a page: every view, Compare and What if, at three widths, light and dark.

    python -m page.screens out/storyteller.html out/screens

`make screens` does this for the included model; PAGE=... names the file or the address of another
page, such as one that `clearhead serve` printed. It needs Chromium and the extra test.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Page

from tests.views.browser import launched

SIZES = (1400, 1000), (1280, 720), (390, 844)
SCHEMES = "light", "dark"
ANSWER = 120_000  # milliseconds, of a server that computes


def screens(tab: Page) -> Iterator[str]:
    """Go through a page, and yield the name of what it shows."""
    store = "clearhead.store"
    yield "opening"
    for view in tab.evaluate("[...document.querySelectorAll('#views button')].map((x) => x.id)"):
        tab.locator(f"#{view}").click()
        tab.wait_for_function("() => !/^Computing/m.test(document.body.innerText)", timeout=ANSWER)
        yield view.removeprefix("view-")
    tab.locator("#view-text").click()
    if tab.locator("#swipe").is_visible():
        tab.locator("[data-pane=heads-pane]").click()
        yield "heads"
        tab.locator("[data-pane=picture-pane]").click()
    other = tab.evaluate("document.querySelector('.tile:not([aria-checked=true])').dataset.place")
    layer, head = other.split(".")
    tab.evaluate(f"clearhead.go({{ others: [[{layer}, {head}]] }})")
    yield "compare"
    tab.evaluate(f"clearhead.go({{ others: [], layer: {layer}, head: {head} }})")
    yield "another-head"
    tab.locator("#whatif").click()
    yield "what-if"
    if tab.locator("#edit-first").is_enabled():
        tab.locator("#edit-first").click()
        tab.wait_for_function(f"() => {store}.edited !== null", timeout=ANSWER)
        yield "what-if-after"


def photograph(page: str, out: Path) -> list[Path]:
    """Write a picture for each screen of a page, a file or an address, and return their paths."""
    address = page if "://" in page else Path(page).resolve().as_uri()
    out.mkdir(parents=True, exist_ok=True)
    written = []
    with launched() as browser:
        for (width, height), scheme in ((size, x) for size in SIZES for x in SCHEMES):
            tab = browser.new_page(
                viewport={"width": width, "height": height},
                color_scheme=scheme,
                reduced_motion="reduce",
            )
            tab.set_default_timeout(ANSWER)
            tab.goto(address)
            tab.wait_for_function("() => typeof clearhead !== 'undefined'")
            for number, name in enumerate(screens(tab)):
                tab.wait_for_timeout(300)  # milliseconds, in which the page draws
                written.append(out / f"{width}-{scheme}-{number:02}-{name}.png")
                tab.screenshot(path=written[-1])
            tab.close()
    return written


if __name__ == "__main__":
    for path in photograph(sys.argv[1], Path(sys.argv[2])):
        print(path)
