"""The page of a report: every head of a model, one head, one query.

It is bounded by what a screen can show and not by the text: each head brings a small map and the
largest weights of some of its queries; the steps themselves are there for short texts, and for one
head a layer of longer ones. The same script draws each layer as it draws a trace.
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import BadType, BadValue
from ...results.report import Findings, Head, Layer
from ...results.trace import AXES, Step, Trace
from ..escape import in_browser
from ..panels import evenly
from .document import document, stored, table, write
from .steps import data_of, settings_of, sizes, told

# Bytes before base64, which makes 4 of 3: all of a page stays below 3 MB.
MAP_BYTES = 1 << 20
LINK_BYTES = 700_000
FINE_BYTES = 400_000
WHOLE_BYTES = 2_000_000  # all steps of all heads, which then need neither maps nor links
SIDES = (256, 128, 64, 32, 16)  # of a map; each halves the one before, so bins nest
FEW_QUERIES, FEW_KEYS = 3, 12  # what is kept of one head of a long text, a query's steps in full
RECEIVERS = 8  # keys named for the weight they receive


def report_page(report: Findings, *, title: str | None = None, note: str = "") -> str:
    """The whole HTML document: the model, a head, a query. `title=None` is the report's name.

    Raises `BadValue` for a report without layers, or of a text without tokens, and `BadType` for
    the trace of one call.
    """
    if isinstance(report, Trace):
        raise BadType(
            "The page of a report was asked of a Trace.",
            "it shows every layer and head of a model.",
            "pass what report(...) returns; write_page makes the page of a trace.",
        )
    if not report.layers or any(not layer.map.numel() for layer in report.layers):
        raise BadValue(
            f"The report has {report.about}.",
            "a page draws at least one layer, one head and one token.",
            "report on a text of at least one token.",
        )
    return document(
        _data(report),
        title=report.name if title is None else title,
        about=report.about,
        note=note,
        caption="Every head in numbers: what it looks at, how surely, and its entropy in nats.",
        fallback=_fallback(report),
    )


def write_report(
    report: Findings, path: str | Path, *, title: str | None = None, note: str = ""
) -> Path:
    """Write `report_page(report)` to `path`, and return it. Raises `BadValue` where it cannot."""
    return write(report_page(report, title=title, note=note), path)


# ---- what the script reads -------------------------------------------------------------


def _data(report: Findings) -> dict[str, object]:
    heads = sum(len(layer.heads) for layer in report.layers)
    side = next((s for s in SIDES if heads * s * s <= MAP_BYTES), SIDES[-1])
    fine = next(s for s in SIDES if len(report.layers) * s * s <= FINE_BYTES or s == SIDES[-1])
    whole = sum(4 * step.tensor.numel() for x in report.layers for step in x.trace or ())
    return {
        "names": AXES,
        "tokens": [in_browser(token) for token in report.tokens],
        "layers": [
            _layer(layer, report.tokens, side, fine, heads, whole <= WHOLE_BYTES)
            for layer in report.layers
        ],
        "heads": [_head(head, layer) for layer in report.layers for head in layer.heads],
    }


def _head(head: Head, layer: Layer) -> dict[str, object]:
    most = layer.received[head.head].topk(min(RECEIVERS, layer.received.shape[-1]))
    return {
        "layer": head.layer,
        "head": head.head,
        "label": head.label,
        "number": round(head.number, 7),
        "entropy": round(head.entropy, 7),
        "effective": round(head.effective, 7),
        "shares": {name: round(share, 7) for name, share in head.shares.items()},
        "links": [[link.query, link.key, round(link.weight, 4)] for link in head.links],
        "received": [
            [key, round(weight, 3)]
            for weight, key in zip(most.values.tolist(), most.indices.tolist(), strict=True)
        ],
    }


def _layer(
    layer: Layer, tokens: Sequence[str], side: int, fine: int, heads: int, whole: bool
) -> dict[str, object]:
    """One layer as the script reads a trace; where its steps are not kept, its largest weights."""
    H, Tq, Tk = len(layer.heads), layer.queries, layer.received.shape[-1]
    trace = layer.trace
    said: dict[str, Any] = {"most": round(layer.most, 7), "module": in_browser(layer.module),
                            "crosses": layer.crosses}  # fmt: skip
    for axis, labels in (("queries", layer.query_tokens), ("keys", layer.key_tokens)):
        if labels is None:
            said[axis] = None  # the script numbers them
        elif list(labels) != list(tokens):
            said[axis] = [in_browser(label) for label in labels]
    if trace is not None and len(layer.traced) == H and whole:
        return {**said, **data_of(trace)}
    said |= {"size": {"h": H, "q": Tq, "k": Tk}, "settings": {}, "block": None}
    said |= _links(layer, heads, Tk)
    steps = _one_head(trace, layer) if trace is not None else [_nothing_but_weights(layer)]
    if trace is not None:
        said["size"] = {**sizes(trace), **said["size"], "g": layer.key_heads}
        said["settings"] = settings_of(trace)
    pooled = pool(layer.map, side, Tq)
    weights = next(step for step in steps if step["name"] == "weights")
    weights["map"] = _shades(pooled, pool(layer.seen.float(), side, Tq) > 0)
    if min(fine, *layer.map.shape[-2:]) > side:
        one = _telling(layer).head
        finer, seen = (pool(x, fine, Tq) for x in (layer.map[one], layer.seen.float()))
        weights["fine"] = {"head": one, **_shades(finer, seen > 0)}
    return {**said, "bins": list(pooled.shape[-2:]), "steps": steps}


def _nothing_but_weights(layer: Layer) -> dict[str, Any]:
    sizes = {"h": len(layer.heads), "q": layer.queries, "k": layer.received.shape[-1]}
    return {
        "name": "weights",
        "formula": "softmax(scores)",
        "why": "The softmax turns each row of scores into shares: positive, and 1 in all.",
        "axes": list(sizes),
        "shape": [list(pair) for pair in sizes.items()],
        "called": {letter: AXES[letter] for letter in sizes},
        "kept": {},
    }


def _telling(layer: Layer) -> Head:
    """The head to show most of: of those whose steps were kept, the one surest of its label."""
    return max((layer.heads[h] for h in layer.traced or range(len(layer.heads))),
               key=lambda head: head.number)  # fmt: skip


def _one_head(trace: Trace, layer: Layer) -> list[dict[str, Any]]:
    """The steps of the most telling head that was traced, for a few queries and keys in full."""
    head = _telling(layer)
    H, G = len(layer.heads), layer.key_heads
    queries = sorted(list(dict.fromkeys(link.query for link in head.links))[:FEW_QUERIES] or [0])
    slots = [slot for slot, query in enumerate(layer.kept) if query in queries]
    best = layer.keys[head.head, slots, :FEW_KEYS].flatten().tolist()
    keys = sorted({key for key in best if key >= 0} or {0})
    key_head = head.head // (H // G)
    # Where they stand in the trace, which may hold one head alone, and in the model.
    kept = {
        "h": ([layer.traced.index(head.head)], [head.head]),
        "g": ([key_head if len(layer.traced) == H else 0], [key_head]),
        "q": (queries, queries),
        "k": (keys, keys),
    }
    return [_cut(step, kept, {"h": H, "g": G}) for step in trace]


def _cut(
    step: Step, kept: Mapping[str, tuple[list[int], list[int]]], whole: Mapping[str, int]
) -> dict[str, Any]:
    letters, tensor = step.axes.split(), step.tensor.detach()
    cut = [x for x in letters if x in kept and not (x == "k" and "q" in letters)]
    for letter in cut:
        where = torch.tensor(kept[letter][0], device=tensor.device)
        tensor = tensor.index_select(letters.index(letter), where)
    said: dict[str, Any] = told(replace(step, tensor=tensor), None, [])
    said["kept"] = {letter: kept[letter][1] for letter in cut}
    pairs = zip(letters, step.shape, strict=True)
    said["shape"] = [[letter, whole.get(letter, length)] for letter, length in pairs]
    return said


def _links(layer: Layer, heads: int, Tk: int) -> dict[str, object]:
    """The largest weights of the queries kept: fewer of each, then of fewer queries."""
    wide = 2 if Tk <= 1 << 16 else 4
    each = LINK_BYTES // (heads * (2 + wide))
    n = max(min(3, layer.keys.shape[-1]), min(layer.keys.shape[-1], each // len(layer.kept)))
    # The queries of the strongest links lead here, so they are among those that are kept.
    led = {link.query for head in layer.heads for link in head.links[:FEW_QUERIES]}
    sure = {slot for slot, query in enumerate(layer.kept) if query in led}
    most = each // n if each // n >= len(layer.kept) else max(2, each // n - len(sure))
    slots = sorted(sure | set(evenly(len(layer.kept), most)))
    weights, keys = layer.weights[:, slots, :n], layer.keys[:, slots, :n].clamp(min=0)
    fixed = (weights.clamp(0, 1).double() * 65535).round()
    return {
        "kept": [layer.kept[slot] for slot in slots],
        "links": {
            "n": n,
            "weights": stored(fixed, "u2"),
            "keys": stored(keys, f"u{wide}"),
        },
    }


# ---- maps ------------------------------------------------------------------------------


def pool(maps: Tensor, side: int, Tq: int) -> Tensor:
    """Maps (H, r, c) as `stats.map` pools them, pooled on to at most `side` bins a side.

    r and c are either the text itself or a multiple of `side`, so bins nest, and the result is what
    `stats.map(side, side)` would have given.
    """
    rows, cols = maps.shape[-2:]
    down, across = min(side, rows), min(side, cols)
    count = _width(Tq, rows)
    into = _member(rows, down).double() * count
    shares = into / into.sum(-1, keepdim=True)
    return (shares @ maps.double() @ _member(cols, across).double().T).float()


def _width(size: int, bins: int) -> Tensor:
    """How many positions fall into each bin."""
    edges = torch.arange(bins + 1) * size // bins
    return edges.diff()


def _member(bins: int, fewer: int) -> Tensor:
    """(fewer, bins): which bins fall into which, by their first position."""
    edges = torch.arange(fewer + 1) * bins // fewer
    at = torch.arange(bins)
    return (at >= edges[:-1, None]) & (at < edges[1:, None])


def _shades(maps: Tensor, seen: Tensor) -> dict[str, object]:
    """One byte a cell, for the eye: the square root of its share of the largest, in 255 shades.
    The darkest is 1; 0 is where the mask lets nobody look."""
    top = max(float(maps.max()), 1e-30)
    shades = (maps.clamp(min=0) / top).sqrt().mul(254).round() + 1
    return {"top": top, **stored(shades.where(seen, 0), "u1")}


# ---- without a script ------------------------------------------------------------------


def _fallback(report: Findings) -> str:
    names = list(dict.fromkeys(name for x in report.layers for h in x.heads for name in h.shares))
    rows = [["layer, head", "does", "by", "entropy", *map(html.escape, names)]]
    for layer in report.layers:
        for head in layer.heads:
            shares = (f"{head.shares[n]:.2f}" if n in head.shares else "" for n in names)
            numbers = (head.by, f"{head.entropy:.2f}")
            place = f"{head.layer}, {head.head}"
            rows.append([place, html.escape(in_browser(head.label)), *numbers, *shares])
    return table(rows)
