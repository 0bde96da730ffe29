"""Choose the heads of which a page has every step, and write these steps.

The script computes scores, weights and outputs from queries, keys and values, as `reference.steps`
does, so of most models a page has only the latter. A step that does not follow from them, such as
weights with a sink, is stored.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.functional.trace import Step, Trace, steps_at
from ...models.report import Head, Layer, Report
from ...models.report.opening import Opening, best_heads
from . import schema
from .document import encoded
from .steps import number_settings, step_data, trace_data

RELATIVE, ABSOLUTE = 1e-4, 1e-5  # errors of float32 sums, of a number and of the largest one


class Traced(NamedTuple):
    """Every step of a layer, as a layer of a report has them of some heads."""

    trace: Trace
    heads: range
    key_heads: int
    traced_heads: range


class ExactHeads(NamedTuple):
    """The heads of a layer with every step on the page, and the steps that the script computes."""

    heads: list[int]
    computed: set[str]


def exact_heads(report: Report, begin: Opening | None, most_bytes: int) -> list[ExactHeads]:
    """Return the heads of each layer with every step on the page: as many as fit, the clearest
    first."""
    chosen: list[list[int]] = [[] for _ in report.layers]
    groups: list[set[int]] = [set() for _ in report.layers]
    computed = [computed_steps(layer) for layer in report.layers]
    stored = [_bytes(*pair) for pair in zip(report.layers, computed, strict=True)]
    for at, head in dict.fromkeys((x.layer, x.head) for x in _ranked(report, begin)):
        layer = report.layers[at]
        if head not in layer.traced_heads:
            continue
        of_head, of_group = stored[at]
        group = _group(layer, head)
        cost = of_head + of_group * (group not in groups[at])
        if cost <= most_bytes:
            most_bytes -= cost
            chosen[at].append(head)
            groups[at].add(group)
    return [ExactHeads(sorted(x), steps) for x, steps in zip(chosen, computed, strict=True)]


def _ranked(report: Report, begin: Opening | None) -> Iterator[Head]:
    if begin is not None:
        yield begin.head
    for writer in report.writers:
        yield report[writer.layer, writer.head]
    yield from best_heads(report).values()
    yield from sorted(report.heads, key=lambda head: not head.roles)


def _bytes(layer: Layer, computed: set[str]) -> tuple[int, int]:
    """Return the bytes of the stored steps of a head, and of a key head."""
    sizes = {"h": 0, "g": 0}
    for step in layer.trace or ():
        axes = step.axes.split()
        letter = next((x for x in sizes if x in axes), None)
        if letter is not None and step.name not in computed:
            sizes[letter] += 4 * step.tensor.numel() // step.tensor.shape[axes.index(letter)]
    return sizes["h"], sizes["g"]


def _group(layer: Layer | Traced, head: int) -> int:
    """Return the key head that a head reads."""
    return head // (len(layer.heads) // layer.key_heads)


def computed_steps(layer: Layer | Traced) -> set[str]:
    """Return the names of the steps of a layer that the script can compute.

    They are those that come out the same, up to the rounding of float32.
    """
    trace = layer.trace
    if trace is None or not {"query", "key", "value"} <= set(trace.names):
        return set()
    x = {step.name: step.tensor.detach().double() for step in trace}
    groups = sorted({_group(layer, head) for head in layer.traced_heads})
    reads = torch.tensor([groups.index(_group(layer, head)) for head in layer.traced_heads])
    settings, computed, before = number_settings(trace), set(), x["query"]
    for step in trace:
        again = None
        if step.name == "scores":
            again = x["query"] @ x["key"].index_select(-3, reads.to(before.device)).mT
        elif step.name == "scaled":
            again = before * settings["scale"]
        elif step.name == "capped":
            again = settings["softcap"] * torch.tanh(before / settings["softcap"])
        elif step.name == "masked" and _spans(step) is not None:
            again = before.masked_fill(x["masked"] == -torch.inf, -torch.inf)
        elif step.name == "weights":
            again = before.softmax(-1).nan_to_num(0.0)
        elif step.name == "output":
            again = before @ x["value"].index_select(-3, reads.to(before.device))
        if again is not None and _is_alike(again, x[step.name]):
            computed.add(step.name)
        if "k" in step.axes and "q" in step.axes:
            before = x[step.name]
    return computed


def _is_alike(again: Tensor, stored: Tensor) -> bool:
    largest = float(stored.masked_fill(stored.isinf(), 0.0).abs().max())
    return torch.allclose(again, stored, rtol=RELATIVE, atol=ABSOLUTE * largest)


def _spans(masked: Step) -> Tensor | None:
    """Return the first key that each query may look at, and the one after the last, (2, Tq). None
    if these are not all keys in between, or not the same for all heads."""
    allowed = (masked.tensor != -torch.inf).flatten(0, -3)
    keys = torch.arange(allowed.shape[-1], device=allowed.device)
    first = allowed[0].int().argmax(-1)
    after = first + allowed[0].sum(-1)
    spans = (keys >= first[:, None]) & (keys < after[:, None])
    return torch.stack([first, after]) if bool((allowed == spans).all()) else None


def steps_of_heads(layer: Layer | Traced, exact: ExactHeads) -> list[schema.Step]:
    """Return the steps of some of the traced heads as data for the script."""
    assert layer.trace is not None
    heads, computed = exact
    full = {"h": len(layer.heads), "g": layer.key_heads}
    traced = {"h": list(layer.traced_heads)}
    traced["g"] = sorted({_group(layer, head) for head in traced["h"]})
    chosen = {"h": heads, "g": sorted({_group(layer, head) for head in heads})}
    indices = {letter: [traced[letter].index(x) for x in own] for letter, own in chosen.items()}
    steps = []
    for step, cut in zip(layer.trace, steps_at(layer.trace, indices), strict=True):
        axes, is_computed = step.axes.split(), step.name in computed
        data = step_data(replace(cut, tensor=cut.tensor[..., :0]) if is_computed else cut, None, [])
        data["shape"] = [(x, full.get(x, size)) for x, size in zip(axes, step.shape, strict=True)]
        data["kept"] = {letter: own for letter, own in chosen.items() if letter in axes}
        if is_computed:
            data["computed"] = True
            del data["stored"], data["kind"], data["data"]
            if step.name == "masked":
                data["spans"] = encoded(_spans(step), "u4")  # type: ignore[arg-type]  # because it is computed
        steps.append(data)
    return steps


def every_step(trace: Trace) -> schema.Layer:
    """Return a trace as data for the script, with every step of every head and query, however long
    the text is."""
    data, heads = trace_data(trace), range(trace.step("weights").tensor.shape[-3])
    if data["block"] is None:
        return data
    layer = Traced(trace, heads, data["size"].get("g", len(heads)), heads)
    steps = steps_of_heads(layer, ExactHeads([*heads], computed_steps(layer)))
    return {**data, "block": None, "kept": [*range(data["size"]["q"])], "steps": steps}
