"""One self-contained HTML page of a `Trace`: every head, one query, every step.

The page asks the network for nothing. Its policy lets run only the script and
the style written here, by their hashes, so the same trace gives the same bytes.
Tokens, title and note are strangers' text: they reach the page as escaped text
or as JSON that cannot close its element, and never as markup.
"""

import base64
import hashlib
import html
import json
import math
import re
import unicodedata
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from ..errors import BadValue
from ..trace import AXES, Step, Trace

# Reading order of the script; the files share one scope, as one program.
SCRIPTS = ("data.js", "marks.js", "maps.js", "lines.js", "steps.js", "page.js")

# What a page holds of a long text, so that one of five maps stays under 50 MB.
MAP_SIDE = 256  # cells a side of a map: a screen gives it about 600 pixels
MAP_CELLS = 1 << 20  # cells of one step's maps, all heads together: 4 MB
ROW_CELLS = 1 << 18  # numbers in the exact rows that go with them: 1 MB
TOKEN_CELLS = 1 << 20  # numbers in the rows of the keys or the values: 4 MB


def page(trace: Trace, *, title: str = "clearhead", note: str = "") -> str:
    """The whole HTML document that shows `trace` (of a batch, its first sequence).

    Every number survives as float32 (float64 where float32 would lose it to
    infinity or to zero). A text too long to draw cell by cell is pooled by
    maximum for the maps, and keeps some of its queries exactly; the page says so.
    Raises `BadValue` for a trace without weights, or with nothing in it to draw.
    """
    for step in (trace.step("weights"), *trace):
        if step.tensor.numel() == 0:
            raise BadValue(
                f"The step {step.name!r} is empty: {step.axes!r} has shape {step.shape}.",
                "a page draws at least one query, one key and one feature.",
                "explain at least one token, or print the trace as text.",
            )
    style, script = _part("page.css"), "\n".join(_part(name) for name in SCRIPTS)
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    slots = {
        "policy": policy,
        "title": _line(title),
        "about": _line(trace.about),
        "note": _line(note),
        "style": style,
        "fallback": _fallback(trace),
        "data": _json(_data(trace)),
        "script": script,
    }
    # One pass, so that text which looks like a slot stays text.
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: slots[slot[1]], _part("page.html"))


def write_page(trace: Trace, path: str | Path, *, title: str = "clearhead", note: str = "") -> Path:
    """Write `page(trace)` to `path` and return the path. Raises `BadValue` where it cannot."""
    path, document = Path(path), page(trace, title=title, note=note)
    try:
        path.write_bytes(document.encode("utf-8"))
    except (OSError, ValueError) as error:
        raise BadValue(
            f"The page could not be written to {visible(str(path))!r} "
            f"({getattr(error, 'strerror', None) or error}).",
            "a page is written to a file in a folder that exists and may be written to.",
            "make the folder first, or name another file, for example 'attention.html'.",
        ) from error
    return path


# ---- strangers' text -----------------------------------------------------------------


def visible(text: str) -> str:
    """`text` with whatever would hide, break or reorder it written out.

    >>> visible("a\\0b"), visible(" the"), visible("\\u202egnp")
    ('a␀b', '␣the', '⟨202E⟩gnp')
    """
    body = text.strip(" ")
    before = len(text) - len(text.lstrip(" "))
    after = len(text) - len(body) - before if body else 0
    return "␣" * before + "".join(map(_written_out, body)) + "␣" * after or "∅"


def _written_out(char: str) -> str:
    code, category = ord(char), unicodedata.category(char)
    if code < 0x20:
        return chr(0x2400 + code)  # ␀ ␉ ␊: the pictures of the control characters
    marks_direction = unicodedata.bidirectional(char) in DIRECTION or code in (
        0x200E,
        0x200F,
        0x61C,
    )
    return f"⟨{code:04X}⟩" if category in ("Cc", "Cs", "Zl", "Zp") or marks_direction else char


DIRECTION = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def _line(text: str) -> str:
    words = " ".join(text.split())
    return html.escape(visible(words)) if words else ""


def _json(value: object) -> str:
    """JSON that is safe inside a script element: nothing in it can open or close a tag."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    # All of it is ASCII now, so U+2028, U+2029 and lone surrogates are \uXXXX already.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _part(name: str) -> str:
    return (resources.files(__package__) / "page" / name).read_text(encoding="utf-8")


def _digest(code: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()


# ---- the numbers ---------------------------------------------------------------------


def _data(trace: Trace) -> dict[str, object]:
    """Everything the script reads: labels, sizes, steps, and what was left out."""
    size = _sizes(trace)
    block, kept = _fit(trace, size)
    settings = trace.settings or {}
    return {
        "size": size,
        "names": AXES,
        "queries": [visible(token) for token in trace.labels("q", size["q"])],
        "keys": [visible(token) for token in trace.labels("k", size["k"])],
        "settings": {
            name: value
            for name, value in settings.items()
            if isinstance(value, int | float) and math.isfinite(value)
        },
        "block": block,
        "kept": kept,
        "steps": [_step(step, block, kept) for step in trace],
    }


def _sizes(trace: Trace) -> dict[str, int]:
    """How long each axis is. The weights speak first, then whoever has the letter."""
    size: dict[str, int] = {}
    for step in (trace.step("weights"), *trace):
        for letter, length in zip(step.axes.split(), step.shape, strict=True):
            size.setdefault(letter, length)
    return size


def _fit(trace: Trace, size: dict[str, int]) -> tuple[list[int] | None, list[int]]:
    """The block that one map cell stands for (None: a cell is a cell), and the queries kept."""
    heads = size.get("h", 1)
    side = max(64, min(MAP_SIDE, math.isqrt(MAP_CELLS // heads)))
    queries = size["q"]
    if max(queries, size["k"]) <= side:
        return None, list(range(queries))
    block = [math.ceil(queries / side), math.ceil(size["k"] / side)]
    return block, _evenly(queries, max(4, ROW_CELLS // (heads * size["k"])))


def _evenly(length: int, wanted: int) -> list[int]:
    """At most `wanted` positions (two or more), evenly spaced, with both ends."""
    if length <= wanted:
        return list(range(length))
    return [round(i * (length - 1) / (wanted - 1)) for i in range(wanted)]


def _step(step: Step, block: list[int] | None, queries: list[int]) -> dict[str, object]:
    """One step as the script reads it: the numbers, and the positions they belong to."""
    tensor, axes = step.tensor.detach(), step.axes.split()
    if "b" in axes:
        tensor = tensor.select(axes.index("b"), 0)
        axes.remove("b")
    pair = "q" in axes and "k" in axes
    if pair:
        tensor = tensor.movedim((axes.index("q"), axes.index("k")), (-2, -1))
        axes = [letter for letter in axes if letter not in "qk"] + ["q", "k"]
    told: dict[str, object] = {
        "name": step.name,
        "formula": step.formula,
        "why": step.why,
        "axes": axes,
        "shape": [list(pair) for pair in zip(step.axes.split(), step.shape, strict=True)],
    }
    kept: dict[str, list[int]] = {}
    if block and pair:
        told["map"] = _pack(_pooled(tensor, *block))
    if block and "q" in axes:
        kept["q"] = queries
    if "k" in axes and not pair and tensor.numel() > TOKEN_CELLS:
        keys = tensor.shape[axes.index("k")]
        kept["k"] = _evenly(keys, max(4, TOKEN_CELLS * keys // tensor.numel()))
    for letter, positions in kept.items():
        where = torch.tensor(positions, device=tensor.device)
        tensor = tensor.index_select(axes.index(letter), where)
    return {**told, "kept": kept, **_pack(tensor)}


def _pooled(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """The largest of every block of rows x columns; a NaN in a block stays."""
    high, wide = matrix.shape[-2:]
    padding = (0, -wide % columns, 0, -high % rows)
    padded = torch.nn.functional.pad(matrix.double(), padding, value=-math.inf)
    return padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows)).amax((-3, -1))


def _pack(tensor: Tensor) -> dict[str, object]:
    """The numbers as little-endian bytes in base64: a third of their size as JSON."""
    wide, narrow = tensor.double(), tensor.float()
    lost = (narrow.isinf() != wide.isinf()) | ((narrow == 0) != (wide == 0))
    kind, values = ("f8", wide) if lost.any() else ("f4", narrow)
    data = values.cpu().numpy().astype(f"<{kind}").tobytes()
    return {"kind": kind, "stored": list(tensor.shape), "data": base64.b64encode(data).decode()}


# ---- without a script ----------------------------------------------------------------


def _fallback(trace: Trace) -> str:
    """The weights of the first head as the rows of a plain table, long ones elided."""
    step = trace.step("weights")
    axes = step.axes.split()
    weights = step.tensor.detach().movedim((axes.index("q"), axes.index("k")), (-2, -1))
    weights = weights[(0,) * (weights.dim() - 2)]
    rows, columns = (_ends(length) for length in weights.shape)
    queries, keys = (trace.labels(*axis) for axis in zip("qk", weights.shape, strict=True))
    table = [["query \\ key", *(_token(keys, column) for column in columns)]]
    for row in rows:
        numbers = (_number(weights, row, column) for column in columns)
        table.append([_token(queries, row), *numbers])
    return "\n".join("<tr><th>" + "<td>".join(cells) for cells in table)


def _ends(length: int) -> list[int | None]:
    """Up to twelve positions: all of them, or the first nine, a gap and the last two."""
    every: list[int | None] = list(range(length))
    return every if length <= 12 else [*every[:9], None, *every[-2:]]


def _token(tokens: list[str], position: int | None) -> str:
    return "…" if position is None else f"<bdi>{html.escape(visible(tokens[position][:40]))}</bdi>"


def _number(weights: Tensor, row: int | None, column: int | None) -> str:
    return "…" if row is None or column is None else f"{weights[row, column]:.4f}"
