"""The page of a `Trace`: every head, one query, every step."""

import html
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...errors import BadType, BadValue, as_index, kind_of
from ...formatting import AXES, MAP_SIDE, ends, evenly, spelled, visible_in_browser
from ...trace import Step, Trace
from . import schema
from .document import document, encoded, table, write
from .schema import Begin, Host, Layer, Numbers, Snapshot, Spelling

# Limits on what a page holds of a long text, so that a page of five maps stays below 50 MB.
MAP_CELLS = 1 << 20  # cells of one step's maps, of all heads together: 4 MB
ROW_CELLS = 1 << 18  # numbers in the exact rows of one step: 1 MB
TOKEN_CELLS = 1 << 20  # numbers in the keys or the values: 4 MB


def page(
    trace: Trace,
    *,
    title: str = "clearhead",
    note: str = "",
    query: int | None = None,
    host: Host | None = None,
) -> str:
    """The HTML document that shows `trace` (of a batch, its first sequence), opened at a `query`;
    None means the last. A `host` shows it in a place of its own (`notebook`).

    Numbers are kept as float32 (as float64 if float32 would round them to infinity or to zero). The
    maps of a text too long to draw cell by cell are pooled by maximum, and only some queries are
    kept exactly; the page says so. Raises `BadValue` for a trace without weights or with an empty
    step, for a query that is not there, and `BadType` for anything but a `Trace`.
    """
    if not isinstance(trace, Trace):
        raise BadType(
            f"page was given {kind_of(trace)}.",
            "it shows the steps of a Trace.",
            "pass what explain(...) returns; write_report makes the page of a report.",
        )
    for step in (trace.step("weights"), *trace):
        if step.tensor.numel() == 0:
            raise BadValue(
                f"The step {step.name!r} is empty: {step.axes!r} has shape {step.shape}.",
                "a page draws at least one query, one key and one feature.",
                "explain at least one token, or print the trace as text.",
            )
    return document(
        _data(trace, query),
        title=title,
        about=trace.about,
        note=note,
        caption="Attention weights of head 0: each row says how much one query looks at each key.",
        fallback=_fallback(trace),
        host=host,
    )


def write_page(
    trace: Trace,
    path: str | Path,
    *,
    title: str = "clearhead",
    note: str = "",
    query: int | None = None,
) -> Path:
    """Write `page(trace)` to `path` and return the path. Raises `BadValue` if it cannot be
    written."""
    return write(page(trace, title=title, note=note, query=query), path)


def _data(trace: Trace, query: int | None) -> Snapshot:
    """A snapshot of one layer."""
    layer = trace_data(trace)
    begin: Begin = {}
    if query is not None:
        count = layer["size"]["q"]
        rule = f"this trace has {count}, counted from 0; -1 is the last."
        begin["query"] = as_index("Query", query, count, rule, "pass one of these as query=.")
    tokens = _labels(trace, "q", layer["size"]["q"])
    data: Snapshot = {"names": AXES, "tokens": tokens, "layers": [layer], "begin": begin}
    if spelling := spelling_of(trace.queries or ()):
        data["spelling"] = spelling
    return data


def spelling_of(tokens: Sequence[str]) -> Spelling | None:
    """The spelling of tokens of a vocabulary; None for words."""
    known = spelled(tokens)
    if not known:
        return None
    raw = [visible_in_browser(token) for token in known["raw_tokens"]]
    joined = [i for i, token in enumerate(tokens) if getattr(token, "joined", False)]
    return {"raw": raw, "ids": known["token_ids"], "joined": joined}


# ---- the numbers ---------------------------------------------------------------------


def trace_data(trace: Trace) -> Layer:
    """What the script reads of a trace: labels, sizes, steps, and which queries are kept."""
    size = sizes(trace)
    block, kept = _fit(size)
    return {
        "size": size,
        "queries": _labels(trace, "q", size["q"]),
        "keys": _labels(trace, "k", size["k"]),
        "settings": number_settings(trace),
        "first": trace.first or {},
        "block": block,
        "kept": kept,
        "steps": [step_data(step, block, kept) for step in trace],
    }


def _labels(trace: Trace, letter: str, size: int) -> list[str]:
    return [visible_in_browser(token) for token in trace.labels(letter, size)]


def number_settings(trace: Trace) -> dict[str, float]:
    """The settings that are finite numbers: the script writes them into its calculations."""
    return {
        name: value
        for name, value in (trace.settings or {}).items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def sizes(trace: Trace) -> dict[str, int]:
    """The size of each axis: that of the weights, else of the first step that has the axis."""
    size: dict[str, int] = {}
    for step in (trace.step("weights"), *trace):
        for letter, length in zip(step.axes.split(), step.shape, strict=True):
            size.setdefault(letter, length)
    return size


def _fit(size: dict[str, int]) -> tuple[tuple[int, int] | None, list[int]]:
    """How many queries and keys one cell of a map pools (None: none), and the queries kept."""
    heads = size.get("h", 1)
    side = max(64, min(MAP_SIDE, math.isqrt(MAP_CELLS // heads)))
    queries = size["q"]
    if max(queries, size["k"]) <= side:
        return None, list(range(queries))
    block = math.ceil(queries / side), math.ceil(size["k"] / side)
    return block, evenly(queries, max(4, ROW_CELLS // (heads * size["k"])))


def step_data(step: Step, block: tuple[int, int] | None, queries: list[int]) -> schema.Step:
    """What the script reads of a step: its numbers, and of which positions they are."""
    tensor, axes = step.tensor.detach(), step.axes.split()
    if "b" in axes:
        tensor = tensor.select(axes.index("b"), 0)
        axes.remove("b")
    pair = "q" in axes and "k" in axes
    if pair:
        tensor = tensor.movedim((axes.index("q"), axes.index("k")), (-2, -1))
        axes = [letter for letter in axes if letter not in "qk"] + ["q", "k"]
    data: schema.Step = {
        "name": step.name,
        "formula": step.formula,
        "why": step.why,
        "axes": axes,
        "shape": list(zip(step.axes.split(), step.shape, strict=True)),
        "axis_names": {letter: step.axis_name(letter) for letter in step.axes.split()},
        "integer": not tensor.is_floating_point(),
        "kept": {},
    }
    kept = data["kept"]
    if block and pair:
        data["map"] = encoded_floats(_pooled(tensor, *block))
    if block and "q" in axes:
        kept["q"] = queries
    if "k" in axes and not pair and tensor.numel() > TOKEN_CELLS:
        keys = tensor.shape[axes.index("k")]
        kept["k"] = evenly(keys, max(4, TOKEN_CELLS * keys // tensor.numel()))
    for letter, positions in kept.items():
        index = torch.tensor(positions, device=tensor.device)
        tensor = tensor.index_select(axes.index(letter), index)
    return {**data, **encoded_floats(tensor)}


def _pooled(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """The largest number of every block of rows x columns; NaN if the block has one."""
    height, width = matrix.shape[-2:]
    padding = (0, -width % columns, 0, -height % rows)
    padded = torch.nn.functional.pad(matrix.double(), padding, value=-math.inf)
    return padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows)).amax((-3, -1))


def encoded_floats(tensor: Tensor) -> Numbers:
    """The tensor in float32, or in float64 if float32 would round a number to infinity or zero."""
    double, single = tensor.double(), tensor.float()
    lost = (single.isinf() != double.isinf()) | ((single == 0) != (double == 0))
    return encoded(double, "f8") if lost.any() else encoded(single, "f4")


# ---- without a script ----------------------------------------------------------------


def _fallback(trace: Trace) -> str:
    """The weights of the first head as the rows of a table, long ones elided."""
    step = trace.step("weights")
    axes = step.axes.split()
    weights = step.tensor.detach().movedim((axes.index("q"), axes.index("k")), (-2, -1))
    weights = weights[(0,) * (weights.dim() - 2)]
    rows, columns = (ends(length, 12) for length in weights.shape)
    queries, keys = (trace.labels(*axis) for axis in zip("qk", weights.shape, strict=True))
    lines = [["query \\ key", *(_token(keys, column) for column in columns)]]
    for row in rows:
        numbers = (_number(weights, row, column) for column in columns)
        lines.append([_token(queries, row), *numbers])
    return table(lines)


def _token(tokens: list[str], position: int | None) -> str:
    return (
        "…"
        if position is None
        else f"<bdi>{html.escape(visible_in_browser(tokens[position][:40]))}</bdi>"
    )


def _number(weights: Tensor, row: int | None, column: int | None) -> str:
    return "…" if row is None or column is None else f"{weights[row, column]:.4f}"
