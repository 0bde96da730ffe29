"""What `watch` recorded of a model: its attention calls, each with its statistics."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, overload

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..errors import BadValue, folder, whole_number
from ..stats import Top
from ..stats.look import NotAsked
from ..stats.parse import ALL_NAMES
from ..stats.statistics import Result

OF_KEYS = {"received", "map", "rows"}  # statistics that have no number for each query


@dataclass(frozen=True, repr=False)
class Call:
    """What one attention call of a model showed.

    `layer` numbers the places in the model that ask, from 0, in the order in which they first did;
    a module that asks several times in a run has several. `module` is the name of the module that
    asked, `question` says what was asked. Statistics are in `found`, under their names, each
    (B, H, ...) with the heads that were watched; they are also attributes of the call. `heads` are
    the numbers of these, None if they are all there are. `queries` are those whose exact rows were
    kept, counted from 0, and `output` is what the heads gave, (B, H, Tq, Dv); None where they were
    not asked for. `blind` is True for queries that may see
    nothing, and broadcasts to (B, H, Tq); None if there was no mask.
    """

    layer: int
    module: str
    question: str
    found: dict[str, Result]
    blind: Tensor | None = None
    heads: tuple[int, ...] | None = None
    queries: tuple[int, ...] | None = None
    output: Tensor | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        heads = "" if self.heads is None else f", heads {', '.join(map(str, self.heads))}"
        return f"{self._where()}{heads}: {', '.join(self.found)}"

    def _where(self) -> str:
        return f"layer {self.layer}  {self.module or 'the model'}  {self.question}"

    def gauged(self, each_head: bool) -> Iterator[tuple[str, str, Tensor]]:
        """The finite numbers of each part of each statistic, in one dimension, without those of
        blind queries; before them "" or the head, and the name of the part."""
        for name, result in self.found.items():
            parts: dict[str, Tensor] = {}
            if isinstance(result, dict):
                parts = {f"{name}.{group}": x for group, x in result.items()}
            else:
                parts = {name: result.weights[..., 0] if isinstance(result, Top) else result}
            for part, x in parts.items():
                counts = torch.isfinite(x)
                if self.blind is not None and name not in OF_KEYS:
                    counts &= ~self.blind
                numbers = x.detach()
                for h in range(x.shape[1]) if each_head else [slice(None)]:
                    if counts[:, h].any():
                        head = f"head{self.heads[h] if self.heads else h}" if each_head else ""
                        yield head, part, numbers[:, h][counts[:, h]].double()

    def __getattr__(self, name: str) -> Result:
        found = self.__dict__.get("found", {})
        if name in found:
            return found[name]
        raise NotAsked(
            f"A call was asked for .{name}.",
            f"it was watched for {', '.join(found)}.",
            f"ask for it in stats=; there are {ALL_NAMES}.",
        )


@dataclass(repr=False)
class Recording:
    """What `watch` saw so far: a sequence of calls, in the order in which the model made them."""

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
        count = f"{len(self.calls)} call{'s' * (len(self.calls) != 1)} seen"
        lines = [f"  {call._where()}" for call in self.calls]
        if len(lines) > 12:
            lines[10:-1] = ["  ..."]
        return "\n".join([count, *lines])

    @overload
    def __getitem__(self, which: int | str) -> Call: ...
    @overload
    def __getitem__(self, which: slice) -> list[Call]: ...
    def __getitem__(self, which: int | str | slice) -> Call | list[Call]:
        """A call by its place, calls by a slice, or the latest call of a module by its name."""
        if isinstance(which, slice):
            return self.calls[which]
        if self.written:
            raise BadValue(
                f"Call {which!r} was asked for.",
                "what was seen is in files and was not kept: watch was given a folder, to=.",
                f"open one with safetensors.torch.load_file({str(self.written[0])!r}); index.jsonl "
                "beside it says what each of them holds.",
            )
        place = None if isinstance(which, str) else whole_number(which)
        if place is not None:
            if not -len(self.calls) <= place < len(self.calls):
                raise BadValue(
                    f"Call {which} was asked for.",
                    f"calls are numbered from 0, and {len(self.calls) or 'none'} came by.",
                    "ask for one of these, or run the model inside the with block first.",
                )
            return self.calls[place]
        for call in reversed(self.calls):
            if call.module == which:
                return call
        names = list(dict.fromkeys(call.module for call in self.calls))
        raise BadValue(
            f"No call of {which!r} was seen.",
            "a module is seen when it asks for attention while it is watched: "
            + (", ".join(names) if names else "none did") + ".",
            "ask for one of these, or widen layers=.",
        )  # fmt: skip

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotAsked(
            f"What was seen was asked for .{name}.",
            "statistics belong to a call, and a model makes one for each layer.",
            f"ask a call: seen[0].{name}, or seen['layers.0.attention'].{name}.",
        )

    def gauges(self, *, heads: bool = False) -> dict[str, float]:
        """One number per layer and statistic, for a training log: the mean over batch, heads,
        queries and calls, or the maximum for `max`. `mass` gives one for each group
        (``module.mass.group``), `topk` the mean of the largest weight. Queries that may see nothing
        do not count. A module that is several layers is told apart by their numbers (``module:2``).

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
            place = call.module or str(call.layer)
            place += f":{call.layer}" if len(layers[call.module]) > 1 else ""
            for each_head in scopes:
                for head, name, numbers in call.gauged(each_head):
                    where = f"{place}.{head}" if head else place
                    found.setdefault((where, name), []).append(numbers)
        return {
            f"{place}.{name}": float(
                (torch.max if name == "max" else torch.mean)(torch.cat(numbers))
            )
            for (place, name), numbers in found.items()
        }

    def clear(self) -> None:
        """Forget what was seen, for example after each training step."""
        self.calls.clear()
        self.written.clear()


# -------------------------------------------------------------------------- a recording in a folder

INDEX = "index.jsonl"


def new_folder(to: str | Path) -> Path:
    """The folder, made, with an empty index that no other recording can take."""
    made = folder(to, "statistics are", "pass another folder as to=.")
    try:
        (made / INDEX).open("x").close()
    except FileExistsError:
        raise BadValue(
            f"The folder {str(to)!r} holds what was seen before.",
            "what was seen is never written over.",
            "pass another folder as to=, or delete this one.",
        ) from None
    return made


def write_call(to: Path, number: int, call: Call, statistics: list[str]) -> Path:
    """The call's numbers as a file, and a line of the index that says what it holds."""
    file, index = to / f"{number:05d}.safetensors", to / INDEX
    line = {
        "file": file.name, "layer": call.layer, "module": call.module, "question": call.question,
        "stats": statistics, "heads": call.heads, "queries": call.queries,
    }  # fmt: skip
    beside = {"blind": call.blind, "output": call.output}
    tensors = {n: x.detach().contiguous() for n, x in beside.items() if x is not None}
    size = index.stat().st_size
    try:
        save_file(_flat(call.found) | tensors, file)
        with index.open("a") as lines:
            lines.write(json.dumps(line) + "\n")
    except (OSError, SafetensorError) as error:
        os.truncate(index, size)  # no half of a line
        raise BadValue(
            f"What was seen could not be written to {str(to)!r}: {error}.",
            "each call is written to a file of its own, and needs room.",
            "make room, or watch fewer statistics; the calls before this one are there.",
        ) from error
    return file


def _flat(found: dict[str, Result]) -> dict[str, Tensor]:
    """Statistics as named tensors for a file."""
    tensors: dict[str, Tensor] = {}
    for name, result in found.items():
        if isinstance(result, Top):
            tensors[f"{name}.weights"], tensors[f"{name}.keys"] = result.weights, result.keys
        elif isinstance(result, dict):
            tensors |= {f"{name}.{group}": x for group, x in result.items()}
        else:
            tensors[name] = result
    return {name: x.detach().contiguous().clone() for name, x in tensors.items()}
