"""The recording of `watch`: the attention calls of a model, with their statistics."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, overload

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ...core.errors import BadValue, as_index, whole_number, writable_folder
from ...core.files.results import Savable, data_frame
from ...core.formatting import ShownInNotebook
from ...core.functional.look import NotRequested
from ...core.masks.text_positions import BY_COLUMN, Positions
from ...core.stats import Result, TopWeights
from ...core.stats.parse import how_to_request, is_per_query
from ...core.torch_state import loadable
from .hook_sites import HookSite

if TYPE_CHECKING:
    import pandas


@loadable
@dataclass(frozen=True, repr=False)
class Call:
    """One attention call of a model, with its statistics.

    Attributes:
        layer: the number of the layer, from 0, in the order of first calls. A module that calls
            attention several times in a run is several layers.
        module: the name of the calling module.
        problem: a description of the call.
        statistics: the statistics by name, each (B, H, ...) with the recorded heads. They are also
            attributes of the call.
        fully_masked: True for queries that may look at no key; broadcasts to (B, H, Tq). None
            without a mask.
        heads: the indices of the recorded heads; None if all were recorded.
        queries: the queries of `exact_rows`, counted from each text's first token in the call.
            Where texts differ in length, negative ones count from its last. None if not requested.
        output: the output of the heads, (B, H, Tq, Dv); None if not requested.
        query: the queries that attention received, (B, H, Tq, D); None if not requested.
        key: the keys that attention received, (B, G, Tk, D), of all KV heads.
        value: the values that attention received, (B, G, Tk, Dv), of all KV heads.
        at: the positions in the texts of the columns of the call.
        site: where TransformerLens has the tensors of the call.
    """

    layer: int
    module: str
    problem: str
    statistics: dict[str, Result]
    fully_masked: Tensor | None = None
    heads: tuple[int, ...] | None = None
    queries: tuple[int, ...] | None = None
    output: Tensor | None = field(default=None, repr=False)
    at: Positions = BY_COLUMN
    query: Tensor | None = field(default=None, repr=False)
    key: Tensor | None = field(default=None, repr=False)
    value: Tensor | None = field(default=None, repr=False)
    site: HookSite | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        heads = "" if self.heads is None else f", heads {', '.join(map(str, self.heads))}"
        return f"{self._where()}{heads}: {', '.join(self.statistics)}"

    def must_have_all_heads(self, rule: str) -> None:
        """Raise `BadValue` with this rule if only some heads were recorded."""
        if self.heads is not None:
            gave = f"Layer {self.layer} was recorded for heads {', '.join(map(str, self.heads))}."
            raise BadValue(gave, rule, "record without heads=.")

    def hook_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that `Recording.to_hook_names` names, by the last part of the name.

        Raises `BadValue` for tensors of which the name is uncertain, and weights of some queries.
        """
        self.must_have_all_heads("a tensor under a hook name has all heads.")
        reason = "it was recorded by another version" if self.site is None else self.site.reason
        if self.site is None or reason:
            gave = f"{self.module or 'The model'} has no name in TransformerLens: {reason}."
            rule = "names are [encoder_]blocks.N.attn, decoder_blocks.N.self_attn or .cross_attn."
            hint = 'read the tensors of the calls, or record other modules: layers=["*.layers.*"].'
            raise BadValue(gave, rule, hint)
        tensors: dict[str, Tensor] = {}
        if self.queries is not None:
            tensors["hook_pattern"] = self._pattern(self.site.Tq)
        if self.output is not None:
            tensors["hook_z"] = self.output
        if self.query is not None and self.key is not None and self.value is not None:
            if self.site.rotation is None or not self.site.projected or self._has_cached_keys():
                gave = f"{self.module} was recorded with inputs, and their names are uncertain."
                rule = "hook_q/k/v are uncached projections, and hook_rot_q/k are then rotated."
                hint = "record without inputs=True, or read .query, .key and .value of the calls."
                raise BadValue(gave, rule, hint)
            tensors[f"hook_{self.site.rotation}q"] = self.query
            tensors[f"hook_{self.site.rotation}k"] = self.key
            tensors["hook_v"] = self.value
        return {n: x if n == "hook_pattern" else x.transpose(1, 2) for n, x in tensors.items()}

    def _has_cached_keys(self) -> bool:
        crosses = self.site is not None and self.site.prefix.endswith("cross_attn")
        assert self.query is not None and self.key is not None
        return not crosses and self.key.shape[2] != self.query.shape[2]

    def _pattern(self, Tq: int) -> Tensor:
        """Return the weights of all queries, (B, H, Tq, Tk), which are 0 on padding."""
        rows = self.statistics["exact_rows"]
        assert isinstance(rows, Tensor)
        columns = self.at.rows(self.queries or (), Tq)
        recorded = (columns.unsqueeze(-1) == torch.arange(Tq)).any(1)
        if missing := int((self.at.is_real(Tq)[:, 0] & ~recorded).sum(-1).max()):
            gave = f"Layer {self.layer} was recorded without {missing} of {Tq} queries."
            hint = f"use exact_rows=range({Tq}), the longest text if padded; or no exact_rows=."
            raise BadValue(gave, "hook_pattern has the weights of all queries.", hint)
        return rows_in_columns(rows, columns, Tq)

    def _where(self) -> str:
        return f"layer {self.layer}  {self.module or 'the model'}  {self.problem}"

    def values_of_heads(self) -> Iterator[tuple[int, str, Tensor]]:
        """Yield the finite values of each statistic as (head, name, 1-D values).

        Fully masked queries and padding are left out. Each group of `mass` is a statistic.
        """
        for name, result in self.statistics.items():
            parts: dict[str, Tensor] = {}
            if isinstance(result, dict):
                parts = {f"{name}.{group}": x for group, x in result.items()}
            elif not isinstance(result, TopWeights):
                parts = {name: result}
            elif result.weights.shape[-1]:
                parts = {name: result.weights[..., 0]}
            for part, x in parts.items():
                counts = torch.isfinite(x)
                if self.fully_masked is not None and is_per_query(name):
                    counts &= ~self.fully_masked
                if is_per_query(name):
                    counts &= self.at.is_real(x.shape[2]).to(x.device)
                numbers = x.detach()
                for h in range(x.shape[1]):
                    if counts[:, h].any():
                        head = self.heads[h] if self.heads else h
                        yield head, part, numbers[:, h][counts[:, h]].double()

    def __getattr__(self, name: str) -> Result:
        statistics = self.__dict__.get("statistics", {})
        if name in statistics:
            return statistics[name]
        rule = f"it has the statistics that watch recorded: {', '.join(statistics)}."
        raise NotRequested(f"A call has no .{name}.", rule, how_to_request(name, statistics))


@loadable
@dataclass(repr=False)
class Recording(ShownInNotebook, Savable):
    """The attention calls that `watch` recorded, in the order in which the model made them."""

    calls: list[Call] = field(default_factory=list)
    written: list[Path] = field(default_factory=list)  # the files of calls that are not in memory

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    def __repr__(self) -> str:
        if self.written:
            files = f"{len(self.written)} file{'s' * (len(self.written) != 1)}"
            return f"{files} in {self.written[0].parent}, one per call"
        count = f"{len(self.calls)} call{'s' * (len(self.calls) != 1)} recorded"
        lines = [f"  {call._where()}" for call in self.calls]
        if len(lines) > 12:
            lines[10:-1] = ["  ..."]
        return "\n".join([count, *lines])

    @overload
    def __getitem__(self, which: int | str) -> Call: ...
    @overload
    def __getitem__(self, which: slice) -> list[Call]: ...
    def __getitem__(self, which: int | str | slice) -> Call | list[Call]:
        """Return a call by its index, calls by a slice, or the last call of a module by name."""
        if isinstance(which, slice):
            return self.calls[which]
        self._must_be_in_memory()
        if whole_number(which) is not None:
            rule = f"calls are numbered from 0, and {len(self.calls) or 'none'} were recorded."
            hint = "use one of these, or run the model inside the with block first."
            return self.calls[as_index("Call", which, len(self.calls), rule, hint)]
        for call in reversed(self.calls):
            if call.module == which:
                return call
        names = list(dict.fromkeys(call.module for call in self.calls))
        called = ", ".join(names) if names else "none did"
        rule = f"a module is recorded when it calls attention inside the with block: {called}."
        hint = "use one of these, or extend layers=."
        raise BadValue(f"No call of {which!r} was recorded.", rule, hint)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        rule = "statistics belong to a call, and a model makes one for each layer."
        hint = f"use a call: recording[0].{name}, or recording['layers.0.attention'].{name}."
        raise NotRequested(f"A recording has no .{name}.", rule, hint)

    def scalars(self) -> dict[str, float]:
        """Return one number per layer and statistic; `to_pandas` has one per head.

        It is the mean over batch, heads, queries and calls, or the maximum for `max`. `mass` gives
        one number per group (``module.mass.group``), `topk` the mean of the largest weight. Fully
        masked queries do not count, nor does padding that the call carries. If a module is several
        layers, the key has the layer number (``module:2``).
        """
        layers: dict[str, set[int]] = {}
        for call in self.calls:
            layers.setdefault(call.module, set()).add(call.layer)
        values_by_name: dict[tuple[str, str], list[Tensor]] = {}
        for call in self.calls:
            module = call.module or str(call.layer)
            module += f":{call.layer}" if len(layers[call.module]) > 1 else ""
            for _, name, values in call.values_of_heads():
                values_by_name.setdefault((module, name), []).append(values)
        return {
            f"{module}.{name}": _scalar(name, torch.cat(parts))
            for (module, name), parts in values_by_name.items()
        }

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a table with one row per head of each call: its number, layer, module and head,
        and the mean of each statistic over batch and queries as in `scalars`, the maximum of `max`.

        Raises `BadValue` for a recording in files, and `Missing` without pandas.
        """
        self._must_be_in_memory()
        rows: dict[tuple[int, int], dict[str, object]] = {}
        for number, call in enumerate(self.calls):
            for head, name, values in call.values_of_heads():
                site = {"call": number, "layer": call.layer, "module": call.module, "head": head}
                rows.setdefault((number, head), site)[name] = _scalar(name, values)
        return data_frame([*rows.values()])

    def to_hook_names(self) -> dict[str, Tensor]:
        """Return the tensors of the calls under the names and in the shapes of TransformerLens 4.

        ``blocks.3.attn.hook_pattern`` is (B, H, Tq, Tk), the weights of block 3, if the exact rows
        of all queries were recorded (``watch(model, exact_rows=range(T))``). Its rows and columns
        are those of the call, and rows of padding are 0. ``blocks.3.attn.hook_z`` is
        (B, Tq, H, Dv), the output of its heads (``outputs=True``). With ``inputs=True``,
        ``hook_rot_q``, (B, Tq, H, D), and ``hook_rot_k``, (B, Tk, G, D), are what attention
        receives, after rotation and norms; in a model without rotation they are ``hook_q`` and
        ``hook_k``. ``hook_v`` is (B, Tk, G, Dv).

        The number is the index of the block in its list, also if other blocks have no attention. In
        an encoder-decoder, names begin with ``encoder_blocks.3.attn``,
        ``decoder_blocks.3.self_attn`` and ``decoder_blocks.3.cross_attn``, and in an image encoder
        of SigLIP or CLIP before a text model with ``vision_encoder.encoder_layers.3.attn``. A layer
        that was called again has the tensors of its last call.

        Raises `BadValue` for a recording without these tensors, of some heads or queries, or in
        files; for a module of which the block is unknown, such as one outside a list; and for
        inputs of which it is unknown whether they were rotated.
        """
        self._must_be_in_memory()
        named: dict[str, Tensor] = {}
        modules: dict[str, str] = {}
        for call in self.calls:
            for hook, x in call.hook_tensors().items():
                name = f"{call.site.prefix}.{hook}" if call.site else hook
                other = modules.setdefault(name, call.module)
                if other != call.module:
                    rule = "a name belongs to one module."
                    hint = f"record one of them: layers=[{call.module!r}]."
                    raise BadValue(f"{other} and {call.module} would both be {name}.", rule, hint)
                named[name] = x
        if not named:
            gave = "The recording has no weights of all queries, no outputs and no inputs."
            hint = "record with watch(model, exact_rows=range(T), outputs=True, inputs=True)."
            raise BadValue(gave, "these are the tensors that have a name in TransformerLens.", hint)
        return named

    def save(self, path: str | Path) -> Path:
        self._must_be_in_memory()
        return super().save(path)

    save.__doc__ = Savable.save.__doc__

    def _must_be_in_memory(self) -> None:
        if self.written:
            gave = f"The calls are in {len(self.written)} files in {str(self.written[0].parent)!r}."
            rule = "watch(to=...) writes calls to files, listed in index.jsonl, and keeps none."
            hint = f"call safetensors.torch.load_file({str(self.written[0])!r}), or leave out to=."
            raise BadValue(gave, rule, hint)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "written": [str(path) for path in self.written]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, written=[Path(path) for path in state["written"]])

    def clear(self) -> None:
        """Remove the calls, for example after each training step."""
        self.calls.clear()
        self.written.clear()


def _scalar(name: str, values: Tensor) -> float:
    """Return the mean of the values of a statistic, or the maximum of `max`."""
    return float(values.max() if name == "max" else values.mean())


def rows_in_columns(rows: Tensor, columns: Tensor, Tq: int) -> Tensor:
    """Move rows, (B, ..., n, Tk), to their columns, (B|1, n), of (B, ..., Tq, Tk); others are 0.

    A row at column -1 is left out.
    """
    if columns.tolist() == [list(range(Tq))]:
        return rows
    every = rows.new_zeros(*rows.shape[:-2], Tq + 1, rows.shape[-1])  # column Tq takes the -1
    to = columns.to(rows.device) % (Tq + 1)
    to = to.reshape(len(to), *(1,) * (rows.dim() - 3), -1, 1).expand(rows.shape)
    return every.scatter(-2, to, rows)[..., :Tq, :]


# -------------------------------------------------------------------------- a recording in a folder

INDEX = "index.jsonl"


def new_folder(to: str | Path) -> Path:
    """Create the folder with an empty index, which reserves it for one recording."""
    folder = writable_folder(to, "statistics are", "pass another folder as to=.")
    try:
        (folder / INDEX).open("x").close()
    except FileExistsError:
        rule = "a recording is never overwritten."
        hint = "pass another folder as to=, or delete this one."
        raise BadValue(f"The folder {str(to)!r} holds an earlier recording.", rule, hint) from None
    return folder


def write_call(to: Path, number: int, call: Call, statistics: list[str]) -> Path:
    """Write the call's tensors to a file, and a description of the file to the index."""
    file, index = to / f"{number:05d}.safetensors", to / INDEX
    line = {
        "file": file.name, "layer": call.layer, "module": call.module, "problem": call.problem,
        "stats": statistics, "heads": call.heads, "queries": call.queries,
        "at": call.at._asdict(),
    }  # fmt: skip
    parts = ("fully_masked", "output", "query", "key", "value")
    tensors = {n: x.detach().contiguous() for n in parts if (x := getattr(call, n)) is not None}
    size = index.stat().st_size
    try:
        save_file(_flat(call.statistics) | tensors, file)
        with index.open("a") as lines:
            lines.write(json.dumps(line) + "\n")
    except (OSError, SafetensorError) as error:
        os.truncate(index, size)  # remove a partial line
        gave = f"The recording could not be written to {str(to)!r}: {error}."
        rule = "each call is written to its own file, which needs disk space."
        hint = "free disk space, or watch fewer statistics; earlier calls were written."
        raise BadValue(gave, rule, hint) from error
    return file


def _flat(statistics: dict[str, Result]) -> dict[str, Tensor]:
    """Flatten statistics to named tensors for a file."""
    tensors: dict[str, Tensor] = {}
    for name, result in statistics.items():
        if isinstance(result, TopWeights):
            tensors[f"{name}.weights"], tensors[f"{name}.keys"] = result.weights, result.keys
        elif isinstance(result, dict):
            tensors |= {f"{name}.{group}": x for group, x in result.items()}
        else:
            tensors[name] = result
    return {name: x.detach().contiguous().clone() for name, x in tensors.items()}
