"""A page with a host behind it, which computes anew: a server, or a notebook."""

from collections.abc import Sequence
from typing import TypeAlias

from ...results.report import Findings
from ..escape import visible_in_browser
from .document import _asset, _digest, _json
from .report import _data

Guesses: TypeAlias = Sequence[Sequence[tuple[str, float]]]


def snapshot(
    report: Findings, text: str, unknown: Sequence[int] = (), guesses: Guesses | None = None
) -> dict[str, object]:
    """What a page shows of a model and a text: the form that `views/page/data.js` describes.

    `unknown` are the positions of words that the model does not know, `guesses` the next words that
    it expects after each position, with their probabilities.
    """
    shown = guesses and [
        [(visible_in_browser(word), round(share, 7)) for word, share in some] for some in guesses
    ]
    return {**_data(report), "text": text, "unknown": list(unknown), "guesses": shown}


def as_json(value: object) -> str:
    """JSON as it stands in a page: in ASCII, and NaN and infinity as ``{"float": "NaN"}``."""
    return _json(value)


def hosted(page: str, *scripts: str, connects: bool) -> str:
    """The page with more scripts of `views/page/`, which link it to its host. The function
    `pageSource` of one of them takes the place of the page's own. If it `connects`, to where it
    came from.
    """
    before, code = page.rsplit("<script>", 1)
    code, after = code.split("</script>", 1)
    longer = "\n".join([code, *map(_asset, scripts)])
    before = before.replace(_digest(code), _digest(longer), 1)
    if connects:
        policy = "default-src 'none'; "
        before = before.replace(policy, f"{policy}connect-src 'self'; ", 1)
    return f"{before}<script>{longer}</script>{after}"
