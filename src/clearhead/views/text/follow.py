"""Print one query in full: every product, exponential and sum up to its output."""

import math
import re
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ...core.errors import BadValue
from ...core.formatting import ends, number, spellings, visible
from ...core.functional.trace import Trace
from ..panels import choose_heads, panel_of
from .show import check_trace, heading, indented, print_batch_note, unwrapped

MOST = 12  # printed terms of a sum, and printed keys


class Line(NamedTuple):
    """``position label   sum = result``: one line of arithmetic."""

    position: str
    label: str
    sum: str
    result: str


GAP = Line("…", "", "", "…")
Computed: TypeAlias = tuple[list[Line], Tensor]  # a step in lines, and its result


def follow(
    trace: Trace,
    query: int | str,
    *,
    console: Console | None = None,
    head: int = 0,
    decimals: int = 4,
) -> None:
    """Print how the output of one query is computed.

    It prints q · k term by term, the softmax, and the weighted sum of values; before these,
    embedding plus position, and the projection, if the trace has them.

    `query` is a position or a token; for a repeated token, its first position. Everything is
    recomputed in float64, and the last line has the largest difference from the trace. If there are
    many keys, only those with the largest weights are printed. Raises `BadValue` for a query or a
    head that does not exist.
    """
    check_trace(trace, decimals)
    positions = find(trace, query)
    row, [head] = positions[0], choose_heads(trace, [head])
    for name in ("query", "key", "value", "weights"):
        trace.step(name)
    with unwrapped(console) as out:
        print_batch_note(out, trace)
        out.print(Text(_title(trace, positions, head), style="bold"))
        one, largest_error, elided = Query(trace, row, head, decimals), 0.0, False
        for ordinal, step in enumerate(trace, 1):
            if step.name not in COMPUTED or not REQUIRED.get(step.name, set()) <= set(trace.names):
                continue
            lines, result = COMPUTED[step.name](one)
            out.print()
            out.print(heading(ordinal, step))
            out.print(indented(_table(lines)))
            elided |= any("…" in line.position + line.sum for line in lines)
            errors = (one.traced(step.name)[row] - result).abs()
            largest_error = max([largest_error, *errors[errors.isfinite()].tolist()])
        out.print()
        if elided:
            out.print(Text("… replaces terms that are in the sums but not printed."))
        out.print(
            Text(
                "Computed in float64 and rounded for printing; no step of the trace differs by "
                f"more than {largest_error:.0e}."
            )
        )


def find(trace: Trace, query: int | str) -> list[int]:
    """Return the positions of `query`; the first one is followed.

    A string is a token if the trace has it, else the digits of a position.
    """
    size = trace.size("q") or 0
    labels = trace.labels("q", size)
    if isinstance(query, str):
        positions = [i for i, label in enumerate(labels) if query in spellings(label)]
        if positions:
            return positions
        if re.fullmatch("[0-9]+", query):
            query = int(query)
    if isinstance(query, int) and -size <= query < size:
        return [query % size]
    known = ", ".join(
        "…" if i is None else f"{i} {visible(labels[i])}" if trace.queries else str(i)
        for i in ends(size, 2 * MOST)
    )
    name = f"“{visible(query, 60)}”" if isinstance(query, str) else str(query)
    rule = "a query is one of the tokens, or its position counted from 0."
    hint = f"pass one of these: {known}." if size else "explain a text of at least one token."
    raise BadValue(f"There is no query {name} in this trace.", rule, hint)


class Query:
    """One query of one head.

    Each method computes the step of its name from the step before, and returns lines and result.
    """

    def __init__(self, trace: Trace, row: int, head: int, decimals: int):
        self.trace, self.row, self.head, self.decimals = trace, row, head, decimals
        self.q = self.traced("query")[row]
        self.k, self.v = self.traced("key"), self.traced("value")
        self.keys = _largest(self.traced("weights")[row])
        self.x = self.weights = torch.zeros(0)  # the scores so far, and the weights

    def inputs(self) -> Computed:
        a, b = self.traced("embeddings")[self.row], self.traced("positions")[self.row]
        return self.each_feature(lambda i: f"{self.signed(a[i])} + {self.signed(b[i])}", a + b)

    def query(self) -> Computed:
        x, matrix = self.traced("inputs")[self.row], self.traced("W_query")
        terms = ends(len(x), MOST)
        return self.each_feature(lambda i: self.products(x, matrix[:, i], terms), x @ matrix)

    def scores(self) -> Computed:
        self.x = (self.q * self.k).sum(1)
        terms = ends(len(self.q), MOST)
        return self.each_key(lambda j: self.products(self.q, self.k[j], terms), self.x)

    def scaled(self) -> Computed:
        before, scale = self.x, self.setting("scale")
        self.x = before * scale
        return self.each_key(lambda j: f"{self.signed(before[j])} · {scale:.6g}", self.x)

    def capped(self) -> Computed:
        before, cap, write = self.x, self.setting("softcap"), self.write
        self.x = cap * torch.tanh(before / cap)
        return self.each_key(lambda j: f"{cap:g} · tanh({write(before[j])} / {cap:g})", self.x)

    def biased(self) -> Computed:
        # The trace has the sums but not the bias, which is their difference.
        names, signed = self.trace.names, self.signed
        earlier = self.traced(names[names.index("biased") - 1])[self.row]
        before, bias = self.x, self.traced("biased")[self.row] - earlier
        self.x = before + bias
        return self.each_key(lambda j: f"{signed(before[j])} + {signed(bias[j])}", self.x)

    def masked(self) -> Computed:
        blocked = self.traced("masked")[self.row] == -math.inf
        self.x = self.x.masked_fill(blocked, -math.inf)
        return self.each_key(lambda j: "✗ may not look" if blocked[j] else "✓ may look", self.x)

    def softmax(self) -> Computed:
        x, write = self.x, self.write
        top = x.max()
        if top == -math.inf:
            self.weights = torch.zeros_like(x)
            return [Line("", "", "this query is fully masked, so every weight is", write(0))], x * 0
        exps = torch.exp(x - top)
        # A sink adds its exponential to the sum, so the weights of the trace sum to less than 1.
        total_weight = float(self.traced("weights")[self.row].sum())
        sink = float(exps.sum()) * (1 / total_weight - 1) if total_weight else math.inf
        sink = sink if sink > 1e-5 else 0.0
        total = exps.sum() + sink
        self.weights = exps / total
        summed = " + ".join("…" if j is None else write(exps[j]) for j in self.keys)
        lines, _ = self.each_key(lambda j: f"exp({write(x[j])} − {self.signed(top)})", exps)
        ratios, _ = self.each_key(lambda j: f"{write(exps[j])} / {write(total)}", self.weights)
        return [
            Line("", "max", f"the score of key {self.name(int(x.argmax()))}", write(top)),
            *lines,
            Line("", "sum", summed + f" + {write(sink)} (the sink)" * (sink > 0), write(total)),
            *ratios,
        ], self.weights

    def dropped(self) -> Computed:
        before, p, write = self.weights, self.setting("dropout"), self.write
        zeroed = (self.traced("dropped")[self.row] == 0) & (before > 0)
        self.weights = torch.where(zeroed, 0.0, before / (1 - p))
        return self.each_key(
            lambda j: "dropped" if zeroed[j] else f"{write(before[j])} / (1 − {p:g})", self.weights
        )

    def output(self) -> Computed:
        # A key of weight 0 contributes 0, even if its value is NaN or infinite.
        ignored = (self.weights == 0)[:, None] & ~self.v.isfinite()
        value, w = self.v.masked_fill(ignored, 0.0), self.weights
        return self.each_feature(lambda i: self.products(w, value[:, i], self.keys), w @ value)

    def each_key(self, sum: Callable[[int], str], results: Tensor) -> Computed:
        return [
            GAP if j is None else Line(str(j), self.token(j), sum(j), self.write(results[j]))
            for j in self.keys
        ], results

    def each_feature(self, sum: Callable[[int], str], results: Tensor) -> Computed:
        return [
            Line("", "…", "", "…")
            if i is None
            else Line("", f"feature {i}", sum(i), self.write(results[i]))
            for i in ends(len(results), MOST)
        ], results

    def products(self, a: Tensor, b: Tensor, terms: list[int | None]) -> str:
        return " + ".join(
            "…" if i is None else f"{self.signed(a[i])}·{self.signed(b[i])}" for i in terms
        )

    def write(self, x: Tensor | float) -> str:
        return number(float(x), self.decimals)

    def signed(self, x: Tensor | float) -> str:
        return f"({self.write(x)})" if self.write(x)[0] in "-−" else self.write(x)

    def token(self, j: int) -> str:
        return visible(self.trace.keys[j]) if self.trace.keys else ""

    def name(self, j: int) -> str:
        return f"{j} {self.token(j)}".rstrip()

    def setting(self, name: str) -> float:
        value = (self.trace.settings or {}).get(name)
        if isinstance(value, int | float):
            return value
        rule = "follow needs the settings of the call."
        hint = f"create the trace with explain, or add {name!r} to its settings."
        raise BadValue(f"The settings of this trace lack {name!r}.", rule, hint)

    def traced(self, name: str) -> Tensor:
        """Return the matrix of this head at a step of the trace."""
        return panel_of(self.trace, name, self.head, "follow needs").values


COMPUTED: dict[str, Callable[[Query], Computed]] = {"weights": Query.softmax} | {
    name: getattr(Query, name)
    for name in "inputs query scores scaled capped biased masked dropped output".split()
}


# Steps that are computed only if the trace has their inputs.
REQUIRED = {"inputs": {"embeddings", "positions"}, "query": {"inputs", "W_query"}}


def _largest(weights: Tensor) -> list[int | None]:
    """Return the keys of the `MOST` largest weights, by position, with a None for each gap."""
    chosen = sorted(weights.argsort(descending=True, stable=True)[:MOST].tolist())
    keys: list[int | None] = []
    for before, j in zip([-1, *chosen], chosen, strict=False):
        keys += [j] if j == before + 1 else [None, j]
    return keys if not chosen or chosen[-1] == len(weights) - 1 else [*keys, None]


def _title(trace: Trace, positions: list[int], head: int) -> str:
    label = trace.labels("q", trace.size("q") or 0)[positions[0]]
    at = trace.number("q", positions[0])
    name = f"The query “{visible(label)}” at {at}" if trace.queries else f"The query at {at}"
    of_head = f", head {head}" if (trace.size("h") or 1) > 1 else ""
    others = ", ".join(map(str, positions[1:]))
    also = f" (the first of several; also at {others})" if others else ""
    return f"{name}{of_head}, in full{also}"


def _table(lines: list[Line]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False)
    positions, labels = any(line.position for line in lines), any(line.label for line in lines)
    if positions:
        table.add_column(justify="right", style="dim", no_wrap=True)
    if labels:
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    # The result is at the end of the last line of a sum.
    table.add_column(no_wrap=True, vertical="bottom")
    table.add_column(justify="right", no_wrap=True, vertical="bottom", style="bold")
    for line in lines:
        position, label, sum, result = line
        left = [position] * positions + [label + " "] * labels
        table.add_row(*map(Text, (*left, sum, "" if result == "…" else "=", result)))
    return table
