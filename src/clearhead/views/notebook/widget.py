"""The notebook widget: a page in a frame, its selection, and its requests."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, urlencode

import anywidget
import traitlets

from ...core.errors import BadType, BadValue, as_index, did_you_mean, kind_of
from ...core.formatting import spellings
from ...core.functional.trace import Trace
from ...models.report import Report
from ...models.report.opening import opening
from ...models.report.text_model import TextModel
from .. import cells, html
from ..html.document import WIDGET, as_json
from ..serve import Reader
from ..serve.answer import answer
from ..serve.reader import Cancelled

Model: TypeAlias = str | Path | TextModel | Trace | None


class Explorer(anywidget.AnyWidget):
    """The widget of `clearhead.views.explore`.

    `head` is the selected (layer, head), and `query` the position of the selected query, or None.
    Both can be set and observed; a query also by its word. Setting a head or query that does not
    exist raises `BadValue`, and the selection stays. `text` is the last text.

    The page is sent when a cell shows it, and is not stored in the notebook's file. A picture of
    the heads is, and after a change that of the selection, which is shown where no Python runs.
    """

    _esm = WIDGET.read_text(encoding="utf-8")

    address = traitlets.Unicode("").tag(sync=True)
    picture = traitlets.Unicode("").tag(sync=True)
    head = traitlets.Any((0, 0))
    query = traitlets.Any(None)
    text = traitlets.Unicode("", read_only=True)

    def __init__(self, model: Model, text: str | None) -> None:
        self._runs: dict[str, threading.Event] = {}
        self._reader: Reader | None = None
        self._report: Report | None = None  # of the text, for the picture of a selection
        begin = report = None
        if (text is None) != isinstance(model, Trace):
            gave = f"explore got {kind_of(model)} and {kind_of(text)} for a text."
            rule = "a model needs a text; a trace has one."
            raise BadType(gave, rule, "pass explore(model, text) or explore(trace).")
        if isinstance(model, Trace):
            self._tokens = list(model.queries or ())
            self._sizes = [(model.size("h") or 1, model.size("q") or 0)]
            self._page = html.page(model, host="frame")
            picture = cells.html_of(model)
        else:
            self._reader = Reader(model)
            report = self._reader.report(str(text), progress=None)
            self._tokens = list(report.tokens)
            self._sizes = [(len(layer.heads), layer.queries) for layer in report.layers]
            self._page = html.report_page(report, host="notebook")
            picture = cells.still(report)
            begin = opening(report)
        super().__init__()
        self.set_trait("text", text or "")
        self.picture = picture
        if begin is not None:  # the selection with which the page opens
            self.head, self.query = (begin.head.layer, begin.head.head), begin.query
        self._report = report
        self.on_msg(self._receive)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """Return the data of a cell: the widget, and its picture for viewers without widgets."""
        bundle = super()._repr_mimebundle_(**options)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        if data is not None:
            data["text/html"] = self.picture
        return bundle

    # ---- the selection ---------------------------------------------------------------

    @traitlets.validate("head")
    def _valid_head(self, proposal: Any) -> tuple[int, int]:
        value, hint = proposal["value"], "set for example explorer.head = 0, 0."
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise BadType(f"head={value!r} was set.", "head is (layer, head).", hint)
        layers = len(self._sizes)
        rule = f"layers are counted from 0 to {layers - 1}; -1 is the last."
        layer = as_index("Layer", value[0], layers, rule, hint)
        heads, _ = self._sizes[layer]
        rule = f"heads of layer {layer} are counted from 0 to {heads - 1}; -1 is the last."
        return layer, as_index("Head", value[1], heads, rule, hint)

    @traitlets.validate("query")
    def _valid_query(self, proposal: Any) -> int | None:
        value, last = proposal["value"], self._queries - 1
        if value is None:
            return None
        rule = f"a query is a word of the text, or its position from 0 to {last}; -1 is the last."
        hint = f"set for example explorer.query = {last}, or None for no query."
        if not isinstance(value, str):
            return as_index("Query", value, self._queries, rule, hint)
        position = self._position(value)
        if position is None:
            hint = did_you_mean(value, self._tokens) or hint
            raise BadValue(f"Query {value!r} was requested.", rule, hint)
        return position

    @traitlets.observe("address")
    def _on_address(self, change: Any) -> None:
        """Read the selection from the address after a click.

        As in the page, heads and queries that do not exist are ignored.
        """
        fields = dict(parse_qsl(change["new"].removeprefix("#")))
        layer, head, query = (fields.get(name, "") for name in ("layer", "head", "query"))
        with self.hold_trait_notifications():
            if layer.isdecimal() and head.isdecimal() and self._exists(int(layer), int(head)):
                self.head = int(layer), int(head)
            position = self._position(query)
            if query == "none" or (query and position is not None):
                self.query = position

    @traitlets.observe("head", "query")
    def _on_choice(self, change: Any) -> None:
        """Write a selection made in Python to the address, which the page follows."""
        fields = dict(parse_qsl(self.address.removeprefix("#")))
        wanted = {"layer": str(self.head[0]), "head": str(self.head[1])}
        if self._position(fields.get("query", "none")) != self.query:
            wanted["query"] = "none" if self.query is None else str(self.query)
        if wanted.items() - fields.items():
            self.address = "#" + urlencode({**fields, **wanted})
            report, query = self._report, self.query
            if report is not None and query in report.layers[self.head[0]].kept_queries:
                self.picture = cells.still(replace(report, begin=(*self.head, query)))

    def _exists(self, layer: int, head: int) -> bool:
        return layer < len(self._sizes) and head < self._sizes[layer][0]

    @property
    def _queries(self) -> int:
        """The number of queries of the selected head's layer."""
        return self._sizes[self.head[0]][1]

    def _position(self, query: str) -> int | None:
        """Return the position of a query, given as a word or a number; None for "none", and for a
        query that does not exist."""
        if query.isdecimal():
            return int(query) if int(query) < self._queries else None
        words = [{x.lower() for x in spellings(t)} for t in self._tokens[: self._queries]]
        named = (i for i, word in enumerate(words) if query != "none" and query.lower() in word)
        return next(named, None)

    # ---- requests --------------------------------------------------------------------

    def _receive(self, _: object, message: dict[str, Any], buffers: object) -> None:
        """Handle a message from a cell, which requests the page, makes a request, or ends one."""
        if message.get("page"):
            self.send({"page": self._page})
            return
        number, path = str(message.get("id")), message.get("path")
        if message.get("end"):
            if number in self._runs:
                self._runs[number].set()
        elif self._reader is not None and path in ("compute", "tile", "steps", "why"):
            self._runs[number] = threading.Event()
            arguments = self._reader, number, path, message.get("request")
            threading.Thread(target=self._compute, args=arguments, daemon=True).start()

    def _compute(self, reader: Reader, number: str, path: str, request: object) -> None:
        """Respond to a request, in a thread, so that a message to end it can arrive meanwhile."""
        ended = self._runs[number]

        def on_progress(done: int, total: int | None) -> None:
            if ended.is_set():
                raise Cancelled
            send_line({"progress": [done, total]})

        def send_line(line: dict[str, Any]) -> None:
            self.send({"id": number, "line": as_json(line)})

        try:
            response = answer(reader, path, request, on_progress)
            snapshot: Any = response.get("snapshot")
            if snapshot is not None:
                self._report, self._tokens = None, list(snapshot["tokens"])
                sizes = [layer["size"] for layer in snapshot["layers"]]
                self._sizes = [(size.get("h", 1), size["q"]) for size in sizes]
                self.set_trait("text", snapshot["text"])
            send_line(response)
        except Cancelled:
            pass
        finally:
            del self._runs[number]
