"""Write the HTML document of a page: fill in its template and its security policy."""

import base64
import gzip
import hashlib
import html
import json
import math
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import Tensor

from ...core.errors import BadValue, as_path, why_failed
from ...core.formatting import visible_in_browser, without_nan
from ...models.roles.table import ROLES
from ..colours import DIVERGING, SEQUENTIAL
from .edits import EDITS, MASKS
from .schema import Ahead, Host, Kind, Model, Numbers, Page, Snapshot

Fields = TypeVar("Fields")

# The parts of the pages; `make page` bundles the scripts of the folder `page/`.
PAGE = resources.files("clearhead.views") / "page"
WIDGET = PAGE / "widget.js"  # anywidget loads it in a notebook's cell

INKS = {"sequential": SEQUENTIAL, "diverging": DIVERGING}


def document(
    data: Snapshot, *, title: str, about: str, note: str, caption: str, fallback: str,
    host: Host | None, model: Model | None = None, folder: str = "", ahead: Ahead | None = None,
    beside: Snapshot | None = None,
) -> str:  # fmt: skip
    """Return the HTML: `data` for the script, and table rows, `fallback`, if scripts do not run."""
    content: Page = {
        "inks": INKS,
        "roles": list(ROLES),
        "edits": EDITS,
        "masks": MASKS,
        "host": host,
        **data,
    }
    more = {"model": model, "folder": folder or None, "ahead": ahead, "beside": beside}
    content |= cast(Page, {name: value for name, value in more.items() if value is not None})
    texts = {"title": title, "about": about, "note": note, "caption": caption}
    return filled("page", ("page.css",), content, texts, fallback, host)


def filled(
    name: str, styles: tuple[str, ...], data: object, texts: Mapping[str, str], fallback: str,
    host: Host | None,
) -> str:  # fmt: skip
    """Return the HTML of the template `name`, with its script, styles, data and texts."""
    style, script = "\n".join(map(_asset, styles)), _asset(f"{name}.js")
    connect = "connect-src 'self'; " if host == "server" else ""
    policy = (
        f"default-src 'none'; {connect}script-src '{_digest(script)}'; "
        f"style-src '{_digest(style)}'; base-uri 'none'; form-action 'none'"
    )
    network = "loads nothing from the internet"
    if host == "server":
        network = "connects only to the server it came from"
    slots = {
        **{slot: _one_line(text) for slot, text in texts.items()},
        "policy": policy,
        "style": style,
        "fallback": fallback,
        "network": network,
        "data": as_json(data),
        "script": script,
    }
    # One pass, so that a title such as "{{data}}" stays text.
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: slots[slot[1]], _asset(f"{name}.html"))


def write(text: str, path: str | Path) -> Path:
    """Write a page to `path` and return the path. Raises `BadValue` if it cannot be written."""
    path = as_path("write", path)
    try:
        path.write_bytes(text.encode("utf-8"))
    except (OSError, ValueError) as error:
        name = visible_in_browser(str(path))
        gave = f"The page could not be written to {name!r} ({why_failed(error)})."
        rule = "a page is written to a file in an existing folder with write permission."
        hint = "create the folder first, or name another file, for example 'attention.html'."
        raise BadValue(gave, rule, hint) from error
    return path


def in_notebook(page: str, height: int = 760) -> str:
    """Return a page as the output of a notebook's cell.

    It is a sandboxed frame, which runs the page's script without access to anything else.
    """
    return (
        f'<iframe srcdoc="{html.escape(page)}" sandbox="allow-scripts" title="clearhead" '
        f'style="width: 100%; height: {height}px; border: 0"></iframe>'
    )


def fields_of(kind: type[Fields], source: object, **others: object) -> Fields:
    """Return the fields of `kind`, a `TypedDict`: `others`, and the rest from those of `source`, a
    dataclass or a row of a table."""
    values: Mapping[str, Any] = source if isinstance(source, Mapping) else vars(source)
    names = (name for name in kind.__annotations__ if name not in others)
    return cast(Fields, {name: values[name] for name in names} | others)


def encoded(values: Tensor, kind: Kind) -> Numbers:
    """Encode a tensor for the script: NumPy's name of the dtype (``"f4"``), shape, and bytes.

    The bytes are little-endian, in base64, a third of their size as JSON.
    """
    data = values.cpu().numpy().astype(f"<{kind}").tobytes()
    return {"kind": kind, "stored": list(values.shape), "data": base64.b64encode(data).decode()}


def table(rows: list[list[str]]) -> str:
    """Return the rows of a table, whose first cells are headings. Cells must be HTML."""
    return "\n".join("<tr><th>" + "<td>".join(cells) for cells in rows)


# ---- text from outside ---------------------------------------------------------------


def _one_line(text: str) -> str:
    words = " ".join(text.split())
    return html.escape(visible_in_browser(words)) if words else ""


def as_json(value: object) -> str:
    """Return JSON that is safe inside a script element, because it cannot open or close a tag.

    It is ASCII, and NaN and infinity are written as ``{"float": "NaN"}``.
    """
    strict = without_nan(value, _nonfinite)
    text = json.dumps(strict, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    # Because it is ASCII, U+2028, U+2029 and lone surrogates are written as \uXXXX.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def packed(value: object) -> str:
    """Compress a value for the script, which reads it with `unpacked` when it is needed: its JSON
    in gzip, in base64. Equal values have the same text."""
    return base64.b64encode(gzip.compress(as_json(value).encode(), mtime=0)).decode()


def _nonfinite(x: float) -> dict[str, str]:
    """Return the object that the script reads as NaN or infinity."""
    return {"float": "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"}


def _asset(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def _digest(code: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
