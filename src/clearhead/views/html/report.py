"""Write the page of a report: every head of a model, one head, one query.

Its size is bounded for any length of the text: it has a small map of each head, the largest weights
of queries, and every step of as many heads as fit. The script draws each layer like a trace.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.errors import BadValue, must_be
from ...core.formatting import AXES, evenly, joined_text, visible_in_browser
from ...models.report import Layer, Report
from ...models.report.opening import Opening, opening
from ...models.why import Why
from . import schema
from .document import document, encoded, fields_of, table, write
from .exact_steps import ExactHeads, exact_heads, steps_of_heads
from .live import model_data
from .schema import Host
from .steps import number_settings, sizes, spelling_of, steps_withheld, trace_data
from .why import why_data


class Budget(NamedTuple):
    """Limits of a page in bytes before base64, which adds a third.

    If the steps of all heads fit `all_steps`, no maps and links are stored; otherwise `steps` is
    for those of some heads. `maps`, the `largest` weights, `norms` of values and `fine`, the larger
    map of one head per layer, are for all heads together.
    """

    all_steps: int
    steps: int
    maps: int
    largest: int
    norms: int = 300_000
    fine: int = 400_000


# In a notebook, or from a server, which computes further steps: below 3 MB.
SMALL = Budget(all_steps=2_000_000, steps=300_000, maps=1 << 20, largest=700_000)
# A file, which computes no others: every step of the heads with a role, for some 128 tokens.
FILE = Budget(all_steps=12_000_000, steps=12_000_000, maps=1_200_000, largest=2_000_000)
# With an image, whose maps are pictures.
PICTURE = Budget(all_steps=2_000_000, steps=1_000_000, maps=10_000_000, largest=1_000_000)
SIDES = (256, 128, 64, 32, 16)  # of a map, halved each time, so that bins nest
LINKED_QUERIES = 3  # of a head, whose largest weights are stored in any case


def report_page(
    report: Report,
    *,
    title: str | None = None,
    note: str = "",
    beside: Report | None = None,
    ahead: Report | None = None,
    why: Sequence[Why] | str = (),
    host: Host | None = None,
    budget: Budget = SMALL,
) -> str:
    """Return the HTML document that shows a model, a head and a query.

    ``title=None`` uses the name of the model. `beside` is the report of another model on the same
    text, for comparison of heads. `ahead` is that of the same model without the heads that write
    the next token, which a page without the model shows as What if. `why` is the result of
    `why_ahead`. `host` is the program that recomputes the page for another text or for edits
    (`serve`, `notebook`). `budget` decides how many heads have every step.

    Raises `BadValue` for a report without layers or tokens, and if `beside` has another text;
    `BadType` for anything but a report.
    """
    must_be("report_page", report, Report, "report(...); for a trace, use write_page")
    if not report.layers or any(not layer.pooled.numel() for layer in report.layers):
        rule = "a page draws at least one layer, one head and one token."
        hint = "report on a text of at least one token."
        raise BadValue(f"The report has {report.about}.", rule, hint)
    if beside is not None:
        must_be("report_page(beside=)", beside, Report, "report(...)")
    if beside is not None and beside.text != report.text:
        gave = f"The reports have the texts {report.text[:80]!r} and {beside.text[:80]!r}."
        rule = "two models are compared on one text."
        raise BadValue(gave, rule, "report on the same text with both.")
    without_writers: schema.Ahead | None = None
    if ahead is not None:
        off = [(x.layer, x.head) for x in report.writers]
        without_writers = {"off": off, "snapshot": snapshot(ahead)}
    return document(
        _with_why(snapshot(report, budget), why),
        title=f"Attention in {report.name}" if title is None else title,
        about=report.about,
        note=note,
        caption="Every head in numbers: what it looks at, how much, and its entropy in nats.",
        fallback=_fallback(report),
        host=host,
        model=None if report.model is None else model_data(report.model),
        folder="" if host else _from_home(report.folder),
        ahead=without_writers,
        beside=None if beside is None else snapshot(beside),
    )


def write_report(
    report: Report,
    path: str | Path,
    *,
    title: str | None = None,
    note: str = "",
    beside: Report | None = None,
    ahead: Report | None = None,
    why: Sequence[Why] | str = (),
) -> Path:
    """Write `report_page(report, ...)` to `path` and return the path. A file may be larger than a
    page in a notebook, so it has the steps of more heads.

    Raises any error of `report_page`, and `BadValue` if the file cannot be written.
    """
    page = report_page(
        report, title=title, note=note, beside=beside, ahead=ahead, why=why, budget=FILE
    )
    return write(page, path)


def _with_why(data: schema.Snapshot, why: Sequence[Why] | str) -> schema.Snapshot:
    if isinstance(why, str):
        return {**data, "why_withheld": visible_in_browser(why)}
    return {**data, "why": [why_data(result) for result in why]}


def _from_home(folder: str) -> str:
    """Return a path with ~ for the folder of the user, who may share the page."""
    home = Path.home()
    is_inside = bool(folder) and Path(folder).is_relative_to(home)
    return f"~/{Path(folder).relative_to(home).as_posix()}" if is_inside else folder


# ---- what the script reads -------------------------------------------------------------


def snapshot(report: Report, budget: Budget = SMALL) -> schema.Snapshot:
    """Return a report as data for the script."""
    heads = sum(len(layer.heads) for layer in report.layers)
    longest = max(max(x.pooled.shape[-2:]) for x in report.layers)
    pictures = list(dict.fromkeys(x.picture for x in report.layers if x.picture is not None))
    budget = PICTURE if pictures and budget is FILE else budget
    sides = (
        s for s in (max(longest, SIDES[0]), *SIDES) if heads * min(s, longest) ** 2 <= budget.maps
    )
    page = _Page(
        heads,
        next(sides, SIDES[-1]),
        next(s for s in SIDES if len(report.layers) * s * s <= budget.fine or s == SIDES[-1]),
        budget,
        report.tokens,
        begin := opening(report),
    )
    step_bytes = sum(4 * step.tensor.numel() for x in report.layers for step in x.trace or ())
    is_complete = step_bytes <= budget.all_steps and all(
        len(x.traced_heads) == len(x.heads) for x in report.layers
    )
    exact = None if is_complete else exact_heads(report, begin, budget.steps)
    data: schema.Snapshot = {
        "names": AXES,
        "name": visible_in_browser(report.name),
        "tokens": [visible_in_browser(token) for token in report.tokens],
        "text": report.text or joined_text(report.tokens),
        "about": report.about,
        "unknown": list(report.unknown),
        "guesses": None
        if report.guesses is None
        else [
            [(visible_in_browser(str(word)), float(f"{p:.4g}")) for word, p in guesses]
            for guesses in report.guesses
        ],
        "layers": [
            _layer(layer, page, None if exact is None else exact[layer.number])
            | {"part": report.part_of(layer)}
            for layer in report.layers
        ],
        "heads": [
            fields_of(
                schema.Head,
                head,
                roles=[role.label for role in head.roles],
                masses=[(role.mass, role.queries) for role in head.roles],
            )
            for head in report.heads
        ],
    }
    if pictures:
        data["images"] = [encoded(picture.pixels, "u1") for picture in pictures]
    for layer, of_page in zip(report.layers, data["layers"], strict=True):
        if (picture := layer.picture) is not None:
            registers = [x.token for x in report.registers_of(layer)]
            own = {"before": len(picture.before), "image": pictures.index(picture)}
            more = {"block": page.block(layer), "registers": registers}
            of_page["picture"] = fields_of(schema.Picture, picture, **own, **more)
    if spelling := spelling_of(report.tokens):
        data["spelling"] = spelling
    if begin is not None:
        at = begin.head
        data["begin"] = {"layer": at.layer, "head": at.head, "query": begin.query}
    if (next_token := report.next_token) is not None:
        data["next_token"] = replace(next_token, token=visible_in_browser(next_token.token))
    if report.effect_metric:
        data["effect_metric"] = visible_in_browser(report.effect_metric)
    if report.effects_withheld:
        data["effects_withheld"] = report.effects_withheld
    if report.outputs:
        data["outputs"] = report.outputs
    return data


class _Page(NamedTuple):
    """What the layers of a page share: the number of all heads, the sides of a map and of a fine
    one, the budget, the tokens, and where the page opens."""

    heads: int
    side: int
    fine: int
    budget: Budget
    tokens: Sequence[str]
    begin: Opening | None

    def block(self, layer: Layer) -> int | None:
        """Return the side of the blocks of patches that are cells of a layer's map; None if the
        map has none."""
        if layer.picture is None or layer.block is None:
            return None
        most = max(SIDES[-1], math.isqrt(self.budget.maps // self.heads))
        return layer.picture.block(most, layer.block)


def _layer(layer: Layer, page: _Page, exact: ExactHeads | None) -> schema.Layer:
    """Return a layer as data for the script, in the format of a trace.

    It has every step of every head if `exact` is None, or else maps, the largest weights of
    queries, and the steps of the heads of `exact`.
    """
    if exact is None:
        assert layer.trace is not None
        data = trace_data(layer.trace)
    else:
        data = _pooled_layer(layer, page, exact)
    data |= _norms(layer, page)
    data["max_entropy"] = round(layer.max_entropy, 7)
    data["module"] = visible_in_browser(layer.module) if layer.module else ""
    data["cross_attention"] = layer.cross_attention
    return data


def _norms(layer: Layer, page: _Page) -> schema.LayerNorms:
    """Return the norms of the values of a layer, or why the page does not have them."""
    norms = layer.value_norms
    if norms is None:
        return {"norms_withheld": visible_in_browser(layer.norms_withheld or "It is unknown.")}
    if 2 * page.heads * norms.shape[-1] > page.budget.norms:
        return {"norms_withheld": "The page of a long text does not have the norms of all values."}
    top = float(norms.max().clamp(min=1e-30))
    if not math.isfinite(top):
        return {"norms_withheld": "Some values of this layer are NaN or infinite."}
    return {"norms": encoded((norms / top * 65535).round(), "u2")}


def _pooled_layer(layer: Layer, page: _Page, exact: ExactHeads) -> schema.Layer:
    trace, Tq, Tk = layer.trace, layer.queries, layer.received.shape[-1]
    size = {"h": len(layer.heads), "q": Tq, "k": Tk}
    steps = [_weights_step(layer)]
    if trace is not None:
        size = {**sizes(trace), **size, "g": layer.key_heads}
        steps = steps_of_heads(layer, exact)
    block, pool_map = page.block(layer), partial(pool, side=page.side, Tq=Tq)
    if block is not None:
        pool_map = partial(pool_blocks, layer=layer, block=block)
    pooled = pool_map(layer.pooled)
    weights = next(step for step in steps if step["name"] == "weights")
    weights["map"] = _shades(pooled, pool_map(layer.allowed.float()) > 0)
    is_coarse = min(page.fine, *layer.pooled.shape[-2:]) > page.side
    if is_coarse and not exact.heads and block is None:
        head = max(layer.heads, key=lambda head: head.number).head
        of_head, allowed = (
            pool(x, page.fine, Tq) for x in (layer.pooled[head], layer.allowed.float())
        )
        weights["fine"] = {"head": head, **_shades(of_head, allowed > 0)}
    stored, largest = _largest_weights(layer, page)
    data: schema.Layer = {
        "size": size,
        "settings": {} if trace is None else number_settings(trace),
        "kept": stored,
        "links": largest,
        "bins": (pooled.shape[-2], pooled.shape[-1]),
        "steps": steps,
    }
    if trace is not None:
        data |= steps_withheld(trace)
    if layer.query_tokens is None or list(layer.query_tokens) != list(page.tokens):
        data["queries"] = _visible(layer.query_tokens)
    if layer.key_tokens is None or list(layer.key_tokens) != list(page.tokens):
        data["keys"] = _visible(layer.key_tokens)
    return data


def _visible(labels: Sequence[str] | None) -> list[str] | None:
    return None if labels is None else [visible_in_browser(label) for label in labels]


def _weights_step(layer: Layer) -> schema.Step:
    """Return the step of the weights, without numbers."""
    sizes = {"h": len(layer.heads), "q": layer.queries, "k": layer.received.shape[-1]}
    return {
        "name": "weights",
        "formula": "softmax(scores)",
        "why": "The softmax turns each row of scores into weights: positive, with the sum 1.",
        "axes": list(sizes),
        "shape": list(sizes.items()),
        "axis_names": {letter: AXES[letter] for letter in sizes},
        "kept": {},
    }


def _largest_weights(layer: Layer, page: _Page) -> tuple[list[int], schema.Links]:
    """Return some queries and their largest weights: as many as fit, at least 3 per query.

    If they do not fit, there are fewer queries.
    """
    key_bytes = 2 if layer.received.shape[-1] <= 1 << 16 else 4
    per_head = page.budget.largest // (page.heads * (4 + key_bytes))
    available, count = layer.top_keys.shape[-1], len(layer.kept_queries)
    n = max(min(3, available), min(available, per_head // count))
    # Always stored: the queries of the strongest links, to which the page refers, and the one with
    # which it opens.
    linked = {link.query for head in layer.heads for link in head.links[:LINKED_QUERIES]}
    if page.begin is not None:
        linked.add(page.begin.query)
    needed = {row for row, query in enumerate(layer.kept_queries) if query in linked}
    most = per_head // n if per_head // n >= count else max(2, per_head // n - len(needed))
    rows = sorted(needed | set(evenly(count, most)))
    weights, keys = layer.top_weights[:, rows, :n], layer.top_keys[:, rows, :n].clamp(min=0)
    return [layer.kept_queries[row] for row in rows], {
        "n": n,
        "weights": encoded(weights, "f4"),
        "keys": encoded(keys, "u2" if key_bytes == 2 else "u4"),
    }


# ---- maps ------------------------------------------------------------------------------


def pool(maps: Tensor, side: int, Tq: int) -> Tensor:
    """Pool maps (H, r, c) of `stats.pooled` to at most `side` bins per side.

    This is a mean over queries and a sum over keys. r and c are the length of the text or a
    multiple of `side`, so bins nest, and the result is that of `stats.pooled(side, side)`.
    """
    rows, cols = maps.shape[-2:]
    down, across = min(side, rows), min(side, cols)
    sizes = (torch.arange(rows + 1) * Tq // rows).diff()  # the queries of each row
    return _pooled(maps, _bin_members(rows, down), sizes, _bin_members(cols, across))


def pool_blocks(maps: Tensor, layer: Layer, block: int) -> Tensor:
    """Pool maps (H, c, c) of a layer with an image to larger blocks of patches."""
    assert layer.picture is not None and layer.block is not None
    cells, larger = layer.picture.cells(layer.block), layer.picture.cells(block)
    members = torch.zeros(int(larger.max()) + 1, maps.shape[-1])
    members[larger, cells] = 1.0
    return _pooled(maps, members, cells.bincount(), members)


def _pooled(maps: Tensor, rows: Tensor, sizes: Tensor, columns: Tensor) -> Tensor:
    """Return the means over rows, with `sizes` queries, and the sums over columns, of the members
    of each bin."""
    members = rows.double() * sizes
    mean = members / members.sum(-1, keepdim=True)
    return (mean @ maps.double() @ columns.double().T).float()


def _bin_members(bins: int, fewer: int) -> Tensor:
    """Return booleans, (fewer, bins): whether a larger bin contains a smaller one."""
    edges = torch.arange(fewer + 1) * bins // fewer
    numbers = torch.arange(bins)
    return (numbers >= edges[:-1, None]) & (numbers < edges[1:, None])


def _shades(maps: Tensor, allowed: Tensor) -> schema.Shades:
    """Encode maps with one byte per cell, as `schema.Shades`."""
    top = max(float(maps.nan_to_num(0.0).max()), 1e-30)
    shades = (maps.nan_to_num(0.0).clamp(min=0) / top).sqrt().mul(254).round() + 1
    return {"top": top, **encoded(shades.where(allowed, 0), "u1")}


# ---- without a script ------------------------------------------------------------------


def _fallback(report: Report) -> str:
    names = list(dict.fromkeys(name for x in report.layers for h in x.heads for name in h.shares))
    columns = ("itself" if name == "same" else html.escape(name) for name in names)
    rows = [["head", "role", "score", "entropy", *columns]]
    for layer in report.layers:
        for head in layer.heads:
            shares = (f"{head.shares[n]:.2f}" if n in head.shares else "" for n in names)
            name, label = f"L{head.layer}H{head.head}", html.escape(visible_in_browser(head.label))
            rows.append([name, label, head.share_text, f"{head.entropy:.2f}", *shares])
    return table(rows)
