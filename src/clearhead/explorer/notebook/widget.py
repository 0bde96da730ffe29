"""The widget: a page in a frame, what is chosen in it, and the requests that it makes."""

import threading
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, urlencode

import anywidget
import traitlets

from ...errors import BadType, BadValue, as_index, did_you_mean, kind_of
from ...formatting import spellings
from ...inspection.text_model import TextModel
from ...trace import Trace
from .. import cells, html
from ..html.document import WIDGET, as_json
from ..serve import Reader
from ..serve.answer import answer
from ..serve.reader import Cancelled

Model: TypeAlias = str | Path | TextModel | Trace | None


class Explorer(anywidget.AnyWidget):
    """What `clearhead.explorer.explore` shows.

    `head` is the chosen (layer, head) and `query` the position of the chosen query, None for none.
    Both can be set and observed, a query also by its word. Setting one that is not there raises
    `BadValue`, and what was chosen stays. `text` is the text that was read last.

    The page is sent when a cell shows it, and is not stored in the notebook's file. A picture of
    the heads is, which is shown where no Python runs.
    """

    _esm = WIDGET.read_text(encoding="utf-8")

    address = traitlets.Unicode("").tag(sync=True)
    picture = traitlets.Unicode("", read_only=True).tag(sync=True)
    head = traitlets.Any((0, 0))
    query = traitlets.Any(None)
    text = traitlets.Unicode("", read_only=True)

    def __init__(self, model: Model, text: str | None) -> None:
        self._runs: dict[str, threading.Event] = {}
        self._reader: Reader | None = None
        if (text is None) != isinstance(model, Trace):
            raise BadType(
                f"explore got {kind_of(model)} and {kind_of(text)} for a text.",
                "a model reads a text; a trace has its own.",
                "pass explore(model, text) or explore(trace).",
            )
        if isinstance(model, Trace):
            self._tokens = list(model.queries or ())
            self._sizes = [(model.size("h") or 1, model.size("q") or 0)]
            self._page = html.page(model, host="frame")
            picture = cells.html_of(model)
        else:
            self._reader = Reader(model)
            found = self._reader.report(str(text), progress=None)
            self._tokens = list(found.tokens)
            self._sizes = [(len(layer.heads), layer.queries) for layer in found.layers]
            self._page = html.report_page(found, host="notebook")
            picture = cells.still(found)
        super().__init__()
        self.set_trait("text", text or "")
        self.set_trait("picture", picture)
        self.on_msg(self._receive)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """What a cell stores: the widget, and its picture for viewers that show no widgets."""
        bundle = super()._repr_mimebundle_(**options)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        if data is not None:
            data["text/html"] = self.picture
        return bundle

    # ---- what is chosen --------------------------------------------------------------

    @traitlets.validate("head")
    def _head_that_is_there(self, proposal: Any) -> tuple[int, int]:
        given, way = proposal["value"], "set for example shown.head = 0, 0."
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            raise BadType(f"head={given!r} was set.", "a head is chosen as (layer, head).", way)
        layers = len(self._sizes)
        rule = f"layers are counted from 0 to {layers - 1}; -1 is the last."
        layer = as_index("Layer", given[0], layers, rule, way)
        heads, _ = self._sizes[layer]
        rule = f"heads of layer {layer} are counted from 0 to {heads - 1}; -1 is the last."
        return layer, as_index("Head", given[1], heads, rule, way)

    @traitlets.validate("query")
    def _query_that_is_there(self, proposal: Any) -> int | None:
        given, last = proposal["value"], self._queries - 1
        if given is None:
            return None
        rule = f"a query is a word of the text, or its position from 0 to {last}; -1 is the last."
        way = f"set for example shown.query = {last}, or None for none."
        if not isinstance(given, str):
            return as_index("Query", given, self._queries, rule, way)
        position = self._position(given)
        if position is None:
            way = did_you_mean(given, self._tokens) or way
            raise BadValue(f"Query {given!r} was requested.", rule, way)
        return position

    @traitlets.observe("address")
    def _on_address(self, change: Any) -> None:
        """Somebody clicked: take over what the address says. As in the page, what is not there is
        left out."""
        said = dict(parse_qsl(change["new"].removeprefix("#")))
        layer, head, query = (said.get(name, "") for name in ("layer", "head", "query"))
        with self.hold_trait_notifications():
            if layer.isdecimal() and head.isdecimal() and self._is_there(int(layer), int(head)):
                self.head = int(layer), int(head)
            position = self._position(query)
            if query == "none" or (query and position is not None):
                self.query = position

    @traitlets.observe("head", "query")
    def _on_choice(self, change: Any) -> None:
        """Chosen in Python: the page goes to that address."""
        said = dict(parse_qsl(self.address.removeprefix("#")))
        wanted = {"layer": str(self.head[0]), "head": str(self.head[1])}
        if self._position(said.get("query", "none")) != self.query:
            wanted["query"] = "none" if self.query is None else str(self.query)
        if wanted.items() - said.items():
            self.address = "#" + urlencode({**said, **wanted})

    def _is_there(self, layer: int, head: int) -> bool:
        return layer < len(self._sizes) and head < self._sizes[layer][0]

    @property
    def _queries(self) -> int:
        """How many queries the layer of the chosen head has."""
        return self._sizes[self.head[0]][1]

    def _position(self, said: str) -> int | None:
        """The position of a query, which an address names by its word or its number; None if it is
        not there, or for "none"."""
        if said.isdecimal():
            return int(said) if int(said) < self._queries else None
        words = [{x.lower() for x in spellings(t)} for t in self._tokens[: self._queries]]
        named = (i for i, word in enumerate(words) if said != "none" and said.lower() in word)
        return next(named, None)

    # ---- what is asked ---------------------------------------------------------------

    def _receive(self, _: object, message: dict[str, Any], buffers: object) -> None:
        """A message from a cell: it wants the page, makes a request, or ends one."""
        if message.get("page"):
            self.send({"page": self._page})
            return
        number, path = str(message.get("id")), message.get("path")
        if message.get("end"):
            if number in self._runs:
                self._runs[number].set()
        elif self._reader is not None and path in ("compute", "tile"):
            self._runs[number] = threading.Event()
            arguments = self._reader, number, path, message.get("request")
            threading.Thread(target=self._compute, args=arguments, daemon=True).start()

    def _compute(self, reader: Reader, number: str, path: str, request: object) -> None:
        """Answer a request, in a thread, so that a message to end it is received meanwhile."""
        ended = self._runs[number]

        def on_progress(done: int, total: int | None) -> None:
            if ended.is_set():
                raise Cancelled
            tell({"progress": [done, total]})

        def tell(line: dict[str, Any]) -> None:
            self.send({"id": number, "line": as_json(line)})

        try:
            found = answer(reader, path, request, on_progress)
            snapshot: Any = found.get("snapshot")
            if snapshot is not None:
                self._tokens = list(snapshot["tokens"])
                sizes = [layer["size"] for layer in snapshot["layers"]]
                self._sizes = [(size.get("h", 1), size["q"]) for size in sizes]
                self.set_trait("text", snapshot["text"])
            tell(found)
        except Cancelled:
            pass
        finally:
            del self._runs[number]
