"""Write the page of a `Trace`: every head, one query, every step."""

import html
import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.errors import BadValue, as_index, must_be
from ...core.formatting import AXES, MAP_SIDE, ends, evenly, spelled, visible_in_browser
from ...core.functional.trace import Step, Trace
from ..panels import panels
from . import schema
from .document import document, encoded, table, write
from .schema import Begin, Host, Layer, Numbers, Snapshot, Spelling

# Limits for a long text, so that a page of five maps stays below 50 MB.
MAP_CELLS = 1 << 20  # cells in the maps of one step, over all heads: 4 MB
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
    """Return the HTML document that shows a trace (the first sequence of a batch).

    The page opens at `query`; None means the last. `host` is the program that displays the page.

    Numbers are stored as float32 (float64 if float32 would round them to infinity or zero). For a
    text too long to draw cell by cell, maps are pooled by maximum, and only some queries have exact
    numbers, which the page states. Raises `BadValue` for a trace without weights or with an empty
    step, and for a query beyond the text; `BadType` for anything but a `Trace`.
    """
    must_be("page", trace, Trace, "explain(...); for a report, use write_report")
    for step in (trace.step("weights"), *trace):
        if step.tensor.numel() == 0:
            gave = f"The step {step.name!r} is empty: {step.axes!r} has shape {step.shape}."
            rule = "a page draws at least one query, one key and one feature."
            raise BadValue(gave, rule, "explain at least one token, or print the trace as text.")
    return document(
        _data(trace, query),
        title=title,
        about=trace.about,
        note=note,
        caption="Attention weights of head 0: each row has the weights of one query on all keys.",
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
    """Write `page(trace)` to `path` and return the path.

    Raises `BadValue` if it cannot be written, and any error of `page`.
    """
    return write(page(trace, title=title, note=note, query=query), path)


def _data(trace: Trace, query: int | None) -> Snapshot:
    """Return a snapshot of one layer."""
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
    """Return the spelling of tokens in their vocabulary; None for words."""
    known = spelled(tokens)
    if not known:
        return None
    raw = [visible_in_browser(token) for token in known["raw_tokens"]]
    joined = [i for i, token in enumerate(tokens) if getattr(token, "joined", False)]
    return {"raw": raw, "ids": known["token_ids"], "joined": joined}


# ---- the numbers ---------------------------------------------------------------------


def trace_data(trace: Trace) -> Layer:
    """Return a trace as data for the script."""
    size = sizes(trace)
    block, stored = _fit(size)
    data: Layer = {
        "size": size,
        "queries": _labels(trace, "q", size["q"]),
        "keys": _labels(trace, "k", size["k"]),
        "settings": number_settings(trace),
        "first": trace.first or {},
        "block": block,
        "kept": stored,
        "steps": [step_data(step, block, stored) for step in trace],
    }
    return data | steps_withheld(trace)


def steps_withheld(trace: Trace) -> schema.LayerOrigin:
    """Return why a trace of weights alone has no other step."""
    return {"steps_withheld": trace.step("weights").why} if trace.names == ("weights",) else {}


def _labels(trace: Trace, letter: str, size: int) -> list[str]:
    return [visible_in_browser(token) for token in trace.labels(letter, size)]


def number_settings(trace: Trace) -> dict[str, float]:
    """Return the settings that are finite numbers, which the script shows in its calculations."""
    return {
        name: value
        for name, value in (trace.settings or {}).items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def sizes(trace: Trace) -> dict[str, int]:
    """Return the size of each axis, from the weights or the first step that has the axis."""
    size: dict[str, int] = {}
    for step in (trace.step("weights"), *trace):
        for letter, length in zip(step.axes.split(), step.shape, strict=True):
            size.setdefault(letter, length)
    return size


def _fit(size: dict[str, int]) -> tuple[tuple[int, int] | None, list[int]]:
    """Return how many queries and keys a cell of a map pools (None: no pooling), and the queries to
    store."""
    heads = size.get("h", 1)
    side = max(64, min(MAP_SIDE, math.isqrt(MAP_CELLS // heads)))
    queries = size["q"]
    if max(queries, size["k"]) <= side:
        return None, list(range(queries))
    block = math.ceil(queries / side), math.ceil(size["k"] / side)
    return block, evenly(queries, max(4, ROW_CELLS // (heads * size["k"])))


def step_data(step: Step, block: tuple[int, int] | None, queries: list[int]) -> schema.Step:
    """Return a step as data for the script: its numbers and their positions."""
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
    stored = data["kept"]
    if block and pair:
        data["map"] = encoded_floats(_pooled(tensor, *block))
    if block and "q" in axes:
        stored["q"] = queries
    if "k" in axes and not pair and tensor.numel() > TOKEN_CELLS:
        keys = tensor.shape[axes.index("k")]
        stored["k"] = evenly(keys, max(4, TOKEN_CELLS * keys // tensor.numel()))
    for letter, positions in stored.items():
        index = torch.tensor(positions, device=tensor.device)
        tensor = tensor.index_select(axes.index(letter), index)
    return {**data, **encoded_floats(tensor)}


def _pooled(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Return the largest number of every block of rows x columns; NaN if the block has one."""
    return F.max_pool2d(matrix.double()[None], (rows, columns), ceil_mode=True)[0]


def encoded_floats(tensor: Tensor) -> Numbers:
    """Encode a tensor as float32, or as float64 if float32 would overflow or underflow."""
    double, single = tensor.double(), tensor.float()
    lost = (single.isinf() != double.isinf()) | ((single == 0) != (double == 0))
    return encoded(double, "f8") if lost.any() else encoded(single, "f4")


# ---- without a script ----------------------------------------------------------------


def _fallback(trace: Trace) -> str:
    """Return the weights of the first head as rows of a table, elided if long."""
    weights = panels(trace, trace.step("weights"), [0])[0].values
    rows, columns = (ends(length, 12) for length in weights.shape)
    queries, keys = (trace.labels(*axis) for axis in zip("qk", weights.shape, strict=True))
    lines = [["query \\ key", *(_token(keys, column) for column in columns)]]
    for row in rows:
        numbers = (_number(weights, row, column) for column in columns)
        lines.append([_token(queries, row), *numbers])
    return table(lines)


def _token(tokens: list[str], position: int | None) -> str:
    if position is None:
        return "…"
    return f"<bdi>{html.escape(visible_in_browser(tokens[position][:40]))}</bdi>"


def _number(weights: Tensor, row: int | None, column: int | None) -> str:
    return "…" if row is None or column is None else f"{weights[row, column]:.4f}"
