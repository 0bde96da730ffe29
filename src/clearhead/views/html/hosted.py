"""A page with a host behind it, which computes anew: a server, or a notebook."""

from .document import _asset, _digest, _json


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
        before = before.replace(
            "loads nothing from the internet", "asks only the server it came from", 1
        )
    return f"{before}<script>{longer}</script>{after}"
