"""The document that every page is: its slots filled, its policy, its file."""

import base64
import hashlib
import html
import json
import math
import re
from importlib import resources
from pathlib import Path
from typing import Any

from torch import Tensor

from ...errors import BadValue, why_failed
from ..escape import in_browser

# Reading order of the script; the files share one scope, as one program.
SCRIPTS = ("data.js", "marks.js", "maps.js", "lines.js", "steps.js", "ladder.js", "page.js")


def document(
    data: object, *, title: str, about: str, note: str, caption: str, fallback: str
) -> str:
    """The whole HTML: `data` for the script, `fallback` (rows of a table) for where none runs."""
    style, script = _part("page.css"), "\n".join(_part(name) for name in SCRIPTS)
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    slots = {
        "policy": policy,
        "title": _line(title),
        "about": _line(about),
        "note": _line(note),
        "style": style,
        "caption": _line(caption),
        "fallback": fallback,
        "data": _json(data),
        "script": script,
    }
    # One pass, so that text which looks like a slot stays text.
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: slots[slot[1]], _part("page.html"))


def write(text: str, path: str | Path) -> Path:
    """Write a page to `path` and return the path. Raises `BadValue` where it cannot."""
    path = Path(path)
    try:
        path.write_bytes(text.encode("utf-8"))
    except (OSError, ValueError) as error:
        raise BadValue(
            f"The page could not be written to {in_browser(str(path))!r} ({why_failed(error)}).",
            "a page is written to a file in a folder that exists and may be written to.",
            "make the folder first, or name another file, for example 'attention.html'.",
        ) from error
    return path


def in_notebook(page: str, height: int = 760) -> str:
    """A page as the output of a notebook's cell: in a frame of its own, which may run its script
    and reach nothing else."""
    return (
        f'<iframe srcdoc="{html.escape(page)}" sandbox="allow-scripts" title="clearhead" '
        f'style="width: 100%; height: {height}px; border: 0"></iframe>'
    )


def stored(values: Tensor, kind: str) -> dict[str, object]:
    """Numbers as little-endian bytes in base64: a third of their size as JSON."""
    data = values.cpu().numpy().astype(f"<{kind}").tobytes()
    return {"kind": kind, "stored": list(values.shape), "data": base64.b64encode(data).decode()}


def table(rows: list[list[str]]) -> str:
    """The rows of a plain table; the first cell of each is its heading. Cells are HTML already."""
    return "\n".join("<tr><th>" + "<td>".join(cells) for cells in rows)


# ---- strangers' text -----------------------------------------------------------------


def _line(text: str) -> str:
    words = " ".join(text.split())
    return html.escape(in_browser(words)) if words else ""


def _json(value: object) -> str:
    """JSON that is safe inside a script element: nothing in it can open or close a tag."""
    text = json.dumps(_told(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    # All of it is ASCII now, so U+2028, U+2029 and lone surrogates are \uXXXX already.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _told(value: Any) -> Any:
    """The same for JSON, which has neither NaN nor infinity: they are {"float": "NaN"} there."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, dict):
        return {name: _told(x) for name, x in value.items()}
    return [_told(x) for x in value] if isinstance(value, (list, tuple)) else value


def _part(name: str) -> str:
    return (resources.files("clearhead.views") / "page" / name).read_text(encoding="utf-8")


def _digest(code: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
