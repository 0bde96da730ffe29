"""What `watch` records: the attention calls of a model, each with its statistics."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, overload

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..errors import BadValue, as_index, whole_number, writable_folder
from ..formatting import ShownInNotebook
from ..functional.look import NotRequested
from ..masks.text_positions import BY_COLUMN, Positions
from ..stats import Result, TopWeights
from ..stats.parse import how_to_request
from ..torch_state import loadable

NOT_PER_QUERY = {"received", "pooled", "exact_rows"}  # statistics without a number for each query


@loadable
@dataclass(frozen=True, repr=False)
class Call:
    """One attention call of a model, with its statistics.

    `layer` numbers the places in the model that call attention, from 0, in the order of their first
    calls; a module that calls several times in a run is several layers. `module` is the name of the
    calling module, and `problem` describes the call. `found` has the statistics by name, each
    (B, H, ...) with the watched heads; they are also attributes of the call. `heads` are the
    numbers of these heads, None if all were watched. `queries` are those whose exact rows were
    kept, counted from each text's first token in the call (a negative one from its last, where the
    texts differ in length), and `output` is the heads' output, (B, H, Tq, Dv); None where they
    were not requested. `blind` is True for queries that may see nothing, and broadcasts to
    (B, H, Tq); None without a mask. `at` says where the columns of the call stand in its texts.
    """

    layer: int
    module: str
    problem: str
    found: dict[str, Result]
    blind: Tensor | None = None
    heads: tuple[int, ...] | None = None
    queries: tuple[int, ...] | None = None
    output: Tensor | None = field(default=None, repr=False)
    at: Positions = BY_COLUMN

    def __repr__(self) -> str:
        heads = "" if self.heads is None else f", heads {', '.join(map(str, self.heads))}"
        return f"{self._where()}{heads}: {', '.join(self.found)}"

    def _where(self) -> str:
        return f"layer {self.layer}  {self.module or 'the model'}  {self.problem}"

    def gauged(self, each_head: bool) -> Iterator[tuple[str, str, Tensor]]:
        """The finite values of each statistic as (head or "", name, values in one dimension),
        without those of blind queries and of padding; each group of `mass` is a statistic of its
        own."""
        for name, result in self.found.items():
            parts: dict[str, Tensor] = {}
            if isinstance(result, dict):
                parts = {f"{name}.{group}": x for group, x in result.items()}
            else:
                parts = {name: result.weights[..., 0] if isinstance(result, TopWeights) else result}
            for part, x in parts.items():
                counts = torch.isfinite(x)
                if self.blind is not None and name not in NOT_PER_QUERY:
                    counts &= ~self.blind
                if name not in NOT_PER_QUERY:
                    counts &= self.at.is_real(x.shape[2]).to(x.device)
                numbers = x.detach()
                for h in range(x.shape[1]) if each_head else [slice(None)]:
                    if counts[:, h].any():
                        head = f"head{self.heads[h] if self.heads else h}" if each_head else ""
                        yield head, part, numbers[:, h][counts[:, h]].double()

    def __getattr__(self, name: str) -> Result:
        found = self.__dict__.get("found", {})
        if name in found:
            return found[name]
        raise NotRequested(
            f"A call was asked for .{name}.",
            f"it was watched for {', '.join(found)}.",
            how_to_request(name, found),
        )


@loadable
@dataclass(repr=False)
class Recording(ShownInNotebook):
    """The attention calls that `watch` recorded, in the order in which the model made them."""

    calls: list[Call] = field(default_factory=list)
    written: list[Path] = field(default_factory=list)  # the files of calls that are not kept here

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    def __repr__(self) -> str:
        if self.written:
            files = f"{len(self.written)} file{'s' * (len(self.written) != 1)}"
            return f"{files} in {self.written[0].parent}, a call each"
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
        """A call by its number, calls by a slice, or the latest call of a module by its name."""
        if isinstance(which, slice):
            return self.calls[which]
        if self.written:
            raise BadValue(
                f"Call {which!r} was asked for.",
                "the calls are in files and were not kept: watch was given a folder, to=.",
                f"open one with safetensors.torch.load_file({str(self.written[0])!r}); index.jsonl "
                "beside it says what each of them holds.",
            )
        if whole_number(which) is not None:
            rule = f"calls are numbered from 0, and {len(self.calls) or 'none'} were recorded."
            hint = "ask for one of these, or run the model inside the with block first."
            return self.calls[as_index("Call", which, len(self.calls), rule, hint)]
        for call in reversed(self.calls):
            if call.module == which:
                return call
        names = list(dict.fromkeys(call.module for call in self.calls))
        raise BadValue(
            f"No call of {which!r} was recorded.",
            "a module is recorded when it calls attention while it is watched: "
            + (", ".join(names) if names else "none did") + ".",
            "ask for one of these, or widen layers=.",
        )  # fmt: skip

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotRequested(
            f"The recording was asked for .{name}.",
            "statistics belong to a call, and a model makes one for each layer.",
            f"ask a call: recording[0].{name}, or recording['layers.0.attention'].{name}.",
        )

    def gauges(self, *, heads: bool = False) -> dict[str, float]:
        """One number per layer and statistic, for a training log: the mean over batch, heads,
        queries and calls, or the maximum for `max`. `mass` gives one for each group
        (``module.mass.group``), `topk` the mean of the largest weight. Queries that may see nothing
        do not count, nor those on padding, where the call carries it. A module that is several
        layers is told apart by their numbers (``module:2``).

        With `heads`, one number for each head as well (``module.head3.entropy``): a mean hides a
        dead head, whose entropy stays near 0, or whose share of the first token
        (``mass({"sink": prefix(1)})``) near 1, in every batch.
        """
        layers: dict[str, set[int]] = {}
        for call in self.calls:
            layers.setdefault(call.module, set()).add(call.layer)
        found: dict[tuple[str, str], list[Tensor]] = {}
        scopes = (False, True) if heads else (False,)
        for call in self.calls:
            module = call.module or str(call.layer)
            module += f":{call.layer}" if len(layers[call.module]) > 1 else ""
            for each_head in scopes:
                for head, name, values in call.gauged(each_head):
                    prefix = f"{module}.{head}" if head else module
                    found.setdefault((prefix, name), []).append(values)
        return {
            f"{prefix}.{name}": float(
                (torch.max if name == "max" else torch.mean)(torch.cat(parts))
            )
            for (prefix, name), parts in found.items()
        }

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "written": [str(path) for path in self.written]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, written=[Path(path) for path in state["written"]])

    def clear(self) -> None:
        """Forget the calls, for example after each training step."""
        self.calls.clear()
        self.written.clear()


# -------------------------------------------------------------------------- a recording in a folder

INDEX = "index.jsonl"


def new_folder(to: str | Path) -> Path:
    """Make the folder, with an empty index, so that no other recording can use it."""
    made = writable_folder(to, "statistics are", "pass another folder as to=.")
    try:
        (made / INDEX).open("x").close()
    except FileExistsError:
        raise BadValue(
            f"The folder {str(to)!r} holds an earlier recording.",
            "a recording is never written over.",
            "pass another folder as to=, or delete this one.",
        ) from None
    return made


def write_call(to: Path, number: int, call: Call, statistics: list[str]) -> Path:
    """Write the call's tensors to a file, and what the file holds to a line of the index."""
    file, index = to / f"{number:05d}.safetensors", to / INDEX
    line = {
        "file": file.name, "layer": call.layer, "module": call.module, "problem": call.problem,
        "stats": statistics, "heads": call.heads, "queries": call.queries,
        "at": call.at._asdict(),
    }  # fmt: skip
    beside = {"blind": call.blind, "output": call.output}
    tensors = {n: x.detach().contiguous() for n, x in beside.items() if x is not None}
    size = index.stat().st_size
    try:
        save_file(_flat(call.found) | tensors, file)
        with index.open("a") as lines:
            lines.write(json.dumps(line) + "\n")
    except (OSError, SafetensorError) as error:
        os.truncate(index, size)  # remove a line that was written in part
        raise BadValue(
            f"The recording could not be written to {str(to)!r}: {error}.",
            "each call is written to a file of its own, and needs room.",
            "make room, or watch fewer statistics; the calls before this one are there.",
        ) from error
    return file


def _flat(found: dict[str, Result]) -> dict[str, Tensor]:
    """Statistics as named tensors for a file."""
    tensors: dict[str, Tensor] = {}
    for name, result in found.items():
        if isinstance(result, TopWeights):
            tensors[f"{name}.weights"], tensors[f"{name}.keys"] = result.weights, result.keys
        elif isinstance(result, dict):
            tensors |= {f"{name}.{group}": x for group, x in result.items()}
        else:
            tensors[name] = result
    return {name: x.detach().contiguous().clone() for name, x in tensors.items()}
