"""What a look gives back: the output, and one attribute per statistic."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import BadValue
from ..problem.problem import Problem
from ..stats import Result, Top, each
from ..stats.parse import ALL_NAMES
from ..views.html.cells import cell, heads_of


class NotRequested(BadValue, AttributeError):
    """A statistic that is not in this look."""


class Look:
    """The output of attention and the statistics asked for beside it.

    `look.out` is the output; every statistic is an attribute under its name: `look.lse`,
    `look.topk.weights`, `look.topk.keys`, `look.mass["sink"]`. `look.names` lists them. Leading
    dimensions that the inputs did not have are not there.
    """

    out: Tensor
    names: tuple[str, ...]

    def __init__(self, problem: Problem, out: Tensor, found: Mapping[str, Result]):
        self.out = problem.shape_back(out)
        self.names = tuple(found)
        # In a graph for every length, the words would make one for each.
        compiling = torch.compiler.is_compiling()
        self._about = "a compiled call" if compiling else problem.describe()
        self._found = {name: each(x, problem.shape_back) for name, x in found.items()}

    def __getattr__(self, name: str) -> "Tensor | Top | dict[str, Tensor]":
        found = self.__dict__.get("_found", {})
        if name in found:
            return found[name]
        raise NotRequested(
            f"This look has no {name!r}.",
            f"a look holds what was asked for: {', '.join(['out', *found])}.",
            f"ask for it in stats=; there are {ALL_NAMES}.",
        )

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.names]

    def __repr__(self) -> str:
        table = self._rows()
        widths = [max(len(row[i]) for row in table) for i in range(2)]
        body = (f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in table)
        return "\n".join([f"look at {self._about}", *body])

    def _repr_html_(self) -> str:
        rows = [("statistic", "shape", "finite values"), *self._rows()]
        maps = self._found.get("map")
        pictures = ""
        if isinstance(maps, Tensor) and maps.numel():
            pictures = heads_of(maps)
        return cell(f"look at {self._about}", rows, pictures)

    def _rows(self) -> list[tuple[str, str, str]]:
        """Name, shape and summary of the output and of every statistic."""
        lines = [("out", self.out)]
        for name, result in self._found.items():
            if isinstance(result, Top):
                lines += [(name, result.weights)]
            elif isinstance(result, dict):
                lines += [(f"{name} {group}", part) for group, part in result.items()]
            else:
                lines += [(name, result)]
        return [(name, " x ".join(str(n) for n in x.shape), _summary(x)) for name, x in lines]


def _summary(x: Tensor) -> str:
    """Smallest, mean and largest of the finite numbers, and how many are not finite."""
    x = x.detach()
    finite = x[torch.isfinite(x)].double()
    if not x.numel():
        return "empty"
    parts = []
    if finite.numel():
        low, mean, high = float(finite.min()), float(finite.mean()), float(finite.max())
        parts.append(f"{low:.4g} to {high:.4g}, mean {mean:.4g}")
    if missing := x.numel() - finite.numel():
        parts.append(f"{missing} not finite")
    return ", ".join(parts)
