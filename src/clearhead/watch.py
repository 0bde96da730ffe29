"""Look at everything a model asks of attention while it runs, layer by layer.

The model computes what it always computes: `watch` listens at the door and gathers statistics
beside the answer, so nothing changes but time.
"""

import fnmatch
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .attend import listening
from .engines import count as count_weights
from .errors import BadType, BadValue
from .folder import folder
from .problem import Inputs, Problem
from .stats import Statistic, Top, parse_stats, rows as exact_rows
from .stats.look import NotAsked
from .stats.wanted import Result
from .traced import transformed
from .whole import whole

GAUGES = ("entropy", "max")


@dataclass(frozen=True)
class Call:
    """What one attention call of a model showed.

    `layer` counts the calls within one run of the model from 0, `module` is the name of the module
    that asked, `question` says what was asked. Statistics are in `found`, under their names, each
    (B, H, ...) with the heads that were watched; they are also attributes of the call.
    """

    layer: int
    module: str
    question: str
    found: dict[str, Result] = field(repr=False)

    def __getattr__(self, name: str) -> Result:
        found = self.__dict__.get("found", {})
        if name in found:
            return found[name]
        raise NotAsked(
            f"A call was asked for .{name}.",
            f"it was watched for {', '.join(found)}.",
            f"watch(model, stats=[..., {name!r}]), if {name!r} is a statistic.",
        )


@dataclass
class Seen:
    """What `watch` saw so far: a sequence of calls, in the order in which the model made them."""

    calls: list[Call] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    def __getitem__(self, which: int | str) -> Call:
        """A call by its place, or the latest call of a module by its name."""
        if isinstance(which, int):
            if not -len(self.calls) <= which < len(self.calls):
                raise BadValue(
                    f"Call {which} was asked for.",
                    f"calls are numbered from 0, and {len(self.calls) or 'none'} came by.",
                    "ask for one of these, or run the model inside the with block first.",
                )
            return self.calls[which]
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

    def gauges(self) -> dict[str, float]:
        """One number per layer and statistic, for a training log: the mean over batch, heads and
        queries, or the maximum for `max`. `mass` gives one for each group (``layer.mass.group``),
        `topk` the mean of the largest weight. Queries that may see nothing do not count."""
        numbers: dict[str, float] = {}
        for call in self.calls:
            place = call.module or str(call.layer)
            for name, result in call.found.items():
                if isinstance(result, dict):
                    parts = {f"{name}.{group}": x for group, x in result.items()}
                else:
                    parts = {name: result.weights[..., 0] if isinstance(result, Top) else result}
                for part, x in parts.items():
                    finite = x.detach()[torch.isfinite(x)]
                    if finite.numel():
                        value = finite.max() if name == "max" else finite.mean()
                        numbers[f"{place}.{part}"] = float(value)
        return numbers

    def clear(self) -> None:
        """Forget what was seen, for example after each training step."""
        self.calls.clear()


@contextmanager
def watch(
    model: nn.Module,
    *,
    stats: Sequence[str | Statistic] = GAUGES,
    layers: Sequence[int | str] | None = None,
    heads: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    to: str | Path | None = None,
) -> Iterator[Seen]:
    """Statistics of every attention call that `model` makes inside the `with` block.

    >>> with ch.watch(model, stats=["entropy", ch.topk(3)]) as seen:  # doctest: +SKIP
    ...     model(x)
    >>> seen[0].entropy  # (B, H, Tq) of the first layer  # doctest: +SKIP

    Sees layers of `clearhead.nn`, transformers models with ``attn_implementation="clearhead"``, and
    whatever else calls `attention` in this thread. The outputs of the model do not change.
    Statistics of calls that ask for gradients carry gradients.

    Args:
        stats: what to gather, as in `look`.
        layers: only these: numbers count the calls of a run of the model, strings are patterns for
            module names, such as ``"*.5.*"``. None means all.
        heads: keep only these query heads. None means all.
        rows: also keep the exact rows of these queries. None means none.
        to: a folder; each call is then written to a file there (safetensors, and `index.json`) and
            not kept in memory. None keeps everything in `seen`.

    Raises:
        BadValue, BadType: unknown statistics, patterns that name no module, heads that a layer does
            not have, a folder that cannot be written or holds what was seen before; and at the end
            of the block, if the model ran and never asked. If it asked, but in none of `layers`,
            that is a warning.
    """
    if not isinstance(model, nn.Module):
        raise BadType(
            f"watch got a {type(model).__name__}.",
            "watch listens to the modules of a model.",
            "pass a torch.nn.Module; use look(...) for one call of attention.",
        )
    layers = None if layers is None else _checked_layers(layers, model)
    wanted = parse_stats(stats)
    if rows is not None:
        wanted = parse_stats([*wanted, exact_rows(list(rows))])
    place = None if to is None else _unused(to)
    seen, index, inside = Seen(), [], []  # type: ignore[var-annotated]
    ran, count, heard, kept = False, 0, 0, 0

    def enter(name: str) -> Any:
        def hook(module: nn.Module, args: object) -> None:
            nonlocal ran, count
            ran = ran or not name
            if not inside:
                count = 0
            inside.append(name)

        return hook

    def leave(module: nn.Module, args: object, result: object) -> None:
        if inside:
            inside.pop()

    def hear(problem: Problem, inputs: Inputs) -> None:
        nonlocal count, heard, kept
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint computes again on the way back: the same call, heard before
        name, layer = (inside[-1] if inside else ""), count
        count += 1
        heard = max(heard, count)
        if layers is not None and not any(_means(which, layer, name) for which in layers):
            return
        # A checkpoint compares what is kept for the way back with what is kept when it computes
        # again. What the statistics keep is hidden from it, so that they are counted once.
        hidden = nullcontext() if transformed() else saved_tensors_hooks(_as_it_is, _as_it_is)
        with torch.set_grad_enabled(problem.grad), hidden:
            found = count_weights(problem, inputs, wanted).finish()
        if heads is not None:
            found = {n: _heads_of(result, heads, problem.H) for n, result in found.items()}
        kept += 1
        call = Call(layer, name, problem.describe(), found)
        if place is None:
            seen.calls.append(call)
            return
        file = f"{len(index):05d}.safetensors"
        save_file(_flat(found), place / file)
        index.append({"file": file, "layer": layer, "module": name, "question": call.question})
        (place / "index.json").write_text(json.dumps({"calls": index}, indent=1))

    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(enter(name)))
        hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        with listening(hear):
            yield seen
        if ran and not heard:
            raise BadValue(
                f"The {type(model).__name__} ran, and never asked clearhead for attention.",
                "watch sees attention calls that go through clearhead, in this thread and outside "
                "of compiled graphs.",
                'load it with attn_implementation="clearhead", build it from clearhead.nn, or '
                "watch it before torch.compile.",
            )
        if ran and not kept:
            calls = f"{heard} call{'s' * (heard != 1)}"
            warnings.warn(
                f"the {type(model).__name__} made {calls} in a run, none of layers={layers!r}",
                stacklevel=3,
            )
    finally:
        for hook in hooks:
            hook.remove()


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _checked_layers(layers: Iterable[int | str], model: nn.Module) -> list[int | str]:
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise BadType(
            f"layers is {layers!r}.",
            "layers is a list of numbers and of patterns for module names.",
            f"pass layers=[{layers!r}].",
        )
    names, checked = [name for name, _ in model.named_modules()], []
    for which in layers:
        if isinstance(which, str) and not fnmatch.filter(names, which):
            raise BadValue(
                f"layers has the pattern {which!r}, and no module has such a name.",
                "a pattern is matched against the whole name of a module, with * for any part.",
                f"the modules are {', '.join(names[1:9])}{', ...' if len(names) > 9 else ''}.",
            )
        number = which if isinstance(which, str) else whole(which)
        if number is None or (isinstance(number, int) and number < 0):
            raise BadValue(
                f"layers has {which!r}.",
                "a layer is the number of a call, counted from 0 in each run of the model, or a "
                "pattern for module names.",
                "pass numbers from 0 on, or strings such as '*.attention'.",
            )
        checked.append(number)
    return checked


def _means(which: int | str, layer: int, name: str) -> bool:
    return which == layer if isinstance(which, int) else fnmatch.fnmatchcase(name, which)


def _heads_of(result: Result, heads: Sequence[int], H: int) -> Result:
    for h in heads:
        if not -H <= h < H:
            raise BadValue(
                f"head {h} was asked for.",
                f"this layer has {H} query heads, numbered from 0.",
                f"pass heads from 0 to {H - 1}.",
            )
    picked = [h % H for h in heads]
    if isinstance(result, Top):
        return Top(*(x[:, picked] for x in result))
    if isinstance(result, dict):
        return {name: x[:, picked] for name, x in result.items()}
    return result[:, picked]


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


def _unused(to: str | Path) -> Path:
    made = folder(to, "statistics are", "pass another folder as to=.")
    if (made / "index.json").exists():
        raise BadValue(
            f"The folder {str(to)!r} holds what was seen before.",
            "what was seen is never written over.",
            "pass another folder as to=, or delete this one.",
        )
    return made
