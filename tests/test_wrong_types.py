"""Public calls that take a path, a result or a list raise clearhead's error for anything else."""

from pathlib import Path

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead import demo, hf, views
from clearhead.core.errors import AttentionError, BadType, BadValue
from clearhead.distributed import balanced, by_document, contiguous, head_tail
from clearhead.views import html, plot, text

q = torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(0))
trace = ch.explain(q, q, q)
layer = ch.nn.SelfAttention(4, 4)
teller = demo.load()


def watched(to):
    with ch.watch(layer, to=to):
        layer(q[0, 0])


PATHS = {
    "Survey.open": ch.Survey.open,
    "load": ch.load,
    "save": trace.save,
    "Checkpoint": hf.Checkpoint,
    "watch": watched,
    "effects": lambda path: ch.effects(
        layer, q[0, :1], lambda out: out.sum(), to=path, progress=False
    ),
    "survey": lambda path: ch.survey(teller, ["A queen slept."], out=path),
    "write_page": lambda path: html.write_page(trace, path),
    "plot.save": lambda path: plot.save(plot.heads(trace), path),
    "demo.load": demo.load,
}
RESULTS = {
    "page": html.page,
    "write_report": lambda report: html.write_report(report, "page.html"),
    "write": lambda report: views.write(report, "folder"),
    "to_json": text.to_json,
    "show": text.show,
    **{name: getattr(plot, name) for name in plot.__all__ if name not in ("can_draw", "suffix_of")},
    "image": lambda report: plot.image(report, 0, 0),
    "words": lambda report: plot.words(report, 0),
    "head": lambda report: plot.head(report, 0, 0),
    "save": lambda figure: plot.save(figure, "figure.png"),
    "balanced": lambda mask: balanced(mask, 8, 2),
    "by_document": lambda ids: by_document([ids, None], 2),
}
LISTS = {
    "stats": lambda some: ch.look(q, q, q, stats=some),
    "layers": lambda some: ch.edits.ablate(layers=some),
    "exact_rows": ch.exact_rows,
    "edits": lambda some: ch.intervene(layer, some).__enter__(),
    "tokens": lambda some: ch.explain(q, q, q, tokens=some),
    "heads": lambda some: text.show(trace, heads=some),
    "texts": lambda some: ch.survey(teller, some, out="folder"),
}
COUNTS = {
    "most": lambda n: ch.matrix(q, q).to_dense(most=n),
    "length": lambda n: contiguous(n, 2),
    "world": lambda n: head_tail(8, n),
    "activation": lambda name: ch.nn.FeedForward(8, activation=name),
    "of": lambda name: ch.edits.patch(ch.Recording(), of=name, layers=[0]),
    "which": ch.Effects("loss", 0.0, ()).grid,
}
WRONG = [3, 2.5, True, b"name", ["name"], {"a": 1}, object(), torch.zeros(2), np.zeros(2), len, q]


@pytest.mark.parametrize("name", PATHS)
def test_paths(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for wrong in WRONG:
        with pytest.raises(BadType):
            PATHS[name](wrong)
    with pytest.raises(BadValue):
        PATHS[name]("a\0b")
    assert not [*Path().iterdir()]


@pytest.mark.parametrize("name", RESULTS)
def test_results(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for wrong in [None, "name", *WRONG]:
        with pytest.raises(BadType):
            RESULTS[name](wrong)
    assert not [*Path().iterdir()]


@pytest.mark.parametrize("name", LISTS)
def test_a_tensor_without_dimensions_is_no_list(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadType):
        LISTS[name](torch.tensor(1))


@pytest.mark.parametrize("name", COUNTS)
def test_numbers_and_names(name):
    for wrong in (None, "name", 2.5, object(), [1]):
        with pytest.raises(AttentionError):
            COUNTS[name](wrong)
