"""The notebook view of a value: a small table and pictures of maps, without a script.

`html_of` is the registry, with a function for each type of value.
"""

import base64
import html
import struct
import textwrap
import zlib
from collections.abc import Sequence
from functools import singledispatch

import torch
from torch import Tensor

from ..core.errors import BadValue
from ..core.formatting import evenly, visible_in_browser
from ..core.functional.look import Look
from ..core.functional.matrix import Matrix
from ..core.functional.plan import Plan
from ..core.functional.trace import Trace
from ..core.masks import Mask
from ..core.masks.grid import make_grid
from ..models.inspect.recording import Recording
from ..models.report import Report
from ..models.report.opening import opening
from ..models.report.summary import in_words
from . import html as pages
from .colours import ink

SIDE = 64  # cells per side of a picture
MOST_PICTURES = 32  # of heads, 2 kB each
MOST_ROWS = 50
MOST_CALLS = 48  # in a picture
THUMBNAIL = 64
MOST_LETTERS = 2000  # of a caption or a cell


@singledispatch
def html_of(value: object) -> str:
    """Return the HTML of a value; for other types, its repr."""
    return cell(repr(value))


def cell(caption: str, rows: Sequence[Sequence[str]] = (), pictures: str = "") -> str:
    """Return a caption, a table and pictures as HTML.

    The first row names the columns, or is empty. A long table is elided before its last row.
    """
    parts = [f"<pre>{_text(caption)}</pre>"]
    if rows:
        head, body = rows[0], [[_text(x) for x in row] for row in rows[1:]]
        if len(body) > MOST_ROWS:
            body[MOST_ROWS - 2 : -1] = [["…"] * len(body[0])]
        lines = ["<tr>" + "".join(f"<th>{_text(x)}</th>" for x in head) + "</tr>"] if head else []
        lines += ["<tr>" + "".join(f"<td>{x}</td>" for x in row) + "</tr>" for row in body]
        parts.append(f"<table>{''.join(lines)}</table>")
    return "".join([*parts, pictures])


def heads_of(weights: Tensor) -> str:
    """Return pictures of the weights (B, H, Tq, Tk) of every head of the first sequence.

    Leading dimensions may be missing. For a long text, a cell is the largest weight of a block.
    """
    weights = weights.reshape(-1, *weights.shape[-3:])[0] if weights.dim() > 2 else weights[None]
    maps = weights[:MOST_PICTURES].detach().float()
    if max(maps.shape[-2:], default=0) > SIDE:
        sides = [min(SIDE, size) for size in maps.shape[-2:]]
        maps = torch.nn.functional.adaptive_max_pool2d(maps, sides)
    more = len(weights) - MOST_PICTURES
    pictures = "".join(_picture(one, f"head {h}") for h, one in enumerate(maps))
    return pictures + (f"<p>and {more} more heads</p>" if more > 0 else "")


def heat(rows: Sequence[tuple[str, Tensor]], largest: float) -> str:
    """Return a table of names with strips of cells, from 0 (light) to `largest` (dark)."""
    lines = []
    for name, numbers in rows:
        spans = "".join(
            f'<span title="{i}" style="display:inline-block;width:1.2em;height:1.2em;'
            f'background:rgb{ink(x / (largest or 1.0))}"></span>'
            for i, x in enumerate(numbers.tolist())
        )
        lines.append(f"<tr><th>{_text(name)}</th><td>{spans}</td></tr>")
    return f"<table>{''.join(lines)}</table>"


@html_of.register
def _(trace: Trace) -> str:
    """Return the steps of a trace with their shapes, and pictures of the weights of every head.

    `clearhead.views.explore(trace)` shows every number.
    """
    if any(step.tensor.numel() == 0 for step in trace):
        return cell(repr(trace))
    rows = [("step", "shape", "axes", "formula")]
    rows += [(s.name, " × ".join(map(str, s.shape)), s.axes, s.formula) for s in trace]
    pictures = ""
    if "weights" in trace:
        pictures = heads_of(trace["weights"])
    return cell(trace.about or "Trace", rows, pictures)


@html_of.register
def _(mask: Mask) -> str:
    """Return the mask's notation, its formula, and a picture of its first batch and head.

    Dark cells may look. A mask larger than 64 x 64 is drawn at evenly spaced queries and keys.
    """
    caption = f"{mask!r}: {mask.formula}"
    try:
        grid = make_grid(mask, None, None, default=8)
    except BadValue:  # no sizes fit all of its parts
        return cell(caption)
    if not grid.Tq or not grid.Tk:
        return cell(caption)
    zero = torch.zeros((), dtype=torch.long)
    q, k = (torch.tensor(evenly(size, SIDE)) for size in (grid.Tq, grid.Tk))
    allowed = mask.allowed(grid, zero, zero, q[:, None], k[None, :]).expand(len(q), len(k))
    lines = "".join(
        f"M{first} {y}h{last - first}v1h-{last - first}z"
        for y, row in enumerate(allowed.int())
        for first, last in _runs(row)
    )
    height, width = allowed.shape
    drawn = [
        f"{count} {name}" if count == size else f"{count} of {size:,} {name}"
        for count, size, name in ((height, grid.Tq, "queries"), (width, grid.Tk, "keys"))
    ]
    tall = f"{min(16, 0.8 * height + 2):g}em"
    picture = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" '
        f'style="height:{tall};background:#ddd" shape-rendering="crispEdges" fill="#14637f">'
        f'<title>queries by keys</title><path d="{lines}"/></svg>'
        f"<p>{drawn[0]} (down), {drawn[1]} (across); filled may look</p>"
    )
    return cell(caption, pictures=picture)


@html_of.register
def _(look: Look) -> str:
    rows = [("statistic", "shape", "finite values"), *look.table()]
    maps = look.pooled if "pooled" in look.names else None
    pictures = heads_of(maps) if isinstance(maps, Tensor) and maps.numel() else ""
    return cell(f"look at {look.about}", rows, pictures)


@html_of.register
def _(plan: Plan) -> str:
    problem, *lines = str(plan).split("\n")
    return cell(problem, [(), *((line[:16].strip(), line[16:]) for line in lines)])


@html_of.register
def _(matrix: Matrix) -> str:
    """Return the summary, and a thumbnail of every head of the first sequence."""
    if 0 in matrix.shape:
        return cell(repr(matrix))
    with torch.no_grad():
        maps = matrix.pool(THUMBNAIL, THUMBNAIL)
    return cell(repr(matrix), pictures=heads_of(maps))


@html_of.register
def _(recording: Recording) -> str:
    """Return, for each statistic, a line for each layer with a cell for each head: its mean."""
    if recording.written or not recording.calls:
        return cell(repr(recording))
    by_statistic: dict[str, list[tuple[str, Tensor]]] = {}
    for call in recording.calls[:MOST_CALLS]:
        means: dict[str, list[float]] = {}
        for _, name, values in call.values_of_heads():
            means.setdefault(name, []).append(float(values.mean()))
        for name, numbers in means.items():
            title = f"{call.layer} {call.module}"
            by_statistic.setdefault(name, []).append((title, torch.tensor(numbers)))
    parts = [cell(repr(recording))]
    for name, rows in by_statistic.items():
        every = torch.cat([x for _, x in rows])
        low, high = float(every.min()), float(every.max())
        span = f"{name}: a cell for each head, {low:.4g} (light) to {high:.4g} (dark)"
        parts += [cell(span), heat([(title, x - low) for title, x in rows], high - low)]
    return "".join(parts)


@html_of.register
def _(report: Report) -> str:
    return pages.in_notebook(pages.report_page(report))


def still(report: Report) -> str:
    """Return the maps of one layer of a report as pictures, for viewers that run no script.

    It is the layer with which page and terminal begin, with the reason.
    """
    begin = opening(report)
    layer = report.layers[0 if begin is None else begin.head.layer]
    reason = "" if begin is None else f"\n{textwrap.fill(in_words(report, begin), 80)}"
    rows = [("head", "role", "score", "entropy")]
    rows += [(str(x.head), x.label, x.share_text, f"{x.entropy:.2f}") for x in layer.heads]
    caption = f"{report.name}: {report.about}\n{report.text[:MOST_LETTERS]}{reason}"
    return cell(f"{caption}\nLayer {layer.number}:", rows, heads_of(layer.pooled))


def _runs(row: Tensor) -> list[list[int]]:
    """Return the first and the end column of each run of ones in a row of zeros and ones."""
    return torch.nn.functional.pad(row, (1, 1)).diff().nonzero().reshape(-1, 2).tolist()


def _picture(values: Tensor, name: str) -> str:
    label = html.escape(name)
    return (
        f'<img alt="{label}" title="{label}" style="image-rendering:pixelated;width:8em;height:8em;'
        f'margin:2px" src="data:image/png;base64,{png(values)}">'
    )


def _text(text: str) -> str:
    lines = []
    for line in text[:MOST_LETTERS].split("\n"):
        words = line.lstrip(" ")
        lines.append(line[: -len(words)] + visible_in_browser(words) if words else "")
    return html.escape("\n".join(lines) + ("…" if len(text) > MOST_LETTERS else ""))


PALETTE = torch.tensor([ink(i / 255) for i in range(256)], dtype=torch.uint8)
GREY = 158


def png(values: Tensor) -> str:
    """Return weights (rows, columns) as a PNG in base64.

    The colours are those of the page: the square root, from 0 to 1; NaN and infinity are grey.
    """
    values = values.detach().float().cpu()
    lost = ~values.isfinite()
    roots = values.masked_fill(lost, 0.0).clamp(0, 1).sqrt()
    pixels = PALETTE[(255 * roots).round().long()].masked_fill(lost.unsqueeze(-1), GREY)
    # The first byte of a row is its filter; 0 means none.
    rows = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in pixels)
    height, width = values.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits per channel, RGB
    parts = (("IHDR", header), ("IDAT", zlib.compress(rows)), ("IEND", b""))
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, parts))).decode()


def _chunk(part: tuple[str, bytes]) -> bytes:
    kind, data = part[0].encode(), part[1]
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
